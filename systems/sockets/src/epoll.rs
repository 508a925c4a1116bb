//! `epoll` over descriptors of ours and of the kernel's.
//!
//! Every descriptor stays registered with the kernel's own set. One of ours is registered there
//! for its doorbells, with a mark and its number as the kernel's `data`; the program's mask and
//! data are kept here. Everything else passes with the program's own data.
//!
//! A wait looks at the rings; with nothing there it spins, then arms every entry and sleeps in the
//! kernel. Level-triggered entries report what the rings say; edge-triggered ones report what has
//! changed since they last did; one-shot entries fall silent here, not in the kernel.
//!
//! A TCP socket that is not connected yet is registered as one of ours may become: programs put
//! sockets into a set before they connect them. A set within a set is an entry, too: it is
//! readable when anything in it is due.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use beeline_os::barrier;

use crate::connection::{Connection, find};
use crate::kernel::{self, Errno, Outcome};
use crate::poll::{arm, readiness, time};
use crate::table;
use crate::wait::Budget;

/// Sets with larger numbers are left to the kernel, with everything in them.
const NUMBERS: usize = 1 << 14;
/// Upper half of the kernel's `data` of entries of ours. No pointer and no small number has it.
const MARK: u64 = 0xbee1_50c7;
/// Every so many waits that the rings answered, the kernel is asked as well.
const KERNEL_TURN: u32 = 16;

const IN: u32 = 0x001;
const OUT: u32 = 0x004;
const ERR: u32 = 0x008;
const HUP: u32 = 0x010;
const RDHUP: u32 = 0x2000;
const EXCLUSIVE: u32 = 1 << 28;
const WAKEUP: u32 = 1 << 29;
const ONESHOT: u32 = 1 << 30;
const EDGE: u32 = 1 << 31;
/// What the kernel allows together with `EPOLLEXCLUSIVE`.
const WITH_EXCLUSIVE: u32 = IN | OUT | ERR | HUP | WAKEUP | EDGE | EXCLUSIVE;
/// Sets within sets, at most; the kernel allows no more.
const DEEPEST: u32 = 5;

#[derive(Debug)]
struct Entry {
    fd: RawFd,
    wanted: u32,
    data: u64,
    /// As the kernel has it.
    kernel_mask: u32,
    /// Counted among the connection's watchers.
    counted: bool,
    silent: bool,
    /// A set: asked for what is due in it, instead of a ring.
    is_set: bool,
    /// Edge-triggered: report what there is, once, as after a fresh registration.
    fresh: bool,
    seen_tail: u64,
    seen_ends: u32,
    /// Place in the answer of the wait under way, and which wait that is.
    answered: (u64, usize),
}

#[derive(Debug, Default)]
struct Inner {
    entries: Vec<Entry>,
    places: HashMap<RawFd, usize>,
    /// Where the next look begins, so that nobody starves behind a full answer.
    turn: usize,
    waits: u64,
}

/// One epoll set.
#[derive(Debug, Default)]
struct Set {
    inner: Mutex<Inner>,
    budget: Budget,
    /// Entries of ours; 0: the kernel's answer is the whole answer.
    ours: AtomicU32,
    /// Waits until the kernel is asked, too.
    until_kernel: AtomicU32,
}

static SETS: [AtomicPtr<Set>; NUMBERS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; NUMBERS];
static HIGHEST: AtomicU32 = AtomicU32::new(0);

/// The largest number of a set we know.
#[must_use]
pub fn highest() -> RawFd {
    RawFd::try_from(HIGHEST.load(Ordering::Acquire)).unwrap_or(RawFd::MAX)
}

fn lock(set: &Set) -> MutexGuard<'_, Inner> {
    set.inner.lock().unwrap_or_else(PoisonError::into_inner)
}

fn known(number: RawFd) -> Option<&'static Set> {
    let slot = SETS.get(usize::try_from(number).ok()?)?;
    // Acquire with the Release in `made`. SAFETY: sets are never freed.
    unsafe { slot.load(Ordering::Acquire).as_ref() }
}

/// The set of this number, made if need be. Sets stay for the next one of the same number.
fn made(number: RawFd) -> Option<&'static Set> {
    if let Some(set) = known(number) {
        return Some(set);
    }
    let slot = SETS.get(usize::try_from(number).ok()?)?;
    let fresh = Box::into_raw(Box::<Set>::default());
    let null = std::ptr::null_mut();
    // Release with the Acquire in `known`.
    if slot.compare_exchange(null, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: ours alone: it was not put into the slot.
        drop(unsafe { Box::from_raw(fresh) });
    }
    HIGHEST.fetch_max(u32::try_from(number).unwrap_or(0), Ordering::AcqRel);
    known(number)
}

