//! Immutable objects in memory that the processes of a host share (spec: object-store).
//!
//! Place: `systems`. [`store`] is the service of a node that owns the memory; [`client`] is the
//! library in the user's process. Data never passes a socket or a ring: the creator writes the
//! store's memory and readers map it read-only.
//!
//! Invariants: an object can be written by its creator until it is sealed; every other process
//! maps its memory read-only and the kernel enforces that ([`segment`]); what a client sends or
//! can write is copied, checked, then used ([`link`], [`wire`]); objects live in memory and on
//! local disk and survive neither the store nor the node, by design.

pub mod client;
pub mod cluster;
mod error;
mod heap;
mod id;
mod link;
mod segment;
mod service;
pub mod store;
mod transfer;
mod wire;

pub use client::{Buffer, Client, ClientOptions, Object};
pub use error::ObjectsError;
pub use id::{BadId, ID_BYTES, ObjectId};
pub use service::{NAME, ObjectService};
pub use store::{Alone, Cluster, ObjectMetrics, Store, StoreHandle, StoreOptions};
pub use wire::Entry;
