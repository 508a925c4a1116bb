//! A member's rows: what it writes as primary goes into its operation log, in the batch of the write.
//!
//! [`ReplicaStore`] stands between the engine and the store. As primary it gives each batch a place in the
//! log and an [`Entry`]; otherwise it refuses what would change a document. What is a member's own (the log
//! itself, marks, the node's secret) is changed by every member alone.
//!
//! Invariants: a batch and its entry are stored together; an entry's time is taken under the lock of its
//! row, so a reader that takes the newest time first and then every row's lock misses none up to that time;
//! it is that of the first event in the batch, so whoever has all entries up to a time has all events up to it;
//! a member's log is at any moment, also after a crash, a beginning of some primary's log with nothing left
//! out, because what a secondary applies and the mark of how far it came are one batch.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Bound, ControlFlow};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use beeline_documents_query::error::{Code, QueryError, Result, fail};
use bson::{Bson, Document, doc};

use crate::engine::{lock, whole_field};
use crate::layout::{SYSTEM_ROW, kind, word};
use crate::log::Clock;
use crate::replica::entry::{self, Effect, Entry, Spot};
pub use crate::replica::gate::Gate;
use crate::replica::register::Place;
use crate::store::{Backing, Change, Store, Stretch, Visitor, with_row};

/// Entries deleted in one batch.
const SLICE: usize = 512;
/// Places that a member offers for one comparison with a primary's log.
pub const COMPARED: usize = 2000;

/// What a member remembers of its log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// Where the log ended when the mark was written.
    pub last: Spot,
    /// The term this member led in behind that: what it has of that term is its own, and whole.
    pub led: u64,
    /// The documents are those of a log that reaches here; until then they are no state that ever was.
    pub floor: Option<Spot>,
    /// The documents are being copied.
    pub copying: bool,
    /// While there is a floor: where the log ended when changes were taken back. Nothing behind it was acknowledged.
    pub kept: Option<Place>,
}

fn spot_document(spot: &Spot) -> Document {
    let row = bson::Binary { subtype: bson::spec::BinarySubtype::Generic, bytes: spot.row.clone() };
    doc! { "term": spot.place.term as i64, "time": spot.place.time as i64, "row": row }
}

fn spot_of(document: &Document) -> Option<Spot> {
    let Some(Bson::Binary(row)) = document.get("row") else { return None };
    let place = Place {
        term: whole_field(document, "term")? as u64,
        time: whole_field(document, "time")? as u64,
    };
    Some(Spot { place, row: row.bytes.clone() })
}

impl Mark {
    fn encode(&self) -> Result<Vec<u8>> {
        let mut stored = doc! { "version": 1, "last": spot_document(&self.last), "led": self.led as i64, "copying": self.copying };
        if let Some(floor) = &self.floor {
            stored.insert("floor", spot_document(floor));
        }
        if let Some(kept) = self.kept {
            stored.insert("kept", spot_document(&Spot { place: kept, row: Vec::new() }));
        }
        stored.to_vec().map_err(|error| QueryError::new(Code::InternalError, error.to_string()))
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        let stored = crate::scan::decode(bytes)?;
        let broken = || {
            let why = "the mark of the operation log cannot be read: empty the member's documents folder, and it copies another's";
            QueryError::new(Code::InternalError, why)
        };
        if whole_field(&stored, "version") != Some(1) {
            return Err(broken());
        }
        Ok(Self {
            last: stored.get_document("last").ok().and_then(spot_of).ok_or_else(broken)?,
            led: whole_field(&stored, "led").ok_or_else(broken)? as u64,
            floor: stored.get_document("floor").ok().and_then(spot_of),
            copying: stored.get_bool("copying").map_err(|_| broken())?,
            kept: stored.get_document("kept").ok().and_then(spot_of).map(|kept| kept.place),
        })
    }
}

fn mark_key() -> Vec<u8> {
    word(kind::OWN, b"mark")
}

fn trimmed_key() -> Vec<u8> {
    word(kind::OWN, b"trimmed")
}

