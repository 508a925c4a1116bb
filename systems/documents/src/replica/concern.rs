//! What a member refuses by its role, and replies that wait for other members.
//!
//! A write is answered once as many members have it as its write concern asks for; a read of read concern
//! `majority` once a majority has everything it may have seen. The connection's task waits, no thread.

use std::sync::atomic::Ordering;
use std::time::Duration;

use beeline_documents_query::error::{Code, QueryError, Result, fail};
use bson::{Bson, Document, doc};

use crate::commands::failure;
use crate::engine::whole_field;
use crate::layout::{SYSTEM_ROW, kind, word};
use crate::operation::Operation;
use crate::replica::{Replica, State, source};
use crate::reply::Reply;
use crate::store::{Change, with_row};

/// Commands that change documents.
const WRITES: &[&str] = &[
    "insert",
    "update",
    "delete",
    "findAndModify",
    "findandmodify",
    "create",
    "drop",
    "dropDatabase",
    "createIndexes",
    "dropIndexes",
    "deleteIndexes",
    "renameCollection",
    "collMod",
    "createUser",
    "updateUser",
    "dropUser",
    "commitTransaction",
];
/// Commands that show documents.
const READS: &[&str] = &[
    "find",
    "count",
    "distinct",
    "aggregate",
    "explain",
    "listCollections",
    "listIndexes",
    "listDatabases",
    "collStats",
    "collstats",
    "dbStats",
    "dbstats",
    "validate",
];
/// After these a driver looks for the primary and tries again.
const RETRYABLE: &[Code] = &[
    Code::NotWritablePrimary,
    Code::NotPrimaryNoSecondaryOk,
    Code::NotPrimaryOrSecondary,
    Code::PrimarySteppedDown,
    Code::InterruptedDueToReplStateChange,
    Code::InterruptedAtShutdown,
];
/// A reply is held for so long at most.
const LONGEST_HELD: Duration = Duration::from_secs(600);
/// So long a secondary waits for what a client saw elsewhere.
const BEHIND: Duration = Duration::from_secs(10);

/// How many members have to have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needed {
    /// More than half, durably.
    Majority,
    /// So many.
    Members(usize),
}

/// A reply that waits.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    needed: Needed,
    journal: bool,
    /// Everything up to here.
    time: u64,
    /// The term it was written in; a read at a secondary has none.
    term: Option<u64>,
    /// How often this member had turned to other documents when it was admitted.
    turned: u64,
    /// When it is given up, of the member's own clock.
    until_ms: u64,
    /// The reply is a read's.
    reads: bool,
}

/// Why a reply does not wait any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Released {
    Done,
    Overdue,
    SteppedDown,
    Never,
}

fn is_read_elsewhere(body: &Document) -> bool {
    let mode = body.get_document("$readPreference").and_then(|given| given.get_str("mode"));
    mode.is_ok_and(|mode| mode != "primary")
}

fn writes_results(body: &Document) -> bool {
    let Ok(stages) = body.get_array("pipeline") else { return false };
    stages
        .iter()
        .filter_map(Bson::as_document)
        .any(|stage| stage.contains_key("$out") || stage.contains_key("$merge"))
}

fn is_write(name: &str, body: &Document) -> bool {
    WRITES.contains(&name) || name == "aggregate" && writes_results(body)
}

/// What a write concern asks for; `None`: nothing beyond this member.
///
/// Errors: a concern that there is not.
pub fn parse(concern: Option<&Document>) -> Result<Option<Needed>> {
    match concern.and_then(|concern| concern.get("w")) {
        None => Ok(Some(Needed::Majority)),
        Some(Bson::String(word)) if word == "majority" => Ok(Some(Needed::Majority)),
        Some(Bson::String(word)) => fail(
            Code::UnknownReplWriteConcern,
            format!("No write concern mode named '{word}' found in replica set configuration"),
        ),
        Some(number) => match beeline_documents_query::value::integral(number) {
            Some(0..=1) => Ok(None),
            Some(number @ 2..=50) => Ok(Some(Needed::Members(number as usize))),
            _ => fail(Code::FailedToParse, "w has to be a whole number from 0 to 50, or a string"),
        },
    }
}

