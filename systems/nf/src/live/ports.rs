//! The interfaces at a graph's ends. They outlive the graph: a reload keeps them open.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use beeline_ir::flits::{BITS, Joiner, count, write_flit};
use beeline_ir::graph::Graph;
use beeline_ir::run::{Machine, Queue, Run};
use rustix::event::{PollFd, PollFlags};

use super::control::LONGEST;
use super::{LiveError, Passed};
use crate::packet_socket::{Device, Fate, Sent};
use crate::sides::Plan;

/// The queues that interfaces fill and empty, by a graph's channels.
pub(crate) trait Queues {
    /// A channel's.
    fn queue(&mut self, channel: usize) -> &mut Queue;
}

impl<M: Machine> Queues for Run<'_, M> {
    fn queue(&mut self, channel: usize) -> &mut Queue {
        self.channel_mut(channel)
    }
}

/// A device, whether its interface is in doubt or gone, and whether another one of its name was told to
/// be out of reach.
#[derive(Debug)]
struct Attached {
    device: Device,
    doubt: bool,
    gone: bool,
    unreached: bool,
}

#[derive(Debug)]
struct Input {
    port: String,
    channel: usize,
    device: usize,
    /// The packet that goes in: its bytes, when it came, its flits and how many of them went.
    bytes: Vec<u8>,
    time_ns: u64,
    flits: usize,
    sent: usize,
}

#[derive(Debug)]
struct Output {
    port: String,
    channel: usize,
    device: usize,
    joiner: Joiner,
}

/// Every interface of a run.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    devices: Vec<Attached>,
    inputs: Vec<Input>,
    outputs: Vec<Output>,
}

/// Packets taken from a device in one turn.
const PACKETS: usize = 64;

/// Errors of an interface that is down or gone, rather than of a packet.
fn of_interface(error: &io::Error) -> bool {
    // EBADFD: a TAP device was taken from its descriptor.
    let list = [libc::ENETDOWN, libc::ENXIO, libc::ENODEV, libc::EBADFD];
    error.raw_os_error().is_some_and(|code| list.contains(&code))
}

/// Nanoseconds since 1970, for the packets that come now.
fn clock() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(0))
}

/// The place of a port that carries packets among the world's inputs or outputs.
fn place(graph: &Graph, port: &str) -> Option<(bool, usize)> {
    let find = |ends: &[beeline_ir::graph::Outside]| {
        ends.iter().position(|o| o.name == port && graph.channels[o.channel].bits == BITS)
    };
    match find(&graph.inputs) {
        Some(at) => Some((true, at)),
        None => find(&graph.outputs).map(|at| (false, at)),
    }
}

impl Ports {
    /// Opens the interfaces.
    ///
    /// Errors: a port that is not there, an interface.
    pub fn open(plan: &Plan<'_>, ports: &[(String, String)]) -> Result<Self, LiveError> {
        let mut opened = Self::default();
        for (at, (port, _)) in ports.iter().enumerate() {
            if ports[..at].iter().any(|(other, _)| other == port) {
                return Err(LiveError::Twice(port.clone()));
            }
        }
        for (port, what) in ports {
            let device = opened.device(what)?;
            match place(plan.whole(), port) {
                Some((true, at)) => opened.inputs.push(Input {
                    port: port.clone(),
                    channel: plan.world(true, at),
                    device,
                    bytes: Vec::with_capacity(LONGEST),
                    time_ns: 0,
                    flits: 0,
                    sent: 0,
                }),
                Some((false, at)) => opened.outputs.push(Output {
                    port: port.clone(),
                    channel: plan.world(false, at),
                    device,
                    joiner: Joiner::default(),
                }),
                None => return Err(LiveError::NoSuchPort(port.clone())),
            }
        }
        Ok(opened)
    }

    /// Looks whether another graph has all of the ports, in the same directions.
    ///
    /// Errors: the first that it has not.
    pub fn fit(&self, graph: &Graph) -> Result<(), String> {
        let inputs = self.inputs.iter().map(|input| (&input.port, true));
        let outputs = self.outputs.iter().map(|output| (&output.port, false));
        for (port, input) in inputs.chain(outputs) {
            if place(graph, port).is_none_or(|(is_input, _)| is_input != input) {
                let kind = if input { "input" } else { "output" };
                return Err(format!(
                    "the new graph has no {kind} named {port} that carries packets, and this run has an interface for it"
                ));
            }
        }
        Ok(())
    }

