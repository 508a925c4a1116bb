//! The loop of one shard's thread.
//!
//! ```text
//! turn:  wait ─ lock own shard ─ deliveries, mailboxes, fabric, sockets ─ commit ─ unlock
//!          ▲                                                                        │
//!          └── commands over several shards ── replies: mailboxes, fabric, sockets ─┘
//! ```
//!
//! Invariants: replies leave only after the commit of the turn that made them; the thread holds no
//! lock while it writes to sockets or waits; it sleeps only after it announced so and looked once
//! more (see [`crate::shared::Door::sleeping`]).

use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver as Deliveries;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use beeline_kv::{Keyspace, Maintenance, Shard};
use beeline_os::poller::{Interest, Poller, Readiness};
use beeline_resp::table::Scope;
use beeline_resp::{After, ClientInfo, Executor, Output, Plan, Route, Session, Version};
use beeline_ring::{Receiver, Sender};

use crate::connection::{Connection, Life, ReadOutcome};
use crate::fabric_servers::FabricServers;
use crate::parcel::{Delivery, Heading, Hop, Origin, Parcel};
use crate::shared::{Registered, Shared, lock};
use crate::stats::{LoopCounters, count};

/// Poller token of the shard's own waker; connections use their slot.
pub(crate) const WAKER: u64 = u64::MAX;
/// Poller tokens from here up to `WAKER` are fabric completion queues.
pub(crate) const FABRIC: u64 = u64::MAX - 1024;
/// News taken from the poller a turn.
const EVENTS: usize = 512;
/// Requests of one connection executed a turn; the next connection is due then.
const REQUESTS_PER_TURN: usize = 256;
/// Slots of a mailbox between two shards. One a turn is used; more wait in `Peer::backlog`.
pub(crate) const MAILBOX: usize = 256;
/// Turns that only poll fabric between two looks at the sockets.
const TURNS_PER_LOOK: u32 = 32;
/// Of these, turns between two looks at the clocks.
const TURNS_PER_CLOCK: u32 = 8;
/// Returned parcels kept per peer.
const SPARE_HOPS: usize = 8;
/// Replies to another shard made in one turn, bytes; its further commands wait for the next.
const HOP_REPLY_BYTES: usize = 16 << 20;
/// Received bytes that may wait while complete requests are still due.
const READ_AHEAD_BYTES: usize = 16 << 10;
/// How often quiet things are looked at: idle clients, published client data.
const HOUSEKEEPING_NS: u64 = 100_000_000;
/// Commands that write a snapshot while their client waits.
const SAVING: [&str; 2] = ["save", "shutdown"];
/// The reply in place of one that passed the limit on unread replies.
const TOO_LARGE: &[u8] = b"ERR the command ran, but its reply passes the limit \
    client-output-buffer-limit: ask for less at once, or raise it";
/// A connection quiet for so long gives memory back.
const TIDY_MS: u64 = 2000;
/// Bytes the collector may copy between two batches: some 100 us.
const MAINTENANCE_BYTES: u64 = 256 << 10;

/// The ways to and from another shard.
#[allow(clippy::vec_box, reason = "parcels travel boxed: a mailbox slot is a pointer")]
#[derive(Debug)]
pub(crate) struct Peer {
    pub sender: Sender<Parcel>,
    pub receiver: Receiver<Parcel>,
    /// Commands collected this turn.
    collecting: Box<Hop>,
    /// Parcels the mailbox had no room for.
    backlog: VecDeque<Parcel>,
    /// Returned parcels, for reuse.
    spare: Vec<Box<Hop>>,
    /// Executed this turn; sent back after the commit.
    executed: Vec<Box<Hop>>,
    /// Begun in an earlier turn, and the command to go on with.
    unfinished: Option<(Box<Hop>, usize)>,
}

impl Peer {
    pub(crate) fn new(sender: Sender<Parcel>, receiver: Receiver<Parcel>) -> Self {
        Self {
            sender,
            receiver,
            collecting: Box::default(),
            backlog: VecDeque::new(),
            spare: Vec::new(),
            executed: Vec::new(),
            unfinished: None,
        }
    }

    fn keep(&mut self, mut hop: Box<Hop>) {
        if self.spare.len() < SPARE_HOPS {
            hop.commands.clear();
            hop.replies.clear();
            self.spare.push(hop);
        }
    }

    /// Puts the commands collected so far in line.
    fn close_collection(&mut self) {
        if !self.collecting.commands.is_empty() {
            let next = self.spare.pop().unwrap_or_default();
            let full = std::mem::replace(&mut self.collecting, next);
            self.backlog.push_back(Parcel::Commands(full));
        }
    }

