//! A graph at work, one iteration of one element at a time, in one order: the reference.
//!
//! The kernel loop of an element (the specification's 3.3): outputs that are still waiting are
//! written; requested inputs are fetched where the buffer is free; the handler runs; outputs are
//! written where there is room, and otherwise wait, which blocks the element; a signal is answered.
//! Every back end that runs on a processor uses this loop, with its own [`Machine`].

use std::collections::VecDeque;

use crate::graph::{Graph, Peer};
use crate::interpreter::{self, Endless, Event, Frame};
use crate::tree::{Element, words};

/// What runs an element's code.
pub trait Machine {
    /// Runs `.init`.
    fn init(&mut self, element: &Element, frame: &mut Frame) -> Result<(), Endless>;
    /// Runs `.handler`.
    fn handler(
        &mut self,
        element: &Element,
        frame: &mut Frame,
        events: &mut Vec<Event>,
    ) -> Result<(), Endless>;
    /// Runs `.signal`.
    fn signal(
        &mut self,
        element: &Element,
        frame: &mut Frame,
        events: &mut Vec<Event>,
    ) -> Result<(), Endless>;
}

/// The interpreter as a machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Interpreter;

impl Machine for Interpreter {
    fn init(&mut self, element: &Element, frame: &mut Frame) -> Result<(), Endless> {
        interpreter::run(element, &element.init, frame, &mut Vec::new())
    }

    fn handler(
        &mut self,
        element: &Element,
        frame: &mut Frame,
        events: &mut Vec<Event>,
    ) -> Result<(), Endless> {
        interpreter::run(element, &element.handler, frame, events)
    }

    fn signal(
        &mut self,
        element: &Element,
        frame: &mut Frame,
        events: &mut Vec<Event>,
    ) -> Result<(), Endless> {
        match &element.signal {
            Some(block) => interpreter::run(element, block, frame, events),
            None => {
                let words = frame.var(element, element.sig_in).to_vec();
                frame.var_mut(element, element.sig_out).copy_from_slice(&words);
                Ok(())
            }
        }
    }
}

/// Words of a signal.
pub const SIGNAL_WORDS: usize = 8;
/// A signal: `Id` 16, `Cmd` 16, `Seq` 32, then seven words.
pub type Signal = [u64; SIGNAL_WORDS];

/// A bounded queue of items of a fixed number of words: a ring.
#[derive(Clone, Debug)]
pub struct Queue {
    words: Vec<u64>,
    /// The oldest item's place, and how many there are.
    head: usize,
    count: usize,
    width: usize,
    depth: usize,
    /// Items that went in.
    pub passed: u64,
    /// Every item that went in, where logging is on.
    pub log: Option<Vec<u64>>,
}

impl Queue {
    /// An empty queue.
    #[must_use]
    pub fn new(bits: u32, depth: u32) -> Self {
        let (width, depth) = (words(bits), depth as usize);
        let words = vec![0; width * depth];
        Self { words, head: 0, count: 0, width, depth, passed: 0, log: None }
    }

    /// Words of an item.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Items inside.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// True without items.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// True without room.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.count >= self.depth
    }

    /// Puts an item in; false without room.
    pub fn push(&mut self, item: &[u64]) -> bool {
        if self.is_full() {
            return false;
        }
        let at = self.head + self.count;
        let at = if at >= self.depth { at - self.depth } else { at };
        self.words[at * self.width..][..self.width].copy_from_slice(item);
        self.count += 1;
        self.passed += 1;
        if let Some(log) = &mut self.log {
            log.extend(item);
        }
        true
    }

    /// The words of the oldest item.
    pub fn front(&self) -> Option<impl Iterator<Item = u64> + '_> {
        let first = self.head * self.width;
        (self.count > 0).then(|| self.words[first..first + self.width].iter().copied())
    }

    /// Takes an item out into `item`; false without one.
    pub fn pop(&mut self, item: &mut [u64]) -> bool {
        if self.count == 0 {
            return false;
        }
        let first = self.head * self.width;
        for (to, from) in item.iter_mut().zip(&self.words[first..first + self.width]) {
            *to = *from;
        }
        self.head = if self.head + 1 == self.depth { 0 } else { self.head + 1 };
        self.count -= 1;
        true
    }
}

/// What an iteration did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// An item came in.
    pub fetched: bool,
    /// An item went out.
    pub wrote: bool,
    /// An output still waits for room.
    pub blocked: bool,
}

/// A node with its channels and frame.
#[derive(Debug)]
struct Worker {
    inputs: Vec<Option<usize>>,
    outputs: Vec<Option<usize>>,
    frame: Frame,
    signals: VecDeque<Signal>,
    answers: VecDeque<Signal>,
    iterations: u64,
}

/// Why a graph cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// A handler.
    #[error(transparent)]
    Endless(#[from] Endless),
    /// A wait-for cycle.
    #[error("deadlock: {}", .0.join("; "))]
    Deadlock(Vec<String>),
}

