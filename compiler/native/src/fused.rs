//! A whole graph in machine code: the kernel loop of every element, round after round.
//!
//! The code does what `Run::round` of `beeline-ir` does, element by element and in the same order:
//! write what waits, fetch what is asked for, run the handler, write what it gave. An item goes from
//! a ring into registers, through the handler, and from registers into the next ring; nothing
//! returns to the host between two items. A run of rounds ends where the world has to act: an input
//! from outside is empty, an output to outside may fill in the next round, nothing moved, or so many
//! rounds passed as were asked for. So elements cannot tell it from one round at a time.
//!
//! Neighbours are one function as long as that stays short; a function of a few calls joins them.
//!
//! The code and the host (`Native` in `lib.rs`) agree on the words of the control block below;
//! everything else lies in the frames and rings that they point to.

use std::collections::BTreeSet;

use beeline_ir::graph::{Graph, Peer};
use beeline_ir::tree::{Element, Stmt, VarId, words};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{
    AbiParam, Block, InstBuilder as _, MemFlagsData, UserFuncName, Value, types,
};
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use cranelift_jit::JITModule;
use cranelift_module::{FuncId, Linkage, Module as _};

use crate::code::{Coder, FUEL, Refused, registers};
use crate::fold::{Known, fold_given, size};
use crate::uses::{indexed, outlives, vars};

/// Rounds asked for.
pub(crate) const MOST: usize = 0;
/// Rounds done.
pub(crate) const DONE: usize = 1;
/// In the last round an item came in.
pub(crate) const FETCHED: usize = 2;
/// In the last round an item went out.
pub(crate) const WROTE: usize = 3;
/// In the last round an output had no room.
pub(crate) const BLOCKED: usize = 4;
/// The element that did not end.
pub(crate) const ENDLESS: usize = 5;
const HEAD: usize = 6;

/// Words of a node: its frame, its table of memories, its iterations.
const NODE: usize = 3;
/// Words of a channel.
const CHANNEL: usize = 5;

/// First word of a node's part.
pub(crate) fn node_at(node: usize) -> usize {
    HEAD + node * NODE
}

/// First word of a channel's part: its ring's address, the oldest item's byte, the byte of the first
/// free place, items inside, items that went in.
pub(crate) fn channel_at(nodes: usize, channel: usize) -> usize {
    HEAD + nodes * NODE + channel * CHANNEL
}

/// All words of a graph.
pub(crate) fn control_words(graph: &Graph) -> usize {
    channel_at(graph.nodes.len(), graph.channels.len())
}

/// Statements of one function.
const LARGEST: u64 = 800;

/// Defines the function of the whole graph; none where an element indexes a port at run time, which
/// lowering does not make.
pub(crate) fn define(
    module: &mut JITModule,
    graph: &Graph,
    handlers: &[Vec<Stmt>],
) -> Result<Option<FuncId>, (usize, Refused)> {
    for (node, handler) in graph.nodes.iter().zip(handlers) {
        let indexed = indexed(handler);
        if ports(&node.element).any(|port| indexed.contains(&port)) {
            return Ok(None);
        }
    }
    let mut segments: Vec<Vec<usize>> = Vec::new();
    let mut length = 0;
    for node in graph.topological() {
        let copies = 1 + u64::from(twice(&graph.nodes[node].element, &handlers[node]));
        let more = size(&handlers[node]) * copies;
        match segments.last_mut() {
            Some(segment) if length + more <= LARGEST => segment.push(node),
            _ => {
                segments.push(vec![node]);
                length = 0;
            }
        }
        length += more;
    }
    let mut functions = Vec::new();
    for (at, nodes) in segments.iter().enumerate() {
        let first = nodes.first().copied().unwrap_or(0);
        let name = format!("segment{at}");
        let made = function(module, &name, |builder, control, _| {
            for node in nodes {
                let handler = &handlers[*node];
                Step { graph, node: *node, element: &graph.nodes[*node].element, builder, control }
                    .emit(handler);
            }
            let zero = builder.ins().iconst(types::I64, 0);
            builder.ins().return_(&[zero]);
        });
        functions.push(made.map_err(|refused| (first, refused))?);
    }
    let all = function(module, "rounds", |builder, control, module| {
        rounds(graph, &functions, builder, control, module);
    });
    all.map(Some).map_err(|refused| (0, refused))
}

