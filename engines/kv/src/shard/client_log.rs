//! Logs that remote clients write by themselves.
//!
//! ```text
//! client:  RDMA write of the entry at `offset`, immediate = offset
//! server:  accept(offset): copy the header, check, take a version, store version + seal,
//!          update the index;  commit(): flush, fence;  then the reply
//! ```
//!
//! The client may write any byte of a granted segment at any time. So the server keeps what it
//! relies on elsewhere: where entries start and whose they are ([`SlotRecord`]), slot lengths (in
//! the index), versions (a seal cannot be forged). What a client can spoil is what it wrote.
//!
//! Source: BOOM-KV §3.1 and §3.3.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_os::MemoryObject;
use beeline_os::memory::{copy_across, copy_out};
use beeline_pmem::Segment;

use crate::entry::{CHECKED_FROM, EXPIRES, FIRST_ENTRY, HEADER_BYTES, Header, TOMBSTONE};
use crate::feed::EventKind;
use crate::index::Location;
use crate::segments::{GRANTED, HEAD, OWNER_CLIENT, SegmentState, UNTRUSTED};
use crate::shard::Shard;
use crate::shard::log::Appended;
use crate::stats;
use crate::store::Need;
use crate::{KvError, Version};

/// What the server remembers of an entry in a granted segment.
#[derive(Clone, Copy, Debug)]
struct SlotRecord {
    hash: u64,
    offset: u32,
    /// Flushes of the database so far when the entry was accepted: tells whether the entry still
    /// counts as a copy of its key.
    flush_epoch: u32,
}

/// A slot that a client says it overwrote in place.
#[derive(Clone, Copy, Debug)]
struct Overwritten {
    /// Place among the log's slots.
    at: usize,
    record: SlotRecord,
    slot_bytes: u32,
}

/// The segments granted to one client of one shard; the last one is open.
#[derive(Debug)]
pub struct ClientLog {
    shard: usize,
    head: Option<Arc<SegmentState>>,
    /// Slots of the open segment in order of offset.
    slots: Vec<SlotRecord>,
    tail: u32,
    segments: u64,
}

impl ClientLog {
    /// Where the next append has to go, in bytes from the start of the open segment.
    #[must_use]
    pub fn tail(&self) -> u32 {
        self.tail
    }

    /// The open segment.
    #[must_use]
    pub fn segment(&self) -> Option<&Arc<Segment>> {
        self.head.as_ref().map(|state| &state.segment)
    }

    /// Segments granted so far.
    #[must_use]
    pub fn segments_granted(&self) -> u64 {
        self.segments
    }

    /// The slot that begins at `offset`.
    fn slot_at(&self, offset: u32) -> Option<Overwritten> {
        // Where entries are of one length the place is known; elsewhere a search finds it.
        let bytes = u64::from(self.tail - FIRST_ENTRY).max(1);
        let guess = u64::from(offset.saturating_sub(FIRST_ENTRY)) * self.slots.len() as u64 / bytes;
        let at = match self.slots.get(guess as usize) {
            Some(slot) if slot.offset == offset => guess as usize,
            _ => self.slots.binary_search_by_key(&offset, |slot| slot.offset).ok()?,
        };
        let end = self.slots.get(at + 1).map_or(self.tail, |next| next.offset);
        Some(Overwritten { at, record: self.slots[at], slot_bytes: end - offset })
    }
}

/// What a client announced with its immediate value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Offset of the entry in the open segment.
    pub offset: u32,
}

/// An accepted entry; acknowledge it after [`Shard::commit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Version the entry got.
    pub version: Version,
    /// It took the place of an older entry.
    pub in_place: bool,
    /// The key was there before.
    pub existed: bool,
    /// Length of its slot in bytes.
    pub slot_bytes: u32,
    /// Where the next append has to go.
    pub tail: u32,
    /// Smallest version of the key that is being read (C3); 0 while a snapshot is written, which
    /// may read any.
    pub smallest_version_read: Option<Version>,
}

