//! Starting, reaching and stopping the processors.

use std::fmt;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use beeline_fabric::{ConnectInfo, Device};
use beeline_kv_direct::mover::Carried;
use beeline_kv_direct::processor::SMALLEST_MEMORY;
use beeline_kv_direct::slab::SlabDaemon;
use beeline_kv_direct::{
    Connect, DirectServerOptions, Functions, LocalStore, OnReply, Processor, ProcessorOptions,
    TableOptions,
};
use beeline_observe::MetricSet;
use beeline_os::poller::Waker;
use beeline_service::{Fact, Service};

use crate::carrier::Carrier;
use crate::metrics::DirectMetrics;
use crate::processor::{Figures, PacketTimes, Parts, Shared, run};

/// How the service is made.
#[derive(Clone, Debug)]
pub struct DirectOptions {
    /// Memory of all processors together, bytes. Default 1 GiB.
    pub memory_bytes: u64,
    /// Processors, each with its own thread and memory, 1 to 64. Default 1.
    pub processors: u32,
    /// The table's.
    pub table: TableOptions,
    /// How long a processor polls on after work before it sleeps. Default 20 us.
    pub spin: Duration,
    /// Limits of fabric clients.
    pub server: DirectServerOptions,
    /// Where datagrams are taken: processor i at this port plus i. Default none.
    pub udp: Option<SocketAddr>,
    /// Functions that operations can name.
    pub functions: Arc<Functions>,
    /// How pairs reach the servers they move to; without it, this server can join maps and not give keys
    /// away. Default none.
    pub connector: Option<Connector>,
}

/// Makes what opens links, on the thread that uses it.
#[derive(Clone)]
pub struct Connector(pub Arc<dyn Fn() -> Box<dyn Connect> + Send + Sync>);

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector").finish_non_exhaustive()
    }
}

impl Default for DirectOptions {
    fn default() -> Self {
        Self {
            memory_bytes: 1 << 30,
            processors: 1,
            table: TableOptions::default(),
            spin: Duration::from_micros(20),
            server: DirectServerOptions::default(),
            udp: None,
            functions: Arc::new(Functions::default()),
            connector: None,
        }
    }
}

/// Why the service cannot start, or not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectError {
    /// A setting.
    #[error("{setting} is {found}; choose {needed}")]
    Setting {
        /// Which.
        setting: &'static str,
        /// What it may be.
        needed: String,
        /// What it is.
        found: u64,
    },
    /// The kernel's.
    #[error("{action} failed: {source}")]
    System {
        /// What was being done.
        action: &'static str,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The address for datagrams.
    #[error(
        "cannot listen for datagrams on {address}: {source}; choose another with --direct-udp-address"
    )]
    Listen {
        /// Where.
        address: SocketAddr,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The processor is gone.
    #[error("the processor has stopped")]
    Stopped,
    /// The packet cannot be answered within the limit, or has no header.
    #[error("the packet has no header, or its reply could pass {limit} bytes")]
    Packet {
        /// Bytes a reply may have.
        limit: usize,
    },
}

/// The answer to a fabric client: how to reach its queue pair's other end, and the welcome.
#[derive(Clone, Debug)]
pub struct FabricWelcome {
    /// `None` where the client was refused, as the payload says.
    pub info: Option<ConnectInfo>,
    /// Welcome or refusal.
    pub payload: Vec<u8>,
}

/// A client that wants to be served over fabric.
pub struct FabricClient {
    /// Which processor.
    pub processor: u32,
    /// The chosen provider's device.
    pub device: Arc<dyn Device>,
    /// How to reach the client's queue pair.
    pub peer: ConnectInfo,
    /// Its hello.
    pub payload: Vec<u8>,
    /// Called once, on the processor's thread.
    pub reply: Box<dyn FnOnce(Result<FabricWelcome, String>) + Send>,
}

impl fmt::Debug for FabricClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FabricClient")
            .field("processor", &self.processor)
            .field("provider", &self.device.attributes().provider)
            .finish_non_exhaustive()
    }
}

/// What other threads bring to a processor.
pub(crate) enum Delivery {
    Packet(LocalPacket),
    Fabric(Box<FabricClient>),
    /// A batch of pairs came to its end: the state of the map in which it was made, and how.
    Carried(u32, Carried),
    /// What holds the batch under way up.
    HeldUp(String),
}

/// A packet of a local caller.
pub(crate) struct LocalPacket {
    pub packet: Vec<u8>,
    pub reply_limit: usize,
    pub reply: OnReply,
}

#[derive(Debug)]
struct Reach {
    shared: Arc<Shared>,
    deliveries: Mutex<Sender<Delivery>>,
}

impl Reach {
    fn deliver(&self, delivery: Delivery) -> Result<(), Delivery> {
        let sent = self
            .deliveries
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .send(delivery)
            .map_err(|refused| refused.0);
        self.shared.waker.wake();
        sent
    }
}

/// What other threads may do with the service.
#[derive(Clone, Debug)]
pub struct DirectHandle {
    processors: Arc<Vec<Reach>>,
}

