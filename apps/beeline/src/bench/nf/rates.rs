//! Packets a second of functions as machine code, between memory and memory, on one core.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Context as _;
use beeline_ir::flits::{WORDS, split};
use beeline_ir::graph::Graph;
use beeline_ir::run::{Machine, Run};
use beeline_native::Program;
use beeline_nf::diff::{Stimulus, all_hardware, cycles};
use beeline_nf::engine::run_memory;
use beeline_nf::functions::firewall::Firewall;
use beeline_nf::functions::rules::{Key, Rule};
use beeline_nf::functions::templates;
use beeline_nf::functions::{Kept, Manager};
use beeline_nf::pcap::Writer;
use beeline_nf::sides::{Ahead, LinkOptions, Plan};
use beeline_passes::Options;

use super::{BenchOptions, Kind, Shown, loaded};
use crate::bench::report::{Better, Row};
use crate::bench::turns::{Contender, alternate, pin, unpin};

/// An IPv4 packet of 64 bytes.
fn packet(key: Key) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[12..15].copy_from_slice(&[8, 0, 0x45]);
    bytes[16..18].copy_from_slice(&50_u16.to_be_bytes());
    bytes[22..24].copy_from_slice(&[64, key.protocol]);
    bytes[26..30].copy_from_slice(&key.source.to_be_bytes());
    bytes[30..34].copy_from_slice(&key.destination.to_be_bytes());
    bytes[34..38].copy_from_slice(&key.ports.to_be_bytes());
    bytes
}

fn flits(keys: &[Key]) -> Vec<u64> {
    let mut items = Vec::with_capacity(keys.len() * 2 * WORDS);
    for key in keys {
        split(&packet(*key), 1_000, |flit| items.extend(flit));
    }
    items
}

/// Plays flits once through the graph's first input; flits that left.
fn play<M: Machine>(graph: &Graph, run: &mut Run<'_, M>, items: &[u64]) -> anyhow::Result<u64> {
    let (Some(input), Some(output)) = (graph.inputs.first(), graph.outputs.first()) else {
        anyhow::bail!("the graph has no ends");
    };
    let (input, output) = (input.channel, output.channel);
    let (mut sent, mut left) = (0, 0);
    let mut flit = [0; WORDS];
    run.settle(16, u64::MAX, |run| {
        let mut moved = false;
        while sent < items.len() && run.channel_mut(input).push(&items[sent..sent + WORDS]) {
            sent += WORDS;
            moved = true;
        }
        while run.channel_mut(output).pop(&mut flit) {
            black_box(&flit);
            left += 1;
            moved = true;
        }
        moved
    })?;
    Ok(left)
}

fn rate(packets: usize, start: Instant) -> f64 {
    let packets = f64::from(u32::try_from(packets).unwrap_or(u32::MAX));
    packets / start.elapsed().as_secs_f64() / 1e6
}

/// `n` keys that differ.
fn keys(n: usize, port: u32) -> Vec<Key> {
    let key = |at: u32| Key {
        source: 0x0a00_0000 | at.wrapping_mul(2_654_435_761) >> 9,
        destination: 0x0a00_000a,
        ports: (1_024 + at % 50_000) << 16 | port,
        protocol: 6,
    };
    (0..u32::try_from(n).unwrap_or(u32::MAX)).map(key).collect()
}

/// A capture in memory of so many packets of 64 bytes.
fn capture(packets: usize) -> anyhow::Result<Vec<u8>> {
    let mut capture = Writer::new(Vec::new())?;
    for key in keys(packets, 80) {
        capture.write(1_000, &packet(key))?;
    }
    Ok(capture.finish()?)
}

/// A graph from capture to capture, compiled ahead, on at most so many threads.
struct FromCapture<'g> {
    graph: &'g Graph,
    ahead: Ahead,
    link: LinkOptions,
    threads: usize,
    /// The capture that was written last: its memory is used again.
    old: Vec<Vec<u8>>,
}

