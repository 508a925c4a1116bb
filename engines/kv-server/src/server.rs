//! The server of one shard: connections, completions, answers.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use beeline_env::Clock;
use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, FabricError, Opcode, ProtectionDomain,
    QueuePairOptions, QueuePairState, Role, WorkCompletion,
};
use beeline_kv::entry::FIRST_ENTRY;
use beeline_kv::wire::{
    Announcement, Hello, LONG_REPLY_BYTES, Protocol, REQUEST_HEADER_BYTES, Refusal, ReplyStatus,
    WELCOME_BYTES, Welcome,
};
use beeline_kv::{Shard, Store};

use crate::connection::{
    Connection, Held, Parts, Pending, Source, WrId, context, place_of, receives_of,
};
use crate::counters::ServerCounters;
use crate::early::Early;
use crate::error::ServerError;
use crate::options::ServerOptions;
use crate::regions::SegmentRegions;

/// Completions taken at once.
const BATCH: usize = 64;
/// Polls, with or without news, between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 32;
/// Batches per poll: bounds what one commit waits for.
const BATCHES: usize = 4;

/// The answer to a connection attempt; it goes back over the bootstrap exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// How the client reaches the queue pair; `None` when it was refused.
    pub info: Option<ConnectInfo>,
    /// The [`Welcome`], or the refusal.
    pub welcome: [u8; WELCOME_BYTES],
}

/// Serves one shard's clients. Stays on the shard's thread.
#[derive(Debug)]
pub struct ShardServer {
    pub(crate) domain: Arc<dyn ProtectionDomain>,
    pub(crate) device: Arc<dyn Device>,
    queue: Rc<dyn CompletionQueue>,
    pub(crate) options: ServerOptions,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) shard: u16,
    shards: u16,
    pub(crate) connections: Vec<Option<Box<Connection>>>,
    free: Vec<u16>,
    next_generation: u32,
    /// Connections with answers to post.
    pub(crate) listed: Vec<u16>,
    /// Connections with requests that may be handed over to the log.
    pub(crate) in_line: Vec<u16>,
    /// Connections that broke since the last poll.
    broken: Vec<u16>,
    /// Completion entries promised to connections.
    entries_promised: u32,
    entries: u32,
    /// Registrations to send from.
    pub(crate) sources: SegmentRegions,
    /// Registrations that two-phase clients read.
    pub(crate) readable: SegmentRegions,
    pub(crate) counters: ServerCounters,
    pub(crate) scratch: Vec<u8>,
    /// About the time of the poll whose completions are being handled: what it is for takes
    /// seconds, and reading the clock takes as long as half a request.
    pub(crate) now_ns: u64,
    /// Polls until the clock may be read again.
    polls_to_clock: Cell<u32>,
    /// Where completions are polled to; made once, because clearing it takes longer than a poll.
    completions: Box<[WorkCompletion]>,
    /// Requests of the batch in hand that were taken ahead.
    early: Vec<Early>,
    /// Why the device cannot reach the store's segments, once that showed: entries are copied.
    pub(crate) unreachable: Option<FabricError>,
}

fn entries_of(window: u16) -> u32 {
    // Receives, and sends that may all be flushed with an error.
    u32::from(receives_of(window)) + u32::from(window) * 2
}

impl ShardServer {
    /// A server without clients for shard `shard` of `store`, on the calling thread.
    ///
    /// Errors: [`ServerError`].
    pub fn new(
        device: Arc<dyn Device>,
        store: &Store,
        shard: u16,
        options: ServerOptions,
    ) -> Result<Self, ServerError> {
        let offered = device.attributes().max_inline_bytes;
        if (offered as usize) < LONG_REPLY_BYTES {
            return Err(ServerError::DeviceTooSmall { offered, needed: LONG_REPLY_BYTES as u32 });
        }
        let domain = device.allocate_protection_domain()?;
        let limit = device.attributes().max_completion_queue_depth;
        let entries = options.completion_entries.min(limit);
        let queue = device.create_completion_queue(entries)?;
        Ok(Self {
            domain,
            device,
            queue,
            clock: Arc::clone(store.clock()),
            shard,
            shards: store.shards() as u16,
            connections: Vec::new(),
            free: Vec::new(),
            next_generation: 0,
            listed: Vec::new(),
            in_line: Vec::new(),
            broken: Vec::new(),
            entries_promised: 0,
            entries,
            sources: SegmentRegions::new(Access::empty()),
            readable: SegmentRegions::new(Access::REMOTE_READ),
            counters: ServerCounters::default(),
            scratch: Vec::new(),
            now_ns: 0,
            polls_to_clock: Cell::new(0),
            completions: vec![WorkCompletion::EMPTY; BATCH].into(),
            early: Vec::with_capacity(BATCH),
            unreachable: None,
            options,
        })
    }

