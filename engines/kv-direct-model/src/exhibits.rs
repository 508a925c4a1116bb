//! Every exhibit of the paper's evaluation that is in scope, with the paper's value beside the model's.
//!
//! Source: spec/kv-direct.md 8.

use beeline_env::Randomness;
use beeline_kv_direct::processor_of;

use crate::baselines::{Cuckoo, Hopscotch, Shape, measure};
use crate::cache::{CachedMemory, Counts};
use crate::dispatch::{PAIRS, SHARES, SPEEDS, TABLE_A, TABLE_B};
use crate::dispatch::{gain_over_partitioning, optimal_ratio};
use crate::dma;
use crate::index::{Filled, Filling, Sizes, largest_index, tune};
use crate::pipeline::{Change, Zipf, with_engine, with_stalls};
use crate::platform::{CLOCK_HZ, DRAM_BYTES, LINKS, NETWORK_SECONDS, PCIE_BYTES};
use crate::wire::{Way, puts_a_second, vector_rate};

/// One value of one exhibit.
#[derive(Clone, Debug, PartialEq)]
pub struct Exhibit {
    /// As the paper numbers it.
    pub name: &'static str,
    /// What was varied.
    pub case: String,
    /// Of both values.
    pub unit: &'static str,
    /// Whether more is better.
    pub more_is_better: bool,
    /// Here.
    pub model: f64,
    /// There, where the paper gives a number.
    pub paper: Option<f64>,
}

/// Ratios up to this, or down to its inverse, are near.
const NEAR: f64 = 1.2;

/// Why a value is not near the paper's: exhibit, beginning of the case, reason.
const REASONS: [(&str, &str, &str); 2] = [
    (
        "table 5.3",
        "one key per element",
        "the paper's figure is 261 million keys of 8 bytes a second, more than one a cycle of its clock",
    ),
    (
        "figure 5.19",
        "long tail, merged",
        "few pairs here, billions there: the hottest keys take a larger part of a long tail",
    ),
];

impl Exhibit {
    /// The model's value over the paper's.
    #[must_use]
    pub fn ratio(&self) -> Option<f64> {
        self.paper.map(|paper| self.model / paper)
    }

    /// "near" where the model's value is within a fifth of the paper's, else why it is not.
    #[must_use]
    pub fn judgement(&self) -> Option<&'static str> {
        let ratio = self.ratio()?;
        if (NEAR.recip()..=NEAR).contains(&ratio) {
            return Some("near");
        }
        let known = REASONS
            .iter()
            .find(|(name, case, _)| *name == self.name && self.case.starts_with(case));
        Some(known.map_or(UNEXPLAINED, |(.., reason)| reason))
    }
}

/// The judgement on a deviation without a known reason.
pub const UNEXPLAINED: &str = "apart, unexplained";

/// How much work the figures are made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Memory of the tables, bytes.
    pub memory_bytes: u64,
    /// Operations of each run by the clock.
    pub operations: u64,
}

impl Effort {
    /// Some minutes.
    pub const USUAL: Self = Self { memory_bytes: 16 << 20, operations: 1_000_000 };
    /// For tests.
    pub const QUICK: Self = Self { memory_bytes: 8 << 20, operations: 60_000 };
}

/// Hands out every exhibit as soon as it is computed.
///
/// Errors: the kernel has no memory for the tables.
pub fn all(effort: Effort, show: &mut dyn FnMut(Exhibit)) -> std::io::Result<()> {
    let mut give = |name, case: String, unit, more, model, paper| {
        show(Exhibit { name, case, unit, more_is_better: more, model, paper });
    };
    links(effort, &mut give);
    index(effort, &mut give)?;
    atomics(effort, &mut give);
    tables(&mut give);
    dispatched(effort, &mut give)?;
    sizes(effort, &mut give)?;
    network(&mut give);
    many_cards(&mut give);
    Ok(())
}

