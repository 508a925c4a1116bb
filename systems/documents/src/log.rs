//! The log of a database: every change, in order, in the batch of the change itself.
//!
//! Change streams read it. An entry's time is a number that grows over all databases of the node: seconds
//! in the upper half, a counter in the lower. It is taken under the lock of the row, so within a row
//! entries appear in order, and whoever reads all rows up to a time that was taken first misses
//! none.
//!
//! Entries are idempotent: an update says which fields have which values, not how they changed.

use std::ops::{Bound, ControlFlow};
use std::sync::atomic::{AtomicU64, Ordering};

use beeline_documents_query::error::{Code, QueryError, Result};
use bson::spec::BinarySubtype;
use bson::{Bson, DateTime, Document, Timestamp, doc};

use crate::catalog::{Collection, Database};
use crate::engine::Engine;
use crate::layout::{kind, word};
use crate::reply::{close, name, open, text};
use crate::retry::Retry;
use crate::spare;
use crate::store::{Backing, Change, Stretch};
use crate::write::{Event, Witness};

/// Entries deleted under one lock.
const SLICE: usize = 512;

/// The time of the log.
#[derive(Debug, Default)]
pub struct Clock {
    last: AtomicU64,
}

impl Clock {
    /// A time after every other.
    pub fn next(&self, now_ms: u64) -> u64 {
        let least = ((now_ms / 1000) << 32) | 1;
        let mut last = self.last.load(Ordering::Relaxed);
        loop {
            let next = least.max(last + 1);
            match self.last.compare_exchange_weak(last, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return next,
                Err(newer) => last = newer,
            }
        }
    }

    /// The last time that was taken.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.last.load(Ordering::Acquire)
    }

    /// No time at or before this is given out any more.
    pub fn pass(&self, time: u64) {
        self.last.fetch_max(time, Ordering::AcqRel);
    }
}

/// A time as BSON.
#[must_use]
pub fn stamp(time: u64) -> Timestamp {
    Timestamp { time: (time >> 32) as u32, increment: time as u32 }
}

/// A time from BSON.
#[must_use]
pub fn time_of(stamp: &Timestamp) -> u64 {
    (u64::from(stamp.time) << 32) | u64::from(stamp.increment)
}

/// The key of an entry.
#[must_use]
pub fn key(time: u64) -> Vec<u8> {
    word(kind::LOG, &time.to_be_bytes())
}

/// The time in a key.
#[must_use]
pub fn time_in(key: &[u8]) -> u64 {
    key.get(1..)
        .and_then(|rest| rest.first_chunk::<8>())
        .map_or(0, |time| u64::from_be_bytes(*time))
}

fn entry(engine: &Engine, time: u64, operation: &str, namespace: &str) -> Document {
    doc! {
        "ts": stamp(time), "t": 1_i64, "v": 2_i64, "op": operation, "ns": namespace,
        "wall": DateTime::from_millis(engine.now_ms() as i64),
    }
}

fn encoded(entry: &Document) -> Result<Vec<u8>> {
    entry.to_vec().map_err(|error| QueryError::new(Code::InternalError, error.to_string()))
}

/// The change that logs a change of the catalog; none where there is no log.
///
/// Errors: an entry that cannot be written.
pub fn of_catalog(engine: &Engine, database: &Database, what: Document) -> Result<Vec<Change>> {
    if !engine.logs() {
        return Ok(Vec::new());
    }
    let time = engine.clock.next(engine.now_ms());
    let mut entry = entry(engine, time, "c", &format!("{}.$cmd", database.name));
    entry.insert("o", what);
    Ok(vec![Change::put(key(time), encoded(&entry)?)])
}

