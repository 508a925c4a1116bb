//! Retryable writes: a statement that is sent again is answered with what it did the first time.
//!
//! Invariant: the outcome is stored in the batch of the statement's change, so after a crash either
//! both are there or neither.

use std::ops::ControlFlow;

use beeline_documents_query::error::{Code, QueryError, Result, fail};
use bson::{Document, doc};

use crate::engine::{Engine, whole_field};
use crate::layout::{kind, word};
use crate::scan::{SLICE, decode};
use crate::store::{Backing, Change, Stretch};

/// Outcomes are kept this long after their session wrote last: longer than a session lives.
const KEPT_MS: u64 = 60 * 60 * 1000;

/// Bytes of a statement's number in a key.
const STATEMENT: usize = size_of::<i32>();

/// A statement of a retryable write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    /// The session, and the user that it belongs to.
    pub session: Vec<u8>,
    /// The session's number of the write.
    pub number: i64,
    /// Which statement of it.
    pub statement: i32,
}

impl Retry {
    fn head(&self) -> Vec<u8> {
        word(kind::OUTCOME, &self.session)
    }

    fn place(&self) -> Vec<u8> {
        let mut place = self.head();
        place.extend(self.statement.to_be_bytes());
        place
    }

    /// What the statement did, if it ran already.
    ///
    /// Errors: [`Code::TransactionTooOld`] when the session went on since; the store's.
    pub fn outcome(&self, row: &mut dyn Backing) -> Result<Option<Document>> {
        let mut bytes = Vec::new();
        if !row.get(&self.head(), &mut bytes)? {
            return Ok(None);
        }
        let newest = whole_field(&decode(&bytes)?, "txn").unwrap_or(-1);
        if newest > self.number {
            return fail(
                Code::TransactionTooOld,
                format!(
                    "Retryable write with txnNumber {} is prohibited on this session because a newer retryable write with txnNumber {newest} has already started on this session.",
                    self.number
                ),
            );
        }
        if newest < self.number || !row.get(&self.place(), &mut bytes)? {
            return Ok(None);
        }
        let outcome = decode(&bytes)?;
        Ok((whole_field(&outcome, "txn") == Some(self.number)).then_some(outcome))
    }

    /// The change that keeps the outcome of a transaction's commit.
    ///
    /// Errors: an outcome that cannot be written.
    pub fn committed(&self, now_ms: u64) -> Result<Change> {
        let head = doc! { "txn": self.number, "at": now_ms as i64, "committed": true };
        let bytes = head
            .to_vec()
            .map_err(|error| QueryError::new(Code::InternalError, error.to_string()))?;
        Ok(Change::put(self.head(), bytes))
    }

    /// Whether the transaction of this number was committed.
    ///
    /// Errors: the store's.
    pub fn was_committed(&self, row: &mut dyn Backing) -> Result<bool> {
        let mut bytes = Vec::new();
        if !row.get(&self.head(), &mut bytes)? {
            return Ok(false);
        }
        let head = decode(&bytes)?;
        Ok(whole_field(&head, "txn") == Some(self.number)
            && head.get_bool("committed").unwrap_or(false))
    }

    /// The changes that keep an outcome.
    ///
    /// Errors: an outcome that cannot be written.
    pub fn changes(&self, mut outcome: Document, now_ms: u64) -> Result<Vec<Change>> {
        let encoded = |document: &Document| {
            document
                .to_vec()
                .map_err(|error| QueryError::new(Code::InternalError, error.to_string()))
        };
        outcome.insert("txn", self.number);
        let head = doc! { "txn": self.number, "at": now_ms as i64 };
        Ok(vec![
            Change::put(self.head(), encoded(&head)?),
            Change::put(self.place(), encoded(&outcome)?),
        ])
    }
}

/// Deletes the outcomes of sessions that wrote nothing for long, a slice at a time.
///
/// Errors: the store's.
pub fn reap(engine: &Engine) -> Result<()> {
    let until = engine.now_ms().saturating_sub(KEPT_MS) as i64;
    for database in engine.databases() {
        let heads = engine.with(&database, |row| {
            let mut heads = Vec::new();
            row.range(&Stretch::of_prefix(&[kind::OUTCOME]), false, &mut |key, value| {
                let at = decode(value).ok().and_then(|head| whole_field(&head, "at"));
                if at.is_some_and(|at| at < until) {
                    heads.push(key.to_vec());
                }
                ControlFlow::Continue(())
            })?;
            Ok(heads)
        })?;
        for head in heads {
            while !engine.with(&database, |row| reap_slice(row, &head, until))? {}
        }
    }
    Ok(())
}

/// Deletes some outcomes of a session that wrote nothing since a time; true: none is left to delete.
fn reap_slice(row: &mut dyn Backing, head: &[u8], until: i64) -> Result<bool> {
    let mut bytes = Vec::new();
    // The session may have written again since.
    let stale = row.get(head, &mut bytes)?
        && whole_field(&decode(&bytes)?, "at").is_some_and(|at| at < until);
    if !stale {
        return Ok(true);
    }
    let mut changes = Vec::new();
    row.range(&Stretch::of_prefix(head), false, &mut |key, _| {
        // Its own statements, not those of a session whose name begins like it.
        if key.len() == head.len() + STATEMENT {
            changes.push(Change::delete(key.to_vec()));
        }
        if changes.len() < SLICE { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    let last = changes.len() < SLICE;
    // What tells of the session goes last: until then what is left is found again.
    if last {
        changes.push(Change::delete(head.to_vec()));
    }
    row.apply(&changes)?;
    Ok(last)
}
