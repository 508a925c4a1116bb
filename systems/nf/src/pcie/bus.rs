//! What the link is made of: memory that both sides map, doorbells, interrupts, and its pace.
//!
//! The memory is a memfd of 64-bit words; both sides reach it through atomics only. A doorbell wakes
//! the card, an interrupt wakes the host, each by an eventfd. A word that crosses the link becomes
//! visible on the other side when the link's pace says so: the writer stores the time beside it, and
//! the reader takes the word for absent until then.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use beeline_os::poller::Waker;
use beeline_os::{Mapping, MappingError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};

/// How fast the link is. Zeros: as fast as memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// One way through the link, in nanoseconds.
    pub delay_ns: u64,
    /// Bytes a second in each direction; 0 for no limit.
    pub bytes_per_second: u64,
}

/// Where words go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the card.
    Down,
    /// To the host.
    Up,
}

/// Operations on the link so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Counts {
    /// Doorbells and other registers that the host wrote.
    pub mmio_writes: u64,
    /// Registers that the host read.
    pub mmio_reads: u64,
    /// Reads of host memory by the card.
    pub dma_reads: u64,
    /// Writes to host memory by the card.
    pub dma_writes: u64,
    /// Interrupts.
    pub interrupts: u64,
    /// Notices that a work queue did not send, because the reader was awake.
    pub suppressed: u64,
}

/// The link could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BusError {
    /// Its memory.
    #[error("the link's memory: {0}")]
    Memory(#[from] MappingError),
    /// Its doorbells.
    #[error("the link's doorbells: {0}")]
    Doorbell(io::Error),
    /// Memory of something else.
    #[error("the memory is no link of version {VERSION}: its first words are {0:#x} and {1}")]
    Foreign(u64, u64),
}

/// First word of the memory.
pub const MAGIC: u64 = 0x6265_656c_7063_6965;
/// Layout of the memory.
pub const VERSION: u64 = 1;
/// Words before the slots.
pub(super) const HEADER: usize = 16;

/// The link's memory, doorbells and pace.
#[derive(Debug)]
pub struct Bus {
    memory: Mapping,
    pace: Pace,
    card: Waker,
    host: Vec<Waker>,
    /// When each direction's wires are free again.
    busy: [AtomicU64; 2],
    mmio_writes: AtomicU64,
    mmio_reads: AtomicU64,
    dma_reads: AtomicU64,
    dma_writes: AtomicU64,
    interrupts: AtomicU64,
    suppressed: AtomicU64,
}

/// Nanoseconds of the machine's steady clock.
#[must_use]
pub fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

impl Bus {
    /// A link with `words` words of memory behind its header, and an interrupt for each of `vectors`.
    ///
    /// Errors: the system gives no memory or no doorbells.
    pub fn new(words: usize, vectors: usize, pace: Pace) -> Result<Self, BusError> {
        let memory = Mapping::memfd("beeline-nf-link", (HEADER + words) * 8)?;
        let wakers = (0..vectors).map(|_| Waker::new()).collect::<io::Result<Vec<_>>>();
        let bus = Self {
            memory,
            pace,
            card: Waker::new().map_err(BusError::Doorbell)?,
            host: wakers.map_err(BusError::Doorbell)?,
            busy: [AtomicU64::new(0), AtomicU64::new(0)],
            mmio_writes: AtomicU64::new(0),
            mmio_reads: AtomicU64::new(0),
            dma_reads: AtomicU64::new(0),
            dma_writes: AtomicU64::new(0),
            interrupts: AtomicU64::new(0),
            suppressed: AtomicU64::new(0),
        };
        bus.word(1).store(VERSION, Ordering::Relaxed);
        // Last: a reader that sees the magic sees the version.
        bus.word(0).store(MAGIC, Ordering::Release);
        Ok(bus)
    }

    /// Looks whether the memory is that of a link, as a process does that was handed it.
    ///
    /// Errors: it is not.
    pub fn check(&self) -> Result<(), BusError> {
        let magic = self.word(0).load(Ordering::Acquire);
        let version = self.word(1).load(Ordering::Relaxed);
        if (magic, version) == (MAGIC, VERSION) {
            Ok(())
        } else {
            Err(BusError::Foreign(magic, version))
        }
    }

    /// The pace.
    #[must_use]
    pub fn pace(&self) -> Pace {
        self.pace
    }

    /// A word of the memory.
    ///
    /// # Panics
    /// Past the end.
    #[must_use]
    #[inline]
    pub fn word(&self, at: usize) -> &AtomicU64 {
        let words = self.memory.length_bytes() / 8;
        assert!(at < words, "word {at} lies inside the link's {words} words");
        // SAFETY: the word lies inside the mapping (asserted above).
        let word = unsafe { self.memory.base().cast::<u64>().add(at) };
        // SAFETY: mapped and aligned while `self` is borrowed; every party uses atomics.
        unsafe { AtomicU64::from_ptr(word.as_ptr()) }
    }

