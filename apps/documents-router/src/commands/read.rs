//! Reading: one shard's reply as it is, or those of several as one.

use std::collections::BTreeMap;
use std::sync::Arc;

use beeline_documents::reply::Reply;
use beeline_documents_query::error::Code;
use beeline_documents_query::pipeline::Pipeline;
use beeline_documents_query::projection::{Dialect, Projection};
use beeline_documents_query::sort::Order;
use beeline_documents_query::value::{compare, key};
use bson::{Bson, DateTime, Document, doc};

use super::{Asked, Place, number, whole_of};
use crate::error::{Result, refuse};
use crate::merge::{Merged, Part};
use crate::router::{Router, View};
use crate::shard::Shard;
use crate::split::{Split, split};
use crate::table::Sharded;

/// Documents of a first batch when the client does not say.
const FIRST_BATCH: i64 = 101;

/// An empty result.
fn nothing(namespace: String) -> Reply {
    let (documents, cursor) = (Vec::new(), Document::new());
    Reply::Batch { id: 0, namespace, documents, first: true, cursor }
}

impl Router {
    /// The shards a filter is for.
    pub(super) fn targets(
        &self,
        view: &View,
        sharded: &Sharded,
        filter: &Document,
    ) -> Result<Vec<Arc<Shard>>> {
        let (mut chunks, _) = sharded.targets(filter);
        if chunks.is_empty() {
            // It matches nothing; one shard says so, or refuses it.
            chunks.extend(sharded.chunks.first());
        }
        let names = Sharded::shards_of(&chunks);
        names.iter().map(|name| self.shard(&view.table, name)).collect()
    }

    pub(super) async fn find(&self, asked: Asked) -> Result<Reply> {
        asked.check_collation()?;
        let (namespace, collection) = (asked.namespace()?, asked.collection()?);
        let view = self.view().await?;
        let batch = asked.whole("batchSize").unwrap_or(FIRST_BATCH).max(0);
        let single = asked.body.get_bool("singleBatch").unwrap_or(false);
        let (shards, sharded) = match self.place(&view, &asked.database, &namespace)? {
            Place::Nowhere => return Ok(nothing(namespace)),
            Place::One(shard) => (vec![shard], false),
            Place::Sharded(sharded) => {
                (self.targets(&view, sharded, &asked.document("filter"))?, true)
            }
        };
        if sharded && asked.body.get_bool("tailable").unwrap_or(false) {
            return refuse(Code::BadValue, "a sharded collection is not capped: it has no tail");
        }
        if let [shard] = shards.as_slice() {
            let parts = vec![(Arc::clone(shard), asked.body.clone())];
            let parts = self.first_parts(&asked.database, parts).await?;
            let merged = Merged::new(&asked.database, &collection, parts);
            return self.first_batch(merged, batch, single).await;
        }
        let (skip, limit) = (
            asked.whole("skip").unwrap_or(0).max(0) as u64,
            asked.whole("limit").filter(|limit| *limit > 0).map(|limit| limit as u64),
        );
        let mut body = asked.body.clone();
        body.remove("skip");
        body.remove("singleBatch");
        if let Some(limit) = limit {
            body.insert("limit", i64::try_from(limit.saturating_add(skip)).unwrap_or(i64::MAX));
        }
        let order = body.get_document("sort").ok().map(Order::parse).transpose()?;
        let mut projection = None;
        if order.as_ref().is_some_and(|order| !order.is_empty()) {
            // What documents are sorted by may not be in what is shown of them.
            if let Some(Bson::Document(shown)) = body.remove("projection") {
                if shown.keys().any(|name| name.ends_with(".$")) {
                    return refuse(
                        Code::CommandNotSupported,
                        "a positional projection of sorted documents of several shards is not supported",
                    );
                }
                projection = Projection::parse(&shown, Dialect::Find)?;
            }
        }
        body.insert("batchSize", batch.clamp(1, 10_000));
        let parts = shards.into_iter().map(|shard| (shard, body.clone())).collect();
        let parts = self.first_parts(&asked.database, parts).await?;
        let merged = Merged::new(&asked.database, &collection, parts)
            .ordered(order)
            .between(skip, limit)
            .projected(projection);
        self.first_batch(merged, batch, single).await
    }

