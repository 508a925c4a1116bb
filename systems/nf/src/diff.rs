//! The same stimulus through every back end, every channel compared.
//!
//! The interpreter is the reference. Machine code runs under the same loop, so every channel must
//! be equal. The cycle model and Verilog have their own timing: each channel must carry the same
//! items in the same order, which holds for graphs whose elements do not look at which input came
//! first; where an element does, the channels after it are compared as collections of items.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use beeline_ir::graph::{Graph, Peer};
use beeline_ir::run::{Interpreter, Machine, Run, RunError, Signal};
use beeline_ir::tree::words;
use beeline_native::{NativeError, Program};
use beeline_passes::cycle::{Cycles, Deadlock};
use beeline_passes::{Hardware, NotHardware, Options, hardware};
use beeline_verilog::bench::{Play, bench};
use beeline_verilog::graph::design;

use crate::hand_written::HandWritten;

/// What goes in: items of each input in the graph's order, and signals before them.
#[derive(Clone, Debug, Default)]
pub struct Stimulus {
    /// Words of the items of each input.
    pub items: Vec<Vec<u64>>,
    /// Signals, each with its node; each is answered before the next is sent.
    pub signals: Vec<(usize, Signal)>,
}

/// What came out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Words of every item of each channel.
    pub channels: Vec<Vec<u64>>,
    /// Answers.
    pub answers: Vec<Signal>,
    /// Clocks, for the models that have them.
    pub clocks: Option<u64>,
}

