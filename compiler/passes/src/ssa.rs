//! Predicated static single assignment: one iteration of an element as straight-line operations.
//!
//! Every value has 1 to 64 bits. Effects carry the condition under which they happen. Values are
//! made through [`Body::make`], which folds constants and, where cleaning is on, applies identities
//! and finds equal operations.

use std::collections::HashMap;

use beeline_ir::tree::{Binary, Unary, mask};

/// A value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// A register that lives from iteration to iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateId(pub u32);

/// A memory of the hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryId(pub u32);

/// A read of a memory: its place in [`Body::reads`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadId(pub u32);

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// A constant.
    Constant(u64),
    /// A register, before this iteration changes it.
    State(StateId),
    /// One bit: an item came from this input at the start of the iteration.
    Fetched(u32),
    /// A word of that item.
    Item(u32, u32),
    /// A word of the signal.
    Signal(u32),
    /// A word of what a read gave.
    Data(ReadId, u32),
    /// One operand.
    Unary(Unary, ValueId),
    /// Two operands of equal width.
    Binary(Binary, ValueId, ValueId),
    /// The second where the first is one.
    Select(ValueId, ValueId, ValueId),
    /// Zeros above, or the lowest bits.
    Resize(ValueId),
    /// Bits from an offset on.
    Extract(ValueId, u32),
    /// The first with the bits from the offset on replaced by the second.
    Insert(ValueId, ValueId, u32),
}

/// A value's definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    /// What.
    pub op: Op,
    /// Width.
    pub bits: u32,
}

/// A read of a memory.
#[derive(Clone, Debug)]
pub struct Read {
    /// Memory.
    pub memory: MemoryId,
    /// Entry; below the number of entries where `when` is one.
    pub address: ValueId,
    /// Whether the result matters.
    pub when: ValueId,
}

/// A write of a memory.
#[derive(Clone, Debug)]
pub struct Write {
    /// Memory.
    pub memory: MemoryId,
    /// Entry.
    pub address: ValueId,
    /// Whether it happens.
    pub when: ValueId,
    /// First bit.
    pub offset: u32,
    /// Width.
    pub bits: u32,
    /// The bits, in words.
    pub words: Vec<ValueId>,
}

/// An access of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// By place in [`Body::reads`].
    Read(ReadId),
    /// By place in [`Body::writes`].
    Write(usize),
}

/// An item for an output.
#[derive(Clone, Debug)]
pub struct Emit {
    /// Output.
    pub port: u32,
    /// Whether there is one.
    pub when: ValueId,
    /// Its words.
    pub words: Vec<ValueId>,
}

/// One iteration.
#[derive(Clone, Debug, Default)]
pub struct Body {
    /// Values, operands before users.
    pub nodes: Vec<Node>,
    /// For each input, whether an item is wanted; computed from registers.
    pub wants: Vec<(u32, ValueId)>,
    /// Reads.
    pub reads: Vec<Read>,
    /// Writes.
    pub writes: Vec<Write>,
    /// Reads and writes in program order.
    pub accesses: Vec<Access>,
    /// New values of registers.
    pub updates: Vec<(StateId, ValueId)>,
    /// Items for outputs.
    pub emits: Vec<Emit>,
    /// The answer to a signal.
    pub answer: Vec<ValueId>,
    known: HashMap<Node, ValueId>,
    plain: bool,
}

impl Body {
    /// An empty body; without `clean`, only constants are folded.
    #[must_use]
    pub fn new(clean: bool) -> Self {
        Self { plain: !clean, ..Self::default() }
    }

    /// The definition.
    #[must_use]
    pub fn node(&self, value: ValueId) -> Node {
        self.nodes[value.0 as usize]
    }

    /// Its value, if it is a constant.
    #[must_use]
    pub fn constant_of(&self, value: ValueId) -> Option<u64> {
        match self.node(value).op {
            Op::Constant(value) => Some(value),
            _ => None,
        }
    }

