//! The outgoing byte stream of a connection.
//!
//! Frames are *staged*: headers and small payloads are copied into one buffer, large payloads stay
//! where they are and are referenced. One gather call then sends all of it. A partial send resumes
//! where it stopped. Staging is bounded (buffer and list of pieces), so what waits is bounded by
//! the queue depths: requests wait in `outstanding`, answers in `responses`.

use std::collections::VecDeque;
use std::sync::Arc;

use beeline_fabric::{RemoteKey, Status};

use crate::clock;
use crate::engine::{End, Engine, Grant, MAX_INLINE, Outstanding, Request, Source};
use crate::frame::{Frame, HEADER_BYTES, Message, WaitReason};
use crate::region::{Entry, Range};
use crate::stream::{Moved, Part, Stream, part};

/// Bytes of the staging buffer.
const STAGING_BYTES: usize = 16 * 1024;
/// Payload ranges up to this are copied.
const COPY_BYTES: usize = 2048;
/// Pieces staged at once, and parts of one gather call.
const MAX_PIECES: usize = 64;
/// Answers that wait; past this the peer is told to wait.
pub(crate) const MAX_RESPONSES: usize = 256;

/// An answer to the peer, in request order.
#[derive(Debug)]
pub(crate) enum Response {
    Read { request: u32, source: Range },
    Atomic { request: u32, old: u64 },
    Wait { request: u32, reason: WaitReason },
    Resume { request: u32 },
    Refuse { request: u32, status: Status },
    Grant { request: u32, key: RemoteKey, at: u64, length: u64 },
}

impl Response {
    fn request(&self) -> u32 {
        match self {
            Self::Read { request, .. }
            | Self::Atomic { request, .. }
            | Self::Wait { request, .. }
            | Self::Resume { request }
            | Self::Grant { request, .. }
            | Self::Refuse { request, .. } => *request,
        }
    }
}

/// A piece of the stream.
#[derive(Debug)]
enum Piece {
    /// Bytes of the staging buffer.
    Staged { start: usize, length: usize },
    /// Bytes of a region. `answer`: a peer asked to read them.
    Region { range: Range, answer: bool },
}

