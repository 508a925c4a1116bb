//! The three protocols side by side: latency by size, YCSB, more clients.

use std::cell::RefCell;
use std::sync::Barrier;
use std::time::Instant;

use beeline_kv::wire::Protocol;
use beeline_kv_client::Client;

use super::load::{Keys, cost, fill, latency, rate};
use super::rig::{Rig, RigOptions};
use super::{Bench, Part};
use crate::bench::fabric::{cache_line, line_requests};
use crate::bench::report::{Better, Row, Spread, number, shown};
use crate::bench::turns::{Contender, alternate, pin};

/// Keys of the latency loads: more than fit a first-level cache, few enough to be stored quickly.
const KEYS: u64 = 4_096;
/// Bytes all values of one turn take at most, so that large values take fewer turns.
const TURN_BYTES: u64 = 96 << 20;
/// Requests outstanding in the rates.
const OUTSTANDING: [usize; 4] = [1, 4, 16, 32];
const PROTOCOLS: [Protocol; 3] = Protocol::ALL;

fn operations(bench: &Bench<'_>, full: u64, size: u64) -> u64 {
    bench.options.size(full.min(TURN_BYTES / size.max(1)), 20)
}

fn keys(bench: &Bench<'_>) -> u64 {
    bench.options.size(KEYS, 16)
}

/// One contender's client, and what it told.
struct Side {
    client: RefCell<Client>,
    p99: RefCell<Vec<f64>>,
    cost: RefCell<String>,
}

impl Side {
    fn new(rig: &Rig, protocol: Protocol) -> anyhow::Result<Self> {
        let client = RefCell::new(rig.client(protocol, 32)?);
        Ok(Self { client, p99: RefCell::default(), cost: RefCell::default() })
    }

    /// One turn of a load that waits for each answer: its p50 in microseconds.
    #[expect(clippy::cast_precision_loss, reason = "latencies far below 2^52 ns")]
    fn turn(
        &self,
        keys: &mut Keys,
        operations: u64,
        percent: u64,
        value: &[u8],
    ) -> anyhow::Result<(f64, f64)> {
        let mut client = self.client.borrow_mut();
        let before = client.counters();
        let recorded = latency(&mut client, keys, operations, percent, value)?;
        *self.cost.borrow_mut() = cost(before, client.counters());
        let summary = recorded.summary();
        self.p99.borrow_mut().push(summary.p99_ns as f64 / 1e3);
        Ok((summary.p50_ns as f64 / 1e3, summary.mean_ns / 1e3))
    }

    fn p99(&self) -> String {
        let figures = std::mem::take(&mut *self.p99.borrow_mut());
        format!("{} us", number(Spread::of(&figures).median))
    }
}

fn sides(rig: &Rig) -> anyhow::Result<Vec<Side>> {
    PROTOCOLS.iter().map(|protocol| Side::new(rig, *protocol)).collect()
}

/// What of a turn is the figure.
#[derive(Clone, Copy, PartialEq)]
enum Figure {
    Median,
    Mean,
}

