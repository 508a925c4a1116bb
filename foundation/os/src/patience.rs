//! Whether a thread that waits for another one goes on polling, or sleeps at once.
//!
//! Polling is the shortest way to an answer while the waiting thread has a processor to itself, or shares it
//! with the thread that answers. Where many threads wait on one processor, each of them polls while the
//! others could run: the answers of all of them come later than if every one slept. The kernel tells no
//! thread how many others want its processor, but a yield does: a yield that takes long ran others.
//!
//! Invariant: the decision never depends on an answer's content, and a thread that sleeps for want of
//! patience polls again within [`WAITS_ASLEEP`] waits, so a processor that became idle is noticed.

/// A yield that took longer, in nanoseconds, ran more than the one thread that answers.
pub const CROWDED_NS: u64 = 20_000;

/// Waits that sleep at once behind one that found its processor crowded. The next one polls, and finds out.
pub const WAITS_ASLEEP: u32 = 16;

/// What a thread learned about its processor from its latest waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Patience {
    asleep: u32,
}

impl Patience {
    /// Whether the wait that begins now polls before it sleeps.
    #[inline]
    pub fn begins(&mut self) -> bool {
        if self.asleep == 0 {
            return true;
        }
        self.asleep -= 1;
        false
    }

    /// Told of a yield that took `ns` nanoseconds and behind which no answer had come; whether the wait goes
    /// on polling.
    #[inline]
    pub fn goes_on(&mut self, ns: u64) -> bool {
        if ns <= CROWDED_NS {
            return true;
        }
        self.asleep = WAITS_ASLEEP;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_yield_makes_the_next_waits_sleep_and_then_one_polls() {
        let mut patience = Patience::default();
        assert!(patience.begins());
        assert!(patience.goes_on(CROWDED_NS));
        assert!(patience.begins(), "a short yield changes nothing");
        assert!(!patience.goes_on(CROWDED_NS + 1));
        for _ in 0..WAITS_ASLEEP {
            assert!(!patience.begins());
        }
        assert!(patience.begins(), "the processor may be idle by now");
        assert!(patience.begins());
    }
}
