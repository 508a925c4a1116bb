//! Reading: find, getMore, count, distinct, aggregate.

use std::collections::{BTreeSet, VecDeque};

use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::expression::Scope;
use beeline_documents_query::memory::{Lease, Memory};
use beeline_documents_query::pipeline::{Pipeline, Sink, made};
use beeline_documents_query::projection::{Dialect, Projection};
use beeline_documents_query::sort::Order;
use beeline_documents_query::value::{integral, key};
use beeline_documents_query::{Filter, path};
use bson::{Bson, Document, doc};

use super::{Context, Neighbours};
use crate::changes::{Changes, Watched};
use crate::cursor::{Cursor, Piped, Source, Taken};
use crate::query::{Asked, Query};
use crate::reply::Reply;
use crate::write::encode;

/// Documents of a first batch when the client does not say.
const FIRST_BATCH: usize = 101;

const FIND_FIELDS: &[&str] = &[
    "filter",
    "sort",
    "projection",
    "hint",
    "skip",
    "limit",
    "batchSize",
    "singleBatch",
    "let",
    "collation",
    "tailable",
    "awaitData",
    "noCursorTimeout",
    "allowPartialResults",
    "allowDiskUse",
    "min",
    "max",
    "returnKey",
    "showRecordId",
    "oplogReplay",
    "maxScan",
    "snapshot",
];

/// What a find asks.
pub(super) fn asked(context: &Context<'_>) -> Result<Asked> {
    context.check_collation()?;
    for lacking in ["min", "max", "returnKey", "showRecordId"] {
        let given = context.request.body.get(lacking);
        if given.is_some_and(|given| !matches!(given, Bson::Boolean(false)))
            && given.is_some_and(|given| *given != Bson::Document(doc! {}))
        {
            return fail(
                Code::CommandNotSupported,
                format!("find: '{lacking}' is not supported by this server"),
            );
        }
    }
    let filter = context.document("filter")?.map(Filter::parse).transpose()?;
    let order = context.document("sort")?.map(Order::parse).transpose()?;
    let projection = match context.document("projection")? {
        Some(projection) => Projection::parse(projection, Dialect::Find)?,
        None => None,
    };
    let limit = context.whole("limit", i64::MIN)?.unwrap_or(0);
    if limit < 0 {
        return fail(
            Code::BelowMinimum,
            format!("BSON field 'limit' value must be >= 0, actual value '{limit}'"),
        );
    }
    Ok(Asked {
        filter,
        order,
        skip: context.whole("skip", 0)?.unwrap_or(0) as u64,
        limit: (limit > 0).then_some(limit as u64),
        projection,
        hint: context.request.body.get("hint").cloned(),
        variables: context.variables()?,
        deadline_ms: context.deadline()?,
        tailing: context.flag("tailable"),
        operation: context.session.operation.clone(),
    })
}

/// The query of a collection that may not be there.
pub(super) fn query(context: &Context<'_>, name: &str, asked: Asked) -> Result<Query> {
    let database = context.engine.database(&context.database);
    match (context.collection(database.as_ref(), name)?, database) {
        (Some(collection), Some(database)) => {
            if asked.tailing && collection.capped.is_none() {
                return fail(
                    Code::BadValue,
                    format!(
                        "error processing query: tailable cursor requested on non capped collection {}",
                        collection.namespace
                    ),
                );
            }
            Query::new(&database, &collection, asked)
        }
        // An empty answer would make a dump or a copy that lacks what was written meanwhile.
        _ if context.database == "local" && matches!(name, "oplog.rs" | "oplog.$main") => fail(
            Code::CommandNotSupported,
            "this server shows no local.oplog.rs: open a change stream for what is written, and dump without --oplog",
        ),
        _ => Ok(Query::of_nothing()),
    }
}

