//! The control thread: one per device, asleep unless a connection is made, a key opened or a peer
//! lost. It owns the listening socket and one session per connection.
//!
//! ```text
//! active end                                   passive end
//! dial, hello(nonces) + object, doorbell  ──►  nonce known and expected?  else close
//!                                         ◄──  welcome(nonce)
//! open(key, epoch)                        ──►  domain, rights, descriptor
//!                                         ◄──  opened(length, rights) + descriptor | refused
//! ```
//!
//! Invariants: nothing here blocks on a peer (a full socket ends the session); an unauthenticated
//! session lives [`GREETING_BOUND`] at most, and there are at most [`MAX_GREETINGS`] of them and a
//! share of the process's descriptors (the oldest makes room for the next); every
//! record is decoded into a value before use and a wrong one ends its session only.

pub(crate) mod message;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_fabric::Role;
use beeline_os::callers::{AfterFailure, Pause, after_failure, most_strangers};
use beeline_os::control_socket::{ControlListener, ControlSocket, PeerCredentials, Received};
use beeline_os::doorbell::Doorbell;
use beeline_os::mapping::{Protection, Retired, create_memfd};
use beeline_os::poller::{Interest, Poller, Waker};
use beeline_os::{Mapping, MemoryObject, Persistence, barrier, process};
use rustix::fs::SealFlags;
use rustix::mm::MapFlags;

use self::message::{MAX_RECORD_BYTES, Message};
use crate::connect_info::{PeerInfo, socket_name};
use crate::device::DeviceShared;
use crate::exposure::{self, Granted};
use crate::link::{Bell, Link, LinkEvent, Opened, OpenedKey, lock};
use crate::object::{ConnectionObject, End};

const GREETING_BOUND: Duration = Duration::from_secs(10);
const PARKING_BOUND: Duration = Duration::from_secs(60);
const MAX_GREETINGS: usize = 1024;
/// Records handled of one session before the others get their turn.
const RECORDS_PER_TURN: usize = 16;

const LISTENER: u64 = 0;
const WAKER: u64 = 1;

/// What data threads ask of the control thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// A queue pair exists.
    Add(Arc<Link>),
    /// Its owner called connect.
    Connect { qp_num: u32, peer: Box<PeerInfo>, role: Role },
    /// Its owner used a key for the first time in this epoch.
    Open { qp_num: u32, key: u64, epoch: u64 },
    /// It is broken or gone.
    Close { qp_num: u32 },
    /// The device is gone.
    Stop,
}

/// The way to the control thread.
#[derive(Debug)]
pub(crate) struct Commands {
    queue: Mutex<Vec<Command>>,
    waker: Waker,
}

impl Commands {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { queue: Mutex::new(Vec::new()), waker: Waker::new()? })
    }

    pub(crate) fn send(&self, command: Command) {
        lock(&self.queue).push(command);
        self.waker.wake();
    }
}

#[derive(Debug)]
enum State {
    /// Accepted; the hello has not come.
    Greeting { since: Instant },
    /// A good hello came before the owner called connect.
    Parked { since: Instant, sender_qp: u32, sender_nonce: [u8; 16], descriptors: Vec<OwnedFd> },
    /// The hello was sent.
    Dialled { object: Arc<ConnectionObject>, doorbell: Option<Doorbell>, asymmetric: bool },
    /// Connected.
    Open,
}

#[derive(Debug)]
struct Session {
    socket: ControlSocket,
    peer: PeerCredentials,
    /// The local queue pair, once known.
    qp_num: Option<u32>,
    state: State,
    /// Opens sent and not answered.
    opens: Vec<(u64, u64)>,
}

impl Session {
    /// It has not proved yet that it belongs to a queue pair of ours that is wanted.
    fn is_stranger(&self) -> bool {
        matches!(self.state, State::Greeting { .. } | State::Parked { .. })
    }
}

#[derive(Debug)]
struct Registered {
    link: Arc<Link>,
    expects: Option<Box<PeerInfo>>,
    session: Option<u64>,
}

