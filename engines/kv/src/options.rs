//! What a store is asked to be.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use beeline_env::{Clock, SystemClock};

/// Which keys go when the memory limit is reached. Names as in Redis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Eviction {
    /// None: writes that need memory fail.
    #[default]
    NoEviction,
    /// The least recently used of a sample of all keys.
    AllKeysLru,
    /// Any key.
    AllKeysRandom,
    /// The least recently used of a sample of keys with an expiry.
    VolatileLru,
    /// Any key with an expiry.
    VolatileRandom,
    /// Of a sample of keys with an expiry, the one that expires first.
    VolatileTtl,
}

impl Eviction {
    /// All policies, in the order of their codes.
    pub const ALL: [Self; 6] = [
        Self::NoEviction,
        Self::AllKeysLru,
        Self::AllKeysRandom,
        Self::VolatileLru,
        Self::VolatileRandom,
        Self::VolatileTtl,
    ];

    /// The name in configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NoEviction => "noeviction",
            Self::AllKeysLru => "allkeys-lru",
            Self::AllKeysRandom => "allkeys-random",
            Self::VolatileLru => "volatile-lru",
            Self::VolatileRandom => "volatile-random",
            Self::VolatileTtl => "volatile-ttl",
        }
    }

    /// The policy of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.name().eq_ignore_ascii_case(name))
    }

    pub(crate) fn only_expiring(self) -> bool {
        matches!(self, Self::VolatileLru | Self::VolatileRandom | Self::VolatileTtl)
    }
}

/// Configuration of a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Shards, 1 to 1024; usually one per core. May differ from one opening to the next.
    pub shards: usize,
    /// Source of time.
    pub clock: Arc<dyn Clock>,
    /// Limit on live data and index in bytes; 0 = only the pool's capacity limits.
    pub max_memory_bytes: u64,
    /// What happens at that limit.
    pub eviction: Eviction,
    /// Idle shards help others write back dirty lines; effective only where the pool persists by
    /// cache-line write-back.
    pub cooperative_write_back: bool,
    /// Threads that read segments during recovery; 0 = one per shard.
    pub recovery_threads: usize,
    /// From this many bytes on a shard leaves the segment it appends to, where most of what is in
    /// it is stale, for one it used before: smaller stays in the processor's cache, larger changes
    /// segments less often. `None` goes by the pool: 1 MiB, 4 MiB where lines are written back,
    /// 8 MiB where files are synchronised.
    pub warm_bytes: Option<u32>,
    /// For a replica of other stores, whose clocks differ: how far time has come where all of them
    /// agree, Unix milliseconds. A key whose time has come by `clock` is absent for whoever looks;
    /// it is deleted only when its time has come by this, too. `None`: `clock` decides both.
    pub agreed_ms: Option<Arc<AtomicU64>>,
    /// Most bytes of entries in one batch, deletions not counted; `None`: what a segment holds.
    /// Unlike that it does not depend on how the entries lie, so that replicas agree which entry is
    /// one too many. At most half a segment leaves room for the deletions.
    pub batch_limit_bytes: Option<u64>,
    /// Open the store although acknowledged data is damaged or lost: keys show what is left, older
    /// values among it, and deleted keys may be back. What is found so is not asked about again.
    pub accept_damage: bool,
    /// Bytes of memory for the latest changes, which readers follow ([`crate::Store::events`]); 0: none
    /// are kept. Each shard keeps its part of it, 64 KiB at least.
    pub feed_bytes: u64,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            shards: 1,
            clock: Arc::new(SystemClock),
            max_memory_bytes: 0,
            eviction: Eviction::NoEviction,
            cooperative_write_back: true,
            recovery_threads: 0,
            warm_bytes: None,
            agreed_ms: None,
            batch_limit_bytes: None,
            accept_damage: false,
            feed_bytes: 0,
        }
    }
}
