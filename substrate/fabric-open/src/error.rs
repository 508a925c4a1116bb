//! Errors of opening and connecting.

use beeline_fabric::FabricError;
use beeline_fabric_verbs::Missing;

/// Why a device could not be opened or a service not be reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The URL names no provider, or is malformed.
    #[error("{url:?} is no fabric address: {reason}")]
    Url {
        /// As given.
        url: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The provider failed.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// RDMA cannot be used on this machine.
    #[error(transparent)]
    Rdma(#[from] Missing),
    /// The bootstrap address could not be bound.
    #[error("cannot listen for bootstrap exchanges on {address}: {source}")]
    Listen {
        /// Where.
        address: String,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The server could not be reached, or did not answer in time.
    #[error("the bootstrap exchange with {address} failed: {source}")]
    Unreachable {
        /// Where.
        address: String,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The server's answer is not one.
    #[error("{address} does not speak the bootstrap protocol: {reason}")]
    Protocol {
        /// Where.
        address: String,
        /// What is wrong.
        reason: String,
    },
    /// The server refused.
    #[error("{address} refused: {reason}")]
    Refused {
        /// Where.
        address: String,
        /// Its words.
        reason: String,
    },
}

impl OpenError {
    /// True when the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Fabric(error) => error.is_retryable(),
            Self::Rdma(missing) => missing.is_retryable(),
            Self::Unreachable { .. } | Self::Refused { .. } => true,
            _ => false,
        }
    }
}
