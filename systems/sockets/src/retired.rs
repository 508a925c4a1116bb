//! Connections that no number leads to any more.
//!
//! A thread may still be inside a call on one (a program that closes what another thread reads), so its
//! memory goes back only after [`GRACE`], never under a [sleeper](crate::sleepers) or a
//! [borrower](crate::board), and not sooner than that after one woke. The grace is time in which the threads could
//! run: it is counted at each look, and of a time without one, in which all may have been stopped, only a part is.
//!
//! Nobody waits here but `fork`, and not for ever: a lock that another thread holds is never let go in the child.
//! Who finds the lock taken leaves its connection in a list, for whoever comes next.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::wait::patiently;

/// How long a retired connection keeps its memory, at least.
const GRACE: Duration = Duration::from_secs(2);
/// So much of it can have passed between two looks.
const MOST_AT_ONCE: Duration = Duration::from_millis(500);

/// How long `fork` waits for who has the lock.
const PATIENCE: Duration = Duration::from_millis(100);

static COMING: AtomicPtr<Connection> = AtomicPtr::new(std::ptr::null_mut());
static RETIRED: Mutex<Queue> = Mutex::new(Queue::new());

thread_local! {
    /// The queue, of who is about to make a child.
    static HELD: Cell<Option<MutexGuard<'static, Queue>>> = const { Cell::new(None) };
}

#[derive(Debug)]
struct Retired {
    connection: &'static Connection,
    /// When it was looked at, by the queue's clock, and what its sleepers' stamp was.
    since: Duration,
    stamp: u64,
}

/// Oldest first.
#[derive(Debug)]
struct Queue {
    retired: VecDeque<Retired>,
    /// How long threads have had to come to the end of a call, and when that was last counted.
    clock: Duration,
    counted: Option<Instant>,
}

impl Queue {
    const fn new() -> Self {
        Self { retired: VecDeque::new(), clock: Duration::ZERO, counted: None }
    }

    /// Of the time since the last look, [`MOST_AT_ONCE`] counts; after a restore from a checkpoint the kernel's
    /// clock may be anywhere.
    fn count(&mut self, now: Instant) {
        let passed = self.counted.replace(now).map(|then| now.saturating_duration_since(then));
        self.clock += passed.unwrap_or_default().min(MOST_AT_ONCE);
    }

    fn add(&mut self, connection: &'static Connection) {
        let stamp = connection.sleepers.stamp();
        self.retired.push_back(Retired { connection, since: self.clock, stamp });
    }

    /// The oldest, if its grace is over.
    fn take(&mut self) -> Option<Retired> {
        let clock = self.clock;
        self.retired.pop_front_if(|oldest| clock - oldest.since >= GRACE)
    }
}

/// The last number of `connection` is gone.
pub(crate) fn retire(connection: &'static Connection) {
    if connection.is_retired.swap(true, Ordering::AcqRel) {
        return;
    }
    crate::board::forget(connection);
    let place = std::ptr::from_ref(connection).cast_mut();
    let mut head = COMING.load(Ordering::Relaxed);
    loop {
        connection.next_retired.store(head, Ordering::Relaxed);
        // Release with the Acquire in `take_back`. The list is taken as a whole, so no place comes twice.
        match COMING.compare_exchange_weak(head, place, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => break,
            Err(now) => head = now,
        }
    }
    take_back();
}

/// Gives back the oldest of the retired, with every connection that comes or goes: a few, and more
/// where many wait, so that a burst does not keep its memory until as many have come again.
pub(crate) fn take_back() {
    let Ok(mut queue) = RETIRED.try_lock() else { return };
    queue.count(Instant::now());
    let mut next = COMING.swap(std::ptr::null_mut(), Ordering::Acquire);
    // SAFETY: leaked boxes, each once in the list, that are given back below only.
    while let Some(connection) = unsafe { next.as_ref() } {
        next = connection.next_retired.load(Ordering::Relaxed);
        queue.add(connection);
    }
    for _ in 0..(queue.retired.len() / 16).clamp(8, 256) {
        let Some(oldest) = queue.take() else { return };
        let (sleepers, borrowed) = (&oldest.connection.sleepers, &oldest.connection.borrowed);
        if sleepers.any()
            || sleepers.stamp() != oldest.stamp
            || borrowed.load(Ordering::Acquire) != 0
        {
            queue.add(oldest.connection);
            continue;
        }
        let place = std::ptr::from_ref(oldest.connection).cast_mut();
        // SAFETY: a leaked box that no number leads to; whoever was inside a call when the last
        // number went has left it: nobody slept or woke since, and the grace, in which threads ran, is
        // longer than a call that does not sleep.
        drop(unsafe { Box::from_raw(place) });
    }
}

/// Before `fork`: in the child, only what its own thread has is ever let go.
pub(crate) fn before_fork() {
    HELD.set(patiently(PATIENCE, || RETIRED.try_lock().ok()));
}

/// In parent and child.
pub(crate) fn after_fork() {
    HELD.take();
}

#[cfg(test)]
mod tests {
    use beeline_os::Mapping;

    use super::*;
    use crate::segment::{Segment, length_bytes};
    use crate::table::tests::{has_run_apart, in_child};

    fn leaked() -> &'static Connection {
        let mapping = Mapping::memfd("test", length_bytes(4096)).unwrap();
        Segment::format(&mapping).unwrap();
        let connection = Connection::new(Segment::take(mapping, 0).unwrap(), -1);
        Box::leak(Box::new(connection))
    }

    #[test]
    fn a_child_can_give_back_what_a_thread_of_its_parent_gave_back_meanwhile() {
        if has_run_apart(
            "retired::tests::a_child_can_give_back_what_a_thread_of_its_parent_gave_back_meanwhile",
        ) {
            return;
        }
        let held = RETIRED.lock().unwrap();
        std::thread::scope(|scope| {
            let forks = scope.spawn(|| {
                before_fork();
                let free = in_child(|| {
                    after_fork();
                    RETIRED.try_lock().is_ok()
                });
                after_fork();
                free
            });
            std::thread::sleep(PATIENCE / 5);
            drop(held);
            assert!(forks.join().unwrap());
        });
    }

    #[test]
    fn time_without_looks_and_a_clock_that_was_set_are_no_grace() {
        let (mut queue, hour) = (Queue::new(), Duration::from_secs(3600));
        let start = Instant::now() + 2 * hour;
        queue.count(start);
        queue.add(leaked());
        for stopped_until in [start + hour, start, start - hour, start + hour] {
            queue.count(stopped_until);
            assert!(queue.take().is_none());
        }
        // Three hours ahead have counted for a second, and those back for nothing.
        queue.count(start + hour + Duration::from_millis(499));
        queue.count(start + hour + Duration::from_millis(998));
        assert!(queue.take().is_none());
        queue.count(start + hour + Duration::from_secs(1));
        assert!(queue.take().is_some());
    }

    #[test]
    fn one_that_comes_while_the_lock_is_taken_is_given_back_later() {
        let connection = leaked();
        let held = RETIRED.lock().unwrap();
        retire(connection);
        drop(held);
        assert!(std::ptr::eq(COMING.load(Ordering::Relaxed), connection));
        take_back();
        assert!(COMING.load(Ordering::Relaxed).is_null());
        let noted = |one: &Retired| std::ptr::eq(one.connection, connection);
        assert!(RETIRED.lock().unwrap().retired.iter().any(noted));
    }
}