/// Labels that tell a driver to try again.
pub fn label(name: &str, body: &Document, code: Code, reply: &mut Document) {
    if !RETRYABLE.contains(&code) {
        return;
    }
    let ends = matches!(name, "commitTransaction" | "abortTransaction");
    let label = match (body.contains_key("txnNumber"), body.contains_key("autocommit")) {
        (true, true) if !ends => "TransientTransactionError",
        (true, _) => "RetryableWriteError",
        _ => return,
    };
    reply.insert("errorLabels", vec![label]);
}

impl Replica {
    /// Refuses what a member of this role does not do.
    ///
    /// Errors: the codes after which a driver looks for another member.
    pub fn admit(&self, name: &str, body: &Document) -> Result<()> {
        let linearizable = body.get_document("readConcern").is_ok_and(|concern| {
            concern.get_str("level").is_ok_and(|level| level == "linearizable")
        });
        if is_write(name, body) || body.contains_key("autocommit") || linearizable {
            if is_write(name, body) {
                parse(body.get_document("writeConcern").ok())?;
            }
            if !self.writes() {
                return fail(Code::NotWritablePrimary, "not primary");
            }
            return Ok(());
        }
        if !READS.contains(&name) && name != "getMore" {
            return Ok(());
        }
        match self.state() {
            State::Primary if self.writes() || is_read_elsewhere(body) => Ok(()),
            // It may not know of a newer primary: a client that wants the primary's answer asks again.
            State::Primary | State::Secondary if is_read_elsewhere(body) || name == "getMore" => {
                Ok(())
            }
            State::Primary | State::Secondary => {
                fail(Code::NotPrimaryNoSecondaryOk, "not primary and secondaryOk=false")
            }
            state => fail(
                Code::NotPrimaryOrSecondary,
                format!("node is not in primary or recovering state: {}", state.word()),
            ),
        }
    }

    /// What the reply to a command waits for that was admitted in a term and succeeded. Where another term began
    /// since, what it wrote before may have been taken back: the reply is given up, as is that of a read whose
    /// documents were taken back or copied meanwhile.
    ///
    /// Errors: the store's.
    pub fn hold(&self, name: &str, body: &Document, operation: &Operation) -> Result<Option<Held>> {
        let Operation { majority, term, turned, .. } = *operation;
        let is_read = READS.contains(&name) || name == "getMore";
        if is_read && turned != self.turned() {
            return fail(
                Code::InterruptedDueToReplStateChange,
                "this member's documents became others while the command read them",
            );
        }
        let now_ms = self.agreed.gate.now_ms();
        let within = |most: Option<i64>| {
            let longest = LONGEST_HELD.as_millis() as u64;
            let wait = most.filter(|most| *most > 0).map_or(longest, |most| most as u64);
            now_ms.saturating_add(wait.min(longest))
        };
        if is_write(name, body) {
            // What a transaction does waits for its commit.
            if body.contains_key("autocommit") && name != "commitTransaction" {
                return Ok(None);
            }
            let concern = body.get_document("writeConcern").ok();
            let Some(needed) = parse(concern)? else { return Ok(None) };
            let journal = concern.is_some_and(|concern| concern.get_bool("j").unwrap_or(false));
            let until_ms = within(concern.and_then(|concern| whole_field(concern, "wtimeout")));
            let time = self.store.last().place.time;
            let term = Some(term.unwrap_or(0));
            return Ok(Some(Held { needed, journal, time, term, turned, until_ms, reads: false }));
        }
        if body.contains_key("autocommit") || !majority {
            return Ok(None);
        }
        let until_ms = within(whole_field(body, "maxTimeMS"));
        let linearizable = body.get_document("readConcern").is_ok_and(|concern| {
            concern.get_str("level").is_ok_and(|level| level == "linearizable")
        });
        if linearizable {
            // What a majority takes behind the read shows that nobody else led at the time of the read.
            let mark = word(kind::NUMBERS, b"linearizable");
            let change = Change::put(mark, Vec::new());
            with_row(&*self.store, SYSTEM_ROW, |row| row.apply(&[change]).map(drop))?;
        }
        let time = self.store.last().place.time;
        let term = if linearizable { Some(term.unwrap_or(0)) } else { None };
        let needed = Needed::Majority;
        Ok(Some(Held { needed, journal: true, time, term, turned, until_ms, reads: true }))
    }