impl DirectHandle {
    /// Processors; a key belongs to [`beeline_kv_direct::processor_of`] it.
    #[must_use]
    pub fn processors(&self) -> u32 {
        self.processors.len() as u32
    }

    /// Hands a fabric client to its processor, whose thread answers.
    pub fn accept(&self, client: FabricClient) {
        let Some(reach) = self.processors.get(client.processor as usize) else {
            let count = self.processors.len();
            (client.reply)(Err(format!("no processor {}: there are {count}", client.processor)));
            return;
        };
        if let Err(Delivery::Fabric(client)) = reach.deliver(Delivery::Fabric(Box::new(client))) {
            (client.reply)(Err("the processor has stopped".to_owned()));
        }
    }

    /// Executes a packet of a local caller in the processor's one queue; blocks until it is done.
    ///
    /// Errors: [`DirectError::Stopped`], [`DirectError::Packet`].
    pub fn execute(
        &self,
        processor: u32,
        packet: Vec<u8>,
        reply_limit: usize,
    ) -> Result<Vec<u8>, DirectError> {
        let reach = self.processors.get(processor as usize).ok_or(DirectError::Stopped)?;
        let (sender, answer) = mpsc::channel();
        // A caller that went away meanwhile does not want it any more.
        let reply: OnReply = Box::new(move |reply| drop(sender.send(reply)));
        reach
            .deliver(Delivery::Packet(LocalPacket { packet, reply_limit, reply }))
            .map_err(|_| DirectError::Stopped)?;
        let answer = answer.recv().map_err(|_| DirectError::Stopped)?;
        answer.ok_or(DirectError::Packet { limit: reply_limit })
    }
}

impl LocalStore for DirectHandle {
    fn processors(&self) -> u32 {
        self.processors.len() as u32
    }

    fn submit(&self, processor: u32, packet: Vec<u8>, reply_limit: usize, done: OnReply) {
        if let Some(reach) = self.processors.get(processor as usize) {
            let reply = LocalPacket { packet, reply_limit, reply: done };
            // Where the processor has stopped, the packet is dropped with its caller's closure.
            drop(reach.deliver(Delivery::Packet(reply)));
        }
    }
}

/// The running service. Dropping it stops it.
#[derive(Debug)]
pub struct DirectService {
    handle: DirectHandle,
    threads: Vec<JoinHandle<()>>,
    metrics: Arc<DirectMetrics>,
    times: Arc<PacketTimes>,
    memory_bytes: u64,
    udp: Vec<SocketAddr>,
}

impl DirectService {
    /// Starts the processors, empty.
    ///
    /// Errors: [`DirectError`]; nothing is left running.
    pub fn start(options: &DirectOptions) -> Result<Self, DirectError> {
        let count = u64::from(options.processors);
        if !(1..=64).contains(&count) {
            let needed = "1 to 64".to_owned();
            return Err(DirectError::Setting {
                setting: "direct-processors",
                needed,
                found: count,
            });
        }
        let memory_bytes = options.memory_bytes / count;
        if memory_bytes < SMALLEST_MEMORY {
            let needed =
                format!("{} or more, {SMALLEST_MEMORY} per processor", SMALLEST_MEMORY * count);
            let found = options.memory_bytes;
            return Err(DirectError::Setting { setting: "direct-memory", needed, found });
        }
        let system = |action| move |source| DirectError::System { action, source };
        let mut service = Self {
            handle: DirectHandle { processors: Arc::new(Vec::new()) },
            threads: Vec::new(),
            metrics: Arc::default(),
            times: Arc::<PacketTimes>::default(),
            memory_bytes: memory_bytes * count,
            udp: Vec::new(),
        };
        let mut reaches = Vec::new();
        let mut parts = Vec::new();
        let times = Arc::clone(&service.times);
        for index in 0..options.processors {
            let processor = ProcessorOptions { memory_bytes, table: options.table };
            let functions = Arc::clone(&options.functions);
            let (processor, pools) = Processor::new(&processor, functions, true)
                .map_err(system("taking memory for the direct store"))?;
            let daemon = SlabDaemon::start(Arc::clone(&pools))
                .map_err(system("starting a slab daemon's thread"))?;
            let udp = options.udp.map(|first| listen(first, index)).transpose()?;
            if let Some(address) = udp.as_ref().and_then(|udp| udp.local_addr().ok()) {
                service.udp.push(address);
            }
            let waker = Waker::new().map_err(system("making a wake-up descriptor"))?;
            let shared = Arc::new(Shared {
                waker,
                stopping: false.into(),
                failed: false.into(),
                map_state: 0.into(),
                figures: Figures::default(),
                times: Arc::clone(&times),
            });
            let (deliveries, receiver) = mpsc::channel();
            let carrier =
                Carrier::new(index, options.connector.clone(), deliveries.clone(), &shared);
            reaches.push(Reach { shared: Arc::clone(&shared), deliveries: Mutex::new(deliveries) });
            parts.push(Parts {
                shared,
                deliveries: receiver,
                processor,
                pools,
                _daemon: daemon,
                server: options.server,
                udp,
                spin: options.spin,
                carrier,
            });
        }
        service.handle = DirectHandle { processors: Arc::new(reaches) };
        for (index, parts) in parts.into_iter().enumerate() {
            let builder = std::thread::Builder::new().name(format!("direct-{index}"));
            let thread = builder
                .spawn(move || run(parts))
                .map_err(system("starting a processor's thread"))?;
            service.threads.push(thread);
        }
        Ok(service)
    }

