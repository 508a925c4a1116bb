//! The keys of an ordered namespace in one shard, in the order of their bytes.
//!
//! ```text
//! BTreeMap: least key ─▶ leaf: [key key key …] in one piece of memory, ends of keys beside it
//! ```
//!
//! Beside the hash index, not instead of it: a key here says that the key is live, and the index
//! says where its newest entry lies. Volatile; an opening builds it with one sort.
//!
//! Memory: the key's bytes, 4 for where it ends, and a quarter of slack at most while leaves grow.

use std::collections::BTreeMap;
use std::ops::Bound;

/// A leaf with more keys splits.
const LEAF_KEYS: usize = 128;
/// A leaf with more bytes splits, as long as it has two keys.
const LEAF_BYTES: usize = 8 << 10;
/// Leaves are filled so far when they are built from a sorted run.
const BUILT_KEYS: usize = 96;

/// Keys in a row, in one piece of memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keys {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Keys {
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    fn start(&self, at: usize) -> usize {
        at.checked_sub(1).map_or(0, |before| self.ends[before] as usize)
    }

    pub fn get(&self, at: usize) -> &[u8] {
        &self.bytes[self.start(at)..self.ends[at] as usize]
    }

    pub fn push(&mut self, key: &[u8]) {
        self.bytes.extend_from_slice(key);
        self.ends.push(self.bytes.len() as u32);
    }

    /// The first place whose key is not less (or, beyond an equal one, greater).
    fn place(&self, key: &[u8], beyond_equal: bool) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = (low + high) / 2;
            let order = self.get(middle).cmp(key);
            if order.is_lt() || (beyond_equal && order.is_eq()) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    fn insert(&mut self, at: usize, key: &[u8]) {
        let start = self.start(at);
        if self.bytes.capacity() - self.bytes.len() < key.len() {
            // A quarter at a time: doubling would leave half of all leaves unused.
            self.bytes.reserve_exact(key.len().max(self.bytes.len() / 4));
        }
        if self.ends.len() == self.ends.capacity() {
            self.ends.reserve_exact((self.ends.len() / 4).max(4));
        }
        let tail = self.bytes.len();
        self.bytes.extend_from_slice(key);
        self.bytes[start..].rotate_right(key.len());
        debug_assert_eq!(self.bytes.len(), tail + key.len());
        self.ends.insert(at, start as u32);
        for end in &mut self.ends[at..] {
            *end += key.len() as u32;
        }
    }

    fn remove(&mut self, at: usize) {
        let (start, end) = (self.start(at), self.ends[at] as usize);
        self.bytes.drain(start..end);
        self.ends.remove(at);
        for later in &mut self.ends[at..] {
            *later -= (end - start) as u32;
        }
    }

    /// Takes the keys from `at` on away.
    fn split_off(&mut self, at: usize) -> Self {
        let start = self.start(at);
        let mut ends = self.ends.split_off(at);
        for end in &mut ends {
            *end -= start as u32;
        }
        let taken = Self { bytes: self.bytes.split_off(start), ends };
        self.bytes.shrink_to_fit();
        self.ends.shrink_to_fit();
        taken
    }

    fn append(&mut self, other: &Self) {
        let start = self.bytes.len() as u32;
        self.bytes.extend_from_slice(&other.bytes);
        self.ends.extend(other.ends.iter().map(|end| end + start));
    }

    fn is_large(&self) -> bool {
        self.len() > LEAF_KEYS || (self.bytes.len() > LEAF_BYTES && self.len() > 1)
    }

    fn memory_bytes(&self) -> usize {
        self.bytes.capacity() + self.ends.capacity() * size_of::<u32>()
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Ordered {
    /// Least key a leaf may hold, and the leaf. No leaf is empty.
    leaves: BTreeMap<Box<[u8]>, Keys>,
    keys: usize,
    leaf_bytes: usize,
}

impl Ordered {
    /// The keys of `sorted`, which are in order and different.
    pub fn from_sorted<'k>(sorted: impl Iterator<Item = &'k [u8]>) -> Self {
        let mut built = Self::default();
        let mut leaf = Keys::default();
        let mut push = |leaf: &mut Keys| {
            let mut leaf = std::mem::take(leaf);
            leaf.bytes.shrink_to_fit();
            leaf.ends.shrink_to_fit();
            built.keys += leaf.len();
            built.leaf_bytes += leaf.memory_bytes();
            built.leaves.insert(leaf.get(0).into(), leaf);
        };
        for key in sorted {
            debug_assert!(leaf.len() == 0 || leaf.get(leaf.len() - 1) < key, "in order");
            if leaf.len() >= BUILT_KEYS
                || (leaf.len() > 0 && leaf.bytes.len() + key.len() > LEAF_BYTES)
            {
                push(&mut leaf);
            }
            leaf.push(key);
        }
        if leaf.len() > 0 {
            push(&mut leaf);
        }
        built
    }

    /// Number of keys.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.keys
    }

    /// Bytes of memory, allocations and nodes of the map included (these as an estimate).
    pub fn memory_bytes(&self) -> u64 {
        let nodes: usize = self.leaves.len() * (size_of::<Box<[u8]>>() + size_of::<Keys>()) * 4 / 3;
        // A separator is some key of its leaf.
        let separators = self.leaf_bytes / self.keys.max(1) * self.leaves.len();
        (nodes + separators + self.leaf_bytes) as u64
    }

    fn change(
        leaf_bytes: &mut usize,
        leaf: &mut Keys,
        change: impl FnOnce(&mut Keys) -> Option<Keys>,
    ) -> Option<Keys> {
        let before = leaf.memory_bytes();
        let split = change(leaf);
        *leaf_bytes = *leaf_bytes + leaf.memory_bytes() - before;
        split
    }

    /// Adds a key; false when it was there.
    pub fn insert(&mut self, key: &[u8]) -> bool {
        let below = (Bound::Unbounded, Bound::Included(key));
        // A key below all leaves goes to the first, whose separator then is that key.
        let found = self.leaves.range_mut::<[u8], _>(below).next_back();
        let Some((_, leaf)) = found else {
            let mut leaf = match self.leaves.pop_first() {
                Some((_, leaf)) => leaf,
                None => Keys::default(),
            };
            let split = Self::change(&mut self.leaf_bytes, &mut leaf, |leaf| {
                leaf.insert(0, key);
                leaf.is_large().then(|| leaf.split_off(leaf.len() / 2))
            });
            self.leaves.insert(key.into(), leaf);
            self.keys += 1;
            self.add_leaf(split);
            return true;
        };
        let at = leaf.place(key, false);
        if at < leaf.len() && leaf.get(at) == key {
            return false;
        }
        let split = Self::change(&mut self.leaf_bytes, leaf, |leaf| {
            leaf.insert(at, key);
            // Keys that come in order fill leaves up: the new leaf takes the last key alone.
            let half = if at + 1 == leaf.len() { at } else { leaf.len() / 2 };
            leaf.is_large().then(|| leaf.split_off(half))
        });
        self.keys += 1;
        self.add_leaf(split);
        true
    }

    fn add_leaf(&mut self, leaf: Option<Keys>) {
        if let Some(leaf) = leaf {
            self.leaf_bytes += leaf.memory_bytes();
            self.leaves.insert(leaf.get(0).into(), leaf);
        }
    }

    /// Removes a key; false when it was not there.
    pub fn remove(&mut self, key: &[u8]) -> bool {
        let below = (Bound::Unbounded, Bound::Included(key));
        let Some((separator, leaf)) = self.leaves.range_mut::<[u8], _>(below).next_back() else {
            return false;
        };
        let at = leaf.place(key, false);
        if at >= leaf.len() || leaf.get(at) != key {
            return false;
        }
        leaf.remove(at);
        self.keys -= 1;
        let left = leaf.len();
        if left < LEAF_KEYS / 8 {
            let separator = separator.clone();
            self.merge(&separator);
        }
        true
    }

    /// Joins a leaf that became small with the one behind it, where both fit well into one.
    fn merge(&mut self, separator: &[u8]) {
        let Some(leaf) = self.leaves.get(separator) else { return };
        if leaf.len() == 0 {
            self.leaf_bytes -= leaf.memory_bytes();
            self.leaves.remove(separator);
            return;
        }
        let behind = (Bound::Excluded(separator), Bound::Unbounded);
        let Some((next, other)) = self.leaves.range::<[u8], _>(behind).next() else { return };
        let fits = leaf.len() + other.len() <= LEAF_KEYS / 2
            && leaf.bytes.len() + other.bytes.len() <= LEAF_BYTES / 2;
        if !fits {
            return;
        }
        let next = next.clone();
        let Some(other) = self.leaves.remove(&next) else { return };
        self.leaf_bytes -= other.memory_bytes();
        if let Some(leaf) = self.leaves.get_mut(separator) {
            Self::change(&mut self.leaf_bytes, leaf, |leaf| {
                leaf.append(&other);
                leaf.bytes.shrink_to_fit();
                None
            });
        }
    }

    /// Puts up to `limit` keys within the bounds into `out`, from the least on, or from the
    /// greatest down. Fewer than `limit`: there are no more.
    pub fn collect(
        &self,
        (from, to): (Bound<&[u8]>, Bound<&[u8]>),
        backward: bool,
        limit: usize,
        out: &mut Keys,
    ) {
        out.clear();
        if is_empty(from, to) {
            return;
        }
        let least = match from {
            Bound::Included(key) | Bound::Excluded(key) => key,
            Bound::Unbounded => &[],
        };
        let mut below = self.leaves.range::<[u8], _>((Bound::Unbounded, Bound::Included(least)));
        let first = below.next_back().map_or(least, |(separator, _)| separator);
        let leaves = self.leaves.range::<[u8], _>((Bound::Included(first), to));
        let within = |leaf: &Keys| {
            let start = match from {
                Bound::Included(key) => leaf.place(key, false),
                Bound::Excluded(key) => leaf.place(key, true),
                Bound::Unbounded => 0,
            };
            let end = match to {
                Bound::Included(key) => leaf.place(key, true),
                Bound::Excluded(key) => leaf.place(key, false),
                Bound::Unbounded => leaf.len(),
            };
            start..end
        };
        if backward {
            for (_, leaf) in leaves.rev() {
                for at in within(leaf).rev() {
                    if out.len() == limit {
                        return;
                    }
                    out.push(leaf.get(at));
                }
            }
        } else {
            for (_, leaf) in leaves {
                for at in within(leaf) {
                    if out.len() == limit {
                        return;
                    }
                    out.push(leaf.get(at));
                }
            }
        }
    }
}

