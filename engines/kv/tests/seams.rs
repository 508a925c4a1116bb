//! Where two mechanisms meet: batches and full segments, eviction and one-sided clients, flushes
//! and restores, collection and deletion. Each was once a way to lose or resurrect something.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::sync::{Arc, Mutex, MutexGuard};

use beeline_env::ManualClock;
use beeline_kv::entry::Draft;
use beeline_kv::{
    ClientLog, Eviction, Keyspace, KvError, Notice, PutOptions, Shard, Store, StoreOptions, audit,
    restore,
};
use beeline_pmem::{Pool, PoolOptions};

const SEGMENT: u32 = 64 << 10;

type Shards = Vec<Arc<Mutex<Shard>>>;

fn pool(segments: u64) -> Pool {
    Pool::dram(&PoolOptions::volatile(SEGMENT, segments * u64::from(SEGMENT))).unwrap()
}

fn open_with(pool: &Pool, change: impl FnOnce(&mut StoreOptions)) -> (Arc<Store>, Shards) {
    let clock = Arc::new(ManualClock::new(1_000_000));
    let mut options = StoreOptions { clock, ..StoreOptions::default() };
    change(&mut options);
    let (store, shards, report) = Store::open(pool.clone(), options).unwrap();
    assert_eq!(report.damaged, 0, "{report:?}");
    (store, shards)
}

fn open(pool: &Pool, shards: usize) -> (Arc<Store>, Shards) {
    open_with(pool, |options| options.shards = shards)
}

fn with_keys<R>(shards: &Shards, home: usize, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
    let mut guards: Vec<MutexGuard<'_, Shard>> =
        shards.iter().map(|shard| shard.lock().unwrap()).collect();
    body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), home))
}

fn get(keys: &mut Keyspace<'_>, key: &[u8]) -> Option<Vec<u8>> {
    let entry = keys.lookup(0, key).unwrap()?;
    let mut value = Vec::new();
    keys.read_value(&entry, &mut value).unwrap();
    Some(value)
}

fn put(keys: &mut Keyspace<'_>, key: &[u8], value: &[u8]) -> Result<u64, KvError> {
    keys.put(0, key, &[value], PutOptions::default())
}

/// Keys that live in shard `owner`.
fn keys_of(store: &Store, owner: usize, count: usize) -> Vec<Vec<u8>> {
    (0..)
        .map(|n: u32| format!("key-{n}").into_bytes())
        .filter(|key| store.shard_of(0, key) == owner)
        .take(count)
        .collect()
}

fn client_put(
    shard: &mut Shard,
    log: &mut ClientLog,
    draft: Draft<'_>,
    offset: Option<u32>,
) -> (u32, u32) {
    let mut bytes = Vec::new();
    let slot_bytes = draft.form(&mut bytes).unwrap();
    if log.segment().is_none() || (offset.is_none() && log.tail() + slot_bytes > SEGMENT) {
        shard.grant(log).unwrap();
    }
    let offset = offset.unwrap_or(log.tail());
    log.segment().unwrap().store(offset as usize, &bytes);
    shard.accept(log, Notice { offset }).unwrap();
    (offset, slot_bytes)
}

#[test]
fn a_refused_member_leaves_the_rest_of_its_batch_whole() {
    let pool = pool(12);
    let (_, shards) = open(&pool, 1);
    with_keys(&shards, 0, |keys| {
        keys.begin_batch();
        put(keys, b"first", &[1; 40_000]).unwrap();
        let refused = put(keys, b"second", &[2; 40_000]).unwrap_err();
        assert!(matches!(refused, KvError::BatchTooLarge { .. }), "{refused}");
        put(keys, b"third", &[3; 100]).unwrap();
        put(keys, b"fourth", &[4; 20_000]).unwrap();
        keys.end_batch();
        keys.commit().unwrap();
    });
    drop(shards);
    let (store, shards) = open(&pool, 1);
    with_keys(&shards, 0, |keys| {
        assert!(get(keys, b"first") == Some(vec![1; 40_000]), "acknowledged");
        assert_eq!(get(keys, b"second"), None);
        assert_eq!(get(keys, b"third"), Some(vec![3; 100]));
        assert!(get(keys, b"fourth") == Some(vec![4; 20_000]));
    });
    assert_eq!(audit(&store, &shards), Vec::<String>::new());
}

