//! Statements to Cranelift's form.
//!
//! A variable that is never indexed at run time lives in virtual registers, a word each: words of
//! state and ports are loaded where a branch begins that needs them, and stored where it ends. The
//! others stay in the frame.
//! Every value is 64 bits wide with zeros above its width.

use std::collections::{BTreeSet, HashMap};

use beeline_ir::tree::{
    Binary, Element, Expr, ExprKind, Label, Place, Stmt, Unary, VarId, mask, words,
};
use cranelift_codegen::ir::UserFuncName;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{AbiParam, Block, InstBuilder as _, MemFlagsData, Value, types};
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext, Variable};
use cranelift_jit::JITModule;
use cranelift_module::{FuncId, Linkage, Module as _};

mod memory;
mod turned;

use turned::{Turned, unmasked};

use crate::uses::{Uses, Word, indexed, outlives, vars};

/// Turns of loops without a known end, or with a far one, before a call counts as endless.
pub(crate) const FUEL: i64 = 4_000_000;
/// Turns of a nest of loops that is not counted.
const SHORT: u64 = 4_096;

/// The code generator's words.
#[derive(Debug)]
pub(crate) struct Refused(pub(crate) String);

/// The words of each variable in the frame.
pub(crate) fn layout(element: &Element) -> Vec<usize> {
    let mut total = 0;
    let mut at = Vec::with_capacity(element.vars.len());
    for var in &element.vars {
        at.push(total);
        total += words(var.bits);
    }
    at
}

/// Code of one function while it is built.
pub(crate) struct Coder<'a, 'b> {
    pub(crate) element: &'a Element,
    pub(crate) builder: &'a mut FunctionBuilder<'b>,
    pub(crate) at: Vec<usize>,
    /// Virtual registers, a word each.
    pub(crate) registers: HashMap<VarId, Vec<Variable>>,
    pub(crate) frame: Value,
    pub(crate) mems: Value,
    pub(crate) fuel: Variable,
    /// Where an endless iteration goes.
    pub(crate) endless: Block,
    /// Where each label goes on, and how many regions are open around it.
    labels: HashMap<Label, (Block, usize)>,
    /// Words that lie in their registers now.
    pub(crate) resident: BTreeSet<Word>,
    /// What each open region stores when it ends.
    regions: Vec<Vec<Word>>,
    /// Most turns of the loops around what is emitted now, multiplied.
    turns: u64,
}

/// Declares registers for everything that is not indexed at run time.
pub(crate) fn registers(
    element: &Element,
    builder: &mut FunctionBuilder<'_>,
    vars: &BTreeSet<VarId>,
    indexed: &BTreeSet<VarId>,
) -> HashMap<VarId, Vec<Variable>> {
    let mut all = HashMap::new();
    for var in vars.difference(indexed) {
        let count = words(element.var(*var).bits);
        let list: Vec<Variable> = (0..count).map(|_| builder.declare_var(types::I64)).collect();
        all.insert(*var, list);
    }
    all
}

impl<'a, 'b> Coder<'a, 'b> {
    pub(crate) fn new(
        element: &'a Element,
        builder: &'a mut FunctionBuilder<'b>,
        registers: HashMap<VarId, Vec<Variable>>,
        frame: Value,
        mems: Value,
        fuel: Variable,
        endless: Block,
    ) -> Self {
        let at = layout(element);
        let (labels, resident, regions) = (HashMap::new(), BTreeSet::new(), Vec::new());
        Self {
            element,
            builder,
            at,
            registers,
            frame,
            mems,
            fuel,
            endless,
            labels,
            resident,
            regions,
            turns: 1,
        }
    }

    pub(crate) fn offset_of(&self, var: VarId, word: usize) -> i32 {
        i32::try_from((self.at[var.0 as usize] + word) * 8).unwrap_or(i32::MAX)
    }

    /// The register of a word.
    fn register(&self, (var, word): Word) -> Option<Variable> {
        self.registers.get(&var)?.get(word).copied()
    }

    /// Stores words to the frame.
    fn store_all(&mut self, list: &[Word]) {
        for (var, word) in list.iter().copied() {
            let Some(variable) = self.register((var, word)) else { continue };
            let offset = self.offset_of(var, word);
            let value = self.builder.use_var(variable);
            self.builder.ins().store(MemFlagsData::trusted(), value, self.frame, offset);
        }
    }

