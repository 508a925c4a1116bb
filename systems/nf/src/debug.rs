//! A graph under a debugger: one iteration of one element at a time, by the interpreter.
//!
//! Commands are words, so that people and scripts drive it alike; see [`HELP`]. The order of
//! iterations is the reference's, so a course is the same in every session.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;

use beeline_ir::graph::Graph;
use beeline_ir::interpreter::Event;
use beeline_ir::run::{Interpreter, Run, RunError};
use beeline_ir::tree::{VarKind, words};

use crate::engine::{Counts, EngineError, Files};

/// A command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DebugError {
    /// Captures and handlers.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A handler.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Unknown words.
    #[error("{0}; help lists the commands")]
    Command(String),
}

/// What there is to say.
pub const HELP: &str = "\
step [N]                  N iterations (1), each of one element
continue                  until a breakpoint, or until nothing moves
break INSTANCE [off]      stop after each iteration of INSTANCE that moved an item
channels                  items that have passed and that wait in each channel
log CHANNEL [N]           the last N items (8) of a channel
vars INSTANCE             state of an instance
get INSTANCE.NAME[I]      a variable, or an entry of a memory
set INSTANCE.NAME[I] N    changes it
waits                     which elements wait for each other
help, quit";

/// Iterations without movement after which a graph stands still.
const QUIET: usize = 64;

/// A graph that is stopped between two iterations.
pub struct Debugger<'a> {
    graph: &'a Graph,
    run: Run<'a, Interpreter>,
    ends: Files,
    counts: Counts,
    order: Vec<usize>,
    cursor: usize,
    breaks: BTreeSet<usize>,
    ended: bool,
}

impl std::fmt::Debug for Debugger<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Debugger").field("cursor", &self.cursor).finish_non_exhaustive()
    }
}

/// Why it stopped.
enum Stop {
    /// Nothing special.
    None,
    /// `breakpoint(n)` or `break`.
    Break(String),
}

impl<'a> Debugger<'a> {
    /// Starts the elements; nothing has run but `.init`. `commands` are for the graph's functions.
    ///
    /// Errors: a port without a capture; a capture; a command.
    pub fn new(
        graph: &'a Graph,
        ports: &[(String, PathBuf)],
        commands: &[String],
    ) -> Result<Self, DebugError> {
        let ends = Files::open(graph, ports)?;
        let mut run = Run::new(graph, vec![Interpreter; graph.nodes.len()])?;
        run.log_channels();
        crate::engine::prepare(graph, &mut run, commands)?;
        let (order, counts) = (graph.topological(), Counts::default());
        let breaks = BTreeSet::new();
        Ok(Self { graph, run, ends, counts, order, cursor: 0, breaks, ended: false })
    }

    /// True after `quit`.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Writes the captures that go out.
    ///
    /// Errors: a capture cannot be written.
    pub fn finish(self) -> Result<(), DebugError> {
        self.ends.finish()?;
        Ok(())
    }

    /// Carries out a command; its answer.
    ///
    /// Errors: what is wrong with the command; what ended a handler.
    pub fn command(&mut self, text: &str) -> Result<String, DebugError> {
        let all: Vec<&str> = text.split_whitespace().collect();
        let number = |word: &str| {
            parsed(word).ok_or_else(|| DebugError::Command(format!("{word} is no number")))
        };
        match all.as_slice() {
            [] => Ok(String::new()),
            ["help"] => Ok(HELP.to_owned()),
            ["quit"] => {
                self.ended = true;
                Ok(String::new())
            }
            ["step"] => self.step(1),
            ["step", count] => self.step(number(count)?),
            ["continue"] => self.go_on(),
            ["break", name] => {
                self.breaks.insert(self.node(name)?);
                Ok(format!("stops at {name}"))
            }
            ["break", name, "off"] => {
                self.breaks.remove(&self.node(name)?);
                Ok(format!("passes {name}"))
            }
            ["channels"] => Ok(self.channels()),
            ["log", name] => self.log(name, 8),
            ["log", name, count] => self.log(name, number(count)?),
            ["vars", name] => {
                let node = self.node(name)?;
                Ok(self.vars(node))
            }
            ["get", place] => {
                let words = self.place(place)?;
                Ok(format!("{place} = {}", hex(words)))
            }
            ["set", place, value] => {
                let value = number(value)?;
                let words = self.place(place)?;
                words.fill(0);
                if let Some(low) = words.first_mut() {
                    *low = value;
                }
                Ok(format!("{place} = {value:#x}"))
            }
            ["waits"] => {
                let list = self.run.waits();
                let none = "no element waits for another".to_owned();
                Ok(if list.is_empty() { none } else { list.join("\n") })
            }
            _ => Err(DebugError::Command(format!("'{text}' is no command"))),
        }
    }

    fn node(&self, name: &str) -> Result<usize, DebugError> {
        let found = self.graph.node_named(name);
        found.ok_or_else(|| DebugError::Command(format!("there is no instance {name}")))
    }

