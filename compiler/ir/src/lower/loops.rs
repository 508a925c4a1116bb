//! Loops, and how many turns they take.
//!
//! A loop that counts from a constant to a constant by a constant takes a known number of turns. A
//! bound also comes from an upper limit that cannot exceed some value, from the size of an array
//! that the iterator indexes, and from `#pragma max_iter`. The last two are part of the meaning: a
//! loop ends after that many turns in every back end.

use beeline_syntax::ast::{self, ExpressionKind, Pragmas, StatementKind};

use super::element::{Binding, Failed, Lower, Lowered};
use super::expressions::assigned;
use super::types::Type;
use crate::tree::{Binary, Expr, LoopInfo, Place, Stmt, VarKind, mask};

impl Lower<'_> {
    pub(super) fn loop_statement(&mut self, statement: &ast::Statement) -> Lowered<()> {
        let StatementKind::Loop { before, condition, step, body, check_last, pragmas } =
            &statement.kind
        else {
            return Err(Failed);
        };
        self.scopes.push(std::collections::HashMap::new());
        let result = self.loop_parts(
            statement,
            before,
            condition.as_ref(),
            step,
            body,
            *check_last,
            pragmas,
        );
        self.scopes.pop();
        result
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one loop statement")]
    fn loop_parts(
        &mut self,
        statement: &ast::Statement,
        before: &[ast::Statement],
        condition: Option<&ast::Expression>,
        step: &[ast::Statement],
        body: &[ast::Statement],
        check_last: bool,
        pragmas: &Pragmas,
    ) -> Lowered<()> {
        let counter = counter(before, step, body);
        self.sequence(before)?;
        let exact = counter.as_ref().and_then(|c| self.turns(c, condition, body));
        let mut enforced = pragmas.max_iter;
        let mut bound = exact.map(|(turns, _)| turns);
        if bound.is_none()
            && enforced.is_none()
            && let Some(c) = &counter
            && let Some(size) = self.indexed(body, &c.name)
        {
            enforced = Some(size.saturating_sub(u32::try_from(c.from).unwrap_or(size)));
        }
        if let Some(most) = enforced {
            bound = Some(bound.map_or(most, |known| known.min(most)));
        }
        let turns = match (enforced, exact) {
            (Some(most), known) if known.is_none_or(|(turns, _)| turns > most) => {
                let turns = self.temporary(32);
                self.emit(Stmt::Clear(turns))?;
                Some((turns, most))
            }
            _ => None,
        };
        let label = self.element.add_label();
        let again = self.element.add_label();
        self.independent += u32::from(pragmas.ivdep);
        let turn = self.nested(|lower| {
            if let Some((turns, most)) = turns {
                let count = Expr::get(turns, 32);
                let most = Expr::constant(u64::from(most), 32);
                let over = Expr::binary(Binary::LessEqual, most, count.clone());
                let then = vec![Stmt::Leave(label)];
                lower.emit(Stmt::If { condition: over, then, otherwise: Vec::new() })?;
                let value = Expr::binary(Binary::Add, count, Expr::constant(1, 32));
                lower.emit(Stmt::Set { place: Place::whole(turns), value })?;
            }
            if let Some(condition) = condition.filter(|_| !check_last) {
                lower.leave_unless(condition, label)?;
            }
            lower.loops.push((label, Some(again)));
            let inner = lower.block(body);
            lower.loops.pop();
            lower.emit(Stmt::Scope { label: again, body: inner? })?;
            lower.sequence(step)?;
            if let Some(condition) = condition.filter(|_| check_last) {
                lower.leave_unless(condition, label)?;
            }
            Ok(())
        });
        self.independent -= u32::from(pragmas.ivdep);
        let info = LoopInfo {
            unroll: pragmas.unroll,
            flatten: pragmas.flatten,
            bound,
            exact: exact.is_some_and(|(_, exact)| exact) && enforced.is_none(),
            span: statement.span,
        };
        self.emit(Stmt::Loop { label, body: turn?, info })
    }

    fn leave_unless(
        &mut self,
        condition: &ast::Expression,
        label: crate::tree::Label,
    ) -> Lowered<()> {
        let over = self.truth(condition)?.falsehood();
        match over.known() {
            Some(0) => Ok(()),
            Some(_) => self.emit(Stmt::Leave(label)),
            None => {
                let then = vec![Stmt::Leave(label)];
                self.emit(Stmt::If { condition: over, then, otherwise: Vec::new() })
            }
        }
    }

    /// Turns of a counting loop: `(most, exact)`.
    fn turns(
        &mut self,
        counter: &Counter,
        condition: Option<&ast::Expression>,
        body: &[ast::Statement],
    ) -> Option<(u32, bool)> {
        let ExpressionKind::Binary(operator, left, right) = &condition?.kind else { return None };
        let ExpressionKind::Name(name) = &left.kind else { return None };
        if *name != counter.name || counter.step == 0 {
            return None;
        }
        let Some(Binding::Var(var, Type::Scalar(bits))) = self.lookup(name) else { return None };
        // A function sees the element's state, and may write it.
        let calls = self.calls(body) || self.calls_in(right);
        if calls && self.element.var(var).kind != VarKind::Local {
            return None;
        }
        // Lowered only to look at; its statements are thrown away.
        let emitted = self.emitted;
        let mut limit = None;
        let found = std::mem::take(self.found);
        let _ = self.nested(|lower| {
            limit = Some(lower.scalar(right)?);
            Ok(())
        });
        *self.found = found;
        self.emitted = emitted;
        let limit = limit?;
        let largest = limit.largest();
        let exact = limit.known().is_some();
        if largest > 1 << 20 {
            return None;
        }
        let span = match *operator {
            "<" if counter.up => largest.saturating_sub(counter.from),
            "<=" if counter.up => (largest + 1).saturating_sub(counter.from),
            "!=" if counter.up && exact => {
                let distance = largest.checked_sub(counter.from)?;
                if distance % counter.step != 0 {
                    return None;
                }
                distance
            }
            ">" if !counter.up && exact => counter.from.saturating_sub(largest),
            _ => return None,
        };
        // The value that ends the loop has to fit into the iterator: one that wraps goes on.
        let turns = span.div_ceil(counter.step);
        let way = turns.checked_mul(counter.step)?;
        let end =
            if counter.up { counter.from.checked_add(way) } else { counter.from.checked_sub(way) };
        if end? > mask(bits) || counter.from > mask(bits) || span > 1 << 20 {
            return None;
        }
        Some((u32::try_from(turns).ok()?, exact))
    }

    /// True where the statements call a function of the language.
    fn calls(&self, body: &[ast::Statement]) -> bool {
        let mut found = false;
        expressions(body, &mut |e| found |= self.is_call(e));
        found
    }

    /// True where the expression calls one.
    fn calls_in(&self, e: &ast::Expression) -> bool {
        let mut found = false;
        expression(e, &mut |e| found |= self.is_call(e));
        found
    }

    fn is_call(&self, e: &ast::Expression) -> bool {
        matches!(&e.kind, ExpressionKind::Call(name, ..)
            if self.world.functions.contains_key(&name.text))
    }

    /// The smallest array that the iterator indexes.
    fn indexed(&self, body: &[ast::Statement], name: &str) -> Option<u32> {
        let mut smallest: Option<u32> = None;
        expressions(body, &mut |e| {
            let ExpressionKind::Index(base, at) = &e.kind else { return };
            if !matches!(&at.kind, ExpressionKind::Name(n) if n == name) {
                return;
            }
            let size = match &base.kind {
                ExpressionKind::Name(array) => match self.lookup(array) {
                    Some(Binding::Mem(mem, _)) => self.element.mem(mem).dimensions.first().copied(),
                    Some(Binding::Var(_, Type::Array(_, n))) => Some(n),
                    _ => self
                        .world
                        .constants
                        .get(array)
                        .and_then(|constant| constant.dimensions.first().copied()),
                },
                ExpressionKind::Field(_, field) if field.text == "fdata" => Some(32),
                _ => None,
            };
            smallest = match (smallest, size) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        });
        smallest
    }
}

