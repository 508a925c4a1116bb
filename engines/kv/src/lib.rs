//! The durable key-value store: log-structured shards over durable memory.
//!
//! Place: `engines`. Below it `pmem` (segments that survive) and `env` (clock, faults); above it
//! `kv-server` (one-sided clients), `resp` (Redis commands) and `node` (threads and sockets).
//!
//! ```text
//! Store ── versions, segment table, barriers, limits, statistics       (shared, atomics only)
//!   └ Shard × n ── indexes (one per database), own log, collector, expiry   (one lock each)
//!        └ ClientLog × m ── segments that one remote client writes by itself
//! ```
//!
//! Any log may hold the entry of any key; the *index* of a key lives in exactly one shard, chosen
//! by its hash. Nothing is acknowledged before [`Shard::commit`] returned.
//!
//! Source: BOOM-KV. `docs/kv-internals.md` holds the formats, the arguments and every deviation.

mod append;
mod audit;
mod catalog;
mod check;
mod check_rows;
mod check_streams;
mod counted;
mod embedded;
mod ended;
pub mod entry;
mod error;
mod expiries;
pub mod fault;
mod feed;
mod field;
mod foreseen;
mod index;
mod keyspace;
mod known_row;
mod options;
mod ordered;
mod peers;
mod placement;
mod random;
mod recover;
mod replica;
mod row_ends;
mod rows;
mod same;
mod segments;
mod service_rows;
mod shard;
mod siphash;
mod snapshot;
mod space;
mod space_limit;
mod spaces;
mod stats;
mod store;
mod streams;
mod unfinished;
mod walk;
pub mod wire;
mod write_back;

pub use append::{StreamEnds, StreamEntry};
#[doc(hidden)]
pub use audit::audit;
pub use check::{CheckReport, Damage, check, check_pool, repair};
pub use check_rows::{RowEndSeen, RowTimeSeen};
pub use check_streams::StreamSeen;
pub use embedded::Embedded;
pub use error::KvError;
pub use feed::{Event, EventKind, Events, FeedStats};
pub use keyspace::Keyspace;
pub use options::{Eviction, StoreOptions};
#[cfg(debug_assertions)]
pub use placement::keys_placed;
pub use placement::{hash_key, shard_of_hash};
pub use recover::Opened;
pub use replica::{check_replacement, replace_by_snapshot};
pub use rows::{Row, is_row_kind};
pub use service_rows::RowState;
pub use shard::ahead::{Expected, KEYS_AHEAD};
pub use shard::client_log::{Accepted, ClientLog, Notice, Reject, RejectReason};
pub use shard::reads::ReadGuard;
pub use shard::{EntryRef, Maintenance, PutOptions, Shard};
pub use snapshot::{Snapshot, SnapshotReport, check_snapshot, restore, restore_directory};
pub use space::{Applied, Change, Condition, FIRST_NAMESPACE, Key, NamespaceOptions, Range, Write};
pub use space_limit::NamespaceLimit;
pub use stats::{ShardStats, StoreStats};
pub use store::{RecoveryReport, Store};
pub use unfinished::refuse_unfinished;

/// Number of databases.
pub const DATABASES: u16 = 16;

/// The namespace behind the databases, which no client can name: what a replicated store keeps
/// beside its keys, in their batches and snapshots, and the catalog of namespaces. No flush
/// reaches it.
pub(crate) const SYSTEM_NAMESPACE: u32 = 16;

/// Indexes of a shard that every store has: one for each database, the last one the system's.
pub(crate) const INDEXES: usize = DATABASES as usize + 1;

/// Larger is newer, across all keys and clients of a store.
pub type Version = u64;
