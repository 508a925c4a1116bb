//! The data thread's view of one connection: rings, credit, payload areas, doorbell.
//!
//! Everything private here is authoritative; what the peer publishes is copied, checked against
//! it, and refused when an honest peer could not have published it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use beeline_os::{barrier, prefetch};
use beeline_ring::slots::{SlotConsumer, SlotHead, SlotProducer};

use crate::link::Bell;
use crate::object::{ConnectionObject, EndView};
use crate::request::{Local, copy};
use crate::{INLINE_MESSAGE_BYTES, MAX_SEND_BYTES};

/// Why a message cannot go out now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocked {
    /// The receiver has not posted a receive.
    NoReceive,
    /// Ring or payload area are full.
    NoRoom,
    /// The peer published nonsense.
    Broken,
}

/// A message, decoded and checked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Inbound {
    /// A send.
    Send { length: u64, immediate: Option<u32>, bytes: Carried },
    /// A write with immediate of `length` bytes.
    Written { length: u64, immediate: u32 },
    /// The sender found our posted receive too short.
    TooLong,
}

/// Where a send's bytes are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Carried {
    /// In the slot, from this word of its body on: see [`Connection::copy_inline`].
    Inline { first: usize },
    /// In the payload area, at this address, checked to lie inside.
    Payload(*const u8),
}

/// Most slots asked for ahead of the one that is read.
const MOST_SLOTS_AHEAD: u64 = 8;

/// Slots asked for, to write them, ahead of the one that is written.
const SLOTS_TO_WRITE: u64 = 8;

/// Most messages kept from the peer until they are published together: it begins with the first
/// while the next are written.
const MOST_STAGED: u32 = 8;

/// A message longer than this is published at once: the ones before it do not wait for its copy.
const LONG_BYTES: u64 = 1024;

/// Beside the number of holds: a slot was staged or published since the last look at the peer's armed
/// word.
const UNANNOUNCED: u32 = 1 << 31;

const INLINE_WORDS: usize = INLINE_MESSAGE_BYTES as usize / 8;

// The low 8 bits of a slot's tag; a send inside its slot has its length in the next 8.
/// Body: the bytes.
const KIND_SEND: u32 = 1;
/// Body: the immediate, the bytes.
const KIND_SEND_IMMEDIATE: u32 = 2;
/// Body: length, the immediate.
const KIND_WRITTEN: u32 = 3;
/// Body: length.
const KIND_TOO_LONG: u32 = 4;
/// Body: length, place in the payload area.
const KIND_LONG: u32 = 5;
/// Body: length, place in the payload area, the immediate.
const KIND_LONG_IMMEDIATE: u32 = 6;

/// Bump allocation of payload bytes, freed in order. The start of each block is in its slot; its
/// end is remembered here with the message's index, so that the peer's index frees it.
#[derive(Debug)]
struct PayloadArea {
    size: u64,
    head: u64,
    tail: u64,
    /// Messages with a payload that the peer has not consumed, and where each ends. At most one for
    /// each slot.
    ends: VecDeque<(u64, u64)>,
}

impl PayloadArea {
    fn new(size: u32, slots: u32) -> Self {
        // A block takes a line at the least.
        let most = slots.min(size / 64) as usize;
        Self { size: u64::from(size), head: 0, tail: 0, ends: VecDeque::with_capacity(most) }
    }

    /// Position of `length` contiguous bytes, if they are free.
    fn find(&self, length: u64) -> Option<u64> {
        let place = self.tail & (self.size - 1);
        let start =
            if place + length > self.size { self.tail + (self.size - place) } else { self.tail };
        (start + length - self.head <= self.size).then_some(start)
    }

    /// Message `index` carries the bytes up to `end`.
    fn take(&mut self, index: u64, end: u64) {
        // The next block begins on a line of its own.
        self.tail = end.next_multiple_of(64);
        self.ends.push_back((index, self.tail));
    }

