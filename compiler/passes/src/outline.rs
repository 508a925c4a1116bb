//! `.async`: a block becomes an element of its own, so that what it rarely does no longer sets the pace
//! of the element that has it.
//!
//! The element sends the values that the block needs, ends its iteration, and waits: it fetches from no
//! other input until the block's element has answered with the values that the block wrote. Then it
//! goes on behind the block, with the variables that it kept. Items so leave in the order in which they
//! came, and every back end runs the two elements as any others. Memories that only the block uses go
//! with it.
//!
//! A block stays where it is, and means its body, in a loop, behind an output that was given, where it
//! looks at ports or leaves for elsewhere, where its memories are used elsewhere too, where a signal
//! handler looks at what it writes, and where an input is read again behind it. One block an element
//! goes.

use std::collections::{BTreeSet, HashMap};

use beeline_ir::graph::{Channel, DEPTH, Graph, Node, Peer};
use beeline_ir::tree::{
    Element, Expr, ExprKind, Label, Mem, MemId, Place, Port, Stmt, Var, VarId, VarKind,
    expressions, mask, walk,
};
use serde::Serialize;

use crate::place::rewrite_all;

/// What became of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Outlined {
    /// The instance that has it.
    pub instance: String,
    /// The instance that it became; none where it stays.
    pub block: Option<String>,
    /// Why it stays.
    pub why: Option<&'static str>,
    /// Bits that go there.
    pub sent: u32,
    /// Bits that come back.
    pub answered: u32,
}

type Vars = BTreeSet<VarId>;

/// A graph whose `.async` blocks are elements, and what became of each.
#[must_use]
pub fn outline(graph: &Graph) -> (Graph, Vec<Outlined>) {
    let mut graph = graph.clone();
    let mut list = Vec::new();
    for node in 0..graph.nodes.len() {
        if !has(&graph.nodes[node].element.handler) {
            continue;
        }
        let instance = graph.nodes[node].name.clone();
        match cut(&graph.nodes[node].element) {
            Ok((caller, block)) => {
                let (sent, answered) = (block.inputs[0].bits, block.outputs[0].bits);
                let name = put(&mut graph, node, caller, block);
                let block = Some(name);
                list.push(Outlined { instance, block, why: None, sent, answered });
            }
            Err(why) => {
                let why = Some(why);
                list.push(Outlined { instance, block: None, why, sent: 0, answered: 0 });
            }
        }
    }
    (graph, list)
}

/// Puts the two elements of a node into the graph, joined; the new instance's name.
fn put(graph: &mut Graph, node: usize, caller: Element, block: Element) -> String {
    let original = graph.nodes[node].clone();
    let name = format!("{}_async", original.name);
    let (output, input) = (caller.outputs.len() - 1, caller.inputs.len() - 1);
    let (sent, answered) = (block.inputs[0].bits, block.outputs[0].bits);
    let id = graph.nodes.iter().map(|node| node.id).max().unwrap_or(0).saturating_add(1);
    graph.nodes[node].element = caller;
    let added = Node { name: name.clone(), element: block, id, signalled: false, ..original };
    let span = added.span;
    graph.nodes.push(added);
    let at = graph.nodes.len() - 1;
    let caller = graph.nodes[node].name.clone();
    let channel = |name, bits, from, to| Channel { name, bits, depth: DEPTH, from, to, span };
    let there = (Peer::Port { node, port: output }, Peer::Port { node: at, port: 0 });
    let back = (Peer::Port { node: at, port: 0 }, Peer::Port { node, port: input });
    let title = format!("{caller}[{}]->{name}", output + 1);
    graph.channels.push(channel(title, sent, there.0, there.1));
    let title = format!("{name}->[{}]{caller}", input + 1);
    graph.channels.push(channel(title, answered, back.0, back.1));
    name
}

/// True where a block is among the statements.
fn has(block: &[Stmt]) -> bool {
    count(block) > 0
}

fn count(block: &[Stmt]) -> usize {
    let mut count = 0;
    walk(block, &mut |stmt| count += usize::from(matches!(stmt, Stmt::Async(_))));
    count
}

