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

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::bucket::{
    BUCKET_BYTES, Bucket, INLINE_LIMIT, Item, POINTER_LIMIT, SLOT_BYTES, inline_slots, same,
    value_range,
};
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
    /// What [`Table::look_ahead`] saw in the first bucket: the slot of the first item that is the key or whose
    /// block may be; [`NO_ITEM`], or [`UNSEEN`] before.
    seen: u8,
    /// Where the value lies in the first bucket, and how long it is, if the item that was seen is an inline
    /// pair; 0 and 0 otherwise.
    value: (u8, u8),
}

const NO_ITEM: u8 = 0xfe;
const UNSEEN: u8 = 0xff;

impl Place {
    /// Of an operation that has none.
    pub(crate) const NOWHERE: Self = Self { bucket: 0, secondary: 0, seen: UNSEEN, value: (0, 0) };

    /// The same, as if its bucket had not been seen: for after a change of the bucket.
    #[must_use]
    #[inline]
    pub(crate) fn unseen(self) -> Self {
        Self { seen: UNSEEN, value: (0, 0), ..self }
    }

    /// Where the value lies in the bucket that was looked into, if it is there.
    #[inline(always)]
    fn inline_value(self) -> Option<Range<usize>> {
        let (at, length) = (usize::from(self.value.0), usize::from(self.value.1));
        // A key has a byte at least, so no value begins at 0.
        (at > 0).then_some(at..at + length)
    }
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

/// Copies between slices of one length, for the length that most values have without a call.
#[inline(always)]
fn copy_short(target: &mut [u8], source: &[u8]) {
    match (<&mut [u8; 8]>::try_from(&mut *target), <&[u8; 8]>::try_from(source)) {
        (Ok(target), Ok(source)) => *target = *source,
        _ => target.copy_from_slice(source),
    }
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
        Self { memory, slabs, buckets, options, counters }
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
        Place { bucket, secondary: hash as u16 & 0x1ff, ..Place::NOWHERE }
    }

    /// Asks for the line of a key's bucket ahead of its use.
    #[inline]
    pub fn expect(&self, place: Place) {
        self.memory.expect(place.bucket * BUCKET_UNITS, BUCKET_BYTES);
    }

