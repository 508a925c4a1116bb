//! The bootstrap service: one thread, asleep unless somebody asks.
//!
//! It treats callers as hostile: a bounded number at a time (a new one pushes out the one that has
//! been talking longest without finishing its question), a bounded size and time each, one question
//! per connection, and nothing of a caller is believed but what it can prove by connecting.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_fabric::{ConnectInfo, Device};
use beeline_os::callers::{AfterFailure, Pause, after_failure, most_strangers};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::error::OpenError;
use crate::host::HostIdentity;
use crate::message::{
    Answer, MAX_PAYLOAD_BYTES, PREFIX_BYTES, Question, body_length, choose, decode, encode,
};
use crate::window::WindowEnd;

/// Least time between two attempts to open a device that comes and goes.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(1);

/// How the service listens.
#[derive(Clone, Debug)]
pub struct BootstrapConfig {
    /// TCP address; `None` for none. Default 127.0.0.1:4790.
    pub tcp: Option<SocketAddr>,
    /// Unix socket; an old one at this path is replaced. Default none.
    pub unix: Option<PathBuf>,
    /// How long a caller may take to ask, and later to take the answer. Default 5 s.
    pub caller_timeout: Duration,
    /// How long a service may take to answer. Default 10 s.
    pub service_timeout: Duration,
    /// Exchanges at a time. Default 64.
    pub max_exchanges: usize,
    /// URL of a device that may come and go (an RDMA device): opened when a client asks while none
    /// of that provider is among the devices, or the one that was is lost. Default none.
    pub renewed: Option<String>,
    /// This end of the memory window that is among the devices, so that clients find theirs.
    /// Default none.
    pub window: Option<WindowEnd>,
}

impl Default for BootstrapConfig {
    fn default() -> Self {
        Self {
            tcp: Some(SocketAddr::from(([127, 0, 0, 1], crate::url::DEFAULT_PORT))),
            unix: None,
            caller_timeout: Duration::from_secs(5),
            service_timeout: Duration::from_secs(10),
            max_exchanges: 64,
            renewed: None,
            window: None,
        }
    }
}

/// A service that clients ask for by name.
pub struct Service {
    /// Its name ("kv").
    pub name: String,
    /// Shards a client may join; at least 1.
    pub shards: u32,
    /// What the service tells every client, at most [`MAX_PAYLOAD_BYTES`].
    pub payload: Vec<u8>,
    /// Called on the bootstrap thread with each client's queue pair; must not block. It sends the
    /// value to the shard's thread, which makes the queue pair and answers.
    pub incoming: Box<dyn Fn(Incoming) + Send>,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A client's queue pair, waiting for its other end.
#[derive(Debug)]
pub struct Incoming {
    /// The service asked for.
    pub service: String,
    /// Below the service's `shards`.
    pub shard: u32,
    /// The chosen provider.
    pub provider: String,
    /// Its device, of those offered.
    pub device: Arc<dyn Device>,
    /// The client's queue pair.
    pub peer: ConnectInfo,
    /// What the client says to the service, at most [`MAX_PAYLOAD_BYTES`].
    pub payload: Vec<u8>,
    /// How to answer.
    pub reply: Reply,
}

/// Answers one client. Dropped unused, it refuses.
#[derive(Debug)]
pub struct Reply {
    to: Option<ReplyTo>,
}

/// Where the answer of one exchange goes.
#[derive(Debug)]
struct ReplyTo {
    token: u64,
    sender: Sender<(u64, Answer)>,
    wake: Arc<OwnedFd>,
}

impl Reply {
    /// The other end is `info`, already told to expect the client (`connect` with
    /// [`beeline_fabric::Role::Passive`]); `payload` is the service's word to this client.
    pub fn accept(mut self, info: &ConnectInfo, payload: Vec<u8>) {
        self.send(if payload.len() <= MAX_PAYLOAD_BYTES {
            Answer::Joined { connect_info: info.0.clone(), payload }
        } else {
            Answer::Refused { reason: "the service's answer is too long".to_owned() }
        });
    }

    /// No, and why.
    pub fn refuse(mut self, reason: impl Into<String>) {
        let mut reason: String = reason.into();
        let end = (0..=reason.len().min(4000)).rev().find(|at| reason.is_char_boundary(*at));
        reason.truncate(end.unwrap_or(0));
        self.send(Answer::Refused { reason });
    }

