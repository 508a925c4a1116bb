//! Which transport carries the commands, and what is tried when it breaks.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_documents_channel::{
    ChannelClient, ClientOptions, ConnectError, MessageType, ProcMeters, RequestError, RnicInfo,
    Submit, connect,
};
use beeline_env::SystemClock;
use beeline_fabric_open::{Dialler, OpenError};

use crate::client::Options;
use crate::error::ClientError;
use crate::follow::Member;
use crate::login::{Login, LoginError, Salted, log_in};
use crate::wire::Wire;

/// A connection that lasted this long is no reason to avoid its provider.
const LASTED: Duration = Duration::from_secs(10);
/// How long a server may turn a client away in the middle of an exchange.
const PATIENCE: Duration = Duration::from_secs(5);
/// Providers there are at most: shared memory, a window, RDMA, TCP.
const PROVIDERS: usize = 4;

/// What carries commands now.
#[derive(Debug)]
pub(crate) enum Carrier {
    Channel { channel: Box<ChannelClient>, provider: String, reason: String },
    Wire { wire: Wire, reason: String },
}

/// Where the store is.
#[derive(Debug)]
pub(crate) struct Road {
    address: String,
    /// `None` for the wire alone.
    dialler: Option<Dialler>,
    /// Where the wire is spoken, as far as known.
    wire: Option<SocketAddr>,
    /// What the store was reached at.
    host: String,
    carrier: Option<Carrier>,
    since: Instant,
    meters: ProcMeters,
    /// The user to log in as.
    login: Option<Login>,
    salted: Option<Salted>,
}

/// What is behind `scheme://`, without a path.
fn host_of(address: &str) -> &str {
    let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
    rest.split(['/', '?']).next().unwrap_or_default()
}

impl Road {
    pub(crate) fn new(address: &str, options: &Options) -> Result<Self, ClientError> {
        // An address that cannot be read is not shown: a password may stand in it.
        let (address, login) = Login::split(address).map_err(|reason| ClientError::Address {
            address: format!("{}://…", address.split_once("://").map_or("", |(scheme, _)| scheme)),
            reason: reason.to_owned(),
        })?;
        let address = address.as_str();
        let wrong = |reason: String| ClientError::Address { address: address.to_owned(), reason };
        let host = host_of(address).to_owned();
        let (dialler, wire) = if address.starts_with("mongodb://") {
            let name = if host.contains(':') { host.clone() } else { format!("{host}:27017") };
            let found = name.to_socket_addrs().map_err(|error| wrong(error.to_string()))?.next();
            (None, Some(found.ok_or_else(|| wrong("the name has no address".to_owned()))?))
        } else {
            let dialler = Dialler::new(crate::SERVICE, address, options.timeout)
                .map_err(|error| wrong(error.to_string()))?;
            (Some(dialler), options.wire)
        };
        Ok(Self {
            address: address.to_owned(),
            dialler,
            wire,
            host,
            carrier: None,
            since: Instant::now(),
            meters: ProcMeters::default(),
            login: login.or_else(|| options.login.clone()),
            salted: None,
        })
    }

    /// Goes to a member of the replica set, by the same way as before.
    pub(crate) fn turn_to(&mut self, member: Member, options: &Options) -> Result<(), ClientError> {
        let scheme = self.address.split_once("://").map_or("auto", |(scheme, _)| scheme);
        let address = match member.fabric.filter(|_| scheme != "mongodb") {
            Some(fabric) => format!("{scheme}://{fabric}"),
            None => format!("mongodb://{}", member.wire),
        };
        let (login, salted) = (self.login.take(), self.salted.take());
        *self = Self { login, salted, ..Self::new(&address, options)? };
        self.wire = Some(member.wire);
        Ok(())
    }

