//! Numbers, comparisons and logic.

use std::cmp::Ordering;

use bson::{Bson, DateTime, Decimal128};

use super::{MISSING, Op, is_nullish};
use crate::decimal::{Decimal, Operation};
use crate::error::{Code, Result, fail};
use crate::value::{arithmetic, compare, integral, is_number, number, truthy, type_name};

pub(super) fn apply(op: Op, values: &[Bson]) -> Option<Result<Bson>> {
    Some(match op {
        Op::Add => add(values),
        Op::Multiply => fold(op, values, Operation::Multiply, Bson::Int32(1)),
        Op::Subtract => subtract(&values[0], &values[1]),
        Op::Divide => divide(&values[0], &values[1]),
        Op::Mod => modulo(&values[0], &values[1]),
        Op::Abs
        | Op::Ceil
        | Op::Floor
        | Op::Exp
        | Op::Ln
        | Op::Log10
        | Op::Sqrt
        | Op::Sin
        | Op::Cos
        | Op::Tan
        | Op::Asin
        | Op::Acos
        | Op::Atan
        | Op::DegreesToRadians
        | Op::RadiansToDegrees => unary(op, &values[0]),
        Op::Log => binary(op, values, |value, base| value.ln() / base.ln()),
        Op::Atan2 => binary(op, values, f64::atan2),
        Op::Pow => power(values),
        Op::Round | Op::Trunc => round(op, values),
        Op::BitAnd => bits(op, values, -1, |a, b| a & b),
        Op::BitOr => bits(op, values, 0, |a, b| a | b),
        Op::BitXor => bits(op, values, 0, |a, b| a ^ b),
        Op::BitNot => match &values[0] {
            Bson::Int32(value) => Ok(Bson::Int32(!value)),
            Bson::Int64(value) => Ok(Bson::Int64(!value)),
            value if is_nullish(value) => Ok(Bson::Null),
            other => wrong(op, other),
        },
        Op::Not => Ok(Bson::Boolean(!truthy(&values[0]))),
        Op::Cmp => Ok(Bson::Int32(compare(&values[0], &values[1]) as i32)),
        Op::Eq => ordered(values, |order| order == Ordering::Equal),
        Op::Ne => ordered(values, |order| order != Ordering::Equal),
        Op::Gt => ordered(values, |order| order == Ordering::Greater),
        Op::Gte => ordered(values, |order| order != Ordering::Less),
        Op::Lt => ordered(values, |order| order == Ordering::Less),
        Op::Lte => ordered(values, |order| order != Ordering::Greater),
        Op::Rand => Ok(Bson::Double(rand::random::<f64>())),
        _ => return None,
    })
}

fn ordered(values: &[Bson], holds: fn(Ordering) -> bool) -> Result<Bson> {
    Ok(Bson::Boolean(holds(compare(&values[0], &values[1]))))
}

fn wrong<T>(op: Op, value: &Bson) -> Result<T> {
    fail(
        Code::TypeMismatch,
        format!("{} only supports numeric types, not {}", op.name(), type_name(value)),
    )
}

fn fold(op: Op, values: &[Bson], operation: Operation, first: Bson) -> Result<Bson> {
    let mut result = first;
    for value in values {
        if is_nullish(value) {
            return Ok(Bson::Null);
        }
        if !is_number(value) {
            return wrong(op, value);
        }
        result = arithmetic(&result, value, operation, false).unwrap_or(MISSING);
    }
    Ok(result)
}

fn add(values: &[Bson]) -> Result<Bson> {
    let mut date = None;
    let mut result = Bson::Int32(0);
    for value in values {
        match value {
            value if is_nullish(value) => return Ok(Bson::Null),
            Bson::DateTime(given) if date.is_none() => date = Some(*given),
            Bson::DateTime(_) => {
                return fail(Code::TypeMismatch, "only one date allowed in an $add expression");
            }
            value if is_number(value) => {
                result = arithmetic(&result, value, Operation::Add, false).unwrap_or(MISSING);
            }
            other => {
                return fail(
                    Code::TypeMismatch,
                    format!("$add only supports numeric or date types, not {}", type_name(other)),
                );
            }
        }
    }
    Ok(match date {
        Some(date) => shifted(date, number(&result).unwrap_or(0.0).round())?,
        None => result,
    })
}

