//! `beeline bench kv`: BOOM against its two baselines, over the same fabric and store.
//!
//! A node of this process serves on one processor, the client runs on another; the three protocols
//! take alternate turns against the same store. Each row of the paper's evaluation (BOOM §4) comes
//! out as a ratio, with the round trips, verbs and bytes of an operation beside it.

mod backup;
mod latency;
pub(super) mod load;
mod recovery;
pub(super) mod rig;
mod storage;

use anyhow::Context as _;
use beeline_pmem::WriteBack;

use super::report::{Report, Row};
use super::turns::pin;
use super::{BenchOptions, finish};
use crate::config::Knob as _;
use crate::config::values::WriteBackWord;
use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::Output;

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct KvArguments {
    /// Parts to run.
    #[arg(
        long,
        value_name = "PARTS",
        value_delimiter = ',',
        default_value = "headline,latency,ycsb,scaling,segments,space,pools,cooperative,recovery,backup"
    )]
    pub parts: Vec<Part>,
    /// Provider, by the URL of its device.
    #[arg(long, value_name = "URL", default_value = "shm://")]
    pub fabric: String,
    /// Pairs that recovery reads: a million unless said otherwise, ten with --full.
    #[arg(long)]
    pub recover: Option<u64>,
    /// Write-back instructions to compare in the cooperative part; the first serves the part of
    /// pools. Those this processor lacks are left out.
    #[arg(
        long,
        value_name = "WORDS",
        value_delimiter = ',',
        default_value = "clwb,clflushopt,clflush",
        value_parser = WriteBackWord::parse
    )]
    pub write_back: Vec<WriteBackWord>,
    #[command(flatten)]
    pub options: BenchOptions,
}

/// Parts of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// 64 B gets and puts: latency, and rate by requests outstanding.
    Headline,
    /// Put and get latency by size.
    Latency,
    /// YCSB A, B and C.
    Ycsb,
    /// More clients.
    Scaling,
    /// Segment sizes.
    Segments,
    /// What the mixed update saves.
    Space,
    /// Kinds of memory.
    Pools,
    /// Cooperative write-back, on and off.
    Cooperative,
    /// Opening a store with many pairs.
    Recovery,
    /// Writes beside a snapshot of a large store.
    Backup,
}

/// What every part needs.
struct Bench<'a> {
    fabric: &'a str,
    options: &'a BenchOptions,
    output: Output,
    recover: u64,
    /// Instructions of this processor, at least one.
    write_back: &'a [WriteBack],
}

/// The command.
pub fn run(arguments: &KvArguments, output: Output) -> Result<Exit, Failure> {
    let provider = arguments.fabric.split("://").next().unwrap_or("shm").to_owned();
    let mut report = Report::new("kv", provider);
    let options = &arguments.options;
    let recover = options.amount(arguments.recover, 10_000_000, 1_000_000);
    let recover = options.size(recover, recover.min(2_000));
    let write_back = instructions(&arguments.write_back).or_exit(Exit::Failed)?;
    let write_back = &write_back;
    let bench = Bench { fabric: &arguments.fabric, options, output, recover, write_back };
    for part in &arguments.parts {
        let rows = std::thread::scope(|scope| {
            // The client's processor; the node keeps its shards on the first ones.
            let thread = scope.spawn(|| pin(1).and_then(|_| bench.part(*part)));
            thread.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))?
        });
        let rows = rows.with_context(|| format!("part {part:?}"))?;
        rows.into_iter().for_each(|row| report.push(row));
    }
    finish(&report, &arguments.options, output)
}

/// Those of `words` that the processor has.
fn instructions(words: &[WriteBackWord]) -> anyhow::Result<Vec<WriteBack>> {
    let here = WriteBack::available();
    let mut found = Vec::new();
    for word in words {
        let instruction = word.instruction().unwrap_or_else(WriteBack::detect);
        if here.contains(&instruction) && !found.contains(&instruction) {
            found.push(instruction);
        }
    }
    let names: Vec<&str> = here.iter().map(|instruction| instruction.name()).collect();
    let names = names.join(", ");
    anyhow::ensure!(!found.is_empty(), "--write-back: this processor has only: {names}");
    Ok(found)
}

impl Bench<'_> {
    fn part(&self, part: Part) -> anyhow::Result<Vec<Row>> {
        match part {
            Part::Headline => latency::headline(self),
            Part::Latency => latency::by_size(self),
            Part::Ycsb => latency::ycsb(self),
            Part::Scaling => latency::scaling(self),
            Part::Segments => storage::segments(self),
            Part::Space => storage::space(self),
            Part::Pools => storage::pools(self),
            Part::Cooperative => storage::cooperative(self),
            Part::Recovery => recovery::rows(self),
            Part::Backup => backup::rows(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_compared_once_each_and_only_where_they_are_here() {
        let words = [WriteBackWord::Auto, WriteBackWord::Clflush, WriteBackWord::Auto];
        let found = instructions(&words).unwrap();
        assert_eq!(found[0], WriteBack::detect());
        assert!(found.len() <= 2, "{found:?}");
        assert!(instructions(&[]).is_err());
    }
}
