//! What is known of each row beside its head: how many fields it has, and when one changed last.
//!
//! Counted as the keys of fields come into the order of their namespace and leave it, and once over
//! all of them at an opening. So a field is one entry: nothing else has to be written to keep the
//! length right, also after a crash. A row of this map is a generation: its head may have ended
//! already, and then it counts what upkeep has not removed yet.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::Version;
use crate::ordered::{Keys, Ordered};
use crate::rows::generation_of;

/// Fields of one generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fields {
    /// Keys in order.
    pub count: u64,
    /// Version of the entry that changed one of them last, as far as that was since the opening; what
    /// was before is told by the head's version.
    pub changed: Version,
}

/// Spreads generations: they are versions of the store, so nobody can aim at a place.
#[derive(Debug, Default)]
pub(crate) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, word: u64) {
        let mixed = (self.0 ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

/// The rows of one namespace of fields, by generation.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    rows: HashMap<u64, Fields, BuildHasherDefault<Spread>>,
    /// The row that changed last, which is not in the map: requests stay with one. None where it has no field.
    last: (u64, Fields),
}

impl Counted {
    /// Of the keys in order: what an opening finds.
    pub fn of(ordered: &Ordered) -> Self {
        const CHUNK: usize = 1024;
        let mut counted = Self::default();
        let mut keys = Keys::default();
        let mut from = std::ops::Bound::Unbounded;
        loop {
            let bounds = (from.as_ref().map(Vec::as_slice), std::ops::Bound::Unbounded);
            ordered.collect(bounds, false, CHUNK, &mut keys);
            for generation in (0..keys.len()).filter_map(|at| generation_of(keys.get(at))) {
                counted.came(generation, 0);
            }
            if keys.len() < CHUNK {
                return counted;
            }
            from = std::ops::Bound::Excluded(keys.get(keys.len() - 1).to_vec());
        }
    }

    /// What is counted of a generation.
    #[inline]
    pub fn get(&self, generation: u64) -> Fields {
        if self.last.0 == generation {
            return self.last.1;
        }
        self.rows.get(&generation).copied().unwrap_or_default()
    }

    /// What is counted of a generation, to change it.
    #[inline]
    fn row(&mut self, generation: u64) -> &mut Fields {
        if self.last.0 != generation {
            self.take_out(generation);
        }
        &mut self.last.1
    }

    #[cold]
    fn take_out(&mut self, generation: u64) {
        let fields = self.rows.remove(&generation).unwrap_or_default();
        let (before, counted) = std::mem::replace(&mut self.last, (generation, fields));
        if counted.count > 0 {
            self.rows.insert(before, counted);
        }
    }

    /// A field of this generation came into the order.
    pub fn came(&mut self, generation: u64, version: Version) {
        let fields = self.row(generation);
        fields.count += 1;
        fields.changed = fields.changed.max(version);
    }

    /// A field that is in the order has another value.
    #[inline]
    pub fn changed(&mut self, generation: u64, version: Version) {
        let fields = self.row(generation);
        fields.changed = fields.changed.max(version);
    }

    /// A field left the order.
    pub fn left(&mut self, generation: u64, version: Version) {
        let fields = self.row(generation);
        fields.count = fields.count.saturating_sub(1);
        fields.changed = fields.changed.max(version);
        if fields.count == 0 {
            *fields = Fields::default();
        }
    }

    /// Bytes of memory, as an estimate of the map's.
    pub fn memory_bytes(&self) -> u64 {
        (self.rows.capacity() * (size_of::<(u64, Fields)>() + 1)) as u64
    }

    /// Generations whose counts differ, and both counts.
    pub fn differences(&self, other: &Self) -> Vec<(u64, u64, u64)> {
        let known = [self, other].into_iter();
        let mut generations: Vec<u64> = known
            .flat_map(|counted| counted.rows.keys().copied().chain([counted.last.0]))
            .collect();
        generations.sort_unstable();
        generations.dedup();
        let both = |row: u64| (row, self.get(row).count, other.get(row).count);
        generations.into_iter().map(both).filter(|(_, mine, theirs)| mine != theirs).collect()
    }
}
