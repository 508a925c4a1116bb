//! Namespaces, rows, order and conditional batches: what they promise, and random operations
//! against a plain map, with collection, expiry, snapshots and reopening.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

mod fixtures;

use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};
use std::sync::Arc;

use beeline_env::{Clock as _, ManualClock};
use beeline_kv::{
    Applied, Change, Condition, Embedded, Key, Keyspace, KvError, NamespaceOptions, PutOptions,
    Range, Store, StoreOptions, Write, audit,
};
use beeline_pmem::{Durability, Pool, PoolOptions};
use proptest::prelude::*;

const PLAIN: u32 = 256;
const ORDERED: u32 = 1000;
const ROWS: u32 = 1001;
const ORDERED_ROWS: u32 = 0x7FFF_FFFF;
const ALL: [u32; 4] = [PLAIN, ORDERED, ROWS, ORDERED_ROWS];

fn options_of(number: u32) -> NamespaceOptions {
    NamespaceOptions {
        by_row: number == ROWS || number == ORDERED_ROWS,
        ordered: number == ORDERED || number == ORDERED_ROWS,
        time_to_live_ms: if number == ROWS { 500 } else { 0 },
        ..NamespaceOptions::default()
    }
}

fn options(shards: usize, clock: &Arc<ManualClock>) -> StoreOptions {
    let clock = Arc::clone(clock);
    StoreOptions { shards, clock, warm_bytes: Some(12 << 10), ..StoreOptions::default() }
}

fn small_pool() -> Pool {
    Pool::dram(&PoolOptions::volatile(64 << 10, 64 * (64 << 10))).unwrap()
}

fn embedded(shards: usize) -> Embedded {
    let clock = Arc::new(ManualClock::new(1_000_000));
    Store::open(small_pool(), options(shards, &clock)).unwrap().into()
}

fn value_of(keys: &mut Keyspace<'_>, number: u32, key: Key<'_>) -> Option<(Vec<u8>, u64)> {
    let entry = keys.get_in(number, key).unwrap()?;
    let mut value = Vec::new();
    keys.read_value(&entry, &mut value).unwrap();
    Some((value, entry.version))
}

fn visited(keys: &mut Keyspace<'_>, number: u32, range: &Range<'_>) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut met = Vec::new();
    keys.range(number, range, |key, entry, value| {
        assert_eq!(entry.value_length as usize, value.len());
        met.push((key.to_vec(), value.to_vec()));
        ControlFlow::Continue(())
    })
    .unwrap();
    met
}

#[test]
fn a_range_goes_both_ways_over_all_shards() {
    for shards in [1, 3] {
        let store = embedded(shards);
        store.with_all(|keys| {
            keys.create_namespace(ORDERED, options_of(ORDERED)).unwrap();
            for n in (0..2000_u32).rev() {
                let key = format!("{n:05}");
                keys.put_in(ORDERED, key.as_bytes(), &[&n.to_le_bytes()], PutOptions::default())
                    .unwrap();
            }
            let (from, to) = (b"00100".as_slice(), b"01000".as_slice());
            let range =
                Range { from: Bound::Included(from), to: Bound::Excluded(to), ..Range::ALL };
            let met = visited(keys, ORDERED, &range);
            assert_eq!(met.len(), 900);
            assert!(met.is_sorted());
            let mut back = visited(keys, ORDERED, &Range { backward: true, ..range });
            back.reverse();
            assert_eq!(met, back);
            assert_eq!(keys.len_in(ORDERED).unwrap(), 2000);
        });
    }
}

