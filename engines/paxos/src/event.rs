//! What happens to a replica, and what it wants done.
//!
//! The driver feeds events and carries out commands **in the order in which they were given**.
//! One-sided operations on one key are posted in that order on one queue pair, so they also run
//! and complete in it.

use crate::configuration::{Change, Configuration};
use crate::ids::{AccessKey, NodeId, Position, Term};
use crate::layout::Status;
use crate::message::Message;

/// Something happened.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// Time passed. Due every few milliseconds; `now_ns` never goes back, and its rate may be
    /// wrong: safety rests on no clock.
    Tick {
        /// Monotonic, from any start.
        now_ns: u64,
    },
    /// Entries were proposed: [`crate::Replica::propose`].
    Proposed,
    /// A message arrived.
    Message {
        /// Who sent it.
        from: NodeId,
        /// What it says.
        message: Message,
    },
    /// [`Command::Fence`] is done: nothing that anybody else does changes the log region any
    /// more, until `key` is given away.
    Fenced {
        /// Opens the region from now on, to whoever is told.
        key: AccessKey,
    },
    /// [`Command::PersistVote`] is done.
    VotePersisted,
    /// [`Command::PersistLog`] is done.
    LogPersisted {
        /// As asked.
        term: Term,
        /// As asked.
        last: Position,
    },
    /// The flush behind the writes up to `last` completed with success: they are durable there.
    Flushed {
        /// Where.
        peer: NodeId,
        /// Through which access.
        key: AccessKey,
        /// As asked.
        last: Position,
    },
    /// [`Command::ReadSlots`] completed with success.
    SlotsRead {
        /// Where.
        peer: NodeId,
        /// Through which access.
        key: AccessKey,
        /// As asked.
        first: Position,
        /// The slots, one after another, each `slot_bytes` long.
        bytes: &'a [u8],
    },
    /// [`Command::Confirm`] completed with success.
    Confirmed {
        /// Where.
        peer: NodeId,
        /// Through which access.
        key: AccessKey,
        /// As asked.
        round: u64,
    },
    /// An operation with this key failed, or the connection broke. Nothing posted with it is
    /// outstanding any more, and whatever is posted with it later is answered with this again.
    AccessLost {
        /// Where.
        peer: NodeId,
        /// Which access.
        key: AccessKey,
    },
    /// [`Command::ReadStatus`] ended.
    StatusRead {
        /// Where.
        peer: NodeId,
        /// The words, or `None`: the link is broken.
        status: Option<Status>,
    },
    /// A client wants to read: see [`Command::ReadReady`].
    Read {
        /// The caller's name for it.
        id: u64,
    },
    /// A change of membership is wanted; refused silently unless [`crate::Replica::can_change`].
    /// A server that is no member is first brought up to date, and proposed as a member then; a
    /// `Leave` of it ends that.
    ChangeMembers {
        /// Who.
        change: Change,
        /// How to reach a server that joins.
        contact: &'a [u8],
    },
    /// Whether the state machine here is about to have no room for more.
    Room {
        /// It is.
        short: bool,
    },
    /// A server that rests rests no more: a peer is connected anew, or the caller has other reasons.
    /// Whatever else is asked of it or comes from a peer wakes it as well.
    Wake,
    /// What runs `peer` has shown no sign of life for as long as a leader's beats may stand still. Of a
    /// leader that rests nothing else tells.
    Silent {
        /// Which server.
        peer: NodeId,
    },
    /// The leadership shall move to this member.
    Transfer {
        /// To whom.
        to: NodeId,
    },
    /// The state machine's snapshot up to here, which is `applied` at some moment, is durable.
    SnapshotTaken {
        /// What it covers.
        position: Position,
    },
    /// A leader's snapshot replaced the state machine, durably.
    SnapshotInstalled {
        /// What it covers.
        position: Position,
        /// The members at that position.
        configuration: Configuration,
    },
}

