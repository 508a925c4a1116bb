//! Injected clock, seeded randomness and fault points: what a run must control to be replayed.
//!
//! Place: `foundation`. Code that needs the time takes an `Arc<dyn Clock>`; code that needs chance
//! takes a [`Randomness`]; code with a spot worth failing at declares a [`FaultPoint`]. A
//! simulation hands in a [`ManualClock`] and a seed, and one seed means one run.

#![forbid(unsafe_code)]

pub mod clock;
pub mod fault;
pub mod random;

pub use clock::{Clock, ManualClock, SystemClock};
pub use fault::{ArmedFault, FaultAction, FaultPoint, InjectedFault};
pub use random::Randomness;
