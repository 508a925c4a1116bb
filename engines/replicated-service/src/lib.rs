//! What a service needs to be replicated: its commands in the log, its reads behind a barrier.
//!
//! ```text
//!  service ── command ──► lane ── unit ──► log ══ agreed ══► machine ──► service, by tag
//!     ▲                    ▲                ▲                  │
//!     │                    │            courier: leads elsewhere? forwards, tries again
//!     └────── replies ─────┴────────────────┴──────────────────┘
//!  service ── barrier, then its own state
//! ```
//!
//! Place: `engines`, above [`beeline_replicated_log`]. Several services share one log: each command
//! of the log is a [`mod@unit`] with the [`Tag`] of its service and the format of its commands; the
//! [`Machine`] hands it to the [`Replicated`] service of that tag. A service with threads of its own
//! keeps [`Lane`]s and [`Courier`]s; a simpler one takes a [`Replicator`].
//!
//! *Absent:* what commands mean, and sockets: another member is reached over the fabric of the log.
//!
//! Invariants:
//! - a unit takes effect once, whole, at every member, however often it is proposed: its service
//!   stores the [`Turn`] of its lane with what it changes, or not before; what a crash left of a unit alone is
//!   completed, and not done twice, when the unit comes again ([`Replicated::reached`]), and no read sees it before
//!   ([`Group::is_loading`]);
//! - a unit that a member cannot read stops that member; nothing is skipped that another member
//!   may apply;
//! - a lane has one unit under way, and proposes nothing before everything of the node's earlier
//!   runs that the log holds is applied.

#![forbid(unsafe_code)]

pub mod courier;
mod digest;
pub mod failure;
pub mod group;
mod handle;
pub mod journey;
pub mod lane;
pub mod log;
pub mod machine;
pub mod replicator;
mod state;
pub mod unit;
pub mod units;

pub use courier::Courier;
pub use failure::Failure;
pub use group::{Clock, Group, GroupOptions, GroupStats};
pub use handle::LogHandle;
pub use journey::{Carried, Journey, Load, Step};
pub use lane::Lane;
pub use log::{Done, Log, LogMember, LogRole, LogState, Order, Refused};
pub use machine::{CannotApply, Machine, Replicated, Replies, Settled, Tag, Take};
pub use replicator::Replicator;
pub use unit::{LaneName, Turn, Unit};
pub use units::Units;
