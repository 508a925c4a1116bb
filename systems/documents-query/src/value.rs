//! The order of BSON values, numbers of four types as one kind, and sortable keys.
//!
//! Invariant: [`key`] of two values compares byte by byte exactly as [`compare`] does, and no key
//! is a prefix of another, so that keys can be put in a row.

use std::cmp::Ordering;

use bigdecimal::{BigDecimal, Signed as _, ToPrimitive as _};
use bson::{Bson, Document};

use crate::decimal::{Decimal, Operation};

/// Rank of a value's type in the order of BSON.
#[must_use]
pub fn rank(value: &Bson) -> u8 {
    match value {
        Bson::MinKey => 1,
        Bson::Undefined => 2,
        Bson::Null => 7,
        Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_) | Bson::Decimal128(_) => 12,
        Bson::String(_) | Bson::Symbol(_) => 17,
        Bson::Document(_) => 22,
        Bson::Array(_) => 27,
        Bson::Binary(_) => 32,
        Bson::ObjectId(_) => 37,
        Bson::Boolean(_) => 42,
        Bson::DateTime(_) => 47,
        Bson::Timestamp(_) => 49,
        Bson::RegularExpression(_) => 52,
        Bson::DbPointer(_) => 57,
        Bson::JavaScriptCode(_) => 62,
        Bson::JavaScriptCodeWithScope(_) => 67,
        Bson::MaxKey => 129,
    }
}

/// True for the four numeric types.
#[must_use]
pub fn is_number(value: &Bson) -> bool {
    matches!(value, Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_) | Bson::Decimal128(_))
}

/// The order of BSON.
#[must_use]
pub fn compare(a: &Bson, b: &Bson) -> Ordering {
    let ranks = rank(a).cmp(&rank(b));
    if ranks != Ordering::Equal {
        return ranks;
    }
    match (a, b) {
        (Bson::Int32(a), Bson::Int32(b)) => a.cmp(b),
        (Bson::String(a) | Bson::Symbol(a), Bson::String(b) | Bson::Symbol(b)) => {
            a.as_bytes().cmp(b.as_bytes())
        }
        (Bson::Document(a), Bson::Document(b)) => compare_documents(a, b),
        (Bson::Array(a), Bson::Array(b)) => compare_arrays(a, b),
        (Bson::Binary(a), Bson::Binary(b)) => (a.bytes.len(), u8::from(a.subtype), &a.bytes)
            .cmp(&(b.bytes.len(), u8::from(b.subtype), &b.bytes)),
        (Bson::ObjectId(a), Bson::ObjectId(b)) => a.bytes().cmp(&b.bytes()),
        (Bson::Boolean(a), Bson::Boolean(b)) => a.cmp(b),
        (Bson::DateTime(a), Bson::DateTime(b)) => a.cmp(b),
        (Bson::Timestamp(a), Bson::Timestamp(b)) => {
            (a.time, a.increment).cmp(&(b.time, b.increment))
        }
        (Bson::RegularExpression(a), Bson::RegularExpression(b)) => {
            (a.pattern.as_str(), a.options.as_str()).cmp(&(b.pattern.as_str(), b.options.as_str()))
        }
        (Bson::JavaScriptCode(a), Bson::JavaScriptCode(b)) => a.cmp(b),
        (Bson::JavaScriptCodeWithScope(a), Bson::JavaScriptCodeWithScope(b)) => {
            a.code.cmp(&b.code).then_with(|| compare_documents(&a.scope, &b.scope))
        }
        (Bson::DbPointer(_), Bson::DbPointer(_)) => key(a).cmp(&key(b)),
        _ if is_number(a) => compare_numbers(a, b),
        _ => Ordering::Equal,
    }
}

