//! Damage to what was acknowledged: the store refuses to open until somebody decides, and never
//! shows an older value in silence.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::fs;
use std::path::{Path, PathBuf};

use beeline_kv::entry::Draft;
use beeline_kv::{
    Embedded, KvError, NamespaceOptions, Notice, PutOptions, StoreOptions, check, repair,
};
use beeline_pmem::{Durability, PoolOptions};

const SEGMENT: u32 = 64 << 10;

fn pool_options() -> PoolOptions {
    PoolOptions {
        durability: Durability::Process,
        segment_bytes: SEGMENT,
        capacity_bytes: 32 * u64::from(SEGMENT),
        ..PoolOptions::default()
    }
}

fn open(directory: &Path, accept_damage: bool) -> Result<Embedded, KvError> {
    let options = StoreOptions { accept_damage, ..StoreOptions::default() };
    Embedded::open(directory, &pool_options(), options)
}

fn put(store: &Embedded, key: &str, value: &[u8]) {
    store.with_all(|keys| {
        keys.put(0, key.as_bytes(), &[value], PutOptions::default()).unwrap();
        keys.commit().unwrap();
    });
}

fn delete(store: &Embedded, key: &str) {
    store.with_all(|keys| {
        assert!(keys.delete(0, key.as_bytes()).unwrap());
        keys.commit().unwrap();
    });
}

fn get(store: &Embedded, key: &str) -> Result<Option<Vec<u8>>, KvError> {
    store.with_all(|keys| {
        let Some(entry) = keys.lookup(0, key.as_bytes())? else { return Ok(None) };
        let mut value = Vec::new();
        keys.read_value(&entry, &mut value)?;
        Ok(Some(value))
    })
}

fn segments(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(directory.join("segments"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "seg"))
        .collect();
    files.sort();
    files
}

/// Where `needle` lies in the segments.
fn find_all(directory: &Path, needle: &[u8]) -> Vec<(PathBuf, usize)> {
    let mut found = Vec::new();
    for path in segments(directory) {
        let bytes = fs::read(&path).unwrap();
        let at = bytes.windows(needle.len()).enumerate();
        found.extend(at.filter(|(_, window)| *window == needle).map(|(at, _)| (path.clone(), at)));
    }
    found
}

/// Where `needle` lies last in the segments.
fn find_last(directory: &Path, needle: &[u8]) -> (PathBuf, usize) {
    find_all(directory, needle).pop().unwrap()
}

fn flip(path: &Path, at: usize, bit: u8) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1 << bit;
    fs::write(path, bytes).unwrap();
}

/// Header, key and value of the store's own entries lie in a row, the header 48 bytes long.
const HEADER: usize = 48;

#[test]
fn a_flipped_bit_anywhere_in_the_newest_entry_never_brings_an_older_value_back() {
    for (deletes, last) in [(false, false), (false, true), (true, false), (true, true)] {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path(), false).unwrap();
        put(&store, "other", b"kept");
        put(&store, "key", b"OLD");
        if deletes {
            delete(&store, "key");
        } else {
            put(&store, "key", b"NEW");
        }
        if !last {
            put(&store, "behind it", b"x");
        }
        drop(store);
        let (path, old) = find_last(directory.path(), b"keyOLD");
        let start = old - HEADER + (HEADER + 6).next_multiple_of(16);
        let used = HEADER + if deletes { 3 } else { 6 };
        for at in start..start + used {
            let bit = (at * 5 % 8) as u8;
            flip(&path, at, bit);
            let checked = check(directory.path()).unwrap();
            assert!(checked.is_damaged(), "byte {}", at - start);
            match open(directory.path(), false) {
                Err(KvError::DamagedData { entries: 1, .. }) => {}
                other => panic!("byte {}: {other:?}", at - start),
            }
            flip(&path, at, bit);
        }
        // Mended, it is as it was.
        let store = open(directory.path(), false).unwrap();
        let expected = (!deletes).then(|| b"NEW".to_vec());
        assert_eq!(get(&store, "key").unwrap(), expected);
        assert_eq!(get(&store, "other").unwrap().unwrap(), b"kept");
    }
}

