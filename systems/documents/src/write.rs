//! Inserting, updating and deleting one document, under the lock of its row.
//!
//! Invariant: a document, its index entries, what the log says of it and the outcome of a retryable
//! write change in one batch.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_documents_query::error::{Code, QueryError, Result, fail};
use beeline_documents_query::value::key;
use bson::oid::ObjectId;
use bson::raw::RawDocument;
use bson::{Bson, Document, doc};

use crate::catalog::{Collection, Database, Index};
use crate::index::{Entries, entries, entry_key, entry_value, record_of};
use crate::layout::{NUMBERED, kind, numbered};
use crate::scan::{Found, decode};
use crate::spare;
use crate::store::{Backing, Change, Stretch};

/// Largest document, bytes.
pub const LARGEST: usize = 16 << 20;
/// An update may make a document a little larger, as with MongoDB.
const LARGEST_UPDATED: usize = LARGEST + (16 << 10);

/// What else a write puts into its batch.
pub trait Witness {
    /// Changes that belong to this one.
    ///
    /// Errors: those of making them.
    fn changes(&mut self, collection: &Collection, event: &Event<'_>) -> Result<Vec<Change>>;

    /// The validator is not looked at.
    fn bypasses(&self) -> bool {
        false
    }
}

/// What happened to a document.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names of the fields say it")]
pub enum Event<'e> {
    /// It was inserted.
    Insert { id: &'e Bson, bytes: &'e [u8] },
    /// It was changed.
    Update { id: &'e Bson, before: &'e Document, after: &'e Document, replaced: bool },
    /// It was deleted.
    Delete { id: &'e Bson, before: &'e [u8] },
}

/// A witness that adds nothing.
#[derive(Debug)]
pub struct Nobody;

impl Witness for Nobody {
    fn changes(&mut self, _: &Collection, _: &Event<'_>) -> Result<Vec<Change>> {
        Ok(Vec::new())
    }
}

/// A collection with one of its indexes changed.
#[must_use]
pub fn with_index(collection: &Collection, id: u32, change: impl FnOnce(&mut Index)) -> Collection {
    let mut change = Some(change);
    let indexes = collection
        .indexes
        .iter()
        .map(|index| match change.take_if(|_| index.id == id) {
            Some(change) => {
                let mut new = (**index).clone();
                change(&mut new);
                Arc::new(new)
            }
            None => Arc::clone(index),
        })
        .collect();
    collection.with_indexes(indexes)
}

/// The bytes of a document to insert, with an `_id` in front, and the `_id`.
///
/// Errors: an `_id` that cannot be one, a document that is too large.
pub fn prepare(bytes: Vec<u8>) -> Result<(Bson, Vec<u8>)> {
    if bytes.len() > LARGEST {
        return fail(
            Code::BsonObjectTooLarge,
            format!(
                "object to insert too large. size in bytes: {}, max size: {LARGEST}",
                bytes.len()
            ),
        );
    }
    let raw = RawDocument::from_bytes(&bytes[..])
        .map_err(|error| QueryError::new(Code::NonConformantBson, error.to_string()))?;
    let (mut id, mut is_first) = (None, false);
    for (at, element) in raw.iter_elements().enumerate() {
        let element =
            element.map_err(|error| QueryError::new(Code::NonConformantBson, error.to_string()))?;
        if element.key().as_str() == "_id" {
            let value = element
                .value()
                .and_then(Bson::try_from)
                .map_err(|error| QueryError::new(Code::NonConformantBson, error.to_string()))?;
            if id.replace(value).is_some() {
                return fail(Code::BadValue, "can't have multiple _id fields in one document");
            }
            is_first = at == 0;
        }
    }
    match id {
        Some(id) if is_first => {
            check_id(&id)?;
            Ok((id, bytes))
        }
        id => {
            let id = id.unwrap_or_else(|| Bson::ObjectId(ObjectId::new()));
            check_id(&id)?;
            let mut whole = doc! { "_id": id.clone() };
            for (name, value) in decode(&bytes)? {
                if name != "_id" {
                    whole.insert(name, value);
                }
            }
            let bytes = whole
                .to_vec()
                .map_err(|error| QueryError::new(Code::NonConformantBson, error.to_string()))?;
            Ok((id, bytes))
        }
    }
}

fn check_id(id: &Bson) -> Result<()> {
    match id {
        Bson::Array(_) | Bson::RegularExpression(_) | Bson::Undefined => {
            let name = beeline_documents_query::value::type_name(id);
            fail(Code::InvalidIdField, format!("The '_id' value cannot be of type {name}"))
        }
        Bson::Document(inner) if inner.keys().any(|name| name.starts_with('$')) => {
            fail(Code::DollarPrefixedFieldName, "_id fields may not contain '$'-prefixed fields")
        }
        _ => Ok(()),
    }
}

/// Encodes a document of this size or refuses it.
///
/// Errors: [`Code::BsonObjectTooLarge`].
pub fn encode(document: &Document) -> Result<Vec<u8>> {
    let bytes = document
        .to_vec()
        .map_err(|error| QueryError::new(Code::NonConformantBson, error.to_string()))?;
    if bytes.len() > LARGEST_UPDATED {
        return fail(
            Code::BsonObjectTooLarge,
            format!("Resulting document after update is larger than {LARGEST}"),
        );
    }
    Ok(bytes)
}

fn duplicate(
    collection: &Collection,
    index: &str,
    pattern: &Document,
    document: &Document,
) -> QueryError {
    let mut value = Document::new();
    for name in pattern.keys() {
        let parts: Vec<String> = name.split('.').map(str::to_owned).collect();
        value.insert(
            name.clone(),
            beeline_documents_query::path::get_in(document, &parts).unwrap_or(Bson::Null),
        );
    }
    let shown: Vec<String> =
        value.iter().map(|(name, value)| format!("{name}: {}", shown(value))).collect();
    QueryError::new(
        Code::DuplicateKey,
        format!(
            "E11000 duplicate key error collection: {} index: {index} dup key: {{ {} }}",
            collection.namespace,
            shown.join(", ")
        ),
    )
    .with(doc! { "keyPattern": pattern.clone(), "keyValue": value })
}

/// A value as MongoDB's messages show it, which programs take apart.
pub(crate) fn shown(value: &Bson) -> String {
    match value {
        Bson::ObjectId(id) => format!("ObjectId('{id}')"),
        Bson::DateTime(at) => format!("new Date({})", at.timestamp_millis()),
        Bson::Document(inner) if inner.is_empty() => "{}".to_owned(),
        Bson::Document(inner) => {
            let fields: Vec<String> =
                inner.iter().map(|(name, value)| format!("{name}: {}", shown(value))).collect();
            format!("{{ {} }}", fields.join(", "))
        }
        Bson::Array(all) => {
            format!("[ {} ]", all.iter().map(shown).collect::<Vec<_>>().join(", "))
        }
        Bson::Double(number) if number.is_infinite() => format!("{number}.0"),
        Bson::MinKey => "MinKey".to_owned(),
        Bson::MaxKey => "MaxKey".to_owned(),
        plain => plain.to_string(),
    }
}

/// Refuses a key that another record has.
///
/// Errors: [`Code::DuplicateKey`].
pub fn check_unique(
    row: &mut dyn Backing,
    collection: &Collection,
    index: &Index,
    values: &[u8],
    record: &[u8],
    document: &Document,
) -> Result<()> {
    let mut taken = false;
    row.range(
        &Stretch::of_prefix(&numbered(kind::INDEX, index.id, values)),
        false,
        &mut |key, value| {
            taken = record_of(key, value) != record;
            if taken { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        },
    )?;
    if taken { Err(duplicate(collection, &index.name, &index.key(), document)) } else { Ok(()) }
}

/// The number of the next insertion into a capped collection.
fn next_record(row: &mut dyn Backing, collection: &Collection) -> Result<Vec<u8>> {
    let figures = &collection.figures;
    let mut next = figures.next_record.load(Ordering::Relaxed);
    if next == 0 {
        let all = Stretch::of_prefix(&numbered(kind::RECORD, collection.id, &[]));
        row.range(&all, true, &mut |key, _| {
            next = key[NUMBERED..].first_chunk::<8>().map_or(0, |last| i64::from_be_bytes(*last));
            ControlFlow::Break(())
        })?;
        next += 1;
    }
    figures.next_record.store(next + 1, Ordering::Relaxed);
    Ok(next.to_be_bytes().to_vec())
}

/// Inserts what [`prepare`] made.
///
/// Errors: [`Code::DuplicateKey`], the validator's, the store's. Nothing changed then.
pub fn insert(
    row: &mut dyn Backing,
    database: &Database,
    collection: &Arc<Collection>,
    id: &Bson,
    bytes: Vec<u8>,
    witness: &mut dyn Witness,
) -> Result<()> {
    let record = match collection.capped {
        Some(_) => next_record(row, collection)?,
        None => key(id),
    };
    let mut changes = Vec::with_capacity(1 + collection.indexes.len());
    let length = bytes.len() as i64;
    let mut multikey = Vec::new();
    if collection.validator.is_some() || !collection.indexes.is_empty() {
        let document = decode(&bytes)?;
        if !witness.bypasses() {
            collection.validate(&document, None)?;
        }
        for index in &collection.indexes {
            let found = entries(index, &document)?;
            for values in &found.keys {
                if index.unique {
                    check_unique(row, collection, index, values, &record, &document)?;
                }
                changes
                    .push(Change::put(entry_key(index.id, values, &record), entry_value(&record)));
            }
            note_multikey(index, &found, &mut multikey);
        }
    }
    let grown = grown(row, collection, &multikey, &mut changes)?;
    changes.extend(witness.changes(collection, &Event::Insert { id, bytes: &bytes })?);
    changes.insert(0, Change::put_new(numbered(kind::RECORD, collection.id, &record), bytes));
    if row.apply(&changes)?.is_some() {
        let document = doc! { "_id": id.clone() };
        return Err(duplicate(collection, "_id_", &doc! { "_id": 1 }, &document));
    }
    if let Some(grown) = grown {
        database.put(grown);
    }
    row.count(&collection.figures, 1, length);
    changes.into_iter().filter_map(|change| change.value).for_each(spare::give);
    if collection.capped.is_some() {
        shrink(row, database, collection)?;
    }
    Ok(())
}

fn note_multikey(index: &Index, found: &Entries, out: &mut Vec<u32>) {
    if found.multikey && !index.multikey {
        out.push(index.id);
    }
}

/// The collection with indexes marked that hold an array now. The mark does not wait for a
/// transaction: other writers see it at once, and one too many does no harm.
fn grown(
    row: &mut dyn Backing,
    collection: &Collection,
    multikey: &[u32],
    changes: &mut Vec<Change>,
) -> Result<Option<Collection>> {
    let mut grown: Option<Collection> = None;
    for id in multikey {
        grown = Some(with_index(grown.as_ref().unwrap_or(collection), *id, |index| {
            index.multikey = true
        }));
    }
    if let Some(grown) = &grown {
        let change = Change::put(grown.catalog_key(), grown.stored()?);
        match row.buffers() {
            true => row.apply_at_once(&[change])?,
            false => changes.push(change),
        }
    }
    Ok(grown)
}

/// Deletes the oldest of a capped collection until it keeps its bounds.
fn shrink(row: &mut dyn Backing, database: &Database, collection: &Arc<Collection>) -> Result<()> {
    let Some((bytes, documents)) = collection.capped else { return Ok(()) };
    let figures = &collection.figures;
    if !figures.counted.load(Ordering::Relaxed) {
        let (mut count, mut size) = (0, 0);
        row.range(
            &Stretch::of_prefix(&numbered(kind::RECORD, collection.id, &[])),
            false,
            &mut |_, value| {
                count += 1;
                size += value.len() as i64;
                ControlFlow::Continue(())
            },
        )?;
        figures.documents.store(count, Ordering::Relaxed);
        figures.bytes.store(size, Ordering::Relaxed);
        figures.counted.store(true, Ordering::Relaxed);
    }
    let _ = database;
    while figures.bytes.load(Ordering::Relaxed) > bytes as i64
        || documents.is_some_and(|most| figures.documents.load(Ordering::Relaxed) > most as i64)
    {
        let mut oldest = None;
        row.range(
            &Stretch::of_prefix(&numbered(kind::RECORD, collection.id, &[])),
            false,
            &mut |key, value| {
                oldest = Some(Found { record: key[NUMBERED..].to_vec(), bytes: value.to_vec() });
                ControlFlow::Break(())
            },
        )?;
        match oldest {
            Some(oldest) => delete(row, collection, &oldest, &mut Nobody)?,
            None => break,
        }
    }
    Ok(())
}

/// A document, what it was and what it becomes.
#[derive(Clone, Copy, Debug)]
pub struct Rewrite<'r> {
    /// Where it lies.
    pub found: &'r Found,
    /// What it was.
    pub before: &'r Document,
    /// What it becomes.
    pub after: &'r Document,
    /// The client gave the whole document.
    pub replaced: bool,
}

/// Puts a new version in place of a document; false when nothing differs.
///
/// Errors: as [`insert`].
pub fn update(
    row: &mut dyn Backing,
    database: &Database,
    collection: &Arc<Collection>,
    rewrite: &Rewrite<'_>,
    witness: &mut dyn Witness,
) -> Result<bool> {
    let Rewrite { found, before, after, replaced } = *rewrite;
    let bytes = encode(after)?;
    let changed = bytes != found.bytes;
    if changed && !witness.bypasses() {
        collection.validate(after, Some(before))?;
    }
    let mut changes = Vec::new();
    let mut multikey = Vec::new();
    if changed {
        for index in &collection.indexes {
            let (old, new) = (entries(index, before)?, entries(index, after)?);
            for values in old.keys.difference(&new.keys) {
                changes.push(Change::delete(entry_key(index.id, values, &found.record)));
            }
            // While an index is built, an entry may be missing that did not change.
            let missing = new.keys.iter().filter(|key| !index.ready || !old.keys.contains(*key));
            for values in missing {
                if index.unique {
                    check_unique(row, collection, index, values, &found.record, after)?;
                }
                changes.push(Change::put(
                    entry_key(index.id, values, &found.record),
                    entry_value(&found.record),
                ));
            }
            note_multikey(index, &new, &mut multikey);
        }
    }
    let grown = grown(row, collection, &multikey, &mut changes)?;
    let id = before.get("_id").unwrap_or(&Bson::Null);
    if changed {
        let length = bytes.len() as i64 - found.bytes.len() as i64;
        changes
            .extend(witness.changes(collection, &Event::Update { id, before, after, replaced })?);
        changes.push(Change::put(numbered(kind::RECORD, collection.id, &found.record), bytes));
        row.apply(&changes)?;
        row.count(&collection.figures, 0, length);
    }
    if let Some(grown) = grown {
        database.put(grown);
    }
    Ok(changed)
}

/// Deletes a document.
///
/// Errors: the store's.
pub fn delete(
    row: &mut dyn Backing,
    collection: &Arc<Collection>,
    found: &Found,
    witness: &mut dyn Witness,
) -> Result<()> {
    let mut changes = vec![Change::delete(numbered(kind::RECORD, collection.id, &found.record))];
    let mut id = Bson::Null;
    if collection.indexes.is_empty() {
        if let Ok(Some(value)) =
            RawDocument::from_bytes(&found.bytes).map_or(Ok(None), |raw| raw.get("_id"))
        {
            id = Bson::try_from(value).unwrap_or(Bson::Null);
        }
    } else {
        let document = decode(&found.bytes)?;
        for index in &collection.indexes {
            for values in &entries(index, &document)?.keys {
                changes.push(Change::delete(entry_key(index.id, values, &found.record)));
            }
        }
        id = document.get("_id").cloned().unwrap_or(Bson::Null);
    }
    changes.extend(witness.changes(collection, &Event::Delete { id: &id, before: &found.bytes })?);
    row.apply(&changes)?;
    row.count(&collection.figures, -1, -(found.bytes.len() as i64));
    Ok(())
}