/// Every port variable.
fn ports(element: &Element) -> impl Iterator<Item = VarId> {
    let lists = [&element.in_valid, &element.in_data, &element.out_set, &element.out_data];
    lists.into_iter().flatten().copied().chain([element.next_ports])
}

/// Defines `name(control) -> status`.
fn function(
    module: &mut JITModule,
    name: &str,
    body: impl FnOnce(&mut FunctionBuilder<'_>, Value, &mut JITModule),
) -> Result<FuncId, Refused> {
    let mut context = module.make_context();
    let pointer = module.target_config().pointer_type();
    context.func.signature.params.push(AbiParam::new(pointer));
    context.func.signature.returns.push(AbiParam::new(types::I64));
    let id = module
        .declare_function(name, Linkage::Local, &context.func.signature)
        .map_err(|error| Refused(error.to_string()))?;
    context.func.name = UserFuncName::user(0, id.as_u32());
    let mut shared = FunctionBuilderContext::new();
    {
        let mut builder = FunctionBuilder::new(&mut context.func, &mut shared);
        let entry = builder.create_block();
        builder.append_block_params_for_function_params(entry);
        builder.switch_to_block(entry);
        let control = builder.block_params(entry)[0];
        body(&mut builder, control, module);
        builder.seal_all_blocks();
        builder.finalize(module.target_config());
    }
    module.define_function(id, &mut context).map_err(|error| Refused(format!("{error:?}")))?;
    module.clear_context(&mut context);
    Ok(id)
}

fn offset(word: usize) -> i32 {
    i32::try_from(word * 8).unwrap_or(i32::MAX)
}

fn load(builder: &mut FunctionBuilder<'_>, base: Value, word: usize) -> Value {
    builder.ins().load(types::I64, MemFlagsData::trusted(), base, offset(word))
}

fn store(builder: &mut FunctionBuilder<'_>, base: Value, word: usize, value: Value) {
    builder.ins().store(MemFlagsData::trusted(), value, base, offset(word));
}

fn store_number(builder: &mut FunctionBuilder<'_>, base: Value, word: usize, value: i64) {
    let value = builder.ins().iconst(types::I64, value);
    store(builder, base, word, value);
}

/// The loop over rounds.
fn rounds(
    graph: &Graph,
    segments: &[FuncId],
    builder: &mut FunctionBuilder<'_>,
    control: Value,
    module: &mut JITModule,
) {
    let (turn, failed, done) =
        (builder.create_block(), builder.create_block(), builder.create_block());
    let count = builder.declare_var(types::I64);
    let most = load(builder, control, MOST);
    let zero = builder.ins().iconst(types::I64, 0);
    builder.def_var(count, zero);
    builder.ins().jump(turn, &[]);
    builder.switch_to_block(turn);
    for word in [FETCHED, WROTE, BLOCKED] {
        store_number(builder, control, word, 0);
    }
    for segment in segments {
        let callee = module.declare_func_in_func(*segment, builder.func);
        let call = builder.ins().call(callee, &[control]);
        let status = builder.inst_results(call)[0];
        let next = builder.create_block();
        builder.ins().brif(status, failed, &[], next, &[]);
        builder.switch_to_block(next);
    }
    let before = builder.use_var(count);
    let now = builder.ins().iadd_imm_s(before, 1);
    builder.def_var(count, now);
    let fetched = load(builder, control, FETCHED);
    let wrote = load(builder, control, WROTE);
    let moved = builder.ins().bor(fetched, wrote);
    go_on_if(builder, moved, done);
    let nodes = graph.nodes.len();
    for input in &graph.inputs {
        let count = load(builder, control, channel_at(nodes, input.channel) + 3);
        go_on_if(builder, count, done);
    }
    for output in &graph.outputs {
        // An element may write twice in one round: what waited, and what it gives.
        let count = load(builder, control, channel_at(nodes, output.channel) + 3);
        let count = builder.ins().iadd_imm_s(count, 2);
        let depth = i64::from(graph.channels[output.channel].depth);
        let depth = builder.ins().iconst(types::I64, depth);
        let room = builder.ins().icmp(IntCC::UnsignedLessThanOrEqual, count, depth);
        go_on_if(builder, room, done);
    }
    let again = builder.ins().icmp(IntCC::UnsignedLessThan, now, most);
    builder.ins().brif(again, turn, &[], done, &[]);
    builder.switch_to_block(done);
    let passed = builder.use_var(count);
    store(builder, control, DONE, passed);
    let zero = builder.ins().iconst(types::I64, 0);
    builder.ins().return_(&[zero]);
    builder.switch_to_block(failed);
    let one = builder.ins().iconst(types::I64, 1);
    builder.ins().return_(&[one]);
}

fn go_on_if(builder: &mut FunctionBuilder<'_>, condition: Value, otherwise: Block) {
    let next = builder.create_block();
    builder.ins().brif(condition, next, &[], otherwise, &[]);
    builder.switch_to_block(next);
}

/// One iteration of one element, inside a function.
struct Step<'a, 'b, 'c> {
    graph: &'a Graph,
    node: usize,
    element: &'a Element,
    builder: &'c mut FunctionBuilder<'b>,
    control: Value,
}

