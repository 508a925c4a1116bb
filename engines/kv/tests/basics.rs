//! The plain things: put, get, delete, expiry, scan, batches, databases.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::sync::{Arc, Mutex, MutexGuard};

use beeline_env::ManualClock;
use beeline_kv::{Keyspace, PutOptions, Shard, Store, StoreOptions};
use beeline_pmem::{Pool, PoolOptions};

const MIB: u64 = 1 << 20;

fn open(shards: usize) -> (Arc<Store>, Vec<Arc<Mutex<Shard>>>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(1_000_000));
    let options = StoreOptions { shards, clock: clock.clone(), ..StoreOptions::default() };
    let pool = Pool::dram(&PoolOptions::volatile(64 << 10, 16 * MIB)).unwrap();
    let (store, shards, _) = Store::open(pool, options).unwrap();
    (store, shards, clock)
}

fn lock(shards: &[Arc<Mutex<Shard>>]) -> Vec<MutexGuard<'_, Shard>> {
    shards.iter().map(|shard| shard.lock().unwrap()).collect()
}

fn get(keys: &mut Keyspace<'_>, database: u8, key: &[u8]) -> Option<Vec<u8>> {
    let entry = keys.lookup(database, key).unwrap()?;
    let mut value = Vec::new();
    keys.read_value(&entry, &mut value).unwrap();
    Some(value)
}

#[test]
fn what_is_put_is_read_until_it_is_deleted() {
    let (_, shards, _) = open(1);
    let mut shard = shards[0].lock().unwrap();
    let mut keys = Keyspace::single(&mut shard);
    let first = keys.put(0, b"key", &[b"va", b"lue"], PutOptions::default()).unwrap();
    keys.commit().unwrap();
    assert_eq!(get(&mut keys, 0, b"key").unwrap(), b"value");
    assert_eq!(get(&mut keys, 1, b"key"), None, "databases are apart");
    let second = keys.put(0, b"key", &[b"other"], PutOptions::default()).unwrap();
    assert!(second > first);
    assert_eq!(get(&mut keys, 0, b"key").unwrap(), b"other");
    assert!(keys.delete(0, b"key").unwrap());
    assert!(!keys.delete(0, b"key").unwrap());
    assert_eq!(get(&mut keys, 0, b"key"), None);
    assert_eq!(keys.len(0), 0);
}

#[test]
fn several_shards_act_as_one_keyspace() {
    let (_, shards, _) = open(3);
    let mut guards = lock(&shards);
    let mut keys = Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), 1);
    keys.begin_batch();
    for n in 0..2000_u32 {
        keys.put(2, &n.to_le_bytes(), &[&[7; 20]], PutOptions::default()).unwrap();
        if n % 100 == 99 {
            keys.end_batch();
            keys.commit().unwrap();
            keys.begin_batch();
        }
    }
    keys.end_batch();
    for n in 0..2000_u32 {
        assert_eq!(get(&mut keys, 2, &n.to_le_bytes()).unwrap(), [7; 20]);
    }
    let (mut met, mut cursor) = (Vec::new(), 0);
    loop {
        cursor = keys.scan(2, cursor, 10, |key, _| met.push(key.to_vec())).unwrap();
        if cursor == 0 {
            break;
        }
    }
    met.sort();
    met.dedup();
    assert_eq!(met.len(), 2000);
    let mut random = Vec::new();
    assert!(keys.random_key(2, &mut random).unwrap());
    keys.flush(Some(2)).unwrap();
    assert_eq!(keys.len(2), 0);
    assert_eq!(get(&mut keys, 2, &1_u32.to_le_bytes()), None);
}

#[test]
fn a_key_is_gone_when_its_time_is_past_even_if_the_clock_goes_back() {
    let (_, shards, clock) = open(1);
    let mut shard = shards[0].lock().unwrap();
    let expires = PutOptions { expires_at_ms: 1_000_500, ..PutOptions::default() };
    shard.put(0, b"key", &[b"value"], expires).unwrap();
    assert!(shard.lookup(0, b"key").unwrap().is_some());
    clock.jump_unix_ms(500);
    assert!(shard.lookup(0, b"key").unwrap().is_none());
    clock.jump_unix_ms(-100_000);
    assert!(shard.lookup(0, b"key").unwrap().is_none(), "an expired key does not come back");
    assert_eq!(shard.stats().expired, 1);
}

#[test]
fn limits_are_named_in_the_error() {
    let (_, shards, _) = open(1);
    let mut shard = shards[0].lock().unwrap();
    let long = vec![0; 70_000];
    let error = shard.put(0, &long, &[b""], PutOptions::default()).unwrap_err();
    assert!(error.to_string().contains("70000") && error.to_string().contains("65535"));
    let error = shard.put(0, b"k", &[&long], PutOptions::default()).unwrap_err();
    assert!(error.to_string().contains("70000"));
    assert!(shard.put(16, b"k", &[b""], PutOptions::default()).is_err());
    shard.put(0, b"", &[b""], PutOptions::default()).unwrap();
    assert!(shard.lookup(0, b"").unwrap().is_some(), "the empty key is a key");
}
