//! Memory windows of PCIe non-transparent bridges, as the part above needs them: memory of the other
//! host that this host writes, memory of its own that the other host writes, a few registers, and
//! doorbells.
//!
//! Place: `substrate`, below whatever carries bytes through a window. *Absent:* any call that reads
//! the other host's memory. A posted write costs the writer next to nothing; a read waits for a
//! round trip over the bus (NTSocks 3.1), and code that cannot be written is never slow.
//!
//! ```text
//!   this host                              the other host
//!   Outbound ── post, post_word, fence ──► its Inbound
//!   Inbound  ◄─────────────────────────── its Outbound
//!   Bells    ── ring(bit) ───────────────► a descriptor that becomes readable
//! ```
//!
//! - [`window`]: both directions, parts of a window, counters of what was written.
//! - [`shim`]: write-combining buffers that reorder what is not fenced, for tests and `?disorder=`.
//! - [`link`]: the scratchpads, and the four steps by which two hosts find each other there.
//! - [`files`]: resource files of devices and plain files; [`directory`]: the parts of a device's window, so that
//!   several users share it; [`cable`]: a part of a window in files, plugged in; `interrupts`: of a shared-memory device.
//! - [`handed`]: the emulation between two processes of one host, handed over on a Unix socket.
//! - [`bells`]: doorbells of the emulation, and latches.
//! - [`extents`]: parts of the memory that programs of the other host may write themselves.
//!
//! Rules: what the other host wrote is copied, checked, then used; a word that announces bytes is
//! posted behind a fence.

pub mod bells;
pub mod cable;
pub mod directory;
pub mod extents;
pub mod files;
pub mod handed;
mod interrupts;
pub mod link;
pub mod shim;
pub mod window;

pub use cable::{Cable, Wants, WindowUrl};
pub use directory::{Directory, Kind, Portion, Refusal};
pub use extents::Extents;
pub use files::{CableError, Files};
pub use link::{Announcement, Event, Link, State};
pub use window::{Bells, Inbound, Outbound, Window};

/// Which half of a window's memory this host reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first.
    First,
    /// The second.
    Second,
}

impl Side {
    /// 0 or 1.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::First => 0,
            Self::Second => 1,
        }
    }

    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }
}