    /// For threads that bring it clients and packets.
    #[must_use]
    pub fn handle(&self) -> DirectHandle {
        self.handle.clone()
    }

    /// Where datagrams are taken, one address for each processor.
    #[must_use]
    pub fn udp_addresses(&self) -> &[SocketAddr] {
        &self.udp
    }

    /// Operations that came to its processors, those refused included, as they last told.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.sum(|figures| &figures.operations)
    }

    fn sum(&self, figure: impl Fn(&Figures) -> &AtomicU64) -> u64 {
        let figures = self.handle.processors.iter().map(|reach| &reach.shared.figures);
        figures.map(|figures| figure(figures).load(Ordering::Relaxed)).sum()
    }

    fn end(&mut self) {
        for reach in self.handle.processors.iter() {
            reach.shared.stopping.store(true, Ordering::Release);
            reach.shared.waker.wake();
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a processor of the direct store ended in a panic");
            }
        }
    }
}

impl Drop for DirectService {
    fn drop(&mut self) {
        self.end();
    }
}

fn listen(first: SocketAddr, index: u32) -> Result<UdpSocket, DirectError> {
    let mut address = first;
    if first.port() != 0 {
        let port = u32::from(first.port()) + index;
        address.set_port(u16::try_from(port).unwrap_or(u16::MAX));
    }
    let failed = |source| DirectError::Listen { address, source };
    let socket = UdpSocket::bind(address).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    Ok(socket)
}

/// Bytes for people, in whole binary units.
fn size(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 30 => format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64),
        bytes => format!("{:.1} MiB", bytes as f64 / (1_u64 << 20) as f64),
    }
}

impl Service for DirectService {
    fn name(&self) -> &'static str {
        "direct"
    }

    fn facts(&self) -> Vec<Fact> {
        let mut value = format!(
            "in memory, {}, VOLATILE: the pairs end with the process; over fabric",
            size(self.memory_bytes)
        );
        if let Some(address) = self.udp.first() {
            value.push_str(&format!(" and UDP {address}"));
        }
        if self.handle.processors() > 1 {
            value.push_str(&format!("; {} processors", self.handle.processors()));
        }
        vec![Fact::new("direct", value)]
    }

    fn metrics(&self) -> Vec<Arc<dyn MetricSet>> {
        let PacketTimes { fabric, local } = &*self.times;
        vec![self.metrics.clone(), fabric.clone(), local.clone()]
    }

    fn publish(&self) {
        let metrics = &self.metrics;
        metrics.memory_bytes.set(self.memory_bytes);
        metrics.pairs.set(self.sum(|f| &f.pairs));
        metrics.pair_bytes.set(self.sum(|f| &f.pair_bytes));
        metrics.allocated_bytes.set(self.sum(|f| &f.allocated_bytes));
        metrics.chained_buckets.set(self.sum(|f| &f.chained_buckets));
        metrics.clients.set(self.sum(|f| &f.clients));
        metrics.packets.publish(self.sum(|f| &f.packets));
        metrics.operations.publish(self.sum(|f| &f.operations));
        metrics.forwarded_operations.publish(self.sum(|f| &f.forwarded));
        metrics.write_backs.publish(self.sum(|f| &f.write_backs));
        metrics.failed_operations.publish(self.sum(|f| &f.failed));
        metrics.slab_transfers.publish(self.sum(|f| &f.slab_transfers));
        metrics.slab_waits.publish(self.sum(|f| &f.slab_waits));
        metrics.slab_merges.publish(self.sum(|f| &f.slab_merges));
        metrics.refused_clients.publish(self.sum(|f| &f.refused));
        metrics.ended_clients.publish(self.sum(|f| &f.ended));
        metrics.sleeps.publish(self.sum(|f| &f.sleeps));
        metrics.moved_pairs.publish(self.sum(|f| &f.moved));
        metrics.adopted_pairs.publish(self.sum(|f| &f.adopted));
        let states = self.handle.processors.iter().map(|reach| &reach.shared.map_state);
        let state = states.map(|state| state.load(Ordering::Relaxed)).max().unwrap_or(0);
        metrics.map_state.set(u64::from(state));
    }

    fn health(&self) -> Result<(), String> {
        let failed = |reach: &Reach| reach.shared.failed.load(Ordering::Acquire);
        match self.handle.processors.iter().position(failed) {
            Some(index) => Err(format!("processor {index} stopped working; restart the node")),
            None => Ok(()),
        }
    }

    fn stop(mut self: Box<Self>) {
        self.end();
    }
}
