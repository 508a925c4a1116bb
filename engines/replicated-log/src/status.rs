//! What a member tells about itself, for people and metrics.

use beeline_paxos::{ClusterId, NodeId, Position, RoleName, Term};

use crate::contact::Contact;

/// Counted since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Commands proposed here.
    pub proposed: u64,
    /// Entries proposed here: commands travel together under load.
    pub entries: u64,
    /// Commands applied.
    pub applied: u64,
    /// Commands of those that had run before, and were answered as then.
    pub repeated: u64,
    /// Reads answered: barriers and linearizable queries.
    pub reads: u64,
    /// Leaderships won.
    pub leaderships: u64,
    /// Leaderships lost or given up.
    pub step_downs: u64,
    /// Connections to peers made.
    pub connections: u64,
    /// Connection attempts that failed.
    pub failed_connections: u64,
    /// Greetings refused.
    pub refused_greetings: u64,
    /// Snapshots taken.
    pub snapshots_taken: u64,
    /// Snapshots offered to peers.
    pub snapshots_sent: u64,
    /// Snapshots of peers installed.
    pub snapshots_installed: u64,
    /// Snapshots that could not be taken or installed.
    pub snapshots_failed: u64,
    /// The fabric refused to take the log region back.
    pub fence_failures: u64,
    /// Commands and barriers that another member was asked for.
    pub forwards_sent: u64,
    /// Of these, left without an answer: the connection broke, or the time was over.
    pub forwards_unanswered: u64,
    /// Not sent: the other member cannot be reached, or too much waits for it.
    pub forwards_refused: u64,
    /// Commands and barriers that other members asked for here.
    pub forwards_served: u64,
}

/// A member, as the one that is asked knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its name.
    pub id: NodeId,
    /// How it is reached.
    pub contact: Contact,
    /// There is a control connection; true for the one that is asked.
    pub connected: bool,
    /// Everything up to here is durable there. Known to the leader, of members it reaches.
    pub confirmed: Option<Position>,
    /// Entries that are committed and not durable there.
    pub lag: Option<u64>,
    /// Its state machine is about to have no room. Known to the leader, of members it reaches.
    pub short: bool,
    /// Why the last attempt to connect failed, until one succeeds.
    pub problem: Option<String>,
}

/// A member's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Its name.
    pub id: NodeId,
    /// Its cluster.
    pub cluster: ClusterId,
    /// What it does.
    pub role: RoleName,
    /// The term it promised itself to.
    pub term: Term,
    /// The leader it knows, perhaps itself.
    pub leader: Option<NodeId>,
    /// How the leader is reached.
    pub leader_contact: Option<Contact>,
    /// Proposed up to here, at the leader; elsewhere as `committed`.
    pub last: Position,
    /// Entries up to here are committed, as this member knows.
    pub committed: Position,
    /// Entries up to here have taken effect here.
    pub applied: Position,
    /// What the snapshot covers.
    pub snapshot: Position,
    /// The state machine of a member, this one or another, is about to have no room.
    pub short: bool,
    /// Sessions open.
    pub sessions: usize,
    /// The members.
    pub members: Vec<MemberStatus>,
    /// What was counted.
    pub counters: Counters,
}
