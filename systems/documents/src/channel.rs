//! Clients over fabric: the same commands as the wire's, by one-sided writes.
//!
//! One thread polls all channels, executes what looks at a few documents where it was polled, and hands
//! the rest to workers, whose replies it writes. It sleeps when there is nothing to do.
//!
//! ```text
//! thread ── execute ──► jobs ──► workers ──┐
//!   ▲           └─ replies that wait for   │
//!   └────────────── other members ─────────┴─ deliveries
//! ```
//!
//! Invariants: the commands of one channel that use its session do so one at a time; what one client asks for
//! keeps at most one worker.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

pub use beeline_documents_channel::{RegisterOptions, RnicInfo, ServerOptions};

use beeline_documents_channel::ChannelId;
use beeline_fabric::{ConnectInfo, Device};
use beeline_os::poller::{Interest, Poller, Waker};
use tokio::runtime::Handle as Runtime;

use crate::commands::{Identity, NAMES};
use crate::engine::{Engine, lock};
use crate::listening::STACK;
use crate::stats::DocumentsMetrics;

mod execute;
mod jobs;
mod thread;

pub use execute::read_request;

use execute::Executive;
use jobs::Jobs;
use thread::Thread;

const WAKER: u64 = 0;
/// The first connection number of a channel; those of the wire are below.
const FIRST_CONNECTION: i32 = 1 << 30;

/// How fabric clients are served.
#[derive(Clone, Debug)]
pub struct ChannelOptions {
    /// How long the thread polls on after work before it sleeps. Default 20 us.
    pub spin: Duration,
    /// Limits.
    pub server: ServerOptions,
    /// The device of a provider, as clients are told of it, where `server` names none. Default: its name alone.
    pub rnic: fn(&str) -> RnicInfo,
}

impl Default for ChannelOptions {
    fn default() -> Self {
        let register = RegisterOptions { base_bytes: 4 << 20, ..RegisterOptions::default() };
        Self {
            spin: Duration::from_micros(20),
            server: ServerOptions { register, ..ServerOptions::default() },
            rnic: RnicInfo::named,
        }
    }
}

/// The answer to a fabric client.
#[derive(Clone, Debug)]
pub struct FabricWelcome {
    /// How to reach its queue pair's other end; `None`: it uses TCP.
    pub info: Option<ConnectInfo>,
    /// This end's greeting.
    pub payload: Vec<u8>,
}

/// A client that wants a channel.
pub struct FabricClient {
    /// The chosen provider's device.
    pub device: Arc<dyn Device>,
    /// How to reach the client's queue pair.
    pub peer: ConnectInfo,
    /// Its greeting.
    pub payload: Vec<u8>,
    /// Called once, on the thread of fabric clients.
    pub reply: Box<dyn FnOnce(Result<FabricWelcome, String>) + Send>,
}

impl fmt::Debug for FabricClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FabricClient")
            .field("provider", &self.device.attributes().provider)
            .finish_non_exhaustive()
    }
}

/// Figures of the thread, read by others.
#[derive(Debug, Default)]
struct Figures {
    channels: AtomicU64,
    requests: AtomicU64,
    request_bytes: AtomicU64,
    reply_bytes: AtomicU64,
    staged_bytes: AtomicU64,
    refused: AtomicU64,
    ended: AtomicU64,
    protocol_errors: AtomicU64,
    registrations: AtomicU64,
    registered_bytes: AtomicU64,
    sleeps: AtomicU64,
    kept_bytes: AtomicU64,
    parked: AtomicU64,
    overrun: AtomicU64,
    dropped_replies: AtomicU64,
}

#[derive(Debug)]
struct Shared {
    waker: Waker,
    stopping: AtomicBool,
    failed: AtomicBool,
    figures: Figures,
}

/// A request of a channel: of which server, which channel, which request.
type Origin = (u64, ChannelId, u32);

/// What other threads bring.
enum Delivery {
    Client(Box<FabricClient>),
    /// A reply. `finishes`: the worker of its channel goes on once it is written.
    Done {
        origin: Origin,
        bytes: Vec<u8>,
        finishes: bool,
    },
    /// A reply that waits in its channel; the worker goes on once there is room.
    Keep {
        origin: Origin,
        bytes: Vec<u8>,
    },
    /// It goes.
    Release(Origin),
    /// The newest time of the log.
    Optime(Origin, u64),
}

/// What other threads may do with it.
#[derive(Clone, Debug)]
pub struct ChannelHandle {
    shared: Arc<Shared>,
    deliveries: Arc<Mutex<Sender<Delivery>>>,
}

impl ChannelHandle {
    /// Regions registered so far, by the latest turn of the thread that found work.
    #[must_use]
    pub fn registrations(&self) -> u64 {
        self.shared.figures.registrations.load(Ordering::Relaxed)
    }

