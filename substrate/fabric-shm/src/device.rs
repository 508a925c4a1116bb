//! Device and protection domain: the control objects.

use std::collections::HashMap;
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use beeline_fabric::error::{system, within};
use beeline_fabric::{
    Access, AtomicScope, CompletionQueue, Device, DeviceAttributes, FabricError, LocalKey,
    MemoryRegion, ProtectionDomain, QueuePair, QueuePairOptions, RegionControl, RemoteKey,
    SharedReceiveQueue,
};
use beeline_os::write_back::WriteBack;
use beeline_os::{MemoryObject, SharedMemory, barrier};

use crate::completion_queue::ShmCompletionQueue;
use crate::config::ShmConfig;
use crate::connect_info::{Host, random};
use crate::control::{Command, Commands, Control};
use crate::exposure;
use crate::in_process::{self, PlainMemory};
use crate::link::{Link, LinkEvent, lock};
use crate::object::Geometry;
use crate::queue_pair::ShmQueuePair;
use crate::shared_receive_queue::ShmSharedReceiveQueue;
use crate::{IN_PROCESS, MAX_INLINE_BYTES, MAX_SCATTER_GATHER_ENTRIES, MAX_SEND_BYTES, PROVIDER};

const MAX_QUEUE_DEPTH: u32 = 1 << 15;
const MAX_COMPLETION_QUEUE_DEPTH: u32 = 1 << 20;

#[derive(Debug)]
struct Registered {
    domain: u64,
    memory: Arc<dyn MemoryObject>,
    access: Access,
    revoked: bool,
}

/// What the control thread and the handles share.
#[derive(Debug)]
pub(crate) struct DeviceShared {
    pub config: ShmConfig,
    pub host: Host,
    /// Random part of the socket's name.
    pub socket: [u8; 16],
    ways: Ways,
    regions: Mutex<HashMap<u64, Registered>>,
}

/// How what needs more than the own thread comes about.
#[derive(Debug)]
enum Ways {
    /// Over sockets, by the control thread.
    Sockets(Arc<Commands>),
    /// Within the process.
    InProcess,
}

impl DeviceShared {
    /// Errors: [`FabricError::Limit`], [`FabricError::System`].
    fn new(config: ShmConfig, ways: Ways) -> Result<Arc<Self>, FabricError> {
        let shape =
            Geometry { slots: config.ring_slots, lengths: 0, payload_bytes: config.payload_bytes };
        if !shape.is_valid() {
            return Err(FabricError::Limit {
                what: "ring_slots or payload_bytes",
                requested: u64::from(config.ring_slots.max(config.payload_bytes)),
                limit: u64::from(*Geometry::PAYLOAD.end()),
            });
        }
        // Registered before any queue pair relies on it.
        let asymmetric = barrier::is_asymmetric();
        let shared = Arc::new(Self {
            config,
            host: Host::this().map_err(system("reading the host's identity"))?,
            socket: random()?,
            ways,
            regions: Mutex::new(HashMap::new()),
        });
        tracing::debug!(asymmetric, in_process = shared.is_in_process(), "shm device opened");
        Ok(shared)
    }

    /// Has something done that is not of the data path.
    pub(crate) fn ask(self: &Arc<Self>, command: Command) {
        match &self.ways {
            Ways::Sockets(commands) => commands.send(command),
            Ways::InProcess => in_process::obey(self, command),
        }
    }

    pub(crate) fn is_in_process(&self) -> bool {
        matches!(self.ways, Ways::InProcess)
    }

    /// The region behind `key`, for queue pairs of `domain`.
    pub(crate) fn find_region(
        &self,
        key: u64,
        domain: u64,
    ) -> Option<(Arc<dyn MemoryObject>, Access)> {
        let regions = lock(&self.regions);
        let found = regions.get(&key)?;
        let reachable = found.domain == domain && !found.revoked && found.access.is_remote();
        reachable.then(|| (Arc::clone(&found.memory), found.access))
    }
}

/// A file flush in the background.
#[derive(Debug)]
struct FlushJob {
    descriptor: Arc<OwnedFd>,
    link: Arc<Link>,
}

#[derive(Debug)]
struct Flusher {
    jobs: mpsc::Sender<FlushJob>,
    thread: JoinHandle<()>,
}

/// The owner of the device's threads; every handle keeps it alive.
#[derive(Debug)]
pub(crate) struct DeviceHandle {
    pub shared: Arc<DeviceShared>,
    attributes: DeviceAttributes,
    thread: Mutex<Option<JoinHandle<()>>>,
    flusher: Mutex<Option<Flusher>>,
    next_qp: AtomicU32,
    next_domain: AtomicU64,
    next_local_key: AtomicU32,
}