#[test]
fn a_range_goes_on_behind_the_last_key_while_others_write() {
    let store = embedded(2);
    store.with_all(|keys| keys.create_namespace(ORDERED, options_of(ORDERED)).unwrap());
    let key = |n: u32| n.to_be_bytes().to_vec();
    let put = |n: u32| {
        store.with_all(|keys| {
            keys.put_in(ORDERED, &key(n), &[b"x"], PutOptions::default()).unwrap();
        });
    };
    (0..1000).map(|n| n * 10).for_each(put);
    let (mut met, mut from) = (Vec::new(), Bound::Unbounded);
    let mut noise = 0;
    loop {
        let before = met.len();
        store.with_all(|keys| {
            let range = Range { from: from.as_ref().map(Vec::as_slice), ..Range::ALL };
            let mut left = 7;
            keys.range(ORDERED, &range, |key, _, _| {
                met.push(u32::from_be_bytes(key.try_into().unwrap()));
                left -= 1;
                if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
            .unwrap();
        });
        if met.len() == before {
            break;
        }
        from = Bound::Excluded(key(*met.last().unwrap()));
        // Keys come and go on both sides of the position.
        for _ in 0..20 {
            noise = (noise * 7 + 13) % 10_000;
            if noise % 10 != 0 {
                put(noise);
            }
        }
        store.with_all(|keys| {
            keys.delete_in(ORDERED, &key((noise * 3 % 9_999) / 10 * 10 + 1)).unwrap()
        });
    }
    assert!(met.is_sorted_by(|one, next| one < next), "in order, none twice");
    let stayed: Vec<u32> = met.into_iter().filter(|n| n % 10 == 0).collect();
    assert_eq!(stayed, (0..1000).map(|n| n * 10).collect::<Vec<_>>());
}

#[test]
fn rows_keep_their_sub_keys_apart_and_in_one_shard() {
    let store = embedded(4);
    store.with_all(|keys| {
        keys.create_namespace(ORDERED_ROWS, options_of(ORDERED_ROWS)).unwrap();
        for (row, name) in [("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", "")] {
            let value = format!("{row}|{name}");
            let key = (row.as_bytes(), name.as_bytes());
            keys.put_in(ORDERED_ROWS, key, &[value.as_bytes()], PutOptions::default()).unwrap();
        }
        for (row, name) in [("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", "")] {
            let key = Key { row: row.as_bytes(), name: name.as_bytes() };
            let (value, _) = value_of(keys, ORDERED_ROWS, key).unwrap();
            assert_eq!(value, format!("{row}|{name}").as_bytes());
            let met = visited(keys, ORDERED_ROWS, &Range { row: row.as_bytes(), ..Range::ALL });
            assert_eq!(met, [(name.as_bytes().to_vec(), value)]);
        }
        // A row of all ones has no key behind it.
        let row = [255; 3];
        for name in [b"".as_slice(), &[255], &[255, 255]] {
            let key = (row.as_slice(), name);
            keys.put_in(ORDERED_ROWS, key, &[b"v"], PutOptions::default()).unwrap();
        }
        assert_eq!(visited(keys, ORDERED_ROWS, &Range { row: &row, ..Range::ALL }).len(), 3);
    });
    let shard = |name: &[u8]| store.store().shard_in(ORDERED_ROWS, (b"row".as_slice(), name));
    let expected = shard(b"0").unwrap();
    for name in 0..200_u8 {
        assert_eq!(shard(&[name]).unwrap(), expected);
    }
    // The one shard is enough.
    let met = store.with_shard(expected, |keys| {
        keys.put_in(
            ORDERED_ROWS,
            (b"row".as_slice(), b"n".as_slice()),
            &[b"v"],
            PutOptions::default(),
        )
        .unwrap();
        visited(keys, ORDERED_ROWS, &Range { row: b"row", ..Range::ALL })
    });
    assert_eq!(met.unwrap(), [(b"n".to_vec(), b"v".to_vec())]);
}

#[test]
fn a_batch_with_a_failed_condition_changes_nothing_and_says_which() {
    let store = embedded(2);
    store.with_all(|keys| {
        keys.create_namespace(PLAIN, options_of(PLAIN)).unwrap();
        let put = |value| Change::Put { value, options: PutOptions::default() };
        let write = |key: &'static [u8], condition, change| Write {
            namespace: PLAIN,
            key: key.into(),
            condition,
            change,
        };
        let one: &[&[u8]] = &[b"1"];
        let two: &[&[u8]] = &[b"2"];
        let Applied::Done(versions) = keys
            .apply(&[
                write(b"a", Condition::Absent, put(one)),
                write(b"b", Condition::None, put(two)),
            ])
            .unwrap()
        else {
            panic!("both keys were absent");
        };
        #[cfg(debug_assertions)]
        let placed = beeline_kv::keys_placed();
        let again = keys.apply(&[
            write(b"c", Condition::None, put(one)),
            write(b"a", Condition::Absent, put(two)),
        ]);
        #[cfg(debug_assertions)]
        assert_eq!(beeline_kv::keys_placed() - placed, 2, "each key is hashed once");
        assert_eq!(again.unwrap(), Applied::Refused { write: 1, found: Some(versions[0]) });
        assert_eq!(value_of(keys, PLAIN, b"c".into()), None);
        let swap = [
            write(b"a", Condition::Version(versions[0]), put(two)),
            write(b"b", Condition::Version(versions[1]), Change::Delete),
            write(b"c", Condition::Absent, Change::Keep),
        ];
        let Applied::Done(now) = keys.apply(&swap).unwrap() else { panic!("versions are known") };
        assert!(now[0] > versions[1], "a new version");
        assert_eq!(now[1..], [0, 0]);
        assert_eq!(value_of(keys, PLAIN, b"a".into()), Some((b"2".to_vec(), now[0])));
        assert_eq!(value_of(keys, PLAIN, b"b".into()), None);
        let stale = keys.apply(&swap).unwrap();
        assert_eq!(stale, Applied::Refused { write: 0, found: Some(now[0]) });
        let gone = keys.apply(&[write(b"b", Condition::Present, put(one))]).unwrap();
        assert_eq!(gone, Applied::Refused { write: 0, found: None });
    });
}

#[test]
fn a_batch_too_large_is_refused_before_its_first_write() {
    let store = embedded(1);
    store.with_all(|keys| {
        keys.create_namespace(PLAIN, options_of(PLAIN)).unwrap();
        let large = vec![7; 40_000];
        let value: &[&[u8]] = &[&large];
        let change = Change::Put { value, options: PutOptions::default() };
        let condition = Condition::None;
        let writes = [b"a".as_slice(), b"b"].map(|key| Write {
            namespace: PLAIN,
            key: key.into(),
            condition,
            change,
        });
        assert!(matches!(keys.apply(&writes), Err(KvError::BatchTooLarge { .. })));
        assert_eq!(keys.len_in(PLAIN).unwrap(), 0);
    });
}

#[test]
fn a_namespace_that_is_not_there_or_of_another_kind_is_refused() {
    let store = embedded(2);
    store.with_all(|keys| {
        let put = |keys: &mut Keyspace<'_>, number, key: Key<'_>| {
            keys.put_in(number, key, &[b"v"], PutOptions::default())
        };
        for number in [16, 17, 255, 256, u32::MAX] {
            let refused = put(keys, number, b"k".into());
            assert!(matches!(refused, Err(KvError::Namespace { .. })), "{number}: {refused:?}");
        }
        for number in [0, 15, 16, 255, 1 << 31, u32::MAX] {
            let refused = keys.create_namespace(number, NamespaceOptions::default());
            assert!(matches!(refused, Err(KvError::NamespaceTaken { .. })), "{number}");
        }
        keys.create_namespace(PLAIN, options_of(PLAIN)).unwrap();
        keys.create_namespace(PLAIN, options_of(PLAIN)).unwrap();
        let other = NamespaceOptions { ordered: true, ..NamespaceOptions::default() };
        let refused = keys.create_namespace(PLAIN, other);
        assert!(matches!(refused, Err(KvError::NamespaceTaken { number: PLAIN, .. })));
        let refused = put(keys, PLAIN, (b"row".as_slice(), b"name".as_slice()).into());
        assert!(matches!(refused, Err(KvError::NamespaceKind { number: PLAIN, .. })));
        let refused = keys.range(PLAIN, &Range::ALL, |_, _, _| ControlFlow::Continue(()));
        assert!(matches!(refused, Err(KvError::NamespaceKind { number: PLAIN, .. })));
        // The databases are namespaces, too.
        put(keys, 3, b"k".into()).unwrap();
        assert!(keys.lookup(3, b"k").unwrap().is_some());
        assert_eq!(store.store().namespaces(), [(PLAIN, options_of(PLAIN))]);
    });
}

/// Everything that the store of an earlier build held, in `store`.
fn check_old_contents(store: &Embedded) {
    store.with_all(|keys| {
        for n in 0..40_u32 {
            let database = n % 16;
            let key = format!("key {n}");
            let expected = (database != 7 && n != 21).then(|| format!("value {n}").into_bytes());
            let found = value_of(keys, database, key.as_bytes().into());
            assert_eq!(found.map(|found| found.0), expected, "{key}");
        }
        let mut position = Vec::new();
        assert!(keys.system(b"position", &mut position).unwrap());
        assert_eq!(position, b"17");
        let entry = keys.get_in(3, b"expires").unwrap().unwrap();
        assert_eq!(entry.expires_at_ms, 4_000_000_000_000);
        for (database, key) in [(1, b"batch a"), (2, b"batch b")] {
            assert!(keys.get_in(database, key).unwrap().is_some());
        }
        assert_eq!(keys.store().namespaces(), []);
    });
}

#[test]
fn a_data_directory_of_the_build_before_namespaces_is_read_and_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    fixtures::unpack_pool("store-format-1.pool", directory.path());
    let pool = PoolOptions { durability: Durability::Process, ..PoolOptions::default() };
    let checked = beeline_kv::check(directory.path()).unwrap();
    assert!(!checked.is_damaged(), "{checked:?}");
    for turn in 0..3 {
        let options = StoreOptions { shards: 1 + turn, ..StoreOptions::default() };
        let store = Embedded::open(directory.path(), &pool, options).unwrap();
        assert_eq!((store.report().damaged, store.report().torn), (0, 0));
        if turn == 0 {
            check_old_contents(&store);
        }
        store.with_all(|keys| {
            if turn > 0 {
                let found = value_of(keys, ORDERED, b"new".into()).unwrap();
                assert_eq!(found.0, b"value");
                keys.drop_namespace(ORDERED).unwrap();
            }
            check_nothing_left(keys);
            keys.create_namespace(ORDERED, options_of(ORDERED)).unwrap();
            keys.put_in(ORDERED, b"new", &[b"value"], PutOptions::default()).unwrap();
            keys.commit().unwrap();
        });
    }
}

