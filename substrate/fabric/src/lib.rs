//! Verbs: the traits and types of one-sided communication.
//!
//! Place: `substrate`, above `os`; every engine and system sees these traits and never a provider.
//! This crate performs no I/O.
//!
//! ```text
//! Device ── ProtectionDomain ── MemoryRegion        control objects: Send + Sync, may block
//!    │              │
//!    └─ CompletionQueue ── QueuePair, SharedReceiveQueue   data objects: one thread, never block
//! ```
//!
//! Invariants every provider keeps (`fabric-conformance` is their executable form):
//! - requests on one queue pair start and complete in post order; a write is placed before the
//!   completion or immediate that follows it;
//! - atomics act on 8-byte aligned words, atomically with what the device says ([`AtomicScope`]);
//! - every remote access is checked against key, range and rights; a bad one ends in an error
//!   completion, moves both ends to the error state and harms nothing else;
//! - a broken peer surfaces as error completions within a bounded time; outstanding work is
//!   flushed with [`Status::Flushed`]; nothing hangs;
//! - after a revocation returns, nothing the old peer does changes the memory.
//!
//! Control calls (open, register, connect, revoke) live on `Send + Sync` types and may block or
//! allocate. Data calls (post, poll) live on types that stay on the thread that made them, so that
//! they need no lock; they allocate nothing.

#![forbid(unsafe_code)]

pub mod completion;
pub mod device;
pub mod error;
pub mod fields;
pub mod hold;
pub mod region;
pub mod work;

pub use completion::{Opcode, Status, WorkCompletion};
pub use device::{
    AtomicScope, CompletionQueue, ConnectInfo, Device, DeviceAttributes, ProtectionDomain,
    QueuePair, QueuePairOptions, QueuePairState, Role, SharedReceiveQueue,
};
pub use error::{FabricError, PostError};
pub use hold::{Held, Hold};
pub use region::{Access, LocalKey, MemoryRegion, RegionControl, RemoteAddress, RemoteKey};
pub use work::{FlushKind, LocalData, Operation, ReceiveRequest, ScatterGatherEntry, WorkRequest};