    /// Sends what was collected; `true` when anything went out.
    fn send_all(&mut self) -> bool {
        self.backlog.extend(self.executed.drain(..).map(Parcel::Replies));
        self.close_collection();
        let mut sent = false;
        while let Some(parcel) = self.backlog.pop_front() {
            if let Err(parcel) = self.sender.send(parcel) {
                self.backlog.push_front(parcel);
                break;
            }
            sent = true;
        }
        sent
    }
}

/// What every client's socket needs. A peer that vanished without a word is noticed after some
/// ten minutes, as with Redis.
fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(300))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(100))?;
    Ok(sockopt::set_tcp_keepcnt(stream, 3)?)
}

/// Replaces a reply that begins at `start` and passed the limit by an error.
fn bound(output: &mut Output, start: usize) {
    if output.is_over_limit() {
        output.truncate(start);
        output.error(TOO_LARGE);
    }
}

/// One shard's thread.
pub(crate) struct ShardThread {
    index: usize,
    shared: Arc<Shared>,
    deliveries: Deliveries<Delivery>,
    poller: Poller,
    connections: Vec<Option<Box<Connection>>>,
    free: Vec<u32>,
    generation: u32,
    peers: Vec<Option<Peer>>,
    fabric: FabricServers,
    /// Connections with work although their socket is quiet.
    resume: VecDeque<u32>,
    /// Connections whose output, interest or life changed this turn.
    touched: Vec<u32>,
    /// Connections whose current request needs several shards or the node.
    deferred: VecDeque<u32>,
    /// Connections whose current request CLIENT PAUSE holds back.
    held_back: Vec<u32>,
    executor: Executor,
    /// Errors of the executor that were counted already.
    errors_seen: u64,
    scratch: Output,
    /// The setting, as of the beginning of the turn.
    output_limit_bytes: usize,
    now_ms: u64,
    now_ns: u64,
    housekeeping_ns: u64,
    /// Something was read since other threads were last shown the clients.
    unpublished: bool,
    /// Connections hold memory that they may not need any more.
    untidy: bool,
    maintenance: Maintenance,
    /// Something may have changed since the last upkeep, which knows when the next key expires.
    upkeep_wanted: bool,
    fabric_active_ns: u64,
    turns_since_look: u32,
    spin_ns: u64,
    draining_since_ns: Option<u64>,
}

/// What a thread is made of.
pub(crate) struct Parts {
    pub index: usize,
    pub shared: Arc<Shared>,
    pub deliveries: Deliveries<Delivery>,
    pub peers: Vec<Option<Peer>>,
    pub spin: Duration,
    pub fabric: beeline_kv_server::ServerOptions,
}

impl ShardThread {
    /// Made on the thread that runs it.
    ///
    /// Errors: the poller's.
    pub(crate) fn new(parts: Parts) -> std::io::Result<Self> {
        let poller = Poller::new(EVENTS)?;
        poller.add(&parts.shared.doors[parts.index].waker, WAKER, Interest::READ)?;
        Ok(Self {
            index: parts.index,
            fabric: FabricServers::new(parts.index, parts.fabric),
            shared: parts.shared,
            deliveries: parts.deliveries,
            poller,
            connections: Vec::new(),
            free: Vec::new(),
            generation: 0,
            peers: parts.peers,
            resume: VecDeque::new(),
            touched: Vec::new(),
            deferred: VecDeque::new(),
            held_back: Vec::new(),
            executor: Executor::new(),
            errors_seen: 0,
            scratch: Output::new(Version::Resp2),
            output_limit_bytes: usize::MAX,
            now_ms: 0,
            now_ns: 0,
            housekeeping_ns: 0,
            unpublished: false,
            untidy: false,
            maintenance: Maintenance::default(),
            upkeep_wanted: false,
            fabric_active_ns: 0,
            turns_since_look: 0,
            spin_ns: u64::try_from(parts.spin.as_nanos()).unwrap_or(u64::MAX),
            draining_since_ns: None,
        })
    }

    fn counters(&self) -> &LoopCounters {
        &self.shared.counters[self.index]
    }

