//! The monitor (NTM): programs' questions, the other monitors, ports, listeners, knocks, links.
//!
//! One thread. It owns every connection's memory and both ends of its placeholder until they are
//! given away, so that a program that becomes another one finds its connection again.
//!
//! Invariants: what a connection does next stands in [`crate::handshake`]; ports are free again when
//! both hosts' contexts are gone; whatever cannot be done here the kernel does, and the reason is
//! counted.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_ntb::CableError;
use beeline_os::control_socket::{ControlListener, ControlSocket};
use beeline_os::poller::{Interest, Poller, Waker};
use beeline_sockets::packets::channel::{Channel, ChannelError};
use beeline_sockets::packets::connection::PLACEHOLDER_BYTES;
use beeline_sockets::packets::dial::PLACEHOLDER_NAME;
use beeline_sockets::packets::page::{Page, THREADS};
use beeline_sockets::packets::protocol::{self, Answer};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::config::Config;
use crate::geometry::GeometryError;
use crate::handshake::{Action, Event, State, step};
use crate::keeper::{Inheritance, Keeper, Record};
use crate::listeners::Listeners;
use crate::message::{Message, Refusal};
use crate::partition::{Command, Key, Notice};
use crate::peer::{Fall, Remote};
use crate::thread::{Mailbox, Place};
use crate::waits::Waits;

/// How long a handshake may take.
const LONGEST_HANDSHAKE: Duration = Duration::from_secs(2);
/// How long a program may take to ask its question. Those that never do would keep others out.
const LONGEST_SILENCE: Duration = Duration::from_secs(5);
/// Connections that broke off before a program accepted them, at most.
const MOST_BROKEN: usize = 1024;
/// Longest time between two looks at the links: each end shows as often that it lives, and whatever happens rings.
const LOOK: Duration = beeline_ntb::link::BEAT;

const PROGRAMS: u64 = 1;
const MONITORS: u64 = 2;
const NOTICES: u64 = 3;
const KIND_AT: u32 = 56;
pub(crate) const CLIENT: u64 = 4 << KIND_AT;
pub(crate) const SESSION: u64 = 5 << KIND_AT;
pub(crate) const KNOCK: u64 = 6 << KIND_AT;
const LINK: u64 = 8 << KIND_AT;

/// Why a monitor cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MonitorError {
    /// A proxy of this user runs already in this network namespace.
    #[error("a proxy of this user runs already")]
    Running,
    /// The window cannot be had.
    #[error(transparent)]
    Cable(#[from] CableError),
    /// The window cannot be divided.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// Memory for programs cannot be had.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// More windows and partitions than programs can tell apart.
    #[error("{threads} partitions in all: {THREADS} at most")]
    Threads {
        /// As configured.
        threads: usize,
    },
    /// Other monitors cannot be listened for where the file says.
    #[error(
        "listen = \"{place}\": {source}; it has to be an address of this host with a free port"
    )]
    Listen {
        /// As configured.
        place: SocketAddr,
        /// The system's word.
        source: io::Error,
    },
    /// The system refused.
    #[error("{action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// The system's word.
        source: io::Error,
    },
}

fn system(action: &'static str) -> impl Fn(io::Error) -> MonitorError {
    move |source| MonitorError::System { action, source }
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) link: usize,
    pub(crate) state: State,
    pub(crate) key: Key,
    /// The other monitor's number of it.
    pub(crate) peer_id: u64,
    pub(crate) partition: Option<usize>,
    pub(crate) priority: u8,
    pub(crate) source: SocketAddr,
    pub(crate) destination: SocketAddr,
    pub(crate) since: Instant,
    pub(crate) memory: Option<Arc<OwnedFd>>,
    /// The program's end, until it is given.
    pub(crate) placeholder: Option<OwnedFd>,
    /// Who connects, until answered.
    pub(crate) client: Option<ControlSocket>,
    pub(crate) knock: Option<OwnedFd>,
    /// Where it comes from.
    pub(crate) knock_from: Option<SocketAddr>,
    /// The knock was taken into the backlog.
    pub(crate) knocked: bool,
    /// Why the other monitor is told no.
    pub(crate) refusal: Refusal,
    /// The program's process, as it asked; 0: not known.
    pub(crate) owner: u64,
    /// After a link fell or a proxy died.
    pub(crate) waits: Waits,
    /// It is on its way to another partition.
    pub(crate) moving: bool,
    /// Bytes of the other host's memory that its program has, or asks for, and who asks.
    pub(crate) extent_bytes: u64,
    pub(crate) extent_client: Option<ControlSocket>,
    /// Memory of this host that the other end's program writes.
    pub(crate) arrivals: Option<Arc<OwnedFd>>,
    pub(crate) arrival_bytes: u64,
}

