//! What the threads of one node share: the store, the shards' doors, settings, the list of
//! clients.
//!
//! Invariants: nothing here is locked on the data path; settings and flags are atomics read with
//! relaxed loads, since a change may take effect a command later.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

use beeline_kv::{Keyspace, Shard, ShardStats, Store};
use beeline_kv_direct::LocalStore;
use beeline_os::poller::Waker;
use beeline_resp::{AbsentWatches, ClientInfo, Limits, Pause};

use crate::config::{PipelineOrder, RedisDoor};
use crate::parcel::Delivery;
use crate::replicated::Replication;
use crate::snapshot::Snapshots;
use crate::stats::{LoopCounters, LoopStats, LoopTimes};

/// Locks, whatever a thread that died while holding the lock left behind: every structure behind
/// these locks is consistent between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How other threads reach a shard's thread.
#[derive(Debug)]
pub(crate) struct Door {
    pub waker: Waker,
    /// Set by the shard's thread before it sleeps, cleared when it wakes. Ordered by fences on both
    /// sides: a sender that sees `false` after filling a mailbox knows the sleeper will look once
    /// more.
    pub sleeping: AtomicBool,
    /// Threads that want the shard's lock for a command over several shards; its own thread then
    /// steps back between batches.
    pub waiting: AtomicUsize,
    /// Another thread changed the shard's keys: its own one owes it upkeep.
    pub changed: AtomicBool,
    /// The shard's thread, where it sleeps, wakes for its upkeep by itself. Written before it announces its sleep.
    pub wakes_for_upkeep: AtomicBool,
    /// Its commit failed: the shard promises nothing any more.
    pub broken: AtomicBool,
    /// Its upkeep failed, and goes on being tried.
    pub upkeep_fails: AtomicBool,
    /// While the node stops: the shard's clients are owed replies.
    pub owing: AtomicBool,
    deliveries: Sender<Delivery>,
}

impl Door {
    /// A door and the end its shard's thread keeps.
    pub(crate) fn new() -> std::io::Result<(Self, mpsc::Receiver<Delivery>)> {
        let (deliveries, receiver) = mpsc::channel();
        let door = Self {
            waker: Waker::new()?,
            sleeping: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            changed: AtomicBool::new(false),
            wakes_for_upkeep: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            upkeep_fails: AtomicBool::new(false),
            owing: AtomicBool::new(true),
            deliveries,
        };
        Ok((door, receiver))
    }

    /// Wakes the shard's thread if it sleeps, after something was put into a mailbox of its.
    pub(crate) fn nudge(&self) {
        // Pairs with the fence in `ShardThread::announce_sleep`. Store to the mailbox, fence, look
        // at the flag here; store to the flag, fence, look at the mailbox there: one of the two
        // sees the other.
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::Relaxed) {
            self.waker.wake();
        }
    }

    /// Notes that another thread changed the shard's keys. Its own thread looks after expiry and collection, at
    /// most ten times a second; so it is woken where it would sleep on, and left asleep where its upkeep is due
    /// anyway.
    pub(crate) fn owe_upkeep(&self) {
        if self.changed.swap(true, Ordering::Relaxed) {
            return;
        }
        // Pairs with the fence in `ShardThread::announce_sleep`, as in `nudge`: either the thread sees that
        // something changed and stays awake, or this one sees how it sleeps.
        fence(Ordering::SeqCst);
        if !self.wakes_for_upkeep.load(Ordering::Relaxed) {
            self.nudge();
        }
    }

    /// Hands something over; `false` when the shard's thread has ended. The thread clears its
    /// waker before it empties the queue, never after: what is sent later wakes it again.
    pub(crate) fn deliver(&self, delivery: Delivery) -> bool {
        let delivered = self.deliveries.send(delivery).is_ok();
        self.waker.wake();
        delivered
    }
}

/// What can be changed while the node runs.
#[derive(Debug)]
pub(crate) struct Settings {
    pub require_password: RwLock<Option<String>>,
    pub password_set: AtomicBool,
    pub max_clients: AtomicUsize,
    /// 0 = never.
    pub idle_timeout_s: AtomicU64,
    pub output_limit_bytes: AtomicUsize,
    pub bulk_limit_bytes: AtomicU64,
    pub query_limit_bytes: AtomicU64,
    pub pipeline_order: PipelineOrder,
}

