//! Making, opening and replacing the files and memfds behind a pool.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use beeline_env::FaultPoint;
use beeline_os::mapping::{Protection, Retired, create_object};
use beeline_os::{Mapping, MemoryObject};
use rustix::fs::{FallocateFlags, SeekFrom};
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

/// Reserves the blocks behind the holes of an existing file of `length` bytes: a copy that left
/// pages of zeros out would otherwise end a process by SIGBUS where the disk is full. Contents
/// stay.
///
/// Errors: `NoSpace`.
pub(crate) fn fill_holes(file: &File, path: &Path, length: u64) -> Result<(), PmemError> {
    let failed = |call| move |source: Errno| PmemError::from_call(call, path, source.into());
    let found = rustix::fs::fstat(file).map_err(failed("fstat"))?;
    if u64::try_from(found.st_blocks).unwrap_or(0) * 512 >= length {
        return Ok(());
    }
    let reserved = rustix::io::retry_on_intr(|| {
        rustix::fs::fallocate(file, FallocateFlags::empty(), 0, length)
    });
    match reserved {
        Ok(()) => return Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
        Err(source) => return Err(failed("fallocate")(source)),
    }
    let mut at = 0;
    while at < length {
        let hole = match rustix::fs::seek(file, SeekFrom::Hole(at)) {
            Ok(hole) if hole < length => hole,
            // What knows no holes has none to fill.
            _ => return Ok(()),
        };
        let data = rustix::fs::seek(file, SeekFrom::Data(hole)).map_or(length, |at| at.min(length));
        write_zeros(file, path, hole, data)?;
        at = data.max(hole + 1);
    }
    Ok(())
}

/// True when no byte of `file` is anything but zero.
///
/// Errors: the file system's.
pub(crate) fn is_zero(file: &File, path: &Path) -> Result<bool, PmemError> {
    let failed = |source| PmemError::from_call("read", path, source);
    let mut piece = vec![0; ZEROS.len()];
    let mut at = 0;
    loop {
        // Whatever does not know its holes is read.
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => return Ok(true),
            Err(_) => at,
        };
        let read = file.read_at(&mut piece, at).map_err(failed)?;
        if read == 0 {
            return Ok(true);
        }
        if piece[..read] != ZEROS[..read] {
            return Ok(false);
        }
        at += read as u64;
    }
}

/// Makes `directory` and whatever is missing above it. Returns the directories that have a new
/// entry: it survives a loss of power once they are synchronised.
pub(crate) fn make_directory(directory: &Path) -> Result<Vec<PathBuf>, PmemError> {
    let failed = |source| PmemError::from_call("mkdir", directory, source);
    let absolute = std::path::absolute(directory).map_err(failed)?;
    let missing = absolute.ancestors().take_while(|path| !path.exists());
    let above = missing.filter_map(Path::parent).map(Path::to_path_buf).collect();
    std::fs::create_dir_all(directory).map_err(failed)?;
    Ok(above)
}

/// Makes entries of `directory` survive a loss of power.
pub(crate) fn sync_directory(directory: &Path) -> Result<(), PmemError> {
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(|source| PmemError::from_call("fsync", directory, source))
}

