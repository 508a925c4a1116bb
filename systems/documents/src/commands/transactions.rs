//! Which transaction a command belongs to, and its end.

use beeline_documents_query::error::{Code, QueryError, Result, fail};
use bson::{Bson, Document};

use super::Context;
use crate::engine::{lock, whole_field};
use crate::reply::Reply;
use crate::transaction::{self, Shared, State, no_such};

/// Commands a transaction may hold.
const HELD: &[&str] = &[
    "find",
    "getMore",
    "killCursors",
    "distinct",
    "aggregate",
    "insert",
    "update",
    "delete",
    "findAndModify",
    "findandmodify",
    "create",
    "createIndexes",
    "commitTransaction",
    "abortTransaction",
];

/// The label that tells a driver to begin the transaction again.
const TRANSIENT: &str = "TransientTransactionError";

/// The transaction a command belongs to.
///
/// Errors: one that is not there or ended, commands and options that cannot be in one.
pub(super) fn of(context: &Context<'_>, name: &str) -> Result<Option<Shared>> {
    let body = &context.request.body;
    let number = whole_field(body, "txnNumber");
    let Some(autocommit) = body.get("autocommit") else {
        if body.contains_key("startTransaction") {
            return fail(
                Code::InvalidOptions,
                "'startTransaction' field requires 'autocommit' field to also be specified",
            );
        }
        if let (Some(number), Some(session)) = (number, context.session_key()) {
            context.engine.transactions.pass(&session, number);
        }
        return Ok(None);
    };
    if *autocommit != Bson::Boolean(false) {
        return fail(
            Code::InvalidOptions,
            "Specifying autocommit=true is not allowed in a multi-document transaction",
        );
    }
    let (Some(number), Some(session)) = (number, context.session_key()) else {
        return fail(
            Code::InvalidOptions,
            "'autocommit' field requires a transaction number and a session",
        );
    };
    if !HELD.contains(&name) {
        return fail(
            Code::OperationNotSupportedInTransaction,
            format!("Cannot run '{name}' in a multi-document transaction."),
        );
    }
    let engine = context.engine;
    if context.flag("startTransaction") {
        return engine.transactions.begin(engine, &session, number).map(Some);
    }
    let known = engine.transactions.of(&session);
    let known = known.filter(|known| lock(known).number == number);
    let ends = matches!(name, "commitTransaction" | "abortTransaction");
    let Some(known) = known else {
        let newest = engine.transactions.of(&session).map(|known| lock(&known).number);
        if newest.is_some_and(|newest| newest > number) {
            return fail(
                Code::TransactionTooOld,
                format!("a newer transaction than {number} was begun on this session"),
            );
        }
        return if ends { Ok(None) } else { no_such(number) };
    };
    engine.transactions.is_overdue(&known, engine.now_ms());
    let state = lock(&known).state();
    match state {
        State::Committed if name != "commitTransaction" => fail(
            Code::TransactionCommitted,
            format!("Transaction with {{ txnNumber: {number} }} has been committed."),
        ),
        State::Aborted => no_such(number),
        _ => Ok(Some(known)),
    }
}

pub(super) fn commit(context: &Context<'_>) -> Result<Reply> {
    let (number, session) = named(context)?;
    match &context.session.operation.transaction {
        Some(known) => transaction::commit(context.engine, known, &session)?,
        // The node may have been started again since the commit.
        None if transaction::was_committed(context.engine, &session, number)? => {}
        None => return no_such(number),
    }
    Ok(Reply::ok())
}

pub(super) fn abort(context: &Context<'_>) -> Result<Reply> {
    let (number, _) = named(context)?;
    match &context.session.operation.transaction {
        Some(known) => lock(known).abort(),
        None => return no_such(number),
    }
    Ok(Reply::ok())
}

fn named(context: &Context<'_>) -> Result<(i64, Vec<u8>)> {
    match (whole_field(&context.request.body, "txnNumber"), context.session_key()) {
        (Some(number), Some(session)) if context.request.body.contains_key("autocommit") => {
            Ok((number, session))
        }
        _ => fail(
            Code::InvalidOptions,
            "commitTransaction and abortTransaction need a session, a transaction number and autocommit: false",
        ),
    }
}

/// A command of a transaction failed: the transaction ends, as with MongoDB.
pub(super) fn failed(context: &mut Context<'_>) {
    if let Some(known) = context.session.operation.transaction.take() {
        lock(&known).abort();
    }
}

/// Whether a reply tells of a statement that failed.
pub(super) fn has_failed(reply: &Reply) -> bool {
    matches!(reply, Reply::Document(document) if document.contains_key("writeErrors"))
}

/// Labels an error after which a driver begins a transaction again.
pub(super) fn label(context: &Context<'_>, error: &QueryError, reply: &mut Document) {
    let transient = matches!(
        error.code,
        Code::WriteConflict
            | Code::SnapshotUnavailable
            | Code::NoSuchTransaction
            | Code::QueryPlanKilled
    );
    if transient && context.request.body.contains_key("autocommit") {
        reply.insert("errorLabels", vec![TRANSIENT]);
    }
}