/// A loop's iterator.
struct Counter {
    name: String,
    from: u64,
    step: u64,
    up: bool,
}

fn counter(
    before: &[ast::Statement],
    step: &[ast::Statement],
    body: &[ast::Statement],
) -> Option<Counter> {
    let (name, from) = match &before.last()?.kind {
        StatementKind::Declare(variable) if variable.dimensions.is_empty() => {
            let ast::Initial::Value(value) = variable.initial.as_ref()? else { return None };
            (variable.name.text.clone(), value)
        }
        StatementKind::Assign { target, operator: "", value } => {
            let ExpressionKind::Name(name) = &target.kind else { return None };
            (name.clone(), value)
        }
        _ => return None,
    };
    let ExpressionKind::Number(from) = from.kind else { return None };
    let [only] = step else { return None };
    let StatementKind::Assign { target, operator, value } = &only.kind else { return None };
    let ExpressionKind::Name(stepped) = &target.kind else { return None };
    let ExpressionKind::Number(step) = value.kind else { return None };
    if *stepped != name || !["+", "-"].contains(operator) || assigned(body, &name) {
        return None;
    }
    Some(Counter { name, from, step, up: *operator == "+" })
}

/// Calls `look` with the expression and every one in it.
fn expression<'a>(e: &'a ast::Expression, look: &mut impl FnMut(&'a ast::Expression)) {
    look(e);
    match &e.kind {
        ExpressionKind::Index(base, at) => {
            expression(base, look);
            expression(at, look);
        }
        ExpressionKind::Field(a, _)
        | ExpressionKind::Cast(_, a)
        | ExpressionKind::Unary(_, a)
        | ExpressionKind::Slice(a, _, _) => expression(a, look),
        ExpressionKind::Binary(_, a, b) => {
            expression(a, look);
            expression(b, look);
        }
        ExpressionKind::Choose(a, b, c) => {
            expression(a, look);
            expression(b, look);
            expression(c, look);
        }
        ExpressionKind::Call(_, _, list) => list.iter().for_each(|a| expression(a, look)),
        ExpressionKind::Number(_)
        | ExpressionKind::Bool(_)
        | ExpressionKind::Text(_)
        | ExpressionKind::Name(_) => {}
    }
}

