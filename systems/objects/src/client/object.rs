//! An object as its creator writes it and as others read it.

use std::ptr::NonNull;
use std::sync::Arc;

use beeline_wire::checksum::{crc32c, crc32c_append};

use super::Client;
use super::copying::copy_long;
use super::memory::Mapped;
use crate::error::ObjectsError;
use crate::id::ObjectId;
use crate::wire::Location;

/// Bytes that take about as long to copy as a thread to wake up.
const LAST_PART: usize = 128 << 10;
/// Most bytes of a copy that the store stays awake for.
const SHORT: usize = 2 << 20;

/// A reference in the store, given back on drop.
#[derive(Debug)]
pub(super) struct Reference {
    client: Client,
    id: ObjectId,
    handle: u64,
    held: bool,
}

impl Reference {
    pub(super) fn new(client: Client, id: ObjectId, handle: u64) -> Self {
        Self { client, id, handle, held: true }
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        if self.held {
            self.client.release(self.id, self.handle);
        }
    }
}

/// A sealed object: its memory, mapped read-only. Dropping it releases the reference.
#[derive(Debug)]
pub struct Object {
    /// Before the mapping goes.
    reference: Reference,
    start: NonNull<u8>,
    location: Location,
    _mapped: Arc<Mapped>,
}

// SAFETY: the pointer leads into a mapping that the value keeps, and is only read through.
unsafe impl Send for Object {}
// SAFETY: as for `Send`.
unsafe impl Sync for Object {}

impl Object {
    pub(super) fn new(
        reference: Reference,
        location: Location,
        mapped: Arc<Mapped>,
        verify: bool,
    ) -> Result<Self, ObjectsError> {
        let outside = ObjectsError::Protocol { what: "an object outside its segment" };
        let length = location.size.checked_add(location.metadata_size);
        let start = length.and_then(|length| mapped.readable(location.offset, length));
        let Some(start) = start else { return Err(outside) };
        let object = Self { reference, start, location, _mapped: mapped };
        if verify && location.checksum.is_some_and(|expected| object.sum() != expected) {
            return Err(ObjectsError::Damaged { id: object.id() });
        }
        Ok(object)
    }

    /// Where the store keeps it.
    pub(crate) fn location(&self) -> Location {
        self.location
    }

    /// Which object.
    #[must_use]
    pub fn id(&self) -> ObjectId {
        self.reference.id
    }

    /// Data bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        // Checked to lie inside a mapping, whose length is a `usize`.
        self.location.size as usize
    }

    /// Whether there is no data.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// First byte of the data, in the store's own memory; readable for [`Object::len`] bytes while
    /// the object lives, aligned to 64.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// The data, in place.
    ///
    /// # Safety
    ///
    /// The object's creator keeps a writable mapping of its segment after the seal. The caller
    /// trusts that creator not to write to sealed objects; the client library offers no way to.
    #[must_use]
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: inside a mapping that lives as long as the value (checked when it was made); the
        // caller vouches that nobody writes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len()) }
    }

    /// A copy of the metadata.
    #[must_use]
    pub fn metadata(&self) -> Vec<u8> {
        let mut metadata = vec![0; self.location.metadata_size as usize];
        self.copy(self.location.size, &mut metadata);
        metadata
    }

    /// Copies data from `offset` on into `target`.
    ///
    /// Errors: [`ObjectsError::Outside`].
    pub fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<(), ObjectsError> {
        let (length, size) = (target.len() as u64, self.location.size);
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(ObjectsError::Outside { offset, length, size });
        }
        self.copy(offset, target);
        Ok(())
    }

    /// A copy of the data.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut data = vec![0; self.len()];
        self.copy(0, &mut data);
        data
    }

    fn copy(&self, offset: u64, target: &mut [u8]) {
        // SAFETY: the callers checked that the range lies inside the object.
        let source = unsafe { self.start.as_ptr().add(offset as usize) };
        // SAFETY: as above; the target is a slice of ours that cannot overlap the mapping. A
        // creator that breaks the rules could tear the copy, nothing else.
        unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
    }

    /// CRC-32C of data and metadata, copied piece by piece.
    fn sum(&self) -> u32 {
        let total = self.location.size + self.location.metadata_size;
        let mut piece = [0; 4096];
        let (mut at, mut sum) = (0, crc32c(&[]));
        while at < total {
            let length = (total - at).min(4096) as usize;
            self.copy(at, &mut piece[..length]);
            sum = crc32c_append(sum, &piece[..length]);
            at += length as u64;
        }
        sum
    }
}

/// An object that is being written. Dropping it unsealed gives the object up.
#[derive(Debug)]
pub struct Buffer {
    reference: Reference,
    start: NonNull<u8>,
    location: Location,
    _mapped: Arc<Mapped>,
}

