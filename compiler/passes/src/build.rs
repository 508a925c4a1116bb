//! From the typed tree to predicated static single assignment.
//!
//! Both sides of a branch are computed and joined by selections; effects carry the condition of
//! their path. A loop is unrolled, or cut: its iteration ends at the loop's end, registers keep the
//! variables and the place, and the next iteration goes on there. Word `w` of variable `v` has one
//! slot in an environment; environments are joined where paths meet.

mod memory;

use std::collections::HashMap;

use beeline_ir::tree::{
    Binary, Element, Expr, ExprKind, Index, Label, Place, Stmt, VarId, VarKind, mask, words,
};

use crate::ssa::{Body, Emit, MemoryId, Op, ReadId, StateId, ValueId};
use crate::unroll::{LoopPlan, Plans};

/// A register.
#[derive(Clone, Debug)]
pub struct State {
    /// Name for reports and Verilog: the variable's, with the word's number if it has several.
    pub name: String,
    /// Width.
    pub bits: u32,
    /// The variable and word it holds, for a variable of the source.
    pub of: Option<(VarId, u32)>,
    /// First value.
    pub initial: u64,
}

/// Registers by what they hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct States {
    pub(crate) list: Vec<State>,
    by_slot: HashMap<(VarId, u32), StateId>,
}

impl States {
    /// The register of a variable's word.
    pub(crate) fn of(&mut self, element: &Element, var: VarId, word: u32) -> StateId {
        if let Some(id) = self.by_slot.get(&(var, word)) {
            return *id;
        }
        let described = element.var(var);
        let count = words(described.bits);
        let plain: String = described
            .name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        let kept = if described.kind == VarKind::Local {
            format!("kept_{plain}_{}", var.0)
        } else {
            plain
        };
        let name = if count > 1 { format!("{kept}_{word}") } else { kept };
        let bits = (described.bits - word * 64).min(64);
        let id = self.add(name, bits, Some((var, word)));
        self.by_slot.insert((var, word), id);
        id
    }

    pub(crate) fn add(&mut self, name: String, bits: u32, of: Option<(VarId, u32)>) -> StateId {
        self.list.push(State { name, bits, of, initial: 0 });
        StateId(u32::try_from(self.list.len() - 1).unwrap_or(u32::MAX))
    }
}

/// What cannot be made into hardware.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{element}: {reason}")]
pub struct NotHardware {
    /// Element.
    pub element: String,
    /// Why.
    pub reason: String,
    /// Where.
    pub span: beeline_syntax::Span,
}

/// Most values of one body.
const MOST: usize = 400_000;

/// A path: its condition and the variables' words.
#[derive(Clone)]
struct Path {
    when: ValueId,
    slots: Vec<Option<ValueId>>,
}

/// What is executed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Handler,
    Signal,
}

struct Builder<'a> {
    element: &'a Element,
    plans: &'a Plans,
    body: Body,
    states: &'a mut States,
    /// First slot of each variable.
    at: Vec<usize>,
    /// Paths that left for a label.
    left: HashMap<Label, Vec<Path>>,
    /// Iterations that go on later: `(place, path)`.
    cuts: Vec<(u64, Path)>,
    /// Condition of going on at each place.
    resume: Option<StateId>,
    places: u64,
    /// Version of each memory, so that equal reads are one.
    versions: Vec<u32>,
    same: HashMap<(MemoryId, ValueId, u32), ReadId>,
    clean: bool,
}

/// Builds one iteration of `block`.
pub(crate) fn build(
    element: &Element,
    plans: &Plans,
    states: &mut States,
    which: Which,
    clean: bool,
) -> Result<Body, NotHardware> {
    let mut total = 0;
    let mut at = Vec::new();
    for var in &element.vars {
        at.push(total);
        total += words(var.bits);
    }
    let mut builder = Builder {
        element,
        plans,
        body: Body::new(clean),
        states,
        at,
        left: HashMap::new(),
        cuts: Vec::new(),
        resume: None,
        places: 0,
        versions: vec![0; element.mems.len()],
        same: HashMap::new(),
        clean,
    };
    let slots = vec![None; total];
    match which {
        Which::Handler => builder.handler(slots)?,
        Which::Signal => builder.signal(slots)?,
    }
    Ok(builder.body)
}