type Give<'a> = &'a mut dyn FnMut(&'static str, String, &'static str, bool, f64, Option<f64>);

fn links(effort: Effort, give: Give<'_>) {
    let run = dma::read(dma::Limits::default(), effort.operations, 1, |_| {});
    let name = "figure 5.5";
    give(name, "random reads of 64 B, one link".to_owned(), "op/s", true, run.rate, Some(60e6));
    give(name, "time of a read".to_owned(), "us", false, run.mean_read * 1e6, Some(1.05));
}

fn index(effort: Effort, give: Give<'_>) -> std::io::Result<()> {
    let memory_bytes = effort.memory_bytes;
    // A test has time for some of the points only.
    let quick = effort == Effort::QUICK;
    let references = [(5, [1.03, 1.13, 1.37]), (10, [1.10, 1.18, 1.42]), (15, [1.25, 1.38, 1.77])];
    for (pair_bytes, expected) in references.into_iter().skip(usize::from(quick)) {
        let points = if quick { 1 } else { 3 };
        for (utilisation, expected) in [0.50, 0.55, 0.60].into_iter().zip(expected).take(points) {
            if let Some(chosen) = tune(memory_bytes, Sizes::one(pair_bytes), utilisation)? {
                let case = format!("GET {pair_bytes} B, {:.0}% full", utilisation * 100.0);
                give("figure 5.8", case, "accesses", false, chosen.costs.get, Some(expected));
            }
        }
    }
    let sizes = Sizes { least: 5, most: 40 };
    for inline_threshold in if quick { &[10][..] } else { &[10, 15, 20, 25] } {
        for &utilisation in if quick { &[0.2][..] } else { &[0.1, 0.2, 0.3, 0.4, 0.5] } {
            let filling = Filling {
                memory_bytes,
                sizes,
                utilisation,
                index_permille: 500,
                inline_threshold: *inline_threshold,
            };
            let Some(mut filled) = Filled::new(&filling)? else { continue };
            let case = format!(
                "GET 5 to 40 B, index 50%, inline up to {inline_threshold} B, {:.0}% full",
                utilisation * 100.0
            );
            give("figure 5.8", case, "accesses", false, filled.costs().get, None);
        }
    }
    for &utilisation in if quick { &[0.4][..] } else { &[0.2, 0.3, 0.4, 0.5, 0.55] } {
        let full = format!("{:.0}% full", utilisation * 100.0);
        let name = "figure 5.9";
        if let Some(chosen) = tune(memory_bytes, Sizes::one(10), utilisation)? {
            let costs = chosen.costs;
            let half = |value| (utilisation <= 0.5).then_some(value);
            give(name, format!("GET 10 B, {full}"), "accesses", false, costs.get, half(1.0));
            give(name, format!("PUT 10 B, {full}"), "accesses", false, costs.put, half(2.0));
            let case = format!("PUT of a new key 10 B, {full}");
            give(name, case, "accesses", false, costs.insert, None);
            let case = format!("PUT of a new key 10 B, {full}, deviation");
            give(name, case, "accesses", false, costs.insert_spread, None);
        }
        let shape = Shape::for_utilisation((5, 5), memory_bytes, utilisation);
        let cuckoo = measure(&mut Cuckoo::new(shape)?, shape);
        let hopscotch = measure(&mut Hopscotch::new(shape)?, shape);
        for (other, found) in [("cuckoo", cuckoo), ("hopscotch", hopscotch)] {
            let Some(costs) = found else { continue };
            give(name, format!("{other} GET, {full}"), "accesses", false, costs.get, None);
            give(
                name,
                format!("{other} PUT of a new key, {full}"),
                "accesses",
                false,
                costs.insert,
                None,
            );
            let case = format!("{other} PUT of a new key, {full}, deviation");
            give(name, case, "accesses", false, costs.insert_spread, None);
        }
    }
    for &index_permille in if quick { &[400][..] } else { &[200, 400, 600, 800] } {
        let filling = Filling {
            memory_bytes,
            sizes: Sizes::one(10),
            utilisation: 0.3,
            index_permille,
            inline_threshold: 10,
        };
        let share = format!("index {}%", index_permille / 10);
        if let Some(mut filled) = Filled::new(&filling)? {
            let get = filled.costs().get;
            give(
                "figure 5.10",
                format!("GET 10 B, 30% full, {share}"),
                "accesses",
                false,
                get,
                None,
            );
        }
        let mut most = 0;
        for percent in (5..95).step_by(5) {
            let utilisation = f64::from(percent) / 100.0;
            if Filled::new(&Filling { utilisation, ..filling })?.is_none() {
                break;
            }
            most = percent;
        }
        let case = format!("most memory used, 10 B, {share}");
        give("figure 5.11", case, "%", true, f64::from(most), None);
    }
    Ok(())
}

