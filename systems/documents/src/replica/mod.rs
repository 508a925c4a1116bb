//! A replica set of documents: several nodes with the same databases, one of which takes writes.
//!
//! ```text
//!  cluster's log ── register of terms ──► conduct ──► lead │ follow │ vote
//!                                                      │       │
//!  clients ── door ── engine ── ReplicaStore ──────────┘       └── source ── find, entries ── apply
//!                                  └─ operation log                    └──── report ──► standing ──► held replies
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | `register`, `agreed` | which member leads in which term: decided in the cluster's log |
//! | `conduct` | what a member does next; how far a majority is: pure |
//! | `entry`, `store` | the operation log, and the rows of a member |
//! | `gate` | whether a member may write now |
//! | `source`, `serve` | what members ask each other, over the MongoDB wire |
//! | `fabric` | the same over fabric |
//! | `member`, `follow` | a member's threads: leading, copying, following, taking back |
//! | `concern` | replies that wait for other members; what a member refuses |
//!
//! Invariants: at most one member acknowledges in a term; what a majority acknowledged is in the log of
//! every later primary; a member applies entries in order and leaves none out; what is taken back is in a
//! file first. `docs/documents-replication.md` argues them.

pub mod agreed;
pub mod concern;
pub mod conduct;
pub mod entry;
pub mod fabric;
mod follow;
mod gate;
mod member;
pub mod register;
mod serve;
pub mod source;
pub mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use bson::oid::ObjectId;

use crate::engine::{Engine, lock};
use crate::replica::agreed::Agreed;
use crate::replica::conduct::{Report, Standing};
use crate::replica::register::Phase;
use crate::replica::source::Sources;
use crate::replica::store::ReplicaStore;

/// How a member is set.
#[derive(Clone, Debug)]
pub struct ReplicaOptions {
    /// The set's name.
    pub set: String,
    /// This member.
    pub me: u16,
    /// Where each member listens for MongoDB clients.
    pub members: BTreeMap<u16, SocketAddr>,
    /// Where each member meets fabric clients, as far as known.
    pub fabric: BTreeMap<u16, SocketAddr>,
    /// The cluster.
    pub cluster: u64,
    /// A primary that is silent for so long is taken for dead.
    pub election_timeout: Duration,
    /// Bytes of operation log that each row keeps.
    pub oplog_bytes: u64,
    /// Most bytes of entries in one batch: a part of what a segment of the pool holds.
    pub batch_bytes: usize,
    /// Most bytes that a batch takes with its entry: what a segment of the pool holds.
    pub longest_batch: usize,
    /// Where what is taken back is kept.
    pub rollback_directory: PathBuf,
    /// A file beside the documents that tells that there were some: a member without documents whose file is there
    /// lost them, and says nothing in elections until it has copied others'.
    pub held_file: PathBuf,
}

/// What a member does, as MongoDB numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Not known yet.
    Startup = 0,
    /// Takes writes.
    Primary = 1,
    /// Has a state that was, and follows.
    Secondary = 2,
    /// Its documents are on their way to a state that was.
    Recovering = 3,
    /// Copies all documents.
    Copying = 5,
    /// Takes back what it alone had.
    Rollback = 9,
}

impl State {
    pub(crate) fn of(number: u8) -> Self {
        match number {
            1 => Self::Primary,
            2 => Self::Secondary,
            3 => Self::Recovering,
            5 => Self::Copying,
            9 => Self::Rollback,
            _ => Self::Startup,
        }
    }

    /// MongoDB's word.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Startup => "STARTUP",
            Self::Primary => "PRIMARY",
            Self::Secondary => "SECONDARY",
            Self::Recovering => "RECOVERING",
            Self::Copying => "STARTUP2",
            Self::Rollback => "ROLLBACK",
        }
    }
}

/// Proposes an order to the cluster's log; called back when it was decided, or could not be.
pub trait Propose: Send + Sync + fmt::Debug {
    /// Proposes; `done` must not block.
    fn propose(&self, order: Vec<u8>, done: Box<dyn FnOnce() + Send>);
}

/// What a member counts.
#[derive(Debug, Default)]
pub struct ReplicaCounts {
    /// Terms this member led in.
    pub led: AtomicU64,
    /// Entries applied that another member made.
    pub applied: AtomicU64,
    /// Entries taken back.
    pub taken_back: AtomicU64,
    /// Times all documents were copied.
    pub copies: AtomicU64,
    /// Replies given up while they waited for other members.
    pub overdue: AtomicU64,
}

/// Why a member does not do what it could.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    /// In words.
    pub text: String,
    /// It is ill where the reason lasts; else an order or its age is the reason.
    pub ill: bool,
}

