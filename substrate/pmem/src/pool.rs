//! The pool: opening, the descriptor table, allocation and freeing of segments.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use beeline_env::FaultPoint;

use crate::backing::{self, Making};
use crate::core::{Core, TABLE_OBJECT};
use crate::crash::{CrashImage, SimDevice};
use crate::error::PmemError;
use crate::layout::{self, State};
use crate::memory::Memory;
use crate::open;
use crate::options::{PoolKind, PoolOptions, PoolReport};
use crate::persister::Persister;
use crate::prepare::Preparer;
use crate::record::Event;
use crate::segment::Segment;
use crate::simulate;

static BEFORE_DESCRIPTOR: FaultPoint = FaultPoint::new("pmem.allocate.before_descriptor");
static AFTER_DESCRIPTOR: FaultPoint = FaultPoint::new("pmem.allocate.after_descriptor");
static BEFORE_UNLINK: FaultPoint = FaultPoint::new("pmem.free.before_unlink");

fn fault(point: &FaultPoint, file: &Path) -> Result<(), PmemError> {
    point.check().map_err(|fault| PmemError::from_call("fault point", file, fault.into()))
}

/// A pool of segments. Clones are handles on the same pool.
#[derive(Clone, Debug)]
pub struct Pool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    preparer: Option<Preparer>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(preparer) = self.preparer.take() {
            self.shared.lock().stop = true;
            self.shared.changed.notify_all();
            preparer.join();
        }
        // Prepared segments belong to nobody: their files go, the next opener makes its own.
        let mut slots = self.shared.lock();
        let slots = &mut *slots;
        for (id, _memory) in slots.ready.drain(..).chain(slots.aside.drain(..)) {
            self.shared.remove_file(id);
        }
    }
}

/// Most freed memory that waits to be given back, in segments: beyond, whoever frees does it.
const MOST_RETIRED: usize = 4;

/// What allocation, freeing and the preparing thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) core: Arc<Core>,
    pub(crate) capacity_slots: u32,
    pub(crate) prepared_target: usize,
    report: PoolReport,
    slots: Mutex<Slots>,
    pub(crate) changed: Condvar,
}

/// Who owns which descriptor.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// In use, by id.
    pub(crate) live: Vec<Option<Arc<Segment>>>,
    /// Free descriptors below the capacity.
    pub(crate) free: BTreeSet<u32>,
    /// Allocated memory for free descriptors, zeroed and persisted.
    pub(crate) ready: Vec<(u32, Memory)>,
    /// As `ready`, kept for [`Pool::allocate_from_reserve`].
    pub(crate) aside: Vec<(u32, Memory)>,
    /// How many to keep aside.
    aside_target: usize,
    /// Memory of freed segments nobody else holds, to be zeroed and made ready.
    pub(crate) recycle: Vec<(u32, Memory)>,
    /// Memory of freed segments nobody else holds, to be given back to the system: that takes
    /// milliseconds, which whoever freed the segment need not wait for.
    pub(crate) retired: Vec<Memory>,
    /// The preparing thread is giving memory back.
    pub(crate) retiring: bool,
    /// Descriptors the preparing thread is working on.
    pub(crate) preparing: u32,
    /// The last preparation failed; wait for a free before trying again.
    pub(crate) discouraged: bool,
    pub(crate) stop: bool,
    in_use: u32,
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn making(&self) -> Making {
        Making {
            kind: self.core.kind,
            durability: self.core.durability,
            length: self.core.segment_bytes as usize,
        }
    }

    /// Sees to it that freed memory is given back before this returns; false when all was.
    fn drop_retired(&self) -> bool {
        let mut slots = self.lock();
        let retired = std::mem::take(&mut slots.retired);
        let waited = slots.retiring;
        while slots.retiring {
            slots = self.changed.wait(slots).unwrap_or_else(PoisonError::into_inner);
        }
        waited || !retired.is_empty()
    }

    pub(crate) fn remove_file(&self, id: u32) {
        if self.core.directory.is_some() {
            // A file that stays is an orphan: removed when the pool is opened next.
            let _ = std::fs::remove_file(self.core.segment_file(id));
        }
    }
}

