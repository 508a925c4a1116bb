//! The loop of one shard's thread.
//!
//! ```text
//! turn:  wait ─ lock own shard ─ settle, deliveries, mailboxes, fabric, sockets ─ commit ─ unlock
//!          ▲                                                                        │
//!          └── commands over several shards ── replies: mailboxes, fabric, sockets ─┘
//! ```
//!
//! Invariants: replies leave only after the commit that they rest on ([`commits`]); the thread holds no
//! lock while it writes to sockets or waits; a failed commit is never acknowledged.

mod commits;
mod hops;
mod log;
mod one_sided;
mod several;
mod sockets;
mod upkeep;
mod waiting;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver as Deliveries;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use beeline_env::fault::FaultPoint;
use beeline_kv::{Maintenance, Shard};
use beeline_os::poller::{Interest, Poller, Readiness};
use beeline_pmem::{Durability, FenceProgress};
use beeline_resp::{Output, Version};

pub(crate) use self::hops::{MAILBOX, Peer};
pub(crate) use self::one_sided::Way;
use self::sockets::{REQUESTS_PER_TURN, Reach};
use crate::connection::{Connection, Life};
use crate::fabric_servers::FabricServers;
use crate::parcel::Delivery;
use crate::replicated::courier::lane_name;
use crate::replicated::lane::Lane;
use crate::replicated::machine::FORMAT;
use crate::shared::{Shared, lock};
use crate::stats::{LoopCounters, count};
use crate::wire::{Wire, WireWorker};

/// Poller token of the shard's own waker; connections use their slot.
pub(crate) const WAKER: u64 = u64::MAX;
/// Poller tokens from here up to `WAKER` are fabric completion queues.
pub(crate) const FABRIC: u64 = u64::MAX - 1024;
/// News taken from the poller a turn.
const EVENTS: usize = 512;
/// How often quiet things are looked at: idle clients, published client data.
const HOUSEKEEPING_NS: u64 = 100_000_000;

/// Where a test makes a shard's thread fail to start.
static START: FaultPoint = FaultPoint::new("node.shard.start");

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
    /// The way to the log, in a replicated node.
    lane: Option<Box<Lane>>,
    /// When requests whose time is over are looked for next.
    late_ns: u64,
    /// Longest command of the log; 0: not asked yet.
    command_limit: usize,
    /// What each wire keeps here, by its index.
    workers: Vec<Box<dyn WireWorker>>,
    /// Errors of the workers that were counted already.
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
    /// Upkeep failed: it is not tried again before this moment.
    upkeep_paused_until_ns: u64,
    upkeep_failures: u32,
    fabric_active_ns: u64,
    turns_since_look: u32,
    spin_ns: u64,
    shutdown_wait_ns: u64,
    draining_since_ns: Option<u64>,
    /// When the turn began that is to be timed: one that had news.
    turn_began_ns: Option<u64>,
    /// Commits wait for the medium.
    times_commits: bool,
    /// How far commits that were begun have come.
    progress: FenceProgress,
    /// How far that was when the shard looked last.
    fenced_seen: u64,
    /// Replies that wait for commits up to this one were let go.
    settled_to: u64,
    /// Commits that are not settled, and when they began, where that is measured.
    under_way: VecDeque<(u64, Option<u64>)>,
    /// Connections with replies that wait for a commit.
    resting: Vec<u32>,
    /// Connections that were refused just now.
    refused: Vec<u32>,
}

/// What a thread is made of.
pub(crate) struct Parts {
    pub index: usize,
    pub shared: Arc<Shared>,
    pub deliveries: Deliveries<Delivery>,
    pub peers: Vec<Option<Peer>>,
    pub spin: Duration,
    pub shutdown_wait: Duration,
    pub fabric: beeline_kv_server::ServerOptions,
    pub wires: Arc<[Arc<dyn Wire>]>,
}

