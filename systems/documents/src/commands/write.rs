//! Writing: insert, update, delete, findAndModify, and where pipelines put their results.

use std::sync::Arc;

use beeline_documents_query::error::{Code, QueryError, Result, fail};
use beeline_documents_query::expression::Scope;
use beeline_documents_query::projection::{Dialect, Projection};
use beeline_documents_query::sort::Order;
use beeline_documents_query::update::{ArrayFilters, Update};
use beeline_documents_query::value::integral;
use beeline_documents_query::{Filter, check};
use bson::{Bson, Document, doc};

use super::change::{Doomed, Statement, Updated, parse_update, run_delete, run_update};
use super::read::number;
use super::{Context, check_collation};
use crate::catalog::Database;
use crate::engine::existing;
use crate::log::Recorder;
use crate::reply::Reply;
use crate::retry::Retry;
use crate::write;

/// Statements of one command at most, as MongoDB.
const MOST_STATEMENTS: usize = 100_000;
/// Documents inserted under one lock, and their bytes.
pub(super) const CHUNK: (usize, usize) = (256, 1 << 20);

/// What a write command reports of its statements.
#[derive(Debug, Default)]
struct Outcome {
    n: u64,
    retried: Vec<i32>,
    modified: u64,
    upserted: Vec<Document>,
    errors: Vec<Document>,
}

impl Outcome {
    fn fail(&mut self, index: usize, error: &QueryError) {
        let mut report = doc! { "index": index as i32, "code": error.code as i32, "errmsg": error.message.clone() };
        if let Some(info) = &error.info {
            report.extend((**info).clone());
        }
        self.errors.push(report);
    }

    fn reply(self, updates: bool) -> Reply {
        let mut reply = doc! { "n": number(self.n) };
        if updates {
            reply.insert("nModified", number(self.modified));
            if !self.upserted.is_empty() {
                reply.insert("upserted", self.upserted);
            }
        }
        if !self.retried.is_empty() {
            reply.insert("retriedStmtIds", self.retried);
        }
        if !self.errors.is_empty() {
            reply.insert("writeErrors", self.errors);
        }
        reply.insert("ok", 1.0);
        Reply::Document(reply)
    }
}

/// Errors that end the whole command, not only a statement.
fn is_fatal(error: &QueryError) -> bool {
    matches!(
        error.code,
        Code::InterruptedAtShutdown
            | Code::NotWritablePrimary
            | Code::TransactionTooOld
            | Code::WriteConflict
            | Code::SnapshotUnavailable
            | Code::OperationNotSupportedInTransaction
            | Code::NoSuchTransaction
    )
}

/// Checks the write concern of a node by itself, which alone acknowledges; a member of a replica set has
/// looked at it before.
fn check_write_concern(context: &Context<'_>) -> Result<()> {
    if context.engine.replica.get().is_some() {
        return Ok(());
    }
    let Some(concern) = context.document("writeConcern")? else { return Ok(()) };
    match concern.get("w") {
        None => Ok(()),
        Some(Bson::String(word)) if word == "majority" => Ok(()),
        Some(Bson::String(word)) => fail(
            Code::UnknownReplWriteConcern,
            format!("No write concern mode named '{word}' found"),
        ),
        Some(number) => match integral(number) {
            Some(0..=1) => Ok(()),
            Some(_) => fail(Code::BadValue, "cannot use 'w' > 1 when a host is not replicated"),
            None => fail(Code::FailedToParse, "w has to be a number or a string"),
        },
    }
}

fn statements(context: &mut Context<'_>, field: &str) -> Result<Vec<Vec<u8>>> {
    let all = context.request.documents(field)?;
    if all.is_empty() || all.len() > MOST_STATEMENTS {
        return fail(
            Code::InvalidLength,
            format!(
                "Write batch sizes must be between 1 and {MOST_STATEMENTS}. Got {} operations.",
                all.len()
            ),
        );
    }
    Ok(all)
}

fn is_ordered(context: &Context<'_>) -> bool {
    context.request.body.get("ordered").is_none_or(beeline_documents_query::value::truthy)
}

