//! The typed tree.
//!
//! A variable has any width; an expression reads at most 64 bits of one. Ports are variables too:
//! the kernel loop fills `in_valid` and `in_data` before the handler and looks at `out_set` and
//! `out_data` after it, so a handler is nothing but code over variables and memories.

use std::fmt;

use beeline_syntax::Span;
use beeline_syntax::ast::Storage;
use serde::Serialize;

/// A variable of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct VarId(pub u32);

/// A memory of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct MemId(pub u32);

/// A loop or scope that can be left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Label(pub u32);

/// 64-bit words that hold `bits`.
#[must_use]
pub fn words(bits: u32) -> usize {
    bits.div_ceil(64) as usize
}

/// The lowest `bits` bits set.
#[must_use]
pub fn mask(bits: u32) -> u64 {
    if bits >= 64 { u64::MAX } else { (1 << bits) - 1 }
}

/// What a variable is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VarKind {
    /// Lives from call to call.
    State,
    /// Written before it is read, in each call.
    Local,
    /// Set by the kernel loop, or read by it: see [`Element`].
    Port,
}

/// A variable.
#[derive(Clone, Debug)]
pub struct Var {
    /// Name in the source; temporaries begin with `%`.
    pub name: String,
    /// Width.
    pub bits: u32,
    /// What for.
    pub kind: VarKind,
    /// Storage class as written.
    pub storage: Storage,
    /// Where it was declared.
    pub span: Span,
}

/// A field of a memory's entries, for scattering and reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemField {
    /// Name.
    pub name: String,
    /// First bit.
    pub offset: u32,
    /// Width.
    pub bits: u32,
}

/// A memory: an array of entries.
#[derive(Clone, Debug)]
pub struct Mem {
    /// Name in the source.
    pub name: String,
    /// Dimensions, outermost first.
    pub dimensions: Vec<u32>,
    /// Width of an entry.
    pub bits: u32,
    /// Fields of an entry; one for a scalar.
    pub fields: Vec<MemField>,
    /// Initial contents, `words(bits)` words an entry; empty means zeros.
    pub initial: Vec<u64>,
    /// Never written.
    pub constant: bool,
    /// Storage class as written.
    pub storage: Storage,
    /// `#pragma ivdep` covers its accesses: no dependence between iterations.
    pub independent: bool,
    /// Where it was declared.
    pub span: Span,
}

impl Mem {
    /// Entries in all dimensions.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.dimensions.iter().product()
    }
}

/// Operators of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Unary {
    /// Each bit.
    Not,
    /// Two's complement.
    Negate,
}

/// Operators of two operands of equal width; the result of a comparison has one bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Binary {
    /// Modulo 2 to the width.
    Add,
    /// Modulo 2 to the width.
    Subtract,
    /// Modulo 2 to the width.
    Multiply,
    /// All ones for a divisor of zero.
    Divide,
    /// The dividend for a divisor of zero.
    Remainder,
    /// Each bit.
    And,
    /// Each bit.
    Or,
    /// Each bit.
    Xor,
    /// Zero from the width on.
    ShiftLeft,
    /// Zero from the width on.
    ShiftRight,
    /// Comparison.
    Equal,
    /// Comparison.
    NotEqual,
    /// Comparison.
    Less,
    /// Comparison.
    LessEqual,
}

impl Binary {
    /// True where the result has one bit.
    #[must_use]
    pub fn compares(self) -> bool {
        matches!(self, Self::Equal | Self::NotEqual | Self::Less | Self::LessEqual)
    }

    /// The meaning of the operator on values of `bits` bits.
    #[must_use]
    pub fn apply(self, a: u64, b: u64, bits: u32) -> u64 {
        let all = mask(bits);
        let value = match self {
            Self::Add => a.wrapping_add(b),
            Self::Subtract => a.wrapping_sub(b),
            Self::Multiply => a.wrapping_mul(b),
            Self::Divide => a.checked_div(b).unwrap_or(all),
            Self::Remainder => a.checked_rem(b).unwrap_or(a),
            Self::And => a & b,
            Self::Or => a | b,
            Self::Xor => a ^ b,
            Self::ShiftLeft if b < u64::from(bits) => a << b,
            Self::ShiftRight if b < u64::from(bits) => a >> b,
            Self::ShiftLeft | Self::ShiftRight => 0,
            Self::Equal => return u64::from(a == b),
            Self::NotEqual => return u64::from(a != b),
            Self::Less => return u64::from(a < b),
            Self::LessEqual => return u64::from(a <= b),
        };
        value & all
    }
}