    /// Emits a block that loads what it needs of what outlives a call, and stores what it wrote.
    /// What only one branch needs is left to that branch, so that an iteration with nothing to do
    /// touches little memory. False where control does not reach its end.
    pub(crate) fn region(&mut self, block: &[Stmt]) -> bool {
        let uses = Uses::of(self.element, block);
        let mut loaded = Vec::new();
        for (var, word) in uses.here.iter().copied() {
            let Some(variable) = self.register((var, word)) else { continue };
            if !outlives(self.element, var) || !self.resident.insert((var, word)) {
                continue;
            }
            loaded.push((var, word));
            let offset = self.offset_of(var, word);
            let trusted = MemFlagsData::trusted();
            let value = self.builder.ins().load(types::I64, trusted, self.frame, offset);
            self.builder.def_var(variable, value);
        }
        let stored: Vec<Word> =
            loaded.iter().copied().filter(|word| uses.written.contains(word)).collect();
        self.regions.push(stored.clone());
        let reached = self.block(block);
        self.regions.pop();
        if reached {
            self.store_all(&stored);
        }
        for word in loaded {
            self.resident.remove(&word);
        }
        reached
    }

    /// Sets a register to zero.
    pub(crate) fn clear(&mut self, var: VarId) {
        let Some(list) = self.registers.get(&var).cloned() else { return };
        for variable in list {
            let zero = self.number(0);
            self.builder.def_var(variable, zero);
        }
    }

    /// Defines a register from words at `base`.
    pub(crate) fn define_words(&mut self, var: VarId, base: Value, first: usize) {
        let Some(list) = self.registers.get(&var).cloned() else { return };
        for (word, variable) in list.into_iter().enumerate() {
            let offset = i32::try_from((first + word) * 8).unwrap_or(i32::MAX);
            let value = self.builder.ins().load(types::I64, MemFlagsData::trusted(), base, offset);
            self.builder.def_var(variable, value);
        }
    }

    /// Defines a register by the values of its words.
    pub(crate) fn define_values(&mut self, var: VarId, values: &[Value]) {
        for (word, value) in values.iter().enumerate() {
            self.set_word(var, word, *value);
        }
    }

    /// Defines a register of one word by a constant.
    pub(crate) fn define_number(&mut self, var: VarId, value: u64) {
        let value = self.number(value);
        self.set_word(var, 0, value);
    }

    /// The values of a register.
    pub(crate) fn words_of(&mut self, var: VarId) -> Vec<Value> {
        (0..words(self.element.var(var).bits)).map(|word| self.word(var, word)).collect()
    }

    /// The value of a register's first word.
    pub(crate) fn first(&mut self, var: VarId) -> Value {
        self.word(var, 0)
    }

    /// Stores a register to the frame, from a word on.
    pub(crate) fn store_words(&mut self, var: VarId, first: usize) {
        for (word, value) in self.words_of(var).into_iter().enumerate() {
            let offset = i32::try_from((first + word) * 8).unwrap_or(i32::MAX);
            self.builder.ins().store(MemFlagsData::trusted(), value, self.frame, offset);
        }
    }

    pub(crate) fn number(&mut self, value: u64) -> Value {
        self.builder.ins().iconst(types::I64, value.cast_signed())
    }

    fn masked(&mut self, value: Value, bits: u32) -> Value {
        if bits >= 64 {
            return value;
        }
        let all = self.number(mask(bits));
        self.builder.ins().band(value, all)
    }

    /// A word of a variable.
    fn word(&mut self, var: VarId, word: usize) -> Value {
        if let Some(list) = self.registers.get(&var) {
            return match list.get(word) {
                Some(variable) => self.builder.use_var(*variable),
                None => self.number(0),
            };
        }
        let offset = self.offset_of(var, word);
        self.builder.ins().load(types::I64, MemFlagsData::trusted(), self.frame, offset)
    }

