//! The limits beside the providers: a cache line, and TCP sockets, on the same two processors.

use std::hint::spin_loop;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Context as _;

use super::blocks;
use super::end::LARGE;
use crate::bench::turns::{online, pin};

/// How sockets are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// Blocking calls.
    Blocking,
    /// Calls that do not block, again and again.
    Spinning,
}

fn both<T: Send>(
    near: impl FnOnce() -> anyhow::Result<T> + Send,
    far: impl FnOnce() -> anyhow::Result<()> + Send,
) -> anyhow::Result<T> {
    std::thread::scope(|scope| {
        let far = scope.spawn(|| pin(1).and_then(|_| far()));
        let near = scope.spawn(|| pin(0).and_then(|_| near()));
        let panicked = |_| anyhow::anyhow!("a measuring thread panicked");
        let result = near.join().map_err(panicked)?;
        far.join().map_err(panicked)??;
        result
    })
}

/// A cache line to the other processor and back: median and p99 of blocks, microseconds.
pub fn cache_line(rounds: u64) -> anyhow::Result<(f64, f64)> {
    #[repr(align(128))]
    struct Line(AtomicU64);
    let lines = [Line(AtomicU64::new(0)), Line(AtomicU64::new(0))];
    let alone = online() < 2;
    let over = AtomicBool::new(false);
    // Release with the other side's Acquire: each store hands the turn over.
    let wait = |line: &Line, wanted: u64| {
        while line.0.load(Ordering::Acquire) != wanted && !over.load(Ordering::Relaxed) {
            if alone { std::thread::yield_now() } else { spin_loop() }
        }
    };
    both(
        || {
            let mut round = 0;
            let timed = blocks(rounds, || {
                round += 1;
                lines[0].0.store(round, Ordering::Release);
                wait(&lines[1], round);
                Ok(())
            });
            over.store(true, Ordering::Relaxed);
            timed
        },
        || {
            let mut round = 0;
            while !over.load(Ordering::Relaxed) {
                round += 1;
                wait(&lines[0], round);
                lines[1].0.store(round, Ordering::Release);
            }
            Ok(())
        },
    )
}

fn sockets(waiting: Waiting) -> anyhow::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0").context("a port on loopback")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    for socket in [&near, &far] {
        socket.set_nodelay(true)?;
        socket.set_nonblocking(waiting == Waiting::Spinning)?;
    }
    Ok((near, far))
}

/// Fills `bytes`; false at the end of the stream.
fn fill(socket: &mut TcpStream, bytes: &mut [u8]) -> anyhow::Result<bool> {
    let mut have = 0;
    while have < bytes.len() {
        match socket.read(&mut bytes[have..]) {
            Ok(0) => return Ok(false),
            Ok(count) => have += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => spin_loop(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

/// 8 bytes over TCP on loopback and back: median and p99 of blocks, microseconds.
pub fn tcp(rounds: u64, waiting: Waiting) -> anyhow::Result<(f64, f64)> {
    let (mut near, mut far) = sockets(waiting)?;
    both(
        move || {
            let mut word = [7; 8];
            blocks(rounds, || {
                near.write_all(&word)?;
                anyhow::ensure!(fill(&mut near, &mut word)?, "the other end closed");
                Ok(())
            })
        },
        move || {
            let mut word = [0; 8];
            while fill(&mut far, &mut word)? {
                far.write_all(&word)?;
            }
            Ok(())
        },
    )
}

/// Gigabytes per second of `count` messages of 1 MiB over TCP on loopback, one way.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn tcp_bandwidth(count: usize) -> anyhow::Result<f64> {
    let (mut near, mut far) = sockets(Waiting::Blocking)?;
    both(
        move || {
            let data = vec![1; LARGE];
            let start = Instant::now();
            for _ in 0..count {
                near.write_all(&data)?;
            }
            near.read_exact(&mut [0])?;
            Ok((LARGE * count) as f64 / start.elapsed().as_secs_f64() / 1e9)
        },
        move || {
            let mut data = vec![0; LARGE];
            for _ in 0..count {
                far.read_exact(&mut data)?;
            }
            Ok(far.write_all(&[1])?)
        },
    )
}
