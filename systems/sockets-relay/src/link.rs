//! A link: the queue pair to one other relay, its messages, and what is due on it.
//!
//! Invariants:
//! - a message is staged only when it can be posted: [`Link::stage`] says no while
//!   [`MOST_MESSAGES`] are under way, and what was staged leaves with the next [`Link::flush`];
//! - a write is posted before the message that tells of it;
//! - records that may not be forgotten ([`Link::owe`]) keep their order and go before what is staged
//!   later.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, FabricError, Hold, LocalData, MemoryRegion,
    Operation, PostError, ProtectionDomain, QueuePair, QueuePairOptions, ReceiveRequest,
    RemoteAddress, ScatterGatherEntry, WorkRequest,
};
use beeline_os::memory::{copy_in, copy_out};

use crate::message::{self, DATA_BYTES, MESSAGE_BYTES, Record, record_bytes};

/// Messages under way on a link: beyond them nothing is posted until one completes, and then
/// everything since goes at once (p. 4.6).
pub const MOST_MESSAGES: usize = 8;
/// Writes under way on a link.
pub const MOST_WRITES: u32 = 64;
/// Messages that the other relay can have under way before it waits for us.
const RECEIVES: usize = 4 * MOST_MESSAGES;
/// Entries of a completion queue that one link can fill.
pub const COMPLETIONS: u32 = MOST_MESSAGES as u32 + MOST_WRITES + RECEIVES as u32;
/// Most records owed; who makes us owe more is broken or hostile.
const MOST_OWED: usize = 16 << 10;

const IS_RECEIVE: u64 = 1 << 63;

/// A random number that names a call.
pub type Nonce = [u8; 16];

/// How far a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The other relay has not answered yet.
    Joining,
    /// The queue pairs connect.
    Connecting,
    /// Messages pass.
    Up,
}

/// What is known of the host at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// We dialled it where it is configured.
    Dialled(usize),
    /// It called and has not said anything yet.
    Called,
    /// It speaks for this host, which is being asked whether that is so.
    Asked(usize),
    /// It is this host.
    Confirmed(usize),
}

impl Trust {
    /// The host, once it is known.
    #[must_use]
    pub fn host(self) -> Option<usize> {
        match self {
            Self::Dialled(host) | Self::Confirmed(host) => Some(host),
            Self::Called | Self::Asked(_) => None,
        }
    }
}

/// What became of a connection's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Staged {
    /// There was no room.
    Not,
    /// In a message that carried none of it before.
    First,
    /// In a message that did.
    Along,
}

/// An offer of the other relay whose end here has not come yet.
#[derive(Clone, Copy, Debug)]
pub struct Early {
    /// The other relay's name of it.
    pub name: u64,
    /// Of one ring.
    pub ring_bytes: u64,
    /// The end here.
    pub own: SocketAddr,
    /// The end there.
    pub peer: SocketAddr,
    /// When it was offered.
    pub since: Duration,
}

/// A message under way.
#[derive(Debug, Default)]
struct Slot {
    /// Connections whose data it carries.
    carries: Vec<u32>,
    writes: u32,
}

/// What a completion is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Place of the link.
    pub link: usize,
    /// Its generation, as far as it is told.
    pub generation: u16,
    /// A message came; else one of ours went.
    pub is_receive: bool,
    slot: usize,
}

impl Ticket {
    /// From a completion's `wr_id`, which is our own.
    #[must_use]
    pub fn of(wr_id: u64) -> Self {
        Self {
            link: (wr_id >> 32 & 0xffff) as usize,
            generation: (wr_id >> 48 & 0x7fff) as u16,
            is_receive: wr_id & IS_RECEIVE != 0,
            slot: (wr_id & 0xffff_ffff) as usize,
        }
    }
}

