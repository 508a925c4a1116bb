//! Copies of short loops, and constants known when code is made.
//!
//! An array that only constants index can lie in registers; one that a loop's counter indexes lies
//! in memory. So a loop with a bound is written out where its copies stay short, with the counter's
//! value in each copy, and branches that a constant decides are decided here.
//!
//! Invariant: the result means what the block meant. Only local variables are followed, which are
//! written before they are read in each call, and flags of ports whose value at the beginning is given
//! ([`fold_given`]): nothing outside the block can change either.

use std::collections::{BTreeSet, HashMap};

use beeline_ir::interpreter::extract;
use beeline_ir::tree::{
    Element, Expr, ExprKind, Label, LoopInfo, Place, Stmt, VarId, VarKind, walk,
};

/// Statements that the copies of one loop may make.
const LARGEST: u64 = 600;

/// Local variables of at most 64 bits whose value is known.
pub(crate) type Known = HashMap<VarId, u64>;

/// Folds a block of `element`.
pub(crate) fn fold(element: &Element, block: &[Stmt]) -> Vec<Stmt> {
    fold_given(element, block, &Known::new()).0
}

/// Folds a block at whose beginning some flags have known values; what is known at its end.
pub(crate) fn fold_given(element: &Element, block: &[Stmt], given: &Known) -> (Vec<Stmt>, Known) {
    let flags = given.keys().copied().collect();
    let mut folder = Folder { element, flags, known: given.clone(), left: HashMap::new() };
    let mut out = Vec::new();
    folder.block(block, &mut out);
    (out, folder.known)
}

struct Folder<'a> {
    element: &'a Element,
    /// Followed beside local variables.
    flags: BTreeSet<VarId>,
    known: Known,
    /// What is known wherever control leaves a label.
    left: HashMap<Label, Known>,
}

/// What both know.
fn common(a: Known, b: &Known) -> Known {
    a.into_iter().filter(|(var, value)| b.get(var) == Some(value)).collect()
}

