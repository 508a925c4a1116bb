//! Writing: each statement goes to the shards its documents lie in.
//!
//! Statements keep their numbers in their session wherever they go, so a command that is sent again does
//! nothing again where it did something.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use beeline_documents::reply::Reply;
use beeline_documents_query::error::Code;
use beeline_documents_query::value::{integral, truthy};
use bson::oid::ObjectId;
use bson::{Bson, Document, doc};

use super::{Asked, Place, is_stale, number, whole_of};
use crate::error::{Refusal, Result, refuse};
use crate::key::ShardKey;
use crate::router::{Router, View};
use crate::shard::Shard;
use crate::table::{Sharded, Table};

/// Times a command is begun anew by a newer table.
const ATTEMPTS: usize = 5;

/// What a write did in all shards.
#[derive(Debug, Default)]
struct Outcome {
    n: i64,
    modified: i64,
    upserted: Vec<Document>,
    errors: Vec<Document>,
    retried: Vec<Bson>,
    concern: Option<Bson>,
}

impl Outcome {
    /// Takes in what a shard says of the statements with these places; how many documents it matched.
    fn add(&mut self, reply: &Document, places: &[usize]) -> i64 {
        let place = |one: &Document| {
            let at = usize::try_from(whole_of(one, "index")).unwrap_or(0);
            places.get(at).copied().unwrap_or(at) as i32
        };
        for (field, into) in [("upserted", &mut self.upserted), ("writeErrors", &mut self.errors)] {
            for one in reply.get_array(field).into_iter().flatten().filter_map(Bson::as_document) {
                let mut one = one.clone();
                let at = place(&one);
                one.insert("index", at);
                into.push(one);
            }
        }
        self.retried.extend(reply.get_array("retriedStmtIds").into_iter().flatten().cloned());
        self.n += whole_of(reply, "n");
        self.modified += whole_of(reply, "nModified");
        if let Some(concern) = reply.get("writeConcernError") {
            self.concern.get_or_insert_with(|| concern.clone());
        }
        whole_of(reply, "n")
    }

    fn fail(&mut self, at: usize, error: &Refusal) {
        let report = doc! { "index": at as i32, "code": error.code, "errmsg": &error.message };
        self.errors.push(report);
    }

    fn reply(mut self, updates: bool) -> Reply {
        let mut reply = doc! { "n": number(self.n) };
        if updates {
            reply.insert("nModified", number(self.modified));
            if !self.upserted.is_empty() {
                self.upserted.sort_by_key(|one| whole_of(one, "index"));
                reply.insert("upserted", self.upserted);
            }
        }
        if !self.retried.is_empty() {
            reply.insert("retriedStmtIds", self.retried);
        }
        if !self.errors.is_empty() {
            self.errors.sort_by_key(|one| whole_of(one, "index"));
            reply.insert("writeErrors", self.errors);
        }
        if let Some(concern) = self.concern {
            reply.insert("writeConcernError", concern);
        }
        reply.insert("ok", 1.0);
        Reply::Document(reply)
    }
}

/// A command of several statements, for the shards.
struct Batch<'a> {
    asked: &'a Asked,
    collection: &'a str,
    field: &'static str,
    carried: Document,
    before: Option<Instant>,
}

impl Batch<'_> {
    /// The command for some of the statements.
    fn command(&self, statements: &[(usize, Document)]) -> Document {
        let mut command = doc! { self.asked.name(): self.collection };
        command.extend(self.carried.clone());
        if self.carried.contains_key("txnNumber") {
            // A statement has the number it would have in one store.
            let first = self.asked.whole("stmtId").unwrap_or(0);
            let listed = self.asked.body.get_array("stmtIds").ok();
            let number = |at: usize| {
                let own = listed.and_then(|all| integral(all.get(at)?));
                Bson::Int32(own.unwrap_or(first + at as i64) as i32)
            };
            let numbers: Vec<Bson> = statements.iter().map(|(at, _)| number(*at)).collect();
            command.insert("stmtIds", numbers);
        }
        let all: Vec<Bson> =
            statements.iter().map(|(_, one)| Bson::Document(one.clone())).collect();
        command.insert(self.field, all);
        command
    }

    async fn send(
        &self,
        shard: &Arc<Shard>,
        statements: &[(usize, Document)],
        outcome: &mut Outcome,
    ) -> Result<i64> {
        let places: Vec<usize> = statements.iter().map(|(at, _)| *at).collect();
        let command = self.command(statements);
        let reply = shard.ask_before(&self.asked.database, command, self.before).await?;
        Ok(outcome.add(&reply, &places))
    }
}

