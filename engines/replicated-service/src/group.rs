//! What the threads of one member share about its log.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::failure::Failure;
use crate::journey::Load;
use crate::log::{Done, Log, LogState};
use crate::unit::{self, Check, LaneName};

/// What a member of a group is told.
#[derive(Clone, Copy, Debug)]
pub struct GroupOptions {
    /// The cluster.
    pub cluster: u64,
    /// This member's number.
    pub node: u16,
    /// How long a request waits for a leader and its answer. A fail-over takes well under a second.
    pub request_timeout: Duration,
    /// Where incarnations begin: larger than in earlier runs as long as clocks go forward
    /// (microseconds since 1970, say). Where they do not, the log tells better.
    pub incarnation: u64,
}

/// What a member counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// Units applied.
    pub units: u64,
    /// Requests applied.
    pub requests: u64,
    /// Units skipped because they had been applied before.
    pub repeated: u64,
    /// Pieces of longer units, kept until these were whole.
    pub pieces: u64,
    /// Units and barriers carried to another member.
    pub forwarded: u64,
    /// Units and barriers given up.
    pub timed_out: u64,
    /// Windows of the log that did something else here than at a leader: members differ.
    pub divergences: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) units: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) repeated: AtomicU64,
    pub(crate) pieces: AtomicU64,
    pub(crate) forwarded: AtomicU64,
    pub(crate) timed_out: AtomicU64,
    pub(crate) divergences: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// The latest unit of one of this member's lanes that was applied here, and its reply.
#[derive(Clone, Debug, Default)]
struct Latest {
    number: u64,
    reply: Vec<u8>,
}

/// Unix milliseconds, for the stamps of units that are proposed at this member.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

type OnFailure = Box<dyn Fn() + Send + Sync>;

/// One log, as one member's services share it.
pub struct Group {
    options: GroupOptions,
    clock: Clock,
    incarnation: AtomicU64,
    settled: AtomicBool,
    log: OnceLock<Arc<dyn Log>>,
    loading: AtomicBool,
    failed: AtomicBool,
    abandoned: AtomicBool,
    on_failure: OnceLock<OnFailure>,
    pub(crate) counters: Counters,
    applied: AtomicU64,
    latest: Mutex<HashMap<LaneName, Latest>>,
    /// The newest window whose digest is known.
    check: Mutex<Option<Check>>,
    /// `applied` or `latest` changed.
    progress: Condvar,
}

impl fmt::Debug for Group {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Group").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Group {
    /// A group whose log is not there yet.
    #[must_use]
    pub fn new(options: GroupOptions, clock: Clock) -> Self {
        Self {
            options,
            clock,
            incarnation: AtomicU64::new(options.incarnation),
            settled: AtomicBool::new(false),
            log: OnceLock::new(),
            loading: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            on_failure: OnceLock::new(),
            counters: Counters::default(),
            applied: AtomicU64::new(0),
            latest: Mutex::default(),
            check: Mutex::default(),
            progress: Condvar::new(),
        }
    }

    /// What it was told.
    #[must_use]
    pub fn options(&self) -> &GroupOptions {
        &self.options
    }

    /// `act` is called, from any thread, when this member cannot go on. The first one counts.
    pub fn on_failure(&self, act: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_failure.set(Box::new(act));
    }

    /// Gives the group its log; false if it had one.
    pub fn attach(&self, log: Arc<dyn Log>) -> bool {
        self.log.set(log).is_ok()
    }

    /// The log, once it is attached.
    #[must_use]
    pub fn log(&self) -> Option<&Arc<dyn Log>> {
        self.log.get()
    }

    /// The log as of now.
    #[must_use]
    pub fn state(&self) -> Option<LogState> {
        self.log.get().map(|log| log.state())
    }

