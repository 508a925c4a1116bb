//! Errors of control and data calls.

use crate::device::QueuePairState;

/// Why a control call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// A system call failed.
    #[error("{action} failed: {source}")]
    System {
        /// What was being done, in words.
        action: &'static str,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The memory cannot be registered with these rights on this provider.
    #[error("this memory cannot be registered with {access:?} on {provider}: {reason}")]
    CannotRegister {
        /// Provider name.
        provider: &'static str,
        /// Rights asked for.
        access: crate::Access,
        /// What is missing.
        reason: &'static str,
    },
    /// The peer's connection data is not for this provider, damaged, or of another version.
    #[error("the peer's connection data was refused: {reason}")]
    BadConnectInfo {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The peer did not complete the connection in time.
    #[error("the peer did not complete the connection within {timeout_ms} ms")]
    ConnectTimeout {
        /// The bound.
        timeout_ms: u64,
    },
    /// The queue pair cannot do this in its state.
    #[error("the queue pair is in state {state:?}; {needed}")]
    WrongState {
        /// Where it is.
        state: QueuePairState,
        /// What would have been needed.
        needed: &'static str,
    },
    /// A requested size is beyond the device.
    #[error("{what} of {requested} is beyond the device's limit of {limit}")]
    Limit {
        /// Which attribute.
        what: &'static str,
        /// What was asked for.
        requested: u64,
        /// What there is.
        limit: u64,
    },
    /// More completions than the queue holds; its queue pairs are in the error state. Create the
    /// queue deeper than all requests that can be outstanding on it.
    #[error("the completion queue of {depth_entries} entries overran")]
    CompletionQueueOverrun {
        /// Its size.
        depth_entries: u32,
    },
    /// The peer is gone.
    #[error("the peer is gone")]
    PeerGone,
    /// This provider cannot do that.
    #[error("{provider} does not support {what}")]
    Unsupported {
        /// Provider name.
        provider: &'static str,
        /// The missing capability.
        what: &'static str,
    },
}

impl FabricError {
    /// True when the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::ConnectTimeout { .. } | Self::PeerGone)
    }
}

/// Why a post was refused. Nothing of the list was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// No room; poll and retry.
    #[error("the queue is full: poll completions and retry")]
    QueueFull,
    /// The queue pair is not connected, or broken; outstanding work flushes through the queue.
    #[error("the queue pair is in state {0:?}")]
    NotReady(QueuePairState),
    /// A local range lies outside its region, or lacks [`crate::Access::LOCAL_WRITE`].
    #[error("a local range is outside its region or its region may not be written")]
    LocalProtection,
    /// Inline data, entries or message beyond the device's limits.
    #[error("{what} is beyond the device's limit of {limit}")]
    TooLarge {
        /// Which limit.
        what: &'static str,
        /// Its value.
        limit: u64,
    },
}

/// For `map_err`: the boundary's error of a system call that failed while this process did `action`.
pub fn system<E: Into<std::io::Error>>(action: &'static str) -> impl Fn(E) -> FabricError {
    move |error| FabricError::System { action, source: error.into() }
}

/// Checks a depth or a number that a caller asks for against the device's limit.
///
/// Errors: [`FabricError::Limit`] for more than that, and for 0.
pub fn within(what: &'static str, requested: u32, limit: u32) -> Result<(), FabricError> {
    if requested == 0 || requested > limit {
        let (requested, limit) = (u64::from(requested), u64::from(limit));
        return Err(FabricError::Limit { what, requested, limit });
    }
    Ok(())
}
