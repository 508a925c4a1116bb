//! Databases, collections and indexes over shards.

use std::collections::BTreeMap;
use std::sync::Arc;

use beeline_documents::reply::Reply;
use beeline_documents_query::error::Code;
use bson::{Bson, Document, doc};

use super::{Asked, Place, whole_of};
use crate::error::{Result, refuse};
use crate::router::{Router, View};
use crate::shard::Shard;
use crate::table::Sharded;

impl Router {
    pub(super) async fn catalog(&self, asked: &Asked, name: &str) -> Result<Reply> {
        if matches!(name, "listCollections" | "dbStats" | "dbstats") {
            let view = self.view().await?;
            return match self.place(&view, &asked.database, "")? {
                Place::One(shard) => self.passed(&shard, asked).await,
                _ => self.nothing_of(asked, name).await,
            };
        }
        if name == "renameCollection" {
            return self.rename(asked).await;
        }
        let namespace = asked.namespace()?;
        let makes = matches!(name, "create" | "createIndexes");
        let view = match name {
            "listIndexes" | "collStats" | "collstats" | "validate" | "drop" => self.view().await?,
            _ => self.view_to_write(&namespace).await?,
        };
        let sharded = match self.place(&view, &asked.database, &namespace)? {
            Place::One(shard) => return self.passed(&shard, asked).await,
            Place::Nowhere if makes => {
                let (_, shard) = self.primary_to_write(&view, &asked.database).await?;
                return self.passed(&shard, asked).await;
            }
            Place::Nowhere => return self.nothing_of(asked, name).await,
            Place::Sharded(sharded) => sharded,
        };
        match name {
            "create" => {
                refuse(Code::NamespaceExists, format!("Collection {namespace} already exists."))
            }
            "drop" => {
                self.drop_sharded(&namespace).await?;
                Ok(Reply::Document(doc! { "ns": namespace, "ok": 1.0 }))
            }
            "createIndexes" => {
                for index in asked.body.get_array("indexes").into_iter().flatten() {
                    let Some(index) = index.as_document() else { continue };
                    let keys = index.get_document("key").cloned().unwrap_or_default();
                    if index.get_bool("unique").unwrap_or(false) && !sharded.key.begins(&keys) {
                        return refuse(
                            Code::CannotCreateIndex,
                            format!(
                                "cannot create unique index over {keys} with shard key pattern {}",
                                sharded.key.pattern()
                            ),
                        );
                    }
                }
                self.everywhere(&view, sharded, asked).await
            }
            "dropIndexes" | "deleteIndexes" | "collMod" => {
                self.everywhere(&view, sharded, asked).await
            }
            "collStats" | "collstats" => self.figures(&view, sharded, asked).await,
            "validate" => self.everywhere(&view, sharded, asked).await,
            _ => {
                let shard = self.first_of(&view, sharded)?;
                self.passed(&shard, asked).await
            }
        }
    }

    async fn passed(&self, shard: &Arc<Shard>, asked: &Asked) -> Result<Reply> {
        let mut body = asked.body.clone();
        // What a list of one store holds is sent at once: its cursor is not the router's.
        if body.contains_key("cursor") || matches!(asked.name(), "listIndexes" | "listCollections")
        {
            body.insert("cursor", doc! { "batchSize": 100_000 });
        }
        Ok(Reply::Document(shard.ask(&asked.database, body).await?))
    }

    fn first_of(&self, view: &View, sharded: &Sharded) -> Result<Arc<Shard>> {
        match sharded.chunks.first() {
            Some(chunk) => self.shard(&view.table, &chunk.shard),
            None => refuse(Code::ShardNotFound, "the collection lies in no shard"),
        }
    }

    /// Some shard's words on what is not there.
    async fn nothing_of(&self, asked: &Asked, name: &str) -> Result<Reply> {
        let namespace = format!("{}.", asked.database);
        match name {
            "listCollections" => Ok(Reply::Batch {
                id: 0,
                namespace: format!("{namespace}$cmd.listCollections"),
                documents: Vec::new(),
                first: true,
                cursor: Document::new(),
            }),
            "drop" => Ok(Reply::ok()),
            "dbStats" | "dbstats" => Ok(Reply::Document(
                doc! { "db": &asked.database, "collections": 0, "objects": 0_i64, "dataSize": 0.0, "ok": 1.0 },
            )),
            _ => refuse(Code::NamespaceNotFound, format!("ns not found: {}", asked.namespace()?)),
        }
    }

    /// A command for all shards of a collection; the first one's reply.
    async fn everywhere(&self, view: &View, sharded: &Sharded, asked: &Asked) -> Result<Reply> {
        let mut parts = Vec::new();
        for name in sharded.shards() {
            parts.push((self.shard(&view.table, &name)?, asked.body.clone()));
        }
        let replies = self.scatter(&asked.database, parts, None).await?;
        match replies.into_iter().next() {
            Some((_, reply)) => Ok(Reply::Document(reply)),
            None => refuse(Code::ShardNotFound, "the collection lies in no shard"),
        }
    }

    async fn figures(&self, view: &View, sharded: &Sharded, asked: &Asked) -> Result<Reply> {
        let mut parts = Vec::new();
        for name in sharded.shards() {
            parts.push((self.shard(&view.table, &name)?, asked.body.clone()));
        }
        let replies = self.scatter(&asked.database, parts, None).await?;
        let mut sum = doc! { "ns": asked.namespace()?, "sharded": true };
        for field in ["count", "size", "storageSize", "totalIndexSize", "totalSize"] {
            sum.insert(field, replies.iter().map(|(_, one)| whole_of(one, field)).sum::<i64>());
        }
        let shards: Document = replies
            .into_iter()
            .map(|(shard, reply)| (shard.name().to_owned(), Bson::Document(reply)))
            .collect();
        sum.extend(doc! { "shards": shards, "ok": 1.0 });
        Ok(Reply::Document(sum))
    }

