//! A byte ring: messages back to back, from one producer to one consumer, in memory that both
//! map and either may scribble over.
//!
//! ```text
//! position p (a multiple of 8)    header: kind (high 32 bits) | length in bytes (low 32 bits)
//! p + 8                           payload, padded to a multiple of 8
//! ```
//!
//! A header of zero means: nothing here yet. The producer writes the payload, then a zero header
//! behind it, then its own header with `Release`; the consumer loads the header with `Acquire`.
//! So a small message moves one cache line, and neither side reads the other's position: room
//! comes back as cumulative credits, half a ring at a time. A message does not wrap: one that
//! would is cut in two, and a header that would stand alone at the end is a filler. What is sent at
//! once and is short goes in whole or not at all, and is seen whole: both halves of a cut one are
//! there before the first one's header is.
//!
//! A sender may be killed behind any store. It stores, in this order, where its tail is going (`bound`), the
//! header, the tail. So where `bound` is the tail, no header that the receiver may have seen stands at the tail;
//! where it is not, the next sender looks. Both words lie in a line that only senders of this end write: looking
//! at the header with each message would fetch the line that the receiver polls, a second time for each message.
//!
//! Invariants:
//! - positions only grow; `tail - consumed <= length - 8`, so the zero header always has a place;
//! - each side goes by its own positions only. The consumer copies a header, checks it, then uses
//!   the copy; the producer checks credits. Nonsense is [`Corrupt`], for good;
//! - the other side can write our positions, too: whatever they say, every access lies within the
//!   ring.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::segment::{Credits, Receiving, Sending};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 8;
/// Longest message; a longer send is several.
pub const LONGEST_MESSAGE: usize = 32 << 10;

/// Most bytes that go in whole or not at all, in a ring of eight times as much.
pub const LONGEST_WHOLE: usize = 4096;

/// Kind of a message with bytes.
pub const DATA: u32 = 1;
/// Kind of a header that stands alone at the end of the ring.
pub const FILLER: u32 = 2;

/// The other side wrote what it cannot have meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other end wrote nonsense into the ring")]
pub struct Corrupt;

/// Memory of one direction.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    base: NonNull<u8>,
    length: usize,
}

impl Ring {
    /// The ring of `length` bytes at `base`.
    ///
    /// # Safety
    ///
    /// `length` is a power of two and at least 64; that many bytes from `base`, which is aligned
    /// to 8, stay mapped and writable while the value or a copy of it is used; they are reached
    /// through this type only.
    #[must_use]
    pub unsafe fn new(base: NonNull<u8>, length: usize) -> Self {
        Self { base, length }
    }

    #[inline]
    fn place(&self, position: u64) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "only the lower bits are kept")]
        let place = position as usize & (self.length - 1) & !(HEADER_BYTES - 1);
        place
    }

    #[inline]
    fn header(&self, position: u64) -> &AtomicU64 {
        // SAFETY: a place is below the length, and a multiple of 8 like the length itself.
        let header = unsafe { self.base.add(self.place(position)) };
        // SAFETY: mapped and aligned (contract of `new`); an atomic claims nothing about writers.
        unsafe { header.cast().as_ref() }
    }

    /// Copies `length` bytes from `bytes` to `place`.
    ///
    /// # Safety
    ///
    /// `place + length` is within the ring; `bytes` is readable for `length`.
    #[inline]
    unsafe fn write(&self, place: usize, bytes: *const u8, length: usize) {
        // SAFETY: within the ring, by contract.
        let target = unsafe { self.base.add(place) };
        if length == 8 {
            // The commonest small message, without a call.
            // SAFETY: eight bytes are readable, by contract.
            let word = unsafe { bytes.cast::<u64>().read_unaligned() };
            // SAFETY: eight bytes of the ring, as below.
            unsafe { target.cast::<u64>().write_unaligned(word) };
            return;
        }
        // SAFETY: both ranges are valid by contract; a hostile other side that writes the same
        // bytes meanwhile changes only what it will read.
        unsafe { std::ptr::copy_nonoverlapping(bytes, target.as_ptr(), length) };
    }

    /// Copies `length` bytes at `place` to `bytes`.
    ///
    /// # Safety
    ///
    /// `place + length` is within the ring; `bytes` is writable for `length`.
    #[inline]
    unsafe fn read(&self, place: usize, bytes: *mut u8, length: usize) {
        // SAFETY: within the ring, by contract.
        let source = unsafe { self.base.add(place) };
        if length == 8 {
            // SAFETY: eight bytes of the ring, as below.
            let word = unsafe { source.cast::<u64>().read_unaligned() };
            // SAFETY: eight bytes are writable, by contract.
            unsafe { bytes.cast::<u64>().write_unaligned(word) };
            return;
        }
        // SAFETY: both ranges are valid by contract. A hostile sender may change the bytes while
        // they are copied: the reader gets some bytes, as from any sender.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr().cast_const(), bytes, length) };
    }
}

