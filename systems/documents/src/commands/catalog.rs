//! Collections, databases, indexes: making, dropping, listing, figures.

use std::collections::VecDeque;

use beeline_documents_query::Filter;
use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::value::{integral, truthy};
use bson::{Bson, Document, doc};

use super::Context;
use crate::catalog::{Collection, Index};
use crate::cursor::Cursor;
use crate::engine::{existing, lock, whole_field};
use crate::reply::Reply;
use crate::write::encode;

pub(super) fn create(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    let known = [
        "capped",
        "size",
        "max",
        "validator",
        "validationLevel",
        "validationAction",
        "collation",
        "storageEngine",
        "indexOptionDefaults",
        "timeseries",
        "viewOn",
        "pipeline",
        "clusteredIndex",
        "changeStreamPreAndPostImages",
        "expireAfterSeconds",
        "autoIndexId",
        "idIndex",
        "encryptedFields",
        "temp",
        "flags",
    ];
    context.check_fields(&known)?;
    let mut options = Document::new();
    for (at, (field, value)) in context.request.body.iter().enumerate() {
        if at > 0
            && known.contains(&field.as_str())
            && !matches!(field.as_str(), "idIndex" | "autoIndexId" | "temp" | "flags")
        {
            options.insert(field.clone(), value.clone());
        }
    }
    if let Some(Bson::Document(given)) = options.get_mut("clusteredIndex") {
        if given.get_document("key").ok() != Some(&doc! { "_id": 1 })
            || !given.get("unique").is_some_and(truthy)
        {
            return fail(
                Code::BadValue,
                "the clusteredIndex option needs key: { _id: 1 } and unique: true",
            );
        }
        given.insert("v", 2);
        given.entry("name".to_owned()).or_insert(Bson::String("_id_".to_owned()));
    }
    let database = context.engine.database_or_new(&context.database)?;
    if let Some(old) = database.collection(&name)
        && old.options == options
    {
        return Ok(Reply::ok());
    }
    context.collection(Some(&database), &name)?;
    context.create(&database, &name, &options)?;
    Ok(Reply::ok())
}

pub(super) fn drop_collection(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    let dropped = match context.engine.database(&context.database) {
        Some(database) => context.engine.drop_collection(&database, &name)?,
        None => None,
    };
    Ok(Reply::Document(match dropped {
        Some(old) => {
            doc! { "nIndexesWas": old.indexes.len() as i32 + 1, "ns": old.namespace.clone(), "ok": 1.0 }
        }
        None => doc! { "ok": 1.0 },
    }))
}

pub(super) fn drop_database(context: &mut Context<'_>) -> Result<Reply> {
    let existed = context.engine.drop_database(&context.database)?;
    Ok(Reply::Document(if existed {
        doc! { "dropped": context.database.clone(), "ok": 1.0 }
    } else {
        doc! { "ok": 1.0 }
    }))
}

/// Answers with a cursor over documents.
fn listed(context: &Context<'_>, namespace: String, documents: Vec<Document>) -> Result<Reply> {
    let ready: VecDeque<Vec<u8>> = documents.iter().map(encode).collect::<Result<_>>()?;
    let most = match context.document("cursor")? {
        Some(cursor) => whole_field(cursor, "batchSize")
            .and_then(|size| usize::try_from(size).ok())
            .unwrap_or(usize::MAX),
        None => usize::MAX,
    };
    super::read::first_batch(context, Cursor::of(namespace, ready), most, false)
}

pub(super) fn list_collections(context: &mut Context<'_>) -> Result<Reply> {
    let filter =
        context.document("filter")?.map(Filter::parse).transpose()?.unwrap_or_else(Filter::all);
    let names_only = context.flag("nameOnly");
    let mut documents = Vec::new();
    if let Some(database) = context.engine.database(&context.database) {
        for collection in database.collections() {
            let whole = doc! {
                "name": collection.name.clone(),
                "type": "collection",
                "options": collection.options.clone(),
                "info": { "readOnly": false, "uuid": collection.uuid_value() },
                "idIndex": collection.id_index(),
            };
            if filter.matches(&whole) {
                documents.push(if names_only {
                    doc! { "name": collection.name.clone(), "type": "collection" }
                } else {
                    whole
                });
            }
        }
    }
    let namespace = context.namespace("$cmd.listCollections");
    listed(context, namespace, documents)
}

