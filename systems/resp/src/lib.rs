//! The Redis protocol: codec, commands and their semantics over a keyspace.
