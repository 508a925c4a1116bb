//! Runs a graph from captures to captures.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use beeline_ir::flits::{FlitError, Joiner, count, write_flit, write_flits};
use beeline_ir::graph::{Graph, Outside};
use beeline_ir::run::{Machine, Run, RunError};
use beeline_native::NativeError;

use crate::functions::{CommandError, Manager, Signalled};
use crate::pcap::{PcapError, RECORD, Reader, Writer, record};
use crate::sides::{LinkOptions, Machines, Make, Plan, Sides, SidesError};

/// A run ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A handler or a deadlock.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Machine code.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// The two sides of a graph.
    #[error(transparent)]
    Sides(#[from] SidesError),
    /// A capture.
    #[error("{}: {source}", path.display())]
    Capture {
        /// The file.
        path: PathBuf,
        /// Why.
        source: PcapError,
    },
    /// A command before the run.
    #[error("{command}: {source}")]
    Command {
        /// The command.
        command: String,
        /// Why not.
        source: CommandError,
    },
    /// One end twice.
    #[error("{0} is named twice")]
    Twice(String),
    /// A capture that would be written over.
    #[error("{}: two ports have this file, and an output writes it", .0.display())]
    WrittenOver(PathBuf),
    /// A name without an end.
    #[error("the graph's {direction} {name} has no --port {name}=...")]
    Unbound {
        /// `input` or `output`.
        direction: &'static str,
        /// Its name.
        name: String,
    },
    /// An end without a name.
    #[error("the graph has no input or output named {0}")]
    NoSuchPort(String),
    /// A port of items that are not flits.
    #[error("{0} carries items that are not packets: connect it inside the graph")]
    NotPackets(String),
}

/// Counters of a run.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Counts {
    /// Packets read.
    pub packets_in: u64,
    /// Packets written.
    pub packets_out: u64,
    /// Flits that were no packet.
    pub malformed: u64,
    /// Rounds over all elements.
    pub rounds: u64,
}

enum End<R, W> {
    Reader {
        channel: usize,
        reader: Box<Reader<R>>,
        path: PathBuf,
        /// The packet that goes in, its time, how many flits it has and how many of them went.
        bytes: Vec<u8>,
        time_ns: u64,
        flits: usize,
        sent: usize,
    },
    Writer {
        channel: usize,
        writer: Box<Writer<W>>,
        path: PathBuf,
        joiner: Joiner,
    },
}

/// The captures at a graph's ends.
pub(crate) struct Ends<R, W>(Vec<End<R, W>>);

/// Captures in files.
pub(crate) type Files = Ends<BufReader<File>, BufWriter<File>>;

impl Files {
    /// Opens a capture for each input and output.
    pub(crate) fn open(graph: &Graph, ports: &[(String, PathBuf)]) -> Result<Self, EngineError> {
        open(graph, ports)
    }
}

impl<R: BufRead, W: Write> Ends<R, W> {
    /// Moves what can be moved; true where something was.
    pub(crate) fn feed<M: Machine>(
        &mut self,
        run: &mut Run<'_, M>,
        counts: &mut Counts,
    ) -> Result<bool, EngineError> {
        let mut moved = false;
        for end in &mut self.0 {
            moved |= feed(run, end, counts)?;
        }
        Ok(moved)
    }

    /// Leads the ends to the channels of the side of a plan that they are at.
    fn lead(&mut self, plan: &Plan<'_>) {
        let graph = plan.whole();
        for end in &mut self.0 {
            let (input, channel) = match end {
                End::Reader { channel, .. } => (true, channel),
                End::Writer { channel, .. } => (false, channel),
            };
            let ends = if input { &graph.inputs } else { &graph.outputs };
            if let Some(at) = ends.iter().position(|end| end.channel == *channel) {
                *channel = plan.world(input, at);
            }
        }
    }

    /// Writes what is left to write; the files of the outputs in the graph's order.
    pub(crate) fn finish(self) -> Result<Vec<W>, EngineError> {
        let mut files = Vec::new();
        for end in self.0 {
            if let End::Writer { writer, path, .. } = end {
                let file = writer.finish();
                files.push(
                    file.map_err(|error| EngineError::Capture { path, source: error.into() })?,
                );
            }
        }
        Ok(files)
    }

    fn input(&mut self, channel: usize, path: PathBuf, from: R) -> Result<(), EngineError> {
        let reader = Reader::new(from);
        let reader =
            reader.map_err(|source| EngineError::Capture { path: path.clone(), source })?;
        let (bytes, reader) = (Vec::new(), Box::new(reader));
        self.0.push(End::Reader { channel, reader, path, bytes, time_ns: 0, flits: 0, sent: 0 });
        Ok(())
    }