pub(super) fn list_databases(context: &mut Context<'_>) -> Result<Reply> {
    if context.database != "admin" {
        return fail(
            Code::Unauthorized,
            "listDatabases may only be run against the admin database.",
        );
    }
    let filter =
        context.document("filter")?.map(Filter::parse).transpose()?.unwrap_or_else(Filter::all);
    let names_only = context.flag("nameOnly");
    let (mut documents, mut total) = (Vec::new(), 0);
    for database in context.engine.databases() {
        let collections = database.collections();
        if collections.is_empty() {
            continue;
        }
        let mut size = 0;
        if !names_only {
            for collection in &collections {
                size += context.engine.count(&database, collection)?.1;
            }
        }
        let whole = doc! { "name": database.name.clone(), "sizeOnDisk": size, "empty": size == 0 };
        if filter.matches(&whole) {
            total += size;
            documents.push(Bson::Document(if names_only {
                doc! { "name": database.name.clone() }
            } else {
                whole
            }));
        }
    }
    let mut reply = doc! { "databases": documents };
    if !names_only {
        reply.insert("totalSize", total);
        reply.insert("totalSizeMb", total >> 20);
    }
    reply.insert("ok", 1.0);
    Ok(Reply::Document(reply))
}

pub(super) fn create_indexes(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    context.check_fields(&["indexes", "commitQuorum", "ignoreUnknownIndexOptions"])?;
    let Some(Bson::Array(specifications)) = context.request.body.get("indexes") else {
        return fail(Code::TypeMismatch, "BSON field 'createIndexes.indexes' must be an array");
    };
    if specifications.is_empty() {
        return fail(Code::BadValue, "Must specify at least one index to create");
    }
    let mut wanted = Vec::new();
    for specification in specifications {
        match specification {
            Bson::Document(given) => wanted.push(Index::parse(given)?),
            _ => {
                return fail(
                    Code::TypeMismatch,
                    "The elements of the 'indexes' array must be objects",
                );
            }
        }
    }
    let database = context.engine.database_or_new(&context.database)?;
    let made = database.collection(&name).is_none();
    context.collection_or_new(&database, &name)?;
    let (before, after) = context.engine.create_indexes(&database, &name, wanted)?;
    let mut reply = doc! {
        "numIndexesBefore": before as i32 + 1,
        "numIndexesAfter": after as i32 + 1,
        "createdCollectionAutomatically": made,
    };
    if before == after {
        reply.insert("note", "all indexes already exist");
    }
    reply.insert("ok", 1.0);
    Ok(Reply::Document(reply))
}

pub(super) fn drop_indexes(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    let Some(database) = context.engine.database(&context.database) else {
        return fail(Code::NamespaceNotFound, format!("ns not found {}", context.namespace(&name)));
    };
    let collection = existing(&database, &name).map_err(|mut error| {
        error.message = format!("ns not found {}", context.namespace(&name));
        error
    })?;
    let wanted = match context.request.body.get("index") {
        Some(Bson::Array(all)) => all.clone(),
        Some(one) => vec![one.clone()],
        None => {
            return fail(
                Code::NoSuchField,
                "BSON field 'dropIndexes.index' is missing but a required field",
            );
        }
    };
    let mut doomed = Vec::new();
    for one in &wanted {
        match one {
            Bson::String(all) if all == "*" => {
                doomed.extend(
                    collection
                        .indexes
                        .iter()
                        .filter(|index| index.name != "_id_")
                        .map(|index| index.id),
                );
            }
            Bson::String(id) if id == "_id_" => {
                return fail(Code::InvalidOptions, "cannot drop _id index");
            }
            Bson::String(name) => match collection.indexes.iter().find(|index| index.name == *name)
            {
                Some(index) => doomed.push(index.id),
                None => {
                    return fail(
                        Code::IndexNotFound,
                        format!("index not found with name [{name}]"),
                    );
                }
            },
            Bson::Document(key) => {
                match collection.indexes.iter().find(|index| index.key() == *key) {
                    Some(index) => doomed.push(index.id),
                    None => {
                        return fail(
                            Code::IndexNotFound,
                            format!("can't find index with key: {key}"),
                        );
                    }
                }
            }
            _ => {
                return fail(
                    Code::TypeMismatch,
                    "'index' must be a string, an object or an array of strings",
                );
            }
        }
    }
    for id in doomed {
        context.engine.remove_index(&database, &name, id)?;
    }
    context.engine.end_leavings(&database);
    Ok(Reply::Document(doc! { "nIndexesWas": collection.indexes.len() as i32 + 1, "ok": 1.0 }))
}

