//! Room for bodies in the area that the server granted: a ring of bytes, freed in order.

use std::collections::VecDeque;

/// Pieces are taken at the tail and freed at the head, as their messages are acknowledged.
#[derive(Clone, Debug)]
pub(crate) struct Area {
    capacity: u64,
    head: u64,
    used: u64,
    /// Bytes each piece holds, with what was skipped before it.
    pieces: VecDeque<u64>,
}

impl Area {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, head: 0, used: 0, pieces: VecDeque::new() }
    }

    /// The longest piece: one of this length always fits once the area is empty, and a second beside it.
    pub(crate) fn longest(&self) -> u64 {
        self.capacity / 2
    }

    /// Takes `length` bytes in one piece; `None`: wait, there is no room.
    pub(crate) fn take(&mut self, length: u64) -> Option<u64> {
        if self.used == 0 {
            self.head = 0;
        }
        let tail = (self.head + self.used) % self.capacity;
        let tail = if self.used == 0 { 0 } else { tail };
        let skipped = if tail + length > self.capacity { self.capacity - tail } else { 0 };
        if length > self.capacity || self.used + skipped + length > self.capacity {
            return None;
        }
        self.used += skipped + length;
        self.pieces.push_back(skipped + length);
        Some(if skipped > 0 { 0 } else { tail })
    }

    /// Frees the oldest piece.
    pub(crate) fn free_oldest(&mut self) {
        if let Some(length) = self.pieces.pop_front() {
            self.head = (self.head + length) % self.capacity;
            self.used -= length;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_never_overlap_and_an_empty_area_takes_the_longest(
            steps in prop::collection::vec((1_u64..70, any::<bool>()), 1..200),
        ) {
            let mut area = Area::new(100);
            let mut held: VecDeque<(u64, u64)> = VecDeque::new();
            for (length, frees) in steps {
                if frees {
                    held.pop_front();
                    area.free_oldest();
                    continue;
                }
                match area.take(length) {
                    Some(at) => {
                        prop_assert!(at + length <= 100);
                        for &(other, bytes) in &held {
                            prop_assert!(
                                at + length <= other || other + bytes <= at,
                                "{at}+{length} overlaps {other}+{bytes}"
                            );
                        }
                        held.push_back((at, length));
                    }
                    None => prop_assert!(!held.is_empty()),
                }
            }
        }
    }
}