/// The order of documents: field by field, each by type, then name, then value.
#[must_use]
pub fn compare_documents(a: &Document, b: &Document) -> Ordering {
    let (mut left, mut right) = (a.iter(), b.iter());
    loop {
        match (left.next(), right.next()) {
            (None, None) => return Ordering::Equal,
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
            (Some((name, value)), Some((other_name, other))) => {
                let order = rank(value)
                    .cmp(&rank(other))
                    .then_with(|| name.as_bytes().cmp(other_name.as_bytes()))
                    .then_with(|| compare(value, other));
                if order != Ordering::Equal {
                    return order;
                }
            }
        }
    }
}

fn compare_arrays(a: &[Bson], b: &[Bson]) -> Ordering {
    for (left, right) in a.iter().zip(b) {
        let order = compare(left, right);
        if order != Ordering::Equal {
            return order;
        }
    }
    a.len().cmp(&b.len())
}

fn compare_whole_to_binary(whole: i64, binary: f64) -> Ordering {
    if binary.is_nan() {
        return Ordering::Greater;
    }
    if binary >= 9_223_372_036_854_775_808.0 {
        return Ordering::Less;
    }
    if binary < -9_223_372_036_854_775_808.0 {
        return Ordering::Greater;
    }
    let truncated = binary.trunc();
    whole
        .cmp(&(truncated as i64))
        .then_with(|| 0.0_f64.partial_cmp(&(binary - truncated)).unwrap_or(Ordering::Equal))
}

fn compare_binary(a: f64, b: f64) -> Ordering {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => Ordering::Equal,
        (true, false) => Ordering::Less,
        (false, true) => Ordering::Greater,
        _ => a.partial_cmp(&b).unwrap_or(Ordering::Equal),
    }
}

fn compare_numbers(a: &Bson, b: &Bson) -> Ordering {
    match (whole(a), whole(b), a, b) {
        (Some(a), Some(b), ..) => a.cmp(&b),
        (Some(a), None, _, Bson::Double(b)) => compare_whole_to_binary(a, *b),
        (None, Some(b), Bson::Double(a), _) => compare_whole_to_binary(b, *a).reverse(),
        (None, None, Bson::Double(a), Bson::Double(b)) => compare_binary(*a, *b),
        _ => decimal(a).compare(&decimal(b)),
    }
}

/// The value of the two types that are whole by type.
#[must_use]
pub fn whole(value: &Bson) -> Option<i64> {
    match value {
        Bson::Int32(value) => Some(i64::from(*value)),
        Bson::Int64(value) => Some(*value),
        _ => None,
    }
}

/// Any number, exactly; not-a-number for what is none.
#[must_use]
pub fn decimal(value: &Bson) -> Decimal {
    match value {
        Bson::Int32(value) => Decimal::of_i64(i64::from(*value)),
        Bson::Int64(value) => Decimal::of_i64(*value),
        Bson::Double(value) => Decimal::of_f64(*value),
        Bson::Decimal128(value) => Decimal::of(value),
        _ => Decimal::NaN,
    }
}

/// Any number as a binary one; `None` for what is none.
#[must_use]
pub fn number(value: &Bson) -> Option<f64> {
    match value {
        Bson::Int32(value) => Some(f64::from(*value)),
        Bson::Int64(value) => Some(*value as f64),
        Bson::Double(value) => Some(*value),
        Bson::Decimal128(value) => Some(Decimal::of(value).to_f64()),
        _ => None,
    }
}

/// A number of any type that is whole and fits 64 bits.
#[must_use]
pub fn integral(value: &Bson) -> Option<i64> {
    match value {
        Bson::Double(value)
            if value.fract() == 0.0
                && *value >= -9_223_372_036_854_775_808.0
                && *value < 9_223_372_036_854_775_808.0 =>
        {
            Some(*value as i64)
        }
        Bson::Decimal128(value) => match Decimal::of(value) {
            Decimal::Finite(number) if number.is_integer() => number.to_i64(),
            _ => None,
        },
        _ => whole(value),
    }
}

/// As MongoDB takes a flag: false, null, missing and zero are false.
#[must_use]
pub fn truthy(value: &Bson) -> bool {
    match value {
        Bson::Boolean(value) => *value,
        Bson::Null | Bson::Undefined => false,
        value => number(value).is_none_or(|number| number != 0.0),
    }
}