/// The queue pair to another relay.
#[derive(Debug)]
pub struct Link {
    /// How far it is.
    pub stage: Stage,
    /// Who is there.
    pub trust: Trust,
    /// Which of the relay's completion queues it is on.
    pub desk: usize,
    /// When it began; what does not come up in time goes.
    pub since: Duration,
    /// The caller's and the called one's numbers.
    pub nonces: (Nonce, Nonce),
    /// Connections on it.
    pub connections: u32,
    /// Offers that wait for their end here.
    pub early: Vec<Early>,
    pair: Box<dyn QueuePair>,
    domain: Arc<dyn ProtectionDomain>,
    region: MemoryRegion,
    /// `wr_id` without the slot.
    name: u64,
    slots: Vec<Slot>,
    free: Vec<usize>,
    staged: Vec<u8>,
    staged_slot: Slot,
    writes: u32,
    owed: VecDeque<(u64, Record<'static>)>,
    held: Option<Hold>,
    is_broken: bool,
}

impl Link {
    /// A queue pair on `queue`, not connected, as link number `index`.
    ///
    /// Errors: fabric's.
    pub fn new(
        device: &Arc<dyn Device>,
        (desk, queue): (usize, &Rc<dyn CompletionQueue>),
        (index, generation): (usize, u16),
        trust: Trust,
        since: Duration,
    ) -> Result<Self, FabricError> {
        let domain = device.allocate_protection_domain()?;
        let memory = device.allocate_memory((MOST_MESSAGES + RECEIVES) * MESSAGE_BYTES)?;
        let region = domain.register(memory, Access::LOCAL_WRITE)?;
        let options = QueuePairOptions {
            send_depth: MOST_MESSAGES as u32 + MOST_WRITES,
            receive_depth: RECEIVES as u32,
            receiver_not_ready_timeout: Duration::from_secs(10),
            transport_timeout: Duration::from_secs(10),
            ..QueuePairOptions::default()
        };
        let pair = domain.create_queue_pair(queue, queue, None, options)?;
        let name = u64::from(generation & 0x7fff) << 48 | (index as u64) << 32;
        let mut link = Self {
            stage: Stage::Joining,
            trust,
            desk,
            since,
            nonces: ([0; 16], [0; 16]),
            connections: 0,
            early: Vec::new(),
            pair,
            domain,
            region,
            name,
            slots: (0..MOST_MESSAGES).map(|_| Slot::default()).collect(),
            free: (0..MOST_MESSAGES).collect(),
            staged: Vec::with_capacity(MESSAGE_BYTES),
            staged_slot: Slot::default(),
            writes: 0,
            owed: VecDeque::new(),
            held: None,
            is_broken: false,
        };
        for slot in 0..RECEIVES {
            link.post_receive(slot);
        }
        Ok(link)
    }

    /// How the other relay reaches it.
    #[must_use]
    pub fn connect_info(&self) -> ConnectInfo {
        self.pair.connect_info()
    }

    /// The queue pair, to be connected.
    pub fn pair(&mut self) -> &mut dyn QueuePair {
        self.pair.as_mut()
    }

    /// Where regions that this link's peer may reach are registered: nobody else can.
    #[must_use]
    pub fn domain(&self) -> &Arc<dyn ProtectionDomain> {
        &self.domain
    }

    /// A post was refused: the queue pair is broken.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Something is staged or owed.
    #[must_use]
    pub fn is_due(&self) -> bool {
        !self.staged.is_empty() || !self.owed.is_empty()
    }

    /// Messages under way.
    #[must_use]
    pub fn under_way(&self) -> usize {
        MOST_MESSAGES - self.free.len()
    }

    fn post_receive(&mut self, slot: usize) {
        let at = (MOST_MESSAGES + slot) * MESSAGE_BYTES;
        let entry = ScatterGatherEntry {
            region: &self.region,
            offset: at as u64,
            length: MESSAGE_BYTES as u64,
        };
        let request =
            ReceiveRequest { wr_id: IS_RECEIVE | self.name | slot as u64, buffer: Some(entry) };
        self.is_broken |= self.pair.post_receive(&[request]).is_err();
    }

    /// Takes a message that came out of its slot, and posts the slot again.
    pub fn take(&mut self, ticket: Ticket, length: u64, message: &mut Vec<u8>) {
        message.clear();
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if ticket.slot >= RECEIVES || length > MESSAGE_BYTES {
            self.is_broken = true;
            return;
        }
        message.resize(length, 0);
        let at = (MOST_MESSAGES + ticket.slot) * MESSAGE_BYTES;
        copy_out(self.region.memory().as_ref(), at, message);
        self.post_receive(ticket.slot);
    }

    /// A message of ours is there: its slot is free. Calls `carried` with each connection whose data
    /// it carried.
    pub fn completed(&mut self, ticket: Ticket, mut carried: impl FnMut(u32)) {
        let Some(slot) = self.slots.get_mut(ticket.slot) else { return };
        slot.carries.drain(..).for_each(&mut carried);
        self.writes -= std::mem::take(&mut slot.writes);
        self.free.push(ticket.slot);
    }

    /// Says `record` about the connection that the other relay names `name`, as soon as there is
    /// room and before anything that is staged later.
    pub fn owe(&mut self, name: u64, record: Record<'static>) {
        self.owed.push_back((name, record));
        self.is_broken |= self.owed.len() > MOST_OWED;
    }

