//! What requests do: the three protocols against the shard.
//!
//! Every function here answers `false` when the client broke the protocol in a way that an honest
//! one cannot; the connection then ends. What an honest client may run into is a reply.

use std::fmt::Write;

use beeline_kv::entry::{FIRST_ENTRY, TOMBSTONE};
use beeline_kv::wire::{
    Announcement, NOTHING_READING, Place, Protocol, REQUEST_HEADER_BYTES, Reply, ReplyStatus,
    Request, RequestKind, SCAN_HEADER_BYTES, ScanHeader, push_scan_record,
};
use beeline_kv::{EntryRef, KvError, Notice, PutOptions, ReadGuard, Reject, RejectReason, Shard};
use beeline_os::MemoryObject;
use beeline_os::memory::{copy_across, copy_in, copy_out};

use crate::connection::{Connection, Grant, Pending, Source};
use crate::early::Early;
use crate::server::ShardServer;

/// Keys asked of the index at a time while a scan page fills.
const SCAN_STEP: usize = 32;

fn reply(connection: &mut Connection, reply: Reply) {
    connection.pending.push_back(Pending::Message { reply, after_write: false });
}

fn answer(connection: &mut Connection, status: ReplyStatus, tag: u16) {
    reply(connection, Reply::new(status, tag));
}

fn status_of(error: &KvError) -> ReplyStatus {
    match error {
        KvError::PoolFull { .. } | KvError::MemoryLimit { .. } | KvError::NamespaceFull { .. } => {
            ReplyStatus::PoolFull
        }
        KvError::KeyTooLong { .. } | KvError::ValueTooLong { .. } => ReplyStatus::TooLarge,
        KvError::Damaged { .. } => ReplyStatus::Damaged,
        KvError::Database { .. } => ReplyStatus::Malformed,
        _ => ReplyStatus::Unavailable,
    }
}

fn status_of_reject(reason: RejectReason) -> ReplyStatus {
    match reason {
        RejectReason::NoSegment => ReplyStatus::StaleGrant,
        RejectReason::WrongShard => ReplyStatus::WrongShard,
        RejectReason::Store => ReplyStatus::PoolFull,
        RejectReason::Kind => ReplyStatus::ReservedKind,
        _ => ReplyStatus::Rejected,
    }
}

impl ShardServer {
    /// A message of `length` bytes lies in receive `index`.
    pub(crate) fn message(
        &mut self,
        shard: &mut Shard,
        connection: &mut Connection,
        index: u32,
        length: u64,
    ) -> bool {
        if length > u64::from(connection.request_bytes) {
            return false;
        }
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.resize(length as usize, 0);
        let offset = index as usize * connection.request_bytes as usize;
        copy_out(connection.receives.memory().as_ref(), offset, &mut bytes);
        let understood = self.request_in(shard, connection, &bytes);
        self.scratch = bytes;
        understood
    }

    /// A request that was decoded ahead.
    pub(crate) fn message_early(
        &mut self,
        shard: &mut Shard,
        connection: &mut Connection,
        early: &Early,
    ) -> bool {
        let (request, bytes) = (early.request(), early.bytes());
        let Some(key) = request.key(bytes) else { return false };
        self.request(shard, connection, request, (key, early.hash()), bytes)
    }

    /// A write with `immediate` was placed.
    pub(crate) fn announced(
        &mut self,
        shard: &mut Shard,
        connection: &mut Connection,
        immediate: u32,
        length: u64,
    ) -> bool {
        match connection.protocol {
            Protocol::Boom | Protocol::TwoPhase => {
                self.entry(shard, connection, immediate, length);
                true
            }
            Protocol::Oblivious | Protocol::Replicated => {
                self.request_slot(shard, connection, immediate, length)
            }
        }
    }

    /// A request lies in slot `slot` of the request area.
    fn request_slot(
        &mut self,
        shard: &mut Shard,
        connection: &mut Connection,
        slot: u32,
        length: u64,
    ) -> bool {
        let Some(area) = &connection.area else { return false };
        if slot >= u32::from(connection.window) || length > u64::from(connection.slot_bytes) {
            return false;
        }
        // The client can write the area at any time: what is parsed is a private copy.
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.resize(length as usize, 0);
        let offset = slot as usize * connection.slot_bytes as usize;
        copy_out(area.memory().as_ref(), offset, &mut bytes);
        let understood = self.request_in(shard, connection, &bytes);
        self.scratch = bytes;
        understood
    }