/// The element without its block, and the block's.
fn cut(element: &Element) -> Result<(Element, Element), &'static str> {
    if count(&element.handler) > 1 {
        return Err("an element has one block that goes");
    }
    if element.inputs.len() >= 32 || element.outputs.len() >= 32 {
        return Err("the element has no port left");
    }
    let mut found = None;
    let mut labels = HashMap::new();
    let states = element.vars.iter().enumerate().filter(|(_, var)| var.kind == VarKind::State);
    let end: Vars = states.map(|(at, _)| var_id(at)).collect();
    live(&element.handler, end, element, &mut labels, &mut found);
    let Some(Found { body, before, after }) = found else {
        return Err("the block is in a loop");
    };
    let used = mentioned(&body);
    let wrote = written(&body);
    let port = |var: &VarId| element.var(*var).kind == VarKind::Port;
    if leaves(&body) {
        return Err("the block is left for elsewhere");
    }
    if used.iter().any(port) {
        return Err("the block looks at ports");
    }
    if element.in_data.iter().any(|data| after.contains(data)) {
        return Err("an input is read again behind the block");
    }
    if let Some(signal) = &element.signal {
        let signal = mentioned(signal);
        if used.iter().any(|v| element.var(*v).kind == VarKind::State && signal.contains(v)) {
            return Err("a signal handler looks at a variable of the block");
        }
    }
    let theirs = memories(element, &body)?;
    let sent: Vec<VarId> = before.intersection(&used).copied().collect();
    let answered: Vec<VarId> = wrote.intersection(&after).copied().collect();
    let kept: Vec<VarId> = after
        .iter()
        .filter(|var| element.var(**var).kind == VarKind::Local && !answered.contains(var))
        .copied()
        .collect();

    let block = of_block(element, body, (&sent, &answered), &theirs);
    let mut caller = element.clone();
    for id in kept {
        // State is told apart by its names.
        let var = &mut caller.vars[id.0 as usize];
        (var.kind, var.name) = (VarKind::State, format!("kept_{}_{}", var.name, id.0));
    }
    let outside = Outside::of(&mut caller, (&sent, &answered));
    let handler = std::mem::take(&mut caller.handler);
    let handler = outside.around(handler, &caller)?;
    let (inputs, next) = (caller.inputs.len(), caller.next_ports);
    let bits = u32::try_from(inputs).unwrap_or(32);
    // What a handler without `return` asks for: every input but the answers.
    let all = Expr::constant(mask(bits - 1), bits);
    let waits = Expr { bits: 1, kind: ExprKind::Get(Place::whole(outside.waits)) };
    let come = Expr::get(caller.in_valid[inputs - 1], 1).falsehood();
    let condition = Expr::binary(beeline_ir::tree::Binary::And, waits, come);
    let still = vec![set(next, outside.only(bits)), Stmt::Leave(outside.end)];
    let mut body = vec![Stmt::If { condition, then: still, otherwise: Vec::new() }];
    body.extend(handler);
    caller.handler = caller.out_set.iter().map(|flag| set(*flag, Expr::constant(0, 1))).collect();
    caller.handler.extend([set(next, all), Stmt::Scope { label: outside.end, body }]);
    let here = |id: MemId| !theirs.contains(&id) || element.mem(id).constant;
    keep(&mut caller, &here);
    Ok((caller, block))
}

/// Memories that go with the block.
fn memories(element: &Element, body: &[Stmt]) -> Result<BTreeSet<MemId>, &'static str> {
    let of = |block: &[Stmt]| {
        let mut all = Vec::new();
        walk(block, &mut |stmt| {
            if let Stmt::Read { mem, .. } | Stmt::Write { mem, .. } = stmt {
                all.push(*mem);
            }
        });
        all
    };
    let theirs: BTreeSet<MemId> = of(body).into_iter().collect();
    // The handler's accesses have the block's among them.
    let times = |list: &[MemId], id: MemId| list.iter().filter(|mem| **mem == id).count();
    let (handler, inside) = (of(&element.handler), of(body));
    let signal = element.signal.as_deref().map(of).unwrap_or_default();
    for id in &theirs {
        let shared = times(&handler, *id) > times(&inside, *id) || signal.contains(id);
        if shared && !element.mem(*id).constant {
            return Err("a memory of the block is used elsewhere, too");
        }
    }
    let init = of(&element.init);
    let mut looks = false;
    walk(&element.init, &mut |stmt| looks |= matches!(stmt, Stmt::Read { .. }));
    if looks && init.iter().any(|id| theirs.contains(id)) {
        return Err("`.init` reads memories and writes the block's");
    }
    Ok(theirs)
}

