//! The calls of spec section 2.1, and those that every user of a store expects beside them.

use std::net::SocketAddr;
use std::time::Duration;

use super::Client;
use super::object::{Buffer, Object};
use crate::error::ObjectsError;
use crate::id::ObjectId;
use crate::wire::{
    FLAG_CHECKSUM, FLAG_FETCH, FLAG_IN_MEMORY, FLAG_RELEASE, Operation, Reply, Request, Status,
};

/// For ever, as a number of microseconds: some 290 000 years.
const FOREVER_US: u64 = u64::MAX / 2000;

/// Patience with a transfer that the caller gave no time for.
const TRANSFER: Duration = Duration::from_secs(60);

/// Patience with an object that just came and is not here any more.
const AGAIN: Duration = Duration::from_secs(1);

fn microseconds(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_micros()).unwrap_or(FOREVER_US).min(FOREVER_US)
}

impl Client {
    fn done(&self, request: &Request) -> Result<Reply, ObjectsError> {
        let reply = self.shared.ask(request)?;
        match reply.status {
            Status::Done => Ok(reply),
            status => {
                let bytes = request.size.saturating_add(request.metadata_size);
                Err(ObjectsError::of(status, request.id, bytes))
            }
        }
    }

    /// Whether the object is in this store, sealed; on disk counts.
    ///
    /// Errors: [`ObjectsError::StoreGone`], [`ObjectsError::Forked`].
    pub fn contains(&self, id: ObjectId) -> Result<bool, ObjectsError> {
        let reply = self.shared.ask(&Request::new(Operation::Contains, id))?;
        Ok(reply.status == Status::Done)
    }

    /// Allocates an object of `size` bytes and `metadata`; the buffer alone can write it. Waits up
    /// to `timeout` for memory. Dropping the buffer unsealed gives the object up.
    ///
    /// Errors: [`ObjectsError::Exists`], [`ObjectsError::Full`], [`ObjectsError::TooLarge`], and as
    /// [`Client::contains`].
    pub fn create(
        &self,
        id: ObjectId,
        size: u64,
        metadata: &[u8],
        timeout: Duration,
    ) -> Result<Buffer, ObjectsError> {
        let request = Request {
            size,
            metadata_size: metadata.len() as u64,
            timeout_us: microseconds(timeout),
            ..Request::new(Operation::Create, id)
        };
        let location = self.done(&request)?.location;
        let mapped = self.shared.segment(location.segment)?;
        let mut buffer = Buffer::new(self.clone(), id, location, mapped)?;
        buffer.write_metadata(metadata)?;
        Ok(buffer)
    }

    /// As [`Client::create`], with metadata that is written like the data: right behind it.
    pub(crate) fn create_bare(
        &self,
        id: ObjectId,
        size: u64,
        metadata_size: u64,
        timeout: Duration,
    ) -> Result<Buffer, ObjectsError> {
        let request = Request {
            size,
            metadata_size,
            timeout_us: microseconds(timeout),
            ..Request::new(Operation::Create, id)
        };
        let location = self.done(&request)?.location;
        let mapped = self.shared.segment(location.segment)?;
        Buffer::new(self.clone(), id, location, mapped)
    }

    /// Makes the object immutable and visible, and keeps no reference.
    ///
    /// Errors: [`ObjectsError::NotYours`], and as [`Client::contains`].
    pub fn seal(&self, buffer: Buffer) -> Result<(), ObjectsError> {
        buffer.seal()
    }

    pub(super) fn seal_handle(
        &self,
        id: ObjectId,
        handle: u64,
        checksum: Option<u32>,
        release: bool,
    ) -> Result<(), ObjectsError> {
        let mut flags = if release { FLAG_RELEASE } else { 0 };
        if checksum.is_some() {
            flags |= FLAG_CHECKSUM;
        }
        let request = Request {
            flags,
            size: handle,
            checksum: checksum.map_or(0, u64::from),
            ..Request::new(Operation::Seal, id)
        };
        self.done(&request).map(drop)
    }

