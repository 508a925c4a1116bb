//! Commands that may take long: a queue that is fair to channels, and the workers that take from it.
//!
//! Invariants: at most one command of a channel runs at a time, so no number of commands of one channel keeps
//! the workers from the others'; channels whose commands wait are served in turn; a channel's next command
//! begins once [`Jobs::finish`] was called for the one before.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::engine::lock;

/// Workers at most: more than cores, because a command that takes minutes keeps its worker.
pub(super) const MOST_WORKERS: usize = 64;
/// A worker beyond those there are always ends when it had nothing to do for so long.
const IDLE: Duration = Duration::from_secs(10);

/// Commands that wait, by their channel.
#[derive(Debug)]
pub(super) struct Jobs<K, J> {
    state: Mutex<State<K, J>>,
    came: Condvar,
}

#[derive(Debug)]
struct State<K, J> {
    queues: HashMap<K, Queue<J>>,
    /// Channels with commands, none of which runs.
    ready: VecDeque<K>,
    workers: usize,
    idle: usize,
    /// Workers there are always.
    least: usize,
    stopping: bool,
}

#[derive(Debug)]
struct Queue<J> {
    jobs: VecDeque<J>,
    runs: bool,
}

impl<K: Copy + Eq + std::hash::Hash, J> Jobs<K, J> {
    /// None wait; `least` workers are there always.
    pub(super) fn new(least: usize) -> Self {
        let (queues, ready) = (HashMap::new(), VecDeque::new());
        let state = State { queues, ready, workers: 0, idle: 0, least, stopping: false };
        Self { state: Mutex::new(state), came: Condvar::new() }
    }

    /// Puts a command behind those of its channel. True: no worker is free for it, and there may be another.
    #[must_use]
    pub(super) fn push(&self, channel: K, job: J) -> bool {
        let mut state = lock(&self.state);
        if state.stopping {
            return false;
        }
        let queue = state
            .queues
            .entry(channel)
            .or_insert_with(|| Queue { jobs: VecDeque::new(), runs: false });
        queue.jobs.push_back(job);
        if !queue.runs && queue.jobs.len() == 1 {
            state.ready.push_back(channel);
        }
        let wants = state.ready.len() > state.idle && state.workers < MOST_WORKERS;
        drop(state);
        self.came.notify_one();
        wants
    }

    /// The next command of the channel that waited longest; the worker's time is up where there is none.
    pub(super) fn next(&self) -> Option<(K, J)> {
        let mut state = lock(&self.state);
        loop {
            while let Some(channel) = state.ready.pop_front() {
                let Some(queue) = state.queues.get_mut(&channel) else { continue };
                if let Some(job) = queue.jobs.pop_front() {
                    queue.runs = true;
                    return Some((channel, job));
                }
            }
            if state.stopping {
                return None;
            }
            state.idle += 1;
            let (guard, waited) =
                self.came.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.idle -= 1;
            if waited.timed_out() && state.ready.is_empty() && state.workers > state.least {
                return None;
            }
        }
    }

    /// The command of a channel that ran is over.
    pub(super) fn finish(&self, channel: K) {
        let mut state = lock(&self.state);
        let Some(queue) = state.queues.get_mut(&channel) else { return };
        queue.runs = false;
        if queue.jobs.is_empty() {
            state.queues.remove(&channel);
            return;
        }
        state.ready.push_back(channel);
        drop(state);
        self.came.notify_one();
    }

    /// Forgets the commands of a channel that is gone; the one that runs goes on.
    pub(super) fn forget(&self, channel: K) {
        let mut state = lock(&self.state);
        match state.queues.get_mut(&channel) {
            Some(queue) if queue.runs => queue.jobs.clear(),
            Some(_) => drop(state.queues.remove(&channel)),
            None => {}
        }
    }

    /// A worker begins, unless there are enough.
    pub(super) fn begin(&self) -> bool {
        let mut state = lock(&self.state);
        let begins = state.workers < MOST_WORKERS && !state.stopping;
        state.workers += usize::from(begins);
        begins
    }

    /// A worker ends.
    pub(super) fn end(&self) {
        lock(&self.state).workers -= 1;
    }

    /// Commands that wait are forgotten, and workers end.
    pub(super) fn stop(&self) {
        let mut state = lock(&self.state);
        state.stopping = true;
        state.queues.clear();
        state.ready.clear();
        drop(state);
        self.came.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_take_turns_and_none_has_two_workers() {
        let jobs = Jobs::new(1);
        for job in 0..3 {
            assert!(jobs.push('a', job), "no worker is idle");
        }
        let _ = jobs.push('b', 10);
        let _ = jobs.push('c', 20);
        assert_eq!(jobs.next(), Some(('a', 0)));
        // Another worker finds the others' commands, and not the second of the channel that is served.
        assert_eq!(jobs.next(), Some(('b', 10)));
        jobs.finish('a');
        assert_eq!(jobs.next(), Some(('c', 20)));
        assert_eq!(jobs.next(), Some(('a', 1)));
        jobs.finish('b');
        let _ = jobs.push('b', 11);
        assert_eq!(jobs.next(), Some(('b', 11)));
        // What is gone is not executed, and what runs of it ends as any.
        jobs.forget('a');
        jobs.finish('a');
        let _ = jobs.push('c', 21);
        jobs.forget('b');
        jobs.finish('c');
        assert_eq!(jobs.next(), Some(('c', 21)));
        jobs.finish('c');
        jobs.finish('b');
        assert!(lock(&jobs.state).queues.is_empty() && lock(&jobs.state).ready.is_empty());
        jobs.stop();
        assert!(!jobs.push('a', 5));
        assert_eq!(jobs.next(), None);
    }

    #[test]
    fn there_are_workers_for_channels_that_wait_up_to_a_bound() {
        let jobs = Jobs::new(2);
        let begun = (0..MOST_WORKERS + 5).filter(|_| jobs.begin()).count();
        assert_eq!(begun, MOST_WORKERS);
        assert!(!jobs.push(1, 1), "as many as there may be");
        jobs.end();
        assert!(jobs.push(2, 1));
        assert!(jobs.begin());
    }
}