    fn set_word(&mut self, var: VarId, word: usize, value: Value) {
        if let Some(list) = self.registers.get(&var) {
            if let Some(variable) = list.get(word) {
                self.builder.def_var(*variable, value);
            }
            return;
        }
        let offset = self.offset_of(var, word);
        self.builder.ins().store(MemFlagsData::trusted(), value, self.frame, offset);
    }

    /// Bits at a constant offset.
    fn get_fixed(&mut self, var: VarId, offset: u32, bits: u32) -> Value {
        let (word, shift) = ((offset / 64) as usize, offset % 64);
        let low = self.word(var, word);
        let mut value =
            if shift == 0 { low } else { self.builder.ins().ushr_imm_u(low, i64::from(shift)) };
        if shift + bits > 64 {
            let high = self.word(var, word + 1);
            let high = self.builder.ins().ishl_imm_u(high, i64::from(64 - shift));
            value = self.builder.ins().bor(value, high);
        }
        let width = self.element.var(var).bits;
        if shift == 0 && bits == width.min(64) && offset == 0 {
            value
        } else {
            self.masked(value, bits)
        }
    }

    fn set_fixed(&mut self, var: VarId, offset: u32, bits: u32, value: Value) {
        let (word, shift) = ((offset / 64) as usize, offset % 64);
        let width = self.element.var(var).bits;
        let whole = (width - (offset - shift).min(width)).min(64);
        if shift == 0 && bits >= whole {
            return self.set_word(var, word, value);
        }
        let old = self.word(var, word);
        let keep = self.number(!(mask(bits) << shift));
        let kept = self.builder.ins().band(old, keep);
        let part =
            if shift == 0 { value } else { self.builder.ins().ishl_imm_u(value, i64::from(shift)) };
        let new = self.builder.ins().bor(kept, part);
        self.set_word(var, word, new);
        if shift + bits > 64 {
            let old = self.word(var, word + 1);
            let keep = self.number(!(mask(bits) >> (64 - shift)));
            let kept = self.builder.ins().band(old, keep);
            let part = self.builder.ins().ushr_imm_u(value, i64::from(64 - shift));
            let new = self.builder.ins().bor(kept, part);
            self.set_word(var, word + 1, new);
        }
    }

    /// Bit offset of a place with indices, and whether every index is in range.
    fn dynamic(&mut self, place: &Place) -> (Value, Option<Value>) {
        let mut offset = self.number(u64::from(place.offset));
        let mut inside: Option<Value> = None;
        for index in &place.index {
            let at = self.value(&index.at);
            let mut at_checked = at;
            if index.at.largest() >= u64::from(index.count) {
                let count = self.number(u64::from(index.count));
                let fits = self.builder.ins().icmp(IntCC::UnsignedLessThan, at, count);
                let zero = self.number(0);
                at_checked = self.builder.ins().select(fits, at, zero);
                inside = Some(match inside {
                    Some(other) => self.builder.ins().band(other, fits),
                    None => fits,
                });
            }
            let stride = self.number(u64::from(index.stride));
            let part = self.builder.ins().imul(at_checked, stride);
            offset = self.builder.ins().iadd(offset, part);
        }
        (offset, inside)
    }

    /// The word that holds a bit, and the bit in it.
    fn word_address(&mut self, var: VarId, offset: Value) -> (Value, Value) {
        let word = self.builder.ins().ushr_imm_u(offset, 6);
        let bytes = self.builder.ins().ishl_imm_u(word, 3);
        let address = self.builder.ins().iadd(self.frame, bytes);
        let base = self.offset_of(var, 0);
        let address = self.builder.ins().iadd_imm_s(address, i64::from(base));
        let sixty_three = self.number(63);
        let shift = self.builder.ins().band(offset, sixty_three);
        (address, shift)
    }

    fn get_dynamic(&mut self, place: &Place, bits: u32) -> Value {
        let (offset, inside) = self.dynamic(place);
        let (address, shift) = self.word_address(place.var, offset);
        let low = self.builder.ins().load(types::I64, MemFlagsData::trusted(), address, 0);
        let mut value = self.builder.ins().ushr(low, shift);
        if !never_crosses(place, bits) {
            let high = self.builder.ins().load(types::I64, MemFlagsData::trusted(), address, 8);
            // Two shifts, because one by 64 would be one by nothing.
            let high = self.builder.ins().ishl_imm_u(high, 1);
            let sixty_three = self.number(63);
            let rest = self.builder.ins().isub(sixty_three, shift);
            let high = self.builder.ins().ishl(high, rest);
            value = self.builder.ins().bor(value, high);
        }
        let value = self.masked(value, bits);
        match inside {
            Some(inside) => {
                let zero = self.number(0);
                self.builder.ins().select(inside, value, zero)
            }
            None => value,
        }
    }