impl Connection {
    pub(crate) fn record(&self, peer: &str) -> Record {
        Record {
            established: self.state == State::Established,
            peer: peer.to_owned(),
            partition: self.partition.unwrap_or(0),
            key: self.key,
            peer_id: self.peer_id,
            priority: self.priority,
            source: self.source,
            destination: self.destination,
            owner: self.owner,
        }
    }
}

/// A connection that broke off in the backlog of a listening socket: the program that accepts its knock gets a
/// connection that is broken off, as with the kernel's.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) knock: OwnedFd,
    /// Where it comes from.
    pub(crate) from: SocketAddr,
    pub(crate) memory: Arc<OwnedFd>,
    pub(crate) placeholder: OwnedFd,
}

/// Counters of a monitor.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) connected: u64,
    pub(crate) accepted: u64,
    pub(crate) refused: u64,
    pub(crate) denied: u64,
    pub(crate) resumed: u64,
    pub(crate) adopted: u64,
    /// Their memory was of another version, or none.
    pub(crate) not_adopted: u64,
    pub(crate) continued: u64,
    pub(crate) moved: u64,
    pub(crate) extents: u64,
    pub(crate) extents_refused: u64,
    /// Left to the kernel, and why.
    pub(crate) fallbacks: BTreeMap<&'static str, u64>,
}

/// The monitor.
#[derive(Debug)]
pub struct Monitor {
    pub(crate) config: Config,
    pub(crate) page: Arc<Page>,
    // Stopped before the page goes.
    pub(crate) remotes: Vec<Remote>,
    pub(crate) poller: Poller,
    pub(crate) programs: ControlListener,
    pub(crate) monitors: OwnedFd,
    /// Programs that have yet to ask, and since when.
    pub(crate) clients: HashMap<u64, (ControlSocket, Instant)>,
    pub(crate) notices: Arc<Mailbox<(Place, Notice)>>,
    pub(crate) connections: HashMap<u64, Connection>,
    pub(crate) keys: HashMap<(usize, Key), u64>,
    /// Connections by where their knocks come from. Knocks of the two versions of addresses may have one port.
    pub(crate) knocks: HashMap<SocketAddr, u64>,
    /// Of connections that are over, by their numbers.
    pub(crate) broken: HashMap<u64, Broken>,
    pub(crate) listeners: Listeners,
    pub(crate) next: u64,
    pub(crate) next_port: u16,
    pub(crate) begun: Instant,
    pub(crate) tally: Tally,
    pub(crate) keeper: Option<Keeper>,
}

fn raise_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

fn listen(at: SocketAddr) -> io::Result<OwnedFd> {
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &at)?;
    rustix::net::listen(&socket, 64)?;
    Ok(socket)
}

pub(crate) fn peer_of(socket: &OwnedFd) -> Option<SocketAddr> {
    SocketAddr::try_from(rustix::net::getpeername(socket).ok()??).ok()
}

impl Monitor {
    /// Opens windows, sockets and partitions.
    ///
    /// Errors: [`MonitorError`].
    pub fn open(config: Config) -> Result<Self, MonitorError> {
        Self::open_with(config, None)
    }

    /// As [`Monitor::open`], beside a keeper, with what a proxy left that died.
    ///
    /// Errors: [`MonitorError`].
    pub fn open_with(
        config: Config,
        keeper: Option<(Keeper, Inheritance)>,
    ) -> Result<Self, MonitorError> {
        Self::open_as(&protocol::name(), config, keeper)
    }