impl Inner {
    fn remove(&mut self, fd: RawFd) -> Option<Entry> {
        let place = self.places.remove(&fd)?;
        let entry = self.entries.swap_remove(place);
        if let Some(moved) = self.entries.get(place) {
            self.places.insert(moved.fd, place);
        }
        Some(entry)
    }

    fn entry(&mut self, fd: RawFd) -> Option<&mut Entry> {
        let place = *self.places.get(&fd)?;
        self.entries.get_mut(place)
    }
}

fn watch(entry: &mut Entry, connection: &Connection) {
    if !entry.counted {
        entry.counted = true;
        connection.segment.own().sharing.watchers.fetch_add(1, Ordering::SeqCst);
    }
}

fn unwatch(entry: &Entry) {
    if let (true, Some(connection)) = (entry.counted, table::ours(entry.fd)) {
        connection.segment.own().sharing.watchers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What the kernel is asked to report for an entry that wants `wanted`.
fn kernel_mask(wanted: u32, connection: Option<&Connection>) -> u32 {
    let kept = wanted & !(ONESHOT | EXCLUSIVE);
    let Some(connection) = connection else { return kept };
    let by_ring = connection.is_bound_for_ring();
    (if by_ring { kept & !OUT } else { kept }) | IN | RDHUP
}

fn event(mask: u32, fd: RawFd) -> libc::epoll_event {
    let number = u64::from(u32::try_from(fd).unwrap_or(0));
    libc::epoll_event { events: mask, u64: MARK << 32 | number }
}

/// `epoll_ctl`. `None`: nothing of ours, ask the kernel.
pub fn control(
    number: RawFd,
    operation: i32,
    fd: RawFd,
    wanted: Option<libc::epoll_event>,
) -> Option<Outcome> {
    let connection = find(fd);
    let adds = operation == libc::EPOLL_CTL_ADD;
    let mut connecting = matches!(table::kind(fd), table::Kind::Connecting);
    let is_set = adds && connection.is_none() && !connecting && is_epoll(fd);
    if adds && connection.is_none() && !connecting && !is_set && is_yet_to_connect(fd) {
        table::set_connecting(fd);
        connecting = true;
    }
    let plain = connection.is_none() && !connecting && !is_set;
    if plain && known(number).is_none_or(|set| !lock(set).places.contains_key(&fd)) {
        if adds {
            table::set_watched_plain(fd);
        }
        return None;
    }
    let set = made(number)?;
    let mut inner = lock(set);
    if operation == libc::EPOLL_CTL_DEL {
        let outcome = kernel::epoll_control(number, operation, fd, None);
        if let Some(entry) = inner.remove(fd) {
            unwatch(&entry);
            set.ours.store(u32::try_from(inner.entries.len()).unwrap_or(0), Ordering::Release);
        }
        return Some(outcome);
    }
    let wanted = wanted?;
    let refused = if adds {
        wanted.events & EXCLUSIVE != 0 && wanted.events & !WITH_EXCLUSIVE != 0
    } else {
        // The kernel's entry is none of its own kind: it would not refuse.
        let old = inner.entry(fd).map_or(0, |entry| entry.wanted);
        (wanted.events | old) & EXCLUSIVE != 0
    };
    if refused {
        return Some(Err(Errno(libc::EINVAL)));
    }
    let is_set = is_set || inner.entry(fd).is_some_and(|entry| entry.is_set);
    let mask = kernel_mask(wanted.events, connection);
    let outcome = kernel::epoll_control(number, operation, fd, Some(event(mask, fd)));
    if outcome.is_err() {
        return Some(outcome);
    }
    let mut entry = Entry {
        fd,
        wanted: wanted.events,
        data: wanted.u64,
        kernel_mask: mask,
        counted: inner.entry(fd).is_some_and(|entry| entry.counted),
        silent: false,
        is_set,
        fresh: true,
        seen_tail: 0,
        seen_ends: 0,
        answered: (0, 0),
    };
    if let Some(connection) = connection {
        watch(&mut entry, connection);
    }
    if let Some(old) = inner.entry(fd) {
        *old = entry;
    } else {
        let place = inner.entries.len();
        inner.entries.push(entry);
        inner.places.insert(fd, place);
    }
    set.ours.store(u32::try_from(inner.entries.len()).unwrap_or(0), Ordering::Release);
    Some(outcome)
}

/// `fd` is about to be closed: it leaves every set, and if it is a set, everything leaves it.
pub fn forget(fd: RawFd) {
    for number in 0..=HIGHEST.load(Ordering::Acquire) {
        let Ok(number) = RawFd::try_from(number) else { continue };
        let Some(set) = known(number) else { continue };
        if set.ours.load(Ordering::Acquire) == 0 {
            continue;
        }
        let mut inner = lock(set);
        if number == fd {
            inner.entries.iter().for_each(unwatch);
            *inner = Inner::default();
        } else if let Some(entry) = inner.remove(fd) {
            unwatch(&entry);
        }
        set.ours.store(u32::try_from(inner.entries.len()).unwrap_or(0), Ordering::Release);
    }
}

/// True for an epoll set, ours or not.
fn is_epoll(fd: RawFd) -> bool {
    known(fd).is_some_and(|set| set.ours.load(Ordering::Acquire) != 0) || kernel::is_epoll(fd)
}

/// True for a TCP socket that `connect` may be called on.
fn is_yet_to_connect(fd: RawFd) -> bool {
    let option = |name| kernel::option(fd, libc::SOL_SOCKET, name, 0);
    option(libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP)
        && option(libc::SO_ACCEPTCONN) == Ok(0)
        && matches!(kernel::name(fd, true), Err(Errno(libc::ENOTCONN)))
}

/// True when `fd` is a set with entries of ours: `poll` and other sets have to ask [`is_due`].
#[must_use]
pub fn is_mixed(fd: RawFd) -> bool {
    known(fd).is_some_and(|set| set.ours.load(Ordering::Acquire) != 0)
}

/// True when the rings have news for the set `fd`, or for a set in it.
#[must_use]
pub fn is_due(fd: RawFd) -> bool {
    is_due_within(fd, DEEPEST)
}

fn is_due_within(fd: RawFd, depth: u32) -> bool {
    is_mixed(fd) && known(fd).is_some_and(|set| any_due_within(&mut lock(set), depth))
}

/// Arms everything in the set `fd`, for who is about to sleep on it. True when somebody else
/// watches one of its connections.
pub fn arm_all(fd: RawFd) -> bool {
    arm_within(fd, DEEPEST)
}

fn arm_within(fd: RawFd, depth: u32) -> bool {
    let Some(set) = known(fd).filter(|_| depth > 0) else { return false };
    arm_entries(fd, &mut lock(set), depth)
}

fn arm_entries(number: RawFd, inner: &mut Inner, depth: u32) -> bool {
    let mut shared = false;
    for entry in &mut inner.entries {
        if entry.silent {
            continue;
        }
        if entry.is_set {
            shared |= arm_within(entry.fd, depth - 1);
            continue;
        }
        let Some(connection) = table::ours(entry.fd) else { continue };
        watch(entry, connection);
        adjust(number, entry, Some(connection));
        arm(connection, true, entry.wanted & OUT != 0 && !connection.is_writable());
        shared |= connection.segment.own().sharing.watchers.load(Ordering::SeqCst) > 1;
    }
    shared
}

/// Asks the kernel for what is to be heard of the entry now: it changes when a connection becomes
/// ours, when it leaves the kernel's stream, and when a one-shot entry has spoken.
fn adjust(number: RawFd, entry: &mut Entry, connection: Option<&Connection>) {
    // Hang-ups are told whatever is asked for; of a silent entry, once.
    let mask = if entry.silent { EDGE } else { kernel_mask(entry.wanted, connection) };
    if mask != entry.kernel_mask {
        let event = event(mask, entry.fd);
        if kernel::epoll_control(number, libc::EPOLL_CTL_MOD, entry.fd, Some(event)).is_ok() {
            entry.kernel_mask = mask;
        }
    }
}

/// What a set in a set reports now.
fn due_of_set(entry: &mut Entry, report: bool, depth: u32) -> u32 {
    if entry.silent || entry.wanted & IN == 0 || depth == 0 {
        return 0;
    }
    let now = is_due_within(entry.fd, depth - 1);
    let news = now && (entry.wanted & EDGE == 0 || entry.fresh || entry.seen_ends == 0);
    if report {
        entry.fresh = false;
        entry.seen_ends = u32::from(now);
    }
    if news { IN } else { 0 }
}

fn due_of(entry: &mut Entry, report: bool, depth: u32) -> u32 {
    if entry.is_set {
        return due_of_set(entry, report, depth);
    }
    table::ours(entry.fd).map_or(0, |connection| due(entry, connection, report))
}

/// What an entry reports now; 0 for nothing. `report` false only looks.
fn due(entry: &mut Entry, connection: &Connection, report: bool) -> u32 {
    if entry.silent {
        return 0;
    }
    #[expect(clippy::cast_sign_loss, reason = "poll's bits are small and positive")]
    let all = u32::from(readiness(connection) as u16);
    let now = all & (entry.wanted | ERR | HUP);
    if now == 0 || entry.wanted & EDGE == 0 {
        return now;
    }
    // A hint only: the other end's own count of what it wrote.
    let tail = connection.segment.other().sending.tail.load(Ordering::Relaxed);
    // An end is news for who did not ask for that bit, too: it is readable.
    let ends = all & (RDHUP | HUP | ERR);
    let news = entry.fresh
        || entry.wanted & IN != 0 && tail != entry.seen_tail
        || ends & !entry.seen_ends != 0
        || now & OUT != 0 && connection.was_full.load(Ordering::Relaxed);
    if !news {
        return 0;
    }
    if report {
        entry.fresh = false;
        entry.seen_tail = tail;
        entry.seen_ends |= ends;
        if now & OUT != 0 {
            connection.was_full.store(false, Ordering::Relaxed);
        }
    }
    now
}

/// Where the answers of one wait go.
struct Answers<'a> {
    events: &'a mut [libc::epoll_event],
    count: usize,
    wait: u64,
}

impl Answers<'_> {
    fn is_full(&self) -> bool {
        self.count == self.events.len()
    }

    fn add(&mut self, entry: &mut Entry, bits: u32) {
        if entry.answered.0 == self.wait {
            if let Some(event) = self.events.get_mut(entry.answered.1) {
                event.events |= bits;
            }
            return;
        }
        let Some(event) = self.events.get_mut(self.count) else { return };
        *event = libc::epoll_event { events: bits, u64: entry.data };
        entry.answered = (self.wait, self.count);
        self.count += 1;
        entry.silent |= entry.wanted & ONESHOT != 0;
    }
}

