//! The hash table unit: pairs in buckets and blocks, found in about one access.
//!
//! ```text
//! | hash index: buckets of 64 B | dynamic area: blocks of the slab allocator, chained buckets |
//! ```
//!
//! A key's hash names its bucket and nine bits that tell pointer slots apart. A pair of at most
//! `inline_threshold` bytes lives in the bucket; a longer one in a block, behind two bytes that say
//! how long its key (7 bits) and value (9 bits) are, or four bytes (16 bits each) in blocks of 1024
//! bytes and more. A full bucket goes on in a block of 64 bytes.
//!
//! Cost, in accesses: an inline GET 1, an inline PUT 2, one more each for a pair in a block, one more
//! for each chained bucket that is passed.
//!
//! Invariants: a key occurs once in its chain; whatever fails changes nothing; a block is freed only
//! after the write that unlinks it.
//!
//! Source: spec/kv-direct.md 5.1.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::bucket::{BUCKET_BYTES, Bucket, INLINE_LIMIT, Item, POINTER_LIMIT, inline_slots};
use crate::memory::{Memory, UNIT_BYTES};
use crate::slab::{Class, LARGEST_BLOCK, SlabCache};

/// Longest key, bytes: what a packet's key length field can say.
pub const KEY_LIMIT: usize = 255;
/// Longest pair, key and value, bytes.
pub const PAIR_LIMIT: usize = LARGEST_BLOCK - LONG_HEADER;

const SHORT_HEADER: usize = 2;
const LONG_HEADER: usize = 4;
/// Blocks up to this class have the short header.
const SHORT_CLASSES: usize = 5;
/// Class of a chained bucket: 64 bytes.
const BUCKET_CLASS: usize = 1;
/// Units from one bucket of the index to the next.
const BUCKET_UNITS: u32 = (BUCKET_BYTES / UNIT_BYTES) as u32;

/// Why a pair was not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// No block is left; nothing was changed.
    #[error("the store's memory is full; delete pairs or give it more memory")]
    OutOfMemory,
    /// Nothing was changed.
    #[error("a pair of {length} bytes is longer than the limit of {limit}")]
    TooLong {
        /// Bytes of key and value.
        length: usize,
        /// Most bytes.
        limit: usize,
    },
    /// A key has 1 to 255 bytes; nothing was changed.
    #[error("a key of {length} bytes; keys have 1 to {KEY_LIMIT}")]
    Key {
        /// Bytes of the key.
        length: usize,
    },
}

/// Where a key's chain begins, and what tells it from others there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the bucket in the index.
    pub bucket: u32,
    /// Nine bits.
    pub secondary: u16,
}

/// What is fixed when a table is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableOptions {
    /// Share of memory that is the hash index, in thousandths, 1 to 999.
    pub index_permille: u32,
    /// Longest pair that is kept in its bucket, bytes, 0 to 50.
    pub inline_threshold: usize,
    /// Seed of the hash; a secret where clients are hostile.
    pub seed: u64,
}

impl Default for TableOptions {
    fn default() -> Self {
        Self { index_permille: 500, inline_threshold: 25, seed: 0 }
    }
}

/// What a table holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableCounters {
    /// Pairs stored.
    pub pairs: u64,
    /// Bytes of their keys and values.
    pub pair_bytes: u64,
    /// Chained buckets in use.
    pub chained_buckets: u64,
    /// Blocks that were read because the secondary hash agreed, and held another key.
    pub false_reads: u64,
}

/// Where a pair of these lengths goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    Inline,
    Block(Class),
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Table<M> {
    memory: M,
    slabs: SlabCache,
    buckets: u32,
    options: TableOptions,
    counters: TableCounters,
    /// A value of a block while it changes: what is not changed to the end is not written.
    scratch: Vec<u8>,
}

/// Units of the index and of all memory: the dynamic area begins behind the index, at a multiple of
/// the largest block.
#[must_use]
pub fn layout(length_bytes: u64, index_permille: u32) -> (u32, u32) {
    let units = (length_bytes / UNIT_BYTES as u64).min(u64::from(POINTER_LIMIT)) as u32;
    let largest = (LARGEST_BLOCK / UNIT_BYTES) as u32;
    let index = (u64::from(units) * u64::from(index_permille.clamp(1, 999)) / 1000) as u32;
    let index = index.next_multiple_of(largest).clamp(largest, units.max(largest));
    (index, units)
}

