//! The client's end of a channel. It stays on its thread.
//!
//! Invariants: a request ends exactly once ([`Outcome`]); its destination is one registered buffer, named
//! to the server in that request alone; nothing is registered after the channel was connected.
//!
//! Source: spec/rmongo.md 3.4, 3.8 item 6, 3.11, 3.12.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_env::Clock;
use beeline_fabric::{
    CompletionQueue, LocalData, MemoryRegion, Opcode, Operation, PostError, QueuePair,
    QueuePairState, ReceiveRequest, RemoteAddress, ScatterGatherEntry, WorkCompletion, WorkRequest,
};
use beeline_os::memory::{copy_in, copy_out};
use beeline_os::patience::Patience;
use beeline_wire::crc32c;

use crate::area::Area;
use crate::buffers::Buffers;
use crate::greeting::RnicInfo;
use crate::indices::Indices;
use crate::message::{
    BODY, DataType, Immediate, LONGEST, LONGEST_BODY, LONGEST_NAME, Message, MessageType, Part,
    REGION_KEY, SLOT_BYTES, copy_slot, granted,
};
use crate::numbers::ByNumber;
use crate::planted::{Planted, planted};

mod layout;
mod options;
mod wait;

pub(crate) use layout::Layout;
use layout::Place;
use options::LONGEST_REQUEST;
pub use options::{ClientCounters, ClientOptions, Outcome, RequestError, Submit};

/// Completions taken at once.
const BATCH: usize = 16;

/// Names what is no message; a message is named by how many there are with it.
const OTHER: u64 = u64::MAX;
/// Most messages of which one reports that they are written.
const REPORTED: u64 = 8;
/// Receives posted at a time, of the eight beyond those that can be in use.
const RECEIVES: usize = 8;

/// What a channel is made of.
pub(crate) struct Parts {
    pub(crate) qp: Box<dyn QueuePair>,
    pub(crate) queue: Rc<dyn CompletionQueue>,
    pub(crate) window: MemoryRegion,
    pub(crate) staging: MemoryRegion,
    pub(crate) theirs: RemoteAddress,
    pub(crate) layout: Layout,
    pub(crate) own_slots: u16,
    pub(crate) slots: u16,
    pub(crate) checksum: bool,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) outstanding: u16,
    pub(crate) rnic: RnicInfo,
    pub(crate) wire: Option<SocketAddr>,
    /// A message being made.
    pub(crate) out: Box<[u8; SLOT_BYTES]>,
}

#[derive(Debug)]
struct Pending {
    place: Place,
    deadline_ns: u64,
    reply: Vec<u8>,
}

/// A request that is not sent, or not all of it.
#[derive(Debug)]
struct Queued {
    index: u32,
    kind: MessageType,
    name: Vec<u8>,
    body: Vec<u8>,
    sent: usize,
    from: u64,
    to: u64,
}

/// The area for bodies.
#[derive(Debug)]
enum Granted {
    No,
    Asked,
    At { offset: u64, area: Area },
}

/// See the module's documentation.
pub struct ChannelClient {
    parts: Parts,
    small: Buffers,
    large: Buffers,
    indices: Indices,
    pending: ByNumber<u32, Pending>,
    quarantine: ByNumber<u32, Place>,
    queued: VecDeque<Queued>,
    results: VecDeque<(u32, Outcome)>,
    granted: Granted,
    /// Messages sent, written and acknowledged.
    sent: u64,
    written: u64,
    acknowledged: u64,
    /// Whether each message that is not acknowledged has a piece of the area.
    pieces: VecDeque<bool>,
    /// Messages that came.
    received: u64,
    /// Receives that were used and are not posted again.
    used_receives: usize,
    owed_acknowledgements: u32,
    counters: ClientCounters,
    slot: Box<[u8; SLOT_BYTES]>,
    /// Where completions are taken to: a poll that finds none costs no clearing.
    completions: Vec<WorkCompletion>,
    patience: Patience,
    broken: bool,
}

impl std::fmt::Debug for ChannelClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChannelClient")
            .field("pending", &self.pending.len())
            .field("queued", &self.queued.len())
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