/// `a` and `b` under an operation, in the widest of their types; whole numbers that pass 32 bits
/// become 64 bits wide, and those that pass 64 bits are refused with `None` or become binary.
#[must_use]
pub fn arithmetic(a: &Bson, b: &Bson, operation: Operation, strict: bool) -> Option<Bson> {
    if matches!(a, Bson::Decimal128(_)) || matches!(b, Bson::Decimal128(_)) {
        let side = |value: &Bson| match value {
            Bson::Double(value) => Decimal::of_f64_short(*value),
            other => decimal(other),
        };
        return Some(Bson::Decimal128(side(a).apply(&side(b), operation).pack()));
    }
    if let (Some(left), Some(right)) = (whole(a), whole(b))
        && operation != Operation::Divide
    {
        let result = match operation {
            Operation::Add => left.checked_add(right),
            Operation::Subtract => left.checked_sub(right),
            Operation::Multiply => left.checked_mul(right),
            _ => left.checked_rem(right),
        };
        let narrow = matches!((a, b), (Bson::Int32(_), Bson::Int32(_)));
        return match result {
            Some(value) => Some(match i32::try_from(value) {
                Ok(small) if narrow => Bson::Int32(small),
                _ => Bson::Int64(value),
            }),
            None if strict => None,
            None => Some(Bson::Double(operation.binary(left as f64, right as f64))),
        };
    }
    Some(Bson::Double(operation.binary(number(a)?, number(b)?)))
}

/// The name of a type in `$type`.
#[must_use]
pub fn type_name(value: &Bson) -> &'static str {
    match value {
        Bson::Double(_) => "double",
        Bson::String(_) => "string",
        Bson::Document(_) => "object",
        Bson::Array(_) => "array",
        Bson::Binary(_) => "binData",
        Bson::Undefined => "undefined",
        Bson::ObjectId(_) => "objectId",
        Bson::Boolean(_) => "bool",
        Bson::DateTime(_) => "date",
        Bson::Null => "null",
        Bson::RegularExpression(_) => "regex",
        Bson::DbPointer(_) => "dbPointer",
        Bson::JavaScriptCode(_) => "javascript",
        Bson::Symbol(_) => "symbol",
        Bson::JavaScriptCodeWithScope(_) => "javascriptWithScope",
        Bson::Int32(_) => "int",
        Bson::Timestamp(_) => "timestamp",
        Bson::Int64(_) => "long",
        Bson::Decimal128(_) => "decimal",
        Bson::MinKey => "minKey",
        Bson::MaxKey => "maxKey",
    }
}

/// The number of a type in `$type` and on the wire.
#[must_use]
pub fn type_number(value: &Bson) -> i32 {
    match value {
        Bson::MinKey => -1,
        other => i32::from(other.element_type() as u8),
    }
}

/// The sortable key of a value.
#[must_use]
pub fn key(value: &Bson) -> Vec<u8> {
    let mut out = Vec::with_capacity(16);
    append_key(&mut out, value);
    out
}

/// Appends the sortable key of a value.
pub fn append_key(out: &mut Vec<u8>, value: &Bson) {
    out.push(rank(value));
    append_payload(out, value);
}

/// Appends the sortable key of a value with every bit turned, so that it sorts the other way.
pub fn append_key_descending(out: &mut Vec<u8>, value: &Bson) {
    let start = out.len();
    append_key(out, value);
    out[start..].iter_mut().for_each(|byte| *byte = !*byte);
}

fn append_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    for &byte in bytes {
        out.push(byte);
        if byte == 0 {
            out.push(0xff);
        }
    }
    out.extend([0, 0]);
}

