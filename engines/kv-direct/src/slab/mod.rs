//! The slab allocator of the dynamic area: half in the processor, half in a daemon.
//!
//! ```text
//!  processor's stack                        shared stack of a class
//!  [left: alloc pops, free pushes | right] <--batches--> [left | right: daemon]
//! ```
//!
//! The processor allocates and frees at the left end of its own stacks and touches shared memory once
//! in a batch of entries ([`cache`]). The daemon keeps each class supplied: it moves entries from a
//! larger class to a smaller one as they are ([`daemon`]), and joins free neighbours only when no
//! larger class has any ([`merge`]).
//!
//! An entry says how large its block really is, so an entry in the pool of a class may describe a
//! larger block; the processor carves it when it gets there.
//!
//! Invariants: a block of 2^n bytes lies at a multiple of 2^n; each end of a shared stack has one
//! user; entries are placed before the end that covers them is published.
//!
//! Source: spec/kv-direct.md 5.2.

pub mod cache;
pub mod daemon;
pub mod merge;
pub mod stack;

pub use cache::{SlabCache, SlabCounters};
pub use daemon::{SlabDaemon, SlabPools};
pub use stack::SharedStack;

use crate::memory::UNIT_BYTES;

/// Size classes: 32, 64, 128, 256, 512, 1024 and 2048 bytes.
pub const CLASSES: usize = 7;
/// Bytes of the largest block.
pub const LARGEST_BLOCK: usize = UNIT_BYTES << (CLASSES - 1);
/// Entries moved at once between the processor and a shared stack: what 64 bytes hold.
pub const BATCH: usize = 64 / Entry::BYTES;

/// A size class, 0 to 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class(u8);

impl Class {
    /// All of them, the smallest first.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> {
        (0..CLASSES as u8).map(Self)
    }

    /// The class of this number.
    ///
    /// Invariant: `index` is below [`CLASSES`]; that is asserted.
    #[must_use]
    pub fn new(index: usize) -> Self {
        assert!(index < CLASSES, "there are {CLASSES} size classes");
        Self(index as u8)
    }

    /// The smallest class whose blocks hold `bytes`; `None` past the largest.
    #[must_use]
    #[inline]
    pub fn holding(bytes: usize) -> Option<Self> {
        let size = bytes.max(UNIT_BYTES).next_power_of_two();
        let class = size.trailing_zeros() - UNIT_BYTES.trailing_zeros();
        ((class as usize) < CLASSES).then_some(Self(class as u8))
    }

    /// As a bucket's slot says it, from 1.
    #[must_use]
    pub fn slot_type(self) -> u8 {
        self.0 + 1
    }

    /// From a bucket's slot; `None` for 0, an empty slot.
    #[must_use]
    #[inline]
    pub fn of_slot(slot_type: u8) -> Option<Self> {
        (1..=CLASSES as u8).contains(&slot_type).then(|| Self(slot_type - 1))
    }

    /// Its number.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Units of 32 bytes in a block.
    #[must_use]
    pub fn units(self) -> u32 {
        1 << self.0
    }

    /// Bytes of a block.
    #[must_use]
    pub fn bytes(self) -> usize {
        UNIT_BYTES << self.0
    }
}

/// A free block: 31 bits of address and 3 bits of class, in 5 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry {
    /// Where it begins, in units of 32 bytes.
    pub unit: u32,
    /// How large it really is.
    pub class: Class,
}

impl Entry {
    /// Bytes of the encoded entry.
    pub const BYTES: usize = 5;

    /// The low 34 bits of a word.
    #[must_use]
    #[inline]
    pub fn encode(self) -> u64 {
        u64::from(self.unit & crate::bucket::POINTER_LIMIT) | (self.class.0 as u64) << 31
    }

    /// From the low 34 bits of a word.
    ///
    /// Invariant: the word was made by [`Entry::encode`]; that is asserted.
    #[must_use]
    #[inline]
    pub fn decode(word: u64) -> Self {
        let unit = word as u32 & crate::bucket::POINTER_LIMIT;
        Self { unit, class: Class::new((word >> 31 & 7) as usize) }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_round_up_to_powers_of_two() {
        assert_eq!(Class::holding(0).map(Class::bytes), Some(32));
        assert_eq!(Class::holding(33).map(Class::bytes), Some(64));
        assert_eq!(Class::holding(512).map(Class::bytes), Some(512));
        assert_eq!(Class::holding(2048).map(Class::bytes), Some(2048));
        assert_eq!(Class::holding(2049), None);
    }

    #[test]
    fn an_entry_keeps_its_address_and_class() {
        for class in Class::all() {
            for unit in [0, 1, 12_345, crate::bucket::POINTER_LIMIT] {
                let entry = Entry { unit, class };
                assert!(entry.encode() < 1 << 34);
                assert_eq!(Entry::decode(entry.encode()), entry);
            }
        }
    }
}
