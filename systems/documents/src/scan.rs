//! Walking a plan, a slice at a time, so that no lock is held for long.
//!
//! Between two slices others write. A position is a key; what is there throughout is met once. An
//! index may show a document twice whose key moved; records met are remembered where that can be.

use std::collections::HashSet;
use std::ops::{Bound, ControlFlow};

use beeline_documents_query::Filter;
use beeline_documents_query::error::{Code, QueryError, Result, fail};
use beeline_documents_query::expression::Scope;
use bson::raw::RawDocument;
use bson::{Bson, Document};

use crate::catalog::Collection;
use crate::index::record_of;
use crate::layout::{NUMBERED, kind, numbered};
use crate::plan::{Plan, Source};
use crate::store::{Backing, Stretch};

/// Documents looked at in one slice.
pub const SLICE: usize = 512;
/// Bytes looked at in one slice.
pub const SLICE_BYTES: usize = 4 << 20;

/// A document and where it lies.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its record key.
    pub record: Vec<u8>,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// A walk.
#[derive(Debug)]
pub struct Scan {
    collection: u32,
    plan: Plan,
    filter: Filter,
    /// Top-level fields the filter sees; `None`: all.
    fields: Option<Vec<String>>,
    stretch: usize,
    behind: Option<Vec<u8>>,
    seen: Option<HashSet<Vec<u8>>>,
    /// Documents looked at.
    pub examined: u64,
    /// Index entries looked at.
    pub keys_examined: u64,
    /// Nothing is left.
    pub done: bool,
    /// Follow a capped collection: the end is not the end.
    tailing: bool,
}

impl Scan {
    /// A walk through a collection.
    #[must_use]
    pub fn new(collection: &Collection, plan: Plan, filter: Filter) -> Self {
        let fields = filter.fields().map(|all| all.into_iter().map(str::to_owned).collect());
        // Without arrays a document has one entry in a stretch, but its key may move between slices.
        let seen = matches!(plan.source, Source::Index(_) | Source::Union(_)).then(HashSet::new);
        let done = matches!(plan.source, Source::Nothing);
        Self {
            collection: collection.id,
            plan,
            filter,
            fields,
            stretch: 0,
            behind: None,
            seen,
            examined: 0,
            keys_examined: 0,
            done,
            tailing: false,
        }
    }

    /// Goes on at the end, when more was inserted.
    pub fn tail(&mut self) {
        self.tailing = true;
    }