    fn set_dynamic(&mut self, place: &Place, bits: u32, value: Value) {
        let (offset, inside) = self.dynamic(place);
        let done = inside.map(|inside| {
            let write = self.builder.create_block();
            let done = self.builder.create_block();
            self.builder.ins().brif(inside, write, &[], done, &[]);
            self.builder.switch_to_block(write);
            done
        });
        let (address, shift) = self.word_address(place.var, offset);
        let all = self.number(mask(bits));
        let trusted = MemFlagsData::trusted();
        let low = self.builder.ins().load(types::I64, trusted, address, 0);
        let cut = self.builder.ins().ishl(all, shift);
        let kept = self.builder.ins().band_not(low, cut);
        let part = self.builder.ins().ishl(value, shift);
        let new = self.builder.ins().bor(kept, part);
        self.builder.ins().store(trusted, new, address, 0);
        if !never_crosses(place, bits) {
            let high = self.builder.ins().load(types::I64, trusted, address, 8);
            let sixty_three = self.number(63);
            let rest = self.builder.ins().isub(sixty_three, shift);
            let cut = self.builder.ins().ushr_imm_u(all, 1);
            let cut = self.builder.ins().ushr(cut, rest);
            let kept = self.builder.ins().band_not(high, cut);
            let part = self.builder.ins().ushr_imm_u(value, 1);
            let part = self.builder.ins().ushr(part, rest);
            let new = self.builder.ins().bor(kept, part);
            self.builder.ins().store(trusted, new, address, 8);
        }
        if let Some(done) = done {
            self.builder.ins().jump(done, &[]);
            self.builder.switch_to_block(done);
        }
    }

    fn get(&mut self, place: &Place, bits: u32) -> Value {
        if place.index.is_empty() {
            self.get_fixed(place.var, place.offset, bits)
        } else {
            self.get_dynamic(place, bits)
        }
    }

    fn set(&mut self, place: &Place, bits: u32, value: Value) {
        if place.index.is_empty() {
            self.set_fixed(place.var, place.offset, bits, value);
        } else {
            self.set_dynamic(place, bits, value);
        }
    }

    fn flag(&mut self, condition: Value) -> Value {
        self.builder.ins().uextend(types::I64, condition)
    }

    /// The value of an expression.
    pub(crate) fn value(&mut self, expr: &Expr) -> Value {
        match &expr.kind {
            ExprKind::Constant(value) => self.number(*value),
            ExprKind::Get(place) => self.get(place, expr.bits),
            ExprKind::Unary(operator, a) => {
                let a = self.value(a);
                let value = match operator {
                    Unary::Not => self.builder.ins().bnot(a),
                    Unary::Negate => self.builder.ins().ineg(a),
                };
                self.masked(value, expr.bits)
            }
            ExprKind::Binary(operator, a, b) => self.binary(*operator, a, b),
            ExprKind::Select(condition, a, b) => {
                let condition = self.value(condition);
                let (a, b) = (self.value(a), self.value(b));
                self.builder.ins().select(condition, a, b)
            }
            ExprKind::Resize(a) => {
                let value = self.value(a);
                if a.bits <= expr.bits { value } else { self.masked(value, expr.bits) }
            }
            ExprKind::Extract(a, offset) => {
                let value = self.value(a);
                let value = self.builder.ins().ushr_imm_u(value, i64::from(*offset));
                self.masked(value, expr.bits)
            }
        }
    }

