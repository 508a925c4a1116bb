//! The volatile index of one database in one shard: extendible hashing, key hash to newest entry.
//!
//! ```text
//! top bits of hash → directory [u32 page number] → page: slots in open addressing
//! slot (24 B): hash 8 | location 8 | slot length / 16 4 | stale 2 | last use 2
//! ```
//!
//! A lookup touches a directory line, a slot line and the entry's own line. A full page splits in
//! two (a pause of one page, never a rehash of everything); a page whose keys share too many hash
//! bits grows instead. Hashes are [`crate::placement`]'s, which nobody can aim.
//!
//! Order: positions are the top 48 bits of the hash, so a cursor over positions is stable under
//! splits and growth: a key that is present throughout a scan is met exactly once.

use std::sync::Arc;

use crate::entry::ALIGNMENT;
use crate::space_limit::Account;

const SMALLEST_PAGE: usize = 64;
const LARGEST_PAGE: usize = 1024;
const DEEPEST: u32 = 32;
/// A page with less than this part of its slots in use gets smaller.
const SPARSE: usize = 8;
/// Slots that a look-ahead takes into account from a key's home on: most keys are among them.
const LIKELY_PROBES: usize = 4;
/// Bits of a hash that make a scan position.
pub(crate) const POSITION_BITS: u32 = 48;

/// Where an entry lies, with the facts about it that must not be read from memory a client can
/// write. Never 0 for a real entry, since entries start beyond offset 0.
///
/// ```text
/// bits 0..26 offset / 16 | 26..50 segment | 50 tombstone | 51 expires | 52 untrusted | 53 lost
///      54 dropped
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Location(pub u64);

const OFFSET_BITS: u32 = 26;
const SEGMENT_BITS: u32 = 24;

/// Largest segment identifier a location can hold.
pub(crate) const SEGMENT_LIMIT: u32 = 1 << SEGMENT_BITS;

impl Location {
    pub const TOMBSTONE: u64 = 1 << 50;
    pub const EXPIRES: u64 = 1 << 51;
    pub const UNTRUSTED: u64 = 1 << 52;
    /// The newest entry was damaged and its segment is gone; only older ones may be left.
    pub const LOST: u64 = 1 << 53;
    /// A tombstone that hides nothing any more: it goes together with its segment, whose bytes
    /// must not be looked at through this location.
    pub const DROPPED: u64 = 1 << 54;
    /// The expiry of the value stands beside it: see [`crate::expiries`].
    pub const TOUCHED: u64 = 1 << 55;
    const PLACE: u64 = (1 << (OFFSET_BITS + SEGMENT_BITS)) - 1;

    pub fn new(segment: u32, offset: u32, flags: u64) -> Self {
        debug_assert!(segment < SEGMENT_LIMIT && offset.is_multiple_of(ALIGNMENT));
        Self(u64::from(segment) << OFFSET_BITS | u64::from(offset / ALIGNMENT) | flags)
    }

    pub fn segment(self) -> u32 {
        ((self.0 >> OFFSET_BITS) & u64::from(SEGMENT_LIMIT - 1)) as u32
    }

    pub fn offset(self) -> u32 {
        (self.0 & ((1 << OFFSET_BITS) - 1)) as u32 * ALIGNMENT
    }

    pub fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }

    /// True when both name the same bytes, whatever their flags.
    pub fn same_place(self, other: Self) -> bool {
        (self.0 ^ other.0) & Self::PLACE == 0
    }

    /// True when a reader finds nothing here.
    pub fn is_absent(self) -> bool {
        self.0 & (Self::TOMBSTONE | Self::LOST) != 0
    }

    /// True for a value that does not expire.
    #[inline]
    pub fn is_plain(self) -> bool {
        self.0 & (Self::TOMBSTONE | Self::EXPIRES | Self::LOST | Self::DROPPED) == 0
    }

    /// The same value, whose expiry stands beside it; whether it has one.
    pub fn touched(self, expires: bool) -> Self {
        let flags = Self::TOUCHED | if expires { Self::EXPIRES } else { 0 };
        Self(self.0 & !(Self::TOUCHED | Self::EXPIRES) | flags)
    }

    /// The same value at another place, whose header tells of an expiry that may have changed since.
    pub fn moved_to(self, to: Self) -> Self {
        if self.has(Self::TOUCHED) { to.touched(self.has(Self::EXPIRES)) } else { to }
    }

    /// True when the location names bytes that may be looked at, and that no client can write.
    #[inline]
    pub fn is_trusted(self) -> bool {
        self.0 & (Self::LOST | Self::DROPPED | Self::UNTRUSTED) == 0
    }

    /// True when the location names bytes that may be looked at.
    pub fn is_readable(self) -> bool {
        self.0 & (Self::LOST | Self::DROPPED) == 0
    }
}