    /// The filter.
    #[must_use]
    pub fn filter(&self) -> &Filter {
        &self.filter
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Refuses to go on in a collection that is not the one it began in, or lost the index it goes by:
    /// a name may stand for another collection by now.
    ///
    /// Errors: [`Code::QueryPlanKilled`].
    pub fn check(&self, row: &mut dyn Backing, collection: Option<&Collection>) -> Result<()> {
        let Some(collection) = collection.filter(|known| known.id == self.collection) else {
            return fail(
                Code::QueryPlanKilled,
                "the collection was dropped or renamed while the operation went through it",
            );
        };
        for index in self.plan.indexes() {
            if collection.indexes.iter().all(|known| known.id != index.id) {
                return fail(
                    Code::QueryPlanKilled,
                    format!("query plan killed :: caused by :: index '{}' dropped", index.name),
                );
            }
        }
        row.enter(collection)
    }

    /// Looks at one slice; what the filter selects is appended. At most `most` are found.
    ///
    /// Errors: the store's, those of an expression in the filter.
    pub fn slice(
        &mut self,
        backing: &mut dyn Backing,
        scope: &Scope<'_>,
        most: usize,
        out: &mut Vec<Found>,
    ) -> Result<()> {
        if self.done {
            return Ok(());
        }
        match &self.plan.source {
            Source::Nothing => self.done = true,
            Source::Records => self.records(backing, scope, most, out)?,
            Source::Index(_) => self.entries(backing, scope, most, out)?,
            Source::Union(_) if self.among_entries() => self.entries(backing, scope, most, out)?,
            Source::Union(_) => self.records(backing, scope, most, out)?,
        }
        Ok(())
    }

    /// Whether the current stretch is one of index entries, where a plan has both.
    fn among_entries(&self) -> bool {
        let start = self.plan.stretches.get(self.stretch).map(|stretch| &stretch.from);
        matches!(start, Some(Bound::Included(from) | Bound::Excluded(from)) if from.first() == Some(&kind::INDEX))
    }

    /// Whether the next stretch is of the other kind, so that this slice ends before it.
    fn turns(&self, entries: bool) -> bool {
        matches!(self.plan.source, Source::Union(_)) && self.among_entries() != entries
    }

    /// What is left of the current stretch.
    fn rest(&self) -> Option<Stretch> {
        let mut rest = self.plan.stretches.get(self.stretch)?.clone();
        if let Some(behind) = &self.behind {
            let bound = Bound::Excluded(behind.clone());
            if self.plan.backward { rest.to = bound } else { rest.from = bound }
        }
        Some(rest)
    }

    fn next_stretch(&mut self) {
        if self.tailing && self.stretch + 1 >= self.plan.stretches.len() {
            return;
        }
        self.stretch += 1;
        self.behind = None;
        self.done = self.stretch >= self.plan.stretches.len();
    }

    fn records(
        &mut self,
        backing: &mut dyn Backing,
        scope: &Scope<'_>,
        most: usize,
        out: &mut Vec<Found>,
    ) -> Result<()> {
        let (mut looked, mut bytes) = (0, 0);
        while looked < SLICE && !self.done && !self.turns(false) {
            let Some(rest) = self.rest() else {
                self.done = true;
                break;
            };
            let (filter, fields, seen) = (&self.filter, &self.fields, &mut self.seen);
            let (mut last, mut failure, mut full) = (None, None, false);
            backing.range(&rest, self.plan.backward, &mut |key, value| {
                looked += 1;
                bytes += value.len();
                let new = seen.as_mut().is_none_or(|seen| seen.insert(key[NUMBERED..].to_vec()));
                let selected =
                    if new { selects(filter, fields.as_deref(), value, scope) } else { Ok(false) };
                match selected {
                    Ok(true) => {
                        out.push(Found { record: key[NUMBERED..].to_vec(), bytes: value.to_vec() })
                    }
                    Ok(false) => {}
                    Err(error) => failure = Some(error),
                }
                full = out.len() >= most
                    || looked >= SLICE
                    || bytes >= SLICE_BYTES
                    || failure.is_some();
                if full {
                    last = Some(key.to_vec());
                    return ControlFlow::Break(());
                }
                if self.tailing {
                    last = Some(key.to_vec());
                }
                ControlFlow::Continue(())
            })?;
            if let Some(error) = failure {
                return Err(error);
            }
            if last.is_some() {
                self.behind = last;
            }
            if full {
                break;
            }
            self.next_stretch();
            if self.tailing {
                break;
            }
        }
        self.examined += looked as u64;
        Ok(())
    }

    fn entries(
        &mut self,
        backing: &mut dyn Backing,
        scope: &Scope<'_>,
        most: usize,
        out: &mut Vec<Found>,
    ) -> Result<()> {
        let (mut looked, mut weight) = (0, 0);
        // Few entries first: most queries through an index want little.
        let mut chunk = 8.max(most.min(64));
        while looked < SLICE
            && weight < SLICE_BYTES
            && out.len() < most
            && !self.done
            && !self.turns(true)
        {
            let Some(rest) = self.rest() else {
                self.done = true;
                break;
            };
            let mut entries: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
            backing.range(&rest, self.plan.backward, &mut |key, value| {
                entries.push((key.to_vec(), record_of(key, value).to_vec()));
                if entries.len() >= chunk {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            })?;
            let ended = entries.len() < chunk;
            chunk = (chunk * 2).min(SLICE);
            let mut full = false;
            for (key, record) in entries {
                looked += 1;
                self.keys_examined += 1;
                self.behind = Some(key);
                if self.seen.as_mut().is_some_and(|seen| !seen.insert(record.clone())) {
                    continue;
                }
                let mut bytes = Vec::new();
                if !backing.get(&numbered(kind::RECORD, self.collection, &record), &mut bytes)? {
                    continue;
                }
                self.examined += 1;
                weight += bytes.len();
                if selects(&self.filter, self.fields.as_deref(), &bytes, scope)? {
                    out.push(Found { record, bytes });
                }
                if out.len() >= most || weight >= SLICE_BYTES {
                    full = true;
                    break;
                }
            }
            if ended && !full {
                self.next_stretch();
            }
        }
        Ok(())
    }
}

/// Whether a filter selects stored bytes, of which only the fields it sees are decoded.
///
/// Errors: damaged bytes, those of an expression.
pub fn selects(
    filter: &Filter,
    fields: Option<&[String]>,
    bytes: &[u8],
    scope: &Scope<'_>,
) -> Result<bool> {
    if filter.is_all() {
        return Ok(true);
    }
    let document = match fields {
        Some(fields) => some_fields(bytes, fields)?,
        None => decode(bytes)?,
    };
    filter.matches_in(&document, scope)
}

fn unreadable(error: impl std::fmt::Display) -> QueryError {
    QueryError::new(Code::InternalError, format!("a stored document cannot be read: {error}"))
}

/// Some top-level fields of a stored document.
///
/// Errors: damaged bytes.
pub fn some_fields<S: AsRef<str>>(bytes: &[u8], fields: &[S]) -> Result<Document> {
    let mut document = Document::new();
    for element in RawDocument::from_bytes(bytes).map_err(unreadable)?.iter_elements() {
        let element = element.map_err(unreadable)?;
        let name = element.key().as_str();
        if fields.iter().any(|field| field.as_ref() == name) {
            let value = element.value().map_err(unreadable)?;
            document.insert(name, Bson::try_from(value).map_err(unreadable)?);
        }
    }
    Ok(document)
}

/// A whole stored document.
///
/// Errors: damaged bytes.
pub fn decode(bytes: &[u8]) -> Result<Document> {
    Document::from_reader(bytes).map_err(unreadable)
}