#[test]
fn a_batch_that_moves_while_the_home_shard_expires_keys_keeps_the_keys_of_others() {
    let pool = pool(16);
    let clock = Arc::new(ManualClock::new(1_000_000));
    let (store, shards) = open_with(&pool, |options| {
        options.shards = 2;
        options.clock = clock.clone();
    });
    let (home, away) = (keys_of(&store, 0, 300), keys_of(&store, 1, 3));
    with_keys(&shards, 0, |keys| {
        for key in &home {
            let options = PutOptions { kind: 0, expires_at_ms: 1_000_500 };
            keys.put(0, key, &[&[0; 90]], options).unwrap();
        }
        keys.commit().unwrap();
        // The batch begins so near the end of the head that the tombstones below fill it.
        put(keys, b"filler", &vec![1; 64_000 - home.len() * 160]).unwrap();
        clock.advance(std::time::Duration::from_secs(10));
        keys.begin_batch();
        for (n, key) in away.iter().enumerate() {
            put(keys, key, &[n as u8; 500]).unwrap();
        }
        for key in &home {
            assert_eq!(get(keys, key), None, "expired");
            assert!(get(keys, &away[0]) == Some(vec![0; 500]), "in the open batch");
        }
        keys.end_batch();
        keys.commit().unwrap();
        for (n, key) in away.iter().enumerate() {
            assert!(get(keys, key) == Some(vec![n as u8; 500]), "after the batch");
        }
    });
    assert_eq!(audit(&store, &shards), Vec::<String>::new());
    drop((store, shards));
    let (store, shards) = open(&pool, 3);
    with_keys(&shards, 0, |keys| {
        for (n, key) in away.iter().enumerate() {
            assert!(get(keys, key) == Some(vec![n as u8; 500]), "after a restart");
        }
    });
    assert_eq!(audit(&store, &shards), Vec::<String>::new());
}

#[test]
fn eviction_for_a_client_entry_never_lands_it_in_another_keys_slot() {
    let pool = pool(14);
    let (store, shards) = open_with(&pool, |options| {
        options.max_memory_bytes = 330_000;
        options.eviction = Eviction::AllKeysRandom;
    });
    let mut log = shards[0].lock().unwrap().open_client_log();
    let mut last = std::collections::BTreeMap::new();
    let mut random = 7_u64;
    for turn in 0..6000_u32 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let name = format!("k{}", (random >> 40) % 900).into_bytes();
        let value = vec![turn as u8; 20 + (random >> 33) as usize % 900];
        let mut shard = shards[0].lock().unwrap();
        let draft = Draft { key: &name, value: &value, ..Draft::default() };
        let mut bytes = Vec::new();
        let slot = draft.form(&mut bytes).unwrap();
        if log.segment().is_none() || log.tail() + slot > SEGMENT {
            match shard.grant(&mut log) {
                Ok(_) => (),
                Err(KvError::PoolFull { .. }) => {
                    let _ = shard.maintain(1 << 20).unwrap();
                    continue;
                }
                Err(error) => panic!("{error}"),
            }
        }
        let offset = log.tail();
        log.segment().unwrap().store(offset as usize, &bytes);
        if shard.accept(&mut log, Notice { offset }).is_err() {
            continue;
        }
        shard.commit().unwrap();
        last.insert(name.clone(), value);
        // What is there is what was written last; an evicted key is absent.
        for (name, value) in last.range(name.clone()..).take(3).chain(last.iter().take(2)) {
            let Some(entry) = shard.lookup(0, name).unwrap() else { continue };
            let mut seen = Vec::new();
            shard.read_value(&entry, &mut seen).unwrap();
            assert_eq!(&seen, value, "turn {turn}");
        }
    }
    assert!(store.stats().total.evicted > 100);
    assert_eq!(audit(&store, &shards), Vec::<String>::new());
}

#[test]
fn a_scribbled_tombstone_of_an_unknown_key_does_not_outlive_its_segment() {
    let pool = pool(16);
    let (store, shards) = open(&pool, 1);
    let mut shard = shards[0].lock().unwrap();
    let mut log = shard.open_client_log();
    let draft = Draft { key: b"never there", tombstone: true, ..Draft::default() };
    let (offset, _) = client_put(&mut shard, &mut log, draft, None);
    shard.commit().unwrap();
    log.segment().unwrap().store(offset as usize, &[0xFF; 48]);
    shard.close_client_log(log);
    shard.put(0, b"looked at", &[&vec![1; 30_000]], PutOptions::default()).unwrap();
    shard.commit().unwrap();
    while shard.maintain(1 << 20).unwrap().did_work {}
    assert_eq!(store.stats().total.segments_collected, 1, "the client's segment");
    assert!(shard.lookup(0, b"never there").unwrap().is_none());
    shard.put(0, b"never there", &[b"now"], PutOptions::default()).unwrap();
    shard.commit().unwrap();
    drop(shard);
    assert_eq!(audit(&store, &shards), Vec::<String>::new());
}

