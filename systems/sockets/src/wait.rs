//! Spinning before sleeping: how long, learned per connection or set.
//!
//! A spin that succeeds costs less than a wake-up; one that does not is lost time, and on a
//! machine with fewer processors than runnable threads it is time taken from the very thread that
//! would end the wait. So a spin begins with pauses, goes on with yields, and halves its budget
//! each time it was in vain; a wake-up that came soon after falling asleep doubles it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::kernel;

/// Longest spin.
pub const LONGEST_US: u32 = 50;
/// Shortest.
const SHORTEST_US: u32 = 2;
/// Pauses before the first yield.
const PAUSES: u32 = 4_000;

/// A learned budget.
#[derive(Debug)]
pub struct Budget(AtomicU32);

impl Default for Budget {
    fn default() -> Self {
        Self(AtomicU32::new(LONGEST_US / 2))
    }
}

impl Budget {
    /// Spins until `ready` says so or the budget is spent; true in the first case.
    pub fn spin(&self, mut ready: impl FnMut() -> bool) -> bool {
        let budget = Duration::from_micros(u64::from(self.0.load(Ordering::Relaxed)));
        let begin = Instant::now();
        let mut pauses = 0_u32;
        loop {
            for _ in 0..16 {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            pauses += 16;
            if pauses > PAUSES {
                kernel::yield_now();
            }
            if begin.elapsed() > budget {
                return ready();
            }
        }
    }

    /// What a sleep that followed a vain spin teaches.
    pub fn learn(&self, slept: Duration) {
        let now = self.0.load(Ordering::Relaxed);
        let longest = Duration::from_micros(u64::from(LONGEST_US));
        let next = if slept < longest { now * 2 } else { now / 2 };
        self.0.store(next.clamp(SHORTEST_US, LONGEST_US), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vain_spin_gets_shorter_and_a_near_miss_longer() {
        let budget = Budget::default();
        assert!(!budget.spin(|| false));
        for _ in 0..10 {
            budget.learn(Duration::from_millis(5));
        }
        assert_eq!(budget.0.load(Ordering::Relaxed), SHORTEST_US);
        for _ in 0..10 {
            budget.learn(Duration::from_micros(1));
        }
        assert_eq!(budget.0.load(Ordering::Relaxed), LONGEST_US);
        let mut looks = 0;
        assert!(budget.spin(|| {
            looks += 1;
            looks > 3
        }));
    }
}
