//! Remote keys a queue pair has opened: a small open-addressed table, private to its thread.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use beeline_fabric::Access;
use beeline_os::{MemoryObject, Persistence};

use crate::link::{Opened, OpenedKey};

/// What is known about a key.
#[derive(Debug)]
pub(crate) enum KeyState {
    /// Its backing was retired: to be asked for again.
    Closed,
    /// Asked for.
    Pending,
    /// The peer refused it.
    Refused,
    /// Mapped.
    Open(RemoteRegion),
}

/// A peer's region.
#[derive(Debug)]
pub(crate) struct RemoteRegion {
    pub base: NonNull<u8>,
    pub length: u64,
    pub access: Access,
    pub persistence: Persistence,
    memory: Opened,
    /// The retired mark, in the mapping; a word that stays 0 where the object has none.
    pub mark: NonNull<AtomicU64>,
    /// Where writes that go through the region from front to back have been faulted in to.
    faulted_to: Cell<u64>,
}

/// The mark of an object without one.
static NEVER_RETIRED: AtomicU64 = AtomicU64::new(0);

/// Pages faulted in ahead of such writes, bytes: one call in place of 64 faults, and little memory
/// taken where the peer's object had none yet.
const AHEAD_BYTES: u64 = 256 << 10;
/// Writes that got this far from the front are taken to go on.
const FIRST_MARK_BYTES: u64 = 64 << 10;

impl RemoteRegion {
    /// The descriptor to flush; kept for file regions only.
    pub(crate) fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        self.memory.descriptor()
    }

    /// The memory object itself, in this process.
    #[inline(always)]
    pub(crate) fn here(&self) -> Option<&Arc<dyn MemoryObject>> {
        match &self.memory {
            Opened::Mapped(_) => None,
            Opened::Here(memory) => Some(memory),
        }
    }

    /// Called before a write to a checked range. A log is written from front to back, and every
    /// page of a fresh mapping costs a fault, many times what the copy costs: when a write passes
    /// the mark, the pages after it are faulted in together.
    #[inline(always)]
    pub(crate) fn before_write(&self, offset: u64, length: u64) {
        let mark = self.faulted_to.get();
        if offset <= mark && offset + length > mark {
            self.fault_in(offset + length);
        }
    }

    #[cold]
    fn fault_in(&self, end: u64) {
        let from = self.faulted_to.get() & !4095;
        let to = (end + AHEAD_BYTES).next_multiple_of(4096).min(self.length);
        self.faulted_to.set(to);
        // Pages of a file count as dirty once writable, and would be synchronised for nothing.
        if self.persistence == Persistence::File || from >= to {
            return;
        }
        let length = usize::try_from(to - from).unwrap_or(0);
        // SAFETY: `from` lies inside the mapping, which is `length` long.
        let start = unsafe { self.base.as_ptr().add(usize::try_from(from).unwrap_or(0)) };
        // SAFETY: the range lies inside the mapping; populating changes no contents. A kernel
        // that cannot is no matter: the pages then come one by one.
        let _ = unsafe {
            rustix::mm::madvise(start.cast(), length, rustix::mm::Advice::LinuxPopulateWrite)
        };
    }
}

impl From<OpenedKey> for RemoteRegion {
    fn from(opened: OpenedKey) -> Self {
        let OpenedKey { memory, offset, length, access, persistence } = opened;
        let inside =
            offset.checked_add(length).is_some_and(|end| end <= memory.length_bytes() as u64);
        assert!(inside, "an opened region lies inside its object");
        // SAFETY: just checked to lie inside, or one past, the memory.
        let base = unsafe { memory.base().add(usize::try_from(offset).unwrap_or(0)) };
        let (mark, faulted_to) = match &memory {
            Opened::Mapped(mapping) => {
                (mapping.retired().unwrap_or(&NEVER_RETIRED), FIRST_MARK_BYTES)
            }
            // Its pages are its owner's, and are there or come as its owner's do.
            Opened::Here(_) => (&NEVER_RETIRED, u64::MAX),
        };
        let (mark, faulted_to) = (NonNull::from(mark), Cell::new(faulted_to));
        Self { base, length, access, persistence, memory, mark, faulted_to }
    }
}

