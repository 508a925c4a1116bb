//! From BSON to [`Expression`].

use bson::{Bson, Document};

use super::{DEEPEST, Expression, MISSING, Op};
use crate::error::{Code, Result, bad, fail};

/// Operators whose argument is a document of named arguments, in the order of their evaluation;
/// a name that ends in `!` must be there.
const NAMED: &[(&str, &[&str])] = &[
    ("$zip", &["inputs!", "useLongestLength", "defaults"]),
    ("$trim", &["input!", "chars"]),
    ("$ltrim", &["input!", "chars"]),
    ("$rtrim", &["input!", "chars"]),
    ("$regexMatch", &["input!", "regex!", "options"]),
    ("$regexFind", &["input!", "regex!", "options"]),
    ("$regexFindAll", &["input!", "regex!", "options"]),
    ("$replaceOne", &["input!", "find!", "replacement!"]),
    ("$replaceAll", &["input!", "find!", "replacement!"]),
    ("$dateToString", &["date!", "format", "timezone", "onNull"]),
    ("$dateFromString", &["dateString!", "format", "timezone", "onError", "onNull"]),
    ("$dateToParts", &["date!", "timezone", "iso8601"]),
    (
        "$dateFromParts",
        &[
            "year",
            "month",
            "day",
            "hour",
            "minute",
            "second",
            "millisecond",
            "timezone",
            "isoWeekYear",
            "isoWeek",
            "isoDayOfWeek",
        ],
    ),
    ("$dateAdd", &["startDate!", "unit!", "amount!", "timezone"]),
    ("$dateSubtract", &["startDate!", "unit!", "amount!", "timezone"]),
    ("$dateDiff", &["startDate!", "endDate!", "unit!", "timezone", "startOfWeek"]),
    ("$dateTrunc", &["date!", "unit!", "binSize", "timezone", "startOfWeek"]),
    ("$convert", &["input!", "to!", "onError", "onNull"]),
    ("$firstN", &["input!", "n!"]),
    ("$lastN", &["input!", "n!"]),
    ("$maxN", &["input!", "n!"]),
    ("$minN", &["input!", "n!"]),
    ("$setField", &["field!", "input!", "value!"]),
    ("$unsetField", &["field!", "input!"]),
];

/// Operators on dates whose argument may be a date or a document with a date and a time zone.
const DATE_PARTS: &[&str] = &[
    "$year",
    "$month",
    "$dayOfMonth",
    "$dayOfWeek",
    "$dayOfYear",
    "$hour",
    "$minute",
    "$second",
    "$millisecond",
    "$week",
    "$isoWeek",
    "$isoWeekYear",
    "$isoDayOfWeek",
];

pub(super) fn expression(source: &Bson, depth: usize) -> Result<Expression> {
    if depth > DEEPEST {
        return fail(Code::Overflow, "an expression is nested too deeply");
    }
    match source {
        Bson::String(text) if text.starts_with("$$") => variable(&text[2..]),
        Bson::String(text) if text.starts_with('$') => {
            if text.len() == 1 {
                return fail(Code::RemoveOnly, "'$' by itself is not a valid FieldPath");
            }
            Ok(Expression::Field(crate::path::split(&text[1..])?))
        }
        Bson::Document(document) => object(document, depth),
        Bson::Array(elements) => Ok(Expression::Array(
            elements.iter().map(|element| expression(element, depth + 1)).collect::<Result<_>>()?,
        )),
        other => Ok(Expression::Literal(other.clone())),
    }
}

fn variable(text: &str) -> Result<Expression> {
    let mut parts = crate::path::split(text)?;
    let name = parts.remove(0);
    if !name.chars().next().is_some_and(|first| first.is_alphabetic()) {
        return fail(
            Code::FailedToParse,
            format!("'{name}' starts with an invalid character for a variable name"),
        );
    }
    Ok(Expression::Variable(name, parts))
}

fn object(document: &Document, depth: usize) -> Result<Expression> {
    if let (1, Some((name, argument))) = (document.len(), document.iter().next())
        && name.starts_with('$')
    {
        return operator(name, argument, depth);
    }
    let mut fields = Vec::with_capacity(document.len());
    for (name, value) in document {
        if name.starts_with('$') {
            return fail(
                Code::PathNotViable,
                format!("an object of expressions cannot have the field {name} beside others"),
            );
        }
        if name.contains('.') {
            return fail(
                Code::DottedFieldName,
                format!("FieldPath field names may not contain '.': {name}"),
            );
        }
        fields.push((name.clone(), expression(value, depth + 1)?));
    }
    Ok(Expression::Document(fields))
}

