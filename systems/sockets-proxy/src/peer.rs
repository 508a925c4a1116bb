//! Another host, as a monitor sees it: the link over the window, the partitions, and the TCP
//! connection to its monitor.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_ntb::link::{BEAT, random_epoch};
use beeline_ntb::{Cable, Event, Extents, Link, Refusal, Side, State};
use beeline_sockets::packets::page::Page;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

use crate::config::{Config, Peer};
use crate::flow::{PRIORITIES, Placement, Schedule};
use crate::geometry::Geometry;
use crate::message::{BadMessage, Message};
use crate::monitor::MonitorError;
use crate::partition::{Command, Notice, Partition};
use crate::thread::{Mailbox, Place, Running, start};

/// How long the other end's beat may stand still.
const SILENCE: Duration = Duration::from_secs(5);
/// Time between two tries to reach the other monitor: after the first, and at most. A proxy that died is back soon.
const REDIAL: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(300)];
/// Time between two looks at the loads of partitions.
const BALANCE: Duration = Duration::from_millis(500);
/// Bytes in that time below which a partition's load is no reason to move anything.
const BALANCE_BYTES: u64 = 8 << 20;
/// Reads of a session before everything else has its turn.
const READS: usize = 16;
/// Most bytes that wait for the other monitor.
const MOST_QUEUED: usize = 4 << 20;

/// A connection to the other monitor.
#[derive(Debug)]
pub struct Session {
    socket: OwnedFd,
    /// The kernel is still connecting.
    pub connecting: bool,
    /// The other monitor's hello came.
    pub greeted: bool,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
}

impl Session {
    /// Over a connected socket, or one that connects.
    #[must_use]
    pub fn new(socket: OwnedFd, connecting: bool) -> Self {
        Self { socket, connecting, greeted: false, incoming: Vec::new(), outgoing: Vec::new() }
    }