/// Why an announced entry was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RejectReason {
    /// No segment is granted.
    NoSegment,
    /// The offset is neither the tail nor the start of a slot.
    Offset,
    /// Lengths, flags or database do not make sense there.
    Header,
    /// The entry says that it is a row's head ([`crate::is_row_kind`]).
    Kind,
    /// The checksum does not match.
    Checksum,
    /// The key belongs to another shard.
    WrongShard,
    /// C1: the slot holds the newest version of its key, or another key's entry.
    Newest,
    /// C2: the entry changes the length of the slot.
    SlotLength,
    /// C3: the slot is being read.
    BeingRead,
    /// A snapshot is being taken: append instead.
    Snapshot,
    /// The store could not take it (memory limit, pool failure).
    Store,
}

/// A refused entry; nothing of it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reject {
    /// Why.
    pub reason: RejectReason,
    /// Where the next append has to go.
    pub tail: u32,
}

impl Shard {
    /// A log without a segment for a new client.
    #[must_use]
    pub fn open_client_log(&mut self) -> ClientLog {
        ClientLog {
            shard: self.index,
            head: None,
            slots: Vec::new(),
            tail: FIRST_ENTRY,
            segments: 0,
        }
    }

    /// Grants the client a fresh segment and closes the one before.
    ///
    /// Errors: [`KvError::PoolFull`], the pool's.
    pub fn grant(&mut self, log: &mut ClientLog) -> Result<Arc<Segment>, KvError> {
        assert_eq!(log.shard, self.index, "a client's log stays with its shard");
        self.check_writable()?;
        let fresh = self.allocate_segment(Need::Data, OWNER_CLIENT, GRANTED | UNTRUSTED)?;
        fresh.segment.mark_shared();
        // That the segment is a client's has to be on media before the first overwrite in place,
        // which takes two acknowledged entries: with the next commit, on every kind of pool. As a
        // segment of the store's own, its walk would end at the first torn overwrite.
        self.persister.flush_words_now(&fresh.segment);
        self.retire_head(log);
        let segment = Arc::clone(&fresh.segment);
        log.head = Some(fresh);
        log.segments += 1;
        log.tail = FIRST_ENTRY;
        Ok(segment)
    }

    fn retire_head(&mut self, log: &mut ClientLog) {
        if let Some(head) = log.head.take() {
            head.clear(GRANTED | HEAD);
        }
        self.count_slots(log, log.slots.capacity(), 0);
        log.slots = Vec::new();
    }

    /// Puts the memory of a log's slots, by capacity before and after, into the account.
    fn count_slots(&self, log: &ClientLog, before: usize, after: usize) {
        debug_assert_eq!(log.shard, self.index);
        let bytes = |slots: usize| (slots * size_of::<SlotRecord>()) as u64;
        let more = bytes(after).wrapping_sub(bytes(before));
        stats::add(&self.counters().client_slot_bytes, more);
    }

    /// Ends a client's log: its segments become the collector's.
    pub fn close_client_log(&mut self, mut log: ClientLog) {
        assert_eq!(log.shard, self.index, "a client's log stays with its shard");
        self.retire_head(&mut log);
    }

    /// Takes in the entry that the client says it wrote. [`Shard::commit`] persists it.
    ///
    /// Errors: [`Reject`]; nothing changed then, and the client's unacknowledged write is lost.
    pub fn accept(&mut self, log: &mut ClientLog, notice: Notice) -> Result<Accepted, Reject> {
        self.accept_from(log, notice, None)
    }

    /// As [`Shard::accept`], for an entry that the client wrote to `buffer` at the offset it has in
    /// the segment: it is checked there, and copied once nothing speaks against it. For clients
    /// that cannot reach the segment itself.
    ///
    /// Invariant: `buffer` is as long as the segment.
    pub fn accept_from(
        &mut self,
        log: &mut ClientLog,
        notice: Notice,
        buffer: Option<&dyn MemoryObject>,
    ) -> Result<Accepted, Reject> {
        assert_eq!(log.shard, self.index, "a client's log stays with its shard");
        let outcome = self.accept_checked(log, notice.offset, buffer);
        let counters = self.counters();
        match &outcome {
            Ok(accepted) => {
                stats::add(&counters.entries_accepted, 1);
                stats::add(&counters.entries_in_place, u64::from(accepted.in_place));
            }
            Err(_) => stats::add(&counters.entries_rejected, 1),
        }
        outcome.map_err(|reason| Reject { reason, tail: log.tail })
    }

