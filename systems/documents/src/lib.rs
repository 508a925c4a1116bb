//! The document store: databases, collections and indexes for MongoDB's drivers and tools.
//!
//! Place: `systems`. Below it the query language (`documents-query`), the node and its store; above
//! it `beeline serve`, which starts [`Documents`] as a service.
//!
//! ```text
//! door ─ wire ──┐
//! channel ──────┴► commands ─► query, write ─► plan, scan, index ─► store (a row per database)
//!                               │
//!                            cursor, catalog, engine
//! ```
//!
//! Invariants: a reply leaves after the commit of what it speaks of; a document and its index
//! entries change in one batch; an index never changes a result; no lock of a row is held for more
//! than a slice of a query.

#![forbid(unsafe_code)]

mod bounds;
pub mod catalog;
mod changes;
pub mod channel;
pub mod commands;
pub mod cursor;
mod door;
pub mod engine;
pub mod expiry;
mod index;
pub mod layout;
pub mod listening;
pub mod log;
pub mod node_store;
pub mod operation;
pub mod plan;
mod query;
pub mod replica;
pub mod reply;
pub mod request;
pub mod retry;
pub mod scan;
mod scram;
mod service;
mod spare;
mod stats;
pub mod store;
pub mod transaction;
pub mod users;
mod validate;
pub mod versions;
pub mod wire;
pub mod write;

pub use channel::{ChannelHandle, ChannelOptions, FabricClient, FabricWelcome};
pub use engine::{Engine, EngineOptions};
pub use index::hash as hash_of;
pub use service::{Documents, DocumentsError, DocumentsOptions, Membership};
pub use stats::DocumentsMetrics;
