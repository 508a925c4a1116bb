//! One simulated server: its replica, its state machine, and what survives it.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use beeline_paxos::{
    ClusterId, Configuration, Kind, Layout, NodeId, Options, Position, Replica, Start, slot,
};

use crate::client::Request;
use crate::machine::{Key, Machine};
use crate::memory::{NodeMemory, Shared};
use crate::network::{Cpu, Happening};

pub(crate) const CLUSTER: ClusterId = ClusterId(0x5eed);

/// A durable snapshot.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub position: Position,
    pub configuration: Configuration,
    pub machine: Machine,
}

fn formatted(layout: Layout) -> NodeMemory {
    let memory = Rc::new(RefCell::new(NodeMemory::new(layout.region_bytes())));
    layout.format(CLUSTER, &mut Shared(Rc::clone(&memory)));
    memory.borrow_mut().persist(0, 64);
    memory.take()
}

/// A server.
#[derive(Debug)]
pub(crate) struct Server {
    pub id: NodeId,
    pub layout: Layout,
    /// Survives a kill, and in part a loss of power.
    pub memory: Rc<RefCell<NodeMemory>>,
    pub vote_word: u64,
    pub snapshot: Snapshot,
    /// `None` while it is down.
    pub replica: Option<Replica<Shared>>,
    pub machine: Machine,
    /// Counts starts: what an earlier run began does not reach this one.
    pub run: u64,
    pub paused: bool,
    /// What waits for the processor of a paused server.
    pub backlog: Vec<Cpu>,
    /// One-sided operations run on this server's processor, and stop with it.
    pub stalls: bool,
    pub stalled: Vec<Happening>,
    /// Its clock's rate, in thousandths.
    pub rate: u64,
    /// Writes reach its memory late until then.
    pub slow_until_ns: u64,
    pub queue: VecDeque<Request>,
    pub pending: BTreeMap<(Position, u16), (usize, u64)>,
    pub reads: BTreeMap<u64, (usize, u64, Key)>,
    /// Its machine was started anew, and its level does not survive that: it is not opened.
    pub rebooted: bool,
    /// It was removed after that, and is to join.
    pub rejoins: bool,
    /// When it was asked for something, or told of something, last.
    pub busy_ns: u64,
    /// When its machine last heard from that of the leader that rests.
    pub heard_ns: u64,
}

impl Server {
    pub(crate) fn new(id: NodeId, layout: Layout, configuration: Configuration) -> Self {
        Self {
            id,
            layout,
            memory: Rc::new(RefCell::new(formatted(layout))),
            vote_word: 0,
            snapshot: Snapshot {
                position: Position::NONE,
                configuration,
                machine: Machine::default(),
            },
            replica: None,
            machine: Machine::default(),
            run: 0,
            paused: false,
            backlog: Vec::new(),
            stalls: false,
            stalled: Vec::new(),
            rate: 1000,
            slow_until_ns: 0,
            queue: VecDeque::new(),
            pending: BTreeMap::new(),
            reads: BTreeMap::new(),
            rebooted: false,
            rejoins: false,
            busy_ns: 0,
            heard_ns: 0,
        }
    }

    /// Nothing of what it had is left: its machine was started anew, and the disk had none of it.
    pub(crate) fn forget(&mut self, configuration: Configuration) {
        *self.memory.borrow_mut() = formatted(self.layout);
        self.vote_word = 0;
        let machine = Machine::default();
        self.snapshot = Snapshot { position: Position::NONE, configuration, machine };
    }

    pub(crate) fn start(&mut self, options: Options, seed: u64) -> Result<(), String> {
        let start = Start {
            id: self.id,
            cluster: CLUSTER,
            layout: self.layout,
            vote_word: self.vote_word,
            snapshot: self.snapshot.position,
            chosen: Position::NONE,
            reached: Position::NONE,
            configuration: self.snapshot.configuration.clone(),
            seed,
        };
        let replica = Replica::open(start, options, Shared(self.memory.clone()));
        self.replica = Some(replica.map_err(|error| error.to_string())?);
        self.machine = self.snapshot.machine.clone();
        self.run += 1;
        Ok(())
    }

    /// What dies with the process.
    pub(crate) fn die(&mut self) {
        self.replica = None;
        self.paused = false;
        self.backlog.clear();
        self.queue.clear();
        self.pending.clear();
        self.reads.clear();
        let mut memory = self.memory.borrow_mut();
        memory.key = None;
        memory.lingering.clear();
    }

    /// Whether the entry would survive a loss of power at this moment.
    pub(crate) fn holds_durably(&self, position: Position, kind: Kind, payload: &[u8]) -> bool {
        if self.snapshot.position >= position {
            return true;
        }
        let memory = self.memory.borrow();
        let offset = self.layout.slot_offset(position);
        let bytes = memory.durable(offset, self.layout.slot_bytes() as usize);
        slot::decode(CLUSTER, position, bytes)
            .is_some_and(|entry| (entry.kind, entry.payload) == (kind, payload))
    }
}