fn statements(asked: &Asked, field: &str) -> Result<Vec<Document>> {
    let Ok(all) = asked.body.get_array(field) else {
        return refuse(
            Code::NoSuchField,
            format!("BSON field '{field}' is missing but a required field"),
        );
    };
    let documents: Option<Vec<Document>> =
        all.iter().map(|one| one.as_document().cloned()).collect();
    match documents {
        Some(documents) if (1..=100_000).contains(&documents.len()) => Ok(documents),
        Some(documents) => refuse(
            Code::InvalidLength,
            format!(
                "Write batch sizes must be between 1 and 100000. Got {} operations.",
                documents.len()
            ),
        ),
        None => refuse(Code::TypeMismatch, format!("the field '{field}' holds documents")),
    }
}

/// Where a statement goes.
enum Goes {
    /// To these shards at once.
    To(Vec<Arc<Shard>>),
    /// To these, one after the other, until one of them has something to do.
    UntilFound(Vec<Arc<Shard>>),
}

impl Router {
    /// The shard of a database that is about to be written, which gets one where it has none.
    pub(super) async fn primary_to_write(
        &self,
        view: &View,
        database: &str,
    ) -> Result<(View, Arc<Shard>)> {
        let mut view = view.clone();
        for _ in 0..ATTEMPTS {
            if let Some(shard) = self.primary(&view.table, database)? {
                return Ok((view, shard));
            }
            let Some(name) = emptiest(&view.table) else {
                return refuse(Code::ShardNotFound, "No shards found: add one with addShard");
            };
            let entry = doc! { "_id": database, "primary": name };
            let insert = doc! { "insert": "databases", "documents": [entry] };
            match self.config.change(view.table.epoch, vec![insert]).await {
                Ok(()) => {}
                // Another router was first.
                Err(error) if error.code == Code::WriteConflict as i32 => {}
                Err(error) => return Err(error),
            }
            self.forget_table();
            view = self.view().await?;
        }
        refuse(
            Code::ConflictingOperationInProgress,
            "the routing table changes all the time; try again",
        )
    }

    /// Runs a write by a table, and by a newer one where that grew too old before anything was sent.
    pub(super) async fn insert(&self, asked: Asked) -> Result<Reply> {
        for _ in 1..ATTEMPTS {
            match self.insert_once(&asked).await {
                Err(error) if is_stale(&error) => self.forget_table(),
                other => return other,
            }
        }
        self.insert_once(&asked).await
    }

    async fn insert_once(&self, asked: &Asked) -> Result<Reply> {
        let (namespace, collection) = (asked.namespace()?, asked.collection()?);
        let view = self.view_to_write(&namespace).await?;
        let sharded = match self.place(&view, &asked.database, &namespace)? {
            Place::Sharded(sharded) => sharded,
            Place::One(shard) => return self.whole(&shard, asked, &view).await,
            Place::Nowhere => {
                let (view, shard) = self.primary_to_write(&view, &asked.database).await?;
                return self.whole(&shard, asked, &view).await;
            }
        };
        let ordered = asked.body.get("ordered").is_none_or(truthy);
        let batch = Batch {
            asked,
            collection: &collection,
            field: "documents",
            carried: asked.carried(),
            before: Some(view.before),
        };
        let mut outcome = Outcome::default();
        let mut runs: Vec<(String, Vec<(usize, Document)>)> = Vec::new();
        let mut stopped = false;
        for (at, mut document) in statements(asked, "documents")?.into_iter().enumerate() {
            if !document.contains_key("_id") {
                let mut whole = doc! { "_id": ObjectId::new() };
                whole.extend(document);
                document = whole;
            }
            match sharded.key.of(&document) {
                Ok(key) => {
                    let shard = &sharded.chunk(&key).shard;
                    let known = match ordered {
                        // In their order: only what follows one another goes together.
                        true => runs.last_mut().filter(|(name, _)| name == shard),
                        false => runs.iter_mut().find(|(name, _)| name == shard),
                    };
                    match known {
                        Some((_, run)) => run.push((at, document)),
                        None => runs.push((shard.clone(), vec![(at, document)])),
                    }
                }
                Err(error) => {
                    outcome.fail(at, &error.into());
                    if ordered {
                        stopped = true;
                        break;
                    }
                }
            }
        }
        let broken = std::mem::take(&mut outcome.errors);
        if ordered {
            for (name, run) in runs {
                let shard = self.shard(&view.table, &name)?;
                if let Err(error) = batch.send(&shard, &run, &mut outcome).await {
                    return self.give_up(outcome, error, run[0].0, false);
                }
                if !outcome.errors.is_empty() {
                    stopped = false;
                    break;
                }
            }
            if stopped {
                outcome.errors.extend(broken);
            }
            return Ok(outcome.reply(false));
        }
        let mut parts = Vec::new();
        for (name, run) in &runs {
            parts.push((self.shard(&view.table, name)?, batch.command(run)));
        }
        // The replies come in the order of the runs.
        let replies = self.each(&asked.database, parts, batch.before).await;
        for ((_, run), reply) in runs.iter().zip(replies) {
            let places: Vec<usize> = run.iter().map(|(at, _)| *at).collect();
            match reply {
                Ok(reply) => drop(outcome.add(&reply, &places)),
                Err(error) => places.iter().for_each(|at| outcome.fail(*at, &error)),
            }
        }
        outcome.errors.extend(broken);
        Ok(outcome.reply(false))
    }

