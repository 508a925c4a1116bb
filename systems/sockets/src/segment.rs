//! The segment: the memory that both ends of one connection map. `docs/sockets-internals.md` has the bytes.
//!
//! ```text
//! 0     header: magic, ring length, state, name at the relay | holders
//! 512   end 0: signs | sending | receiving | credits | sharing   (a cache line each)
//! 1024  end 1: the same
//! 1536  board of end 0, then that of end 1
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

/// Version of the memory. A program maps no segment of another one, and [looks for its
/// monitor](crate::control::name) under a name that has it.
pub const VERSION: u8 = 7;
/// First word of a segment: "BLSOCK" and the version.
pub const MAGIC: u64 = u64::from_le_bytes([b'B', b'L', b'S', b'O', b'C', b'K', 0, VERSION]);
/// Bytes of the ring in each direction, unless the monitor is told otherwise.
pub const DEFAULT_RING_BYTES: usize = 256 << 10;
/// Place of the first ring.
pub const RINGS_AT: usize = 4096;
/// Place of the word that says how far the two ends came.
pub const STATE_AT: usize = 16;
/// Place of the name that a relayed connection has at its relay; 0 where both ends are here.
pub const NAME_AT: usize = 24;
/// Processes that can have the end of a relayed connection and be known by number.
pub const HOLDERS: usize = 32;
const ENDS_AT: usize = 512;
const END_BYTES: usize = 512;
const BOARDS_AT: usize = ENDS_AT + 2 * END_BYTES;
/// Words of a board.
pub const BOARD_WORDS: usize = 128;

/// The first words of a segment.
#[repr(C, align(64))]
struct Header {
    magic: AtomicU64,
    ring_bytes: AtomicU64,
    state: AtomicU32,
    _space: AtomicU32,
    name: AtomicU64,
    births: AtomicU32,
    _space_too: AtomicU32,
    cookies: [AtomicU64; 2],
    _line: AtomicU64,
    processes: [AtomicU32; HOLDERS],
    sharers: [SharersWords; 2],
}

/// The holders of an end, as [`crate::together`] has it.
#[repr(C)]
struct SharersWords {
    coming: AtomicU32,
    _space: AtomicU32,
    names: [AtomicU64; SHARERS],
}

/// Processes that can have an end and be known by name.
pub const SHARERS: usize = 16;

/// The holders of an end: see [`crate::together`].
#[derive(Debug)]
pub struct Sharers<'a> {
    /// Processes on their way.
    pub coming: &'a AtomicU32,
    /// Names of processes; 0 for an empty place.
    pub names: &'a [AtomicU64; SHARERS],
}

/// The header of a mapping that is at least [`RINGS_AT`] bytes long.
fn header(mapping: &Mapping) -> &Header {
    assert!(mapping.length_bytes() >= RINGS_AT, "a segment has a header");
    // SAFETY: mapped as long as the value handed out borrows `mapping`, page-aligned, and made of
    // atomics only, which claim nothing about who else writes.
    unsafe { mapping.base().cast().as_ref() }
}

/// Places of the kernel's numbers of the two ends' sockets, where both ends are here: for who finds the
/// memory and looks for its connection. 0: not told. What a program writes there is its own affair.
pub const COOKIES_AT: [usize; 2] = [40, 48];

/// Place of the first of [`HOLDERS`] numbers of processes that have the end of a relayed connection, four bytes each.
pub const HOLDERS_AT: usize = 64;

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
/// Between hosts, at the end whose relay promised it to the other one: the library does not leave the
/// kernel's stream yet, and may not give up any more. The relay makes it paired or given up, as the
/// other one answers.
pub const STATE_MATCHING: u32 = 3;
/// Both ends are the kernel's again: their `returned_at` words hold ([`crate::recall`]).
pub const STATE_RETURNED: u32 = 4;

/// What an end tells the other. Written rarely, read by the other with every message.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Signs {
    /// This end sleeps until bytes come: who sends rings. 0, [`crate::wake::EACH`], the name of
    /// one sleep on many ends, which is rung for once, or a place on a [`Board`].
    pub receive_armed: AtomicU64,
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
    /// This end sleeps until there is room: who reads takes it down and rings.
    pub send_armed: AtomicU64,
    _space: AtomicU32,
    /// This end's program has mapped the segment: whoever asked may have lost the answer.
    pub present: AtomicU32,
    /// 0, or one more than the bytes this end had given to the kernel, doorbells and all, when the
    /// connection went back there ([`crate::recall`]): what follows them is the program's.
    pub returned_at: AtomicU64,
    /// A name of this end's program: its other connections have the same. A hint.
    pub program: AtomicU64,
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
    /// Where `tail` is going: another position than it only while a message is being published, or where a thread
    /// was killed meanwhile. A relay, whom no sender follows, leaves it as it is.
    pub bound: AtomicU64,
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
    /// Bytes of it that were read, in the lower 16 bits, below the lower 48 of the head that they are of.
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
    /// Whether more than one process has this end, and how often that changed: see [`crate::together`].
    pub processes: AtomicU32,
    /// Threads that send or swallow doorbells at this moment; the highest bit: nobody may any more.
    pub at_bells: AtomicU32,
    /// This end asked [anew](crate::anew): `origins` hold.
    pub is_anew: AtomicU32,
    /// What the counts of bytes given to the kernel and taken from it are ahead of the kernel's own
    /// ([`crate::kernel::counted`]): a socket that was restored elsewhere counts from 0 again.
    pub origins: [AtomicU64; 2],
    /// How long this end is not to ask anew, in nanoseconds; taken down by who reads it. No time of a
    /// clock: processes that were restored have clocks of their own.
    pub hold_ns: AtomicU64,
    /// Threads that sleep for room, to be woken by a doorbell: see [`crate::recall`].
    pub for_room: AtomicU32,
    /// Of those that `at_bells` counts, the numbers of some: who was killed there is seen to be dead.
    pub ringing: [AtomicU32; 5],
}

