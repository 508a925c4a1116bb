//! The connection object: one sealed memfd that both ends map (within a process, one block of memory),
//! laid out from both geometries.
//!
//! ```text
//! 0      magic "beeline-shm\0" and version, for a person with a debugger; never read
//! 512    words of the active end      1024   words of the passive end
//!          +0    consumed      u64   messages taken from the inbound ring    owner writes
//!          +8    posted        u64   receives ever posted                    owner writes
//!          +16   starved       u64   1 while a message waits for a shared receive
//!          +24   too_long      u64   index + 1 of the message that did not fit its receive
//!          +128  message_arm   u32   0, or a generation: ring when a message is published
//!          +132  credit_arm    u32   0, or a generation: ring when consumed or posted moves
//!          +136  epoch         u64   moves when a key the peer opened lost its backing
//!          +256  in_atomic     u64   1 while the owner runs an atomic on the peer's memory
//!          +264  given_up      u64   1 once the peer moves that memory without waiting longer for the
//!                                    atomic: the peer writes it, and the owner takes it back
//! 4096   inbound of the active end:  slots (64 B each), receive lengths (u32 each), payload
//! ...    inbound of the passive end: the same
//! ```
//!
//! Lines that move together are 128 bytes apart, because processors fetch lines in pairs. Each
//! word has one honest writer; the reader copies it once and checks the copy.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use beeline_fabric::FabricError;
use beeline_os::{Mapping, barrier};
use beeline_ring::slots::{Slot, SlotConsumer, SlotProducer};

use crate::MAX_SEND_BYTES;

/// Shape of one end's inbound side, as carried in connection data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Message slots.
    pub slots: u32,
    /// Published receive lengths; 0 with a shared receive queue, which publishes no credit.
    pub lengths: u32,
    /// Payload area, bytes.
    pub payload_bytes: u32,
}

impl Geometry {
    pub(crate) const SLOTS: std::ops::RangeInclusive<u32> = 16..=1 << 17;
    /// At the least, what the longest message, the room it skips at the area's end, and what the
    /// receiver has consumed and not told (a quarter) take together.
    pub(crate) const PAYLOAD: std::ops::RangeInclusive<u32> = 4 * MAX_SEND_BYTES..=16 << 20;

    /// Whether the peer's claim is one an honest peer could make.
    pub(crate) fn is_valid(self) -> bool {
        let lengths = self.lengths == 0 || self.lengths.is_power_of_two();
        self.slots.is_power_of_two()
            && Self::SLOTS.contains(&self.slots)
            && lengths
            && self.lengths <= *Self::SLOTS.end()
            && self.payload_bytes.is_power_of_two()
            && Self::PAYLOAD.contains(&self.payload_bytes)
    }

    fn inbound_bytes(self) -> usize {
        let head = self.slots as usize * 64 + self.lengths as usize * 4;
        head.next_multiple_of(4096) + self.payload_bytes as usize
    }
}

/// Which end of the object a queue pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Active,
    Passive,
}

impl End {
    fn other(self) -> Self {
        match self {
            Self::Active => Self::Passive,
            Self::Passive => Self::Active,
        }
    }

    fn words(self) -> usize {
        match self {
            Self::Active => 512,
            Self::Passive => 1024,
        }
    }
}

const HEADER: &[u8] = b"beeline-shm\0\x01\0\0\0";
const INBOUND: usize = 4096;

/// The object, mapped by one end.
#[derive(Debug)]
pub(crate) struct ConnectionObject {
    mapping: Arc<Mapping>,
    end: End,
    active: Geometry,
    passive: Geometry,
}

impl ConnectionObject {
    /// Bytes an object of these shapes has.
    pub(crate) fn length_bytes(active: Geometry, passive: Geometry) -> usize {
        INBOUND + active.inbound_bytes() + passive.inbound_bytes()
    }

