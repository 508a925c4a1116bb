//! A node whose keys are those of a replicated log: the same at every member.
//!
//! ```text
//!  connection ── write ──► lane ── unit ──► log ══ agreed ══► machine ── shards, at the same time
//!      ▲                    ▲                ▲                   │
//!      │                    │            courier: leads elsewhere? over fabric, tries again
//!      └────── replies ─────┴────────────────┴───────────────────┘
//!  connection ── read ──► barrier, then as in any node
//! ```
//!
//! One-sided clients' puts and gets take the same ways ([`crate::turn`], `one_sided`).
//!
//! Place: beside the loop, which asks it in one place ([`crate::turn`], `log`).
//! `docs/node-replicated.md` says how it works and why it is safe.
//!
//! Invariants: only the machine changes keys, each shard's in the log's order ([`wave`]); what a request
//! changes and the memory that it was applied survive a crash together; a reply to a write
//! leaves after its unit was applied; a read that may not be stale runs after a barrier that began
//! when it had arrived.

pub(crate) mod clock;
pub(crate) mod courier;
pub(crate) mod cut;
pub(crate) mod lane;
pub mod machine;
mod marks;
pub(crate) mod pair;
mod peer;
mod pieces;
pub(crate) mod wave;

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use beeline_env::Clock;
use beeline_replicated_service::{Group, GroupOptions};

use self::courier::Errand;
pub(crate) use self::cut::Look;
use self::cut::{Cut, Inside};
use self::wave::Meeting;
use crate::shared::Shared;

pub(crate) use self::peer::COMMAND;
pub use self::peer::{Peer, PeerError};
pub use beeline_replicated_service::{GroupStats as ReplicationStats, LogHandle, log};

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

/// What the threads of a replicated node share: the group of its log, and what is the keys' own.
#[derive(Debug)]
pub(crate) struct Replication {
    pub options: ReplicationOptions,
    /// Shared with the node's other replicated services.
    pub group: Arc<Group>,
    /// Time as the log has it: [`beeline_kv::StoreOptions::agreed_ms`].
    pub agreed_ms: Arc<AtomicU64>,
    /// While it is closed, shards may be at different positions of the log.
    pub cut: Cut,
    pub meeting: Meeting,
    /// Entries of which the member had a part when it started, behind the position that it had recorded.
    pub left_at_start: AtomicU64,
    couriers: Vec<Sender<Errand>>,
}

impl Shared {
    /// Whether the keys are not whole: a snapshot is replacing them, or the machine was not opened yet, or brings
    /// shards to one position that an earlier run left at several. A thread that holds a shard's lock and is told no sees
    /// that shard whole: the installation says so before it takes the first lock.
    pub(crate) fn is_loading(&self) -> bool {
        self.replication.as_ref().is_some_and(|replication| replication.group.is_loading())
    }

    /// What a thread holds, in a replicated node, while it looks at several shards at once: they are all at one
    /// position of the log meanwhile. It holds no shard's lock when it asks.
    pub(crate) fn enter_cut(&self, look: Look) -> Option<Inside<'_>> {
        self.replication.as_ref().map(|replication| replication.cut.enter(look))
    }

    /// Whether this member's keys can no longer follow the log: a batch of a unit may be half done
    /// in memory, so nothing is persisted any more, and every request for keys is refused.
    pub(crate) fn has_lost_log(&self) -> bool {
        self.replication.as_ref().is_some_and(|replication| replication.has_failed())
    }
}

impl Deref for Replication {
    type Target = Group;

    fn deref(&self) -> &Group {
        &self.group
    }
}

impl Replication {
    /// With a lane for each of `lanes` shards; returns what their couriers receive.
    pub(crate) fn new(
        options: ReplicationOptions,
        lanes: usize,
        clock: Arc<dyn Clock>,
    ) -> (Self, Vec<Receiver<Errand>>) {
        let (couriers, receivers) = (0..lanes).map(|_| mpsc::channel()).unzip();
        let group = GroupOptions {
            cluster: options.cluster,
            node: options.node,
            request_timeout: options.request_timeout,
            incarnation: clock.unix_ms().saturating_mul(1000),
        };
        let group = Arc::new(Group::new(group, Arc::new(move || clock.unix_ms())));
        // Until the machine has looked at what earlier runs left in the store.
        group.set_loading(true);
        let agreed_ms = Arc::default();
        let (cut, meeting) = (Cut::default(), Meeting::new(lanes));
        let left_at_start = AtomicU64::default();
        (Self { options, group, agreed_ms, cut, meeting, left_at_start, couriers }, receivers)
    }

    pub(crate) fn send(&self, lane: usize, errand: Errand) {
        // A courier ends with its node, and then no request waits.
        let _ = self.couriers[lane].send(errand);
    }

    /// Ends the couriers.
    pub(crate) fn stop(&self) {
        self.group.abandon();
        for courier in &self.couriers {
            let _ = courier.send(Errand::Stop);
        }
    }
}
