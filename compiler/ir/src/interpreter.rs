//! The meaning of an element: the tree, walked.
//!
//! [`Frame`] holds an element's variables as words in one vector, and its memories; machine code
//! uses the same layout, so that a debugger reads and changes variables in one way.

use beeline_syntax::Span;

use crate::tree::{
    Element, Expr, ExprKind, Label, MemId, Place, Stmt, VarId, VarKind, mask, words,
};

/// Statements a handler may run in one call before it counts as endless.
pub const FUEL: u64 = 4_000_000;

/// An iteration that does not end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the handler of {element} did not end within {FUEL} statements")]
pub struct Endless {
    /// Name of the element.
    pub element: String,
    /// Where it is declared.
    pub span: Span,
}

/// What a handler said besides its outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// `printf`.
    Text(String),
    /// `breakpoint(n)`.
    Breakpoint(u32),
}

/// Variables and memories of an element.
#[derive(Clone, Debug)]
pub struct Frame {
    /// First word of each variable.
    pub var_at: Vec<usize>,
    /// Words of all variables.
    pub words: Vec<u64>,
    /// Words of each memory, `words(bits)` an entry, and a word of padding.
    pub mems: Vec<Vec<u64>>,
}

impl Frame {
    /// Zeros, and the memories' initial contents.
    #[must_use]
    pub fn new(element: &Element) -> Self {
        let mut total = 0;
        let mut var_at = Vec::with_capacity(element.vars.len());
        for var in &element.vars {
            var_at.push(total);
            total += words(var.bits);
        }
        let mems = element
            .mems
            .iter()
            .map(|mem| {
                let size = mem.entries() as usize * words(mem.bits);
                // Zeros of the system cost nothing until they are written.
                let mut contents = vec![0; size + 1];
                let known = mem.initial.len().min(size);
                contents[..known].copy_from_slice(&mem.initial[..known]);
                contents
            })
            .collect();
        // A word of padding: machine code may load the word after the last.
        Self { var_at, words: vec![0; total + 1], mems }
    }

    /// The lowest word of a variable.
    #[must_use]
    pub fn low(&self, var: VarId) -> u64 {
        self.words[self.var_at[var.0 as usize]]
    }

    /// Sets the lowest word of a variable.
    pub fn set_low(&mut self, var: VarId, value: u64) {
        self.words[self.var_at[var.0 as usize]] = value;
    }

    /// The words of a variable.
    #[must_use]
    pub fn var(&self, element: &Element, var: VarId) -> &[u64] {
        let at = self.var_at[var.0 as usize];
        &self.words[at..at + words(element.var(var).bits)]
    }

    /// The words of a variable.
    pub fn var_mut(&mut self, element: &Element, var: VarId) -> &mut [u64] {
        let at = self.var_at[var.0 as usize];
        &mut self.words[at..at + words(element.var(var).bits)]
    }

    /// Sets every state variable to zero and every memory to its initial contents.
    pub fn reset(&mut self, element: &Element) {
        *self = Self::new(element);
    }

    /// The words of all state variables, in order.
    #[must_use]
    pub fn state(&self, element: &Element) -> Vec<u64> {
        let mut all = Vec::new();
        for (at, var) in element.vars.iter().enumerate() {
            if var.kind == VarKind::State {
                let first = self.var_at[at];
                all.extend_from_slice(&self.words[first..first + words(var.bits)]);
            }
        }
        all
    }
}

/// Bits `offset..offset + bits` of `from`, at most 64.
#[must_use]
pub fn extract(from: &[u64], offset: u32, bits: u32) -> u64 {
    let word = (offset / 64) as usize;
    let shift = offset % 64;
    let low = from.get(word).copied().unwrap_or(0) >> shift;
    let high = if shift > 0 && shift + bits > 64 {
        from.get(word + 1).copied().unwrap_or(0) << (64 - shift)
    } else {
        0
    };
    (low | high) & mask(bits)
}

/// Replaces bits `offset..offset + bits` of `to`, at most 64.
pub fn insert(to: &mut [u64], offset: u32, bits: u32, value: u64) {
    let word = (offset / 64) as usize;
    let shift = offset % 64;
    let value = value & mask(bits);
    let all = mask(bits);
    if let Some(low) = to.get_mut(word) {
        *low = *low & !(all << shift) | value << shift;
    }
    if shift > 0
        && shift + bits > 64
        && let Some(high) = to.get_mut(word + 1)
    {
        *high = *high & !(all >> (64 - shift)) | value >> (64 - shift);
    }
}

/// Copies `bits` bits.
pub fn copy(from: &[u64], from_offset: u32, to: &mut [u64], to_offset: u32, bits: u32) {
    let mut done = 0;
    while done < bits {
        let part = (bits - done).min(64);
        insert(to, to_offset + done, part, extract(from, from_offset + done, part));
        done += part;
    }
}

enum Flow {
    Next,
    Leave(Label),
}

/// Runs statements of one element.
struct Walk<'a> {
    element: &'a Element,
    frame: &'a mut Frame,
    events: &'a mut Vec<Event>,
    fuel: u64,
}

/// Runs `block` (the init, handler or signal of `element`) to its end.
///
/// Errors: the block did not end in [`FUEL`] statements; what it did until then stays done.
pub fn run(
    element: &Element,
    block: &[Stmt],
    frame: &mut Frame,
    events: &mut Vec<Event>,
) -> Result<(), Endless> {
    let mut walk = Walk { element, frame, events, fuel: FUEL };
    walk.block(block)?;
    Ok(())
}