#[derive(Debug)]
struct Watched {
    /// Kept open; readable when the process ended.
    _pidfd: OwnedFd,
    sessions: Vec<u64>,
}

/// The thread's state.
#[derive(Debug)]
pub(crate) struct Control {
    shared: Arc<DeviceShared>,
    commands: Arc<Commands>,
    poller: Poller,
    listener: ControlListener,
    ends: HashMap<u32, Registered>,
    sessions: HashMap<u64, Session>,
    processes: HashMap<i32, Watched>,
    retries: Vec<(u32, Box<PeerInfo>)>,
    next_session: u64,
    /// The listener is not looked at.
    pause: Pause,
    own_pid: i32,
    own_uid: u32,
}

impl Control {
    pub(crate) fn new(shared: Arc<DeviceShared>, commands: Arc<Commands>) -> std::io::Result<Self> {
        let listener = ControlListener::bind(&socket_name(&shared.socket))?;
        let poller = Poller::new(64)?;
        poller.add(&listener, LISTENER, Interest::READ)?;
        poller.add(&commands.waker, WAKER, Interest::READ)?;
        Ok(Self {
            shared,
            commands,
            poller,
            listener,
            ends: HashMap::new(),
            sessions: HashMap::new(),
            processes: HashMap::new(),
            retries: Vec::new(),
            next_session: 1,
            pause: Pause::default(),
            own_pid: rustix::process::getpid().as_raw_nonzero().get(),
            own_uid: rustix::process::geteuid().as_raw(),
        })
    }

    /// Runs until [`Command::Stop`].
    pub(crate) fn run(mut self) {
        loop {
            let deadlines = self.has_deadlines().then_some(Duration::from_millis(20));
            let timeout = deadlines.into_iter().chain(self.pause.left()).min();
            let count = match self.poller.wait(timeout) {
                Ok(count) => count,
                Err(error) => {
                    tracing::error!(%error, "the shm control thread cannot wait for events");
                    break;
                }
            };
            for index in 0..count {
                let token = self.poller.readiness(index).token;
                match token {
                    LISTENER => self.accept(),
                    WAKER => self.commands.waker.clear(),
                    token if token & 1 == 0 => self.serve(token >> 1),
                    token => self.process_ended(token),
                }
            }
            if self.obey() {
                break;
            }
            self.expire();
            if self.pause.end()
                && let Err(error) = self.poller.add(&self.listener, LISTENER, Interest::READ)
            {
                tracing::warn!(%error, "shm callers cannot be looked for yet");
                self.pause.begin();
            }
        }
        for (_, end) in self.ends.drain() {
            end.link.push(LinkEvent::Closed);
        }
    }

    fn has_deadlines(&self) -> bool {
        !self.retries.is_empty() || self.sessions.values().any(Session::is_stranger)
    }

    /// Does what data threads asked for; true to stop.
    fn obey(&mut self) -> bool {
        let commands = std::mem::take(&mut *lock(&self.commands.queue));
        for command in commands {
            match command {
                Command::Add(link) => {
                    let end = Registered { link, expects: None, session: None };
                    self.ends.insert(end.link.qp_num, end);
                }
                Command::Connect { qp_num, peer, role: Role::Active } => self.dial(qp_num, peer),
                Command::Connect { qp_num, peer, role: Role::Passive } => self.expect(qp_num, peer),
                Command::Open { qp_num, key, epoch } => self.open(qp_num, key, epoch),
                Command::Close { qp_num } => {
                    if let Some(end) = self.ends.remove(&qp_num)
                        && let Some(session) = end.session
                    {
                        self.drop_session(session);
                    }
                }
                Command::Stop => return true,
            }
        }
        false
    }

    fn expire(&mut self) {
        let now = Instant::now();
        let late: Vec<u64> = self
            .sessions
            .iter()
            .filter(|(_, session)| match session.state {
                State::Greeting { since } => now - since > GREETING_BOUND,
                State::Parked { since, .. } => now - since > PARKING_BOUND,
                _ => false,
            })
            .map(|(&id, _)| id)
            .collect();
        for id in late {
            self.drop_session(id);
        }
        for (qp_num, peer) in std::mem::take(&mut self.retries) {
            self.dial(qp_num, peer);
        }
    }