    /// Asks several shards at once; each one's reply or refusal.
    async fn each(
        &self,
        database: &str,
        parts: Vec<(Arc<Shard>, Document)>,
        before: Option<Instant>,
    ) -> Vec<Result<Document>> {
        let tasks: Vec<_> = parts
            .into_iter()
            .map(|(shard, command)| {
                let database = database.to_owned();
                tokio::spawn(async move { shard.ask_before(&database, command, before).await })
            })
            .collect();
        let mut replies = Vec::with_capacity(tasks.len());
        for task in tasks {
            let ended = || refuse(Code::InternalError, "a task of the router ended");
            replies.push(task.await.unwrap_or_else(|_| ended()));
        }
        replies
    }

    /// A whole command for one shard.
    pub(super) async fn whole(
        &self,
        shard: &Arc<Shard>,
        asked: &Asked,
        view: &View,
    ) -> Result<Reply> {
        let body = asked.body.clone();
        let reply = shard.ask_before(&asked.database, body, Some(view.before)).await?;
        Ok(Reply::Document(reply))
    }

    /// Ends a command whose shard refused it as a whole: where others did something before, that is told.
    fn give_up(
        &self,
        mut outcome: Outcome,
        error: Refusal,
        at: usize,
        updates: bool,
    ) -> Result<Reply> {
        if outcome.n == 0 && outcome.errors.is_empty() && outcome.upserted.is_empty() {
            return Err(error);
        }
        outcome.fail(at, &error);
        Ok(outcome.reply(updates))
    }

    fn goes(
        &self,
        view: &View,
        sharded: &Sharded,
        filter: &Document,
        one_only: bool,
    ) -> Result<Goes> {
        let shards = self.targets(view, sharded, filter)?;
        Ok(if one_only && shards.len() > 1 { Goes::UntilFound(shards) } else { Goes::To(shards) })
    }

    pub(super) async fn update(&self, asked: Asked) -> Result<Reply> {
        self.change(asked, "updates", true).await
    }

    pub(super) async fn delete(&self, asked: Asked) -> Result<Reply> {
        self.change(asked, "deletes", false).await
    }

    async fn change(&self, asked: Asked, field: &'static str, updates: bool) -> Result<Reply> {
        for _ in 1..ATTEMPTS {
            match self.change_once(&asked, field, updates).await {
                Err(error) if is_stale(&error) => self.forget_table(),
                other => return other,
            }
        }
        self.change_once(&asked, field, updates).await
    }

