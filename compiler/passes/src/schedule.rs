//! Modulo schedule: in which cycle of an iteration each operation runs, and how many cycles lie
//! between iterations.
//!
//! Operations chain inside a cycle while their delays fit the clock. A memory has one read port
//! (data a fixed number of cycles after the address) and one write port (visible to reads whose
//! address comes in a later cycle). For an initiation interval II:
//!
//! - a register read in cycle r and written in cycle w needs `r <= w <= r + II - 1`;
//! - a read of memory in cycle r and a write in cycle w: `w + 1 <= r + n II` where the write of the
//!   iteration n before must be seen (n is 1, or what forwarding covers), `r <= w` where the read
//!   stands first, `w + 1 <= r` where the write does;
//! - ports serve one access a cycle, modulo II.
//!
//! The least II from 1 on with a schedule is taken. What kept the next smaller one out is the
//! *limiting chain*.

use std::collections::HashMap;

use beeline_ir::tree::Binary;
use serde::Serialize;

use crate::ssa::{Access, Body, MemoryId, Op, ReadId, StateId, ValueId};

/// What a memory is to the schedule.
#[derive(Clone, Debug)]
pub struct MemoryTiming {
    /// Name, for the limiting chain.
    pub name: String,
    /// Cycles from address to data.
    pub latency: u32,
    /// Iterations back whose writes are forwarded; 0 for none.
    pub forwarded: u32,
    /// A read sees a write of its own cycle.
    pub transparent: bool,
    /// No dependence between iterations.
    pub independent: bool,
    /// Lives in registers: any number of reads, data in the same cycle.
    pub constant: bool,
}

/// The target's clock and what operations cost, in picoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Length of a cycle.
    pub period_ps: u32,
}

impl Default for Target {
    /// 180 MHz, the specification's release clock.
    fn default() -> Self {
        Self { period_ps: 5_555 }
    }
}

impl Target {
    /// Delay of an operation.
    #[must_use]
    pub fn delay(&self, body: &Body, value: ValueId) -> u32 {
        let node = body.node(value);
        match node.op {
            Op::Constant(_)
            | Op::State(_)
            | Op::Fetched(_)
            | Op::Item(..)
            | Op::Signal(_)
            | Op::Resize(_)
            | Op::Extract(..)
            | Op::Insert(..) => 0,
            Op::Data(..) => 900,
            Op::Unary(..) => 150,
            Op::Select(..) => 300,
            Op::Binary(operator, a, b) => {
                let bits = body.bits(a);
                match operator {
                    Binary::And | Binary::Or | Binary::Xor => 250,
                    Binary::Add | Binary::Subtract | Binary::Less | Binary::LessEqual => {
                        500 + 12 * bits
                    }
                    Binary::Equal | Binary::NotEqual => 350 + 100 * (bits.max(2).ilog2() / 2),
                    Binary::Multiply => 2_500 + 30 * bits,
                    Binary::ShiftLeft | Binary::ShiftRight => {
                        if body.constant_of(b).is_some() {
                            0
                        } else {
                            200 * bits.max(2).ilog2()
                        }
                    }
                    Binary::Divide | Binary::Remainder => 700 * bits,
                }
            }
        }
    }
}

/// When everything happens.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// Cycles between iterations.
    pub interval: u32,
    /// Cycles of an iteration, from the first to the one its outputs leave in.
    pub depth: u32,
    /// Cycle of each value; constants have 0.
    pub cycle: Vec<u32>,
    /// Cycle in which each read's address is given.
    pub read_cycle: Vec<u32>,
    /// Cycle of each write.
    pub write_cycle: Vec<u32>,
    /// Cycle in which each register is written.
    pub update_cycle: HashMap<StateId, u32>,
    /// Cycle in which outputs leave: the last.
    pub emit_cycle: u32,
    /// Cycle in which each input is fetched.
    pub fetch_cycle: HashMap<u32, u32>,
    /// Longest path inside a cycle, by the table.
    pub longest_ps: u32,
    /// What kept a smaller interval out.
    pub limit: Option<Limit>,
}

/// Why the interval is not smaller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// The register or memory.
    pub name: String,
    /// `recurrence`, `memory` or `port`.
    pub kind: &'static str,
    /// From the read to the write, an operation each.
    pub chain: Vec<String>,
}

/// Largest interval tried.
const MOST: u32 = 64;

