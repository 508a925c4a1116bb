//! An element as hardware: registers, memories, and its scheduled handlers.

use beeline_ir::interpreter::{self, Frame};
use beeline_ir::tree::{Element, MemId, VarKind, words};
use beeline_syntax::ast::Storage;
use serde::Serialize;

use crate::build::{NotHardware, State, States, Which, build};
use crate::clean::clean;
use crate::delay::{self, Delayed};
use crate::merge::merge;
use crate::place::{SMALL_BITS, into_memory, into_registers};
use crate::scatter::{by_fields, by_leading};
use crate::schedule::{Limit, MemoryTiming, Schedule, Target, schedule};
use crate::ssa::{Access, Body, MemoryId};
use crate::unroll::{LoopPlan, Plans, plan};

/// A switch a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Scalars and small arrays in registers.
    pub placement: bool,
    /// A memory a field.
    pub scatter: bool,
    /// Loops become copies.
    pub unroll: bool,
    /// Identities, equal values, dead values and registers.
    pub clean: bool,
    /// Exclusive accesses share a port.
    pub merge: bool,
    /// Writes are forwarded.
    pub delay: bool,
    /// Cycles from address to data of block memories.
    pub read_latency: u32,
    /// What a read gives while its address is being written.
    pub collision: Collision,
    /// Length of a cycle in picoseconds.
    pub period_ps: u32,
}

/// What a block memory's read gives in the cycle in which its address is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Collision {
    /// What was there before.
    #[default]
    Old,
    /// What is being written.
    New,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            placement: true,
            scatter: true,
            unroll: true,
            clean: true,
            merge: true,
            delay: true,
            read_latency: 1,
            collision: Collision::Old,
            period_ps: Target::default().period_ps,
        }
    }
}

impl Options {
    /// Every pass off.
    #[must_use]
    pub fn naive() -> Self {
        Self {
            placement: false,
            scatter: false,
            unroll: false,
            clean: false,
            merge: false,
            delay: false,
            ..Self::default()
        }
    }
}

/// A memory of the hardware.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Name.
    pub name: String,
    /// Entries.
    pub entries: u32,
    /// Width of an entry.
    pub bits: u32,
    /// Contents after `.init`, `words(bits)` words an entry.
    pub initial: Vec<u64>,
    /// Never written.
    pub constant: bool,
    /// Cycles from address to data; 0 for a table in logic.
    pub latency: u32,
    /// A read sees a write of its own cycle.
    pub transparent: bool,
    /// The memory of the transformed element it is.
    pub of: MemId,
}

/// A scheduled body.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Operations.
    pub body: Body,
    /// When they run.
    pub schedule: Schedule,
}

/// An element as hardware.
#[derive(Clone, Debug)]
pub struct Hardware {
    /// Name of the element.
    pub name: String,
    /// The element after the passes that work on the tree.
    pub element: Element,
    /// Registers.
    pub states: Vec<State>,
    /// Memories.
    pub memories: Vec<Memory>,
    /// The handler.
    pub handler: Stage,
    /// The signal handler.
    pub signal: Option<Stage>,
    /// What the passes decided.
    pub report: Report,
}

/// What the passes decided for an element.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Element.
    pub element: String,
    /// Cycles between iterations.
    pub interval: u32,
    /// Cycles of an iteration.
    pub depth: u32,
    /// What keeps the interval from being smaller.
    pub limit: Option<Limit>,
    /// Longest path inside a cycle by the delay table, in picoseconds: modelled.
    pub longest_ps: u32,
    /// Where each variable lies.
    pub storage: Vec<Placed>,
    /// What became of each loop.
    pub loops: Vec<Turned>,
    /// Memories split by scattering.
    pub scattered: Vec<String>,
    /// Forwarding of each memory that is read and written.
    pub delayed: Vec<(String, String)>,
    /// Operations after the passes.
    pub operations: usize,
    /// Lines of source.
    pub lines: u32,
}

/// Storage of a variable.
#[derive(Clone, Debug, Serialize)]
pub struct Placed {
    /// Name.
    pub name: String,
    /// `registers`, `block memory`, `board memory` or `table`.
    pub place: &'static str,
    /// Bits in all.
    pub bits: u64,
}

/// A loop.
#[derive(Clone, Debug, Serialize)]
pub struct Turned {
    /// Byte of the source where it begins.
    pub at: u32,
    /// Copies.
    pub copies: u32,
    /// `unrolled` or `flattened`.
    pub form: &'static str,
    /// Why.
    pub why: &'static str,
}