impl ChannelClient {
    pub(crate) fn new(parts: Parts) -> Self {
        Self {
            small: Buffers::new(parts.layout.small_count),
            large: Buffers::new(parts.layout.large_count),
            parts,
            indices: Indices::default(),
            pending: ByNumber::default(),
            quarantine: ByNumber::default(),
            queued: VecDeque::new(),
            results: VecDeque::new(),
            granted: Granted::No,
            sent: 0,
            written: 0,
            acknowledged: 0,
            pieces: VecDeque::new(),
            received: 0,
            used_receives: 0,
            owed_acknowledgements: 0,
            counters: ClientCounters { registrations: 2, ..ClientCounters::default() },
            slot: Box::new([0; SLOT_BYTES]),
            completions: vec![WorkCompletion::EMPTY; BATCH],
            patience: Patience::default(),
            broken: false,
        }
    }

    /// The server's device.
    #[must_use]
    pub fn peer(&self) -> &RnicInfo {
        &self.parts.rnic
    }

    /// Where the server speaks the MongoDB wire.
    #[must_use]
    pub fn wire(&self) -> Option<SocketAddr> {
        self.parts.wire
    }

    /// Whether the connection is gone: make another.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether requests can be sent, after a look at what arrived: a connection that its server ended is found
    /// broken before anything is sent over it.
    pub fn is_alive(&mut self) -> bool {
        self.poll();
        if !self.broken && self.parts.qp.state() != QueuePairState::ReadyToSend {
            self.fail_all();
        }
        !self.broken
    }