/// Adds what the rings say.
fn look(inner: &mut Inner, answers: &mut Answers<'_>) {
    let count = inner.entries.len();
    for step in 0..count {
        if answers.is_full() {
            inner.turn = inner.turn.wrapping_add(step);
            return;
        }
        let place = (inner.turn.wrapping_add(step)) % count;
        let Some(entry) = inner.entries.get_mut(place) else { continue };
        let bits = due_of(entry, true, DEEPEST);
        if bits != 0 {
            answers.add(entry, bits);
        }
    }
}

fn any_due(inner: &mut Inner) -> bool {
    any_due_within(inner, DEEPEST)
}

fn any_due_within(inner: &mut Inner, depth: u32) -> bool {
    inner.entries.iter_mut().any(|entry| due_of(entry, false, depth) != 0)
}

/// What a report of the kernel's held, besides what the program is to hear.
#[derive(Default)]
struct Report {
    /// News of what is not ours.
    plain: bool,
    /// Doorbells, or the end of a stream of doorbells.
    news: bool,
}

/// Takes what the kernel reported at the end of the answers, and puts in its place what the
/// program is to hear.
fn translate(
    number: RawFd,
    inner: &mut Inner,
    answers: &mut Answers<'_>,
    reported: usize,
) -> Report {
    let from = answers.count;
    let raw: Vec<libc::epoll_event> =
        answers.events.get(from..from + reported).unwrap_or_default().to_vec();
    let mut report = Report::default();
    for event in raw {
        let (bits, data) = (event.events, event.u64);
        if data >> 32 != MARK {
            if let Some(place) = answers.events.get_mut(answers.count) {
                *place = event;
                answers.count += 1;
                report.plain = true;
            }
            continue;
        }
        let Ok(fd) = RawFd::try_from(data & u64::from(u32::MAX)) else { continue };
        let Some(entry) = inner.entry(fd) else { continue };
        let connection = find(fd);
        if let Some(connection) = connection {
            watch(entry, connection);
        }
        let mut heard = bits;
        if let Some(connection) = connection {
            if connection.kernel_bytes_left().is_none() {
                connection.listen(fd, 1);
                heard &= !(IN | RDHUP | HUP | ERR);
                report.news = true;
            } else if bits & (RDHUP | HUP | ERR) != 0 {
                connection.look_after_peer(fd);
            }
            if connection.is_bound_for_ring() {
                heard &= !OUT;
            }
        }
        adjust(number, entry, connection);
        let heard = heard & (entry.wanted | ERR | HUP);
        if heard != 0 && !entry.silent {
            answers.add(entry, heard);
        }
    }
    report
}