    /// Width.
    #[must_use]
    pub fn bits(&self, value: ValueId) -> u32 {
        self.node(value).bits
    }

    fn push(&mut self, op: Op, bits: u32) -> ValueId {
        let node = Node { op, bits };
        if let Some(value) = self.known.get(&node) {
            return *value;
        }
        let value = ValueId(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX));
        self.nodes.push(node);
        let shares = !self.plain || matches!(op, Op::Constant(_) | Op::State(_) | Op::Data(..));
        if shares || matches!(op, Op::Fetched(_) | Op::Item(..) | Op::Signal(_)) {
            self.known.insert(node, value);
        }
        value
    }

    /// A constant.
    pub fn constant(&mut self, value: u64, bits: u32) -> ValueId {
        self.push(Op::Constant(value & mask(bits)), bits)
    }

    /// A value, simplified.
    pub fn make(&mut self, op: Op, bits: u32) -> ValueId {
        match op {
            Op::Constant(value) => self.constant(value, bits),
            Op::Unary(operator, a) => self.unary(operator, a, bits),
            Op::Binary(operator, a, b) => self.binary(operator, a, b),
            Op::Select(c, a, b) => self.select(c, a, b),
            Op::Resize(a) => self.resize(a, bits),
            Op::Extract(a, offset) => self.extract(a, offset, bits),
            Op::Insert(base, value, offset) => self.insert(base, value, offset),
            _ => self.push(op, bits),
        }
    }

    /// One operand.
    pub fn unary(&mut self, operator: Unary, a: ValueId, bits: u32) -> ValueId {
        if let Some(value) = self.constant_of(a) {
            return self.constant(operator.apply(value, bits), bits);
        }
        if !self.plain
            && let Op::Unary(inner, b) = self.node(a).op
            && inner == operator
        {
            return b;
        }
        self.push(Op::Unary(operator, a), bits)
    }

    /// One bit, the other way round.
    pub fn not(&mut self, a: ValueId) -> ValueId {
        self.unary(Unary::Not, a, 1)
    }

    /// One bit: both.
    pub fn and(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary(Binary::And, a, b)
    }

    /// One bit: either.
    pub fn or(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary(Binary::Or, a, b)
    }

    /// Two operands.
    pub fn binary(&mut self, operator: Binary, a: ValueId, b: ValueId) -> ValueId {
        let width = self.bits(a);
        let bits = if operator.compares() { 1 } else { width };
        let (x, y) = (self.constant_of(a), self.constant_of(b));
        if let (Some(x), Some(y)) = (x, y) {
            return self.constant(operator.apply(x, y, width), bits);
        }
        if !self.plain
            && let Some(value) = self.identity(operator, a, b, x, y, width)
        {
            return value;
        }
        let commutes = matches!(
            operator,
            Binary::Add
                | Binary::Multiply
                | Binary::And
                | Binary::Or
                | Binary::Xor
                | Binary::Equal
                | Binary::NotEqual
        );
        // A constant stands on the right, else the older value on the left.
        let (a, b) =
            if commutes && (x.is_some() || (y.is_none() && b < a)) { (b, a) } else { (a, b) };
        self.push(Op::Binary(operator, a, b), bits)
    }

    fn identity(
        &mut self,
        operator: Binary,
        a: ValueId,
        b: ValueId,
        x: Option<u64>,
        y: Option<u64>,
        width: u32,
    ) -> Option<ValueId> {
        let all = mask(width);
        let opposite = |body: &Self, a: ValueId, b: ValueId| {
            body.node(a).op == Op::Unary(Unary::Not, b)
                || body.node(b).op == Op::Unary(Unary::Not, a)
        };
        Some(match operator {
            Binary::And => match (x, y) {
                (Some(0), _) | (_, Some(0)) => self.constant(0, width),
                (Some(x), _) if x == all => b,
                (_, Some(y)) if y == all => a,
                _ if a == b => a,
                _ if opposite(self, a, b) => self.constant(0, width),
                _ if width == 1 && self.implies(a, b) => a,
                _ if width == 1 && self.implies(b, a) => b,
                _ if width == 1 && self.excludes(a, b) => self.constant(0, 1),
                _ => return None,
            },
            Binary::Or => match (x, y) {
                (Some(0), _) => b,
                (_, Some(0)) => a,
                (Some(x), _) if x == all => self.constant(all, width),
                (_, Some(y)) if y == all => self.constant(all, width),
                _ if a == b => a,
                _ if opposite(self, a, b) => self.constant(all, width),
                _ if width == 1 && self.implies(a, b) => b,
                _ if width == 1 && self.implies(b, a) => a,
                _ => return None,
            },
            Binary::Xor if a == b => self.constant(0, width),
            Binary::Xor
            | Binary::Add
            | Binary::ShiftLeft
            | Binary::ShiftRight
            | Binary::Subtract
                if y == Some(0) =>
            {
                a
            }
            Binary::Xor | Binary::Add if x == Some(0) => b,
            Binary::Subtract if a == b => self.constant(0, width),
            Binary::Multiply if x == Some(0) || y == Some(0) => self.constant(0, width),
            Binary::Multiply if y == Some(1) => a,
            Binary::Multiply if x == Some(1) => b,
            Binary::Multiply | Binary::Divide | Binary::Remainder => {
                let power = y.filter(|y| y.is_power_of_two())?;
                if operator == Binary::Remainder {
                    let low = self.constant(power - 1, width);
                    self.binary(Binary::And, a, low)
                } else {
                    let by = self.constant(u64::from(power.trailing_zeros()), width);
                    let shift = if operator == Binary::Multiply {
                        Binary::ShiftLeft
                    } else {
                        Binary::ShiftRight
                    };
                    self.binary(shift, a, by)
                }
            }
            Binary::ShiftLeft | Binary::ShiftRight if y.is_some_and(|y| y >= u64::from(width)) => {
                self.constant(0, width)
            }
            Binary::ShiftRight if y.is_some() => {
                let by = u32::try_from(y.unwrap_or(0)).ok()?;
                let part = self.extract(a, by, width - by);
                self.resize(part, width)
            }
            Binary::ShiftLeft if y.is_some() => {
                let by = u32::try_from(y.unwrap_or(0)).ok()?;
                let zero = self.constant(0, width);
                let part = self.resize(a, width - by);
                self.insert(zero, part, by)
            }
            Binary::Equal | Binary::LessEqual if a == b => self.constant(1, 1),
            Binary::NotEqual | Binary::Less if a == b => self.constant(0, 1),
            Binary::Equal if width == 1 && y == Some(0) => self.not(a),
            Binary::Equal if width == 1 && y == Some(1) => a,
            Binary::NotEqual if width == 1 && y == Some(0) => a,
            Binary::NotEqual if width == 1 && y == Some(1) => self.not(a),
            Binary::Equal | Binary::NotEqual | Binary::Less | Binary::LessEqual => {
                return self.narrowed(operator, a, b, x, y);
            }
            _ => return None,
        })
    }

    /// A comparison of a widened value with a constant, at the value's own width.
    fn narrowed(
        &mut self,
        operator: Binary,
        a: ValueId,
        b: ValueId,
        x: Option<u64>,
        y: Option<u64>,
    ) -> Option<ValueId> {
        let inner = |body: &Self, v: ValueId| match body.node(v).op {
            Op::Resize(inner) if body.bits(inner) < body.bits(v) => Some(inner),
            _ => None,
        };
        if let (Some(p), Some(q)) = (inner(self, a), inner(self, b)) {
            let width = self.bits(p).max(self.bits(q));
            let (p, q) = (self.resize(p, width), self.resize(q, width));
            return Some(self.binary(operator, p, q));
        }
        let (wide, known, left) = match (x, y) {
            (_, Some(y)) => (a, y, true),
            (Some(x), _) => (b, x, false),
            _ => return None,
        };
        let narrow = inner(self, wide)?;
        let width = self.bits(narrow);
        if known & !mask(width) == 0 {
            let known = self.constant(known, width);
            return Some(if left {
                self.binary(operator, narrow, known)
            } else {
                self.binary(operator, known, narrow)
            });
        }
        // The constant is above every value.
        Some(match (operator, left) {
            (Binary::Equal, _) => self.constant(0, 1),
            (Binary::NotEqual, _) => self.constant(1, 1),
            (_, true) => self.constant(1, 1),
            (_, false) => self.constant(0, 1),
        })
    }

    /// Conjuncts of a condition, to a small depth.
    fn conjuncts(&self, value: ValueId, depth: u32, list: &mut Vec<ValueId>) {
        if let Op::Binary(Binary::And, a, b) = self.node(value).op
            && depth > 0
        {
            self.conjuncts(a, depth - 1, list);
            self.conjuncts(b, depth - 1, list);
            return;
        }
        list.push(value);
    }

    /// True where `a` is one only if `b` is: `b`'s conjuncts are among `a`'s.
    #[must_use]
    pub fn implies(&self, a: ValueId, b: ValueId) -> bool {
        if a == b || self.constant_of(b) == Some(1) || self.constant_of(a) == Some(0) {
            return true;
        }
        let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
        self.conjuncts(a, 6, &mut of_a);
        self.conjuncts(b, 6, &mut of_b);
        of_b.iter().all(|part| {
            of_a.contains(part)
                || matches!(self.node(*part).op, Op::Binary(Binary::Or, p, q)
                    if of_a.contains(&p) || of_a.contains(&q))
        })
    }

    /// True where both cannot be one.
    #[must_use]
    pub fn excludes(&self, a: ValueId, b: ValueId) -> bool {
        self.excludes_to(a, b, 4)
    }

    fn excludes_to(&self, a: ValueId, b: ValueId, depth: u32) -> bool {
        if self.constant_of(a) == Some(0) || self.constant_of(b) == Some(0) {
            return true;
        }
        if depth > 0 {
            for (one, other) in [(a, b), (b, a)] {
                if let Op::Binary(Binary::Or, p, q) = self.node(one).op {
                    return self.excludes_to(p, other, depth - 1)
                        && self.excludes_to(q, other, depth - 1);
                }
            }
        }
        let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
        self.conjuncts(a, 8, &mut of_a);
        self.conjuncts(b, 8, &mut of_b);
        let is_not = |x: ValueId, y: ValueId| self.node(x).op == Op::Unary(Unary::Not, y);
        let parts = |x: ValueId| match self.node(x).op {
            Op::Binary(Binary::Equal, v, c) => self.constant_of(c).map(|c| (v, c)),
            _ => None,
        };
        of_a.iter().any(|x| {
            of_b.iter().any(|y| {
                is_not(*x, *y)
                    || is_not(*y, *x)
                    || matches!((parts(*x), parts(*y)), (Some((v, c)), Some((w, d))) if v == w && c != d)
                    || self.negated_and(*x, &of_b)
                    || self.negated_and(*y, &of_a)
            })
        })
    }

    /// True where `value` is "not all of these", and all of these are in `list`.
    fn negated_and(&self, value: ValueId, list: &[ValueId]) -> bool {
        let Op::Unary(Unary::Not, inner) = self.node(value).op else { return false };
        match self.node(inner).op {
            Op::Binary(Binary::And, ..) => {
                let mut parts = Vec::new();
                self.conjuncts(inner, 8, &mut parts);
                parts.iter().all(|part| list.contains(part))
            }
            Op::Binary(Binary::Or, p, q) => list.contains(&p) || list.contains(&q),
            _ => false,
        }
    }

    /// The second where the first is one.
    pub fn select(&mut self, c: ValueId, a: ValueId, b: ValueId) -> ValueId {
        match self.constant_of(c) {
            Some(0) => return b,
            Some(_) => return a,
            None => {}
        }
        if a == b {
            return a;
        }
        let bits = self.bits(a);
        if self.plain {
            return self.push(Op::Select(c, a, b), bits);
        }
        if let Op::Unary(Unary::Not, inner) = self.node(c).op
            && self.bits(inner) == 1
        {
            return self.select(inner, b, a);
        }
        if bits == 1 {
            match (self.constant_of(a), self.constant_of(b)) {
                (Some(1), Some(0)) => return c,
                (Some(0), Some(1)) => return self.not(c),
                (Some(1), _) => return self.or(c, b),
                (_, Some(0)) => return self.and(c, a),
                (Some(0), _) => {
                    let not = self.not(c);
                    return self.and(not, b);
                }
                _ => {}
            }
            if b == c {
                return self.and(c, a);
            }
            if a == c {
                return self.or(c, b);
            }
        }
        // Fields that share a word are chosen one by one, or each would wait for the one before.
        let (of_a, of_b) = (self.node(a).op, self.node(b).op);
        if let (Op::Insert(base_a, x, at), Op::Insert(base_b, y, other)) = (of_a, of_b)
            && at == other
            && self.bits(x) == self.bits(y)
        {
            let base = self.select(c, base_a, base_b);
            let value = self.select(c, x, y);
            return self.insert(base, value, at);
        }
        if let Op::Insert(base, x, at) = of_a
            && base == b
        {
            let old = self.extract(b, at, self.bits(x));
            let value = self.select(c, x, old);
            return self.insert(base, value, at);
        }
        if let Op::Insert(base, y, at) = of_b
            && base == a
        {
            let old = self.extract(a, at, self.bits(y));
            let value = self.select(c, old, y);
            return self.insert(base, value, at);
        }
        if let Op::Select(d, x, y) = self.node(a).op {
            if d == c || self.implies(c, d) {
                return self.select(c, x, b);
            }
            if y == b && self.implies(d, c) {
                return self.select(d, x, b);
            }
        }
        if let Op::Select(d, x, y) = self.node(b).op {
            if d == c || self.implies(d, c) {
                return self.select(c, a, y);
            }
            if x == a && self.implies(c, d) {
                return b;
            }
        }
        self.push(Op::Select(c, a, b), bits)
    }

    /// Zeros above, or the lowest bits.
    pub fn resize(&mut self, a: ValueId, bits: u32) -> ValueId {
        let width = self.bits(a);
        if width == bits {
            return a;
        }
        if let Some(value) = self.constant_of(a) {
            return self.constant(value, bits);
        }
        if bits < width {
            return self.extract(a, 0, bits);
        }
        if let Op::Resize(inner) = self.node(a).op
            && self.bits(inner) <= width
        {
            return self.resize(inner, bits);
        }
        self.push(Op::Resize(a), bits)
    }

    /// Bits from an offset on; zeros past the end.
    pub fn extract(&mut self, a: ValueId, offset: u32, bits: u32) -> ValueId {
        let width = self.bits(a);
        if offset == 0 && bits == width {
            return a;
        }
        if offset >= width {
            return self.constant(0, bits);
        }
        if offset + bits > width {
            let part = self.extract(a, offset, width - offset);
            return self.resize(part, bits);
        }
        if let Some(value) = self.constant_of(a) {
            return self.constant(value >> offset, bits);
        }
        match self.node(a).op {
            Op::Extract(inner, more) => return self.extract(inner, more + offset, bits),
            Op::Resize(inner) => return self.extract(inner, offset, bits),
            Op::Insert(base, value, at) => {
                let size = self.bits(value);
                if offset >= at && offset + bits <= at + size {
                    return self.extract(value, offset - at, bits);
                }
                if offset + bits <= at || offset >= at + size {
                    return self.extract(base, offset, bits);
                }
            }
            Op::Select(c, x, y) if !self.plain && self.worth(x) && self.worth(y) => {
                let x = self.extract(x, offset, bits);
                let y = self.extract(y, offset, bits);
                return self.select(c, x, y);
            }
            Op::Binary(operator @ (Binary::And | Binary::Or | Binary::Xor), x, y)
                if !self.plain && (self.worth(x) || self.worth(y)) =>
            {
                let x = self.extract(x, offset, bits);
                let y = self.extract(y, offset, bits);
                return self.binary(operator, x, y);
            }
            Op::Binary(operator @ (Binary::Add | Binary::Subtract), x, y)
                if !self.plain && offset == 0 =>
            {
                let x = self.extract(x, 0, bits);
                let y = self.extract(y, 0, bits);
                return self.binary(operator, x, y);
            }
            _ => {}
        }
        self.push(Op::Extract(a, offset), bits)
    }

    /// True where an extraction looks through.
    fn worth(&self, value: ValueId) -> bool {
        matches!(
            self.node(value).op,
            Op::Insert(..)
                | Op::Constant(_)
                | Op::Resize(_)
                | Op::Extract(..)
                | Op::Select(..)
                | Op::Item(..)
                | Op::Data(..)
                | Op::State(_)
        )
    }

    /// The first with the bits from `offset` on replaced by the second.
    pub fn insert(&mut self, base: ValueId, value: ValueId, offset: u32) -> ValueId {
        let (width, bits) = (self.bits(base), self.bits(value));
        if offset == 0 && bits >= width {
            return self.resize(value, width);
        }
        if offset + bits > width {
            let part = self.extract(value, 0, width - offset);
            return self.insert(base, part, offset);
        }
        if let (Some(old), Some(new)) = (self.constant_of(base), self.constant_of(value)) {
            return self.constant(old & !(mask(bits) << offset) | new << offset, width);
        }
        if offset == 0 && self.constant_of(base).is_some_and(|old| old >> bits == 0) {
            return self.resize(value, width);
        }
        if let Op::Insert(inner, covered, at) = self.node(base).op
            && at >= offset
            && at + self.bits(covered) <= offset + bits
        {
            return self.insert(inner, value, offset);
        }
        self.push(Op::Insert(base, value, offset), width)
    }

    /// Operands of a value.
    #[must_use]
    pub fn operands(&self, value: ValueId) -> Vec<ValueId> {
        match self.node(value).op {
            Op::Constant(_) | Op::State(_) | Op::Fetched(_) | Op::Item(..) | Op::Signal(_) => {
                Vec::new()
            }
            Op::Data(read, _) => {
                let read = &self.reads[read.0 as usize];
                vec![read.address, read.when]
            }
            Op::Unary(_, a) | Op::Resize(a) | Op::Extract(a, _) => vec![a],
            Op::Binary(_, a, b) | Op::Insert(a, b, _) => vec![a, b],
            Op::Select(a, b, c) => vec![a, b, c],
        }
    }

    /// The meaning of a value whose operands have these values.
    #[must_use]
    pub fn apply(&self, value: ValueId, of: &dyn Fn(ValueId) -> u64) -> u64 {
        let node = self.node(value);
        let all = mask(node.bits);
        match node.op {
            Op::Constant(value) => value,
            Op::Unary(operator, a) => operator.apply(of(a), node.bits),
            Op::Binary(operator, a, b) => operator.apply(of(a), of(b), self.bits(a)),
            Op::Select(c, a, b) => {
                if of(c) != 0 {
                    of(a)
                } else {
                    of(b)
                }
            }
            Op::Resize(a) => of(a) & all,
            Op::Extract(a, offset) => of(a) >> offset & all,
            Op::Insert(base, value, offset) => {
                let hole = mask(self.bits(value)) << offset;
                of(base) & !hole | of(value) << offset & hole
            }
            Op::State(_) | Op::Fetched(_) | Op::Item(..) | Op::Signal(_) | Op::Data(..) => 0,
        }
    }
}
