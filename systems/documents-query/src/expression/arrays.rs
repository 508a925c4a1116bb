//! Arrays, sets, objects, and accumulators used as expressions.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use bson::{Bson, Document};

use super::{MISSING, Op, is_nullish};
use crate::decimal::Operation;
use crate::error::{Code, Result, bad, fail};
use crate::value::{arithmetic, compare, integral, is_number, key, number, truthy, type_name};

pub(super) fn apply(op: Op, values: Vec<Bson>) -> Result<Bson> {
    match op {
        Op::ArrayElemAt => element_at(&values),
        Op::First => Ok(edge(op, &values[0])?.first().cloned().unwrap_or(MISSING)),
        Op::Last => Ok(edge(op, &values[0])?.last().cloned().unwrap_or(MISSING)),
        Op::ArrayToObject => to_object(&values[0]),
        Op::ObjectToArray => to_array(&values[0]),
        Op::ConcatArrays => {
            let mut all = Vec::new();
            for value in values {
                match value {
                    Bson::Array(elements) => all.extend(elements),
                    value if is_nullish(&value) => return Ok(Bson::Null),
                    other => {
                        return fail(
                            Code::SliceShape,
                            format!(
                                "$concatArrays only supports arrays, not {}",
                                type_name(&other)
                            ),
                        );
                    }
                }
            }
            Ok(Bson::Array(all))
        }
        Op::In => {
            let Bson::Array(elements) = &values[1] else {
                return bad(format!(
                    "$in requires an array as a second argument, found: {}",
                    name(&values[1])
                ));
            };
            Ok(Bson::Boolean(
                elements.iter().any(|element| compare(element, &values[0]) == Ordering::Equal),
            ))
        }
        Op::IndexOfArray => index_of(&values),
        Op::IsArray => Ok(Bson::Boolean(matches!(values[0], Bson::Array(_)))),
        Op::Range => range(&values),
        Op::ReverseArray => match values.into_iter().next() {
            Some(Bson::Array(elements)) => Ok(Bson::Array(elements.into_iter().rev().collect())),
            Some(value) if is_nullish(&value) => Ok(Bson::Null),
            _ => bad("The argument to $reverseArray must be an array"),
        },
        Op::Size => match &values[0] {
            Bson::Array(elements) => Ok(Bson::Int32(elements.len() as i32)),
            other => bad(format!(
                "The argument to $size must be an array, but was of type: {}",
                name(other)
            )),
        },
        Op::Slice => slice(&values),
        Op::Zip => zip(&values),
        Op::AllElementsTrue => Ok(Bson::Boolean(set(op, &values[0])?.iter().all(truthy))),
        Op::AnyElementTrue => Ok(Bson::Boolean(set(op, &values[0])?.iter().any(truthy))),
        Op::SetDifference
        | Op::SetEquals
        | Op::SetIntersection
        | Op::SetIsSubset
        | Op::SetUnion => sets(op, &values),
        Op::FirstN | Op::LastN | Op::MaxN | Op::MinN => some_of(op, &values),
        Op::Max | Op::Min => {
            let spread = spread(values);
            let wanted = if op == Op::Max { Ordering::Greater } else { Ordering::Less };
            let mut best: Option<Bson> = None;
            for value in spread.into_iter().filter(|value| !is_nullish(value)) {
                if best.as_ref().is_none_or(|best| compare(&value, best) == wanted) {
                    best = Some(value);
                }
            }
            Ok(best.unwrap_or(Bson::Null))
        }
        Op::Sum | Op::Avg => {
            let numbers: Vec<Bson> = spread(values).into_iter().filter(is_number).collect();
            let mut total = Bson::Int32(0);
            for value in &numbers {
                total = arithmetic(&total, value, Operation::Add, false).unwrap_or(Bson::Null);
            }
            if op == Op::Sum {
                return Ok(total);
            }
            if numbers.is_empty() {
                return Ok(Bson::Null);
            }
            let count = Bson::Int64(numbers.len() as i64);
            Ok(arithmetic(&total, &count, Operation::Divide, false).unwrap_or(Bson::Null))
        }
        Op::StdDevPop | Op::StdDevSamp => {
            let numbers: Vec<f64> = spread(values).iter().filter_map(number).collect();
            Ok(deviation(&numbers, op == Op::StdDevSamp))
        }
        Op::MergeObjects => {
            let mut merged = Document::new();
            for value in values {
                match value {
                    Bson::Document(document) => merged.extend(document),
                    value if is_nullish(&value) => {}
                    other => {
                        return fail(
                            Code::BadValue,
                            format!(
                                "$mergeObjects requires object inputs, but input {other} is of type {}",
                                type_name(&other)
                            ),
                        );
                    }
                }
            }
            Ok(Bson::Document(merged))
        }
        Op::GetField => match (&values[0], &values[1]) {
            (Bson::String(field), Bson::Document(document)) => {
                Ok(document.get(field).cloned().unwrap_or(MISSING))
            }
            (Bson::String(_), Bson::Null) => Ok(Bson::Null),
            (Bson::String(_), _) => Ok(MISSING),
            _ => bad("$getField requires 'field' to be a constant string"),
        },
        Op::SetField | Op::UnsetField => {
            let mut values = values.into_iter();
            let (Some(Bson::String(field)), Some(input)) = (values.next(), values.next()) else {
                return bad(format!("{} requires 'field' to be a constant string", op.name()));
            };
            match input {
                Bson::Document(mut document) => {
                    match values.next().unwrap_or(MISSING) {
                        MISSING => drop(document.remove(&field)),
                        value => drop(document.insert(field, value)),
                    }
                    Ok(Bson::Document(document))
                }
                value if is_nullish(&value) => Ok(Bson::Null),
                _ => bad(format!("{} requires 'input' to evaluate to an object", op.name())),
            }
        }
        other => fail(Code::InternalError, format!("{} is not evaluated here", other.name())),
    }
}

