//! `beeline nf report`, `verilog`, `simulate` and `diff`: the graph as hardware.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use beeline_ir::flits::{BITS, Joiner, WORDS, split};
use beeline_ir::graph::Graph;
use beeline_nf::area::{Area, area, area_of};
use beeline_nf::diff::{
    Order, Simulator, Stimulus, all_hardware, compare_with, cycles, differences, interpreted,
    simulated_with,
};
use beeline_nf::functions::Kept;
use beeline_nf::hand_written::HandWritten;
use beeline_nf::pcap::{Reader, Writer};
use beeline_nf::report::report;
use beeline_nf::sides::Plan;
use beeline_nf::timing::{CELLS, MEMORIES, timing};
use beeline_passes::hardware::Hardware;
use beeline_passes::outline::{Outlined, outline};
use beeline_passes::replicate::{Balance, Goal, replicate};
use beeline_passes::{Collision, Options};
use serde::Serialize;

use super::check::compiled;
use super::run::{commands_of, port, stop_flag};
use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::{Output, count, table};

/// Switches of the passes.
#[derive(Clone, Debug, clap::Args)]
pub struct PassArguments {
    /// Leave these passes out: placement, scatter, unroll, clean, merge, delay, async, or all.
    #[arg(long, value_name = "PASS", value_delimiter = ',')]
    pub without: Vec<String>,
    /// Cycles from address to data of block memories.
    #[arg(long, value_name = "CYCLES", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub read_latency: u32,
    /// What a block memory's read gives while its address is being written: old or new data.
    #[arg(long, value_name = "DATA", default_value = "old", value_parser = ["old", "new"])]
    pub collision: String,
    /// Put so many copies of an instance of packets to packets in its place.
    #[arg(long, value_name = "NAME=COPIES", value_parser = copies)]
    pub replicate: Vec<(String, Goal)>,
    /// Put as many copies of an instance in its place as take so many million flits a second.
    #[arg(long, value_name = "NAME=MFLITS", value_parser = throughput)]
    pub goal: Vec<(String, f64)>,
    /// Clock that operations are packed into, in megahertz.
    #[arg(long, value_name = "MHZ", default_value_t = 180, value_parser = clap::value_parser!(u32).range(10..=1000))]
    pub clock: u32,
}

/// A graph after the passes that work on graphs.
struct Transformed {
    graph: Graph,
    balances: Vec<Balance>,
    outlined: Vec<Outlined>,
}

/// `NAME=COPIES`.
fn copies(text: &str) -> Result<(String, Goal), String> {
    let wrong = || "NAME=COPIES, as in parser=4".to_owned();
    let (name, count) = text.split_once('=').ok_or_else(wrong)?;
    Ok((name.to_owned(), Goal::Copies(count.parse().map_err(|_| wrong())?)))
}

/// `NAME=MFLITS`.
fn throughput(text: &str) -> Result<(String, f64), String> {
    let wrong = || "NAME=MFLITS, as in parser=300".to_owned();
    let (name, rate) = text.split_once('=').ok_or_else(wrong)?;
    let rate: f64 = rate.parse().map_err(|_| wrong())?;
    if rate.is_finite() && rate > 0.0 { Ok((name.to_owned(), rate)) } else { Err(wrong()) }
}

impl PassArguments {
    /// The graph with the copies that were asked for and its `.async` blocks as elements.
    fn graph(&self, graph: &Graph) -> Result<Transformed, Failure> {
        let options = self.options()?;
        let mhz = f64::from(self.clock);
        let goals = self
            .goal
            .iter()
            .map(|(name, mflits)| (name.clone(), Goal::Throughput { mflits: *mflits, mhz }));
        let all: Vec<(String, Goal)> = self.replicate.iter().cloned().chain(goals).collect();
        let interval = |node: &beeline_ir::graph::Node| {
            beeline_passes::hardware(&node.element, &options).map_or(1, |made| made.report.interval)
        };
        let (graph, balances) = replicate(graph, &all, &interval).or_exit(Exit::Usage)?;
        let whole = self.without.iter().any(|pass| pass == "async" || pass == "all");
        let (graph, outlined) = if whole { (graph, Vec::new()) } else { outline(&graph) };
        Ok(Transformed { graph, balances, outlined })
    }