    async fn first_parts(
        &self,
        database: &str,
        asked: Vec<(Arc<Shard>, Document)>,
    ) -> Result<Vec<Part>> {
        let replies = self.scatter(database, asked, None).await?;
        replies.into_iter().map(|(shard, reply)| Part::new(shard, reply)).collect()
    }

    async fn first_batch(&self, mut merged: Merged, batch: i64, single: bool) -> Result<Reply> {
        let (documents, done) = merged.take(usize::try_from(batch).unwrap_or(0)).await?;
        let namespace = merged.namespace();
        let id = if done || single {
            // Behind its limit a shard may have more.
            merged.close().await;
            0
        } else {
            self.keep(merged)?
        };
        Ok(Reply::Batch { id, namespace, documents, first: true, cursor: Document::new() })
    }

    pub(super) async fn get_more(&self, asked: &Asked) -> Result<Reply> {
        let Some(Bson::Int64(id)) = asked.body.get("getMore").cloned() else {
            return refuse(Code::TypeMismatch, "BSON field 'getMore.getMore' must be a long");
        };
        let Ok(collection) = asked.body.get_str("collection") else {
            return refuse(Code::TypeMismatch, "BSON field 'getMore.collection' must be a string");
        };
        let namespace = format!("{}.{collection}", asked.database);
        let most = asked.whole("batchSize").filter(|size| *size > 0);
        let mut merged = self.take_cursor(id, &namespace)?;
        merged.batch = most.unwrap_or(1000).clamp(1, 10_000);
        let taken = merged.take(most.map_or(usize::MAX, |most| most as usize)).await;
        match taken {
            Ok((documents, done)) => {
                let left = if done {
                    drop(self.forget_cursor(id, None));
                    merged.close().await;
                    0
                } else if self.put_back(id, merged).await {
                    id
                } else {
                    0
                };
                let cursor = Document::new();
                Ok(Reply::Batch { id: left, namespace, documents, first: false, cursor })
            }
            Err(error) => {
                drop(self.forget_cursor(id, None));
                merged.close().await;
                Err(error)
            }
        }
    }

    pub(super) async fn kill_cursors(&self, asked: &Asked) -> Result<Reply> {
        let namespace = asked.namespace()?;
        let Ok(ids) = asked.body.get_array("cursors") else {
            return refuse(Code::TypeMismatch, "BSON field 'killCursors.cursors' must be an array");
        };
        let (mut killed, mut unknown) = (Vec::new(), Vec::new());
        for id in ids.iter().filter_map(beeline_documents_query::value::integral) {
            let (own, cursor) = self.forget_cursor(id, Some(&namespace));
            if own {
                killed.push(id)
            } else {
                unknown.push(id)
            }
            if let Some(cursor) = cursor {
                cursor.close().await;
            }
        }
        Ok(Reply::Document(
            doc! { "cursorsKilled": killed, "cursorsNotFound": unknown, "cursorsAlive": [], "cursorsUnknown": [], "ok": 1.0 },
        ))
    }

    pub(super) async fn count(&self, asked: Asked) -> Result<Reply> {
        asked.check_collation()?;
        let view = self.view().await?;
        let sharded = match self.place(&view, &asked.database, &asked.namespace()?)? {
            Place::Nowhere => return Ok(Reply::Document(doc! { "n": 0, "ok": 1.0 })),
            Place::One(shard) => {
                let reply = shard.ask(&asked.database, asked.body).await?;
                return Ok(Reply::Document(reply));
            }
            Place::Sharded(sharded) => sharded,
        };
        let shards = self.targets(&view, sharded, &asked.document("query"))?;
        let (skip, limit) = (
            asked.whole("skip").unwrap_or(0).max(0),
            asked.whole("limit").unwrap_or(0).saturating_abs(),
        );
        let mut body = asked.body;
        body.remove("skip");
        if limit > 0 {
            body.insert("limit", limit.saturating_add(skip));
        }
        let parts = shards.into_iter().map(|shard| (shard, body.clone())).collect();
        let replies = self.scatter(&asked.database, parts, None).await?;
        let all: i64 = replies.iter().map(|(_, reply)| whole_of(reply, "n")).sum();
        let mut n = (all - skip).max(0);
        if limit > 0 {
            n = n.min(limit);
        }
        Ok(Reply::Document(doc! { "n": number(n), "ok": 1.0 }))
    }

