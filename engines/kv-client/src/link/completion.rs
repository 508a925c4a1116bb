//! What comes back to a link: replies, results, time-outs, loss.

use std::time::Duration;

use beeline_fabric::{Opcode, Status, WorkCompletion};
use beeline_kv::entry::{self, FIRST_ENTRY, HEADER_BYTES, Header};
use beeline_kv::wire::{
    Announcement, LONG_REPLY_BYTES, REQUEST_HEADER_BYTES, Reply, ReplyStatus, Request, RequestKind,
    SCAN_HEADER_BYTES, ScanHeader,
};
use beeline_os::memory::copy_out;
use beeline_os::prefetch;

use super::{Grant, Held, Link, RECEIVE_BYTES, RESULT_ACCESS, RETRIES};
use crate::client::{Answer, Core, Deliver, Token};
use crate::error::ClientError;
use crate::slot::{Slot, Work};

impl Link {
    /// A reply message arrived.
    pub fn replied(
        &mut self,
        core: &mut Core,
        receive: u16,
        completion: &WorkCompletion,
        deliver: &mut Deliver<'_>,
    ) -> usize {
        self.consumed.push(receive);
        let mut bytes = [0; LONG_REPLY_BYTES];
        let length = completion.length as usize;
        if length > bytes.len() {
            return self.fail_protocol("an over-long reply", deliver);
        }
        let offset = usize::from(receive) * RECEIVE_BYTES as usize;
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
        let (found, offset) = (slot.found, slot.entry_offset);
        let slot_deletes = slot.header.is_tombstone();
        match reply.status {
            ReplyStatus::Ok | ReplyStatus::NotFound => {
                let (version, minimum_reading) = (reply.version, reply.minimum_reading);
                self.table.acknowledged_at(found, offset, version, minimum_reading);
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
        slot.staging.load(REQUEST_HEADER_BYTES as u32, &mut core.scratch);
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

    /// Asks for the lines of the result that a completion of the batch in hand announces. Called
    /// for each answer of the batch, in order, before the first is taken.
    pub fn look_ahead(&mut self, completion: &WorkCompletion) {
        let index = self.order.get(self.looked_ahead).copied();
        self.looked_ahead += 1;
        if completion.opcode == Opcode::ReceiveWithImmediate
            && let Some(index) = index
        {
            let result = &self.slots[usize::from(index)].result;
            let length = completion.length.min(u64::from(result.bytes));
            let memory = result.region.memory();
            let start = memory.base().as_ptr().wrapping_add(result.offset as usize);
            prefetch::for_reading(start, usize::try_from(length).unwrap_or(0));
        }
    }

    /// Called after the last answer of a batch was looked at ahead.
    pub fn end_look_ahead(&mut self) {
        self.looked_ahead = 0;
    }

    /// The server wrote a result into our memory.
    pub fn placed(
        &mut self,
        core: &mut Core,
        receive: u16,
        completion: &WorkCompletion,
        deliver: &mut Deliver<'_>,
    ) -> usize {
        self.consumed.push(receive);
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
    pub fn read(&mut self, core: &mut Core, index: u16, deliver: &mut Deliver<'_>) -> usize {
        self.reading = self.reading.saturating_sub(1);
        self.released = self.released.wrapping_add(1);
        let work = self.slots.get(usize::from(index)).map(|slot| slot.work);
        let Some(Work::ReadAt(_, length)) = work else { return 0 };
        core.counters.bytes_in += u64::from(length);
        self.result(core, index, length, deliver)
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
                match checked_entry(&scratch, slot.header.namespace, &slot.key) {
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

    pub(super) fn finish(
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

    pub(super) fn release(&mut self, index: u16) {
        self.slots[usize::from(index)].work = Work::Free;
        self.free.push(index);
    }

    /// After a batch of completions: receives go back, then what waited is posted.
    pub fn settle(&mut self, core: &mut Core, deliver: &mut Deliver<'_>) -> usize {
        let due = self.consumed.len() > usize::from(super::spare_receives(self.window()) / 2);
        if !self.up || (!due && self.waiting.is_empty()) {
            return 0;
        }
        if due && self.post_receives().is_err() {
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

    /// Sets deadlines that are not set yet; gives the link up when its oldest request is overdue.
    pub fn expire(&mut self, now_ns: u64, timeout: Duration, deliver: &mut Deliver<'_>) -> usize {
        if self.is_idle() {
            return 0;
        }
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let due_ns = now_ns.saturating_add(timeout_ns);
        let undated = std::mem::take(&mut self.undated).min(self.order.len());
        let fresh = self.order.iter().rev().take(undated);
        for index in fresh.chain(&self.waiting) {
            self.slots[usize::from(*index)].deadline_ns.get_or_insert(due_ns);
        }
        let overdue = |slot: &mut Slot| *slot.deadline_ns.get_or_insert(due_ns) <= now_ns;
        let oldest = [self.order.front(), self.waiting.front()];
        let mut late =
            oldest.into_iter().flatten().any(|index| overdue(&mut self.slots[usize::from(*index)]));
        if self.reading > 0 {
            let mut reads = self.slots.iter_mut();
            late |= reads.any(|slot| matches!(slot.work, Work::ReadAt(..)) && overdue(slot));
        }
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
        ReplyStatus::Undecided => ClientError::Undecided,
        ReplyStatus::ReservedKind => ClientError::ReservedKind,
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
fn checked_entry<'a>(bytes: &'a [u8], namespace: u32, key: &[u8]) -> Option<(Header, &'a [u8])> {
    let (head, rest) = bytes.split_first_chunk::<{ HEADER_BYTES as usize }>()?;
    let header = Header::decode(head);
    let (found, value) = rest.split_at_checked(usize::from(header.key_length))?;
    // Without a version it was placed and never accepted.
    let agrees = header.version != 0
        && value.len() == header.value_length as usize
        && header.namespace == namespace
        && found == key
        && !header.is_tombstone()
        && header.checksum == entry::checksum_whole(bytes);
    agrees.then_some((header, value))
}
