//! The least times that meet an interval, or a reason why there are none.
//!
//! Registers, reads and writes are *anchors*: each has a lower bound, at first 0. A pass computes
//! when everything is ready under the bounds (as soon as possible), compares the result with the
//! rules, and raises every bound that a rule asks for. Where no rule asks for more, the times are a
//! schedule. Rules are differences between two anchors, so this is a search for longest paths
//! (Bellman and Ford), and bounds rise for ever exactly where the rules go round in a circle that
//! is longer than the interval allows. Each raised bound remembers the anchor at the other end of its
//! longest path; a circle of those is such a recurrence, and shows a few passes after it began.
//! To wait until the bounds have run far away instead takes a pass for every cycle of the distance, at
//! every interval below the least: minutes for a memory that answers late.
//!
//! That proof holds where times follow from paths alone. An access that waits for a port is later
//! than its path, and might have waited less in another order; a circle through one counts as proved
//! after it has turned often enough to meet every port again.

use std::collections::{HashMap, HashSet};

use super::{MemoryTiming, Schedule, Target};
use crate::ssa::{Access, Body, MemoryId, Op, StateId, ValueId};

/// Passes of one interval.
const PASSES: u32 = 2_000;

/// Why an interval has no schedule.
#[derive(Clone, Debug)]
pub(super) enum Unmet {
    /// A memory has fewer ports than accesses: which memory, and in words how many accesses.
    Ports(MemoryId, String),
    /// What the recurrence goes through.
    Recurrence(Vec<Bound>),
}

/// What a recurrence goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    /// A register.
    State(StateId),
    /// A memory.
    Memory(MemoryId),
}

/// A register, a read or a write: its place among the bounds.
type Anchor = usize;

/// What must hold between two anchors.
#[derive(Clone, Copy, Debug)]
enum Rule {
    /// A register is written at most an interval after it is read.
    Update { state: StateId, value: ValueId },
    /// In one iteration, so many cycles after the first.
    After { first: Anchor, second: Anchor, gap: u32 },
    /// A write is seen by the read so many iterations later.
    Seen { write: Anchor, read: Anchor, distance: u32, gap: u32 },
    /// The next iteration's write does not overtake this iteration's read.
    Behind { read: Anchor, write: Anchor, gap: u32 },
}

/// A body, prepared for every interval.
#[derive(Debug)]
pub(super) struct Problem<'a> {
    pub(super) body: &'a Body,
    pub(super) memories: &'a [MemoryTiming],
    target: Target,
    /// The value that reads each register.
    state_at: Vec<Option<usize>>,
    /// Operands of every value in a row, and where each value's begin.
    operands: Vec<ValueId>,
    begins: Vec<usize>,
    delays: Vec<u32>,
    rules: Vec<Rule>,
    /// A bound past this is a recurrence, whatever it goes through.
    limit: u32,
}

/// Where the longest path to a time begins, and whether it waited for a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cause {
    anchor: Option<Anchor>,
    waited: bool,
}

/// Times of one pass.
#[derive(Debug)]
struct Times {
    /// `(cycle, picoseconds into it)` at which each value is ready, and why not earlier.
    ready: Vec<(u32, u32)>,
    why: Vec<Cause>,
    /// Cycle of each access, and why not earlier; `u32::MAX` for a read that nothing uses.
    access: Vec<(u32, Cause)>,
    longest: u32,
}

/// Lower bounds, and what asked for them.
#[derive(Debug)]
struct Bounds {
    from: Vec<u32>,
    cause: Vec<Cause>,
}