    fn accept_checked(
        &mut self,
        log: &mut ClientLog,
        offset: u32,
        buffer: Option<&dyn MemoryObject>,
    ) -> Result<Accepted, RejectReason> {
        // Taken out and put back: another handle would cost two atomic operations.
        let state = log.head.take().ok_or(RejectReason::NoSegment)?;
        let outcome = self.accept_in(log, &state, offset, buffer);
        log.head = Some(state);
        outcome
    }

    fn accept_in(
        &mut self,
        log: &mut ClientLog,
        state: &Arc<SegmentState>,
        offset: u32,
        buffer: Option<&dyn MemoryObject>,
    ) -> Result<Accepted, RejectReason> {
        let fits = buffer.is_none_or(|buffer| buffer.length_bytes() == state.length as usize);
        assert!(fits, "a buffer that stands for a segment is as long");
        let overwritten = if offset == log.tail {
            None
        } else {
            Some(log.slot_at(offset).ok_or(RejectReason::Offset)?)
        };
        let room = match &overwritten {
            Some(slot) => slot.slot_bytes,
            None => state.length - offset.min(state.length),
        };
        if room < HEADER_BYTES {
            return Err(RejectReason::Header);
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let validated = match buffer {
            None => validate(state.segment.as_ref(), offset, room, &mut scratch),
            Some(buffer) => validate(buffer, offset, room, &mut scratch),
        };
        let outcome = validated.and_then(|header| {
            let key = &scratch[HEADER_BYTES as usize..][..usize::from(header.key_length)];
            self.take_in(log, state, (offset, overwritten), (&header, key), buffer)
        });
        self.scratch = scratch;
        outcome
    }

    fn take_in(
        &mut self,
        log: &mut ClientLog,
        state: &Arc<SegmentState>,
        (offset, overwritten): (u32, Option<Overwritten>),
        (header, key): (&Header, &[u8]),
        buffer: Option<&dyn MemoryObject>,
    ) -> Result<Accepted, RejectReason> {
        let hash = self.store.place(header.namespace, key);
        if self.store.owner_of(hash) != self.index {
            return Err(RejectReason::WrongShard);
        }
        let flags = Location::UNTRUSTED
            | if header.flags & TOMBSTONE != 0 { Location::TOMBSTONE } else { 0 }
            | if header.flags & EXPIRES != 0 { Location::EXPIRES } else { 0 };
        let location = Location::new(state.id, offset, flags);
        if header.flags & TOMBSTONE == 0 {
            let length = header.value_length as usize;
            self.admit(header.namespace, key.len(), length, &mut 0)
                .map_err(|_| RejectReason::Store)?;
        } else {
            self.check_writable().map_err(|_| RejectReason::Store)?;
        }
        // Only now: making room deletes keys and collects, which moves slots.
        let found = self.find(header.namespace, hash, key);
        let existed = found.is_some_and(|id| {
            let index = self.spaces.get(header.namespace);
            index.is_some_and(|index| !index.slot(id).location.is_absent())
        });
        let epoch = self.store.flush_epochs[header.namespace as usize].load(Ordering::Relaxed);
        let epoch = epoch as u32;
        if let Some(Overwritten { record, slot_bytes, .. }) = overwritten {
            if self.store.snapshots.load(Ordering::Acquire) > 0 {
                return Err(RejectReason::Snapshot);
            }
            let newest =
                found.and_then(|id| Some(self.spaces.get(header.namespace)?.slot(id).location));
            if record.hash != hash || newest.is_some_and(|newest| newest.same_place(location)) {
                return Err(RejectReason::Newest);
            }
            if header.slot_bytes != slot_bytes {
                return Err(RejectReason::SlotLength);
            }
            if self.reads.reads_place(hash, location) {
                return Err(RejectReason::BeingRead);
            }
        }
        self.expiry.note(header.expires_at_ms);
        let version = self.version_for_feed().map_err(|_| RejectReason::Store)?;
        if let Some(buffer) = buffer {
            // Plausible, hence inside both. A client that changes its buffer meanwhile damages the
            // entry it announced, as one that can write the segment may do at any time.
            let (at, length) = (offset as usize, header.used_bytes() as usize);
            copy_across((buffer, at), (state.segment.as_ref(), at), length);
            state.segment.stored(at, length);
        }
        let sealed = Header { version, ..*header };
        let seal = self.store.sealer.seal(state.id, state.generation, offset, &sealed);
        state.segment.store_u64(offset as usize, version);
        state.segment.store_u64(offset as usize + 8, seal);
        let record = SlotRecord { hash, offset, flush_epoch: epoch };
        let leaves_stale = match overwritten {
            None => {
                log.tail = offset + header.slot_bytes;
                let capacity = log.slots.capacity();
                log.slots.push(record);
                if log.slots.capacity() != capacity {
                    self.count_slots(log, capacity, log.slots.capacity());
                }
                state.tail.store(log.tail, Ordering::Release);
                // Counted by this shard alone while the client holds the segment.
                state.count.store(state.count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                true
            }
            Some(Overwritten { at, record: old, .. }) => {
                log.slots[at] = record;
                // The copy that was overwritten counted as stale unless a flush killed it before;
                // then the former newest becomes one more.
                old.flush_epoch != epoch
            }
        };
        if let Some(id) = found
            && self.spaces.has_extra()
            && let Some(before) = self.spaces.get(header.namespace).map(|index| *index.slot(id))
        {
            self.note_row(header.namespace, before, location, key);
        }
        self.log.note(state, offset, header.used_bytes() as u32);
        if let Some(pending) = &mut self.pending {
            pending.note(hash, header.namespace, key);
        }
        let appended = Appended { version, location, slot_bytes: header.slot_bytes };
        self.install_at(header.namespace, hash, found, &appended, leaves_stale);
        let kind = if header.flags & TOMBSTONE == 0 {
            let (kind, value_length) = (header.kind, header.value_length);
            EventKind::Put { kind, value_length, expires_at_ms: header.expires_at_ms }
        } else {
            EventKind::Delete
        };
        self.feed_note(version, header.namespace, key, kind);
        Ok(Accepted {
            version,
            in_place: overwritten.is_some(),
            existed,
            slot_bytes: header.slot_bytes,
            tail: log.tail,
            smallest_version_read: if self.store.snapshots.load(Ordering::Acquire) > 0 {
                // The snapshot may read any version: an overwrite in place would be refused, but
                // too late for the bytes.
                Some(0)
            } else {
                self.reads.smallest(hash)
            },
        })
    }
}

/// Bytes of key and value checked in one go.
const WHOLE_BYTES: usize = 4096;

/// Checks a private copy of the entry at `offset`; leaves its header and then its key at the start
/// of `copy`.
fn validate(
    source: &(impl MemoryObject + ?Sized),
    offset: u32,
    room: u32,
    copy: &mut Vec<u8>,
) -> Result<Header, RejectReason> {
    let mut head = [0; HEADER_BYTES as usize];
    copy_out(source, offset as usize, &mut head);
    let header = Header::decode(&head);
    let known = header.is_for_clients() && head[44..] == [0; 4];
    if !known || header.slot_bytes < HEADER_BYTES || !header.is_plausible(u64::from(room)) {
        return Err(RejectReason::Header);
    }
    let mut at = (offset + HEADER_BYTES) as usize;
    let key_length = usize::from(header.key_length);
    let mut left = key_length + header.value_length as usize;
    let whole = left.min(WHOLE_BYTES.max(key_length));
    // Not cleared before: what is there already need not be zeroed.
    copy.resize(head.len() + whole, 0);
    copy[..head.len()].copy_from_slice(&head);
    copy_out(source, at, &mut copy[head.len()..]);
    let mut crc = beeline_wire::crc32c(&copy[CHECKED_FROM..]);
    (at, left) = (at + whole, left - whole);
    if left > 0 {
        let mut buffer = [0; WHOLE_BYTES];
        while left > 0 {
            let part = left.min(buffer.len());
            copy_out(source, at, &mut buffer[..part]);
            crc = beeline_wire::crc32c_append(crc, &buffer[..part]);
            (at, left) = (at + part, left - part);
        }
    }
    if crc != header.checksum {
        return Err(RejectReason::Checksum);
    }
    if crate::is_row_kind(header.kind) { Err(RejectReason::Kind) } else { Ok(header) }
}
