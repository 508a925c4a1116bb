//! Starting, watching and stopping a node.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, OnceLock, RwLock, Weak};
use std::thread::JoinHandle;

use beeline_env::{Clock, SystemClock};
use beeline_kv::{
    FeedStats, Keyspace, RecoveryReport, Store, StoreOptions, StoreStats, refuse_unfinished,
};
use beeline_kv_direct::LocalStore;
use beeline_os::poller::Waker;
use beeline_pmem::{Pool, PoolKind, PoolReport};
use beeline_resp::figures::{CommandTime, NodeFigures};
use beeline_ring::mailbox;

use crate::accept::Acceptor;
use crate::config::NodeConfig;
use crate::error::NodeError;
use crate::fabric_door::FabricIncoming;
use crate::parcel::Delivery;
use crate::redis::{self, RedisWire};
use crate::replicated::clock::ReplicaClock;
use beeline_replicated_service::{Group, Machine, Replicated, Replicator, Tag};

use crate::replicated::courier::{self, Errand};
use crate::replicated::log::{Log, LogState};
use crate::replicated::machine::{BATCH_SHARE, ReplicatedKeys};
use crate::replicated::{Replication, ReplicationStats};
use crate::shared::{Door, Settings, Shared, give_up, lock};
use crate::snapshot::Snapshots;
use crate::stats::{LoopStats, LoopTimes};
use crate::turn::{MAILBOX, Parts, Peer, ShardThread};
use crate::wire::Wire;

/// Most shards of one node: a place in the index has this many values.
const MAX_SHARDS: usize = 256;

/// What a node counts and holds, at one moment.
#[derive(Clone, Debug)]
pub struct NodeStats {
    /// The loops.
    pub loops: LoopStats,
    /// The store.
    pub store: StoreStats,
    /// What the change feed holds.
    pub feed: FeedStats,
    /// Redis connections open.
    pub connected_clients: usize,
    /// Bytes of the pool in use.
    pub pool_used_bytes: u64,
    /// Bytes the pool may grow to.
    pub pool_capacity_bytes: u64,
    /// The log, of a replicated node.
    pub replication: Option<(LogState, ReplicationStats)>,
}

/// A door for a protocol that the shard threads serve.
#[derive(Clone, Debug)]
pub struct WireDoor {
    /// Where to listen. Port 0 picks a free one.
    pub address: SocketAddr,
    /// The protocol.
    pub wire: Arc<dyn Wire>,
}

/// A running node. Dropping it stops it.
#[derive(Debug)]
pub struct Node {
    shared: Arc<Shared>,
    acceptors: Vec<(&'static str, Acceptor)>,
    threads: Vec<JoinHandle<()>>,
    couriers: Vec<JoinHandle<()>>,
    recovery: RecoveryReport,
}

impl Node {
    /// Opens or makes the pool, recovers the store, starts the shards and the Redis door.
    ///
    /// Errors: [`NodeError`]; nothing is left running.
    pub fn start(config: &NodeConfig) -> Result<Self, NodeError> {
        Self::start_with(config, Vec::new())
    }

    /// [`Node::start`] with doors for further protocols beside the Redis door.
    ///
    /// Errors: as for [`Node::start`].
    pub fn start_with(config: &NodeConfig, doors: Vec<WireDoor>) -> Result<Self, NodeError> {
        Self::start_with_clock(config, doors, Arc::new(SystemClock))
    }

