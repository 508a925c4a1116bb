//! Indexes: made while others write, changed, dropped.

use std::ops::ControlFlow;
use std::sync::Arc;

use beeline_documents_query::Filter;
use beeline_documents_query::error::{Code, QueryError, Result, fail};
use beeline_documents_query::matching::Predicate;
use bson::Bson;

use super::{Engine, existing, leaving, lock, numbers};
use crate::catalog::{Collection, Database, Index, MOST_INDEXES};
use crate::index::{entries, entry_key, entry_value};
use crate::layout::{NUMBERED, kind, numbered};
use crate::scan::{SLICE, SLICE_BYTES, decode};
use crate::store::{Change, Stretch};
use crate::write;

impl Engine {
    /// Makes indexes: writers keep them up from the start, the planner sees each once all documents
    /// that were there are in it. Returns how many there were before and are now.
    ///
    /// Errors: specifications that cannot be, contradict an index that is there, or that documents
    /// do not fit; none of the new ones is left then.
    pub fn create_indexes(
        &self,
        database: &Database,
        name: &str,
        wanted: Vec<Index>,
    ) -> Result<(usize, usize)> {
        let (mut made, before) = (Vec::new(), existing(database, name)?.indexes.len());
        {
            let _guard = lock(&database.changing);
            self.with(database, |row| {
                let old = existing(database, name)?;
                let mut indexes = old.indexes.clone();
                for mut index in wanted {
                    if index.partial.as_ref().is_some_and(|(_, filter)| !selects_plainly(filter)) {
                        return fail(
                            Code::CannotCreateIndex,
                            format!(
                                "Expression not supported in partial index: {}",
                                index.shown().get("partialFilterExpression").unwrap_or(&Bson::Null)
                            ),
                        );
                    }
                    if is_known(&indexes, &index)? {
                        continue;
                    }
                    if indexes.len() + 2 > MOST_INDEXES {
                        return fail(
                            Code::CannotCreateIndex,
                            format!(
                                "add index fails, too many indexes for {} key:{}",
                                old.namespace,
                                index.key()
                            ),
                        );
                    }
                    index.id = database.take_id();
                    made.push(index.id);
                    indexes.push(Arc::new(index));
                }
                if !made.is_empty() {
                    let new = old.with_indexes(indexes);
                    row.apply(&[Change::put(new.catalog_key(), new.stored()?), numbers(database)])?;
                    database.put(new);
                }
                Ok(())
            })?;
        }
        for id in &made {
            if let Err(error) = self.build(database, name, *id) {
                for id in &made {
                    self.remove_index(database, name, *id)?;
                }
                self.end_leavings(database);
                return Err(error);
            }
        }
        let after = existing(database, name)?.indexes.len();
        Ok((before, after))
    }