    fn options(&self) -> Result<Options, Failure> {
        let mut options = Options {
            read_latency: self.read_latency,
            collision: if self.collision == "new" { Collision::New } else { Collision::Old },
            period_ps: 1_000_000 / self.clock,
            ..Options::default()
        };
        for pass in &self.without {
            match pass.as_str() {
                "placement" => options.placement = false,
                "scatter" => options.scatter = false,
                "unroll" => options.unroll = false,
                "clean" => options.clean = false,
                "merge" => options.merge = false,
                "delay" => options.delay = false,
                // Of the graph, not of an element.
                "async" => {}
                "all" => {
                    options = Options {
                        read_latency: options.read_latency,
                        collision: options.collision,
                        period_ps: options.period_ps,
                        ..Options::naive()
                    };
                }
                other => {
                    let error = anyhow::anyhow!(
                        "no pass is named {other}: placement, scatter, unroll, clean, merge, delay, async, all"
                    );
                    return Err(Failure::new(Exit::Usage, error));
                }
            }
        }
        Ok(options)
    }
}

/// Arguments of `report`.
#[derive(Debug, clap::Args)]
pub struct ReportArguments {
    /// Source file.
    pub file: PathBuf,
    /// Count tables of six inputs, flip-flops and memory bits of each instance by Yosys; takes
    /// seconds to minutes.
    #[arg(long)]
    pub area: bool,
    /// Place and route each instance on an iCE40 HX8K by Yosys and nextpnr, and estimate its clock;
    /// takes a minute or more each.
    #[arg(long, conflicts_with = "area")]
    pub timing: bool,
    /// Placements of each instance, of which the median clock is shown.
    #[arg(long, value_name = "COUNT", default_value_t = 1, requires = "timing", value_parser = clap::value_parser!(u32).range(1..=99))]
    pub seeds: u32,
    #[command(flatten)]
    pub passes: PassArguments,
}

/// A line for each name and what is said of it; one for `name_0`, `name_1` and so on, where the same is
/// said of each.
fn runs<'a>(said: impl Iterator<Item = (&'a str, String)>) -> Vec<String> {
    let numbered = |name: &'a str| {
        let (stem, number) = name.rsplit_once('_')?;
        Some((stem, number.parse::<u32>().ok()?))
    };
    // Of each run: its first name, its last number, what is said.
    let mut all: Vec<(&str, Option<u32>, String)> = Vec::new();
    for (name, said) in said {
        if let (Some((stem, number)), Some((first, last, before))) =
            (numbered(name), all.last_mut())
            && let Some((first_stem, first_number)) = numbered(first)
            && (stem, number) == (first_stem, last.unwrap_or(first_number) + 1)
            && said == *before
        {
            *last = Some(number);
            continue;
        }
        all.push((name, None, said));
    }
    let line = |(first, last, said): (&str, Option<u32>, String)| match last {
        Some(last) => format!("{first} to _{last}, each {said}"),
        None => format!("{first} {said}"),
    };
    all.into_iter().map(line).collect()
}

/// `beeline nf report --area`.
fn report_area(
    graph: &Graph,
    file: &Path,
    options: &Options,
    output: Output,
) -> Result<Exit, Failure> {
    let hardware = all_hardware(graph, options)?;
    let own = hand_written(graph, file)?;
    for (node, hardware) in hardware.iter().enumerate() {
        let mut all = vec![area(graph, node, hardware)?];
        let name = &graph.nodes[node].name;
        if let Some(text) = own.text(name) {
            let by_hand = area_of(&text, name)?;
            all.push(Area { instance: format!("{name} by hand"), ..by_hand });
        }
        // Each as soon as it is there: the next may take long.
        for counted in all {
            if output.json {
                output.object(&counted)?;
            } else {
                output.line(format!(
                    "{}: {} LUT6, {} flip-flops, {} memory bits (counted by Yosys)",
                    counted.instance, counted.luts, counted.flip_flops, counted.memory_bits
                ))?;
            }
        }
    }
    Ok(Exit::Done)
}