/// What a killed process leaves: its stores are in the page cache.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.join("segments")).unwrap();
    fs::copy(from.join("pool.bee"), to.join("pool.bee")).unwrap();
    for file in segments(from) {
        fs::copy(&file, to.join("segments").join(file.file_name().unwrap())).unwrap();
    }
}

#[test]
fn after_a_kill_all_but_the_last_commit_is_known_to_have_been_acknowledged() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), false).unwrap();
    for n in 0..6 {
        put(&store, "key", format!("value {n}").as_bytes());
    }
    for n in 0..6 {
        let killed = tempfile::tempdir().unwrap();
        copy(directory.path(), killed.path());
        let (path, at) = find_last(killed.path(), format!("keyvalue {n}").as_bytes());
        flip(&path, at + 4, 2);
        match open(killed.path(), false) {
            Err(KvError::DamagedData { .. }) if n < 5 => {}
            // Nothing tells it from an entry that was being written.
            Ok(store) if n == 5 => assert_eq!(store.report().torn, 1),
            other => panic!("value {n}: {other:?}"),
        }
    }
}

#[test]
fn damage_that_was_accepted_once_is_not_asked_about_again() {
    for by_repair in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path(), false).unwrap();
        put(&store, "key", b"OLD");
        put(&store, "key", b"NEW");
        drop(store);
        let (path, at) = find_last(directory.path(), b"keyNEW");
        flip(&path, at + 4, 0);
        let checked = check(directory.path()).unwrap();
        let what = &checked.damages[0].what;
        assert!(what.contains("\"key\""), "the key is named: {what}");
        assert!(matches!(open(directory.path(), false), Err(KvError::DamagedData { .. })));
        if by_repair {
            let report = repair(directory.path()).unwrap();
            assert_eq!(report.damaged, 1);
        } else {
            let store = open(directory.path(), true).unwrap();
            assert_eq!(store.report().damaged, 1);
            assert_eq!(store.store().stats().total.damaged, 1, "counted for INFO and metrics");
            assert_eq!(get(&store, "key").unwrap().unwrap(), b"OLD", "as was decided");
        }
        let store = open(directory.path(), false).unwrap();
        put(&store, "key", b"NEWER");
        drop(store);
        // More damage in the same segment is news.
        let store = open(directory.path(), false).unwrap();
        assert_eq!(get(&store, "key").unwrap().unwrap(), b"NEWER");
        drop(store);
        let (path, at) = find_last(directory.path(), b"keyNEWER");
        flip(&path, at + 4, 0);
        assert!(matches!(open(directory.path(), false), Err(KvError::DamagedData { .. })));
    }
}

#[test]
fn what_is_left_of_an_accepted_segment_is_collected_as_any_other() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), false).unwrap();
    for n in 0..40 {
        put(&store, &format!("stays {n}"), &[n; 1000]);
    }
    drop(store);
    let (path, at) = find_last(directory.path(), b"stays 7");
    flip(&path, at + 20, 3);
    let store = open(directory.path(), true).unwrap();
    for turn in 0..400_u32 {
        put(&store, "churn", &turn.to_le_bytes().repeat(500));
        store.maintain().unwrap();
    }
    drop(store);
    let store = open(directory.path(), false).unwrap();
    for n in 0..40 {
        let expected = (n != 7).then(|| vec![n; 1000]);
        assert_eq!(get(&store, &format!("stays {n}")).unwrap(), expected);
    }
}

