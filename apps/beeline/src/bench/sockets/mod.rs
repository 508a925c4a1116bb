//! `beeline bench sockets`: user-space sockets against the kernel's TCP, Unix sockets and pipes.
//!
//! Two processes, one core each where there are two: one serves, one asks and measures ([`peer`]).
//! The subject is the same program over the same TCP calls, under `beeline run`; so are the
//! programs of others ([`programs`]). A bare ring, without sockets around it, stands beside them.

mod bare;
mod budget;
mod costs;
mod many;
mod modes;
mod packet_programs;
mod packets;
mod parts;
mod peer;
mod programs;
mod wakeups;
mod window;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;

use super::host::cache_line_ping_pong_us;
use super::report::{Better, Report, Row, shown};
use super::turns::{Contender, alternate, online};
use super::{BenchOptions, finish};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct SocketsArguments {
    /// The preload library; by default the one that `beeline run` finds.
    #[arg(long, value_name = "FILE")]
    pub library: Option<PathBuf>,
    /// What carries the connections.
    #[arg(long, value_enum, default_value_t = Carrier::Rings)]
    pub lane: Carrier,
    /// What to measure; by default all that the lane has.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub parts: Vec<Part>,
    /// Seconds for all of it: 300 unless said otherwise, 1200 with --full. What does not fit does fewer rounds.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub budget: Option<u64>,
    /// What is left of it.
    #[arg(skip)]
    time: Budget,
    #[command(flatten)]
    pub options: BenchOptions,
}

/// What carries the connections that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Carrier {
    /// Rings between processes of this host.
    Rings,
    /// Packets through a memory window between two network namespaces, with a proxy in each.
    Packets,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Round trips, small sends, large sends.
    Data,
    /// Connections made, used once, and closed.
    Connections,
    /// Round trips of 2, 4 and 8 processes on one core.
    Core,
    /// Packets of 64 bytes through three processes in a row.
    Pipeline,
    /// redis-server with redis-benchmark, one request at a time, 1 and 50 connections.
    Redis,
    /// nginx with wrk, a small file, 1 and 50 connections.
    Nginx,
    /// Round trips and sends from 8 B to 1 MiB.
    Sizes,
    /// Pairs of processes that send at once, a core each as far as there are cores.
    Pairs,
    /// Round trips over 1 to 10,000 connections of one pair of processes.
    Many,
    /// A small remote procedure call.
    Rpc,
    /// What a message's time is made of.
    Breakdown,
    /// Of packets: several connections over 1, 2 and 4 partitions.
    Partitions,
    /// Of packets: round trips beside a stream of large messages.
    Isolation,
    /// Of packets: processor time of both proxies while open connections are silent.
    Idle,
    /// Of packets: round trips beside a stream, with small slots and with large ones.
    Slicing,
    /// Of packets: two threads a partition against one.
    Threads,
    /// Of packets: round trips with four copies of a byte, with two, and with none.
    Modes,
    /// Ways to wake a thread that sleeps in the kernel.
    Wakeups,
}

impl Part {
    /// Rows with one subject each.
    fn cases(self) -> u32 {
        match self {
            Self::Data | Self::Core | Self::Nginx | Self::Breakdown => 3,
            Self::Connections | Self::Pipeline | Self::Rpc => 1,
            // Of packets, which keep to no budget.
            Self::Partitions | Self::Isolation | Self::Idle | Self::Slicing => 1,
            Self::Threads | Self::Modes => 1,
            Self::Redis => 4,
            Self::Sizes => 16,
            Self::Pairs | Self::Wakeups => 2,
            Self::Many => 5,
        }
    }
}

const PARTS: [Part; 12] = [
    Part::Data,
    Part::Connections,
    Part::Core,
    Part::Pipeline,
    Part::Redis,
    Part::Nginx,
    Part::Sizes,
    Part::Pairs,
    Part::Many,
    Part::Rpc,
    Part::Breakdown,
    Part::Wakeups,
];

