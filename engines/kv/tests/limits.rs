//! A full pool, a memory limit, and collection while nearly everything is in use.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::sync::{Arc, Mutex};

use beeline_env::ManualClock;
use beeline_kv::entry::Draft;
use beeline_kv::{Eviction, KvError, Notice, PutOptions, Shard, Store, StoreOptions, audit};
use beeline_pmem::{Pool, PoolOptions};

const SEGMENT: u32 = 64 << 10;

struct Rig {
    store: Arc<Store>,
    shards: Vec<Arc<Mutex<Shard>>>,
    clock: Arc<ManualClock>,
}

fn rig(segments: u64, change: impl FnOnce(&mut StoreOptions)) -> Rig {
    let pool = Pool::dram(&PoolOptions::volatile(SEGMENT, segments * u64::from(SEGMENT))).unwrap();
    let clock = Arc::new(ManualClock::new(1_000_000));
    let mut options = StoreOptions { clock: clock.clone(), ..StoreOptions::default() };
    change(&mut options);
    let (store, shards, _) = Store::open(pool, options).unwrap();
    Rig { store, shards, clock }
}

fn key(n: u32) -> [u8; 4] {
    n.to_be_bytes()
}

/// Puts fresh keys until the pool refuses; returns how many it took.
fn fill(shard: &mut Shard, length: usize) -> u32 {
    for n in 0.. {
        match shard.put(0, &key(n), &[&vec![n as u8; length]], PutOptions::default()) {
            Ok(_) => shard.commit().unwrap(),
            Err(KvError::PoolFull { .. }) => return n,
            Err(error) => panic!("{error}"),
        }
    }
    unreachable!()
}