/// `epoll_wait` and its kin. `None`: nothing of ours in the set, ask the kernel.
pub fn wait(
    number: RawFd,
    events: &mut [libc::epoll_event],
    timeout: Option<Duration>,
    mask: Option<&libc::sigset_t>,
) -> Option<Outcome> {
    let set = known(number)?;
    if set.ours.load(Ordering::Acquire) == 0 || events.is_empty() {
        return None;
    }
    Some(wait_mixed(number, set, events, timeout, mask))
}

fn wait_mixed(
    number: RawFd,
    set: &Set,
    events: &mut [libc::epoll_event],
    timeout: Option<Duration>,
    mask: Option<&libc::sigset_t>,
) -> Outcome {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut slept = false;
    loop {
        let mut inner = lock(set);
        inner.waits += 1;
        let mut answers = Answers { count: 0, wait: inner.waits, events: &mut *events };
        look(&mut inner, &mut answers);
        let turn = set.until_kernel.load(Ordering::Relaxed);
        let ask = turn == 0 || answers.count == 0 && timeout == Some(Duration::ZERO);
        if ask && !answers.is_full() {
            let from = answers.count;
            let rest = answers.events.get_mut(from..).unwrap_or_default();
            let reported = kernel::epoll_wait(number, rest, Some(time(Duration::ZERO)), mask)?;
            let Report { plain, .. } = translate(number, &mut inner, &mut answers, reported);
            // Where the kernel has news of others, it is asked each time; else now and then.
            set.until_kernel.store(if plain { 0 } else { KERNEL_TURN }, Ordering::Relaxed);
            look(&mut inner, &mut answers);
        } else {
            set.until_kernel.store(turn.saturating_sub(1), Ordering::Relaxed);
        }
        let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if answers.count > 0 || late && (slept || timeout == Some(Duration::ZERO)) {
            return Ok(answers.count);
        }
        drop(inner);
        if set.budget.spin(|| any_due(&mut lock(set))) {
            continue;
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let began = Instant::now();
        let count = sleep(number, set, events, left, mask)?;
        set.budget.learn(began.elapsed());
        slept = true;
        if count > 0 {
            return Ok(count);
        }
    }
}

/// Arms everything, sleeps in the kernel, and answers with what woke us.
fn sleep(
    number: RawFd,
    set: &Set,
    events: &mut [libc::epoll_event],
    timeout: Option<Duration>,
    mask: Option<&libc::sigset_t>,
) -> Outcome {
    let shared;
    {
        let mut inner = lock(set);
        shared = arm_entries(number, &mut inner, DEEPEST);
        barrier::heavy();
        if any_due(&mut inner) {
            return Ok(0);
        }
    }
    // As in `poll`: with other watchers we look by the clock, too.
    let bound = if shared {
        Some(timeout.unwrap_or(Duration::MAX).min(Duration::from_millis(1)))
    } else {
        timeout
    };
    let reported = kernel::epoll_wait(number, events, bound.map(time), mask)?;
    let mut inner = lock(set);
    inner.waits += 1;
    let mut answers = Answers { count: 0, wait: inner.waits, events };
    let report = translate(number, &mut inner, &mut answers, reported);
    if report.plain {
        set.until_kernel.store(0, Ordering::Relaxed);
    }
    look(&mut inner, &mut answers);
    let count = answers.count;
    drop(inner);
    if count == 0 && reported > 0 && (shared || !report.news) {
        // A doorbell that is left to another watcher would wake us again at once, and so would
        // bytes in the kernel's stream that the program does not ask for.
        let _ = kernel::pause(1);
    }
    Ok(count)
}

/// In the child, after `fork`: its copies of the sets are not counted as watchers until it waits
/// on one.
pub fn after_fork_in_child() {
    for slot in &SETS[..=HIGHEST.load(Ordering::Acquire) as usize] {
        // SAFETY: sets are never freed.
        let Some(set) = (unsafe { slot.load(Ordering::Acquire).as_ref() }) else { continue };
        // A lock that another thread of the parent held is not ours to wait for.
        if let Ok(mut inner) = set.inner.try_lock() {
            inner.entries.iter_mut().for_each(|entry| entry.counted = false);
        }
    }
}