fn append_payload(out: &mut Vec<u8>, value: &Bson) {
    match value {
        Bson::Int32(value) => append_binary(out, f64::from(*value)),
        Bson::Int64(value) if value.unsigned_abs() <= 1 << 53 => append_binary(out, *value as f64),
        Bson::Double(value) => append_binary(out, *value),
        Bson::Int64(_) | Bson::Decimal128(_) => append_exact(out, &decimal(value)),
        Bson::String(text) | Bson::Symbol(text) | Bson::JavaScriptCode(text) => {
            append_bytes(out, text.as_bytes());
        }
        Bson::Document(document) => append_document(out, document),
        Bson::Array(array) => {
            array.iter().for_each(|value| append_key(out, value));
            out.push(0);
        }
        Bson::Binary(binary) => {
            out.extend((binary.bytes.len() as u32).to_be_bytes());
            out.push(binary.subtype.into());
            out.extend(&binary.bytes);
        }
        Bson::ObjectId(id) => out.extend(id.bytes()),
        Bson::Boolean(value) => out.push(u8::from(*value)),
        Bson::DateTime(date) => {
            out.extend((date.timestamp_millis() as u64 ^ (1 << 63)).to_be_bytes());
        }
        Bson::Timestamp(stamp) => {
            out.extend(stamp.time.to_be_bytes());
            out.extend(stamp.increment.to_be_bytes());
        }
        Bson::RegularExpression(regex) => {
            append_bytes(out, regex.pattern.as_str().as_bytes());
            append_bytes(out, regex.options.as_str().as_bytes());
        }
        Bson::JavaScriptCodeWithScope(code) => {
            append_bytes(out, code.code.as_bytes());
            append_document(out, &code.scope);
        }
        Bson::DbPointer(pointer) => append_bytes(out, format!("{pointer:?}").as_bytes()),
        Bson::MinKey | Bson::MaxKey | Bson::Null | Bson::Undefined => {}
    }
}

fn append_document(out: &mut Vec<u8>, document: &Document) {
    for (name, value) in document {
        out.push(rank(value));
        append_bytes(out, name.as_bytes());
        append_payload(out, value);
    }
    out.push(0);
}

/// Bytes that sort as binary numbers do; not-a-number is all zeros.
fn sortable(value: f64) -> u64 {
    let bits = (value + 0.0).to_bits();
    match value {
        value if value.is_nan() => 0,
        _ if bits >> 63 == 1 => !bits,
        _ => bits ^ (1 << 63),
    }
}

fn append_binary(out: &mut Vec<u8>, value: f64) {
    out.extend(sortable(value).to_be_bytes());
    out.push(0);
}

/// A number that may lie between two binary ones: the next below, then what is left over.
fn append_exact(out: &mut Vec<u8>, value: &Decimal) {
    let Decimal::Finite(number) = value else {
        return append_binary(out, value.to_f64());
    };
    let mut below = number.to_f64().unwrap_or(0.0);
    if below.is_infinite() {
        below = if number.is_negative() { f64::NEG_INFINITY } else { f64::MAX };
    } else if exact(below) > *number {
        below = below.next_down();
    }
    if below == f64::NEG_INFINITY {
        out.extend(sortable(below).to_be_bytes());
        out.push(1);
        let start = out.len();
        append_magnitude(out, &number.abs());
        out[start..].iter_mut().for_each(|byte| *byte = !*byte);
        return;
    }
    let rest = number - exact(below);
    if !rest.is_positive() {
        return append_binary(out, below);
    }
    out.extend(sortable(below).to_be_bytes());
    out.push(1);
    append_magnitude(out, &rest);
}

fn exact(value: f64) -> BigDecimal {
    BigDecimal::try_from(value).unwrap_or_default()
}

/// A positive number: where its first digit stands, then its digits.
fn append_magnitude(out: &mut Vec<u8>, number: &BigDecimal) {
    let (digits, scale) = number.normalized().into_bigint_and_exponent();
    let digits = digits.to_string();
    let first = digits.len() as i64 - scale;
    out.extend(((first + 0x4000) as u16).to_be_bytes());
    out.extend(digits.as_bytes());
    out.push(0);
}

#[cfg(test)]
pub(crate) mod tests {
    use bson::{Timestamp, doc};
    use proptest::prelude::*;

    use super::*;

