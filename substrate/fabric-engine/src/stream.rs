//! What a provider brings: byte streams between queue pairs, and a way to dial and accept them.
//!
//! Registered memory may be written by peers at any moment, so it is never a `&[u8]`: a stream
//! moves bytes by address and length.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{ConnectInfo, DeviceAttributes, FabricError};
use beeline_os::memory::MemoryObject;

use crate::handshake::Identity;

/// How long a sleeping receive sleeps at most before it looks around.
pub const BLOCKING_SLICE: Duration = Duration::from_millis(250);

/// A piece of memory for one gather or scatter call.
pub type Part = libc::iovec;

/// An address and a length as one part.
#[must_use]
pub fn part(base: *mut u8, length: usize) -> Part {
    Part { iov_base: base.cast(), iov_len: length }
}

/// What a call that may not sleep came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// So many bytes (not zero).
    Bytes(usize),
    /// Nothing to move now.
    Later,
    /// The peer closed its half, or the connection broke.
    Closed,
}

/// Tells, from any thread and without a system call, whether driving a stream may move something.
pub trait Watch: Send + Sync + Debug {
    /// True when there is something to look at; a false alarm costs a look.
    fn has_news(&self) -> bool;
}

/// One ordered, reliable byte stream to a peer's queue pair. Owned by one engine, behind its lock.
pub trait Stream: Send + Debug {
    /// Becomes readable (level-triggered) when there may be something to move; for streams that
    /// are polled ([`Transport::is_polled`]), only after [`Transport::before_sleep`].
    fn readiness(&self) -> BorrowedFd<'_>;

    /// For streams that are polled: how to ask for news without the engine's lock.
    fn watch(&self) -> Option<Arc<dyn Watch>> {
        None
    }

    /// For a dialled stream: `None` while the attempt runs, else how it ended.
    fn connected(&mut self) -> Option<io::Result<()>>;

    /// Sets what a connection in use needs.
    ///
    /// Errors: the system's; the connection then ends.
    fn prepare(&mut self, transport_timeout: Duration) -> io::Result<()>;

    /// Whether [`Stream::receive`] can sleep.
    fn can_sleep(&self) -> bool {
        false
    }

    /// Tells that bytes wait for room. False when the caller must watch the readiness descriptor
    /// for writing itself.
    fn wants_room(&mut self, _wants: bool) -> bool {
        false
    }

    /// Bytes that a receive would find now, at least. A payload goes straight to its place only as
    /// far as this says, so that no word of it is cut where the stream happens to stop.
    fn available(&mut self) -> usize;

    /// Receives into `parts`, in order. With `sleep`, waits up to [`BLOCKING_SLICE`] for a byte.
    ///
    /// # Safety
    ///
    /// Every part is memory this process may write, for the length it says, until the call
    /// returns; no Rust reference to it is live.
    unsafe fn receive(&mut self, parts: &mut [Part], sleep: bool) -> Moved;

    /// Sends from `parts`, in order, without sleeping.
    ///
    /// # Safety
    ///
    /// Every part is mapped readable memory, for the length it says, until the call returns.
    unsafe fn send(&mut self, parts: &mut [Part]) -> Moved;

    /// Where a region over `memory` begins in what the peer can write by itself, if it lies there.
    fn placement(&self, _memory: &dyn MemoryObject) -> Option<u64> {
        None
    }

    /// Writes `length` bytes to the place `at` of the peer's memory, ahead of what is sent after.
    /// False where that cannot be reached; the bytes may then be there in part.
    ///
    /// # Safety
    ///
    /// `source` is readable for `length` bytes.
    unsafe fn place(&mut self, _at: u64, _source: *const u8, _length: usize) -> bool {
        false
    }

    /// Says that nothing more will be sent.
    fn finish_sending(&mut self);

    /// Ends both directions.
    fn shut_down(&mut self);

    /// Receives into owned bytes without sleeping.
    fn receive_bytes(&mut self, bytes: &mut [u8]) -> Moved {
        let mut parts = [part(bytes.as_mut_ptr(), bytes.len())];
        // SAFETY: an exclusively borrowed slice, not touched through the reference meanwhile.
        unsafe { self.receive(&mut parts, false) }
    }

    /// Sends owned bytes without sleeping.
    fn send_bytes(&mut self, bytes: &[u8]) -> Moved {
        let mut parts = [part(bytes.as_ptr().cast_mut(), bytes.len())];
        // SAFETY: a borrowed slice; sending only reads it.
        unsafe { self.send(&mut parts) }
    }
}

/// Who may need to be woken for what arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// Somebody sleeps, or may: streams with something to move must become readable.
    Needed,
    /// Everybody who is concerned looks by itself, at least once a millisecond.
    Spared,
}

/// What a look at a transport's events came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// All there was, or as much as one call takes.
    Done,
    /// A caller waits, and there is no descriptor for it.
    NoDescriptor,
}

/// A provider's half of a device: how streams come about. One per device.
pub trait Transport: Send + Sync + Debug {
    /// Limits and traits of the device.
    fn attributes(&self) -> &DeviceAttributes;

    /// True when streams are asked directly, in memory, and are readable only on request: see
    /// [`Stream::watch`] and [`Transport::before_sleep`].
    fn is_polled(&self) -> bool {
        false
    }

    /// Readable when [`Transport::serve`] has something to do.
    fn events(&self) -> BorrowedFd<'_>;

    /// Does what `events` announced, on the library's thread, and adds callers to `accepted`.
    /// Bounded per call. Called once a millisecond too while an application is active, where
    /// streams are polled. `attention` is asked after what `events` announced was taken.
    fn serve(
        &self,
        attention: &dyn Fn() -> Attention,
        accepted: &mut Vec<Box<dyn Stream>>,
    ) -> Served;

    /// Somebody is about to sleep on readiness descriptors. After this returns, every stream with
    /// something to move is readable, now and whenever more arrives, until a later
    /// [`Transport::serve`] with [`Attention::Spared`].
    fn before_sleep(&self) {}

    /// How a peer reaches a queue pair of this device.
    fn connect_info(&self, queue_pair: &Identity) -> ConnectInfo;

    /// Which queue pair a peer's bytes speak of.
    ///
    /// Errors: [`FabricError::BadConnectInfo`].
    fn peer(&self, info: &ConnectInfo) -> Result<Identity, FabricError>;

    /// Begins to reach the peer's device; does not block.
    ///
    /// Errors: [`FabricError::BadConnectInfo`], [`FabricError::System`], [`FabricError::Limit`].
    fn dial(&self, info: &ConnectInfo) -> Result<Box<dyn Stream>, FabricError>;

    /// Memory of the kind this device reaches best, zeroed, page-aligned.
    ///
    /// Errors: [`FabricError::System`].
    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError>;
}
