//! What it costs to wake a thread that sleeps in the kernel, by the ways there are: the bound of every doorbell.
//!
//! Two threads wake each other in turn. The subject is what the library does: a byte on the connection beneath,
//! heard by a sleeper in `recv`; beside it stand a sleeper in `epoll_wait` and doorbells of other kinds.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use anyhow::Context as _;
use beeline_os::poller::{Interest, Poller};
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::futex;

use super::super::report::{Better, Report};
use super::super::turns::{Contender, pin, unpin};
use super::{SocketsArguments, measure};
use crate::output::Output;

type Act = Box<dyn FnMut() -> anyhow::Result<()> + Send>;

/// One of the two threads.
struct Side {
    /// Wakes the other.
    wake: Act,
    /// Sleeps until the other does.
    sleep: Act,
}

/// `read`, once the kernel says that there is something.
fn in_epoll(watched: impl AsFd, mut read: Act) -> anyhow::Result<Act> {
    let mut poller = Poller::new(4)?;
    poller.add(watched.as_fd(), 0, Interest::READ)?;
    Ok(Box::new(move || {
        while poller.wait(None)? == 0 {}
        read()
    }))
}

fn tcp(epoll: bool) -> anyhow::Result<[Side; 2]> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let one = TcpStream::connect(listener.local_addr()?)?;
    let (other, _) = listener.accept()?;
    let side = |stream: TcpStream| -> anyhow::Result<Side> {
        stream.set_nodelay(true)?;
        let (mut out, mut inward) = (stream.try_clone()?, stream.try_clone()?);
        let read: Act = Box::new(move || Ok(inward.read_exact(&mut [0])?));
        let sleep = if epoll { in_epoll(&stream, read)? } else { read };
        Ok(Side { wake: Box::new(move || Ok(out.write_all(&[1])?)), sleep })
    };
    Ok([side(one)?, side(other)?])
}

fn unix() -> anyhow::Result<[Side; 2]> {
    let (one, other) = UnixStream::pair()?;
    let side = |stream: UnixStream| -> anyhow::Result<Side> {
        let (mut out, mut inward) = (stream.try_clone()?, stream);
        let sleep: Act = Box::new(move || Ok(inward.read_exact(&mut [0])?));
        Ok(Side { wake: Box::new(move || Ok(out.write_all(&[1])?)), sleep })
    };
    Ok([side(one)?, side(other)?])
}

/// Both directions over descriptors of which a word is written at one end and read at the other.
fn words(
    make: impl Fn() -> anyhow::Result<[OwnedFd; 2]>,
    epoll: bool,
) -> anyhow::Result<[Side; 2]> {
    let (there, back) = (make()?, make()?);
    let side = |out: OwnedFd, inward: OwnedFd| -> anyhow::Result<Side> {
        let watched = inward.try_clone()?;
        let read: Act =
            Box::new(move || Ok(rustix::io::read(&inward, &mut [0_u8; 8]).map(|_| ())?));
        let sleep = if epoll { in_epoll(&watched, read)? } else { read };
        let word = 1_u64.to_ne_bytes();
        Ok(Side { wake: Box::new(move || Ok(rustix::io::write(&out, &word).map(|_| ())?)), sleep })
    };
    let ([there_in, there_out], [back_in, back_out]) = (there, back);
    Ok([side(there_out, back_in)?, side(back_out, there_in)?])
}

fn events() -> anyhow::Result<[OwnedFd; 2]> {
    let one = eventfd(0, EventfdFlags::CLOEXEC)?;
    Ok([one.try_clone()?, one])
}

fn pipe() -> anyhow::Result<[OwnedFd; 2]> {
    let (reads, writes) = rustix::pipe::pipe()?;
    Ok([reads, writes])
}

fn futexes() -> [Side; 2] {
    let words = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
    let flags = futex::Flags::empty();
    [0, 1].map(|own| {
        let (there, here) = (Arc::clone(&words), Arc::clone(&words));
        Side {
            wake: Box::new(move || {
                // Release with the Acquire below.
                there[1 - own].store(1, Ordering::Release);
                futex::wake(&there[1 - own], flags, 1)?;
                Ok(())
            }),
            sleep: Box::new(move || {
                while here[own].swap(0, Ordering::Acquire) == 0 {
                    match futex::wait(&here[own], flags, 0, None) {
                        Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Ok(())
            }),
        }
    })
}

/// Microseconds from a wake-up to the end of the other's sleep.
fn turn([mut one, mut other]: [Side; 2], cores: [usize; 2], rounds: u64) -> anyhow::Result<f64> {
    std::thread::scope(|scope| {
        let answering = scope.spawn(move || -> anyhow::Result<()> {
            pin(cores[1])?;
            for _ in 0..rounds {
                (other.sleep)()?;
                (other.wake)()?;
            }
            Ok(())
        });
        pin(cores[0])?;
        let begun = Instant::now();
        for _ in 0..rounds {
            (one.wake)()?;
            (one.sleep)()?;
        }
        let took = begun.elapsed();
        unpin()?;
        answering.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
        let wakes = 2.0 * rounds as f64;
        Ok(took.as_secs_f64() * 1e6 / wakes)
    })
}

/// Both threads on a core each, and both on one.
pub fn wakeups(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    for (cores, place) in [([0, 1], "on another core"), ([0, 0], "on the same core")] {
        let rounds = arguments.options.size(20_000, 20);
        let contender = |name, make: fn() -> anyhow::Result<[Side; 2]>| {
            let time = &arguments.time;
            Contender::new(name, move || {
                turn(make().context("a way to wake")?, cores, time.rounds(rounds))
            })
        };
        let contenders = vec![
            contender("a byte by TCP, in recv", || tcp(false)),
            contender("a byte by TCP, in epoll", || tcp(true)),
            contender("an event descriptor, in read", || words(events, false)),
            contender("an event descriptor, in epoll", || words(events, true)),
            contender("a pipe, in read", || words(pipe, false)),
            contender("a Unix socket, in recv", unix),
            contender("a futex", || Ok(futexes())),
        ];
        let case = format!("a wake-up of a thread {place}");
        measure(arguments, report, output, (&case, "us", Better::Lower), contenders)?;
    }
    Ok(())
}
