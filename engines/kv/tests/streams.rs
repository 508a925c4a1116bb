//! Streams: random work against plain vectors, through collection, openings, snapshots and clears; what an
//! entry and a truncation cost; what is refused.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use beeline_env::Randomness;
use beeline_kv::{
    Applied, Change, Condition, Embedded, EventKind, Eviction, Key, Keyspace, KvError,
    NamespaceLimit, NamespaceOptions, PutOptions, Shard, Store, StoreOptions, Write, audit,
};
use beeline_pmem::{Pool, PoolOptions};

const LOG: u32 = 400;
const TOPICS: u32 = 401;
const KEPT: u32 = 402;
const PLAIN: u32 = 403;
const KEEP_BYTES: u64 = 40_000;
const SEGMENT: u32 = 64 << 10;

fn options_of(number: u32) -> NamespaceOptions {
    NamespaceOptions {
        by_row: number != LOG && number != PLAIN,
        stream: number != PLAIN,
        keep_bytes: if number == KEPT { KEEP_BYTES } else { 0 },
        ..NamespaceOptions::default()
    }
}

fn pool(segments: u64) -> Pool {
    Pool::dram(&PoolOptions::volatile(SEGMENT, segments * u64::from(SEGMENT))).unwrap()
}

fn open(pool: &Pool, shards: usize) -> Embedded {
    let options = StoreOptions { shards, warm_bytes: Some(16 << 10), ..StoreOptions::default() };
    let store = Embedded::from(Store::open(pool.clone(), options).unwrap());
    assert_eq!((store.report().damaged, store.report().torn), (0, 0));
    store
}

fn create(keys: &mut Keyspace<'_>) {
    for number in [LOG, TOPICS, KEPT, PLAIN] {
        keys.create_namespace(number, options_of(number)).unwrap();
    }
}

fn read(keys: &mut Keyspace<'_>, number: u32, row: &[u8], from: u64) -> Vec<Vec<u8>> {
    let mut values = Vec::new();
    keys.read_stream(number, row, from, |entry| {
        assert_eq!(entry.position, from + values.len() as u64);
        values.push(entry.value.to_vec());
        ControlFlow::Continue(())
    })
    .unwrap();
    values
}

/// First position and values.
type Contents = (u64, Vec<Vec<u8>>);

/// Streams by namespace and row, and the keys of database 0.
#[derive(Clone, Debug, Default)]
struct Model(BTreeMap<(u32, Vec<u8>), Contents>, BTreeMap<Vec<u8>, Vec<u8>>);

impl Model {
    fn compare(&self, store: &Embedded) {
        store.with_all(|keys| {
            for number in [LOG, TOPICS, KEPT] {
                let rows: Vec<_> = keys.streams(number).unwrap();
                let known: Vec<_> = self.0.iter().filter(|stream| stream.0.0 == number).collect();
                assert_eq!(rows.len(), known.len(), "{number}");
                for ((row, ends), (name, (first, values))) in rows.iter().zip(known) {
                    let next = first + values.len() as u64;
                    assert_eq!((row, ends.first, ends.next), (&name.1, *first, next));
                    assert_eq!(&read(keys, number, row, *first), values);
                }
            }
            for (key, value) in &self.1 {
                let entry = keys.lookup(0, key).unwrap().unwrap();
                keys.with_value(&entry, |found| assert_eq!(found, value)).unwrap();
            }
        });
        let findings = audit(store.store(), store.shards());
        assert!(findings.is_empty(), "{findings:#?}");
    }

    /// What a namespace with bytes to keep cut off by itself is for the store to say, as long as enough is left.
    fn follow_cut(&mut self, keys: &mut Keyspace<'_>, number: u32, row: &[u8]) {
        let Some(ends) = keys.stream(number, row).unwrap() else { return };
        let (first, values) = self.0.get_mut(&(number, row.to_vec())).unwrap();
        if number == KEPT && ends.first > *first {
            values.drain(..(ends.first - *first) as usize);
            *first = ends.first;
            let kept: usize = values.iter().map(|value| value.len() + 64).sum();
            assert!(kept as u64 + 64 * values.len() as u64 >= KEEP_BYTES, "{kept} bytes are kept");
        }
        if number == KEPT {
            assert!(ends.bytes < KEEP_BYTES + 3 * u64::from(SEGMENT), "{ends:?}");
        }
    }
}