pub(super) fn find(context: &mut Context<'_>) -> Result<Reply> {
    context.check_fields(FIND_FIELDS)?;
    let name = context.collection_name()?;
    let asked = asked(context)?;
    let tailable = asked.tailing;
    let query = query(context, &name, asked)?;
    let batch = context.whole("batchSize", 0)?;
    let cursor = Cursor {
        source: Source::Query(Box::new(query)),
        tailable,
        awaits: tailable && context.flag("awaitData"),
        keeps: context.flag("noCursorTimeout"),
        ..Cursor::of(context.namespace(&name), VecDeque::new())
    };
    let single = context.flag("singleBatch");
    first_batch(context, cursor, batch.map_or(FIRST_BATCH, |batch| batch as usize), single)
}

/// Answers with the first batch of a cursor, and keeps it if there is more.
pub(super) fn first_batch(
    context: &Context<'_>,
    mut cursor: Cursor,
    most: usize,
    single: bool,
) -> Result<Reply> {
    let database = context.engine.database(&context.database);
    let mut outside = context.neighbours(database);
    cursor.operation = context.session.operation.clone();
    let (documents, done) = cursor.batch(context.engine, &mut outside, most)?;
    context.engine.metrics.documents_returned.add_shared(documents.len() as u64);
    let namespace = cursor.namespace.clone();
    let fields = fields_of(&cursor, &documents);
    let id = if done || single {
        0
    } else {
        cursor.count_ready()?;
        cursor.session = context.session_id();
        cursor.user = context.session.user.clone();
        context.engine.cursors.open(cursor, context.engine.now_ms())?
    };
    Ok(Reply::Batch { id, namespace, documents, first: true, cursor: fields })
}

/// Fields of a cursor beside its documents. Where events were read that are not in the batch, the
/// token is that of the batch's last event: a stream that resumes there misses none.
fn fields_of(cursor: &Cursor, batch: &[Vec<u8>]) -> Document {
    let Source::Changes(changes) = &cursor.source else { return Document::new() };
    let last = batch.last().filter(|_| !cursor.ready.is_empty());
    let token = last
        .and_then(|event| crate::scan::some_fields(event, &["_id"]).ok())
        .and_then(|event| event.get_document("_id").ok().cloned());
    doc! { "postBatchResumeToken": token.unwrap_or_else(|| changes.token()) }
}

pub(super) fn get_more(context: &mut Context<'_>) -> Result<Reply> {
    context.check_fields(&["collection", "batchSize", "term", "lastKnownCommittedOpTime"])?;
    let id = match context.request.body.get("getMore") {
        Some(Bson::Int64(id)) => *id,
        _ => return fail(Code::TypeMismatch, "BSON field 'getMore.getMore' must be a long"),
    };
    let Ok(collection) = context.request.body.get_str("collection") else {
        return fail(Code::TypeMismatch, "BSON field 'getMore.collection' must be a string");
    };
    let namespace = context.namespace(collection);
    let most = context
        .whole("batchSize", 0)?
        .filter(|size| *size > 0)
        .map_or(usize::MAX, |size| size as usize);
    let Taken { id, mut cursor } =
        context.engine.cursors.take(id, &namespace, context.session.user.as_deref())?;
    let database = context.engine.database(&context.database);
    let operation = cursor.operation.clone();
    context.session.operation.majority = operation.majority;
    let name = context.database.clone();
    let mut outside = Neighbours { engine: context.engine, name, database, operation };
    match cursor.batch(context.engine, &mut outside, most) {
        Ok((documents, false)) if documents.is_empty() && cursor.awaits && context.may_wait => {
            let wait = context.whole("maxTimeMS", 0)?.unwrap_or(1000) as u64;
            context.engine.cursors.put_back(Taken { id, cursor }, context.engine.now_ms());
            Ok(Reply::Later(wait))
        }
        Ok((documents, done)) => {
            let fields = fields_of(&cursor, &documents);
            if !done && let Err(error) = cursor.count_ready() {
                context.engine.cursors.close(id);
                return Err(error);
            }
            context.engine.metrics.documents_returned.add_shared(documents.len() as u64);
            let left = if done {
                context.engine.cursors.close(id);
                0
            } else if context.engine.cursors.put_back(Taken { id, cursor }, context.engine.now_ms())
            {
                id
            } else {
                0
            };
            Ok(Reply::Batch { id: left, namespace, documents, first: false, cursor: fields })
        }
        Err(error) => {
            context.engine.cursors.close(id);
            Err(error)
        }
    }
}

