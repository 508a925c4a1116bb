//! Runs a graph from captures to captures.

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};

use beeline_ir::flits::{FlitError, Joiner, WORDS, split};
use beeline_ir::graph::Graph;
use beeline_ir::run::{Machine, Run, RunError};
use beeline_native::NativeError;

use crate::functions::{CommandError, Manager};
use crate::pcap::{PcapError, Reader, Writer};

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

enum End {
    Reader {
        channel: usize,
        reader: Box<Reader<BufReader<File>>>,
        path: PathBuf,
        next: Vec<u64>,
    },
    Writer {
        channel: usize,
        writer: Option<Writer<BufWriter<File>>>,
        path: PathBuf,
        joiner: Joiner,
    },
}

/// The captures at a graph's ends.
pub(crate) struct Ends(Vec<End>);

impl Ends {
    /// Opens a capture for each input and output.
    pub(crate) fn open(graph: &Graph, ports: &[(String, PathBuf)]) -> Result<Self, EngineError> {
        open(graph, ports).map(Self)
    }

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

    /// Writes what is left to write.
    pub(crate) fn finish(self) -> Result<(), EngineError> {
        for end in self.0 {
            if let End::Writer { writer: Some(writer), path, .. } = end {
                writer
                    .finish()
                    .map_err(|error| EngineError::Capture { path, source: error.into() })?;
            }
        }
        Ok(())
    }
}

/// Rounds without movement after which a run from captures has ended.
const QUIET: u32 = 64;

/// Runs `graph` until its captures are read and nothing moves any more.
///
/// `commands` are carried out before the first packet.
///
/// Errors: a port that is not bound or not there, a capture, a command, a handler that does not end,
/// a deadlock.
pub fn run_captures<M: Machine>(
    graph: &Graph,
    machines: Vec<M>,
    ports: &[(String, PathBuf)],
    commands: &[String],
) -> Result<(Counts, Vec<u64>), EngineError> {
    let mut ends = Ends::open(graph, ports)?;
    let mut run = Run::new(graph, machines)?;
    prepare(graph, &mut run, commands)?;
    let mut counts = Counts::default();
    let mut failed = None;
    ends.feed(&mut run, &mut counts)?;
    counts.rounds = run.settle(QUIET, u64::MAX, |run| {
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
    ends.finish()?;
    let passed = (0..graph.channels.len()).map(|at| run.channel(at).passed).collect();
    Ok((counts, passed))
}

/// Carries out commands of the graph's functions.
///
/// Errors: a command that is refused; a handler that does not end.
pub fn prepare<M: Machine>(
    graph: &Graph,
    run: &mut Run<'_, M>,
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

fn open(graph: &Graph, ports: &[(String, PathBuf)]) -> Result<Vec<End>, EngineError> {
    for (name, _) in ports {
        if !graph.inputs.iter().chain(&graph.outputs).any(|o| o.name == *name) {
            return Err(EngineError::NoSuchPort(name.clone()));
        }
    }
    let path_of = |name: &str, direction| {
        let found = ports.iter().find(|(port, _)| port == name).map(|(_, path)| path.clone());
        found.ok_or_else(|| EngineError::Unbound { direction, name: name.to_owned() })
    };
    let capture =
        |path: &Path, source: PcapError| EngineError::Capture { path: path.to_owned(), source };
    let mut ends = Vec::new();
    for input in &graph.inputs {
        let path = path_of(&input.name, "input")?;
        if graph.channels[input.channel].bits != beeline_ir::flits::BITS {
            return Err(EngineError::NotPackets(input.name.clone()));
        }
        let file = File::open(&path).map_err(|error| capture(&path, error.into()))?;
        let reader = Reader::new(BufReader::new(file)).map_err(|error| capture(&path, error))?;
        let next = Vec::new();
        ends.push(End::Reader { channel: input.channel, reader: Box::new(reader), path, next });
    }
    for output in &graph.outputs {
        let path = path_of(&output.name, "output")?;
        if graph.channels[output.channel].bits != beeline_ir::flits::BITS {
            return Err(EngineError::NotPackets(output.name.clone()));
        }
        let file = File::create(&path).map_err(|error| capture(&path, error.into()))?;
        let writer = Writer::new(BufWriter::new(file));
        let writer = Some(writer.map_err(|error| capture(&path, error.into()))?);
        ends.push(End::Writer { channel: output.channel, writer, path, joiner: Joiner::default() });
    }
    Ok(ends)
}

/// Moves what can be moved between a channel and its capture.
fn feed<M: Machine>(
    run: &mut Run<'_, M>,
    end: &mut End,
    counts: &mut Counts,
) -> Result<bool, EngineError> {
    let mut moved = false;
    match end {
        End::Reader { channel, reader, path, next } => loop {
            let queue = run.channel_mut(*channel);
            let mut sent = 0;
            while sent < next.len() && queue.push(&next[sent..sent + WORDS]) {
                sent += WORDS;
                moved = true;
            }
            next.drain(..sent);
            if !next.is_empty() {
                return Ok(moved);
            }
            let packet = reader
                .next_packet()
                .map_err(|source| EngineError::Capture { path: path.clone(), source })?;
            let Some(packet) = packet else { return Ok(moved) };
            counts.packets_in += 1;
            split(&packet.bytes, packet.time_ns, |flit| next.extend(flit));
        },
        End::Writer { channel, writer, path, joiner } => {
            let mut flit = [0; WORDS];
            while run.channel_mut(*channel).pop(&mut flit) {
                moved = true;
                match joiner.push(&flit) {
                    Ok(Some((bytes, time_ns))) => {
                        counts.packets_out += 1;
                        if let Some(writer) = writer {
                            writer.write(time_ns, bytes).map_err(|error| EngineError::Capture {
                                path: path.clone(),
                                source: error.into(),
                            })?;
                        }
                    }
                    Ok(None) => {}
                    Err(FlitError::BeginsInside | FlitError::Outside | FlitError::TooLong) => {
                        counts.malformed += 1;
                    }
                }
            }
            Ok(moved)
        }
    }
}
