//! Services' rows that end by one small entry: what readers see at once, and what upkeep collects.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests

use std::ops::ControlFlow;

use beeline_kv::{
    Applied, Change, Condition, Embedded, EventKind, Eviction, Keyspace, KvError, NamespaceLimit,
    NamespaceOptions, PutOptions, Range, Store, StoreOptions, Write, audit,
};
use beeline_pmem::{Pool, PoolOptions};

const ROWS: u32 = 256;
const ORDERED: u32 = 257;
const BOTH: [u32; 2] = [ROWS, ORDERED];
const FORMAT_WORD: usize = 18;

fn pool(segments: u64) -> Pool {
    Pool::dram(&PoolOptions::volatile(64 << 10, segments * (64 << 10))).unwrap()
}

fn open(pool: &Pool, shards: usize) -> Embedded {
    let options = StoreOptions { shards, feed_bytes: 1 << 20, ..StoreOptions::default() };
    let store: Embedded = Store::open(pool.clone(), options).unwrap().into();
    store.with_all(|keys| {
        for number in BOTH {
            let ordered = number == ORDERED;
            let options = NamespaceOptions { by_row: true, ordered, ..Default::default() };
            keys.create_namespace(number, options).unwrap();
        }
    });
    store
}

fn put(keys: &mut Keyspace<'_>, number: u32, row: &[u8], n: u32) -> Result<u64, KvError> {
    keys.put_in(number, (row, n.to_be_bytes().as_slice()), &[&[7; 40]], PutOptions::default())
}

fn has(keys: &mut Keyspace<'_>, number: u32, row: &[u8], n: u32) -> bool {
    keys.get_in(number, (row, n.to_be_bytes().as_slice())).unwrap().is_some()
}

fn in_order(keys: &mut Keyspace<'_>, row: &[u8]) -> usize {
    let mut met = 0;
    keys.range(ORDERED, &Range { row, ..Range::ALL }, |_, _, _| {
        met += 1;
        ControlFlow::Continue(())
    })
    .unwrap();
    met
}

fn settle(store: &Embedded) {
    while store.maintain().unwrap() {}
    let findings = audit(store.store(), store.shards());
    assert!(findings.is_empty(), "{findings:#?}");
}

#[test]
fn a_row_of_any_length_ends_by_one_small_entry_and_its_keys_are_collected_later() {
    const KEYS: u32 = 20_000;
    let pool = pool(256);
    for shards in [1, 3] {
        let store = open(&pool, shards);
        for number in BOTH {
            let stored = store.with_all(|keys| {
                for n in 0..KEYS {
                    put(keys, number, b"long", n).unwrap();
                }
                put(keys, number, b"other", 1).unwrap();
                keys.commit().unwrap();
                let before = keys.store().stats().total;
                keys.delete_row(number, b"long").unwrap();
                keys.commit().unwrap();
                let after = keys.store().stats().total;
                let entries = after.entries_stored - before.entries_stored;
                (entries, after.bytes_stored - before.bytes_stored)
            });
            assert_eq!(stored, (1, 64), "entries and bytes");
            store.with_all(|keys| {
                assert!((0..KEYS).all(|n| !has(keys, number, b"long", n)));
                assert!(has(keys, number, b"other", 1), "another row stays");
                assert_eq!(in_order(keys, b"long"), 0);
                put(keys, number, b"long", 5).unwrap();
                assert!(has(keys, number, b"long", 5), "what comes later is there");
                assert!(
                    !keys
                        .delete_in(number, (b"long".as_slice(), 6_u32.to_be_bytes().as_slice()))
                        .unwrap()
                );
                keys.commit().unwrap();
                assert!(keys.len_in(number).unwrap() > u64::from(KEYS / 2), "not collected yet");
            });
        }
        // An opening knows it as well.
        drop(store);
        let store = open(&pool, 4 - shards);
        for settled in [false, true] {
            store.with_all(|keys| {
                for number in BOTH {
                    let there = (0..KEYS).filter(|n| has(keys, number, b"long", *n)).count();
                    assert_eq!((there, has(keys, number, b"other", 1)), (1, true));
                    assert_eq!(settled, keys.len_in(number).unwrap() == 2);
                }
                assert_eq!(in_order(keys, b"long"), 1);
            });
            settle(&store);
        }
        store.with_all(|keys| {
            for number in BOTH {
                keys.drop_namespace(number).unwrap();
            }
        });
        settle(&store);
    }
}