impl Unary {
    /// The meaning of the operator on a value of `bits` bits.
    #[must_use]
    pub fn apply(self, a: u64, bits: u32) -> u64 {
        let value = match self {
            Self::Not => !a,
            Self::Negate => a.wrapping_neg(),
        };
        value & mask(bits)
    }
}

/// A step into an array inside a variable. Past the end, reads give zero and writes do nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    /// Entry.
    pub at: Expr,
    /// Bits from entry to entry.
    pub stride: u32,
    /// Entries.
    pub count: u32,
}

/// A part of a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The variable.
    pub var: VarId,
    /// First bit, before the indices.
    pub offset: u32,
    /// Indices.
    pub index: Vec<Index>,
}

impl Place {
    /// The whole variable.
    #[must_use]
    pub fn whole(var: VarId) -> Self {
        Self { var, offset: 0, index: Vec::new() }
    }
}

/// An expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expr {
    /// Width, 1 to 64.
    pub bits: u32,
    /// What.
    pub kind: ExprKind,
}

/// Expressions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExprKind {
    /// A constant, masked to the width.
    Constant(u64),
    /// A part of a variable.
    Get(Place),
    /// One operand.
    Unary(Unary, Box<Expr>),
    /// Two operands of equal width.
    Binary(Binary, Box<Expr>, Box<Expr>),
    /// The second where the first is not zero, else the third.
    Select(Box<Expr>, Box<Expr>, Box<Expr>),
    /// Zeros above, or the lowest bits.
    Resize(Box<Expr>),
    /// Bits from `offset` on.
    Extract(Box<Expr>, u32),
}

impl Expr {
    /// A constant.
    #[must_use]
    pub fn constant(value: u64, bits: u32) -> Self {
        Self { bits, kind: ExprKind::Constant(value & mask(bits)) }
    }

    /// The lowest bits of a variable.
    #[must_use]
    pub fn get(var: VarId, bits: u32) -> Self {
        Self { bits, kind: ExprKind::Get(Place::whole(var)) }
    }

    /// Its value, if it is a constant.
    #[must_use]
    pub fn known(&self) -> Option<u64> {
        match self.kind {
            ExprKind::Constant(value) => Some(value),
            _ => None,
        }
    }

    /// With `bits` bits.
    #[must_use]
    pub fn resize(self, bits: u32) -> Self {
        if self.bits == bits {
            return self;
        }
        match self.kind {
            ExprKind::Constant(value) => Self::constant(value, bits),
            _ => Self { bits, kind: ExprKind::Resize(Box::new(self)) },
        }
    }

    /// Two operands, folded where both are constant.
    #[must_use]
    pub fn binary(operator: Binary, a: Self, b: Self) -> Self {
        let bits = if operator.compares() { 1 } else { a.bits };
        if let (Some(x), Some(y)) = (a.known(), b.known()) {
            return Self::constant(operator.apply(x, y, a.bits), bits);
        }
        Self { bits, kind: ExprKind::Binary(operator, Box::new(a), Box::new(b)) }
    }

    /// One bit: not zero.
    #[must_use]
    pub fn truth(self) -> Self {
        if self.bits == 1 {
            return self;
        }
        let zero = Self::constant(0, self.bits);
        Self::binary(Binary::NotEqual, self, zero)
    }

    /// One bit: zero.
    #[must_use]
    pub fn falsehood(self) -> Self {
        let zero = Self::constant(0, self.bits);
        Self::binary(Binary::Equal, self, zero)
    }

