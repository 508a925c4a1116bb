//! What keeps an interval out, in words.

use std::collections::HashMap;

use super::solve::{Bound, Problem, Unmet};
use super::{Limit, MemoryTiming};
use crate::ssa::{Body, MemoryId, Op, StateId, ValueId};

impl Problem<'_> {
    /// The chain from the read to the write of what could not be met.
    pub(super) fn limit(&self, unmet: &Unmet, names: &dyn Fn(StateId) -> String) -> Limit {
        match unmet {
            Unmet::Ports(memory, text) => {
                let name = self.memories[memory.0 as usize].name.clone();
                Limit { name, kind: "port", chain: vec![text.clone()] }
            }
            Unmet::Recurrence(list) => {
                let told = list.iter().map(|bound| match bound {
                    Bound::State(state) => self.limit_of_state(*state, names),
                    Bound::Memory(memory) => self.limit_of_memory(*memory, names),
                });
                // A recurrence through several registers shows the first whose own chain is known.
                let mut first = None;
                for limit in told {
                    if !limit.chain.is_empty() {
                        return limit;
                    }
                    first.get_or_insert(limit);
                }
                let nothing =
                    || Limit { name: "the schedule".into(), kind: "recurrence", chain: Vec::new() };
                first.unwrap_or_else(nothing)
            }
        }
    }

    fn limit_of_state(&self, state: StateId, names: &dyn Fn(StateId) -> String) -> Limit {
        let value = self.body.updates.iter().find(|(s, _)| *s == state).map(|(_, v)| *v);
        let from = |op: Op| op == Op::State(state);
        let chain = value.map(|v| self.chain(v, &from, names)).unwrap_or_default();
        Limit { name: names(state), kind: "recurrence", chain }
    }

    fn limit_of_memory(&self, memory: MemoryId, names: &dyn Fn(StateId) -> String) -> Limit {
        let name = self.memories[memory.0 as usize].name.clone();
        let from = |op: Op| {
            matches!(op, Op::Data(read, _)
                if self.body.reads[read.0 as usize].memory == memory)
        };
        let writes = self.body.writes.iter().filter(|write| write.memory == memory);
        let chain = writes
            .flat_map(|write| write.words.iter().chain([&write.when, &write.address]))
            .map(|value| self.chain(*value, &from, names))
            .find(|chain| !chain.is_empty())
            .unwrap_or_default();
        Limit { name, kind: "memory", chain }
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
fn describe(
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
