//! The library's thread of one device: links to peers' devices, the device's own events, and the
//! few bounds on time that a device does not keep itself. Asleep unless one of them stirs.
//!
//! ```text
//!  device A ── one TCP link, 48-byte frames: connect, accept, gone ── device B
//!     queue pairs ══════════ the network's packets ══════════ queue pairs
//! ```
//!
//! Verbs alone tell nobody that an idle peer died or hung up. So two devices whose queue pairs are
//! connected keep one TCP connection between them, whatever the number of queue pairs: its end is
//! the end of all of them, at once when the process dies, after some ten seconds when the machine
//! does (keepalive). It carries no data.
//!
//! A caller is hostile until a frame of his names two queue pairs with both their nonces: memory
//! for callers is bounded, a frame that is none ends its link, and so does having named none in
//! time; where there are too many links, the one that has been silent longest makes room.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use beeline_fabric::QueuePairState;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::abi::event;
use crate::endpoint::{Endpoint, Nonce};
use crate::frame::{FRAME_BYTES, Frame, Kind};
use crate::handle::{Pair, tag_of_pair, tag_of_queue};
use crate::presence::Presence;
use crate::shared::{Board, Cause, Command, PairShared};

/// Requests to connect that came before their queue pair was told to expect them.
const MAX_EARLY: usize = 4096;
/// How long a link may take to be made.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a caller may take to name a queue pair.
const CALLER_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence on a link before it is probed, time between probes, probes.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(3), Duration::from_secs(2), 3);
/// Bytes written and not acknowledged for so long end a link.
const USER_TIMEOUT_MS: u32 = 9_000;
/// How long callers are left waiting when there is no descriptor for another.
const DEAF: Duration = Duration::from_millis(250);
/// Output kept for a peer that does not read; frames are few, so this is never reached honestly.
const MAX_OUTPUT_BYTES: usize = 1 << 20;

/// A TCP connection to a peer's device.
struct Link {
    stream: TcpStream,
    /// Being made, until then.
    dialling: Option<Instant>,
    /// Of a caller who has not named a queue pair yet: until when he has to.
    unproven: Option<Instant>,
    /// Where it was dialled; `None` for one that called.
    address: Option<SocketAddr>,
    input: Vec<u8>,
    output: Vec<u8>,
}

/// A queue pair's place on a link.
struct Bound {
    pair: Weak<PairShared>,
    link: u64,
    peer: u32,
    peer_nonce: Nonce,
}

/// A queue pair that expects its peer.
struct Expected {
    peer: u32,
    peer_nonce: Nonce,
}

/// The watch on one queue pair's waiting sends.
struct Watched {
    pair: Weak<PairShared>,
    completed: u64,
    since: Instant,
}

/// What woke the thread.
struct Stirred {
    links: Vec<(u64, PollFlags)>,
    device: PollFlags,
    /// The folder of the device's file.
    folder: bool,
}

impl Default for Stirred {
    fn default() -> Self {
        Self { links: Vec::new(), device: PollFlags::empty(), folder: false }
    }
}

/// The thread's state.
pub(crate) struct Service {
    board: Arc<Board>,
    listener: TcpListener,
    /// Nobody is heard until then: the process has no descriptor left.
    deaf: Option<Instant>,
    links: HashMap<u64, Link>,
    /// Links at a time.
    max_links: usize,
    next_link: u64,
    bound: HashMap<u32, Bound>,
    expected: HashMap<u32, Expected>,
    early: HashMap<u32, (u64, Frame)>,
    watched: Vec<Watched>,
    port: u8,
    port_down: Option<Instant>,
    /// Whether the device is still offered; `None` where that cannot be told, or it is gone.
    presence: Option<Presence>,
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let (idle, interval, count) = KEEPALIVE;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, idle)?;
    sockopt::set_tcp_keepintvl(stream, interval)?;
    sockopt::set_tcp_keepcnt(stream, count)?;
    sockopt::set_tcp_user_timeout(stream, USER_TIMEOUT_MS)?;
    Ok(())
}

/// Begins to connect.
fn dial(address: SocketAddr) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket: OwnedFd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(TcpStream::from(socket))
}

