//! Device and protection domains.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;

use beeline_fabric::error::{system, within};
use beeline_fabric::{
    Access, AtomicScope, CompletionQueue, Device, DeviceAttributes, FabricError, MemoryRegion,
    ProtectionDomain, QueuePair, QueuePairOptions, SharedReceiveQueue,
};
use beeline_os::memory::MemoryObject;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};

use crate::completion_queue::EngineCompletionQueue;
use crate::connection::Connection;
use crate::engine::{EngineSetup, MAX_GATHER, MAX_INLINE};
use crate::frame::{MAX_MESSAGE_BYTES, MAX_SEND_BYTES};
use crate::library::{FIRST_QUEUE, Library, TOKEN_KICK, TOKEN_TRANSPORT};
use crate::queue::{QueueState, raise};
use crate::queue_pair::EngineQueuePair;
use crate::receive_queue::EngineSharedReceiveQueue;
use crate::region::{RegionTable, random_u64};
use crate::stream::Transport;

/// Deepest send or receive queue.
const MAX_QUEUE_DEPTH: u32 = 1 << 16;
/// Deepest completion queue.
const MAX_COMPLETION_QUEUE_DEPTH: u32 = 1 << 20;

/// What every device over this engine can do, with `provider` and `persistent_flush` in its own
/// words.
#[must_use]
pub fn attributes(provider: &'static str, persistent_flush: &'static str) -> DeviceAttributes {
    DeviceAttributes {
        provider,
        max_message_bytes: MAX_MESSAGE_BYTES,
        max_send_bytes: MAX_SEND_BYTES,
        max_inline_bytes: MAX_INLINE as u32,
        max_scatter_gather_entries: MAX_GATHER as u32,
        max_queue_depth: MAX_QUEUE_DEPTH,
        max_completion_queue_depth: MAX_COMPLETION_QUEUE_DEPTH,
        one_sided: false,
        atomics: AtomicScope::Processor,
        persistent_flush,
    }
}

/// What the library's thread and the application's objects share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) thread_set: OwnedFd,
    pub(crate) kick: Arc<OwnedFd>,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) stop: AtomicBool,
    pub(crate) queues: Mutex<Vec<Arc<QueueState>>>,
    /// Counts changes of `queues`.
    pub(crate) queues_version: AtomicU64,
    /// The version the library has seen; its own.
    pub(crate) queues_adopted: AtomicU64,
    connections: Mutex<HashMap<u32, Weak<Connection>>>,
}

impl Shared {
    /// The queue pair of that number.
    pub(crate) fn connection(&self, qp_num: u32) -> Option<Weak<Connection>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner).get(&qp_num).cloned()
    }

    fn queues_changed(&self) {
        self.queues_version.fetch_add(1, Ordering::Release);
        raise(&self.kick);
    }
}

/// Owns the library's thread; every object of the device holds it.
#[derive(Debug)]
pub(crate) struct DeviceHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) regions: Arc<RegionTable>,
    next_qp_num: AtomicU32,
    next_domain: AtomicU64,
    next_queue: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl DeviceHandle {
    pub(crate) fn forget_connection(&self, qp_num: u32) {
        self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner).remove(&qp_num);
    }

    pub(crate) fn forget_queue(&self, queue: &Arc<QueueState>) {
        let _ = epoll::delete(&self.shared.thread_set, queue.streams());
        let mut queues = self.shared.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|known| !Arc::ptr_eq(known, queue));
        drop(queues);
        self.shared.queues_changed();
    }
}

impl Drop for DeviceHandle {
    fn drop(&mut self) {
        // Release: pairs with the acquire load of the library's loop.
        self.shared.stop.store(true, Ordering::Release);
        raise(&self.shared.kick);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// A device over a provider's transport. One thread, asleep unless needed.
#[derive(Debug)]
pub struct EngineDevice {
    handle: Arc<DeviceHandle>,
}

impl EngineDevice {
    /// Starts the library's thread, called `beeline-` and the provider's name.
    ///
    /// Errors: [`FabricError::System`] (descriptor limits, no thread).
    pub fn start(transport: Arc<dyn Transport>) -> Result<Self, FabricError> {
        let thread_set = epoll::create(CreateFlags::CLOEXEC).map_err(system("creating epoll"))?;
        let kick = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(system("creating an eventfd"))?;
        let add = |source, token| {
            epoll::add(&thread_set, source, EventData::new_u64(token), EventFlags::IN)
                .map_err(system("epoll_ctl"))
        };
        add(transport.events(), TOKEN_TRANSPORT)?;
        add(kick.as_fd(), TOKEN_KICK)?;
        let name = format!("beeline-{}", transport.attributes().provider);
        let shared = Arc::new(Shared {
            thread_set,
            kick: Arc::new(kick),
            transport,
            stop: AtomicBool::new(false),
            queues: Mutex::default(),
            queues_version: AtomicU64::new(0),
            queues_adopted: AtomicU64::new(0),
            connections: Mutex::default(),
        });
        let library = Library::new(Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || library.run())
            .map_err(|source| FabricError::System { action: "starting a thread", source })?;
        let handle = Arc::new(DeviceHandle {
            shared,
            regions: Arc::default(),
            next_qp_num: AtomicU32::new(1),
            next_domain: AtomicU64::new(1),
            next_queue: AtomicU64::new(FIRST_QUEUE),
            thread: Mutex::new(Some(thread)),
        });
        Ok(Self { handle })
    }
}

impl Device for EngineDevice {
    fn attributes(&self) -> &DeviceAttributes {
        self.handle.shared.transport.attributes()
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        self.handle.shared.transport.allocate_memory(length_bytes)
    }

    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        let number = self.handle.next_domain.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(EngineProtectionDomain { handle: Arc::clone(&self.handle), number }))
    }