/// The element that a block becomes.
fn of_block(
    element: &Element,
    body: Vec<Stmt>,
    (sent, answered): (&[VarId], &[VarId]),
    theirs: &BTreeSet<MemId>,
) -> Element {
    let mut block = element.clone();
    block.name = format!("{}_async", element.name);
    let fixed = [block.next_ports, block.sig_in, block.sig_out];
    for (at, var) in block.vars.iter_mut().enumerate() {
        if !fixed.contains(&var_id(at)) {
            var.kind = VarKind::Local;
        }
    }
    block.vars[block.next_ports.0 as usize].bits = 1;
    let width = |vars: &[VarId]| vars.iter().map(|var| element.var(*var).bits).sum::<u32>().max(1);
    let (asked, told) = (width(sent), width(answered));
    block.inputs = vec![Port { name: "in".to_owned(), bits: asked }];
    block.outputs = vec![Port { name: "out".to_owned(), bits: told }];
    let valid = block.add_var("in_valid", 1, VarKind::Port);
    let data = block.add_var("in", asked, VarKind::Port);
    let given = block.add_var("out_set", 1, VarKind::Port);
    let out = block.add_var("out", told, VarKind::Port);
    (block.in_valid, block.in_data) = (vec![valid], vec![data]);
    (block.out_set, block.out_data) = (vec![given], vec![out]);
    let mut then = vec![set(valid, Expr::constant(0, 1))];
    then.extend(unpack(&block, data, sent));
    then.extend(body);
    then.extend(pack(&block, out, answered));
    then.push(set(given, Expr::constant(1, 1)));
    block.handler = vec![
        set(given, Expr::constant(0, 1)),
        set(block.next_ports, Expr::constant(1, 1)),
        Stmt::If { condition: Expr::get(valid, 1), then, otherwise: Vec::new() },
    ];
    block.signal = None;
    let mut starts = false;
    walk(&block.init, &mut |stmt| {
        if let Stmt::Read { mem, .. } | Stmt::Write { mem, .. } = stmt {
            starts |= theirs.contains(mem);
        }
    });
    if !starts {
        block.init.clear();
    }
    keep(&mut block, &|id| theirs.contains(&id));
    block
}

/// Leaves an element the memories that it has, and those accesses.
fn keep(element: &mut Element, has: &dyn Fn(MemId) -> bool) {
    let mut at = HashMap::new();
    let mut mems: Vec<Mem> = Vec::new();
    for (old, mem) in element.mems.iter().enumerate() {
        let id = MemId(u32::try_from(old).unwrap_or(u32::MAX));
        if has(id) {
            at.insert(id, MemId(u32::try_from(mems.len()).unwrap_or(u32::MAX)));
            mems.push(mem.clone());
        }
    }
    element.mems = mems;
    rewrite_all(element, &mut |stmt| match stmt {
        Stmt::Read { to, mem, index, offset, bits } => match at.get(&mem) {
            Some(mem) => vec![Stmt::Read { to, mem: *mem, index, offset, bits }],
            None => vec![Stmt::Clear(to)],
        },
        Stmt::Write { mem, index, offset, bits, from } => match at.get(&mem) {
            Some(mem) => vec![Stmt::Write { mem: *mem, index, offset, bits, from }],
            None => Vec::new(),
        },
        other => vec![other],
    });
}

/// What the element has for its block outside.
struct Outside {
    /// The element waits for the block's answer.
    waits: VarId,
    /// An iteration's end.
    end: Label,
    /// What takes the block's place.
    instead: Vec<Stmt>,
}