    fn send(&mut self, answer: Answer) {
        if let Some(ReplyTo { token, sender, wake }) = self.to.take() {
            // The service may have stopped; then nobody waits for the answer.
            let _ = sender.send((token, answer));
            let _ = rustix::io::write(&wake, &1_u64.to_ne_bytes());
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.send(Answer::Refused { reason: "the service did not answer".to_owned() });
    }
}

/// The running service. Dropping it stops the thread and closes what it listened on.
#[derive(Debug)]
pub struct Bootstrap {
    address: Option<SocketAddr>,
    unix: Option<PathBuf>,
    stop: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Bootstrap {
    /// Listens, and offers `services` over `devices` (best first is not needed: the choice is by
    /// what the client can reach).
    ///
    /// Errors: [`OpenError::Listen`].
    pub fn listen(
        config: BootstrapConfig,
        devices: Vec<Arc<dyn Device>>,
        services: Vec<Service>,
    ) -> Result<Self, OpenError> {
        let refused = |address: String| move |source| OpenError::Listen { address, source };
        let tcp = match config.tcp {
            None => None,
            Some(address) => {
                let listener = TcpListener::bind(address).map_err(refused(address.to_string()))?;
                listener.set_nonblocking(true).map_err(refused(address.to_string()))?;
                Some(listener)
            }
        };
        let address = tcp.as_ref().and_then(|listener| listener.local_addr().ok());
        let unix = match &config.unix {
            None => None,
            Some(path) => {
                let failed = || refused(path.display().to_string());
                // A live service at this path keeps it.
                if UnixStream::connect(path).is_ok() {
                    return Err(failed()(io::ErrorKind::AddrInUse.into()));
                }
                let _ = std::fs::remove_file(path);
                let listener = UnixListener::bind(path).map_err(failed())?;
                listener.set_nonblocking(true).map_err(failed())?;
                Some(listener)
            }
        };
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|error| refused("an event descriptor".to_owned())(error.into()))?;
        let wake = Arc::new(wake);
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, answers) = channel();
        let unix_path = config.unix.clone();
        let server = Server {
            config,
            tcp,
            unix,
            devices,
            looked: None,
            services: services.into_iter().map(|service| (service.name.clone(), service)).collect(),
            host: HostIdentity::this(),
            exchanges: Vec::new(),
            next_token: 0,
            sender,
            answers,
            wake: Arc::clone(&wake),
            stop: Arc::clone(&stop),
            pause: Pause::default(),
        };
        let thread = std::thread::Builder::new()
            .name("beeline-bootstrap".to_owned())
            .spawn(move || server.run())
            .map_err(refused("a thread".to_owned()))?;
        Ok(Self { address, unix: unix_path, stop, wake, thread: Some(thread) })
    }

