//! A graph between network interfaces, with signals while packets flow.
//!
//! One thread: it takes what the interfaces have, runs the graph until nothing moves, sends what
//! comes out, answers a signal, and sleeps in `poll` when there is nothing to do. A packet the
//! device cannot take (too long, device down) is counted and dropped; the others go on.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use beeline_ir::flits::{BITS, Joiner, WORDS, split};
use beeline_ir::graph::Graph;
use beeline_ir::run::{Machine, Run, RunError, Signal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::packet_socket::Device;

/// A run ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LiveError {
    /// An interface.
    #[error("{name}: {source}")]
    Device {
        /// Which.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// The socket for signals.
    #[error("{}: {source}", path.display())]
    Control {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A handler.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A name.
    #[error("the graph has no input or output named {0} that carries packets")]
    NoSuchPort(String),
    /// Waiting.
    #[error("waiting for packets: {0}")]
    Wait(io::Error),
}

/// What has passed.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Passed {
    /// Packets in.
    pub received: u64,
    /// Packets out.
    pub sent: u64,
    /// Packets that a device did not take.
    pub refused: u64,
    /// Flits that were no packet.
    pub malformed: u64,
    /// Signals answered.
    pub signals: u64,
}

struct Input {
    channel: usize,
    device: usize,
    waiting: VecDeque<u64>,
}

struct Output {
    channel: usize,
    device: usize,
    joiner: Joiner,
}

/// Runs until `stop` is set.
///
/// Errors: a port that is not there; the sockets; a handler that does not end.
pub fn run<M: Machine>(
    graph: &Graph,
    machines: Vec<M>,
    ports: &[(String, String)],
    control: Option<&Path>,
    stop: &AtomicBool,
) -> Result<Passed, LiveError> {
    let mut devices: Vec<Device> = Vec::new();
    let mut inputs = Vec::new();
    let mut outputs = Vec::new();
    for (port, what) in ports {
        let device = open(&mut devices, what)?;
        let carries = |channel: usize| graph.channels[channel].bits == BITS;
        if let Some(end) = graph.inputs.iter().find(|o| o.name == *port && carries(o.channel)) {
            inputs.push(Input { channel: end.channel, device, waiting: VecDeque::new() });
        } else if let Some(end) =
            graph.outputs.iter().find(|o| o.name == *port && carries(o.channel))
        {
            outputs.push(Output { channel: end.channel, device, joiner: Joiner::default() });
        } else {
            return Err(LiveError::NoSuchPort(port.clone()));
        }
    }
    let socket = match control {
        Some(path) => Some(listen(path)?),
        None => None,
    };
    let mut graph_run = Run::new(graph, machines)?;
    let mut passed = Passed::default();
    let mut buffer = vec![0; 65_536];
    while !stop.load(Ordering::Relaxed) {
        let mut moved = false;
        for input in &mut inputs {
            moved |= receive(&mut graph_run, input, &mut devices, &mut buffer, &mut passed)?;
        }
        let round = graph_run.round()?;
        moved |= round.fetched || round.wrote;
        for output in &mut outputs {
            moved |= send(&mut graph_run, output, &mut devices, &mut passed);
        }
        if let Some(socket) = &socket {
            moved |= answer(graph, &mut graph_run, socket, &mut passed)?;
        }
        if !moved {
            wait(&devices, socket.as_ref())?;
        }
    }
    if let Some(path) = control {
        let _ = std::fs::remove_file(path);
    }
    Ok(passed)
}

/// An interface by its name, or `tap:NAME`; each is opened once.
fn open(devices: &mut Vec<Device>, what: &str) -> Result<usize, LiveError> {
    let (tap, name) = match what.strip_prefix("tap:") {
        Some(name) => (true, name),
        None => (false, what),
    };
    if let Some(at) = devices.iter().position(|device| device.name == name) {
        return Ok(at);
    }
    let device = if tap { Device::tap(name) } else { Device::interface(name) };
    devices.push(device.map_err(|source| LiveError::Device { name: name.to_owned(), source })?);
    Ok(devices.len() - 1)
}

fn listen(path: &Path) -> Result<UnixDatagram, LiveError> {
    let failed = |source| LiveError::Control { path: path.to_owned(), source };
    // A socket that a dead process left cannot be bound again; one that answers is not taken.
    if UnixDatagram::unbound().and_then(|probe| probe.connect(path)).is_err() {
        let _ = std::fs::remove_file(path);
    }
    let socket = UnixDatagram::bind(path).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    Ok(socket)
}

/// Packets taken from a device in one turn.
const BATCH: usize = 64;

fn receive<M: Machine>(
    run: &mut Run<'_, M>,
    input: &mut Input,
    devices: &mut [Device],
    buffer: &mut [u8],
    passed: &mut Passed,
) -> Result<bool, LiveError> {
    let mut moved = false;
    for _ in 0..BATCH {
        while input.waiting.len() >= WORDS {
            let mut flit = [0; WORDS];
            for (to, from) in flit.iter_mut().zip(&input.waiting) {
                *to = *from;
            }
            if !run.channel_mut(input.channel).push(&flit) {
                return Ok(moved);
            }
            input.waiting.drain(..WORDS);
            moved = true;
        }
        let device = &mut devices[input.device];
        match device.receive(buffer) {
            Ok(Some(count)) => {
                passed.received += 1;
                split(&buffer[..count], 0, |flit| input.waiting.extend(flit));
            }
            Ok(None) => break,
            // An interface that went down may come up again; until then it has no packets.
            Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => break,
            Err(source) => {
                return Err(LiveError::Device { name: device.name.clone(), source });
            }
        }
    }
    Ok(moved)
}

fn send<M: Machine>(
    run: &mut Run<'_, M>,
    output: &mut Output,
    devices: &mut [Device],
    passed: &mut Passed,
) -> bool {
    let mut flit = [0; WORDS];
    let mut moved = false;
    while run.channel_mut(output.channel).pop(&mut flit) {
        moved = true;
        match output.joiner.push(&flit) {
            Ok(Some((bytes, _))) => match devices[output.device].send(bytes) {
                Ok(true) => passed.sent += 1,
                Ok(false) | Err(_) => passed.refused += 1,
            },
            Ok(None) => {}
            Err(_) => passed.malformed += 1,
        }
    }
    moved
}

/// A request is a signal of 64 bytes; its first 16 bits name the element. The answer has 64 bytes,
/// or one byte where no such element may be signalled.
fn answer<M: Machine>(
    graph: &Graph,
    run: &mut Run<'_, M>,
    socket: &UnixDatagram,
    passed: &mut Passed,
) -> Result<bool, LiveError> {
    let mut bytes = [0_u8; 64];
    let Ok((count, from)) = socket.recv_from(&mut bytes) else { return Ok(false) };
    let Some(path) = from.as_pathname() else { return Ok(true) };
    let mut signal: Signal = [0; 8];
    for (word, part) in signal.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(part.try_into().unwrap_or_default());
    }
    let id = signal[0] & 0xffff;
    let node = graph.nodes.iter().position(|node| u64::from(node.id) == id && node.signalled);
    let (Some(node), 64) = (node, count) else {
        let _ = socket.send_to(&[0], path);
        return Ok(true);
    };
    run.send_signal(node, signal);
    run.iterate(node)?;
    if let Some(answer) = run.take_answer(node) {
        let reply: Vec<u8> = answer.iter().flat_map(|word| word.to_le_bytes()).collect();
        let _ = socket.send_to(&reply, path);
        passed.signals += 1;
    }
    Ok(true)
}