    fn is_released(&self, held: &Held) -> Option<Released> {
        let members = self.options.members.len();
        if matches!(held.needed, Needed::Members(count) if count > members) {
            return Some(Released::Never);
        }
        let led = match held.term {
            None => self.is_readable() && self.turned() == held.turned,
            Some(term) => self.state() == State::Primary && self.agreed.is(term, self.options.me),
        };
        if !led || self.stopping.load(Ordering::SeqCst) {
            return Some(Released::SteppedDown);
        }
        let done = match held.needed {
            Needed::Majority => self.commit() >= held.time,
            Needed::Members(count) => crate::engine::lock(&self.standing)
                .as_ref()
                .is_some_and(|standing| standing.has(count, held.time, held.journal)),
        };
        if done {
            return Some(Released::Done);
        }
        // A primary that no majority talks to gives its clients back before they give up.
        if held.term.is_some() && !self.writes() {
            return Some(Released::SteppedDown);
        }
        (self.agreed.gate.now_ms() >= held.until_ms).then_some(Released::Overdue)
    }

    /// Waits until a reply may go; what goes then.
    pub async fn release(&self, held: Held, reply: Reply, name: &str, body: &Document) -> Reply {
        let released = loop {
            // Registered before the look, so that no move is missed between the two.
            let moved = self.moved.notified();
            tokio::pin!(moved);
            moved.as_mut().enable();
            if let Some(released) = self.is_released(&held) {
                break released;
            }
            let left = held.until_ms.saturating_sub(self.agreed.gate.now_ms()).min(100);
            tokio::select! {
                () = moved => {}
                () = tokio::time::sleep(Duration::from_millis(left.max(1))) => {}
            }
        };
        let refused = |code: Code, why: &str| {
            let mut refused = failure(&QueryError::new(code, why));
            label(name, body, code, &mut refused);
            Reply::Document(refused)
        };
        match released {
            Released::Done => reply,
            Released::SteppedDown => refused(
                Code::PrimarySteppedDown,
                "this member stopped leading while the reply waited for other members",
            ),
            Released::Overdue if held.reads => {
                refused(Code::MaxTimeMsExpired, "a majority did not have what was read in time")
            }
            Released::Overdue => {
                self.counts.overdue.fetch_add(1, Ordering::Relaxed);
                let why = "waiting for replication timed out";
                with_concern_error(
                    reply,
                    Code::WriteConcernFailed,
                    "WriteConcernFailed",
                    why,
                    doc! { "wtimeout": true },
                )
            }
            Released::Never => with_concern_error(
                reply,
                Code::UnsatisfiableWriteConcern,
                "UnsatisfiableWriteConcern",
                "Not enough data-bearing nodes",
                Document::new(),
            ),
        }
    }

    /// Waits until this member has what a client saw at another one.
    ///
    /// Errors: it did not come in time.
    pub async fn catch_up(&self, body: &Document) -> Result<()> {
        let seen = body.get_document("readConcern").ok().and_then(|concern| {
            match concern.get("afterClusterTime") {
                Some(Bson::Timestamp(stamp)) => Some(crate::log::time_of(stamp)),
                _ => None,
            }
        });
        let Some(seen) = seen else { return Ok(()) };
        let began_ms = self.agreed.gate.now_ms();
        loop {
            let moved = self.moved.notified();
            tokio::pin!(moved);
            moved.as_mut().enable();
            if self.store.reached() >= seen || self.state() == State::Primary {
                return Ok(());
            }
            if self.agreed.gate.now_ms() - began_ms > BEHIND.as_millis() as u64 {
                return fail(
                    Code::MaxTimeMsExpired,
                    "this member did not reach the time that the client saw elsewhere",
                );
            }
            tokio::select! {
                () = moved => {}
                () = tokio::time::sleep(Duration::from_millis(50)) => {}
            }
        }
    }

