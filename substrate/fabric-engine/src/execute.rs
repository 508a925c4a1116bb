//! The target's half: reading frames and executing what they ask.
//!
//! Small frames are received into a buffer and executed from there. The payload of a large one
//! goes from the stream straight to its place: first what the buffer happens to hold, then by
//! scatter receives whose first part is the region and whose second is the buffer, so that the
//! next header arrives in the same call. A payload is checked against key, domain, rights and
//! range at its header, and every piece of it again against revocation ([`crate::region`]).

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

use beeline_fabric::{Access, FlushKind, Opcode, RemoteAddress, RemoteKey, Status, WorkCompletion};
use beeline_os::memory;
use beeline_os::moving::Storing;
use beeline_os::words::copy_words;

use crate::clock;
use crate::engine::{End, Engine, MAX_GRANTS, Receives, Request};
use crate::frame::{Decoder, Frame, HEADER_BYTES, Message, WaitReason};
use crate::receive_queue::PostedReceive;
use crate::region::{Entry, Range, UseGuard};
use crate::stream::{Moved, part};
use crate::transmit::{MAX_RESPONSES, Response};

/// What a region that peers may reach at all has one of.
const REACHABLE: Access =
    Access::REMOTE_READ.union(Access::REMOTE_WRITE).union(Access::REMOTE_ATOMIC);
/// Bytes of the receive buffer.
const BUFFER_BYTES: usize = 16 * 1024;
/// From this much missing payload on, it is received in place.
const DIRECT_BYTES: usize = 2048;
/// Most bytes of one receive in place, and so of one use guard.
const PIECE_BYTES: usize = 1 << 20;
/// How far ahead of the expected request a dropped one may be numbered.
const DROP_WINDOW: u32 = 1 << 20;

/// Where a payload goes.
#[derive(Debug)]
enum Place {
    /// Where the peer's request says: each piece needs leave.
    Remote {
        entry: Arc<Entry>,
        offset: usize,
    },
    /// Where a receive or a read of this process says.
    Local {
        entry: Arc<Entry>,
        offset: usize,
    },
    Nowhere,
}

impl Place {
    /// The region and the offset in it.
    fn region(&self) -> Option<(&Entry, usize)> {
        match self {
            Self::Remote { entry, offset } | Self::Local { entry, offset } => {
                Some((entry, *offset))
            }
            Self::Nowhere => None,
        }
    }

    /// Leave for one piece. `Err` once the region is taken away from the peer.
    fn enter(&self) -> Result<Leave<'_>, ()> {
        Ok(match self {
            Self::Remote { entry, .. } => {
                let of_peer = entry.enter().ok_or(())?;
                Leave { _of_peer: Some(of_peer), _storing: Some(entry.storing()) }
            }
            Self::Local { entry, .. } => Leave { _of_peer: None, _storing: Some(entry.storing()) },
            Self::Nowhere => Leave { _of_peer: None, _storing: None },
        })
    }
}

/// Held for one piece.
struct Leave<'a> {
    _storing: Option<Storing>,
    _of_peer: Option<UseGuard<'a>>,
}

/// A payload being read.
#[derive(Debug)]
struct Payload {
    frame: Frame,
    place: Place,
    done: u64,
}

impl Payload {
    fn remaining(&self) -> u64 {
        self.frame.message.payload_bytes() - self.done
    }
}

/// The incoming byte stream.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    decoder: Decoder,
    payload: Option<Payload>,
}

impl Reader {
    /// True when no part of a frame has been read.
    pub(crate) fn is_between_frames(&self) -> bool {
        self.payload.is_none() && self.start == self.end
    }

    /// The buffer, for dropping what arrives.
    pub(crate) fn scratch(&mut self) -> &mut [u8] {
        self.start = 0;
        self.end = 0;
        self.allocate();
        &mut self.buffer
    }

    fn allocate(&mut self) {
        if self.buffer.is_empty() {
            self.buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        }
    }

    /// Makes the rest of the buffer as long as can be.
    fn compact(&mut self) {
        self.allocate();
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        } else if self.buffer.len() - self.end < HEADER_BYTES {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
    }
}

impl Engine {
    /// Receives and executes until the stream is empty (`Ok(false)`) or the budget is used
    /// (`Ok(true)`).
    pub(crate) fn receive(&mut self, budget_bytes: usize, sleep: bool) -> Result<bool, End> {
        let mut spent = 0;
        let mut sleep = sleep;
        loop {
            self.execute_buffered()?;
            if spent >= budget_bytes {
                return Ok(true);
            }
            let (moved, wanted) = self.receive_once(sleep)?;
            sleep = false;
            match moved {
                Moved::Bytes(bytes) => {
                    spent += bytes;
                    self.progress_ns = clock::coarse_ns();
                    if bytes < wanted {
                        // The stream had no more; asking again would cost a call to hear so.
                        self.execute_buffered()?;
                        return Ok(false);
                    }
                }
                Moved::Later => return Ok(false),
                Moved::Closed => return Err(End::Gone("the peer closed the connection")),
            }
        }
    }