impl<'a> Problem<'a> {
    pub(super) fn new(body: &'a Body, memories: &'a [MemoryTiming], target: Target) -> Self {
        let mut problem = Self {
            body,
            memories,
            target,
            state_at: Vec::new(),
            operands: Vec::new(),
            begins: vec![0],
            delays: Vec::with_capacity(body.nodes.len()),
            rules: Vec::new(),
            limit: 0,
        };
        for (at, node) in body.nodes.iter().enumerate() {
            let value = id(at);
            if let Op::State(state) = node.op {
                problem.read_at(state, at);
            }
            problem.operands.extend(body.operands(value));
            problem.begins.push(problem.operands.len());
            problem.delays.push(target.delay(body, value));
        }
        for (state, _) in &body.updates {
            problem.room(*state);
        }
        problem.rules = problem.rules();
        let writes = u32::try_from(body.writes.len()).unwrap_or(u32::MAX);
        let depth = problem.free_depth().saturating_add(writes);
        problem.limit = depth.saturating_mul(2).saturating_add(64);
        problem
    }

    fn room(&mut self, state: StateId) {
        let count = state.0 as usize + 1;
        if self.state_at.len() < count {
            self.state_at.resize(count, None);
        }
    }

    fn read_at(&mut self, state: StateId, at: usize) {
        self.room(state);
        self.state_at[state.0 as usize].get_or_insert(at);
    }

    fn read_anchor(&self, read: usize) -> Anchor {
        self.state_at.len() + read
    }

    fn write_anchor(&self, write: usize) -> Anchor {
        self.state_at.len() + self.body.reads.len() + write
    }

    fn anchors(&self) -> usize {
        self.write_anchor(self.body.writes.len())
    }

    fn anchor(&self, access: Access) -> Anchor {
        match access {
            Access::Read(id) => self.read_anchor(id.0 as usize),
            Access::Write(at) => self.write_anchor(at),
        }
    }

    fn bound(&self, anchor: Anchor) -> Bound {
        let (states, reads) = (self.state_at.len(), self.body.reads.len());
        if anchor < states {
            Bound::State(StateId(u32::try_from(anchor).unwrap_or(u32::MAX)))
        } else if anchor < states + reads {
            Bound::Memory(self.body.reads[anchor - states].memory)
        } else {
            Bound::Memory(self.body.writes[anchor - states - reads].memory)
        }
    }

    fn memory_of(&self, access: Access) -> MemoryId {
        match access {
            Access::Read(id) => self.body.reads[id.0 as usize].memory,
            Access::Write(at) => self.body.writes[at].memory,
        }
    }

    /// What must hold, whatever the interval.
    fn rules(&self) -> Vec<Rule> {
        let body = self.body;
        let mut rules = Vec::new();
        for (state, value) in &body.updates {
            let read = self.state_at[state.0 as usize].is_some();
            if read && body.node(*value).op != Op::State(*state) {
                rules.push(Rule::Update { state: *state, value: *value });
            }
        }
        let when = |access: Access| match access {
            Access::Read(id) => body.reads[id.0 as usize].when,
            Access::Write(at) => body.writes[at].when,
        };
        for (later, access) in body.accesses.iter().enumerate() {
            let memory = self.memory_of(*access);
            let timing = &self.memories[memory.0 as usize];
            let second = self.anchor(*access);
            for earlier in &body.accesses[..later] {
                if self.memory_of(*earlier) != memory {
                    continue;
                }
                let first = self.anchor(*earlier);
                let gap = match (earlier, access) {
                    (Access::Read(_), Access::Read(_)) => continue,
                    (Access::Read(_), Access::Write(_)) => u32::from(timing.transparent),
                    _ if body.excludes(when(*access), when(*earlier)) => continue,
                    (Access::Write(_), Access::Read(_)) => u32::from(!timing.transparent),
                    (Access::Write(_), Access::Write(_)) => 1,
                };
                rules.push(Rule::After { first, second, gap });
            }
            if timing.independent || matches!(access, Access::Write(_)) {
                continue;
            }
            let writes = body.accesses.iter().filter(|other| matches!(other, Access::Write(_)));
            for write in writes.filter(|other| self.memory_of(**other) == memory) {
                let (write, read) = (self.anchor(*write), second);
                // The first cycle after the write's that reads it, less one where that is the
                // write's own.
                let gap = u32::from(!timing.transparent);
                let distance = timing.forwarded + 1;
                rules.push(Rule::Seen { write, read, distance, gap });
                let gap = u32::from(timing.transparent);
                rules.push(Rule::Behind { read, write, gap });
            }
        }
        rules
    }

