//! The device and its protection domains.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use beeline_fabric::error::{system, within};
use beeline_fabric::{
    Access, AtomicScope, CompletionQueue, Device, DeviceAttributes, FabricError, MemoryRegion,
    ProtectionDomain, QueuePair, QueuePairOptions, SharedReceiveQueue,
};
use beeline_os::SharedMemory;
use beeline_os::memory::MemoryObject;
use rustix::process::{Resource, getrlimit};

use crate::abi;
use crate::completion_queue::VerbsCompletionQueue;
use crate::discover::{GidEntry, LinkLayer, PortReport, choose, needs_filling, port};
use crate::handle::{
    Context, DeviceList, Domain, Pair, PairShape, Queue, Registration, SharedReceives,
};
use crate::library::{Missing, load};
use crate::options::{VerbsConfig, mtu_code};
use crate::presence::Presence;
use crate::queue_pair::{Parts, VerbsQueuePair};
use crate::receive_queue::VerbsSharedReceiveQueue;
use crate::region::{Pinned, register};
use crate::service::Service;
use crate::shared::Board;
use crate::wake::Wake;

/// Most entries of one gather list, whatever the device has: each costs room in every request.
const MAX_GATHER: u32 = 16;
/// Deepest queue; entry numbers have 24 bits.
const MAX_QUEUE_DEPTH: u32 = 1 << 16;

/// How this device makes writes persistent, for `doctor`.
const FLUSH_BY_READ: &str = "refused: a read behind the writes pushes them out of the network card, \
     and whether they survive from there on the card does not know; verbs://?durable=1 where direct \
     cache access is off for it and the memory is durable (DAX)";
const FLUSH_BY_READ_THOUGH_NATIVE: &str = "refused, as without the device's own FLUSH (which it has, \
     and which is not used yet); verbs://?durable=1 where direct cache access is off and the memory \
     is durable (DAX)";
const FLUSH_BY_READ_VOUCHED: &str = "a read behind the writes pushes them out of the network card; \
     persistent where the memory is (DAX), as durable=1 vouches for the way there";

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// This machine lacks something.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// A call failed.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

impl VerbsError {
    /// True when the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Missing(missing) => missing.is_retryable(),
            Self::Fabric(error) => error.is_retryable(),
        }
    }
}

