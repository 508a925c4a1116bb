//! A shard's courier: a thread that carries the lane's units and barriers, and asleep where this
//! member leads and the log answers at once ([`beeline_replicated_service::courier`]).

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use beeline_replicated_service::{Courier, LaneName, Tag};

use crate::parcel::{Delivery, LogNews};
use crate::shared::Shared;

/// What a courier is sent for.
#[derive(Debug)]
pub(crate) enum Errand {
    /// To have a unit applied.
    Unit {
        /// Its number.
        number: u64,
        /// The unit.
        unit: Vec<u8>,
        /// It was proposed before, and may take effect.
        proposed: bool,
    },
    /// To have a barrier pass.
    Barrier {
        /// The lane's name for it.
        ticket: u64,
    },
    /// Nothing more.
    Stop,
}

/// The lane of a shard.
pub(crate) fn lane_name(node: u16, shard: usize) -> LaneName {
    let lane = u16::try_from(shard).unwrap_or(u16::MAX);
    LaneName { service: Tag::KEYS, node, lane }
}

/// Runs a courier until it is told to stop.
pub(crate) fn run(shared: &Arc<Shared>, lane: usize, errands: &Receiver<Errand>) {
    let Some(replication) = &shared.replication else { return };
    let name = lane_name(replication.options.node, lane);
    let mut courier = Courier::new(Arc::clone(&replication.group), name);
    while let Ok(errand) = errands.recv() {
        let news = match errand {
            Errand::Stop => return,
            Errand::Unit { number, unit, proposed } => {
                let outcome = courier.deliver(number, &unit, proposed);
                LogNews::Unit { number, outcome }
            }
            Errand::Barrier { ticket } => LogNews::Barrier { ticket, outcome: courier.pass() },
        };
        shared.doors[lane].deliver(Delivery::Log(news));
    }
}
