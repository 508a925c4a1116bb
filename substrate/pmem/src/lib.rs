//! Durable memory: pools of segments; map, flush, fence; a simulated device that yields every
//! legal crash image.
//!
//! Place: `substrate`, above `os` and `wire`. Engines keep their logs in segments; fabric
//! registers a segment as memory (it implements [`beeline_os::MemoryObject`]) without knowing it.
//!
//! ```text
//!   store ──▶ stored ──flush──▶ flushed ──fence──▶ persisted (at the pool's durability)
//!   Segment            Persister          Persister
//! ```
//! A pool is a directory: `pool.bee` (header, root words, descriptor table; for the server only)
//! and one file per segment, so that a segment can be granted to one peer by passing its
//! descriptor and nothing else. `docs/pmem.md` has the formats byte by byte.

mod backing;
mod core;
mod crash;
mod error;
mod layout;
mod memory;
mod open;
mod options;
mod orphans;
mod persister;
mod pool;
mod prepare;
mod record;
mod segment;
mod simulate;
mod synchroniser;

pub use beeline_os::write_back::WriteBack;
pub use crash::{CrashCounts, CrashImage, CrashKind, CrashLimits, SimDevice, for_each_crash_image};
pub use error::PmemError;
pub use layout::{ROOT_WORDS, SEGMENT_WORDS};
pub use options::{
    Durability, Findings, MAX_SEGMENT_BYTES, MAX_SEGMENTS, MIN_SEGMENT_BYTES, Mechanism, PoolKind,
    PoolOptions, PoolReport,
};
pub use persister::{
    FenceProgress, NONTEMPORAL_FROM_BYTES, Persister, PersisterCounters, write_back,
};
pub use pool::Pool;
pub use record::Event;
pub use segment::Segment;