/// `beeline nf report --timing`.
fn report_timing(
    graph: &Graph,
    options: &Options,
    seeds: u32,
    output: Output,
) -> Result<Exit, Failure> {
    let hardware = all_hardware(graph, options)?;
    for (node, hardware) in hardware.iter().enumerate() {
        let found = timing(graph, node, hardware, seeds)?;
        if output.json {
            output.object(&found)?;
            continue;
        }
        let clock = match found.mhz {
            Some(mhz) => format!("{mhz:.0} MHz"),
            None => "does not fit".to_owned(),
        };
        let cells = match found.cells {
            Some(cells) => format!("{cells} of {CELLS} logic cells with the harness, "),
            None => String::new(),
        };
        output.line(format!(
            "{}: {clock}, {cells}{} of {MEMORIES} block memories (estimated by nextpnr on {})",
            found.instance, found.memories, found.chip
        ))?;
    }
    Ok(Exit::Done)
}

/// `beeline nf report`.
pub fn run_report(arguments: &ReportArguments, output: Output) -> Result<Exit, Failure> {
    let loaded = compiled(&arguments.file)?;
    let Transformed { graph, balances, outlined } =
        arguments.passes.graph(&loaded.compiled.graph)?;
    for block in &outlined {
        if output.json {
            output.object(block)?;
            continue;
        }
        let became = match (&block.block, block.why) {
            (Some(name), _) => {
                format!("became {name}, {} bits there and {} back", block.sent, block.answered)
            }
            (None, why) => format!("stays: {}", why.unwrap_or_default()),
        };
        output.line(format!("{}: its .async block {became}", block.instance))?;
    }
    for balance in &balances {
        if output.json {
            output.object(balance)?;
        } else {
            output.line(format!(
                "{}: {} of II {}, {:.2} iterations a cycle together",
                balance.instance,
                count(u64::from(balance.copies), "copy", "copies"),
                balance.interval,
                balance.per_cycle
            ))?;
        }
    }
    if arguments.area {
        let options = arguments.passes.options()?;
        return report_area(&graph, &arguments.file, &options, output);
    }
    if arguments.timing {
        let options = arguments.passes.options()?;
        return report_timing(&graph, &options, arguments.seeds, output);
    }
    let reports = report(&graph, &arguments.passes.options()?)?;
    if output.json {
        for node in &reports {
            output.object(node)?;
        }
        return Ok(Exit::Done);
    }
    let rows: Vec<Vec<String>> = reports
        .iter()
        .map(|node| {
            vec![
                node.instance.clone(),
                node.report.element.clone(),
                node.report.interval.to_string(),
                node.naive_interval.to_string(),
                node.report.depth.to_string(),
                format!("{:.0}", node.modelled_mhz),
                node.report.lines.to_string(),
            ]
        })
        .collect();
    let header = ["instance", "element", "II", "naive II", "depth", "MHz (modelled)", "lines"];
    output.bytes(table(&header, &rows).as_bytes())?;
    for node in &reports {
        let report = &node.report;
        let placed = report.storage.iter();
        let said = placed.map(|p| (&p.name[..], format!("in {} ({} bits)", p.place, p.bits)));
        for line in runs(said) {
            output.line(format!("{}: {line}", node.instance))?;
        }
        for turned in &report.loops {
            let copies = count(u64::from(turned.copies), "copy", "copies");
            output.line(format!(
                "{}: a loop {} to {copies}: {}",
                node.instance, turned.form, turned.why
            ))?;
        }
        let delayed = report.delayed.iter();
        let said = delayed.map(|(name, outcome)| (&name[..], format!("forwarded: {outcome}")));
        for line in runs(said) {
            output.line(format!("{}: {line}", node.instance))?;
        }
        if let Some(limit) = &report.limit {
            output.line(format!(
                "{}: II is limited by {} ({}): {}",
                node.instance,
                limit.name,
                limit.kind,
                limit.chain.join(" -> ")
            ))?;
        }
    }
    Ok(Exit::Done)
}

