//! Multi-Paxos by one-sided writes into durable memory, as a pure state machine.
//!
//! Place: `engines`. [`Replica`] takes events and gives commands; it has no clock, thread, socket
//! or file, and reaches memory through [`LogMemory`] only. A driver carries the commands out over
//! fabric and durable memory; a simulation carries them out in virtual time.
//!
//! ```text
//!              events                                commands
//!  completions, messages,  ──▶  Replica::step  ──▶   WriteFlush, WriteCommit, ReadSlots,
//!  time, proposals, reads                            Fence, PersistVote, Send, Apply, …
//!                                    │
//!                               LogMemory: own slots, commit word, status words
//! ```
//!
//! A command is agreed and durable when the flushes behind its write have completed at f + 1
//! memories: one round, and no follower's processor takes part. The protocol, its safety argument
//! and the formats stand in `docs/log-protocol.md`.
//!
//! Reading order: [`slot`] and [`layout`] (formats), [`event`] (the contract with the driver),
//! then `replica` from `promise` to `apply`; [`batch`] and [`session`] are for the state machine
//! above.

#![forbid(unsafe_code)]

pub mod batch;
pub mod configuration;
pub mod event;
pub mod ids;
pub mod layout;
pub mod memory;
pub mod message;
pub mod options;
pub mod replica;
pub mod session;
pub mod slot;

pub use batch::{Batch, ClientCommand};
pub use configuration::{Change, Configuration, MAX_CONTACT_BYTES, MAX_MEMBERS};
pub use event::{Command, Event};
pub use ids::{AccessKey, ClusterId, NodeId, Position, Term};
pub use layout::{Layout, LayoutError, Status};
pub use memory::{HeapMemory, LogMemory};
pub use message::{Grant, Message};
pub use options::Options;
pub use replica::{ProposeError, Replica, RoleName, Start};
pub use session::{Outcome, Sessions};
pub use slot::{Entry, Kind};
