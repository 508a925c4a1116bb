//! The manager: objects of other nodes for this node's store, and this store's for them.
//!
//! ```text
//!  store ── fetch, announce, withdraw ──► manager
//!                                          ├─ fetchers  locate, dial, pull (transfer::Pulling)
//!                                          ├─ servers   one thread a peer  (transfer::Serving)
//!                                          ├─ socket    the same without fabric
//!                                          └─ announcer the directory, refreshed
//! ```
//!
//! Towards the store the manager is an ordinary client. Providers are opened by the edge of the
//! program, behind [`Dial`].
//!
//! Invariants: a node that ends is forgotten by the directory when its entry expires; without the
//! directory everything local goes on; each holder of an object is tried before a fetch fails.

mod directory;
mod fetch;
#[cfg(test)]
mod manager_tests;
mod patience;
mod resp;
mod serve;
mod shelf;
mod socket;

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use beeline_fabric::{ConnectInfo, Device};

use crate::client::Client;
use crate::error::ObjectsError;
use crate::id::ObjectId;
use crate::store::{Cluster, StoreHandle, keep_to};
use crate::transfer::{Context, Learner};

/// What the bootstrap exchange tells every peer: the port of the socket for transfers without
/// fabric.
#[must_use]
pub fn payload(socket_port: u16) -> Vec<u8> {
    socket_port.to_le_bytes().to_vec()
}

/// Name of the object service in the bootstrap exchange.
pub const SERVICE: &str = "objects";

/// What was agreed on with a peer.
pub trait Agreed {
    /// To make the queue pair on.
    fn device(&self) -> Arc<dyn Device>;

    /// What the peer says to everybody: where its socket is.
    fn payload(&self) -> &[u8];

    /// Carries connection data to the peer and back.
    ///
    /// Errors: why not, in words.
    fn exchange(&self, info: &ConnectInfo) -> Result<ConnectInfo, String>;
}

/// Reaches other nodes over fabric; the edge of the program implements it.
pub trait Dial: Send + Sync {
    /// Agrees on a provider with the node at `address`. With `avoid`, the last one failed.
    ///
    /// Errors: why not, in words.
    fn dial(&self, address: &str, avoid: bool) -> Result<Box<dyn Agreed>, String>;
}

/// How other nodes are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Each of these may have any object.
    Peers(Vec<String>),
    /// A RESP server knows: its address, and a password or nothing.
    Directory {
        /// HOST:PORT.
        address: String,
        /// Given with AUTH unless empty.
        password: String,
    },
}

/// How an object is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// By size, as learned.
    Auto,
    /// By messages and copies.
    Sent,
    /// By one-sided reads.
    Read,
    /// Over a socket, in pieces of so many bytes.
    Socket {
        /// 4096 is the baseline of the published system.
        piece_bytes: u32,
    },
}

/// How a manager is set up.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// The store's own socket.
    pub store: PathBuf,
    /// Where others are found.
    pub finding: Finding,
    /// The fabric address others reach this node at.
    pub advertised: String,
    /// How objects are moved, until [`Manager::move_by`].
    pub moves: Move,
    /// Silence after which a transfer is given up.
    pub patience: Duration,
    /// Fetches under way at once.
    pub fetchers: usize,
    /// Processors the manager's threads keep to; empty: any.
    pub processors: Vec<usize>,
}

beeline_observe::metrics! {
    /// Transfers between nodes.
    pub struct TransferMetrics in "beeline" {
        counter objects_fetched_objects: Count, "Objects that came from other nodes.";
        counter objects_fetched_bytes: Bytes, "Bytes of these.";
        counter objects_sent_fetches: Count, "Of these objects, those that came in messages.";
        counter objects_read_fetches: Count, "Of these objects, those read one-sided.";
        counter objects_socket_fetches: Count, "Of these objects, those that came over a socket.";
        counter objects_failed_transfers: Count, "Transfers that failed at one holder.";
        counter objects_connections: Count, "Connections to other nodes made.";
        counter objects_reused_buffers: Count, "Of these, those that found buffers of an earlier one.";
        counter objects_registrations: Count, "Segments registered with a device.";
        gauge objects_registered_segments: Count, "Segments registered now.";
        gauge objects_serving_peers: Count, "Connections other nodes take objects through.";
        gauge objects_crossing_bytes: Bytes, "Size from which on objects are no longer sent in messages, as learned on the link used last.";
        gauge objects_directory_up: Count, "1 while the directory answers.";
    }
}