    fn accept(&mut self) {
        let most = most_strangers(MAX_GREETINGS);
        for _ in 0..RECORDS_PER_TURN {
            match self.listener.accept() {
                Ok(Some(socket)) => {
                    if self.sessions.values().filter(|session| session.is_stranger()).count()
                        >= most
                    {
                        self.make_room();
                    }
                    let state = State::Greeting { since: Instant::now() };
                    self.add_session(socket, None, state);
                }
                Ok(None) => break,
                Err(error) => match after_failure(&error) {
                    AfterFailure::Sleep => break,
                    AfterFailure::Next => {}
                    // No descriptor for it, and the caller stays in the queue: asking again at once
                    // would be asking for ever.
                    AfterFailure::MakeRoom => {
                        if !self.make_room() {
                            tracing::warn!(%error, "shm callers have to wait");
                            if self.poller.remove(&self.listener).is_ok() {
                                self.pause.begin();
                            }
                        }
                        break;
                    }
                },
            }
        }
    }

    /// Hangs up on the stranger that has been here longest; false where there is none.
    fn make_room(&mut self) -> bool {
        let oldest = self.sessions.iter().filter(|(_, session)| session.is_stranger());
        // Sessions are numbered in the order they came in.
        let Some(oldest) = oldest.map(|(&id, _)| id).min() else { return false };
        self.drop_session(oldest);
        true
    }

    fn add_session(
        &mut self,
        socket: ControlSocket,
        qp_num: Option<u32>,
        state: State,
    ) -> Option<u64> {
        let peer = socket.peer().ok()?;
        let id = self.next_session;
        self.next_session += 1;
        self.poller.add(&socket, id << 1, Interest::READ).ok()?;
        let session = Session { socket, peer, qp_num, state, opens: Vec::new() };
        self.sessions.insert(id, session);
        Some(id)
    }

    /// Forgets a session without telling its queue pair.
    fn drop_session(&mut self, id: u64) {
        let Some(session) = self.sessions.remove(&id) else { return };
        let _ = self.poller.remove(&session.socket);
        if let Some(watched) = self.processes.get_mut(&session.peer.pid) {
            watched.sessions.retain(|&other| other != id);
            if watched.sessions.is_empty() {
                self.processes.remove(&session.peer.pid);
            }
        }
    }

    /// Ends a session and its queue pair's connection.
    fn end_session(&mut self, id: u64) {
        let qp_num = self.sessions.get(&id).and_then(|session| session.qp_num);
        self.drop_session(id);
        if let Some(qp_num) = qp_num
            && self.ends.get(&qp_num).is_some_and(|end| end.session == Some(id))
            && let Some(end) = self.ends.remove(&qp_num)
        {
            end.link.push(LinkEvent::Closed);
        }
    }

    fn fail_end(&mut self, qp_num: u32) {
        if let Some(end) = self.ends.remove(&qp_num) {
            end.link.push(LinkEvent::Closed);
        }
    }

    fn process_ended(&mut self, token: u64) {
        let Ok(pid) = i32::try_from(token >> 1) else { return };
        if let Some(watched) = self.processes.remove(&pid) {
            for id in watched.sessions {
                self.end_session(id);
            }
        }
    }

    /// Watches the peer's process: its end counts even if a child of it keeps the socket open.
    fn watch(&mut self, id: u64) {
        let Some(session) = self.sessions.get(&id) else { return };
        let pid = session.peer.pid;
        if pid <= 0 || pid == self.own_pid {
            return;
        }
        if let Some(watched) = self.processes.get_mut(&pid) {
            watched.sessions.push(id);
        } else if let Ok(pidfd) = process::open(pid)
            && self.poller.add(&pidfd, (pid as u64) << 1 | 1, Interest::READ).is_ok()
        {
            self.processes.insert(pid, Watched { _pidfd: pidfd, sessions: vec![id] });
        }
    }

