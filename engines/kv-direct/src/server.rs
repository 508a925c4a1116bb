//! The server's end over fabric: packets arrive by write-with-immediate, replies leave the same way.
//!
//! ```text
//!  client ── packet, immediate i ──► packet area, slot i ──copy──► processor
//!         ◄── reply, immediate i ─── reply staging, slot i ◄────────┘
//! ```
//!
//! One server per device and processor, on the processor's thread. A packet is copied out of the area
//! before it is looked at, because its client can write there at any time.
//!
//! Cost of a packet: one copy of it, its operations, one copy of the reply, one post. The lines of packets
//! that came together are asked for before the first of them is executed, those that a reply will be written
//! to before its packet is.
//!
//! Invariants: what a client does wrong ends that client's connection alone; a client has at most as many
//! packets in the server as receives are posted for it: its window, and a few more.
//!
//! Source: spec/kv-direct.md 3, 5.5.

use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, FabricError, LocalData, MemoryRegion, Opcode,
    Operation, ProtectionDomain, QueuePair, QueuePairOptions, QueuePairState, ReceiveRequest,
    RemoteAddress, RemoteKey, Role, ScatterGatherEntry, WorkCompletion, WorkRequest,
};
use beeline_os::memory::{copy_in, copy_out};
use beeline_os::prefetch;

use crate::memory::Memory;
use crate::packet::PACKET_HEADER_BYTES;
use crate::processor::Processor;
use crate::wire::Hello;

/// Completions taken at once.
const BATCH: usize = 32;
/// Replies between two that ask for a completion, which frees the send queue behind them.
const SIGNAL_EVERY: u32 = 8;
/// Receives beyond a client's window: so many are posted again at once, after a reply and not before it.
pub(crate) const SPARE_RECEIVES: usize = 8;

/// Limits of one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectServerOptions {
    /// Clients at once, 1 to 65535. Default 1024.
    pub max_clients: u32,
    /// Most packets outstanding per client. Default 64.
    pub max_window: u16,
    /// Longest packet, bytes. Default 64 KiB.
    pub max_packet_bytes: u32,
    /// Longest reply, bytes. Default 256 KiB.
    pub max_reply_bytes: u32,
    /// Bytes of both areas of one client together; bounds the product of the three above. Default
    /// 16 MiB.
    pub client_bytes: u64,
    /// How long a client may leave a reply unread before its connection ends. Default 1 s.
    pub receiver_not_ready_timeout: Duration,
    /// How long a client that was taken may be without a connection before its place is given to
    /// others. Default 10 s.
    pub connect_timeout: Duration,
}

impl Default for DirectServerOptions {
    fn default() -> Self {
        Self {
            max_clients: 1024,
            max_window: 64,
            max_packet_bytes: 64 << 10,
            max_reply_bytes: 256 << 10,
            client_bytes: 16 << 20,
            receiver_not_ready_timeout: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(10),
        }
    }
}

/// What a server did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectServerCounters {
    /// Clients taken.
    pub accepted: u64,
    /// Clients refused.
    pub refused: u64,
    /// Connections ended because of what their client did, or because it went away.
    pub ended: u64,
    /// Packets received, bytes.
    pub packet_bytes: u64,
    /// Replies sent, bytes.
    pub reply_bytes: u64,
}

#[derive(Debug)]
struct Client {
    /// Of its queue pair: [`context`].
    context: u64,
    qp: Box<dyn QueuePair>,
    window: u16,
    packet_bytes: u32,
    reply_bytes: u32,
    packets: MemoryRegion,
    replies: MemoryRegion,
    theirs: RemoteAddress,
    unsignalled: u32,
    /// Receives that were used and not posted again.
    owed: usize,
    /// Bytes of its last reply: the next is likely to be as long.
    replied: u64,
    /// When it must be connected; `None` once it is.
    connected_by: Option<Instant>,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct DirectServer {
    device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
    queue: Rc<dyn CompletionQueue>,
    options: DirectServerOptions,
    clients: Vec<Option<Client>>,
    generation: u32,
    entries: u32,
    promised: u32,
    /// Longest reply that is posted without a place of its own.
    inline: u64,
    /// Clients that are not connected yet.
    connecting: usize,
    packet: Vec<u8>,
    reply: Vec<u8>,
    counters: DirectServerCounters,
    completions: Box<[WorkCompletion]>,
}

/// By what a completion names its client: its place, and in the upper half a number that no other
/// client has had there.
fn context(generation: u32, index: usize) -> u64 {
    u64::from(generation) << 32 | index as u64
}

/// The place in a [`context`].
fn place(context: u64) -> usize {
    (context & 0xffff_ffff) as usize
}

const RECEIVE: ReceiveRequest<'_> = ReceiveRequest { wr_id: 0, buffer: None };

/// Replies that may be under way to a client.
fn send_depth(window: u16) -> u32 {
    u32::from(window) + SIGNAL_EVERY
}

/// Most completions of a client that the queue can hold at once: its receives, and all its replies
/// when its connection breaks.
fn promised(window: u16) -> u32 {
    receive_depth(window) + send_depth(window)
}

/// Receives posted: however many of them are owed, a client with its window outstanding meets one.
pub(crate) fn receive_depth(window: u16) -> u32 {
    u32::from(window) + SPARE_RECEIVES as u32
}

impl DirectServer {
    /// A server without clients on the calling thread.
    ///
    /// Errors: the device's.
    pub fn new(device: Arc<dyn Device>, options: DirectServerOptions) -> Result<Self, FabricError> {
        let domain = device.allocate_protection_domain()?;
        let entries = device.attributes().max_completion_queue_depth.min(1 << 17);
        let queue = device.create_completion_queue(entries)?;
        let inline = u64::from(device.attributes().max_inline_bytes);
        Ok(Self {
            device,
            domain,
            queue,
            options,
            clients: Vec::new(),
            generation: 0,
            entries,
            promised: 0,
            inline,
            connecting: 0,
            packet: Vec::new(),
            reply: Vec::new(),
            counters: DirectServerCounters::default(),
            completions: vec![WorkCompletion::EMPTY; BATCH].into(),
        })
    }

