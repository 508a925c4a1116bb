//! The world's state: nodes, queues, and the events to come.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use beeline_env::{Clock, ManualClock, Randomness};
use beeline_fabric::{
    FlushKind, MemoryRegion, Opcode, QueuePairOptions, QueuePairState, RemoteAddress, Role, Status,
    WorkCompletion,
};
use beeline_os::memory::copy_out;

use crate::options::{PlantedBug, SimOptions};
use crate::registry::{Incarnation, Registry};
use crate::trace::{Trace, TraceKind, TraceRecord};

/// A range of a local region, kept alive by the request.
#[derive(Clone, Debug)]
pub(crate) struct LocalRange {
    pub(crate) region: MemoryRegion,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl LocalRange {
    fn read(&self, skip: u64, target: &mut [u8]) {
        let offset = usize::try_from(self.offset + skip).unwrap_or(usize::MAX);
        copy_out(self.region.memory().as_ref(), offset, target);
    }
}

/// Bytes on their way.
#[derive(Debug)]
pub(crate) enum Payload {
    /// Already read.
    Bytes(Vec<u8>),
    /// Read piece by piece while placing: for writes too large to hold.
    Ranges(Vec<LocalRange>),
}

impl Payload {
    pub(crate) fn length(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Ranges(ranges) => ranges.iter().map(|range| range.length).sum(),
        }
    }

    /// The bytes `from..from + length`.
    pub(crate) fn read(&self, from: u64, length: u64) -> Vec<u8> {
        let index = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        match self {
            Self::Bytes(bytes) => bytes[index(from)..index(from + length)].to_vec(),
            Self::Ranges(ranges) => {
                let mut bytes = vec![0; index(length)];
                let (mut at, mut done) = (0, 0);
                for range in ranges {
                    let skip = (from + done).saturating_sub(at).min(range.length);
                    let count = (range.length - skip).min(length - done);
                    range.read(skip, &mut bytes[index(done)..index(done + count)]);
                    done += count;
                    at += range.length;
                }
                bytes
            }
        }
    }
}

/// What a request asks of the target.
#[derive(Debug)]
pub(crate) enum Body {
    Write { remote: RemoteAddress, payload: Payload, placed: u64, immediate: Option<u32> },
    Read { remote: RemoteAddress, length: u64 },
    Send { payload: Payload, immediate: Option<u32> },
    CompareAndSwap { remote: RemoteAddress, expected: u64, desired: u64 },
    FetchAndAdd { remote: RemoteAddress, addend: u64 },
    Flush { remote: RemoteAddress, length: u64, kind: FlushKind },
}

/// A request on its way or at the target.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) number: u64,
    pub(crate) receiver_not_ready_ns: u64,
    pub(crate) body: Body,
}

/// What travels between two queue pairs.
#[derive(Debug)]
pub(crate) enum Packet {
    /// The first packet each way: "I am connected to you".
    Hello {
        from_token: u64,
        token: u64,
        role: Role,
    },
    Request(Request),
    Reply {
        number: u64,
        status: Status,
        data: Vec<u8>,
        length: u64,
    },
    Bye,
}

/// A posted send request.
#[derive(Debug)]
pub(crate) struct SendEntry {
    pub(crate) number: u64,
    pub(crate) wr_id: u64,
    pub(crate) opcode: Opcode,
    pub(crate) signalled: bool,
    pub(crate) posted_ns: u64,
    /// Taken when it departs.
    pub(crate) body: Option<Body>,
    /// Where a result goes.
    pub(crate) result: Option<LocalRange>,
}

/// A posted receive.
#[derive(Debug)]
pub(crate) struct PostedReceive {
    pub(crate) wr_id: u64,
    pub(crate) buffer: Option<LocalRange>,
}

