//! The knobs.

use std::time::Duration;

/// Time and sizes of a replica. Times may differ between members without harm to safety.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Between two readings of the leader's status by a follower, and between two confirmations
    /// of its leadership by a leader. Default 100 ms, as in the paper.
    pub heartbeat: Duration,
    /// A leader whose beats stand still for so long is taken for hung. Default 300 ms. Shorter
    /// fails over sooner and takes a busy machine for a dead one sooner.
    pub patience: Duration,
    /// A follower waits up to so long, at random, before it campaigns, so that two seldom do at
    /// once. Default 50 ms.
    pub spread: Duration,
    /// A campaign that got no majority in this time is given up. Default 150 ms.
    pub campaign: Duration,
    /// A leader that no majority confirmed for so long steps down. Default 500 ms.
    pub isolation: Duration,
    /// A transfer of leadership that did not happen in this time is given up. Default 500 ms.
    pub transfer: Duration,
    /// Between two requests to send a snapshot to one follower. Default 5 s.
    pub snapshot_retry: Duration,
    /// Write-and-flush operations outstanding per follower. Default 8, at most 64. What is
    /// proposed while all are out travels in the next one: batching grows with load.
    pub pipeline_depth: usize,
    /// Slots of one operation, and of one read during recovery. Default 64.
    pub operation_slots: u64,
    /// Entries proposed and not committed. Default 512; no more than half of the ring.
    pub window: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(100),
            patience: Duration::from_millis(300),
            spread: Duration::from_millis(50),
            campaign: Duration::from_millis(150),
            isolation: Duration::from_millis(500),
            transfer: Duration::from_millis(500),
            snapshot_retry: Duration::from_secs(5),
            pipeline_depth: 8,
            operation_slots: 64,
            window: 512,
        }
    }
}

/// Nanoseconds, saturating.
pub(crate) fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
