//! One client's connection: its receives, the answers it waits for, the segment it writes.
//!
//! ```text
//! receive consumed ──► executed ──► Pending ──(commit)──► answer posted ──► receive posted again
//! ```
//!
//! Answers leave in the order of the requests. Everything here is bounded by the window.
//!
//! There are more receives than the window, so that they are posted again many at a time, after
//! the answers: a client that has its answer finds a receive for its next request all the same.

use std::collections::VecDeque;

use beeline_fabric::{
    LocalData, MemoryRegion, Operation, PostError, QueuePair, ReceiveRequest, RemoteAddress,
    RemoteKey, ScatterGatherEntry, WorkRequest,
};
use beeline_kv::wire::{LONG_REPLY_BYTES, Place, Protocol, Reply, Request};
use beeline_kv::{ClientLog, ReadGuard};

use crate::agreed::Line;
use crate::counters::ServerCounters;
use crate::regions::SegmentRegions;

/// Answers posted at once.
const BATCH: usize = 16;

/// What a get is taken to yield before its length is known.
const EXPECTED_RESULT_BYTES: u64 = 128;

/// Receives beyond the window, of which half may wait to be posted again.
fn spare_receives(window: u16) -> u16 {
    (window / 2).max(4)
}

/// Receives of a connection with this window.
pub(crate) fn receives_of(window: u16) -> u16 {
    window.saturating_add(spare_receives(window))
}

/// By what a completion names its connection: its place, and above it a number that no earlier
/// connection has had there.
pub(crate) fn context(generation: u32, index: u16) -> u64 {
    u64::from(generation) << 16 | u64::from(index)
}

/// The place in a [`context`].
pub(crate) fn place_of(context: u64) -> u16 {
    context as u16
}

/// What a completion's `wr_id` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrId {
    /// True for a send: `index` is then its sequence number; else that of the receive.
    pub sent: bool,
    pub index: u32,
}

/// Sequence numbers of sends wrap here.
const SEQUENCE_MASK: u32 = (1 << 31) - 1;

impl WrId {
    pub fn encode(self) -> u64 {
        u64::from(self.sent) << 31 | u64::from(self.index & SEQUENCE_MASK)
    }

    pub fn decode(wr_id: u64) -> Self {
        Self { sent: wr_id >> 31 & 1 != 0, index: wr_id as u32 & SEQUENCE_MASK }
    }
}

/// An answer that waits for the commit, or for room in the send queue.
#[derive(Debug)]
pub(crate) enum Pending {
    /// A small reply. `after_write` when it acknowledges one.
    Message { reply: Reply, after_write: bool },
    /// An entry: straight from its segment, or from the staging buffer it was copied to.
    Entry { guard: ReadGuard, place: Place, tag: u16, from: Source },
    /// A result in one of the connection's staging buffers.
    Staged { buffer: usize, length: u32, place: Place, tag: u16 },
    /// Two-phase baseline: space for an entry, once the entries promised before are in.
    Space { bytes: u32, tag: u16 },
    /// Stands for the answer to a request that waits for the cluster's log.
    Awaited { number: u32, tag: u16 },
}

impl Pending {
    /// False while it waits for what only later requests or completions bring.
    fn is_ready(&self) -> bool {
        !matches!(
            self,
            Self::Space { .. }
                | Self::Awaited { .. }
                | Self::Entry { from: Source::NoBufferYet, .. }
        )
    }
}

/// Where an entry is sent from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Its segment, which the device reaches.
    Segment,
    /// A staging buffer, once one is free.
    NoBufferYet,
    /// This staging buffer.
    Buffer(usize),
}

/// What a posted send keeps in place until it completed.
#[derive(Debug)]
pub(crate) enum Held {
    Entry(ReadGuard, Source),
    Staged(usize),
}

/// A buffer for results that are copied.
#[derive(Debug)]
pub(crate) struct Staging {
    pub region: MemoryRegion,
    pub bytes: u32,
    pub busy: bool,
}