struct Found {
    unit: u32,
    before: Option<u32>,
    bucket: Bucket,
    item: Item,
}

impl<M: Memory> Table<M> {
    /// An empty table over zeroed memory. `slabs` owns the units behind the index
    /// ([`layout`]).
    #[must_use]
    pub fn new(memory: M, slabs: SlabCache, options: TableOptions) -> Self {
        let (index, _) = layout(memory.length_bytes(), options.index_permille);
        let options = TableOptions {
            inline_threshold: options.inline_threshold.min(INLINE_LIMIT),
            ..options
        };
        let buckets = index / BUCKET_UNITS;
        let counters = TableCounters::default();
        Self { memory, slabs, buckets, options, counters, scratch: Vec::new() }
    }

    /// As [`Table::new`] with an index of `buckets` buckets, for tests that want chains.
    #[doc(hidden)]
    #[must_use]
    pub fn with_buckets(mut self, buckets: u32) -> Self {
        self.buckets = buckets.clamp(1, self.buckets);
        self
    }

    /// The memory.
    pub fn memory(&mut self) -> &mut M {
        &mut self.memory
    }

    /// The allocator.
    #[must_use]
    pub fn slabs(&self) -> &SlabCache {
        &self.slabs
    }

    /// What it holds.
    #[must_use]
    pub fn counters(&self) -> TableCounters {
        self.counters
    }

    /// Buckets of the index.
    #[must_use]
    pub fn buckets(&self) -> u32 {
        self.buckets
    }

    /// Bytes of keys and values over bytes of memory.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people and figures")]
    pub fn utilisation(&self) -> f64 {
        self.counters.pair_bytes as f64 / self.memory.length_bytes() as f64
    }

    /// Where `key` belongs.
    #[must_use]
    #[inline]
    pub fn place(&self, key: &[u8]) -> Place {
        let hash = xxh3_64_with_seed(key, self.options.seed);
        // The high bits choose the bucket, nine low bits are the secondary hash.
        let bucket = ((u128::from(hash) * u128::from(self.buckets)) >> 64) as u32;
        Place { bucket, secondary: hash as u16 & 0x1ff }
    }

    /// Asks for the line of a key's bucket ahead of its use.
    #[inline]
    pub fn expect(&self, place: Place) {
        self.memory.expect(place.bucket * BUCKET_UNITS);
    }

    fn storage(&self, key: usize, value: usize) -> Result<Storage, TableError> {
        if key == 0 || key > KEY_LIMIT {
            return Err(TableError::Key { length: key });
        }
        let length = key + value;
        if length <= self.options.inline_threshold {
            return Ok(Storage::Inline);
        }
        if key < 1 << 7
            && value < 1 << 9
            && let Some(class) = Class::holding(length + SHORT_HEADER)
            && class.index() < SHORT_CLASSES
        {
            return Ok(Storage::Block(class));
        }
        let long = Class::holding(length + LONG_HEADER)
            .map(|class| class.max(Class::new(SHORT_CLASSES)))
            .ok_or(TableError::TooLong { length, limit: PAIR_LIMIT })?;
        Ok(Storage::Block(long))
    }

    /// Key and value of a block.
    #[inline]
    fn split(block: &[u8], class: Class) -> (&[u8], &[u8]) {
        let (header, key, value) = if class.index() < SHORT_CLASSES {
            let word = u16::from_le_bytes([block[0], block[1]]);
            (SHORT_HEADER, usize::from(word & 0x7f), usize::from(word >> 7))
        } else {
            let key = u16::from_le_bytes([block[0], block[1]]);
            let value = u16::from_le_bytes([block[2], block[3]]);
            (LONG_HEADER, usize::from(key), usize::from(value))
        };
        block[header..header + key + value].split_at(key)
    }

