//! What is under way: messages, one-sided operations, and work for a processor.

use std::collections::{BTreeMap, BTreeSet};

use beeline_paxos::{AccessKey, Change, Message, NodeId, Position, Status, Term};

use crate::client::Request;
use crate::machine::Reply;
use crate::server::Snapshot;

/// Needs a server's processor; waits while it is paused, and is dropped when it dies.
#[derive(Clone, Debug)]
pub(crate) enum Cpu {
    Tick,
    Message { from: NodeId, message: Message },
    Fence,
    PersistVote { word: u64 },
    PersistLog { term: Term, first: Position, last: Position },
    Flushed { peer: NodeId, key: AccessKey, last: Position },
    SlotsRead { peer: NodeId, key: AccessKey, first: Position, bytes: Vec<u8> },
    Confirmed { peer: NodeId, key: AccessKey, round: u64 },
    AccessLost { peer: NodeId, key: AccessKey },
    StatusRead { peer: NodeId, status: Option<Status> },
    SnapshotDurable { snapshot: Box<Snapshot> },
    SnapshotArrived { snapshot: Box<Snapshot> },
    Request(Request),
    Change(Change),
    Transfer { to: NodeId },
}

/// A one-sided operation through a key.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// Bytes to their offsets; with a flush behind them, or without an answer.
    Write {
        writes: Vec<(u64, Vec<u8>)>,
        flush: Option<Position>,
    },
    Read {
        first: Position,
        count: u64,
    },
    Confirm {
        round: u64,
    },
}

/// Something at a moment of virtual time.
#[derive(Clone, Debug)]
pub(crate) enum Happening {
    Cpu {
        node: usize,
        run: u64,
        cpu: Cpu,
    },
    /// An operation reaches the target's network card.
    Arrive {
        key: AccessKey,
        operation: Operation,
    },
    /// Bytes reach the target's memory.
    Place {
        key: AccessKey,
        run: u64,
        offset: u64,
        bytes: Vec<u8>,
    },
    /// The flush behind placed bytes.
    Flush {
        key: AccessKey,
        run: u64,
        ranges: Vec<(u64, usize)>,
        last: Position,
        answers: bool,
    },
    ProbeStatus {
        from: usize,
        run: u64,
        to: usize,
    },
    ClientTry {
        client: usize,
        attempt: u64,
    },
    Reply {
        client: usize,
        number: u64,
        reply: Reply,
    },
    Redirect {
        client: usize,
        number: u64,
        hint: Option<usize>,
    },
    Fault,
    Restart {
        node: usize,
    },
    Resume {
        node: usize,
    },
    Mend {
        link: (usize, usize),
    },
    HealAll,
    LookForRest,
}

/// The initiator's side of a key.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    pub from: usize,
    pub from_run: u64,
    pub to: usize,
    /// Of the target, when the connection was first used: it opens the memory of that run.
    pub to_run: u64,
    pub alive: bool,
    pub last_arrival_ns: u64,
    pub last_place_ns: u64,
}

/// Links and connections.
#[derive(Debug, Default)]
pub(crate) struct Network {
    /// Directed links that are cut.
    pub cut: BTreeSet<(usize, usize)>,
    pub connections: BTreeMap<u64, Connection>,
    /// Messages lost, in thousands.
    pub loss: u64,
}

impl Network {
    pub(crate) fn passes(&self, from: usize, to: usize) -> bool {
        !self.cut.contains(&(from, to))
    }

    /// Operations need both directions.
    pub(crate) fn connects(&self, from: usize, to: usize) -> bool {
        self.passes(from, to) && self.passes(to, from)
    }
}