#[test]
fn conditions_see_the_end_of_a_row_and_a_batch_carries_it() {
    let store = open(&pool(32), 2);
    store.with_all(|keys| {
        let old = put(keys, ROWS, b"row", 1).unwrap();
        keys.begin_batch();
        put(keys, ROWS, b"row", 2).unwrap();
        keys.delete_row(ROWS, b"row").unwrap();
        put(keys, ROWS, b"row", 3).unwrap();
        keys.end_batch();
        keys.commit().unwrap();
        assert_eq!([1, 2, 3].map(|n| has(keys, ROWS, b"row", n)), [false, false, true]);
        let name = 1_u32.to_be_bytes();
        let mut write = Write {
            namespace: ROWS,
            key: (b"row".as_slice(), name.as_slice()).into(),
            condition: Condition::Version(old),
            change: Change::Delete,
        };
        let refused = keys.apply(&[write]).unwrap();
        assert_eq!(refused, Applied::Refused { write: 0, found: None });
        write.condition = Condition::Absent;
        write.change = Change::Put { value: &[b"new"], options: PutOptions::default() };
        assert!(matches!(keys.apply(&[write]).unwrap(), Applied::Done(_)));
        assert!(has(keys, ROWS, b"row", 1));
    });
    settle(&store);
    store.with_all(|keys| assert_eq!(keys.len_in(ROWS).unwrap(), 2));
}

#[test]
fn only_rows_of_services_end_so() {
    let store = open(&pool(16), 1);
    store.with_all(|keys| {
        keys.create_namespace(300, NamespaceOptions::default()).unwrap();
        for number in [0, 300] {
            let refused = keys.delete_row(number, b"row");
            assert!(matches!(refused, Err(KvError::NamespaceKind { .. })), "{number}");
        }
        assert!(matches!(keys.delete_row(999, b"row"), Err(KvError::Namespace { number: 999 })));
        let refused = keys.delete_row(ROWS, &[1; 65_530]);
        assert!(matches!(refused, Err(KvError::KeyTooLong { .. })));
        keys.delete_row(ROWS, &[1; 60_000]).unwrap();
    });
}

#[test]
fn a_full_pool_takes_the_end_of_a_row_and_has_room_again() {
    for number in BOTH {
        let store = open(&pool(16), 1);
        let mut n = 0;
        store.with_all(|keys| {
            let full = loop {
                match put(keys, number, b"row", n) {
                    Ok(_) => n += 1,
                    Err(error) => break error,
                }
            };
            assert!(matches!(full, KvError::PoolFull { .. }), "{full}");
            keys.delete_row(number, b"row").unwrap();
            keys.commit().unwrap();
        });
        settle(&store);
        store.with_all(|keys| {
            assert_eq!(keys.len_in(number).unwrap(), 0);
            for n in 0..n / 4 {
                put(keys, number, b"row", n).unwrap();
            }
        });
    }
}

#[test]
fn a_full_namespace_takes_what_comes_after_the_end_of_its_row() {
    let store = open(&pool(64), 1);
    store.with_all(|keys| {
        let limit = NamespaceLimit { max_bytes: 20_000, eviction: Eviction::NoEviction };
        keys.limit_namespace(ORDERED, limit).unwrap();
        let held = (0..).take_while(|n| put(keys, ORDERED, b"row", *n).is_ok()).count();
        assert!(held > 100);
        keys.delete_row(ORDERED, b"row").unwrap();
        for n in 0..held as u32 {
            put(keys, ORDERED, b"row", n).unwrap();
        }
        assert_eq!(in_order(keys, b"row"), held);
    });
}