impl Outside {
    /// Gives the element an output to the block and an input from it.
    fn of(caller: &mut Element, (sent, answered): (&[VarId], &[VarId])) -> Self {
        let width = |vars: &[VarId], all: &[Var]| {
            vars.iter().map(|var| all[var.0 as usize].bits).sum::<u32>().max(1)
        };
        let (asked, told) = (width(sent, &caller.vars), width(answered, &caller.vars));
        caller.outputs.push(Port { name: "async_block".to_owned(), bits: asked });
        caller.inputs.push(Port { name: "async_done".to_owned(), bits: told });
        let given = caller.add_var("async_block_set", 1, VarKind::Port);
        let out = caller.add_var("async_block", asked, VarKind::Port);
        let valid = caller.add_var("async_done_valid", 1, VarKind::Port);
        let data = caller.add_var("async_done", told, VarKind::Port);
        caller.out_set.push(given);
        caller.out_data.push(out);
        caller.in_valid.push(valid);
        caller.in_data.push(data);
        let bits = u32::try_from(caller.inputs.len()).unwrap_or(32);
        caller.vars[caller.next_ports.0 as usize].bits = bits;
        let waits = caller.add_var("%waits", 1, VarKind::State);
        let mut outside = Self { waits, end: caller.add_label(), instead: Vec::new() };
        let mut then = unpack(caller, data, answered);
        then.push(set(valid, Expr::constant(0, 1)));
        then.push(set(waits, Expr::constant(0, 1)));
        let mut otherwise = pack(caller, out, sent);
        otherwise.push(set(given, Expr::constant(1, 1)));
        otherwise.push(set(waits, Expr::constant(1, 1)));
        otherwise.push(set(caller.next_ports, outside.only(bits)));
        otherwise.push(Stmt::Leave(outside.end));
        outside.instead = vec![Stmt::If { condition: Expr::get(waits, 1), then, otherwise }];
        outside
    }

    /// Nothing but the answers.
    fn only(&self, bits: u32) -> Expr {
        Expr::constant(1 << (bits - 1), bits)
    }

    /// The statements with the block outside: what stands before it runs where the element does not
    /// wait, and what leads to it is gone through again where it does.
    fn around(&self, block: Vec<Stmt>, caller: &Element) -> Result<Vec<Stmt>, &'static str> {
        let mut before = Vec::new();
        let mut made = Vec::new();
        let mut stmts = block.into_iter();
        let waits = || Box::new(Expr::get(self.waits, 1));
        for stmt in stmts.by_ref() {
            if !has(std::slice::from_ref(&stmt)) {
                before.push(stmt);
                continue;
            }
            if gives(&before, caller) {
                return Err("an output is given before the block");
            }
            if !before.is_empty() {
                let condition = Expr::get(self.waits, 1).falsehood();
                made.push(Stmt::If { condition, then: before, otherwise: Vec::new() });
            }
            made.extend(match stmt {
                Stmt::If { condition, then, otherwise } => {
                    let inside = has(&then);
                    let way = Box::new(Expr::constant(u64::from(inside), 1));
                    let kind = ExprKind::Select(waits(), way, Box::new(condition.truth()));
                    let condition = Expr { bits: 1, kind };
                    let (then, otherwise) = if inside {
                        (self.around(then, caller)?, otherwise)
                    } else {
                        (then, self.around(otherwise, caller)?)
                    };
                    vec![Stmt::If { condition, then, otherwise }]
                }
                Stmt::Scope { label, body } => {
                    vec![Stmt::Scope { label, body: self.around(body, caller)? }]
                }
                Stmt::Async(_) => self.instead.clone(),
                _ => return Err("the block is in a loop"),
            });
            made.extend(stmts);
            return Ok(made);
        }
        Ok(before)
    }
}

/// True where an output may be given.
fn gives(block: &[Stmt], element: &Element) -> bool {
    let mut found = false;
    walk(block, &mut |stmt| {
        if let Stmt::Set { place, value } = stmt {
            found |= element.out_set.contains(&place.var) && value.known() != Some(0);
        }
    });
    found
}

fn var_id(at: usize) -> VarId {
    VarId(u32::try_from(at).unwrap_or(u32::MAX))
}

fn set(var: VarId, value: Expr) -> Stmt {
    Stmt::Set { place: Place::whole(var), value }
}

fn pack(element: &Element, to: VarId, vars: &[VarId]) -> Vec<Stmt> {
    fields(element, vars, |var, offset, bits| {
        let to = Place { var: to, offset, index: Vec::new() };
        Stmt::Copy { to, from: Place::whole(var), bits }
    })
}

fn unpack(element: &Element, from: VarId, vars: &[VarId]) -> Vec<Stmt> {
    fields(element, vars, |var, offset, bits| {
        let from = Place { var: from, offset, index: Vec::new() };
        Stmt::Copy { to: Place::whole(var), from, bits }
    })
}