impl ShardThread {
    /// Made on the thread that runs it.
    ///
    /// Errors: the poller's.
    pub(crate) fn new(parts: Parts) -> std::io::Result<Self> {
        START.check()?;
        let poller = Poller::new(EVENTS)?;
        poller.add(&parts.shared.doors[parts.index].waker, WAKER, Interest::READ)?;
        let lane = parts.shared.replication.as_ref().map(|replication| {
            Box::new(Lane::new(lane_name(replication.options.node, parts.index), FORMAT))
        });
        let durability = parts.shared.store.pool().report().durability;
        let times_commits = durability == Durability::Power;
        let progress = {
            let shard = lock(&parts.shared.shards[parts.index]);
            // The door alone: what wakes the thread must not keep the node.
            let door = Arc::clone(&parts.shared.doors[parts.index]);
            shard.set_commit_waker(move || door.nudge());
            shard.commit_progress()
        };
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
            lane,
            late_ns: 0,
            command_limit: 0,
            workers: parts.wires.iter().map(|wire| wire.worker(parts.index)).collect(),
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
            upkeep_paused_until_ns: 0,
            upkeep_failures: 0,
            fabric_active_ns: 0,
            turns_since_look: 0,
            spin_ns: u64::try_from(parts.spin.as_nanos()).unwrap_or(u64::MAX),
            shutdown_wait_ns: u64::try_from(parts.shutdown_wait.as_nanos()).unwrap_or(u64::MAX),
            draining_since_ns: None,
            turn_began_ns: None,
            times_commits,
            progress,
            fenced_seen: 0,
            settled_to: 0,
            under_way: VecDeque::new(),
            resting: Vec::new(),
            refused: Vec::new(),
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
            self.turn_began_ns = (!news.is_empty()).then_some(now_ns);
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
            if self.lane.is_some() {
                self.talk_to_log();
            }
            self.flush_touched();
            if now_ns >= self.housekeeping_ns {
                self.housekeeping_ns = now_ns + HOUSEKEEPING_NS;
                self.keep_house();
            }
        }
        self.finish();
    }

    // ---- one turn under the lock ----

    /// Serves everything that waits; `false` when it could not be made durable.
    fn serve(
        &mut self,
        shard: &mut MutexGuard<'_, Shard>,
        news: &[Readiness],
        now_ns: u64,
    ) -> bool {
        shard.note_time(now_ns);
        let settled = self.settle_commits(shard);
        // What is delivered wakes the poller, so a turn that did not look there finds nothing yet;
        // asking costs a full fence. A lane's news should not wait for the next look.
        if self.turns_since_look == 0 || self.lane.is_some() {
            self.take_deliveries();
        }
        if self.lane.is_some() {
            self.answer_late();
            self.apply_offered(shard);
        }
        let executed = self.take_parcels(shard);
        let changed = &self.shared.doors[self.index].changed;
        let changed = changed.load(Ordering::Relaxed) && changed.swap(false, Ordering::Relaxed);
        self.upkeep_wanted |= executed || changed || !news.is_empty();
        let loading = self.shared.is_loading();
        let requests = self.fabric.poll(shard, &self.poller, loading);
        if self.lane.is_some() {
            self.hand_over();
        }
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
                    let reach = &mut Reach::Own(shard);
                    thread.execute_ready(connection, reach, REQUESTS_PER_TURN);
                });
            }
        }
        let lost = self.shared.has_lost_log();
        let waits = requests > 0 || self.lane.is_some();
        let committed =
            if lost { Ok(()) } else { settled.and_then(|()| self.commit_turn(shard, waits)) };
        self.release_to(shard.settled_to());
        if let Err(error) = &committed {
            let error = error.to_string();
            self.refuse_turn(&error, shard);
        }
        if !lost {
            self.maintain(shard, now_ns);
        }
        committed.is_ok()
    }

    fn take_deliveries(&mut self) {
        while let Ok(delivery) = self.deliveries.try_recv() {
            match delivery {
                Delivery::Connection(wire, stream) => self.adopt(wire, stream),
                Delivery::Fabric(incoming) => {
                    let limit = self.one_sided_limit();
                    self.fabric.accept(*incoming, &self.shared.store, &self.poller, limit);
                }
                Delivery::Log(news) => self.on_log_news(news),
                Delivery::Answer { origin, reply } => self.deliver_reply(origin, &reply),
                Delivery::Kill(id) => {
                    let found = self.connections.iter().flatten().find(|c| c.id == id);
                    if let Some(slot) = found.map(|connection| connection.slot) {
                        self.with_connection(slot, |_, connection| connection.life = Life::Dead);
                    }
                }
            }
        }
    }
}
