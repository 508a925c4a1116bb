//! When a thread may look at several shards at once: while the log's thread applies a wave, or a unit alone, one shard
//! may have applied more of the log than another.
//!
//! ```text
//!  log's thread   close ─ wave ─ pause  close ─ wave ─ pause  close ─ unit ─ pause  record ─ open
//!  readers                       ├──┤                  ├──┤                  ├─────────────────►
//!  savers                                                                                   ├──►
//! ```
//!
//! A request for one shard needs no cut: it sees that shard as the log has it at some position. A request over several
//! shards has to see all of them at one position: such *readers* wait for the wave, or the unit, that is under way. Files
//! of the keys need the position recorded as well, so their *savers* wait until the run is over. What is about to be applied
//! waits until those that look have ended.
//!
//! Threads that wait when the cut opens for them are inside before the log's thread closes it again: each waits for one wave, or
//! one run. A run may be as long as the log's ring, where a member catches up, and a saver waits with all of its
//! shard's thread; SAVE is inside until its file is written, for as long as the log waits.
//!
//! Invariants: the log's thread alone closes, pauses and opens; it waits for threads inside alone, and a thread inside
//! waits for shards' locks, which the log's thread does not hold while it closes, and for SAVE's file alone.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What a thread looks at several shards for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// To answer a request.
    Read,
    /// To write a file, from which a member may go on.
    Save,
}

/// Threads of one kind.
#[derive(Debug, Default)]
struct Kind {
    /// They have to wait.
    closed: bool,
    waiting: usize,
    /// How often they were let in.
    openings: u64,
}

#[derive(Debug, Default)]
struct State {
    readers: Kind,
    savers: Kind,
    inside: usize,
}

impl State {
    fn kind(&mut self, look: Look) -> &mut Kind {
        match look {
            Look::Read => &mut self.readers,
            Look::Save => &mut self.savers,
        }
    }

    /// Those that wait are inside from now on: what comes next waits for them, however soon.
    fn let_in(&mut self, look: Look) {
        let kind = self.kind(look);
        kind.closed = false;
        kind.openings += 1;
        let waiting = std::mem::take(&mut kind.waiting);
        self.inside += waiting;
    }
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
        waits: impl Fn(&mut State) -> bool,
    ) -> MutexGuard<'c, State> {
        while waits(&mut state) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// A wave or a unit alone begins: returns when no thread is inside.
    pub(crate) fn close(&self) {
        let mut state = self.locked();
        (state.readers.closed, state.savers.closed) = (true, true);
        drop(self.wait_while(state, |state| state.inside > 0));
    }

    /// All shards have applied the same of the log; what they did is not recorded, and the run may go on.
    pub(crate) fn pause(&self) {
        self.locked().let_in(Look::Read);
        self.changed.notify_all();
    }

    /// The run is over, and what it did is recorded.
    pub(crate) fn open(&self) {
        let mut state = self.locked();
        state.let_in(Look::Read);
        state.let_in(Look::Save);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the cut is open for this look; nothing is applied while the guard lives.
    pub(crate) fn enter(&self, look: Look) -> Inside<'_> {
        let mut state = self.locked();
        let kind = state.kind(look);
        if kind.closed {
            kind.waiting += 1;
            let before = kind.openings;
            drop(self.wait_while(state, |state| state.kind(look).openings == before));
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
                    let _inside = cut.enter(Look::Read);
                    seen.fetch_add(1, Ordering::Relaxed);
                });
                while cut.locked().readers.waiting == 0 {
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
    fn readers_are_let_in_between_waves_and_savers_behind_the_run() {
        let (cut, seen) = (Cut::default(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            cut.close();
            let look = |look| {
                let _inside = cut.enter(look);
                seen.fetch_add(1, Ordering::Relaxed);
            };
            scope.spawn(move || look(Look::Save));
            scope.spawn(move || look(Look::Read));
            let waiting = || {
                let state = cut.locked();
                (state.readers.waiting, state.savers.waiting)
            };
            while waiting() != (1, 1) {
                std::thread::yield_now();
            }
            cut.pause();
            cut.close();
            let (seen_between, waiting_between) = (seen.load(Ordering::Relaxed), waiting());
            cut.open();
            assert_eq!((seen_between, waiting_between), (1, (0, 1)));
        });
        assert_eq!(seen.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn whoever_is_inside_sees_whole_waves_only() {
        const RUNS: u64 = 300;
        let cut = Cut::default();
        // A run changes both, one after the other.
        let both = [AtomicU64::new(0), AtomicU64::new(0)];
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut last = 0;
                    while last < RUNS {
                        let _inside = cut.enter(Look::Read);
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
                if run % 3 == 0 { cut.open() } else { cut.pause() }
            }
        });
    }
}
