//! What persisting costs on this machine: cache-line write-back, non-temporal copies, file
//! synchronisation, and allocation with and without prepared segments.
//!
//! `cargo run --release -p beeline-pmem --example persistence_cost [DIRECTORY]`; with `--quick`
//! every figure rests on a few rounds only.

#![allow(clippy::print_stdout)]

use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;

use beeline_os::MemoryObject;
use beeline_os::write_back::WriteBack;
use beeline_pmem::{Durability, PmemError, Pool, PoolKind, PoolOptions, Segment};

const SEGMENT: u32 = 8 << 20;

/// Median and 99th percentile in nanoseconds over `rounds` samples of `batch` calls each.
fn measure(rounds: usize, batch: usize, mut call: impl FnMut(usize)) -> (f64, f64) {
    let mut samples: Vec<f64> = (0..rounds)
        .map(|round| {
            let start = Instant::now();
            for index in 0..batch {
                call(round * batch + index);
            }
            start.elapsed().as_nanos() as f64 / batch as f64
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    (samples[rounds / 2], samples[(rounds * 99 / 100).min(rounds - 1)])
}

fn line(what: &str, (median, high): (f64, f64)) {
    println!("| {what} | {median:.0} | {high:.0} |");
}

fn offset(index: usize, length: usize) -> usize {
    let slots = SEGMENT as usize / length;
    (index % slots) * length
}

fn cache_lines(scale: usize) -> Result<(), PmemError> {
    let options = PoolOptions {
        durability: Durability::Power,
        emulate_durability: true,
        ..PoolOptions::volatile(SEGMENT, u64::from(SEGMENT))
    };
    let pool = Pool::dram(&options)?;
    let segment = pool.allocate()?;
    segment.store(0, &vec![1; SEGMENT as usize]);
    let mut persister = pool.persister();
    for length in [64, 256, 1024, 4096, 65_536] {
        let bytes = vec![7; length];
        let batch = (65_536 / length).clamp(16, 256);
        let plain = measure(scale, batch, |index| {
            segment.store(offset(index, length), black_box(&bytes));
        });
        line(&format!("store {length} B, no flush"), plain);
        let flushed = measure(scale, batch, |index| {
            let at = offset(index, length);
            segment.store(at, black_box(&bytes));
            persister.flush(&segment, at, length);
            let _ = persister.fence();
        });
        line(&format!("store {length} B + {} + fence", WriteBack::detect()), flushed);
        let streamed = measure(scale, batch, |index| {
            persister.store_nontemporal(&segment, offset(index, length), black_box(&bytes));
            let _ = persister.fence();
        });
        line(&format!("non-temporal {length} B + fence"), streamed);
    }
    for instruction in WriteBack::available() {
        let cost = measure(scale, 128, |index| {
            let at = offset(index, 64);
            segment.store(at, black_box(&[9; 64]));
            write_back(&segment, instruction, at);
            beeline_os::write_back::store_fence();
        });
        line(&format!("store 64 B + {instruction} + fence, bare"), cost);
    }
    Ok(())
}

fn write_back(segment: &Segment, instruction: WriteBack, at: usize) {
    let start = segment.base().as_ptr().wrapping_add(at);
    // SAFETY: `at` names a whole line of the segment, which is mapped; the instruction is one the
    // processor reported.
    unsafe { beeline_os::write_back::write_back(instruction, start, 64) };
}

fn files(directory: &std::path::Path, rounds: usize) -> Result<(), PmemError> {
    for (durability, prepared_segments) in
        [(Durability::Process, 0), (Durability::Power, 0), (Durability::Power, 2)]
    {
        let home = directory.join(format!("{durability}-{prepared_segments}"));
        let options = PoolOptions {
            kind: Some(PoolKind::File),
            durability,
            emulate_durability: true,
            segment_bytes: SEGMENT,
            capacity_bytes: 16 * u64::from(SEGMENT),
            prepared_segments,
            ..PoolOptions::default()
        };
        let pool = Pool::create(&home, &options)?;
        let wait = || {
            while pool.prepared_segments() < prepared_segments as usize {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        };
        let name = format!("file, {durability}, {prepared_segments} prepared");
        let mut taken = Vec::new();
        let mut costs: Vec<f64> = Vec::new();
        for _ in 0..8 {
            wait();
            let start = Instant::now();
            taken.push(pool.allocate()?);
            costs.push(start.elapsed().as_nanos() as f64);
        }
        costs.sort_by(f64::total_cmp);
        line(&format!("{name}: allocate 8 MiB"), (costs[4], costs[7]));
        let mut persister = pool.persister();
        let segment = &taken[0];
        let cost = measure(rounds, 1, |index| {
            let at = offset(index, 64);
            segment.store(at, &[7; 64]);
            persister.flush(segment, at, 64);
            let _ = persister.fence();
        });
        line(&format!("{name}: store 64 B + persist"), cost);
        let cost = measure(rounds, 1, |index| {
            for segment in &taken[..4] {
                let at = offset(index * 16, 1024);
                segment.store(at, &[7; 1024]);
                persister.flush(segment, at, 1024);
            }
            let _ = persister.fence();
        });
        line(&format!("{name}: 4 segments x 1 KiB, one fence"), cost);
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = arguments.iter().any(|argument| argument == "--quick");
    arguments.retain(|argument| argument != "--quick");
    let temporary = tempfile::tempdir()?;
    let directory = arguments.pop().map_or_else(|| temporary.path().to_path_buf(), PathBuf::from);
    println!("| what | median ns | p99 ns |");
    println!("|---|---|---|");
    cache_lines(if quick { 5 } else { 1001 })?;
    files(&directory, if quick { 3 } else { 301 })?;
    Ok(())
}
