//! Posted receives in order, and the regions they lie in.
//!
//! A posted receive keeps its region alive. Holding a handle each would cost two atomic operations
//! a message, so the handles are kept once and counted without atomics: a queue pair's receives
//! mostly lie in one region.

use beeline_fabric::{Access, MemoryRegion, PostError, ReceiveRequest, ScatterGatherEntry};

/// One posted receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Receive {
    pub wr_id: u64,
    pub length: u64,
    offset: u64,
    /// Place among the regions; [`NOWHERE`] without a buffer.
    region: u32,
}

const NOWHERE: u32 = u32::MAX;

#[derive(Debug)]
struct Held {
    region: MemoryRegion,
    receives: u32,
}

/// See the module's documentation.
///
/// Invariant: a receive's range lies inside its region, which is held while the receive is queued.
#[derive(Debug)]
pub(crate) struct Receives {
    /// A power of two of places; those from `first` to `next`, which count on for ever, are taken.
    places: Box<[Receive]>,
    first: usize,
    next: usize,
    regions: Vec<Option<Held>>,
    /// Where the last receive posted found its region.
    latest: usize,
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
        let empty = Receive { wr_id: 0, length: 0, offset: 0, region: NOWHERE };
        let places = vec![empty; (depth as usize).next_power_of_two()].into_boxed_slice();
        Self { places, first: 0, next: 0, regions: Vec::new(), latest: 0 }
    }

    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.next.wrapping_sub(self.first)
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
        let (region, offset, length) = match &request.buffer {
            Some(entry) => (self.hold(entry.region), entry.offset, entry.length),
            None => (NOWHERE, 0, 0),
        };
        let place = self.next & (self.places.len() - 1);
        self.places[place] = Receive { wr_id: request.wr_id, length, offset, region };
        self.next = self.next.wrapping_add(1);
        length
    }

    #[inline(always)]
    fn hold(&mut self, region: &MemoryRegion) -> u32 {
        let latest = self.regions.get_mut(self.latest).and_then(Option::as_mut);
        if let Some(held) = latest
            && held.region.is_same(region)
        {
            held.receives += 1;
        } else {
            self.latest = self.hold_other(region);
        }
        u32::try_from(self.latest).unwrap_or(NOWHERE)
    }

    #[cold]
    fn hold_other(&mut self, region: &MemoryRegion) -> usize {
        let known =
            |held: &Option<Held>| held.as_ref().is_some_and(|held| held.region.is_same(region));
        if let Some(place) = self.regions.iter().position(known) {
            if let Some(held) = &mut self.regions[place] {
                held.receives += 1;
            }
            return place;
        }
        let held = Some(Held { region: region.clone(), receives: 1 });
        if let Some(place) = self.regions.iter().position(Option::is_none) {
            self.regions[place] = held;
            return place;
        }
        self.regions.push(held);
        self.regions.len() - 1
    }

    /// The receive that is next.
    #[inline(always)]
    pub(crate) fn front(&self) -> Option<Receive> {
        (!self.is_empty()).then(|| *self.at(self.first))
    }

    /// Where the bytes of a queued receive go: the range was checked when it was posted.
    #[inline(always)]
    pub(crate) fn place(&self, receive: &Receive) -> Option<(&MemoryRegion, u64)> {
        let held = self.regions.get(receive.region as usize)?.as_ref()?;
        Some((&held.region, receive.offset))
    }

    /// Takes the next receive off; its region is let go with its last receive.
    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Option<Receive> {
        let receive = self.front()?;
        self.first = self.first.wrapping_add(1);
        if let Some(place) = self.regions.get_mut(receive.region as usize)
            && let Some(held) = place
        {
            held.receives -= 1;
            if held.receives == 0 {
                *place = None;
            }
        }
        Some(receive)
    }
}