/// A handler of an element with one input is made twice up to so many statements: for an item, and
/// for none.
const TWICE: u64 = 300;

/// True where an element is made twice.
fn twice(element: &Element, handler: &[Stmt]) -> bool {
    element.inputs.len() == 1 && size(handler) <= TWICE
}

impl Step<'_, '_, '_> {
    /// Emits it; control goes on behind it.
    fn emit(self, handler: &[Stmt]) {
        let control = self.control;
        let frame = load(self.builder, control, node_at(self.node));
        let mems = load(self.builder, control, node_at(self.node) + 1);
        let fuel = self.builder.declare_var(types::I64);
        let endless = self.builder.create_block();
        let end = self.builder.create_block();
        let mut vars = vars(handler);
        vars.extend(ports(self.element));
        let indexed: BTreeSet<VarId> = indexed(handler);
        let registers = registers(self.element, self.builder, &vars, &indexed);
        let (element, node, graph) = (self.element, self.node, self.graph);
        let mut coder = Coder::new(element, self.builder, registers, frame, mems, fuel, endless);
        let world = World { graph, node, control, nodes: graph.nodes.len() };
        let blocked = coder.builder.create_block();
        let free = coder.builder.create_block();
        world.flush(&mut coder, blocked);
        coder.builder.ins().jump(free, &[]);
        coder.builder.switch_to_block(blocked);
        store_number(coder.builder, control, BLOCKED, 1);
        coder.builder.ins().jump(end, &[]);
        coder.builder.switch_to_block(free);

        let start = coder.number(FUEL.cast_unsigned());
        coder.builder.def_var(fuel, start);
        for var in ports(element) {
            let words = (0..words(element.var(var).bits)).map(|word| (var, word));
            coder.resident.extend(words);
        }
        // Outputs hold nothing at the beginning, or this element would be blocked.
        let mut given: Known = element.out_set.iter().map(|flag| (*flag, 0)).collect();
        if twice(element, handler) && world.channel(|channel| channel.to, 0).is_some() {
            let (present, absent) = world.look(&mut coder);
            let item = coder.builder.block_params(present)[0];
            let (flag, data) = (element.in_valid[0], element.in_data[0]);
            for (has, block) in [(1, present), (0, absent)] {
                coder.builder.switch_to_block(block);
                coder.define_number(flag, has);
                if has == 1 {
                    coder.define_words(data, item, 0);
                } else {
                    coder.clear(data);
                }
                given.insert(flag, has);
                let (handler, known) = fold_given(element, handler, &given);
                world.iteration(&mut coder, &vars, &handler, &known, end);
            }
        } else {
            world.fetch(&mut coder);
            let (handler, known) = fold_given(element, handler, &given);
            world.iteration(&mut coder, &vars, &handler, &known, end);
        }
        coder.builder.switch_to_block(endless);
        let node_number = i64::try_from(node).unwrap_or(0);
        store_number(coder.builder, control, ENDLESS, node_number);
        let one = coder.number(1);
        coder.builder.ins().return_(&[one]);
        coder.builder.switch_to_block(end);
    }
}