/// A write that was acknowledged and is not placed yet.
#[derive(Debug)]
pub(crate) struct Deferred {
    pub(crate) remote: RemoteAddress,
    pub(crate) bytes: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerName {
    pub(crate) qp: u32,
    pub(crate) token: u64,
    pub(crate) role: Role,
}

#[derive(Debug)]
pub(crate) struct QueuePairRecord {
    pub(crate) owner: Incarnation,
    pub(crate) domain: u64,
    pub(crate) token: u64,
    pub(crate) send_queue: u64,
    pub(crate) receive_queue: u64,
    pub(crate) shared: Option<u64>,
    pub(crate) options: QueuePairOptions,
    pub(crate) state: QueuePairState,
    pub(crate) peer: Option<PeerName>,
    pub(crate) next_number: u64,
    pub(crate) sends: VecDeque<SendEntry>,
    pub(crate) receives: VecDeque<PostedReceive>,
    pub(crate) packets_sent: u64,
    pub(crate) packet_expected: u64,
    /// Packets that overtook others.
    pub(crate) early: BTreeMap<u64, Packet>,
    /// Greetings of queue pairs that this one is not connected to (yet).
    pub(crate) knocks: BTreeMap<u32, Packet>,
    pub(crate) inbound: VecDeque<Request>,
    /// The request at the front of `inbound` waits for an event.
    pub(crate) busy: bool,
    /// The request at the front of `inbound` waits for a receive.
    pub(crate) starved: bool,
    pub(crate) deferred: VecDeque<Deferred>,
    pub(crate) heard_ns: u64,
    pub(crate) timer_set: bool,
}

#[derive(Debug)]
pub(crate) struct CompletionRecord {
    pub(crate) owner: Incarnation,
    pub(crate) depth: usize,
    pub(crate) entries: VecDeque<WorkCompletion>,
    pub(crate) overrun: bool,
    pub(crate) armed: bool,
    pub(crate) event: Arc<OwnedFd>,
    pub(crate) events_signalled: u64,
}

#[derive(Debug)]
pub(crate) struct SharedRecord {
    pub(crate) depth: usize,
    pub(crate) receives: VecDeque<PostedReceive>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeRecord {
    pub(crate) generation: u32,
    pub(crate) alive: bool,
    pub(crate) paused: bool,
}

/// Something that will happen.
#[derive(Debug)]
pub(crate) enum Event {
    /// The request `number` of `qp` leaves.
    Depart { qp: u32, number: u64 },
    /// A packet reaches `to`.
    Arrive { from: Incarnation, from_qp: u32, to: u32, sequence: u64, packet: Packet },
    /// The request being executed at `qp` goes on.
    Continue { qp: u32 },
    /// The request `number` waited long enough for a receive at `qp`.
    ReceiverNotReady { qp: u32, number: u64 },
    /// Time to see whether the peer of `qp` still answers.
    Timer { qp: u32 },
    /// The oldest deferred write at `qp` is placed.
    PlaceDeferred { qp: u32 },
    /// The peer's node is known to be dead.
    PeerDead { qp: u32 },
    /// A planted bug places this late.
    PlaceLate { qp: u32, deferred: Deferred },
}

#[derive(Debug)]
struct Scheduled {
    at_ns: u64,
    order: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    /// Reversed: the heap's greatest is the next to happen.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at_ns, other.order).cmp(&(self.at_ns, self.order))
    }
}

/// Everything behind the world's lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) options: SimOptions,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) random: Randomness,
    pub(crate) registry: Arc<Registry>,
    pub(crate) trace: Trace,
    pub(crate) world_token: u64,
    pub(crate) nodes: BTreeMap<u32, NodeRecord>,
    pub(crate) cut: BTreeSet<(u32, u32)>,
    pub(crate) queue_pairs: BTreeMap<u32, QueuePairRecord>,
    pub(crate) completion_queues: BTreeMap<u64, CompletionRecord>,
    pub(crate) shared_queues: BTreeMap<u64, SharedRecord>,
    next_id: u64,
    events: BinaryHeap<Scheduled>,
    next_order: u64,
    /// Events held back by a pause or a partition, in the order they came up.
    pub(crate) held: Vec<Event>,
}

