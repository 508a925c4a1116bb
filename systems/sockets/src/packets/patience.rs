//! How long a party of the packet lane looks before it sleeps: a program, or a proxy's thread.
//!
//! Four parties carry a message (two programs, two proxies), and often share fewer processors than they
//! are. A party that spins on a processor which another one needs delays the very message it waits for,
//! and one that sleeps costs its waker a system call and both a wake-up. So a party *yields*: it pauses
//! first only where pauses helped lately, and what others ran meanwhile does not count as its own
//! looking. Where a yield came back from another party that looks, on the same processor, it yields at once for a while:
//! the news may come from a third processor to that party, and this one's pauses would be what it waits for. It sleeps once
//! it has looked in vain for its own time, or for the longest time in all.

use std::time::{Duration, Instant};

/// A yield that took longer let another thread run.
const SWITCHED: Duration = Duration::from_nanos(700);
/// One that took longer than this let a thread run that does something else than look. A shorter one came back from a
/// party that looks, too: it may be what this one's message waits for, and pauses would take the processor from it.
const LOOKED: Duration = Duration::from_micros(50);
/// Waits that yield at once after one that a yield ended.
const REMEMBERED: u8 = 32;
/// Looks with pauses, where no yield helped lately.
const PAUSES: u32 = 40;
/// Longest time of looking, what other threads ran included.
const LONGEST: Duration = Duration::from_micros(1_000);

/// What to do before the next look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// A pause of the processor.
    Pause,
    /// Let other threads run.
    Yield,
    /// Sleep.
    Sleep,
}

/// One wait after the other, and what they taught.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Own time to look in vain.
    budget: Duration,
    /// Waits left that yield at once.
    yielding: u8,
    looks: u32,
    began: Option<Instant>,
    /// What other threads ran since.
    others: Duration,
    /// The last yield let another thread run.
    switched: bool,
}

impl Patience {
    /// Looks in vain for so long at most.
    #[must_use]
    pub fn new(budget: Duration) -> Self {
        Self { budget, yielding: 0, looks: 0, began: None, others: Duration::ZERO, switched: false }
    }

    /// A look found something: the next wait begins anew.
    #[inline]
    pub fn found(&mut self) {
        if self.looks == 0 {
            return;
        }
        if self.switched {
            self.yielding = REMEMBERED;
        } else {
            self.yielding = self.yielding.saturating_sub(1);
        }
        self.rest();
    }

    /// The wait is over.
    pub fn rest(&mut self) {
        (self.looks, self.began, self.others, self.switched) = (0, None, Duration::ZERO, false);
    }

    /// A look found nothing at `now`; the clock is read where it is needed.
    pub fn next(&mut self, now: impl FnOnce() -> Instant) -> Next {
        self.looks += 1;
        if self.yielding == 0 && self.looks <= PAUSES {
            return Next::Pause;
        }
        let now = now();
        let began = *self.began.get_or_insert(now);
        let waited = now.saturating_duration_since(began);
        if waited >= LONGEST || waited.saturating_sub(self.others) >= self.budget {
            self.yielding = self.yielding.saturating_sub(1);
            return Next::Sleep;
        }
        Next::Yield
    }

    /// A yield took so long.
    pub fn yielded(&mut self, took: Duration) {
        self.switched = took > SWITCHED;
        if self.switched {
            self.others += took;
            if took < LOOKED {
                self.yielding = REMEMBERED;
            }
        }
    }

    /// A sleep took so long: the next wait looks longer after a short one, and shorter after a long one.
    pub fn slept(&mut self, took: Duration, bounds: [Duration; 2]) {
        let [least, most] = bounds;
        let next = if took < most * 4 { self.budget * 2 } else { self.budget / 2 };
        self.budget = next.clamp(least, most);
    }

