//! The router of sharded document stores: one door for MongoDB clients in front of several stores, as MongoDB's
//! `mongos`.
//!
//! Place: `apps`, an edge of the program: it reaches shards by `documents-client`, over fabric where both ends
//! have it. `beeline documents route` runs it.
//!
//! ```text
//! clients ── door ── commands ──► key, table: which shards ──► shard (threads with clients) ══ stores
//!                        │                                         │
//!                        └──────── merge, split ◄── replies ───────┘
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | `key` | shard keys, and the stretches of them that a filter can match: pure |
//! | `table` | shards, chunks, and how they are kept: pure |
//! | `split` | a pipeline as the shards' part and the router's: pure |
//! | `config` | the table's way in and out of the configuration store |
//! | `shard` | the way to a shard |
//! | `router` | what is known: table, shards, cursors |
//! | `merge` | results of several shards as one |
//! | `commands` | what each command becomes |
//!
//! Invariants: a write goes to the shards whose chunks its documents belong to, by a table that no change makes
//! wrong while it is on its way; a result over several shards is what one store with all documents would say.

#![forbid(unsafe_code)]

mod commands;
pub mod config;
mod door;
pub mod error;
pub mod key;
mod merge;
pub mod router;
pub mod shard;
mod split;
pub mod table;

pub use door::Door;
pub use error::Refusal;
pub use router::{Router, RouterCounts, RouterOptions};
pub use shard::ShardOptions;
