//! A client of the document store: insert, update, delete and find, by one-sided writes over shared
//! memory, RDMA or TCP, as both ends have it; over the MongoDB wire where they have none in common.
//!
//! Place: `apps`, an edge of the program: it opens fabric devices.
//!
//! ```no_run
//! use beeline_documents_client::{Client, Options};
//! use bson::doc;
//!
//! let mut client = Client::connect("auto://127.0.0.1:4790", Options::default())?;
//! let mut items = client.collection("shop", "items");
//! items.insert_one(doc! { "_id": 1, "name": "tea" })?;
//! let found = items.find_one(doc! { "_id": 1 })?;
//! # Ok::<(), beeline_documents_client::ClientError>(())
//! ```
//!
//! Invariant: no outcome is lost in silence. Where a connection breaks under a request, a read and a write
//! with a session's number are sent again over the next best transport, and the store executes the latter
//! once; any other write ends in [`ClientError::OutcomeUnknown`].

#![forbid(unsafe_code)]

mod begun;
mod client;
mod collection;
mod error;
mod follow;
mod link;
mod login;
mod raw;
mod transport;
mod wire;

pub use beeline_documents_channel::{
    ClientCounters, MessageType, RegisterOptions, RequestError, RnicInfo,
};
pub use begun::Begun;
pub use client::{Client, Options};
pub use collection::{Collection, Find, UpdateResult};
pub use error::ClientError;
pub use link::Link;
pub use login::Login;
pub use transport::rnic;

/// Name of the document store in the bootstrap exchange.
pub const SERVICE: &str = "documents";