/// A back end could not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiffError {
    /// The reference or machine code.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Machine code.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// Hardware.
    #[error(transparent)]
    NotHardware(#[from] NotHardware),
    /// The cycle model.
    #[error(transparent)]
    Deadlock(#[from] Deadlock),
    /// Files of a simulation.
    #[error("simulation files: {0}")]
    Io(#[from] std::io::Error),
    /// A program.
    #[error("{program} failed: {output}")]
    Program {
        /// Which.
        program: &'static str,
        /// What it said.
        output: String,
    },
    /// Endless.
    #[error("the cycle model did not end within {0} clocks")]
    Clocks(u64),
}

/// Rounds without movement that end a run.
const QUIET: u32 = 256;
/// Most rounds of a comparison.
const MOST: u64 = 4_000_000;

/// Runs under the reference's loop.
///
/// Errors: a handler that does not end, a deadlock.
pub fn reference<M: Machine>(
    graph: &Graph,
    machines: Vec<M>,
    stimulus: &Stimulus,
) -> Result<Outcome, DiffError> {
    let mut run = Run::new(graph, machines)?;
    run.log_channels();
    let mut answers = Vec::new();
    for (node, signal) in &stimulus.signals {
        run.send_signal(*node, addressed(graph, *node, *signal));
        run.settle(2, MOST, |_| false)?;
        answers.extend(run.take_answer(*node));
    }
    let mut sent = vec![0; graph.inputs.len()];
    let mut feed = |run: &mut Run<'_, M>| {
        let mut moved = false;
        for (at, input) in graph.inputs.iter().enumerate() {
            let width = words(graph.channels[input.channel].bits);
            let items = stimulus.items.get(at).map_or(&[][..], Vec::as_slice);
            while sent[at] + width <= items.len()
                && run.channel_mut(input.channel).push(&items[sent[at]..sent[at] + width])
            {
                sent[at] += width;
                moved = true;
            }
        }
        for output in &graph.outputs {
            let width = words(graph.channels[output.channel].bits);
            let mut item = vec![0; width];
            while run.channel_mut(output.channel).pop(&mut item) {
                moved = true;
            }
        }
        moved
    };
    feed(&mut run);
    run.settle(QUIET, MOST, feed)?;
    let log = |at| run.channel(at).log.clone().unwrap_or_default();
    Ok(Outcome { channels: (0..graph.channels.len()).map(log).collect(), answers, clocks: None })
}

/// The signal with its element's address.
pub(crate) fn addressed(graph: &Graph, node: usize, mut signal: Signal) -> Signal {
    signal[0] = signal[0] & !0xffff | u64::from(graph.nodes[node].id);
    signal
}

/// The interpreter.
///
/// Errors: as for [`reference()`].
pub fn interpreted(graph: &Graph, stimulus: &Stimulus) -> Result<Outcome, DiffError> {
    reference(graph, vec![Interpreter; graph.nodes.len()], stimulus)
}

/// Machine code.
///
/// Errors: as for [`reference()`]; the code generator's.
pub fn native(graph: &Graph, stimulus: &Stimulus) -> Result<Outcome, DiffError> {
    let program = Program::compile(graph)?;
    reference(graph, program.machines(), stimulus)
}

/// Every node as hardware.
///
/// Errors: an element that cannot be hardware.
pub fn all_hardware(graph: &Graph, options: &Options) -> Result<Vec<Hardware>, DiffError> {
    graph.nodes.iter().map(|node| Ok(hardware(&node.element, options)?)).collect()
}

/// The cycle model.
///
/// Errors: a deadlock with its channels; too many clocks.
pub fn cycles(
    graph: &Graph,
    hardware: &[Hardware],
    stimulus: &Stimulus,
) -> Result<Outcome, DiffError> {
    let mut model = Cycles::new(graph, hardware);
    model.log_channels();
    let mut answers = Vec::new();
    for (node, signal) in &stimulus.signals {
        model.send_signal(*node, addressed(graph, *node, *signal));
        for _ in 0..100_000 {
            model.tick();
            if let Some(answer) = model.take_answer(*node) {
                answers.push(answer);
                break;
            }
        }
    }
    let started = model.clock();
    let mut sent = vec![0; graph.inputs.len()];
    loop {
        // The world's ends work at the edge: a channel takes what it had room for before.
        let mut pushes = Vec::new();
        for (at, input) in graph.inputs.iter().enumerate() {
            let width = words(graph.channels[input.channel].bits);
            let items = stimulus.items.get(at).map_or(&[][..], Vec::as_slice);
            if sent[at] + width <= items.len() && !model.channel(input.channel).is_full() {
                pushes.push((at, input.channel, width));
            }
        }
        let pops: Vec<usize> = graph
            .outputs
            .iter()
            .map(|output| output.channel)
            .filter(|channel| !model.channel(*channel).is_empty())
            .collect();
        model.tick();
        for channel in &pops {
            let mut item = vec![0; words(graph.channels[*channel].bits)];
            model.channel_mut(*channel).pop(&mut item);
        }
        for (at, channel, width) in &pushes {
            let items = &stimulus.items[*at][sent[*at]..sent[*at] + width];
            model.channel_mut(*channel).push(items);
            sent[*at] += width;
        }
        if !pops.is_empty() || !pushes.is_empty() {
            model.touch();
        }
        if model.still() > u64::from(QUIET) * 4 {
            break;
        }
        if model.clock() > MOST {
            return Err(DiffError::Clocks(MOST));
        }
    }
    model.check_deadlock(u64::from(QUIET))?;
    let clocks = Some(model.clock() - model.still() - started);
    let log = |at| model.channel(at).log.clone().unwrap_or_default();
    Ok(Outcome { channels: (0..graph.channels.len()).map(log).collect(), answers, clocks })
}

/// A simulator of Verilog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Simulator {
    /// Icarus: four states, starts at once.
    Icarus,
    /// Verilator: two states, compiles first.
    Verilator,
}

impl Simulator {
    /// Its program.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Icarus => "iverilog",
            Self::Verilator => "verilator",
        }
    }

    /// True where it is installed.
    #[must_use]
    pub fn is_here(self) -> bool {
        let flag = if self == Self::Icarus { "-V" } else { "--version" };
        Command::new(self.program()).arg(flag).output().is_ok()
    }
}

/// The design, simulated in `folder`.
///
/// Errors: files, a program that fails, a log that is not one.
pub fn simulated(
    graph: &Graph,
    hardware: &[Hardware],
    stimulus: &Stimulus,
    play: (Simulator, u32),
    folder: &Path,
) -> Result<Outcome, DiffError> {
    simulated_with(graph, (hardware, &HandWritten::default()), stimulus, play, folder)
}