/// See the module's documentation.
pub struct Replica {
    /// How it is set.
    pub options: ReplicaOptions,
    /// Its rows.
    pub store: Arc<ReplicaStore>,
    /// What the cluster decided.
    pub agreed: Arc<Agreed>,
    /// What is counted.
    pub counts: ReplicaCounts,
    engine: OnceLock<Weak<Engine>>,
    state: AtomicU8,
    /// How often it began to take back or to copy.
    turned: AtomicU64,
    standing: Mutex<Option<Standing>>,
    /// What the others said they do.
    states: Mutex<BTreeMap<u16, State>>,
    /// The members that the settings of the others name, and when each said so.
    settings: Mutex<BTreeMap<u16, (BTreeSet<u16>, u64)>>,
    commit: AtomicU64,
    /// The newest time that the primary told of.
    latest: AtomicU64,
    /// The last term and time at which the primary was heard.
    heard: Mutex<(u64, u64)>,
    /// Something moved that a reply may wait for.
    pub moved: tokio::sync::Notify,
    /// What carries what it fetches.
    carrier: Mutex<String>,
    paused: AtomicBool,
    resync: AtomicBool,
    /// Why this member stopped for good.
    broken: Mutex<Option<String>>,
    /// Why it could not lead when it was elected.
    hindrance: Mutex<Option<String>>,
    /// Why it does not follow.
    trouble: Mutex<Option<String>>,
    /// Since when there is a reason that makes it ill.
    ill_since_ms: Mutex<Option<u64>>,
    stopping: Arc<AtomicBool>,
}

impl fmt::Debug for Replica {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Replica").field("options", &self.options).finish_non_exhaustive()
    }
}

/// The running threads of a member; dropping it ends them.
#[derive(Debug)]
pub struct Running {
    replica: Arc<Replica>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.replica.stopping.store(true, Ordering::SeqCst);
        self.replica.agreed.gate.shut();
        self.replica.agreed.wake();
        self.replica.moved.notify_waiters();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Replica {
    /// A member over its rows; it does nothing until [`Replica::start`].
    #[must_use]
    pub fn new(options: ReplicaOptions, store: Arc<ReplicaStore>, agreed: Arc<Agreed>) -> Self {
        store.limit_batches(options.longest_batch);
        Self {
            options,
            store,
            agreed,
            counts: ReplicaCounts::default(),
            engine: OnceLock::new(),
            state: AtomicU8::new(State::Startup as u8),
            turned: AtomicU64::new(0),
            standing: Mutex::default(),
            states: Mutex::default(),
            settings: Mutex::default(),
            commit: AtomicU64::new(0),
            latest: AtomicU64::new(0),
            heard: Mutex::default(),
            moved: tokio::sync::Notify::new(),
            carrier: Mutex::default(),
            paused: AtomicBool::new(false),
            resync: AtomicBool::new(false),
            broken: Mutex::default(),
            hindrance: Mutex::default(),
            trouble: Mutex::default(),
            ill_since_ms: Mutex::default(),
            stopping: Arc::default(),
        }
    }

    /// Notes, outside of the documents' pool, that this member has had documents.
    fn note_held(&self) -> std::io::Result<()> {
        let path = &self.options.held_file;
        if path.exists() {
            return Ok(());
        }
        std::fs::File::create(path)?.sync_all()?;
        match path.parent() {
            Some(directory) => std::fs::File::open(directory)?.sync_all(),
            None => Ok(()),
        }
    }

    /// A member that had documents and has none any more copies them before it votes.
    ///
    /// Errors: the store's.
    pub fn notice_loss(&self) -> beeline_documents_query::error::Result<()> {
        let mark = self.store.mark();
        if mark == store::Mark::default() && self.options.held_file.exists() {
            tracing::warn!("this member's documents are gone: all are copied from another member");
            return self.store.remember(store::Mark { copying: true, ..mark });
        }
        Ok(())
    }

    /// Starts the member's threads.
    ///
    /// Errors: no thread could be made.
    pub fn start(
        self: &Arc<Self>,
        engine: &Arc<Engine>,
        propose: Box<dyn Propose>,
        sources: Arc<dyn Sources>,
    ) -> std::io::Result<Running> {
        let _ = self.engine.set(Arc::downgrade(engine));
        let conductor = member::Conductor::new(self, engine, propose, sources);
        let thread = std::thread::Builder::new().name("documents-member".to_owned());
        let thread = Some(thread.spawn(move || conductor.run())?);
        Ok(Running { replica: Arc::clone(self), thread })
    }

    /// What it does.
    #[must_use]
    pub fn state(&self) -> State {
        State::of(self.state.load(Ordering::SeqCst))
    }

    pub(crate) fn set_state(&self, state: State) {
        if self.state.swap(state as u8, Ordering::SeqCst) != state as u8 {
            if matches!(state, State::Rollback | State::Copying) {
                self.turned.fetch_add(1, Ordering::SeqCst);
            }
            self.moved.notify_waiters();
        }
    }

    /// How often this member began to take back or to copy: what was read before may be gone.
    #[must_use]
    pub fn turned(&self) -> u64 {
        self.turned.load(Ordering::SeqCst)
    }

    /// Whether it takes writes at this moment.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.state() == State::Primary && self.agreed.gate.term().is_some()
    }