    /// More accesses than ports.
    fn too_many(&self, interval: u32) -> Option<Unmet> {
        let mut counts = vec![[0_u32; 2]; self.memories.len()];
        for access in &self.body.accesses {
            let write = matches!(access, Access::Write(_));
            counts[self.memory_of(*access).0 as usize][usize::from(write)] += 1;
        }
        for (at, counts) in counts.iter().enumerate() {
            if self.memories[at].constant {
                continue;
            }
            for (count, what) in counts.iter().zip(["reads", "writes"]) {
                if *count > interval {
                    let memory = MemoryId(u32::try_from(at).unwrap_or(u32::MAX));
                    return Some(Unmet::Ports(memory, format!("{count} {what} in an iteration")));
                }
            }
        }
        None
    }

    /// The schedule with the earliest times for an interval.
    pub(super) fn solve(&self, interval: u32) -> Result<Schedule, Unmet> {
        if let Some(unmet) = self.too_many(interval) {
            return Err(unmet);
        }
        let anchors = self.anchors();
        let mut bounds = Bounds { from: vec![0; anchors], cause: vec![Cause::default(); anchors] };
        // Often enough to meet every port in every cycle of the interval.
        let mut patience = interval.saturating_mul(2).saturating_add(16);
        let mut last = Vec::new();
        for _ in 0..PASSES {
            let times = self.times(&bounds, interval);
            let raised = self.raise(&mut bounds, &times, interval);
            if raised.is_empty() {
                return Ok(self.finish(times, interval));
            }
            if let Some(far) = raised.iter().find(|anchor| bounds.from[**anchor] > self.limit) {
                return Err(Unmet::Recurrence(vec![self.bound(*far)]));
            }
            last = raised;
            if let Some((circle, waited)) = circle(&bounds.cause) {
                patience -= 1;
                if !waited || patience == 0 {
                    let list = circle.iter().map(|anchor| self.bound(*anchor)).collect();
                    return Err(Unmet::Recurrence(list));
                }
            }
        }
        Err(Unmet::Recurrence(last.iter().map(|anchor| self.bound(*anchor)).collect()))
    }

    /// As soon as possible, under the lower bounds and the ports.
    fn times(&self, bounds: &Bounds, interval: u32) -> Times {
        let body = self.body;
        let period = self.target.period_ps;
        let mut ready: Vec<(u32, u32)> = vec![(0, 0); body.nodes.len()];
        let mut why = vec![Cause::default(); body.nodes.len()];
        let mut access = vec![(u32::MAX, Cause::default()); body.reads.len() + body.writes.len()];
        let mut longest = 0;
        let mut ports: HashSet<(MemoryId, u32)> = HashSet::new();
        for at in 0..body.nodes.len() {
            let mut start = ((0, 0), Cause::default());
            match body.nodes[at].op {
                Op::State(id) => {
                    let anchor = id.0 as usize;
                    start = ((bounds.from[anchor], 0), of(anchor));
                }
                Op::Fetched(port) | Op::Item(port, _) => {
                    let want = body.wants.iter().find(|(p, _)| *p == port).map(|(_, want)| *want);
                    if let Some(want) = want {
                        start = (ready[want.0 as usize], why[want.0 as usize]);
                    }
                }
                Op::Data(id, _) => {
                    let slot = id.0 as usize;
                    let read = &body.reads[slot];
                    let timing = &self.memories[read.memory.0 as usize];
                    let asked = later(
                        (ready[read.address.0 as usize], why[read.address.0 as usize]),
                        (ready[read.when.0 as usize], why[read.when.0 as usize]),
                    );
                    if access[slot].0 == u32::MAX {
                        // The address is latched by the memory at the end of its cycle.
                        let anchor = self.read_anchor(slot);
                        let mut found = bounded((asked.0.0, asked.1), bounds, anchor);
                        if !timing.constant {
                            found = free(&mut ports, read.memory, interval, found);
                        }
                        access[slot] = found;
                    }
                    let (cycle, cause) = access[slot];
                    start = ((cycle + timing.latency, 0), cause);
                    if timing.latency == 0 {
                        // A table in logic chains like any operation.
                        start = asked;
                    }
                }
                _ => {
                    for operand in &self.operands[self.begins[at]..self.begins[at + 1]] {
                        let operand = operand.0 as usize;
                        start = later(start, (ready[operand], why[operand]));
                    }
                }
            }
            let (start, cause) = start;
            let delay = self.delays[at];
            let mut end = (start.0, start.1 + delay);
            if end.1 > period && start.1 > 0 {
                end = (start.0 + 1, delay);
            }
            longest = longest.max(end.1);
            (ready[at], why[at]) = (end, cause);
        }
        let mut ports: HashSet<(MemoryId, u32)> = HashSet::new();
        for listed in &body.accesses {
            let Access::Write(at) = listed else { continue };
            let write = &body.writes[*at];
            let mut found = (0, Cause::default());
            for value in write.words.iter().chain([&write.address, &write.when]) {
                let value = value.0 as usize;
                let here = ((ready[value].0, 0), why[value]);
                let ((cycle, _), cause) = later(((found.0, 0), found.1), here);
                found = (cycle, cause);
            }
            let found = bounded(found, bounds, self.write_anchor(*at));
            access[body.reads.len() + at] = free(&mut ports, write.memory, interval, found);
        }
        Times { ready, why, access, longest }
    }

