//! Creating and opening: locks, checks, repairs, and what was found.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use beeline_os::mapping::{Protection, Retired};
use beeline_os::{Mapping, MemoryObject};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::backing;
use crate::core::{Core, SyncTurn};
use crate::error::PmemError;
use crate::layout::{self, Header, HeaderError, State};
use crate::memory::{Heap, Memory};
use crate::options::{Durability, Findings, Mechanism, PoolKind, PoolOptions, PoolReport};
use crate::orphans;
use crate::record::Recorder;
use crate::segment::Segment;
use beeline_os::start_write::start_write;
use beeline_os::write_back::WriteBack;

/// Header and descriptor table, inside the pool's directory.
pub(crate) const POOL_FILE: &str = "pool.bee";
const LOCK_FILE: &str = "pool.lock";
const SEGMENT_DIRECTORY: &str = "segments";

/// The parts of an opened pool, for `Pool::assemble`.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) core: Arc<Core>,
    pub(crate) live: Vec<Arc<Segment>>,
    /// Descriptors that are neither free nor usable.
    pub(crate) set_aside: Vec<u32>,
    pub(crate) capacity_slots: u32,
    pub(crate) report: PoolReport,
    pub(crate) prepared_segments: u32,
}

impl Opened {
    /// True when the file of descriptor `id` is to stay: in use, or damaged and left for
    /// inspection. Both lists are in order of id.
    pub(crate) fn uses(&self, id: u32) -> bool {
        self.live.binary_search_by_key(&id, |segment| segment.id).is_ok()
            || self.set_aside.binary_search(&id).is_ok()
    }
}

/// The state of descriptor `id`, from its first good copy.
pub(crate) fn state(core: &Core, id: u32) -> Option<State> {
    let offset = layout::descriptor_offset(id);
    State::decode(core.table_load(offset), id)
        .or_else(|| State::decode(core.table_load(offset + 8), id))
}

fn random<const N: usize>() -> Result<[u8; N], PmemError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| PmemError::System {
        call: "getrandom",
        file: POOL_FILE.into(),
        source: error.raw_os_error().map_or_else(
            || std::io::ErrorKind::Unsupported.into(),
            std::io::Error::from_raw_os_error,
        ),
    })?;
    Ok(bytes)
}

/// The lock on a pool, released when dropped. Released by saying so, not by closing the file: a
/// child being forked at that moment holds a copy of the descriptor for a while.
#[derive(Debug)]
pub(crate) struct PoolLock(File);

impl Drop for PoolLock {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Takes the pool's lock.
fn lock(directory: &Path) -> Result<PoolLock, PmemError> {
    let path = directory.join(LOCK_FILE);
    let failed = |call| {
        let path = path.clone();
        move |source| PmemError::from_call(call, &path, source)
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(failed("open"))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Err(busy(&file, path)),
        Err(source) => return Err(failed("flock")(source.into())),
    }
    // Only a courtesy to whoever finds the pool busy: a full disk must not keep it closed.
    let _ = file
        .set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| file.write_all(std::process::id().to_string().as_bytes()));
    Ok(PoolLock(file))
}

/// Decides between DAX and file by trying to map the pool file itself.
fn detect(
    file: &File,
    directory: &Path,
    options: &PoolOptions,
) -> Result<(PoolKind, String), PmemError> {
    match options.kind {
        Some(PoolKind::File) => Ok((PoolKind::File, "a file pool was asked for".to_owned())),
        wanted => {
            let dax = backing::maps_synchronously(file);
            match (dax, wanted) {
                (true, _) => Ok((PoolKind::Dax, "MAP_SYNC mappings work here".to_owned())),
                (false, Some(PoolKind::Dax)) => {
                    Err(PmemError::NotDax { directory: directory.to_path_buf() })
                }
                (false, _) => Ok((
                    PoolKind::File,
                    "the file system does not map with MAP_SYNC, so this is a file pool".to_owned(),
                )),
            }
        }
    }
}

/// True on tmpfs and ramfs, whose `fdatasync` succeeds and saves nothing.
fn lives_in_memory(file: &File) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    rustix::fs::fstatfs(file)
        .is_ok_and(|found| [TMPFS, RAMFS].contains(&(found.f_type as u64 & 0xffff_ffff)))
}

