//! One segment: a fixed-length piece of a pool, one file each, and its eight user words.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use beeline_os::memory::{load_u64, store_u64};
use beeline_os::{MemoryObject, Persistence};

use crate::core::{Core, SyncTurn};
use crate::error::PmemError;
use crate::layout::{self, State};
use crate::memory::Memory;
use crate::options::{Mechanism, PoolKind};
use crate::record::Event;
use beeline_os::write_back as cache;

/// Where a segment's memory starts.
#[derive(Clone, Copy, Debug)]
struct SegmentStart(NonNull<u8>);

// SAFETY: an address only; what is done through it is argued where it is used, and the memory is
// reached from several threads as a whole (`Memory` is shared the same way).
unsafe impl Send for SegmentStart {}
// SAFETY: as above.
unsafe impl Sync for SegmentStart {}

/// A piece of a pool: `segment_bytes` of memory, zeroed when allocated, and eight words in the
/// pool's descriptor table that peers never see.
///
/// Bytes are *stored* by the methods here, *flushed* through a [`crate::Persister`], and
/// *persisted* by its fence. Offsets are checked: an access outside the segment is a broken
/// invariant of the caller and panics.
#[derive(Debug)]
pub struct Segment {
    pub(crate) core: Arc<Core>,
    pub(crate) memory: Memory,
    pub(crate) id: u32,
    /// Moves only in [`Segment::renew`].
    generation: AtomicU64,
    pub(crate) myself: Weak<Segment>,
    shared: AtomicBool,
    /// Start and length of `memory`, at hand for every access: a mapping's base never moves.
    start: SegmentStart,
    length: usize,
    sync_turn: SyncTurn,
}

impl Segment {
    pub(crate) fn new(core: Arc<Core>, memory: Memory, id: u32, state: State) -> Arc<Self> {
        let start = SegmentStart(memory.base());
        let length = memory.length_bytes();
        Arc::new_cyclic(|myself| Self {
            core,
            memory,
            id,
            generation: AtomicU64::new(state.generation),
            myself: myself.clone(),
            shared: AtomicBool::new(state.shared),
            start,
            length,
            sync_turn: SyncTurn::default(),
        })
    }

    /// Synchronises the segment's file.
    pub(crate) fn synchronise(&self) -> Result<(), PmemError> {
        self.core.sync(&self.sync_turn, &self.memory, || self.core.segment_file(self.id))
    }

    pub(crate) fn object(&self) -> u32 {
        self.id + 1
    }

    /// Number of the descriptor; unique among the segments in use, reused after a free.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Number of this life: how often the descriptor was allocated or renewed, this time included.
    /// With the id it is unique for the life of the pool.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Starts a new life in place: the next generation, the same bytes, the same words. Stored,
    /// not yet persisted: that takes [`crate::Persister::flush_descriptor`] and its fence, and
    /// until then a crash may find either life over the bytes as they are. So nothing may be
    /// stored into the segment before that fence.
    ///
    /// Returns the new generation; `None`, and nothing changed, where a peer may hold a mapping or
    /// generations have run out: free it then.
    ///
    /// Invariant: the caller has persisted that nothing refers to the segment, and nobody else
    /// renews or frees it.
    pub fn renew(&self) -> Option<u64> {
        let generation = self.generation() + 1;
        if self.is_shared() || generation >= layout::MAX_GENERATION {
            return None;
        }
        self.generation.store(generation, Ordering::Relaxed);
        self.core.store_state(self.id, State { in_use: true, shared: false, generation });
        Some(generation)
    }

    /// Length in bytes.
    #[must_use]
    #[inline]
    pub fn length_bytes(&self) -> usize {
        self.length
    }

    /// The address of `offset..offset+length`, which is checked to lie inside the segment.
    #[inline]
    fn at(&self, offset: usize, length: usize) -> *mut u8 {
        let inside = offset <= self.length && length <= self.length - offset;
        assert!(inside, "an access stays inside its segment");
        // SAFETY: the offset was just checked to lie inside the mapping, which starts at `start`.
        unsafe { self.start.0.as_ptr().add(offset) }
    }