/// The segment the client writes now.
#[derive(Debug)]
pub(crate) struct Grant {
    pub number: u8,
    /// The segment, or the buffer that stands for it.
    pub region: MemoryRegion,
    pub length: u32,
    /// Entries are copied from the region, because the device cannot reach the segment.
    pub is_copied: bool,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub index: u16,
    /// Of its queue pair: [`context`].
    pub context: u64,
    pub qp: Box<dyn QueuePair>,
    pub protocol: Protocol,
    pub window: u16,
    pub request_bytes: u32,
    pub receives: MemoryRegion,
    /// Receives whose request is executed; posted again together with its answer.
    pub consumed: Vec<u16>,
    pub pending: VecDeque<Pending>,
    pub held: VecDeque<(u32, Held)>,
    pub staging: Vec<Staging>,
    pub log: Option<ClientLog>,
    pub grant: Option<Grant>,
    pub next_grant: u8,
    /// Where requests land, if they do so in slots.
    pub area: Option<MemoryRegion>,
    pub slot_bytes: u32,
    /// In a member of a cluster: requests that wait for the log.
    pub line: Line,
    /// Two-phase baseline: end of the space promised, and entries promised and not announced.
    pub promised_tail: u32,
    pub promised: u32,
    /// Two-phase baseline: entries the client may be reading, oldest first.
    pub leases: VecDeque<ReadGuard>,
    pub released: u16,
    pub active_ns: u64,
    /// On the server's list of connections with answers.
    pub listed: bool,
    pub dead: bool,
    next_sequence: u32,
    unsignalled: u16,
}

/// The parts a connection is made of.
pub(crate) struct Parts {
    pub index: u16,
    /// Of its queue pair: [`context`].
    pub context: u64,
    pub qp: Box<dyn QueuePair>,
    pub protocol: Protocol,
    pub window: u16,
    pub request_bytes: u32,
    pub receives: MemoryRegion,
    pub area: Option<MemoryRegion>,
    pub slot_bytes: u32,
    pub now_ns: u64,
}

impl Connection {
    pub fn new(parts: Parts) -> Self {
        let window = usize::from(parts.window);
        Self {
            index: parts.index,
            context: parts.context,
            qp: parts.qp,
            protocol: parts.protocol,
            window: parts.window,
            request_bytes: parts.request_bytes,
            receives: parts.receives,
            consumed: (0..receives_of(parts.window)).collect(),
            pending: VecDeque::with_capacity(window),
            held: VecDeque::with_capacity(window),
            staging: Vec::new(),
            log: None,
            grant: None,
            next_grant: 0,
            area: parts.area,
            slot_bytes: parts.slot_bytes,
            line: Line::default(),
            promised_tail: 0,
            promised: 0,
            leases: VecDeque::new(),
            released: 0,
            active_ns: parts.now_ns,
            listed: false,
            dead: false,
            next_sequence: 0,
            unsignalled: 0,
        }
    }

    /// Receives that may be posted again: requests that wait for the log keep one back each.
    fn receives_free(&self) -> usize {
        self.consumed.len().saturating_sub(self.line.awaited())
    }

    /// Asks for the lines that the result of a get goes to.
    #[inline]
    pub fn expect_result(&mut self, request: &Request) {
        let Place { key, offset } = request.result;
        let length = EXPECTED_RESULT_BYTES.min(u64::from(request.result_bytes));
        self.qp.expect_write(RemoteAddress { key: RemoteKey(key), offset }, length);
    }

