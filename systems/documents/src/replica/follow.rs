//! Following a primary: find where the logs part, take back what lies behind, copy or fetch, apply, report.
//!
//! ```text
//!  find ── never had any, or too far apart ──► copy all ──► fetch up to its end ─┐
//!    └── parted ──► take back ──► fetch up to the floor ─────────────────────────┼──► fetch ─ queue ─ apply
//!    └── in step ────────────────────────────────────────────────────────────────┘          report ◄──┘
//! ```
//!
//! Fetching, applying and reporting are three threads: the fetcher is held by the bounded queue, the reporter
//! tells what was applied and not what was fetched, and says nothing to a primary of an older term.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use beeline_documents_query::error::{Code, QueryError};
use bson::doc;

use crate::engine::{Engine, lock};
use crate::layout::kind;
use crate::replica::entry::{self, Effect, Entry, Spot};
use crate::replica::source::{ASKED_BYTES, Patience, Progress, Sources, SyncError, SyncSource};
use crate::replica::store::{COMPARED, Fetched, Mark, Rows, is_own};
use crate::replica::{Replica, State};

/// Batches between the fetcher and the applier.
const QUEUE: usize = 4;
/// How long the primary may keep a fetch without news.
const WAIT: Duration = Duration::from_millis(200);
/// Between two reports without news.
const REPORT: Duration = Duration::from_millis(100);
/// Between two attempts to begin.
const AGAIN: Duration = Duration::from_millis(50);
/// Bytes of a page of documents.
const PAGE: usize = 1 << 20;

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Source(#[from] SyncError),
    #[error("this member's store: {0}")]
    Store(#[from] QueryError),
    #[error("{0}")]
    Other(String),
}

/// One term's following of one primary.
pub(crate) struct Session {
    pub(crate) replica: Arc<Replica>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) sources: Arc<dyn Sources>,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) term: u64,
    pub(crate) source: u16,
    pub(crate) patience: Patience,
    /// This member has changes that are to be taken back.
    pub(crate) parted: AtomicBool,
}

