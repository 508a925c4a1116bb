//! Waiting on a set: a look, a spin, a sleep in the kernel; and what is left behind for other threads.
//! The module above lists who wakes whom.

use std::os::fd::RawFd;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::fork::join;
use super::lock::Locked;
use super::set::{Entry, Inner};
use super::{
    ASLEEP, Answers, Arming, DEEPEST, MARK, Report, Set, any_due, arm_and_cool, known, lock, look,
    made, report_due, translate,
};
use crate::kernel::{self, Outcome};
use crate::poll::time;
use crate::table;

/// Every so many waits that the rings answered, the kernel is asked as well.
const KERNEL_TURN: u32 = 8;
/// A set with more hot entries than this lets go, now and then, of those that were looked at in
/// vain so many times: about when looking has cost as much as a doorbell does.
const MANY_HOT: usize = 32;
/// Up to so many, a look at all of them is quick; from so many on, it takes longer than a spin may.
const FEW_HOT: usize = 8;
const CROWD: usize = 128;
const VAIN_LOOKS: usize = 256;
/// How often it does: each time costs a fence on every processor.
const SWEEP_TURN: u64 = 64;

/// Every how many waits a set with so many hot entries lets go, and of those with how many looks in
/// vain. The more there are, the more each wait pays for those that are silent.
fn sweep(hot: usize) -> (u64, u32) {
    let crowd = (hot / MANY_HOT).clamp(1, VAIN_LOOKS / 8);
    let looks = u32::try_from(VAIN_LOOKS / crowd).unwrap_or(u32::MAX);
    (if crowd < 4 { SWEEP_TURN } else { SWEEP_TURN / 8 }, looks)
}

/// `epoll_wait` and its kin. `None`: nothing of ours in the set, ask the kernel.
pub fn wait(
    number: RawFd,
    events: &mut [libc::epoll_event],
    timeout: Option<Duration>,
    mask: Option<&libc::sigset_t>,
) -> Option<Outcome> {
    let set = known(number)?;
    if set.ours.load(Ordering::SeqCst) == 0 || events.is_empty() {
        return None;
    }
    Some(wait_mixed(number, set, events, timeout, mask))
}

/// A thread is about to wait in the kernel on a set without entries of ours. False when it has some
/// by now: then [`wait`] is to be called. When true, [`wakes_plainly`] has to follow.
///
/// A pair of calls and no guard, since a thread may be cancelled in between: the set then counts as
/// slept on, which costs and loses nothing.
#[must_use]
pub fn sleeps_plainly(number: RawFd) -> bool {
    let Some(set) = made(number) else { return true };
    count_asleep(set);
    // With the store and look in `control`.
    let plain = set.ours.load(Ordering::SeqCst) == 0;
    if !plain {
        count_awake(set);
    }
    plain
}

/// After a wait that [`sleeps_plainly`] allowed, with what the kernel `reported`: what the program is
/// to hear. `None` when there is nothing left of it and [`wait`] is to be called for what is left of
/// the time: another thread has put one of ours into the set.
#[must_use]
pub fn wakes_plainly(
    number: RawFd,
    events: &mut [libc::epoll_event],
    reported: usize,
) -> Option<usize> {
    let Some(set) = known(number) else { return Some(reported) };
    count_awake(set);
    let told = events.get(..reported).unwrap_or_default();
    if !told.iter().any(|event| event.u64 >> 32 == MARK) {
        return Some(reported);
    }
    let mut inner = lock(set);
    let (_, count) = hear(number, &mut inner, events, reported);
    leave_armed(number, set, &mut inner);
    unlock(inner);
    (count > 0).then_some(count)
}

/// Lets go of a set, and then tells others what was swallowed while it was locked.
fn unlock(mut inner: Locked<'_>) {
    let kicks = std::mem::take(&mut inner.kicks);
    drop(inner);
    for fd in kicks {
        if let Some(connection) = table::ours(fd) {
            connection.make_up_for_swallowed(fd);
        }
    }
}