    /// Raises every bound that a rule asks for; which rose.
    fn raise(&self, bounds: &mut Bounds, times: &Times, interval: u32) -> Vec<Anchor> {
        let mut raised = Vec::new();
        let states = self.state_at.len();
        for rule in &self.rules {
            // A read that nothing uses has no time, and binds nothing.
            if let Rule::After { first, .. } | Rule::Behind { read: first, .. } = rule
                && times.access[first - states].0 == u32::MAX
            {
                continue;
            }
            let (anchor, least, now, cause) = match *rule {
                Rule::Update { state, value } => {
                    let Some(read) = self.read_of_state(times, state) else { continue };
                    let value = value.0 as usize;
                    let least = (times.ready[value].0 + 1).saturating_sub(interval);
                    (state.0 as usize, least, read, times.why[value])
                }
                Rule::After { first, second, gap } => {
                    let (cycle, cause) = times.access[first - states];
                    (second, cycle.saturating_add(gap), times.access[second - states].0, cause)
                }
                Rule::Seen { write, read, distance, gap } => {
                    let (cycle, cause) = times.access[write - states];
                    let reach = u64::from(distance) * u64::from(interval);
                    let least = (u64::from(cycle) + u64::from(gap)).saturating_sub(reach);
                    let least = u32::try_from(least).unwrap_or(u32::MAX);
                    (read, least, times.access[read - states].0, cause)
                }
                Rule::Behind { read, write, gap } => {
                    let (cycle, cause) = times.access[read - states];
                    let least = cycle.saturating_add(gap).saturating_sub(interval);
                    (write, least, times.access[write - states].0, cause)
                }
            };
            if now < least && bounds.from[anchor] < least {
                bounds.from[anchor] = least;
                bounds.cause[anchor] = cause;
                raised.push(anchor);
            }
        }
        raised
    }

    fn read_of_state(&self, times: &Times, state: StateId) -> Option<u32> {
        let at = (*self.state_at.get(state.0 as usize)?)?;
        Some(times.ready[at].0)
    }

    fn update_cycle(&self, times: &Times, state: StateId, value: ValueId) -> u32 {
        let read = self.read_of_state(times, state).unwrap_or(0);
        times.ready[value.0 as usize].0.max(read)
    }

