//! Change streams: the log as clients see it.
//!
//! A stream reads the logs of its databases up to a time taken before (see [`crate::log`]), turns
//! entries into events, and sends those through its pipeline. Its position is a time, which the resume token holds.

use std::collections::VecDeque;
use std::sync::Arc;

use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::expression::Scope;
use beeline_documents_query::pipeline::{Outside, Pipeline};
use beeline_documents_query::value::key;
use bson::{Bson, Document, doc};

use crate::catalog::Database;
use crate::engine::Engine;
use crate::layout::{kind, numbered};
use crate::log::{self, stamp, time_of};
use crate::scan::decode;
use crate::write::encode;

/// Bytes of log read under one lock.
const READ: usize = 4 << 20;

/// Which changes are watched.
#[derive(Clone, Debug)]
pub enum Watched {
    /// Those of a collection.
    Collection(String, String),
    /// Those of a database.
    Database(String),
    /// All.
    Everything,
}

/// A stream.
#[derive(Debug)]
pub struct Changes {
    watched: Watched,
    pipeline: Pipeline,
    variables: Document,
    behind: u64,
    lookup: bool,
    after_null: bool,
    before_null: bool,
    ended: bool,
}

/// The token of a time.
#[must_use]
pub fn token(time: u64) -> Document {
    doc! { "_data": format!("{time:016X}") }
}

fn time_of_token(token: &Document) -> Result<u64> {
    match token.get_str("_data").ok().and_then(|data| u64::from_str_radix(data, 16).ok()) {
        Some(time) => Ok(time),
        None => fail(Code::InvalidResumeToken, format!("Bad resume token: {token}")),
    }
}

impl Changes {
    /// A stream of what `watched` says, from now on or from where the options say.
    ///
    /// Errors: options that contradict each other, a token that is none.
    pub fn new(
        engine: &Engine,
        watched: Watched,
        options: &Document,
        pipeline: Pipeline,
        variables: Document,
    ) -> Result<Self> {
        if !engine.logs() {
            return fail(
                Code::ChangeStreamsMissing,
                "The $changeStream stage is only supported on replica sets; this node keeps no log (--documents-oplog-size 0)",
            );
        }
        for name in options.keys() {
            if !matches!(
                name.as_str(),
                "fullDocument"
                    | "fullDocumentBeforeChange"
                    | "resumeAfter"
                    | "startAfter"
                    | "startAtOperationTime"
                    | "allChangesForCluster"
                    | "showExpandedEvents"
            ) {
                return fail(
                    Code::UnknownField,
                    format!("BSON field '$changeStream.{name}' is an unknown field."),
                );
            }
        }
        let lookup = match options.get_str("fullDocument") {
            Ok("updateLookup") => true,
            Ok("default" | "whenAvailable") | Err(_) => false,
            Ok("required") => {
                return fail(
                    Code::CommandNotSupported,
                    "fullDocument: 'required' needs images of documents, which this server does not keep",
                );
            }
            Ok(other) => {
                return fail(
                    Code::BadValue,
                    format!(
                        "Enumeration value '{other}' for field '$changeStream.fullDocument' is not a valid value."
                    ),
                );
            }
        };
        if options.get_str("fullDocumentBeforeChange").is_ok_and(|word| word == "required") {
            return fail(
                Code::CommandNotSupported,
                "fullDocumentBeforeChange: 'required' needs images of documents, which this server does not keep",
            );
        }
        let after =
            ["resumeAfter", "startAfter"].iter().find_map(|name| options.get_document(name).ok());
        let behind = match (after, options.get("startAtOperationTime")) {
            (Some(_), Some(_)) => {
                return fail(
                    Code::InvalidOptions,
                    "Only one type of resume option is allowed, but multiple were found.",
                );
            }
            (Some(token), None) => time_of_token(token)?,
            (None, Some(Bson::Timestamp(at))) => time_of(at).saturating_sub(1),
            (None, Some(_)) => {
                return fail(Code::TypeMismatch, "startAtOperationTime must be a timestamp");
            }
            (None, None) => engine.told_from(),
        };
        if options.get_bool("showExpandedEvents").unwrap_or(false) {
            return fail(
                Code::CommandNotSupported,
                "showExpandedEvents is not supported by this server",
            );
        }
        // No images are kept, so where they are asked for if available they are null.
        let says = |name: &str| options.get_str(name).is_ok_and(|word| word == "whenAvailable");
        let (after_null, before_null) = (says("fullDocument"), says("fullDocumentBeforeChange"));
        Ok(Self {
            watched,
            pipeline,
            variables,
            behind,
            lookup,
            after_null,
            before_null,
            ended: false,
        })
    }