/// The spread of numbers, of a sample or of a whole.
#[must_use]
pub fn deviation(numbers: &[f64], sample: bool) -> Bson {
    let least = if sample { 2 } else { 1 };
    if numbers.len() < least {
        return Bson::Null;
    }
    let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
    let squares: f64 = numbers.iter().map(|value| (value - mean).powi(2)).sum();
    Bson::Double((squares / (numbers.len() - (least - 1)) as f64).sqrt())
}

fn name(value: &Bson) -> &'static str {
    if *value == MISSING { "missing" } else { type_name(value) }
}

/// One argument that is an array stands for its elements.
fn spread(mut values: Vec<Bson>) -> Vec<Bson> {
    if values.len() == 1
        && matches!(values[0], Bson::Array(_))
        && let Some(Bson::Array(elements)) = values.pop()
    {
        return elements;
    }
    values
}

fn edge(op: Op, value: &Bson) -> Result<&[Bson]> {
    match value {
        Bson::Array(elements) => Ok(elements),
        Bson::Null => Ok(&[Bson::Null]),
        Bson::Undefined => Ok(&[]),
        other => fail(
            Code::SliceShape,
            format!("{}'s argument must be an array, but is {}", op.name(), type_name(other)),
        ),
    }
}

fn element_at(values: &[Bson]) -> Result<Bson> {
    match (&values[0], integral(&values[1])) {
        (value, _) if is_nullish(value) => Ok(Bson::Null),
        (_, None) if is_nullish(&values[1]) => Ok(Bson::Null),
        (Bson::Array(elements), Some(at)) => {
            let at = if at < 0 { at + elements.len() as i64 } else { at };
            Ok(usize::try_from(at).ok().and_then(|at| elements.get(at)).cloned().unwrap_or(MISSING))
        }
        (Bson::Array(_), None) => fail(
            Code::SliceShape,
            "$arrayElemAt's second argument must be representable as a 32-bit integer",
        ),
        (other, _) => fail(
            Code::SliceShape,
            format!("$arrayElemAt's first argument must be an array, but is {}", name(other)),
        ),
    }
}

