//! Both directions of a window.
//!
//! Invariants: [`Outbound`] has no call that reads; every access is checked against the range; the
//! other host may change [`Inbound`] at any moment, so it is reached through atomics and copies.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use beeline_os::Mapping;
use beeline_os::words::copy_words;
use beeline_os::write_back::store_fence;

/// Bytes of the emulated bus's unit: parts of a window begin at a multiple.
pub const LINE_BYTES: usize = 64;

/// A range of mapped memory.
#[derive(Clone, Debug)]
struct Range {
    mapping: Arc<Mapping>,
    offset: usize,
    length: usize,
}

impl Range {
    fn new(mapping: Arc<Mapping>, offset: usize, length: usize) -> Self {
        let end = offset.checked_add(length);
        assert!(
            end.is_some_and(|end| end <= mapping.length_bytes()),
            "a window lies in its memory"
        );
        assert!(offset.is_multiple_of(LINE_BYTES), "a window is aligned to cache lines");
        Self { mapping, offset, length }
    }

    fn at(&self, offset: usize, length: usize) -> NonNull<u8> {
        let end = offset.checked_add(length);
        assert!(end.is_some_and(|end| end <= self.length), "an access stays in the window");
        // SAFETY: inside the mapping: just checked against the range, and the range when made.
        unsafe { self.mapping.base().add(self.offset + offset) }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "a word is aligned");
        let word = self.at(offset, 8);
        // SAFETY: mapped while `self` lives, aligned (page, 64, 8), reached through atomics only.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }
    }

    fn part(&self, offset: usize, length: usize) -> Self {
        let _ = self.at(offset, length);
        Self::new(Arc::clone(&self.mapping), self.offset + offset, length)
    }
}

/// Memory of this host that the other one writes. Every word of it is the other host's claim.
#[derive(Clone, Debug)]
pub struct Inbound(Range);

impl Inbound {
    /// `length` bytes of `mapping` from `offset`, which is a multiple of 64.
    #[must_use]
    pub fn new(mapping: Arc<Mapping>, offset: usize, length: usize) -> Self {
        Self(Range::new(mapping, offset, length))
    }

    /// Bytes of it.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.0.length
    }

    /// The aligned 8-byte word at `offset`.
    #[must_use]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        self.0.word(offset)
    }

    /// The aligned 4-byte word at `offset`.
    #[must_use]
    pub fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "a half word is aligned");
        let word = self.0.at(offset, 4);
        // SAFETY: as in `Range::word`.
        unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }
    }

    /// Copies `length` bytes from `offset` to `target`; the other host may tear them meanwhile.
    ///
    /// # Safety
    ///
    /// `target` is writable for `length` bytes and outside this window.
    pub unsafe fn copy_to(&self, offset: usize, target: *mut u8, length: usize) {
        let source = self.0.at(offset, length);
        // SAFETY: the source lies in the window; the caller vouches for the target.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, length) };
    }

    /// As [`Inbound::copy_to`], into bytes of the caller's.
    pub fn read(&self, offset: usize, target: &mut [u8]) {
        // SAFETY: a slice is writable for its length, and no slice lies in a window.
        unsafe { self.copy_to(offset, target.as_mut_ptr(), target.len()) };
    }

    /// Zeroes all of it: before a link's life begins.
    pub fn clear(&self) {
        let start = self.0.at(0, self.0.length);
        // SAFETY: the whole range, mapped and writable; nothing holds a reference into it.
        unsafe { start.as_ptr().write_bytes(0, self.0.length) };
    }

    /// `length` bytes from `offset`.
    #[must_use]
    pub fn part(&self, offset: usize, length: usize) -> Self {
        Self(self.0.part(offset, length))
    }
}

/// How writes reach the other host's memory.
///
/// Writes of one thread may become visible in any order, or not at all, until that thread's next
/// [`Wire::fence`]; from then on they are visible before whatever it writes later. An aligned word that a
/// post covers appears whole.
pub trait Wire: Send + Sync + Debug {
    /// Bytes of the other host's memory.
    fn length_bytes(&self) -> usize;