/// The hand-written Verilog of a graph's `verilog` instances, which lies beside its source.
fn hand_written(graph: &Graph, file: &Path) -> Result<HandWritten, Failure> {
    HandWritten::of(graph, file.parent().unwrap_or(Path::new("."))).or_exit(Exit::Usage)
}

/// Arguments of `verilog`.
#[derive(Debug, clap::Args)]
pub struct VerilogArguments {
    /// Source file.
    pub file: PathBuf,
    /// Folder to write to; made if it is missing.
    #[arg(long, short, value_name = "FOLDER", default_value = "out")]
    pub out: PathBuf,
    #[command(flatten)]
    pub passes: PassArguments,
}

/// `beeline nf verilog`.
pub fn run_verilog(arguments: &VerilogArguments, output: Output) -> Result<Exit, Failure> {
    let loaded = compiled(&arguments.file)?;
    let whole = arguments.passes.graph(&loaded.compiled.graph)?.graph;
    // Host elements stay on the host: the channels to them are ports of the design.
    let plan = Plan::of(&whole).or_exit(Exit::Usage)?;
    let graph = plan.card();
    let hardware = all_hardware(graph, &arguments.passes.options()?)?;
    let own = hand_written(graph, &arguments.file)?;
    std::fs::create_dir_all(&arguments.out)
        .with_context(|| format!("cannot make {}", arguments.out.display()))?;
    let path = arguments.out.join("design.v");
    let text = beeline_verilog::graph::design(graph, &hardware, &|name| own.text(name));
    std::fs::write(&path, &text).with_context(|| format!("cannot write {}", path.display()))?;
    output.line(format!("{}: {} lines, top np_top", path.display(), text.lines().count()))?;
    if let Some(split) = plan.split() {
        let nodes = split.workers.iter().map(|part| part.nodes.len() as u64).sum();
        let crossings = split.workers.iter().map(|part| part.crossings.len() as u64).sum();
        let hosts = count(nodes, "host element", "host elements");
        let ports = count(crossings, "port", "ports");
        output.line(format!("{hosts} left out, joined by {ports} of np_top"))?;
    }
    Ok(Exit::Done)
}

/// Arguments of `simulate`.
#[derive(Debug, clap::Args)]
pub struct SimulateArguments {
    #[command(flatten)]
    pub play: PlayArguments,
    /// Packets for each input.
    #[arg(long, value_name = "FILE", required_unless_present = "ports", conflicts_with = "ports")]
    pub pcap: Option<PathBuf>,
    /// What an input or output of the hardware is joined to, instead of captures: an interface,
    /// xdp:NAME or tap:NAME, as for run. It goes on until Ctrl-C.
    #[arg(long = "port", value_name = "NAME=WHAT", value_parser = port)]
    pub ports: Vec<(String, PathBuf)>,
    /// Write what leaves each output to NAME.pcap in this folder.
    #[arg(long, short, value_name = "FOLDER", conflicts_with = "ports")]
    pub out: Option<PathBuf>,
}

/// Arguments of `diff`.
#[derive(Debug, clap::Args)]
pub struct DiffArguments {
    #[command(flatten)]
    pub play: PlayArguments,
    /// Packets for each input.
    #[arg(long, value_name = "FILE")]
    pub pcap: PathBuf,
}