    /// Whether its documents are a state that was.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        matches!(self.state(), State::Primary | State::Secondary)
    }

    /// The term and the member that leads in it.
    #[must_use]
    pub fn primary(&self) -> (u64, Option<u16>) {
        let register = self.agreed.now();
        let primary = register.primary().filter(|primary| {
            *primary != self.options.me || self.state() != State::Primary || self.writes()
        });
        (register.term, primary)
    }

    /// The address of a member.
    #[must_use]
    pub fn address(&self, member: u16) -> String {
        self.options.members.get(&member).map(ToString::to_string).unwrap_or_default()
    }

    /// The identity of an election as drivers compare them.
    #[must_use]
    pub fn election(term: u64) -> ObjectId {
        let mut bytes = [0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0];
        bytes[4..].copy_from_slice(&term.to_be_bytes());
        ObjectId::from_bytes(bytes)
    }

    /// A majority has everything up to this time durably, as far as is known here.
    #[must_use]
    pub fn commit(&self) -> u64 {
        self.commit.load(Ordering::SeqCst)
    }

    /// The newest time that the primary told of.
    #[must_use]
    pub fn latest(&self) -> u64 {
        self.latest.load(Ordering::Relaxed).max(self.store.last().place.time)
    }

    /// The members that its setting names.
    #[must_use]
    pub fn setting(&self) -> BTreeSet<u16> {
        self.options.members.keys().copied().collect()
    }

    /// Whether a member said lately that its setting names these.
    fn names(&self, member: u16, setting: &BTreeSet<u16>, now_ms: u64) -> bool {
        lock(&self.settings).get(&member).is_some_and(|(named, at_ms)| {
            named == setting && now_ms.saturating_sub(*at_ms) <= self.timing().lease_ms
        })
    }

    fn heard_from(&self, term: u64, member: u16, now_ms: u64) {
        let mut standing = lock(&self.standing);
        if let Some(standing) = &mut *standing {
            standing.contact(term, member, now_ms);
        }
        self.renew(standing.as_ref(), now_ms);
    }

    /// Extends the lease: a majority was heard since.
    fn renew(&self, standing: Option<&Standing>, now_ms: u64) {
        if let Some(standing) = standing {
            let lease_ms = self.timing().lease_ms;
            self.agreed.gate.extend(standing.contact_ms(now_ms).saturating_add(lease_ms));
        }
    }

    fn take_report(&self, term: u64, member: u16, report: Report, state: u8) {
        lock(&self.states).insert(member, State::of(state));
        let mut standing = lock(&self.standing);
        let Some(known) = standing.as_mut() else { return };
        if known.report(term, member, report) {
            self.set_commit(known.commit(self.store.last().place.time));
            self.moved.notify_waiters();
        }
    }

    fn set_commit(&self, commit: u64) {
        if self.commit.fetch_max(commit, Ordering::SeqCst) < commit {
            self.moved.notify_waiters();
            // Change streams tell what a majority has.
            if let Some(engine) = self.engine.get().and_then(Weak::upgrade) {
                engine.changed.notify_waiters();
            }
        }
    }

    /// A term begins behind this log. A time may count for a majority that no log of it has an entry at, and the next
    /// primary may give such a time out again: what lies behind the log counts anew.
    fn begin_behind(&self, last: u64) {
        self.commit.fetch_min(last, Ordering::SeqCst);
    }

    fn timing(&self) -> conduct::Timing {
        let silence_ms = u64::try_from(self.options.election_timeout.as_millis()).unwrap_or(1000);
        conduct::Timing { silence_ms, lease_ms: 2 * silence_ms }
    }

    /// What each member is known to have, by number: state, time of what it applied, time of what is durable.
    #[must_use]
    pub fn members(&self) -> Vec<(u16, Option<State>, u64, u64)> {
        let standing = lock(&self.standing).clone();
        let states = lock(&self.states).clone();
        let (_, primary) = self.primary();
        self.options
            .members
            .keys()
            .map(|member| {
                if *member == self.options.me {
                    let last = self.store.last().place.time;
                    return (*member, Some(self.state()), last, last);
                }
                let report =
                    standing.as_ref().and_then(|standing| standing.reports().get(member).copied());
                match report {
                    Some(report) => {
                        let now_ms = self.agreed.gate.now_ms();
                        let silent = now_ms.saturating_sub(report.at_ms) > self.timing().lease_ms;
                        let state = states.get(member).copied().filter(|_| !silent);
                        (*member, state, report.applied, report.durable)
                    }
                    None if primary == Some(*member) => {
                        let latest = self.latest();
                        (*member, Some(State::Primary), latest, latest)
                    }
                    None => (*member, None, 0, 0),
                }
            })
            .collect()
    }

    /// What carries what it fetches, as in `shm` or `mongodb wire`; empty before it fetched anything.
    #[must_use]
    pub fn carrier(&self) -> String {
        lock(&self.carrier).clone()
    }

    /// Stops fetching, or goes on; what is there stays readable.
    pub fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::SeqCst);
    }

    /// Whether fetching is stopped.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }

    /// Has a secondary copy all documents anew.
    pub fn resync(&self) {
        self.resync.store(true, Ordering::SeqCst);
    }

    /// Stops for good.
    fn stop_for(&self, reason: String) {
        tracing::error!(reason, "this member of the documents stops");
        *lock(&self.broken) = Some(reason);
    }

    /// Why this member does not lead where it was elected, or does not keep up with the member that leads.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        let (ill, well) =
            (|text| Some(Reason { text, ill: true }), |text| Some(Reason { text, ill: false }));
        if let Some(broken) = self.broken() {
            return ill(broken);
        }
        let (register, me, state) = (self.agreed.now(), self.options.me, self.state());
        let list = |set: &BTreeSet<u16>| {
            set.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        if let Some(why) = &*lock(&self.hindrance) {
            return ill(format!("this member was elected and cannot lead: {why}"));
        }
        let elected = match &register.phase {
            Phase::Idle => {
                return ill(
                    "no term has begun: is there a majority of the cluster's log?".to_owned()
                );
            }
            Phase::Voting(ballots) => {
                let (term, given) = (register.term, list(&ballots.keys().copied().collect()));
                let before = match register.before.is_empty() {
                    true => String::new(),
                    false => format!(", and by a majority of {} before", list(&register.before)),
                };
                let voters = list(&register.voters);
                let given = if given.is_empty() { "none".to_owned() } else { given };
                return ill(format!(
                    "no member leads: term {term} is voted on by members {voters}{before}; votes came from {given}"
                ));
            }
            Phase::Elected(member) => *member,
        };
        if elected == me {
            return match (state, self.writes()) {
                (State::Primary, true) => None,
                (State::Primary, false) => ill(format!(
                    "no majority of members {} talks to this primary: it takes no writes",
                    list(&register.voters)
                )),
                _ => ill("this member was elected and does not lead yet".to_owned()),
            };
        }
        if self.is_paused() {
            return well(
                "fetching is paused by an order: `beeline documents resume` goes on".to_owned(),
            );
        }
        if let Some(why) = &*lock(&self.trouble) {
            return ill(format!("this member does not follow member {elected}: {why}"));
        }
        match state {
            State::Startup => ill(format!("nothing of member {elected} is here yet")),
            State::Copying => well(format!("all documents are copied from member {elected}")),
            State::Rollback => well(format!("changes that member {elected} lacks are taken back")),
            State::Recovering => {
                well(format!("documents are on their way to a state of member {elected}"))
            }
            _ if !register.counts(me) => well(format!(
                "this member has no vote: members {} have, until a majority of its --documents-members is started with the same, the primary among them",
                list(&register.voters)
            )),
            _ => None,
        }
    }

    /// How this member stands, in one line.
    #[must_use]
    pub fn in_words(&self) -> String {
        let ((term, primary), me) = (self.primary(), self.options.me);
        let mut words = format!("member {me}, {} in term {term}", self.state().word());
        if let Some(primary) = primary.filter(|primary| *primary != me) {
            words.push_str(&format!(", led by {}", self.address(primary)));
        }
        if let Some(reason) = self.reason() {
            words.push_str(&format!("; {}", reason.text));
        }
        words
    }

    /// Notes since when this member is ill.
    fn note_health(&self, now_ms: u64) {
        let ill = self.reason().is_some_and(|reason| reason.ill);
        let mut since = lock(&self.ill_since_ms);
        *since = ill.then(|| since.unwrap_or(now_ms));
    }

    /// A reason that lasts for longer than elections do.
    #[must_use]
    pub fn illness(&self) -> Option<String> {
        if let Some(broken) = self.broken() {
            return Some(broken);
        }
        let since_ms = (*lock(&self.ill_since_ms))?;
        let lasted_ms = self.agreed.gate.now_ms().saturating_sub(since_ms);
        let reason = self.reason().filter(|reason| reason.ill)?;
        (lasted_ms >= 5 * self.timing().lease_ms)
            .then(|| format!("for {} s: {}", lasted_ms / 1000, reason.text))
    }

    /// Why this member stopped for good, if it did.
    #[must_use]
    pub fn broken(&self) -> Option<String> {
        lock(&self.broken).clone()
    }
}
