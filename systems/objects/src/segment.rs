//! Segments: the memory objects lie in. One memfd each, written by one process.
//!
//! The store maps a segment, sends it to its writer, and once the writer has mapped it too the
//! kernel refuses every further writable mapping ([`beeline_os::one_writer`]); from then on readers
//! may have the descriptor. Segments the store writes itself are sealed at once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use beeline_os::{Mapping, MemoryObject, one_writer};

/// A segment as the store holds it: mapped for reading and writing.
#[derive(Debug)]
pub struct Segment {
    mapping: Mapping,
    descriptor: Arc<OwnedFd>,
}

impl Segment {
    /// A segment of `length_bytes` zeros that its writer has still to map.
    ///
    /// Errors: the kernel's (memory, descriptors).
    pub fn create(length_bytes: usize) -> io::Result<Self> {
        let descriptor = one_writer::create("beeline-objects", length_bytes)?;
        let mapping = one_writer::map_for_writing(descriptor.try_clone()?, length_bytes)?;
        Ok(Self { mapping, descriptor: Arc::new(descriptor) })
    }

    /// From now on nobody else maps it writable.
    ///
    /// Errors: the kernel's.
    pub fn refuse_writers(&self) -> io::Result<()> {
        one_writer::refuse_writers(&self.descriptor)
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.mapping.length_bytes() as u64
    }

    /// For the writer, and after [`Segment::refuse_writers`] for readers.
    #[must_use]
    pub fn borrowed(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

// SAFETY: the mapping lives exactly as long as the value, at a fixed page-aligned base, mapped
// readable and writable; bytes are only reached through raw copies.
unsafe impl MemoryObject for Segment {
    fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    fn length_bytes(&self) -> usize {
        self.mapping.length_bytes()
    }

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        Some(Arc::clone(&self.descriptor))
    }
}