    /// As it was given, or found.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn carrier(&self) -> Option<&Carrier> {
        self.carrier.as_ref()
    }

    pub(crate) fn carrier_mut(&mut self) -> Option<&mut Carrier> {
        self.carrier.as_mut()
    }

    /// When the last connection was made: tells it from others.
    pub(crate) fn made(&self) -> Instant {
        self.since
    }

    /// The channel that carries commands, and its provider.
    ///
    /// Errors: the wire carries them.
    pub(crate) fn into_channel(mut self) -> Result<(ChannelClient, String), ClientError> {
        match self.carrier.take() {
            Some(Carrier::Channel { channel, provider, .. }) => Ok((*channel, provider)),
            Some(Carrier::Wire { reason, .. }) => {
                Err(ClientError::Unreachable { address: self.address, reason })
            }
            None => Err(ClientError::Protocol("no transport".to_owned())),
        }
    }

    /// Whether there is a connection, and it stands as far as this end can tell.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.carrier.as_mut().is_some_and(Carrier::is_alive)
    }

    /// Connects, unless it is connected: the channel over the best provider, then the next best, then the
    /// wire.
    pub(crate) fn open(&mut self, options: &Options) -> Result<&mut Carrier, ClientError> {
        if self.carrier.is_none() {
            self.connect(options)?;
        }
        match &mut self.carrier {
            Some(carrier) => Ok(carrier),
            None => Err(ClientError::Protocol("no transport".to_owned())),
        }
    }

    /// Connects, and logs in where there is a user to log in as.
    fn connect(&mut self, options: &Options) -> Result<(), ClientError> {
        let mut last = String::new();
        for _ in 0..PROVIDERS {
            let mut carrier = self.reach(options)?;
            self.since = Instant::now();
            let outcome = match &self.login {
                Some(login) => log_in(login, &mut self.salted, &mut |body| {
                    carrier.call(MessageType::Command, "admin", body, options.timeout, options.spin)
                }),
                None => Ok(()),
            };
            match outcome {
                Ok(()) => {
                    self.carrier = Some(carrier);
                    return Ok(());
                }
                Err(LoginError::Refused(error)) => return Err(error),
                Err(LoginError::Broken(error)) => {
                    last = error.to_string();
                    self.carrier = Some(carrier);
                    self.broke();
                }
            }
        }
        Err(ClientError::Unreachable { address: self.address.clone(), reason: last })
    }

    fn reach(&mut self, options: &Options) -> Result<Carrier, ClientError> {
        let mut reasons = Vec::new();
        if self.dialler.is_some() {
            match self.reach_channel(options, &mut reasons) {
                Ok(Some(carrier)) => return Ok(carrier),
                Ok(None) => {}
                Err(error) => return Err(error),
            }
        }
        let Some(address) = self.wire else {
            let reason = if reasons.is_empty() {
                "it does not say where the MongoDB wire is spoken".to_owned()
            } else {
                reasons.join("; ")
            };
            return Err(ClientError::Unreachable { address: self.address.clone(), reason });
        };
        match Wire::connect(address, options.timeout) {
            Ok(wire) => {
                let reason = if reasons.is_empty() {
                    "as the address says".to_owned()
                } else {
                    reasons.join("; ")
                };
                Ok(Carrier::Wire { wire, reason })
            }
            Err(error) => {
                reasons.push(format!("MongoDB wire at {address}: {error}"));
                let reason = reasons.join("; ");
                Err(ClientError::Unreachable { address: self.address.clone(), reason })
            }
        }
    }

    /// `None`: the wire is to be used, for the reasons that were added.
    fn reach_channel(
        &mut self,
        options: &Options,
        reasons: &mut Vec<String>,
    ) -> Result<Option<Carrier>, ClientError> {
        let Some(dialler) = &mut self.dialler else { return Ok(None) };
        for _ in 0..PROVIDERS {
            let dialled = match patiently(|| dialler.dial()) {
                Ok(dialled) => dialled,
                Err(error) => {
                    reasons.push(error.to_string());
                    return Ok(None);
                }
            };
            let channel = ClientOptions {
                is_rdma: options.is_rdma,
                checksum: options.checksum,
                register: options.register,
                outstanding: options.outstanding,
                transport_timeout: options.timeout,
                rnic: rnic(&dialled.provider),
                ..ClientOptions::default()
            };
            let mut exchange = |info: &_, hello: &[u8]| {
                patiently(|| dialled.exchange(0, info, hello)).map_err(|error| Box::new(error) as _)
            };
            let clock = Arc::new(SystemClock);
            let made = connect(&dialled.device, &mut exchange, &channel, clock, &mut self.meters);
            match made {
                Ok(channel) => {
                    self.wire =
                        channel.wire().map(|wire| reachable(wire, &self.host)).or(self.wire);
                    let (provider, reason) = (dialled.provider, dialled.reason.to_string());
                    let channel = Box::new(channel);
                    return Ok(Some(Carrier::Channel { channel, provider, reason }));
                }
                Err(ConnectError::UseTcp { reason, wire }) => {
                    self.wire = wire.map(|wire| reachable(wire, &self.host)).or(self.wire);
                    reasons.push(reason);
                    return Ok(None);
                }
                Err(error) => {
                    let why = format!("{} failed: {error}", dialled.provider);
                    dialler.avoid(&dialled.provider, why.clone());
                    reasons.push(why);
                }
            }
        }
        Ok(None)
    }

    /// The connection broke: the next one avoids its provider, unless it had lasted.
    pub(crate) fn broke(&mut self) {
        let Some(dialler) = &mut self.dialler else {
            self.carrier = None;
            return;
        };
        if let Some(Carrier::Channel { provider, .. }) = &self.carrier {
            if self.since.elapsed() >= LASTED {
                dialler.forgive();
            } else {
                dialler.avoid(provider, "the channel broke soon after it was made");
            }
        }
        self.carrier = None;
    }
}

