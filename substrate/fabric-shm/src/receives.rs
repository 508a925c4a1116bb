//! Posted receives in order, and the regions they lie in.
//!
//! A posted receive keeps its region alive. Holding a handle each would cost two atomic operations
//! a message, so receives posted one after another in one region, as they mostly are, share one: a
//! *run*, which ends when its last receive is taken.

use std::collections::VecDeque;

use beeline_fabric::{Access, MemoryRegion, PostError, ReceiveRequest, ScatterGatherEntry};

/// One posted receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Receive {
    pub wr_id: u64,
    pub length: u64,
    offset: u64,
}

/// Receives in one region, one behind another; receives without a buffer may lie between them.
#[derive(Debug)]
struct Run {
    region: MemoryRegion,
    /// The last of them, as `Receives::next` counts.
    last: usize,
}

/// See the module's documentation.
///
/// Invariants: a receive's range lies inside the region of its run, which is held while the receive is
/// queued; a run without a queued receive is not held; the next receive with a buffer is of the
/// oldest run.
#[derive(Debug)]
pub(crate) struct Receives {
    /// A power of two of places; those from `first` to `next`, which count on for ever, are taken.
    places: Box<[Receive]>,
    first: usize,
    next: usize,
    /// The region of the newest run, and the last receive of it; where there is none, one that was taken.
    newest: Option<MemoryRegion>,
    newest_last: usize,
    /// Those before it, the oldest first.
    older: VecDeque<Run>,
}

/// Errors: [`PostError::LocalProtection`].
#[inline(always)]
pub(crate) fn check_writable(entry: &ScatterGatherEntry<'_>) -> Result<(), PostError> {
    let writable = entry.region.access().contains(Access::LOCAL_WRITE);
    if writable && entry.region.contains(entry.offset, entry.length) {
        Ok(())
    } else {
        Err(PostError::LocalProtection)
    }
}