/// Schedules a body; `pipelined` false takes the depth as the interval.
#[must_use]
pub fn schedule(
    body: &Body,
    memories: &[MemoryTiming],
    names: &dyn Fn(StateId) -> String,
    target: Target,
    pipelined: bool,
) -> Schedule {
    let mut limit = None;
    let first = if pipelined { 1 } else { 1_000_000 };
    for interval in first..first + MOST {
        match try_interval(body, memories, names, target, interval) {
            Ok(mut schedule) => {
                schedule.limit = limit;
                if !pipelined {
                    schedule.interval = schedule.depth;
                }
                return schedule;
            }
            Err(why) => limit = Some(why),
        }
    }
    // Without overlap every dependence between iterations holds.
    let mut schedule = try_interval(body, memories, names, target, 1_000_000).unwrap_or_default();
    schedule.interval = schedule.depth;
    schedule.limit = limit;
    schedule
}

/// More accesses than ports.
fn too_many(body: &Body, memories: &[MemoryTiming], interval: u32) -> Option<Limit> {
    let mut counts: HashMap<(MemoryId, bool), u32> = HashMap::new();
    for access in &body.accesses {
        let key = match access {
            Access::Read(id) => (body.reads[id.0 as usize].memory, false),
            Access::Write(at) => (body.writes[*at].memory, true),
        };
        if memories[key.0.0 as usize].constant {
            continue;
        }
        *counts.entry(key).or_default() += 1;
    }
    let (key, count) = counts.into_iter().filter(|(_, count)| *count > interval).min()?;
    let name = memories[key.0.0 as usize].name.clone();
    let what = if key.1 { "writes" } else { "reads" };
    Some(Limit { name, kind: "port", chain: vec![format!("{count} {what} in an iteration")] })
}

struct Trial<'a> {
    /// The value that reads each register.
    state_at: HashMap<StateId, usize>,
    body: &'a Body,
    memories: &'a [MemoryTiming],
    target: Target,
    interval: u32,
    /// Lower bounds that constraints have raised.
    state_from: HashMap<StateId, u32>,
    read_from: Vec<u32>,
    write_from: Vec<u32>,
}

/// Times of one pass: `(cycle, picoseconds into it)` at which each value is ready.
struct Times {
    ready: Vec<(u32, u32)>,
    read: Vec<u32>,
    write: Vec<u32>,
    longest: u32,
}

fn try_interval(
    body: &Body,
    memories: &[MemoryTiming],
    names: &dyn Fn(StateId) -> String,
    target: Target,
    interval: u32,
) -> Result<Schedule, Limit> {
    if let Some(limit) = too_many(body, memories, interval) {
        return Err(limit);
    }
    let mut state_at = HashMap::new();
    for (at, node) in body.nodes.iter().enumerate() {
        if let Op::State(id) = node.op {
            state_at.entry(id).or_insert(at);
        }
    }
    let mut trial = Trial {
        state_at,
        body,
        memories,
        target,
        interval,
        state_from: HashMap::new(),
        read_from: vec![0; body.reads.len()],
        write_from: vec![0; body.writes.len()],
    };
    let bound = u32::try_from(body.nodes.len()).unwrap_or(u32::MAX).saturating_add(200);
    for _ in 0..2_000 {
        let times = trial.times();
        match trial.violated(&times) {
            None => return Ok(trial.finish(times)),
            Some(raise) => {
                if raise.cycle() > bound {
                    return Err(trial.limit(&raise, names));
                }
                trial.apply(&raise);
            }
        }
        // A recurrence that cannot be met pushes its own read away for ever.
        if let Some(raise) = trial.runaway(&times) {
            return Err(trial.limit(&raise, names));
        }
    }
    let kind = "recurrence";
    Err(Limit { name: "the schedule".to_owned(), kind, chain: Vec::new() })
}

/// A lower bound to raise, and why.
#[derive(Clone, Debug)]
enum Raise {
    State(StateId, u32),
    Read(ReadId, u32, MemoryId),
    Write(usize, u32, MemoryId),
}

impl Raise {
    fn cycle(&self) -> u32 {
        match self {
            Self::State(_, c) | Self::Read(_, c, _) | Self::Write(_, c, _) => *c,
        }
    }
}

