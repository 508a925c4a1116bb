//! Services' rows with records: how many keys each has, and when it ends, against a plain map.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use beeline_env::{Clock, ManualClock};
use beeline_kv::{
    Applied, Change, Condition, Embedded, EventKind, Keyspace, KvError, NamespaceOptions,
    PutOptions, Range, RowState, Store, StoreOptions, Write, audit,
};
use beeline_pmem::{Pool, PoolOptions};

/// Rows end when they are told to.
const TOLD: u32 = 256;
/// Rows end a while after their first key; their keys are in order.
const BRIEF: u32 = 257;
const BRIEF_MS: u64 = 5000;
const BOTH: [u32; 2] = [TOLD, BRIEF];

fn options_of(number: u32) -> NamespaceOptions {
    let ordered = number == BRIEF;
    NamespaceOptions {
        by_row: true,
        ordered,
        row_records: true,
        row_time_to_live_ms: if ordered { BRIEF_MS } else { 0 },
        ..NamespaceOptions::default()
    }
}

fn pool(segments: u64) -> Pool {
    Pool::dram(&PoolOptions::volatile(64 << 10, segments * (64 << 10))).unwrap()
}

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(1_000_000))
}

fn open(pool: &Pool, shards: usize, clock: &Arc<ManualClock>) -> Embedded {
    let clock: Arc<dyn Clock> = Arc::clone(clock) as _;
    let options = StoreOptions { shards, clock, feed_bytes: 1 << 20, ..StoreOptions::default() };
    let store: Embedded = Store::open(pool.clone(), options).unwrap().into();
    store.with_all(|keys| {
        for number in BOTH {
            keys.create_namespace(number, options_of(number)).unwrap();
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

fn settle(store: &Embedded) {
    while store.maintain().unwrap() {}
    let findings = audit(store.store(), store.shards());
    assert!(findings.is_empty(), "{findings:#?}");
}

fn state(length: u64, expires_at_ms: u64) -> RowState {
    RowState { length, expires_at_ms }
}

#[test]
fn a_row_of_any_length_gets_its_time_by_one_small_entry_and_knows_its_length() {
    const KEYS: u32 = 5000;
    let (pool, clock) = (pool(256), clock());
    for shards in [1, 3] {
        let store = open(&pool, shards, &clock);
        let now = clock.unix_ms();
        let stored = store.with_all(|keys| {
            for n in 0..KEYS {
                put(keys, TOLD, b"long", n).unwrap();
            }
            put(keys, TOLD, b"other", 1).unwrap();
            keys.commit().unwrap();
            assert_eq!(keys.row_state(TOLD, b"long").unwrap(), state(u64::from(KEYS), 0));
            let before = keys.store().stats().total;
            assert!(keys.expire_row(TOLD, b"long", now + 1000).unwrap());
            assert!(!keys.expire_row(TOLD, b"none", now + 1000).unwrap(), "no such row");
            keys.commit().unwrap();
            let after = keys.store().stats().total;
            (after.entries_stored - before.entries_stored, after.bytes_stored - before.bytes_stored)
        });
        assert_eq!(stored, (1, 80), "entries and bytes");
        drop(store);
        let store = open(&pool, 4 - shards, &clock);
        store.with_all(|keys| {
            let known = keys.row_state(TOLD, b"long").unwrap();
            assert_eq!(known, state(u64::from(KEYS), now + 1000), "after an opening");
        });
        clock.advance(Duration::from_millis(1000));
        store.with_all(|keys| {
            assert_eq!(keys.row_state(TOLD, b"long").unwrap(), RowState::default());
            assert!((0..KEYS).all(|n| !has(keys, TOLD, b"long", n)));
            assert!(has(keys, TOLD, b"other", 1));
            assert!(keys.len_in(TOLD).unwrap() > u64::from(KEYS / 2), "not collected yet");
            // What comes later lives, and has no time.
            put(keys, TOLD, b"long", 3).unwrap();
            keys.commit().unwrap();
            assert_eq!(keys.row_state(TOLD, b"long").unwrap(), state(1, 0));
        });
        settle(&store);
        drop(store);
        let store = open(&pool, shards, &clock);
        store.with_all(|keys| {
            assert_eq!(keys.row_state(TOLD, b"long").unwrap(), state(1, 0));
            assert_eq!(keys.len_in(TOLD).unwrap(), 2);
            keys.clear_namespace(TOLD).unwrap();
            assert_eq!(keys.row_state(TOLD, b"long").unwrap(), RowState::default());
        });
    }
}

#[test]
fn upkeep_ends_rows_whose_time_is_past_and_says_when_the_next_one_is() {
    let clock = clock();
    let store = open(&pool(32), 1, &clock);
    store.with_all(|keys| {
        for n in 0..300_u32 {
            put(keys, BRIEF, &n.to_be_bytes(), 1).unwrap();
        }
        keys.commit().unwrap();
    });
    settle(&store);
    let due = |store: &Embedded| {
        let slice = store.shards()[0].lock().unwrap().maintain(1 << 20).unwrap();
        slice.next_deadline_ns.map(|at| at - clock.monotonic_ns())
    };
    // A wall clock may jump: at most a second.
    assert_eq!(due(&store), Some(1_000_000_000));
    clock.advance(Duration::from_millis(BRIEF_MS - 200));
    assert_eq!(due(&store), Some(200_000_000));
    clock.advance(Duration::from_millis(200));
    settle(&store);
    assert_eq!(due(&store), None, "nothing is left to wait for");
    store.with_all(|keys| assert_eq!(keys.len_in(BRIEF).unwrap(), 0));
}

#[test]
fn a_time_begins_with_the_first_key_of_a_row_in_one_batch_with_it() {
    let clock = clock();
    let store = open(&pool(32), 2, &clock);
    let start = clock.unix_ms();
    let from = store.store().feed_stats().newest;
    store.with_all(|keys| {
        put(keys, BRIEF, b"row", 1).unwrap();
        keys.commit().unwrap();
    });
    let told = store.store().events(from, 10).unwrap().events;
    assert_eq!(told[0].kind, EventKind::Expiry { expires_at_ms: start + BRIEF_MS });
    assert!(told[0].more && matches!(told[1].kind, EventKind::Put { .. }) && told.len() == 2);
    clock.advance(Duration::from_millis(1000));
    let name = 2_u32.to_be_bytes();
    let write = Write {
        namespace: BRIEF,
        key: (b"row".as_slice(), name.as_slice()).into(),
        condition: Condition::Absent,
        change: Change::Put { value: &[b"two"], options: PutOptions::default() },
    };
    store.with_all(|keys| {
        assert!(matches!(keys.apply(&[write]).unwrap(), Applied::Done(_)));
        keys.commit().unwrap();
        assert_eq!(keys.row_state(BRIEF, b"row").unwrap(), state(2, start + BRIEF_MS));
        // It may be changed, and taken away.
        assert!(keys.expire_row(BRIEF, b"row", start + 3000).unwrap());
        assert!(keys.expire_row(BRIEF, b"row", 0).unwrap());
        assert_eq!(keys.row_state(BRIEF, b"row").unwrap(), state(2, 0));
        assert!(keys.expire_row(BRIEF, b"row", start + 2000).unwrap());
        keys.commit().unwrap();
    });
    clock.advance(Duration::from_millis(1000));
    store.with_all(|keys| {
        // The row's keys are gone for conditions, too, and the batch begins the row anew.
        assert!(matches!(keys.apply(&[write]).unwrap(), Applied::Done(_)));
        keys.commit().unwrap();
        assert_eq!(keys.row_state(BRIEF, b"row").unwrap(), state(1, start + 2000 + BRIEF_MS));
        assert!(keys.expire_row(BRIEF, b"row", start).unwrap(), "a time in the past ends it");
        assert_eq!(keys.row_state(BRIEF, b"row").unwrap(), RowState::default());
        keys.commit().unwrap();
    });
    settle(&store);
    store.with_all(|keys| assert_eq!(keys.len_in(BRIEF).unwrap(), 0));
}

#[test]
fn records_are_for_rows_of_keys_alone() {
    let store = open(&pool(32), 1, &clock());
    let plain = NamespaceOptions { by_row: true, ..NamespaceOptions::default() };
    let all = NamespaceOptions { row_records: true, ..plain };
    store.with_all(|keys| {
        for options in [
            NamespaceOptions { by_row: false, ..all },
            NamespaceOptions { stream: true, ..all },
            NamespaceOptions { row_time_to_live_ms: 1, ..plain },
        ] {
            let refused = keys.create_namespace(300, options);
            assert!(matches!(refused, Err(KvError::NamespaceTaken { .. })), "{options:?}");
        }
        keys.create_namespace(300, plain).unwrap();
        put(keys, 300, b"row", 1).unwrap();
        let refused = keys.row_state(300, b"row").unwrap_err().to_string();
        assert!(refused.contains("row_records"), "{refused}");
        assert!(keys.expire_row(300, b"row", 5).is_err());
    });
}

#[test]
fn members_tell_the_same_however_far_their_upkeep_is() {
    let told = [false, true].map(|settles| {
        let clock = clock();
        let store = open(&pool(32), 2, &clock);
        store.with_all(|keys| {
            put(keys, BRIEF, b"row", 1).unwrap();
            keys.commit().unwrap();
        });
        clock.advance(Duration::from_millis(BRIEF_MS));
        if settles {
            settle(&store);
        }
        store.with_all(|keys| {
            keys.watch_effects();
            put(keys, BRIEF, b"row", 2).unwrap();
            keys.expire_row(BRIEF, b"row", clock.unix_ms() + 50).unwrap();
            keys.commit().unwrap();
            keys.effects()
        })
    });
    assert_eq!(told[0], told[1]);
}

/// A row of the model: its keys with their times of expiry, and its own.
#[derive(Clone, Debug, Default)]
struct ModelRow {
    keys: BTreeSet<u32>,
    expires_at_ms: u64,
}

#[derive(Default)]
struct Model(BTreeMap<(u32, u8), ModelRow>);

impl Model {
    fn settle(&mut self, now: u64) {
        self.0.retain(|_, row| row.expires_at_ms == 0 || row.expires_at_ms > now);
    }

    fn put(&mut self, number: u32, row: u8, n: u32, now: u64) {
        let row = self.0.entry((number, row)).or_default();
        row.keys.insert(n);
        if number == BRIEF && row.expires_at_ms == 0 {
            row.expires_at_ms = now + BRIEF_MS;
        }
    }

    fn check(&self, keys: &mut Keyspace<'_>) {
        for number in BOTH {
            for row in 0..6_u8 {
                let known = self.0.get(&(number, row)).cloned().unwrap_or_default();
                let wanted = state(known.keys.len() as u64, known.expires_at_ms);
                let found = keys.row_state(number, &[row]).unwrap();
                assert_eq!(found, wanted, "row {row} of {number}");
                for n in 0..40 {
                    assert_eq!(has(keys, number, &[row], n), known.keys.contains(&n));
                }
                if number == BRIEF {
                    let mut met = BTreeSet::new();
                    keys.range(number, &Range { row: &[row], ..Range::ALL }, |name, _, _| {
                        met.insert(u32::from_be_bytes(name.try_into().unwrap()));
                        ControlFlow::Continue(())
                    })
                    .unwrap();
                    assert_eq!(met, known.keys);
                }
            }
        }
    }
}

#[test]
fn random_changes_agree_with_a_map_through_openings_and_snapshots() {
    for seed in 1..9_u64 {
        let clock = clock();
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 20) % below
        };
        let mut pool = pool(96);
        let mut store = open(&pool, 1 + seed as usize % 3, &clock);
        let mut model = Model::default();
        for turn in 0..600 {
            clock.advance(Duration::from_millis(next(400)));
            let now = clock.unix_ms();
            model.settle(now);
            let (number, row) = (BOTH[next(2) as usize], next(6) as u8);
            let n = next(40) as u32;
            let at = [now + 1 + next(6000), 0, now - 1][next(3) as usize];
            let choice = next(100);
            store.with_all(|keys| match choice {
                0..45 => {
                    put(keys, number, &[row], n).unwrap();
                    model.put(number, row, n, now);
                }
                45..55 => {
                    // Several keys of two rows, all or none.
                    let names: Vec<[u8; 4]> = (n..n + 4).map(u32::to_be_bytes).collect();
                    let rows = [[row], [(row + 1) % 6]];
                    let writes: Vec<Write<'_>> = names
                        .iter()
                        .enumerate()
                        .map(|(at, name)| Write {
                            namespace: number,
                            key: (rows[at / 2].as_slice(), name.as_slice()).into(),
                            condition: Condition::None,
                            change: Change::Put { value: &[b"v"], options: PutOptions::default() },
                        })
                        .collect();
                    assert!(matches!(keys.apply(&writes).unwrap(), Applied::Done(_)));
                    for at in 0..4 {
                        model.put(number, rows[at / 2][0], n + at as u32, now);
                    }
                }
                55..75 => {
                    let name = n.to_be_bytes();
                    let gone = keys.delete_in(number, ([row].as_slice(), name.as_slice())).unwrap();
                    let known = model.0.get_mut(&(number, row));
                    assert_eq!(gone, known.is_some_and(|known| known.keys.remove(&n)));
                }
                75..90 => {
                    let known = model.0.get_mut(&(number, row)).filter(|row| !row.keys.is_empty());
                    assert_eq!(keys.expire_row(number, &[row], at).unwrap(), known.is_some());
                    if let Some(known) = known {
                        known.expires_at_ms = at;
                        if at != 0 && at <= now {
                            model.0.remove(&(number, row));
                        }
                    }
                }
                90..96 => {
                    keys.delete_row(number, &[row]).unwrap();
                    model.0.remove(&(number, row));
                }
                96 => {
                    keys.clear_namespace(number).unwrap();
                    model.0.retain(|(known, _), _| *known != number);
                }
                97 => {
                    keys.drop_namespace(number).unwrap();
                    keys.create_namespace(number, options_of(number)).unwrap();
                    model.0.retain(|(known, _), _| *known != number);
                }
                _ => {}
            });
            store.with_all(|keys| keys.commit().unwrap());
            match next(40) {
                0 => {
                    drop(store);
                    store = open(&pool, 1 + next(3) as usize, &clock);
                }
                1 => {
                    let directory = tempfile::tempdir().unwrap();
                    let path = directory.path().join("snapshot");
                    let snapshot = store.with_all(|keys| keys.begin_snapshot().unwrap());
                    snapshot.write(&path).unwrap();
                    drop(store);
                    pool = self::pool(96);
                    let clock_of: Arc<dyn Clock> = Arc::clone(&clock) as _;
                    let options =
                        StoreOptions { shards: 2, clock: clock_of, ..StoreOptions::default() };
                    drop(beeline_kv::restore(&path, pool.clone(), options).unwrap());
                    store = open(&pool, 1 + next(3) as usize, &clock);
                }
                2..12 => {
                    store.maintain().unwrap();
                }
                12..14 => settle(&store),
                _ => {}
            }
            if turn % 7 == 0 {
                store.with_all(|keys| model.check(keys));
            }
        }
        settle(&store);
        store.with_all(|keys| model.check(keys));
        // Nothing is left of rows that ended.
        clock.advance(Duration::from_secs(3600));
        model.settle(clock.unix_ms());
        settle(&store);
        store.with_all(|keys| {
            model.check(keys);
            let left: usize = model.0.values().map(|row| row.keys.len()).sum();
            let live: u64 = BOTH.iter().map(|number| keys.len_in(*number).unwrap()).sum();
            assert_eq!(live, left as u64);
        });
    }
}
