//! A node whose keys are those of a replicated log: the same at every member.
//!
//! ```text
//!  connection ── write ──► lane ── unit ──► log ══ agreed ══► machine ── shards (all locked)
//!      ▲                    ▲                ▲                   │
//!      │                    │            courier: leads elsewhere? forwards, tries again
//!      └────── replies ─────┴────────────────┴───────────────────┘
//!  connection ── read ──► barrier, then as in any node
//! ```
//!
//! One-sided clients' puts and gets take the same ways ([`crate::turn`], `one_sided`).
//!
//! Place: beside the loop, which asks it in one place ([`crate::turn`], `log`). `docs/node.md`,
//! "Replicated", says how it works and why it is safe.
//!
//! Invariants: only the machine changes keys, one unit after another, in the log's order; what a
//! unit changes and the memory that it was applied survive a crash together; a reply to a write
//! leaves after its unit was applied; a read that may not be stale runs after a barrier that began
//! when it had arrived.

pub(crate) mod clock;
pub(crate) mod courier;
mod handle;
pub(crate) mod lane;
pub mod log;
pub mod machine;
pub(crate) mod pair;
mod peer;
pub(crate) mod unit;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use self::courier::Errand;
use self::lane::Failure;
use self::log::{Log, LogState};
use crate::shared::lock;

pub use self::handle::LogHandle;
pub(crate) use self::peer::COMMAND;
pub use self::peer::{Peer, PeerError};

/// What a replicated node is told.
#[derive(Clone, Debug)]
pub struct ReplicationOptions {
    /// The cluster.
    pub cluster: u64,
    /// This member's number.
    pub node: u16,
    /// How long a request waits for a leader and its answer. Default 5 s: a fail-over takes well
    /// under one.
    pub request_timeout: Duration,
    /// Commits go one by one, because memory may lose them out of order: durability `power`.
    pub ordered_commits: bool,
}

/// An identity for a new cluster, which no other one has.
#[must_use]
pub fn new_cluster_id() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // Seeded from the system's randomness, anew for each process.
    RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now())).max(1)
}

/// What a replicated node counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicationStats {
    /// Units applied.
    pub units: u64,
    /// Requests applied.
    pub requests: u64,
    /// Units skipped because they had been applied before.
    pub repeated: u64,
    /// Units and barriers carried to another member.
    pub forwarded: u64,
    /// Units and barriers given up.
    pub timed_out: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub units: AtomicU64,
    pub requests: AtomicU64,
    pub repeated: AtomicU64,
    pub forwarded: AtomicU64,
    pub timed_out: AtomicU64,
}

/// The latest unit of one of this node's lanes that was applied here, and its reply.
#[derive(Clone, Debug, Default)]
struct Latest {
    number: u64,
    reply: Vec<u8>,
}

/// What the threads of a replicated node share.
#[derive(Debug)]
pub(crate) struct Replication {
    pub options: ReplicationOptions,
    /// Larger than those of the node's earlier runs.
    pub incarnation: AtomicU64,
    pub log: OnceLock<Arc<dyn Log>>,
    /// Time as the log has it: [`beeline_kv::StoreOptions::agreed_ms`].
    pub agreed_ms: Arc<AtomicU64>,
    /// A snapshot is replacing the keys.
    pub loading: AtomicBool,
    /// The machine cannot go on, or the log has ended.
    pub failed: AtomicBool,
    /// Nobody waits for errands any more.
    abandoned: AtomicBool,
    pub counters: Counters,
    applied: AtomicU64,
    latest: Mutex<Vec<Latest>>,
    /// `applied` or `latest` changed.
    progress: Condvar,
    couriers: Vec<Sender<Errand>>,
}

impl Replication {
    /// With a lane for each of `lanes` shards; returns what their couriers receive.
    pub(crate) fn new(
        options: ReplicationOptions,
        lanes: usize,
        now_us: u64,
    ) -> (Self, Vec<Receiver<Errand>>) {
        let (couriers, receivers) = (0..lanes).map(|_| mpsc::channel()).unzip();
        let replication = Self {
            options,
            incarnation: AtomicU64::new(now_us),
            log: OnceLock::new(),
            agreed_ms: Arc::default(),
            loading: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            counters: Counters::default(),
            applied: AtomicU64::new(0),
            latest: Mutex::new(vec![Latest::default(); lanes]),
            progress: Condvar::new(),
            couriers,
        };
        (replication, receivers)
    }

    /// Why a request cannot be served now. While a snapshot replaces the keys, those that ask the
    /// log wait for it; stale reads would see a part.
    pub(crate) fn obstacle(&self, stale: bool) -> Option<Failure> {
        if self.failed.load(Ordering::Relaxed) {
            Some(Failure::Failed)
        } else if stale && self.loading.load(Ordering::Relaxed) {
            Some(Failure::Loading)
        } else {
            None
        }
    }

    pub(crate) fn state(&self) -> Option<LogState> {
        self.log.get().map(|log| log.state())
    }

    pub(crate) fn send(&self, lane: usize, errand: Errand) {
        // A courier ends with its node, and then nobody waits.
        let _ = self.couriers[lane].send(errand);
    }

    /// Tells who waits that everything up to `position` is applied here.
    pub(crate) fn set_applied(&self, position: u64) {
        let guard = lock(&self.latest);
        self.applied.store(position, Ordering::Release);
        drop(guard);
        self.progress.notify_all();
    }

    /// Whether everything up to `position` is applied here, and whole.
    pub(crate) fn has_applied(&self, position: u64) -> bool {
        !self.loading.load(Ordering::Acquire) && self.applied() >= position
    }

    pub(crate) fn applied(&self) -> u64 {
        self.applied.load(Ordering::Acquire)
    }

    /// Keeps the reply to a unit of one of this node's lanes.
    pub(crate) fn keep_reply(&self, lane: u16, number: u64, reply: &[u8]) {
        let mut latest = lock(&self.latest);
        if let Some(latest) = latest.get_mut(usize::from(lane)) {
            latest.number = number;
            latest.reply.clear();
            latest.reply.extend_from_slice(reply);
        }
        drop(latest);
        self.progress.notify_all();
    }

    /// The reply to this unit, if it was applied here.
    pub(crate) fn reply_to(&self, lane: usize, number: u64) -> Option<Vec<u8>> {
        let latest = lock(&self.latest);
        latest.get(lane).filter(|latest| latest.number == number).map(|latest| latest.reply.clone())
    }

    /// Waits until `ready`, or until `deadline`.
    pub(crate) fn wait_for<T>(
        &self,
        deadline: Instant,
        mut ready: impl FnMut(&Self) -> Option<T>,
    ) -> Option<T> {
        loop {
            if let Some(found) = ready(self) {
                return Some(found);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            // `ready` locks by itself: what changes between it and this wait is seen a little late.
            let guard = lock(&self.latest);
            let wait = left.min(Duration::from_millis(1));
            drop(self.progress.wait_timeout(guard, wait));
        }
    }

    pub(crate) fn stats(&self) -> ReplicationStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        ReplicationStats {
            units: read(&counters.units),
            requests: read(&counters.requests),
            repeated: read(&counters.repeated),
            forwarded: read(&counters.forwarded),
            timed_out: read(&counters.timed_out),
        }
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Ends the couriers.
    pub(crate) fn stop(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
        for courier in &self.couriers {
            let _ = courier.send(Errand::Stop);
        }
    }
}