    fn binary(&mut self, operator: Binary, left: &Expr, right: &Expr) -> Value {
        let bits = left.bits;
        let a = self.value(left);
        let b = self.value(right);
        let compare = |coder: &mut Self, code| {
            let flag = coder.builder.ins().icmp(code, a, b);
            coder.flag(flag)
        };
        match operator {
            Binary::Add => {
                let value = self.builder.ins().iadd(a, b);
                self.masked(value, bits)
            }
            Binary::Subtract => {
                let value = self.builder.ins().isub(a, b);
                self.masked(value, bits)
            }
            Binary::Multiply => {
                let value = self.builder.ins().imul(a, b);
                self.masked(value, bits)
            }
            Binary::Divide | Binary::Remainder => {
                let zero = self.number(0);
                let one = self.number(1);
                let none = self.builder.ins().icmp(IntCC::Equal, b, zero);
                let divisor = self.builder.ins().select(none, one, b);
                if operator == Binary::Divide {
                    let value = self.builder.ins().udiv(a, divisor);
                    let all = self.number(mask(bits));
                    self.builder.ins().select(none, all, value)
                } else {
                    let value = self.builder.ins().urem(a, divisor);
                    self.builder.ins().select(none, a, value)
                }
            }
            Binary::And => self.builder.ins().band(a, b),
            Binary::Or => self.builder.ins().bor(a, b),
            Binary::Xor => self.builder.ins().bxor(a, b),
            Binary::ShiftLeft | Binary::ShiftRight => {
                let value = if operator == Binary::ShiftLeft {
                    let value = self.builder.ins().ishl(a, b);
                    self.masked(value, bits)
                } else {
                    self.builder.ins().ushr(a, b)
                };
                if right.largest() < u64::from(bits) {
                    return value;
                }
                let width = self.number(u64::from(bits));
                let fits = self.builder.ins().icmp(IntCC::UnsignedLessThan, b, width);
                let zero = self.number(0);
                self.builder.ins().select(fits, value, zero)
            }
            Binary::Equal => compare(self, IntCC::Equal),
            Binary::NotEqual => compare(self, IntCC::NotEqual),
            Binary::Less => compare(self, IntCC::UnsignedLessThan),
            Binary::LessEqual => compare(self, IntCC::UnsignedLessThanOrEqual),
        }
    }

    /// Emits statements; false where control does not reach their end.
    pub(crate) fn block(&mut self, block: &[Stmt]) -> bool {
        let mut rest = block;
        while let Some((stmt, more)) = rest.split_first() {
            if let Some(turn) = Turned::of(self.element, rest) {
                let from = self.word(turn.from, 0);
                let from = unmasked(self.builder.func, from, turn.bits);
                let value = self.builder.ins().bswap(from);
                let value = match 64 - turn.bits {
                    0 => value,
                    less => self.builder.ins().ushr_imm_u(value, i64::from(less)),
                };
                self.set_word(turn.to, 0, value);
                rest = &rest[(turn.bits / 8) as usize..];
                continue;
            }
            if !self.statement(stmt) {
                return false;
            }
            rest = more;
        }
        true
    }

    fn statement(&mut self, stmt: &Stmt) -> bool {
        match stmt {
            Stmt::Set { place, value } => {
                let result = self.value(value);
                self.set(place, value.bits, result);
            }
            Stmt::Copy { to, from, bits } => self.copy(to, from, *bits),
            Stmt::Clear(var) => {
                for word in 0..words(self.element.var(*var).bits) {
                    let zero = self.number(0);
                    self.set_word(*var, word, zero);
                }
            }
            Stmt::Read { to, mem, index, offset, bits } => {
                self.read(*to, *mem, index, *offset, *bits);
            }
            Stmt::Write { mem, index, offset, bits, from } => {
                self.write(*mem, index, *offset, *bits, *from);
            }
            Stmt::If { condition, then, otherwise } => {
                return self.branch(condition, then, otherwise);
            }
            Stmt::Loop { label, body, info } => {
                let head = self.builder.create_block();
                let end = self.builder.create_block();
                self.labels.insert(*label, (end, self.regions.len()));
                self.builder.ins().jump(head, &[]);
                self.builder.switch_to_block(head);
                let outer = self.turns;
                self.turns = outer.saturating_mul(info.bound.map_or(u64::MAX, u64::from).max(1));
                if self.turns > SHORT {
                    let fuel = self.builder.use_var(self.fuel);
                    let left = self.builder.ins().iadd_imm_s(fuel, -1);
                    self.builder.def_var(self.fuel, left);
                    let go = self.builder.create_block();
                    self.builder.ins().brif(left, go, &[], self.endless, &[]);
                    self.builder.switch_to_block(go);
                }
                if self.block(body) {
                    self.builder.ins().jump(head, &[]);
                }
                self.turns = outer;
                self.builder.switch_to_block(end);
            }
            Stmt::Scope { label, body } => {
                let end = self.builder.create_block();
                self.labels.insert(*label, (end, self.regions.len()));
                if self.block(body) {
                    self.builder.ins().jump(end, &[]);
                }
                self.builder.switch_to_block(end);
            }
            Stmt::Leave(label) => {
                if let Some((block, depth)) = self.labels.get(label).copied() {
                    // Regions that this leaves store what they owe.
                    let owed: Vec<Word> = self.regions[depth..].iter().flatten().copied().collect();
                    self.store_all(&owed);
                    self.builder.ins().jump(block, &[]);
                }
                return false;
            }
            Stmt::Async(body) => return self.block(body),
            // A debugger runs the interpreter; machine code has no log.
            Stmt::Print { .. } | Stmt::Breakpoint(_) => {}
        }
        true
    }

