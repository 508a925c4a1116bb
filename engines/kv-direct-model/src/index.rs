//! The index of `kv-direct` over a memory that counts: accesses of an operation, and what to choose.
//!
//! Source: spec/kv-direct.md 5.1 (tuning), 8 (figures 5.8 to 5.11).

use std::sync::Arc;

use beeline_kv_direct::bucket::INLINE_LIMIT;
use beeline_kv_direct::memory::{HostMemory, Memory as _, MemoryAccess, Traced};
use beeline_kv_direct::slab::{SlabCache, SlabPools};
use beeline_kv_direct::table::{Table, TableOptions, layout};

/// Bytes of pairs, key and value: each of `least`, five more and so on up to `most` as often as the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Shortest, 5 or more.
    pub least: usize,
    /// Longest.
    pub most: usize,
}

impl Sizes {
    /// All pairs of one length.
    #[must_use]
    pub const fn one(bytes: usize) -> Self {
        Self { least: bytes, most: bytes }
    }

    fn steps(self) -> usize {
        self.most.saturating_sub(self.least) / 5 + 1
    }

    fn mean(self) -> f64 {
        self.least as f64 + 5.0 * (self.steps() - 1) as f64 / 2.0
    }

    /// Bytes of pair `number`.
    fn of_pair(self, number: u64) -> usize {
        let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        self.least + 5 * (mixed as usize % self.steps())
    }

    /// Inline thresholds that differ for these pairs: none, or up to one of their sizes.
    fn thresholds(self) -> impl Iterator<Item = usize> {
        let sizes = (0..self.steps()).map(move |step| self.least + 5 * step);
        sizes.take_while(|size| *size <= INLINE_LIMIT).chain([0])
    }
}

/// How a table is made and filled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Filling {
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// Bytes of pairs.
    pub sizes: Sizes,
    /// Share of memory that pairs take.
    pub utilisation: f64,
    /// Share of memory that is the index, in thousandths.
    pub index_permille: u32,
    /// Longest pair in the index.
    pub inline_threshold: usize,
}

/// Mean accesses of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Of a GET that finds its key.
    pub get: f64,
    /// Of a PUT that replaces a value of the same length.
    pub put: f64,
    /// Of a PUT of a new key, over the last twentieth.
    pub insert: f64,
    /// Standard deviation of that.
    pub insert_spread: f64,
}

/// A filled table.
#[derive(Debug)]
pub struct Filled {
    table: Table<Traced<HostMemory>>,
    pairs: u64,
    sizes: Sizes,
    /// As long as the longest value.
    value: Vec<u8>,
    insert: f64,
    insert_spread: f64,
}

const KEY_BYTES: usize = 4;

impl Filled {
    /// Fills a table; `None` where the pairs do not fit.
    ///
    /// Errors: the kernel has no memory.
    pub fn new(filling: &Filling) -> std::io::Result<Option<Self>> {
        let options = TableOptions {
            index_permille: filling.index_permille,
            inline_threshold: filling.inline_threshold,
            seed: 7,
        };
        let memory = HostMemory::new(filling.memory_bytes)?;
        let (first, end) = layout(memory.length_bytes(), options.index_permille);
        let slabs = SlabCache::new(Arc::new(SlabPools::new(first, end)), false);
        let mut table = Table::new(Traced::recording(memory), slabs, options);
        let sizes = filling.sizes;
        let value = vec![1; sizes.most];
        let bytes = filling.memory_bytes as f64 * filling.utilisation;
        let pairs = (bytes / sizes.mean()) as u64;
        let mut accesses = Vec::new();
        let mut last = Vec::new();
        for number in 0..pairs {
            let key = (number as u32).to_le_bytes();
            let value = &value[..sizes.of_pair(number).saturating_sub(KEY_BYTES)];
            if table.put(table.place(&key), &key, value).is_err() {
                return Ok(None);
            }
            accesses.clear();
            table.memory().take(&mut accesses);
            if number >= pairs - pairs / 20 {
                last.push(accesses.len() as f64);
            }
        }
        let mean = last.iter().sum::<f64>() / last.len().max(1) as f64;
        let variance =
            last.iter().map(|cost| (cost - mean).powi(2)).sum::<f64>() / last.len().max(1) as f64;
        Ok(Some(Self { table, pairs, sizes, value, insert: mean, insert_spread: variance.sqrt() }))
    }

