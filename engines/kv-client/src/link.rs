//! One link: the connection to one shard, its requests outstanding, its log segment.
//!
//! ```text
//! submit ──► slot staged ──► posted, in `order` ──► answered in the same order ──► slot free
//!                  └──► `waiting` for the next poll when others are outstanding, and while a
//!                       segment grant or queue room is missing; nothing overtakes
//! ```
//!
//! Invariant: the server answers requests of one connection in order, so the front of `order` is
//! always the one an answer is for; the tag checks it. A reply consumes one of this side's
//! receives; there are more than the window, so the server never finds none, and they are posted
//! again many at a time.
//!
//! Deadlines are set by the first look at the clock after the submission, not by the submission:
//! reading the clock takes a tenth of the time a request does.

mod completion;
mod posting;

use std::collections::VecDeque;

use beeline_fabric::{Access, MemoryRegion, PostError, QueuePair, QueuePairOptions, Role};
use beeline_kv::entry::{self, FIRST_ENTRY, HEADER_BYTES, Header, KEY_LIMIT, slot_bytes_for};
use beeline_kv::wire::{
    Hello, Place, Protocol, REQUEST_HEADER_BYTES, Request, RequestKind, Welcome,
};

use crate::client::{Command, Core, Token};
use crate::connector::Connector;
use crate::error::ClientError;
use crate::slot::{Buffer, Slot, Staging, Work};
use crate::update::{Digest, Found, UpdateTable};

const RECEIVE_BYTES: u32 = 64;
const RETRIES: u8 = 8;
const RECEIVES_BATCH: usize = 16;
/// Requests that are posted together when others are outstanding: the lines they go to are on
/// their way while the later ones are staged, and the server finds them in one look. The first of
/// a burst goes at once.
const TOGETHER: usize = 8;
const RESULT_ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

/// By what a completion names its link: the shard, and above it a number that no earlier link to it
/// has had.
fn context(generation: u32, shard: u16) -> u64 {
    u64::from(generation) << 16 | u64::from(shard)
}

/// The shard in a link's [`context`].
pub(crate) fn shard_of(context: u64) -> usize {
    usize::from(context as u16)
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
    /// Of its queue pair: [`context`].
    context: u64,
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
    /// Requests at the end of `order` that may have no deadline yet.
    undated: usize,
    /// Answers of the batch in hand that were looked at ahead.
    looked_ahead: usize,
}

/// Receives beyond the window, of which half may wait to be posted again.
fn spare_receives(window: u16) -> u16 {
    (window / 2).max(4)
}

