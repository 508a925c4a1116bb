//! From type to type.

use bson::oid::ObjectId;
use bson::{Bson, DateTime, Decimal128};

use super::{MISSING, Op, is_nullish};
use crate::decimal::Decimal;
use crate::error::{Code, Result, fail};
use crate::value::{decimal, integral, number, truthy, type_name};

pub(super) fn apply(op: Op, values: &[Bson]) -> Option<Result<Bson>> {
    let target = match op {
        Op::ToBool => "bool",
        Op::ToDate => "date",
        Op::ToDecimal => "decimal",
        Op::ToDouble => "double",
        Op::ToInt => "int",
        Op::ToLong => "long",
        Op::ToObjectId => "objectId",
        Op::ToString => "string",
        Op::Convert => return Some(convert(values)),
        Op::Type => {
            let name = if values[0] == MISSING { "missing" } else { type_name(&values[0]) };
            return Some(Ok(Bson::String(name.to_owned())));
        }
        Op::IsNumber => return Some(Ok(Bson::Boolean(crate::value::is_number(&values[0])))),
        Op::BinarySize => return Some(size(op, &values[0])),
        Op::BsonSize => return Some(size(op, &values[0])),
        Op::TsSecond | Op::TsIncrement => return Some(stamp(op, &values[0])),
        _ => return None,
    };
    Some(if is_nullish(&values[0]) { Ok(Bson::Null) } else { to(&values[0], target) })
}

fn size(op: Op, value: &Bson) -> Result<Bson> {
    let bytes = match (op, value) {
        (_, value) if is_nullish(value) => return Ok(Bson::Null),
        (Op::BinarySize, Bson::String(text)) => text.len(),
        (Op::BinarySize, Bson::Binary(binary)) => binary.bytes.len(),
        (Op::BsonSize, Bson::Document(document)) => {
            document.to_vec().map_or(0, |bytes| bytes.len())
        }
        (_, other) => {
            return fail(
                Code::TypeMismatch,
                format!("{} does not take {}", op.name(), type_name(other)),
            );
        }
    };
    Ok(Bson::Int32(bytes as i32))
}

fn stamp(op: Op, value: &Bson) -> Result<Bson> {
    match value {
        Bson::Timestamp(stamp) => {
            let part = if op == Op::TsSecond { stamp.time } else { stamp.increment };
            Ok(Bson::Int64(i64::from(part)))
        }
        value if is_nullish(value) => Ok(Bson::Null),
        other => fail(
            Code::TypeMismatch,
            format!("{} requires a timestamp, found {}", op.name(), type_name(other)),
        ),
    }
}

fn convert(values: &[Bson]) -> Result<Bson> {
    let [input, target, on_error, on_null] = values else { return Ok(MISSING) };
    if is_nullish(input) {
        return Ok(if *on_null == MISSING { Bson::Null } else { on_null.clone() });
    }
    if is_nullish(target) {
        return Ok(Bson::Null);
    }
    let (codes, _) = crate::matching::type_codes(target)?;
    let name = match codes.first() {
        Some(1) => "double",
        Some(2) => "string",
        Some(7) => "objectId",
        Some(8) => "bool",
        Some(9) => "date",
        Some(16) => "int",
        Some(18) => "long",
        Some(19) => "decimal",
        _ => return fail(Code::BadValue, "$convert cannot make a value of that type"),
    };
    match to(input, name) {
        Err(_) if *on_error != MISSING => Ok(on_error.clone()),
        result => result,
    }
}

fn unable<T>(value: &Bson, target: &str) -> Result<T> {
    fail(
        Code::ConversionFailure,
        format!(
            "Unsupported conversion from {} to {target} in $convert with no onError value",
            type_name(value)
        ),
    )
}

fn unread<T>(text: &str, target: &str) -> Result<T> {
    fail(
        Code::ConversionFailure,
        format!("Failed to parse '{text:.60}' as {target} in $convert with no onError value"),
    )
}

