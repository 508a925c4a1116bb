//! What a node counts. The loops add to relaxed atomics of their own; readers sum them up.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one shard's loop, on cache lines of their own.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub(crate) struct LoopCounters { $(pub $name: AtomicU64,)* }

        /// Sums over all loops of a node.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct LoopStats { $($(#[$doc])* pub $name: u64,)* }

        impl LoopCounters {
            pub(crate) fn add_to(&self, stats: &mut LoopStats) {
                $(stats.$name += self.$name.load(Ordering::Relaxed);)*
            }

        }

        impl LoopStats {
            /// What came after `earlier`.
            pub(crate) fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }
        }
    };
}

counters! {
    /// Commands executed.
    commands,
    /// Commands that came from another shard's connection.
    forwarded_commands,
    /// Commands that locked several shards.
    several_shard_commands,
    /// Connections accepted.
    connections_received,
    /// Connections refused because of the limit on clients.
    connections_rejected,
    /// Bytes read from clients.
    input_bytes,
    /// Bytes sent to clients.
    output_bytes,
    /// Connections closed because their unread replies passed the limit.
    output_limit_disconnections,
    /// Connections closed for breaking the protocol or passing the query-buffer limit.
    protocol_errors,
    /// Error replies.
    error_replies,
    /// Requests of one-sided clients.
    fabric_requests,
    /// One-sided clients connected now.
    fabric_clients,
    /// Bytes of one-sided clients' entries copied between log segments and buffers, because the
    /// device cannot reach segments.
    fabric_copied_bytes,
    /// Redis connections whose request CLIENT PAUSE holds back, as of the last housekeeping.
    held_clients,
    /// Times a loop went to sleep.
    sleeps,
    /// Times a loop that only polled let other threads have its core.
    yields,
    /// Turns of the loops.
    turns,
}

beeline_observe::metrics! {
    /// How long the turns of one shard's loop take, by its own thread.
    pub struct LoopTimes in "beeline" {
        histogram node_turn_seconds: Seconds, "Time of a turn of a shard's loop that had news: so long the shard's other clients wait for it. Long turns are long commands, or commits.";
        histogram node_commit_seconds: Seconds, "Time of a commit that waits for the medium, at durability power; without one nothing is waited for.";
    }
}

/// A commit that took less waited for nothing.
pub(crate) const SHORTEST_COMMIT_NS: u64 = 1_000;

/// Adds to a counter that one thread alone writes: a load and a store, no locked instruction.
pub(crate) fn count(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}