#[derive(Debug, Default)]
struct Figures {
    fetched: AtomicU64,
    fetched_bytes: AtomicU64,
    sent: AtomicU64,
    read: AtomicU64,
    socket: AtomicU64,
    failed: AtomicU64,
    connections: AtomicU64,
    serving: AtomicU64,
    sockets: AtomicU64,
    directory_up: AtomicBool,
}

/// What the threads of a manager share.
struct Shared {
    options: ClusterOptions,
    /// How objects are moved now.
    moves: Mutex<Move>,
    dial: Box<dyn Dial>,
    handle: StoreHandle,
    client: Mutex<Option<Client>>,
    /// Devices with what is kept for them.
    contexts: Mutex<Vec<Arc<Context>>>,
    /// Of the device that an object came over last, as learned there.
    crossing: AtomicU64,
    figures: Figures,
    /// Segments that the store had given back when registrations were last looked through.
    swept: AtomicU64,
    stop: AtomicBool,
    /// How often connections to other nodes were ended on purpose.
    disconnects: AtomicU64,
    socket_port: u16,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn stops(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn moves(&self) -> Move {
        *lock(&self.moves)
    }

    /// At the start of each thread.
    fn settle_thread(&self) {
        keep_to(&self.options.processors);
    }

    /// The manager's connection to its own store; a new one where the last was lost, as happens
    /// where the process has no descriptor left for a segment.
    fn client(&self) -> Result<Client, ObjectsError> {
        let mut kept = lock(&self.client);
        if let Some(client) = kept.as_ref().filter(|client| client.is_connected()) {
            return Ok(client.clone());
        }
        let client = Client::connect(&self.options.store)?;
        *kept = Some(client.clone());
        Ok(client)
    }

    /// What is kept for `device`.
    fn context(&self, device: &Arc<dyn Device>) -> Result<Arc<Context>, String> {
        let mut contexts = lock(&self.contexts);
        contexts.retain(|context| !context.device.is_lost());
        if let Some(known) = contexts.iter().find(|known| Arc::ptr_eq(&known.device, device)) {
            return Ok(Arc::clone(known));
        }
        let context = Context::new(Arc::clone(device)).map_err(|error| error.to_string())?;
        let context = Arc::new(context);
        contexts.push(Arc::clone(&context));
        Ok(context)
    }

    /// Gives up registrations of memory the store has given back, if it did since the last time:
    /// until then that memory is held, beyond the store's limit.
    fn sweep(&self) {
        let dropped = self.handle.dropped_segments();
        if self.swept.swap(dropped, Ordering::AcqRel) == dropped {
            return;
        }
        for context in lock(&self.contexts).iter() {
            context.sweep(|number| self.handle.has_segment(number));
        }
    }
}

/// An object to fetch, and the node to ask where one was named.
type Wanted = (ObjectId, Option<SocketAddr>);

/// A node that may have an object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Holder {
    fabric: String,
    socket: Option<String>,
}

enum News {
    Announce(ObjectId),
    Withdraw(ObjectId),
}

/// The running manager.
pub struct Manager {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    fetches: Option<Sender<Wanted>>,
    news: Option<Sender<News>>,
    metrics: Arc<TransferMetrics>,
}

impl std::fmt::Debug for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Manager").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

/// What the store calls.
struct Calls {
    fetches: Sender<Wanted>,
    news: Option<Sender<News>>,
}

impl Cluster for Calls {
    fn fetch(&mut self, id: ObjectId, from: Option<SocketAddr>) {
        let _ = self.fetches.send((id, from));
    }

    fn announce(&mut self, id: ObjectId) {
        let _ = self.news.as_ref().map(|news| news.send(News::Announce(id)));
    }

    fn withdraw(&mut self, id: ObjectId) {
        let _ = self.news.as_ref().map(|news| news.send(News::Withdraw(id)));
    }
}

/// What others come in through; cheap to clone.
#[derive(Clone)]
pub struct Door(Arc<Shared>);

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Door").finish_non_exhaustive()
    }
}

/// Answers a peer's connection data, or says why not.
pub type Answer = Box<dyn FnOnce(Result<ConnectInfo, String>) + Send>;

impl Door {
    /// Serves a peer that dialled; returns at once.
    pub fn accept(&self, device: Arc<dyn Device>, peer: ConnectInfo, answer: Answer) {
        serve::start(&self.0, device, peer, answer);
    }
}