    /// Looks until `ready` says so, or it is time to sleep; true in the first case.
    #[inline]
    pub fn wait(&mut self, mut ready: impl FnMut() -> bool) -> bool {
        loop {
            if ready() {
                self.found();
                return true;
            }
            let mut before = None;
            match self.next(|| *before.insert(Instant::now())) {
                Next::Pause => std::hint::spin_loop(),
                Next::Yield => {
                    crate::kernel::yield_now();
                    if let Some(before) = before {
                        self.yielded(before.elapsed());
                    }
                }
                Next::Sleep => {
                    self.rest();
                    return ready();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a party does when other threads run so long at each yield, and how much of its own time it
    /// looked.
    fn vain(patience: &mut Patience, others: Duration) -> (u32, u32, Duration) {
        let (mut now, mut own) = (Instant::now(), Duration::ZERO);
        let (mut pauses, mut yields) = (0, 0);
        loop {
            match patience.next(|| now) {
                Next::Pause => pauses += 1,
                Next::Yield => {
                    yields += 1;
                    let took = others + Duration::from_nanos(300);
                    patience.yielded(took);
                    now += took;
                    own += Duration::from_nanos(300);
                }
                Next::Sleep => {
                    patience.rest();
                    return (pauses, yields, own);
                }
            }
        }
    }

    #[test]
    fn a_party_looks_for_its_own_time_and_not_for_that_of_others() {
        let budget = Duration::from_micros(30);
        let mut patience = Patience::new(budget);
        let (pauses, yields, own) = vain(&mut patience, Duration::ZERO);
        assert_eq!((pauses, yields), (PAUSES, 100));
        assert_eq!(own, budget);
        // Others run for ten microseconds each time: it looks until the longest time is over.
        let (_, yields, own) = vain(&mut patience, Duration::from_micros(10));
        assert_eq!(yields, 98);
        assert!(own < budget);
    }

    #[test]
    fn a_party_whose_yield_brought_the_news_yields_at_once_for_a_while() {
        let mut patience = Patience::new(Duration::from_micros(30));
        let mut looks = 0;
        let mut once = |patience: &mut Patience| {
            looks = 0;
            patience.next(Instant::now)
        };
        assert_eq!(once(&mut patience), Next::Pause);
        while patience.next(Instant::now) == Next::Pause {}
        patience.yielded(Duration::from_micros(5));
        patience.found();
        assert_eq!(once(&mut patience), Next::Yield);
        // Yields that let nobody run are forgotten in time.
        for _ in 0..=REMEMBERED {
            patience.yielded(Duration::ZERO);
            patience.found();
            patience.next(Instant::now);
        }
        patience.found();
        assert_eq!(once(&mut patience), Next::Pause);
    }

    /// Two parties share a processor, and what each waits for comes from other processors while the other one pauses.
    #[test]
    fn a_party_beside_another_that_looks_yields_at_once_also_where_no_yield_brings_the_news() {
        let mut patience = Patience::new(Duration::from_micros(30));
        while patience.next(Instant::now) == Next::Pause {}
        patience.yielded(Duration::from_micros(3));
        // News comes during a yield in which no thread ran.
        patience.next(Instant::now);
        patience.yielded(Duration::ZERO);
        patience.found();
        assert_eq!(patience.next(Instant::now), Next::Yield);
        // A thread that computes is none that looks.
        let mut patience = Patience::new(Duration::from_micros(30));
        while patience.next(Instant::now) == Next::Pause {}
        patience.yielded(Duration::from_millis(3));
        patience.next(Instant::now);
        patience.yielded(Duration::ZERO);
        patience.found();
        assert_eq!(patience.next(Instant::now), Next::Pause);
    }

    #[test]
    fn a_short_sleep_makes_the_next_wait_longer_and_a_long_one_shorter() {
        let bounds = [Duration::from_micros(4), Duration::from_micros(64)];
        let mut patience = Patience::new(Duration::from_micros(32));
        patience.slept(Duration::from_micros(10), bounds);
        assert_eq!(patience.budget, bounds[1]);
        for _ in 0..9 {
            patience.slept(Duration::from_millis(5), bounds);
        }
        assert_eq!(patience.budget, bounds[0]);
        // The processor may be taken from a wait, though not from each.
        assert!((0..20).any(|_| {
            let mut left = 3;
            patience.wait(|| {
                left -= 1;
                left == 0
            })
        }));
        assert!(!patience.wait(|| false));
    }
}