/// The region written last, where it was mapped from another process and may be written: what a write
/// needs to know, in one place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latest {
    key: u64,
    /// Bytes from its start that need no look at the region itself: all, or those that were faulted
    /// in. 0: no region was written since the table changed.
    length: u64,
    base: *mut u8,
    mark: NonNull<AtomicU64>,
}

impl Latest {
    const NONE: Self = Self {
        key: 0,
        length: 0,
        base: std::ptr::null_mut(),
        mark: NonNull::from_ref(&NEVER_RETIRED),
    };

    /// Where a write of `length` bytes to `offset` of the region of `key` goes, and the mark of its
    /// backing, if this is the region and the range lies inside.
    #[inline(always)]
    pub(crate) fn range(
        &self,
        key: u64,
        offset: u64,
        length: u64,
    ) -> Option<(*mut u8, NonNull<AtomicU64>)> {
        let inside = offset < self.length && length <= self.length - offset;
        if key != self.key || !inside {
            return None;
        }
        #[expect(clippy::cast_possible_truncation, reason = "inside a mapped region")]
        let start = self.base.wrapping_add(offset as usize);
        Some((start, self.mark))
    }
}

/// The table. Keys are random, so their low bits serve as hash.
///
/// Invariant: what `latest` names is open in the table, and so mapped: whatever changes a key's state
/// forgets it.
#[derive(Debug)]
pub(crate) struct KeyTable {
    /// A power of two of places, at most half of them taken; or none.
    places: Vec<Option<(u64, KeyState)>>,
    taken: usize,
    latest: Cell<Latest>,
}

impl Default for KeyTable {
    fn default() -> Self {
        Self { places: Vec::new(), taken: 0, latest: Cell::new(Latest::NONE) }
    }
}

impl KeyTable {
    #[expect(clippy::cast_possible_truncation, reason = "any bits of the key will do")]
    #[inline(always)]
    fn place(&self, key: u64) -> usize {
        let mask = self.places.len() - 1;
        let mut place = key as usize & mask;
        while self.places[place].as_ref().is_some_and(|(found, _)| *found != key) {
            place = (place + 1) & mask;
        }
        place
    }

    pub(crate) fn find(&self, key: u64) -> Option<&KeyState> {
        if self.places.is_empty() {
            return None;
        }
        self.places[self.place(key)].as_ref().map(|(_, state)| state)
    }

    /// The region of `key`, if it is mapped.
    #[expect(clippy::cast_possible_truncation, reason = "any bits of the key will do")]
    #[inline(always)]
    pub(crate) fn open(&self, key: u64) -> Option<&RemoteRegion> {
        // Without places the mask names one that is not there.
        let mask = self.places.len().wrapping_sub(1);
        let mut place = key as usize & mask;
        loop {
            match self.places.get(place)? {
                Some((found, KeyState::Open(region))) if *found == key => return Some(region),
                Some((found, _)) if *found != key => place = (place + 1) & mask,
                _ => return None,
            }
        }
    }

    /// The region written last.
    #[inline(always)]
    pub(crate) fn latest(&self) -> Latest {
        self.latest.get()
    }

    /// `region`, which is open as `key` and may be written, is: the next write of it needs no look at
    /// the table.
    #[inline(always)]
    pub(crate) fn note_written(&self, key: u64, region: &RemoteRegion) {
        let (faulted, latest) = (region.faulted_to.get(), self.latest.get());
        let length = if faulted < region.length { faulted } else { region.length };
        if (latest.key != key || latest.length != length) && region.here().is_none() {
            let (base, mark) = (region.base.as_ptr(), region.mark);
            self.latest.set(Latest { key, length, base, mark });
        }
    }

