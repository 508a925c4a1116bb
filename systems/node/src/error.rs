//! Why a node does not start.

use std::net::SocketAddr;
use std::path::PathBuf;

use beeline_kv::KvError;
use beeline_pmem::PmemError;

/// Why a node does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The pool could not be opened or made.
    #[error("cannot open the pool in {}: {source}", directory.display())]
    Pool {
        /// Where it lies.
        directory: PathBuf,
        /// Why.
        #[source]
        source: PmemError,
    },
    /// The store in the pool could not be recovered.
    #[error("cannot recover the store in {}: {source}", directory.display())]
    Store {
        /// Where it lies.
        directory: PathBuf,
        /// Why.
        #[source]
        source: KvError,
    },
    /// A door's address cannot be used.
    #[error("cannot listen on {address} for clients of {wire}: {source}")]
    Listen {
        /// The service whose door it is.
        wire: &'static str,
        /// The address.
        address: SocketAddr,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A thread or descriptor could not be had.
    #[error("{action} failed: {source}")]
    System {
        /// What was being done.
        action: &'static str,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The node is by itself: there is no log.
    #[error("the node is no member of a cluster")]
    NotReplicated,
    /// The node's replicated services do not fit together, or cannot read what they know.
    #[error("the replicated services cannot begin: {reason}")]
    Services {
        /// Why.
        reason: String,
    },
    /// A setting out of range.
    #[error("{setting} must be {needed}, not {found}")]
    Setting {
        /// Which one.
        setting: &'static str,
        /// What it may be.
        needed: &'static str,
        /// What it is.
        found: u64,
    },
}

impl NodeError {
    /// Whether starting again later, unchanged, can help.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Pool { source, .. } => source.is_retryable(),
            Self::Store { source, .. } => source.is_retryable(),
            Self::Listen { source, .. } => source.kind() == std::io::ErrorKind::AddrInUse,
            Self::System { .. } => true,
            Self::NotReplicated | Self::Services { .. } | Self::Setting { .. } => false,
        }
    }
}