impl DeviceHandle {
    pub(crate) fn next_qp_num(&self) -> u32 {
        self.next_qp.fetch_add(1, Ordering::Relaxed)
    }

    /// Runs `fdatasync` on another thread, started at the first use, and tells `link`.
    pub(crate) fn flush_file(&self, descriptor: Arc<OwnedFd>, link: Arc<Link>) {
        let mut flusher = lock(&self.flusher);
        if flusher.is_none() {
            let (jobs, queue) = mpsc::channel::<FlushJob>();
            let run = move || {
                for job in queue {
                    let succeeded = rustix::fs::fdatasync(&job.descriptor).is_ok();
                    job.link.push(LinkEvent::Flushed { succeeded });
                }
            };
            let named = std::thread::Builder::new().name("shm-flush".to_owned());
            *flusher = named.spawn(run).ok().map(|thread| Flusher { jobs, thread });
        }
        let job = FlushJob { descriptor, link: Arc::clone(&link) };
        let sent = flusher.as_ref().is_some_and(|flusher| flusher.jobs.send(job).is_ok());
        drop(flusher);
        if !sent {
            link.push(LinkEvent::Flushed { succeeded: false });
        }
    }
}

impl Drop for DeviceHandle {
    fn drop(&mut self) {
        self.shared.ask(Command::Stop);
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
        if let Some(Flusher { jobs, thread }) = lock(&self.flusher).take() {
            drop(jobs);
            let _ = thread.join();
        }
    }
}

/// The shm provider, opened.
#[derive(Debug)]
pub struct ShmDevice(Arc<DeviceHandle>);

impl ShmDevice {
    /// Opens the provider: one control thread, asleep until something happens.
    ///
    /// Errors: [`FabricError::System`]; [`FabricError::Limit`] for a configuration out of range.
    pub fn open(config: ShmConfig) -> Result<Arc<dyn Device>, FabricError> {
        Ok(Arc::new(Self(DeviceHandle::open(config)?)))
    }

    /// A device whose peers are devices of this process: no thread, no socket, and no descriptor
    /// but what its completion queues sleep on; memory needs none to be registered. For services
    /// that talk to themselves.
    ///
    /// Errors: as [`ShmDevice::open`].
    pub fn in_process(config: ShmConfig) -> Result<Arc<dyn Device>, FabricError> {
        let shared = DeviceShared::new(config, Ways::InProcess)?;
        Ok(Arc::new(Self(Arc::new(DeviceHandle::new(shared, None)))))
    }
}

impl DeviceHandle {
    /// Errors: as [`ShmDevice::open`].
    pub(crate) fn open(config: ShmConfig) -> Result<Arc<Self>, FabricError> {
        let commands = Commands::new().map_err(system("creating an event descriptor"))?;
        let commands = Arc::new(commands);
        let shared = DeviceShared::new(config, Ways::Sockets(Arc::clone(&commands)))?;
        let control = Control::new(Arc::clone(&shared), commands)
            .map_err(system("listening on a control socket"))?;
        let thread = std::thread::Builder::new()
            .name("shm-control".to_owned())
            .spawn(move || control.run())
            .map_err(system("starting the control thread"))?;
        Ok(Arc::new(Self::new(shared, Some(thread))))
    }

    fn new(shared: Arc<DeviceShared>, thread: Option<JoinHandle<()>>) -> Self {
        Self {
            attributes: attributes(shared.is_in_process()),
            shared,
            thread: Mutex::new(thread),
            flusher: Mutex::new(None),
            next_qp: AtomicU32::new(1),
            next_domain: AtomicU64::new(1),
            next_local_key: AtomicU32::new(1),
        }
    }
}

fn attributes(in_process: bool) -> DeviceAttributes {
    DeviceAttributes {
        provider: if in_process { IN_PROCESS } else { PROVIDER },
        max_message_bytes: 1 << 40,
        max_send_bytes: u64::from(MAX_SEND_BYTES),
        max_inline_bytes: MAX_INLINE_BYTES,
        max_scatter_gather_entries: MAX_SCATTER_GATHER_ENTRIES,
        max_queue_depth: MAX_QUEUE_DEPTH,
        max_completion_queue_depth: MAX_COMPLETION_QUEUE_DEPTH,
        one_sided: true,
        atomics: AtomicScope::Processor,
        persistent_flush: match WriteBack::detect() {
            _ if in_process => "the memory's own way, by the initiator; fdatasync for files",
            WriteBack::Clwb => "clwb and sfence by the initiator; fdatasync for files",
            WriteBack::Clflushopt => "clflushopt and sfence by the initiator; fdatasync for files",
            WriteBack::Clflush => "clflush by the initiator; fdatasync for files",
            _ => "fdatasync for files",
        },
    }
}

