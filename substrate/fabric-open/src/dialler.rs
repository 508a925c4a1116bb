//! The client's half: ask, choose, connect, fall back.

use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    CompletionQueue, ConnectInfo, Device, ProtectionDomain, QueuePair, QueuePairOptions, Role,
};
use beeline_fabric_tcp::with_host;

use crate::error::OpenError;
use crate::host::HostIdentity;
use crate::message::{Answer, PREFIX_BYTES, Question, Reason, body_length, decode, encode};
use crate::url::{BootstrapAddress, ServiceUrl};
use crate::window::{self, WindowEnd};

/// Providers that may fail where TCP works, best first.
const FALLIBLE: [&str; 3] = ["shm", "ntb", "verbs"];

/// Reaches one service, again and again: keeps the devices it opened and remembers which provider
/// failed.
#[derive(Debug)]
pub struct Dialler {
    service: String,
    url: ServiceUrl,
    timeout: Duration,
    devices: Vec<Arc<dyn Device>>,
    /// Providers that are not tried, and why.
    avoided: Vec<(&'static str, String)>,
    /// This machine has no RDMA to speak of.
    lacks_rdma: bool,
}

/// Why there is no agreement yet.
#[derive(Debug)]
enum Attempt {
    /// The window that was agreed on cannot be used; something else can.
    Window(OpenError),
    Exchange(OpenError),
}

impl From<OpenError> for Attempt {
    fn from(error: OpenError) -> Self {
        Self::Exchange(error)
    }
}

/// What was agreed.
#[derive(Clone, Debug)]
pub struct Dialled {
    /// To make queue pairs on.
    pub device: Arc<dyn Device>,
    /// Its provider.
    pub provider: String,
    /// Why that one.
    pub reason: Reason,
    /// Shards the service has.
    pub shards: u32,
    /// What the service says to everybody.
    pub payload: Vec<u8>,
    service: String,
    address: BootstrapAddress,
    timeout: Duration,
}

/// A connection with everything it stands on.
#[derive(Debug)]
pub struct Established {
    /// Connected.
    pub pair: Box<dyn QueuePair>,
    /// Its completion queue.
    pub queue: Rc<dyn CompletionQueue>,
    /// Its domain.
    pub domain: Arc<dyn ProtectionDomain>,
    /// The agreement behind it.
    pub dialled: Dialled,
    /// What the service said to this client.
    pub payload: Vec<u8>,
}

impl Dialler {
    /// A dialler for `service` at `url` (see [`ServiceUrl`]); each exchange is bounded by
    /// `timeout`.
    ///
    /// Errors: [`OpenError::Url`].
    pub fn new(service: &str, url: &str, timeout: Duration) -> Result<Self, OpenError> {
        Ok(Self {
            service: service.to_owned(),
            url: ServiceUrl::parse(url)?,
            timeout,
            devices: Vec::new(),
            avoided: Vec::new(),
            lacks_rdma: false,
        })
    }

    /// Notes that a connection over `provider` could not be made or broke, so that the next
    /// [`Dialler::dial`] chooses another. Lasts until [`Dialler::forgive`].
    pub fn avoid(&mut self, provider: &str, why: impl Into<String>) {
        let Some(known) = FALLIBLE.iter().find(|known| **known == provider) else { return };
        if self.url.provider.is_none() && !self.avoids(known) {
            self.avoided.push((known, why.into()));
        }
    }

    /// Tries every provider again.
    pub fn forgive(&mut self) {
        self.avoided.clear();
        self.lacks_rdma = false;
    }

    fn avoids(&self, provider: &str) -> bool {
        self.avoided.iter().any(|(avoided, _)| *avoided == provider)
    }

    /// Opens what is offered when the address names no provider; best first.
    fn offered(&mut self) -> Result<Vec<String>, OpenError> {
        let mut offered = Vec::new();
        for provider in FALLIBLE {
            if self.avoids(provider) || (provider == "verbs" && self.lacks_rdma) {
                continue;
            }
            if provider == "ntb" {
                // Opened once the service has said which.
                if window::is_there(self.url.window.as_ref()) {
                    offered.push(provider.to_owned());
                }
                continue;
            }
            match self.device(provider) {
                Ok(_) => offered.push(provider.to_owned()),
                // The ordinary case on most machines, and no reason to mention.
                Err(OpenError::Rdma(missing)) => {
                    tracing::debug!(%missing, "RDMA is not offered");
                    self.lacks_rdma = true;
                }
                Err(error) => {
                    let why = format!("{provider} cannot be opened here: {error}");
                    self.avoided.push((provider, why));
                }
            }
        }
        self.device("tcp")?;
        offered.push("tcp".to_owned());
        Ok(offered)
    }

