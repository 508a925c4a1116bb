//! Rings: bounded queues with one producer and one consumer.
//!
//! Place: `foundation`. Rings never block: full and empty are answers. Atomics come from [`sync`],
//! so that loom can take their place (`RUSTFLAGS="--cfg loom"`).
//!
//! - [`mailbox`]: values moved between two threads of one process.

pub mod mailbox;
pub mod sync;

pub use mailbox::{Receiver, Sender, mailbox};
