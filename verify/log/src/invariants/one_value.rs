//! One value per position.

use std::collections::BTreeMap;

use beeline_paxos::{Kind, NodeId, Position};

use super::Violation;

/// The first value applied at each position.
#[derive(Debug, Default)]
pub(crate) struct Values {
    values: BTreeMap<Position, (NodeId, Kind, Vec<u8>)>,
}

impl Values {
    pub(crate) fn check(
        &mut self,
        node: NodeId,
        position: Position,
        kind: Kind,
        payload: &[u8],
    ) -> Result<(), Violation> {
        let (first, known_kind, known) =
            self.values.entry(position).or_insert_with(|| (node, kind, payload.to_vec()));
        if (*known_kind, &known[..]) == (kind, payload) {
            return Ok(());
        }
        let what = format!(
            "{node} applied {kind:?} of {} bytes at {position}, {first} {known_kind:?} of {}",
            payload.len(),
            known.len()
        );
        Err(Violation::new("one_value", what))
    }

    /// Positions applied by anybody.
    pub(crate) fn count(&self) -> usize {
        self.values.len()
    }
}