fn check_nothing_left(keys: &Keyspace<'_>) {
    assert_eq!(keys.store().namespaces(), []);
}

#[test]
fn a_snapshot_of_the_build_before_namespaces_is_restored() {
    let pool = Pool::dram(&PoolOptions::volatile(64 << 10, 16 * (64 << 10))).unwrap();
    let options = StoreOptions { shards: 2, ..StoreOptions::default() };
    let path = fixtures::path("snapshot-format-1.kv");
    let (opened, _) = beeline_kv::restore(&path, pool, options).unwrap();
    check_old_contents(&opened.into());
}

#[derive(Clone, Debug)]
enum Operation {
    Put { space: usize, row: u8, name: u8, length: u16, expires_in: u16 },
    Delete { space: usize, row: u8, name: u8 },
    DeleteRow { ordered: bool, row: u8, puts: Option<(u8, u8)> },
    Apply { writes: Vec<(usize, u8, u8, u8)>, length: u16 },
    Range { space: usize, row: u8, from: u8, to: u8, backward: bool },
    Drop(usize),
    Clear(usize),
    FlushAll,
    Advance(u16),
    Maintain,
    Settle,
    Reopen(usize),
    Snapshot(bool),
}

fn operation() -> impl Strategy<Value = Operation> {
    let (space, row, name) = (0..4_usize, 0..3_u8, 0..20_u8);
    let write = (space.clone(), row.clone(), name.clone(), 0..8_u8);
    prop_oneof![
        20 => (space.clone(), row.clone(), name.clone(), 0..3000_u16, prop_oneof![5 => Just(0), 1 => 1..900_u16])
            .prop_map(|(space, row, name, length, expires_in)| Operation::Put { space, row, name, length, expires_in }),
        8 => (space.clone(), row.clone(), name.clone()).prop_map(|(space, row, name)| Operation::Delete { space, row, name }),
        4 => (any::<bool>(), row.clone(), prop::option::of((name.clone(), name.clone())))
            .prop_map(|(ordered, row, puts)| Operation::DeleteRow { ordered, row, puts }),
        6 => (prop::collection::vec(write, 1..9), 0..1500_u16).prop_map(|(writes, length)| Operation::Apply { writes, length }),
        6 => (space.clone(), row, name.clone(), name, any::<bool>())
            .prop_map(|(space, row, from, to, backward)| Operation::Range { space, row, from, to, backward }),
        1 => space.clone().prop_map(Operation::Drop),
        1 => space.prop_map(Operation::Clear),
        1 => Just(Operation::FlushAll),
        2 => (0..400_u16).prop_map(Operation::Advance),
        4 => Just(Operation::Maintain),
        1 => Just(Operation::Settle),
        1 => (1..4_usize).prop_map(Operation::Reopen),
        1 => any::<bool>().prop_map(Operation::Snapshot),
    ]
}

