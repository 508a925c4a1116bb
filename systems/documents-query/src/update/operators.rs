//! The operators of an update.

use std::cmp::Ordering;

use bson::{Bson, DateTime, Document, Timestamp};

use super::Context;
use super::apply::{find, reach, remove};
use crate::decimal::Operation;
use crate::error::{Code, Result, bad, fail};
use crate::matching::{Filter, Predicate};
use crate::path;
use crate::sort::Order;
use crate::value::{arithmetic, compare, integral, is_number, type_name};

/// One operator with its argument.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "named after MongoDB's operators")]
pub enum Operator {
    Set(Bson),
    SetOnInsert(Bson),
    Unset,
    Inc(Bson),
    Mul(Bson),
    Min(Bson),
    Max(Bson),
    Rename(Vec<String>),
    CurrentDate(bool),
    Push(Push),
    AddToSet(Vec<Bson>),
    Pop(bool),
    Pull(Pull),
    PullAll(Vec<Bson>),
    Bit(Vec<(Logic, Bson)>),
}

/// `$push` with its modifiers.
#[derive(Clone, Debug)]
pub struct Push {
    values: Vec<Bson>,
    position: Option<i64>,
    slice: Option<i64>,
    sort: Option<Order>,
}

/// What `$pull` takes away.
#[derive(Clone, Debug)]
pub enum Pull {
    /// Documents a filter selects.
    Documents(Filter),
    /// Values that satisfy all.
    Values(Vec<Predicate>),
    /// Values equal to one.
    Equal(Bson),
}

/// What `$bit` does.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "named after MongoDB's operators")]
pub enum Logic {
    And,
    Or,
    Xor,
}

pub(super) fn parse(source: &Document) -> Result<Vec<(Vec<String>, Operator)>> {
    let mut all: Vec<(Vec<String>, Operator)> = Vec::new();
    for (name, argument) in source {
        if !name.starts_with('$') {
            return fail(
                Code::FailedToParse,
                format!(
                    "Unknown modifier: {name}. Expected a valid update modifier or pipeline-style update specified as an array"
                ),
            );
        }
        let Bson::Document(fields) = argument else {
            return fail(
                Code::FailedToParse,
                format!(
                    "Modifiers operate on fields but we found type {} instead. For example: {{$mod: {{<field>: ...}}}} not {{{name}: {argument}}}",
                    type_name(argument)
                ),
            );
        };
        for (field, value) in fields {
            let parts = path::split(field)?;
            if let Some(part) =
                parts.iter().find(|part| part.starts_with('$') && !is_positional(part))
            {
                return fail(
                    Code::DollarPrefixedFieldName,
                    format!(
                        "The dollar ($) prefixed field '{part}' in '{field}' is not allowed in the context of an update"
                    ),
                );
            }
            if parts.first().is_some_and(|first| is_positional(first)) {
                return bad(format!(
                    "Cannot have positional (i.e. '$') element in the first position in path '{field}'"
                ));
            }
            let operator = one(name, field, value)?;
            if let Operator::Rename(to) = &operator {
                collide(&all, to)?;
                if to.starts_with(&parts) || parts.starts_with(to) {
                    return bad(format!(
                        "The source and target field for $rename must differ and not be on the same path: {field}"
                    ));
                }
            }
            collide(&all, &parts)?;
            all.push((parts, operator));
        }
    }
    all.sort_by(|(a, _), (b, _)| compare_paths(a, b));
    Ok(all)
}

fn is_positional(part: &str) -> bool {
    part == "$" || (part.starts_with("$[") && part.ends_with(']'))
}

