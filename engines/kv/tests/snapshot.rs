//! Snapshots and the offline check.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::collections::BTreeMap;
use std::sync::MutexGuard;

use beeline_kv::{
    Keyspace, KvError, Opened, PutOptions, Shard, Snapshot, Store, StoreOptions, check, check_pool,
    check_snapshot, replace_by_snapshot, restore,
};
use beeline_pmem::{Durability, Pool, PoolOptions};

const SEGMENT: u32 = 64 << 10;

fn pool() -> Pool {
    Pool::dram(&PoolOptions::volatile(SEGMENT, 64 * u64::from(SEGMENT))).unwrap()
}

fn options(shards: usize) -> StoreOptions {
    StoreOptions { shards, ..StoreOptions::default() }
}

fn with_keys<R>(opened: &Opened, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
    let mut guards: Vec<MutexGuard<'_, Shard>> =
        opened.1.iter().map(|shard| shard.lock().unwrap()).collect();
    body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), 0))
}

type Contents = BTreeMap<(u8, Vec<u8>), Vec<u8>>;

fn contents(opened: &Opened) -> Contents {
    let mut all = Contents::new();
    with_keys(opened, |keys| {
        for database in 0..4 {
            let (mut names, mut cursor) = (Vec::new(), 0);
            loop {
                cursor =
                    keys.scan(database, cursor, 50, |key, _| names.push(key.to_vec())).unwrap();
                if cursor == 0 {
                    break;
                }
            }
            for name in names {
                let entry = keys.lookup(database, &name).unwrap().unwrap();
                let mut value = Vec::new();
                keys.read_value(&entry, &mut value).unwrap();
                all.insert((database, name), value);
            }
        }
    });
    all
}

fn put(opened: &Opened, n: u32, stamp: u8) {
    with_keys(opened, |keys| {
        let value = vec![stamp; 30 + n as usize % 700];
        keys.put((n % 4) as u8, &n.to_be_bytes(), &[&value], PutOptions::default()).unwrap();
        keys.commit().unwrap();
    });
}

fn begin(opened: &Opened) -> Snapshot {
    with_keys(opened, |keys| keys.begin_snapshot().unwrap())
}

fn maintain(opened: &Opened) {
    for shard in &opened.1 {
        for _ in 0..20 {
            shard.lock().unwrap().maintain(1 << 20).unwrap();
        }
    }
}

#[test]
fn a_snapshot_holds_one_moment_while_writing_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("snapshot.bee");
    let opened = Store::open(pool(), options(2)).unwrap();
    for n in 0..1500 {
        put(&opened, n % 900, 1);
    }
    for n in 0..100_u32 {
        with_keys(&opened, |keys| keys.delete((n % 4) as u8, &n.to_be_bytes()).unwrap());
    }
    let then = contents(&opened);
    let snapshot = begin(&opened);
    assert!(matches!(
        with_keys(&opened, |keys| keys.begin_snapshot().unwrap_err()),
        KvError::SnapshotInProgress
    ));
    for n in 0..1200 {
        put(&opened, n % 400, 2);
    }
    with_keys(&opened, |keys| keys.flush(Some(3)).unwrap());
    maintain(&opened);
    let report = snapshot.write(&path).unwrap();
    assert!(report.records >= then.len() as u64);
    assert_eq!(check_snapshot(&path).unwrap(), report);
    maintain(&opened);

    let (restored, again) = restore(&path, pool(), options(3)).unwrap();
    assert_eq!(again, report);
    assert_eq!(contents(&restored), then);
    let findings = beeline_kv::audit(&restored.0, &restored.1);
    assert!(findings.is_empty(), "{findings:?}");
    // Restored entries are older than what is written next.
    put(&restored, 5, 9);
    assert_eq!(contents(&restored)[&(1, 5_u32.to_be_bytes().to_vec())], vec![9; 35]);

    let full = restored.0.pool().clone();
    let error = restore(&path, full, options(1)).unwrap_err();
    assert!(error.to_string().contains("empty pool"));
}