    async fn change_once(
        &self,
        asked: &Asked,
        field: &'static str,
        updates: bool,
    ) -> Result<Reply> {
        let (namespace, collection) = (asked.namespace()?, asked.collection()?);
        let view = self.view_to_write(&namespace).await?;
        let all = statements(asked, field)?;
        let sharded = match self.place(&view, &asked.database, &namespace)? {
            Place::Sharded(sharded) => sharded,
            Place::One(shard) => return self.whole(&shard, asked, &view).await,
            Place::Nowhere => {
                let upserts = all.iter().any(|one| one.get_bool("upsert").unwrap_or(false));
                if !upserts {
                    return Ok(Outcome::default().reply(updates));
                }
                let (view, shard) = self.primary_to_write(&view, &asked.database).await?;
                return self.whole(&shard, asked, &view).await;
            }
        };
        let ordered = asked.body.get("ordered").is_none_or(truthy);
        let batch = Batch {
            asked,
            collection: &collection,
            field,
            carried: asked.carried(),
            before: Some(view.before),
        };
        let mut outcome = Outcome::default();
        for (at, statement) in all.into_iter().enumerate() {
            let done = match updates {
                true => self.check_update(sharded, &statement),
                false => Ok(()),
            };
            let done = match done {
                Ok(()) => {
                    self.one_statement(&view, sharded, &batch, at, statement, &mut outcome).await
                }
                Err(error) => {
                    outcome.fail(at, &error);
                    Ok(())
                }
            };
            if let Err(error) = done {
                if is_stale(&error) && at == 0 {
                    return Err(error);
                }
                if ordered {
                    return self.give_up(outcome, error, at, updates);
                }
                outcome.fail(at, &error);
            }
            if ordered && !outcome.errors.is_empty() {
                break;
            }
        }
        Ok(outcome.reply(updates))
    }