    fn free_to(&mut self, consumed: u64) {
        while let Some(&(index, end)) = self.ends.front()
            && index < consumed
        {
            self.head = end;
            self.ends.pop_front();
        }
    }
}

/// What may be asked before a message leaves.
#[derive(Clone, Copy, Debug)]
struct Before<'a> {
    peer: &'a EndView,
    asymmetric: bool,
    receives_used: u64,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub own: EndView,
    pub peer: EndView,
    pub asymmetric: bool,
    pub bell: Bell,
    producer: SlotProducer,
    consumer: SlotConsumer,
    payload: PayloadArea,
    /// Receives of the peer that our messages used, and that it had posted when last looked.
    receives_used: u64,
    receives_seen: u64,
    /// Index at which the peer is told what was consumed, and payload bytes consumed since it was.
    tell_at: u64,
    payload_since: u64,
    /// Generations already rung.
    rung_messages: u32,
    rung_credit: u32,
    /// Messages that the last look found: about as many are likely to wait at the next.
    found_last: u64,
    /// How many times it was said that more messages follow at once, so that what is staged stays so;
    /// and [`UNANNOUNCED`].
    kept: u32,
    /// Keeps the views mapped; last, so that it is dropped last.
    _object: Arc<ConnectionObject>,
}

impl Connection {
    pub(crate) fn new(object: Arc<ConnectionObject>, bell: Bell, asymmetric: bool) -> Self {
        let (own, peer) = object.views();
        let outbound = peer.geometry();
        Self {
            own,
            peer,
            asymmetric,
            bell,
            producer: peer.producer(),
            consumer: own.consumer(),
            payload: PayloadArea::new(outbound.payload_bytes, outbound.slots),
            receives_used: 0,
            receives_seen: 0,
            tell_at: u64::from(own.geometry().slots / 4),
            payload_since: 0,
            rung_messages: 0,
            rung_credit: 0,
            found_last: 0,
            kept: 0,
            _object: object,
        }
    }

    /// Whether the peer is known to have a receive for a message, or takes messages without.
    #[inline(always)]
    fn sees_receive(&self) -> bool {
        self.receives_used != self.receives_seen || self.peer_shares_receives()
    }

    /// Whether a message that uses a receive can go: a receive and a slot.
    #[inline(always)]
    pub(crate) fn check_message(&mut self) -> Result<(), Blocked> {
        let lengths = self.peer.geometry().lengths;
        if lengths > 0 && self.receives_used == self.receives_seen {
            let posted = self.peer.posted();
            let ahead = posted.wrapping_sub(self.receives_used);
            if ahead > u64::from(lengths) {
                return Err(Blocked::Broken);
            }
            if ahead == 0 {
                return Err(Blocked::NoReceive);
            }
            self.receives_seen = posted;
        }
        if !self.producer.has_room() {
            self.hear_consumed()?;
            if !self.producer.has_room() {
                return Err(Blocked::NoRoom);
            }
        }
        Ok(())
    }

    /// Takes note of what the peer says it consumed.
    pub(crate) fn hear_consumed(&mut self) -> Result<u64, Blocked> {
        let consumed = self.peer.consumed();
        self.producer.consumed(consumed).map_err(|_| Blocked::Broken)?;
        self.payload.free_to(consumed);
        Ok(consumed)
    }

    /// Messages sent so far.
    pub(crate) fn sent(&self) -> u64 {
        self.producer.next_index()
    }

    /// Messages taken so far.
    pub(crate) fn taken(&self) -> u64 {
        self.consumer.next_index()
    }

    /// Whether the peer's ring takes messages without a posted receive (shared receive queue).
    pub(crate) fn peer_shares_receives(&self) -> bool {
        self.peer.geometry().lengths == 0
    }

    /// Leaves a write's immediate. [`Connection::check_message`] succeeded.
    #[inline(always)]
    pub(crate) fn push_written(&mut self, length: u64, immediate: u32) {
        self.push(KIND_WRITTEN, &[length, u64::from(immediate)]);
    }

