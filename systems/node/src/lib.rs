//! The node: shards, one thread per core, that serve Redis clients, one-sided clients and each
//! other in one loop.
//!
//! Place: `systems`. Below it the store (`kv`), the one-sided protocol (`kv-server`) and the Redis
//! commands (`resp`); above it the program that reads configuration and opens fabric devices.
//!
//! ```text
//!  accept ──deliveries──► shard 0 ◄──mailboxes──► shard 1 ◄── deliveries── bootstrap
//!                         (thread)                (thread)
//! ```
//!
//! Invariants: a reply leaves only after the commit of what it answers; a key's index is touched
//! under its shard's lock only; an idle node sleeps in `epoll_wait` on every thread.

#![forbid(unsafe_code)]

mod accept;
mod answer;
pub mod config;
mod connection;
pub mod error;
pub mod fabric_door;
mod fabric_servers;
pub mod node;
mod parcel;
mod places;
mod redis;
pub mod replicated;
mod resting;
mod service;
mod shared;
mod snapshot;
mod stats;
mod turn;
pub mod wire;

pub use beeline_kv_server::ServerOptions;
pub use beeline_resp::figures::CommandTime;
pub use config::{NodeConfig, PipelineOrder, RedisDoor};
pub use error::NodeError;
pub use fabric_door::{FabricAccepted, FabricIncoming, FabricReply};
pub use node::{Node, NodeHandle, NodeStats, WireDoor};
pub use replicated::machine::ReplicatedKeys;
pub use replicated::{Peer, PeerError, ReplicationOptions, ReplicationStats};
pub use service::REDIS_VERSION;
pub use snapshot::FILE_NAME as SNAPSHOT_FILE_NAME;
pub use stats::{LoopStats, LoopTimes};
