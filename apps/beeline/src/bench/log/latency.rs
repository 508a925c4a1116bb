//! Commits through the whole log: proposal, own copy, followers' memories, application, reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_replicated_log::{Handle, NO_SESSION};

use super::Bench;
use super::rig::Rig;
use crate::bench::report::{Better, Row, shown};

/// One command after another: microseconds at p50 and p99.
pub fn commits_us(rig: &mut Rig, bytes: usize, count: u32) -> anyhow::Result<(f64, f64)> {
    rig.lead()?;
    let done = Arc::new(AtomicU64::new(0));
    let mut latencies = Vec::with_capacity(count as usize);
    for number in 0..u64::from(count) {
        let told = Arc::clone(&done);
        let command = vec![7; bytes];
        let start = Instant::now();
        rig.handle.propose(NO_SESSION, 0, command, move |reply| {
            told.fetch_add(u64::from(reply.is_ok()), Ordering::Relaxed);
        });
        while done.load(Ordering::Relaxed) <= number {
            rig.turn()?;
            anyhow::ensure!(start.elapsed() < Duration::from_secs(10), "a commit takes too long");
        }
        latencies.push(start.elapsed().as_nanos() as f64 / 1e3);
    }
    latencies.sort_by(f64::total_cmp);
    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
    Ok((at(0.5), at(0.99)))
}

/// Proposes again and again, `outstanding` at a time.
fn refill(handle: &Handle, done: &Arc<AtomicU64>, bytes: usize) {
    let (told, again) = (Arc::clone(done), handle.clone());
    handle.propose(NO_SESSION, 0, vec![7; bytes], move |reply| {
        if reply.is_ok() {
            told.fetch_add(1, Ordering::Relaxed);
            refill(&again, &told, bytes);
        }
    });
}

/// Commits per second with `outstanding` clients that each wait for their answer.
pub fn commits_per_second(
    rig: &mut Rig,
    bytes: usize,
    outstanding: u32,
    time: Duration,
) -> anyhow::Result<f64> {
    rig.lead()?;
    let done = Arc::new(AtomicU64::new(0));
    for _ in 0..outstanding {
        refill(&rig.handle, &done, bytes);
    }
    let start = Instant::now();
    while start.elapsed() < time {
        for _ in 0..64 {
            rig.turn()?;
        }
    }
    Ok(done.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64())
}

/// Latency by size and members.
pub fn by_size(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let count = bench.options.size(bench.options.amount(None, 10_000, 5_000), 50);
    let mut rows = Vec::new();
    for members in &bench.arguments.members {
        let longest = bench.arguments.sizes.iter().copied().max().unwrap_or(8);
        let (fabric, data) = (&bench.arguments.fabric, &bench.arguments.data);
        let mut rig = Rig::new(fabric, data, *members, longest)?;
        bench.pin_leader()?;
        commits_us(&mut rig, 8, count / 5 + 1)?;
        for bytes in &bench.arguments.sizes {
            let (mut medians, mut tails) = (Vec::new(), Vec::new());
            for _ in 0..bench.options.turns() {
                let (median, tail) = commits_us(&mut rig, *bytes, count)?;
                medians.push(median);
                tails.push(tail);
            }
            let case = format!("commit of {bytes} B, {members} members, one after another");
            let tail = crate::bench::report::Spread::of(&tails).median;
            let row = Row::new(case, "log", "us", Better::Lower, &medians);
            rows.push(shown(
                row.beside("p99", format!("{tail:.2} us")).beside("rounds", 1),
                bench.output,
            ));
        }
        crate::bench::turns::unpin()?;
    }
    Ok(rows)
}

/// Throughput by clients.
pub fn throughput(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let time = Duration::from_millis(bench.options.size(1000, 20));
    let mut rows = Vec::new();
    for members in &bench.arguments.members {
        for clients in bench.options.size(vec![1, 4, 16, 64, 256], vec![1, 16]) {
            let (fabric, data) = (&bench.arguments.fabric, &bench.arguments.data);
            let mut figures = Vec::new();
            let mut together = 0.0;
            for _ in 0..bench.options.turns() {
                // Clients of a turn end with its cluster.
                let mut rig = Rig::new(fabric, data, *members, 32)?;
                bench.pin_leader()?;
                figures.push(commits_per_second(&mut rig, 32, clients, time)?);
                let counters = rig.node.counters();
                together = counters.proposed as f64 / counters.entries.max(1) as f64;
                crate::bench::turns::unpin()?;
            }
            let case = format!("commits of 32 B, {members} members, {clients} clients");
            let row = Row::new(case, "log", "op/s", Better::Higher, &figures);
            rows.push(shown(
                row.beside("commands per entry", format!("{together:.1}")),
                bench.output,
            ));
        }
    }
    Ok(rows)
}