#[test]
fn a_snapshot_restored_into_a_pool_that_was_flushed_survives_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("snapshot");
    let source = pool(12);
    let (_, shards) = open(&source, 1);
    with_keys(&shards, 0, |keys| {
        put(keys, b"a", b"1").unwrap();
        put(keys, b"b", b"2").unwrap();
        keys.delete(0, b"a").unwrap();
        keys.commit().unwrap();
        keys.begin_snapshot().unwrap().write(&path).unwrap();
    });
    let target = pool(12);
    for _ in 0..2 {
        let (_, shards) = open(&target, 1);
        with_keys(&shards, 0, |keys| keys.flush(None).unwrap());
    }
    assert!(target.segments().is_empty());
    let options = || StoreOptions { shards: 2, ..StoreOptions::default() };
    let ((_, shards, _), _) = restore(&path, target.clone(), options()).unwrap();
    drop(shards);
    let (_, shards) = open(&target, 1);
    with_keys(&shards, 0, |keys| {
        assert_eq!(get(keys, b"a"), None);
        assert_eq!(get(keys, b"b"), Some(b"2".to_vec()));
    });
}

#[test]
fn a_freed_segment_leaves_no_count_in_the_descriptor_that_is_used_again() {
    let pool = pool(12);
    let (store, shards) = open(&pool, 1);
    for turn in 0..3000_usize {
        let mut shard = shards[0].lock().unwrap();
        // Segments of many entries give way to segments of few.
        let length = if (turn / 500).is_multiple_of(2) { 300 } else { 20_000 };
        for _ in 0..1 + turn % 3 {
            shard.put(0, b"churn", &[&vec![turn as u8; length]], PutOptions::default()).unwrap();
        }
        shard.commit().unwrap();
        while shard.maintain(1 << 20).unwrap().did_work {}
        if turn % 500 > 30 {
            continue;
        }
        // As kill -9 leaves it: what is in memory now.
        for damage in beeline_kv::check_pool(&pool).damages {
            assert!(!damage.what.contains("not verify"), "turn {turn}: {damage:?}");
        }
    }
    let total = store.stats().total;
    assert!(total.segments_collected + total.segments_recycled > 10);
}

#[test]
fn while_a_snapshot_is_written_clients_are_told_to_append() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool(12);
    let (_, shards) = open(&pool, 1);
    let mut log = shards[0].lock().unwrap().open_client_log();
    shards[0].lock().unwrap().grant(&mut log).unwrap();
    let write = |shard: &mut Shard, log: &mut ClientLog, value: &[u8]| {
        let mut bytes = Vec::new();
        Draft { key: b"key", value, ..Draft::default() }.form(&mut bytes).unwrap();
        let offset = log.tail();
        log.segment().unwrap().store(offset as usize, &bytes);
        let accepted = shard.accept(log, Notice { offset }).unwrap();
        shard.commit().unwrap();
        accepted
    };
    let before = write(&mut shards[0].lock().unwrap(), &mut log, b"before");
    assert_eq!(before.smallest_version_read, None);
    let snapshot = with_keys(&shards, 0, |keys| keys.begin_snapshot().unwrap());
    // The newest version at the barrier is stale from now on: its client would overwrite it, and
    // the bytes would be gone before the server can refuse.
    let during = write(&mut shards[0].lock().unwrap(), &mut log, b"during");
    assert!(during.smallest_version_read.is_some_and(|version| version <= before.version));
    snapshot.write(&directory.path().join("snapshot")).unwrap();
    let after = write(&mut shards[0].lock().unwrap(), &mut log, b"after");
    assert_eq!(after.smallest_version_read, None);
}

/// Puts fresh keys until every shard refuses; returns the keys that each took.
fn fill_every_shard(store: &Store, locks: &Shards, length: usize) -> Vec<Vec<[u8; 4]>> {
    let mut stored = vec![Vec::new(); locks.len()];
    let mut full = vec![false; locks.len()];
    for n in 0_u32.. {
        let key = n.to_be_bytes();
        let owner = store.shard_of(0, &key);
        if full.iter().all(|full| *full) {
            break;
        }
        if full[owner] {
            continue;
        }
        let mut shard = locks[owner].lock().unwrap();
        match shard.put(0, &key, &[&vec![n as u8; length]], PutOptions::default()) {
            Ok(_) => stored[owner].push(key),
            Err(KvError::PoolFull { .. }) => full[owner] = true,
            Err(error) => panic!("{error}"),
        }
        shard.commit().unwrap();
    }
    stored
}

