//! The store's memory: segments, who writes them, who maps them, and the limit on their bytes.
//!
//! Invariants: the bytes of all segments, those included that readers have still to unmap, stay
//! within the limit; a range is allocated in a segment only while its writer is the client that
//! asks, and only once no further process can map the segment for writing.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::planted::{Planted, planted};
use crate::heap::{Heap, rounded};
use crate::segment::Segment;

/// The store itself as a writer: of what it restores.
pub(crate) const STORE: u32 = 0;
/// The writer of a segment whose own one is gone. Nothing is put there any more: a client that closed
/// its socket, or said that it unmapped, may have kept its mapping, through which it can write.
pub(crate) const GONE: u32 = u32::MAX;

/// Smallest first segment of a client.
const FIRST_SEGMENT: u64 = 1 << 20;
/// Largest segment made in advance of need.
const LARGEST_AHEAD: u64 = 64 << 20;
/// Segments are whole huge pages where they are large.
const HUGE: u64 = 2 << 20;
const PAGE: u64 = 4096;
/// How long a client may take to unmap a segment before other memory is sought. The client library
/// does it at once; a client that was stopped never does.
const UNMAPPING_NS: u64 = 1_000_000_000;

/// Where an object lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub segment: u32,
    pub offset: u64,
}

#[derive(Debug)]
pub(crate) struct Held {
    pub segment: Arc<Segment>,
    pub heap: Heap,
    pub writer: u32,
    /// The writer mapped it and the kernel refuses others.
    pub ready: bool,
    /// Clients that have its descriptor, the writer among them.
    pub mapped_by: BTreeSet<u32>,
    /// Being unmapped, since when; no object lies in it.
    pub retired_ns: Option<u64>,
    /// Objects in it that may go: sealed, and neither referenced nor pinned nor moved.
    pub queued: u64,
}

/// What came of asking for memory.
#[derive(Debug)]
pub(crate) enum Found {
    Place(Place),
    /// A segment was made, or was made before: wait until its writer maps it.
    Offered {
        new: Option<u32>,
    },
    /// No room now.
    Nothing,
}

/// The segments there are, for other threads of this process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segments(Arc<Shown>);

#[derive(Debug, Default)]
struct Shown {
    segments: Mutex<HashMap<u32, Arc<Segment>>>,
    dropped: AtomicU64,
}

impl Segments {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Arc<Segment>>> {
        self.0.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, number: u32) -> Option<Arc<Segment>> {
        self.lock().get(&number).cloned()
    }

    pub(crate) fn has(&self, number: u32) -> bool {
        self.lock().contains_key(&number)
    }