impl Manager {
    /// Starts the manager of the store behind `handle`, whose socket is open already or will be.
    /// Transfers without fabric come in through `listener`.
    ///
    /// Errors: the kernel's, for the socket or a thread.
    pub fn start(
        options: ClusterOptions,
        dial: Box<dyn Dial>,
        handle: StoreHandle,
        listener: TcpListener,
    ) -> std::io::Result<(Self, Box<dyn Cluster>)> {
        let socket_port = listener.local_addr()?.port();
        let fetchers = options.fetchers.max(1);
        let directory = matches!(options.finding, Finding::Directory { .. });
        let shared = Arc::new(Shared {
            moves: Mutex::new(options.moves),
            options,
            dial,
            handle,
            client: Mutex::default(),
            contexts: Mutex::default(),
            crossing: AtomicU64::new(Learner::default().crossing()),
            figures: Figures::default(),
            swept: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            disconnects: AtomicU64::new(0),
            socket_port,
        });
        let (fetches, jobs) = channel();
        let jobs: Arc<Mutex<Receiver<Wanted>>> = Arc::new(Mutex::new(jobs));
        let mut threads = Vec::new();
        for number in 0..fetchers {
            let (shared, jobs) = (Arc::clone(&shared), Arc::clone(&jobs));
            let name = format!("objects-fetch-{number}");
            let run = move || fetch::run(&shared, &jobs);
            threads.push(std::thread::Builder::new().name(name).spawn(run)?);
        }
        let of_socket = Arc::clone(&shared);
        let run = move || socket::listen(&of_socket, &listener);
        threads.push(std::thread::Builder::new().name("objects-socket".to_owned()).spawn(run)?);
        let news = if directory {
            let (news, inbox) = channel();
            let shared = Arc::clone(&shared);
            let run = move || directory::announce(&shared, &inbox);
            let builder = std::thread::Builder::new().name("objects-directory".to_owned());
            threads.push(builder.spawn(run)?);
            Some(news)
        } else {
            None
        };
        let calls = Calls { fetches: fetches.clone(), news: news.clone() };
        let metrics = Arc::new(TransferMetrics::default());
        let manager = Self { shared, threads, fetches: Some(fetches), news, metrics };
        Ok((manager, Box::new(calls)))
    }

    /// What others come in through.
    #[must_use]
    pub fn door(&self) -> Door {
        Door(Arc::clone(&self.shared))
    }

    /// Ends the connections to other nodes, within a quarter of a second; fetches make new ones.
    pub fn disconnect(&self) {
        self.shared.disconnects.fetch_add(1, Ordering::AcqRel);
    }

    /// From now on objects are moved so: what comes next, not what is under way. Connections stay, and
    /// so does what was learned; only [`Move::Auto`] learns.
    pub fn move_by(&self, moves: Move) {
        *lock(&self.shared.moves) = moves;
    }

    /// Gives up buffers that are kept for connections to come.
    pub fn forget_buffers(&self) {
        lock(&self.shared.contexts).iter().for_each(|context| context.forget_buffers());
    }

    /// The figures, as of the last [`Manager::publish`].
    #[must_use]
    pub fn metrics(&self) -> Arc<TransferMetrics> {
        Arc::clone(&self.metrics)
    }

    /// Brings the figures up to date.
    pub fn publish(&self) {
        let (figures, metrics) = (&self.shared.figures, &self.metrics);
        let read = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        metrics.objects_fetched_objects.publish(read(&figures.fetched));
        metrics.objects_fetched_bytes.publish(read(&figures.fetched_bytes));
        metrics.objects_sent_fetches.publish(read(&figures.sent));
        metrics.objects_read_fetches.publish(read(&figures.read));
        metrics.objects_socket_fetches.publish(read(&figures.socket));
        metrics.objects_failed_transfers.publish(read(&figures.failed));
        metrics.objects_connections.publish(read(&figures.connections));
        metrics.objects_serving_peers.set(read(&figures.serving));
        metrics.objects_directory_up.set(u64::from(figures.directory_up.load(Ordering::Relaxed)));
        metrics.objects_crossing_bytes.set(read(&self.shared.crossing));
        let contexts = lock(&self.shared.contexts);
        let sum = |of: fn(&Context) -> u64| contexts.iter().map(|context| of(context)).sum();
        let registrations = sum(|context| read_of(&context.registrations));
        metrics.objects_registrations.publish(registrations);
        metrics.objects_reused_buffers.publish(sum(|context| read_of(&context.reused_buffers)));
        metrics.objects_registered_segments.set(sum(|context| context.registered() as u64));
    }
}

fn read_of(figure: &AtomicU64) -> u64 {
    figure.load(Ordering::Relaxed)
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.fetches = None;
        self.news = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        lock(&self.shared.contexts).clear();
    }
}
