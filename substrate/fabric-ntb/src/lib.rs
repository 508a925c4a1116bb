//! Fabric provider over PCIe non-transparent bridges: memory windows with posted writes, doorbells
//! and scratchpads.
//!
//! Place: `substrate`, beside the other providers, above `fabric-engine`, which holds everything
//! about queue pairs over byte streams. This crate makes byte streams out of windows.
//!
//! ```text
//!  queue pair ─ channel ─ ring in the peer's window ┐            ┌ the same, mirrored
//!  queue pair ─ channel ─ ring in the peer's window ┼─ window ───┼
//!               link: epochs, partitions, heartbeat ┘  doorbell  └
//! ```
//!
//! - `window`: the window of [`beeline_ntb`], which has the memory, the doorbells, the emulations and the parts of a
//!   shared device, as this provider uses it.
//! - `layout`: the bytes of a window; `heap`: regions that lie in it.
//! - `channel`: one partition as a byte stream; `link`: partitions, coming up, going down.
//! - `transport`: links, sleeping, waking.
//! - [`detect`]: which bridges this host has.
//!
//! Rules: writes cross the link, reads never do; a word that announces bytes is posted behind a
//! fence; what the peer wrote is copied, validated, then used; what the peer's windows hold when it
//! is gone does not matter to the next life of the link.

pub mod detect;

mod channel;
mod config;
mod device;
mod endpoint;
mod heap;
mod layout;
mod link;
#[cfg(test)]
mod sharing_tests;
#[cfg(test)]
mod tests;
mod transport;
mod window;

pub use beeline_ntb::shim::{Disorder, Pace};
pub use beeline_ntb::{Portion, Side};
pub use config::{FixedWindow, NtbConfig, Port};
pub use device::{NtbDevice, announced};
pub use link::NodeName;