pub(super) fn kill_cursors(context: &mut Context<'_>) -> Result<Reply> {
    let namespace = context.namespace(&context.collection_name()?);
    let Some(Bson::Array(ids)) = context.request.body.get("cursors") else {
        return fail(Code::TypeMismatch, "BSON field 'killCursors.cursors' must be an array");
    };
    let (mut killed, mut unknown) = (Vec::new(), Vec::new());
    for id in ids {
        let Some(id) = integral(id) else {
            return fail(Code::TypeMismatch, "BSON field 'killCursors.cursors' holds longs");
        };
        let own = context.engine.cursors.kill(id, &namespace, context.session.user.as_deref());
        if own { killed.push(id) } else { unknown.push(id) }
    }
    Ok(Reply::Document(
        doc! { "cursorsKilled": killed, "cursorsNotFound": unknown, "cursorsAlive": [], "cursorsUnknown": [], "ok": 1.0 },
    ))
}

pub(super) fn count(context: &mut Context<'_>) -> Result<Reply> {
    context.check_fields(&["query", "limit", "skip", "hint", "collation", "fields"])?;
    context.check_collation()?;
    let name = context.collection_name()?;
    let filter = context.document("query")?.map(Filter::parse).transpose()?;
    let limit = context.whole("limit", i64::MIN)?.unwrap_or(0).unsigned_abs();
    let skip = context.whole("skip", 0)?.unwrap_or(0) as u64;
    let database = context.engine.database(&context.database);
    let found = database.as_ref().and_then(|database| database.collection(&name));
    let (Some(database), Some(collection)) = (database, found) else {
        return Ok(Reply::Document(doc! { "n": 0, "ok": 1.0 }));
    };
    let whole = filter.as_ref().is_none_or(Filter::is_all);
    let mut n = if whole {
        context.engine.count(&database, &collection)?.0.max(0) as u64
    } else {
        let asked = Asked {
            filter,
            limit: (limit > 0).then(|| limit.saturating_add(skip)),
            hint: context.request.body.get("hint").cloned(),
            deadline_ms: context.deadline()?,
            operation: context.session.operation.clone(),
            ..Asked::default()
        };
        let mut query = Query::new(&database, &collection, asked)?;
        let (mut out, mut n) = (VecDeque::new(), 0);
        while !query.is_done() {
            drop(query.fill_counted(context.engine, 1000, &mut out)?);
            n += out.len() as u64;
            out.clear();
        }
        n
    };
    n = n.saturating_sub(skip);
    if limit > 0 {
        n = n.min(limit);
    }
    Ok(Reply::Document(doc! { "n": number(n), "ok": 1.0 }))
}

/// A count in the narrowest type, as MongoDB counts.
pub(super) fn number(n: u64) -> Bson {
    i32::try_from(n).map_or(Bson::Int64(n as i64), Bson::Int32)
}

