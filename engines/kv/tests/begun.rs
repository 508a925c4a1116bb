//! Commits that are begun and not waited for: what rests on them, and where a shard waits after all.
//!
//! On a simulated pool that holds fences back until the test completes them.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::sync::{Arc, Mutex};

use beeline_kv::entry::Draft;
use beeline_kv::{Notice, PutOptions, Shard, Store, StoreOptions};
use beeline_pmem::{Durability, Pool, PoolOptions, SimDevice};

const SEGMENT: u32 = 64 << 10;

struct Held {
    pool: Pool,
    device: SimDevice,
    _store: Arc<Store>,
    shards: Vec<Arc<Mutex<Shard>>>,
}

/// A store of one shard whose fences are held back.
fn held() -> Held {
    let options = PoolOptions {
        durability: Durability::Power,
        segment_bytes: SEGMENT,
        capacity_bytes: 32 * u64::from(SEGMENT),
        ..PoolOptions::default()
    };
    let (pool, device) = Pool::simulated(&options).unwrap();
    let (store, shards) = open(&pool);
    device.hold_fences();
    Held { pool, device, _store: store, shards }
}

fn open(pool: &Pool) -> (Arc<Store>, Vec<Arc<Mutex<Shard>>>) {
    let options = StoreOptions { shards: 1, ..StoreOptions::default() };
    let (store, shards, _) = Store::open(pool.clone(), options).unwrap();
    (store, shards)
}

fn put(shard: &mut Shard, key: &str, length: usize) {
    shard.put(0, key.as_bytes(), &[&vec![7; length]], PutOptions::default()).unwrap();
}

/// The commit that a reply to a read of this key waits for.
fn rests(shard: &mut Shard, key: &str) -> u64 {
    shard.take_rests();
    let _ = shard.lookup(0, key.as_bytes()).unwrap();
    shard.take_rests()
}

#[test]
fn a_read_of_an_accepted_entry_rests_on_its_commit() {
    let held = held();
    let mut shard = held.shards[0].lock().unwrap();
    let mut log = shard.open_client_log();
    shard.grant(&mut log).unwrap();
    shard.commit().unwrap();
    let mut bytes = Vec::new();
    Draft { key: b"key", value: b"value", ..Draft::default() }.form(&mut bytes).unwrap();
    let offset = log.tail();
    log.segment().unwrap().store(offset as usize, &bytes);
    shard.accept(&mut log, Notice { offset }).unwrap();
    let commit = shard.begun_to() + 1;
    assert_eq!((rests(&mut shard, "key"), rests(&mut shard, "other")), (commit, 0));
    shard.begin_commit().unwrap();
    assert_eq!(rests(&mut shard, "key"), commit);
    assert!(held.device.complete_fence());
    shard.settle().unwrap();
    assert_eq!((rests(&mut shard, "key"), shard.settled_to()), (0, commit));
}

#[test]
fn nothing_is_stored_in_the_next_segment_while_a_commit_of_the_former_one_is_under_way() {
    let held = held();
    let mut shard = held.shards[0].lock().unwrap();
    put(&mut shard, "key", SEGMENT as usize / 2);
    shard.begin_commit().unwrap();
    let commit = shard.begun_to();
    shard.settle().unwrap();
    assert!(shard.settled_to() < commit, "it is held back");
    // Fits behind the first.
    put(&mut shard, "near", 64);
    shard.settle().unwrap();
    assert!(shard.settled_to() < commit);
    // Does not.
    put(&mut shard, "far", SEGMENT as usize * 3 / 4);
    assert!(!held.device.complete_fence(), "no fence is held any more");
    shard.settle().unwrap();
    assert_eq!(shard.settled_to(), commit);
}

#[test]
fn a_commit_over_two_segments_waits() {
    let Held { pool, _store, shards, .. } = held();
    put(&mut shards[0].lock().unwrap(), "key", SEGMENT as usize / 2);
    drop((_store, shards));
    // A shard also waits where it left a segment that it took itself: that may be dead. Here it goes on in
    // the one of the life before.
    let (_store, shards) = open(&pool);
    let mut shard = shards[0].lock().unwrap();
    put(&mut shard, "begun", 64);
    put(&mut shard, "far", SEGMENT as usize * 3 / 4);
    shard.begin_commit().unwrap();
    assert_eq!((shard.settled_to(), shard.commits_under_way()), (shard.begun_to(), 0));
    // What stays in one does not.
    put(&mut shard, "near", 64);
    shard.begin_commit().unwrap();
    assert_eq!((shard.settled_to() + 1, shard.commits_under_way()), (shard.begun_to(), 1));
}
