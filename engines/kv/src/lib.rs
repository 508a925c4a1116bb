//! Durable key-value store: log-structured shards over durable memory.

pub mod wire;