impl<'g> FromCapture<'g> {
    fn new(graph: &'g Graph, threads: usize) -> anyhow::Result<Self> {
        let plan = Plan::threaded(graph, threads)?;
        let link = LinkOptions { threads, ..LinkOptions::default() };
        let (ahead, threads) = (Ahead::of(&plan)?, plan.threads());
        Ok(Self { graph, ahead, link, threads, old: Vec::new() })
    }

    /// Million packets a second.
    fn turn(&mut self, capture: &[u8], packets: usize) -> anyhow::Result<f64> {
        let old = std::mem::take(&mut self.old);
        let ahead = &self.ahead;
        let start = Instant::now();
        let make = |graph: &Graph| ahead.machines(graph);
        let (counts, files) = run_memory(self.graph, (&make, self.link), &[capture], &[], old)?;
        let rate = rate(packets, start);
        let left = counts.packets_out;
        anyhow::ensure!(left == packets as u64, "{left} packets left");
        self.old = files;
        Ok(rate)
    }
}

/// Parser, checksum and counter.
pub(super) fn memory(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    let text = "L4_Parser :: parser\nIPChecksum :: sum\nCount :: cnt\n\
                from_tor -> {256} parser -> sum -> cnt -> {256} to_tor\n";
    let loaded = loaded(text)?;
    let packets = options.size(1_000_000, 2_000);
    let capture = capture(packets)?;
    let mut run = FromCapture::new(&loaded.compiled.graph, 1)?;
    let mut figures = Vec::new();
    // The first turn warms the memory of the capture that is written.
    for turn in 0..=options.turns() {
        let rate = run.turn(&capture, packets)?;
        if turn > 0 {
            figures.push(rate);
        }
    }
    let row = Row::new(
        "64 B from pcap to pcap in memory through L4_Parser, IPChecksum, Count, one core",
        "beeline",
        "Mpps",
        Better::Higher,
        &figures,
    );
    shown.row(Kind::Measured, &row.beside("wanted", "10 Mpps"))
}

/// An element that takes some time a flit: 64 turns of a hash.
const DIGEST: &str = ".element Digest (flit in -> flit out) {\n.handler {\nif (test_input_port(in)) {\n\
    flit x = read_input_port(in);\nulong h = x.quad[0];\n\
    for (uint i = 0; i < 64; i++) h = (h ^ x.quad[i & 3]) * 1099511628211;\n\
    x.meta[1] = h;\nset_output_port(out, x);\n}\n}\n}\n\
    Digest :: a\nDigest :: b\nfrom_tor -> {256} a -> {256} b -> {256} to_tor\n";

/// Graphs on one thread and on two. The first is cut by hand (`host`): it is so light that more threads
/// leave it whole.
pub(super) fn threads(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    // The second thread must find another processor.
    unpin()?;
    let light = |host: &str| {
        format!(
            "L4_Parser :: parser\n{host}IPChecksum :: sum\n{host}Count :: cnt\n\
             from_tor -> {{256}} parser -> {{256}} sum -> cnt -> {{256}} to_tor\n"
        )
    };
    let firewall = templates::text("firewall").unwrap_or_default().to_owned();
    let cases = [
        ("L4_Parser, and by hand IPChecksum and Count", light(""), light("host "), 40),
        ("firewall.np", firewall.clone(), firewall, 20),
        ("two hashes of 64 turns a flit", DIGEST.to_owned(), DIGEST.to_owned(), 10),
    ];
    for (case, one, two, size) in cases {
        let (one, two) = (loaded(&one)?, loaded(&two)?);
        let packets = options.size(size * 10_000, 200);
        let capture = capture(packets)?;
        let mut alone = FromCapture::new(&one.compiled.graph, 1)?;
        let mut both = FromCapture::new(&two.compiled.graph, 2)?;
        anyhow::ensure!(both.threads == 2, "{case} on {} threads", both.threads);
        let contenders = &mut [
            Contender::new("two threads", || both.turn(&capture, packets)),
            Contender::new("one thread", || alone.turn(&capture, packets)),
        ];
        let figures = alternate(options.turns(), contenders, shown.output)?;
        let case = format!("64 B from pcap to pcap in memory: {case}");
        let row = Row::new(case, "two threads", "Mpps", Better::Higher, &figures[0]);
        shown.row(Kind::Measured, &row.against("one thread", &figures[0], &figures[1]))?;
    }
    pin(0)?;
    Ok(())
}

