//! What can go wrong in the store, as fields a caller can act on.

use beeline_pmem::PmemError;

/// Why the store refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// The key is longer than an entry can hold.
    #[error("a key of {length} bytes is longer than the limit of {limit}")]
    KeyTooLong {
        /// Length of the key in bytes.
        length: usize,
        /// Longest key in bytes.
        limit: usize,
    },
    /// The value is longer than one segment can hold.
    #[error(
        "a value of {length} bytes is longer than the limit of {limit}; larger segments raise it"
    )]
    ValueTooLong {
        /// Length of the value in bytes.
        length: usize,
        /// Longest value in bytes.
        limit: usize,
    },
    /// There is no such database.
    #[error("database {database} does not exist; there are {limit}")]
    Database {
        /// The number asked for.
        database: u16,
        /// How many there are.
        limit: u16,
    },
    /// The store keeps no changes to follow.
    #[error("no changes are kept; give the change feed some memory (change-feed)")]
    FeedOff,
    /// A reader of the change feed has to begin anew.
    #[error(
        "changes behind position {position} are not kept, those behind {oldest} are; take position \
         {newest}, read everything, and follow from there"
    )]
    FeedLost {
        /// Where the reader wanted to go on.
        position: u64,
        /// The least position that is kept.
        oldest: u64,
        /// The position of now.
        newest: u64,
    },
    /// Nobody created a namespace with this number.
    #[error("namespace {number} does not exist")]
    Namespace {
        /// The number asked for.
        number: u32,
    },
    /// The number of a namespace to create is taken, with other options, or the store's own.
    #[error("namespace {number} cannot be created: {reason}")]
    NamespaceTaken {
        /// The number asked for.
        number: u32,
        /// What speaks against it.
        reason: &'static str,
    },
    /// The namespace does not know this kind of key or question.
    #[error("namespace {number} {reason}")]
    NamespaceKind {
        /// Its number.
        number: u32,
        /// What it is, or is not.
        reason: &'static str,
    },
    /// A stream was cut off behind the position asked for.
    #[error("the stream begins at position {first}: what was before, as at {position}, is cut off")]
    StreamCut {
        /// The position asked for.
        position: u64,
        /// The least one that is there.
        first: u64,
    },
    /// The pool has no room left for new data and collection found too little garbage.
    #[error("the pool of {capacity_bytes} bytes is full; delete keys or enlarge the pool")]
    PoolFull {
        /// Capacity of the pool in bytes.
        capacity_bytes: u64,
    },
    /// The memory limit is reached and the eviction policy freed nothing.
    #[error("{used_bytes} bytes in use reach the memory limit of {limit_bytes} bytes")]
    MemoryLimit {
        /// Bytes of live data.
        used_bytes: u64,
        /// The configured limit.
        limit_bytes: u64,
    },
    /// A namespace holds as much as it may, and its policy evicts nothing.
    #[error(
        "namespace {number} holds {used_bytes} bytes of at most {limit_bytes}: delete some of its \
         keys, or raise its limit"
    )]
    NamespaceFull {
        /// Its number.
        number: u32,
        /// Bytes of its live entries.
        used_bytes: u64,
        /// Its limit.
        limit_bytes: u64,
    },
    /// An atomic batch does not fit into one segment.
    #[error("the batch needs {length} bytes; one segment holds {limit}")]
    BatchTooLarge {
        /// Bytes of the batch with the refused entry.
        length: u64,
        /// Bytes one segment can hold.
        limit: u64,
    },
    /// The entry's bytes fail their checksum or seal.
    #[error("the entry at offset {offset} of segment {segment} is damaged")]
    Damaged {
        /// Segment identifier.
        segment: u32,
        /// Offset of the entry in the segment.
        offset: u32,
    },
    /// Entries that were acknowledged do not verify.
    #[error(
        "{entries} acknowledged entries in {segments} segments are damaged, so older values and \
         deleted keys could show: restore a backup, or see what is concerned with `beeline kv \
         check` and accept the loss with `beeline kv check --repair` or `beeline serve \
         --accept-damage`"
    )]
    DamagedData {
        /// Entries that do not verify.
        entries: u64,
        /// Segments they are in.
        segments: u64,
    },
    /// The pool lost track of segments.
    #[error(
        "the pool's table is damaged ({pages} pages, {descriptors} descriptors, {files} files with \
         data that belong to none), so keys are missing: restore a backup, or accept the loss with \
         `beeline kv check --repair` or `beeline serve --accept-damage`"
    )]
    DamagedPool {
        /// Pages of the table that were overwritten.
        pages: u32,
        /// Descriptors without a good copy.
        descriptors: u32,
        /// Files that hold data and belong to no descriptor.
        files: u32,
    },
    /// A format that this build does not read.
    #[error("{what} has format version {found}; this build reads {supported}")]
    Format {
        /// What was read.
        what: &'static str,
        /// Version found.
        found: u64,
        /// Version supported.
        supported: u64,
    },
    /// A snapshot file that is truncated, foreign or damaged.
    #[error("snapshot {path}: {reason}")]
    Snapshot {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A restore into this directory was cut short: the store in it is not whole.
    #[error(
        "a restore into {directory} did not finish, so the store there is not whole: run \
         `beeline kv restore` again, or remove the directory"
    )]
    Unfinished {
        /// The data directory.
        directory: String,
    },
    /// Another snapshot is still being written.
    #[error("a snapshot is already in progress")]
    SnapshotInProgress,
    /// Another snapshot is being installed, or its installation failed: the store holds a part of
    /// it.
    #[error("a snapshot is being installed, so the keys are not whole: try again when it is done")]
    Replacing,
    /// A request needs every shard locked and got fewer.
    #[error("this operation needs all {needed} shards and was given {given}")]
    NeedsAllShards {
        /// Shards of the store.
        needed: usize,
        /// Shards given.
        given: usize,
    },
    /// The key belongs to a shard that the caller did not lock.
    #[error("the key belongs to shard {needed}, which this request did not lock")]
    WrongShard {
        /// Index of the shard to lock.
        needed: usize,
    },
    /// An earlier failure to persist left the shard unable to promise anything; restart the node.
    #[error("shard {shard} stopped writing after it failed to persist")]
    Poisoned {
        /// Index of the shard.
        shard: usize,
    },
    /// A file operation failed.
    #[error("{path}: {source}{}", advice(source))]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The pool failed.
    #[error(transparent)]
    Pmem(#[from] PmemError),
}

/// What to change where the system's word for it does not say.
fn advice(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; free some room there",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "; make it writable",
        // Open files, per process and in all: EMFILE, ENFILE.
        _ if matches!(error.raw_os_error(), Some(23 | 24)) => "; raise the limit (ulimit -n)",
        _ => "",
    }
}

impl KvError {
    /// True when there is no room for more: in the pool, under the memory limit, or on the file
    /// system the pool lies on.
    #[must_use]
    pub fn is_full(&self) -> bool {
        match self {
            Self::PoolFull { .. } | Self::MemoryLimit { .. } | Self::NamespaceFull { .. } => true,
            Self::Pmem(error) => {
                matches!(error, PmemError::PoolFull { .. } | PmemError::NoSpace { .. })
            }
            _ => false,
        }
    }

    /// True when the same request may succeed later without any change to it.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::PoolFull { .. }
            | Self::MemoryLimit { .. }
            | Self::NamespaceFull { .. }
            | Self::SnapshotInProgress
            | Self::Replacing => true,
            Self::Pmem(error) => error.is_retryable(),
            _ => false,
        }
    }
}
