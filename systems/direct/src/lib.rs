//! KV-Direct as a service of the node: an in-memory map with atomics and vector operations.
//!
//! Place: `systems`. Below it the processor (`kv-direct`); above it the program that opens fabric
//! devices and reads the configuration.
//!
//! ```text
//!  fabric clients ─ accept ─► processor 0 (thread) ◄─ UDP        slab daemon 0 (thread, asleep)
//!  local callers ─ mailbox ─► processor 1 (thread)               slab daemon 1
//!                                └ pairs that move ─► mover 1 (thread) ─► other servers
//! ```
//!
//! Each processor owns its memory and a part of the keys; all clients, local ones too, go through its
//! one queue, so their operations have one order.
//!
//! Invariants: an idle processor sleeps in `epoll_wait`; what a client does wrong ends that client
//! alone; the pairs are volatile, and the facts say so.

#![forbid(unsafe_code)]

mod carrier;
mod metrics;
mod processor;
mod service;

pub use beeline_kv_direct::server::DirectServerOptions;
pub use metrics::DirectMetrics;
pub use service::{
    Connector, DirectError, DirectHandle, DirectOptions, DirectService, FabricClient, FabricWelcome,
};
