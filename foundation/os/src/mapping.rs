//! The owner of one `mmap`: memfd, file or anonymous memory, unmapped on drop.
//!
//! Invariants: the base never moves while the value lives; [`Mapping::replace_with`] swaps the
//! pages under the same base in one system call (`MAP_FIXED`), so a local reader sees either the
//! old object or the new one.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::barrier;
use crate::memory::{MemoryObject, Persistence};
use crate::moving;
use crate::one_writer;

/// A page: what [`Mapping::copy_into`] looks at at a time.
const PAGE_BYTES: usize = 4096;
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// Why a mapping could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MappingError {
    /// The system call that failed, and how long the object was to be.
    #[error("{call} of {length_bytes} bytes failed: {source}")]
    Call {
        /// Name of the system call.
        call: &'static str,
        /// Requested length.
        length_bytes: usize,
        /// What the kernel said.
        #[source]
        source: Errno,
    },
    /// A mapping of no bytes has no address.
    #[error("a mapping needs at least one byte")]
    Empty,
}

impl From<MappingError> for std::io::Error {
    fn from(error: MappingError) -> Self {
        match error {
            MappingError::Call { source, .. } => source.into(),
            MappingError::Empty => Self::from(std::io::ErrorKind::InvalidInput),
        }
    }
}

/// Whether the mapping may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Loads only.
    ReadOnly,
    /// Loads and stores.
    ReadWrite,
}

impl Protection {
    fn flags(self) -> ProtFlags {
        match self {
            Self::ReadOnly => ProtFlags::READ,
            Self::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        }
    }
}

/// The retired mark of a backing: a word in a page of its own behind the object's bytes. Its owner
/// stores 1 there before it moves the contents away. A peer that still maps the backing looks at it
/// after each copy: while it is 0 the copy was part of the contents that moved. It stays in a file
/// that lost its name, so that also a peer of an owner that ended and began anew learns of it.
///
/// A peer that may write the object may write the mark too: it then holds up those who share the
/// object with it, and gains nothing.
#[derive(Clone, Copy, Debug)]
pub struct Retired;

impl Retired {
    /// Where the mark stands in an object of `length_bytes`.
    #[must_use]
    pub const fn offset(length_bytes: usize) -> usize {
        length_bytes.next_multiple_of(PAGE_BYTES)
    }

    /// Length of an object of `length_bytes` with its mark.
    #[must_use]
    pub const fn object_bytes(length_bytes: usize) -> usize {
        Self::offset(length_bytes) + PAGE_BYTES
    }
}

/// One live `mmap`.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    length_bytes: usize,
    /// With the page of the retired mark, where the object has one.
    mapped_bytes: usize,
    protection: Protection,
    /// As first mapped; a replacement is mapped the same way.
    flags: MapFlags,
    /// Kept so that the object can be handed to peers; replaced by [`Mapping::replace_with`].
    descriptor: Mutex<Option<Arc<OwnedFd>>>,
}