    fn write_pair(&mut self, unit: u32, class: Class, key: &[u8], value: &[u8]) {
        if class.index() < SHORT_CLASSES {
            let word = key.len() as u16 | (value.len() as u16) << 7;
            self.memory.write_block(unit, &[&word.to_le_bytes(), key, value]);
        } else {
            let word = key.len() as u32 | (value.len() as u32) << 16;
            self.memory.write_block(unit, &[&word.to_le_bytes(), key, value]);
        }
    }

    /// The item of `key` in a bucket that was read; reads the blocks whose secondary hash agrees.
    #[inline]
    fn search(&mut self, bucket: &Bucket, secondary: u16, key: &[u8]) -> Option<Item> {
        for item in bucket.items() {
            match item {
                Item::Inline { slot, key_length, value_length, .. } => {
                    if key_length == key.len()
                        && bucket.inline(slot, key_length, value_length).0 == key
                    {
                        return Some(item);
                    }
                }
                Item::Pointer { secondary: other, class, pointer, .. } if other == secondary => {
                    let Some(class) = Class::of_slot(class) else { continue };
                    let block = self.memory.block(pointer, class.bytes());
                    if Self::split(block, class).0 == key {
                        return Some(item);
                    }
                    self.counters.false_reads += 1;
                }
                Item::Pointer { .. } => {}
            }
        }
        None
    }

    #[inline]
    fn find(&mut self, place: Place, key: &[u8]) -> Option<Found> {
        let (mut unit, mut before) = (place.bucket * BUCKET_UNITS, None);
        loop {
            let bucket = self.memory.bucket(unit);
            if let Some(item) = self.search(&bucket, place.secondary, key) {
                return Some(Found { unit, before, bucket, item });
            }
            before = Some(unit);
            unit = bucket.next()?;
        }
    }

    /// Lends the value of `key`, at `place`, to `reader`.
    #[inline]
    pub fn get<R>(
        &mut self,
        place: Place,
        key: &[u8],
        reader: impl FnOnce(&[u8]) -> R,
    ) -> Option<R> {
        let found = self.find(place, key)?;
        Some(match found.item {
            Item::Inline { slot, key_length, value_length, .. } => {
                reader(found.bucket.inline(slot, key_length, value_length).1)
            }
            Item::Pointer { class, pointer, .. } => {
                let class = Class::of_slot(class)?;
                // The search has just read it: the same access.
                let block = self.memory.block_again(pointer, class.bytes());
                reader(Self::split(block, class).1)
            }
        })
    }

    /// Changes the value of `key` in place, its length kept; `None` where the key is absent. Nothing
    /// is written where `change` says false.
    pub fn modify<R>(
        &mut self,
        place: Place,
        key: &[u8],
        change: impl FnOnce(&mut [u8]) -> (R, bool),
    ) -> Option<R> {
        let mut found = self.find(place, key)?;
        match found.item {
            Item::Inline { slot, key_length, value_length, .. } => {
                let value = found.bucket.inline_value_mut(slot, key_length, value_length);
                let (result, changed) = change(value);
                if changed {
                    self.memory.write_bucket(found.unit, &found.bucket);
                }
                Some(result)
            }
            Item::Pointer { class, pointer, .. } => {
                let class = Class::of_slot(class)?;
                let block = self.memory.block_again(pointer, class.bytes());
                let mut value = std::mem::take(&mut self.scratch);
                value.clear();
                value.extend_from_slice(Self::split(block, class).1);
                let (result, changed) = change(&mut value);
                if changed {
                    self.write_pair(pointer, class, key, &value);
                }
                self.scratch = value;
                Some(result)
            }
        }
    }

    /// Whether a value of `new` bytes takes the place of one of `old` bytes without a new block or
    /// more slots, so that its write cannot fail: for values held back in the reservation station.
    ///
    /// Errors: as [`Table::put`].
    pub fn keeps_its_place(&self, key: usize, old: usize, new: usize) -> Result<bool, TableError> {
        let (before, after) = (self.storage(key, old)?, self.storage(key, new)?);
        Ok(before == after
            && (before != Storage::Inline || inline_slots(key + old) == inline_slots(key + new)))
    }