/// What `simulate` and `diff` share.
#[derive(Debug, clap::Args)]
pub struct PlayArguments {
    /// Source file.
    pub file: PathBuf,
    /// Simulator of Verilog: icarus or verilator; model for the cycle model.
    #[arg(long, value_name = "NAME", default_value = "icarus")]
    pub simulator: String,
    /// Commands for the graph's functions, one a line, carried out before the first packet: rules
    /// add tcp any -> any :443 drop. A line that begins with # is left out.
    #[arg(long, value_name = "FILE")]
    pub commands: Option<PathBuf>,
    #[command(flatten)]
    pub passes: PassArguments,
}

/// The signals of the commands.
fn kept(graph: &Graph, arguments: &PlayArguments) -> Result<Kept, Failure> {
    let commands = commands_of(arguments.commands.as_deref())?;
    Kept::of(graph, &commands)
        .map_err(|(command, error)| anyhow::anyhow!("{command}: {error}"))
        .or_exit(Exit::Usage)
}

fn stimulus(graph: &Graph, path: &Path, arguments: &PlayArguments) -> Result<Stimulus, Failure> {
    let kept = kept(graph, arguments)?;
    let open = || format!("cannot read {}", path.display());
    let file = std::fs::File::open(path).with_context(open).or_exit(Exit::Usage)?;
    let mut reader =
        Reader::new(std::io::BufReader::new(file)).with_context(open).or_exit(Exit::Usage)?;
    let mut items = Vec::new();
    while let Some(packet) = reader.next_packet().with_context(open)? {
        split(&packet.bytes, packet.time_ns, |flit| items.extend(flit));
    }
    let each = |input: &beeline_ir::graph::Outside| {
        if graph.channels[input.channel].bits == BITS { items.clone() } else { Vec::new() }
    };
    Ok(Stimulus { items: graph.inputs.iter().map(each).collect(), signals: kept.0 })
}

fn simulator(name: &str) -> Result<Option<Simulator>, Failure> {
    let known = match name {
        "model" => return Ok(None),
        "icarus" => Simulator::Icarus,
        "verilator" => Simulator::Verilator,
        other => {
            let error = anyhow::anyhow!("no simulator is named {other}: icarus, verilator, model");
            return Err(Failure::new(Exit::Usage, error));
        }
    };
    if known.is_here() {
        return Ok(Some(known));
    }
    let error =
        anyhow::anyhow!("{} is not installed; `--simulator model` needs nothing", known.program());
    Err(Failure::new(Exit::Usage, error))
}

#[derive(Serialize)]
struct Simulated {
    output: String,
    packets: u64,
    malformed: u64,
}

/// The simulated hardware between interfaces, until stopped.
fn wired(
    graph: &Graph,
    (hardware, simulator): (&[Hardware], Option<Simulator>),
    (ports, arguments): (&[(String, PathBuf)], &PlayArguments),
    output: Output,
) -> Result<Exit, Failure> {
    let own = hand_written(graph, &arguments.file)?;
    let signals = kept(graph, arguments)?.0;
    let ports: Vec<(String, String)> =
        ports.iter().map(|(name, what)| (name.clone(), what.display().to_string())).collect();
    let stop = stop_flag()?;
    output.note("stop with Ctrl-C");
    let notify = |text: &str| crate::output::complain(text);
    let (ports, around) = ((&ports[..], &signals[..]), (&notify as &dyn Fn(&str), &*stop));
    let passed = beeline_nf::wire::serve(graph, (hardware, &own), simulator, ports, around)?;
    if output.json {
        output.object(&passed)?;
    } else {
        let received = count(passed.received, "packet", "packets");
        let sent = count(passed.sent, "packet", "packets");
        output.line(format!("{received} in, {sent} out, {} not whole", passed.malformed))?;
    }
    Ok(Exit::Done)
}

