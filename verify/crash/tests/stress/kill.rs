//! Rounds of a child process that is ended in the middle: what it said was committed has to be in
//! its files, whatever number of shards opens them next.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use beeline_env::Randomness;
use beeline_kv::fault::KnownBug;
use beeline_pmem::Durability;

use crate::actor;
use crate::child::{self, Orders, THREADS};
use crate::ledger::{Effect, Ledger, Observed, Operation, Time};

#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    rounds: u64,
    killed: u64,
    operations: u64,
    pub acknowledged: u64,
    collected: u64,
    in_place: u64,
    entries: u64,
}

impl Totals {
    fn add(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.killed += other.killed;
        self.operations += other.operations;
        self.acknowledged += other.acknowledged;
        self.collected += other.collected;
        self.in_place += other.in_place;
        self.entries += other.entries;
    }
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Starts the child, ends it after `lives` (or lets it end by itself), returns what it said.
fn round(orders: &Orders, lives: Option<Duration>) -> (String, bool) {
    let (name, value) = orders.encode();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child::child", "--nocapture", "--test-threads=1"])
        .env(name, value)
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = process.stdout.take().unwrap();
    let mut complaints = process.stderr.take().unwrap();
    std::thread::scope(|scope| {
        let said = scope.spawn(move || {
            let mut said = Vec::new();
            let _ = out.read_to_end(&mut said);
            String::from_utf8_lossy(&said).into_owned()
        });
        let complained = scope.spawn(move || {
            let mut text = String::new();
            let _ = complaints.read_to_string(&mut text);
            text
        });
        if let Some(lives) = lives {
            std::thread::sleep(lives);
            let _ = process.kill();
        }
        let status = process.wait().unwrap();
        let killed = !status.success();
        let mut said = said.join().unwrap();
        let complained = complained.join().unwrap();
        if complained.contains("panicked") {
            // Its own assertions count like what its files show.
            said.push_str(&format!("\n@V {}\n", complained.replace('\n', " ")));
        }
        (said, killed)
    })
}

/// What a child says its files show at the start.
pub fn shown(words: &str) -> Observed {
    words
        .split_whitespace()
        .filter_map(child::decode_effect)
        .filter_map(|(key, effect)| match effect {
            Effect::Put { stamp, .. } => Some((key, stamp)),
            Effect::Delete => None,
        })
        .collect()
}

/// Takes what a child said into the ledger; the first thing it found wrong itself, if any.
pub fn take_in(
    said: &str,
    ledger: &mut Ledger,
    latest_ms: &mut u64,
    expected: Option<&Observed>,
    totals: &mut Totals,
) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut numbers = BTreeMap::new();
    // A line that was cut short was not said (but for a panic's, which comes last).
    let whole = said.rfind('\n').map_or("", |end| &said[..end]);
    for line in whole.lines().filter_map(|line| line.split('@').nth(1)) {
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (first, more) = rest.split_once(' ').unwrap_or((rest, ""));
        let number = || first.parse::<u64>().unwrap();
        match kind {
            "I" | "I+" => {
                let effects = more.split_whitespace().filter_map(child::decode_effect).collect();
                numbers.insert(number(), ledger.operations.len());
                let atomic = kind == "I+";
                ledger.operations.push(Operation { effects, atomic, acknowledged: None });
                totals.operations += 1;
            }
            "F" => {
                let failed: Vec<_> =
                    more.split_whitespace().filter_map(child::decode_effect).collect();
                let operation = &mut ledger.operations[numbers[&number()]];
                operation.effects.retain(|effect| !failed.contains(effect));
            }
            "A" => {
                ledger.operations[numbers[&number()]].acknowledged = Some(0);
                totals.acknowledged += 1;
            }
            "C" => *latest_ms = number(),
            "S" => {
                totals.collected += number();
                totals.in_place += more.parse::<u64>().unwrap_or(0);
            }
            "O" => {
                let shown = shown(rest);
                if expected.is_some_and(|expected| *expected != shown) {
                    wrong.push("two openings of the same files show different keys".to_owned());
                }
            }
            _ => wrong.push(line.to_owned()),
        }
    }
    wrong
}