    /// The largest value it can have.
    #[must_use]
    pub fn largest(&self) -> u64 {
        let all = mask(self.bits);
        match &self.kind {
            ExprKind::Constant(value) => *value,
            ExprKind::Resize(inner) => inner.largest().min(all),
            ExprKind::Select(_, a, b) => a.largest().max(b.largest()),
            ExprKind::Binary(Binary::And, a, b) => a.largest().min(b.largest()),
            ExprKind::Binary(Binary::Remainder, a, b) => match b.known() {
                Some(divisor) if divisor > 0 => a.largest().min(divisor - 1),
                _ => all,
            },
            ExprKind::Binary(Binary::ShiftRight, a, b) => match b.known() {
                Some(by) if by < 64 => a.largest() >> by,
                _ => all,
            },
            ExprKind::Binary(Binary::Add, a, b) => {
                a.largest().checked_add(b.largest()).filter(|sum| *sum <= all).unwrap_or(all)
            }
            _ => all,
        }
    }
}

/// What is known of a loop.
#[derive(Clone, Debug, Default)]
pub struct LoopInfo {
    /// Pragma `unroll`: 0 means fully.
    pub unroll: Option<u32>,
    /// Pragma `flatten`.
    pub flatten: Option<u32>,
    /// Most turns it can take, if known.
    pub bound: Option<u32>,
    /// True where the bound is the count unless the body leaves early.
    pub exact: bool,
    /// Where.
    pub span: Span,
}

/// A statement.
#[derive(Clone, Debug)]
pub enum Stmt {
    /// Writes at most 64 bits.
    Set {
        /// Where to.
        place: Place,
        /// What.
        value: Expr,
    },
    /// Copies any width.
    Copy {
        /// Where to.
        to: Place,
        /// Where from.
        from: Place,
        /// Width.
        bits: u32,
    },
    /// Clears a variable.
    Clear(VarId),
    /// Reads part of an entry into the lowest bits of a variable. Past the end: zeros.
    Read {
        /// Where to.
        to: VarId,
        /// Memory.
        mem: MemId,
        /// One index a dimension.
        index: Vec<Expr>,
        /// First bit in the entry.
        offset: u32,
        /// Width.
        bits: u32,
    },
    /// Writes the lowest bits of a variable into part of an entry. Past the end: nothing.
    Write {
        /// Memory.
        mem: MemId,
        /// One index a dimension.
        index: Vec<Expr>,
        /// First bit in the entry.
        offset: u32,
        /// Width.
        bits: u32,
        /// Where from.
        from: VarId,
    },
    /// Branch.
    If {
        /// One bit.
        condition: Expr,
        /// Where it is one.
        then: Vec<Stmt>,
        /// Where it is zero.
        otherwise: Vec<Stmt>,
    },
    /// Turns until left.
    Loop {
        /// What `Leave` names.
        label: Label,
        /// A turn.
        body: Vec<Stmt>,
        /// What is known.
        info: LoopInfo,
    },
    /// Once, unless left.
    Scope {
        /// What `Leave` names.
        label: Label,
        /// Body.
        body: Vec<Stmt>,
    },
    /// Goes on after the loop or scope.
    Leave(Label),
    /// `.async`: means its body; hardware moves it into an element of its own.
    Async(Vec<Stmt>),
    /// `printf`: goes to the debug log.
    Print {
        /// Format, with `%` places.
        format: String,
        /// Values.
        values: Vec<Expr>,
    },
    /// `breakpoint(n)`: a debugger may stop here.
    Breakpoint(u32),
}

/// A port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Name.
    pub name: String,
    /// Width of an item.
    pub bits: u32,
}

/// A lowered element: one instance's parameters are constants in it.
#[derive(Clone, Debug)]
pub struct Element {
    /// Name of the element.
    pub name: String,
    /// Parameters, as text, for reports.
    pub parameters: String,
    /// Inputs.
    pub inputs: Vec<Port>,
    /// Outputs.
    pub outputs: Vec<Port>,
    /// Variables.
    pub vars: Vec<Var>,
    /// Memories.
    pub mems: Vec<Mem>,
    /// Runs once.
    pub init: Vec<Stmt>,
    /// Runs for ever.
    pub handler: Vec<Stmt>,
    /// Runs for each signal.
    pub signal: Option<Vec<Stmt>>,
    /// One bit an input: the input buffer holds an item.
    pub in_valid: Vec<VarId>,
    /// The item; zero without one.
    pub in_data: Vec<VarId>,
    /// One bit an output: the handler queued an item.
    pub out_set: Vec<VarId>,
    /// The item.
    pub out_data: Vec<VarId>,
    /// Inputs to fetch before the next call, one bit each.
    pub next_ports: VarId,
    /// The signal to answer, 512 bits.
    pub sig_in: VarId,
    /// The answer, 512 bits.
    pub sig_out: VarId,
    /// Labels given out.
    pub labels: u32,
    /// Where it is declared.
    pub span: Span,
    /// Lines of its source, without blank ones and comments.
    pub lines: u32,
}