    /// Stores a pair; true where the key was there before.
    ///
    /// Errors: [`TableError`]; nothing was changed.
    pub fn put(&mut self, place: Place, key: &[u8], value: &[u8]) -> Result<bool, TableError> {
        let storage = self.storage(key.len(), value.len())?;
        let needed = match storage {
            Storage::Inline => inline_slots(key.len() + value.len()),
            Storage::Block(_) => 1,
        };
        let (mut unit, mut before) = (place.bucket * BUCKET_UNITS, None);
        let mut room: Option<(u32, Bucket)> = None;
        let mut old: Option<Found> = None;
        let last = loop {
            let bucket = self.memory.bucket(unit);
            if old.is_none()
                && let Some(item) = self.search(&bucket, place.secondary, key)
            {
                if self.overwrite(unit, &bucket, &item, storage, key, value) {
                    return Ok(true);
                }
                old = Some(Found { unit, before, bucket, item });
                let mut without = bucket;
                without.remove(&item);
                if without.free() >= needed {
                    break (unit, bucket);
                }
            } else if room.is_none() && bucket.free() >= needed {
                room = Some((unit, bucket));
            }
            match bucket.next() {
                Some(next) => (before, unit) = (Some(unit), next),
                None => break (unit, bucket),
            }
        };
        let block = match storage {
            Storage::Inline => None,
            Storage::Block(class) => {
                let unit = self.slabs.allocate(class).ok_or(TableError::OutOfMemory)?;
                self.write_pair(unit, class, key, value);
                Some((unit, class))
            }
        };
        let push = |bucket: &mut Bucket| match block {
            None => bucket.push_inline(key, value),
            Some((unit, class)) => bucket.push_pointer(place.secondary, class.slot_type(), unit),
        };
        if let Some(found) = &old {
            let mut without = found.bucket;
            without.remove(&found.item);
            if without.free() >= needed {
                push(&mut without);
                self.memory.write_bucket(found.unit, &without);
                self.forget(found, key, value.len());
                return Ok(true);
            }
        }
        if let Some((unit, mut bucket)) = room {
            push(&mut bucket);
            self.memory.write_bucket(unit, &bucket);
        } else {
            let Some(chained) = self.slabs.allocate(Class::new(BUCKET_CLASS)) else {
                if let Some((unit, class)) = block {
                    self.slabs.free(unit, class);
                }
                return Err(TableError::OutOfMemory);
            };
            let mut bucket = Bucket::EMPTY;
            push(&mut bucket);
            self.memory.write_bucket(chained, &bucket);
            let (unit, mut bucket) = last;
            bucket.set_next(Some(chained));
            self.memory.write_bucket(unit, &bucket);
            self.counters.chained_buckets += 1;
        }
        match old {
            Some(found) => {
                self.unlink(&found);
                self.forget(&found, key, value.len());
                Ok(true)
            }
            None => {
                self.counters.pairs += 1;
                self.counters.pair_bytes += (key.len() + value.len()) as u64;
                Ok(false)
            }
        }
    }

    /// Puts the new value where the old one is, if it is stored the same way.
    fn overwrite(
        &mut self,
        unit: u32,
        bucket: &Bucket,
        item: &Item,
        storage: Storage,
        key: &[u8],
        value: &[u8],
    ) -> bool {
        match (*item, storage) {
            (Item::Inline { slot, slots, key_length, value_length }, Storage::Inline)
                if slots == inline_slots(key.len() + value.len()) =>
            {
                let mut bucket = *bucket;
                if value_length == value.len() {
                    bucket.inline_value_mut(slot, key_length, value_length).copy_from_slice(value);
                } else {
                    bucket.remove(item);
                    bucket.push_inline(key, value);
                }
                self.memory.write_bucket(unit, &bucket);
                self.resized(value_length, value.len());
                true
            }
            (Item::Pointer { class, pointer, .. }, Storage::Block(new))
                if Class::of_slot(class) == Some(new) =>
            {
                let block = self.memory.block_again(pointer, new.bytes());
                let old = Self::split(block, new).1.len();
                self.write_pair(pointer, new, key, value);
                self.resized(old, value.len());
                true
            }
            _ => false,
        }
    }

