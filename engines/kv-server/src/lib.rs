//! One-sided key-value protocols, server side: BOOM and its two baselines.
//!
//! Place: `engines`, above `kv` and `fabric`, beside `kv-client`. One [`ShardServer`] per shard,
//! on the shard's thread; the node's loop drives it:
//!
//! ```text
//! loop {
//!     server.poll(&mut shard)    completions → entries accepted, gets looked up, replies prepared
//!     …sockets, mailboxes…       other work of the same batch
//!     shard.commit()             one fence for all of it
//!     server.complete()          replies and results posted
//!     nothing happened? server.arm(), poll once more, sleep on server.event_descriptor()
//! }
//! ```
//!
//! Invariants:
//! - no reply leaves before the commit of everything executed before it;
//! - a client has as many receives as its window, posted again only with the reply, so that what
//!   it can make the server hold is bounded and its flood is its own;
//! - memory a client can write is copied before it is looked at;
//! - a get's entry is pinned from lookup to completion.
//!
//! In a member of a cluster ([`ServerOptions::replicated`]) writes and reads wait for the cluster's
//! log: [`agreed`].
//!
//! Source: BOOM §3.1 to §3.3; §1 for the baselines. Formats: [`beeline_kv::wire`].

#![forbid(unsafe_code)]

pub mod agreed;
mod connection;
mod copied;
pub mod counters;
mod early;
pub mod error;
mod execute;
pub mod options;
mod regions;
pub mod server;

pub use agreed::{AgreedWrite, Agreement, Ticket, Wrote};
pub use counters::ServerCounters;
pub use error::ServerError;
pub use options::ServerOptions;
pub use server::{Admission, ShardServer};
