//! What a query would do.

use std::collections::VecDeque;

use beeline_documents_query::Filter;
use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::pipeline::Pipeline;
use bson::{Bson, Document, doc};

use super::server::VERSION;
use super::{Context, Request};
use crate::query::{Asked, Query};
use crate::reply::Reply;

pub(super) fn explain(context: &mut Context<'_>) -> Result<Reply> {
    let Some(inner) = context.document("explain")?.cloned() else {
        return fail(Code::TypeMismatch, "explain takes a command");
    };
    let verbosity =
        context.request.body.get_str("verbosity").unwrap_or("allPlansExecution").to_owned();
    if !matches!(verbosity.as_str(), "queryPlanner" | "executionStats" | "allPlansExecution") {
        return fail(
            Code::BadValue,
            format!("Enumeration value '{verbosity}' for field 'verbosity' is not a valid value."),
        );
    }
    context.request = Request { body: inner, ..Request::default() };
    let name = context.request.name().to_owned();
    let collection = context.collection_name()?;
    let asked = match name.as_str() {
        "find" => super::read::asked(context)?,
        "count" | "distinct" => Asked {
            filter: context.document("query")?.map(Filter::parse).transpose()?,
            hint: context.request.body.get("hint").cloned(),
            ..Asked::default()
        },
        "aggregate" => return aggregate(context),
        "update" | "delete" => {
            let field = if name == "update" { "updates" } else { "deletes" };
            let first = match context.request.body.get(field) {
                Some(Bson::Array(all)) => {
                    all.first().and_then(Bson::as_document).cloned().unwrap_or_default()
                }
                _ => Document::new(),
            };
            let filter = first.get_document("q").ok().map(Filter::parse).transpose()?;
            Asked { filter, hint: first.get("hint").cloned(), ..Asked::default() }
        }
        "findAndModify" | "findandmodify" => Asked {
            filter: context.document("query")?.map(Filter::parse).transpose()?,
            ..Asked::default()
        },
        other => {
            return fail(
                Code::CommandNotFound,
                format!("Explain failed due to unknown command: {other}"),
            );
        }
    };
    let source = match name.as_str() {
        "find" => context.document("filter")?.cloned().unwrap_or_default(),
        _ => context.document("query")?.cloned().unwrap_or_default(),
    };
    let mut query = super::read::query(context, &collection, asked)?;
    Ok(Reply::Document(report(
        context,
        &collection,
        &mut query,
        &source,
        verbosity != "queryPlanner",
    )?))
}

fn report(
    context: &Context<'_>,
    collection: &str,
    query: &mut Query,
    filter: &Document,
    run: bool,
) -> Result<Document> {
    let mut winning =
        query.plan().map_or(doc! { "stage": "EOF" }, |plan| plan.explained(filter, None));
    if query.sorts() {
        winning = doc! { "stage": "SORT", "inputStage": winning };
    }
    let mut reply = doc! {
        "explainVersion": "1",
        "queryPlanner": {
            "namespace": context.namespace(collection),
            "indexFilterSet": false,
            "parsedQuery": filter.clone(),
            "winningPlan": winning.clone(),
            "rejectedPlans": [],
        },
    };
    if run {
        let (mut out, mut returned, started) = (VecDeque::new(), 0_i64, std::time::Instant::now());
        while !query.is_done() {
            query.fill(context.engine, 1000, &mut out)?;
            returned += out.len() as i64;
            out.clear();
        }
        let (documents, keys) = query.examined();
        reply.insert("executionStats", doc! {
            "executionSuccess": true, "nReturned": returned,
            "executionTimeMillis": started.elapsed().as_millis() as i64,
            "totalKeysExamined": keys as i64, "totalDocsExamined": documents as i64, "executionStages": winning,
        });
    }
    reply.insert(
        "serverInfo",
        doc! { "host": context.identity.address.clone(), "version": VERSION },
    );
    reply.insert("ok", 1.0);
    Ok(reply)
}

pub(super) fn aggregate(context: &mut Context<'_>) -> Result<Reply> {
    let Some(Bson::Array(stages)) = context.request.body.get("pipeline").cloned() else {
        return fail(Code::TypeMismatch, "'pipeline' option must be specified as an array");
    };
    let collection = context.collection_name()?;
    let mut pipeline = Pipeline::parse(&stages)?;
    pipeline.take_sink();
    let filter = match stages.first() {
        Some(Bson::Document(first)) => first.get_document("$match").cloned().unwrap_or_default(),
        _ => Document::new(),
    };
    let variables = context.variables()?;
    let mut query = super::read::pipeline_query(context, &collection, &mut pipeline, &variables)?;
    let planner = report(context, &collection, &mut query, &filter, false)?;
    if pipeline.is_empty() {
        return Ok(Reply::Document(planner));
    }
    let mut shown = vec![Bson::Document(
        doc! { "$cursor": { "queryPlanner": planner.get("queryPlanner").cloned().unwrap_or(Bson::Null) } },
    )];
    let skip = usize::from(!filter.is_empty());
    shown.extend(stages.into_iter().skip(skip));
    Ok(Reply::Document(
        doc! { "explainVersion": "1", "stages": shown, "serverInfo": { "version": VERSION }, "ok": 1.0 },
    ))
}