    /// True when a record with a body of `length` bytes can be staged now.
    fn has_room(&mut self, length: usize) -> bool {
        if self.stage != Stage::Up || self.is_broken {
            return false;
        }
        if self.staged.len() + record_bytes(length) > MESSAGE_BYTES {
            self.post();
        }
        let fits = self.staged.len() + record_bytes(length) <= MESSAGE_BYTES;
        fits && (!self.staged.is_empty() || !self.free.is_empty())
    }

    /// Stages a record about `name`. False when there is no room: the next completion makes some.
    pub fn stage(&mut self, name: u64, record: &Record<'_>) -> bool {
        if !self.has_room(record.body_bytes()) {
            return false;
        }
        let at = self.staged.len();
        self.staged.resize(at + record_bytes(record.body_bytes()), 0);
        record.encode(name, &mut self.staged[at..]);
        true
    }

    /// Stages the data of connection `index`, which the other relay names `name`: `fill` copies the
    /// ring's `length` bytes. False as for [`Link::stage`].
    pub fn stage_data(
        &mut self,
        (index, name): (u32, u64),
        position: u64,
        length: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Staged {
        if !self.has_room(DATA_BYTES + length) {
            return Staged::Not;
        }
        let at = self.staged.len();
        self.staged.resize(at + record_bytes(DATA_BYTES + length), 0);
        fill(message::data(name, position, length, &mut self.staged[at..]));
        self.note(index)
    }

    fn note(&mut self, index: u32) -> Staged {
        if self.staged_slot.carries.last() == Some(&index) {
            return Staged::Along;
        }
        self.staged_slot.carries.push(index);
        Staged::First
    }

    /// True when the message being staged carries data of connection `index` already.
    #[must_use]
    pub fn carries(&self, index: u32) -> bool {
        self.staged_slot.carries.last() == Some(&index)
    }

    /// Posts the writes of `source` to `target` (up to two ranges: offset in both, length), then
    /// stages `record` that tells of them. False as for [`Link::stage`]; nothing was written then.
    pub fn write(
        &mut self,
        (index, name): (u32, u64),
        source: &MemoryRegion,
        target: RemoteAddress,
        ranges: [(u64, u64); 2],
        record: &Record<'_>,
    ) -> Staged {
        if self.writes + 2 > MOST_WRITES || !self.has_room(record.body_bytes()) {
            return Staged::Not;
        }
        if self.held.is_none() {
            self.held = Some(self.pair.hold());
        }
        for (offset, length) in ranges.into_iter().filter(|(_, length)| *length > 0) {
            let local = [ScatterGatherEntry { region: source, offset, length }];
            let operation = Operation::Write {
                local: LocalData::Gather(&local),
                remote: target.advanced(offset),
            };
            match self.pair.post_send(&[WorkRequest::unsignalled(self.name, operation)]) {
                Ok(()) => {
                    self.writes += 1;
                    self.staged_slot.writes += 1;
                }
                Err(_) => {
                    self.is_broken = true;
                    return Staged::Not;
                }
            }
        }
        let staged = self.stage(name, record);
        debug_assert!(staged, "there was room for the record");
        self.note(index)
    }

    /// Stages what is owed. True when nothing is owed any more.
    pub fn settle(&mut self) -> bool {
        while let Some((name, record)) = self.owed.pop_front() {
            if !self.stage(name, &record) {
                self.owed.push_front((name, record));
                return false;
            }
        }
        true
    }

    /// Posts what is staged and owed. Returns messages posted.
    pub fn flush(&mut self) -> u32 {
        let before = self.free.len();
        let _ = self.settle();
        self.post();
        self.held = None;
        (before - self.free.len()) as u32
    }

    fn post(&mut self) {
        if self.staged.is_empty() || self.is_broken {
            return;
        }
        let Some(slot) = self.free.pop() else { return };
        let at = slot * MESSAGE_BYTES;
        copy_in(self.region.memory().as_ref(), at, &self.staged);
        let entry = [ScatterGatherEntry {
            region: &self.region,
            offset: at as u64,
            length: self.staged.len() as u64,
        }];
        let operation = Operation::Send { local: LocalData::Gather(&entry), immediate: None };
        let posted = self.pair.post_send(&[WorkRequest::new(self.name | slot as u64, operation)]);
        match posted {
            Ok(()) => {
                std::mem::swap(&mut self.slots[slot], &mut self.staged_slot);
                self.staged.clear();
            }
            // Places are counted, but a provider may give those of silent writes back late.
            Err(PostError::QueueFull) => self.free.push(slot),
            Err(_) => self.is_broken = true,
        }
    }
}