impl Settings {
    pub(crate) fn new(door: Option<&RedisDoor>) -> Self {
        let password = door.and_then(|door| door.require_password.clone());
        let limits = Limits::default();
        Self {
            password_set: AtomicBool::new(password.is_some()),
            require_password: RwLock::new(password),
            max_clients: AtomicUsize::new(door.map_or(0, |door| door.max_clients)),
            idle_timeout_s: AtomicU64::new(
                // A part of a second counts as one: none would be for ever.
                door.and_then(|door| door.idle_timeout)
                    .map_or(0, |timeout| timeout.as_secs() + u64::from(timeout.subsec_nanos() > 0)),
            ),
            output_limit_bytes: AtomicUsize::new(
                door.map(|door| door.output_limit_bytes)
                    .filter(|&limit| limit != 0)
                    .map_or(usize::MAX, |limit| limit.max(64 << 10)),
            ),
            bulk_limit_bytes: AtomicU64::new(u64::from(limits.bulk_bytes)),
            query_limit_bytes: AtomicU64::new(u64::from(
                door.map_or(limits.query_buffer_bytes, |door| door.query_limit_bytes),
            )),
            pipeline_order: door.map(|door| door.pipeline_order).unwrap_or_default(),
        }
    }

    pub(crate) fn set_password(&self, password: Option<String>) {
        // The password first: a client that is asked for one while there is none yet would pass with any.
        let is_set = password.is_some();
        *self.require_password.write().unwrap_or_else(PoisonError::into_inner) = password;
        self.password_set.store(is_set, Ordering::Release);
    }

    pub(crate) fn limits(&self) -> Limits {
        let bytes =
            |limit: &AtomicU64| u32::try_from(limit.load(Ordering::Relaxed)).unwrap_or(u32::MAX);
        Limits {
            bulk_bytes: bytes(&self.bulk_limit_bytes),
            query_buffer_bytes: bytes(&self.query_limit_bytes),
            ..Limits::default()
        }
    }
}

/// A client as other threads see it.
#[derive(Debug)]
pub(crate) struct Registered {
    pub shard: usize,
    pub info: ClientInfo,
}

/// What CLIENT PAUSE asked for.
#[derive(Debug, Default)]
pub(crate) struct PauseState {
    /// Nanoseconds of the monotonic clock: setting the wall clock must not prolong a pause.
    until_ns: AtomicU64,
    all: AtomicBool,
}

impl PauseState {
    pub(crate) fn set(&self, until_ns: u64, pause: Pause) {
        self.all.store(pause == Pause::All, Ordering::Relaxed);
        self.until_ns.store(until_ns, Ordering::Release);
    }

    pub(crate) fn clear(&self) {
        self.until_ns.store(0, Ordering::Release);
    }

    /// Until when, and whether reads wait too; `None` when nothing is paused.
    pub(crate) fn active(&self, now_ns: impl FnOnce() -> u64) -> Option<(u64, bool)> {
        let until = self.until_ns.load(Ordering::Acquire);
        (until != 0 && now_ns() < until).then(|| (until, self.all.load(Ordering::Relaxed)))
    }
}

/// Shards under lock. Where the work on them panics, they keep what was committed before and take
/// nothing more: what the work left may be half of something. A shard that takes nothing more when
/// it is let go is told of as ill, whichever thread had it locked.
#[derive(Debug)]
pub(crate) struct LockedShards<'s> {
    guards: Vec<MutexGuard<'s, Shard>>,
    doors: &'s [Arc<Door>],
}

impl<'s> Deref for LockedShards<'s> {
    type Target = Vec<MutexGuard<'s, Shard>>;

    fn deref(&self) -> &Self::Target {
        &self.guards
    }
}

impl DerefMut for LockedShards<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.guards
    }
}

impl LockedShards<'_> {
    /// Waits, where several shards are locked, for the commits that were begun in them: what joins them is
    /// stored in the log of one and rests on the others', which a loss of power must not take away from
    /// below it. A shard whose commit fails takes nothing more, and refuses every request.
    pub(crate) fn persist_begun(&mut self) {
        if self.guards.len() > 1 {
            let begun = |shard: &&mut MutexGuard<'_, Shard>| shard.commits_under_way() > 0;
            for shard in self.guards.iter_mut().filter(begun) {
                let _ = shard.commit();
            }
        }
    }
}

