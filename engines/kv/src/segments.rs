//! What the store knows about each segment beyond its bytes, and who may look at it how.
//!
//! The table is behind a lock that data calls do not take: each shard keeps a cache of `Arc`s and
//! drops it when the table's epoch moved, which it does when a segment was freed (only then can
//! an identifier come to mean another segment).

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use beeline_pmem::Segment;

use crate::fault::{self, KnownBug};
use crate::index::SEGMENT_LIMIT;

/// User words in the segment's server-only descriptor.
pub(crate) mod word {
    /// Entries known to be persisted: a lower bound that lags by one commit. The count in the low
    /// half, the low half of the generation it is about in the high one; a count of another life
    /// promises nothing.
    pub const COUNT: usize = 0;
    /// Previous segment of the same log, identifier + 1, 0 = none.
    pub const PREVIOUS: usize = 1;
    /// Next segment of the same log, identifier + 1, 0 = none.
    pub const NEXT: usize = 2;
    /// Shard that owns the log in the low half; 1 in bit 32 for a client's log.
    pub const OWNER: usize = 3;
    /// Format of the entries in the segment.
    pub const FORMAT: usize = 4;
    /// Generation that began with zeroed memory. In a later one, what follows the last entry is
    /// left over from former lives.
    pub const ZEROED: usize = 5;
    /// Newest version of the store when a later life began: for the report on what a crash cut.
    pub const SINCE: usize = 6;
    /// Entries that are missing and whose loss somebody accepted, in the low half; the low half of
    /// the generation in the high one.
    pub const ACCEPTED: usize = 7;
}

/// Value of [`word::FORMAT`].
pub(crate) const FORMAT: u64 = 2;
/// A former value: counts stood alone, and every life began with zeroed memory.
pub(crate) const FORMAT_PLAIN: u64 = 1;
/// Bit of [`word::OWNER`] that marks a client's log.
pub(crate) const OWNER_CLIENT: u64 = 1 << 32;

/// A client holds the segment and may write any byte of it at any time.
pub(crate) const GRANTED: u32 = 1;
/// A client may have a writable mapping, now or since before a restart: copy, validate, use.
pub(crate) const UNTRUSTED: u32 = 2;
/// A log appends to it.
pub(crate) const HEAD: u32 = 4;
/// Damage was found in it: kept for inspection, not collected.
pub(crate) const QUARANTINED: u32 = 8;
/// A collector works on it.
pub(crate) const VICTIM: u32 = 16;
/// The pool was closed in good order with it: nothing in it was on its way.
pub(crate) const SETTLED: u32 = 32;

/// One life of a segment in use.
#[derive(Debug)]
pub(crate) struct SegmentState {
    pub segment: Arc<Segment>,
    pub id: u32,
    pub generation: u64,
    pub length: u32,
    pub owner: u32,
    flags: AtomicU32,
    /// Keys count as stale here once for a run of entries, not once for each: see
    /// [`crate::shard::recycle`].
    pub by_run: bool,
    /// Bytes of slots whose entry is the newest of its key and needed. Signed: two shards may add
    /// and subtract in any order. A slot that moves is added where it goes to before it is
    /// subtracted where it was, so that 0 in a segment nobody appends to means that nobody needs
    /// it.
    live_bytes: AtomicI64,
    /// Slots that point here and are not needed: tombstones that hide nothing any more.
    hollow: AtomicI64,
    /// Runs of streams in it. As long as there are any, the collector leaves it alone.
    runs: AtomicU32,
    /// Shards, modulo 64, to whose logs went what superseded entries in here.
    superseded_by: AtomicU64,
    /// End of the last entry.
    pub tail: AtomicU32,
    /// Entries in it.
    pub count: AtomicU32,
    /// Readers that hold a place in it beyond the shard's lock.
    pub pins: AtomicU32,
}

impl SegmentState {
    pub fn new(segment: Arc<Segment>, owner: u32, flags: u32, tail: u32, by_run: bool) -> Self {
        Self {
            id: segment.id(),
            generation: segment.generation(),
            length: segment.length_bytes() as u32,
            owner,
            flags: AtomicU32::new(flags),
            by_run,
            live_bytes: AtomicI64::new(0),
            hollow: AtomicI64::new(0),
            runs: AtomicU32::new(0),
            superseded_by: AtomicU64::new(0),
            tail: AtomicU32::new(tail),
            count: AtomicU32::new(0),
            pins: AtomicU32::new(0),
            segment,
        }
    }