/// Saturated: the count of stale copies is no longer known, so the slot is never dropped.
pub(crate) const STALE_UNKNOWN: u16 = u16::MAX;

/// One key.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slot {
    pub hash: u64,
    /// 0 marks a free slot.
    pub location: Location,
    /// Slot length of the newest entry in units of 16 bytes.
    pub units: u32,
    /// Older entries of this key that are still on media, in runs or one by one: see
    /// [`crate::shard::recycle`].
    pub stale: u16,
    /// Second of the last use, modulo 65,536.
    pub last_use: u16,
}

impl Slot {
    pub fn slot_bytes(&self) -> u64 {
        u64::from(self.units) * u64::from(ALIGNMENT)
    }

    pub fn add_stale(&mut self) {
        self.stale = self.stale.saturating_add(1);
    }

    pub fn remove_stale(&mut self) {
        if self.stale != STALE_UNKNOWN {
            self.stale = self.stale.saturating_sub(1);
        }
    }

    /// True when the newest entry is needed on media: a value, or a tombstone that still hides
    /// something.
    pub fn is_needed(&self) -> bool {
        self.location.is_readable() && (!self.location.has(Location::TOMBSTONE) || self.stale > 0)
    }

    pub fn position(&self) -> u64 {
        self.hash >> (64 - POSITION_BITS)
    }
}