/// Whether every member keeps such a key for itself.
#[must_use]
pub fn is_own(row: &[u8], key: &[u8]) -> bool {
    match key.first() {
        Some(&(kind::OPLOG | kind::OWN)) => true,
        Some(&kind::NUMBERS) => row == SYSTEM_ROW && &key[1..] == b"secret",
        _ => false,
    }
}

/// Entries read from a log.
#[derive(Clone, Debug, Default)]
pub struct Fetched {
    /// As they travel, oldest first.
    pub entries: Vec<Vec<u8>>,
    /// There is no other entry up to this time.
    pub upto: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct ReplicaStore {
    inner: Arc<dyn Store>,
    clock: Arc<Clock>,
    /// Whether this member may write.
    pub gate: Arc<Gate>,
    rows: RwLock<BTreeSet<Vec<u8>>>,
    mark: Mutex<Mark>,
    /// Where the log ends.
    last: Mutex<Spot>,
    /// The time up to which this member has everything. Unlike the clock it goes back where changes are taken back.
    reached: AtomicU64,
    /// Bytes that a batch may take.
    longest_batch: AtomicUsize,
    /// Told when the log has grown.
    pub grown: tokio::sync::Notify,
}

fn log_range(after: u64, until: u64) -> Stretch {
    Stretch { from: Bound::Excluded(entry::key(after)), to: Bound::Included(entry::key(until)) }
}

/// The time up to which entries of a row's log were deleted.
fn trimmed(row: &mut dyn Backing) -> Result<u64> {
    let mut bytes = Vec::new();
    row.get(&trimmed_key(), &mut bytes)?;
    Ok(bytes.first_chunk::<8>().map_or(0, |time| u64::from_be_bytes(*time)))
}

fn damaged() -> QueryError {
    QueryError::new(Code::InternalError, "an entry of the operation log cannot be read")
}

impl ReplicaStore {
    /// Over a store, with what it remembers.
    ///
    /// Errors: the store's, a mark that cannot be read.
    pub fn open(inner: Arc<dyn Store>, gate: Arc<Gate>) -> Result<Self> {
        let (mut rows, mut mark) = (BTreeSet::from([SYSTEM_ROW.to_vec()]), Mark::default());
        with_row(&*inner, SYSTEM_ROW, |row| {
            let mut bytes = Vec::new();
            if row.get(&mark_key(), &mut bytes)? {
                mark = Mark::decode(&bytes)?;
            }
            row.range(&Stretch::of_prefix(&[kind::CATALOG]), false, &mut |key, _| {
                rows.insert(key[1..].to_vec());
                ControlFlow::Continue(())
            })
        })?;
        let mut last = mark.last.clone();
        for name in &rows {
            with_row(&*inner, name, |row| {
                row.range(&Stretch::of_prefix(&[kind::OPLOG]), true, &mut |_, value| {
                    let Some(place) = entry::place_of(value) else { return ControlFlow::Break(()) };
                    if place.term == mark.led && mark.led > 0 && place > last.place {
                        last = Spot { place, row: name.clone() };
                    }
                    ControlFlow::Break(())
                })
            })?;
        }
        let clock = Arc::<Clock>::default();
        clock.pass(last.place.time);
        Ok(Self {
            inner,
            clock,
            gate,
            rows: RwLock::new(rows),
            mark: Mutex::new(mark),
            reached: AtomicU64::new(last.place.time),
            last: Mutex::new(last),
            longest_batch: AtomicUsize::new(usize::MAX),
            grown: tokio::sync::Notify::new(),
        })
    }

    /// No batch with its entry may take more bytes than this from now on.
    pub fn limit_batches(&self, bytes: usize) {
        self.longest_batch.store(bytes, Ordering::Relaxed);
    }

    /// Where the log ends.
    #[must_use]
    pub fn last(&self) -> Spot {
        lock(&self.last).clone()
    }

    /// The time up to which this member has everything.
    #[must_use]
    pub fn reached(&self) -> u64 {
        self.reached.load(Ordering::Acquire)
    }