    /// Leaves a write's immediate by itself ([`Connection::send_alone`]), once `write` placed its
    /// bytes.
    #[inline(always)]
    pub(crate) fn send_written(
        &mut self,
        (length, immediate): (u64, u32),
        write: impl FnOnce(&EndView, bool) -> bool,
    ) -> bool {
        if length > LONG_BYTES {
            self.producer.publish();
        }
        self.send_alone(KIND_WRITTEN, &[length, u64::from(immediate)], move |this| {
            write(this.peer, this.asymmetric)
        })
    }

    /// Sends `length` bytes; false when they are longer than the peer's receive, which the peer
    /// then hears. [`Connection::check_message`] succeeded.
    pub(crate) fn push_send(
        &mut self,
        local: Local<'_>,
        length: u64,
        immediate: Option<u32>,
    ) -> Result<bool, Blocked> {
        let room = self.peer.receive_length(self.receives_used);
        if room.is_some_and(|room| length > u64::from(room)) {
            self.push(KIND_TOO_LONG, &[length]);
            return Ok(false);
        }
        // Words before the bytes.
        let head = usize::from(immediate.is_some());
        let word = u64::from(immediate.unwrap_or(0));
        #[expect(clippy::cast_possible_truncation, reason = "at most seven words")]
        if length <= ((INLINE_WORDS - head) * 8) as u64 {
            let mut body = [0; INLINE_WORDS];
            body[0] = word;
            let target = (&raw mut body[head]).cast();
            // SAFETY: the words from `head` on hold `length` bytes (just compared), and the ranges
            // were checked when the request was posted.
            unsafe { local.copy_to(target) };
            let kind = if head == 1 { KIND_SEND_IMMEDIATE } else { KIND_SEND };
            let words = head + (length as usize).div_ceil(8);
            self.push(kind | (length as u32) << 8, &body[..words]);
            return Ok(true);
        }
        let mut start = self.payload.find(length);
        if start.is_none() {
            self.hear_consumed()?;
            start = self.payload.find(length);
        }
        let start = start.ok_or(Blocked::NoRoom)?;
        let place = start & (self.payload.size - 1);
        let Some(target) = self.peer.payload(place, length) else { return Err(Blocked::Broken) };
        // SAFETY: `payload` checked that the bytes lie inside the peer's area; the ranges were
        // checked when the request was posted.
        unsafe { local.copy_to(target.as_ptr()) };
        self.payload.take(self.producer.next_index(), start + length);
        let kind = if head == 1 { KIND_LONG_IMMEDIATE } else { KIND_LONG };
        self.push(kind, &[length, place, word][..2 + head]);
        Ok(true)
    }

