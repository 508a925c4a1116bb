//! Threads of this process that sleep on a connection, or wait in a call on it for longer than a moment.
//!
//! Two ask: who moves a connection elsewhere, since a sleeper would not hear of it; and who gives its
//! memory back, since a call that slept is not over when it wakes. The latter compares [`Sleepers::stamp`]
//! of two looks: if it is the same and nobody slept, nobody woke in between.

use std::sync::atomic::{AtomicU64, Ordering};

/// The lower half counts who sleeps now, the upper half who ever began to.
const BEGUN: u64 = 1 << 32;

/// Of one connection.
#[derive(Debug, Default)]
pub struct Sleepers(AtomicU64);

/// A thread that sleeps, until it is dropped.
#[derive(Debug)]
pub struct Asleep<'a>(&'a AtomicU64);

impl Sleepers {
    /// The calling thread is about to sleep; afterwards it looks whether the connection
    /// [moves](crate::anew).
    pub fn enter(&self) -> Asleep<'_> {
        self.0.fetch_add(BEGUN | 1, Ordering::SeqCst);
        Asleep(&self.0)
    }

    /// Somebody sleeps.
    #[must_use]
    pub fn any(&self) -> bool {
        self.stamp() & (BEGUN - 1) != 0
    }

    /// Changes whenever somebody falls asleep or wakes.
    #[must_use]
    pub fn stamp(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleep_between_two_looks_leaves_its_mark() {
        let sleepers = Sleepers::default();
        let before = sleepers.stamp();
        assert!(!sleepers.any());
        let (one, other) = (sleepers.enter(), sleepers.enter());
        assert!(sleepers.any());
        drop(one);
        assert!(sleepers.any());
        drop(other);
        assert!(!sleepers.any());
        assert_ne!(sleepers.stamp(), before);
    }
}