    fn resized(&mut self, old: usize, new: usize) {
        self.counters.pair_bytes = self.counters.pair_bytes - old as u64 + new as u64;
    }

    /// The pair that `found` was is stored elsewhere now, or gone: its block is freed.
    fn forget(&mut self, found: &Found, key: &[u8], new_value: usize) {
        match found.item {
            Item::Inline { value_length, .. } => self.resized(value_length, new_value),
            Item::Pointer { class, pointer, .. } => {
                let Some(class) = Class::of_slot(class) else { return };
                let block = self.memory.block_again(pointer, class.bytes());
                let old = Self::split(block, class).1.len();
                debug_assert_eq!(Self::split(block, class).0, key, "the block is the key's");
                self.resized(old, new_value);
                self.slabs.free(pointer, class);
            }
        }
    }

    /// Takes an item out of its bucket, and the bucket out of its chain where it was the last.
    fn unlink(&mut self, found: &Found) {
        // Read again: the chain may have grown at this bucket since it was found.
        let mut bucket = self.memory.bucket(found.unit);
        bucket.remove(&found.item);
        match found.before {
            Some(before) if bucket.used() == 0 => {
                let mut previous = self.memory.bucket(before);
                previous.set_next(bucket.next());
                self.memory.write_bucket(before, &previous);
                self.slabs.free(found.unit, Class::new(BUCKET_CLASS));
                self.counters.chained_buckets -= 1;
            }
            _ => self.memory.write_bucket(found.unit, &bucket),
        }
    }

    /// Deletes a key; whether it was there.
    pub fn delete(&mut self, place: Place, key: &[u8]) -> bool {
        let Some(found) = self.find(place, key) else { return false };
        self.unlink(&found);
        self.forget(&found, key, 0);
        self.counters.pairs -= 1;
        self.counters.pair_bytes -= key.len() as u64;
        true
    }