    /// True when the flag is set. Acquire pairs with the release in [`SegmentState::set`].
    #[inline]
    pub fn is(&self, flag: u32) -> bool {
        self.flags.load(Ordering::Acquire) & flag != 0
    }

    pub fn set(&self, flag: u32) {
        self.flags.fetch_or(flag, Ordering::AcqRel);
    }

    pub fn clear(&self, flag: u32) {
        self.flags.fetch_and(!flag, Ordering::AcqRel);
    }

    #[inline]
    pub fn add_live(&self, bytes: u64) {
        self.live_bytes.fetch_add(bytes as i64, Ordering::Relaxed);
    }

    /// True when none are left.
    #[inline]
    pub fn remove_live(&self, bytes: u64) -> bool {
        // Release pairs with the acquire in `is_dead`: whoever used the entry is done with it.
        self.live_bytes.fetch_sub(bytes as i64, Ordering::Release) == bytes as i64
    }

    pub fn live(&self) -> i64 {
        self.live_bytes.load(Ordering::Relaxed)
    }

    pub fn change_hollow(&self, by: i64) {
        self.hollow.fetch_add(by, Ordering::Release);
    }

    /// True when no slot of any index points here. Meaningless while it is a head.
    pub fn is_dead(&self) -> bool {
        // Acquire pairs with the releases in `remove_live` and `change_hollow`.
        self.live_bytes.load(Ordering::Acquire) == 0 && self.hollow.load(Ordering::Acquire) == 0
    }

    /// A run of a stream begins in it.
    pub fn add_run(&self) {
        self.runs.fetch_add(1, Ordering::Relaxed);
    }

    /// A run of a stream in it is needed no more.
    pub fn remove_run(&self) {
        // Release pairs with the acquire in `holds_runs`: its readers are done with it.
        self.runs.fetch_sub(1, Ordering::Release);
    }

    /// Runs of streams in it.
    pub fn runs(&self) -> u32 {
        // Acquire pairs with the release in `remove_run`.
        self.runs.load(Ordering::Acquire)
    }

    /// True when a stream has entries in it.
    pub fn holds_runs(&self) -> bool {
        self.runs() > 0
    }

    /// Notes that an entry in here was superseded by one in the log of shard `owner`.
    #[inline]
    pub fn supersede(&self, owner: u32) {
        if owner != self.owner {
            self.superseded_by.fetch_or(1 << (owner % 64), Ordering::Release);
        }
    }

    /// Other shards whose logs hold what superseded entries in here, modulo 64.
    pub fn superseded_by(&self) -> u64 {
        // Acquire pairs with the release in `supersede`, which comes before `remove_live`.
        self.superseded_by.load(Ordering::Acquire)
    }

    /// Entries that are known to be persisted, according to the descriptor.
    pub fn promised(&self) -> u32 {
        let word = self.segment.word(word::COUNT);
        let plain = self.segment.word(word::FORMAT) == FORMAT_PLAIN;
        let mine = plain
            || fault::is_on(KnownBug::CountOfAnotherLife)
            || word >> 32 == self.generation & u64::from(u32::MAX);
        if !mine {
            return 0;
        }
        if plain { word.min(u64::from(u32::MAX)) as u32 } else { word as u32 }
    }

    /// Stores the count of entries known to be persisted.
    pub fn promise(&self, count: u32) {
        let plain = self.segment.word(word::FORMAT) == FORMAT_PLAIN;
        let tag = if plain { 0 } else { self.generation << 32 };
        self.segment.store_word(word::COUNT, tag | u64::from(count));
    }

    /// Entries missing in this life whose loss was accepted.
    pub fn accepted(&self) -> u32 {
        let word = self.segment.word(word::ACCEPTED);
        if word >> 32 == self.generation & u64::from(u32::MAX) { word as u32 } else { 0 }
    }

