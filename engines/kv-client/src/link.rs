//! One link: the connection to one shard, its requests outstanding, its log segment.
//!
//! ```text
//! submit ──► slot staged ──► posted, in `order` ──► answered in the same order ──► slot free
//!                  └──► `waiting` when a segment grant or queue room is missing; nothing overtakes
//! ```
//!
//! Invariant: the server answers requests of one connection in order, so the front of `order` is
//! always the one an answer is for; the tag checks it. A reply consumes one of this side's
//! receives; there are as many as the window, so the server never finds none.

use std::collections::VecDeque;
use std::time::Duration;

use beeline_fabric::{
    Access, LocalData, MemoryRegion, Operation, PostError, QueuePair, QueuePairOptions,
    ReceiveRequest, RemoteAddress, RemoteKey, Role, ScatterGatherEntry, Status, WorkCompletion,
    WorkRequest,
};
use beeline_kv::entry::{self, FIRST_ENTRY, HEADER_BYTES, Header, KEY_LIMIT, slot_bytes_for};
use beeline_kv::wire::{
    Announcement, Hello, LONG_REPLY_BYTES, Place, Protocol, REQUEST_HEADER_BYTES, Reply,
    ReplyStatus, Request, RequestKind, SCAN_HEADER_BYTES, ScanHeader, Welcome,
};
use beeline_os::memory::copy_out;

use crate::client::{Answer, Command, Core, Deliver, Token};
use crate::connector::Connector;
use crate::error::ClientError;
use crate::slot::{Buffer, Slot, Work};
use crate::update::{Digest, UpdateTable};

const RECEIVE_BYTES: u32 = 64;
const RETRIES: u8 = 8;
const RECEIVES_BATCH: usize = 16;
const RESULT_ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

/// What a completion's `wr_id` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrId {
    pub generation: u16,
    pub shard: u16,
    pub index: u16,
}

impl WrId {
    fn encode(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.shard) << 16 | u64::from(self.index)
    }

    pub fn decode(wr_id: u64) -> Self {
        Self { generation: (wr_id >> 32) as u16, shard: (wr_id >> 16) as u16, index: wr_id as u16 }
    }
}

/// The log segment this link writes.
#[derive(Clone, Copy, Debug)]
struct Grant {
    place: Place,
    number: u8,
    length: u32,
    tail: u32,
}

/// Why a slot could not be posted.
enum Held {
    NoGrant,
    QueueFull,
    /// The queue pair is in the error state; everything outstanding is lost.
    Broken,
    Failed(ClientError),
}

impl From<PostError> for Held {
    fn from(error: PostError) -> Self {
        match error {
            PostError::QueueFull => Self::QueueFull,
            PostError::NotReady(_) => Self::Broken,
            other => Self::Failed(ClientError::Post(other)),
        }
    }
}

/// The connection to one shard.
#[derive(Debug)]
pub(crate) struct Link {
    shard: u16,
    generation: u16,
    up: bool,
    qp: Box<dyn QueuePair>,
    welcome: Welcome,
    receives: MemoryRegion,
    /// Receives consumed and not posted again.
    consumed: Vec<u16>,
    slots: Vec<Slot>,
    free: Vec<u16>,
    order: VecDeque<u16>,
    waiting: VecDeque<u16>,
    /// Reads of the two-phase baseline; they complete by themselves.
    reading: usize,
    released: u16,
    grant: Option<Grant>,
    /// The slot kept back for grant requests, while unused.
    grant_slot: Option<u16>,
    table: UpdateTable,
    next_tag: u16,
    unsignalled: u16,
}

