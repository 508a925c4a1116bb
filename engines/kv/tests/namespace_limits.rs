//! Limits of single namespaces: what is refused or evicted when one is reached, and that nothing else
//! notices.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use beeline_env::{ManualClock, Randomness};
use beeline_kv::{
    Applied, Change, Condition, Embedded, Eviction, Keyspace, KvError, NamespaceLimit,
    NamespaceOptions, PutOptions, Store, StoreOptions, Write, audit,
};
use beeline_pmem::{Pool, PoolOptions};

const CACHE: u32 = 256;
const OTHER: u32 = 257;
const LIMIT: u64 = 100_000;

fn options(shards: usize, clock: &Arc<ManualClock>) -> StoreOptions {
    let clock = Arc::clone(clock);
    StoreOptions { shards, clock, warm_bytes: Some(12 << 10), ..StoreOptions::default() }
}

fn pool() -> Pool {
    Pool::dram(&PoolOptions::volatile(64 << 10, 64 * (64 << 10))).unwrap()
}

fn embedded(shards: usize) -> (Embedded, Arc<ManualClock>, Pool) {
    let (clock, pool) = (Arc::new(ManualClock::new(1_000_000)), pool());
    (Store::open(pool.clone(), options(shards, &clock)).unwrap().into(), clock, pool)
}

fn limit(max_bytes: u64, eviction: Eviction) -> NamespaceLimit {
    NamespaceLimit { max_bytes, eviction }
}

fn put(keys: &mut Keyspace<'_>, number: u32, key: &[u8], value: &[u8]) -> Result<u64, KvError> {
    keys.put_in(number, key, &[value], PutOptions::default())
}

fn value_of(keys: &mut Keyspace<'_>, number: u32, key: &[u8]) -> Option<Vec<u8>> {
    let entry = keys.get_in(number, key).unwrap()?;
    let mut value = Vec::new();
    keys.read_value(&entry, &mut value).unwrap();
    Some(value)
}

fn write<'w>(number: u32, key: &'w [u8], condition: Condition, value: &'w [&'w [u8]]) -> Write<'w> {
    let change = Change::Put { value, options: PutOptions::default() };
    Write { namespace: number, key: key.into(), condition, change }
}

#[test]
fn a_full_namespace_without_a_policy_takes_nothing_more_until_something_is_deleted() {
    let (store, clock, pool) = embedded(3);
    store.with_all(|keys| {
        keys.create_namespace(CACHE, NamespaceOptions::default()).unwrap();
        keys.create_namespace(OTHER, NamespaceOptions::default()).unwrap();
        keys.limit_namespace(CACHE, limit(LIMIT, Eviction::NoEviction)).unwrap();
        let mut stored = 0_u32;
        let refused = loop {
            match put(keys, CACHE, &stored.to_be_bytes(), &[1; 500]) {
                Ok(_) => stored += 1,
                Err(error) => break error,
            }
        };
        let KvError::NamespaceFull { number, used_bytes, limit_bytes } = refused else {
            panic!("{refused}")
        };
        assert_eq!((number, limit_bytes), (CACHE, LIMIT));
        assert!(used_bytes <= LIMIT && used_bytes + 600 > LIMIT, "{used_bytes}");
        assert_eq!(keys.store().namespace_bytes(CACHE), Some(used_bytes));
        assert!(refused.is_full() && refused.is_retryable());
        // The next one is refused as well, whatever shard it lies in; others are not concerned.
        for key in 0..20_u8 {
            assert!(put(keys, CACHE, &[key], &[1; 500]).is_err());
            put(keys, OTHER, &[key], &[1; 500]).unwrap();
            keys.put(0, &[key], &[&[1; 500]], PutOptions::default()).unwrap();
        }
        // A batch is refused as a whole.
        let value: [&[u8]; 1] = [&[2; 300]];
        let batch = [
            write(OTHER, b"both", Condition::None, &value),
            write(CACHE, b"both", Condition::None, &value),
        ];
        assert!(matches!(keys.apply(&batch), Err(KvError::NamespaceFull { .. })));
        assert_eq!(value_of(keys, OTHER, b"both"), None);
        // One that stores no more than it frees is not.
        let gone = 0_u32.to_be_bytes();
        let delete = Write {
            namespace: CACHE,
            key: (&gone).into(),
            condition: Condition::Present,
            change: Change::Delete,
        };
        assert!(matches!(keys.apply(&[delete, batch[1]]).unwrap(), Applied::Done(_)));
        assert!(keys.delete_in(CACHE, &1_u32.to_be_bytes()).unwrap());
        put(keys, CACHE, b"again", &[1; 400]).unwrap();
        keys.commit().unwrap();
    });
    let held = store.store().namespace_bytes(CACHE);
    drop(store);
    // The limit lasts, and so does what it counts, with another number of shards.
    let store: Embedded = Store::open(pool, options(2, &clock)).unwrap().into();
    let known = store.store().namespace_limit(CACHE);
    assert_eq!(known, Some(limit(LIMIT, Eviction::NoEviction)));
    assert_eq!(store.store().namespace_limit(OTHER), Some(NamespaceLimit::default()));
    assert_eq!(store.store().namespace_bytes(CACHE), held);
    store.with_all(|keys| {
        assert!(put(keys, CACHE, b"more", &[1; 800]).is_err());
        keys.limit_namespace(CACHE, NamespaceLimit::default()).unwrap();
        put(keys, CACHE, b"more", &[1; 800]).unwrap();
        keys.clear_namespace(CACHE).unwrap();
        assert_eq!(keys.store().namespace_bytes(CACHE), Some(0));
        assert!(keys.drop_namespace(CACHE).unwrap());
        assert_eq!(keys.store().namespace_bytes(CACHE), None);
    });
}