    /// The TCP address in use (with the port the kernel chose, if it did).
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

impl Drop for Bootstrap {
    fn drop(&mut self) {
        // Release: pairs with the acquire load of the server's loop.
        self.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(path) = &self.unix {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(bytes),
            Self::Unix(stream) => stream.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    /// Reading the question.
    Asking,
    /// The service has it.
    Waiting,
    /// Writing the answer; so many bytes are out.
    Answering(usize),
}

#[derive(Debug)]
struct Exchange {
    token: u64,
    stream: Stream,
    phase: Phase,
    /// The question while asking, the answer while answering.
    bytes: Vec<u8>,
    until: Instant,
}

struct Server {
    config: BootstrapConfig,
    tcp: Option<TcpListener>,
    unix: Option<UnixListener>,
    devices: Vec<Arc<dyn Device>>,
    /// When the device that comes and goes was last looked for in vain.
    looked: Option<Instant>,
    services: HashMap<String, Service>,
    host: HostIdentity,
    exchanges: Vec<Exchange>,
    next_token: u64,
    sender: Sender<(u64, Answer)>,
    answers: Receiver<(u64, Answer)>,
    wake: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
    /// The listeners are not looked at.
    pause: Pause,
}

impl Server {
    fn run(mut self) {
        // Acquire: pairs with the release store in `Bootstrap::drop`.
        while !self.stop.load(Ordering::Acquire) {
            let ready = self.wait();
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            while let Ok((token, answer)) = self.answers.try_recv() {
                self.answer(token, &answer);
            }
            for token in ready {
                self.advance(token);
            }
            if !self.pause.is_on() || self.pause.end() {
                self.accept();
            }
            let now = Instant::now();
            self.exchanges.retain(|exchange| now < exchange.until);
        }
    }

    /// Sleeps until something happens; returns the exchanges that can move.
    fn wait(&self) -> Vec<u64> {
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        let callers = if self.pause.is_on() { PollFlags::empty() } else { PollFlags::IN };
        if let Some(listener) = &self.tcp {
            fds.push(PollFd::new(listener, callers));
        }
        if let Some(listener) = &self.unix {
            fds.push(PollFd::new(listener, callers));
        }
        let first = fds.len();
        for exchange in &self.exchanges {
            let flags = match exchange.phase {
                Phase::Asking => PollFlags::IN,
                Phase::Answering(_) => PollFlags::OUT,
                Phase::Waiting => PollFlags::empty(),
            };
            fds.push(PollFd::new(&exchange.stream, flags));
        }
        let next = self.exchanges.iter().map(|exchange| exchange.until).min();
        let timeout = next.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = timeout
            .into_iter()
            .chain(self.pause.left())
            .min()
            .and_then(|left| Timespec::try_from(left + Duration::from_millis(1)).ok());
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return Vec::new();
        }
        fds[first..]
            .iter()
            .zip(&self.exchanges)
            .filter(|(fd, _)| !fd.revents().is_empty())
            .map(|(_, exchange)| exchange.token)
            .collect()
    }

    fn accept(&mut self) {
        let most = most_strangers(self.config.max_exchanges);
        for _ in 0..16 {
            let stream = match self.next_caller() {
                Ok(stream) => stream,
                Err(error) => match after_failure(&error) {
                    AfterFailure::Sleep => return,
                    AfterFailure::Next => continue,
                    // No descriptor for it, and the caller stays in the queue: asking again at once
                    // would be asking for ever.
                    AfterFailure::MakeRoom => {
                        let asking = |old: &Exchange| old.phase == Phase::Asking;
                        match self.exchanges.iter().position(asking) {
                            Some(oldest) => drop(self.exchanges.remove(oldest)),
                            None => self.pause.begin(),
                        }
                        return;
                    }
                },
            };
            if self.exchanges.len() >= most {
                let idle = self.exchanges.iter().position(|old| old.phase == Phase::Asking);
                self.exchanges.remove(idle.unwrap_or(0));
            }
            let token = self.next_token;
            self.next_token += 1;
            let until = Instant::now() + self.config.caller_timeout;
            let (phase, bytes) = (Phase::Asking, Vec::new());
            self.exchanges.push(Exchange { token, stream, phase, bytes, until });
        }
    }

    /// Errors: the listeners'; `WouldBlock` when neither has a caller.
    fn next_caller(&self) -> io::Result<Stream> {
        let none = || Err(io::Error::from(io::ErrorKind::WouldBlock));
        let accepted = self.tcp.as_ref().map_or_else(none, |listener| {
            let (stream, _) = listener.accept()?;
            let _ = stream.set_nodelay(true);
            stream.set_nonblocking(true)?;
            Ok(Stream::Tcp(stream))
        });
        match (accepted, &self.unix) {
            (Err(error), Some(listener)) if error.kind() == io::ErrorKind::WouldBlock => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(Stream::Unix(stream))
            }
            (accepted, _) => accepted,
        }
    }

    fn position(&self, token: u64) -> Option<usize> {
        self.exchanges.iter().position(|exchange| exchange.token == token)
    }

    /// Moves an exchange whose stream is ready; drops it when it is over or misbehaves.
    fn advance(&mut self, token: u64) {
        let Some(index) = self.position(token) else { return };
        let keep = match self.exchanges[index].phase {
            Phase::Asking => match self.read(index) {
                Ok(None) => true,
                Ok(Some(question)) => {
                    self.exchanges[index].phase = Phase::Waiting;
                    self.exchanges[index].until = Instant::now() + self.config.service_timeout;
                    self.decide(token, question);
                    true
                }
                Err(reason) => {
                    tracing::debug!(%reason, "bootstrap caller dropped");
                    false
                }
            },
            Phase::Answering(_) => self.write(index),
            // Only hanging up is reported while the service thinks.
            Phase::Waiting => false,
        };
        if !keep && let Some(index) = self.position(token) {
            self.exchanges.remove(index);
        }
    }

