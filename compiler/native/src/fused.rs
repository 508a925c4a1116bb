//! A whole graph in machine code: the kernel loop of every element, round after round.
//!
//! The code does what `Run::round` of `beeline-ir` does, element by element and in the same order:
//! write what waits, fetch what is asked for, run the handler, write what it gave. An item goes from
//! a ring into registers, through the handler, and from registers into the next ring; nothing
//! returns to the host between two items. A run of rounds ends where the world has to act: an input
//! from outside is empty, an output to outside may fill in the next round, nothing moved, or so many
//! rounds passed as were asked for. So elements cannot tell it from one round at a time.
//!
//! Neighbours are one function as long as that stays short; a function of a few calls joins them. Of
//! two neighbours in one function, the writer hands its item to the reader in registers, past the ring
//! between them, where the ring is empty and the reader rests: it takes the item in this round anyway.
//!
//! The code and the host (`Native` in `lib.rs`) agree on the words of the control block below;
//! everything else lies in the frames and rings that they point to.

use std::collections::BTreeSet;

use beeline_ir::graph::{Graph, Peer};
use beeline_ir::tree::{Element, Stmt, VarId, mask, words};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{
    AbiParam, Block, BlockArg, InstBuilder as _, MemFlagsData, UserFuncName, Value, types,
};
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use cranelift_jit::JITModule;
use cranelift_module::{FuncId, Linkage, Module as _};

use crate::code::{Coder, FUEL, Refused, registers};
use crate::fold::{Known, fold_given, size};
use crate::ring::Ring;
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
/// Not zero where every item has to go through its ring, since a log is written from there.
pub(crate) const LOGGED: usize = 6;
const HEAD: usize = 7;

/// Words of a node: its frame, its table of memories, the rounds in which it was blocked, and whether
/// it does not rest. An element rests where none of its outputs and none of its inputs holds an item,
/// and where it asked for all inputs.
const NODE: usize = 4;
const BLOCKS: usize = 2;
const BUSY: usize = 3;
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

/// The word of a node that counts the rounds in which it was blocked.
pub(crate) fn blocks_at(node: usize) -> usize {
    node_at(node) + BLOCKS
}

/// The word of a node that says whether it does not rest.
pub(crate) fn busy_at(node: usize) -> usize {
    node_at(node) + BUSY
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
    let emit =
        |builder: &mut FunctionBuilder<'_>, control: Value, failed: Block, nodes: &[usize]| {
            segment(graph, handlers, nodes, builder, control, failed);
        };
    if let [nodes] = &segments[..] {
        // No call a round.
        let all = function(module, "rounds", |builder, control, _| {
            rounds(graph, builder, control, |builder, failed| {
                emit(builder, control, failed, nodes);
            });
        });
        return all.map(Some).map_err(|refused| (0, refused));
    }
    let mut functions = Vec::new();
    for (at, nodes) in segments.iter().enumerate() {
        let first = nodes.first().copied().unwrap_or(0);
        let name = format!("segment{at}");
        let made = function(module, &name, |builder, control, _| {
            let failed = builder.create_block();
            emit(builder, control, failed, nodes);
            let zero = builder.ins().iconst(types::I64, 0);
            builder.ins().return_(&[zero]);
            builder.switch_to_block(failed);
            let one = builder.ins().iconst(types::I64, 1);
            builder.ins().return_(&[one]);
        });
        functions.push(made.map_err(|refused| (first, refused))?);
    }
    let all = function(module, "rounds", |builder, control, module| {
        rounds(graph, builder, control, |builder, failed| {
            for segment in &functions {
                let callee = module.declare_func_in_func(*segment, builder.func);
                let call = builder.ins().call(callee, &[control]);
                let status = builder.inst_results(call)[0];
                let next = builder.create_block();
                builder.ins().brif(status, failed, &[], next, &[]);
                builder.switch_to_block(next);
            }
        });
    });
    all.map(Some).map_err(|refused| (0, refused))
}