/// Where the senders of one other program note which connections have news for an epoll set of this
/// end's: of all connections between the two, one lends it ([`crate::board`]).
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Board {
    /// Of which set; 0: nobody's.
    pub name: AtomicU64,
    /// 0 while the set is awake, else the name of its sleep.
    pub sleep: AtomicU64,
    _line: [AtomicU64; 6],
    /// A bit for each connection: it has news. Set by the other end, taken down by this one.
    pub words: [AtomicU64; BOARD_WORDS],
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
const _: () = assert!(size_of::<Signs>() == 64, "the signs are one line");
const _: () = assert!(size_of::<Sharing>() == 64, "what is shared is one line");
const _: () = assert!(
    TAILS_AT[0] - ENDS_AT
        == std::mem::offset_of!(End, sending) + std::mem::offset_of!(Sending, tail)
);
const _: () = assert!(std::mem::offset_of!(End, signs) == 0, "signs are an end's first words");
const _: () = assert!(size_of::<Header>() <= ENDS_AT, "the header lies before the ends");
const _: () = assert!(std::mem::offset_of!(Header, state) == STATE_AT);
const _: () = assert!(std::mem::offset_of!(Header, name) == NAME_AT);
const _: () = assert!(std::mem::offset_of!(Header, cookies) == COOKIES_AT[0]);
const _: () = assert!(std::mem::offset_of!(Header, processes) == HOLDERS_AT);
const _: () = assert!(std::mem::offset_of!(Header, sharers) == 192);
const _: () =
    assert!(BOARDS_AT + 2 * size_of::<Board>() <= RINGS_AT, "the boards lie before the rings");

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
    name: u64,
    file: u64,
}

/// Who has the program's end of a relayed connection. Inside a host the kernel's stream ends when
/// the last copy of its socket is closed; here the relay has a copy, too, and has to be told.
#[derive(Debug)]
pub struct Holders<'a> {
    processes: &'a [AtomicU32; HOLDERS],
    births: &'a AtomicU32,
}

