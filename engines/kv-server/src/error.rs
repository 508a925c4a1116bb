//! What can stop a shard's server.

use beeline_fabric::FabricError;

/// Why a server cannot start or go on. A client's failure is never among these.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The provider failed for the whole shard.
    #[error("fabric: {0}")]
    Fabric(#[from] FabricError),
    /// The provider cannot carry the protocol.
    #[error("the fabric device offers {offered} bytes of inline data; {needed} are needed")]
    DeviceTooSmall {
        /// What there is.
        offered: u32,
        /// What the protocol takes.
        needed: u32,
    },
}

impl ServerError {
    /// True when the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Fabric(error) => error.is_retryable(),
            Self::DeviceTooSmall { .. } => false,
        }
    }
}