    /// Words of the memory in a row.
    ///
    /// # Panics
    /// Past the end.
    #[must_use]
    #[inline]
    pub fn words(&self, at: usize, count: usize) -> &[AtomicU64] {
        let words = self.memory.length_bytes() / 8;
        let inside = at.checked_add(count).is_some_and(|end| end <= words);
        assert!(inside, "{count} words from {at} on lie inside the link's {words} words");
        // SAFETY: the words lie inside the mapping (asserted above).
        let first = unsafe { self.memory.base().cast::<AtomicU64>().add(at) };
        // SAFETY: `count` words from there are mapped and aligned while `self` is borrowed; an atomic
        // word is laid out as a plain one, and every party uses atomics.
        unsafe { std::slice::from_raw_parts(first.as_ptr(), count) }
    }

    /// When `bytes` that leave now are there; 0 for at once.
    #[must_use]
    #[inline]
    pub fn arrival(&self, direction: Direction, bytes: usize) -> u64 {
        if self.pace == Pace::default() {
            return 0;
        }
        self.arrival_after(now_ns(), direction, bytes)
    }

    /// When `bytes` that leave at `time` or later are there.
    #[must_use]
    pub fn arrival_after(&self, time: u64, direction: Direction, bytes: usize) -> u64 {
        let rate = u128::from(self.pace.bytes_per_second);
        let wires = (bytes as u128 * 1_000_000_000).checked_div(rate).unwrap_or(0);
        let wires = u64::try_from(wires).unwrap_or(u64::MAX / 4);
        let busy = &self.busy[usize::from(direction == Direction::Up)];
        let mut free = busy.load(Ordering::Relaxed);
        loop {
            let end = free.max(time) + wires;
            match busy.compare_exchange_weak(free, end, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return end + self.pace.delay_ns,
                Err(other) => free = other,
            }
        }
    }

    /// When a read of `bytes` of the other side's memory that begins now is done: the question goes
    /// there, the words come back.
    #[must_use]
    pub fn round_trip(&self, answer: Direction, bytes: usize) -> u64 {
        if self.pace == Pace::default() {
            return 0;
        }
        self.arrival_after(now_ns() + self.pace.delay_ns, answer, bytes)
    }

    /// True from that time on.
    #[must_use]
    #[inline]
    pub fn reached(&self, time: u64) -> bool {
        time == 0 || now_ns() >= time
    }

    /// Waits until then: the side that reads the other's memory stands still.
    pub fn stand_until(&self, time: u64) {
        while !self.reached(time) {
            std::hint::spin_loop();
        }
    }

    /// The host writes a doorbell register.
    pub fn ring_card(&self) {
        self.mmio_writes.fetch_add(1, Ordering::Relaxed);
        self.card.wake();
    }

    /// The card raises an interrupt.
    pub fn interrupt(&self, vector: usize) {
        self.interrupts.fetch_add(1, Ordering::Relaxed);
        self.host[vector].wake();
    }

    /// Ends the sleep of whatever waits for `vector`, without an operation on the link.
    pub fn nudge_host(&self, vector: usize) {
        self.host[vector].wake();
    }

    /// Ends the card's sleep, without an operation on the link.
    pub fn wake_card(&self) {
        self.card.wake();
    }

    /// Readable when a doorbell was rung.
    #[must_use]
    pub fn card_bell(&self) -> BorrowedFd<'_> {
        self.card.as_fd()
    }

    /// Forgets the doorbells so far; what they announced is looked for after this.
    pub fn clear_card(&self) {
        self.card.clear();
    }

    /// Readable when the interrupt came.
    #[must_use]
    pub fn host_bell(&self, vector: usize) -> BorrowedFd<'_> {
        self.host[vector].as_fd()
    }

    /// Forgets the interrupts of a vector so far.
    pub fn clear_host(&self, vector: usize) {
        self.host[vector].clear();
    }

    pub(super) fn count_register(&self, read: bool) {
        let counter = if read { &self.mmio_reads } else { &self.mmio_writes };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_dma(&self, read: bool) {
        let counter = if read { &self.dma_reads } else { &self.dma_writes };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_suppressed(&self) {
        self.suppressed.fetch_add(1, Ordering::Relaxed);
    }

    /// Operations so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            mmio_writes: of(&self.mmio_writes),
            mmio_reads: of(&self.mmio_reads),
            dma_reads: of(&self.dma_reads),
            dma_writes: of(&self.dma_writes),
            interrupts: of(&self.interrupts),
            suppressed: of(&self.suppressed),
        }
    }
}

/// Sleeps until one of the bells is readable, or `limit` has passed. An interrupted sleep counts as
/// one that ended.
///
/// Errors: the system's.
pub fn sleep_on(bells: &[BorrowedFd<'_>], limit: Duration) -> io::Result<()> {
    let mut list: Vec<PollFd<'_>> =
        bells.iter().map(|bell| PollFd::from_borrowed_fd(*bell, PollFlags::IN)).collect();
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    match poll(&mut list, Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