#[test]
fn the_least_recently_used_keys_of_a_namespace_go_and_no_others() {
    let (store, clock, _) = embedded(1);
    store.with_all(|keys| {
        for number in [CACHE, OTHER] {
            keys.create_namespace(number, NamespaceOptions::default()).unwrap();
        }
        keys.limit_namespace(CACHE, limit(LIMIT, Eviction::AllKeysLru)).unwrap();
        for n in 0..300_u32 {
            put(keys, OTHER, &n.to_be_bytes(), &[3; 500]).unwrap();
            keys.put(0, &n.to_be_bytes(), &[&[3; 500]], PutOptions::default()).unwrap();
        }
        for n in 0..1000_u32 {
            put(keys, CACHE, &n.to_be_bytes(), &[n as u8; 500]).unwrap();
            assert!(keys.store().namespace_bytes(CACHE).unwrap() <= LIMIT);
            if n % 20 == 0 {
                clock.advance(Duration::from_secs(1));
                keys.shards_mut().for_each(|shard| shard.tick());
                // Used again and again.
                for kept in 0..10_u32 {
                    let _ = value_of(keys, CACHE, &kept.to_be_bytes());
                }
            }
        }
        let there = |keys: &mut Keyspace<'_>, n: u32| {
            value_of(keys, CACHE, &n.to_be_bytes()).is_some_and(|value| value == [n as u8; 500])
        };
        let used = (0..10).filter(|n| there(keys, *n)).count();
        let old = (10..500).filter(|n| there(keys, *n)).count();
        // Five samples now and then name a key that was used lately; a victim by age alone is old.
        assert!(used >= 5, "{used} of 10 keys in use are left");
        assert!(old <= 25, "{old} of 490 old keys are left");
        for n in 0..300_u32 {
            assert!(value_of(keys, OTHER, &n.to_be_bytes()).is_some());
            assert!(keys.lookup(0, &n.to_be_bytes()).unwrap().is_some());
        }
        let too_large = put(keys, CACHE, b"too large", &[1; 60_000]);
        assert!(too_large.is_ok(), "less than the limit: {too_large:?}");
        keys.limit_namespace(CACHE, limit(1000, Eviction::AllKeysRandom)).unwrap();
        assert!(matches!(
            put(keys, CACHE, b"too large", &[1; 2000]),
            Err(KvError::NamespaceFull { .. })
        ));
    });
    // Upkeep brings it down to its new limit.
    let mut slices = 0;
    while store.store().namespace_bytes(CACHE).unwrap() > 1000 {
        store.maintain().unwrap();
        slices += 1;
        assert!(slices < 1000, "upkeep evicts");
    }
}

/// A condition that held, and the key it is about was evicted to make room for the batch.
#[test]
fn conditions_are_looked_at_again_when_room_was_made() {
    let (store, _, _) = embedded(1);
    store.with_all(|keys| {
        keys.create_namespace(CACHE, NamespaceOptions::default()).unwrap();
        keys.limit_namespace(CACHE, limit(10_000, Eviction::AllKeysRandom)).unwrap();
        put(keys, CACHE, b"only", &[1; 6000]).unwrap();
        let value: [&[u8]; 1] = [&[2; 6000]];
        let keep = Write {
            namespace: CACHE,
            key: b"only".into(),
            condition: Condition::Present,
            change: Change::Keep,
        };
        let batch = [keep, write(CACHE, b"new", Condition::Absent, &value)];
        let applied = keys.apply(&batch).unwrap();
        assert_eq!(applied, Applied::Refused { write: 0, found: None });
        assert_eq!(value_of(keys, CACHE, b"new"), None);
        assert!(matches!(keys.apply(&batch[1..]).unwrap(), Applied::Done(_)));
    });
}

