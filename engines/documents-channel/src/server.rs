//! The server's end of all channels of one device: one thread, one completion queue, one shared receive
//! queue.
//!
//! A request is executed by the thread that polled it ([`Handler::execute`]), which answers at once or
//! keeps the request and answers later ([`ChannelServer::respond`]).
//!
//! Cost of a request whose body fits: one copy of the message out of the ring, the command, its reply
//! encoded into the pool, a write with the reply and an empty write with the acknowledgement. No system
//! call, no registration.
//!
//! Invariants: what a client does wrong ends that client's channel alone; what a client makes the server
//! keep is bounded ([`ServerOptions`]), and what is kept for all of them too; a destination gets one reply.
//!
//! Source: spec/rmongo.md 3.4, 3.6, 3.9.

use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use beeline_env::Clock;
use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, FabricError, MemoryRegion, ProtectionDomain,
    QueuePair, QueuePairOptions, QueuePairState, ReceiveRequest, RemoteKey, Role,
    SharedReceiveQueue, WorkCompletion,
};

use crate::greeting::{Detected, Greeting, detect};
use crate::message::{Message, SLOT_BYTES};
use crate::numbers::ByNumber;
use crate::planted::{Planted, planted};
use crate::pool::{Pool, ReplyBuffer};
use crate::register::{Meters, register_size};

mod channel;
mod options;
mod requests;

use channel::{Channel, Flying};
pub use options::{ServerCounters, ServerOptions};

/// A channel whose writes do not get on for so long ends while few buffers are left.
const STUCK_NS: u64 = 1_000_000_000;
/// Receives kept posted for all channels, where the device allows for so many.
const SHARED_RECEIVES: u32 = 8192;

/// A channel, for as long as the server lives.
pub type ChannelId = u64;

/// A request that arrived.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'r> {
    /// Its channel.
    pub channel: ChannelId,
    /// Its message.
    pub message: Message<'r>,
    /// Its body, however it came.
    pub body: &'r [u8],
    /// Bytes of reply that its destination holds.
    pub capacity: usize,
}

/// What becomes of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The buffer holds the reply.
    Reply,
    /// The reply comes by [`ChannelServer::respond`].
    Later,
    /// The buffer holds the reply, which waits for [`ChannelServer::release`].
    Kept,
    /// The newest optime, to an [`OptimeRequest`](crate::MessageType::OptimeRequest).
    Optime(u64),
    /// It failed: a code and a text.
    Fail(u32, String),
}

/// Who executes requests.
pub trait Handler {
    /// Executes a request.
    fn execute(&mut self, request: &Incoming<'_>, reply: &mut ReplyBuffer) -> Answer;
    /// What was executed so far is answered, as far as it can be: time for what its client need
    /// not wait for.
    fn answered(&mut self) {}
    /// The longest body that a channel's client may send now; a longer one ends its channel.
    fn longest_body(&mut self, _: ChannelId) -> usize {
        usize::MAX
    }
    /// A channel is gone.
    fn ended(&mut self, channel: ChannelId);
}

/// See the module's documentation.
#[derive(Debug)]
pub struct ChannelServer {
    device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
    queue: Rc<dyn CompletionQueue>,
    receives: Rc<dyn SharedReceiveQueue>,
    receive_depth: u32,
    options: ServerOptions,
    clock: Arc<dyn Clock>,
    meters: Box<dyn Meters>,
    pool: Rc<Pool>,
    /// A channel's number is the context of its queue pair: what a completion carries.
    channels: ByNumber<ChannelId, Channel>,
    next_id: ChannelId,
    entries: u32,
    promised: u32,
    /// Bytes of bodies that are incomplete or wait for their execution.
    bodies: usize,
    /// Some channel has something to send, or a message to take, and could not.
    waiting: bool,
    counters: ServerCounters,
    completions: Box<[WorkCompletion]>,
    slot: Vec<u8>,
    body: Vec<u8>,
}

fn send_depth(slots: u16) -> u32 {
    u32::from(slots) * 4 + 64
}

/// Most completions a channel can have in the queue.
fn promised(slots: u16, theirs: u16) -> u32 {
    send_depth(slots) + u32::from(slots) + u32::from(theirs)
}

impl ChannelServer {
    /// A server without channels, on the calling thread.
    ///
    /// Errors: the device's.
    pub fn new(
        device: Arc<dyn Device>,
        options: ServerOptions,
        clock: Arc<dyn Clock>,
        meters: Box<dyn Meters>,
    ) -> Result<Self, FabricError> {
        let domain = device.allocate_protection_domain()?;
        let limits = device.attributes();
        let entries = limits.max_completion_queue_depth.min(1 << 17);
        let receive_depth = limits.max_queue_depth.min(SHARED_RECEIVES);
        let queue = device.create_completion_queue(entries)?;
        let receives = domain.create_shared_receive_queue(receive_depth)?;
        let pool = Pool::new(&device, &domain, options.buffer_bytes, options.pool_buffers)?;
        let batch = (options.max_cq_num * 2).clamp(1, 4096);
        let mut server = Self {
            device,
            domain,
            queue,
            receives,
            receive_depth,
            options,
            clock,
            meters,
            pool,
            channels: ByNumber::default(),
            next_id: 0,
            entries,
            promised: receive_depth,
            bodies: 0,
            waiting: false,
            counters: ServerCounters { registrations: 1, ..ServerCounters::default() },
            completions: vec![WorkCompletion::EMPTY; batch].into(),
            slot: vec![0; SLOT_BYTES],
            body: Vec::new(),
        };
        server.refill(receive_depth);
        Ok(server)
    }

