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
//! - [`window`]: what hardware must offer, and windows over mapped memory; [`posting`]: posted
//!   writes as hardware may treat them.
//! - `layout`: the bytes of a window; `heap`: regions that lie in it.
//! - `channel`: one partition as a byte stream; `link`: partitions, coming up, going down.
//! - `cable`: the emulation between processes of one host; `interrupts`: of a shared-memory device;
//!   `transport`: links, sleeping, waking.
//! - [`detect`]: which bridges this host has.
//!
//! Rules: writes cross the link, reads never do; a word that announces bytes is posted behind a
//! fence; what the peer wrote is copied, validated, then used; what the peer's windows hold when it
//! is gone does not matter to the next life of the link.

pub mod detect;
pub mod posting;
pub mod window;

mod cable;
mod channel;
mod config;
mod device;
mod endpoint;
mod heap;
mod interrupts;
mod layout;
mod link;
#[cfg(test)]
mod sharing_tests;
#[cfg(test)]
mod tests;
mod transport;

pub use config::{FixedWindow, NtbConfig, Port};
pub use device::{NtbDevice, announced};
pub use layout::Side;
pub use link::NodeName;
