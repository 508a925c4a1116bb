//! Work requests: what is posted.

use crate::region::{MemoryRegion, RemoteAddress};

/// A range of a local region. Borrowed while posting; a provider that defers keeps its own handle.
#[derive(Clone, Copy, Debug)]
pub struct ScatterGatherEntry<'a> {
    /// The region.
    pub region: &'a MemoryRegion,
    /// Bytes from its start.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Where the bytes of an outgoing operation come from.
#[derive(Clone, Copy, Debug)]
pub enum LocalData<'a> {
    /// Copied before the post returns; at most [`crate::DeviceAttributes::max_inline_bytes`].
    Inline(&'a [u8]),
    /// Gathered from registered memory, which stays unchanged until the completion; at most
    /// [`crate::DeviceAttributes::max_scatter_gather_entries`] entries.
    Gather(&'a [ScatterGatherEntry<'a>]),
}

impl LocalData<'_> {
    /// Total bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Gather(entries) => {
                entries.iter().fold(0_u64, |sum, entry| sum.saturating_add(entry.length))
            }
        }
    }
}

/// What a flush guarantees when it completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlushKind {
    /// Earlier writes to the range are visible to the target's processor.
    Visible,
    /// Earlier writes to the range survive a loss of power at the target.
    Persistent,
}

/// One operation of a queue pair.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    /// Places local bytes at the remote address.
    Write {
        /// Source.
        local: LocalData<'a>,
        /// Destination.
        remote: RemoteAddress,
    },
    /// As `Write`; then consumes one receive at the target and delivers `immediate` there.
    WriteWithImmediate {
        /// Source.
        local: LocalData<'a>,
        /// Destination.
        remote: RemoteAddress,
        /// Delivered in the target's completion.
        immediate: u32,
    },
    /// Places remote bytes in local memory.
    Read {
        /// Destination; its length is the length read.
        local: ScatterGatherEntry<'a>,
        /// Source.
        remote: RemoteAddress,
    },
    /// Consumes one receive at the target and places the bytes there. At most
    /// [`crate::DeviceAttributes::max_send_bytes`].
    Send {
        /// Source.
        local: LocalData<'a>,
        /// Delivered in the target's completion, if any.
        immediate: Option<u32>,
    },
    /// Stores `desired` if the 8-byte word equals `expected`; places the old value in `local`.
    CompareAndSwap {
        /// 8 bytes for the old value (native byte order).
        local: ScatterGatherEntry<'a>,
        /// The word; offset a multiple of 8.
        remote: RemoteAddress,
        /// Compared with the word.
        expected: u64,
        /// Stored on equality.
        desired: u64,
    },
    /// Adds to the 8-byte word, wrapping; places the old value in `local`.
    FetchAndAdd {
        /// 8 bytes for the old value (native byte order).
        local: ScatterGatherEntry<'a>,
        /// The word; offset a multiple of 8.
        remote: RemoteAddress,
        /// Added.
        addend: u64,
    },
    /// Completes when earlier writes of this queue pair to the range are visible or persistent.
    Flush {
        /// Start of the range.
        remote: RemoteAddress,
        /// Bytes.
        length: u64,
        /// Which guarantee.
        kind: FlushKind,
    },
}

/// One entry of a post.
#[derive(Clone, Copy, Debug)]
pub struct WorkRequest<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// What to do.
    pub operation: Operation<'a>,
    /// Whether success produces a completion. Failure always does.
    pub signalled: bool,
}

impl<'a> WorkRequest<'a> {
    /// A signalled request.
    #[must_use]
    pub fn new(wr_id: u64, operation: Operation<'a>) -> Self {
        Self { wr_id, operation, signalled: true }
    }

    /// A request whose success is silent.
    #[must_use]
    pub fn unsignalled(wr_id: u64, operation: Operation<'a>) -> Self {
        Self { wr_id, operation, signalled: false }
    }
}

/// A buffer for one incoming message. A zero-length entry suits writes with immediate.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// Where the message goes; `None` for a receive that only takes immediates.
    pub buffer: Option<ScatterGatherEntry<'a>>,
}
