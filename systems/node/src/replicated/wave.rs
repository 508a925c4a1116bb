//! Units that are applied at the same time: a *wave*.
//!
//! ```text
//!  log's thread   unit 7: a b c   unit 8: d e      requests a d e belong to shard 0, b c to shard 1
//!                     │ place
//!        work of shard 0: a d e ── here ───────────────────────► one batch, and the mark of unit 8
//!        work of shard 1: b c   ── offered ─► shard 1's thread ─► one batch, and the mark of unit 7
//!                     │             └ taken back where that thread has not begun
//!                     ▼ tell
//!                 replies a b c of unit 7, d e of unit 8
//! ```
//!
//! A unit holds the requests of one shard's *connections*, whose keys lie anywhere. So a wave splits units: the requests
//! of each shard are its *work*, in the log's order. Requests of different shards do not depend on each other; those
//! over several shards, and those whose shards or size are not known before they run, have their units applied
//! alone, between waves.
//!
//! The log's thread keeps one shard's work for itself, and offers the others' to the shards' threads
//! ([`beeline_ring::Offer`]), where there is enough of it to be worth waking a thread. What no thread has begun when
//! it is done with its own, it takes back: it never waits for a thread that does something else.
//!
//! Invariants: work runs with its shard locked, as one batch that ends with the shard's mark ([`super::marks`]); the log's
//! thread goes on when all work is done; a batch fits however entries lie ([`Wave::place`]).

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Thread;

use beeline_env::fault::FaultPoint;
use beeline_kv::entry::slot_bytes_for;
use beeline_kv::{Keyspace, Shard, Store};
use beeline_replicated_service::machine::{Settled, Take};
use beeline_replicated_service::unit::{Unit, put_part};
use beeline_resp::{Executor, Logged, Output, Route};
use beeline_ring::{Offer, Taken};

use super::machine::{BATCH_SHARE, run_request};
use super::marks::{Marks, Place};
use super::{Replication, clock, pair};
use crate::shared::Shared;

/// Requests from which on work is worth a hand-over: they take longer than waking a thread. Where each batch
/// waits for its medium, any work is.
const HANDED_OVER: usize = 16;
/// Most requests of a shard in a wave: its lock is held for so long. Well under a millisecond where requests are
/// small; their values together have up to half of a segment, and at `power` the batch waits for its medium.
const MOST: usize = 512;
/// Segments that are left for each shard where waves are. In a wave every shard writes to its own log, which keeps
/// segments of its own for the next writes; a pool without room for that has one shard's log take all.
const SEGMENTS: u64 = 8;

/// Where a test makes a shard's part of a wave fail, between its effects and its end.
static WORK: FaultPoint = FaultPoint::new("node.wave.work");
/// And between its end and its commit.
static ENDED: FaultPoint = FaultPoint::new("node.wave.ended");

/// Where the log's thread and the shards' threads meet, and what they count there.
#[derive(Debug)]
pub(crate) struct Meeting {
    /// Of each shard.
    offers: Vec<Offer<Box<Work>>>,
    waves: AtomicU64,
    parts: AtomicU64,
    handed_over: AtomicU64,
}

/// What was counted: waves, batches of shards in them, and those of the batches that shards' threads applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MeetingStats {
    pub waves: u64,
    pub parts: u64,
    pub handed_over: u64,
}

impl Meeting {
    pub(crate) fn new(shards: usize) -> Self {
        Self {
            offers: (0..shards).map(|_| Offer::default()).collect(),
            waves: AtomicU64::new(0),
            parts: AtomicU64::new(0),
            handed_over: AtomicU64::new(0),
        }
    }

    pub(crate) fn stats(&self) -> MeetingStats {
        MeetingStats {
            waves: self.waves.load(Ordering::Relaxed),
            parts: self.parts.load(Ordering::Relaxed),
            handed_over: self.handed_over.load(Ordering::Relaxed),
        }
    }

