//! A memory window as this provider uses one, and the window over memory both ends can map.
//!
//! The data path writes across the link and reads its own memory, never the other way round: a
//! posted write is cheap and a remote read stalls the processor for a round trip (NTSocks 3.1).

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use beeline_os::Mapping;
use beeline_os::doorbell::{Doorbell, Rung};
use beeline_os::words::copy_words;
use beeline_os::write_back::store_fence;

use crate::interrupts::Interrupts;
use crate::layout::{LATCH_AT, PAD_BELL, PAD_BYTES, SCRATCHPADS};

/// Memory of this side that the peer writes. Every word of it is the peer's claim.
#[derive(Clone, Debug)]
pub struct Inbound {
    mapping: Arc<Mapping>,
    offset: usize,
    length: usize,
}

impl Inbound {
    /// `length` bytes of `mapping` from `offset`, which is a multiple of 64.
    #[must_use]
    pub fn new(mapping: Arc<Mapping>, offset: usize, length: usize) -> Self {
        let end = offset.checked_add(length);
        assert!(
            end.is_some_and(|end| end <= mapping.length_bytes()),
            "a window lies in its memory"
        );
        assert!(offset.is_multiple_of(64), "a window is aligned to cache lines");
        Self { mapping, offset, length }
    }

    /// Bytes of it.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length
    }

    /// The address of `offset`, from which `length` bytes are in the window.
    fn at(&self, offset: usize, length: usize) -> NonNull<u8> {
        let end = offset.checked_add(length);
        assert!(end.is_some_and(|end| end <= self.length), "an access stays in the window");
        // SAFETY: inside the mapping, just checked; the window lies in it (checked when made).
        unsafe { self.mapping.base().add(self.offset + offset) }
    }

    /// The aligned 8-byte word at `offset`.
    #[must_use]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "a word is aligned");
        let word = self.at(offset, 8);
        // SAFETY: mapped while `self` lives, aligned (page, 64, 8), reached through atomics only.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }
    }

    /// The aligned 4-byte word at `offset`.
    #[must_use]
    pub fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "a half word is aligned");
        let word = self.at(offset, 4);
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }
    }

    /// Copies `length` bytes from `offset` to `target`; a peer may tear them meanwhile.
    ///
    /// # Safety
    ///
    /// `target` is writable for `length` bytes and outside this window.
    pub unsafe fn copy_to(&self, offset: usize, target: *mut u8, length: usize) {
        let source = self.at(offset, length);
        // SAFETY: the source lies in the window; the caller vouches for the target.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, length) };
    }
}

/// One link's hardware: where this side's writes go, what the peer wrote, and how to wake it.
///
/// Posted writes of one thread may become visible in any order, or not at all, until that thread's
/// next [`Window::fence`]; from then on they are visible before anything it writes later.
pub trait Window: Send + Sync + Debug {
    /// Local memory that the peer writes.
    fn inbound(&self) -> &Inbound;

    /// Bytes of the peer's memory that this side reaches.
    fn outbound_bytes(&self) -> usize;

    /// Posts `length` bytes to `offset` of the peer's memory.
    ///
    /// Invariant: the range lies inside the outbound window.
    ///
    /// # Safety
    ///
    /// `source` is readable for `length` bytes.
    unsafe fn post(&self, offset: usize, source: *const u8, length: usize);

    /// Posts one aligned word, which becomes visible at once as a whole.
    ///
    /// Invariant: as for [`Window::post`]; `offset` is a multiple of 8.
    fn post_word(&self, offset: usize, value: u64);

    /// Posts to one of the peer's scratchpads, behind everything fenced.
    fn post_scratchpad(&self, index: usize, value: u32);

    /// Orders earlier posted writes of this thread before later ones, and sends them on their way.
    fn fence(&self);

    /// Wakes the peer, behind everything fenced. The doorbell is latched: it rings once until the
    /// peer rearms it.
    fn ring(&self);

    /// Readable when the peer rang; `None` where nothing can be slept on, and somebody has to look
    /// now and then.
    fn doorbell(&self) -> Option<BorrowedFd<'_>>;

    /// True while the peer can make that readable. Where it cannot, somebody has to look too.
    fn is_rung(&self) -> bool {
        self.doorbell().is_some()
    }

    /// What the peer has to know to ring; 0 where it need not, or cannot.
    fn bell(&self) -> u32 {
        0
    }

    /// Takes rings off the descriptor; the latch stays.
    fn hush(&self);

    /// Opens the latch: what the peer makes visible from now on rings. Look for what came before.
    fn rearm(&self);

    /// False once the link is known to be cut.
    fn is_plugged(&self) -> bool;

    /// This side's scratchpad, as the peer last wrote it.
    fn scratchpad(&self, index: usize) -> u32 {
        assert!(index < SCRATCHPADS, "a scratchpad of the window");
        // Acquire: pairs with the fence the peer puts behind what the scratchpad announces.
        self.inbound().half_word(index * PAD_BYTES).load(Ordering::Acquire)
    }
}

