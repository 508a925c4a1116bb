//! Constant expressions.

use beeline_syntax::ast::{Expression, ExpressionKind};
use beeline_syntax::{Diagnostic, Diagnostics};

use super::types::World;
use crate::tree::Binary;

/// The value of a constant expression; a diagnostic where it is none.
pub(super) fn constant(
    world: &World,
    expression: &Expression,
    local: &dyn Fn(&str) -> Option<u64>,
    found: &mut Diagnostics,
) -> Option<u64> {
    let value = quiet(world, expression, local);
    if value.is_none() {
        found.push(
            Diagnostic::error("not-constant", expression.span, "this must be a constant")
                .help("sizes, widths and parameters are known when the element is compiled"),
        );
    }
    value
}

/// The value, if it is a constant.
pub(super) fn quiet(
    world: &World,
    expression: &Expression,
    local: &dyn Fn(&str) -> Option<u64>,
) -> Option<u64> {
    let inner = |e: &Expression| quiet(world, e, local);
    Some(match &expression.kind {
        ExpressionKind::Number(value) => *value,
        ExpressionKind::Bool(value) => u64::from(*value),
        ExpressionKind::Name(name) => match local(name) {
            Some(value) => value,
            None => {
                let constant = world.constants.get(name)?;
                if !constant.dimensions.is_empty() {
                    return None;
                }
                *constant.values.first()?
            }
        },
        ExpressionKind::Unary(operator, a) => match *operator {
            "!" => u64::from(inner(a)? == 0),
            "~" => !inner(a)?,
            _ => inner(a)?.wrapping_neg(),
        },
        ExpressionKind::Binary(operator, a, b) => {
            let a = inner(a)?;
            match *operator {
                "&&" => u64::from(a != 0 && inner(b)? != 0),
                "||" => u64::from(a != 0 || inner(b)? != 0),
                symbol => {
                    let b = inner(b)?;
                    let (operator, swap) = operator_of(symbol)?;
                    if swap { operator.apply(b, a, 64) } else { operator.apply(a, b, 64) }
                }
            }
        }
        ExpressionKind::Choose(a, b, c) => {
            if inner(a)? != 0 {
                inner(b)?
            } else {
                inner(c)?
            }
        }
        ExpressionKind::Cast(ty, a) => {
            let bits = world.bits(&super::types::scalar(&ty.name.text)?);
            inner(a)? & crate::tree::mask(bits)
        }
        _ => return None,
    })
}

/// The operator of a symbol, and whether its operands change places.
pub(super) fn operator_of(symbol: &str) -> Option<(Binary, bool)> {
    Some(match symbol {
        "+" => (Binary::Add, false),
        "-" => (Binary::Subtract, false),
        "*" => (Binary::Multiply, false),
        "/" => (Binary::Divide, false),
        "%" => (Binary::Remainder, false),
        "&" => (Binary::And, false),
        "|" => (Binary::Or, false),
        "^" => (Binary::Xor, false),
        "<<" => (Binary::ShiftLeft, false),
        ">>" => (Binary::ShiftRight, false),
        "==" => (Binary::Equal, false),
        "!=" => (Binary::NotEqual, false),
        "<" => (Binary::Less, false),
        "<=" => (Binary::LessEqual, false),
        ">" => (Binary::Less, true),
        ">=" => (Binary::LessEqual, true),
        _ => return None,
    })
}