    /// Pairs stored.
    #[must_use]
    pub fn pairs(&self) -> u64 {
        self.pairs
    }

    /// Reads one pair; its accesses go to `into`.
    pub fn get(&mut self, number: u64, into: &mut Vec<MemoryAccess>) {
        let key = (number as u32).to_le_bytes();
        self.table.get(self.table.place(&key), &key, |_| ());
        self.table.memory().take(into);
    }

    /// Replaces one pair; its accesses go to `into`.
    pub fn put(&mut self, number: u64, into: &mut Vec<MemoryAccess>) {
        let key = (number as u32).to_le_bytes();
        // A value of the same length takes the place of the old one: that does not fail.
        let value = &self.value[..self.sizes.of_pair(number).saturating_sub(KEY_BYTES)];
        let _ = self.table.put(self.table.place(&key), &key, value);
        self.table.memory().take(into);
    }

    /// Accesses of GETs and PUTs over a part of the pairs.
    #[must_use]
    pub fn costs(&mut self) -> Costs {
        let step = (self.pairs / 20_000).max(1);
        let mut accesses = Vec::new();
        let (mut gets, mut puts, mut count) = (0, 0, 0_u64);
        for number in (0..self.pairs).step_by(step as usize) {
            self.get(number, &mut accesses);
            gets += accesses.len();
            accesses.clear();
            self.put(number, &mut accesses);
            puts += accesses.len();
            accesses.clear();
            count += 1;
        }
        let mean = |sum: usize| sum as f64 / count.max(1) as f64;
        Costs {
            get: mean(gets),
            put: mean(puts),
            insert: self.insert,
            insert_spread: self.insert_spread,
        }
    }
}

/// The largest index, in thousandths, with which the pairs of `filling` still fit; `None` where none does.
/// Its own `index_permille` does not matter.
///
/// Errors: the kernel has no memory.
pub fn largest_index(filling: &Filling) -> std::io::Result<Option<u32>> {
    let fits = |permille: u32| {
        let filling = Filling { index_permille: permille, ..*filling };
        Ok::<_, std::io::Error>(Filled::new(&filling)?.is_some())
    };
    // Too small an index needs chained buckets and may not fit either: the search begins where it can.
    let Some(mut low) = [900, 700, 500, 300, 100, 20]
        .into_iter()
        .map(|permille| Ok::<_, std::io::Error>((permille, fits(permille)?)))
        .find_map(|tried| match tried {
            Ok((permille, true)) => Some(Ok(permille)),
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        })
        .transpose()?
    else {
        return Ok(None);
    };
    let mut high = 1000;
    while high - low > 1 {
        let middle = u32::midpoint(low, high);
        if fits(middle)? { low = middle } else { high = middle }
    }
    Ok(Some(low))
}

/// What to choose for pairs of a size at a utilisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Share of the index, in thousandths.
    pub index_permille: u32,
    /// Longest inline pair.
    pub inline_threshold: usize,
    /// What operations cost then.
    pub costs: Costs,
}