impl Link {
    pub fn connect(
        connector: &mut dyn Connector,
        core: &mut Core,
        shard: u16,
        generation: u16,
    ) -> Result<Self, ClientError> {
        let options = &core.options;
        // One more than the caller's window: grant requests never wait for a slot.
        let wanted = options.window.clamp(1, 1024) + 1;
        let oblivious = options.protocol == Protocol::Oblivious;
        let hello = Hello {
            protocol: options.protocol,
            window: wanted,
            shard,
            request_bytes: longest_request(core),
            slot_bytes: if oblivious { options.request_slot_bytes } else { 0 },
        };
        let depths = QueuePairOptions {
            send_depth: u32::from(wanted) * 2,
            receive_depth: u32::from(wanted),
            transport_timeout: options.timeout,
            ..QueuePairOptions::default()
        };
        let mut qp = core.domain.create_queue_pair(&core.queue, &core.queue, None, depths)?;
        let (info, answer) = connector.exchange(shard, &qp.connect_info(), &hello.encode())?;
        let welcome =
            Welcome::decode(&answer).map_err(|refusal| ClientError::Refused { shard, refusal })?;
        let window = welcome.window.min(wanted);
        if window < 2 || welcome.shard != shard || welcome.segment_bytes <= FIRST_ENTRY {
            return Err(ClientError::Protocol {
                shard,
                what: "a welcome without window or segment",
            });
        }
        let receives = core
            .device
            .allocate_memory((u32::from(window) * RECEIVE_BYTES).next_multiple_of(4096) as usize)?;
        let receives = core.domain.register(receives, Access::LOCAL_WRITE)?;
        let body = HEADER_BYTES + options.longest_key_bytes + options.value_bytes;
        let bytes = body.next_multiple_of(64);
        let pool =
            |access| Buffer::pool(&core.device, &core.domain, access, u32::from(window), bytes);
        let slots: Vec<Slot> = pool(Access::LOCAL_WRITE)?
            .into_iter()
            .zip(pool(RESULT_ACCESS)?)
            .map(|(staging, result)| Slot::new(staging, result))
            .collect();
        let tracked = if options.mixed_update && options.protocol == Protocol::Boom {
            options.tracked_keys
        } else {
            0
        };
        let table = UpdateTable::new(tracked, options.conditions);
        qp.connect(&info, Role::Active)?;
        let mut this = Self {
            shard,
            generation,
            up: true,
            qp,
            welcome,
            receives,
            consumed: (0..window).collect(),
            slots,
            free: (0..window - 1).rev().collect(),
            order: VecDeque::with_capacity(usize::from(window)),
            waiting: VecDeque::with_capacity(usize::from(window)),
            reading: 0,
            released: 0,
            grant: None,
            grant_slot: Some(window - 1),
            table,
            next_tag: 0,
            unsignalled: 0,
        };
        this.post_receives()?;
        this.qp.wait_connected(core.options.timeout)?;
        Ok(this)
    }

    pub fn shards(&self) -> u16 {
        self.welcome.shards
    }

    pub fn hash_seed(&self) -> u64 {
        self.welcome.hash_seed
    }

    pub fn generation(&self) -> u16 {
        self.generation
    }

    pub fn is_up(&self) -> bool {
        self.up
    }

    pub fn outstanding(&self) -> usize {
        let own = usize::from(self.grant_slot.is_some());
        self.slots.len() - self.free.len() - own
    }

    pub fn digest(&self, hash: u64, database: u8, key: &[u8]) -> Digest {
        self.table.digest(hash, database, key)
    }

    fn window(&self) -> u16 {
        self.slots.len() as u16 - 1
    }

    // ---- submission ----

    pub fn submit(
        &mut self,
        core: &mut Core,
        token: Token,
        digest: Digest,
        command: Command<'_>,
    ) -> Result<(), ClientError> {
        let Some(index) = self.free.pop() else {
            return Err(ClientError::WindowFull { window: self.window() });
        };
        let now = core.options.clock.monotonic_ns();
        let timeout = u64::try_from(core.options.timeout.as_nanos()).unwrap_or(u64::MAX);
        let slot = &mut self.slots[usize::from(index)];
        slot.token = token;
        slot.digest = digest;
        slot.retries = 0;
        slot.deadline_ns = now.saturating_add(timeout);
        match self.stage(core, index, command) {
            Ok(()) => {}
            Err(error) => {
                self.release(index);
                return Err(error);
            }
        }
        match command {
            Command::Get { .. } => core.counters.gets += 1,
            Command::Put { .. } | Command::Delete { .. } => core.counters.puts += 1,
            _ => core.counters.others += 1,
        }
        if self.waiting.is_empty() {
            let body = match command {
                Command::Put { key, value, .. } => Some((key, value)),
                Command::Delete { key, .. } => Some((key, &[][..])),
                _ => None,
            };
            match self.post(core, index, body) {
                Ok(()) => {}
                Err(Held::Failed(error)) => {
                    self.release(index);
                    return Err(error);
                }
                Err(Held::NoGrant) => {
                    self.waiting.push_back(index);
                    self.ask_for_grant(core);
                }
                // Where the connection is broken, the next poll delivers that.
                Err(Held::QueueFull | Held::Broken) => self.waiting.push_back(index),
            }
        } else {
            self.waiting.push_back(index);
        }
        Ok(())
    }

