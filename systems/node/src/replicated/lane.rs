//! Whose requests a shard's lane to the log carries, and what they are told when it fails.

use beeline_kv_server::Ticket;
pub(crate) use beeline_replicated_service::Failure;

use crate::parcel::Origin;

/// A shard's way to the log.
pub(crate) type Lane = beeline_replicated_service::Lane<Asker, Reader>;

/// What a client is told: a code, a blank, a sentence.
pub(crate) fn line_of(failure: &Failure) -> String {
    match failure {
        Failure::NoLeader => "CLUSTERDOWN no leader: nothing was done; try again".to_owned(),
        Failure::TimedOut => {
            "TRYAGAIN the log did not answer in time: a write may take effect all \
                              the same"
                .to_owned()
        }
        Failure::ReplyLost => "TRYAGAIN the write took effect; its reply was lost".to_owned(),
        Failure::TooLarge { bytes, limit } => format!(
            "ERR this command takes {bytes} bytes and the log carries {limit} for one command: half of \
             segment-size, or log-slot-size where that is larger, bounds it"
        ),
        Failure::Loading => {
            "LOADING this member starts, catches up or installs a snapshot".to_owned()
        }
        Failure::Failed => {
            "MISCONF this member cannot apply the log any more; see its log".to_owned()
        }
        failure => format!("TRYAGAIN {failure}"),
    }
}

/// A request of a one-sided client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OneSided {
    /// The server among the shard's ([`crate::fabric_servers`]).
    pub server: u64,
    /// The server's name for it.
    pub ticket: Ticket,
}

/// Whose request went into a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// A Redis connection's.
    Redis(Origin),
    /// A one-sided client's.
    OneSided(OneSided),
}

/// Who waits for a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// A Redis connection: slot and generation.
    Redis(u32, u32),
    /// A one-sided client.
    OneSided(OneSided),
}
