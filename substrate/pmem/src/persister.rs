//! Flushing and fencing: the one way from *stored* to *persisted*.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::core::{Core, TABLE_OBJECT};
use crate::error::PmemError;
use crate::layout;
use crate::memory::Memory;
use crate::options::Mechanism;
use crate::record::Event;
use crate::segment::Segment;
use crate::synchroniser::{File, Line};
use beeline_os::MemoryObject;
use beeline_os::start_write::start_write;
use beeline_os::write_back as cache;

/// Length from which a copy past the cache costs less than a copy and its write-back (measured;
/// see `docs/pmem.md`).
pub const NONTEMPORAL_FROM_BYTES: usize = 1024;

/// What a persister has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PersisterCounters {
    /// Calls that flushed a range.
    pub flushes: u64,
    /// Fences that had something to complete or order.
    pub fences: u64,
    /// Cache lines written back.
    pub lines: u64,
    /// Files that its fences had synchronised; fences that were begun share that with others.
    pub syncs: u64,
}

/// One thread's flushes and the fence that completes them. Moves between threads, is not shared.
///
/// At a level where stored is enough (none; process on dax and file pools) every call is a counted
/// no-op. A fence covers what *this* persister flushed.
///
/// Where a fence waits for the disk, [`Persister::begin_fence`] starts one and does not wait. Such a
/// fence has a ticket, a number of this persister's own that grows; what the tickets up to
/// [`Persister::fenced_to`] cover is persisted. Dropping a persister waits for the fences begun.
#[derive(Debug)]
pub struct Persister {
    core: Arc<Core>,
    /// Number in the simulated device's record.
    actor: u32,
    /// Files written since the last fence (file pools at power level).
    dirty: Vec<Arc<Segment>>,
    table_dirty: bool,
    /// Lines since the last fence, for the delay.
    pending_lines: u64,
    counters: PersisterCounters,
    /// Of the latest fence that was begun.
    ticket: u64,
    line: Arc<Line>,
    /// The synchroniser knows of it.
    announced: bool,
    not_sync: PhantomData<Cell<()>>,
}

