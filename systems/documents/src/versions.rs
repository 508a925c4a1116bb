//! What keys of a row held before, for as long as a transaction is open that began then.
//!
//! Every batch of a row has a number. A transaction reads the row as it was behind the batch it began
//! at: what a later batch changed is kept here as it was. Without open transactions nothing is kept.
//!
//! Invariants: a version is kept only while an open transaction reads it, so a key that changes often
//! costs one version for each batch that open transactions began at; what is kept counts as the memory
//! of the node's operations; where there is no room, the oldest transaction ends, not the write.

use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Bound;
use std::sync::Arc;

use beeline_documents_query::error::Result;
use beeline_documents_query::memory::{Lease, Memory};

use crate::layout::kind;
use crate::store::{Backing, Change, Stretch};

/// Bytes of one database kept at most; beyond, the oldest open transaction is to begin again.
const MOST_KEPT: usize = 256 << 20;

/// What a key held before a batch.
type Before = (u64, Option<Vec<u8>>);

/// A version: the batch that made it, the batch that ended it, its key. Those are read by transactions
/// that began at the first or later, and before the second.
type Version = (u64, u64, Arc<[u8]>);

/// The transactions that began at one batch.
#[derive(Debug, Default)]
struct Reading {
    count: usize,
    /// Versions that these read and no later ones; those that the fewest earlier ones read come first.
    versions: BinaryHeap<Version>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct History {
    /// The number of the last batch.
    now: u64,
    /// Open transactions by the batch they began at.
    open: BTreeMap<u64, Reading>,
    /// Of each key, what it held before the batches that changed it, oldest first.
    before: BTreeMap<Arc<[u8]>, Vec<Before>>,
    bytes: usize,
    lease: Lease,
    /// What began before this batch lost what it needs.
    lost: u64,
}

/// Whether transactions see a key: the log, outcomes and numbers are not theirs.
fn is_seen(key: &[u8]) -> bool {
    matches!(key.first(), Some(&(kind::CATALOG | kind::RECORD | kind::INDEX)))
}

impl History {
    /// Nothing kept yet; what will be counts as memory of a node's operations.
    #[must_use]
    pub fn counted(memory: &Arc<Memory>) -> Self {
        Self { lease: Lease::of(memory), ..Self::default() }
    }

    /// A transaction begins; returns the batch it begins at.
    pub fn begin(&mut self) -> u64 {
        self.open.entry(self.now).or_default().count += 1;
        self.now
    }

    /// A transaction that began at a batch ends.
    pub fn end(&mut self, at: u64) {
        // One that lost what it needs is not here any more.
        let Some(reading) = self.open.get_mut(&at) else { return };
        reading.count -= 1;
        if reading.count == 0 {
            self.close(at);
        }
    }

    /// Forgets what only the transactions read that began at a batch.
    fn close(&mut self, at: u64) {
        let Some(Reading { mut versions, .. }) = self.open.remove(&at) else { return };
        let earlier = self.open.range_mut(..at).next_back();
        let newest = earlier.as_ref().map(|(earlier, _)| **earlier);
        let mut ended = Vec::new();
        while versions.peek().is_some_and(|(since, ..)| newest.is_none_or(|newest| *since > newest))
        {
            ended.extend(versions.pop());
        }
        if let Some((_, earlier)) = earlier {
            earlier.versions.append(&mut versions);
        }
        for (_, batch, key) in ended {
            let Some(all) = self.before.get_mut(&key) else { continue };
            if let Some(at) = all.iter().position(|(other, _)| *other == batch) {
                let weight = weight(&key, all.remove(at).1.as_ref());
                self.bytes -= weight;
                self.lease.shrink(weight);
            }
            if all.is_empty() {
                self.before.remove(&key);
            }
        }
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
            Some((&**key, old.1.as_deref()))
        })
    }

    /// Applies a batch, and keeps what it changes where a transaction may ask for it.
    ///
    /// Errors: the store's.
    pub fn apply(&mut self, row: &mut dyn Backing, changes: &[Change]) -> Result<Option<usize>> {
        let mut old: BTreeMap<&[u8], Option<Vec<u8>>> = BTreeMap::new();
        if let Some((newest, _)) = self.open.last_key_value() {
            for change in changes.iter().filter(|change| is_seen(&change.key)) {
                // Every open transaction reads an older version already, or the batch names the key twice.
                if self.changed_since(&change.key, *newest) || old.contains_key(&*change.key) {
                    continue;
                }
                let mut bytes = Vec::new();
                let there = row.get(&change.key, &mut bytes)?;
                old.insert(&change.key, there.then_some(bytes));
            }
        }
        let refused = row.apply(changes)?;
        if refused.is_some() {
            return Ok(refused);
        }
        self.now += 1;
        for (key, value) in old {
            self.keep(key, value);
        }
        Ok(None)
    }

    /// Keeps what a key held before the last batch; ends the oldest transactions until there is room.
    fn keep(&mut self, key: &[u8], value: Option<Vec<u8>>) {
        let weight = weight(key, value.as_ref());
        while !self.open.is_empty()
            && (self.bytes + weight > MOST_KEPT || self.lease.grow(weight, Memory::alone).is_err())
        {
            if let Some(oldest) = self.open.keys().next().copied() {
                self.close(oldest);
                self.lost = oldest + 1;
            }
        }
        // The newest of those that are left reads it, unless it lost what it needs.
        let Some(mut newest) = self.open.last_entry() else { return };
        let key = match self.before.get_key_value(key) {
            Some((key, _)) => Arc::clone(key),
            None => Arc::from(key),
        };
        let all = self.before.entry(Arc::clone(&key)).or_default();
        let since = all.last().map_or(0, |(batch, _)| *batch);
        newest.get_mut().versions.push((since, self.now, key));
        all.push((self.now, value));
        self.bytes += weight;
    }
}

