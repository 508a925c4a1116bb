//! Failures of the medium in the middle of what has to take effect as a whole.
//!
//! In a binary of its own: fault points are global to the process, so one test runs at a time.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use beeline_env::{FaultAction, ManualClock, fault};
use beeline_kv::{
    Change, Condition, Key, Keyspace, KvError, NamespaceOptions, PutOptions, Shard, Store,
    StoreOptions, Write, audit,
};
use beeline_pmem::{Pool, PoolOptions};

type Shards = Vec<Arc<Mutex<Shard>>>;

const SPACE: u32 = 300;
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pool() -> Pool {
    Pool::dram(&PoolOptions::volatile(64 << 10, 32 << 16)).unwrap()
}

fn open(pool: &Pool, shards: usize) -> (Arc<Store>, Shards) {
    let clock = Arc::new(ManualClock::new(1_000_000));
    let options = StoreOptions { shards, clock, ..StoreOptions::default() };
    let (store, shards, report) = Store::open(pool.clone(), options).unwrap();
    assert_eq!(report.damaged, 0, "{report:?}");
    (store, shards)
}

fn with_keys<R>(shards: &Shards, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
    let mut guards: Vec<_> = shards.iter().map(|shard| shard.lock().unwrap()).collect();
    body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), 0))
}

fn keys_of(store: &Store, owner: usize, count: usize) -> Vec<Vec<u8>> {
    (0..)
        .map(|n: u32| format!("key-{n}").into_bytes())
        .filter(|key| store.shard_of(0, key) == owner)
        .take(count)
        .collect()
}

#[test]
fn half_of_a_conditional_batch_is_never_committed() {
    let _alone = alone();
    for shards in [1, 2] {
        let pool = pool();
        let (_, opened) = open(&pool, shards);
        let value: [&[u8]; 1] = [b"value"];
        let put = |name: &'static [u8]| Write {
            namespace: SPACE,
            key: Key { row: b"", name },
            condition: Condition::None,
            change: Change::Put { value: &value, options: PutOptions::default() },
        };
        with_keys(&opened, |keys| {
            keys.create_namespace(SPACE, NamespaceOptions::default()).unwrap();
            keys.apply(&[put(b"before")]).unwrap();
            keys.commit().unwrap();
            // The first change is let through, the second fails.
            let armed = fault::arm("kv.apply.before_change", FaultAction::Fail, 1);
            let failed = keys.apply(&[put(b"one"), put(b"two"), put(b"three")]);
            drop(armed);
            assert!(matches!(failed, Err(KvError::Io { .. })), "{failed:?}");
            let refused = keys.commit();
            assert!(matches!(refused, Err(KvError::Poisoned { .. })), "{shards}: {refused:?}");
            let refused = keys.apply(&[put(b"later")]);
            assert!(matches!(refused, Err(KvError::Poisoned { .. })), "{shards}: {refused:?}");
        });
        drop(opened);
        let (store, opened) = open(&pool, shards);
        with_keys(&opened, |keys| {
            assert!(keys.get_in(SPACE, b"before").unwrap().is_some());
            for name in [&b"one"[..], b"two", b"three", b"later"] {
                assert!(keys.get_in(SPACE, name).unwrap().is_none(), "{shards}: {name:?}");
            }
        });
        assert_eq!(audit(&store, &opened), Vec::<String>::new());
    }
}

#[test]
fn a_conditional_batch_whose_first_change_fails_harms_nothing() {
    let _alone = alone();
    let (_, opened) = open(&pool(), 1);
    let value: [&[u8]; 1] = [b"value"];
    let put = Write {
        namespace: SPACE,
        key: Key { row: b"", name: b"key" },
        condition: Condition::Absent,
        change: Change::Put { value: &value, options: PutOptions::default() },
    };
    with_keys(&opened, |keys| {
        keys.create_namespace(SPACE, NamespaceOptions::default()).unwrap();
        let armed = fault::arm("kv.apply.before_change", FaultAction::Fail, 0);
        keys.apply(&[put]).unwrap_err();
        drop(armed);
        keys.apply(&[put]).unwrap();
        keys.commit().unwrap();
    });
}

#[test]
fn where_one_shard_of_a_command_cannot_commit_no_later_commit_makes_half_of_it_durable() {
    let _alone = alone();
    let pool = pool();
    let (store, opened) = open(&pool, 3);
    let (home, away) = (keys_of(&store, 0, 2), keys_of(&store, 1, 2));
    // The foreign shard has something of its own to persist.
    let put = |keys: &mut Keyspace<'_>, key: &[u8]| {
        keys.put(0, key, &[b"value"], PutOptions::default()).map(drop)
    };
    opened[1].lock().unwrap().put(0, &away[1], &[b"own"], PutOptions::default()).unwrap();
    let (mut first, mut second) = (opened[0].lock().unwrap(), opened[1].lock().unwrap());
    let mut keys = Keyspace::many(vec![&mut *first, &mut *second], 0);
    keys.begin_batch();
    put(&mut keys, &home[0]).unwrap();
    put(&mut keys, &away[0]).unwrap();
    keys.end_batch();
    let armed = fault::arm("kv.commit.before_fence", FaultAction::Fail, 0);
    let failed = keys.commit();
    assert!(matches!(failed, Err(KvError::Io { .. })), "{failed:?}");
    assert_eq!(armed.hits(), 1, "the foreign shard failed, and home was not tried");
    drop(armed);
    drop(keys);
    // The next turn of the home shard.
    let later = first.commit();
    assert!(matches!(later, Err(KvError::Poisoned { shard: 0 })), "{later:?}");
    drop((first, second));
    // A shard that took no part goes on, alone and not beside a poisoned one.
    let untouched = keys_of(&store, 2, 2);
    let mut third = opened[2].lock().unwrap();
    third.put(0, &untouched[0], &[b"value"], PutOptions::default()).unwrap();
    third.commit().unwrap();
    let mut first = opened[0].lock().unwrap();
    let mut keys = Keyspace::many(vec![&mut *first, &mut *third], 1);
    let refused = put(&mut keys, &untouched[1]);
    assert!(matches!(refused, Err(KvError::Poisoned { shard: 0 })), "{refused:?}");
    assert!(keys.commit().is_err(), "what the poisoned shard holds is not persisted");
    drop(keys);
    third.put(0, &untouched[1], &[b"value"], PutOptions::default()).unwrap();
    third.commit().unwrap();
}

