//! No append takes effect twice.

use std::collections::BTreeSet;

use beeline_paxos::NodeId;

use super::Violation;
use crate::machine::Machine;

/// Items are unique over all clients: one that stands in the lists twice was applied twice.
pub(crate) fn check_machine(node: NodeId, machine: &Machine) -> Result<(), Violation> {
    let mut seen = BTreeSet::new();
    for (key, list) in machine.lists() {
        if let Some(item) = list.iter().find(|item| !seen.insert(**item)) {
            let what = format!("{node} has item {item} twice, again in list {key}: {list:?}");
            return Err(Violation::new("exactly_once", what));
        }
    }
    Ok(())
}