/// Namespace, row and name; value, version and expiry.
type Model = BTreeMap<(u32, Vec<u8>, Vec<u8>), (Vec<u8>, u64, u64)>;

struct World {
    pool: Pool,
    clock: Arc<ManualClock>,
    store: Option<Embedded>,
    model: Model,
    stamp: u64,
    shards: usize,
    /// Keys of rows that ended may still count.
    ended: bool,
}

fn name_bytes(name: u8) -> Vec<u8> {
    let mut bytes = vec![b'a' + name % 7, name];
    bytes.resize(2 + usize::from(name) * 9, 0);
    bytes
}

fn row_bytes(space: u32, row: u8) -> Vec<u8> {
    if options_of(space).by_row { vec![b'r'; usize::from(row)] } else { Vec::new() }
}

impl World {
    fn new(shards: usize) -> Self {
        let clock = Arc::new(ManualClock::new(1_000_000));
        let pool = small_pool();
        let mut world =
            Self { pool, clock, store: None, model: Model::new(), stamp: 0, shards, ended: false };
        world.reopen(shards);
        world
    }

    fn store(&self) -> &Embedded {
        self.store.as_ref().unwrap()
    }

    fn take_over(&mut self, store: Embedded) {
        store.with_all(|keys| {
            for number in ALL {
                keys.create_namespace(number, options_of(number)).unwrap();
            }
        });
        self.store = Some(store);
    }