#[test]
fn a_zeroed_page_of_the_pools_table_is_refused_and_loses_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), false).unwrap();
    for n in 0..200 {
        put(&store, &format!("key {n}"), &[n; 2000]);
    }
    drop(store);
    let before = segments(directory.path());
    assert!(before.len() > 3);
    let table = directory.path().join("pool.bee");
    let whole = fs::read(&table).unwrap();
    let mut seen = 0;
    for page in 0..whole.len() / 4096 {
        let mut bytes = whole.clone();
        bytes[page * 4096..(page + 1) * 4096].fill(0);
        if bytes == whole {
            continue;
        }
        seen += 1;
        fs::write(&table, &bytes).unwrap();
        assert!(open(directory.path(), false).is_err(), "page {page}");
        let checked = check(directory.path());
        assert!(checked.as_ref().map_or(true, |report| report.is_damaged()), "page {page}");
        assert_eq!(segments(directory.path()), before, "page {page}");
        fs::write(&table, &whole).unwrap();
    }
    assert!(seen >= 2, "{seen} pages hold something");
    let store = open(directory.path(), false).unwrap();
    assert_eq!(store.report().keys, 200);
}

#[test]
fn a_clients_entry_that_was_spoilt_fails_when_it_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), false).unwrap();
    put(&store, "key", b"OLD");
    {
        let mut shard = store.shards()[0].lock().unwrap();
        let mut log = shard.open_client_log();
        shard.grant(&mut log).unwrap();
        for value in [b"MIDDLE".as_slice(), b"NEWEST"] {
            let mut bytes = Vec::new();
            Draft { key: b"key", value, ..Draft::default() }.form(&mut bytes).unwrap();
            let offset = log.tail();
            log.segment().unwrap().store(offset as usize, &bytes);
            shard.accept(&mut log, Notice { offset }).unwrap();
            shard.commit().unwrap();
        }
        shard.close_client_log(log);
    }
    drop(store);
    let (path, at) = find_last(directory.path(), b"keyNEWEST");
    flip(&path, at + 5, 1);
    assert!(check(directory.path()).unwrap().is_damaged());
    let store = open(directory.path(), false).unwrap();
    assert_eq!(store.report().damaged, 1);
    for _ in 0..3 {
        assert!(matches!(get(&store, "key"), Err(KvError::Damaged { .. })));
        while store.maintain().unwrap() {}
    }
    drop(store);
    let store = open(directory.path(), false).unwrap();
    assert!(matches!(get(&store, "key"), Err(KvError::Damaged { .. })), "again");
    // A new value ends it.
    put(&store, "key", b"AFTER");
    assert_eq!(get(&store, "key").unwrap().unwrap(), b"AFTER");
    drop(store);
    assert_eq!(get(&open(directory.path(), false).unwrap(), "key").unwrap().unwrap(), b"AFTER");
}

/// As [`flip`], in a pool that is open.
fn flip_in_place(path: &Path, at: usize, bit: u8) {
    use std::os::unix::fs::FileExt;
    let byte = fs::read(path).unwrap()[at] ^ 1 << bit;
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(&[byte], at as u64).unwrap();
}