    /// [`Node::start`] with a clock that a test moves.
    ///
    /// Errors: as for [`Node::start`].
    #[doc(hidden)]
    pub fn start_with_clock(
        config: &NodeConfig,
        doors: Vec<WireDoor>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, NodeError> {
        if config.shards == 0 || config.shards > MAX_SHARDS {
            let found = config.shards as u64;
            return Err(NodeError::Setting { setting: "shards", needed: "1 to 256", found });
        }
        let clock: Arc<dyn Clock> = match config.replication {
            Some(_) => Arc::new(ReplicaClock::new(clock)),
            None => clock,
        };
        let (replication, errands) = match &config.replication {
            Some(options) => {
                let (replication, errands) =
                    Replication::new(options.clone(), config.shards, Arc::clone(&clock));
                (Some(replication), errands)
            }
            None => (None, Vec::new()),
        };
        let expire_until_ms = replication.as_ref().map_or_else(
            || Arc::new(AtomicU64::new(u64::MAX)),
            |known| Arc::clone(&known.agreed_ms),
        );
        let pool = open_pool(config)?;
        let options = StoreOptions {
            shards: config.shards,
            clock: Arc::clone(&clock),
            max_memory_bytes: config.max_memory_bytes,
            feed_bytes: config.feed_bytes,
            eviction: config.eviction,
            cooperative_write_back: config.cooperative_write_back,
            accept_damage: config.accept_damage,
            agreed_ms: Some(Arc::clone(&expire_until_ms)),
            batch_limit_bytes: replication
                .as_ref()
                .map(|_| u64::from(pool.segment_bytes()) / BATCH_SHARE),
            ..StoreOptions::default()
        };
        let (store, shards, recovery) = Store::open(pool, options).map_err(|source| {
            NodeError::Store { directory: config.data_directory.clone(), source }
        })?;

        let (capacity_bytes, least_bytes) =
            (store.pool().capacity_bytes(), store.least_capacity_bytes());
        if capacity_bytes < least_bytes {
            tracing::warn!(
                capacity_bytes,
                least_bytes,
                segment_bytes = store.pool().segment_bytes(),
                shards = config.shards,
                "the pool holds too few segments for its shards: writes may be refused as if it \
                 were full; raise --capacity, or start with fewer --shards"
            );
        }

        let system = |action| move |source| NodeError::System { action, source };
        let mut shard_doors = Vec::new();
        let mut deliveries = Vec::new();
        for _ in 0..config.shards {
            let (door, receiver) = Door::new().map_err(system("making a wake-up descriptor"))?;
            shard_doors.push(Arc::new(door));
            deliveries.push(receiver);
        }
        let shutdown_requested = Waker::new().map_err(system("making a wake-up descriptor"))?;
        let shared = Arc::new_cyclic(|this| Shared {
            this: Weak::clone(this),
            shards,
            doors: shard_doors,
            counters: (0..config.shards).map(|_| Default::default()).collect(),
            times: (0..config.shards).map(|_| Default::default()).collect(),
            settings: Settings::new(config.redis.as_ref()),
            clients: Mutex::default(),
            connected: AtomicUsize::new(0),
            next_client: AtomicU64::new(1),
            pause: Default::default(),
            forgotten: Mutex::default(),
            figures: figures(config),
            expire_until_ms,
            absent_watches: Default::default(),
            snapshots: Snapshots::new(&config.data_directory, clock.unix_ms() / 1000),
            stopping: AtomicBool::new(false),
            failure: OnceLock::new(),
            shutdown_requested,
            started_us: clock.unix_ms() * 1000,
            run_id: run_id(store.pool(), clock.as_ref()),
            data_directory: config.data_directory.clone(),
            redis_address: RwLock::new(None),
            direct: OnceLock::new(),
            replication,
            store,
        });
        let woken = Arc::downgrade(&shared);
        shared.store.on_shortage(move || {
            let Some(shared) = woken.upgrade() else { return };
            for door in &shared.doors {
                door.changed.store(true, Ordering::Relaxed);
                door.nudge();
            }
        });
        let mut node = Self {
            shared: Arc::clone(&shared),
            acceptors: Vec::new(),
            threads: Vec::new(),
            couriers: Vec::new(),
            recovery,
        };
        // The Redis door is the first wire.
        let redis = config.redis.as_ref().map(|door| {
            let wire: Arc<dyn Wire> = Arc::new(RedisWire { shared: Arc::clone(&shared) });
            WireDoor { address: door.address, wire }
        });
        let doors: Vec<WireDoor> = redis.into_iter().chain(doors).collect();
        let wires: Arc<[Arc<dyn Wire>]> = doors.iter().map(|door| Arc::clone(&door.wire)).collect();
        node.start_couriers(errands).map_err(system("starting a courier's thread"))?;
        node.start_threads(config, deliveries, &wires)
            .map_err(system("starting a shard's thread"))?;
        for (index, door) in doors.into_iter().enumerate() {
            let WireDoor { address, wire } = door;
            let (shared, name) = (Arc::clone(&node.shared), wire.name());
            let mut turn = 0;
            let deal = move |stream| shared.deal(index, wire.as_ref(), stream, &mut turn);
            let acceptor = Acceptor::start(address, deal).map_err(|source| NodeError::Listen {
                wire: name,
                address,
                source,
            })?;
            if name == redis::NAME {
                let known = &node.shared.redis_address;
                *known.write().unwrap_or_else(std::sync::PoisonError::into_inner) =
                    Some(acceptor.address());
            }
            node.acceptors.push((name, acceptor));
        }
        Ok(node)
    }

    fn start_threads(
        &mut self,
        config: &NodeConfig,
        deliveries: Vec<std::sync::mpsc::Receiver<Delivery>>,
        wires: &Arc<[Arc<dyn Wire>]>,
    ) -> std::io::Result<()> {
        let shards = config.shards;
        let grid = mailboxes(shards);
        let (started, starts) = std::sync::mpsc::channel();
        let cores = beeline_os::affinity::allowed().unwrap_or_default();
        for (index, (deliveries, peers)) in deliveries.into_iter().zip(grid).enumerate() {
            let (shared, wires) = (Arc::clone(&self.shared), Arc::clone(wires));
            let (spin, shutdown_wait) = (config.spin, config.shutdown_wait);
            let fabric = config.fabric.clone();
            let started = started.clone();
            let core = config.pin_shards.then(|| cores.get(index % cores.len().max(1)).copied());
            let builder = std::thread::Builder::new().name(format!("shard-{index}"));
            self.threads.push(builder.spawn(move || {
                if let Some(Some(core)) = core
                    && let Err(error) = beeline_os::affinity::pin_current_thread(core)
                {
                    tracing::warn!(%error, core, "cannot pin a shard");
                }
                let _watch = Watch { shared: Arc::clone(&shared), index };
                match ShardThread::new(Parts {
                    index,
                    shared,
                    deliveries,
                    peers,
                    spin,
                    shutdown_wait,
                    fabric,
                    wires,
                }) {
                    Ok(thread) => {
                        let _ = started.send(Ok(()));
                        drop(started);
                        thread.run();
                    }
                    Err(error) => drop(started.send(Err(error))),
                }
            })?);
        }
        drop(started);
        // One that cannot run would leave its keys without a server.
        starts.iter().try_for_each(|outcome| outcome)
    }

    fn start_couriers(&mut self, errands: Vec<Receiver<Errand>>) -> std::io::Result<()> {
        for (lane, errands) in errands.into_iter().enumerate() {
            let shared = Arc::clone(&self.shared);
            let builder = std::thread::Builder::new().name(format!("courier-{lane}"));
            self.couriers.push(builder.spawn(move || courier::run(&shared, lane, &errands))?);
        }
        Ok(())
    }

    /// The state machine of the log: the keys, and `others`, which share the log with them. To be
    /// made once.
    ///
    /// Errors: [`NodeError::Store`] of reading what it knows; [`NodeError::NotReplicated`],
    /// [`NodeError::Services`].
    pub fn machine(&self, others: Vec<Box<dyn Replicated>>) -> Result<Machine, NodeError> {
        let group = self.group().ok_or(NodeError::NotReplicated)?;
        let directory = self.shared.data_directory.clone();
        let keys = ReplicatedKeys::open(Arc::clone(&self.shared))
            .map_err(|source| NodeError::Store { directory, source })?;
        let mut services: Vec<Box<dyn Replicated>> = vec![Box::new(keys)];
        services.extend(others);
        let shared = Arc::downgrade(&self.shared);
        group.on_failure(move || {
            // A node that stops has its log end, too.
            if let Some(shared) = shared.upgrade().filter(|shared| !shared.is_stopping()) {
                shared.note_failure(
                    "this member's log has ended, the lines above say why".to_owned(),
                );
                shared.shutdown_requested.wake();
            }
        });
        Machine::new(group, services)
            .map_err(|error| NodeError::Services { reason: error.to_string() })
    }

    /// What the services of a replicated node share about its log.
    #[must_use]
    pub fn group(&self) -> Option<Arc<Group>> {
        self.shared.replication.as_ref().map(|known| Arc::clone(&known.group))
    }

    /// The way into the log of a replicated node for another service, whose commands are in
    /// `format`: see [`Replicator`].
    ///
    /// Errors: [`NodeError::NotReplicated`]; [`NodeError::System`] without a thread.
    pub fn replicator(&self, service: Tag, format: u8) -> Result<Replicator, NodeError> {
        let group = self.group().ok_or(NodeError::NotReplicated)?;
        Replicator::start(&group, (service, format), 0)
            .map_err(|source| NodeError::System { action: "starting a replicator", source })
    }

    /// The log is open: requests go to it from now on.
    pub fn attach(&self, log: Arc<dyn Log>) {
        let attached = self.shared.replication.as_ref().is_some_and(|known| known.attach(log));
        assert!(attached, "a replicated node has one log");
    }

    /// Where Redis clients connect.
    #[must_use]
    pub fn redis_address(&self) -> Option<SocketAddr> {
        self.wire_address(redis::NAME)
    }

    /// Where clients of the wire `name` connect; `None` where it has no door.
    #[must_use]
    pub fn wire_address(&self, name: &str) -> Option<SocketAddr> {
        self.acceptors.iter().find(|(known, _)| *known == name).map(|(_, door)| door.address())
    }

    /// What was found in the pool.
    #[must_use]
    pub fn recovery(&self) -> &RecoveryReport {
        &self.recovery
    }

    /// What the pool is and how it keeps its promises.
    #[must_use]
    pub fn pool_report(&self) -> PoolReport {
        self.shared.store.pool().report()
    }

    /// Number of shards.
    #[must_use]
    pub fn shards(&self) -> usize {
        self.shared.shards.len()
    }

    /// Seed with which one-sided clients hash keys to shards.
    #[must_use]
    pub fn hash_seed(&self) -> u64 {
        self.shared.store.hash_seed()
    }

    /// A handle for the threads that watch the node and bring one-sided clients to it.
    #[must_use]
    pub fn handle(&self) -> NodeHandle {
        NodeHandle { shared: Arc::clone(&self.shared) }
    }

    /// Stops: no new connections, replies owed are sent (within [`NodeConfig::shutdown_wait`]),
    /// everything persisted. A background snapshot is given up. [`NodeHandle::failure`] tells
    /// afterwards what went wrong.
    pub fn stop(mut self) {
        self.stop_threads();
    }

    fn stop_threads(&mut self) {
        self.acceptors.clear();
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.doors.iter().for_each(|door| door.waker.wake());
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a shard's thread ended in a panic");
            }
        }
        if let Some(replication) = &self.shared.replication {
            replication.stop();
        }
        for courier in self.couriers.drain(..) {
            if courier.join().is_err() {
                tracing::error!("a courier's thread ended in a panic");
            }
        }
        self.shared.snapshots.stop(&self.shared.store);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop_threads();
    }
}

