//! Clients over fabric: the same commands as the wire's, by one-sided writes.
//!
//! One thread polls all channels, executes what looks at a few documents where it was polled, and hands
//! the rest to workers, whose replies it writes. It sleeps when there is nothing to do.
//!
//! Invariant: the commands of one channel that use its session do so one at a time.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use beeline_documents_channel::{RegisterOptions, ServerOptions};

use beeline_documents_channel::{
    Answer, ChannelId, ChannelServer, Handler, Incoming, MessageType, ProcMeters, ReplyBuffer,
    RnicInfo, ServerCounters,
};
use beeline_documents_query::check;
use beeline_documents_query::error::{Code, QueryError};
use beeline_env::SystemClock;
use beeline_fabric::{ConnectInfo, Device};
use beeline_os::poller::{Interest, Poller, Waker};
use bson::raw::{RawBsonRef, RawDocument};
use bson::{Bson, Document};

use crate::commands::{self, Context, Identity, Request, Session, failure, point};
use crate::door::{STACK, may_take_long};
use crate::engine::{Engine, lock};
use crate::reply::Reply;
use crate::stats::DocumentsMetrics;

const WAKER: u64 = 0;
const FIRST_SERVER: u64 = 1;
/// Turns that only poll between two looks at everything else.
const TURNS_PER_LOOK: u32 = 64;
/// How often deadlines are looked at while there are some.
const EXPIRY: Duration = Duration::from_millis(500);
/// How often channels are looked at whose peers may have gone without a word.
const LOOK: Duration = Duration::from_secs(10);
/// The first connection number of a channel; those of the wire are below.
const FIRST_CONNECTION: i32 = 1 << 30;

/// How fabric clients are served.
#[derive(Clone, Debug)]
pub struct ChannelOptions {
    /// How long the thread polls on after work before it sleeps. Default 20 us.
    pub spin: Duration,
    /// Limits.
    pub server: ServerOptions,
}

