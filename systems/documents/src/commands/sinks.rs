//! Where pipelines put their results: `$out` and `$merge`.

use beeline_documents_query::Filter;
use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::expression::Scope;
use beeline_documents_query::pipeline::Merge;
use beeline_documents_query::update::{ArrayFilters, Context as UpdateContext, Update};
use bson::oid::ObjectId;
use bson::{Bson, Document, doc};

use super::Context;
use super::write::CHUNK;
use crate::catalog::Database;
use crate::engine::{ON_ITS_WAY, existing, lock};
use crate::log::Recorder;
use crate::plan::choose;
use crate::scan::{Scan, decode};
use crate::write::{self, Rewrite, encode};

/// Gives the next documents, until there are none.
pub(super) type Batches<'b> = dyn FnMut() -> Result<Option<Vec<Vec<u8>>>> + 'b;

/// `$out`: puts documents in place of a collection's.
pub(super) fn replace_collection(
    context: &Context<'_>,
    database: Option<&str>,
    name: &str,
    next: &mut Batches<'_>,
) -> Result<()> {
    let database = context.engine.database_or_new(database.unwrap_or(&context.database))?;
    let temporary = format!("{ON_ITS_WAY}{}", ObjectId::new().to_hex());
    let (options, indexes) = match database.collection(name) {
        Some(old) if old.capped.is_some() => {
            return fail(
                Code::BadValue,
                format!("namespace '{}' is capped so it can't be used for $out", old.namespace),
            );
        }
        Some(old) => (
            old.options.clone(),
            old.indexes
                .iter()
                .map(|index| crate::catalog::Index::parse(&index.given))
                .collect::<Result<Vec<_>>>()?,
        ),
        None => (Document::new(), Vec::new()),
    };
    // What no running command fills is a leftover, and is dropped.
    lock(&context.engine.filling).insert(temporary.clone());
    let made = (|| {
        context.engine.create(&database, &temporary, &options)?;
        context.engine.create_indexes(&database, &temporary, indexes)?;
        while let Some(documents) = next()? {
            for chunk in documents.chunks(CHUNK.0) {
                context.engine.with(&database, |row| {
                    for bytes in chunk {
                        let (id, bytes) = write::prepare(bytes.clone())?;
                        let collection = existing(&database, &temporary)?;
                        let mut recorder = Recorder::plain(context.engine);
                        write::insert(row, &database, &collection, &id, bytes, &mut recorder)?;
                    }
                    Ok(())
                })?;
            }
        }
        context.engine.rename(&database, &temporary, name, true)
    })();
    let dropped = match made.is_err() {
        true => context.engine.drop_collection(&database, &temporary).map(drop),
        false => Ok(()),
    };
    lock(&context.engine.filling).remove(&temporary);
    dropped.and(made)
}

/// `$merge`: puts documents into a collection.
pub(super) fn merge(context: &Context<'_>, merge: &Merge, next: &mut Batches<'_>) -> Result<()> {
    let database =
        context.engine.database_or_new(merge.database.as_deref().unwrap_or(&context.database))?;
    let name = &merge.collection;
    let collection = context.engine.collection_or_new(&database, name)?;
    let on = if merge.on.is_empty() { vec!["_id".to_owned()] } else { merge.on.clone() };
    let unique = on == ["_id"]
        || collection.indexes.iter().any(|index| {
            index.unique
                && index.partial.is_none()
                && index.fields.len() == on.len()
                && index.fields.iter().all(|(path, _)| on.contains(&path.join(".")))
        });
    if !unique {
        return fail(
            Code::MergeWithoutIndex,
            "Cannot find index to verify that join fields will be unique",
        );
    }
    while let Some(documents) = next()? {
        for bytes in documents {
            merge_one(context, merge, &database, &on, &bytes)?;
        }
    }
    Ok(())
}

/// Puts one document into the collection that `$merge` names.
fn merge_one(
    context: &Context<'_>,
    merge: &Merge,
    database: &Database,
    on: &[String],
    bytes: &[u8],
) -> Result<()> {
    let name = &merge.collection;
    let mut document = decode(bytes)?;
    if !document.contains_key("_id") && *on == ["_id"] {
        document.insert("_id", ObjectId::new());
    }
    let mut query = Document::new();
    for field in on {
        let parts: Vec<String> = field.split('.').map(str::to_owned).collect();
        match beeline_documents_query::path::get_in(&document, &parts) {
            Some(value) if !matches!(value, Bson::Array(_) | Bson::Null) => {
                drop(query.insert(field.clone(), doc! { "$eq": value }))
            }
            _ => {
                return fail(
                    Code::MergeShape,
                    "$merge write error: 'on' field cannot be missing, null, undefined or an array",
                );
            }
        }
    }
    let filter = Filter::parse(&query)?;
    let mut variables = context.variables()?;
    variables.insert("new", document.clone());
    for (name, expression) in &merge.variables {
        let value =
            expression.evaluate(&Scope::with_variables(&variables.clone()).rooted(&document))?;
        variables.insert(name.clone(), value);
    }
    let none = ArrayFilters::default();
    let mut set = document.clone();
    let update = match merge.matched.as_str() {
        "merge" => {
            set.remove("_id");
            Some(if set.is_empty() {
                None
            } else {
                Some(Update::parse(
                    &Bson::Array(vec![Bson::Document(
                        doc! { "$replaceWith": { "$mergeObjects": ["$$ROOT", { "$literal": set }] } },
                    )]),
                    &none,
                )?)
            })
        }
        "replace" => Some(Some(Update::Replacement(document.clone()))),
        "pipeline" => Some(
            merge.pipeline.as_ref().map(|pipeline| Update::Pipeline(Box::new(pipeline.fresh()))),
        ),
        _ => None,
    };
    let there = context.engine.with(database, |row| {
        let collection = existing(database, name)?;
        let mut scan =
            Scan::new(&collection, choose(&collection, &filter, None, None)?, filter.clone());
        let mut found = Vec::new();
        while found.is_empty() && !scan.done {
            scan.slice(row, &Scope::default(), 1, &mut found)?;
        }
        let Some(found) = found.pop() else {
            if merge.unmatched == "insert" {
                let (id, bytes) = write::prepare(encode(&document)?)?;
                write::insert(
                    row,
                    database,
                    &collection,
                    &id,
                    bytes,
                    &mut Recorder::plain(context.engine),
                )?;
            }
            return Ok(false);
        };
        let Some(Some(update)) = &update else { return Ok(true) };
        let before = decode(&found.bytes)?;
        let scope = Scope::with_variables(&variables);
        let after = update.apply(
            &before,
            &UpdateContext {
                filter: &filter,
                array_filters: &none,
                inserting: false,
                scope: &scope,
            },
        )?;
        write::update(
            row,
            database,
            &collection,
            &Rewrite { found: &found, before: &before, after: &after, replaced: true },
            &mut Recorder::plain(context.engine),
        )?;
        Ok(true)
    })?;
    if there && merge.matched == "fail" {
        return fail(Code::DuplicateKey, "$merge found a document with whenMatched: fail");
    }
    if !there && merge.unmatched == "fail" {
        return fail(
            Code::MergeStageNoMatchingDocument,
            "$merge could not find a matching document in the target collection for at least one document in the source collection",
        );
    }
    Ok(())
}
