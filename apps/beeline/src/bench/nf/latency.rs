//! How long a packet takes through the firewall between two veth pairs, beside a veth pair alone and
//! the kernel's own forwarding.
//!
//! Packets leave at a fixed pace, each with the time of its call in its payload; the kernel notes when
//! it arrives at the last name space's interface, so that the receiver needs no core of its own. What
//! the function adds is the difference to the veth pair alone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use beeline_nf::packet_socket::Device;

use super::kernel::{Contender, InARow, around, enter, packet};
use super::{BenchOptions, Kind, Shown};
use crate::bench::report::{Better, Row, number};

/// Where a packet's time stands, behind its TCP header.
const STAMP: usize = 54;
/// Packets of a turn that do not count: caches and branch predictors are cold.
const WARM: usize = 500;

fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(0))
}

/// Sends packets, one every `gap`.
fn send(space: &str, packets: usize, gap: Duration) -> anyhow::Result<()> {
    enter(space)?;
    let mut device = Device::interface("a0")?;
    let mut packet = packet()?;
    let start = Instant::now();
    for at in 0..packets {
        let due = gap * u32::try_from(at).unwrap_or(u32::MAX);
        while start.elapsed() < due {
            std::hint::spin_loop();
        }
        packet[STAMP..STAMP + 8].copy_from_slice(&now_ns().to_be_bytes());
        device.send(&packet)?;
    }
    Ok(())
}

/// Nanoseconds on the way of the packets that arrive until told to stop.
fn receive(space: &str, ready: &AtomicBool, stop: &AtomicBool) -> anyhow::Result<Vec<u64>> {
    enter(space)?;
    let mut device = Device::ringed("c1")?;
    ready.store(true, Ordering::Release);
    let (mut bytes, mut times) = (Vec::new(), Vec::new());
    while !stop.load(Ordering::Relaxed) {
        while device.take(&mut bytes)? {
            // The kernel of a name space sends packets of its own.
            let ours = bytes.len() == 64 && bytes[12..14] == [8, 0] && bytes[23] == 6;
            let stamp = bytes.get(STAMP..STAMP + 8).and_then(|part| part.first_chunk());
            if let (true, Some(stamp)) = (ours, stamp) {
                times.push(device.stamp_ns().saturating_sub(u64::from_be_bytes(*stamp)));
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(times)
}

/// Microseconds at the middle and at the 99th of a hundred.
fn turn(contender: Contender, packets: usize, gap: Duration) -> anyhow::Result<(f64, f64)> {
    let row = if contender == Contender::Nothing { InARow::alone()? } else { InARow::new()? };
    let mut times = around(contender, &row, 1, || {
        let (ready, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| receive(&row.last, &ready, &stop));
            while !ready.load(Ordering::Acquire) && !receiver.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let sent = scope.spawn(|| send(&row.first, packets, gap)).join();
            std::thread::sleep(Duration::from_millis(50));
            stop.store(true, Ordering::Relaxed);
            match (sent, receiver.join()) {
                (Ok(sent), Ok(times)) => sent.and(times),
                _ => anyhow::bail!("a thread of the measurement panicked"),
            }
        })
    })?;
    anyhow::ensure!(times.len() > packets / 2, "{} of {packets} packets arrived", times.len());
    times.drain(..WARM.min(times.len() / 2));
    times.sort_unstable();
    let of = |part: usize| -> anyhow::Result<f64> {
        let at = (times.len() * part / 100).min(times.len().saturating_sub(1));
        let ns = times.get(at).context("no packet arrived")?;
        Ok(f64::from(u32::try_from(*ns).unwrap_or(u32::MAX)) / 1e3)
    };
    Ok((of(50)?, of(99)?))
}

/// Every contender at two paces.
pub(super) fn latencies(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    let all = [Contender::Nothing, Contender::Express, Contender::Ring, Contender::Forward];
    for gap_us in options.size(vec![50, 10], vec![50]) {
        let packets = options.size(1_000_000 / gap_us, 2_000);
        let gap = Duration::from_micros(gap_us.try_into()?);
        let mut figures = vec![(Vec::new(), Vec::new()); all.len()];
        let mut missing = vec![None; all.len()];
        for round in 0..options.turns() as usize {
            for step in 0..all.len() {
                let at = (step + round) % all.len();
                if missing[at].is_some() {
                    continue;
                }
                match turn(all[at], packets, gap) {
                    Ok((middle, tail)) => {
                        figures[at].0.push(middle);
                        figures[at].1.push(tail);
                    }
                    Err(error) => missing[at] = Some(format!("{error:#}")),
                }
            }
        }
        for (contender, why) in all.iter().zip(&missing) {
            if let Some(why) = why {
                shown.output.note(format!("skipped: {}: {why}", contender.name()));
            }
        }
        if missing[0].is_some() {
            return Ok(());
        }
        let (base, base_tail) = figures[0].clone();
        let median = |list: &[f64]| crate::bench::report::Spread::of(list).median;
        for (at, contender) in all.iter().enumerate().skip(1) {
            if missing[at].is_some() {
                continue;
            }
            let (middle, tail) = &figures[at];
            let pace = 1_000 / gap_us;
            let case = format!("one way between veth pairs, 64 B, {pace} kpps, p50");
            let added =
                |mine: &[f64], base: &[f64]| format!("{} us", number(median(mine) - median(base)));
            let row = Row::new(case, contender.name(), "us", Better::Lower, middle)
                .against("a veth pair alone", middle, &base)
                .beside("p99", format!("{} us", number(median(tail))))
                .beside("added at p50", added(middle, &base))
                .beside("added at p99", added(tail, &base_tail));
            shown.row(Kind::Measured, &row)?;
        }
    }
    Ok(())
}
