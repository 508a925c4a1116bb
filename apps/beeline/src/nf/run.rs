//! `beeline nf run`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use beeline_ir::graph::Graph;
use beeline_ir::run::Signal;
use beeline_nf::engine::run_captures;
use beeline_nf::live;
use beeline_nf::pcie::bus::Pace;
use beeline_nf::pcie::slot::Mode;
use beeline_nf::sides::{self, LinkOptions};
use serde::Serialize;

use super::check::compiled;
use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::{Output, count, table};

/// Arguments of `run`.
#[derive(Debug, clap::Args)]
pub struct RunArguments {
    /// Source file.
    pub file: PathBuf,
    /// What an input or output of the graph is: a capture by its .pcap name; an interface by its
    /// name, or by xdp:NAME taken away from the kernel's network stack; or tap:NAME. Captures and
    /// interfaces do not mix.
    #[arg(long = "port", value_name = "NAME=WHAT", value_parser = port)]
    pub ports: Vec<(String, PathBuf)>,
    /// Commands for the graph's functions, one a line, carried out before the first packet: rules
    /// add tcp any -> any :443 drop. A line that begins with # is left out.
    #[arg(long, value_name = "FILE")]
    pub commands: Option<PathBuf>,
    /// Walk the tree instead of running machine code: slow, and the meaning of the language.
    #[arg(long)]
    pub interpret: bool,
    /// Socket for `beeline nf signal` while interfaces are served; by default one by the file's
    /// name in the user's runtime folder.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Threads for the elements that are not on the host, at most: fewer where more do not pay. In
    /// every graph that was measured, one is the fastest. The packets are the same where no element
    /// asks which of several inputs has one.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub threads: u8,
    #[command(flatten)]
    pub link: LinkArguments,
    /// How long to look for packets before sleeping, in microseconds: less delay for more use of the
    /// core.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    pub spin: u64,
    /// Serve /metrics and a status page at ADDRESS while interfaces are served.
    #[arg(long, value_name = "ADDRESS")]
    pub status: Option<std::net::SocketAddr>,
}

/// The link to the graph's `host` elements.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct LinkArguments {
    /// Host elements look for items without sleeping, instead of waiting for interrupts.
    #[arg(long)]
    pub link_poll: bool,
    /// One way through the link to host elements, in nanoseconds.
    #[arg(long, value_name = "NANOSECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1_000_000_000))]
    pub link_delay: u64,
    /// Bytes a second through that link in each direction; 0 for no limit.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    pub link_rate: u64,
}

impl LinkArguments {
    /// As the runtime wants it.
    fn options(self, threads: u8) -> LinkOptions {
        LinkOptions {
            mode: if self.link_poll { Mode::Poll } else { Mode::Interrupt },
            pace: Pace { delay_ns: self.link_delay, bytes_per_second: self.link_rate },
            threads: usize::from(threads),
        }
    }
}

