//! How a relay reaches the relays of other hosts: the bootstrap exchange, asked and answered off the
//! relay's thread.
//!
//! One thread per host dials; it sleeps on a channel. Callers come in on the bootstrap service's
//! thread.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use beeline_fabric::{ConnectInfo, Device};
use beeline_fabric_open::{
    Bootstrap, BootstrapAddress, BootstrapConfig, Dialled, Dialler, Incoming, OpenError,
    ServedWindow, Service, ServiceUrl, Side, open, open_window,
};
use beeline_sockets_relay::network::{Event, Inbox, Network};

/// Name of the relays' service in the bootstrap exchange.
pub const SERVICE: &str = "sockets-relay";
/// Longest exchange.
const PATIENCE: Duration = Duration::from_secs(5);
/// First byte of what a caller says: it calls.
const CALLS: u8 = b'C';
/// It asks whether we called.
const ASKS: u8 = b'A';

/// Where this host's relay is called, and how it calls the others.
#[derive(Clone, Debug)]
pub struct Places {
    /// `tcp://ADDRESS:PORT`, or `auto://`: every provider this host has, `verbs://`: RDMA and TCP; with
    /// `?window=/FILE` behind `auto://` or `ntb://` also that memory window.
    pub listen: String,
    /// The other relays, in the order of the configuration's hosts.
    pub relays: Vec<String>,
}

enum Job {
    Find,
    Join { link: u64, info: ConnectInfo, hello: Vec<u8> },
    Confirm { link: u64, words: Vec<u8> },
}

/// The way to other relays. Dropping it closes the door.
#[derive(Debug)]
pub struct Links {
    jobs: Vec<Sender<Job>>,
    _bootstrap: Bootstrap,
}

impl Links {
    /// Listens at this host's place; what happens goes to `inbox`.
    ///
    /// Errors: [`OpenError`].
    pub fn open(places: &Places, inbox: &Inbox) -> Result<Self, OpenError> {
        let url = ServiceUrl::parse(&places.listen)?;
        let bad = |reason| OpenError::Url { url: places.listen.clone(), reason };
        let BootstrapAddress::Tcp(address) = &url.address else {
            return Err(bad("a relay is called over the network"));
        };
        let address: std::net::SocketAddr =
            address.parse().map_err(|_| bad("a relay listens at an address and a port"))?;
        let mut devices = devices(&url, address.ip())?;
        let window = window(&url)?;
        devices.extend(window.iter().map(|window| Arc::clone(&window.device)));
        let window = window.and_then(|window| window.end);
        let incoming = inbox.clone();
        let service = Service {
            name: SERVICE.to_owned(),
            shards: 1,
            payload: Vec::new(),
            incoming: Box::new(move |call| greet(&incoming, call)),
        };
        let config = BootstrapConfig { tcp: Some(address), window, ..BootstrapConfig::default() };
        let bootstrap = Bootstrap::listen(config, devices, vec![service])?;
        let mut jobs = Vec::new();
        for (host, relay) in places.relays.iter().enumerate() {
            let dialler = Dialler::new(SERVICE, relay, PATIENCE)?;
            let (sender, receiver) = channel();
            let caller = Caller { host, dialler, dialled: None, inbox: inbox.clone() };
            std::thread::Builder::new()
                .name(format!("relay-dial-{host}"))
                .spawn(move || caller.run(&receiver))
                .map_err(|source| OpenError::Listen { address: "a thread".to_owned(), source })?;
            jobs.push(sender);
        }
        Ok(Self { jobs, _bootstrap: bootstrap })
    }

    fn put(&self, host: usize, job: Job) {
        if let Some(jobs) = self.jobs.get(host) {
            // The thread lives as long as the channel.
            let _ = jobs.send(job);
        }
    }
}

impl Network for Links {
    fn find(&self, host: usize) {
        self.put(host, Job::Find);
    }

    fn join(&self, host: usize, link: u64, info: ConnectInfo, hello: Vec<u8>) {
        self.put(host, Job::Join { link, info, hello });
    }

    fn confirm(&self, host: usize, link: u64, words: Vec<u8>) {
        self.put(host, Job::Confirm { link, words });
    }
}

