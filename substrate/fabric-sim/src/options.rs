//! What a simulated network is like.

use std::ops::RangeInclusive;

/// Settings of a world. Times in nanoseconds of virtual time.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// One-way delay of a packet, drawn for each. Default 1 000 to 3 000.
    pub latency_ns: RangeInclusive<u64>,
    /// Time from a post until its bytes are read from memory. Default 0 to 300.
    pub departure_ns: RangeInclusive<u64>,
    /// Bytes a connection moves per microsecond. Default 10 000 (10 GB/s).
    pub bytes_per_us: u64,
    /// Packets lost out of a million; each loss costs `retransmit_ns`. Default 0.
    pub lost_per_million: u64,
    /// Delay a lost packet suffers. Default 20 000 to 100 000.
    pub retransmit_ns: RangeInclusive<u64>,
    /// When set, plain writes are acknowledged on arrival and placed after this delay, unless
    /// something that orders them (flush, read, atomic, message, immediate) follows on their
    /// queue pair. A crash in between loses them. Default off.
    pub slow_placement_ns: Option<RangeInclusive<u64>>,
    /// Larger writes are placed in pieces of this size, one event each. Default 64 KiB.
    pub chunk_bytes: u64,
    /// Trace records kept (the hash always covers all). Default 100 000.
    pub trace_records: usize,
    /// What the wall clock shows at the start, milliseconds since 1970. Default 1 700 000 000 000.
    pub unix_ms: u64,
    /// A rule to break. Default none.
    pub planted_bug: Option<PlantedBug>,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            latency_ns: 1_000..=3_000,
            departure_ns: 0..=300,
            bytes_per_us: 10_000,
            lost_per_million: 0,
            retransmit_ns: 20_000..=100_000,
            slow_placement_ns: None,
            chunk_bytes: 64 << 10,
            trace_records: 100_000,
            unix_ms: 1_700_000_000_000,
            planted_bug: None,
        }
    }
}

impl SimOptions {
    /// A bad network: wide latencies and one packet in twenty lost.
    #[must_use]
    pub fn lossy() -> Self {
        Self { latency_ns: 500..=50_000, lost_per_million: 50_000, ..Self::default() }
    }

    /// Writes linger between acknowledgement and memory.
    #[must_use]
    pub fn slow_placement() -> Self {
        Self { slow_placement_ns: Some(5_000..=200_000), ..Self::default() }
    }
}

/// A rule of fabric that the world breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlantedBug {
    /// An immediate is delivered before the write that carried it is placed.
    ImmediateBeforeWrite,
    /// Accesses outside the region are accepted (what lies outside is dropped).
    IgnoreBounds,
    /// Rights are not looked at.
    IgnoreRights,
    /// Any queue pair may use any protection domain's keys.
    IgnoreDomain,
    /// Every third armed event is not signalled.
    LoseWakeUps,
    /// A flush completes without placing what it should flush.
    FlushWithoutPlacing,
    /// A persistent flush of volatile memory succeeds.
    PersistVolatile,
    /// Nobody is told that a node died.
    SilentPeerDeath,
    /// Packets of one queue pair are processed as they come.
    ReorderWithinQueuePair,
    /// Writes under way are placed after the region's revocation.
    ForgetRevocation,
    /// Concurrent fetch-and-adds may lose one.
    TornAtomics,
    /// The queue pair stays usable after an error.
    StayAfterError,
    /// Requests behind a failed one vanish without a completion.
    DropFlushed,
    /// Inline data is read when the packet leaves, not when it is posted; here: is zeroed.
    StaleInline,
    /// Completions of what failed or was flushed carry no context.
    ForgetContext,
    /// An overrun completion queue drops completions and says nothing.
    SilentOverrun,
}
