//! Why a request got no answer from the log.

/// Why a request got no answer from the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// No member leads: nothing was done.
    #[error("no leader: nothing was done; try again")]
    NoLeader,
    /// The log took no more requests before the time of this one was over: nothing was done.
    #[error("the log took no more requests in time: nothing was done; try again")]
    NotTaken,
    /// No answer in time; a write may take effect all the same.
    #[error("the log did not answer in time: a write may take effect all the same")]
    TimedOut,
    /// It took effect, and what it answered is not known here.
    #[error("the write took effect; its reply was lost")]
    ReplyLost,
    /// Longer than an entry.
    #[error("{bytes} bytes are more than the {limit} that an entry of the log holds")]
    TooLarge {
        /// With everything around it.
        bytes: usize,
        /// Most.
        limit: usize,
    },
    /// The state is not whole: [`Group::is_loading`](crate::Group::is_loading).
    #[error("this member's state is not whole yet: it starts, catches up or installs a snapshot")]
    Loading,
    /// This member's state can no longer follow the log, or its log has ended.
    #[error("this member cannot apply the log any more")]
    Failed,
    /// The log's words.
    #[error("{0}")]
    Refused(String),
}

impl Failure {
    /// Whether the same request may succeed later. After [`Failure::TimedOut`] and
    /// [`Failure::ReplyLost`] a write may have taken effect, or has.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::NoLeader | Self::NotTaken | Self::TimedOut | Self::Loading)
    }
}