    fn output(&mut self, channel: usize, path: PathBuf, to: W) -> Result<(), EngineError> {
        let writer = Writer::new(to)
            .map_err(|error| EngineError::Capture { path: path.clone(), source: error.into() })?;
        let writer = Box::new(writer);
        self.0.push(End::Writer { channel, writer, path, joiner: Joiner::in_a_row(RECORD) });
        Ok(())
    }
}

/// Rounds without movement after which a run from captures has ended.
const QUIET: u32 = 64;

/// Runs `graph` until its captures are read and nothing moves any more.
///
/// `commands` are carried out before the first packet.
///
/// `link` says how many threads there may be, and what joins them.
///
/// Errors: a port that is not bound or not there, a capture, a command, a handler that does not end,
/// a deadlock.
pub fn run_captures<M: Machine + Send + 'static>(
    graph: &Graph,
    (make, link): (Make<'_, M>, LinkOptions),
    ports: &[(String, PathBuf)],
    commands: &[String],
) -> Result<(Counts, Vec<u64>), EngineError> {
    let ends = Files::open(graph, ports)?;
    let (counts, passed, _) = play(graph, (make, link), ends, commands)?;
    Ok((counts, passed))
}

/// As [`run_captures`], with a capture in memory for every input in the graph's order; gives also
/// those of the outputs, written over `old` as far as that goes, which spares new memory.
///
/// Errors: as for [`run_captures`].
pub fn run_memory<M: Machine + Send + 'static>(
    graph: &Graph,
    (make, link): (Make<'_, M>, LinkOptions),
    captures: &[&[u8]],
    commands: &[String],
    old: Vec<Vec<u8>>,
) -> Result<(Counts, Vec<Vec<u8>>), EngineError> {
    let mut ends = Ends(Vec::new());
    for (at, input) in graph.inputs.iter().enumerate() {
        let Some(capture) = captures.get(at) else {
            let name = input.name.clone();
            return Err(EngineError::Unbound { direction: "input", name });
        };
        carries_packets(graph, input)?;
        ends.input(input.channel, PathBuf::from(&input.name), *capture)?;
    }
    let mut old = old.into_iter();
    for output in &graph.outputs {
        carries_packets(graph, output)?;
        let mut file = old.next().unwrap_or_default();
        file.clear();
        ends.output(output.channel, PathBuf::from(&output.name), file)?;
    }
    let (counts, _, files) = play(graph, (make, link), ends, commands)?;
    Ok((counts, files))
}

/// Counts, items of each channel, and the files of the outputs.
type Played<W> = (Counts, Vec<u64>, Vec<W>);

