//! Commands that fail on order: MongoDB's fail points `failCommand` and `onPrimaryTransactionalWrite`.
//!
//! The drivers' specification tests ask for them; a node has them where `--documents-test-commands` is on, as
//! MongoDB's `enableTestCommands`. They strike commands of the MongoDB wire.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use beeline_documents_query::error::{Code, QueryError, Result, fail};
use beeline_documents_query::value::{integral, truthy};
use bson::{Bson, Document, doc};

use super::Context;
use crate::engine::lock;
use crate::reply::Reply;

/// The longest time a command is held up.
const LONGEST_BLOCK_MS: i64 = 60_000;
/// Codes after which a driver tries again: MongoDB's list.
const RETRYABLE: &[i64] = &[6, 7, 89, 91, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436];
/// Of these a driver begins a transaction again.
const TRANSIENT: &[i64] = &[24, 112, 246, 251, 267];

/// The fail points that are set.
#[derive(Debug, Default)]
pub struct FailPoints {
    is_on: bool,
    /// Some is set: what commands look at.
    armed: AtomicBool,
    set: Mutex<BTreeMap<String, FailPoint>>,
}

#[derive(Debug)]
struct FailPoint {
    /// Commands that it lets pass first.
    skip: i64,
    /// Commands that it strikes; `None`: every one.
    left: Option<i64>,
    data: Document,
}

/// What becomes of a command.
pub(super) enum Struck {
    /// Nothing.
    No,
    /// It does not run; this is its reply.
    Instead(Reply),
    /// It runs; then the connection ends, or its reply has these fields too.
    Behind { hangs_up: bool, fields: Document },
}

impl FailPoints {
    pub(crate) fn new(is_on: bool) -> Self {
        Self { is_on, ..Self::default() }
    }

    /// Whether there are any.
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Whether some is set.
    pub(super) fn are_armed(&self) -> bool {
        self.armed.load(Ordering::Acquire)
    }

    /// The data of a fail point that strikes a command, which counts.
    fn strike(&self, name: &str, meant: impl Fn(&Document) -> bool) -> Option<Document> {
        let mut set = lock(&self.set);
        let point = set.get_mut(name).filter(|point| meant(&point.data))?;
        if point.skip > 0 {
            point.skip -= 1;
            return None;
        }
        if let Some(left) = &mut point.left {
            if *left <= 0 {
                return None;
            }
            *left -= 1;
        }
        Some(point.data.clone())
    }
}

/// The command `configureFailPoint`.
pub(super) fn configure(context: &Context<'_>) -> Result<Reply> {
    let points = &context.engine.fail_points;
    let body = &context.request.body;
    if !points.is_on {
        return fail(
            Code::CommandNotFound,
            "no such command: 'configureFailPoint'; --documents-test-commands on has it",
        );
    }
    let name = match body.get_str("configureFailPoint") {
        Ok(name @ ("failCommand" | "onPrimaryTransactionalWrite")) => name,
        _ => return fail(Code::FailPointEnabled, "there is no fail point of this name"),
    };
    let number = |mode: &Document, field: &str| mode.get(field).and_then(integral);
    let (skip, left) = match body.get("mode") {
        Some(Bson::String(word)) if word == "off" => (0, Some(0)),
        Some(Bson::String(word)) if word == "alwaysOn" => (0, None),
        Some(Bson::Document(mode)) => match (number(mode, "times"), number(mode, "skip")) {
            (Some(times), _) => (0, Some(times)),
            (None, Some(skip)) => (skip, None),
            _ => return fail(Code::BadValue, "a mode is 'off', 'alwaysOn', { times } or { skip }"),
        },
        _ => return fail(Code::BadValue, "a mode is 'off', 'alwaysOn', { times } or { skip }"),
    };
    let data = context.document("data")?.cloned().unwrap_or_default();
    let mut set = lock(&points.set);
    match left {
        Some(0) => drop(set.remove(name)),
        _ => drop(set.insert(name.to_owned(), FailPoint { skip, left, data })),
    }
    points.armed.store(!set.is_empty(), Ordering::Release);
    Ok(Reply::Document(doc! { "count": 0, "ok": 1.0 }))
}

