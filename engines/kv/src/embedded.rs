//! A store for the threads of one process, without a node: opens the pool, locks what a call needs.
//!
//! ```
//! use std::ops::{Bound, ControlFlow};
//! use beeline_kv::{Applied, Change, Condition, Embedded, KvError, NamespaceOptions, PutOptions};
//! use beeline_kv::{Range, StoreOptions, Write};
//!
//! const PEOPLE: u32 = 256;
//! # let directory = tempfile::tempdir()?;
//! # let directory = directory.path();
//! let store = Embedded::open(directory, &Default::default(), StoreOptions::default())?;
//! store.with_all(|keys| {
//!     let options = NamespaceOptions { ordered: true, ..NamespaceOptions::default() };
//!     keys.create_namespace(PEOPLE, options)?;
//!     let put = |value| Change::Put { value, options: PutOptions::default() };
//!     let write = |key: &'static [u8], change| {
//!         Write { namespace: PEOPLE, key: key.into(), condition: Condition::Absent, change }
//!     };
//!     let batch = [write(b"ada", put(&[b"1815"])), write(b"grace", put(&[b"1906"]))];
//!     assert!(matches!(keys.apply(&batch)?, Applied::Done(_)));
//!     keys.commit()?; // persisted: only now may anybody be told
//!     let from = Range { from: Bound::Excluded(b"ada"), ..Range::ALL };
//!     keys.range(PEOPLE, &from, |key, _entry, value| {
//!         assert_eq!((key, value), (b"grace".as_slice(), b"1906".as_slice()));
//!         ControlFlow::Continue(())
//!     })
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use beeline_pmem::{Pool, PoolOptions};

use crate::{Keyspace, KvError, Opened, RecoveryReport, Shard, Store, StoreOptions};

/// Bytes of copying in one slice of [`Embedded::maintain`] and shard.
const SLICE_BYTES: u64 = 256 << 10;

/// See the module's documentation.
#[derive(Debug)]
pub struct Embedded {
    store: Arc<Store>,
    shards: Vec<Arc<Mutex<Shard>>>,
    report: RecoveryReport,
    turn: AtomicUsize,
}

impl From<Opened> for Embedded {
    fn from((store, shards, report): Opened) -> Self {
        Self { store, shards, report, turn: AtomicUsize::new(0) }
    }
}

impl Embedded {
    /// Opens the store in `directory`, or makes one there.
    ///
    /// Errors: as [`Store::open`]; the pool's.
    pub fn open(
        directory: &Path,
        pool: &PoolOptions,
        options: StoreOptions,
    ) -> Result<Self, KvError> {
        crate::refuse_unfinished(directory)?;
        Ok(Store::open(Pool::open_or_create(directory, pool)?, options)?.into())
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// What the opening found.
    #[must_use]
    pub fn report(&self) -> &RecoveryReport {
        &self.report
    }

    /// The shards, for functions that lock them one at a time.
    #[must_use]
    pub fn shards(&self) -> &[Arc<Mutex<Shard>>] {
        &self.shards
    }

    /// Locks every shard for `body`. Its writes go to one log; calls take turns among the logs.
    pub fn with_all<R>(&self, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
        let mut guards: Vec<_> = self.shards.iter().map(|shard| lock(shard)).collect();
        if let [only] = guards.as_mut_slice() {
            return body(&mut Keyspace::single(only));
        }
        let home = self.turn.fetch_add(1, Ordering::Relaxed) % guards.len();
        body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), home))
    }

    /// Locks one shard for `body`: that of a key or a row, from [`Store::shard_in`].
    ///
    /// Errors: [`KvError::WrongShard`] when there is no such shard.
    pub fn with_shard<R>(
        &self,
        index: usize,
        body: impl FnOnce(&mut Keyspace<'_>) -> R,
    ) -> Result<R, KvError> {
        let shard = self.shards.get(index).ok_or(KvError::WrongShard { needed: index })?;
        Ok(body(&mut Keyspace::single(&mut lock(shard))))
    }

    /// One slice of collection and expiry of each shard; true: there is more to do now. To be
    /// called now and then, by any thread.
    ///
    /// Errors: as [`Shard::maintain`].
    pub fn maintain(&self) -> Result<bool, KvError> {
        let mut more = false;
        for shard in &self.shards {
            more |= lock(shard).maintain(SLICE_BYTES)?.did_work;
        }
        Ok(more)
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}
