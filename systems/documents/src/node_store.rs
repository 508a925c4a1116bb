//! The node's store as a [`Store`]: one ordered namespace by row, in the node's own pool.
//!
//! Invariant: a command's changes are committed before its lock is let go, so a reply never speaks
//! of what a crash could take back.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use beeline_documents_query::error::{Code, QueryError, Result};
use beeline_kv::{
    Applied, Change as Written, Condition, Embedded, Key, Keyspace, KvError, NamespaceOptions,
    PutOptions, Range, Write,
};
use beeline_node::NodeHandle;
use beeline_pmem::{Durability, Pool};

use crate::service::DocumentsError;
use crate::store::{Backing, Change, Store, Stretch, Visitor};

/// The namespace all documents of a node lie in.
pub const NAMESPACE: u32 = 4096;

/// What [`NAMESPACE`] is.
const OPTIONS: NamespaceOptions = NamespaceOptions {
    by_row: true,
    ordered: true,
    time_to_live_ms: 0,
    stream: false,
    keep_bytes: 0,
    row_records: false,
    row_time_to_live_ms: 0,
};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct NodeStore {
    node: NodeHandle,
}

impl NodeStore {
    /// The store of a node; makes the namespace where it is not there yet.
    ///
    /// Errors: the store's.
    pub fn open(node: NodeHandle) -> Result<Self, KvError> {
        if node.store().namespace(NAMESPACE).is_none() {
            let all: Vec<usize> = (0..node.store().shards()).collect();
            node.with_shards(&all, |keyspace| keyspace.create_namespace(NAMESPACE, OPTIONS))?;
        }
        Ok(Self { node })
    }
}

/// A store's error as a command reports it.
#[must_use]
pub fn as_query_error(error: &KvError) -> QueryError {
    let code = match error {
        error if error.is_full() => Code::OutOfDiskSpace,
        KvError::ValueTooLong { .. } => Code::BsonObjectTooLarge,
        KvError::KeyTooLong { .. } => Code::IndexInformationTooLarge,
        KvError::BatchTooLarge { .. } => Code::TransactionTooLarge,
        _ => Code::InternalError,
    };
    QueryError::new(code, error.to_string())
}

fn failed(error: KvError) -> QueryError {
    as_query_error(&error)
}

struct Row<'r, 'k> {
    keyspace: &'r mut Keyspace<'k>,
    row: &'r [u8],
    /// Something was changed, or tried to.
    changed: bool,
}

impl Backing for Row<'_, '_> {
    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool> {
        match self.keyspace.get_in(NAMESPACE, (self.row, key)).map_err(failed)? {
            Some(entry) => self.keyspace.read_value(&entry, out).map(|()| true).map_err(failed),
            None => Ok(false),
        }
    }

    fn range(&mut self, stretch: &Stretch, backward: bool, visit: &mut Visitor<'_>) -> Result<()> {
        if stretch.is_empty() {
            return Ok(());
        }
        let range = Range {
            row: self.row,
            from: stretch.from.as_ref().map(Vec::as_slice),
            to: stretch.to.as_ref().map(Vec::as_slice),
            backward,
        };
        let mut visit = |key: &[u8], _: &_, value: &[u8]| -> ControlFlow<()> { visit(key, value) };
        self.keyspace.range(NAMESPACE, &range, &mut visit).map_err(failed)
    }

    fn apply(&mut self, changes: &[Change]) -> Result<Option<usize>> {
        self.changed = true;
        let all: Vec<(&[u8], &Change)> = changes.iter().map(|one| (self.row, one)).collect();
        apply(self.keyspace, &all)
    }
}

/// Makes changes of rows, as one batch.
fn apply(keyspace: &mut Keyspace<'_>, changes: &[(&[u8], &Change)]) -> Result<Option<usize>> {
    let values: Vec<[&[u8]; 1]> =
        changes.iter().map(|(_, one)| [one.value.as_deref().unwrap_or_default()]).collect();
    let writes: Vec<Write<'_>> = changes
        .iter()
        .zip(&values)
        .map(|((row, one), value)| Write {
            namespace: NAMESPACE,
            key: Key { row, name: &one.key },
            condition: if one.absent { Condition::Absent } else { Condition::None },
            change: match one.value {
                Some(_) => Written::Put { value, options: PutOptions::default() },
                None => Written::Delete,
            },
        })
        .collect();
    match keyspace.apply(&writes).map_err(failed)? {
        Applied::Done(_) => Ok(None),
        Applied::Refused { write, .. } => Ok(Some(write)),
    }
}

/// Changes of rows with their rows.
fn of_rows(rows: &[(Vec<u8>, Vec<Change>)]) -> Vec<(&[u8], &Change)> {
    rows.iter().flat_map(|(row, all)| all.iter().map(|one| (row.as_slice(), one))).collect()
}