fn atomics(effort: Effort, give: Give<'_>) {
    let operations = effort.operations;
    let one = with_engine(operations, Change::Atomic, || (1, true)).rate;
    let stalling = with_stalls(operations / 50, || (1, true));
    let name = "figure 5.15a";
    give(name, "atomics on one key".to_owned(), "op/s", true, one, Some(180e6));
    give(name, "the same, stalling".to_owned(), "op/s", true, stalling, Some(0.94e6));
    give(name, "engine over stalling".to_owned(), "times", true, one / stalling, Some(191.0));
    for keys in [10, 100, 1000] {
        let mut random = Randomness::new(keys);
        let rate = with_stalls(operations / 10, || (random.below(keys), true));
        give(name, format!("{keys} keys, stalling"), "op/s", true, rate, None);
    }
    let zipf = Zipf::new(1_000_000, 0.99);
    for puts in [0, 5, 50, 100] {
        let mut random = Randomness::new(puts);
        let mut draw = || (zipf.next(&mut random), random.chance(puts, 100));
        let engine = with_engine(operations, Change::Put, &mut draw).rate;
        let stalls = with_stalls(operations / 10, &mut draw);
        let name = "figure 5.15b";
        give(name, format!("long tail, {puts}% PUT"), "op/s", true, engine, None);
        give(name, format!("long tail, {puts}% PUT, stalling"), "op/s", true, stalls, None);
    }
}

fn tables(give: Give<'_>) {
    for (row, speeds) in SPEEDS.into_iter().enumerate() {
        for (column, share) in SHARES.into_iter().enumerate() {
            let case = format!("speeds {speeds}, memory 1/{}", 1.0 / share);
            let ratio = optimal_ratio(speeds, share, PAIRS);
            give("table A", case.clone(), "share", true, ratio, Some(TABLE_A[row][column]));
            let gain = gain_over_partitioning(speeds, share, PAIRS);
            give("table B", case, "times", true, gain, Some(TABLE_B[row][column]));
        }
    }
}

/// Lines that one operation costs each memory.
struct PerOperation {
    counts: Counts,
    operations: f64,
}

impl PerOperation {
    fn host(&self) -> f64 {
        (self.counts.host_reads + self.counts.host_writes) as f64 / self.operations
    }

    fn card(&self) -> f64 {
        (self.counts.card_reads + self.counts.card_writes) as f64 / self.operations
    }

    /// Operations a second that both memories and the clock let through; `executed` of each operation go to
    /// memory, the rest is forwarded in the station.
    fn rate(&self, executed: f64) -> f64 {
        let by = |bytes: f64, lines: f64| {
            if lines > 0.0 { bytes / 64.0 / (lines * executed) } else { f64::MAX }
        };
        let reads = self.counts.host_reads as f64 / self.operations * executed;
        CLOCK_HZ
            .min(dma::operations_a_second(reads, 0.0, LINKS))
            .min(by(PCIE_BYTES, self.host()))
            .min(by(DRAM_BYTES, self.card()))
    }
}