    fn reopen(&mut self, shards: usize) {
        self.store = None;
        self.shards = shards;
        let opened = Store::open(self.pool.clone(), options(shards, &self.clock)).unwrap();
        assert_eq!((opened.2.damaged, opened.2.torn), (0, 0), "{:?}", opened.2);
        self.take_over(opened.into());
    }

    fn value(&mut self, length: u16) -> Vec<u8> {
        self.stamp += 1;
        let mut value = self.stamp.to_le_bytes().to_vec();
        value.resize(8 + usize::from(length), self.stamp as u8);
        value
    }

    fn expire_model(&mut self) {
        let now = self.clock.unix_ms();
        self.model.retain(|_, value| value.2 == 0 || value.2 > now);
    }

    fn life(&self, number: u32, expires_in: u16) -> u64 {
        let default = options_of(number).time_to_live_ms;
        match (u64::from(expires_in), default) {
            (0, 0) => 0,
            (0, life) | (life, _) => self.clock.unix_ms() + life,
        }
    }

    fn compare_all(&mut self) {
        self.expire_model();
        let model = self.model.clone();
        self.store().with_all(|keys| {
            for number in ALL {
                for row in 0..3 {
                    let row = row_bytes(number, row);
                    for name in 0..20 {
                        let name = name_bytes(name);
                        let found = value_of(keys, number, Key { row: &row, name: &name });
                        let expected = model.get(&(number, row.clone(), name));
                        assert_eq!(found, expected.map(|value| (value.0.clone(), value.1)));
                    }
                    if options_of(number).ordered {
                        let range = Range { row: &row, ..Range::ALL };
                        self.compare_range(keys, &model, number, &range);
                    }
                }
                let live = model.keys().filter(|key| key.0 == number).count();
                let counted = keys.len_in(number).unwrap();
                assert!(counted == live as u64 || (self.ended && counted > live as u64));
            }
        });
        let shards = self.store().shards();
        let findings = audit(self.store().store(), shards);
        assert!(findings.is_empty(), "{findings:#?}");
    }

