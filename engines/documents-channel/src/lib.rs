//! RMongo's transport: commands of the document store by one-sided writes over fabric.
//!
//! Place: `engines`, above the traits of fabric. `systems/documents` executes what [`ChannelServer`]
//! brings; [`ChannelClient`] is the other end. Neither has a thread or a socket.
//!
//! ```text
//!  client                                            server
//!  body ────────── write ───────────────────────────▶ granted area       (bodies past 440 B)
//!  request ─────── write, immediate MESSAGE ────────▶ slot i of the ring ── copied, then executed
//!  destination ◀── write, immediate request index ── reply, from the registered pool
//!  credit ◀─────── immediate ACK ─────────────────── slot i may be written again
//! ```
//!
//! - [`message`]: the control message byte by byte, and the codes of immediates.
//! - [`greeting`]: what both ends tell each other first, and RMongo's Algorithm 1 over it.
//! - [`register`]: Algorithm 2, the size of a channel's region from the load of the host.
//! - [`buffers`]: which registered buffer is idle and which is busy.
//!
//! Invariants: no slot and no area is written again before its message was acknowledged; a request
//! ends exactly once, by its reply, an error or a time-out; a destination whose request timed out is
//! out of use until the late write came or the connection ended; nothing is registered after a channel was
//! connected; what a peer can write is copied, checked, then used.
//!
//! Source: spec/rmongo.md 3.1 to 3.6, 3.11, 3.12.

#![forbid(unsafe_code)]

pub mod buffers;
pub mod client;
pub mod greeting;
pub mod indices;
pub mod message;
pub mod numbers;
pub mod pool;
pub mod register;
pub mod server;

mod area;
mod client_connect;
mod planted;

#[cfg(test)]
mod tests;

pub use client::{ChannelClient, ClientCounters, ClientOptions, Outcome, RequestError, Submit};
pub use client_connect::{ConnectError, Exchange, connect};
pub use greeting::{Detected, Greeting, RnicInfo, detect};
pub use message::{Immediate, Message, MessageError, MessageType};
pub use pool::ReplyBuffer;
pub use register::{Load, Meters, ProcMeters, RegisterOptions, register_size};
pub use server::{
    Answer, ChannelId, ChannelServer, Handler, Incoming, ServerCounters, ServerOptions,
};