    pub(super) async fn distinct(&self, asked: Asked) -> Result<Reply> {
        asked.check_collation()?;
        let view = self.view().await?;
        let sharded = match self.place(&view, &asked.database, &asked.namespace()?)? {
            Place::Nowhere => {
                return Ok(Reply::Document(doc! { "values": [], "ok": 1.0 }));
            }
            Place::One(shard) => {
                let reply = shard.ask(&asked.database, asked.body).await?;
                return Ok(Reply::Document(reply));
            }
            Place::Sharded(sharded) => sharded,
        };
        let shards = self.targets(&view, sharded, &asked.document("query"))?;
        let parts = shards.into_iter().map(|shard| (shard, asked.body.clone())).collect();
        let mut values = BTreeMap::new();
        for (_, mut reply) in self.scatter(&asked.database, parts, None).await? {
            if let Some(Bson::Array(all)) = reply.remove("values") {
                for value in all {
                    values.entry(key(&value)).or_insert(value);
                }
            }
        }
        let mut values: Vec<Bson> = values.into_values().collect();
        values.sort_by(compare);
        Ok(Reply::Document(doc! { "values": values, "ok": 1.0 }))
    }

    pub(super) async fn aggregate(&self, asked: Asked) -> Result<Reply> {
        asked.check_collation()?;
        let Ok(stages) = asked.body.get_array("pipeline").cloned() else {
            return refuse(Code::TypeMismatch, "'pipeline' option must be specified as an array");
        };
        let first = stages.first().and_then(Bson::as_document);
        if first.is_some_and(|first| first.contains_key("$changeStream")) {
            return refuse(
                Code::ChangeStreamsMissing,
                "change streams through the router are not supported: open them at the shards",
            );
        }
        let view = self.view().await?;
        let Ok(collection) = asked.collection() else {
            // `{ aggregate: 1 }`: of no collection.
            let shard = match self.place(&view, &asked.database, "")? {
                Place::One(shard) => shard,
                _ => Arc::clone(self.config.store()),
            };
            let parts = vec![(shard, asked.body.clone())];
            let parts = self.first_parts(&asked.database, parts).await?;
            let merged = Merged::new(&asked.database, "$cmd.aggregate", parts);
            return self.first_batch(merged, FIRST_BATCH, false).await;
        };
        let namespace = asked.namespace()?;
        let cursor = asked.document("cursor");
        let batch = cursor.get("batchSize").and_then(beeline_documents_query::value::integral);
        let batch = batch.unwrap_or(FIRST_BATCH).max(0);
        let filter = match first.and_then(|first| first.get("$match")) {
            Some(Bson::Document(filter)) => filter.clone(),
            _ => Document::new(),
        };
        let (shards, is_sharded) = match self.place(&view, &asked.database, &namespace)? {
            Place::Nowhere => return Ok(nothing(namespace)),
            Place::One(shard) => (vec![shard], false),
            Place::Sharded(sharded) => (self.targets(&view, sharded, &filter)?, true),
        };
        // What else a pipeline names has to lie in the same shard.
        let others = others_of(&stages);
        let elsewhere = others.iter().any(|other| {
            view.table.collections.contains_key(&format!("{}.{other}", asked.database))
        });
        let primary = view.table.databases.get(&asked.database);
        let beside = shards.len() == 1
            && (!is_sharded
                || others.is_empty()
                || primary.is_some_and(|primary| primary == shards[0].name()));
        if !others.is_empty() && (elsewhere || !beside) {
            return refuse(
                Code::CommandNotSupported,
                format!(
                    "a pipeline that reads or writes {} reaches over shards, which this router does not do",
                    others.join(", ")
                ),
            );
        }
        if beside {
            let parts = vec![(Arc::clone(&shards[0]), asked.body.clone())];
            if asked.body.get_bool("explain").unwrap_or(false) {
                let reply = shards[0].ask(&asked.database, asked.body).await?;
                return Ok(Reply::Document(reply));
            }
            let parts = self.first_parts(&asked.database, parts).await?;
            let merged = Merged::new(&asked.database, &collection, parts);
            return self.first_batch(merged, batch, false).await;
        }
        let Split { shards: there, order, router } = split(&stages)?;
        // Before anything is sent: what the router cannot run is refused.
        let pipeline = Pipeline::parse(&router)?;
        let order = order.map(|order| Order::parse(&order)).transpose()?;
        let mut body = asked.body.clone();
        body.insert("pipeline", there);
        body.insert("cursor", doc! { "batchSize": 1000 });
        let parts = shards.into_iter().map(|shard| (shard, body.clone())).collect();
        let parts = self.first_parts(&asked.database, parts).await?;
        let mut merged = Merged::new(&asked.database, &collection, parts).ordered(order);
        if !router.is_empty() {
            let mut variables = doc! { "NOW": DateTime::now() };
            variables.extend(asked.document("let"));
            merged = merged.through(pipeline, variables);
        }
        self.first_batch(merged, batch, false).await
    }