fn compare_paths(a: &[String], b: &[String]) -> Ordering {
    for (a, b) in a.iter().zip(b) {
        let order = match (path::position(a), path::position(b)) {
            (Some(a), Some(b)) => a.cmp(&b),
            _ => a.cmp(b),
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    a.len().cmp(&b.len())
}

fn collide(all: &[(Vec<String>, Operator)], parts: &[String]) -> Result<()> {
    let taken = all.iter().flat_map(|(known, operator)| {
        let target = match operator {
            Operator::Rename(to) => Some(to),
            _ => None,
        };
        std::iter::once(known).chain(target)
    });
    for known in taken {
        if known.starts_with(parts) || parts.starts_with(known) {
            let shorter = if known.len() < parts.len() { known.as_slice() } else { parts };
            return fail(
                Code::ConflictingUpdateOperators,
                format!(
                    "Updating the path '{}' would create a conflict at '{}'",
                    parts.join("."),
                    shorter.join(".")
                ),
            );
        }
    }
    Ok(())
}

fn one(name: &str, field: &str, value: &Bson) -> Result<Operator> {
    Ok(match name {
        "$set" => Operator::Set(value.clone()),
        "$setOnInsert" => Operator::SetOnInsert(value.clone()),
        "$unset" => Operator::Unset,
        "$inc" | "$mul" => {
            if !is_number(value) {
                let word = if name == "$inc" { "increment" } else { "multiply" };
                return fail(
                    Code::TypeMismatch,
                    format!("Cannot {word} with non-numeric argument: {{{field}: {value}}}"),
                );
            }
            if name == "$inc" { Operator::Inc(value.clone()) } else { Operator::Mul(value.clone()) }
        }
        "$min" => Operator::Min(value.clone()),
        "$max" => Operator::Max(value.clone()),
        "$rename" => match value {
            Bson::String(to) => Operator::Rename(path::split(to)?),
            other => {
                return bad(format!(
                    "The 'to' field for $rename must be a string: {field}: {other}"
                ));
            }
        },
        "$currentDate" => match value {
            Bson::Boolean(_) => Operator::CurrentDate(true),
            Bson::Document(kind) => match kind.get_str("$type") {
                Ok("date") => Operator::CurrentDate(true),
                Ok("timestamp") => Operator::CurrentDate(false),
                _ => {
                    return bad("The '$type' string field is required to be 'date' or 'timestamp'");
                }
            },
            other => {
                return bad(format!(
                    "{} is not valid type for $currentDate. Please use a boolean ('true') or a $type expression ({{$type: 'timestamp/date'}}).",
                    type_name(other)
                ));
            }
        },
        "$push" => Operator::Push(push(value)?),
        "$addToSet" => Operator::AddToSet(match value {
            Bson::Document(inner) if inner.keys().next().is_some_and(|key| key == "$each") => {
                match inner.get("$each") {
                    Some(Bson::Array(all)) => all.clone(),
                    _ => {
                        return fail(
                            Code::TypeMismatch,
                            "The argument to $each in $addToSet must be an array",
                        );
                    }
                }
            }
            other => vec![other.clone()],
        }),
        "$pop" => match integral(value) {
            Some(1) => Operator::Pop(false),
            Some(-1) => Operator::Pop(true),
            _ => return fail(Code::FailedToParse, format!("$pop expects 1 or -1, found: {value}")),
        },
        "$pull" => Operator::Pull(pull(value)?),
        "$pullAll" => match value {
            Bson::Array(all) => Operator::PullAll(all.clone()),
            other => {
                return bad(format!(
                    "$pullAll requires an array argument but was given a {}",
                    type_name(other)
                ));
            }
        },
        "$bit" => {
            let Bson::Document(all) = value else {
                return bad("The $bit modifier is not compatible with a non-object argument");
            };
            let mut steps = Vec::new();
            for (word, operand) in all {
                let logic = match word.as_str() {
                    "and" => Logic::And,
                    "or" => Logic::Or,
                    "xor" => Logic::Xor,
                    other => {
                        return bad(format!(
                            "The $bit modifier only supports 'and', 'or', and 'xor', not '{other}' which is an unknown operator"
                        ));
                    }
                };
                if !matches!(operand, Bson::Int32(_) | Bson::Int64(_)) {
                    return bad(format!(
                        "The $bit modifier field must be an Integer(32/64 bit); a '{}' is not supported here",
                        type_name(operand)
                    ));
                }
                steps.push((logic, operand.clone()));
            }
            if steps.is_empty() {
                return bad("You must pass in at least one bitwise operation");
            }
            Operator::Bit(steps)
        }
        other => {
            return fail(
                Code::FailedToParse,
                format!(
                    "Unknown modifier: {other}. Expected a valid update modifier or pipeline-style update specified as an array"
                ),
            );
        }
    })
}

fn push(value: &Bson) -> Result<Push> {
    let plain = || Push { values: vec![value.clone()], position: None, slice: None, sort: None };
    let Bson::Document(modifiers) = value else { return Ok(plain()) };
    if !modifiers.contains_key("$each") {
        return match modifiers.keys().find(|key| key.starts_with('$')) {
            Some(name) if matches!(name.as_str(), "$slice" | "$sort" | "$position") => {
                bad("$push needs $each beside its other modifiers")
            }
            _ => Ok(plain()),
        };
    }
    let mut push = Push { values: Vec::new(), position: None, slice: None, sort: None };
    for (name, value) in modifiers {
        match (name.as_str(), value) {
            ("$each", Bson::Array(all)) => push.values = all.clone(),
            ("$each", other) => {
                return bad(format!(
                    "The argument to $each in $push must be an array but it was of type: {}",
                    type_name(other)
                ));
            }
            ("$position" | "$slice", value) => match integral(value) {
                Some(number) if name == "$position" => push.position = Some(number),
                Some(number) => push.slice = Some(number),
                None => return bad(format!("The value for {name} must be an integer value")),
            },
            ("$sort", Bson::Document(order)) => push.sort = Some(Order::parse(order)?),
            ("$sort", direction) => push.sort = Some(Order::whole(direction)?),
            (other, _) => return bad(format!("Unrecognized clause in $push: {other}")),
        }
    }
    Ok(push)
}

fn pull(value: &Bson) -> Result<Pull> {
    Ok(match value {
        Bson::Document(inner)
            if inner.keys().next().is_some_and(|key| {
                key.starts_with('$') && !matches!(key.as_str(), "$and" | "$or" | "$nor")
            }) =>
        {
            match Filter::parse(&bson::doc! { "v": value.clone() })? {
                Filter::Field(_, predicate) => Pull::Values(vec![predicate]),
                Filter::And(parts) => Pull::Values(
                    parts
                        .into_iter()
                        .filter_map(|part| match part {
                            Filter::Field(_, predicate) => Some(predicate),
                            _ => None,
                        })
                        .collect(),
                ),
                _ => return bad("$pull cannot be read"),
            }
        }
        Bson::Document(inner) => Pull::Documents(Filter::parse(inner)?),
        Bson::RegularExpression(_) => match Filter::parse(&bson::doc! { "v": value.clone() })? {
            Filter::Field(_, predicate) => Pull::Values(vec![predicate]),
            _ => return bad("$pull cannot be read"),
        },
        other => Pull::Equal(other.clone()),
    })
}

fn same(a: &Bson, b: &Bson) -> bool {
    compare(a, b) == Ordering::Equal
}

impl Operator {
    pub(super) fn apply(
        &self,
        document: &mut Document,
        parts: &[String],
        context: &Context<'_>,
    ) -> Result<()> {
        let name = || parts.join(".");
        match self {
            Self::Set(value) | Self::SetOnInsert(value) => *reach(document, parts)? = value.clone(),
            Self::Unset => drop(remove(document, parts)),
            Self::Inc(by) | Self::Mul(by) => {
                let increase = matches!(self, Self::Inc(_));
                let new = match find(document, parts) {
                    None if increase => by.clone(),
                    None => arithmetic(&Bson::Int32(0), by, Operation::Multiply, true)
                        .unwrap_or(Bson::Int32(0)),
                    Some(old) if is_number(old) => {
                        let operation = if increase { Operation::Add } else { Operation::Multiply };
                        match arithmetic(old, by, operation, true) {
                            Some(new) => new,
                            None => {
                                return bad(format!(
                                    "Failed to apply $inc operations to current value ({old}) for document {{_id: {}}}",
                                    id_of(document)
                                ));
                            }
                        }
                    }
                    Some(old) => {
                        let word = if increase { "$inc" } else { "$mul" };
                        return fail(
                            Code::TypeMismatch,
                            format!(
                                "Cannot apply {word} to a value of non-numeric type. {{_id: {}}} has the field '{}' of non-numeric type {}",
                                id_of(document),
                                parts.last().map_or("", String::as_str),
                                type_name(old)
                            ),
                        );
                    }
                };
                *reach(document, parts)? = new;
            }
            Self::Min(value) | Self::Max(value) => {
                let wanted =
                    if matches!(self, Self::Min(_)) { Ordering::Less } else { Ordering::Greater };
                if find(document, parts).is_none_or(|old| compare(value, old) == wanted) {
                    *reach(document, parts)? = value.clone();
                }
            }
            Self::Rename(to) => {
                if let Some(value) = remove(document, parts) {
                    remove(document, to);
                    *reach(document, to)? = value;
                }
            }
            Self::CurrentDate(true) => *reach(document, parts)? = Bson::DateTime(DateTime::now()),
            Self::CurrentDate(false) => {
                let time = (DateTime::now().timestamp_millis() / 1000) as u32;
                *reach(document, parts)? = Bson::Timestamp(Timestamp { time, increment: 1 });
            }
            Self::Push(push) => {
                let Some(elements) = array_for(document, parts, "$push")? else { return Ok(()) };
                push.apply(elements);
            }
            Self::AddToSet(values) => {
                let Some(elements) = array_for(document, parts, "$addToSet")? else {
                    return Ok(());
                };
                for value in values {
                    if !elements.iter().any(|known| same(known, value)) {
                        elements.push(value.clone());
                    }
                }
            }
            Self::Pop(first) => match find(document, parts) {
                None => {}
                Some(Bson::Array(_)) => {
                    if let Bson::Array(elements) = reach(document, parts)? {
                        if *first && !elements.is_empty() {
                            elements.remove(0);
                        } else {
                            elements.pop();
                        }
                    }
                }
                Some(other) => {
                    return fail(
                        Code::TypeMismatch,
                        format!(
                            "Path '{}' contains an element of non-array type '{}'",
                            name(),
                            type_name(other)
                        ),
                    );
                }
            },
            Self::Pull(_) | Self::PullAll(_) => match find(document, parts) {
                None => {}
                Some(Bson::Array(_)) => {
                    if let Bson::Array(elements) = reach(document, parts)? {
                        elements.retain(|element| !self.pulls(element));
                    }
                }
                Some(_) => return bad("Cannot apply $pull to a non-array value"),
            },
            Self::Bit(steps) => {
                let mut value = match find(document, parts) {
                    None => Bson::Int32(0),
                    Some(value @ (Bson::Int32(_) | Bson::Int64(_))) => value.clone(),
                    Some(other) => {
                        return bad(format!(
                            "Cannot apply $bit to a value of non-integral type. {{_id: {}}} has the field {} of non-integer type {}",
                            id_of(document),
                            name(),
                            type_name(other)
                        ));
                    }
                };
                for (logic, operand) in steps {
                    let (a, b) = (integral(&value).unwrap_or(0), integral(operand).unwrap_or(0));
                    let result = match logic {
                        Logic::And => a & b,
                        Logic::Or => a | b,
                        Logic::Xor => a ^ b,
                    };
                    let narrow = matches!((&value, operand), (Bson::Int32(_), Bson::Int32(_)));
                    value = if narrow { Bson::Int32(result as i32) } else { Bson::Int64(result) };
                }
                *reach(document, parts)? = value;
            }
        }
        let _ = context;
        Ok(())
    }

    fn pulls(&self, element: &Bson) -> bool {
        match self {
            Self::PullAll(values) => values.iter().any(|value| same(value, element)),
            Self::Pull(Pull::Equal(value)) => same(value, element),
            Self::Pull(Pull::Values(predicates)) => {
                predicates.iter().all(|one| one.on_value(element))
            }
            Self::Pull(Pull::Documents(filter)) => {
                matches!(element, Bson::Document(inner) if filter.matches(inner))
            }
            _ => false,
        }
    }
}

impl Push {
    fn apply(&self, elements: &mut Vec<Bson>) {
        let length = elements.len() as i64;
        let at = match self.position {
            Some(at) if at < 0 => (length + at).max(0),
            Some(at) => at.min(length),
            None => length,
        } as usize;
        elements.splice(at..at, self.values.iter().cloned());
        if let Some(order) = &self.sort {
            order.sort_values(elements);
        }
        match self.slice {
            Some(count) if count < 0 => {
                let keep = usize::try_from(count.unsigned_abs()).unwrap_or(usize::MAX);
                elements.drain(..elements.len().saturating_sub(keep));
            }
            Some(count) => elements.truncate(count as usize),
            None => {}
        }
    }
}

fn id_of(document: &Document) -> String {
    document.get("_id").map_or_else(|| "none".to_owned(), ToString::to_string)
}

fn array_for<'a>(
    document: &'a mut Document,
    parts: &[String],
    operator: &str,
) -> Result<Option<&'a mut Vec<Bson>>> {
    let kind = match find(document, parts) {
        None => None,
        Some(Bson::Array(_)) => Some("array"),
        Some(other) => Some(type_name(other)),
    };
    let id = id_of(document);
    let slot = reach(document, parts)?;
    match kind {
        None => *slot = Bson::Array(Vec::new()),
        Some("array") => {}
        Some(other) => {
            return bad(format!(
                "The field '{}' must be an array but is of type {other} in document {{_id: {id}}} ({operator})",
                parts.join(".")
            ));
        }
    }
    Ok(match slot {
        Bson::Array(elements) => Some(elements),
        _ => None,
    })
}