    /// The token behind everything that was read.
    #[must_use]
    pub fn token(&self) -> Document {
        token(self.behind)
    }

    /// The stream was ended by what happened to its collection.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    fn databases(&self, engine: &Engine) -> Vec<Arc<Database>> {
        match &self.watched {
            Watched::Collection(database, _) | Watched::Database(database) => {
                engine.database(database).into_iter().collect()
            }
            Watched::Everything => engine.databases(),
        }
    }

    /// Reads on; events go to `out`.
    ///
    /// Errors: the log was cut before the position, those of the pipeline.
    pub fn fill(
        &mut self,
        engine: &Engine,
        outside: &mut dyn Outside,
        out: &mut VecDeque<Vec<u8>>,
    ) -> Result<()> {
        if self.behind < engine.log_floor.load(std::sync::atomic::Ordering::Acquire) {
            return log::history_lost();
        }
        let until = engine.told_until();
        if self.ended || until <= self.behind {
            return Ok(());
        }
        let databases = self.databases(engine);
        let (mut entries, mut safe) = (Vec::new(), until);
        for database in &databases {
            let mut own = Vec::new();
            let ended =
                engine.with(database, |row| log::read(row, self.behind, until, READ, &mut own))?;
            // Where a log was cut by the limit of a read, what others have behind its end waits.
            if !ended && let Some((last, _)) = own.last() {
                safe = safe.min(*last);
            }
            entries.append(&mut own);
        }
        entries.retain(|(time, _)| *time <= safe);
        entries.sort_by_key(|(time, _)| *time);
        let variables = self.variables.clone();
        let scope = Scope::with_variables(&variables);
        for (time, entry) in entries {
            self.behind = time;
            for event in self.events(engine, time, &entry)? {
                let invalidates =
                    event.get_str("operationType").is_ok_and(|word| word == "invalidate");
                let mut results = Vec::new();
                self.pipeline.push(event, &scope, outside, &mut results)?;
                for result in &results {
                    if !result.contains_key("_id") {
                        return fail(Code::ChangeStreamFatalError, "Encountered an event whose _id field, which contains the resume token, was modified by the pipeline. Modifying the _id field of an event makes it impossible to resume the stream from that point. Only transformations that retain the unmodified _id field are allowed.").map_err(log::not_resumable);
                    }
                    out.push_back(encode(result)?);
                }
                if invalidates {
                    self.ended = true;
                    return Ok(());
                }
            }
        }
        self.behind = safe;
        Ok(())
    }

    fn events(&self, engine: &Engine, time: u64, entry: &Document) -> Result<Vec<Document>> {
        let namespace = entry.get_str("ns").unwrap_or_default();
        let Some((database, collection)) = namespace.split_once('.') else { return Ok(Vec::new()) };
        let operation = entry.get_str("op").unwrap_or_default();
        let mut event =
            doc! { "_id": token(time), "operationType": "", "clusterTime": stamp(time) };
        if let Some(wall) = entry.get("wall") {
            event.insert("wallTime", wall.clone());
        }
        let what = entry.get_document("o").cloned().unwrap_or_default();
        if operation == "c" {
            return Ok(self.catalog_events(event, database, &what));
        }
        let watched = match &self.watched {
            Watched::Collection(_, name) => name == collection,
            _ => true,
        };
        if !watched
            || matches!(database, "admin" | "config" | "local")
                && matches!(self.watched, Watched::Everything)
        {
            return Ok(Vec::new());
        }
        let id = entry
            .get_document("o2")
            .or_else(|_| entry.get_document("o"))
            .ok()
            .and_then(|known| known.get("_id"))
            .cloned()
            .unwrap_or(Bson::Null);
        let place = doc! { "db": database, "coll": collection };
        let document_key = doc! { "_id": id.clone() };
        match operation {
            "i" => {
                event.insert("operationType", "insert");
                event.insert("fullDocument", what);
                event.insert("ns", place);
                event.insert("documentKey", document_key);
            }
            "u" if what.contains_key("diff") => {
                let difference = what.get_document("diff").cloned().unwrap_or_default();
                event.insert("operationType", "update");
                if self.lookup {
                    event.insert("fullDocument", current(engine, database, collection, &id)?);
                }
                if self.after_null {
                    event.insert("fullDocument", Bson::Null);
                }
                event.insert("ns", place);
                event.insert("documentKey", document_key);
                let part = |name: &str| difference.get(name).cloned().unwrap_or(Bson::Null);
                event.insert("updateDescription", doc! { "updatedFields": part("u"), "removedFields": part("d"), "truncatedArrays": part("t") });
            }
            "u" => {
                event.insert("operationType", "replace");
                event.insert("fullDocument", what);
                event.insert("ns", place);
                event.insert("documentKey", document_key);
            }
            "d" => {
                event.insert("operationType", "delete");
                event.insert("ns", place);
                event.insert("documentKey", document_key);
            }
            _ => return Ok(Vec::new()),
        }
        if self.before_null && operation != "i" {
            event.insert("fullDocumentBeforeChange", Bson::Null);
        }
        Ok(vec![event])
    }

    fn catalog_events(
        &self,
        mut event: Document,
        database: &str,
        what: &Document,
    ) -> Vec<Document> {
        let Some((word, argument)) = what.iter().next() else { return Vec::new() };
        let name = argument.as_str().unwrap_or_default();
        let own = match &self.watched {
            Watched::Collection(_, watched) => {
                watched == name || what.get_str("to").is_ok_and(|to| to == watched)
            }
            _ => true,
        };
        let invalidated = |event: &Document| {
            let mut last = event.clone();
            for field in ["ns", "to", "operationDescription", "collectionUUID"] {
                last.remove(field);
            }
            last.insert("operationType", "invalidate");
            last
        };
        match word.as_str() {
            "drop" if own => {
                event.insert("operationType", "drop");
                event.insert("ns", doc! { "db": database, "coll": name });
                match self.watched {
                    Watched::Collection(..) => vec![event.clone(), invalidated(&event)],
                    _ => vec![event],
                }
            }
            "renameCollection" if own => {
                let to = what.get_str("to").unwrap_or_default();
                event.insert("operationType", "rename");
                event.insert("ns", doc! { "db": database, "coll": name });
                event.insert("to", doc! { "db": database, "coll": to });
                match self.watched {
                    Watched::Collection(..) => vec![event.clone(), invalidated(&event)],
                    _ => vec![event],
                }
            }
            "dropDatabase" if !matches!(self.watched, Watched::Collection(..)) => {
                event.insert("operationType", "dropDatabase");
                event.insert("ns", doc! { "db": database });
                match self.watched {
                    Watched::Database(_) => vec![event.clone(), invalidated(&event)],
                    _ => vec![event],
                }
            }
            _ => Vec::new(),
        }
    }
}

/// A document as it is now; null when it is gone.
fn current(engine: &Engine, database: &str, collection: &str, id: &Bson) -> Result<Bson> {
    let Some(database) = engine.database(database) else { return Ok(Bson::Null) };
    let Some(collection) = database.collection(collection) else { return Ok(Bson::Null) };
    engine.with(&database, |row| {
        let mut bytes = Vec::new();
        if row.get(&numbered(kind::RECORD, collection.id, &key(id)), &mut bytes)? {
            return decode(&bytes).map(Bson::Document);
        }
        Ok(Bson::Null)
    })
}