/// What the two processes do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Work {
    /// 8 bytes there and back, one at a time.
    PingPong,
    /// Sends of 8 bytes, as fast as they go.
    Messages,
    /// Sends of 1 MiB, as fast as they go.
    Bulk,
    /// A connection, 8 bytes there and back, the end of it; again and again.
    Connections,
    /// Packets through a row of processes.
    Pipeline,
    /// Round trips over many connections, a few at a time.
    Many,
    /// As [`Work::PingPong`], with a pause before each that is not counted.
    Pauses,
    /// As [`Work::PingPong`], both ends in one thread.
    Alone,
    /// There and back, each byte written and looked at: in buffers of the programs.
    Origin,
    /// The same in blocks of the packet lane.
    Shm,
    /// The same in the other host's memory.
    Direct,
}

impl Work {
    /// A mode of the packet lane.
    fn is_mode(self) -> bool {
        matches!(self, Self::Origin | Self::Shm | Self::Direct)
    }
}

/// How they are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Transport {
    /// TCP on loopback.
    Tcp,
    /// A Unix socket.
    Unix,
    /// Two pipes.
    Pipe,
}

/// One of the two processes.
#[derive(Clone, Debug, clap::Args)]
pub struct SocketsPeerArguments {
    /// What to do.
    #[arg(long, value_enum)]
    pub work: Work,
    /// How to be connected.
    #[arg(long, value_enum)]
    pub transport: Transport,
    /// How often.
    #[arg(long)]
    pub rounds: u64,
    /// Serve; otherwise ask, at the address in this argument's absence started by ourselves.
    #[arg(long)]
    pub serve: bool,
    /// Both on one core.
    #[arg(long)]
    pub one_core: bool,
    /// Bytes of a message.
    #[arg(long, default_value_t = 8)]
    pub size: usize,
    /// Bytes of an answer; left out: as many as of a message.
    #[arg(long)]
    pub answer: Option<usize>,
    /// Connections of [`Work::Many`].
    #[arg(long, default_value_t = 1)]
    pub connections: usize,
    /// Where a stage of a row sends its packets.
    #[arg(long)]
    pub next: Option<String>,
    /// Where to serve TCP.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: String,
    /// Whom to ask; left out: a server of its own.
    #[arg(long)]
    pub to: Option<String>,
    /// Say also what the process cost: nanoseconds of processor time, how often it slept and was displaced, and bytes
    /// that it copied for a lane.
    #[arg(long)]
    pub costs: bool,
    /// By the packet lane's own calls, without the preload library.
    #[arg(long)]
    pub by_lane: bool,
}

impl SocketsPeerArguments {
    /// Connections that the server takes, one after the other.
    fn conversations(&self) -> u64 {
        if self.work == Work::Connections { self.rounds } else { 1 }
    }
}

const PACKET_PARTS: [Part; 11] = [
    Part::Data,
    Part::Sizes,
    Part::Breakdown,
    Part::Partitions,
    Part::Isolation,
    Part::Idle,
    Part::Slicing,
    Part::Threads,
    Part::Modes,
    Part::Redis,
    Part::Nginx,
];

const BULK: usize = 1 << 20;
const PACKET: usize = 64;

use budget::Budget;
pub use peer::run_peer;

