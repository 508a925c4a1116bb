//! The link to the host, by slots and batch, polled and by interrupts, against copies in bulk through
//! board memory; and the pFabric queue's flow completion times.
//!
//! The link is emulated over shared memory at a stated pace (0.4 us one way, 4 GB/s), so its figures
//! say in which order the ways stand, not what a card does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_ir::graph::Graph;
use beeline_ir::run::Run;
use beeline_nf::completion::{
    DropTail, Priorities, QUEUE, Senders, completions, flows, ideal, slowdown,
};
use beeline_nf::pcie::bus::{Pace, sleep_on};
use beeline_nf::pcie::card::{COPY_WORDS, Card, Library};
use beeline_nf::pcie::slot::Mode;
use beeline_nf::pcie::{FIRST_DATA, Link};
use beeline_nf::sides::native;

use super::{BenchOptions, Kind, Shown, loaded};
use crate::bench::report::{Better, Row};
use crate::bench::turns::{pin, unpin};

/// The stated pace.
const PACE: Pace = Pace { delay_ns: 400, bytes_per_second: 4_000_000_000 };
const LIMIT: Duration = Duration::from_secs(10);

/// A card that takes every message of the data slots and answers nothing else.
fn card(link: &Link, slots: usize, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        link.bus().clear_card();
        let mut moved = false;
        for slot in FIRST_DATA..FIRST_DATA + slots {
            if link.card_receive(slot).is_some() {
                link.card_complete(slot);
                moved = true;
            }
        }
        if !moved {
            std::thread::yield_now();
        }
    }
}

/// Gigabits a second downwards through so many slots, `words` words a message; and microseconds of a
/// message in one slot.
fn slots(mode: Mode, slots: usize, words: usize, messages: usize) -> anyhow::Result<(f64, f64)> {
    let link = Link::new(PACE)?;
    let stop = AtomicBool::new(false);
    let message = vec![7; words];
    std::thread::scope(|scope| {
        scope.spawn(|| card(&link, slots, &stop));
        let start = Instant::now();
        let outcome = (|| {
            let mut busy = vec![false; slots];
            let (mut sent, mut done) = (0, 0);
            while done < messages {
                for (at, busy) in busy.iter_mut().enumerate() {
                    let slot = FIRST_DATA + at;
                    if *busy && link.host_completed(slot) {
                        (*busy, done) = (false, done + 1);
                    }
                    if !*busy && sent < messages {
                        link.host_send(slot, &message)?;
                        (*busy, sent) = (true, sent + 1);
                    }
                }
                if mode == Mode::Interrupt {
                    let bells: Vec<_> =
                        (0..slots).map(|at| link.bus().host_bell(FIRST_DATA + at)).collect();
                    sleep_on(&bells, Duration::from_millis(1))?;
                    (0..slots).for_each(|at| link.bus().clear_host(FIRST_DATA + at));
                }
            }
            anyhow::Ok(())
        })();
        let seconds = start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        outcome?;
        let count = f64::from(u32::try_from(messages).unwrap_or(u32::MAX));
        let bits = count * f64::from(u32::try_from(words * 64).unwrap_or(u32::MAX));
        Ok((bits / seconds / 1e9, seconds / count * 1e6))
    })
}

/// Gigabits a second by copies through board memory, and microseconds of one.
fn bulk(graph: &Graph, copies: u32) -> anyhow::Result<(f64, f64)> {
    let link = Link::new(PACE)?;
    let stop = AtomicBool::new(false);
    let machines = native(graph)?;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let Ok(run) = Run::new(graph, machines) else { return };
            let mut card = Card::new(graph, run, COPY_WORDS);
            while !stop.load(Ordering::Relaxed) {
                if !card.turn(&link).unwrap_or(false) {
                    std::thread::yield_now();
                }
            }
        });
        let library = Library { link: &link, mode: Mode::Poll, limit: LIMIT };
        let start = Instant::now();
        // In and out again: what a host pays to have the card work on a buffer.
        let outcome = (0..copies).try_for_each(|_| {
            library.copy(true, 0, 0, COPY_WORDS)?;
            library.copy(false, 0, 0, COPY_WORDS)
        });
        let seconds = start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        outcome?;
        let count = f64::from(copies);
        let bits = count * f64::from(u32::try_from(COPY_WORDS * 64).unwrap_or(u32::MAX));
        Ok((bits / seconds / 1e9, seconds / count * 1e6))
    })
}

/// The link's rates and latencies.
pub(super) fn rates(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    // The card's thread must find another processor: a host that polls would keep this one.
    unpin()?;
    let loaded = loaded("Count :: cnt @\nfrom_tor -> cnt -> to_tor\n")?;
    let graph = &loaded.compiled.graph;
    let messages = options.size(20_000, 100);
    let (mut base, mut bulk_us) = (Vec::new(), Vec::new());
    for _ in 0..options.turns() {
        let (rate, us) = bulk(graph, options.size(2_000, 10))?;
        base.push(rate);
        bulk_us.push(us);
    }
    for mode in [Mode::Poll, Mode::Interrupt] {
        let way = if mode == Mode::Poll { "polled" } else { "by interrupts" };
        for (count, words) in [(1, 8), (1, 512), (4, 512), (30, 512)] {
            let (mut rates, mut times) = (Vec::new(), Vec::new());
            for _ in 0..options.turns() {
                let (rate, us) = slots(mode, count, words, messages)?;
                rates.push(rate);
                times.push(us);
            }
            let flits = words / 8;
            let case = format!("link {way}, {count} slots, {flits} flits a message");
            let row = Row::new(case, "slots", "Gbit/s", Better::Higher, &rates).against(
                "copies through board memory",
                &rates,
                &base,
            );
            shown.row(Kind::Emulated, &row)?;
            if count == 1 {
                let case = format!("link {way}, a message of {flits} flits and its completion");
                let row = Row::new(case, "slots", "us", Better::Lower, &times).against(
                    "copies through board memory",
                    &times,
                    &bulk_us,
                );
                shown.row(Kind::Emulated, &row)?;
            }
        }
    }
    pin(0)?;
    Ok(())
}

/// Flow completion times over load.
pub(super) fn fabric(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    let loaded = loaded(QUEUE)?;
    let graph = &loaded.compiled.graph;
    for load in options.size(vec![0.2, 0.4, 0.6, 0.8], vec![0.6]) {
        for (most, what) in [(7, "flows up to 7 packets"), (u64::MAX, "all flows")] {
            let (mut best, mut fabric, mut tail) = (Vec::new(), Vec::new(), Vec::new());
            for seed in 1..=u64::from(options.turns()) {
                let flows = flows(options.size(3_000, 60), load, seed);
                best.push(slowdown(&flows, &ideal(&flows), most));
                let mut queue = Priorities::new(graph, Run::new(graph, native(graph)?)?);
                let times = completions(&flows, Senders::Eager, &mut queue)?;
                fabric.push(slowdown(&flows, &times, most));
                let times = completions(&flows, Senders::Careful, &mut DropTail::default())?;
                tail.push(slowdown(&flows, &times, most));
            }
            let case = format!("pFabric, load {load}, {what}, mean completion time over alone");
            let ideal = best.iter().sum::<f64>() / f64::from(options.turns().max(1));
            let row = Row::new(case, "pFabric", "times", Better::Lower, &fabric)
                .against("drop-tail", &fabric, &tail)
                .beside("ideal", format!("{ideal:.2}"));
            shown.row(Kind::Simulated, &row)?;
        }
    }
    Ok(())
}