/// Runs rounds on one pool; what was wrong, and counts.
fn run(seed: u64, rounds: u64, bug: Option<KnownBug>) -> (Totals, Vec<String>) {
    let mut randomness = Randomness::new(seed);
    let directory = tempfile::tempdir().unwrap();
    let (pool, twin) = (directory.path().join("pool"), directory.path().join("twin"));
    let mut ledger = Ledger::default();
    let mut totals = Totals::default();
    let mut latest_ms = 1_000_000_u64;
    let mut expected: Option<Observed> = None;
    let (segments, prepared) = (11 + randomness.below(14), randomness.below(2) as u32 * 2);
    for number in 0..rounds {
        let shards = 1 + randomness.below(4) as usize;
        // The clock may have jumped either way while nobody ran.
        let jump = randomness.below(1500);
        let clock_ms = (latest_ms + 500).saturating_sub(jump);
        latest_ms = latest_ms.max(clock_ms);
        let orders = Orders {
            directory: pool.clone(),
            seed: seed * 1000 + number + 1,
            shards,
            segments,
            prepared,
            clock_ms,
            milliseconds: 400,
            bug,
            durability: Durability::Process,
        };
        // Mostly in the middle of work, sometimes while it recovers, sometimes not at all.
        let lives = match randomness.below(10) {
            0 => None,
            1 => Some(randomness.below(12)),
            _ => Some(20 + randomness.below(180)),
        };
        // What the child shows at its start depends on the clock as well.
        if pool.exists() && number > 0 {
            copy(&pool, &twin);
            let orders = Orders { directory: twin.clone(), ..orders.clone() };
            match child::look(&orders, 1 + randomness.below(4) as usize) {
                Ok((observed, entries)) => {
                    let time = Time { now_ms: clock_ms, latest_ms };
                    let keys = actor::all_keys(THREADS);
                    let wrong = ledger.violations(0, &observed, keys, time);
                    if !wrong.is_empty() {
                        return (totals, wrong);
                    }
                    totals.entries += entries;
                    ledger.restart(&observed, actor::all_keys(THREADS));
                    expected = Some(observed);
                }
                // A child ended before its pool was whole.
                Err(finding) if totals.acknowledged == 0 && finding.contains("pool") => {
                    std::fs::remove_dir_all(&pool).unwrap();
                    ledger = Ledger::default();
                    expected = None;
                }
                Err(finding) => return (totals, vec![finding]),
            }
        }
        let (said, killed) = round(&orders, lives.map(Duration::from_millis));
        totals.rounds += 1;
        totals.killed += u64::from(killed);
        let mut told = latest_ms;
        if !killed && lives.is_none() {
            assert!(said.contains("@S"), "a child that was let alone reports its figures: {said}");
        }
        let wrong = take_in(&said, &mut ledger, &mut told, expected.as_ref(), &mut totals);
        latest_ms = latest_ms.max(told);
        if !wrong.is_empty() {
            return (totals, wrong);
        }
    }
    (totals, Vec::new())
}

#[test]
fn what_was_acknowledged_survives_kill_9_and_nothing_deleted_comes_back() {
    let pools = match (crate::first_seed(), crate::deep()) {
        (Some(seed), _) => seed..seed + 1,
        (None, true) => 0..40,
        (None, false) => 0..2,
    };
    let rounds = if crate::deep() { 20 } else { 9 };
    let mut all = Totals::default();
    for seed in pools {
        let (totals, wrong) = run(seed, rounds, None);
        all.add(&totals);
        assert!(
            wrong.is_empty(),
            "BEELINE_SEED={seed}: {}",
            wrong[..wrong.len().min(4)].join("\n")
        );
    }
    println!("{all:?}");
    assert!(all.acknowledged > 100, "the children work: {all:?}");
}

#[test]
fn known_bugs_are_caught_by_killing() {
    // Those that show when a process ends: what was stored is there, in order.
    for bug in [KnownBug::DropTombstoneEarly, KnownBug::ForgetStale] {
        // Where children hardly get to work before their end, it takes more of them.
        let caught = (0..40).find_map(|seed| run(100 + seed, 8, Some(bug)).1.into_iter().next());
        let Some(finding) = caught else { panic!("{bug:?} went unnoticed") };
        println!("{bug:?} caught: {}", finding.lines().next().unwrap_or_default());
    }
}
