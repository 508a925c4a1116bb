//! The stores that the paper compares with, over the same counting memory: cuckoo (MemC3) and hopscotch (FaRM).
//!
//! Both keep keys in the index, beside a pointer of four bytes to the value; values lie in slabs of multiples of
//! 8 bytes. Slots lie side by side, without room between them, and a bucket or a neighbourhood is read in one
//! access wherever it begins: both favour them. Keys have one length, values another. Allocation of values
//! costs no access, as that of blocks in `kv-direct` next to none.
//!
//! - Cuckoo: two buckets of four slots for each key, with a tag of one byte that names the other bucket; a PUT that
//!   finds both full looks for a way of moves to a free slot, then moves from its end.
//! - Hopscotch: a key lies within 8 slots from its home, whose bitmap says where; a PUT moves a free slot there, hop by
//!   hop. FaRM's overflow blocks are left out: a PUT fails where no hop helps.
//!
//! Invariant: an operation that fails changes no pair.
//!
//! Source: spec/kv-direct.md 5.1, 8 (figure 5.9).

use beeline_env::Randomness;
use beeline_kv_direct::memory::{HostMemory, Memory as _, Traced, UNIT_BYTES};

/// Slots of a cuckoo bucket.
const WAYS: usize = 4;
/// Buckets that the search for a free slot reads at most.
const LONGEST_WAY: usize = 500;
/// Slots of a neighbourhood.
const NEIGHBOURHOOD: usize = 8;
/// Slots that the search for a free one goes through at most.
const PROBED: usize = 256;
/// Bytes of a value's pointer.
const POINTER_BYTES: usize = 4;
/// Values lie at multiples of this.
const GRANULE: usize = 8;

/// A store of pairs with keys of one length and values of one length.
pub trait Baseline {
    /// Reads a value.
    fn get(&mut self, key: &[u8]) -> Option<Vec<u8>>;

    /// Stores a pair; false where there is no room.
    fn put(&mut self, key: &[u8], value: &[u8]) -> bool;

    /// Deletes a pair; false where there is none.
    fn delete(&mut self, key: &[u8]) -> bool;

    /// Accesses so far.
    fn accesses(&self) -> u64;
}

/// Lengths of keys and values, and the memory they are put into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of a key, 1 to 16.
    pub key_bytes: usize,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Bytes of index and values together.
    pub memory_bytes: u64,
    /// Most pairs: values take what these need, the index the rest.
    pub pairs: u64,
}

impl Shape {
    /// For so many pairs as take this share of memory.
    #[must_use]
    pub fn for_utilisation(
        (key_bytes, value_bytes): (usize, usize),
        memory_bytes: u64,
        utilisation: f64,
    ) -> Self {
        let pairs = (memory_bytes as f64 * utilisation / (key_bytes + value_bytes) as f64) as u64;
        Self { key_bytes, value_bytes, memory_bytes, pairs }
    }

    fn granules(&self) -> u64 {
        self.value_bytes.div_ceil(GRANULE) as u64
    }

    /// One byte of tag or bitmap, the key, the pointer.
    fn slot_bytes(&self) -> usize {
        1 + self.key_bytes + POINTER_BYTES
    }

    /// Slots that fit beside the values.
    fn slots(&self) -> usize {
        let values = self.pairs * self.granules() * GRANULE as u64;
        (self.memory_bytes.saturating_sub(values) / self.slot_bytes() as u64) as usize
    }
}

/// Memory by bytes, with every read and write counted, and the values in it.
#[derive(Debug)]
struct Store {
    memory: Traced<HostMemory>,
    shape: Shape,
    /// Where values begin.
    values_at: usize,
    /// Values that were freed.
    free: Vec<u32>,
    /// Values handed out so far, the freed ones included.
    taken: u32,
}

/// A slot: tag or bitmap, key, pointer plus one; 0 where the slot is empty.
type Slots = Vec<u8>;

impl Store {
    fn new(shape: Shape, slots: usize) -> std::io::Result<Self> {
        let values_at = (slots * shape.slot_bytes()).next_multiple_of(GRANULE);
        let values = (shape.pairs * shape.granules()) as usize * GRANULE;
        let length = (values_at + values).next_multiple_of(UNIT_BYTES) + 2 * UNIT_BYTES;
        let memory = Traced::counting(HostMemory::new(length.next_multiple_of(4096) as u64)?);
        Ok(Self { memory, shape, values_at, free: Vec::new(), taken: 0 })
    }

