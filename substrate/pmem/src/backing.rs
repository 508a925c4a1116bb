//! Making, opening and replacing the files and memfds behind a pool.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use beeline_env::FaultPoint;
use beeline_os::mapping::{Protection, create_memfd};
use beeline_os::{Mapping, MemoryObject};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags};

use crate::error::PmemError;
use crate::memory::{Heap, Memory};
use crate::options::{Durability, Mechanism, PoolKind};
use crate::segment::Segment;

/// Passed before the new file is made, before it takes the old one's name, and after.
static DURING_REPLACE: FaultPoint = FaultPoint::new("pmem.replace.step");

/// Advice to the kernel starts at a page.
const PAGE_BYTES: usize = 4096;

/// Zeros for file systems without `fallocate`.
static ZEROS: [u8; 1 << 18] = [0; 1 << 18];

/// Flags of a mapping for this kind of pool.
pub(crate) fn map_flags(kind: PoolKind) -> MapFlags {
    if kind == PoolKind::Dax {
        MapFlags::SHARED_VALIDATE | MapFlags::SYNC
    } else {
        MapFlags::SHARED
    }
}

/// A new file, readable by its owner only.
pub(crate) fn create_file(path: &Path) -> Result<File, PmemError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .map_err(|source| PmemError::from_call("open", path, source))
}

/// Reserves every block of bytes `from..length` at the end of a file, so that no store to a
/// mapping of them can fail for want of space. The bytes read as zero.
pub(crate) fn reserve(file: &File, path: &Path, from: u64, length: u64) -> Result<(), PmemError> {
    if from >= length {
        return Ok(());
    }
    let reserved = rustix::io::retry_on_intr(|| {
        rustix::fs::fallocate(file, FallocateFlags::empty(), from, length - from)
    });
    match reserved {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => write_zeros(file, path, from, length),
        Err(source) => Err(PmemError::from_call("fallocate", path, source.into())),
    }
}

/// Writes zeros over bytes `from..length`.
fn write_zeros(file: &File, path: &Path, from: u64, length: u64) -> Result<(), PmemError> {
    let mut at = from;
    while at < length {
        let chunk = (length - at).min(ZEROS.len() as u64) as usize;
        file.write_all_at(&ZEROS[..chunk], at)
            .map_err(|source| PmemError::from_call("write", path, source))?;
        at += chunk as u64;
    }
    Ok(())
}

/// Makes entries of `directory` survive a loss of power.
pub(crate) fn sync_directory(directory: &Path) -> Result<(), PmemError> {
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(|source| PmemError::from_call("fsync", directory, source))
}

/// Writes `bytes` to `path` by way of a second name, so that the file is there whole or not at all.
pub(crate) fn write_whole(path: &Path, length: u64, bytes: &[u8]) -> Result<(), PmemError> {
    let fresh = path.with_extension("new");
    let write = || -> Result<(), PmemError> {
        let mut file = create_file(&fresh)?;
        reserve(&file, &fresh, 0, length)?;
        file.write_all(bytes).map_err(|source| PmemError::from_call("write", &fresh, source))?;
        file.sync_all().map_err(|source| PmemError::from_call("fsync", &fresh, source))?;
        std::fs::rename(&fresh, path).map_err(|source| PmemError::from_call("rename", path, source))
    };
    write().inspect_err(|_| {
        let _ = std::fs::remove_file(&fresh);
    })
}

/// Maps an existing file of exactly the right length.
pub(crate) fn map_file(
    file: File,
    path: &Path,
    length: usize,
    kind: PoolKind,
) -> Result<Memory, PmemError> {
    Mapping::shared_with(file.into(), length, Protection::ReadWrite, map_flags(kind))
        .map(Memory::Mapped)
        .map_err(|source| PmemError::from_mapping(path, source))
}

/// True when `file` can be mapped with `MAP_SYNC`.
pub(crate) fn maps_synchronously(file: &File) -> bool {
    file.try_clone().is_ok_and(|file| {
        let flags = map_flags(PoolKind::Dax);
        Mapping::shared_with(file.into(), 4096, Protection::ReadWrite, flags).is_ok()
    })
}

/// How a segment's memory is to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Making {
    pub(crate) kind: PoolKind,
    pub(crate) durability: Durability,
    pub(crate) length: usize,
}

impl Making {
    /// True where files are synchronised.
    fn is_synchronised(self) -> bool {
        self.kind == PoolKind::File && self.durability == Durability::Power
    }
}

/// Zeroed memory for segment file `path`, its blocks reserved; at power level the file and its
/// name are persisted.
pub(crate) fn make(making: Making, path: &Path, ahead: bool) -> Result<Memory, PmemError> {
    let mapped = |source| PmemError::from_mapping(path, source);
    let memory = match making.kind {
        PoolKind::Sim => return Ok(Memory::Heap(Heap::zeroed(making.length))),
        PoolKind::Dram => {
            Memory::Mapped(Mapping::memfd("beeline-segment", making.length).map_err(mapped)?)
        }
        PoolKind::File | PoolKind::Dax => make_file(making, path).inspect_err(|_| {
            let _ = std::fs::remove_file(path);
        })?,
    };
    if ahead {
        populate(&memory, making);
    }
    Ok(memory)
}