fn fields(element: &Element, vars: &[VarId], each: impl Fn(VarId, u32, u32) -> Stmt) -> Vec<Stmt> {
    let mut offset = 0;
    let mut list = Vec::new();
    for var in vars {
        let bits = element.var(*var).bits;
        list.push(each(*var, offset, bits));
        offset += bits;
    }
    list
}

/// Variables that statements read, and all that they name.
fn reads(stmt: &Stmt, look: &mut impl FnMut(VarId)) {
    expressions(stmt, &mut |e| {
        if let ExprKind::Get(place) = &e.kind {
            look(place.var);
        }
    });
    match stmt {
        Stmt::Copy { from, .. } => look(from.var),
        Stmt::Write { from, .. } => look(*from),
        _ => {}
    }
}

/// The variable that a statement writes, and whether all of it.
fn writes(stmt: &Stmt, element: &Element) -> Option<(VarId, bool)> {
    let whole = |place: &Place, bits: u32| {
        place.index.is_empty() && place.offset == 0 && bits >= element.var(place.var).bits
    };
    match stmt {
        Stmt::Set { place, value } => Some((place.var, whole(place, value.bits))),
        Stmt::Copy { to, bits, .. } => Some((to.var, whole(to, *bits))),
        Stmt::Clear(var) => Some((*var, true)),
        Stmt::Read { to, bits, .. } => Some((*to, *bits >= element.var(*to).bits)),
        _ => None,
    }
}

fn target(stmt: &Stmt) -> Option<VarId> {
    match stmt {
        Stmt::Set { place, .. } => Some(place.var),
        Stmt::Copy { to, .. } => Some(to.var),
        Stmt::Clear(var) | Stmt::Read { to: var, .. } => Some(*var),
        _ => None,
    }
}

fn mentioned(block: &[Stmt]) -> Vars {
    let mut all = written(block);
    walk(block, &mut |stmt| {
        reads(stmt, &mut |var| {
            all.insert(var);
        });
    });
    all
}

fn written(block: &[Stmt]) -> Vars {
    let mut all = Vars::new();
    walk(block, &mut |stmt| all.extend(target(stmt)));
    all
}

/// True where a block goes on behind a loop or scope that is not in it.
fn leaves(block: &[Stmt]) -> bool {
    let (mut own, mut left) = (BTreeSet::new(), BTreeSet::new());
    walk(block, &mut |stmt| match stmt {
        Stmt::Loop { label, .. } | Stmt::Scope { label, .. } => {
            own.insert(*label);
        }
        Stmt::Leave(label) => {
            left.insert(*label);
        }
        _ => {}
    });
    !left.is_subset(&own)
}

/// The block, and the variables that are live before and after it.
struct Found {
    body: Vec<Stmt>,
    before: Vars,
    after: Vars,
}

/// Variables whose values matter before statements, where those of `after` do behind them.
fn live(
    block: &[Stmt],
    after: Vars,
    element: &Element,
    labels: &mut HashMap<Label, Vars>,
    found: &mut Option<Found>,
) -> Vars {
    let mut now = after;
    for stmt in block.iter().rev() {
        match stmt {
            Stmt::If { then, otherwise, .. } => {
                let mut either = live(then, now.clone(), element, labels, found);
                either.extend(live(otherwise, now, element, labels, found));
                now = either;
            }
            Stmt::Scope { label, body } => {
                labels.insert(*label, now.clone());
                now = live(body, now, element, labels, found);
            }
            Stmt::Loop { label, body, .. } => {
                labels.insert(*label, now.clone());
                // Nothing falls out of a loop: what is live at its head is so at a turn's end.
                let mut head = Vars::new();
                loop {
                    let more = live(body, head.clone(), element, labels, &mut None);
                    if more.is_subset(&head) {
                        break;
                    }
                    head.extend(more);
                }
                now = head;
            }
            Stmt::Leave(label) => now = labels.get(label).cloned().unwrap_or_default(),
            Stmt::Async(body) => {
                let after = now.clone();
                now = live(body, now, element, labels, &mut None);
                *found = Some(Found { body: body.clone(), before: now.clone(), after });
            }
            _ => {
                if let Some((var, true)) = writes(stmt, element) {
                    now.remove(&var);
                }
            }
        }
        reads(stmt, &mut |var| {
            now.insert(var);
        });
    }
    now
}
