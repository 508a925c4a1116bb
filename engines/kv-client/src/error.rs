//! What a client call can end in.

use beeline_fabric::{FabricError, PostError, Status};
use beeline_kv::wire::Refusal;

use crate::connector::ConnectError;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The server could not be reached.
    #[error("cannot connect: {0}")]
    Connect(#[from] ConnectError),
    /// The server did not take the connection.
    #[error("shard {shard} refused the connection: {refusal:?}")]
    Refused {
        /// Which shard.
        shard: u16,
        /// Its reason.
        refusal: Refusal,
    },
    /// The provider failed.
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
    /// A request could not be posted.
    #[error("cannot post: {0}")]
    Post(#[from] PostError),
    /// The connection broke while the request was outstanding. A put or delete may or may not
    /// have taken effect; putting the same value again is safe if nobody else writes the key.
    #[error("the connection to shard {shard} was lost ({status:?})")]
    ConnectionLost {
        /// Which shard.
        shard: u16,
        /// What the fabric said.
        status: Status,
    },
    /// No answer came within the time-out; the connection is given up. As for
    /// [`ClientError::ConnectionLost`], a put may have taken effect.
    #[error("shard {shard} did not answer within {timeout_ms} ms")]
    TimedOut {
        /// Which shard.
        shard: u16,
        /// The bound.
        timeout_ms: u64,
    },
    /// The connection is down and the options forbid to make a new one.
    #[error("not connected to shard {shard}")]
    NotConnected {
        /// Which shard.
        shard: u16,
    },
    /// As many requests are outstanding as the window allows: poll, then submit again.
    #[error("the window of {window} requests is full")]
    WindowFull {
        /// Requests that may be outstanding on one link.
        window: u16,
    },
    /// A blocking call was made while submitted requests are outstanding: poll them first.
    #[error("{outstanding} submitted requests are outstanding")]
    PipelineInUse {
        /// How many.
        outstanding: usize,
    },
    /// The key is longer than this connection carries in a request; connect with a larger
    /// [`crate::ClientOptions::longest_key_bytes`].
    #[error("a key of {length} bytes is longer than the {limit} of this connection")]
    KeyTooLong {
        /// Its length.
        length: usize,
        /// The connection's limit.
        limit: usize,
    },
    /// Key and value do not fit a log segment, or the baseline's request slot.
    #[error("an entry of {length} bytes is longer than the limit of {limit}")]
    TooLarge {
        /// Bytes needed.
        length: u64,
        /// Bytes there are.
        limit: u64,
    },
    /// Key and value do not fit an entry of the cluster's log.
    #[error(
        "an entry of {length} bytes is longer than the {limit} that one of the cluster's log \
         holds; its log-slot-size bounds that"
    )]
    LongerThanLogEntry {
        /// Bytes needed.
        length: u64,
        /// Bytes there are.
        limit: u64,
    },
    /// The stored entry does not carry its checksum.
    #[error("the stored entry of this key is damaged")]
    Damaged,
    /// The server has no memory left.
    #[error("the server's pool is full")]
    PoolFull,
    /// The server cannot write, or its cluster has no leader. Nothing was done.
    #[error("the server cannot write now")]
    Unavailable,
    /// The cluster did not decide in time: a put or delete may take effect all the same.
    #[error("the cluster did not answer in time")]
    Undecided,
    /// The server refused the entry or request as malformed, twice.
    #[error("the server rejected the request")]
    Rejected,
    /// The entry's kind is one of the store's own (1 to 63: hashes and other rows).
    #[error("the kind of the entry is one that the store keeps for hashes and other rows")]
    ReservedKind,
    /// The database does not exist.
    #[error("there is no database {database}")]
    NoSuchDatabase {
        /// The number asked for.
        database: u8,
    },
    /// The server's message makes no sense; the connection is given up.
    #[error("shard {shard} broke the protocol: {what}")]
    Protocol {
        /// Which shard.
        shard: u16,
        /// What was wrong.
        what: &'static str,
    },
}

impl ClientError {
    /// True when the same call may succeed later. After a lost connection that includes puts:
    /// whether the first attempt took effect is not known.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Refused { refusal, .. } => refusal.is_retryable(),
            Self::Fabric(error) => error.is_retryable(),
            Self::Connect(_)
            | Self::ConnectionLost { .. }
            | Self::TimedOut { .. }
            | Self::WindowFull { .. }
            | Self::PipelineInUse { .. }
            | Self::PoolFull
            | Self::Unavailable
            | Self::Undecided => true,
            _ => false,
        }
    }

    /// True when a put or delete that ended so may have taken effect.
    #[must_use]
    pub fn is_outcome_unknown(&self) -> bool {
        matches!(
            self,
            Self::ConnectionLost { .. }
                | Self::TimedOut { .. }
                | Self::Protocol { .. }
                | Self::Undecided
        )
    }
}