fn random_work(seed: u64, turns: u32) {
    let mut random = Randomness::new(seed);
    let pool = pool(if seed.is_multiple_of(2) { 26 } else { 80 });
    let mut store = open(&pool, 1 + seed as usize % 3);
    store.with_all(create);
    let mut model = Model::default();
    let mut stamp = 0_u8;
    for _ in 0..turns {
        let number = *random.pick(&[LOG, TOPICS, TOPICS, KEPT]).unwrap();
        let row: &[u8] =
            if number == LOG { b"" } else { random.pick(&[&b"a"[..], b"bb", b"ccc"]).unwrap() };
        let at = (number, row.to_vec());
        match random.below(20) {
            0..=10 => {
                let count = 1 + random.below(4);
                let values: Vec<_> = (0..count)
                    .map(|_| {
                        stamp = stamp.wrapping_add(1);
                        vec![stamp; random.below(1500) as usize]
                    })
                    .collect();
                let parts: Vec<&[u8]> = values.iter().map(Vec::as_slice).collect();
                let next = model.0.get(&at).map_or(0, |stream| stream.0 + stream.1.len() as u64);
                let key = [b'k', stamp % 7];
                let kind = random.below(3);
                let one = parts[..1].to_vec();
                let appended = store.with_all(|keys| {
                    let appended = match kind {
                        0 => keys.append_in(number, row, &parts),
                        1 => {
                            // A batch with keys before and behind.
                            keys.begin_batch();
                            let put = keys.put(0, &key, &[one[0]], PutOptions::default());
                            let appended = put.and_then(|_| keys.append_in(number, row, &parts));
                            keys.end_batch();
                            appended
                        }
                        _ => {
                            let append = Change::Append { value: &one };
                            let condition = Condition::Version(next);
                            let key = (row, &b""[..]).into();
                            let write = Write { namespace: number, key, condition, change: append };
                            keys.apply(&[write]).map(|applied| match applied {
                                Applied::Done(positions) => positions[0],
                                refused => panic!("{refused:?}"),
                            })
                        }
                    };
                    if random.chance(2, 3) {
                        keys.commit().unwrap();
                    }
                    appended
                });
                match appended {
                    Ok(position) => assert_eq!(position, next),
                    Err(KvError::PoolFull { .. }) if kind != 1 => continue,
                    Err(KvError::PoolFull { .. }) => {
                        // The put may be there.
                        let found = store.with_all(|keys| {
                            let entry = keys.lookup(0, &key).unwrap()?;
                            let mut value = Vec::new();
                            keys.read_value(&entry, &mut value).unwrap();
                            Some(value)
                        });
                        found.and_then(|found| model.1.insert(key.to_vec(), found));
                        continue;
                    }
                    Err(error) => panic!("{error}"),
                }
                if kind == 1 {
                    model.1.insert(key.to_vec(), values[0].clone());
                }
                let taken = if kind == 2 { 1 } else { values.len() };
                model.0.entry(at).or_default().1.extend(values.into_iter().take(taken));
                store.with_all(|keys| model.follow_cut(keys, number, row));
            }
            11..=13 => {
                let Some((first, values)) = model.0.get_mut(&at) else { continue };
                let to = *first + random.below(values.len() as u64 + 3);
                let to = to.min(*first + values.len() as u64);
                store.with_all(|keys| {
                    assert_eq!(keys.truncate_stream(number, row, to).unwrap(), to);
                    keys.commit().unwrap();
                });
                values.drain(..(to - *first) as usize);
                *first = to;
                let before = store.with_all(|keys| {
                    keys.read_stream(number, row, to.wrapping_sub(1), |_| panic!("is cut off"))
                });
                assert!(
                    to == 0
                        || matches!(before, Err(KvError::StreamCut { first, .. }) if first == to)
                );
            }
            14 => {
                let there = model.0.remove(&at).is_some();
                store.with_all(|keys| {
                    assert_eq!(keys.delete_stream(number, row).unwrap(), there);
                    keys.commit().unwrap();
                });
            }
            15 if random.chance(1, 4) => {
                store.with_all(|keys| keys.clear_namespace(number).unwrap());
                model.0.retain(|stream, _| stream.0 != number);
            }
            16 => model.compare(&store),
            17 if random.chance(1, 3) => {
                drop(store);
                store = open(&pool, 1 + random.below(3) as usize);
                model.compare(&store);
            }
            18 if random.chance(1, 6) => {
                let directory = tempfile::tempdir().unwrap();
                let path = directory.path().join("snapshot");
                store.with_all(|keys| keys.begin_snapshot()).unwrap().write(&path).unwrap();
                // A store that is nearly full has no room for another's contents beside its own.
                if seed.is_multiple_of(2) || random.chance(1, 2) {
                    let options = StoreOptions { shards: 2, ..StoreOptions::default() };
                    let other = Pool::dram(&PoolOptions::volatile(SEGMENT, 100 << 16)).unwrap();
                    let (restored, _) = beeline_kv::restore(&path, other, options).unwrap();
                    model.compare(&restored.into());
                } else {
                    // Something that the snapshot takes away.
                    let _ = store.with_all(|keys| keys.append_in(TOPICS, b"a", &[b"gone"]));
                    beeline_kv::replace_by_snapshot(&path, store.store(), store.shards()).unwrap();
                    model.compare(&store);
                }
            }
            _ => drop(store.maintain().unwrap()),
        }
    }
    model.compare(&store);
    let copied = store.store().stats().total;
    println!("seed {seed}: {copied:?}");
}

