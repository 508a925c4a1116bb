//! A partition's part in sleeping: its rest, the other end's, and what is left to be done.

use std::sync::atomic::{Ordering, fence};

use super::Partition;
use crate::geometry::at;

impl Partition {
    fn peer_rest(&self) -> u64 {
        self.window.inbound.word(at::REST).load(Ordering::Acquire)
    }

    /// Says to the other end's thread that its rest was seen: from now on it is rung for. Behind
    /// everything that was posted before, so that a thread that sees the echo has all of that.
    pub(super) fn echo(&mut self) {
        let rest = self.peer_rest();
        if rest != self.echoed {
            // Behind everything of the second thread's, too.
            let _half = self.half.get();
            self.echoed = rest;
            self.words.fence();
            self.words.post_word(at::REST_SEEN, rest);
            self.words.fence();
            if rest % 2 == 1 {
                self.window.bells.ring(self.bell);
            }
        }
    }

    pub(super) fn ring_if_resting(&self) {
        if self.peer_rest() % 2 == 1 {
            self.window.bells.ring(self.bell);
        }
    }

    /// The thread wants to sleep: says so. True once the other end's thread knows, so that whatever
    /// comes from now on rings, if that end can ring; until then the caller goes on looking, or looks by the clock. With
    /// `insists` the other end's thread is woken once to answer; without, one that sleeps is let sleep.
    pub fn rests(&mut self, insists: bool) -> bool {
        if !self.is_up {
            return true;
        }
        if self.rest.is_multiple_of(2) {
            self.rest += 1;
            self.words.fence();
            self.words.post_word(at::REST, self.rest);
            self.words.fence();
        }
        // Once: two threads that both want to sleep would wake each other without end.
        if insists && std::mem::replace(&mut self.insisted, self.rest) != self.rest {
            self.ring_if_resting();
        }
        self.echo();
        self.window.inbound.word(at::REST_SEEN).load(Ordering::Acquire) == self.rest
    }

    /// The thread has work again.
    pub fn wakes(&mut self) {
        if self.rest % 2 == 1 && self.is_up {
            self.rest += 1;
            self.words.post_word(at::REST, self.rest);
            self.words.fence();
        }
    }

    /// True when a turn would find something: looked at after programs can see that the thread sleeps.
    #[must_use]
    pub fn has_work(&self) -> bool {
        if !self.is_up {
            return false;
        }
        fence(Ordering::SeqCst);
        let blocked = !self.data_out.room().is_ok_and(|room| room > 0);
        self.half.has_work()
            || !self.control_in.is_empty()
            || self.peer_rest() != self.echoed
            || !self.answers.is_empty()
            || !blocked && !self.due.is_empty()
            || self.connections.iter().flatten().any(|connection| connection.has_work(blocked))
    }
}