fn wait(devices: &[Device], socket: Option<&UnixDatagram>) -> Result<(), LiveError> {
    let mut list: Vec<PollFd<'_>> =
        devices.iter().map(|device| PollFd::new(device, PollFlags::IN)).collect();
    if let Some(socket) = socket {
        list.push(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN));
    }
    // Short, so that a stop is seen soon.
    let limit = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    match poll(&mut list, Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(LiveError::Wait(error.into())),
    }
}

/// Sends a signal to a running graph and waits for the answer.
///
/// Errors: nothing runs there; the element may not be signalled; no answer in two seconds.
pub fn ask(control: &Path, signal: Signal) -> io::Result<Signal> {
    let folder = tempfile::tempdir()?;
    let socket = UnixDatagram::bind(folder.path().join("answer"))?;
    socket.set_read_timeout(Some(std::time::Duration::from_secs(2)))?;
    let bytes: Vec<u8> = signal.iter().flat_map(|word| word.to_le_bytes()).collect();
    socket.send_to(&bytes, control)?;
    let mut reply = [0; 64];
    if socket.recv(&mut reply)? != 64 {
        let message = "that element is not marked with @ in the graph that runs";
        return Err(io::Error::new(io::ErrorKind::NotFound, message));
    }
    let mut answer = [0; 8];
    for (word, part) in answer.iter_mut().zip(reply.chunks_exact(8)) {
        *word = u64::from_le_bytes(part.try_into().unwrap_or_default());
    }
    Ok(answer)
}
