//! What can go wrong between the protocol and its machine.

use std::io;

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
    Snapshot(#[source] io::Error),
    /// A post was refused for a reason other than a full queue or a broken connection.
    #[error(transparent)]
    Post(#[from] PostError),
    /// Own memory could not be persisted. The server must stop: what it would promise from now on
    /// it could forget.
    #[error("own memory could not be persisted: {0}")]
    Persist(#[source] io::Error),
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

    /// What to change, where that is known; else nothing.
    pub(crate) fn advice(&self) -> &'static str {
        match self {
            Self::Fabric(error) => advice(error),
            Self::Snapshot(error) | Self::Persist(error) => advice_of(error),
            _ => "",
        }
    }
}

/// What to change for the fabric to do what it refused, where that is known; else nothing.
pub(crate) fn advice(error: &FabricError) -> &'static str {
    match error {
        FabricError::System { source, .. } => advice_of(source),
        _ => "",
    }
}

/// The kernel's codes for no more descriptors in the system, and in the process.
const NO_DESCRIPTORS: [i32; 2] = [23, 24];

fn advice_of(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(code) if NO_DESCRIPTORS.contains(&code) => {
            "; raise the limit on open files (ulimit -n, LimitNOFILE=), or give this process fewer clusters"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_descriptors_is_named_and_no_other_failure_is() {
        let failed = |code| {
            let source = io::Error::from_raw_os_error(code);
            LogError::from(FabricError::System { action: "connecting", source }).advice()
        };
        assert!(failed(24).contains("ulimit -n") && failed(23).contains("ulimit -n"));
        assert_eq!(failed(12), "");
    }
}
