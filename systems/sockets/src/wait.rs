//! Spinning before sleeping: how long, and whether with yields; learned per connection or set.
//!
//! A spin that succeeds costs less than a wake-up; one that does not is lost time, and on a
//! machine with fewer processors than runnable threads it is time taken from the very thread that
//! would end the wait. So a spin halves its budget each time it was in vain, and a wake-up that
//! came soon after falling asleep doubles it. It begins with pauses; where the one we wait for has
//! no processor of its own, which a yield that took long and brought the news shows, later spins
//! yield at once (p. 4.9).

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::kernel;

/// Longest spin.
pub const LONGEST_US: u32 = 50;
/// Shortest.
const SHORTEST_US: u32 = 2;
/// Looks before the clock is read: most waits of two running ends are over by then.
const BLIND_LOOKS: u32 = 32;
/// Pauses this long before the first yield.
const ALONE: Duration = Duration::from_micros(8);
/// A yield that took longer let somebody run.
const SWITCHED: Duration = Duration::from_nanos(600);
/// Spins that yield at once after one that showed that it helps.
const REMEMBERED: u8 = 16;

/// A learned budget.
#[derive(Debug)]
pub struct Budget {
    us: AtomicU32,
    /// Spins left that yield at once.
    yielding: AtomicU8,
}

impl Default for Budget {
    fn default() -> Self {
        Self { us: AtomicU32::new(LONGEST_US / 2), yielding: AtomicU8::new(0) }
    }
}

impl Budget {
    /// Spins until `ready` says so or the budget is spent; true in the first case.
    #[inline]
    pub fn spin(&self, mut ready: impl FnMut() -> bool) -> bool {
        let yielding = self.yielding.load(Ordering::Relaxed);
        if yielding == 0 {
            for _ in 0..BLIND_LOOKS {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
        self.spin_by_clock(ready, yielding)
    }

    /// As [`Budget::spin`], where a look takes long: by the clock from the first one on.
    pub fn spin_slowly(&self, mut ready: impl FnMut() -> bool) -> bool {
        let budget = Duration::from_micros(u64::from(self.us.load(Ordering::Relaxed)));
        let begin = Instant::now();
        loop {
            if ready() {
                return true;
            }
            let spun = begin.elapsed();
            if spun > budget {
                return false;
            }
            Self::pass(spun);
        }
    }

    #[cold]
    fn spin_by_clock(&self, mut ready: impl FnMut() -> bool, yielding: u8) -> bool {
        let budget = Duration::from_micros(u64::from(self.us.load(Ordering::Relaxed)));
        let begin = Instant::now();
        let mut now = begin;
        loop {
            if yielding > 0 || now - begin > ALONE {
                kernel::yield_now();
                let after = Instant::now();
                if ready() {
                    let helped = after - now > SWITCHED;
                    let next = if helped { REMEMBERED } else { yielding.saturating_sub(1) };
                    self.yielding.store(next, Ordering::Relaxed);
                    return true;
                }
                now = after;
            } else {
                for _ in 0..16 {
                    if ready() {
                        return true;
                    }
                    std::hint::spin_loop();
                }
                now = Instant::now();
            }
            if now - begin > budget {
                self.yielding.store(yielding.saturating_sub(1), Ordering::Relaxed);
                return ready();
            }
        }
    }

    /// One moment of a wait that began `waited` ago and whose end is near; true when somebody else
    /// ran on this processor meanwhile.
    pub fn pass(waited: Duration) -> bool {
        if waited <= ALONE {
            std::hint::spin_loop();
            return false;
        }
        let before = Instant::now();
        kernel::yield_now();
        before.elapsed() > SWITCHED
    }

    /// What a sleep that followed a vain spin teaches.
    pub fn learn(&self, slept: Duration) {
        let now = self.us.load(Ordering::Relaxed);
        let longest = Duration::from_micros(u64::from(LONGEST_US));
        let next = if slept < longest { now * 2 } else { now / 2 };
        self.us.store(next.clamp(SHORTEST_US, LONGEST_US), Ordering::Relaxed);
    }
}

/// What `take` gives within this time: of something that who has it lets go of soon.
pub(crate) fn patiently<T>(longest: Duration, mut take: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        let taken = take();
        if taken.is_some() || begun.elapsed() >= longest {
            return taken;
        }
        kernel::yield_now();
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
        assert_eq!(budget.us.load(Ordering::Relaxed), SHORTEST_US);
        for _ in 0..10 {
            budget.learn(Duration::from_micros(1));
        }
        assert_eq!(budget.us.load(Ordering::Relaxed), LONGEST_US);
        // The processor may be taken from a spin, though not from each.
        assert!((0..20).any(|_| {
            let mut looks = 0;
            budget.spin(|| {
                looks += 1;
                looks > 3
            })
        }));
    }
}
