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
use beeline_ir::run::{BATCH, Machine, Run, RunError, Signal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::functions::Manager;
use crate::packet_socket::{Device, Fate};
use crate::statistics::{COMMAND, Statistics};

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
    /// A command before the run.
    #[error("{command}: {source}")]
    Command {
        /// The command.
        command: String,
        /// Why not.
        source: crate::functions::CommandError,
    },
    /// Waiting.
    #[error("waiting for packets: {0}")]
    Wait(io::Error),
}

/// What has passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
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
    /// Commands answered.
    pub commands: u64,
}

impl Passed {
    /// Nanoseconds since 1970, for the packets that come now.
    fn clock(&self) -> u64 {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(0))
    }
}

/// What a run is told beside its ports.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// Where signals and commands come.
    pub control: Option<&'a Path>,
    /// Commands before the first packet.
    pub commands: &'a [String],
    /// Hears what the user should know: an interface that went, or came back.
    pub notify: &'a (dyn Fn(&str) + Sync),
    /// Ends the run.
    pub stop: &'a AtomicBool,
}

impl std::fmt::Debug for Surroundings<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Surroundings").field("control", &self.control).finish_non_exhaustive()
    }
}

/// A device, and whether its interface is in doubt or gone.
struct Attached {
    device: Device,
    doubt: bool,
    gone: bool,
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

/// Runs until told to stop. An interface that disappears is named, and waited for; the others go on.
///
/// Errors: a port that is not there; the sockets; a command; a handler that does not end.
pub fn run<M: Machine>(
    graph: &Graph,
    machines: Vec<M>,
    ports: &[(String, String)],
    around: Surroundings<'_>,
) -> Result<Passed, LiveError> {
    let Surroundings { control, commands, stop, .. } = around;
    let mut devices: Vec<Attached> = Vec::new();
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
    let mut manager = Manager::of(graph);
    for text in commands {
        let failed = |source| LiveError::Command { command: text.clone(), source };
        manager.command(text, &mut graph_run).map_err(failed)?;
        while manager.apply(&mut graph_run, 1_024)? {}
    }
    let mut late: Late = None;
    let mut passed = Passed::default();
    let mut buffer = vec![0; LONGEST];
    let (mut still, mut named) = (0_u32, false);
    while !stop.load(Ordering::Relaxed) {
        let mut moved = false;
        for input in &mut inputs {
            moved |= receive(&mut graph_run, input, &mut devices, &mut buffer, &mut passed)?;
        }
        let (_, round) = graph_run.rounds(BATCH)?;
        moved |= round.fetched || round.wrote;
        for output in &mut outputs {
            moved |= send(&mut graph_run, output, &mut devices, &mut passed);
        }
        if let Some(socket) = &socket {
            // A few signals a turn, so that packets do not wait for a large change; its answer goes
            // when the graph has it whole.
            if manager.apply(&mut graph_run, SIGNALS)? {
                moved = true;
            } else if let Some((path, reply)) = late.take() {
                let _: io::Result<usize> = socket.send_to(&reply, path);
                passed.commands += 1;
            } else {
                let world = (graph, socket, &mut manager);
                moved |= answer(world, &mut graph_run, &mut buffer, &mut late, &mut passed)?;
            }
        }
        if moved {
            (still, named) = (0, false);
        } else {
            still += 1;
            // Packets of another port may end the wait, so the run goes on.
            if still == STUCK && round.blocked && !named {
                named = true;
                let waits = graph_run.waits();
                if !waits.is_empty() {
                    (around.notify)(&format!("nothing moves: {}", waits.join("; ")));
                }
            }
            wait(&devices, socket.as_ref())?;
            for attached in devices.iter_mut().filter(|attached| attached.doubt) {
                look(attached, around.notify)?;
            }
        }
    }
    if let Some(path) = control {
        let _ = std::fs::remove_file(path);
    }
    Ok(passed)
}

/// An interface by its name, or `tap:NAME`; each is opened once.
fn open(devices: &mut Vec<Attached>, what: &str) -> Result<usize, LiveError> {
    let (tap, name) = match what.strip_prefix("tap:") {
        Some(name) => (true, name),
        None => (false, what),
    };
    if let Some(at) = devices.iter().position(|attached| attached.device.name == name) {
        return Ok(at);
    }
    let device = if tap { Device::tap(name) } else { Device::interface(name) };
    let device = device.map_err(|source| LiveError::Device { name: name.to_owned(), source })?;
    devices.push(Attached { device, doubt: false, gone: false });
    Ok(devices.len() - 1)
}

/// Looks after an interface that gave an error.
fn look(attached: &mut Attached, notify: &dyn Fn(&str)) -> Result<(), LiveError> {
    let name = attached.device.name.clone();
    let fate = attached.device.look();
    match fate.map_err(|source| LiveError::Device { name: name.clone(), source })? {
        Fate::Gone if !attached.gone => {
            attached.gone = true;
            notify(&format!("{name} has disappeared: its packets are lost until it comes back"));
        }
        Fate::Gone => {}
        // It may be down only: then its socket goes on when it is up.
        Fate::Here => attached.doubt = false,
        Fate::Replaced => {
            (attached.doubt, attached.gone) = (false, false);
            notify(&format!("{name} is back"));
        }
    }
    Ok(())
}

/// Errors of an interface that is down or gone, rather than of a packet.
fn of_interface(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV))
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

/// Turns without movement, at the pace of an idle run, after which a wait is named.
const STUCK: u32 = 20;
/// Packets taken from a device in one turn.
const PACKETS: usize = 64;