/// Turns an element into hardware.
///
/// Errors: a loop without a bound in a signal handler; a body that is too large.
pub fn hardware(element: &Element, options: &Options) -> Result<Hardware, NotHardware> {
    let mut element = element.clone();
    let mut report =
        Report { element: element.name.clone(), lines: element.lines, ..Report::default() };
    place(&mut element, options);
    if options.scatter {
        let count = element.mems.len();
        for at in 0..count {
            let id = MemId(u32::try_from(at).unwrap_or(0));
            let names = by_fields(&mut element, id);
            report.scattered.extend(names);
        }
    }
    // Of the loops as written: an access of a memory that is split becomes many, of which unrolling
    // leaves one.
    let plans = plan(&element, options.unroll);
    let (mut states, mut handler, mut signal) = bodies(&element, &plans, options)?;
    // An array of arrays of arrays is split once for each of its leading indices.
    loop {
        let mut moved = element.clone();
        let Some(names) = known_after_unrolling(&mut moved, options, (&handler, &signal)) else {
            break;
        };
        // An access with a free index becomes many: where that is too much, the memory stays whole.
        match bodies(&moved, &plans, options) {
            Ok(better) => (states, handler, signal) = better,
            Err(_) => break,
        }
        element = moved;
        report.scattered.extend(names);
    }
    let frame = started(&element)?;
    initial_states(&element, &frame, &mut states);
    let observed = |at: usize, states: &States| {
        states.list[at].of.is_some_and(|(var, _)| element.var(var).kind == VarKind::State)
    };
    let list = states.list.clone();
    let keep = |at: usize| observed(at, &states) && signal.is_some();
    let (new_handler, new_signal) = clean(handler, signal.clone(), &list, &keep, options.clean);
    (handler, signal) = (new_handler, new_signal);
    if options.merge {
        merge(&mut handler);
    }
    let memories = memories(&element, &frame, options);
    let mut timings: Vec<MemoryTiming> = memories
        .iter()
        .map(|memory| MemoryTiming {
            name: memory.name.clone(),
            latency: memory.latency,
            forwarded: 0,
            transparent: memory.transparent,
            independent: memory.constant || element.mem(memory.of).independent,
            constant: memory.latency == 0,
        })
        .collect();
    if options.delay {
        forward(&mut handler, &mut signal, &mut states, &memories, &mut timings, &mut report);
    }
    let names = |id: crate::ssa::StateId| states.list[id.0 as usize].name.clone();
    let target = Target { period_ps: options.period_ps };
    let planned = schedule(&handler, &timings, &names, target, true);
    let signal = signal.map(|body| {
        let schedule = schedule(&body, &timings, &names, target, false);
        Stage { body, schedule }
    });
    fill(&mut report, &element, &memories, &handler, &planned, plans);
    Ok(Hardware {
        name: element.name.clone(),
        states: states.list,
        memories,
        handler: Stage { body: handler, schedule: planned },
        signal,
        report,
        element,
    })
}

/// Places memories by what is known only after unrolling: constant addresses, constant leading
/// indices. Names of the memories that were split; none where no memory moved.
fn known_after_unrolling(
    element: &mut Element,
    options: &Options,
    (handler, signal): (&Body, &Option<Body>),
) -> Option<Vec<String>> {
    let (mut changed, mut names) = (false, Vec::new());
    if options.placement {
        for (at, memory) in element.mems.clone().iter().enumerate() {
            let id = MemId(u32::try_from(at).unwrap_or(0));
            let bits = u64::from(memory.entries()) * u64::from(memory.bits);
            let small = bits <= SMALL_BITS && memory.storage == Storage::Chosen;
            if small && used(handler, signal, id) && constant_only(handler, signal, id) {
                into_registers(element, id);
                changed = true;
            }
        }
    }
    if options.scatter {
        for at in 0..element.mems.len() {
            let memory = &element.mems[at];
            let id = MemId(u32::try_from(at).unwrap_or(0));
            let leading = memory.dimensions.len() > 1
                && memory.dimensions[0] <= 64
                && used(handler, signal, id)
                && leading_constant(handler, id, &memory.dimensions);
            if leading {
                let name = memory.name.clone();
                let count = by_leading(element, id);
                names.extend((0..count).map(|k| format!("{name}_{k}")));
                changed = true;
            }
        }
    }
    changed.then_some(names)
}