    /// One iteration; what happened in words, where something did.
    fn iterate(&mut self, said: &mut String) -> Result<(bool, Stop), DebugError> {
        if self.cursor == 0 {
            self.ends.feed(&mut self.run, &mut self.counts)?;
        }
        let Some(node) = self.order.get(self.cursor).copied() else {
            return Ok((false, Stop::None));
        };
        self.cursor = (self.cursor + 1) % self.order.len();
        let moved = self.run.iterate(node)?;
        let fed = self.ends.feed(&mut self.run, &mut self.counts)?;
        let name = &self.graph.nodes[node].name;
        let mut stop = Stop::None;
        for (_, event) in self.run.take_events() {
            match event {
                Event::Text(text) => {
                    let _ = writeln!(said, "{name} prints: {text}");
                }
                Event::Breakpoint(at) => stop = Stop::Break(format!("breakpoint {at} in {name}")),
            }
        }
        let any = moved.fetched || moved.wrote;
        if any && self.breaks.contains(&node) {
            let parts = [(moved.fetched, "took"), (moved.wrote, "gave"), (moved.blocked, "waits")];
            let did: Vec<&str> = parts.iter().filter(|p| p.0).map(|p| p.1).collect();
            let times = self.run.iterations(node);
            stop = Stop::Break(format!("{name}, iteration {times}: {}", did.join(", ")));
        }
        Ok((any || fed, stop))
    }

    fn step(&mut self, count: u64) -> Result<String, DebugError> {
        let mut said = String::new();
        for _ in 0..count {
            let name = self.order.get(self.cursor).map(|node| self.graph.nodes[*node].name.clone());
            let (moved, stop) = self.iterate(&mut said)?;
            let still = if moved { "" } else { ": nothing moved" };
            let _ = writeln!(said, "{}{still}", name.unwrap_or_default());
            if let Stop::Break(why) = stop {
                let _ = writeln!(said, "{why}");
                break;
            }
        }
        Ok(said.trim_end().to_owned())
    }

    fn go_on(&mut self) -> Result<String, DebugError> {
        let mut said = String::new();
        let mut still = 0;
        while still < QUIET * self.order.len().max(1) {
            let (moved, stop) = self.iterate(&mut said)?;
            still = if moved { 0 } else { still + 1 };
            if let Stop::Break(why) = stop {
                said.push_str(&why);
                return Ok(said);
            }
        }
        let Counts { packets_in, packets_out, .. } = self.counts;
        let _ = write!(said, "nothing moves any more: {packets_in} packets in, {packets_out} out");
        for line in self.run.waits() {
            let _ = write!(said, "\n{line}");
        }
        Ok(said)
    }

    fn channels(&self) -> String {
        let mut text = String::new();
        for (at, channel) in self.graph.channels.iter().enumerate() {
            let queue = self.run.channel(at);
            let _ = writeln!(
                text,
                "{}: {} passed, {} of {} wait",
                channel.name,
                queue.passed,
                queue.len(),
                channel.depth
            );
        }
        text.trim_end().to_owned()
    }

    fn log(&self, name: &str, count: u64) -> Result<String, DebugError> {
        let at = self.graph.channels.iter().position(|channel| channel.name == name);
        let wrong = || DebugError::Command(format!("there is no channel {name}"));
        let queue = self.run.channel(at.ok_or_else(wrong)?);
        let items = queue.log.as_deref().unwrap_or_default();
        let all: Vec<&[u64]> = items.chunks(queue.width()).collect();
        let from = all.len().saturating_sub(usize::try_from(count).unwrap_or(usize::MAX));
        let lines: Vec<String> =
            (from..).zip(&all[from..]).map(|(at, item)| format!("{at}: {}", hex(item))).collect();
        Ok(lines.join("\n"))
    }

    fn vars(&self, node: usize) -> String {
        let element = &self.graph.nodes[node].element;
        let frame = self.run.frame(node);
        let mut text = String::new();
        for (at, var) in element.vars.iter().enumerate() {
            if var.kind == VarKind::State {
                let first = frame.var_at[at];
                let held = &frame.words[first..first + words(var.bits)];
                let _ = writeln!(text, "{} = {}", var.name, hex(held));
            }
        }
        for (memory, mem) in element.mems.iter().zip(&frame.mems) {
            let used = mem.iter().filter(|word| **word != 0).count();
            let _ = writeln!(
                text,
                "{}: {} entries of {} bits, {used} words not zero",
                memory.name,
                memory.entries(),
                memory.bits
            );
        }
        text.trim_end().to_owned()
    }

    /// The words of `INSTANCE.NAME`, or of an entry.
    fn place(&mut self, text: &str) -> Result<&mut [u64], DebugError> {
        let wrong = || DebugError::Command(format!("there is no {text}"));
        let (instance, rest) = text.split_once('.').ok_or_else(wrong)?;
        let node = self.node(instance)?;
        let (name, entry) = match rest.split_once('[') {
            Some((name, entry)) => {
                let entry = entry.strip_suffix(']').and_then(parsed).ok_or_else(wrong)?;
                (name, usize::try_from(entry).map_err(|_| wrong())?)
            }
            None => (rest, 0),
        };
        let element = &self.graph.nodes[node].element;
        if let Some(var) = element.state_var(name) {
            return Ok(self.run.frame_mut(node).var_mut(element, var));
        }
        let at = element.mems.iter().position(|mem| mem.name == name).ok_or_else(wrong)?;
        let mem = &element.mems[at];
        if entry >= mem.entries() as usize {
            return Err(wrong());
        }
        let width = words(mem.bits);
        let held = &mut self.run.frame_mut(node).mems[at];
        Ok(&mut held[entry * width..(entry + 1) * width])
    }
}

fn parsed(word: &str) -> Option<u64> {
    match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    }
}

fn hex(words: &[u64]) -> String {
    let mut parts = words.iter().rev().skip_while(|word| **word == 0);
    let mut text = parts.next().map_or_else(|| "0x0".to_owned(), |word| format!("{word:#x}"));
    for word in parts {
        let _ = write!(text, "{word:016x}");
    }
    text
}
