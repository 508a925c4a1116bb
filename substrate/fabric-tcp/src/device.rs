//! Device and protection domains.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;

use beeline_fabric::{
    Access, CompletionQueue, Device, DeviceAttributes, FabricError, MemoryRegion, ProtectionDomain,
    QueuePair, QueuePairOptions, SharedReceiveQueue,
};
use beeline_os::SharedMemory;
use beeline_os::memory::MemoryObject;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::completion_queue::TcpCompletionQueue;
use crate::connection::Connection;
use crate::engine::{EngineSetup, MAX_GATHER, MAX_INLINE};
use crate::frame::{MAX_MESSAGE_BYTES, MAX_SEND_BYTES};
use crate::library::{FIRST_QUEUE, Library, TOKEN_KICK, TOKEN_LISTENER};
use crate::queue::{QueueState, raise, system};
use crate::queue_pair::TcpQueuePair;
use crate::receive_queue::TcpSharedReceiveQueue;
use crate::region::{RegionTable, random_u64};

/// Deepest send or receive queue.
const MAX_QUEUE_DEPTH: u32 = 1 << 16;
/// Deepest completion queue.
const MAX_COMPLETION_QUEUE_DEPTH: u32 = 1 << 20;

/// How to open the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// Where peers' connections arrive. Default 127.0.0.1 and a port of the kernel's choice: a
    /// wider door is asked for in words.
    pub bind: SocketAddr,
    /// The address told to peers, when it differs from `bind` (several networks, translation).
    /// With `bind` unspecified and none given, the bootstrap exchange fills in the address it
    /// reached the peer at ([`crate::with_host`]).
    pub advertise: Option<IpAddr>,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self { bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0), advertise: None }
    }
}

/// What the library's thread and the application's objects share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) library_set: OwnedFd,
    pub(crate) kick: Arc<OwnedFd>,
    pub(crate) listener: OwnedFd,
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
    /// As told to peers.
    pub(crate) address: SocketAddr,
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
        let _ = epoll::delete(&self.shared.library_set, queue.sockets());
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

/// The provider, opened. One listener and one thread, asleep unless needed.
#[derive(Debug)]
pub struct TcpDevice {
    handle: Arc<DeviceHandle>,
    attributes: DeviceAttributes,
}

fn listen(bind: SocketAddr) -> Result<(OwnedFd, SocketAddr), FabricError> {
    let family = if bind.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let listener = rustix::net::socket_with(family, SocketType::STREAM, flags, None)
        .map_err(system("making the listener's socket"))?;
    sockopt::set_socket_reuseaddr(&listener, true).map_err(system("setting SO_REUSEADDR"))?;
    rustix::net::bind(&listener, &bind).map_err(system("binding the listener"))?;
    rustix::net::listen(&listener, 1024).map_err(system("listening"))?;
    let name = rustix::net::getsockname(&listener).map_err(system("asking the listener's port"))?;
    let address = SocketAddr::try_from(name).map_err(system("reading the listener's address"))?;
    Ok((listener, address))
}

impl TcpDevice {
    /// Opens the device: binds, listens, starts the library's thread.
    ///
    /// Errors: [`FabricError::System`] (address in use or not ours, descriptor limits).
    pub fn open(config: TcpConfig) -> Result<Arc<dyn Device>, FabricError> {
        Ok(Self::open_concrete(config)?)
    }

