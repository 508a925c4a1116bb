//! Cooperative write-back: shared with whoever is idle, switched off on request.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_kv::{PutOptions, Store, StoreOptions};
use beeline_pmem::{Durability, Pool, PoolOptions};

/// Puts large values on shard 0 while another thread helps; returns sub-tasks (helped, own).
fn run(cooperative: bool, enough: impl Fn(u64, u64) -> bool) -> (u64, u64) {
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
    let stop = Arc::new(AtomicBool::new(false));
    let helper = std::thread::spawn({
        let (store, stop) = (Arc::clone(&store), Arc::clone(&stop));
        move || {
            while !stop.load(Ordering::Relaxed) {
                if !store.help_write_back(1) {
                    std::thread::yield_now();
                }
            }
        }
    });
    let key = (0_u32..).map(u32::to_le_bytes).find(|key| store.shard_of(0, key) == 0).unwrap();
    let value = vec![7; 64 << 10];
    let until = Instant::now() + Duration::from_secs(30);
    let mut shard = shards[0].lock().unwrap();
    let figures = loop {
        shard.put(0, &key, &[&value], PutOptions::default()).unwrap();
        shard.commit().unwrap();
        shard.maintain(1 << 20).unwrap();
        let total = store.stats().total;
        let (helped, own) = (total.write_backs_helped, total.write_backs_own);
        if enough(helped, own) || Instant::now() > until {
            break (helped, own);
        }
    };
    let entry = shard.lookup(0, &key).unwrap().unwrap();
    shard.with_value(&entry, |read| assert_eq!(read, value)).unwrap();
    stop.store(true, Ordering::Relaxed);
    helper.join().unwrap();
    figures
}

#[test]
fn an_idle_shard_takes_part_of_a_large_write_back() {
    let (helped, own) = run(true, |helped, own| helped > 0 && own > 0);
    println!("{helped} sub-tasks by the helper, {own} by the owner");
    assert!(own > 0 && helped > 0);
}

#[test]
fn switched_off_nobody_helps() {
    let turns = std::cell::Cell::new(0);
    let figures = run(false, |_, _| {
        turns.set(turns.get() + 1);
        turns.get() > 200
    });
    assert_eq!(figures, (0, 0));
}