#[test]
fn streams_agree_with_plain_vectors() {
    let seeds = if std::env::var("BEELINE_DEEP").is_ok() { 200 } else { 8 };
    (0..seeds).for_each(|seed| random_work(seed, 500));
}

#[test]
fn an_entry_costs_no_memory_and_a_truncation_of_a_million_one_small_write() {
    const ENTRIES: u64 = 1_000_000;
    let pool = Pool::dram(&PoolOptions::volatile(8 << 20, 160 << 20)).unwrap();
    let store = Embedded::from(Store::open(pool, StoreOptions::default()).unwrap());
    let values: Vec<[u8; 4]> = (0..1000_u32).map(u32::to_le_bytes).collect();
    let values: Vec<&[u8]> = values.iter().map(|value| &value[..]).collect();
    let stats = || store.store().stats();
    store.with_all(|keys| {
        create(keys);
        keys.append_in(TOPICS, b"t", &[b"first"]).unwrap();
        keys.home_mut().tick();
    });
    let before = stats().total;
    for _ in 0..ENTRIES / 1000 {
        store.with_all(|keys| {
            keys.append_in(TOPICS, b"t", &values).unwrap();
            keys.commit().unwrap();
        });
    }
    while store.maintain().unwrap() {}
    let full = stats();
    assert_eq!(full.total.stream_entries_appended, ENTRIES + 1);
    let memory = full.total.index_bytes - before.index_bytes;
    println!("{memory} bytes of memory for {ENTRIES} entries");
    assert!(memory < ENTRIES / 4, "{memory} bytes");
    assert_eq!(full.total.collector_copied_entries, 0);
    store.with_all(|keys| {
        assert_eq!(keys.truncate_stream(TOPICS, b"t", ENTRIES + 1).unwrap(), ENTRIES + 1);
        keys.commit().unwrap();
    });
    let cut = stats().total;
    let written = cut.bytes_stored - full.total.bytes_stored;
    assert_eq!(cut.entries_stored - full.total.entries_stored, 1);
    assert!(written <= 80, "{written} bytes");
    println!("{written} bytes cut off {} bytes", full.total.stream_bytes - cut.stream_bytes);
    while store.maintain().unwrap() {}
    let freed = stats();
    assert_eq!((freed.total.collector_copied_entries, freed.total.stream_bytes), (0, 0));
    // What is left is a head of each chain, and segments that are kept ready.
    assert!(freed.used_bytes <= 6 * (8 << 20), "{freed:?}");
    assert!(full.used_bytes > 7 * (8 << 20), "{full:?}");
}

