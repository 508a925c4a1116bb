//! What a node is told before it starts. Each knob has a unit, a default and a reason.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use beeline_kv::Eviction;
use beeline_kv_server::ServerOptions;
use beeline_pmem::PoolOptions;

use crate::replicated::ReplicationOptions;

/// Everything a node needs to know. Checked by [`crate::Node::start`] before work starts.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Where the pool lies. Ignored by a `dram` pool.
    pub data_directory: PathBuf,
    /// Kind, size and durability of the pool.
    pub pool: PoolOptions,
    /// Threads that own keys. Default: one per core; more than cores only costs switches.
    pub shards: usize,
    /// Pin shard `i` to core `i` modulo cores. Default off: with other work on the machine the
    /// scheduler knows better.
    pub pin_shards: bool,
    /// How long a loop that just served fabric polls on before it sleeps. Default 20 us: a little
    /// more than the wake-up it saves.
    pub spin: Duration,
    /// Bytes of live data at which [`Eviction`] starts; 0 for no limit below the pool's capacity.
    pub max_memory_bytes: u64,
    /// Bytes of memory for the latest changes: see [`beeline_kv::StoreOptions::feed_bytes`].
    pub feed_bytes: u64,
    /// What happens at the memory limit.
    pub eviction: Eviction,
    /// Large write-backs are shared with idle shards. Default on.
    pub cooperative_write_back: bool,
    /// Start although acknowledged data is damaged: see [`beeline_kv::StoreOptions::accept_damage`].
    pub accept_damage: bool,
    /// Limits of one-sided clients, per shard and provider.
    pub fabric: ServerOptions,
    /// How long a node that stops waits for clients to read the replies they are owed. Default
    /// 2 s: longer than a healthy client takes, shorter than a supervisor's patience.
    pub shutdown_wait: Duration,
    /// The Redis door, unless closed.
    pub redis: Option<RedisDoor>,
    /// The keys are those of a replicated log, which is attached when the node runs.
    pub replication: Option<ReplicationOptions>,
}

/// The Redis door.
#[derive(Clone, Debug)]
pub struct RedisDoor {
    /// Where to listen. Port 0 picks a free one.
    pub address: SocketAddr,
    /// Password clients must give; `None` lets everyone in.
    pub require_password: Option<String>,
    /// Connections served at once; one more is told so and closed. Default 10,000.
    pub max_clients: usize,
    /// A connection silent for this long is closed; `None` never. Default none, as Redis.
    pub idle_timeout: Option<Duration>,
    /// Replies a client has not read yet, bytes. At an eighth of it the node stops reading that
    /// client's requests; one reply beyond it becomes an error. 0: no limit; at least 64 KiB.
    /// Default 256 MiB.
    pub output_limit_bytes: usize,
    /// Most bytes of one incomplete request; a client that passes it is closed. 1 MiB to 4 GiB - 1.
    /// Default 1 GiB, as Redis.
    pub query_limit_bytes: u32,
    /// Commands at least this long are kept for SLOWLOG, and every command is timed; `None`: none is
    /// kept, and a part of them is timed. Default none.
    pub slow_log: Option<Duration>,
    /// How pipelined requests of one connection on keys of several shards relate. Default strict.
    pub pipeline_order: PipelineOrder,
}

/// When a pipelined request may run that needs another shard than the one before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PipelineOrder {
    /// Once the one before it took effect and is durable: as Redis with one thread, also after a
    /// crash.
    #[default]
    Strict,
    /// At once: requests on different shards are outstanding together and take effect in either
    /// order, as if they came from different clients. Replies keep their order.
    Relaxed,
}

impl RedisDoor {
    /// The defaults at `address`.
    #[must_use]
    pub fn at(address: SocketAddr) -> Self {
        Self {
            address,
            require_password: None,
            max_clients: 10_000,
            idle_timeout: None,
            output_limit_bytes: 256 << 20,
            query_limit_bytes: 1 << 30,
            slow_log: None,
            pipeline_order: PipelineOrder::Strict,
        }
    }
}