#[inline]
const fn padded(length: usize) -> usize {
    length.next_multiple_of(8)
}

/// The word that says how much of the message at the head was read has the lower bits of the head above it.
const OFFSET_BITS: u32 = 16;
const OFFSET_ALL: u64 = (1 << OFFSET_BITS) - 1;
const HEAD_KEPT: u64 = u64::MAX >> OFFSET_BITS;
const _: () = assert!(LONGEST_MESSAGE < 1 << OFFSET_BITS, "an offset fits its word");

/// The sending side.
#[derive(Debug)]
pub struct Producer<'a> {
    ring: Ring,
    own: &'a Sending,
    credits: &'a Credits,
}

impl<'a> Producer<'a> {
    /// The sending side of `ring`, with its words.
    #[inline]
    #[must_use]
    pub fn new(ring: Ring, own: &'a Sending, credits: &'a Credits) -> Self {
        Self { ring, own, credits }
    }

    /// Bytes free as far as the last credits said; `refresh` reads them anew.
    #[inline]
    fn free(&self, tail: u64, refresh: bool) -> Result<usize, Corrupt> {
        let mut seen = self.own.credits_seen.load(Ordering::Relaxed);
        if refresh {
            // Acquire with the consumer's Release in `give_back`: its copies out are over.
            let consumed = self.credits.consumed.load(Ordering::Acquire);
            if consumed < seen || consumed > tail || !consumed.is_multiple_of(8) {
                return Err(Corrupt);
            }
            seen = consumed;
            self.own.credits_seen.store(seen, Ordering::Relaxed);
        }
        #[expect(clippy::cast_possible_truncation, reason = "checked to be at most the length")]
        let used = tail.wrapping_sub(seen) as usize;
        self.ring.length.checked_sub(used).ok_or(Corrupt)
    }

    /// True when a quarter of the ring is free: what readiness reports.
    ///
    /// Errors: [`Corrupt`].
    pub fn has_room(&self) -> Result<bool, Corrupt> {
        let tail = self.own.tail.load(Ordering::Relaxed);
        let wanted = self.ring.length / 4;
        Ok(self.free(tail, false)? >= wanted || self.free(tail, true)? >= wanted)
    }

