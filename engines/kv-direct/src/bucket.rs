//! A bucket of the hash index: 64 bytes, ten slots, and what says how to read them.
//!
//! ```text
//! byte 0                    50                                       64
//!      | 10 slots x 5 B     | 112 bits: types 30, begin 10, end 10, next 31, spare 31 |
//! ```
//!
//! A slot is a pointer (31 bits, in units of 32 bytes) with nine bits of the key's secondary hash, or
//! five bytes of an inline pair. An inline pair takes consecutive slots; a begin bit and an end bit
//! mark its first and last slot. The type field of a pointer slot is the size class of the block it
//! points to, from 1; 0 is an empty slot.
//!
//! The type fields of inline slots are free, and so are three of the spare bits for each slot. They
//! carry the lengths (the source is silent about lengths): a pair of one slot has the length of its
//! key in the type field, a longer one six bits of it in two type fields; the spare bits of the first
//! slot say how many bytes of the last slot are not used.
//!
//! Invariant: used slots come first, without a gap; [`Bucket::remove`] closes the gap it makes.
//!
//! Source: spec/kv-direct.md 5.1.

use std::ops::Range;

/// Slots of a bucket.
pub const SLOTS: usize = 10;
/// Bytes of a slot.
pub const SLOT_BYTES: usize = 5;
/// Bytes of a bucket.
pub const BUCKET_BYTES: usize = 64;
/// Longest inline pair, bytes.
pub const INLINE_LIMIT: usize = SLOTS * SLOT_BYTES;
/// Largest pointer.
pub const POINTER_LIMIT: u32 = (1 << 31) - 1;

const TYPES: u32 = 0;
const BEGIN: u32 = 30;
const END: u32 = 40;
const NEXT: u32 = 50;
const SPARE: u32 = 81;

/// Where the fields begin, and the last eight bytes of them, with the number of their first bit: types,
/// begin and end bits are in the first eight, the rest is in the last.
const LOW_AT: usize = SLOTS * SLOT_BYTES;
const HIGH_AT: usize = BUCKET_BYTES - 8;
const HIGH: u32 = ((HIGH_AT - LOW_AT) * 8) as u32;

#[inline(always)]
fn eight(bytes: &[u8; BUCKET_BYTES], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// 64 bytes of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Bucket([u8; BUCKET_BYTES]);

const _: () = assert!(size_of::<Bucket>() == BUCKET_BYTES && align_of::<Bucket>() == 64);

/// What a used slot, or a run of slots, holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// A pair in the bucket itself.
    Inline {
        /// First slot.
        slot: usize,
        /// Slots taken.
        slots: usize,
        /// Bytes of the key; the value follows it.
        key_length: usize,
        /// Bytes of the value.
        value_length: usize,
    },
    /// A pair in a block of the dynamic area.
    Pointer {
        /// Its slot.
        slot: usize,
        /// Nine bits of the secondary hash.
        secondary: u16,
        /// Size class of the block, from 1.
        class: u8,
        /// The block, in units of 32 bytes.
        pointer: u32,
    },
}

impl Item {
    /// First slot.
    #[must_use]
    pub fn slot(&self) -> usize {
        match *self {
            Self::Inline { slot, .. } | Self::Pointer { slot, .. } => slot,
        }
    }

    /// Slots taken.
    #[must_use]
    pub fn slots(&self) -> usize {
        match *self {
            Self::Inline { slots, .. } => slots,
            Self::Pointer { .. } => 1,
        }
    }
}

/// Slots an inline pair of `bytes` takes; a pair has at least one byte.
#[must_use]
pub fn inline_slots(bytes: usize) -> usize {
    bytes.div_ceil(SLOT_BYTES)
}

/// A bucket where it lies: what reads one, without a copy of it.
#[derive(Clone, Copy, Debug)]
pub struct View<'a>(&'a [u8; BUCKET_BYTES]);