/// `gets` percent of GETs on keys that `draw` names, with a share of memory cached.
fn run_dispatched(
    filled: &mut Filled,
    memory_bytes: u64,
    ratio: f64,
    gets: u64,
    operations: u64,
    draw: &mut dyn FnMut(&mut Randomness) -> u64,
) -> PerOperation {
    let mut random = Randomness::new(11);
    let mut memory = CachedMemory::new((memory_bytes / 64) as usize, ratio);
    let mut accesses = Vec::new();
    let mut before = Counts::default();
    // The first half warms the cache.
    for operation in 0..operations {
        if operation == operations / 2 {
            before = memory.counts();
        }
        let number = draw(&mut random) % filled.pairs();
        if random.chance(gets, 100) {
            filled.get(number, &mut accesses);
        } else {
            filled.put(number, &mut accesses);
        }
        for access in accesses.drain(..) {
            let first = access.unit as usize / 2;
            let last = (access.unit as usize * 32 + access.length.max(1) as usize - 1) / 64;
            for line in first..=last {
                // Nothing damages this memory: a line is always good.
                let _ = if access.write {
                    memory.write(line, [1; 8]).is_some()
                } else {
                    memory.read(line).is_some()
                };
            }
        }
    }
    let after = memory.counts();
    let counts = Counts {
        host_reads: after.host_reads - before.host_reads,
        host_writes: after.host_writes - before.host_writes,
        card_reads: after.card_reads - before.card_reads,
        card_writes: after.card_writes - before.card_writes,
        cacheable: after.cacheable - before.cacheable,
        hits: after.hits - before.hits,
        accesses: after.accesses - before.accesses,
    };
    PerOperation { counts, operations: (operations - operations / 2) as f64 }
}

fn dispatched(effort: Effort, give: Give<'_>) -> std::io::Result<()> {
    let memory_bytes = effort.memory_bytes;
    let filling = Filling {
        memory_bytes,
        sizes: Sizes::one(10),
        utilisation: 0.5,
        index_permille: 0,
        inline_threshold: 10,
    };
    let Some(index_permille) = largest_index(&filling)? else { return Ok(()) };
    let Some(mut filled) = Filled::new(&Filling { index_permille, ..filling })? else {
        return Ok(());
    };
    let pairs = filled.pairs();
    let zipf = Zipf::new(pairs, 0.99);
    // Per operation on the long tail, by share of GETs: what goes to memory, the station's write-backs included.
    let executed = |gets: u64| {
        let mut random = Randomness::new(gets);
        let run = with_engine(effort.operations / 4, Change::Put, || {
            (zipf.next(&mut random), !random.chance(gets, 100))
        });
        1.0 - run.forwarded + run.write_backs
    };
    for (tail, papers) in [(false, [None, None]), (true, [Some(180e6), Some(180e6)])] {
        let name = "figure 5.17";
        let words = if tail { "long tail" } else { "uniform" };
        let mut draw = |random: &mut Randomness| {
            if tail { zipf.next(random).wrapping_mul(0x9e37_79b1) } else { random.below(pairs) }
        };
        let mut run = |ratio, gets| {
            run_dispatched(&mut filled, memory_bytes, ratio, gets, effort.operations, &mut draw)
        };
        for (gets, paper) in [(100, papers[0]), (95, papers[1]), (50, None), (0, None)] {
            let executed = if tail { executed(gets) } else { 1.0 };
            let rate = run(0.5, gets).rate(executed);
            give(name, format!("{words}, {gets}% GET, l 0.5"), "op/s", true, rate, paper);
            if gets == 100 {
                let alone = run(0.0, gets).rate(executed);
                give(name, format!("{words}, {gets}% GET, PCIe only"), "op/s", true, alone, None);
                let all = run(1.0, gets).rate(executed);
                give(name, format!("{words}, {gets}% GET, cache all"), "op/s", true, all, None);
            }
        }
        if tail {
            let counts = run(0.5, 95).counts;
            let served = counts.hits as f64 / counts.accesses as f64 * 100.0;
            give(
                name,
                "long tail, served by the card, l 0.5".to_owned(),
                "%",
                true,
                served,
                Some(30.0),
            );
            let mut random = Randomness::new(12);
            let merged = with_engine(effort.operations / 4, Change::Put, || {
                (zipf.next(&mut random), random.chance(1, 2))
            });
            give(
                "figure 5.19",
                "long tail, merged by the engine, 50% GET".to_owned(),
                "%",
                true,
                merged.forwarded * 100.0,
                Some(15.0),
            );
            let counts = run(0.6, 95).counts;
            let hits = counts.hits as f64 / counts.cacheable as f64 * 100.0;
            give(
                "figure 5.19",
                "long tail, hit rate, l 0.6".to_owned(),
                "%",
                true,
                hits,
                Some(60.0),
            );
        }
    }
    Ok(())
}

