//! The node's store as a [`Store`]: one ordered namespace by row, in the node's own pool.
//!
//! Invariant: a command's changes are committed before its lock is let go, so a reply never speaks
//! of what a crash could take back.

use std::ops::ControlFlow;

use beeline_documents_query::error::{Code, QueryError, Result};
use beeline_kv::{
    Applied, Change as Written, Condition, Key, Keyspace, KvError, NamespaceOptions, PutOptions,
    Range, Write,
};
use beeline_node::NodeHandle;

use crate::store::{Backing, Change, Store, Stretch, Visitor};

/// The namespace all documents of a node lie in.
pub const NAMESPACE: u32 = 4096;

/// What [`NAMESPACE`] is.
const OPTIONS: NamespaceOptions =
    NamespaceOptions { by_row: true, ordered: true, time_to_live_ms: 0 };

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
        KvError::PoolFull { .. } | KvError::MemoryLimit { .. } => Code::OutOfDiskSpace,
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
        let values: Vec<[&[u8]; 1]> =
            changes.iter().map(|one| [one.value.as_deref().unwrap_or_default()]).collect();
        let writes: Vec<Write<'_>> = changes
            .iter()
            .zip(&values)
            .map(|(one, value)| Write {
                namespace: NAMESPACE,
                key: Key { row: self.row, name: &one.key },
                condition: if one.absent { Condition::Absent } else { Condition::None },
                change: match one.value {
                    Some(_) => Written::Put { value, options: PutOptions::default() },
                    None => Written::Delete,
                },
            })
            .collect();
        match self.keyspace.apply(&writes).map_err(failed)? {
            Applied::Done(_) => Ok(None),
            Applied::Refused { write, .. } => Ok(Some(write)),
        }
    }
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
}