pub(super) fn distinct(context: &mut Context<'_>) -> Result<Reply> {
    context.check_fields(&["key", "query", "collation", "hint"])?;
    context.check_collation()?;
    let name = context.collection_name()?;
    let Ok(field) = context.request.body.get_str("key") else {
        return fail(Code::TypeMismatch, "BSON field 'distinct.key' must be a string");
    };
    let parts = path::split(field)?;
    let asked = Asked {
        filter: context.document("query")?.map(Filter::parse).transpose()?,
        hint: context.request.body.get("hint").cloned(),
        deadline_ms: context.deadline()?,
        operation: context.session.operation.clone(),
        ..Asked::default()
    };
    let mut query = query(context, &name, asked)?;
    query.needs(parts.first().map(|first| vec![first.clone()]));
    let (mut seen, mut values, mut out, mut bytes) =
        (BTreeSet::new(), Vec::new(), VecDeque::new(), 0);
    while !query.is_done() {
        let _held = query.fill_counted(context.engine, 1000, &mut out)?;
        for document in out.drain(..) {
            path::reach(&query.decode(&document)?, &parts, &mut |found| {
                let found = match found {
                    Some(Bson::Array(all)) => all.as_slice(),
                    Some(one) => std::slice::from_ref(one),
                    None => &[],
                };
                for value in found {
                    let at = key(value);
                    let more = at.len() + 16;
                    if seen.insert(at) {
                        bytes += more;
                        values.push(value.clone());
                    }
                }
                false
            });
            if bytes > crate::cursor::BATCH_BYTES {
                return fail(Code::DistinctTooBig, "distinct too big, 16mb cap");
            }
        }
    }
    values.sort_by(beeline_documents_query::value::compare);
    Ok(Reply::Document(doc! { "values": values, "ok": 1.0 }))
}

pub(super) fn aggregate(context: &mut Context<'_>) -> Result<Reply> {
    context.check_fields(&[
        "pipeline",
        "cursor",
        "explain",
        "allowDiskUse",
        "bypassDocumentValidation",
        "hint",
        "let",
        "collation",
    ])?;
    context.check_collation()?;
    if context.flag("explain") {
        return super::explain::aggregate(context);
    }
    let Some(Bson::Array(stages)) = context.request.body.get("pipeline") else {
        return fail(Code::TypeMismatch, "'pipeline' option must be specified as an array");
    };
    let stages = stages.clone();
    if !context.request.body.contains_key("cursor") {
        return fail(
            Code::FailedToParse,
            "The 'cursor' option is required, except for aggregate with the explain argument",
        );
    }
    let name = match context.request.body.get("aggregate") {
        Some(Bson::String(name)) => Some(name.clone()),
        Some(one) if integral(one) == Some(1) => None,
        _ => return fail(Code::TypeMismatch, "the aggregate command names a collection, or 1"),
    };
    let batch = match context.document("cursor")? {
        Some(cursor) => crate::engine::whole_field(cursor, "batchSize"),
        None => None,
    };
    if batch.is_some_and(|batch| batch < 0) {
        return fail(Code::BadValue, "cursor.batchSize field must be >= 0");
    }
    let most = batch.map_or(FIRST_BATCH, |batch| batch as usize);
    let mut pipeline = Pipeline::parse(&stages)?;
    let variables = context.variables()?;
    let sink = pipeline.take_sink();
    if sink.is_some()
        && context.document("readConcern")?.is_some_and(|concern| {
            concern.get_str("level").is_ok_and(|level| level == "linearizable")
        })
    {
        return fail(
            Code::InvalidOptions,
            "$out and $merge cannot be used with a 'linearizable' read concern level",
        );
    }
    if sink.is_some() && context.session.operation.transaction.is_some() {
        return fail(
            Code::OperationNotSupportedInTransaction,
            "$out and $merge cannot be used in a transaction",
        );
    }
    let namespace = context.namespace(name.as_deref().unwrap_or("$cmd.aggregate"));
    let (query, ready) = match pipeline.take_source() {
        Some((stage, argument)) if stage == "$changeStream" => {
            return watch(context, name.as_deref(), &argument, pipeline, variables, most);
        }
        Some((stage, argument)) => {
            (Query::of_nothing(), Some(source(context, name.as_deref(), &stage, &argument)?))
        }
        None => {
            let Some(name) = &name else {
                return fail(
                    Code::InvalidNamespace,
                    "{aggregate: 1} is not valid for a pipeline without a stage that makes documents",
                );
            };
            (pipeline_query(context, name, &mut pipeline, &variables)?, None)
        }
    };
    let piped = Piped { query, pipeline, variables, finished: false };
    if let Some(documents) = ready {
        let database = context.engine.database(&context.database);
        let mut outside = context.neighbours(database);
        let scope = Scope::with_variables(&piped.variables);
        let results = piped.pipeline.run(documents, &scope, &mut outside)?;
        let ready: VecDeque<Vec<u8>> = results.iter().map(encode).collect::<Result<_>>()?;
        if let Some(sink) = sink {
            let mut ready = Some(Vec::from(ready));
            sink_into(context, sink, &mut || Ok(ready.take()))?;
            return Ok(Reply::Batch {
                id: 0,
                namespace,
                documents: Vec::new(),
                first: true,
                cursor: Document::new(),
            });
        }
        return first_batch(context, Cursor::of(namespace, ready), most, false);
    }
    if let Some(sink) = sink {
        let mut cursor = Cursor {
            source: Source::Pipeline(Box::new(piped)),
            ..Cursor::of(namespace.clone(), VecDeque::new()).part_of(&context.session.operation)
        };
        drain(context, &mut cursor, sink, name.as_deref())?;
        return Ok(Reply::Batch {
            id: 0,
            namespace,
            documents: Vec::new(),
            first: true,
            cursor: Document::new(),
        });
    }
    // Without a stage the query's documents go out as they are.
    let source = if piped.pipeline.is_empty() {
        Source::Query(Box::new(piped.query))
    } else {
        Source::Pipeline(Box::new(piped))
    };
    first_batch(context, Cursor { source, ..Cursor::of(namespace, VecDeque::new()) }, most, false)
}

