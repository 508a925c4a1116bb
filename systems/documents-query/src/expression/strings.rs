//! Text.

use bson::{Bson, Document};

use super::{Op, is_nullish, to_text};
use crate::error::{Code, Result, bad, fail};
use crate::regex::Pattern;
use crate::value::{integral, type_name};

/// Strings that `$split` makes at most.
const MOST_PARTS: usize = 1 << 20;
/// Bytes that `$replaceAll` puts in at most.
const MOST_REPLACED: usize = 64 << 20;

pub(super) fn apply(op: Op, values: &[Bson]) -> Option<Result<Bson>> {
    Some(match op {
        Op::Concat => concat(values),
        Op::ToLower | Op::ToUpper => case(op, &values[0]),
        Op::Strcasecmp => casecmp(values),
        Op::StrLenBytes => text(op, &values[0]).map(|text| count(text.len())),
        Op::StrLenCP => text(op, &values[0]).map(|text| count(text.chars().count())),
        Op::Substr | Op::SubstrBytes => substring_bytes(op, values),
        Op::SubstrCP => substring_letters(values),
        Op::Split => split(values),
        Op::IndexOfBytes | Op::IndexOfCP => index_of(op, values),
        Op::Trim | Op::Ltrim | Op::Rtrim => trim(op, values),
        Op::RegexMatch | Op::RegexFind | Op::RegexFindAll => regex(op, values),
        Op::ReplaceOne | Op::ReplaceAll => replace(op, values),
        _ => return None,
    })
}

fn count(length: usize) -> Bson {
    i32::try_from(length).map_or(Bson::Int64(length as i64), Bson::Int32)
}

fn text(op: Op, value: &Bson) -> Result<&str> {
    match value {
        Bson::String(text) | Bson::Symbol(text) => Ok(text),
        other => {
            bad(format!("{} requires a string argument, found: {}", op.name(), type_name(other)))
        }
    }
}

fn concat(values: &[Bson]) -> Result<Bson> {
    let mut out = String::new();
    for value in values {
        match value {
            Bson::String(text) => out.push_str(text),
            value if is_nullish(value) => return Ok(Bson::Null),
            other => {
                return fail(
                    Code::TypeMismatch,
                    format!("$concat only supports strings, not {}", type_name(other)),
                );
            }
        }
    }
    Ok(Bson::String(out))
}

fn loose(value: &Bson) -> Result<String> {
    if is_nullish(value) { Ok(String::new()) } else { to_text(value) }
}

fn case(op: Op, value: &Bson) -> Result<Bson> {
    let text = loose(value)?;
    // MongoDB turns ASCII letters only.
    Ok(Bson::String(match op {
        Op::ToLower => text.to_ascii_lowercase(),
        _ => text.to_ascii_uppercase(),
    }))
}

fn casecmp(values: &[Bson]) -> Result<Bson> {
    let (a, b) = (loose(&values[0])?.to_ascii_uppercase(), loose(&values[1])?.to_ascii_uppercase());
    Ok(Bson::Int32(a.cmp(&b) as i32))
}

fn whole(op: Op, value: &Bson) -> Result<i64> {
    match integral(value).or_else(|| crate::value::number(value).map(|given| given.trunc() as i64))
    {
        Some(value) => Ok(value),
        None => {
            bad(format!("{}: a position must be a number, not {}", op.name(), type_name(value)))
        }
    }
}

fn substring_bytes(op: Op, values: &[Bson]) -> Result<Bson> {
    let text = loose(&values[0])?;
    let (start, length) = (whole(op, &values[1])?, whole(op, &values[2])?);
    if start < 0 {
        return fail(Code::BadValue, format!("{}: starting index must be non-negative", op.name()));
    }
    let start = usize::try_from(start).unwrap_or(usize::MAX).min(text.len());
    let end = usize::try_from(length)
        .map_or(text.len(), |length| start.saturating_add(length).min(text.len()));
    match text.get(start..end) {
        Some(part) => Ok(Bson::String(part.to_owned())),
        None => bad(format!(
            "{}: Invalid range, starting or ending in the middle of a UTF-8 character",
            op.name()
        )),
    }
}

fn substring_letters(values: &[Bson]) -> Result<Bson> {
    let text = loose(&values[0])?;
    let (start, length) = (whole(Op::SubstrCP, &values[1])?, whole(Op::SubstrCP, &values[2])?);
    match (usize::try_from(start), usize::try_from(length)) {
        (Ok(start), Ok(length)) => {
            Ok(Bson::String(text.chars().skip(start).take(length).collect()))
        }
        _ => bad("$substrCP: positions must be non-negative"),
    }
}

fn split(values: &[Bson]) -> Result<Bson> {
    if values.iter().any(is_nullish) {
        return Ok(Bson::Null);
    }
    let (input, separator) = (text(Op::Split, &values[0])?, text(Op::Split, &values[1])?);
    if separator.is_empty() {
        return bad("$split requires a non-empty separator");
    }
    if input.matches(separator).take(MOST_PARTS + 1).count() > MOST_PARTS {
        return fail(Code::ExceededMemoryLimit, "$split would make too many strings");
    }
    Ok(Bson::Array(input.split(separator).map(|part| Bson::String(part.to_owned())).collect()))
}

