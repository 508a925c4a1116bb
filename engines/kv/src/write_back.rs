//! Cooperative write-back: idle shards help to flush a large commit.
//!
//! ```text
//! owner:  split dirty ranges → own queue → pop and write back until empty → wait → fence
//! helper: pick another queue at random → pop one → write back → own fence → count it done
//! ```
//!
//! A helper's store fence completes its own write-backs, so counting down after it (release) and
//! the owner's look at the count (acquire) make every range persisted before the owner goes on.
//! Helpers announce themselves by asking: an owner that saw nobody ask since its last commit
//! flushes by itself and pays nothing.
//!
//! Source: BOOM-KV §3.4.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use beeline_pmem::Mechanism;

use crate::segments::SegmentState;
use crate::stats;
use crate::store::Store;

/// Bytes of one sub-task.
const SUB_TASK_BYTES: u32 = 1024;
/// Dirty bytes from which a commit is worth splitting.
pub(crate) const WORTH_BYTES: u32 = 4096;
/// Turns of waiting for a helper before giving the core away.
const SPINS: u32 = 200;

#[derive(Debug)]
struct SubTask {
    state: Arc<SegmentState>,
    offset: u32,
    length: u32,
}

impl SubTask {
    fn run(&self) {
        let (offset, length) = (self.offset as usize, self.length as usize);
        beeline_pmem::write_back(&self.state.segment, offset, length);
    }
}

/// Sub-tasks of one shard.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct WriteBackQueue {
    tasks: Mutex<VecDeque<SubTask>>,
    /// Length of `tasks`, to look at without the lock.
    waiting: AtomicUsize,
    /// Sub-tasks pushed and not done.
    outstanding: AtomicU32,
}

impl WriteBackQueue {
    fn pop(&self) -> Option<SubTask> {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let task = tasks.pop_front();
        self.waiting.store(tasks.len(), Ordering::Relaxed);
        task
    }
}

/// All queues and the sign that somebody helps.
#[derive(Debug)]
pub(crate) struct WriteBack {
    queues: Vec<WriteBackQueue>,
    asked: AtomicU64,
    possible: bool,
}

impl WriteBack {
    pub fn new(shards: usize, mechanism: Mechanism) -> Self {
        let possible =
            matches!(mechanism, Mechanism::CacheLine(_) | Mechanism::CacheLineEmulated(_));
        Self {
            queues: (0..shards).map(|_| WriteBackQueue::default()).collect(),
            asked: AtomicU64::new(0),
            possible: possible && shards > 1,
        }
    }

    /// How often somebody asked for work.
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Store {
    /// Runs one sub-task of another shard's write-back, called by an idle thread of shard
    /// `worker`; false when there was none.
    pub fn help_write_back(&self, worker: usize) -> bool {
        let shared = &self.write_back;
        if !shared.possible || !self.cooperative.load(Ordering::Relaxed) {
            return false;
        }
        let asked = shared.asked.fetch_add(1, Ordering::Relaxed);
        // Any queue first: the count of askings is random enough against the owners' pace.
        let start = (asked.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) as usize;
        for turn in 0..shared.queues.len() {
            let index = (start + turn) % shared.queues.len();
            let queue = &shared.queues[index];
            if index == worker || queue.waiting.load(Ordering::Relaxed) == 0 {
                continue;
            }
            if let Some(task) = queue.pop() {
                task.run();
                beeline_os::write_back::store_fence();
                // Release pairs with the owner's acquire in `cooperate`.
                queue.outstanding.fetch_sub(1, Ordering::Release);
                if let Some(counters) = self.counters.get(worker) {
                    counters.write_backs_helped.fetch_add(1, Ordering::Relaxed);
                }
                return true;
            }
        }
        false
    }

    /// True when a commit of this many bytes is to be shared.
    pub(crate) fn is_worth_sharing(&self, bytes: u32, asked_before: u64) -> bool {
        self.write_back.possible
            && bytes >= WORTH_BYTES
            && self.cooperative.load(Ordering::Relaxed)
            && self.write_back.asked() != asked_before
    }

    /// Writes a range back together with those that help; returns when all of it is.
    pub(crate) fn cooperate(
        &self,
        owner: usize,
        state: &Arc<SegmentState>,
        offset: u32,
        length: u32,
    ) {
        self.share(owner, state, offset, length);
        self.finish(owner);
    }

    /// Lets others see what there is to write back.
    fn share(&self, owner: usize, state: &Arc<SegmentState>, offset: u32, length: u32) {
        let queue = &self.write_back.queues[owner];
        let mut tasks = queue.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        for at in (0..length).step_by(SUB_TASK_BYTES as usize) {
            let length = SUB_TASK_BYTES.min(length - at);
            let state = Arc::clone(state);
            tasks.push_back(SubTask { state, offset: offset + at, length });
            queue.outstanding.fetch_add(1, Ordering::Relaxed);
        }
        queue.waiting.store(tasks.len(), Ordering::Relaxed);
    }

    /// Writes back what no helper took, and waits for what one did.
    fn finish(&self, owner: usize) {
        let queue = &self.write_back.queues[owner];
        while let Some(task) = queue.pop() {
            task.run();
            queue.outstanding.fetch_sub(1, Ordering::Relaxed);
            stats::add(&self.counters[owner].write_backs_own, 1);
        }
        let mut spins = 0;
        // Acquire pairs with the helpers' release.
        while queue.outstanding.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins % SPINS == 0 {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use beeline_pmem::{Durability, Pool, PoolOptions};

    use super::*;
    use crate::{PutOptions, StoreOptions};

    #[test]
    fn a_helper_takes_part_of_what_is_shared_and_its_owner_the_rest() {
        let pool = PoolOptions {
            durability: Durability::Power,
            emulate_durability: true,
            segment_bytes: 1 << 20,
            capacity_bytes: 8 << 20,
            ..PoolOptions::default()
        };
        let options = StoreOptions { shards: 2, ..StoreOptions::default() };
        let (store, shards, _) = Store::open(Pool::dram(&pool).unwrap(), options).unwrap();
        let key = (0_u32..).map(u32::to_le_bytes).find(|key| store.shard_of(0, key) == 0).unwrap();
        let mut shard = shards[0].lock().unwrap();
        shard.put(0, &key, &[&[7; 100]], PutOptions::default()).unwrap();
        shard.commit().unwrap();
        let state = store.table.all().into_iter().next().unwrap();
        let figures = || {
            let total = store.stats().total;
            (total.write_backs_helped, total.write_backs_own)
        };
        assert!(!store.help_write_back(1), "there is nothing to do");
        store.share(0, &state, 0, 5 * SUB_TASK_BYTES - 1);
        assert!(!store.help_write_back(0), "a shard is no helper of its own");
        assert!(store.help_write_back(1) && store.help_write_back(1));
        assert_eq!(figures(), (2, 0));
        // One that a helper took and has not done is waited for.
        let taken = store.write_back.queues[0].pop().unwrap();
        std::thread::scope(|scope| {
            let owner = scope.spawn(|| store.finish(0));
            while figures() != (2, 2) {
                std::thread::yield_now();
            }
            assert!(!owner.is_finished(), "it went on before all was written back");
            taken.run();
            store.write_back.queues[0].outstanding.fetch_sub(1, Ordering::Release);
        });
        assert!(!store.help_write_back(1), "all is done");
        store.set_cooperative_write_back(false);
        store.share(0, &state, 0, SUB_TASK_BYTES);
        assert!(!store.help_write_back(1), "it is switched off");
        store.finish(0);
        assert_eq!(figures(), (2, 3));
    }
}