/// Storage classes, and everything in memories where the pass is off.
fn place(element: &mut Element, options: &Options) {
    for at in 0..element.vars.len() {
        let var = &element.vars[at];
        let id = beeline_ir::tree::VarId(u32::try_from(at).unwrap_or(0));
        let asked = matches!(var.storage, Storage::Local | Storage::Global);
        let forced = var.storage == Storage::Register;
        if var.kind == VarKind::State && (asked || (!options.placement && !forced)) {
            into_memory(element, id);
        }
    }
    for at in 0..element.mems.len() {
        if element.mems[at].storage == Storage::Register {
            into_registers(element, MemId(u32::try_from(at).unwrap_or(0)));
        }
    }
}

type Bodies = (States, Body, Option<Body>);

fn bodies(element: &Element, plans: &Plans, options: &Options) -> Result<Bodies, NotHardware> {
    let mut states = States::default();
    // The signal first: the handler's updates then cover every register.
    let signal = match &element.signal {
        Some(_) => Some(build(element, plans, &mut states, Which::Signal, options.clean)?),
        None => None,
    };
    let handler = build(element, plans, &mut states, Which::Handler, options.clean)?;
    Ok((states, handler, signal))
}

fn each(bodies: &Body, id: MemId, look: &mut dyn FnMut(&Body, crate::ssa::ValueId)) {
    for access in &bodies.accesses {
        let (memory, address) = match access {
            Access::Read(read) => {
                let read = &bodies.reads[read.0 as usize];
                (read.memory, read.address)
            }
            Access::Write(at) => (bodies.writes[*at].memory, bodies.writes[*at].address),
        };
        if memory.0 == id.0 {
            look(bodies, address);
        }
    }
}

fn used(handler: &Body, signal: &Option<Body>, id: MemId) -> bool {
    let mut found = false;
    for body in std::iter::once(handler).chain(signal) {
        each(body, id, &mut |_, _| found = true);
    }
    found
}

fn constant_only(handler: &Body, signal: &Option<Body>, id: MemId) -> bool {
    let mut all = true;
    for body in std::iter::once(handler).chain(signal) {
        each(body, id, &mut |body, address| all &= body.constant_of(address).is_some());
    }
    all
}

/// True where the handler's accesses have a constant first index: the address is a constant plus
/// something below the size of an inner array.
fn leading_constant(handler: &Body, id: MemId, dimensions: &[u32]) -> bool {
    let inner: u64 = dimensions[1..].iter().map(|d| u64::from(*d)).product();
    let mut all = true;
    each(handler, id, &mut |body, address| {
        all &= leading_of(body, address, inner).is_some();
    });
    all
}

/// The constant part of `constant + something below inner`.
fn leading_of(body: &Body, address: crate::ssa::ValueId, inner: u64) -> Option<u64> {
    use crate::ssa::Op;
    use beeline_ir::tree::Binary;
    if let Some(value) = body.constant_of(address) {
        return Some(value / inner);
    }
    let below = |value: crate::ssa::ValueId, inner: u64| most(body, value, 8) < inner;
    match body.node(address).op {
        Op::Binary(Binary::Add, a, b) => {
            let (known, other) = match (body.constant_of(a), body.constant_of(b)) {
                (Some(known), _) => (known, b),
                (_, Some(known)) => (known, a),
                _ => return None,
            };
            below(other, inner - known % inner).then_some(known / inner)
        }
        _ => below(address, inner).then_some(0),
    }
}

/// The largest value it can have.
fn most(body: &Body, value: crate::ssa::ValueId, depth: u32) -> u64 {
    use crate::ssa::Op;
    use beeline_ir::tree::Binary;
    let all = beeline_ir::tree::mask(body.bits(value));
    if depth == 0 {
        return all;
    }
    let of = |value| most(body, value, depth - 1);
    match body.node(value).op {
        Op::Constant(known) => known,
        Op::Resize(a) => of(a).min(all),
        Op::Extract(a, offset) => (of(a) >> offset).min(all),
        Op::Binary(Binary::And, a, b) => of(a).min(of(b)),
        Op::Select(_, a, b) => of(a).max(of(b)),
        _ => all,
    }
}

fn started(element: &Element) -> Result<Frame, NotHardware> {
    let mut frame = Frame::new(element);
    interpreter::run(element, &element.init, &mut frame, &mut Vec::new()).map_err(|error| {
        NotHardware { element: element.name.clone(), reason: error.to_string(), span: error.span }
    })?;
    let all = beeline_ir::tree::mask(element.var(element.next_ports).bits);
    frame.set_low(element.next_ports, all);
    Ok(frame)
}

