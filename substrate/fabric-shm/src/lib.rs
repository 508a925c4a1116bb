//! Fabric over memory that both processes map.
//!
//! Place: `substrate`, a provider of `beeline_fabric`; reached through `beeline_fabric_open`.
//!
//! ```text
//!  initiator                     connection object (one sealed memfd)            target
//!  post_send ── copy ──────────► region (the target's memfd, mapped here) ◄── reads its own memory
//!            ── slot, release ─► ring ─────────────── acquire, poll ────────► completion
//!  control thread ◄──────────── Unix socket: connect, open keys, death ─────► control thread
//! ```
//!
//! One-sided operations run inside `post_send`, on the initiator's processor, on the target's own
//! backing object: no code at the target, no system call, one cache line per small message. The
//! control thread of each device sleeps unless a connection is made, a key is opened for the first
//! time, or a peer dies.
//!
//! Invariants:
//! - data objects are confined to their thread; nothing on post or poll takes a lock or makes a
//!   system call while both ends poll;
//! - everything a peer can write is copied once, checked against private state, then used; what an
//!   honest peer could not have written breaks that connection only;
//! - bounds and rights are checked by the initiator for honest programs and enforced by the kernel
//!   per backing object for the others: a peer is handed a descriptor only for a key of its own
//!   protection domain, read-only if the rights are read-only. Whoever holds a descriptor can map
//!   all of it;
//! - a page handed out cannot be taken from a process, so revocation moves the memory instead
//!   ([`exposure`]).
//!
//! Decisions where the verbs are silent: `docs/fabric-shm.md`.

mod completion_queue;
mod config;
mod connect_info;
mod connection;
mod control;
mod core;
mod device;
mod exposure;
#[cfg(test)]
mod hostile_tests;
mod in_process;
mod keys;
mod link;
mod object;
mod queue_pair;
mod receives;
mod remote;
mod request;
#[cfg(test)]
mod revocation_tests;
mod shared_receive_queue;
mod unconfirmed;

pub use config::ShmConfig;
pub use device::ShmDevice;

/// Name in attributes, errors and URLs.
pub const PROVIDER: &str = "shm";
/// Name of the device for one process ([`ShmDevice::in_process`]).
pub const IN_PROCESS: &str = "process";
/// Longest send.
pub const MAX_SEND_BYTES: u32 = 64 << 10;
/// Longest inline data.
pub const MAX_INLINE_BYTES: u32 = 256;
/// Longest send that travels inside its slot; 8 less with an immediate.
pub const INLINE_MESSAGE_BYTES: u32 = 56;
/// Most entries of a gather list.
pub const MAX_SCATTER_GATHER_ENTRIES: u32 = 16;