    /// Writes what `command` needs into the slot's staging memory.
    fn stage(&mut self, core: &Core, index: u16, command: Command<'_>) -> Result<(), ClientError> {
        match command {
            Command::Put { database, key, value, options } => {
                let header = Header {
                    kind: options.kind,
                    flags: if options.expires_at_ms == 0 { 0 } else { entry::EXPIRES },
                    expires_at_ms: options.expires_at_ms,
                    database,
                    ..Header::default()
                };
                self.stage_pair(core, index, header, key, value)
            }
            Command::Delete { database, key } => {
                let header = Header { flags: entry::TOMBSTONE, database, ..Header::default() };
                self.stage_pair(core, index, header, key, &[])
            }
            Command::Get { database, key } => {
                let longest = self.welcome.request_bytes.min(longest_request(core));
                let limit = (longest as usize).saturating_sub(REQUEST_HEADER_BYTES);
                if key.len() > limit {
                    return Err(ClientError::KeyTooLong { length: key.len(), limit });
                }
                let kind = if core.options.protocol == Protocol::TwoPhase {
                    RequestKind::Locate
                } else {
                    RequestKind::Get
                };
                self.slots[usize::from(index)].header.database = database;
                self.stage_request(core, index, kind, database, key, (0, 0))
            }
            Command::Scan { database, cursor, count, .. } => {
                let range = (cursor, u64::from(count));
                self.stage_request(core, index, RequestKind::Scan, database, &[], range)
            }
            Command::Statistics { .. } => {
                self.stage_request(core, index, RequestKind::Stats, 0, &[], (0, 0))
            }
            Command::Ping { .. } => {
                self.stage_request(core, index, RequestKind::Ping, 0, &[], (0, 0))
            }
        }
    }

    /// Stages a put or delete in the form of the protocol.
    fn stage_pair(
        &mut self,
        core: &Core,
        index: u16,
        header: Header,
        key: &[u8],
        value: &[u8],
    ) -> Result<(), ClientError> {
        if key.len() > KEY_LIMIT {
            return Err(ClientError::KeyTooLong { length: key.len(), limit: KEY_LIMIT });
        }
        let oblivious = core.options.protocol == Protocol::Oblivious;
        let needed = slot_bytes_for(key.len(), value.len());
        let limit = if oblivious {
            u64::from(self.welcome.slot_bytes)
        } else {
            u64::from(self.welcome.segment_bytes - FIRST_ENTRY)
        };
        if needed > limit || value.len() > self.welcome.max_value_bytes as usize {
            return Err(ClientError::TooLarge { length: needed, limit });
        }
        let slot = &mut self.slots[usize::from(index)];
        slot.staging.grow(&core.device, &core.domain, Access::LOCAL_WRITE, needed as u32)?;
        slot.staging.store(HEADER_BYTES, key);
        slot.staging.store(HEADER_BYTES + key.len() as u32, value);
        slot.staged_bytes = HEADER_BYTES + (key.len() + value.len()) as u32;
        slot.header =
            Header { key_length: key.len() as u16, value_length: value.len() as u32, ..header };
        slot.work = Work::Entry;
        if oblivious {
            let tombstone = header.is_tombstone();
            let kind = if tombstone { RequestKind::Delete } else { RequestKind::Put };
            let tag = self.next_tag;
            self.next_tag = tag.wrapping_add(1);
            let request = Request {
                database: header.database,
                key_bytes: key.len() as u32,
                argument: value.len() as u64,
                extra: header.expires_at_ms,
                result_bytes: u32::from(header.kind),
                ..Request::new(kind, tag)
            };
            let slot = &mut self.slots[usize::from(index)];
            slot.staging.store(0, &request.encode());
            slot.tag = tag;
            slot.work = Work::Request(kind);
        } else if core.options.protocol == Protocol::TwoPhase {
            let tag = self.next_tag;
            self.next_tag = tag.wrapping_add(1);
            let slot = &mut self.slots[usize::from(index)];
            slot.tag = tag;
            slot.work = Work::Request(RequestKind::Allocate);
        }
        Ok(())
    }

    fn stage_request(
        &mut self,
        core: &Core,
        index: u16,
        kind: RequestKind,
        database: u8,
        key: &[u8],
        (argument, extra): (u64, u64),
    ) -> Result<(), ClientError> {
        let tag = self.next_tag;
        self.next_tag = tag.wrapping_add(1);
        let slot = &mut self.slots[usize::from(index)];
        let bytes = (REQUEST_HEADER_BYTES + key.len()) as u32;
        slot.staging.grow(&core.device, &core.domain, Access::LOCAL_WRITE, bytes)?;
        let request = Request {
            database,
            released: self.released,
            result: slot.result.place(),
            result_bytes: slot.result.bytes,
            key_bytes: key.len() as u32,
            argument,
            extra,
            ..Request::new(kind, tag)
        };
        slot.staging.store(0, &request.encode());
        slot.staging.store(REQUEST_HEADER_BYTES as u32, key);
        slot.key.clear();
        slot.key.extend_from_slice(key);
        slot.staged_bytes = bytes;
        slot.tag = tag;
        slot.work = Work::Request(kind);
        Ok(())
    }

    // ---- posting ----

    /// Posts what the slot has staged. `body` saves reading key and value back from staging.
    fn post(
        &mut self,
        core: &mut Core,
        index: u16,
        body: Option<(&[u8], &[u8])>,
    ) -> Result<(), Held> {
        match self.slots[usize::from(index)].work {
            Work::Free => {}
            Work::Entry => self.post_entry(core, index, body)?,
            Work::Request(kind) => self.post_request(core, index, kind)?,
            Work::EntryAt { place, grant } => self.post_entry_at(core, index, place, grant)?,
            Work::ReadAt(place, length) => {
                self.post_read(core, index, place, length)?;
                return Ok(());
            }
        }
        self.order.push_back(index);
        core.counters.round_trips += 1;
        Ok(())
    }

