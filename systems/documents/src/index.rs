//! Which entries a document has in an index.

use std::collections::BTreeSet;

use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::path;
use beeline_documents_query::value::{append_key, append_key_descending, key};
use bson::{Bson, Document};

use crate::catalog::{Direction, Index};
use crate::layout::{kind, numbered};

/// Most entries one document may have in one index.
const MOST_ENTRIES: usize = 100_000;
/// Longest key of an entry, bytes; the store's limit less what stands around it.
const LONGEST: usize = 60_000;

/// The sortable keys a document has in an index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entries {
    /// The keys.
    pub keys: BTreeSet<Vec<u8>>,
    /// An array was met.
    pub multikey: bool,
}

/// The hash of a value in a hashed index; numbers that compare equal hash alike.
#[must_use]
pub fn hash(value: &Bson) -> i64 {
    let digest = <sha2::Sha256 as sha2::Digest>::digest(key(value));
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    i64::from_le_bytes(first)
}

/// Appends a value's part of a key.
pub fn append_part(out: &mut Vec<u8>, value: &Bson, direction: Direction) {
    match direction {
        Direction::Up => append_key(out, value),
        Direction::Down => append_key_descending(out, value),
        Direction::Hashed => append_key(out, &Bson::Int64(hash(value))),
    }
}

/// The entries of a document.
///
/// Errors: arrays in parallel, in hashed fields, too many entries, too long ones.
pub fn entries(index: &Index, document: &Document) -> Result<Entries> {
    let mut entries = Entries::default();
    if let Some((_, filter)) = &index.partial
        && !filter.matches(document)
    {
        return Ok(entries);
    }
    let mut values: Vec<Vec<Bson>> = Vec::with_capacity(index.fields.len());
    let mut arrays: Vec<&[String]> = Vec::new();
    let mut present = false;
    for (parts, direction) in &index.fields {
        let mut found = Vec::new();
        let is_array = path::index_values(document, parts, &mut found);
        present |= path::reach(document, parts, &mut |value| value.is_some());
        if is_array {
            if *direction == Direction::Hashed {
                return fail(
                    Code::CannotIndexArray,
                    format!(
                        "hashed indexes do not currently support array values; field '{}'",
                        parts.join(".")
                    ),
                );
            }
            entries.multikey = true;
            arrays.push(parts);
        }
        values.push(found);
    }
    if index.sparse && !present {
        return Ok(entries);
    }
    match arrays.as_slice() {
        [] => {
            let mut one = Vec::new();
            for (found, (_, direction)) in values.iter().zip(&index.fields) {
                append_part(&mut one, found.first().unwrap_or(&Bson::Null), *direction);
            }
            entries.keys.insert(one);
        }
        [only] => product(index, &values, only, &mut entries.keys)?,
        [first, ..] => {
            // Fields below one array go element by element.
            let common = arrays.iter().fold(first.to_vec(), |common, other| {
                common
                    .iter()
                    .zip(*other)
                    .take_while(|(a, b)| a == b)
                    .map(|(a, _)| a.clone())
                    .collect()
            });
            let Some(Bson::Array(elements)) =
                (!common.is_empty()).then(|| path::plain(document, &common)).flatten()
            else {
                return fail(
                    Code::ParallelArrays,
                    format!(
                        "cannot index parallel arrays [{}] [{}]",
                        arrays.first().and_then(|one| one.last()).map_or("", String::as_str),
                        arrays.last().and_then(|one| one.last()).map_or("", String::as_str),
                    ),
                );
            };
            for element in elements {
                let mut part = document.clone();
                path::set(&mut part, &common, element.clone());
                let of_element = crate::index::entries(
                    &Index { partial: None, sparse: false, ..index.clone() },
                    &part,
                )?;
                entries.keys.extend(of_element.keys);
            }
        }
    }
    if entries.keys.len() > MOST_ENTRIES {
        return fail(
            Code::CannotCreateIndex,
            format!("a document has more than {MOST_ENTRIES} entries in the index {}", index.name),
        );
    }
    if let Some(long) = entries.keys.iter().find(|key| key.len() > LONGEST) {
        return fail(
            Code::IndexInformationTooLarge,
            format!(
                "a key of {} bytes is too long for the index {}; the limit is {LONGEST}",
                long.len(),
                index.name
            ),
        );
    }
    Ok(entries)
}

fn product(
    index: &Index,
    values: &[Vec<Bson>],
    array: &[String],
    out: &mut BTreeSet<Vec<u8>>,
) -> Result<()> {
    let Some(varying) = index.fields.iter().position(|(parts, _)| parts.as_slice() == array) else {
        return Ok(());
    };
    if values[varying].len() > MOST_ENTRIES {
        return fail(
            Code::CannotCreateIndex,
            format!("a document has more than {MOST_ENTRIES} entries in the index {}", index.name),
        );
    }
    for element in &values[varying] {
        let mut one = Vec::new();
        for (at, (found, (_, direction))) in values.iter().zip(&index.fields).enumerate() {
            let value = if at == varying { element } else { found.first().unwrap_or(&Bson::Null) };
            append_part(&mut one, value, *direction);
        }
        out.insert(one);
    }
    Ok(())
}

/// The key of an entry in the row.
#[must_use]
pub fn entry_key(index: u32, values: &[u8], record: &[u8]) -> Vec<u8> {
    let mut key = numbered(kind::INDEX, index, values);
    key.extend_from_slice(record);
    key
}

/// The value of an entry.
#[must_use]
pub fn entry_value(record: &[u8]) -> Vec<u8> {
    (record.len() as u32).to_le_bytes().to_vec()
}

/// The record key at the end of an entry's key.
#[must_use]
pub fn record_of<'k>(key: &'k [u8], value: &[u8]) -> &'k [u8] {
    let length = value.first_chunk::<4>().map_or(0, |length| u32::from_le_bytes(*length) as usize);
    &key[key.len().saturating_sub(length)..]
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    fn count(specification: Document, document: Document) -> usize {
        entries(&Index::parse(&specification).unwrap(), &document).unwrap().keys.len()
    }

    #[test]
    fn documents_have_an_entry_for_each_element() {
        assert_eq!(count(doc! { "key": { "a": 1 } }, doc! { "a": [1, 2, 2] }), 2);
        assert_eq!(count(doc! { "key": { "a": 1, "b": -1 } }, doc! { "a": [1, 2], "b": 3 }), 2);
        assert_eq!(
            count(
                doc! { "key": { "a.x": 1, "a.y": 1 } },
                doc! { "a": [ { "x": 1, "y": 2 }, { "x": 3, "y": 4 } ] }
            ),
            2
        );
        assert_eq!(count(doc! { "key": { "a": 1 }, "sparse": true }, doc! { "b": 1 }), 0);
        assert_eq!(
            count(
                doc! { "key": { "a": 1 }, "partialFilterExpression": { "b": { "$gt": 5 } } },
                doc! { "a": 1, "b": 1 }
            ),
            0
        );
        assert_eq!(count(doc! { "key": { "a": 1 } }, doc! {}), 1);
    }

    #[test]
    fn arrays_in_parallel_are_refused() {
        let index = Index::parse(&doc! { "key": { "a": 1, "b": 1 } }).unwrap();
        assert_eq!(
            entries(&index, &doc! { "a": [1, 2], "b": [1, 2] }).unwrap_err().code,
            Code::ParallelArrays
        );
    }

    #[test]
    fn an_entry_knows_its_record() {
        let key = entry_key(1, b"values", b"record");
        assert_eq!(record_of(&key, &entry_value(b"record")), b"record");
    }
}