impl Carrier {
    /// Whether it stands, as far as this end can tell.
    pub(crate) fn is_alive(&mut self) -> bool {
        match self {
            Self::Wire { wire, .. } => wire.is_alive(),
            Self::Channel { channel, .. } => channel.is_alive(),
        }
    }

    pub(crate) fn call(
        &mut self,
        kind: MessageType,
        name: &str,
        body: &[u8],
        limit: Duration,
        spin: Duration,
    ) -> Result<Vec<u8>, RequestError> {
        match self {
            Self::Wire { wire, .. } => wire.call(body, limit),
            Self::Channel { channel, .. } => {
                let name = name.as_bytes();
                let name =
                    &name[..name.len().min(beeline_documents_channel::message::LONGEST_NAME)];
                match channel.submit(kind, name, body, (0, 0), limit) {
                    Ok(index) => channel.wait(index, spin),
                    Err(Submit::Broken) => Err(RequestError::NotSent),
                    // This client sends one at a time: every buffer is in quarantine.
                    Err(_) => Err(RequestError::Broken),
                }
            }
        }
    }
}

/// Tries again for a while where the server turned this client away in the middle of an exchange: it holds so many at
/// a time, and lets the oldest go where more clients come at once.
fn patiently<T>(mut exchange: impl FnMut() -> Result<T, OpenError>) -> Result<T, OpenError> {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let start = Instant::now();
    loop {
        let error = match exchange() {
            Err(OpenError::Unreachable { address, source })
                if matches!(source.kind(), BrokenPipe | ConnectionReset | UnexpectedEof) =>
            {
                OpenError::Unreachable { address, source }
            }
            other => return other,
        };
        if start.elapsed() >= PATIENCE {
            return Err(error);
        }
        // Not all of them at the same time again.
        std::thread::sleep(Duration::from_millis(5 + u64::from(rand::random::<u8>() % 45)));
    }
}

/// The device of a provider on this host, as Algorithm 1 tells of it.
#[must_use]
pub fn rnic(provider: &str) -> RnicInfo {
    let mut info = RnicInfo::named(provider);
    if provider != "verbs" {
        return info;
    }
    let devices = beeline_fabric_open::rdma::devices().unwrap_or_default();
    if let Some(device) = devices.iter().find(|device| device.choice.is_ok()) {
        info.dev_name.clone_from(&device.name);
        if let Some(port) = device.ports.iter().find(|port| port.active) {
            info.ib_port = port.number;
            if let Some(gid) = port.gids.last() {
                (info.gid_idx, info.ip) = (gid.index, gid.ip());
            }
        }
    }
    info
}

/// An address that a server listens on, as a client reaches it.
fn reachable(wire: SocketAddr, host: &str) -> SocketAddr {
    if !wire.ip().is_unspecified() {
        return wire;
    }
    let found: Option<IpAddr> =
        host.to_socket_addrs().ok().and_then(|mut all| all.next()).map(|address| address.ip());
    found.map_or(wire, |ip| SocketAddr::new(ip, wire.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_listens_everywhere_is_reached_where_it_was_met() {
        let everywhere = "0.0.0.0:27017".parse().unwrap();
        assert_eq!(host_of("auto://127.0.0.1:4790/x?window=/y"), "127.0.0.1:4790");
        assert_eq!(reachable(everywhere, "127.0.0.1:4790"), "127.0.0.1:27017".parse().unwrap());
        let there = "10.0.0.1:27017".parse().unwrap();
        assert_eq!(reachable(there, "127.0.0.1:4790"), there);
    }
}