    /// Whether work waits for a shard's thread.
    #[inline]
    pub(crate) fn has_work(&self, shard: usize) -> bool {
        self.offers[shard].is_offered()
    }

    /// Applies what the log's thread offers to a shard, by the shard's own thread, which has it locked. Whether there
    /// was anything.
    pub(crate) fn apply(&self, shared: &Shared, shard: &mut Shard) -> bool {
        let offer = &self.offers[shard.index()];
        let Some(work) = offer.take() else { return false };
        let mut taken = InHand(Some(work));
        if let Some(work) = &mut taken.0 {
            self.handed_over.fetch_add(1, Ordering::Relaxed);
            work.run(shared, shard);
        }
        true
    }
}

/// Work in the hands of a shard's thread: the log's thread gets it back, also where the other one panics.
struct InHand<'o>(Option<Taken<'o, Box<Work>>>);

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        let Some(mut work) = self.0.take() else { return };
        if std::thread::panicking() {
            work.failed = Some("the shard's thread panicked".to_owned());
        }
        let owner = work.owner.clone();
        // It goes back.
        drop(work);
        if let Some(owner) = owner {
            owner.unpark();
        }
    }
}

/// One request of a shard's work.
#[derive(Clone, Copy, Debug)]
struct Task {
    /// Where it ends in [`Work::requests`].
    end: usize,
    position: u64,
    /// The log's time for its unit.
    unix_ms: u64,
}

/// What a request did.
#[derive(Clone, Copy, Debug)]
struct Done {
    /// Where its reply, a part, ends in [`Work::replies`].
    end: usize,
    effects: u64,
}

/// A shard's part of a wave.
#[derive(Debug)]
pub(crate) struct Work {
    requests: Vec<u8>,
    tasks: Vec<Task>,
    /// Most bytes that these requests store.
    bytes: u64,
    /// The last unit with a request here.
    last: Place,
    /// Name and value of the entry that says so.
    mark: (Vec<u8>, [u8; 20]),
    replies: Vec<u8>,
    done: Vec<Done>,
    executor: Executor,
    out: Output,
    /// The thread that waits for it.
    owner: Option<Thread>,
    /// Why the shard cannot apply it.
    failed: Option<String>,
}

impl Work {
    fn new(executor: Executor) -> Box<Self> {
        Box::new(Self {
            requests: Vec::new(),
            tasks: Vec::new(),
            bytes: 0,
            last: Place::default(),
            mark: (Vec::new(), [0; 20]),
            replies: Vec::new(),
            done: Vec::new(),
            executor,
            out: Output::default(),
            owner: None,
            failed: None,
        })
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.tasks.clear();
        self.bytes = 0;
        self.replies.clear();
        self.done.clear();
        for buffer in [&mut self.requests, &mut self.replies] {
            buffer.shrink_to(1 << 20);
        }
    }

    /// Applies it to its shard, which is locked, as one batch.
    fn run(&mut self, shared: &Shared, shard: &mut Shard) {
        let Some(replication) = &shared.replication else { return };
        if shared.has_lost_log() {
            self.failed = Some("another shard could not apply the log".to_owned());
            return;
        }
        let mut keyspace = Keyspace::many(vec![shard], 0);
        keyspace.begin_batch();
        let applied = self.run_tasks(shared, &mut keyspace).and_then(|()| {
            let (name, value) = &self.mark;
            keyspace.put_system(name, value).map_err(|error| error.to_string())?;
            keyspace.end_batch();
            ENDED.check().map_err(|fault| fault.to_string())?;
            if replication.options.ordered_commits {
                keyspace.commit().map_err(|error| error.to_string())?;
            }
            Ok(())
        });
        if let Err(reason) = applied {
            // While the shard is locked: its thread refuses everything from the moment it can see what
            // the batch left.
            keyspace.abandon_batch();
            replication.fail();
            self.failed = Some(reason);
        }
    }