    /// One receive. Returns what it came to and how many bytes it could have taken.
    fn receive_once(&mut self, sleep: bool) -> Result<(Moved, usize), End> {
        self.reader.compact();
        let Some(stream) = &mut self.stream else { return Err(End::Gone("no connection")) };
        let Reader { buffer, start, end, payload, .. } = &mut self.reader;
        if let Some(payload) = payload
            && payload.remaining() >= DIRECT_BYTES as u64
            && let Some((entry, offset)) = payload.place.region()
        {
            // Bytes of a word that is not complete wait in the buffer; the rest of it goes there
            // too, then whole words to their place, then what is left behind the first.
            let held = *end - *start;
            let at = offset + payload.done as usize;
            let missing = if held == 0 { 0 } else { (8 - (at + held) % 8) % 8 };
            let length = whole_words(
                at + held + missing,
                stream.available().saturating_sub(missing),
                payload.remaining() - (held + missing) as u64,
            );
            let room = buffer.len().saturating_sub(*end + missing);
            if length >= DIRECT_BYTES && room > 0 {
                let _leave = payload.place.enter().map_err(|()| revoked(&payload.frame))?;
                let tail = &mut buffer[*end..];
                let head = part(tail.as_mut_ptr(), missing);
                let target = part(entry.pointer(at + held + missing), length);
                let word_at = entry.pointer(at);
                let spare = part(tail[missing..].as_mut_ptr(), room);
                let mut parts = [head, target, spare];
                // SAFETY: the target lies in a range checked at the frame's header, held by
                // `entry` and entered by the guard; head and spare are the tail of the owned
                // buffer. No reference to either is used during the call.
                let moved = unsafe { stream.receive(&mut parts, false) };
                if let Moved::Bytes(bytes) = moved {
                    let placed = bytes.saturating_sub(missing).min(length);
                    if bytes >= missing && held > 0 {
                        let word = &buffer[*start..*start + held + missing];
                        // SAFETY: as for the target, which begins where these bytes end.
                        unsafe { copy_words(word.as_ptr(), word_at, word.len()) };
                        *start += word.len();
                        *end = *start;
                        payload.done += (held + missing) as u64;
                    } else {
                        *end += bytes.min(missing);
                    }
                    payload.done += placed as u64;
                    *end += bytes.saturating_sub(missing + length);
                }
                return Ok((moved, missing + length + room));
            }
        }
        let spare = &mut buffer[*end..];
        let spare_length = spare.len();
        let mut parts = [part(spare.as_mut_ptr(), spare_length)];
        // SAFETY: the tail of the owned buffer, reached through nothing else during the call.
        let moved = unsafe { stream.receive(&mut parts, sleep) };
        if let Moved::Bytes(bytes) = moved {
            *end += bytes;
        }
        Ok((moved, spare_length))
    }

    /// Executes every whole frame of the buffer, and places what there is of a partial one.
    fn execute_buffered(&mut self) -> Result<(), End> {
        loop {
            if self.reader.payload.is_some() {
                self.place_buffered()?;
                match &self.reader.payload {
                    Some(payload) if payload.remaining() > 0 => return Ok(()),
                    _ => {}
                }
                if let Some(payload) = self.reader.payload.take() {
                    self.placed(payload)?;
                }
                continue;
            }
            let reader = &mut self.reader;
            let waiting = &reader.buffer[reader.start..reader.end];
            let Some(header) = waiting.first_chunk::<HEADER_BYTES>() else { return Ok(()) };
            let frame = reader.decoder.next(header).map_err(|error| {
                tracing::debug!(%error, "damaged frame");
                End::Hostile("a damaged frame")
            })?;
            reader.start += HEADER_BYTES;
            self.acknowledge_through(frame.acknowledged)?;
            self.begin(frame)?;
        }
    }

