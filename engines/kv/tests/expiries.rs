//! Expiries that change after their values were stored: against a map, through collection, openings,
//! snapshots and installs, and counted in bytes.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use beeline_env::{Clock as _, ManualClock};
use beeline_kv::{Keyspace, Opened, PutOptions, Shard, Store, StoreOptions, audit};
use beeline_pmem::{Pool, PoolOptions};

const SEGMENT: u32 = 64 << 10;

fn pool(segments: u64) -> Pool {
    Pool::dram(&PoolOptions::volatile(SEGMENT, segments * u64::from(SEGMENT))).unwrap()
}

fn open(pool: &Pool, shards: usize, clock: &Arc<ManualClock>) -> Opened {
    let clock = Arc::clone(clock) as _;
    Store::open(pool.clone(), StoreOptions { shards, clock, ..StoreOptions::default() }).unwrap()
}

fn with_all<R>(
    shards: &[Arc<Mutex<Shard>>],
    home: usize,
    body: impl FnOnce(&mut Keyspace<'_>) -> R,
) -> R {
    let mut guards: Vec<_> = shards.iter().map(|shard| shard.lock().unwrap()).collect();
    body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), home))
}

fn maintain(shards: &[Arc<Mutex<Shard>>]) {
    for shard in shards {
        let mut shard = shard.lock().unwrap();
        while shard.maintain(1 << 20).unwrap().did_work {}
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Database and key to value and expiry.
type Model = BTreeMap<(u8, Vec<u8>), (Vec<u8>, u64)>;

fn compare(store: &Store, shards: &[Arc<Mutex<Shard>>], model: &Model, now: u64, what: &str) {
    with_all(shards, 0, |keys| {
        let mut value = Vec::new();
        let mut alive = [0_u64; 2];
        for (database, count) in alive.iter_mut().enumerate() {
            let mut seen = Vec::new();
            let mut cursor = 0;
            loop {
                cursor = keys
                    .scan(database as u8, cursor, 10, |key, _| seen.push(key.to_vec()))
                    .unwrap();
                if cursor == 0 {
                    break;
                }
            }
            for key in (0..12_u8).map(|key| vec![b'k', key]) {
                let wanted = model.get(&(database as u8, key.clone()));
                let wanted = wanted.filter(|(_, at)| *at == 0 || *at > now);
                let found = keys.lookup(database as u8, &key).unwrap();
                assert_eq!(seen.contains(&key), wanted.is_some(), "{what}: {key:?} in a scan");
                assert_eq!(
                    found.map(|entry| entry.expires_at_ms),
                    wanted.map(|known| known.1),
                    "{what}"
                );
                let (Some(entry), Some(wanted)) = (found, wanted) else { continue };
                keys.read_value(&entry, &mut value).unwrap();
                assert_eq!(value, wanted.0, "{what}: {key:?}");
                *count += u64::from(wanted.1 != 0);
            }
        }
        keys.commit().unwrap();
        assert_eq!(store.stats().total.expiring_keys, alive.iter().sum::<u64>(), "{what}: counted");
    });
    assert_eq!(audit(store, shards), Vec::<String>::new(), "{what}");
}

#[test]
fn values_and_their_expiries_agree_with_a_map() {
    for seed in 1..20_u64 {
        let clock = Arc::new(ManualClock::new(1_000_000));
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut place = pool(24);
        let (mut store, mut shards, _) = open(&place, 1 + seed as usize % 3, &clock);
        let mut model = Model::new();
        for turn in 0..600 {
            let what = format!("seed {seed}, turn {turn}");
            let now = clock.unix_ms();
            let count = shards.len() as u64;
            with_all(&shards, random.below(count) as usize, |keys| {
                let batch = random.below(4) == 0;
                if batch {
                    keys.begin_batch();
                }
                for _ in 0..=random.below(3) {
                    let key = vec![b'k', random.below(12) as u8];
                    let database = random.below(2) as u8;
                    let at = [0, now + 1 + random.below(900)][random.below(2) as usize];
                    let known = model.get(&(database, key.clone()));
                    let known = known.is_some_and(|(_, at)| *at == 0 || *at > now);
                    match random.below(10) {
                        0..3 => {
                            let length = random.below(2000) as usize;
                            let value = vec![turn as u8; length];
                            let options = PutOptions { kind: 0, expires_at_ms: at };
                            keys.put(database, &key, &[&value], options).unwrap();
                            model.insert((database, key), (value, at));
                        }
                        3 => {
                            assert_eq!(keys.delete(database, &key).unwrap(), known, "{what}");
                            model.remove(&(database, key));
                        }
                        _ => {
                            assert_eq!(
                                keys.set_expiry(database, &key, at).unwrap(),
                                known,
                                "{what}"
                            );
                            if known {
                                model.entry((database, key)).and_modify(|known| known.1 = at);
                            }
                        }
                    }
                }
                if batch {
                    keys.end_batch();
                }
                keys.commit().unwrap();
            });
            match random.below(30) {
                0..3 => maintain(&shards),
                3..6 => clock.advance(Duration::from_millis(random.below(400))),
                6 => {
                    drop((store, shards));
                    (store, shards, _) = open(&place, 1 + random.below(3) as usize, &clock);
                }
                7 => {
                    let directory = tempfile::tempdir().unwrap();
                    let path = directory.path().join("snapshot");
                    let snapshot = with_all(&shards, 0, |keys| keys.begin_snapshot().unwrap());
                    snapshot.write(&path).unwrap();
                    if random.below(2) == 0 {
                        drop((store, shards));
                        place = pool(24);
                        let options = StoreOptions {
                            shards: 2,
                            clock: Arc::clone(&clock) as _,
                            ..StoreOptions::default()
                        };
                        let (opened, _) =
                            beeline_kv::restore(&path, place.clone(), options).unwrap();
                        (store, shards, _) = opened;
                    } else {
                        beeline_kv::replace_by_snapshot(&path, &store, &shards).unwrap();
                    }
                }
                8 => {
                    with_all(&shards, 0, |keys| keys.flush(Some(1)).unwrap());
                    model.retain(|key, _| key.0 != 1);
                }
                _ => {}
            }
            if turn % 10 == 9 {
                compare(&store, &shards, &model, clock.unix_ms(), &what);
            }
        }
    }
}

#[test]
fn the_expiry_of_a_large_value_is_a_small_entry_that_goes_with_it() {
    let clock = Arc::new(ManualClock::new(1_000_000));
    let (store, shards, _) = open(&pool(64), 2, &clock);
    let value = vec![7; 50_000];
    let now = clock.unix_ms();
    with_all(&shards, 0, |keys| {
        keys.put(3, b"large", &[&value], PutOptions::default()).unwrap();
        for turn in 1..=100 {
            let before = store.stats().total.bytes_stored;
            let version = keys.lookup(3, b"large").unwrap().unwrap().changed;
            let at = if turn % 10 == 0 { 0 } else { now + 1000 * turn };
            assert!(keys.set_expiry(3, b"large", at).unwrap());
            let entry = keys.lookup(3, b"large").unwrap().unwrap();
            assert_eq!(entry.expires_at_ms, at);
            assert!(entry.changed > version, "who watches the key sees it");
            let stored = store.stats().total.bytes_stored - before;
            assert!(stored <= 80, "{stored} bytes for a change of the expiry");
        }
        keys.set_expiry(3, b"large", now + 500).unwrap();
        keys.commit().unwrap();
    });
    assert_eq!(store.stats().total.keys, 2, "the value and its expiry");
    maintain(&shards);
    assert_eq!(store.stats().total.expiring_keys, 1);
    clock.advance(Duration::from_secs(1));
    maintain(&shards);
    let total = store.stats().total;
    assert_eq!((total.keys, total.expiring_keys, total.expired), (0, 0, 1));
    assert_eq!(audit(&store, &shards), Vec::<String>::new());
}