    fn wr_id(&self, index: u16) -> u64 {
        WrId { generation: self.generation, shard: self.shard, index }.encode()
    }

    /// Every so often a request must be signalled, so that its predecessors' queue entries are
    /// given back.
    fn is_signalled(&mut self) -> bool {
        self.unsignalled += 1;
        let due = self.unsignalled >= self.slots.len().div_ceil(2) as u16;
        if due {
            self.unsignalled = 0;
        }
        due
    }

    fn post_entry(
        &mut self,
        core: &mut Core,
        index: u16,
        body: Option<(&[u8], &[u8])>,
    ) -> Result<(), Held> {
        let slot = &self.slots[usize::from(index)];
        let digest = slot.digest;
        let key_length = usize::from(slot.header.key_length);
        let needed = slot_bytes_for(key_length, slot.header.value_length as usize) as u32;
        let Some(grant) = self.grant else { return Err(Held::NoGrant) };
        let over = self.table.overwritable(digest, needed);
        let (offset, slot_bytes) = match over {
            Some(stale) => (stale.offset, stale.slot_bytes),
            None if grant.tail.saturating_add(needed) <= grant.length => (grant.tail, needed),
            None => return Err(Held::NoGrant),
        };
        self.seal_header(core, index, slot_bytes, body);
        let announcement =
            Announcement { in_place: over.is_some(), grant: grant.number, offset }.encode();
        let place = Place {
            key: grant.place.key,
            offset: grant.place.offset.wrapping_add(u64::from(offset)),
        };
        self.post_write(core, index, place, announcement)?;
        let slot = &mut self.slots[usize::from(index)];
        slot.tag = Announcement::tag(announcement);
        slot.entry_offset = offset;
        self.table.wrote(digest, offset, slot_bytes);
        if over.is_some() {
            core.counters.overwrites += 1;
        } else {
            core.counters.appends += 1;
            core.counters.appended_bytes += u64::from(needed);
            if let Some(grant) = self.grant.as_mut() {
                grant.tail += needed;
            }
        }
        Ok(())
    }

    /// Stores the entry's header with slot length and checksum.
    fn seal_header(
        &mut self,
        core: &mut Core,
        index: u16,
        slot_bytes: u32,
        body: Option<(&[u8], &[u8])>,
    ) {
        let slot = &mut self.slots[usize::from(index)];
        slot.header.slot_bytes = slot_bytes;
        slot.header.checksum = 0;
        let bytes = slot.header.encode();
        slot.header.checksum = match body {
            Some((key, value)) => entry::checksum(&bytes, key, &[value]),
            None => {
                core.scratch.clear();
                let length = slot.staged_bytes - HEADER_BYTES;
                slot.staging.load(HEADER_BYTES, length, &mut core.scratch);
                entry::checksum(&bytes, &core.scratch, &[])
            }
        };
        slot.staging.store(0, &slot.header.encode());
    }

    fn post_entry_at(
        &mut self,
        core: &mut Core,
        index: u16,
        place: Place,
        grant: u8,
    ) -> Result<(), Held> {
        let slot = &self.slots[usize::from(index)];
        let key_length = usize::from(slot.header.key_length);
        let needed = slot_bytes_for(key_length, slot.header.value_length as usize) as u32;
        let announcement =
            Announcement { in_place: false, grant, offset: slot.entry_offset }.encode();
        self.seal_header(core, index, needed, None);
        self.post_write(core, index, place, announcement)?;
        self.slots[usize::from(index)].tag = Announcement::tag(announcement);
        core.counters.appends += 1;
        core.counters.appended_bytes += u64::from(needed);
        Ok(())
    }

    fn post_write(
        &mut self,
        core: &mut Core,
        index: u16,
        place: Place,
        immediate: u32,
    ) -> Result<(), Held> {
        let wr_id = self.wr_id(index);
        let signalled = self.is_signalled();
        let slot = &self.slots[usize::from(index)];
        let length = u64::from(slot.staged_bytes);
        let gather = [ScatterGatherEntry {
            region: &slot.staging.region,
            offset: slot.staging.offset,
            length,
        }];
        let operation = Operation::WriteWithImmediate {
            local: LocalData::Gather(&gather),
            remote: RemoteAddress { key: RemoteKey(place.key), offset: place.offset },
            immediate,
        };
        self.qp.post_send(&[WorkRequest { wr_id, operation, signalled }])?;
        core.counters.writes += 1;
        core.counters.bytes_out += length;
        Ok(())
    }