fn initial_states(element: &Element, frame: &Frame, states: &mut States) {
    for state in &mut states.list {
        if let Some((var, word)) = state.of
            && element.var(var).kind != VarKind::Local
        {
            state.initial = frame.var(element, var)[word as usize];
        }
    }
}

/// Latency of the board's memory in cycles.
const BOARD_LATENCY: u32 = 32;

fn memories(element: &Element, frame: &Frame, options: &Options) -> Vec<Memory> {
    let each = |(at, mem): (usize, &beeline_ir::tree::Mem)| {
        let entries = mem.entries();
        let size = entries as usize * words(mem.bits);
        let bits = u64::from(entries) * u64::from(mem.bits);
        let latency = match mem.storage {
            Storage::Global => BOARD_LATENCY,
            // A small table is logic.
            _ if mem.constant && bits <= 4_096 => 0,
            _ => options.read_latency,
        };
        Memory {
            name: mem.name.clone(),
            entries,
            bits: mem.bits,
            initial: frame.mems[at][..size].to_vec(),
            constant: mem.constant,
            latency,
            transparent: options.collision == Collision::New && latency > 0 && !mem.constant,
            of: MemId(u32::try_from(at).unwrap_or(0)),
        }
    };
    element.mems.iter().enumerate().map(each).collect()
}

/// Forwards every memory that the handler reads and writes.
fn forward(
    handler: &mut Body,
    signal: &mut Option<Body>,
    states: &mut States,
    memories: &[Memory],
    timings: &mut [MemoryTiming],
    report: &mut Report,
) {
    for (at, memory) in memories.iter().enumerate() {
        let id = MemoryId(u32::try_from(at).unwrap_or(0));
        let (mut reads, mut writes) = (false, false);
        for access in &handler.accesses {
            match access {
                Access::Read(read) => reads |= handler.reads[read.0 as usize].memory == id,
                Access::Write(write) => writes |= handler.writes[*write].memory == id,
            }
        }
        if !reads || !writes || timings[at].independent {
            continue;
        }
        // A memory that gives new data hides a write for a cycle less.
        let slots = memory.latency.max(1) - u32::from(memory.transparent);
        if slots == 0 {
            let text = "0 slots: a read sees the write of its own cycle".to_owned();
            report.delayed.push((memory.name.clone(), text));
            continue;
        }
        let shape = (memory.name.as_str(), memory.bits);
        let outcome = match delay::forward(handler, states, id, shape, slots) {
            Ok(list) => {
                if let Some(signal) = signal {
                    delay::forget(signal, id, &list);
                }
                timings[at].forwarded = slots;
                Delayed::Slots(slots)
            }
            Err(why) => Delayed::Refused(why),
        };
        let text = match outcome {
            Delayed::Slots(count) => format!("{count} slots"),
            Delayed::Refused(why) => format!("refused: {why}"),
        };
        report.delayed.push((memory.name.clone(), text));
    }
}

fn fill(
    report: &mut Report,
    element: &Element,
    memories: &[Memory],
    handler: &Body,
    planned: &Schedule,
    plans: Plans,
) {
    report.interval = planned.interval;
    report.depth = planned.depth;
    report.limit = planned.limit.clone();
    report.longest_ps = planned.longest_ps;
    report.operations = handler.nodes.len();
    for var in &element.vars {
        if var.kind == VarKind::State {
            let bits = u64::from(var.bits);
            report.storage.push(Placed { name: var.name.clone(), place: "registers", bits });
        }
    }
    for memory in memories {
        let accessed = handler.accesses.iter().any(|access| match access {
            Access::Read(id) => handler.reads[id.0 as usize].memory.0 == memory.of.0,
            Access::Write(at) => handler.writes[*at].memory.0 == memory.of.0,
        });
        let place = match (memory.latency, element.mem(memory.of).storage) {
            (_, Storage::Global) => "board memory",
            (0, _) => "table",
            _ => "block memory",
        };
        if accessed {
            let bits = u64::from(memory.entries) * u64::from(memory.bits);
            report.storage.push(Placed { name: memory.name.clone(), place, bits });
        }
    }
    for (info, plan, why) in plans.list {
        let (form, copies) = match plan {
            LoopPlan::Unroll(copies) => ("unrolled", copies),
            LoopPlan::Flatten(copies) => ("flattened", copies),
        };
        report.loops.push(Turned { at: info.span.start, copies, form, why });
    }
}