    /// More cycles than an iteration without rules has.
    fn free_depth(&self) -> u32 {
        let body = self.body;
        let latency: u32 = self.memories.iter().map(|memory| memory.latency).max().unwrap_or(1);
        let reads = u32::try_from(body.reads.len()).unwrap_or(0);
        let mut depth = vec![0_u32; body.nodes.len()];
        let mut most = 0;
        for at in 0..body.nodes.len() {
            let operands = &self.operands[self.begins[at]..self.begins[at + 1]];
            let start = operands.iter().map(|operand| depth[operand.0 as usize]).max();
            depth[at] = start.unwrap_or(0).saturating_add(self.delays[at]);
            most = most.max(depth[at]);
        }
        most / self.target.period_ps.max(1) * 2 + reads.saturating_mul(latency) + 8
    }

    fn finish(&self, times: Times, interval: u32) -> Schedule {
        let mut update_cycle = HashMap::new();
        // An iteration has a cycle to come in and one to go out.
        let mut last = 1;
        for (state, value) in &self.body.updates {
            let cycle = self.update_cycle(&times, *state, *value);
            last = last.max(cycle);
            update_cycle.insert(*state, cycle);
        }
        let reads = self.body.reads.len();
        let mut write_cycle = vec![0; self.body.writes.len()];
        for access in &self.body.accesses {
            if let Access::Write(at) = access {
                write_cycle[*at] = times.access[reads + at].0;
                last = last.max(write_cycle[*at]);
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
        let read_cycle = times.access[..reads].iter();
        let wants = self.body.wants.iter();
        Schedule {
            interval,
            depth: last + 1,
            cycle: times.ready.iter().map(|(cycle, _)| *cycle).collect(),
            read_cycle: read_cycle.map(|(at, _)| if *at == u32::MAX { 0 } else { *at }).collect(),
            write_cycle,
            update_cycle,
            emit_cycle: last,
            fetch_cycle: wants
                .map(|(port, want)| (*port, times.ready[want.0 as usize].0))
                .collect(),
            longest_ps: times.longest,
            limit: None,
        }
    }
}

fn id(at: usize) -> ValueId {
    ValueId(u32::try_from(at).unwrap_or(u32::MAX))
}

fn of(anchor: Anchor) -> Cause {
    Cause { anchor: Some(anchor), waited: false }
}

type Moment = ((u32, u32), Cause);

/// The later of two; of equal ones the one that an anchor holds back.
fn later(a: Moment, b: Moment) -> Moment {
    let held = a.1.anchor.is_none() && b.1.anchor.is_some();
    if b.0 > a.0 || (b.0 == a.0 && held) { b } else { a }
}

/// An access no earlier than its bound.
fn bounded(asked: (u32, Cause), bounds: &Bounds, anchor: Anchor) -> (u32, Cause) {
    let least = bounds.from[anchor];
    if least > asked.0 { (least, of(anchor)) } else { asked }
}

/// The first cycle from there on in which the memory's port is free; takes it.
fn free(
    ports: &mut HashSet<(MemoryId, u32)>,
    memory: MemoryId,
    interval: u32,
    (asked, cause): (u32, Cause),
) -> (u32, Cause) {
    let mut cycle = asked;
    // No more accesses than cycles in an interval, so one is free.
    while !ports.insert((memory, cycle % interval)) {
        cycle += 1;
    }
    (cycle, Cause { waited: cause.waited || cycle > asked, ..cause })
}

/// Anchors that hold each other back in a circle, and whether one of them waited for a port.
fn circle(causes: &[Cause]) -> Option<(Vec<Anchor>, bool)> {
    // The walk that met each anchor first.
    let mut met = vec![0_usize; causes.len()];
    for first in 0..causes.len() {
        let mut at = first;
        while met[at] == 0 {
            met[at] = first + 1;
            match causes[at].anchor {
                Some(next) => at = next,
                None => break,
            }
        }
        if met[at] == first + 1 && causes[at].anchor.is_some() {
            let mut list = vec![at];
            let mut waited = causes[at].waited;
            let mut next = causes[at].anchor;
            while let Some(here) = next.filter(|here| *here != at) {
                list.push(here);
                waited |= causes[here].waited;
                next = causes[here].anchor;
            }
            list.sort_unstable();
            return Some((list, waited));
        }
    }
    None
}