/// A graph at work.
#[derive(Debug)]
pub struct Run<'a, M> {
    graph: &'a Graph,
    machines: Vec<M>,
    workers: Vec<Worker>,
    channels: Vec<Queue>,
    order: Vec<usize>,
    events: Vec<(usize, Event)>,
    scratch: Vec<u64>,
}

impl<'a, M: Machine> Run<'a, M> {
    /// Starts every element: its `.init` has run.
    ///
    /// Errors: an `.init` that does not end.
    pub fn new(graph: &'a Graph, machines: Vec<M>) -> Result<Self, RunError> {
        assert_eq!(machines.len(), graph.nodes.len(), "one machine a node");
        let mut machines = machines;
        let mut workers = Vec::new();
        for (at, node) in graph.nodes.iter().enumerate() {
            let mut frame = Frame::new(&node.element);
            machines[at].init(&node.element, &mut frame)?;
            let all = crate::tree::mask(node.element.var(node.element.next_ports).bits);
            frame.set_low(node.element.next_ports, all);
            workers.push(Worker {
                inputs: graph.inputs_of(at),
                outputs: graph.outputs_of(at),
                frame,
                signals: VecDeque::new(),
                answers: VecDeque::new(),
                iterations: 0,
            });
        }
        let channels = graph.channels.iter().map(|c| Queue::new(c.bits, c.depth)).collect();
        let order = graph.topological();
        let widest = graph.channels.iter().map(|c| words(c.bits)).max().unwrap_or(0);
        let scratch = vec![0; widest.max(SIGNAL_WORDS)];
        Ok(Self { graph, machines, workers, channels, order, events: Vec::new(), scratch })
    }

    /// Keeps every item of every channel.
    pub fn log_channels(&mut self) {
        for channel in &mut self.channels {
            channel.log = Some(Vec::new());
        }
    }

    /// A channel.
    #[must_use]
    pub fn channel(&self, at: usize) -> &Queue {
        &self.channels[at]
    }

    /// A channel, for the world's ends.
    pub fn channel_mut(&mut self, at: usize) -> &mut Queue {
        &mut self.channels[at]
    }

    /// Variables and memories of a node.
    #[must_use]
    pub fn frame(&self, node: usize) -> &Frame {
        &self.workers[node].frame
    }

    /// Variables and memories of a node.
    pub fn frame_mut(&mut self, node: usize) -> &mut Frame {
        &mut self.workers[node].frame
    }

    /// Iterations of a node so far.
    #[must_use]
    pub fn iterations(&self, node: usize) -> u64 {
        self.workers[node].iterations
    }

    /// What handlers printed since the last call, with the node.
    pub fn take_events(&mut self) -> Vec<(usize, Event)> {
        std::mem::take(&mut self.events)
    }

    /// Queues a signal for a node.
    pub fn send_signal(&mut self, node: usize, signal: Signal) {
        self.workers[node].signals.push_back(signal);
    }

    /// Answers a signal at once, between two iterations of the node.
    ///
    /// Errors: a handler that does not end.
    pub fn signal_now(&mut self, node: usize, signal: Signal) -> Result<Signal, RunError> {
        self.workers[node].signals.push_front(signal);
        self.answer(node)?;
        Ok(self.workers[node].answers.pop_back().unwrap_or(signal))
    }

    /// The oldest answer of a node that nobody took.
    pub fn take_answer(&mut self, node: usize) -> Option<Signal> {
        self.workers[node].answers.pop_front()
    }

    /// One iteration of every node, writers before readers.
    ///
    /// Errors: a handler that does not end.
    pub fn round(&mut self) -> Result<Moved, RunError> {
        let mut all = Moved::default();
        for at in 0..self.order.len() {
            let moved = self.iterate(self.order[at])?;
            all.fetched |= moved.fetched;
            all.wrote |= moved.wrote;
            all.blocked |= moved.blocked;
        }
        Ok(all)
    }

    /// One iteration of one node.
    ///
    /// Errors: a handler that does not end.
    pub fn iterate(&mut self, node: usize) -> Result<Moved, RunError> {
        let element = &self.graph.nodes[node].element;
        let mut moved = Moved { wrote: self.flush(node), ..Moved::default() };
        moved.blocked = self.pending(node);
        if !moved.blocked {
            let worker = &mut self.workers[node];
            let next = worker.frame.low(element.next_ports);
            for (port, channel) in worker.inputs.iter().enumerate() {
                let Some(channel) = channel else { continue };
                let flag = element.in_valid[port];
                if next >> port & 1 == 1 && worker.frame.low(flag) == 0 {
                    let item = &mut self.scratch[..self.channels[*channel].width];
                    if self.channels[*channel].pop(item) {
                        let data = element.in_data[port];
                        worker.frame.var_mut(element, data).copy_from_slice(item);
                        worker.frame.set_low(flag, 1);
                        moved.fetched = true;
                    }
                }
            }
            let mut events = Vec::new();
            self.machines[node].handler(element, &mut worker.frame, &mut events)?;
            worker.iterations += 1;
            self.events.extend(events.into_iter().map(|event| (node, event)));
            for (flag, data) in element.in_valid.iter().zip(&element.in_data) {
                if worker.frame.low(*flag) == 0 {
                    worker.frame.var_mut(element, *data).fill(0);
                }
            }
            moved.wrote |= self.flush(node);
            moved.blocked = self.pending(node);
        }
        self.answer(node)?;
        Ok(moved)
    }

