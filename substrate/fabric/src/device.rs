//! The objects: device, protection domain, completion queue, queue pair, shared receive queue.
//!
//! Control objects (`Device`, `ProtectionDomain`) are `Send + Sync` and reference-counted. Data
//! objects (`CompletionQueue`, `QueuePair`, `SharedReceiveQueue`) stay on one thread: they are
//! made there, and a queue pair uses completion queues of its own thread. That is what lets `post`
//! and `poll` run without locks.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_os::memory::MemoryObject;

use crate::completion::WorkCompletion;
use crate::error::{FabricError, PostError};
use crate::hold::Hold;
use crate::region::{Access, MemoryRegion, RemoteAddress};
use crate::work::{ReceiveRequest, WorkRequest};

/// With what a device's compare-and-swap and fetch-and-add on its own memory are atomic. A device
/// that has none is no device of fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtomicScope {
    /// With each other.
    Device,
    /// Also with atomics of this machine's processors on the same memory.
    Processor,
}

/// Limits and traits of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// "shm", "tcp", "sim", ...
    pub provider: &'static str,
    /// Largest one-sided operation, bytes.
    pub max_message_bytes: u64,
    /// Largest send, bytes.
    pub max_send_bytes: u64,
    /// Largest inline data, bytes.
    pub max_inline_bytes: u32,
    /// Most entries of one gather list.
    pub max_scatter_gather_entries: u32,
    /// Deepest send or receive queue, requests.
    pub max_queue_depth: u32,
    /// Deepest completion queue, entries.
    pub max_completion_queue_depth: u32,
    /// True when remote operations run without any code at the target.
    pub one_sided: bool,
    /// With what atomics on memory registered here are atomic. Where the memory's owner changes the
    /// same words by instructions of its own, or registers them with several devices, it has to be
    /// [`AtomicScope::Processor`].
    pub atomics: AtomicScope,
    /// How a persistent flush is done, in words, for `doctor`.
    pub persistent_flush: &'static str,
}

/// Bytes that tell a peer how to reach a queue pair; carried by the bootstrap exchange and opaque
/// to everyone but the provider, which treats them as hostile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectInfo(pub Vec<u8>);

impl ConnectInfo {
    /// More is refused unread.
    pub const MAX_BYTES: usize = 1024;
}

/// Which end of a connection this is; the two ends take different ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Dials.
    Active,
    /// Is dialled.
    Passive,
}

/// Life of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueuePairState {
    /// Made; receives may be posted.
    Init,
    /// Connected.
    ReadyToSend,
    /// Broken or disconnected for good; make a new one to reconnect.
    Error,
}

/// How to make a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairOptions {
    /// Send requests outstanding. Default 128.
    pub send_depth: u32,
    /// Receives posted. Default 128. Ignored with a shared receive queue.
    pub receive_depth: u32,
    /// How long a send or write-with-immediate waits for a posted receive before it fails with
    /// [`crate::Status::ReceiverNotReady`]. Default 1 s.
    pub receiver_not_ready_timeout: Duration,
    /// How long a silent peer may hold up an outstanding request before it fails with
    /// [`crate::Status::TransportError`], on providers where the peer must answer. Default 10 s.
    pub transport_timeout: Duration,
    /// The caller's own, in every completion of the queue pair ([`WorkCompletion::context`]): where
    /// its state is, for callers with many. Default 0.
    pub context: u64,
}

impl Default for QueuePairOptions {
    fn default() -> Self {
        Self {
            send_depth: 128,
            receive_depth: 128,
            receiver_not_ready_timeout: Duration::from_secs(1),
            transport_timeout: Duration::from_secs(10),
            context: 0,
        }
    }
}

/// A provider, opened.
pub trait Device: Send + Sync + Debug {
    /// Limits.
    fn attributes(&self) -> &DeviceAttributes;

    /// True once the device itself failed or was removed: nothing made from it works any more, and
    /// what was outstanding ended. Drop it with everything made from it and open it anew; that
    /// succeeds when it is back. A device without hardware is never lost.
    fn is_lost(&self) -> bool {
        false
    }

    /// Memory of the kind this device reaches best, zeroed, page-aligned.
    ///
    /// Errors: [`FabricError::System`].
    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError>;

    /// A new protection domain.
    ///
    /// Errors: [`FabricError::System`].
    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError>;

    /// A completion queue for the calling thread.
    ///
    /// Errors: [`FabricError::Limit`], [`FabricError::System`].
    fn create_completion_queue(
        &self,
        depth_entries: u32,
    ) -> Result<Rc<dyn CompletionQueue>, FabricError>;
}

/// Regions and queue pairs that may work together.
pub trait ProtectionDomain: Send + Sync + Debug {
    /// Registers all of `memory`.
    ///
    /// Errors: [`FabricError::CannotRegister`] when remote rights need a shareable object and the
    /// memory has none.
    fn register(
        &self,
        memory: Arc<dyn MemoryObject>,
        access: Access,
    ) -> Result<MemoryRegion, FabricError>;

    /// A shared receive queue for the calling thread.
    ///
    /// Errors: [`FabricError::Limit`].
    fn create_shared_receive_queue(
        &self,
        depth: u32,
    ) -> Result<Rc<dyn SharedReceiveQueue>, FabricError>;

