//! The segment: the memory that both ends of one connection map. `docs/sockets.md` has the bytes.
//!
//! ```text
//! 0     header: magic, ring length, state
//! 512   end 0: signs | sending | receiving | credits | sharing   (a cache line each)
//! 1024  end 1: the same
//! 4096  ring 0: bytes from end 0 to end 1
//! 4096 + ring length   ring 1: bytes from end 1 to end 0
//! ```
//!
//! Invariants:
//! - every word is an atomic: nothing here is a Rust reference to plain memory;
//! - an end writes its own block and, of the other's, only `armed` words (to take them down);
//! - whatever the other end writes is checked by the reader: a nonsense position ends the
//!   connection with `ECONNRESET`, a nonsense sign costs a wake-up or a look at the kernel.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use beeline_os::Mapping;

use crate::ring::{Consumer, Producer, Ring};

/// First word of a segment: "BLSOCK" and the version.
pub const MAGIC: u64 = u64::from_le_bytes(*b"BLSOCK\x00\x01");
/// Bytes of the ring in each direction, unless the monitor is told otherwise.
pub const DEFAULT_RING_BYTES: usize = 256 << 10;
/// Place of the first ring.
pub const RINGS_AT: usize = 4096;
/// Place of the word that says how far the two ends came.
pub const STATE_AT: usize = 16;
const ENDS_AT: usize = 512;
const END_BYTES: usize = 512;

/// Places of the two ends' `closed` words.
pub const CLOSED_AT: [usize; 2] = [ENDS_AT + 12, ENDS_AT + END_BYTES + 12];

/// Places of the two ends' outgoing positions, for who looks on.
pub const TAILS_AT: [usize; 2] = [ENDS_AT + 80, ENDS_AT + END_BYTES + 80];

/// One end has the segment; the other may still come.
pub const STATE_OPEN: u32 = 0;
/// Both ends have it: they may leave the kernel's stream.
pub const STATE_PAIRED: u32 = 1;
/// The first end no longer waits for the other: the connection stays with the kernel.
pub const STATE_GIVEN_UP: u32 = 2;

/// What an end tells the other. Written rarely, read by the other with every message.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Signs {
    /// This end sleeps until bytes come: who sends takes it down and rings.
    pub receive_armed: AtomicU32,
    /// This end sleeps until there is room: who reads takes it down and rings.
    pub send_armed: AtomicU32,
    /// Nothing follows what is in this end's outgoing ring.
    pub finished: AtomicU32,
    /// This end was closed: [`CLOSED_CLEANLY`] or [`CLOSED_UNREAD`].
    pub closed: AtomicU32,
    /// 0 while this end sends through the kernel; afterwards one more than the bytes it had sent
    /// there. What the kernel's stream carries beyond them are doorbells.
    pub switched_at: AtomicU64,
    /// This end's process is registered for `membarrier`.
    pub asymmetric: AtomicU32,
    /// This end's kernel socket no longer carries doorbells out: waiters look by the clock.
    pub mute: AtomicU32,
}

/// Closed after everything was read: an orderly end.
pub const CLOSED_CLEANLY: u32 = 1;
/// Closed with bytes unread: the kernel resets the connection.
pub const CLOSED_UNREAD: u32 = 2;

/// The sending half of an end. Touched by that end only.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Sending {
    /// Thread that works on this half; 0 for none.
    pub holder: AtomicU32,
    _space: AtomicU32,
    /// Bytes given to the kernel before the switch.
    pub by_kernel: AtomicU64,
    /// Position of the next message in the ring.
    pub tail: AtomicU64,
    /// The other end's credits as last read.
    pub credits_seen: AtomicU64,
}

/// The receiving half of an end. Touched by that end only.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Receiving {
    /// Thread that works on this half; 0 for none.
    pub holder: AtomicU32,
    /// Nothing is received any more: `shutdown(SHUT_RD)`.
    pub shut: AtomicU32,
    /// Bytes taken from the kernel before the switch.
    pub by_kernel: AtomicU64,
    /// Position of the first message not read to its end.
    pub head: AtomicU64,
    /// Bytes of it that were read.
    pub offset: AtomicU64,
}

/// What an end has given back to the sender at the other: a cumulative position.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Credits {
    /// Everything before this position may be overwritten.
    pub consumed: AtomicU64,
}

/// What the processes and threads that share one end tell each other.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Sharing {
    /// Who would miss a doorbell that somebody else swallowed: epoll sets and sleepers.
    pub watchers: AtomicU32,
    /// More than one process has this end.
    pub processes: AtomicU32,
}

/// All words of one end.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct End {
    /// To the other end.
    pub signs: Signs,
    /// Own.
    pub sending: Sending,
    /// Own.
    pub receiving: Receiving,
    /// To the other end.
    pub credits: Credits,
    /// Own.
    pub sharing: Sharing,
}