    fn dial(&mut self, qp_num: u32, peer: Box<PeerInfo>) {
        let Some(end) = self.ends.get(&qp_num) else { return };
        let link = Arc::clone(&end.link);
        let socket = match ControlSocket::connect(&socket_name(&peer.socket)) {
            Ok(socket) => socket,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                self.retries.push((qp_num, peer));
                return;
            }
            Err(error) => {
                tracing::debug!(%error, qp_num, "the shm peer does not listen");
                self.fail_end(qp_num);
                return;
            }
        };
        match greet(&socket, &link, &peer) {
            Ok((object, doorbell)) => {
                let asymmetric = peer.asymmetric && barrier::is_asymmetric();
                let state = State::Dialled { object, doorbell: Some(doorbell), asymmetric };
                let session = self.add_session(socket, Some(qp_num), state);
                match (session, self.ends.get_mut(&qp_num)) {
                    (Some(id), Some(end)) => end.session = Some(id),
                    _ => self.fail_end(qp_num),
                }
            }
            Err(error) => {
                tracing::debug!(%error, qp_num, "the shm greeting failed");
                self.fail_end(qp_num);
            }
        }
    }

    fn expect(&mut self, qp_num: u32, peer: Box<PeerInfo>) {
        let Some(end) = self.ends.get_mut(&qp_num) else { return };
        end.expects = Some(peer);
        let parked = self.sessions.iter().find_map(|(&id, session)| {
            let is_parked = matches!(session.state, State::Parked { .. });
            (session.qp_num == Some(qp_num) && is_parked).then_some(id)
        });
        if let Some(id) = parked
            && let Some(session) = self.sessions.get_mut(&id)
            && let State::Parked { sender_qp, sender_nonce, descriptors, .. } =
                std::mem::replace(&mut session.state, State::Open)
        {
            self.welcome(id, qp_num, sender_qp, sender_nonce, descriptors);
        }
    }

    fn open(&mut self, qp_num: u32, key: u64, epoch: u64) {
        let Some(id) = self.ends.get(&qp_num).and_then(|end| end.session) else { return };
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.opens.push((key, epoch));
        if session.socket.send(&Message::Open { key, epoch }.encode(), &[]).is_err() {
            self.end_session(id);
        }
    }

    /// Handles what waits on one session.
    fn serve(&mut self, id: u64) {
        for _ in 0..RECORDS_PER_TURN {
            let Some(session) = self.sessions.get(&id) else { return };
            let mut record = [0; MAX_RECORD_BYTES];
            let mut descriptors = Vec::new();
            let good = match session.socket.receive(&mut record, &mut descriptors) {
                Ok(Received::Empty) => return,
                Ok(Received::Record(length)) => Message::decode(&record[..length])
                    .is_some_and(|message| self.handle(id, message, descriptors)),
                Ok(Received::Closed) | Err(_) => false,
            };
            if !good {
                self.end_session(id);
                return;
            }
        }
    }

    /// Handles one record; false ends the session.
    fn handle(&mut self, id: u64, message: Message, descriptors: Vec<OwnedFd>) -> bool {
        let Some(session) = self.sessions.get_mut(&id) else { return true };
        match (&mut session.state, message) {
            (
                State::Greeting { .. },
                Message::Hello { target_qp, target_nonce, sender_qp, sender_nonce },
            ) => {
                let Some(end) = self.ends.get(&target_qp) else { return false };
                if end.link.nonce != target_nonce || end.session.is_some() {
                    return false;
                }
                if end.expects.is_some() {
                    return self.welcome(id, target_qp, sender_qp, sender_nonce, descriptors);
                }
                session.qp_num = Some(target_qp);
                let since = Instant::now();
                session.state = State::Parked { since, sender_qp, sender_nonce, descriptors };
                true
            }
            (State::Dialled { object, doorbell, asymmetric }, Message::Welcome { nonce }) => {
                let Some(end) = session.qp_num.and_then(|qp_num| self.ends.get(&qp_num)) else {
                    return false;
                };
                let Some(doorbell) = doorbell.take() else { return false };
                if end.link.nonce != nonce {
                    return false;
                }
                let (object, asymmetric) = (Arc::clone(object), *asymmetric);
                let bell = Bell::Doorbell(doorbell);
                end.link.push(LinkEvent::Connected { object, bell, asymmetric });
                session.state = State::Open;
                self.watch(id);
                true
            }
            (State::Open, Message::Open { key, epoch }) => self.grant(id, key, epoch),
            (
                State::Open,
                Message::Opened {
                    key,
                    epoch,
                    object_bytes,
                    offset,
                    length,
                    access,
                    persistence,
                    marked,
                },
            ) => {
                if !take_open(session, key, epoch)
                    || offset.checked_add(length).is_none_or(|end| end > object_bytes)
                {
                    return false;
                }
                let trusted = session.peer.uid == self.own_uid || session.peer.uid == 0;
                let Ok([descriptor]) = <[OwnedFd; 1]>::try_from(descriptors) else { return false };
                let writable = access.is_remotely_writable();
                let opened = map_region(descriptor, object_bytes, trusted, writable, marked);
                let Some(mapping) = opened else { return false };
                if persistence != Persistence::File {
                    mapping.forget_descriptor();
                }
                let memory = Opened::Mapped(mapping);
                let opened = Some(OpenedKey { memory, offset, length, access, persistence });
                self.tell(id, LinkEvent::Key { key, epoch, opened })
            }
            (State::Open, Message::Refused { key, epoch }) => {
                take_open(session, key, epoch)
                    && self.tell(id, LinkEvent::Key { key, epoch, opened: None })
            }
            _ => false,
        }
    }

    fn tell(&self, id: u64, event: LinkEvent) -> bool {
        let end = self.sessions.get(&id).and_then(|session| self.ends.get(&session.qp_num?));
        let Some(end) = end else { return false };
        end.link.push(event);
        true
    }

    /// Answers a hello whose nonce is right and whose target called connect; false refuses it.
    fn welcome(
        &mut self,
        id: u64,
        qp_num: u32,
        sender_qp: u32,
        sender_nonce: [u8; 16],
        descriptors: Vec<OwnedFd>,
    ) -> bool {
        let (Some(session), Some(end)) = (self.sessions.get_mut(&id), self.ends.get_mut(&qp_num))
        else {
            return false;
        };
        let Some(peer) = &end.expects else { return false };
        if peer.qp_num != sender_qp || peer.nonce != sender_nonce || end.session.is_some() {
            self.drop_session(id);
            return false;
        }
        let Ok([object, doorbell]) = <[OwnedFd; 2]>::try_from(descriptors) else {
            self.drop_session(id);
            return false;
        };
        let length = ConnectionObject::length_bytes(peer.geometry, end.link.geometry) as u64;
        let object = map_region(object, length, false, true, false).and_then(|mapping| {
            mapping.forget_descriptor();
            ConnectionObject::new(Arc::new(mapping), End::Passive, peer.geometry, end.link.geometry)
                .ok()
        });
        let (Some(object), Ok(doorbell)) = (object, Doorbell::from_peer(doorbell)) else {
            self.drop_session(id);
            return false;
        };
        if session.socket.send(&Message::Welcome { nonce: sender_nonce }.encode(), &[]).is_err() {
            self.drop_session(id);
            return false;
        }
        let asymmetric = peer.asymmetric && barrier::is_asymmetric();
        session.state = State::Open;
        session.qp_num = Some(qp_num);
        end.session = Some(id);
        let (object, bell) = (Arc::new(object), Bell::Doorbell(doorbell));
        end.link.push(LinkEvent::Connected { object, bell, asymmetric });
        self.watch(id);
        true
    }

    /// Answers an open; false when the answer cannot be sent.
    fn grant(&self, id: u64, key: u64, epoch: u64) -> bool {
        let Some(session) = self.sessions.get(&id) else { return false };
        let Some(end) = session.qp_num.and_then(|qp_num| self.ends.get(&qp_num)) else {
            return false;
        };
        let granted = exposure::grant(&end.link, || self.shared.find_region(key, end.link.domain));
        // Whoever can write an object without that seal can also truncate it under us; it goes to
        // processes of our own user only, who can stop us in simpler ways.
        let same_user = session.peer.uid == self.own_uid;
        let granted = granted.filter(|granted| same_user || is_shrink_sealed(&*granted.descriptor));
        match granted {
            Some(Granted { memory, access, descriptor }) => {
                let message = opened(key, epoch, memory.as_ref(), access);
                session.socket.send(&message.encode(), &[descriptor.as_fd()]).is_ok()
            }
            None => session.socket.send(&Message::Refused { key, epoch }.encode(), &[]).is_ok(),
        }
    }
}