impl Pool {
    /// Makes a pool in `directory` (made if absent).
    ///
    /// Errors: [`PmemError`]; `Exists` when one is there.
    pub fn create(directory: &Path, options: &PoolOptions) -> Result<Self, PmemError> {
        match options.kind {
            Some(PoolKind::Dram) => Self::dram(options),
            Some(PoolKind::Sim) => Err(PmemError::Options {
                option: "kind",
                advice: "a sim pool is made with Pool::simulated",
            }),
            _ => Ok(Self::assemble(open::create(directory, options)?)),
        }
    }

    /// Opens the pool in `directory`. Segments in use come back; orphaned files are removed and
    /// counted. `segment_bytes` comes from the pool; a larger capacity grows it.
    ///
    /// Errors: [`PmemError`], each naming the file and what to change.
    pub fn open(directory: &Path, options: &PoolOptions) -> Result<Self, PmemError> {
        match options.kind {
            Some(PoolKind::Dram | PoolKind::Sim) => Err(PmemError::Options {
                option: "kind",
                advice: "only dax and file pools can be opened again",
            }),
            _ => Ok(Self::assemble(open::open(directory, options)?)),
        }
    }

    /// Opens the pool in `directory`, or makes it.
    ///
    /// Errors: as for [`Pool::open`] and [`Pool::create`].
    pub fn open_or_create(directory: &Path, options: &PoolOptions) -> Result<Self, PmemError> {
        let file_like = !matches!(options.kind, Some(PoolKind::Dram | PoolKind::Sim));
        if file_like && directory.join(open::POOL_FILE).exists() {
            Self::open(directory, options)
        } else {
            Self::create(directory, options)
        }
    }

    /// Looks at the pool in `directory` and changes nothing in it, not even marks of use: for
    /// checks. Segments can be read; the pool allocates and frees nothing that lasts. What was
    /// damaged or half-written is in [`PoolReport::findings`].
    ///
    /// Errors: `Busy` while somebody has it open; as for [`Pool::open`].
    pub fn inspect(directory: &Path) -> Result<Self, PmemError> {
        Ok(Self::assemble(open::inspect(directory)?))
    }

    /// Fails with `Busy`, which names the process, while somebody has the pool in `directory` open.
    ///
    /// Errors: that; the file system's.
    pub fn check_free(directory: &Path) -> Result<(), PmemError> {
        open::lock_to_look(directory).map(drop)
    }

    /// A volatile pool of memfds.
    ///
    /// Errors: `CannotPromise` for a durability above none without `emulate_durability`.
    pub fn dram(options: &PoolOptions) -> Result<Self, PmemError> {
        Ok(Self::assemble(open::dram(options)?))
    }

    /// A simulated pool on the heap, and the device that records what happens to it. Its bytes,
    /// the secret included, are the same in every run.
    ///
    /// Errors: `Options`.
    pub fn simulated(options: &PoolOptions) -> Result<(Self, SimDevice), PmemError> {
        let (opened, device) = simulate::simulated(options)?;
        Ok((Self::assemble(opened), device))
    }

    /// Opens what a crash left, as a simulated pool with a record of its own (so that a crash of
    /// the recovery can be imagined too).
    ///
    /// Errors: as for [`Pool::open`].
    pub fn open_image(
        image: &CrashImage,
        options: &PoolOptions,
    ) -> Result<(Self, SimDevice), PmemError> {
        let (opened, device) = simulate::image(image, options)?;
        Ok((Self::assemble(opened), device))
    }

