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
//! Invariants: what a client does wrong ends that client's channel alone; a channel has at most a ring of
//! messages in the server; a destination gets one reply.
//!
//! Source: spec/rmongo.md 3.4, 3.6, 3.9.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_env::Clock;
use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, FabricError, MemoryRegion, Opcode,
    ProtectionDomain, QueuePair, QueuePairOptions, QueuePairState, ReceiveRequest, RemoteKey, Role,
    SharedReceiveQueue, WorkCompletion,
};
use beeline_os::memory::copy_out;

use crate::greeting::{Detected, Greeting, RnicInfo, detect};
use crate::message::{
    BODY, DataType, Immediate, LONGEST, Message, MessageType, Part, REGION_KEY, SLOT_BYTES,
    read_granted,
};
use crate::pool::{Pool, ReplyBuffer};
use crate::register::{Meters, RegisterOptions, register_size};

mod channel;

use channel::{Assembly, Broken, Channel, Destination, Flying};

/// Least capacity of a destination.
const LEAST_DESTINATION: u64 = 256;
/// Receives kept posted for all channels, where the device allows for so many.
const SHARED_RECEIVES: u32 = 8192;

/// Limits of one server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The channel is offered. Default true.
    pub is_rdma: bool,
    /// Replies carry checksums. A client may ask for them by itself. Default false.
    pub checksum: bool,
    /// Channels at once. Default 1024.
    pub max_channels: u32,
    /// Slots of a ring, 1 to 1024. Default 16.
    pub slots: u16,
    /// Sizes of granted areas. Default as [`RegisterOptions`].
    pub register: RegisterOptions,
    /// Longest body of a request that comes in parts. Default 48 MB, as the MongoDB wire's.
    pub longest_body: usize,
    /// Buffers of the pool. Default 256.
    pub pool_buffers: u32,
    /// Bytes of such a buffer. Default 64 KiB.
    pub buffer_bytes: usize,
    /// Bytes of replies that wait for their clients to ask for the rest. Default 256 MiB.
    pub most_held: usize,
    /// How long they wait. Default 30 s.
    pub hold: Duration,
    /// How long a client that was taken may be without a connection. Default 10 s.
    pub connect_timeout: Duration,
    /// Half of the most completions handled in one poll: `MAX_CQ_NUM`. Default 1000.
    pub max_cq_num: usize,
    /// This end's device.
    pub rnic: RnicInfo,
    /// Where the MongoDB wire is spoken.
    pub wire: Option<std::net::SocketAddr>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            is_rdma: true,
            checksum: false,
            max_channels: 1024,
            slots: 16,
            register: RegisterOptions::default(),
            longest_body: 48_000_000,
            pool_buffers: 256,
            buffer_bytes: 64 << 10,
            most_held: 256 << 20,
            hold: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            max_cq_num: 1000,
            rnic: RnicInfo::named(""),
            wire: None,
        }
    }
}

/// What a server did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCounters {
    /// Channels taken.
    pub accepted: u64,
    /// Clients that were told to use TCP.
    pub refused: u64,
    /// Channels ended.
    pub ended: u64,
    /// Channels ended because their client broke the protocol.
    pub protocol_errors: u64,
    /// Requests executed.
    pub requests: u64,
    /// Bytes of their bodies.
    pub request_bytes: u64,
    /// Bytes of replies.
    pub reply_bytes: u64,
    /// Copies of request bodies out of registered memory.
    pub body_copies: u64,
    /// Bytes of replies that were copied once more, because the pool was empty.
    pub staged_bytes: u64,
    /// Regions registered.
    pub registrations: u64,
    /// Turns of polling that found something.
    pub batches: u64,
    /// Replies that nobody asked the rest of in time.
    pub dropped_replies: u64,
}

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
    /// The newest optime, to an [`MessageType::OptimeRequest`].
    Optime(u64),
    /// It failed: a code and a text.
    Fail(u32, String),
}

