//! `beeline bench objects`: the object store beside a memory copy, Redis and Plasma; transfers
//! between two nodes by protocol, provider and size.
//!
//! The stores run in this process, the peers are started from packages. One client each; a turn is
//! as many calls as fit its time, and only the calls count: making room for them does not.

mod fetch;
mod local;
mod peers;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::report::Report;
use super::{BenchOptions, finish};
use crate::config::Knob as _;
use crate::config::values::Size;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct ObjectsArguments {
    /// Parts to run.
    #[arg(long, value_name = "PARTS", value_delimiter = ',', default_value = "local,fetch")]
    pub parts: Vec<Part>,
    /// Sizes of objects: 1 KiB to 64 MiB unless said otherwise, to 1 GiB with --full.
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = Size::parse)]
    pub sizes: Vec<Size>,
    /// Providers of the fetch part.
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "shm,ntb,tcp",
        value_parser = ["shm", "ntb", "tcp"]
    )]
    pub providers: Vec<String>,
    /// A peer of the local part; left out where it is absent.
    #[arg(long, value_name = "PROGRAM", default_value = "redis-server")]
    pub redis_server: PathBuf,
    /// Python with pyarrow 11, which has Plasma; left out where it is absent.
    #[arg(long, value_name = "PROGRAM", default_value = "target/clients-venv/bin/python")]
    pub python: PathBuf,
    /// Milliseconds of a turn.
    #[arg(long, default_value_t = 250)]
    pub turn_ms: u64,
    #[command(flatten)]
    pub options: BenchOptions,
}

/// Parts of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// put, get and delete on one node, beside other stores.
    Local,
    /// Transfers between two nodes.
    Fetch,
}

/// What every part needs.
struct Bench<'a> {
    arguments: &'a ObjectsArguments,
    options: &'a BenchOptions,
    output: Output,
    sizes: Vec<u64>,
    turn: Duration,
}

/// The command.
pub fn run(arguments: &ObjectsArguments, output: Output) -> Result<Exit, Failure> {
    let options = &arguments.options;
    let sizes: Vec<u64> = if !arguments.sizes.is_empty() {
        arguments.sizes.iter().map(|size| size.0).collect()
    } else if options.quick {
        vec![1 << 10, 1 << 20]
    } else {
        let last = if options.full { 30 } else { 26 };
        (10..=last).filter(|power| power % 4 == 2 || *power == 20).map(|power| 1 << power).collect()
    };
    let turn = Duration::from_millis(options.size(arguments.turn_ms.max(1), 5));
    let bench = Bench { arguments, options, output, sizes, turn };
    let mut report = Report::new("objects", arguments.providers.join(", "));
    for part in &arguments.parts {
        match part {
            Part::Local => local::measure(&bench, &mut report)?,
            Part::Fetch => fetch::measure(&bench, &mut report)?,
        }
    }
    finish(&report, options, output)
}

/// "1 KiB", "64 MiB".
fn size_name(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 1 << 30 => format!("{} GiB", bytes >> 30),
        _ if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        _ => format!("{} KiB", bytes >> 10),
    }
}

/// Calls a second, of `batch` that does so many calls in the time it tells, until `turn` is over.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn rate(
    turn: Duration,
    mut batch: impl FnMut() -> anyhow::Result<(u64, Duration)>,
) -> anyhow::Result<f64> {
    let start = Instant::now();
    let (mut calls, mut took) = (0, Duration::ZERO);
    while calls == 0 || start.elapsed() < turn {
        let (more, time) = batch()?;
        calls += more;
        took += time;
    }
    Ok(calls as f64 / took.as_secs_f64().max(1e-9))
}

/// Objects of one batch: few where they are large, so that a store has room for all.
fn in_batch(size: u64) -> u64 {
    ((32 << 20) / size.max(1)).clamp(1, 64)
}
