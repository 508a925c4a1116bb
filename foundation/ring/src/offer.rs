//! A value that its owner offers to another thread, and may take back until that thread has taken it.
//!
//! ```text
//!  owner   empty ── offer ──► offered ── take back ──► empty
//!                                │ take
//!  taker                       taken ── drop of the guard ──► returned
//!  owner                                                         │ collect ──► empty
//! ```
//!
//! So the owner of some work never waits for a thread that has not begun it. Neither side blocks: the taker wakes
//! the owner by means of its own.
//!
//! Invariants: a thread accesses the cell only after it changed the state to *taken* by a compare-and-swap, and
//! before it changes the state again; only that thread, or the thread that has the guard which [`Offer::take`] gave
//! it, changes the state from *taken*. So every call is sound from any thread, also from one that is not the owner.

use std::ops::{Deref, DerefMut};

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
    /// Puts `value` into the cell, and moves out what was there. The state is *taken*, by the caller.
    fn swap(&self, value: Option<T>) -> Option<T> {
        self.value.with_mut(|cell| {
            // SAFETY: the caller changed the state to *taken*, or has the guard of the thread that did, and did not
            // change it since: no other thread accesses the cell (module invariants).
            std::mem::replace(unsafe { &mut *cell }, value)
        })
    }

    /// Whether the cell is the caller's now: the state was `from`.
    fn claim(&self, from: u32) -> bool {
        // Acquire: pairs with the Release in `leave` of the thread that had the cell before.
        self.state.compare_exchange(from, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// The cell is the caller's no more.
    fn leave(&self, state: u32) {
        // Release: pairs with the Acquire in `claim`, which finds the cell as it is now.
        self.state.store(state, Ordering::Release);
    }

    /// Offers a value.
    ///
    /// Errors: the value comes back where an earlier one was not collected.
    pub fn offer(&self, value: T) -> Result<(), T> {
        if !self.claim(EMPTY) {
            return Err(value);
        }
        self.swap(Some(value));
        self.leave(OFFERED);
        Ok(())
    }

    /// Whether something is offered now. A look without order: [`Offer::take`] decides.
    #[must_use]
    pub fn is_offered(&self) -> bool {
        self.state.load(Ordering::Relaxed) == OFFERED
    }

    /// Takes what is offered, until the guard gives it back.
    #[must_use]
    pub fn take(&self) -> Option<Taken<'_, T>> {
        if !self.is_offered() || !self.claim(OFFERED) {
            return None;
        }
        let value = self.swap(None);
        value.map(|value| Taken { offer: self, value: Some(value) })
    }

    /// Takes back what no thread took yet.
    #[must_use]
    pub fn take_back(&self) -> Option<T> {
        self.remove(OFFERED)
    }

    /// What came back.
    #[must_use]
    pub fn collect(&self) -> Option<T> {
        self.remove(RETURNED)
    }

    fn remove(&self, from: u32) -> Option<T> {
        if !self.claim(from) {
            return None;
        }
        let value = self.swap(None);
        self.leave(EMPTY);
        value
    }
}

/// A value that was taken. Its end gives it back, also where its thread panics; one that is forgotten never comes
/// back, and the [`Offer`] takes no other.
#[derive(Debug)]
pub struct Taken<'o, T> {
    offer: &'o Offer<T>,
    /// There until the end.
    value: Option<T>,
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.value {
            Some(value) => value,
            None => unreachable!("a value is there until its guard ends"),
        }
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.value {
            Some(value) => value,
            None => unreachable!("a value is there until its guard ends"),
        }
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        self.offer.swap(self.value.take());
        self.offer.leave(RETURNED);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_offered_goes_one_way_or_the_other_and_comes_back() {
        let offer = Offer::default();
        let nothing = |offer: &Offer<u32>| {
            offer.take().is_none() && offer.take_back().is_none() && offer.collect().is_none()
        };
        assert!(nothing(&offer));
        assert_eq!(offer.offer(1), Ok(()));
        assert_eq!(offer.offer(2), Err(2), "one at a time");
        assert_eq!(offer.take_back(), Some(1));
        assert!(nothing(&offer));
        assert_eq!(offer.offer(3), Ok(()));
        let mut taken = offer.take().unwrap();
        assert_eq!(*taken, 3);
        assert!(nothing(&offer));
        assert_eq!(offer.offer(5), Err(5), "the first one is away");
        *taken += 1;
        drop(taken);
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
                    if let Some(mut value) = offer.take() {
                        *value += 1_u64;
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
                        if let Some(mut value) = offer.take() {
                            *value += 10_u32;
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

    /// No caller has to keep to a part.
    #[test]
    fn two_owners_share_an_offer_under_every_interleaving() {
        crate::sync::explore("offer of two", || {
            let offer = Arc::new(Offer::default());
            let act = |offer: &Offer<u32>, value: u32| {
                let mut out = i32::from(offer.offer(value).is_ok());
                if let Some(mut value) = offer.take() {
                    *value += 10;
                }
                out -= [offer.collect(), offer.take_back()].iter().flatten().count() as i32;
                out
            };
            let other = {
                let offer = Arc::clone(&offer);
                loom::thread::spawn(move || act(&offer, 1))
            };
            let own = act(&offer, 2);
            let out = own + other.join().unwrap();
            let rest = [offer.collect(), offer.take_back()].iter().flatten().count() as i32;
            assert_eq!(out, rest, "what went in came out");
        });
    }
}