    /// Queues a message, and sends what the kernel takes.
    ///
    /// Errors: the kernel's; `OutOfMemory` when the other monitor reads nothing.
    pub fn send(&mut self, message: &Message) -> io::Result<()> {
        self.outgoing.extend(message.encode());
        if self.outgoing.len() > MOST_QUEUED {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.flush()
    }

    /// Sends what the kernel takes.
    ///
    /// Errors: the kernel's.
    pub fn flush(&mut self) -> io::Result<()> {
        while !self.connecting && !self.outgoing.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, &self.outgoing, flags) {
                Ok(count) => drop(self.outgoing.drain(..count)),
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// True while the kernel has to take more.
    #[must_use]
    pub fn wants_to_write(&self) -> bool {
        self.connecting || !self.outgoing.is_empty()
    }

    /// Reads what came, as messages.
    ///
    /// Errors: the kernel's; `UnexpectedEof`; `InvalidData` for bytes that are no message.
    pub fn receive(&mut self, messages: &mut Vec<Message>) -> io::Result<()> {
        let mut bytes = [0; 4096];
        // The rest is there the next time: another end that never stops is not to keep the monitor.
        for _ in 0..READS {
            match rustix::net::recv(&self.socket, &mut bytes[..], rustix::net::RecvFlags::DONTWAIT)
            {
                Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((_, count)) => self.incoming.extend(&bytes[..count]),
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(error) => return Err(error.into()),
            }
        }
        let mut from = 0;
        let bad = |error: BadMessage| io::Error::new(io::ErrorKind::InvalidData, error);
        while let Some((message, length)) = Message::decode(&self.incoming[from..]).map_err(bad)? {
            messages.push(message);
            from += length;
        }
        self.incoming.drain(..from);
        Ok(())
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Another host.
#[derive(Debug)]
pub struct Remote {
    /// As configured.
    pub peer: Peer,
    /// How the window is divided.
    pub geometry: Geometry,
    /// First stopped.
    pub partitions: Vec<Running>,
    /// Its link.
    link: Link,
    cable: Cable,
    /// The way by which memory is handed over for direct mode.
    pub extents: Extents,
    /// To its monitor.
    pub session: Option<Session>,
    dialled: Option<Instant>,
    /// When this end last said which part of the window it has, and what was refused of the other end's.
    told: Option<Instant>,
    refused: Option<Refusal>,
    /// Time until the next try.
    redial: Duration,
    /// Of each partition: how many orders to stand still, or to break off what it has, it has yet to carry out.
    clearing: Vec<usize>,
    /// Connections of each partition.
    pub load: Vec<usize>,
    placement: Placement,
    /// Why the link is not up.
    pub reason: String,
    /// Connections of the link's last life were told of to the other monitor.
    pub resumed: bool,
    /// Bytes that each partition had sent at the last look at their loads, and when that was.
    pub loads: (Vec<u64>, Option<Instant>),
}

/// What becomes of a link's connections when it falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fall {
    /// They stay, and go on when it is up again.
    Keeps,
    /// They are broken off.
    Breaks,
}

fn system(action: &'static str) -> impl Fn(io::Error) -> MonitorError {
    move |source| MonitorError::System { action, source }
}

impl Remote {
    /// Plugs in the window and starts the partitions.
    ///
    /// Errors: [`MonitorError`].
    pub fn open(
        index: usize,
        peer: Peer,
        config: &Config,
        page: &Arc<Page>,
        notices: &Arc<Mailbox<(Place, Notice)>>,
    ) -> Result<Self, MonitorError> {
        let cable = Cable::plug(&peer.window)?;
        let extents = Extents::open(&peer.window)?;
        let window = &cable.window;
        let length = window.length_bytes();
        let geometry =
            Geometry::dividing(length, config.partitions, config.slot_bytes, config.queue_blocks)?
                .with_rings_of(config.ring_bytes)?;
        let epoch = random_epoch().map_err(system("drawing an epoch"))?;
        let link = Link::begin(window, geometry.announcement(), epoch, SILENCE, Instant::now());
        let mut partitions = Vec::new();
        for partition in 0..geometry.partitions {
            let (at, length) = geometry.partition(partition);
            let (part, bell) = (window.part(at, length), partition + 1);
            let priorities = u8::try_from(PRIORITIES).unwrap_or(u8::MAX);
            let schedule = Schedule::new(priorities, config.rounds);
            let thread = index * config.partitions + partition;
            let place = Place { link: index, partition };
            let core = |thread: usize| {
                (!config.cores.is_empty()).then(|| config.cores[thread % config.cores.len()])
            };
            let (carried, cores) = if config.threads_of_a_partition == 2 {
                let (carried, receiver) = Partition::shared(part.clone(), geometry, schedule, bell);
                ((carried, Some(receiver)), [core(2 * thread), core(2 * thread + 1)])
            } else {
                let carried = Partition::new(part.clone(), geometry, schedule, bell);
                ((carried, None), [core(thread), None])
            };
            let running = start(
                carried,
                part,
                bell,
                place,
                Arc::clone(page),
                thread,
                Arc::clone(notices),
                (config.bytes_a_second, cores),
            );
            partitions.push(running.map_err(system("starting a partition's thread"))?);
        }
        let siblings: Vec<_> =
            partitions.iter().map(|running: &Running| Arc::clone(&running.commands)).collect();
        for running in &partitions {
            running.commands.put(Command::Siblings(siblings.clone()));
        }
        let load = vec![0; geometry.partitions];
        let clearing = vec![0; geometry.partitions];
        let reason = "the other end is not there yet".to_owned();
        Ok(Self {
            peer,
            geometry,
            partitions,
            link,
            cable,
            extents,
            session: None,
            dialled: None,
            told: None,
            refused: None,
            redial: REDIAL[0],
            clearing,
            load,
            placement: Placement::default(),
            reason,
            resumed: false,
            loads: (Vec::new(), None),
        })
    }

    /// The doorbell of the link itself.
    #[must_use]
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.cable.window.bells.descriptor(beeline_ntb::link::LINK_BELL)
    }

    /// What was posted through the window so far: bytes, and posts of bytes and words.
    #[must_use]
    pub fn written(&self) -> [u64; 2] {
        let written = self.cable.window.outbound.written();
        [written.bytes, written.posts + written.words]
    }

    /// New connections may be made.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.link.state() == State::Up
            && self.is_clear()
            && self.session.as_ref().is_some_and(|session| session.greeted)
    }

    fn is_clear(&self) -> bool {
        self.clearing.iter().all(|&orders| orders == 0)
    }

    /// A partition stands still, or broke off what it had.
    pub fn cleared(&mut self, partition: usize) {
        if let Some(orders) = self.clearing.get_mut(partition) {
            *orders = orders.saturating_sub(1);
        }
    }

    /// The life of the link, by the same number at both ends; `None` while it is not up.
    #[must_use]
    pub fn life(&self) -> Option<u64> {
        self.link.life()
    }

    /// The window's link is up.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.link.state() == State::Up
    }

