//! The relay's doors and its loop: records of monitor and command, bells, processes that end, and
//! when to sleep.
//!
//! The loop turns while there is news, yields when there is none for a moment, and sleeps in one
//! `epoll_wait` when nothing is hot. While it turns it looks at its doors now and then.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use beeline_fabric::FabricError;
use beeline_os::control_socket::{ControlListener, ControlSocket, Received};
use beeline_os::mapping::Protection;
use beeline_os::poller::{Interest, Poller};
use beeline_os::{Mapping, process};
use beeline_sockets::relayed::{
    Adopted, Belfry, Heard, LONGEST_RECORD, RelayStatus, Reply, Request, relay_name,
};
use beeline_sockets::segment::Segment;
use rustix::net::sockopt::socket_cookie;

use crate::connection::Phase;
use crate::network::{Events, Inbox, Network, inbox};
use crate::relay::Core;
use crate::settings::Settings;

/// Turns between two looks at the doors.
const DOORS_EVERY: u64 = 64;
/// Turns in vain before others on this processor get their turn.
const YIELDS_AFTER: u32 = 16;
/// Time in vain before it sleeps.
const SLEEPS_AFTER: Duration = Duration::from_micros(50);
/// Connections of monitors and commands.
const MOST_ASKERS: usize = 64;
/// Most that are greeted at a time.
const GREETED_AT_A_TIME: usize = 16;
/// Records taken from one of them at a time.
const RECORDS_AT_A_TIME: usize = 16;
/// Where others than this user crowd the bell, everything is looked at no more often.
const CROWDED: Duration = Duration::from_millis(10);
/// Processes that could not be watched for want of descriptors are tried again after so long.
const RETRY: Duration = Duration::from_secs(1);
/// Without a connection, and a monitor that has not gone, for so long, a relay ends.
const ALONE: Duration = Duration::from_secs(60);

/// Why a relay could not begin or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// There is one already.
    #[error("a relay of this user runs already")]
    Running,
    /// The kernel refused.
    #[error("{call}: {source}")]
    Call {
        /// What was asked of the kernel.
        call: &'static str,
        /// Its answer.
        #[source]
        source: std::io::Error,
    },
    /// Fabric failed.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The way to the other relays could not be opened.
    #[error("the way to other relays: {0}")]
    Network(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl RelayError {
    /// True when trying again can help without changing anything.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        false
    }
}

fn failed(call: &'static str) -> impl FnOnce(std::io::Error) -> RelayError {
    move |source| match source.kind() {
        std::io::ErrorKind::AddrInUse => RelayError::Running,
        _ => RelayError::Call { call, source },
    }
}

/// Two descriptors for each connection, and one for each process.
fn allow_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Refused, fewer connections are carried.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// What woke the loop.
mod token {
    pub(super) const STOP: u64 = 0;
    pub(super) const LISTENER: u64 = 1;
    pub(super) const BELL: u64 = 2;
    pub(super) const NETWORK: u64 = 3;
    pub(super) const FABRIC: u64 = 4;
    /// With the number of the asker.
    pub(super) const ASKER: u64 = 1 << 32;
    /// With the number of the process.
    pub(super) const PROCESS: u64 = 2 << 32;
}

/// A relay with its doors.
#[derive(Debug)]
pub struct Relay {
    core: Core,
    events: Events,
    listener: ControlListener,
    belfry: Belfry,
    heard: Heard,
    /// When everything was last looked at for bells that may have been lost, and is to be again.
    looked_at: Instant,
    look_due: Option<Instant>,
    poller: Poller,
    askers: Vec<(u32, ControlSocket)>,
    next_asker: u32,
    processes: HashMap<u32, OwnedFd>,
    /// Completion queues that are in the poller.
    fabrics: usize,
    uid: u32,
    began: Instant,
    spoken_at: Instant,
    turns: u64,
    sleeps: u64,
}

