//! How members find each other: the seam to whoever knows addresses and providers.

use std::fmt::Debug;

use beeline_fabric::ConnectInfo;

/// Why a peer could not be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// It did not answer, or not in time.
    #[error("{address} cannot be reached: {reason}")]
    Unreachable {
        /// Whom we asked.
        address: String,
        /// What happened.
        reason: String,
    },
    /// It said no.
    #[error("{address} refused: {reason}")]
    Refused {
        /// Whom we asked.
        address: String,
        /// In its words.
        reason: String,
    },
}

impl TransportError {
    /// A refusal needs a person; who cannot be reached may be back soon.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}

/// Carries connection data to a peer's log. Applications implement it over `fabric-open`; the
/// peer's end gives what arrives to [`crate::Handle::accept`].
pub trait Transport: Send + Sync + Debug {
    /// Carries the connection data of a queue pair, and `hello`, to the log at `address`; returns
    /// its connection data and its hello. Called on threads of the server's own; may block, for
    /// few seconds at most.
    ///
    /// Errors: [`TransportError`].
    fn exchange(
        &self,
        address: &str,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), TransportError>;
}