    /// The device it serves on.
    #[must_use]
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Channels there are.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.channels.len()
    }

    /// What it did so far.
    #[must_use]
    pub fn counters(&self) -> ServerCounters {
        ServerCounters { staged_bytes: self.pool.staged(), ..self.counters }
    }

    /// Buffers of the pool that are idle.
    #[must_use]
    pub fn idle_buffers(&self) -> usize {
        self.pool.idle()
    }

    /// Bytes that are registered for channels and the pool.
    #[must_use]
    pub fn registered_bytes(&self) -> u64 {
        let channels = self.channels.values().map(|channel| channel.region.length_bytes());
        self.pool.region.length_bytes() + channels.sum::<u64>()
    }

    /// Receives that are posted for all channels together.
    #[must_use]
    pub fn posted_receives(&self) -> u32 {
        self.receives.posted()
    }

    /// Bytes a client may write into the area of a channel.
    #[must_use]
    pub fn area_bytes(&self, channel: ChannelId) -> Option<u64> {
        Some(self.channels.get(&channel)?.area().1)
    }

    /// Readable once [`ChannelServer::arm`] was called and something came.
    #[must_use]
    pub fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.queue.event_descriptor()
    }

    /// Asks for an event. Poll until nothing comes afterwards, then sleep.
    ///
    /// Errors: the provider's.
    pub fn arm(&self) -> Result<(), FabricError> {
        self.queue.arm()
    }

    /// Clears the event after the descriptor became readable.
    ///
    /// Errors: the provider's.
    pub fn acknowledge(&self) -> Result<(), FabricError> {
        self.queue.acknowledge()
    }

    /// Takes a client, or tells it to use TCP; returns its queue pair's connection data, where it was
    /// taken, and this end's greeting. Does not block.
    pub fn accept(&mut self, peer: &ConnectInfo, hello: &[u8]) -> (Option<ConnectInfo>, Vec<u8>) {
        let outcome = match Greeting::decode(hello) {
            Ok(hello) => {
                let mut own = self.refusal("documents-is-rdma is off".to_owned());
                own.is_rdma = self.options.is_rdma;
                match detect(&own, &hello) {
                    Detected::Rdma(_) => self.admit(peer, &hello),
                    Detected::Tcp(why) => Err(why),
                }
            }
            Err(error) => Err(error.to_string()),
        };
        match outcome {
            Ok((info, welcome)) => {
                self.counters.accepted += 1;
                (Some(info), welcome.encode())
            }
            Err(reason) => {
                self.counters.refused += 1;
                (None, self.refusal(reason).encode())
            }
        }
    }

    fn refusal(&self, reason: String) -> Greeting {
        Greeting::without(self.options.rnic.clone(), self.options.wire, reason)
    }

    fn admit(
        &mut self,
        peer: &ConnectInfo,
        hello: &Greeting,
    ) -> Result<(ConnectInfo, Greeting), String> {
        let slots = self.options.slots.clamp(1, 1024);
        let their_slots = hello.slots;
        if !(1..=1024).contains(&their_slots)
            || hello.region_bytes < u64::from(their_slots) * SLOT_BYTES as u64
        {
            return Err("a ring has 1 to 1024 slots and lies inside its region".to_owned());
        }
        let promised = promised(slots, their_slots);
        if self.channels.len() as u32 >= self.options.max_channels
            || self.promised + promised > self.entries
        {
            return Err(format!("{} channels are served, the most", self.channels.len()));
        }
        let ring = u64::from(slots) * SLOT_BYTES as u64;
        let area = register_size(&self.options.register, &self.meters.load());
        let length = (ring + area).next_multiple_of(4096) as usize;
        self.next_id += 1;
        let id = self.next_id;
        let made = || -> Result<(Box<dyn QueuePair>, MemoryRegion), FabricError> {
            let depths = QueuePairOptions {
                send_depth: send_depth(slots),
                context: id,
                ..QueuePairOptions::default()
            };
            let mut qp = self.domain.create_queue_pair(
                &self.queue,
                &self.queue,
                Some(&self.receives),
                depths,
            )?;
            let memory = self.device.allocate_memory(length)?;
            let region =
                self.domain.register(memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
            qp.connect(peer, Role::Passive)?;
            Ok((qp, region))
        };
        let (qp, region) = made().map_err(|error| error.to_string())?;
        self.counters.registrations += 1;
        let info = qp.connect_info();
        let checksum = self.options.checksum || hello.checksum;
        let welcome = Greeting {
            is_rdma: true,
            checksum,
            slots,
            rnic: self.options.rnic.clone(),
            region_key: region.remote_key().0,
            region_bytes: region.length_bytes(),
            wire: self.options.wire,
            reason: String::new(),
        };
        let timeout = u64::try_from(self.options.connect_timeout.as_nanos()).unwrap_or(u64::MAX);
        let channel = Channel {
            qp,
            region,
            slots,
            checksum,
            theirs: RemoteKey(hello.region_key),
            their_bytes: hello.region_bytes,
            their_slots,
            received: 0,
            taken: 0,
            released: 0,
            parked: VecDeque::new(),
            sent: 0,
            acknowledged: 0,
            outgoing: VecDeque::new(),
            flying: VecDeque::new(),
            send_depth: send_depth(slots) as usize,
            assembly: None,
            executing: ByNumber::default(),
            held: ByNumber::default(),
            held_bytes: 0,
            replies: Rc::new(Cell::new(0)),
            progress: 0,
            stuck: None,
            connected_by_ns: Some(self.clock.monotonic_ns().saturating_add(timeout)),
        };
        self.channels.insert(id, channel);
        self.promised += promised;
        Ok((info, welcome))
    }

    /// Takes one batch of what arrived, executes and answers it; returns how many completions that
    /// were. Call it until that is none.
    ///
    /// Errors: the completion queue itself failed.
    pub fn poll(&mut self, handler: &mut dyn Handler) -> Result<usize, FabricError> {
        let mut completions = std::mem::take(&mut self.completions);
        let polled = self.queue.poll(&mut completions);
        if let Ok(count) = polled
            && count > 0
        {
            self.counters.batches += 1;
            for completion in &completions[..count] {
                self.handle(completion, handler);
            }
            self.refill(self.receive_depth / 2);
            self.pump_waiting(handler);
        }
        self.completions = completions;
        polled
    }

    /// Lets the channels go on that waited for room.
    fn pump_waiting(&mut self, handler: &mut dyn Handler) {
        if !std::mem::take(&mut self.waiting) {
            return;
        }
        let waits = |channel: &Channel| !channel.outgoing.is_empty() || !channel.parked.is_empty();
        let all = self.channels.iter();
        let ids: Vec<ChannelId> =
            all.filter(|(_, channel)| waits(channel)).map(|(id, _)| *id).collect();
        for id in ids {
            self.advance(id, handler);
        }
    }

    /// Posts receives once fewer than `low` are left.
    fn refill(&mut self, low: u32) {
        let posted = self.receives.posted();
        if posted > low || posted >= self.receive_depth {
            return;
        }
        let batch = [ReceiveRequest { wr_id: 0, buffer: None }; 64];
        let mut missing = (self.receive_depth - posted) as usize;
        while missing > 0 {
            let count = missing.min(batch.len());
            if self.receives.post_receive(&batch[..count]).is_err() {
                return;
            }
            missing -= count;
        }
    }

    /// Ends clients that did not connect in time, went away without a word, began a body and do not go on,
    /// or take no writes while buffers are scarce; lets go of replies that nobody fetched.
    pub fn expire(&mut self, handler: &mut dyn Handler) {
        let now = self.clock.monotonic_ns();
        let hold = u64::try_from(self.options.hold.as_nanos()).unwrap_or(u64::MAX);
        let scarce = self.pool.is_scarce();
        self.meters.look();
        let mut late = Vec::new();
        for (id, channel) in &mut self.channels {
            match channel.qp.state() {
                QueuePairState::ReadyToSend => channel.connected_by_ns = None,
                QueuePairState::Init if channel.connected_by_ns.is_some_and(|by| now < by) => {}
                _ => late.push(*id),
            }
            if channel.is_stuck(now) && scarce {
                self.counters.overrun += 1;
                late.push(*id);
            }
            let idle = |assembly: &channel::Assembly| now.saturating_sub(assembly.at_ns) >= hold;
            if channel.assembly.as_ref().is_some_and(idle) {
                self.counters.overrun += 1;
                late.push(*id);
            }
            // A message that waits may ask for the rest.
            if !channel.parked.is_empty() {
                continue;
            }
            let over =
                |held: &channel::Held| now >= held.until_ns && !planted(Planted::KeepRestForEver);
            let overdue: Vec<u32> = channel
                .held
                .iter()
                .filter(|(_, held)| over(held))
                .map(|(index, _)| *index)
                .collect();
            for index in overdue {
                drop(channel.let_go(index));
                self.counters.dropped_replies += 1;
            }
        }
        for id in late {
            self.end(id, handler);
        }
        self.pump_waiting(handler);
    }

    /// Whether [`ChannelServer::expire`] has something to look after.
    #[must_use]
    pub fn expects(&self) -> bool {
        let waits = |channel: &Channel| {
            channel.connected_by_ns.is_some()
                || channel.assembly.is_some()
                || !channel.held.is_empty()
                || !channel.outgoing.is_empty()
                || !channel.flying.is_empty()
                || !channel.parked.is_empty()
        };
        self.channels.values().any(waits)
    }

    fn end(&mut self, id: ChannelId, handler: &mut dyn Handler) {
        let Some(mut channel) = self.channels.remove(&id) else { return };
        self.promised -= promised(channel.slots, channel.their_slots);
        self.bodies -= channel.assembled();
        self.bodies -= channel.executing.values().map(|executing| executing.body).sum::<usize>();
        self.counters.ended += 1;
        let flying = std::mem::take(&mut channel.flying);
        // First the queue pair: afterwards no write reads the buffers any more.
        drop(channel);
        for one in flying {
            if let Flying::Loose(buffer) = one {
                self.pool.put_back(buffer);
            }
        }
        handler.ended(id);
    }

    /// Bytes that are kept for clients: bodies that are incomplete or wait, replies that wait.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        self.bodies + self.pool.replies()
    }

    /// Ends every channel.
    pub fn shut_down(&mut self, handler: &mut dyn Handler) {
        let ids: Vec<ChannelId> = self.channels.keys().copied().collect();
        for id in ids {
            self.end(id, handler);
        }
    }
}