    /// Runs until the node stops.
    pub(crate) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let mut news = Vec::with_capacity(EVENTS);
        loop {
            let now_ns = self.wait(&mut news);
            if shared.is_stopping() && self.wind_down(now_ns) {
                break;
            }
            count(&self.counters().turns, 1);
            let limit = shared.settings.output_limit_bytes.load(Ordering::Relaxed);
            self.output_limit_bytes = limit;
            self.step_back();
            let mut shard = lock(&shared.shards[self.index]);
            let committed = self.serve(&mut shard, &news, now_ns);
            drop(shard);
            // After a failed commit the replies say so.
            self.send_parcels();
            if committed {
                self.fabric.send_replies();
            }
            self.run_deferred();
            self.flush_touched();
            if now_ns >= self.housekeeping_ns {
                self.housekeeping_ns = now_ns + HOUSEKEEPING_NS;
                self.keep_house();
            }
        }
        self.finish();
    }

    // ---- waiting ----

    /// Looks at both clocks; returns the monotonic one, in nanoseconds.
    fn read_clocks(&mut self) -> u64 {
        let clock = self.shared.store.clock();
        self.now_ms = clock.unix_ms();
        self.now_ns = clock.monotonic_ns();
        self.now_ns
    }

    /// Fills `news`; sleeps when there is nothing to do. Returns the time after that.
    fn wait(&mut self, news: &mut Vec<Readiness>) -> u64 {
        news.clear();
        // Between two looks at the sockets a turn takes as long as reading both clocks does.
        let now_ns = if self.turns_since_look.is_multiple_of(TURNS_PER_CLOCK) {
            self.read_clocks()
        } else {
            self.now_ns
        };
        let busy = !self.resume.is_empty()
            || !self.deferred.is_empty()
            || self.maintenance.did_work
            || self
                .peers
                .iter()
                .flatten()
                .any(|peer| !peer.backlog.is_empty() || peer.unfinished.is_some());
        let spinning = now_ns.saturating_sub(self.fabric_active_ns) < self.spin_ns;
        let timeout = if busy || self.look_around() {
            Some(Duration::ZERO)
        } else if spinning {
            // An idle shard that is awake anyway helps others to write back (BOOM §3.4).
            self.shared.store.help_write_back(self.index);
            self.turns_since_look += 1;
            if self.turns_since_look < TURNS_PER_LOOK {
                return now_ns;
            }
            Some(Duration::ZERO)
        } else if !self.fabric.arm() {
            // Freshly armed: what came before produces no event, so one more turn looks.
            return now_ns;
        } else {
            self.sleep_bound(now_ns)
        };
        self.turns_since_look = 0;
        let sleeps = timeout != Some(Duration::ZERO);
        if sleeps && !self.announce_sleep() {
            return now_ns;
        }
        let waited = self.poller.wait(timeout);
        if sleeps {
            count(&self.counters().sleeps, 1);
            self.shared.doors[self.index].sleeping.store(false, Ordering::Relaxed);
        }
        match waited {
            Ok(events) => news.extend((0..events).map(|index| self.poller.readiness(index))),
            Err(error) => tracing::error!(%error, shard = self.index, "epoll_wait failed"),
        }
        if news.iter().any(|readiness| readiness.token == WAKER) {
            // Before the deliveries are taken: one that comes later wakes this thread again.
            self.shared.doors[self.index].waker.clear();
        }
        if sleeps { self.read_clocks() } else { now_ns }
    }

    /// Anything in the mailboxes?
    fn look_around(&mut self) -> bool {
        self.peers.iter_mut().flatten().any(|peer| !peer.receiver.is_empty())
    }

    /// Says that a wake-up is needed from now on, then looks once more. `false`: stay awake.
    fn announce_sleep(&mut self) -> bool {
        // The fence pairs with the one in `Door::nudge`.
        self.shared.doors[self.index].sleeping.store(true, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::SeqCst);
        let changed = self.shared.doors[self.index].changed.load(Ordering::Relaxed);
        let stay = changed || self.look_around() || !self.fabric.is_armed();
        if stay {
            self.shared.doors[self.index].sleeping.store(false, Ordering::Relaxed);
        }
        !stay
    }

    fn sleep_bound(&self, now_ns: u64) -> Option<Duration> {
        let mut deadline = self.maintenance.next_deadline_ns;
        let mut sooner =
            |at: u64| deadline = Some(deadline.map_or(at, |deadline| deadline.min(at)));
        if self.shared.settings.idle_timeout_s.load(Ordering::Relaxed) != 0
            && self.connections.len() > self.free.len()
        {
            sooner(now_ns + 1_000_000_000);
        }
        if self.shared.is_stopping() || !self.held_back.is_empty() || self.fabric.has_pending() {
            sooner(now_ns + HOUSEKEEPING_NS);
        }
        if self.unpublished || self.upkeep_wanted {
            sooner(self.housekeeping_ns);
        }
        if self.untidy || self.fabric.clients() > 0 {
            sooner(now_ns + 1_000_000_000);
        }
        deadline.map(|at| Duration::from_nanos(at.saturating_sub(now_ns).max(1)))
    }

    /// Lets threads in that wait for this shard's lock.
    fn step_back(&self) {
        for _ in 0..1000 {
            if self.shared.doors[self.index].waiting.load(Ordering::SeqCst) == 0 {
                return;
            }
            std::thread::yield_now();
        }
    }

    // ---- one turn under the lock ----

    /// Serves everything that waits; `false` when it could not be made durable.
    fn serve(
        &mut self,
        shard: &mut MutexGuard<'_, Shard>,
        news: &[Readiness],
        now_ns: u64,
    ) -> bool {
        self.take_deliveries();
        let executed = self.take_parcels(shard);
        let changed = &self.shared.doors[self.index].changed;
        let changed = changed.load(Ordering::Relaxed) && changed.swap(false, Ordering::Relaxed);
        self.upkeep_wanted |= executed || changed || !news.is_empty();
        let requests = self.fabric.poll(shard, &self.poller);
        if requests > 0 {
            self.fabric_active_ns = now_ns;
            self.upkeep_wanted = true;
            count(&self.counters().fabric_requests, requests as u64);
        }
        for readiness in news {
            match readiness.token {
                WAKER => {}
                token if token >= FABRIC => {
                    self.fabric.acknowledge(token);
                    self.fabric_active_ns = now_ns;
                }
                slot => self.serve_ready(u32::try_from(slot).unwrap_or(u32::MAX), readiness, shard),
            }
        }
        for _ in 0..self.resume.len() {
            if let Some(slot) = self.resume.pop_front() {
                self.with_connection(slot, |thread, connection| {
                    connection.resume = false;
                    thread.execute_ready(connection, shard);
                });
            }
        }
        let committed = shard.commit();
        if let Err(error) = &committed {
            let error = error.to_string();
            self.refuse_turn(&error, shard);
        }
        let due = self.maintenance.next_deadline_ns.is_some_and(|deadline| deadline <= now_ns);
        if self.maintenance.did_work || due || now_ns >= self.housekeeping_ns {
            self.upkeep_wanted = false;
            match shard.maintain(MAINTENANCE_BYTES) {
                Ok(maintenance) => self.maintenance = maintenance,
                Err(error) => {
                    tracing::error!(%error, shard = self.index, "upkeep failed");
                    self.maintenance = Maintenance::default();
                }
            }
        }
        if now_ns >= self.housekeeping_ns {
            self.fabric.keep_house(shard);
        }
        committed.is_ok()
    }

    /// What this turn executed is not durable: nothing of it may look acknowledged.
    fn refuse_turn(&mut self, error: &str, shard: &mut Shard) {
        tracing::error!(
            error,
            shard = self.index,
            "cannot make writes durable; closing their connections"
        );
        for slot in std::mem::take(&mut self.touched) {
            if let Some(connection) = self.connection(slot) {
                connection.output.clear();
                connection.life = Life::Dead;
            }
            self.touched.push(slot);
        }
        self.fabric.abandon(shard);
        for peer in self.peers.iter_mut().flatten() {
            for hop in &mut peer.executed {
                hop.replies.replace_all(
                    b"-MISCONF Errors writing to durable memory; see the node's log\r\n",
                );
            }
        }
    }

    fn connection(&mut self, slot: u32) -> Option<&mut Box<Connection>> {
        self.connections.get_mut(slot as usize)?.as_mut()
    }

    /// Takes a connection out of the table for the time of `with`.
    fn with_connection(&mut self, slot: u32, with: impl FnOnce(&mut Self, &mut Connection)) {
        let taken = self.connections.get_mut(slot as usize).and_then(Option::take);
        if let Some(mut connection) = taken {
            with(self, &mut connection);
            self.connections[slot as usize] = Some(connection);
            self.touched.push(slot);
        }
    }

    fn take_deliveries(&mut self) {
        while let Ok(delivery) = self.deliveries.try_recv() {
            match delivery {
                Delivery::Redis(stream) => self.adopt(stream),
                Delivery::Fabric(incoming) => {
                    self.fabric.accept(*incoming, &self.shared.store, &self.poller);
                }
                Delivery::Kill(id) => {
                    let found = self.connections.iter().flatten().find(|c| c.session.id() == id);
                    if let Some(slot) = found.map(|connection| connection.slot) {
                        self.with_connection(slot, |_, connection| connection.life = Life::Dead);
                    }
                }
            }
        }
    }

    fn adopt(&mut self, stream: TcpStream) {
        count(&self.counters().connections_received, 1);
        if let Err(error) = prepare(&stream) {
            tracing::warn!(%error, "cannot prepare a client's socket");
            self.shared.connected.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let address = |address: std::io::Result<std::net::SocketAddr>| {
            address.map(|address| address.to_string()).unwrap_or_default()
        };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            u32::try_from(self.connections.len() - 1).unwrap_or(u32::MAX)
        });
        self.generation = self.generation.wrapping_add(1);
        let now_us = self.now_ms * 1000;
        let info = ClientInfo {
            id: self.shared.next_client.fetch_add(1, Ordering::Relaxed),
            address: address(stream.peer_addr()),
            local_address: address(stream.local_addr()),
            descriptor: stream.as_raw_fd(),
            connected_us: now_us,
            active_us: now_us,
            ..ClientInfo::default()
        };
        if let Err(error) = self.poller.add(&stream, u64::from(slot), Interest::READ) {
            tracing::warn!(%error, "cannot watch a client's socket; see fs.epoll.max_user_watches");
            self.free.push(slot);
            self.shared.connected.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let session = Session::new(info, self.shared.as_ref());
        let registered = Registered { shard: self.index, info: session.snapshot() };
        lock(&self.shared.clients).insert(session.id(), registered);
        let limits = self.shared.settings.limits();
        let mut connection =
            Connection::new(stream, slot, self.generation, session, limits, self.now_ms);
        connection.parser.set_authenticated(connection.session.is_authenticated());
        self.connections[slot as usize] = Some(Box::new(connection));
    }

    /// Takes what other shards sent; whether any of it was executed.
    fn take_parcels(&mut self, shard: &mut Shard) -> bool {
        let mut executed = false;
        for from in 0..self.peers.len() {
            let Some(mut peer) = self.peers[from].take() else { continue };
            // At most a mailbox a turn, so that a flood from one side does not starve sockets.
            for _ in 0..MAILBOX {
                let (mut hop, first) = match peer.unfinished.take() {
                    Some(unfinished) => unfinished,
                    None => match peer.receiver.receive() {
                        None => break,
                        Some(Parcel::Commands(hop)) => (hop, 0),
                        Some(Parcel::Replies(hop)) => {
                            for (origin, reply) in hop.replies.iter() {
                                self.deliver_reply(origin, reply);
                            }
                            peer.keep(hop);
                            continue;
                        }
                    },
                };
                executed = true;
                match self.execute_parcel(&mut hop, first, shard) {
                    None => peer.executed.push(hop),
                    Some(next) => {
                        let mut part: Box<Hop> = Box::default();
                        std::mem::swap(&mut part.replies, &mut hop.replies);
                        peer.executed.push(part);
                        peer.unfinished = Some((hop, next));
                        break;
                    }
                }
            }
            self.peers[from] = Some(peer);
        }
        executed
    }

    /// Executes the commands of `hop` from `first` on; returns where to go on in the next turn
    /// when the replies became too large for one.
    fn execute_parcel(&mut self, hop: &mut Hop, first: usize, shard: &mut Shard) -> Option<usize> {
        let Hop { commands, replies } = hop;
        let mut next = first;
        self.scratch.set_limit(self.output_limit_bytes);
        while let Some((heading, args)) = commands.get(next) {
            if replies.bytes.len() >= HOP_REPLY_BYTES {
                break;
            }
            let version = heading.protocol;
            self.executor.execute_remote(
                heading.database,
                version,
                args,
                &mut Keyspace::single(shard),
                &mut self.scratch,
                self.shared.as_ref(),
            );
            bound(&mut self.scratch, 0);
            replies.bytes.extend_from_slice(self.scratch.as_bytes());
            replies.finish(heading.origin);
            self.scratch.clear();
            next += 1;
        }
        count(&self.counters().forwarded_commands, (next - first) as u64);
        commands.get(next).is_some().then_some(next)
    }

    fn deliver_reply(&mut self, origin: Origin, reply: &[u8]) {
        let Some(connection) = self.connection(origin.slot) else { return };
        if connection.generation != origin.generation {
            return;
        }
        connection.fill(origin, reply);
        if connection.needs_several {
            // Becomes true once, with the last reply awaited.
            if connection.is_in_order() {
                self.deferred.push_back(origin.slot);
            }
        } else if !connection.resume {
            connection.resume = true;
            self.resume.push_back(origin.slot);
        }
        self.touched.push(origin.slot);
    }

    // ---- sockets ----

    fn serve_ready(&mut self, slot: u32, readiness: &Readiness, shard: &mut Shard) {
        self.with_connection(slot, |thread, connection| {
            let waiting = connection.needs_several || connection.held_back || connection.again;
            // What was read and not executed stays bounded: the socket can wait.
            let ahead = connection.resume && connection.parser.pending_bytes() >= READ_AHEAD_BYTES;
            if readiness.readable && connection.life == Life::Open && !waiting && !ahead {
                let before = connection.parser.pending_bytes();
                match connection.read() {
                    ReadOutcome::Bytes => {
                        let read = connection.parser.pending_bytes().saturating_sub(before);
                        count(&thread.counters().input_bytes, read as u64);
                        connection.last_active_ms = thread.now_ms;
                        connection.unpublished = true;
                        thread.unpublished = true;
                        thread.untidy = true;
                        thread.execute_ready(connection, shard);
                    }
                    ReadOutcome::Empty => {}
                    ReadOutcome::End => connection.life = Life::HalfClosed,
                }
            }
            if readiness.hung_up {
                connection.life = Life::Dead;
            }
        });
    }

    /// Executes the complete requests of a connection, up to this turn's share.
    fn execute_ready(&mut self, connection: &mut Connection, shard: &mut Shard) {
        let pause_bytes = self.output_pause_bytes();
        for _ in 0..REQUESTS_PER_TURN {
            if !matches!(connection.life, Life::Open | Life::HalfClosed)
                || connection.needs_several
                || connection.held_back
            {
                return;
            }
            if connection.is_full(pause_bytes) {
                // Goes on when a reply arrives, or when the peer has read enough.
                connection.backed_up = true;
                return;
            }
            if std::mem::take(&mut connection.again) {
                self.execute_one(connection, shard);
                continue;
            }
            match connection.parser.advance() {
                Ok(true) => self.execute_one(connection, shard),
                Ok(false) => return,
                Err(error) => {
                    count(&self.counters().protocol_errors, 1);
                    self.scratch.set_version(connection.session.version());
                    beeline_resp::reply_protocol_error(
                        &mut connection.session,
                        &error,
                        &mut self.scratch,
                    );
                    connection.append(self.scratch.as_bytes());
                    self.scratch.clear();
                    connection.life = Life::Draining;
                    return;
                }
            }
        }
        self.resume_later(connection);
    }

    fn execute_one(&mut self, connection: &mut Connection, shard: &mut Shard) {
        let in_order = connection.is_in_order();
        let Connection { session, parser, output, .. } = &mut *connection;
        let plan = Plan::new(session, parser.current());
        if self.is_paused(session, &plan) {
            connection.held_back = true;
            self.held_back.push(connection.slot);
            return;
        }
        count(&self.counters().commands, 1);
        match plan.route(session, self.shared.store.as_ref()) {
            Route::Shard(owner) if owner != self.index && plan.is_portable() => {
                self.forward(connection, owner);
            }
            // Several shards, a foreign one that must be locked, or the node, whose answers may
            // take a while.
            Route::Shards(_) | Route::All => self.defer(connection),
            Route::Shard(owner) if owner != self.index => self.defer(connection),
            Route::Here if plan.command().is_some_and(|command| command.scope == Scope::Node) => {
                self.defer(connection);
            }
            Route::Here | Route::Shard(_) => {
                let output = if in_order { output } else { &mut self.scratch };
                let before = output.len();
                output.set_limit(self.output_limit_bytes);
                let mut keyspace = Keyspace::single(shard);
                let shared = self.shared.as_ref();
                let after = self.executor.execute(session, plan, &mut keyspace, output, shared);
                bound(output, before);
                self.settle(connection, after, in_order);
            }
        }
    }

    /// Leaves the connection's current request for later, without the own lock.
    fn defer(&mut self, connection: &mut Connection) {
        connection.needs_several = true;
        if connection.is_in_order() {
            self.deferred.push_back(connection.slot);
        }
    }

    /// Sends the connection's current request to the shard that owns its key.
    fn forward(&mut self, connection: &mut Connection, owner: usize) {
        let protocol = connection.session.version();
        let database = connection.session.database();
        let origin = connection.keep_place();
        let heading = Heading { origin, database, protocol };
        let request = connection.parser.current();
        let taken = self.peers[owner].as_mut().is_some_and(|peer| {
            peer.collecting.commands.push(heading, request) || {
                // Four gigabytes were collected already.
                peer.close_collection();
                peer.collecting.commands.push(heading, request)
            }
        });
        if !taken {
            connection.fill(origin, b"-ERR request too large to forward\r\n");
        }
    }

    /// What follows an executed request; its reply is in `scratch` unless it was `in_order`.
    fn settle(&mut self, connection: &mut Connection, after: After, in_order: bool) {
        if !in_order {
            connection.append(self.scratch.as_bytes());
            self.scratch.clear();
        }
        connection.parser.set_authenticated(connection.session.is_authenticated());
        match after {
            After::Continue => {}
            After::Close => connection.life = Life::Draining,
            After::Hangup => connection.life = Life::Dead,
        }
    }

    /// Whether CLIENT PAUSE asks to hold a request back.
    fn is_paused(&self, session: &Session, plan: &Plan<'_>) -> bool {
        let paused = self.shared.pause.active(|| self.now_ms);
        paused.is_some_and(|(_, all)| all || plan.may_write(session))
    }

    fn resume_later(&mut self, connection: &mut Connection) {
        if !connection.resume {
            connection.resume = true;
            self.resume.push_back(connection.slot);
        }
    }

    /// Unread replies at which a client's requests wait.
    fn output_pause_bytes(&self) -> usize {
        self.output_limit_bytes / 8
    }

    // ---- commands over several shards, without the own lock ----

    fn run_deferred(&mut self) {
        let shared = Arc::clone(&self.shared);
        for _ in 0..self.deferred.len() {
            let Some(slot) = self.deferred.pop_front() else { return };
            self.with_connection(slot, |thread, connection| {
                if !connection.needs_several || connection.life == Life::Dead {
                    return;
                }
                connection.needs_several = false;
                count(&thread.counters().several_shard_commands, 1);
                thread.run_several(&shared, connection);
                thread.resume_later(connection);
            });
        }
    }

    fn run_several(&mut self, shared: &Shared, connection: &mut Connection) {
        assert!(connection.is_in_order(), "requests over several shards run in order");
        let before = connection.output.len();
        let Connection { session, parser, output, .. } = &mut *connection;
        let plan = Plan::new(session, parser.current());
        let writes = plan.may_write(session);
        let saves = plan.command().is_some_and(|command| SAVING.contains(&command.name));
        let wanted: Vec<usize> = match plan.route(session, shared.store.as_ref()) {
            _ if saves => (0..shared.shards.len()).collect(),
            Route::Here => vec![self.index],
            Route::Shard(owner) => vec![owner],
            Route::Shards(shards) => shards.iter().collect(),
            Route::All => (0..shared.shards.len()).collect(),
        };
        let mut guards = shared.lock_shards(&wanted);
        let home = wanted.iter().position(|&index| index == self.index).unwrap_or(0);
        let shards = guards.iter_mut().map(|guard| &mut **guard).collect();
        let mut keyspace = Keyspace::many(shards, home);
        if saves {
            shared.snapshots.prepare(&mut keyspace);
        }
        output.set_limit(self.output_limit_bytes);
        let after = self.executor.execute(session, plan, &mut keyspace, output, shared);
        bound(output, before);
        if saves {
            shared.snapshots.discard_prepared();
        }
        let committed = keyspace.commit();
        drop(guards);
        if writes {
            for &index in wanted.iter().filter(|&&index| index != self.index) {
                shared.doors[index].changed.store(true, Ordering::Relaxed);
                shared.doors[index].nudge();
            }
            self.upkeep_wanted = true;
        }
        self.settle(connection, after, true);
        if let Err(error) = committed {
            tracing::error!(%error, "cannot make a command over several shards durable");
            connection.output.truncate(before);
            connection
                .output
                .error(b"MISCONF Errors writing to durable memory; see the node's log");
            connection.life = Life::Draining;
        }
    }

    // ---- after the commit ----

    fn send_parcels(&mut self) {
        for (index, peer) in self.peers.iter_mut().enumerate() {
            if peer.as_mut().is_some_and(Peer::send_all) {
                self.shared.doors[index].nudge();
            }
        }
    }

    fn flush_touched(&mut self) {
        let mut touched = std::mem::take(&mut self.touched);
        for slot in touched.drain(..) {
            self.flush(slot);
        }
        self.touched = touched;
    }

    fn flush(&mut self, slot: u32) {
        let pause_bytes = self.output_pause_bytes();
        let Some(connection) = self.connections.get_mut(slot as usize).and_then(Option::as_mut)
        else {
            return;
        };
        let before = connection.output.len();
        if connection.life != Life::Dead && before > 0 {
            match connection.write() {
                Ok(done) => {
                    if done && connection.life == Life::Draining && connection.is_in_order() {
                        connection.life = Life::Dead;
                    }
                }
                Err(_) => connection.life = Life::Dead,
            }
        } else if connection.life == Life::Draining && connection.is_in_order() {
            connection.life = Life::Dead;
        }
        let after = connection.output.len();
        let counters = &self.shared.counters[self.index];
        count(&counters.output_bytes, before.saturating_sub(after) as u64);
        if connection.owed_bytes() > self.output_limit_bytes {
            count(&counters.output_limit_disconnections, 1);
            tracing::warn!(
                client = connection.session.id(),
                address = connection.session.info.address,
                unread_bytes = connection.owed_bytes(),
                limit_bytes = self.output_limit_bytes,
                "closing a client that does not read its replies (client-output-buffer-limit)"
            );
            connection.life = Life::Dead;
        }
        if connection.backed_up && !connection.is_full(pause_bytes) {
            connection.backed_up = false;
            if !connection.resume {
                connection.resume = true;
                self.resume.push_back(slot);
            }
        }
        let answered = connection.is_in_order() && after == 0 && !connection.has_request();
        if connection.life == Life::HalfClosed && answered {
            connection.life = Life::Dead;
        }
        if connection.life == Life::Dead {
            self.remove(slot);
            return;
        }
        let interest = connection.wanted_interest(pause_bytes);
        if interest != connection.interest {
            connection.interest = interest;
            if self.poller.modify(&connection.stream, u64::from(slot), interest).is_err() {
                self.remove(slot);
            }
        }
    }

    fn remove(&mut self, slot: u32) {
        if let Some(connection) = self.connections[slot as usize].take() {
            let _ = self.poller.remove(&connection.stream);
            lock(&self.shared.clients).remove(&connection.session.id());
            self.shared.connected.fetch_sub(1, Ordering::Relaxed);
            self.free.push(slot);
        }
    }

    /// Publishes what CLIENT LIST shows, gives memory back, closes idle clients.
    fn keep_house(&mut self) {
        let timeout_ms = self.shared.settings.idle_timeout_s.load(Ordering::Relaxed) * 1000;
        let now_ms = self.now_ms;
        let mut idle = Vec::new();
        {
            let mut clients = lock(&self.shared.clients);
            self.unpublished = false;
            self.untidy = false;
            for connection in self.connections.iter_mut().flatten() {
                let quiet_ms = now_ms.saturating_sub(connection.last_active_ms);
                if timeout_ms != 0 && quiet_ms >= timeout_ms {
                    idle.push(connection.slot);
                }
                if connection.unpublished {
                    connection.unpublished = false;
                    connection.session.info.active_us = connection.last_active_ms * 1000;
                    connection.session.info.output_bytes = connection.output.len();
                    if let Some(registered) = clients.get_mut(&connection.session.id()) {
                        registered.info = connection.session.snapshot();
                    }
                }
                if quiet_ms <= TIDY_MS {
                    self.untidy = true;
                } else if !connection.has_request() {
                    connection.trim();
                }
            }
        }
        for slot in idle {
            self.remove(slot);
        }
        for slot in std::mem::take(&mut self.held_back) {
            self.with_connection(slot, |thread, connection| {
                if !connection.held_back {
                    // Another client's by now.
                    return;
                }
                let plan = Plan::new(&connection.session, connection.parser.current());
                if thread.is_paused(&connection.session, &plan) {
                    thread.held_back.push(slot);
                } else {
                    connection.held_back = false;
                    connection.again = true;
                    thread.resume_later(connection);
                }
            });
        }
        let errors = self.executor.counters().errors;
        // Fewer than before: CONFIG RESETSTAT ran here.
        let fresh = errors.checked_sub(self.errors_seen).unwrap_or(errors);
        self.errors_seen = errors;
        count(&self.counters().error_replies, fresh);
        let clients = self.fabric.clients();
        self.counters().fabric_clients.store(clients as u64, Ordering::Relaxed);
    }

    // ---- the end ----

    /// Called while the node stops; `true` once everything owed was sent or time is up.
    fn wind_down(&mut self, now_ns: u64) -> bool {
        let since = *self.draining_since_ns.get_or_insert(now_ns);
        let owed = self
            .connections
            .iter()
            .flatten()
            .any(|connection| !connection.output.is_empty() || !connection.is_in_order());
        let doors = &self.shared.doors;
        if doors[self.index].owing.swap(owed, Ordering::Relaxed) && !owed {
            doors.iter().for_each(|door| door.waker.wake());
        }
        // Clients of other shards may await replies of this one.
        let nobody_owes = doors.iter().all(|door| !door.owing.load(Ordering::Relaxed));
        nobody_owes || now_ns.saturating_sub(since) > 2_000_000_000
    }

    fn finish(mut self) {
        // Time is up, or was never lost: nobody waits for this thread any more.
        self.shared.doors[self.index].owing.store(false, Ordering::Relaxed);
        for slot in 0..self.connections.len() {
            self.remove(u32::try_from(slot).unwrap_or(u32::MAX));
        }
        let shared = Arc::clone(&self.shared);
        let mut shard = lock(&shared.shards[self.index]);
        self.fabric.close(&mut shard);
        if let Err(error) = shard.commit() {
            tracing::error!(%error, shard = self.index, "the last commit failed");
        }
    }
}