#[test]
fn the_format_is_raised_with_the_first_end_and_a_snapshot_carries_it() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool(64);
    let store = open(&pool, 2);
    let format_of = |name: &str| {
        let path = directory.path().join(name);
        let snapshot = store.with_all(|keys| keys.begin_snapshot().unwrap());
        snapshot.write(&path).unwrap();
        (std::fs::read(&path).unwrap()[8], path)
    };
    store.with_all(|keys| {
        for n in 0..500 {
            put(keys, ORDERED, b"row", n).unwrap();
        }
        keys.commit().unwrap();
    });
    assert_eq!((pool.root_word(FORMAT_WORD), format_of("before").0), (3, 3));
    store.with_all(|keys| {
        keys.delete_row(ORDERED, b"row").unwrap();
        put(keys, ORDERED, b"row", 7).unwrap();
        keys.commit().unwrap();
    });
    let (format, path) = format_of("ended");
    assert_eq!((pool.root_word(FORMAT_WORD), format), (5, 5));
    settle(&store);
    assert_eq!(format_of("collected").0, 3, "there is no mark any more");
    let options = StoreOptions { shards: 3, ..StoreOptions::default() };
    let fresh = Pool::dram(&PoolOptions::volatile(64 << 10, 4 << 20)).unwrap();
    let (opened, _) = beeline_kv::restore(&path, fresh.clone(), options).unwrap();
    assert_eq!(fresh.root_word(FORMAT_WORD), 5);
    let restored: Embedded = opened.into();
    beeline_kv::replace_by_snapshot(&path, store.store(), store.shards()).unwrap();
    for store in [&restored, &store] {
        for _ in 0..2 {
            store.with_all(|keys| {
                let there: Vec<u32> = (0..500).filter(|n| has(keys, ORDERED, b"row", *n)).collect();
                assert_eq!((there, in_order(keys, b"row")), (vec![7], 1));
            });
            settle(store);
        }
        store.with_all(|keys| assert_eq!(keys.len_in(ORDERED).unwrap(), 1));
    }
}

#[test]
fn the_feed_tells_the_end_of_a_row_and_nothing_of_its_collection() {
    let store = open(&pool(32), 1);
    let from = store.store().feed_stats().newest;
    store.with_all(|keys| {
        for n in 0..600 {
            put(keys, ROWS, b"row", n).unwrap();
        }
        keys.delete_row(ROWS, b"row").unwrap();
        put(keys, ROWS, b"row", 1).unwrap();
        keys.commit().unwrap();
    });
    settle(&store);
    let told = store.store().events(from, 2000).unwrap().events;
    assert_eq!(told.len(), 602);
    let end = &told[600];
    assert_eq!((end.namespace, end.kind), (ROWS, EventKind::DeleteRow));
    assert_eq!(&*end.key, b"\x00\x03row");
    assert!(matches!(told[601].kind, EventKind::Put { .. }) && told[601].version > end.version);
}

#[test]
fn the_memory_limit_is_kept_while_the_end_of_a_row_waits_for_another_thread() {
    let store = open(&pool(64), 2);
    let row = (0_u8..).map(|n| [n]).find(|row| {
        let key = (row.as_slice(), b"".as_slice());
        store.store().shard_in(ROWS, key).unwrap() == 0
    });
    let row = row.unwrap();
    store.with_all(|keys| {
        for n in 0..3 {
            put(keys, ROWS, &row, n).unwrap();
        }
        keys.delete_row(ROWS, &row).unwrap();
        keys.commit().unwrap();
    });
    // A thread that holds the other shard for ever.
    let _busy = store.shards()[1].lock().unwrap();
    let mut shard = store.shards()[0].lock().unwrap();
    let databases_keys: Vec<[u8; 4]> = (0_u32..6000)
        .map(u32::to_be_bytes)
        .filter(|key| store.store().shard_of(0, key) == 0)
        .collect();
    let (unlimited, limited) = databases_keys.split_at(1000);
    for key in unlimited {
        shard.put(0, key, &[&[1; 100]], PutOptions::default()).unwrap();
    }
    shard.commit().unwrap();
    let limit = store.store().memory_bytes() * 3 / 4;
    store.store().set_eviction(Eviction::AllKeysLru);
    store.store().set_max_memory_bytes(limit);
    for _ in 0..1000 {
        shard.maintain(1 << 20).unwrap();
    }
    let held = store.store().memory_bytes();
    assert!(held <= limit, "upkeep leaves {held} bytes of {limit}");
    for key in limited {
        shard.put(0, key, &[&[2; 100]], PutOptions::default()).unwrap();
        shard.commit().unwrap();
        let held = store.store().memory_bytes();
        // An index may grow by a page with any key.
        assert!(held <= limit + (16 << 10), "a write leaves {held} bytes of {limit}");
    }
}

