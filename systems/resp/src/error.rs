//! What a command answers when it cannot do what was asked, in Redis' words.

use beeline_kv::KvError;

/// An error reply. Its `Display` is the line Redis sends, without the leading `-`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The value is of another type.
    #[error("WRONGTYPE Operation against a key holding the wrong kind of value")]
    WrongType,
    /// A number was expected.
    #[error("ERR value is not an integer or out of range")]
    NotAnInteger,
    /// A floating-point number was expected.
    #[error("ERR value is not a valid float")]
    NotAFloat,
    /// An increment leaves the 64-bit range.
    #[error("ERR increment or decrement would overflow")]
    Overflow,
    /// DECRBY of the smallest integer.
    #[error("ERR decrement would overflow")]
    DecrementOverflow,
    /// INCRBYFLOAT left the finite numbers.
    #[error("ERR increment would produce NaN or Infinity")]
    NotFinite,
    /// Options that do not parse or exclude each other.
    #[error("ERR syntax error")]
    Syntax,
    /// A key that must exist does not.
    #[error("ERR no such key")]
    NoSuchKey,
    /// SETRANGE with a negative offset.
    #[error("ERR offset is out of range")]
    OffsetOutOfRange,
    /// An index, such as a database, out of its range.
    #[error("ERR index is out of range")]
    IndexOutOfRange,
    /// SELECT or a DB option beyond the databases there are.
    #[error("ERR DB index is out of range")]
    DatabaseOutOfRange,
    /// MOVE onto the same database, COPY onto the same key.
    #[error("ERR source and destination objects are the same")]
    SameObject,
    /// A time of expiry that is not positive or cannot be represented.
    #[error("ERR invalid expire time in '{command}' command")]
    InvalidExpire {
        /// Full name of the command.
        command: &'static str,
    },
    /// A string would pass the largest size.
    #[error("ERR string exceeds maximum allowed size (proto-max-bulk-len)")]
    StringTooLong,
    /// An argument out of bounds, for DECRBY and others.
    #[error("ERR value is out of range")]
    OutOfRange,
    /// A SCAN cursor that is no number.
    #[error("ERR invalid cursor")]
    InvalidCursor,
    /// A wrong number of arguments found by the command itself.
    #[error("ERR wrong number of arguments for '{command}' command")]
    Arity {
        /// Full name of the command.
        command: &'static str,
    },
    /// A fixed line.
    #[error("{0}")]
    Line(&'static str),
    /// A line with details, which may hold any bytes.
    #[error("{}", String::from_utf8_lossy(.0))]
    Bytes(Vec<u8>),
    /// The store has no room.
    #[error("OOM command not allowed when used memory > 'maxmemory'.")]
    OutOfMemory,
    /// The store failed.
    #[error("ERR {0}")]
    Store(#[source] KvError),
}

impl CommandError {
    /// A line put together from text.
    #[must_use]
    pub fn text(line: String) -> Self {
        Self::Bytes(line.into_bytes())
    }

    /// Whether the same command may succeed later without a change to it or to its keys.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::OutOfMemory => true,
            Self::Store(error) => error.is_retryable(),
            _ => false,
        }
    }

    /// Whether the reason lies in the store, not in the request: another replica may be able.
    pub(crate) fn is_of_store(&self) -> bool {
        match self {
            Self::OutOfMemory => true,
            Self::Store(error) => !matches!(
                error,
                KvError::BatchTooLarge { .. }
                    | KvError::ValueTooLong { .. }
                    | KvError::KeyTooLong { .. }
                    | KvError::Database { .. }
            ),
            _ => false,
        }
    }

    /// Appends the error reply.
    pub fn write_to(&self, out: &mut crate::Output) {
        match self {
            Self::Bytes(line) => out.error(line),
            other => out.error(other.to_string().as_bytes()),
        }
    }
}

impl From<KvError> for CommandError {
    fn from(error: KvError) -> Self {
        match error {
            full if full.is_full() => Self::OutOfMemory,
            other => Self::Store(other),
        }
    }
}
