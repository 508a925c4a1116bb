//! Statements.

use std::collections::HashMap;

use beeline_syntax::ast::{self, ExpressionKind, Initial, StatementKind, Storage};
use beeline_syntax::{Diagnostic, Span};

use super::element::{Binding, Failed, Lower, Lowered, Value};
use super::types::Type;
use super::world::{constant_of, dimension, resolve};
use crate::tree::{Expr, Place, Stmt};

impl Lower<'_> {
    /// Lowers statements in a scope of their own.
    pub(super) fn block(&mut self, body: &[ast::Statement]) -> Lowered<Vec<Stmt>> {
        self.scopes.push(HashMap::new());
        let result = self.nested(|lower| lower.sequence(body));
        self.scopes.pop();
        result
    }

    /// Lowers statements into the current block and scope.
    pub(super) fn sequence(&mut self, body: &[ast::Statement]) -> Lowered<()> {
        let mut failed = false;
        for statement in body {
            failed |= self.statement(statement).is_err();
        }
        if failed { Err(Failed) } else { Ok(()) }
    }

    fn statement(&mut self, statement: &ast::Statement) -> Lowered<()> {
        match &statement.kind {
            StatementKind::Declare(variable) => self.declare(variable),
            StatementKind::Assign { target, operator, value } => {
                self.assign(target, operator, value)
            }
            StatementKind::Call(call) => self.expression(call).map(|_| ()),
            StatementKind::If { condition, then, otherwise } => {
                let condition = self.truth(condition)?;
                match condition.known() {
                    Some(0) => self.inline_block(otherwise),
                    Some(_) => self.inline_block(then),
                    None => {
                        let then = self.block(then);
                        let otherwise = self.block(otherwise);
                        self.emit(Stmt::If { condition, then: then?, otherwise: otherwise? })
                    }
                }
            }
            StatementKind::Loop { .. } => self.loop_statement(statement),
            StatementKind::Switch { value, arms } => self.switch(value, arms),
            StatementKind::Block(body, pragmas) => {
                self.independent += u32::from(pragmas.ivdep);
                let result = self.inline_block(body);
                self.independent -= u32::from(pragmas.ivdep);
                result
            }
            StatementKind::Async(body) => {
                if self.in_signal {
                    return self.fail("bad-async", statement.span, ".async belongs in .handler");
                }
                let body = self.block(body)?;
                self.emit(Stmt::Async(body))
            }
            StatementKind::Break => match self.loops.last() {
                Some((label, _)) => {
                    let label = *label;
                    self.emit(Stmt::Leave(label))
                }
                None => self.fail("no-loop", statement.span, "break stands in a loop or switch"),
            },
            StatementKind::Continue => {
                match self.loops.iter().rev().find_map(|(_, again)| *again) {
                    Some(label) => self.emit(Stmt::Leave(label)),
                    None => self.fail("no-loop", statement.span, "continue stands in a loop"),
                }
            }
            StatementKind::Return(value) => self.return_statement(value.as_ref(), statement.span),
        }
    }

    /// A block whose statements join the current one.
    fn inline_block(&mut self, body: &[ast::Statement]) -> Lowered<()> {
        self.scopes.push(HashMap::new());
        let result = self.sequence(body);
        self.scopes.pop();
        result
    }

    fn return_statement(&mut self, value: Option<&ast::Expression>, span: Span) -> Lowered<()> {
        let Some(returns) = self.returns.clone() else {
            return self.fail("bad-return", span, "return has no place here");
        };
        match (value, &returns.result) {
            (Some(value), Some((result, ty))) => {
                let value = self.expression(value)?;
                self.store(Value::Place(Place::whole(*result), ty.clone()), value, span)?;
            }
            (Some(value), None) if returns.handler => {
                let next = self.element.next_ports;
                let bits = self.element.var(next).bits;
                let value = self.scalar(value)?.resize(bits);
                self.emit(Stmt::Set { place: Place::whole(next), value })?;
            }
            (None, None) => {}
            (Some(value), None) => {
                return self.fail("bad-return", value.span, "nothing is returned here");
            }
            (None, Some((_, ty))) => {
                let message = format!("a value of type {} must be returned", self.world.show(ty));
                return self.fail("bad-return", span, message);
            }
        }
        self.emit(Stmt::Leave(returns.label))
    }

    fn declare(&mut self, variable: &ast::Variable) -> Lowered<()> {
        let constants = self.constants();
        let local = |n: &str| constants.get(n).copied();
        let name = &variable.name;
        if variable.storage == Storage::Constant && variable.dimensions.is_empty() {
            let constant = constant_of(self.world, variable, &local, self.found).ok_or(Failed)?;
            let bits = self.world.bits(&constant.ty);
            if let Some(scope) = self.scopes.last_mut() {
                let binding = Binding::Number(constant.values[0], bits.max(32));
                scope.insert(name.text.clone(), binding);
            }
            return Ok(());
        }
        let mut ty = resolve(self.world, &variable.ty, &local, self.found).ok_or(Failed)?;
        if ty == Type::Void {
            return self.fail("unknown-type", name.span, "a variable cannot be void");
        }
        for size in variable.dimensions.iter().rev() {
            let count = dimension(self.world, size, &local, self.found).ok_or(Failed)?;
            ty = Type::Array(Box::new(ty), count);
        }
        if self.scopes.last().is_some_and(|scope| scope.contains_key(&name.text)) {
            let message = format!("a second variable named {:?} in this block", name.text);
            return self.fail("twice", name.span, message);
        }
        // The value is lowered before the name is known: `uint x = x;` means the outer one.
        let value = match &variable.initial {
            Some(Initial::Value(value)) => Some((self.expression(value)?, value.span)),
            _ => None,
        };
        let id = self.local(name, &ty, variable.storage)?;
        match (&variable.initial, value) {
            (_, Some((value, span))) => self.store(Value::Place(Place::whole(id), ty), value, span),
            (Some(Initial::List(list)), None) => {
                self.emit(Stmt::Clear(id))?;
                let Type::Array(inner, count) = &ty else {
                    return self.fail("type", name.span, "only an array takes a list");
                };
                if list.len() > *count as usize {
                    let message = format!("{} values for {count} entries", list.len());
                    return self.fail("type", name.span, message);
                }
                let stride = self.world.bits(inner);
                for (at, entry) in (0_u32..).zip(list) {
                    let value = self.expression(entry)?;
                    let place = Place { var: id, offset: at * stride, index: Vec::new() };
                    self.store(Value::Place(place, (**inner).clone()), value, entry.span)?;
                }
                Ok(())
            }
            _ => self.emit(Stmt::Clear(id)),
        }
    }

    fn assign(
        &mut self,
        target: &ast::Expression,
        operator: &'static str,
        value: &ast::Expression,
    ) -> Lowered<()> {
        let value = if operator.is_empty() {
            self.expression(value)?
        } else {
            let kind =
                ExpressionKind::Binary(operator, Box::new(target.clone()), Box::new(value.clone()));
            self.expression(&ast::Expression { kind, span: target.span.to(value.span) })?
        };
        let to = self.place(target)?;
        self.store(to, value, target.span)
    }

    /// Writes `value` into `to`.
    pub(super) fn store(&mut self, to: Value, value: Value, span: Span) -> Lowered<()> {
        match to {
            Value::Place(place, ty) => match ty {
                Type::Bool | Type::Scalar(_) => {
                    let scalar = self.as_scalar(value, span)?;
                    let value = self.fit(scalar, &ty);
                    self.emit(Stmt::Set { place, value })
                }
                _ => {
                    let from = self.as_place(value, &ty, span)?;
                    let bits = self.world.bits(&ty);
                    self.emit(Stmt::Copy { to: place, from, bits })
                }
            },
            Value::Memory { mem, index, offset, inside, ty } => {
                self.store_memory((mem, index, offset, inside, ty), value, span)
            }
            Value::Scalar(_) | Value::Void => {
                self.fail("not-a-place", span, "this cannot be assigned to")
            }
        }
    }

    fn store_memory(
        &mut self,
        to: (crate::tree::MemId, Vec<Expr>, u32, Vec<crate::tree::Index>, Type),
        value: Value,
        span: Span,
    ) -> Lowered<()> {
        let (mem, index, offset, inside, ty) = to;
        let memory = self.element.mem(mem);
        if memory.constant {
            let name = memory.name.clone();
            return self.fail("not-a-place", span, format!("{name:?} is a constant table"));
        }
        if index.len() < memory.dimensions.len() {
            return self.fail("type", span, "an index is missing");
        }
        let bits = self.world.bits(&ty);
        if inside.is_empty() {
            let from = self.temporary(bits);
            self.store(Value::Place(Place::whole(from), ty), value, span)?;
            return self.emit(Stmt::Write { mem, index, offset, bits, from });
        }
        // An array inside an entry, indexed at run time: read the entry, change it, write it back.
        let bits = self.element.mem(mem).bits;
        let from = self.temporary(bits);
        self.emit(Stmt::Read { to: from, mem, index: index.clone(), offset: 0, bits })?;
        self.store(Value::Place(Place { var: from, offset, index: inside }, ty), value, span)?;
        self.emit(Stmt::Write { mem, index, offset: 0, bits, from })
    }

    fn switch(
        &mut self,
        value: &ast::Expression,
        arms: &[(Vec<ast::Expression>, bool, Vec<ast::Statement>)],
    ) -> Lowered<()> {
        let span = value.span;
        let value = self.scalar(value)?;
        let bits = value.bits;
        let held = self.temporary(bits);
        self.emit(Stmt::Set { place: Place::whole(held), value })?;
        let label = self.element.add_label();
        self.loops.push((label, None));
        let body = self.nested(|lower| {
            let mut failed = false;
            let mut default = None;
            for (labels, is_default, body) in arms {
                if *is_default {
                    if default.is_some() {
                        lower.found.push(Diagnostic::error("twice", span, "a second default"));
                    }
                    default = Some(body);
                }
                let mut condition = Expr::constant(0, 1);
                for label in labels {
                    let known = lower.scalar(label)?;
                    let Some(known) = known.known() else {
                        return lower.fail("not-constant", label.span, "a case is a constant");
                    };
                    let equal = Expr::binary(
                        crate::tree::Binary::Equal,
                        Expr::get(held, bits),
                        Expr::constant(known, bits),
                    );
                    condition = if condition.known() == Some(0) {
                        equal
                    } else {
                        Expr::binary(crate::tree::Binary::Or, condition, equal)
                    };
                }
                if condition.known() == Some(0) {
                    continue;
                }
                let then = lower.nested(|lower| {
                    lower.inline_block(body)?;
                    lower.emit(Stmt::Leave(label))
                });
                match then {
                    Ok(then) => {
                        lower.emit(Stmt::If { condition, then, otherwise: Vec::new() })?;
                    }
                    Err(Failed) => failed = true,
                }
            }
            if let Some(body) = default {
                failed |= lower.inline_block(body).is_err();
            }
            if failed { Err(Failed) } else { Ok(()) }
        });
        self.loops.pop();
        self.emit(Stmt::Scope { label, body: body? })
    }
}