impl Link {
    /// When something has to have happened on it.
    fn deadline(&self) -> Option<Instant> {
        [self.dialling, self.unproven].into_iter().flatten().min()
    }

    /// Writes what it can; false when the link is broken.
    fn write(&mut self) -> bool {
        while !self.output.is_empty() && self.dialling.is_none() {
            match self.stream.write(&self.output) {
                Ok(0) => return false,
                Ok(count) => drop(self.output.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Reads what is there; false when the link ended.
    fn read(&mut self) -> bool {
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return false,
                Ok(count) => {
                    self.input.extend_from_slice(&buffer[..count]);
                    // The rest in the next round: one peer does not keep the thread.
                    return true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }
}

impl Service {
    pub(crate) fn new(
        board: Arc<Board>,
        (listener, max_links): (TcpListener, usize),
        port: u8,
        presence: Option<Presence>,
    ) -> Self {
        Self {
            board,
            listener,
            deaf: None,
            links: HashMap::new(),
            max_links,
            next_link: 0,
            bound: HashMap::new(),
            expected: HashMap::new(),
            early: HashMap::new(),
            watched: Vec::new(),
            port,
            port_down: None,
            presence,
        }
    }

    pub(crate) fn run(mut self) {
        // Acquire: pairs with the release store of the device's drop.
        while !self.board.stop.load(Ordering::Acquire) {
            let Stirred { links: ready, device, folder } = self.wait();
            self.board.kick.lower();
            if !device.is_empty() {
                self.device_events();
            }
            if device.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
                self.device_lost();
            }
            if folder && self.presence.as_ref().is_some_and(|presence| !presence.is_there()) {
                tracing::error!("the RDMA device was removed");
                self.device_lost();
            }
            for command in self.board.take_commands() {
                self.obey(command);
            }
            for (id, flags) in ready {
                self.advance(id, flags);
            }
            self.accept();
            self.watch();
        }
    }

    /// Sleeps until something stirs, and says what.
    fn wait(&self) -> Stirred {
        let context = Arc::clone(&self.board.context);
        let device = context.async_descriptor();
        let lost = self.board.lost.load(Ordering::Relaxed);
        let folder = self.presence.as_ref().map(Presence::descriptor);
        let callers = if self.deaf.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = vec![
            PollFd::new(&self.board.kick, PollFlags::IN),
            PollFd::new(&self.listener, callers),
        ];
        if !lost {
            fds.push(PollFd::new(&device, PollFlags::IN));
        }
        if let Some(folder) = &folder {
            fds.push(PollFd::new(folder, PollFlags::IN));
        }
        let first = fds.len();
        let ids: Vec<u64> = self.links.keys().copied().collect();
        for id in &ids {
            let Some(link) = self.links.get(id) else { continue };
            let mut flags = PollFlags::IN;
            if link.dialling.is_some() || !link.output.is_empty() {
                flags |= PollFlags::OUT;
            }
            fds.push(PollFd::new(&link.stream, flags));
        }
        let timeout = self.patience().and_then(|left| Timespec::try_from(left).ok());
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return Stirred::default();
        }
        let links = fds[first..]
            .iter()
            .zip(ids)
            .map(|(fd, id)| (id, fd.revents()))
            .filter(|(_, flags)| !flags.is_empty())
            .collect();
        let device = if lost { PollFlags::empty() } else { fds[2].revents() };
        // The last before the links.
        let folder = folder.is_some() && !fds[first - 1].revents().is_empty();
        Stirred { links, device, folder }
    }

    /// How long nothing needs doing; `None` for ever.
    fn patience(&self) -> Option<Duration> {
        let now = Instant::now();
        let dialling = self.links.values().filter_map(Link::deadline);
        let dialling = dialling.map(|until| until.saturating_duration_since(now)).min();
        let bounds = self.watched.iter().filter_map(|watched| watched.pair.upgrade()?.watched);
        let watching = bounds
            .map(|bound| (bound / 8).clamp(Duration::from_millis(50), Duration::from_secs(1)))
            .min();
        let port = self.port_down.map(|_| Duration::from_millis(250));
        let deaf = self.deaf.map(|until| until.saturating_duration_since(now));
        [dialling, watching, port, deaf].into_iter().flatten().min()
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Dial(pair, peer) => self.connect(&pair, &peer),
            Command::Expect(pair, peer) => {
                self.begin_watch(&pair);
                let number = pair.number;
                let expected = Expected { peer: peer.number, peer_nonce: peer.nonce };
                self.expected.insert(number, expected);
                if let Some((link, frame)) = self.early.remove(&number) {
                    self.asked(link, frame);
                }
            }
            Command::Left(number) => self.left(number),
        }
    }

    fn begin_watch(&mut self, pair: &Arc<PairShared>) {
        if pair.watched.is_some() {
            let pair = Arc::downgrade(pair);
            self.watched.push(Watched { pair, completed: 0, since: Instant::now() });
        }
    }

    fn add(&mut self, stream: TcpStream, address: Option<SocketAddr>) -> Option<u64> {
        if prepare(&stream).is_err() {
            return None;
        }
        if self.links.len() >= self.max_links && !self.make_room() {
            return None;
        }
        let id = self.next_link;
        self.next_link += 1;
        let now = Instant::now();
        let dialling = address.map(|_| now + DIAL_TIMEOUT);
        let unproven = address.is_none().then(|| now + CALLER_TIMEOUT);
        let (input, output) = (Vec::new(), Vec::new());
        self.links.insert(id, Link { stream, dialling, unproven, address, input, output });
        Some(id)
    }

    /// Hangs up on the caller that has been silent longest; false where all have proven themselves.
    fn make_room(&mut self) -> bool {
        let silent = |(id, link): (&u64, &Link)| Some((link.unproven?, *id));
        let Some((_, oldest)) = self.links.iter().filter_map(silent).min() else { return false };
        self.close(oldest);
        true
    }

    fn connect(&mut self, pair: &Arc<PairShared>, peer: &Endpoint) {
        self.begin_watch(pair);
        let known = self.links.iter().find(|(_, link)| link.address == Some(peer.link));
        let link = match known {
            Some((id, _)) => Some(*id),
            None => match dial(peer.link) {
                Ok(stream) => self.add(stream, Some(peer.link)),
                Err(error) => {
                    tracing::debug!(address = %peer.link, %error, "link refused");
                    None
                }
            },
        };
        let Some(link) = link else {
            pair.fail(Cause::Peer);
            return;
        };
        self.bind(pair, link, (peer.number, peer.nonce));
        self.tell(link, Kind::Connect, pair, (peer.number, peer.nonce));
    }

    fn bind(&mut self, pair: &Arc<PairShared>, link: u64, (peer, peer_nonce): (u32, Nonce)) {
        let bound = Bound { pair: Arc::downgrade(pair), link, peer, peer_nonce };
        self.bound.insert(pair.number, bound);
    }

    fn tell(&mut self, link: u64, kind: Kind, pair: &PairShared, (to, to_nonce): (u32, Nonce)) {
        let (from, from_nonce) = (pair.number, pair.nonce);
        self.send(link, &Frame { kind, from, to, from_nonce, to_nonce });
    }

    fn send(&mut self, id: u64, frame: &Frame) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.output.extend_from_slice(&frame.encode());
        if link.output.len() > MAX_OUTPUT_BYTES || !link.write() {
            self.close(id);
        }
    }

    /// A queue pair of ours is broken or gone.
    fn left(&mut self, number: u32) {
        self.expected.remove(&number);
        self.early.remove(&number);
        let Some(bound) = self.bound.remove(&number) else { return };
        // The nonce is needed although the queue pair may be gone: it holds its name till here.
        if let Some(pair) = bound.pair.upgrade() {
            self.tell(bound.link, Kind::Gone, &pair, (bound.peer, bound.peer_nonce));
        } else {
            let frame = Frame {
                kind: Kind::Gone,
                from: number,
                to: bound.peer,
                from_nonce: [0; 16],
                to_nonce: bound.peer_nonce,
            };
            self.send(bound.link, &frame);
        }
    }

    fn accept(&mut self) {
        if self.deaf.is_some_and(|until| Instant::now() < until) {
            return;
        }
        self.deaf = None;
        for _ in 0..16 {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    // Refused when there are too many: the stream is closed by its drop.
                    let _ = self.add(stream, None);
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return,
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    // No descriptor for it, and the caller stays in the queue: asking again at once
                    // would be asking for ever.
                    _ => {
                        if !self.make_room() {
                            self.deaf = Some(Instant::now() + DEAF);
                            return;
                        }
                    }
                },
            }
        }
    }

    fn advance(&mut self, id: u64, flags: PollFlags) {
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.dialling.is_some()
            && flags.intersects(PollFlags::OUT | PollFlags::ERR | PollFlags::HUP)
        {
            if !matches!(link.stream.take_error(), Ok(None)) {
                return self.close(id);
            }
            link.dialling = None;
        }
        if link.dialling.is_some() {
            return;
        }
        let alive = link.write();
        let alive = alive && (flags.is_empty() || link.read());
        // What came before the end still counts.
        let mut frames = Vec::new();
        let mut sound = true;
        while let Some((bytes, _)) = link.input.split_first_chunk::<FRAME_BYTES>() {
            let frame = Frame::decode(bytes);
            drop(link.input.drain(..FRAME_BYTES));
            match frame {
                Some(frame) => frames.push(frame),
                None => sound = false,
            }
        }
        for frame in frames {
            self.hear(id, frame);
        }
        if !alive || !sound {
            self.close(id);
        }
    }

    fn hear(&mut self, link: u64, frame: Frame) {
        match frame.kind {
            Kind::Connect => self.asked(link, frame),
            Kind::Accept => {
                if let Some(pair) = self.meant(link, &frame) {
                    pair.ready();
                }
            }
            Kind::Gone => {
                if let Some(pair) = self.meant(link, &frame) {
                    self.bound.remove(&frame.to);
                    pair.fail(Cause::Peer);
                }
            }
        }
    }

    /// The queue pair of ours that a frame of this link may speak to.
    fn meant(&self, link: u64, frame: &Frame) -> Option<Arc<PairShared>> {
        let bound = self.bound.get(&frame.to)?;
        let pair = bound.pair.upgrade()?;
        (bound.link == link && bound.peer == frame.from && pair.nonce == frame.to_nonce)
            .then_some(pair)
    }

    /// A peer asks to connect.
    fn asked(&mut self, link: u64, frame: Frame) {
        let pair = self.board.pair(frame.to).filter(|pair| pair.nonce == frame.to_nonce);
        let Some(pair) = pair.filter(|pair| pair.state() == QueuePairState::Init) else {
            // Nobody, or somebody who is connected or broken: the caller learns it.
            let kind = Kind::Gone;
            let Frame { from, to, from_nonce, to_nonce, .. } = frame;
            let (from, to, from_nonce, to_nonce) = (to, from, to_nonce, from_nonce);
            return self.send(link, &Frame { kind, from, to, from_nonce, to_nonce });
        };
        if let Some(link) = self.links.get_mut(&link) {
            link.unproven = None;
        }
        match self.expected.get(&frame.to) {
            Some(expected)
                if expected.peer == frame.from && expected.peer_nonce == frame.from_nonce =>
            {
                let peer = (expected.peer, expected.peer_nonce);
                self.expected.remove(&frame.to);
                self.bind(&pair, link, peer);
                pair.ready();
                self.tell(link, Kind::Accept, &pair, peer);
            }
            Some(_) => {}
            None => {
                if self.early.len() < MAX_EARLY {
                    self.early.insert(frame.to, (link, frame));
                }
            }
        }
    }

    /// Ends a link and every queue pair on it.
    fn close(&mut self, id: u64) {
        if self.links.remove(&id).is_none() {
            return;
        }
        self.early.retain(|_, (link, _)| *link != id);
        let gone: Vec<u32> = self
            .bound
            .iter()
            .filter(|(_, bound)| bound.link == id)
            .map(|(number, _)| *number)
            .collect();
        for number in gone {
            let bound = self.bound.remove(&number);
            if let Some(pair) = bound.and_then(|bound| bound.pair.upgrade()) {
                pair.fail(Cause::Peer);
            }
        }
    }

    fn device_events(&mut self) {
        let context = Arc::clone(&self.board.context);
        // The event is acknowledged before anything is done about it: destroying what it is about
        // waits for that.
        while let Some((kind, tag)) = context.async_event(|found| {
            let tag = match found.event_type {
                event::CQ_ERR => tag_of_queue(found),
                event::QP_FATAL | event::QP_REQ_ERR | event::QP_ACCESS_ERR => tag_of_pair(found),
                _ => 0,
            };
            (found.event_type, tag)
        }) {
            self.device_event(kind, tag);
        }
    }

    fn device_event(&mut self, kind: i32, tag: usize) {
        match kind {
            event::CQ_ERR => {
                if let Some(queue) = self.board.queue(tag) {
                    // Release: pairs with the acquire load in `poll`.
                    queue.overrun.store(true, Ordering::Release);
                    queue.wake.raise();
                }
            }
            event::QP_FATAL | event::QP_REQ_ERR | event::QP_ACCESS_ERR => {
                // What is reused keeps its tag: an event of its former life finds it sound.
                if let Some(pair) = self.board.pair_of_tag(tag)
                    && pair.hardware().as_ref().is_some_and(Pair::has_failed)
                {
                    pair.fail(Cause::Device);
                }
            }
            event::DEVICE_FATAL => {
                tracing::error!("the RDMA device failed or was removed");
                self.device_lost();
            }
            event::PORT_ERR => {
                tracing::warn!(port = self.port, "the RDMA port went down");
                self.port_down.get_or_insert_with(Instant::now);
            }
            event::PORT_ACTIVE if self.port_down.take().is_some() => {
                tracing::info!(port = self.port, "the RDMA port is up again");
            }
            _ => {}
        }
    }

    /// Ends everything: nothing comes from the device any more.
    fn device_lost(&mut self) {
        // A removed device's file does not come back: its successor's is another.
        self.presence = None;
        self.board.lost.store(true, Ordering::Release);
        for pair in self.board.all_pairs() {
            pair.fail(Cause::Device);
        }
        for queue in self.board.all_queues() {
            // Release: pairs with the acquire load in `poll`.
            queue.lost.store(true, Ordering::Release);
            queue.wake.raise();
        }
    }

    /// Keeps the bounds on time.
    fn watch(&mut self) {
        let now = Instant::now();
        let late: Vec<u64> = self
            .links
            .iter()
            .filter(|(_, link)| link.deadline().is_some_and(|until| until <= now))
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            self.close(id);
        }
        if let Some(since) = self.port_down {
            for pair in self.board.all_pairs() {
                let bound = pair.transport_timeout;
                if now.saturating_duration_since(since) > bound
                    && pair.state() == QueuePairState::ReadyToSend
                {
                    pair.fail(Cause::Port);
                }
            }
        }
        self.watched.retain_mut(|watched| {
            let Some(pair) = watched.pair.upgrade() else { return false };
            let Some(bound) = pair.watched else { return false };
            let progress = &pair.progress;
            // Relaxed, all: a value a moment old only makes the watch a moment longer.
            let completed = progress.completed.load(Ordering::Relaxed);
            let idle = progress.posted.load(Ordering::Relaxed) == completed;
            if idle || completed != watched.completed || !progress.waits.load(Ordering::Relaxed) {
                watched.completed = completed;
                watched.since = now;
            }
            // Time to carry the bytes, at a rate that every device reaches (1 MB/s).
            let carrying = Duration::from_micros(progress.length.load(Ordering::Relaxed));
            if now.saturating_duration_since(watched.since) > bound + carrying {
                // Its completion may lie in the queue, unpolled: whoever polls decides.
                progress.overdue.store(completed + 1, Ordering::Relaxed);
                let queue = &pair.queues[0];
                // Release: pairs with the acquire in `poll`.
                queue.overdue.store(true, Ordering::Release);
                queue.wake.raise();
            }
            pair.state() != QueuePairState::Error
        });
    }
}