/// The inline threshold and the largest index for it that make an equal mixture of GETs and PUTs cost the
/// fewest accesses; `None` where the pairs fit with neither.
///
/// Errors: the kernel has no memory.
pub fn tune(memory_bytes: u64, sizes: Sizes, utilisation: f64) -> std::io::Result<Option<Choice>> {
    let mut best: Option<Choice> = None;
    for inline_threshold in sizes.thresholds() {
        let filling =
            Filling { memory_bytes, sizes, utilisation, index_permille: 0, inline_threshold };
        let Some(index_permille) = largest_index(&filling)? else { continue };
        let Some(mut filled) = Filled::new(&Filling { index_permille, ..filling })? else {
            continue;
        };
        let costs = filled.costs();
        let cost = |costs: &Costs| costs.get + costs.put;
        if best.is_none_or(|best| cost(&costs) < cost(&best.costs)) {
            best = Some(Choice { index_permille, inline_threshold, costs });
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baselines::{Cuckoo, Shape, measure};

    const MEMORY: u64 = 8 << 20;

    fn filling(utilisation: f64, index_permille: u32, inline_threshold: usize) -> Filling {
        Filling {
            memory_bytes: MEMORY,
            sizes: Sizes::one(10),
            utilisation,
            index_permille,
            inline_threshold,
        }
    }

    #[test]
    fn accesses_grow_with_utilisation_and_come_near_the_papers() {
        // The allocator keeps some hundred blocks of each class in its stacks: much of a small memory.
        let get = |utilisation| {
            let filling = Filling { memory_bytes: 32 << 20, ..filling(utilisation, 800, 10) };
            Filled::new(&filling).unwrap().unwrap().costs().get
        };
        let found = [0.2, 0.4, 0.5].map(get);
        assert!(found.is_sorted(), "{found:?}");
        assert!((1.0..1.21).contains(&found[2]), "{} where 1.10 is the reference", found[2]);
    }

    #[test]
    fn the_tuners_index_fits_the_next_larger_does_not_and_inline_beats_blocks() {
        let chosen = tune(MEMORY, Sizes::one(10), 0.4).unwrap().unwrap();
        assert_eq!(chosen.inline_threshold, 10);
        assert!(chosen.costs.get < 1.2 && chosen.costs.put < 2.3, "{chosen:?}");
        let fits = |permille| Filled::new(&filling(0.4, permille, 10)).unwrap().is_some();
        assert!(fits(chosen.index_permille));
        assert!(chosen.index_permille == 999 || !fits(chosen.index_permille + 1));
        // A threshold below the pairs' size sends them to blocks of 32 bytes: they do not fit, or cost more.
        let blocks = filling(0.4, 0, 0);
        if let Some(permille) = largest_index(&blocks).unwrap() {
            let blocks = Filling { index_permille: permille, ..blocks };
            let costs = Filled::new(&blocks).unwrap().unwrap().costs();
            assert!(costs.get > chosen.costs.get);
        }
        assert!(tune(MEMORY, Sizes::one(10), 0.99).unwrap().is_none(), "nothing holds that much");
    }

    #[test]
    fn puts_fluctuate_less_than_those_of_cuckoo_hashing_at_half() {
        let chosen = tune(16 << 20, Sizes::one(10), 0.5).unwrap().unwrap();
        let shape = Shape::for_utilisation((5, 5), 16 << 20, 0.5);
        let cuckoo = measure(&mut Cuckoo::new(shape).unwrap(), shape).unwrap();
        assert!(chosen.costs.insert_spread < cuckoo.insert_spread, "{chosen:?} {cuckoo:?}");
    }

    #[test]
    fn the_tuners_threshold_costs_less_than_its_neighbours_where_sizes_differ() {
        let sizes = Sizes { least: 10, most: 40 };
        let chosen = tune(MEMORY, sizes, 0.4).unwrap().unwrap();
        let cost = |costs: &Costs| costs.get + costs.put;
        for inline_threshold in sizes.thresholds() {
            let filling =
                Filling { sizes, inline_threshold, utilisation: 0.4, ..filling(0.4, 0, 0) };
            let Some(index_permille) = largest_index(&filling).unwrap() else { continue };
            let other = Filled::new(&Filling { index_permille, ..filling }).unwrap().unwrap();
            let (best, other) = (cost(&chosen.costs), cost(&{ other }.costs()));
            assert!(best <= other, "{chosen:?}, but {other} with {inline_threshold}");
        }
    }
}
