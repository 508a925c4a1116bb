//! `epoll` over descriptors of ours and of the kernel's.
//!
//! Every descriptor stays registered with the kernel's own set. One of ours is registered there
//! for its doorbells, with a mark and its number as the kernel's `data`; the program's mask and
//! data are kept here. Everything else passes with the program's own data.
//!
//! A wait looks at the rings of the entries that are hot ([`set`] tells which); with nothing there
//! it spins, then arms them, lets go of those that still have nothing, and sleeps in the kernel.
//! Level-triggered entries report what the rings say; edge-triggered ones report what has
//! changed since they last did; one-shot entries fall silent here, not in the kernel.
//!
//! A TCP socket that is not connected yet is registered as one of ours may become: programs put
//! sockets into a set before they connect them. A set within a set is an entry, too: it is
//! readable when anything in it is due, and always hot.
//!
//! # Who sleeps, and who wakes them
//!
//! A thread sleeps in the kernel's wait on the set. Each kind of news is published by one store, and
//! whoever makes it looks, behind a fence, for a sign of the sleeper; the sleeper gives that sign,
//! fences, and looks for the news. So at least one of the two sees the other.
//!
//! | news | store | fence, then load of who makes it | store, fence, then load of the sleeper | how it wakes |
//! | --- | --- | --- | --- | --- |
//! | bytes, or `finished` | the ring's header, `finished` | light (the sleeper's `membarrier`, or a full one), `receive_armed` | `receive_armed`, heavy, the ring | a byte in the kernel's stream |
//! | the same, at an entry with a place | the bit on the board | full, the board's `sleep` | `sleep`, heavy, the bits | the same, once for a name |
//! | room, where a set asks for it | `consumed` | the same, `send_armed` | `send_armed`, heavy, `consumed` | the same |
//! | room, where a send found none | `consumed` | the same, `send_armed` | the sending thread: `was_full`, `send_armed`, heavy, `consumed` | the same |
//! | the other end's death or close | the kernel's | | | the kernel's end of stream |
//! | an entry added or changed | the entry, under the set's lock; `ours` | full, `asleep` | `asleep`, full, the lock, the entries; or `ours`, for who sleeps on a set without one of ours | the kernel reports room, which there always is |
//! | a socket that became ours | the table | full, `ASLEEP` | `ASLEEP`, full, the lock, the table | the same |
//! | a doorbell swallowed beside the set, `shutdown` | the stir | full, `ASLEEP` | `ASLEEP`, full, the stirs | the same |
//! | another wait leaves the set, with hot entries nobody armed | none | `asleep`, under the lock; then it arms them as a sleeper does, and looks | `asleep`, full, the lock | the same |
//!
//! Doorbells stay in the kernel's stream, and keep it readable, until somebody swallows them. A
//! wait swallows those of its own set's entries when nobody else watches, and heats the entry in
//! the same turn, under the lock. Any other call of this process swallows when only its own sets
//! watch and none of its threads sleeps, and stirs *afterwards*: a set that armed and cooled the entry
//! in between hears of it in its next turn, and one that sleeps by then is woken. Where another
//! process watches the same end nothing is swallowed, and everybody looks by the clock, too.
//! Where the other end's doorbells do not come (`mute`), or may lie behind bytes that the program
//! does not ask for, waits look by the clock as well.

mod arming;
mod fork;
mod lock;
mod numbers;
mod places;
mod set;
mod sleep;
mod told;

use std::os::fd::RawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};

use beeline_os::barrier;

use crate::connection::{Connection, Heard, look as look_up};
use crate::introduce;
use crate::kernel::{self, Errno, Outcome};
use crate::poll::{arm, readiness};
use crate::table;
use crate::wait::Budget;
use crate::young;

pub use arming::arm_all;
use arming::{Arming, arm_and_cool, arm_within};
pub use fork::{after_fork_in_child, after_fork_in_parent, before_fork, shared};
use lock::lock;
pub use numbers::{created, duplicate, highest};
use numbers::{each_set, each_slot, forget_copy, known, made};
pub use set::stir;
use set::{Entry, Inner};
pub use sleep::{Polling, sleeps_plainly, wait, wakes_plainly};
pub(crate) use told::renewed;
pub use told::{became_ours, kick};