    pub(crate) fn assemble(opened: open::Opened) -> Self {
        let open::Opened { core, live, set_aside, capacity_slots, report, prepared_segments } =
            opened;
        let mut slots = Slots { in_use: live.len() as u32, ..Slots::default() };
        slots.free = (0..capacity_slots).collect();
        for id in set_aside {
            slots.free.remove(&id);
        }
        for segment in live {
            let id = segment.id as usize;
            slots.free.remove(&segment.id);
            if slots.live.len() <= id {
                slots.live.resize_with(id + 1, || None);
            }
            slots.live[id] = Some(segment);
        }
        let prepared = if core.kind == PoolKind::Sim { 0 } else { prepared_segments };
        let shared = Arc::new(Shared {
            core,
            capacity_slots,
            prepared_target: prepared as usize,
            report,
            slots: Mutex::new(slots),
            changed: Condvar::new(),
        });
        let preparer = (prepared > 0).then(|| Preparer::start(&shared)).flatten();
        Self { inner: Arc::new(Inner { shared, preparer }) }
    }

    fn shared(&self) -> &Shared {
        &self.inner.shared
    }

    fn core(&self) -> &Arc<Core> {
        &self.inner.shared.core
    }

    /// Takes a segment: zeroed, of a new generation, its user words zero. The descriptor is
    /// persisted when this returns; a segment that its owner never linked anywhere is found by
    /// [`Pool::segments`] after a crash, and can be freed.
    ///
    /// Errors: `PoolFull`; `NoSpace` (the blocks of a segment are reserved here, so that later
    /// stores cannot fail); `SyncFailed`.
    pub fn allocate(&self) -> Result<Arc<Segment>, PmemError> {
        let shared = self.shared();
        let core = self.core();
        core.check_sync()?;
        let mut slots = shared.lock();
        let (id, ready) = loop {
            // Fewer descriptors than in use: the pool was opened with less capacity than before.
            if slots.in_use >= shared.capacity_slots {
                return Err(PmemError::PoolFull { capacity_bytes: self.capacity_bytes() });
            }
            if let Some((id, memory)) = slots.ready.pop() {
                break (id, Some(memory));
            }
            if let Some((id, _memory)) = slots.recycle.pop() {
                // Dropped, not zeroed: this caller is waiting.
                shared.remove_file(id);
                break (id, None);
            }
            if let Some(id) = slots.free.pop_first() {
                break (id, None);
            }
            // Nothing else is left below the capacity: whose turn it is, is the caller's policy.
            if let Some((id, memory)) = slots.aside.pop() {
                break (id, Some(memory));
            }
            if slots.preparing == 0 {
                return Err(PmemError::PoolFull { capacity_bytes: self.capacity_bytes() });
            }
            slots = shared.changed.wait(slots).unwrap_or_else(PoisonError::into_inner);
        };
        slots.in_use += 1;
        drop(slots);
        shared.changed.notify_all();

        let memory = match self.memory(id, ready) {
            Ok(memory) => memory,
            Err(error) => {
                let mut slots = shared.lock();
                slots.in_use -= 1;
                slots.free.insert(id);
                drop(slots);
                shared.remove_file(id);
                return Err(error);
            }
        };
        self.enlist(id, memory)
    }

    /// Moves the descriptor to *in use* and the segment into the table.
    fn enlist(&self, id: u32, memory: Memory) -> Result<Arc<Segment>, PmemError> {
        // From here on the descriptor may stand as in use on media, so a failure leaves descriptor
        // and file alone: the next opener finds a segment that nobody linked.
        let segment = self.activate(id, memory)?;
        let mut slots = self.shared().lock();
        let index = id as usize;
        if slots.live.len() <= index {
            slots.live.resize_with(index + 1, || None);
        }
        slots.live[index] = Some(Arc::clone(&segment));
        Ok(segment)
    }

    /// Keeps `segments` with their blocks reserved on the file system, for
    /// [`Pool::allocate_from_reserve`]: what a full disk must not refuse. They are made now and
    /// made up after every free, and count neither as used nor beyond the capacity. Only file and
    /// dax pools have a disk that others can fill; elsewhere this does nothing.
    ///
    /// Returns how many are there: fewer where the disk has no more room.
    pub fn keep_reserve(&self, segments: usize) -> usize {
        if !matches!(self.core().kind, PoolKind::File | PoolKind::Dax) {
            return 0;
        }
        self.shared().lock().aside_target = segments;
        self.fill_reserve()
    }

