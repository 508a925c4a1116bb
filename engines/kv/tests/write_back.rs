//! Cooperative write-back: shared where an idle shard asked for work, switched off on request.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use beeline_kv::{PutOptions, Store, StoreOptions};
use beeline_pmem::{Durability, Pool, PoolOptions};

/// Puts large values on shard 0 while another thread asks for work before each; returns sub-tasks
/// (helped, own).
fn run(cooperative: bool) -> (u64, u64) {
    let pool = Pool::dram(&PoolOptions {
        durability: Durability::Power,
        emulate_durability: true,
        segment_bytes: 1 << 20,
        capacity_bytes: 32 << 20,
        ..PoolOptions::default()
    })
    .unwrap();
    let options =
        StoreOptions { shards: 2, cooperative_write_back: cooperative, ..StoreOptions::default() };
    let (store, shards, _) = Store::open(pool, options).unwrap();
    let (stop, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let helper = std::thread::spawn({
        let (store, stop, asked) = (Arc::clone(&store), Arc::clone(&stop), Arc::clone(&asked));
        move || {
            while !stop.load(Ordering::Relaxed) {
                if !store.help_write_back(1) {
                    std::thread::yield_now();
                }
                asked.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let key = (0_u32..).map(u32::to_le_bytes).find(|key| store.shard_of(0, key) == 0).unwrap();
    let mut shard = shards[0].lock().unwrap();
    for turn in 0..200_u8 {
        let value = vec![turn; 64 << 10];
        shard.put(0, &key, &[&value], PutOptions::default()).unwrap();
        // One that asked before and one that does now: the second begins behind the first.
        let before = asked.load(Ordering::Relaxed);
        while asked.load(Ordering::Relaxed) < before + 2 {
            std::thread::yield_now();
        }
        shard.commit().unwrap();
        shard.maintain(1 << 20).unwrap();
        let entry = shard.lookup(0, &key).unwrap().unwrap();
        shard.with_value(&entry, |read| assert_eq!(read, value)).unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    helper.join().unwrap();
    let total = store.stats().total;
    (total.write_backs_helped, total.write_backs_own)
}

/// That a helper which comes in time takes part of one is shown where the two are scheduled, in the
/// crate.
#[test]
fn an_idle_shard_makes_large_write_backs_be_shared() {
    let (helped, own) = run(true);
    println!("{helped} sub-tasks by the helper, {own} by the owner");
    assert!(helped + own >= 200 * 64, "{helped} and {own}: each commit is shared");
}

#[test]
fn switched_off_nobody_helps() {
    assert_eq!(run(false), (0, 0));
}
