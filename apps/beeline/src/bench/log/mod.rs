//! `beeline bench log`: the replicated log against other ways to replicate, and etcd.
//!
//! Members of the cluster are threads of this process, each with a device of its own, reached over
//! shared memory as other processes would be. The leader is turned by the measuring thread, so that
//! what is measured is its own work: followers take no part in a commit. Fail-over and catch-up
//! use processes, ended with SIGKILL or stopped.

mod etcd;
mod failover;
mod latency;
mod machine;
mod member;
mod rig;
mod variants;

use std::path::PathBuf;

use anyhow::Context as _;

use super::report::{Report, Row};
use super::turns::{online, pin};
use super::{BenchOptions, finish};
use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::Output;

pub use member::{MemberArguments, run_member};

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct LogArguments {
    /// Parts to run.
    #[arg(
        long,
        value_name = "PARTS",
        value_delimiter = ',',
        default_value = "latency,variants,throughput,etcd,failover,stopped,catchup"
    )]
    pub parts: Vec<Part>,
    /// Provider, by the URL of its device. Fail-over and catch-up use shared memory.
    #[arg(long, value_name = "URL", default_value = "shm://")]
    pub fabric: String,
    /// Members of the cluster.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_value = "3,5")]
    pub members: Vec<usize>,
    /// Sizes of commands in bytes.
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "8,32,128,512,2048")]
    pub sizes: Vec<usize>,
    /// Directory for the members' data; a folder made in it is removed afterwards.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub data: PathBuf,
    /// MiB that a follower misses in the catch-up part: 64 unless said otherwise, 1024 with --full.
    #[arg(long)]
    pub missed_mib: Option<u64>,
    /// The peer.
    #[arg(long, value_name = "PROGRAM", default_value = "etcd")]
    pub etcd: PathBuf,
    #[command(flatten)]
    pub options: BenchOptions,
}

/// Parts of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Commit latency by size, one command after another.
    Latency,
    /// One round against two, and against followers that acknowledge: the same bare memory each.
    Variants,
    /// Commits per second by commands outstanding.
    Throughput,
    /// The same beside etcd, on this machine, without waiting for the disk on either side.
    Etcd,
    /// From the end of the leader to the next commit.
    Failover,
    /// From the stop of the leader, whose memory may answer, to the next commit.
    Stopped,
    /// A follower that missed much.
    Catchup,
}

struct Bench<'a> {
    arguments: &'a LogArguments,
    options: &'a BenchOptions,
    output: Output,
}

/// The command.
pub fn run(arguments: &LogArguments, output: Output) -> Result<Exit, Failure> {
    let provider = arguments.fabric.split("://").next().unwrap_or("shm").to_owned();
    let mut report = Report::new("log", provider);
    let bench = Bench { arguments, options: &arguments.options, output };
    output.note(format!(
        "{} processors: the leader's thread on one, everybody else where the kernel puts them",
        online()
    ));
    for part in &arguments.parts {
        let rows = std::thread::scope(|scope| {
            let thread = scope.spawn(|| bench.part(*part));
            thread.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))?
        });
        let rows = rows.with_context(|| format!("part {part:?}")).or_exit(Exit::Failed)?;
        rows.into_iter().for_each(|row| report.push(row));
    }
    finish(&report, &arguments.options, output)
}

impl Bench<'_> {
    fn part(&self, part: Part) -> anyhow::Result<Vec<Row>> {
        match part {
            Part::Latency => latency::by_size(self),
            Part::Variants => variants::rows(self),
            Part::Throughput => latency::throughput(self),
            Part::Etcd => etcd::rows(self),
            Part::Failover => failover::rows(self),
            Part::Stopped => failover::stopped(self),
            Part::Catchup => failover::catch_up(self),
        }
    }

    /// The last processor, for the leader's thread; what was started before goes anywhere.
    fn pin_leader(&self) -> anyhow::Result<()> {
        pin(online().saturating_sub(1)).map(drop)
    }
}