    fn fill_reserve(&self) -> usize {
        let shared = self.shared();
        loop {
            let id = {
                let mut slots = shared.lock();
                if slots.aside.len() >= slots.aside_target {
                    return slots.aside.len();
                }
                let Some(id) = slots.free.pop_first() else { return slots.aside.len() };
                id
            };
            let made = self.memory(id, None);
            let mut slots = shared.lock();
            match made {
                Ok(memory) => slots.aside.push((id, memory)),
                Err(_) => {
                    slots.free.insert(id);
                    let there = slots.aside.len();
                    drop(slots);
                    shared.remove_file(id);
                    return there;
                }
            }
        }
    }

    /// As [`Pool::allocate`], from what [`Pool::keep_reserve`] keeps: needs no room on the disk.
    ///
    /// Errors: `PoolFull` when the reserve is used up; `SyncFailed`.
    pub fn allocate_from_reserve(&self) -> Result<Arc<Segment>, PmemError> {
        self.core().check_sync()?;
        let (id, memory) = {
            let mut slots = self.shared().lock();
            let full = || PmemError::PoolFull { capacity_bytes: self.capacity_bytes() };
            if slots.in_use >= self.shared().capacity_slots {
                return Err(full());
            }
            let kept = slots.aside.pop().ok_or_else(full)?;
            slots.in_use += 1;
            kept
        };
        self.enlist(id, memory)
    }

    /// Takes what is ready, or makes zeroed memory now.
    fn memory(&self, id: u32, ready: Option<Memory>) -> Result<Memory, PmemError> {
        let core = self.core();
        let memory = match ready {
            Some(memory) => memory,
            None => {
                core.persist_zero_words(id)?;
                let making = self.shared().making();
                match backing::make(making, &core.segment_file(id), false) {
                    Err(PmemError::NoSpace { .. }) if self.shared().drop_retired() => {
                        backing::make(making, &core.segment_file(id), false)?
                    }
                    made => made?,
                }
            }
        };
        fault(&BEFORE_DESCRIPTOR, &core.table_file)?;
        Ok(memory)
    }

    /// Moves the descriptor to *in use*, a generation on.
    fn activate(&self, id: u32, memory: Memory) -> Result<Arc<Segment>, PmemError> {
        let core = self.core();
        if let Some(recorder) = &core.recorder {
            let length_bytes = core.segment_bytes as usize;
            recorder.push(Event::Created { object: id + 1, length_bytes });
        }
        let before = open::state(core, id).unwrap_or_default();
        let generation = before.generation + 1;
        let state = State { in_use: true, shared: false, generation };
        core.persist_state(id, state)?;
        fault(&AFTER_DESCRIPTOR, &core.table_file)?;
        Ok(Segment::new(Arc::clone(core), memory, id, state))
    }