/// `beeline nf simulate`.
pub fn run_simulate(wanted: &SimulateArguments, output: Output) -> Result<Exit, Failure> {
    let arguments = &wanted.play;
    let simulator = simulator(&arguments.simulator)?;
    let loaded = compiled(&arguments.file)?;
    let graph = arguments.passes.graph(&loaded.compiled.graph)?.graph;
    let graph = &graph;
    let hardware = all_hardware(graph, &arguments.passes.options()?)?;
    let Some(pcap) = &wanted.pcap else {
        return wired(graph, (&hardware, simulator), (&wanted.ports, arguments), output);
    };
    let stimulus = stimulus(graph, pcap, arguments)?;
    let outcome = match simulator {
        None => cycles(graph, &hardware, &stimulus)?,
        Some(simulator) => {
            let folder = tempfile::tempdir()?;
            let own = hand_written(graph, &arguments.file)?;
            simulated_with(graph, (&hardware, &own), &stimulus, (simulator, 0), folder.path())?
        }
    };
    for end in &graph.outputs {
        if graph.channels[end.channel].bits != BITS {
            continue;
        }
        let mut joiner = Joiner::default();
        let mut result = Simulated { output: end.name.clone(), packets: 0, malformed: 0 };
        let mut writer = Writer::new(Vec::new())?;
        for flit in outcome.channels[end.channel].as_chunks::<WORDS>().0 {
            match joiner.push(flit) {
                Ok(Some((bytes, time_ns))) => {
                    result.packets += 1;
                    writer.write(time_ns, bytes)?;
                }
                Ok(None) => {}
                Err(_) => result.malformed += 1,
            }
        }
        if let Some(folder) = &wanted.out {
            std::fs::create_dir_all(folder)?;
            std::fs::write(folder.join(format!("{}.pcap", end.name)), writer.finish()?)?;
        }
        if output.json {
            output.object(&result)?;
        } else {
            output.line(format!(
                "{}: {}, {} not whole",
                result.output,
                count(result.packets, "packet", "packets"),
                result.malformed
            ))?;
        }
    }
    if let Some(clocks) = outcome.clocks.filter(|_| !output.json) {
        output.line(format!("{clocks} clocks (counted)"))?;
    }
    Ok(Exit::Done)
}

#[derive(Serialize)]
struct Verdict<'a> {
    back_end: &'a str,
    clocks: Option<u64>,
    differences: &'a [beeline_nf::diff::Difference],
}

/// `beeline nf diff`.
pub fn run_diff(wanted: &DiffArguments, output: Output) -> Result<Exit, Failure> {
    let arguments = &wanted.play;
    let simulator = simulator(&arguments.simulator)?;
    let loaded = compiled(&arguments.file)?;
    let graph = arguments.passes.graph(&loaded.compiled.graph)?.graph;
    let graph = &graph;
    let stimulus = stimulus(graph, &wanted.pcap, arguments)?;
    let list: Vec<Simulator> = simulator.into_iter().collect();
    let own = hand_written(graph, &arguments.file)?;
    let mut compared = compare_with(graph, &arguments.passes.options()?, &stimulus, &list, &own)?;
    if graph.nodes.len() > loaded.compiled.graph.nodes.len()
        && arguments.passes.replicate.is_empty()
        && arguments.passes.goal.is_empty()
    {
        // The blocks that became elements, against those that mean their bodies.
        let plain = &loaded.compiled.graph;
        let (one, other) = (interpreted(plain, &stimulus)?, interpreted(graph, &stimulus)?);
        compared.insert(
            ".async blocks outside",
            (None, differences(plain, &one, &other, Order::Exact)),
        );
    }
    let mut equal = true;
    for (back_end, (clocks, differences)) in &compared {
        equal &= differences.is_empty();
        if output.json {
            output.object(&Verdict { back_end, clocks: *clocks, differences })?;
            continue;
        }
        let clocks = clocks.map_or_else(String::new, |clocks| format!(", {clocks} clocks"));
        if differences.is_empty() {
            output.line(format!("{back_end}: every channel as the interpreter's{clocks}"))?;
        }
        for difference in differences {
            output.line(format!(
                "{back_end}: {} item {}: wanted {}, found {}",
                difference.channel, difference.item, difference.wanted, difference.found
            ))?;
        }
    }
    Ok(if equal { Exit::Done } else { Exit::Failed })
}