#[test]
fn members_tell_the_same_of_a_row_that_ends_twice_however_far_their_upkeep_is() {
    let told = [false, true].map(|settles| {
        let store = open(&pool(32), 2);
        store.with_all(|keys| {
            put(keys, ORDERED, b"row", 1).unwrap();
            keys.delete_row(ORDERED, b"row").unwrap();
            keys.commit().unwrap();
        });
        if settles {
            settle(&store);
        }
        store.with_all(|keys| {
            keys.watch_effects();
            keys.delete_row(ORDERED, b"row").unwrap();
            keys.commit().unwrap();
            keys.effects()
        })
    });
    assert_ne!(told[0], 0);
    assert_eq!(told[0], told[1]);
}

#[test]
fn many_short_rows_are_collected_together_and_none_is_left_out() {
    const LONG: u32 = 1000;
    for shards in [1, 2] {
        let store = open(&pool(256), shards);
        let rows: Vec<[u8; 4]> = (0_u32..3000).map(u32::to_be_bytes).collect();
        for number in BOTH {
            store.with_all(|keys| {
                for row in &rows {
                    put(keys, number, row, 1).unwrap();
                }
                for n in 0..LONG {
                    put(keys, number, &rows[7], n).unwrap();
                    put(keys, number, b"stays", n).unwrap();
                }
                for row in &rows {
                    keys.delete_row(number, row).unwrap();
                }
                keys.commit().unwrap();
            });
            let commits = store.store().stats().total.commits;
            let mut slices = 0;
            while store.maintain().unwrap() {
                slices += 1;
            }
            let commits = store.store().stats().total.commits - commits;
            // An index of some eight thousand slots is passed once for a thousand rows.
            let most = if number == ORDERED { 60 } else { 300 };
            assert!(slices < most, "{slices} slices in {number} for {} rows", rows.len());
            assert!(commits < 4 * most, "{commits} commits in {number} for {} rows", rows.len());
            store.with_all(|keys| assert_eq!(keys.len_in(number).unwrap(), u64::from(LONG)));
        }
        settle(&store);
    }
}

#[test]
fn ends_of_rows_in_a_full_pool_leave_deletions_their_room() {
    for number in BOTH {
        let pool = pool(16);
        let store = open(&pool, 1);
        let mut rows: Vec<[u8; 4]> = Vec::new();
        store.with_all(|keys| {
            for row in (0_u32..).map(u32::to_be_bytes) {
                if put(keys, number, &row, 1).is_err() {
                    break;
                }
                rows.push(row);
            }
            keys.commit().unwrap();
        });
        // Much faster than upkeep, and not in the order in which they were stored.
        let mut left: Vec<[u8; 4]> =
            (0..7).flat_map(|first| rows.iter().skip(first).step_by(7)).copied().collect();
        left.reverse();
        let mut store = store;
        for round in 0..1000 {
            let before = left.len();
            store.with_all(|keys| {
                while let Some(row) = left.last() {
                    match keys.delete_row(number, row) {
                        Ok(()) => drop(left.pop()),
                        Err(KvError::PoolFull { .. }) => break,
                        Err(error) => panic!("{error}"),
                    }
                }
                keys.commit().unwrap();
            });
            assert!(left.len() < before, "{before} rows are left and none goes any more");
            if round == 0 {
                assert!(!left.is_empty(), "nothing was refused");
                drop(store);
                store = open(&pool, 1);
            }
            settle(&store);
            store.with_all(|keys| {
                let there = keys.len_in(number).unwrap();
                assert_eq!(there, left.len() as u64, "dead keys stay for want of room");
            });
            if left.is_empty() {
                break;
            }
        }
        assert!(left.is_empty());
    }
}