/// Who executes requests.
pub trait Handler {
    /// Executes a request.
    fn execute(&mut self, request: &Incoming<'_>, reply: &mut ReplyBuffer) -> Answer;
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
    /// By the number of the queue pair, which is what a completion names.
    channels: HashMap<u32, Channel>,
    numbers: HashMap<ChannelId, u32>,
    next_id: ChannelId,
    entries: u32,
    promised: u32,
    held_bytes: usize,
    /// Some channel has something to send and could not.
    waiting: bool,
    counters: ServerCounters,
    completions: Box<[WorkCompletion]>,
    slot: Box<[u8; SLOT_BYTES]>,
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
            channels: HashMap::new(),
            numbers: HashMap::new(),
            next_id: 0,
            entries,
            promised: receive_depth,
            held_bytes: 0,
            waiting: false,
            counters: ServerCounters { registrations: 1, ..ServerCounters::default() },
            completions: vec![WorkCompletion::EMPTY; batch].into(),
            slot: Box::new([0; SLOT_BYTES]),
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
        let channel = self.channels.get(self.numbers.get(&channel)?)?;
        Some(channel.area().1)
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
        let made = || -> Result<(Box<dyn QueuePair>, MemoryRegion), FabricError> {
            let depths =
                QueuePairOptions { send_depth: send_depth(slots), ..QueuePairOptions::default() };
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
        self.next_id += 1;
        let (id, number, info) = (self.next_id, qp.qp_num(), qp.connect_info());
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
            id,
            qp,
            region,
            slots,
            checksum,
            theirs: RemoteKey(hello.region_key),
            their_bytes: hello.region_bytes,
            their_slots,
            received: 0,
            sent: 0,
            acknowledged: 0,
            owed_acknowledgements: 0,
            outgoing: VecDeque::new(),
            flying: VecDeque::new(),
            send_depth: send_depth(slots) as usize,
            assembly: None,
            executing: HashMap::new(),
            held: HashMap::new(),
            connected_by_ns: Some(self.clock.monotonic_ns().saturating_add(timeout)),
        };
        self.channels.insert(number, channel);
        self.numbers.insert(id, number);
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

    /// Lets the channels go on that waited for a buffer of the pool.
    fn pump_waiting(&mut self, handler: &mut dyn Handler) {
        if !std::mem::take(&mut self.waiting) {
            return;
        }
        let mut broken = Vec::new();
        for (number, channel) in &mut self.channels {
            if !channel.outgoing.is_empty() && !channel.pump(&self.pool) {
                broken.push(*number);
            }
            self.waiting |= !channel.outgoing.is_empty();
        }
        for number in broken {
            self.end(number, handler);
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

    fn handle(&mut self, completion: &WorkCompletion, handler: &mut dyn Handler) {
        let number = completion.qp_num;
        let Some(channel) = self.channels.get_mut(&number) else { return };
        if !completion.is_success() {
            self.end(number, handler);
            return;
        }
        channel.connected_by_ns = None;
        let outcome = match completion.opcode {
            Opcode::ReceiveWithImmediate => {
                match Immediate::of(completion.immediate.unwrap_or(0)) {
                    Immediate::Message => self.message(number, completion.length, handler),
                    Immediate::Acknowledge => channel.acknowledge(),
                    // A client writes no data by immediate.
                    Immediate::Data(_) => Err(Broken),
                }
            }
            Opcode::Receive => Err(Broken),
            _ => {
                if let Some(Flying::Loose(buffer)) = channel.flying.pop_front() {
                    self.pool.put_back(buffer);
                }
                Ok(())
            }
        };
        let pumped = outcome.is_ok() && self.pump(number);
        if !pumped {
            self.counters.protocol_errors += u64::from(outcome.is_err());
            self.end(number, handler);
        }
    }

    /// Takes the message in the next slot.
    fn message(
        &mut self,
        number: u32,
        length: u64,
        handler: &mut dyn Handler,
    ) -> Result<(), Broken> {
        let channel = self.channels.get_mut(&number).ok_or(Broken)?;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if !(BODY..=LONGEST).contains(&length) {
            return Err(Broken);
        }
        let place = (channel.received % u64::from(channel.slots)) as usize * SLOT_BYTES;
        channel.received += 1;
        copy_out(channel.region.memory().as_ref(), place, &mut self.slot[..length]);
        // The slot is free from here on.
        channel.owed_acknowledgements += 1;
        let message = Message::read(&self.slot[..length]).map_err(|_| Broken)?;
        let index = message.index;
        if message.kind == MessageType::GrantRequest {
            let (address, bytes) = channel.area();
            let grant = Message {
                address,
                bytes,
                key: REGION_KEY,
                ..Message::new(MessageType::Grant, index)
            };
            return channel.send(&grant);
        }
        let end = message.address.checked_add(message.bytes).ok_or(Broken)?;
        if message.key != REGION_KEY
            || end > channel.their_bytes
            || message.address < u64::from(channel.their_slots) * SLOT_BYTES as u64
            || message.bytes < LEAST_DESTINATION
        {
            return Err(Broken);
        }
        let to = Destination {
            address: message.address,
            capacity: usize::try_from(message.bytes).unwrap_or(usize::MAX) - Part::BYTES,
        };
        if message.kind == MessageType::Continue {
            return match channel.held.remove(&index) {
                Some(held) => {
                    let left = self.held_bytes - held.reply.len();
                    self.held_bytes = left;
                    let until = held.until_ns;
                    self.held_bytes += channel.part(index, to, held.reply, held.sent, until);
                    Ok(())
                }
                None => channel.fail(index, 0, "the rest of that reply is not kept any more"),
            };
        }
        if !(message.kind.is_command() || message.kind.is_log())
            || channel.executing.contains_key(&index)
            || channel.held.contains_key(&index)
        {
            return Err(Broken);
        }
        self.counters.body_copies += u64::from(!message.body.is_empty());
        let whole = match message.data_type {
            DataType::None | DataType::Bson => {
                if channel.assembly.is_some() {
                    return Err(Broken);
                }
                None
            }
            DataType::Granted | DataType::GrantedPart => {
                let (offset, length) = read_granted(message.body).ok_or(Broken)?;
                let (area, bytes) = channel.area();
                let inside = offset.checked_add(length).is_some_and(|end| end <= bytes);
                let mut assembly = match channel.assembly.take() {
                    Some(assembly) if assembly.index == index => assembly.bytes,
                    Some(_) => return Err(Broken),
                    None => {
                        let mut kept = std::mem::take(&mut self.body);
                        kept.clear();
                        kept
                    }
                };
                let have = assembly.len();
                if !inside || have as u64 + length > self.options.longest_body as u64 {
                    return Err(Broken);
                }
                assembly.resize(have + length as usize, 0);
                let from = (area + offset) as usize;
                copy_out(channel.region.memory().as_ref(), from, &mut assembly[have..]);
                self.counters.body_copies += 1;
                if message.data_type == DataType::GrantedPart {
                    channel.assembly = Some(Assembly { index, bytes: assembly });
                    return Ok(());
                }
                Some(assembly)
            }
        };
        let body = whole.as_deref().unwrap_or(message.body);
        self.counters.requests += 1;
        self.counters.request_bytes += body.len() as u64;
        let request = Incoming { channel: channel.id, message, body, capacity: to.capacity };
        let mut reply = ReplyBuffer::new(&self.pool);
        let answer = handler.execute(&request, &mut reply);
        if let Some(kept) = whole
            && kept.capacity() <= 1 << 20
        {
            self.body = kept;
        }
        match answer {
            Answer::Reply => self.reply(number, index, to, reply),
            Answer::Later => {
                channel.executing.insert(index, to);
                Ok(())
            }
            Answer::Optime(to) => {
                channel.send(&Message { to, ..Message::new(MessageType::OptimeResponse, index) })
            }
            Answer::Fail(code, text) => channel.fail(index, code, &text),
        }
    }

    fn reply(
        &mut self,
        number: u32,
        index: u32,
        to: Destination,
        mut reply: ReplyBuffer,
    ) -> Result<(), Broken> {
        let channel = self.channels.get_mut(&number).ok_or(Broken)?;
        let length = reply.len();
        self.counters.reply_bytes += length as u64;
        let total = u32::try_from(length).map_err(|_| Broken)?;
        if length > to.capacity && self.held_bytes + length > self.options.most_held {
            let text = "too many long replies wait for their clients; take smaller batches";
            return channel.fail(index, 0, text);
        }
        let now = length.min(to.capacity);
        let checksum = channel.checksum.then(|| reply.checksum(0, now));
        reply.head(Part { total, offset: 0, checksum });
        let hold = u64::try_from(self.options.hold.as_nanos()).unwrap_or(u64::MAX);
        let until = self.clock.monotonic_ns().saturating_add(hold);
        self.held_bytes += channel.part(index, to, Rc::new(reply), 0, until);
        Ok(())
    }

    /// Answers a request that was kept; nothing happens where its channel is gone.
    pub fn respond(
        &mut self,
        channel: ChannelId,
        index: u32,
        bytes: &[u8],
        handler: &mut dyn Handler,
    ) {
        let Some(number) = self.numbers.get(&channel).copied() else { return };
        let Some(open) = self.channels.get_mut(&number) else { return };
        let Some(to) = open.executing.remove(&index) else { return };
        let mut reply = ReplyBuffer::new(&self.pool);
        reply.extend_from_slice(bytes);
        if self.reply(number, index, to, reply).is_err() || !self.pump(number) {
            self.end(number, handler);
        }
    }

    /// Posts what a channel has to send; false where its connection cannot go on.
    fn pump(&mut self, number: u32) -> bool {
        let Some(channel) = self.channels.get_mut(&number) else { return true };
        let goes_on = channel.pump(&self.pool);
        self.waiting |= !channel.outgoing.is_empty();
        goes_on
    }

    /// Ends clients that did not connect in time or went away without a word, and lets go of replies that
    /// nobody fetched.
    pub fn expire(&mut self, handler: &mut dyn Handler) {
        let now = self.clock.monotonic_ns();
        let mut late = Vec::new();
        for (number, channel) in &mut self.channels {
            match channel.qp.state() {
                QueuePairState::ReadyToSend => channel.connected_by_ns = None,
                QueuePairState::Init if channel.connected_by_ns.is_some_and(|by| now < by) => {}
                _ => late.push(*number),
            }
            let (bytes, dropped) = (&mut self.held_bytes, &mut self.counters.dropped_replies);
            channel.held.retain(|_, held| {
                let keeps = now < held.until_ns;
                if !keeps {
                    *bytes -= held.reply.len();
                    *dropped += 1;
                }
                keeps
            });
        }
        for number in late {
            self.end(number, handler);
        }
        self.pump_waiting(handler);
    }

    /// Whether [`ChannelServer::expire`] has something to look after.
    #[must_use]
    pub fn expects(&self) -> bool {
        self.held_bytes > 0
            || self.channels.values().any(|channel| channel.connected_by_ns.is_some())
    }

    fn end(&mut self, number: u32, handler: &mut dyn Handler) {
        let Some(mut channel) = self.channels.remove(&number) else { return };
        self.numbers.remove(&channel.id);
        self.promised -= promised(channel.slots, channel.their_slots);
        self.held_bytes -= channel.held.values().map(|held| held.reply.len()).sum::<usize>();
        self.counters.ended += 1;
        let flying = std::mem::take(&mut channel.flying);
        let id = channel.id;
        // First the queue pair: afterwards no write reads the buffers any more.
        drop(channel);
        for one in flying {
            if let Flying::Loose(buffer) = one {
                self.pool.put_back(buffer);
            }
        }
        handler.ended(id);
    }

    /// Ends every channel.
    pub fn shut_down(&mut self, handler: &mut dyn Handler) {
        let numbers: Vec<u32> = self.channels.keys().copied().collect();
        for number in numbers {
            self.end(number, handler);
        }
    }
}
