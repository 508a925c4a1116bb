//! What the tests' replicas start from.

use beeline_paxos::{ClusterId, Configuration, HeapMemory, Layout, NodeId, Position, Start};

pub const CLUSTER: ClusterId = ClusterId(7);

pub fn layout() -> Layout {
    Layout::new(64, 256).unwrap()
}

/// A log without entries.
pub fn memory() -> HeapMemory {
    let layout = layout();
    let mut memory = HeapMemory::new(layout.region_bytes());
    layout.format(CLUSTER, &mut memory);
    memory
}

/// The first of `members`, new, with a machine that has nothing.
pub fn start(members: &[NodeId]) -> Start {
    Start {
        id: members[0],
        cluster: CLUSTER,
        layout: layout(),
        vote_word: 0,
        snapshot: Position::NONE,
        chosen: Position::NONE,
        reached: Position::NONE,
        configuration: Configuration::initial(members),
        seed: 3,
    }
}
