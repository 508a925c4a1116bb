//! The store's loop: rings of the clients that are busy, one `epoll_wait` for everything else.
//!
//! Invariants: the loop makes no call that waits for a client or a disk; a client that asks for
//! nothing costs nothing, also not a look; without work the loop sleeps.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use beeline_env::clock::{Clock as _, SystemClock};
use beeline_observe::CommandTimes;
use beeline_os::control_socket::{ControlListener, ControlSocket};
use beeline_os::mapping::create_memfd;
use beeline_os::poller::{Interest, Poller, Waker};

use super::core::{Core, Effect, Limits};
use super::figures::ObjectMetrics;
use super::memory::Segments;
use super::peer::{Attached, MOST_LISTINGS, Peer};
use super::processes::Processes;
use super::spill::Spiller;
use super::{Cluster, Command, StoreOptions};
use crate::wire::{ENTRY_BYTES, Record, RecordKind, Request, encode_news};

const LISTENER: u64 = 0;
const WAKER: u64 = 1;
/// Kinds of tokens of clients and processes; their number is in the bits above.
const SOCKET: u64 = 2;
const PROCESS: u64 = 3;
const KIND_BITS: u32 = 2;

/// Connections accepted in one turn.
const ACCEPT: usize = 64;
/// How long no connection is accepted after the kernel had no descriptor left.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// How soon a client is looked at again that does not read its replies, at first and at last.
const OUTBOUND_AGAIN: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(250));
/// Records taken from one client's socket before the next one's turn.
const RECORDS: usize = 32;
/// Turns between two looks at sockets while rings are busy.
const LOOK: u32 = 64;

/// One of so many requests is timed: two looks at the clock cost as much as a short request.
const SAMPLE: u32 = 16;

/// Of the requests, in the order of their codes, which begin at 1.
pub(super) fn request_times() -> CommandTimes {
    const NAMES: &[&str] = &[
        "contains",
        "create",
        "seal",
        "release",
        "get",
        "delete",
        "subscribe",
        "fetch",
        "pin",
        "unpin",
        "ping",
        "reserve",
        "put",
        "give-back",
    ];
    CommandTimes::new(crate::NAME, NAMES).sampled(SAMPLE.into())
}

/// See the module's documentation.
pub(super) struct Server {
    options: StoreOptions,
    listener: ControlListener,
    inbox: Receiver<Command>,
    waker: Arc<Waker>,
    metrics: Arc<ObjectMetrics>,
    cluster: Box<dyn Cluster>,
    poller: Poller,
    core: Core,
    spiller: Spiller,
    peers: HashMap<u32, Peer>,
    processes: Processes,
    active: Vec<u32>,
    /// Clients that say nothing when they read replies they left, and have to be looked at.
    looked_after: HashSet<u32>,
    next_client: u32,
    generation: u64,
    accept_again_ns: Option<u64>,
    /// Pause before clients are looked at again that do not read their replies.
    outbound_again: Duration,
    requests: Vec<(u32, Request)>,
    /// Requests taken from rings.
    taken: u32,
    times: Arc<CommandTimes>,
    stopping: bool,
}

