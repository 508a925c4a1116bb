//! Keys that were watched while they did not exist.
//!
//! What a deletion leaves behind says of one key that it came and went; a flush leaves nothing of
//! single keys. So a flush looks at these first: those that exist, or existed since they were
//! watched, count as changed from then on; the others do not, as in Redis.
//!
//! Invariant: marks change while every shard is locked.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use beeline_kv::{Keyspace, KvError};

/// One key that a session watches and that was absent.
#[derive(Debug)]
pub struct AbsentWatch {
    database: u8,
    key: Vec<u8>,
    /// A deletion above this version means that the key was there since.
    newest: AtomicU64,
    /// It was there when its database was flushed.
    changed: AtomicBool,
}

impl AbsentWatch {
    /// Whether the key, absent now, was there since it was watched.
    ///
    /// Errors: the keyspace's.
    pub fn came_and_went(&self, store: &mut Keyspace<'_>) -> Result<bool, KvError> {
        let newest = self.newest.load(Ordering::Relaxed);
        Ok(self.changed.load(Ordering::Relaxed)
            || store.deletion(self.database, &self.key)? > newest)
    }
}

/// All of a node's.
#[derive(Debug, Default)]
pub struct AbsentWatches(Mutex<Vec<Weak<AbsentWatch>>>);

impl AbsentWatches {
    /// `key` is watched, and absent, from now on until the answer is dropped.
    pub fn watch(&self, store: &Keyspace<'_>, database: u8, key: &[u8]) -> Arc<AbsentWatch> {
        let watch = Arc::new(AbsentWatch {
            database,
            key: key.to_vec(),
            newest: AtomicU64::new(store.store().newest_version()),
            changed: AtomicBool::new(false),
        });
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() == known.capacity() {
            known.retain(|watch| watch.strong_count() > 0);
        }
        known.push(Arc::downgrade(&watch));
        watch
    }

    /// Removes every key of `database`, or of all, with a whole keyspace.
    ///
    /// Errors: the keyspace's.
    pub fn flush(&self, store: &mut Keyspace<'_>, database: Option<u8>) -> Result<(), KvError> {
        let known = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let concerned: Vec<Arc<AbsentWatch>> = known
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|watch| database.is_none_or(|database| database == watch.database))
            .collect();
        for watch in &concerned {
            let there = store.peek(watch.database, &watch.key)?.is_some();
            if there || watch.came_and_went(store)? {
                watch.changed.store(true, Ordering::Relaxed);
            }
        }
        store.flush(database)?;
        for watch in &concerned {
            watch.newest.store(store.store().newest_version(), Ordering::Relaxed);
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(known.into_iter().filter(|watch| watch.strong_count() > 0));
        Ok(())
    }
}