fn shifted(date: DateTime, by_ms: f64) -> Result<Bson> {
    match date.timestamp_millis().checked_add(by_ms as i64) {
        Some(ms) => Ok(Bson::DateTime(DateTime::from_millis(ms))),
        None => fail(Code::Overflow, "date overflow"),
    }
}

fn subtract(a: &Bson, b: &Bson) -> Result<Bson> {
    match (a, b) {
        _ if is_nullish(a) || is_nullish(b) => Ok(Bson::Null),
        (Bson::DateTime(a), Bson::DateTime(b)) => {
            Ok(Bson::Int64(a.timestamp_millis().saturating_sub(b.timestamp_millis())))
        }
        (Bson::DateTime(a), b) if is_number(b) => shifted(*a, -number(b).unwrap_or(0.0).round()),
        (a, b) if is_number(a) && is_number(b) => {
            Ok(arithmetic(a, b, Operation::Subtract, false).unwrap_or(MISSING))
        }
        _ => fail(
            Code::TypeMismatch,
            format!("can't $subtract {} from {}", type_name(b), type_name(a)),
        ),
    }
}

fn divide(a: &Bson, b: &Bson) -> Result<Bson> {
    if is_nullish(a) || is_nullish(b) {
        return Ok(Bson::Null);
    }
    if !is_number(a) || !is_number(b) {
        return fail(
            Code::TypeMismatch,
            format!(
                "$divide only supports numeric types, not {} and {}",
                type_name(a),
                type_name(b)
            ),
        );
    }
    if number(b) == Some(0.0) {
        return fail(Code::BadValue, "can't $divide by zero");
    }
    Ok(arithmetic(a, b, Operation::Divide, false).unwrap_or(MISSING))
}

fn modulo(a: &Bson, b: &Bson) -> Result<Bson> {
    if is_nullish(a) || is_nullish(b) {
        return Ok(Bson::Null);
    }
    if !is_number(a) || !is_number(b) {
        return wrong(Op::Mod, if is_number(a) { b } else { a });
    }
    if number(b) == Some(0.0) {
        return fail(Code::ExpressionArity, "can't $mod by zero");
    }
    Ok(arithmetic(a, b, Operation::Remainder, false).unwrap_or(Bson::Int32(0)))
}

fn unary(op: Op, value: &Bson) -> Result<Bson> {
    if is_nullish(value) {
        return Ok(Bson::Null);
    }
    match (op, value) {
        (Op::Abs, Bson::Int32(value)) => {
            return Ok(value.checked_abs().map_or(Bson::Int64(1 << 31), Bson::Int32));
        }
        (Op::Abs, Bson::Int64(value)) => {
            return match value.checked_abs() {
                Some(value) => Ok(Bson::Int64(value)),
                None => fail(Code::Overflow, "can't take $abs of long long min"),
            };
        }
        (Op::Ceil | Op::Floor, Bson::Int32(_) | Bson::Int64(_)) => return Ok(value.clone()),
        (Op::Abs | Op::Ceil | Op::Floor, Bson::Decimal128(packed)) => {
            return Ok(Bson::Decimal128(whole_decimal(op, packed)));
        }
        _ => {}
    }
    let Some(given) = number(value) else { return wrong(op, value) };
    let result = match op {
        Op::Abs => given.abs(),
        Op::Ceil => given.ceil(),
        Op::Floor => given.floor(),
        Op::Exp => given.exp(),
        Op::Ln if given <= 0.0 => {
            return fail(Code::BadValue, "$ln's argument must be a positive number");
        }
        Op::Ln => given.ln(),
        Op::Log10 if given <= 0.0 => {
            return fail(Code::BadValue, "$log10's argument must be a positive number");
        }
        Op::Log10 => given.log10(),
        Op::Sqrt if given < 0.0 => {
            return fail(Code::BadValue, "$sqrt's argument must be greater than or equal to 0");
        }
        Op::Sqrt => given.sqrt(),
        Op::Sin => given.sin(),
        Op::Cos => given.cos(),
        Op::Tan => given.tan(),
        Op::Asin => given.asin(),
        Op::Acos => given.acos(),
        Op::Atan => given.atan(),
        Op::DegreesToRadians => given.to_radians(),
        _ => given.to_degrees(),
    };
    Ok(match value {
        Bson::Decimal128(_) => Bson::Decimal128(Decimal::of_f64_short(result).pack()),
        _ => Bson::Double(result),
    })
}