    /// Position behind everything sent.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.own.tail.load(Ordering::Relaxed)
    }

    /// Most bytes that this ring takes whole or not at all.
    #[inline]
    #[must_use]
    pub fn longest_whole(&self) -> usize {
        LONGEST_WHOLE.min(self.ring.length / 8)
    }

    /// Sends `length` bytes at `bytes`, which would wrap and for which there is room, as two
    /// messages, or a filler and one, that appear at once.
    ///
    /// # Safety
    ///
    /// As for [`Producer::push`].
    #[cold]
    unsafe fn push_cut(&self, bytes: *const u8, length: usize, tail: u64) {
        let place = self.ring.place(tail);
        let to_end = self.ring.length - place;
        let first = (to_end - HEADER_BYTES).min(length);
        let second = length - first;
        let behind = tail.wrapping_add(to_end as u64);
        let next = behind.wrapping_add((HEADER_BYTES + padded(second)) as u64);
        self.ring.header(next).store(0, Ordering::Relaxed);
        // SAFETY: `first <= length`.
        let rest = unsafe { bytes.add(first) };
        // SAFETY: `8 + second` is less than the ring's length, of which `length` is a part.
        unsafe { self.ring.write(HEADER_BYTES, rest, second) };
        self.ring.header(behind).store(u64::from(DATA) << 32 | second as u64, Ordering::Relaxed);
        self.own.bound.store(next, Ordering::Relaxed);
        let header = if first == 0 {
            u64::from(FILLER) << 32
        } else {
            // SAFETY: `place + 8 + first` is the ring's length.
            unsafe { self.ring.write(place + HEADER_BYTES, bytes, first) };
            u64::from(DATA) << 32 | first as u64
        };
        // Release with the consumer's Acquire in `next_message`: everything above is there, and `bound` for the
        // next sender.
        self.ring.header(tail).store(header, Ordering::Release);
        self.own.tail.store(next, Ordering::Release);
    }

    /// Behind what a thread published that was killed before it said so in `tail`: a header that is not zero stands
    /// there in no other case. What it had not published is written over.
    #[cold]
    fn pass_by_published(&self, tail: u64) -> Result<u64, Corrupt> {
        let mut behind = tail;
        loop {
            let header = self.ring.header(behind).load(Ordering::Acquire);
            if header == 0 {
                break;
            }
            let to_end = self.ring.length - self.ring.place(behind);
            let length = (header & u64::from(u32::MAX)) as usize;
            let bytes = match (header >> 32) as u32 {
                DATA if length > 0 && length <= to_end - HEADER_BYTES => padded(length),
                FILLER if length == 0 && to_end == HEADER_BYTES => 0,
                _ => return Err(Corrupt),
            };
            behind = behind.wrapping_add((HEADER_BYTES + bytes) as u64);
            // Of one call, which found room for all of it.
            if behind.wrapping_sub(tail) > self.ring.length as u64 {
                return Err(Corrupt);
            }
        }
        // In any order: a header of zero stands there, so looking once more does no harm.
        self.own.tail.store(behind, Ordering::Release);
        self.own.bound.store(behind, Ordering::Relaxed);
        Ok(behind)
    }

    /// Sends as much of `length` bytes at `bytes` as there is room for, and says how much: all or
    /// nothing up to [`Producer::longest_whole`].
    ///
    /// Errors: [`Corrupt`].
    ///
    /// # Safety
    ///
    /// `bytes` is readable for `length`; the caller holds the sending half.
    #[inline]
    pub unsafe fn push(&self, bytes: *const u8, length: usize) -> Result<usize, Corrupt> {
        let mut sent = 0;
        let mut tail = self.own.tail.load(Ordering::Relaxed);
        if self.own.bound.load(Ordering::Relaxed) != tail {
            tail = self.pass_by_published(tail)?;
        }
        if length <= self.longest_whole() && length > 0 {
            // Two headers and the zero header behind them.
            let wanted = padded(length) + 3 * HEADER_BYTES;
            if self.free(tail, false)? < wanted && self.free(tail, true)? < wanted {
                return Ok(0);
            }
            if self.ring.length - self.ring.place(tail) < HEADER_BYTES + padded(length) {
                // SAFETY: the contract.
                unsafe { self.push_cut(bytes, length, tail) };
                return Ok(length);
            }
        }
        while sent < length {
            // A header, a word of payload and the zero header behind them.
            const LEAST: usize = 3 * HEADER_BYTES;
            let wanted = LEAST.max(padded((length - sent).min(LONGEST_MESSAGE)) + 2 * HEADER_BYTES);
            let mut free = self.free(tail, false)?;
            if free < wanted {
                free = self.free(tail, true)?;
            }
            if free < LEAST {
                break;
            }
            let place = self.ring.place(tail);
            let to_end = self.ring.length - place;
            if to_end == HEADER_BYTES {
                let next = tail.wrapping_add(HEADER_BYTES as u64);
                self.ring.header(next).store(0, Ordering::Relaxed);
                self.own.bound.store(next, Ordering::Relaxed);
                // Release with the consumer's Acquire in `next_message`.
                self.ring.header(tail).store(u64::from(FILLER) << 32, Ordering::Release);
                tail = next;
                self.own.tail.store(tail, Ordering::Release);
                continue;
            }
            let room = (to_end - HEADER_BYTES).min(free - 2 * HEADER_BYTES).min(LONGEST_MESSAGE);
            let part = room.min(length - sent);
            // SAFETY: `sent + part <= length`.
            let source = unsafe { bytes.add(sent) };
            // SAFETY: `place + 8 + part <= place + to_end`, the ring's length.
            unsafe { self.ring.write(place + HEADER_BYTES, source, part) };
            let next = tail.wrapping_add((HEADER_BYTES + padded(part)) as u64);
            self.ring.header(next).store(0, Ordering::Relaxed);
            let header = u64::from(DATA) << 32 | part as u64;
            self.own.bound.store(next, Ordering::Relaxed);
            // Release with the consumer's Acquire in `next_message`: payload and the zero header
            // behind it are there before the header is, and so is `bound` for the next sender.
            self.ring.header(tail).store(header, Ordering::Release);
            tail = next;
            sent += part;
            // Kept with every message: whoever holds this half next goes on from here, also after
            // this thread was killed. Release with the Acquire of an edge-triggered set.
            self.own.tail.store(tail, Ordering::Release);
        }
        Ok(sent)
    }
}

/// The receiving side.
#[derive(Debug)]
pub struct Consumer<'a> {
    ring: Ring,
    own: &'a Receiving,
    credits: &'a Credits,
}

/// Where the consumer stands.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    head: u64,
    offset: usize,
}

impl<'a> Consumer<'a> {
    /// The receiving side of `ring`, with its words.
    #[inline]
    #[must_use]
    pub fn new(ring: Ring, own: &'a Receiving, credits: &'a Credits) -> Self {
        Self { ring, own, credits }
    }