    /// Posts `length` bytes to `offset`.
    ///
    /// # Safety
    ///
    /// `source` is readable for `length` bytes.
    unsafe fn post(&self, offset: usize, source: *const u8, length: usize);

    /// Posts one aligned word, which becomes visible as a whole.
    fn post_word(&self, offset: usize, value: u64);

    /// Orders earlier writes of this thread before later ones, and sends them on their way.
    fn fence(&self);
}

/// Writes straight into mapped memory.
#[derive(Debug)]
pub struct Mapped(Range);

impl Mapped {
    /// `length` bytes of `mapping` from `offset`.
    #[must_use]
    pub fn new(mapping: Arc<Mapping>, offset: usize, length: usize) -> Self {
        Self(Range::new(mapping, offset, length))
    }
}

impl Wire for Mapped {
    fn length_bytes(&self) -> usize {
        self.0.length
    }

    unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
        let target = self.0.at(offset, length);
        // SAFETY: the target lies in the mapped window, the caller vouches for the source, and a
        // window is no memory that is ever sent from.
        unsafe { copy_words(source, target.as_ptr(), length) };
    }

    fn post_word(&self, offset: usize, value: u64) {
        // Release: enough on coherent memory; on write-combining memory the caller's fence is.
        self.0.word(offset).store(value, Ordering::Release);
    }

    fn fence(&self) {
        // Empties the processor's write-combining buffers. It orders no later load: what a reader has of these
        // writes is told by what is posted behind them, never by what this end reads next.
        store_fence();
    }
}

/// What was written through a window so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Posts of bytes.
    pub posts: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Posts of words.
    pub words: u64,
    /// Fences.
    pub fences: u64,
}

/// What was written through one part, on a cache line of its own: a part's writer counts without an atomic
/// read-modify-write, so that counts of two threads that write through one part may be lost.
#[repr(align(64))]
#[derive(Debug, Default)]
struct Tally {
    posts: AtomicU64,
    bytes: AtomicU64,
    words: AtomicU64,
    fences: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
}

/// The parts of a window.
#[derive(Debug, Default)]
struct Tallies {
    live: Vec<Arc<Tally>>,
    /// Of parts that are gone.
    gone: Written,
}

impl Tallies {
    fn fresh(&mut self) -> Arc<Tally> {
        let tally = Arc::new(Tally::default());
        let all = std::mem::take(&mut self.live).into_iter();
        let (over, live): (Vec<_>, _) = all.partition(|one| Arc::strong_count(one) == 1);
        self.gone = sum(self.gone, &over);
        self.live = live;
        self.live.push(Arc::clone(&tally));
        tally
    }
}

fn sum(from: Written, tallies: &[Arc<Tally>]) -> Written {
    tallies.iter().fold(from, |sum, tally| Written {
        posts: sum.posts + tally.posts.load(Ordering::Relaxed),
        bytes: sum.bytes + tally.bytes.load(Ordering::Relaxed),
        words: sum.words + tally.words.load(Ordering::Relaxed),
        fences: sum.fences + tally.fences.load(Ordering::Relaxed),
    })
}

/// Memory of the other host that this one writes, or a part of it. Nothing here reads.
#[derive(Clone, Debug)]
pub struct Outbound {
    wire: Arc<dyn Wire>,
    offset: usize,
    length: usize,
    tally: Arc<Tally>,
    tallies: Arc<Mutex<Tallies>>,
}

impl Outbound {
    /// All that `wire` reaches.
    #[must_use]
    pub fn new(wire: Arc<dyn Wire>) -> Self {
        let length = wire.length_bytes();
        let mut tallies = Tallies::default();
        let tally = tallies.fresh();
        Self { wire, offset: 0, length, tally, tallies: Arc::new(Mutex::new(tallies)) }
    }

