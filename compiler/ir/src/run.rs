//! A graph at work, one iteration of one element at a time, in one order: the reference.
//!
//! The kernel loop of an element (the specification's 3.3): outputs that are still waiting are
//! written; requested inputs are fetched where the buffer is free; the handler runs; outputs are
//! written where there is room, and otherwise wait, which blocks the element; a signal is answered.
//! Every back end that runs on a processor uses this loop, with its own [`Machine`].

use std::collections::VecDeque;

use crate::flits::{Flit, WORDS};
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
    /// Runs rounds of the whole graph by one call, as [`Run::round`] runs them one by one; none where
    /// the machines cannot. Rounds done, at least one and at most `most`, and what the last one did.
    /// It ends early where nothing moved, and where the world would have acted between two rounds: an
    /// input from outside is empty, or an output to outside lacks room for two items.
    fn rounds(
        machines: &mut [Self],
        whole: &mut Whole<'_>,
        most: u64,
    ) -> Option<Result<(u64, Moved), Endless>>
    where
        Self: Sized,
    {
        let _ = (machines, whole, most);
        None
    }
}

/// The frames and rings of a graph, lent to machines that run all of it.
#[derive(Debug)]
pub struct Whole<'a> {
    graph: &'a Graph,
    workers: &'a mut [Worker],
    channels: &'a mut [Queue],
}

/// A channel's ring, as [`Whole`] lends it.
#[derive(Debug)]
pub struct Ring<'a> {
    /// `depth` items of `width` words.
    pub words: &'a mut [u64],
    /// The oldest item's place.
    pub head: usize,
    /// Items inside.
    pub count: usize,
    /// Words of an item.
    pub width: usize,
    /// Places.
    pub depth: usize,
}

impl Whole<'_> {
    /// The graph.
    #[must_use]
    pub fn graph(&self) -> &Graph {
        self.graph
    }

    /// A node's variables and memories.
    #[must_use]
    pub fn frame(&self, node: usize) -> &Frame {
        &self.workers[node].frame
    }

    /// A node's variables and memories.
    pub fn frame_mut(&mut self, node: usize) -> &mut Frame {
        &mut self.workers[node].frame
    }

    /// True where the items of a channel are logged: each has to go through its ring.
    #[must_use]
    pub fn logged(&self) -> bool {
        self.channels.iter().any(|channel| channel.log.is_some())
    }

    /// A channel's ring.
    pub fn ring(&mut self, channel: usize) -> Ring<'_> {
        let Queue { words, head, count, width, depth, .. } = &mut self.channels[channel];
        Ring { words, head: *head, count: *count, width: *width, depth: *depth }
    }

    /// A channel's ring has moved on: its oldest item's place, the items inside, how many went in.
    pub fn moved_on(&mut self, channel: usize, head: usize, count: usize, more: u64) {
        let queue = &mut self.channels[channel];
        let depth = queue.depth.max(1);
        (queue.head, queue.count) = (head % depth, count.min(depth));
        queue.passed += more;
        if let Some(log) = &mut queue.log {
            // What went in is still in its place, taken or not: one round is run at a time.
            let more = usize::try_from(more).unwrap_or(usize::MAX).min(depth);
            for item in 0..more {
                let at = (queue.head + queue.count + depth - more + item) % depth;
                log.extend_from_slice(&queue.words[at * queue.width..][..queue.width]);
            }
        }
    }

    /// A node ran so many iterations.
    pub fn iterated(&mut self, node: usize, more: u64) {
        self.workers[node].iterations += more;
    }
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

