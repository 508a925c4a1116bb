//! The store: one thread that owns the objects of a node.
//!
//! ```text
//!  clients' rings ─┐                    ┌─► table   objects, handles, order of use
//!  Unix socket    ─┼─► serve ─► core ───┤
//!  pidfds, timers ─┘     ▲    (decides) └─► memory  segments, heaps, limit
//!                        └── effects: replies, descriptors, spills, fetches
//! ```

mod core;
mod entries;
mod figures;
#[cfg(test)]
mod hostile_tests;
mod memory;
#[cfg(test)]
mod model_tests;
mod peer;
mod planted;
mod processes;
mod reserve;
#[cfg(test)]
mod rig;
mod room;
mod serve;
#[cfg(test)]
mod situation_tests;
mod spill;
mod table;
mod waits;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use beeline_observe::CommandTimes;
use beeline_os::control_socket::ControlListener;
use beeline_os::poller::Waker;

pub use figures::ObjectMetrics;

use crate::id::ObjectId;
use crate::segment::Segment;

/// How a store is set up.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Where clients connect: a file, at most 107 bytes long.
    pub socket: PathBuf,
    /// Rights on that file, as in 0o600.
    pub socket_mode: u32,
    /// Most bytes of memory.
    pub memory_bytes: u64,
    /// Where objects go that memory has no room for.
    pub spill_directory: PathBuf,
    /// Most bytes there; 0: the least recently used objects are dropped instead.
    pub spill_bytes: u64,
    /// How long the loop polls on after work before it sleeps.
    pub spin: Duration,
    /// Most clients at once.
    pub max_clients: usize,
    /// Processors the store's thread keeps to; empty: any.
    pub processors: Vec<usize>,
}

/// What the store asks of the part that knows other nodes. Called on the store's thread; must not
/// block.
pub trait Cluster: Send {
    /// Bring `id` here, from the node at `from` or from any, by creating and sealing it as a client
    /// does; then say so with [`StoreHandle::fetched`].
    fn fetch(&mut self, id: ObjectId, from: Option<SocketAddr>);

    /// The object was sealed here.
    fn announce(&mut self, id: ObjectId);

    /// It is no longer here.
    fn withdraw(&mut self, id: ObjectId);
}

/// A node by itself: no object is anywhere else.
#[derive(Debug)]
pub struct Alone(pub StoreHandle);

impl Cluster for Alone {
    fn fetch(&mut self, id: ObjectId, _from: Option<SocketAddr>) {
        self.0.fetched(id, false);
    }

    fn announce(&mut self, _id: ObjectId) {}

    fn withdraw(&mut self, _id: ObjectId) {}
}

#[derive(Debug)]
pub(crate) enum Command {
    Fetched { id: ObjectId, found: bool },
    Publish,
    Stop,
}

/// How other threads reach a store.
#[derive(Clone, Debug)]
pub struct StoreHandle {
    commands: Sender<Command>,
    waker: Arc<Waker>,
    metrics: Arc<ObjectMetrics>,
    times: Arc<CommandTimes>,
    segments: memory::Segments,
}

impl StoreHandle {
    fn send(&self, command: Command) {
        // The other end goes when the store stops; then there is nothing to tell.
        let _ = self.commands.send(command);
        self.waker.wake();
    }

    /// A fetch that [`Cluster::fetch`] asked for ended; `found`: the object was sealed here.
    pub fn fetched(&self, id: ObjectId, found: bool) {
        self.send(Command::Fetched { id, found });
    }

    /// A segment of the store, for the transfers of this process.
    pub(crate) fn segment(&self, number: u32) -> Option<Arc<Segment>> {
        self.segments.get(number)
    }

    pub(crate) fn has_segment(&self, number: u32) -> bool {
        self.segments.has(number)
    }

    /// Segments that went so far.
    pub(crate) fn dropped_segments(&self) -> u64 {
        self.segments.dropped()
    }

    /// Asks the store to bring the figures up to date.
    pub fn publish(&self) {
        self.send(Command::Publish);
    }

    /// How long requests took where the store's thread ran them; one of 16 is timed.
    #[must_use]
    pub fn times(&self) -> Arc<CommandTimes> {
        Arc::clone(&self.times)
    }

    /// The figures, as of the last [`StoreHandle::publish`].
    #[must_use]
    pub fn metrics(&self) -> Arc<ObjectMetrics> {
        Arc::clone(&self.metrics)
    }
}

/// Keeps the calling thread to `processors`, if any are named; a refusal costs speed alone.
pub(crate) fn keep_to(processors: &[usize]) {
    if processors.is_empty() {
        return;
    }
    if let Err(error) = beeline_os::affinity::allow_current_thread(processors) {
        tracing::warn!(%error, ?processors, "a thread of the object store runs on any processor");
    }
}

/// A running store. Dropping it stops it: its memory goes when the last client unmapped it.
#[derive(Debug)]
pub struct Store {
    handle: StoreHandle,
    thread: Option<std::thread::JoinHandle<()>>,
    socket: PathBuf,
}

impl Store {
    /// Opens the socket and starts the store's thread. `cluster` makes what knows other nodes.
    ///
    /// Errors: the kernel's, for the socket, the spill directory or the thread.
    pub fn start(
        options: StoreOptions,
        cluster: impl FnOnce(StoreHandle) -> Box<dyn Cluster>,
    ) -> io::Result<Self> {
        let listener = ControlListener::bind_path(&options.socket, options.socket_mode)?;
        let waker = Arc::new(Waker::new()?);
        let (commands, inbox) = channel();
        let metrics = Arc::new(ObjectMetrics::default());
        let times = Arc::new(serve::request_times());
        let segments = memory::Segments::default();
        let handle = StoreHandle {
            commands,
            waker: Arc::clone(&waker),
            metrics: Arc::clone(&metrics),
            times: Arc::clone(&times),
            segments: segments.clone(),
        };
        let cluster = cluster(handle.clone());
        let socket = options.socket.clone();
        let processors = options.processors.clone();
        let server =
            serve::Server::new(options, listener, inbox, waker, metrics, cluster, segments)?
                .timed(times);
        let run = move || {
            keep_to(&processors);
            server.run();
        };
        let thread = std::thread::Builder::new().name("objects".to_owned()).spawn(run)?;
        Ok(Self { handle, thread: Some(thread), socket })
    }

    /// How other threads reach it.
    #[must_use]
    pub fn handle(&self) -> StoreHandle {
        self.handle.clone()
    }

    /// Whether the store's thread runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.handle.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}
