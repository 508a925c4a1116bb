//! `beeline nf run`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use beeline_ir::graph::Graph;
use beeline_ir::run::{Interpreter, Signal};
use beeline_native::Program;
use beeline_nf::engine::run_captures;
use beeline_nf::live;
use serde::Serialize;

use super::check::compiled;
use crate::exit::{Exit, Failure};
use crate::output::{Output, count, table};

/// Arguments of `run`.
#[derive(Debug, clap::Args)]
pub struct RunArguments {
    /// Source file.
    pub file: PathBuf,
    /// What an input or output of the graph is: a capture by its .pcap name, an interface by its
    /// name, or tap:NAME. Captures and interfaces do not mix.
    #[arg(long = "port", value_name = "NAME=WHAT", value_parser = port)]
    pub ports: Vec<(String, PathBuf)>,
    /// Walk the tree instead of running machine code: slow, and the meaning of the language.
    #[arg(long)]
    pub interpret: bool,
    /// Socket for `beeline nf signal` while interfaces are served; by default one by the file's
    /// name in the user's runtime folder.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `signal`.
#[derive(Debug, clap::Args)]
pub struct SignalArguments {
    /// Source file of the graph that runs.
    pub file: PathBuf,
    /// Instance, marked with @ in the graph.
    pub instance: String,
    /// Command number, then up to seven parameters; 0x10 and 16 are the same.
    #[arg(value_parser = number)]
    pub words: Vec<u64>,
    /// Socket of the run.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

fn number(text: &str) -> Result<u64, String> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    }
    .map_err(|error| error.to_string())
}

/// Where a run of `file` listens for signals.
fn control_of(file: &Path) -> PathBuf {
    let folder = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    folder.join(format!("beeline-nf-{}-{stem}.sock", rustix::process::getuid().as_raw()))
}

#[derive(Serialize)]
struct Answer {
    instance: String,
    parameters: [u64; 7],
}

/// `beeline nf signal`.
pub fn run_signal(arguments: &SignalArguments, output: Output) -> Result<Exit, Failure> {
    let loaded = compiled(&arguments.file)?;
    let graph = &loaded.compiled.graph;
    let name = &arguments.instance;
    let Some(node) = graph.node_named(name).map(|at| &graph.nodes[at]) else {
        let error = anyhow::anyhow!("the graph has no instance {name}");
        return Err(Failure::new(Exit::Usage, error));
    };
    if arguments.words.len() > 8 {
        let error = anyhow::anyhow!("a signal has a command and at most seven parameters");
        return Err(Failure::new(Exit::Usage, error));
    }
    let mut signal: Signal = [0; 8];
    signal[0] = u64::from(node.id) | (arguments.words.first().copied().unwrap_or(0) & 0xffff) << 16;
    for (to, from) in signal[1..].iter_mut().zip(arguments.words.iter().skip(1)) {
        *to = *from;
    }
    let control = arguments.control.clone().unwrap_or_else(|| control_of(&arguments.file));
    let answer = live::ask(&control, signal)
        .with_context(|| format!("no answer at {}", control.display()))
        .map_err(|error| Failure::new(Exit::Unreachable, error))?;
    let mut parameters = [0; 7];
    parameters.copy_from_slice(&answer[1..]);
    if output.json {
        output.object(&Answer { instance: name.clone(), parameters })?;
    } else {
        let list: Vec<String> = parameters.iter().map(u64::to_string).collect();
        output.line(list.join(" "))?;
    }
    Ok(Exit::Done)
}

/// Set when the user or the system ends the run.
fn stop_flag() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            let terminated = tokio::signal::unix::SignalKind::terminate();
            match tokio::signal::unix::signal(terminated) {
                Ok(mut terminated) => {
                    tokio::select! {
                        _ = tokio::signal::ctrl_c() => {}
                        _ = terminated.recv() => {}
                    }
                }
                Err(_) => {
                    let _ = tokio::signal::ctrl_c().await;
                }
            }
        });
        flag.store(true, Ordering::Relaxed);
    });
    Ok(stop)
}

/// Serves interfaces until stopped.
fn serve(graph: &Graph, arguments: &RunArguments, output: Output) -> Result<Exit, Failure> {
    let ports: Vec<(String, String)> = arguments
        .ports
        .iter()
        .map(|(name, what)| (name.clone(), what.display().to_string()))
        .collect();
    let control = arguments.control.clone().unwrap_or_else(|| control_of(&arguments.file));
    let stop = stop_flag()?;
    output.note(format!("signals at {}; stop with Ctrl-C", control.display()));
    let passed = if arguments.interpret {
        let machines = vec![Interpreter; graph.nodes.len()];
        live::run(graph, machines, &ports, Some(&control), &stop)?
    } else {
        let program = Program::compile(graph)?;
        live::run(graph, program.machines(), &ports, Some(&control), &stop)?
    };
    if output.json {
        output.object(&passed)?;
    } else {
        output.line(format!(
            "{} in, {} out, {} refused by a device",
            count(passed.received, "packet", "packets"),
            count(passed.sent, "packet", "packets"),
            passed.refused
        ))?;
    }
    Ok(Exit::Done)
}

fn port(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, what)) if !name.is_empty() && !what.is_empty() => {
            Ok((name.to_owned(), PathBuf::from(what)))
        }
        _ => Err("NAME=WHAT, as in from_tor=in.pcap".to_owned()),
    }
}

#[derive(Serialize)]
struct ChannelCount<'a> {
    channel: &'a str,
    items: u64,
}

/// Runs it.
pub fn run(arguments: &RunArguments, output: Output) -> Result<Exit, Failure> {
    let loaded = compiled(&arguments.file)?;
    let graph = &loaded.compiled.graph;
    let capture = |path: &Path| path.extension().is_some_and(|end| end == "pcap");
    let captures = arguments.ports.iter().filter(|(_, what)| capture(what)).count();
    if captures == 0 && !arguments.ports.is_empty() {
        return serve(graph, arguments, output);
    }
    if captures != arguments.ports.len() {
        let error = anyhow::anyhow!("captures and interfaces do not mix in one run");
        return Err(Failure::new(Exit::Usage, error));
    }
    let (counts, passed) = if arguments.interpret {
        run_captures(graph, vec![Interpreter; graph.nodes.len()], &arguments.ports)?
    } else {
        let program = Program::compile(graph)?;
        run_captures(graph, program.machines(), &arguments.ports)?
    };
    if output.json {
        for (channel, items) in graph.channels.iter().zip(passed) {
            output.object(&ChannelCount { channel: &channel.name, items })?;
        }
        output.object(&counts)?;
        return Ok(Exit::Done);
    }
    let rows: Vec<Vec<String>> = graph
        .channels
        .iter()
        .zip(passed)
        .map(|(channel, items)| vec![channel.name.clone(), items.to_string()])
        .collect();
    output.bytes(table(&["channel", "flits"], &rows).as_bytes())?;
    output.line(format!(
        "{} in, {} out",
        count(counts.packets_in, "packet", "packets"),
        count(counts.packets_out, "packet", "packets"),
    ))?;
    Ok(Exit::Done)
}