impl Folder<'_> {
    /// Folds statements; false where control does not reach their end.
    fn block(&mut self, block: &[Stmt], out: &mut Vec<Stmt>) -> bool {
        block.iter().all(|stmt| self.statement(stmt, out))
    }

    fn forget(&mut self, var: VarId) {
        self.known.remove(&var);
    }

    fn learn(&mut self, var: VarId, value: u64) {
        let declared = self.element.var(var);
        let followed = declared.kind == VarKind::Local || self.flags.contains(&var);
        if followed && declared.bits <= 64 {
            self.known.insert(var, value);
        }
    }

    fn statement(&mut self, stmt: &Stmt, out: &mut Vec<Stmt>) -> bool {
        match stmt {
            Stmt::Set { place, value } => {
                let value = self.value(value);
                // Past the end of an array nothing is written.
                let Some(place) = self.place(place) else { return true };
                let whole = place.index.is_empty()
                    && place.offset == 0
                    && value.bits == self.element.var(place.var).bits;
                match value.known() {
                    Some(known) if whole => self.learn(place.var, known),
                    _ => self.forget(place.var),
                }
                out.push(Stmt::Set { place, value });
            }
            Stmt::Copy { to, from, bits } => {
                let from = self.place(from).unwrap_or_else(|| from.clone());
                let Some(to) = self.place(to) else { return true };
                self.forget(to.var);
                out.push(Stmt::Copy { to, from, bits: *bits });
            }
            Stmt::Clear(var) => {
                self.learn(*var, 0);
                out.push(stmt.clone());
            }
            Stmt::Read { to, mem, index, offset, bits } => {
                let index = index.iter().map(|at| self.value(at)).collect();
                self.forget(*to);
                let (to, mem, offset, bits) = (*to, *mem, *offset, *bits);
                out.push(Stmt::Read { to, mem, index, offset, bits });
            }
            Stmt::Write { mem, index, offset, bits, from } => {
                let index = index.iter().map(|at| self.value(at)).collect();
                let (mem, offset, bits, from) = (*mem, *offset, *bits, *from);
                out.push(Stmt::Write { mem, index, offset, bits, from });
            }
            Stmt::If { condition, then, otherwise } => {
                let condition = self.value(condition);
                if let Some(known) = condition.known() {
                    return self.block(if known == 0 { otherwise } else { then }, out);
                }
                let before = self.known.clone();
                let (mut yes, mut no) = (Vec::new(), Vec::new());
                let reached_yes = self.block(then, &mut yes);
                let after_yes = std::mem::replace(&mut self.known, before);
                let reached_no = self.block(otherwise, &mut no);
                if reached_yes {
                    let after_no = std::mem::take(&mut self.known);
                    self.known = if reached_no { common(after_no, &after_yes) } else { after_yes };
                }
                out.push(Stmt::If { condition, then: yes, otherwise: no });
                return reached_yes || reached_no;
            }
            Stmt::Loop { label, body, info } => return self.turns(*label, body, info, out),
            Stmt::Scope { label, body } => {
                let mut inner = Vec::new();
                let reached = self.block(body, &mut inner);
                return self.end(*label, inner, reached, out);
            }
            Stmt::Leave(label) => {
                let known = match self.left.remove(label) {
                    Some(other) => common(other, &self.known),
                    None => self.known.clone(),
                };
                self.left.insert(*label, known);
                out.push(stmt.clone());
                return false;
            }
            Stmt::Async(body) => return self.block(body, out),
            // Machine code has no log.
            Stmt::Print { .. } | Stmt::Breakpoint(_) => {}
        }
        true
    }

    /// Ends a scope: what is known is what is known on every way out of it.
    fn end(&mut self, label: Label, inner: Vec<Stmt>, reached: bool, out: &mut Vec<Stmt>) -> bool {
        let Some(left) = self.left.remove(&label) else {
            out.extend(inner);
            return reached;
        };
        self.known = if reached { common(std::mem::take(&mut self.known), &left) } else { left };
        out.push(Stmt::Scope { label, body: inner });
        true
    }

    fn turns(&mut self, label: Label, body: &[Stmt], info: &LoopInfo, out: &mut Vec<Stmt>) -> bool {
        if let Some(bound) = info.bound
            && size(body).saturating_mul(u64::from(bound)) <= LARGEST
        {
            let mut copies = Vec::new();
            let mut reached = true;
            for _ in 0..bound {
                reached = self.block(body, &mut copies);
                if !reached {
                    break;
                }
            }
            return self.end(label, copies, reached, out);
        }
        // What a turn writes is not known when the next begins.
        let mut written = Vec::new();
        walk(body, &mut |stmt| match stmt {
            Stmt::Set { place, .. } => written.push(place.var),
            Stmt::Copy { to, .. } => written.push(to.var),
            Stmt::Clear(var) | Stmt::Read { to: var, .. } => written.push(*var),
            _ => {}
        });
        for var in written {
            self.forget(var);
        }
        let mut inner = Vec::new();
        self.block(body, &mut inner);
        out.push(Stmt::Loop { label, body: inner, info: info.clone() });
        match self.left.remove(&label) {
            Some(left) => {
                self.known = left;
                true
            }
            None => false,
        }
    }

    /// A place with its constant indices added up; none past the end of an array.
    fn place(&self, place: &Place) -> Option<Place> {
        let mut folded = Place { var: place.var, offset: place.offset, index: Vec::new() };
        for index in &place.index {
            let at = self.value(&index.at);
            match at.known() {
                Some(at) if at >= u64::from(index.count) => return None,
                Some(at) => folded.offset += u32::try_from(at).ok()? * index.stride,
                None => {
                    let mut index = index.clone();
                    index.at = at;
                    folded.index.push(index);
                }
            }
        }
        Some(folded)
    }

    fn value(&self, expr: &Expr) -> Expr {
        let bits = expr.bits;
        let kind = match &expr.kind {
            ExprKind::Constant(_) => return expr.clone(),
            ExprKind::Get(place) => {
                let Some(place) = self.place(place) else { return Expr::constant(0, bits) };
                if place.index.is_empty()
                    && let Some(value) = self.known.get(&place.var)
                {
                    return Expr::constant(extract(&[*value], place.offset, bits), bits);
                }
                ExprKind::Get(place)
            }
            ExprKind::Unary(operator, a) => {
                let a = self.value(a);
                if let Some(known) = a.known() {
                    return Expr::constant(operator.apply(known, bits), bits);
                }
                ExprKind::Unary(*operator, Box::new(a))
            }
            ExprKind::Binary(operator, a, b) => {
                return Expr::binary(*operator, self.value(a), self.value(b));
            }
            ExprKind::Select(condition, a, b) => {
                let condition = self.value(condition);
                match condition.known() {
                    Some(0) => return self.value(b),
                    Some(_) => return self.value(a),
                    None => {
                        let (a, b) = (self.value(a), self.value(b));
                        ExprKind::Select(Box::new(condition), Box::new(a), Box::new(b))
                    }
                }
            }
            ExprKind::Resize(a) => {
                let a = self.value(a);
                if let Some(known) = a.known() {
                    return Expr::constant(known, bits);
                }
                ExprKind::Resize(Box::new(a))
            }
            ExprKind::Extract(a, offset) => {
                let a = self.value(a);
                if let Some(known) = a.known() {
                    let moved = if *offset < 64 { known >> offset } else { 0 };
                    return Expr::constant(moved, bits);
                }
                ExprKind::Extract(Box::new(a), *offset)
            }
        };
        Expr { bits, kind }
    }
}