/// As [`simulated`], with hand-written modules.
///
/// Errors: as for [`simulated`].
pub fn simulated_with(
    graph: &Graph,
    (hardware, own): (&[Hardware], &HandWritten),
    stimulus: &Stimulus,
    (simulator, stalls): (Simulator, u32),
    folder: &Path,
) -> Result<Outcome, DiffError> {
    std::fs::write(folder.join("design.v"), design(graph, hardware, &|name| own.text(name)))?;
    let mut counts = Vec::new();
    for (at, input) in graph.inputs.iter().enumerate() {
        let bits = graph.channels[input.channel].bits;
        let items = stimulus.items.get(at).map_or(&[][..], Vec::as_slice);
        counts.push(items.len() / words(bits));
        let name = beeline_verilog::name(&input.name);
        std::fs::write(folder.join(format!("{name}.hex")), hex(items, words(bits)))?;
    }
    let signals: Vec<u64> = stimulus
        .signals
        .iter()
        .flat_map(|(node, signal)| addressed(graph, *node, *signal))
        .collect();
    std::fs::write(folder.join("signals.hex"), hex(&signals, 8))?;
    let play = Play {
        items: &counts,
        signals: stimulus.signals.len(),
        quiet: QUIET * 4,
        most: MOST,
        stalls,
    };
    std::fs::write(folder.join("bench.v"), bench(graph, &play))?;
    let (program, arguments) = compiled(simulator, folder)?;
    run(folder, program, arguments)?;
    let log = std::fs::read_to_string(folder.join("log.txt"))?;
    parse(graph, &log)
}

/// Has a simulator take `design.v` and `bench.v` of a folder; the program that runs them there, and its
/// arguments.
///
/// Errors: the simulator refuses them.
pub(crate) fn compiled(
    simulator: Simulator,
    folder: &Path,
) -> Result<(&'static str, &'static [&'static str]), DiffError> {
    match simulator {
        Simulator::Icarus => {
            run(folder, "iverilog", &["-g2005", "-o", "sim", "design.v", "bench.v"])?;
            Ok(("vvp", &["-n", "sim"]))
        }
        Simulator::Verilator => {
            let flags = ["--binary", "--timing", "-Wno-fatal", "-Wno-WIDTH", "--top-module"];
            let files = ["np_bench", "-O1", "design.v", "bench.v"];
            run(folder, "verilator", &[&flags[..], &files[..]].concat())?;
            Ok(("./obj_dir/Vnp_bench", &[]))
        }
    }
}

fn hex(items: &[u64], width: usize) -> String {
    let mut text = String::new();
    for item in items.chunks_exact(width) {
        for word in item.iter().rev() {
            text.push_str(&format!("{word:016x}"));
        }
        text.push('\n');
    }
    text
}

fn run(folder: &Path, program: &'static str, arguments: &[&str]) -> Result<(), DiffError> {
    let path = if program.starts_with("./") { folder.join(program) } else { program.into() };
    let output = Command::new(path).args(arguments).current_dir(folder).output()?;
    if output.status.success() {
        return Ok(());
    }
    let mut said = String::from_utf8_lossy(&output.stderr).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stdout));
    said.truncate(2_000);
    Err(DiffError::Program { program, output: said })
}

fn parse(graph: &Graph, log: &str) -> Result<Outcome, DiffError> {
    let bad = |line: &str| DiffError::Program {
        program: "the simulation",
        output: format!("wrote a line that is none of its log: {line:?}"),
    };
    let mut outcome =
        Outcome { channels: vec![Vec::new(); graph.channels.len()], ..Outcome::default() };
    for line in log.lines() {
        let (head, rest) = line.split_once(' ').ok_or_else(|| bad(line))?;
        if head == "clocks" {
            outcome.clocks = rest.trim().parse().ok();
            continue;
        }
        let item = words_of(rest).ok_or_else(|| bad(line))?;
        if head == "-" {
            let mut answer = [0; 8];
            for (to, from) in answer.iter_mut().zip(item) {
                *to = from;
            }
            outcome.answers.push(answer);
            continue;
        }
        let at: usize = head.parse().map_err(|_| bad(line))?;
        let width = words(graph.channels.get(at).ok_or_else(|| bad(line))?.bits);
        let mut item = item;
        item.resize(width, 0);
        outcome.channels[at].extend(item);
    }
    Ok(outcome)
}

pub(crate) fn words_of(hex: &str) -> Option<Vec<u64>> {
    let hex = hex.trim();
    let mut all = Vec::new();
    let mut end = hex.len();
    while end > 0 {
        let start = end.saturating_sub(16);
        all.push(u64::from_str_radix(hex.get(start..end)?, 16).ok()?);
        end = start;
    }
    Some(all)
}