/// Lets the protocols take turns at one load, and adds a row of BOOM against each baseline.
#[expect(clippy::too_many_arguments, reason = "one load, fully described")]
fn compare(
    bench: &Bench<'_>,
    rows: &mut Vec<Row>,
    sides: &[Side],
    case: &str,
    choice: &Keys,
    operations: u64,
    percent: u64,
    value: &[u8],
    figure: Figure,
    paper: [&'static str; 2],
) -> anyhow::Result<()> {
    let mut contenders: Vec<Contender<'_>> = sides
        .iter()
        .zip(PROTOCOLS)
        .map(|(side, protocol)| {
            let mut keys = choice.clone();
            Contender::new(protocol.name(), move || {
                let (median, mean) = side.turn(&mut keys, operations, percent, value)?;
                Ok(if figure == Figure::Median { median } else { mean })
            })
        })
        .collect();
    let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
    drop(contenders);
    let p99: Vec<String> = sides.iter().map(Side::p99).collect();
    for ((other, protocol), paper) in PROTOCOLS.iter().enumerate().skip(1).zip(paper) {
        rows.push(shown(
            Row::new(case, "BOOM", "us", Better::Lower, &figures[0])
                .against(protocol.name(), &figures[0], &figures[other])
                .beside("p99", format!("{}, its {}", p99[0], p99[other]))
                .beside(
                    "per operation",
                    format!("{}; its {}", sides[0].cost.borrow(), sides[other].cost.borrow()),
                )
                .beside("paper", paper),
            bench.output,
        ));
    }
    Ok(())
}

/// 64 B gets and puts: latency beside a bare cache line, and the rate by requests outstanding.
pub fn headline(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let rig = Rig::start(bench.fabric, &RigOptions::default())?;
    let side = Side::new(&rig, Protocol::Boom)?;
    let value = [7; 64];
    let choice = Keys::uniform(keys(bench), 3);
    fill(&mut side.client.borrow_mut(), keys(bench), &value)?;
    let count = operations(bench, 50_000, 64);
    let mut rows = Vec::new();
    for (case, percent) in [("64 B get, one at a time", 100), ("64 B put, one at a time", 0)] {
        let mut chosen = choice.clone();
        let mut contenders = [
            Contender::new("BOOM", || Ok(side.turn(&mut chosen, count, percent, &value)?.0)),
            Contender::new("cache line", || Ok(cache_line(bench.options.size(64_000, 128))?.0)),
        ];
        let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
        drop(contenders);
        rows.push(shown(
            Row::new(case, "BOOM", "us", Better::Lower, &figures[0])
                .against("bare cache line", &figures[0], &figures[1])
                .beside("p99", side.p99())
                .beside("per operation", side.cost.borrow().clone()),
            bench.output,
        ));
    }
    let many = bench.options.size(400_000, 100);
    for (verb, percent) in [("get", 100), ("put", 0)] {
        for outstanding in bench.options.size(&OUTSTANDING[..], &OUTSTANDING[2..3]) {
            let mut chosen = choice.clone();
            let mut turn = || {
                let client = &mut side.client.borrow_mut();
                rate(client, &mut chosen, many, percent, &value, *outstanding, false)
            };
            // Key, header and value take two lines, either way.
            let (there, back) = if percent == 100 { (0, 2) } else { (2, 0) };
            let rounds = bench.options.size(1_000_000, 128);
            let mut contenders = [
                Contender::new("BOOM", &mut turn),
                Contender::new("lines", || line_requests(rounds, *outstanding, there, back)),
            ];
            let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
            drop(contenders);
            let case = format!("64 B {verb}, {outstanding} outstanding");
            rows.push(shown(
                Row::new(case, "BOOM", "op/s", Better::Higher, &figures[0]).against(
                    "bare lines",
                    &figures[0],
                    &figures[1],
                ),
                bench.output,
            ));
        }
    }
    Ok(rows)
}

/// Put and get latency by value size.
pub fn by_size(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for size in bench.options.size(&[32_u64, 64, 256, 1024, 4096, 16_384][..], &[32, 1024]) {
        let rig = Rig::start(bench.fabric, &RigOptions::default())?;
        let sides = sides(&rig)?;
        let value = vec![7; usize::try_from(*size)?];
        fill(&mut sides[0].client.borrow_mut(), keys(bench), &value)?;
        let choice = Keys::uniform(keys(bench), *size);
        let count = operations(bench, 20_000, *size);
        let large = *size > 1024;
        for (verb, percent, paper) in [
            ("put", 0, [if large { "-5 to -13 %" } else { "slightly worse" }, "-10 to -42 %"]),
            (
                "get",
                100,
                [if large { "-38 to -44 %" } else { "about -8 %" }, "-30 % or better up to 4 kB"],
            ),
        ] {
            let case = format!("{size} B {verb}");
            compare(
                bench,
                &mut rows,
                &sides,
                &case,
                &choice,
                count,
                percent,
                &value,
                Figure::Median,
                paper,
            )?;
        }
    }
    Ok(rows)
}

/// YCSB's mixtures over Zipf 0.99, mean latency.
pub fn ycsb(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for size in bench.options.size(&[1024_u64, 4096][..], &[1024]) {
        let rig = Rig::start(bench.fabric, &RigOptions::default())?;
        let sides = sides(&rig)?;
        let value = vec![7; usize::try_from(*size)?];
        let count = bench.options.size(20_000, 16);
        fill(&mut sides[0].client.borrow_mut(), count, &value)?;
        let choice = Keys::zipf(count, 0.99, *size);
        let requests = operations(bench, 20_000, *size);
        for (name, gets, paper) in [
            ("A, 50 % gets", 50, ["-21.2 to -25.4 % above 1 kB", "-13.4 to -41.5 %"]),
            ("B, 95 % gets", 95, ["-2.6 to -39.2 %", "-18.2 to -41.7 %"]),
            ("C, all gets", 100, ["-4.7 to -39.5 %", "-18.4 to -41.5 %"]),
        ] {
            let case = format!("YCSB {name}, {size} B");
            compare(
                bench,
                &mut rows,
                &sides,
                &case,
                &choice,
                requests,
                gets,
                &value,
                Figure::Mean,
                paper,
            )?;
        }
    }
    Ok(rows)
}

/// 2 kB values, more and more clients on the processor that is left.
pub fn scaling(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let value = vec![7; 2048];
    let count = bench.options.size(10_000, 20);
    let mut rows = Vec::new();
    for clients in bench.options.size(&[1_usize, 2, 4][..], &[1, 2]) {
        for (verb, percent, paper) in [
            ("put", 0, ["+7.2 to +22.1 %", "+40.5 to +46.7 %"]),
            ("get", 100, ["+47.5 to +48.9 %", "+56.7 to +61.7 %"]),
        ] {
            let options = RigOptions { crowded: true, ..RigOptions::default() };
            let rig = Rig::start(bench.fabric, &options)?;
            fill(&mut rig.client(Protocol::Boom, 2)?, keys(bench), &value)?;
            let mut contenders: Vec<Contender<'_>> = PROTOCOLS
                .iter()
                .map(|protocol| {
                    let (rig, value) = (&rig, &value);
                    Contender::new(protocol.name(), move || {
                        together(rig, *protocol, *clients, count, percent, value, keys(bench))
                    })
                })
                .collect();
            let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
            drop(contenders);
            let processors = crate::bench::turns::online().saturating_sub(1).max(1);
            for ((other, protocol), paper) in PROTOCOLS.iter().enumerate().skip(1).zip(paper) {
                let case = format!("2 kB {verb}, {clients} clients on {processors} cores");
                rows.push(shown(
                    Row::new(case, "BOOM", "op/s", Better::Higher, &figures[0])
                        .against(protocol.name(), &figures[0], &figures[other])
                        .beside("paper", paper),
                    bench.output,
                ));
            }
        }
    }
    debug_assert!(!rows.is_empty(), "part {:?} yields rows", Part::Scaling);
    Ok(rows)
}

/// Requests per second of `clients` threads together, once their logs have grown, each with 8
/// outstanding: with fewer than one processor each, threads that wait for one answer at a time would
/// measure the scheduler.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn together(
    rig: &Rig,
    protocol: Protocol,
    clients: usize,
    operations: u64,
    percent: u64,
    value: &[u8],
    keys: u64,
) -> anyhow::Result<f64> {
    let barrier = Barrier::new(clients + 1);
    let processors = crate::bench::turns::online().saturating_sub(1).max(1);
    let figure = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for index in 0..clients {
            let barrier = &barrier;
            threads.push(scope.spawn(move || {
                let crowded = clients > processors;
                let mut choice = Keys::uniform(keys, index as u64);
                let made = pin(1 + index % processors).and_then(|_| {
                    let mut client = rig.client(protocol, 8)?;
                    // A client's first puts fill a segment that was never touched, while the node
                    // makes the next one ready on a processor of this load.
                    if percent < 100 {
                        rate(&mut client, &mut choice, 2 * keys, percent, value, 8, crowded)?;
                    }
                    Ok(client)
                });
                barrier.wait();
                rate(&mut made?, &mut choice, operations, percent, value, 8, crowded)
            }));
        }
        barrier.wait();
        let start = Instant::now();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        Ok((operations * clients as u64) as f64 / start.elapsed().as_secs_f64())
    });
    // Their segments are the collector's now: none of that falls to the contender whose turn is next.
    rig.settle();
    figure
}