/// Stops the node when the thread that holds it panics: no other thread could serve its keys, and
/// what it held may be half changed.
struct Watch {
    shared: Arc<Shared>,
    index: usize,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.doors[self.index].owing.store(false, Ordering::Relaxed);
        if std::thread::panicking() {
            let index = self.index;
            tracing::error!(shard = index, "a shard's thread panicked; the node must stop");
            // The thread's own lock is free again: its frame is gone.
            give_up(&mut lock(&self.shared.shards[index]));
            self.shared.doors[index].broken.store(true, Ordering::Relaxed);
            self.shared.note_failure(format!(
                "the thread of shard {index} panicked, the lines above say where; what was \
                 acknowledged is kept: start the node anew"
            ));
            self.shared.shutdown_requested.wake();
        }
    }
}

/// What other threads may do with a node.
#[derive(Clone, Debug)]
pub struct NodeHandle {
    shared: Arc<Shared>,
}

impl NodeHandle {
    /// The store of the node. Its keys are reached through [`NodeHandle::with_shards`].
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.shared.store
    }

    /// Locks shards, in ascending order, for `work` of a service; their own threads step back
    /// meanwhile. Writes go to the log of the first; `work` commits what it acknowledges. Of several
    /// shards no commit is under way when `work` begins. Of one there may be: `work` commits before it
    /// tells a client of keys that other clients store.
    pub fn with_shards<R>(&self, wanted: &[usize], work: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
        self.with_shards_changed(wanted, |keyspace| (work(keyspace), true))
    }

    /// The same for `work` that says whether it changed anything: the shards' own threads sleep on where
    /// it did not.
    pub fn with_shards_changed<R>(
        &self,
        wanted: &[usize],
        work: impl FnOnce(&mut Keyspace<'_>) -> (R, bool),
    ) -> R {
        let mut guards = self.shared.lock_shards(wanted);
        guards.persist_begun();
        let now_ns = self.shared.store.clock().monotonic_ns();
        guards.iter_mut().for_each(|shard| shard.note_time(now_ns));
        let (result, changed) = match guards.as_mut_slice() {
            [only] => work(&mut Keyspace::single(only)),
            all => work(&mut Keyspace::many(all.iter_mut().map(|guard| &mut **guard).collect(), 0)),
        };
        drop(guards);
        for &index in wanted.iter().filter(|_| changed) {
            self.shared.doors[index].owe_upkeep();
        }
        result
    }

    /// Figures of this moment.
    #[must_use]
    pub fn stats(&self) -> NodeStats {
        let pool = self.shared.store.pool();
        NodeStats {
            loops: self.shared.loop_stats(),
            store: self.shared.store.stats(),
            feed: self.shared.store.feed_stats(),
            connected_clients: self.shared.connected.load(Ordering::Relaxed),
            pool_used_bytes: pool.used_bytes(),
            pool_capacity_bytes: pool.capacity_bytes(),
            replication: self
                .shared
                .replication
                .as_ref()
                .map(|replication| (replication.state().unwrap_or_default(), replication.stats())),
        }
    }

    /// How long the turns of each shard's loop take.
    #[must_use]
    pub fn loop_times(&self) -> &[Arc<LoopTimes>] {
        &self.shared.times
    }

    /// How long the commands of the Redis door took that were timed since the start.
    #[must_use]
    pub fn command_times(&self) -> Vec<CommandTime> {
        self.shared.figures.times()
    }

    /// Whether every shard keeps its promises.
    ///
    /// Errors: one sentence that says what is wrong and what to do.
    pub fn health(&self) -> Result<(), String> {
        self.shared.health()
    }

    /// Why the node asked to be stopped by itself, or did not stop in good order: one sentence that
    /// says what to do. `None` while nothing is wrong.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.shared.failure.get().map(String::as_str)
    }

    /// Gives the Redis door the direct store of this program; `DIRECT.*` is refused before. Once.
    pub fn serve_direct(&self, store: Arc<dyn LocalStore>) {
        let set = self.shared.direct.set(store);
        assert!(set.is_ok(), "a node has one direct store");
    }

    /// Hands a one-sided client to its shard.
    pub fn accept_fabric(&self, incoming: FabricIncoming) {
        match self.shared.doors.get(incoming.shard) {
            Some(door) => {
                door.deliver(Delivery::Fabric(Box::new(incoming)));
            }
            None => {
                let shards = self.shared.doors.len();
                (incoming.reply)(Err(format!("no shard {}: there are {shards}", incoming.shard)));
            }
        }
    }

    /// Readable once a client asked the node to stop (SHUTDOWN).
    #[must_use]
    pub fn shutdown_requested(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.shared.shutdown_requested)
    }
}