/// A difference between two outcomes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Difference {
    /// Channel, or `answers`.
    pub channel: String,
    /// The first item that differs, from 0.
    pub item: usize,
    /// The reference's, in sixteens.
    pub wanted: String,
    /// The other's.
    pub found: String,
}

/// How far channels are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Item by item.
    Exact,
    /// As collections after an element that looks at which input came first.
    Timing,
}

/// True for a channel that comes, perhaps through others, from an element with several inputs.
#[must_use]
pub fn after_a_merge(graph: &Graph) -> Vec<bool> {
    let mut marked = vec![false; graph.channels.len()];
    for _ in 0..=graph.nodes.len() {
        for (at, channel) in graph.channels.iter().enumerate() {
            if let Peer::Port { node, .. } = channel.from {
                let inputs = graph.inputs_of(node);
                let fed = inputs.iter().flatten().any(|input| marked[*input]);
                marked[at] |= inputs.len() > 1 || fed;
            }
        }
    }
    marked
}

/// Where `other` differs from `wanted`.
#[must_use]
pub fn differences(
    graph: &Graph,
    wanted: &Outcome,
    other: &Outcome,
    order: Order,
) -> Vec<Difference> {
    let mut list = Vec::new();
    let merged = after_a_merge(graph);
    for (at, channel) in graph.channels.iter().enumerate() {
        let width = words(channel.bits);
        let mut a: Vec<&[u64]> = wanted.channels[at].chunks(width).collect();
        let mut b: Vec<&[u64]> = other.channels[at].chunks(width).collect();
        if order == Order::Timing && merged[at] {
            a.sort_unstable();
            b.sort_unstable();
        }
        let first = (0..a.len().max(b.len())).find(|item| a.get(*item) != b.get(*item));
        if let Some(item) = first {
            list.push(Difference {
                channel: channel.name.clone(),
                item,
                wanted: shown(a.get(item).copied()),
                found: shown(b.get(item).copied()),
            });
        }
    }
    if wanted.answers != other.answers {
        let count = wanted.answers.len().max(other.answers.len());
        let item =
            (0..count).find(|at| wanted.answers.get(*at) != other.answers.get(*at)).unwrap_or(0);
        list.push(Difference {
            channel: "answers".to_owned(),
            item,
            wanted: shown(wanted.answers.get(item).map(|a| &a[..])),
            found: shown(other.answers.get(item).map(|a| &a[..])),
        });
    }
    list
}

fn shown(item: Option<&[u64]>) -> String {
    item.map_or_else(
        || "nothing".to_owned(),
        |item| item.iter().rev().map(|word| format!("{word:016x}")).collect::<String>(),
    )
}

/// Every back end against the interpreter: name, outcome, differences.
pub type Compared = BTreeMap<&'static str, (Option<u64>, Vec<Difference>)>;

/// Runs everything.
///
/// Errors: a back end that cannot run at all.
pub fn compare(
    graph: &Graph,
    options: &Options,
    stimulus: &Stimulus,
    simulators: &[Simulator],
) -> Result<Compared, DiffError> {
    compare_with(graph, options, stimulus, simulators, &HandWritten::default())
}

/// As [`compare`], with hand-written modules in Verilog.
///
/// Errors: as for [`compare`].
pub fn compare_with(
    graph: &Graph,
    options: &Options,
    stimulus: &Stimulus,
    simulators: &[Simulator],
    own: &HandWritten,
) -> Result<Compared, DiffError> {
    let wanted = interpreted(graph, stimulus)?;
    let mut all = BTreeMap::new();
    let outcome = native(graph, stimulus)?;
    all.insert("machine code", (None, differences(graph, &wanted, &outcome, Order::Exact)));
    let hardware = all_hardware(graph, options)?;
    let outcome = cycles(graph, &hardware, stimulus)?;
    let found = differences(graph, &wanted, &outcome, Order::Timing);
    all.insert("cycle model", (outcome.clocks, found));
    for simulator in simulators {
        let folder = tempfile::tempdir()?;
        let both = (&hardware[..], own);
        let outcome = simulated_with(graph, both, stimulus, (*simulator, 0), folder.path())?;
        let found = differences(graph, &wanted, &outcome, Order::Timing);
        all.insert(simulator.program(), (outcome.clocks, found));
    }
    Ok(all)
}
