//! Simulated hardware between network interfaces: a shell that takes the place of a card's wires.
//!
//! The design runs in a simulator of Verilog, or in the cycle model, and stops again and again for an
//! exchange: the packets that the interfaces have go in, those that came out are sent. Time in the
//! design has nothing to do with time outside: it runs as fast as it can be simulated, and stands still
//! while nothing comes.

use std::io::{self, BufRead as _, BufReader, BufWriter, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use beeline_ir::graph::{Channel, Graph, Peer};
use beeline_ir::run::{Queue, Signal};
use beeline_passes::cycle::Cycles;
use beeline_passes::hardware::Hardware;
use beeline_verilog::graph::design;
use beeline_verilog::wire::{END, GO, MOST, bench};
use rustix::event::{PollFd, Timespec, poll};

use crate::diff::{DiffError, Simulator, addressed, compiled, words_of};
use crate::hand_written::HandWritten;
use crate::live::ports::{Ports, Queues};
use crate::live::{LiveError, Passed};
use crate::sides::Plan;
use crate::sides::split::TooManyCrossings;

/// Clocks between two exchanges.
const PACE: u32 = 64;
/// Items that leave within one exchange, at most.
const ROOM: u32 = 65_536;

/// A wire's end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// An interface.
    #[error(transparent)]
    Live(#[from] LiveError),
    /// A simulator.
    #[error(transparent)]
    Simulation(#[from] DiffError),
    /// The simulator's words.
    #[error("the simulation: {0}")]
    Talk(#[from] io::Error),
    /// It ended by itself.
    #[error("the simulation ended by itself")]
    Ended,
    /// `host` elements.
    #[error(transparent)]
    Crossings(#[from] TooManyCrossings),
}

/// The queues of a graph's channels; those of the world's ends are used.
struct Ends(Vec<Queue>);

impl Queues for Ends {
    fn queue(&mut self, channel: usize) -> &mut Queue {
        &mut self.0[channel]
    }
}

/// Hardware that stops for exchanges.
trait Shell {
    /// Gives the design what the queues of its inputs hold, runs it until the next exchange, and puts
    /// what came out into those of its outputs; true where nothing moves any more.
    fn exchange(&mut self, graph: &Graph, ends: &mut Ends) -> Result<bool, WireError>;
}

/// A program that simulates.
struct Simulated {
    child: Child,
    to: BufWriter<ChildStdin>,
    from: BufReader<ChildStdout>,
    signals: Vec<Signal>,
}

impl Simulated {
    fn start(
        (simulator, folder): (Simulator, &Path),
        graph: &Graph,
        (hardware, own): (&[Hardware], &HandWritten),
        signals: Vec<Signal>,
    ) -> Result<Self, WireError> {
        let text = design(graph, hardware, &|name| own.text(name));
        std::fs::write(folder.join("design.v"), text)?;
        std::fs::write(folder.join("bench.v"), bench(graph, PACE))?;
        let (program, words) = compiled(simulator, folder)?;
        let path = if program.starts_with("./") { folder.join(program) } else { program.into() };
        let mut child = Command::new(path)
            .args(words)
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(WireError::Ended);
        };
        Ok(Self { child, to: BufWriter::new(to), from: BufReader::new(from), signals })
    }

    /// Items for a port, in hexadecimal numbers.
    fn item(&mut self, port: usize, words: &[u64]) -> io::Result<()> {
        write!(self.to, "{port} ")?;
        words.iter().rev().try_for_each(|word| write!(self.to, "{word:016x}"))?;
        writeln!(self.to)
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        let _ = writeln!(self.to, "{END}");
        let _ = self.to.flush();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Shell for Simulated {
    fn exchange(&mut self, graph: &Graph, ends: &mut Ends) -> Result<bool, WireError> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.from.read_line(&mut line)? == 0 {
                return Err(WireError::Ended);
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["o", port, hex] => {
                    let end = port.parse().ok().and_then(|port: usize| graph.outputs.get(port));
                    let Some((end, item)) = end.zip(words_of(hex)) else { continue };
                    let queue = ends.queue(end.channel);
                    let mut item = item;
                    item.resize(queue.width(), 0);
                    queue.push(&item);
                }
                ["?", idle, free] => {
                    if free == "1" {
                        for (port, signal) in std::mem::take(&mut self.signals).iter().enumerate() {
                            if port < MOST {
                                self.item(graph.inputs.len(), signal)?;
                            } else {
                                self.signals.push(*signal);
                            }
                        }
                        for (port, input) in graph.inputs.iter().enumerate() {
                            let queue = ends.queue(input.channel);
                            let mut item = vec![0; queue.width()];
                            for _ in 0..MOST {
                                if !queue.pop(&mut item) {
                                    break;
                                }
                                self.item(port, &item)?;
                            }
                        }
                    }
                    writeln!(self.to, "{GO}")?;
                    self.to.flush()?;
                    return Ok(idle == "1");
                }
                _ => {}
            }
        }
    }
}

/// The cycle model.
struct Model<'a>(Cycles<'a>);

impl Shell for Model<'_> {
    fn exchange(&mut self, graph: &Graph, ends: &mut Ends) -> Result<bool, WireError> {
        let model = &mut self.0;
        for _ in 0..PACE * 16 {
            // As in `diff`: a channel takes what it had room for before the edge.
            let room: Vec<bool> =
                graph.inputs.iter().map(|input| !model.channel(input.channel).is_full()).collect();
            let there = graph.outputs.iter().filter(|o| !model.channel(o.channel).is_empty());
            let there: Vec<usize> = there.map(|output| output.channel).collect();
            model.tick();
            let mut moved = false;
            for channel in there {
                let queue = ends.queue(channel);
                let mut item = vec![0; queue.width()];
                model.channel_mut(channel).pop(&mut item);
                queue.push(&item);
                moved = true;
            }
            for (input, room) in graph.inputs.iter().zip(room) {
                let queue = ends.queue(input.channel);
                let mut item = vec![0; queue.width()];
                if room && queue.pop(&mut item) {
                    model.channel_mut(input.channel).push(&item);
                    moved = true;
                }
            }
            if moved {
                model.touch();
            }
            if model.still() > u64::from(PACE) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Names of the world's ends, and what each is joined to.
pub type Bound = [(String, String)];
/// Signals, each with its node.
pub type Signals = [(usize, Signal)];

/// Runs a graph's hardware between interfaces until told to stop; `signals` come first. Without a
/// simulator, the cycle model runs. `notify` hears what the user should know.
///
/// Errors: an interface, a simulator that does not take the design or ends.
pub fn serve(
    graph: &Graph,
    (hardware, own): (&[Hardware], &HandWritten),
    simulator: Option<Simulator>,
    (ports, signals): (&Bound, &Signals),
    (notify, stop): (&dyn Fn(&str), &AtomicBool),
) -> Result<Passed, WireError> {
    // The hardware is the whole graph, `host` elements too.
    let mut whole = graph.clone();
    whole.nodes.iter_mut().for_each(|node| node.host = false);
    let mut ports = Ports::open(&Plan::of(&whole)?, ports)?;
    for (name, way) in ports.ways() {
        notify(&format!("{name}: {way}"));
    }
    let signals: Vec<Signal> =
        signals.iter().map(|(node, signal)| addressed(graph, *node, *signal)).collect();
    let folder = tempfile::tempdir()?;
    let mut shell: Box<dyn Shell + '_> = match simulator {
        Some(simulator) => {
            let both = (simulator, folder.path());
            Box::new(Simulated::start(both, graph, (hardware, own), signals)?)
        }
        None => {
            let mut model = Cycles::new(graph, hardware);
            for signal in signals {
                let id = signal[0] & 0xffff;
                let node = graph.nodes.iter().position(|node| u64::from(node.id) == id);
                let Some(node) = node else { continue };
                model.send_signal(node, signal);
                while model.take_answer(node).is_none() && model.still() < 100_000 {
                    model.tick();
                }
            }
            Box::new(Model(model))
        }
    };
    let queue = |channel: &Channel| {
        let world = [channel.from, channel.to].iter().any(|end| matches!(end, Peer::Outside(_)));
        Queue::new(channel.bits, if world { ROOM } else { 1 })
    };
    let mut ends = Ends(graph.channels.iter().map(queue).collect());
    let mut passed = Passed::default();
    while !stop.load(Ordering::Relaxed) {
        let came = ports.receive(&mut ends, true, &mut passed)?;
        let idle = shell.exchange(graph, &mut ends)?;
        let went = ports.send(&mut ends, &mut passed);
        ports.flush(&mut passed);
        if idle && !came && !went {
            let mut list: Vec<PollFd<'_>> = ports.watched().collect();
            let limit = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            match poll(&mut list, Some(&limit)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(LiveError::Wait(error.into()).into()),
            }
            ports.ask()?;
            ports.look(notify);
        }
    }
    passed.missed = ports.missed();
    Ok(passed)
}