/// Rules that the packets do not meet, as a linear list asks all of them.
fn rule(at: u32) -> anyhow::Result<Rule> {
    let (a, b) = (at >> 8 & 255, at & 255);
    Ok(format!("tcp 172.{a}.{b}.0/24 -> any :443 drop").parse()?)
}

/// The firewall against a linear classifier in the same process, by number of rules.
pub(super) fn rules(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    let loaded = loaded(templates::text("firewall").unwrap_or_default())?;
    let graph = &loaded.compiled.graph;
    let program = Program::compile(graph)?;
    let keys = keys(options.size(200_000, 1_000), 443);
    let items = flits(&keys);
    for count in [1_u32, 100, 1_000, 10_000] {
        let mut run = Run::new(graph, program.machines())?;
        let Some(mut firewall) = Firewall::of(graph) else { anyhow::bail!("no firewall") };
        let mut writes = Vec::new();
        let mut list = Vec::new();
        for at in 0..count {
            list.push(rule(at)?);
            firewall.add(rule(at)?, false, &mut writes)?;
        }
        for (node, signal) in writes {
            run.signal_now(node, signal)?;
        }
        // The list takes as long as it has rules: fewer packets keep its turns short.
        let asked = &keys[..keys.len().min(options.size(20_000_000, 100_000) / count as usize)];
        let contenders = &mut [
            Contender::new("beeline", || {
                let start = Instant::now();
                let left = play(graph, &mut run, &items)?;
                anyhow::ensure!(left == items.len() as u64 / 8, "{left} flits left");
                Ok(rate(keys.len(), start))
            }),
            Contender::new("linear", || {
                let start = Instant::now();
                let dropped = asked
                    .iter()
                    .filter(|key| list.iter().find(|r| r.matches(**key)).is_some_and(|r| r.drop))
                    .count();
                anyhow::ensure!(black_box(dropped) == 0, "{dropped} packets dropped");
                Ok(rate(asked.len(), start))
            }),
        ];
        let figures = alternate(options.turns(), contenders, shown.output)?;
        let row = Row::new(
            format!("firewall in memory, {count} rules"),
            "beeline",
            "Mpps",
            Better::Higher,
            &figures[0],
        )
        .against("a bare linear match, no packets moved,", &figures[0], &figures[1]);
        shown.row(Kind::Measured, &row)?;
    }
    Ok(())
}

/// A rule in, beside eight thousand others.
pub(super) fn inserts(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    let loaded = loaded(templates::text("firewall").unwrap_or_default())?;
    let graph = &loaded.compiled.graph;
    let program = Program::compile(graph)?;
    let mut run = Run::new(graph, program.machines())?;
    let Some(mut firewall) = Firewall::of(graph) else { anyhow::bail!("no firewall") };
    let mut writes = Vec::new();
    for at in 0..options.size(8_000, 80) {
        firewall.add(rule(at)?, false, &mut writes)?;
    }
    for (node, signal) in writes.drain(..) {
        run.signal_now(node, signal)?;
    }
    let kinds = [
        ("HashTCAM", "tcp 172.200.1.0/24 -> any :443 drop"),
        ("exact", "tcp 1.2.3.4 :5 -> 6.7.8.9 :10 drop"),
        ("prefix", "ip any -> 99.0.0.0/8 drop"),
    ];
    for (table, text) in kinds {
        let mut figures = Vec::new();
        let mut signals = 0;
        for _ in 0..options.turns() * 10 {
            let start = Instant::now();
            let number = firewall.add(text.parse()?, false, &mut writes)?;
            signals = writes.len();
            for (node, signal) in writes.drain(..) {
                run.signal_now(node, signal)?;
            }
            figures.push(start.elapsed().as_secs_f64() * 1e6);
            firewall.remove(number, &mut writes)?;
            for (node, signal) in writes.drain(..) {
                run.signal_now(node, signal)?;
            }
        }
        let others = options.size(8_000, 80);
        let case = format!("a rule in beside {others} others: {table}");
        let row = Row::new(case, "beeline", "us", Better::Lower, &figures);
        shown.row(Kind::Measured, &row.beside("signals", signals))?;
    }
    Ok(())
}