/// Emits an iteration of each of `nodes`, which are neighbours in the order of a round; control goes
/// to `failed` where one of them does not end.
fn segment(
    graph: &Graph,
    handlers: &[Vec<Stmt>],
    nodes: &[usize],
    builder: &mut FunctionBuilder<'_>,
    control: Value,
    failed: Block,
) {
    // Where an element goes on that has its item already: a parameter a word.
    let mut entry = |node: usize| {
        let element = &graph.nodes[node].element;
        if !twice(element, &handlers[node]) || reader_of(graph, node).is_none() {
            return None;
        }
        let block = builder.create_block();
        for _ in 0..words(element.inputs[0].bits) {
            builder.append_block_param(block, types::I64);
        }
        Some(block)
    };
    let entries: Vec<Option<Block>> = nodes.iter().map(|node| entry(*node)).collect();
    for (at, node) in nodes.iter().enumerate() {
        let after = nodes.get(at + 1).zip(entries.get(at + 1).copied().flatten());
        let pass = after.and_then(|(reader, present)| {
            let channel = &graph.channels[reader_of(graph, *reader)?];
            match channel.from {
                Peer::Port { node: from, port } if from == *node => {
                    Some(Pass { port, reader: *reader, present })
                }
                _ => None,
            }
        });
        let element = &graph.nodes[*node].element;
        Step { graph, node: *node, element, builder, control, failed, present: entries[at], pass }
            .emit(&handlers[*node]);
    }
}

/// The channel at a node's first input.
fn reader_of(graph: &Graph, node: usize) -> Option<usize> {
    let wanted = Peer::Port { node, port: 0 };
    graph.channels.iter().position(|channel| channel.to == wanted)
}

/// The next element of a function, to which an output leads.
#[derive(Clone, Copy)]
struct Pass {
    /// The output.
    port: usize,
    reader: usize,
    /// Where the reader goes on with an item.
    present: Block,
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

pub(crate) fn load(builder: &mut FunctionBuilder<'_>, base: Value, word: usize) -> Value {
    builder.ins().load(types::I64, MemFlagsData::trusted(), base, offset(word))
}

pub(crate) fn store(builder: &mut FunctionBuilder<'_>, base: Value, word: usize, value: Value) {
    builder.ins().store(MemFlagsData::trusted(), value, base, offset(word));
}

fn store_number(builder: &mut FunctionBuilder<'_>, base: Value, word: usize, value: i64) {
    let value = builder.ins().iconst(types::I64, value);
    store(builder, base, word, value);
}

/// The loop over rounds; `round` emits one, and goes to the block that it is given where an element
/// does not end.
fn rounds(
    graph: &Graph,
    builder: &mut FunctionBuilder<'_>,
    control: Value,
    round: impl FnOnce(&mut FunctionBuilder<'_>, Block),
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
    round(builder, failed);
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
    // The rounds before this one: they count for every element.
    let passed = builder.use_var(count);
    store(builder, control, DONE, passed);
    let one = builder.ins().iconst(types::I64, 1);
    builder.ins().return_(&[one]);
}

pub(crate) fn go_on_if(builder: &mut FunctionBuilder<'_>, condition: Value, otherwise: Block) {
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
    /// Where control goes if it does not end.
    failed: Block,
    /// Where it goes on with an item, if it is made twice.
    present: Option<Block>,
    pass: Option<Pass>,
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
        let nodes = graph.nodes.len();
        let rests = self.present.is_some();
        let world = World { graph, node, control, nodes, rests, pass: self.pass };
        let blocked = coder.builder.create_block();
        for var in ports(element) {
            let words = (0..words(element.var(var).bits)).map(|word| (var, word));
            coder.resident.extend(words);
        }
        // Outputs hold nothing at the beginning, or this element would be blocked.
        let mut given: Known = element.out_set.iter().map(|flag| (*flag, 0)).collect();
        if let Some(present) = self.present {
            given.insert(element.next_ports, 0);
            let absent = world.look(&mut coder, present, blocked);
            let item: Vec<Value> = coder.builder.block_params(present).to_vec();
            let (flag, data) = (element.in_valid[0], element.in_data[0]);
            for (has, block) in [(1, present), (0, absent)] {
                coder.builder.switch_to_block(block);
                // Control comes here from the element before, too.
                coder.frame = load(coder.builder, control, node_at(node));
                coder.mems = load(coder.builder, control, node_at(node) + 1);
                coder.define_number(flag, has);
                if has == 1 {
                    coder.define_values(data, &item);
                } else {
                    coder.clear(data);
                }
                given.insert(flag, has);
                let (handler, known) = fold_given(element, handler, &given);
                world.iteration(&mut coder, &vars, &handler, &known, end);
            }
        } else {
            world.flush(&mut coder, blocked);
            world.fetch(&mut coder);
            let (handler, known) = fold_given(element, handler, &given);
            world.iteration(&mut coder, &vars, &handler, &known, end);
        }
        coder.builder.switch_to_block(blocked);
        store_number(coder.builder, control, BLOCKED, 1);
        let count = load(coder.builder, control, blocks_at(node));
        let count = coder.builder.ins().iadd_imm_s(count, 1);
        store(coder.builder, control, blocks_at(node), count);
        coder.builder.ins().jump(end, &[]);
        coder.builder.switch_to_block(endless);
        let node_number = i64::try_from(node).unwrap_or(0);
        store_number(coder.builder, control, ENDLESS, node_number);
        coder.builder.ins().jump(self.failed, &[]);
        coder.builder.switch_to_block(end);
    }
}

/// What `next_ports` holds where every input is asked for.
pub(crate) fn all_inputs(element: &Element) -> u64 {
    mask(element.var(element.next_ports).bits)
}

/// The kernel loop around a handler.
#[derive(Clone, Copy)]
struct World<'a> {
    graph: &'a Graph,
    node: usize,
    nodes: usize,
    control: Value,
    /// True where the element is entered at rest: its frame holds no item, and asks for all inputs.
    rests: bool,
    pass: Option<Pass>,
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
        let start = coder.number(FUEL.cast_unsigned());
        coder.builder.def_var(coder.fuel, start);
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

