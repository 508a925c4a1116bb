//! The cycle model: scheduled hardware, clock by clock.
//!
//! Each element is a pipeline of iterations in flight; every operation runs in the cycle its
//! schedule says, with registers and memories as they were before the clock's edge. An output that
//! has no room stops the whole pipeline, outputs with room go. Channels have registered fill
//! counts: what goes in at one edge can come out from the next on, and room shows a clock later.
//! The Verilog back end describes the same machine.

use std::collections::VecDeque;

use beeline_ir::graph::{Graph, Peer};
use beeline_ir::run::{Queue, Signal};
use beeline_ir::tree::words;

use crate::hardware::{Hardware, Stage};
use crate::ssa::{Op, StateId, ValueId};

/// An iteration in flight.
#[derive(Clone, Debug)]
struct Flight {
    age: u32,
    values: Vec<u64>,
    items: Vec<Vec<u64>>,
    data: Vec<Vec<u64>>,
    sent: u32,
}

/// Which values run in which cycle.
#[derive(Clone, Debug)]
struct Agenda {
    values: Vec<Vec<ValueId>>,
    reads: Vec<Vec<usize>>,
    writes: Vec<Vec<usize>>,
    updates: Vec<Vec<usize>>,
}

impl Agenda {
    fn new(stage: &Stage) -> Self {
        let depth = stage.schedule.depth.max(1) as usize;
        let mut agenda = Self {
            values: vec![Vec::new(); depth],
            reads: vec![Vec::new(); depth],
            writes: vec![Vec::new(); depth],
            updates: vec![Vec::new(); depth],
        };
        let last = depth - 1;
        for (at, cycle) in stage.schedule.cycle.iter().enumerate() {
            // What nothing needs may be ready after the end.
            let value = ValueId(u32::try_from(at).unwrap_or(u32::MAX));
            agenda.values[(*cycle as usize).min(last)].push(value);
        }
        for (at, cycle) in stage.schedule.read_cycle.iter().enumerate() {
            agenda.reads[(*cycle as usize).min(last)].push(at);
        }
        for access in &stage.body.accesses {
            if let crate::ssa::Access::Write(at) = access {
                agenda.writes[(stage.schedule.write_cycle[*at] as usize).min(last)].push(*at);
            }
        }
        for (at, (state, _)) in stage.body.updates.iter().enumerate() {
            let cycle = stage.schedule.update_cycle.get(state).copied().unwrap_or(0);
            agenda.updates[(cycle as usize).min(last)].push(at);
        }
        agenda
    }
}

/// An element's hardware at work.
#[derive(Debug)]
struct Unit {
    states: Vec<u64>,
    memories: Vec<Vec<u64>>,
    flights: VecDeque<Flight>,
    since_issue: u32,
    handler: Agenda,
    signal: Option<Agenda>,
    answering: Option<(Flight, Signal)>,
    signals: VecDeque<Signal>,
    answers: VecDeque<Signal>,
    inputs: Vec<Option<usize>>,
    outputs: Vec<Option<usize>>,
    stalled: bool,
    /// Clocks in which an output had no room.
    stalls: u64,
    issued: u64,
}

/// What changes at the clock's edge.
#[derive(Debug, Default)]
struct Edge {
    states: Vec<(usize, StateId, u64)>,
    writes: Vec<(usize, usize, u64, u32, u32, Vec<u64>)>,
    pops: Vec<usize>,
    pushes: Vec<(usize, Vec<u64>)>,
}

/// A wait-for cycle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("deadlock: {}", .0.join("; "))]
pub struct Deadlock(pub Vec<String>);

/// A graph as hardware at work.
#[derive(Debug)]
pub struct Cycles<'a> {
    graph: &'a Graph,
    hardware: &'a [Hardware],
    units: Vec<Unit>,
    channels: Vec<Queue>,
    fronts: Vec<Vec<u64>>,
    clock: u64,
    moved_at: u64,
}