/// The kernel loop around a handler.
#[derive(Clone, Copy)]
struct World<'a> {
    graph: &'a Graph,
    node: usize,
    nodes: usize,
    control: Value,
}

impl World<'_> {
    /// Runs a handler, keeps what the next iteration needs, writes what it gave.
    fn iteration(
        &self,
        coder: &mut Coder<'_, '_>,
        vars: &BTreeSet<VarId>,
        handler: &[Stmt],
        known: &Known,
        end: Block,
    ) {
        let element = coder.element;
        for var in vars {
            if !outlives(element, *var) {
                coder.clear(*var);
            }
        }
        for var in element.out_set.iter().chain(&element.out_data).chain([&element.next_ports]) {
            coder.clear(*var);
        }
        if coder.region(handler) {
            self.keep(coder, known);
            self.write(coder, known);
            coder.builder.ins().jump(end, &[]);
        }
    }

    /// The only input: control goes to the first block with the address of an item, held or fetched,
    /// or to the second without one.
    fn look(&self, coder: &mut Coder<'_, '_>) -> (Block, Block) {
        let element = coder.element;
        let [present, absent, held, look, ready, take] =
            [(); 6].map(|()| coder.builder.create_block());
        coder.builder.append_block_param(present, types::I64);
        let Some(ring) = self.channel(|channel| channel.to, 0) else {
            coder.builder.ins().jump(absent, &[]);
            return (present, absent);
        };
        let valid = load(coder.builder, coder.frame, offset_word(coder, element.in_valid[0]));
        coder.builder.ins().brif(valid, held, &[], look, &[]);
        coder.builder.switch_to_block(held);
        let data = offset(offset_word(coder, element.in_data[0]));
        let place = coder.builder.ins().iadd_imm_s(coder.frame, i64::from(data));
        coder.builder.ins().jump(present, &[place.into()]);
        coder.builder.switch_to_block(look);
        let asked = load(coder.builder, coder.frame, offset_word(coder, element.next_ports));
        let one = coder.number(1);
        let asked = coder.builder.ins().band(asked, one);
        coder.builder.ins().brif(asked, ready, &[], absent, &[]);
        coder.builder.switch_to_block(ready);
        let count = load(coder.builder, self.control, ring.at + 3);
        coder.builder.ins().brif(count, take, &[], absent, &[]);
        coder.builder.switch_to_block(take);
        let item = ring.take(coder.builder, count);
        store_number(coder.builder, self.control, FETCHED, 1);
        coder.builder.ins().jump(present, &[item.into()]);
        (present, absent)
    }

    /// The part of the control words of the channel at a port.
    fn channel(
        &self,
        end: impl Fn(&beeline_ir::graph::Channel) -> Peer,
        port: usize,
    ) -> Option<Ring> {
        let wanted = Peer::Port { node: self.node, port };
        let at = self.graph.channels.iter().position(|channel| end(channel) == wanted)?;
        let channel = &self.graph.channels[at];
        let width = i64::try_from(words(channel.bits) * 8).unwrap_or(i64::MAX);
        let depth = i64::from(channel.depth);
        Some(Ring { at: channel_at(self.nodes, at), width, depth, control: self.control })
    }

    /// Writes what waits from an earlier round; leaves for `blocked` where something has no room.
    fn flush(&self, coder: &mut Coder<'_, '_>, blocked: Block) {
        let element = coder.element;
        let mut pending = None;
        for (port, flag) in element.out_set.iter().enumerate() {
            let (waits, next) = (coder.builder.create_block(), coder.builder.create_block());
            coder.builder.append_block_param(next, types::I64);
            let at = offset_word(coder, *flag);
            let set = load(coder.builder, coder.frame, at);
            let zero = coder.number(0);
            coder.builder.ins().brif(set, waits, &[], next, &[zero.into()]);
            coder.builder.switch_to_block(waits);
            if let Some(ring) = self.channel(|channel| channel.from, port) {
                let full = coder.builder.create_block();
                let count = ring.with_room(coder.builder, full);
                let from = offset_word(coder, element.out_data[port]);
                let values: Vec<Value> = (0..words(element.outputs[port].bits))
                    .map(|word| load(coder.builder, coder.frame, from + word))
                    .collect();
                ring.put(coder.builder, count, &values);
                self.wrote(coder, at, next);
                coder.builder.switch_to_block(full);
                let one = coder.number(1);
                coder.builder.ins().jump(next, &[one.into()]);
            } else {
                self.wrote(coder, at, next);
            }
            coder.builder.switch_to_block(next);
            let still = coder.builder.block_params(next)[0];
            pending = Some(match pending {
                Some(other) => coder.builder.ins().bor(other, still),
                None => still,
            });
        }
        if let Some(pending) = pending {
            let free = coder.builder.create_block();
            coder.builder.ins().brif(pending, blocked, &[], free, &[]);
            coder.builder.switch_to_block(free);
        }
    }

    fn wrote(&self, coder: &mut Coder<'_, '_>, flag: usize, next: Block) {
        store_number(coder.builder, coder.frame, flag, 0);
        store_number(coder.builder, self.control, WROTE, 1);
        let zero = coder.number(0);
        coder.builder.ins().jump(next, &[zero.into()]);
    }

    /// Defines the registers of every input: what is held, what is fetched, or nothing.
    fn fetch(&self, coder: &mut Coder<'_, '_>) {
        let element = coder.element;
        let next_ports = offset_word(coder, element.next_ports);
        for port in 0..element.inputs.len() {
            let (flag, data) = (element.in_valid[port], element.in_data[port]);
            let Some(ring) = self.channel(|channel| channel.to, port) else {
                coder.clear(flag);
                coder.clear(data);
                continue;
            };
            let [held, look, take, none, done] = [(); 5].map(|()| coder.builder.create_block());
            let at = offset_word(coder, flag);
            let valid = load(coder.builder, coder.frame, at);
            coder.builder.ins().brif(valid, held, &[], look, &[]);
            coder.builder.switch_to_block(held);
            let from = offset_word(coder, data);
            let frame = coder.frame;
            coder.define_words(data, frame, from);
            coder.define_number(flag, 1);
            coder.builder.ins().jump(done, &[]);

            coder.builder.switch_to_block(look);
            let asked = load(coder.builder, coder.frame, next_ports);
            let port_bit = 1_i64.checked_shl(u32::try_from(port).unwrap_or(64)).unwrap_or(0);
            let bit = coder.builder.ins().iconst(types::I64, port_bit);
            let asked = coder.builder.ins().band(asked, bit);
            let ready = coder.builder.create_block();
            coder.builder.ins().brif(asked, ready, &[], none, &[]);
            coder.builder.switch_to_block(ready);
            let count = load(coder.builder, self.control, ring.at + 3);
            coder.builder.ins().brif(count, take, &[], none, &[]);

            coder.builder.switch_to_block(take);
            let item = ring.take(coder.builder, count);
            coder.define_words(data, item, 0);
            coder.define_number(flag, 1);
            store_number(coder.builder, self.control, FETCHED, 1);
            coder.builder.ins().jump(done, &[]);

            coder.builder.switch_to_block(none);
            coder.clear(data);
            coder.clear(flag);
            coder.builder.ins().jump(done, &[]);
            coder.builder.switch_to_block(done);
        }
    }

    /// Keeps in the frame what the next iteration needs of the inputs, and counts this one.
    fn keep(&self, coder: &mut Coder<'_, '_>, known: &Known) {
        let element = coder.element;
        let at = offset_word(coder, element.next_ports);
        coder.store_words(element.next_ports, at);
        for (flag, data) in element.in_valid.iter().zip(&element.in_data) {
            let at = offset_word(coder, *flag);
            coder.store_words(*flag, at);
            if known.get(flag) == Some(&0) {
                continue;
            }
            let valid = coder.first(*flag);
            let (unread, next) = (coder.builder.create_block(), coder.builder.create_block());
            coder.builder.ins().brif(valid, unread, &[], next, &[]);
            coder.builder.switch_to_block(unread);
            let at = offset_word(coder, *data);
            coder.store_words(*data, at);
            coder.builder.ins().jump(next, &[]);
            coder.builder.switch_to_block(next);
        }
        let counter = node_at(self.node) + 2;
        let count = load(coder.builder, self.control, counter);
        let count = coder.builder.ins().iadd_imm_s(count, 1);
        store(coder.builder, self.control, counter, count);
    }

    /// Writes what the handler gave; what has no room waits in the frame.
    fn write(&self, coder: &mut Coder<'_, '_>, known: &Known) {
        let element = coder.element;
        for (port, (flag, data)) in element.out_set.iter().zip(&element.out_data).enumerate() {
            let known = known.get(flag).copied();
            if known == Some(0) {
                continue;
            }
            let (given, next) = (coder.builder.create_block(), coder.builder.create_block());
            if known.is_some() {
                coder.builder.ins().jump(given, &[]);
            } else {
                let set = coder.first(*flag);
                coder.builder.ins().brif(set, given, &[], next, &[]);
            }
            coder.builder.switch_to_block(given);
            if let Some(ring) = self.channel(|channel| channel.from, port) {
                let full = coder.builder.create_block();
                let count = ring.with_room(coder.builder, full);
                let values = coder.words_of(*data);
                ring.put(coder.builder, count, &values);
                store_number(coder.builder, self.control, WROTE, 1);
                coder.builder.ins().jump(next, &[]);
                coder.builder.switch_to_block(full);
                let at = offset_word(coder, *data);
                coder.store_words(*data, at);
                let at = offset_word(coder, *flag);
                store_number(coder.builder, coder.frame, at, 1);
                store_number(coder.builder, self.control, BLOCKED, 1);
            } else {
                store_number(coder.builder, self.control, WROTE, 1);
            }
            coder.builder.ins().jump(next, &[]);
            coder.builder.switch_to_block(next);
        }
    }
}