    fn branch(&mut self, condition: &Expr, then: &[Stmt], otherwise: &[Stmt]) -> bool {
        let condition = self.value(condition);
        let yes = self.builder.create_block();
        let no = self.builder.create_block();
        let end = self.builder.create_block();
        self.builder.ins().brif(condition, yes, &[], no, &[]);
        let mut reached = false;
        for (block, body) in [(yes, then), (no, otherwise)] {
            self.builder.switch_to_block(block);
            if self.region(body) {
                self.builder.ins().jump(end, &[]);
                reached = true;
            }
        }
        self.builder.switch_to_block(end);
        if !reached {
            // Nothing jumps here; the block still needs an end.
            self.builder.ins().jump(self.endless, &[]);
        }
        reached
    }

    fn copy(&mut self, to: &Place, from: &Place, bits: u32) {
        let mut values = Vec::new();
        let parts = |bits: u32| (0..bits).step_by(64).map(move |at| (at, (bits - at).min(64)));
        for (at, part) in parts(bits) {
            let place = Place { offset: from.offset + at, ..from.clone() };
            values.push(self.get(&place, part));
        }
        for ((at, part), value) in parts(bits).zip(values) {
            let place = Place { offset: to.offset + at, ..to.clone() };
            self.set(&place, part, value);
        }
    }
}

/// True where every entry of the arrays lies inside one word.
fn never_crosses(place: &Place, bits: u32) -> bool {
    64_u32.is_multiple_of(bits)
        && place.offset.is_multiple_of(bits)
        && place.index.iter().all(|index| index.stride.is_multiple_of(bits))
}

/// Defines `name(frame, mems) -> status` that runs `block`.
pub(crate) fn define(
    module: &mut JITModule,
    name: &str,
    element: &Element,
    block: &[Stmt],
) -> Result<FuncId, Refused> {
    let mut context = module.make_context();
    let pointer = module.target_config().pointer_type();
    context.func.signature.params.push(AbiParam::new(pointer));
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
        let frame = builder.block_params(entry)[0];
        let mems = builder.block_params(entry)[1];
        let (vars, indexed) = (vars(block), indexed(block));
        let registers = registers(element, &mut builder, &vars, &indexed);
        let fuel = builder.declare_var(types::I64);
        let endless = builder.create_block();
        let mut coder = Coder::new(element, &mut builder, registers, frame, mems, fuel, endless);
        let start = coder.number(FUEL.cast_unsigned());
        coder.builder.def_var(fuel, start);
        for var in &vars {
            if !outlives(element, *var) {
                coder.clear(*var);
            }
        }
        if coder.region(block) {
            let zero = coder.number(0);
            coder.builder.ins().return_(&[zero]);
        }
        coder.builder.switch_to_block(endless);
        let one = coder.number(1);
        coder.builder.ins().return_(&[one]);
        builder.seal_all_blocks();
        builder.finalize(module.target_config());
    }
    module.define_function(id, &mut context).map_err(|error| Refused(format!("{error:?}")))?;
    module.clear_context(&mut context);
    Ok(id)
}
