//! The processor's half: stacks of its own, filled and emptied a batch at a time.
//!
//! Source: spec/kv-direct.md 5.2.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::slab::daemon::LOW_WATERMARK;
use crate::slab::{BATCH, CLASSES, Class, Entry, SlabPools};

/// More entries than this, and a batch goes back to the shared stack.
const HIGH: usize = 4 * BATCH;
/// How long an allocation that found nothing waits for the daemon's pass.
const PATIENCE: Duration = Duration::from_millis(200);
/// After a wait that brought nothing, a class is refused without a wait for this many times as long:
/// requests that find memory full hold the processor for a small share of its time.
const REFUSALS_PER_WAIT: u32 = 64;
/// The wait is taken to have lasted at least this long.
const SHORTEST_WAIT: Duration = Duration::from_micros(50);

/// What the allocator did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlabCounters {
    /// Blocks allocated.
    pub allocations: u64,
    /// Blocks freed.
    pub frees: u64,
    /// Batches moved between the processor and shared memory: one access each.
    pub transfers: u64,
    /// Allocations that waited for the daemon.
    pub waits: u64,
    /// Allocations refused without a wait, because one had just brought nothing.
    pub refused_at_once: u64,
    /// Bytes in blocks that are allocated.
    pub allocated_bytes: u64,
}

/// A block that is being carved into smaller ones.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    base: u32,
    units_left: u32,
}

/// See the module's documentation. Stays with its processor.
#[derive(Debug)]
pub struct SlabCache {
    pools: Arc<SlabPools>,
    /// The left end is the back.
    stacks: [Vec<Entry>; CLASSES],
    runs: [Run; CLASSES],
    counters: SlabCounters,
    /// Until when a class is refused without a wait.
    refuse_until: [Option<Instant>; CLASSES],
    /// Whether a daemon's thread answers; without one, `tend` runs here.
    has_daemon: bool,
}

impl SlabCache {
    /// The processor's side of `pools`. With `has_daemon` a shortage waits for the daemon's thread;
    /// otherwise the daemon's work is done by the caller that runs short.
    #[must_use]
    pub fn new(pools: Arc<SlabPools>, has_daemon: bool) -> Self {
        Self {
            pools,
            stacks: std::array::from_fn(|_| Vec::with_capacity(HIGH + BATCH)),
            runs: [Run::default(); CLASSES],
            counters: SlabCounters::default(),
            refuse_until: [None; CLASSES],
            has_daemon,
        }
    }

    /// What it did so far.
    #[must_use]
    pub fn counters(&self) -> SlabCounters {
        self.counters
    }

    /// The other half.
    #[must_use]
    pub fn pools(&self) -> &Arc<SlabPools> {
        &self.pools
    }

    /// A block of `class`; `None` where memory is out.
    pub fn allocate(&mut self, class: Class) -> Option<u32> {
        let unit = self.take(class).or_else(|| self.take_after_a_pass(class))?;
        self.counters.allocations += 1;
        self.counters.allocated_bytes += class.bytes() as u64;
        Some(unit)
    }

    fn take_after_a_pass(&mut self, class: Class) -> Option<u32> {
        if !self.has_daemon {
            self.counters.waits += 1;
            self.pools.tend();
            return self.take(class);
        }
        let began = Instant::now();
        if self.refuse_until[class.index()].is_some_and(|until| began < until) {
            self.counters.refused_at_once += 1;
            return None;
        }
        self.counters.waits += 1;
        self.pools.ask_and_wait(PATIENCE);
        let taken = self.take(class);
        let waited = began.elapsed().max(SHORTEST_WAIT);
        self.refuse_until[class.index()] =
            if taken.is_none() { Some(began + waited * (REFUSALS_PER_WAIT + 1)) } else { None };
        taken
    }

