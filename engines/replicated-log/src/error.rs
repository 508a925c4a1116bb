//! What can go wrong between the protocol and its machine.

use beeline_fabric::{FabricError, PostError};
use beeline_paxos::{LayoutError, NodeId};

/// Why a member could not do something. The member can be polled again unless it says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// The log region or the vote word cannot be used.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The fabric refused.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A snapshot's file cannot be read.
    #[error("the snapshot cannot be read: {0}")]
    Snapshot(#[source] std::io::Error),
    /// A post was refused for a reason other than a full queue or a broken connection.
    #[error(transparent)]
    Post(#[from] PostError),
    /// Own memory could not be persisted. The server must stop: what it would promise from now on
    /// it could forget.
    #[error("own memory could not be persisted: {0}")]
    Persist(#[source] std::io::Error),
    /// The log region's memory is shorter than its layout.
    #[error("the log needs {needed} bytes of memory and has {found}")]
    TooShort {
        /// Of the layout.
        needed: u64,
        /// Of the memory.
        found: u64,
    },
    /// The endpoint belongs to another server than the one named, or to another cluster.
    #[error("the endpoint is not that of {expected} in this cluster")]
    WrongPeer {
        /// Whom the caller wanted.
        expected: NodeId,
    },
    /// No control connection was prepared for this peer.
    #[error("listen for {peer} first")]
    NotListening {
        /// Whom the caller wanted.
        peer: NodeId,
    },
}

impl LogError {
    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Fabric(error) => error.is_retryable(),
            Self::Snapshot(_) => true,
            _ => false,
        }
    }
}