    /// Requests without an outcome.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.pending.len()
    }

    /// What it did so far.
    #[must_use]
    pub fn counters(&self) -> ClientCounters {
        self.counters
    }

    /// Destinations that can be taken now: small and large.
    #[must_use]
    pub fn idle(&self) -> (usize, usize) {
        (self.small.idle(), self.large.idle())
    }

    /// Destinations that are out of use until a late write came.
    #[must_use]
    pub fn quarantined(&self) -> usize {
        self.quarantine.len()
    }

    /// Bytes registered.
    #[must_use]
    pub fn registered_bytes(&self) -> u64 {
        self.parts.window.length_bytes() + self.parts.staging.length_bytes()
    }

    /// Takes a request; its outcome comes under the number that is returned. `from` and `to` are optimes,
    /// for requests for the log.
    ///
    /// Errors: [`Submit`].
    pub fn submit(
        &mut self,
        kind: MessageType,
        name: &[u8],
        body: &[u8],
        (from, to): (u64, u64),
        timeout: Duration,
    ) -> Result<u32, Submit> {
        if !self.is_alive() {
            return Err(Submit::Broken);
        }
        if name.len() > LONGEST_NAME || body.len() > LONGEST_REQUEST {
            return Err(Submit::TooLong);
        }
        if self.pending.len() >= usize::from(self.parts.outstanding) {
            return Err(Submit::Full);
        }
        let large = matches!(
            kind,
            MessageType::Query
                | MessageType::Command
                | MessageType::OplogInitSynRequest
                | MessageType::OplogSynRequest
        );
        let buffers = if large { &mut self.large } else { &mut self.small };
        let Some(buffer) = buffers.reserve() else { return Err(Submit::Full) };
        let (pending, quarantine) = (&self.pending, &self.quarantine);
        let index = self
            .indices
            .take(|index| pending.contains_key(&index) || quarantine.contains_key(&index));
        let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let deadline_ns = self.parts.clock.monotonic_ns().saturating_add(timeout);
        let place = Place { large, buffer };
        self.pending.insert(index, Pending { place, deadline_ns, reply: Vec::new() });
        self.counters.requests += 1;
        if !self.send_at_once(index, kind, name, body, (from, to), place) {
            let (name, body) = (name.to_vec(), body.to_vec());
            self.queued.push_back(Queued { index, kind, name, body, sent: 0, from, to });
            self.pump();
        }
        Ok(index)
    }

    /// Sends a request that fits into a message, where nothing waits before it; false: it is to be queued.
    fn send_at_once(
        &mut self,
        index: u32,
        kind: MessageType,
        name: &[u8],
        body: &[u8],
        (from, to): (u64, u64),
        place: Place,
    ) -> bool {
        let slots = u64::from(self.parts.slots);
        if body.len() > LONGEST_BODY
            || !self.queued.is_empty()
            || self.owed_acknowledgements > 0
            || self.sent - self.acknowledged >= slots && !planted(Planted::SendWithoutCredit)
            || self.sent - self.written >= slots
        {
            return false;
        }
        let data_type = if body.is_empty() { DataType::None } else { DataType::Bson };
        let message = Message { name, data_type, from, to, body, ..Message::new(kind, index) };
        match self.parts.send(message, Some(place), self.sent, &mut self.counters) {
            Some(true) => {
                self.sent += 1;
                self.pieces.push_back(false);
                self.post(place);
                true
            }
            Some(false) => false,
            None => {
                self.fail_all();
                true
            }
        }
    }

    /// Takes the next outcome there is.
    pub fn take_outcome(&mut self) -> Option<(u32, Outcome)> {
        self.results.pop_front()
    }

    /// Handles what arrived; returns how many completions that were.
    pub fn poll(&mut self) -> usize {
        let mut completions = std::mem::take(&mut self.completions);
        let polled = self.parts.queue.poll(&mut completions);
        match polled {
            Ok(count) => self.take_all(&completions[..count]),
            Err(_) => self.fail_all(),
        }
        self.completions = completions;
        polled.unwrap_or(0)
    }

    /// Ends requests whose time is up; their destinations go into quarantine.
    pub fn expire(&mut self) {
        let now = self.parts.clock.monotonic_ns();
        let late: Vec<u32> = self
            .pending
            .iter()
            .filter(|(_, pending)| now >= pending.deadline_ns)
            .map(|(index, _)| *index)
            .collect();
        for index in late {
            self.counters.timed_out += 1;
            let unsent = self.queued.iter().position(|queued| queued.index == index);
            if let Some(at) = unsent
                && self.queued[at].sent > 0
            {
                // A part of its body went out: the server would wait for the rest.
                self.fail_all();
                return;
            }
            let Some(pending) = self.pending.remove(&index) else { continue };
            let buffers = if pending.place.large { &mut self.large } else { &mut self.small };
            if let Some(at) = unsent {
                self.queued.remove(at);
                buffers.release(pending.place.buffer);
            } else if planted(Planted::ReuseLateDestination) {
                buffers.release(pending.place.buffer);
            } else {
                buffers.quarantine(pending.place.buffer);
                self.quarantine.insert(index, pending.place);
            }
            self.results.push_back((index, Err(RequestError::TimedOut)));
        }
        let all = |buffers: &Buffers| buffers.quarantined() == buffers.count();
        if all(&self.small) || all(&self.large) {
            // Only a new connection brings them back.
            self.fail_all();
        }
    }

    /// Ends the channel: every request gets its outcome, every buffer is idle again.
    pub fn fail_all(&mut self) {
        self.broken = true;
        // The server may not write any more once this is done; a queue pair that cannot revoke is broken.
        let _ = self.parts.qp.revoke();
        self.queued.clear();
        let pending: Vec<u32> = self.pending.keys().copied().collect();
        for index in pending {
            if let Some(pending) = self.pending.remove(&index) {
                self.release(pending.place);
                if planted(Planted::ForgetBrokenRequests) {
                    continue;
                }
                self.results.push_back((index, Err(RequestError::Broken)));
            }
        }
        let quarantine: Vec<Place> = self.quarantine.drain().map(|(_, place)| place).collect();
        for place in quarantine {
            self.release(place);
        }
        self.granted = Granted::No;
        self.pieces.clear();
    }

    fn release(&mut self, place: Place) {
        let buffers = if place.large { &mut self.large } else { &mut self.small };
        buffers.release(place.buffer);
    }

    fn take_all(&mut self, completions: &[WorkCompletion]) {
        for completion in completions {
            if self.broken {
                return;
            }
            if self.take(completion).is_none() {
                self.fail_all();
                return;
            }
        }
        if self.used_receives >= RECEIVES && self.post_receives().is_err() {
            self.fail_all();
            return;
        }
        if !completions.is_empty() && (self.owed_acknowledgements > 0 || !self.queued.is_empty()) {
            self.pump();
        }
    }

    fn post_receives(&mut self) -> Result<(), PostError> {
        while self.used_receives > 0 {
            let count = self.used_receives.min(RECEIVES);
            let receives = [ReceiveRequest { wr_id: 0, buffer: None }; RECEIVES];
            self.parts.qp.post_receive(&receives[..count])?;
            self.used_receives -= count;
        }
        Ok(())
    }

    /// `None`: the connection is over.
    fn take(&mut self, completion: &WorkCompletion) -> Option<()> {
        if !completion.is_success() {
            return None;
        }
        if completion.opcode != Opcode::ReceiveWithImmediate {
            if completion.wr_id != OTHER {
                // Those before it are written too.
                self.written = self.written.max(completion.wr_id);
            }
            return Some(());
        }
        self.used_receives += 1;
        match Immediate::of(completion.immediate?) {
            Immediate::Message => self.message(completion.length),
            Immediate::Acknowledge => {
                self.acknowledged += 1;
                if self.acknowledged > self.sent {
                    return None;
                }
                if self.pieces.pop_front()?
                    && let Granted::At { area, .. } = &mut self.granted
                    && !planted(Planted::FreePieceEarly)
                {
                    area.free_oldest();
                }
                Some(())
            }
            Immediate::Data(index) => self.data(index),
        }
    }

    /// A part of a reply came.
    fn data(&mut self, index: u32) -> Option<()> {
        let Some(pending) = self.pending.get_mut(&index) else {
            match self.quarantine.remove(&index) {
                Some(place) => {
                    self.counters.late_writes += 1;
                    self.release(place);
                }
                None => self.counters.unknown_immediates += 1,
            }
            return Some(());
        };
        let place = pending.place;
        let layout = &self.parts.layout;
        let (offset, capacity) = layout.of(place);
        let memory = self.parts.window.memory().as_ref();
        let mut head = [0; Part::BYTES];
        copy_out(memory, offset as usize, &mut head);
        let part = Part::decode(head)?;
        let have = pending.reply.len();
        let left = (part.total as usize).checked_sub(have)?;
        if part.offset as usize != have || part.total as usize > LONGEST_REQUEST + (16 << 10) {
            return None;
        }
        let count = left.min(capacity as usize - Part::BYTES);
        pending.reply.resize(have + count, 0);
        copy_out(memory, offset as usize + Part::BYTES, &mut pending.reply[have..]);
        self.counters.copies += 1;
        let buffers = if place.large { &mut self.large } else { &mut self.small };
        buffers.consume(place.buffer);
        if self.parts.checksum
            && !planted(Planted::IgnoreChecksum)
            && part.checksum != Some(crc32c(&pending.reply[have..]))
        {
            let place = self.pending.remove(&index).map(|pending| pending.place)?;
            self.release(place);
            self.results.push_back((index, Err(RequestError::Corrupt)));
            return Some(());
        }
        if have + count < part.total as usize {
            buffers.post_again(place.buffer);
            let rest = Queued {
                index,
                kind: MessageType::Continue,
                name: Vec::new(),
                body: Vec::new(),
                sent: 0,
                from: 0,
                to: 0,
            };
            // Before requests that are not begun: the server keeps the rest only for so long.
            let at = usize::from(self.queued.front().is_some_and(|first| first.sent > 0));
            self.queued.insert(at, rest);
            return Some(());
        }
        let pending = self.pending.remove(&index)?;
        self.release(pending.place);
        self.results.push_back((index, Ok(pending.reply)));
        Some(())
    }

    /// A message of the server came.
    fn message(&mut self, length: u64) -> Option<()> {
        let length = usize::try_from(length).ok()?;
        if !(BODY..=LONGEST).contains(&length) {
            return None;
        }
        let place = (self.received % u64::from(self.parts.own_slots)) as usize * SLOT_BYTES;
        self.received += 1;
        copy_slot(self.parts.window.memory().as_ref(), place, &mut self.slot[..length]);
        self.owed_acknowledgements += 1;
        let message = Message::read(&self.slot[..length]).ok()?;
        let index = message.index;
        let outcome = match message.kind {
            MessageType::Grant => {
                let ring = u64::from(self.parts.slots) * SLOT_BYTES as u64;
                // The local copy of the area is as long as the server's region.
                let end = message.address.checked_add(message.bytes)?;
                let fits = message.address >= ring
                    && end <= self.parts.staging.length_bytes()
                    && message.key == REGION_KEY
                    && message.bytes >= 1024;
                if !fits || !matches!(self.granted, Granted::Asked) {
                    return None;
                }
                let (offset, area) = (message.address, Area::new(message.bytes));
                self.granted = Granted::At { offset, area };
                return Some(());
            }
            MessageType::OptimeResponse => Ok(message.to.to_le_bytes().to_vec()),
            MessageType::ErrorStatus => {
                let (code, text) = message.body.split_first_chunk::<4>()?;
                let text = String::from_utf8_lossy(text).into_owned();
                Err(RequestError::Refused { code: u32::from_le_bytes(*code), text })
            }
            _ => return None,
        };
        match self.pending.remove(&index) {
            Some(pending) => {
                self.release(pending.place);
                self.results.push_back((index, outcome));
            }
            None => match self.quarantine.remove(&index) {
                Some(place) => {
                    self.counters.late_writes += 1;
                    self.release(place);
                }
                None => self.counters.unknown_immediates += 1,
            },
        }
        Some(())
    }

    /// Sends what can be sent.
    fn pump(&mut self) {
        let mut goes_on = true;
        while goes_on && self.owed_acknowledgements > 0 {
            let write = Operation::WriteWithImmediate {
                local: LocalData::Inline(&[]),
                remote: self.parts.theirs,
                immediate: Immediate::Acknowledge.code(),
            };
            match self.parts.qp.post_send(&[WorkRequest::new(OTHER, write)]) {
                Ok(()) => {
                    self.counters.writes += 1;
                    self.owed_acknowledgements -= 1;
                }
                Err(PostError::QueueFull) => return,
                Err(_) => goes_on = false,
            }
        }
        while goes_on && !self.queued.is_empty() {
            match self.send_next() {
                Some(true) => {}
                Some(false) => return,
                None => goes_on = false,
            }
        }
        if !goes_on {
            self.fail_all();
        }
    }

    /// Sends the next message of the first request that waits. `Some(false)`: wait; `None`: the connection
    /// is over.
    fn send_next(&mut self) -> Option<bool> {
        let slots = u64::from(self.parts.slots);
        // Both the slot there and its copy here have to be idle.
        if self.sent - self.acknowledged >= slots && !planted(Planted::SendWithoutCredit)
            || self.sent - self.written >= slots
        {
            return Some(false);
        }
        let Some(next) = self.queued.front_mut() else { return Some(false) };
        if next.body.len() <= LONGEST_BODY {
            let message = Message {
                name: &next.name,
                data_type: if next.body.is_empty() { DataType::None } else { DataType::Bson },
                from: next.from,
                to: next.to,
                body: &next.body,
                ..Message::new(next.kind, next.index)
            };
            let place = self.pending.get(&next.index)?.place;
            let again = next.kind == MessageType::Continue;
            let sent = self.parts.send(message, Some(place), self.sent, &mut self.counters);
            return self.sent_one(sent?, false, (!again).then_some(place));
        }
        let Granted::At { offset, area } = &mut self.granted else {
            if matches!(self.granted, Granted::Asked) {
                return Some(false);
            }
            let bytes = next.body.len() as u64;
            let message = Message { bytes, ..Message::new(MessageType::GrantRequest, next.index) };
            let sent = self.parts.send(message, None, self.sent, &mut self.counters)?;
            if !sent {
                return Some(false);
            }
            self.granted = Granted::Asked;
            self.sent += 1;
            self.pieces.push_back(false);
            return Some(true);
        };
        let count = (next.body.len() - next.sent).min(area.longest() as usize);
        let Some(at) = area.take(count as u64) else { return Some(false) };
        if planted(Planted::FreePieceEarly) {
            area.free_oldest();
        }
        let bytes = &next.body[next.sent..next.sent + count];
        copy_in(self.parts.staging.memory().as_ref(), (*offset + at) as usize, bytes);
        self.counters.copies += 1;
        let region = &self.parts.staging;
        let entry = [ScatterGatherEntry { region, offset: *offset + at, length: count as u64 }];
        let local = LocalData::Gather(&entry);
        let remote = self.parts.theirs.advanced(*offset + at);
        let write = WorkRequest::unsignalled(OTHER, Operation::Write { local, remote });
        // Depths leave room for a body before each message under way.
        self.parts.qp.post_send(&[write]).ok()?;
        self.counters.writes += 1;
        let last = next.sent + count == next.body.len();
        let body = granted(at, count as u64);
        let message = Message {
            name: &next.name,
            data_type: if last { DataType::Granted } else { DataType::GrantedPart },
            body: &body,
            ..Message::new(next.kind, next.index)
        };
        let place = self.pending.get(&next.index)?.place;
        let first = next.sent == 0;
        next.sent += count;
        let sent = self.parts.send(message, Some(place), self.sent, &mut self.counters)?;
        if !sent {
            return None;
        }
        if !last {
            self.sent += 1;
            self.pieces.push_back(true);
            if first {
                self.post(place);
            }
            return Some(true);
        }
        self.sent_one(true, true, first.then_some(place))
    }

    /// Notes that all of the first request was sent.
    fn sent_one(&mut self, sent: bool, piece: bool, place: Option<Place>) -> Option<bool> {
        if !sent {
            return Some(false);
        }
        self.sent += 1;
        self.pieces.push_back(piece);
        self.queued.pop_front();
        if let Some(place) = place {
            self.post(place);
        }
        Some(true)
    }

    fn post(&mut self, place: Place) {
        let buffers = if place.large { &mut self.large } else { &mut self.small };
        buffers.post(place.buffer);
    }
}