    /// Leads the interfaces to another graph that [`Ports::fit`] found fit.
    pub fn lead_to(&mut self, plan: &Plan<'_>) {
        let graph = plan.whole();
        for input in &mut self.inputs {
            if let Some((true, at)) = place(graph, &input.port) {
                input.channel = plan.world(true, at);
            }
        }
        for output in &mut self.outputs {
            if let Some((false, at)) = place(graph, &output.port) {
                output.channel = plan.world(false, at);
            }
        }
    }

    /// An interface by its name, `xdp:NAME`, `xdp:NAME/QUEUE` or `tap:NAME`; each is opened once.
    fn device(&mut self, what: &str) -> Result<usize, LiveError> {
        let (kind, rest) = match what.split_once(':') {
            Some((kind @ ("tap" | "xdp"), rest)) => (kind, rest),
            _ => ("", what),
        };
        let (name, queue) = match rest.rsplit_once('/') {
            Some((name, queue)) if kind == "xdp" => (name, Some(queue)),
            _ => (rest, None),
        };
        if let Some(at) = self.devices.iter().position(|attached| attached.device.name == name) {
            return Ok(at);
        }
        let device = match (kind, queue.map(str::parse)) {
            ("tap", _) => Device::tap(name),
            ("xdp", None) => Device::express(name, None),
            ("xdp", Some(Ok(queue))) => Device::express(name, Some(queue)),
            ("xdp", Some(Err(_))) => {
                let text = "a queue is a number: xdp:NAME/0";
                Err(io::Error::new(io::ErrorKind::InvalidInput, text))
            }
            _ => Device::ringed(name),
        };
        let device =
            device.map_err(|source| LiveError::Device { name: name.to_owned(), source })?;
        self.devices.push(Attached { device, doubt: false, gone: false, unreached: false });
        Ok(self.devices.len() - 1)
    }

    /// What a run without work sleeps on: packets at interfaces that an input takes them from. What comes
    /// to an interface that only sends stays in its ring, and would never let a run sleep.
    pub fn watched(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.devices.iter().enumerate().map(|(at, attached)| {
            let events = if self.takes(at) { PollFlags::IN } else { PollFlags::empty() };
            PollFd::new(&attached.device, events)
        })
    }

    /// True where an input of the graph takes a device's packets.
    fn takes(&self, device: usize) -> bool {
        self.inputs.iter().any(|input| input.device == device)
    }

    /// How each interface's packets come and go.
    pub fn ways(&self) -> impl Iterator<Item = (&str, &'static str)> {
        self.devices.iter().map(|attached| (attached.device.name.as_str(), attached.device.way()))
    }

