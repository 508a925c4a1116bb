//! Queue pairs over ordered byte streams: what the providers whose target executes requests have
//! in common.
//!
//! Place: `substrate`, above `fabric` and `os`, below the providers that bring a
//! [`stream::Transport`].
//!
//! ```text
//!  application's thread                                     library's thread (one per device)
//!  post ─▶ ┌──────────────────────────────┐
//!  poll ─▶ │ engine of one connection     │ ◀─ when the application has not looked for a
//!  wait ─▶ │ frames in, frames out, lock  │    millisecond; hears new callers
//!          └──────────────────────────────┘
//!                     one stream
//! ```
//!
//! - [`stream`]: what a provider brings.
//! - [`frame`], [`handshake`]: the wire format, pure.
//! - `engine`, `execute`, `transmit`: the protocol of one connection.
//! - `connection`: the engine's lock; `region`: keys, rights, revocation.
//! - `queue`, `completion_queue`: completions, sleeping and waking.
//! - `persist`: flushes of files, off the polling threads.
//! - `library`: who drives, and why nobody is missed or woken twice.
//! - `device`, `queue_pair`, `receive_queue`: fabric's objects.
//!
//! Every byte of a peer is hostile: a damaged, replayed, over-long or unexpected frame ends that
//! connection and nothing else. Memory is bounded: nothing is buffered on a peer's behalf beyond
//! one receive buffer per connection and queues of the configured depths.
//!
//! Decision: `fabric` says data calls take no lock. Here they take one uncontended lock, because a
//! one-sided operation over a stream is code at the target, and some thread must run it when the
//! application does not.

pub mod frame;
pub mod handshake;
pub mod stream;

mod clock;
mod completion_queue;
mod connection;
mod device;
mod engine;
mod execute;
mod library;
mod persist;
mod queue;
mod queue_pair;
mod receive_queue;
mod region;
#[cfg(test)]
mod stream_tests;
mod transmit;

pub use clock::now_ns;
pub use device::{EngineDevice, attributes};
pub use region::random_u64;