impl Event<'_> {
    /// Whether a server that rests goes on with its beats, or its looks at them, for this. What it
    /// began before it rested, and time, do not wake it.
    pub(crate) fn wakes(&self) -> bool {
        match self {
            Self::Tick { .. }
            | Self::Flushed { .. }
            | Self::SlotsRead { .. }
            | Self::Confirmed { .. }
            | Self::StatusRead { .. }
            | Self::LogPersisted { .. }
            | Self::SnapshotTaken { .. }
            | Self::Silent { .. } => false,
            Self::Proposed
            | Self::Message { .. }
            | Self::Fenced { .. }
            | Self::VotePersisted
            | Self::AccessLost { .. }
            | Self::Read { .. }
            | Self::ChangeMembers { .. }
            | Self::Room { .. }
            | Self::Wake
            | Self::Transfer { .. }
            | Self::SnapshotInstalled { .. } => true,
        }
    }
}

/// Something is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Send a message; it may be lost.
    Send {
        /// To whom.
        to: NodeId,
        /// What.
        message: Message,
    },
    /// Revoke the log region from whoever holds it (the fabric's revocation), and make a new key.
    /// Then [`Event::Fenced`].
    Fence,
    /// Persist the vote word. Then [`Event::VotePersisted`].
    PersistVote {
        /// The promise.
        term: Term,
        /// The vote in that term.
        voted_for: Option<NodeId>,
    },
    /// Persist own slots. Then [`Event::LogPersisted`].
    PersistLog {
        /// Returned: a later leadership may have written these slots again.
        term: Term,
        /// First slot.
        first: Position,
        /// Last slot.
        last: Position,
    },
    /// WRITE own slots to the same slots of the peer, then one persistent FLUSH behind them, all
    /// posted at once. Then [`Event::Flushed`], which is about the flush: an acknowledgement of
    /// the writes says nothing about memory.
    WriteFlush {
        /// Where.
        peer: NodeId,
        /// Through which access.
        key: AccessKey,
        /// First slot.
        first: Position,
        /// Last slot.
        last: Position,
    },
    /// WRITE the peer's commit word. No answer.
    WriteCommit {
        /// Where.
        peer: NodeId,
        /// Through which access.
        key: AccessKey,
        /// The word says this.
        position: Position,
    },
    /// READ the peer's slots. Then [`Event::SlotsRead`].
    ReadSlots {
        /// Where.
        peer: NodeId,
        /// Through which access.
        key: AccessKey,
        /// First slot.
        first: Position,
        /// How many.
        count: u64,
    },
    /// READ the peer's commit word, to see that the access still holds. Then
    /// [`Event::Confirmed`].
    Confirm {
        /// Where.
        peer: NodeId,
        /// Through which access.
        key: AccessKey,
        /// Returned.
        round: u64,
    },
    /// Give up the connection behind this key. Then [`Event::AccessLost`].
    Disconnect {
        /// Where.
        peer: NodeId,
        /// Which access.
        key: AccessKey,
    },
    /// READ the peer's status words. Then [`Event::StatusRead`].
    ReadStatus {
        /// Where.
        peer: NodeId,
    },
    /// Apply these entries, in order, before the next command.
    Apply {
        /// First entry.
        first: Position,
        /// Last entry.
        last: Position,
    },
    /// A read may be answered from the state machine as it is now.
    ReadReady {
        /// The caller's name for it.
        id: u64,
    },
    /// A read cannot be answered here; another server may.
    ReadRefused {
        /// The caller's name for it.
        id: u64,
    },
    /// Take a snapshot soon: the ring fills up. Then [`Event::SnapshotTaken`].
    TakeSnapshot,
    /// Send the newest snapshot to the peer, unless that is under way.
    SendSnapshot {
        /// To whom.
        to: NodeId,
    },
    /// This server leads, everything an earlier leader had committed is applied, and proposals
    /// are welcome.
    Leading {
        /// In which term.
        term: Term,
    },
    /// This server no longer leads. What it proposed and did not apply may or may not come about.
    SteppedDown {
        /// In which term it led.
        term: Term,
    },
    /// This server stopped: a slot it had as chosen is damaged. Replace it by a new member.
    Stop {
        /// Which.
        damaged: Position,
    },
}