    /// A reference to the object and its memory, without a copy. Waits up to `timeout` until the
    /// object is sealed here, not at all with zero.
    ///
    /// Errors: [`ObjectsError::NotFound`], [`ObjectsError::TimedOut`], [`ObjectsError::Damaged`],
    /// and as [`Client::contains`].
    pub fn get(&self, id: ObjectId, timeout: Duration) -> Result<Object, ObjectsError> {
        self.get_with(id, timeout, 0)
    }

    /// The object if it is in memory, without any wait: also not for the disk.
    ///
    /// Errors: as [`Client::get`]; `TimedOut` where it is here and not sealed, or on disk.
    pub fn get_in_memory(&self, id: ObjectId) -> Result<Object, ObjectsError> {
        self.get_with(id, Duration::ZERO, FLAG_IN_MEMORY)
    }

    /// As [`Client::get`], and where the object is not here, brings it from the node that has it. With
    /// zero it does not wait until the object is made: other nodes are asked once.
    ///
    /// Errors: as [`Client::get`].
    pub fn get_anywhere(&self, id: ObjectId, timeout: Duration) -> Result<Object, ObjectsError> {
        match self.get_with(id, timeout, FLAG_FETCH) {
            Err(ObjectsError::NotFound { .. }) if timeout.is_zero() => {
                match self.fetch(&[id], TRANSFER)?.pop() {
                    Some(Err(ObjectsError::Unreachable { .. })) => {
                        Err(ObjectsError::NotFound { id })
                    }
                    Some(Err(error)) => Err(error),
                    // Where it had to give way already it comes once more.
                    _ => self.get_with(id, AGAIN, FLAG_FETCH).map_err(|error| match error {
                        ObjectsError::TimedOut { .. } => ObjectsError::NotFound { id },
                        error => error,
                    }),
                }
            }
            outcome => outcome,
        }
    }

    fn get_with(&self, id: ObjectId, timeout: Duration, flags: u8) -> Result<Object, ObjectsError> {
        let timeout_us = microseconds(timeout);
        let request = Request { flags, timeout_us, ..Request::new(Operation::Get, id) };
        let reply = self.done(&request)?;
        self.object(id, &reply)
    }

    /// Several objects at the price of one round trip; each as [`Client::get`].
    ///
    /// Errors: as [`Client::contains`]; those of one object are in its place.
    pub fn get_all(
        &self,
        ids: &[ObjectId],
        timeout: Duration,
    ) -> Result<Vec<Result<Object, ObjectsError>>, ObjectsError> {
        let timeout_us = microseconds(timeout);
        let mut objects = Vec::with_capacity(ids.len());
        // As many at a time as surely fit the store's patience with one client.
        for some in ids.chunks(32) {
            let mut tags = Vec::with_capacity(some.len());
            for id in some {
                let request = Request { timeout_us, ..Request::new(Operation::Get, *id) };
                tags.push(self.shared.submit(&request)?);
            }
            for (id, tag) in some.iter().zip(tags) {
                let reply = self.shared.reply(tag)?;
                objects.push(match reply.status {
                    Status::Done => self.object(*id, &reply),
                    status => Err(ObjectsError::of(status, *id, 0)),
                });
            }
        }
        Ok(objects)
    }

    fn object(&self, id: ObjectId, reply: &Reply) -> Result<Object, ObjectsError> {
        let location = reply.location;
        // From here on the reference is given back whatever happens.
        let reference = super::object::Reference::new(self.clone(), id, location.handle);
        let mapped = self.shared.segment(location.segment)?;
        Object::new(reference, location, mapped, self.shared.options.checksums)
    }

    pub(super) fn release(&self, id: ObjectId, handle: u64) {
        let request = Request { size: handle, ..Request::new(Operation::Release, id) };
        // A store that is gone holds no references, and a child's parent holds its own.
        let _ = self.shared.tell(&request);
    }

    /// Removes the object from this store: nobody finds it from now on; its memory is free when
    /// the last reference is released.
    ///
    /// Errors: [`ObjectsError::NotFound`], [`ObjectsError::Unsealed`], and as
    /// [`Client::contains`].
    pub fn delete(&self, id: ObjectId) -> Result<(), ObjectsError> {
        self.done(&Request::new(Operation::Delete, id)).map(drop)
    }