/// The change that logs, now, what an entry of a transaction says.
///
/// Errors: an entry that cannot be read.
pub fn at_time(engine: &Engine, bytes: &[u8]) -> Result<Change> {
    let time = engine.clock.next(engine.now_ms());
    let mut entry = crate::scan::decode(bytes)?;
    entry.insert("ts", stamp(time));
    entry.insert("wall", DateTime::from_millis(engine.now_ms() as i64));
    Ok(Change::put(key(time), encoded(&entry)?))
}

/// Puts a log entry, and the outcome of a retryable write, into the batch of each change.
#[derive(Debug)]
pub struct Recorder<'r> {
    /// The engine.
    pub engine: &'r Engine,
    /// The retryable write this is a statement of.
    pub retry: Option<Retry>,
    /// The statement reports a document, as findAndModify does: the new one, or the old one.
    pub reports: Option<bool>,
    /// The statement is an upsert.
    pub upsert: bool,
    /// The client asked that the validator is not looked at.
    pub bypass: bool,
}

impl<'r> Recorder<'r> {
    /// Of a write that is not retryable.
    #[must_use]
    pub fn plain(engine: &'r Engine) -> Self {
        Self { engine, retry: None, reports: None, upsert: false, bypass: false }
    }
}

/// What the entry of a document's change says, behind when and where.
fn recorded(
    recorder: &Recorder<'_>,
    collection: &Collection,
    (time, now_ms, operation): (u64, u64, &str),
    id: &Bson,
    what: &[u8],
) -> Result<Vec<u8>> {
    let mut out = spare::take(what.len() + collection.namespace.len() + 160);
    let whole = open(&mut out);
    name(&mut out, 0x11, "ts");
    out.extend(time.to_le_bytes());
    long(&mut out, "t", 1);
    long(&mut out, "v", 2);
    text(&mut out, "op", operation);
    text(&mut out, "ns", &collection.namespace);
    name(&mut out, 0x09, "wall");
    out.extend(now_ms.to_le_bytes());
    name(&mut out, 0x05, "ui");
    out.extend((collection.uuid.len() as u32).to_le_bytes());
    out.push(BinarySubtype::Uuid.into());
    out.extend(collection.uuid);
    if let Some(retry) = &recorder.retry {
        long(&mut out, "txnNumber", retry.number);
        name(&mut out, 0x10, "stmtId");
        out.extend(retry.statement.to_le_bytes());
    }
    name(&mut out, 0x03, "o2");
    append_id(&mut out, id)?;
    name(&mut out, 0x03, "o");
    out.extend(what);
    close(&mut out, whole);
    Ok(out)
}

fn long(out: &mut Vec<u8>, field: &str, value: i64) {
    name(out, 0x12, field);
    out.extend(value.to_le_bytes());
}

/// Appends `{ _id: id }`.
fn append_id(out: &mut Vec<u8>, id: &Bson) -> Result<()> {
    let start = open(out);
    match id {
        Bson::ObjectId(id) => {
            name(out, 0x07, "_id");
            out.extend(id.bytes());
        }
        Bson::Int64(id) => long(out, "_id", *id),
        Bson::Int32(id) => {
            name(out, 0x10, "_id");
            out.extend(id.to_le_bytes());
        }
        Bson::String(id) => text(out, "_id", id),
        other => {
            out.truncate(start);
            out.extend(encoded(&doc! { "_id": other.clone() })?);
            return Ok(());
        }
    }
    close(out, start);
    Ok(())
}

