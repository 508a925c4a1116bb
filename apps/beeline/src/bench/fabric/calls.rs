//! System calls per operation, counted by strace over runs of different length.

use std::process::{Command, Stdio};

use anyhow::Context as _;
use beeline_fabric::Role;

use super::Provider;
use super::end::{End, OneSided};
use super::peer::Echo;
use crate::bench::BenchOptions;
use crate::bench::report::{Better, Row};
use crate::bench::turns::online;
use crate::exit::{Exit, Failure};

/// What the counted process takes.
#[derive(Clone, Debug, clap::Args)]
pub struct CallsArguments {
    /// Rounds of one operation of each kind.
    pub rounds: u64,
}

/// Kinds of operation in one round, the answers of the other end included.
const OPERATIONS: u64 = 3 + 3 * 2;

/// The counted process: both ends over shared memory on two threads, spinning.
pub fn run(arguments: &CallsArguments) -> Result<Exit, Failure> {
    work(arguments.rounds)?;
    Ok(Exit::Done)
}

fn work(rounds: u64) -> anyhow::Result<()> {
    let (to_far, from_near) = std::sync::mpsc::channel();
    let (to_near, from_far) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let far = scope.spawn(move || -> anyhow::Result<()> {
            let (mut end, card) = End::open(Provider::Shm.url(), online() < 2)?;
            to_near.send(card)?;
            end.connect(from_near.recv()?, Role::Passive)?;
            for echo in [Echo::Write, Echo::Immediate, Echo::Message] {
                end.ready(echo)?;
                end.answer(echo, rounds)?;
            }
            // Stays until the near end is done.
            let _ = from_near.recv();
            Ok(())
        });
        let (mut end, card) = End::open(Provider::Shm.url(), online() < 2)?;
        to_far.send(card)?;
        end.connect(from_far.recv()?, Role::Active)?;
        for echo in [Echo::Write, Echo::Immediate, Echo::Message] {
            end.ready(echo)?;
            end.repeat(echo, rounds)?;
        }
        for operation in [OneSided::Read, OneSided::FetchAndAdd, OneSided::CompareAndSwap] {
            for _ in 0..rounds {
                end.operate(operation)?;
            }
        }
        drop(to_far);
        far.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
    })
}

/// The row: calls that more rounds add, divided by the operations they add.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn row(options: &BenchOptions) -> anyhow::Result<Row> {
    let case = "system calls per operation";
    let missing = |why: &str| {
        Row::new(case, "shm", "calls", Better::Lower, &[]).beside("not measured", why.to_owned())
    };
    if Command::new("strace").arg("-V").output().is_err() {
        return Ok(missing("strace is missing"));
    }
    let (few, many) = (100, options.size(20_000, 400));
    let mut figures = Vec::new();
    let mut added = Vec::new();
    for _ in 0..options.turns().min(3) {
        let (Some(short), Some(long)) = (count(few)?, count(many)?) else {
            return Ok(missing("strace may not trace here"));
        };
        let calls = long.saturating_sub(short);
        added.push(calls.to_string());
        figures.push(calls as f64 / ((many - few) * OPERATIONS) as f64);
    }
    let operations = (many - few) * OPERATIONS;
    Ok(Row::new(case, "shm", "calls", Better::Lower, &figures)
        .beside("calls added", format!("{} by {operations} operations", added.join(", ")))
        .beside("operations", "write, write with immediate, send, read, fetch-and-add, cas"))
}

/// System calls of the whole counted process; none when strace could not trace it.
fn count(rounds: u64) -> anyhow::Result<Option<u64>> {
    let program = std::env::current_exe().context("the path of this program")?;
    let output = Command::new("strace")
        .args(["-f", "-c", "-q"])
        .arg(program)
        .args(["bench", "fabric-calls", &rounds.to_string(), "--quiet"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .context("strace")?;
    let text = String::from_utf8_lossy(&output.stderr);
    Ok(output.status.success().then(|| total(&text)).flatten())
}

/// The calls of the table's last line: `100.00 0.012 3 1234 56 total`.
fn total(table: &str) -> Option<u64> {
    let line = table.lines().rfind(|line| line.trim_end().ends_with("total"))?;
    line.split_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_is_read_from_the_table() {
        let table = "% time     seconds  usecs/call     calls    errors syscall\n\
                     ------ ----------- ----------- --------- --------- ----------------\n\
                      50.00    0.000100           1       100           mmap\n\
                     ------ ----------- ----------- --------- --------- ----------------\n\
                     100.00    0.000200           1       234         5 total\n";
        assert_eq!(total(table), Some(234));
        assert_eq!(total("strace: ptrace: Operation not permitted"), None);
    }
}