#[test]
fn what_a_batch_put_beside_an_append_is_collected_once_that_is_cut_off() {
    let store = open(&pool(40), 1);
    store.with_all(|keys| {
        create(keys);
        for turn in 0..40_u8 {
            keys.begin_batch();
            keys.put(0, &[turn], &[&[turn; 3000]], PutOptions::default()).unwrap();
            keys.append_in(LOG, b"", &[&[turn; 3000]]).unwrap();
            keys.end_batch();
            keys.commit().unwrap();
        }
    });
    while store.maintain().unwrap() {}
    let before = store.store().stats();
    assert_eq!(before.total.collector_copied_entries, 0, "a segment with a run stays");
    store.with_all(|keys| {
        keys.truncate_stream(LOG, b"", 40).unwrap();
        keys.commit().unwrap();
        // Something for the collector to look for.
        for turn in 0..20_u8 {
            keys.put(1, b"x", &[&[turn; 20_000]], PutOptions::default()).unwrap();
            keys.commit().unwrap();
        }
    });
    while store.maintain().unwrap() {}
    store.with_all(|keys| {
        for turn in 0..40_u8 {
            let entry = keys.lookup(0, &[turn]).unwrap().unwrap();
            keys.with_value(&entry, |value| assert_eq!(value, [turn; 3000])).unwrap();
        }
    });
    let findings = audit(store.store(), store.shards());
    assert!(findings.is_empty(), "{findings:#?}");
}

#[test]
fn what_is_no_stream_or_no_key_is_refused() {
    let store = open(&pool(20), 2);
    store.with_all(|keys| {
        create(keys);
        let row = (&b"r"[..], &b"s"[..]);
        let kinds = [
            keys.append_in(PLAIN, b"", &[b"x"]).map(drop),
            keys.put_in(LOG, b"k", &[b"x"], PutOptions::default()).map(drop),
            keys.get_in(TOPICS, row).map(drop),
            keys.delete_in(TOPICS, row).map(drop),
            keys.range(TOPICS, &beeline_kv::Range::ALL, |_, _, _| ControlFlow::Continue(())),
            keys.truncate_stream(PLAIN, b"", 1).map(drop),
            keys.streams(PLAIN).map(drop),
            // There is one stream.
            keys.append_in(LOG, b"row", &[b"x"]).map(drop),
        ];
        for (at, kind) in kinds.into_iter().enumerate() {
            assert!(matches!(kind, Err(KvError::NamespaceKind { .. })), "{at}: {kind:?}");
        }
        let taken = [
            NamespaceOptions { ordered: true, ..options_of(LOG) },
            NamespaceOptions { time_to_live_ms: 1, ..options_of(LOG) },
            NamespaceOptions { keep_bytes: 1, ..options_of(PLAIN) },
        ];
        for options in taken {
            let refused = keys.create_namespace(500, options);
            assert!(matches!(refused, Err(KvError::NamespaceTaken { .. })), "{refused:?}");
        }
        let policy = NamespaceLimit { max_bytes: 1, eviction: Eviction::AllKeysLru };
        let refused = keys.limit_namespace(LOG, policy);
        assert!(matches!(refused, Err(KvError::NamespaceKind { .. })), "{refused:?}");
        // A condition that does not hold.
        keys.append_in(LOG, b"", &[b"0"]).unwrap();
        let put = Change::Put { value: &[b"v"], options: PutOptions::default() };
        let none = Condition::None;
        let at = |position| {
            let (change, key) = (Change::Append { value: &[b"1", b"st"] }, b"".into());
            Write { namespace: LOG, key, condition: Condition::Version(position), change }
        };
        let key = Write { namespace: PLAIN, key: b"k".into(), condition: none, change: put };
        let refused = keys.apply(&[key, at(0)]).unwrap();
        assert_eq!(refused, Applied::Refused { write: 1, found: Some(1) });
        assert!(keys.get_in(PLAIN, b"k").unwrap().is_none());
        let Applied::Done(done) = keys.apply(&[key, at(1)]).unwrap() else { panic!("refused") };
        assert_eq!(done[1], 1);
        assert_eq!(read(keys, LOG, b"", 0), [b"0".to_vec(), b"1st".to_vec()]);
        assert!(keys.get_in(PLAIN, b"k").unwrap().is_some());
    });
}