    /// Posts the receives of executed requests again.
    pub fn post_receives(&mut self) -> Result<(), PostError> {
        while self.receives_free() > 0 {
            let count = self.receives_free().min(BATCH);
            let start = self.consumed.len() - count;
            let length = u64::from(self.request_bytes);
            let requests: [ReceiveRequest<'_>; BATCH] = std::array::from_fn(|i| {
                let index = self.consumed[start + i.min(count - 1)];
                let offset = u64::from(index) * length;
                let buffer = ScatterGatherEntry { region: &self.receives, offset, length };
                let wr_id = WrId { sent: false, index: u32::from(index) }.encode();
                ReceiveRequest { wr_id, buffer: Some(buffer) }
            });
            self.qp.post_receive(&requests[..count])?;
            self.consumed.truncate(start);
        }
        Ok(())
    }

    /// Posts what is pending, in order, as far as the send queue has room; then receives, once
    /// enough of them were consumed.
    ///
    /// Errors: the connection is broken.
    pub fn post_pending(
        &mut self,
        sources: &SegmentRegions,
        counters: &mut ServerCounters,
    ) -> Result<(), PostError> {
        // What is ready goes at once: a client that finds answers in two groups sends its next requests
        // in two groups as well, and they stay apart for good.
        let pending = self.pending.make_contiguous();
        let mut left = pending.iter().take_while(|pending| pending.is_ready()).count();
        while left > 0 {
            let ready = left.min(BATCH);
            // Arrays of the right size: one that is too large costs more than the answer.
            let posted = match ready {
                1 => self.post_one(sources, counters),
                2..=4 => self.post_batch::<4>(ready, sources, counters),
                _ => self.post_batch::<BATCH>(ready, sources, counters),
            };
            match posted {
                Ok(()) => left -= ready,
                Err(PostError::QueueFull) => break,
                Err(error) => return Err(error),
            }
        }
        if self.pending.is_empty() {
            // Begins at the start of its memory again, so that it seldom wraps around.
            self.pending.clear();
        }
        if self.receives_free() > usize::from(spare_receives(self.window) / 2) {
            self.post_receives()?;
        }
        Ok(())
    }

    /// Posts the first answer, which is ready.
    fn post_one(
        &mut self,
        sources: &SegmentRegions,
        counters: &mut ServerCounters,
    ) -> Result<(), PostError> {
        let Some(pending) = self.pending.front() else { return Err(PostError::QueueFull) };
        let bytes;
        let gather;
        let (operation, length) = match (pending, gathered(pending, &self.staging, sources)) {
            (
                Pending::Entry { place, tag, .. } | Pending::Staged { place, tag, .. },
                Some(entry),
            ) => {
                gather = [entry];
                let operation = Operation::WriteWithImmediate {
                    local: LocalData::Gather(&gather),
                    remote: RemoteAddress { key: RemoteKey(place.key), offset: place.offset },
                    immediate: u32::from(*tag),
                };
                (operation, entry.length)
            }
            (Pending::Message { reply, .. }, _) => {
                bytes = reply.encode();
                let bytes = &bytes[..reply.encoded_bytes()];
                let local = LocalData::Inline(bytes);
                (Operation::Send { local, immediate: None }, bytes.len() as u64)
            }
            // It is not ready, and waits as if the queue were full.
            _ => return Err(PostError::QueueFull),
        };
        let holds = !matches!(pending, Pending::Message { .. });
        let due = self.unsignalled >= self.window / 2;
        let sequence = self.next_sequence;
        let (wr_id, signalled) = (WrId { sent: true, index: sequence }.encode(), holds || due);
        self.qp.post_send(&[WorkRequest { wr_id, operation, signalled }])?;
        counters.bytes_out += length;
        if holds {
            counters.writes += 1;
        } else {
            counters.sends += 1;
        }
        self.unsignalled = if signalled { 0 } else { self.unsignalled + 1 };
        self.next_sequence = sequence.wrapping_add(1) & SEQUENCE_MASK;
        if let Some(answered) = self.pending.pop_front() {
            self.keep(sequence, answered);
        }
        Ok(())
    }

    /// Keeps what a posted answer is sent from.
    #[inline]
    fn keep(&mut self, sequence: u32, answered: Pending) {
        match answered {
            Pending::Entry { guard, from, .. } => {
                self.held.push_back((sequence, Held::Entry(guard, from)));
            }
            Pending::Staged { buffer, .. } => {
                self.held.push_back((sequence, Held::Staged(buffer)));
            }
            _ => {}
        }
    }

    fn post_batch<const N: usize>(
        &mut self,
        count: usize,
        sources: &SegmentRegions,
        counters: &mut ServerCounters,
    ) -> Result<(), PostError> {
        let pending = &self.pending.as_slices().0[..count];
        let mut messages = [[0; LONG_REPLY_BYTES]; N];
        for (bytes, pending) in messages.iter_mut().zip(pending) {
            if let Pending::Message { reply, .. } = pending {
                *bytes = reply.encode();
            }
        }
        let nothing = ScatterGatherEntry { region: &self.receives, offset: 0, length: 0 };
        let gathers: [[ScatterGatherEntry<'_>; 1]; N] = std::array::from_fn(|i| {
            let there = pending.get(i).and_then(|one| gathered(one, &self.staging, sources));
            [there.unwrap_or(nothing)]
        });
        let holds = |pending: &Pending| !matches!(pending, Pending::Message { .. });
        let last_held = pending.iter().rposition(holds);
        let due = self.unsignalled as usize + count > usize::from(self.window) / 2;
        let first = self.next_sequence;
        let requests: [WorkRequest<'_>; N] = std::array::from_fn(|i| {
            // The last answer that holds memory is signalled, so that it is let go soon; and one
            // now and then, so that the send queue's entries come back.
            let signalled = last_held == Some(i) || (due && i + 1 == count);
            let wr_id = WrId { sent: true, index: first.wrapping_add(i as u32) }.encode();
            let write = |place: Place, tag: u16| Operation::WriteWithImmediate {
                local: LocalData::Gather(&gathers[i]),
                remote: RemoteAddress { key: RemoteKey(place.key), offset: place.offset },
                immediate: u32::from(tag),
            };
            let operation = match pending.get(i) {
                Some(Pending::Entry { place, tag, .. } | Pending::Staged { place, tag, .. }) => {
                    write(*place, *tag)
                }
                Some(Pending::Message { reply, .. }) => {
                    let bytes = &messages[i][..reply.encoded_bytes()];
                    Operation::Send { local: LocalData::Inline(bytes), immediate: None }
                }
                _ => Operation::Send { local: LocalData::Inline(&[]), immediate: None },
            };
            WorkRequest { wr_id, operation, signalled }
        });
        self.qp.post_send(&requests[..count])?;
        for request in &requests[..count] {
            match &request.operation {
                Operation::Send { local, .. } => {
                    counters.sends += 1;
                    counters.bytes_out += local.length();
                }
                Operation::WriteWithImmediate { local, .. } => {
                    counters.writes += 1;
                    counters.bytes_out += local.length();
                }
                _ => {}
            }
        }
        self.unsignalled = match (due, last_held) {
            (true, _) => 0,
            (false, Some(at)) => (count - 1 - at) as u16,
            (false, None) => self.unsignalled + count as u16,
        };
        for i in 0..count {
            let Some(answered) = self.pending.pop_front() else { break };
            self.keep(first.wrapping_add(i as u32) & SEQUENCE_MASK, answered);
        }
        self.next_sequence = self.next_sequence.wrapping_add(count as u32) & SEQUENCE_MASK;
        Ok(())
    }

    /// The oldest thing held for a send up to `sequence`, which completed.
    pub fn release(&mut self, sequence: u32) -> Option<Held> {
        let (oldest, _) = self.held.front()?;
        let behind = sequence.wrapping_sub(*oldest) & SEQUENCE_MASK;
        if behind > SEQUENCE_MASK / 2 {
            return None;
        }
        self.held.pop_front().map(|(_, held)| held)
    }
}

/// Where an answer's bytes are, if they are not in the answer.
#[inline]
fn gathered<'a>(
    pending: &Pending,
    staging: &'a [Staging],
    sources: &'a SegmentRegions,
) -> Option<ScatterGatherEntry<'a>> {
    match pending {
        Pending::Entry { guard, from: Source::Segment, .. } => Some(ScatterGatherEntry {
            region: sources.known(guard),
            offset: u64::from(guard.offset()),
            length: u64::from(guard.length_bytes()),
        }),
        Pending::Entry { guard, from: Source::Buffer(buffer), .. } => Some(ScatterGatherEntry {
            region: &staging[*buffer].region,
            offset: 0,
            length: u64::from(guard.length_bytes()),
        }),
        Pending::Staged { buffer, length, .. } => Some(ScatterGatherEntry {
            region: &staging[*buffer].region,
            offset: 0,
            length: u64::from(*length),
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_work_request_id_survives_the_round_trip() {
        for sent in [false, true] {
            for index in [0, 7, SEQUENCE_MASK] {
                let id = WrId { sent, index };
                assert_eq!(WrId::decode(id.encode()), id);
            }
        }
    }
}