impl Walk<'_> {
    fn block(&mut self, block: &[Stmt]) -> Result<Flow, Endless> {
        for statement in block {
            if let Flow::Leave(label) = self.statement(statement)? {
                return Ok(Flow::Leave(label));
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, statement: &Stmt) -> Result<Flow, Endless> {
        if self.fuel == 0 {
            let (element, span) = (self.element.name.clone(), self.element.span);
            return Err(Endless { element, span });
        }
        self.fuel -= 1;
        match statement {
            Stmt::Set { place, value } => {
                let result = self.value(value);
                if let Some(offset) = self.offset(place) {
                    let bits = value.bits;
                    insert(self.frame.var_mut(self.element, place.var), offset, bits, result);
                }
            }
            Stmt::Copy { to, from, bits } => {
                let mut held = vec![0; words(*bits)];
                if let Some(offset) = self.offset(from) {
                    let source = self.frame.var(self.element, from.var);
                    copy(source, offset, &mut held, 0, *bits);
                }
                if let Some(offset) = self.offset(to) {
                    let target = self.frame.var_mut(self.element, to.var);
                    copy(&held, 0, target, offset, *bits);
                }
            }
            Stmt::Clear(var) => self.frame.var_mut(self.element, *var).fill(0),
            Stmt::Read { to, mem, index, offset, bits } => {
                let mut held = vec![0; words(*bits)];
                if let Some(first) = self.entry(*mem, index) {
                    let per = words(self.element.mem(*mem).bits);
                    let entry = &self.frame.mems[mem.0 as usize][first..first + per];
                    copy(entry, *offset, &mut held, 0, *bits);
                }
                copy(&held, 0, self.frame.var_mut(self.element, *to), 0, *bits);
            }
            Stmt::Write { mem, index, offset, bits, from } => {
                if let Some(first) = self.entry(*mem, index) {
                    let per = words(self.element.mem(*mem).bits);
                    let held = self.frame.var(self.element, *from).to_vec();
                    let entry = &mut self.frame.mems[mem.0 as usize][first..first + per];
                    copy(&held, 0, entry, *offset, *bits);
                }
            }
            Stmt::If { condition, then, otherwise } => {
                let taken = if self.value(condition) != 0 { then } else { otherwise };
                return self.block(taken);
            }
            Stmt::Loop { label, body, .. } => loop {
                match self.block(body)? {
                    Flow::Next => {}
                    Flow::Leave(left) if left == *label => break,
                    other => return Ok(other),
                }
                if self.fuel == 0 {
                    let (element, span) = (self.element.name.clone(), self.element.span);
                    return Err(Endless { element, span });
                }
                self.fuel -= 1;
            },
            Stmt::Scope { label, body } => match self.block(body)? {
                Flow::Leave(left) if left != *label => return Ok(Flow::Leave(left)),
                _ => {}
            },
            Stmt::Leave(label) => return Ok(Flow::Leave(*label)),
            Stmt::Async(body) => return self.block(body),
            Stmt::Print { format, values } => {
                let values: Vec<u64> = values.iter().map(|value| self.value(value)).collect();
                self.events.push(Event::Text(formatted(format, &values)));
            }
            Stmt::Breakpoint(number) => self.events.push(Event::Breakpoint(*number)),
        }
        Ok(Flow::Next)
    }

    /// The first bit of a place; none past the end of an array.
    fn offset(&mut self, place: &Place) -> Option<u32> {
        let mut offset = place.offset;
        for index in &place.index {
            let at = self.value(&index.at);
            if at >= u64::from(index.count) {
                return None;
            }
            offset += u32::try_from(at).ok()? * index.stride;
        }
        Some(offset)
    }

    /// The first word of an entry; none past the end.
    fn entry(&mut self, mem: MemId, index: &[Expr]) -> Option<usize> {
        let element = self.element;
        let memory = element.mem(mem);
        let mut at = 0_usize;
        for (size, index) in memory.dimensions.iter().zip(index) {
            let value = self.value(index);
            if value >= u64::from(*size) {
                return None;
            }
            at = at * *size as usize + usize::try_from(value).ok()?;
        }
        Some(at * words(memory.bits))
    }

    fn value(&mut self, expr: &Expr) -> u64 {
        match &expr.kind {
            ExprKind::Constant(value) => *value,
            ExprKind::Get(place) => match self.offset(place) {
                Some(offset) => extract(self.frame.var(self.element, place.var), offset, expr.bits),
                None => 0,
            },
            ExprKind::Unary(operator, a) => operator.apply(self.value(a), expr.bits),
            ExprKind::Binary(operator, a, b) => {
                let (x, y) = (self.value(a), self.value(b));
                operator.apply(x, y, a.bits)
            }
            ExprKind::Select(condition, a, b) => {
                if self.value(condition) != 0 {
                    self.value(a)
                } else {
                    self.value(b)
                }
            }
            ExprKind::Resize(a) => self.value(a) & mask(expr.bits),
            ExprKind::Extract(a, offset) => {
                let value = self.value(a);
                (if *offset < 64 { value >> offset } else { 0 }) & mask(expr.bits)
            }
        }
    }
}

/// `%d` and `%u` in tens, `%x` in sixteens, `%%` itself.
#[must_use]
pub fn formatted(format: &str, values: &[u64]) -> String {
    let mut text = String::new();
    let mut values = values.iter();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        match chars.next() {
            Some('%') => text.push('%'),
            Some('x') => text.push_str(&format!("{:x}", values.next().unwrap_or(&0))),
            Some(_) => text.push_str(&values.next().unwrap_or(&0).to_string()),
            None => {}
        }
    }
    text
}
