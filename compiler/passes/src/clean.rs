//! Clean-up: registers that never change, registers that nothing reads, values that nothing uses.

use std::collections::HashMap;

use crate::build::State;
use crate::ssa::{Access, Body, Emit, Op, Read, ReadId, StateId, ValueId, Write};

/// Copies a body, with some registers replaced by constants, and keeps what its effects need.
pub(crate) fn rebuild(
    body: &Body,
    fixed: &HashMap<StateId, u64>,
    live: &dyn Fn(StateId) -> bool,
    clean: bool,
) -> Body {
    rebuild_from(body, fixed, live, clean, &mut |_, _, _, _| None)
}

/// What stands for a word of a read's data: `(body, read, address, word)`.
pub(crate) type DataHook<'a> =
    &'a mut dyn FnMut(&mut Body, ReadId, ValueId, u32) -> Option<ValueId>;

/// Copies a body with other values for what reads give.
pub(crate) fn rebuild_with(body: &Body, hook: DataHook<'_>) -> Body {
    rebuild_from(body, &HashMap::new(), &|_| true, true, hook)
}

fn rebuild_from(
    body: &Body,
    fixed: &HashMap<StateId, u64>,
    live: &dyn Fn(StateId) -> bool,
    clean: bool,
    hook: DataHook<'_>,
) -> Body {
    let mut copier = Copier {
        from: body,
        to: Body::new(clean),
        map: HashMap::new(),
        reads: HashMap::new(),
        fixed,
        hook,
    };
    for (port, want) in &body.wants {
        let want = copier.value(*want);
        copier.to.wants.push((*port, want));
    }
    // Accesses keep their order; a read is kept only where something uses it, which shows when the
    // effects are copied, so writes go first and the order is restored below.
    for write in &body.writes {
        let write = Write {
            memory: write.memory,
            address: copier.value(write.address),
            when: copier.value(write.when),
            offset: write.offset,
            bits: write.bits,
            words: write.words.iter().map(|word| copier.value(*word)).collect(),
        };
        copier.to.writes.push(write);
    }
    for (state, value) in &body.updates {
        if live(*state) && !fixed.contains_key(state) {
            let value = copier.value(*value);
            copier.to.updates.push((*state, value));
        }
    }
    for emit in &body.emits {
        let when = copier.value(emit.when);
        if copier.to.constant_of(when) == Some(0) {
            continue;
        }
        let words = emit.words.iter().map(|word| copier.value(*word)).collect();
        copier.to.emits.push(Emit { port: emit.port, when, words });
    }
    copier.to.answer = body.answer.iter().map(|word| copier.value(*word)).collect();
    let kept: Vec<Access> = body
        .accesses
        .iter()
        .filter_map(|access| match access {
            Access::Read(id) => copier.reads.get(id).map(|id| Access::Read(*id)),
            Access::Write(at) => {
                let never = copier.to.constant_of(copier.to.writes[*at].when) == Some(0);
                (!never).then_some(Access::Write(*at))
            }
        })
        .collect();
    copier.to.accesses = kept;
    copier.to
}

struct Copier<'a> {
    from: &'a Body,
    to: Body,
    map: HashMap<ValueId, ValueId>,
    reads: HashMap<ReadId, ReadId>,
    fixed: &'a HashMap<StateId, u64>,
    hook: DataHook<'a>,
}

