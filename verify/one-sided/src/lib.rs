//! One-sided key-value protocols end to end: client, server and store over every provider.
//!
//! The suites are in `tests/`: `operations` (what a user expects), `counts` (round trips, verbs
//! and bytes at both ends), `conditions` (the mixed update's three conditions, each shown to be
//! needed), `direct`, `direct_history` and `direct_moves` (the direct store: one order, checked by
//! [`linear`]; servers that join and leave under load), `hostile` (clients that mean harm), `threads` (blocking clients, shards on threads).
//! `examples/latency.rs` prints latency and throughput.

#![forbid(unsafe_code)]

pub mod linear;