    /// Looks into a key's bucket, and asks for what is read after it where the pair is not in there: its block,
    /// or the next bucket. The place it returns is good until the bucket changes.
    #[must_use]
    #[inline]
    pub fn look_ahead(&self, place: Place, key: &[u8]) -> Place {
        let bucket = self.memory.peek(place.bucket * BUCKET_UNITS);
        let item = bucket.candidate(0, place.secondary, key);
        let mut value = (0, 0);
        match item {
            Some(Item::Inline { slot, key_length, value_length, .. }) => {
                value = ((slot * SLOT_BYTES + key_length) as u8, value_length as u8);
            }
            Some(Item::Pointer { class, pointer, .. }) => {
                if let Some(class) = Class::of_slot(class) {
                    self.memory.expect(pointer, class.bytes());
                }
            }
            None => {
                if let Some(next) = bucket.next() {
                    self.memory.expect(next, BUCKET_BYTES);
                }
            }
        }
        Place { seen: item.map_or(NO_ITEM, |item| item.slot() as u8), value, ..place }
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

    /// Lengths of the header, the key and the value of a block.
    #[inline(always)]
    fn lengths(block: &[u8], class: Class) -> (usize, usize, usize) {
        if class.index() < SHORT_CLASSES {
            let word = u16::from_le_bytes([block[0], block[1]]);
            return (SHORT_HEADER, usize::from(word & 0x7f), usize::from(word >> 7));
        }
        let key = u16::from_le_bytes([block[0], block[1]]);
        let value = u16::from_le_bytes([block[2], block[3]]);
        (LONG_HEADER, usize::from(key), usize::from(value))
    }

    /// Key and value of a block.
    #[inline(always)]
    fn split(block: &[u8], class: Class) -> (&[u8], &[u8]) {
        let (header, key, value) = Self::lengths(block, class);
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

    /// Reads a bucket and the item of `key` in it, with the blocks whose secondary hash agrees. `place` is
    /// the key's, unseen but for the first bucket of its chain.
    #[inline(always)]
    fn search(&mut self, unit: u32, place: Place, key: &[u8]) -> Option<Item> {
        let (bucket, secondary) = (self.memory.bucket(unit), place.secondary);
        let mut item = match place.seen {
            UNSEEN => bucket.candidate(0, secondary, key)?,
            NO_ITEM => return None,
            slot => bucket.item(usize::from(slot))?,
        };
        loop {
            let Item::Pointer { slot, class, pointer, .. } = item else { return Some(item) };
            if let Some(class) = Class::of_slot(class) {
                let block = self.memory.block(pointer, class.bytes());
                if same(Self::split(block, class).0, key) {
                    return Some(item);
                }
                self.counters.false_reads += 1;
            }
            item = self.memory.bucket_again(unit).candidate(slot + 1, secondary, key)?;
        }
    }

    /// The bucket of `key`, the one before it in its chain, and its item there.
    #[inline(always)]
    fn find(&mut self, mut place: Place, key: &[u8]) -> Option<(u32, Option<u32>, Item)> {
        let (mut unit, mut before) = (place.bucket * BUCKET_UNITS, None);
        loop {
            if let Some(item) = self.search(unit, place, key) {
                return Some((unit, before, item));
            }
            place = place.unseen();
            before = Some(unit);
            unit = self.memory.bucket_again(unit).next()?;
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
        let value = if let Some(range) = place.inline_value() {
            &self.memory.bucket(place.bucket * BUCKET_UNITS).bytes()[range]
        } else {
            let (unit, _, item) = self.find(place, key)?;
            // The search has just read both: the same accesses.
            match item {
                Item::Inline { slot, key_length, value_length, .. } => {
                    self.memory.bucket_again(unit).inline(slot, key_length, value_length).1
                }
                Item::Pointer { class, pointer, .. } => {
                    let class = Class::of_slot(class)?;
                    Self::split(self.memory.block_again(pointer, class.bytes()), class).1
                }
            }
        };
        Some(reader(value))
    }

    /// Changes the value of `key` where it is, its length kept; `None` where the key is absent.
    ///
    /// Invariant: `change` leaves the value as it was where it says false.
    pub fn modify<R>(
        &mut self,
        place: Place,
        key: &[u8],
        change: impl FnOnce(&mut [u8]) -> (R, bool),
    ) -> Option<R> {
        let (unit, length, class, range) = if let Some(range) = place.inline_value() {
            let unit = place.bucket * BUCKET_UNITS;
            self.memory.bucket(unit);
            (unit, BUCKET_BYTES, None, range)
        } else {
            match self.find(place, key)? {
                (unit, _, Item::Inline { slot, key_length, value_length, .. }) => {
                    (unit, BUCKET_BYTES, None, value_range(slot, key_length, value_length))
                }
                (_, _, Item::Pointer { class, pointer, .. }) => {
                    let class = Class::of_slot(class)?;
                    (pointer, class.bytes(), Some(class), 0..0)
                }
            }
        };
        Some(self.memory.change(unit, length, |bytes| {
            let range = class.map_or(range, |class| {
                let (header, key, value) = Self::lengths(bytes, class);
                header + key..header + key + value
            });
            change(&mut bytes[range])
        }))
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
    #[inline]
    pub fn put(&mut self, place: Place, key: &[u8], value: &[u8]) -> Result<bool, TableError> {
        // Most often a value takes the place of one of its length.
        if let Some(range) = place.inline_value()
            && range.len() == value.len()
            && key.len() + value.len() <= self.options.inline_threshold
        {
            let unit = place.bucket * BUCKET_UNITS;
            self.memory.bucket(unit);
            self.memory.change(unit, BUCKET_BYTES, |bucket| {
                copy_short(&mut bucket[range], value);
                ((), true)
            });
            return Ok(true);
        }
        self.put_searching(place, key, value)
    }

    fn put_searching(
        &mut self,
        mut place: Place,
        key: &[u8],
        value: &[u8],
    ) -> Result<bool, TableError> {
        let storage = self.storage(key.len(), value.len())?;
        let needed = match storage {
            Storage::Inline => inline_slots(key.len() + value.len()),
            Storage::Block(_) => 1,
        };
        let (mut unit, mut before) = (place.bucket * BUCKET_UNITS, None);
        let mut room: Option<(u32, Bucket)> = None;
        let mut old: Option<Found> = None;
        let last = loop {
            let item = match &old {
                None => self.search(unit, place, key),
                Some(_) => {
                    self.memory.bucket(unit);
                    None
                }
            };
            if let Some(item) = item {
                if self.overwrite(unit, &item, storage, key, value) {
                    return Ok(true);
                }
                let bucket = self.memory.bucket_again(unit).bucket();
                old = Some(Found { unit, before, bucket, item });
                let mut without = bucket;
                without.remove(&item);
                if without.free() >= needed {
                    break (unit, bucket);
                }
            }
            let bucket = self.memory.bucket_again(unit);
            if item.is_none() && room.is_none() && bucket.free() >= needed {
                room = Some((unit, bucket.bucket()));
            }
            place = place.unseen();
            match bucket.next() {
                Some(next) => (before, unit) = (Some(unit), next),
                None => break (unit, bucket.bucket()),
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
        item: &Item,
        storage: Storage,
        key: &[u8],
        value: &[u8],
    ) -> bool {
        match (*item, storage) {
            (Item::Inline { slot, slots, key_length, value_length }, Storage::Inline)
                if slots == inline_slots(key.len() + value.len()) =>
            {
                if value_length == value.len() {
                    let range = value_range(slot, key_length, value_length);
                    self.memory.change(unit, BUCKET_BYTES, |bucket| {
                        copy_short(&mut bucket[range], value);
                        ((), true)
                    });
                    return true;
                }
                let mut bucket = self.memory.bucket_again(unit).bucket();
                bucket.remove(item);
                bucket.push_inline(key, value);
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
        let mut bucket = self.memory.bucket(found.unit).bucket();
        bucket.remove(&found.item);
        match found.before {
            Some(before) if bucket.used() == 0 => {
                let mut previous = self.memory.bucket(before).bucket();
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
        let Some((unit, before, item)) = self.find(place, key) else { return false };
        let bucket = self.memory.bucket_again(unit).bucket();
        let found = Found { unit, before, bucket, item };
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
                let bucket = self.memory.bucket(at).bucket();
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
mod tests;
