//! The store as transfers see it: an ordinary client, with the segments of this process.

use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::MemoryRegion;
use beeline_os::MemoryObject;

use super::Shared;
use super::patience::ROOM;
use crate::client::{Buffer, Client};
use crate::error::ObjectsError;
use crate::id::ObjectId;
use crate::transfer::{Context, Lent, Made, NotMade, Seal, Shelf};

/// The store of this node, towards one device.
pub(super) struct StoreShelf<'a> {
    shared: &'a Shared,
    client: Client,
    context: Arc<Context>,
}

struct Sealing(Buffer);

impl Seal for Sealing {
    fn seal(self: Box<Self>, checksum: Option<u32>) -> Result<(), String> {
        self.0.seal_with(checksum).map_err(|error| error.to_string())
    }
}

impl<'a> StoreShelf<'a> {
    pub(super) fn new(shared: &'a Shared, context: &Arc<Context>) -> Result<Self, ObjectsError> {
        Ok(Self { shared, client: shared.client()?, context: Arc::clone(context) })
    }

    /// The connection to the store, a new one where the last was lost.
    fn client(&mut self) -> Result<&Client, ObjectsError> {
        if !self.client.is_connected() {
            self.client = self.shared.client()?;
        }
        Ok(&self.client)
    }

    fn region(&self, number: u32) -> Result<MemoryRegion, String> {
        let segment = self.shared.handle.segment(number);
        let segment = segment.ok_or("the segment is gone")?;
        let memory: Arc<dyn MemoryObject> = segment;
        if let Ok(region) = self.context.segment(number, &memory) {
            return Ok(region);
        }
        // A limit of the device: memory the store gave back may hold registrations.
        self.shared.sweep();
        self.context.segment(number, &memory).map_err(|error| error.to_string())
    }
}

impl Shelf for StoreShelf<'_> {
    fn lend(&mut self, id: ObjectId) -> Option<Lent> {
        let object = self.client().ok()?.get(id, Duration::ZERO).ok()?;
        let location = object.location();
        let region = match self.region(location.segment) {
            Ok(region) => region,
            Err(error) => {
                tracing::warn!(%error, "an object cannot be sent: its memory is not registered");
                return None;
            }
        };
        Some(Lent {
            region,
            offset: location.offset,
            size: location.size,
            metadata_size: location.metadata_size,
            checksum: location.checksum,
            _hold: Box::new(object),
        })
    }

    fn make(&mut self, id: ObjectId, size: u64, metadata_size: u64) -> Result<Made, NotMade> {
        let client = self.client().map_err(|error| NotMade::Failed(error.to_string()))?;
        let buffer = match client.create_bare(id, size, metadata_size, ROOM) {
            Ok(buffer) => buffer,
            Err(ObjectsError::Exists { .. }) => return Err(NotMade::Exists),
            Err(error) => return Err(NotMade::Failed(error.to_string())),
        };
        let location = buffer.location();
        let region = self.region(location.segment).map_err(NotMade::Failed)?;
        Ok(Made { region, offset: location.offset, seal: Box::new(Sealing(buffer)) })
    }

    fn put(
        &mut self,
        id: ObjectId,
        bytes: &[u8],
        size: u64,
        checksum: Option<u32>,
    ) -> Result<(), NotMade> {
        let client = self.client().map_err(|error| NotMade::Failed(error.to_string()))?;
        match client.put_bare(id, bytes, size, checksum, ROOM) {
            Ok(()) => Ok(()),
            Err(ObjectsError::Exists { .. }) => Err(NotMade::Exists),
            Err(error) => Err(NotMade::Failed(error.to_string())),
        }
    }

    fn rouse(&mut self) {
        self.client.rouse();
    }
}