/// First word of a variable in the frame.
fn offset_word(coder: &Coder<'_, '_>, var: VarId) -> usize {
    coder.at[var.0 as usize]
}

/// A channel's ring.
#[derive(Clone, Copy)]
struct Ring {
    /// First word of its part of the control words.
    at: usize,
    /// Bytes of an item.
    width: i64,
    /// Items.
    depth: i64,
    control: Value,
}

impl Ring {
    /// The items inside, where there is room for one more; otherwise control goes to `full`.
    fn with_room(&self, builder: &mut FunctionBuilder<'_>, full: Block) -> Value {
        let count = load(builder, self.control, self.at + 3);
        let depth = builder.ins().iconst(types::I64, self.depth);
        let room = builder.ins().icmp(IntCC::UnsignedLessThan, count, depth);
        go_on_if(builder, room, full);
        count
    }

    /// The place after one.
    fn after(&self, builder: &mut FunctionBuilder<'_>, place: Value) -> Value {
        let next = builder.ins().iadd_imm_s(place, self.width);
        let size = builder.ins().iconst(types::I64, self.width * self.depth);
        let over = builder.ins().icmp(IntCC::Equal, next, size);
        let zero = builder.ins().iconst(types::I64, 0);
        builder.ins().select(over, zero, next)
    }