impl Default for ChannelOptions {
    fn default() -> Self {
        let register = RegisterOptions { base_bytes: 4 << 20, ..RegisterOptions::default() };
        Self {
            spin: Duration::from_micros(20),
            server: ServerOptions { register, ..ServerOptions::default() },
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
    Done(Origin, Vec<u8>),
}

/// A command for a worker.
struct Job {
    origin: Origin,
    session: Arc<Mutex<Session>>,
    request: Request,
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

    /// Times the thread went to sleep.
    #[must_use]
    pub fn sleeps(&self) -> u64 {
        self.shared.figures.sleeps.load(Ordering::Relaxed)
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
    thread: Option<JoinHandle<()>>,
    workers: Vec<JoinHandle<()>>,
}

impl Channels {
    /// Starts them.
    pub(crate) fn start(
        engine: Arc<Engine>,
        identity: Identity,
        options: ChannelOptions,
        workers: usize,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            waker: Waker::new()?,
            stopping: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            figures: Figures::default(),
        });
        let (sender, deliveries) = mpsc::channel();
        let (jobs, waiting) = mpsc::channel::<Job>();
        let deliveries_in = Arc::new(Mutex::new(sender));
        let handle = ChannelHandle { shared: Arc::clone(&shared), deliveries: deliveries_in };
        let commands = Arc::new(Commands { engine, identity });
        let waiting = Arc::new(Mutex::new(waiting));
        let mut channels = Self { handle: handle.clone(), thread: None, workers: Vec::new() };
        for number in 0..workers.max(1) {
            let (commands, waiting, handle) =
                (Arc::clone(&commands), Arc::clone(&waiting), handle.clone());
            let builder =
                std::thread::Builder::new().name(format!("documents-w{number}")).stack_size(STACK);
            channels.workers.push(builder.spawn(move || work(&commands, &waiting, &handle))?);
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
                Ok(poller) => {
                    Thread {
                        shared,
                        deliveries,
                        poller,
                        served: Vec::new(),
                        next_token: FIRST_SERVER,
                        options,
                        armed: false,
                        sessions: HashMap::new(),
                        connections: FIRST_CONNECTION,
                        commands,
                        jobs,
                        gone: ServerCounters::default(),
                        sleeps: 0,
                        looked: Instant::now(),
                    }
                    .run();
                }
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
        metrics.documents_channel_sleeps.publish(read(&figures.sleeps));
    }

    /// Ends: channels are closed, workers finish what they have.
    pub(crate) fn stop(&mut self) {
        self.handle.shared.stopping.store(true, Ordering::Release);
        self.handle.shared.waker.wake();
        let threads = self.thread.take().into_iter().chain(self.workers.drain(..));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of fabric clients ended in a panic");
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

/// What commands need besides their session.
struct Commands {
    engine: Arc<Engine>,
    identity: Identity,
}

impl Commands {
    fn run(&self, session: &mut Session, request: Request) -> Reply {
        let mut context = Context {
            engine: &self.engine,
            session,
            identity: &self.identity,
            database: String::new(),
            request,
            // Nothing is kept waiting: a getMore at the end of its cursor has an empty batch.
            may_wait: false,
        };
        commands::run(&mut context)
    }
}

/// A worker: commands that may take long, one after another.
fn work(commands: &Commands, jobs: &Mutex<Receiver<Job>>, handle: &ChannelHandle) {
    loop {
        let next = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Job { origin, session, request }) = next else { return };
        let reply = commands.run(&mut lock(&session), request);
        let mut bytes = Vec::new();
        reply.write(&Document::new(), &mut bytes);
        // Where the thread has stopped, nobody waits for the reply.
        let _ = lock(&handle.deliveries).send(Delivery::Done(origin, bytes));
        handle.shared.waker.wake();
    }
}

/// Reads a request: the command's document, its long arrays as sequences of bytes.
///
/// Errors: no document, or one that is nested too deeply.
pub fn read_request(bytes: &[u8]) -> Result<Request, QueryError> {
    check::document(bytes)?;
    let broken =
        |error: &dyn fmt::Display| QueryError::new(Code::NonConformantBson, error.to_string());
    let raw = RawDocument::from_bytes(bytes).map_err(|error| broken(&error))?;
    let mut request = Request::default();
    for element in raw.iter_elements() {
        let element = element.map_err(|error| broken(&error))?;
        let name = element.key().as_str().to_owned();
        let value = element.value().map_err(|error| broken(&error))?;
        if matches!(name.as_str(), "documents" | "updates" | "deletes")
            && let RawBsonRef::Array(array) = value
        {
            let mut documents = Vec::new();
            let mut plain = true;
            for one in array {
                match one.map_err(|error| broken(&error))? {
                    RawBsonRef::Document(document) => documents.push(document.as_bytes().to_vec()),
                    _ => plain = false,
                }
            }
            if plain {
                request.sequences.push((name, documents));
                continue;
            }
        }
        let value = Bson::try_from(value).map_err(|error| broken(&error))?;
        request.body.insert(name, value);
    }
    Ok(request)
}

/// The commands of one server's channels, on its thread.
struct Executor<'t> {
    token: u64,
    commands: &'t Commands,
    sessions: &'t mut HashMap<(u64, ChannelId), Arc<Mutex<Session>>>,
    connections: &'t mut i32,
    jobs: &'t Sender<Job>,
}

impl Handler for Executor<'_> {
    fn execute(&mut self, incoming: &Incoming<'_>, reply: &mut ReplyBuffer) -> Answer {
        if !incoming.message.kind.is_command() {
            let text = "this node is no member of a set that ships its log over fabric";
            return Answer::Fail(Code::CommandNotSupported as u32, text.to_owned());
        }
        let connections = &mut *self.connections;
        let session = self.sessions.entry((self.token, incoming.channel)).or_insert_with(|| {
            *connections = connections.wrapping_add(1).max(FIRST_CONNECTION);
            let peer = format!("fabric:{}", incoming.channel);
            Arc::new(Mutex::new(Session { connection: *connections, peer, ..Session::default() }))
        });
        if incoming.message.kind == MessageType::Query
            && let Ok(session) = session.try_lock()
            && point::answer(&self.commands.engine, &session, incoming.body, reply)
        {
            return Answer::Reply;
        }
        let request = match read_request(incoming.body) {
            Ok(request) => request,
            Err(error) => {
                Reply::Document(failure(&error)).write(&Document::new(), reply);
                return Answer::Reply;
            }
        };
        if !may_take_long(&request)
            // A worker has it: this one goes behind what the worker does.
            && let Ok(mut session) = session.try_lock()
        {
            self.commands.run(&mut session, request).write(&Document::new(), reply);
            return Answer::Reply;
        }
        let origin = (self.token, incoming.channel, incoming.message.index);
        let job = Job { origin, session: Arc::clone(session), request };
        match self.jobs.send(job) {
            Ok(()) => Answer::Later,
            Err(_) => Answer::Fail(Code::InternalError as u32, "the store is stopping".to_owned()),
        }
    }

    fn ended(&mut self, channel: ChannelId) {
        self.sessions.remove(&(self.token, channel));
    }
}

struct Served {
    server: ChannelServer,
    token: u64,
    failed: bool,
}

struct Thread {
    shared: Arc<Shared>,
    deliveries: Receiver<Delivery>,
    poller: Poller,
    served: Vec<Served>,
    next_token: u64,
    options: ChannelOptions,
    armed: bool,
    sessions: HashMap<(u64, ChannelId), Arc<Mutex<Session>>>,
    connections: i32,
    commands: Arc<Commands>,
    /// Workers end when this is dropped.
    jobs: Sender<Job>,
    /// Counters of servers that are gone.
    gone: ServerCounters,
    sleeps: u64,
    looked: Instant,
}

/// A handler of one server, of fields that are not that server's.
macro_rules! executor {
    ($thread:ident, $token:expr) => {
        Executor {
            token: $token,
            commands: &$thread.commands,
            sessions: &mut $thread.sessions,
            connections: &mut $thread.connections,
            jobs: &$thread.jobs,
        }
    };
}

impl Thread {
    fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let mut last_work = Instant::now();
        let (mut turns, mut worked) = (0_u32, false);
        loop {
            let completions = self.poll();
            turns = turns.wrapping_add(1);
            if completions > 0 {
                self.armed = false;
                worked = true;
            }
            if !turns.is_multiple_of(TURNS_PER_LOOK) {
                if completions == 0 {
                    std::hint::spin_loop();
                }
                continue;
            }
            if shared.stopping.load(Ordering::Acquire) {
                break;
            }
            let now = Instant::now();
            let outside = self.look_outside();
            self.expire(now);
            if std::mem::take(&mut worked) || outside {
                last_work = now;
                self.publish();
                continue;
            }
            if now.duration_since(last_work) < self.options.spin {
                // Where more threads want to run than there are cores, one that only polls is last.
                std::thread::yield_now();
                continue;
            }
            if !self.arm() {
                // Freshly armed: what came before produces no event, so one more look.
                turns = TURNS_PER_LOOK - 1;
                continue;
            }
            self.sleeps += 1;
            self.publish();
            self.sleep();
            last_work = Instant::now();
        }
        for served in &mut self.served {
            let mut executor = executor!(self, served.token);
            served.server.shut_down(&mut executor);
        }
        self.publish();
    }