fn weight(key: &[u8], value: Option<&Vec<u8>>) -> usize {
    key.len() + value.map_or(0, Vec::len) + 96
}

#[cfg(test)]
mod tests {
    use beeline_documents_query::memory::Memory as Counted;

    use super::{BTreeMap, Change, History, Stretch, kind};
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
            assert_eq!(history.before[&*key(1)].len(), 1);
            history.end(second);
            assert!(history.before.is_empty() && history.bytes == 0);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_key_that_changes_often_costs_one_version_for_each_batch_that_transactions_began_at() {
        let mut history = History::default();
        with_row(&Memory::default(), b"r", |row| {
            let mut often = |history: &mut History| {
                (0..100_u8).try_for_each(|value| {
                    history.apply(row, &[Change::put(key(1), vec![value; 1000])]).map(drop)
                })
            };
            let first = history.begin();
            often(&mut history)?;
            let second = history.begin();
            often(&mut history)?;
            assert_eq!(history.before[&*key(1)].len(), 2);
            assert_eq!(history.at(&key(1), first), Some(None));
            assert_eq!(history.at(&key(1), second), Some(Some(&[99; 1000][..])));
            assert!(
                history.changed_since(&key(1), first) && history.changed_since(&key(1), second)
            );
            // What only the second reads goes with it, although the first is open still.
            history.end(second);
            assert_eq!(history.before[&*key(1)].len(), 1);
            assert_eq!(history.at(&key(1), first), Some(None));
            history.end(first);
            assert!(history.before.is_empty() && history.bytes == 0);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn without_room_the_oldest_transaction_ends_and_what_is_kept_is_counted() {
        let memory = Counted::of_node(10_000);
        let mut history = History::counted(&memory);
        with_row(&Memory::default(), b"r", |row| {
            let mut put = |history: &mut History, byte| {
                history.apply(row, &[Change::put(key(byte), vec![byte; 3000])]).map(drop)
            };
            for byte in 0..9 {
                put(&mut history, byte)?;
            }
            let oldest = history.begin();
            put(&mut history, 0)?;
            put(&mut history, 1)?;
            let newest = history.begin();
            assert!(memory.used() > 6000 && memory.used() == history.bytes);
            put(&mut history, 2)?;
            put(&mut history, 3)?;
            assert!(history.is_lost(oldest) && !history.is_lost(newest));
            assert_eq!(history.at(&key(3), newest), Some(Some(&[3; 3000][..])));
            history.end(oldest);
            history.end(newest);
            assert_eq!((memory.used(), history.bytes, history.before.len()), (0, 0, 0));
            // One that changes more than there is room for ends alone, and what comes after it begins.
            let alone = history.begin();
            for byte in 0..9 {
                put(&mut history, byte)?;
            }
            assert!(history.is_lost(alone));
            let next = history.begin();
            assert!(!history.is_lost(next));
            history.end(next);
            assert_eq!((memory.used(), history.bytes), (0, 0));
            Ok(())
        })
        .unwrap();
    }

    proptest::proptest! {
        /// Whatever the order in which transactions begin and end, each reads what was there.
        #[test]
        fn every_open_transaction_reads_what_was_there(steps in proptest::collection::vec((0..3_u8, 0..4_u8, 0..8_usize), 1..120)) {
            let mut history = History::default();
            let mut there = BTreeMap::<u8, u8>::new();
            let mut open: Vec<(u64, BTreeMap<u8, u8>)> = Vec::new();
            with_row(&Memory::default(), b"r", |row| {
                for (step, (what, byte, which)) in steps.into_iter().enumerate() {
                    match what {
                        0 => open.push((history.begin(), there.clone())),
                        1 if which < open.len() => history.end(open.swap_remove(which).0),
                        _ if which == 0 => {
                            there.remove(&byte);
                            history.apply(row, &[Change::delete(key(byte))])?;
                        }
                        _ => {
                            there.insert(byte, step as u8);
                            let put = |value| Change::put(key(byte), vec![value]);
                            history.apply(row, &[put(200), put(step as u8)])?;
                        }
                    }
                    for (at, seen) in &open {
                        for byte in 0..4 {
                            let wanted = seen.get(&byte).map(|value| vec![*value]);
                            let now = there.get(&byte).map(|value| vec![*value]);
                            let read = history.at(&key(byte), *at).map(|old| old.map(<[u8]>::to_vec));
                            assert_eq!(read.unwrap_or(now), wanted);
                        }
                    }
                    let kept: usize = history.before.values().map(Vec::len).sum();
                    let places = open.iter().map(|(at, _)| at).collect::<std::collections::BTreeSet<_>>();
                    assert!(kept <= 4 * places.len(), "{kept} versions for {} batches", places.len());
                }
                for (at, _) in open.drain(..) {
                    history.end(at);
                }
                assert!(history.before.is_empty() && history.bytes == 0);
                Ok(())
            })
            .unwrap();
        }
    }
}