fn receive<M: Machine>(
    run: &mut Run<'_, M>,
    input: &mut Input,
    devices: &mut [Attached],
    buffer: &mut [u8],
    passed: &mut Passed,
) -> Result<bool, LiveError> {
    let mut moved = false;
    for _ in 0..PACKETS {
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
        let attached = &mut devices[input.device];
        match attached.device.receive(buffer) {
            Ok(Some(count)) => {
                passed.received += 1;
                split(&buffer[..count], passed.clock(), |flit| input.waiting.extend(flit));
            }
            Ok(None) => break,
            // An interface that went down may come up again; until then it has no packets.
            Err(error) if of_interface(&error) => {
                attached.doubt = true;
                break;
            }
            Err(source) => {
                return Err(LiveError::Device { name: attached.device.name.clone(), source });
            }
        }
    }
    Ok(moved)
}

fn send<M: Machine>(
    run: &mut Run<'_, M>,
    output: &mut Output,
    devices: &mut [Attached],
    passed: &mut Passed,
) -> bool {
    let mut flit = [0; WORDS];
    let mut moved = false;
    while run.channel_mut(output.channel).pop(&mut flit) {
        moved = true;
        match output.joiner.push(&flit) {
            Ok(Some((bytes, _))) => match devices[output.device].device.send(bytes) {
                Ok(true) => passed.sent += 1,
                Ok(false) => passed.refused += 1,
                Err(error) => {
                    passed.refused += 1;
                    devices[output.device].doubt |= of_interface(&error);
                }
            },
            Ok(None) => {}
            Err(_) => passed.malformed += 1,
        }
    }
    moved
}

/// Signals applied between two turns.
const SIGNALS: usize = 256;
/// First bytes of a command in words; no element has this number.
const WORDS_FOLLOW: [u8; 2] = [0xff; 2];
/// Longest command, and longest answer.
const LONGEST: usize = 65_536;

type Late = Option<(PathBuf, Vec<u8>)>;

/// A request is a signal of 64 bytes; its first 16 bits name the element. The answer has 64 bytes,
/// or one byte where no such element may be signalled. A request that begins with [`WORDS_FOLLOW`]
/// is a command in words for the graph's functions; its answer is `+` or `-` and words.
fn answer<M: Machine>(
    (graph, socket, manager): (&Graph, &UnixDatagram, &mut Manager),
    run: &mut Run<'_, M>,
    bytes: &mut [u8],
    late: &mut Late,
    passed: &mut Passed,
) -> Result<bool, LiveError> {
    let Ok((count, from)) = socket.recv_from(bytes) else { return Ok(false) };
    let Some(path) = from.as_pathname() else { return Ok(true) };
    if bytes[..count].strip_prefix(&WORDS_FOLLOW) == Some(COMMAND.as_bytes()) {
        let counted = Statistics::of(graph, run, *passed);
        let mut reply = b"+".to_vec();
        reply.extend(serde_json::to_vec(&counted).unwrap_or_default());
        *late = Some((path.to_owned(), reply));
        return Ok(true);
    }
    if let Some(text) = bytes[..count].strip_prefix(&WORDS_FOLLOW) {
        let mut reply = match manager.command(&String::from_utf8_lossy(text), run) {
            Ok(words) => format!("+{words}").into_bytes(),
            Err(crate::functions::CommandError::Run(error)) => return Err(error.into()),
            Err(error) => format!("-{error}").into_bytes(),
        };
        reply.truncate(LONGEST);
        *late = Some((path.to_owned(), reply));
        return Ok(true);
    }
    let mut signal: Signal = [0; 8];
    for (word, part) in signal.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(part.try_into().unwrap_or_default());
    }
    let id = signal[0] & 0xffff;
    let node = graph.nodes.iter().position(|node| u64::from(node.id) == id && node.signalled);
    let (Some(node), 64) = (node, count) else {
        let _: io::Result<usize> = socket.send_to(&[0], path);
        return Ok(true);
    };
    let answer = run.signal_now(node, signal)?;
    let reply: Vec<u8> = answer.iter().flat_map(|word| word.to_le_bytes()).collect();
    let _: io::Result<usize> = socket.send_to(&reply, path);
    passed.signals += 1;
    Ok(true)
}

fn wait(devices: &[Attached], socket: Option<&UnixDatagram>) -> Result<(), LiveError> {
    let mut list: Vec<PollFd<'_>> =
        devices.iter().map(|attached| PollFd::new(&attached.device, PollFlags::IN)).collect();
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

/// Sends a command in words to a running graph and waits for its answer: the words, or why not.
///
/// Errors: nothing runs there; no answer in half a minute.
pub fn command(control: &Path, text: &str) -> io::Result<Result<String, String>> {
    let folder = tempfile::tempdir()?;
    let socket = UnixDatagram::bind(folder.path().join("answer"))?;
    socket.set_read_timeout(Some(std::time::Duration::from_secs(30)))?;
    let mut bytes = WORDS_FOLLOW.to_vec();
    bytes.extend(text.as_bytes());
    socket.send_to(&bytes, control)?;
    let mut reply = vec![0; LONGEST];
    let count = socket.recv(&mut reply)?;
    let words = |from: &[u8]| String::from_utf8_lossy(from).into_owned();
    Ok(match reply[..count].split_first() {
        Some((b'+', rest)) => Ok(words(rest)),
        Some((_, rest)) => Err(words(rest)),
        None => Err("the answer is empty".to_owned()),
    })
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
