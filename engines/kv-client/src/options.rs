//! What a client can be told.

use std::sync::Arc;
use std::time::Duration;

use beeline_env::{Clock, SystemClock};
use beeline_kv::wire::Protocol;

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Protocol to speak. Default [`Protocol::Boom`]; the others are there to be measured.
    pub protocol: Protocol,
    /// Requests outstanding per shard, 1..=1024; the server may grant fewer. Default 32.
    pub window: u16,
    /// Longest key of gets, bytes, up to 65,535 or what the provider sends, less 48: the server
    /// keeps that much for each request of the window. Puts are not bounded by it. Default 208.
    pub longest_key_bytes: u32,
    /// Memory first set aside for one value, bytes; grows by itself. Default 4 KiB.
    pub value_bytes: u32,
    /// [`Protocol::Oblivious`]: bytes of one request slot at the server. Default 20 KiB.
    pub request_slot_bytes: u32,
    /// Bound of every call. Default 5 s.
    pub timeout: Duration,
    /// How long a blocking call polls before it sleeps. Default 50 µs; 0 on a busy processor.
    pub spin: Duration,
    /// Makes a new connection after one was lost. Default true.
    pub reconnect: bool,
    /// Overwrites stale entries in place (BOOM §3.3). Default true.
    pub mixed_update: bool,
    /// Most keys the update table tracks per segment; about 100 bytes each. Default 262,144.
    pub tracked_keys: usize,
    /// Source of time. Default the system's.
    pub clock: Arc<dyn Clock>,
    /// Which conditions of the mixed update are kept. For tests that show what each one is for.
    #[doc(hidden)]
    pub conditions: Conditions,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            protocol: Protocol::Boom,
            window: 32,
            longest_key_bytes: 208,
            value_bytes: 4096,
            request_slot_bytes: 20 << 10,
            timeout: Duration::from_secs(5),
            spin: Duration::from_micros(50),
            reconnect: true,
            mixed_update: true,
            tracked_keys: 262_144,
            clock: Arc::new(SystemClock),
            conditions: Conditions::ALL,
        }
    }
}

/// The conditions under which an entry may be overwritten in place (BOOM §3.3). Switching one off
/// corrupts data; tests do it to show that the condition is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Conditions {
    /// C1: the entry is not the newest of its key, and the one that is has been acknowledged.
    pub superseded: bool,
    /// C2: the new entry fits the slot.
    pub fits: bool,
    /// C3: no unfinished get reads the entry.
    pub unread: bool,
}

impl Conditions {
    /// As they should be.
    pub const ALL: Self = Self { superseded: true, fits: true, unread: true };
}

/// What goes with a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// Wall-clock time of expiry, ms since the epoch; 0 never.
    pub expires_at_ms: u64,
    /// Encoding of the value; 0 is a string.
    pub kind: u8,
}
