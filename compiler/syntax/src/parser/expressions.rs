//! Expressions, by precedence.

use super::{Parsed, Parser, is_scalar_type};
use crate::ast::{Expression, ExpressionKind, Name, TypeName};
use crate::lexer::Kind;

/// Binary operators, loosest first.
const LEVELS: [&[&str]; 10] = [
    &["||"],
    &["&&"],
    &["|"],
    &["^"],
    &["&"],
    &["==", "!="],
    &["<", ">", "<=", ">="],
    &["<<", ">>"],
    &["+", "-"],
    &["*", "/", "%"],
];

impl Parser<'_> {
    pub(super) fn expression(&mut self) -> Parsed<Expression> {
        self.deeper(|parser| {
            let condition = parser.binary(0)?;
            if !parser.accept("?") {
                return Ok(condition);
            }
            let then = parser.expression()?;
            parser.expect(":")?;
            let otherwise = parser.expression()?;
            let span = condition.span.to(otherwise.span);
            let kind =
                ExpressionKind::Choose(Box::new(condition), Box::new(then), Box::new(otherwise));
            Ok(Expression { kind, span })
        })
    }

    /// An expression that a `:` may follow.
    pub(super) fn ternary_free(&mut self) -> Parsed<Expression> {
        self.binary(0)
    }

    /// An expression that a `>` may follow.
    pub(super) fn shift_free(&mut self) -> Parsed<Expression> {
        self.binary(8)
    }

    fn binary(&mut self, level: usize) -> Parsed<Expression> {
        let Some(operators) = LEVELS.get(level) else { return self.unary() };
        let mut left = self.binary(level + 1)?;
        let mut length = 0_u32;
        loop {
            let operator = match self.token().kind {
                Kind::Symbol(symbol) if operators.contains(&symbol) => symbol,
                _ => return Ok(left),
            };
            // A chain is a left-deep tree; its depth is bounded as all nesting is.
            length += 1;
            if length > 400 {
                return self.fail("a shorter chain of operators");
            }
            self.step();
            let right = self.binary(level + 1)?;
            let span = left.span.to(right.span);
            let kind = ExpressionKind::Binary(operator, Box::new(left), Box::new(right));
            left = Expression { kind, span };
        }
    }

    pub(super) fn unary(&mut self) -> Parsed<Expression> {
        let start = self.span();
        for operator in ["!", "~", "-"] {
            if self.accept(operator) {
                let operand = self.deeper(Self::unary)?;
                let span = start.to(operand.span);
                let kind = ExpressionKind::Unary(operator, Box::new(operand));
                return Ok(Expression { kind, span });
            }
        }
        if self.is("(") && matches!(self.ahead(1), Kind::Name(word) if is_scalar_type(word)) {
            self.step();
            let ty = self.type_name()?;
            self.expect(")")?;
            let operand = self.deeper(Self::unary)?;
            let span = start.to(operand.span);
            let kind = ExpressionKind::Cast(ty, Box::new(operand));
            return Ok(Expression { kind, span });
        }
        self.postfix()
    }

    fn postfix(&mut self) -> Parsed<Expression> {
        let mut value = self.primary()?;
        let mut length = 0_u32;
        loop {
            length += 1;
            if length > 32 {
                return self.fail("a shorter path");
            }
            if self.accept(".") {
                let field = self.name("a field's name")?;
                let span = value.span.to(field.span);
                value = Expression { kind: ExpressionKind::Field(Box::new(value), field), span };
            } else if let Kind::Directive(word) = self.token().kind.clone() {
                // A field at the start of a continued line reads as a directive.
                if word == "async" || self.token().first_of_line {
                    return Ok(value);
                }
                let span = self.span();
                self.step();
                let field = Name { text: word, span };
                let span = value.span.to(span);
                value = Expression { kind: ExpressionKind::Field(Box::new(value), field), span };
            } else if self.is("[") {
                self.step();
                let first = self.expression()?;
                let low = if self.accept(":") { Some(self.expression()?) } else { None };
                let end = self.expect("]")?;
                let span = value.span.to(end);
                let kind = match low {
                    None => ExpressionKind::Index(Box::new(value), Box::new(first)),
                    Some(low) => {
                        ExpressionKind::Slice(Box::new(value), Box::new(first), Box::new(low))
                    }
                };
                value = Expression { kind, span };
            } else {
                return Ok(value);
            }
        }
    }

    pub(super) fn primary(&mut self) -> Parsed<Expression> {
        let start = self.span();
        let kind = match self.token().kind.clone() {
            Kind::Number(number) => {
                self.step();
                ExpressionKind::Number(number)
            }
            Kind::Text(text) => {
                self.step();
                ExpressionKind::Text(text)
            }
            Kind::Name(word) if word == "true" || word == "false" => {
                self.step();
                ExpressionKind::Bool(word == "true")
            }
            Kind::Name(word) if word == "sizeof" => {
                self.step();
                self.expect("(")?;
                let ty: TypeName = self.type_name()?;
                self.expect(")")?;
                ExpressionKind::Call(
                    Name { text: word, span: start },
                    None,
                    vec![Expression {
                        kind: ExpressionKind::Name(ty.name.text),
                        span: ty.name.span,
                    }],
                )
            }
            Kind::Name(word) => {
                self.step();
                let name = Name { text: word, span: start };
                let template =
                    if self.accept("##") { Some(Box::new(self.primary()?)) } else { None };
                if self.accept("(") {
                    let mut arguments = Vec::new();
                    while !self.accept(")") {
                        arguments.push(self.expression()?);
                        if !self.accept(",") && !self.is(")") {
                            return self.fail("\",\" or \")\"");
                        }
                    }
                    ExpressionKind::Call(name, template, arguments)
                } else if template.is_some() {
                    return self.fail("\"(\"");
                } else {
                    ExpressionKind::Name(name.text)
                }
            }
            Kind::Symbol("(") => {
                self.step();
                let inner = self.expression()?;
                self.expect(")")?;
                return Ok(Expression { kind: inner.kind, span: start.to(self.last_span()) });
            }
            _ => return self.fail("an expression"),
        };
        Ok(Expression { kind, span: start.to(self.last_span()) })
    }
}