impl<'a> Cycles<'a> {
    /// After reset.
    #[must_use]
    pub fn new(graph: &'a Graph, hardware: &'a [Hardware]) -> Self {
        assert_eq!(graph.nodes.len(), hardware.len(), "hardware for each node");
        let units = hardware
            .iter()
            .enumerate()
            .map(|(at, hardware)| Unit {
                states: hardware.states.iter().map(|state| state.initial).collect(),
                memories: hardware.memories.iter().map(|m| m.initial.clone()).collect(),
                flights: VecDeque::new(),
                since_issue: u32::MAX,
                handler: Agenda::new(&hardware.handler),
                signal: hardware.signal.as_ref().map(Agenda::new),
                answering: None,
                signals: VecDeque::new(),
                answers: VecDeque::new(),
                inputs: graph.inputs_of(at),
                outputs: graph.outputs_of(at),
                stalled: false,
                stalls: 0,
                issued: 0,
            })
            .collect();
        let channels = graph.channels.iter().map(|c| Queue::new(c.bits, c.depth)).collect();
        let fronts = vec![Vec::new(); graph.channels.len()];
        Self { graph, hardware, units, channels, fronts, clock: 0, moved_at: 0 }
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

    /// Clocks so far.
    #[must_use]
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Iterations begun, and clocks in which an output had no room.
    #[must_use]
    pub fn activity(&self, node: usize) -> (u64, u64) {
        (self.units[node].issued, self.units[node].stalls)
    }

    /// A register of a node, by its name.
    #[must_use]
    pub fn register(&self, node: usize, name: &str) -> Option<u64> {
        let at = self.hardware[node].states.iter().position(|state| state.name == name)?;
        Some(self.units[node].states[at])
    }

    /// Queues a signal for a node.
    pub fn send_signal(&mut self, node: usize, signal: Signal) {
        self.units[node].signals.push_back(signal);
    }

    /// The oldest answer that was not taken.
    pub fn take_answer(&mut self, node: usize) -> Option<Signal> {
        self.units[node].answers.pop_front()
    }

    /// One clock.
    pub fn tick(&mut self) {
        for (channel, front) in self.channels.iter().zip(&mut self.fronts) {
            front.clear();
            front.extend(channel.front().into_iter().flatten());
        }
        let mut edge = Edge::default();
        for node in 0..self.units.len() {
            self.unit(node, &mut edge);
        }
        let moved = !edge.pops.is_empty() || !edge.pushes.is_empty();
        self.commit(edge);
        self.clock += 1;
        if moved {
            self.moved_at = self.clock;
        }
    }

    /// Something moved at the world's ends.
    pub fn touch(&mut self) {
        self.moved_at = self.clock;
    }

    /// Clocks without movement on any channel.
    #[must_use]
    pub fn still(&self) -> u64 {
        self.clock - self.moved_at
    }

    fn commit(&mut self, edge: Edge) {
        for (node, state, value) in edge.states {
            self.units[node].states[state.0 as usize] = value;
        }
        for (node, memory, entry, offset, bits, value) in edge.writes {
            let described = &self.hardware[node].memories[memory];
            if entry >= u64::from(described.entries) {
                continue;
            }
            let per = words(described.bits);
            let first = usize::try_from(entry).unwrap_or(0) * per;
            let words = &mut self.units[node].memories[memory][first..first + per];
            beeline_ir::interpreter::copy(&value, 0, words, offset, bits);
        }
        let mut item = vec![0; 64];
        for channel in edge.pops {
            let width = self.channels[channel].width();
            item.resize(width.max(item.len()), 0);
            self.channels[channel].pop(&mut item[..width]);
        }
        for (channel, item) in edge.pushes {
            // Room was there before the edge, and only this writer could take it.
            self.channels[channel].push(&item);
        }
    }

    fn unit(&mut self, node: usize, edge: &mut Edge) {
        let hardware = &self.hardware[node];
        let unit = &mut self.units[node];
        let schedule = &hardware.handler.schedule;
        // The last cycle first: its outputs decide whether anything moves.
        let mut enabled = true;
        let last = schedule.emit_cycle;
        if let Some(at) = unit.flights.iter().position(|flight| flight.age == last) {
            let mut flight = unit.flights.remove(at).unwrap_or_else(|| Flight {
                age: 0,
                values: Vec::new(),
                items: Vec::new(),
                data: Vec::new(),
                sent: 0,
            });
            run_values(
                hardware,
                &hardware.handler,
                &unit.handler,
                &mut flight,
                &unit.states,
                None,
                &mut |port, want| fetch(&self.channels, &self.fronts, &unit.inputs, port, want),
            );
            for emit in &hardware.handler.body.emits {
                let port = emit.port as usize;
                if flight.values[emit.when.0 as usize] == 0 || flight.sent >> port & 1 == 1 {
                    continue;
                }
                match unit.outputs[port] {
                    Some(channel) if self.channels[channel].is_full() => enabled = false,
                    Some(channel) => {
                        let item = emit.words.iter().map(|w| flight.values[w.0 as usize]).collect();
                        edge.pushes.push((channel, item));
                        flight.sent |= 1 << port;
                    }
                    None => flight.sent |= 1 << port,
                }
            }
            unit.flights.insert(at, flight);
        }
        unit.stalled = !enabled;
        if !enabled {
            unit.stalls += 1;
        }
        let begins = !unit.signals.is_empty() && (unit.flights.is_empty() || !enabled);
        if unit.answering.is_some() || begins {
            // The pipeline stands while a signal is answered.
            self.answer(node, edge);
            return;
        }
        if !enabled {
            return;
        }
        let hardware = &self.hardware[node];
        let unit = &mut self.units[node];
        let due = unit.since_issue >= schedule.interval - 1;
        if due && unit.signals.is_empty() && unit.answering.is_none() {
            unit.flights.push_back(Flight {
                age: 0,
                values: vec![0; hardware.handler.body.nodes.len()],
                items: vec![Vec::new(); unit.inputs.len()],
                data: vec![Vec::new(); hardware.handler.body.reads.len()],
                sent: 0,
            });
            unit.since_issue = 0;
            unit.issued += 1;
        } else {
            unit.since_issue = unit.since_issue.saturating_add(1);
        }
        let mut flights = std::mem::take(&mut unit.flights);
        for flight in &mut flights {
            let age = flight.age as usize;
            let (channels, fronts, inputs) = (&self.channels, &self.fronts, &unit.inputs);
            run_values(
                hardware,
                &hardware.handler,
                &unit.handler,
                flight,
                &unit.states,
                None,
                &mut |port, want| fetch(channels, fronts, inputs, port, want),
            );
            // An item is taken whether or not anything looks at it.
            for (port, want) in &hardware.handler.body.wants {
                let cycle = schedule.fetch_cycle.get(port).copied().unwrap_or(0);
                let wanted = flight.values[want.0 as usize] != 0;
                if cycle == flight.age
                    && wanted
                    && let Some(channel) = unit.inputs[*port as usize]
                    && !self.channels[channel].is_empty()
                {
                    edge.pops.push(channel);
                }
            }
            let memories = (node, &unit.memories[..], &*edge);
            issue_reads(hardware, &hardware.handler, &unit.handler, flight, memories);
            effects(node, &hardware.handler, &unit.handler, flight, age, edge);
            flight.age += 1;
        }
        flights.retain(|flight| flight.age < schedule.depth);
        unit.flights = flights;
    }

    fn answer(&mut self, node: usize, edge: &mut Edge) {
        let hardware = &self.hardware[node];
        let unit = &mut self.units[node];
        if unit.answering.is_none() {
            let Some(signal) = unit.signals.front().copied() else { return };
            let (nodes, reads) = hardware
                .signal
                .as_ref()
                .map_or((0, 0), |stage| (stage.body.nodes.len(), stage.body.reads.len()));
            let flight = Flight {
                age: 0,
                values: vec![0; nodes],
                items: Vec::new(),
                data: vec![Vec::new(); reads],
                sent: 0,
            };
            unit.answering = Some((flight, signal));
        }
        let Some((mut flight, signal)) = unit.answering.take() else { return };
        let (Some(stage), Some(agenda)) = (&hardware.signal, &unit.signal) else {
            unit.signals.pop_front();
            unit.answers.push_back(signal);
            return;
        };
        let age = flight.age as usize;
        run_values(
            hardware,
            stage,
            agenda,
            &mut flight,
            &unit.states,
            Some(&signal),
            &mut |_, _| None,
        );
        issue_reads(hardware, stage, agenda, &mut flight, (node, &unit.memories, &*edge));
        effects(node, stage, agenda, &flight, age, edge);
        flight.age += 1;
        if flight.age >= stage.schedule.depth {
            let mut answer = [0; 8];
            for (word, value) in answer.iter_mut().zip(&stage.body.answer) {
                *word = flight.values[value.0 as usize];
            }
            unit.signals.pop_front();
            unit.answers.push_back(answer);
        } else {
            unit.answering = Some((flight, signal));
        }
    }

    /// Elements that wait for each other, where nothing has moved for `clocks`.
    ///
    /// Errors: the wait-for cycle, with channels and fills.
    pub fn check_deadlock(&self, clocks: u64) -> Result<(), Deadlock> {
        if self.still() < clocks {
            return Ok(());
        }
        let mut list = Vec::new();
        for (node, unit) in self.units.iter().enumerate() {
            if !unit.stalled {
                continue;
            }
            for channel in unit.outputs.iter().flatten() {
                let described = &self.graph.channels[*channel];
                if let (true, Peer::Port { node: reader, .. }) =
                    (self.channels[*channel].is_full(), described.to)
                {
                    list.push(format!(
                        "{} waits for {} to read {} ({} of {} entries)",
                        self.graph.nodes[node].name,
                        self.graph.nodes[reader].name,
                        described.name,
                        self.channels[*channel].len(),
                        described.depth
                    ));
                }
            }
        }
        if list.is_empty() { Ok(()) } else { Err(Deadlock(list)) }
    }
}

/// The item an input gives, if it is wanted and there.
fn fetch(
    channels: &[Queue],
    fronts: &[Vec<u64>],
    inputs: &[Option<usize>],
    port: u32,
    want: bool,
) -> Option<Vec<u64>> {
    let channel = inputs.get(port as usize).copied().flatten()?;
    (want && !channels[channel].is_empty()).then(|| fronts[channel].clone())
}

/// Runs the operations of a flight's cycle.
fn run_values(
    hardware: &Hardware,
    stage: &Stage,
    agenda: &Agenda,
    flight: &mut Flight,
    states: &[u64],
    signal: Option<&Signal>,
    fetch: &mut dyn FnMut(u32, bool) -> Option<Vec<u64>>,
) {
    let body = &stage.body;
    let Some(list) = agenda.values.get(flight.age as usize) else { return };
    for value in list {
        let node = body.node(*value);
        let result = match node.op {
            Op::State(id) => states[id.0 as usize],
            Op::Fetched(port) => {
                let want = body.wants.iter().find(|(p, _)| *p == port).map(|(_, want)| *want);
                let want = want.is_some_and(|want| flight.values[want.0 as usize] != 0);
                let item = fetch(port, want);
                let got = u64::from(item.is_some());
                flight.items[port as usize] = item.unwrap_or_default();
                got
            }
            Op::Item(port, word) => {
                if flight.items[port as usize].is_empty() {
                    // Items may stand before the flag in a cycle's list.
                    let want = body.wants.iter().find(|(p, _)| *p == port).map(|(_, want)| *want);
                    let want = want.is_some_and(|want| flight.values[want.0 as usize] != 0);
                    flight.items[port as usize] = fetch(port, want).unwrap_or_default();
                }
                flight.items[port as usize].get(word as usize).copied().unwrap_or(0)
            }
            Op::Signal(word) => signal.map_or(0, |signal| signal[word as usize]),
            Op::Data(read, word) => {
                let of = &body.reads[read.0 as usize];
                let table = &hardware.memories[of.memory.0 as usize];
                if table.latency == 0 {
                    // A table in logic answers in the same cycle.
                    let entry = flight.values[of.address.0 as usize];
                    let at = usize::try_from(entry).unwrap_or(usize::MAX);
                    let at = at.saturating_mul(words(table.bits)).saturating_add(word as usize);
                    table.initial.get(at).copied().unwrap_or(0)
                } else {
                    flight.data[read.0 as usize].get(word as usize).copied().unwrap_or(0)
                }
            }
            _ => body.apply(*value, &|v| flight.values[v.0 as usize]),
        };
        flight.values[value.0 as usize] = result;
    }
}

/// Addresses given in this cycle; the data are as before the edge, with the writes of older
/// iterations at this edge where the memory lets a read see them.
fn issue_reads(
    hardware: &Hardware,
    stage: &Stage,
    agenda: &Agenda,
    flight: &mut Flight,
    (node, memories, edge): (usize, &[Vec<u64>], &Edge),
) {
    let Some(list) = agenda.reads.get(flight.age as usize) else { return };
    for at in list {
        let read = &stage.body.reads[*at];
        let memory = &hardware.memories[read.memory.0 as usize];
        let entry = flight.values[read.address.0 as usize];
        let per = words(memory.bits);
        flight.data[*at] = if entry < u64::from(memory.entries) {
            let first = usize::try_from(entry).unwrap_or(0) * per;
            memories[read.memory.0 as usize][first..first + per].to_vec()
        } else {
            vec![0; per]
        };
        if memory.transparent && entry < u64::from(memory.entries) {
            let place = (node, read.memory.0 as usize, entry);
            for (of, written, at_entry, offset, bits, value) in &edge.writes {
                if (*of, *written, *at_entry) == place {
                    let data = &mut flight.data[*at];
                    beeline_ir::interpreter::copy(value, 0, data, *offset, *bits);
                }
            }
        }
    }
}

/// Writes and register updates of this cycle.
fn effects(
    node: usize,
    stage: &Stage,
    agenda: &Agenda,
    flight: &Flight,
    age: usize,
    edge: &mut Edge,
) {
    if age >= agenda.writes.len() {
        return;
    }
    for at in &agenda.writes[age] {
        let write = &stage.body.writes[*at];
        if flight.values[write.when.0 as usize] != 0 {
            let value = write.words.iter().map(|w| flight.values[w.0 as usize]).collect();
            let entry = flight.values[write.address.0 as usize];
            let memory = write.memory.0 as usize;
            edge.writes.push((node, memory, entry, write.offset, write.bits, value));
        }
    }
    for at in &agenda.updates[age] {
        let (state, value) = stage.body.updates[*at];
        edge.states.push((node, state, flight.values[value.0 as usize]));
    }
}
