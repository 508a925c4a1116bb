//! `beeline bench`: what every benchmark shares.
//!
//! A benchmark measures its subject and a named peer in alternate turns ([`turns::alternate`]), on
//! the same cores, and reports the ratio with the repetitions behind it ([`report::Report`]): a
//! table, JSON lines, a plot. `--quick` is a tiny setting that the tests run, so that no benchmark
//! rots; its figures mean nothing.

pub mod direct;
pub mod documents;
pub mod environment;
pub mod fabric;
pub mod host;
pub mod kv;
pub mod log;
pub mod nf;
pub mod objects;
pub mod plot;
pub mod ports;
pub mod redis;
pub mod report;
pub mod sockets;
pub mod turns;

use std::path::PathBuf;

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// What every benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchOptions {
    /// Turns each contender gets: 3 unless said otherwise, 7 with --full.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repetitions: Option<u32>,
    /// As long as it takes for figures to keep: more turns, more data.
    #[arg(long, conflicts_with = "quick")]
    pub full: bool,
    /// Write a picture of the ratios to this PNG file.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// A tiny setting that only shows that the benchmark runs.
    #[arg(long)]
    pub quick: bool,
}

impl BenchOptions {
    /// Turns to take: as told, or by the setting; never more than two with `--quick`.
    pub fn turns(&self) -> u32 {
        let turns = self.repetitions.unwrap_or(if self.full { 7 } else { 3 });
        if self.quick { turns.min(2) } else { turns }
    }

    /// `told`, or else `full` with `--full` and `usual` without.
    pub fn amount<T>(&self, told: Option<T>, full: T, usual: T) -> T {
        told.unwrap_or(if self.full { full } else { usual })
    }

    /// `full`, or `quick` with `--quick`.
    pub fn size<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}

/// `beeline bench`.
#[derive(Debug, clap::Subcommand)]
pub enum BenchCommand {
    /// The physical limits of this machine: cache line, memory copy, TCP, disk.
    #[command(after_help = "Examples:\n  beeline bench host\n  \
                            beeline bench host --repetitions 15 --plot host.png")]
    Host(host::HostArguments),
    /// Each fabric provider against the machine's own limit: cache line, memory copy, bare TCP.
    #[command(after_help = "Examples:\n  beeline bench fabric\n  \
                            beeline bench fabric --providers shm --json --plot fabric.png")]
    Fabric(fabric::FabricArguments),
    /// The direct store over shared memory, beside Redis, memcached and BOOM.
    #[command(after_help = "Examples:\n  beeline bench direct\n  \
                            beeline bench direct --parts rate,peers --json\n  \
                            beeline bench direct --parts model --plot model.png\n  \
                            beeline bench direct --full --plot direct.png")]
    Direct(direct::DirectArguments),
    /// The document store over fabric beside the MongoDB wire: four operations, records, connections.
    #[command(after_help = "Examples:\n  beeline bench documents\n  \
                            beeline bench documents --parts latency --provider tcp --json\n  \
                            beeline bench documents --parts connections --connections 100,200 --plot documents.png\n  \
                            beeline bench documents --parts peers --peers java,nothing --client-cores 3")]
    Documents(documents::DocumentsArguments),
    /// BOOM against its two baselines over the same fabric and store; recovery.
    #[command(after_help = "Examples:\n  beeline bench kv --plot kv.png\n  \
                            beeline bench kv --parts headline,latency --json\n  \
                            beeline bench kv --parts recovery --recover 1000000")]
    Kv(kv::KvArguments),
    /// User-space sockets against kernel TCP, Unix sockets, pipes and a bare ring; or, over packets, against
    /// kernel TCP between two network namespaces and the bare window.
    #[command(after_help = "Examples:\n  beeline bench sockets\n  \
                            beeline bench sockets --parts data,core --repetitions 7 --json\n  \
                            beeline bench sockets --lane packets --parts data,idle\n  \
                            beeline bench sockets --full --plot sockets.png")]
    Sockets(sockets::SocketsArguments),
    /// One of the two processes of `bench sockets`.
    #[command(hide = true)]
    SocketsPeer(sockets::SocketsPeerArguments),
    /// The replicated log: commits, other ways to replicate, etcd, fail-over, catch-up.
    #[command(after_help = "Examples:\n  beeline bench log --plot log.png\n  \
                            beeline bench log --parts latency,variants --members 3 --json")]
    Log(log::LogArguments),
    /// A member that `bench log` ends.
    #[command(hide = true)]
    LogMember(log::MemberArguments),
    /// Network functions in memory: rates by rules and flows, inserts, compile time, cycles.
    #[command(after_help = "Examples:\n  beeline bench nf\n  \
                            beeline bench nf --parts memory,rules --repetitions 7 --json")]
    Nf(nf::NfArguments),
    /// The other end of `bench fabric`.
    #[command(hide = true)]
    FabricPeer(fabric::PeerArguments),
    /// The process whose system calls `bench fabric` counts.
    #[command(hide = true)]
    FabricCalls(fabric::CallsArguments),
    /// The object store against a memory copy, Redis and Plasma; transfers between two nodes.
    #[command(after_help = "Examples:\n  beeline bench objects\n  \
                            beeline bench objects --parts fetch --providers shm --sizes 64KiB,1MiB")]
    Objects(objects::ObjectsArguments),
    /// Clients of `bench objects`, in a process of their own.
    #[command(hide = true)]
    ObjectsClients(objects::ClientsArguments),
    /// The Redis door against redis-server, one core each, persistence matched.
    #[command(
        after_help = "Examples:\n  beeline bench redis --persistence off --pipeline 1,16\n  \
                            beeline bench redis --data /mnt/disk --json --plot redis.png"
    )]
    Redis(redis::RedisArguments),
}

/// The command.
pub fn run(command: &BenchCommand, output: Output) -> Result<Exit, Failure> {
    match command {
        BenchCommand::Host(arguments) => host::run(arguments, output),
        BenchCommand::Fabric(arguments) => fabric::run(arguments, output),
        BenchCommand::Direct(arguments) => direct::run(arguments, output),
        BenchCommand::Documents(arguments) => documents::run(arguments, output),
        BenchCommand::Kv(arguments) => kv::run(arguments, output),
        BenchCommand::Log(arguments) => log::run(arguments, output),
        BenchCommand::Nf(arguments) => nf::run(arguments, output),
        BenchCommand::LogMember(arguments) => log::run_member(arguments),
        BenchCommand::FabricPeer(arguments) => fabric::run_peer(arguments),
        BenchCommand::FabricCalls(arguments) => fabric::run_calls(arguments),
        BenchCommand::Sockets(arguments) => sockets::run(arguments, output),
        BenchCommand::SocketsPeer(arguments) => sockets::run_peer(arguments),
        BenchCommand::Objects(arguments) => objects::run(arguments, output),
        BenchCommand::ObjectsClients(arguments) => objects::run_clients(arguments),
        BenchCommand::Redis(arguments) => redis::run(arguments, output),
    }
}

/// Shows a finished report as asked.
pub fn finish(
    report: &report::Report,
    options: &BenchOptions,
    output: Output,
) -> Result<Exit, Failure> {
    report.show(output)?;
    if let Some(path) = &options.plot {
        plot::draw(report, path)?;
        output.note(format!("plot written to {}", path.display()));
    }
    Ok(Exit::Done)
}