pub(super) fn insert(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    check_write_concern(context)?;
    let mut documents = statements(context, "documents")?;
    context.check_fields(&["ordered", "bypassDocumentValidation"])?;
    let database = context.engine.database_or_new(&context.database)?;
    context.collection_or_new(&database, &name)?;
    let (ordered, bypass) = (is_ordered(context), context.flag("bypassDocumentValidation"));
    let mut outcome = Outcome::default();
    let mut next = 0;
    while next < documents.len() {
        let start = next;
        let mut bytes = 0;
        while next < documents.len() && next - start < CHUNK.0 && bytes < CHUNK.1 {
            bytes += documents[next].len();
            next += 1;
        }
        let taken = documents[start..next].iter_mut().map(std::mem::take);
        let ready: Vec<Result<(Bson, Vec<u8>)>> = taken.map(write::prepare).collect();
        let shown = &*context;
        let stopped = context.within(&database, |row| {
            for (at, prepared) in ready.into_iter().enumerate() {
                let inserted = prepared.and_then(|(id, bytes)| {
                    let retry = shown.retry(start + at)?;
                    if let Some(retry) = &retry
                        && retry.outcome(row)?.is_some()
                    {
                        outcome.retried.push(retry.statement);
                        return Ok(());
                    }
                    let collection = existing(&database, &name)?;
                    row.enter(&collection)?;
                    let mut recorder = Recorder { retry, bypass, ..Recorder::plain(shown.engine) };
                    write::insert(row, &database, &collection, &id, bytes, &mut recorder)
                });
                match inserted {
                    Ok(()) => outcome.n += 1,
                    Err(error) if is_fatal(&error) => return Err(error),
                    Err(error) => {
                        outcome.fail(start + at, &error);
                        if ordered {
                            return Ok(true);
                        }
                    }
                }
            }
            Ok(false)
        })?;
        if stopped {
            break;
        }
    }
    context.engine.metrics.documents_inserted.add_shared(outcome.n);
    Ok(outcome.reply(false))
}

pub(super) fn update(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    check_write_concern(context)?;
    let updates = statements(context, "updates")?;
    context.check_fields(&["ordered", "bypassDocumentValidation", "let"])?;
    let (ordered, variables) = (is_ordered(context), context.variables()?);
    let bypass = context.flag("bypassDocumentValidation");
    let mut outcome = Outcome::default();
    for (at, source) in updates.iter().enumerate() {
        let done = read_statement(source)
            .and_then(|source| parse_update(&source, &variables))
            .and_then(|statement| {
                let retry = context.retry(at)?;
                if retry.is_some() && statement.multi {
                    return fail(
                        Code::InvalidOptions,
                        "Cannot use retryable writes with multi=true",
                    );
                }
                let Some(database) = context.database_to_change(statement.upsert)? else {
                    return Ok(Updated::default());
                };
                let _alone = context.engine.alone(retry.as_ref());
                if let Some(known) = known_outcome(context, &database, retry.as_ref())? {
                    outcome.retried.extend(retry.map(|retry| retry.statement));
                    let upserted = known.get("upserted").cloned();
                    let matched = u64::from(upserted.is_none());
                    let modified = known.get("nModified").and_then(integral).unwrap_or(0) as u64;
                    return Ok(Updated { matched, modified, upserted, ..Updated::default() });
                }
                let mut recorder = Recorder {
                    retry,
                    bypass,
                    upsert: statement.upsert,
                    ..Recorder::plain(context.engine)
                };
                run_update(context, &database, &name, &statement, &mut recorder)
            });
        match done {
            Ok(updated) => {
                outcome.n += updated.matched;
                outcome.modified += updated.modified;
                if let Some(id) = updated.upserted {
                    outcome.n += 1;
                    outcome.upserted.push(doc! { "index": at as i32, "_id": id });
                }
            }
            Err(error) if is_fatal(&error) => return Err(error),
            Err(error) => {
                outcome.fail(at, &error);
                if ordered {
                    break;
                }
            }
        }
    }
    Ok(outcome.reply(true))
}

/// What a statement did when it was sent before.
fn known_outcome(
    context: &Context<'_>,
    database: &Arc<Database>,
    retry: Option<&Retry>,
) -> Result<Option<Document>> {
    match retry {
        Some(retry) => context.engine.with(database, |row| retry.outcome(row)),
        None => Ok(None),
    }
}

fn read_statement(bytes: &[u8]) -> Result<Document> {
    check::document(bytes)?;
    Document::from_reader(bytes)
        .map_err(|error| QueryError::new(Code::NonConformantBson, error.to_string()))
}

pub(super) fn delete(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    check_write_concern(context)?;
    let deletes = statements(context, "deletes")?;
    context.check_fields(&["ordered", "let"])?;
    let (ordered, variables) = (is_ordered(context), context.variables()?);
    let mut outcome = Outcome::default();
    for (at, source) in deletes.iter().enumerate() {
        let done = read_statement(source).and_then(|source| {
            check_collation(source.get("collation"))?;
            let Ok(query) = source.get_document("q") else {
                return fail(
                    Code::NoSuchField,
                    "BSON field 'delete.deletes.q' is missing but a required field",
                );
            };
            let one_only = match source.get("limit").and_then(integral) {
                Some(0) => false,
                Some(1) => true,
                _ => {
                    return fail(
                        Code::FailedToParse,
                        "The limit field in delete objects must be 0 or 1.",
                    );
                }
            };
            let retry = context.retry(at)?;
            if retry.is_some() && !one_only {
                return fail(Code::InvalidOptions, "Cannot use retryable writes with limit=0");
            }
            let Some(database) = context.database_to_change(false)? else { return Ok((0, None)) };
            let _alone = context.engine.alone(retry.as_ref());
            if known_outcome(context, &database, retry.as_ref())?.is_some() {
                outcome.retried.extend(retry.map(|retry| retry.statement));
                return Ok((1, None));
            }
            let mut recorder = Recorder { retry, ..Recorder::plain(context.engine) };
            run_delete(
                context,
                &database,
                &name,
                &Doomed {
                    filter: &Filter::parse(query)?,
                    hint: source.get("hint"),
                    order: None,
                    one_only,
                    variables: &variables,
                },
                &mut recorder,
            )
        });
        match done {
            Ok((deleted, _)) => outcome.n += deleted,
            Err(error) if is_fatal(&error) => return Err(error),
            Err(error) => {
                outcome.fail(at, &error);
                if ordered {
                    break;
                }
            }
        }
    }
    Ok(outcome.reply(false))
}

