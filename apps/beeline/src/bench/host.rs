//! `beeline bench host`: the physical limits other benchmarks are held against.
//!
//! A cache line between two cores, memory copies, a write-back to the disk, bare TCP. The figures
//! have no peer; benches of the parts use the same functions as theirs.

use std::hint::{black_box, spin_loop};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Context as _;

use super::report::{Better, Report, Row};
use super::turns::{Contender, alternate, pin};
use super::{BenchOptions, finish};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct HostArguments {
    /// Directory for the write-back figure; removed afterwards is only the file made in it.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub data: PathBuf,
    #[command(flatten)]
    pub options: BenchOptions,
}

/// Place of the TCP figure among the contenders; the cache line's is the first.
const TCP: usize = 3;

/// The command.
pub fn run(arguments: &HostArguments, output: Output) -> Result<Exit, Failure> {
    let options = &arguments.options;
    let rounds = options.size(200_000, 500);
    let copies = options.size(2_000, 4);
    let syncs = options.size(200, 2);
    let mut contenders = [
        Contender::new("ping-pong", || cache_line_ping_pong_us(rounds)),
        Contender::new("copy 1 MiB", || Ok(copy_gb_per_second(1 << 20, copies))),
        Contender::new("copy 64 MiB", || Ok(copy_gb_per_second(64 << 20, copies / 64 + 1))),
        Contender::new("TCP", || tcp_ping_pong_us(rounds / 10)),
        Contender::new("fdatasync", || data_sync_us(&arguments.data, syncs)),
    ];
    let figures = alternate(options.turns(), &mut contenders, output)?;
    drop(contenders);
    let mut report = Report::new("host", "none");
    let rows = [
        ("cache line between two threads, round trip", "spinning", "us", Better::Lower),
        ("memory copy, 1 MiB", "memcpy", "GB/s", Better::Higher),
        ("memory copy, 64 MiB", "memcpy", "GB/s", Better::Higher),
        ("TCP on loopback, 8 B, round trip", "blocking sockets", "us", Better::Lower),
        ("append 64 B and write it to the disk", "fdatasync", "us", Better::Lower),
    ];
    let cores = super::turns::online();
    for (i, ((case, subject, unit, better), figures_of_row)) in
        rows.into_iter().zip(&figures).enumerate()
    {
        let row = Row::new(case, subject, unit, better, figures_of_row);
        // What crossing the kernel costs over crossing between cores.
        let row =
            if i == TCP { row.against("cache line", &figures[TCP], &figures[0]) } else { row };
        report.push(if i == TCP || i == 0 { row.beside("cores", cores.min(2)) } else { row });
    }
    finish(&report, options, output)
}

/// Microseconds for a cache line to go to another core and back, spinning: the floor under every
/// round trip through shared memory. On one usable core the two threads yield to each other.
pub fn cache_line_ping_pong_us(rounds: u64) -> anyhow::Result<f64> {
    #[repr(align(128))]
    struct Line(AtomicU64);
    let lines = [Line(AtomicU64::new(0)), Line(AtomicU64::new(0))];
    let alone = super::turns::online() < 2;
    let stop = AtomicBool::new(false);
    // Release with the other side's Acquire: each store hands the turn over.
    let wait = |line: &Line, wanted: u64| {
        while line.0.load(Ordering::Acquire) != wanted {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            if alone {
                std::thread::yield_now();
            } else {
                spin_loop();
            }
        }
    };
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| -> anyhow::Result<()> {
            pin(1)?;
            for round in 1..=rounds {
                wait(&lines[0], round);
                lines[1].0.store(round, Ordering::Release);
            }
            Ok(())
        });
        let asker = scope.spawn(|| -> anyhow::Result<f64> {
            pin(0).inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
            let start = Instant::now();
            for round in 1..=rounds {
                lines[0].0.store(round, Ordering::Release);
                wait(&lines[1], round);
            }
            Ok(per(start, rounds))
        });
        let figure = join(asker)?;
        join(echo)?;
        Ok(figure)
    })
}

fn join<T>(thread: std::thread::ScopedJoinHandle<'_, anyhow::Result<T>>) -> anyhow::Result<T> {
    thread.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))?
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn per(start: Instant, rounds: u64) -> f64 {
    start.elapsed().as_secs_f64() * 1e6 / rounds.max(1) as f64
}

/// Gigabytes per second of copying `length` bytes between two buffers.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn copy_gb_per_second(length: usize, copies: usize) -> f64 {
    let source = vec![7_u8; length];
    let mut target = vec![0_u8; length];
    // The first copy pays for the pages.
    target.copy_from_slice(&source);
    let start = Instant::now();
    for _ in 0..copies.max(1) {
        target.copy_from_slice(black_box(&source));
        black_box(&mut target);
    }
    (length * copies.max(1)) as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Microseconds for 8 bytes over TCP on loopback and back, both ends blocking.
pub fn tcp_ping_pong_us(rounds: u64) -> anyhow::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0").context("a port on loopback")?;
    let address = listener.local_addr()?;
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || -> anyhow::Result<()> {
            pin(1)?;
            let (mut peer, _) = listener.accept()?;
            peer.set_nodelay(true)?;
            let mut bytes = [0; 8];
            while peer.read_exact(&mut bytes).is_ok() {
                peer.write_all(&bytes)?;
            }
            Ok(())
        });
        let asker = scope.spawn(move || -> anyhow::Result<f64> {
            pin(0)?;
            let mut peer = TcpStream::connect(address)?;
            peer.set_nodelay(true)?;
            let mut bytes = [0; 8];
            let start = Instant::now();
            for _ in 0..rounds.max(1) {
                peer.write_all(&bytes)?;
                peer.read_exact(&mut bytes)?;
            }
            Ok(per(start, rounds))
        });
        let figure = join(asker)?;
        join(echo)?;
        Ok(figure)
    })
}

/// Microseconds to write 64 bytes to a file in `directory` and have them on the disk.
pub fn data_sync_us(directory: &std::path::Path, rounds: u64) -> anyhow::Result<f64> {
    let path = directory.join(format!(".beeline-bench-{}", std::process::id()));
    let file = std::fs::File::create(&path)
        .with_context(|| format!("{}: choose a writable --data", path.display()))?;
    let _ = std::fs::remove_file(&path);
    file.set_len(64 * rounds.max(1))?;
    file.sync_all()?;
    let start = Instant::now();
    for round in 0..rounds.max(1) {
        file.write_all_at(&[7; 64], 64 * round)?;
        file.sync_data()?;
    }
    Ok(per(start, rounds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_yields_a_positive_figure() {
        let directory = tempfile::tempdir().unwrap();
        assert!(cache_line_ping_pong_us(200).unwrap() > 0.0);
        assert!(tcp_ping_pong_us(20).unwrap() > 0.0);
        assert!(copy_gb_per_second(4096, 10) > 0.0);
        assert!(data_sync_us(directory.path(), 2).unwrap() > 0.0);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_named() {
        let error = data_sync_us(std::path::Path::new("/nonexistent"), 1).unwrap_err();
        assert!(format!("{error:#}").contains("/nonexistent"));
    }
}