/// The query a pipeline begins with: its filter, and its order where an index has it.
pub(super) fn pipeline_query(
    context: &Context<'_>,
    name: &str,
    pipeline: &mut Pipeline,
    variables: &Document,
) -> Result<Query> {
    let filter = pipeline.take_filter();
    let mut asked = Asked {
        filter,
        hint: context.request.body.get("hint").cloned(),
        variables: variables.clone(),
        deadline_ms: context.deadline()?,
        operation: context.session.operation.clone(),
        ..Asked::default()
    };
    if let Some(order) = pipeline.leading_sort() {
        let with_order = Asked { order: Some(order.clone()), ..asked.clone() };
        let mut query = query(context, name, with_order)?;
        if !query.sorts() {
            pipeline.drop_leading_sort();
            query.needs(pipeline.needs().map(|all| all.into_iter().map(str::to_owned).collect()));
            return Ok(query);
        }
        asked.order = None;
    }
    let mut query = query(context, name, asked)?;
    query.needs(pipeline.needs().map(|all| all.into_iter().map(str::to_owned).collect()));
    Ok(query)
}

/// Documents that a stage makes.
fn source(
    context: &Context<'_>,
    name: Option<&str>,
    stage: &str,
    argument: &Document,
) -> Result<Vec<Document>> {
    let database = context.engine.database(&context.database);
    let collection =
        database.as_ref().zip(name).and_then(|(database, name)| database.collection(name));
    match stage {
        "$documents" => made(argument, &Scope::with_variables(&context.variables()?)),
        "$indexStats" => {
            let Some(collection) = collection else { return Ok(Vec::new()) };
            let since = bson::DateTime::from_millis(context.engine.started_ms() as i64);
            let host = context.identity.address.clone();
            let mut all = vec![
                doc! { "name": "_id_", "key": { "_id": 1 }, "host": host.clone(), "spec": { "v": 2, "key": { "_id": 1 }, "name": "_id_" },
                "accesses": { "ops": 0_i64, "since": since } },
            ];
            all.extend(collection.indexes.iter().map(|index| {
                doc! { "name": index.name.clone(), "key": index.key(), "host": host.clone(), "spec": index.shown(),
                    "accesses": { "ops": index.uses.load(std::sync::atomic::Ordering::Relaxed), "since": since } }
            }));
            Ok(all)
        }
        "$collStats" => {
            let (Some(database), Some(collection)) = (database, collection) else {
                return fail(
                    Code::NamespaceNotFound,
                    "the collection of $collStats does not exist",
                );
            };
            let (documents, bytes) = context.engine.count(&database, &collection)?;
            let mut stats = doc! { "ns": collection.namespace.clone(), "host": context.identity.address.clone() };
            if argument.contains_key("count") {
                stats.insert("count", documents);
            }
            if argument.contains_key("storageStats") {
                stats.insert(
                    "storageStats",
                    super::catalog::figures(&collection, documents, bytes, 1),
                );
            }
            Ok(vec![stats])
        }
        "$currentOp" => Ok(super::catalog::operations(context)),
        "$listSessions" | "$listLocalSessions" => {
            let own = context.request.body.get("lsid").cloned();
            Ok(own.into_iter().map(|id| doc! { "_id": id, "lastUse": bson::DateTime::from_millis(context.engine.now_ms() as i64) }).collect())
        }
        "$changeStream" => {
            fail(Code::ChangeStreamsMissing, "$changeStream makes no documents here")
        }
        other => {
            fail(Code::CommandNotSupported, format!("{other} is not supported by this server"))
        }
    }
}