impl Parts {
    /// Writes a message into the server's next slot. `Some(false)`: the queue is full; `None`: the
    /// connection is over.
    fn send(
        &mut self,
        mut message: Message<'_>,
        place: Option<Place>,
        number: u64,
        counters: &mut ClientCounters,
    ) -> Option<bool> {
        if let Some(place) = place {
            let (address, bytes) = self.layout.of(place);
            message = Message { address, bytes, key: REGION_KEY, ..message };
        }
        let bytes = message.write(&mut self.out).ok()?;
        let slot = number % u64::from(self.slots) * SLOT_BYTES as u64;
        copy_in(self.staging.memory().as_ref(), slot as usize, bytes);
        let length = bytes.len() as u64;
        let entry = [ScatterGatherEntry { region: &self.staging, offset: slot, length }];
        let write = Operation::WriteWithImmediate {
            local: LocalData::Gather(&entry),
            remote: self.theirs.advanced(slot),
            immediate: Immediate::Message.code(),
        };
        let (wr_id, every) = (number + 1, REPORTED.min(u64::from(self.slots) / 2).max(1));
        let signalled = wr_id.is_multiple_of(every);
        match self.qp.post_send(&[WorkRequest { wr_id, operation: write, signalled }]) {
            Ok(()) => {
                counters.writes += 1;
                Some(true)
            }
            Err(PostError::QueueFull) => Some(false),
            Err(_) => None,
        }
    }
}

#[cfg(test)]
impl ChannelClient {
    pub(crate) fn set_indices(&mut self, indices: Indices) {
        self.indices = indices;
    }

    pub(crate) fn window(&self) -> &MemoryRegion {
        &self.parts.window
    }

    /// Where they begin, and how many there are.
    pub(crate) fn small_destinations(&self) -> (u64, u64) {
        (self.parts.layout.small, u64::from(self.parts.layout.small_count))
    }
}
