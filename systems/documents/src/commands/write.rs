//! Writing: insert, update, delete, findAndModify, and where pipelines put their results.

use std::sync::Arc;

use beeline_documents_query::error::{Code, QueryError, Result, fail};
use beeline_documents_query::expression::Scope;
use beeline_documents_query::projection::{Dialect, Projection};
use beeline_documents_query::sort::Order;
use beeline_documents_query::update::{ArrayFilters, Context as UpdateContext, Update};
use beeline_documents_query::value::integral;
use beeline_documents_query::{Filter, check};
use bson::oid::ObjectId;
use bson::{Bson, Document, doc};

use super::read::number;
use super::{Context, check_collation};
use crate::catalog::{Collection, Database};
use crate::engine::existing;
use crate::log::Recorder;
use crate::plan::choose;
use crate::reply::Reply;
use crate::retry::Retry;
use crate::scan::{Found, Scan, decode};
use crate::store::Backing;
use crate::write::{self, Rewrite, Witness, encode};

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
        Code::InterruptedAtShutdown | Code::NotWritablePrimary | Code::TransactionTooOld
    )
}

/// Checks the write concern: this node alone acknowledges.
fn check_write_concern(context: &Context<'_>) -> Result<()> {
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
    let documents = statements(context, "documents")?;
    context.check_fields(&["ordered", "bypassDocumentValidation"])?;
    let database = context.engine.database_or_new(&context.database)?;
    context.engine.collection_or_new(&database, &name)?;
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
        let ready: Vec<Result<(Bson, Vec<u8>)>> =
            documents[start..next].iter().map(|one| write::prepare(one)).collect();
        let shown = &*context;
        let stopped = context.engine.with(&database, |row| {
            for (at, prepared) in ready.into_iter().enumerate() {
                let inserted = prepared.and_then(|(id, bytes)| {
                    let retry = shown.retry(start + at)?;
                    if let Some(retry) = &retry
                        && retry.outcome(row)?.is_some()
                    {
                        outcome.retried.push(retry.statement);
                        return Ok(());
                    }
                    let collection = current(&database, &name, bypass)?;
                    let mut recorder = Recorder { retry, ..Recorder::plain(shown.engine) };
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

/// The collection as it is now, under the lock of its row.
fn current(database: &Database, name: &str, bypass: bool) -> Result<Arc<Collection>> {
    let collection = existing(database, name)?;
    if bypass && collection.validator.is_some() {
        return Ok(Arc::new(Collection { validator: None, ..(*collection).clone() }));
    }
    Ok(collection)
}

/// One update, parsed.
struct Statement {
    filter: Filter,
    update: Update,
    array_filters: ArrayFilters,
    multi: bool,
    upsert: bool,
    hint: Option<Bson>,
    order: Option<Order>,
    variables: Document,
}

/// What became of it.
#[derive(Debug, Default)]
struct Updated {
    matched: u64,
    modified: u64,
    upserted: Option<Bson>,
    before: Option<Document>,
    after: Option<Document>,
}

fn parse_update(source: &Document, variables: &Document) -> Result<Statement> {
    for name in source.keys() {
        if !matches!(
            name.as_str(),
            "q" | "u"
                | "c"
                | "multi"
                | "upsert"
                | "arrayFilters"
                | "hint"
                | "collation"
                | "comment"
        ) {
            return fail(
                Code::UnknownField,
                format!("BSON field 'update.updates.{name}' is an unknown field."),
            );
        }
    }
    check_collation(source.get("collation"))?;
    let Ok(query) = source.get_document("q") else {
        return fail(
            Code::NoSuchField,
            "BSON field 'update.updates.q' is missing but a required field",
        );
    };
    let Some(change) = source.get("u") else {
        return fail(
            Code::NoSuchField,
            "BSON field 'update.updates.u' is missing but a required field",
        );
    };
    let filters = match source.get("arrayFilters") {
        None => Vec::new(),
        Some(Bson::Array(all)) => all.clone(),
        Some(_) => return fail(Code::TypeMismatch, "arrayFilters must be an array"),
    };
    let mut variables = variables.clone();
    if let Ok(constants) = source.get_document("c") {
        variables.extend(constants.clone());
    }
    let array_filters = ArrayFilters::parse(&filters)?;
    let update = Update::parse(change, &array_filters)?;
    let multi = source.get("multi").is_some_and(beeline_documents_query::value::truthy);
    if multi && update.is_replacement() {
        return fail(
            Code::FailedToParse,
            "multi update is not supported for replacement-style update",
        );
    }
    let order = match source.get("sort") {
        Some(Bson::Document(_)) if multi => {
            return fail(Code::FailedToParse, "Cannot specify sort with multi=true");
        }
        Some(Bson::Document(order)) => Some(Order::parse(order)?),
        _ => None,
    };
    Ok(Statement {
        filter: Filter::parse(query)?,
        update,
        array_filters,
        multi,
        upsert: source.get("upsert").is_some_and(beeline_documents_query::value::truthy),
        hint: source.get("hint").cloned(),
        order,
        variables,
    })
}

/// Runs one update. A slice of documents is found and changed under one lock.
fn run_update(
    context: &Context<'_>,
    database: &Arc<Database>,
    name: &str,
    statement: &Statement,
    witness: &mut dyn Witness,
) -> Result<Updated> {
    let mut updated = Updated::default();
    let bypass = context.flag("bypassDocumentValidation");
    let scope = Scope::with_variables(&statement.variables);
    let update_context = UpdateContext {
        filter: &statement.filter,
        array_filters: &statement.array_filters,
        inserting: false,
        scope: &scope,
    };
    let change = |row: &mut dyn Backing,
                  collection: &Arc<Collection>,
                  found: &Found,
                  updated: &mut Updated,
                  witness: &mut dyn Witness|
     -> Result<()> {
        let before = decode(&found.bytes)?;
        let after = statement.update.apply(&before, &update_context)?;
        let changed = write::update(
            row,
            database,
            collection,
            &Rewrite {
                found,
                before: &before,
                after: &after,
                replaced: statement.update.is_replacement(),
            },
            witness,
        )?;
        updated.matched += 1;
        updated.modified += u64::from(changed);
        if !statement.multi {
            (updated.before, updated.after) = (Some(before), Some(after));
        }
        Ok(())
    };
    if database.collection(name).is_some() {
        let mut scan: Option<Scan> = None;
        loop {
            let done = context.engine.with(database, |row| {
                let Some(collection) = database.collection(name) else { return Ok(true) };
                let collection = if bypass { current(database, name, true)? } else { collection };
                if scan.is_none() {
                    let plan = choose(
                        &collection,
                        &statement.filter,
                        statement.order.as_ref(),
                        statement.hint.as_ref(),
                    )?;
                    let sorted = plan.sorted;
                    let mut fresh = Scan::new(&collection, plan, statement.filter.clone());
                    if !sorted && let Some(order) = &statement.order {
                        if let Some(first) = first_of(row, &mut fresh, order, &scope)? {
                            change(row, &collection, &first, &mut updated, witness)?;
                        }
                        return Ok(true);
                    }
                    scan = Some(fresh);
                }
                let Some(scan) = &mut scan else { return Ok(true) };
                let mut found = Vec::new();
                scan.slice(row, &scope, if statement.multi { 128 } else { 1 }, &mut found)?;
                for one in &found {
                    // An index may have grown an array meanwhile.
                    let collection = if bypass {
                        current(database, name, true)?
                    } else {
                        existing(database, name)?
                    };
                    change(row, &collection, one, &mut updated, witness)?;
                }
                Ok(scan.done || !statement.multi && updated.matched > 0)
            })?;
            if done {
                break;
            }
        }
    } else if let Some(hint) = &statement.hint {
        let _ = hint;
    }
    if updated.matched == 0 && statement.upsert {
        upsert(context, database, name, statement, &update_context, &mut updated, witness)?;
    }
    context.engine.metrics.documents_updated.add_shared(updated.modified);
    Ok(updated)
}

fn upsert(
    context: &Context<'_>,
    database: &Arc<Database>,
    name: &str,
    statement: &Statement,
    update_context: &UpdateContext<'_>,
    updated: &mut Updated,
    witness: &mut dyn Witness,
) -> Result<()> {
    context.engine.collection_or_new(database, name)?;
    let mut document = statement.update.insertion(update_context)?;
    if !document.contains_key("_id") {
        let mut with_id = doc! { "_id": ObjectId::new() };
        with_id.extend(document);
        document = with_id;
    }
    let (id, bytes) = write::prepare(&encode(&document)?)?;
    let bypass = context.flag("bypassDocumentValidation");
    context.engine.with(database, |row| {
        let collection = current(database, name, bypass)?;
        write::insert(row, database, &collection, &id, bytes, witness)
    })?;
    context.engine.metrics.documents_inserted.add_shared(1);
    updated.upserted = Some(id);
    updated.after = Some(document);
    Ok(())
}

/// The first document in an order that no index has.
fn first_of(
    row: &mut dyn Backing,
    scan: &mut Scan,
    order: &Order,
    scope: &Scope<'_>,
) -> Result<Option<Found>> {
    let mut best: Option<(Vec<Bson>, Found)> = None;
    while !scan.done {
        let mut found = Vec::new();
        scan.slice(row, scope, usize::MAX, &mut found)?;
        for one in found {
            let at = order.key(&decode(&one.bytes)?);
            if best.as_ref().is_none_or(|(known, _)| order.compare_keys(&at, known).is_lt()) {
                best = Some((at, one));
            }
        }
    }
    Ok(best.map(|(_, found)| found))
}

pub(super) fn update(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    check_write_concern(context)?;
    let updates = statements(context, "updates")?;
    context.check_fields(&["ordered", "bypassDocumentValidation", "let"])?;
    let database = context.engine.database_or_new(&context.database)?;
    let (ordered, variables) = (is_ordered(context), context.variables()?);
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
                let _alone = context.engine.alone(retry.as_ref());
                if let Some(known) = known_outcome(context, &database, retry.as_ref())? {
                    outcome.retried.extend(retry.map(|retry| retry.statement));
                    let upserted = known.get("upserted").cloned();
                    let matched = u64::from(upserted.is_none());
                    let modified = known.get("nModified").and_then(integral).unwrap_or(0) as u64;
                    return Ok(Updated { matched, modified, upserted, ..Updated::default() });
                }
                let mut recorder =
                    Recorder { retry, upsert: statement.upsert, ..Recorder::plain(context.engine) };
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

/// What a delete selects.
struct Doomed<'d> {
    filter: &'d Filter,
    hint: Option<&'d Bson>,
    order: Option<&'d Order>,
    one_only: bool,
    variables: &'d Document,
}

/// Deletes what a filter selects.
fn run_delete(
    context: &Context<'_>,
    database: &Arc<Database>,
    name: &str,
    doomed: &Doomed<'_>,
    witness: &mut dyn Witness,
) -> Result<(u64, Option<Document>)> {
    let Doomed { filter, hint, order, one_only, variables } = *doomed;
    let scope = Scope::with_variables(variables);
    let (mut deleted, mut last) = (0, None);
    let mut scan: Option<Scan> = None;
    loop {
        let done = context.engine.with(database, |row| {
            let Some(collection) = database.collection(name) else { return Ok(true) };
            if scan.is_none() {
                let plan = choose(&collection, filter, order, hint)?;
                let sorted = plan.sorted;
                let mut fresh = Scan::new(&collection, plan, filter.clone());
                if !sorted && let Some(order) = order {
                    if let Some(first) = first_of(row, &mut fresh, order, &scope)? {
                        write::delete(row, &collection, &first, witness)?;
                        deleted += 1;
                        last = Some(decode(&first.bytes)?);
                    }
                    return Ok(true);
                }
                scan = Some(fresh);
            }
            let Some(scan) = &mut scan else { return Ok(true) };
            let mut found = Vec::new();
            scan.slice(row, &scope, if one_only { 1 } else { 256 }, &mut found)?;
            for one in &found {
                write::delete(row, &collection, one, witness)?;
                deleted += 1;
                if one_only {
                    last = Some(decode(&one.bytes)?);
                }
            }
            Ok(scan.done || one_only && deleted > 0)
        })?;
        if done {
            break;
        }
    }
    context.engine.metrics.documents_deleted.add_shared(deleted);
    Ok((deleted, last))
}

pub(super) fn delete(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    check_write_concern(context)?;
    let deletes = statements(context, "deletes")?;
    context.check_fields(&["ordered", "let"])?;
    let database = context.engine.database_or_new(&context.database)?;
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
    let database = context.engine.database_or_new(&context.database)?;
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
    let filter = Filter::parse(&query)?;
    let retry = context.retry(0)?;
    let _alone = context.engine.alone(retry.as_ref());
    let known = known_outcome(context, &database, retry.as_ref())?;
    let retried = known.is_some().then(|| retry.as_ref().map(|retry| retry.statement)).flatten();
    let mut recorder =
        Recorder { retry, upsert, reports: Some(new), ..Recorder::plain(context.engine) };
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
        let (deleted, last) = run_delete(
            context,
            &database,
            &name,
            &Doomed {
                filter: &filter,
                hint: hint.as_ref(),
                order: order.as_ref(),
                one_only: true,
                variables: &variables,
            },
            &mut recorder,
        )?;
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
        let updated = run_update(context, &database, &name, &statement, &mut recorder)?;
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