/// What the fail points do to a command that is about to run.
pub(super) fn strike(context: &mut Context<'_>, name: &str) -> Struck {
    let points = &context.engine.fail_points;
    if !points.are_armed() || name == "configureFailPoint" {
        return Struck::No;
    }
    let body = &context.request.body;
    let application = application_of(context);
    let is_named = |data: &Document| {
        let names = data.get_array("failCommands").into_iter().flatten();
        let of = data.get_str("appName").ok();
        names.filter_map(Bson::as_str).any(|one| one == name)
            && of.is_none_or(|of| application.as_deref() == Some(of))
    };
    let is_retryable_write = body.contains_key("txnNumber") && !body.contains_key("autocommit");
    if let Some(data) = points.strike("failCommand", is_named) {
        return fail_command(context, name, &data);
    }
    if is_retryable_write && let Some(data) = points.strike("onPrimaryTransactionalWrite", |_| true)
    {
        let hangs_up = data.get("closeConnection").is_none_or(truthy);
        if let Some(code) = data.get("failBeforeCommitExceptionCode").and_then(integral) {
            let reply = Reply::Document(failed(context, name, code, &data));
            context.session.hangs_up = hangs_up;
            return Struck::Instead(reply);
        }
        return Struck::Behind { hangs_up, fields: Document::new() };
    }
    Struck::No
}

fn fail_command(context: &mut Context<'_>, name: &str, data: &Document) -> Struck {
    let flag = |field: &str| data.get(field).is_some_and(truthy);
    if flag("blockConnection") {
        let time = data.get("blockTimeMS").and_then(integral).unwrap_or(0);
        let time = Duration::from_millis(time.clamp(0, LONGEST_BLOCK_MS).unsigned_abs());
        tokio::task::block_in_place(|| std::thread::sleep(time));
    }
    if flag("closeConnection") {
        context.session.hangs_up = true;
        let gone = QueryError::new(Code::HostUnreachable, "the connection ends by a fail point");
        return Struck::Instead(Reply::Document(super::failure(&gone)));
    }
    if let Some(code) = data.get("errorCode").and_then(integral) {
        return Struck::Instead(Reply::Document(failed(context, name, code, data)));
    }
    match data.get("writeConcernError") {
        Some(error @ Bson::Document(told)) => {
            let code = told.get("code").and_then(integral).unwrap_or(0);
            let mut fields = doc! { "writeConcernError": error.clone() };
            // A command of a transaction waits for no members: only its end does.
            let waits = matches!(name, "commitTransaction" | "abortTransaction")
                || !context.request.body.contains_key("autocommit");
            if let Some(labels) = labels_of(context, name, code, data).filter(|_| waits) {
                fields.insert("errorLabels", labels);
            }
            Struck::Behind { hangs_up: false, fields }
        }
        _ => Struck::No,
    }
}

impl Struck {
    /// What becomes of the reply of a command that ran.
    pub(super) fn behind(self, context: &mut Context<'_>, mut reply: Reply) -> Reply {
        if let Self::Behind { hangs_up, fields } = self {
            context.session.hangs_up |= hangs_up;
            if let Reply::Document(document) = &mut reply {
                document.extend(fields);
            }
        }
        reply
    }
}

fn application_of(context: &Context<'_>) -> Option<String> {
    let told = context.document("client").ok().flatten().or(context.session.client.as_ref())?;
    Some(told.get_document("application").ok()?.get_str("name").ok()?.to_owned())
}

fn failed(context: &Context<'_>, name: &str, code: i64, data: &Document) -> Document {
    let known = Code::ALL.iter().find(|one| **one as i64 == code);
    let mut reply = doc! {
        "ok": 0.0,
        "errmsg": "Failing command via 'failCommand' failpoint",
        "code": i32::try_from(code).unwrap_or(1),
        "codeName": known.map_or("", |known| known.name()),
    };
    if let Some(labels) = labels_of(context, name, code, data) {
        reply.insert("errorLabels", labels);
    }
    reply
}

/// Labels that the order names, or else those of the code.
fn labels_of(context: &Context<'_>, name: &str, code: i64, data: &Document) -> Option<Bson> {
    if let Some(labels) = data.get("errorLabels") {
        return Some(labels.clone());
    }
    let body = &context.request.body;
    let ends = matches!(name, "commitTransaction" | "abortTransaction");
    if !body.contains_key("txnNumber") {
        return None;
    }
    let again = RETRYABLE.contains(&code);
    let label = match body.contains_key("autocommit") {
        true if TRANSIENT.contains(&code) || again && !ends => "TransientTransactionError",
        _ if again => "RetryableWriteError",
        _ => return None,
    };
    Some(Bson::Array(vec![label.into()]))
}