/// Most rounds by one call.
pub const BATCH: u64 = 1_024;

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

    /// Items that find room.
    #[must_use]
    pub fn room(&self) -> usize {
        self.depth - self.count
    }

    /// Puts an item in; false without room.
    #[inline]
    pub fn push(&mut self, item: &[u64]) -> bool {
        if self.is_full() {
            return false;
        }
        let at = self.head + self.count;
        let at = if at >= self.depth { at - self.depth } else { at };
        let place = &mut self.words[at * self.width..][..self.width];
        // A copy of known length for the items that most channels carry.
        match (place.as_mut_array::<WORDS>(), item.as_array::<WORDS>()) {
            (Some(place), Some(item)) => *place = *item,
            _ => place.copy_from_slice(item),
        }
        self.count += 1;
        self.passed += 1;
        if let Some(log) = &mut self.log {
            log.extend(item);
        }
        true
    }

    /// Places of the next items that lie in a row, where items are flits: what is written to the first
    /// of them becomes items by [`Queue::put`]. They hold items that have left before.
    #[inline]
    pub fn places(&mut self) -> &mut [Flit] {
        let at = self.head + self.count;
        let (from, to) =
            if at >= self.depth { (at - self.depth, self.head) } else { (at, self.depth) };
        if self.width != WORDS {
            return &mut [];
        }
        self.words.as_chunks_mut().0.get_mut(from..to).unwrap_or_default()
    }

    /// Makes items of what was written to the first `count` of [`Queue::places`].
    ///
    /// # Panics
    /// Without room.
    #[inline]
    pub fn put(&mut self, count: usize) {
        assert!(count <= self.depth - self.count, "items are put where there is room");
        if let Some(log) = &mut self.log {
            for item in 0..count {
                let at = (self.head + self.count + item) % self.depth;
                log.extend_from_slice(&self.words[at * self.width..][..self.width]);
            }
        }
        self.count += count;
        self.passed += count as u64;
    }

    /// The oldest items that lie in a row, where items are flits; [`Queue::drop_oldest`] takes them
    /// out.
    #[inline]
    #[must_use]
    pub fn oldest(&self) -> &[Flit] {
        if self.width != WORDS {
            return &[];
        }
        let to = (self.head + self.count).min(self.depth);
        self.words.as_chunks().0.get(self.head..to).unwrap_or_default()
    }

    /// Takes the oldest `count` items out, or as many as there are.
    #[inline]
    pub fn drop_oldest(&mut self, count: usize) {
        let count = count.min(self.count);
        let head = self.head + count;
        self.head = if head >= self.depth { head - self.depth } else { head };
        self.count -= count;
    }

    /// The words of the oldest item.
    pub fn front(&self) -> Option<impl Iterator<Item = u64> + '_> {
        let first = self.head * self.width;
        (self.count > 0).then(|| self.words[first..first + self.width].iter().copied())
    }

    /// Takes an item out into `item`; false without one.
    #[inline]
    pub fn pop(&mut self, item: &mut [u64]) -> bool {
        if self.count == 0 {
            return false;
        }
        let first = self.head * self.width;
        let place = &self.words[first..first + self.width];
        match (item.as_mut_array::<WORDS>(), place.as_array::<WORDS>()) {
            (Some(item), Some(place)) => *item = *place,
            _ => item.iter_mut().zip(place).for_each(|(to, from)| *to = *from),
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

    /// The frames of all nodes; the run holds empty ones after this, and is at its end.
    pub fn take_frames(&mut self) -> Vec<Frame> {
        let taken = |(node, worker): (&crate::graph::Node, &mut Worker)| {
            std::mem::replace(&mut worker.frame, Frame::new(&node.element))
        };
        self.graph.nodes.iter().zip(&mut self.workers).map(taken).collect()
    }

    /// Sets a node back to how it began: state and ports as at the start, and its `.init` has run.
    /// What waits in its channels stays there; signals that it has not seen are still to be answered.
    ///
    /// Errors: an `.init` that does not end.
    pub fn reset(&mut self, node: usize) -> Result<(), RunError> {
        let element = &self.graph.nodes[node].element;
        let frame = &mut self.workers[node].frame;
        frame.reset(element);
        self.machines[node].init(element, frame)?;
        let all = crate::tree::mask(element.var(element.next_ports).bits);
        frame.set_low(element.next_ports, all);
        Ok(())
    }

    /// Words of the widest channel's items, and of a signal.
    #[must_use]
    pub fn widest(&self) -> usize {
        self.scratch.len()
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

    /// Up to `most` rounds, fewer where the world should act between two of them; by one call where
    /// the machines can. How many, and what the last one did.
    ///
    /// Errors: a handler that does not end.
    pub fn rounds(&mut self, most: u64) -> Result<(u64, Moved), RunError> {
        if self.workers.iter().any(|worker| !worker.signals.is_empty()) {
            return Ok((1, self.round()?));
        }
        // A log is written from the rings after each round.
        let logged = self.channels.iter().any(|channel| channel.log.is_some());
        let most = if logged { 1 } else { most };
        let Self { graph, workers, channels, .. } = self;
        let mut whole = Whole { graph, workers, channels };
        match M::rounds(&mut self.machines, &mut whole, most) {
            Some(done) => {
                let done = done?;
                self.forget_read();
                Ok(done)
            }
            None => Ok((1, self.round()?)),
        }
    }

    /// Inputs without an item hold zeros.
    fn forget_read(&mut self) {
        for (node, worker) in self.graph.nodes.iter().zip(&mut self.workers) {
            let element = &node.element;
            for (flag, data) in element.in_valid.iter().zip(&element.in_data) {
                if worker.frame.low(*flag) == 0 {
                    worker.frame.var_mut(element, *data).fill(0);
                }
            }
        }
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
    /// after each round in which the world's ends may have to act, and says whether it moved
    /// something. It fills inputs and empties outputs as far as they go.
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
        let mut done = 0;
        while done < most {
            let (rounds, moved) = self.rounds((most - done).min(BATCH))?;
            done += rounds;
            let outside = between(self);
            let signals = self.workers.iter().any(|worker| !worker.signals.is_empty());
            if rounds > 1 {
                // Only the last of them can have moved nothing.
                still = 0;
            }
            if moved.fetched || moved.wrote || outside || signals {
                still = 0;
            } else {
                still += 1;
                if still >= quiet {
                    let waits = self.waits();
                    if moved.blocked && !waits.is_empty() {
                        return Err(RunError::Deadlock(waits));
                    }
                    return Ok(done);
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