/// Arguments of `reload`.
#[derive(Debug, clap::Args)]
pub struct ReloadArguments {
    /// Source file of the graph that runs, changed since.
    pub file: PathBuf,
    /// Take this file instead of the one that the run began with.
    #[arg(long, value_name = "FILE")]
    pub with: Option<PathBuf>,
    /// An instance that begins anew; without it an instance whose state does not fit is an error.
    #[arg(long, value_name = "INSTANCE")]
    pub restart: Vec<String>,
    /// Socket of the run.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `reset`.
#[derive(Debug, clap::Args)]
pub struct ResetArguments {
    /// Source file of the graph that runs.
    pub file: PathBuf,
    /// Instance.
    pub instance: String,
    /// Socket of the run.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `signal`.
#[derive(Debug, clap::Args)]
pub struct SignalArguments {
    /// Source file of the graph that runs.
    pub file: PathBuf,
    /// Instance, marked with @ in the graph; or rules, backends, flows: what a function understands.
    pub instance: String,
    /// For an instance a command number, then up to seven parameters (0x10 and 16 are the same); for
    /// a function its words, as in `rules add 'tcp 10.0.0.0/8 -> any :443 drop'`.
    #[arg(allow_hyphen_values = true)]
    pub words: Vec<String>,
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
pub fn control_of(file: &Path) -> PathBuf {
    let folder = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    folder.join(format!("beeline-nf-{}-{stem}.sock", rustix::process::getuid().as_raw()))
}

#[derive(Serialize)]
struct Answer {
    instance: String,
    parameters: [u64; 7],
}

/// First words of commands that a graph's functions understand.
const FUNCTIONS: [&str; 3] = ["rules", "backends", "flows"];

#[derive(Serialize)]
struct Words<'a> {
    answer: &'a str,
}

/// A command in words.
fn words(control: &Path, first: &str, rest: &[String], output: Output) -> Result<Exit, Failure> {
    let text = [&[first.to_owned()], rest].concat().join(" ");
    let answer = live::command(control, &text)
        .with_context(|| format!("no answer at {}", control.display()))
        .map_err(|error| Failure::new(Exit::Unreachable, error))?;
    let answer = answer.map_err(|why| Failure::new(Exit::Failed, anyhow::anyhow!(why)))?;
    if output.json {
        output.object(&Words { answer: &answer })?;
    } else {
        output.line(answer)?;
    }
    Ok(Exit::Done)
}

/// `beeline nf reload`.
pub fn run_reload(arguments: &ReloadArguments, output: Output) -> Result<Exit, Failure> {
    let file = arguments.with.as_ref().unwrap_or(&arguments.file);
    // The run has its own working directory.
    let path = std::path::absolute(file)
        .with_context(|| format!("cannot name {}", file.display()))
        .or_exit(Exit::Usage)?;
    if path.to_string_lossy().contains('\n') {
        let error = anyhow::anyhow!("a file's name with a line break cannot be sent to the run");
        return Err(Failure::new(Exit::Usage, error));
    }
    let control = arguments.control.clone().unwrap_or_else(|| control_of(&arguments.file));
    let mut rest = path.display().to_string();
    for name in &arguments.restart {
        rest.push('\n');
        rest.push_str(name);
    }
    words(&control, live::RELOAD, &[rest], output)
}

/// `beeline nf reset`.
pub fn run_reset(arguments: &ResetArguments, output: Output) -> Result<Exit, Failure> {
    let control = arguments.control.clone().unwrap_or_else(|| control_of(&arguments.file));
    words(&control, live::RESET, std::slice::from_ref(&arguments.instance), output)
}

/// `beeline nf signal`.
pub fn run_signal(arguments: &SignalArguments, output: Output) -> Result<Exit, Failure> {
    let loaded = compiled(&arguments.file)?;
    let graph = &loaded.compiled.graph;
    let name = &arguments.instance;
    let control = arguments.control.clone().unwrap_or_else(|| control_of(&arguments.file));
    if FUNCTIONS.contains(&name.as_str()) && graph.node_named(name).is_none() {
        return words(&control, name, &arguments.words, output);
    }
    let Some(node) = graph.node_named(name).map(|at| &graph.nodes[at]) else {
        let error = anyhow::anyhow!("the graph has no instance {name}");
        return Err(Failure::new(Exit::Usage, error));
    };
    let mut numbers = Vec::new();
    for word in &arguments.words {
        let parsed = number(word);
        let explained = |error| anyhow::anyhow!("{word} is no number: {error}");
        numbers.push(parsed.map_err(|error| Failure::new(Exit::Usage, explained(error)))?);
    }
    if numbers.len() > 8 {
        let error = anyhow::anyhow!("a signal has a command and at most seven parameters");
        return Err(Failure::new(Exit::Usage, error));
    }
    let mut signal: Signal = [0; 8];
    signal[0] = u64::from(node.id) | (numbers.first().copied().unwrap_or(0) & 0xffff) << 16;
    for (to, from) in signal[1..].iter_mut().zip(numbers.iter().skip(1)) {
        *to = *from;
    }
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
pub fn stop_flag() -> Result<Arc<AtomicBool>, Failure> {
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

/// The lines of a file of commands.
pub fn commands_of(path: Option<&Path>) -> Result<Vec<String>, Failure> {
    let Some(path) = path else { return Ok(Vec::new()) };
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read {}", path.display()))
        .or_exit(Exit::Usage)?;
    let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
    Ok(lines.map(str::to_owned).collect())
}

/// Serves interfaces until stopped.
fn serve(graph: &Graph, arguments: &RunArguments, output: Output) -> Result<Exit, Failure> {
    let ports: Vec<(String, String)> = arguments
        .ports
        .iter()
        .map(|(name, what)| (name.clone(), what.display().to_string()))
        .collect();
    let control = arguments.control.clone().unwrap_or_else(|| control_of(&arguments.file));
    let commands = commands_of(arguments.commands.as_deref())?;
    let stop = stop_flag()?;
    output.note(format!("signals at {}; stop with Ctrl-C", control.display()));
    let _status = match arguments.status {
        Some(address) => {
            let file = arguments.file.display().to_string();
            let (server, address) = super::status::start(address, control.clone(), file)?;
            output.note(format!("status at http://{address}/"));
            Some(server)
        }
        None => None,
    };
    let notify = |text: &str| crate::output::complain(text);
    let load = |path: &Path| {
        let said = |error| format!("cannot read {}: {error}", path.display());
        let loaded = beeline_nf::load::load(path).map_err(said)?;
        if loaded.diagnostics.failed() {
            return Err(loaded.diagnostics.render(&loaded.sources).trim_end().to_owned());
        }
        Ok(loaded.compiled.graph)
    };
    let around = live::Surroundings {
        control: Some(&control),
        commands: &commands,
        notify: &notify,
        stop: &stop,
        link: arguments.link.options(arguments.threads),
        spin: Duration::from_micros(arguments.spin),
        load: Some(&load),
    };
    let passed = if arguments.interpret {
        live::run(graph, &sides::walked, &ports, around)?
    } else {
        live::run(graph, &sides::native, &ports, around)?
    };
    if output.json {
        output.object(&passed)?;
    } else {
        output.line(format!(
            "{} in, {} out, {} refused by a device, {} missed while a ring was full",
            count(passed.received, "packet", "packets"),
            count(passed.sent, "packet", "packets"),
            passed.refused,
            passed.missed
        ))?;
    }
    Ok(Exit::Done)
}

/// `NAME=WHAT`.
pub fn port(text: &str) -> Result<(String, PathBuf), String> {
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
    let commands = commands_of(arguments.commands.as_deref())?;
    let (ports, link) = (&arguments.ports, arguments.link.options(arguments.threads));
    let (counts, passed) = if arguments.interpret {
        run_captures(graph, (&sides::walked, link), ports, &commands)?
    } else {
        run_captures(graph, (&sides::native, link), ports, &commands)?
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