    /// Wraps a mapping of [`ConnectionObject::length_bytes`] bytes.
    pub(crate) fn new(
        mapping: Arc<Mapping>,
        end: End,
        active: Geometry,
        passive: Geometry,
    ) -> Result<Self, FabricError> {
        let length = Self::length_bytes(active, passive);
        if mapping.length_bytes() != length {
            return Err(FabricError::BadConnectInfo { reason: "the shared object's size" });
        }
        let object = Self { mapping, end, active, passive };
        if end == End::Active {
            // SAFETY: the mapping is longer than the header, writable, and not yet shared.
            unsafe {
                object
                    .mapping
                    .base()
                    .as_ptr()
                    .copy_from_nonoverlapping(HEADER.as_ptr(), HEADER.len());
            }
        }
        Ok(object)
    }

    /// Where the inbound side of `end` lies.
    fn inbound(&self, end: End) -> (usize, Geometry) {
        match end {
            End::Active => (INBOUND, self.active),
            End::Passive => (INBOUND + self.active.inbound_bytes(), self.passive),
        }
    }

    fn at(&self, offset: usize, length: usize) -> NonNull<u8> {
        let inside =
            offset.checked_add(length).is_some_and(|end| end <= self.mapping.length_bytes());
        assert!(inside, "the layout stays inside the object");
        // SAFETY: just checked to lie inside the mapping.
        unsafe { self.mapping.base().add(offset) }
    }

    fn view(&self, end: End) -> EndView {
        let words = self.at(end.words(), 512);
        let (start, geometry) = self.inbound(end);
        let slots = self.at(start, geometry.slots as usize * 64).cast();
        let lengths_at = start + geometry.slots as usize * 64;
        let lengths = self.at(lengths_at, geometry.lengths as usize * 4).cast();
        let payload_at = start + geometry.inbound_bytes() - geometry.payload_bytes as usize;
        let payload = self.at(payload_at, geometry.payload_bytes as usize);
        EndView { words, slots, lengths, payload, geometry }
    }

    /// All words of the object, for tests that play a peer which scribbles over them.
    #[cfg(test)]
    pub(crate) fn all_words(&self) -> (NonNull<AtomicU64>, usize) {
        (self.mapping.base().cast(), self.mapping.length_bytes() / 8)
    }

    /// The words, rings and areas that this end owns, and the peer's.
    pub(crate) fn views(&self) -> (EndView, EndView) {
        (self.view(self.end), self.view(self.end.other()))
    }

    /// Moves this end's epoch; called when a key the peer opened loses its backing. Returns
    /// whether the peer is inside an atomic right now through the given closure later.
    pub(crate) fn publish_epoch(&self, epoch: u64) {
        // Pairs with the acquire in `EndView::epoch` at the peer.
        self.view(self.end).word(136).store(epoch, Ordering::Release);
    }

    /// Whether the peer announces an atomic in progress.
    pub(crate) fn peer_is_in_atomic(&self) -> bool {
        // Pairs with the release in `EndView::leave_atomic` at the peer.
        self.view(self.end.other()).word(256).load(Ordering::Acquire) != 0
    }

    /// Tells a peer that is still inside an atomic that this end waits for it no more. The peer leaves by
    /// storing one word and then loading the other, with a light fence between ([`EndView::leave_atomic`]);
    /// here the words are the other way round, with the heavy fence. So at least one side sees the other's
    /// store: a peer that is still inside will see ours.
    pub(crate) fn give_up_atomic(&self) {
        let peer = self.view(self.end.other());
        // Pairs with the acquire in `leave_atomic`. Where it was said before, of an earlier atomic, it stays
        // said: the peer may be between its two words, and this end no longer knows whether it waited.
        if peer.word(264).swap(1, Ordering::AcqRel) != 0 {
            return;
        }
        barrier::heavy();
        if !self.peer_is_in_atomic() {
            // It has just left, and its operation is part of what moves. Where it saw the word none the
            // less, its request ends as one of unknown outcome.
            peer.word(264).store(0, Ordering::Release);
        }
    }
}

/// One end's words, inbound ring and areas. Valid while the object it came from lives; kept beside
/// an `Arc` of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndView {
    words: NonNull<u8>,
    slots: NonNull<Slot>,
    lengths: NonNull<AtomicU32>,
    payload: NonNull<u8>,
    geometry: Geometry,
}