    async fn rename(&self, asked: &Asked) -> Result<Reply> {
        let from = asked.body.get_str("renameCollection").unwrap_or_default().to_owned();
        let to = asked.body.get_str("to").unwrap_or_default().to_owned();
        let database = |namespace: &str| {
            namespace.split_once('.').map(|(database, _)| database.to_owned()).unwrap_or_default()
        };
        if database(&from) != database(&to) {
            return refuse(
                Code::CommandNotSupported,
                "a collection is renamed within its database by this router",
            );
        }
        let view = self.view_to_write(&from).await?;
        if [&from, &to].iter().any(|name| view.table.collections.contains_key(*name)) {
            return refuse(Code::IllegalOperation, "a sharded collection cannot be renamed");
        }
        match self.primary(&view.table, &database(&from))? {
            Some(shard) => {
                let reply =
                    shard.ask_before("admin", asked.body.clone(), Some(view.before)).await?;
                Ok(Reply::Document(reply))
            }
            None => {
                refuse(Code::NamespaceNotFound, format!("Source collection {from} does not exist"))
            }
        }
    }

    pub(super) async fn list_databases(&self, asked: Asked) -> Result<Reply> {
        let view = self.view().await?;
        let mut parts = Vec::new();
        for name in view.table.shards.keys() {
            parts.push((self.shard(&view.table, name)?, asked.body.clone()));
        }
        let mut all: BTreeMap<String, Document> = BTreeMap::new();
        for (_, reply) in self.scatter("admin", parts, None).await? {
            for one in reply.get_array("databases").into_iter().flatten() {
                let Some(one) = one.as_document() else { continue };
                let name = one.get_str("name").unwrap_or_default();
                if matches!(name, "config" | "admin" | "local") {
                    continue;
                }
                match all.get_mut(name) {
                    None => drop(all.insert(name.to_owned(), one.clone())),
                    Some(known) => {
                        let size = whole_of(known, "sizeOnDisk") + whole_of(one, "sizeOnDisk");
                        if known.contains_key("sizeOnDisk") {
                            known.insert("sizeOnDisk", size);
                            known.insert("empty", size == 0);
                        }
                    }
                }
            }
        }
        let total: i64 = all.values().map(|one| whole_of(one, "sizeOnDisk")).sum();
        let databases: Vec<Document> = all.into_values().collect();
        let mut reply = doc! { "databases": databases };
        if !asked.body.get_bool("nameOnly").unwrap_or(false) {
            reply.insert("totalSize", total);
        }
        reply.insert("ok", 1.0);
        Ok(Reply::Document(reply))
    }

    pub(super) async fn drop_database(&self, asked: Asked) -> Result<Reply> {
        if matches!(asked.database.as_str(), "config" | "admin" | "local") {
            return refuse(
                Code::IllegalOperation,
                format!("Cannot drop '{}' database through the router", asked.database),
            );
        }
        let view = self.view().await?;
        let prefix = format!("{}.", asked.database);
        let sharded: Vec<String> = view
            .table
            .collections
            .keys()
            .filter(|name| name.starts_with(&prefix))
            .cloned()
            .collect();
        for namespace in sharded {
            self.drop_sharded(&namespace).await?;
        }
        let view = self.view().await?;
        let mut parts = Vec::new();
        for name in view.table.shards.keys() {
            parts.push((self.shard(&view.table, name)?, asked.body.clone()));
        }
        self.scatter(&asked.database, parts, None).await?;
        Ok(Reply::Document(doc! { "dropped": asked.database, "ok": 1.0 }))
    }

    /// Drops a sharded collection: first it takes no writes, then it goes from the shards, then from the table.
    pub(super) async fn drop_sharded(&self, namespace: &str) -> Result<()> {
        let Some((database, collection)) = namespace.split_once('.') else { return Ok(()) };
        let view = self.view().await?;
        let Some(sharded) = view.table.collections.get(namespace) else { return Ok(()) };
        let busy = doc! { "q": { "_id": namespace }, "u": { "$set": { "state": "preparing" } } };
        let busy = doc! { "update": "collections", "updates": [busy] };
        self.config.change(view.table.epoch, vec![busy]).await?;
        self.settle().await;
        let mut parts = Vec::new();
        for name in sharded.shards() {
            parts.push((self.shard(&view.table, &name)?, doc! { "drop": collection }));
        }
        let dropped = self.scatter(database, parts, None).await;
        self.forget_table();
        let view = self.view().await?;
        let commands = match &dropped {
            Ok(_) => vec![
                doc! { "delete": "collections", "deletes": [{ "q": { "_id": namespace }, "limit": 1 }] },
                doc! { "delete": "chunks", "deletes": [{ "q": { "ns": namespace }, "limit": 0 }] },
            ],
            // A shard that could not be reached still has its part: all stays as it was.
            Err(_) => {
                let back =
                    doc! { "q": { "_id": namespace }, "u": { "$set": { "state": "sharded" } } };
                vec![doc! { "update": "collections", "updates": [back] }]
            }
        };
        let changed = self.config.change(view.table.epoch, commands).await;
        self.forget_table();
        dropped.and(changed)
    }
}