    /// What was done so far.
    #[must_use]
    pub fn counters(&self) -> ServerCounters {
        self.counters
    }

    /// Clients connected.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.connections.iter().flatten().count()
    }

    /// Descriptor that becomes readable once [`ShardServer::arm`] was called and something came.
    #[must_use]
    pub fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.queue.event_descriptor()
    }

    /// The completion queue, for loops that wait on it alone.
    #[must_use]
    pub fn completion_queue(&self) -> &Rc<dyn CompletionQueue> {
        &self.queue
    }

    /// Asks for an event. Poll once more afterwards, then sleep.
    ///
    /// Errors: the provider's.
    pub fn arm(&self) -> Result<(), ServerError> {
        // The next request may come much later.
        self.polls_to_clock.set(0);
        Ok(self.queue.arm()?)
    }

    /// Clears the event after the descriptor became readable.
    ///
    /// Errors: the provider's.
    pub fn acknowledge(&self) -> Result<(), ServerError> {
        Ok(self.queue.acknowledge()?)
    }

    // ---- connecting ----

    /// Takes a client whose queue pair is `peer` and whose [`Hello`] is `payload`. Does not block.
    /// A refusal is an answer too; the reason goes to the client.
    pub fn accept(&mut self, store: &Store, peer: &ConnectInfo, payload: &[u8]) -> Admission {
        let admitted = Hello::decode(payload).and_then(|hello| self.admit(store, peer, &hello));
        match admitted {
            Ok((info, welcome)) => {
                self.counters.accepted += 1;
                Admission { info: Some(info), welcome: welcome.encode() }
            }
            Err(refusal) => {
                self.counters.refused += 1;
                Admission { info: None, welcome: Welcome::refuse(refusal) }
            }
        }
    }

    fn admit(
        &mut self,
        store: &Store,
        peer: &ConnectInfo,
        hello: &Hello,
    ) -> Result<(ConnectInfo, Welcome), Refusal> {
        if hello.shard != self.shard {
            return Err(Refusal::Shard);
        }
        let protocol = match (hello.protocol, self.options.replicated) {
            (Protocol::Boom, Some(_)) => Protocol::Replicated,
            (Protocol::Boom, None) => Protocol::Boom,
            (Protocol::Oblivious | Protocol::TwoPhase, None) if self.options.baselines => {
                hello.protocol
            }
            _ => return Err(Refusal::Protocol),
        };
        let longest = REQUEST_HEADER_BYTES as u32 + u32::from(u16::MAX);
        if hello.request_bytes > longest {
            return Err(Refusal::Malformed);
        }
        let mut request_bytes = hello.request_bytes.next_multiple_of(64).max(64);
        let mut window = u32::from(hello.window).min(u32::from(self.options.max_window));
        window = window.min(self.options.client_request_bytes / request_bytes);
        let slot_bytes = if protocol.uses_slots() {
            let room = u64::from(self.options.client_result_bytes);
            let bytes = match self.options.replicated {
                Some(entry) => u64::from(entry).min(room / 4) / 64 * 64,
                None => u64::from(hello.slot_bytes).next_multiple_of(64).max(256),
            };
            if bytes < 256 {
                return Err(Refusal::Resources);
            }
            window = window.min(u32::try_from(room / bytes).unwrap_or(0));
            u32::try_from(bytes).map_err(|_| Refusal::Malformed)?
        } else {
            0
        };
        if window < 2 {
            return Err(Refusal::Malformed);
        }
        let mut max_value_bytes = u32::try_from(store.value_limit(0)).unwrap_or(u32::MAX);
        if protocol == Protocol::Replicated {
            request_bytes = request_bytes.min(slot_bytes);
            max_value_bytes = max_value_bytes.min(slot_bytes - REQUEST_HEADER_BYTES as u32);
        }
        let window = window as u16;
        let full = self.clients() >= self.options.max_clients as usize
            || self.entries_promised + entries_of(window) > self.entries;
        if full {
            return Err(Refusal::TooManyClients);
        }
        let index = self.free.pop().unwrap_or(self.connections.len() as u16);
        let made = self.connect(index, peer, protocol, window, request_bytes, slot_bytes);
        let connection = match made {
            Ok(connection) => connection,
            Err(error) => {
                if usize::from(index) < self.connections.len() {
                    self.free.push(index);
                }
                tracing::warn!(%error, "a one-sided client could not be connected");
                return Err(Refusal::Resources);
            }
        };
        let info = connection.qp.connect_info();
        let welcome = Welcome {
            protocol,
            window,
            shard: self.shard,
            shards: self.shards,
            request_bytes,
            slot_bytes,
            area_key: connection.area.as_ref().map_or(0, |area| area.remote_key().0),
            segment_bytes: store.pool().segment_bytes(),
            max_value_bytes,
            hash_seed: store.hash_seed(),
        };
        self.entries_promised += entries_of(window);
        if usize::from(index) == self.connections.len() {
            self.connections.push(None);
        }
        self.connections[usize::from(index)] = Some(Box::new(connection));
        Ok((info, welcome))
    }

    fn connect(
        &mut self,
        index: u16,
        peer: &ConnectInfo,
        protocol: Protocol,
        window: u16,
        request_bytes: u32,
        slot_bytes: u32,
    ) -> Result<Connection, FabricError> {
        self.next_generation = self.next_generation.wrapping_add(1);
        let context = context(self.next_generation, index);
        let options = QueuePairOptions {
            send_depth: u32::from(window) * 2,
            receive_depth: u32::from(receives_of(window)),
            receiver_not_ready_timeout: self.options.receiver_not_ready_timeout,
            context,
            ..QueuePairOptions::default()
        };
        let mut qp = self.domain.create_queue_pair(&self.queue, &self.queue, None, options)?;
        let length = u32::from(receives_of(window)) * request_bytes;
        let length = length.next_multiple_of(4096) as usize;
        let receives = self.device.allocate_memory(length)?;
        let receives = self.domain.register(receives, Access::LOCAL_WRITE)?;
        let area = if slot_bytes == 0 {
            None
        } else {
            let length = (u32::from(window) * slot_bytes).next_multiple_of(4096) as usize;
            let memory = self.device.allocate_memory(length)?;
            Some(self.domain.register(memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?)
        };
        qp.connect(peer, Role::Passive)?;
        let mut connection = Connection::new(Parts {
            index,
            context,
            qp,
            protocol,
            window,
            request_bytes,
            receives,
            area,
            slot_bytes,
            now_ns: self.clock.monotonic_ns(),
        });
        connection.post_receives().map_err(|_| FabricError::WrongState {
            state: QueuePairState::Error,
            needed: "receives are posted before the peer sends",
        })?;
        Ok(connection)
    }

    // ---- polling ----

    /// Executes what arrived, against `shard`; returns how many completions that were. Answers
    /// are prepared, not sent: commit the shard, then call [`ShardServer::complete`].
    ///
    /// Errors: [`ServerError::Fabric`] when the completion queue itself failed. What a client does
    /// wrong ends that client's connection only.
    pub fn poll(&mut self, shard: &mut Shard) -> Result<usize, ServerError> {
        let mut completions = std::mem::take(&mut self.completions);
        let handled = self.poll_into(&mut completions, shard);
        self.completions = completions;
        if self.unreachable.is_some() {
            self.stage_listed(shard);
        }
        if !self.broken.is_empty() {
            self.close_broken(shard);
        }
        handled
    }

    fn poll_into(
        &mut self,
        completions: &mut [WorkCompletion],
        shard: &mut Shard,
    ) -> Result<usize, ServerError> {
        let mut handled = 0;
        for _ in 0..BATCHES {
            let count = self.queue.poll(completions)?;
            let to_clock = self.polls_to_clock.get().saturating_sub(1);
            self.polls_to_clock.set(to_clock);
            if count > 0 {
                if to_clock == 0 {
                    self.polls_to_clock.set(POLLS_PER_CLOCK);
                    self.now_ns = self.clock.monotonic_ns();
                }
                self.execute(shard, &completions[..count]);
            }
            handled += count;
            if count < BATCH {
                break;
            }
        }
        Ok(handled)
    }

    fn execute(&mut self, shard: &mut Shard, completions: &[WorkCompletion]) {
        let arrived = |completion: &&WorkCompletion| {
            matches!(completion.opcode, Opcode::Receive | Opcode::ReceiveWithImmediate)
        };
        if completions.iter().filter(arrived).nth(1).is_none() {
            // There are no misses to overlap, and a request taken ahead is copied once more.
            for completion in completions {
                self.handle(shard, completion, None);
            }
            return;
        }
        let mut early = std::mem::take(&mut self.early);
        self.look_ahead(shard, completions, &mut early);
        let mut ahead = early.iter().peekable();
        for (at, completion) in completions.iter().enumerate() {
            let early = ahead.next_if(|early| early.completion == at);
            self.handle(shard, completion, early);
        }
        early.clear();
        self.early = early;
    }

    /// Asks for the lines that the requests of a batch touch before the first is executed, so that
    /// the misses overlap: first what the clients wrote and the index, then the entries.
    fn look_ahead(
        &mut self,
        shard: &mut Shard,
        completions: &[WorkCompletion],
        early: &mut Vec<Early>,
    ) {
        let arrived = completions.iter().enumerate();
        for (at, completion) in arrived.filter(|(_, completion)| completion.is_success()) {
            let place = usize::from(place_of(completion.context));
            let Some(Some(connection)) = self.connections.get_mut(place) else { continue };
            match completion.opcode {
                Opcode::Receive if connection.context == completion.context => {
                    let message = (WrId::decode(completion.wr_id).index, completion.length);
                    early.extend(Early::take(connection, shard, at, message));
                }
                Opcode::ReceiveWithImmediate => {
                    if let Some(log) = &connection.log {
                        let offset = Announcement::decode(completion.immediate.unwrap_or(0)).offset;
                        let length = usize::try_from(completion.length).unwrap_or(0);
                        shard.expect_notice(log, offset, length);
                    }
                }
                _ => {}
            }
        }
        for request in early {
            request.expect_entry(shard);
        }
    }

    fn handle(&mut self, shard: &mut Shard, completion: &WorkCompletion, early: Option<&Early>) {
        let id = WrId::decode(completion.wr_id);
        let place = usize::from(place_of(completion.context));
        let Some(slot) = self.connections.get_mut(place) else { return };
        // Taken out while it is worked on, so that the server's parts can be used beside it.
        let Some(mut connection) = slot.take() else { return };
        if connection.context == completion.context && !connection.dead {
            if !completion.is_success() {
                self.condemn(&mut connection);
            } else if id.sent {
                Self::sent(shard, &mut connection, id.index);
            } else {
                let understood = match completion.opcode {
                    Opcode::Receive => {
                        self.counters.receives += 1;
                        self.counters.bytes_in += completion.length;
                        match early {
                            Some(early) => self.message_early(shard, &mut connection, early),
                            None => {
                                self.message(shard, &mut connection, id.index, completion.length)
                            }
                        }
                    }
                    Opcode::ReceiveWithImmediate => {
                        self.counters.placements += 1;
                        self.counters.bytes_in += completion.length;
                        let immediate = completion.immediate.unwrap_or(0);
                        self.announced(shard, &mut connection, immediate, completion.length)
                    }
                    _ => true,
                };
                connection.consumed.push(id.index as u16);
                if !understood {
                    self.counters.expelled += 1;
                    self.condemn(&mut connection);
                } else if !connection.listed {
                    connection.listed = true;
                    self.listed.push(connection.index);
                }
            }
        }
        self.connections[place] = Some(connection);
    }

    /// Lets go of what sends up to `sequence` held.
    fn sent(shard: &mut Shard, connection: &mut Connection, sequence: u32) {
        while let Some(held) = connection.release(sequence) {
            match held {
                Held::Entry(guard, from) => {
                    shard.end_read(guard);
                    if let Source::Buffer(buffer) = from {
                        connection.staging[buffer].busy = false;
                    }
                }
                Held::Staged(buffer) => connection.staging[buffer].busy = false,
            }
        }
    }

    fn condemn(&mut self, connection: &mut Connection) {
        if !connection.dead {
            connection.dead = true;
            self.broken.push(connection.index);
        }
    }

    /// Posts the answers to everything executed before the last commit. Call it only after
    /// [`Shard::commit`] returned without error.
    pub fn complete(&mut self) {
        let mut kept = 0;
        for at in 0..self.listed.len() {
            let index = self.listed[at];
            if self.answer(index) {
                self.listed[kept] = index;
                kept += 1;
            }
        }
        self.listed.truncate(kept);
    }

    /// Posts a connection's answers; whether it stays on the list: while the send queue had no
    /// room, or space is waited for. What waits for the log lists it again.
    fn answer(&mut self, index: u16) -> bool {
        let Some(Some(connection)) = self.connections.get_mut(usize::from(index)) else {
            return false;
        };
        if !connection.dead && connection.post_pending(&self.sources, &mut self.counters).is_err() {
            connection.dead = true;
            self.broken.push(index);
        }
        let next = connection.pending.front();
        let waits = next.is_some_and(|next| !matches!(next, Pending::Awaited { .. }));
        connection.listed = !connection.dead && waits;
        connection.listed
    }

    /// As [`ShardServer::complete`], after a commit that failed: writes are answered with
    /// [`ReplyStatus::Unavailable`], and gets, which may show what was not persisted, too.
    pub fn abandon(&mut self, shard: &mut Shard) {
        for index in &self.listed {
            let Some(Some(connection)) = self.connections.get_mut(usize::from(*index)) else {
                continue;
            };
            for at in 0..connection.pending.len() {
                let tag = match &connection.pending[at] {
                    Pending::Message { reply, after_write: true } => reply.tag,
                    Pending::Entry { tag, .. } => *tag,
                    _ => continue,
                };
                let reply = beeline_kv::wire::Reply::new(ReplyStatus::Unavailable, tag);
                let failed = Pending::Message { reply, after_write: false };
                if let Pending::Entry { guard, from, .. } =
                    std::mem::replace(&mut connection.pending[at], failed)
                {
                    shard.end_read(guard);
                    if let Source::Buffer(buffer) = from {
                        connection.staging[buffer].busy = false;
                    }
                }
            }
        }
        self.complete();
    }

    /// True while answers wait for room in a send queue.
    #[must_use]
    pub fn has_pending(&self) -> bool {
        !self.listed.is_empty()
    }

    // ---- upkeep ----

    fn close_broken(&mut self, shard: &mut Shard) {
        for index in std::mem::take(&mut self.broken) {
            if let Some(connection) = self.connections[usize::from(index)].take() {
                self.close(shard, *connection);
                self.free.push(index);
            }
        }
    }

    /// Ends a connection: its reads are over, its log becomes the collector's.
    fn close(&mut self, shard: &mut Shard, mut connection: Connection) {
        self.counters.closed += 1;
        self.entries_promised -= entries_of(connection.window);
        self.listed.retain(|index| *index != connection.index);
        // Connection and key go before the segment becomes the collector's. A peer that has it
        // mapped can still write there: the collector copies, verifies, and frees the file for
        // good, so that reaches nothing but what that peer wrote itself.
        drop(connection.grant.take());
        for (_, held) in connection.held.drain(..) {
            if let Held::Entry(guard, _) = held {
                shard.end_read(guard);
            }
        }
        for pending in connection.pending.drain(..) {
            if let Pending::Entry { guard, .. } = pending {
                shard.end_read(guard);
            }
        }
        for guard in connection.leases.drain(..) {
            shard.end_read(guard);
        }
        let log = connection.log.take();
        drop(connection);
        if let Some(log) = log {
            shard.close_client_log(log);
        }
    }

    /// Upkeep, from time to time: registrations of freed segments go; when the pool runs short,
    /// segments granted to clients that do not write are taken back.
    pub fn maintain(&mut self, shard: &mut Shard) {
        if !self.broken.is_empty() {
            self.close_broken(shard);
        }
        let store = Arc::clone(shard.store());
        self.sources.sweep(store.pool());
        self.readable.sweep(store.pool());
        let capacity = store.pool().capacity_bytes().max(1);
        let percent = store.pool().used_bytes().saturating_mul(100) / capacity;
        if percent < u64::from(self.options.reclaim_above_percent) {
            return;
        }
        let now = self.clock.monotonic_ns();
        let idle_ns = u64::try_from(self.options.idle_grant.as_nanos()).unwrap_or(u64::MAX);
        for connection in self.connections.iter_mut().flatten() {
            let idle = now.saturating_sub(connection.active_ns) >= idle_ns;
            if idle && connection.promised == 0 && connection.grant.is_some() {
                Self::reclaim(shard, connection);
                self.counters.reclaimed += 1;
            }
        }
    }

    /// Takes the granted segment back. A client that still writes to it finds its key gone, or,
    /// where it has the memory mapped, writes to a file nobody reads; its announcement then names
    /// a grant that is over.
    fn reclaim(shard: &mut Shard, connection: &mut Connection) {
        drop(connection.grant.take());
        if let Some(log) = connection.log.take() {
            shard.close_client_log(log);
        }
    }

    /// Ends every connection, for an orderly shutdown.
    pub fn shut_down(&mut self, shard: &mut Shard) {
        for index in 0..self.connections.len() {
            if let Some(connection) = self.connections[index].take() {
                self.close(shard, *connection);
                self.free.push(index as u16);
            }
        }
        self.broken.clear();
    }
}

const _: () = assert!(FIRST_ENTRY > 0, "an announcement of offset 0 is never an entry");
