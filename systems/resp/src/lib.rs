//! The Redis door: codec, commands and their semantics over a keyspace.
//!
//! Place: `systems`. Below it `kv` (the keyspace); above it `node`, which owns sockets, threads,
//! locks and the clock's ticking. Nothing here waits, opens, spawns or reads a clock of its own.
//!
//! ```text
//! socket ─▶ RequestParser ─▶ Args ─▶ Plan ──▶ Route ─▶ node locks shards (or forwards)
//!                                      │                       │
//!                                      └──▶ Executor::execute ◀┘ Keyspace
//!                                                 │
//! socket ◀─ after commit() ◀─ Output ◀────────────┘
//! ```
//!
//! A node's loop, for each request of a connection:
//!
//! 1. [`RequestParser::next_request`] yields slices of the input buffer.
//! 2. [`Plan::new`] finds the command and checks arity, permission and transaction state.
//! 3. [`Plan::route`] says which shards it needs; the node locks them in index order and builds a
//!    keyspace, or, for one foreign shard and a portable plan, sends database, dialect and an
//!    [`ArgsBuffer`] there, where [`Executor::execute_remote`] runs it.
//! 4. [`Executor::execute`] appends the reply to the connection's [`Output`].
//! 5. After a batch of requests the node commits the shards, then sends.
//!
//! On the way of GET, SET, INCR, MGET and MSET nothing is allocated once buffers have grown.
//!
//! `docs/redis.md` lists the commands, the deviations from Redis with their reasons, and limits.
#![forbid(unsafe_code)]

mod absent;
pub mod args;
mod commands;
pub mod direct;
mod error;
mod executor;
pub mod extended;
pub mod figures;
pub mod glob;
pub mod logged;
pub mod number;
mod output;
pub mod parser;
mod plan;
mod server;
mod session;
pub mod table;

pub use absent::{AbsentWatch, AbsentWatches};
pub use args::{Args, ArgsBuffer, Span};
pub use commands::{Call, CommandResult, Counters, DataHandler, SessionHandler, type_name};
pub use error::CommandError;
pub use executor::{After, Executor, Remote, reply_protocol_error};
pub use logged::{Logged, Reach};
pub use output::{Output, Version};
pub use parser::{Limits, ProtocolError, RequestParser, expected};
pub use plan::{Effect, Placement, Plan, Planned, Route, ShardSet};
pub use server::{ConfigError, KillFilter, Pause, SaveError, Server, Shutdown};
pub use session::{ClientInfo, DEFAULT_USER, Session};