/// Writes `parts`, each with its offset, to `path` by way of a second name, so that the file is
/// there whole or not at all.
pub(crate) fn write_whole(
    path: &Path,
    length: u64,
    parts: impl Iterator<Item = (usize, Vec<u8>)>,
) -> Result<(), PmemError> {
    let fresh = path.with_extension("new");
    let write = || -> Result<(), PmemError> {
        let file = create_file(&fresh)?;
        reserve(&file, &fresh, 0, length)?;
        for (offset, bytes) in parts {
            file.write_all_at(&bytes, offset as u64)
                .map_err(|source| PmemError::from_call("write", &fresh, source))?;
        }
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

/// Maps a segment's file, with the page of its retired mark behind it.
pub(crate) fn map_segment(
    file: File,
    path: &Path,
    length: usize,
    kind: PoolKind,
) -> Result<Memory, PmemError> {
    Mapping::marked(file.into(), length, Protection::ReadWrite, map_flags(kind))
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
            let mapping = Mapping::object("beeline-segment", making.length).map_err(mapped)?;
            mapping.advise_huge_pages();
            Memory::Mapped(mapping)
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
    reserve(&file, path, 0, Retired::object_bytes(making.length) as u64)?;
    if making.durability == Durability::Power {
        file.sync_all().map_err(|source| PmemError::from_call("fsync", path, source))?;
        if let Some(directory) = path.parent() {
            sync_directory(directory)?;
        }
    }
    let memory = map_segment(file, path, making.length, making.kind)?;
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
        let fresh = create_object("beeline-segment", length)?;
        mapping.retire();
        copy_into(mapping, fresh.as_fd().try_clone_to_owned()?, length, core.kind)
            .and_then(|()| Ok(mapping.replace_with(fresh)?))
            .inspect_err(|_| mapping.reinstate())?;
        return Ok(());
    }
    let path = core.segment_file(segment.id);
    let fresh_path = path.with_extension("new");
    let swap = || -> std::io::Result<()> {
        DURING_REPLACE.check()?;
        let file = create_file(&fresh_path).map_err(std::io::Error::other)?;
        let whole = Retired::object_bytes(length) as u64;
        reserve(&file, &fresh_path, 0, whole).map_err(std::io::Error::other)?;
        mapping.retire();
        copy_into(mapping, file.try_clone()?.into(), length, core.kind)?;
        if core.durability == Durability::Power {
            file.sync_all()?;
        }
        DURING_REPLACE.check()?;
        // Mapped before it takes the name: a mapping that fails leaves the old file in both places.
        let old = mapping.replace_with(file.into())?;
        if core.mechanism == Mechanism::FileSync {
            cache_page_by_page(&segment.memory);
        }
        if let Err(failed) = take_name(core.durability, &fresh_path, &path) {
            back_to(segment, old, &path, &failed);
            return Err(failed);
        }
        let_go(old);
        Ok(())
    };
    swap().inspect_err(|_| {
        // The backing that is mapped now, old or new, is the one in use.
        mapping.reinstate();
        let _ = std::fs::remove_file(&fresh_path);
    })
}

/// Gives a new file the name of the one whose place it has in memory already.
fn take_name(durability: Durability, fresh: &Path, path: &Path) -> std::io::Result<()> {
    DURING_REPLACE.check()?;
    std::fs::rename(fresh, path)?;
    DURING_REPLACE.check()?;
    if durability == Durability::Power
        && let Some(directory) = path.parent()
    {
        sync_directory(directory).map_err(std::io::Error::other)?;
    }
    Ok(())
}

/// Maps the old file again, whose name could not be taken for good: the memory and the name are
/// one file again, with the same bytes. Where that cannot be had the pool promises nothing more.
fn back_to(segment: &Segment, old: Option<Arc<OwnedFd>>, path: &Path, failed: &std::io::Error) {
    let renamed = same_file(segment.memory.descriptor().as_deref(), path);
    let back = match (&segment.memory, old.and_then(|old| old.try_clone().ok())) {
        (Memory::Mapped(mapping), Some(old)) if !renamed => mapping.replace_with(old).is_ok(),
        _ => false,
    };
    if !back {
        let source = failed.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
        segment.core.poison(path, source);
    }
}

/// True when `path` names the file behind `descriptor`.
fn same_file(descriptor: Option<&OwnedFd>, path: &Path) -> bool {
    let (Some(descriptor), Ok(named)) = (descriptor, rustix::fs::stat(path)) else { return false };
    rustix::fs::fstat(descriptor)
        .is_ok_and(|held| (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_directory_that_got_an_entry_is_named_for_synchronising() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let above = make_directory(&root.join("a/b/c")).unwrap();
        assert_eq!(above, [root.join("a/b"), root.join("a"), root.to_path_buf()]);
        assert!(root.join("a/b/c").is_dir());
        assert!(make_directory(&root.join("a/b")).unwrap().is_empty(), "it was there");
    }

    #[test]
    fn a_file_is_zero_until_a_byte_of_it_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = create_file(&path).unwrap();
        assert!(is_zero(&file, &path).unwrap(), "no byte at all");
        file.set_len(1 << 20).unwrap();
        assert!(is_zero(&file, &path).unwrap(), "a hole");
        file.write_all_at(&[0; 9000], 300_000).unwrap();
        assert!(is_zero(&file, &path).unwrap(), "written zeros");
        file.write_all_at(&[1], (1 << 20) - 1).unwrap();
        assert!(!is_zero(&file, &path).unwrap());
    }
}