/// Deletions need no patience: after a restart every shard may need a head for its first one, while
/// the other shards' collectors hold what they have begun.
#[test]
fn the_first_deletion_in_every_shard_of_a_full_pool_is_taken_at_once() {
    for (shards, length) in [(2, 15_000), (2, 3000), (4, 15_000), (4, 20), (8, 15_000)] {
        let pool = pool(shards as u64 * 12);
        let (store, locks) = open(&pool, shards);
        let stored = fill_every_shard(&store, &locks, length);
        drop((store, locks));
        let (_, locks) = open(&pool, shards);
        for (owner, keys) in stored.iter().enumerate() {
            for other in (0..shards).filter(|other| *other != owner) {
                let _ = locks[other].lock().unwrap().maintain(1 << 10);
            }
            let mut shard = locks[owner].lock().unwrap();
            let deleted = shard.delete(0, &keys[0]);
            assert!(deleted.as_ref().is_ok_and(|found| *found), "{shards} {length}: {deleted:?}");
            shard.commit().unwrap();
        }
    }
}

#[test]
fn every_shard_of_a_full_pool_can_delete() {
    for (shards, length) in [(2, 20), (4, 20), (4, 3000), (4, 3000), (4, 3000), (8, 200)] {
        let pool = pool(shards as u64 * 4);
        let (store, locks) = open(&pool, shards);
        let stored = fill_every_shard(&store, &locks, length);
        // One shard after the other, with every other shard idle but for its upkeep.
        for (owner, (own, keys)) in locks.iter().zip(&stored).enumerate() {
            for key in keys {
                let mut turn = 0;
                loop {
                    match own.lock().unwrap().delete(0, key) {
                        Ok(found) => break assert!(found),
                        Err(KvError::PoolFull { .. }) => (),
                        Err(error) => panic!("{error}"),
                    }
                    for lock in &locks {
                        let _ = lock.lock().unwrap().maintain(1 << 20);
                    }
                    turn += 1;
                    assert!(turn < 50, "{shards} shards, {length} bytes: shard {owner} is stuck");
                }
                own.lock().unwrap().commit().unwrap();
            }
        }
        with_keys(&locks, 0, |keys| assert!(keys.is_empty(0)));
        assert_eq!(audit(&store, &locks), Vec::<String>::new());
        // And the room is there again.
        for (owner, own) in locks.iter().enumerate() {
            let key = keys_of(&store, owner, 1).remove(0);
            let mut shard = own.lock().unwrap();
            shard.put(0, &key, &[&vec![1; length]], PutOptions::default()).unwrap();
            shard.commit().unwrap();
        }
    }
}

#[test]
fn a_row_copied_in_a_batch_leaves_what_was_reserved_for_the_rest() {
    let pool = pool(32);
    let (store, shards) = open(&pool, 2);
    with_keys(&shards, 0, |keys| {
        let mut row = keys.new_row(1, 0).unwrap();
        for n in 0..20_u8 {
            keys.put_field(0, b"from", &mut row, &[n], &[&[n; 100]]).unwrap();
        }
        keys.put_head(0, b"from", &row).unwrap();
        keys.commit().unwrap();
        keys.reserve_bytes(40_000).unwrap();
        store.set_max_memory_bytes(store.memory_bytes() + 20_000);
        keys.begin_batch();
        // Does not fit beside what is reserved: refused, and that stays reserved.
        let row = keys.row(0, b"from").unwrap().unwrap();
        let refused = keys.copy_row((0, b"from"), &row, (0, b"to"));
        assert!(matches!(refused, Err(KvError::MemoryLimit { .. })), "{refused:?}");
        store.set_max_memory_bytes(store.memory_bytes() + 60_000);
        keys.copy_row((0, b"from"), &row, (0, b"to")).unwrap();
        store.set_max_memory_bytes(1);
        for n in 0..3_u8 {
            put(keys, &[b'r', n], &[n; 12_000]).unwrap();
        }
        let refused = put(keys, b"more", &[0; 12_000]);
        assert!(matches!(refused, Err(KvError::MemoryLimit { .. })), "{refused:?}");
        keys.end_batch();
        keys.commit().unwrap();
        assert_eq!(keys.row(0, b"to").unwrap().unwrap().length, 20);
    });
}