// SAFETY: the pointer leads into a mapping that the value keeps; writing takes `&mut self`.
unsafe impl Send for Buffer {}
// SAFETY: as for `Send`.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(super) fn new(
        client: Client,
        id: ObjectId,
        location: Location,
        mapped: Arc<Mapped>,
    ) -> Result<Self, ObjectsError> {
        let reference = Reference::new(client, id, location.handle);
        let outside = ObjectsError::Protocol { what: "an object outside its segment" };
        let length = location.size.checked_add(location.metadata_size);
        let start = length.and_then(|length| mapped.writable(location.offset, length));
        let Some(start) = start else { return Err(outside) };
        Ok(Self { reference, start, location, _mapped: mapped })
    }

    /// Which object.
    #[must_use]
    pub fn id(&self) -> ObjectId {
        self.reference.id
    }

    /// Data bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.location.size as usize
    }

    /// Whether there is no data.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether this process may write it: the one that created it, and none of its children, where
    /// its memory is not mapped.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.reference.client.shared.mark.is_own_process()
    }

    /// First byte of the data; writable for [`Buffer::len`] bytes until the object is sealed, where
    /// [`Buffer::is_writable`].
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The data, to be written in place. Bytes that are not written are those of an earlier object
    /// of this process, or zero.
    ///
    /// # Panics
    ///
    /// In a child of the process that created it.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.is_writable(), "a buffer is written by the process that created it");
        // SAFETY: inside a mapping that lives as long as the value; until the seal nobody but this
        // process can write the range, which the store gave to this buffer alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.location.size as usize) }
    }

    /// Copies `data` to `offset`. From 8 MiB on up to four threads, which end with the call, share the
    /// copy.
    ///
    /// Errors: [`ObjectsError::Outside`], [`ObjectsError::Forked`].
    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> Result<(), ObjectsError> {
        // SAFETY: a slice that lives through the call.
        unsafe { self.write_from(offset, data.as_ptr(), data.len()) }
    }

    /// As [`Buffer::write_at`], from memory that others may write meanwhile: what they do comes out
    /// torn, and nothing else happens.
    ///
    /// Errors: as [`Buffer::write_at`].
    ///
    /// # Safety
    ///
    /// `source` is readable for `length` bytes, from any thread, until the call returns.
    pub unsafe fn write_from(
        &mut self,
        offset: u64,
        source: *const u8,
        length: usize,
    ) -> Result<(), ObjectsError> {
        if !self.is_writable() {
            return Err(ObjectsError::Forked);
        }
        let (bytes, size) = (length as u64, self.location.size);
        if offset.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(ObjectsError::Outside { offset, length: bytes, size });
        }
        // SAFETY: just checked to lie inside the object.
        let target = unsafe { self.start.as_ptr().add(offset as usize) };
        if source.addr().abs_diff(target.addr()) < length {
            // A part of this object itself.
            // SAFETY: the target lies inside the object and is this buffer's alone; for the source the
            // caller vouches.
            unsafe { std::ptr::copy(source, target, length) };
            return Ok(());
        }
        // During a short copy the store stays awake for the seal. In a long one it may sleep, and wakes
        // up while the last part is copied.
        let _copying = (length <= SHORT).then(|| self.reference.client.shared.copying());
        let early = if length > 2 * LAST_PART { length - LAST_PART } else { 0 };
        if early > 0 {
            // SAFETY: as above, and the ranges do not overlap.
            unsafe { copy_long(source, target, early) };
            self.reference.client.rouse();
        }
        // SAFETY: inside the source, for which the caller vouches.
        let last = unsafe { source.add(early) };
        // SAFETY: inside the object.
        let target = unsafe { target.add(early) };
        // SAFETY: as for the first part.
        unsafe { copy_long(last, target, length - early) };
        Ok(())
    }

    pub(super) fn write_metadata(&mut self, metadata: &[u8]) -> Result<(), ObjectsError> {
        if metadata.len() as u64 != self.location.metadata_size {
            return Err(ObjectsError::Protocol { what: "another size than was asked for" });
        }
        self.copy(self.location.size, metadata);
        Ok(())
    }

    fn copy(&mut self, offset: u64, data: &[u8]) {
        // SAFETY: the callers checked that the range lies inside the object.
        let target = unsafe { self.start.as_ptr().add(offset as usize) };
        // SAFETY: as above; the source is a slice of ours. Nobody else writes the range.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), target, data.len()) };
    }

    fn checksum(&mut self) -> Option<u32> {
        if !self.reference.client.shared.options.checksums {
            return None;
        }
        let total = (self.location.size + self.location.metadata_size) as usize;
        // SAFETY: as in `bytes_mut`; the metadata lies right behind the data.
        let bytes = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), total) };
        Some(crc32c(bytes))
    }

    /// Where the store keeps it.
    pub(crate) fn location(&self) -> Location {
        self.location
    }

    /// Data and metadata, to be written in place.
    pub(crate) fn all_bytes_mut(&mut self) -> &mut [u8] {
        let total = (self.location.size + self.location.metadata_size) as usize;
        // SAFETY: as in `bytes_mut`; the metadata lies right behind the data.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), total) }
    }

    /// Makes the object immutable and visible; no reference is kept.
    ///
    /// Errors: [`ObjectsError::NotYours`], [`ObjectsError::StoreGone`], [`ObjectsError::Forked`].
    pub fn seal(mut self) -> Result<(), ObjectsError> {
        let checksum = self.checksum();
        self.seal_with(checksum)
    }

    /// As [`Buffer::seal`], with the checksum another store gave.
    pub(crate) fn seal_with(mut self, checksum: Option<u32>) -> Result<(), ObjectsError> {
        let (id, handle) = (self.reference.id, self.reference.handle);
        self.reference.client.seal_handle(id, handle, checksum, true)?;
        self.reference.held = false;
        Ok(())
    }
}