impl Device for ShmDevice {
    fn attributes(&self) -> &DeviceAttributes {
        &self.0.attributes
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        if self.0.shared.is_in_process() {
            let memory = PlainMemory::allocate(length_bytes);
            return Ok(Arc::new(memory.map_err(system("allocating memory"))?));
        }
        let memory = SharedMemory::allocate("beeline-memory", length_bytes)
            .map_err(system("allocating shared memory"))?;
        Ok(Arc::new(memory))
    }

    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        Ok(Arc::new(ShmProtectionDomain::new(&self.0)))
    }

    fn create_completion_queue(
        &self,
        depth_entries: u32,
    ) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        within("max_completion_queue_depth", depth_entries, MAX_COMPLETION_QUEUE_DEPTH)?;
        ShmCompletionQueue::create(depth_entries, &self.0.shared.config)
    }
}

/// Regions and queue pairs that may work together.
#[derive(Debug)]
pub(crate) struct ShmProtectionDomain {
    pub device: Arc<DeviceHandle>,
    pub id: u64,
    regions: Arc<DomainRegions>,
}

#[derive(Debug)]
struct DomainRegions {
    device: Arc<DeviceHandle>,
}

impl ShmProtectionDomain {
    pub(crate) fn new(device: &Arc<DeviceHandle>) -> Self {
        let id = device.next_domain.fetch_add(1, Ordering::Relaxed);
        let regions = Arc::new(DomainRegions { device: Arc::clone(device) });
        Self { device: Arc::clone(device), id, regions }
    }
}

impl RegionControl for DomainRegions {
    fn revoke(&self, region: &MemoryRegion) -> Result<(), FabricError> {
        let revoked = lock(&self.device.shared.regions)
            .get_mut(&region.remote_key().0)
            .is_some_and(|found| !std::mem::replace(&mut found.revoked, true));
        if revoked {
            exposure::unregistered(region.memory(), region.access());
        }
        exposure::take_back(region.memory())
    }

    fn deregister(&self, _local_key: LocalKey, remote_key: RemoteKey) {
        let removed = lock(&self.device.shared.regions).remove(&remote_key.0);
        if let Some(registered) = removed {
            let access = if registered.revoked { Access::empty() } else { registered.access };
            exposure::unregistered(&registered.memory, access);
        }
    }
}

impl ProtectionDomain for ShmProtectionDomain {
    fn register(
        &self,
        memory: Arc<dyn MemoryObject>,
        access: Access,
    ) -> Result<MemoryRegion, FabricError> {
        let local_key = LocalKey(self.device.next_local_key.fetch_add(1, Ordering::Relaxed));
        // 64 random bits: unguessable, and a repetition within a device's life is beyond chance.
        let remote_key = RemoteKey(u64::from_le_bytes(random()?));
        exposure::registered(&memory, access, self.device.shared.is_in_process())?;
        let entry =
            Registered { domain: self.id, memory: Arc::clone(&memory), access, revoked: false };
        lock(&self.device.shared.regions).insert(remote_key.0, entry);
        let control = Arc::clone(&self.regions) as Arc<dyn RegionControl>;
        Ok(MemoryRegion::new(memory, access, local_key, remote_key, control))
    }

    fn create_shared_receive_queue(
        &self,
        depth: u32,
    ) -> Result<Rc<dyn SharedReceiveQueue>, FabricError> {
        within("max_queue_depth", depth, MAX_QUEUE_DEPTH)?;
        Ok(Rc::new(ShmSharedReceiveQueue::new(depth)))
    }

    fn create_queue_pair(
        &self,
        send_queue: &Rc<dyn CompletionQueue>,
        receive_queue: &Rc<dyn CompletionQueue>,
        shared_receive_queue: Option<&Rc<dyn SharedReceiveQueue>>,
        options: QueuePairOptions,
    ) -> Result<Box<dyn QueuePair>, FabricError> {
        within("max_queue_depth (send)", options.send_depth, MAX_QUEUE_DEPTH)?;
        if shared_receive_queue.is_none() {
            within("max_queue_depth (receive)", options.receive_depth, MAX_QUEUE_DEPTH)?;
        }
        let foreign = FabricError::Unsupported { provider: PROVIDER, what: "foreign queues" };
        let (Some(send), Some(receive)) = (
            ShmCompletionQueue::of(send_queue.as_ref()),
            ShmCompletionQueue::of(receive_queue.as_ref()),
        ) else {
            return Err(foreign);
        };
        let shared = match shared_receive_queue {
            None => None,
            Some(queue) => match ShmSharedReceiveQueue::of(queue.as_ref()) {
                Some(shared) => Some(shared),
                None => return Err(foreign),
            },
        };
        Ok(Box::new(ShmQueuePair::new(self, &send, &receive, shared, options)?))
    }
}