    /// The only input: control goes to `present` with an item, held or fetched, or to the block that is
    /// given back without one; to `blocked` where an output still waits. At both of the others the
    /// element rests.
    fn look(&self, coder: &mut Coder<'_, '_>, present: Block, blocked: Block) -> Block {
        let element = coder.element;
        let control = self.control;
        let [absent, waits, rests, held, asks, take] =
            [(); 6].map(|()| coder.builder.create_block());
        let busy = load(coder.builder, control, busy_at(self.node));
        coder.builder.ins().brif(busy, waits, &[], rests, &[]);

        coder.builder.switch_to_block(waits);
        coder.builder.set_cold_block(waits);
        self.flush(coder, blocked);
        let flag = offset_word(coder, element.in_valid[0]);
        let valid = load(coder.builder, coder.frame, flag);
        let next_ports = offset_word(coder, element.next_ports);
        let asked = load(coder.builder, coder.frame, next_ports);
        store_number(coder.builder, coder.frame, flag, 0);
        let all = coder.number(all_inputs(element));
        store(coder.builder, coder.frame, next_ports, all);
        store_number(coder.builder, control, busy_at(self.node), 0);
        coder.builder.ins().brif(valid, held, &[], asks, &[]);
        coder.builder.switch_to_block(held);
        let data = offset_word(coder, element.in_data[0]);
        let frame = coder.frame;
        let item = self.item(coder, frame, data);
        coder.builder.ins().jump(present, &item);
        coder.builder.switch_to_block(asks);
        let one = coder.number(1);
        let asked = coder.builder.ins().band(asked, one);
        coder.builder.ins().brif(asked, rests, &[], absent, &[]);

        coder.builder.switch_to_block(rests);
        let Some(ring) = self.channel(|channel| channel.to, 0) else {
            coder.builder.ins().jump(absent, &[]);
            coder.builder.switch_to_block(take);
            coder.builder.ins().jump(absent, &[]);
            return absent;
        };
        let count = load(coder.builder, control, ring.at + 3);
        coder.builder.ins().brif(count, take, &[], absent, &[]);
        coder.builder.switch_to_block(take);
        let place = ring.take(coder.builder, count);
        store_number(coder.builder, control, FETCHED, 1);
        let item = self.item(coder, place, 0);
        coder.builder.ins().jump(present, &item);
        absent
    }