    /// Notes that `missing` entries are missing, and known to be.
    pub fn accept(&self, missing: u32) {
        self.segment.store_word(word::ACCEPTED, self.generation << 32 | u64::from(missing));
    }

    /// True when its bytes were zero when this life began.
    pub fn began_zeroed(&self) -> bool {
        self.segment.word(word::FORMAT) == FORMAT_PLAIN
            || self.segment.word(word::ZEROED) == self.generation
    }

    /// True when it may have another life in place: never given to a client, and of a format whose
    /// counts name their life.
    pub fn is_renewable(&self) -> bool {
        !self.is(UNTRUSTED | GRANTED | QUARANTINED)
            && !self.segment.is_shared()
            && self.segment.word(word::FORMAT) == FORMAT
    }

    /// Bytes of entries that nobody needs.
    pub fn stale_bytes(&self) -> u64 {
        let used = u64::from(self.tail.load(Ordering::Relaxed) - crate::entry::FIRST_ENTRY);
        used.saturating_sub(self.live().max(0) as u64)
    }

    /// Bytes that freeing the segment would win.
    pub fn garbage_bytes(&self) -> u64 {
        let live = self.live().max(0) as u64;
        u64::from(self.length).saturating_sub(live)
    }

    /// Bytes of a trusted segment.
    ///
    /// Invariant: the range lies inside the segment and holds entries that are complete; entries
    /// of a trusted segment never change once appended, as long as a slot points at them or a
    /// reader pins them (the one exception, closing a batch, needs the shard exclusively, and no
    /// slice outlives a shared borrow of the shard).
    #[inline]
    pub fn bytes(&self, offset: u32, length: usize) -> &[u8] {
        debug_assert!(!self.is(UNTRUSTED), "memory a client can write is never a slice");
        // SAFETY: the segment is trusted: no client was ever given it, so only this process writes
        // to it, and it does so to fresh bytes beyond what is read here (invariant above).
        unsafe { self.segment.trusted_slice(offset as usize, length) }
    }
}

/// All segments in use, by identifier.
#[derive(Debug, Default)]
pub(crate) struct SegmentTable {
    slots: RwLock<Vec<Option<Arc<SegmentState>>>>,
    /// Moves when a segment was removed; release pairs with the acquire in [`SegmentCache::get`].
    epoch: AtomicU64,
}

impl SegmentTable {
    pub fn insert(&self, state: Arc<SegmentState>) {
        assert!(state.id < SEGMENT_LIMIT, "segment identifiers fit a location");
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let at = state.id as usize;
        if slots.len() <= at {
            slots.resize(at + 1, None);
        }
        slots[at] = Some(state);
    }

    pub fn remove(&self, id: u32) {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        slots[id as usize] = None;
        self.epoch.fetch_add(1, Ordering::Release);
    }

    pub fn get(&self, id: u32) -> Option<Arc<SegmentState>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.get(id as usize)?.clone()
    }

    pub fn all(&self) -> Vec<Arc<SegmentState>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.iter().flatten().cloned().collect()
    }
}

/// One shard's view of the table.
#[derive(Debug, Default)]
pub(crate) struct SegmentCache {
    slots: Vec<Option<Arc<SegmentState>>>,
    epoch: u64,
}

impl SegmentCache {
    /// The segment `id`, which some index points to.
    #[inline]
    pub fn get(&mut self, table: &SegmentTable, id: u32) -> &Arc<SegmentState> {
        let epoch = table.epoch.load(Ordering::Acquire);
        let at = id as usize;
        let known = epoch == self.epoch && self.slots.get(at).is_some_and(Option::is_some);
        if !known {
            self.look_up(table, epoch, at);
        }
        let Some(Some(state)) = self.slots.get(at) else { unreachable!("just looked up") };
        state
    }

    #[cold]
    fn look_up(&mut self, table: &SegmentTable, epoch: u64, at: usize) {
        if epoch != self.epoch {
            self.slots.clear();
            self.epoch = epoch;
        }
        if self.slots.len() <= at {
            self.slots.resize(at + 1, None);
        }
        let found = table.get(at as u32);
        assert!(found.is_some(), "a location names a segment in use");
        self.slots[at] = found;
    }
}
