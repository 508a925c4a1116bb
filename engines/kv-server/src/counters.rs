//! What a shard's server did, counted.

use beeline_kv::wire::RequestKind;

/// Verbs, bytes and requests of one [`crate::ShardServer`]. Plain numbers: they stay on the
/// shard's thread; the node copies them for whoever asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCounters {
    /// Requests by kind, in the order of [`RequestKind::ALL`].
    pub requests: [u64; RequestKind::ALL.len()],
    /// Entries announced by clients (puts and deletes).
    pub announcements: u64,
    /// Announced entries refused.
    pub rejected: u64,
    /// SENDs received.
    pub receives: u64,
    /// WRITE_WITH_IMMs received.
    pub placements: u64,
    /// SENDs posted.
    pub sends: u64,
    /// WRITE_WITH_IMMs posted.
    pub writes: u64,
    /// Payload bytes received.
    pub bytes_in: u64,
    /// Payload bytes posted.
    pub bytes_out: u64,
    /// Bytes copied between segments and buffers, where the device cannot reach segments.
    pub copied_bytes: u64,
    /// Segments granted.
    pub grants: u64,
    /// Grants taken back from idle clients.
    pub reclaimed: u64,
    /// Clients that connected.
    pub accepted: u64,
    /// Connections refused.
    pub refused: u64,
    /// Connections that ended.
    pub closed: u64,
    /// Of those, ended because the client broke the protocol.
    pub expelled: u64,
}

impl ServerCounters {
    /// Requests of `kind`.
    #[must_use]
    pub fn of(&self, kind: RequestKind) -> u64 {
        self.requests[kind as usize]
    }

    /// Adds `other`, for sums over shards.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.requests.iter_mut().zip(other.requests) {
            *mine += theirs;
        }
        self.announcements += other.announcements;
        self.rejected += other.rejected;
        self.receives += other.receives;
        self.placements += other.placements;
        self.sends += other.sends;
        self.writes += other.writes;
        self.bytes_in += other.bytes_in;
        self.bytes_out += other.bytes_out;
        self.copied_bytes += other.copied_bytes;
        self.grants += other.grants;
        self.reclaimed += other.reclaimed;
        self.accepted += other.accepted;
        self.refused += other.refused;
        self.closed += other.closed;
        self.expelled += other.expelled;
    }
}