// SAFETY: the mapping is plain memory owned by the value; access to its bytes goes through raw
// copies and atomics, and the descriptor sits behind a mutex.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Anonymous shared memory with a descriptor peers can map (memfd, sealed against shrinking so
    /// that no holder can make our loads fault).
    ///
    /// Errors: [`MappingError`] naming the system call.
    pub fn memfd(name: &str, length_bytes: usize) -> Result<Self, MappingError> {
        let fd = create_memfd(name, length_bytes)?;
        Self::shared(fd, length_bytes, Protection::ReadWrite)
    }

    /// As [`Mapping::memfd`], with a retired mark, and not sealed for good: see [`create_object`].
    ///
    /// Errors: [`MappingError`] naming the system call.
    pub fn object(name: &str, length_bytes: usize) -> Result<Self, MappingError> {
        let fd = create_object(name, length_bytes)?;
        Self::marked(fd, length_bytes, Protection::ReadWrite, MapFlags::SHARED)
    }

    /// Maps `length_bytes` of `descriptor` from offset 0, shared, and the page of the retired mark
    /// behind them: the object has [`Retired::object_bytes`].
    ///
    /// Errors: [`MappingError`] naming the system call.
    pub fn marked(
        descriptor: OwnedFd,
        length_bytes: usize,
        protection: Protection,
        flags: MapFlags,
    ) -> Result<Self, MappingError> {
        if length_bytes == 0 {
            return Err(MappingError::Empty);
        }
        let whole = Retired::object_bytes(length_bytes);
        let mut mapping = Self::map(&descriptor, 0, whole, protection, flags)?;
        mapping.length_bytes = length_bytes;
        *mapping.descriptor.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Arc::new(descriptor));
        Ok(mapping)
    }

    /// The retired mark, where the object has one.
    #[must_use]
    pub fn retired(&self) -> Option<&AtomicU64> {
        if self.mapped_bytes == self.length_bytes {
            return None;
        }
        // SAFETY: the page of the mark is mapped behind the object's bytes (`marked`).
        let mark = unsafe { self.base.as_ptr().add(Retired::offset(self.length_bytes)) };
        // SAFETY: mapped while `self` is borrowed, aligned to a page, reached through atomics only.
        Some(unsafe { AtomicU64::from_ptr(mark.cast()) })
    }

    /// Puts the retired mark on the present backing. After this returns, a peer that looks at the
    /// mark after a copy and finds none has stored all of that copy already.
    pub fn retire(&self) {
        if let Some(mark) = self.retired() {
            mark.store(1, Ordering::Release);
            // Pairs with the light fence between a peer's copy and its look.
            barrier::heavy();
        }
    }

    /// Takes the retired mark away: the backing stays in use, or is in use again.
    pub fn reinstate(&self) {
        if let Some(mark) = self.retired()
            && mark.load(Ordering::Relaxed) != 0
        {
            mark.store(0, Ordering::Release);
        }
    }

    /// Maps `length_bytes` of `descriptor` from offset 0, shared.
    ///
    /// Errors: [`MappingError`] naming the system call.
    pub fn shared(
        descriptor: OwnedFd,
        length_bytes: usize,
        protection: Protection,
    ) -> Result<Self, MappingError> {
        Self::shared_with(descriptor, length_bytes, protection, MapFlags::SHARED)
    }

    /// Maps `length_bytes` of `descriptor` from `offset`, a multiple of the page size, shared. The
    /// descriptor is not kept.
    ///
    /// Errors: [`MappingError`] naming the system call.
    pub fn shared_at(
        descriptor: impl AsFd,
        offset: u64,
        length_bytes: usize,
    ) -> Result<Self, MappingError> {
        Self::map(descriptor, offset, length_bytes, Protection::ReadWrite, MapFlags::SHARED)
    }

    /// As [`Mapping::shared`] with the caller's flags (`MAP_SYNC` for DAX).
    ///
    /// Errors: [`MappingError`] naming the system call.
    pub fn shared_with(
        descriptor: OwnedFd,
        length_bytes: usize,
        protection: Protection,
        flags: MapFlags,
    ) -> Result<Self, MappingError> {
        let mapping = Self::map(&descriptor, 0, length_bytes, protection, flags)?;
        let mut held = mapping.descriptor.lock().unwrap_or_else(PoisonError::into_inner);
        *held = Some(Arc::new(descriptor));
        drop(held);
        Ok(mapping)
    }

    fn map(
        descriptor: impl AsFd,
        offset: u64,
        length_bytes: usize,
        protection: Protection,
        flags: MapFlags,
    ) -> Result<Self, MappingError> {
        if length_bytes == 0 {
            return Err(MappingError::Empty);
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length_bytes,
                protection.flags(),
                flags,
                descriptor,
                offset,
            )
        }
        .map_err(|source| MappingError::Call { call: "mmap", length_bytes, source })?;
        let base = NonNull::new(base.cast()).ok_or(MappingError::Empty)?;
        let mapped_bytes = length_bytes;
        let descriptor = Mutex::new(None);
        Ok(Self { base, length_bytes, mapped_bytes, protection, flags, descriptor })
    }

    /// Private anonymous memory without a descriptor.
    ///
    /// Errors: [`MappingError`] naming the system call.
    pub fn anonymous(length_bytes: usize) -> Result<Self, MappingError> {
        if length_bytes == 0 {
            return Err(MappingError::Empty);
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                length_bytes,
                Protection::ReadWrite.flags(),
                MapFlags::PRIVATE,
            )
        }
        .map_err(|source| MappingError::Call { call: "mmap", length_bytes, source })?;
        let base = NonNull::new(base.cast()).ok_or(MappingError::Empty)?;
        Ok(Self {
            base,
            length_bytes,
            mapped_bytes: length_bytes,
            protection: Protection::ReadWrite,
            flags: MapFlags::SHARED,
            descriptor: Mutex::new(None),
        })
    }

    /// First byte.
    #[inline]
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    #[inline]
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length_bytes
    }

    /// What the mapping allows.
    #[must_use]
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// A duplicate handle on the descriptor behind the mapping, if it has one.
    #[must_use]
    pub fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        self.descriptor.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks for huge pages, where the system gives shared memory any
    /// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled` at `advise`). Only a matter of speed.
    pub fn advise_huge_pages(&self) {
        let start = self.base.as_ptr().cast();
        // SAFETY: exactly this mapping; the advice changes no contents.
        let _ = unsafe { rustix::mm::madvise(start, self.mapped_bytes, Advice::LinuxHugepage) };
    }

    /// Drops the descriptor; the mapping stays. For mappings nobody will be handed.
    pub fn forget_descriptor(&self) {
        self.descriptor.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Copies this object's contents into `fresh`, a new object that reads as zero and is as long.
    /// Pages of zeros are looked at and not written: making a page of a file takes ten times as
    /// long as reading one, and a region of which little was used costs little.
    ///
    /// Whoever stores meanwhile may find it copied or not.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy_into(&self, fresh: &Self) {
        assert_eq!(self.length_bytes, fresh.length_bytes, "contents move to an object as long");
        let descriptor = self.descriptor();
        let mut page = [0_u8; PAGE_BYTES];
        let mut at = 0;
        while let Some((start, end)) = self.next_data(descriptor.as_deref(), at) {
            for at in (start..end).step_by(PAGE_BYTES) {
                let length = PAGE_BYTES.min(end - at);
                // SAFETY: `at` lies within this mapping.
                let source = unsafe { self.base.as_ptr().add(at) };
                // SAFETY: the piece ends within this mapping and fits the copy. A peer may be
                // storing into it meanwhile; what is copied of that store is unspecified, as for
                // any write in flight when its region is revoked.
                unsafe { std::ptr::copy_nonoverlapping(source, page.as_mut_ptr(), length) };
                if page[..length] == ZEROS[..length] {
                    continue;
                }
                // SAFETY: `at` lies within the other mapping, which is as long.
                let target = unsafe { fresh.base.as_ptr().add(at) };
                // SAFETY: as for the load; nobody else has the new object yet.
                unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), target, length) };
            }
            at = end;
        }
    }

    /// The next range from `at` on that may hold anything but zeros.
    fn next_data(&self, descriptor: Option<&OwnedFd>, at: usize) -> Option<(usize, usize)> {
        let length = self.length_bytes;
        if at >= length {
            return None;
        }
        let Some(descriptor) = descriptor else { return Some((at, length)) };
        let start = match rustix::fs::seek(descriptor, SeekFrom::Data(at as u64)) {
            Ok(start) => usize::try_from(start).unwrap_or(length),
            // Nothing but holes from here on.
            Err(Errno::NXIO) => return None,
            Err(_) => return Some((at, length)),
        };
        if start >= length {
            return None;
        }
        let end = rustix::fs::seek(descriptor, SeekFrom::Hole(start as u64));
        let end = end.ok().and_then(|end| usize::try_from(end).ok()).unwrap_or(length);
        Some((start, if end > start { end.min(length) } else { length }))
    }

    /// Maps `descriptor` over the same addresses in one step and returns the old descriptor.
    /// The caller has copied the contents; whoever mapped the old object now writes to memory
    /// that this process no longer sees. The new object has a retired mark if the old one has.
    ///
    /// Errors: [`MappingError`]; the old mapping is then still in place.
    pub fn replace_with(&self, descriptor: OwnedFd) -> Result<Option<Arc<OwnedFd>>, MappingError> {
        let flags = self.flags | MapFlags::FIXED;
        let mut held = self.descriptor.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range is exactly this value's own mapping, so MAP_FIXED replaces nothing
        // else; the new object is at least as long (the caller created it with this length).
        unsafe {
            rustix::mm::mmap(
                self.base.as_ptr().cast(),
                self.mapped_bytes,
                self.protection.flags(),
                flags,
                &descriptor,
                0,
            )
        }
        .map_err(|source| MappingError::Call {
            call: "mmap (replace)",
            length_bytes: self.length_bytes,
            source,
        })?;
        Ok(held.replace(Arc::new(descriptor)))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are exactly what mmap returned, and nothing borrows the mapping
        // past its owner.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// A memfd of `length_bytes`, sealed against shrinking and growing, and against other seals.
///
/// Errors: [`MappingError`] naming the system call.
pub fn create_memfd(name: &str, length_bytes: usize) -> Result<OwnedFd, MappingError> {
    let call = |call| move |source| MappingError::Call { call, length_bytes, source };
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(call("memfd_create"))?;
    rustix::fs::ftruncate(&fd, length_bytes as u64).map_err(call("ftruncate"))?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(call("fcntl(F_ADD_SEALS)"))?;
    Ok(fd)
}

/// A memfd for an object of `length_bytes` and its retired mark, sealed against shrinking and
/// growing. Whoever hands it out seals it first: [`seal_for_writers`], [`seal_for_readers`].
///
/// Errors: [`MappingError`] naming the system call.
pub fn create_object(name: &str, length_bytes: usize) -> Result<OwnedFd, MappingError> {
    one_writer::create(name, Retired::object_bytes(length_bytes))
}

/// Before an object goes to somebody who may write it: no further seal can be added, by which they
/// could keep others from it. Nothing to do for an object that knows no seals.
pub fn seal_for_writers(object: impl AsFd) {
    if rustix::fs::fcntl_get_seals(object.as_fd()).is_ok() {
        let _ = rustix::fs::fcntl_add_seals(object, SealFlags::SEAL);
    }
}

/// Before an object goes to somebody who may only read it: from now on nobody can map it for
/// writing or write to it, not through a descriptor opened anew either; mappings that are there
/// stay writable. True when that is so; false for an object that knows no seals, or whose seals are
/// final already: access then rests on file permissions alone.
#[must_use]
pub fn seal_for_readers(object: impl AsFd) -> bool {
    let object = object.as_fd();
    is_sealed_for_readers(object) || one_writer::refuse_writers(object).is_ok()
}

/// True after [`seal_for_readers`] succeeded on the object.
#[must_use]
pub fn is_sealed_for_readers(object: impl AsFd) -> bool {
    rustix::fs::fcntl_get_seals(object).is_ok_and(|seals| seals.contains(SealFlags::FUTURE_WRITE))
}

/// Volatile memory that peers can map: the memory behind ordinary registered buffers.
#[derive(Debug)]
pub struct SharedMemory {
    mapping: Mapping,
}

/// From this length on memory is worth pages of this size.
const HUGE_PAGE_BYTES: usize = 2 << 20;

impl SharedMemory {
    /// Allocates `length_bytes` of zeroed shareable memory.
    ///
    /// Errors: [`MappingError`] naming the system call.
    pub fn allocate(name: &str, length_bytes: usize) -> Result<Self, MappingError> {
        let mapping = Mapping::object(name, length_bytes)?;
        if length_bytes >= HUGE_PAGE_BYTES {
            mapping.advise_huge_pages();
        }
        Ok(Self { mapping })
    }
}

// SAFETY: the mapping lives exactly as long as the value, at a fixed page-aligned base; bytes are
// only reached through raw copies and atomics.
unsafe impl MemoryObject for SharedMemory {
    #[inline]
    fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    #[inline]
    fn length_bytes(&self) -> usize {
        self.mapping.length_bytes()
    }

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        self.mapping.descriptor()
    }

    fn persistence(&self) -> Persistence {
        Persistence::Volatile
    }

    fn has_retired_mark(&self) -> bool {
        true
    }

    fn replace_backing(&self) -> std::io::Result<()> {
        moving::replace(self.anchor(), || {
            let length = self.mapping.length_bytes();
            let fd = create_object("beeline-replaced", length)?;
            let fresh = Mapping::shared(fd.try_clone()?, length, Protection::ReadWrite)?;
            self.mapping.retire();
            self.mapping.copy_into(&fresh);
            self.mapping.replace_with(fd).inspect_err(|_| self.mapping.reinstate())?;
            if length >= HUGE_PAGE_BYTES {
                self.mapping.advise_huge_pages();
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{copy_in, copy_out};

    #[test]
    fn replacing_the_backing_keeps_contents_and_orphans_old_mappings() {
        let memory = SharedMemory::allocate("test", 8192).unwrap();
        copy_in(&memory, 100, b"kept");
        let fd = memory.descriptor().unwrap().try_clone().unwrap();
        let peer = Mapping::shared(fd, 8192, Protection::ReadWrite).unwrap();
        memory.replace_backing().unwrap();
        // SAFETY: the peer's mapping is 8192 bytes long.
        let word = unsafe { peer.base().as_ptr().add(100) };
        // SAFETY: inside the mapping, which is writable.
        unsafe { word.write(b'X') };
        let mut read = [0; 4];
        copy_out(&memory, 100, &mut read);
        assert_eq!(&read, b"kept");
    }

    #[test]
    fn only_pages_that_were_written_are_copied_to_the_new_backing() {
        const PAGE: usize = 4096;
        let memory = SharedMemory::allocate("test", 256 * PAGE).unwrap();
        let written = [0, 7, 8, 100, 255];
        for page in written {
            copy_in(&memory, page * PAGE + 17, &[page as u8 | 1; 8]);
        }
        for round in 0..3 {
            memory.replace_backing().unwrap();
            if round == 0 {
                // Before they are read: loads from a memfd make pages too.
                let blocks = rustix::fs::fstat(memory.descriptor().unwrap()).unwrap().st_blocks;
                assert!(blocks as usize * 512 <= 8 * PAGE, "{blocks} blocks for 5 pages");
            }
            for page in 0..256 {
                let mut found = [9; PAGE];
                copy_out(&memory, page * PAGE, &mut found);
                let mut expected = [0; PAGE];
                if written.contains(&page) {
                    expected[17..25].fill(page as u8 | 1);
                }
                assert_eq!(found, expected, "page {page}, round {round}");
            }
        }
    }

    #[test]
    fn a_replaced_backing_has_the_mark_and_the_new_one_has_not() {
        let memory = SharedMemory::allocate("test", 5000).unwrap();
        let fd = memory.descriptor().unwrap().try_clone().unwrap();
        let peer = Mapping::marked(fd, 5000, Protection::ReadOnly, MapFlags::SHARED).unwrap();
        assert_eq!(peer.retired().unwrap().load(Ordering::Relaxed), 0);
        memory.replace_backing().unwrap();
        assert_eq!(peer.retired().unwrap().load(Ordering::Relaxed), 1);
        assert_eq!(memory.mapping.retired().unwrap().load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_was_sealed_for_readers_cannot_be_written_through_any_descriptor() {
        let memory = SharedMemory::allocate("test", 8192).unwrap();
        copy_in(&memory, 0, b"before");
        let own = memory.descriptor().unwrap();
        assert!(seal_for_readers(&*own));
        assert!(seal_for_readers(&*own), "once is enough");
        let given = crate::reopen::read_only(&*own).unwrap();
        let again = crate::reopen::writable(&given).unwrap();
        assert_eq!(rustix::io::pwrite(&again, b"evil", 0), Err(Errno::PERM));
        assert!(Mapping::shared(again, 8192, Protection::ReadWrite).is_err());
        // The owner's mapping stays as it is; so does a new backing's right to be written.
        copy_in(&memory, 0, b"after!");
        memory.replace_backing().unwrap();
        let fresh = memory.descriptor().unwrap();
        seal_for_writers(&*fresh);
        assert!(!seal_for_readers(&*fresh), "seals are final");
        let mapped = Mapping::shared(fresh.try_clone().unwrap(), 8192, Protection::ReadWrite);
        assert!(mapped.is_ok());
    }

    #[test]
    fn an_empty_mapping_is_refused() {
        assert!(matches!(Mapping::anonymous(0), Err(MappingError::Empty)));
    }
}