#[test]
fn a_damaged_or_truncated_snapshot_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("snapshot.bee");
    let opened = Store::open(pool(), options(1)).unwrap();
    for n in 0..40 {
        put(&opened, n, 1);
    }
    begin(&opened).write(&path).unwrap();
    let good = std::fs::read(&path).unwrap();
    for length in (0..good.len()).step_by(97) {
        std::fs::write(&path, &good[..length]).unwrap();
        assert!(check_snapshot(&path).is_err(), "cut to {length}");
    }
    let mut at = 0;
    while at < good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        assert!(restore(&path, pool(), options(1)).is_err(), "byte {at}");
        at += if at < 120 { 1 } else { 61 };
    }
    let missing = directory.path().join("absent");
    assert!(check_snapshot(&missing).unwrap_err().to_string().contains("absent"));
    let unwritable = directory.path().join("no/such/place.bee");
    assert!(begin(&opened).write(&unwritable).is_err());
    begin(&opened).write(&path).unwrap();
}

#[test]
fn a_flipped_bit_anywhere_in_a_segment_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let pool_options = PoolOptions {
        durability: Durability::Process,
        segment_bytes: SEGMENT,
        capacity_bytes: 16 * u64::from(SEGMENT),
        ..PoolOptions::default()
    };
    {
        let pool = Pool::create(directory.path(), &pool_options).unwrap();
        let opened = Store::open(pool, options(1)).unwrap();
        for n in 0..150 {
            put(&opened, n, 1);
        }
    }
    let report = check(directory.path()).unwrap();
    assert!(report.clean && !report.is_damaged(), "{report:?}");
    assert_eq!(report.entries, 150);
    let segments = directory.path().join("segments");
    let mut flips = 0;
    for file in std::fs::read_dir(segments).unwrap() {
        let file = file.unwrap().path();
        let good = std::fs::read(&file).unwrap();
        let mut random = 5_usize;
        let tries = if std::env::var("BEELINE_DEEP").is_ok() { 4000 } else { 150 };
        for _ in 0..tries {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(12_345);
            // The page behind the segment holds the mark of a backing that was replaced, and no data.
            let at = (random >> 20) % SEGMENT as usize;
            let mut bad = good.clone();
            bad[at] ^= 1 << (random >> 60 & 7);
            std::fs::write(&file, &bad).unwrap();
            let report = check(directory.path()).unwrap();
            assert!(report.is_damaged(), "bit in byte {at} of {} unnoticed", file.display());
            flips += 1;
        }
        std::fs::write(&file, &good).unwrap();
    }
    println!("{flips} flipped bits found");
    assert!(!check(directory.path()).unwrap().is_damaged());
    // Where that is accepted the store opens, keeps what is good and says what is not.
    let file = std::fs::read_dir(directory.path().join("segments")).unwrap().next();
    let file = file.unwrap().unwrap().path();
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[200] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let pool = Pool::open(directory.path(), &pool_options).unwrap();
    assert!(check_pool(&pool).is_damaged());
    let accepting = StoreOptions { accept_damage: true, ..options(1) };
    let (_, _, report) = Store::open(pool, accepting).unwrap();
    assert_eq!((report.damaged, report.keys), (1, 149));
}

/// A store that takes it in sets versions aside up to the header's, and gives out those above.
#[test]
fn a_snapshot_with_a_record_newer_than_itself_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("snapshot.bee");
    let opened = Store::open(pool(), options(1)).unwrap();
    for n in 0..40 {
        put(&opened, n, 1);
    }
    let report = begin(&opened).write(&path).unwrap();
    let good = std::fs::read(&path).unwrap();
    for (version, is_good) in [(report.version, true), (report.version - 1, false), (0, false)] {
        let mut bytes = good.clone();
        bytes[16..24].copy_from_slice(&version.to_le_bytes());
        let crc = beeline_wire::crc32c(&bytes[..32]);
        bytes[32..36].copy_from_slice(&crc.to_le_bytes());
        std::fs::write(&path, &bytes).unwrap();
        match check_snapshot(&path) {
            Ok(_) => assert!(is_good, "version {version}"),
            Err(KvError::Snapshot { reason, .. }) => {
                assert!(!is_good && reason.contains("newer than the snapshot"), "{reason}");
                let before = contents(&opened);
                assert!(replace_by_snapshot(&path, &opened.0, &opened.1).is_err());
                assert_eq!(contents(&opened), before, "nothing changed");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