/// The memory window that callers can be served through, if one is named.
fn window(url: &ServiceUrl) -> Result<Option<ServedWindow>, OpenError> {
    let Some(window) = &url.window else { return Ok(None) };
    let mut text = format!("ntb://{}?", window.inbound.display());
    if let Some(side) = window.side {
        text += &format!("side={}&", u8::from(side == Side::Second));
    }
    if let Some(outbound) = &window.outbound {
        text += &format!("outbound={}", outbound.display());
    }
    open_window(text.trim_end_matches(['?', '&'])).map(Some)
}

/// What callers can be served over. At least TCP has to open.
fn devices(url: &ServiceUrl, ip: IpAddr) -> Result<Vec<Arc<dyn Device>>, OpenError> {
    let provider = url.provider.as_deref();
    let host = match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    let mut devices = Vec::new();
    let mut offer = |url: String| match open(&url) {
        Ok(device) => devices.push(device),
        Err(error) => tracing::debug!(%error, url, "not offered to other relays"),
    };
    if matches!(provider, None | Some("shm")) {
        offer("shm://".to_owned());
    }
    if matches!(provider, None | Some("verbs")) && !ip.is_loopback() {
        let any = if ip.is_unspecified() { String::new() } else { format!("?address={host}") };
        offer(format!("verbs://{any}"));
    }
    devices.push(open(&format!("tcp://{host}"))?);
    Ok(devices)
}

/// One caller of the service.
fn greet(inbox: &Inbox, call: Incoming) {
    let Incoming { device, peer, payload, reply, .. } = call;
    match payload.split_first() {
        Some((&CALLS, hello)) => inbox.put(Event::Called {
            device,
            info: peer,
            hello: hello.to_vec(),
            answer: Box::new(move |answer| match answer {
                Ok((info, hello)) => reply.accept(&info, hello),
                Err(why) => reply.refuse(why),
            }),
        }),
        Some((&ASKS, words)) => inbox.put(Event::Asked {
            words: words.to_vec(),
            answer: Box::new(move |answer| match answer {
                Ok(()) => reply.accept(&ConnectInfo(Vec::new()), vec![ASKS]),
                Err(why) => reply.refuse(why),
            }),
        }),
        _ => reply.refuse("neither a call nor a question"),
    }
}

/// What dials one host.
struct Caller {
    host: usize,
    dialler: Dialler,
    dialled: Option<Dialled>,
    inbox: Inbox,
}

impl Caller {
    fn run(mut self, jobs: &Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            let event = match job {
                Job::Find => {
                    let device = self.find();
                    Event::Found { host: self.host, device }
                }
                Job::Join { link, info, hello } => {
                    let answer = self.exchange(CALLS, &info, &hello);
                    Event::Joined { link, answer }
                }
                Job::Confirm { link, words } => {
                    let known = self.dialled.is_some() || self.find().is_ok();
                    let nobody = ConnectInfo(Vec::new());
                    let yes = known
                        && self
                            .exchange(ASKS, &nobody, &words)
                            .is_ok_and(|(_, word)| word == [ASKS]);
                    Event::Confirmed { link, yes }
                }
            };
            self.inbox.put(event);
        }
    }

    /// Anew each time: the relay may have come back at another device.
    fn find(&mut self) -> Result<Arc<dyn Device>, String> {
        let dialled = self.dialler.dial().map_err(|error| error.to_string())?;
        tracing::info!(
            host = self.host,
            provider = dialled.provider,
            reason = %dialled.reason,
            "the relay of a host is reached"
        );
        let device = Arc::clone(&dialled.device);
        self.dialled = Some(dialled);
        Ok(device)
    }

    fn exchange(
        &mut self,
        kind: u8,
        info: &ConnectInfo,
        words: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), String> {
        let dialled = self.dialled.as_ref().ok_or("nothing was agreed on")?;
        let payload = [&[kind], words].concat();
        let outcome = dialled.exchange(0, info, &payload).map_err(|error| error.to_string());
        if outcome.is_err() {
            self.dialled = None;
        }
        outcome
    }
}
