//! Whether a collection's indexes hold exactly what its documents say.

use std::collections::BTreeSet;
use std::ops::{Bound, ControlFlow};

use beeline_documents_query::error::Result;

use crate::catalog::{Collection, Database};
use crate::engine::Engine;
use crate::index::{entries, entry_key};
use crate::layout::{NUMBERED, kind, numbered};
use crate::scan::{SLICE_BYTES, decode};
use crate::store::{Backing, Stretch};

/// Errors told at most.
const MOST_ERRORS: usize = 20;
/// Documents and entries looked at under one lock.
const SLICE: usize = 500;

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Documents.
    pub documents: u64,
    /// Entries of each index.
    pub entries: Vec<(String, u64)>,
    /// What is wrong.
    pub errors: Vec<String>,
}

/// Walks a collection and its indexes, a slice at a time, while others write.
///
/// Errors: the store's.
pub fn validate(engine: &Engine, database: &Database, collection: &Collection) -> Result<Report> {
    let mut report = Report::default();
    walk(engine, database, &numbered(kind::RECORD, collection.id, &[]), |row, key, bytes| {
        report.documents += 1;
        let document = decode(bytes)?;
        for index in collection.indexes.iter().filter(|index| index.ready) {
            for values in entries(index, &document)?.keys {
                let mut found = Vec::new();
                if !row.get(&entry_key(index.id, &values, &key[NUMBERED..]), &mut found)?
                    && report.errors.len() < MOST_ERRORS
                {
                    report.errors.push(format!(
                        "a document lacks its entry in the index {}: {}",
                        index.name,
                        document.get("_id").unwrap_or(&bson::Bson::Null)
                    ));
                }
            }
        }
        Ok(())
    })?;
    for index in &collection.indexes {
        let mut count = 0;
        walk(engine, database, &numbered(kind::INDEX, index.id, &[]), |row, key, value| {
            count += 1;
            let record = crate::index::record_of(key, value);
            let mut bytes = Vec::new();
            let there = row.get(&numbered(kind::RECORD, collection.id, record), &mut bytes)?;
            let known: BTreeSet<Vec<u8>> =
                if there { entries(index, &decode(&bytes)?)?.keys } else { BTreeSet::new() };
            let values = &key[NUMBERED..key.len() - record.len()];
            if !known.contains(values) && report.errors.len() < MOST_ERRORS {
                report.errors.push(format!("the index {} has an entry of no document", index.name));
            }
            Ok(())
        })?;
        report.entries.push((index.name.clone(), count));
    }
    Ok(report)
}

fn walk(
    engine: &Engine,
    database: &Database,
    prefix: &[u8],
    mut visit: impl FnMut(&mut dyn Backing, &[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    let mut rest = Stretch::of_prefix(prefix);
    loop {
        let last = engine.with(database, |row| {
            let mut slice: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
            let mut bytes = 0;
            row.range(&rest, false, &mut |key, value| {
                slice.push((key.to_vec(), value.to_vec()));
                bytes += value.len();
                if slice.len() >= SLICE || bytes >= SLICE_BYTES {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            })?;
            for (key, value) in &slice {
                visit(row, key, value)?;
            }
            Ok(slice.pop().map(|(key, _)| key))
        })?;
        match last {
            Some(last) => rest.from = Bound::Excluded(last),
            None => return Ok(()),
        }
    }
}