impl State {
    pub(crate) fn new(seed: u64, options: SimOptions) -> Self {
        let mut random = Randomness::new(seed);
        let registry = Arc::new(Registry::new(random.fork()));
        Self {
            clock: Arc::new(ManualClock::new(options.unix_ms)),
            trace: Trace::new(options.trace_records),
            world_token: random.next_u64(),
            options,
            random,
            registry,
            nodes: BTreeMap::new(),
            cut: BTreeSet::new(),
            queue_pairs: BTreeMap::new(),
            completion_queues: BTreeMap::new(),
            shared_queues: BTreeMap::new(),
            next_id: 1,
            events: BinaryHeap::new(),
            next_order: 0,
            held: Vec::new(),
        }
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.clock.monotonic_ns()
    }

    /// A number not used before in this world.
    pub(crate) fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    pub(crate) fn has_bug(&self, bug: PlantedBug) -> bool {
        self.options.planted_bug == Some(bug)
    }

    pub(crate) fn schedule(&mut self, delay_ns: u64, event: Event) {
        let at_ns = self.now_ns().saturating_add(delay_ns);
        self.next_order += 1;
        self.events.push(Scheduled { at_ns, order: self.next_order, event });
    }

    /// When the next event happens.
    pub(crate) fn next_event_ns(&self) -> Option<u64> {
        self.events.peek().map(|next| next.at_ns)
    }

    /// Takes the next event if it happens at `limit_ns` or before, moving the clock to it.
    pub(crate) fn pop_event(&mut self, limit_ns: u64) -> Option<Event> {
        if self.next_event_ns()? > limit_ns {
            return None;
        }
        let next = self.events.pop()?;
        self.clock.advance_to_ns(next.at_ns);
        Some(next.event)
    }

    pub(crate) fn record(&mut self, kind: TraceKind, qp_num: u32, value: u64) {
        let at_ns = self.now_ns();
        self.trace.record(TraceRecord { at_ns, kind, qp_num, value });
    }

    pub(crate) fn is_alive(&self, incarnation: Incarnation) -> bool {
        self.nodes
            .get(&incarnation.node)
            .is_some_and(|node| node.alive && node.generation == incarnation.generation)
    }

    /// False when a pause or a partition stands between two nodes.
    pub(crate) fn reaches(&self, from: u32, to: u32) -> bool {
        let paused = |node| self.nodes.get(&node).is_some_and(|node| node.paused);
        !paused(from) && !paused(to) && !self.cut.contains(&(from.min(to), from.max(to)))
    }

    /// Delivers a completion.
    pub(crate) fn complete(&mut self, queue: u64, mut completion: WorkCompletion) {
        let bug = self.options.planted_bug;
        if bug != Some(PlantedBug::ForgetContext) || completion.is_success() {
            let of = self.queue_pairs.get(&completion.qp_num);
            completion.context = of.map_or(0, |record| record.options.context);
        }
        let Some(record) = self.completion_queues.get_mut(&queue) else { return };
        if record.overrun {
            return;
        }
        if record.entries.len() >= record.depth {
            if bug != Some(PlantedBug::SilentOverrun) {
                record.overrun = true;
                record.entries.clear();
                record.signal(bug);
                self.break_all_on(queue);
            }
            return;
        }
        record.entries.push_back(completion);
        record.signal(bug);
        self.record(TraceKind::Complete, completion.qp_num, completion.wr_id);
    }

    fn break_all_on(&mut self, queue: u64) {
        let broken: Vec<u32> = self
            .queue_pairs
            .iter()
            .filter(|(_, qp)| qp.send_queue == queue || qp.receive_queue == queue)
            .map(|(id, _)| *id)
            .collect();
        for qp in broken {
            self.break_queue_pair(qp);
        }
    }
}

impl CompletionRecord {
    /// Signals the event of an armed queue.
    fn signal(&mut self, bug: Option<PlantedBug>) {
        if !self.armed {
            return;
        }
        self.armed = false;
        self.events_signalled += 1;
        if bug == Some(PlantedBug::LoseWakeUps) && self.events_signalled.is_multiple_of(3) {
            return;
        }
        // An eventfd takes 2^64 - 2 such writes before this could fail.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}