pub(super) fn list_indexes(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    let collection = match context.engine.database(&context.database) {
        Some(database) => existing(&database, &name)?,
        None => {
            return fail(
                Code::NamespaceNotFound,
                format!("ns does not exist: {}", context.namespace(&name)),
            );
        }
    };
    let mut documents = vec![collection.id_index()];
    documents.extend(
        collection.indexes.iter().filter(|index| index.name != "_id_").map(|index| index.shown()),
    );
    let namespace = context.namespace(&name);
    listed(context, namespace, documents)
}

pub(super) fn rename(context: &mut Context<'_>) -> Result<Reply> {
    let body = &context.request.body;
    let (Ok(from), Ok(to)) = (body.get_str("renameCollection"), body.get_str("to")) else {
        return fail(Code::TypeMismatch, "renameCollection takes the names of two collections");
    };
    let split = |name: &str| match name.split_once('.') {
        Some((database, collection)) => Ok((database.to_owned(), collection.to_owned())),
        None => fail(Code::InvalidNamespace, format!("Invalid namespace specified '{name}'")),
    };
    let ((from_database, from), (to_database, to)) = (split(from)?, split(to)?);
    if from_database != to_database {
        return fail(
            Code::CommandNotSupported,
            "renameCollection between databases is not supported; copy with $out and drop",
        );
    }
    let Some(database) = context.engine.database(&from_database) else {
        return fail(
            Code::NamespaceNotFound,
            format!("Source collection {from_database}.{from} does not exist"),
        );
    };
    if from == to {
        return fail(Code::IllegalOperation, "Can't rename a collection to itself");
    }
    context.engine.rename(&database, &from, &to, context.flag("dropTarget"))?;
    Ok(Reply::ok())
}

pub(super) fn coll_mod(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    let Some(database) = context.engine.database(&context.database) else {
        return fail(Code::NamespaceNotFound, "ns does not exist");
    };
    let collection = existing(&database, &name)?;
    let mut reply = Document::new();
    let mut options = collection.options.clone();
    for field in
        ["validator", "validationLevel", "validationAction", "changeStreamPreAndPostImages"]
    {
        if let Some(value) = context.request.body.get(field) {
            options.insert(field, value.clone());
        }
    }
    if options != collection.options {
        context.engine.change_options(&database, &name, &options)?;
    }
    if let Some(change) = context.document("index")? {
        let found = collection.indexes.iter().find(|index| {
            match (change.get("name"), change.get("keyPattern")) {
                (Some(Bson::String(name)), _) => index.name == *name,
                (_, Some(Bson::Document(key))) => index.key() == *key,
                _ => false,
            }
        });
        let Some(index) = found else {
            return fail(Code::IndexNotFound, "cannot find the index for collMod");
        };
        let expires = change.get("expireAfterSeconds").and_then(integral);
        let hidden = change.get("hidden").map(truthy);
        if let (Some(expires), Some(old)) = (expires, index.expires_s) {
            reply.insert("expireAfterSeconds_old", old);
            reply.insert("expireAfterSeconds_new", expires);
        }
        if let Some(hidden) = hidden {
            reply.insert("hidden_old", index.hidden);
            reply.insert("hidden_new", hidden);
        }
        context.engine.change_index(&database, &name, index.id, |index| {
            if let Some(expires) = expires {
                index.expires_s = Some(expires);
                index.given.insert("expireAfterSeconds", expires);
            }
            if let Some(hidden) = hidden {
                index.hidden = hidden;
                if hidden {
                    drop(index.given.insert("hidden", true))
                } else {
                    drop(index.given.remove("hidden"))
                }
            }
        })?;
    }
    reply.insert("ok", 1.0);
    Ok(Reply::Document(reply))
}

