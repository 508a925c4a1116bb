//! Rows of builds that kept a row's length in its head, in a data directory and in a snapshot.
#![allow(clippy::unwrap_used)]

mod fixtures;

use std::collections::BTreeMap;

use beeline_kv::{Embedded, Keyspace, StoreOptions};
use beeline_pmem::{Durability, Pool, PoolOptions};

/// Rows of the build that wrote a head with every field.
fn check_old_rows(keys: &mut Keyspace<'_>) {
    for (name, fields, expires_at_ms) in
        [("one", 2, 0), ("many", 30, 0), ("some", 3, 4_102_444_800_000), ("gone", 0, 0)]
    {
        let row = keys.row(0, name.as_bytes()).unwrap();
        assert_eq!(row.map_or(0, |row| row.length), fields, "{name}");
        assert_eq!(row.map_or(0, |row| row.expires_at_ms), expires_at_ms, "{name}");
        let Some(row) = row else { continue };
        let mut met = BTreeMap::new();
        keys.visit_row(0, name.as_bytes(), &row, (0, usize::MAX), |field, value| {
            met.insert(field.to_vec(), value.to_vec());
        })
        .unwrap();
        assert_eq!(met.len() as u64, fields, "{name}");
        match name {
            "one" => assert_eq!(met[b"n".as_slice()], b"42"),
            "many" => assert_eq!(met[b"field17".as_slice()], b"value17"),
            _ => assert_eq!(met[b"d".as_slice()], b"4"),
        }
    }
}

#[test]
fn rows_of_the_build_that_kept_lengths_in_heads_are_read_and_go_on() {
    let directory = tempfile::tempdir().unwrap();
    fixtures::unpack_pool("store-format-2.pool", directory.path());
    let checked = beeline_kv::check(directory.path()).unwrap();
    assert!(!checked.is_damaged(), "{checked:?}");
    let pool = PoolOptions { durability: Durability::Process, ..PoolOptions::default() };
    for turn in 0..3_u64 {
        let options = StoreOptions { shards: 1 + turn as usize, ..StoreOptions::default() };
        let store = Embedded::open(directory.path(), &pool, options).unwrap();
        assert_eq!((store.report().damaged, store.report().torn), (0, 0));
        store.with_all(|keys| {
            if turn == 0 {
                check_old_rows(keys);
            }
            // One more field, whose head stays as it was.
            let mut row = keys.row(0, b"many").unwrap().unwrap();
            assert_eq!(row.length, 30 + turn);
            let field = [b'x', turn as u8];
            assert!(keys.put_field(0, b"many", &mut row, &field, &[b"new"]).unwrap());
            keys.put_head(0, b"many", &row).unwrap();
            keys.commit().unwrap();
            let after = keys.row(0, b"many").unwrap().unwrap();
            assert_eq!(after.length, 31 + turn);
            assert!(after.version > row.version, "a changed field changes the row's version");
        });
    }
}

#[test]
fn a_snapshot_of_the_build_that_kept_lengths_in_heads_is_restored() {
    let pool = Pool::dram(&PoolOptions::volatile(64 << 10, 16 * (64 << 10))).unwrap();
    let options = StoreOptions { shards: 2, ..StoreOptions::default() };
    let path = fixtures::path("snapshot-format-2.kv");
    let (opened, _) = beeline_kv::restore(&path, pool, options).unwrap();
    Embedded::from(opened).with_all(check_old_rows);
}

/// Where the opening is refused for damage, the build that wrote the store can still read it.
#[test]
fn a_refused_opening_leaves_the_format_as_it_was() {
    const FORMAT_WORD: usize = 18;
    let directory = tempfile::tempdir().unwrap();
    fixtures::unpack_pool("store-format-2.pool", directory.path());
    let mut files = std::fs::read_dir(directory.path().join("segments")).unwrap();
    let (path, mut bytes, at) = files
        .find_map(|file| {
            let path = file.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            let at = bytes.windows(7).position(|window| window == b"value17")?;
            Some((path, bytes, at))
        })
        .unwrap();
    let format = || {
        let pool = PoolOptions { durability: Durability::Process, ..PoolOptions::default() };
        Pool::open(directory.path(), &pool).unwrap().root_word(FORMAT_WORD)
    };
    let open = || {
        let pool = PoolOptions { durability: Durability::Process, ..PoolOptions::default() };
        Embedded::open(directory.path(), &pool, StoreOptions::default())
    };
    bytes[at] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let refused = open().unwrap_err();
    assert!(matches!(refused, beeline_kv::KvError::DamagedData { .. }), "{refused}");
    assert_eq!(format(), 2);
    bytes[at] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    open().unwrap().with_all(check_old_rows);
    assert_eq!(format(), 3);
}