    fn create_completion_queue(
        &self,
        depth_entries: u32,
    ) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        within("completion queue depth", depth_entries, MAX_COMPLETION_QUEUE_DEPTH)?;
        let handle = &self.handle;
        let token = handle.next_queue.fetch_add(1, Ordering::Relaxed);
        let kick = Arc::clone(&handle.shared.kick);
        let transport = Arc::clone(&handle.shared.transport);
        let state = Arc::new(QueueState::new(token, depth_entries, kick, transport)?);
        let mut queues = handle.shared.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.push(Arc::clone(&state));
        drop(queues);
        handle.shared.queues_changed();
        Ok(Rc::new(EngineCompletionQueue::new(state, Arc::clone(handle))))
    }
}

/// A protection domain: a number that regions and queue pairs share.
#[derive(Debug)]
struct EngineProtectionDomain {
    handle: Arc<DeviceHandle>,
    number: u64,
}

fn own_queue<'a>(
    queue: &'a Rc<dyn CompletionQueue>,
    handle: &Arc<DeviceHandle>,
) -> Result<&'a EngineCompletionQueue, FabricError> {
    queue
        .as_any()
        .downcast_ref::<EngineCompletionQueue>()
        .filter(|queue| Arc::ptr_eq(queue.device(), handle))
        .ok_or(FabricError::Unsupported {
            provider: handle.shared.transport.attributes().provider,
            what: "completion queues of another device",
        })
}

impl ProtectionDomain for EngineProtectionDomain {
    fn register(
        &self,
        memory: Arc<dyn MemoryObject>,
        access: Access,
    ) -> Result<MemoryRegion, FabricError> {
        self.handle.regions.register(memory, access, self.number)
    }

    fn create_shared_receive_queue(
        &self,
        depth: u32,
    ) -> Result<Rc<dyn SharedReceiveQueue>, FabricError> {
        within("shared receive queue depth", depth, MAX_QUEUE_DEPTH)?;
        let regions = Arc::clone(&self.handle.regions);
        Ok(Rc::new(EngineSharedReceiveQueue::new(depth, regions, self.number)))
    }

    fn create_queue_pair(
        &self,
        send_queue: &Rc<dyn CompletionQueue>,
        receive_queue: &Rc<dyn CompletionQueue>,
        shared_receive_queue: Option<&Rc<dyn SharedReceiveQueue>>,
        options: QueuePairOptions,
    ) -> Result<Box<dyn QueuePair>, FabricError> {
        within("send queue depth", options.send_depth, MAX_QUEUE_DEPTH)?;
        within("receive queue depth", options.receive_depth, MAX_QUEUE_DEPTH)?;
        let send = own_queue(send_queue, &self.handle)?;
        let receive = own_queue(receive_queue, &self.handle)?;
        let shared_receives = match shared_receive_queue {
            None => None,
            Some(queue) => {
                let foreign = FabricError::Unsupported {
                    provider: self.handle.shared.transport.attributes().provider,
                    what: "shared receive queues of another provider",
                };
                let own =
                    queue.as_any().downcast_ref::<EngineSharedReceiveQueue>().ok_or(foreign)?;
                Some(Arc::clone(&own.state))
            }
        };
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&random_u64()?.to_le_bytes());
        nonce[8..].copy_from_slice(&random_u64()?.to_le_bytes());
        let qp_num = self.handle.next_qp_num.fetch_add(1, Ordering::Relaxed);
        let connection = Connection::new(
            EngineSetup {
                qp_num,
                nonce,
                domain: self.number,
                options,
                regions: Arc::clone(&self.handle.regions),
                shared_receives,
                connection: Weak::new(),
            },
            Arc::clone(&send.state),
            Arc::clone(&receive.state),
        );
        self.handle
            .shared
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(qp_num, Arc::downgrade(&connection));
        send.add(&connection);
        if !Rc::ptr_eq(send_queue, receive_queue) {
            receive.add(&connection);
        }
        let queues = (Rc::clone(send_queue), Rc::clone(receive_queue));
        Ok(Box::new(EngineQueuePair::new(connection, queues, Arc::clone(&self.handle), options)))
    }
}