    /// Sends a message that fits into its slot, by itself ([`Connection::send_alone`]); false also when
    /// it does not fit, or is longer than the peer's receive.
    ///
    /// # Safety
    ///
    /// `source` is valid for reads of `length` bytes.
    #[inline(always)]
    pub(crate) unsafe fn send_short(&mut self, source: *const u8, length: usize) -> bool {
        if length > INLINE_WORDS * 8 {
            return false;
        }
        let fits = move |this: Before<'_>| {
            let room = this.peer.receive_length(this.receives_used);
            room.is_none_or(|room| length <= room as usize)
        };
        if length == 8 {
            // SAFETY: eight readable bytes (caller).
            let word = unsafe { source.cast::<u64>().read_unaligned() };
            return self.send_alone(KIND_SEND | 8 << 8, &[word], fits);
        }
        let mut body = [0_u64; INLINE_WORDS];
        // SAFETY: the words hold as many bytes (just compared); the caller vouches for the source,
        // which overlaps no local array.
        unsafe { std::ptr::copy_nonoverlapping(source, (&raw mut body).cast::<u8>(), length) };
        #[expect(clippy::cast_possible_truncation, reason = "at most seven words")]
        let tag = KIND_SEND | (length as u32) << 8;
        self.send_alone(tag, &body[..length.div_ceil(8)], fits)
    }

    /// Sends one message that nothing follows for now: published at once, unless something is held
    /// back, behind which it then waits. `before` runs once there are a receive and a slot for it, and
    /// may refuse. False: it was refused or one of the two is missing, and nothing was sent.
    #[inline(always)]
    fn send_alone(
        &mut self,
        tag: u32,
        body: &[u64],
        before: impl FnOnce(Before<'_>) -> bool,
    ) -> bool {
        let plain = self.kept == 0 && self.sees_receive() && self.producer.has_room();
        if !plain && self.check_message().is_err() {
            return false;
        }
        let (peer, asymmetric, receives_used) = (&self.peer, self.asymmetric, self.receives_used);
        if !before(Before { peer, asymmetric, receives_used }) {
            return false;
        }
        if !plain {
            self.push_behind(tag, body);
            return true;
        }
        let Some(slot) = self.producer.free() else { return false };
        prefetch::for_writing(slot.address(SLOTS_TO_WRITE).cast(), 1);
        slot.push(tag, body);
        self.receives_used += 1;
        self.look_for_sleeper();
        true
    }

    /// As [`Connection::push`], and announced unless something is held back.
    #[inline(never)]
    fn push_behind(&mut self, tag: u32, body: &[u64]) {
        self.push(tag, body);
        self.announce();
    }

    #[inline(always)]
    fn push(&mut self, tag: u32, body: &[u64]) {
        // The peer has read the slot a lap ago, and holds its line still.
        prefetch::for_writing(self.producer.address(SLOTS_TO_WRITE).cast(), 1);
        self.producer.stage(tag, body);
        if self.producer.staged() >= MOST_STAGED {
            self.producer.publish();
        }
        self.receives_used += 1;
        self.kept |= UNANNOUNCED;
    }

    /// Called before `length` bytes are moved, or memory is reached by other means than a message:
    /// nobody waits for that who waits for a message.
    #[inline(always)]
    pub(crate) fn before_transfer(&mut self, length: u64) {
        if length > LONG_BYTES {
            self.producer.publish();
        }
    }

    /// Several messages follow at once.
    pub(crate) fn hold(&mut self) {
        self.kept += 1;
    }

    /// The connection is at its end, whatever is held.
    pub(crate) fn let_go(&mut self) {
        self.kept &= UNANNOUNCED;
        self.announce();
    }

    /// They are over. A hold that began before there was a connection held nothing.
    pub(crate) fn release(&mut self) {
        if self.kept & !UNANNOUNCED > 0 {
            self.kept -= 1;
        }
        self.announce();
    }

    /// Publishes what is staged, and rings the peer if it sleeps.
    #[inline(always)]
    pub(crate) fn announce(&mut self) {
        if self.kept != UNANNOUNCED {
            return;
        }
        self.kept = 0;
        self.producer.publish();
        self.look_for_sleeper();
    }

    /// Rings a peer that sleeps, behind what was published.
    #[inline(always)]
    fn look_for_sleeper(&mut self) {
        barrier::light(self.asymmetric);
        let armed = self.peer.message_arm();
        if armed != 0 {
            self.ring_for_messages(armed);
        }
    }

    /// Publishes how many receives were ever posted. What was consumed need not be: there are slots for
    /// the receives, and for what is consumed and not told, together.
    #[inline(always)]
    pub(crate) fn publish_posted(&mut self, posted: u64) {
        self.own.publish_posted(posted);
        self.look_for_waiter();
    }

    pub(crate) fn publish_consumed(&mut self) {
        let consumed = self.consumer.next_index();
        self.tell_at = consumed + u64::from(self.own.geometry().slots / 4);
        self.payload_since = 0;
        self.own.publish_consumed(consumed);
        self.look_for_waiter();
    }

    /// Rings a peer that sleeps until a receive or room is there, behind what was published.
    #[inline(always)]
    fn look_for_waiter(&mut self) {
        barrier::light(self.asymmetric);
        let armed = self.peer.credit_arm();
        if armed != 0 {
            self.ring_for_credit(armed);
        }
    }

    #[cold]
    fn ring_for_credit(&mut self, armed: u32) {
        if armed != self.rung_credit {
            self.rung_credit = armed;
            self.bell.ring();
        }
    }

    #[cold]
    fn ring_for_messages(&mut self, armed: u32) {
        if armed != self.rung_messages {
            self.rung_messages = armed;
            self.bell.ring();
        }
    }

    #[inline(always)]
    pub(crate) fn has_message(&self) -> bool {
        self.consumer.ready()
    }

    /// Called before the first message of a look is taken: asks for the slots of those that likely
    /// wait behind it, `behind` of them where the sender said so. Else no more than the last look
    /// found: a slot that is looked at before it is written has to be taken away from this
    /// processor again.
    #[inline(always)]
    pub(crate) fn look_ahead(&self, behind: u32) {
        let likely = if behind > 0 { u64::from(behind) + 1 } else { self.found_last };
        for ahead in 1..likely.min(MOST_SLOTS_AHEAD) {
            prefetch::for_reading(self.consumer.address(ahead).cast(), 1);
        }
    }

    /// Whether nothing likely waits behind the message whose head is given: [`Connection::look_ahead`]
    /// would ask for nothing.
    #[inline(always)]
    pub(crate) fn is_alone(&self, head: SlotHead) -> bool {
        head.behind == 0 && self.found_last <= 1
    }

    /// Called when a look found `count` messages.
    #[inline(always)]
    pub(crate) fn found(&mut self, count: usize) {
        self.found_last = count as u64;
    }

    /// The head of the waiting message, and how many the sender says it published behind it at the
    /// same moment.
    #[inline(always)]
    pub(crate) fn head(&self) -> Option<SlotHead> {
        self.consumer.head()
    }

    /// What the waiting message says: nonsense, or what it is, copied and checked.
    #[inline(always)]
    pub(crate) fn message(&self, head: SlotHead) -> Result<Inbound, Blocked> {
        self.decode(head.tag).ok_or(Blocked::Broken)
    }

    /// Length and immediate, where the waiting message is one of a write with immediate.
    #[inline(always)]
    pub(crate) fn written(&self, head: SlotHead) -> Option<(u64, u32)> {
        let written = head.tag & 0xFF == KIND_WRITTEN;
        written.then(|| (self.consumer.word(0), low(self.consumer.word(1))))
    }

    /// Its length, where a message is a send within its slot, without an immediate.
    #[inline(always)]
    pub(crate) fn short(head: SlotHead) -> Option<usize> {
        let length = (head.tag >> 8) as usize;
        (head.tag & 0xFF == KIND_SEND && length <= INLINE_WORDS * 8).then_some(length)
    }

    #[inline(always)]
    fn decode(&self, tag: u32) -> Option<Inbound> {
        let word = |at| self.consumer.word(at);
        let carried = u64::from(tag >> 8);
        match tag & 0xFF {
            KIND_WRITTEN => Some(Inbound::Written { length: word(0), immediate: low(word(1)) }),
            KIND_SEND if carried <= u64::from(INLINE_MESSAGE_BYTES) => {
                let bytes = Carried::Inline { first: 0 };
                Some(Inbound::Send { length: carried, immediate: None, bytes })
            }
            KIND_SEND_IMMEDIATE if carried <= u64::from(INLINE_MESSAGE_BYTES) - 8 => {
                let bytes = Carried::Inline { first: 1 };
                Some(Inbound::Send { length: carried, immediate: Some(low(word(0))), bytes })
            }
            kind @ (KIND_LONG | KIND_LONG_IMMEDIATE) => {
                let length = word(0);
                if length > u64::from(MAX_SEND_BYTES) {
                    return None;
                }
                let bytes = Carried::Payload(self.own.payload(word(1), length)?.as_ptr());
                let immediate = (kind == KIND_LONG_IMMEDIATE).then_some(low(word(2)));
                Some(Inbound::Send { length, immediate, bytes })
            }
            KIND_TOO_LONG => Some(Inbound::TooLong),
            _ => None,
        }
    }

    /// Copies what the waiting message carries in its slot.
    ///
    /// # Safety
    ///
    /// `target` is valid for writes of `length` bytes.
    #[inline(always)]
    pub(crate) unsafe fn copy_inline(&self, first: usize, target: *mut u8, length: usize) {
        let (mut place, mut left, mut target) = (first, length, target);
        if target.addr().is_multiple_of(8) {
            if length == 8 {
                // SAFETY: eight writable bytes (caller), aligned (just checked).
                let word = unsafe { AtomicU64::from_ptr(target.cast()) };
                // Release: one word that is all there is pairs with whatever acquire its poller uses.
                word.store(self.consumer.word(place), Ordering::Release);
                return;
            }
            while left >= 8 {
                // SAFETY: eight writable bytes (caller), aligned (just checked).
                let word = unsafe { AtomicU64::from_ptr(target.cast()) };
                // Relaxed: what orders words is the caller's business.
                word.store(self.consumer.word(place), Ordering::Relaxed);
                (place, left, target) = (place + 1, left - 8, target.wrapping_add(8));
            }
        }
        if left == 0 {
            return;
        }
        // Each word is taken once: what the peer scrawls meanwhile is not seen twice.
        let mut words = [0; INLINE_WORDS];
        for (at, word) in words.iter_mut().take(left.div_ceil(8)).enumerate() {
            *word = self.consumer.word(place + at);
        }
        // SAFETY: the words hold as many bytes (`decode` let no more pass); the caller vouches for
        // the target, which overlaps no local array.
        unsafe { copy(words.as_ptr().cast(), target, left) };
    }

    /// Goes past a message that took `payload_bytes` of the payload area; tells the peer every
    /// quarter ring.
    #[inline(always)]
    pub(crate) fn consume(&mut self, payload_bytes: u64) {
        self.payload_since += payload_bytes;
        self.consume_slot();
        if self.payload_since >= u64::from(self.own.geometry().payload_bytes / 4) {
            self.publish_consumed();
        }
    }

    /// As [`Connection::consume`], of a message that took none of the payload area.
    #[inline(always)]
    pub(crate) fn consume_slot(&mut self) {
        self.consumer.advance();
        if self.consumer.next_index() >= self.tell_at {
            self.publish_consumed();
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
#[inline(always)]
fn low(word: u64) -> u32 {
    word as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::object::Geometry;

    /// Sends messages of these lengths to a receiver that takes each at once and tells the sender
    /// of what it took as [`Connection::consume`] does; false when one finds no room.
    fn all_find_room(size: u32, lengths: &[u64]) -> bool {
        let mut area = PayloadArea::new(size, 256);
        let mut untold = 0;
        for (index, &length) in (0..).zip(lengths) {
            let Some(start) = area.find(length) else { return false };
            area.take(index, start + length);
            untold += length;
            if untold >= u64::from(size / 4) {
                area.free_to(index + 1);
                untold = 0;
            }
        }
        true
    }

    proptest! {
        #[test]
        fn no_message_waits_for_room_that_only_later_messages_would_make(
            lengths in proptest::collection::vec(1..=u64::from(MAX_SEND_BYTES), 1..200),
        ) {
            prop_assert!(all_find_room(*Geometry::PAYLOAD.start(), &lengths));
        }
    }

    #[test]
    fn half_the_least_area_would_stall() {
        // Taken and told; taken and not told; the longest, for which the end is too short.
        let lengths = [36 << 10, 31 << 10, u64::from(MAX_SEND_BYTES)];
        assert!(!all_find_room(*Geometry::PAYLOAD.start() / 2, &lengths));
        assert!(all_find_room(*Geometry::PAYLOAD.start(), &lengths));
    }
}
