//! Dotted paths through documents and arrays, as MongoDB walks them.
//!
//! Two walks: [`reach`] for predicates (arrays are looked into, elements and positions alike) and
//! [`get`] for aggregation (arrays map to the array of what is found in their elements).

use bson::{Bson, Document};

use crate::error::{Code, Result, fail};

/// Deepest nesting of a path or a document.
pub const DEEPEST: usize = 200;

/// Splits a path.
///
/// Errors: an empty component.
pub fn split(path: &str) -> Result<Vec<String>> {
    let parts: Vec<String> = path.split('.').map(str::to_owned).collect();
    if parts.iter().any(String::is_empty) {
        return fail(
            Code::EmptyFieldName,
            format!("The path '{path}' contains an empty field name"),
        );
    }
    if parts.len() > DEEPEST {
        return fail(Code::Overflow, format!("The path '{path:.40}...' is deeper than {DEEPEST}"));
    }
    Ok(parts)
}

/// A position in an array, as a path names it.
#[must_use]
pub fn position(part: &str) -> Option<usize> {
    let canonical = part == "0" || !part.starts_with('0');
    (canonical && part.bytes().all(|byte| byte.is_ascii_digit())).then(|| part.parse().ok())?
}

/// Calls `visit` with everything that `path` reaches: `None` where a document lacks the field.
/// Stops, and says so, once `visit` returns true. The last value is handed over as it is: the
/// visitor looks into an array itself.
pub fn reach(
    document: &Document,
    path: &[String],
    visit: &mut dyn FnMut(Option<&Bson>) -> bool,
) -> bool {
    let Some((first, rest)) = path.split_first() else { return false };
    walk(document.get(first), rest, visit)
}

/// As [`reach`], from a value that was already found.
pub fn walk(
    found: Option<&Bson>,
    rest: &[String],
    visit: &mut dyn FnMut(Option<&Bson>) -> bool,
) -> bool {
    let Some((next, after)) = rest.split_first() else { return visit(found) };
    match found {
        Some(Bson::Document(inner)) => walk(inner.get(next), after, visit),
        Some(Bson::Array(elements)) => {
            if let Some(element) = position(next).and_then(|at| elements.get(at))
                && walk(Some(element), after, visit)
            {
                return true;
            }
            elements.iter().any(|element| match element {
                Bson::Document(inner) => walk(inner.get(next), after, visit),
                _ => false,
            })
        }
        _ => visit(None),
    }
}

/// The value at a path as aggregation sees it: through an array, the array of what its elements
/// hold there; `None` when missing.
#[must_use]
pub fn get(value: &Bson, path: &[String]) -> Option<Bson> {
    let Some((first, rest)) = path.split_first() else { return Some(value.clone()) };
    match value {
        Bson::Document(document) => get(document.get(first)?, rest),
        Bson::Array(elements) => Some(Bson::Array(
            elements
                .iter()
                .filter_map(|element| match element {
                    Bson::Document(_) | Bson::Array(_) => get(element, path),
                    _ => None,
                })
                .collect(),
        )),
        _ => None,
    }
}

/// As [`get`], from a document.
#[must_use]
pub fn get_in(document: &Document, path: &[String]) -> Option<Bson> {
    let (first, rest) = path.split_first()?;
    get(document.get(first)?, rest)
}

/// Every value an index holds for a path: an array's elements each, an empty array as undefined,
/// a missing field as null. Says whether an array was met.
pub fn index_values(document: &Document, path: &[String], out: &mut Vec<Bson>) -> bool {
    let mut multikey = false;
    collect(
        document.get(path.first().map_or("", String::as_str)),
        path.get(1..).unwrap_or_default(),
        out,
        &mut multikey,
    );
    if out.is_empty() {
        out.push(Bson::Null);
    }
    multikey
}

