//! Deterministic simulation of the replicated log: whole clusters from one seed.
//!
//! Place: `verify`. Servers run the real [`beeline_paxos::Replica`]; time, network, one-sided
//! operations, durable memory, clients and faults are simulated. One seed means one run.
//!
//! What goes wrong: servers are killed and lose power, alone and all at once; they are paused, in
//! the middle of a copy into a peer's memory too; links are cut and heal; messages are lost,
//! delayed, repeated and reordered; writes are acknowledged and reach memory much later, or never;
//! lines of memory are torn by a loss of power; clocks run at different rates. Meanwhile
//! leadership is handed over and members leave and join. Then everything is healed, and the
//! cluster has to finish what clients asked for.
//!
//! What must hold throughout stands in [`invariants`], a file each. A run that violates one
//! returns it, with the seed; [`world::PlantedBug`] breaks the driver's side of the contract in
//! four known ways, and the tests show that each is seen.

pub mod bootstrap;
pub mod client;
mod faults;
pub mod invariants;
pub mod linear;
pub mod lists;
pub mod machine;
pub mod memory;
mod network;
mod operations;
mod rest;
#[cfg(test)]
mod scenarios;
mod server;
pub mod trap;
pub mod world;

pub use invariants::Violation;
pub use world::{PlantedBug, Report, Settings, run};

/// How many seeds to run: `few` in every change's tests, `many` with `BEELINE_DEEP=1`;
/// `BEELINE_SEED=n` runs only that one.
#[must_use]
pub fn seeds(few: u64, many: u64) -> std::ops::Range<u64> {
    let one = std::env::var("BEELINE_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    match one {
        Some(seed) => seed..seed + 1,
        None if std::env::var_os("BEELINE_DEEP").is_some() => 0..many,
        None => 0..few,
    }
}