    /// Asks the interfaces' sockets for errors, which rings do not tell.
    ///
    /// Errors: one that is not the interface's own going down or away.
    pub fn ask(&mut self) -> Result<(), LiveError> {
        for attached in &mut self.devices {
            match attached.device.socket_error() {
                Some(error) if of_interface(&error) => attached.doubt = true,
                Some(source) => {
                    let name = attached.device.name.clone();
                    return Err(LiveError::Device { name, source });
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Looks after interfaces that gave an error.
    pub fn look(&mut self, notify: &dyn Fn(&str)) {
        for attached in self.devices.iter_mut().filter(|attached| attached.doubt) {
            let name = attached.device.name.clone();
            let fate = match attached.device.look() {
                Ok(fate) => fate,
                // One that was made a moment ago may not be up, or about to go again.
                Err(error) => {
                    if !std::mem::replace(&mut attached.unreached, true) {
                        notify(&format!("{name} is there again, and out of reach: {error}"));
                    }
                    continue;
                }
            };
            match fate {
                Fate::Gone if !attached.gone => {
                    attached.gone = true;
                    notify(&format!(
                        "{name} has disappeared: its packets are lost until it comes back"
                    ));
                }
                Fate::Gone => {}
                // Its socket goes on when it is up, unless it goes away now.
                Fate::Down => {}
                Fate::Here => attached.doubt = false,
                Fate::Replaced => {
                    (attached.doubt, attached.gone) = (false, false);
                    attached.unreached = false;
                    notify(&format!("{name} is back"));
                }
            }
        }
    }

    /// Outputs of a graph that carry packets and have no interface.
    pub fn missing<'g>(&self, graph: &'g Graph) -> impl Iterator<Item = &'g str> {
        let has = |name: &str| self.outputs.iter().any(|output| output.port == name);
        let packets = graph.outputs.iter().filter(|o| graph.channels[o.channel].bits == BITS);
        packets.map(|output| output.name.as_str()).filter(move |name| !has(name))
    }

    /// Takes packets from the interfaces into the graph; true where something moved. Without `fresh`
    /// ones only what was taken already goes on.
    pub fn receive(
        &mut self,
        queues: &mut impl Queues,
        fresh: bool,
        passed: &mut Passed,
    ) -> Result<bool, LiveError> {
        let mut moved = false;
        for input in &mut self.inputs {
            let attached = &mut self.devices[input.device];
            moved |= take(queues.queue(input.channel), input, attached, fresh, passed)?;
        }
        Ok(moved)
    }

    /// Packets that came to interfaces with an input, and found the ring full.
    pub fn missed(&mut self) -> u64 {
        let takers: Vec<bool> = (0..self.devices.len()).map(|at| self.takes(at)).collect();
        let taken = self.devices.iter_mut().zip(takers).filter(|(_, takes)| *takes);
        taken.map(|(attached, _)| attached.device.missed()).sum()
    }

    /// Sends what waits to be sent by one call.
    pub fn flush(&mut self, passed: &mut Passed) {
        for attached in &mut self.devices {
            let sent = attached.device.flush();
            account(sent, passed, &mut attached.doubt);
        }
    }

    /// Gives what came out to the interfaces, which send it by [`Ports::flush`] or when it is much;
    /// true where something moved.
    pub fn send(&mut self, queues: &mut impl Queues, passed: &mut Passed) -> bool {
        let mut moved = false;
        for output in &mut self.outputs {
            let queue = queues.queue(output.channel);
            moved |= give(queue, output, &mut self.devices[output.device], passed);
        }
        moved
    }
}

fn take(
    queue: &mut Queue,
    input: &mut Input,
    attached: &mut Attached,
    fresh: bool,
    passed: &mut Passed,
) -> Result<bool, LiveError> {
    let mut moved = false;
    // Packets taken in one turn share a time: it is read once.
    let mut now = None;
    for _ in 0..PACKETS {
        while input.sent < input.flits {
            let Some(place) = queue.places().first_mut() else { return Ok(moved) };
            write_flit(&input.bytes, input.time_ns, input.sent, place);
            queue.put(1);
            input.sent += 1;
            moved = true;
        }
        if !fresh {
            break;
        }
        match attached.device.take(&mut input.bytes) {
            Ok(true) => {
                passed.received += 1;
                input.time_ns = *now.get_or_insert_with(clock);
                (input.flits, input.sent) = (count(input.bytes.len()), 0);
            }
            Ok(false) => break,
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

fn give(
    queue: &mut Queue,
    output: &mut Output,
    attached: &mut Attached,
    passed: &mut Passed,
) -> bool {
    let mut moved = false;
    while let Some(flit) = queue.oldest().first() {
        moved = true;
        let joined = output.joiner.push(flit);
        queue.drop_oldest(1);
        match joined {
            Ok(Some((bytes, _))) => {
                let sent = attached.device.queue(bytes);
                account(sent, passed, &mut attached.doubt);
            }
            Ok(None) => {}
            Err(_) => passed.malformed += 1,
        }
    }
    moved
}

fn account(sent: Sent, passed: &mut Passed, doubt: &mut bool) {
    passed.sent += sent.sent;
    passed.refused += sent.refused;
    *doubt |= sent.error.as_ref().is_some_and(of_interface);
}
