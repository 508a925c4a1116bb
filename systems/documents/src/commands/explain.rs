//! What a query would do.

use std::collections::VecDeque;

use beeline_documents_query::Filter;
use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::pipeline::Pipeline;
use beeline_documents_query::sort::Order;
use beeline_documents_query::value::{integral, truthy};
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
    let (source, asked, above) = match name.as_str() {
        "find" => {
            let source = context.document("filter")?.cloned().unwrap_or_default();
            let asked = super::read::asked(context)?;
            let above = around(context, &asked)?;
            (source, asked, above)
        }
        "count" | "distinct" => {
            let source = context.document("query")?.cloned().unwrap_or_default();
            let above = match name.as_str() {
                "count" => vec![doc! { "stage": "COUNT" }],
                _ => Vec::new(),
            };
            (source.clone(), of_filter(&source, context.request.body.get("hint"))?, above)
        }
        "aggregate" => return aggregate(context),
        "update" | "delete" => {
            let field = if name == "update" { "updates" } else { "deletes" };
            let first = match context.request.body.get(field) {
                Some(Bson::Array(all)) => {
                    all.first().and_then(Bson::as_document).cloned().unwrap_or_default()
                }
                _ => Document::new(),
            };
            let source = first.get_document("q").cloned().unwrap_or_default();
            let all = match name.as_str() {
                "update" => first.get_bool("multi").unwrap_or(false),
                _ => first.get("limit").and_then(integral) != Some(1),
            };
            let asked =
                Asked { limit: (!all).then_some(1), ..of_filter(&source, first.get("hint"))? };
            (source, asked, vec![doc! { "stage": name.to_uppercase() }])
        }
        "findAndModify" | "findandmodify" => {
            let source = context.document("query")?.cloned().unwrap_or_default();
            let removes = context.request.body.get("remove").is_some_and(truthy);
            let stage = if removes { "DELETE" } else { "UPDATE" };
            let order = context.document("sort")?.map(Order::parse).transpose()?;
            let hint = context.request.body.get("hint");
            let asked = Asked { limit: Some(1), order, ..of_filter(&source, hint)? };
            (source, asked, vec![doc! { "stage": stage }])
        }
        other => {
            return fail(
                Code::CommandNotFound,
                format!("Explain failed due to unknown command: {other}"),
            );
        }
    };
    let mut query = super::read::query(context, &collection, asked)?;
    let run = verbosity != "queryPlanner";
    Ok(Reply::Document(report(context, &collection, &mut query, &source, above, run)?))
}

fn of_filter(filter: &Document, hint: Option<&Bson>) -> Result<Asked> {
    let filter = (!filter.is_empty()).then(|| Filter::parse(filter)).transpose()?;
    Ok(Asked { filter, hint: hint.cloned(), ..Asked::default() })
}

/// The stages of a find above its sort, from the root down.
fn around(context: &Context<'_>, asked: &Asked) -> Result<Vec<Document>> {
    let mut all = Vec::new();
    if let (Some(limit), None) = (asked.limit, &asked.order) {
        all.push(doc! { "stage": "LIMIT", "limitAmount": limit as i64 });
    }
    if let Some(shape) = context.document("projection")?.filter(|shape| !shape.is_empty()) {
        let simple = shape.iter().all(|(name, value)| {
            !name.contains('.') && (matches!(value, Bson::Boolean(_)) || integral(value).is_some())
        });
        let stage = if simple { "PROJECTION_SIMPLE" } else { "PROJECTION_DEFAULT" };
        all.push(doc! { "stage": stage, "transformBy": shape.clone() });
    }
    if asked.skip > 0 {
        all.push(doc! { "stage": "SKIP", "skipAmount": asked.skip as i64 });
    }
    Ok(all)
}

/// The plan of a query below the stages `above` it, from the root down, and what running it shows.
fn report(
    context: &Context<'_>,
    collection: &str,
    query: &mut Query,
    filter: &Document,
    above: Vec<Document>,
    run: bool,
) -> Result<Document> {
    let planned = query.planned();
    let mut winning = query
        .plan()
        .map_or(doc! { "stage": "EOF" }, |plan| plan.explained(filter, planned.as_ref()));
    if query.sorts() {
        let pattern = context.document("sort")?.cloned().unwrap_or_default();
        winning = doc! { "stage": "SORT", "sortPattern": pattern, "inputStage": winning };
    }
    for mut stage in above.into_iter().rev() {
        stage.insert("inputStage", winning);
        winning = stage;
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
        match winning.get_str("stage") {
            Ok("UPDATE") => drop(winning.insert("nWouldModify", returned)),
            Ok("DELETE") => drop(winning.insert("nWouldDelete", returned)),
            Ok("COUNT") => drop(winning.insert("nCounted", returned)),
            _ => {}
        }
        if matches!(winning.get_str("stage"), Ok("UPDATE" | "DELETE" | "COUNT")) {
            returned = 0;
        }
        winning.insert("nReturned", returned);
        reply.insert("executionStats", doc! {
            "executionSuccess": true, "nReturned": returned,
            "executionTimeMillis": started.elapsed().as_millis() as i64,
            "totalKeysExamined": keys as i64, "totalDocsExamined": documents as i64, "executionStages": winning,
        });
    }
    let mut command = context.request.body.clone();
    command.insert("$db", context.database.clone());
    reply.insert("command", command);
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
    let planner = report(context, &collection, &mut query, &filter, Vec::new(), false)?;
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