impl Witness for Recorder<'_> {
    fn bypasses(&self) -> bool {
        self.bypass
    }

    fn changes(&mut self, collection: &Collection, event: &Event<'_>) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        if self.engine.logs() {
            let now_ms = self.engine.now_ms();
            let time = self.engine.clock.next(now_ms);
            let operation = match event {
                Event::Insert { .. } => "i",
                Event::Update { .. } => "u",
                Event::Delete { .. } => "d",
            };
            let when = (time, now_ms, operation);
            let record = |id: &Bson, what: &[u8]| recorded(self, collection, when, id, what);
            let entry = match event {
                Event::Insert { id, bytes } => record(id, bytes)?,
                Event::Update { id, before, after, replaced } => {
                    let what = match replaced {
                        true => encoded(after)?,
                        false => encoded(&doc! { "$v": 2, "diff": difference(before, after) })?,
                    };
                    record(id, &what)?
                }
                Event::Delete { id, .. } => {
                    let mut what = Vec::new();
                    append_id(&mut what, id)?;
                    record(id, &what)?
                }
            };
            changes.push(Change::put(key(time), entry));
        }
        if let Some(retry) = &self.retry {
            let mut outcome = match event {
                Event::Insert { id, .. } if self.upsert => {
                    doc! { "n": 1, "upserted": (*id).clone() }
                }
                Event::Insert { .. } | Event::Delete { .. } => doc! { "n": 1 },
                Event::Update { .. } => doc! { "n": 1, "nModified": 1 },
            };
            let reported = match (self.reports, event) {
                (Some(true), Event::Insert { bytes, .. }) => Some(crate::scan::decode(bytes)?),
                (Some(true), Event::Update { after, .. }) => Some((*after).clone()),
                (Some(false), Event::Update { before, .. }) => Some((*before).clone()),
                (Some(false), Event::Delete { before, .. }) => Some(crate::scan::decode(before)?),
                _ => None,
            };
            if let Some(reported) = reported {
                outcome.insert("value", reported);
            }
            changes.extend(retry.changes(outcome, self.engine.now_ms())?);
        }
        Ok(changes)
    }
}

/// What an update changed: `u` fields and their values, `d` fields that went, `t` arrays that
/// became shorter.
#[must_use]
pub fn difference(before: &Document, after: &Document) -> Document {
    let (mut updated, mut removed, mut truncated) = (Document::new(), Vec::new(), Vec::new());
    compare(before, after, "", &mut updated, &mut removed, &mut truncated);
    doc! { "u": updated, "d": removed, "t": truncated }
}

fn compare(
    before: &Document,
    after: &Document,
    prefix: &str,
    updated: &mut Document,
    removed: &mut Vec<Bson>,
    truncated: &mut Vec<Bson>,
) {
    for name in before.keys().filter(|name| !after.contains_key(name)) {
        removed.push(Bson::String(format!("{prefix}{name}")));
    }
    for (name, new) in after {
        let path = format!("{prefix}{name}");
        match (before.get(name), new) {
            (Some(old), new) if old == new => {}
            (Some(Bson::Document(old)), Bson::Document(new)) => {
                compare(old, new, &format!("{path}."), updated, removed, truncated);
            }
            (Some(Bson::Array(old)), Bson::Array(new)) if shares_a_start(old, new) => {
                if new.len() < old.len() {
                    truncated.push(Bson::Document(
                        doc! { "field": path.clone(), "newSize": new.len() as i32 },
                    ));
                }
                for (at, value) in new.iter().enumerate() {
                    match (old.get(at), value) {
                        (Some(old), value) if old == value => {}
                        (Some(Bson::Document(old)), Bson::Document(value)) => {
                            compare(
                                old,
                                value,
                                &format!("{path}.{at}."),
                                updated,
                                removed,
                                truncated,
                            );
                        }
                        _ => drop(updated.insert(format!("{path}.{at}"), value.clone())),
                    }
                }
            }
            _ => drop(updated.insert(path, new.clone())),
        }
    }
}

/// Whether an array is better told by its elements than whole.
fn shares_a_start(old: &[Bson], new: &[Bson]) -> bool {
    !old.is_empty()
        && !new.is_empty()
        && old.iter().zip(new).filter(|(old, new)| old == new).count() * 2
            >= old.len().min(new.len())
}

/// Refuses a stream that missed something.
pub(crate) fn history_lost<T>() -> Result<T> {
    beeline_documents_query::error::fail(
        Code::ChangeStreamHistoryLost,
        "Resume of change stream was not possible, as the resume point may no longer be in the oplog.",
    )
    .map_err(not_resumable)
}

