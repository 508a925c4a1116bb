//! KV-Direct's hardware in counts and times: what the paper's card would do, in place of what this machine
//! does.
//!
//! Place: `engines`, above `kv-direct`, whose table, station and packets it drives unchanged: the table over
//! a memory that records its accesses, the station by a clock of 180 MHz. [`exhibits`] puts each figure beside
//! the paper's.
//!
//! Nothing here reads a clock, opens a file or starts a thread; every result follows from its seed.
//!
//! Source: spec/kv-direct.md 4, 5.6, 5.7, 8.

#![forbid(unsafe_code)]

pub mod baselines;
pub mod cache;
pub mod dispatch;
pub mod dma;
pub mod ecc;
pub mod exhibits;
pub mod index;
pub mod pipeline;
pub mod wire;

/// Constants of the paper's platform.
pub mod platform {
    /// Clock of the processor, operations a second at one a cycle.
    pub const CLOCK_HZ: f64 = 180e6;
    /// Mean of a random read over PCIe, seconds.
    pub const READ_SECONDS: f64 = 1.05e-6;
    /// The fastest read: the data was in the host's cache.
    pub const FASTEST_READ_SECONDS: f64 = 0.8e-6;
    /// Tags of the DMA engine, for reads.
    pub const TAGS: usize = 64;
    /// Non-posted credits, for reads.
    pub const READ_CREDITS: usize = 84;
    /// Posted credits, for writes.
    pub const WRITE_CREDITS: usize = 88;
    /// Accesses of 64 bytes that a link carries at most, a second.
    pub const LINK_LINES: f64 = 87e6;
    /// Links.
    pub const LINKS: usize = 2;
    /// Bytes a second of both links together, and of the card's memory.
    pub const PCIE_BYTES: f64 = 13.2e9;
    /// Bytes a second of the card's memory.
    pub const DRAM_BYTES: f64 = 12.8e9;
    /// Bytes a second of the network.
    pub const NETWORK_BYTES: f64 = 5e9;
    /// Time of a request and its reply on the network.
    pub const NETWORK_SECONDS: f64 = 2e-6;
    /// Bytes around the payload of a packet.
    pub const PACKET_OVERHEAD: f64 = 88.0;
    /// Host memory over the card's.
    pub const HOST_PER_CARD: u64 = 16;
}
