//! KV-Direct: an in-memory key-value processor with atomics and vector operations.
//!
//! Place: `engines`, above `fabric` and `os`. A service (`systems/direct`) runs processors on threads;
//! clients use [`link`] and [`ring`].
//!
//! ```text
//!  client: ring ─ packet ─ link ══ fabric ══ server ─ processor ─┬─ station
//!                                                                ├─ table ─ bucket ─ memory
//!                                                                ├─ function
//!                                                                └─ slab cache ═ pools ═ daemon
//! ```
//!
//! The pairs live in volatile memory and end with the process.
//!
//! Invariants: a processor's memory belongs to it alone; results equal those of executing operations
//! one by one in the order of their arrival; the stages (decoder, station, table, allocator, engine)
//! know each other only by the calls the picture shows, so that the model drives the same code.
//!
//! Source: spec/kv-direct.md.

#![forbid(unsafe_code)]

pub mod bucket;
pub mod client;
pub mod datagram;
pub mod function;
pub mod link;
pub mod local;
pub mod map;
pub mod membership;
pub mod memory;
pub mod mover;
pub mod packet;
pub mod processor;
pub mod ring;
pub mod server;
pub mod slab;
pub mod station;
mod sync;
pub mod table;
pub mod wire;

pub use client::{Connect, DirectClient, DirectClientError};
pub use function::{Function, Functions, Width};
pub use link::{Link, LinkError, LinkOptions};
pub use local::{LocalStore, OnReply};
pub use map::{MapReport, ServerMap};
pub use packet::{Kind, PacketWriter, ReplyReader, Request, Status};
pub use processor::{Processor, ProcessorCounters, ProcessorOptions};
pub use ring::{HashRing, processor_of};
pub use server::{DirectServer, DirectServerOptions};
pub use table::{TableError, TableOptions};