    fn poll(&mut self) -> usize {
        let mut completions = 0;
        for served in &mut self.served {
            let mut executor = executor!(self, served.token);
            match served.server.poll(&mut executor) {
                Ok(count) => completions += count,
                Err(error) => {
                    tracing::error!(%error, "a completion queue of the document store failed");
                    served.failed = true;
                }
            }
        }
        completions
    }

    fn expire(&mut self, now: Instant) {
        if now.duration_since(self.looked) < EXPIRY {
            return;
        }
        self.looked = now;
        for served in &mut self.served {
            let mut executor = executor!(self, served.token);
            served.server.expire(&mut executor);
        }
    }

    /// New clients, replies of workers, servers that failed; whether there was any.
    fn look_outside(&mut self) -> bool {
        let mut any = false;
        while let Ok(delivery) = self.deliveries.try_recv() {
            any = true;
            match delivery {
                Delivery::Client(client) => self.meet(*client),
                Delivery::Done((token, channel, index), bytes) => {
                    let served = self.served.iter_mut().find(|served| served.token == token);
                    if let Some(served) = served {
                        let mut executor = executor!(self, token);
                        served.server.respond(channel, index, &bytes, &mut executor);
                    }
                }
            }
        }
        let lost = |served: &Served| {
            served.failed || served.server.device().is_lost() && served.server.channels() == 0
        };
        if self.served.iter().any(lost) {
            for served in self.served.iter_mut().filter(|served| lost(served)) {
                let mut executor = executor!(self, served.token);
                served.server.shut_down(&mut executor);
                add(&mut self.gone, served.server.counters());
                // Closing would not do: a peer may hold the descriptor open.
                let _ = self.poller.remove(served.server.event_descriptor());
            }
            self.served.retain(|served| !lost(served));
        }
        any
    }

    fn meet(&mut self, client: FabricClient) {
        let known =
            self.served.iter().position(|one| Arc::ptr_eq(one.server.device(), &client.device));
        let index = match known.map_or_else(|| self.serve(&client.device), Ok) {
            Ok(index) => index,
            Err(reason) => return (client.reply)(Err(reason)),
        };
        self.armed = false;
        let (info, payload) = self.served[index].server.accept(&client.peer, &client.payload);
        (client.reply)(Ok(FabricWelcome { info, payload }));
    }

