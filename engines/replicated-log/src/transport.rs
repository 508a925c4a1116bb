//! How members find each other: the seam to whoever knows addresses and providers.

use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use beeline_fabric::ConnectInfo;

use crate::handle::{Greeted, Handle};
use crate::host::Entrance;

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

/// Takes a greeting, and tells the answer.
type Takes = Arc<dyn Fn(ConnectInfo, Vec<u8>, Greeted) + Send + Sync>;

/// Finds members and hosts that live in one process, by address: for tests, examples and measurements.
/// Their devices can be those of `process://`, which need no socket either.
#[derive(Default)]
pub struct InProcess(Mutex<HashMap<String, Takes>>);

impl Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcess").field("addresses", &self.takers().keys()).finish()
    }
}

impl InProcess {
    fn takers(&self) -> std::sync::MutexGuard<'_, HashMap<String, Takes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A member can be found from now on.
    pub fn add(&self, address: &str, handle: &Handle) {
        let handle = handle.clone();
        let takes = move |info, hello, reply: Greeted| handle.accept(info, hello, reply);
        self.takers().insert(address.to_owned(), Arc::new(takes));
    }

    /// A host can be found from now on, and all its members with it.
    pub fn add_host(&self, address: &str, entrance: &Entrance) {
        let entrance = entrance.clone();
        let takes = move |info, hello, reply: Greeted| entrance.accept(info, hello, reply);
        self.takers().insert(address.to_owned(), Arc::new(takes));
    }

    /// It no longer can.
    pub fn remove(&self, address: &str) {
        self.takers().remove(address);
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
        let takes = self.takers().get(address).cloned();
        let takes = takes.ok_or_else(|| unreachable("no member is there"))?;
        let (sender, receiver) = channel();
        let reply = move |answer| {
            // The asker may wait no more.
            let _ = sender.send(answer);
        };
        takes(info.clone(), hello.to_vec(), Box::new(reply));
        let answer = receiver.recv_timeout(PATIENCE);
        answer
            .map_err(|_| unreachable("no answer"))?
            .map_err(|reason| TransportError::Refused { address: address.to_owned(), reason })
    }
}