    fn run_tasks(&mut self, shared: &Shared, keyspace: &mut Keyspace<'_>) -> Result<(), String> {
        let mut start = 0;
        for task in &self.tasks {
            let request = &self.requests[start..task.end];
            start = task.end;
            keyspace.agree_until(task.unix_ms);
            keyspace.watch_effects();
            let (executor, out) = (&mut self.executor, &mut self.out);
            let mut applied = Ok(());
            clock::at(task.unix_ms, || {
                put_part(&mut self.replies, |reply| {
                    applied =
                        run_request(executor, out, shared, task.position, request, keyspace, reply);
                });
            });
            applied?;
            self.done.push(Done { end: self.replies.len(), effects: keyspace.effects() });
        }
        self.out.clear();
        WORK.check().map_err(|fault| fault.to_string())
    }
}

/// See the module's documentation. Lives on the log's thread.
#[derive(Debug)]
pub(crate) struct Wave {
    /// Of each shard; elsewhere only within [`Wave::run`].
    works: Vec<Option<Box<Work>>>,
    /// The shard of each request, in the log's order.
    shards: Vec<u32>,
    /// How many requests each unit has.
    units: Vec<u32>,
    /// Of the unit that is being placed: its requests' shards and sizes.
    placing: Vec<(usize, u64)>,
    logged: Logged,
    limit_bytes: u64,
}