    /// True when there is something at the head: bytes, or nonsense to be found out.
    #[inline]
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let head = self.own.head.load(Ordering::Relaxed);
        let header = self.ring.header(head).load(Ordering::Acquire);
        header != 0 && header != u64::from(FILLER) << 32 || {
            // A filler is ready when something stands behind it.
            header != 0
                && self.ring.header(head.wrapping_add(HEADER_BYTES as u64)).load(Ordering::Acquire)
                    != 0
        }
    }

    #[inline]
    fn cursor(&self) -> Cursor {
        let (word, head) =
            (self.own.offset.load(Ordering::Relaxed), self.own.head.load(Ordering::Relaxed));
        // Of another head: the process that moved on was killed before it said how far, and its call returned nothing.
        let offset = if word >> OFFSET_BITS == head & HEAD_KEPT { word & OFFSET_ALL } else { 0 };
        Cursor { head, offset: offset as usize }
    }

    /// Length of the bytes at the cursor, which moves over fillers; 0 when there are none.
    #[inline]
    fn next_message(&self, cursor: &mut Cursor) -> Result<usize, Corrupt> {
        loop {
            let place = self.ring.place(cursor.head);
            let to_end = self.ring.length - place;
            // Acquire with the producer's Release in `push`.
            let header = self.ring.header(cursor.head).load(Ordering::Acquire);
            if header == 0 {
                return if cursor.offset == 0 { Ok(0) } else { Err(Corrupt) };
            }
            let length = (header & u64::from(u32::MAX)) as usize;
            let kind = (header >> 32) as u32;
            match kind {
                DATA if length > cursor.offset && length <= to_end - HEADER_BYTES => {
                    return Ok(length);
                }
                FILLER if length == 0 && to_end == HEADER_BYTES && cursor.offset == 0 => {
                    cursor.head = cursor.head.wrapping_add(HEADER_BYTES as u64);
                }
                _ => return Err(Corrupt),
            }
        }
    }

    /// Moves up to `length` bytes to `bytes` and says how many; with `peek` they stay.
    ///
    /// Errors: [`Corrupt`], also when bytes were copied before the nonsense was met.
    ///
    /// # Safety
    ///
    /// `bytes` is writable for `length`; the caller holds the receiving half.
    #[inline]
    pub unsafe fn pop(
        &self,
        bytes: *mut u8,
        length: usize,
        skip: usize,
        peek: bool,
    ) -> Result<usize, Corrupt> {
        let mut cursor = self.cursor();
        let (mut taken, mut skip) = (0, skip);
        while taken < length {
            let message = self.next_message(&mut cursor)?;
            if message == 0 {
                break;
            }
            let left = message - cursor.offset;
            let over = skip.min(left);
            let part = (left - over).min(length - taken);
            skip -= over;
            // SAFETY: `taken + part <= length`.
            let target = unsafe { bytes.add(taken) };
            let place = self.ring.place(cursor.head) + HEADER_BYTES + cursor.offset + over;
            // SAFETY: the copy of the header said so: offset and part lie inside a message that
            // ends before the ring does.
            unsafe { self.ring.read(place, target, part) };
            taken += part;
            cursor.offset += over + part;
            if cursor.offset == message {
                cursor.head = cursor.head.wrapping_add((HEADER_BYTES + padded(message)) as u64);
                cursor.offset = 0;
            }
        }
        if !peek && taken > 0 {
            // In this order, each of one word: see `cursor`.
            self.own.head.store(cursor.head, Ordering::Relaxed);
            std::sync::atomic::compiler_fence(Ordering::Release);
            let word = (cursor.head & HEAD_KEPT) << OFFSET_BITS | cursor.offset as u64;
            self.own.offset.store(word, Ordering::Release);
        }
        Ok(taken)
    }

    /// Gives room back to the sender: when half a ring was read, or all that was read if `all`.
    /// True when credits moved.
    #[inline]
    pub fn give_back(&self, all: bool) -> bool {
        let head = self.own.head.load(Ordering::Relaxed);
        let given = self.credits.consumed.load(Ordering::Relaxed);
        let due = head.wrapping_sub(given);
        if due == 0 || !all && due <= self.ring.length as u64 / 2 {
            return false;
        }
        // Release with the producer's Acquire in `free`: our copies out come before.
        self.credits.consumed.store(head, Ordering::Release);
        true
    }

    /// Bytes that can be read now, counted up to `most`.
    ///
    /// Errors: [`Corrupt`].
    pub fn available(&self, most: usize) -> Result<usize, Corrupt> {
        let mut cursor = self.cursor();
        let mut bytes = 0_usize;
        while bytes < most {
            let message = self.next_message(&mut cursor)?;
            if message == 0 {
                break;
            }
            bytes += message - cursor.offset;
            cursor.head = cursor.head.wrapping_add((HEADER_BYTES + padded(message)) as u64);
            cursor.offset = 0;
        }
        Ok(bytes)
    }
}