    fn compare_range(
        &self,
        keys: &mut Keyspace<'_>,
        model: &Model,
        number: u32,
        range: &Range<'_>,
    ) {
        let inside = |name: &[u8]| {
            (match range.from {
                Bound::Included(from) => name >= from,
                Bound::Excluded(from) => name > from,
                Bound::Unbounded => true,
            }) && match range.to {
                Bound::Included(to) => name <= to,
                Bound::Excluded(to) => name < to,
                Bound::Unbounded => true,
            }
        };
        let mut expected: Vec<_> = model
            .iter()
            .filter(|(key, _)| key.0 == number && key.1 == range.row && inside(&key.2))
            .map(|(key, value)| (key.2.clone(), value.0.clone()))
            .collect();
        if range.backward {
            expected.reverse();
        }
        assert_eq!(visited(keys, number, range), expected);
    }

    fn run(&mut self, operation: &Operation) {
        self.expire_model();
        match operation {
            Operation::Put { space, row, name, length, expires_in } => {
                let number = ALL[*space];
                let (row, name) = (row_bytes(number, *row), name_bytes(*name));
                let value = self.value(*length);
                let expires_at_ms = self.life(number, *expires_in);
                let given = if *expires_in == 0 { 0 } else { expires_at_ms };
                let options = PutOptions { expires_at_ms: given, ..PutOptions::default() };
                let stored = self.store().with_all(|keys| {
                    let key = Key { row: &row, name: &name };
                    let stored = keys.put_in(number, key, &[&value], options);
                    keys.commit().unwrap();
                    stored
                });
                match stored {
                    Ok(version) => {
                        self.model.insert((number, row, name), (value, version, expires_at_ms));
                    }
                    Err(KvError::PoolFull { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Operation::Delete { space, row, name } => {
                let number = ALL[*space];
                let (row, name) = (row_bytes(number, *row), name_bytes(*name));
                let deleted = self.store().with_all(|keys| {
                    let key = Key { row: &row, name: &name };
                    let deleted = keys.delete_in(number, key).unwrap();
                    keys.commit().unwrap();
                    deleted
                });
                assert_eq!(deleted, self.model.remove(&(number, row, name)).is_some());
            }
            Operation::DeleteRow { ordered, row, puts } => {
                let number = if *ordered { ORDERED_ROWS } else { ROWS };
                self.delete_row(number, *row, *puts);
            }
            Operation::Apply { writes, length } => self.apply(writes, *length),
            Operation::Range { space, row, from, to, backward } => {
                let number = ALL[*space];
                if options_of(number).ordered {
                    let (row, from, to) =
                        (row_bytes(number, *row), name_bytes(*from), name_bytes(*to));
                    let range = Range {
                        row: &row,
                        from: if from.len() % 2 == 0 {
                            Bound::Included(&from)
                        } else {
                            Bound::Excluded(&from)
                        },
                        to: if to.len() % 2 == 0 {
                            Bound::Excluded(&to)
                        } else {
                            Bound::Included(&to)
                        },
                        backward: *backward,
                    };
                    let model = self.model.clone();
                    self.store().with_all(|keys| self.compare_range(keys, &model, number, &range));
                }
            }
            Operation::Drop(space) => {
                let number = ALL[*space];
                self.store().with_all(|keys| {
                    assert!(keys.drop_namespace(number).unwrap());
                    let gone = keys.get_in(number, b"x");
                    assert!(matches!(gone, Err(KvError::Namespace { .. })));
                    keys.create_namespace(number, options_of(number)).unwrap();
                });
                self.model.retain(|key, _| key.0 != number);
            }
            Operation::Clear(space) => {
                let number = ALL[*space];
                self.store().with_all(|keys| keys.clear_namespace(number).unwrap());
                self.model.retain(|key, _| key.0 != number);
            }
            // Of databases only.
            Operation::FlushAll => self.store().with_all(|keys| keys.flush(None).unwrap()),
            Operation::Advance(ms) => {
                self.clock.advance(std::time::Duration::from_millis(u64::from(*ms)));
            }
            Operation::Maintain => {
                for _ in 0..4 {
                    self.store().maintain().unwrap();
                }
            }
            Operation::Settle => {
                let mut turns = 0;
                while self.store().maintain().unwrap() {
                    turns += 1;
                    assert!(turns < 10_000, "upkeep comes to an end");
                }
                self.ended &= self.store().store().is_short();
                self.compare_all();
            }
            Operation::Reopen(shards) => {
                self.compare_all();
                self.reopen(*shards);
                self.compare_all();
            }
            Operation::Snapshot(in_use) => {
                self.compare_all();
                let directory = tempfile::tempdir().unwrap();
                let path = directory.path().join("snapshot");
                let snapshot = self.store().with_all(|keys| keys.begin_snapshot().unwrap());
                snapshot.write(&path).unwrap();
                if *in_use {
                    self.store().with_all(|keys| {
                        keys.put_in(PLAIN, b"later", &[b"x"], PutOptions::default()).unwrap();
                        keys.commit().unwrap();
                        keys.drop_namespace(ORDERED).unwrap();
                    });
                    let store = self.store();
                    let replaced =
                        beeline_kv::replace_by_snapshot(&path, store.store(), store.shards());
                    match replaced {
                        Ok(_) => self.note_versions(),
                        Err(KvError::PoolFull { .. }) => {
                            self.reopen(self.shards);
                            self.model.clear();
                        }
                        Err(error) => panic!("{error}"),
                    }
                } else {
                    self.pool = small_pool();
                    let options = options(self.shards, &self.clock);
                    let (opened, _) =
                        beeline_kv::restore(&path, self.pool.clone(), options).unwrap();
                    self.take_over(opened.into());
                }
                self.compare_all();
            }
        }
    }

    /// Ends a row, in one batch with a put before and one after it.
    fn delete_row(&mut self, number: u32, row: u8, puts: Option<(u8, u8)>) {
        let row = row_bytes(number, row);
        let value = self.value(100);
        let outcome = self.store().with_all(|keys| {
            if let Some((before, after)) = puts {
                keys.begin_batch();
                let put = |keys: &mut Keyspace<'_>, name: u8| {
                    let name = name_bytes(name);
                    let key = Key { row: &row, name: &name };
                    keys.put_in(number, key, &[&value], PutOptions::default())
                };
                // Nothing is stored before room for all of it is there.
                let outcome = keys.reserve_bytes(2000).and_then(|()| {
                    put(keys, before)?;
                    keys.delete_row(number, &row)?;
                    put(keys, after).map(Some)
                });
                keys.end_batch();
                keys.commit().unwrap();
                outcome
            } else {
                let outcome = keys.delete_row(number, &row).map(|()| None);
                keys.commit().unwrap();
                outcome
            }
        });
        match outcome {
            Ok(version) => {
                self.ended = true;
                self.model.retain(|key, _| key.0 != number || key.1 != row);
                if let Some((version, (_, after))) = version.zip(puts) {
                    let life = self.life(number, 0);
                    let value = (value, version, life);
                    self.model.insert((number, row, name_bytes(after)), value);
                }
            }
            Err(KvError::PoolFull { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Records of a snapshot got new versions.
    fn note_versions(&mut self) {
        let mut model = std::mem::take(&mut self.model);
        self.store().with_all(|keys| {
            for (key, value) in &mut model {
                let found = value_of(keys, key.0, Key { row: &key.1, name: &key.2 });
                value.1 = found.unwrap().1;
            }
        });
        self.model = model;
    }

    fn apply(&mut self, list: &[(usize, u8, u8, u8)], length: u16) {
        let value = self.value(length);
        let parts: [&[u8]; 2] = value.split_at(value.len() / 2).into();
        let keys: Vec<_> = list
            .iter()
            .map(|write| (ALL[write.0], row_bytes(ALL[write.0], write.1), name_bytes(write.2)))
            .collect();
        let mut writes = Vec::new();
        let mut refused = None;
        for (at, (key, (_, _, _, kind))) in keys.iter().zip(list).enumerate() {
            let known = self.model.get(key).map(|value| value.1);
            let condition = match kind % 4 {
                0 => Condition::Absent,
                1 => Condition::Version(known.unwrap_or(u64::from(*kind))),
                _ => Condition::None,
            };
            let holds = match condition {
                Condition::Absent => known.is_none(),
                Condition::Version(_) => known.is_some(),
                _ => true,
            };
            if !holds && refused.is_none() {
                refused = Some((at, known));
            }
            let options = PutOptions::default();
            let change = if *kind < 5 {
                Change::Put { value: &parts, options }
            } else if *kind < 7 {
                Change::Delete
            } else {
                Change::Keep
            };
            let address = Key { row: &key.1, name: &key.2 };
            writes.push(Write { namespace: key.0, key: address, condition, change });
        }
        let outcome = self.store().with_all(|keys| {
            let outcome = keys.apply(&writes);
            keys.commit().unwrap();
            outcome
        });
        match (outcome, refused) {
            (Ok(Applied::Refused { write, found }), Some(expected)) => {
                assert_eq!((write, found), expected);
            }
            (Ok(Applied::Done(versions)), None) => {
                for ((key, write), version) in keys.iter().zip(&writes).zip(versions) {
                    match write.change {
                        Change::Put { .. } => {
                            let life = self.life(key.0, 0);
                            self.model.insert(key.clone(), (value.clone(), version, life));
                        }
                        Change::Delete => {
                            self.model.remove(key);
                        }
                        Change::Append { .. } | Change::Keep => {}
                    }
                }
            }
            (Err(KvError::PoolFull { .. }), None) => {}
            (outcome, refused) => panic!("{outcome:?}, expected {refused:?}"),
        }
    }
}

fn cases() -> u32 {
    if std::env::var("BEELINE_DEEP").is_ok() { 1000 } else { 24 }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(), failure_persistence: None, max_shrink_iters: 1500, ..ProptestConfig::default()
    })]
    #[test]
    fn namespaces_agree_with_a_map(
        shards in 1..4_usize,
        operations in prop::collection::vec(operation(), 200..900),
    ) {
        let mut world = World::new(shards);
        for operation in &operations {
            world.run(operation);
        }
        world.run(&Operation::Reopen(shards));
        world.run(&Operation::Settle);
    }
}