    /// Puts what is there into a new index, a slice at a time.
    fn build(&self, database: &Database, name: &str, id: u32) -> Result<()> {
        let of = |collection: &Collection| {
            collection.indexes.iter().find(|index| index.id == id).cloned().ok_or_else(|| {
                QueryError::new(Code::IndexNotFound, "the index was dropped while it was built")
            })
        };
        let collection = existing(database, name)?;
        let label = (collection.namespace.clone(), of(&collection)?.name.clone());
        let whole = self.count(database, &collection)?.0.max(0) as u64;
        let mut behind: Option<Vec<u8>> = None;
        let mut looked = 0;
        let outcome = loop {
            lock(&self.builds).insert(label.clone(), (looked, whole));
            let step = self.with(database, |row| {
                let collection = existing(database, name)?;
                let index = of(&collection)?;
                let mut slice: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
                let mut bytes = 0;
                let mut rest = Stretch::of_prefix(&numbered(kind::RECORD, collection.id, &[]));
                if let Some(behind) = &behind {
                    rest.from = std::ops::Bound::Excluded(behind.clone());
                }
                row.range(&rest, false, &mut |key, value| {
                    slice.push((key.to_vec(), value.to_vec()));
                    bytes += value.len();
                    if slice.len() >= SLICE / 2 || bytes >= SLICE_BYTES {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                })?;
                let mut changes = Vec::new();
                let mut multikey = false;
                for (key, bytes) in &slice {
                    let record = &key[NUMBERED..];
                    let document = decode(bytes)?;
                    let found = entries(&index, &document)?;
                    multikey |= found.multikey;
                    for values in &found.keys {
                        if index.unique {
                            write::check_unique(
                                row,
                                &collection,
                                &index,
                                values,
                                record,
                                &document,
                            )?;
                            // The next document of the slice must see this one.
                            row.apply(&[Change::put(
                                entry_key(id, values, record),
                                entry_value(record),
                            )])?;
                        } else {
                            changes.push(Change::put(
                                entry_key(id, values, record),
                                entry_value(record),
                            ));
                        }
                    }
                }
                let done = slice.len() < SLICE / 2 && bytes < SLICE_BYTES;
                if done || multikey && !index.multikey {
                    let new = write::with_index(&collection, id, |index| {
                        index.multikey |= multikey;
                        index.ready |= done;
                    });
                    changes.push(Change::put(new.catalog_key(), new.stored()?));
                    row.apply(&changes)?;
                    database.put(new);
                } else {
                    row.apply(&changes)?;
                }
                Ok((done, slice.len(), slice.pop().map(|(key, _)| key)))
            });
            match step {
                Ok((done, count, last)) => {
                    looked += count as u64;
                    behind = last.or(behind);
                    if done {
                        break Ok(());
                    }
                }
                Err(error) => break Err(error),
            }
        };
        lock(&self.builds).remove(&label);
        outcome
    }

    /// Drops an index by number.
    ///
    /// Errors: the store's.
    pub fn remove_index(&self, database: &Database, name: &str, id: u32) -> Result<()> {
        let _guard = lock(&database.changing);
        self.with(database, |row| {
            let old = existing(database, name)?;
            // The name may stand for another collection by now.
            if old.indexes.iter().all(|index| index.id != id) {
                return Ok(());
            }
            let indexes = old.indexes.iter().filter(|index| index.id != id).cloned().collect();
            let new = old.with_indexes(indexes);
            row.apply(&[Change::put(new.catalog_key(), new.stored()?), leaving(kind::INDEX, id)])?;
            database.put(new);
            Ok(())
        })
    }

    /// Changes an index in place.
    ///
    /// Errors: the store's.
    pub fn change_index(
        &self,
        database: &Database,
        name: &str,
        id: u32,
        change: impl FnOnce(&mut Index),
    ) -> Result<()> {
        let _guard = lock(&database.changing);
        self.with(database, |row| {
            let new = write::with_index(&*existing(database, name)?, id, change);
            row.apply(&[Change::put(new.catalog_key(), new.stored()?)])?;
            database.put(new);
            Ok(())
        })
    }

    /// Ends builds that a crash cut short.
    ///
    /// Errors: the store's.
    pub fn finish_builds(&self) -> Result<()> {
        for database in self.databases() {
            for collection in database.collections() {
                for index in collection.indexes.iter().filter(|index| !index.ready) {
                    if let Err(error) = self.build(&database, &collection.name, index.id) {
                        tracing::warn!(index = index.name, collection = collection.namespace, %error, "an index build that was cut short cannot end; the index is dropped");
                        // Where the pool is full it stays, not ready: no plan uses it.
                        if let Err(error) = self.remove_index(&database, &collection.name, index.id)
                        {
                            tracing::warn!(%error, "the index cannot be dropped yet");
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Whether a partial index may have this filter. A negation may not be: of an array, one element may
/// satisfy it while the whole does not, so a query could not be told to be covered.
fn selects_plainly(filter: &Filter) -> bool {
    match filter {
        Filter::And(parts) | Filter::Or(parts) => parts.iter().all(selects_plainly),
        Filter::Field(_, predicate) => match predicate {
            Predicate::Eq(_) | Predicate::Compare(..) | Predicate::Exists | Predicate::Type(..) => {
                true
            }
            Predicate::In(_, patterns) => patterns.is_empty(),
            _ => false,
        },
        _ => false,
    }
}

fn is_known(indexes: &[Arc<Index>], wanted: &Index) -> Result<bool> {
    for known in indexes {
        let same_key = known.key() == wanted.key();
        // Options that were left out and options that were given as `false` say the same.
        let equivalent = same_key
            && known.partial.as_ref().map(|(filter, _)| filter)
                == wanted.partial.as_ref().map(|(filter, _)| filter)
            && known.sparse == wanted.sparse
            && known.unique == wanted.unique;
        if known.name == wanted.name {
            if equivalent && known.expires_s == wanted.expires_s {
                return Ok(true);
            }
            let (code, what) = if equivalent {
                (
                    Code::IndexOptionsConflict,
                    "An equivalent index already exists with the same name but different options.",
                )
            } else {
                (
                    Code::IndexKeySpecsConflict,
                    "An existing index has the same name as the requested index. When index names are not specified, they are auto generated and can cause conflicts. Please refer to our documentation.",
                )
            };
            return fail(
                code,
                format!(
                    "{what} Requested index: {}, existing index: {}",
                    wanted.shown(),
                    known.shown()
                ),
            );
        }
        if equivalent {
            return fail(
                Code::IndexOptionsConflict,
                format!("Index already exists with a different name: {}", known.name),
            );
        }
        if same_key && known.partial.is_none() && wanted.partial.is_none() {
            return fail(
                Code::IndexOptionsConflict,
                format!(
                    "An equivalent index already exists with different options: {}",
                    known.name
                ),
            );
        }
    }
    // The index on `_id` is always there.
    if wanted.fields.len() == 1
        && wanted.fields[0].0 == ["_id"]
        && wanted.fields[0].1 == crate::catalog::Direction::Up
    {
        return Ok(true);
    }
    Ok(false)
}