    /// An item of the only input that lies at `base`, from a word on.
    fn item(&self, coder: &mut Coder<'_, '_>, base: Value, first: usize) -> Vec<BlockArg> {
        let words = words(coder.element.inputs[0].bits);
        (0..words).map(|word| load(coder.builder, base, first + word).into()).collect()
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

    /// Keeps in the frame what the next iteration needs of the inputs.
    fn keep(&self, coder: &mut Coder<'_, '_>, known: &Known) {
        let element = coder.element;
        let all = all_inputs(element);
        let asks_all = known.get(&element.next_ports) == Some(&all);
        if !(self.rests && asks_all) {
            let at = offset_word(coder, element.next_ports);
            coder.store_words(element.next_ports, at);
        }
        if self.rests && !asks_all {
            let (asked, all) = (coder.first(element.next_ports), coder.number(all));
            let not = coder.builder.ins().bxor(asked, all);
            store(coder.builder, self.control, busy_at(self.node), not);
        }
        for (flag, data) in element.in_valid.iter().zip(&element.in_data) {
            let read = known.get(flag) == Some(&0);
            if !(self.rests && read) {
                let at = offset_word(coder, *flag);
                coder.store_words(*flag, at);
            }
            if read {
                continue;
            }
            let valid = coder.first(*flag);
            let (unread, next) = (coder.builder.create_block(), coder.builder.create_block());
            coder.builder.ins().brif(valid, unread, &[], next, &[]);
            coder.builder.switch_to_block(unread);
            let at = offset_word(coder, *data);
            coder.store_words(*data, at);
            self.does_not_rest(coder);
            coder.builder.ins().jump(next, &[]);
            coder.builder.switch_to_block(next);
        }
    }

    fn does_not_rest(&self, coder: &mut Coder<'_, '_>) {
        if self.rests {
            store_number(coder.builder, self.control, busy_at(self.node), 1);
        }
    }

    /// Writes what the handler gave; what has no room waits in the frame.
    fn write(&self, coder: &mut Coder<'_, '_>, known: &Known) {
        let element = coder.element;
        let mut ports: Vec<usize> = (0..element.out_set.len()).collect();
        // Behind the output that leads to the next element, control does not come back.
        ports.sort_by_key(|port| self.pass.is_some_and(|pass| pass.port == *port));
        for port in ports {
            let (flag, data) = (&element.out_set[port], &element.out_data[port]);
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
                let values = coder.words_of(*data);
                if let Some(pass) = self.pass.filter(|pass| pass.port == port) {
                    self.hand_over(coder, ring, pass, &values);
                }
                let count = ring.with_room(coder.builder, full);
                ring.put(coder.builder, count, &values);
                store_number(coder.builder, self.control, WROTE, 1);
                coder.builder.ins().jump(next, &[]);
                coder.builder.switch_to_block(full);
                let at = offset_word(coder, *data);
                coder.store_words(*data, at);
                let at = offset_word(coder, *flag);
                store_number(coder.builder, coder.frame, at, 1);
                store_number(coder.builder, self.control, BLOCKED, 1);
                self.does_not_rest(coder);
            } else {
                store_number(coder.builder, self.control, WROTE, 1);
            }
            coder.builder.ins().jump(next, &[]);
            coder.builder.switch_to_block(next);
        }
    }
}

impl World<'_> {
    /// Goes on in the next element with the item where that would take it out of the ring now; control
    /// comes back where it would not.
    fn hand_over(&self, coder: &mut Coder<'_, '_>, ring: Ring, pass: Pass, item: &[Value]) {
        let (direct, by_ring) = (coder.builder.create_block(), coder.builder.create_block());
        let count = load(coder.builder, self.control, ring.at + 3);
        let busy = load(coder.builder, self.control, busy_at(pass.reader));
        let logged = load(coder.builder, self.control, LOGGED);
        let either = coder.builder.ins().bor(count, busy);
        let either = coder.builder.ins().bor(either, logged);
        coder.builder.ins().brif(either, by_ring, &[], direct, &[]);
        coder.builder.switch_to_block(direct);
        ring.passed(coder.builder);
        store_number(coder.builder, self.control, WROTE, 1);
        store_number(coder.builder, self.control, FETCHED, 1);
        let item: Vec<BlockArg> = item.iter().map(|word| (*word).into()).collect();
        coder.builder.ins().jump(pass.present, &item);
        coder.builder.switch_to_block(by_ring);
    }
}

/// First word of a variable in the frame.
fn offset_word(coder: &Coder<'_, '_>, var: VarId) -> usize {
    coder.at[var.0 as usize]
}