fn collect(found: Option<&Bson>, rest: &[String], out: &mut Vec<Bson>, multikey: &mut bool) {
    match (found, rest.split_first()) {
        (None, _) => out.push(Bson::Null),
        (Some(Bson::Array(elements)), None) => {
            *multikey = true;
            if elements.is_empty() {
                out.push(Bson::Undefined);
            }
            out.extend(elements.iter().cloned());
        }
        (Some(value), None) => out.push(value.clone()),
        (Some(Bson::Document(inner)), Some((next, after))) => {
            collect(inner.get(next), after, out, multikey);
        }
        (Some(Bson::Array(elements)), Some((next, after))) => {
            *multikey = true;
            if let Some(element) = position(next).and_then(|at| elements.get(at)) {
                collect(Some(element), after, out, multikey);
                return;
            }
            for element in elements {
                if let Bson::Document(inner) = element {
                    collect(inner.get(next), after, out, multikey);
                }
            }
        }
        (Some(_), Some(_)) => out.push(Bson::Null),
    }
}

/// True when the field at a path is there, by plain steps through documents only.
#[must_use]
pub fn plain<'a>(document: &'a Document, path: &[String]) -> Option<&'a Bson> {
    let (first, rest) = path.split_first()?;
    let found = document.get(first)?;
    if rest.is_empty() {
        return Some(found);
    }
    match found {
        Bson::Document(inner) => plain(inner, rest),
        _ => None,
    }
}

/// Sets the field at a path, making documents on the way (what is there and is no document is
/// replaced).
pub fn set(document: &mut Document, path: &[String], value: Bson) {
    let Some((first, rest)) = path.split_first() else { return };
    if rest.is_empty() {
        document.insert(first.clone(), value);
        return;
    }
    let slot = document.entry(first.clone()).or_insert(Bson::Document(Document::new()));
    if !matches!(slot, Bson::Document(_)) {
        *slot = Bson::Document(Document::new());
    }
    if let Bson::Document(inner) = slot {
        set(inner, rest, value);
    }
}

#[cfg(test)]
mod tests {
    use bson::{bson, doc};

    use super::*;

    fn reached(document: &Document, path: &str) -> Vec<Option<Bson>> {
        let mut out = Vec::new();
        reach(document, &split(path).unwrap(), &mut |found| {
            out.push(found.cloned());
            false
        });
        out
    }

    #[test]
    fn a_path_looks_into_arrays_by_element_and_by_position() {
        let document = doc! { "a": [ { "b": 1 }, { "c": 2 }, 5, { "0": 7 } ] };
        assert_eq!(reached(&document, "a.b"), [Some(Bson::Int32(1)), None, None]);
        assert_eq!(reached(&document, "a.2"), [Some(Bson::Int32(5)), None, None, None]);
        assert_eq!(
            reached(&document, "a.0.b"),
            [Some(Bson::Int32(1)), None, None, None][..1]
                .to_vec()
                .into_iter()
                .chain([None, None])
                .chain([None])
                .collect::<Vec<_>>()
        );
        assert_eq!(reached(&doc! { "a": 5 }, "a.b"), [None]);
        assert_eq!(reached(&doc! { "a": [] }, "a.b"), Vec::<Option<Bson>>::new());
    }

    #[test]
    fn aggregation_maps_a_path_over_an_array() {
        let value = bson!({ "a": [ { "b": 1 }, { "b": 2 }, 3 ] });
        assert_eq!(get(&value, &split("a.b").unwrap()), Some(bson!([1, 2])));
        assert_eq!(get(&value, &split("x.b").unwrap()), None);
    }

    #[test]
    fn an_index_sees_each_element_and_knows_of_the_array() {
        let mut out = Vec::new();
        assert!(index_values(
            &doc! { "a": [ { "b": [1, 2] }, { "c": 1 } ] },
            &split("a.b").unwrap(),
            &mut out
        ));
        assert_eq!(out, [Bson::Int32(1), Bson::Int32(2), Bson::Null]);
        out.clear();
        assert!(!index_values(&doc! {}, &split("a").unwrap(), &mut out));
        assert_eq!(out, [Bson::Null]);
        assert!(split("a..b").is_err());
    }
}