    /// As [`Monitor::open_with`], where programs find it by this name.
    pub(crate) fn open_as(
        name: &str,
        config: Config,
        keeper: Option<(Keeper, Inheritance)>,
    ) -> Result<Self, MonitorError> {
        let (keeper, inheritance) = keeper.unzip();
        let mut inheritance = inheritance.unwrap_or_default();
        raise_limit();
        let threads = config.peers.len() * config.partitions;
        if threads > THREADS {
            return Err(MonitorError::Threads { threads });
        }
        let looking = threads * config.threads_of_a_partition;
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        if config.threads_of_a_partition == 2 && looking >= processors {
            tracing::warn!(looking, processors, "two threads a partition want processors to spare");
        }
        let programs = ControlListener::bind(name.as_bytes());
        let programs = programs.map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => MonitorError::Running,
            _ => system("listening for programs")(error),
        })?;
        let monitors = listen(config.listen);
        let monitors =
            monitors.map_err(|source| MonitorError::Listen { place: config.listen, source })?;
        let page = Arc::new(match inheritance.page.take() {
            Some(memory) => Page::adopt(memory)?,
            None => Page::create()?,
        });
        if let (Some(keeper), Some(memory)) = (&keeper, page.memory()) {
            keeper.page(memory.as_fd());
        }
        let waker = Arc::new(Waker::new().map_err(system("making a waker"))?);
        let notices = Arc::new(Mailbox::new(Arc::clone(&waker)));
        let poller = Poller::new(256).map_err(system("making a poller"))?;
        let watch = |result: io::Result<()>| result.map_err(system("watching a descriptor"));
        watch(poller.add(&programs, PROGRAMS, Interest::READ))?;
        watch(poller.add(&monitors, MONITORS, Interest::READ))?;
        watch(poller.add(waker.as_fd(), NOTICES, Interest::READ))?;
        let mut remotes = Vec::new();
        for (index, peer) in config.peers.iter().enumerate() {
            let remote = Remote::open(index, peer.clone(), &config, &page, &notices)?;
            if let Some(bell) = remote.bell() {
                watch(poller.add(bell, LINK | index as u64, Interest::READ))?;
            }
            remotes.push(remote);
        }
        let mut monitor = Self {
            config,
            page,
            remotes,
            poller,
            programs,
            monitors,
            clients: HashMap::new(),
            notices,
            connections: HashMap::new(),
            keys: HashMap::new(),
            knocks: HashMap::new(),
            broken: HashMap::new(),
            listeners: Listeners::default(),
            // The other monitors may yet speak of numbers that the last proxy gave.
            next: ((inheritance.last >> 32) + 1) << 32,
            next_port: *crate::programs::PORTS.start(),
            begun: Instant::now(),
            tally: Tally::default(),
            keeper,
        };
        monitor.inherit(inheritance);
        monitor.show_routes();
        if let Some(keeper) = &monitor.keeper {
            keeper.works();
        }
        Ok(monitor)
    }

    /// Runs until `stop` is set, then ends the links in good order.
    ///
    /// Errors: the system's, of waiting.
    pub fn run(&mut self, stop: &AtomicBool) -> io::Result<()> {
        while !stop.load(Ordering::Relaxed) {
            self.turn()?;
        }
        self.remotes.iter_mut().for_each(Remote::go_down);
        let until = Instant::now() + Duration::from_secs(1);
        while Instant::now() < until && !self.remotes.iter().all(Remote::is_over) {
            std::thread::sleep(Duration::from_millis(2));
            let now = Instant::now();
            for remote in &mut self.remotes {
                let _ = remote.look(now);
            }
        }
        self.remotes.iter_mut().for_each(Remote::leave);
        Ok(())
    }

    /// Waits for news and takes it.
    ///
    /// Errors: the system's.
    pub fn turn(&mut self) -> io::Result<()> {
        let now = Instant::now();
        let quiet = self.remotes.iter().map(|remote| remote.quiet(now, LOOK)).min();
        let count = self.poller.wait(Some(quiet.unwrap_or(LOOK)))?;
        let news: Vec<_> = (0..count).map(|index| self.poller.readiness(index)).collect();
        for one in news {
            let index = one.token & ((1 << KIND_AT) - 1);
            match one.token {
                PROGRAMS => self.meet_programs(),
                MONITORS => self.meet_monitors(),
                NOTICES => self.notices.waker.clear(),
                token if token >> KIND_AT == 4 => self.hear_client(index),
                token if token >> KIND_AT == 5 => {
                    self.hear_session(usize::try_from(index).unwrap_or(0))
                }
                token if token >> KIND_AT == 6 => self.hear_knock(index),
                _ => {}
            }
        }
        self.take_notices();
        let now = Instant::now();
        for index in 0..self.remotes.len() {
            self.look_at_link(index, now);
            if self.config.balance && self.remotes[index].is_usable() {
                self.balance(index, now);
            }
            if self.remotes[index].is_to_dial(now) {
                self.dial(index, now);
            }
        }
        self.late(now);
        self.show_routes();
        Ok(())
    }

    /// Sees what became of a link, and what follows for its connections.
    pub(crate) fn look_at_link(&mut self, index: usize, now: Instant) {
        match self.remotes[index].look(now) {
            Some(Fall::Breaks) => self.forget_link(index),
            Some(Fall::Keeps) => self.suspend_link(index),
            None => {}
        }
        if self.remotes[index].is_usable() && !self.remotes[index].resumed {
            self.report_link(index);
        }
    }

    pub(crate) fn show_routes(&mut self) {
        let routes = self.remotes.iter().flat_map(|remote| {
            let usable = remote.is_usable();
            remote.peer.addresses.iter().map(move |&address| (address, usable))
        });
        self.page.set_routes(&routes.collect::<Vec<_>>());
    }

    // ---- connections ----

    pub(crate) fn add(
        &mut self,
        link: usize,
        key: Key,
        source: SocketAddr,
        destination: SocketAddr,
        priority: u8,
        state: State,
    ) -> u64 {
        let id = self.next;
        self.next += 1;
        self.keys.insert((link, key), id);
        let connection = Connection {
            link,
            state,
            key,
            peer_id: 0,
            partition: None,
            priority,
            source,
            destination,
            since: Instant::now(),
            memory: None,
            placeholder: None,
            client: None,
            knock: None,
            knock_from: None,
            knocked: false,
            refusal: Refusal::NoRoom,
            owner: 0,
            waits: Waits::default(),
            moving: false,
            extent_bytes: 0,
            extent_client: None,
            arrivals: None,
            arrival_bytes: 0,
        };
        self.connections.insert(id, connection);
        id
    }

    /// Something happened to a connection.
    pub(crate) fn happens(&mut self, id: u64, event: Event) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Some((next, actions)) = step(connection.state, event) else { return };
        tracing::trace!(id, before = ?connection.state, ?event, ?next, "connection");
        let fresh = next == State::Established && connection.state != next;
        connection.state = next;
        if fresh && let Some(keeper) = &self.keeper {
            let name = &self.remotes[connection.link].peer.name;
            keeper.amend(id, &connection.record(name));
        }
        for action in actions {
            self.act(id, *action);
        }
    }

    fn act(&mut self, id: u64, action: Action) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let (link, to, key) = (connection.link, connection.peer_id, connection.key);
        let refusal = connection.refusal;
        match action {
            Action::Create => self.create(id, true),
            Action::Knock => self.knock(id),
            Action::SendSynAck => {
                let partition = connection.partition.and_then(|place| u8::try_from(place).ok());
                let partition = partition.unwrap_or(0);
                self.send(link, &Message::SynAck { to, from: id, partition });
            }
            Action::SendRefusal => self.send(link, &Message::Refusal { to, why: refusal }),
            Action::SendEstablished => self.send(link, &Message::Established { to }),
            Action::SendGone => self.send(link, &Message::Gone { to }),
            Action::Open => self.command(id, Command::Open { key }),
            Action::Break => self.command(id, Command::Break { key }),
            Action::Give => {
                let given = connection.placeholder.take().zip(connection.memory.clone());
                if let (Some(client), Some((placeholder, memory))) =
                    (connection.client.take(), given)
                {
                    self.tally.connected += 1;
                    let fds = [memory.as_fd(), placeholder.as_fd()];
                    // A program that is gone closes its end at once.
                    let _ = client.send(&Answer::Channel.encode(), &fds);
                }
            }
            Action::Refuse => {
                if let Some(client) = connection.client.take() {
                    let (error, why) = match refusal {
                        Refusal::Denied => {
                            (Errno::CONNREFUSED.raw_os_error(), "denied by the other host")
                        }
                        Refusal::NoListener => (0, "no program with the library listens there"),
                        Refusal::NotTaken => (0, "the listening socket took no more"),
                        Refusal::PortInUse => (0, "the ports are in use"),
                        Refusal::NotHere => (0, "the other host has no such address"),
                        Refusal::NoRoom => (0, "no room, or no answer in time"),
                    };
                    self.leave_to_kernel(&client, error, why);
                }
            }
            Action::Free => {
                if let Some(connection) = self.connections.remove(&id) {
                    if let Some(keeper) = &self.keeper {
                        keeper.forget(id);
                    }
                    self.keys.remove(&(link, key));
                    if let Some(load) = connection
                        .partition
                        .and_then(|place| self.remotes[link].load.get_mut(place))
                    {
                        *load = load.saturating_sub(1);
                    }
                    self.forget_knock(id, connection);
                }
            }
        }
    }

    /// A connection is over. One that a program has yet to accept is kept for it, broken off.
    fn forget_knock(&mut self, id: u64, connection: Connection) {
        let Connection { knock, knock_from, knocked, memory, placeholder, .. } = connection;
        let Some((knock, from)) = knock.zip(knock_from) else { return };
        if let (true, Some(memory), Some(placeholder)) =
            (knocked && self.broken.len() < MOST_BROKEN, memory, placeholder)
        {
            self.broken.insert(id, Broken { knock, from, memory, placeholder });
            return;
        }
        let _ = self.poller.remove(&knock);
        self.knocks.remove(&from);
    }

    pub(crate) fn command(&self, id: u64, command: Command) {
        let Some(connection) = self.connections.get(&id) else { return };
        let partitions = &self.remotes[connection.link].partitions;
        if let Some(running) = connection.partition.and_then(|place| partitions.get(place)) {
            running.commands.put(command);
        }
    }

    /// Makes memory and placeholder, and has the partition know the connection.
    pub(crate) fn create(&mut self, id: u64, open: bool) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let is_client = open;
        let (own, peer) = if is_client {
            (connection.source, connection.destination)
        } else {
            (connection.destination, connection.source)
        };
        let made = (|| -> io::Result<(Arc<Channel>, OwnedFd)> {
            let shape = self.remotes[connection.link].geometry.shape();
            let channel = Channel::create(shape, own, peer).map_err(io::Error::other)?;
            let thread =
                connection.link * self.config.partitions + connection.partition.unwrap_or(0);
            channel.partition().store(u32::try_from(thread).unwrap_or(0), Ordering::Relaxed);
            let memory = channel.mapping().descriptor().ok_or(io::ErrorKind::NotFound)?;
            channel.mapping().forget_descriptor();
            let flags = SocketFlags::CLOEXEC;
            let (ours, theirs) =
                rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            let bytes = usize::try_from(PLACEHOLDER_BYTES).unwrap_or(0);
            rustix::net::sockopt::set_socket_send_buffer_size(&theirs, bytes)?;
            let prefix = String::from_utf8_lossy(PLACEHOLDER_NAME);
            let process = self.keeper.as_ref().map_or_else(std::process::id, Keeper::process);
            let name = format!("{prefix}{process}-{id}");
            rustix::net::bind(&ours, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
            if let Some(keeper) = &self.keeper {
                let peer = &self.remotes[connection.link].peer.name;
                keeper.keep(id, &connection.record(peer), memory.as_fd(), ours.as_fd());
            }
            connection.memory = Some(memory);
            connection.placeholder = Some(theirs);
            Ok((Arc::new(channel), ours))
        })();
        match made {
            Ok((channel, socket)) => {
                let (key, priority) = (connection.key, connection.priority);
                self.command(id, Command::Create { key, id, channel, socket, priority, open });
            }
            Err(error) => {
                tracing::warn!(%error, "no memory or descriptor for a connection");
                self.happens(id, Event::OwnGone);
            }
        }
    }

    fn take_notices(&mut self) {
        for (place, notice) in self.notices.take() {
            match notice {
                Notice::Created { id } => self.happens(id, Event::Created),
                Notice::Gone { id } => self.happens(id, Event::OwnGone),
                Notice::Position { id, position } => self.tell_position(id, position),
                Notice::Moved { id, key } => self.has_moved(id, key, place),
                Notice::Cleared => {
                    self.remotes[place.link].cleared(place.partition);
                }
                Notice::Fault { reason } => {
                    let reason = format!("partition {}: {reason}", place.partition);
                    self.remotes[place.link].fail(reason, Fall::Breaks, Some(place.partition));
                    self.forget_link(place.link);
                }
            }
        }
    }

    /// The link is gone, with every connection over it.
    pub(crate) fn forget_link(&mut self, index: usize) {
        let lost =
            |(id, connection): (&u64, &Connection)| (connection.link == index).then_some(*id);
        let lost: Vec<u64> = self.connections.iter().filter_map(lost).collect();
        for id in lost {
            self.happens(id, Event::LinkDown);
        }
    }

    /// Handshakes that took too long, and programs that did not ask.
    pub(crate) fn late(&mut self, now: Instant) {
        let poller = &self.poller;
        self.clients.retain(|_, (client, since)| {
            let stays = now.saturating_duration_since(*since) < LONGEST_SILENCE;
            if !stays {
                let _ = poller.remove(&*client);
            }
            stays
        });
        let late = |(id, connection): (&u64, &Connection)| {
            let waits = matches!(connection.state, State::SynSent | State::Knocking);
            let long = now.saturating_duration_since(connection.since) > LONGEST_HANDSHAKE;
            (waits && long).then_some(*id)
        };
        let late: Vec<u64> = self.connections.iter().filter_map(late).collect();
        let grace = self.config.grace;
        let waits = |(id, connection): (&u64, &Connection)| {
            connection.waits.is_late(now, grace).then_some(*id)
        };
        let forsaken: Vec<u64> = self.connections.iter().filter_map(waits).collect();
        for id in forsaken {
            tracing::info!(id, "the other end of a connection did not come back");
            self.end_kept(id);
        }
        for id in late {
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.refusal = Refusal::NotTaken;
            }
            self.happens(id, Event::TimedOut);
        }
    }
}