/// Figures of a collection.
pub(super) fn figures(collection: &Collection, documents: i64, bytes: i64, scale: i64) -> Document {
    let scaled = |bytes: i64| bytes / scale.max(1);
    let mut sizes = doc! { "_id_": 0_i64 };
    sizes.extend(collection.indexes.iter().map(|index| (index.name.clone(), Bson::Int64(0))));
    let mut figures = doc! {
        "ns": collection.namespace.clone(),
        "size": scaled(bytes),
        "count": documents,
        "storageSize": scaled(bytes),
        "totalIndexSize": 0_i64,
        "totalSize": scaled(bytes),
        "indexSizes": sizes,
        "nindexes": collection.indexes.iter().filter(|index| index.name != "_id_").count() as i32 + 1,
        "capped": collection.capped.is_some(),
        "scaleFactor": scale,
    };
    if documents > 0 {
        figures.insert("avgObjSize", bytes / documents);
    }
    if let Some((size, most)) = collection.capped {
        figures.insert("maxSize", scaled(size as i64));
        figures.insert("max", most.unwrap_or(0) as i64);
    }
    figures
}

pub(super) fn coll_stats(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    let scale = context.whole("scale", 1)?.unwrap_or(1);
    let found = context
        .engine
        .database(&context.database)
        .and_then(|database| database.collection(&name).map(|one| (database, one)));
    let mut reply = match found {
        Some((database, collection)) => {
            let (documents, bytes) = context.engine.count(&database, &collection)?;
            figures(&collection, documents, bytes, scale)
        }
        None => {
            doc! { "ns": context.namespace(&name), "size": 0, "count": 0, "storageSize": 0, "nindexes": 0, "totalIndexSize": 0 }
        }
    };
    reply.insert("ok", 1.0);
    Ok(Reply::Document(reply))
}

pub(super) fn db_stats(context: &mut Context<'_>) -> Result<Reply> {
    let scale = context.whole("scale", 1)?.unwrap_or(1).max(1);
    let (mut collections, mut indexes, mut objects, mut bytes) = (0, 0, 0, 0);
    if let Some(database) = context.engine.database(&context.database) {
        for collection in database.collections() {
            let (documents, size) = context.engine.count(&database, &collection)?;
            collections += 1;
            indexes += collection.indexes.len() as i64 + 1;
            objects += documents;
            bytes += size;
        }
    }
    let (used, all) = context.engine.store().space();
    Ok(Reply::Document(doc! {
        "db": context.database.clone(), "collections": collections, "views": 0, "objects": objects,
        "avgObjSize": if objects > 0 { bytes as f64 / objects as f64 } else { 0.0 },
        "dataSize": (bytes / scale) as f64, "storageSize": (bytes / scale) as f64, "indexes": indexes,
        "indexSize": 0.0, "totalSize": (bytes / scale) as f64, "scaleFactor": scale as f64,
        "fsUsedSize": used as f64 / scale as f64, "fsTotalSize": all as f64 / scale as f64, "ok": 1.0,
    }))
}

/// Walks a collection and compares its indexes with its documents.
pub(super) fn validate(context: &mut Context<'_>) -> Result<Reply> {
    let name = context.collection_name()?;
    let Some(database) = context.engine.database(&context.database) else {
        return fail(
            Code::NamespaceNotFound,
            format!("Collection '{}' does not exist to validate.", context.namespace(&name)),
        );
    };
    let collection = existing(&database, &name)?;
    let report = crate::validate::validate(context.engine, &database, &collection)?;
    let keys: Document = report
        .entries
        .iter()
        .map(|(name, count)| (name.clone(), Bson::Int64(*count as i64)))
        .collect();
    Ok(Reply::Document(doc! {
        "ns": collection.namespace.clone(), "nInvalidDocuments": 0, "nNonCompliantDocuments": 0,
        "nrecords": report.documents as i64, "nIndexes": collection.indexes.len() as i32 + 1, "keysPerIndex": keys,
        "valid": report.errors.is_empty(), "warnings": [], "errors": report.errors, "ok": 1.0,
    }))
}

pub(super) fn operations(context: &Context<'_>) -> Vec<Document> {
    let builds = lock(&context.engine.builds);
    builds
        .iter()
        .map(|((namespace, index), (done, whole))| {
            doc! {
                "type": "op", "op": "command", "ns": namespace.clone(), "desc": "IndexBuildsCoordinator",
                "active": true, "msg": format!("Index Build: {done}/{whole}"),
                "command": { "createIndexes": namespace.clone(), "index": index.clone() },
                "progress": { "done": *done as i64, "total": *whole as i64 },
            }
        })
        .collect()
}

pub(super) fn current_op(context: &mut Context<'_>) -> Result<Reply> {
    let all = operations(context);
    context.engine.metrics.documents_cursors.set(context.engine.cursors.count() as u64);
    Ok(Reply::Document(doc! { "inprog": all, "ok": 1.0 }))
}