/// Operations a second by size of pairs, and the times of operations in the card under full load.
fn sizes(effort: Effort, give: Give<'_>) -> std::io::Result<()> {
    let memory_bytes = effort.memory_bytes;
    let quick = effort == Effort::QUICK;
    for &bytes in if quick { &[10][..] } else { &[5, 10, 15, 25, 62, 126, 254] } {
        let filling = Filling {
            memory_bytes,
            sizes: Sizes::one(bytes),
            utilisation: 0.5,
            index_permille: 0,
            inline_threshold: if bytes <= 50 { bytes } else { 0 },
        };
        let Some(index_permille) = largest_index(&filling)? else { continue };
        let Some(mut filled) = Filled::new(&Filling { index_permille, ..filling })? else {
            continue;
        };
        let pairs = filled.pairs();
        let zipf = Zipf::new(pairs, 0.99);
        for tail in [false, true] {
            let words = if tail { "long tail" } else { "uniform" };
            for gets in if quick { &[100, 0][..] } else { &[100, 95, 50, 0] } {
                let mut random = Randomness::new(13);
                let executed = if tail {
                    let run = with_engine(effort.operations / 4, Change::Put, || {
                        (zipf.next(&mut random), !random.chance(*gets, 100))
                    });
                    1.0 - run.forwarded + run.write_backs
                } else {
                    1.0
                };
                let mut draw = |random: &mut Randomness| {
                    if tail {
                        zipf.next(random).wrapping_mul(0x9e37_79b1)
                    } else {
                        random.below(pairs)
                    }
                };
                let count = effort.operations / 2;
                let run = run_dispatched(&mut filled, memory_bytes, 0.6, *gets, count, &mut draw);
                // A value crosses the network once, in the request or in the reply.
                let rate = run.rate(executed).min(puts_a_second(bytes, 64));
                let paper = match (bytes, tail, gets) {
                    (10, true, 100) => Some(180e6),
                    (10, true, 0) => Some(114e6),
                    _ => None,
                };
                let case = format!("{bytes} B, {words}, {gets}% GET");
                give("figure 5.19", case, "op/s", true, rate, paper);
            }
        }
        if bytes != 10 {
            continue;
        }
        for (tail, gets) in [(false, 100), (false, 0), (true, 100), (true, 0)] {
            let mut random = Randomness::new(14);
            let run = with_engine(effort.operations / 4, Change::Put, || {
                let key = if tail { zipf.next(&mut random) } else { random.below(pairs) };
                (key, gets == 0)
            });
            let words = if tail { "long tail" } else { "uniform" };
            for (within, seconds) in [(50, run.times[0]), (95, run.times[1])] {
                let case = format!("{words}, {gets}% GET, {within} in 100 within");
                let time = (seconds + NETWORK_SECONDS) * 1e6;
                give("figure 5.20", case, "us", false, time, None);
            }
        }
    }
    Ok(())
}