    async fn one_statement(
        &self,
        view: &View,
        sharded: &Sharded,
        batch: &Batch<'_>,
        at: usize,
        statement: Document,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let filter = statement.get_document("q").cloned().unwrap_or_default();
        let one_only = match batch.field {
            "updates" => !statement.get_bool("multi").unwrap_or(false),
            _ => statement.get("limit").and_then(integral) == Some(1),
        };
        let one = [(at, statement)];
        match self.goes(view, sharded, &filter, one_only)? {
            Goes::UntilFound(shards) => {
                for shard in shards {
                    let errors = outcome.errors.len();
                    if batch.send(&shard, &one, outcome).await? > 0 || outcome.errors.len() > errors
                    {
                        break;
                    }
                }
            }
            Goes::To(shards) => {
                let parts: Vec<_> =
                    shards.into_iter().map(|shard| (shard, batch.command(&one))).collect();
                let mut refused = None;
                for reply in self.each(&batch.asked.database, parts, batch.before).await {
                    match reply {
                        Ok(reply) => drop(outcome.add(&reply, &[at])),
                        Err(error) => refused = refused.or(Some(error)),
                    }
                }
                if let Some(error) = refused {
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Refuses an update that could leave a document in a shard where it does not belong.
    fn check_update(&self, sharded: &Sharded, statement: &Document) -> Result<()> {
        let filter = statement.get_document("q").cloned().unwrap_or_default();
        let (_, exact) = sharded.key.stretches(&filter);
        let upsert = statement.get_bool("upsert").unwrap_or(false);
        let Some(update) = statement.get("u") else {
            return refuse(Code::NoSuchField, "BSON field 'update.updates.u' is missing");
        };
        check_change(&sharded.key, &filter, exact, update)?;
        if upsert && !exact {
            return refuse(
                Code::ShardKeyNotFound,
                "Failed to target upsert by query :: could not extract exact shard key",
            );
        }
        Ok(())
    }

    pub(super) async fn find_and_modify(&self, asked: Asked) -> Result<Reply> {
        for _ in 1..ATTEMPTS {
            match self.find_and_modify_once(&asked).await {
                Err(error) if is_stale(&error) => self.forget_table(),
                other => return other,
            }
        }
        self.find_and_modify_once(&asked).await
    }

    async fn find_and_modify_once(&self, asked: &Asked) -> Result<Reply> {
        let namespace = asked.namespace()?;
        let view = self.view_to_write(&namespace).await?;
        let sharded = match self.place(&view, &asked.database, &namespace)? {
            Place::Sharded(sharded) => sharded,
            Place::One(shard) => return self.whole(&shard, asked, &view).await,
            Place::Nowhere => {
                let (view, shard) = self.primary_to_write(&view, &asked.database).await?;
                return self.whole(&shard, asked, &view).await;
            }
        };
        let filter = asked.document("query");
        let (_, exact) = sharded.key.stretches(&filter);
        if !exact {
            return refuse(
                Code::ShardKeyNotFound,
                "Query for sharded findAndModify must contain the shard key",
            );
        }
        if let Some(update) = asked.body.get("update") {
            check_change(&sharded.key, &filter, exact, update)?;
        }
        let shards = self.targets(&view, sharded, &filter)?;
        match shards.first() {
            Some(shard) => self.whole(shard, asked, &view).await,
            None => refuse(Code::ShardNotFound, "the collection lies in no shard"),
        }
    }
}

/// The shard with the fewest databases.
fn emptiest(table: &Table) -> Option<String> {
    let mut counts: BTreeMap<&String, usize> = table.shards.keys().map(|name| (name, 0)).collect();
    for name in table.databases.values() {
        if let Some(count) = counts.get_mut(name) {
            *count += 1;
        }
    }
    counts.into_iter().min_by_key(|(_, count)| *count).map(|(name, _)| name.clone())
}

/// Refuses a change of the shard key: chunks' documents do not move.
fn check_change(key: &ShardKey, filter: &Document, exact: bool, update: &Bson) -> Result<()> {
    let touches = |name: &str| {
        refuse(
            Code::IllegalOperation,
            format!(
                "the change of '{name}' may change the shard key, which this router does not allow: delete the document and insert it anew"
            ),
        )
    };
    match update {
        Bson::Array(stages) => {
            for (name, argument) in stages.iter().filter_map(Bson::as_document).flatten() {
                let fields: Vec<&str> = match (name.as_str(), argument) {
                    ("$set" | "$addFields", Bson::Document(fields)) => {
                        fields.keys().map(String::as_str).collect()
                    }
                    ("$unset", Bson::String(field)) => vec![field],
                    ("$unset", Bson::Array(fields)) => {
                        fields.iter().filter_map(Bson::as_str).collect()
                    }
                    _ => return touches(name),
                };
                if let Some(field) = fields.iter().find(|field| key.is_touched_by(field)) {
                    return touches(field);
                }
            }
            Ok(())
        }
        Bson::Document(update)
            if update.keys().next().is_some_and(|name| name.starts_with('$')) =>
        {
            for (operator, fields) in update {
                let Bson::Document(fields) = fields else { continue };
                for (field, value) in fields {
                    let other = value.as_str().filter(|_| operator == "$rename");
                    // What an upsert sets is the same as what the filter says, or it goes astray.
                    let same = matches!(operator.as_str(), "$set" | "$setOnInsert")
                        && filter.get(field) == Some(value);
                    if key.is_touched_by(field) && !same
                        || other.is_some_and(|other| key.is_touched_by(other))
                    {
                        return touches(field);
                    }
                }
            }
            Ok(())
        }
        Bson::Document(replacement) => {
            if !exact {
                return refuse(
                    Code::ShardKeyNotFound,
                    "a replacement needs the whole shard key in its filter",
                );
            }
            let at = key.of(replacement)?;
            let (stretches, _) = key.stretches(filter);
            match stretches.first().is_some_and(|stretch| stretch.low == at) {
                true => Ok(()),
                false => touches("the document"),
            }
        }
        _ => refuse(Code::FailedToParse, "an update is a document or a pipeline"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_change_takes_a_document_out_of_its_shard() {
        let key = ShardKey::parse(&doc! { "a.b": 1 }).unwrap();
        let exact = doc! { "a.b": 1, "x": 2 };
        for (filter, update, fine) in [
            (&exact, Bson::from(doc! { "$set": { "c": 1 }, "$inc": { "a.c": 1 } }), true),
            (&exact, doc! { "$set": { "a.b": 1 } }.into(), true),
            (&exact, doc! { "$set": { "a.b": 2 } }.into(), false),
            (&exact, doc! { "$set": { "a": {} } }.into(), false),
            (&exact, doc! { "$unset": { "a": 1 } }.into(), false),
            (&exact, doc! { "$inc": { "a.b": 1 } }.into(), false),
            (&exact, doc! { "$rename": { "c": "a" } }.into(), false),
            (&exact, doc! { "a": { "b": 1 }, "y": 3 }.into(), true),
            (&exact, doc! { "a": { "b": 1.0 } }.into(), true),
            (&exact, doc! { "a": { "b": 2 } }.into(), false),
            (&exact, doc! { "y": 3 }.into(), false),
            (&doc! { "x": 2 }, doc! { "a": { "b": 1 } }.into(), false),
            (&exact, vec![Bson::from(doc! { "$set": { "c": "$x" } })].into(), true),
            (&exact, vec![Bson::from(doc! { "$unset": ["c", "a.b"] })].into(), false),
            (&exact, vec![Bson::from(doc! { "$replaceWith": "$c" })].into(), false),
        ] {
            let (_, is_exact) = key.stretches(filter);
            let checked = check_change(&key, filter, is_exact, &update);
            assert_eq!(checked.is_ok(), fine, "{filter} {update}: {checked:?}");
        }
    }
}