#[test]
fn limits_refuse_appends_and_evict_nothing_and_a_full_pool_can_be_cut_off() {
    let store = open(&pool(16), 2);
    store.with_all(|keys| {
        create(keys);
        let limit = NamespaceLimit { max_bytes: 20_000, ..NamespaceLimit::default() };
        keys.limit_namespace(LOG, limit).unwrap();
        let refused = loop {
            if let Err(error) = keys.append_in(LOG, b"", &[&[1; 900]]) {
                break error;
            }
        };
        assert!(matches!(refused, KvError::NamespaceFull { number: LOG, .. }), "{refused}");
        let ends = keys.stream(LOG, b"").unwrap().unwrap();
        assert_eq!((ends.first, ends.next), (0, 20));
        // The store's limit: keys of databases go, entries of streams do not.
        for key in 0..40_u8 {
            keys.put(0, &[key], &[&[1; 500]], PutOptions::default()).unwrap();
        }
        let used = keys.store().memory_bytes();
        keys.store().set_max_memory_bytes(used + 100);
        keys.store().set_eviction(Eviction::AllKeysRandom);
        let mut appended = 0;
        let refused = loop {
            match keys.append_in(TOPICS, b"t", &[&[1; 400]]) {
                Ok(_) => appended += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(refused, KvError::MemoryLimit { .. }), "{refused}");
        // A shard evicts keys of its own.
        assert!(keys.store().stats().total.evicted > 0 && appended > 0);
        assert_eq!(read(keys, TOPICS, b"t", 0).len(), appended);
        keys.store().set_max_memory_bytes(0);
        let refused = loop {
            if let Err(error) = keys.append_in(TOPICS, b"t", &[&[2; 9000]]) {
                break error;
            }
            keys.commit().unwrap();
        };
        assert!(matches!(refused, KvError::PoolFull { .. }), "{refused}");
        let next = keys.stream(TOPICS, b"t").unwrap().unwrap().next;
        keys.truncate_stream(TOPICS, b"t", next).unwrap();
        keys.commit().unwrap();
    });
    while store.maintain().unwrap() {}
    store.with_all(|keys| {
        for _ in 0..20 {
            keys.append_in(TOPICS, b"t", &[&[3; 9000]]).unwrap();
            keys.commit().unwrap();
        }
    });
    let findings = audit(store.store(), store.shards());
    assert!(findings.is_empty(), "{findings:#?}");
}

#[test]
fn a_full_pool_takes_the_deletion_of_a_key_and_then_the_end_of_a_stream() {
    let store = open(&pool(16), 1);
    store.with_all(|keys| {
        create(keys);
        let mut key = 0_u32;
        // Both heads are full to the last byte, and no room is left to be collected.
        for length in [9000, 1000, 100, 0] {
            let value = vec![1; length];
            let refused = loop {
                if let Err(error) = keys.append_in(LOG, b"", &[&value]) {
                    break error;
                }
                keys.commit().unwrap();
            };
            assert!(matches!(refused, KvError::PoolFull { .. }), "{refused}");
            while keys.put(0, &key.to_be_bytes(), &[&value], PutOptions::default()).is_ok() {
                keys.commit().unwrap();
                key += 1;
            }
        }
        let segments = keys.store().stats().segments;
        // The last one is as small as its deletion.
        assert!(keys.delete(0, &(key - 1).to_be_bytes()).unwrap());
        assert_eq!(keys.store().stats().segments, segments + 1, "the deletion needed a head");
        keys.commit().unwrap();
        let next = keys.stream(LOG, b"").unwrap().unwrap().next;
        assert_eq!(keys.truncate_stream(LOG, b"", next).unwrap(), next);
        assert_eq!(keys.store().stats().segments, segments + 2, "so did the head of the stream");
        keys.commit().unwrap();
    });
    while store.maintain().unwrap() {}
    store.with_all(|keys| keys.append_in(LOG, b"", &[&[2; 9000]]).unwrap());
    let findings = audit(store.store(), store.shards());
    assert!(findings.is_empty(), "{findings:#?}");
}

#[test]
fn an_append_that_an_open_batch_has_no_room_for_changes_nothing() {
    let options =
        StoreOptions { shards: 1, batch_limit_bytes: Some(8 << 10), ..StoreOptions::default() };
    let store = Embedded::from(Store::open(pool(16), options).unwrap());
    store.with_all(|keys| {
        create(keys);
        keys.append_in(LOG, b"", &[b"before"]).unwrap();
        keys.begin_batch();
        keys.put(0, b"k", &[&[1; 4000]], PutOptions::default()).unwrap();
        // The first of them has room, both have not.
        let refused = keys.append_in(LOG, b"", &[&[2; 2500], &[3; 2500]]).unwrap_err();
        assert!(matches!(refused, KvError::BatchTooLarge { .. }), "{refused}");
        let (one, other) = ([[4; 2500].as_slice()], [[5; 2500].as_slice()]);
        let key = Key { row: b"", name: b"" };
        let append = |value| Write {
            namespace: LOG,
            key,
            condition: Condition::None,
            change: Change::Append { value },
        };
        let refused = keys.apply(&[append(&one), append(&other)]).unwrap_err();
        assert!(matches!(refused, KvError::BatchTooLarge { .. }), "{refused}");
        let put = |name, value| Write {
            namespace: PLAIN,
            key: Key { row: b"", name },
            condition: Condition::None,
            change: Change::Put { value, options: PutOptions::default() },
        };
        let refused = keys.apply(&[put(b"a", &one), put(b"b", &other)]).unwrap_err();
        assert!(matches!(refused, KvError::BatchTooLarge { .. }), "{refused}");
        keys.append_in(LOG, b"", &[&[6; 2500]]).unwrap();
        keys.end_batch();
        keys.commit().unwrap();
        assert_eq!(read(keys, LOG, b"", 0), [b"before".to_vec(), vec![6; 2500]]);
        assert!(keys.get_in(PLAIN, b"a").unwrap().is_none());
    });
}

#[test]
fn what_a_batch_reserved_stays_reserved_beside_puts_and_appends_together() {
    let store = open(&pool(16), 1);
    store.with_all(|keys| {
        create(keys);
        keys.append_in(LOG, b"", &[b"before"]).unwrap();
        keys.begin_batch();
        // Ten entries of 48 bytes, a key of one and a value of 100.
        keys.reserve_bytes(10 * 160).unwrap();
        let value = [[1; 500].as_slice()];
        let put = Change::Put { value: &value, options: PutOptions::default() };
        let write = |namespace, name, change| Write {
            namespace,
            key: Key { row: b"", name },
            condition: Condition::None,
            change,
        };
        let writes =
            [write(PLAIN, b"k".as_slice(), put), write(LOG, b"", Change::Append { value: &value })];
        assert!(matches!(keys.apply(&writes).unwrap(), Applied::Done(_)));
        let used = keys.store().memory_bytes();
        keys.store().set_max_memory_bytes(used);
        for key in 0..10_u8 {
            keys.put(0, &[key], &[&[2; 100]], PutOptions::default()).unwrap();
        }
        let refused = keys.put(0, b"one more", &[&[2; 100]], PutOptions::default()).unwrap_err();
        assert!(matches!(refused, KvError::MemoryLimit { .. }), "{refused}");
        keys.end_batch();
        keys.commit().unwrap();
    });
}

#[test]
fn an_opening_knows_when_a_stream_changed_last() {
    let pool = pool(16);
    let store = open(&pool, 1);
    let before = store.with_all(|keys| {
        create(keys);
        for number in 0..300_u32 {
            keys.append_in(LOG, b"", &[&number.to_be_bytes()]).unwrap();
            keys.append_in(TOPICS, b"t", &[&[7; 700]]).unwrap();
        }
        keys.truncate_stream(TOPICS, b"t", 300).unwrap();
        keys.commit().unwrap();
        [keys.stream(LOG, b"").unwrap().unwrap(), keys.stream(TOPICS, b"t").unwrap().unwrap()]
    });
    drop(store);
    open(&pool, 1).with_all(|keys| {
        let log = keys.stream(LOG, b"").unwrap().unwrap();
        let topic = keys.stream(TOPICS, b"t").unwrap().unwrap();
        assert_eq!([log.changed, topic.changed], before.map(|ends| ends.changed));
    });
}

#[test]
fn a_check_says_nothing_of_streams_that_the_next_opening_drops() {
    const REPLACING_WORD: usize = 20;
    let pool = pool(16);
    open(&pool, 1).with_all(|keys| {
        create(keys);
        keys.append_in(LOG, b"", &[b"old"]).unwrap();
        keys.commit().unwrap();
    });
    assert_eq!(beeline_kv::check_pool(&pool).streams.len(), 1);
    pool.store_root_word(REPLACING_WORD, 1);
    assert!(beeline_kv::check_pool(&pool).streams.is_empty());
    open(&pool, 1).with_all(|keys| assert!(keys.stream(LOG, b"").is_err()));
}

#[test]
fn the_change_feed_tells_appends_truncations_and_deletions_by_row() {
    let options = StoreOptions { shards: 2, feed_bytes: 1 << 20, ..StoreOptions::default() };
    let store = Embedded::from(Store::open(pool(20), options).unwrap());
    store.with_all(create);
    let from = store.store().events_from_now().unwrap().next;
    store.with_all(|keys| {
        keys.append_in(TOPICS, b"t", &[b"a", b"bc"]).unwrap();
        keys.append_in(TOPICS, b"t", &[b"def"]).unwrap();
        keys.truncate_stream(TOPICS, b"t", 2).unwrap();
        keys.delete_stream(TOPICS, b"t").unwrap();
        keys.commit().unwrap();
    });
    let events = store.store().events(from, 100).unwrap().events;
    let kinds: Vec<_> = events.iter().map(|event| event.kind).collect();
    let append = |position, value_length| EventKind::Append { position, value_length };
    let cut = EventKind::Truncate { first: 2 };
    assert_eq!(kinds, [append(0, 1), append(1, 2), append(2, 3), cut, EventKind::Delete]);
    assert!(events.iter().all(|event| event.namespace == TOPICS && *event.key == *b"\0\x01t"));
}

#[test]
fn replicas_that_append_the_same_say_the_same() {
    let work = |skew: u64, last: &[u8]| {
        let store = open(&pool(20), 2);
        store.with_all(create);
        let mut shards: Vec<_> = store.shards().iter().map(|shard| shard.lock().unwrap()).collect();
        let shards: Vec<&mut Shard> = shards.iter_mut().map(|shard| &mut **shard).collect();
        let mut keys = Keyspace::many(shards, 0);
        for n in 0..skew {
            // Versions and generations differ.
            keys.put(3, &n.to_be_bytes(), &[b"x"], PutOptions::default()).unwrap();
        }
        keys.watch_effects();
        keys.append_in(TOPICS, b"t", &[b"a", b"b"]).unwrap();
        keys.truncate_stream(TOPICS, b"t", 1).unwrap();
        keys.append_in(LOG, b"", &[last]).unwrap();
        let effects = keys.effects();
        keys.commit().unwrap();
        effects
    };
    assert_eq!(work(0, b"z"), work(5, b"z"));
    assert_ne!(work(0, b"z"), work(0, b"y"));
}

#[test]
fn readers_on_other_threads_see_a_beginning_of_the_stream() {
    let store = Arc::new(open(&pool(60), 2));
    store.with_all(create);
    let rows: [&[u8]; 3] = [b"one", b"two", b"three"];
    let (done, seen) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for row in rows {
            let (store, done, seen) = (&store, &done, &seen);
            scope.spawn(move || {
                let shard = store.store().shard_in(TOPICS, (row, &b""[..])).unwrap();
                let mut from = 0;
                loop {
                    let last = done.load(Ordering::Acquire);
                    store
                        .with_shard(shard, |keys| {
                            keys.read_stream(TOPICS, row, from, |entry| {
                                assert_eq!(entry.position, from);
                                assert!(entry.value.iter().all(|byte| *byte == from as u8));
                                from += 1;
                                ControlFlow::Continue(())
                            })
                            .unwrap();
                        })
                        .unwrap();
                    if last {
                        break;
                    }
                    std::thread::yield_now();
                }
                seen.fetch_add(from, Ordering::Relaxed);
            });
        }
        for position in 0..300_u64 {
            for row in rows {
                let value = vec![position as u8; 40 + position as usize];
                // Among them some from the other shard's log.
                store.with_all(|keys| {
                    keys.begin_batch();
                    if position % 3 == 0 {
                        keys.put(0, b"beside", &[&value], PutOptions::default()).unwrap();
                    }
                    keys.append_in(TOPICS, row, &[&value]).unwrap();
                    keys.end_batch();
                    keys.commit().unwrap();
                });
            }
        }
        done.store(true, Ordering::Release);
    });
    assert_eq!(seen.into_inner(), 900);
}