#[test]
fn what_was_lost_of_a_row_that_ended_does_not_come_back_with_an_opening() {
    const NUMBERS: [u32; 2] = [256, 257];
    let options = PoolOptions { capacity_bytes: 12 * u64::from(SEGMENT), ..pool_options() };
    let directory = tempfile::tempdir().unwrap();
    let opening = || {
        let accepting = StoreOptions { accept_damage: true, ..StoreOptions::default() };
        Embedded::open(directory.path(), &options, accepting).unwrap()
    };
    let key = (b"row".as_slice(), b"name".as_slice());
    let store = opening();
    let put_both = |value: &[u8]| {
        store.with_all(|keys| {
            for number in NUMBERS {
                let ordered = number == NUMBERS[1];
                let options = NamespaceOptions { by_row: true, ordered, ..Default::default() };
                keys.create_namespace(number, options).unwrap();
                keys.put_in(number, key, &[value], PutOptions::default()).unwrap();
            }
            keys.commit().unwrap();
        });
    };
    put_both(b"OLD");
    // The old values stay where they are.
    for n in 0..120 {
        put(&store, &format!("stays {n}"), &[n; 1000]);
    }
    // Most of what lies beside the new ones becomes garbage.
    for n in 0..30 {
        put(&store, &format!("goes {n}"), &[n; 1000]);
    }
    put_both(b"NEW");
    for n in 30..60 {
        put(&store, &format!("goes {n}"), &[n; 1000]);
    }
    let needle = b"\x00\x03rownameNEW";
    let new = find_all(directory.path(), needle);
    assert_eq!(new.len(), 2);
    for (path, at) in new {
        flip_in_place(&path, at + needle.len() - 1, 0);
    }
    for n in 0..250_u32 {
        put(&store, &format!("behind {n}"), &n.to_le_bytes().repeat(250));
    }
    for n in 0..60 {
        delete(&store, &format!("goes {n}"));
    }
    for n in 0..2000_u32 {
        store.with_all(|keys| {
            let value = n.to_le_bytes().repeat(250);
            let more = format!("more {n}");
            // Until there is no room.
            let _ = keys.put(0, more.as_bytes(), &[&value], PutOptions::default());
            keys.commit().unwrap();
        });
        store.maintain().unwrap();
    }
    let total = store.store().stats().total;
    assert!(total.damaged >= 2, "the collector met both: {total:?}");
    store.with_all(|keys| {
        for number in NUMBERS {
            assert!(keys.get_in(number, key).unwrap().is_none(), "lost");
            keys.delete_row(number, b"row").unwrap();
        }
        keys.commit().unwrap();
    });
    while store.maintain().unwrap() {}
    assert_eq!(find_all(directory.path(), b"\x00\x03rownameOLD").len(), 2, "they are on media");
    // A mark is left to that opening, and a snapshot says so.
    let snapshot = directory.path().join("snapshot");
    store.with_all(|keys| keys.begin_snapshot().unwrap()).write(&snapshot).unwrap();
    assert_eq!(fs::read(&snapshot).unwrap()[8], 5);
    drop(store);
    let store = opening();
    for _ in 0..2 {
        store.with_all(|keys| {
            for number in NUMBERS {
                assert!(keys.get_in(number, key).unwrap().is_none(), "{number}: deleted before");
            }
        });
        while store.maintain().unwrap() {}
    }
}

#[test]
fn a_damaged_mark_of_a_row_that_ended_is_told_with_its_row() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), false).unwrap();
    store.with_all(|keys| {
        let options = NamespaceOptions { by_row: true, ..Default::default() };
        keys.create_namespace(256, options).unwrap();
        for name in [b"a", b"b"] {
            let key = (b"row".as_slice(), name.as_slice());
            keys.put_in(256, key, &[b"value"], PutOptions::default()).unwrap();
        }
        keys.delete_row(256, b"row").unwrap();
        keys.commit().unwrap();
    });
    drop(store);
    let report = check(directory.path()).unwrap();
    assert!(!report.is_damaged(), "{:#?}", report.damages);
    let ends: Vec<_> = report.row_ends.iter().map(|end| (end.namespace, end.entries)).collect();
    assert_eq!(ends, [(256, 2)]);
    let (path, at) = find_last(directory.path(), b"\x00\x03row\x00\x00\x01\x00");
    flip(&path, at + 1, 4);
    let report = check(directory.path()).unwrap();
    let told: Vec<_> = report.damages.iter().map(|damage| damage.what.clone()).collect();
    // What the damaged key still tells.
    assert!(
        told.iter().any(|what| what.contains("does not verify; it reads as the end of")),
        "{told:?}"
    );
    assert!(report.row_ends.is_empty());
    assert!(open(directory.path(), false).is_err(), "the keys would come back in silence");
    flip(&path, at + 1, 4);
    flip(&path, at + 3, 0);
    let report = check(directory.path()).unwrap();
    let told: Vec<_> = report.damages.iter().map(|damage| damage.what.clone()).collect();
    assert!(
        told.iter().any(|what| what.contains("the end of row \"rnw\" of namespace 256")),
        "{told:?}"
    );
}