fn network(give: Give<'_>) {
    for pair_bytes in [10, 62] {
        let gain = puts_a_second(pair_bytes, 64) / puts_a_second(pair_bytes, 1);
        let paper = (pair_bytes == 10).then_some(4.0);
        give("figure 5.18", format!("batching {pair_bytes} B, 64"), "times", true, gain, paper);
    }
    let rows: [(&str, Way, [f64; 5]); 4] = [
        ("update without return", Way::WithoutReturn, [11.52; 5]),
        ("update with return", Way::WithReturn, [4.37, 4.53, 4.62, 4.66, 4.68]),
        ("one key per element", Way::KeyPerElement, [2.09; 5]),
        ("fetch to client", Way::FetchAndStore, [0.03, 0.06, 0.12, 0.24, 0.46]),
    ];
    for (words, way, papers) in rows {
        for (bytes, paper) in [64, 128, 256, 512, 1024].into_iter().zip(papers) {
            let rate = vector_rate(bytes, way) / 1e9;
            give("table 5.3", format!("{words}, {bytes} B"), "GB/s", true, rate, Some(paper));
        }
    }
}

fn many_cards(give: Give<'_>) {
    const CARDS: u32 = 10;
    // A card has one link here; its own memory takes as many accesses again, at a share of one half. A
    // GET is one access, a PUT two.
    let accesses = 2.0 * dma::operations_a_second(1.0, 0.0, 1) * f64::from(CARDS);
    let (gets, puts) = (accesses, accesses / 2.0);
    let name = "figures 5.23-5.25";
    give(name, "10 cards, GET".to_owned(), "op/s", true, gets, Some(1.22e9));
    give(name, "10 cards, PUT".to_owned(), "op/s", true, puts, Some(0.61e9));
    let zipf = Zipf::new(1_000_000, 0.99);
    let mut loads = [0.0; CARDS as usize];
    for (rank, share) in zipf.shares().enumerate() {
        loads[processor_of(&(rank as u64).to_le_bytes(), CARDS) as usize] += share;
    }
    let hottest = loads.into_iter().fold(0.0, f64::max) * f64::from(CARDS);
    give(name, "hottest of 10 over the mean".to_owned(), "times", false, hottest, Some(1.5));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exhibit_comes_out_near_the_paper() {
        let mut found: Vec<Exhibit> = Vec::new();
        all(Effort::QUICK, &mut |exhibit| found.push(exhibit)).unwrap();
        for name in [
            "figure 5.5",
            "figure 5.8",
            "figure 5.9",
            "figure 5.10",
            "figure 5.11",
            "figure 5.15a",
            "figure 5.15b",
            "figure 5.17",
            "figure 5.18",
            "figure 5.19",
            "figure 5.20",
            "figures 5.23-5.25",
            "table A",
            "table B",
            "table 5.3",
        ] {
            assert!(found.iter().any(|exhibit| exhibit.name == name), "{name} is missing");
        }
        // Ratios are judged, widely: what a model of counts can say.
        for exhibit in &found {
            let Some(paper) = exhibit.paper else { continue };
            let ratio = exhibit.model / paper;
            assert!((0.4..2.6).contains(&ratio), "{exhibit:?}");
            assert_ne!(exhibit.judgement(), Some(UNEXPLAINED), "{exhibit:?}");
        }
        let of = |case: &str| {
            let found = found.iter().find(|exhibit| exhibit.case == case);
            found.unwrap_or_else(|| panic!("no {case}")).model
        };
        assert!(of("long tail, 100% GET, l 0.5") > of("long tail, 100% GET, PCIe only"));
        assert!(of("long tail, 100% GET, l 0.5") >= of("long tail, 100% GET, cache all"));
        let gain = of("uniform, 100% GET, l 0.5") / of("uniform, 100% GET, PCIe only");
        assert!((0.8..1.25).contains(&gain), "uniform keys gain next to nothing: {gain}");
        assert!((of("hottest of 10 over the mean") - 1.5).abs() < 0.2);
    }
}
