//! The table against a map, and its accesses counted.

use std::collections::HashMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::memory::{HostMemory, Traced};
use crate::slab::SlabPools;

fn table(bytes: u64, options: TableOptions) -> Table<Traced<HostMemory>> {
    let (first, end) = layout(bytes, options.index_permille);
    let slabs = SlabCache::new(Arc::new(SlabPools::new(first, end)), false);
    Table::new(Traced::counting(HostMemory::new(bytes).unwrap()), slabs, options)
}

fn get(table: &mut Table<Traced<HostMemory>>, key: &[u8]) -> Option<Vec<u8>> {
    table.get(table.place(key), key, <[u8]>::to_vec)
}

fn put(table: &mut Table<Traced<HostMemory>>, key: &[u8], value: &[u8]) -> bool {
    table.put(table.place(key), key, value).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_table_behaves_as_a_map(
        buckets in 1_u32..8,
        threshold in 0_usize..=50,
        steps in proptest::collection::vec((0_u8..4, 0_u8..40, 0_usize..700), 1..400),
    ) {
        let options = TableOptions { inline_threshold: threshold, ..TableOptions::default() };
        let mut table = table(8 << 20, options).with_buckets(buckets);
        let mut model: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
        for (step, name, length) in steps {
            let key = vec![name; usize::from(name) * 5 + 1];
            let value = vec![name ^ length as u8; if step == 0 { length % 12 } else { length }];
            let place = table.place(&key);
            match step {
                0 | 1 => {
                    let existed = put(&mut table, &key, &value);
                    prop_assert_eq!(existed, model.insert(key, value).is_some());
                }
                2 => prop_assert_eq!(table.delete(place, &key), model.remove(&key).is_some()),
                _ => {
                    let changed = table.modify(place, &key, |value| {
                        value.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
                        ((), true)
                    });
                    let known = model.get_mut(&key).map(|value| {
                        value.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
                    });
                    prop_assert_eq!(changed, known);
                }
            }
        }
        for (key, value) in &model {
            let held = get(&mut table, key);
            prop_assert_eq!(held.as_ref(), Some(value));
        }
        let mut met = HashMap::new();
        let mut from = Some(0);
        while let Some(bucket) = from {
            from = table.scan(bucket, 3, |key, value| {
                met.insert(key.to_vec(), value.to_vec());
            });
        }
        prop_assert_eq!(&met, &model);
        let counters = table.counters();
        prop_assert_eq!(counters.pairs, model.len() as u64);
        let bytes: usize = model.iter().map(|(key, value)| key.len() + value.len()).sum();
        prop_assert_eq!(counters.pair_bytes, bytes as u64);
        for key in model.keys() {
            prop_assert!(table.delete(table.place(key), key));
        }
        prop_assert_eq!(table.slabs().counters().allocated_bytes, 0, "nothing leaks");
        prop_assert_eq!(table.counters().chained_buckets, 0);
    }
}

#[test]
fn one_bucket_holds_a_thousand_keys_by_chaining_and_leaks_nothing() {
    let mut table = table(4 << 20, TableOptions::default()).with_buckets(1);
    for i in 0..1000_u32 {
        assert!(!put(&mut table, &i.to_le_bytes(), &[i as u8; 40]));
    }
    assert!(table.counters().chained_buckets >= 99);
    for i in 0..1000_u32 {
        assert_eq!(get(&mut table, &i.to_le_bytes()).unwrap(), [i as u8; 40]);
    }
    for i in 0..1000_u32 {
        assert!(table.delete(table.place(&i.to_le_bytes()), &i.to_le_bytes()));
    }
    assert_eq!(table.counters().chained_buckets, 0);
    assert_eq!(table.slabs().counters().allocated_bytes, 0);
}

#[test]
fn growing_and_shrinking_one_key_gives_every_block_back() {
    let mut table = table(8 << 20, TableOptions::default());
    for length in (0..1900).chain((0..1900).rev()) {
        put(&mut table, b"key", &vec![7; length]);
        assert_eq!(get(&mut table, b"key").unwrap().len(), length);
    }
    put(&mut table, b"key", b"");
    assert_eq!(table.slabs().counters().allocated_bytes, 0);
}

#[test]
fn full_memory_refuses_new_pairs_and_keeps_the_old_ones() {
    let mut table = table(4 << 20, TableOptions::default());
    let mut stored = Vec::new();
    for i in 0_u32.. {
        let key = i.to_le_bytes();
        match table.put(table.place(&key), &key, &[i as u8; 300]) {
            Ok(_) => stored.push(i),
            Err(error) => {
                assert_eq!(error, TableError::OutOfMemory);
                break;
            }
        }
    }
    assert!(stored.len() > 100);
    // A value that outgrows its block is refused, and the old one stays.
    let key = stored[0].to_le_bytes();
    let refused = table.put(table.place(&key), &key, &[1; 1000]);
    assert_eq!(refused, Err(TableError::OutOfMemory));
    for i in stored {
        assert_eq!(get(&mut table, &i.to_le_bytes()).unwrap(), [i as u8; 300]);
    }
}

#[test]
fn limits_are_refused_by_name() {
    let mut table = table(1 << 20, TableOptions::default());
    let place = table.place(b"");
    assert_eq!(table.put(place, b"", b"v"), Err(TableError::Key { length: 0 }));
    let long = [1; 256];
    assert_eq!(table.put(place, &long, b"v"), Err(TableError::Key { length: 256 }));
    let length = PAIR_LIMIT + 1;
    let refused = table.put(place, b"k", &vec![0; PAIR_LIMIT]);
    assert_eq!(refused, Err(TableError::TooLong { length, limit: PAIR_LIMIT }));
    let key = [9; 255];
    let place = table.place(&key);
    table.put(place, &key, &vec![0; PAIR_LIMIT - 255]).unwrap();
}