    /// Any value a document can hold, small ones more often.
    pub(crate) fn values() -> impl Strategy<Value = Bson> {
        let leaf = prop_oneof![
            Just(Bson::Null),
            Just(Bson::MinKey),
            Just(Bson::MaxKey),
            (-3..4_i32).prop_map(Bson::Int32),
            (-3..4_i64).prop_map(Bson::Int64),
            any::<i64>().prop_map(Bson::Int64),
            prop::sample::select(vec![i64::MAX, i64::MIN, (1 << 53) + 1, -(1 << 53) - 1])
                .prop_map(Bson::Int64),
            prop::sample::select(vec![
                0.0,
                -0.0,
                1.5,
                -2.5,
                f64::NAN,
                f64::INFINITY,
                9.007e15,
                9_223_372_036_854_775_808.0,
                0.1,
                f64::MAX,
                -f64::MAX,
                5e-324
            ])
            .prop_map(Bson::Double),
            prop::sample::select(vec![
                "0",
                "1",
                "1.50",
                "-2.5",
                "0.1",
                "9007199254740993",
                "9223372036854775807.5",
                "1E+400",
                "-1E+400",
                "-2E+400",
                "NaN",
                "Infinity",
                "-1E-400"
            ])
            .prop_map(|text| Bson::Decimal128(text.parse().unwrap())),
            "[a\\x00b]{0,3}".prop_map(Bson::String),
            any::<bool>().prop_map(Bson::Boolean),
            (-5..5_i64).prop_map(|ms| Bson::DateTime(bson::DateTime::from_millis(ms))),
            (0..3_u32, 0..3_u32)
                .prop_map(|(time, increment)| Bson::Timestamp(Timestamp { time, increment })),
            prop::collection::vec(0..3_u8, 0..3).prop_map(|bytes| Bson::Binary(bson::Binary {
                subtype: bson::spec::BinarySubtype::Generic,
                bytes
            })),
        ];
        leaf.prop_recursive(3, 12, 3, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Bson::Array),
                prop::collection::vec(("[ab]{1,2}", inner), 0..3)
                    .prop_map(|fields| Bson::Document(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn keys_sort_as_values_do(a in values(), b in values()) {
            prop_assert_eq!(key(&a).cmp(&key(&b)), compare(&a, &b), "{:?} {:?}", a, b);
            prop_assert_eq!(compare(&b, &a), compare(&a, &b).reverse());
            let (mut down_a, mut down_b) = (Vec::new(), Vec::new());
            append_key_descending(&mut down_a, &a);
            append_key_descending(&mut down_b, &b);
            prop_assert_eq!(down_b.cmp(&down_a), compare(&a, &b));
        }
    }

    #[test]
    fn numbers_of_four_types_are_one_kind() {
        let ones = [
            Bson::Int32(1),
            Bson::Int64(1),
            Bson::Double(1.0),
            Bson::Decimal128("1.00".parse().unwrap()),
        ];
        for a in &ones {
            for b in &ones {
                assert_eq!(compare(a, b), Ordering::Equal);
                assert_eq!(key(a), key(b));
            }
        }
        assert_eq!(
            arithmetic(&Bson::Int32(i32::MAX), &Bson::Int32(1), Operation::Add, true),
            Some(Bson::Int64(1 << 31))
        );
        assert_eq!(arithmetic(&Bson::Int64(i64::MAX), &Bson::Int32(1), Operation::Add, true), None);
    }

    #[test]
    fn types_come_in_the_order_of_bson() {
        let order = [
            Bson::MinKey,
            Bson::Null,
            Bson::Int32(9),
            Bson::String("".into()),
            Bson::Document(doc! {}),
            Bson::Array(vec![]),
            Bson::Boolean(false),
            Bson::DateTime(bson::DateTime::from_millis(0)),
            Bson::MaxKey,
        ];
        for pair in order.windows(2) {
            assert_eq!(compare(&pair[0], &pair[1]), Ordering::Less, "{pair:?}");
        }
    }
}