impl<'a> View<'a> {
    /// Of its bytes.
    #[must_use]
    #[inline]
    pub fn new(bytes: &'a [u8; BUCKET_BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    #[must_use]
    #[inline]
    pub fn bytes(self) -> &'a [u8; BUCKET_BYTES] {
        self.0
    }

    /// A copy of it.
    #[must_use]
    #[inline]
    pub fn bucket(self) -> Bucket {
        Bucket(*self.0)
    }

    /// The bucket that goes on from here; `None` at the end of the chain. Units of 32 bytes.
    #[must_use]
    #[inline]
    pub fn next(self) -> Option<u32> {
        let unit = (eight(self.0, HIGH_AT) >> (NEXT - HIGH)) as u32 & POINTER_LIMIT;
        // Unit 0 is the first bucket of the index, which is never chained to.
        (unit != 0).then_some(unit)
    }

    /// The item that starts at `slot`; `None` where the used slots end.
    #[must_use]
    #[inline]
    pub fn item(self, slot: usize) -> Option<Item> {
        self.item_of(eight(self.0, LOW_AT), slot)
    }

    #[inline(always)]
    fn item_of(self, low: u64, slot: usize) -> Option<Item> {
        if slot >= SLOTS {
            return None;
        }
        let kind = |slot: usize| (low >> (TYPES + 3 * slot as u32)) as u8 & 7;
        if low >> (BEGIN + slot as u32) & 1 == 1 {
            let slots = slots_from(low, slot);
            let spare = SPARE - HIGH + 3 * slot as u32;
            let pad = (eight(self.0, HIGH_AT) >> spare) as usize & 7;
            let key_length = if slots == 1 {
                usize::from(kind(slot))
            } else {
                usize::from(kind(slot)) | usize::from(kind(slot + 1)) << 3
            };
            let used = (slots * SLOT_BYTES).saturating_sub(pad);
            let value_length = used.saturating_sub(key_length);
            let key_length = key_length.min(used);
            return Some(Item::Inline { slot, slots, key_length, value_length });
        }
        let class = kind(slot);
        if class == 0 {
            return None;
        }
        let word = eight(self.0, slot * SLOT_BYTES);
        let pointer = word as u32 & POINTER_LIMIT;
        Some(Item::Pointer { slot, secondary: (word >> 31) as u16 & 0x1ff, class, pointer })
    }

    /// Its items, in the order of their slots.
    #[inline]
    pub fn items(self) -> impl Iterator<Item = Item> + 'a {
        let low = eight(self.0, LOW_AT);
        let mut slot = 0;
        std::iter::from_fn(move || {
            let item = self.item_of(low, slot)?;
            slot += item.slots();
            Some(item)
        })
    }

    /// The first item from `slot` on, where an item begins, that is `key` or whose block may be: an inline
    /// pair of that key, or a pointer whose secondary hash agrees.
    #[must_use]
    #[inline(always)]
    pub fn candidate(self, mut slot: usize, secondary: u16, key: &[u8]) -> Option<Item> {
        let low = eight(self.0, LOW_AT);
        let (start, mask) = start_of(key);
        while slot < SLOTS {
            let word = eight(self.0, slot * SLOT_BYTES);
            if low >> (BEGIN + slot as u32) & 1 == 1 {
                // Most pairs of other keys differ in their first bytes: their lengths are not looked at.
                if (word ^ start) & mask == 0
                    && let Some(item) = self.item_of(low, slot)
                    && let Item::Inline { slot, key_length, value_length, .. } = item
                    && same(self.inline(slot, key_length, value_length).0, key)
                {
                    return Some(item);
                }
                slot += slots_from(low, slot);
            } else {
                let class = (low >> (TYPES + 3 * slot as u32)) as u8 & 7;
                if class == 0 {
                    return None;
                }
                if (word >> 31) as u16 & 0x1ff == secondary {
                    let pointer = word as u32 & POINTER_LIMIT;
                    return Some(Item::Pointer { slot, secondary, class, pointer });
                }
                slot += 1;
            }
        }
        None
    }

    /// The bytes of an inline pair, key and value.
    #[must_use]
    #[inline]
    pub fn inline(
        self,
        slot: usize,
        key_length: usize,
        value_length: usize,
    ) -> (&'a [u8], &'a [u8]) {
        let at = slot * SLOT_BYTES;
        self.0[at..at + key_length + value_length].split_at(key_length)
    }

    /// Slots in use.
    #[must_use]
    #[inline]
    pub fn used(self) -> usize {
        let low = eight(self.0, LOW_AT);
        // The last slot with a type, or the last that ends a pair.
        let types = low >> TYPES & ((1 << (3 * SLOTS)) - 1);
        let ends = low >> END & ((1 << SLOTS) - 1);
        let typed = (u64::BITS - types.leading_zeros()).div_ceil(3);
        typed.max(u64::BITS - ends.leading_zeros()) as usize
    }

    /// Slots free.
    #[must_use]
    #[inline]
    pub fn free(self) -> usize {
        SLOTS - self.used()
    }
}

