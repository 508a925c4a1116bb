//! Registrations of log segments, made when an entry of a segment is first sent.

use std::sync::Arc;

use beeline_fabric::{Access, FabricError, MemoryRegion, ProtectionDomain};
use beeline_kv::ReadGuard;
use beeline_os::MemoryObject;
use beeline_pmem::Segment;

#[derive(Debug)]
struct Registered {
    generation: u64,
    segment: Arc<Segment>,
    region: MemoryRegion,
}

/// Segments registered with the same rights, by identifier.
///
/// Invariant: an identifier whose segment was freed and used again is noticed by its generation.
#[derive(Debug)]
pub(crate) struct SegmentRegions {
    access: Access,
    slots: Vec<Option<Registered>>,
}

impl SegmentRegions {
    pub fn new(access: Access) -> Self {
        Self { access, slots: Vec::new() }
    }

    /// The registration of `segment`.
    ///
    /// Errors: the provider's.
    pub fn of(
        &mut self,
        domain: &Arc<dyn ProtectionDomain>,
        segment: &Arc<Segment>,
    ) -> Result<&MemoryRegion, FabricError> {
        let at = segment.id() as usize;
        if self.slots.len() <= at {
            self.slots.resize_with(at + 1, || None);
        }
        let slot = &mut self.slots[at];
        let known = slot.as_ref().is_some_and(|known| known.generation == segment.generation());
        if !known {
            let memory: Arc<dyn MemoryObject> = Arc::clone(segment) as Arc<dyn MemoryObject>;
            let region = domain.register(memory, self.access)?;
            let generation = segment.generation();
            *slot = Some(Registered { generation, segment: Arc::clone(segment), region });
        }
        let Some(registered) = slot else { unreachable!("the slot was just filled") };
        Ok(&registered.region)
    }

    /// The registration of a segment that [`SegmentRegions::of`] registered and a read pins.
    pub fn known(&self, read: &ReadGuard) -> &MemoryRegion {
        let registered = self.slots.get(read.segment_id() as usize).and_then(Option::as_ref);
        let same = registered.is_some_and(|known| known.generation == read.generation());
        assert!(same, "a segment stays registered while a read pins it");
        let Some(registered) = registered else { unreachable!("just asserted") };
        &registered.region
    }

    /// Gives up registrations of segments that the pool does not know any more.
    pub fn sweep(&mut self, pool: &beeline_pmem::Pool) {
        for (id, slot) in self.slots.iter_mut().enumerate() {
            let gone = slot.as_ref().is_some_and(|known| {
                !pool
                    .segment(id as u32)
                    .is_some_and(|current| Arc::ptr_eq(&current, &known.segment))
            });
            if gone {
                *slot = None;
            }
        }
    }
}
