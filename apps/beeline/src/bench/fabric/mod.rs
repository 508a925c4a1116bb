//! `beeline bench fabric`: each provider against the machine's own limit.
//!
//! Two processes, each kept on its own processor, connected over the provider; beside them the bare
//! thing on the same two processors: a cache line that goes to and fro, a memory copy, TCP sockets
//! that wait in the same way. Round trips are timed in blocks of [`BLOCK`] and a turn's figure is
//! the median of its blocks, so that a neighbour's time slice does not count as latency; p99 of the
//! blocks stands beside it.

mod bare;
mod calls;
mod end;
mod peer;

use std::time::Instant;

use anyhow::Context as _;

pub use bare::{cache_line, line_requests};
pub use calls::{CallsArguments, run as run_calls};
pub use peer::{PeerArguments, run as run_peer};

use super::report::{Better, Report, Row, Spread, number, shown};
use super::turns::{Contender, alternate, pin};
use super::{BenchOptions, finish, host};
use crate::exit::{Exit, Failure};
use crate::output::Output;
use bare::Waiting;
use end::{End, LARGE};
use peer::{Echo, Peer};

/// Round trips timed together.
const BLOCK: u64 = 64;

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct FabricArguments {
    /// Providers to measure.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "shm,tcp")]
    pub providers: Vec<Provider>,
    #[command(flatten)]
    pub options: BenchOptions,
}

/// Providers that can be measured here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Provider {
    /// Shared memory.
    Shm,
    /// TCP on loopback.
    Tcp,
}

impl Provider {
    fn url(self) -> &'static str {
        match self {
            Self::Shm => "shm://",
            Self::Tcp => "tcp://127.0.0.1",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

/// The command.
pub fn run(arguments: &FabricArguments, output: Output) -> Result<Exit, Failure> {
    let names: Vec<_> = arguments.providers.iter().map(|provider| provider.name()).collect();
    let mut report = Report::new("fabric", names.join(", "));
    for provider in &arguments.providers {
        let measured = std::thread::scope(|scope| {
            // A thread of its own, so that pinning it leaves the rest of the program alone.
            let thread = scope.spawn(|| {
                pin(0)?;
                match provider {
                    Provider::Shm => shm(&arguments.options, output),
                    Provider::Tcp => tcp(&arguments.options, output),
                }
            });
            thread.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))?
        });
        for row in measured.with_context(|| format!("provider {}", provider.name()))? {
            report.push(row);
        }
        if *provider == Provider::Shm {
            report.push(shown(calls::row(&arguments.options)?, output));
        }
    }
    finish(&report, &arguments.options, output)
}

/// Times `one` in blocks: median and p99 of the blocks' means, microseconds.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn blocks(rounds: u64, mut one: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<(f64, f64)> {
    let count = (rounds / BLOCK).max(1);
    let mut figures = Vec::with_capacity(usize::try_from(count)?);
    for _ in 0..count {
        let start = Instant::now();
        for _ in 0..BLOCK {
            one()?;
        }
        figures.push(start.elapsed().as_secs_f64() * 1e6 / BLOCK as f64);
    }
    figures.sort_by(f64::total_cmp);
    let last = figures.len() - 1;
    Ok((figures[last / 2], figures[last * 99 / 100]))
}

/// Rounds that `blocks` takes out of `rounds`: what the peer has to answer.
fn whole(rounds: u64) -> u64 {
    (rounds / BLOCK).max(1) * BLOCK
}

/// The p99 figures of a contender's turns, collected beside its medians.
#[derive(Default)]
struct Tails(std::cell::RefCell<Vec<f64>>);

impl Tails {
    fn keep(&self, (median, p99): (f64, f64)) -> f64 {
        self.0.borrow_mut().push(p99);
        median
    }

    fn median(&self) -> String {
        format!("{} us", number(Spread::of(&self.0.borrow()).median))
    }
}

/// One row: a subject and its peer in alternate turns.
fn versus<'a>(
    options: &BenchOptions,
    output: Output,
    subject: impl FnMut() -> anyhow::Result<f64> + 'a,
    peer: impl FnMut() -> anyhow::Result<f64> + 'a,
) -> anyhow::Result<[Vec<f64>; 2]> {
    let mut contenders = [Contender::new("fabric", subject), Contender::new("bare", peer)];
    let mut figures = alternate(options.turns(), &mut contenders, output)?.into_iter();
    Ok([figures.next().unwrap_or_default(), figures.next().unwrap_or_default()])
}