/// Answers with what a sleep in the kernel reported and with what is due by now: the kernel's
/// report, and how many answers there are.
fn hear(
    number: RawFd,
    inner: &mut Inner,
    events: &mut [libc::epoll_event],
    reported: usize,
) -> (Report, usize) {
    inner.waits += 1;
    let mut answers = Answers { count: 0, wait: inner.waits, events };
    let report = translate(number, inner, &mut answers, reported);
    look(inner, &mut answers);
    (report, answers.count)
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
        join(set, &mut inner);
        inner.take_stirred();
        inner.waits += 1;
        let (turn, looks) = sweep(inner.hot());
        if inner.hot() > MANY_HOT && inner.waits.is_multiple_of(turn) {
            let vain = |entry: &Entry| entry.vain >= looks;
            arm_and_cool(number, &mut inner, DEEPEST, Arming::LetGo, vain);
        }
        let (turn, places) = (set.until_kernel.load(Ordering::Relaxed), events.len());
        // In its turn the kernel has half the places, however much the rings have; of one, all.
        let share = if turn == 0 { places / 2 } else { places };
        let first = events.get_mut(..share).unwrap_or_default();
        let mut answers = Answers { count: 0, wait: inner.waits, events: first };
        look(&mut inner, &mut answers);
        let count = answers.count;
        let mut answers = Answers { count, wait: inner.waits, events: &mut *events };
        // With nothing to look at but the kernel's news, the sleep asks.
        let nothing = inner.hot() == 0 && answers.count == 0;
        let only_kernel = nothing && timeout != Some(Duration::ZERO);
        let ask =
            !only_kernel && turn == 0 || answers.count == 0 && timeout == Some(Duration::ZERO);
        if ask && !answers.is_full() {
            let from = answers.count;
            let rest = answers.events.get_mut(from..).unwrap_or_default();
            let reported = kernel::epoll_wait(number, rest, Some(time(Duration::ZERO)), mask)?;
            let Report { plain, .. } = translate(number, &mut inner, &mut answers, reported);
            // Where the kernel has news of others, it is asked each time; else now and then. A single place
            // goes to and fro.
            let next = if plain { u32::from(places == 1) } else { KERNEL_TURN };
            set.until_kernel.store(next, Ordering::Relaxed);
            look(&mut inner, &mut answers);
        } else {
            set.until_kernel.store(turn.saturating_sub(1), Ordering::Relaxed);
        }
        let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let count = answers.count;
        if count > 0 || late && (slept || timeout == Some(Duration::ZERO)) {
            leave_armed(number, set, &mut inner);
            unlock(inner);
            return Ok(count);
        }
        let (hot, noted) = (inner.hot(), !inner.places_noted.is_empty());
        unlock(inner);
        let due = || any_due(&mut lock(set), DEEPEST);
        let found = if hot <= FEW_HOT {
            (hot > 0 || noted) && set.budget.spin(due)
        } else {
            // A look takes as long as a small spin, and the kernel's news wait meanwhile.
            hot <= CROWD && set.budget.spin_slowly(due)
        };
        if found {
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

/// This thread leaves the set, and will not look at its hot entries until it comes back. Where
/// others may sleep on the set they are armed for them, and one of those that are due is reported: news
/// that came meanwhile is theirs to hear, and what is level-triggered another thread hears at once,
/// as the kernel does it.
///
/// So when an entry leaves the set: its bell may have been the one that others counted on.
pub(super) fn leave_armed(number: RawFd, set: &Set, inner: &mut Inner) {
    if inner.hot() == 0 && inner.places_noted.is_empty() || !set.may_be_slept_on() {
        return;
    }
    arm_and_cool(number, inner, DEEPEST, Arming::Each, |_| true);
    report_due(number, inner, DEEPEST);
}

/// A thread goes to sleep on the set: said before it looks at anything.
fn count_asleep(set: &Set) {
    set.asleep.fetch_add(1, Ordering::SeqCst);
    ASLEEP.fetch_add(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

fn count_awake(set: &Set) {
    ASLEEP.fetch_sub(1, Ordering::SeqCst);
    set.asleep.fetch_sub(1, Ordering::SeqCst);
}

/// A thread that slept on the set looks at it again: if no other sleeps, nobody need ring.
fn awake(set: &Set, inner: &Inner) {
    if !inner.places_noted.is_empty() && !set.may_be_slept_on() {
        inner.places_noted.are_awake();
    }
}

/// A thread that sleeps on a set.
struct Asleep<'a>(&'a Set);

impl<'a> Asleep<'a> {
    fn new(set: &'a Set) -> Self {
        count_asleep(set);
        Self(set)
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        count_awake(self.0);
    }
}

/// A thread that sleeps on sets by `poll`: counted before it arms them by [`super::arm_all`].
#[derive(Debug)]
pub struct Polling(());

impl Polling {
    /// Begins.
    #[must_use]
    pub fn new() -> Self {
        ASLEEP.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Self(())
    }
}

impl Default for Polling {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Polling {
    fn drop(&mut self) {
        ASLEEP.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Arms what is hot, sleeps in the kernel, and answers with what woke us.
fn sleep(
    number: RawFd,
    set: &Set,
    events: &mut [libc::epoll_event],
    timeout: Option<Duration>,
    mask: Option<&libc::sigset_t>,
) -> Outcome {
    // Counted before the stirs are taken: who swallows a doorbell stirs, then looks whether
    // anybody sleeps.
    let asleep = Asleep::new(set);
    let shared;
    {
        let mut inner = lock(set);
        inner.take_stirred();
        shared = arm_and_cool(number, &mut inner, DEEPEST, Arming::Sleep, |_| true);
        if any_due(&mut inner, DEEPEST) {
            drop(asleep);
            awake(set, &inner);
            return Ok(0);
        }
    }
    // As in `poll`: with other watchers we look by the clock, too.
    let bound = if shared {
        Some(timeout.unwrap_or(Duration::MAX).min(Duration::from_millis(1)))
    } else {
        timeout
    };
    let outcome = kernel::epoll_wait(number, events, bound.map(time), mask);
    drop(asleep);
    let reported = outcome?;
    let mut inner = lock(set);
    awake(set, &inner);
    let (report, count) = hear(number, &mut inner, events, reported);
    if report.plain {
        set.until_kernel.store(0, Ordering::Relaxed);
    }
    if count > 0 {
        leave_armed(number, set, &mut inner);
    }
    unlock(inner);
    if count == 0 && reported > 0 && (shared || !report.news || report.later) {
        // A doorbell that is left to another watcher would wake us again at once, and so would
        // bytes in the kernel's stream that the program does not ask for, and one that nobody may swallow now.
        let _ = kernel::pause(1);
    }
    Ok(count)
}