impl Relay {
    /// Takes the names of this user's relay. `network` makes what reaches the other relays; its
    /// events go into the inbox.
    ///
    /// Errors: [`RelayError::Running`], [`RelayError::Network`]; the kernel's.
    pub fn begin<E: std::error::Error + Send + Sync + 'static>(
        settings: Settings,
        network: impl FnOnce(Inbox) -> Result<Box<dyn Network>, E>,
    ) -> Result<Self, RelayError> {
        allow_descriptors();
        let listener = ControlListener::bind(relay_name().as_bytes())
            .map_err(failed("binding the relay's name"))?;
        let belfry = Belfry::bind().map_err(failed("binding the bell's name"))?;
        let (inbox, events) = inbox().map_err(failed("eventfd"))?;
        let poller = Poller::new(64).map_err(failed("epoll_create"))?;
        let watch = |fd: BorrowedFd<'_>, token| {
            poller.add(fd, token, Interest::READ).map_err(failed("epoll_ctl"))
        };
        watch(listener.as_fd(), token::LISTENER)?;
        watch(belfry.as_fd(), token::BELL)?;
        watch(events.waker().as_fd(), token::NETWORK)?;
        let network = network(inbox).map_err(|error| RelayError::Network(Box::new(error)))?;
        let now = Instant::now();
        Ok(Self {
            core: Core::new(settings, network),
            events,
            listener,
            belfry,
            heard: Heard::default(),
            looked_at: now,
            look_due: None,
            poller,
            askers: Vec::new(),
            next_asker: 0,
            processes: HashMap::new(),
            fabrics: 0,
            uid: rustix::process::geteuid().as_raw(),
            began: now,
            spoken_at: now,
            turns: 0,
            sleeps: 0,
        })
    }

    /// Carries connections until `stop` is readable, or it has been alone for a minute: without a
    /// connection, and with no monitor that keeps one to it.
    ///
    /// Errors: the kernel's, of waiting.
    pub fn run(&mut self, stop: Option<BorrowedFd<'_>>) -> Result<(), RelayError> {
        if let Some(stop) = stop {
            self.poller.add(stop, token::STOP, Interest::READ).map_err(failed("epoll_ctl"))?;
        }
        let outcome = self.turn_until_stopped();
        if let Some(stop) = stop {
            let _ = self.poller.remove(stop);
        }
        outcome
    }

    fn turn_until_stopped(&mut self) -> Result<(), RelayError> {
        let mut vain = 0_u32;
        let mut busy_at = Instant::now();
        loop {
            self.turns += 1;
            let now = Instant::now();
            if self.core.turn(now - self.began) {
                vain = 0;
                busy_at = now;
            } else {
                vain = vain.saturating_add(1);
            }
            if self.turns.is_multiple_of(DOORS_EVERY) && self.look(Some(Duration::ZERO))? {
                return Ok(());
            }
            if vain == 0 {
                continue;
            }
            if self.core.is_quiet() && now - busy_at >= SLEEPS_AFTER {
                if self.sleep()? {
                    return Ok(());
                }
                vain = 0;
                busy_at = Instant::now();
            } else if vain >= YIELDS_AFTER && vain.is_multiple_of(4) {
                // The program whose bytes are waited for may share this processor.
                rustix::thread::sched_yield();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Sleeps until there is something to do; true when the relay is to end.
    fn sleep(&mut self) -> Result<bool, RelayError> {
        self.watch_fabrics()?;
        self.core.arm()?;
        // What came before the arm makes no event.
        if self.core.turn(self.began.elapsed()) || !self.core.is_quiet() {
            return Ok(false);
        }
        self.sleeps += 1;
        let mut bound = self.core.longest_sleep();
        if self.core.has_fresh() {
            bound = Some(bound.map_or(RETRY, |bound| bound.min(RETRY)));
        }
        if self.core.is_idle() && self.askers.is_empty() {
            let alone = self.spoken_at.elapsed();
            if alone >= ALONE {
                return Ok(true);
            }
            bound = Some(bound.map_or(ALONE - alone, |bound| bound.min(ALONE - alone)));
        }
        if let Some(due) = self.look_due {
            let left = due.saturating_duration_since(Instant::now());
            bound = Some(bound.map_or(left, |bound| bound.min(left)));
        }
        let ends = self.look(bound)?;
        self.core.acknowledge()?;
        Ok(ends)
    }

    fn watch_fabrics(&mut self) -> Result<(), RelayError> {
        for descriptor in self.core.event_descriptors().skip(self.fabrics) {
            let (poller, read) = (&self.poller, Interest::READ);
            poller.add(descriptor, token::FABRIC, read).map_err(failed("epoll_ctl"))?;
        }
        self.fabrics = self.core.event_descriptors().count();
        Ok(())
    }

    /// Waits at the doors for at most `bound`, and answers who is there; true when the relay is to
    /// end.
    fn look(&mut self, bound: Option<Duration>) -> Result<bool, RelayError> {
        let count = self.poller.wait(bound).map_err(failed("epoll_wait"))?;
        self.core.set_now(self.began.elapsed());
        for at in 0..count {
            let token = self.poller.readiness(at).token;
            let number = token as u32;
            match token {
                token::STOP => return Ok(true),
                token::LISTENER => self.greet(),
                token::BELL => self.hear_bells(),
                token::NETWORK => {
                    self.events.waker().clear();
                    while let Some(event) = self.events.next() {
                        self.core.happened(event);
                    }
                }
                token if token & token::ASKER != 0 => self.hear_asker(number),
                token if token & token::PROCESS != 0 => {
                    self.unwatch(number);
                    self.core.process_ended(number);
                }
                _ => {}
            }
        }
        self.look_at_all();
        self.watch_processes();
        Ok(false)
    }

    fn hear_bells(&mut self) {
        self.belfry.hear(&mut self.heard);
        for cookie in &self.heard.cookies {
            self.core.bell(*cookie);
        }
        if self.heard.all {
            let now = Instant::now();
            let due = if self.heard.strangers { self.looked_at + CROWDED } else { now };
            self.look_due = Some(self.look_due.map_or(due, |before| before.min(due)));
        }
    }

    /// Looks at everything, when that is due.
    fn look_at_all(&mut self) {
        let Some(due) = self.look_due else { return };
        let now = Instant::now();
        if due <= now {
            (self.looked_at, self.look_due) = (now, None);
            self.core.bells_for_all();
        }
    }

    fn watch_processes(&mut self) {
        while let Some(number) = self.core.take_stale() {
            self.unwatch(number);
        }
        let mut scarce = Vec::new();
        while let Some(number) = self.core.take_fresh() {
            let opened = match i32::try_from(number) {
                Ok(number) => process::open(number),
                Err(_) => Err(std::io::ErrorKind::NotFound.into()),
            };
            let watched = opened.and_then(|descriptor| {
                let token = token::PROCESS | u64::from(number);
                self.poller.add(&descriptor, token, Interest::READ)?;
                Ok(descriptor)
            });
            match watched {
                Ok(descriptor) => _ = self.processes.insert(number, descriptor),
                // Ended already, or the number of no process.
                Err(error)
                    if matches!(
                        error.kind(),
                        std::io::ErrorKind::NotFound | std::io::ErrorKind::InvalidInput
                    ) || error.raw_os_error()
                        == Some(rustix::io::Errno::SRCH.raw_os_error()) =>
                {
                    self.core.process_ended(number);
                }
                // No descriptor left for it now: it is alive as far as is known.
                Err(_) => scarce.push(number),
            }
        }
        scarce.into_iter().for_each(|number| self.core.put_back_fresh(number));
    }

    fn unwatch(&mut self, number: u32) {
        if let Some(descriptor) = self.processes.remove(&number) {
            let _ = self.poller.remove(&descriptor);
        }
    }

    fn greet(&mut self) {
        // Out of descriptors: the asker goes on without us.
        for socket in self.listener.waiting(GREETED_AT_A_TIME) {
            let known = socket.peer().is_ok_and(|peer| peer.uid == self.uid || peer.uid == 0);
            if !known || self.askers.len() >= MOST_ASKERS {
                continue;
            }
            self.next_asker = self.next_asker.wrapping_add(1);
            let token = token::ASKER | u64::from(self.next_asker);
            if self.poller.add(&socket, token, Interest::READ).is_ok() {
                self.askers.push((self.next_asker, socket));
            }
        }
    }

    fn hear_asker(&mut self, number: u32) {
        let Some(at) = self.askers.iter().position(|(asker, _)| *asker == number) else { return };
        let (_, socket) = self.askers.swap_remove(at);
        let (mut record, mut descriptors) = ([0; LONGEST_RECORD], Vec::new());
        for _ in 0..RECORDS_AT_A_TIME {
            let length = match socket.receive(&mut record, &mut descriptors) {
                Ok(Received::Record(length)) => length,
                Ok(Received::Empty) => break,
                Ok(Received::Closed) | Err(_) => {
                    self.spoken_at = Instant::now();
                    let _ = self.poller.remove(&socket);
                    return;
                }
            };
            let request = record.get(..length).and_then(|record| Request::decode(record).ok());
            let Some(request) = request else {
                let _ = self.poller.remove(&socket);
                return;
            };
            self.spoken_at = Instant::now();
            self.answer(&socket, request, &mut descriptors);
        }
        self.askers.push((number, socket));
    }

    fn answer(&mut self, socket: &ControlSocket, request: Request, with: &mut Vec<OwnedFd>) {
        // An asker that does not listen has gone on without us.
        let say = |reply: &Reply| socket.send(&reply.encode(), &[]).is_ok();
        match request {
            Request::Adopt(adopted) => {
                if let Err(why) = self.adopt(&adopted, with) {
                    tracing::debug!(own = %adopted.own, peer = %adopted.peer, %why, "not taken in");
                }
            }
            Request::Status => _ = say(&Reply::Status(self.status())),
            Request::Connections => {
                for one in self.core.connections() {
                    let process = one.holders.first().copied().unwrap_or(0);
                    let (own, peer) = (one.own, one.peer);
                    let reply = Reply::Connection {
                        connection: Adopted { own, peer, process, cookie: one.cookie },
                        paired: matches!(one.phase, Phase::Paired | Phase::Ending),
                        moved: one.moved,
                    };
                    if !say(&reply) {
                        break;
                    }
                }
                let _ = say(&Reply::End);
            }
            Request::Recall { cookie, hold_ms } => {
                self.core.recall(cookie, Duration::from_millis(hold_ms));
            }
            Request::Resume => {
                let cookie = with.first().and_then(|socket| socket_cookie(socket).ok());
                match cookie.and_then(|cookie| self.core.memory(cookie)) {
                    Some(memory) => {
                        let _ = socket.send(&Reply::Segment.encode(), &[memory.as_fd()]);
                    }
                    None => _ = say(&Reply::End),
                }
            }
        }
    }

    fn adopt(&mut self, adopted: &Adopted, with: &mut Vec<OwnedFd>) -> Result<(), String> {
        let (Some(memory), Some(socket), None) = (with.pop(), with.pop(), with.pop()) else {
            return Err("two descriptors come with it".to_owned());
        };
        let seals = rustix::fs::fcntl_get_seals(&memory).map_err(|error| error.to_string())?;
        if !seals.contains(rustix::fs::SealFlags::SHRINK) {
            return Err("a segment that can shrink under us".to_owned());
        }
        let length = rustix::fs::fstat(&memory).map_err(|error| error.to_string())?.st_size;
        let length = usize::try_from(length).map_err(|error| error.to_string())?;
        let mapping = Mapping::shared(memory, length, Protection::ReadWrite)
            .map_err(|error| error.to_string())?;
        let segment = Segment::take(mapping, 1).map_err(|error| error.to_string())?;
        if segment.relayed() != Some(adopted.cookie) || socket_cookie(&socket) != Ok(adopted.cookie)
        {
            return Err("socket, segment and record do not belong together".to_owned());
        }
        self.core
            .adopt((adopted.own, adopted.peer), socket, segment)
            .map_err(|refusal| refusal.to_string())
    }

    /// Counters.
    #[must_use]
    pub fn status(&self) -> RelayStatus {
        let counters = self.core.counters();
        let waiting = self.core.waiting() as u64;
        RelayStatus {
            process: std::process::id(),
            up_seconds: self.began.elapsed().as_secs(),
            connections: self.core.connections().count() as u64 - waiting,
            waiting,
            links: self.core.links_up() as u64,
            paired: counters.paired,
            broken: counters.broken,
            sent_bytes: counters.sent_bytes,
            received_bytes: counters.received_bytes,
            messages: counters.messages,
            writes: counters.written_batches,
            bells: counters.bells,
            doorbells: counters.doorbells,
            recalled: counters.recalled,
            sleepy: counters.sleepy,
            over_tcp: counters.over_tcp,
        }
    }

    /// Times it slept, and turns it took, so far.
    #[must_use]
    pub fn sleeps_and_turns(&self) -> (u64, u64) {
        (self.sleeps, self.turns)
    }
}