/// The balancer: packets of known flows, and a new flow each packet.
pub(super) fn flows(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    let loaded = loaded(templates::text("balancer").unwrap_or_default())?;
    let graph = &loaded.compiled.graph;
    let program = Program::compile(graph)?;
    let packets = options.size(200_000, 500);
    let fresh = flits(&keys(packets, 80));
    for (case, flows) in [("1,000 flows", 1_000), ("each packet a new flow", packets)] {
        let cycled: Vec<u64> = fresh[..flows.min(packets) * 2 * WORDS]
            .iter()
            .copied()
            .cycle()
            .take(fresh.len())
            .collect();
        let mut figures = Vec::new();
        for _ in 0..options.turns() {
            let mut run = Run::new(graph, program.machines())?;
            let mut manager = Manager::of(graph);
            for at in 1..=8 {
                manager.command(&format!("backends add 10.9.0.{at}"), &mut run)?;
            }
            while manager.apply(&mut run, 100)? {}
            let start = Instant::now();
            let left = play(graph, &mut run, &cycled)?;
            figures.push(rate(packets, start));
            anyhow::ensure!(left >= 2 * packets as u64, "{left} flits left");
        }
        let case = format!("balancer in memory, {case}");
        let row = Row::new(case, "beeline", "Mpps", Better::Higher, &figures);
        shown.row(Kind::Measured, &row)?;
    }
    Ok(())
}

/// The balancer's cycles a packet by flows: the knee is where its cache ends.
pub(super) fn knee(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    // A cache of 256 flows and a table of 16,384, so that the model comes past both in seconds.
    let text = templates::text("balancer")
        .unwrap_or_default()
        .replace("(BITS = 12)", "(BITS = 6)")
        .replace("(BITS = 16)", "(BITS = 12)");
    let loaded = loaded(&text)?;
    let graph = &loaded.compiled.graph;
    let made = all_hardware(graph, &Options::default())?;
    let first = Kept::of(graph, &["backends add 10.9.0.1".to_owned()])
        .map_err(|(command, error)| anyhow::anyhow!("{command}: {error}"))?;
    let packets = options.size(4_000, 200);
    for flows in options.size(vec![16, 64, 256, 1_024, 4_000], vec![16]) {
        // Each flow once, so that the table knows it; then again and again.
        let all = keys(flows, 80);
        let run = |count: usize| -> anyhow::Result<u64> {
            let list: Vec<Key> = all.iter().copied().cycle().take(count).collect();
            let stimulus = Stimulus { items: vec![flits(&list)], signals: first.0.clone() };
            let outcome = cycles(graph, &made, &stimulus)?;
            outcome.clocks.context("the cycle model counts clocks")
        };
        let clocks = run(flows + packets)? - run(flows)?;
        let per = f64::from(u32::try_from(clocks)?) / f64::from(u32::try_from(packets)?);
        let row = Row::new(
            format!("balancer, {flows} flows in turn, cache of 256"),
            "beeline",
            "cycles a packet",
            Better::Lower,
            &[per],
        );
        shown.row(Kind::Counted, &row)?;
    }
    Ok(())
}
