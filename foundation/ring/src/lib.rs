//! Rings: bounded queues with one producer and one consumer.
//!
//! Place: `foundation`. Rings never block: full and empty are answers. Atomics come from [`sync`],
//! so that loom can take their place (`RUSTFLAGS="--cfg loom"`).
//!
//! - [`mod@mailbox`]: values moved between two threads of one process.
//! - [`offer`]: a value that another thread may take, or its owner takes back.
//! - [`packets`]: numbers of blocks between two processes, and blocks that go round.
//! - [`slots`]: messages of one cache line between two processes that share memory.

pub mod mailbox;
pub mod offer;
pub mod packets;
pub mod slots;
pub mod sync;

pub use mailbox::{Receiver, Sender, mailbox};
pub use offer::{Offer, Taken};
