//! A value that its owner offers to another thread, and may take back until that thread has taken it.
//!
//! ```text
//!  owner   empty ── offer ──► offered ── take back ──► empty
//!                                │ take
//!  taker                       taken ── return ──► returned
//!  owner                                              │ collect ──► empty
//! ```
//!
//! So the owner of some work never waits for a thread that has not begun it. Neither side blocks: the taker wakes
//! the owner by means of its own.
//!
//! Invariants: the cell belongs to the owner while the state is *empty* or *returned*, and to whoever changed the
//! state from *offered* by a compare-and-swap until then. One owner, any number of takers.

use crate::sync::{AtomicU32, Ordering, ProtocolCell};

const EMPTY: u32 = 0;
const OFFERED: u32 = 1;
const TAKEN: u32 = 2;
const RETURNED: u32 = 3;

/// See the module's documentation.
#[derive(Debug)]
pub struct Offer<T> {
    state: AtomicU32,
    value: ProtocolCell<Option<T>>,
}

// SAFETY: the cell is accessed by one thread at a time (module invariants), and values only move across, so
// `T: Send` is all that is needed.
unsafe impl<T: Send> Sync for Offer<T> {}

impl<T> Default for Offer<T> {
    fn default() -> Self {
        Self { state: AtomicU32::new(EMPTY), value: ProtocolCell::new(None) }
    }
}

impl<T> Offer<T> {
    fn swap(&self, value: Option<T>) -> Option<T> {
        self.value.with_mut(|cell| {
            // SAFETY: the caller has the cell by the state that it found or made (module invariants).
            std::mem::replace(unsafe { &mut *cell }, value)
        })
    }

    /// Offers a value. The owner's.
    ///
    /// Errors: the value comes back where an earlier one was not collected.
    pub fn offer(&self, value: T) -> Result<(), T> {
        // Acquire: pairs with the Release in `give_back`; the cell is the owner's while nothing is in it.
        if self.state.load(Ordering::Acquire) != EMPTY {
            return Err(value);
        }
        self.swap(Some(value));
        // Release: pairs with the Acquire in `claim`, which finds the value in the cell.
        self.state.store(OFFERED, Ordering::Release);
        Ok(())
    }

    fn claim(&self, into: u32) -> Option<T> {
        // Acquire: pairs with the Release in `offer`.
        self.state
            .compare_exchange(OFFERED, into, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .and_then(|_| self.swap(None))
    }

    /// Whether something is offered now. A look without order: [`Offer::take`] decides.
    #[must_use]
    pub fn is_offered(&self) -> bool {
        self.state.load(Ordering::Relaxed) == OFFERED
    }

    /// Takes what is offered; whoever took it gives it back by [`Offer::give_back`].
    #[must_use]
    pub fn take(&self) -> Option<T> {
        if self.is_offered() { self.claim(TAKEN) } else { None }
    }

    /// Takes back what nobody took yet. The owner's.
    #[must_use]
    pub fn take_back(&self) -> Option<T> {
        // Between the swap and the store below nobody but the owner acts: the state is not *offered*.
        let value = self.claim(TAKEN)?;
        self.state.store(EMPTY, Ordering::Relaxed);
        Some(value)
    }

    /// Gives back what [`Offer::take`] gave: to be called once for each value, by the thread that took it.
    pub fn give_back(&self, value: T) {
        self.swap(Some(value));
        // Release: pairs with the Acquire in `collect`.
        self.state.store(RETURNED, Ordering::Release);
    }

    /// What came back. The owner's.
    #[must_use]
    pub fn collect(&self) -> Option<T> {
        // Acquire: pairs with the Release in `give_back`.
        if self.state.load(Ordering::Acquire) != RETURNED {
            return None;
        }
        let value = self.swap(None);
        self.state.store(EMPTY, Ordering::Relaxed);
        value
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_offered_goes_one_way_or_the_other_and_comes_back() {
        let offer = Offer::default();
        assert_eq!((offer.take(), offer.take_back(), offer.collect()), (None, None, None));
        assert_eq!(offer.offer(1), Ok(()));
        assert_eq!(offer.offer(2), Err(2), "one at a time");
        assert_eq!(offer.take_back(), Some(1));
        assert_eq!(offer.take(), None);
        assert_eq!(offer.offer(3), Ok(()));
        assert_eq!(offer.take(), Some(3));
        assert_eq!((offer.take(), offer.take_back(), offer.collect()), (None, None, None));
        offer.give_back(4);
        assert_eq!(offer.offer(5), Err(5), "the first one was not collected");
        assert_eq!(offer.collect(), Some(4));
        assert_eq!(offer.offer(5), Ok(()));
    }

    #[test]
    fn a_value_is_worked_on_once_whoever_is_first() {
        const ROUNDS: u64 = 2_000;
        let offer = Offer::default();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let (mut sum, mut back) = (0, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Acquire) {
                    if let Some(value) = offer.take() {
                        offer.give_back(value + 1_u64);
                    }
                }
            });
            for round in 0..ROUNDS {
                assert!(offer.offer(round).is_ok());
                if round.is_multiple_of(3) {
                    std::thread::yield_now();
                }
                sum += match offer.take_back() {
                    Some(value) => {
                        back += 1;
                        value + 1
                    }
                    None => loop {
                        if let Some(value) = offer.collect() {
                            break value;
                        }
                        std::hint::spin_loop();
                    },
                };
            }
            stop.store(true, std::sync::atomic::Ordering::Release);
        });
        assert_eq!(sum, ROUNDS * (ROUNDS + 1) / 2, "{back} of {ROUNDS} were taken back");
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::Arc;

    #[test]
    fn an_offer_is_taken_or_taken_back_under_every_interleaving() {
        crate::sync::explore("offer", || {
            let offer = Arc::new(Offer::default());
            let taker = {
                let offer = Arc::clone(&offer);
                loom::thread::spawn(move || {
                    for _ in 0..2 {
                        if let Some(value) = offer.take() {
                            offer.give_back(value + 10_u32);
                        }
                    }
                })
            };
            for round in 0..2 {
                assert!(offer.offer(round).is_ok());
                let done = match offer.take_back() {
                    Some(value) => value + 10,
                    None => loop {
                        if let Some(value) = offer.collect() {
                            break value;
                        }
                        loom::thread::yield_now();
                    },
                };
                assert_eq!(done, round + 10, "worked on once");
            }
            taker.join().unwrap();
        });
    }
}