    /// Copies `offset..offset+target.len()` out. A copy of bytes that are being written may be
    /// torn; validate the copy.
    #[inline]
    pub fn read(&self, offset: usize, target: &mut [u8]) {
        let source = self.at(offset, target.len());
        // SAFETY: the range lies inside the mapping, which lives as long as `self`; `target` is
        // the caller's own. A torn copy is possible and is what callers validate.
        unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
    }

    /// Stores `source` at `offset`.
    #[inline]
    pub fn store(&self, offset: usize, source: &[u8]) {
        self.store_parts(offset, &[source]);
    }

    /// Stores the parts in a row from `offset` on, as one store: a simulated device may have its
    /// words reach media in any order.
    #[inline]
    pub fn store_parts(&self, offset: usize, parts: &[&[u8]]) {
        let length = parts.iter().map(|part| part.len()).sum();
        let target = self.at(offset, length);
        self.record(offset, length, || {
            let mut done = 0;
            for part in parts {
                // SAFETY: `done` plus this part's length is at most `length`, so that the result
                // stays inside the range just checked.
                let to = unsafe { target.add(done) };
                // SAFETY: as above, and mapped writable while `self` is borrowed; no reference to
                // segment bytes exists that `part` could be (`trusted_slice` forbids later stores
                // to its range). Concurrent writers are possible only by peers; the bytes are then
                // theirs to mangle, and readers validate copies.
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
                done += part.len();
            }
        });
    }

    /// Loads the word at `offset`, a multiple of 8, with acquire ordering; pairs with
    /// [`Segment::store_u64`].
    #[must_use]
    pub fn load_u64(&self, offset: usize) -> u64 {
        load_u64(&self.memory, offset)
    }

    /// Stores the word at `offset`, a multiple of 8, with release ordering; pairs with
    /// [`Segment::load_u64`]. Never torn, in memory or on media.
    pub fn store_u64(&self, offset: usize, value: u64) {
        self.record(offset, 8, || store_u64(&self.memory, offset, value));
    }

    /// Stores past the cache: for bulk. Flush and fence as for any store, or use
    /// [`crate::Persister::store_nontemporal`], which knows that the flush is done.
    pub fn store_nontemporal(&self, offset: usize, source: &[u8]) {
        self.record(offset, source.len(), || {
            let target = self.at(offset, source.len());
            // SAFETY: mapped writable while `self` is borrowed; no reference to segment bytes
            // exists that `source` could be (`trusted_slice` forbids later stores to its range).
            unsafe { cache::copy_nontemporal(self.core.write_back, target, source) };
        });
    }

    /// The bytes of a range in place.
    ///
    /// # Safety
    ///
    /// Until the slice is gone, nobody writes the range: not this process, and no peer (the
    /// segment is not shared, or its backing was replaced after the last grant).
    #[must_use]
    pub unsafe fn trusted_slice(&self, offset: usize, length: usize) -> &[u8] {
        let start = self.at(offset, length);
        // SAFETY: mapped and initialised (files and fresh memory read as zero) for as long as
        // `self` is borrowed; the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(start, length) }
    }

    /// For whoever is about to read `offset..offset + length` in order: starts reading it from the
    /// disk, where files are synchronised (the kernel does not read ahead there by itself).
    /// Elsewhere does nothing.
    pub fn read_ahead(&self, offset: usize, length: usize) {
        if self.core.mechanism == Mechanism::FileSync {
            crate::backing::read_ahead(&self.memory, offset, length);
        }
    }