/// Opens a change stream.
fn watch(
    context: &Context<'_>,
    name: Option<&str>,
    options: &Document,
    pipeline: Pipeline,
    variables: Document,
    most: usize,
) -> Result<Reply> {
    if context.session.operation.transaction.is_some() {
        return fail(
            Code::OperationNotSupportedInTransaction,
            "$changeStream cannot be used in a transaction",
        );
    }
    let everything =
        options.get("allChangesForCluster").is_some_and(beeline_documents_query::value::truthy);
    let watched = match name {
        Some(name) => Watched::Collection(context.database.clone(), name.to_owned()),
        None if everything && context.database == "admin" => Watched::Everything,
        None if everything => {
            return fail(
                Code::InvalidOptions,
                "A $changeStream with 'allChangesForCluster:true' may only be opened on the 'admin' database",
            );
        }
        None => Watched::Database(context.database.clone()),
    };
    let changes = Changes::new(context.engine, watched, options, pipeline, variables)?;
    let namespace = context.namespace(name.unwrap_or("$cmd.aggregate"));
    let cursor = Cursor {
        source: Source::Changes(Box::new(changes)),
        tailable: true,
        awaits: true,
        ..Cursor::of(namespace, VecDeque::new())
    };
    first_batch(context, cursor, most, false)
}

/// Runs a cursor to its end, into another collection, batch by batch.
fn drain(
    context: &Context<'_>,
    cursor: &mut Cursor,
    sink: Sink,
    source: Option<&str>,
) -> Result<()> {
    let database = context.engine.database(&context.database);
    let next = |cursor: &mut Cursor| -> Result<Option<Vec<Vec<u8>>>> {
        let mut outside = context.neighbours(database.clone());
        let (documents, done) = cursor.batch(context.engine, &mut outside, 1000)?;
        Ok(if done && documents.is_empty() { None } else { Some(documents) })
    };
    let into_itself = matches!(&sink, Sink::Merge(merge)
        if merge.database.as_ref().is_none_or(|name| *name == context.database)
            && Some(merge.collection.as_str()) == source);
    if !into_itself {
        return sink_into(context, sink, &mut || next(cursor));
    }
    // What is inserted must not be read again: all of it is read before.
    let (mut all, mut lease) = (Vec::new(), Lease::of(&context.session.operation.memory));
    while let Some(batch) = next(cursor)? {
        lease.grow(batch.iter().map(Vec::len).sum(), Memory::alone)?;
        all.extend(batch);
    }
    let mut all = Some(all);
    sink_into(context, sink, &mut || Ok(all.take()))
}

/// Puts documents where a pipeline's last stage says.
fn sink_into(
    context: &Context<'_>,
    sink: Sink,
    next: &mut super::sinks::Batches<'_>,
) -> Result<()> {
    match sink {
        Sink::Out(database, collection) => {
            super::sinks::replace_collection(context, database.as_deref(), &collection, next)
        }
        Sink::Merge(merge) => super::sinks::merge(context, &merge, next),
    }
}