/// Upper half of the kernel's `data` of entries of ours. No pointer and no small number has it.
const MARK: u64 = 0xbee1_50c7;

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

/// One epoll set.
#[derive(Debug, Default)]
struct Set {
    inner: Mutex<Inner>,
    budget: Budget,
    /// Entries of ours; 0: the kernel's answer is the whole answer.
    ours: AtomicU32,
    /// Waits until the kernel is asked, too.
    until_kernel: AtomicU32,
    /// Threads that sleep on it.
    asleep: AtomicU32,
    /// It is in another set, or was polled: threads may sleep on it that are not counted here.
    outer: AtomicBool,
    /// Further numbers that lead here: [`duplicate`].
    copies: AtomicU32,
    /// Whether a parent has it, too: see `fork`.
    whose: AtomicU8,
}

impl Set {
    /// True when a thread may sleep on it. Asked under its lock.
    fn may_be_slept_on(&self) -> bool {
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::SeqCst) > 0 || self.outer.load(Ordering::SeqCst)
    }

    /// Counts the entries of ours, and what the kernel has of those that were. Under its lock.
    fn count(&self, inner: &Inner) {
        let count = u32::try_from(inner.len_with_retired()).unwrap_or(u32::MAX);
        if self.ours.load(Ordering::Relaxed) != count {
            self.ours.store(count, Ordering::SeqCst);
        }
    }
}

/// Threads of this process that sleep on any set.
static ASLEEP: AtomicU32 = AtomicU32::new(0);

/// True when no thread of this process sleeps on a set: a doorbell may be swallowed on behalf of
/// this process's sets, and a [`stir`] is enough to tell them.
#[must_use]
pub fn nobody_sleeps() -> bool {
    fence(Ordering::SeqCst);
    ASLEEP.load(Ordering::SeqCst) == 0
}

/// How many entries the next wait on this set looks at; 0 for a set we do not know.
#[must_use]
pub fn hot(number: RawFd) -> usize {
    known(number).map_or(0, |set| lock(set).hot())
}

/// Counts the entry among `connection`'s watchers. The one that it was counted with before has moved, and is
/// nobody's any more.
fn watch(entry: &mut Entry, connection: &Connection) {
    if entry.counted != connection.number {
        entry.counted = connection.number;
        connection.sets.fetch_add(1, Ordering::SeqCst);
        connection.segment.own().sharing.watchers.fetch_add(1, Ordering::SeqCst);
    }
}