impl Drop for LockedShards<'_> {
    fn drop(&mut self) {
        for shard in &mut self.guards {
            if std::thread::panicking() {
                give_up(shard);
            }
            if shard.is_poisoned() {
                self.doors[shard.index()].broken.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// Has a shard take nothing more, if the work on it that panicked left something there.
pub(crate) fn give_up(shard: &mut Shard) {
    Keyspace::single(shard).abandon_batch();
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Itself, for threads it starts.
    pub this: Weak<Self>,
    pub store: Arc<Store>,
    pub shards: Vec<Arc<Mutex<Shard>>>,
    pub doors: Vec<Arc<Door>>,
    pub counters: Vec<LoopCounters>,
    /// How long the loops' turns take.
    pub times: Vec<Arc<LoopTimes>>,
    pub settings: Settings,
    pub clients: Mutex<HashMap<u64, Registered>>,
    pub connected: AtomicUsize,
    pub next_client: AtomicU64,
    pub pause: PauseState,
    /// Figures at the last CONFIG RESETSTAT: INFO shows what came since. The counters themselves
    /// never go back, so that their threads need no locked instruction and scrapers see no dip.
    pub forgotten: Mutex<(LoopStats, ShardStats)>,
    /// Keys whose time came after this moment are not deleted: in a replicated node as the log has
    /// it, else while CLIENT PAUSE holds.
    pub expire_until_ms: Arc<AtomicU64>,
    /// What commands did so far: at each shard's executor, and at the log's.
    pub figures: beeline_resp::figures::NodeFigures,
    /// Watched keys that are absent.
    pub absent_watches: AbsentWatches,
    pub snapshots: Snapshots,
    pub stopping: AtomicBool,
    /// Why the node could not go on, or did not stop in good order.
    pub failure: OnceLock<String>,
    /// Signalled once when a client asked the node to stop.
    pub shutdown_requested: Waker,
    pub started_us: u64,
    pub run_id: String,
    pub data_directory: std::path::PathBuf,
    pub redis_address: RwLock<Option<std::net::SocketAddr>>,
    /// The direct store of this program, once it is open.
    pub direct: OnceLock<Arc<dyn LocalStore>>,
    /// Of a node whose keys are a replicated log's.
    pub replication: Option<Replication>,
}

impl Shared {
    pub(crate) fn unix_us(&self) -> u64 {
        self.store.clock().unix_ms() * 1000
    }

    /// Locks the shards `wanted` (ascending), whose own threads step back meanwhile.
    pub(crate) fn lock_shards(&self, wanted: &[usize]) -> LockedShards<'_> {
        assert!(wanted.is_sorted(), "shards are locked in index order");
        let lock_one = |&index: &usize| {
            let door = &self.doors[index];
            door.waiting.fetch_add(1, Ordering::SeqCst);
            let guard = lock(&self.shards[index]);
            door.waiting.fetch_sub(1, Ordering::SeqCst);
            guard
        };
        LockedShards { guards: wanted.iter().map(lock_one).collect(), doors: &self.doors }
    }

    /// Notes why the node cannot go on as it is; the first reason counts.
    pub(crate) fn note_failure(&self, reason: String) {
        let _ = self.failure.set(reason);
    }

    /// Whether every shard keeps its promises.
    ///
    /// Errors: one sentence that says what is wrong and what to do.
    pub(crate) fn health(&self) -> Result<(), String> {
        let first = |flag: fn(&Door) -> &AtomicBool| {
            self.doors.iter().position(|door| flag(door).load(Ordering::Relaxed))
        };
        if let Some(shard) = first(|door| &door.broken) {
            return Err(format!(
                "shard {shard} could not make writes durable and refuses requests: see the node's \
                 log, mend the storage, and start the node anew"
            ));
        }
        if let Some(shard) = first(|door| &door.upkeep_fails) {
            return Err(format!(
                "upkeep of shard {shard} fails, so that no room is won back: see the node's log; \
                 a full file system needs room"
            ));
        }
        Ok(())
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }
}
