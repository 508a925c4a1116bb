//! Fabric provider over TCP: the one that works everywhere.
//!
//! Place: `substrate`, beside the other providers, above `fabric-engine`, which holds everything
//! about queue pairs over byte streams.
//!
//! - [`handshake`]: how a queue pair of this provider is named.
//! - `device`: the listener and its configuration.
//! - `socket`: one connection's bytes.

pub mod handshake;

mod device;
mod socket;

pub use beeline_fabric_engine::frame;
pub use device::{TcpConfig, TcpDevice};
pub use handshake::with_host;
