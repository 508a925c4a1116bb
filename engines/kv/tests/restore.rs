//! Restoring into a directory: whole or not at all.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests

use std::path::Path;
use std::sync::MutexGuard;

use beeline_kv::{
    Keyspace, KvError, Opened, PutOptions, Shard, Store, StoreOptions, check, restore_directory,
};
use beeline_pmem::{PmemError, Pool, PoolOptions};

const SEGMENT: u32 = 64 << 10;

fn pool_options(segments: u64) -> PoolOptions {
    PoolOptions {
        segment_bytes: SEGMENT,
        capacity_bytes: segments * u64::from(SEGMENT),
        ..PoolOptions::default()
    }
}

fn with_keys<R>(opened: &Opened, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
    let mut guards: Vec<MutexGuard<'_, Shard>> =
        opened.1.iter().map(|shard| shard.lock().unwrap()).collect();
    body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), 0))
}

/// A snapshot of `count` keys of a kilobyte each.
fn snapshot(path: &Path, count: u32) {
    let pool = Pool::dram(&PoolOptions::volatile(SEGMENT, 256 * u64::from(SEGMENT))).unwrap();
    let opened = Store::open(pool, StoreOptions::default()).unwrap();
    with_keys(&opened, |keys| {
        for n in 0..count {
            keys.put(0, &n.to_be_bytes(), &[&[n as u8; 1000]], PutOptions::default()).unwrap();
        }
        keys.commit().unwrap();
    });
    with_keys(&opened, |keys| keys.begin_snapshot().unwrap()).write(path).unwrap();
}

fn open(directory: &Path) -> Result<Opened, KvError> {
    Store::open(Pool::open(directory, &pool_options(256))?, StoreOptions::default())
}

#[test]
fn a_directory_marked_unfinished_is_refused_and_can_be_restored_again() {
    let place = tempfile::tempdir().unwrap();
    let (file, data) = (place.path().join("snapshot.bee"), place.path().join("data"));
    snapshot(&file, 500);
    let restored = restore_directory(&file, &data, &pool_options(256), StoreOptions::default());
    let (opened, report) = restored.unwrap();
    assert_eq!((report.records, opened.2.keys), (500, 500));
    drop(opened);
    assert!(!data.join("restore.unfinished").exists());
    assert_eq!(open(&data).unwrap().2.keys, 500);
    // As a crash in the middle leaves it: the mark, and a part of the segments.
    std::fs::write(data.join("restore.unfinished"), b"").unwrap();
    let segment = std::fs::read_dir(data.join("segments")).unwrap().next().unwrap().unwrap();
    std::fs::remove_file(segment.path()).unwrap();
    for refusal in [open(&data).unwrap_err(), check(&data).unwrap_err()] {
        // The pool may notice first that a file is missing.
        let known = matches!(
            refusal,
            KvError::Unfinished { .. } | KvError::Pmem(PmemError::Missing { .. })
        );
        assert!(known, "{refusal}");
    }
    assert!(check(&data).unwrap_err().to_string().contains("kv restore"));
    let again = restore_directory(&file, &data, &pool_options(256), StoreOptions::default());
    assert_eq!(again.unwrap().1.records, 500);
    assert_eq!(open(&data).unwrap().2.keys, 500);
    assert!(!check(&data).unwrap().is_damaged());
}

#[test]
fn a_restore_that_fails_leaves_neither_pool_nor_mark() {
    let place = tempfile::tempdir().unwrap();
    let (file, data) = (place.path().join("snapshot.bee"), place.path().join("data"));
    snapshot(&file, 2000);
    let small = restore_directory(&file, &data, &pool_options(8), StoreOptions::default());
    assert!(matches!(small, Err(KvError::PoolFull { .. })), "{small:?}");
    let left: Vec<_> = std::fs::read_dir(&data).unwrap().flatten().map(|e| e.file_name()).collect();
    assert!(left.iter().all(|name| name == "pool.lock"), "{left:?}");
    let large = restore_directory(&file, &data, &pool_options(256), StoreOptions::default());
    assert_eq!(large.unwrap().1.records, 2000);
}

#[test]
fn a_pool_that_is_there_is_left_alone() {
    let place = tempfile::tempdir().unwrap();
    let (file, data) = (place.path().join("snapshot.bee"), place.path().join("data"));
    snapshot(&file, 10);
    {
        let pool = Pool::create(&data, &pool_options(16)).unwrap();
        let opened = Store::open(pool, StoreOptions::default()).unwrap();
        with_keys(&opened, |keys| {
            keys.put(0, b"mine", &[b"x"], PutOptions::default()).unwrap();
            keys.commit().unwrap();
        });
        // In use, and not: refused either way.
        let refused = restore_directory(&file, &data, &pool_options(16), StoreOptions::default());
        assert!(matches!(refused, Err(KvError::Pmem(PmemError::Exists { .. }))), "{refused:?}");
    }
    let refused = restore_directory(&file, &data, &pool_options(16), StoreOptions::default());
    assert!(matches!(refused, Err(KvError::Pmem(PmemError::Exists { .. }))), "{refused:?}");
    assert_eq!(open(&data).unwrap().2.keys, 1);
}

#[test]
fn two_restores_into_one_directory_do_not_meet() {
    let place = tempfile::tempdir().unwrap();
    let (file, data) = (place.path().join("snapshot.bee"), place.path().join("data"));
    snapshot(&file, 10);
    std::fs::create_dir(&data).unwrap();
    let mark = std::fs::File::create(data.join("restore.unfinished")).unwrap();
    mark.lock().unwrap();
    let refused = restore_directory(&file, &data, &pool_options(16), StoreOptions::default());
    assert!(refused.unwrap_err().to_string().contains("another process"));
    drop(mark);
    restore_directory(&file, &data, &pool_options(16), StoreOptions::default()).unwrap();
}
