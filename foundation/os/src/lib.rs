//! Operating-system mechanisms, one per module, with a safe surface.
//!
//! Place: the bottom of `foundation`; everything that maps memory, passes a descriptor or pins a
//! thread goes through here, so that the argument for each unsafe call stands once.
//!
//! - [`memory`]: what a piece of memory is to the rest of Beeline: a base, a length, perhaps a
//!   descriptor another process can map. The seam between `pmem` and `fabric`.
//! - [`mapping`]: the owner of one `mmap`, over memfd, file or anonymous memory.
//! - [`poller`]: readiness of many descriptors, and a descriptor that wakes a sleeper.

pub mod mapping;
pub mod memory;
pub mod poller;

pub use mapping::{Mapping, MappingError, SharedMemory};
pub use memory::{MemoryObject, Persistence};