    /// Has the address.
    #[must_use]
    pub fn has(&self, host: IpAddr) -> bool {
        self.peer.addresses.contains(&host)
    }

    /// While the link is down: the other end has another part of the window here, and says why it stays so.
    fn is_refused(&mut self, now: Instant) -> bool {
        if self.told.is_none_or(|told| now.saturating_duration_since(told) >= BEAT) {
            self.told = Some(now);
            self.cable.directory.announce();
        }
        if self.is_up() {
            return false;
        }
        let refusal = self.cable.directory.refusal();
        if self.refused != refusal {
            self.refused = refusal;
            self.reason = match refusal {
                Some(refusal) => {
                    tracing::error!(peer = self.peer.name, %refusal, "the link is refused");
                    refusal.to_string()
                }
                None => "the other end is not there yet".to_owned(),
            };
        }
        refusal.is_some()
    }

    /// Looks at the link. When it fell: what becomes of its connections.
    pub fn look(&mut self, now: Instant) -> Option<Fall> {
        self.cable.window.bells.clear(beeline_ntb::link::LINK_BELL);
        // Nothing of this end's is posted in a new life that belongs to the old one.
        if !self.is_clear() {
            return None;
        }
        if self.is_refused(now) {
            return None;
        }
        let mut ring = false;
        let event = self.link.look(now, &mut ring);
        if ring {
            self.cable.window.bells.ring(beeline_ntb::link::LINK_BELL);
        }
        match event {
            None => None,
            Some(Event::Up) => {
                tracing::info!(peer = self.peer.name, "the link is up");
                self.reason.clear();
                for partition in &self.partitions {
                    partition.commands.put(Command::Link { up: true });
                }
                None
            }
            Some(Event::Down { reason }) => {
                // An end that goes in good order does not come back for its connections.
                let fall = if reason == beeline_ntb::link::IN_GOOD_ORDER {
                    Fall::Breaks
                } else {
                    Fall::Keeps
                };
                self.falls(reason.to_owned(), fall, None);
                Some(fall)
            }
            Some(Event::Unequal { place, theirs, ours }) => {
                let name = Geometry::name_of(place);
                let reason = format!("the other end has {name} {theirs}, this one {ours}");
                tracing::error!(peer = self.peer.name, reason, "the link is refused");
                self.falls(reason, Fall::Breaks, None);
                Some(Fall::Breaks)
            }
        }
    }

    /// Ends the link for a reason of this end's; `but` has broken off its connections already.
    pub fn fail(&mut self, reason: String, fall: Fall, but: Option<usize>) {
        self.link.fail();
        self.falls(reason, fall, but);
    }

    fn falls(&mut self, reason: String, fall: Fall, but: Option<usize>) {
        tracing::warn!(peer = self.peer.name, reason, "the link is down");
        self.reason = reason;
        // One that broke off by itself says so as the others do.
        self.clearing.iter_mut().for_each(|orders| *orders += 1);
        self.resumed = false;
        for (index, partition) in self.partitions.iter().enumerate() {
            if but != Some(index) {
                partition.commands.put(match fall {
                    Fall::Keeps => Command::Suspend,
                    Fall::Breaks => Command::Link { up: false },
                });
            }
        }
        self.load.fill(0);
    }

    /// The partition of a new connection; `None`: each has as many as it may.
    pub fn place(&mut self, most: usize) -> Option<usize> {
        let chosen = self.placement.place(&self.load, most)?;
        self.load[chosen] += 1;
        Some(chosen)
    }

