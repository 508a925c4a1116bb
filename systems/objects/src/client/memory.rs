//! Segments as a client maps them.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use beeline_os::one_writer::ForkMark;
use beeline_os::{Mapping, one_writer};

use super::wait::Shared;

/// A segment, mapped for reading and, in its writer, a second time for writing.
#[derive(Debug)]
pub(super) struct Mapped {
    number: u32,
    reader: Option<Mapping>,
    writer: Option<Mapping>,
    /// In a child of this process the writable mapping is not there, and another may be in its place.
    mark: Arc<ForkMark>,
    /// Told when the last object in it is released, after the segment was retired.
    home: Weak<Shared>,
}

impl Mapped {
    /// Maps what the store sent.
    ///
    /// Errors: the kernel's; `InvalidData` for memory that could shrink under us.
    pub(super) fn new(
        number: u32,
        length_bytes: u64,
        descriptor: OwnedFd,
        writes: bool,
        mark: Arc<ForkMark>,
        home: Weak<Shared>,
    ) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&descriptor)?;
        let same = u64::try_from(stat.st_size) == Ok(length_bytes);
        if !same || !one_writer::keeps_its_length(&descriptor)? {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let length = usize::try_from(length_bytes).map_err(io::Error::other)?;
        let writer = if writes {
            Some(one_writer::map_for_writing(descriptor.try_clone()?, length)?)
        } else {
            None
        };
        let reader = one_writer::map_read_only(descriptor, length)?;
        Ok(Self { number, reader: Some(reader), writer, mark, home })
    }

    fn place(mapping: Option<&Mapping>, offset: u64, length: u64) -> Option<NonNull<u8>> {
        let mapping = mapping?;
        let end = offset.checked_add(length)?;
        if end > mapping.length_bytes() as u64 {
            return None;
        }
        // SAFETY: just checked to lie inside the mapping.
        Some(unsafe { mapping.base().add(usize::try_from(offset).ok()?) })
    }

    /// Where `length` bytes at `offset` are read.
    pub(super) fn readable(&self, offset: u64, length: u64) -> Option<NonNull<u8>> {
        Self::place(self.reader.as_ref(), offset, length)
    }

    /// Where they are written; nothing in a segment of another writer.
    pub(super) fn writable(&self, offset: u64, length: u64) -> Option<NonNull<u8>> {
        Self::place(self.writer.as_ref(), offset, length)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // First unmapped, then told.
        self.reader = None;
        let writer = self.writer.take();
        if !self.mark.is_own_process() {
            // What lies at these addresses in a child was mapped by the child.
            std::mem::forget(writer);
            return;
        }
        drop(writer);
        if let Some(home) = self.home.upgrade() {
            home.unmapped(self.number);
        }
    }
}

/// The segments of a connection.
pub(super) type Segments = HashMap<u32, Arc<Mapped>>;