impl Trial<'_> {
    /// As soon as possible, under the lower bounds and the ports.
    fn times(&self) -> Times {
        let body = self.body;
        let period = self.target.period_ps;
        let mut ready: Vec<(u32, u32)> = vec![(0, 0); body.nodes.len()];
        let mut read = vec![u32::MAX; body.reads.len()];
        let mut longest = 0;
        let mut ports: HashMap<(MemoryId, u32), ()> = HashMap::new();
        for at in 0..body.nodes.len() {
            let value = ValueId(u32::try_from(at).unwrap_or(u32::MAX));
            let node = body.node(value);
            let mut start = (0, 0);
            match node.op {
                Op::State(id) => start = (self.state_from.get(&id).copied().unwrap_or(0), 0),
                Op::Fetched(port) | Op::Item(port, _) => {
                    let want = body.wants.iter().find(|(p, _)| *p == port).map(|(_, want)| *want);
                    start = want.map_or((0, 0), |want| ready[want.0 as usize]);
                }
                Op::Data(id, _) => {
                    let slot = id.0 as usize;
                    if read[slot] == u32::MAX {
                        let of = &body.reads[slot];
                        let timing = &self.memories[of.memory.0 as usize];
                        let address = ready[of.address.0 as usize];
                        let when = ready[of.when.0 as usize];
                        let mut cycle = address.0.max(when.0).max(self.read_from[slot]);
                        if !timing.constant {
                            // The address is latched by the memory at the end of its cycle.
                            while ports.contains_key(&(of.memory, cycle % self.interval)) {
                                cycle += 1;
                            }
                            ports.insert((of.memory, cycle % self.interval), ());
                        }
                        read[slot] = cycle;
                    }
                    let of = &body.reads[slot];
                    let latency = self.memories[of.memory.0 as usize].latency;
                    start = (read[slot] + latency, 0);
                    if latency == 0 {
                        // A table in logic chains like any operation.
                        start = ready[of.address.0 as usize].max(ready[of.when.0 as usize]);
                    }
                }
                _ => {
                    for operand in body.operands(value) {
                        start = start.max(ready[operand.0 as usize]);
                    }
                }
            }
            let delay = self.target.delay(body, value);
            let mut end = (start.0, start.1 + delay);
            if end.1 > period && start.1 > 0 {
                end = (start.0 + 1, delay);
            }
            longest = longest.max(end.1);
            ready[at] = end;
        }
        let mut write = vec![0; body.writes.len()];
        let mut write_ports: HashMap<(MemoryId, u32), ()> = HashMap::new();
        for access in &body.accesses {
            let Access::Write(at) = access else { continue };
            let of = &body.writes[*at];
            let mut cycle = self.write_from[*at];
            for value in of.words.iter().chain([&of.address, &of.when]) {
                cycle = cycle.max(ready[value.0 as usize].0);
            }
            while write_ports.contains_key(&(of.memory, cycle % self.interval)) {
                cycle += 1;
                if cycle > 1_000_000 {
                    break;
                }
            }
            write_ports.insert((of.memory, cycle % self.interval), ());
            write[*at] = cycle;
        }
        Times { ready, read, write, longest }
    }

    fn update_cycle(&self, times: &Times, state: StateId, value: ValueId) -> u32 {
        let read = self.read_of_state(times, state).unwrap_or(0);
        times.ready[value.0 as usize].0.max(read)
    }

    fn read_of_state(&self, times: &Times, state: StateId) -> Option<u32> {
        Some(times.ready[*self.state_at.get(&state)?].0)
    }

    /// Accesses of one memory beyond its ports in an interval can never fit.
    fn violated(&self, times: &Times) -> Option<Raise> {
        for (state, value) in &self.body.updates {
            let Some(read) = self.read_of_state(times, *state) else { continue };
            if self.body.node(*value).op == Op::State(*state) {
                continue;
            }
            let write = self.update_cycle(times, *state, *value);
            if write + 1 > read + self.interval {
                return Some(Raise::State(*state, write + 1 - self.interval));
            }
        }
        for (later, access) in self.body.accesses.iter().enumerate() {
            for earlier in &self.body.accesses[..later] {
                if let Some(raise) = self.ordered(times, *earlier, *access) {
                    return Some(raise);
                }
            }
            for other in &self.body.accesses {
                if let Some(raise) = self.across(times, *other, *access) {
                    return Some(raise);
                }
            }
        }
        None
    }

    fn memory_of(&self, access: Access) -> MemoryId {
        match access {
            Access::Read(id) => self.body.reads[id.0 as usize].memory,
            Access::Write(at) => self.body.writes[at].memory,
        }
    }

    /// Two accesses of one iteration, in program order.
    fn ordered(&self, times: &Times, first: Access, second: Access) -> Option<Raise> {
        let memory = self.memory_of(first);
        if memory != self.memory_of(second) {
            return None;
        }
        match (first, second) {
            (Access::Read(read), Access::Write(write)) => {
                let transparent = self.memories[memory.0 as usize].transparent;
                let read = times.read[read.0 as usize] + u32::from(transparent);
                (times.write[write] < read).then_some(Raise::Write(write, read, memory))
            }
            (Access::Write(write), Access::Read(read)) => {
                let when = self.body.reads[read.0 as usize].when;
                if self.body.excludes(when, self.body.writes[write].when) {
                    return None;
                }
                let transparent = self.memories[memory.0 as usize].transparent;
                let least = times.write[write] + u32::from(!transparent);
                (times.read[read.0 as usize] < least).then_some(Raise::Read(read, least, memory))
            }
            (Access::Write(a), Access::Write(b)) => {
                if self.body.excludes(self.body.writes[a].when, self.body.writes[b].when) {
                    return None;
                }
                let least = times.write[a] + 1;
                (times.write[b] < least).then_some(Raise::Write(b, least, memory))
            }
            (Access::Read(_), Access::Read(_)) => None,
        }
    }

    /// A write and a read of later or earlier iterations.
    fn across(&self, times: &Times, a: Access, b: Access) -> Option<Raise> {
        let (Access::Write(write), Access::Read(read)) = (a, b) else { return None };
        let memory = self.memory_of(a);
        let timing = &self.memories[memory.0 as usize];
        if memory != self.memory_of(b) || timing.independent {
            return None;
        }
        let (w, r) = (times.write[write], times.read[read.0 as usize]);
        let distance = timing.forwarded + 1;
        let reach = u64::from(distance) * u64::from(self.interval);
        // The first cycle after the write's that reads it, less one where that is the write's own.
        let after = u64::from(!timing.transparent);
        if u64::from(w) + after > u64::from(r) + reach {
            let least = u64::from(w) + after - reach;
            return Some(Raise::Read(read, u32::try_from(least).unwrap_or(u32::MAX), memory));
        }
        // The next iteration's write must not overtake this iteration's read.
        let seen = u32::from(timing.transparent);
        if u64::from(r) + u64::from(seen) > u64::from(w) + u64::from(self.interval) {
            let least = r + seen - self.interval;
            return Some(Raise::Write(write, least, memory));
        }
        None
    }

    fn apply(&mut self, raise: &Raise) {
        match *raise {
            Raise::State(id, cycle) => {
                self.state_from.insert(id, cycle);
            }
            Raise::Read(id, cycle, _) => self.read_from[id.0 as usize] = cycle,
            Raise::Write(at, cycle, _) => self.write_from[at] = cycle,
        }
    }

    /// A bound far past where everything could be without recurrences.
    fn runaway(&self, times: &Times) -> Option<Raise> {
        let free = self.free_depth();
        let limit = free * 2 + 64;
        for (state, cycle) in &self.state_from {
            if *cycle > limit {
                return Some(Raise::State(*state, *cycle));
            }
        }
        for (at, cycle) in self.read_from.iter().enumerate() {
            if *cycle > limit && times.read[at] != u32::MAX {
                let memory = self.body.reads[at].memory;
                let id = ReadId(u32::try_from(at).unwrap_or(0));
                return Some(Raise::Read(id, *cycle, memory));
            }
        }
        None
    }

    /// Depth without any lower bound.
    fn free_depth(&self) -> u32 {
        // Latencies and delays bound the depth of an unconstrained schedule.
        let latency: u32 = self.memories.iter().map(|m| m.latency).max().unwrap_or(1);
        let reads = u32::try_from(self.body.reads.len()).unwrap_or(0);
        let mut depth = vec![0_u32; self.body.nodes.len()];
        let mut most = 0;
        for at in 0..self.body.nodes.len() {
            let value = ValueId(u32::try_from(at).unwrap_or(0));
            let delay = u64::from(self.target.delay(self.body, value));
            let own = u32::try_from(delay).unwrap_or(0);
            let start =
                self.body.operands(value).iter().map(|o| depth[o.0 as usize]).max().unwrap_or(0);
            depth[at] = start.saturating_add(own);
            most = most.max(depth[at]);
        }
        most / self.target.period_ps.max(1) * 2 + reads.saturating_mul(latency) + 8
    }

    fn finish(&self, times: Times) -> Schedule {
        let mut update_cycle = HashMap::new();
        // An iteration has a cycle to come in and one to go out.
        let mut last = 1;
        for (state, value) in &self.body.updates {
            let cycle = self.update_cycle(&times, *state, *value);
            last = last.max(cycle);
            update_cycle.insert(*state, cycle);
        }
        for access in &self.body.accesses {
            if let Access::Write(at) = access {
                last = last.max(times.write[*at]);
            }
        }
        for emit in &self.body.emits {
            for value in emit.words.iter().chain([&emit.when]) {
                last = last.max(times.ready[value.0 as usize].0);
            }
        }
        for value in &self.body.answer {
            last = last.max(times.ready[value.0 as usize].0);
        }
        let mut read_cycle = times.read;
        for cycle in &mut read_cycle {
            if *cycle == u32::MAX {
                *cycle = 0;
            }
        }
        Schedule {
            interval: self.interval,
            depth: last + 1,
            cycle: times.ready.iter().map(|(cycle, _)| *cycle).collect(),
            read_cycle,
            write_cycle: times.write,
            update_cycle,
            emit_cycle: last,
            fetch_cycle: self
                .body
                .wants
                .iter()
                .map(|(port, want)| (*port, times.ready[want.0 as usize].0))
                .collect(),
            longest_ps: times.longest,
            limit: None,
        }
    }

    /// The chain from the read to the write of what could not be met.
    fn limit(&self, raise: &Raise, names: &dyn Fn(StateId) -> String) -> Limit {
        match raise {
            Raise::State(state, _) => {
                let value = self.body.updates.iter().find(|(s, _)| s == state).map(|(_, v)| *v);
                let from = |op: Op| op == Op::State(*state);
                let chain = value.map(|v| self.chain(v, &from, names)).unwrap_or_default();
                Limit { name: names(*state), kind: "recurrence", chain }
            }
            Raise::Read(_, _, memory) | Raise::Write(_, _, memory) => {
                let name = self.memories[memory.0 as usize].name.clone();
                let from = |op: Op| {
                    matches!(op, Op::Data(read, _)
                        if self.body.reads[read.0 as usize].memory == *memory)
                };
                let writes = self.body.writes.iter().filter(|write| write.memory == *memory);
                let chain = writes
                    .flat_map(|write| write.words.iter().chain([&write.when, &write.address]))
                    .map(|value| self.chain(*value, &from, names))
                    .find(|chain| !chain.is_empty())
                    .unwrap_or_default();
                Limit { name, kind: "memory", chain }
            }
        }
    }

    /// Operations from one for which `from` holds to `value`.
    fn chain(
        &self,
        value: ValueId,
        from: &dyn Fn(Op) -> bool,
        names: &dyn Fn(StateId) -> String,
    ) -> Vec<String> {
        let body = self.body;
        let mut parent: HashMap<ValueId, ValueId> = HashMap::new();
        let mut stack = vec![value];
        let mut found = None;
        while let Some(at) = stack.pop() {
            if from(body.node(at).op) {
                found = Some(at);
                break;
            }
            for operand in body.operands(at) {
                if operand != value && !parent.contains_key(&operand) {
                    parent.insert(operand, at);
                    stack.push(operand);
                }
            }
        }
        let mut list = Vec::new();
        let mut at = found;
        while let Some(value) = at {
            list.push(describe(body, value, self.memories, names));
            at = parent.get(&value).copied();
        }
        list
    }
}

/// An operation in a word or two.
#[must_use]
pub fn describe(
    body: &Body,
    value: ValueId,
    memories: &[MemoryTiming],
    names: &dyn Fn(StateId) -> String,
) -> String {
    let node = body.node(value);
    match node.op {
        Op::State(id) => format!("register {}", names(id)),
        Op::Data(read, _) => {
            format!("read {}", memories[body.reads[read.0 as usize].memory.0 as usize].name)
        }
        Op::Binary(operator, ..) => format!("{operator:?} {}", node.bits).to_lowercase(),
        Op::Unary(operator, _) => format!("{operator:?} {}", node.bits).to_lowercase(),
        Op::Select(..) => format!("select {}", node.bits),
        Op::Fetched(port) | Op::Item(port, _) => format!("input {}", port + 1),
        Op::Constant(value) => format!("{value}"),
        Op::Signal(_) => "signal".to_owned(),
        Op::Resize(_) => format!("widen {}", node.bits),
        Op::Extract(..) => format!("bits {}", node.bits),
        Op::Insert(..) => format!("insert {}", node.bits),
    }
}
