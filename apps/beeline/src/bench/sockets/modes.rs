//! The three modes of the packet lane beside each other: *origin* copies a byte four times from program to program,
//! *shm* twice, since programs fill and read the lane's blocks, and *direct* never, since programs write the other
//! host's memory.
//!
//! In every mode a program writes each byte of its message and looks at each byte of the other's, as a program does
//! that makes what it sends and uses what it gets: else the modes would differ by that, too. The programs speak by the
//! lane's own calls ([`Connection`]); beside them stands the same conversation of a program that knows of no lane, under
//! `beeline run`. Copies are counted by all four parties.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Instant;

use anyhow::Context as _;
use beeline_sockets::kernel::Errno;
use beeline_sockets::packets::{Connection, dial};

use super::super::report::{Better, Report, Row};
use super::super::turns::{Contender, alternate, online, pin};
use super::costs::{Costs, Figure, Rounds};
use super::packets::{By, Hosts, words};
use super::{SocketsPeerArguments, Work, parts};
use crate::output::Output;

const UNMODIFIED: &str = "origin, a program that knows of no lane";
/// The subjects, the first of which the others are compared with.
const MODES: [(&str, Work); 3] =
    [("origin", Work::Origin), ("shm", Work::Shm), ("direct", Work::Direct)];
/// Bytes that a program writes or looks at in one step.
const STEP: usize = 256;
/// Ranges that an extent has room for.
const RANGES: usize = 4;

/// Round trips in each mode, of growing messages.
pub(super) fn modes(hosts: &Hosts<'_>, report: &mut Report, output: Output) -> anyhow::Result<()> {
    let options = &hosts.arguments.options;
    let all = [(8, 20_000), (4 << 10, 20_000), (64 << 10, 3_000), (256 << 10, 1_000)];
    for &(size, rounds) in if options.quick { &all[1..3] } else { &all[..] } {
        let rounds = options.size(rounds, 20);
        let mut copies = [0.0; MODES.len()];
        let mut tails = [const { Vec::new() }; MODES.len() + 1];
        let mut contenders: Vec<Contender<'_>> = Vec::new();
        let (others, modes) = tails.split_at_mut(1);
        for (((name, work), copies), tails) in MODES.iter().zip(&mut copies).zip(modes) {
            let turn = move || {
                let before = hosts.copied();
                let turn = hosts.turn(By::Lane, &words(*work, size, rounds))?;
                *copies = each(turn.programs.copied_bytes + hosts.copied() - before, size, rounds);
                tails.extend(turn.figure.p99_us);
                Ok(turn.figure.value)
            };
            contenders.push(Contender::new(name, turn));
        }
        let unmodified = || {
            let turn = hosts.turn(By::Packets, &words(Work::Origin, size, rounds))?;
            others[0].extend(turn.figure.p99_us);
            Ok(turn.figure.value)
        };
        contenders.push(Contender::new(UNMODIFIED, unmodified));
        let figures = alternate(options.turns(), &mut contenders, output)?;
        drop(contenders);
        // As the figures: the modes, then the program that knows of none.
        tails.rotate_left(1);
        let case = format!("{} there and back, each byte written and read", parts::bytes(size));
        let row = |index: usize, peer: &str, theirs: usize| {
            let name = MODES.get(index).map_or(UNMODIFIED, |mode| mode.0);
            let row = Row::new(&case, name, "us", Better::Lower, &figures[index])
                .against(peer, &figures[index], &figures[theirs])
                .p99("us", &tails[index], &tails[theirs])
                .beside("cores", online().min(2));
            match copies.get(index) {
                Some(copies) => row.beside("copies", format!("{copies:.2}")),
                None => row,
            }
        };
        report.push(row(0, UNMODIFIED, MODES.len()));
        for index in 1..MODES.len() {
            report.push(row(index, MODES[0].0, 0));
        }
    }
    Ok(())
}

/// Copies of a byte on its way from program to program.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn each(copied: u64, size: usize, rounds: u64) -> f64 {
    copied as f64 / (2 * size as u64 * rounds.max(1)) as f64
}