/// Random writes to a limited namespace and to one beside it, through collection, clearing and
/// openings: what is there has the value stored last, the other namespace has everything, and the
/// account agrees with what an opening counts.
#[test]
fn random_writes_keep_the_account_and_lose_nothing_else() {
    for seed in 0..6 {
        let clock = Arc::new(ManualClock::new(1_000_000));
        let pool = pool();
        let mut random = Randomness::new(seed);
        let mut model: [BTreeMap<Vec<u8>, Vec<u8>>; 2] = [BTreeMap::new(), BTreeMap::new()];
        let policy = Eviction::ALL[1 + seed as usize % 5];
        let (mut evicted, mut most) = (0, 0);
        for opening in 0..4 {
            let shards = 1 + (seed as usize + opening) % 3;
            let opened = Store::open(pool.clone(), options(shards, &clock)).unwrap();
            let store: Embedded = opened.into();
            store.with_all(|keys| {
                let spaces = NamespaceOptions { ordered: true, ..NamespaceOptions::default() };
                keys.create_namespace(CACHE, spaces).unwrap();
                keys.create_namespace(OTHER, spaces).unwrap();
                keys.limit_namespace(CACHE, limit(LIMIT, policy)).unwrap();
            });
            for _ in 0..600 {
                let key = (random.below(400) as u16).to_be_bytes().to_vec();
                let value = vec![random.below(256) as u8; random.below(1500) as usize];
                let place = random.below(2) as usize;
                let number = [CACHE, OTHER][place];
                // Volatile policies have nothing else to evict; none expires within the test.
                let expires = PutOptions { expires_at_ms: u64::MAX / 2, ..PutOptions::default() };
                store.with_all(|keys| match random.below(12) {
                    0 => {
                        keys.delete_in(number, &key).unwrap();
                        model[place].remove(&key);
                    }
                    1 if random.chance(1, 40) => {
                        keys.clear_namespace(number).unwrap();
                        model[place].clear();
                    }
                    2 | 3 => {
                        let parts: [&[u8]; 1] = [&value];
                        let change = Change::Put { value: &parts, options: expires };
                        let (key, condition) = ((&key).into(), Condition::None);
                        let write = Write { namespace: number, key, condition, change };
                        assert!(matches!(keys.apply(&[write]).unwrap(), Applied::Done(_)));
                        model[place].insert(write.key.name.to_vec(), value);
                    }
                    _ => {
                        keys.put_in(number, &key, &[&value], expires).unwrap();
                        model[place].insert(key, value);
                    }
                });
                store.with_all(|keys| keys.commit().unwrap());
                store.maintain().unwrap();
                let used = store.store().namespace_bytes(CACHE).unwrap();
                // Of several shards, each but the one that writes may be at its part.
                assert!(used <= 2 * LIMIT, "seed {seed}: {used} bytes");
                most = most.max(used);
            }
            evicted += store.store().stats().total.evicted;
            while store.maintain().unwrap() {}
            assert!(store.store().namespace_bytes(CACHE).unwrap() <= LIMIT + 2000);
            let held = [CACHE, OTHER].map(|number| store.store().namespace_bytes(number).unwrap());
            store.with_all(|keys| {
                for (key, value) in &model[1] {
                    assert_eq!(value_of(keys, OTHER, key).as_ref(), Some(value), "seed {seed}");
                }
                assert_eq!(keys.len_in(OTHER).unwrap(), model[1].len() as u64);
                let mut there = 0;
                for (key, value) in &model[0] {
                    let found = value_of(keys, CACHE, key);
                    there += u64::from(found.is_some());
                    assert!(found.is_none_or(|found| found == *value), "seed {seed}");
                }
                assert_eq!(keys.len_in(CACHE).unwrap(), there, "seed {seed}");
            });
            let findings = audit(store.store(), store.shards());
            assert!(findings.is_empty(), "seed {seed}: {findings:?}");
            // As an opening counts.
            drop(store);
            let store: Embedded =
                Store::open(pool.clone(), options(1 + opening % 2, &clock)).unwrap().into();
            let counted =
                [CACHE, OTHER].map(|number| store.store().namespace_bytes(number).unwrap());
            assert_eq!(counted, held, "seed {seed}");
        }
        assert!(
            evicted > 100 && most > LIMIT * 3 / 4,
            "seed {seed}: {evicted} evicted, {most} held"
        );
    }
}