    /// Copies payload bytes that are in the buffer to their place.
    fn place_buffered(&mut self) -> Result<(), End> {
        let Reader { buffer, start, end, payload, .. } = &mut self.reader;
        let Some(payload) = payload else { return Ok(()) };
        let here = payload.remaining().min((*end - *start) as u64) as usize;
        let count = match payload.place.region() {
            Some((_, offset)) => {
                whole_words(offset + payload.done as usize, here, payload.remaining())
            }
            None => here,
        };
        if count == 0 {
            return Ok(());
        }
        if let Some((entry, offset)) = payload.place.region() {
            let _leave = payload.place.enter().map_err(|()| revoked(&payload.frame))?;
            let bytes = &buffer[*start..*start + count];
            let target = entry.pointer(offset + payload.done as usize);
            // SAFETY: the range was checked at the frame's header and is held by `entry`; the
            // buffer is this engine's own.
            unsafe { copy_words(bytes.as_ptr(), target, count) };
        }
        payload.done += count as u64;
        *start += count;
        Ok(())
    }

    /// A header arrived: decides where its payload goes, or executes it when it has none.
    fn begin(&mut self, frame: Frame) -> Result<(), End> {
        if !frame.message.is_request() {
            return self.begin_answer(frame);
        }
        if frame.request != self.expected_request {
            let ahead = frame.request.wrapping_sub(self.expected_request);
            if self.dropping.is_none() || ahead > DROP_WINDOW {
                return Err(End::Hostile("a request out of order"));
            }
            return self.expect_payload(frame, Place::Nowhere);
        }
        if self.dropping.is_some() && !self.resumed {
            return Err(End::Hostile("a request sent again before it was asked for"));
        }
        let mut place = self.write_place(&frame)?;
        if let Some(reason) = self.obstacle(&frame) {
            self.dropping = Some(reason);
            self.resumed = false;
            let request = frame.request;
            self.transmitter.responses.push_back(Response::Wait { request, reason });
            if reason == WaitReason::Moved {
                // Nothing to wait for: the bytes may come again at once.
                self.transmitter.responses.push_back(Response::Resume { request });
                self.resumed = true;
            }
            return self.expect_payload(frame, Place::Nowhere);
        }
        self.dropping = None;
        if let Message::Send { length, .. } = frame.message {
            place = self.send_place(frame.request, length)?;
        }
        self.expect_payload(frame, place)
    }

    fn expect_payload(&mut self, frame: Frame, place: Place) -> Result<(), End> {
        let payload = Payload { frame, place, done: 0 };
        if payload.remaining() > 0 {
            self.reader.payload = Some(payload);
            Ok(())
        } else {
            self.placed(payload)
        }
    }

    /// Why this request cannot be executed now, if so. Takes the receive it needs.
    fn obstacle(&mut self, frame: &Frame) -> Option<WaitReason> {
        if self.transmitter.responses.len() >= MAX_RESPONSES {
            return Some(WaitReason::Busy);
        }
        let changes = match frame.message {
            Message::Write { remote, length, .. } => Some((remote, length)),
            Message::Placed { remote, length, at } => {
                let entry = self.regions.find(remote.key);
                if entry.is_none_or(|entry| self.placement(&entry) != Some(at)) {
                    return Some(WaitReason::Moved);
                }
                Some((remote, length))
            }
            Message::CompareAndSwap { remote, .. } | Message::FetchAndAdd { remote, .. } => {
                Some((remote, 8))
            }
            _ => None,
        };
        if let Some((remote, length)) = changes
            && self.transmitter.has_pending_reads()
            && let Some(entry) = self.regions.find(remote.key)
            && self.transmitter.is_reading(&entry, remote.offset, length)
        {
            return Some(WaitReason::Busy);
        }
        if let Message::Flush { remote, length, kind: FlushKind::Persistent } = frame.message
            && let Some(entry) = self.reach(remote, length, REACHABLE)
            && entry.memory().persistence() == memory::Persistence::File
            && self.must_wait_to_persist(frame.request, entry, (remote.offset, length))
        {
            return Some(WaitReason::Busy);
        }
        let consumes = matches!(
            frame.message,
            Message::Send { .. } | Message::Write { immediate: Some(_), .. }
        );
        if consumes && self.receiving.is_none() {
            self.receiving = match &mut self.receives {
                Receives::Own(receives) => receives.pop_front(),
                Receives::Shared(shared) => shared.take(&self.connection),
            };
            if self.receiving.is_none() {
                return Some(WaitReason::NotReady);
            }
        }
        None
    }