/// True when nothing can lie between the bounds; a map's range would panic on some of these.
fn is_empty(from: Bound<&[u8]>, to: Bound<&[u8]>) -> bool {
    match (from, to) {
        (Bound::Included(from), Bound::Included(to)) => from > to,
        (
            Bound::Included(from) | Bound::Excluded(from),
            Bound::Included(to) | Bound::Excluded(to),
        ) => from >= to,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn met(
        ordered: &Ordered,
        bounds: (Bound<&[u8]>, Bound<&[u8]>),
        backward: bool,
    ) -> Vec<Vec<u8>> {
        let (mut met, mut keys) = (Vec::new(), Keys::default());
        let (mut from, mut to): (Bound<Vec<u8>>, Bound<Vec<u8>>) =
            (bounds.0.map(<[u8]>::to_vec), bounds.1.map(<[u8]>::to_vec));
        loop {
            ordered.collect(
                (from.as_ref().map(Vec::as_slice), to.as_ref().map(Vec::as_slice)),
                backward,
                7,
                &mut keys,
            );
            met.extend((0..keys.len()).map(|at| keys.get(at).to_vec()));
            if keys.len() < 7 {
                return met;
            }
            let last = Bound::Excluded(keys.get(6).to_vec());
            if backward { to = last } else { from = last }
        }
    }

    fn key(random: u64) -> Vec<u8> {
        let mut key = (random % 3000).to_be_bytes()[5..].to_vec();
        // Some long ones, so that leaves split by bytes, too.
        key.resize(3 + (random % 3000) as usize % 11 * (random % 3000) as usize % 400, 7);
        key
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn keys_in_leaves_agree_with_a_set(seed: u64, shrinks: bool) {
            let (mut ordered, mut model) = (Ordered::default(), BTreeSet::new());
            let mut random = seed | 1;
            for turn in 0..6000_u32 {
                random ^= random << 13; random ^= random >> 7; random ^= random << 17;
                let key = key(random >> 8);
                let removes = if shrinks && turn > 3000 { 9 } else { 4 };
                if random % 10 < removes {
                    prop_assert_eq!(ordered.remove(&key), model.remove(&key));
                } else {
                    prop_assert_eq!(ordered.insert(&key), model.insert(key));
                }
            }
            prop_assert_eq!(ordered.len(), model.len());
            let kept: usize = ordered.leaves.values().map(Keys::memory_bytes).sum();
            prop_assert_eq!(ordered.leaf_bytes, kept);
            let built = Ordered::from_sorted(model.iter().map(Vec::as_slice));
            let ends = [key(random), key(random >> 9), key(random >> 20)];
            let mut bounds = vec![Bound::Unbounded];
            bounds.extend(ends.iter().map(|key| Bound::Included(key.as_slice())));
            bounds.extend(ends.iter().map(|key| Bound::Excluded(key.as_slice())));
            for ordered in [&ordered, &built] {
                for from in &bounds {
                    for to in &bounds {
                        let inside = |key: &&Vec<u8>| {
                            let key = key.as_slice();
                            (match from { Bound::Included(from) => key >= *from, Bound::Excluded(from) => key > *from, Bound::Unbounded => true })
                                && (match to { Bound::Included(to) => key <= *to, Bound::Excluded(to) => key < *to, Bound::Unbounded => true })
                        };
                        let mut expected: Vec<_> = model.iter().filter(inside).cloned().collect();
                        prop_assert_eq!(&met(ordered, (*from, *to), false), &expected);
                        expected.reverse();
                        prop_assert_eq!(&met(ordered, (*from, *to), true), &expected);
                    }
                }
            }
        }
    }

    #[test]
    #[allow(clippy::print_stdout, reason = "the figure is in docs/kv-namespaces.md")]
    fn memory_per_key_stays_near_the_key_itself() {
        for in_order in [true, false] {
            let mut ordered = Ordered::default();
            for n in 0..100_000_u64 {
                let n = if in_order { n } else { n.wrapping_mul(0x9E37_79B9_7F4A_7C15) };
                ordered.insert(format!("{n:016x}").as_bytes());
            }
            let each = ordered.memory_bytes() as f64 / 1e5;
            println!("in order {in_order}: {each:.1} bytes a key of 16");
            assert!(each < 32.0, "{each}");
        }
    }
}