/// One end of a conversation.
enum End {
    /// The lane's, with its placeholder.
    Lane(OwnedFd, Box<Connection>),
    /// A program's that knows of no lane.
    Socket(TcpStream),
}

fn said(error: Errno) -> std::io::Error {
    std::io::Error::from_raw_os_error(error.0)
}

/// The bytes of the message of a round.
fn pattern(round: u64) -> [u8; STEP] {
    [round.to_le_bytes()[0]; STEP]
}

/// Writes a message step by step where `put` has it, from an offset on.
fn write(size: usize, round: u64, mut put: impl FnMut(usize, &[u8])) {
    let bytes = pattern(round);
    for offset in (0..size).step_by(STEP) {
        put(offset, &bytes[..STEP.min(size - offset)]);
    }
}

/// Looks at every byte of a part of a message, step by step as `get` has it.
fn look(size: usize, round: u64, mut get: impl FnMut(usize, &mut [u8])) -> anyhow::Result<()> {
    let (expected, mut bytes) = (pattern(round), [0; STEP]);
    for offset in (0..size).step_by(STEP) {
        let part = STEP.min(size - offset);
        get(offset, &mut bytes[..part]);
        anyhow::ensure!(bytes[..part] == expected[..part], "round {round}: other bytes came");
    }
    Ok(())
}

impl End {
    /// The asking end. A work that only the lane has takes its calls, others a program's.
    fn connect(to: &str, by_lane: bool) -> anyhow::Result<Self> {
        if !by_lane {
            let socket = TcpStream::connect(to).with_context(|| format!("connecting to {to}"))?;
            socket.set_nodelay(true)?;
            return Ok(Self::Socket(socket));
        }
        let to: SocketAddr = to.parse().context("an address")?;
        let (fd, connection) = dial::connect_fresh(to, 0).map_err(said)?;
        Ok(Self::Lane(fd, Box::new(connection)))
    }

    fn accept(listener: &TcpListener, by_lane: bool) -> anyhow::Result<Self> {
        let (socket, _) = listener.accept()?;
        if !by_lane {
            socket.set_nodelay(true)?;
            return Ok(Self::Socket(socket));
        }
        match dial::claim(socket.into()) {
            Ok((fd, connection)) => Ok(Self::Lane(fd, Box::new(connection))),
            Err(Ok(_)) => anyhow::bail!("the connection came through the kernel"),
            Err(Err(error)) => Err(said(error).into()),
        }
    }

    /// What this end needs before the first message.
    fn prepare(&self, work: Work, size: usize) -> anyhow::Result<()> {
        if let (Self::Lane(fd, connection), Work::Direct) = (self, work) {
            let bytes = (RANGES * size).max(4096);
            connection.ask_extent(fd.as_raw_fd(), bytes).map_err(said).context("an extent")?;
        }
        Ok(())
    }

    fn send(&mut self, work: Work, round: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
        let size = buffer.len();
        let (fd, connection) = match self {
            Self::Socket(socket) => {
                write(size, round, |at, bytes| buffer[at..at + bytes.len()].copy_from_slice(bytes));
                return Ok(socket.write_all(buffer)?);
            }
            Self::Lane(fd, connection) => (fd.as_raw_fd(), connection),
        };
        match work {
            Work::Shm => {
                let mut left = size;
                while left > 0 {
                    let Some(mut room) = connection.room(fd).map_err(said)? else {
                        std::thread::yield_now();
                        continue;
                    };
                    let part = left.min(room.length_bytes());
                    write(part, round, |at, bytes| _ = room.write(at, bytes));
                    room.send(fd, part).map_err(said)?;
                    left -= part;
                }
            }
            Work::Direct => {
                let mut range = loop {
                    if let Some(range) = connection.range(size).map_err(said)? {
                        break range;
                    }
                    std::thread::yield_now();
                };
                write(size, round, |at, bytes| _ = range.write(at, bytes));
                while let Some(again) = range.send(fd, size).map_err(said)? {
                    range = again;
                    std::thread::yield_now();
                }
            }
            _ => {
                write(size, round, |at, bytes| buffer[at..at + bytes.len()].copy_from_slice(bytes));
                let sent = connection.write(fd, buffer).map_err(said)?;
                anyhow::ensure!(sent == size, "a call that waits sent {sent} of {size} bytes");
            }
        }
        Ok(())
    }

