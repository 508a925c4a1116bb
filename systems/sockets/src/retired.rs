//! Connections that no number leads to any more.
//!
//! A thread may still be inside a call on one (a program that closes what another thread reads), so its
//! memory goes back only once every other thread is [known](crate::settled) to have come to the end of what it did
//! then, never under a [sleeper](crate::sleepers) or a [borrower](crate::board), and not before [`GRACE`] is over:
//! since the last number went, and since a sleeper woke. The grace is what a signal handler has that interrupted a
//! call and sleeps itself. It is counted at each look, and of a time without one, in which the whole process may have
//! been stopped, only a part is.
//!
//! Nobody waits here but `fork`, and not for ever: a lock that another thread holds is never let go in the child.
//! Who finds the lock taken leaves its connection in a list, for whoever comes next.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::settled::Settled;
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
    settled: Settled,
}

impl Queue {
    const fn new() -> Self {
        Self {
            retired: VecDeque::new(),
            clock: Duration::ZERO,
            counted: None,
            settled: Settled::new(),
        }
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

    /// The oldest, if its grace is over and no thread can be where it was when that began: `settled` tells.
    fn take(
        &mut self,
        settled: impl FnOnce(&mut Settled, Duration) -> Duration,
    ) -> Option<Retired> {
        let oldest = self.retired.front()?;
        let over = self.clock - oldest.since >= GRACE;
        if over && oldest.since < settled(&mut self.settled, self.clock) {
            self.retired.pop_front()
        } else {
            None
        }
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
        let Some(oldest) = queue.take(Settled::until) else { return };
        let (sleepers, borrowed) = (&oldest.connection.sleepers, &oldest.connection.borrowed);
        if sleepers.any()
            || sleepers.stamp() != oldest.stamp
            || borrowed.load(Ordering::Acquire) != 0
        {
            queue.add(oldest.connection);
            continue;
        }
        let place = std::ptr::from_ref(oldest.connection).cast_mut();
        // SAFETY: a leaked box that no number leads to. Each thread that was inside a call on it when the last
        // number went has left the call: no thread slept or woke since, and every other one was seen asleep elsewhere
        // or has run for longer than a call that does not sleep (`settled`). This thread is here.
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
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;

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
        let is_free = || {
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
                forks.join().unwrap()
            })
        };
        // A thread that waits for a processor for longer than the patience is one that a child does not wait for.
        assert!((0..20).any(|_| is_free()));
    }

    #[test]
    fn time_without_looks_and_a_clock_that_was_set_are_no_grace() {
        let (mut queue, hour) = (Queue::new(), Duration::from_secs(3600));
        let start = Instant::now() + 2 * hour;
        queue.count(start);
        queue.add(leaked());
        for stopped_until in [start + hour, start, start - hour, start + hour] {
            queue.count(stopped_until);
            assert!(queue.take(|_, clock| clock).is_none());
        }
        // Three hours ahead have counted for a second, and those back for nothing.
        queue.count(start + hour + Duration::from_millis(499));
        queue.count(start + hour + Duration::from_millis(998));
        assert!(queue.take(|_, clock| clock).is_none());
        queue.count(start + hour + Duration::from_secs(1));
        assert!(queue.take(|_, clock| clock).is_some());
    }

    /// A child that holds a thread of this process where it is, as a debugger does, from its first byte to the one
    /// that it is sent.
    fn hold_from_a_child(thread: u32) -> (i32, UnixStream) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        // SAFETY: the child makes system calls alone, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let thread = thread as libc::pid_t;
            let none = std::ptr::null_mut::<libc::c_void>();
            let mut byte = [0];
            // It is allowed to by now.
            let allowed = theirs.read_exact(&mut byte).is_ok();
            // SAFETY: no memory is named.
            let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, thread, none, none) } == 0;
            // SAFETY: as above.
            let asked = unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, thread, none, none) } == 0;
            // SAFETY: no status is asked for.
            let held = unsafe { libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL) };
            let held = allowed && seized && asked && held == thread;
            let _ = theirs.write_all(&[held.into()]);
            let _ = theirs.read(&mut byte);
            // SAFETY: ends the child, and the hold with it.
            unsafe { libc::_exit(0) };
        }
        assert!(child > 0);
        let mut ours = ours;
        // SAFETY: allows the child to do it; where nothing restricts that, it is an error without effect.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, child) };
        ours.write_all(&[1]).unwrap();
        let mut held = [0];
        ours.read_exact(&mut held).unwrap();
        assert_eq!(held, [1], "the child holds the thread");
        (child, ours)
    }

    fn is_kept(connection: &'static Connection) -> bool {
        take_back();
        let held = RETIRED.lock().unwrap();
        held.retired.iter().any(|one| std::ptr::eq(one.connection, connection))
    }

    #[test]
    fn nothing_is_given_back_while_a_thread_that_may_be_inside_a_call_is_stopped() {
        let own = "nothing_is_given_back_while_a_thread_that_may_be_inside_a_call_is_stopped";
        if has_run_apart(&format!("retired::tests::{own}")) {
            return;
        }
        let (told, hears) = channel();
        let (end, ended) = channel::<()>();
        let other = std::thread::spawn(move || {
            told.send(crate::kernel::thread()).unwrap();
            let _ = ended.recv();
        });
        let (child, mut hold) = hold_from_a_child(hears.recv().unwrap());
        let connection = leaked();
        retire(connection);
        // More than the grace, by its own clock.
        let since = RETIRED.lock().unwrap().clock;
        while RETIRED.lock().unwrap().clock < since + 2 * GRACE {
            assert!(is_kept(connection));
            std::thread::sleep(MOST_AT_ONCE / 2);
        }
        hold.write_all(&[1]).unwrap();
        let mut status = 0;
        // SAFETY: a child of ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        let begun = Instant::now();
        while is_kept(connection) {
            assert!(begun.elapsed() < Duration::from_secs(60), "its memory goes back in the end");
            std::thread::sleep(MOST_AT_ONCE / 2);
        }
        drop(end);
        other.join().unwrap();
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