    fn read(&mut self, at: usize, length: usize) -> Vec<u8> {
        let skipped = at % UNIT_BYTES;
        let whole = self.memory.block((at / UNIT_BYTES) as u32, skipped + length);
        whole[skipped..].to_vec()
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        let (unit, skipped) = ((at / UNIT_BYTES) as u32, at % UNIT_BYTES);
        // What lies before in the unit is written again as it is; that is no access of its own.
        let mut whole = self.memory.block_again(unit, skipped + bytes.len()).to_vec();
        whole[skipped..].copy_from_slice(bytes);
        self.memory.write_block(unit, &[&whole]);
    }

    fn read_slots(&mut self, first: usize, count: usize) -> Slots {
        let size = self.shape.slot_bytes();
        self.read(first * size, count * size)
    }

    fn write_slots(&mut self, first: usize, slots: &[u8]) {
        self.write(first * self.shape.slot_bytes(), slots);
    }

    fn value_at(&self, value: u32) -> usize {
        self.values_at + value as usize * self.shape.granules() as usize * GRANULE
    }

    fn read_value(&mut self, value: u32) -> Vec<u8> {
        self.read(self.value_at(value), self.shape.value_bytes)
    }

    fn write_value(&mut self, value: u32, bytes: &[u8]) {
        self.write(self.value_at(value), bytes);
    }

    fn allocate(&mut self) -> Option<u32> {
        if let Some(value) = self.free.pop() {
            return Some(value);
        }
        let more = u64::from(self.taken) < self.shape.pairs;
        more.then(|| {
            self.taken += 1;
            self.taken - 1
        })
    }

    fn pointer(slot: &[u8]) -> Option<u32> {
        let bytes = slot.last_chunk::<POINTER_BYTES>().copied().unwrap_or_default();
        u32::from_le_bytes(bytes).checked_sub(1)
    }

    /// Key and pointer into a slot; its first byte stays.
    fn fill(slot: &mut [u8], key: &[u8], value: u32) {
        slot[1..=key.len()].copy_from_slice(key);
        slot[1 + key.len()..].copy_from_slice(&(value + 1).to_le_bytes());
    }

    fn holds(slot: &[u8], key: &[u8]) -> bool {
        Self::pointer(slot).is_some() && slot[1..=key.len()] == *key
    }

    fn accesses(&self) -> u64 {
        self.memory.reads + self.memory.writes
    }
}