impl Server {
    pub(super) fn new(
        options: StoreOptions,
        listener: ControlListener,
        inbox: Receiver<Command>,
        waker: Arc<Waker>,
        metrics: Arc<ObjectMetrics>,
        cluster: Box<dyn Cluster>,
        segments: Segments,
    ) -> io::Result<Self> {
        let poller = Poller::new(256)?;
        poller.add(&listener, LISTENER, Interest::READ)?;
        poller.add(&*waker, WAKER, Interest::READ)?;
        let limits = Limits { memory: options.memory_bytes, spill: options.spill_bytes };
        let wake = Arc::clone(&waker);
        let spiller = Spiller::start(&options.spill_directory, move || wake.wake())?;
        let mut generation = [0; 8];
        getrandom::fill(&mut generation).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self {
            options,
            listener,
            inbox,
            waker,
            metrics,
            cluster,
            poller,
            core: Core::new(limits, segments),
            spiller,
            peers: HashMap::new(),
            processes: Processes::default(),
            active: Vec::new(),
            looked_after: HashSet::new(),
            next_client: 1,
            generation: u64::from_le_bytes(generation),
            accept_again_ns: None,
            outbound_again: OUTBOUND_AGAIN.0,
            requests: Vec::new(),
            taken: 0,
            times: Arc::new(request_times()),
            stopping: false,
        })
    }

    /// The same, with the time of its requests counted in `times`.
    pub(super) fn timed(mut self, times: Arc<CommandTimes>) -> Self {
        self.times = times;
        self
    }

    pub(super) fn run(mut self) {
        let clock = SystemClock;
        let spin_ns = u64::try_from(self.options.spin.as_nanos()).unwrap_or(u64::MAX);
        let (mut turns, mut last_work_ns) = (0_u32, 0);
        while !self.stopping {
            let now_ns = clock.monotonic_ns();
            let mut worked = self.poll_rings(now_ns, spin_ns);
            if self.core.next_timer().is_some_and(|at| at <= now_ns) {
                self.core.tick(now_ns);
                worked = true;
            }
            self.carry_out();
            turns = turns.wrapping_add(1);
            if worked {
                last_work_ns = now_ns;
            }
            let busy = worked || !self.active.is_empty();
            if busy && !turns.is_multiple_of(LOOK) {
                if !worked {
                    relax(now_ns - last_work_ns.min(now_ns));
                }
                continue;
            }
            let patience = if busy { Some(Duration::ZERO) } else { self.patience(now_ns) };
            if !busy {
                self.metrics.copy(&self.core);
            }
            if let Err(error) = self.look(patience, &clock) {
                tracing::error!(%error, "the object store stops");
                break;
            }
        }
        self.metrics.copy(&self.core);
    }

    /// How long the loop may sleep.
    fn patience(&self, now_ns: u64) -> Option<Duration> {
        let until = |at: u64| Duration::from_nanos(at.saturating_sub(now_ns));
        let timer = self.core.next_timer().map(until);
        let accept = self.accept_again_ns.map(until);
        let outbound = (!self.looked_after.is_empty()).then_some(self.outbound_again);
        [timer, accept, outbound].into_iter().flatten().min()
    }

    /// Takes requests from the rings of busy clients. True when there were any.
    fn poll_rings(&mut self, now_ns: u64, spin_ns: u64) -> bool {
        let mut worked = false;
        let mut index = 0;
        while index < self.active.len() {
            let number = self.active[index];
            let Some(peer) = self.peers.get_mut(&number) else {
                self.active.swap_remove(index);
                continue;
            };
            let mut requests = std::mem::take(&mut self.requests);
            let taken = peer.requests(&mut requests);
            if !requests.is_empty() {
                worked = true;
                peer.last_request_ns = now_ns;
            } else if peer.is_idle(now_ns, spin_ns)
                // One that does not read its replies may have requests waiting for ever.
                && (peer.is_stalled() || peer.sleep())
            {
                peer.active = false;
                peer.parked = peer.is_stalled();
                if peer.parked {
                    self.looked_after.insert(number);
                }
                self.active.swap_remove(index);
                self.requests = requests;
                if taken.is_err() {
                    self.expel(number, "a message that is no request");
                }
                continue;
            }
            for (tag, request) in requests.drain(..) {
                self.taken = self.taken.wrapping_add(1);
                let place = request.operation as usize - 1;
                let began = self.taken.is_multiple_of(SAMPLE).then(Instant::now);
                self.core.request(number, tag, request, now_ns);
                if let Some(began) = began {
                    self.times.record_at(place, began.elapsed());
                }
            }
            self.requests = requests;
            self.carry_out();
            if taken.is_err() {
                self.expel(number, "a message that is no request");
            }
            index += 1;
        }
        worked
    }

    /// Looks at the descriptors.
    fn look(&mut self, patience: Option<Duration>, clock: &SystemClock) -> io::Result<()> {
        let news = self.poller.wait(patience)?;
        let now_ns = clock.monotonic_ns();
        if self.accept_again_ns.is_some_and(|at| at <= now_ns) {
            self.accept_again_ns = None;
            self.poller.add(&self.listener, LISTENER, Interest::READ)?;
        }
        for index in 0..news {
            let readiness = self.poller.readiness(index);
            let number = u32::try_from(readiness.token >> KIND_BITS).unwrap_or(0);
            match (readiness.token & ((1 << KIND_BITS) - 1), number) {
                (LISTENER, 0) => self.accept(now_ns)?,
                (WAKER, 0) => {
                    self.waker.clear();
                    self.commands(now_ns);
                }
                (SOCKET, number) => self.socket(number, now_ns),
                (PROCESS, number) => {
                    for client in self.processes.clients(number) {
                        self.remove(client, now_ns);
                    }
                }
                _ => {}
            }
        }
        let waiting: Vec<u32> = self.looked_after.iter().copied().collect();
        let mut moved = waiting.is_empty();
        for number in waiting {
            let Some(peer) = self.peers.get_mut(&number) else { continue };
            let before = peer.outbound();
            if peer.push().is_err() {
                self.expel(number, "it claims to have read what was not sent");
                continue;
            }
            moved |= peer.outbound() < before;
            if peer.parked && !peer.is_stalled() {
                peer.parked = false;
                peer.last_request_ns = now_ns;
                if !std::mem::replace(&mut peer.active, true) {
                    self.active.push(number);
                }
            }
            if !peer.is_looked_after() {
                self.looked_after.remove(&number);
            }
        }
        self.outbound_again =
            if moved { OUTBOUND_AGAIN.0 } else { (self.outbound_again * 2).min(OUTBOUND_AGAIN.1) };
        self.carry_out();
        Ok(())
    }

    fn commands(&mut self, now_ns: u64) {
        while let Some(done) = self.spiller.next() {
            self.core.spill_done(done, now_ns);
        }
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Command::Fetched { id, found } => self.core.fetched(id, found, now_ns),
                Command::Publish => self.metrics.copy(&self.core),
                Command::Stop => self.stopping = true,
            }
        }
    }

    fn accept(&mut self, now_ns: u64) -> io::Result<()> {
        for _ in 0..ACCEPT {
            match self.listener.accept() {
                Ok(Some(socket)) => self.admit(socket),
                Ok(None) => return Ok(()),
                Err(error) => {
                    tracing::warn!(%error, "the object store cannot take a client");
                    self.poller.remove(&self.listener)?;
                    let again = u64::try_from(ACCEPT_AGAIN.as_nanos()).unwrap_or(u64::MAX);
                    self.accept_again_ns = Some(now_ns + again);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn admit(&mut self, socket: ControlSocket) {
        if self.peers.len() >= self.options.max_clients {
            tracing::warn!(limit = self.options.max_clients, "a client is refused at the limit");
            return;
        }
        let number = self.next_client;
        self.next_client = self.next_client.checked_add(1).unwrap_or(1);
        let token = |kind, number: u32| u64::from(number) << KIND_BITS | kind;
        let credentials = socket.peer().ok().filter(|peer| peer.pid > 0);
        let watched = self.poller.add(&socket, token(SOCKET, number), Interest::READ);
        let watched = watched.and_then(|()| match credentials {
            Some(peer) => {
                let token = |process| token(PROCESS, process);
                self.processes.join(&self.poller, peer.pid, number, token)
            }
            None => Ok(None),
        });
        match watched {
            Ok(process) => {
                self.peers.insert(number, Peer::new(socket, process));
                self.core.join(number);
            }
            // With the socket closed nothing of it is watched.
            Err(error) => tracing::warn!(%error, "a client cannot be watched"),
        }
    }

    fn socket(&mut self, number: u32, now_ns: u64) {
        // What is left makes the socket ready again, after all other clients.
        for _ in 0..RECORDS {
            let Some(peer) = self.peers.get_mut(&number) else { return };
            if peer.has_records() {
                if peer.send_waiting().is_err() {
                    return self.remove(number, now_ns);
                }
                if !peer.has_records() {
                    let token = u64::from(number) << KIND_BITS | SOCKET;
                    let _ = self.poller.modify(&peer.socket, token, Interest::READ);
                }
            }
            let record = match peer.record() {
                Ok(Some(record)) => record,
                Ok(None) => return,
                Err(_) => return self.remove(number, now_ns),
            };
            if !peer.is_greeted() {
                if let Err(error) = peer.greet(record, self.generation, number) {
                    tracing::warn!(%error, "a client of the object store is refused");
                    return self.remove(number, now_ns);
                }
                peer.active = true;
                peer.last_request_ns = now_ns;
                self.active.push(number);
                continue;
            }
            let segment = u32::try_from(record.a).unwrap_or(0);
            match record.kind {
                RecordKind::Ring => {
                    peer.wake();
                    peer.last_request_ns = now_ns;
                    if !std::mem::replace(&mut peer.active, true) {
                        self.active.push(number);
                    }
                    // Mostly the only record: more of them make the socket ready again.
                    return;
                }
                RecordKind::Mapped => self.core.mapped(number, segment, now_ns),
                RecordKind::Unmapped => self.core.unmapped(number, segment, now_ns),
                RecordKind::List if peer.listings < MOST_LISTINGS => {
                    peer.listings += 1;
                    self.list(number, record.a, now_ns);
                }
                RecordKind::Listed if peer.listings > 0 => peer.listings -= 1,
                _ => return self.expel(number, "a record out of place"),
            }
            self.carry_out();
        }
    }

    fn list(&mut self, number: u32, question: u64, now_ns: u64) {
        let listing = self.core.listing(now_ns);
        let entries = (listing.len() / ENTRY_BYTES) as u64;
        let answer =
            Record::new(RecordKind::Listing, question, entries, listing.len().max(1) as u64);
        match listing_file(&listing) {
            Ok(file) => self.send(number, answer, Attached::Owned(file)),
            Err(error) => {
                tracing::warn!(%error, "a listing cannot be made");
                self.expel(number, "its listing cannot be made");
            }
        }
    }

    fn send(&mut self, number: u32, record: Record, attached: Attached) {
        let Some(peer) = self.peers.get_mut(&number) else { return };
        let waited = peer.has_records();
        if peer.send(record, attached).is_err() {
            return self.expel(number, "it does not read its socket");
        }
        if peer.has_records() && !waited {
            let token = u64::from(number) << KIND_BITS | SOCKET;
            let _ = self.poller.modify(&peer.socket, token, Interest::READ_WRITE);
        }
    }

    /// The client is gone.
    fn remove(&mut self, number: u32, now_ns: u64) {
        let Some(peer) = self.peers.remove(&number) else { return };
        self.looked_after.remove(&number);
        let _ = self.poller.remove(&peer.socket);
        if let Some(process) = peer.process {
            self.processes.leave(&self.poller, process, number);
        }
        self.core.leave(number, now_ns);
        self.carry_out();
    }

    fn expel(&mut self, number: u32, reason: &'static str) {
        tracing::warn!(client = number, reason, "a client of the object store is expelled");
        self.core.counters.expelled += 1;
        self.remove(number, SystemClock.monotonic_ns());
    }

    /// Does what the core decided.
    fn carry_out(&mut self) {
        loop {
            let effects = self.core.take_effects();
            if effects.is_empty() {
                return;
            }
            for effect in effects {
                self.carry_out_one(effect);
            }
        }
    }

    fn carry_out_one(&mut self, effect: Effect) {
        match effect {
            Effect::Reply { client, tag, reply } => self.tell(client, tag, reply.encode()),
            Effect::News { client, id } => {
                let [a, b, c] = encode_news(id);
                self.tell(client, 0, [a, b, c, 0, 0, 0]);
            }
            Effect::Send { client, record, segment } => {
                let attached = segment.map_or(Attached::Nothing, Attached::Segment);
                self.send(client, record, attached);
            }
            Effect::Spill(job) => self.spiller.give(job),
            Effect::Fetch(id, from) => self.cluster.fetch(id, from),
            Effect::Announce(id) => self.cluster.announce(id),
            Effect::Withdraw(id) => self.cluster.withdraw(id),
            Effect::Expel { client, reason } => self.expel(client, reason),
        }
    }

    fn tell(&mut self, client: u32, tag: u32, words: [u64; 6]) {
        let Some(peer) = self.peers.get_mut(&client) else { return };
        if peer.reply(tag, words).is_err() {
            self.expel(client, "it claims to have read what was not sent");
        } else if peer.is_looked_after() {
            self.looked_after.insert(client);
        }
    }
}

/// A pause while nothing comes: at first for the processor only, then for other threads too, which
/// on a small machine may be the client itself.
fn relax(idle_ns: u64) {
    if idle_ns < 2_000 {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

fn listing_file(listing: &[u8]) -> io::Result<OwnedFd> {
    let descriptor = create_memfd("beeline-objects-listing", listing.len().max(1))?;
    let mut file = File::from(descriptor);
    file.write_all(listing)?;
    Ok(file.into())
}