impl Session {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst) || self.replica.stopping.load(Ordering::SeqCst)
    }

    pub(crate) fn run(&self) {
        self.settle_state();
        let mut said = String::new();
        while !self.stopped() && self.replica.broken().is_none() {
            if let Err(error) = self.attempt() {
                // What ails this member itself is said once; the other may be away for a while.
                let (own, reason) = (!matches!(error, Ended::Source(_)), error.to_string());
                *lock(&self.replica.trouble) = Some(reason.clone());
                if own && reason != said && !self.stopped() {
                    tracing::warn!(reason, source = self.source, "following ended");
                    said = reason;
                } else {
                    tracing::debug!(%error, source = self.source, "following ended");
                }
                self.settle_state();
                if !self.stopped() {
                    std::thread::sleep(AGAIN);
                }
            }
        }
    }

    /// What the mark says this member is while nobody is followed.
    fn settle_state(&self) {
        let mark = self.replica.store.mark();
        self.replica.set_state(match (mark.copying, &mark.floor) {
            (true, _) => State::Copying,
            // Until they are taken back, changes are seen here that this primary lacks.
            (false, _) if self.parted.load(Ordering::SeqCst) => State::Rollback,
            (false, Some(_)) => State::Recovering,
            // One that never had anything has nothing to show until it was told that this is all.
            (false, None) if mark == Mark::default() => State::Startup,
            (false, None) => State::Secondary,
        });
    }

    fn heard(&self) {
        *lock(&self.replica.heard) = (self.term, self.replica.agreed.gate.now_ms());
    }

    fn open(&self) -> Result<Box<dyn SyncSource>, Ended> {
        let source = self.sources.open(self.source, self.term, &self.patience)?;
        source.carrier().clone_into(&mut lock(&self.replica.carrier));
        Ok(source)
    }

    fn attempt(&self) -> Result<(), Ended> {
        let replica = &self.replica;
        let mut source = self.open()?;
        let mark = replica.store.mark();
        let asked = replica.resync.load(Ordering::SeqCst);
        if mark.copying || asked || replica.store.last() == Default::default() {
            self.copy(&mut *source)?;
        } else {
            let kept = self.find(&mut *source)?;
            let gone = match &mark.floor {
                Some(floor) => source.find(std::slice::from_ref(floor))?.is_none(),
                None => false,
            };
            match kept {
                Some(kept) if !gone && kept.place == replica.store.last().place => {}
                Some(kept) if !gone => {
                    self.parted.store(true, Ordering::SeqCst);
                    replica.set_state(State::Rollback);
                    self.take_back(&mut *source, kept)?;
                }
                // They share nothing, or what would complete these documents is no part of this primary's log.
                kept => {
                    self.set_aside(&mut *source, kept.unwrap_or_default().place.time)?;
                    self.copy(&mut *source)?;
                }
            }
        }
        self.parted.store(false, Ordering::SeqCst);
        replica.begin_behind(replica.store.last().place.time);
        self.settle_state();
        self.steady(source)
    }

    /// The newest place of this member's log that the primary's has as well.
    fn find(&self, source: &mut dyn SyncSource) -> Result<Option<Spot>, Ended> {
        let mut spots = self.replica.store.newest()?;
        loop {
            let found = source.find(&spots)?;
            self.heard();
            if let Some(index) = found {
                return Ok(spots.get(index).cloned());
            }
            let oldest = spots.last().map_or(0, |spot| spot.place.time);
            if spots.len() < COMPARED || oldest == 0 || self.stopped() {
                return Ok(None);
            }
            spots = self.replica.store.places(oldest - 1)?;
        }
    }

    /// Stops this member for good: it has what a majority acknowledged, and a primary does not.
    fn differ(&self, from: u64) -> Ended {
        let reason = format!(
            "this member has changes that a majority acknowledged (from {from}) and member {} of term {} lacks: they are kept; stop this member and compare the two",
            self.source, self.term
        );
        self.replica.stop_for(reason.clone());
        Ended::Other(reason)
    }

    fn keep_file(&self, own: &[Entry]) -> Result<String, Ended> {
        self.keep(own).map_err(|error| {
            Ended::Other(format!("what is taken back cannot be kept in a file: {error}"))
        })
    }

    /// Before everything is deleted here: what no majority is known to have goes into a file. A primary whose log
    /// reaches back to what a majority acknowledged, and lacks it, is not copied.
    fn set_aside(&self, source: &mut dyn SyncSource, kept: u64) -> Result<(), Ended> {
        let replica = &self.replica;
        let mut own = replica.store.entries_behind(kept)?;
        let commit = replica.commit();
        let alone = own.partition_point(|entry| entry.spot.place.time <= commit);
        if let Some(known) = own[..alone].last().map(|entry| entry.spot.place.time)
            && source.entries(known.saturating_sub(1), 1, Duration::ZERO)?.is_some()
        {
            return Err(self.differ(known));
        }
        let own = own.split_off(alone);
        if !own.is_empty() {
            let file = self.keep_file(&own)?;
            replica.counts.taken_back.fetch_add(own.len() as u64, Ordering::Relaxed);
            tracing::warn!(
                entries = own.len(),
                file,
                "changes that no majority is known to have are set aside, and all documents copied"
            );
        }
        Ok(())
    }

    /// Copies all documents, then fetches the log up to where it was when the last was copied.
    fn copy(&self, source: &mut dyn SyncSource) -> Result<(), Ended> {
        let replica = &self.replica;
        // First, so that a member keeps what it has while the primary does not know it.
        let (rows, start) = source.rows()?;
        replica.set_state(State::Copying);
        tracing::info!(source = self.source, "all documents are copied");
        replica.store.clear()?;
        replica.resync.store(false, Ordering::SeqCst);
        self.engine.reload()?;
        for row in &rows {
            let mut after: Option<Vec<u8>> = None;
            loop {
                if self.stopped() {
                    return Err(Ended::Other("stopped while copying".to_owned()));
                }
                let most = PAGE.min(replica.options.batch_bytes);
                let (pairs, whole) = source.page(row, after.as_deref(), most)?;
                self.heard();
                after = pairs.last().map(|(key, _)| key.clone()).or(after);
                replica.store.paste(row, pairs)?;
                if whole {
                    break;
                }
            }
        }
        let (_, end) = source.rows()?;
        let mut mark = Mark { last: start.clone(), copying: true, ..Mark::default() };
        replica.store.remember(mark)?;
        replica.store.begin_log(start.place.time)?;
        self.engine.reload()?;
        let mut after = start.place.time;
        while after < end.place.time {
            let Some(fetched) = source.entries(after, replica.options.batch_bytes, WAIT)? else {
                return Err(Ended::Other("the log was shortened while copying".to_owned()));
            };
            self.heard();
            self.apply(&fetched)?;
            after = fetched.upto.max(after);
            if self.stopped() {
                return Err(Ended::Other("stopped while copying".to_owned()));
            }
        }
        replica.note_held().map_err(|error| Ended::Other(error.to_string()))?;
        mark = replica.store.mark();
        (mark.copying, mark.floor, mark.kept) = (false, None, None);
        replica.store.remember(mark)?;
        self.engine.reload()?;
        replica.counts.copies.fetch_add(1, Ordering::Relaxed);
        tracing::info!(source = self.source, "all documents are here");
        Ok(())
    }

    /// Takes back what lies behind `kept`: the keys it changed get what the primary has there, which is right once
    /// everything of the primary's log up to then is applied as well.
    fn take_back(&self, source: &mut dyn SyncSource, kept: Spot) -> Result<(), Ended> {
        let replica = &self.replica;
        let own = replica.store.entries_behind(kept.place.time)?;
        let first = own.first().map_or(u64::MAX, |entry| entry.spot.place.time);
        if first <= replica.commit() {
            return Err(self.differ(first));
        }
        let file = self.keep_file(&own)?;
        let mut keys: BTreeMap<Vec<u8>, BTreeSet<Vec<u8>>> = BTreeMap::new();
        let mut rows = Rows::new();
        for entry in &own {
            let row = &entry.spot.row;
            let touched = entry.effects.iter().map(|(key, _)| key.clone());
            keys.entry(row.clone()).or_default().extend(touched.filter(|key| !is_own(row, key)));
            rows.entry(row.clone()).or_default().insert(entry::key(entry.spot.place.time), None);
        }
        for (row, keys) in keys {
            let mut keys: Vec<Vec<u8>> = keys.into_iter().collect();
            let values = rows.entry(row.clone()).or_default();
            while !keys.is_empty() {
                let mut bytes = 0;
                let fit = |key: &&Vec<u8>| {
                    bytes += key.len() + 32;
                    bytes < ASKED_BYTES
                };
                let count = keys.iter().take_while(fit).count().max(1);
                let got = source.values(&row, &keys[..count])?;
                self.heard();
                if got.is_empty() {
                    return Err(Ended::Other("the primary answered no value".to_owned()));
                }
                let count = got.len().min(count);
                values.extend(keys.drain(..count).zip(got));
            }
        }
        let (_, floor) = source.rows()?;
        let floor = Some(floor).filter(|floor| floor.place > kept.place);
        // Where a floor was there, nothing was acknowledged behind what was kept then.
        let whole = replica.store.mark().kept.map_or(kept.place, |before| before.min(kept.place));
        let whole = floor.as_ref().map(|_| whole);
        let mark = Mark { last: kept, floor, kept: whole, ..Mark::default() };
        match replica.store.change(rows, mark, &mut |_| {}) {
            // It is in the file; only a batch would leave no state between.
            Err(error) if error.code == Code::TransactionTooLarge => self.copy(source)?,
            done => done?,
        }
        self.engine.reload()?;
        replica.counts.taken_back.fetch_add(own.len() as u64, Ordering::Relaxed);
        tracing::warn!(entries = own.len(), file, "changes that no majority had were taken back");
        Ok(())
    }

    /// Writes what is taken back to a file of BSON documents, as `bsondump` reads them: a head, the entries as
    /// change streams know them, an end with their number and checksum.
    fn keep(&self, own: &[Entry]) -> std::io::Result<String> {
        let directory = &self.replica.options.rollback_directory;
        std::fs::create_dir_all(directory)?;
        let (first, last) = (own.first(), own.last());
        let time = |entry: Option<&Entry>| entry.map_or(0, |entry| entry.spot.place.time);
        let term = last.map_or(0, |entry| entry.spot.place.term);
        let name = format!("rollback-{term}-{:016x}-{:016x}.bson", time(first), time(last));
        let path = directory.join(name);
        let head = doc! {
            "beeline": "rollback", "version": 1, "member": i32::from(self.replica.options.me), "term": term as i64,
            "primary": i32::from(self.source), "primaryTerm": self.term as i64, "entries": own.len() as i64,
        };
        let mut out = head.to_vec().map_err(std::io::Error::other)?;
        let (start, mut told) = (out.len(), 0_i64);
        for entry in own {
            for (key, effect) in &entry.effects {
                if let (Some(&kind::LOG), Effect::Put(value)) = (key.first(), effect) {
                    out.extend_from_slice(value);
                    told += 1;
                }
            }
        }
        let sum = i64::from(crc32c::crc32c(&out[start..]));
        let end = doc! { "documents": told, "crc32c": sum };
        out.extend(end.to_vec().map_err(std::io::Error::other)?);
        let mut file = std::fs::File::create(&path)?;
        file.write_all(&out)?;
        file.sync_all()?;
        std::fs::File::open(directory)?.sync_all()?;
        Ok(path.display().to_string())
    }

    fn apply(&self, fetched: &Fetched) -> Result<(), Ended> {
        let mut entries = Vec::with_capacity(fetched.entries.len());
        for bytes in &fetched.entries {
            let Some(entry) = Entry::decode(bytes) else {
                return Err(Ended::Other("an entry of the primary cannot be read".to_owned()));
            };
            entries.push(entry);
        }
        let store = &self.replica.store;
        let take = &mut |rows: &Rows| self.engine.take_in(rows);
        if store.follow(&entries, take).is_err() {
            // Too much for one batch, perhaps: each by itself was one at the primary.
            for entry in &entries {
                store.follow(std::slice::from_ref(entry), take)?;
            }
        }
        self.replica.counts.applied.fetch_add(entries.len() as u64, Ordering::Relaxed);
        if !entries.is_empty() {
            *lock(&self.replica.hindrance) = None;
        }
        Ok(())
    }

    /// Fetches, applies and reports until something ends it.
    fn steady(&self, mut source: Box<dyn SyncSource>) -> Result<(), Ended> {
        let mut reporter = self.open()?;
        let begin = self.replica.store.last().place.time;
        let (queue, batches) = mpsc::sync_channel(QUEUE);
        let (over, applied) = (AtomicBool::new(false), Applied::new(begin));
        let ended = || over.load(Ordering::SeqCst) || self.stopped();
        std::thread::scope(|scope| {
            let end = |done: Result<(), Ended>| {
                over.store(true, Ordering::SeqCst);
                done
            };
            let ended = &ended;
            let fetcher = scope.spawn(move || end(self.fetch(&mut *source, begin, &queue, ended)));
            let told = &applied;
            let reporting = scope.spawn(move || end(self.report(&mut *reporter, told, ended)));
            // Both end with the applier, also where it panics: the fetcher may wait in the queue.
            let (batches, _ends) = (batches, Ends(&over));
            let applying = end(self.apply_all(&batches, &applied, ended));
            drop(batches);
            let fetching = fetcher.join().unwrap_or(Ok(()));
            let reporting = reporting.join().unwrap_or(Ok(()));
            applying.and(fetching).and(reporting)
        })
    }

    fn fetch(
        &self,
        source: &mut dyn SyncSource,
        begin: u64,
        queue: &SyncSender<Fetched>,
        ended: &dyn Fn() -> bool,
    ) -> Result<(), Ended> {
        let mut after = begin;
        while !ended() {
            if self.replica.is_paused() {
                std::thread::sleep(AGAIN);
                continue;
            }
            if self.replica.resync.load(Ordering::SeqCst) {
                return Err(Ended::Other("all documents are to be copied".to_owned()));
            }
            let fetched = source.entries(after, self.replica.options.batch_bytes, WAIT)?;
            let Some(fetched) = fetched else {
                self.replica.resync.store(true, Ordering::SeqCst);
                return Err(Ended::Other("the primary's log was shortened too far".to_owned()));
            };
            self.heard();
            if fetched.upto <= after && fetched.entries.is_empty() {
                continue;
            }
            after = fetched.upto.max(after);
            // Where the queue is full this thread waits; it ends with the applier.
            if queue.send(fetched).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn apply_all(
        &self,
        batches: &Receiver<Fetched>,
        applied: &Applied,
        ended: &dyn Fn() -> bool,
    ) -> Result<(), Ended> {
        while !ended() {
            match batches.recv_timeout(AGAIN) {
                Ok(fetched) => {
                    self.apply(&fetched)?;
                    self.replica.store.pass(fetched.upto);
                    applied.set(fetched.upto);
                    self.replica.moved.notify_waiters();
                    self.settle_state();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
        Ok(())
    }

    fn report(
        &self,
        source: &mut dyn SyncSource,
        applied: &Applied,
        ended: &dyn Fn() -> bool,
    ) -> Result<(), Ended> {
        while !ended() {
            // First how far this member is, then whether this term still is: a vote in a newer term that was
            // given in between says at least as much.
            let upto = applied.get();
            if !self.replica.agreed.is(self.term, self.source) {
                return Ok(());
            }
            let (whole, state) = (self.replica.store.mark().floor.is_none(), self.replica.state());
            let upto_told = if whole { upto } else { 0 };
            let progress = Progress { applied: upto_told, durable: upto_told, state: state as u8 };
            let told = source.report(progress)?;
            self.heard();
            *lock(&self.replica.trouble) = None;
            self.replica.latest.store(told.latest, Ordering::Relaxed);
            self.replica.set_commit(told.commit);
            applied.wait(upto, REPORT);
        }
        Ok(())
    }
}

/// Ends a session's threads when it is dropped.
struct Ends<'o>(&'o AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// The time up to which entries were applied.
struct Applied {
    time: Mutex<u64>,
    moved: Condvar,
}

impl Applied {
    fn new(time: u64) -> Self {
        Self { time: Mutex::new(time), moved: Condvar::new() }
    }

    fn get(&self) -> u64 {
        *lock(&self.time)
    }

    fn set(&self, time: u64) {
        *lock(&self.time) = time;
        self.moved.notify_all();
    }

    /// Waits until there is more than this, or so long.
    fn wait(&self, told: u64, most: Duration) {
        let guard = lock(&self.time);
        let waited = self.moved.wait_timeout_while(guard, most, |time| *time <= told);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}
