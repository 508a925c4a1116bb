//! Expressions.

use std::collections::HashMap;

use beeline_syntax::ast::{self, ExpressionKind};
use beeline_syntax::{Diagnostic, Span};

use super::element::{Binding, DEEPEST, Failed, Lower, Lowered, Return, Value};
use super::evaluate::operator_of;
use super::types::{Type, scalar};
use super::world::resolve;
use crate::tree::{Binary, Expr, ExprKind, Index, Place, Stmt, Unary, mask};

impl Lower<'_> {
    /// A number.
    pub(super) fn scalar(&mut self, expression: &ast::Expression) -> Lowered<Expr> {
        let value = self.expression(expression)?;
        self.as_scalar(value, expression.span)
    }

    /// One bit: is it not zero?
    pub(super) fn truth(&mut self, expression: &ast::Expression) -> Lowered<Expr> {
        Ok(self.scalar(expression)?.truth())
    }

    /// The value as a number.
    pub(super) fn as_scalar(&mut self, value: Value, span: Span) -> Lowered<Expr> {
        match value {
            Value::Scalar(expr) => Ok(expr),
            Value::Place(place, ty @ (Type::Bool | Type::Scalar(_))) => {
                Ok(Expr { bits: self.world.bits(&ty), kind: ExprKind::Get(place) })
            }
            Value::Memory { .. } => {
                let ty = self.type_of(&value);
                if !matches!(ty, Type::Bool | Type::Scalar(_)) {
                    let message = format!("a number is wanted, this is a {}", self.world.show(&ty));
                    return self.fail("type", span, message);
                }
                let place = self.as_place(value, &ty, span)?;
                Ok(Expr { bits: self.world.bits(&ty), kind: ExprKind::Get(place) })
            }
            Value::Place(_, ty) => {
                let message = format!("a number is wanted, this is a {}", self.world.show(&ty));
                self.fail("type", span, message)
            }
            Value::Void => self.fail("type", span, "a number is wanted, this has no value"),
        }
    }

    fn type_of(&self, value: &Value) -> Type {
        match value {
            Value::Scalar(expr) => Type::Scalar(expr.bits),
            Value::Place(_, ty) => ty.clone(),
            Value::Memory { mem, index, ty, .. } => {
                let dimensions = &self.element.mem(*mem).dimensions;
                dimensions[index.len()..]
                    .iter()
                    .rev()
                    .fold(ty.clone(), |inner, count| Type::Array(Box::new(inner), *count))
            }
            Value::Void => Type::Void,
        }
    }

    /// The value as part of a variable, of type `wanted`.
    pub(super) fn as_place(&mut self, value: Value, wanted: &Type, span: Span) -> Lowered<Place> {
        let ty = self.type_of(&value);
        let numbers = |ty: &Type| matches!(ty, Type::Bool | Type::Scalar(_));
        if ty != *wanted && !(numbers(&ty) && numbers(wanted)) {
            let message = format!(
                "a {} is wanted, this is a {}",
                self.world.show(wanted),
                self.world.show(&ty)
            );
            return self.fail("type", span, message);
        }
        match value {
            Value::Place(place, _) => Ok(place),
            Value::Scalar(value) => {
                let var = self.temporary(value.bits);
                self.emit(Stmt::Set { place: Place::whole(var), value })?;
                Ok(Place::whole(var))
            }
            Value::Memory { mem, index, offset, inside, ty } => {
                let memory = self.element.mem(mem);
                if index.len() < memory.dimensions.len() {
                    return self.fail("type", span, "an index is missing");
                }
                let entry = memory.bits;
                if self.independent > 0 {
                    self.element.mems[mem.0 as usize].independent = true;
                }
                if inside.is_empty() {
                    let bits = self.world.bits(&ty);
                    let to = self.temporary(bits);
                    self.emit(Stmt::Read { to, mem, index, offset, bits })?;
                    return Ok(Place::whole(to));
                }
                let to = self.temporary(entry);
                self.emit(Stmt::Read { to, mem, index, offset: 0, bits: entry })?;
                Ok(Place { var: to, offset, index: inside })
            }
            Value::Void => Err(Failed),
        }
    }

    /// The number as a value of that type.
    pub(super) fn fit(&self, value: Expr, ty: &Type) -> Expr {
        match ty {
            Type::Bool => value.truth(),
            _ => value.resize(self.world.bits(ty)),
        }
    }

    /// Keeps a number from what later statements of the same expression do.
    pub(super) fn hold(&mut self, mark: usize, value: Expr) -> Expr {
        if self.mark() == mark || value.known().is_some() {
            return value;
        }
        let bits = value.bits;
        let var = self.temporary(bits);
        self.insert(mark, Stmt::Set { place: Place::whole(var), value });
        Expr::get(var, bits)
    }

    /// A place that can be assigned to.
    pub(super) fn place(&mut self, target: &ast::Expression) -> Lowered<Value> {
        let value = self.expression(target)?;
        match value {
            Value::Place(..) | Value::Memory { .. } => Ok(value),
            _ => self.fail("not-a-place", target.span, "this cannot be assigned to"),
        }
    }

    /// Any expression.
    pub(super) fn expression(&mut self, expression: &ast::Expression) -> Lowered<Value> {
        let span = expression.span;
        match &expression.kind {
            ExpressionKind::Number(number) => {
                let bits = if *number > u64::from(u32::MAX) { 64 } else { 32 };
                Ok(Value::Scalar(Expr::constant(*number, bits)))
            }
            ExpressionKind::Bool(value) => Ok(Value::Scalar(Expr::constant(u64::from(*value), 1))),
            ExpressionKind::Text(_) => self.fail("type", span, "a text belongs in printf"),
            ExpressionKind::Name(name) => self.name(name, span),
            ExpressionKind::Field(base, field) => self.field(base, field),
            ExpressionKind::Index(base, at) => self.index(base, at),
            ExpressionKind::Slice(base, high, low) => self.slice(base, high, low, span),
            ExpressionKind::Call(name, template, arguments) => {
                self.call(name, template.as_deref(), arguments, span)
            }
            ExpressionKind::Cast(ty, inner) => {
                let constants = self.constants();
                let local = |n: &str| constants.get(n).copied();
                let ty = resolve(self.world, ty, &local, self.found).ok_or(Failed)?;
                let value = self.scalar(inner)?;
                if ty == Type::Void {
                    return Ok(Value::Void);
                }
                Ok(Value::Scalar(self.fit(value, &ty)))
            }
            ExpressionKind::Unary(operator, inner) => {
                let value = self.scalar(inner)?;
                let (operator, bits) = match *operator {
                    "!" => return Ok(Value::Scalar(value.falsehood())),
                    "~" => (Unary::Not, value.bits),
                    _ => (Unary::Negate, value.bits.max(32)),
                };
                let value = value.resize(bits);
                Ok(Value::Scalar(match value.known() {
                    Some(known) => Expr::constant(operator.apply(known, bits), bits),
                    None => Expr { bits, kind: ExprKind::Unary(operator, Box::new(value)) },
                }))
            }
            ExpressionKind::Binary(operator, a, b) => self.binary(operator, a, b),
            ExpressionKind::Choose(condition, a, b) => self.choose(condition, a, b),
        }
    }

    fn name(&mut self, name: &str, span: Span) -> Lowered<Value> {
        match self.lookup(name) {
            Some(Binding::Var(var, ty)) => return Ok(Value::Place(Place::whole(var), ty)),
            Some(Binding::Mem(mem, ty)) => {
                let (index, inside) = (Vec::new(), Vec::new());
                return Ok(Value::Memory { mem, index, offset: 0, inside, ty });
            }
            Some(Binding::Number(value, bits)) => {
                return Ok(Value::Scalar(Expr::constant(value, bits)));
            }
            Some(Binding::Port { index, .. }) => {
                return Ok(Value::Scalar(Expr::constant(1 << index, 32)));
            }
            None => {}
        }
        if name == "PORT_ALL" {
            return Ok(Value::Scalar(Expr::constant(u64::from(u32::MAX), 32)));
        }
        if let Some(constant) = self.world.constants.get(name) {
            if constant.dimensions.is_empty() {
                let bits = self.world.bits(&constant.ty).max(32);
                return Ok(Value::Scalar(Expr::constant(constant.values[0], bits)));
            }
            if let Some((mem, ty)) = self.table(name) {
                let (index, inside) = (Vec::new(), Vec::new());
                return Ok(Value::Memory { mem, index, offset: 0, inside, ty });
            }
        }
        let mut diagnostic =
            Diagnostic::error("unknown-name", span, format!("nothing is named {name:?} here"));
        if self.world.elements.contains_key(name) {
            diagnostic = diagnostic.help(
                "elements share no state: send a request over a channel and wait for the answer",
            );
        } else if self.world.functions.contains_key(name) {
            diagnostic = diagnostic.help("a function is called with parentheses");
        } else if let Some(near) = self.near(name) {
            diagnostic = diagnostic.help(format!("did you mean {near:?}?"));
        }
        self.found.push(diagnostic);
        Err(Failed)
    }

    /// A name in scope that differs by little.
    fn near(&self, name: &str) -> Option<String> {
        let close = |other: &str| {
            let same = name.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
            let ends = name.len().abs_diff(other.len());
            (same + 2 >= name.len() && ends <= 2 && same > 0) || other.eq_ignore_ascii_case(name)
        };
        let mut names: Vec<&String> =
            self.scopes.iter().flat_map(|scope| scope.keys()).filter(|n| close(n)).collect();
        names.sort();
        names.first().map(|n| (*n).clone())
    }

    fn field(&mut self, base: &ast::Expression, field: &ast::Name) -> Lowered<Value> {
        if let ExpressionKind::Name(name) = &base.kind
            && self.lookup(name).is_none()
            && self.world.elements.contains_key(name)
        {
            self.found.push(
                Diagnostic::error(
                    "foreign-state",
                    base.span.to(field.span),
                    format!("{name} is another element: its state cannot be reached"),
                )
                .help("send a request over a channel and wait for the answer"),
            );
            return Err(Failed);
        }
        let value = self.expression(base)?;
        let ty = self.type_of(&value);
        let Type::Record(at) = ty else {
            let message = format!("a {} has no fields", self.world.show(&ty));
            return self.fail("type", field.span, message);
        };
        let record = &self.world.records[at];
        let Some(found) = record.fields.iter().find(|f| f.name == field.text) else {
            let fields: Vec<&str> = record.fields.iter().map(|f| f.name.as_str()).collect();
            let help = format!("it has {}", fields.join(", "));
            let message = format!("{} has no field {:?}", record.name, field.text);
            self.found.push(Diagnostic::error("unknown-field", field.span, message).help(help));
            return Err(Failed);
        };
        let ty = found.ty.clone();
        let add = found.offset;
        Ok(match value {
            Value::Place(mut place, _) => {
                place.offset += add;
                Value::Place(place, ty)
            }
            Value::Memory { mem, index, offset, inside, .. } => {
                Value::Memory { mem, index, offset: offset + add, inside, ty }
            }
            other => other,
        })
    }

    fn index(&mut self, base: &ast::Expression, at: &ast::Expression) -> Lowered<Value> {
        let mark = self.mark();
        let value = self.expression(base)?;
        let at_span = at.span;
        let after = self.mark();
        let at = self.scalar(at)?;
        // An index inside the base keeps its value while this one is computed.
        let value =
            if self.mark() > after { self.hold_value(mark.max(after), value) } else { value };
        let Type::Array(inner, count) = self.type_of(&value) else {
            let ty = self.type_of(&value);
            let message = format!("a {} has no entries", self.world.show(&ty));
            return self.fail("type", base.span, message);
        };
        if at.known().is_some_and(|at| at >= u64::from(count)) {
            let message = format!("entry {} of {count}", at.known().unwrap_or(0));
            return self.fail("out-of-range", at_span, message);
        }
        Ok(match value {
            Value::Place(mut place, _) => {
                let stride = self.world.bits(&inner);
                match at.known() {
                    Some(known) => {
                        place.offset += u32::try_from(known).unwrap_or(0) * stride;
                    }
                    None => place.index.push(Index { at, stride, count }),
                }
                Value::Place(place, *inner)
            }
            Value::Memory { mem, mut index, mut offset, mut inside, ty } => {
                if index.len() < self.element.mem(mem).dimensions.len() {
                    index.push(at);
                    Value::Memory { mem, index, offset, inside, ty }
                } else {
                    let stride = self.world.bits(&inner);
                    match at.known() {
                        Some(known) => offset += u32::try_from(known).unwrap_or(0) * stride,
                        None => inside.push(Index { at, stride, count }),
                    }
                    Value::Memory { mem, index, offset, inside, ty: *inner }
                }
            }
            other => other,
        })
    }

    fn hold_value(&mut self, mark: usize, value: Value) -> Value {
        match value {
            Value::Place(mut place, ty) => {
                for index in &mut place.index {
                    index.at = self.hold(mark, index.at.clone());
                }
                Value::Place(place, ty)
            }
            Value::Memory { mem, mut index, offset, inside, ty } => {
                for at in &mut index {
                    *at = self.hold(mark, at.clone());
                }
                Value::Memory { mem, index, offset, inside, ty }
            }
            other => other,
        }
    }

    fn slice(
        &mut self,
        base: &ast::Expression,
        high: &ast::Expression,
        low: &ast::Expression,
        span: Span,
    ) -> Lowered<Value> {
        let value = self.expression(base)?;
        let high_value = self.scalar(high)?.known();
        let low_value = self.scalar(low)?.known();
        let (Some(high), Some(low)) = (high_value, low_value) else {
            return self.fail("not-constant", span, "the bounds of a slice are constants");
        };
        let ty = self.type_of(&value);
        let total = u64::from(self.world.bits(&ty));
        if high < low || high >= total || high - low >= 64 {
            let message = format!("bits {high} to {low} of {total}: at most 64 inside");
            return self.fail("out-of-range", span, message);
        }
        let low = u32::try_from(low).unwrap_or(0);
        let bits = u32::try_from(high).unwrap_or(0) - low + 1;
        match value {
            Value::Place(mut place, _) => {
                place.offset += low;
                Ok(Value::Place(place, Type::Scalar(bits)))
            }
            Value::Memory { mem, index, offset, inside, ty: Type::Scalar(_) | Type::Record(_) } => {
                let ty = Type::Scalar(bits);
                Ok(Value::Memory { mem, index, offset: offset + low, inside, ty })
            }
            Value::Scalar(inner) => Ok(Value::Scalar(match inner.known() {
                Some(known) => Expr::constant(known >> low, bits),
                None => Expr { bits, kind: ExprKind::Extract(Box::new(inner), low) },
            })),
            _ => self.fail("type", span, "this has no bits to slice"),
        }
    }

    fn binary(&mut self, symbol: &str, a: &ast::Expression, b: &ast::Expression) -> Lowered<Value> {
        if symbol == "&&" || symbol == "||" {
            return self.logical(symbol == "&&", a, b);
        }
        let Some((operator, swap)) = operator_of(symbol) else {
            return self.fail("syntax", a.span, "not an operator");
        };
        let left = self.scalar(a)?;
        let mark = self.mark();
        let right = self.scalar(b)?;
        let left = self.hold(mark, left);
        let (left, right) = if swap { (right, left) } else { (left, right) };
        let fits = |known: &Expr, other: &Expr| {
            known.known().is_some_and(|value| value & !mask(other.bits) == 0)
        };
        Ok(Value::Scalar(match operator {
            Binary::ShiftLeft | Binary::ShiftRight => {
                let result = left.bits.max(32);
                let bits = result.max(right.bits);
                Expr::binary(operator, left.resize(bits), right.resize(bits)).resize(result)
            }
            Binary::Add
            | Binary::Subtract
            | Binary::Multiply
            | Binary::Divide
            | Binary::Remainder => {
                let bits = left.bits.max(right.bits).max(32);
                Expr::binary(operator, left.resize(bits), right.resize(bits))
            }
            _ => {
                let bits = if fits(&left, &right) {
                    right.bits
                } else if fits(&right, &left) {
                    left.bits
                } else {
                    left.bits.max(right.bits)
                };
                Expr::binary(operator, left.resize(bits), right.resize(bits))
            }
        }))
    }

    /// `&&` and `||`: the right side's effects happen only where it decides.
    fn logical(&mut self, and: bool, a: &ast::Expression, b: &ast::Expression) -> Lowered<Value> {
        let left = self.truth(a)?;
        if let Some(known) = left.known() {
            if (known != 0) != and {
                return Ok(Value::Scalar(left));
            }
            return Ok(Value::Scalar(self.truth(b)?));
        }
        let mut right = None;
        let effects = self.nested(|lower| {
            right = Some(lower.truth(b)?);
            Ok(())
        })?;
        let Some(right) = right else { return Err(Failed) };
        if effects.is_empty() {
            let operator = if and { Binary::And } else { Binary::Or };
            return Ok(Value::Scalar(Expr::binary(operator, left, right)));
        }
        let result = self.temporary(1);
        self.emit(Stmt::Set { place: Place::whole(result), value: left })?;
        let mut deciding = effects;
        deciding.push(Stmt::Set { place: Place::whole(result), value: right });
        let condition = Expr::get(result, 1);
        let (then, otherwise) = if and { (deciding, Vec::new()) } else { (Vec::new(), deciding) };
        self.emit(Stmt::If { condition, then, otherwise })?;
        Ok(Value::Scalar(Expr::get(result, 1)))
    }

    fn choose(
        &mut self,
        condition: &ast::Expression,
        a: &ast::Expression,
        b: &ast::Expression,
    ) -> Lowered<Value> {
        let condition = self.truth(condition)?;
        match condition.known() {
            Some(0) => return self.expression(b),
            Some(_) => return self.expression(a),
            None => {}
        }
        let mut values = Vec::new();
        let mut sides = Vec::new();
        for side in [a, b] {
            let block = self.nested(|lower| {
                values.push(lower.scalar(side)?);
                Ok(())
            })?;
            sides.push(block);
        }
        let (Some(right), Some(left)) = (values.pop(), values.pop()) else { return Err(Failed) };
        let bits = left.bits.max(right.bits);
        let (left, right) = (left.resize(bits), right.resize(bits));
        let (Some(mut no), Some(mut yes)) = (sides.pop(), sides.pop()) else { return Err(Failed) };
        if yes.is_empty() && no.is_empty() {
            let kind = ExprKind::Select(Box::new(condition), Box::new(left), Box::new(right));
            return Ok(Value::Scalar(Expr { bits, kind }));
        }
        let result = self.temporary(bits);
        yes.push(Stmt::Set { place: Place::whole(result), value: left });
        no.push(Stmt::Set { place: Place::whole(result), value: right });
        self.emit(Stmt::If { condition, then: yes, otherwise: no })?;
        Ok(Value::Scalar(Expr::get(result, bits)))
    }

    /// A call of a function of the language.
    fn call(
        &mut self,
        name: &ast::Name,
        template: Option<&ast::Expression>,
        arguments: &[ast::Expression],
        span: Span,
    ) -> Lowered<Value> {
        if let Some(result) = self.builtin(name, arguments, span) {
            return result;
        }
        let Some(function) = self.world.functions.get(&name.text) else {
            let message = format!("no function is named {:?}", name.text);
            return self.fail("unknown-function", name.span, message);
        };
        if function.parameters.len() != arguments.len() {
            self.found.push(
                Diagnostic::error(
                    "arguments",
                    span,
                    format!(
                        "{} takes {} arguments, not {}",
                        name.text,
                        function.parameters.len(),
                        arguments.len()
                    ),
                )
                .other(function.name.span, "declared here"),
            );
            return Err(Failed);
        }
        if self.inlined >= DEEPEST {
            return self.fail("too-deep", span, "functions call each other without end");
        }
        let mut scope = HashMap::new();
        match (&function.template, template) {
            (Some(parameter), Some(value)) => {
                let value = self.scalar(value)?;
                let Some(known) = value.known() else {
                    return self.fail("not-constant", span, "a template's argument is a constant");
                };
                scope.insert(parameter.text.clone(), Binding::Number(known, 32));
            }
            (None, None) => {}
            _ => return self.fail("arguments", span, "the template's argument does not fit"),
        }
        let mut values = Vec::new();
        for argument in arguments {
            let value = self.expression(argument)?;
            // By value: what the function does cannot change it.
            let ty = self.type_of(&value);
            let bits = self.world.bits(&ty);
            if let Value::Scalar(expr) = &value
                && expr.known().is_some()
            {
                values.push((value, argument.span));
                continue;
            }
            let held = self.temporary(bits);
            self.store(Value::Place(Place::whole(held), ty.clone()), value, argument.span)?;
            values.push((Value::Place(Place::whole(held), ty), argument.span));
        }
        // The function sees the element's parameters and state, not the caller's locals.
        let outer = self.scopes[0].clone();
        let saved = std::mem::replace(&mut self.scopes, vec![outer, scope]);
        let saved_loops = std::mem::take(&mut self.loops);
        let saved_return = self.returns.take();
        self.inlined += 1;
        let result = self.inline(function, values);
        self.inlined -= 1;
        self.scopes = saved;
        self.loops = saved_loops;
        self.returns = saved_return;
        result
    }

    fn inline(&mut self, function: &ast::Function, values: Vec<(Value, Span)>) -> Lowered<Value> {
        let constants = self.constants();
        let local = |n: &str| constants.get(n).copied();
        for (parameter, (value, span)) in function.parameters.iter().zip(values) {
            let ty = resolve(self.world, &parameter.ty, &local, self.found).ok_or(Failed)?;
            if let (Value::Scalar(expr), Type::Scalar(bits)) = (&value, &ty)
                && let Some(known) = expr.known()
                && !assigned(&function.body, &parameter.name.text)
            {
                let binding = Binding::Number(known & mask(*bits), *bits);
                if let Some(scope) = self.scopes.last_mut() {
                    scope.insert(parameter.name.text.clone(), binding);
                }
                continue;
            }
            let id = self.local(&parameter.name, &ty, ast::Storage::Chosen)?;
            self.store(Value::Place(Place::whole(id), ty), value, span)?;
        }
        let ty = resolve(self.world, &function.result, &local, self.found).ok_or(Failed)?;
        let label = self.element.add_label();
        let result = match &ty {
            Type::Void => None,
            ty => {
                let var = self.temporary(self.world.bits(ty));
                self.emit(Stmt::Clear(var))?;
                Some((var, ty.clone()))
            }
        };
        self.returns = Some(Return { label, result: result.clone(), handler: false });
        let body = self.block(&function.body)?;
        self.emit(Stmt::Scope { label, body })?;
        Ok(result.map_or(Value::Void, |(var, ty)| Value::Place(Place::whole(var), ty)))
    }

    /// The scalar type a word names, for `sizeof`.
    pub(super) fn size_of(&mut self, word: &str, span: Span) -> Lowered<u32> {
        if let Some(ty) = scalar(word) {
            return Ok(self.world.bits(&ty).div_ceil(8));
        }
        match self.world.by_name.get(word) {
            Some(at) => Ok(self.world.records[*at].bits.div_ceil(8)),
            None => self.fail("unknown-type", span, format!("no type is named {word:?}")),
        }
    }
}

/// True where the statements assign to that name.
pub(super) fn assigned(body: &[ast::Statement], name: &str) -> bool {
    use ast::StatementKind as Kind;
    fn root(expression: &ast::Expression) -> Option<&str> {
        match &expression.kind {
            ExpressionKind::Name(name) => Some(name),
            ExpressionKind::Field(base, _)
            | ExpressionKind::Index(base, _)
            | ExpressionKind::Slice(base, _, _) => root(base),
            _ => None,
        }
    }
    body.iter().any(|statement| match &statement.kind {
        Kind::Assign { target, .. } => root(target) == Some(name),
        Kind::If { then, otherwise, .. } => assigned(then, name) || assigned(otherwise, name),
        Kind::Loop { before, step, body, .. } => {
            assigned(before, name) || assigned(step, name) || assigned(body, name)
        }
        Kind::Switch { arms, .. } => arms.iter().any(|(_, _, body)| assigned(body, name)),
        Kind::Block(body, _) | Kind::Async(body) => assigned(body, name),
        Kind::Declare(_) | Kind::Call(_) | Kind::Break | Kind::Continue | Kind::Return(_) => false,
    })
}
