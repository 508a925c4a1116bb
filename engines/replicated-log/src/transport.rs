//! How members find each other: the seam to whoever knows addresses and providers.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use beeline_fabric::ConnectInfo;

use crate::handle::Handle;

/// How long a member of the same process is waited for.
const PATIENCE: Duration = Duration::from_secs(2);

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

/// Finds members that live in one process, by address: for tests, examples and measurements. Their
/// devices can be those of `process://`, which need no socket either.
#[derive(Debug, Default)]
pub struct InProcess(Mutex<HashMap<String, Handle>>);

impl InProcess {
    fn members(&self) -> std::sync::MutexGuard<'_, HashMap<String, Handle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A member can be found from now on.
    pub fn add(&self, address: &str, handle: &Handle) {
        self.members().insert(address.to_owned(), handle.clone());
    }

    /// It no longer can.
    pub fn remove(&self, address: &str) {
        self.members().remove(address);
    }
}

impl Transport for InProcess {
    fn exchange(
        &self,
        address: &str,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), TransportError> {
        let unreachable = |reason: &str| TransportError::Unreachable {
            address: address.to_owned(),
            reason: reason.to_owned(),
        };
        let handle = self.members().get(address).cloned();
        let handle = handle.ok_or_else(|| unreachable("nobody is there"))?;
        let (sender, receiver) = channel();
        handle.accept(info.clone(), hello.to_vec(), move |answer| {
            // Nobody may be waiting any more.
            let _ = sender.send(answer);
        });
        let answer = receiver.recv_timeout(PATIENCE);
        answer
            .map_err(|_| unreachable("no answer"))?
            .map_err(|reason| TransportError::Refused { address: address.to_owned(), reason })
    }
}