fn operator(name: &str, argument: &Bson, depth: usize) -> Result<Expression> {
    let parse = |value: &Bson| expression(value, depth + 1);
    let boxed = |value: &Bson| -> Result<Box<Expression>> { Ok(Box::new(parse(value)?)) };
    match name {
        "$literal" | "$const" => return Ok(Expression::Literal(argument.clone())),
        "$let" => {
            let given = document_of(name, argument)?;
            let vars = document_of("$let's vars", required(name, given, "vars")?)?;
            let mut bindings = Vec::new();
            for (variable, value) in vars {
                bindings.push((variable.clone(), parse(value)?));
            }
            return Ok(Expression::Let(bindings, boxed(required(name, given, "in")?)?));
        }
        "$map" => {
            let given = document_of(name, argument)?;
            let input = boxed(required(name, given, "input")?)?;
            return Ok(Expression::Map(
                input,
                variable_name(given)?,
                boxed(required(name, given, "in")?)?,
            ));
        }
        "$filter" => {
            let given = document_of(name, argument)?;
            let input = boxed(required(name, given, "input")?)?;
            let condition = boxed(required(name, given, "cond")?)?;
            let limit = given.get("limit").map(boxed).transpose()?;
            return Ok(Expression::Filter(input, variable_name(given)?, condition, limit));
        }
        "$reduce" => {
            let given = document_of(name, argument)?;
            return Ok(Expression::Reduce(
                boxed(required(name, given, "input")?)?,
                boxed(required(name, given, "initialValue")?)?,
                boxed(required(name, given, "in")?)?,
            ));
        }
        "$switch" => {
            let given = document_of(name, argument)?;
            let Bson::Array(branches) = required(name, given, "branches")? else {
                return bad("$switch expected an array for 'branches'");
            };
            let mut parsed = Vec::new();
            for branch in branches {
                let branch = document_of("a branch of $switch", branch)?;
                parsed.push((
                    parse(required(name, branch, "case")?)?,
                    parse(required(name, branch, "then")?)?,
                ));
            }
            let default = given.get("default").map(boxed).transpose()?;
            if parsed.is_empty() && default.is_none() {
                return bad("$switch requires at least one branch.");
            }
            return Ok(Expression::Switch(parsed, default));
        }
        "$sortArray" => {
            let given = document_of(name, argument)?;
            let order = match required(name, given, "sortBy")? {
                Bson::Document(order) => crate::sort::Order::parse(order)?,
                direction => crate::sort::Order::whole(direction)?,
            };
            return Ok(Expression::SortArray(boxed(required(name, given, "input")?)?, order));
        }
        "$cond" => {
            if let Bson::Document(given) = argument {
                return Ok(Expression::Call(
                    Op::Cond,
                    vec![
                        parse(required(name, given, "if")?)?,
                        parse(required(name, given, "then")?)?,
                        parse(required(name, given, "else")?)?,
                    ],
                ));
            }
        }
        "$getField" => {
            let (field, input) = match argument {
                Bson::Document(given) if given.contains_key("field") => {
                    let input = match given.get("input") {
                        Some(input) => parse(input)?,
                        None => Expression::Variable("CURRENT".to_owned(), Vec::new()),
                    };
                    (parse(required(name, given, "field")?)?, input)
                }
                field => (parse(field)?, Expression::Variable("CURRENT".to_owned(), Vec::new())),
            };
            return Ok(Expression::Call(Op::GetField, vec![field, input]));
        }
        "$function" | "$accumulator" | "$where" => {
            return fail(
                Code::CommandNotSupported,
                format!("{name} is not supported: this server runs no JavaScript"),
            );
        }
        "$meta" => {
            return fail(
                Code::CommandNotSupported,
                "$meta is not supported: there is no text search",
            );
        }
        _ => {}
    }
    let Some((op, least, most)) = Op::named(name) else {
        return fail(Code::ExpressionUnknown, format!("Unrecognized expression '{name}'"));
    };
    if let Some((_, names)) = NAMED.iter().find(|(known, _)| *known == name) {
        return named(op, names, document_of(name, argument)?, depth);
    }
    if DATE_PARTS.contains(&name)
        && let Bson::Document(given) = argument
        && given.contains_key("date")
    {
        return named(op, &["date!", "timezone"], given, depth);
    }
    let arguments = match argument {
        Bson::Array(elements) => elements.iter().map(parse).collect::<Result<Vec<_>>>()?,
        // `$rand: {}` has none.
        Bson::Document(given) if given.is_empty() && most == 0 => Vec::new(),
        single => vec![parse(single)?],
    };
    if arguments.len() < least || arguments.len() > most {
        let wanted = if least == most {
            format!("exactly {least} arguments")
        } else {
            format!("at least {least} arguments, and at most {most}")
        };
        return fail(
            Code::ExpressionArity,
            format!("Expression {name} takes {wanted}. {} were passed in.", arguments.len()),
        );
    }
    Ok(Expression::Call(op, arguments))
}

fn named(op: Op, names: &[&str], given: &Document, depth: usize) -> Result<Expression> {
    for name in given.keys() {
        if !names.iter().any(|known| known.trim_end_matches('!') == name) {
            return fail(
                Code::FailedToParse,
                format!("{} found an unknown argument: {name}", op.name()),
            );
        }
    }
    let mut arguments = Vec::with_capacity(names.len());
    for name in names {
        let plain = name.trim_end_matches('!');
        arguments.push(match given.get(plain) {
            Some(value) => expression(value, depth + 1)?,
            None if name.ends_with('!') => {
                return fail(Code::FailedToParse, format!("{} requires '{plain}'", op.name()));
            }
            None => Expression::Literal(MISSING),
        });
    }
    Ok(Expression::Call(op, arguments))
}

fn document_of<'a>(name: &str, value: &'a Bson) -> Result<&'a Document> {
    match value {
        Bson::Document(document) => Ok(document),
        _ => fail(Code::FailedToParse, format!("{name} only supports an object as its argument")),
    }
}

fn required<'a>(name: &str, given: &'a Document, field: &str) -> Result<&'a Bson> {
    match given.get(field) {
        Some(value) => Ok(value),
        None => fail(Code::FailedToParse, format!("Missing '{field}' parameter to {name}")),
    }
}

fn variable_name(given: &Document) -> Result<String> {
    match given.get("as") {
        None => Ok("this".to_owned()),
        Some(Bson::String(name)) if !name.is_empty() => Ok(name.clone()),
        Some(_) => fail(Code::FailedToParse, "'as' must be a non-empty string"),
    }
}
