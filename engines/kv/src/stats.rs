//! Counters, kept by each shard and summed on demand.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Figures of one shard since the store was opened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct ShardStats { $($(#[$doc])* pub $name: u64,)* }

        /// The same as atomics: written by the shard's thread, read by anybody.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub(crate) struct ShardCounters { $(pub $name: AtomicU64,)* }

        impl ShardCounters {
            pub fn read(&self) -> ShardStats {
                ShardStats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }

        impl ShardStats {
            /// Adds the figures of another shard.
            pub fn add(&mut self, other: &Self) { $(self.$name += other.$name;)* }
        }
    };
}

counters! {
    /// Keys a reader finds.
    keys,
    /// Keys with an expiry among them.
    expiring_keys,
    /// Slots of the indexes, tombstones included.
    index_slots,
    /// Memory of the indexes in bytes.
    index_bytes,
    /// Memory for the places of entries in segments that one-sided clients hold, in bytes.
    client_slot_bytes,
    /// Bytes on media of the entries that hold live keys.
    live_bytes,
    /// Entries stored (puts, deletions, relocations).
    entries_stored,
    /// Bytes of entries stored.
    bytes_stored,
    /// Entries accepted from one-sided clients.
    entries_accepted,
    /// Of these, overwrites in place.
    entries_in_place,
    /// Announcements of one-sided clients refused.
    entries_rejected,
    /// Commits that had something to persist.
    commits,
    /// Keys expired.
    expired,
    /// Keys evicted.
    evicted,
    /// Entries found damaged.
    damaged,
    /// Segments collected.
    segments_collected,
    /// Segments in which nothing was needed any more, written anew in place.
    segments_recycled,
    /// Entries the collector copied.
    collector_copied_entries,
    /// Bytes the collector copied.
    collector_copied_bytes,
    /// Bytes the collector won back (segment length less what it copied).
    collector_won_bytes,
    /// Write-back sub-tasks run for other shards.
    write_backs_helped,
    /// Write-back sub-tasks run by their owner.
    write_backs_own,
    /// Streams.
    streams,
    /// Bytes on media of the entries of streams.
    stream_bytes,
    /// Entries appended to streams.
    stream_entries_appended,
    /// Times a stream was cut off in front.
    stream_truncations,
    /// Lookups that found a key.
    hits,
    /// Lookups that found none.
    misses,
}

/// Live keys of one shard, database by database: written under the shard's lock, read by anybody.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct DatabaseCounters {
    pub keys: [AtomicU64; crate::INDEXES],
    pub expiring: [AtomicU64; crate::INDEXES],
}

/// Adds to a counter that only this thread writes.
#[inline]
pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

/// Sets a gauge.
#[inline]
pub(crate) fn set(gauge: &AtomicU64, value: u64) {
    gauge.store(value, Ordering::Relaxed);
}

/// Figures of a whole store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStats {
    /// Sum over the shards.
    pub total: ShardStats,
    /// Bytes of the pool's segments in use.
    pub used_bytes: u64,
    /// Capacity of the pool in bytes.
    pub capacity_bytes: u64,
    /// Bytes in used segments that are not live: what collection could win at most.
    pub garbage_bytes: u64,
    /// Segments in use.
    pub segments: u64,
    /// Of these, segments that one-sided clients hold.
    pub segments_granted: u64,
    /// Of these, segments set aside because damage was found in them.
    pub segments_quarantined: u64,
    /// Newest version given out.
    pub version: u64,
}