impl Copier<'_> {
    /// The value in the new body. Operands stand before users, so an explicit stack is enough.
    fn value(&mut self, root: ValueId) -> ValueId {
        let mut stack = vec![root];
        while let Some(value) = stack.last().copied() {
            if self.map.contains_key(&value) {
                stack.pop();
                continue;
            }
            let missing: Vec<ValueId> = self
                .from
                .operands(value)
                .into_iter()
                .filter(|operand| !self.map.contains_key(operand))
                .collect();
            if missing.is_empty() {
                let new = self.one(value);
                self.map.insert(value, new);
                stack.pop();
            } else {
                stack.extend(missing);
            }
        }
        self.map[&root]
    }

    fn one(&mut self, value: ValueId) -> ValueId {
        let node = self.from.node(value);
        let of = |v: ValueId| self.map[&v];
        let op = match node.op {
            Op::State(id) => match self.fixed.get(&id) {
                Some(value) => Op::Constant(*value),
                None => Op::State(id),
            },
            Op::Data(read, word) => {
                let id = match self.reads.get(&read) {
                    Some(id) => *id,
                    None => {
                        let old = &self.from.reads[read.0 as usize];
                        let new = Read {
                            memory: old.memory,
                            address: of(old.address),
                            when: of(old.when),
                        };
                        self.to.reads.push(new);
                        let id = ReadId(u32::try_from(self.to.reads.len() - 1).unwrap_or(0));
                        self.reads.insert(read, id);
                        id
                    }
                };
                let address = self.to.reads[id.0 as usize].address;
                if let Some(value) = (self.hook)(&mut self.to, id, address, word) {
                    return value;
                }
                Op::Data(id, word)
            }
            Op::Unary(operator, a) => Op::Unary(operator, of(a)),
            Op::Binary(operator, a, b) => Op::Binary(operator, of(a), of(b)),
            Op::Select(a, b, c) => Op::Select(of(a), of(b), of(c)),
            Op::Resize(a) => Op::Resize(of(a)),
            Op::Extract(a, offset) => Op::Extract(of(a), offset),
            Op::Insert(a, b, offset) => Op::Insert(of(a), of(b), offset),
            other => other,
        };
        self.to.make(op, node.bits)
    }
}

/// Registers that some effect depends on.
fn living(bodies: &[&Body], count: usize) -> Vec<bool> {
    let mut live = vec![false; count];
    loop {
        let mut grew = false;
        for body in bodies {
            let mut stack: Vec<ValueId> = Vec::new();
            stack.extend(body.wants.iter().map(|(_, want)| *want));
            for write in &body.writes {
                stack.extend([write.address, write.when]);
                stack.extend(&write.words);
            }
            for emit in &body.emits {
                stack.push(emit.when);
                stack.extend(&emit.words);
            }
            stack.extend(&body.answer);
            for (state, value) in &body.updates {
                if live[state.0 as usize] {
                    stack.push(*value);
                }
            }
            let mut seen = vec![false; body.nodes.len()];
            while let Some(value) = stack.pop() {
                if std::mem::replace(&mut seen[value.0 as usize], true) {
                    continue;
                }
                if let Op::State(id) = body.node(value).op
                    && !std::mem::replace(&mut live[id.0 as usize], true)
                {
                    grew = true;
                }
                stack.extend(body.operands(value));
            }
        }
        if !grew {
            return live;
        }
    }
}

/// Cleans the bodies of an element until nothing changes. `observed` registers stay: a debugger
/// reads them.
pub(crate) fn clean(
    handler: Body,
    signal: Option<Body>,
    states: &[State],
    observed: &dyn Fn(usize) -> bool,
    enabled: bool,
) -> (Body, Option<Body>) {
    let (mut handler, mut signal) = (handler, signal);
    if !enabled {
        return (handler, signal);
    }
    let mut fixed: HashMap<StateId, u64> = HashMap::new();
    for _ in 0..20 {
        let before = fixed.len();
        for (at, state) in states.iter().enumerate() {
            let id = StateId(u32::try_from(at).unwrap_or(0));
            if fixed.contains_key(&id) {
                continue;
            }
            let bodies = [Some(&handler), signal.as_ref()];
            let constant = bodies.into_iter().flatten().all(|body| {
                body.updates.iter().filter(|(s, _)| *s == id).all(|(_, value)| {
                    body.node(*value).op == Op::State(id)
                        || body.constant_of(*value) == Some(state.initial)
                })
            });
            if constant {
                fixed.insert(id, state.initial);
            }
        }
        let mut bodies = vec![&handler];
        bodies.extend(signal.as_ref());
        let mut live = living(&bodies, states.len());
        for (at, live) in live.iter_mut().enumerate() {
            *live |= observed(at);
        }
        let keep = |id: StateId| live[id.0 as usize];
        let nodes = handler.nodes.len();
        let new_handler = rebuild(&handler, &fixed, &keep, true);
        signal = signal.map(|signal| rebuild(&signal, &fixed, &keep, true));
        handler = new_handler;
        if fixed.len() == before && handler.nodes.len() == nodes {
            break;
        }
    }
    (handler, signal)
}