    /// Requests that came so far.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.shared.figures.requests.load(Ordering::Relaxed)
    }

    /// Bytes that are kept for clients: commands that are incomplete or wait, replies that wait.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.shared.figures.kept_bytes.load(Ordering::Relaxed)
    }

    /// Times the thread went to sleep.
    #[must_use]
    pub fn sleeps(&self) -> u64 {
        self.shared.figures.sleeps.load(Ordering::Relaxed)
    }

    fn deliver(&self, delivery: Delivery) {
        // Where the thread has stopped, no thread waits for the reply.
        let _ = lock(&self.deliveries).send(delivery);
        self.shared.waker.wake();
    }

    /// Hands over a client; the thread of fabric clients answers.
    pub fn accept(&self, client: FabricClient) {
        let sent = lock(&self.deliveries).send(Delivery::Client(Box::new(client)));
        self.shared.waker.wake();
        if let Err(mpsc::SendError(Delivery::Client(client))) = sent {
            (client.reply)(Err("the document store has stopped".to_owned()));
        }
    }
}

/// The running threads.
#[derive(Debug)]
pub(crate) struct Channels {
    handle: ChannelHandle,
    executive: Arc<Executive>,
    thread: Option<JoinHandle<()>>,
}

impl Channels {
    /// Starts them. Replies that wait for other members do so in `runtime`.
    pub(crate) fn start(
        engine: Arc<Engine>,
        identity: Identity,
        options: ChannelOptions,
        workers: usize,
        runtime: Runtime,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            waker: Waker::new()?,
            stopping: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            figures: Figures::default(),
        });
        let (sender, deliveries) = mpsc::channel();
        let deliveries_in = Arc::new(Mutex::new(sender));
        let handle = ChannelHandle { shared: Arc::clone(&shared), deliveries: deliveries_in };
        let workers = workers.max(1);
        let place = |of: &str| NAMES.iter().position(|name| *name == of).unwrap_or(NAMES.len());
        let executive = Arc::new(Executive {
            engine,
            identity,
            jobs: Jobs::new(workers),
            handle: handle.clone(),
            runtime,
            workers: Mutex::default(),
            find: place("find"),
            insert: place("insert"),
        });
        let mut channels =
            Self { handle: handle.clone(), executive: Arc::clone(&executive), thread: None };
        for _ in 0..workers {
            executive.hire()?;
        }
        let builder =
            std::thread::Builder::new().name("documents-fabric".to_owned()).stack_size(STACK);
        channels.thread = Some(builder.spawn(move || {
            let _watch = Watch(Arc::clone(&shared));
            let poller = Poller::new(64).and_then(|poller| {
                poller.add(&shared.waker, WAKER, Interest::READ)?;
                Ok(poller)
            });
            match poller {
                Ok(poller) => Thread::new(shared, deliveries, poller, options, executive).run(),
                Err(error) => {
                    tracing::error!(%error, "the thread of fabric clients cannot run");
                    shared.failed.store(true, Ordering::Release);
                }
            }
        })?);
        Ok(channels)
    }

    pub(crate) fn handle(&self) -> ChannelHandle {
        self.handle.clone()
    }

    pub(crate) fn health(&self) -> Result<(), String> {
        match self.handle.shared.failed.load(Ordering::Acquire) {
            true => {
                Err("the thread of fabric clients stopped working; restart the node".to_owned())
            }
            false => Ok(()),
        }
    }

    pub(crate) fn publish(&self, metrics: &DocumentsMetrics) {
        let figures = &self.handle.shared.figures;
        let read = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        metrics.documents_channels.set(read(&figures.channels));
        metrics.documents_channel_requests.publish(read(&figures.requests));
        metrics.documents_channel_request_bytes.publish(read(&figures.request_bytes));
        metrics.documents_channel_reply_bytes.publish(read(&figures.reply_bytes));
        metrics.documents_channel_staged_bytes.publish(read(&figures.staged_bytes));
        metrics.documents_channel_refused_clients.publish(read(&figures.refused));
        metrics.documents_channel_ended_clients.publish(read(&figures.ended));
        metrics.documents_channel_protocol_errors.publish(read(&figures.protocol_errors));
        metrics.documents_channel_registrations.publish(read(&figures.registrations));
        metrics.documents_channel_registered_bytes.set(read(&figures.registered_bytes));
        metrics.documents_channel_kept_bytes.set(read(&figures.kept_bytes));
        metrics.documents_channel_parked_requests.publish(read(&figures.parked));
        metrics.documents_channel_overrun_clients.publish(read(&figures.overrun));
        metrics.documents_channel_dropped_replies.publish(read(&figures.dropped_replies));
        metrics.documents_channel_sleeps.publish(read(&figures.sleeps));
    }

    /// Ends: channels are closed, workers finish what they are at.
    pub(crate) fn stop(&mut self) {
        self.handle.shared.stopping.store(true, Ordering::Release);
        self.handle.shared.waker.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of fabric clients ended in a panic");
        }
        self.executive.jobs.stop();
        let workers = std::mem::take(&mut *lock(&self.executive.workers));
        for worker in workers {
            if worker.join().is_err() {
                tracing::error!("a worker of fabric clients ended in a panic");
            }
        }
    }
}

impl Drop for Channels {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Says so when the thread ends in a panic.
struct Watch(Arc<Shared>);

impl Drop for Watch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(true, Ordering::Release);
            tracing::error!("the thread of fabric clients panicked");
        }
    }
}