/// Calls `look` with every expression in the statements.
fn expressions<'a>(body: &'a [ast::Statement], look: &mut impl FnMut(&'a ast::Expression)) {
    for statement in body {
        match &statement.kind {
            StatementKind::Declare(variable) => match &variable.initial {
                Some(ast::Initial::Value(value)) => expression(value, look),
                Some(ast::Initial::List(list)) => list.iter().for_each(|e| expression(e, look)),
                None => {}
            },
            StatementKind::Assign { target, value, .. } => {
                expression(target, look);
                expression(value, look);
            }
            StatementKind::Call(call) => expression(call, look),
            StatementKind::If { condition, then, otherwise } => {
                expression(condition, look);
                expressions(then, look);
                expressions(otherwise, look);
            }
            StatementKind::Loop { before, condition, body, step, .. } => {
                expressions(before, look);
                if let Some(condition) = condition {
                    expression(condition, look);
                }
                expressions(body, look);
                expressions(step, look);
            }
            StatementKind::Switch { value, arms } => {
                expression(value, look);
                arms.iter().for_each(|(_, _, body)| expressions(body, look));
            }
            StatementKind::Block(body, _) | StatementKind::Async(body) => expressions(body, look),
            StatementKind::Return(Some(value)) => expression(value, look),
            StatementKind::Return(None) | StatementKind::Break | StatementKind::Continue => {}
        }
    }
}