    /// Forgets `key`, which is mapped: it is asked for again at its next use. Its place stays taken.
    pub(crate) fn close(&mut self, key: u64) {
        self.latest.set(Latest::NONE);
        if self.open(key).is_some() {
            let place = self.place(key);
            self.places[place] = Some((key, KeyState::Closed));
        }
    }

    /// Sets what is known about `key`. Allocates; a control step.
    pub(crate) fn set(&mut self, key: u64, state: KeyState) {
        self.latest.set(Latest::NONE);
        if (self.taken + 1) * 2 > self.places.len() {
            let bigger = (self.places.len() * 2).max(8);
            let old = std::mem::take(&mut self.places);
            self.places.resize_with(bigger, || None);
            for (key, state) in old.into_iter().flatten() {
                let place = self.place(key);
                self.places[place] = Some((key, state));
            }
        }
        let place = self.place(key);
        if self.places[place].is_none() {
            self.taken += 1;
        }
        self.places[place] = Some((key, state));
    }

    /// Forgets, and unmaps, everything.
    pub(crate) fn clear(&mut self) {
        self.latest.set(Latest::NONE);
        self.places.clear();
        self.taken = 0;
    }
}

#[cfg(test)]
mod tests {
    use beeline_os::Mapping;

    use super::*;

    #[test]
    fn keys_with_equal_low_bits_are_told_apart() {
        let mut table = KeyTable::default();
        assert!(table.find(5).is_none());
        for key in 0..50_u64 {
            table.set(key << 32, if key % 2 == 0 { KeyState::Pending } else { KeyState::Refused });
        }
        for key in 0..50_u64 {
            let found = table.find(key << 32).unwrap();
            assert_eq!(matches!(found, KeyState::Pending), key % 2 == 0);
        }
        assert!(table.find(50 << 32).is_none());
        assert!((0..=50).all(|key: u64| table.open(key << 32).is_none()), "none is mapped");
        table.clear();
        assert!(table.find(0).is_none());
        assert!(table.open(u64::MAX).is_none());
    }

    fn mapped(access: Access) -> KeyState {
        let memory = Opened::Mapped(Mapping::anonymous(1 << 20).unwrap());
        let (length, persistence) = (1 << 20, Persistence::Volatile);
        KeyState::Open(OpenedKey { memory, offset: 0, length, access, persistence }.into())
    }

    /// A table that knows key 5, which was written to, and 6.
    fn written() -> KeyTable {
        let mut table = KeyTable::default();
        table.set(5, mapped(Access::all()));
        table.set(6, mapped(Access::all()));
        table.note_written(5, table.open(5).unwrap());
        table
    }

    #[test]
    fn the_region_written_last_is_known_by_its_key_and_inside_its_range() {
        let table = written();
        let latest = table.latest();
        let base = table.open(5).unwrap().base.as_ptr();
        assert_eq!(latest.range(5, 8, 8).map(|(start, _)| start), Some(base.wrapping_add(8)));
        assert!(latest.range(6, 8, 8).is_none(), "another key");
        let known = FIRST_MARK_BYTES;
        assert!(latest.range(5, known - 8, 8).is_some());
        assert!(latest.range(5, known - 8, 9).is_none(), "pages behind are to be faulted in");
        assert!(latest.range(5, u64::MAX - 3, 8).is_none(), "an end beyond all numbers");
        table.open(5).unwrap().before_write(known - 8, 16);
        table.note_written(5, table.open(5).unwrap());
        assert!(table.latest().range(5, known - 8, 9).is_some(), "and then are known");
    }

    #[test]
    fn whatever_changes_a_key_forgets_the_region_written_last() {
        let changes: [fn(&mut KeyTable); 4] = [
            |table| table.close(5),
            |table| table.set(5, KeyState::Refused),
            |table| table.set(7, KeyState::Pending),
            KeyTable::clear,
        ];
        for change in changes {
            let mut table = written();
            assert!(table.latest().range(5, 0, 8).is_some());
            change(&mut table);
            assert!(table.latest().range(5, 0, 8).is_none(), "its mapping may be gone");
        }
    }
}
