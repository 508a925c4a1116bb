//! Fabric provider in virtual time, seeded and deterministic.
//!
//! Place: `substrate`; for simulations and tests of everything above fabric. A [`SimWorld`] holds
//! any number of nodes on one thread; time is a number that moves when somebody waits
//! ([`beeline_fabric::CompletionQueue::wait`], [`SimWorld::step`] and their kin), never by polling.
//!
//! ```text
//! post ── depart ──(latency, loss, partition)── arrive ── execute at target ── reply ── completion
//!         source bytes are read                  in order per queue pair,
//!                                                large writes chunk by chunk
//! ```
//!
//! Invariants: one seed and one sequence of calls give one trace ([`SimWorld::trace_hash`]);
//! packets of one queue pair are processed once and in order whatever the network did to them;
//! nothing iterates over a map whose order is not fixed.
//!
//! Faults: loss with retransmission, [`SimWorld::partition`], [`SimWorld::crash`],
//! [`SimWorld::pause`], and writes that are acknowledged before they are placed
//! ([`SimOptions::slow_placement_ns`]). [`PlantedBug`] breaks the rules on purpose, to show that
//! the conformance suite notices.

#![forbid(unsafe_code)]

mod engine;
mod objects;
mod options;
mod queue_pair;
mod registry;
mod state;
mod target;
mod trace;
mod world;

pub use objects::SimDevice;
pub use options::{PlantedBug, SimOptions};
pub use trace::{TraceKind, TraceRecord};
pub use world::SimWorld;
