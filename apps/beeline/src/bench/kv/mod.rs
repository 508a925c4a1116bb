//! `beeline bench kv`: BOOM against its two baselines, over the same fabric and store.
//!
//! A node of this process serves on one processor, the client runs on another; the three protocols
//! take alternate turns against the same store. Each row of the paper's evaluation (BOOM §4) comes
//! out as a ratio, with the round trips, verbs and bytes of an operation beside it.

mod latency;
mod load;
mod recovery;
mod rig;
mod storage;

use anyhow::Context as _;

use super::report::{Report, Row};
use super::turns::pin;
use super::{BenchOptions, finish};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct KvArguments {
    /// Parts to run.
    #[arg(
        long,
        value_name = "PARTS",
        value_delimiter = ',',
        default_value = "headline,latency,ycsb,scaling,segments,space,pools,cooperative,recovery"
    )]
    pub parts: Vec<Part>,
    /// Provider, by the URL of its device.
    #[arg(long, value_name = "URL", default_value = "shm://")]
    pub fabric: String,
    /// Pairs that recovery reads: a million unless said otherwise, ten with --full.
    #[arg(long)]
    pub recover: Option<u64>,
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
}

/// What every part needs.
struct Bench<'a> {
    fabric: &'a str,
    options: &'a BenchOptions,
    output: Output,
    recover: u64,
}

/// The command.
pub fn run(arguments: &KvArguments, output: Output) -> Result<Exit, Failure> {
    let provider = arguments.fabric.split("://").next().unwrap_or("shm").to_owned();
    let mut report = Report::new("kv", provider);
    let options = &arguments.options;
    let recover = options.amount(arguments.recover, 10_000_000, 1_000_000);
    let recover = options.size(recover, recover.min(2_000));
    let bench = Bench { fabric: &arguments.fabric, options, output, recover };
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
        }
    }
}