    pub(super) async fn explain(&self, asked: Asked) -> Result<Reply> {
        let inner = Asked { database: asked.database.clone(), body: asked.document("explain") };
        let view = self.view().await?;
        let filter = match inner.body.get("filter").or_else(|| inner.body.get("query")) {
            Some(Bson::Document(filter)) => filter.clone(),
            _ => Document::new(),
        };
        let shards = match self.place(&view, &asked.database, &inner.namespace()?)? {
            Place::Nowhere => vec![Arc::clone(self.config.store())],
            Place::One(shard) => vec![shard],
            Place::Sharded(sharded) => self.targets(&view, sharded, &filter)?,
        };
        let parts: Vec<_> = shards.into_iter().map(|shard| (shard, asked.body.clone())).collect();
        let mut replies = self.scatter(&asked.database, parts, None).await?;
        if replies.len() == 1
            && let Some((_, reply)) = replies.pop()
        {
            return Ok(Reply::Document(reply));
        }
        let shards: Document = replies
            .into_iter()
            .map(|(shard, reply)| (shard.name().to_owned(), Bson::Document(reply)))
            .collect();
        Ok(Reply::Document(
            doc! { "queryPlanner": { "winningPlan": { "stage": "SHARD_MERGE" } }, "shards": shards, "ok": 1.0 },
        ))
    }
}

/// Collections that stages read or write beside their own.
fn others_of(stages: &[Bson]) -> Vec<String> {
    let mut found = Vec::new();
    for (name, argument) in stages.iter().filter_map(Bson::as_document).flatten() {
        let named = |field: &str| {
            argument.as_document().and_then(|all| all.get(field)).and_then(Bson::as_str)
        };
        let plain = argument.as_str();
        let other = match name.as_str() {
            "$lookup" | "$graphLookup" => named("from"),
            "$unionWith" => plain.or_else(|| named("coll")),
            "$out" => plain.or_else(|| named("coll")),
            "$merge" => plain.or_else(|| named("into")).or_else(|| {
                argument.as_document()?.get_document("into").ok()?.get_str("coll").ok()
            }),
            _ => None,
        };
        found.extend(other.map(str::to_owned));
        if let Bson::Document(argument) = argument {
            let inner = argument.get_array("pipeline").ok().map(|inner| others_of(inner));
            found.extend(inner.unwrap_or_default());
            if name == "$facet" {
                let facets = argument.values().filter_map(Bson::as_array);
                found.extend(facets.flat_map(|inner| others_of(inner)));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_collection_that_a_pipeline_names_is_found() {
        let stages = [
            doc! { "$match": { "from": 1 } },
            doc! { "$lookup": { "from": "a", "as": "x", "pipeline": [{ "$unionWith": { "coll": "b" } }] } },
            doc! { "$facet": { "one": [{ "$graphLookup": { "from": "c" } }] } },
            doc! { "$unionWith": "d" },
            doc! { "$merge": { "into": { "db": "o", "coll": "e" } } },
            doc! { "$out": "f" },
        ];
        let stages: Vec<Bson> = stages.into_iter().map(Bson::Document).collect();
        assert_eq!(others_of(&stages), ["a", "b", "c", "d", "e", "f"]);
    }
}