    /// The device it serves on.
    #[must_use]
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Clients connected.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.clients.iter().flatten().count()
    }

    /// What it did so far.
    #[must_use]
    pub fn counters(&self) -> DirectServerCounters {
        self.counters
    }

    /// Readable once [`DirectServer::arm`] was called and something came.
    #[must_use]
    pub fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.queue.event_descriptor()
    }

    /// Asks for an event. Poll once more afterwards, then sleep.
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

    /// Takes a client; returns its queue pair's connection data, where it was taken, and the welcome
    /// or refusal. Does not block.
    pub fn accept(&mut self, peer: &ConnectInfo, hello: &[u8]) -> (Option<ConnectInfo>, Vec<u8>) {
        let outcome = Hello::decode(hello)
            .map_err(|error| error.to_string())
            .and_then(|hello| self.admit(peer, &hello));
        match outcome {
            Ok((info, welcome)) => {
                self.counters.accepted += 1;
                (Some(info), welcome.encode())
            }
            Err(reason) => {
                self.counters.refused += 1;
                (None, Hello::refuse(&reason))
            }
        }
    }

    fn admit(&mut self, peer: &ConnectInfo, hello: &Hello) -> Result<(ConnectInfo, Hello), String> {
        let options = self.options;
        let packet_bytes = hello.packet_bytes.min(options.max_packet_bytes) / 64 * 64;
        let reply_bytes = hello.reply_bytes.min(options.max_reply_bytes) / 64 * 64;
        if packet_bytes < 64 || reply_bytes < 64 {
            return Err("packets and replies of at least 64 bytes are served".to_owned());
        }
        let slot_bytes = u64::from(packet_bytes) + u64::from(reply_bytes);
        let most = u16::try_from(options.client_bytes / slot_bytes).unwrap_or(u16::MAX);
        let window = hello.window.min(options.max_window).min(most).max(1);
        let promised = promised(window);
        if self.clients() as u32 >= options.max_clients || self.promised + promised > self.entries {
            return Err(format!("{} clients are served, the most", self.clients()));
        }
        self.generation = self.generation.wrapping_add(1);
        let empty = self.clients.iter().position(Option::is_none);
        let index = empty.unwrap_or_else(|| {
            self.clients.push(None);
            self.clients.len() - 1
        });
        let context = context(self.generation, index);
        let area = |bytes: u32, access| -> Result<MemoryRegion, FabricError> {
            let length = (u64::from(bytes) * u64::from(window)).next_multiple_of(4096) as usize;
            self.domain.register(self.device.allocate_memory(length)?, access)
        };
        let connected = || -> Result<Client, FabricError> {
            let depths = QueuePairOptions {
                send_depth: send_depth(window),
                receive_depth: receive_depth(window),
                receiver_not_ready_timeout: options.receiver_not_ready_timeout,
                context,
                ..QueuePairOptions::default()
            };
            let mut qp = self.domain.create_queue_pair(&self.queue, &self.queue, None, depths)?;
            let packets = area(packet_bytes, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
            let replies = area(reply_bytes, Access::empty())?;
            for _ in 0..receive_depth(window) {
                qp.post_receive(&[RECEIVE]).map_err(|_| {
                    let needed = "receives are posted before the peer writes";
                    FabricError::WrongState { state: QueuePairState::Error, needed }
                })?;
            }
            qp.connect(peer, Role::Passive)?;
            Ok(Client {
                context,
                qp,
                window,
                packet_bytes,
                reply_bytes,
                packets,
                replies,
                theirs: RemoteAddress { key: RemoteKey(hello.area_key), offset: 0 },
                unsignalled: 0,
                owed: 0,
                replied: 0,
                connected_by: Some(Instant::now() + options.connect_timeout),
            })
        };
        let client = connected().map_err(|error| error.to_string())?;
        let info = client.qp.connect_info();
        let area_key = client.packets.remote_key().0;
        self.clients[index] = Some(client);
        self.promised += promised;
        self.connecting += 1;
        Ok((info, Hello { window, packet_bytes, reply_bytes, area_key }))
    }

    /// Executes what arrived and replies; returns how many packets that were.
    ///
    /// Errors: the completion queue itself failed.
    pub fn poll<M: Memory>(&mut self, processor: &mut Processor<M>) -> Result<usize, FabricError> {
        let mut completions = std::mem::take(&mut self.completions);
        let polled = self.queue.poll(&mut completions);
        let mut packets = 0;
        if let Ok(count) = polled {
            completions[..count].iter().skip(1).for_each(|completion| self.expect(completion));
            for completion in &completions[..count] {
                packets += usize::from(self.handle(completion, processor));
            }
        }
        self.completions = completions;
        polled.map(|_| packets)
    }

    /// Asks for the lines of a packet that has its turn after others.
    #[inline]
    fn expect(&self, completion: &WorkCompletion) {
        let client = self.clients.get(place(completion.context));
        let (Some(Some(client)), Some(slot)) = (client, completion.immediate) else { return };
        if slot < u32::from(client.window) {
            let offset = slot as usize * client.packet_bytes as usize;
            let start = client.packets.memory().base().as_ptr().wrapping_add(offset);
            let length = completion.length.min(u64::from(client.packet_bytes));
            prefetch::for_reading(start, length as usize);
        }
    }

    /// Whether the completion was a packet.
    fn handle<M: Memory>(
        &mut self,
        completion: &WorkCompletion,
        processor: &mut Processor<M>,
    ) -> bool {
        let index = place(completion.context);
        let Some(Some(client)) = self.clients.get_mut(index) else { return false };
        if client.context != completion.context {
            return false;
        }
        if !completion.is_success() {
            self.end(index);
            return false;
        }
        if completion.opcode != Opcode::ReceiveWithImmediate {
            return false;
        }
        let slot = completion.immediate.unwrap_or(u32::MAX);
        let length = completion.length;
        let fits = slot < u32::from(client.window)
            && (PACKET_HEADER_BYTES as u64..=u64::from(client.packet_bytes)).contains(&length);
        if !fits {
            self.end(index);
            return false;
        }
        self.counters.packet_bytes += length;
        let reply_at = u64::from(slot) * u64::from(client.reply_bytes);
        client.qp.expect_write(client.theirs.advanced(reply_at), client.replied);
        self.packet.resize(length as usize, 0);
        let offset = slot as usize * client.packet_bytes as usize;
        copy_out(client.packets.memory().as_ref(), offset, &mut self.packet);
        let limit = client.reply_bytes as usize;
        if !processor.process(&self.packet, &mut self.reply, limit) {
            self.end(index);
            return false;
        }
        self.counters.reply_bytes += self.reply.len() as u64;
        if !client.answer(slot, &self.reply, self.inline) {
            self.end(index);
        }
        true
    }

    fn end(&mut self, index: usize) {
        if let Some(client) = self.clients[index].take() {
            self.counters.ended += 1;
            self.promised -= promised(client.window);
            self.connecting -= usize::from(client.connected_by.is_some());
        }
    }

    /// Ends clients that did not finish connecting in time; returns when to look again, `None` where
    /// all are connected.
    pub fn expire(&mut self, now: Instant) -> Option<Instant> {
        if self.connecting == 0 {
            return None;
        }
        let mut next = None;
        for index in 0..self.clients.len() {
            let Some(client) = &mut self.clients[index] else { continue };
            let Some(deadline) = client.connected_by else { continue };
            match client.qp.state() {
                QueuePairState::ReadyToSend => {
                    client.connected_by = None;
                    self.connecting -= 1;
                }
                QueuePairState::Init if now < deadline => {
                    next = Some(next.map_or(deadline, |next: Instant| next.min(deadline)));
                }
                _ => self.end(index),
            }
        }
        next
    }

    /// Disconnects every client.
    pub fn shut_down(&mut self) {
        for index in 0..self.clients.len() {
            self.end(index);
        }
    }
}

impl Client {
    /// Posts the reply, and receives where enough are owed; false where the connection cannot go on.
    fn answer(&mut self, slot: u32, reply: &[u8], inline: u64) -> bool {
        let offset = u64::from(slot) * u64::from(self.reply_bytes);
        let length = reply.len() as u64;
        self.replied = length;
        let entry = [ScatterGatherEntry { region: &self.replies, offset, length }];
        let local = if length <= inline {
            LocalData::Inline(reply)
        } else {
            copy_in(self.replies.memory().as_ref(), offset as usize, reply);
            LocalData::Gather(&entry)
        };
        self.unsignalled += 1;
        let signalled = self.unsignalled >= SIGNAL_EVERY;
        if signalled {
            self.unsignalled = 0;
        }
        let operation = Operation::WriteWithImmediate {
            local,
            remote: self.theirs.advanced(offset),
            immediate: slot,
        };
        if self.qp.post_send(&[WorkRequest { wr_id: 0, operation, signalled }]).is_err() {
            return false;
        }
        self.owed += 1;
        if self.owed < SPARE_RECEIVES {
            return true;
        }
        self.owed = 0;
        self.qp.post_receive(&[RECEIVE; SPARE_RECEIVES]).is_ok()
    }
}