    /// Orders for this member: `resync`, and `beelineSync` with `pause` or `resume`.
    ///
    /// Errors: a primary, a word that is none.
    pub fn order(&self, name: &str, body: &Document) -> Result<Reply> {
        match (name, body.get_str(name).unwrap_or_default()) {
            ("resync", _) if self.state() == State::Primary => fail(
                Code::IllegalOperation,
                "the primary has no member to copy from: give this order to a secondary",
            ),
            ("resync", _) => {
                self.resync();
                Ok(Reply::ok())
            }
            (_, "pause") => {
                self.pause(true);
                Ok(Reply::ok())
            }
            (_, "resume") => {
                self.pause(false);
                Ok(Reply::ok())
            }
            (_, other) => {
                fail(Code::BadValue, format!("beelineSync takes pause or resume, not {other:?}"))
            }
        }
    }

    /// Whether a command is a member's own: answered without a look at the role.
    #[must_use]
    pub fn is_internal(name: &str) -> bool {
        name == source::COMMAND
    }
}

fn with_concern_error(reply: Reply, code: Code, name: &str, why: &str, info: Document) -> Reply {
    match reply {
        Reply::Document(mut document) => {
            let error =
                doc! { "code": code as i32, "codeName": name, "errmsg": why, "errInfo": info };
            document.insert("writeConcernError", error);
            Reply::Document(document)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_concern_says_how_many_members_are_waited_for() {
        assert_eq!(parse(None).unwrap(), Some(Needed::Majority));
        for (concern, needed) in [
            (doc! {}, Some(Needed::Majority)),
            (doc! { "w": "majority", "j": true }, Some(Needed::Majority)),
            (doc! { "w": 0 }, None),
            (doc! { "w": 1_i64 }, None),
            (doc! { "w": 3.0 }, Some(Needed::Members(3))),
        ] {
            assert_eq!(parse(Some(&concern)).unwrap(), needed, "{concern}");
        }
        for (concern, code) in [
            (doc! { "w": "nowhere" }, Code::UnknownReplWriteConcern),
            (doc! { "w": -1 }, Code::FailedToParse),
            (doc! { "w": 51 }, Code::FailedToParse),
            (doc! { "w": {} }, Code::FailedToParse),
        ] {
            assert_eq!(parse(Some(&concern)).unwrap_err().code, code, "{concern}");
        }
    }

    #[test]
    fn drivers_are_told_what_to_send_again() {
        let labelled = |name: &str, body: Document, code: Code| {
            let mut reply = Document::new();
            label(name, &body, code, &mut reply);
            reply.get_array("errorLabels").ok().map(|labels| labels[0].as_str().unwrap().to_owned())
        };
        let statement = || doc! { "txnNumber": 1_i64 };
        let within = || doc! { "txnNumber": 1_i64, "autocommit": false };
        let again = Some("RetryableWriteError".to_owned());
        assert_eq!(labelled("insert", statement(), Code::NotWritablePrimary), again);
        assert_eq!(labelled("commitTransaction", within(), Code::PrimarySteppedDown), again);
        let anew = Some("TransientTransactionError".to_owned());
        assert_eq!(labelled("insert", within(), Code::NotWritablePrimary), anew);
        assert_eq!(labelled("insert", doc! {}, Code::NotWritablePrimary), None);
        assert_eq!(labelled("insert", statement(), Code::DuplicateKey), None);
    }

    #[test]
    fn what_changes_documents_is_known_by_its_name_or_its_pipeline() {
        let out = doc! { "pipeline": [{ "$match": {} }, { "$out": "c" }] };
        assert!(is_write("aggregate", &out) && is_write("insert", &doc! {}));
        assert!(!is_write("aggregate", &doc! { "pipeline": [] }) && !is_write("find", &doc! {}));
        let elsewhere = doc! { "$readPreference": { "mode": "secondary" } };
        assert!(is_read_elsewhere(&elsewhere) && !is_read_elsewhere(&doc! {}));
        assert!(!is_read_elsewhere(&doc! { "$readPreference": { "mode": "primary" } }));
    }
}
