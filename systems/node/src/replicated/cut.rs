//! When a thread may look at several shards at once: while the log's thread applies a run of units, one shard may have applied
//! more of the log than another.
//!
//! A request for one shard needs no cut: it sees that shard as the log has it at some position. A request over several
//! shards, and a snapshot, have to see all of them at one position, so they wait until the run is over; the run waits
//! until those that look have ended.
//!
//! Readers that wait when a run ends are inside before the next one begins: each waits for one run at most. A run may be
//! as long as the log's ring, where a member catches up, and a reader waits with all of its shard's thread; and SAVE
//! is inside until its file is written, for as long as the log waits.
//!
//! Invariants: the log's thread alone closes and opens; it waits for threads inside alone, and a thread inside
//! waits for shards' locks, which the log's thread does not hold while it closes, and for SAVE's file alone.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct State {
    closed: bool,
    inside: usize,
    /// Threads that came while it was closed.
    waiting: usize,
    /// How often it was opened.
    openings: u64,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Cut {
    state: Mutex<State>,
    changed: Condvar,
}

/// A thread that looks at several shards at once.
#[derive(Debug)]
pub(crate) struct Inside<'c>(&'c Cut);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.locked().inside -= 1;
        self.0.changed.notify_all();
    }
}

impl Cut {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while<'c>(
        &'c self,
        mut state: MutexGuard<'c, State>,
        waits: impl Fn(&State) -> bool,
    ) -> MutexGuard<'c, State> {
        while waits(&state) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// A run begins, or goes on: returns when no thread is inside.
    pub(crate) fn close(&self) {
        let mut state = self.locked();
        state.closed = true;
        drop(self.wait_while(state, |state| state.inside > 0));
    }

    /// The run is over, and what it did is recorded. The threads that wait are inside from now on: the next run
    /// waits for them, however soon it begins.
    pub(crate) fn open(&self) {
        let mut state = self.locked();
        state.closed = false;
        state.inside += std::mem::take(&mut state.waiting);
        state.openings += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until no run is under way, at most one run long; none begins while the guard lives.
    pub(crate) fn enter(&self) -> Inside<'_> {
        let mut state = self.locked();
        if state.closed {
            state.waiting += 1;
            let before = state.openings;
            drop(self.wait_while(state, |state| state.openings == before));
        } else {
            state.inside += 1;
        }
        Inside(self)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn a_thread_that_waits_is_inside_before_the_next_run_begins() {
        let (cut, seen) = (Cut::default(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for run in 0..50 {
                cut.close();
                scope.spawn(|| {
                    let _inside = cut.enter();
                    seen.fetch_add(1, Ordering::Relaxed);
                });
                while cut.locked().waiting == 0 {
                    std::thread::yield_now();
                }
                cut.open();
                // However soon it begins.
                cut.close();
                let seen = seen.load(Ordering::Relaxed);
                cut.open();
                assert_eq!(seen, run + 1);
            }
        });
    }

    #[test]
    fn whoever_is_inside_sees_whole_runs_only() {
        const RUNS: u64 = 300;
        let cut = Cut::default();
        // A run changes both, one after the other.
        let both = [AtomicU64::new(0), AtomicU64::new(0)];
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut last = 0;
                    while last < RUNS {
                        let _inside = cut.enter();
                        let seen = both.each_ref().map(|word| word.load(Ordering::Relaxed));
                        assert_eq!(seen[0], seen[1]);
                        last = seen[0];
                    }
                });
            }
            for run in 1..=RUNS {
                cut.close();
                both[0].store(run, Ordering::Relaxed);
                cut.close();
                std::thread::yield_now();
                both[1].store(run, Ordering::Relaxed);
                cut.open();
            }
        });
    }
}