    fn take(&mut self, class: Class) -> Option<u32> {
        let run = &mut self.runs[class.index()];
        if run.units_left > 0 {
            let unit = run.base;
            run.base += class.units();
            run.units_left -= class.units();
            return Some(unit);
        }
        let stack = &mut self.stacks[class.index()];
        if stack.is_empty() {
            let shared = self.pools.stack(class);
            if !shared.pop_left(stack) {
                return None;
            }
            // The batch's left end comes first in the shared stack and is taken first here.
            stack.reverse();
            self.counters.transfers += 1;
            if self.has_daemon && shared.len() < LOW_WATERMARK {
                self.pools.ask();
            }
        }
        let entry = stack.pop()?;
        *run = Run {
            base: entry.unit + class.units(),
            units_left: entry.class.units() - class.units(),
        };
        Some(entry.unit)
    }

    /// Gives a block back.
    pub fn free(&mut self, unit: u32, class: Class) {
        self.counters.frees += 1;
        self.counters.allocated_bytes -= class.bytes() as u64;
        let stack = &mut self.stacks[class.index()];
        stack.push(Entry { unit, class });
        if stack.len() > HIGH {
            // The oldest are at the right end.
            let mut batch: Vec<Entry> = stack.drain(..BATCH).collect();
            batch.reverse();
            self.pools.stack(class).push_left(&batch);
            self.counters.transfers += 1;
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::slab::SlabDaemon;

    fn cache(units: u32) -> SlabCache {
        SlabCache::new(Arc::new(SlabPools::new(64, 64 + units)), false)
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_lie_at_multiples_of_their_size(
            steps in proptest::collection::vec((any::<bool>(), 0..CLASSES, any::<prop::sample::Index>()), 1..600)
        ) {
            let mut cache = cache(64 * 200);
            let mut held: BTreeMap<u32, Class> = BTreeMap::new();
            for (allocate, class, which) in steps {
                let class = Class::new(class);
                if allocate || held.is_empty() {
                    let Some(unit) = cache.allocate(class) else { continue };
                    prop_assert_eq!(unit % class.units(), 0);
                    prop_assert!(unit >= 64 && unit + class.units() <= 64 + 64 * 200);
                    let before = held.range(..=unit).next_back();
                    prop_assert!(before.is_none_or(|(at, c)| at + c.units() <= unit));
                    let after = held.range(unit..).next();
                    prop_assert!(after.is_none_or(|(at, _)| unit + class.units() <= *at));
                    held.insert(unit, class);
                } else {
                    let unit = *held.keys().nth(which.index(held.len())).unwrap();
                    cache.free(unit, held.remove(&unit).unwrap());
                }
            }
            let bytes: u64 = held.values().map(|class| class.bytes() as u64).sum();
            prop_assert_eq!(cache.counters().allocated_bytes, bytes);
        }
    }

    #[test]
    fn steady_churn_touches_shared_memory_for_less_than_a_tenth_of_operations() {
        let mut cache = cache(64 * 4096);
        let class = Class::new(1);
        let mut held: Vec<u32> = (0..1000).map(|_| cache.allocate(class).unwrap()).collect();
        let before = cache.counters();
        for round in 0..20_000_usize {
            let at = round * 7919 % held.len();
            cache.free(held[at], class);
            held[at] = cache.allocate(class).unwrap();
        }
        let operations = 40_000;
        let transfers = cache.counters().transfers - before.transfers;
        assert!(transfers * 10 < operations, "{transfers} transfers");
        // Worst case: everything is allocated, then everything is freed.
        let before = cache.counters();
        let more: Vec<u32> = (0..10_000).map(|_| cache.allocate(class).unwrap()).collect();
        more.iter().for_each(|&unit| cache.free(unit, class));
        let transfers = cache.counters().transfers - before.transfers;
        assert!(transfers * 10 < 20_000, "{transfers} transfers");
    }

    #[test]
    fn a_split_copies_one_entry_for_a_parent_block() {
        let mut cache = cache(64 * 1000);
        let class = Class::new(0);
        let mut taken: Vec<u32> = (0..64).map(|_| cache.allocate(class).unwrap()).collect();
        taken.sort_unstable();
        taken.dedup();
        assert_eq!(taken.len(), 64, "all blocks of the carved parent are distinct");
        assert_eq!(taken[63] - taken[0], 63, "one parent of 2048 bytes was enough");
        // A pass supplies every class up to its watermark, and copies entries to do so.
        assert!(cache.pools().split_entries() <= 6 * LOW_WATERMARK);
    }

    #[test]
    fn a_shift_from_small_to_large_merges_and_a_steady_load_does_not() {
        let mut cache = cache(64 * 2000);
        let small = Class::new(0);
        let mut held = Vec::new();
        while let Some(unit) = cache.allocate(small) {
            held.push(unit);
        }
        let after_filling = cache.pools().merges();
        for _ in 0..1000 {
            let unit = held.pop().unwrap();
            cache.free(unit, small);
            held.push(cache.allocate(small).unwrap());
        }
        assert_eq!(cache.pools().merges(), after_filling, "steady load merges nothing");
        for unit in held.drain(..) {
            cache.free(unit, small);
        }
        let large = Class::new(CLASSES - 1);
        let mut got = 0;
        while cache.allocate(large).is_some() {
            got += 1;
        }
        assert!(cache.pools().merges() > after_filling);
        assert!(got > 1700, "{got} of about 2000 large blocks after the merge");
    }

    #[test]
    fn requests_that_find_memory_full_do_not_each_wait_for_the_daemon() {
        let pools = Arc::new(SlabPools::new(0, 64 * 4000));
        let daemon = SlabDaemon::start(Arc::clone(&pools)).unwrap();
        let mut cache = SlabCache::new(pools, true);
        let class = Class::new(3);
        let mut held = Vec::new();
        while let Some(unit) = cache.allocate(class) {
            held.push(unit);
        }
        let before = cache.counters();
        let began = Instant::now();
        let refused = 20_000;
        for _ in 0..refused {
            assert_eq!(cache.allocate(class), None);
        }
        let waits = cache.counters().waits - before.waits;
        // Each wait buys 65 times its length without one.
        let most = began.elapsed().as_micros() / (50 * 65) + 1;
        assert!(u128::from(waits) <= most, "{waits} waits in {refused} refusals");
        assert_eq!(cache.counters().refused_at_once - before.refused_at_once, refused - waits);
        // What is freed is found without a wait.
        held.drain(..40).for_each(|unit| cache.free(unit, class));
        assert!(cache.allocate(class).is_some());
        drop(daemon);
    }

    #[test]
    fn the_daemon_does_not_merge_again_and_again_without_gain() {
        // Two processes' worth of small blocks, every second one free: no two neighbours are.
        let pools = Arc::new(SlabPools::new(0, 64 * 4000));
        let daemon = SlabDaemon::start(Arc::clone(&pools)).unwrap();
        let mut cache = SlabCache::new(Arc::clone(&pools), true);
        let small = Class::new(0);
        let mut held = Vec::new();
        while let Some(unit) = cache.allocate(small) {
            held.push(unit);
        }
        held.sort_unstable();
        let mut free = held.chunks(2).filter_map(|pair| pair.get(1).copied()).collect::<Vec<_>>();
        let last = free.split_off(free.len() - 1200);
        free.into_iter().for_each(|unit| cache.free(unit, small));
        pools.ask_and_wait(Duration::from_secs(60));
        let (began, before) = (Instant::now(), pools.merges());
        // Each pass finds a little more than the one before, and can join none of it.
        for part in last.chunks(12) {
            part.iter().for_each(|&unit| cache.free(unit, small));
            assert!(pools.ask_and_wait(Duration::from_secs(60)), "the daemon answers");
        }
        let merges = pools.merges() - before;
        let most = began.elapsed().as_micros() / 1000 / 16 + 2;
        assert!(u128::from(merges) <= most, "{merges} merges in 100 passes");
        drop(daemon);
    }

    #[test]
    fn allocation_goes_on_beside_a_daemon_on_its_own_thread() {
        let pools = Arc::new(SlabPools::new(0, 64 * 4000));
        let daemon = SlabDaemon::start(Arc::clone(&pools)).unwrap();
        let mut cache = SlabCache::new(pools, true);
        for class in [0, 3, 6, 1] {
            let class = Class::new(class);
            let held: Vec<u32> =
                (0..2000).map(|_| cache.allocate(class).expect("memory is there")).collect();
            held.iter().for_each(|&unit| cache.free(unit, class));
        }
        drop(daemon);
    }
}