    fn post_request(&mut self, core: &mut Core, index: u16, kind: RequestKind) -> Result<(), Held> {
        if core.options.protocol == Protocol::Oblivious {
            let place = Place {
                key: self.welcome.area_key,
                offset: u64::from(index) * u64::from(self.welcome.slot_bytes),
            };
            return self.post_write(core, index, place, u32::from(index));
        }
        let wr_id = self.wr_id(index);
        let signalled = self.is_signalled();
        let slot = &self.slots[usize::from(index)];
        let bare;
        let gather;
        let local = match kind {
            RequestKind::Grant | RequestKind::Allocate => {
                let needed = slot_bytes_for(
                    usize::from(slot.header.key_length),
                    slot.header.value_length as usize,
                );
                let argument = if kind == RequestKind::Allocate { needed } else { 0 };
                let request =
                    Request { argument, released: self.released, ..Request::new(kind, slot.tag) };
                bare = request.encode();
                LocalData::Inline(&bare)
            }
            _ => {
                gather = [ScatterGatherEntry {
                    region: &slot.staging.region,
                    offset: slot.staging.offset,
                    length: u64::from(slot.staged_bytes),
                }];
                LocalData::Gather(&gather)
            }
        };
        let length = local.length();
        let operation = Operation::Send { local, immediate: None };
        self.qp.post_send(&[WorkRequest { wr_id, operation, signalled }])?;
        core.counters.sends += 1;
        core.counters.bytes_out += length;
        Ok(())
    }

    fn post_read(
        &mut self,
        core: &mut Core,
        index: u16,
        place: Place,
        length: u32,
    ) -> Result<(), Held> {
        let wr_id = self.wr_id(index);
        let slot = &self.slots[usize::from(index)];
        let local = ScatterGatherEntry {
            region: &slot.result.region,
            offset: slot.result.offset,
            length: u64::from(length),
        };
        let remote = RemoteAddress { key: RemoteKey(place.key), offset: place.offset };
        self.qp.post_send(&[WorkRequest::new(wr_id, Operation::Read { local, remote })])?;
        self.unsignalled = 0;
        self.reading += 1;
        core.counters.reads += 1;
        core.counters.round_trips += 1;
        Ok(())
    }

    fn ask_for_grant(&mut self, core: &mut Core) {
        let Some(index) = self.grant_slot else { return };
        let now = core.options.clock.monotonic_ns();
        let timeout = u64::try_from(core.options.timeout.as_nanos()).unwrap_or(u64::MAX);
        let tag = self.next_tag;
        let slot = &mut self.slots[usize::from(index)];
        slot.token = Token::NONE;
        slot.tag = tag;
        slot.deadline_ns = now.saturating_add(timeout);
        slot.work = Work::Request(RequestKind::Grant);
        // On failure the next settling asks again.
        if self.post(core, index, None).is_ok() {
            self.next_tag = tag.wrapping_add(1);
            self.grant_slot = None;
            core.counters.grants += 1;
        }
    }