fn opened(
    key: u64,
    epoch: u64,
    memory: &dyn MemoryObject,
    access: beeline_fabric::Access,
) -> Message {
    let whole = memory.whole();
    let object_bytes = whole.as_ref().map_or(memory.length_bytes(), |whole| whole.length_bytes());
    let offset = memory.base().addr().get() - memory.anchor().addr().get();
    Message::Opened {
        key,
        epoch,
        object_bytes: object_bytes as u64,
        offset: offset as u64,
        length: memory.length_bytes() as u64,
        access,
        persistence: memory.persistence(),
        marked: memory.has_retired_mark(),
    }
}

fn take_open(session: &mut Session, key: u64, epoch: u64) -> bool {
    match session.opens.iter().position(|&open| open == (key, epoch)) {
        Some(place) => {
            session.opens.swap_remove(place);
            true
        }
        None => false,
    }
}

/// Makes the object and says hello with it.
fn greet(
    socket: &ControlSocket,
    link: &Link,
    peer: &PeerInfo,
) -> std::io::Result<(Arc<ConnectionObject>, Doorbell)> {
    let length = ConnectionObject::length_bytes(link.geometry, peer.geometry);
    let descriptor = create_memfd("beeline-connection", length)?;
    let mapping = Mapping::shared(descriptor.try_clone()?, length, Protection::ReadWrite)?;
    mapping.forget_descriptor();
    let object =
        ConnectionObject::new(Arc::new(mapping), End::Active, link.geometry, peer.geometry)
            .map_err(std::io::Error::other)?;
    let (ours, theirs) = Doorbell::pair()?;
    let hello = Message::Hello {
        target_qp: peer.qp_num,
        target_nonce: peer.nonce,
        sender_qp: link.qp_num,
        sender_nonce: link.nonce,
    };
    socket.send(&hello.encode(), &[descriptor.as_fd(), theirs.as_fd()])?;
    Ok((Arc::new(object), ours))
}

fn is_shrink_sealed(descriptor: impl AsFd) -> bool {
    rustix::fs::fcntl_get_seals(descriptor).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// Maps `length` bytes of a received descriptor. It must be that long, and sealed against
/// shrinking unless its sender is `trusted`: a shrunk object would kill us at the next access.
fn map_region(
    descriptor: OwnedFd,
    length: u64,
    trusted: bool,
    writable: bool,
    marked: bool,
) -> Option<Mapping> {
    let size = u64::try_from(rustix::fs::fstat(&descriptor).ok()?.st_size).ok()?;
    // Far from where rounding up to pages would wrap around.
    let length_bytes =
        usize::try_from(length).ok().filter(|&length| length <= isize::MAX as usize / 2)?;
    let needed = if marked { Retired::object_bytes(length_bytes) } else { length_bytes };
    if size < needed as u64 || !(trusted || is_shrink_sealed(&descriptor)) {
        return None;
    }
    let protection = if writable { Protection::ReadWrite } else { Protection::ReadOnly };
    if marked {
        Mapping::marked(descriptor, length_bytes, protection, MapFlags::SHARED).ok()
    } else {
        Mapping::shared(descriptor, length_bytes, protection).ok()
    }
}