impl Link {
    pub fn connect(
        connector: &mut dyn Connector,
        core: &mut Core,
        shard: u16,
        generation: u32,
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
            receive_depth: u32::from(wanted) + u32::from(spare_receives(wanted)),
            transport_timeout: options.timeout,
            context: context(generation, shard),
            ..QueuePairOptions::default()
        };
        let mut qp = core.domain.create_queue_pair(&core.queue, &core.queue, None, depths)?;
        let (info, answer) = connector.exchange(shard, &qp.connect_info(), &hello.encode())?;
        let welcome =
            Welcome::decode(&answer).map_err(|refusal| ClientError::Refused { shard, refusal })?;
        let window = welcome.window.min(wanted);
        let spoken = welcome.protocol == options.protocol
            || (welcome.protocol, options.protocol) == (Protocol::Replicated, Protocol::Boom);
        if !spoken {
            return Err(ClientError::Protocol { shard, what: "a welcome to another protocol" });
        }
        if window < 2 || welcome.shard != shard || welcome.segment_bytes <= FIRST_ENTRY {
            return Err(ClientError::Protocol {
                shard,
                what: "a welcome without window or segment",
            });
        }
        let receives = window + spare_receives(window);
        let bytes = (u32::from(receives) * RECEIVE_BYTES).next_multiple_of(4096);
        let consumed = (0..receives).collect();
        let receives = core.device.allocate_memory(bytes as usize)?;
        let receives = core.domain.register(receives, Access::LOCAL_WRITE)?;
        let body = HEADER_BYTES + options.longest_key_bytes + options.value_bytes;
        let bytes = body.next_multiple_of(64);
        let pool =
            |access| Buffer::pool(&core.device, &core.domain, access, u32::from(window), bytes);
        let inline = core.device.attributes().max_inline_bytes;
        let slots: Vec<Slot> = pool(Access::LOCAL_WRITE)?
            .into_iter()
            .zip(pool(RESULT_ACCESS)?)
            .map(|(staging, result)| Slot::new(Staging::new(staging, inline), result))
            .collect();
        let tracked = if options.mixed_update && welcome.protocol == Protocol::Boom {
            options.tracked_keys
        } else {
            0
        };
        let table = UpdateTable::new(tracked, options.conditions);
        qp.connect(&info, Role::Active)?;
        let mut this = Self {
            shard,
            context: depths.context,
            up: true,
            qp,
            welcome,
            receives,
            consumed,
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
            undated: 0,
            looked_ahead: 0,
        };
        this.post_receives()?;
        this.qp.wait_connected(core.options.timeout)?;
        Ok(this)
    }

    pub fn shards(&self) -> u16 {
        self.welcome.shards
    }

    pub fn protocol(&self) -> Protocol {
        self.welcome.protocol
    }

    pub fn hash_seed(&self) -> u64 {
        self.welcome.hash_seed
    }

    pub fn context(&self) -> u64 {
        self.context
    }

    pub fn is_up(&self) -> bool {
        self.up
    }

    pub fn outstanding(&self) -> usize {
        let own = usize::from(self.grant_slot.is_some());
        self.slots.len() - self.free.len() - own
    }

    /// Nothing is outstanding, not even a grant request.
    pub fn is_idle(&self) -> bool {
        !self.up || (self.order.is_empty() && self.waiting.is_empty() && self.reading == 0)
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
        let slot = &mut self.slots[usize::from(index)];
        slot.token = token;
        slot.digest = digest;
        slot.found = Found::default();
        slot.retries = 0;
        slot.deadline_ns = None;
        if let Command::Put { key, value, .. } = command {
            self.expect_entry(index, key.len(), value.len());
        }
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
        if self.waiting.is_empty() && self.order.is_empty() {
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
            if self.waiting.len() >= TOGETHER {
                self.flush(core);
            }
        }
        Ok(())
    }

    /// Posts what waits, as far as grant and queue allow. What fails is reported by the next
    /// settling.
    pub fn flush(&mut self, core: &mut Core) {
        // The server finds them at one look.
        let held = (self.waiting.len() > 1).then(|| self.qp.hold());
        self.post_waiting(core);
        drop(held);
    }

    fn post_waiting(&mut self, core: &mut Core) {
        while let Some(index) = self.waiting.front().copied() {
            match self.post(core, index, None) {
                Ok(()) => {
                    self.waiting.pop_front();
                }
                Err(Held::NoGrant) => return self.ask_for_grant(core),
                Err(_) => return,
            }
        }
    }

    /// Something waits to be posted.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Writes what `command` needs into the slot's staging memory.
    fn stage(&mut self, core: &Core, index: u16, command: Command<'_>) -> Result<(), ClientError> {
        match command {
            Command::Put { database, key, value, options } => {
                let header = Header {
                    kind: options.kind,
                    flags: if options.expires_at_ms == 0 { 0 } else { entry::EXPIRES },
                    expires_at_ms: options.expires_at_ms,
                    namespace: u32::from(database),
                    ..Header::default()
                };
                self.stage_pair(core, index, header, key, value)
            }
            Command::Delete { database, key } => {
                let (flags, namespace) = (entry::TOMBSTONE, u32::from(database));
                let header = Header { flags, namespace, ..Header::default() };
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
                self.slots[usize::from(index)].header.namespace = u32::from(database);
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
        let slots = self.welcome.protocol.uses_slots();
        let needed = slot_bytes_for(key.len(), value.len());
        let limit = if slots {
            u64::from(self.welcome.slot_bytes)
        } else {
            u64::from(self.welcome.segment_bytes - FIRST_ENTRY)
        };
        if needed > limit || value.len() > self.welcome.max_value_bytes as usize {
            return Err(match self.welcome.protocol {
                Protocol::Replicated => ClientError::LongerThanLogEntry { length: needed, limit },
                _ => ClientError::TooLarge { length: needed, limit },
            });
        }
        let slot = &mut self.slots[usize::from(index)];
        let staged_bytes = HEADER_BYTES + (key.len() + value.len()) as u32;
        slot.staging.begin(&core.device, &core.domain, staged_bytes)?;
        slot.staging.store(HEADER_BYTES, key);
        slot.staging.store(HEADER_BYTES + key.len() as u32, value);
        slot.header =
            Header { key_length: key.len() as u16, value_length: value.len() as u32, ..header };
        slot.work = Work::Entry;
        if slots {
            let tombstone = header.is_tombstone();
            let kind = if tombstone { RequestKind::Delete } else { RequestKind::Put };
            let tag = self.next_tag;
            self.next_tag = tag.wrapping_add(1);
            let request = Request {
                // Set from a command's database.
                database: header.namespace as u8,
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
        slot.staging.begin(&core.device, &core.domain, bytes)?;
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
        slot.tag = tag;
        slot.work = Work::Request(kind);
        Ok(())
    }
}

/// The longest request this client sends, bytes: with its longest key, as far as the provider goes.
fn longest_request(core: &Core) -> u32 {
    let device = core.device.attributes().max_send_bytes;
    let asked = REQUEST_HEADER_BYTES as u32 + core.options.longest_key_bytes.min(KEY_LIMIT as u32);
    asked.min(u32::try_from(device).unwrap_or(u32::MAX))
}