impl Persister {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        let actor = core.recorder.as_ref().map_or(0, |recorder| recorder.actor());
        Self {
            core,
            actor,
            dirty: Vec::with_capacity(16),
            table_dirty: false,
            pending_lines: 0,
            counters: PersisterCounters::default(),
            ticket: 0,
            line: Arc::default(),
            announced: false,
            not_sync: PhantomData,
        }
    }

    /// Flushes `offset..offset+length` of `segment`: persisted by the next [`Persister::fence`].
    pub fn flush(&mut self, segment: &Segment, offset: usize, length: usize) {
        self.counters.flushes += 1;
        if self.core.mechanism == Mechanism::FileSync {
            self.note_dirty(segment);
        } else {
            self.flush_memory(&segment.memory, segment.object(), offset, length);
        }
    }

    /// Stores and flushes in the cheaper of two ways: through the cache below
    /// [`NONTEMPORAL_FROM_BYTES`], past it from there on. For bytes that nobody reads soon.
    pub fn store_flushed(&mut self, segment: &Segment, offset: usize, source: &[u8]) {
        let cache_lines = matches!(
            self.core.mechanism,
            Mechanism::CacheLine(_) | Mechanism::CacheLineEmulated(_)
        );
        if cache_lines && source.len() >= NONTEMPORAL_FROM_BYTES {
            self.store_nontemporal(segment, offset, source);
        } else {
            segment.store(offset, source);
            self.flush(segment, offset, source.len());
        }
    }

    /// Stores past the cache and counts as flushed: one call for bulk.
    pub fn store_nontemporal(&mut self, segment: &Segment, offset: usize, source: &[u8]) {
        segment.store_nontemporal(offset, source);
        match self.core.mechanism {
            Mechanism::CacheLine(_) | Mechanism::CacheLineEmulated(_) => {
                self.counters.flushes += 1;
                self.count_lines(cache::line_count(offset, source.len()) as u64);
            }
            _ => self.flush(segment, offset, source.len()),
        }
    }

    /// Flushes the user words of `segment`. On a file pool at power level they reach media some
    /// time later, not with the fence: words flushed this way are hints that recovery can do
    /// without. Where that does not hold, use [`Persister::flush_words_now`].
    pub fn flush_words(&mut self, segment: &Segment) {
        let lazy = self.core.mechanism == Mechanism::FileSync || self.core.lazy_words;
        self.counters.flushes += 1;
        if !lazy {
            self.flush_words_lines(segment);
        }
    }

    /// Flushes the user words of `segment`: persisted by the next [`Persister::fence`] on every
    /// kind of pool. Costs a second file synchronisation on a file pool at power level.
    pub fn flush_words_now(&mut self, segment: &Segment) {
        self.counters.flushes += 1;
        self.flush_words_lines(segment);
    }

    fn flush_words_lines(&mut self, segment: &Segment) {
        let offset = layout::word_offset(segment.id, 0);
        self.flush_table(offset, layout::SEGMENT_WORDS * layout::PAIR_BYTES);
    }

    /// Flushes the state of `segment` after [`Segment::renew`]: persisted by the next
    /// [`Persister::fence`] on every kind of pool, at the cost of [`Persister::flush_words_now`].
    pub fn flush_descriptor(&mut self, segment: &Segment) {
        self.counters.flushes += 1;
        self.flush_table(layout::descriptor_offset(segment.id), cache::CACHE_LINE_BYTES);
    }

    /// Flushes every root word.
    pub fn flush_root(&mut self) {
        self.counters.flushes += 1;
        self.flush_table(layout::ROOT_OFFSET, layout::ROOT_WORDS * layout::PAIR_BYTES);
    }

    fn flush_table(&mut self, offset: usize, length: usize) {
        if self.core.mechanism == Mechanism::FileSync {
            self.table_dirty = true;
        } else {
            let core = Arc::clone(&self.core);
            self.flush_memory(&core.table, TABLE_OBJECT, offset, length);
        }
    }

    fn flush_memory(&mut self, memory: &Memory, object: u32, offset: usize, length: usize) {
        match self.core.mechanism {
            Mechanism::None | Mechanism::FileSync => {}
            Mechanism::CacheLine(_) | Mechanism::CacheLineEmulated(_) => {
                let lines = self.core.write_back_range(memory, offset, length);
                self.count_lines(lines as u64);
            }
            Mechanism::Recorded => {
                if let Some(recorder) = &self.core.recorder {
                    recorder.flush(object, offset, length, self.actor);
                }
                self.count_lines(cache::line_count(offset, length) as u64);
            }
        }
    }

    fn count_lines(&mut self, lines: u64) {
        self.counters.lines += lines;
        self.pending_lines += lines;
    }

    fn note_dirty(&mut self, segment: &Segment) {
        let known = |held: &Arc<Segment>| std::ptr::eq(&**held, segment);
        if !self.dirty.iter().any(known)
            && let Some(held) = segment.myself.upgrade()
        {
            self.dirty.push(held);
        }
    }

    /// Returns once everything this persister flushed is persisted at the pool's durability, what
    /// fences cover that were begun before included. While those are under way, files that they synchronise
    /// later are not synchronised once more.
    ///
    /// Errors: `SyncFailed`, from the first failed synchronisation on and for ever: the kernel may
    /// have dropped what it could not write, so no later success means anything.
    pub fn fence(&mut self) -> Result<(), PmemError> {
        self.core.check_sync()?;
        if self.ticket > self.fenced_to() && (self.table_dirty || !self.dirty.is_empty()) {
            // Shares what is in the queue, rather than synchronising once more behind it.
            self.begin_fence()?;
            return self.finish_begun();
        }
        self.finish_begun()?;
        match self.core.mechanism {
            Mechanism::None => {}
            Mechanism::CacheLine(_) => cache::store_fence(),
            Mechanism::CacheLineEmulated(_) => {
                cache::store_fence();
                self.core.delay(self.pending_lines);
            }
            Mechanism::FileSync => self.sync_dirty()?,
            Mechanism::Recorded => {
                if let Some(recorder) = &self.core.recorder {
                    recorder.push(Event::Fenced { by: self.actor });
                }
            }
        }
        if self.core.mechanism != Mechanism::None {
            self.counters.fences += 1;
        }
        self.pending_lines = 0;
        Ok(())
    }

    /// Starts a fence and returns its ticket, without waiting for the disk. Once
    /// [`Persister::fenced_to`] has reached the ticket, what was flushed before this call is
    /// persisted, if [`Persister::check`] returns well then. While the synchronisations of an earlier fence
    /// have not begun that cover this one, too, the ticket is that fence's. Where a fence waits for no
    /// disk it is done when this returns, and the ticket is that of an earlier one.
    ///
    /// Errors: as [`Persister::fence`], of failures known now.
    pub fn begin_fence(&mut self) -> Result<u64, PmemError> {
        let held = self.core.recorder.as_ref().filter(|recorder| recorder.holds_fences());
        if let Some(recorder) = held.map(Arc::clone) {
            // Later flushes are another's: the fence to come covers those before it alone.
            let by = std::mem::replace(&mut self.actor, recorder.actor());
            self.begin_ticket(1);
            recorder.hold(Arc::clone(&self.line), self.ticket, by);
            self.pending_lines = 0;
            return Ok(self.ticket);
        }
        if self.core.mechanism != Mechanism::FileSync {
            self.fence()?;
            return Ok(self.ticket);
        }
        self.core.check_sync()?;
        if !std::mem::replace(&mut self.announced, true) {
            self.core.synchroniser.expect_one_more();
        }
        let table = std::mem::take(&mut self.table_dirty);
        let table = table.then(|| File::Table(Arc::clone(&self.core)));
        let files: Vec<_> = self.dirty.drain(..).map(File::Segment).chain(table).collect();
        self.counters.syncs += files.len() as u64;
        self.counters.fences += 1;
        if self.core.synchroniser.covers(&self.line, self.ticket, &files) {
            return Ok(self.ticket);
        }
        self.begin_ticket(files.len());
        self.core.synchroniser.submit(&self.line, self.ticket, files);
        Ok(self.ticket)
    }

    fn begin_ticket(&mut self, files: usize) {
        self.ticket += 1;
        self.line.begin(self.ticket, files);
    }

    /// What the fences up to this ticket cover is persisted, or failed: ask [`Persister::check`].
    #[must_use]
    #[inline]
    pub fn fenced_to(&self) -> u64 {
        self.line.fenced_to()
    }

    /// Whether every synchronisation of the pool so far went well.
    ///
    /// Errors: as [`Persister::fence`].
    pub fn check(&self) -> Result<(), PmemError> {
        self.core.check_sync()
    }

    /// How far the fences have come, for another thread.
    #[must_use]
    pub fn progress(&self) -> FenceProgress {
        FenceProgress(Arc::clone(&self.line))
    }

    /// Has `waker` called whenever a fence that was begun is done, on whatever thread found out. It
    /// must not block. The first waker stays.
    pub fn set_waker(&self, waker: impl Fn() + Send + Sync + 'static) {
        self.line.set_waker(Box::new(waker));
    }

    /// Waits for the fences that were begun.
    fn finish_begun(&self) -> Result<(), PmemError> {
        if self.ticket > self.fenced_to() {
            match &self.core.recorder {
                Some(recorder) => {
                    while self.ticket > self.fenced_to() {
                        assert!(recorder.complete_fence(), "a fence that was begun is held");
                    }
                }
                None => self.line.wait(),
            }
        }
        self.core.check_sync()
    }

    fn sync_dirty(&mut self) -> Result<(), PmemError> {
        let mut outcome = Ok(());
        // Several files: all on their way before the first is waited for.
        if self.dirty.len() > 1 {
            for descriptor in self.dirty.iter().filter_map(|held| held.memory.descriptor()) {
                start_write(&*descriptor);
            }
        }
        for segment in &self.dirty {
            self.counters.syncs += 1;
            outcome = outcome.and(segment.synchronise());
        }
        self.dirty.clear();
        if std::mem::take(&mut self.table_dirty) {
            self.counters.syncs += 1;
            outcome = outcome.and(self.core.sync_table());
        }
        // Also a failure that another thread heard of since.
        outcome.and_then(|()| self.core.check_sync())
    }

    /// What was done so far.
    #[must_use]
    pub fn counters(&self) -> PersisterCounters {
        self.counters
    }
}

impl Drop for Persister {
    fn drop(&mut self) {
        let _ = self.finish_begun();
    }
}

/// How far the fences of a persister have come, for a thread that does not hold it.
#[derive(Clone, Debug)]
pub struct FenceProgress(Arc<Line>);

impl FenceProgress {
    /// As [`Persister::fenced_to`].
    #[must_use]
    #[inline]
    pub fn fenced_to(&self) -> u64 {
        self.0.fenced_to()
    }
}

/// Starts write-back of a range from any thread, for helpers that share the work of a large
/// flush. The *calling* thread must follow with [`beeline_os::write_back::store_fence`] before anybody counts the
/// range as persisted. Does nothing where cache lines are not the way to durability.
pub fn write_back(segment: &Segment, offset: usize, length: usize) {
    if let Mechanism::CacheLine(_) | Mechanism::CacheLineEmulated(_) = segment.core.mechanism {
        segment.core.write_back_range(&segment.memory, offset, length);
    }
}