/// Decides how promises are kept.
fn mechanism(kind: PoolKind, options: &PoolOptions) -> (Mechanism, String) {
    let durability = options.durability;
    let write_back = options.write_back.unwrap_or_else(WriteBack::detect);
    match (kind, durability) {
        (_, Durability::None) => (Mechanism::None, "nothing is promised".to_owned()),
        (PoolKind::File | PoolKind::Dax, Durability::Process) => {
            (Mechanism::None, "a shared file mapping outlives the process as it stands".to_owned())
        }
        (PoolKind::Dax, Durability::Power) if write_back != WriteBack::None => (
            Mechanism::CacheLine(write_back),
            match options.write_back {
                Some(_) => format!("write-back by {write_back} was asked for"),
                None => format!("{write_back} is the best write-back of this processor"),
            },
        ),
        (PoolKind::File | PoolKind::Dax, Durability::Power) => (
            Mechanism::FileSync,
            "only the file system can make bytes survive a loss of power".to_owned(),
        ),
        (PoolKind::Dram, _) => (
            Mechanism::CacheLineEmulated(write_back),
            "volatile memory stands for persistent memory".to_owned(),
        ),
        (PoolKind::Sim, Durability::Process) => {
            (Mechanism::None, "the simulated process ends, the memory stays".to_owned())
        }
        (PoolKind::Sim, Durability::Power) => {
            (Mechanism::Recorded, "every store, flush and fence is recorded".to_owned())
        }
    }
}

/// What the caller of `build` has gathered.
pub(crate) struct Parts {
    pub(crate) kind: PoolKind,
    pub(crate) reason: String,
    pub(crate) header: Header,
    pub(crate) table: Memory,
    pub(crate) table_file: PathBuf,
    pub(crate) directory: Option<PathBuf>,
    pub(crate) recorder: Option<Arc<Recorder>>,
    pub(crate) lock: Option<PoolLock>,
    pub(crate) findings: Findings,
    pub(crate) capacity_slots: u32,
}

pub(crate) fn build(parts: Parts, options: &PoolOptions) -> Opened {
    let (mechanism, why) = mechanism(parts.kind, options);
    let report = PoolReport {
        kind: parts.kind,
        durability: options.durability,
        mechanism,
        emulated: parts.kind == PoolKind::Sim
            || (parts.kind == PoolKind::Dram && options.durability > Durability::None),
        write_delay_ns: options.write_delay_ns,
        reasons: vec![parts.reason, why],
        findings: parts.findings,
        set_aside: Vec::new(),
    };
    let core = Arc::new(Core {
        kind: parts.kind,
        durability: options.durability,
        mechanism,
        write_back: options.write_back.unwrap_or_else(WriteBack::detect),
        write_delay_ns: options.write_delay_ns,
        lazy_words: options.lazy_words,
        segment_bytes: parts.header.segment_bytes,
        secret: parts.header.secret,
        table: parts.table,
        table_file: parts.table_file,
        table_turn: SyncTurn::default(),
        marks: parts.header.marks,
        directory: parts.directory,
        recorder: parts.recorder,
        sync_error: OnceLock::new(),
        fail_next_sync: AtomicBool::new(false),
        syncs: AtomicU64::new(0),
        synchroniser: Arc::default(),
        opened: AtomicBool::new(false),
        _lock: parts.lock,
    });
    Opened {
        core,
        live: Vec::new(),
        set_aside: Vec::new(),
        capacity_slots: parts.capacity_slots,
        report,
        prepared_segments: options.prepared_segments,
    }
}

fn fresh_header(options: &PoolOptions) -> Result<Header, PmemError> {
    let segment_bytes = options.segment_bytes;
    Ok(Header { uuid: random()?, secret: random()?, segment_bytes, marks: true })
}

/// What a new `pool.bee` holds besides zeros, with its offsets.
pub(crate) fn fresh_table(
    header: &Header,
    slots: u32,
) -> impl Iterator<Item = (usize, Vec<u8>)> + use<> {
    let mut bytes = header.encode().to_vec();
    let word = layout::checked_word(u64::from(slots), layout::SLOTS_OFFSET as u32);
    bytes.extend_from_slice(&word.to_le_bytes());
    let marks = layout::marked_pages(layout::file_bytes(slots)).map(|page| {
        let (offset, word) = layout::page_mark(page);
        (offset, [word.to_le_bytes(); 2].concat())
    });
    std::iter::once((0, bytes)).chain(marks)
}

