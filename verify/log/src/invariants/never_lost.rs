//! What a client was answered is there at the end, everywhere.

use beeline_paxos::NodeId;

use super::Violation;
use crate::machine::{Item, Key, Machine};

/// `acknowledged` appends against a member's lists, when the cluster is at rest.
pub(crate) fn check_end(
    node: NodeId,
    machine: &Machine,
    acknowledged: &[(Key, Item)],
) -> Result<(), Violation> {
    for (key, item) in acknowledged {
        let list = machine.lists().get(key);
        if !list.is_some_and(|list| list.contains(item)) {
            let what = format!("{node} lacks item {item} of list {key}: {list:?}");
            return Err(Violation::new("never_lost", what));
        }
    }
    Ok(())
}