    fn serve(&mut self, device: &Arc<dyn Device>) -> Result<usize, String> {
        let mut options = self.options.server.clone();
        if options.rnic.dev_name.is_empty() {
            options.rnic = RnicInfo::named(device.attributes().provider);
        }
        let server = ChannelServer::new(
            Arc::clone(device),
            options,
            Arc::new(SystemClock),
            Box::new(ProcMeters::default()),
        )
        .map_err(|error| error.to_string())?;
        let token = self.next_token;
        self.poller
            .add(server.event_descriptor(), token, Interest::READ)
            .map_err(|error| error.to_string())?;
        self.next_token += 1;
        self.served.push(Served { server, token, failed: false });
        Ok(self.served.len() - 1)
    }

    /// Asks for events; true when they had been asked for before and nothing came since.
    fn arm(&mut self) -> bool {
        if self.armed || self.served.is_empty() {
            return true;
        }
        for served in &mut self.served {
            if let Err(error) = served.server.arm() {
                tracing::error!(%error, "a completion queue of the document store cannot be armed");
                served.failed = true;
            }
        }
        self.armed = true;
        false
    }

    fn sleep(&mut self) {
        let expects = self.served.iter().any(|served| served.server.expects());
        let serves = self.served.iter().any(|served| served.server.channels() > 0);
        let limit = if expects { Some(EXPIRY) } else { serves.then_some(LOOK) };
        let events = match self.poller.wait(limit) {
            Ok(events) => events,
            Err(error) => {
                tracing::error!(%error, "epoll_wait failed in the document store");
                std::thread::sleep(Duration::from_millis(100));
                return;
            }
        };
        self.armed = false;
        for index in 0..events {
            let token = self.poller.readiness(index).token;
            if token == WAKER {
                // Before the deliveries are taken: one that comes later wakes this thread again.
                self.shared.waker.clear();
            }
            let served = self.served.iter_mut().find(|served| served.token == token);
            if let Some(served) = served
                && let Err(error) = served.server.acknowledge()
            {
                tracing::error!(%error, "cannot clear a fabric event of the document store");
                served.failed = true;
            }
        }
        self.look_outside();
    }

    fn publish(&mut self) {
        let mut sum = self.gone;
        let (mut channels, mut registered) = (0, 0);
        for served in &self.served {
            add(&mut sum, served.server.counters());
            channels += served.server.channels() as u64;
            registered += served.server.registered_bytes();
        }
        let figures = &self.shared.figures;
        let set = |figure: &AtomicU64, value: u64| figure.store(value, Ordering::Relaxed);
        set(&figures.channels, channels);
        set(&figures.requests, sum.requests);
        set(&figures.request_bytes, sum.request_bytes);
        set(&figures.reply_bytes, sum.reply_bytes);
        set(&figures.staged_bytes, sum.staged_bytes);
        set(&figures.refused, sum.refused);
        set(&figures.ended, sum.ended);
        set(&figures.protocol_errors, sum.protocol_errors);
        set(&figures.registrations, sum.registrations);
        set(&figures.registered_bytes, registered);
        set(&figures.sleeps, self.sleeps);
    }
}

fn add(sum: &mut ServerCounters, more: ServerCounters) {
    sum.accepted += more.accepted;
    sum.refused += more.refused;
    sum.ended += more.ended;
    sum.protocol_errors += more.protocol_errors;
    sum.requests += more.requests;
    sum.request_bytes += more.request_bytes;
    sum.reply_bytes += more.reply_bytes;
    sum.staged_bytes += more.staged_bytes;
    sum.registrations += more.registrations;
}

#[cfg(test)]
mod tests {
    use bson::doc;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_request_keeps_its_fields_and_its_documents_as_bytes() {
        let one = doc! { "_id": 1 };
        let body = doc! { "insert": "c", "documents": [one.clone()], "$db": "d", "deletes": [1] };
        let request = read_request(&body.to_vec().unwrap()).unwrap();
        assert_eq!(request.name(), "insert");
        assert_eq!(request.sequences, [("documents".to_owned(), vec![one.to_vec().unwrap()])]);
        assert_eq!(request.body, doc! { "insert": "c", "$db": "d", "deletes": [1] });
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(at: prop::sample::Index, by: u8, cut: prop::sample::Index) {
            let body = doc! { "update": "c", "updates": [{ "q": { "a": 1 }, "u": [] }], "$db": "d" };
            let mut bytes = body.to_vec().unwrap();
            let place = at.index(bytes.len());
            bytes[place] ^= by;
            let _ = read_request(&bytes);
            bytes.truncate(cut.index(bytes.len()));
            let _ = read_request(&bytes);
        }
    }
}