pub(crate) fn dram(options: &PoolOptions) -> Result<Opened, PmemError> {
    options.check(PoolKind::Dram)?;
    let slots = options.slots(options.segment_bytes)?;
    let table = Mapping::memfd("beeline-table", layout::file_bytes(slots))
        .map_err(|source| PmemError::from_mapping(Path::new("dram"), source))?;
    let parts = Parts {
        kind: PoolKind::Dram,
        reason: "a dram pool was asked for".to_owned(),
        header: fresh_header(options)?,
        table: Memory::Mapped(table),
        table_file: "dram".into(),
        directory: None,
        recorder: None,
        lock: None,
        findings: Findings { created: true, clean: true, ..Findings::default() },
        capacity_slots: slots,
    };
    Ok(build(parts, options))
}

pub(crate) fn create(directory: &Path, options: &PoolOptions) -> Result<Opened, PmemError> {
    options.check(options.kind.unwrap_or(PoolKind::File))?;
    let segments = directory.join(SEGMENT_DIRECTORY);
    for above in backing::make_directory(directory)? {
        // A parent that cannot be opened cannot be synchronised, which only a loss of power minds.
        match backing::sync_directory(&above) {
            Err(error) if options.durability == Durability::Power => return Err(error),
            _ => {}
        }
    }
    let lock = lock(directory)?;
    let path = directory.join(POOL_FILE);
    if path.exists() {
        return Err(PmemError::Exists { file: path });
    }
    std::fs::create_dir_all(&segments)
        .map_err(|source| PmemError::from_call("mkdir", &segments, source))?;
    // Segments without a table are somebody's data whose table was lost, not orphans of ours.
    if let Some(file) = first_segment_file(&segments)? {
        return Err(PmemError::Exists { file });
    }
    let header = fresh_header(options)?;
    let slots = options.slots(options.segment_bytes)?;
    backing::write_whole(&path, layout::file_bytes(slots) as u64, fresh_table(&header, slots))?;
    backing::sync_directory(directory)?;
    open_locked(directory, options, lock, true)
}

pub(crate) fn open(directory: &Path, options: &PoolOptions) -> Result<Opened, PmemError> {
    let path = directory.join(POOL_FILE);
    if !path.exists() {
        return Err(PmemError::Missing { file: path });
    }
    let lock = lock(directory)?;
    open_locked(directory, options, lock, false)
}

/// Looks at the pool in `directory` and changes nothing: the table is a copy on the heap, segments
/// are mapped for loads only, and the lock is shared with others who look.
pub(crate) fn inspect(directory: &Path) -> Result<Opened, PmemError> {
    let path = directory.join(POOL_FILE);
    let bytes = std::fs::read(&path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => PmemError::Missing { file: path.clone() },
        _ => PmemError::from_call("read", &path, source),
    })?;
    let lock = lock_to_look(directory)?;
    if bytes.len() < 8 || bytes[..8] != layout::MAGIC {
        return Err(PmemError::Foreign { file: path });
    }
    let truncated = |slots| PmemError::Truncated {
        file: path.clone(),
        expected_bytes: layout::file_bytes(slots) as u64,
        found_bytes: bytes.len() as u64,
    };
    let head = bytes.first_chunk().ok_or_else(|| truncated(1))?;
    let (header, slots) = parse_head(&path, head)?;
    if bytes.len() < layout::file_bytes(slots) {
        return Err(truncated(slots));
    }
    let length = header.segment_bytes as usize;
    let options = PoolOptions {
        durability: Durability::None,
        segment_bytes: header.segment_bytes,
        ..PoolOptions::default()
    };
    let parts = Parts {
        kind: PoolKind::File,
        reason: "looked at only".to_owned(),
        header,
        table: Memory::Heap(Heap::copy_of(&bytes)),
        table_file: path,
        // Without a directory nothing is written, removed or marked as closed.
        directory: None,
        recorder: None,
        lock,
        findings: Findings::default(),
        capacity_slots: slots,
    };
    let mut opened = build(parts, &options);
    recover(&mut opened, slots, |_, id| {
        let path = directory.join(SEGMENT_DIRECTORY).join(format!("{id}.seg"));
        let file = File::open(&path).map_err(|e| PmemError::from_call("open", &path, e))?;
        let found = file.metadata().map_err(|e| PmemError::from_call("fstat", &path, e))?.len();
        if found < length as u64 {
            let expected_bytes = length as u64;
            return Err(PmemError::Truncated { file: path, expected_bytes, found_bytes: found });
        }
        Mapping::shared(file.into(), length, Protection::ReadOnly)
            .map(Memory::Mapped)
            .map_err(|source| PmemError::from_mapping(&path, source))
    })?;
    let orphans = orphans::find(&opened, &directory.join(SEGMENT_DIRECTORY), slots)?;
    orphans::settle(&mut opened, orphans, false)?;
    Ok(opened)
}