impl Holders<'_> {
    /// Numbers of processes; 0 for an empty place.
    #[must_use]
    pub fn processes(&self) -> &[AtomicU32; HOLDERS] {
        self.processes
    }

    /// Holders on their way, which say so when they arrive: children of a `fork`, receivers of a
    /// message. A hint: the way may have failed.
    #[must_use]
    pub fn births(&self) -> u32 {
        self.births.load(Ordering::SeqCst)
    }

    /// One more is on its way.
    pub fn expect_one(&self) {
        self.births.fetch_add(1, Ordering::SeqCst);
    }

    /// One that was on its way has arrived, or will not.
    pub fn expected_one(&self) {
        let less = |births: u32| births.checked_sub(1);
        let _ = self.births.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }

    /// `process` has the end. True when it is news to the relay, which wants a bell. With no place
    /// left it counts as on its way, as long as the relay's patience lasts.
    pub fn add(&self, process: u32) -> bool {
        if self.processes.iter().any(|place| place.load(Ordering::SeqCst) == process) {
            return false;
        }
        let take = |place: &AtomicU32| {
            place.compare_exchange(0, process, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        if !self.processes.iter().any(take) {
            self.births.fetch_add(1, Ordering::SeqCst);
        }
        true
    }

    /// `process` has it no more. True when nobody has, and nobody is on its way: of several that
    /// leave at once, at least the last sees it.
    pub fn remove(&self, process: u32) -> bool {
        for place in self.processes {
            let _ = place.compare_exchange(process, 0, Ordering::SeqCst, Ordering::SeqCst);
        }
        self.births() == 0 && self.processes.iter().all(|place| place.load(Ordering::SeqCst) == 0)
    }
}

impl Segment {
    /// Writes the header of a fresh, zeroed segment.
    ///
    /// Errors: [`NotASegment`] when the length is none of a segment.
    pub fn format(mapping: &Mapping) -> Result<(), NotASegment> {
        let ring_bytes = ring_bytes(mapping.length_bytes())?;
        let header = header(mapping);
        header.ring_bytes.store(ring_bytes as u64, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(())
    }

    /// As [`Segment::format`], of a connection to another host that `process` asked for: its relay
    /// is to be end 1 and knows it by `name`, which is not 0.
    ///
    /// Errors: [`NotASegment`] when the length is none of a segment.
    pub fn format_relayed(mapping: &Mapping, name: u64, process: u32) -> Result<(), NotASegment> {
        ring_bytes(mapping.length_bytes())?;
        let header = header(mapping);
        header.name.store(name, Ordering::Relaxed);
        header.processes[0].store(process, Ordering::Relaxed);
        Self::format(mapping)
    }

    /// Takes `mapping` as end `side` (0 or 1) of a connection.
    ///
    /// Errors: [`NotASegment`] when length or header are none of a segment's.
    pub fn take(mapping: Mapping, side: usize) -> Result<Self, NotASegment> {
        let length = mapping.length_bytes();
        let ring_bytes = ring_bytes(length)?;
        let words = header(&mapping);
        let whole = words.magic.load(Ordering::Acquire) == MAGIC
            && words.ring_bytes.load(Ordering::Relaxed) == ring_bytes as u64
            && side < 2;
        // Read once: whoever changes it later changes nothing.
        let name = words.name.load(Ordering::Relaxed);
        let file = mapping.descriptor().and_then(|file| rustix::fs::fstat(&*file).ok());
        if whole {
            let file = file.map_or(0, |about| about.st_ino);
            Ok(Self { mapping, ring_bytes, side, name, file })
        } else {
            Err(NotASegment { length })
        }
    }

    /// What the relay calls the connection, if its other end is in another host.
    #[inline]
    #[must_use]
    pub fn relayed(&self) -> Option<u64> {
        (self.name != 0).then_some(self.name)
    }

    /// The memory's number as a file, the same for all who map it, and the kernel's choice; 0 where it was
    /// taken without a descriptor.
    #[must_use]
    pub fn file(&self) -> u64 {
        self.file
    }

    /// Bytes of each ring.
    #[must_use]
    pub fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    /// The memory, of which rings begin at [`RINGS_AT`]: for who registers it with a device.
    #[must_use]
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Who has the program's end of a relayed connection.
    #[must_use]
    pub fn holders(&self) -> Holders<'_> {
        let Header { processes, births, .. } = header(&self.mapping);
        Holders { processes, births }
    }

    /// Which processes have this end.
    #[must_use]
    pub fn own_sharers(&self) -> Sharers<'_> {
        debug_assert!(self.side < 2, "a connection has two ends");
        let SharersWords { coming, names, .. } = &header(&self.mapping).sharers[self.side];
        Sharers { coming, names }
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

    /// Which of the two the own end is: 0 or 1.
    #[must_use]
    pub fn side(&self) -> usize {
        self.side
    }

    /// The other end's words.
    #[inline]
    #[must_use]
    pub fn other(&self) -> &End {
        self.end(1 - self.side)
    }

    #[inline]
    fn board(&self, side: usize) -> &Board {
        debug_assert!(side < 2, "a connection has two ends");
        // SAFETY: both boards lie below `RINGS_AT`, and every segment is longer than that.
        let place = unsafe { self.mapping.base().add(BOARDS_AT + side * size_of::<Board>()) };
        // SAFETY: aligned to 64 bytes, mapped as long as `self`, and made of atomics only.
        unsafe { place.cast().as_ref() }
    }

    /// The board on which the other end's program notes.
    #[inline]
    #[must_use]
    pub fn own_board(&self) -> &Board {
        self.board(self.side)
    }

    /// The board on which this end's program notes.
    #[inline]
    #[must_use]
    pub fn other_board(&self) -> &Board {
        self.board(1 - self.side)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relayed_segment_has_a_name_and_counts_who_holds_it() {
        let mapping = Mapping::anonymous(length_bytes(4096)).unwrap();
        Segment::format(&mapping).unwrap();
        assert_eq!(Segment::take(mapping, 0).unwrap().relayed(), None);
        let mapping = Mapping::anonymous(length_bytes(4096)).unwrap();
        Segment::format_relayed(&mapping, 77, 5).unwrap();
        let segment = Segment::take(mapping, 0).unwrap();
        assert_eq!(segment.relayed(), Some(77));
        assert_eq!(segment.state().load(Ordering::Relaxed), STATE_OPEN);
        let holders = segment.holders();
        assert!(!holders.add(5), "the program that asked is no news");
        // A fork: the parent may leave before the child arrives.
        holders.expect_one();
        assert!(!holders.remove(5));
        assert!(holders.add(6));
        holders.expected_one();
        assert!(holders.remove(6));
        // A place for each of so many, then one that is on its way.
        (1..=HOLDERS as u32).for_each(|process| assert!(holders.add(process)));
        assert_eq!(holders.births(), 0);
        assert!(holders.add(1000));
        assert_eq!(holders.births(), 1);
        (1..=HOLDERS as u32).for_each(|process| assert!(!holders.remove(process)));
        holders.expected_one();
        holders.expected_one();
        assert!(holders.remove(1000));
    }
}
