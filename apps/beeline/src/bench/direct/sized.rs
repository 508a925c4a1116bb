//! Rates by the size of pairs, latencies by the load, and merges by the number of threads.

use std::cell::RefCell;
use std::time::Instant;

use beeline_env::Randomness;
use beeline_kv_direct::TableOptions;
use beeline_kv_direct::slab::{Class, Entry, merge};
use beeline_kv_direct_model::index::{Sizes, tune};

use super::rig::{Rig, Stream, fill_sized, offered, rate, rate_sized};
use super::{Bench, HEADLINE_BATCH, MIXES, WINDOW, mix_name};
use crate::bench::report::{Better, Row, Spread, number};
use crate::bench::turns::Contender;

/// Bytes of pairs: in the bucket up to 50, in blocks of a power of two from 62 on.
const SIZES: [usize; 10] = [5, 10, 15, 20, 25, 40, 50, 62, 126, 254];
/// Memory of a processor whose pairs have one size.
const MEMORY_BYTES: u64 = 64 << 20;
/// Shares of memory that pairs take: the first that fits.
const FULL: [f64; 4] = [0.5, 0.45, 0.4, 0.3];
/// Offered loads, as shares of the highest rate.
const LOADS: [f64; 4] = [0.1, 0.3, 0.6, 0.9];

/// Operations a second for each size, mixture and distribution.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub(super) fn sizes(bench: &Bench<'_>) -> anyhow::Result<()> {
    let options = &bench.arguments.options;
    let chosen = options.size(&SIZES[..], &SIZES[..2]);
    let memory_bytes = options.size(MEMORY_BYTES, 16 << 20);
    for &bytes in chosen {
        let mut filled = None;
        for full in FULL {
            let Some(choice) = tune(8 << 20, Sizes::one(bytes), full)? else { continue };
            let table = TableOptions {
                index_permille: choice.index_permille,
                inline_threshold: choice.inline_threshold,
                ..TableOptions::default()
            };
            let rig = Rig::with(memory_bytes, table)?;
            let pairs = (memory_bytes as f64 * full / bytes as f64) as u64;
            if fill_sized(&rig, pairs, bytes)? {
                filled = Some((rig, pairs, full));
                break;
            }
        }
        let Some((rig, pairs, full)) = filled else {
            bench.output.note(format!("pairs of {bytes} B do not fit"));
            continue;
        };
        crate::bench::turns::pin(1)?;
        let link = RefCell::new(rig.link()?);
        for mix in MIXES {
            let stream = RefCell::new(Stream::new(pairs, mix.0, mix.1));
            let operations = bench.operations(2_000_000);
            let turn = || {
                let (mut link, mut stream) = (link.borrow_mut(), stream.borrow_mut());
                rate_sized(&mut link, &mut stream, operations, HEADLINE_BATCH, bytes)
            };
            let figures = bench.turns(&mut [Contender::new("direct", turn)])?;
            let case = format!("{bytes} B {} B{HEADLINE_BATCH}", mix_name(mix));
            let row = Row::new(case, "direct", "op/s", Better::Higher, &figures[0]);
            bench.show(row.beside("memory", format!("{:.0}% full", full * 100.0)))?;
        }
    }
    Ok(())
}

/// Percentiles of packets sent at a fixed rate, queueing included.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub(super) fn loads(bench: &Bench<'_>, rig: &Rig) -> anyhow::Result<()> {
    let link = RefCell::new(rig.link()?);
    for mix in [MIXES[0], MIXES[3]] {
        for batch in [1, HEADLINE_BATCH] {
            let stream = RefCell::new(bench.stream(mix));
            let operations = bench.operations(100_000 * u64::from(batch).min(10));
            let highest =
                rate(&mut link.borrow_mut(), &mut stream.borrow_mut(), operations, batch, WINDOW)?;
            for load in LOADS {
                let tails = RefCell::new(Vec::new());
                let turn = || {
                    let (mut link, mut stream) = (link.borrow_mut(), stream.borrow_mut());
                    let operations = (operations as f64 * load.max(0.3)) as u64;
                    let recorder =
                        offered(&mut link, &mut stream, operations, batch, highest * load)?;
                    let of = |share| recorder.quantile_ns(share) as f64 / 1e3;
                    tails.borrow_mut().push([of(0.05), of(0.95), of(0.99), of(0.999)]);
                    Ok(of(0.5))
                };
                let figures = bench.turns(&mut [Contender::new("direct", turn)])?;
                let case = format!(
                    "p50 {} B{batch}, {:.0}% of {} op/s offered",
                    mix_name(mix),
                    load * 100.0,
                    number(highest)
                );
                let mut row = Row::new(case, "direct", "us", Better::Lower, &figures[0]);
                for (at, name) in ["p5", "p95", "p99", "p99.9"].into_iter().enumerate() {
                    let tails: Vec<f64> = tails.borrow().iter().map(|tail| tail[at]).collect();
                    row = row.beside(name, format!("{} us", number(Spread::of(&tails).median)));
                }
                bench.show(row)?;
            }
        }
    }
    Ok(())
}

/// Joining free blocks of 32 bytes, of which three quarters have their buddy.
pub(super) fn merge(bench: &Bench<'_>) -> anyhow::Result<()> {
    crate::bench::turns::unpin()?;
    let slots = bench.arguments.options.amount(None, 100_000_000, 10_000_000_u32);
    let slots = bench.arguments.options.size(slots, 20_000);
    let mut random = Randomness::new(1);
    let mut free: Vec<Entry> = (0..slots)
        .filter(|_| random.chance(7, 8))
        .map(|unit| Entry { unit, class: Class::new(0) })
        .collect();
    // Blocks come free in no order.
    for at in (1..free.len()).rev() {
        free.swap(at, random.below(at as u64 + 1) as usize);
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut single = Vec::new();
    for threads in [1, 2, 4, 8, 16, 32].into_iter().filter(|threads| *threads <= cores.max(2)) {
        let joined = RefCell::new(0);
        let turn = || {
            let began = Instant::now();
            *joined.borrow_mut() = merge::by_sorting(&free, threads).len();
            Ok(began.elapsed().as_secs_f64())
        };
        let figures = bench.turns(&mut [Contender::new("merge", turn)])?;
        let case = format!("merge of {} free blocks, {threads} threads", free.len());
        let row = Row::new(case, "sorting", "s", Better::Lower, &figures[0]);
        if threads == 1 {
            single.clone_from(&figures[0]);
            let began = Instant::now();
            let by_bitmap = merge::by_bitmap(&free, slots).len();
            anyhow::ensure!(by_bitmap == *joined.borrow(), "both ways join the same blocks");
            let bitmap = began.elapsed().as_secs_f64();
            bench.show(row.beside("by bitmap", format!("{} s", number(bitmap))))?;
        } else {
            bench.show(row.against("1 thread", &figures[0], &single))?;
        }
    }
    Ok(())
}
