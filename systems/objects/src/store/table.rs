//! The objects there are: by identifier, by handle, and in the order of their last use.
//!
//! Invariants: an object that is deleted leaves the index at once and its slot with its last
//! reference; the queue of those that may go holds exactly the sealed objects in memory that
//! nobody references, pins or moves.

use std::collections::{BTreeMap, HashMap};

use super::memory::Place;
use super::planted::{Planted, planted};
use crate::id::ObjectId;

/// Life of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Its creator writes it.
    Writing { creator: u32 },
    /// In memory.
    Sealed,
    /// In memory, and being written to disk.
    Spilling { file: u64, offset: u64 },
    /// On disk.
    Spilled { file: u64, offset: u64 },
    /// On disk, and being read back.
    Restoring { file: u64, offset: u64 },
}

/// One object.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    pub id: ObjectId,
    pub state: State,
    pub place: Option<Place>,
    pub size: u64,
    pub metadata_size: u64,
    pub checksum: Option<u32>,
    /// References of all clients.
    pub references: u32,
    pub pinned: bool,
    /// Not in the index any more.
    pub doomed: bool,
    pub created_ns: u64,
    /// Its place in the queue, if it may go.
    queued: Option<u64>,
}

impl Object {
    pub(crate) fn new(id: ObjectId, creator: u32, place: Place, size: u64, metadata: u64) -> Self {
        Self {
            id,
            state: State::Writing { creator },
            place: Some(place),
            size,
            metadata_size: metadata,
            checksum: None,
            references: 0,
            pinned: false,
            doomed: false,
            created_ns: 0,
            queued: None,
        }
    }

    /// Bytes in memory or on disk.
    pub(crate) fn bytes(&self) -> u64 {
        self.size + self.metadata_size
    }

    pub(crate) fn is_sealed(&self) -> bool {
        !matches!(self.state, State::Writing { .. })
    }

    pub(crate) fn is_queued(&self) -> bool {
        self.queued.is_some()
    }

    fn may_go(&self) -> bool {
        let referenced = self.references > 0 && !planted(Planted::EvictReferenced);
        self.state == State::Sealed && !referenced && !self.pinned && !self.doomed
    }
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    object: Option<Object>,
}

/// Bytes of one object's slot.
pub(super) const SLOT_BYTES: usize = size_of::<Slot>();

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    index: HashMap<ObjectId, u32>,
    queue: BTreeMap<u64, u32>,
    tick: u64,
}

impl Table {
    /// Objects in the index.
    pub(crate) fn count(&self) -> usize {
        self.index.len()
    }

    /// Objects, deleted ones that are still referenced included.
    pub(crate) fn held(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn find(&self, id: ObjectId) -> Option<u32> {
        self.index.get(&id).copied()
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&Object> {
        self.slots.get(slot as usize)?.object.as_ref()
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> Option<&mut Object> {
        self.slots.get_mut(slot as usize)?.object.as_mut()
    }

    /// The slot of a handle, if the object it named is still there.
    pub(crate) fn of_handle(&self, handle: u64) -> Option<u32> {
        let slot = (handle & u64::from(u32::MAX)) as u32;
        let there = self.slots.get(slot as usize)?;
        (there.object.is_some() && u64::from(there.generation) == handle >> 32).then_some(slot)
    }

    pub(crate) fn handle(&self, slot: u32) -> u64 {
        let generation = self.slots.get(slot as usize).map_or(0, |slot| slot.generation);
        u64::from(slot) | u64::from(generation) << 32
    }

    /// Adds an object under its identifier, which is free.
    pub(crate) fn insert(&mut self, object: Object) -> u32 {
        let id = object.id;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, object: None });
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let there = &mut self.slots[slot as usize];
        there.generation = there.generation.wrapping_add(1);
        there.object = Some(object);
        let before = self.index.insert(id, slot);
        assert!(before.is_none(), "an identifier names one object");
        slot
    }

    /// Takes the object out of the index; it is found by its handle only.
    pub(crate) fn doom(&mut self, slot: u32) {
        let Some(object) = self.get_mut(slot) else { return };
        object.doomed = true;
        let id = object.id;
        self.index.remove(&id);
        self.settle(slot);
    }

    /// Forgets the object for good.
    pub(crate) fn remove(&mut self, slot: u32) -> Option<Object> {
        let object = self.slots.get_mut(slot as usize)?.object.take()?;
        if let Some(tick) = object.queued {
            self.queue.remove(&tick);
        }
        if !object.doomed {
            self.index.remove(&object.id);
        }
        self.free.push(slot);
        Some(object)
    }

    /// Puts the object into the queue, at its end, or takes it out, as its state demands.
    pub(crate) fn settle(&mut self, slot: u32) {
        let Some(object) = self.slots.get_mut(slot as usize).and_then(|slot| slot.object.as_mut())
        else {
            return;
        };
        match (object.may_go(), object.queued) {
            (true, None) => {
                self.tick += 1;
                object.queued = Some(self.tick);
                self.queue.insert(self.tick, slot);
            }
            (false, Some(tick)) => {
                object.queued = None;
                self.queue.remove(&tick);
            }
            _ => {}
        }
    }

    /// Those that may go, least recently used first.
    pub(crate) fn oldest(&self) -> impl Iterator<Item = u32> + '_ {
        self.queue.values().copied()
    }

    /// All objects of the index.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Object> {
        self.slots.iter().filter_map(|slot| slot.object.as_ref()).filter(|object| !object.doomed)
    }
}
