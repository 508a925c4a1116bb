//! Paths of an update: from `$`, `$[]` and `$[name]` to concrete ones, and to the value there.

use bson::{Bson, Document};

use super::Context;
use crate::error::{Code, Result, bad, fail};
use crate::path::{plain, position};

/// Longest array an update may make by naming a position.
const LONGEST: usize = 1_500_001;

/// The concrete paths that `parts` stand for in `document`.
pub(super) fn expand(
    document: &Document,
    original: &Document,
    parts: &[String],
    context: &Context<'_>,
    out: &mut Vec<Vec<String>>,
) -> Result<()> {
    match parts.iter().position(|part| part == "$" || part.starts_with("$[")) {
        None => out.push(parts.to_vec()),
        Some(at) => {
            let (before, rest) = (&parts[..at], &parts[at + 1..]);
            if parts[at] == "$" {
                let Some(index) = context.filter.position(original, before) else {
                    return bad(
                        "The positional operator did not find the match needed from the query.",
                    );
                };
                let concrete = [before, &[index.to_string()], rest].concat();
                return expand(document, original, &concrete, context, out);
            }
            let elements = match value_at(document, before) {
                Some(Bson::Array(elements)) => elements,
                Some(other) => {
                    return bad(format!(
                        "Cannot apply array updates to non-array element {}: {other}",
                        before.join(".")
                    ));
                }
                None => {
                    return bad(format!(
                        "The path '{}' must exist in the document in order to apply array updates.",
                        before.join(".")
                    ));
                }
            };
            let name = parts[at].trim_start_matches("$[").trim_end_matches(']');
            for (index, element) in elements.iter().enumerate() {
                if name.is_empty() || context.array_filters.allows(name, element)? {
                    let concrete = [before, &[index.to_string()], rest].concat();
                    expand(document, original, &concrete, context, out)?;
                }
            }
        }
    }
    Ok(())
}

fn value_at<'a>(document: &'a Document, parts: &[String]) -> Option<&'a Bson> {
    if let Some(found) = plain(document, parts) {
        return Some(found);
    }
    let (first, rest) = parts.split_first()?;
    let mut here = document.get(first)?;
    for part in rest {
        here = step(here, part)?;
    }
    Some(here)
}

fn step<'a>(value: &'a Bson, part: &str) -> Option<&'a Bson> {
    match value {
        Bson::Document(inner) => inner.get(part),
        Bson::Array(elements) => elements.get(position(part)?),
        _ => None,
    }
}

/// The value at a concrete path, if it is there.
pub(super) fn find<'a>(document: &'a Document, parts: &[String]) -> Option<&'a Bson> {
    value_at(document, parts)
}

/// Removes the value at a concrete path; in an array null takes its place.
pub(super) fn remove(document: &mut Document, parts: &[String]) -> Option<Bson> {
    let (last, before) = parts.split_last()?;
    if before.is_empty() {
        return document.remove(last);
    }
    let (first, rest) = before.split_first()?;
    let mut here = document.get_mut(first)?;
    for part in rest {
        here = match here {
            Bson::Document(inner) => inner.get_mut(part)?,
            Bson::Array(elements) => elements.get_mut(position(part)?)?,
            _ => return None,
        };
    }
    match here {
        Bson::Document(inner) => inner.remove(last),
        Bson::Array(elements) => {
            elements.get_mut(position(last)?).map(|element| std::mem::replace(element, Bson::Null))
        }
        _ => None,
    }
}

/// The slot at a concrete path, made (as null) with what is missing on the way.
///
/// Errors: [`Code::PathNotViable`] when a value on the way holds no fields.
pub(super) fn reach<'a>(document: &'a mut Document, parts: &[String]) -> Result<&'a mut Bson> {
    let Some((first, rest)) = parts.split_first() else {
        return fail(Code::EmptyFieldName, "An empty update path is not valid.");
    };
    let next_default = |rest: &[String]| {
        if rest.is_empty() { Bson::Null } else { Bson::Document(Document::new()) }
    };
    let mut here = document.entry(first.clone()).or_insert_with(|| next_default(rest));
    for (at, part) in rest.iter().enumerate() {
        let below = &rest[at + 1..];
        here = match here {
            Bson::Document(inner) => {
                inner.entry(part.clone()).or_insert_with(|| next_default(below))
            }
            Bson::Array(elements) => {
                let Some(index) = position(part) else {
                    return fail(
                        Code::PathNotViable,
                        format!("Cannot create field '{part}' in element {{{}: [...]}}", parts[at]),
                    );
                };
                if index >= elements.len() {
                    if index > LONGEST {
                        return fail(
                            Code::BadValue,
                            format!("can't backfill array to larger than {LONGEST} elements"),
                        );
                    }
                    elements.resize(index, Bson::Null);
                    elements.push(next_default(below));
                }
                &mut elements[index]
            }
            other => {
                return fail(
                    Code::PathNotViable,
                    format!("Cannot create field '{part}' in element {{{}: {other}}}", parts[at]),
                );
            }
        };
    }
    Ok(here)
}