    fn request_in(&mut self, shard: &mut Shard, connection: &mut Connection, bytes: &[u8]) -> bool {
        let Some(request) = Request::decode(bytes) else { return false };
        let Some(key) = request.key(bytes) else { return false };
        if request.kind == RequestKind::Get {
            connection.expect_result(&request);
        }
        let hash = shard.store().place_key(request.database, key);
        self.request(shard, connection, &request, (key, hash), bytes)
    }

    /// `key` comes with its hash.
    fn request(
        &mut self,
        shard: &mut Shard,
        connection: &mut Connection,
        request: &Request,
        key: (&[u8], u64),
        bytes: &[u8],
    ) -> bool {
        self.counters.requests[request.kind as usize] += 1;
        let two_phase = connection.protocol == Protocol::TwoPhase;
        if two_phase {
            Self::end_leases(shard, connection, request.released);
        }
        if let Some(understood) = self.put_in_line(shard, connection, request, key.1, bytes) {
            return understood;
        }
        let tag = request.tag;
        match request.kind {
            RequestKind::Ping => answer(connection, ReplyStatus::Ok, tag),
            RequestKind::Grant if connection.protocol == Protocol::Boom => {
                self.grant(shard, connection, tag);
            }
            RequestKind::Get | RequestKind::VerifiedGet => {
                self.get(shard, connection, request, key);
            }
            RequestKind::Scan => self.scan(shard, connection, request),
            RequestKind::Stats => self.statistics(shard, connection, request),
            RequestKind::Allocate if two_phase => {
                self.allocate(shard, connection, request.argument, tag);
            }
            RequestKind::Locate if two_phase => self.locate(shard, connection, request, key),
            RequestKind::Put | RequestKind::Delete
                if connection.protocol == Protocol::Oblivious =>
            {
                return Self::put(shard, connection, request, key.0, bytes);
            }
            _ => return false,
        }
        true
    }

    // ---- BOOM ----

    /// An entry was announced in the granted segment (BOOM §3.1 step 3).
    fn entry(
        &mut self,
        shard: &mut Shard,
        connection: &mut Connection,
        immediate: u32,
        length: u64,
    ) {
        let announcement = Announcement::decode(immediate);
        self.counters.announcements += 1;
        connection.active_ns = self.now_ns;
        connection.promised = connection.promised.saturating_sub(1);
        let outcome = match (&connection.grant, &mut connection.log) {
            (Some(grant), Some(log)) if grant.number == announcement.grant => {
                // An append that claims to be an overwrite, or the reverse, is caught by offset.
                let appends = announcement.offset == log.tail();
                if appends == announcement.in_place {
                    Err(Reject { reason: RejectReason::Offset, tail: log.tail() })
                } else {
                    let notice = Notice { offset: announcement.offset };
                    let buffer = grant.is_copied.then(|| grant.region.memory().as_ref());
                    if buffer.is_some() {
                        self.counters.copied_bytes += length;
                    }
                    shard.accept_from(log, notice, buffer)
                }
            }
            _ => Err(Reject { reason: RejectReason::NoSegment, tail: 0 }),
        };
        let tag = Announcement::tag(immediate);
        let reply = match outcome {
            Ok(accepted) => {
                // Of interest after a deletion; a put of a fresh key is `Ok` all the same.
                let status = if accepted.existed { ReplyStatus::Ok } else { ReplyStatus::NotFound };
                Reply {
                    version: accepted.version,
                    minimum_reading: accepted.smallest_version_read.unwrap_or(NOTHING_READING),
                    grant: announcement.grant,
                    ..Reply::new(status, tag)
                }
            }
            Err(reject) => {
                self.counters.rejected += 1;
                let status = status_of_reject(reject.reason);
                Reply { grant: announcement.grant, ..Reply::new(status, tag) }
            }
        };
        connection.pending.push_back(Pending::Message { reply, after_write: true });
        self.give_space(shard, connection);
    }

    /// The metadata request: a segment for the client to write (BOOM §3.1 step 1).
    fn grant(&mut self, shard: &mut Shard, connection: &mut Connection, tag: u16) {
        connection.active_ns = self.now_ns;
        let granted = self.fresh_grant(shard, connection).map(|grant| Reply {
            grant: grant.number,
            length: grant.length,
            place: Some(Place { key: grant.region.remote_key().0, offset: 0 }),
            ..Reply::new(ReplyStatus::Ok, tag)
        });
        match granted {
            Ok(granted) => reply(connection, granted),
            Err(status) => answer(connection, status, tag),
        }
    }