    /// Checks a write's key, rights and range, and tells where its payload goes. Before looking
    /// for a receive, so that a bad one fails at once.
    fn write_place(&self, frame: &Frame) -> Result<Place, End> {
        match frame.message {
            // A write of nothing touches nothing; its key is not looked at, as with hardware.
            Message::Write { remote, length, .. } if length > 0 => {
                let denied =
                    End::Refused { request: frame.request, status: Status::RemoteAccessError };
                let entry = self.reach(remote, length, Access::REMOTE_WRITE).ok_or(denied)?;
                Ok(Place::Remote { entry, offset: remote.offset as usize })
            }
            Message::Placed { remote, length, .. } => {
                let denied =
                    End::Refused { request: frame.request, status: Status::RemoteAccessError };
                self.reach(remote, length, Access::REMOTE_WRITE).ok_or(denied)?;
                Ok(Place::Nowhere)
            }
            _ => Ok(Place::Nowhere),
        }
    }

    /// Checks a send against the receive it took, and tells where its payload goes.
    fn send_place(&mut self, request: u32, length: u64) -> Result<Place, End> {
        let capacity = self.receiving.as_ref().map_or(0, PostedReceive::capacity);
        if length > capacity {
            if let Some(receive) = self.receiving.take() {
                self.flush_receive(receive.wr_id, Status::LengthError);
            }
            return Err(End::Refused { request, status: Status::LengthError });
        }
        let buffer = self.receiving.as_ref().and_then(|receive| receive.buffer.as_ref());
        Ok(buffer.map_or(Place::Nowhere, |Range { entry, offset, .. }| Place::Local {
            entry: Arc::clone(entry),
            offset: *offset,
        }))
    }

    fn reach(&self, remote: RemoteAddress, length: u64, rights: Access) -> Option<Arc<Entry>> {
        self.regions.reach(remote.key, self.domain, (remote.offset, length), rights)
    }

    /// The payload is in place: executes the frame.
    fn placed(&mut self, payload: Payload) -> Result<(), End> {
        let Payload { frame, place, .. } = payload;
        if !frame.message.is_request() {
            return match frame.message {
                Message::ReadResponse { .. } => self.complete_front(Status::Success),
                _ => Ok(()),
            };
        }
        if frame.request != self.expected_request || self.dropping.is_some() {
            return Ok(());
        }
        if let Some((entry, offset)) = place.region() {
            // Pairs with the acquire loads of whoever watches the memory for a later word: what
            // this frame placed is seen before what the next one places.
            fence(Ordering::Release);
            entry.memory().stored(offset, frame.message.payload_bytes() as usize);
        }
        self.execute(&frame)?;
        self.expected_request = self.expected_request.wrapping_add(1);
        if let (Place::Remote { entry, .. }, Message::Write { remote, .. }) =
            (&place, &frame.message)
        {
            self.offer(entry, remote.key);
        }
        let answered = matches!(
            frame.message,
            Message::Read { .. } | Message::CompareAndSwap { .. } | Message::FetchAndAdd { .. }
        );
        self.owed |= frame.acknowledge && !answered;
        Ok(())
    }

