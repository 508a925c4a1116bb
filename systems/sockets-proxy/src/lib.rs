//! Connections between hosts over PCIe memory windows, without a kernel connection beneath: the
//! proxy that carries packets (NTP) and the monitor that makes connections (NTM).
//!
//! Place: `systems`, above `sockets` (what programs share with a proxy) and `ntb` (windows).
//! *Absent:* the socket calls themselves (`sockets::packets` and the preload library), kernel
//! connections (a call that the monitor cannot serve is the kernel's).
//!
//! ```text
//!  program ═ queues, blocks ═ partition's thread ═ window ═ partition's thread ═ queues ═ program
//!     └── Unix socket ── monitor ─────────── TCP ─────────── monitor ── Unix socket ──┘
//! ```
//!
//! - [`geometry`]: how a window is divided; [`ring`]: rings in it.
//! - [`flow`]: decisions of a partition (credits, ends, order, placement), without memory or time;
//!   [`partition`], `conduit`: what carries them out; [`thread`]: when, and when it sleeps.
//! - [`handshake`]: the life of a connection as one table; `lives`, [`waits`]: what goes beyond it; `extents`: direct mode; [`message`]: what monitors say;
//!   [`monitor`]: connections; `sessions`: other monitors; `programs`: programs' questions and
//!   knocks; [`peer`]: another host; [`listeners`]: who listens on this host; `status`.
//! - [`config`]: the list of peers; [`keeper`]: what outlives a proxy.

#![forbid(unsafe_op_in_unsafe_fn)]

mod conduit;
pub mod config;
mod extents;
pub mod flow;
pub mod geometry;
pub mod handshake;
pub mod keeper;
pub mod listeners;
mod lives;
pub mod message;
pub mod monitor;
#[cfg(test)]
mod monitor_tests;
pub mod partition;
pub mod peer;
mod programs;
pub mod ring;
mod sessions;
mod status;
pub mod thread;
pub mod waits;

pub use config::{Config, ConfigError};
pub use monitor::{Monitor, MonitorError};