    fn receive(&mut self, work: Work, round: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
        let copied = |buffer: &[u8]| {
            let get = |at: usize, bytes: &mut [u8]| {
                bytes.copy_from_slice(&buffer[at..at + bytes.len()]);
            };
            look(buffer.len(), round, get)
        };
        let (fd, connection) = match self {
            Self::Socket(socket) => {
                socket.read_exact(buffer)?;
                return copied(buffer);
            }
            Self::Lane(fd, connection) => (fd.as_raw_fd(), connection),
        };
        let mut came = 0;
        while came < buffer.len() {
            if work == Work::Origin {
                let read = connection.read(fd, &mut buffer[came..]).map_err(said)?;
                anyhow::ensure!(read > 0, "the other process ended early");
                came += read;
            } else {
                let piece = connection.wait(fd).map_err(said)?;
                look(piece.length_bytes(), round, |at, bytes| _ = piece.read(at, bytes))?;
                came += piece.length_bytes();
                piece.release(fd).map_err(said)?;
            }
        }
        if work == Work::Origin { copied(buffer) } else { Ok(()) }
    }

    /// What the process cost, with what it copied.
    fn costs(&self) -> anyhow::Result<Costs> {
        let copied_bytes = match self {
            Self::Lane(_, connection) => connection.copied(),
            // The preloaded library has the count.
            Self::Socket(_) => 0,
        };
        Ok(Costs { copied_bytes, ..Costs::of_this_process()? })
    }
}

/// Serves one conversation of a mode.
pub(super) fn serve(arguments: &SocketsPeerArguments) -> anyhow::Result<()> {
    let listener = TcpListener::bind(&arguments.listen)?;
    if arguments.by_lane {
        dial::listening(listener.as_raw_fd());
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", listener.local_addr()?)?;
    out.flush()?;
    let mut end = End::accept(&listener, arguments.by_lane)?;
    end.prepare(arguments.work, arguments.size)?;
    let mut buffer = vec![0; arguments.size];
    for round in 0..arguments.rounds {
        end.receive(arguments.work, round, &mut buffer)?;
        end.send(arguments.work, round, &mut buffer)?;
    }
    writeln!(out, "{}", end.costs()?)?;
    // The asking process reads the last message before it closes its end.
    let _ = end.receive(Work::Origin, 0, &mut [0]);
    Ok(())
}

/// Microseconds of a round trip, and what this process cost.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub(super) fn ask(arguments: &SocketsPeerArguments, to: &str) -> anyhow::Result<(Figure, Costs)> {
    pin(0)?;
    let mut end = End::connect(to, arguments.by_lane)?;
    end.prepare(arguments.work, arguments.size)?;
    let mut buffer = vec![0; arguments.size];
    let (began, mut all) = (Instant::now(), Rounds::begin(arguments.costs));
    for round in 0..arguments.rounds {
        end.send(arguments.work, round, &mut buffer)?;
        end.receive(arguments.work, round, &mut buffer)?;
        all.over();
    }
    let value = began.elapsed().as_secs_f64() * 1e6 / arguments.rounds.max(1) as f64;
    Ok((Figure { value, p99_us: all.p99_us() }, end.costs()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_of_a_message_is_written_and_looked_at() {
        for size in [1, STEP - 1, STEP, STEP + 1, 5 * STEP + 3] {
            let mut message = vec![0; size];
            write(size, 7, |at, bytes| message[at..at + bytes.len()].copy_from_slice(bytes));
            assert_eq!(message, vec![7; size]);
            let seen = |message: &[u8]| {
                look(size, 7, |at, bytes| bytes.copy_from_slice(&message[at..at + bytes.len()]))
            };
            seen(&message).unwrap();
            for wrong in 0..size {
                message[wrong] ^= 1;
                assert!(seen(&message).is_err(), "{wrong} of {size}");
                message[wrong] ^= 1;
            }
        }
        assert_eq!(each(4 * 2 * 64 * 10, 64, 10).to_bits(), 4.0_f64.to_bits());
    }
}
