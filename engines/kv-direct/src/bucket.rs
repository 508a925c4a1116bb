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

    #[inline]
    fn meta(&self) -> u128 {
        let mut word = [0; 16];
        word.copy_from_slice(&self.0[48..]);
        u128::from_le_bytes(word) >> 16
    }

    fn set_meta(&mut self, meta: u128) {
        let low = u128::from(u16::from_le_bytes([self.0[48], self.0[49]]));
        self.0[48..].copy_from_slice(&(meta << 16 | low).to_le_bytes());
    }

    fn field(&self, at: u32, bits: u32) -> u32 {
        (self.meta() >> at) as u32 & ((1 << bits) - 1)
    }

    fn set_field(&mut self, at: u32, bits: u32, value: u32) {
        let mask = ((1_u128 << bits) - 1) << at;
        self.set_meta(self.meta() & !mask | (u128::from(value) << at & mask));
    }

    fn set_kind(&mut self, slot: usize, kind: u8) {
        self.set_field(TYPES + 3 * slot as u32, 3, u32::from(kind));
    }

    fn set_spare(&mut self, slot: usize, bits: u8) {
        self.set_field(SPARE + 3 * slot as u32, 3, u32::from(bits));
    }

    /// The bucket that goes on from here; `None` at the end of the chain. Units of 32 bytes.
    #[must_use]
    #[inline]
    pub fn next(&self) -> Option<u32> {
        // Unit 0 is the first bucket of the index, which is never chained to.
        match self.field(NEXT, 31) {
            0 => None,
            unit => Some(unit),
        }
    }

    /// Chains `next` behind this bucket, or ends the chain here.
    pub fn set_next(&mut self, next: Option<u32>) {
        self.set_field(NEXT, 31, next.unwrap_or(0));
    }

    /// The item that starts at `slot`; `None` where the used slots end.
    #[must_use]
    #[inline]
    pub fn item(&self, slot: usize) -> Option<Item> {
        Self::item_of(&self.0, self.meta(), slot)
    }

    #[inline]
    fn item_of(bytes: &[u8; BUCKET_BYTES], meta: u128, slot: usize) -> Option<Item> {
        if slot >= SLOTS {
            return None;
        }
        let kind = |slot: usize| (meta >> (TYPES + 3 * slot as u32)) as u8 & 7;
        if meta >> (BEGIN + slot as u32) & 1 == 1 {
            let ends = (meta >> (END + slot as u32)) as u16 & ((1 << (SLOTS - slot)) - 1);
            // A bucket that lost its end bit (damage) ends with its last slot.
            let slots = (ends.trailing_zeros() as usize + 1).min(SLOTS - slot);
            let pad = (meta >> (SPARE + 3 * slot as u32)) as usize & 7;
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
        let at = slot * SLOT_BYTES;
        let low = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let word = u64::from(low) | u64::from(bytes[at + 4]) << 32;
        let pointer = word as u32 & POINTER_LIMIT;
        Some(Item::Pointer { slot, secondary: (word >> 31) as u16, class, pointer })
    }

    /// Its items, in the order of their slots.
    #[inline]
    pub fn items(&self) -> impl Iterator<Item = Item> + '_ {
        let meta = self.meta();
        let mut slot = 0;
        std::iter::from_fn(move || {
            let item = Self::item_of(&self.0, meta, slot)?;
            slot += item.slots();
            Some(item)
        })
    }

    /// The bytes of an inline pair, key and value.
    #[must_use]
    #[inline]
    pub fn inline(&self, slot: usize, key_length: usize, value_length: usize) -> (&[u8], &[u8]) {
        let at = slot * SLOT_BYTES;
        self.0[at..at + key_length + value_length].split_at(key_length)
    }

    /// The value of an inline pair, to change it in place.
    #[must_use]
    pub fn inline_value_mut(
        &mut self,
        slot: usize,
        key_length: usize,
        value_length: usize,
    ) -> &mut [u8] {
        let at = slot * SLOT_BYTES + key_length;
        &mut self.0[at..at + value_length]
    }

    /// Slots in use.
    #[must_use]
    #[inline]
    pub fn used(&self) -> usize {
        self.items().map(|item| item.slots()).sum()
    }

    /// Slots free.
    #[must_use]
    #[inline]
    pub fn free(&self) -> usize {
        SLOTS - self.used()
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
        let mut meta = self.meta();
        meta |= 1 << (BEGIN + slot as u32) | 1 << (END + (slot + slots - 1) as u32);
        self.set_meta(meta);
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