impl Piece {
    fn length(&self) -> usize {
        match self {
            Self::Staged { length, .. } => *length,
            Self::Region { range, .. } => range.length,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Transmitter {
    staging: Box<[u8]>,
    staging_end: usize,
    pieces: VecDeque<Piece>,
    next_sequence: u32,
    /// Stream position of the end of what is staged, bytes since the handshake.
    staged_position: u64,
    /// Stream position up to which the stream took everything.
    pub(crate) sent_position: u64,
    pub(crate) responses: VecDeque<Response>,
    /// Reads in `responses` or `pieces` that still refer to memory.
    pending_reads: usize,
}

impl Transmitter {
    pub(crate) fn new() -> Self {
        Self {
            staging: Box::default(),
            staging_end: 0,
            pieces: VecDeque::new(),
            next_sequence: 0,
            staged_position: 0,
            sent_position: 0,
            responses: VecDeque::new(),
            pending_reads: 0,
        }
    }

    /// True when nothing waits to be sent (requests apart).
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.responses.is_empty()
    }

    /// Drops everything that waits.
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
        self.responses.clear();
        self.staging_end = 0;
        self.pending_reads = 0;
    }

    /// Queues the answer to a read.
    pub(crate) fn answer_read(&mut self, request: u32, source: Range) {
        self.pending_reads += 1;
        self.responses.push_back(Response::Read { request, source });
    }

    /// True when an answer to a read has not left.
    pub(crate) fn has_pending_reads(&self) -> bool {
        self.pending_reads > 0
    }

    /// True when an answer that has not left still reads from this range.
    pub(crate) fn is_reading(&self, entry: &Entry, offset: u64, length: u64) -> bool {
        let in_pieces = self.pieces.iter().any(|piece| match piece {
            Piece::Region { range, answer: true } => range.overlaps(entry, offset, length),
            _ => false,
        });
        in_pieces
            || self.responses.iter().any(|response| match response {
                Response::Read { source, .. } => source.overlaps(entry, offset, length),
                _ => false,
            })
    }

    /// True when a frame with so many referenced ranges and copied bytes fits now.
    fn has_room(&self, copied: usize, ranges: usize) -> bool {
        self.staging_end + HEADER_BYTES + copied <= STAGING_BYTES
            && self.pieces.len() + 1 + 2 * ranges <= MAX_PIECES
    }

    fn stage_bytes(&mut self, length: usize, fill: impl FnOnce(&mut [u8])) {
        if self.staging.is_empty() {
            self.staging = vec![0; STAGING_BYTES].into_boxed_slice();
            self.pieces.reserve(MAX_PIECES);
        }
        let start = self.staging_end;
        fill(&mut self.staging[start..start + length]);
        self.staging_end += length;
        self.staged_position += length as u64;
        if let Some(Piece::Staged { start: last, length: so_far }) = self.pieces.back_mut()
            && *last + *so_far == start
        {
            *so_far += length;
        } else {
            self.pieces.push_back(Piece::Staged { start, length });
        }
    }

    fn stage_header(&mut self, frame: Frame) {
        let bytes = frame.encode();
        self.next_sequence = self.next_sequence.wrapping_add(1);
        self.stage_bytes(HEADER_BYTES, |staging| staging.copy_from_slice(&bytes));
    }

    fn stage_range(&mut self, range: &Range, answer: bool) {
        if range.length == 0 {
            return;
        }
        if range.length <= COPY_BYTES && self.staging_end + range.length <= STAGING_BYTES {
            let (entry, offset) = (Arc::clone(&range.entry), range.offset);
            self.stage_bytes(range.length, |staging| {
                beeline_os::memory::copy_out(entry.memory(), offset, staging);
            });
            if answer {
                self.pending_reads -= 1;
            }
        } else {
            self.staged_position += range.length as u64;
            self.pieces.push_back(Piece::Region { range: range.clone(), answer });
        }
    }

    /// The stream took `bytes`.
    fn advance(&mut self, mut bytes: usize) {
        self.sent_position += bytes as u64;
        while bytes > 0 {
            let Some(piece) = self.pieces.front_mut() else { break };
            if piece.length() > bytes {
                match piece {
                    Piece::Staged { start, length } => {
                        *start += bytes;
                        *length -= bytes;
                    }
                    Piece::Region { range, .. } => {
                        range.offset += bytes;
                        range.length -= bytes;
                    }
                }
                return;
            }
            bytes -= piece.length();
            if let Some(Piece::Region { answer: true, .. }) = self.pieces.pop_front() {
                self.pending_reads -= 1;
            }
        }
        if self.pieces.is_empty() {
            self.staging_end = 0;
        }
    }
}

/// Ranges of a gather list that are copied, in bytes, and that are referenced.
fn cost(source: &Source) -> (usize, usize) {
    match source {
        Source::Inline { length, .. } => (*length, 0),
        Source::Gather { ranges, .. } => {
            ranges.iter().flatten().fold((0, 0), |(bytes, referenced), range| {
                if range.length <= COPY_BYTES {
                    (bytes + range.length, referenced)
                } else {
                    (bytes, referenced + 1)
                }
            })
        }
    }
}

fn message_of(request: &Request) -> Message {
    match *request {
        Request::Write { ref source, remote, immediate } => {
            Message::Write { remote, length: source.length(), immediate }
        }
        Request::Send { ref source, immediate } => {
            Message::Send { length: source.length(), immediate }
        }
        Request::Read { ref local, remote } => {
            Message::Read { remote, length: local.length as u64 }
        }
        Request::CompareAndSwap { remote, expected, desired, .. } => {
            Message::CompareAndSwap { remote, expected, desired }
        }
        Request::FetchAndAdd { remote, addend, .. } => Message::FetchAndAdd { remote, addend },
        Request::Flush { remote, length, kind } => Message::Flush { remote, length, kind },
    }
}

/// Places the bytes of a write in the peer's memory, if it was granted; the message that says so.
fn place(
    stream: &mut dyn Stream,
    grants: &[Grant],
    inline: &[u8],
    request: &Request,
) -> Option<Message> {
    let Request::Write { source, remote, immediate: None } = request else { return None };
    let length = source.length();
    let grant = grants.iter().rev().find(|grant| grant.key == remote.key)?;
    if length == 0 || remote.offset.checked_add(length).is_none_or(|end| end > grant.length) {
        return None;
    }
    let mut at = grant.at.checked_add(remote.offset)?;
    if divides_words(source, at) {
        // By way of the peer, which puts words together.
        return None;
    }
    match source {
        Source::Inline { slot, length } => {
            let bytes = &inline[slot * MAX_INLINE..slot * MAX_INLINE + length];
            // SAFETY: a live slice of that length.
            if !unsafe { stream.place(at, bytes.as_ptr(), *length) } {
                return None;
            }
        }
        Source::Gather { ranges, .. } => {
            for range in ranges.iter().flatten() {
                let bytes = range.entry.pointer(range.offset);
                // SAFETY: the range was checked when it was posted, and its entry is held.
                if !unsafe { stream.place(at, bytes, range.length) } {
                    return None;
                }
                at = at.checked_add(range.length as u64)?;
            }
        }
    }
    Some(Message::Placed { remote: *remote, length, at: grant.at })
}

/// True when a word of the target would come from two entries of a gather list.
fn divides_words(source: &Source, at: u64) -> bool {
    let Source::Gather { ranges, length } = source else { return false };
    let mut done = 0;
    ranges.iter().flatten().any(|range| {
        done += range.length as u64;
        done < *length && !(at + done).is_multiple_of(8)
    })
}

impl Engine {
    /// Every request of the peer numbered below this has been executed and, where it needs an
    /// answer, answered.
    fn acknowledged(&self) -> u32 {
        self.transmitter.responses.front().map_or(self.expected_request, Response::request)
    }