/// Tells the driver that opening the stream again does not help.
pub(crate) fn not_resumable(error: QueryError) -> QueryError {
    error.with(doc! { "errorLabels": ["NonResumableChangeStreamError"] })
}

/// Entries of a database behind a time, up to a time, at most about so many bytes of them. False:
/// there are more.
///
/// Errors: the store's, [`Code::ChangeStreamHistoryLost`].
pub fn read(
    row: &mut dyn Backing,
    behind: u64,
    until: u64,
    most: usize,
    out: &mut Vec<(u64, Document)>,
) -> Result<bool> {
    if trimmed(row)? > behind {
        return history_lost();
    }
    let stretch = Stretch { from: Bound::Excluded(key(behind)), to: Bound::Included(key(until)) };
    let (mut bytes, mut failure) = (0, None);
    row.range(&stretch, false, &mut |key, value| {
        bytes += value.len();
        match crate::scan::decode(value) {
            Ok(entry) => out.push((time_in(key), entry)),
            Err(error) => failure = Some(error),
        }
        if failure.is_some() || bytes >= most {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    failure.map_or(Ok(bytes < most), Err)
}

/// Deletes the whole log of a database.
///
/// Errors: the store's.
pub fn drop_all(engine: &Engine, database: &Database) -> Result<()> {
    while engine.with(database, |row| cut(row, u64::MAX, 0))? > 0 {}
    Ok(())
}

/// Deletes the oldest entries, one slice of them, until about `most` of `bytes` bytes are left;
/// returns how many are.
fn cut(row: &mut dyn Backing, bytes: u64, most: u64) -> Result<u64> {
    let (mut changes, mut last, mut left) = (Vec::new(), 0, bytes);
    row.range(&Stretch::of_prefix(&[kind::LOG]), false, &mut |key, value| {
        left = left.saturating_sub((key.len() + value.len()) as u64);
        last = time_in(key);
        changes.push(Change::delete(key.to_vec()));
        if left <= most || changes.len() >= SLICE {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    if changes.is_empty() {
        return Ok(0);
    }
    changes.push(Change::put(word(kind::NUMBERS, b"trimmed"), last.to_be_bytes().to_vec()));
    row.apply(&changes)?;
    Ok(left)
}

/// The time up to which entries were deleted.
fn trimmed(row: &mut dyn Backing) -> Result<u64> {
    let mut bytes = Vec::new();
    row.get(&word(kind::NUMBERS, b"trimmed"), &mut bytes)?;
    Ok(bytes.first_chunk::<8>().map_or(0, |time| u64::from_be_bytes(*time)))
}

/// The last time in the log of a row.
///
/// Errors: the store's.
pub fn last(row: &mut dyn Backing) -> Result<u64> {
    let mut last = trimmed(row)?;
    row.range(&Stretch::of_prefix(&[kind::LOG]), true, &mut |key, _| {
        last = last.max(time_in(key));
        ControlFlow::Break(())
    })?;
    Ok(last)
}

/// Deletes the oldest entries of each database until its log keeps to `most` bytes.
///
/// Errors: the store's.
pub fn trim(engine: &Engine, most: u64) -> Result<()> {
    for database in engine.databases() {
        let mut bytes = 0;
        let mut behind = Bound::Included(vec![kind::LOG]);
        // Newest first would end sooner; oldest first keeps the lock short and the code plain.
        loop {
            let (part, next) = engine.with(&database, |row| {
                let stretch =
                    Stretch { from: behind.clone(), to: Bound::Excluded(vec![kind::LOG + 1]) };
                let (mut part, mut looked, mut next) = (0, 0, None);
                row.range(&stretch, false, &mut |key, value| {
                    part += (key.len() + value.len()) as u64;
                    looked += 1;
                    if looked < SLICE {
                        return ControlFlow::Continue(());
                    }
                    next = Some(key.to_vec());
                    ControlFlow::Break(())
                })?;
                Ok((part, next))
            })?;
            bytes += part;
            match next {
                Some(next) => behind = Bound::Excluded(next),
                None => break,
            }
        }
        while bytes > most {
            bytes = engine.with(&database, |row| cut(row, bytes, most))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_only_grow() {
        let clock = Clock::default();
        let first = clock.next(5_000);
        assert_eq!(first, (5 << 32) | 1);
        assert_eq!(clock.next(4_000), first + 1);
        assert_eq!(time_of(&stamp(first)), first);
        clock.pass(9 << 32);
        assert_eq!(clock.next(0), (9 << 32) + 1);
    }

    #[test]
    fn an_entry_is_the_document_it_stands_for() {
        use std::sync::Arc;

        use bson::oid::ObjectId;

        let store = Arc::new(crate::store::Memory::default());
        let engine = Engine::open(store, &crate::EngineOptions::default()).unwrap();
        let database = engine.database_or_new("d").unwrap();
        let collection = engine.collection_or_new(&database, "c").unwrap();
        let retry = Retry { session: vec![1; 20], number: 5, statement: 2 };
        let ids = [
            Bson::Int32(7),
            Bson::Int64(-7),
            Bson::String("x\u{e4}".to_owned()),
            Bson::ObjectId(ObjectId::new()),
            Bson::Document(doc! { "a": 1 }),
            Bson::Double(1.5),
        ];
        for (id, retry) in ids.iter().zip([None, Some(retry)].into_iter().cycle()) {
            let before = doc! { "_id": id.clone(), "n": 1 };
            let after = doc! { "_id": id.clone(), "n": 2, "deep": { "list": [1, 2] } };
            let (old, new) = (before.to_vec().unwrap(), after.to_vec().unwrap());
            let update = |replaced| Event::Update { id, before: &before, after: &after, replaced };
            let said = doc! { "$v": 2, "diff": difference(&before, &after) };
            for (event, operation, what) in [
                (Event::Insert { id, bytes: &new }, "i", after.clone()),
                (update(true), "u", after.clone()),
                (update(false), "u", said),
                (Event::Delete { id, before: &old }, "d", doc! { "_id": id.clone() }),
            ] {
                let mut recorder = Recorder { retry: retry.clone(), ..Recorder::plain(&engine) };
                let changes = recorder.changes(&collection, &event).unwrap();
                let (key, bytes) = (&changes[0].key, changes[0].value.as_ref().unwrap());
                let told = crate::scan::decode(bytes).unwrap();
                let mut meant = entry(&engine, time_in(key), operation, "d.c");
                meant.insert("wall", told.get("wall").cloned());
                meant.insert("ui", collection.uuid_value());
                if let Some(retry) = &retry {
                    meant.extend(doc! { "txnNumber": retry.number, "stmtId": retry.statement });
                }
                meant.extend(doc! { "o2": { "_id": id.clone() }, "o": what });
                assert_eq!(&meant.to_vec().unwrap(), bytes, "{told}");
            }
        }
    }

    #[test]
    fn a_difference_names_fields_elements_and_ends() {
        let before = doc! { "a": 1, "b": { "c": 1, "d": 2 }, "l": [1, 2, 3], "x": 1 };
        let after = doc! { "a": 2, "b": { "c": 1 }, "l": [1, 2, 3, 4], "y": [1] };
        assert_eq!(
            difference(&before, &after),
            doc! { "u": { "a": 2, "l.3": 4, "y": [1] }, "d": ["x", "b.d"], "t": [] }
        );
        assert_eq!(
            difference(&doc! { "l": [1, 2, 3] }, &doc! { "l": [1, 2] }),
            doc! { "u": {}, "d": [], "t": [ { "field": "l", "newSize": 2 } ] }
        );
    }
}