/// The pool's lock, shared with others who look; none where no lock file was ever made.
pub(crate) fn lock_to_look(directory: &Path) -> Result<Option<PoolLock>, PmemError> {
    let path = directory.join(LOCK_FILE);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(PmemError::from_call("open", &path, source)),
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(Some(PoolLock(file))),
        Err(Errno::WOULDBLOCK) => Err(busy(&file, path)),
        Err(source) => Err(PmemError::from_call("flock", &path, source.into())),
    }
}

fn busy(file: &File, path: PathBuf) -> PmemError {
    let mut text = String::new();
    let _ = file.take(32).read_to_string(&mut text);
    PmemError::Busy { file: path, pid: text.trim().parse().ok() }
}

/// Opens `path` for reading and writing, if it has at least `expected` bytes.
fn open_sized(path: &Path, expected: u64) -> Result<(File, u64), PmemError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|source| PmemError::from_call("open", path, source))?;
    let found =
        file.metadata().map_err(|source| PmemError::from_call("fstat", path, source))?.len();
    if found < expected {
        return Err(PmemError::Truncated {
            file: path.to_path_buf(),
            expected_bytes: expected,
            found_bytes: found,
        });
    }
    Ok((file, found))
}

fn open_locked(
    directory: &Path,
    options: &PoolOptions,
    lock: PoolLock,
    created: bool,
) -> Result<Opened, PmemError> {
    let path = directory.join(POOL_FILE);
    let failed = |call| {
        let path = path.clone();
        move |source| PmemError::from_call(call, &path, source)
    };
    let (file, found) = open_sized(&path, 0)?;
    let mut head = [0; layout::SLOTS_OFFSET + 8];
    let read = file.read_at(&mut head, 0).map_err(failed("read"))?;
    if read < 8 || head[..8] != layout::MAGIC {
        return Err(PmemError::Foreign { file: path });
    }
    let truncated = |expected_bytes| PmemError::Truncated {
        file: path.clone(),
        expected_bytes,
        found_bytes: found,
    };
    if read < head.len() {
        return Err(truncated(layout::file_bytes(1) as u64));
    }
    let (header, slots) = parse_head(&path, &head)?;
    if found < layout::file_bytes(slots) as u64 {
        return Err(truncated(layout::file_bytes(slots) as u64));
    }
    let options = &PoolOptions { segment_bytes: header.segment_bytes, ..options.clone() };
    let (kind, reason) = detect(&file, directory, options)?;
    options.check(kind)?;
    let in_memory = lives_in_memory(&file);
    if in_memory && options.durability == Durability::Power && !options.emulate_durability {
        return Err(PmemError::VolatileFileSystem { directory: directory.to_path_buf() });
    }
    let wanted = options.slots(header.segment_bytes)?;
    let known = slots;
    let slots = slots.max(wanted);
    backing::fill_holes(&file, &path, found)?;
    backing::reserve(&file, &path, found, layout::file_bytes(slots) as u64)?;
    let table = backing::map_file(file, &path, layout::file_bytes(slots), kind)?;
    let parts = Parts {
        kind,
        reason,
        header,
        table,
        table_file: path,
        directory: Some(directory.to_path_buf()),
        recorder: None,
        lock: Some(lock),
        findings: Findings { created, ..Findings::default() },
        capacity_slots: wanted,
    };
    let mut opened = build(parts, options);
    opened.report.emulated = in_memory && options.durability == Durability::Power;
    grow(&opened.core, known, slots)?;
    recover(&mut opened, slots, segment_memory)?;
    let orphans = orphans::find(&opened, &directory.join(SEGMENT_DIRECTORY), slots)?;
    orphans::settle(&mut opened, orphans, true)?;
    if !created && options.durability == Durability::Power {
        synchronise_all(&opened, directory)?;
    }
    mark_in_use(&opened.core)?;
    opened.core.opened.store(true, Ordering::Relaxed);
    Ok(opened)
}