fn index_of(op: Op, values: &[Bson]) -> Result<Bson> {
    if is_nullish(&values[0]) {
        return Ok(Bson::Null);
    }
    let (input, token) = (text(op, &values[0])?, text(op, &values[1])?);
    let letters = op == Op::IndexOfCP;
    let size = if letters { input.chars().count() } else { input.len() };
    let bound = |value: Option<&Bson>, default: usize| -> Result<usize> {
        match value {
            None => Ok(default),
            Some(value) => match usize::try_from(whole(op, value)?) {
                Ok(at) => Ok(at),
                Err(_) => bad(format!("{} requires non-negative positions", op.name())),
            },
        }
    };
    let (start, end) = (bound(values.get(2), 0)?, bound(values.get(3), size)?.min(size));
    if start > end {
        return Ok(Bson::Int32(-1));
    }
    let found = if letters {
        let input: Vec<char> = input.chars().collect();
        let token: Vec<char> = token.chars().collect();
        (start..=end)
            .find(|&at| at + token.len() <= end && input[at..at + token.len()] == token[..])
    } else {
        let (input, token) = (input.as_bytes(), token.as_bytes());
        (start..=end).find(|&at| at + token.len() <= end && &input[at..at + token.len()] == token)
    };
    Ok(found.map_or(Bson::Int32(-1), count))
}

fn trim(op: Op, values: &[Bson]) -> Result<Bson> {
    if is_nullish(&values[0]) || matches!(values[1], Bson::Null) {
        return Ok(Bson::Null);
    }
    let input = text(op, &values[0])?;
    let chosen: Option<Vec<char>> = match &values[1] {
        Bson::String(letters) => Some(letters.chars().collect()),
        Bson::Undefined => None,
        other => {
            return bad(format!(
                "{} requires 'chars' to be a string, not {}",
                op.name(),
                type_name(other)
            ));
        }
    };
    let cut = |letter: char| match &chosen {
        Some(letters) => letters.contains(&letter),
        None => letter.is_whitespace() || letter == '\0',
    };
    Ok(Bson::String(
        match op {
            Op::Trim => input.trim_matches(cut),
            Op::Ltrim => input.trim_start_matches(cut),
            _ => input.trim_end_matches(cut),
        }
        .to_owned(),
    ))
}

fn regex(op: Op, values: &[Bson]) -> Result<Bson> {
    let nothing = match op {
        Op::RegexMatch => Bson::Boolean(false),
        Op::RegexFind => Bson::Null,
        _ => Bson::Array(Vec::new()),
    };
    if is_nullish(&values[0]) || is_nullish(&values[1]) {
        return Ok(nothing);
    }
    let input = text(op, &values[0])?;
    let options = match &values[2] {
        Bson::String(options) => options.as_str(),
        _ => "",
    };
    let pattern = match &values[1] {
        Bson::String(pattern) => Pattern::new(pattern, options)?,
        Bson::RegularExpression(regex) => {
            let own = regex.options.as_str();
            Pattern::new(regex.pattern.as_str(), if own.is_empty() { options } else { own })?
        }
        other => {
            return bad(format!(
                "{} needs 'regex' to be a string or a regex, not {}",
                op.name(),
                type_name(other)
            ));
        }
    };
    if op == Op::RegexMatch {
        return Ok(Bson::Boolean(pattern.is_match(input)));
    }
    let (mut found, mut from) = (Vec::new(), 0);
    while from <= input.len() {
        let Some(captures) = pattern.find(input, from) else { break };
        let Some(whole) = captures.get(0) else { break };
        let groups = (1..captures.len())
            .map(|at| {
                captures.get(at).map_or(Bson::Null, |part| Bson::String(part.as_str().to_owned()))
            })
            .collect();
        let mut one = Document::new();
        one.insert("match", whole.as_str());
        one.insert("idx", count(input[..whole.start()].chars().count()));
        one.insert("captures", Bson::Array(groups));
        if op == Op::RegexFind {
            return Ok(Bson::Document(one));
        }
        found.push(Bson::Document(one));
        from = if whole.end() > whole.start() {
            whole.end()
        } else {
            whole.end() + input[whole.end()..].chars().next().map_or(1, char::len_utf8)
        };
    }
    Ok(if op == Op::RegexFind { Bson::Null } else { Bson::Array(found) })
}

fn replace(op: Op, values: &[Bson]) -> Result<Bson> {
    if values.iter().any(is_nullish) {
        return Ok(Bson::Null);
    }
    let (input, find, by) = (text(op, &values[0])?, text(op, &values[1])?, text(op, &values[2])?);
    Ok(Bson::String(match op {
        Op::ReplaceOne => input.replacen(find, by, 1),
        _ if input.matches(find).count().saturating_mul(by.len()) > MOST_REPLACED => {
            return fail(Code::ExceededMemoryLimit, "$replaceAll would make too long a string");
        }
        _ => input.replace(find, by),
    }))
}