/// Slots of the inline pair that begins at `slot`.
#[inline(always)]
fn slots_from(low: u64, slot: usize) -> usize {
    // A pair that lost its end bit (damage) ends with the last slot.
    let ends = low >> (END + slot as u32) | 1 << (SLOTS - 1 - slot);
    ends.trailing_zeros() as usize + 1
}

/// The first bytes of a key, at most eight, and which bits of the word those are.
#[inline(always)]
fn start_of(key: &[u8]) -> (u64, u64) {
    if let Some(first) = key.first_chunk::<8>() {
        return (u64::from_le_bytes(*first), u64::MAX);
    }
    let start = key.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    (start, (1 << (8 * key.len())) - 1)
}

/// Equality of keys, for the length that most have without a call.
#[inline(always)]
pub(crate) fn same(one: &[u8], other: &[u8]) -> bool {
    match (<&[u8; 8]>::try_from(one), <&[u8; 8]>::try_from(other)) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    }
}

/// Where the value of an inline pair lies in its bucket, to change it there.
#[inline]
pub(crate) fn value_range(slot: usize, key_length: usize, value_length: usize) -> Range<usize> {
    let at = slot * SLOT_BYTES + key_length;
    at..at + value_length
}

impl Default for Bucket {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl Bucket {
    /// Nothing in it, nothing behind it.
    pub const EMPTY: Self = Self([0; BUCKET_BYTES]);

    /// Of its bytes.
    #[must_use]
    #[inline]
    pub fn from_bytes(bytes: &[u8; BUCKET_BYTES]) -> Self {
        Self(*bytes)
    }

    /// Its bytes.
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> &[u8; BUCKET_BYTES] {
        &self.0
    }

    /// To read it, as a bucket in memory is read.
    #[must_use]
    #[inline]
    pub fn view(&self) -> View<'_> {
        View(&self.0)
    }

    fn set_field(&mut self, at: u32, bits: u32, value: u32) {
        // A field lies in the eight bytes that begin with bit 0, or in those that end with bit 111.
        let (word, at) = if at + bits <= 64 { (LOW_AT, at) } else { (HIGH_AT, at - HIGH) };
        let mask = ((1_u64 << bits) - 1) << at;
        let changed = eight(&self.0, word) & !mask | (u64::from(value) << at & mask);
        self.0[word..word + 8].copy_from_slice(&changed.to_le_bytes());
    }

    fn set_kind(&mut self, slot: usize, kind: u8) {
        self.set_field(TYPES + 3 * slot as u32, 3, u32::from(kind));
    }

    fn set_spare(&mut self, slot: usize, bits: u8) {
        self.set_field(SPARE + 3 * slot as u32, 3, u32::from(bits));
    }

    /// As [`View::next`].
    #[must_use]
    #[inline]
    pub fn next(&self) -> Option<u32> {
        self.view().next()
    }

    /// Chains `next` behind this bucket, or ends the chain here.
    pub fn set_next(&mut self, next: Option<u32>) {
        self.set_field(NEXT, 31, next.unwrap_or(0));
    }