    /// The server's reason, or, when a provider that would have been better is avoided, why it is.
    fn explained(&self, provider: &str, reason: Reason) -> Reason {
        let why = |avoided: &str| {
            self.avoided.iter().find(|(known, _)| *known == avoided).map(|(_, why)| why.clone())
        };
        // The server misses shared memory in the offer only on its own host.
        let fell_back = match (&reason, provider) {
            (Reason::ClientLacksSharedMemory, _) => FALLIBLE.into_iter().find_map(why),
            (Reason::Forced | Reason::SameHost, _) => None,
            (_, "tcp") => why("ntb").or_else(|| why("verbs")),
            (_, "verbs") => why("ntb"),
            _ => None,
        };
        fell_back.map_or(reason, Reason::FellBack)
    }

    /// The memory window towards a service that said `end` of its own.
    fn window(&mut self, end: Option<&WindowEnd>) -> Result<Arc<dyn Device>, OpenError> {
        // Anew each time: a window that was found is one device for the whole process, and the
        // service may have come back at another.
        self.devices.retain(|known| known.attributes().provider != "ntb");
        let device: Arc<dyn Device> = window::towards(end, self.url.window.as_ref())?;
        self.devices.push(Arc::clone(&device));
        Ok(device)
    }

    fn device(&mut self, provider: &str) -> Result<Arc<dyn Device>, OpenError> {
        // One that is lost is let go, and may have come back as another.
        self.devices.retain(|known| !known.is_lost());
        let known = self.devices.iter().find(|known| known.attributes().provider == provider);
        if let Some(device) = known {
            return Ok(Arc::clone(device));
        }
        let device = crate::providers::open(&format!("{provider}://"))?;
        self.devices.push(Arc::clone(&device));
        Ok(device)
    }

    /// Asks the service which provider to use. May block up to the timeout.
    ///
    /// Errors: [`OpenError`].
    pub fn dial(&mut self) -> Result<Dialled, OpenError> {
        loop {
            match self.ask_for_provider() {
                Err(Attempt::Window(error)) if self.url.provider.is_none() => {
                    // Avoided from here on, so that this is tried once.
                    self.avoid("ntb", error.to_string());
                }
                Err(Attempt::Window(error) | Attempt::Exchange(error)) => return Err(error),
                Ok(dialled) => return Ok(dialled),
            }
        }
    }

    fn ask_for_provider(&mut self) -> Result<Dialled, Attempt> {
        let providers = match self.url.provider.clone() {
            Some(provider) => {
                if provider != "ntb" {
                    self.device(&provider)?;
                }
                vec![provider]
            }
            None => self.offered()?,
        };
        let question = Question::Negotiate {
            service: self.service.clone(),
            host: HostIdentity::this(),
            providers: providers.clone(),
            forced: self.url.provider.is_some(),
        };
        let (answer, _) = ask(&self.url.address, &question, self.timeout)?;
        let Answer::Chosen { provider, reason, shards, payload, window } = answer else {
            return Err(unexpected(&self.url.address, answer).into());
        };
        if !providers.contains(&provider) {
            let reason = format!("it chose {provider:?}, which was not offered");
            return Err(
                OpenError::Protocol { address: self.url.address.to_string(), reason }.into()
            );
        }
        let reason = self.explained(&provider, reason);
        let device = match provider.as_str() {
            "ntb" => self.window(window.as_ref()).map_err(Attempt::Window)?,
            _ => self.device(&provider)?,
        };
        Ok(Dialled {
            device,
            provider,
            reason,
            shards,
            payload,
            service: self.service.clone(),
            address: self.url.address.clone(),
            timeout: self.timeout,
        })
    }

    /// Dials and connects one queue pair to `shard`, with a domain and a completion queue of
    /// `depth_entries` of its own. When that fails, again over the next best provider.
    ///
    /// Errors: [`OpenError`] of the last attempt.
    pub fn establish(
        &mut self,
        shard: u32,
        hello: &[u8],
        depth_entries: u32,
        options: QueuePairOptions,
    ) -> Result<Established, OpenError> {
        loop {
            let dialled = self.dial()?;
            match dialled.establish(shard, hello, depth_entries, options) {
                Err(error)
                    if FALLIBLE.contains(&dialled.provider.as_str())
                        && self.url.provider.is_none() =>
                {
                    // Avoided from here on, so that each provider is tried once.
                    let why = format!("{} failed: {error}", dialled.provider);
                    self.avoid(&dialled.provider, why);
                }
                outcome => return outcome,
            }
        }
    }
}

impl Dialled {
    /// Carries a queue pair's connect data, and `hello`, to `shard`; returns the other end's and
    /// the service's answer. The caller then connects as [`Role::Active`].
    ///
    /// Errors: [`OpenError`].
    pub fn exchange(
        &self,
        shard: u32,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), OpenError> {
        let question = Question::Join {
            service: self.service.clone(),
            provider: self.provider.clone(),
            shard,
            connect_info: info.0.clone(),
            payload: hello.to_vec(),
        };
        let (answer, host) = ask(&self.address, &question, self.timeout)?;
        let Answer::Joined { connect_info, payload } = answer else {
            return Err(unexpected(&self.address, answer));
        };
        let mut info = ConnectInfo(connect_info);
        if let Some(host) = host {
            info = beeline_fabric_verbs::with_host(&with_host(&info, host), host);
        }
        Ok((info, payload))
    }