    /// Stages the front answer; false when there is no room.
    fn stage_response(&mut self) -> bool {
        let transmitter = &mut self.transmitter;
        let Some(front) = transmitter.responses.front() else { return false };
        let (copied, ranges) = match front {
            Response::Read { source, .. } if source.length > COPY_BYTES => (0, 1),
            Response::Read { source, .. } => (source.length, 0),
            _ => (0, 0),
        };
        if !transmitter.has_room(copied, ranges) {
            return false;
        }
        let Some(response) = transmitter.responses.pop_front() else { return false };
        let request = response.request();
        let message = match &response {
            Response::Read { source, .. } => Message::ReadResponse { length: source.length as u64 },
            Response::Atomic { old, .. } => Message::AtomicResponse { old: *old },
            Response::Wait { reason, .. } => Message::Wait { reason: *reason },
            Response::Resume { .. } => Message::Resume,
            Response::Refuse { status, .. } => Message::Refuse { status: *status },
            Response::Grant { key, at, length, .. } => {
                Message::Grant { key: *key, at: *at, length: *length }
            }
        };
        let sequence = transmitter.next_sequence;
        transmitter.stage_header(Frame {
            sequence,
            request,
            acknowledged: request,
            acknowledge: false,
            message,
        });
        if let Response::Read { source, .. } = &response {
            if source.length == 0 {
                transmitter.pending_reads -= 1;
            }
            transmitter.stage_range(source, true);
        }
        // An answer stands for its own request, the other frames for everything before theirs.
        let covered = match &response {
            Response::Read { .. } | Response::Atomic { .. } => request.wrapping_add(1),
            _ => request,
        };
        if covered == self.expected_request {
            self.owed = false;
        }
        true
    }

    /// Stages the next request; false when there is none or no room.
    fn stage_request(&mut self) -> bool {
        if self.is_held() {
            return false;
        }
        let request = self.first_request.wrapping_add(self.staged as u32);
        let acknowledged = self.acknowledged();
        // A peer acknowledges what it is asked to; a queue of silent requests asks now and then.
        let quarter = (self.options.send_depth / 4).max(1);
        let periodic = request.is_multiple_of(quarter);
        let Some(outstanding) = self.outstanding.get_mut(self.staged) else { return false };
        if matches!(outstanding.request, Request::Write { immediate: None, .. }) {
            if !self.transmitter.has_room(0, 0) {
                return false;
            }
            // Placing would overtake what the peer has yet to execute.
            if self.unplaced == 0
                && let Some(stream) = &mut self.stream
                && let Some(message) =
                    place(stream.as_mut(), &self.grants, &self.inline, &outstanding.request)
            {
                let sequence = self.transmitter.next_sequence;
                let acknowledge = outstanding.signalled || periodic;
                let frame = Frame { sequence, request, acknowledged, acknowledge, message };
                self.transmitter.stage_header(frame);
                outstanding.placed = true;
                outstanding.end_position = self.transmitter.staged_position;
                self.staged += 1;
                if self.transmitter.responses.is_empty() {
                    self.owed = false;
                }
                return true;
            }
        }
        let (copied, ranges) = match &outstanding.request {
            Request::Write { source, .. } | Request::Send { source, .. } => cost(source),
            _ => (0, 0),
        };
        if !self.transmitter.has_room(copied, ranges) {
            return false;
        }
        outstanding.placed = false;
        self.unplaced += 1;
        let Outstanding { signalled, request: what, end_position, .. } = outstanding;
        let sequence = self.transmitter.next_sequence;
        self.transmitter.stage_header(Frame {
            sequence,
            request,
            acknowledged,
            acknowledge: *signalled || periodic,
            message: message_of(what),
        });
        if let Request::Write { source, .. } | Request::Send { source, .. } = what {
            match source {
                Source::Inline { length: 0, .. } => {}
                Source::Inline { slot, length } => {
                    let start = *slot * MAX_INLINE;
                    let bytes = &self.inline[start..start + *length];
                    self.transmitter.stage_bytes(*length, |staging| staging.copy_from_slice(bytes));
                }
                Source::Gather { ranges, .. } => {
                    for range in ranges.iter().flatten() {
                        self.transmitter.stage_range(range, false);
                    }
                }
            }
        }
        *end_position = self.transmitter.staged_position;
        self.staged += 1;
        if self.transmitter.responses.is_empty() {
            self.owed = false;
        }
        true
    }