#[test]
fn a_shard_that_failed_before_takes_no_healthy_one_down_that_is_locked_beside_it() {
    let _alone = alone();
    let pool = pool();
    let (store, opened) = open(&pool, 2);
    let (ill, healthy) = (keys_of(&store, 0, 1), keys_of(&store, 1, 2));
    let mut first = opened[0].lock().unwrap();
    first.put(0, &ill[0], &[b"value"], PutOptions::default()).unwrap();
    let armed = fault::arm("kv.commit.before_fence", FaultAction::Fail, 0);
    first.commit().unwrap_err();
    drop(armed);
    let mut second = opened[1].lock().unwrap();
    // A turn that reads of both, or a SAVE: the healthy shard has work of its own clients.
    for home in [0, 1] {
        second.put(0, &healthy[home], &[b"own"], PutOptions::default()).unwrap();
        let mut keys = Keyspace::many(vec![&mut *first, &mut *second], home);
        assert!(keys.lookup(0, &healthy[home]).unwrap().is_some());
        assert!(keys.commit().is_err(), "what the failed shard holds is not persisted");
        drop(keys);
        second.commit().unwrap();
    }
    drop((first, second));
    drop(opened);
    let (_, opened) = open(&pool, 2);
    let mut second = opened[1].lock().unwrap();
    for key in &healthy {
        assert!(second.lookup(0, key).unwrap().is_some());
    }
}

/// The home shard's log holds the newest entry of another shard's key, and is not persisted: that shard
/// has nothing to persist itself, and must show and build on nothing of it.
#[test]
fn a_shard_whose_keys_lie_in_a_log_that_failed_goes_on_with_none_of_them() {
    let _alone = alone();
    for (abandoned, delete) in [(false, false), (false, true), (true, false)] {
        let pool = pool();
        let (store, opened) = open(&pool, 3);
        let key = keys_of(&store, 1, 1).remove(0);
        let mut second = opened[1].lock().unwrap();
        second.put(0, &key, &[b"kept"], PutOptions::default()).unwrap();
        second.commit().unwrap();
        let mut first = opened[0].lock().unwrap();
        let mut keys = Keyspace::many(vec![&mut *first, &mut *second], 0);
        keys.begin_batch();
        match delete {
            true => assert!(keys.delete(0, &key).unwrap()),
            false => drop(keys.put(0, &key, &[b"lost"], PutOptions::default()).unwrap()),
        }
        if abandoned {
            keys.abandon_batch();
        }
        keys.end_batch();
        let armed = fault::arm("kv.commit.before_fence", FaultAction::Fail, 0);
        keys.commit().unwrap_err();
        drop(armed);
        drop(keys);
        // Its own turn: no reader sees what cannot be committed.
        let turn = second.commit();
        assert!(matches!(turn, Err(KvError::Poisoned { shard: 1 })), "{turn:?}");
        let refused = second.put(0, &key, &[b"later"], PutOptions::default());
        assert!(matches!(refused, Err(KvError::Poisoned { shard: 1 })), "{refused:?}");
        drop((first, second));
        // The third one took no part.
        let own = keys_of(&store, 2, 1).remove(0);
        let mut third = opened[2].lock().unwrap();
        third.put(0, &own, &[b"value"], PutOptions::default()).unwrap();
        third.commit().unwrap();
        drop(third);
        drop((store, opened));
        let (_, opened) = open(&pool, 2);
        with_keys(&opened, |keys| {
            let entry = keys.lookup(0, &key).unwrap();
            let mut value = Vec::new();
            if let Some(entry) = &entry {
                keys.read_value(entry, &mut value).unwrap();
            }
            // What was stored and not persisted may have lasted, but for a batch without an end.
            let lasted = if delete { entry.is_none() } else { value == b"lost" };
            assert!(value == b"kept" || (lasted && !abandoned), "{value:?}");
        });
    }
}

/// A command over several shards that was persisted leaves no shard that another one's later failure
/// takes down.
#[test]
fn a_shard_whose_keys_in_another_log_are_persisted_outlives_that_logs_failure() {
    let _alone = alone();
    let pool = pool();
    let (store, opened) = open(&pool, 2);
    let (home, away) = (keys_of(&store, 0, 1), keys_of(&store, 1, 2));
    with_keys(&opened, |keys| {
        keys.put(0, &away[0], &[b"value"], PutOptions::default()).unwrap();
        keys.commit().unwrap();
    });
    let mut first = opened[0].lock().unwrap();
    first.put(0, &home[0], &[b"value"], PutOptions::default()).unwrap();
    let armed = fault::arm("kv.commit.before_fence", FaultAction::Fail, 0);
    first.commit().unwrap_err();
    drop(armed);
    let mut second = opened[1].lock().unwrap();
    assert!(second.lookup(0, &away[0]).unwrap().is_some());
    second.put(0, &away[1], &[b"value"], PutOptions::default()).unwrap();
    second.commit().unwrap();
}