    /// Of two partitions whose connections one is to leave for the other: which. Those with the most
    /// and the least bytes since the last look, if one has more than twice what the other has.
    pub fn unequal(&mut self, now: Instant) -> Option<(usize, usize)> {
        let due = self.loads.1.is_none_or(|then| now.saturating_duration_since(then) >= BALANCE);
        if self.partitions.len() < 2 || !due {
            return None;
        }
        let sent = |running: &Running| {
            let counters = &running.counters;
            let of = |counter: &std::sync::atomic::AtomicU64| {
                counter.load(std::sync::atomic::Ordering::Relaxed)
            };
            of(&counters.sent_bytes) + of(&counters.received_bytes)
        };
        let all: Vec<u64> = self.partitions.iter().map(sent).collect();
        let before = std::mem::replace(&mut self.loads, (all.clone(), Some(now))).0;
        let grown: Vec<u64> =
            all.iter().zip(&before).map(|(now, then)| now.saturating_sub(*then)).collect();
        crate::flow::unequal(&grown, &self.load, BALANCE_BYTES)
    }

    /// Of two ends the first decides on moves between partitions.
    #[must_use]
    pub fn decides(&self) -> bool {
        self.peer.window.side == Side::First
    }

    /// This end dials the other monitor: of two ends the first does.
    #[must_use]
    pub fn is_to_dial(&self, now: Instant) -> bool {
        self.peer.window.side == Side::First
            && self.session.is_none()
            && self.until_dial(now).is_none_or(|left| left.is_zero())
    }

    fn until_dial(&self, now: Instant) -> Option<Duration> {
        let waited = now.saturating_duration_since(self.dialled?);
        Some(self.redial.saturating_sub(waited))
    }

    /// How long nothing needs to be looked at, where nothing is heard: `most` at most.
    #[must_use]
    pub fn quiet(&self, now: Instant, most: Duration) -> Duration {
        let dials = self.peer.window.side == Side::First && self.session.is_none();
        self.until_dial(now).filter(|_| dials).map_or(most, |left| left.min(most))
    }

    /// The other monitor said what it has to say first.
    pub fn greeted(&mut self) {
        if let Some(session) = &mut self.session {
            session.greeted = true;
        }
        self.redial = REDIAL[0];
    }

    /// Begins to connect to the other monitor, from `own`.
    ///
    /// Errors: the kernel's.
    pub fn dial(&mut self, own: SocketAddr, now: Instant) -> io::Result<()> {
        self.dialled = Some(now);
        self.redial = (self.redial * 2).min(REDIAL[1]);
        let to = self.peer.monitor;
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        if own.is_ipv4() == to.is_ipv4() && !own.ip().is_unspecified() {
            rustix::net::bind(&socket, &SocketAddr::new(own.ip(), 0))?;
        }
        let connecting = match rustix::net::connect(&socket, &to) {
            Ok(()) => false,
            Err(Errno::INPROGRESS) => true,
            Err(error) => return Err(error.into()),
        };
        let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
        let mut session = Session::new(socket, connecting);
        session.send(&self.hello())?;
        self.session = Some(session);
        Ok(())
    }

    /// What this end says first.
    #[must_use]
    pub fn hello(&self) -> Message {
        Message::Hello { announced: self.geometry.announcement() }
    }

    /// Says that this end goes, in good order.
    pub fn go_down(&mut self) {
        self.link.go_down();
        self.cable.window.bells.ring(beeline_ntb::link::LINK_BELL);
    }

    /// Whether the other end agreed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.link.state() == State::Over
    }

    /// The last act.
    pub fn leave(&mut self) {
        self.link.leave();
        self.cable.window.bells.ring(beeline_ntb::link::LINK_BELL);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn another_monitor_that_says_more_than_its_share_is_heard_in_parts() {
        let (own, mut other) = UnixStream::pair().unwrap();
        other.set_nonblocking(true).unwrap();
        let one = Message::Gone { to: 1 }.encode();
        let many = one.repeat(1024);
        let mut said = 0;
        while let Ok(count) = other.write(&many) {
            said += count;
        }
        assert!(said > 2 * READS * 4096, "{said} bytes");
        let mut session = Session::new(own.into(), false);
        let mut heard = Vec::new();
        session.receive(&mut heard).unwrap();
        assert_eq!(heard.len(), READS * 4096 / one.len());
        while heard.len() < said / one.len() {
            session.receive(&mut heard).unwrap();
        }
        assert!(heard.iter().all(|message| *message == Message::Gone { to: 1 }));
    }
}