    fn execute(&mut self, frame: &Frame) -> Result<(), End> {
        let request = frame.request;
        let refused = |status| End::Refused { request, status };
        let denied = refused(Status::RemoteAccessError);
        match frame.message {
            Message::Write { immediate: None, .. } => {}
            Message::Placed { remote, length, .. } => {
                if let Some(entry) = self.regions.find(remote.key) {
                    entry.memory().stored(remote.offset as usize, length as usize);
                }
            }
            Message::Write { length, immediate, .. } => {
                self.received(Opcode::ReceiveWithImmediate, length, immediate);
            }
            Message::Send { length, immediate } => {
                self.received(Opcode::Receive, length, immediate);
            }
            Message::Read { remote, length } => {
                let entry = self.reach(remote, length, Access::REMOTE_READ).ok_or(denied)?;
                let source =
                    Range { entry, offset: remote.offset as usize, length: length as usize };
                self.transmitter.answer_read(request, source);
            }
            Message::CompareAndSwap { remote, expected, desired } => {
                let old = self.atomically(remote, request, |word| {
                    match word.compare_exchange(
                        expected,
                        desired,
                        Ordering::SeqCst,
                        Ordering::SeqCst,
                    ) {
                        Ok(old) | Err(old) => old,
                    }
                })?;
                self.transmitter.responses.push_back(Response::Atomic { request, old });
            }
            Message::FetchAndAdd { remote, addend } => {
                let old = self
                    .atomically(remote, request, |word| word.fetch_add(addend, Ordering::SeqCst))?;
                self.transmitter.responses.push_back(Response::Atomic { request, old });
            }
            Message::Flush { remote, length, kind } => {
                let entry = self.reach(remote, length, REACHABLE).ok_or(denied)?;
                let seen_to = self.take_persisted(request);
                if seen_to == Some(false) {
                    return Err(refused(Status::PersistenceError));
                }
                if seen_to.is_none() && kind == FlushKind::Persistent {
                    if entry.memory().persistence() == memory::Persistence::Volatile {
                        return Err(refused(Status::PersistenceError));
                    }
                    entry
                        .memory()
                        .persist(remote.offset as usize, length as usize)
                        .map_err(|_| refused(Status::PersistenceError))?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Where a region begins in what the peer can write by itself.
    fn placement(&self, entry: &Entry) -> Option<u64> {
        self.stream.as_ref()?.placement(entry.memory())
    }

    /// Tells the peer, once, where a region lies that it may write and could write by itself.
    fn offer(&mut self, entry: &Arc<Entry>, key: RemoteKey) {
        let known = |granted: &Weak<Entry>| granted.as_ptr() == Arc::as_ptr(entry);
        if self.granted.iter().any(known) {
            return;
        }
        self.granted.retain(|granted| granted.strong_count() > 0);
        if self.granted.len() >= MAX_GRANTS {
            return;
        }
        let Some(at) = self.regions.grant(entry, || self.placement(entry)) else { return };
        self.granted.push(Arc::downgrade(entry));
        let (request, length) = (self.expected_request, entry.memory().length_bytes() as u64);
        self.transmitter.responses.push_back(Response::Grant { request, key, at, length });
    }

    fn atomically(
        &self,
        remote: RemoteAddress,
        request: u32,
        change: impl FnOnce(&std::sync::atomic::AtomicU64) -> u64,
    ) -> Result<u64, End> {
        let refused = |status| End::Refused { request, status };
        if !remote.offset.is_multiple_of(8) {
            return Err(refused(Status::RemoteInvalidRequest));
        }
        let entry = self
            .reach(remote, 8, Access::REMOTE_ATOMIC)
            .ok_or(refused(Status::RemoteAccessError))?;
        let guard = entry.enter().ok_or(refused(Status::RemoteAccessError))?;
        let storing = entry.storing();
        let old = change(memory::atomic_u64(entry.memory(), remote.offset as usize));
        entry.memory().stored(remote.offset as usize, 8);
        drop(storing);
        drop(guard);
        Ok(old)
    }

    fn received(&mut self, opcode: Opcode, length: u64, immediate: Option<u32>) {
        if let Some(receive) = self.receiving.take() {
            self.gathered.receive.push(WorkCompletion {
                wr_id: receive.wr_id,
                status: Status::Success,
                opcode,
                length,
                immediate,
                qp_num: self.qp_num,
                context: self.options.context,
            });
        }
    }

    /// A frame that answers us.
    fn begin_answer(&mut self, frame: Frame) -> Result<(), End> {
        match frame.message {
            Message::ReadResponse { length } => {
                let hostile = End::Hostile("answers a read that was not asked");
                let front = self.front_for(frame.request).ok_or(hostile)?;
                let Request::Read { local, .. } = &front.request else { return Err(hostile) };
                if local.length as u64 != length {
                    return Err(hostile);
                }
                let entry = Arc::clone(&local.entry);
                let place = Place::Local { entry, offset: local.offset };
                self.expect_payload(frame, place)
            }
            Message::AtomicResponse { old } => {
                let hostile = End::Hostile("answers an atomic that was not asked");
                let front = self.front_for(frame.request).ok_or(hostile)?;
                let (Request::CompareAndSwap { local, .. } | Request::FetchAndAdd { local, .. }) =
                    &front.request
                else {
                    return Err(hostile);
                };
                let storing = local.entry.storing();
                memory::copy_in(local.entry.memory(), local.offset, &old.to_ne_bytes());
                drop(storing);
                local.entry.memory().stored(local.offset, 8);
                self.complete_front(Status::Success)
            }
            _ => self.answered(&frame),
        }
    }

    /// A receive was posted: a peer that waits for one is told.
    pub(crate) fn resume_peer(&mut self) {
        if self.dropping == Some(WaitReason::NotReady) && !self.resumed {
            self.resumed = true;
            let request = self.expected_request;
            self.transmitter.responses.push_back(Response::Resume { request });
        }
    }
}

/// How many of `here` bytes can go to `at`, so that no aligned word is divided: all of them if they
/// are the rest of the payload (`remaining`), else up to the end of a word; at most a piece.
fn whole_words(at: usize, here: usize, remaining: u64) -> usize {
    let here = here.min(PIECE_BYTES);
    if here as u64 >= remaining {
        return remaining as usize;
    }
    here.saturating_sub((at + here) % 8)
}

/// The region was taken away in the middle of the peer's write.
fn revoked(frame: &Frame) -> End {
    End::Refused { request: frame.request, status: Status::RemoteAccessError }
}
