//! Built-in functions.

use beeline_syntax::ast::{self, ExpressionKind};
use beeline_syntax::{Diagnostic, Span};

use super::element::{Failed, Lower, Lowered, Value};
use super::types::Type;
use crate::tree::{Binary, Expr, ExprKind, Place, Stmt, VarId};

impl Lower<'_> {
    /// The built-in function of that name; none where there is none.
    pub(super) fn builtin(
        &mut self,
        name: &ast::Name,
        arguments: &[ast::Expression],
        span: Span,
    ) -> Option<Lowered<Value>> {
        let count = match name.text.as_str() {
            "get_input_port" | "read_signal" => 0,
            "test_input_port" | "read_input_port" | "peek_input_port" | "set_signal" => 1,
            "set_output_port" | "min" | "max" => 2,
            "ntohs" | "htons" | "ntohl" | "htonl" | "bswap16" | "bswap32" | "bswap64" => 1,
            "popcount" | "lowest" | "sizeof" | "breakpoint" => 1,
            "printf" => return Some(self.print(arguments, span)),
            _ => return None,
        };
        if arguments.len() != count {
            let message = format!("{} takes {count} arguments, not {}", name.text, arguments.len());
            return Some(self.fail("arguments", span, message));
        }
        Some(self.known_builtin(&name.text, arguments, span))
    }

    fn known_builtin(
        &mut self,
        name: &str,
        arguments: &[ast::Expression],
        span: Span,
    ) -> Lowered<Value> {
        let world = self.world;
        match name {
            "get_input_port" => {
                let mut bitmap = Expr::constant(0, 32);
                for (at, flag) in (0_u64..).zip(self.element.in_valid.clone()) {
                    let bit = Expr::binary(
                        Binary::ShiftLeft,
                        Expr::get(flag, 1).resize(32),
                        Expr::constant(at, 32),
                    );
                    bitmap = Expr::binary(Binary::Or, bitmap, bit);
                }
                Ok(Value::Scalar(bitmap))
            }
            "test_input_port" => {
                let (port, _) = self.port(&arguments[0], true)?;
                Ok(Value::Scalar(Expr::get(self.element.in_valid[port], 1)))
            }
            "read_input_port" | "peek_input_port" => {
                self.no_signal(name, span)?;
                let (port, ty) = self.port(&arguments[0], true)?;
                let item = self.temporary(world.bits(&ty));
                let from = Place::whole(self.element.in_data[port]);
                let bits = world.bits(&ty);
                self.emit(Stmt::Copy { to: Place::whole(item), from, bits })?;
                if name == "read_input_port" {
                    let place = Place::whole(self.element.in_valid[port]);
                    self.emit(Stmt::Set { place, value: Expr::constant(0, 1) })?;
                }
                Ok(Value::Place(Place::whole(item), ty))
            }
            "set_output_port" => {
                self.no_signal(name, span)?;
                let (port, ty) = self.port(&arguments[0], false)?;
                let value = self.expression(&arguments[1])?;
                let to = Place::whole(self.element.out_data[port]);
                self.store(Value::Place(to, ty), value, arguments[1].span)?;
                let place = Place::whole(self.element.out_set[port]);
                self.emit(Stmt::Set { place, value: Expr::constant(1, 1) })?;
                Ok(Value::Void)
            }
            "read_signal" => {
                self.only_signal(name, span)?;
                Ok(Value::Place(Place::whole(self.element.sig_in), world.signal()))
            }
            "set_signal" => {
                self.only_signal(name, span)?;
                let value = self.expression(&arguments[0])?;
                let to = Place::whole(self.element.sig_out);
                self.store(Value::Place(to, world.signal()), value, arguments[0].span)?;
                Ok(Value::Void)
            }
            "min" | "max" => {
                let a = self.scalar(&arguments[0])?;
                let mark = self.mark();
                let b = self.scalar(&arguments[1])?;
                let a = self.hold(mark, a);
                let bits = a.bits.max(b.bits);
                let (a, b) = (a.resize(bits), b.resize(bits));
                let less = Expr::binary(Binary::Less, a.clone(), b.clone());
                let (yes, no) = if name == "min" { (a, b) } else { (b, a) };
                let kind = ExprKind::Select(Box::new(less), Box::new(yes), Box::new(no));
                Ok(Value::Scalar(Expr { bits, kind }))
            }
            "ntohs" | "htons" | "bswap16" => self.swapped(&arguments[0], 2),
            "ntohl" | "htonl" | "bswap32" => self.swapped(&arguments[0], 4),
            "bswap64" => self.swapped(&arguments[0], 8),
            "popcount" | "lowest" => self.bits_of(name == "popcount", &arguments[0]),
            "sizeof" => {
                let ExpressionKind::Name(word) = &arguments[0].kind else { return Err(Failed) };
                let size = self.size_of(word, arguments[0].span)?;
                Ok(Value::Scalar(Expr::constant(u64::from(size), 32)))
            }
            _ => {
                let number = self.scalar(&arguments[0])?.known();
                let Some(number) = number.and_then(|n| u32::try_from(n).ok()) else {
                    return self.fail("not-constant", span, "a breakpoint has a constant number");
                };
                self.emit(Stmt::Breakpoint(number))?;
                Ok(Value::Void)
            }
        }
    }

    fn no_signal(&mut self, name: &str, span: Span) -> Lowered<()> {
        if self.in_signal {
            return self.fail("bad-port", span, format!("{name} belongs in .handler"));
        }
        Ok(())
    }

    fn only_signal(&mut self, name: &str, span: Span) -> Lowered<()> {
        if !self.in_signal {
            return self.fail("bad-signal", span, format!("{name} belongs in .signal"));
        }
        Ok(())
    }

    /// A port and the type of its items.
    fn port(&mut self, argument: &ast::Expression, input: bool) -> Lowered<(usize, Type)> {
        let side = if input { "input" } else { "output" };
        let count = if input { self.element.inputs.len() } else { self.element.outputs.len() };
        if let ExpressionKind::Name(name) = &argument.kind
            && let Some(super::element::Binding::Port { input: is_input, index }) =
                self.lookup(name)
        {
            if is_input != input {
                let message = format!("{name:?} is no {side} port");
                return self.fail("bad-port", argument.span, message);
            }
            return Ok((index, self.port_type(input, index)));
        }
        let known = self.scalar(argument)?.known();
        match known.filter(|bit| bit.is_power_of_two()).map(|bit| bit.trailing_zeros() as usize) {
            Some(index) if index < count => Ok((index, self.port_type(input, index))),
            _ => {
                self.found.push(
                    Diagnostic::error("bad-port", argument.span, format!("no {side} port"))
                        .help("name a port of this element, or a constant with one bit set"),
                );
                Err(Failed)
            }
        }
    }

    fn port_type(&self, input: bool, index: usize) -> Type {
        let name = &self.element.name;
        let declared = self.world.elements.get(name);
        let ports = declared.map(|d| if input { &d.inputs } else { &d.outputs });
        let ty = ports.and_then(|ports| ports.get(index)).map(|port| &port.ty);
        match ty {
            Some(ty) => match self.world.by_name.get(&ty.name.text) {
                Some(at) => Type::Record(*at),
                None => super::types::scalar(&ty.name.text)
                    .unwrap_or(Type::Scalar(self.port_bits(input, index))),
            },
            None => Type::Scalar(self.port_bits(input, index)),
        }
    }

    fn port_bits(&self, input: bool, index: usize) -> u32 {
        let ports = if input { &self.element.inputs } else { &self.element.outputs };
        ports[index].bits.min(64)
    }

    /// The bytes of a number in the other order.
    fn swapped(&mut self, argument: &ast::Expression, bytes: u32) -> Lowered<Value> {
        let bits = bytes * 8;
        let value = self.scalar(argument)?.resize(bits);
        if let Some(known) = value.known() {
            let turned = known.swap_bytes() >> (64 - bits);
            return Ok(Value::Scalar(Expr::constant(turned, bits)));
        }
        let from = self.temporary(bits);
        let to = self.temporary(bits);
        self.emit(Stmt::Set { place: Place::whole(from), value })?;
        for byte in 0..bytes {
            let place = Place { var: from, offset: byte * 8, index: Vec::new() };
            let value = Expr { bits: 8, kind: ExprKind::Get(place) };
            let place = Place { var: to, offset: (bytes - 1 - byte) * 8, index: Vec::new() };
            self.emit(Stmt::Set { place, value })?;
        }
        Ok(Value::Scalar(Expr::get(to, bits)))
    }

    /// `popcount` adds the bits in a tree; `lowest` is the place of the lowest set bit, the width
    /// where none is set.
    fn bits_of(&mut self, count: bool, argument: &ast::Expression) -> Lowered<Value> {
        let value = self.scalar(argument)?;
        let width = value.bits;
        let from = self.temporary(width);
        self.emit(Stmt::Set { place: Place::whole(from), value })?;
        let bit = |at: u32, from: VarId| Expr {
            bits: 1,
            kind: ExprKind::Get(Place { var: from, offset: at, index: Vec::new() }),
        };
        if count {
            let mut level: Vec<Expr> = (0..width).map(|at| bit(at, from).resize(7)).collect();
            while level.len() > 1 {
                level = level
                    .chunks(2)
                    .map(|pair| match pair {
                        [a, b] => Expr::binary(Binary::Add, a.clone(), b.clone()),
                        [a, ..] => a.clone(),
                        [] => Expr::constant(0, 7),
                    })
                    .collect();
            }
            let sum = level.pop().unwrap_or(Expr::constant(0, 7));
            return Ok(Value::Scalar(sum.resize(32)));
        }
        // Pairs of (any bit set, place of the lowest), joined in a tree.
        let mut level: Vec<(Expr, Expr)> =
            (0..width).map(|at| (bit(at, from), Expr::constant(u64::from(at), 7))).collect();
        while level.len() > 1 {
            let mut next = Vec::with_capacity(level.len().div_ceil(2));
            for pair in level.chunks(2) {
                if let [(any_a, at_a), (any_b, at_b)] = pair {
                    let chosen = self.temporary(7);
                    let any = self.temporary(1);
                    let kind = ExprKind::Select(
                        Box::new(any_a.clone()),
                        Box::new(at_a.clone()),
                        Box::new(at_b.clone()),
                    );
                    let value = Expr { bits: 7, kind };
                    self.emit(Stmt::Set { place: Place::whole(chosen), value })?;
                    let value = Expr::binary(Binary::Or, any_a.clone(), any_b.clone());
                    self.emit(Stmt::Set { place: Place::whole(any), value })?;
                    next.push((Expr::get(any, 1), Expr::get(chosen, 7)));
                } else {
                    next.extend_from_slice(pair);
                }
            }
            level = next;
        }
        let Some((any, at)) = level.pop() else { return Err(Failed) };
        let none = Expr::constant(u64::from(width), 7);
        let kind = ExprKind::Select(Box::new(any), Box::new(at), Box::new(none));
        Ok(Value::Scalar(Expr { bits: 7, kind }.resize(32)))
    }

    fn print(&mut self, arguments: &[ast::Expression], span: Span) -> Lowered<Value> {
        let Some((ast::Expression { kind: ExpressionKind::Text(format), .. }, rest)) =
            arguments.split_first()
        else {
            return self.fail("arguments", span, "printf begins with a text");
        };
        let format = format.clone();
        let mut values = Vec::new();
        for argument in rest {
            values.push(self.scalar(argument)?);
        }
        let places = format.matches('%').count() - 2 * format.matches("%%").count();
        if places != values.len() {
            let message = format!("{places} places in the text for {} values", values.len());
            return self.fail("arguments", span, message);
        }
        self.emit(Stmt::Print { format, values })?;
        Ok(Value::Void)
    }
}