/// A window whose peer memory is mapped: a device's resource file, a shared memory device of a
/// virtual machine, or memory of this host that stands for one.
#[derive(Debug)]
pub struct MappedWindow {
    inbound: Inbound,
    outbound: Inbound,
    /// What follows `outbound`, once it is known.
    heap: OnceLock<Inbound>,
    bell: Option<Bell>,
    cut: AtomicBool,
}

/// How the two ends of a window wake each other.
#[derive(Debug)]
pub(crate) enum Bell {
    /// Two processes of one host.
    Pair(Doorbell),
    /// Two virtual machines.
    Device(Interrupts),
}

impl MappedWindow {
    /// With a doorbell, the latches in both windows are used, so both must be coherent memory.
    #[must_use]
    pub fn new(inbound: Inbound, outbound: Inbound, doorbell: Option<Doorbell>) -> Self {
        let bell = doorbell.map(Bell::Pair);
        Self { inbound, outbound, heap: OnceLock::new(), bell, cut: AtomicBool::new(false) }
    }

    /// With the interrupts of the device that the window is in, both of whose ends are memory of
    /// one host.
    pub(crate) fn set_interrupts(&mut self, interrupts: Interrupts) {
        self.bell = Some(Bell::Device(interrupts));
    }

    /// The peer's memory for regions, which this side reaches behind the rest of its window.
    pub(crate) fn set_heap(&self, heap: Inbound) {
        let _ = self.heap.set(heap);
    }

    /// The link is gone.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::SeqCst);
    }
}

impl Window for MappedWindow {
    fn inbound(&self) -> &Inbound {
        &self.inbound
    }

    fn outbound_bytes(&self) -> usize {
        self.outbound.length + self.heap.get().map_or(0, |heap| heap.length)
    }

    unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
        let target = match (self.heap.get(), offset.checked_sub(self.outbound.length)) {
            (Some(heap), Some(offset)) => heap.at(offset, length),
            _ => self.outbound.at(offset, length),
        };
        // SAFETY: the target lies in the mapped window, the caller vouches for the source, and a
        // window is no memory that is ever sent from.
        unsafe { copy_words(source, target.as_ptr(), length) };
    }

    fn post_word(&self, offset: usize, value: u64) {
        // Release: on coherent memory this alone orders it behind the bytes it announces; on
        // write-combining memory the caller's fence does.
        let word = match (self.heap.get(), offset.checked_sub(self.outbound.length)) {
            (Some(heap), Some(offset)) => heap.word(offset),
            _ => self.outbound.word(offset),
        };
        word.store(value, Ordering::Release);
    }

    fn post_scratchpad(&self, index: usize, value: u32) {
        assert!(index < SCRATCHPADS, "a scratchpad of the window");
        self.outbound.half_word(index * PAD_BYTES).store(value, Ordering::Release);
    }

    fn fence(&self) {
        // Empties the processor's write-combining buffers.
        store_fence();
        fence(Ordering::SeqCst);
    }

    fn ring(&self) {
        let Some(bell) = &self.bell else { return };
        // Sequentially consistent, against the store in `rearm` and the loads behind it: either
        // the peer sees what this side wrote before, or this side sees the latch open.
        if self.outbound.half_word(LATCH_AT).swap(1, Ordering::SeqCst) == 0 {
            match bell {
                Bell::Pair(doorbell) => doorbell.ring(),
                Bell::Device(interrupts) => {
                    // A peer that names another machine has that one look in vain.
                    let peer = self.scratchpad(PAD_BELL).checked_sub(1).map(u16::try_from);
                    if let Some(Ok(peer)) = peer {
                        interrupts.ring(peer);
                    }
                }
            }
        }
    }

    fn doorbell(&self) -> Option<BorrowedFd<'_>> {
        match self.bell.as_ref()? {
            Bell::Pair(doorbell) => Some(doorbell.as_fd()),
            Bell::Device(interrupts) => Some(interrupts.as_fd()),
        }
    }

    fn is_rung(&self) -> bool {
        match &self.bell {
            None => false,
            Some(Bell::Pair(_)) => true,
            // A peer that has a number has interrupts, and can raise ours.
            Some(Bell::Device(_)) => self.scratchpad(PAD_BELL) != 0,
        }
    }

    fn bell(&self) -> u32 {
        match &self.bell {
            Some(Bell::Device(interrupts)) => u32::from(interrupts.number()) + 1,
            _ => 0,
        }
    }

    fn hush(&self) {
        match &self.bell {
            Some(Bell::Pair(doorbell)) if doorbell.clear() == Rung::Closed => self.cut(),
            Some(Bell::Device(interrupts)) => interrupts.clear(),
            _ => {}
        }
    }

    fn rearm(&self) {
        if self.bell.is_some() {
            self.inbound.half_word(LATCH_AT).store(0, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
    }

    fn is_plugged(&self) -> bool {
        !self.cut.load(Ordering::SeqCst)
    }
}