fn shm(options: &BenchOptions, output: Output) -> anyhow::Result<Vec<Row>> {
    let rounds = whole(options.size(64_000, 128));
    let (mut end, peer) = Peer::start(Provider::Shm.url())?;
    let mut rows = Vec::new();
    let round_trips = [
        ("8 B write seen and answered, round trip", Echo::Write, "1 WRITE each way"),
        ("8 B write with immediate, round trip", Echo::Immediate, "1 WRITE_WITH_IMM each way"),
        ("8 B send, round trip", Echo::Message, "1 SEND each way"),
    ];
    for (case, echo, verbs) in round_trips {
        let (tails, bare_tails) = (Tails::default(), Tails::default());
        let [mine, theirs] = versus(
            options,
            output,
            || {
                peer.answer(echo, rounds)?;
                let timed = end.ask(echo, rounds)?;
                peer.done()?;
                Ok(tails.keep(timed))
            },
            || Ok(bare_tails.keep(bare::cache_line(rounds)?)),
        )?;
        rows.push(shown(
            Row::new(case, "shm", "us", Better::Lower, &mine)
                .against("bare cache line", &mine, &theirs)
                .beside("p99 of blocks", format!("{}, its {}", tails.median(), bare_tails.median()))
                .beside("verbs", verbs),
            output,
        ));
    }
    one_sided(&mut end, "shm", rounds, options, output, &mut rows)?;
    let copies = options.size(2_000, 4);
    let [mine, theirs] = versus(
        options,
        output,
        || end.write_bandwidth(copies, 1),
        || Ok(host::copy_gb_per_second(LARGE, copies)),
    )?;
    rows.push(shown(
        Row::new("1 MiB write", "shm", "GB/s", Better::Higher, &mine)
            .against("memcpy", &mine, &theirs),
        output,
    ));
    let [mine, theirs] = versus(
        options,
        output,
        || end.read_bandwidth(copies, 1),
        || Ok(host::copy_gb_per_second(LARGE, copies)),
    )?;
    rows.push(shown(
        Row::new("1 MiB read", "shm", "GB/s", Better::Higher, &mine)
            .against("memcpy", &mine, &theirs),
        output,
    ));
    drop(peer);
    Ok(rows)
}

fn tcp(options: &BenchOptions, output: Output) -> anyhow::Result<Vec<Row>> {
    let rounds = whole(options.size(12_800, 64));
    let (mut end, peer) = Peer::start(Provider::Tcp.url())?;
    let mut rows = Vec::new();
    let round_trips = [
        (
            "8 B write with immediate, both ends sleep",
            Echo::ImmediateAsleep,
            Waiting::Blocking,
            "bare TCP, blocking",
        ),
        (
            "8 B write seen and answered, both ends spin",
            Echo::Write,
            Waiting::Spinning,
            "bare TCP, spinning",
        ),
        ("8 B send, both ends spin", Echo::Message, Waiting::Spinning, "bare TCP, spinning"),
    ];
    for (case, echo, waiting, name) in round_trips {
        let (tails, bare_tails) = (Tails::default(), Tails::default());
        let [mine, theirs] = versus(
            options,
            output,
            || {
                peer.answer(echo, rounds)?;
                let timed = end.ask(echo, rounds)?;
                peer.done()?;
                Ok(tails.keep(timed))
            },
            || Ok(bare_tails.keep(bare::tcp(rounds, waiting)?)),
        )?;
        rows.push(shown(
            Row::new(case, "tcp", "us", Better::Lower, &mine).against(name, &mine, &theirs).beside(
                "p99 of blocks",
                format!("{}, its {}", tails.median(), bare_tails.median()),
            ),
            output,
        ));
    }
    one_sided(&mut end, "tcp", rounds, options, output, &mut rows)?;
    let copies = options.size(1_000, 4);
    for (case, depth) in [("1 MiB write, 16 outstanding", 16), ("1 MiB read, 4 outstanding", 4)] {
        let [mine, theirs] = versus(
            options,
            output,
            || {
                if depth == 16 {
                    end.write_bandwidth(copies, depth)
                } else {
                    end.read_bandwidth(copies, depth)
                }
            },
            || bare::tcp_bandwidth(copies),
        )?;
        rows.push(shown(
            Row::new(case, "tcp", "GB/s", Better::Higher, &mine)
                .against("bare TCP", &mine, &theirs),
            output,
        ));
    }
    drop(peer);
    Ok(rows)
}

/// Operations the target's program takes no part in. They have no bare peer: the cost of a post
/// and the poll of its completion.
fn one_sided(
    end: &mut End,
    subject: &str,
    rounds: u64,
    options: &BenchOptions,
    output: Output,
    rows: &mut Vec<Row>,
) -> anyhow::Result<()> {
    let cases = [
        ("8 B write, posted and completed", end::OneSided::Write),
        ("8 B read", end::OneSided::Read),
        ("fetch-and-add", end::OneSided::FetchAndAdd),
        ("compare-and-swap", end::OneSided::CompareAndSwap),
    ];
    for (case, operation) in cases {
        let tails = Tails::default();
        let mut turn = || Ok(tails.keep(blocks(rounds, || end.operate(operation))?));
        let mut contenders = [Contender::new(subject, &mut turn)];
        let figures = alternate(options.turns(), &mut contenders, output)?;
        drop(contenders);
        rows.push(shown(
            Row::new(case, subject, "us", Better::Lower, &figures[0])
                .beside("p99 of blocks", tails.median()),
            output,
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_give_median_and_tail() {
        let mut calls = 0;
        let (median, p99) = blocks(200, || {
            calls += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(calls, whole(200));
        assert!(median <= p99 && p99 > 0.0);
        assert_eq!(whole(1), BLOCK);
    }
}