fn play<M: Machine + Send + 'static, R: BufRead, W: Write>(
    graph: &Graph,
    (make, link): (Make<'_, M>, LinkOptions),
    mut ends: Ends<R, W>,
    commands: &[String],
) -> Result<Played<W>, EngineError> {
    let plan = Plan::threaded(graph, link.threads).map_err(SidesError::from)?;
    let machines = Machines::make(&plan, make)?;
    let mut run = Sides::start(&plan, machines, link, None)?;
    prepare(graph, &mut run, commands)?;
    let mut counts = Counts::default();
    let mut failed = None;
    ends.lead(&plan);
    ends.feed(run.card(), &mut counts)?;
    counts.rounds = run.settle(QUIET, |run| {
        let moved = match ends.feed(run, &mut counts) {
            Ok(moved) => moved,
            Err(error) => {
                failed = Some(error);
                false
            }
        };
        moved && failed.is_none()
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    let files = ends.finish()?;
    let passed = (0..graph.channels.len()).map(|at| run.passed(at)).collect();
    Ok((counts, passed, files))
}

/// Carries out commands of the graph's functions.
///
/// Errors: a command that is refused; a handler that does not end.
pub fn prepare(
    graph: &Graph,
    run: &mut impl Signalled,
    commands: &[String],
) -> Result<(), EngineError> {
    let mut manager = Manager::of(graph);
    for command in commands {
        let failed = |source| EngineError::Command { command: command.clone(), source };
        manager.command(command, run).map_err(failed)?;
        while manager.apply(run, 1_024)? {}
    }
    Ok(())
}

fn carries_packets(graph: &Graph, end: &Outside) -> Result<(), EngineError> {
    if graph.channels[end.channel].bits == beeline_ir::flits::BITS {
        Ok(())
    } else {
        Err(EngineError::NotPackets(end.name.clone()))
    }
}

fn open(graph: &Graph, ports: &[(String, PathBuf)]) -> Result<Files, EngineError> {
    for (at, (name, _)) in ports.iter().enumerate() {
        if ports[..at].iter().any(|(other, _)| other == name) {
            return Err(EngineError::Twice(name.clone()));
        }
        if !graph.inputs.iter().chain(&graph.outputs).any(|o| o.name == *name) {
            return Err(EngineError::NoSuchPort(name.clone()));
        }
    }
    let path_of = |name: &str, direction| {
        let found = ports.iter().find(|(port, _)| port == name).map(|(_, path)| path.clone());
        found.ok_or_else(|| EngineError::Unbound { direction, name: name.to_owned() })
    };
    let capture = |path: &Path, error: io::Error| EngineError::Capture {
        path: path.to_owned(),
        source: error.into(),
    };
    let mut ends = Ends(Vec::new());
    for input in &graph.inputs {
        let path = path_of(&input.name, "input")?;
        carries_packets(graph, input)?;
        let file = File::open(&path).map_err(|error| capture(&path, error))?;
        ends.input(input.channel, path, BufReader::new(file))?;
    }
    // An output begins its file anew: not one that an input reads or another output writes.
    let mut taken = Vec::new();
    for input in &graph.inputs {
        taken.extend(number(&path_of(&input.name, "input")?));
    }
    for output in &graph.outputs {
        let path = path_of(&output.name, "output")?;
        carries_packets(graph, output)?;
        if number(&path).is_some_and(|file| taken.contains(&file)) {
            return Err(EngineError::WrittenOver(path));
        }
        let file = File::create(&path).map_err(|error| capture(&path, error))?;
        taken.extend(number(&path));
        ends.output(output.channel, path, BufWriter::new(file))?;
    }
    Ok(ends)
}

/// What tells a regular file from any other: two names may lead to one.
fn number(path: &Path) -> Option<(u64, u64)> {
    let found = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some((found.dev(), found.ino()))
}

/// Moves what can be moved between a channel and its capture.
fn feed<M: Machine, R: BufRead, W: Write>(
    run: &mut Run<'_, M>,
    end: &mut End<R, W>,
    counts: &mut Counts,
) -> Result<bool, EngineError> {
    let mut moved = false;
    match end {
        End::Reader { channel, reader, path, bytes, time_ns, flits, sent } => loop {
            let failed = |source| EngineError::Capture { path: path.clone(), source };
            let places = run.channel_mut(*channel).places();
            if places.is_empty() {
                return Ok(moved);
            }
            let mut used = 0;
            while sent < flits && used < places.len() {
                write_flit(bytes, *time_ns, *sent, &mut places[used]);
                (*sent, used) = (*sent + 1, used + 1);
            }
            // A packet that lies whole in the file's buffer goes from there, but for what finds no
            // room now.
            let mut next = None;
            while used < places.len() {
                let Some((time, packet)) = reader.whole().map_err(failed)? else {
                    next = reader.next_into(bytes).map_err(failed)?;
                    break;
                };
                let (all, length) = (count(packet.len()), packet.len());
                let fits = all.min(places.len() - used);
                write_flits(packet, time, &mut places[used..used + fits]);
                used += fits;
                if fits < all {
                    bytes.clear();
                    bytes.extend_from_slice(packet);
                    (*time_ns, *flits, *sent) = (time, all, fits);
                }
                reader.pass(length);
                counts.packets_in += 1;
            }
            run.channel_mut(*channel).put(used);
            moved |= used > 0;
            if let Some(time) = next {
                (*time_ns, *flits, *sent) = (time, count(bytes.len()), 0);
                counts.packets_in += 1;
            } else if used == 0 {
                return Ok(moved);
            }
        },
        End::Writer { channel, writer, path, joiner } => {
            let queue = run.channel_mut(*channel);
            loop {
                let items = queue.oldest();
                if items.is_empty() {
                    break;
                }
                for item in items {
                    match joiner.push(item) {
                        Ok(Some((bytes, time_ns))) => {
                            let record = record(time_ns, bytes.len());
                            joiner.head_mut().copy_from_slice(&record);
                            counts.packets_out += 1;
                        }
                        Ok(None) => {}
                        Err(FlitError::BeginsInside | FlitError::Outside | FlitError::TooLong) => {
                            counts.malformed += 1
                        }
                    }
                }
                let count = items.len();
                queue.drop_oldest(count);
                moved = true;
            }
            let written = joiner.take_row(|row| writer.write_row(row));
            written.map_err(|error| EngineError::Capture {
                path: path.clone(),
                source: error.into(),
            })?;
            Ok(moved)
        }
    }
}