impl EndView {
    #[inline(always)]
    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset < 512 && offset.is_multiple_of(8), "a word of the block");
        // SAFETY: `offset` is one of this module's constants below the block's 512 bytes.
        let word = unsafe { self.words.add(offset) };
        // SAFETY: mapped while the object lives, aligned, and only reached through atomics.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }
    }

    #[inline(always)]
    fn half_word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset < 512 && offset.is_multiple_of(4), "a word of the block");
        // SAFETY: as in `word`.
        let word = unsafe { self.words.add(offset) };
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The owner's count of consumed messages. A claim, at the peer.
    pub(crate) fn consumed(&self) -> u64 {
        // Pairs with the release in `publish_consumed`.
        self.word(0).load(Ordering::Acquire)
    }

    pub(crate) fn publish_consumed(&self, consumed: u64) {
        // Pairs with the acquire in `consumed`: slots and payload are free once it is seen.
        self.word(0).store(consumed, Ordering::Release);
    }

    /// The owner's count of receives ever posted. A claim, at the peer.
    pub(crate) fn posted(&self) -> u64 {
        // Pairs with the release in `publish_posted`.
        self.word(8).load(Ordering::Acquire)
    }

    pub(crate) fn publish_posted(&self, posted: u64) {
        // Pairs with the acquire in `posted`: the lengths are there once it is seen.
        self.word(8).store(posted, Ordering::Release);
    }

    /// A message waits for a shared receive. A claim, at the peer.
    pub(crate) fn is_starved(&self) -> bool {
        self.word(16).load(Ordering::Relaxed) != 0
    }

    pub(crate) fn set_starved(&self, starved: bool) {
        // A hint for the peer's timer; nothing is ordered by it.
        self.word(16).store(u64::from(starved), Ordering::Relaxed);
    }

    /// Index + 1 of the message that did not fit its receive; 0 for none. A claim, at the peer.
    pub(crate) fn too_long(&self) -> u64 {
        self.word(24).load(Ordering::Acquire)
    }

    pub(crate) fn set_too_long(&self, index: u64) {
        // Pairs with the acquire in `too_long`.
        self.word(24).store(index + 1, Ordering::Release);
    }

    /// Generation for which the owner wants a ring on messages; 0 for none.
    #[inline(always)]
    pub(crate) fn message_arm(&self) -> u32 {
        // Ordered after the published slot by the fence of `barrier::light`.
        self.half_word(128).load(Ordering::Relaxed)
    }

    pub(crate) fn set_message_arm(&self, generation: u32) {
        // Ordered before the second look by the fence of `barrier::heavy`.
        self.half_word(128).store(generation, Ordering::Relaxed);
    }

    /// Generation for which the owner wants a ring on credit; 0 for none.
    #[inline(always)]
    pub(crate) fn credit_arm(&self) -> u32 {
        // As `message_arm`.
        self.half_word(132).load(Ordering::Relaxed)
    }

    pub(crate) fn set_credit_arm(&self, generation: u32) {
        // As `set_message_arm`.
        self.half_word(132).store(generation, Ordering::Relaxed);
    }

    /// Moves when keys opened through this connection lost their backing.
    #[inline(always)]
    pub(crate) fn epoch(&self) -> u64 {
        // Pairs with the release in `ConnectionObject::publish_epoch`.
        self.word(136).load(Ordering::Acquire)
    }

    /// Announces an atomic; the owner then fences and checks the peer's epoch.
    #[inline(always)]
    pub(crate) fn enter_atomic(&self) {
        self.word(256).store(1, Ordering::Relaxed);
    }

    /// Leaves the atomic; false when the peer moved its memory meanwhile without waiting for it, so
    /// that nobody knows whether the operation took effect.
    #[inline(always)]
    pub(crate) fn leave_atomic(&self, asymmetric: bool) -> bool {
        // Pairs with the acquire in `peer_is_in_atomic`: an owner that sees it sees what the operation stored.
        self.word(256).store(0, Ordering::Release);
        // Pairs with the heavy fence in `give_up_atomic`.
        barrier::light(asymmetric);
        self.word(264).load(Ordering::Acquire) == 0
    }

    /// Leaves an atomic whose operation was not done: whether it was waited for does not matter.
    pub(crate) fn withdraw_atomic(&self) {
        self.word(256).store(0, Ordering::Release);
        // Release: behind the other, so that a peer that gives up between the two finds it left, or has
        // its word taken back.
        self.word(264).store(0, Ordering::Release);
    }

    /// Published length of the `index`th receive; nothing with a shared receive queue.
    #[inline(always)]
    pub(crate) fn receive_length(&self, index: u64) -> Option<u32> {
        let mask = self.geometry.lengths.checked_sub(1)?;
        Some(self.length_word(index, mask).load(Ordering::Relaxed))
    }

    /// Publishes that the `index`th receive takes `length` bytes, or the most that can be said.
    #[inline(always)]
    pub(crate) fn publish_receive_length(&self, index: u64, length: u64) {
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        let Some(mask) = self.geometry.lengths.checked_sub(1) else { return };
        let word = self.length_word(index, mask);
        // Where it is there already, as it mostly is, the peer keeps its copy of the line.
        if word.load(Ordering::Relaxed) != length {
            // Ordered by the release of `publish_posted` that follows.
            word.store(length, Ordering::Relaxed);
        }
    }

    /// `mask`: one less than the number of lengths.
    #[inline(always)]
    fn length_word(&self, index: u64, mask: u32) -> &AtomicU32 {
        // SAFETY: below the number of lengths, a power of two.
        let word = unsafe { self.lengths.add((index & u64::from(mask)) as usize) };
        // SAFETY: mapped while the object lives, aligned, and only reached through atomics.
        unsafe { word.as_ref() }
    }

    /// Start of `length` payload bytes at `offset`, if they lie inside the area.
    #[inline(always)]
    pub(crate) fn payload(&self, offset: u64, length: u64) -> Option<NonNull<u8>> {
        let end = offset.checked_add(length)?;
        if end > u64::from(self.geometry.payload_bytes) {
            return None;
        }
        // SAFETY: just checked to lie inside the area.
        Some(unsafe { self.payload.add(usize::try_from(offset).ok()?) })
    }

    /// The producing side of this end's inbound ring; for the peer of its owner, once.
    pub(crate) fn producer(&self) -> SlotProducer {
        // SAFETY: the slots are mapped while the object lives, which the caller keeps beside the
        // producer; a queue pair takes it once.
        unsafe { SlotProducer::new(self.slots, self.geometry.slots) }
    }

    /// The consuming side of this end's inbound ring; for its owner, once.
    pub(crate) fn consumer(&self) -> SlotConsumer {
        // SAFETY: as in `producer`.
        unsafe { SlotConsumer::new(self.slots, self.geometry.slots) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends of one object.
    fn ends() -> [ConnectionObject; 2] {
        let payload_bytes = *Geometry::PAYLOAD.start();
        let geometry = Geometry { slots: 16, lengths: 16, payload_bytes };
        let length = ConnectionObject::length_bytes(geometry, geometry);
        let mapping = Arc::new(Mapping::anonymous(length).unwrap());
        [End::Active, End::Passive].map(|end| {
            ConnectionObject::new(Arc::clone(&mapping), end, geometry, geometry).unwrap()
        })
    }

    #[test]
    fn an_atomic_that_nobody_waits_for_hears_it_and_no_other_one_does() {
        let [owner, peer] = ends();
        let (own, _) = peer.views();
        own.enter_atomic();
        assert!(owner.peer_is_in_atomic());
        assert!(own.leave_atomic(true), "waited for");
        assert!(!owner.peer_is_in_atomic());
        // Given up a moment after it left.
        owner.give_up_atomic();
        own.enter_atomic();
        assert!(own.leave_atomic(true), "the next one has nothing to do with it");
        // Given up before it was done: it is done again, on what is there by then.
        own.enter_atomic();
        owner.give_up_atomic();
        own.withdraw_atomic();
        own.enter_atomic();
        assert!(own.leave_atomic(true), "the second try was waited for");
        own.enter_atomic();
        owner.give_up_atomic();
        assert!(!own.leave_atomic(true), "nobody knows what became of it");
        // Given up twice, the second time when it had left and not looked yet.
        let [owner, peer] = ends();
        let (own, _) = peer.views();
        own.enter_atomic();
        owner.give_up_atomic();
        own.word(256).store(0, Ordering::Release);
        owner.give_up_atomic();
        assert!(!own.leave_atomic(true), "the first memory was not waited for");
    }
}
