//! What a call on the store can end with.

use std::io;

use crate::id::ObjectId;
use crate::wire::Status;

/// What to do where no connection was made.
fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => {
            "this user may not use that socket: start `beeline serve` with another \
             --objects-socket-mode"
        }
        _ => "is `beeline serve` running there?",
    }
}

/// Why a call on the object store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectsError {
    /// The object is not here.
    #[error("there is no object {id} in this store")]
    NotFound {
        /// Which.
        id: ObjectId,
    },
    /// An object of this identifier is here, or is being created.
    #[error("there is an object {id} already; objects are immutable: delete it first")]
    Exists {
        /// Which.
        id: ObjectId,
    },
    /// Not sealed, or not here, within the time-out.
    #[error("object {id} was not sealed within the time-out")]
    TimedOut {
        /// Which.
        id: ObjectId,
    },
    /// No memory came free within the time-out.
    #[error(
        "the store has no room for object {id} of {bytes} bytes: release references, delete \
         objects, or give the store more with --objects-memory and --objects-disk"
    )]
    Full {
        /// Which.
        id: ObjectId,
        /// Its data and metadata.
        bytes: u64,
    },
    /// The object can never fit.
    #[error("object {id} of {bytes} bytes is larger than the store; raise --objects-memory")]
    TooLarge {
        /// Which.
        id: ObjectId,
        /// Its data and metadata.
        bytes: u64,
    },
    /// Another client creates the object.
    #[error("object {id} is another client's to seal")]
    NotYours {
        /// Which.
        id: ObjectId,
    },
    /// The object is still being written.
    #[error("object {id} is not sealed yet")]
    Unsealed {
        /// Which.
        id: ObjectId,
    },
    /// The contents are not those that were sealed.
    #[error("object {id} is damaged: its bytes differ from its checksum or its file is lost")]
    Damaged {
        /// Which.
        id: ObjectId,
    },
    /// No other node gave the object.
    #[error("no node that can be reached has object {id}")]
    Unreachable {
        /// Which.
        id: ObjectId,
    },
    /// A limit of the store.
    #[error("a limit of the store is reached: too many references, subscriptions or requests")]
    Limit,
    /// A write outside the object.
    #[error("{length} bytes at {offset} are outside an object of {size} bytes")]
    Outside {
        /// Bytes from the object's start.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Bytes of the object.
        size: u64,
    },
    /// The store is gone, and with it what it held.
    #[error("the object store is gone: start `beeline serve` and connect again")]
    StoreGone,
    /// The call was made in a child of the process that connected.
    #[error("this connection belongs to the parent process: connect again after fork")]
    Forked,
    /// No store answers at the address.
    #[error("no object store at {address}: {source}; {}", remedy(.source))]
    Connect {
        /// The socket's path.
        address: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The two ends speak different versions.
    #[error("the store speaks version {theirs} of the protocol, this library {ours}")]
    Version {
        /// The store's.
        theirs: u64,
        /// This library's.
        ours: u32,
    },
    /// The store said something that makes no sense.
    #[error("the store broke the protocol: {what}")]
    Protocol {
        /// What.
        what: &'static str,
    },
    /// The kernel refused.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

impl ObjectsError {
    /// True when the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::NotFound { .. }
                | Self::TimedOut { .. }
                | Self::Full { .. }
                | Self::Unsealed { .. }
                | Self::Unreachable { .. }
                | Self::Limit
        )
    }

    /// From a reply that is not [`Status::Done`].
    pub(crate) fn of(status: Status, id: ObjectId, bytes: u64) -> Self {
        match status {
            Status::Done => Self::Protocol { what: "success where an error was due" },
            Status::Absent => Self::NotFound { id },
            Status::Exists => Self::Exists { id },
            Status::TooLarge => Self::TooLarge { id, bytes },
            Status::Full => Self::Full { id, bytes },
            Status::TimedOut => Self::TimedOut { id },
            Status::NotYours => Self::NotYours { id },
            Status::Unsealed => Self::Unsealed { id },
            Status::Damaged => Self::Damaged { id },
            Status::Malformed => Self::Protocol { what: "the store calls a request malformed" },
            Status::Unreachable => Self::Unreachable { id },
            Status::Limit => Self::Limit,
            Status::Stopping => Self::StoreGone,
        }
    }
}