/// Statements of a block, with the copies of the loops in it.
pub(crate) fn size(block: &[Stmt]) -> u64 {
    let each = |stmt: &Stmt| match stmt {
        Stmt::If { then, otherwise, .. } => 1 + size(then) + size(otherwise),
        Stmt::Scope { body, .. } | Stmt::Async(body) => 1 + size(body),
        Stmt::Loop { body, info, .. } => {
            let turn = size(body);
            let all = turn.saturating_mul(u64::from(info.bound.unwrap_or(1)));
            1 + if all <= LARGEST { all } else { turn }
        }
        _ => 1,
    };
    block.iter().map(each).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline_ir::tree::{Binary, Index};

    const COUNTER: VarId = VarId(0);
    const ARRAY: VarId = VarId(1);
    const SUM: VarId = VarId(2);

    /// A counter, an array of four bytes and a sum in state.
    fn element() -> Element {
        let mut element = Element {
            name: "Test".to_owned(),
            parameters: String::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            vars: Vec::new(),
            mems: Vec::new(),
            init: Vec::new(),
            handler: Vec::new(),
            signal: None,
            in_valid: Vec::new(),
            in_data: Vec::new(),
            out_set: Vec::new(),
            out_data: Vec::new(),
            next_ports: SUM,
            sig_in: SUM,
            sig_out: SUM,
            labels: 0,
            span: Default::default(),
            lines: 0,
        };
        element.add_var("counter", 8, VarKind::Local);
        element.add_var("array", 32, VarKind::Local);
        element.add_var("sum", 8, VarKind::State);
        element
    }

    fn set(var: VarId, value: Expr) -> Stmt {
        Stmt::Set { place: Place::whole(var), value }
    }

    /// `for (counter = 0; counter < limit; counter++) sum += array[counter]`.
    fn loop_to(limit: Expr, bound: u32) -> Vec<Stmt> {
        let label = Label(1);
        let counter = || Expr::get(COUNTER, 8);
        let over = Expr::binary(Binary::LessEqual, limit, counter());
        let index = vec![Index { at: counter(), stride: 8, count: 4 }];
        let entry = Expr { bits: 8, kind: ExprKind::Get(Place { var: ARRAY, offset: 0, index }) };
        let body = vec![
            Stmt::If { condition: over, then: vec![Stmt::Leave(label)], otherwise: Vec::new() },
            set(SUM, Expr::binary(Binary::Add, Expr::get(SUM, 8), entry)),
            set(COUNTER, Expr::binary(Binary::Add, counter(), Expr::constant(1, 8))),
        ];
        let info = LoopInfo { bound: Some(bound), exact: true, ..LoopInfo::default() };
        vec![set(COUNTER, Expr::constant(0, 8)), Stmt::Loop { label, body, info }]
    }

    /// First bits of the array's entries that a block reads; none for one that is not constant.
    fn entries(block: &[Stmt]) -> Vec<Option<u32>> {
        let mut list = Vec::new();
        walk(block, &mut |stmt| {
            beeline_ir::tree::expressions(stmt, &mut |expr| {
                if let ExprKind::Get(place) = &expr.kind
                    && place.var == ARRAY
                {
                    list.push(place.index.is_empty().then_some(place.offset));
                }
            });
        });
        list
    }

    #[test]
    fn a_counted_loop_becomes_copies_whose_indices_are_constants() {
        let folded = fold(&element(), &loop_to(Expr::constant(4, 8), 4));
        assert_eq!(entries(&folded), [Some(0), Some(8), Some(16), Some(24)]);
        let mut branches = 0;
        walk(&folded, &mut |stmt| {
            branches += u32::from(matches!(stmt, Stmt::If { .. } | Stmt::Loop { .. }));
        });
        assert_eq!(branches, 0, "{folded:?}");
    }

    #[test]
    fn entries_past_the_end_of_an_array_are_zero() {
        let folded = fold(&element(), &loop_to(Expr::constant(6, 8), 6));
        assert_eq!(entries(&folded), [Some(0), Some(8), Some(16), Some(24)]);
    }

    #[test]
    fn a_loop_to_a_variable_keeps_its_branches_and_forgets_the_counter_after_it() {
        let mut block = loop_to(Expr::get(SUM, 8), 4);
        block.push(set(SUM, Expr::get(COUNTER, 8)));
        let folded = fold(&element(), &block);
        assert_eq!(entries(&folded).len(), 4);
        let last = folded.last();
        assert!(
            matches!(last, Some(Stmt::Set { value, .. }) if value.known().is_none()),
            "{last:?}"
        );
    }

    #[test]
    fn a_long_loop_stays_a_loop_and_its_counter_is_not_taken_for_a_constant() {
        let folded = fold(&element(), &loop_to(Expr::constant(200, 8), 250));
        assert_eq!(entries(&folded), [None]);
    }

    #[test]
    fn a_flag_that_is_given_decides_branches_until_it_is_written() {
        let flag = SUM;
        let asks = |value| Stmt::If {
            condition: Expr::binary(Binary::Equal, Expr::get(flag, 8), Expr::constant(1, 8)),
            then: vec![set(COUNTER, Expr::constant(value, 8))],
            otherwise: vec![set(COUNTER, Expr::constant(value + 1, 8))],
        };
        let block = [asks(10), set(flag, Expr::constant(0, 8)), asks(20)];
        let (folded, known) = fold_given(&element(), &block, &Known::from([(flag, 1)]));
        let values: Vec<Option<u64>> = folded
            .iter()
            .map(|stmt| match stmt {
                Stmt::Set { value, .. } => value.known(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(values, [Some(10), Some(0), Some(21)]);
        assert_eq!((known.get(&flag), known.get(&COUNTER)), (Some(&0), Some(&21)));
        // Where a branch that is not decided writes it, it is not known any more.
        let condition = Expr::get(ARRAY, 8);
        let writes = Stmt::If {
            condition,
            then: vec![set(flag, Expr::constant(0, 8))],
            otherwise: Vec::new(),
        };
        let (folded, known) =
            fold_given(&element(), &[writes, asks(30)], &Known::from([(flag, 1)]));
        assert!(matches!(&folded[1], Stmt::If { .. }), "{folded:?}");
        assert_eq!(known.get(&flag), None);
    }

    #[test]
    fn state_is_not_followed() {
        let block = [set(SUM, Expr::constant(3, 8)), set(COUNTER, Expr::get(SUM, 8))];
        let folded = fold(&element(), &block);
        assert!(matches!(&folded[1], Stmt::Set { value, .. } if value.known().is_none()));
    }
}