#[test]
fn a_store_without_streams_stays_readable_for_builds_without_them() {
    const FORMAT_WORD: usize = 18;
    let pool = pool(20);
    let store = open(&pool, 1);
    store.with_all(|keys| keys.create_namespace(PLAIN, options_of(PLAIN)).unwrap());
    assert_eq!(pool.root_word(FORMAT_WORD), 3);
    store.with_all(|keys| keys.create_namespace(LOG, options_of(LOG)).unwrap());
    assert_eq!(pool.root_word(FORMAT_WORD), 4);
    drop(store);
    open(&pool, 1);
    assert_eq!(pool.root_word(FORMAT_WORD), 4);
}

#[test]
fn a_damaged_entry_is_named_and_after_a_repair_the_others_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let pool = PoolOptions {
        durability: beeline_pmem::Durability::Process,
        segment_bytes: SEGMENT,
        capacity_bytes: 16 * u64::from(SEGMENT),
        ..PoolOptions::default()
    };
    let opening = || Embedded::open(directory.path(), &pool, StoreOptions::default());
    opening().unwrap().with_all(|keys| {
        create(keys);
        for position in 0..12_u8 {
            // Others between them.
            keys.append_in(TOPICS, b"t", &[&[position; 100]]).unwrap();
            keys.append_in(TOPICS, b"u", &[&[position; 30]]).unwrap();
        }
        keys.truncate_stream(TOPICS, b"u", 3).unwrap();
        keys.commit().unwrap();
    });
    let seen = beeline_kv::check(directory.path()).unwrap();
    assert!(!seen.is_damaged(), "{seen:?}");
    let ends: Vec<_> =
        seen.streams.iter().map(|seen| (seen.row.clone(), seen.first, seen.next)).collect();
    assert_eq!(ends, [(b"t".to_vec(), 0, 12), (b"u".to_vec(), 3, 12)]);
    let mut files = std::fs::read_dir(directory.path().join("segments")).unwrap();
    let damaged = files.any(|file| {
        let path = file.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        let Some(at) = bytes.windows(100).position(|window| window == [5; 100]) else {
            return false;
        };
        bytes[at] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        true
    });
    assert!(damaged, "the entry is found");
    let seen = beeline_kv::check(directory.path()).unwrap();
    assert!(seen.is_damaged());
    let missing: Vec<_> = seen.streams.iter().map(|seen| seen.missing).collect();
    assert_eq!(missing, [1, 0]);
    assert!(matches!(opening(), Err(KvError::DamagedData { .. })));
    beeline_kv::repair(directory.path()).unwrap();
    let store = opening().unwrap();
    store.with_all(|keys| {
        for row in [b"t", b"u"] {
            let first = keys.stream(TOPICS, row).unwrap().unwrap().first;
            let mut positions = Vec::new();
            keys.read_stream(TOPICS, row, first, |entry| {
                assert_eq!(entry.value[0], entry.position as u8);
                positions.push(entry.position);
                ControlFlow::Continue(())
            })
            .unwrap();
            let all = (first..12).filter(|position| row == b"u" || *position != 5);
            assert_eq!(positions, all.collect::<Vec<_>>());
        }
        assert_eq!(keys.append_in(TOPICS, b"t", &[&[12]]).unwrap(), 12);
        keys.commit().unwrap();
    });
    drop(store);
    assert!(!beeline_kv::check(directory.path()).unwrap().is_damaged());
}