    fn read(&mut self, index: usize) -> Result<Option<Question>, String> {
        let exchange = &mut self.exchanges[index];
        loop {
            let wanted = match exchange.bytes.first_chunk::<PREFIX_BYTES>() {
                None => PREFIX_BYTES,
                Some(prefix) => {
                    PREFIX_BYTES + body_length(prefix).map_err(|error| error.to_string())?
                }
            };
            let have = exchange.bytes.len();
            if have == wanted {
                let question = decode(&exchange.bytes[PREFIX_BYTES..]);
                return question.map(Some).map_err(|error| error.to_string());
            }
            let mut piece = [0; 4096];
            let most = (wanted - have).min(piece.len());
            match exchange.stream.read(&mut piece[..most]) {
                Ok(0) => return Err("it hung up".to_owned()),
                Ok(count) => exchange.bytes.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// True while there is more to write.
    fn write(&mut self, index: usize) -> bool {
        let exchange = &mut self.exchanges[index];
        let Phase::Answering(mut done) = exchange.phase else { return true };
        while done < exchange.bytes.len() {
            match exchange.stream.write(&exchange.bytes[done..]) {
                Ok(0) => return false,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    exchange.phase = Phase::Answering(done);
                    return true;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        false
    }

    fn answer(&mut self, token: u64, answer: &Answer) {
        let Some(index) = self.position(token) else { return };
        let Ok(bytes) = encode(answer) else {
            self.exchanges.remove(index);
            return;
        };
        let exchange = &mut self.exchanges[index];
        exchange.bytes = bytes;
        exchange.phase = Phase::Answering(0);
        exchange.until = Instant::now() + self.config.caller_timeout;
        self.advance(token);
    }

    fn decide(&mut self, token: u64, question: Question) {
        match question {
            Question::Negotiate { service, host, providers, forced } => {
                let answer = self.negotiate(&service, &host, &providers, forced);
                self.answer(token, &answer);
            }
            Question::Join { service, provider, shard, connect_info, payload } => {
                let device = self
                    .devices
                    .iter()
                    .find(|device| device.attributes().provider == provider)
                    .cloned();
                let found = self.services.get(&service).filter(|service| shard < service.shards);
                let (Some(device), Some(found)) = (device, found) else {
                    let reason =
                        format!("no service {service:?} with shard {shard} over {provider}");
                    return self.answer(token, &Answer::Refused { reason });
                };
                let (sender, wake) = (self.sender.clone(), Arc::clone(&self.wake));
                let to = Some(ReplyTo { token, sender, wake });
                (found.incoming)(Incoming {
                    service,
                    shard,
                    provider,
                    device,
                    peer: ConnectInfo(connect_info),
                    payload,
                    reply: Reply { to },
                });
            }
        }
    }

    /// Opens the device that comes and goes, where it is not there.
    fn renew(&mut self) {
        let Some(url) = &self.config.renewed else { return };
        let provider = url.split_once("://").map_or("", |(provider, _)| provider);
        let known = self.devices.len();
        // Let go of even if there is no other yet: until everybody has closed it, the kernel may
        // not be done with removing it.
        self.devices.retain(|device| !device.is_lost());
        if self.devices.len() < known {
            tracing::warn!(provider, "a device is gone");
            self.looked = None;
        }
        let there = self.devices.iter().any(|device| device.attributes().provider == provider);
        if there || self.looked.is_some_and(|looked| looked.elapsed() < RENEWAL_INTERVAL) {
            return;
        }
        self.looked = Some(Instant::now());
        match crate::providers::open(url) {
            Ok(device) => {
                tracing::info!(provider, "a device is there, and used from now on");
                self.devices.push(device);
            }
            Err(reason) => tracing::debug!(%reason, provider, "still not there"),
        }
    }

    fn negotiate(
        &mut self,
        service: &str,
        host: &HostIdentity,
        providers: &[String],
        forced: bool,
    ) -> Answer {
        self.renew();
        let Some(found) = self.services.get(service) else {
            return Answer::Refused { reason: format!("there is no service {service:?} here") };
        };
        let offered: Vec<&str> =
            self.devices.iter().map(|device| device.attributes().provider).collect();
        let window = self.config.window.as_ref();
        match choose((host, providers, forced), (&self.host, &offered, window)) {
            Some((provider, reason)) => Answer::Chosen {
                window: window.filter(|_| provider == "ntb").cloned(),
                provider,
                reason,
                shards: found.shards,
                payload: found.payload.clone(),
            },
            None => {
                let here = offered.join(", ");
                let reason = format!("no common provider: this end has {here}");
                Answer::Refused { reason }
            }
        }
    }
}
