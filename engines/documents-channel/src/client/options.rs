//! How a client's channel is made, what it counts, how requests end.

use std::time::Duration;

use crate::greeting::RnicInfo;
use crate::message::LONGEST_NAME;
use crate::register::RegisterOptions;

/// Longest body, as the server takes.
pub(super) const LONGEST_REQUEST: usize = 48_000_000;

/// How a channel is made.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// This end wants the channel. Default true.
    pub is_rdma: bool,
    /// Replies carry checksums. Default false.
    pub checksum: bool,
    /// Slots of this end's ring. Default 16.
    pub slots: u16,
    /// Requests without an outcome, at most. Default 16.
    pub outstanding: u16,
    /// Bytes of a destination for what inserts, updates and deletes answer. Default 4096.
    pub small_bytes: u32,
    /// Destinations for what queries answer; they share the size that Algorithm 2 gives. Default 2.
    pub large_buffers: u16,
    /// Size of those. Default as [`RegisterOptions`], with a base of 4 MiB.
    pub register: RegisterOptions,
    /// How long a silent peer may hold up a write, and connecting may take. Default 10 s.
    pub transport_timeout: Duration,
    /// This end's device.
    pub rnic: RnicInfo,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            is_rdma: true,
            checksum: false,
            slots: 16,
            outstanding: 16,
            small_bytes: 4096,
            large_buffers: 2,
            register: RegisterOptions { base_bytes: 4 << 20, ..RegisterOptions::default() },
            transport_timeout: Duration::from_secs(10),
            rnic: RnicInfo::named(""),
        }
    }
}

/// Why a request has no reply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// Its time is up; whether it was executed is unknown.
    #[error("the request has no reply within its time; whether it was executed is unknown")]
    TimedOut,
    /// The channel was found broken before anything of the request was sent: it was not executed.
    #[error("the channel broke before the request was sent; it was not executed")]
    NotSent,
    /// The connection broke; whether it was executed is unknown.
    #[error("the channel broke; whether the request was executed is unknown")]
    Broken,
    /// Its reply's checksum is wrong.
    #[error("the reply was damaged on its way: its checksum is wrong")]
    Corrupt,
    /// The server refused.
    #[error("the server refuses: {text} (code {code})")]
    Refused {
        /// Its code.
        code: u32,
        /// Its words.
        text: String,
    },
}

/// How a request ended: with the bytes of its reply, or without.
pub type Outcome = Result<Vec<u8>, RequestError>;

/// Why a request was not taken. Nothing was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Submit {
    /// As many are under way as may be: wait for one of them.
    #[error("as many requests are under way as may be")]
    Full,
    /// Name or body is too long.
    #[error("a request has a name of {LONGEST_NAME} bytes and a body of {LONGEST_REQUEST} at most")]
    TooLong,
    /// The channel broke.
    #[error("the channel is broken: make another")]
    Broken,
}

/// What a channel did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientCounters {
    /// Requests taken.
    pub requests: u64,
    /// Writes posted, with immediate or without.
    pub writes: u64,
    /// Copies of bodies into registered memory, and of replies out of it.
    pub copies: u64,
    /// Regions registered.
    pub registrations: u64,
    /// Requests that timed out.
    pub timed_out: u64,
    /// Writes to destinations that nobody waited for any more.
    pub late_writes: u64,
    /// Immediates that name no request.
    pub unknown_immediates: u64,
    /// Sleeps.
    pub sleeps: u64,
}
