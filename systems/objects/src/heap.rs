//! Where objects lie inside one segment: best fit over free ranges that are joined when they touch.
//!
//! Place: below the store's table; plain numbers, no memory is touched.
//!
//! Invariants: ranges given out do not overlap and start at a multiple of [`ALIGNMENT`]; free
//! ranges never touch each other. Fragmentation: at most 63 bytes inside each allocation, and
//! outside the free ranges, of which `largest` tells how much one object could take.

use std::collections::{BTreeMap, BTreeSet};

/// Objects start at cache lines, so that arrays of any element type are aligned.
pub const ALIGNMENT: u64 = 64;

/// The free ranges of one segment.
#[derive(Debug)]
pub struct Heap {
    length: u64,
    by_offset: BTreeMap<u64, u64>,
    by_length: BTreeSet<(u64, u64)>,
    used: u64,
    allocations: u64,
}

/// Bytes an object of `bytes` takes.
#[must_use]
pub fn rounded(bytes: u64) -> Option<u64> {
    bytes.max(1).checked_next_multiple_of(ALIGNMENT)
}

impl Heap {
    /// A heap over `length` free bytes; what does not fill a cache line at the end is left out.
    #[must_use]
    pub fn new(length: u64) -> Self {
        let mut heap = Self {
            length,
            by_offset: BTreeMap::new(),
            by_length: BTreeSet::new(),
            used: 0,
            allocations: 0,
        };
        heap.insert(0, length / ALIGNMENT * ALIGNMENT);
        heap
    }

    fn insert(&mut self, offset: u64, length: u64) {
        if length > 0 {
            self.by_offset.insert(offset, length);
            self.by_length.insert((length, offset));
        }
    }

    fn remove(&mut self, offset: u64, length: u64) {
        self.by_offset.remove(&offset);
        self.by_length.remove(&(length, offset));
    }

    /// Takes `bytes` out of the smallest range that holds them; `None` when no range does.
    pub fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let wanted = rounded(bytes)?;
        let &(length, offset) = self.by_length.range((wanted, 0)..).next()?;
        self.remove(offset, length);
        self.insert(offset + wanted, length - wanted);
        self.used += wanted;
        self.allocations += 1;
        Some(offset)
    }

    /// Gives back what [`Heap::allocate`] gave for `bytes`.
    ///
    /// Invariant: exactly that range is allocated; a range that is free already is an error of the
    /// program and stops it.
    pub fn free(&mut self, offset: u64, bytes: u64) {
        let mut length = rounded(bytes).unwrap_or(0);
        let mut offset = offset;
        self.used -= length;
        self.allocations -= 1;
        if let Some((&before, &size)) = self.by_offset.range(..offset).next_back() {
            assert!(before + size <= offset, "a range is given back once");
            if before + size == offset {
                self.remove(before, size);
                offset = before;
                length += size;
            }
        }
        if let Some((&after, &size)) = self.by_offset.range(offset..).next() {
            assert!(offset + length <= after, "a range is given back once");
            if offset + length == after {
                self.remove(after, size);
                length += size;
            }
        }
        assert!(offset + length <= self.length, "a range lies inside its segment");
        self.insert(offset, length);
    }

    /// Parts the first `front` bytes from an allocated range of `whole` bytes; the two are given back
    /// one by one. What is left of the range, 0 when the front is all of it.
    ///
    /// Invariant: `whole` is a multiple of [`ALIGNMENT`] and holds the front.
    pub fn split(&mut self, whole: u64, front: u64) -> u64 {
        let front = rounded(front).unwrap_or(u64::MAX);
        assert!(front <= whole && whole.is_multiple_of(ALIGNMENT), "a part lies inside the whole");
        self.allocations += u64::from(front < whole);
        whole - front
    }

    /// Whether nothing is allocated.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.allocations == 0
    }

    /// Ranges given out.
    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.allocations
    }

    /// Bytes allocated, rounding included.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used
    }

    /// The largest range that is free.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.by_length.last().map_or(0, |(length, _)| *length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_never_overlap_and_all_come_back(
            steps in proptest::collection::vec((any::<bool>(), 1_u64..5000, any::<usize>()), 1..300)
        ) {
            let mut heap = Heap::new(64 << 10);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (take, bytes, which) in steps {
                if take || held.is_empty() {
                    let largest = heap.largest();
                    match heap.allocate(bytes) {
                        Some(offset) => {
                            prop_assert_eq!(offset % ALIGNMENT, 0);
                            let end = offset + rounded(bytes).unwrap();
                            prop_assert!(end <= 64 << 10);
                            for (other, size) in &held {
                                let other_end = other + rounded(*size).unwrap();
                                prop_assert!(end <= *other || other_end <= offset);
                            }
                            held.push((offset, bytes));
                        }
                        None => prop_assert!(largest < rounded(bytes).unwrap()),
                    }
                } else {
                    let (offset, bytes) = held.swap_remove(which % held.len());
                    heap.free(offset, bytes);
                }
                let used: u64 = held.iter().map(|(_, bytes)| rounded(*bytes).unwrap()).sum();
                prop_assert_eq!(heap.used_bytes(), used);
            }
            for (offset, bytes) in held.drain(..) {
                heap.free(offset, bytes);
            }
            prop_assert!(heap.is_empty());
            prop_assert_eq!(heap.largest(), 64 << 10);
        }
    }

    #[test]
    fn a_range_that_was_split_comes_back_in_parts() {
        let mut heap = Heap::new(4096);
        let start = heap.allocate(1024).unwrap();
        assert_eq!(heap.split(1024, 100), 896);
        assert_eq!(heap.split(896, 896), 0);
        assert_eq!((heap.allocations(), heap.used_bytes()), (2, 1024));
        heap.free(start + 128, 896);
        assert_eq!((heap.allocations(), heap.used_bytes()), (1, 128));
        heap.free(start, 100);
        assert!(heap.is_empty());
        assert_eq!(heap.largest(), 4096);
    }

    #[test]
    fn the_smallest_range_that_fits_is_taken() {
        let mut heap = Heap::new(4096);
        let places: Vec<u64> = (0..4).map(|_| heap.allocate(1024).unwrap()).collect();
        heap.free(places[0], 1024);
        heap.free(places[2], 1024);
        let small = heap.allocate(64).unwrap();
        assert_eq!(small, places[0]);
        assert_eq!(heap.allocate(1024), Some(places[2]));
        assert_eq!(heap.allocate(1024), None);
    }

    #[test]
    #[should_panic(expected = "given back once")]
    fn giving_back_twice_is_an_error_of_the_program() {
        let mut heap = Heap::new(4096);
        let first = heap.allocate(64).unwrap();
        let _second = heap.allocate(64).unwrap();
        heap.free(first, 64);
        heap.free(first, 64);
    }
}
