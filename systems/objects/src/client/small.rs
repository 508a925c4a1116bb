//! Small objects: written into memory that was reserved before, and put by one request.
//!
//! The lock on the reserve is held while an object is written and its request sent, so that the
//! store gets the requests in the order of their places; it is not held while the reply is awaited.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use beeline_wire::checksum::{crc32c, crc32c_append};

use super::Client;
use super::memory::Mapped;
use super::wait::Shared;
use crate::error::ObjectsError;
use crate::heap::rounded;
use crate::id::{ID_BYTES, ObjectId};
use crate::wire::{FLAG_CHECKSUM, Operation, Request, Status};

/// Most bytes of data and metadata that are put this way: with more, a copy costs more than a round
/// trip.
const SMALL: u64 = 64 << 10;
/// Bytes of a reserve.
const RESERVE: u64 = 512 << 10;
/// Puts that go the ordinary way after the store had no reserve to give.
const PAUSE: u32 = 16;

/// Memory that the store gave for small objects.
#[derive(Debug)]
struct Reserve {
    mapped: Arc<Mapped>,
    next: u64,
    left: u64,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Small {
    reserve: Option<Reserve>,
    pause: u32,
}

impl Shared {
    fn small(&self) -> std::sync::MutexGuard<'_, Small> {
        self.small.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The store asks for the reserve: memory is short.
    pub(super) fn called_in(&self) {
        let mut small = self.small();
        small.pause = PAUSE;
        // Also without one: the store may have called in what was used up meanwhile.
        if small.reserve.take().is_some() {
            // A store that is gone wants nothing back.
            let _ = self.tell(&Request::new(Operation::GiveBack, ObjectId([0; ID_BYTES])));
        }
    }

    fn reserve(&self) -> Result<Option<Reserve>, ObjectsError> {
        let id = ObjectId([0; ID_BYTES]);
        let request = Request { size: RESERVE, ..Request::new(Operation::Reserve, id) };
        let reply = self.ask(&request)?;
        if reply.status != Status::Done {
            return Ok(None);
        }
        let location = reply.location;
        // This process mapped the segment before the store gave out memory in it.
        let mapped = self.segment(location.segment)?;
        if mapped.writable(location.offset, location.size).is_none() {
            return Err(ObjectsError::Protocol { what: "a reserve outside its segment" });
        }
        Ok(Some(Reserve { mapped, next: location.offset, left: location.size }))
    }
}

impl Client {
    /// Puts a small object by one request, with a checksum where the options say so. `false`: it is
    /// large, or there is no reserve, and nothing was done.
    ///
    /// Errors: as [`Client::put`].
    pub(super) fn put_small(
        &self,
        id: ObjectId,
        data: &[u8],
        metadata: &[u8],
    ) -> Result<bool, ObjectsError> {
        let small = data.len() as u64 + metadata.len() as u64 <= SMALL;
        let summed = small && self.shared.options.checksums;
        let checksum = summed.then(|| crc32c_append(crc32c(data), metadata));
        self.put_at_once(id, data, metadata, checksum)
    }

    /// As [`Client::put_small`], with the checksum another store gave.
    fn put_at_once(
        &self,
        id: ObjectId,
        data: &[u8],
        metadata: &[u8],
        checksum: Option<u32>,
    ) -> Result<bool, ObjectsError> {
        let total = data.len() as u64 + metadata.len() as u64;
        let Some(taken) = rounded(total).filter(|_| total <= SMALL) else { return Ok(false) };
        let shared = &self.shared;
        // A child of `fork` must not touch a lock that a thread of its parent may hold.
        shared.check()?;
        let mut request = Request {
            size: data.len() as u64,
            metadata_size: metadata.len() as u64,
            ..Request::new(Operation::Put, id)
        };
        if let Some(checksum) = checksum {
            request.flags = FLAG_CHECKSUM;
            request.checksum = checksum.into();
        }
        let mut small = shared.small();
        if small.pause > 0 {
            small.pause -= 1;
            return Ok(false);
        }
        if small.reserve.as_ref().is_none_or(|reserve| reserve.left < taken) {
            small.reserve = shared.reserve()?;
        }
        let Some(reserve) = &mut small.reserve else {
            small.pause = PAUSE;
            return Ok(false);
        };
        let outside = ObjectsError::Protocol { what: "a reserve outside its segment" };
        let target = reserve.mapped.writable(reserve.next, total).ok_or(outside)?.as_ptr();
        // SAFETY: the range was just checked to lie inside the writable mapping, which the reserve
        // keeps; the store gave it to this process alone, and the lock to this thread.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), target, data.len()) };
        // SAFETY: inside the same range, which holds the data and the metadata.
        let behind = unsafe { target.add(data.len()) };
        // SAFETY: as for the data.
        unsafe { std::ptr::copy_nonoverlapping(metadata.as_ptr(), behind, metadata.len()) };
        request.timeout_us = reserve.next;
        reserve.next += taken;
        reserve.left -= taken;
        if reserve.left == 0 {
            small.reserve = None;
        }
        let tag = shared.submit(&request)?;
        drop(small);
        match shared.reply(tag)?.status {
            Status::Done => Ok(true),
            status => Err(ObjectsError::of(status, id, total)),
        }
    }

    /// Puts an object that came from another store: its data, `size` bytes, its metadata behind them,
    /// and the checksum it had there.
    ///
    /// Errors: as [`Client::put`].
    pub(crate) fn put_bare(
        &self,
        id: ObjectId,
        bytes: &[u8],
        size: u64,
        checksum: Option<u32>,
        timeout: Duration,
    ) -> Result<(), ObjectsError> {
        let (data, metadata) = bytes.split_at(bytes.len().min(size as usize));
        if self.put_at_once(id, data, metadata, checksum)? {
            return Ok(());
        }
        let mut buffer = self.create_bare(id, size, metadata.len() as u64, timeout)?;
        buffer.all_bytes_mut().copy_from_slice(bytes);
        buffer.seal_with(checksum)
    }

    /// Wakes the store ahead of a call that comes soon.
    pub(crate) fn rouse(&self) {
        self.shared.rouse();
    }
}