impl Shared {
    /// Gives a connection to the next shard, unless there are too many.
    fn deal(&self, index: usize, wire: &dyn Wire, stream: std::net::TcpStream, turn: &mut usize) {
        let connected = self.connected.fetch_add(1, Ordering::Relaxed);
        if connected >= self.settings.max_clients.load(Ordering::Relaxed) {
            self.connected.fetch_sub(1, Ordering::Relaxed);
            self.counters[0].connections_rejected.fetch_add(1, Ordering::Relaxed);
            // One attempt: a client that does not read this is not waited for.
            let _ = stream.set_nonblocking(true);
            let _ = std::io::Write::write(&mut &stream, &wire.full());
            return;
        }
        let shard = *turn % self.doors.len();
        *turn += 1;
        if !self.doors[shard].deliver(Delivery::Connection(index, stream)) {
            self.connected.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// For each shard, its ends of the mailboxes with every other one.
fn mailboxes(shards: usize) -> Vec<Vec<Option<Peer>>> {
    let mut grid: Vec<Vec<Option<Peer>>> = (0..shards).map(|_| Vec::new()).collect();
    for low in 0..shards {
        // The row of `low` holds its ends with lower shards already; its own place stays empty.
        grid[low].push(None);
        for high in low + 1..shards {
            let (to_high, from_low) = mailbox(MAILBOX);
            let (to_low, from_high) = mailbox(MAILBOX);
            grid[low].push(Some(Peer::new(to_high, from_high)));
            grid[high].push(Some(Peer::new(to_low, from_low)));
        }
    }
    grid
}

/// The figures of the shards' executors, of the log's, and of those by which the log is applied to the shards, with
/// the slow log as configured.
fn figures(config: &NodeConfig) -> NodeFigures {
    let applying = if config.replication.is_some() { config.shards } else { 0 };
    let figures = NodeFigures::new(config.shards + 1 + applying);
    if let Some(limit) = config.redis.as_ref().and_then(|door| door.slow_log) {
        let microseconds = i64::try_from(limit.as_micros()).unwrap_or(i64::MAX);
        figures.slow.set_slower_than_us(microseconds);
    }
    figures
}

fn open_pool(config: &NodeConfig) -> Result<Pool, NodeError> {
    let directory = &config.data_directory;
    let opened = match config.pool.kind {
        Some(PoolKind::Dram) => Pool::dram(&config.pool),
        _ => {
            refuse_unfinished(directory)
                .map_err(|source| NodeError::Store { directory: directory.clone(), source })?;
            Pool::open_or_create(directory, &config.pool)
        }
    };
    opened.map_err(|source| NodeError::Pool { directory: directory.clone(), source })
}

/// Forty hexadecimal digits that differ from run to run.
fn run_id(pool: &Pool, clock: &dyn Clock) -> String {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new();
    let word = |salt: u64| random.hash_one((salt, clock.monotonic_ns(), pool.secret()));
    let digits = format!("{:016x}{:016x}{:016x}", word(0), word(1), word(2));
    digits[..40].to_owned()
}