    fn fill(&mut self) {
        while self.transmitter.responses.front().is_some() {
            if !self.stage_response() {
                return;
            }
        }
        if self.dropping == Some(WaitReason::Busy) && !self.resumed && self.answers_have_left() {
            self.resumed = true;
            let request = self.expected_request;
            self.transmitter.responses.push_back(Response::Resume { request });
            self.stage_response();
        }
        while self.staged < self.outstanding.len() && self.stage_request() {}
    }

    fn answers_have_left(&self) -> bool {
        self.transmitter.pending_reads == 0 && !self.is_persisting()
    }

    /// Stages the acknowledgement that is owed, when no other frame carries it.
    pub(crate) fn stage_owed(&mut self) {
        if self.owed
            && self.stage_is_ready()
            && self.transmitter.responses.is_empty()
            && self.transmitter.has_room(0, 0)
        {
            self.owed = false;
            let sequence = self.transmitter.next_sequence;
            let acknowledged = self.expected_request;
            self.transmitter.stage_header(Frame {
                sequence,
                request: 0,
                acknowledged,
                acknowledge: false,
                message: Message::Acknowledge,
            });
        }
    }

    fn stage_is_ready(&self) -> bool {
        self.stage == crate::engine::Stage::Ready
    }

    /// Sends until the stream takes no more or nothing is left.
    pub(crate) fn transmit(&mut self) -> Result<(), End> {
        loop {
            if self.stage_is_ready() || self.stage == crate::engine::Stage::Lingering {
                self.fill();
            }
            if self.transmitter.pieces.is_empty() {
                return Ok(());
            }
            let Some(stream) = &mut self.stream else { return Err(End::Gone("no connection")) };
            let mut one = [part(std::ptr::null_mut(), 0)];
            let mut many;
            let parts: &mut [Part] = if self.transmitter.pieces.len() == 1 {
                &mut one
            } else {
                many = [part(std::ptr::null_mut(), 0); MAX_PIECES];
                &mut many
            };
            let mut count = 0;
            let mut total = 0;
            for (slot, piece) in parts.iter_mut().zip(&self.transmitter.pieces) {
                *slot = match piece {
                    Piece::Staged { start, length } => {
                        let bytes = &self.transmitter.staging[*start..*start + *length];
                        part(bytes.as_ptr().cast_mut(), bytes.len())
                    }
                    Piece::Region { range, answer } => {
                        if *answer && range.entry.is_closed() {
                            return Err(End::Disconnected);
                        }
                        part(range.entry.pointer(range.offset), range.length)
                    }
                };
                count += 1;
                total += piece.length();
            }
            // SAFETY: staged pieces lie in the buffer, region pieces in ranges that were checked
            // when they were accepted; the pieces own handles on both, and live across the call.
            let moved = unsafe { stream.send(&mut parts[..count]) };
            match moved {
                Moved::Bytes(bytes) => {
                    self.progress_ns = clock::coarse_ns();
                    self.transmitter.advance(bytes);
                    if bytes < total {
                        return Ok(());
                    }
                }
                Moved::Later => return Ok(()),
                Moved::Closed => return Err(End::Gone("the connection broke while sending")),
            }
        }
    }
}