fn whole_decimal(op: Op, packed: &Decimal128) -> Decimal128 {
    use bigdecimal::RoundingMode;
    match Decimal::of(packed) {
        Decimal::Finite(number) => Decimal::Finite(match op {
            Op::Abs => number.abs(),
            Op::Ceil => number.with_scale_round(0, RoundingMode::Ceiling),
            _ => number.with_scale_round(0, RoundingMode::Floor),
        })
        .pack(),
        Decimal::Infinite(_) if op == Op::Abs => Decimal::Infinite(false).pack(),
        other => other.pack(),
    }
}

fn binary(op: Op, values: &[Bson], function: fn(f64, f64) -> f64) -> Result<Bson> {
    if values.iter().any(is_nullish) {
        return Ok(Bson::Null);
    }
    match (number(&values[0]), number(&values[1])) {
        (Some(a), Some(b)) => Ok(Bson::Double(function(a, b))),
        (None, _) => wrong(op, &values[0]),
        _ => wrong(op, &values[1]),
    }
}

fn power(values: &[Bson]) -> Result<Bson> {
    let (base, exponent) = (&values[0], &values[1]);
    if let (Some(whole), Some(times)) = (crate::value::whole(base), crate::value::whole(exponent))
        && let Ok(times) = u32::try_from(times)
        && let Some(result) = whole.checked_pow(times)
    {
        let narrow = matches!((base, exponent), (Bson::Int32(_), Bson::Int32(_)));
        return Ok(match i32::try_from(result) {
            Ok(small) if narrow => Bson::Int32(small),
            _ => Bson::Int64(result),
        });
    }
    binary(Op::Pow, values, f64::powf)
}

fn round(op: Op, values: &[Bson]) -> Result<Bson> {
    use bigdecimal::RoundingMode;
    let value = &values[0];
    if values.iter().any(is_nullish) {
        return Ok(Bson::Null);
    }
    let places = match values.get(1) {
        None => 0,
        Some(places) => match integral(places) {
            Some(places @ -20..=100) => places,
            _ => {
                return fail(
                    Code::BadValue,
                    format!("{}: the place must be a whole number from -20 to 100", op.name()),
                );
            }
        },
    };
    let mode = if op == Op::Round { RoundingMode::HalfEven } else { RoundingMode::Down };
    let rounded = |decimal: Decimal| match decimal {
        Decimal::Finite(number) => Decimal::Finite(number.with_scale_round(places, mode)),
        other => other,
    };
    match value {
        Bson::Int32(_) | Bson::Int64(_) if places >= 0 => Ok(value.clone()),
        Bson::Int32(_) | Bson::Int64(_) => {
            let result = rounded(crate::value::decimal(value));
            let whole = integral(&Bson::Decimal128(result.pack())).unwrap_or(0);
            Ok(match (value, i32::try_from(whole)) {
                (Bson::Int32(_), Ok(small)) => Bson::Int32(small),
                _ => Bson::Int64(whole),
            })
        }
        Bson::Double(given) if places == 0 => Ok(Bson::Double(match op {
            Op::Round => given.round_ties_even(),
            _ => given.trunc(),
        })),
        Bson::Double(given) => Ok(Bson::Double(rounded(Decimal::of_f64_short(*given)).to_f64())),
        Bson::Decimal128(packed) => Ok(Bson::Decimal128(rounded(Decimal::of(packed)).pack())),
        other => wrong(op, other),
    }
}

fn bits(op: Op, values: &[Bson], first: i64, fold: fn(i64, i64) -> i64) -> Result<Bson> {
    let (mut result, mut wide) = (first, false);
    for value in values {
        match value {
            Bson::Int32(value) => result = fold(result, i64::from(*value)),
            Bson::Int64(value) => {
                result = fold(result, *value);
                wide = true;
            }
            value if is_nullish(value) => return Ok(Bson::Null),
            other => return wrong(op, other),
        }
    }
    Ok(if wide { Bson::Int64(result) } else { Bson::Int32(result as i32) })
}
