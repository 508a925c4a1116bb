//! Shared memory that one process writes: the writer maps the object first, then the kernel
//! refuses every further writable mapping (`F_SEAL_FUTURE_WRITE`), also to a process of the same
//! user that opens the descriptor again through `/proc`.
//!
//! Place: the mechanism behind the segments of the object store. What the seal does not do: a
//! mapping made before the seal stays writable, and pages cannot be given back one by one
//! (`fallocate` with `FALLOC_FL_PUNCH_HOLE` fails with `EPERM` on a sealed object).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::Advice;

use crate::mapping::{Mapping, MappingError, Protection};

/// A memfd of `length_bytes` that cannot shrink or grow and still takes seals.
///
/// Errors: [`MappingError`] naming the system call.
pub fn create(name: &str, length_bytes: usize) -> Result<OwnedFd, MappingError> {
    let call = |call| move |source| MappingError::Call { call, length_bytes, source };
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(call("memfd_create"))?;
    rustix::fs::ftruncate(&fd, length_bytes as u64).map_err(call("ftruncate"))?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)
        .map_err(call("fcntl(F_ADD_SEALS)"))?;
    Ok(fd)
}

/// From now on nobody maps the object writable or writes to it by a system call; mappings there
/// are stay as they are.
///
/// Errors: the kernel's; `Unsupported` before Linux 5.1.
pub fn refuse_writers(descriptor: impl AsFd) -> io::Result<()> {
    rustix::fs::fcntl_add_seals(descriptor, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
    Ok(())
}

/// Whether the kernel keeps `descriptor` from being mapped writable, and from changing its length.
///
/// Errors: the kernel's; a descriptor that is no memfd.
pub fn is_read_only(descriptor: impl AsFd) -> io::Result<bool> {
    let seals = rustix::fs::fcntl_get_seals(descriptor)?;
    Ok(seals.contains(SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW))
}

/// Whether the object behind `descriptor` keeps its length: without the seal its owner could make
/// every load of ours fault.
///
/// Errors: as [`is_read_only`].
pub fn keeps_its_length(descriptor: impl AsFd) -> io::Result<bool> {
    let seals = rustix::fs::fcntl_get_seals(descriptor)?;
    Ok(seals.contains(SealFlags::SHRINK))
}

/// Keeps `mapping` from the children of this process: in a child of `fork` the addresses are not
/// mapped.
///
/// Errors: the kernel's.
pub fn keep_from_children(mapping: &Mapping) -> io::Result<()> {
    advise(mapping, Advice::LinuxDontFork)
}

/// Asks for huge pages where the kernel offers them; a refusal is no failure.
pub fn prefer_huge_pages(mapping: &Mapping) {
    let _ = advise(mapping, Advice::LinuxHugepage);
}

fn advise(mapping: &Mapping, advice: Advice) -> io::Result<()> {
    // SAFETY: the range is exactly this live mapping, and neither advice changes its contents in
    // this process.
    unsafe { rustix::mm::madvise(mapping.base().as_ptr().cast(), mapping.length_bytes(), advice)? };
    Ok(())
}

/// Tells the process that made the value from its children: one load, no system call.
#[derive(Debug)]
pub struct ForkMark(Mapping);

impl ForkMark {
    /// A mark of the calling process.
    ///
    /// Errors: [`MappingError`]; the kernel's refusal of `MADV_WIPEONFORK`.
    pub fn new() -> io::Result<Self> {
        let mapping = Mapping::anonymous(4096)?;
        advise(&mapping, Advice::LinuxWipeOnFork)?;
        // SAFETY: the mapping is a page, writable and private to this value.
        unsafe { mapping.base().as_ptr().write_volatile(1) };
        Ok(Self(mapping))
    }

    /// True in the process that made the mark, false in a child that inherited it.
    #[must_use]
    pub fn is_own_process(&self) -> bool {
        // SAFETY: the mapping is a readable page; the kernel wipes it in a child.
        unsafe { self.0.base().as_ptr().read_volatile() == 1 }
    }
}

/// Maps `descriptor` for loads only.
///
/// Errors: [`MappingError`] naming the system call.
pub fn map_read_only(descriptor: OwnedFd, length_bytes: usize) -> Result<Mapping, MappingError> {
    let mapping = Mapping::shared(descriptor, length_bytes, Protection::ReadOnly)?;
    mapping.forget_descriptor();
    Ok(mapping)
}

/// Copies from `mapping` at `offset` into `target`.
///
/// Invariant: the range lies inside the mapping.
pub fn copy_from(mapping: &Mapping, offset: usize, target: &mut [u8]) {
    let end = offset.checked_add(target.len());
    assert!(
        end.is_some_and(|end| end <= mapping.length_bytes()),
        "a copy stays inside the mapping"
    );
    // SAFETY: just checked to lie inside the mapping.
    let source = unsafe { mapping.base().as_ptr().add(offset) };
    // SAFETY: the range is mapped readable, as every mapping is, while the value lives; the target is a
    // slice of ours, which cannot overlap it. A writer elsewhere could tear the copy, nothing else.
    unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
}

/// Maps `descriptor` for the one writer, and keeps the mapping from children of this process.
///
/// Errors: [`MappingError`]; the kernel's.
pub fn map_for_writing(descriptor: OwnedFd, length_bytes: usize) -> io::Result<Mapping> {
    let mapping = Mapping::shared(descriptor, length_bytes, Protection::ReadWrite)?;
    mapping.forget_descriptor();
    prefer_huge_pages(&mapping);
    keep_from_children(&mapping)?;
    Ok(mapping)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_the_seal_only_the_first_writer_writes_and_readers_see_it() {
        let fd = create("test", 8192).unwrap();
        let writer = map_for_writing(fd.try_clone().unwrap(), 8192).unwrap();
        assert!(!is_read_only(&fd).unwrap());
        refuse_writers(&fd).unwrap();
        assert!(is_read_only(&fd).unwrap() && keeps_its_length(&fd).unwrap());
        let second = Mapping::shared(fd.try_clone().unwrap(), 8192, Protection::ReadWrite);
        assert!(second.is_err(), "a second writer was mapped");
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let again = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let again = Mapping::shared(again.into(), 8192, Protection::ReadWrite);
        assert!(again.is_err(), "a descriptor opened again was mapped writable");
        let reader = map_read_only(fd, 8192).unwrap();
        let mut copy = [1; 8];
        copy_from(&reader, 8184, &mut copy);
        assert_eq!(copy, [0; 8]);
        // SAFETY: inside the writable mapping.
        unsafe { writer.base().as_ptr().write_volatile(7) };
        // SAFETY: inside the readable mapping.
        assert_eq!(unsafe { reader.base().as_ptr().read_volatile() }, 7);
    }

    #[test]
    fn this_process_is_its_own() {
        assert!(ForkMark::new().unwrap().is_own_process());
    }
}