impl Builder<'_> {
    fn handler(&mut self, slots: Vec<Option<ValueId>>) -> Result<(), NotHardware> {
        let cut = self.has_cut(&self.element.handler);
        let one = self.body.constant(1, 1);
        let mut path = Path { when: one, slots };
        if cut {
            let state = self.states.add("place".to_owned(), 8, None);
            self.resume = Some(state);
            let place = self.body.make(Op::State(state), 8);
            let zero = self.body.constant(0, 8);
            path.when = self.body.binary(Binary::Equal, place, zero);
        }
        self.fetch(&mut path);
        let block = self.element.handler.clone();
        let end = self.block(&block, Some(path))?;
        let mut ends: Vec<(Option<u64>, Path)> = end.into_iter().map(|p| (None, p)).collect();
        ends.extend(
            self.cuts.drain(..).map(|(place, path)| (Some(place), path)).collect::<Vec<_>>(),
        );
        self.finish(ends, cut);
        Ok(())
    }

    /// The kernel loop's reads.
    fn fetch(&mut self, path: &mut Path) {
        for (port, (flag, data)) in
            self.element.in_valid.iter().zip(&self.element.in_data).enumerate()
        {
            let port = u32::try_from(port).unwrap_or(u32::MAX);
            let held = self.slot(path, *flag, 0);
            let next = self.slot(path, self.element.next_ports, 0);
            let asked = self.body.extract(next, port, 1);
            let free = self.body.not(held);
            let want = self.body.and(asked, free);
            let want = self.body.and(want, path.when);
            self.body.wants.push((port, want));
            let got = self.body.make(Op::Fetched(port), 1);
            let valid = self.body.or(got, held);
            self.set_slot(path, *flag, 0, valid);
            for word in 0..words(self.element.var(*data).bits) {
                let word = u32::try_from(word).unwrap_or(u32::MAX);
                let bits = self.slot_bits(*data, word);
                let item = self.body.make(Op::Item(port, word), bits);
                let old = self.slot(path, *data, word);
                let value = self.body.select(got, item, old);
                self.set_slot(path, *data, word, value);
            }
        }
    }

    fn has_cut(&self, block: &[Stmt]) -> bool {
        let mut found = false;
        beeline_ir::tree::walk(block, &mut |stmt| {
            if let Stmt::Loop { label, .. } = stmt {
                found |= matches!(self.plans.of(*label), LoopPlan::Flatten(_));
            }
        });
        found
    }

    /// New values of registers, and what goes out.
    fn finish(&mut self, ends: Vec<(Option<u64>, Path)>, cut: bool) {
        let zero = self.body.constant(0, 1);
        let done =
            ends.iter().find(|(place, _)| place.is_none()).map_or(zero, |(_, path)| path.when);
        if let Some(state) = self.resume {
            let mut place = self.body.constant(0, 8);
            for (number, path) in &ends {
                if let Some(number) = number {
                    let number = self.body.constant(*number, 8);
                    place = self.body.select(path.when, number, place);
                }
            }
            self.body.updates.push((state, place));
        }
        let paths: Vec<Path> = ends.into_iter().map(|(_, path)| path).collect();
        let Some(mut end) = self.join(paths) else { return };
        for (port, (flag, data)) in
            self.element.out_set.iter().zip(&self.element.out_data).enumerate()
        {
            let set = self.slot(&mut end, *flag, 0);
            let when = if cut { self.body.and(set, done) } else { set };
            let list = (0..words(self.element.var(*data).bits))
                .map(|word| self.slot(&mut end, *data, u32::try_from(word).unwrap_or(0)))
                .collect();
            let port = u32::try_from(port).unwrap_or(u32::MAX);
            self.body.emits.push(Emit { port, when, words: list });
        }
        for (flag, data) in self.element.in_valid.iter().zip(&self.element.in_data) {
            let valid = self.slot(&mut end, *flag, 0);
            for word in 0..words(self.element.var(*data).bits) {
                let word = u32::try_from(word).unwrap_or(0);
                let value = self.slot(&mut end, *data, word);
                let none = self.body.constant(0, self.slot_bits(*data, word));
                let value = self.body.select(valid, value, none);
                self.set_slot(&mut end, *data, word, value);
            }
        }
        self.updates(&mut end);
    }

    /// Every register that exists gets its slot's value.
    fn updates(&mut self, end: &mut Path) {
        let mut at = 0;
        // Reading a slot may make a register, so the list grows while it is walked.
        while at < self.states.list.len() {
            if let Some((var, word)) = self.states.list[at].of {
                let id = StateId(u32::try_from(at).unwrap_or(u32::MAX));
                let bits = self.slot_bits(var, word);
                let slot = self.at[var.0 as usize] + word as usize;
                let value = match end.slots[slot] {
                    Some(value) => value,
                    None => self.body.make(Op::State(id), bits),
                };
                self.body.updates.push((id, value));
            }
            at += 1;
        }
    }

    fn signal(&mut self, slots: Vec<Option<ValueId>>) -> Result<(), NotHardware> {
        let one = self.body.constant(1, 1);
        let mut path = Path { when: one, slots };
        for word in 0..8 {
            let value = self.body.make(Op::Signal(word), 64);
            self.set_slot(&mut path, self.element.sig_in, word, value);
            self.set_slot(&mut path, self.element.sig_out, word, value);
        }
        if let Some(block) = self.element.signal.clone() {
            let Some(end) = self.block(&block, Some(path))? else { return Ok(()) };
            path = end;
        }
        self.body.answer =
            (0..8).map(|word| self.slot(&mut path, self.element.sig_out, word)).collect();
        // Registers of the handler's own (places, kept variables) are not touched.
        let mut at = 0;
        while at < self.states.list.len() {
            if let Some((var, word)) = self.states.list[at].of
                && self.element.var(var).kind == VarKind::State
                && let Some(value) = path.slots[self.at[var.0 as usize] + word as usize]
            {
                self.body.updates.push((StateId(u32::try_from(at).unwrap_or(0)), value));
            }
            at += 1;
        }
        Ok(())
    }

    fn slot_bits(&self, var: VarId, word: u32) -> u32 {
        (self.element.var(var).bits - word * 64).min(64)
    }

    /// A word of a variable on a path.
    fn slot(&mut self, path: &mut Path, var: VarId, word: u32) -> ValueId {
        let bits = self.element.var(var).bits;
        if word * 64 >= bits {
            return self.body.constant(0, 64);
        }
        let at = self.at[var.0 as usize] + word as usize;
        if let Some(value) = path.slots[at] {
            return value;
        }
        let width = self.slot_bits(var, word);
        let lives = match self.element.var(var).kind {
            VarKind::State => true,
            VarKind::Local => false,
            VarKind::Port => {
                self.element.in_valid.contains(&var)
                    || self.element.in_data.contains(&var)
                    || var == self.element.next_ports
            }
        };
        let value = if lives {
            let id = self.states.of(self.element, var, word);
            self.body.make(Op::State(id), width)
        } else {
            self.body.constant(0, width)
        };
        path.slots[at] = Some(value);
        value
    }

    fn set_slot(&mut self, path: &mut Path, var: VarId, word: u32, value: ValueId) {
        if word * 64 < self.element.var(var).bits {
            if self.element.var(var).kind != VarKind::Local {
                // A register exists for what is written, not only for what is read.
                self.slot(path, var, word);
            }
            path.slots[self.at[var.0 as usize] + word as usize] = Some(value);
        }
    }

    /// Paths that meet.
    fn join(&mut self, mut paths: Vec<Path>) -> Option<Path> {
        paths.retain(|path| self.body.constant_of(path.when) != Some(0));
        let mut all = paths.pop()?;
        while let Some(path) = paths.pop() {
            all = self.join_two(path.when, path, all);
        }
        Some(all)
    }

    /// `yes` where `c` holds, else `no`.
    fn join_two(&mut self, c: ValueId, mut yes: Path, mut no: Path) -> Path {
        let when = self.body.or(yes.when, no.when);
        for at in 0..yes.slots.len() {
            match (yes.slots[at], no.slots[at]) {
                (a, b) if a == b => {}
                (Some(a), Some(b)) => yes.slots[at] = Some(self.body.select(c, a, b)),
                (None, None) => {}
                (a, b) => {
                    let (var, word) = self.owner(at);
                    if self.element.var(var).kind == VarKind::Local {
                        // Written on one path only: the other cannot read it later.
                        yes.slots[at] = a.or(b);
                    } else {
                        let a = self.slot(&mut yes, var, word);
                        let b = self.slot(&mut no, var, word);
                        yes.slots[at] = Some(self.body.select(c, a, b));
                    }
                }
            }
        }
        Path { when, slots: yes.slots }
    }

    fn owner(&self, at: usize) -> (VarId, u32) {
        let var = self.at.partition_point(|first| *first <= at) - 1;
        let word = at - self.at[var];
        (VarId(u32::try_from(var).unwrap_or(0)), u32::try_from(word).unwrap_or(0))
    }

    fn refuse<T>(&self, reason: &str, span: beeline_syntax::Span) -> Result<T, NotHardware> {
        Err(NotHardware { element: self.element.name.clone(), reason: reason.to_owned(), span })
    }

    fn block(&mut self, block: &[Stmt], path: Option<Path>) -> Result<Option<Path>, NotHardware> {
        let Some(mut path) = path else { return Ok(None) };
        for stmt in block {
            if self.body.nodes.len() > MOST {
                return self
                    .refuse("more than 400000 operations after unrolling", self.element.span);
            }
            match self.statement(stmt, path)? {
                Some(next) => path = next,
                None => return Ok(None),
            }
        }
        Ok(Some(path))
    }

    fn statement(&mut self, stmt: &Stmt, mut path: Path) -> Result<Option<Path>, NotHardware> {
        match stmt {
            Stmt::Set { place, value } => {
                let bits = value.bits;
                let value = self.value(value, &mut path);
                self.set(place, bits, value, &mut path);
            }
            Stmt::Copy { to, from, bits } => {
                let parts: Vec<(u32, u32)> =
                    (0..*bits).step_by(64).map(|at| (at, (bits - at).min(64))).collect();
                let mut values = Vec::new();
                for (at, part) in &parts {
                    let place = Place { offset: from.offset + at, ..from.clone() };
                    values.push(self.get(&place, *part, &mut path));
                }
                for ((at, part), value) in parts.into_iter().zip(values) {
                    let place = Place { offset: to.offset + at, ..to.clone() };
                    self.set(&place, part, value, &mut path);
                }
            }
            Stmt::Clear(var) => {
                for word in 0..words(self.element.var(*var).bits) {
                    let word = u32::try_from(word).unwrap_or(0);
                    let zero = self.body.constant(0, self.slot_bits(*var, word));
                    self.set_slot(&mut path, *var, word, zero);
                }
            }
            Stmt::Read { to, mem, index, offset, bits } => {
                self.read(*to, MemoryId(mem.0), index, (*offset, *bits), &mut path);
            }
            Stmt::Write { mem, index, offset, bits, from } => {
                self.write(*from, MemoryId(mem.0), index, (*offset, *bits), &mut path);
            }
            Stmt::If { condition, then, otherwise } => {
                return self.branch(condition, then, otherwise, path);
            }
            Stmt::Loop { label, body, info } => return self.turns(*label, body, info.span, path),
            Stmt::Scope { label, body } => {
                let end = self.block(body, Some(path))?;
                let mut paths = self.left.remove(label).unwrap_or_default();
                paths.extend(end);
                return Ok(self.join(paths));
            }
            Stmt::Leave(label) => {
                self.left.entry(*label).or_default().push(path);
                return Ok(None);
            }
            Stmt::Async(body) => return self.block(body, Some(path)),
            Stmt::Print { .. } | Stmt::Breakpoint(_) => {}
        }
        Ok(Some(path))
    }

    fn branch(
        &mut self,
        condition: &Expr,
        then: &[Stmt],
        otherwise: &[Stmt],
        mut path: Path,
    ) -> Result<Option<Path>, NotHardware> {
        let c = self.value(condition, &mut path);
        match self.body.constant_of(c) {
            Some(0) => return self.block(otherwise, Some(path)),
            Some(_) => return self.block(then, Some(path)),
            None => {}
        }
        let not = self.body.not(c);
        let before = path.when;
        let yes_when = self.body.and(before, c);
        let no_when = self.body.and(before, not);
        let yes = Path { when: yes_when, slots: path.slots.clone() };
        let no = Path { when: no_when, slots: path.slots };
        let mut yes = self.block(then, Some(yes))?;
        let mut no = self.block(otherwise, Some(no))?;
        Ok(match (yes.take(), no.take()) {
            (Some(yes), Some(no)) => {
                let whole = yes.when == yes_when && no.when == no_when;
                // A path that resumes inside a branch does not pass its condition.
                let chosen = if whole { c } else { yes.when };
                let mut joined = self.join_two(chosen, yes, no);
                if whole {
                    joined.when = before;
                }
                Some(joined)
            }
            (a, b) => a.or(b),
        })
    }

    fn turns(
        &mut self,
        label: Label,
        body: &[Stmt],
        span: beeline_syntax::Span,
        path: Path,
    ) -> Result<Option<Path>, NotHardware> {
        match self.plans.of(label) {
            LoopPlan::Unroll(count) => {
                let mut current = Some(path);
                for _ in 0..count {
                    let Some(path) = current else { break };
                    current = self.block(body, Some(path))?;
                }
                let mut paths = self.left.remove(&label).unwrap_or_default();
                paths.extend(current);
                Ok(self.join(paths))
            }
            LoopPlan::Flatten(copies) => {
                let Some(state) = self.resume else {
                    return self.refuse(
                        "a loop of unknown length in .signal; give it #pragma max_iter",
                        span,
                    );
                };
                self.places += 1;
                let number = self.places;
                if number > 250 {
                    return self.refuse("more than 250 loops", span);
                }
                let head = self.resumed(state, number, path);
                let mut current = Some(head);
                for _ in 0..copies {
                    let Some(path) = current else { break };
                    current = self.block(body, Some(path))?;
                }
                if let Some(path) = current {
                    self.cuts.push((number, path));
                }
                let paths = self.left.remove(&label).unwrap_or_default();
                Ok(self.join(paths))
            }
        }
    }

    /// The path into a loop, joined with the one that an earlier iteration left off.
    fn resumed(&mut self, state: StateId, number: u64, path: Path) -> Path {
        let place = self.body.make(Op::State(state), 8);
        let number = self.body.constant(number, 8);
        let here = self.body.binary(Binary::Equal, place, number);
        let mut again = Path { when: here, slots: path.slots.clone() };
        for at in 0..again.slots.len() {
            if again.slots[at].is_some() {
                let (var, word) = self.owner(at);
                let id = self.states.of(self.element, var, word);
                let bits = self.slot_bits(var, word);
                again.slots[at] = Some(self.body.make(Op::State(id), bits));
            }
        }
        self.join_two(here, again, path)
    }

    fn value(&mut self, expr: &Expr, path: &mut Path) -> ValueId {
        match &expr.kind {
            ExprKind::Constant(value) => self.body.constant(*value, expr.bits),
            ExprKind::Get(place) => self.get(place, expr.bits, path),
            ExprKind::Unary(operator, a) => {
                let a = self.value(a, path);
                self.body.unary(*operator, a, expr.bits)
            }
            ExprKind::Binary(operator, a, b) => {
                let a = self.value(a, path);
                let b = self.value(b, path);
                self.body.binary(*operator, a, b)
            }
            ExprKind::Select(c, a, b) => {
                let c = self.value(c, path);
                let a = self.value(a, path);
                let b = self.value(b, path);
                let c = self.truth(c);
                self.body.select(c, a, b)
            }
            ExprKind::Resize(a) => {
                let a = self.value(a, path);
                self.body.resize(a, expr.bits)
            }
            ExprKind::Extract(a, offset) => {
                let a = self.value(a, path);
                self.body.extract(a, *offset, expr.bits)
            }
        }
    }

    fn truth(&mut self, value: ValueId) -> ValueId {
        let bits = self.body.bits(value);
        if bits == 1 {
            return value;
        }
        let zero = self.body.constant(0, bits);
        self.body.binary(Binary::NotEqual, value, zero)
    }

    /// Bits of a variable at a constant offset.
    fn fixed(&mut self, var: VarId, offset: u32, bits: u32, path: &mut Path) -> ValueId {
        let (word, shift) = (offset / 64, offset % 64);
        let low = self.slot(path, var, word);
        if shift + bits <= 64 {
            return self.body.extract(low, shift, bits);
        }
        let low = self.body.extract(low, shift, 64 - shift);
        let high = self.slot(path, var, word + 1);
        let high = self.body.extract(high, 0, bits - (64 - shift));
        let wide = self.body.resize(low, bits);
        self.body.insert(wide, high, 64 - shift)
    }

    fn set_fixed(&mut self, var: VarId, offset: u32, value: ValueId, path: &mut Path) {
        let bits = self.body.bits(value);
        let (word, shift) = (offset / 64, offset % 64);
        let part = bits.min(64 - shift);
        let low = self.body.extract(value, 0, part);
        let old = self.slot(path, var, word);
        let new = self.body.insert(old, low, shift);
        self.set_slot(path, var, word, new);
        if part < bits && (word + 1) * 64 < self.element.var(var).bits {
            let high = self.body.extract(value, part, bits - part);
            let old = self.slot(path, var, word + 1);
            let new = self.body.insert(old, high, 0);
            self.set_slot(path, var, word + 1, new);
        }
    }

    fn get(&mut self, place: &Place, bits: u32, path: &mut Path) -> ValueId {
        self.get_at(place.var, place.offset, &place.index, bits, path)
    }

    fn get_at(
        &mut self,
        var: VarId,
        offset: u32,
        index: &[Index],
        bits: u32,
        path: &mut Path,
    ) -> ValueId {
        let Some((first, rest)) = index.split_first() else {
            return self.fixed(var, offset, bits, path);
        };
        let at = self.value(&first.at, path);
        if let Some(known) = self.body.constant_of(at) {
            if known >= u64::from(first.count) {
                return self.body.constant(0, bits);
            }
            let offset = offset + u32::try_from(known).unwrap_or(0) * first.stride;
            return self.get_at(var, offset, rest, bits, path);
        }
        let mut entries = Vec::new();
        for entry in 0..first.count {
            entries.push(self.get_at(var, offset + entry * first.stride, rest, bits, path));
        }
        self.choose(at, &entries, bits)
    }

    /// The entry that `at` names, by a tree over its bits; zero past the end.
    fn choose(&mut self, at: ValueId, entries: &[ValueId], bits: u32) -> ValueId {
        let levels = usize::BITS - (entries.len() - 1).leading_zeros();
        let zero = self.body.constant(0, bits);
        let mut level = entries.to_vec();
        for bit in 0..levels {
            let c = self.body.extract(at, bit, 1);
            level = level
                .chunks(2)
                .map(|pair| {
                    let high = pair.get(1).copied().unwrap_or(zero);
                    self.body.select(c, high, pair[0])
                })
                .collect();
        }
        let chosen = level.first().copied().unwrap_or(zero);
        let width = self.body.bits(at);
        if levels >= width {
            return chosen;
        }
        let above = self.body.extract(at, levels, width - levels);
        let none = self.body.constant(0, width - levels);
        let past = self.body.binary(Binary::NotEqual, above, none);
        self.body.select(past, zero, chosen)
    }

    fn set(&mut self, place: &Place, bits: u32, value: ValueId, path: &mut Path) {
        let value = self.body.resize(value, bits);
        self.set_at(place.var, place.offset, &place.index, value, None, path);
    }

    fn set_at(
        &mut self,
        var: VarId,
        offset: u32,
        index: &[Index],
        value: ValueId,
        when: Option<ValueId>,
        path: &mut Path,
    ) {
        let Some((first, rest)) = index.split_first() else {
            let value = match when {
                Some(when) => {
                    let old = self.fixed(var, offset, self.body.bits(value), path);
                    self.body.select(when, value, old)
                }
                None => value,
            };
            self.set_fixed(var, offset, value, path);
            return;
        };
        let at = self.value(&first.at, path);
        if let Some(known) = self.body.constant_of(at) {
            if known < u64::from(first.count) {
                let offset = offset + u32::try_from(known).unwrap_or(0) * first.stride;
                self.set_at(var, offset, rest, value, when, path);
            }
            return;
        }
        // Indices are read before anything is written.
        let width = self.body.bits(at);
        for entry in 0..first.count {
            if u64::from(entry) > mask(width) {
                break;
            }
            let number = self.body.constant(u64::from(entry), width);
            let here = self.body.binary(Binary::Equal, at, number);
            let here = match when {
                Some(when) => self.body.and(when, here),
                None => here,
            };
            self.set_at(var, offset + entry * first.stride, rest, value, Some(here), path);
        }
    }
}