fn make_file(making: Making, path: &Path) -> Result<Memory, PmemError> {
    let file = create_file(path)?;
    reserve(&file, path, 0, making.length as u64)?;
    if making.durability == Durability::Power {
        file.sync_all().map_err(|source| PmemError::from_call("fsync", path, source))?;
        if let Some(directory) = path.parent() {
            sync_directory(directory)?;
        }
    }
    let memory = map_file(file, path, making.length, making.kind)?;
    if making.is_synchronised() {
        cache_page_by_page(&memory);
    }
    Ok(memory)
}

/// Has the kernel cache a file in single pages from here on. Left alone it reads ahead in larger
/// and larger units, and a store through a mapping makes the whole unit dirty: a synchronisation
/// then writes up to some hundred pages for one. Only a matter of speed.
pub(crate) fn cache_page_by_page(memory: &Memory) {
    if let Memory::Mapped(mapping) = memory {
        advise(mapping, 0, mapping.length_bytes(), Advice::Random);
    }
}

/// Starts reading a range into the kernel's cache, page by page where it is kept so. Only a matter
/// of speed.
pub(crate) fn read_ahead(memory: &Memory, offset: usize, length: usize) {
    if let Memory::Mapped(mapping) = memory {
        advise(mapping, offset, length, Advice::WillNeed);
    }
}

fn advise(mapping: &Mapping, offset: usize, length: usize, advice: Advice) {
    let end = offset.saturating_add(length).min(mapping.length_bytes());
    let start = (offset - offset % PAGE_BYTES).min(end);
    let length = end - start;
    let start = mapping.base().as_ptr().wrapping_add(start).cast();
    // SAFETY: a range of the mapping, borrowed; neither advice changes contents.
    let _ = unsafe { rustix::mm::madvise(start, length, advice) };
}

/// Bytes that are made ready at a time: some tens of microseconds' work. Whoever else wants this
/// processor gets it in between, and need not wait for the scheduler's next tick.
pub(crate) const READY_BYTES: usize = 256 << 10;

/// Offsets and lengths of the pieces that `length` bytes are made ready in.
pub(crate) fn pieces(length: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..length).step_by(READY_BYTES).map(move |start| (start, READY_BYTES.min(length - start)))
}

/// Faults every page in, where the kernel can. Only a matter of speed.
///
/// For writing, except where files are synchronised: there, pages made writable count as dirty, and
/// the first synchronisation would write all of them.
fn populate(memory: &Memory, making: Making) {
    let advice = if making.is_synchronised() {
        Advice::LinuxPopulateRead
    } else {
        Advice::LinuxPopulateWrite
    };
    for (start, length) in pieces(memory.length_bytes()) {
        let piece = memory.base().as_ptr().wrapping_add(start);
        // SAFETY: a piece of the mapping, borrowed; populating changes no contents.
        if unsafe { rustix::mm::madvise(piece.cast(), length, advice) }.is_err() {
            return;
        }
        std::thread::yield_now();
    }
}

/// Moves the contents of `segment` to a new file or memfd at the same base.
pub(crate) fn replace(segment: &Segment) -> std::io::Result<()> {
    let Memory::Mapped(mapping) = &segment.memory else { return Ok(()) };
    let length = mapping.length_bytes();
    let core = &segment.core;
    if core.directory.is_none() {
        let fresh = create_memfd("beeline-segment", length)?;
        copy_into(mapping, fresh.as_fd().try_clone_to_owned()?, length, core.kind)?;
        mapping.replace_with(fresh)?;
        return Ok(());
    }
    let path = core.segment_file(segment.id);
    let fresh_path = path.with_extension("new");
    let swap = || -> std::io::Result<()> {
        DURING_REPLACE.check()?;
        let file = create_file(&fresh_path).map_err(std::io::Error::other)?;
        reserve(&file, &fresh_path, 0, length as u64).map_err(std::io::Error::other)?;
        copy_into(mapping, file.try_clone()?.into(), length, core.kind)?;
        if core.durability == Durability::Power {
            file.sync_all()?;
        }
        DURING_REPLACE.check()?;
        std::fs::rename(&fresh_path, &path)?;
        DURING_REPLACE.check()?;
        if core.durability == Durability::Power
            && let Some(directory) = path.parent()
        {
            sync_directory(directory).map_err(std::io::Error::other)?;
        }
        let_go(mapping.replace_with(file.into())?);
        if core.mechanism == Mechanism::FileSync {
            cache_page_by_page(&segment.memory);
        }
        Ok(())
    };
    swap().inspect_err(|_| {
        let _ = std::fs::remove_file(&fresh_path);
    })
}

/// Closes the descriptor of a file that has no name any more, on a thread of its own: giving its
/// blocks back takes as long as copying it did.
fn let_go(old: Option<Arc<OwnedFd>>) {
    let closing = std::thread::Builder::new().name("pmem-close".to_owned());
    // Where there is no thread to be had it is closed here.
    let _ = closing.spawn(move || drop(old));
}

fn copy_into(
    mapping: &Mapping,
    target: OwnedFd,
    length: usize,
    kind: PoolKind,
) -> std::io::Result<()> {
    let fresh = Mapping::shared(target, length, Protection::ReadWrite)?;
    if kind != PoolKind::Dax {
        mapping.copy_into(&fresh);
        return Ok(());
    }
    // What DAX file systems say of holes is theirs alone.
    // SAFETY: both mappings are `length` bytes long and distinct. A peer may be storing into the
    // old one meanwhile; what is copied of that store is unspecified, as for any write in flight
    // when its region is revoked.
    unsafe {
        std::ptr::copy_nonoverlapping(mapping.base().as_ptr(), fresh.base().as_ptr(), length);
    }
    Ok(())
}
