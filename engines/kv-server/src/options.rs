//! What a shard's server can be told.

use std::time::Duration;

/// Limits and bounds of one [`crate::ShardServer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerOptions {
    /// Clients connected at once. Default 1024.
    pub max_clients: u32,
    /// Largest window granted, requests outstanding per client, 2..=1025. Default 1025.
    pub max_window: u16,
    /// Memory for the requests of one client, bytes; a client with long keys gets a smaller
    /// window. Default 1 MiB.
    pub client_request_bytes: u32,
    /// Memory for results copied on behalf of one client (scans, statistics, the NVM-oblivious
    /// baseline), bytes. Default 8 MiB.
    pub client_result_bytes: u32,
    /// Entries of the completion queue; bounds clients times window. Default 131,072.
    pub completion_entries: u32,
    /// Keys and bytes after which a scan page ends. Default 16 KiB.
    pub scan_page_bytes: u32,
    /// Offers the two baselines. They map log segments into clients for reading, so this is for
    /// measurements. Default false.
    pub baselines: bool,
    /// In a member of a cluster: bytes that a put may take of one entry of the log, its key, value
    /// and 48 more. Clients then speak [`beeline_kv::wire::Protocol::Replicated`]. Default `None`.
    pub replicated: Option<u32>,
    /// How long a client may leave a reply unread before its connection ends. Default 1 s.
    pub receiver_not_ready_timeout: Duration,
    /// How long a segment may lie granted without an entry before it can be taken back when the
    /// pool runs short. Default 10 s.
    pub idle_grant: Duration,
    /// Share of the pool in use, percent, from which on idle grants are taken back. Default 75.
    pub reclaim_above_percent: u8,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            max_clients: 1024,
            max_window: 1025,
            client_request_bytes: 1 << 20,
            client_result_bytes: 8 << 20,
            completion_entries: 131_072,
            scan_page_bytes: 16 << 10,
            baselines: false,
            replicated: None,
            receiver_not_ready_timeout: Duration::from_secs(1),
            idle_grant: Duration::from_secs(10),
            reclaim_above_percent: 75,
        }
    }
}