#[test]
fn the_secondary_hash_filters_all_but_one_block_in_512() {
    let options = TableOptions { inline_threshold: 0, ..TableOptions::default() };
    let mut table = table(64 << 20, options).with_buckets(2000);
    for i in 0..40_000_u64 {
        put(&mut table, &i.to_le_bytes(), &[0; 40]);
    }
    let before = table.counters().false_reads;
    let mut slots_passed = 0;
    for i in 1_000_000..1_040_000_u64 {
        assert_eq!(get(&mut table, &i.to_le_bytes()), None);
        slots_passed += 20;
    }
    let reads = table.counters().false_reads - before;
    let expected = slots_passed / 512;
    assert!(
        (expected * 7 / 10..expected * 13 / 10).contains(&reads),
        "{reads} blocks read in vain where {expected} are expected"
    );
}

#[test]
fn an_inline_get_costs_about_one_access_and_a_put_about_two_at_half_utilisation() {
    // The source's model of this layout: 1.10 accesses for pairs of 10 bytes.
    let options =
        TableOptions { index_permille: 800, inline_threshold: 10, ..TableOptions::default() };
    let bytes = 32_u64 << 20;
    let mut table = table(bytes, options);
    let pairs = bytes / 2 / 10;
    for i in 0..pairs {
        put(&mut table, &(i as u32).to_le_bytes(), &[1; 6]);
    }
    assert!((0.49..0.51).contains(&table.utilisation()));
    let (reads, writes) = (table.memory().reads, table.memory().writes);
    for i in 0..pairs {
        assert!(get(&mut table, &(i as u32).to_le_bytes()).is_some());
    }
    let per_get = (table.memory().reads - reads) as f64 / pairs as f64;
    assert_eq!(table.memory().writes, writes);
    assert!((0.99..1.21).contains(&per_get), "{per_get} accesses a GET");
    let before = table.memory().reads + table.memory().writes;
    for i in 0..pairs {
        assert!(put(&mut table, &(i as u32).to_le_bytes(), &[2; 6]));
    }
    let per_put = (table.memory().reads + table.memory().writes - before) as f64 / pairs as f64;
    assert!((1.99..2.21).contains(&per_put), "{per_put} accesses a PUT");
}

type Step<'a> = &'a mut dyn FnMut(&mut Table<Traced<HostMemory>>, Place);

#[test]
fn what_was_looked_into_ahead_is_the_same_pair_at_the_same_cost() {
    for (inline_threshold, expected) in [(25, [1, 2, 2, 2]), (0, [2, 3, 3, 3])] {
        let options = TableOptions { inline_threshold, ..TableOptions::default() };
        let mut table = table(8 << 20, options).with_buckets(2);
        // Others in the same buckets, before it and behind it.
        for key in [b"other 1", b"other 2"] {
            put(&mut table, key, b"value");
        }
        for ahead in [false, true] {
            put(&mut table, b"the key!", b"12345678");
            let mut costs = Vec::new();
            let mut count = |table: &mut Table<Traced<HostMemory>>, what: Step<'_>| {
                let place = table.place(b"the key!");
                let place = if ahead { table.look_ahead(place, b"the key!") } else { place };
                let before = table.memory().reads + table.memory().writes;
                what(&mut *table, place);
                costs.push(table.memory().reads + table.memory().writes - before);
            };
            count(&mut table, &mut |table, place| {
                assert_eq!(table.get(place, b"the key!", <[u8]>::to_vec).unwrap(), b"12345678");
            });
            count(&mut table, &mut |table, place| {
                assert_eq!(table.put(place, b"the key!", b"abcdefgh"), Ok(true));
            });
            count(&mut table, &mut |table, place| {
                let before = table.modify(place, b"the key!", |value| {
                    let before = value.to_vec();
                    value[0] = b'A';
                    (before, true)
                });
                assert_eq!(before.unwrap(), b"abcdefgh");
            });
            // Of another length, in as many slots.
            count(&mut table, &mut |table, place| {
                assert_eq!(table.put(place, b"the key!", b"Abcdefghi"), Ok(true));
            });
            assert_eq!(costs, expected, "ahead: {ahead}");
            assert_eq!(get(&mut table, b"the key!").unwrap(), b"Abcdefghi");
            assert_eq!(get(&mut table, b"other 1").unwrap(), b"value");
            assert_eq!(get(&mut table, b"other 2").unwrap(), b"value");
        }
    }
}

#[test]
fn a_pair_in_a_block_costs_one_access_more() {
    let options = TableOptions { index_permille: 500, ..TableOptions::default() };
    let mut table = table(8 << 20, options);
    let pairs = 20_000_u32;
    for i in 0..pairs {
        put(&mut table, &i.to_le_bytes(), &[1; 58]);
    }
    let before = table.memory().reads;
    for i in 0..pairs {
        get(&mut table, &i.to_le_bytes());
    }
    let per_get = f64::from((table.memory().reads - before) as u32) / f64::from(pairs);
    assert!((1.99..2.2).contains(&per_get), "{per_get}");
    let before = table.memory().reads + table.memory().writes;
    for i in 0..pairs {
        put(&mut table, &i.to_le_bytes(), &[2; 58]);
    }
    let after = table.memory().reads + table.memory().writes;
    let per_put = f64::from((after - before) as u32) / f64::from(pairs);
    assert!((2.99..3.2).contains(&per_put), "{per_put}");
}