/// Owns the library's thread; every object of the device holds it.
#[derive(Debug)]
pub(crate) struct DeviceHandle {
    pub(crate) board: Arc<Board>,
    pub(crate) config: VerbsConfig,
    pub(crate) name: String,
    pub(crate) port: PortReport,
    pub(crate) gid: GidEntry,
    /// Path MTU code.
    pub(crate) mtu: u8,
    pub(crate) link_address: SocketAddr,
    pub(crate) max_gather: u32,
    pub(crate) max_inline_bytes: u32,
    pub(crate) max_message_bytes: u64,
    pub(crate) max_completion_queue_depth: u32,
    max_queue_depth: u32,
    max_shared_depth: u32,
    pub(crate) reads_taken: u8,
    pub(crate) reads_made: u8,
    pinned: Arc<Pinned>,
    next_number: AtomicU32,
    next_tag: AtomicUsize,
    next_shared: AtomicU32,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl DeviceHandle {
    pub(crate) fn next_number(&self) -> u32 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn next_tag(&self) -> usize {
        self.next_tag.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn is_ethernet(&self) -> bool {
        self.port.link_layer == Some(LinkLayer::Ethernet)
    }

    pub(crate) fn link_layer_code(&self) -> u8 {
        if self.is_ethernet() { abi::LINK_ETHERNET } else { abi::LINK_INFINIBAND }
    }
}

impl Drop for DeviceHandle {
    fn drop(&mut self) {
        // Release: pairs with the acquire load of the thread's loop.
        self.board.stop.store(true, Ordering::Release);
        self.board.kick.raise();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// The provider, opened: one port of one device, and one thread, asleep unless needed.
#[derive(Debug)]
pub struct VerbsDevice {
    handle: Arc<DeviceHandle>,
    attributes: DeviceAttributes,
}

/// Finds the device, its port and its address.
fn find(config: &VerbsConfig) -> Result<(Context, String, PortReport, GidEntry), Missing> {
    let library = load()?;
    let list = DeviceList::new(library).map_err(|_| Missing::Device)?;
    let names: Vec<String> = (0..list.len()).map(|index| list.name(index)).collect();
    if names.is_empty() {
        return Err(Missing::Device);
    }
    let mut last = None;
    for (index, name) in names.iter().enumerate() {
        if config.device.as_ref().is_some_and(|wanted| wanted != name) {
            continue;
        }
        let refused = |reason: String| Missing::Port { device: name.clone(), reason };
        if !list.is_infiniband_transport(index) {
            last = Some(refused("its transport (iWARP or another) is not supported".to_owned()));
            continue;
        }
        let context = match list.open(index) {
            Ok(context) => context,
            Err(error) => {
                last = Some(refused(format!("it cannot be opened: {error}")));
                continue;
            }
        };
        let count = context.query_device().map_or(1, |found| found.phys_port_cnt);
        let ports: Vec<_> = (1..=count).filter_map(|number| port(&context, name, number)).collect();
        match choose(name, &ports, config) {
            Ok((port, gid)) => return Ok((context, name.clone(), port, gid)),
            Err(missing) => last = Some(missing),
        }
    }
    let named = config.device.clone().unwrap_or_default();
    Err(last.unwrap_or(Missing::Named { name: named, known: names.join(", ") }))
}

/// The most inline data the device gives, up to what is asked for.
fn probe_inline(context: &Arc<Context>, asked: u32, gather: u32) -> Result<u32, FabricError> {
    let domain = Domain::new(Arc::clone(context)).map_err(system("allocating a domain"))?;
    let domain = Arc::new(domain);
    let queue = Queue::new(Arc::clone(context), 4, 0).map_err(system("creating a queue"))?;
    let queue = Arc::new(queue);
    let mut wanted = asked;
    loop {
        let cap = abi::QpCap {
            max_send_wr: 4,
            max_recv_wr: 1,
            max_send_sge: gather,
            max_recv_sge: 1,
            max_inline_data: wanted,
        };
        let (send, receive) = (Arc::clone(&queue), Arc::clone(&queue));
        let shape = PairShape { send, receive, shared: None, cap, tag: 0 };
        match Pair::new(Arc::clone(&domain), shape) {
            // More than asked for is not counted on: another shape may give less.
            Ok(pair) => return Ok(pair.cap.max_inline_data.min(asked)),
            Err(error) if wanted == 0 => return Err(system("creating a queue pair")(error)),
            Err(_) => wanted /= 2,
        }
    }
}

fn listen(host: IpAddr) -> Result<(TcpListener, SocketAddr), FabricError> {
    let bind = |ip| -> std::io::Result<_> {
        let listener = TcpListener::bind(SocketAddr::new(ip, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    let any: IpAddr = match host {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let own = if needs_filling(host) { any } else { host };
    bind(own).or_else(|_| bind(any)).map_err(system("listening for links"))
}

fn count(value: i32) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

impl VerbsDevice {
    /// Opens a device.
    ///
    /// Errors: [`VerbsError::Missing`] when the library, a device or a usable port is missing, in
    /// words that say what to do; [`VerbsError::Fabric`] when a call fails.
    pub fn open(config: VerbsConfig) -> Result<Arc<dyn Device>, VerbsError> {
        let (context, name, port, gid) = find(&config)?;
        let context = Arc::new(context);
        rustix::io::ioctl_fionbio(context.async_descriptor(), true)
            .map_err(system("preparing the device's events"))?;
        let limits = context.query_device().map_err(system("asking the device's limits"))?;
        if limits.atomic_cap == abi::ATOMIC_NONE {
            let reason = "it has no atomic operations".to_owned();
            return Err(Missing::Port { device: name, reason }.into());
        }
        let extended = context.query_device_ex();
        let flags = extended.as_ref().map_or(0, |found| found.device_cap_flags_ex);
        let on_demand = extended.is_some_and(|found| found.pages_on_demand());
        let max_gather = count(limits.max_sge).clamp(1, MAX_GATHER);
        let max_inline_bytes = probe_inline(&context, config.inline_bytes, max_gather)?;
        let host = config.address.unwrap_or_else(|| {
            let ethernet = port.link_layer == Some(LinkLayer::Ethernet);
            if ethernet { gid.ip() } else { Ipv4Addr::UNSPECIFIED.into() }
        });
        let (listener, link_address) = listen(host)?;
        let kick = Wake::new()?;
        let board = Arc::new(Board::new(context, kick));
        let presence = Presence::watch(&board.context.node_path());
        // Some are left to the program whatever callers do.
        let quarter = getrlimit(Resource::Nofile).current.map_or(u64::MAX, |most| most / 4);
        let max_links = config.max_links.min(usize::try_from(quarter).unwrap_or(usize::MAX)).max(1);
        let callers = (listener, max_links);
        let service = Service::new(Arc::clone(&board), callers, port.number, presence);
        let thread = std::thread::Builder::new()
            .name("beeline-verbs".to_owned())
            .spawn(move || service.run())
            .map_err(system("starting a thread"))?;
        let mtu =
            config.path_mtu_bytes.and_then(mtu_code).map_or(port.mtu, |own| own.min(port.mtu));
        let reads = |most: i32| {
            u8::try_from(most.clamp(1, config.max_outstanding_reads.into())).unwrap_or(1)
        };
        let max_message_bytes = u64::from(port.max_message_bytes).min(1 << 31);
        let vouched = config.reads_reach_persistence;
        let handle = Arc::new(DeviceHandle {
            board,
            name,
            gid,
            mtu,
            link_address,
            max_gather,
            max_inline_bytes,
            max_message_bytes,
            max_completion_queue_depth: count(limits.max_cqe),
            max_queue_depth: count(limits.max_qp_wr).min(MAX_QUEUE_DEPTH),
            max_shared_depth: count(limits.max_srq_wr).min(MAX_QUEUE_DEPTH),
            reads_taken: reads(limits.max_qp_rd_atom),
            reads_made: reads(limits.max_qp_init_rd_atom),
            pinned: Arc::new(Pinned::new(
                count(limits.max_mr).into(),
                limits.max_mr_size,
                on_demand,
            )),
            port,
            config,
            next_number: AtomicU32::new(1),
            next_tag: AtomicUsize::new(1),
            next_shared: AtomicU32::new(1),
            thread: Mutex::new(Some(thread)),
        });
        let native = flags & abi::CAP_FLUSH_PERSISTENT != 0;
        let attributes = DeviceAttributes {
            provider: "verbs",
            max_message_bytes,
            max_send_bytes: max_message_bytes,
            max_inline_bytes,
            max_scatter_gather_entries: max_gather,
            max_queue_depth: handle.max_queue_depth,
            max_completion_queue_depth: handle.max_completion_queue_depth,
            one_sided: true,
            atomics: if limits.atomic_cap == abi::ATOMIC_GLOB {
                AtomicScope::Processor
            } else {
                AtomicScope::Device
            },
            persistent_flush: match (vouched, native) {
                (true, _) => FLUSH_BY_READ_VOUCHED,
                (false, true) => FLUSH_BY_READ_THOUGH_NATIVE,
                (false, false) => FLUSH_BY_READ,
            },
        };
        tracing::debug!(device = %handle.name, port = handle.port.number, gid = %handle.gid.ip(),
            link = %handle.link_address, "verbs device opened");
        Ok(Arc::new(Self { handle, attributes }))
    }
}

impl Device for VerbsDevice {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn is_lost(&self) -> bool {
        // Acquire: pairs with the release store of the library's thread.
        self.handle.board.lost.load(Ordering::Acquire)
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        let memory = SharedMemory::allocate("beeline-verbs", length_bytes).map_err(|error| {
            FabricError::System { action: "allocating memory", source: error.into() }
        })?;
        Ok(Arc::new(memory))
    }

    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        Ok(Arc::new(VerbsProtectionDomain(VerbsDomain::new(&self.handle)?)))
    }

    fn create_completion_queue(
        &self,
        depth_entries: u32,
    ) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        let limit = self.handle.max_completion_queue_depth;
        within("completion queue depth", depth_entries, limit)?;
        let tag = self.handle.next_tag();
        Ok(Rc::new(VerbsCompletionQueue::new(Arc::clone(&self.handle), tag, depth_entries)?))
    }
}

/// A protection domain, with a page of its own for the reads that flushes are made of.
#[derive(Debug)]
pub(crate) struct VerbsDomain {
    pub(crate) device: Arc<DeviceHandle>,
    pub(crate) hardware: Arc<Domain>,
    /// One byte of the page, in the device's terms.
    pub(crate) scratch: abi::Sge,
    _registration: Registration,
    /// After the registration, so that it outlives it.
    _memory: SharedMemory,
}

impl VerbsDomain {
    fn new(device: &Arc<DeviceHandle>) -> Result<Arc<Self>, FabricError> {
        let domain = Domain::new(Arc::clone(&device.board.context));
        let hardware = Arc::new(domain.map_err(system("allocating a protection domain"))?);
        let memory = SharedMemory::allocate("beeline-verbs-flush", 4096).map_err(|error| {
            FabricError::System { action: "allocating memory", source: error.into() }
        })?;
        let base = memory.base().as_ptr();
        // SAFETY: the page is mapped until the memory is dropped, which the field order puts after
        // the registration; nobody reads what lands there.
        let registration = unsafe {
            Registration::new(
                Arc::clone(&hardware),
                base,
                memory.length_bytes(),
                None,
                abi::access::LOCAL_WRITE,
            )
        }
        .map_err(system("registering a page"))?;
        let scratch = abi::Sge { addr: base as u64, length: 1, lkey: registration.lkey() };
        Ok(Arc::new(Self {
            device: Arc::clone(device),
            hardware,
            scratch,
            _registration: registration,
            _memory: memory,
        }))
    }
}

#[derive(Debug)]
struct VerbsProtectionDomain(Arc<VerbsDomain>);

impl ProtectionDomain for VerbsProtectionDomain {
    fn register(
        &self,
        memory: Arc<dyn MemoryObject>,
        access: Access,
    ) -> Result<MemoryRegion, FabricError> {
        let device = &self.0.device;
        let vouched = device.config.reads_reach_persistence;
        register(&self.0.hardware, &device.pinned, memory, access, vouched)
    }

    fn create_shared_receive_queue(
        &self,
        depth: u32,
    ) -> Result<Rc<dyn SharedReceiveQueue>, FabricError> {
        let device = &self.0.device;
        within("shared receive queue depth", depth, device.max_shared_depth)?;
        let hardware = SharedReceives::new(Arc::clone(&self.0.hardware), depth)
            .map_err(system("creating a shared receive queue"))?;
        // The number has 22 bits in the device's request numbers.
        let number = device.next_shared.fetch_add(1, Ordering::Relaxed) & ((1 << 22) - 1);
        Ok(Rc::new(VerbsSharedReceiveQueue::new(hardware, number, depth)))
    }

    fn create_queue_pair(
        &self,
        send_queue: &Rc<dyn CompletionQueue>,
        receive_queue: &Rc<dyn CompletionQueue>,
        shared_receive_queue: Option<&Rc<dyn SharedReceiveQueue>>,
        options: QueuePairOptions,
    ) -> Result<Box<dyn QueuePair>, FabricError> {
        let limit = self.0.device.max_queue_depth;
        within("send queue depth", options.send_depth, limit)?;
        within("receive queue depth", options.receive_depth, limit)?;
        let foreign = || FabricError::Unsupported {
            provider: "verbs",
            what: "shared receive queues of another provider or domain",
        };
        let shared_receives = match shared_receive_queue {
            None => None,
            Some(queue) => {
                let own = queue.as_any().downcast_ref::<VerbsSharedReceiveQueue>();
                let own = own.filter(|own| Arc::ptr_eq(&own.domain, &self.0.hardware));
                Some(own.ok_or_else(foreign)?)
            }
        };
        let domain = Arc::clone(&self.0);
        Ok(Box::new(VerbsQueuePair::new(Parts {
            domain,
            send_queue,
            receive_queue,
            shared_receives,
            options,
        })?))
    }
}