    /// Gives a segment back: its descriptor is persisted as free first, then its file goes or is
    /// recycled (only if it was never shared and nobody else holds the segment). Whoever still
    /// holds it can go on reading memory that no longer belongs to the pool.
    ///
    /// The caller has persisted that nothing refers to the segment.
    ///
    /// Errors: `SyncFailed`; the descriptor is then not reused before the pool is opened again.
    pub fn free(&self, segment: Arc<Segment>) -> Result<(), PmemError> {
        let shared = self.shared();
        let core = self.core();
        assert!(Arc::ptr_eq(&segment.core, core), "a segment goes back to its own pool");
        let id = segment.id;
        let held = {
            let mut slots = shared.lock();
            let held = slots.live.get_mut(id as usize).and_then(Option::take);
            assert!(
                held.as_ref().is_some_and(|held| Arc::ptr_eq(held, &segment)),
                "a segment is freed once"
            );
            held
        };
        drop(held);
        let generation = segment.generation();
        core.persist_state(id, State { in_use: false, shared: false, generation })?;
        fault(&BEFORE_UNLINK, &core.table_file)?;
        if let Some(recorder) = &core.recorder {
            recorder.push(Event::Removed { object: id + 1 });
        }
        let was_shared = segment.is_shared();
        let mut alone = Arc::into_inner(segment).map(|segment| segment.memory);
        let mut slots = shared.lock();
        slots.in_use -= 1;
        slots.discouraged = false;
        let wanted = slots.ready.len() + slots.recycle.len() < shared.prepared_target;
        let again = generation < layout::MAX_GENERATION;
        if wanted
            && !was_shared
            && again
            && !alone.as_ref().is_some_and(Memory::is_sealed)
            && let Some(memory) = alone.take()
        {
            slots.recycle.push((id, memory));
        } else {
            shared.remove_file(id);
            if again {
                slots.free.insert(id);
            }
        }
        if shared.prepared_target > 0 && !was_shared && slots.retired.len() < MOST_RETIRED {
            slots.retired.extend(alone.take());
        }
        let short = slots.aside.len() < slots.aside_target;
        drop(slots);
        // A mapping holds the blocks of a file without a name.
        drop(alone);
        if short {
            self.fill_reserve();
        }
        shared.changed.notify_all();
        Ok(())
    }

    /// Every segment in use, by id.
    #[must_use]
    pub fn segments(&self) -> Vec<Arc<Segment>> {
        self.shared().lock().live.iter().flatten().cloned().collect()
    }

    /// The segment with this id, if it is in use.
    #[must_use]
    pub fn segment(&self, id: u32) -> Option<Arc<Segment>> {
        self.shared().lock().live.get(id as usize).cloned().flatten()
    }

    /// Most bytes of segments.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        u64::from(self.shared().capacity_slots) * u64::from(self.core().segment_bytes)
    }

    /// Bytes of segments in use.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        u64::from(self.shared().lock().in_use) * u64::from(self.core().segment_bytes)
    }

    /// Segments that stand ready for [`Pool::allocate`].
    #[must_use]
    pub fn prepared_segments(&self) -> usize {
        self.shared().lock().ready.len()
    }

    /// Length of every segment.
    #[must_use]
    pub fn segment_bytes(&self) -> u32 {
        self.core().segment_bytes
    }

    /// Random bytes made with the pool, for keyed checks. Never leave the server.
    #[must_use]
    pub fn secret(&self) -> [u8; 16] {
        self.core().secret
    }

    /// Root word `index` (below 64).
    #[must_use]
    pub fn root_word(&self, index: usize) -> u64 {
        self.core().table_load(layout::root_offset(index))
    }

    /// Stores root word `index` (below 64). Flush with [`Persister::flush_root`]. One thread at a
    /// time stores a word.
    pub fn store_root_word(&self, index: usize, value: u64) {
        self.core().store_pair(layout::root_offset(index), value);
    }

    /// A persister for one thread.
    #[must_use]
    pub fn persister(&self) -> Persister {
        Persister::new(Arc::clone(self.core()))
    }

    /// What the pool turned out to be.
    #[must_use]
    pub fn report(&self) -> PoolReport {
        self.shared().report.clone()
    }

    /// Synchronisations of files (`fdatasync`) since the pool was opened.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.core().syncs.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Makes the next file synchronisation fail, as a broken disk would: a fault point for tests
    /// of whoever relies on the pool.
    pub fn fail_next_sync(&self) {
        self.core().fail_next_sync.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    /// The table's record object; see [`crate::Event`].
    pub const TABLE_OBJECT: u32 = TABLE_OBJECT;

    /// Where the pool's files are.
    #[must_use]
    pub fn directory(&self) -> Option<PathBuf> {
        self.core().directory.clone()
    }
}