fn to_object(value: &Bson) -> Result<Bson> {
    let Bson::Array(elements) = value else {
        return if is_nullish(value) {
            Ok(Bson::Null)
        } else {
            bad("$arrayToObject requires an array input")
        };
    };
    let mut document = Document::new();
    for element in elements {
        match element {
            Bson::Array(pair) if pair.len() == 2 => match &pair[0] {
                Bson::String(name) => drop(document.insert(name.clone(), pair[1].clone())),
                _ => {
                    return bad(
                        "$arrayToObject requires an array of key-value pairs, where the key must be of type string",
                    );
                }
            },
            Bson::Document(pair) => match (pair.get("k"), pair.get("v")) {
                (Some(Bson::String(name)), Some(value)) => {
                    drop(document.insert(name.clone(), value.clone()))
                }
                _ => return bad("$arrayToObject requires an object with keys 'k' and 'v'"),
            },
            _ => return bad("$arrayToObject requires a consistent input format"),
        }
    }
    Ok(Bson::Document(document))
}

fn to_array(value: &Bson) -> Result<Bson> {
    match value {
        Bson::Document(document) => Ok(Bson::Array(
            document
                .iter()
                .map(|(name, value)| {
                    Bson::Document(bson::doc! { "k": name.clone(), "v": value.clone() })
                })
                .collect(),
        )),
        value if is_nullish(value) => Ok(Bson::Null),
        other => {
            bad(format!("$objectToArray requires a document input, found: {}", type_name(other)))
        }
    }
}

fn index_of(values: &[Bson]) -> Result<Bson> {
    let Bson::Array(elements) = &values[0] else {
        return if is_nullish(&values[0]) {
            Ok(Bson::Null)
        } else {
            bad("$indexOfArray requires an array as a first argument")
        };
    };
    let bound = |at: usize, default: usize| match values.get(at) {
        None => Ok(default),
        Some(value) => match integral(value) {
            Some(bound) if bound >= 0 => Ok(bound as usize),
            _ => bad("$indexOfArray requires non-negative bounds"),
        },
    };
    let (start, end) = (bound(2, 0)?, bound(3, elements.len())?.min(elements.len()));
    let found = (start..end).find(|&at| compare(&elements[at], &values[1]) == Ordering::Equal);
    Ok(Bson::Int32(found.map_or(-1, |at| at as i32)))
}

fn range(values: &[Bson]) -> Result<Bson> {
    let whole = |value: &Bson| match integral(value) {
        Some(value) if i32::try_from(value).is_ok() => Ok(value),
        _ => bad("$range requires numbers that fit 32 bits"),
    };
    let (start, end) = (whole(&values[0])?, whole(&values[1])?);
    let step = values.get(2).map_or(Ok(1), whole)?;
    if step == 0 {
        return bad("$range requires a non-zero step value");
    }
    if (end - start) / step > 4_000_000 {
        return fail(Code::ExceededMemoryLimit, "$range would use too much memory");
    }
    let (mut out, mut at) = (Vec::new(), start);
    while (step > 0 && at < end) || (step < 0 && at > end) {
        out.push(Bson::Int32(at as i32));
        at += step;
    }
    Ok(Bson::Array(out))
}

fn slice(values: &[Bson]) -> Result<Bson> {
    let Bson::Array(elements) = &values[0] else {
        return if is_nullish(&values[0]) {
            Ok(Bson::Null)
        } else {
            fail(
                Code::SliceShape,
                format!(
                    "First argument to $slice must be an array, but is of type: {}",
                    type_name(&values[0])
                ),
            )
        };
    };
    if values[1..].iter().any(is_nullish) {
        return Ok(Bson::Null);
    }
    let numbers: Vec<Option<i64>> = values[1..].iter().map(integral).collect();
    match numbers.as_slice() {
        [Some(count)] => Ok(Bson::Array(sliced(elements, None, *count))),
        [Some(position), Some(count)] if *count > 0 => {
            Ok(Bson::Array(sliced(elements, Some(*position), *count)))
        }
        [Some(_), Some(_)] => fail(Code::SliceShape, "Third argument to $slice must be positive"),
        _ => fail(Code::SliceShape, "$slice's positions must be 32-bit integers"),
    }
}

/// What `$slice` keeps, in projections too.
#[must_use]
pub fn sliced(elements: &[Bson], position: Option<i64>, count: i64) -> Vec<Bson> {
    let length = elements.len() as i64;
    let (start, count) = match position {
        None if count < 0 => ((length + count).max(0), count.saturating_neg()),
        None => (0, count),
        Some(position) if position < 0 => ((length + position).max(0), count),
        Some(position) => (position.min(length), count),
    };
    elements.iter().skip(start as usize).take(count as usize).cloned().collect()
}

