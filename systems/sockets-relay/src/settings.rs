//! What a relay is told, what it counts, and what it does not take.

use std::net::IpAddr;
use std::time::Duration;

/// Another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Those of its connections' ends.
    pub addresses: Vec<IpAddr>,
}

/// Bounds and patience of a relay.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The hosts with relays; [`crate::network::Network`] numbers them in this order.
    pub hosts: Vec<Host>,
    /// Most connections carried and waiting.
    pub most_connections: usize,
    /// Most links, including calls that have not said who they are.
    pub most_links: usize,
    /// How long an end waits for its other one.
    pub patience: Duration,
    /// How long the kernel's connection is held while the last bytes are delivered.
    pub lingering: Duration,
    /// A connection without news for so long is no longer looked at in every turn.
    pub cools_after: Duration,
    /// How long a connection whose program [sleeps](crate::sleepy) at nearly every message is left to the kernel;
    /// zero: it is carried all the same.
    pub sleepers_hold: Duration,
    /// Whether connections are carried over links of the kernel's own TCP, which is faster alone: it wakes who
    /// sleeps with the bytes.
    pub over_tcp: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            hosts: Vec::new(),
            most_connections: 16 << 10,
            most_links: 32,
            patience: Duration::from_secs(30),
            lingering: Duration::from_secs(10),
            cools_after: Duration::from_micros(200),
            sleepers_hold: Duration::ZERO,
            over_tcp: false,
        }
    }
}

/// What a relay did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Turns.
    pub turns: u64,
    /// Looks at connections.
    pub looks: u64,
    /// Ends taken in.
    pub adopted: u64,
    /// Connections that both relays had.
    pub paired: u64,
    /// Connections ended because of a link, or of nonsense.
    pub broken: u64,
    /// Messages sent.
    pub messages: u64,
    /// Messages received.
    pub received: u64,
    /// Batches that went whole in a message.
    pub inline_batches: u64,
    /// Batches that were placed by writes.
    pub written_batches: u64,
    /// Bytes of rings sent.
    pub sent_bytes: u64,
    /// Bytes of rings received.
    pub received_bytes: u64,
    /// Bells heard.
    pub bells: u64,
    /// Doorbells sent.
    pub doorbells: u64,
    /// Connections that became cold.
    pub cooled: u64,
    /// Connections brought back to the kernel.
    pub recalled: u64,
    /// Of those, how many because their programs slept at nearly every message, and this relay noticed.
    pub sleepy: u64,
    /// Ends not taken in, or let go of, because the link would be TCP.
    pub over_tcp: u64,
}

/// Why a connection was not taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Its peer is on no configured host.
    #[error("the peer is on none of the configured hosts")]
    UnknownHost,
    /// The link to its host would be the kernel's own TCP, and [`Settings::over_tcp`] is not set.
    #[error("the link to the peer's host would be TCP, which the kernel carries better itself")]
    OverTcp,
    /// As many as there may be are there.
    #[error("no room for another connection")]
    Full,
    /// It is there already, or was given up.
    #[error("the connection is not open")]
    NotOpen,
}