const _: () = assert!(size_of::<End>() <= END_BYTES, "an end's words fit its block");
const _: () = assert!(CLOSED_AT[0] - ENDS_AT == std::mem::offset_of!(Signs, closed));
const _: () = assert!(
    TAILS_AT[0] - ENDS_AT
        == std::mem::offset_of!(End, sending) + std::mem::offset_of!(Sending, tail)
);
const _: () = assert!(std::mem::offset_of!(End, signs) == 0, "signs are an end's first words");
const _: () = assert!(ENDS_AT + 2 * END_BYTES <= RINGS_AT, "the blocks lie before the rings");

/// Why a segment was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the monitor sent a segment of {length} bytes that is none of ours")]
pub struct NotASegment {
    /// Its length.
    pub length: usize,
}

/// Bytes of a segment with rings of `ring_bytes`.
#[must_use]
pub const fn length_bytes(ring_bytes: usize) -> usize {
    RINGS_AT + 2 * ring_bytes
}

/// A mapped segment, seen from one end.
#[derive(Debug)]
pub struct Segment {
    mapping: Mapping,
    ring_bytes: usize,
    side: usize,
}

impl Segment {
    /// Writes the header of a fresh, zeroed segment.
    ///
    /// Errors: [`NotASegment`] when the length is none of a segment.
    pub fn format(mapping: &Mapping) -> Result<(), NotASegment> {
        let ring_bytes = ring_bytes(mapping.length_bytes())?;
        let base = mapping.base();
        // SAFETY: a segment is at least `RINGS_AT` bytes long, mapped and page-aligned.
        let words = unsafe { base.cast::<[AtomicU64; 2]>().as_ref() };
        words[1].store(ring_bytes as u64, Ordering::Relaxed);
        words[0].store(MAGIC, Ordering::Release);
        Ok(())
    }

    /// Takes `mapping` as end `side` (0 or 1) of a connection.
    ///
    /// Errors: [`NotASegment`] when length or header are none of a segment's.
    pub fn take(mapping: Mapping, side: usize) -> Result<Self, NotASegment> {
        let length = mapping.length_bytes();
        let ring_bytes = ring_bytes(length)?;
        // SAFETY: as in `format`.
        let words = unsafe { mapping.base().cast::<[AtomicU64; 2]>().as_ref() };
        let whole = words[0].load(Ordering::Acquire) == MAGIC
            && words[1].load(Ordering::Relaxed) == ring_bytes as u64
            && side < 2;
        if whole { Ok(Self { mapping, ring_bytes, side }) } else { Err(NotASegment { length }) }
    }

    /// How far the two ends came: one of the `STATE_` values, if the other end is sane.
    #[inline]
    #[must_use]
    pub fn state(&self) -> &AtomicU32 {
        // SAFETY: `STATE_AT` lies inside the header and is a multiple of four.
        let place = unsafe { self.mapping.base().add(STATE_AT) };
        // SAFETY: mapped as long as `self`; an atomic claims nothing about who else writes.
        unsafe { place.cast().as_ref() }
    }

    /// True for the end that asked first.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.side == 0
    }

    #[inline]
    fn end(&self, side: usize) -> &End {
        debug_assert!(side < 2, "a connection has two ends");
        // SAFETY: both blocks lie below `RINGS_AT`, and every segment is longer than that.
        let place = unsafe { self.mapping.base().add(ENDS_AT + side * END_BYTES) };
        // SAFETY: aligned to 512 bytes, mapped as long as `self`, and made of atomics only.
        unsafe { place.cast().as_ref() }
    }

    /// This end's words.
    #[inline]
    #[must_use]
    pub fn own(&self) -> &End {
        self.end(self.side)
    }

    /// The other end's words.
    #[inline]
    #[must_use]
    pub fn other(&self) -> &End {
        self.end(1 - self.side)
    }

    #[inline]
    fn ring(&self, side: usize) -> Ring {
        // SAFETY: `side` is 0 or 1, and the segment holds two rings from `RINGS_AT` on.
        let base = unsafe { self.mapping.base().add(RINGS_AT + side * self.ring_bytes) };
        // SAFETY: `ring_bytes` bytes from `base` are mapped, page-aligned, as long as `self`; the
        // value handed out borrows `self`.
        unsafe { Ring::new(base, self.ring_bytes) }
    }

    /// The outgoing ring. The caller holds the sending half.
    #[inline]
    #[must_use]
    pub fn producer(&self) -> Producer<'_> {
        Producer::new(self.ring(self.side), &self.own().sending, &self.other().credits)
    }

    /// The incoming ring. The caller holds the receiving half, unless it only looks.
    #[inline]
    #[must_use]
    pub fn consumer(&self) -> Consumer<'_> {
        Consumer::new(self.ring(1 - self.side), &self.own().receiving, &self.own().credits)
    }
}

fn ring_bytes(length: usize) -> Result<usize, NotASegment> {
    let rings = length.checked_sub(RINGS_AT).ok_or(NotASegment { length })?;
    let ring = rings / 2;
    let fits = ring.is_power_of_two() && (4096..=1 << 30).contains(&ring) && rings == 2 * ring;
    if fits { Ok(ring) } else { Err(NotASegment { length }) }
}