fn hash(key: &[u8], seed: u64) -> u64 {
    let mut hash = seed;
    for part in key.chunks(8) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        hash = (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash = (hash ^ hash >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        hash ^= hash >> 32;
    }
    hash
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Cuckoo {
    store: Store,
    buckets: usize,
    random: Randomness,
}

impl Cuckoo {
    /// An empty store.
    ///
    /// Errors: the kernel has no memory.
    pub fn new(shape: Shape) -> std::io::Result<Self> {
        let buckets = (shape.slots() / WAYS).max(1);
        let store = Store::new(shape, buckets * WAYS)?;
        Ok(Self { store, buckets, random: Randomness::new(9) })
    }

    /// Tag, never 0, and first bucket.
    fn place(&self, key: &[u8]) -> (u8, usize) {
        let hash = hash(key, 1);
        (1 + (hash % 255) as u8, (hash >> 8) as usize % self.buckets)
    }

    /// The other bucket of a key with this tag; the other of that is the first again.
    fn other(&self, tag: u8, bucket: usize) -> usize {
        let sum = hash(&[tag], 2) as usize % self.buckets;
        (sum + self.buckets - bucket) % self.buckets
    }

    fn read_bucket(&mut self, bucket: usize) -> Slots {
        self.store.read_slots(bucket * WAYS, WAYS)
    }

    fn slot(&self, index: usize) -> std::ops::Range<usize> {
        let size = self.store.shape.slot_bytes();
        index * size..(index + 1) * size
    }

    /// Bucket, its slots and the slot that holds the key.
    fn find(&mut self, key: &[u8]) -> Result<(usize, Slots, usize), [(usize, Slots); 2]> {
        let (tag, first) = self.place(key);
        let second = self.other(tag, first);
        let size = self.store.shape.slot_bytes();
        let found = |slots: &Slots| {
            slots.chunks(size).position(|slot| slot[0] == tag && Store::holds(slot, key))
        };
        let slots = self.store.read_slots(first * WAYS, WAYS);
        if let Some(index) = found(&slots) {
            return Ok((first, slots, index));
        }
        let others = self.store.read_slots(second * WAYS, WAYS);
        match found(&others) {
            Some(index) => Ok((second, others, index)),
            None => Err([(first, slots), (second, others)]),
        }
    }

    fn free_slot(&self, slots: &Slots) -> Option<usize> {
        (0..WAYS).find(|index| Store::pointer(&slots[self.slot(*index)]).is_none())
    }

    /// A way from a full bucket to one with a free slot: buckets with what they hold and the slot that is moved on,
    /// or, in the last, the free one.
    fn way(&mut self, bucket: usize, slots: Slots) -> Option<Vec<(usize, Slots, usize)>> {
        let mut way: Vec<(usize, Slots, usize)> = Vec::new();
        let (mut at, mut slots) = (bucket, slots);
        while way.len() < LONGEST_WAY {
            if let Some(free) = self.free_slot(&slots) {
                way.push((at, slots, free));
                return Some(way);
            }
            // No bucket twice: a slot is moved once.
            let from = self.random.below(WAYS as u64) as usize;
            let (index, next) = (0..WAYS).map(|step| (from + step) % WAYS).find_map(|index| {
                let next = self.other(slots[self.slot(index)][0], at);
                (next != at && way.iter().all(|(passed, ..)| *passed != next))
                    .then_some((index, next))
            })?;
            way.push((at, slots, index));
            at = next;
            slots = self.read_bucket(at);
        }
        None
    }
}

impl Baseline for Cuckoo {
    fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let (_, slots, index) = self.find(key).ok()?;
        let value = Store::pointer(&slots[self.slot(index)])?;
        Some(self.store.read_value(value))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> bool {
        let places = match self.find(key) {
            Ok((_, slots, index)) => {
                if let Some(at) = Store::pointer(&slots[self.slot(index)]) {
                    self.store.write_value(at, value);
                }
                return true;
            }
            Err(places) => places,
        };
        let (tag, _) = self.place(key);
        let [(first, slots), (second, others)] = places;
        let begins = if self.free_slot(&slots).is_none() && self.free_slot(&others).is_some() {
            (second, others)
        } else {
            (first, slots)
        };
        let Some(mut way) = self.way(begins.0, begins.1) else { return false };
        let Some(at) = self.store.allocate() else { return false };
        self.store.write_value(at, value);
        // From the end: a pair is written to its new place before its old one is overwritten.
        for step in (1..way.len()).rev() {
            let (_, slots, index) = &way[step - 1];
            let moved = slots[self.slot(*index)].to_vec();
            let range = self.slot(way[step].2);
            let (bucket, slots, _) = &mut way[step];
            slots[range].copy_from_slice(&moved);
            self.store.write_slots(*bucket * WAYS, slots);
        }
        let range = self.slot(way[0].2);
        let (bucket, slots, _) = &mut way[0];
        let slot = &mut slots[range];
        slot[0] = tag;
        Store::fill(slot, key, at);
        self.store.write_slots(*bucket * WAYS, slots);
        true
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        let Ok((bucket, mut slots, index)) = self.find(key) else { return false };
        let range = self.slot(index);
        let value = Store::pointer(&slots[range.clone()]);
        slots[range].fill(0);
        self.store.write_slots(bucket * WAYS, &slots);
        self.store.free.extend(value);
        true
    }

    fn accesses(&self) -> u64 {
        self.store.accesses()
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Hopscotch {
    store: Store,
    /// Slots that are homes; some more lie behind.
    homes: usize,
    slots: usize,
}

impl Hopscotch {
    /// An empty store.
    ///
    /// Errors: the kernel has no memory.
    pub fn new(shape: Shape) -> std::io::Result<Self> {
        let slots = shape.slots().max(2 * NEIGHBOURHOOD);
        let store = Store::new(shape, slots)?;
        Ok(Self { store, homes: slots - NEIGHBOURHOOD + 1, slots })
    }

    fn home(&self, key: &[u8]) -> usize {
        (hash(key, 3) % self.homes as u64) as usize
    }

    fn slot(&self, index: usize) -> std::ops::Range<usize> {
        let size = self.store.shape.slot_bytes();
        index * size..(index + 1) * size
    }

    /// The neighbourhood, and where in it the key lies.
    fn find(&mut self, key: &[u8]) -> (Slots, Option<usize>) {
        let home = self.home(key);
        let slots = self.store.read_slots(home, NEIGHBOURHOOD);
        let bitmap = slots[0];
        let found = (0..NEIGHBOURHOOD)
            .find(|index| bitmap >> index & 1 == 1 && Store::holds(&slots[self.slot(*index)], key));
        (slots, found)
    }

    /// The nearest free slot from `home` on, whose neighbourhood was read.
    fn free_slot(&mut self, home: usize, slots: &Slots) -> Option<usize> {
        let free = |slots: &Slots, count: usize| {
            (0..count).find(|index| Store::pointer(&slots[self.slot(*index)]).is_none())
        };
        if let Some(index) = free(slots, NEIGHBOURHOOD) {
            return Some(home + index);
        }
        let mut at = home + NEIGHBOURHOOD;
        while at < self.slots && at < home + PROBED {
            let count = NEIGHBOURHOOD.min(self.slots - at);
            let slots = self.store.read_slots(at, count);
            let size = self.store.shape.slot_bytes();
            let found = slots.chunks(size).position(|slot| Store::pointer(slot).is_none());
            if let Some(index) = found {
                return Some(at + index);
            }
            at += count;
        }
        None
    }

    /// Moves a pair from before `free` there and returns the slot that is free then.
    fn hop(&mut self, free: usize) -> Option<usize> {
        let first = free.checked_sub(NEIGHBOURHOOD - 1)?;
        let mut slots = self.store.read_slots(first, NEIGHBOURHOOD);
        // The home farthest away first, and its first pair: the longest hop.
        let (home, from) = (0..NEIGHBOURHOOD - 1).find_map(|home| {
            let bitmap = slots[self.slot(home)][0];
            let offset = bitmap.trailing_zeros() as usize;
            (home + offset < NEIGHBOURHOOD - 1).then_some((home, home + offset))
        })?;
        let to = NEIGHBOURHOOD - 1;
        let moved = slots[self.slot(from)][1..].to_vec();
        let (source, target) = (self.slot(from), self.slot(to));
        slots[target.start + 1..target.end].copy_from_slice(&moved);
        slots[source.start + 1..source.end].fill(0);
        let bitmap = &mut slots[self.slot(home).start];
        *bitmap = *bitmap & !(1 << (from - home)) | 1 << (to - home);
        let begins = self.slot(home).start;
        self.store.write_slots(first + home, &slots[begins..]);
        Some(first + from)
    }
}

impl Baseline for Hopscotch {
    fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let (slots, found) = self.find(key);
        let value = Store::pointer(&slots[self.slot(found?)])?;
        Some(self.store.read_value(value))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> bool {
        let (mut slots, found) = self.find(key);
        if let Some(index) = found {
            if let Some(at) = Store::pointer(&slots[self.slot(index)]) {
                self.store.write_value(at, value);
            }
            return true;
        }
        let home = self.home(key);
        let Some(mut free) = self.free_slot(home, &slots) else { return false };
        let hops = free >= home + NEIGHBOURHOOD;
        while free >= home + NEIGHBOURHOOD {
            let Some(nearer) = self.hop(free) else { return false };
            free = nearer;
        }
        let Some(at) = self.store.allocate() else { return false };
        self.store.write_value(at, value);
        if hops {
            // The hops may have changed the neighbourhood.
            slots = self.store.read_slots(home, NEIGHBOURHOOD);
        }
        let range = self.slot(free - home);
        Store::fill(&mut slots[range.clone()], key, at);
        slots[0] |= 1 << (free - home);
        self.store.write_slots(home, &slots[..range.end]);
        true
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        let (mut slots, Some(index)) = self.find(key) else { return false };
        let range = self.slot(index);
        let value = Store::pointer(&slots[range.clone()]);
        slots[range.start + 1..range.end].fill(0);
        slots[0] &= !(1 << index);
        self.store.write_slots(self.home(key), &slots[..range.end]);
        self.store.free.extend(value);
        true
    }

    fn accesses(&self) -> u64 {
        self.store.accesses()
    }
}

/// Accesses of a store at a utilisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Mean of a GET that finds its key.
    pub get: f64,
    /// Mean of a PUT of a new key, over the last twentieth.
    pub insert: f64,
    /// Standard deviation of that.
    pub insert_spread: f64,
}

/// Fills a store with so many pairs, and asks for some; `None` where they do not fit.
#[must_use]
pub fn measure(store: &mut dyn Baseline, shape: Shape) -> Option<Costs> {
    let key = |number: u64| {
        let mut key = [0; 16];
        key[..8].copy_from_slice(&number.to_le_bytes());
        key
    };
    let value = vec![1; shape.value_bytes];
    let last = shape.pairs - shape.pairs / 20;
    let mut costs = Vec::new();
    for number in 0..shape.pairs {
        let before = store.accesses();
        if !store.put(&key(number)[..shape.key_bytes], &value) {
            return None;
        }
        if number >= last {
            costs.push((store.accesses() - before) as f64);
        }
    }
    let step = (shape.pairs / 20_000).max(1) as usize;
    let before = store.accesses();
    let mut count = 0_u64;
    for number in (0..shape.pairs).step_by(step) {
        store.get(&key(number)[..shape.key_bytes])?;
        count += 1;
    }
    let get = (store.accesses() - before) as f64 / count.max(1) as f64;
    let insert = costs.iter().sum::<f64>() / costs.len().max(1) as f64;
    let variance =
        costs.iter().map(|cost| (cost - insert).powi(2)).sum::<f64>() / costs.len().max(1) as f64;
    Some(Costs { get, insert, insert_spread: variance.sqrt() })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const SHAPE: Shape = Shape { key_bytes: 5, value_bytes: 5, memory_bytes: 40_000, pairs: 2000 };

    /// Random operations on few keys, against a map; memory is full now and then.
    fn agree_with_a_map(store: &mut dyn Baseline) {
        let mut map: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        let mut random = Randomness::new(4);
        let mut refused = 0;
        for step in 0..200_000_u64 {
            let number = random.below(2600).to_le_bytes();
            let key = &number[..5];
            // Phases of growth and of shrinking.
            let puts = if step / 20_000 % 2 == 0 { 60 } else { 20 };
            let draw = random.below(100);
            if draw < puts {
                let value = random.next_u64().to_le_bytes()[..5].to_vec();
                if store.put(key, &value) {
                    map.insert(key.to_vec(), value);
                } else {
                    refused += 1;
                    assert_eq!(store.get(key).as_ref(), map.get(key), "a refused PUT changed it");
                    assert!(!map.contains_key(key), "a value in place needs no room");
                }
            } else if draw < 80 {
                assert_eq!(store.get(key).as_ref(), map.get(key), "step {step}");
            } else {
                assert_eq!(store.delete(key), map.remove(key).is_some(), "step {step}");
            }
        }
        for (key, value) in &map {
            assert_eq!(store.get(key).as_ref(), Some(value));
        }
        assert!(refused > 0, "memory was never full");
    }

    #[test]
    fn the_cuckoo_store_agrees_with_a_map() {
        agree_with_a_map(&mut Cuckoo::new(SHAPE).unwrap());
    }

    #[test]
    fn the_hopscotch_store_agrees_with_a_map() {
        agree_with_a_map(&mut Hopscotch::new(SHAPE).unwrap());
    }

    #[test]
    fn puts_cost_more_and_fluctuate_as_memory_fills_and_neither_holds_more_than_the_papers_55_percent()
     {
        let at = |utilisation| Shape::for_utilisation((5, 5), 4 << 20, utilisation);
        let cuckoo =
            |utilisation| measure(&mut Cuckoo::new(at(utilisation)).unwrap(), at(utilisation));
        let hopscotch =
            |utilisation| measure(&mut Hopscotch::new(at(utilisation)).unwrap(), at(utilisation));
        let (half, fuller) = (cuckoo(0.40).unwrap(), cuckoo(0.52).unwrap());
        assert!((2.0..3.0).contains(&half.get) && half.insert >= 4.0, "{half:?}");
        assert!(fuller.insert > half.insert && fuller.insert_spread > half.insert_spread);
        assert!(fuller.insert_spread > 1.0, "{fuller:?}");
        let (less, more) = (hopscotch(0.20).unwrap(), hopscotch(0.35).unwrap());
        assert!((less.get - 2.0).abs() < 1e-9 && (more.get - 2.0).abs() < 1e-9, "{more:?}");
        assert!(more.insert > less.insert, "{less:?} {more:?}");
        assert!(cuckoo(0.56).is_none() && hopscotch(0.56).is_none());
    }
}
