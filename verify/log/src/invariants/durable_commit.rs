//! A commit is durable at f + 1 members at the moment the leader counts it.

use beeline_paxos::{Configuration, Kind, NodeId, Position};

use super::Violation;

/// `holds` says whether a member's durable memory (or snapshot) has the entry.
pub(crate) fn check_commit(
    position: Position,
    kind: Kind,
    configuration: &Configuration,
    holds: impl Fn(NodeId) -> bool,
) -> Result<(), Violation> {
    if configuration.has_majority(&holds) {
        return Ok(());
    }
    let holders: Vec<_> = configuration.members().iter().copied().filter(|id| holds(*id)).collect();
    let what = format!(
        "{kind:?} at {position} was committed, and durable at {holders:?} of {:?}",
        configuration.members()
    );
    Err(Violation::new("durable_commit", what))
}
