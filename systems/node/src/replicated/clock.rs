//! Time as a replicated store sees it.
//!
//! Whoever looks at keys sees the wall clock, so that a key is gone when its time is up. What the
//! log applies runs at the time its proposer stamped on it, so that every replica decides alike.

use std::cell::Cell;
use std::sync::Arc;

use beeline_env::Clock;

thread_local! {
    /// The time of the unit this thread applies, Unix milliseconds; 0: it applies none.
    static APPLYING_MS: Cell<u64> = const { Cell::new(0) };
}

/// The wall clock, but for threads within [`at`].
#[derive(Debug)]
pub(crate) struct ReplicaClock {
    wall: Arc<dyn Clock>,
}

impl ReplicaClock {
    pub(crate) fn new(wall: Arc<dyn Clock>) -> Self {
        Self { wall }
    }
}

impl Clock for ReplicaClock {
    fn monotonic_ns(&self) -> u64 {
        self.wall.monotonic_ns()
    }

    fn unix_ms(&self) -> u64 {
        match APPLYING_MS.get() {
            0 => self.wall.unix_ms(),
            applying => applying,
        }
    }
}

/// Runs `body` at a time of the log's.
pub(crate) fn at<R>(unix_ms: u64, body: impl FnOnce() -> R) -> R {
    /// Ends it also where `body` panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            APPLYING_MS.set(0);
        }
    }
    APPLYING_MS.set(unix_ms.max(1));
    let _end = End;
    body()
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline_env::SystemClock;

    #[test]
    fn the_wall_clock_is_back_when_a_unit_is_done() {
        let clock = ReplicaClock::new(Arc::new(SystemClock));
        assert_eq!(at(77, || clock.unix_ms()), 77);
        assert!(clock.unix_ms() > 77);
    }
}
