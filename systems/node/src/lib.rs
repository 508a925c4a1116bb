//! Shards, one thread per core: completion queues, sockets and mailboxes in one loop.