/// Counts it no more, unless its connection has [moved](crate::anew) since.
fn unwatch(entry: &Entry) {
    if let Some(connection) = table::ours(entry.fd)
        && connection.number == entry.counted
    {
        connection.segment.own().sharing.watchers.fetch_sub(1, Ordering::SeqCst);
        connection.sets.fetch_sub(1, Ordering::SeqCst);
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
    let connection = look_up(fd);
    let adds = operation == libc::EPOLL_CTL_ADD;
    if adds && fork::is_kernels_for_parents_sake(number, fd) {
        return None;
    }
    let kind = table::kind(fd);
    let young = matches!(kind, table::Kind::Young);
    if adds && young && !introduce::is_candidate(fd) {
        young::leave_to_kernel(fd);
        table::set_watched_plain(fd);
        return None;
    }
    let mut connecting = young || matches!(kind, table::Kind::Connecting);
    let is_set = adds && connection.is_none() && !connecting && is_epoll(fd);
    if adds && connection.is_none() && !connecting && !is_set && is_yet_to_connect(fd) {
        table::set_connecting(fd);
        connecting = true;
    }
    let plain = connection.is_none() && !connecting && !is_set;
    if plain && known(number).is_none_or(|set| !lock(set).contains(fd)) {
        if adds {
            table::set_watched_plain(fd);
        }
        return None;
    }
    let Some(set) = made(number) else {
        // A number that we have no place for: what never left the kernel stays there, and nothing else is heard of.
        if connection.is_some_and(|ours| !ours.stay_with_kernel(fd)) {
            return Some(Err(Errno(libc::ENOMEM)));
        }
        young::leave_to_kernel(fd);
        return None;
    };
    if is_set && let Some(inner) = made(fd) {
        // Before the other set's entries are looked at: who adds to it from now on wakes.
        inner.outer.store(true, Ordering::SeqCst);
    }
    let mut inner = lock(set);
    // Of one that the kernel says nothing more about than that there are doorbells.
    let settled = connection.filter(|ours| ours.is_settled());
    if !adds && forget_retired(number, set, &mut inner, fd) {
        return Some(Err(Errno(libc::ENOENT)));
    }
    if operation == libc::EPOLL_CTL_DEL {
        if let Some(connection) = settled.filter(|ours| ours.is_alone())
            && let Some(entry) = inner.entry(fd)
        {
            unwatch(entry);
            inner.retire(fd, connection.number);
            // Its doorbells may be swallowed from now on, and with them one that others counted on.
            sleep::leave_armed(number, set, &mut inner);
            return Some(Ok(0));
        }
        let outcome = kernel::epoll_control(number, operation, fd, None);
        if let Some(entry) = inner.remove(fd) {
            unwatch(&entry);
            set.count(&inner);
            sleep::leave_armed(number, set, &mut inner);
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
    let mask = kernel_mask(wanted.events, connection);
    let retired = connection.and_then(|ours| inner.retired(fd, ours.number));
    let known_mask = if adds { retired } else { inner.entry(fd).map(|entry| entry.kernel_mask) };
    let outcome = if settled.is_some() && known_mask == Some(mask) {
        Ok(0)
    } else if adds && forget_retired(number, set, &mut inner, fd) {
        kernel::epoll_control(number, libc::EPOLL_CTL_ADD, fd, Some(event(mask, fd)))
    } else {
        kernel::epoll_control(number, operation, fd, Some(event(mask, fd)))
    };
    if outcome.is_err() {
        return Some(outcome);
    }
    let counted = inner.entry(fd).map_or(0, |entry| entry.counted);
    let is_set = is_set || inner.entry(fd).is_some_and(|entry| entry.is_set);
    let mut entry = Entry::new(fd, wanted, mask, counted, is_set);
    if let Some(connection) = connection {
        watch(&mut entry, connection);
    }
    inner.insert(entry);
    if connecting && table::ours(fd).is_none() {
        // The kernel has all its news; when it becomes ours, this set is told, under its lock.
        inner.cool_one(fd);
    }
    // Before the look at who sleeps: see `sleeps_plainly`.
    set.count(&inner);
    if set.may_be_slept_on() {
        // Who sleeps did so before this entry was there to be armed.
        wake_for(number, &mut inner, fd);
    }
    Some(outcome)
}

/// True for an epoll set, ours or not.
fn is_epoll(fd: RawFd) -> bool {
    is_mixed(fd) || kernel::is_epoll(fd)
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
    known(fd).is_some_and(|set| set.ours.load(Ordering::SeqCst) != 0)
}

/// [`is_mixed`], for who polls `fd` and may sleep on it: whoever puts one of ours into it wakes him.
#[must_use]
pub fn is_mixed_and_polled(fd: RawFd) -> bool {
    known(fd).is_some_and(|set| {
        // With the store and look in `control`.
        set.outer.store(true, Ordering::SeqCst);
        set.ours.load(Ordering::SeqCst) != 0
    })
}

/// True when the rings have news for the set `fd`, or for a set in it.
#[must_use]
pub fn is_due(fd: RawFd) -> bool {
    is_due_within(fd, DEEPEST)
}

fn is_due_within(fd: RawFd, depth: u32) -> bool {
    is_mixed(fd)
        && known(fd).is_some_and(|set| {
            let mut inner = lock(set);
            inner.take_stirred();
            any_due(&mut inner, depth)
        })
}

/// `fd` is about to be closed: it leaves every set, and if it is a set, everything leaves it.
pub fn forget(fd: RawFd) {
    if lock::is_inside() {
        return lock::leave(fd);
    }
    if forget_copy(fd) {
        return;
    }
    each_set(|number, set| {
        // What was noted while it was empty, or by who polled the number, is not the next one's.
        if number != fd && set.ours.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut inner = lock(set);
        if number == fd {
            inner.each().for_each(|entry| unwatch(entry));
            inner.leave_boards();
            *inner = Inner::default();
            set.outer.store(false, Ordering::SeqCst);
            set.whose.store(0, Ordering::Relaxed);
            set.count(&inner);
        } else if let Some(entry) = inner.remove(fd) {
            unwatch(&entry);
            set.count(&inner);
            sleep::leave_armed(number, set, &mut inner);
        } else {
            forget_retired(number, set, &mut inner, fd);
        }
    });
}

/// Takes a retired `fd` out of the kernel's set; false when it was none. Its bell may have been the
/// one that a sleeper counted on.
fn forget_retired(number: RawFd, set: &Set, inner: &mut Inner, fd: RawFd) -> bool {
    if !inner.forget_retired(fd) {
        return false;
    }
    // Perhaps closed, and so gone from it already.
    let _ = kernel::epoll_control(number, libc::EPOLL_CTL_DEL, fd, None);
    set.count(inner);
    sleep::leave_armed(number, set, inner);
    true
}

/// Makes the kernel tell again what is there to be told of an entry.
fn tell_again(number: RawFd, entry: &Entry) {
    let event = event(entry.kernel_mask, entry.fd);
    let _ = kernel::epoll_control(number, libc::EPOLL_CTL_MOD, entry.fd, Some(event));
}

fn report_by_kernel(number: RawFd, entry: &mut Entry) {
    let mask = entry.kernel_mask | OUT;
    let event = event(mask, entry.fd);
    if kernel::epoll_control(number, libc::EPOLL_CTL_MOD, entry.fd, Some(event)).is_ok() {
        entry.kernel_mask = mask;
    }
}

/// An entry came or changed while a thread may sleep on the set: news of it wakes that thread.
fn wake_for(number: RawFd, inner: &mut Inner, fd: RawFd) {
    let Some(entry) = inner.entry(fd) else { return };
    if entry.is_set {
        let (inside, wanted) = (entry.fd, entry.wanted & IN != 0);
        arm_within(inside, DEEPEST - 1);
        if wanted {
            report_within(inside, DEEPEST - 1);
        }
        return;
    }
    let Some(connection) = table::ours(fd) else { return };
    arm(connection, true, entry.wanted & OUT != 0 && !connection.is_writable());
    barrier::heavy();
    if due(entry, connection, false) != 0 {
        report_by_kernel(number, entry);
    }
}

/// Makes the kernel report what is due in the set `number`, and so whatever set holds it.
fn report_within(number: RawFd, depth: u32) {
    let Some(set) = known(number).filter(|_| depth > 0) else { return };
    report_due(number, &mut lock(set), depth);
}

/// Makes the kernel report one hot entry that is due.
fn report_due(number: RawFd, inner: &mut Inner, depth: u32) {
    inner.take_noted();
    for turn in 0..inner.hot() {
        let Some(entry) = inner.hot_entry(turn) else { continue };
        if due_of(entry, false, depth) == 0 {
            continue;
        }
        if entry.is_set {
            report_within(entry.fd, depth - 1);
        } else {
            report_by_kernel(number, entry);
        }
        return;
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
    // A hint only: the other end's own count of what it wrote. Before the look at what is there, and
    // Acquire with the Release in `push`: what it counts is seen there, or is news next time.
    let tail = connection.segment.other().sending.tail.load(Ordering::Acquire);
    // What lies in the ring behind bytes in the kernel's stream is news when those are read: by another
    // thread, perhaps, between this and the next step.
    let by_ring = connection.kernel_bytes_left().is_none();
    #[expect(clippy::cast_sign_loss, reason = "poll's bits are small and positive")]
    let all = u32::from(readiness(connection) as u16);
    let now = all & (entry.wanted | ERR | HUP);
    if now == 0 || entry.wanted & EDGE == 0 {
        return now;
    }
    // An end is news for who did not ask for that bit, too: it is readable.
    let ends = all & (RDHUP | HUP | ERR);
    let news = entry.fresh
        || entry.wanted & IN != 0 && by_ring && tail != entry.seen_tail
        || ends & !entry.seen_ends != 0
        || now & OUT != 0 && connection.was_full.load(Ordering::Relaxed);
    if !news {
        return 0;
    }
    if report {
        entry.fresh = false;
        if by_ring {
            entry.seen_tail = tail;
        }
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
    inner.take_noted();
    look_at_hot(inner, answers);
    let wait = answers.wait;
    inner.cool_noted(|entry| entry.looked == wait && is_noted(entry));
}

/// The look of this wait saw what there is, or whatever comes is noted: the entry can be let go of.
fn is_noted(entry: &Entry) -> bool {
    let (Some(place), Some(connection)) = (entry.noted, table::ours(entry.fd)) else {
        return false;
    };
    let own = connection.segment.own();
    (entry.vain > 0 || entry.wanted & EDGE != 0)
        && own.signs.receive_armed.load(Ordering::Relaxed) == place.armed
        && own.sharing.watchers.load(Ordering::Relaxed) <= 1
        && connection.is_settled()
        && (entry.wanted & OUT == 0 || connection.is_writable())
}

fn look_at_hot(inner: &mut Inner, answers: &mut Answers<'_>) {
    for step in 0..inner.hot() {
        if answers.is_full() {
            inner.turn = inner.turn.wrapping_add(step);
            return;
        }
        let turn = inner.turn.wrapping_add(step);
        let Some(entry) = inner.hot_entry(turn) else { continue };
        let bits = due_of(entry, true, DEEPEST);
        entry.looked = answers.wait;
        if bits == 0 {
            entry.vain = entry.vain.saturating_add(1);
        } else {
            entry.vain = 0;
            answers.add(entry, bits);
        }
    }
}

fn any_due(inner: &mut Inner, depth: u32) -> bool {
    inner.take_noted();
    (0..inner.hot())
        .any(|turn| inner.hot_entry(turn).is_some_and(|entry| due_of(entry, false, depth) != 0))
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

/// What a report of the kernel's held, besides what the program is to hear.
#[derive(Default)]
struct Report {
    /// News of what is not ours.
    plain: bool,
    /// Doorbells, or the end of a stream of doorbells.
    news: bool,
    /// A doorbell that stays, since somebody calls the connection back at this moment.
    later: bool,
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
    let mut kicks = Vec::new();
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
        if table::ours(fd).is_some() || inner.entry(fd).is_some_and(|entry| entry.is_set) {
            inner.heat(fd);
        }
        let Some(entry) = inner.entry(fd) else {
            if let Some(set) = known(number) {
                report.news |= forget_retired(number, set, inner, fd);
            }
            continue;
        };
        // One that is connected by now becomes ours with the program's next call on it: here, the
        // set is locked.
        let connection = table::ours(fd);
        let mut heard = bits;
        report.plain |= connection.is_none() && !entry.is_set;
        if let Some(connection) = connection {
            watch(entry, connection);
            if connection.kernel_bytes_left().is_none() {
                if connection.listen(fd, 1) == Heard::Later {
                    // An edge that the kernel has told once.
                    tell_again(number, entry);
                    report.later = true;
                }
                if connection.is_returned() && bits & (RDHUP | HUP | ERR) != 0 {
                    // Of the stream behind the ring's rest: an edge that is told once.
                    connection.look_behind_bytes(fd);
                }
                heard &= !(IN | RDHUP | HUP | ERR);
                report.news = true;
            } else {
                if bits & (RDHUP | HUP | ERR) != 0 {
                    connection.look_behind_bytes(fd);
                }
                heard = without_bells(fd, connection, heard, &mut kicks);
            }
            if connection.is_bound_for_ring() {
                // Nobody but us asked for it: a kick.
                report.news |= heard & OUT != 0;
                heard &= !OUT;
            }
        }
        adjust(number, entry, connection);
        let heard = heard & (entry.wanted | ERR | HUP);
        if heard != 0 && !entry.silent {
            answers.add(entry, heard);
        }
    }
    inner.kicks.append(&mut kicks);
    report
}

/// [`Connection::without_bells`] for the kernel's report of an entry.
fn without_bells(fd: RawFd, connection: &Connection, heard: u32, kicks: &mut Vec<RawFd>) -> u32 {
    const LOW: u32 = 0x7fff;
    let told = i16::try_from(heard & LOW).unwrap_or(0);
    let events = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;
    #[expect(clippy::cast_sign_loss, reason = "poll's bits are small and positive")]
    let left = u32::from(connection.without_bells(fd, told, events, || kicks.push(fd)) as u16);
    heard & !LOW | left & heard & LOW
}
