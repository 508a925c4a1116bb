//! What the service counts.

beeline_observe::metrics! {
    /// Sums over the processors of the service.
    pub struct DirectMetrics in "beeline_direct" {
        gauge memory_bytes: Bytes, "Memory of the processors: index and blocks.";
        gauge pairs: Count, "Pairs stored.";
        gauge pair_bytes: Bytes, "Bytes of their keys and values.";
        gauge allocated_bytes: Bytes, "Bytes of blocks in use: values outside the index, and chained buckets.";
        gauge chained_buckets: Count, "Buckets outside the index.";
        gauge clients: Count, "Clients connected over fabric.";
        counter packets: Count, "Packets executed.";
        counter operations: Count, "Operations executed.";
        counter forwarded_operations: Count, "Of these, executed on a value that was at hand.";
        counter write_backs: Count, "Values written back after such operations.";
        counter failed_operations: Count, "Operations that found no key, were refused or found no memory.";
        counter slab_transfers: Count, "Batches of free blocks moved between a processor and its daemon.";
        counter slab_waits: Count, "Allocations that waited for a daemon.";
        counter slab_merges: Count, "Merges of free blocks.";
        counter refused_clients: Count, "Clients refused.";
        counter ended_clients: Count, "Connections that ended, by their client's will or fault.";
        gauge map_state: Count, "State of the map of servers: it grows with each change and is odd while keys move; 0 without one.";
        counter moved_pairs: Count, "Pairs given to other servers.";
        counter adopted_pairs: Count, "Pairs taken over from other servers.";
        counter sleeps: Count, "Times a processor went to sleep.";
    }
}
