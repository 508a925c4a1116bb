//! What the parts of one operation share: the commands of a cursor are one operation.

use std::sync::Arc;

use beeline_documents_query::memory::Memory;

use crate::transaction::Shared;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Operation {
    /// What it keeps.
    pub memory: Arc<Memory>,
    /// The transaction it belongs to.
    pub transaction: Option<Shared>,
    /// What it reads is answered once a majority of the replica set has it.
    pub majority: bool,
    /// The term in which it was admitted at a primary of a replica set.
    pub term: Option<u64>,
    /// How often this member had begun to take back or to copy by then.
    pub turned: u64,
}

impl Default for Operation {
    fn default() -> Self {
        Self { memory: Memory::alone(), transaction: None, majority: false, term: None, turned: 0 }
    }
}
