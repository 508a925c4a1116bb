//! What a client did, counted.

/// Verbs, bytes and round trips of one client. Plain numbers: a client stays on one thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientCounters {
    /// Requests submitted: gets.
    pub gets: u64,
    /// Puts and deletes.
    pub puts: u64,
    /// Other requests of the caller: scan, statistics, ping.
    pub others: u64,
    /// Segment grants asked for (the paper's metadata requests).
    pub grants: u64,
    /// Requests that had to be sent again: buffer too small, checksum, stale grant.
    pub retries: u64,
    /// SENDs posted.
    pub sends: u64,
    /// WRITE_WITH_IMMs posted.
    pub writes: u64,
    /// READs posted.
    pub reads: u64,
    /// Messages received: SENDs.
    pub receives: u64,
    /// WRITE_WITH_IMMs received.
    pub placements: u64,
    /// Times the client sent something and waited for the server's answer to it.
    pub round_trips: u64,
    /// Payload bytes posted.
    pub bytes_out: u64,
    /// Payload bytes received or read.
    pub bytes_in: u64,
    /// Entries appended to a segment.
    pub appends: u64,
    /// Bytes of segment they took.
    pub appended_bytes: u64,
    /// Entries written over stale ones.
    pub overwrites: u64,
    /// Connections made again after a loss.
    pub reconnects: u64,
}