fn name(value: impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The command.
pub fn run(arguments: &SocketsArguments, output: Output) -> Result<Exit, Failure> {
    let options = &arguments.options;
    let mut report = Report::new("sockets", "none");
    if arguments.lane == Carrier::Packets {
        let parts = chosen(&arguments.parts, &PACKET_PARTS)?;
        packets::run(arguments, parts, &mut report, output)?;
        return finish(&report, options, output);
    }
    let parts = chosen(&arguments.parts, &PARTS)?;
    let seconds = options.amount(arguments.budget, 1200, 300);
    let cases = parts.iter().map(|part| part.cases()).sum();
    let time = Budget::new(Duration::from_secs(seconds), cases);
    let arguments = &SocketsArguments { time, ..arguments.clone() };
    for part in parts {
        match part {
            Part::Data => data(arguments, &mut report, output)?,
            Part::Connections => connections(arguments, &mut report, output)?,
            Part::Core => one_core(arguments, &mut report, output)?,
            Part::Pipeline => pipeline(arguments, &mut report, output)?,
            Part::Redis => programs::redis(arguments, &mut report, output)?,
            Part::Nginx => programs::nginx(arguments, &mut report, output)?,
            Part::Sizes => parts::sizes(arguments, &mut report, output)?,
            Part::Pairs => parts::pairs(arguments, &mut report, output)?,
            Part::Many => parts::many(arguments, &mut report, output)?,
            Part::Rpc => parts::rpc(arguments, &mut report, output)?,
            Part::Breakdown => parts::breakdown(arguments, &mut report, output)?,
            // Refused before.
            Part::Partitions | Part::Isolation | Part::Idle | Part::Slicing => {}
            Part::Threads | Part::Modes => {}
            Part::Wakeups => wakeups::wakeups(arguments, &mut report, output)?,
        }
    }
    finish(&report, options, output)
}

/// The parts that were asked for, or all; one that the lane has not is refused by its name.
fn chosen<'a>(asked: &'a [Part], all: &'a [Part]) -> Result<&'a [Part], Failure> {
    if let Some(other) = asked.iter().find(|part| !all.contains(part)) {
        let names: Vec<String> = all.iter().map(|&part| name(part)).collect();
        let error = anyhow::anyhow!(
            "the part {} is not measured over this lane; it has {}",
            name(*other),
            names.join(", ")
        );
        return Err(Failure::new(Exit::Usage, error));
    }
    Ok(if asked.is_empty() { all } else { asked })
}

const SUBJECT: &str = "user-space sockets";

/// One row for each contender after the first.
fn rows(
    report: &mut Report,
    output: Output,
    case: &str,
    unit: &'static str,
    better: Better,
    contenders: &[&str],
    figures: &[Vec<f64>],
) {
    for (peer, theirs) in contenders.iter().zip(figures).skip(1) {
        let row = Row::new(case, contenders[0], unit, better, &figures[0])
            .against(*peer, &figures[0], theirs)
            .beside("cores", online().min(2));
        report.push(shown(row, output));
    }
}

fn measure(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
    (case, unit, better): (&str, &'static str, Better),
    mut contenders: Vec<Contender<'_>>,
) -> anyhow::Result<()> {
    let (time, options) = (&arguments.time, &arguments.options);
    let Some(share) = time.share() else {
        output.note(format!("left out: {case}: the time of --budget is over"));
        return Ok(());
    };
    let mut turns = options.turns();
    if !options.quick {
        turns = time.fit(turns, share, || {
            for contender in &mut contenders {
                (contender.turn)().with_context(|| format!("{}, a trial", contender.name))?;
            }
            Ok(())
        })?;
    }
    let figures = alternate(turns, &mut contenders, output)?;
    time.reset();
    let names: Vec<&str> = contenders.iter().map(|contender| contender.name).collect();
    rows(report, output, case, unit, better, &names, &figures);
    Ok(())
}

fn data(arguments: &SocketsArguments, report: &mut Report, output: Output) -> anyhow::Result<()> {
    let options = &arguments.options;
    let cases = [
        (Work::PingPong, "8 B round trip", "us", Better::Lower, options.size(100_000_u64, 200)),
        (Work::Messages, "8 B sends", "op/s", Better::Higher, options.size(2_000_000, 500)),
        (Work::Bulk, "1 MiB sends", "GB/s", Better::Higher, options.size(3_000, 8)),
    ];
    for (work, case, unit, better, rounds) in cases {
        let turn = |transport, accelerated: bool| {
            // The kernel's are slower by ten times and more: fewer rounds last as long.
            let slow = !accelerated && work != Work::Bulk && !options.quick;
            let rounds = if slow { rounds / 4 } else { rounds };
            move || asker(arguments, work, transport, rounds, accelerated, false)
        };
        let mut contenders = vec![
            Contender::new(SUBJECT, turn(Transport::Tcp, true)),
            Contender::new("kernel TCP", turn(Transport::Tcp, false)),
            Contender::new("Unix socket", turn(Transport::Unix, false)),
            Contender::new("pipe", turn(Transport::Pipe, false)),
            Contender::new("bare ring", move || bare::turn(work, rounds)),
        ];
        if work == Work::PingPong {
            contenders.push(Contender::new("cache line", move || cache_line_ping_pong_us(rounds)));
        }
        measure(arguments, report, output, (case, unit, better), contenders)?;
    }
    Ok(())
}

fn connections(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    let rounds = arguments.options.size(3_000, 20);
    let turn = |transport, accelerated| {
        move || asker(arguments, Work::Connections, transport, rounds, accelerated, false)
    };
    let contenders = vec![
        Contender::new(SUBJECT, turn(Transport::Tcp, true)),
        Contender::new("kernel TCP", turn(Transport::Tcp, false)),
        Contender::new("Unix socket", turn(Transport::Unix, false)),
    ];
    let case = ("connections, 8 B there and back on each", "op/s", Better::Higher);
    measure(arguments, report, output, case, contenders)
}

fn one_core(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    for pairs in [1_usize, 2, 4] {
        let rounds = arguments.options.size(20_000, 50);
        let turn = |accelerated| {
            move || {
                std::thread::scope(|scope| {
                    let askers: Vec<_> = (0..pairs)
                        .map(|_| {
                            let work = Work::PingPong;
                            scope.spawn(move || {
                                asker(arguments, work, Transport::Tcp, rounds, accelerated, true)
                            })
                        })
                        .collect();
                    let mut sum = 0.0;
                    for asker in askers {
                        let figure = asker.join();
                        sum += figure.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
                    }
                    #[expect(clippy::cast_precision_loss, reason = "at most four")]
                    let pairs = pairs as f64;
                    Ok(sum / pairs)
                })
            }
        };
        let contenders =
            vec![Contender::new(SUBJECT, turn(true)), Contender::new("kernel TCP", turn(false))];
        let case = format!("8 B round trip, {} processes on one core", 2 * pairs);
        measure(arguments, report, output, (&case, "us", Better::Lower), contenders)?;
    }
    Ok(())
}

fn pipeline(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    let rounds = arguments.options.size(200_000, 200);
    let turn = |transport, accelerated| {
        move || asker(arguments, Work::Pipeline, transport, rounds, accelerated, false)
    };
    let contenders = vec![
        Contender::new(SUBJECT, turn(Transport::Tcp, true)),
        Contender::new("kernel TCP", turn(Transport::Tcp, false)),
        Contender::new("pipe", turn(Transport::Pipe, false)),
    ];
    let case = ("64 B packets through 3 processes in a row", "op/s", Better::Higher);
    measure(arguments, report, output, case, contenders)
}

/// `words`, under `beeline run` if asked.
fn command(
    arguments: &SocketsArguments,
    accelerated: bool,
    program: &std::ffi::OsStr,
) -> anyhow::Result<Command> {
    if !accelerated {
        return Ok(Command::new(program));
    }
    let own = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(own);
    command.args(["--quiet", "run"]);
    if let Some(library) = &arguments.library {
        command.arg("--library").arg(library);
    }
    command.arg("--").arg(program);
    Ok(command)
}

/// Runs the asking process and returns the figure it prints.
fn asker(
    arguments: &SocketsArguments,
    work: Work,
    transport: Transport,
    rounds: u64,
    accelerated: bool,
    one_core: bool,
) -> anyhow::Result<f64> {
    let more: &[String] = if one_core { &["--one-core".to_owned()] } else { &[] };
    asker_with(arguments, work, transport, rounds, accelerated, more)
}

/// As [`asker`], with further arguments for both processes.
fn asker_with(
    arguments: &SocketsArguments,
    work: Work,
    transport: Transport,
    rounds: u64,
    accelerated: bool,
    more: &[String],
) -> anyhow::Result<f64> {
    let own = std::env::current_exe().context("finding this program")?;
    let rounds = arguments.time.rounds(rounds);
    let mut command = command(arguments, accelerated, own.as_os_str())?;
    command.args(["bench", "sockets-peer", "--rounds", &rounds.to_string()]);
    command.args(["--work", &name(work), "--transport", &name(transport)]);
    command.args(more);
    let output = command.stderr(Stdio::inherit()).output().context("starting a peer")?;
    anyhow::ensure!(output.status.success(), "the asking process failed: {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("the asking process said {text:?}"))
}