    /// Whether a member of the group is about to have no room for more.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.log.get().is_some_and(|log| log.is_short())
    }

    /// Of this run of the member: larger than those of its earlier runs, as far as they are known.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.incarnation.load(Ordering::Acquire)
    }

    /// An earlier run had one below `above`.
    pub fn raise_incarnation(&self, above: u64) {
        self.incarnation.fetch_max(above, Ordering::AcqRel);
    }

    /// Whether everything that earlier runs of this member left in the log is applied here, so that
    /// [`Group::incarnation`] is above all of theirs: lanes propose nothing before.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Acquire)
    }

    pub(crate) fn settle(&self) {
        self.settled.store(true, Ordering::Release);
    }

    /// The state is not whole from now on, or is again: a snapshot replaces it, a member that ended in the middle of
    /// a run has not caught up with what it left, or a service has not looked yet whether it has.
    pub fn set_loading(&self, loading: bool) {
        self.loading.store(loading, Ordering::SeqCst);
    }

    /// Whether the state is not whole: see [`Group::set_loading`].
    #[must_use]
    pub fn is_loading(&self) -> bool {
        self.loading.load(Ordering::SeqCst)
    }

    /// This member cannot go on.
    pub fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        if let Some(act) = self.on_failure.get() {
            act();
        }
    }

    /// Whether it cannot.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Why a request cannot be served now. While the state is not whole, requests that ask
    /// the log wait; stale reads would see a part.
    #[must_use]
    pub fn obstacle(&self, stale: bool) -> Option<Failure> {
        if self.has_failed() {
            Some(Failure::Failed)
        } else if stale && self.is_loading() {
            Some(Failure::Loading)
        } else {
            None
        }
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<LaneName, Latest>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything up to `position` is applied here.
    pub fn set_applied(&self, position: u64) {
        let guard = self.locked();
        self.applied.store(position, Ordering::Release);
        drop(guard);
        self.progress.notify_all();
    }

    /// Whether everything up to `position` is applied here, and whole.
    #[must_use]
    pub fn has_applied(&self, position: u64) -> bool {
        !self.is_loading() && self.applied() >= position
    }

    /// Applied up to here.
    #[must_use]
    pub fn applied(&self) -> u64 {
        self.applied.load(Ordering::Acquire)
    }

    /// Keeps the reply to a unit of one of this member's lanes.
    pub(crate) fn keep_reply(&self, lane: LaneName, number: u64, reply: &[u8]) {
        let mut latest = self.locked();
        let kept = latest.entry(lane).or_default();
        kept.number = number;
        kept.reply.clear();
        kept.reply.extend_from_slice(reply);
        drop(latest);
        self.progress.notify_all();
    }

    /// The reply to this unit, if it was applied here.
    pub(crate) fn reply_to(&self, lane: LaneName, number: u64) -> Option<Vec<u8>> {
        let latest = self.locked();
        let kept = latest.get(&lane).filter(|latest| latest.number == number);
        kept.map(|latest| latest.reply.clone())
    }

    /// Stamps a unit, which [`unit::Unit::decode`] knows, for its proposal here: with the time, and
    /// with what the newest whole window of the log did here.
    pub fn stamp(&self, unit: &mut [u8]) {
        unit::stamp(unit, (self.clock)());
        if let Some(check) = *self.check.lock().unwrap_or_else(PoisonError::into_inner) {
            unit::stamp_check(unit, check);
        }
    }

    pub(crate) fn set_check(&self, check: Option<Check>) {
        *self.check.lock().unwrap_or_else(PoisonError::into_inner) = check;
    }

    /// Gives a load to this member's own log, which leads: a unit with the stamps of now.
    pub fn ask(&self, log: &dyn Log, load: Load<'_>, done: Done<Vec<u8>>) {
        match load {
            Load::Unit(unit) => {
                let mut unit = unit.to_vec();
                self.stamp(&mut unit);
                log.propose(unit, done);
            }
            Load::Barrier => log.barrier(Box::new(move |passed| {
                done(passed.map(|position| position.to_string().into_bytes()));
            })),
        }
    }

    /// Waits until something is applied, or `most` is over.
    pub(crate) fn wait_a_little(&self, most: Duration) {
        let guard = self.locked();
        // What changed since the caller looked is seen a little late.
        drop(self.progress.wait_timeout(guard, most.min(Duration::from_millis(1))));
    }

    /// What was counted.
    #[must_use]
    pub fn stats(&self) -> GroupStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        GroupStats {
            units: read(&counters.units),
            requests: read(&counters.requests),
            repeated: read(&counters.repeated),
            pieces: read(&counters.pieces),
            forwarded: read(&counters.forwarded),
            timed_out: read(&counters.timed_out),
            divergences: read(&counters.divergences),
        }
    }

    /// No thread waits for the log any more: couriers give up.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
        self.progress.notify_all();
    }

    /// Whether they have been told so.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }
}