fn to(value: &Bson, target: &str) -> Result<Bson> {
    match target {
        "bool" => Ok(Bson::Boolean(match value {
            Bson::String(_) | Bson::ObjectId(_) | Bson::DateTime(_) => true,
            other => truthy(other),
        })),
        "int" => match whole(value, target)? {
            wide if i32::try_from(wide).is_ok() => Ok(Bson::Int32(wide as i32)),
            wide => fail(
                Code::ConversionFailure,
                format!(
                    "Conversion would overflow target type in $convert with no onError value: {wide}"
                ),
            ),
        },
        "long" => whole(value, target).map(Bson::Int64),
        "double" => match value {
            Bson::Boolean(value) => Ok(Bson::Double(f64::from(u8::from(*value)))),
            Bson::DateTime(date) => Ok(Bson::Double(date.timestamp_millis() as f64)),
            Bson::String(text) => match text.parse::<f64>() {
                Ok(number) if !text.starts_with(char::is_whitespace) => Ok(Bson::Double(number)),
                _ => unread(text, target),
            },
            other => {
                number(other).map_or_else(|| unable(other, target), |value| Ok(Bson::Double(value)))
            }
        },
        "decimal" => match value {
            Bson::Boolean(value) => Ok(Bson::Decimal128(Decimal::of_i64(i64::from(*value)).pack())),
            Bson::DateTime(date) => {
                Ok(Bson::Decimal128(Decimal::of_i64(date.timestamp_millis()).pack()))
            }
            Bson::String(text) => match text.parse::<Decimal128>() {
                Ok(number) => Ok(Bson::Decimal128(number)),
                Err(_) => unread(text, target),
            },
            Bson::Double(given) => Ok(Bson::Decimal128(Decimal::of_f64_short(*given).pack())),
            other if crate::value::is_number(other) => Ok(Bson::Decimal128(decimal(other).pack())),
            other => unable(other, target),
        },
        "date" => match value {
            Bson::DateTime(_) => Ok(value.clone()),
            Bson::Int64(_) | Bson::Double(_) | Bson::Decimal128(_) => {
                Ok(Bson::DateTime(DateTime::from_millis(whole(value, target)?)))
            }
            Bson::ObjectId(id) => Ok(Bson::DateTime(id.timestamp())),
            Bson::Timestamp(stamp) => {
                Ok(Bson::DateTime(DateTime::from_millis(i64::from(stamp.time) * 1000)))
            }
            Bson::String(text) => super::dates::parse(text, None, None).map(Bson::DateTime),
            other => unable(other, target),
        },
        "objectId" => match value {
            Bson::ObjectId(_) => Ok(value.clone()),
            Bson::String(text) => {
                ObjectId::parse_str(text).map(Bson::ObjectId).or_else(|_| unread(text, target))
            }
            other => unable(other, target),
        },
        _ => to_text(value).map(Bson::String),
    }
}

fn whole(value: &Bson, target: &str) -> Result<i64> {
    match value {
        Bson::Boolean(value) => Ok(i64::from(*value)),
        Bson::DateTime(date) => Ok(date.timestamp_millis()),
        Bson::String(text) => text.parse::<i64>().or_else(|_| unread(text, target)),
        Bson::Double(_) | Bson::Decimal128(_) => {
            let given = number(value).unwrap_or(f64::NAN);
            if !given.is_finite() || given.abs() >= 9.3e18 {
                return fail(
                    Code::ConversionFailure,
                    format!(
                        "Attempt to convert {given} value to integer type in $convert with no onError value"
                    ),
                );
            }
            Ok(integral(value).unwrap_or(given.trunc() as i64))
        }
        other => integral(other).map_or_else(|| unable(other, target), Ok),
    }
}

/// A value as text, as `$toString` writes it.
///
/// Errors: arrays, objects and others that have no text.
pub fn to_text(value: &Bson) -> Result<String> {
    Ok(match value {
        Bson::String(text) | Bson::Symbol(text) | Bson::JavaScriptCode(text) => text.clone(),
        Bson::Boolean(value) => value.to_string(),
        Bson::Int32(value) => value.to_string(),
        Bson::Int64(value) => value.to_string(),
        Bson::Double(value) if value.is_nan() => "NaN".to_owned(),
        Bson::Double(value) if value.is_infinite() => {
            if *value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
        }
        Bson::Double(value) if value.abs() >= 1e16 || (*value != 0.0 && value.abs() < 1e-5) => {
            format!("{value:e}")
        }
        Bson::Double(value) => value.to_string(),
        Bson::Decimal128(value) => value.to_string(),
        Bson::ObjectId(id) => id.to_hex(),
        Bson::DateTime(date) => super::dates::iso(*date),
        Bson::Timestamp(stamp) => format!("Timestamp({}, {})", stamp.time, stamp.increment),
        other => return unable(other, "string"),
    })
}