/// What earlier users left, at whatever level they had: a record that survived the end of their
/// process is taken for persisted from here on, so it has to be.
fn synchronise_all(opened: &Opened, directory: &Path) -> Result<(), PmemError> {
    for descriptor in opened.live.iter().filter_map(|segment| segment.memory.descriptor()) {
        start_write(&*descriptor);
    }
    opened.live.iter().try_for_each(|segment| segment.synchronise())?;
    opened.core.sync_table()?;
    backing::sync_directory(&directory.join(SEGMENT_DIRECTORY))?;
    backing::sync_directory(directory)?;
    let absolute = std::path::absolute(directory)
        .map_err(|source| PmemError::from_call("getcwd", directory, source))?;
    for above in absolute.ancestors().skip(1) {
        // Made by earlier users or not by us at all; the ones that may not be opened are not ours.
        let _ = backing::sync_directory(above);
    }
    Ok(())
}

/// Takes the mark of a clean end away. The last step of opening: a pool that could not be opened
/// is as clean as it was.
pub(crate) fn mark_in_use(core: &Core) -> Result<(), PmemError> {
    let word = core.table_load(layout::CLEAN_OFFSET);
    if word == 0 && core.pair_intact(layout::CLEAN_OFFSET) {
        return Ok(());
    }
    core.store_pair(layout::CLEAN_OFFSET, 0);
    core.persist_table(layout::CLEAN_OFFSET, layout::PAIR_BYTES)
}

pub(crate) fn parse_head(
    path: &Path,
    head: &[u8; layout::SLOTS_OFFSET + 8],
) -> Result<(Header, u32), PmemError> {
    let file = || path.to_path_buf();
    let mut bytes = [0; layout::HEADER_BYTES];
    bytes.copy_from_slice(&head[..layout::HEADER_BYTES]);
    let header = Header::decode(&bytes).map_err(|error| match error {
        HeaderError::Foreign => PmemError::Foreign { file: file() },
        HeaderError::Version(found) => {
            PmemError::Version { file: file(), found, supported: layout::VERSION }
        }
        HeaderError::Damaged => PmemError::Damaged { file: file(), part: "header checksum" },
    })?;
    let mut word = [0; 8];
    word.copy_from_slice(&head[layout::SLOTS_OFFSET..]);
    let slots = layout::check_word(u64::from_le_bytes(word), layout::SLOTS_OFFSET as u32)
        .and_then(|slots| u32::try_from(slots).ok())
        .filter(|&slots| slots > 0 && slots <= crate::options::MAX_SEGMENTS)
        .ok_or_else(|| PmemError::Damaged { file: file(), part: "descriptor count" })?;
    Ok((header, slots))
}

/// Notes a larger table once its zeroed descriptors and the marks of its pages are persisted: one
/// word decides.
fn grow(core: &Core, known: u32, slots: u32) -> Result<(), PmemError> {
    let word = layout::checked_word(u64::from(slots), layout::SLOTS_OFFSET as u32);
    if core.table_load(layout::SLOTS_OFFSET) != word {
        if core.marks {
            let known = layout::file_bytes(known) / layout::PAGE_BYTES;
            for page in known..layout::file_bytes(slots) / layout::PAGE_BYTES {
                store_mark(core, page);
            }
        }
        core.sync_table()?;
        core.table_store(layout::SLOTS_OFFSET, word);
        core.persist_table(layout::SLOTS_OFFSET, 8)?;
    }
    Ok(())
}

fn store_mark(core: &Core, page: usize) {
    let (offset, word) = layout::page_mark(page);
    core.table_store(offset, word);
    core.table_store(offset + 8, word);
}

/// The state of descriptor `id`, where its page may be trusted with it: the word of a descriptor
/// that was never used is zero, as is a page that was lost.
fn known_state(core: &Core, id: u32, lost_pages: &[usize]) -> Option<State> {
    let state = state(core, id)?;
    let never_used = state == State::default();
    (!never_used || lost_pages.binary_search(&layout::page_of(id)).is_err()).then_some(state)
}