    /// The word at `offset`, a multiple of 8, as an atomic. For reading; a store through it is not
    /// recorded by a simulated device.
    #[must_use]
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        beeline_os::memory::atomic_u64(&self.memory, offset)
    }

    /// User word `index` (below 8), in the descriptor.
    #[must_use]
    pub fn word(&self, index: usize) -> u64 {
        self.core.table_load(layout::word_offset(self.id, index))
    }

    /// Stores user word `index` (below 8). Flush it with [`crate::Persister::flush_words`]. One
    /// thread at a time stores a word.
    pub fn store_word(&self, index: usize, value: u64) {
        self.core.store_pair(layout::word_offset(self.id, index), value);
    }

    /// False when the two copies of user word `index` differ, which a crash between two stores or
    /// damage explains.
    #[must_use]
    pub fn word_intact(&self, index: usize) -> bool {
        self.core.pair_intact(layout::word_offset(self.id, index))
    }

    /// True when a peer may hold a writable mapping.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Acquire)
    }

    /// Notes in the descriptor that a peer may hold a writable mapping; call before handing out
    /// the descriptor. Survives the end of this process (a peer may outlive it), not a loss of
    /// power (no peer does).
    pub fn mark_shared(&self) {
        self.set_shared(true);
    }

    fn set_shared(&self, shared: bool) {
        // Release pairs with the acquire in `is_shared`.
        self.shared.store(shared, Ordering::Release);
        let state = State { in_use: true, shared, generation: self.generation() };
        self.core.store_state(self.id, state);
        if self.core.mechanism != Mechanism::FileSync {
            let _ = self.core.persist_table(layout::descriptor_offset(self.id), 16);
        }
    }

    /// Runs `store`, recorded where the device is simulated.
    #[inline]
    fn record(&self, offset: usize, length: usize, store: impl FnOnce()) {
        match &self.core.recorder {
            None => store(),
            Some(recorder) => {
                recorder.store(self.object(), &self.memory, offset, length, store);
            }
        }
    }
}

// SAFETY: `memory` stays mapped at a fixed, page-aligned base until the segment is dropped
// (`replace_with` keeps the base); `trusted_slice` is unsafe and leaves the no-writer rule to its
// caller.
unsafe impl MemoryObject for Segment {
    fn base(&self) -> NonNull<u8> {
        self.start.0
    }

    fn length_bytes(&self) -> usize {
        self.length
    }

    /// Another open file description of the same file at every call: the kernel reports a failed
    /// write-back once to each, and the owner must not miss what a peer asked about first.
    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        let descriptor = self.memory.descriptor()?;
        if self.core.directory.is_none() {
            return Some(descriptor);
        }
        beeline_os::reopen::writable(&*descriptor).ok().map(Arc::new)
    }

    fn persistence(&self) -> Persistence {
        let no_write_back = self.core.write_back == cache::WriteBack::None;
        match (self.core.kind, self.core.mechanism) {
            (PoolKind::Dax, _) if no_write_back => Persistence::File,
            (PoolKind::Dax | PoolKind::Sim, _) | (_, Mechanism::CacheLineEmulated(_)) => {
                Persistence::CacheLine
            }
            (PoolKind::File, _) => Persistence::File,
            (PoolKind::Dram, _) => Persistence::Volatile,
        }
    }

    fn stored(&self, offset: usize, length: usize) {
        self.record(offset, length, || {});
    }

    fn persist(&self, offset: usize, length: usize) -> std::io::Result<()> {
        let failed = |error: PmemError| std::io::Error::other(error);
        self.core.check_sync().map_err(failed)?;
        match self.persistence() {
            Persistence::Volatile => Ok(()),
            Persistence::File => self.synchronise().map_err(failed),
            Persistence::CacheLine => {
                if let Some(recorder) = &self.core.recorder {
                    let by = recorder.actor();
                    recorder.flush(self.object(), offset, length, by);
                    recorder.push(Event::Fenced { by });
                } else {
                    let lines = self.core.write_back_range(&self.memory, offset, length);
                    cache::store_fence();
                    self.core.delay(lines as u64);
                }
                Ok(())
            }
        }
    }

    fn has_retired_mark(&self) -> bool {
        self.memory.has_retired_mark()
    }

    /// Afterwards the segment is not shared any more.
    fn replace_backing(&self) -> std::io::Result<()> {
        beeline_os::moving::replace(self.anchor(), || crate::backing::replace(self))?;
        self.set_shared(false);
        Ok(())
    }
}