impl Wave {
    /// For the shards of a node whose figures of executors begin, for this purpose, at `figures`.
    pub(crate) fn new(shared: &Shared, figures: usize) -> Self {
        let executor = |shard| {
            let figures = shared.figures.of(figures + shard).unwrap_or_default();
            Executor::with_figures(figures)
        };
        let shards = shared.shards.len();
        Self {
            works: (0..shards).map(|shard| Some(Work::new(executor(shard)))).collect(),
            shards: Vec::new(),
            units: Vec::new(),
            placing: Vec::new(),
            logged: Logged::default(),
            limit_bytes: u64::from(shared.store.pool().segment_bytes()) / BATCH_SHARE,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// Puts a unit's requests to the work of their shards, if all of them are of one shard each and their sizes are
    /// known: then no limit of a batch is met, whether they are one batch or several, and members with
    /// different numbers of shards answer alike.
    pub(crate) fn place(
        &mut self,
        store: &Store,
        unit: &Unit<'_>,
        place: Place,
        unix_ms: u64,
    ) -> Take {
        self.placing.clear();
        let (mut all_bytes, shards) = (0, store.shards());
        for request in unit.requests() {
            let (shard, bytes) = match reach(store, request, &mut self.logged) {
                Some((Route::Shard(shard), bytes)) => (shard, bytes),
                // It touches none: an error.
                Some((Route::Here, bytes)) => (usize::from(unit.lane.lane) % shards, bytes),
                _ => return Take::Alone,
            };
            all_bytes += bytes;
            self.placing.push((shard, bytes));
        }
        if all_bytes > self.limit_bytes || !store.has_segments(SEGMENTS) {
            return Take::Alone;
        }
        let is_full = |work: &Option<Box<Work>>| {
            work.as_ref().is_some_and(|work| {
                work.bytes + all_bytes > self.limit_bytes
                    || work.tasks.len() + self.placing.len() > MOST
            })
        };
        if !self.is_empty() && self.works.iter().any(is_full) {
            return Take::Full;
        }
        for (request, &(shard, bytes)) in unit.requests().zip(&self.placing) {
            let Some(work) = &mut self.works[shard] else { return Take::Alone };
            work.requests.extend_from_slice(request);
            let (end, position) = (work.requests.len(), place.position);
            work.tasks.push(Task { end, position, unix_ms });
            work.bytes += bytes;
            work.last = place;
            self.shards.push(shard as u32);
        }
        self.units.push(self.placing.len() as u32);
        Take::Later
    }

    /// Applies all of it; returns when it is done.
    ///
    /// Errors: why a shard cannot apply its part.
    pub(crate) fn run(
        &mut self,
        shared: &Shared,
        replication: &Replication,
        marks: &Marks,
    ) -> Result<(), String> {
        let meeting = &replication.meeting;
        let is_busy =
            |work: &Option<Box<Work>>| work.as_ref().is_some_and(|work| !work.tasks.is_empty());
        let busy: Vec<usize> =
            (0..self.works.len()).filter(|&shard| is_busy(&self.works[shard])).collect();
        meeting.waves.fetch_add(1, Ordering::Relaxed);
        meeting.parts.fetch_add(busy.len() as u64, Ordering::Relaxed);
        for &shard in &busy {
            if let Some(work) = &mut self.works[shard] {
                let (name, value) = marks.of_shard(shard, work.last);
                work.mark.0.clear();
                work.mark.0.extend_from_slice(name);
                work.mark.1 = value;
            }
        }
        // The first one is this thread's.
        let mut offered = Vec::new();
        for &shard in busy.iter().skip(1) {
            let slot = &mut self.works[shard];
            let worth = |work: &mut Box<Work>| {
                work.tasks.len() >= HANDED_OVER || replication.options.ordered_commits
            };
            let Some(mut work) = slot.take_if(worth) else { continue };
            work.owner = Some(std::thread::current());
            match meeting.offers[shard].offer(work) {
                Ok(()) => {
                    shared.doors[shard].nudge();
                    offered.push(shard);
                }
                Err(work) => *slot = Some(work),
            }
        }
        for &shard in busy.iter().filter(|shard| !offered.contains(shard)) {
            self.run_here(shared, shard);
        }
        for &shard in &offered {
            if let Some(work) = meeting.offers[shard].take_back() {
                self.works[shard] = Some(work);
                self.run_here(shared, shard);
            }
        }
        for &shard in &offered {
            while self.works[shard].is_none() {
                self.works[shard] = meeting.offers[shard].collect();
                if self.works[shard].is_none() {
                    std::thread::park();
                }
            }
        }
        let failed = self.works.iter().flatten().find_map(|work| work.failed.clone());
        failed.map_or(Ok(()), Err)
    }

    fn run_here(&mut self, shared: &Shared, shard: usize) {
        if let Some(work) = &mut self.works[shard] {
            let mut guards = shared.lock_shards(&[shard]);
            work.run(shared, &mut guards[0]);
        }
    }

    /// Tells of each unit, in the log's order, what it did; then the wave is empty.
    pub(crate) fn tell(&mut self, each: &mut dyn FnMut(Settled<'_>)) {
        // Per shard: how many of its requests were told of.
        let mut told = vec![0; self.works.len()];
        let mut shards = self.shards.iter();
        let mut replies = Vec::new();
        for &requests in &self.units {
            replies.clear();
            let mut effects = 0_u64;
            for &shard in shards.by_ref().take(requests as usize) {
                let Some(work) = &self.works[shard as usize] else { continue };
                let at = &mut told[shard as usize];
                let start = if *at == 0 { 0 } else { work.done[*at - 1].end };
                let done = work.done[*at];
                *at += 1;
                replies.extend_from_slice(&work.replies[start..done.end]);
                effects = effects.wrapping_add(done.effects);
            }
            let requests = u64::from(requests);
            each(Settled { replies: &replies, requests, effects: Some(effects) });
        }
        self.clear();
    }

    /// Forgets what was placed.
    fn clear(&mut self) {
        self.shards.clear();
        self.units.clear();
        self.works.iter_mut().flatten().for_each(|work| work.clear());
    }
}

/// Where a request works and how much it writes at most, if that is known.
fn reach(store: &Store, request: &[u8], logged: &mut Logged) -> Option<(Route, u64)> {
    if pair::is_pair(request) {
        let Some(write) = pair::decode(request) else { return Some((Route::Here, 0)) };
        let bytes = slot_bytes_for(write.key.len(), write.value.map_or(0, <[u8]>::len));
        return Some((Route::Shard(store.shard_of(write.database, write.key)), bytes));
    }
    if !logged.read(request) {
        return Some((Route::Here, 0));
    }
    logged.reach(store).map(|reach| (reach.route, reach.bytes))
}