    /// As [`View::item`].
    #[must_use]
    #[inline]
    pub fn item(&self, slot: usize) -> Option<Item> {
        self.view().item(slot)
    }

    /// As [`View::items`].
    #[inline]
    pub fn items(&self) -> impl Iterator<Item = Item> + '_ {
        self.view().items()
    }

    /// As [`View::inline`].
    #[must_use]
    #[inline]
    pub fn inline(&self, slot: usize, key_length: usize, value_length: usize) -> (&[u8], &[u8]) {
        self.view().inline(slot, key_length, value_length)
    }

    /// As [`View::used`].
    #[must_use]
    #[inline]
    pub fn used(&self) -> usize {
        self.view().used()
    }

    /// As [`View::free`].
    #[must_use]
    #[inline]
    pub fn free(&self) -> usize {
        self.view().free()
    }

    /// Adds a pair inline behind the used slots.
    ///
    /// Invariant: the pair has 1 to 50 bytes and the bucket has room for it; that is asserted.
    pub fn push_inline(&mut self, key: &[u8], value: &[u8]) {
        let length = key.len() + value.len();
        let slots = inline_slots(length);
        let slot = self.used();
        assert!(!key.is_empty() && slot + slots <= SLOTS, "an inline pair fits its bucket");
        let at = slot * SLOT_BYTES;
        self.0[at..at + key.len()].copy_from_slice(key);
        self.0[at + key.len()..at + length].copy_from_slice(value);
        // What an older item left behind does not leak into a later one's padding.
        self.0[at + length..at + slots * SLOT_BYTES].fill(0);
        self.set_field(BEGIN + slot as u32, 1, 1);
        self.set_field(END + (slot + slots - 1) as u32, 1, 1);
        self.set_kind(slot, key.len() as u8 & 7);
        if slots > 1 {
            self.set_kind(slot + 1, (key.len() >> 3) as u8);
        }
        self.set_spare(slot, (slots * SLOT_BYTES - length) as u8);
    }

    /// Adds a pointer behind the used slots.
    ///
    /// Invariant: the bucket has a free slot, `class` is 1 to 7; that is asserted.
    pub fn push_pointer(&mut self, secondary: u16, class: u8, pointer: u32) {
        let slot = self.used();
        assert!(slot < SLOTS && (1..8).contains(&class), "a pointer fits its bucket");
        self.write_pointer(slot, secondary, pointer);
        self.set_kind(slot, class);
    }

    fn write_pointer(&mut self, slot: usize, secondary: u16, pointer: u32) {
        let word = u64::from(pointer & POINTER_LIMIT) | u64::from(secondary & 0x1ff) << 31;
        let at = slot * SLOT_BYTES;
        self.0[at..at + SLOT_BYTES].copy_from_slice(&word.to_le_bytes()[..SLOT_BYTES]);
    }

    /// Points an existing pointer slot elsewhere.
    pub fn redirect(&mut self, slot: usize, secondary: u16, class: u8, pointer: u32) {
        self.write_pointer(slot, secondary, pointer);
        self.set_kind(slot, class);
    }

    /// Takes an item out and moves what follows up.
    pub fn remove(&mut self, item: &Item) {
        let mut rebuilt = Self::EMPTY;
        rebuilt.set_next(self.next());
        for kept in self.items().filter(|kept| kept.slot() != item.slot()) {
            match kept {
                Item::Inline { slot, key_length, value_length, .. } => {
                    let (key, value) = self.inline(slot, key_length, value_length);
                    rebuilt.push_inline(key, value);
                }
                Item::Pointer { secondary, class, pointer, .. } => {
                    rebuilt.push_pointer(secondary, class, pointer);
                }
            }
        }
        *self = rebuilt;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Added {
        Inline(Vec<u8>, Vec<u8>),
        Pointer(u16, u8, u32),
    }

    fn added() -> impl Strategy<Value = Added> {
        let inline = (1_usize..=50, any::<u64>()).prop_flat_map(|(length, seed)| {
            (1..=length).prop_map(move |key| {
                let bytes: Vec<u8> = (0..length).map(|i| (seed >> (i % 8 * 8)) as u8).collect();
                Added::Inline(bytes[..key].to_vec(), bytes[key..].to_vec())
            })
        });
        let pointer =
            (0_u16..512, 1_u8..8, prop_oneof![Just(0), Just(POINTER_LIMIT), 0..POINTER_LIMIT])
                .prop_map(|(secondary, class, pointer)| Added::Pointer(secondary, class, pointer));
        prop_oneof![inline, pointer]
    }

    fn read(bucket: &Bucket) -> Vec<Added> {
        let one = |item| match item {
            Item::Inline { slot, key_length, value_length, .. } => {
                let (key, value) = bucket.inline(slot, key_length, value_length);
                Added::Inline(key.to_vec(), value.to_vec())
            }
            Item::Pointer { secondary, class, pointer, .. } => {
                Added::Pointer(secondary, class, pointer)
            }
        };
        bucket.items().map(one).collect()
    }

    proptest! {
        #[test]
        fn what_is_pushed_is_read_back_and_removal_keeps_the_rest(
            items in proptest::collection::vec(added(), 1..10),
            next in prop_oneof![Just(None), (1..=POINTER_LIMIT).prop_map(Some)],
            victim in any::<prop::sample::Index>(),
        ) {
            let mut bucket = Bucket::EMPTY;
            bucket.set_next(next);
            let mut model = Vec::new();
            for item in items {
                let slots = match &item {
                    Added::Inline(key, value) => inline_slots(key.len() + value.len()),
                    Added::Pointer(..) => 1,
                };
                if slots > bucket.free() {
                    continue;
                }
                match &item {
                    Added::Inline(key, value) => bucket.push_inline(key, value),
                    Added::Pointer(s, c, p) => bucket.push_pointer(*s, *c, *p),
                }
                model.push(item);
            }
            prop_assert_eq!(format!("{:?}", read(&bucket)), format!("{model:?}"));
            prop_assert_eq!(Bucket::from_bytes(bucket.bytes()), bucket);
            prop_assert_eq!(bucket.used(), bucket.items().map(|item| item.slots()).sum::<usize>());
            prop_assert_eq!(bucket.next(), next);
            let victim = victim.index(model.len());
            let item = bucket.items().nth(victim).unwrap();
            let free = bucket.free();
            bucket.remove(&item);
            model.remove(victim);
            prop_assert_eq!(format!("{:?}", read(&bucket)), format!("{model:?}"));
            prop_assert_eq!(bucket.free(), free + item.slots());
            prop_assert_eq!(bucket.next(), next);
        }

        #[test]
        fn any_bytes_can_be_read_without_a_panic(bytes in any::<[[u8; 32]; 2]>()) {
            let mut line = [0; BUCKET_BYTES];
            line[..32].copy_from_slice(&bytes[0]);
            line[32..].copy_from_slice(&bytes[1]);
            let bucket = Bucket::from_bytes(&line);
            let taken: usize = read(&bucket).len();
            prop_assert!(taken <= SLOTS);
        }
    }

    #[test]
    fn every_split_of_every_inline_length_is_kept() {
        for length in 1..=INLINE_LIMIT {
            for key in 1..=length {
                let bytes: Vec<u8> = (0..length as u8).collect();
                let mut bucket = Bucket::EMPTY;
                bucket.push_inline(&bytes[..key], &bytes[key..]);
                let Some(Item::Inline { slot, slots, key_length, value_length }) = bucket.item(0)
                else {
                    panic!("an inline item of {length} bytes is not read back");
                };
                assert_eq!((slots, key_length), (inline_slots(length), key));
                let (k, v) = bucket.inline(slot, key_length, value_length);
                assert_eq!((k, v), (&bytes[..key], &bytes[key..]));
            }
        }
    }
}