impl Receives {
    pub(crate) fn with_capacity(depth: u32) -> Self {
        let empty = Receive { wr_id: 0, length: 0, offset: 0 };
        let places = vec![empty; (depth as usize).next_power_of_two()].into_boxed_slice();
        Self {
            places,
            first: 0,
            next: 0,
            newest: None,
            newest_last: usize::MAX,
            older: VecDeque::new(),
        }
    }

    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.next.wrapping_sub(self.first)
    }

    /// How many were ever posted.
    #[inline(always)]
    pub(crate) fn posted(&self) -> u64 {
        self.next as u64
    }

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.next == self.first
    }

    #[inline(always)]
    fn at(&self, count: usize) -> &Receive {
        &self.places[count & (self.places.len() - 1)]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Receive> {
        (0..self.len()).map(|at| self.at(self.first.wrapping_add(at)))
    }

    /// Errors: [`PostError::LocalProtection`]; nothing was posted.
    pub(crate) fn check(requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        requests.iter().filter_map(|request| request.buffer.as_ref()).try_for_each(check_writable)
    }

    /// Queues a receive that [`Receives::check`] accepted; returns its length. The caller saw to it
    /// that there are fewer than the depth.
    #[inline(always)]
    pub(crate) fn post(&mut self, request: &ReceiveRequest<'_>) -> u64 {
        let (offset, length) = match &request.buffer {
            Some(entry) => {
                if self.newest.as_ref().is_none_or(|region| !region.is_same(entry.region)) {
                    self.begin_run(entry.region);
                }
                self.newest_last = self.next;
                (entry.offset, entry.length)
            }
            None => (0, 0),
        };
        let place = self.next & (self.places.len() - 1);
        self.places[place] = Receive { wr_id: request.wr_id, length, offset };
        self.next = self.next.wrapping_add(1);
        length
    }

    /// The receive that is about to be queued is the first of a run.
    #[cold]
    fn begin_run(&mut self, region: &MemoryRegion) {
        let (before, last) = (self.newest.replace(region.clone()), self.newest_last);
        self.older.extend(before.map(|region| Run { region, last }));
    }

    /// The receive that is next.
    #[inline(always)]
    pub(crate) fn front(&self) -> Option<Receive> {
        (!self.is_empty()).then(|| *self.at(self.first))
    }

    /// Where the bytes of `front`, the next receive, go, if it has room for any: the range was checked
    /// when it was posted.
    #[inline(always)]
    pub(crate) fn place(&self, front: &Receive) -> Option<(&MemoryRegion, u64)> {
        let oldest = self.older.front().map(|run| &run.region);
        Some((oldest.or(self.newest.as_ref())?, front.offset))
    }

    /// Takes the next receive off; its region is let go with its run's last receive.
    #[inline(always)]
    pub(crate) fn take_front(&mut self) {
        let taken = self.first;
        self.first = taken.wrapping_add(1);
        if taken == self.newest_last || !self.older.is_empty() {
            self.end_run(taken);
        }
    }

    /// Takes the next receive off.
    pub(crate) fn pop(&mut self) -> Option<Receive> {
        let receive = self.front()?;
        self.take_front();
        Some(receive)
    }

    /// Lets a run go whose last receive was the one taken.
    #[cold]
    fn end_run(&mut self, taken: usize) {
        if self.older.front().is_some_and(|run| run.last == taken) {
            self.older.pop_front();
        } else if taken == self.newest_last {
            self.newest = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use beeline_fabric::{FabricError, LocalKey, RegionControl, RemoteKey};
    use beeline_os::SharedMemory;
    use proptest::prelude::*;

    use super::*;

    /// A region's control that only tells, by its count, whether the region is held.
    #[derive(Debug)]
    struct Counted(Arc<()>);

    impl RegionControl for Counted {
        fn revoke(&self, _: &MemoryRegion) -> Result<(), FabricError> {
            Ok(())
        }

        fn deregister(&self, _: LocalKey, _: RemoteKey) {}
    }

    fn region(held: &Arc<()>) -> MemoryRegion {
        let memory = Arc::new(SharedMemory::allocate("receives", 4096).unwrap());
        let control = Arc::new(Counted(Arc::clone(held)));
        MemoryRegion::new(memory, Access::all(), LocalKey(0), RemoteKey(0), control)
    }

    proptest! {
        /// Against a plain model: a queue of receives with a handle each.
        #[test]
        fn a_region_is_held_while_a_receive_in_it_is_queued_and_no_longer(
            // A region's number; 2: a receive without a buffer; 3: one is taken.
            steps in proptest::collection::vec(0..4_usize, 1..60),
        ) {
            let holds = [(); 2].map(|()| Arc::new(()));
            let mut receives = Receives::with_capacity(8);
            let mut model = VecDeque::new();
            for (at, step) in (0..).zip(steps) {
                if step == 3 {
                    let taken = receives.front();
                    prop_assert_eq!(taken.map(|receive| receive.wr_id), model.front().map(|&(id, _)| id));
                    if let Some(&(id, which)) = model.front()
                        && which < 2
                        && let Some(receive) = taken
                    {
                        let (region, offset) = receives.place(&receive).unwrap();
                        prop_assert_eq!(offset, id, "it goes where it was to go");
                        let control: &Counted = region.control().downcast_ref().unwrap();
                        prop_assert!(Arc::ptr_eq(&control.0, &holds[which]), "and into its region");
                    }
                    receives.pop();
                    model.pop_front();
                } else if receives.len() < 8 {
                    // Handles of one region, as its owner has them, are not at hand here: each post
                    // that finds none queued makes a new one.
                    model.push_back((at, step));
                    let posted = known(&receives, &holds, step);
                    let posted = posted.or_else(|| Some(region(holds.get(step)?)));
                    let buffer = posted.as_ref();
                    let buffer = buffer.map(|region| ScatterGatherEntry { region, offset: at, length: 8 });
                    receives.post(&ReceiveRequest { wr_id: at, buffer });
                }
                for (which, held) in holds.iter().enumerate() {
                    let queued = model.iter().any(|&(_, other)| other == which);
                    prop_assert_eq!(Arc::strong_count(held) > 1, queued, "region {} is held", which);
                }
            }
        }
    }

    /// The region that `held` tells of, where a run holds it.
    fn known(receives: &Receives, holds: &[Arc<()>; 2], which: usize) -> Option<MemoryRegion> {
        let held = holds.get(which)?;
        let older = receives.older.iter().map(|run| &run.region);
        let mut regions = older.chain(&receives.newest);
        let of = |region: &&MemoryRegion| {
            let control: Option<&Counted> = region.control().downcast_ref();
            control.is_some_and(|control| Arc::ptr_eq(&control.0, held))
        };
        regions.find(of).cloned()
    }
}
