//! How to open the device.

use std::time::Duration;

use beeline_ntb::Files;
use beeline_ntb::shim::Disorder;

/// What is at the device's end of the link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Port {
    /// An emulation between processes of this host: a cable is plugged in for each peer.
    Emulated {
        /// What the emulation does to posted writes; `None` leaves them to the processor.
        disorder: Option<Disorder>,
    },
    /// A fixed window in files that can be mapped.
    Fixed(FixedWindow),
}

/// A window in files, or a part of one: the resource file of a PCI device, of a shared-memory device in a virtual
/// machine, or a plain file of this host.
pub type FixedWindow = Files;

/// How to open the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NtbConfig {
    /// The link. Default: emulated, in order.
    pub port: Port,
    /// Bytes of one partition's ring, a power of two from 4 KiB to 64 MiB; both ends of a fixed
    /// window take the same. Default 64 KiB.
    pub ring_bytes: usize,
    /// Most partitions of one window, a power of two; each end opens half of them, and each queue
    /// pair takes one. Default 64.
    pub partitions: usize,
    /// Bytes of the window that [`beeline_fabric::Device::allocate_memory`] gives out. Peers then
    /// write regions over that memory by themselves, without a copy at this end, and *any* program
    /// at the other end of the link can write all of it, whatever the rights of a region. Default
    /// 0: no registered memory lies in the window.
    pub window_memory_bytes: usize,
    /// How long a peer's heartbeat may stand still. Default 5 s.
    pub silence: Duration,
}

impl Default for NtbConfig {
    fn default() -> Self {
        Self {
            port: Port::Emulated { disorder: None },
            ring_bytes: 64 << 10,
            partitions: 64,
            window_memory_bytes: 0,
            silence: Duration::from_secs(5),
        }
    }
}