    fn answer(&mut self, node: usize) -> Result<(), RunError> {
        let element = &self.graph.nodes[node].element;
        let worker = &mut self.workers[node];
        if let Some(signal) = worker.signals.pop_front() {
            worker.frame.var_mut(element, element.sig_in).copy_from_slice(&signal);
            let mut events = Vec::new();
            self.machines[node].signal(element, &mut worker.frame, &mut events)?;
            self.events.extend(events.into_iter().map(|event| (node, event)));
            let mut answer = [0; SIGNAL_WORDS];
            answer.copy_from_slice(worker.frame.var(element, element.sig_out));
            worker.answers.push_back(answer);
        }
        Ok(())
    }

    /// Writes what waits and has room.
    fn flush(&mut self, node: usize) -> bool {
        let element = &self.graph.nodes[node].element;
        let worker = &mut self.workers[node];
        let mut wrote = false;
        for (port, channel) in worker.outputs.iter().enumerate() {
            let flag = element.out_set[port];
            if worker.frame.low(flag) == 0 {
                continue;
            }
            let item = worker.frame.var(element, element.out_data[port]);
            let gone = channel.is_none_or(|channel| self.channels[channel].push(item));
            if gone {
                worker.frame.set_low(flag, 0);
                wrote = true;
            }
        }
        wrote
    }

    fn pending(&self, node: usize) -> bool {
        let worker = &self.workers[node];
        let element = &self.graph.nodes[node].element;
        element.out_set.iter().any(|flag| worker.frame.low(*flag) != 0)
    }

    /// Rounds until `quiet` of them in a row moved nothing, or `most` have passed; `between` runs
    /// after each round, for the world's ends, and says whether it moved something.
    ///
    /// Errors: a handler that does not end; a deadlock, where nothing moves and an element waits for
    /// room in a channel inside the graph.
    pub fn settle(
        &mut self,
        quiet: u32,
        most: u64,
        mut between: impl FnMut(&mut Self) -> bool,
    ) -> Result<u64, RunError> {
        let mut still = 0;
        for round in 0..most {
            let moved = self.round()?;
            let outside = between(self);
            let signals = self.workers.iter().any(|worker| !worker.signals.is_empty());
            if moved.fetched || moved.wrote || outside || signals {
                still = 0;
            } else {
                still += 1;
                if still >= quiet {
                    let waits = self.waits();
                    if moved.blocked && !waits.is_empty() {
                        return Err(RunError::Deadlock(waits));
                    }
                    return Ok(round + 1);
                }
            }
        }
        Ok(most)
    }

    /// Which node waits for what: nodes without room in a channel whose reader is a node, and what those
    /// readers lack, with each channel's fill. In a deadlock the lines make a cycle.
    #[must_use]
    pub fn waits(&self) -> Vec<String> {
        let mut list = Vec::new();
        let mut readers = Vec::new();
        let blocked: Vec<bool> = (0..self.workers.len()).map(|node| self.pending(node)).collect();
        for (node, worker) in self.workers.iter().enumerate() {
            let element = &self.graph.nodes[node].element;
            for (port, channel) in worker.outputs.iter().enumerate() {
                let Some(channel) = *channel else { continue };
                if worker.frame.low(element.out_set[port]) == 0 {
                    continue;
                }
                let described = &self.graph.channels[channel];
                if let Peer::Port { node: reader, .. } = described.to {
                    list.push(self.wait(node, reader, "read", channel));
                    readers.push(reader);
                }
            }
        }
        readers.sort_unstable();
        readers.dedup();
        for reader in readers.into_iter().filter(|reader| !blocked[*reader]) {
            let worker = &self.workers[reader];
            let element = &self.graph.nodes[reader].element;
            for (port, channel) in worker.inputs.iter().enumerate() {
                let Some(channel) = *channel else { continue };
                let empty = self.channels[channel].is_empty()
                    && worker.frame.low(element.in_valid[port]) == 0;
                if let (true, Peer::Port { node: writer, .. }) =
                    (empty, self.graph.channels[channel].from)
                {
                    list.push(self.wait(reader, writer, "write", channel));
                }
            }
        }
        list
    }

    fn wait(&self, node: usize, other: usize, does: &str, channel: usize) -> String {
        let described = &self.graph.channels[channel];
        format!(
            "{} waits for {} to {does} {} ({} of {} entries)",
            self.graph.nodes[node].name,
            self.graph.nodes[other].name,
            described.name,
            self.channels[channel].len(),
            described.depth
        )
    }
}