    /// A queue pair for the calling thread. Both completion queues belong to the same thread and
    /// device; they may be the same one.
    ///
    /// Errors: [`FabricError::Limit`], [`FabricError::System`].
    fn create_queue_pair(
        &self,
        send_queue: &Rc<dyn CompletionQueue>,
        receive_queue: &Rc<dyn CompletionQueue>,
        shared_receive_queue: Option<&Rc<dyn SharedReceiveQueue>>,
        options: QueuePairOptions,
    ) -> Result<Box<dyn QueuePair>, FabricError>;
}

/// Where completions arrive. Stays on its thread.
pub trait CompletionQueue: Debug {
    /// Moves completions into `completions`; returns how many. Also drives deferred work of the
    /// queue pairs bound to it. Neither blocks nor allocates.
    ///
    /// Errors: [`FabricError::CompletionQueueOverrun`], from then on, always.
    fn poll(&self, completions: &mut [WorkCompletion]) -> Result<usize, FabricError>;

    /// Asks for one event on [`CompletionQueue::event_descriptor`] when a completion arrives, or
    /// deferred work needs driving, after this call. Poll once more after arming: what arrived
    /// before produces no event.
    ///
    /// Errors: [`FabricError::System`].
    fn arm(&self) -> Result<(), FabricError>;

    /// Readable when an armed queue has an event. Level-triggered until
    /// [`CompletionQueue::acknowledge`].
    fn event_descriptor(&self) -> BorrowedFd<'_>;

    /// Clears the event. Call it after the descriptor became readable, before polling.
    ///
    /// Errors: [`FabricError::System`].
    fn acknowledge(&self) -> Result<(), FabricError>;

    /// Polls until at least one completion arrived or `timeout` passed; sleeps in between. In
    /// simulation, time is virtual.
    ///
    /// Errors: as `poll` and `arm`.
    fn wait(
        &self,
        completions: &mut [WorkCompletion],
        timeout: Duration,
    ) -> Result<usize, FabricError>;

    /// The concrete queue, for the provider's own use.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// Receives shared by several queue pairs. Stays on its thread.
pub trait SharedReceiveQueue: Debug {
    /// Posts all receives or none.
    ///
    /// Errors: [`PostError`].
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError>;

    /// Receives posted and not consumed.
    fn posted(&self) -> u32;

    /// The concrete queue, for the provider's own use.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// A reliable connection. Stays on its thread. Dropping it disconnects; the peer sees
/// [`crate::Status::Flushed`] or [`crate::Status::TransportError`] on outstanding work.
pub trait QueuePair: Debug {
    /// Local number, as in completions. Unique within the device.
    fn qp_num(&self) -> u32;

    /// Where it is in its life.
    fn state(&self) -> QueuePairState;

    /// How a peer reaches this queue pair. One peer, once.
    fn connect_info(&self) -> ConnectInfo;

    /// Connects to the peer's queue pair. Both ends call it, with different roles, once they have
    /// exchanged their [`ConnectInfo`]. Does not block: the state turns to
    /// [`QueuePairState::ReadyToSend`], or to `Error`, while the completion queue is polled; see
    /// [`QueuePair::wait_connected`].
    ///
    /// Errors: [`FabricError::BadConnectInfo`], [`FabricError::WrongState`],
    /// [`FabricError::System`].
    fn connect(&mut self, peer: &ConnectInfo, role: Role) -> Result<(), FabricError>;

    /// Blocks until connected.
    ///
    /// Errors: [`FabricError::ConnectTimeout`], [`FabricError::PeerGone`].
    fn wait_connected(&mut self, timeout: Duration) -> Result<(), FabricError>;

    /// Posts all requests or none, in order.
    ///
    /// Errors: [`PostError`]; nothing was posted then. Errors of execution come as completions.
    fn post_send(&mut self, requests: &[WorkRequest<'_>]) -> Result<(), PostError>;

    /// Says that a write of about `length` bytes to `remote` will be posted soon. A hint, that a
    /// provider may act on or not; it changes nothing else.
    fn expect_write(&mut self, _remote: RemoteAddress, _length: u64) {}

    /// Says that several posts follow at once, until the guard is dropped: a provider may keep what
    /// it posts from the peer until then, so that the peer finds all of it at one look. A hint as
    /// [`QueuePair::expect_write`]. Holds may nest; what was posted goes out with the last of them.
    fn hold(&mut self) -> Hold {
        Hold::none()
    }

    /// Posts all receives or none. Allowed before connecting.
    ///
    /// Errors: [`PostError`]; also when the queue pair uses a shared receive queue
    /// ([`PostError::TooLarge`] with limit 0).
    fn post_receive(&mut self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError>;

    /// Disconnects and takes everything the peer could reach through this queue pair away from
    /// it: after it returns, nothing that peer does, not even a call it was in the middle of,
    /// changes memory of this process. The state is then `Error`. May copy regions (shm).
    ///
    /// Errors: [`FabricError`]; the peer may then still write.
    fn revoke(&mut self) -> Result<(), FabricError>;
}
