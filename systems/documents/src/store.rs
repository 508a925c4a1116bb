//! Where documents lie: rows of sorted keys.
//!
//! A database is a row; everything of it (catalog, documents, index entries, log) lies side by side
//! in the order of its keys and changes in atomic batches. The node's store is one [`Store`]
//! ([`crate::node_store`]), the plain model here another; tests run the same commands on both.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::{Bound, ControlFlow};
use std::sync::{Arc, Mutex, PoisonError};

use beeline_documents_query::error::{Code, QueryError, Result, fail};

use crate::catalog::{Collection, Figures};
use crate::log::Clock;

/// One change of a batch: a key, and its new value or its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The key within the row.
    pub key: Vec<u8>,
    /// The new value; `None` deletes.
    pub value: Option<Vec<u8>>,
    /// The key must not be there yet.
    pub absent: bool,
}

impl Change {
    /// Stores a value.
    #[must_use]
    pub fn put(key: Vec<u8>, value: Vec<u8>) -> Self {
        Self { key, value: Some(value), absent: false }
    }

    /// Stores a value where there is none.
    #[must_use]
    pub fn put_new(key: Vec<u8>, value: Vec<u8>) -> Self {
        Self { key, value: Some(value), absent: true }
    }

    /// Deletes.
    #[must_use]
    pub fn delete(key: Vec<u8>) -> Self {
        Self { key, value: None, absent: false }
    }
}

/// A half-open stretch of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// First key.
    pub from: Bound<Vec<u8>>,
    /// Behind the last key.
    pub to: Bound<Vec<u8>>,
}

impl Stretch {
    /// Every key that begins with `prefix`.
    #[must_use]
    pub fn of_prefix(prefix: &[u8]) -> Self {
        let to = behind(prefix).map_or(Bound::Unbounded, Bound::Excluded);
        Self { from: Bound::Included(prefix.to_vec()), to }
    }

    /// True when no key can be in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match (&self.from, &self.to) {
            (Bound::Included(from), Bound::Excluded(to)) => from >= to,
            (Bound::Excluded(from), Bound::Excluded(to)) => from >= to,
            _ => false,
        }
    }
}

/// The least key behind every key that begins with `prefix`.
#[must_use]
pub fn behind(prefix: &[u8]) -> Option<Vec<u8>> {
    let mut next = prefix.to_vec();
    while let Some(last) = next.pop() {
        if last < u8::MAX {
            next.push(last + 1);
            return Some(next);
        }
    }
    None
}

/// What [`Backing::range`] calls with each key and value.
pub type Visitor<'v> = dyn FnMut(&[u8], &[u8]) -> ControlFlow<()> + 'v;

/// One row, locked.
pub trait Backing {
    /// Puts the value of a key into `out`; false when there is none.
    ///
    /// Errors: the store's.
    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool>;

    /// Visits keys and values in order, or against it.
    ///
    /// Errors: the store's.
    fn range(&mut self, stretch: &Stretch, backward: bool, visit: &mut Visitor<'_>) -> Result<()>;

    /// Makes all changes or none, also in a crash. `Some(at)`: the key of that change was there and
    /// should not have been, and nothing changed.
    ///
    /// Errors: the store's; nothing changed.
    fn apply(&mut self, changes: &[Change]) -> Result<Option<usize>>;

    /// Makes changes that do not wait for the transaction that the row is seen by, and last if it ends
    /// without a trace.
    ///
    /// Errors: as [`Backing::apply`].
    fn apply_at_once(&mut self, changes: &[Change]) -> Result<()> {
        self.apply(changes).map(drop)
    }

    /// Changes wait for the commit of a transaction.
    fn buffers(&self) -> bool {
        false
    }

    /// Counts documents and bytes that a collection grows by, once they are there.
    fn count(&mut self, figures: &Arc<Figures>, documents: i64, bytes: i64) {
        figures.add(documents, bytes);
    }

    /// Says which collection the next calls are about.
    ///
    /// Errors: one that a transaction cannot see as it was.
    fn enter(&mut self, collection: &Collection) -> Result<()> {
        let _ = collection;
        Ok(())
    }

    /// Says that the next calls would be about a collection of this name, and there is none.
    ///
    /// Errors: a transaction that saw one.
    fn miss(&mut self, name: &str) -> Result<()> {
        let _ = name;
        Ok(())
    }
}

/// Rows that are locked one at a time.
pub trait Store: Debug + Send + Sync {
    /// Locks a row for `work`; what `work` changed is persisted when this returns.
    ///
    /// Errors: those of `work`; failing to persist.
    fn with(&self, row: &[u8], work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>) -> Result<()>;

    /// Milliseconds since 1970.
    fn now_ms(&self) -> u64;

