//! What the parts of one operation share: the commands of a cursor are one operation.

use std::sync::Arc;

use beeline_documents_query::memory::Memory;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Operation {
    /// What it keeps.
    pub memory: Arc<Memory>,
}

impl Default for Operation {
    fn default() -> Self {
        Self { memory: Memory::alone() }
    }
}
