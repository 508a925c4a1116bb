//! Up to when every other thread of this process has come to the end of what it did.
//!
//! A thread that was inside a call on a connection when the connection's last number went holds its address until the
//! call ends. No call tells of its beginning or its end: that would cost each of them. What `/proc` tells of a thread
//! is enough: a thread asleep by its own call is in no call on the connection, or stands in its
//! [sleepers](crate::sleepers); a thread that has had [`LONGEST_TICKS`] of a processor since has left the call it was
//! in. A thread that a debugger or a signal stopped, or that gets no processor, has not, however long ago it was.

use std::time::{Duration, Instant};

use crate::kernel::Errno;
use crate::kernel::threads::{Thread, others};

/// No call takes so much processor time without a sleep, in hundredths of a second.
const LONGEST_TICKS: u64 = 20;
/// Between two looks, at least, and at least so many times as long as the last one took.
const PAUSE: Duration = Duration::from_millis(100);
const SHARE: u32 = 100;

/// A thread, as it was seen.
#[derive(Clone, Copy, Debug)]
struct Seen {
    id: u32,
    /// It has come to the end of all that it did before.
    settled: Duration,
    /// When its processor time was noted, and how much that was.
    at: Duration,
    ran_ticks: u64,
}

/// See the module's documentation. Times are those of the caller's clock, from any start.
#[derive(Debug)]
pub(crate) struct Settled {
    seen: Vec<Seen>,
    looked: Option<Duration>,
    next: Duration,
    settled: Duration,
}

impl Settled {
    pub(crate) const fn new() -> Self {
        Self { seen: Vec::new(), looked: None, next: Duration::ZERO, settled: Duration::ZERO }
    }

    /// Every other thread has come to the end of what it did before this, as far as it is known at `clock`. Looks at
    /// the threads, but not with each call.
    pub(crate) fn until(&mut self, clock: Duration) -> Duration {
        if clock >= self.next {
            let begun = Instant::now();
            match others() {
                Ok(threads) => {
                    self.look(clock, &threads);
                    self.looked = Some(clock);
                }
                // Later.
                Err(Errno(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {}
                // Without `/proc` time is all there is.
                Err(_) => self.settled = clock,
            }
            self.next = clock + PAUSE.max(begun.elapsed() * SHARE);
        }
        self.settled
    }

    /// `threads` are in the order of their numbers.
    fn look(&mut self, clock: Duration, threads: &[Thread]) {
        // A thread that was not there at the last look has not done anything before it.
        let last = self.looked.unwrap_or_default();
        let seen = threads.iter().map(|thread| {
            let Thread { id, ran_ticks, .. } = *thread;
            let now = Seen { id, settled: clock, at: clock, ran_ticks };
            let known = self.seen.binary_search_by_key(&id, |seen| seen.id);
            let known = known.ok().and_then(|index| self.seen.get(index)).copied();
            match known.filter(|known| known.ran_ticks <= ran_ticks) {
                _ if thread.is_asleep => now,
                Some(known) if ran_ticks - known.ran_ticks >= LONGEST_TICKS => {
                    Seen { settled: known.at, ..now }
                }
                Some(known) => known,
                None => Seen { settled: last, ..now },
            }
        });
        self.seen = seen.collect();
        self.settled = self.seen.iter().map(|seen| seen.settled).min().unwrap_or(clock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn thread(id: u32, is_asleep: bool, ran_ticks: u64) -> Thread {
        Thread { id, is_asleep, ran_ticks }
    }

    fn look(settled: &mut Settled, seconds: u32, threads: &[Thread]) -> Duration {
        settled.look(seconds * SECOND, threads);
        settled.looked = Some(seconds * SECOND);
        settled.settled
    }

    #[test]
    fn a_thread_that_is_stopped_or_gets_no_processor_settles_nothing() {
        let mut settled = Settled::new();
        assert_eq!(look(&mut settled, 1, &[thread(5, true, 7), thread(9, true, 7)]), SECOND);
        // Stopped after that look, alone, for an hour.
        for seconds in [2, 3, 3600] {
            let now = look(&mut settled, seconds, &[thread(5, false, 7), thread(9, true, 7)]);
            assert_eq!(now, SECOND);
        }
        // It goes on, and is asleep by itself.
        assert_eq!(look(&mut settled, 3601, &[thread(5, true, 7)]), 3601 * SECOND);
    }

    #[test]
    fn a_thread_that_runs_has_left_the_call_that_it_was_in_long_ago() {
        let mut settled = Settled::new();
        assert_eq!(look(&mut settled, 1, &[thread(5, false, 0)]), Duration::ZERO, "first seen");
        assert_eq!(look(&mut settled, 2, &[thread(5, false, LONGEST_TICKS - 1)]), Duration::ZERO);
        assert_eq!(look(&mut settled, 3, &[thread(5, false, LONGEST_TICKS)]), SECOND);
        // Counted from the third second on.
        assert_eq!(look(&mut settled, 4, &[thread(5, false, 2 * LONGEST_TICKS - 1)]), SECOND);
        assert_eq!(look(&mut settled, 5, &[thread(5, false, 2 * LONGEST_TICKS)]), 3 * SECOND);
    }

    #[test]
    fn a_new_thread_has_done_nothing_before_the_last_look_and_one_that_ended_holds_nothing() {
        let mut settled = Settled::new();
        assert_eq!(look(&mut settled, 1, &[]), SECOND, "the calling thread alone");
        assert_eq!(look(&mut settled, 4, &[thread(5, false, 900)]), SECOND);
        // Another thread that was given the same number: it has run less.
        assert_eq!(look(&mut settled, 6, &[thread(5, false, 1)]), 4 * SECOND);
        assert_eq!(look(&mut settled, 7, &[]), 7 * SECOND);
    }
}