    /// Bytes used and bytes there are.
    fn space(&self) -> (u64, u64);

    /// Whether what was changed outlives the process.
    fn outlives_process(&self) -> bool {
        true
    }

    /// Locks several rows and makes changes of all of them: one batch. `then` runs before the rows are let go,
    /// once the changes are persisted. Members of replica sets need it.
    ///
    /// Errors: the store's; nothing changed. A store that changes one row at a time refuses.
    fn apply_all(&self, rows: &[(Vec<u8>, Vec<Change>)], then: &mut dyn FnMut()) -> Result<()> {
        let _ = (rows, then);
        fail(Code::CommandNotSupported, "this store changes one row at a time")
    }

    /// The time of the log, where the store gives it.
    fn clock(&self) -> Option<Arc<Clock>> {
        None
    }
}

/// Locks a row and returns what `work` returns.
///
/// Errors: those of `work`; failing to persist.
pub fn with_row<R>(
    store: &dyn Store,
    row: &[u8],
    work: impl FnOnce(&mut dyn Backing) -> Result<R>,
) -> Result<R> {
    let (mut work, mut result) = (Some(work), None);
    store.with(row, &mut |backing| {
        if let Some(work) = work.take() {
            result = Some(work(backing)?);
        }
        Ok(())
    })?;
    result.ok_or_else(|| QueryError::new(Code::InternalError, "the store did not run the work"))
}

/// A row of the plain model.
type Rows = BTreeMap<Vec<u8>, BTreeMap<Vec<u8>, Vec<u8>>>;

/// The plain model: a map for each row.
#[derive(Debug, Default)]
pub struct Memory {
    rows: Mutex<Rows>,
}

struct MemoryRow<'m>(&'m mut BTreeMap<Vec<u8>, Vec<u8>>);

impl Backing for MemoryRow<'_> {
    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool> {
        out.clear();
        let found = self.0.get(key);
        out.extend(found.into_iter().flatten());
        Ok(found.is_some())
    }

    fn range(&mut self, stretch: &Stretch, backward: bool, visit: &mut Visitor<'_>) -> Result<()> {
        if stretch.is_empty() {
            return Ok(());
        }
        let bounds = (stretch.from.clone(), stretch.to.clone());
        let mut found = self.0.range::<Vec<u8>, _>(bounds);
        while let Some((key, value)) = if backward { found.next_back() } else { found.next() } {
            if visit(key, value).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn apply(&mut self, changes: &[Change]) -> Result<Option<usize>> {
        let refused = changes.iter().position(|one| one.absent && self.0.contains_key(&one.key));
        if refused.is_none() {
            for change in changes {
                match &change.value {
                    Some(value) => drop(self.0.insert(change.key.clone(), value.clone())),
                    None => drop(self.0.remove(&change.key)),
                }
            }
        }
        Ok(refused)
    }
}

impl Store for Memory {
    fn with(&self, row: &[u8], work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>) -> Result<()> {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        work(&mut MemoryRow(rows.entry(row.to_vec()).or_default()))
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(bson::DateTime::now().timestamp_millis()).unwrap_or(0)
    }

    fn space(&self) -> (u64, u64) {
        (0, u64::MAX)
    }

    fn apply_all(&self, rows: &[(Vec<u8>, Vec<Change>)], then: &mut dyn FnMut()) -> Result<()> {
        let mut all = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        for (row, changes) in rows {
            MemoryRow(all.entry(row.clone()).or_default()).apply(changes)?;
        }
        then();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_ends_behind_its_prefix() {
        assert_eq!(behind(&[1, 255]), Some(vec![2]));
        assert_eq!(behind(&[255, 255]), None);
        assert!(
            Stretch { from: Bound::Included(vec![2]), to: Bound::Excluded(vec![2]) }.is_empty()
        );
    }

    #[test]
    fn a_batch_is_applied_whole_or_not_at_all() {
        let memory = Memory::default();
        let seen = with_row(&memory, b"r", |row| {
            assert_eq!(
                row.apply(&[Change::put(vec![1], vec![9]), Change::put_new(vec![2], vec![8])])?,
                None
            );
            assert_eq!(
                row.apply(&[Change::delete(vec![1]), Change::put_new(vec![2], vec![7])])?,
                Some(1)
            );
            let mut seen = Vec::new();
            row.range(&Stretch::of_prefix(&[]), true, &mut |key, value| {
                seen.push((key.to_vec(), value.to_vec()));
                ControlFlow::Continue(())
            })?;
            Ok(seen)
        })
        .unwrap();
        assert_eq!(seen, [(vec![2], vec![8]), (vec![1], vec![9])]);
    }
}