impl Element {
    /// The variable.
    #[must_use]
    pub fn var(&self, id: VarId) -> &Var {
        &self.vars[id.0 as usize]
    }

    /// The memory.
    #[must_use]
    pub fn mem(&self, id: MemId) -> &Mem {
        &self.mems[id.0 as usize]
    }

    /// A new variable.
    pub fn add_var(&mut self, name: impl Into<String>, bits: u32, kind: VarKind) -> VarId {
        let id = VarId(u32::try_from(self.vars.len()).unwrap_or(u32::MAX));
        self.vars.push(Var {
            name: name.into(),
            bits,
            kind,
            storage: Storage::Chosen,
            span: self.span,
        });
        id
    }

    /// A new memory.
    pub fn add_mem(&mut self, mem: Mem) -> MemId {
        self.mems.push(mem);
        MemId(u32::try_from(self.mems.len() - 1).unwrap_or(u32::MAX))
    }

    /// A new label.
    pub fn add_label(&mut self) -> Label {
        self.labels += 1;
        Label(self.labels)
    }

    /// The variable of that name, state only.
    #[must_use]
    pub fn state_var(&self, name: &str) -> Option<VarId> {
        let at = self.vars.iter().position(|v| v.name == name && v.kind == VarKind::State)?;
        Some(VarId(u32::try_from(at).ok()?))
    }

    /// The memory of that name.
    #[must_use]
    pub fn mem_named(&self, name: &str) -> Option<MemId> {
        let at = self.mems.iter().position(|m| m.name == name)?;
        Some(MemId(u32::try_from(at).ok()?))
    }
}

/// Calls `look` on every statement, outer ones first.
pub fn walk(block: &[Stmt], look: &mut impl FnMut(&Stmt)) {
    for stmt in block {
        look(stmt);
        match stmt {
            Stmt::If { then, otherwise, .. } => {
                walk(then, look);
                walk(otherwise, look);
            }
            Stmt::Loop { body, .. } | Stmt::Scope { body, .. } | Stmt::Async(body) => {
                walk(body, look);
            }
            _ => {}
        }
    }
}

/// Calls `look` on every expression of a statement itself, outermost first; inner statements are
/// not entered.
pub fn expressions(stmt: &Stmt, look: &mut impl FnMut(&Expr)) {
    fn place(place: &Place, look: &mut impl FnMut(&Expr)) {
        for index in &place.index {
            expression(&index.at, look);
        }
    }
    fn expression(expr: &Expr, look: &mut impl FnMut(&Expr)) {
        look(expr);
        match &expr.kind {
            ExprKind::Constant(_) => {}
            ExprKind::Get(from) => place(from, look),
            ExprKind::Unary(_, a) | ExprKind::Resize(a) | ExprKind::Extract(a, _) => {
                expression(a, look);
            }
            ExprKind::Binary(_, a, b) => {
                expression(a, look);
                expression(b, look);
            }
            ExprKind::Select(a, b, c) => {
                expression(a, look);
                expression(b, look);
                expression(c, look);
            }
        }
    }
    match stmt {
        Stmt::Set { place: to, value } => {
            place(to, look);
            expression(value, look);
        }
        Stmt::Copy { to, from, .. } => {
            place(to, look);
            place(from, look);
        }
        Stmt::Read { index, .. } | Stmt::Write { index, .. } => {
            index.iter().for_each(|at| expression(at, look));
        }
        Stmt::If { condition, .. } => expression(condition, look),
        Stmt::Print { values, .. } => values.iter().for_each(|value| expression(value, look)),
        Stmt::Clear(_)
        | Stmt::Loop { .. }
        | Stmt::Scope { .. }
        | Stmt::Leave(_)
        | Stmt::Async(_)
        | Stmt::Breakpoint(_) => {}
    }
}

impl fmt::Display for VarId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.0)
    }
}