    /// Puts an item in.
    fn put(&self, builder: &mut FunctionBuilder<'_>, count: Value, item: &[Value]) {
        let base = load(builder, self.control, self.at);
        let tail = load(builder, self.control, self.at + 2);
        let to = builder.ins().iadd(base, tail);
        for (word, value) in item.iter().enumerate() {
            store(builder, to, word, *value);
        }
        let tail = self.after(builder, tail);
        store(builder, self.control, self.at + 2, tail);
        let count = builder.ins().iadd_imm_s(count, 1);
        store(builder, self.control, self.at + 3, count);
        let passed = load(builder, self.control, self.at + 4);
        let passed = builder.ins().iadd_imm_s(passed, 1);
        store(builder, self.control, self.at + 4, passed);
    }

    /// Takes the oldest item; its address, good until the ring is written again.
    fn take(&self, builder: &mut FunctionBuilder<'_>, count: Value) -> Value {
        let base = load(builder, self.control, self.at);
        let head = load(builder, self.control, self.at + 1);
        let from = builder.ins().iadd(base, head);
        let head = self.after(builder, head);
        store(builder, self.control, self.at + 1, head);
        let count = builder.ins().iadd_imm_s(count, -1);
        store(builder, self.control, self.at + 3, count);
        from
    }
}