/// Asks the processor for a line that is about to be used.
#[inline]
pub(crate) fn prefetch<T>(place: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint: it reads nothing architecturally and cannot fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Names a slot until the next insertion or removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotId {
    page: u32,
    slot: u32,
}

#[derive(Debug)]
struct Page {
    slots: Box<[Slot]>,
    used: u32,
    depth: u32,
}

impl Page {
    fn new(capacity: usize, depth: u32) -> Self {
        Self { slots: vec![Slot::default(); capacity].into_boxed_slice(), used: 0, depth }
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        let mask = self.slots.len() - 1;
        ((hash << self.depth) >> 40) as usize & mask
    }

    fn is_full(&self) -> bool {
        self.used as usize * 20 >= self.slots.len() * 17
    }

    /// Gives the page another capacity, a power of two in which its slots fit.
    fn resize(&mut self, capacity: usize) {
        let old = std::mem::replace(self, Self::new(capacity, self.depth));
        for slot in old.slots.iter().filter(|slot| slot.location.0 != 0) {
            self.place(*slot);
        }
    }

    /// Puts `slot` into the first free place from its home. The page is not full.
    fn place(&mut self, slot: Slot) -> u32 {
        let mask = self.slots.len() - 1;
        let mut at = self.home(slot.hash);
        while self.slots[at].location.0 != 0 {
            at = (at + 1) & mask;
        }
        self.slots[at] = slot;
        self.used += 1;
        at as u32
    }

    /// Frees a place and moves later slots of the same run back, so that probing needs no marks.
    fn take(&mut self, at: u32) -> Slot {
        let mask = self.slots.len() - 1;
        let mut hole = at as usize;
        let taken = self.slots[hole];
        let mut next = hole;
        loop {
            next = (next + 1) & mask;
            let slot = self.slots[next];
            if slot.location.0 == 0 {
                break;
            }
            let distance_home = next.wrapping_sub(self.home(slot.hash)) & mask;
            let distance_hole = next.wrapping_sub(hole) & mask;
            if distance_home >= distance_hole {
                self.slots[hole] = slot;
                hole = next;
            }
        }
        self.slots[hole] = Slot::default();
        self.used -= 1;
        taken
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Index {
    directory: Vec<u32>,
    depth: u32,
    pages: Vec<Page>,
    slots: u64,
    /// Grows with whatever may change a slot or move it: while it stays, slots are where and what they were,
    /// apart from their last use.
    changes: u64,
    /// Keys a reader finds (not tombstones).
    pub live: u64,
    /// Keys with an expiry among them.
    pub expiring: u64,
    /// Bytes of slots on media that hold live keys.
    pub live_bytes: u64,
    /// Of a service's namespace: what all shards hold of it.
    pub account: Option<Arc<Account>>,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            directory: vec![0],
            depth: 0,
            pages: vec![Page::new(SMALLEST_PAGE, 0)],
            slots: 0,
            changes: 0,
            live: 0,
            expiring: 0,
            live_bytes: 0,
            account: None,
        }
    }
}

impl Index {
    /// Adds to the live bytes of this index of `shard`, or with a wrapped number takes from them.
    #[inline]
    pub fn add_live_bytes(&mut self, shard: usize, bytes: u64) {
        self.live_bytes = self.live_bytes.wrapping_add(bytes);
        if let Some(account) = &self.account {
            account.add(shard, bytes);
        }
    }

    #[inline]
    fn directory_slot(&self, hash: u64) -> usize {
        // A shift by 64 is not defined: depth 0 has one page.
        if self.depth == 0 { 0 } else { (hash >> (64 - self.depth)) as usize }
    }

    /// Slots in use, tombstones included.
    pub fn slots(&self) -> u64 {
        self.slots
    }

    /// Bytes of memory the index takes.
    pub fn memory_bytes(&self) -> u64 {
        let pages: usize = self.pages.iter().map(|page| page.slots.len()).sum();
        (pages * size_of::<Slot>()
            + self.directory.capacity() * size_of::<u32>()
            + self.pages.capacity() * size_of::<Page>()) as u64
    }

    /// The slot of the key with this hash whose location `is_key` accepts.
    #[inline]
    pub fn find(&self, hash: u64, mut is_key: impl FnMut(&Slot) -> bool) -> Option<SlotId> {
        let page_number = self.directory[self.directory_slot(hash)];
        let page = &self.pages[page_number as usize];
        let mask = page.slots.len() - 1;
        let mut at = page.home(hash);
        loop {
            let slot = &page.slots[at];
            if slot.location.0 == 0 {
                return None;
            }
            if slot.hash == hash && is_key(slot) {
                return Some(SlotId { page: page_number, slot: at as u32 });
            }
            at = (at + 1) & mask;
        }
    }

    /// Asks the processor for the lines where `hash` is probed.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        let page = &self.pages[self.directory[self.directory_slot(hash)] as usize];
        let home = page.home(hash);
        prefetch(&page.slots[home]);
        prefetch(&page.slots[(home + LIKELY_PROBES - 1) & (page.slots.len() - 1)]);
    }

    /// What the first slot with this hash points at, for a prefetch: likely the key's entry.
    #[inline]
    pub fn guess(&self, hash: u64) -> Option<Location> {
        let page = &self.pages[self.directory[self.directory_slot(hash)] as usize];
        let mask = page.slots.len() - 1;
        let home = page.home(hash);
        (home..home + LIKELY_PROBES)
            .map(|at| &page.slots[at & mask])
            .find(|slot| slot.hash == hash && slot.location.0 != 0)
            .and_then(|slot| slot.location.is_readable().then_some(slot.location))
    }

    /// The slot behind a name.
    #[inline]
    pub fn slot(&self, id: SlotId) -> &Slot {
        &self.pages[id.page as usize].slots[id.slot as usize]
    }

    #[inline]
    pub fn slot_mut(&mut self, id: SlotId) -> &mut Slot {
        self.changes += 1;
        &mut self.pages[id.page as usize].slots[id.slot as usize]
    }

    /// Notes when a key was used.
    #[inline]
    pub fn use_slot(&mut self, id: SlotId, second: u16) {
        self.pages[id.page as usize].slots[id.slot as usize].last_use = second;
    }

    /// A number that no change of a slot leaves as it is; the note of a use does. Of this index alone: one
    /// that takes its place counts anew.
    #[inline]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Adds a key that is not in the index.
    pub fn insert(&mut self, slot: Slot) -> SlotId {
        assert!(slot.location.0 != 0, "an entry never lies at location 0");
        self.changes += 1;
        loop {
            let number = self.directory[self.directory_slot(slot.hash)];
            let page = &mut self.pages[number as usize];
            if !page.is_full() {
                self.slots += 1;
                return SlotId { page: number, slot: page.place(slot) };
            }
            self.enlarge(number);
        }
    }

    /// Removes a slot and returns what was in it. A page that is nearly empty then gets smaller.
    pub fn remove(&mut self, id: SlotId) -> Slot {
        self.slots -= 1;
        self.changes += 1;
        let page = &mut self.pages[id.page as usize];
        let taken = page.take(id.slot);
        if page.slots.len() > SMALLEST_PAGE && page.used as usize * SPARSE < page.slots.len() {
            let capacity = (page.used as usize * 2).next_power_of_two().max(SMALLEST_PAGE);
            page.resize(capacity);
        }
        taken
    }

    fn enlarge(&mut self, number: u32) {
        let page = &self.pages[number as usize];
        let capacity = page.slots.len();
        let may_split = capacity >= LARGEST_PAGE && page.depth < DEEPEST;
        let needs_double = page.depth == self.depth;
        let sparse = self.directory.len() * 2 > self.pages.len() * 16 + 64;
        if !may_split || (needs_double && sparse) {
            self.pages[number as usize].resize(capacity * 2);
            return;
        }
        if needs_double {
            self.directory = self.directory.iter().flat_map(|page| [*page, *page]).collect();
            self.depth += 1;
        }
        let depth = self.pages[number as usize].depth + 1;
        let mut halves = [0_usize; 2];
        let bit = |slot: &Slot| ((slot.hash >> (64 - depth)) & 1) as usize;
        let old_slots = std::mem::take(&mut self.pages[number as usize].slots);
        for slot in old_slots.iter().filter(|slot| slot.location.0 != 0) {
            halves[bit(slot)] += 1;
        }
        let capacity_for = |used: usize| (used * 3 / 2).next_power_of_two().max(LARGEST_PAGE);
        self.pages[number as usize] = Page::new(capacity_for(halves[0]), depth);
        let sibling = self.pages.len() as u32;
        self.pages.push(Page::new(capacity_for(halves[1]), depth));
        for slot in old_slots.iter().filter(|slot| slot.location.0 != 0) {
            let page = [number, sibling][bit(slot)];
            self.pages[page as usize].place(*slot);
        }
        let step = self.depth - depth;
        for (at, entry) in self.directory.iter_mut().enumerate() {
            if *entry == number && (at >> step) & 1 == 1 {
                *entry = sibling;
            }
        }
    }

    /// The only slot with this hash; `None` when there is none or more than one.
    pub fn find_only(&self, hash: u64) -> Option<SlotId> {
        let number = self.directory[self.directory_slot(hash)];
        let page = &self.pages[number as usize];
        let mask = page.slots.len() - 1;
        let mut at = page.home(hash);
        let mut only = None;
        while page.slots[at].location.0 != 0 {
            if page.slots[at].hash == hash {
                if only.is_some() {
                    return None;
                }
                only = Some(SlotId { page: number, slot: at as u32 });
            }
            at = (at + 1) & mask;
        }
        only
    }

    /// Every slot with this hash.
    pub fn find_all(&self, hash: u64, out: &mut Vec<SlotId>) {
        let number = self.directory[self.directory_slot(hash)];
        let page = &self.pages[number as usize];
        let mask = page.slots.len() - 1;
        let mut at = page.home(hash);
        while page.slots[at].location.0 != 0 {
            if page.slots[at].hash == hash {
                out.push(SlotId { page: number, slot: at as u32 });
            }
            at = (at + 1) & mask;
        }
    }

    /// Collects into `out`, in order of position, at least `count` slots (fewer at the end) from
    /// `position` on, and returns the position to go on from, or `None` at the end. All slots of
    /// one position come together.
    pub fn collect(&self, position: u64, count: usize, out: &mut Vec<Slot>) -> Option<u64> {
        out.clear();
        let mut position = position;
        loop {
            let number = self.directory[self.directory_slot(position << (64 - POSITION_BITS))];
            let page = &self.pages[number as usize];
            let start = out.len();
            let here = |slot: &&Slot| slot.location.0 != 0 && slot.position() >= position;
            out.extend(page.slots.iter().filter(here).copied());
            out[start..].sort_unstable_by_key(|slot| slot.hash);
            if out.len() > count {
                let last = out[count.max(1) - 1].position();
                let end = out.partition_point(|slot| slot.position() <= last);
                let all = end == out.len();
                out.truncate(end);
                if !all {
                    return Some(last + 1);
                }
            }
            let width = 1_u64 << (POSITION_BITS - page.depth.min(POSITION_BITS));
            position = (position & !(width - 1)) + width;
            if position >> POSITION_BITS != 0 {
                return None;
            }
            if out.len() >= count {
                return Some(position);
            }
        }
    }

    /// Number of pages, for sweeps that take a page at a time.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    /// The slots of one page.
    pub fn page(&self, number: usize) -> impl Iterator<Item = &Slot> {
        self.pages[number].slots.iter().filter(|slot| slot.location.0 != 0)
    }

    /// A copy of all slots that hold an entry, page after page.
    pub fn live_slots(&self) -> Vec<Slot> {
        let live = |slot: &&Slot| !slot.location.is_absent();
        (0..self.pages()).flat_map(|page| self.page(page).filter(live).copied()).collect()
    }

    /// Some slot near a random place that `accept` takes, by looking at up to `tries` slots.
    pub fn sample(
        &self,
        random: u64,
        tries: usize,
        mut accept: impl FnMut(&Slot) -> bool,
    ) -> Option<Slot> {
        let mut number = (random >> 32) as usize % self.pages.len();
        let mut at = random as usize % self.pages[number].slots.len();
        for _ in 0..tries {
            let slot = &self.pages[number].slots[at];
            if slot.location.0 != 0 && accept(slot) {
                return Some(*slot);
            }
            at += 1;
            if at == self.pages[number].slots.len() {
                at = 0;
                number = (number + 1) % self.pages.len();
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn slot(hash: u64, offset: u32) -> Slot {
        Slot { hash, location: Location::new(1, offset, 0), units: 4, ..Slot::default() }
    }

    fn all(index: &Index, step: usize) -> Vec<u64> {
        let (mut out, mut met, mut position) = (Vec::new(), Vec::new(), Some(0));
        while let Some(at) = position {
            position = index.collect(at, step, &mut out);
            met.extend(out.iter().map(|slot| slot.hash));
        }
        met
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn the_index_agrees_with_a_map(seed: u64, spread in 0_u32..60, step in 1_usize..50) {
            let mut index = Index::default();
            let mut model = BTreeMap::new();
            let mut random = seed | 1;
            for turn in 0..6000_u32 {
                random ^= random << 13; random ^= random >> 7; random ^= random << 17;
                let hash = random.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (spread / 2) << (spread / 4);
                let found = index.find(hash, |_| true);
                prop_assert_eq!(found.is_some(), model.contains_key(&hash));
                if let Some(id) = found {
                    prop_assert_eq!(index.slot(id).location.offset(), model[&hash]);
                    index.remove(id);
                    model.remove(&hash);
                } else {
                    let offset = (turn + 4) * 16;
                    index.insert(slot(hash, offset));
                    model.insert(hash, offset);
                }
                if random % 3 == 0 && let Some((&hash, _)) = model.iter().next() {
                    let id = index.find(hash, |_| true).unwrap();
                    index.remove(id);
                    model.remove(&hash);
                }
            }
            prop_assert_eq!(index.slots(), model.len() as u64);
            let expected: Vec<u64> = model.keys().copied().collect();
            prop_assert_eq!(all(&index, step), expected);
        }
    }

    #[test]
    fn many_keys_with_one_hash_are_kept_apart() {
        let mut index = Index::default();
        for offset in 1..3000 {
            index.insert(slot(42, offset * 16));
        }
        for offset in [16, 1600, 2999 * 16] {
            assert!(index.find(42, |slot| slot.location.offset() == offset).is_some());
        }
        assert!(index.directory.len() < 1024, "collisions must not blow the directory up");
        assert_eq!(all(&index, 10).len(), 2999);
    }

    #[test]
    fn an_index_that_was_large_gives_its_memory_back() {
        let mut index = Index::default();
        let hash = |n: u64| n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for n in 1..100_000 {
            index.insert(slot(hash(n), 64));
        }
        let full = index.memory_bytes();
        for n in 1..100_000_u64 {
            if !n.is_multiple_of(1000) {
                let id = index.find_only(hash(n)).unwrap();
                index.remove(id);
            }
        }
        assert!(index.memory_bytes() * 10 < full, "{} of {full} left", index.memory_bytes());
        for n in 1..100_u64 {
            assert!(index.find_only(hash(n * 1000)).is_some());
        }
        for n in 100_000..200_000 {
            index.insert(slot(hash(n), 64));
        }
        assert_eq!(all(&index, 64).len() as u64, index.slots());
    }

    #[test]
    fn a_hash_of_zero_is_no_free_slot() {
        let mut index = Index::default();
        assert_eq!(index.guess(0), None);
        assert!(index.find(0, |_| true).is_none());
        index.insert(slot(0, 64));
        assert_eq!(index.guess(0), Some(Location::new(1, 64, 0)));
        let id = index.find_only(0).unwrap();
        index.remove(id);
        assert_eq!(index.guess(0), None);
    }

    #[test]
    fn a_scan_meets_every_key_that_stays_while_the_index_grows() {
        let mut index = Index::default();
        let hash = |n: u64| n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for n in 1..2000 {
            index.insert(slot(hash(n), 64));
        }
        let (mut met, mut out, mut position, mut next) = (Vec::new(), Vec::new(), Some(0), 2000);
        while let Some(at) = position {
            position = index.collect(at, 7, &mut out);
            met.extend(out.iter().map(|slot| slot.hash));
            for _ in 0..50 {
                index.insert(slot(hash(next), 64));
                next += 1;
            }
        }
        for n in 1..2000 {
            assert_eq!(met.iter().filter(|met| **met == hash(n)).count(), 1);
        }
    }
}
