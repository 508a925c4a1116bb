//! A leader that was fenced off never writes.

use std::collections::BTreeMap;

use beeline_paxos::{AccessKey, NodeId, Term};

use super::Violation;

/// Which term each key was granted to.
#[derive(Debug, Default)]
pub(crate) struct Fences {
    terms: BTreeMap<u64, Term>,
}

impl Fences {
    /// A server told somebody of `term` a key.
    pub(crate) fn granted(&mut self, key: AccessKey, term: Term) {
        self.terms.insert(key.0, term);
    }

    /// Bytes arrived in `node`'s memory by `key`; `promised` is what its vote word says.
    pub(crate) fn check(
        &self,
        node: NodeId,
        key: AccessKey,
        promised: Term,
    ) -> Result<(), Violation> {
        let term = self.terms.get(&key.0).copied().unwrap_or_default();
        if term >= promised {
            return Ok(());
        }
        let what =
            format!("term {term} wrote into {node}, which had promised itself to {promised}");
        Err(Violation::new("fenced", what))
    }
}