    /// As [`TcpDevice::open`], with the concrete type.
    ///
    /// Errors: as there.
    pub fn open_concrete(config: TcpConfig) -> Result<Arc<Self>, FabricError> {
        let (listener, bound) = listen(config.bind)?;
        let address = SocketAddr::new(config.advertise.unwrap_or(bound.ip()), bound.port());
        let library_set = epoll::create(CreateFlags::CLOEXEC).map_err(system("creating epoll"))?;
        let kick = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(system("creating an eventfd"))?;
        for (source, token) in [(&listener, TOKEN_LISTENER), (&kick, TOKEN_KICK)] {
            epoll::add(&library_set, source, EventData::new_u64(token), EventFlags::IN)
                .map_err(system("epoll_ctl"))?;
        }
        let shared = Arc::new(Shared {
            library_set,
            kick: Arc::new(kick),
            listener,
            stop: AtomicBool::new(false),
            queues: Mutex::default(),
            queues_version: AtomicU64::new(0),
            queues_adopted: AtomicU64::new(0),
            connections: Mutex::default(),
        });
        let library = Library::new(Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name("beeline-tcp".to_owned())
            .spawn(move || library.run())
            .map_err(|source| FabricError::System { action: "starting a thread", source })?;
        let handle = Arc::new(DeviceHandle {
            shared,
            regions: Arc::default(),
            address,
            next_qp_num: AtomicU32::new(1),
            next_domain: AtomicU64::new(1),
            next_queue: AtomicU64::new(FIRST_QUEUE),
            thread: Mutex::new(Some(thread)),
        });
        let attributes = DeviceAttributes {
            provider: "tcp",
            max_message_bytes: MAX_MESSAGE_BYTES,
            max_send_bytes: MAX_SEND_BYTES,
            max_inline_bytes: MAX_INLINE as u32,
            max_scatter_gather_entries: MAX_GATHER as u32,
            max_queue_depth: MAX_QUEUE_DEPTH,
            max_completion_queue_depth: MAX_COMPLETION_QUEUE_DEPTH,
            one_sided: false,
            persistent_flush: "the target's thread makes the range persistent, then acknowledges",
        };
        Ok(Arc::new(Self { handle, attributes }))
    }

    /// Where peers' connections arrive, as told to them.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.handle.address
    }
}

fn within(what: &'static str, requested: u32, limit: u32) -> Result<(), FabricError> {
    if requested == 0 || requested > limit {
        let (requested, limit) = (u64::from(requested), u64::from(limit));
        return Err(FabricError::Limit { what, requested, limit });
    }
    Ok(())
}

impl Device for TcpDevice {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        let memory = SharedMemory::allocate("beeline-tcp", length_bytes).map_err(|error| {
            FabricError::System { action: "allocating memory", source: error.into() }
        })?;
        Ok(Arc::new(memory))
    }

    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        let number = self.handle.next_domain.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(TcpProtectionDomain { handle: Arc::clone(&self.handle), number }))
    }

    fn create_completion_queue(
        &self,
        depth_entries: u32,
    ) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        within("completion queue depth", depth_entries, MAX_COMPLETION_QUEUE_DEPTH)?;
        let handle = &self.handle;
        let token = handle.next_queue.fetch_add(1, Ordering::Relaxed);
        let kick = Arc::clone(&handle.shared.kick);
        let state = Arc::new(QueueState::new(token, depth_entries, kick)?);
        let mut queues = handle.shared.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.push(Arc::clone(&state));
        drop(queues);
        handle.shared.queues_changed();
        Ok(Rc::new(TcpCompletionQueue::new(state, Arc::clone(handle))))
    }
}

/// A protection domain: a number that regions and queue pairs share.
#[derive(Debug)]
struct TcpProtectionDomain {
    handle: Arc<DeviceHandle>,
    number: u64,
}

fn own_queue<'a>(
    queue: &'a Rc<dyn CompletionQueue>,
    handle: &Arc<DeviceHandle>,
) -> Result<&'a TcpCompletionQueue, FabricError> {
    queue
        .as_any()
        .downcast_ref::<TcpCompletionQueue>()
        .filter(|queue| Arc::ptr_eq(queue.device(), handle))
        .ok_or(FabricError::Unsupported {
            provider: "tcp",
            what: "completion queues of another device",
        })
}

impl ProtectionDomain for TcpProtectionDomain {
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
        Ok(Rc::new(TcpSharedReceiveQueue::new(depth, regions, self.number)))
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
                    provider: "tcp",
                    what: "shared receive queues of another provider",
                };
                let own = queue.as_any().downcast_ref::<TcpSharedReceiveQueue>().ok_or(foreign)?;
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
        Ok(Box::new(TcpQueuePair::new(connection, queues, Arc::clone(&self.handle), options)))
    }
}