pub(super) fn find_and_modify(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    context.check_fields(&[
        "query",
        "sort",
        "remove",
        "update",
        "new",
        "fields",
        "upsert",
        "bypassDocumentValidation",
        "arrayFilters",
        "hint",
        "let",
        "collation",
    ])?;
    check_write_concern(context)?;
    context.check_collation()?;
    let variables = context.variables()?;
    let query = context.document("query")?.cloned().unwrap_or_default();
    let order =
        context.document("sort")?.map(Order::parse).transpose()?.filter(|order| !order.is_empty());
    let projection = match context.document("fields")? {
        Some(fields) => Projection::parse(fields, Dialect::Find)?,
        None => None,
    };
    let (remove, new, upsert) =
        (context.flag("remove"), context.flag("new"), context.flag("upsert"));
    let hint = context.request.body.get("hint").cloned();
    let bypass = context.flag("bypassDocumentValidation");
    let filter = Filter::parse(&query)?;
    let retry = context.retry(0)?;
    let database = context.database_to_change(upsert)?;
    let _alone = context.engine.alone(retry.as_ref());
    let known = match &database {
        Some(database) => known_outcome(context, database, retry.as_ref())?,
        None => None,
    };
    let retried = known.is_some().then(|| retry.as_ref().map(|retry| retry.statement)).flatten();
    let mut recorder =
        Recorder { retry, upsert, reports: Some(new), bypass, ..Recorder::plain(context.engine) };
    let (value, status) = if let Some(known) = known {
        let value = known.get_document("value").ok().cloned();
        let mut status = doc! { "n": 1 };
        if !remove {
            status.insert("updatedExisting", !known.contains_key("upserted"));
        }
        if let Some(id) = known.get("upserted") {
            status.insert("upserted", id.clone());
        }
        (value, status)
    } else if remove {
        if context.request.body.contains_key("update") {
            return fail(Code::FailedToParse, "Cannot specify both an update and remove=true");
        }
        if new {
            return fail(
                Code::FailedToParse,
                "Cannot specify both new=true and remove=true; 'remove' always returns the deleted document",
            );
        }
        if upsert {
            return fail(Code::FailedToParse, "Cannot specify both upsert=true and remove=true");
        }
        let doomed = Doomed {
            filter: &filter,
            hint: hint.as_ref(),
            order: order.as_ref(),
            one_only: true,
            variables: &variables,
        };
        let (deleted, last) = match &database {
            Some(database) => run_delete(context, database, &name, &doomed, &mut recorder)?,
            None => (0, None),
        };
        (last, doc! { "n": number(deleted) })
    } else {
        let Some(change) = context.request.body.get("update") else {
            return fail(Code::FailedToParse, "Either an update or remove=true must be specified");
        };
        let filters = match context.request.body.get("arrayFilters") {
            Some(Bson::Array(all)) => all.clone(),
            _ => Vec::new(),
        };
        let array_filters = ArrayFilters::parse(&filters)?;
        let update = Update::parse(change, &array_filters)?;
        let statement = Statement {
            filter: filter.clone(),
            update,
            array_filters,
            multi: false,
            upsert,
            hint,
            order,
            variables: variables.clone(),
        };
        let updated = match &database {
            Some(database) => run_update(context, database, &name, &statement, &mut recorder)?,
            None => Updated::default(),
        };
        let mut status = doc! { "n": number(updated.matched + u64::from(updated.upserted.is_some())), "updatedExisting": updated.matched > 0 };
        if let Some(id) = updated.upserted {
            status.insert("upserted", id);
        }
        (if new { updated.after } else { updated.before }, status)
    };
    let scope = Scope::with_variables(&variables);
    let value = match (value, projection) {
        (Some(document), Some(projection)) => {
            Bson::Document(projection.apply(&document, Some(&filter), &scope)?)
        }
        (Some(document), None) => Bson::Document(document),
        (None, _) => Bson::Null,
    };
    let mut reply = doc! { "lastErrorObject": status, "value": value };
    if let Some(retried) = retried {
        reply.insert("retriedStmtId", retried);
    }
    reply.insert("ok", 1.0);
    Ok(Reply::Document(reply))
}
