//! Runs the replicated log's protocol over fabric and durable memory.
//!
//! Place: `engines`. [`beeline_paxos::Replica`] decides; a [`Member`] does: it posts the one-sided
//! operations, carries the messages of elections, revokes and registers memory, and hands what
//! concerns the state machine above to its caller, as the commands they are.
//!
//! ```text
//!   caller ── poll, propose, event ──▶ Member ──▶ Replica
//!     ▲                                  │  queue pairs per peer:
//!     └── Apply, ReadReady, Leading … ───┤    control   messages, reads of status words
//!                                        │    data      the log, made anew with every promise
//!                                        └    forward   what one member has another one propose
//! ```
//!
//! A member lives on one thread and never blocks. How connection data reaches a peer is the
//! caller's business ([`Member::listen`], [`Member::connect`]).
//!
//! Invariants:
//! - an answer that grants access leaves after the fabric's revocation of the region returned;
//! - a data queue pair serves one promise: a grant that is repeated comes with another;
//! - what a peer sent is decoded into a [`frame::Frame`] before anything believes it.

#![forbid(unsafe_code)]

pub mod boot;
mod bulk;
pub mod contact;
pub mod error;
pub mod follow;
mod forward;
pub mod frame;
pub mod ground;
pub mod handle;
pub mod hello;
pub mod home;
pub mod host;
mod known;
mod line;
mod link;
pub mod machine;
pub mod member;
pub mod node;
mod peers;
mod region;
pub mod server;
mod shared;
pub mod snapshot;
pub mod status;
pub mod transport;

pub use beeline_paxos::{ClusterId, Layout, NodeId, Options, Position, RoleName, Term};
pub use boot::Boot;
pub use bulk::Received;
pub use contact::Contact;
pub use error::LogError;
pub use follow::Follower;
pub use ground::{FewThreads, Ground, Jobs, ThisMachine, Threads};
pub use handle::{Consistency, Handle, NO_SESSION, Refusal, Reply};
pub use hello::HelloError;
pub use home::{Founding, Home, HomeError};
pub use host::{Entrance, Host, HostConfig, ThreadStatus};
pub use machine::{SnapshotWriter, StateMachine};
pub use member::{Durability, Endpoint, Member, MemberMemory};
pub use node::{Config, Node, NodeError};
pub use server::Server;
pub use snapshot::SnapshotError;
pub use status::{Counters, MemberStatus, Status};
pub use transport::{InProcess, Transport, TransportError};