    /// A segment without entries, granted to the client; the one before is closed. A client that
    /// asks again without having written anything gets the same one, so asking is free of harm.
    fn fresh_grant<'a>(
        &mut self,
        shard: &mut Shard,
        connection: &'a mut Connection,
    ) -> Result<&'a Grant, ReplyStatus> {
        let log = connection.log.get_or_insert_with(|| shard.open_client_log());
        let untouched = connection.grant.is_some() && log.tail() == FIRST_ENTRY;
        if !untouched {
            let segment = shard.grant(log).map_err(|error| status_of(&error))?;
            let length = segment.length_bytes() as u32;
            let before = connection.grant.take();
            let (region, is_copied) = self.grantable(before, segment).map_err(|error| {
                tracing::warn!(%error, "a log segment could not be registered");
                ReplyStatus::Unavailable
            })?;
            let number = connection.next_grant;
            connection.next_grant = (number + 1) % Announcement::GRANTS;
            // The old segment's key dies with its registration. A client that has the memory
            // mapped could go on writing there; the collector trusts nothing in it.
            connection.grant = Some(Grant { number, region, length, is_copied });
            self.counters.grants += 1;
        }
        connection.grant.as_ref().ok_or(ReplyStatus::Unavailable)
    }

    /// Looks a key up and prepares to send its entry (BOOM §3.2).
    pub(crate) fn get(
        &mut self,
        shard: &mut Shard,
        connection: &mut Connection,
        request: &Request,
        (key, hash): (&[u8], u64),
    ) {
        let tag = request.tag;
        let entry = match shard.lookup_at(request.database, hash, key) {
            Ok(Some(entry)) => entry,
            Ok(None) => {
                let ours = shard.store().owner_of(hash) == shard.index();
                let status = if ours { ReplyStatus::NotFound } else { ReplyStatus::WrongShard };
                return answer(connection, status, tag);
            }
            Err(error) => return answer(connection, status_of(&error), tag),
        };
        if request.kind == RequestKind::VerifiedGet
            && let Err(error) = shard.with_value(&entry, |_| ())
        {
            return answer(connection, status_of(&error), tag);
        }
        match self.begin(shard, &entry, request.result_bytes) {
            Err((status, needed)) => {
                reply(connection, Reply { version: needed, ..Reply::new(status, tag) });
            }
            Ok(guard) if connection.protocol == Protocol::Oblivious => {
                self.copy_entry(shard, connection, guard, request);
            }
            Ok(guard) => match self.source(shard, &guard) {
                Ok(from) => {
                    let place = request.result;
                    connection.pending.push_back(Pending::Entry { guard, place, tag, from });
                    if from == Source::NoBufferYet {
                        self.stage(shard, connection);
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "a log segment could not be registered");
                    shard.end_read(guard);
                    answer(connection, ReplyStatus::Unavailable, tag);
                }
            },
        }
    }

    /// Pins the entry if it fits the result buffer.
    fn begin(
        &mut self,
        shard: &mut Shard,
        entry: &EntryRef,
        room: u32,
    ) -> Result<ReadGuard, (ReplyStatus, u64)> {
        let guard = shard.begin_read(entry).map_err(|error| (status_of(&error), 0))?;
        let length = guard.length_bytes();
        if length > room {
            shard.end_read(guard);
            return Err((ReplyStatus::BufferTooSmall, u64::from(length)));
        }
        Ok(guard)
    }

    // ---- NVM-oblivious baseline ----

    fn put(
        shard: &mut Shard,
        connection: &mut Connection,
        request: &Request,
        key: &[u8],
        bytes: &[u8],
    ) -> bool {
        let value = &bytes[REQUEST_HEADER_BYTES + key.len()..];
        if request.argument != value.len() as u64 {
            return false;
        }
        let deletes = request.kind == RequestKind::Delete;
        let outcome = if !deletes && beeline_kv::is_row_kind(request.result_bytes as u8) {
            Ok(Err(ReplyStatus::ReservedKind))
        } else if shard.store().shard_of(request.database, key) != shard.index() {
            Ok(Err(ReplyStatus::WrongShard))
        } else if deletes {
            shard
                .delete(request.database, key)
                .map(|existed| if existed { Ok(0) } else { Err(ReplyStatus::NotFound) })
        } else {
            let kind = request.result_bytes as u8;
            let options = PutOptions { kind, expires_at_ms: request.extra };
            shard.put(request.database, key, &[value], options).map(Ok)
        };
        let reply = match outcome {
            Ok(Ok(version)) => Reply { version, ..Reply::new(ReplyStatus::Ok, request.tag) },
            Ok(Err(status)) => Reply::new(status, request.tag),
            Err(error) => Reply::new(status_of(&error), request.tag),
        };
        connection.pending.push_back(Pending::Message { reply, after_write: true });
        true
    }

    /// Copies the entry to a DRAM buffer and prepares to send that.
    fn copy_entry(
        &mut self,
        shard: &mut Shard,
        connection: &mut Connection,
        guard: ReadGuard,
        request: &Request,
    ) {
        let length = guard.length_bytes();
        match self.staging(connection, length, false) {
            Some(buffer) => {
                let target = connection.staging[buffer].region.memory();
                let segment: &dyn MemoryObject = shard.segment_read(&guard).as_ref();
                copy_across(
                    (segment, guard.offset() as usize),
                    (target.as_ref(), 0),
                    length as usize,
                );
                let (place, tag) = (request.result, request.tag);
                connection.pending.push_back(Pending::Staged { buffer, length, place, tag });
            }
            None => answer(connection, ReplyStatus::Unavailable, request.tag),
        }
        shard.end_read(guard);
    }

    // ---- two-phase baseline ----

    /// Phase 1 of a put: promises space at the end of the client's log.
    fn allocate(&mut self, shard: &mut Shard, connection: &mut Connection, bytes: u64, tag: u16) {
        let limit = shard.store().pool().segment_bytes() - FIRST_ENTRY;
        match u32::try_from(bytes) {
            Ok(bytes) if bytes <= limit && bytes.is_multiple_of(16) && bytes > 0 => {
                connection.pending.push_back(Pending::Space { bytes, tag });
                self.give_space(shard, connection);
            }
            _ => answer(connection, ReplyStatus::TooLarge, tag),
        }
    }

    /// Turns promises of space that can be kept now into replies. A new segment begins only when
    /// all entries promised in the old one were announced.
    fn give_space(&mut self, shard: &mut Shard, connection: &mut Connection) {
        if connection.protocol != Protocol::TwoPhase {
            return;
        }
        for at in 0..connection.pending.len() {
            let Pending::Space { bytes, tag } = connection.pending[at] else { continue };
            let tail = connection.log.as_ref().map_or(0, |log| log.tail());
            if connection.promised == 0 {
                connection.promised_tail = tail;
            }
            let length = connection.grant.as_ref().map_or(0, |grant| grant.length);
            let fits = connection.promised_tail.saturating_add(bytes) <= length
                && connection.grant.is_some();
            let reply = if fits {
                Ok(())
            } else if connection.promised > 0 {
                return;
            } else {
                let granted = self.fresh_grant(shard, connection).map(|_| ());
                connection.promised_tail = FIRST_ENTRY;
                granted
            };
            let reply = match (reply, connection.grant.as_ref()) {
                (Ok(()), Some(grant)) => {
                    let offset = connection.promised_tail;
                    connection.promised_tail += bytes;
                    connection.promised += 1;
                    Reply {
                        grant: grant.number,
                        length: bytes,
                        version: u64::from(offset),
                        place: Some(Place {
                            key: grant.region.remote_key().0,
                            offset: u64::from(offset),
                        }),
                        ..Reply::new(ReplyStatus::Ok, tag)
                    }
                }
                (Err(status), _) => Reply::new(status, tag),
                (Ok(()), None) => Reply::new(ReplyStatus::Unavailable, tag),
            };
            connection.pending[at] = Pending::Message { reply, after_write: false };
        }
    }

    /// Phase 1 of a get: where the entry lies. It stays there until the client says it has read
    /// it, or twice a window of later ones were located.
    fn locate(
        &mut self,
        shard: &mut Shard,
        connection: &mut Connection,
        request: &Request,
        (key, hash): (&[u8], u64),
    ) {
        let tag = request.tag;
        let entry = match shard.lookup_at(request.database, hash, key) {
            Ok(Some(entry)) => entry,
            Ok(None) => return answer(connection, ReplyStatus::NotFound, tag),
            Err(error) => return answer(connection, status_of(&error), tag),
        };
        let guard = match self.begin(shard, &entry, u32::MAX) {
            Ok(guard) => guard,
            Err((status, _)) => return answer(connection, status, tag),
        };
        let place = match self.readable.of(&self.domain, shard.segment_read(&guard)) {
            Ok(region) => Place { key: region.remote_key().0, offset: u64::from(guard.offset()) },
            Err(error) => {
                tracing::warn!(%error, "a log segment could not be registered for reading");
                shard.end_read(guard);
                return answer(connection, ReplyStatus::Unavailable, tag);
            }
        };
        let located = Reply {
            length: guard.length_bytes(),
            place: Some(place),
            ..Reply::new(ReplyStatus::Ok, tag)
        };
        connection.leases.push_back(guard);
        if connection.leases.len() > 2 * usize::from(connection.window)
            && let Some(oldest) = connection.leases.pop_front()
        {
            connection.released = connection.released.wrapping_add(1);
            shard.end_read(oldest);
        }
        reply(connection, located);
    }

    fn end_leases(shard: &mut Shard, connection: &mut Connection, released: u16) {
        let finished = released.wrapping_sub(connection.released);
        // A count that runs backwards is no count: leases then end with the window.
        if finished > u16::MAX / 2 {
            return;
        }
        for _ in 0..finished {
            let Some(guard) = connection.leases.pop_front() else { break };
            connection.released = connection.released.wrapping_add(1);
            shard.end_read(guard);
        }
    }

    // ---- all protocols ----

    pub(crate) fn scan(
        &mut self,
        shard: &mut Shard,
        connection: &mut Connection,
        request: &Request,
    ) {
        let page = self.options.scan_page_bytes as usize;
        let wanted = usize::try_from(request.extra).unwrap_or(usize::MAX).max(1);
        let mut result = vec![0; SCAN_HEADER_BYTES];
        let mut count = 0_u32;
        let mut next = request.argument;
        loop {
            let step = wanted.saturating_sub(count as usize).clamp(1, SCAN_STEP);
            let scanned = shard.scan(request.database, next, step, |key, kind| {
                push_scan_record(&mut result, key, kind);
                count += 1;
            });
            match scanned {
                Err(error) => return answer(connection, status_of(&error), request.tag),
                Ok(None) => {
                    next = 0;
                    break;
                }
                Ok(Some(position)) => next = position,
            }
            if count as usize >= wanted || result.len() >= page {
                break;
            }
        }
        let length = (result.len() - SCAN_HEADER_BYTES) as u32;
        result[..SCAN_HEADER_BYTES].copy_from_slice(&ScanHeader { next, count, length }.encode());
        self.send_copy(connection, request, &result);
    }

    fn statistics(&mut self, shard: &mut Shard, connection: &mut Connection, request: &Request) {
        let mut text = String::new();
        let (store, own, mine) = (shard.store().stats(), shard.stats(), &self.counters);
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "shard {}\nkeys {}\nused_bytes {}\ncapacity_bytes {}\nversion {}\nclients {}\n\
             announcements {}\nrejected {}\ngrants {}\nreclaimed {}\ngets {}\nsends {}\nwrites {}",
            shard.index(),
            own.keys,
            store.used_bytes,
            store.capacity_bytes,
            store.version,
            self.clients() + 1,
            mine.announcements,
            mine.rejected,
            mine.grants,
            mine.reclaimed,
            mine.of(RequestKind::Get),
            mine.sends,
            mine.writes,
        );
        self.send_copy(connection, request, text.as_bytes());
    }

    /// Prepares to send bytes that are not an entry.
    fn send_copy(&mut self, connection: &mut Connection, request: &Request, bytes: &[u8]) {
        let (place, tag) = (request.result, request.tag);
        let length = bytes.len() as u32;
        if length > request.result_bytes {
            let version = u64::from(length);
            let too_small = Reply { version, ..Reply::new(ReplyStatus::BufferTooSmall, tag) };
            return reply(connection, too_small);
        }
        match self.staging(connection, length, false) {
            Some(buffer) => {
                copy_in(connection.staging[buffer].region.memory().as_ref(), 0, bytes);
                connection.pending.push_back(Pending::Staged { buffer, length, place, tag });
            }
            None => answer(connection, ReplyStatus::Unavailable, tag),
        }
    }
}

const _: () = assert!(TOMBSTONE == 1, "deletions are entries");