    /// How many went so far: a holder of some looks again when this changes.
    pub(crate) fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Acquire)
    }

    fn forget(&self, number: u32) {
        self.lock().remove(&number);
        // After the removal: a thread that sees the count finds the segment gone.
        self.0.dropped.fetch_add(1, Ordering::Release);
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Memory {
    shown: Segments,
    segments: BTreeMap<u32, Held>,
    next: u32,
    limit: u64,
    total: u64,
    /// Bytes of the limit that new segments of clients may not take.
    charged: u64,
}

impl Memory {
    pub(crate) fn new(limit: u64, shown: Segments) -> Self {
        Self { shown, segments: BTreeMap::new(), next: 1, limit, total: 0, charged: 0 }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// From now on so many bytes of the limit are not for new segments of clients.
    pub(crate) fn charge(&mut self, bytes: u64) {
        self.charged = bytes;
    }

    /// Bytes of all segments.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn used(&self) -> u64 {
        self.segments.values().map(|held| held.heap.used_bytes()).sum()
    }

    pub(crate) fn count(&self) -> usize {
        self.segments.len()
    }

    /// Bytes that wait for readers to unmap them.
    pub(crate) fn retiring(&self) -> u64 {
        let retired = self.segments.values().filter(|held| held.retired_ns.is_some());
        retired.map(|held| held.segment.bytes()).sum()
    }

    /// Of these, bytes that will come free soon, and when those that do not are given up.
    pub(crate) fn coming(&self, now_ns: u64) -> (u64, u64) {
        let due = |held: &Held| held.retired_ns.map(|at_ns| at_ns + UNMAPPING_NS);
        let soon = self.segments.values().filter_map(|held| {
            due(held).filter(|due| *due > now_ns).map(|due| (held.segment.bytes(), due))
        });
        soon.fold((0, u64::MAX), |(bytes, due), (more, other)| (bytes + more, due.min(other)))
    }

    /// Clients that do not unmap what they were told to, such as one that was stopped: what they have
    /// mapped does not come free.
    pub(crate) fn slow(&self, now_ns: u64) -> HashSet<u32> {
        let late = |held: &&Held| held.retired_ns.is_some_and(|at| at + UNMAPPING_NS <= now_ns);
        self.segments
            .values()
            .filter(late)
            .flat_map(|held| held.mapped_by.iter().copied())
            .collect()
    }

    pub(crate) fn get(&self, number: u32) -> Option<&Held> {
        self.segments.get(&number)
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut Held> {
        self.segments.get_mut(&number)
    }

    /// Room for `bytes` in segments of `writer`, in a new one if the limit allows.
    pub(crate) fn find(&mut self, writer: u32, bytes: u64) -> Found {
        let own = self.segments.iter_mut().filter(|(_, held)| held.writer == writer);
        let mut offered = false;
        let mut written = 0;
        for (number, held) in own {
            if held.retired_ns.is_some() {
                continue;
            }
            written += held.segment.bytes();
            if !held.ready {
                offered |= rounded(bytes).is_some_and(|bytes| held.heap.largest() >= bytes);
            } else if let Some(offset) = held.heap.allocate(bytes) {
                return Found::Place(Place { segment: *number, offset });
            }
        }
        if offered {
            return Found::Offered { new: None };
        }
        match self.enlarge(writer, bytes, written) {
            Some(number) if writer == STORE => {
                let held = self.segments.get_mut(&number);
                let offset = held.and_then(|held| held.heap.allocate(bytes));
                offset.map_or(Found::Nothing, |offset| {
                    Found::Place(Place { segment: number, offset })
                })
            }
            Some(number) => Found::Offered { new: Some(number) },
            None => Found::Nothing,
        }
    }

    /// Makes a segment: as large again as what the writer has, if the limit allows, else as large
    /// as the object needs.
    fn enlarge(&mut self, writer: u32, bytes: u64, written: u64) -> Option<u32> {
        // An object was let in by the whole limit: one that is on disk has to have room to come back.
        let charged = if writer == STORE { 0 } else { self.charged };
        let room = self.limit.saturating_sub(self.total + charged);
        let least = bytes.max(1).checked_next_multiple_of(PAGE)?;
        let ahead = written.clamp(FIRST_SEGMENT, LARGEST_AHEAD).min(self.limit / 16);
        let mut length = least.max(ahead.next_multiple_of(PAGE));
        if length >= HUGE {
            length = length.checked_next_multiple_of(HUGE)?;
        }
        if length > room {
            length = least;
        }
        if length > room {
            return None;
        }
        let segment = Segment::create(usize::try_from(length).ok()?).and_then(|segment| {
            if writer == STORE {
                segment.refuse_writers()?;
            }
            Ok(segment)
        });
        let segment = match segment {
            Ok(segment) => Arc::new(segment),
            Err(error) => {
                tracing::warn!(%error, length, "a segment of the object store cannot be made");
                return None;
            }
        };
        let number = self.next;
        self.next += 1;
        self.total += length;
        self.shown.lock().insert(number, Arc::clone(&segment));
        let held = Held {
            segment,
            heap: Heap::new(length),
            writer,
            ready: writer == STORE,
            mapped_by: BTreeSet::new(),
            retired_ns: None,
            queued: 0,
        };
        self.segments.insert(number, held);
        Some(number)
    }

    /// A segment nothing lies in and no pending create of its writer waits for, and that none of the
    /// clients in `slow` maps.
    pub(crate) fn empty_one(&self, slow: &HashSet<u32>) -> Option<u32> {
        let empty = |held: &Held| {
            held.retired_ns.is_none()
                && held.ready
                && held.heap.is_empty()
                && !held.mapped_by.iter().any(|client| slow.contains(client))
        };
        self.segments.iter().find(|(_, held)| empty(held)).map(|(number, _)| *number)
    }

    /// Begins to give a segment back; the clients that have to unmap it first. Without any it is
    /// gone.
    pub(crate) fn retire(&mut self, number: u32, now_ns: u64) -> Vec<u32> {
        let Some(held) = self.segments.get_mut(&number) else { return Vec::new() };
        held.retired_ns = Some(now_ns);
        let clients: Vec<u32> = held.mapped_by.iter().copied().collect();
        if clients.is_empty() {
            self.drop_segment(number);
        }
        clients
    }

    /// `client` has no mapping of the segment any more. True when memory came free.
    pub(crate) fn unmapped(&mut self, number: u32, client: u32) -> bool {
        let Some(held) = self.segments.get_mut(&number) else { return false };
        held.mapped_by.remove(&client);
        let gone = held.retired_ns.is_some() && held.mapped_by.is_empty();
        if gone {
            self.drop_segment(number);
        }
        gone
    }

    fn drop_segment(&mut self, number: u32) {
        if let Some(held) = self.segments.remove(&number) {
            self.shown.forget(number);
            self.total -= held.segment.bytes();
        }
    }

    /// A client is gone: what it wrote is the store's now, and what it mapped it maps no more.
    /// Returns segments that go, with the clients that have to unmap them first.
    pub(crate) fn forget_client(&mut self, client: u32, now_ns: u64) -> Vec<(u32, Vec<u32>)> {
        let mut going = Vec::new();
        let numbers: Vec<u32> = self.segments.keys().copied().collect();
        for number in numbers {
            let Some(held) = self.segments.get_mut(&number) else { continue };
            held.mapped_by.remove(&client);
            if held.writer == client {
                held.writer = if planted(Planted::WriteAmongOthers) { STORE } else { GONE };
                if !held.ready {
                    // The client may have handed the descriptor on before the seal.
                    held.retired_ns = Some(now_ns);
                } else if held.heap.is_empty() {
                    going.push((number, self.retire(number, now_ns)));
                    continue;
                }
            }
            if held.retired_ns.is_some() && held.mapped_by.is_empty() {
                self.drop_segment(number);
            }
        }
        going
    }

    pub(crate) fn free(&mut self, place: Place, bytes: u64) {
        if let Some(held) = self.segments.get_mut(&place.segment) {
            held.heap.free(place.offset, bytes);
        }
    }

    /// Parts the first `front` bytes from the `whole` at `place`; how much is left behind them.
    pub(crate) fn split(&mut self, place: Place, whole: u64, front: u64) -> u64 {
        self.segments.get_mut(&place.segment).map_or(0, |held| held.heap.split(whole, front))
    }

    /// Counts objects that may go, up or down.
    pub(crate) fn queue(&mut self, place: Place, more: bool) {
        if let Some(held) = self.segments.get_mut(&place.segment) {
            if more {
                held.queued += 1;
            } else {
                held.queued -= 1;
            }
        }
    }

    /// Segments of which evicting objects can help `writer`: it is their writer, or every object may
    /// go, and then the segment can, unless one of the clients in `slow` maps it.
    pub(crate) fn helpful(&self, writer: u32, slow: &HashSet<u32>) -> HashSet<u32> {
        let helps = |held: &Held| {
            let whole = held.queued == held.heap.allocations()
                && !held.mapped_by.iter().any(|client| slow.contains(client));
            held.queued > 0 && (held.writer == writer || whole)
        };
        self.segments.iter().filter(|(_, held)| helps(held)).map(|(number, _)| *number).collect()
    }
}
