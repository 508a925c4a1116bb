//! What keys of a row held before, for as long as a transaction is open that began then.
//!
//! Every batch of a row has a number. A transaction reads the row as it was behind the batch it began
//! at: what a later batch changed is kept here as it was. Without open transactions nothing is kept.

use std::collections::BTreeMap;
use std::ops::Bound;

use beeline_documents_query::error::Result;

use crate::layout::kind;
use crate::store::{Backing, Change, Stretch};

/// Bytes kept at most; beyond, the open transactions can no longer read and are to begin again.
const MOST_KEPT: usize = 256 << 20;

/// What a key held before a batch.
type Before = (u64, Option<Vec<u8>>);

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct History {
    /// The number of the last batch.
    now: u64,
    /// Open transactions by the batch they began at.
    open: BTreeMap<u64, usize>,
    /// Of each key, what it held before the batches that changed it, oldest first.
    before: BTreeMap<Vec<u8>, Vec<Before>>,
    bytes: usize,
    /// What began before this batch lost what it needs.
    lost: u64,
}

/// Whether transactions see a key: the log, outcomes and numbers are not theirs.
fn is_seen(key: &[u8]) -> bool {
    matches!(key.first(), Some(&(kind::CATALOG | kind::RECORD | kind::INDEX)))
}

impl History {
    /// A transaction begins; returns the batch it begins at.
    pub fn begin(&mut self) -> u64 {
        *self.open.entry(self.now).or_default() += 1;
        self.now
    }

    /// A transaction that began at a batch ends.
    pub fn end(&mut self, at: u64) {
        if let Some(count) = self.open.get_mut(&at) {
            *count -= 1;
            if *count == 0 {
                self.open.remove(&at);
            }
        }
        let Some(oldest) = self.open.keys().next().copied() else {
            self.forget();
            return;
        };
        let bytes = &mut self.bytes;
        self.before.retain(|key, all| {
            all.retain(|(batch, old)| {
                let keep = *batch > oldest;
                if !keep {
                    *bytes = bytes.saturating_sub(weight(key, old.as_ref()));
                }
                keep
            });
            !all.is_empty()
        });
    }

    fn forget(&mut self) {
        self.before = BTreeMap::new();
        self.bytes = 0;
    }

    /// Whether what a transaction needs that began at a batch is no longer kept.
    #[must_use]
    pub fn is_lost(&self, at: u64) -> bool {
        at < self.lost
    }

    /// Whether a key changed since a batch.
    #[must_use]
    pub fn changed_since(&self, key: &[u8], at: u64) -> bool {
        self.before.get(key).and_then(|all| all.last()).is_some_and(|(batch, _)| *batch > at)
    }

    /// What a key held behind a batch, if it changed since: `Some(None)` says that it held nothing.
    #[must_use]
    pub fn at(&self, key: &[u8], at: u64) -> Option<Option<&[u8]>> {
        let all = self.before.get(key)?;
        all.iter().find(|(batch, _)| *batch > at).map(|(_, old)| old.as_deref())
    }

    /// The keys of a stretch that changed since a batch, with what they held then.
    pub fn of<'h>(
        &'h self,
        stretch: &Stretch,
        at: u64,
    ) -> impl Iterator<Item = (&'h [u8], Option<&'h [u8]>)> + use<'h> {
        let bounds: (Bound<&[u8]>, Bound<&[u8]>) =
            (stretch.from.as_ref().map(Vec::as_slice), stretch.to.as_ref().map(Vec::as_slice));
        self.before.range::<[u8], _>(bounds).filter_map(move |(key, all)| {
            let old = all.iter().find(|(batch, _)| *batch > at)?;
            Some((key.as_slice(), old.1.as_deref()))
        })
    }

    /// Applies a batch, and keeps what it changes where a transaction may ask for it.
    ///
    /// Errors: the store's.
    pub fn apply(&mut self, row: &mut dyn Backing, changes: &[Change]) -> Result<Option<usize>> {
        let mut old: Vec<(&[u8], Option<Vec<u8>>)> = Vec::new();
        if !self.open.is_empty() {
            for change in changes.iter().filter(|change| is_seen(&change.key)) {
                let mut bytes = Vec::new();
                let there = row.get(&change.key, &mut bytes)?;
                old.push((&change.key, there.then_some(bytes)));
            }
        }
        let refused = row.apply(changes)?;
        if refused.is_some() {
            return Ok(refused);
        }
        self.now += 1;
        for (key, value) in old {
            let all = self.before.entry(key.to_vec()).or_default();
            // A batch may name a key twice: what it held before the batch counts.
            if all.last().is_none_or(|(batch, _)| *batch < self.now) {
                self.bytes += weight(key, value.as_ref());
                all.push((self.now, value));
            }
        }
        if self.bytes > MOST_KEPT {
            self.forget();
            // What is open began before this batch, and reads no more.
            self.open.clear();
            self.lost = self.now;
        }
        Ok(None)
    }
}

fn weight(key: &[u8], value: Option<&Vec<u8>>) -> usize {
    key.len() + value.map_or(0, Vec::len) + 96
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Memory, with_row};

    fn key(byte: u8) -> Vec<u8> {
        vec![kind::RECORD, byte]
    }

    #[test]
    fn each_transaction_sees_what_was_there_when_it_began() {
        let mut history = History::default();
        with_row(&Memory::default(), b"r", |row| {
            let mut put = |history: &mut History, byte, value: Option<u8>| {
                let change = match value {
                    Some(value) => Change::put(key(byte), vec![value]),
                    None => Change::delete(key(byte)),
                };
                history.apply(row, &[change]).map(drop)
            };
            put(&mut history, 1, Some(10))?;
            assert!(history.before.is_empty());
            let first = history.begin();
            put(&mut history, 1, Some(11))?;
            let second = history.begin();
            put(&mut history, 1, None)?;
            put(&mut history, 2, Some(20))?;
            assert_eq!(history.at(&key(1), first), Some(Some(&[10][..])));
            assert_eq!(history.at(&key(1), second), Some(Some(&[11][..])));
            assert_eq!(history.at(&key(2), second), Some(None));
            assert!(!history.changed_since(&key(3), first));
            assert_eq!(history.of(&Stretch::of_prefix(&[kind::RECORD]), second).count(), 2);
            history.end(first);
            assert_eq!(history.at(&key(1), second), Some(Some(&[11][..])));
            assert_eq!(history.before[&key(1)].len(), 1);
            history.end(second);
            assert!(history.before.is_empty() && history.bytes == 0);
            Ok(())
        })
        .unwrap();
    }
}