    /// A queue pair of the caller's domain and completion queues, connected to `shard`. Returns it
    /// with the service's answer.
    ///
    /// Errors: [`OpenError`].
    pub fn queue_pair(
        &self,
        shard: u32,
        hello: &[u8],
        domain: &Arc<dyn ProtectionDomain>,
        (send, receive): (&Rc<dyn CompletionQueue>, &Rc<dyn CompletionQueue>),
        options: QueuePairOptions,
    ) -> Result<(Box<dyn QueuePair>, Vec<u8>), OpenError> {
        let mut pair = domain.create_queue_pair(send, receive, None, options)?;
        let (info, payload) = self.exchange(shard, &pair.connect_info(), hello)?;
        pair.connect(&info, Role::Active)?;
        pair.wait_connected(self.timeout)?;
        Ok((pair, payload))
    }

    fn establish(
        &self,
        shard: u32,
        hello: &[u8],
        depth_entries: u32,
        options: QueuePairOptions,
    ) -> Result<Established, OpenError> {
        let domain = self.device.allocate_protection_domain()?;
        let queue = self.device.create_completion_queue(depth_entries)?;
        let (pair, payload) = self.queue_pair(shard, hello, &domain, (&queue, &queue), options)?;
        Ok(Established { pair, queue, domain, dialled: self.clone(), payload })
    }
}

fn unexpected(address: &BootstrapAddress, answer: Answer) -> OpenError {
    let address = address.to_string();
    match answer {
        Answer::Refused { reason } => OpenError::Refused { address, reason },
        _ => OpenError::Protocol { address, reason: "it answered another question".to_owned() },
    }
}

/// One question, one answer; also the address the server was reached at.
fn ask(
    address: &BootstrapAddress,
    question: &Question,
    timeout: Duration,
) -> Result<(Answer, Option<IpAddr>), OpenError> {
    let protocol = |error: crate::message::MessageError| OpenError::Protocol {
        address: address.to_string(),
        reason: error.to_string(),
    };
    let unreachable = |source| OpenError::Unreachable { address: address.to_string(), source };
    let bytes = encode(question).map_err(protocol)?;
    let deadline = Instant::now() + timeout;
    let (body, host) = match address {
        BootstrapAddress::Unix(path) => {
            let stream = UnixStream::connect(path).map_err(unreachable)?;
            let limit = |left| {
                stream.set_read_timeout(Some(left))?;
                stream.set_write_timeout(Some(left))
            };
            (converse(&stream, &stream, limit, &bytes, deadline), None)
        }
        BootstrapAddress::Tcp(name) => {
            let stream = reach(name, deadline).map_err(unreachable)?;
            let host = stream.peer_addr().ok().map(|peer| peer.ip());
            let limit = |left| {
                stream.set_read_timeout(Some(left))?;
                stream.set_write_timeout(Some(left))
            };
            (converse(&stream, &stream, limit, &bytes, deadline), host)
        }
    };
    let body = body.map_err(unreachable)?.map_err(protocol)?;
    Ok((decode(&body).map_err(protocol)?, host))
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn reach(name: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in BootstrapAddress::resolve(name)? {
        match TcpStream::connect_timeout(&address, left(deadline)?) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

type Body = Result<Vec<u8>, crate::message::MessageError>;

/// Writes the question and reads the answer's body, within the deadline.
fn converse(
    mut reader: impl Read,
    mut writer: impl Write,
    limit: impl Fn(Duration) -> io::Result<()>,
    question: &[u8],
    deadline: Instant,
) -> io::Result<Body> {
    limit(left(deadline)?)?;
    writer.write_all(question)?;
    let mut fill = |bytes: &mut [u8]| -> io::Result<()> {
        let mut have = 0;
        while have < bytes.len() {
            limit(left(deadline)?)?;
            match reader.read(&mut bytes[have..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => have += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    let mut prefix = [0; PREFIX_BYTES];
    fill(&mut prefix)?;
    let length = match body_length(&prefix) {
        Ok(length) => length,
        Err(error) => return Ok(Err(error)),
    };
    let mut body = vec![0; length];
    fill(&mut body)?;
    Ok(Ok(body))
}