/// Pages without a good copy of their mark, in order; a page with one good copy is mended.
fn lost_pages(core: &Core, slots: u32, mended: &mut u32) -> Vec<usize> {
    let mut lost = Vec::new();
    if !core.marks {
        return lost;
    }
    for page in layout::marked_pages(layout::file_bytes(slots)) {
        let (offset, word) = layout::page_mark(page);
        match [offset, offset + 8].map(|at| core.table_load(at) == word) {
            [true, true] => {}
            [false, false] => lost.push(page),
            _ => {
                store_mark(core, page);
                *mended += 1;
            }
        }
    }
    lost
}

/// Reads every descriptor, maps the segments in use, mends second copies.
pub(crate) fn recover(
    opened: &mut Opened,
    slots: u32,
    mut memory: impl FnMut(&Core, u32) -> Result<Memory, PmemError>,
) -> Result<(), PmemError> {
    let core = Arc::clone(&opened.core);
    let findings = &mut opened.report.findings;
    let clean = core.table_load(layout::CLEAN_OFFSET) == 1;
    findings.clean = findings.created || (clean && core.pair_intact(layout::CLEAN_OFFSET));
    let lost = lost_pages(&core, slots, &mut findings.healed_descriptors);
    findings.damaged_pages = lost.len() as u32;
    // Everything that can fail comes before the first change: whoever opens the pool next is told
    // the same.
    let mut memories = Vec::new();
    for id in 0..slots {
        if known_state(&core, id, &lost).is_some_and(|state| state.in_use) {
            memories.push(memory(&core, id)?);
        }
    }
    let mut memories = memories.into_iter();
    let mut mended = findings.healed_descriptors > 0;
    for id in 0..slots {
        let offset = layout::descriptor_offset(id);
        let (first, second) = (core.table_load(offset), core.table_load(offset + 8));
        let Some(state) = known_state(&core, id, &lost) else {
            findings.damaged_descriptors += 1;
            opened.set_aside.push(id);
            continue;
        };
        if first != second {
            // The first copy is stored first, so a good one is the newer; a second copy behind is
            // a crash between two stores, a bad first copy is damage.
            findings.healed_descriptors += u32::from(State::decode(first, id).is_none());
            core.store_state(id, state);
            mended = true;
        }
        if !state.in_use && state.generation == layout::MAX_GENERATION {
            // Used up: its next life could not be told from its first.
            opened.set_aside.push(id);
        }
        if state.in_use
            && let Some(memory) = memories.next()
        {
            for index in 0..layout::SEGMENT_WORDS {
                mended |= mend_pair(&core, layout::word_offset(id, index), findings);
            }
            opened.live.push(Segment::new(Arc::clone(&core), memory, id, state));
        }
    }
    for index in 0..layout::ROOT_WORDS {
        mended |= mend_pair(&core, layout::root_offset(index), findings);
    }
    if mended { core.persist_table(0, layout::file_bytes(slots)) } else { Ok(()) }
}

/// Takes the value of an unequal pair: it was stored first, so it is the newer one.
fn mend_pair(core: &Core, offset: usize, findings: &mut Findings) -> bool {
    let unequal = !core.pair_intact(offset);
    if unequal {
        findings.unequal_words += 1;
        core.store_pair(offset, core.table_load(offset));
    }
    unequal
}

fn segment_memory(core: &Core, id: u32) -> Result<Memory, PmemError> {
    let path = core.segment_file(id);
    let length = u64::from(core.segment_bytes);
    let (file, found) = open_sized(&path, length)?;
    // Builds before the retired mark made files without a page for it.
    let whole = Retired::object_bytes(length as usize) as u64;
    backing::fill_holes(&file, &path, found)?;
    backing::reserve(&file, &path, found, whole)?;
    let memory = backing::map_segment(file, &path, length as usize, core.kind)?;
    if let Memory::Mapped(mapping) = &memory {
        // A replacement that was cut short left it there.
        mapping.reinstate();
    }
    if core.mechanism == Mechanism::FileSync {
        backing::cache_page_by_page(&memory);
    }
    Ok(memory)
}

fn first_segment_file(segments: &Path) -> Result<Option<PathBuf>, PmemError> {
    let failed = |source| PmemError::from_call("readdir", segments, source);
    for entry in std::fs::read_dir(segments).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "seg") {
            return Ok(Some(path));
        }
    }
    Ok(None)
}