    /// There is nothing up to this time that the member lacks.
    pub fn pass(&self, time: u64) {
        self.clock.pass(time);
        self.reached.fetch_max(time, Ordering::AcqRel);
    }

    /// What it remembers.
    #[must_use]
    pub fn mark(&self) -> Mark {
        lock(&self.mark).clone()
    }

    /// The rows there are, the system's first.
    #[must_use]
    pub fn rows(&self) -> Vec<Vec<u8>> {
        self.rows.read().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn know_row(&self, row: &[u8]) {
        let known = self.rows.read().unwrap_or_else(PoisonError::into_inner).contains(row);
        if !known {
            self.rows.write().unwrap_or_else(PoisonError::into_inner).insert(row.to_vec());
        }
    }

    /// Waits until no batch is under way that began before: once the gate is shut, nothing is written then.
    ///
    /// Errors: the store's.
    pub fn settle(&self) -> Result<()> {
        self.rows().iter().try_for_each(|row| with_row(&*self.inner, row, |_| Ok(())))
    }

    /// Remembers a mark.
    ///
    /// Errors: the store's.
    pub fn remember(&self, mark: Mark) -> Result<()> {
        let change = Change::put(mark_key(), mark.encode()?);
        with_row(&*self.inner, SYSTEM_ROW, |row| row.apply(&[change]).map(drop))?;
        self.reached.store(mark.last.place.time, Ordering::Release);
        *lock(&self.last) = mark.last.clone();
        *lock(&self.mark) = mark;
        Ok(())
    }

    /// Remembers that what this member writes from now on is its own, and opens the gate; the term's first entry
    /// is written. Returns where it is.
    ///
    /// Errors: the store's.
    pub fn lead(&self, term: u64, lease_until_ms: u64) -> Result<Spot> {
        let last = self.last();
        self.clock.pass(last.place.time);
        // The later events of a batch lie behind the time of its entry.
        for name in self.rows() {
            self.clock.pass(with_row(&*self.inner, &name, crate::log::last)?);
        }
        self.remember(Mark { last, led: term, ..Mark::default() })?;
        self.gate.lead(term);
        self.gate.extend(lease_until_ms);
        let value = term.to_be_bytes().to_vec();
        let first = Change::put(word(kind::NUMBERS, b"term"), value);
        with_row(self, SYSTEM_ROW, |row| row.apply(&[first]).map(drop))?;
        Ok(self.last())
    }

    /// Entries behind a time, as many whole ones as `most` bytes hold and one at least. `None`: some of them were deleted.
    ///
    /// Errors: the store's; an entry that cannot be read.
    pub fn read(&self, after: u64, most: usize) -> Result<Option<Fetched>> {
        let mut upto = self.clock.last().max(after);
        let rows = self.rows();
        // First how long entries are, so that no more of them are held than are answered.
        let mut lengths = BTreeMap::new();
        for name in &rows {
            let known = with_row(&*self.inner, name, |row| {
                if trimmed(row)? > after {
                    return Ok(false);
                }
                let (mut bytes, mut cut) = (0, upto);
                row.range(&log_range(after, upto), false, &mut |key, value| {
                    let time = crate::log::time_in(key);
                    bytes += value.len();
                    lengths.insert(time, value.len());
                    if bytes < most {
                        return ControlFlow::Continue(());
                    }
                    cut = time;
                    ControlFlow::Break(())
                })?;
                upto = cut;
                Ok(true)
            })?;
            if !known {
                return Ok(None);
            }
        }
        let (mut bytes, mut fits) = (0, None);
        for (time, length) in lengths.range(..=upto) {
            bytes += length;
            if let Some(fits) = fits.filter(|_| bytes > most) {
                upto = fits;
                break;
            }
            fits = Some(*time);
        }
        let mut found = BTreeMap::new();
        for name in &rows {
            let known = with_row(&*self.inner, name, |row| {
                let mut own = Vec::new();
                row.range(&log_range(after, upto), false, &mut |key, value| {
                    own.push((crate::log::time_in(key), value.to_vec()));
                    ControlFlow::Continue(())
                })?;
                for (time, thin) in own {
                    found.insert(time, whole(row, &thin)?);
                }
                Ok(trimmed(row)? <= after)
            })?;
            if !known {
                return Ok(None);
            }
        }
        let (mut entries, mut bytes, mut last) = (Vec::new(), 0, after);
        for (time, entry) in found.into_iter().take_while(|(time, _)| *time <= upto) {
            if !entries.is_empty() && bytes + entry.len() > most {
                upto = last;
                break;
            }
            (bytes, last) = (bytes + entry.len(), time);
            entries.push(entry);
        }
        Ok(Some(Fetched { entries, upto }))
    }

    /// The newest of these places that this member's log has: its index.
    ///
    /// Errors: the store's.
    pub fn find(&self, spots: &[Spot]) -> Result<Option<usize>> {
        for (index, spot) in spots.iter().enumerate() {
            let mut bytes = Vec::new();
            let key = entry::key(spot.place.time);
            let known = with_row(&*self.inner, &spot.row, |row| row.get(&key, &mut bytes))?;
            if known && entry::place_of(&bytes) == Some(spot.place) {
                return Ok(Some(index));
            }
            // Nothing was ever written: every log begins there.
            if spot.place == Place::default() {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// The newest places of the log, newest first: [`COMPARED`] of them, or all.
    ///
    /// Errors: the store's.
    pub fn newest(&self) -> Result<Vec<Spot>> {
        let last = self.last();
        let mut spots = self.places(last.place.time)?;
        // Where a log was copied up to its end, no entry lies at the end.
        if spots.first().is_none_or(|first| first.place < last.place) {
            spots.insert(0, last);
            spots.truncate(COMPARED);
        }
        Ok(spots)
    }

    /// Where entries up to a time lie, newest first: [`COMPARED`] of them, or all.
    ///
    /// Errors: the store's.
    pub fn places(&self, until: u64) -> Result<Vec<Spot>> {
        let mut spots = Vec::new();
        for name in self.rows() {
            with_row(&*self.inner, &name, |row| {
                let mut own = 0;
                row.range(&log_range(0, until), true, &mut |_, value| {
                    if let Some(place) = entry::place_of(value) {
                        spots.push(Spot { place, row: name.clone() });
                    }
                    own += 1;
                    if own < COMPARED { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
                })
            })?;
        }
        spots.sort_by_key(|spot| std::cmp::Reverse(spot.place));
        spots.truncate(COMPARED);
        Ok(spots)
    }

    /// This member's own entries behind a time, whole.
    ///
    /// Errors: the store's; an entry that cannot be read.
    pub fn entries_behind(&self, time: u64) -> Result<Vec<Entry>> {
        let mut all = Vec::new();
        for name in self.rows() {
            with_row(&*self.inner, &name, |row| {
                let mut own = Vec::new();
                row.range(&log_range(time, u64::MAX), false, &mut |_, value| {
                    own.push(value.to_vec());
                    ControlFlow::Continue(())
                })?;
                for thin in own {
                    all.push(Entry::decode(&whole(row, &thin)?).ok_or_else(damaged)?);
                }
                Ok(())
            })?;
        }
        all.sort_by_key(|entry| entry.spot.place.time);
        Ok(all)
    }

    /// Applies entries of a primary, oldest first, and remembers that the log reaches the last of them: one batch.
    /// `then` is told, while the rows are locked, what changed.
    ///
    /// Errors: the store's; nothing changed.
    pub fn follow(&self, entries: &[Entry], then: &mut dyn FnMut(&Rows)) -> Result<()> {
        let Some(last) = entries.last() else { return Ok(()) };
        let mut rows = Rows::new();
        for entry in entries {
            let row = rows.entry(entry.spot.row.clone()).or_default();
            row.extend(entry.changes().map(|change| (change.key, change.value)));
            row.insert(entry::key(entry.spot.place.time), Some(entry.encode_thin()));
        }
        let mut mark = self.mark();
        (mark.last, mark.led) = (last.spot.clone(), 0);
        if mark.floor.as_ref().is_some_and(|floor| last.spot.place >= floor.place) {
            (mark.floor, mark.kept) = (None, None);
        }
        self.change(rows, mark, then)
    }

    /// Changes rows and remembers a mark: one batch.
    ///
    /// Errors: the store's; nothing changed.
    pub fn change(&self, mut rows: Rows, mark: Mark, then: &mut dyn FnMut(&Rows)) -> Result<()> {
        rows.entry(SYSTEM_ROW.to_vec()).or_default().insert(mark_key(), Some(mark.encode()?));
        let batch: Vec<(Vec<u8>, Vec<Change>)> = rows
            .iter()
            .map(|(row, changes)| {
                let change = |(key, value): (&Vec<u8>, &Option<Vec<u8>>)| Change {
                    key: key.clone(),
                    value: value.clone(),
                    absent: false,
                };
                (row.clone(), changes.iter().map(change).collect())
            })
            .collect();
        rows.keys().for_each(|row| self.know_row(row));
        // While the rows are locked: the next reader waits for what they show.
        self.inner.apply_all(&batch, &mut || {
            self.clock.pass(mark.last.place.time);
            self.reached.store(mark.last.place.time, Ordering::Release);
            *lock(&self.last) = mark.last.clone();
            *lock(&self.mark) = mark.clone();
            then(&rows);
        })?;
        self.grown.notify_waiters();
        Ok(())
    }

    /// What keys of a row hold: the first of them, as `most` bytes hold, and one at least.
    ///
    /// Errors: the store's.
    pub fn values(
        &self,
        name: &[u8],
        keys: &[Vec<u8>],
        most: usize,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        with_row(&*self.inner, name, |row| {
            let (mut values, mut length) = (Vec::with_capacity(keys.len()), 0);
            for key in keys {
                if length >= most {
                    break;
                }
                let mut bytes = Vec::new();
                let there = row.get(key, &mut bytes)?;
                length += bytes.len();
                values.push(there.then_some(bytes));
            }
            Ok(values)
        })
    }

    /// Keys and values of a row behind a key, without a member's own; true: those were the last.
    ///
    /// Errors: the store's.
    pub fn page(&self, name: &[u8], after: Option<Vec<u8>>, most: usize) -> Result<(Pairs, bool)> {
        let (mut pairs, mut bytes, mut whole) = (Vec::new(), 0, true);
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let stretch = Stretch { from, to: Bound::Excluded(vec![kind::OPLOG]) };
        with_row(&*self.inner, name, |row| {
            row.range(&stretch, false, &mut |key, value| {
                if !is_own(name, key) {
                    bytes += key.len() + value.len();
                    pairs.push((key.to_vec(), value.to_vec()));
                }
                whole = bytes < most;
                if whole { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            })
        })?;
        Ok((pairs, whole))
    }

    /// Deletes every document, and remembers that they are to be copied.
    ///
    /// Errors: the store's.
    pub fn clear(&self) -> Result<()> {
        self.remember(Mark { copying: true, ..Mark::default() })?;
        // The system's row last: it names the others, and what is cut short begins anew with them.
        for name in self.rows().into_iter().rev() {
            loop {
                let more = with_row(&*self.inner, &name, |row| {
                    let mut keys = Vec::new();
                    row.range(&Stretch::of_prefix(&[]), false, &mut |key, _| {
                        let kept = name == SYSTEM_ROW
                            && (key == mark_key() || &key[1..] == b"secret" && is_own(&name, key));
                        if !kept {
                            keys.push(Change::delete(key.to_vec()));
                        }
                        if keys.len() < SLICE {
                            ControlFlow::Continue(())
                        } else {
                            ControlFlow::Break(())
                        }
                    })?;
                    row.apply(&keys)?;
                    Ok(keys.len() == SLICE)
                })?;
                if !more {
                    break;
                }
            }
        }
        let mut rows = self.rows.write().unwrap_or_else(PoisonError::into_inner);
        *rows = BTreeSet::from([SYSTEM_ROW.to_vec()]);
        Ok(())
    }

    /// The log begins behind a time: what lies before is in documents that were copied.
    ///
    /// Errors: the store's.
    pub fn begin_log(&self, time: u64) -> Result<()> {
        let change = Change::put(trimmed_key(), time.to_be_bytes().to_vec());
        with_row(&*self.inner, SYSTEM_ROW, |row| row.apply(&[change]).map(drop))
    }

    /// Stores copied keys and values.
    ///
    /// Errors: the store's.
    pub fn paste(&self, name: &[u8], pairs: Pairs) -> Result<()> {
        self.know_row(name);
        let changes: Vec<Change> =
            pairs.into_iter().map(|(key, value)| Change::put(key, value)).collect();
        with_row(&*self.inner, name, |row| row.apply(&changes).map(drop))
    }

    /// Deletes the oldest entries of each row's log until it keeps to `most` bytes; none behind `keep`, which
    /// may have to be taken back.
    ///
    /// Errors: the store's.
    pub fn trim(&self, most: u64, keep: u64) -> Result<()> {
        for name in self.rows() {
            let (mut sizes, mut after) = (Vec::new(), 0);
            loop {
                let before = sizes.len();
                with_row(&*self.inner, &name, |row| {
                    row.range(&log_range(after, keep), false, &mut |key, value| {
                        sizes.push((crate::log::time_in(key), value.len() as u64));
                        if sizes.len() - before < SLICE {
                            ControlFlow::Continue(())
                        } else {
                            ControlFlow::Break(())
                        }
                    })
                })?;
                if sizes.len() - before < SLICE {
                    break;
                }
                after = sizes.last().map_or(after, |(time, _)| *time);
            }
            let mut bytes: u64 = sizes.iter().map(|(_, size)| size).sum();
            // The newest stays, however long: it tells where the log ends.
            sizes.pop();
            let doomed: Vec<u64> = sizes
                .into_iter()
                .take_while(|(_, size)| {
                    let over = bytes > most;
                    bytes = bytes.saturating_sub(*size);
                    over
                })
                .map(|(time, _)| time)
                .collect();
            for slice in doomed.chunks(SLICE) {
                let mut changes: Vec<Change> =
                    slice.iter().map(|time| Change::delete(entry::key(*time))).collect();
                let last = slice.last().copied().unwrap_or_default();
                changes.push(Change::put(trimmed_key(), last.to_be_bytes().to_vec()));
                with_row(&*self.inner, &name, |row| row.apply(&changes).map(drop))?;
            }
        }
        Ok(())
    }
}

/// Keys and values.
pub type Pairs = Vec<(Vec<u8>, Vec<u8>)>;
/// What keys of rows hold from now on.
pub type Rows = BTreeMap<Vec<u8>, BTreeMap<Vec<u8>, Option<Vec<u8>>>>;

/// An entry of a row as it travels.
fn whole(row: &mut dyn Backing, thin: &[u8]) -> Result<Vec<u8>> {
    let mut entry = Entry::decode(thin).ok_or_else(damaged)?;
    for (key, effect) in &mut entry.effects {
        let mut bytes = Vec::new();
        if *effect == Effect::Kept {
            *effect = match row.get(key, &mut bytes)? {
                true => Effect::Put(bytes),
                false => Effect::Delete,
            };
        }
    }
    Ok(entry.encode())
}

/// The times at which a batch's changes are told to change streams.
fn told(changes: &[Change]) -> impl Iterator<Item = u64> {
    let told = |one: &&Change| one.value.is_some() && one.key.first() == Some(&kind::LOG);
    changes.iter().filter(told).map(|one| crate::log::time_in(&one.key))
}

/// Bytes that a change takes in a segment of the pool beside its key and value, at most.
const CHANGE_BYTES: usize = 64;
/// Bytes that a member keeps free in a batch for the mark of how far its log goes.
const MARK_BYTES: usize = 4 << 10;

/// A row whose batches go into the log.
struct Logged<'l> {
    row: &'l mut dyn Backing,
    name: &'l [u8],
    store: &'l ReplicaStore,
    /// Every time up to this one was given out before the row was locked, or by a batch that is stored.
    since: u64,
    wrote: bool,
}

impl Logged<'_> {
    /// The time of a batch's entry: that of the first event in it, so a reader of the log that has everything up
    /// to an event's time has the event. One that was not taken under this lock would come too late for a reader
    /// that was here before.
    fn time(&self, changes: &[Change]) -> u64 {
        let first = told(changes).min().filter(|first| *first > self.since);
        first.unwrap_or_else(|| self.store.clock.next(self.store.inner.now_ms()))
    }

    /// Refuses what no member could apply: there the mark belongs to the batch as well.
    fn check_length(&self, changes: &[Change]) -> Result<()> {
        let length = |one: &Change| {
            let value = one.value.as_ref().map_or(0, Vec::len);
            self.name.len() + one.key.len() + value + CHANGE_BYTES
        };
        let length = changes.iter().map(length).sum::<usize>() + MARK_BYTES;
        let most = self.store.longest_batch.load(Ordering::Relaxed);
        if length > most {
            let why = format!(
                "the changes and their entry of the operation log take {length} bytes, and a segment of a member's pool holds {most}"
            );
            return fail(Code::TransactionTooLarge, why);
        }
        Ok(())
    }
}

impl Backing for Logged<'_> {
    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool> {
        self.row.get(key, out)
    }

    fn range(&mut self, stretch: &Stretch, backward: bool, visit: &mut Visitor<'_>) -> Result<()> {
        self.row.range(stretch, backward, visit)
    }

    fn apply(&mut self, changes: &[Change]) -> Result<Option<usize>> {
        if changes.iter().all(|change| is_own(self.name, &change.key)) {
            return self.row.apply(changes);
        }
        let Some(term) = self.store.gate.term() else {
            return fail(Code::NotWritablePrimary, "not primary");
        };
        self.store.know_row(self.name);
        let time = self.time(changes);
        let newest = told(changes).fold(time, u64::max);
        let spot = Spot { place: Place { term, time }, row: self.name.to_vec() };
        let entry = Entry::of(spot.clone(), changes).encode_thin();
        let mut all = changes.to_vec();
        all.push(Change::put(entry::key(time), entry));
        self.check_length(&all)?;
        let refused = self.row.apply(&all)?;
        if refused.is_none() {
            (self.wrote, self.since) = (true, self.since.max(newest));
            self.store.reached.fetch_max(newest, Ordering::AcqRel);
            let mut last = lock(&self.store.last);
            if spot.place > last.place {
                *last = spot;
            }
        }
        Ok(refused)
    }
}

impl Store for ReplicaStore {
    fn with(
        &self,
        name: &[u8],
        work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>,
    ) -> Result<()> {
        let mut wrote = false;
        let done = self.inner.with(name, &mut |row| {
            let since = self.clock.last();
            let mut row = Logged { row, name, store: self, since, wrote: false };
            let done = work(&mut row);
            wrote = row.wrote;
            done
        });
        if wrote {
            self.grown.notify_waiters();
        }
        done
    }

    fn apply_all(&self, rows: &[(Vec<u8>, Vec<Change>)], then: &mut dyn FnMut()) -> Result<()> {
        self.inner.apply_all(rows, then)
    }

    fn now_ms(&self) -> u64 {
        self.inner.now_ms()
    }

    fn space(&self) -> (u64, u64) {
        self.inner.space()
    }

    fn outlives_process(&self) -> bool {
        self.inner.outlives_process()
    }

    fn clock(&self) -> Option<Arc<Clock>> {
        Some(Arc::clone(&self.clock))
    }
}
