//! One object from one store to another, over one queue pair (spec sections 3.4 to 3.6).
//!
//! ```text
//!  puller                                   server
//!  PULL id, sizes to read ──────────────►   takes a reference
//!  small:  ◄─────────── DATA sizes          copies into registered buffers
//!          ◄─────────── PIECE PIECE PIECE
//!          ACK bytes ──────────────────►    at most a window is unacknowledged
//!  large:  ◄─────────── READ sizes, offset, key of the segment it lies in
//!          one-sided read, no copy
//!  FIN ─────────────────────────────────►   gives the reference back
//! ```
//!
//! What is about to be read may come over a plain socket instead, where that is known to be faster:
//! the puller then ends the transfer with FIN and asks there.
//!
//! Both ends are driven by their caller ([`Serving::progress`], [`Pulling::progress`]); neither
//! blocks, so that one thread can run many of them in simulated time.
//!
//! Invariants: every message is copied, checked, then used; a receive is posted again before its
//! message is answered; what a queue pair's end leaves behind (a reference, an unsealed object) is
//! given back when the value is dropped; an object that was read is sealed only within the time that
//! its server holds it, because some providers read on where a server has let go.

mod channel;
mod learn;
mod message;
mod pulling;
mod serving;
#[cfg(test)]
mod simulation;

use std::any::Any;

use beeline_fabric::MemoryRegion;

pub(crate) use channel::{Context, Line};
pub(crate) use learn::{Learner, Plan, Protocol};
pub(crate) use message::{Header, Kind};
pub(crate) use pulling::{Outcome, Pulling};
pub(crate) use serving::Serving;

use crate::id::ObjectId;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransferError {
    /// The fabric failed; the connection is over.
    #[error(transparent)]
    Fabric(#[from] beeline_fabric::FabricError),
    /// The peer is gone, or a request failed.
    #[error("the peer is gone: {status:?}")]
    Peer { status: beeline_fabric::Status },
    /// The object was read, later than the peer holds it for us.
    #[error("the object came later than its peer holds it: it may have read another")]
    Late,
    /// The peer said what makes no sense.
    #[error("the peer broke the protocol: {what}")]
    Protocol { what: &'static str },
}

/// A sealed object that a peer may take.
pub(crate) struct Lent {
    /// Where it lies.
    pub region: MemoryRegion,
    pub offset: u64,
    pub size: u64,
    pub metadata_size: u64,
    pub checksum: Option<u32>,
    /// Keeps the object until dropped.
    pub _hold: Box<dyn Any>,
}

/// An object that is coming in. Dropped unsealed, the object is given up.
pub(crate) struct Made {
    pub region: MemoryRegion,
    pub offset: u64,
    pub seal: Box<dyn Seal>,
}

/// Ends the writing of an object.
pub(crate) trait Seal {
    /// Makes the object immutable and visible.
    fn seal(self: Box<Self>, checksum: Option<u32>) -> Result<(), String>;
}

/// Why an object cannot be made here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotMade {
    /// It is here, or somebody makes it.
    Exists,
    /// No room, or the store is gone.
    Failed(String),
}

/// The store at this end.
pub(crate) trait Shelf {
    /// A reference to a sealed object; nothing when it is not here.
    fn lend(&mut self, id: ObjectId) -> Option<Lent>;

    /// Memory for an object that comes in.
    fn make(&mut self, id: ObjectId, size: u64, metadata_size: u64) -> Result<Made, NotMade>;

    /// Seals an object that is here whole: its data, `size` bytes, and its metadata behind them.
    fn put(
        &mut self,
        id: ObjectId,
        bytes: &[u8],
        size: u64,
        checksum: Option<u32>,
    ) -> Result<(), NotMade>;

    /// An object will be sealed in a moment.
    fn rouse(&mut self);
}
