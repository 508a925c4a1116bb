//! What a server allows, and what it counts.

use std::time::Duration;

use crate::greeting::RnicInfo;
use crate::register::RegisterOptions;

/// Limits of one server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The channel is offered. Default true.
    pub is_rdma: bool,
    /// Replies carry checksums. A client may ask for them by itself. Default false.
    pub checksum: bool,
    /// Channels at once. Default 1024.
    pub max_channels: u32,
    /// Slots of a ring, 1 to 1024. Default 16.
    pub slots: u16,
    /// Sizes of granted areas. Default as [`RegisterOptions`].
    pub register: RegisterOptions,
    /// Longest body of a request that comes in parts. Default 48 MB, as the MongoDB wire's.
    pub longest_body: usize,
    /// Buffers of the pool. Default 256.
    pub pool_buffers: u32,
    /// Bytes of such a buffer. Default 64 KiB.
    pub buffer_bytes: usize,
    /// Bytes of replies that wait to be written, or for their clients to ask for the rest, all channels
    /// together. Default 256 MiB. Beyond it the channel that keeps most loses what it keeps.
    pub most_held: usize,
    /// How long the rest of a reply waits behind the last part that was asked for, and an incomplete body
    /// behind its last part. Default 30 s.
    pub hold: Duration,
    /// Requests of one channel whose replies are not written; further ones wait in its ring. Default 64.
    pub most_open: usize,
    /// Bytes of replies of one channel that wait to be written, beyond which its requests wait in its ring.
    /// Default 16 MiB.
    pub most_unsent: usize,
    /// Bytes of bodies that are incomplete or wait for their execution, all channels together. Default
    /// 512 MiB. Beyond it the longest incomplete one ends its channel; where there is none, requests wait.
    pub most_bodies: usize,
    /// How long a client that was taken may be without a connection. Default 10 s.
    pub connect_timeout: Duration,
    /// Half of the most completions handled in one poll: `MAX_CQ_NUM`. Default 1000.
    pub max_cq_num: usize,
    /// This end's device.
    pub rnic: RnicInfo,
    /// Where the MongoDB wire is spoken.
    pub wire: Option<std::net::SocketAddr>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            is_rdma: true,
            checksum: false,
            max_channels: 1024,
            slots: 16,
            register: RegisterOptions::default(),
            longest_body: 48_000_000,
            pool_buffers: 256,
            buffer_bytes: 64 << 10,
            most_held: 256 << 20,
            hold: Duration::from_secs(30),
            most_open: 64,
            most_unsent: 16 << 20,
            most_bodies: 512 << 20,
            connect_timeout: Duration::from_secs(10),
            max_cq_num: 1000,
            rnic: RnicInfo::named(""),
            wire: None,
        }
    }
}

/// What a server did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCounters {
    /// Channels taken.
    pub accepted: u64,
    /// Clients that were told to use TCP.
    pub refused: u64,
    /// Channels ended.
    pub ended: u64,
    /// Channels ended because their client broke the protocol.
    pub protocol_errors: u64,
    /// Requests executed.
    pub requests: u64,
    /// Bytes of their bodies.
    pub request_bytes: u64,
    /// Bytes of replies.
    pub reply_bytes: u64,
    /// Copies of request bodies out of registered memory.
    pub body_copies: u64,
    /// Bytes of replies that were copied once more, because the pool was empty.
    pub staged_bytes: u64,
    /// Regions registered.
    pub registrations: u64,
    /// Turns of polling that found something.
    pub batches: u64,
    /// Replies that nobody asked the rest of in time, or that were given up for want of room.
    pub dropped_replies: u64,
    /// Times a request had to wait in its ring.
    pub parked: u64,
    /// Channels ended because they kept most where there was no room, or took no writes.
    pub overrun: u64,
}