    /// Bytes of it.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length
    }

    /// What was written so far, through all parts of the window.
    #[must_use]
    pub fn written(&self) -> Written {
        let tallies = self.tallies.lock().unwrap_or_else(PoisonError::into_inner);
        sum(tallies.gone, &tallies.live)
    }

    fn check(&self, offset: usize, length: usize) {
        let end = offset.checked_add(length);
        assert!(end.is_some_and(|end| end <= self.length), "an access stays in the window");
    }

    /// Posts `length` bytes to `offset`.
    ///
    /// # Safety
    ///
    /// `source` is readable for `length` bytes.
    pub unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
        self.check(offset, length);
        add(&self.tally.posts, 1);
        add(&self.tally.bytes, length as u64);
        // SAFETY: the caller's contract.
        unsafe { self.wire.post(self.offset + offset, source, length) };
    }

    /// As [`Outbound::post`], from a slice.
    pub fn post_bytes(&self, offset: usize, bytes: &[u8]) {
        // SAFETY: a slice is readable for its length.
        unsafe { self.post(offset, bytes.as_ptr(), bytes.len()) };
    }

    /// Posts one aligned word, which becomes visible as a whole.
    pub fn post_word(&self, offset: usize, value: u64) {
        self.check(offset, 8);
        add(&self.tally.words, 1);
        self.wire.post_word(self.offset + offset, value);
    }

    /// Orders earlier writes of this thread before later ones, and sends them on their way.
    pub fn fence(&self) {
        add(&self.tally.fences, 1);
        self.wire.fence();
    }

    /// `length` bytes from `offset`: for one thread that writes them.
    #[must_use]
    pub fn part(&self, offset: usize, length: usize) -> Self {
        self.check(offset, length);
        let tally = self.tallies.lock().unwrap_or_else(PoisonError::into_inner).fresh();
        let (wire, tallies) = (Arc::clone(&self.wire), Arc::clone(&self.tallies));
        Self { wire, offset: self.offset + offset, length, tally, tallies }
    }
}

/// Doorbells: bits that each end can ring at the other.
pub trait Bells: Send + Sync + Debug {
    /// Rings `bit` at the other host. Rings coalesce; one says "look".
    fn ring(&self, bit: usize);

    /// Readable after the other host rang `bit`; `None` where a sleeper has to look by the clock.
    fn descriptor(&self, bit: usize) -> Option<BorrowedFd<'_>>;

    /// Takes rings of `bit` off its descriptor.
    fn clear(&self, bit: usize);

    /// Opens the latch of `bit`, where doorbells have [latches](crate::bells): what the other host makes
    /// visible from now on rings. The end that opens it looks for what came before.
    fn rearm(&self, _bit: usize) {}

    /// True while the other host can make the descriptor of `bit` readable. Where it cannot, a sleeper has to look by
    /// the clock, too.
    fn is_rung(&self, bit: usize) -> bool {
        self.descriptor(bit).is_some()
    }

    /// False once the other end is known to be gone for good.
    fn is_plugged(&self) -> bool {
        true
    }
}

/// One end of a window, or of a part of it.
#[derive(Clone, Debug)]
pub struct Window {
    /// Memory of this host that the other one writes.
    pub inbound: Inbound,
    /// Memory of the other host.
    pub outbound: Outbound,
    /// Doorbells.
    pub bells: Arc<dyn Bells>,
}

impl Window {
    /// The same `length` bytes from `offset` of both directions: several users share one device so.
    #[must_use]
    pub fn part(&self, offset: usize, length: usize) -> Self {
        Self {
            inbound: self.inbound.part(offset, length),
            outbound: self.outbound.part(offset, length),
            bells: Arc::clone(&self.bells),
        }
    }

    /// Bytes that both directions have.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.inbound.length_bytes().min(self.outbound.length_bytes())
    }
}
