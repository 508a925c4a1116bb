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

/// One cache line of words.
#[derive(Debug)]
#[repr(align(64))]
struct Words([AtomicU64; 8]);

impl Words {
    fn several(count: usize) -> Vec<Self> {
        (0..count).map(|_| Self(Default::default())).collect()
    }

    /// Writes all of it; `last` is what the other side waits for.
    fn fill(&self, word: u64, last: u64) {
        self.0[..7].iter().for_each(|place| place.store(word, Ordering::Relaxed));
        // Pairs with the acquire of whoever waits for `last`.
        self.0[7].store(last, Ordering::Release);
    }

    fn sum(&self) -> u64 {
        self.0.iter().map(|place| place.load(Ordering::Relaxed)).fold(0, u64::wrapping_add)
    }

    fn holds(&self, last: u64) -> bool {
        // Pairs with the release in `fill`.
        self.0[7].load(Ordering::Acquire) == last
    }
}

/// Requests a second that are nothing but lines: `there` lines of data and one that
/// announces them in one direction, `back` and one in the other, `outstanding` at a time. What the
/// same payloads cost two processors that do nothing else with them.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn line_requests(
    rounds: u64,
    outstanding: usize,
    there: usize,
    back: usize,
) -> anyhow::Result<f64> {
    const SLOTS: usize = 128;
    let (asked, answered) = (Words::several(SLOTS), Words::several(SLOTS));
    let (sent, results) = (Words::several(SLOTS * there), Words::several(SLOTS * back));
    let alone = online() < 2;
    let wait = || if alone { std::thread::yield_now() } else { spin_loop() };
    let place = |number: u64| usize::try_from(number).unwrap_or(0) % SLOTS;
    // Data lies in as many places as there are requests outstanding.
    let data = |number: u64, lines: usize| {
        let first = usize::try_from(number).unwrap_or(0) % outstanding * lines;
        first..first + lines
    };
    let over = AtomicBool::new(false);
    both(
        || {
            let start = Instant::now();
            let (mut posted, mut taken, mut seen) = (0_u64, 0_u64, 0_u64);
            while taken < rounds {
                while posted < rounds && posted - taken < outstanding as u64 {
                    sent[data(posted, there)].iter().for_each(|line| line.fill(posted, posted));
                    asked[place(posted)].fill(posted, posted + 1);
                    posted += 1;
                }
                let before = taken;
                while taken < posted && answered[place(taken)].holds(taken + 1) {
                    seen = seen.wrapping_add(answered[place(taken)].sum());
                    for line in &results[data(taken, back)] {
                        seen = seen.wrapping_add(line.sum());
                    }
                    taken += 1;
                }
                if taken == before {
                    wait();
                }
            }
            let seconds = start.elapsed().as_secs_f64();
            over.store(true, Ordering::Relaxed);
            std::hint::black_box(seen);
            Ok(rounds as f64 / seconds)
        },
        || {
            let mut served = 0_u64;
            while !over.load(Ordering::Relaxed) {
                if !asked[place(served)].holds(served + 1) {
                    wait();
                    continue;
                }
                let mut word = asked[place(served)].sum();
                for line in &sent[data(served, there)] {
                    word = word.wrapping_add(line.sum());
                }
                results[data(served, back)].iter().for_each(|line| line.fill(word, word));
                answered[place(served)].fill(word, served + 1);
                served += 1;
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