    /// Visits the pairs of `count` buckets of the index from bucket `from` on, chains included, and
    /// returns the bucket to go on with; `None` at the end. Pairs that are put or deleted meanwhile
    /// may be met or not.
    pub fn scan(
        &mut self,
        from: u32,
        count: u32,
        mut visit: impl FnMut(&[u8], &[u8]),
    ) -> Option<u32> {
        let end = from.saturating_add(count.max(1)).min(self.buckets);
        for bucket in from..end {
            let mut unit = Some(bucket * BUCKET_UNITS);
            while let Some(at) = unit {
                let bucket = self.memory.bucket(at);
                for item in bucket.items() {
                    match item {
                        Item::Inline { slot, key_length, value_length, .. } => {
                            let (key, value) = bucket.inline(slot, key_length, value_length);
                            visit(key, value);
                        }
                        Item::Pointer { class, pointer, .. } => {
                            let Some(class) = Class::of_slot(class) else { continue };
                            let block = self.memory.block(pointer, class.bytes());
                            let (key, value) = Self::split(block, class);
                            visit(key, value);
                        }
                    }
                }
                unit = bucket.next();
            }
        }
        (end < self.buckets).then_some(end)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::memory::{HostMemory, Traced};
    use crate::slab::SlabPools;

    fn table(bytes: u64, options: TableOptions) -> Table<Traced<HostMemory>> {
        let (first, end) = layout(bytes, options.index_permille);
        let slabs = SlabCache::new(Arc::new(SlabPools::new(first, end)), false);
        Table::new(Traced::counting(HostMemory::new(bytes).unwrap()), slabs, options)
    }

    fn get(table: &mut Table<Traced<HostMemory>>, key: &[u8]) -> Option<Vec<u8>> {
        table.get(table.place(key), key, <[u8]>::to_vec)
    }

    fn put(table: &mut Table<Traced<HostMemory>>, key: &[u8], value: &[u8]) -> bool {
        table.put(table.place(key), key, value).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn a_table_behaves_as_a_map(
            buckets in 1_u32..8,
            threshold in 0_usize..=50,
            steps in proptest::collection::vec((0_u8..4, 0_u8..40, 0_usize..700), 1..400),
        ) {
            let options = TableOptions { inline_threshold: threshold, ..TableOptions::default() };
            let mut table = table(8 << 20, options).with_buckets(buckets);
            let mut model: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
            for (step, name, length) in steps {
                let key = vec![name; usize::from(name) * 5 + 1];
                let value = vec![name ^ length as u8; if step == 0 { length % 12 } else { length }];
                let place = table.place(&key);
                match step {
                    0 | 1 => {
                        let existed = put(&mut table, &key, &value);
                        prop_assert_eq!(existed, model.insert(key, value).is_some());
                    }
                    2 => prop_assert_eq!(table.delete(place, &key), model.remove(&key).is_some()),
                    _ => {
                        let changed = table.modify(place, &key, |value| {
                            value.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
                            ((), true)
                        });
                        let known = model.get_mut(&key).map(|value| {
                            value.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
                        });
                        prop_assert_eq!(changed, known);
                    }
                }
            }
            for (key, value) in &model {
                let held = get(&mut table, key);
                prop_assert_eq!(held.as_ref(), Some(value));
            }
            let mut met = HashMap::new();
            let mut from = Some(0);
            while let Some(bucket) = from {
                from = table.scan(bucket, 3, |key, value| {
                    met.insert(key.to_vec(), value.to_vec());
                });
            }
            prop_assert_eq!(&met, &model);
            let counters = table.counters();
            prop_assert_eq!(counters.pairs, model.len() as u64);
            let bytes: usize = model.iter().map(|(key, value)| key.len() + value.len()).sum();
            prop_assert_eq!(counters.pair_bytes, bytes as u64);
            for key in model.keys() {
                prop_assert!(table.delete(table.place(key), key));
            }
            prop_assert_eq!(table.slabs().counters().allocated_bytes, 0, "nothing leaks");
            prop_assert_eq!(table.counters().chained_buckets, 0);
        }
    }

    #[test]
    fn one_bucket_holds_a_thousand_keys_by_chaining_and_leaks_nothing() {
        let mut table = table(4 << 20, TableOptions::default()).with_buckets(1);
        for i in 0..1000_u32 {
            assert!(!put(&mut table, &i.to_le_bytes(), &[i as u8; 40]));
        }
        assert!(table.counters().chained_buckets >= 99);
        for i in 0..1000_u32 {
            assert_eq!(get(&mut table, &i.to_le_bytes()).unwrap(), [i as u8; 40]);
        }
        for i in 0..1000_u32 {
            assert!(table.delete(table.place(&i.to_le_bytes()), &i.to_le_bytes()));
        }
        assert_eq!(table.counters().chained_buckets, 0);
        assert_eq!(table.slabs().counters().allocated_bytes, 0);
    }

    #[test]
    fn growing_and_shrinking_one_key_gives_every_block_back() {
        let mut table = table(8 << 20, TableOptions::default());
        for length in (0..1900).chain((0..1900).rev()) {
            put(&mut table, b"key", &vec![7; length]);
            assert_eq!(get(&mut table, b"key").unwrap().len(), length);
        }
        put(&mut table, b"key", b"");
        assert_eq!(table.slabs().counters().allocated_bytes, 0);
    }

    #[test]
    fn full_memory_refuses_new_pairs_and_keeps_the_old_ones() {
        let mut table = table(4 << 20, TableOptions::default());
        let mut stored = Vec::new();
        for i in 0_u32.. {
            let key = i.to_le_bytes();
            match table.put(table.place(&key), &key, &[i as u8; 300]) {
                Ok(_) => stored.push(i),
                Err(error) => {
                    assert_eq!(error, TableError::OutOfMemory);
                    break;
                }
            }
        }
        assert!(stored.len() > 100);
        // A value that outgrows its block is refused, and the old one stays.
        let key = stored[0].to_le_bytes();
        let refused = table.put(table.place(&key), &key, &[1; 1000]);
        assert_eq!(refused, Err(TableError::OutOfMemory));
        for i in stored {
            assert_eq!(get(&mut table, &i.to_le_bytes()).unwrap(), [i as u8; 300]);
        }
    }

    #[test]
    fn limits_are_refused_by_name() {
        let mut table = table(1 << 20, TableOptions::default());
        let place = table.place(b"");
        assert_eq!(table.put(place, b"", b"v"), Err(TableError::Key { length: 0 }));
        let long = [1; 256];
        assert_eq!(table.put(place, &long, b"v"), Err(TableError::Key { length: 256 }));
        let length = PAIR_LIMIT + 1;
        let refused = table.put(place, b"k", &vec![0; PAIR_LIMIT]);
        assert_eq!(refused, Err(TableError::TooLong { length, limit: PAIR_LIMIT }));
        let key = [9; 255];
        let place = table.place(&key);
        table.put(place, &key, &vec![0; PAIR_LIMIT - 255]).unwrap();
    }

    #[test]
    fn the_secondary_hash_filters_all_but_one_block_in_512() {
        let options = TableOptions { inline_threshold: 0, ..TableOptions::default() };
        let mut table = table(64 << 20, options).with_buckets(2000);
        for i in 0..40_000_u64 {
            put(&mut table, &i.to_le_bytes(), &[0; 40]);
        }
        let before = table.counters().false_reads;
        let mut slots_passed = 0;
        for i in 1_000_000..1_040_000_u64 {
            assert_eq!(get(&mut table, &i.to_le_bytes()), None);
            slots_passed += 20;
        }
        let reads = table.counters().false_reads - before;
        let expected = slots_passed / 512;
        assert!(
            (expected * 7 / 10..expected * 13 / 10).contains(&reads),
            "{reads} blocks read in vain where {expected} are expected"
        );
    }

    #[test]
    fn an_inline_get_costs_about_one_access_and_a_put_about_two_at_half_utilisation() {
        // The source's model of this layout: 1.10 accesses for pairs of 10 bytes.
        let options =
            TableOptions { index_permille: 800, inline_threshold: 10, ..TableOptions::default() };
        let bytes = 32_u64 << 20;
        let mut table = table(bytes, options);
        let pairs = bytes / 2 / 10;
        for i in 0..pairs {
            put(&mut table, &(i as u32).to_le_bytes(), &[1; 6]);
        }
        assert!((0.49..0.51).contains(&table.utilisation()));
        let (reads, writes) = (table.memory().reads, table.memory().writes);
        for i in 0..pairs {
            assert!(get(&mut table, &(i as u32).to_le_bytes()).is_some());
        }
        let per_get = (table.memory().reads - reads) as f64 / pairs as f64;
        assert_eq!(table.memory().writes, writes);
        assert!((0.99..1.21).contains(&per_get), "{per_get} accesses a GET");
        let before = table.memory().reads + table.memory().writes;
        for i in 0..pairs {
            assert!(put(&mut table, &(i as u32).to_le_bytes(), &[2; 6]));
        }
        let per_put = (table.memory().reads + table.memory().writes - before) as f64 / pairs as f64;
        assert!((1.99..2.21).contains(&per_put), "{per_put} accesses a PUT");
    }

    #[test]
    fn a_pair_in_a_block_costs_one_access_more() {
        let options = TableOptions { index_permille: 500, ..TableOptions::default() };
        let mut table = table(8 << 20, options);
        let pairs = 20_000_u32;
        for i in 0..pairs {
            put(&mut table, &i.to_le_bytes(), &[1; 58]);
        }
        let before = table.memory().reads;
        for i in 0..pairs {
            get(&mut table, &i.to_le_bytes());
        }
        let per_get = f64::from((table.memory().reads - before) as u32) / f64::from(pairs);
        assert!((1.99..2.2).contains(&per_get), "{per_get}");
        let before = table.memory().reads + table.memory().writes;
        for i in 0..pairs {
            put(&mut table, &i.to_le_bytes(), &[2; 58]);
        }
        let after = table.memory().reads + table.memory().writes;
        let per_put = f64::from((after - before) as u32) / f64::from(pairs);
        assert!((2.99..3.2).contains(&per_put), "{per_put}");
    }
}