fn zip(values: &[Bson]) -> Result<Bson> {
    let Bson::Array(inputs) = &values[0] else {
        return bad("inputs must be an array of expressions");
    };
    let longest = truthy(&values[1]);
    let defaults = match &values[2] {
        Bson::Array(defaults) => defaults.as_slice(),
        _ => &[],
    };
    let mut arrays = Vec::new();
    for input in inputs {
        match input {
            Bson::Array(elements) => arrays.push(elements),
            value if is_nullish(value) => return Ok(Bson::Null),
            other => return bad(format!("$zip found a non-array expression in input: {other}")),
        }
    }
    let lengths = arrays.iter().map(|elements| elements.len());
    let length = if longest { lengths.max() } else { lengths.min() }.unwrap_or(0);
    let row = |at: usize| {
        arrays
            .iter()
            .enumerate()
            .map(|(column, elements)| {
                elements.get(at).or_else(|| defaults.get(column)).cloned().unwrap_or(Bson::Null)
            })
            .collect()
    };
    Ok(Bson::Array((0..length).map(|at| Bson::Array(row(at))).collect()))
}

fn set(op: Op, value: &Bson) -> Result<&[Bson]> {
    match value {
        Bson::Array(elements) => Ok(elements),
        other => bad(format!(
            "All operands of {} must be arrays. One argument is of type: {}",
            op.name(),
            name(other)
        )),
    }
}

fn sets(op: Op, values: &[Bson]) -> Result<Bson> {
    if matches!(op, Op::SetUnion | Op::SetIntersection | Op::SetDifference)
        && values.iter().any(is_nullish)
    {
        return Ok(Bson::Null);
    }
    let mut arrays = Vec::new();
    for value in values {
        arrays.push(set(op, value)?);
    }
    let keys = |elements: &[Bson]| elements.iter().map(key).collect::<BTreeSet<_>>();
    let distinct = |elements: &mut dyn Iterator<Item = &Bson>| {
        let mut seen = BTreeSet::new();
        elements.filter(|element| seen.insert(key(element))).cloned().collect::<Vec<_>>()
    };
    Ok(match op {
        Op::SetEquals => {
            let first = keys(arrays[0]);
            Bson::Boolean(arrays[1..].iter().all(|array| keys(array) == first))
        }
        Op::SetIsSubset => Bson::Boolean(keys(arrays[0]).is_subset(&keys(arrays[1]))),
        Op::SetUnion => {
            let mut all = distinct(&mut arrays.iter().flat_map(|array| array.iter()));
            all.sort_by(compare);
            Bson::Array(all)
        }
        Op::SetDifference => {
            let without = keys(arrays[1]);
            Bson::Array(distinct(
                &mut arrays[0].iter().filter(|element| !without.contains(&key(element))),
            ))
        }
        _ => {
            let others: Vec<_> = arrays.iter().skip(1).map(|array| keys(array)).collect();
            let first = arrays.first().copied().unwrap_or_default();
            let mut all = distinct(&mut first.iter().filter(|element| {
                let wanted = key(element);
                others.iter().all(|other| other.contains(&wanted))
            }));
            all.sort_by(compare);
            Bson::Array(all)
        }
    })
}

fn some_of(op: Op, values: &[Bson]) -> Result<Bson> {
    let count = match integral(&values[1]) {
        Some(count) if count > 0 => count as usize,
        _ => return bad(format!("'n' must be greater than 0 in {}", op.name())),
    };
    let Bson::Array(elements) = &values[0] else {
        return if is_nullish(&values[0]) {
            Ok(Bson::Null)
        } else {
            bad(format!("{}'s input must be an array", op.name()))
        };
    };
    let mut all = elements.clone();
    match op {
        Op::LastN => drop(all.drain(..all.len().saturating_sub(count))),
        Op::MaxN => {
            all.retain(|value| !is_nullish(value));
            all.sort_by(|a, b| compare(b, a));
        }
        Op::MinN => {
            all.retain(|value| !is_nullish(value));
            all.sort_by(compare);
        }
        _ => {}
    }
    all.truncate(count);
    Ok(Bson::Array(all))
}
