//! Opening a store that holds many pairs.

use std::sync::PoisonError;
use std::time::Instant;

use anyhow::ensure;
use beeline_kv::{PutOptions, Store, StoreOptions};
use beeline_pmem::{Pool, PoolOptions};

use super::Bench;
use super::load::key;
use crate::bench::report::{Better, Row};
use crate::bench::turns::{online, unpin};

/// Key and value together, bytes.
const PAIR_BYTES: usize = 100;
/// Puts committed together while the store is filled.
const BATCH: u64 = 1024;

/// Fills a store with 100-byte pairs, closes it, and times opening it again.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn rows(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    // Recovery reads with a thread per shard, on every processor.
    unpin()?;
    let pairs = bench.recover;
    let entry = 48 + PAIR_BYTES as u64 + 16;
    let capacity = (pairs * entry * 5 / 4).next_multiple_of(64 << 20) + (1 << 30);
    let pool = Pool::dram(&PoolOptions::volatile(64 << 20, capacity))?;
    let options = StoreOptions { shards: online().clamp(1, 256), ..StoreOptions::default() };
    let progress = bench.output.progress(pairs, "storing pairs");
    let start = Instant::now();
    {
        let (store, shards, _) = Store::open(pool.clone(), options.clone())?;
        let value = [7; PAIR_BYTES - super::load::KEY_BYTES];
        let lock = |index: usize| shards[index].lock().unwrap_or_else(PoisonError::into_inner);
        for number in 0..pairs {
            let key = key(number);
            lock(store.shard_of(0, &key)).put(0, &key, &[&value], PutOptions::default())?;
            if number % BATCH == BATCH - 1 {
                (0..shards.len()).try_for_each(|index| lock(index).commit())?;
                progress.inc(BATCH);
            }
        }
        (0..shards.len()).try_for_each(|index| lock(index).commit())?;
    }
    let filled = start.elapsed().as_secs_f64();
    progress.finish_and_clear();
    let (mut seconds, mut report) = (Vec::new(), None);
    for _ in 0..bench.options.turns().min(3) {
        let start = Instant::now();
        let (_, _, found) = Store::open(pool.clone(), options.clone())?;
        seconds.push(start.elapsed().as_secs_f64());
        ensure!(found.keys == pairs, "{} of {pairs} keys were recovered", found.keys);
        ensure!(found.damaged == 0, "{} entries are damaged", found.damaged);
        report = Some(found);
    }
    let Some(found) = report else { return Ok(Vec::new()) };
    let rate: Vec<f64> = seconds.iter().map(|seconds| pairs as f64 / seconds).collect();
    let case = format!("recovery of {pairs} pairs of {PAIR_BYTES} B");
    Ok(vec![
        Row::new(case.clone(), "kv", "s", Better::Lower, &seconds)
            .beside("index bytes per key", format!("{:.1}", found.index_bytes_per_key))
            .beside("bytes read", crate::config::values::human_bytes(found.bytes))
            .beside("threads", options.shards)
            .beside("pool", "dram, pages in memory"),
        Row::new(format!("{case}, rate"), "kv", "keys/s", Better::Higher, &rate),
        Row::new(
            format!("storing {pairs} pairs, in batches of {BATCH}"),
            "kv",
            "keys/s",
            Better::Higher,
            &[pairs as f64 / filled],
        ),
    ])
}
