//! Operating-system mechanisms, one per module, with a safe surface.
//!
//! Place: the bottom of `foundation`; everything that maps memory, passes a descriptor or pins a
//! thread goes through here, so that the argument for each unsafe call stands once.
//!
//! - [`callers`]: accepting callers where descriptors run out.
//! - [`memory`]: what a piece of memory is to the rest of Beeline: a base, a length, perhaps a
//!   descriptor another process can map. The seam between `pmem` and `fabric`.
//! - [`mapping`]: the owner of one `mmap`, over memfd, file or anonymous memory.
//! - [`one_writer`]: shared memory that one process writes and others can only read.
//! - [`moving`]: a memory object's change of backing, and who must keep out meanwhile.
//! - [`patience`]: whether a thread that waits goes on polling.
//! - [`prefetch`]: cache lines asked for ahead of their use.
//! - [`probe`]: whether the kernel offers a facility.
//! - [`poller`]: readiness of many descriptors, and a descriptor that wakes a sleeper.
//! - [`doorbell`]: a socket pair, to wake a sleeper in another process that may be hostile.
//! - [`guardian`]: a process that shuts down sockets when this one ends.
//! - [`control_socket`]: records with descriptors over Unix sockets.
//! - [`process`]: pidfd, to see a process end.
//! - [`affinity`]: which processors a thread runs on.
//! - [`numa`]: which processors belong to which memory.
//! - [`barrier`]: asymmetric fences over `membarrier`.
//! - [`reopen`]: another open file description of the same object.
//! - [`start_write`]: write-out of a file begun, not awaited.
//! - [`words`]: copies whose aligned words appear whole.
//! - [`write_back`]: cache-line write-back, non-temporal copies and store fences.

pub mod affinity;
pub mod barrier;
pub mod callers;
pub mod control_socket;
pub mod doorbell;
pub mod guardian;
pub mod mapping;
pub mod memory;
pub mod moving;
pub mod numa;
pub mod one_writer;
pub mod patience;
pub mod poller;
pub mod prefetch;
pub mod probe;
pub mod process;
pub mod reopen;
pub mod start_write;
pub mod vectors;
pub mod words;
pub mod write_back;

pub use mapping::{Mapping, MappingError, SharedMemory};
pub use memory::{MemoryObject, Part, Persistence};
