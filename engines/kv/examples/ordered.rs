//! How long an opening takes that puts a namespace in order, beside one without an order.
//! `cargo run --release -p beeline-kv --example ordered [KEYS [TURNS]]`.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // an example ends where something is wrong

use std::time::Instant;

use beeline_kv::{Embedded, NamespaceOptions, PutOptions, Store, StoreOptions};
use beeline_pmem::{Pool, PoolOptions};

const NUMBER: u32 = 256;
const VALUE_BYTES: usize = 16;
/// Puts under one lock.
const TOGETHER: u64 = 1024;

fn filled(keys: u64, ordered: bool) -> Pool {
    let capacity = (keys * 96 * 5 / 4).next_multiple_of(64 << 20) + (1 << 30);
    let pool = Pool::dram(&PoolOptions::volatile(64 << 20, capacity)).unwrap();
    let store = open(&pool);
    store.with_all(|all| {
        let options = NamespaceOptions { ordered, ..NamespaceOptions::default() };
        all.create_namespace(NUMBER, options).unwrap();
    });
    for first in (0..keys).step_by(TOGETHER as usize) {
        store.with_all(|all| {
            for number in first..keys.min(first + TOGETHER) {
                // Different numbers, and in no order.
                let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                let key = [mixed.to_be_bytes(), number.to_be_bytes()].concat();
                let value = [7; VALUE_BYTES];
                all.put_in(NUMBER, &key, &[&value], PutOptions::default()).unwrap();
            }
            all.commit().unwrap();
        });
    }
    pool
}

fn open(pool: &Pool) -> Embedded {
    let options = StoreOptions { shards: 2, ..StoreOptions::default() };
    Store::open(pool.clone(), options).unwrap().into()
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, otherwise: u64| {
        words.get(at).map_or(otherwise, |word| word.replace('_', "").parse().unwrap())
    };
    let (keys, turns) = (number(0, 10_000_000), number(1, 3));
    for ordered in [false, true] {
        let pool = filled(keys, ordered);
        let mut seconds: Vec<f64> = (0..turns)
            .map(|_| {
                let begun = Instant::now();
                let store = open(&pool);
                let took = begun.elapsed().as_secs_f64();
                assert!(store.report().keys > keys, "the catalog's entry is one more");
                took
            })
            .collect();
        seconds.sort_by(f64::total_cmp);
        let name = if ordered { "in order" } else { "without an order" };
        println!("{keys} keys of 16 B {name}: opened in {seconds:.2?} s");
    }
}