    /// Asks to be told, once, when the object is sealed here; at once if it is. See
    /// [`Client::next_sealed`].
    ///
    /// Errors: [`ObjectsError::Limit`], and as [`Client::contains`].
    pub fn subscribe(&self, id: ObjectId) -> Result<(), ObjectsError> {
        self.done(&Request::new(Operation::Subscribe, id)).map(drop)
    }

    /// The next object of those subscribed to, within `timeout`.
    ///
    /// Errors: as [`Client::contains`].
    pub fn next_sealed(&self, timeout: Duration) -> Result<Option<ObjectId>, ObjectsError> {
        self.shared.news(timeout)
    }

    /// Brings the objects into this store, from any node that has them, several at a time.
    ///
    /// Errors: as [`Client::contains`]; those of one object are in its place.
    pub fn fetch(
        &self,
        ids: &[ObjectId],
        timeout: Duration,
    ) -> Result<Vec<Result<(), ObjectsError>>, ObjectsError> {
        self.fetch_with(ids, None, timeout)
    }

    /// As [`Client::fetch`], from the node whose fabric door is at `node` and no other; the store need
    /// not know that node.
    ///
    /// Errors: as [`Client::fetch`].
    pub fn fetch_from(
        &self,
        ids: &[ObjectId],
        node: SocketAddr,
        timeout: Duration,
    ) -> Result<Vec<Result<(), ObjectsError>>, ObjectsError> {
        self.fetch_with(ids, Some(node), timeout)
    }

    fn fetch_with(
        &self,
        ids: &[ObjectId],
        node: Option<SocketAddr>,
        timeout: Duration,
    ) -> Result<Vec<Result<(), ObjectsError>>, ObjectsError> {
        let timeout_us = microseconds(timeout);
        let mut outcomes = Vec::with_capacity(ids.len());
        for some in ids.chunks(32) {
            let mut tags = Vec::with_capacity(some.len());
            for id in some {
                let request = Request { timeout_us, ..Request::new(Operation::Fetch, *id) };
                let request = node.map_or(request, |node| request.with_node(node));
                tags.push(self.shared.submit(&request)?);
            }
            for (id, tag) in some.iter().zip(tags) {
                outcomes.push(match self.shared.reply(tag)?.status {
                    Status::Done => Ok(()),
                    status => Err(ObjectsError::of(status, *id, 0)),
                });
            }
        }
        Ok(outcomes)
    }

    /// Stores `data` with `metadata` as a sealed object: one copy, which from 8 MiB on up to four
    /// threads share, and for up to 64 KiB one round trip.
    ///
    /// Errors: as [`Client::create`].
    pub fn put(
        &self,
        id: ObjectId,
        data: &[u8],
        metadata: &[u8],
        timeout: Duration,
    ) -> Result<(), ObjectsError> {
        if self.put_small(id, data, metadata)? {
            return Ok(());
        }
        let mut buffer = self.create(id, data.len() as u64, metadata, timeout)?;
        buffer.write_at(0, data)?;
        buffer.seal()
    }

    /// Keeps the object in memory, whether it is referenced or not, until [`Client::unpin`].
    ///
    /// Errors: [`ObjectsError::NotFound`], and as [`Client::contains`].
    pub fn pin(&self, id: ObjectId) -> Result<(), ObjectsError> {
        self.done(&Request::new(Operation::Pin, id)).map(drop)
    }

    /// Ends [`Client::pin`].
    ///
    /// Errors: as [`Client::pin`].
    pub fn unpin(&self, id: ObjectId) -> Result<(), ObjectsError> {
        self.done(&Request::new(Operation::Unpin, id)).map(drop)
    }

    /// Does what no client does, so that the store ends the connection.
    #[cfg(test)]
    pub(crate) fn be_expelled(&self) {
        self.release(ObjectId([0; crate::id::ID_BYTES]), u64::MAX);
    }

    /// A round trip to the store.
    ///
    /// Errors: as [`Client::contains`].
    pub fn ping(&self) -> Result<(), ObjectsError> {
        let id = ObjectId([0; crate::id::ID_BYTES]);
        self.done(&Request::new(Operation::Ping, id)).map(drop)
    }
}