    fn post_receives(&mut self) -> Result<(), PostError> {
        while !self.consumed.is_empty() {
            let count = self.consumed.len().min(RECEIVES_BATCH);
            let start = self.consumed.len() - count;
            let base = self.wr_id(0);
            let requests: [ReceiveRequest<'_>; RECEIVES_BATCH] = std::array::from_fn(|i| {
                let index = self.consumed[start + i.min(count - 1)];
                let buffer = ScatterGatherEntry {
                    region: &self.receives,
                    offset: u64::from(index) * u64::from(RECEIVE_BYTES),
                    length: u64::from(RECEIVE_BYTES),
                };
                ReceiveRequest { wr_id: base | u64::from(index), buffer: Some(buffer) }
            });
            self.qp.post_receive(&requests[..count])?;
            self.consumed.truncate(start);
        }
        Ok(())
    }

    // ---- completion ----

    /// A reply message arrived.
    pub fn replied(
        &mut self,
        core: &mut Core,
        id: WrId,
        completion: &WorkCompletion,
        deliver: &mut Deliver<'_>,
    ) -> usize {
        self.consumed.push(id.index);
        let mut bytes = [0; LONG_REPLY_BYTES];
        let length = completion.length as usize;
        if length > bytes.len() {
            return self.fail_protocol("an over-long reply", deliver);
        }
        let offset = usize::from(id.index) * RECEIVE_BYTES as usize;
        copy_out(self.receives.memory().as_ref(), offset, &mut bytes[..length]);
        core.counters.receives += 1;
        core.counters.bytes_in += length as u64;
        let Some(reply) = Reply::decode(&bytes[..length]) else {
            return self.fail_protocol("a malformed reply", deliver);
        };
        let Some(index) = self.order.pop_front() else {
            return self.fail_protocol("a reply nobody waits for", deliver);
        };
        if self.slots[usize::from(index)].tag != reply.tag {
            return self.fail_protocol("a reply out of order", deliver);
        }
        match self.slots[usize::from(index)].work {
            Work::Request(RequestKind::Grant) => self.granted(index, reply, deliver),
            Work::Entry | Work::EntryAt { .. } => self.stored(core, index, reply, deliver),
            Work::Request(_) => self.answered(core, index, reply, deliver),
            Work::Free | Work::ReadAt(..) => {
                self.fail_protocol("a reply for a slot that waits for none", deliver)
            }
        }
    }

    fn granted(&mut self, index: u16, reply: Reply, deliver: &mut Deliver<'_>) -> usize {
        self.slots[usize::from(index)].work = Work::Free;
        self.grant_slot = Some(index);
        self.table.clear();
        match (reply.status, reply.place) {
            (ReplyStatus::Ok, Some(place))
                if reply.length > FIRST_ENTRY
                    && reply.length <= 1 << 30
                    && reply.grant < Announcement::GRANTS =>
            {
                let length = reply.length;
                self.grant = Some(Grant { place, number: reply.grant, length, tail: FIRST_ENTRY });
                0
            }
            (ReplyStatus::Ok, _) => self.fail_protocol("a grant of nothing", deliver),
            (status, _) => {
                self.grant = None;
                self.fail_waiting_entries(status, deliver)
            }
        }
    }

    /// Entries wait for a segment and there will be none: they fail, the rest goes on.
    fn fail_waiting_entries(&mut self, status: ReplyStatus, deliver: &mut Deliver<'_>) -> usize {
        let mut delivered = 0;
        for _ in 0..self.waiting.len() {
            let Some(index) = self.waiting.pop_front() else { break };
            if self.slots[usize::from(index)].work == Work::Entry {
                delivered += self.finish(index, Err(error_of(status)), deliver);
            } else {
                self.waiting.push_back(index);
            }
        }
        delivered
    }

    /// The reply to an entry written into the segment.
    fn stored(
        &mut self,
        core: &mut Core,
        index: u16,
        reply: Reply,
        deliver: &mut Deliver<'_>,
    ) -> usize {
        let slot = &mut self.slots[usize::from(index)];
        let (digest, offset) = (slot.digest, slot.entry_offset);
        let slot_deletes = slot.header.is_tombstone();
        match reply.status {
            ReplyStatus::Ok | ReplyStatus::NotFound => {
                self.table.acknowledged(digest, offset, reply.version, reply.minimum_reading);
                let missing = reply.status == ReplyStatus::NotFound && slot_deletes;
                let answer = if missing {
                    Answer::Missing
                } else {
                    Answer::Stored { version: reply.version }
                };
                self.finish(index, Ok(answer), deliver)
            }
            ReplyStatus::StaleGrant | ReplyStatus::Rejected
                if slot.work == Work::Entry && slot.retries < RETRIES =>
            {
                // The segment is not ours any more, or our idea of its tail is wrong: begin anew.
                slot.retries += 1;
                core.counters.retries += 1;
                if self.grant.is_some_and(|grant| u64::from(grant.number) == grant_of(reply)) {
                    self.grant = None;
                    self.table.clear();
                }
                self.waiting.push_back(index);
                0
            }
            status => self.finish(index, Err(error_of(status)), deliver),
        }
    }

    /// The small reply to a request message.
    fn answered(
        &mut self,
        core: &mut Core,
        index: u16,
        reply: Reply,
        deliver: &mut Deliver<'_>,
    ) -> usize {
        let slot = &mut self.slots[usize::from(index)];
        let Work::Request(kind) = slot.work else { return 0 };
        match (kind, reply.status, reply.place) {
            (RequestKind::Ping, ReplyStatus::Ok, _) => {
                self.finish(index, Ok(Answer::Pong), deliver)
            }
            (RequestKind::Put | RequestKind::Delete, ReplyStatus::Ok, _) => {
                self.finish(index, Ok(Answer::Stored { version: reply.version }), deliver)
            }
            (RequestKind::Allocate, ReplyStatus::Ok, Some(place))
                if reply.grant < Announcement::GRANTS && reply.version < 1 << 30 =>
            {
                slot.work = Work::EntryAt { place, grant: reply.grant };
                slot.entry_offset = reply.version as u32 & !15;
                self.waiting.push_back(index);
                0
            }
            (RequestKind::Locate, ReplyStatus::Ok, Some(place))
                if reply.length <= self.welcome.segment_bytes =>
            {
                slot.work = Work::ReadAt(place, reply.length);
                if let Err(error) = self.grow_result(core, index, reply.length) {
                    return self.finish(index, Err(error), deliver);
                }
                self.waiting.push_back(index);
                0
            }
            (_, ReplyStatus::BufferTooSmall, _) if slot.retries < RETRIES => {
                let limit = u64::from(self.welcome.segment_bytes).max(1 << 20);
                if reply.version > limit {
                    return self.fail_protocol("a result beyond the segment size", deliver);
                }
                if let Err(error) = self.grow_result(core, index, reply.version as u32) {
                    return self.finish(index, Err(error), deliver);
                }
                self.again(core, index, kind)
            }
            (_, ReplyStatus::NotFound, _) => self.finish(index, Ok(Answer::Missing), deliver),
            (_, ReplyStatus::Ok, _) => self.fail_protocol("a reply without its data", deliver),
            (_, status, _) => self.finish(index, Err(error_of(status)), deliver),
        }
    }

    fn grow_result(&mut self, core: &Core, index: u16, bytes: u32) -> Result<(), ClientError> {
        let slot = &mut self.slots[usize::from(index)];
        slot.result.grow(&core.device, &core.domain, RESULT_ACCESS, bytes)
    }

    /// Sends the staged request again, as `kind`, with the result memory the slot has now.
    fn again(&mut self, core: &mut Core, index: u16, kind: RequestKind) -> usize {
        core.counters.retries += 1;
        let slot = &mut self.slots[usize::from(index)];
        slot.retries += 1;
        core.scratch.clear();
        slot.staging.load(0, REQUEST_HEADER_BYTES as u32, &mut core.scratch);
        if let Some(request) = Request::decode(&core.scratch) {
            let request = Request {
                kind,
                result: slot.result.place(),
                result_bytes: slot.result.bytes,
                ..request
            };
            slot.staging.store(0, &request.encode());
        }
        slot.work = Work::Request(kind);
        self.waiting.push_back(index);
        0
    }

    /// The server wrote a result into our memory.
    pub fn placed(
        &mut self,
        core: &mut Core,
        id: WrId,
        completion: &WorkCompletion,
        deliver: &mut Deliver<'_>,
    ) -> usize {
        self.consumed.push(id.index);
        core.counters.placements += 1;
        core.counters.bytes_in += completion.length;
        let Some(index) = self.order.pop_front() else {
            return self.fail_protocol("a result nobody waits for", deliver);
        };
        let slot = &self.slots[usize::from(index)];
        let tagged = completion.immediate == Some(u32::from(slot.tag));
        if !tagged || completion.length > u64::from(slot.result.bytes) {
            return self.fail_protocol("a result out of order", deliver);
        }
        self.result(core, index, completion.length as u32, deliver)
    }

    /// A located entry was read.
    pub fn read(&mut self, core: &mut Core, id: WrId, deliver: &mut Deliver<'_>) -> usize {
        self.reading = self.reading.saturating_sub(1);
        self.released = self.released.wrapping_add(1);
        let work = self.slots.get(usize::from(id.index)).map(|slot| slot.work);
        let Some(Work::ReadAt(_, length)) = work else { return 0 };
        core.counters.bytes_in += u64::from(length);
        self.result(core, id.index, length, deliver)
    }

    /// Copies the result out of shared memory, checks the copy, delivers it.
    fn result(
        &mut self,
        core: &mut Core,
        index: u16,
        length: u32,
        deliver: &mut Deliver<'_>,
    ) -> usize {
        let mut scratch = std::mem::take(&mut core.scratch);
        scratch.clear();
        self.slots[usize::from(index)].result.load(0, length, &mut scratch);
        let delivered = match self.slots[usize::from(index)].work {
            Work::Request(RequestKind::Scan) => match scan_of(&scratch) {
                Some(answer) => self.finish(index, Ok(answer), deliver),
                None => self.fail_protocol("a malformed scan result", deliver),
            },
            Work::Request(RequestKind::Stats) => {
                self.finish(index, Ok(Answer::Text(&scratch)), deliver)
            }
            work => {
                let slot = &self.slots[usize::from(index)];
                match checked_entry(&scratch, slot.header.database, &slot.key) {
                    Some((header, value)) => {
                        let answer = Answer::Value {
                            bytes: value,
                            kind: header.kind,
                            version: header.version,
                            expires_at_ms: header.expires_at_ms,
                        };
                        self.finish(index, Ok(answer), deliver)
                    }
                    None if work == Work::Request(RequestKind::Get) => {
                        self.again(core, index, RequestKind::VerifiedGet)
                    }
                    None if matches!(work, Work::ReadAt(..)) && slot.retries < RETRIES => {
                        self.again(core, index, RequestKind::Locate)
                    }
                    None => self.finish(index, Err(ClientError::Damaged), deliver),
                }
            }
        };
        core.scratch = scratch;
        delivered
    }

    fn finish(
        &mut self,
        index: u16,
        answer: Result<Answer<'_>, ClientError>,
        deliver: &mut Deliver<'_>,
    ) -> usize {
        let token = self.slots[usize::from(index)].token;
        self.release(index);
        deliver(token, answer);
        1
    }

    fn release(&mut self, index: u16) {
        self.slots[usize::from(index)].work = Work::Free;
        self.free.push(index);
    }

    /// After a batch of completions: receives go back, then what waited is posted.
    pub fn settle(&mut self, core: &mut Core, deliver: &mut Deliver<'_>) -> usize {
        if !self.up || (self.consumed.is_empty() && self.waiting.is_empty()) {
            return 0;
        }
        if self.post_receives().is_err() {
            return self.fail(Status::Flushed, deliver);
        }
        let mut delivered = 0;
        while let Some(index) = self.waiting.front().copied() {
            match self.post(core, index, None) {
                Ok(()) => {
                    self.waiting.pop_front();
                }
                Err(Held::QueueFull) => break,
                Err(Held::Broken) => {
                    delivered += self.fail(Status::Flushed, deliver);
                    break;
                }
                Err(Held::NoGrant) => {
                    self.ask_for_grant(core);
                    break;
                }
                Err(Held::Failed(error)) => {
                    self.waiting.pop_front();
                    delivered += self.finish(index, Err(error), deliver);
                }
            }
        }
        delivered
    }

    /// Gives the link up when its oldest request is overdue.
    pub fn expire(&mut self, now_ns: u64, timeout: Duration, deliver: &mut Deliver<'_>) -> usize {
        if !self.up || self.outstanding() == 0 {
            return 0;
        }
        let overdue = |index: &u16| self.slots[usize::from(*index)].deadline_ns <= now_ns;
        let late = self.order.front().is_some_and(overdue)
            || self.waiting.front().is_some_and(overdue)
            || (self.reading > 0
                && self.slots.iter().any(|slot| {
                    matches!(slot.work, Work::ReadAt(..)) && slot.deadline_ns <= now_ns
                }));
        if !late {
            return 0;
        }
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let shard = self.shard;
        self.fail_with(|| ClientError::TimedOut { shard, timeout_ms }, deliver)
    }

    fn fail_protocol(&mut self, what: &'static str, deliver: &mut Deliver<'_>) -> usize {
        let shard = self.shard;
        self.fail_with(|| ClientError::Protocol { shard, what }, deliver)
    }

    /// Everything outstanding is lost.
    pub fn fail(&mut self, status: Status, deliver: &mut Deliver<'_>) -> usize {
        let shard = self.shard;
        self.fail_with(|| ClientError::ConnectionLost { shard, status }, deliver)
    }

    fn fail_with(&mut self, error: impl Fn() -> ClientError, deliver: &mut Deliver<'_>) -> usize {
        if !self.up {
            return 0;
        }
        self.up = false;
        self.order.clear();
        self.waiting.clear();
        let mut delivered = 0;
        for index in 0..self.slots.len() as u16 {
            let slot = &self.slots[usize::from(index)];
            if slot.work == Work::Free {
                continue;
            }
            if slot.token == Token::NONE {
                self.slots[usize::from(index)].work = Work::Free;
                self.grant_slot = Some(index);
            } else {
                delivered += self.finish(index, Err(error()), deliver);
            }
        }
        delivered
    }
}