#[test]
fn a_full_pool_refuses_writes_takes_deletions_and_recovers() {
    for length in [20, 1000, 20_000] {
        let rig = rig(12, |_| ());
        let mut shard = rig.shards[0].lock().unwrap();
        let stored = fill(&mut shard, length);
        assert!(stored > 20);
        let error = shard.put(0, b"more", &[&vec![0; length]], PutOptions::default()).unwrap_err();
        assert!(error.is_retryable());
        for n in 0..stored {
            let entry = shard.lookup(0, &key(n)).unwrap().unwrap();
            shard.with_value(&entry, |value| assert_eq!(value[0], n as u8)).unwrap();
        }
        // Every second key goes; then there is room for as much again.
        for n in (0..stored).step_by(2) {
            let deleted = shard.delete(0, &key(n));
            assert!(
                matches!(deleted, Ok(true)),
                "{length}: deletion {n} of {stored} {deleted:?} {:?}",
                rig.store.stats()
            );
            shard.commit().unwrap();
        }
        let mut again = 0;
        for n in 0..stored / 3 {
            match shard.put(0, &key(stored + n), &[&vec![0; length]], PutOptions::default()) {
                Ok(_) => again += 1,
                Err(KvError::PoolFull { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            shard.commit().unwrap();
            shard.maintain(64 << 10).unwrap();
        }
        assert!(again > stored / 4, "{again} of {} fitted after deleting half", stored / 3);
        for n in (1..stored).step_by(2) {
            assert!(shard.lookup(0, &key(n)).unwrap().is_some());
        }
        drop(shard);
        let findings = audit(&rig.store, &rig.shards);
        assert!(findings.is_empty(), "{findings:?}");
    }
}

#[test]
fn everything_can_be_deleted_from_a_full_pool() {
    let rig = rig(12, |_| ());
    let mut shard = rig.shards[0].lock().unwrap();
    let stored = fill(&mut shard, 0);
    for n in 0..stored {
        assert!(shard.delete(0, &key(n)).unwrap(), "deletion {n} of {stored}");
        shard.commit().unwrap();
    }
    assert_eq!(shard.len(0), 0);
    // Tombstones go once what they hide is gone, so in the end hardly anything is in use.
    for _ in 0..2000 {
        shard.maintain(1 << 20).unwrap();
    }
    let again = fill(&mut shard, 0);
    assert!(again > stored * 8 / 10, "{again} of {stored} fit again");
}

#[test]
fn overwriting_in_a_nearly_full_pool_goes_on_for_ever() {
    let rig = rig(16, |_| ());
    let mut shard = rig.shards[0].lock().unwrap();
    // About three quarters of what writers may use stays live.
    let keys = 500;
    let mut random = 7_u64;
    for turn in 0..30_000_u32 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let n = (random >> 33) as u32 % keys;
        let value = [turn.to_le_bytes().as_slice(), &[n as u8; 1200]].concat();
        shard.put(0, &key(n), &[&value], PutOptions::default()).unwrap();
        shard.commit().unwrap();
        if turn % 8 == 0 {
            shard.maintain(32 << 10).unwrap();
        }
    }
    let stats = shard.stats();
    println!(
        "{} segments collected, {} bytes copied for {} stored",
        stats.segments_collected, stats.collector_copied_bytes, stats.bytes_stored
    );
    assert!(stats.segments_collected > 100);
    for n in 0..keys {
        let entry = shard.lookup(0, &key(n)).unwrap().unwrap();
        shard.with_value(&entry, |value| assert_eq!(value[4..], [n as u8; 1200])).unwrap();
    }
    drop(shard);
    assert!(audit(&rig.store, &rig.shards).is_empty());
}

#[test]
fn a_reader_keeps_its_segment_from_being_freed() {
    let rig = rig(10, |_| ());
    let mut shard = rig.shards[0].lock().unwrap();
    shard.put(0, b"read", &[b"value"], PutOptions::default()).unwrap();
    let entry = shard.lookup(0, b"read").unwrap().unwrap();
    let guard = shard.begin_read(&entry).unwrap();
    let churn = |shard: &mut Shard| {
        for turn in 0..200_u32 {
            shard.put(0, &key(turn % 3), &[&[1; 9000]], PutOptions::default()).unwrap();
            shard.commit().unwrap();
        }
    };
    churn(&mut shard);
    let mut bytes = vec![0; guard.length_bytes() as usize];
    let offset = guard.offset() as usize;
    shard.segment_read(&guard).read(offset, &mut bytes);
    assert_eq!(&bytes[guard.value_start() as usize..], b"value");
    let id = guard.segment_id();
    assert!(rig.store.pool().segment(id).is_some(), "a pinned segment is not freed");
    shard.end_read(guard);
    churn(&mut shard);
    assert!(shard.lookup(0, b"read").unwrap().is_some());
}

#[test]
fn the_memory_limit_follows_its_policy() {
    let value = [0; 500];
    let put = |rig: &Rig, n: u32, expires_at_ms: u64| {
        let mut shard = rig.shards[0].lock().unwrap();
        let options = PutOptions { expires_at_ms, ..PutOptions::default() };
        let outcome = shard.put(0, &key(n), &[&value], options);
        shard.tick();
        outcome
    };
    let has =
        |rig: &Rig, n: u32| rig.shards[0].lock().unwrap().lookup(0, &key(n)).unwrap().is_some();
    for policy in Eviction::ALL {
        let rig = rig(64, |options| {
            options.max_memory_bytes = 100_000;
            options.eviction = policy;
        });
        // Half of the keys expire, the later the larger their number.
        let mut refused = 0;
        for n in 0..400 {
            rig.clock.advance(std::time::Duration::from_secs(1));
            let expires = if n % 2 == 0 { 100_000_000 + u64::from(n) } else { 0 };
            match put(&rig, n, expires) {
                Ok(_) => {}
                Err(KvError::MemoryLimit { used_bytes, limit_bytes }) => {
                    assert!(used_bytes <= limit_bytes);
                    refused += 1;
                }
                Err(error) => panic!("{error}"),
            }
            // Key 1 is always in use.
            assert!(n == 0 || has(&rig, 1) || policy == Eviction::AllKeysRandom);
        }
        let stats = rig.store.stats().total;
        assert!(rig.store.memory_bytes() <= 100_000, "{policy:?}");
        match policy {
            Eviction::NoEviction => {
                assert_eq!(stats.evicted, 0);
                assert!(refused > 100);
            }
            Eviction::AllKeysLru | Eviction::AllKeysRandom => {
                assert_eq!(refused, 0);
                assert!(stats.evicted > 100);
                assert!(has(&rig, 399));
            }
            _ => {
                assert!(stats.evicted > 50);
                assert!((0..100).all(|n| n % 2 == 0 || has(&rig, n)), "{policy:?}: only expiring");
            }
        }
    }
}

#[test]
fn expired_keys_go_without_being_asked_for() {
    let rig = rig(64, |_| ());
    let mut shard = rig.shards[0].lock().unwrap();
    for n in 0..5000 {
        let expires_at_ms = if n % 5 == 0 { 0 } else { 1_000_000 + u64::from(n) };
        let options = PutOptions { expires_at_ms, ..PutOptions::default() };
        shard.put((n % 3) as u8, &key(n), &[b"v"], options).unwrap();
    }
    assert_eq!((0..3).map(|database| shard.len(database)).sum::<u64>(), 5000);
    let mut sleeps = 0;
    for _ in 0..3000 {
        let maintenance = shard.maintain(1 << 20).unwrap();
        let Some(deadline) = maintenance.next_deadline_ns else { break };
        if !maintenance.did_work {
            rig.clock.advance_to_ns(deadline);
            sleeps += 1;
        }
    }
    assert_eq!((0..3).map(|database| shard.len(database)).sum::<u64>(), 1000);
    assert_eq!(shard.stats().expired, 4000);
    assert!(sleeps < 1500, "{sleeps} wake-ups");
    assert_eq!(shard.maintain(1 << 20).unwrap().next_deadline_ns, None, "nothing left to wait for");
}

/// A tmpfs of its own, gone with the value; none (and a reason) without the right to mount.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(options: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(directory.path())
            .stderr(std::process::Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if !mounted {
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("skipped: mounting a tmpfs needs root\n"),
            );
        }
        mounted.then(|| Self(directory))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_refuses_no_deletion_and_gets_room_from_them() {
    let Some(disk) = Tmpfs::mount("size=2m") else { return };
    let capacity_bytes = 64 * u64::from(SEGMENT);
    let options = PoolOptions { segment_bytes: SEGMENT, capacity_bytes, ..PoolOptions::default() };
    let pool = Pool::create(&disk.0.path().join("data"), &options).unwrap();
    let (_, shards, _) = Store::open(pool, StoreOptions::default()).unwrap();
    let mut shard = shards[0].lock().unwrap();
    let put = |shard: &mut Shard, n: u32| {
        let stored = shard.put(0, &key(n), &[&[n as u8; 700]], PutOptions::default());
        stored.map(|_| shard.commit().unwrap())
    };
    let (stored, error) = (0..).find_map(|n| put(&mut shard, n).err().map(|e| (n, e))).unwrap();
    assert!(matches!(error, KvError::Pmem(beeline_pmem::PmemError::NoSpace { .. })), "{error}");
    assert!(error.is_retryable());
    for n in 0..stored {
        assert!(shard.delete(0, &key(n)).unwrap(), "deletion {n} of {stored}");
        shard.commit().unwrap();
    }
    for _ in 0..200 {
        if !shard.maintain(1 << 20).unwrap().did_work {
            break;
        }
    }
    for n in 0..stored / 2 {
        put(&mut shard, n).unwrap();
    }
}

#[test]
fn a_batch_for_which_there_is_no_room_is_refused_before_its_first_entry() {
    let rig = rig(8, |_| {});
    let mut shard = rig.shards[0].lock().unwrap();
    let count = fill(&mut shard, 5000);
    let mut keys = beeline_kv::Keyspace::single(&mut shard);
    keys.begin_batch();
    let refused = keys.reserve([(3, 9000); 6].into_iter());
    assert!(matches!(refused, Err(KvError::PoolFull { .. })), "{refused:?}");
    let refused = keys.reserve([(3, 30_000); 3].into_iter());
    assert!(matches!(refused, Err(KvError::BatchTooLarge { .. })), "{refused:?}");
    keys.end_batch();
    keys.commit().unwrap();
    assert_eq!(keys.len(0), u64::from(count));
    for n in 0..count {
        assert!(keys.delete(0, &key(n)).unwrap());
    }
    keys.commit().unwrap();
    while keys.home_mut().maintain(1 << 20).unwrap().did_work {}
    // What was reserved fits, whatever the head held before.
    keys.put(0, b"before", &[&[1; 40_000]], PutOptions::default()).unwrap();
    keys.begin_batch();
    keys.reserve([(3, 9000); 6].into_iter()).unwrap();
    for n in 0..6_u8 {
        keys.put(0, &[b'k', b'0', n], &[&[n; 9000]], PutOptions::default()).unwrap();
    }
    keys.end_batch();
    keys.commit().unwrap();
    assert_eq!(keys.len(0), 7);
}

#[test]
fn a_shortage_wakes_whoever_may_hold_garbage() {
    let rig = rig(8, |_| {});
    let woken = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let counter = Arc::clone(&woken);
    rig.store.on_shortage(move || {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    });
    fill(&mut rig.shards[0].lock().unwrap(), 5000);
    assert!(woken.load(std::sync::atomic::Ordering::Relaxed) > 0);
}

#[test]
fn an_owner_that_writes_nothing_has_every_shard_look_for_garbage() {
    let rig = rig(8, |_| {});
    let woken = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let counter = Arc::clone(&woken);
    rig.store.on_shortage(move || {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    });
    let mut shard = rig.shards[0].lock().unwrap();
    for n in 0..200_u32 {
        shard.put(0, &key(n), &[&[n as u8; 700]], PutOptions::default()).unwrap();
    }
    for n in 0..199 {
        assert!(shard.delete(0, &key(n)).unwrap());
    }
    shard.commit().unwrap();
    assert_eq!(woken.load(std::sync::atomic::Ordering::Relaxed), 0, "there was room");
    let used = rig.store.stats().used_bytes;
    rig.store.ask_for_room();
    assert_eq!(woken.load(std::sync::atomic::Ordering::Relaxed), 1);
    while shard.maintain(1 << 20).unwrap().did_work {}
    assert!(rig.store.stats().used_bytes < used, "{used} bytes stay in use");
}

#[test]
fn overwriting_stays_near_what_is_live() {
    let rig = rig(400, |options| options.warm_bytes = Some(SEGMENT / 4));
    let mut shard = rig.shards[0].lock().unwrap();
    let mut run = |keys: u32, rounds: u32, length: usize| {
        let mut most = 0;
        for n in 0..keys * rounds {
            // Some keys more often than others.
            let at = if n % 3 == 0 { n * 7919 % keys } else { n * 31 % keys.div_ceil(4) };
            shard.put(0, &key(at), &[&vec![n as u8; length]], PutOptions::default()).unwrap();
            if n % 8 == 7 {
                shard.commit().unwrap();
                let _ = shard.maintain(64 << 10).unwrap();
            }
            if n > keys * 3 {
                most = most.max(rig.store.stats().used_bytes);
            }
        }
        (most / u64::from(SEGMENT), rig.store.stats().total.live_bytes / u64::from(SEGMENT))
    };
    let (used, live) = run(10, 4000, 300);
    println!("10 keys: {used} segments for {live}");
    assert!(used <= 8, "{used} segments for {live} of live data");
    let (used, live) = run(1000, 30, 1000);
    println!("1000 keys: {used} segments for {live}");
    // As much again as is live, heads, and what is kept warm.
    assert!(used <= 2 * live + 14, "{used} segments for {live} of live data");
    drop(shard);
    let total = rig.store.stats().total;
    assert!(total.segments_recycled > 100, "{total:?}");
    assert_eq!(audit(&rig.store, &rig.shards), Vec::<String>::new());
}

#[test]
fn keys_that_expire_in_a_full_pool_go_as_soon_as_there_is_room() {
    let rig = rig(8, |_| ());
    let mut shard = rig.shards[0].lock().unwrap();
    // Every second key expires, so that no segment becomes garbage as a whole.
    let (mut stored, mut expiring) = (0, 0);
    loop {
        let expires_at_ms = if stored % 2 == 0 { 1_001_000 } else { 0 };
        let options = PutOptions { expires_at_ms, ..PutOptions::default() };
        match shard.put(0, &key(stored), &[b"v"], options) {
            Ok(_) => shard.commit().unwrap(),
            Err(KvError::PoolFull { .. }) => break,
            Err(error) => panic!("{error}"),
        }
        expiring += u64::from(stored % 2 == 0);
        stored += 1;
    }
    rig.clock.advance(std::time::Duration::from_secs(2));
    // As a shard's thread does it: at the deadlines it is given, whatever the last time ended in.
    for _ in 0..20_000 {
        let maintained = shard.maintain(64 << 10);
        assert!(maintained.is_ok(), "{maintained:?}");
        rig.clock.advance(std::time::Duration::from_millis(10));
    }
    assert_eq!(shard.len(0), u64::from(stored) - expiring);
    assert_eq!(rig.store.stats().total.expired, expiring);
    drop(shard);
    assert_eq!(audit(&rig.store, &rig.shards), Vec::<String>::new());
}

#[test]
fn memory_of_keys_that_are_gone_does_not_count_for_ever() {
    let Rig { store, shards, .. } = rig(256, |_| {});
    let mut shard = shards[0].lock().unwrap();
    for n in 0..60_000 {
        shard.put(0, &key(n), &[b"v"], PutOptions::default()).unwrap();
    }
    shard.commit().unwrap();
    shard.tick();
    let full = shard.stats().index_bytes;
    for n in 0..60_000 {
        assert!(shard.delete(0, &key(n)).unwrap());
        if n % 500 == 0 {
            shard.commit().unwrap();
            shard.maintain(1 << 20).unwrap();
        }
    }
    shard.commit().unwrap();
    while shard.maintain(1 << 20).unwrap().did_work {}
    shard.tick();
    let left = shard.stats().index_bytes;
    assert!(left * 3 < full, "{left} of {full} bytes of index are left");
    assert!(store.memory_bytes() < full, "and the account follows");
}

#[test]
fn places_in_a_clients_open_segment_are_in_the_memory_account() {
    let Rig { store, shards, .. } = rig(16, |_| {});
    let mut shard = shards[0].lock().unwrap();
    let mut log = shard.open_client_log();
    shard.grant(&mut log).unwrap();
    assert_eq!(shard.stats().client_slot_bytes, 0);
    for n in 0..500_u32 {
        let key = n.to_be_bytes();
        let mut bytes = Vec::new();
        Draft { key: &key, value: b"v", ..Draft::default() }.form(&mut bytes).unwrap();
        let offset = log.tail();
        log.segment().unwrap().store(offset as usize, &bytes);
        shard.accept(&mut log, Notice { offset }).unwrap();
    }
    shard.commit().unwrap();
    let counted = shard.stats().client_slot_bytes;
    assert!((500 * 16..=1024 * 16).contains(&counted), "{counted}");
    let before = store.memory_bytes();
    shard.close_client_log(log);
    assert_eq!(store.memory_bytes(), before - counted);
}

/// A row of `fields` fields in database 0.
fn row_of(shard: &mut Shard, name: &[u8], fields: u32, length: usize) -> u32 {
    let mut keys = beeline_kv::Keyspace::single(shard);
    let mut row = keys.new_row(1, 0).unwrap();
    for n in 0..fields {
        keys.begin_batch();
        let stored = keys
            .put_field(0, name, &mut row, &key(n), &[&vec![7; length]])
            .and_then(|_| keys.put_head(0, name, &row));
        keys.end_batch();
        keys.commit().unwrap();
        match stored {
            Ok(()) => {}
            Err(KvError::PoolFull { .. }) => return n,
            Err(error) => panic!("{error}"),
        }
    }
    fields
}

#[test]
fn a_row_that_ended_in_a_full_pool_is_collected_once_there_is_room() {
    let full = row_of(&mut rig(12, |_| ()).shards[0].lock().unwrap(), b"row", u32::MAX, 400);
    assert!(full > 500);
    let rig = rig(12, |_| ());
    let mut shard = rig.shards[0].lock().unwrap();
    let fields = row_of(&mut shard, b"row", full * 9 / 10, 400);
    // Readers keep every segment, so nothing can be collected, and tombstones find no room.
    let mut keys = beeline_kv::Keyspace::single(&mut shard);
    let row = keys.row(0, b"row").unwrap().unwrap();
    let mut entries = Vec::new();
    for n in 0..fields {
        entries.extend(keys.field(0, b"row", &row, &key(n)).unwrap());
    }
    let guards: Vec<_> = entries.iter().map(|entry| shard.begin_read(entry).unwrap()).collect();
    assert!(shard.delete(0, b"row").unwrap());
    shard.commit().unwrap();
    let mut deadline = None;
    for _ in 0..200 {
        deadline = shard.maintain(1 << 20).unwrap().next_deadline_ns;
    }
    let left = rig.store.stats().total.keys;
    assert!(left > 0, "the tombstones of {fields} fields do not fit");
    assert!(deadline.is_some(), "upkeep comes back by itself");
    for guard in guards {
        shard.end_read(guard);
    }
    for _ in 0..2000 {
        shard.maintain(1 << 20).unwrap();
    }
    assert_eq!(rig.store.stats().total.keys, 0, "of {fields} fields, {left} were left over");
    drop(shard);
    let findings = audit(&rig.store, &rig.shards);
    assert!(findings.is_empty(), "{findings:?}");
}

#[test]
fn a_large_row_is_evicted_in_slices_and_nothing_else_goes_for_its_sake() {
    const FIELDS: u32 = 6000;
    let rig = rig(256, |_| ());
    let mut shard = rig.shards[0].lock().unwrap();
    assert_eq!(row_of(&mut shard, b"row", FIELDS, 400), FIELDS);
    let before = rig.store.stats().total.keys;
    // The row is the first to go: it is all there is.
    shard.tick();
    rig.store.set_eviction(Eviction::AllKeysLru);
    rig.store.set_max_memory_bytes(rig.store.memory_bytes() / 2);
    for n in 0..200 {
        let keys = rig.store.stats().total.keys;
        shard.put(0, &key(100 + n), &[b"new"], PutOptions::default()).unwrap();
        shard.commit().unwrap();
        let gone = keys.saturating_sub(rig.store.stats().total.keys);
        assert!(gone <= 4 * 256 + 2, "{gone} entries went in one write");
    }
    let gone = before + 200 - rig.store.stats().total.keys;
    assert!(gone > u64::from(FIELDS) / 3, "{gone} of {FIELDS} fields went");
    // What the writes had no time for is upkeep's.
    while shard.maintain(1 << 20).unwrap().did_work {}
    assert_eq!(rig.store.stats().total.keys, 200);
    assert!(shard.lookup(0, b"row").unwrap().is_none());
    for n in 0..200 {
        assert!(shard.lookup(0, &key(100 + n)).unwrap().is_some(), "{n} went for the row's sake");
    }
}

#[test]
fn many_short_rows_go_in_one_slice() {
    const ROWS: u32 = 200;
    let rig = rig(64, |_| ());
    let mut shard = rig.shards[0].lock().unwrap();
    for n in 0..ROWS {
        assert_eq!(row_of(&mut shard, &key(n), 1, 40), 1);
    }
    while shard.maintain(1 << 20).unwrap().did_work {}
    for n in 0..ROWS {
        assert!(shard.delete(0, &key(n)).unwrap());
    }
    shard.commit().unwrap();
    assert_eq!(rig.store.stats().total.keys, u64::from(ROWS), "the fields are left");
    shard.maintain(1 << 20).unwrap();
    assert_eq!(rig.store.stats().total.keys, 0, "of {ROWS} fields");
}

/// The only row there is, when its expiry changes and there is no room: it goes or stays, and never comes
/// back without its fields.
#[test]
fn a_row_evicted_for_its_own_expiry_does_not_come_back_without_fields() {
    let rig = rig(64, |_| ());
    let mut shard = rig.shards[0].lock().unwrap();
    assert_eq!(row_of(&mut shard, b"row", 3, 400), 3);
    shard.commit().unwrap();
    shard.tick();
    rig.store.set_eviction(Eviction::AllKeysLru);
    rig.store.set_max_memory_bytes(rig.store.memory_bytes());
    let mut keys = beeline_kv::Keyspace::single(&mut shard);
    // It may be refused for want of room, too.
    let _ = keys.set_expiry(0, b"row", 1 << 50);
    keys.commit().unwrap();
    rig.store.set_max_memory_bytes(0);
    while shard.maintain(1 << 20).unwrap().did_work {}
    let mut keys = beeline_kv::Keyspace::single(&mut shard);
    if let Some(row) = keys.row(0, b"row").unwrap() {
        assert_eq!(row.length, 3, "the row is there without its fields");
    } else {
        assert_eq!(rig.store.stats().total.evicted, 1);
    }
}

#[test]
fn batches_that_delete_more_than_they_note_empty_a_full_pool() {
    use beeline_kv::{Applied, Change, Condition, Key, NamespaceOptions, Write};
    let rig = rig(12, |_| ());
    let mut shard = rig.shards[0].lock().unwrap();
    beeline_kv::Keyspace::single(&mut shard)
        .create_namespace(300, NamespaceOptions::default())
        .unwrap();
    let value = vec![9; 300];
    let mut keys = beeline_kv::Keyspace::single(&mut shard);
    let mut stored = 0;
    loop {
        match keys.put_in(300, &key(stored), &[&value], PutOptions::default()) {
            Ok(_) => keys.commit().unwrap(),
            Err(KvError::PoolFull { .. }) => break,
            Err(error) => panic!("{error}"),
        }
        stored += 1;
    }
    assert!(stored > 500);
    // Fills the head, too: from here on everything needs a segment of the reserve.
    while keys.put_in(300, &key(stored), &[b""], PutOptions::default()).is_ok() {
        stored += 1;
        keys.commit().unwrap();
    }
    let note: [&[u8]; 1] = [&[1; 100]];
    for n in 0..stored {
        let name = key(n);
        let writes = [
            Write {
                namespace: 300,
                key: Key { row: &[], name: &name },
                condition: Condition::Present,
                change: Change::Delete,
            },
            Write {
                namespace: 300,
                key: Key { row: &[], name: b"last deleted" },
                condition: Condition::None,
                change: Change::Put { value: &note, options: PutOptions::default() },
            },
        ];
        let applied = keys.apply(&writes);
        assert!(matches!(applied, Ok(Applied::Done(_))), "{n} of {stored}: {applied:?}");
        keys.commit().unwrap();
        keys.home_mut().maintain(64 << 10).unwrap();
    }
    assert_eq!(keys.len_in(300).unwrap(), 1);
    // What leaves more behind than there was is new data, however many deletions go with it.
    drop(shard);
    let findings = audit(&rig.store, &rig.shards);
    assert!(findings.is_empty(), "{findings:?}");
}

#[test]
fn upkeep_goes_on_where_not_even_the_tombstone_of_an_evicted_key_fits() {
    let rig = rig(12, |_| ());
    let mut shard = rig.shards[0].lock().unwrap();
    let stored = fill(&mut shard, 400);
    // Readers keep every segment, so nothing can be collected, and deletions use up the room kept for them.
    let mut guards = Vec::new();
    for n in 0..stored {
        let entry = shard.lookup(0, &key(n)).unwrap().unwrap();
        guards.push(shard.begin_read(&entry).unwrap());
    }
    let mut refused = false;
    for n in 0..stored {
        match shard.delete(0, &key(n)) {
            Ok(deleted) => assert!(deleted),
            Err(KvError::PoolFull { .. }) => {
                refused = true;
                break;
            }
            Err(error) => panic!("{error}"),
        }
        shard.commit().unwrap();
    }
    assert!(refused, "{stored} tombstones fitted");
    rig.store.set_eviction(Eviction::AllKeysRandom);
    rig.store.set_max_memory_bytes(1);
    let mut deadline = None;
    for _ in 0..50 {
        deadline = shard.maintain(1 << 20).unwrap().next_deadline_ns;
    }
    assert!(deadline.is_some(), "upkeep comes back by itself");
    guards.into_iter().for_each(|guard| shard.end_read(guard));
    let before = shard.len(0);
    for _ in 0..200 {
        shard.maintain(1 << 20).unwrap();
    }
    assert!(shard.len(0) < before, "keys are evicted once there is room for it");
}

/// Another thread holds the log that the end of one row lies in: the other row goes all the same, and upkeep
/// does not go round and round.
#[test]
fn a_row_whose_end_waits_for_another_thread_holds_no_other_row_up() {
    let rig = rig(64, |options| options.shards = 2);
    let mine = |n: &u32| rig.store.shard_of(0, &key(*n)) == 0;
    let rows: Vec<u32> = (0..).filter(mine).take(3).collect();
    for row in &rows {
        assert_eq!(row_of(&mut rig.shards[0].lock().unwrap(), &key(*row), 20, 40), 20);
    }
    while rig.shards[0].lock().unwrap().maintain(1 << 20).unwrap().did_work {}
    let delete = |home: usize, row: u32| {
        let mut guards: Vec<_> = rig.shards.iter().map(|shard| shard.lock().unwrap()).collect();
        let shards = guards.iter_mut().map(|guard| &mut **guard).collect();
        assert!(beeline_kv::Keyspace::many(shards, home).delete(0, &key(row)).unwrap());
    };
    for (row, home) in rows.iter().zip([0, 1, 1]) {
        delete(home, *row);
    }
    let held = rig.shards[1].lock().unwrap();
    let mut shard = rig.shards[0].lock().unwrap();
    let mut turns = 0;
    let mut maintained = shard.maintain(1 << 20).unwrap();
    while maintained.did_work && turns < 100 {
        maintained = shard.maintain(1 << 20).unwrap();
        turns += 1;
    }
    assert!(!maintained.did_work && maintained.next_deadline_ns.is_some(), "{maintained:?}");
    assert_eq!(rig.store.stats().total.keys, 40, "fields of the row whose end is in its own log");
    drop(held);
    while shard.maintain(1 << 20).unwrap().did_work {}
    assert_eq!(rig.store.stats().total.keys, 0);
}