fn apply_all(
    keyspace: &mut Keyspace<'_>,
    rows: &[(Vec<u8>, Vec<Change>)],
    then: &mut dyn FnMut(),
) -> Result<()> {
    let done = apply(keyspace, &of_rows(rows));
    keyspace.commit().map_err(failed)?;
    done?;
    then();
    Ok(())
}

impl Store for NodeStore {
    fn with(&self, row: &[u8], work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>) -> Result<()> {
        let shard = self.node.store().shard_in(NAMESPACE, (row, &[][..])).map_err(failed)?;
        self.node.with_shards_changed(&[shard], |keyspace| {
            let mut locked = Row { keyspace, row, changed: false };
            let done = work(&mut locked);
            let Row { keyspace, changed, .. } = locked;
            // What an error left behind was complete batches: they count.
            (keyspace.commit().map_err(failed).and(done), changed)
        })
    }

    fn now_ms(&self) -> u64 {
        self.node.store().clock().unix_ms()
    }

    fn space(&self) -> (u64, u64) {
        let pool = self.node.store().pool();
        (pool.used_bytes(), pool.capacity_bytes())
    }

    fn outlives_process(&self) -> bool {
        outlives_process(self.node.store().pool())
    }

    fn apply_all(&self, rows: &[(Vec<u8>, Vec<Change>)], then: &mut dyn FnMut()) -> Result<()> {
        let all: Vec<usize> = (0..self.node.store().shards()).collect();
        self.node.with_shards(&all, |keyspace| apply_all(keyspace, rows, then))
    }
}

/// Memory does not, whatever level it stands in for.
fn outlives_process(pool: &Pool) -> bool {
    let report = pool.report();
    report.durability > Durability::None && !report.emulated
}

/// Between two looks for something to collect.
const UPKEEP_PAUSE: Duration = Duration::from_millis(200);

/// A store with a pool of its own: a member of a cluster, whose node's pool is replaced as a whole where the
/// cluster's log installs a snapshot, keeps its documents beside it.
#[derive(Debug)]
pub struct PoolStore {
    pool: Arc<Embedded>,
    stop: Arc<AtomicBool>,
    upkeep: Option<JoinHandle<()>>,
}

impl PoolStore {
    /// Over an open store; makes the namespace where it is not there yet, and a thread that collects.
    ///
    /// Errors: the store's; no thread could be made.
    pub fn open(pool: Embedded) -> Result<Self, DocumentsError> {
        if pool.store().namespace(NAMESPACE).is_none() {
            pool.with_all(|keyspace| keyspace.create_namespace(NAMESPACE, OPTIONS))?;
        }
        let (pool, stop) = (Arc::new(pool), Arc::<AtomicBool>::default());
        let (kept, stopped) = (Arc::clone(&pool), Arc::clone(&stop));
        let upkeep = std::thread::Builder::new()
            .name("documents-upkeep".to_owned())
            .spawn(move || collect(&kept, &stopped))
            .map_err(DocumentsError::Thread)?;
        Ok(Self { pool, stop, upkeep: Some(upkeep) })
    }
}

fn collect(pool: &Embedded, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let done = pool.maintain().and_then(|more| {
            if more {
                pool.with_all(|keyspace| keyspace.commit())?;
            }
            Ok(more)
        });
        match done {
            Ok(true) => {}
            Ok(false) => std::thread::park_timeout(UPKEEP_PAUSE),
            Err(error) => {
                tracing::error!(%error, "the pool of documents cannot be looked after");
                std::thread::park_timeout(UPKEEP_PAUSE * 25);
            }
        }
    }
}

impl Drop for PoolStore {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(upkeep) = self.upkeep.take() {
            upkeep.thread().unpark();
            let _ = upkeep.join();
        }
    }
}

impl Store for PoolStore {
    fn with(&self, row: &[u8], work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>) -> Result<()> {
        let store = self.pool.store();
        let shard = store.shard_in(NAMESPACE, (row, &[][..])).map_err(failed)?;
        self.pool
            .with_shard(shard, |keyspace| {
                let done = work(&mut Row { keyspace, row, changed: false });
                keyspace.commit().map_err(failed).and(done)
            })
            .map_err(failed)?
    }

    fn now_ms(&self) -> u64 {
        self.pool.store().clock().unix_ms()
    }

    fn space(&self) -> (u64, u64) {
        let pool = self.pool.store().pool();
        (pool.used_bytes(), pool.capacity_bytes())
    }

    fn outlives_process(&self) -> bool {
        outlives_process(self.pool.store().pool())
    }

    fn apply_all(&self, rows: &[(Vec<u8>, Vec<Change>)], then: &mut dyn FnMut()) -> Result<()> {
        self.pool.with_all(|keyspace| apply_all(keyspace, rows, then))
    }
}