/// The longest request this client sends, bytes: with its longest key, as far as the provider goes.
fn longest_request(core: &Core) -> u32 {
    let device = core.device.attributes().max_send_bytes;
    let asked = REQUEST_HEADER_BYTES as u32 + core.options.longest_key_bytes.min(KEY_LIMIT as u32);
    asked.min(u32::try_from(device).unwrap_or(u32::MAX))
}

/// The grant a reply to an entry is about: its echo carries only the low bits of the place, so
/// the server names the grant besides.
fn grant_of(reply: Reply) -> u64 {
    u64::from(reply.grant)
}

fn error_of(status: ReplyStatus) -> ClientError {
    match status {
        ReplyStatus::Damaged => ClientError::Damaged,
        ReplyStatus::PoolFull => ClientError::PoolFull,
        ReplyStatus::Unavailable => ClientError::Unavailable,
        _ => ClientError::Rejected,
    }
}

fn scan_of(bytes: &[u8]) -> Option<Answer<'_>> {
    let header = ScanHeader::decode(bytes)?;
    let end = SCAN_HEADER_BYTES.checked_add(header.length as usize)?;
    let records = bytes.get(SCAN_HEADER_BYTES..end)?;
    Some(Answer::Keys { next: header.next, count: header.count, records })
}

/// The value inside a private copy of an entry, when the copy is exactly that entry: lengths,
/// checksum, database and key all agree.
fn checked_entry<'a>(bytes: &'a [u8], database: u8, key: &[u8]) -> Option<(Header, &'a [u8])> {
    let (head, rest) = bytes.split_first_chunk::<{ HEADER_BYTES as usize }>()?;
    let header = Header::decode(head);
    let (found, value) = rest.split_at_checked(usize::from(header.key_length))?;
    // Without a version it was placed and never accepted.
    let agrees = header.version != 0
        && value.len() == header.value_length as usize
        && header.database == database
        && found == key
        && !header.is_tombstone()
        && header.checksum == entry::checksum(head, found, &[value]);
    agrees.then_some((header, value))
}
