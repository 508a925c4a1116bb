//! Shards and chunks: what an administrator tells the router.

use std::sync::Arc;

use beeline_documents::reply::Reply;
use beeline_documents_query::error::Code;
use beeline_documents_query::value::truthy;
use bson::oid::ObjectId;
use bson::{Bson, Document, doc};

use super::{Asked, whole_of};
use crate::error::{Refusal, Result, refuse};
use crate::key::ShardKey;
use crate::router::{Router, View};
use crate::shard::{MARK, Shard, batch_of};
use crate::table::{Chunk, Sharded};

/// Chunks that each shard gets of an empty collection with a hashed key.
const CHUNKS_EACH: usize = 2;
/// Most of them, where a client says how many.
const MOST_CHUNKS_EACH: usize = 1024;

impl Router {
    pub(super) async fn administer(&self, asked: &Asked, name: &str) -> Result<Reply> {
        if asked.database != "admin" {
            return refuse(
                Code::Unauthorized,
                format!("{name} may only be run against the admin database."),
            );
        }
        let word = asked.body.get_str(name).unwrap_or_default().to_owned();
        match name {
            "addShard" => self.add_shard(asked, &word).await,
            "listShards" | "getShardMap" => {
                let view = self.view().await?;
                let shards: Vec<Document> = view
                    .table
                    .shards
                    .iter()
                    .map(|(name, host)| doc! { "_id": name, "host": host, "state": 1 })
                    .collect();
                Ok(Reply::Document(doc! { "shards": shards, "ok": 1.0 }))
            }
            "removeShard" => refuse(
                Code::CommandNotSupported,
                "removeShard is not supported: documents do not move between shards yet",
            ),
            "enableSharding" => {
                let view = self.view().await?;
                self.primary_to_write(&view, &word).await?;
                Ok(Reply::ok())
            }
            "shardCollection" => self.shard_collection(asked, &word).await,
            "split" => self.split(asked, &word).await,
            "moveChunk" => self.move_chunk(asked, &word).await,
            "flushRouterConfig" => {
                self.forget_table();
                Ok(Reply::Document(doc! { "flushed": true, "ok": 1.0 }))
            }
            _ => Ok(Reply::Document(
                doc! { "mode": "off", "inBalancerRound": false, "numBalancerRounds": 0_i64, "ok": 1.0 },
            )),
        }
    }

    /// Adds a shard where no shard of the name is known, as a router's settings say.
    ///
    /// Errors: it cannot be reached, or belongs elsewhere.
    pub async fn add(&self, name: &str, address: &str) -> Result<()> {
        let view = self.view().await?;
        match view.table.shards.get(name) {
            Some(known) if known == address => Ok(()),
            Some(known) => refuse(
                Code::IllegalOperation,
                format!("shard {name} is at {known} and not at {address}"),
            ),
            None => self.add_new(&view, name, address).await,
        }
    }

    async fn add_shard(&self, asked: &Asked, address: &str) -> Result<Reply> {
        // As MongoDB writes a replica set: its name, and its members.
        let (set, members) = match address.split_once("://") {
            Some(_) => (None, address),
            None => match address.split_once('/') {
                Some((set, members)) => (Some(set), members),
                None => (None, address),
            },
        };
        if members.is_empty() {
            return refuse(Code::BadValue, "addShard needs the address of a store");
        }
        let whole = |member: &str| match member.contains("://") {
            true => member.to_owned(),
            false => format!("mongodb://{member}"),
        };
        let address = members.split(',').map(whole).collect::<Vec<_>>().join(",");
        let view = self.view().await?;
        let known = view.table.shards.iter().find(|(_, known)| **known == address);
        let name = match (asked.body.get_str("name"), known) {
            (Err(_), Some((known, _))) => known.clone(),
            (Ok(name), _) => name.to_owned(),
            (Err(_), None) => set.map_or_else(
                || {
                    let free =
                        |at: &usize| !view.table.shards.contains_key(&format!("shard{at:04}"));
                    let at = (0..).find(free).unwrap_or(0);
                    format!("shard{at:04}")
                },
                str::to_owned,
            ),
        };
        self.add(&name, &address).await?;
        Ok(Reply::Document(doc! { "shardAdded": name, "ok": 1.0 }))
    }

    async fn add_new(&self, view: &View, name: &str, address: &str) -> Result<()> {
        let fine = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
        if name.is_empty() || name.len() > 64 || !name.chars().all(fine) {
            return refuse(Code::BadValue, format!("{name:?} is no name of a shard"));
        }
        if let Some((other, _)) = view.table.shards.iter().find(|(_, known)| *known == address) {
            return refuse(Code::IllegalOperation, format!("{address} is shard {other} already"));
        }
        let store = Shard::new(name, address, None, &self.options.shard);
        let added = self.take_in(view, &store).await;
        store.close();
        let databases = added?;
        let mut commands = vec![
            doc! { "insert": "shards", "documents": [{ "_id": name, "host": address, "state": 1 }] },
        ];
        if !databases.is_empty() {
            let entries: Vec<Document> =
                databases.iter().map(|one| doc! { "_id": one, "primary": name }).collect();
            commands.push(doc! { "insert": "databases", "documents": entries });
        }
        let changed = self.config.change(view.table.epoch, commands).await;
        self.forget_table();
        changed
    }

    /// Marks a store as a shard; the databases it brings.
    async fn take_in(&self, view: &View, store: &Arc<Shard>) -> Result<Vec<String>> {
        let mut databases = Vec::new();
        let listed = store.ask("admin", doc! { "listDatabases": 1, "nameOnly": true }).await?;
        for one in listed.get_array("databases").into_iter().flatten() {
            let Some(Ok(name)) = one.as_document().map(|one| one.get_str("name")) else { continue };
            if matches!(name, "config" | "admin" | "local") {
                continue;
            }
            if let Some(other) = view.table.databases.get(name) {
                return refuse(
                    Code::IllegalOperation,
                    format!(
                        "can't add shard because a local database '{name}' exists in another {other}"
                    ),
                );
            }
            databases.push(name.to_owned());
        }
        let find = doc! { "find": MARK.1, "limit": 1 };
        let mut found = store.ask(MARK.0, find).await?;
        let mark = batch_of(&mut found).and_then(|(batch, _)| batch.into_iter().next());
        let own = doc! { "_id": "shardIdentity", "shardName": store.name(), "clusterId": view.table.cluster };
        match mark {
            Some(mark) if mark == own => {}
            Some(mark) => {
                return refuse(
                    Code::IllegalOperation,
                    format!("the store at {} is a shard already: {mark}", store.address()),
                );
            }
            None => {
                let insert = doc! { "insert": MARK.1, "documents": [own], "writeConcern": { "w": "majority" } };
                store.ask(MARK.0, insert).await?;
            }
        }
        Ok(databases)
    }

    async fn shard_collection(&self, asked: &Asked, namespace: &str) -> Result<Reply> {
        let Some((database, collection)) = namespace
            .split_once('.')
            .filter(|(database, name)| !database.is_empty() && !name.is_empty())
        else {
            return refuse(Code::InvalidNamespace, format!("Invalid namespace {namespace:?}"));
        };
        let key = ShardKey::parse(&asked.document("key"))?;
        let unique = asked.body.get("unique").is_some_and(truthy);
        if unique && key.is_hashed() {
            return refuse(Code::InvalidOptions, "hashed shard keys cannot be declared unique.");
        }
        let done = Reply::Document(doc! { "collectionsharded": namespace, "ok": 1.0 });
        let view = self.view().await?;
        if let Some(known) = view.table.collections.get(namespace) {
            if known.key == key && known.unique == unique {
                // A router that ended in between left it to be finished.
                return match known.preparing {
                    true => self.finish_sharding(namespace).await.map(|()| done),
                    false => Ok(done),
                };
            }
            return refuse(
                Code::IllegalOperation,
                format!("{namespace} is sharded already, by {}", known.key.pattern()),
            );
        }
        let (view, primary) = self.primary_to_write(&view, database).await?;
        let each = asked.whole("numInitialChunks").map_or(CHUNKS_EACH, |all| {
            let shards = view.table.shards.len().max(1) as i64;
            usize::try_from((all + shards - 1) / shards).unwrap_or(1).clamp(1, MOST_CHUNKS_EACH)
        });
        let options = self.options_of(&primary, database, collection).await?;
        if options.get("capped").is_some_and(truthy) {
            return refuse(Code::InvalidOptions, "Cannot shard a capped collection");
        }
        let empty = self.is_empty(&primary, database, collection).await?;
        let names: Vec<String> = match empty {
            true => view.table.shards.keys().cloned().collect(),
            // Documents that are there stay where they are.
            false => vec![primary.name().to_owned()],
        };
        let chunks = Sharded::first_chunks(&key, &names, primary.name(), each);
        let mut used: Vec<&String> = chunks.iter().map(|(_, _, shard)| shard).collect();
        used.sort();
        used.dedup();
        for name in &used {
            let shard = self.shard(&view.table, name)?;
            self.prepare(&shard, database, collection, &options, &key, unique).await?;
        }
        let entry = doc! {
            "_id": namespace, "key": key.pattern(), "unique": unique, "state": "preparing",
            "lastmod": bson::Timestamp { time: 1, increment: 0 },
        };
        let documents = chunks.iter().zip(0..).map(|((min, max, shard), at)| {
            let chunk = Chunk {
                id: ObjectId::new(),
                min: Vec::new(),
                max: Vec::new(),
                bounds: (min.clone(), max.clone()),
                shard: shard.clone(),
                version: (1, at),
                moving: false,
            };
            chunk.to_document(namespace)
        });
        let documents: Vec<Document> = documents.collect();
        let insert = doc! { "insert": "collections", "documents": [entry] };
        let chunks_in = doc! { "insert": "chunks", "documents": documents };
        self.config.change(view.table.epoch, vec![insert, chunks_in]).await?;
        self.finish_sharding(namespace).await.map(|()| done)
    }

    /// Lets a collection take writes that is in the table; takes it out of there again where documents came
    /// meanwhile that may lie in the wrong shard.
    async fn finish_sharding(&self, namespace: &str) -> Result<()> {
        let Some((database, collection)) = namespace.split_once('.') else { return Ok(()) };
        // By then every router knows that the collection takes no writes, and those under way are done.
        self.settle().await;
        let view = self.view().await?;
        let sharded = Self::sharded(&view, namespace)?;
        let stays = match self.primary(&view.table, database)? {
            Some(primary) if sharded.shards() != [primary.name()] => {
                self.is_empty(&primary, database, collection).await?
            }
            _ => true,
        };
        let commands = match stays {
            true => {
                let set =
                    doc! { "q": { "_id": namespace }, "u": { "$set": { "state": "sharded" } } };
                vec![doc! { "update": "collections", "updates": [set] }]
            }
            false => vec![
                doc! { "delete": "collections", "deletes": [{ "q": { "_id": namespace }, "limit": 1 }] },
                doc! { "delete": "chunks", "deletes": [{ "q": { "ns": namespace }, "limit": 0 }] },
            ],
        };
        self.config.change(view.table.epoch, commands).await?;
        self.forget_table();
        match stays {
            true => Ok(()),
            false => refuse(
                Code::ConflictingOperationInProgress,
                format!("{namespace} was written while it was being sharded; try again"),
            ),
        }
    }

    async fn is_empty(&self, shard: &Arc<Shard>, database: &str, collection: &str) -> Result<bool> {
        let count = shard.ask(database, doc! { "count": collection, "limit": 1 }).await?;
        Ok(whole_of(&count, "n") == 0)
    }

    /// The options of a collection, as it was made with.
    async fn options_of(
        &self,
        shard: &Arc<Shard>,
        database: &str,
        collection: &str,
    ) -> Result<Document> {
        let list = doc! { "listCollections": 1, "filter": { "name": collection } };
        let mut listed = shard.ask(database, list).await?;
        let first = batch_of(&mut listed).and_then(|(batch, _)| batch.into_iter().next());
        Ok(first.and_then(|one| one.get_document("options").cloned().ok()).unwrap_or_default())
    }

    /// Makes a collection in a shard, with an index for its key.
    async fn prepare(
        &self,
        shard: &Arc<Shard>,
        database: &str,
        collection: &str,
        options: &Document,
        key: &ShardKey,
        unique: bool,
    ) -> Result<()> {
        let mut create = doc! { "create": collection };
        create.extend(options.clone());
        match shard.ask(database, create).await {
            Err(error) if error.code != Code::NamespaceExists as i32 => return Err(error),
            _ => {}
        }
        let pattern = key.pattern();
        if pattern.len() == 1 && pattern.get("_id") == Some(&Bson::Int32(1)) {
            return Ok(());
        }
        let words: Vec<String> = pattern
            .iter()
            .map(|(name, direction)| format!("{name}_{}", direction.as_str().unwrap_or("1")))
            .collect();
        let mut index = doc! { "key": pattern, "name": words.join("_") };
        if unique {
            index.insert("unique", true);
        }
        let indexes = doc! { "createIndexes": collection, "indexes": [index] };
        shard.ask(database, indexes).await.map(drop)
    }

    /// The chunk that a `find` or `bounds` of a command names.
    fn named<'t>(asked: &Asked, sharded: &'t Sharded) -> Result<&'t Chunk> {
        if let Ok(find) = asked.body.get_document("find") {
            return Ok(sharded.chunk(&sharded.key.of(find)?));
        }
        if let Ok(middle) = asked.body.get_document("middle") {
            return Ok(sharded.chunk(&sharded.key.bound(middle)?));
        }
        let bounds = asked.body.get_array("bounds").ok();
        let Some(Bson::Document(min)) = bounds.and_then(|bounds| bounds.first()) else {
            return refuse(Code::BadValue, "name the chunk: find, bounds or middle");
        };
        Ok(sharded.chunk(&sharded.key.bound(min)?))
    }

    fn sharded<'t>(view: &'t View, namespace: &str) -> Result<&'t Sharded> {
        match view.table.collections.get(namespace) {
            Some(sharded) => Ok(sharded),
            None => refuse(Code::NamespaceNotSharded, format!("{namespace} is not sharded")),
        }
    }

    /// Splits a chunk at a key: both parts stay where they are.
    async fn split(&self, asked: &Asked, namespace: &str) -> Result<Reply> {
        let view = self.view_to_write(namespace).await?;
        let sharded = Self::sharded(&view, namespace)?;
        let Ok(middle) = asked.body.get_document("middle") else {
            return refuse(Code::BadValue, "split needs middle: the first key of the second part");
        };
        let at = sharded.key.bound(middle)?;
        let chunk = sharded.chunk(&at);
        if chunk.min == at {
            return refuse(Code::BadValue, format!("a chunk begins at {middle} already"));
        }
        let version = (chunk.version.0, chunk.version.1 + 1);
        let second = Chunk {
            id: ObjectId::new(),
            bounds: (middle.clone(), chunk.bounds.1.clone()),
            version: (version.0, version.1 + 1),
            ..chunk.clone()
        };
        let stamp = bson::Timestamp { time: version.0, increment: version.1 };
        let cut = doc! { "q": { "_id": chunk.id }, "u": { "$set": { "max": middle.clone(), "lastmod": stamp } } };
        let commands = vec![
            doc! { "update": "chunks", "updates": [cut] },
            doc! { "insert": "chunks", "documents": [second.to_document(namespace)] },
        ];
        self.config.change(view.table.epoch, commands).await?;
        self.forget_table();
        Ok(Reply::ok())
    }

    /// Gives a chunk without documents to another shard.
    ///
    /// One that a router left moving is moved, or stays, by the next order for it.
    async fn move_chunk(&self, asked: &Asked, namespace: &str) -> Result<Reply> {
        let view = self.view().await?;
        let sharded = Self::sharded(&view, namespace)?;
        let to = asked.body.get_str("to").unwrap_or_default();
        let target = self.shard(&view.table, to)?;
        let chunk = Self::named(asked, sharded)?;
        if chunk.shard == to && !chunk.moving {
            return Ok(Reply::ok());
        }
        let Some((database, collection)) = namespace.split_once('.') else {
            return refuse(Code::InvalidNamespace, "a namespace has a dot");
        };
        let source = self.shard(&view.table, &chunk.shard)?;
        let options = self.options_of(&source, database, collection).await?;
        let (key, unique) = (&sharded.key, sharded.unique);
        self.prepare(&target, database, collection, &options, key, unique).await?;
        let list = doc! { "listIndexes": collection };
        let mut listed = source.ask(database, list).await?;
        for mut index in batch_of(&mut listed).map(|(batch, _)| batch).unwrap_or_default() {
            index.remove("ns");
            if !index.get_str("name").is_ok_and(|name| name == "_id_") {
                let indexes = doc! { "createIndexes": collection, "indexes": [index] };
                target.ask(database, indexes).await?;
            }
        }
        let set = |fields: Document| {
            let one = doc! { "q": { "_id": chunk.id }, "u": { "$set": fields } };
            vec![doc! { "update": "chunks", "updates": [one] }]
        };
        let moving = set(doc! { "state": "moving", "to": to });
        self.config.change(view.table.epoch, moving).await?;
        self.settle().await;
        let found = self.holds_any(&source, (database, collection), key, chunk).await;
        let view = self.view().await?;
        let fields = match found {
            Ok(false) => {
                let stamp = bson::Timestamp { time: chunk.version.0 + 1, increment: 0 };
                doc! { "state": "placed", "shard": to, "lastmod": stamp }
            }
            _ => doc! { "state": "placed" },
        };
        self.config.change(view.table.epoch, set(fields)).await?;
        self.forget_table();
        match found {
            Ok(false) => Ok(Reply::ok()),
            Ok(true) => Err(Refusal::new(
                Code::CommandNotSupported,
                "the chunk holds documents, and documents do not move between shards yet: split and move chunks while they are empty",
            )),
            Err(error) => Err(error),
        }
    }

    /// Whether a shard holds documents of a chunk: it looks at the keys of all.
    async fn holds_any(
        &self,
        shard: &Arc<Shard>,
        (database, collection): (&str, &str),
        key: &ShardKey,
        chunk: &Chunk,
    ) -> Result<bool> {
        let lacks = || Refusal::new(Code::InternalError, "a shard answered without a batch");
        let shown: Document =
            key.pattern().keys().map(|name| (name.clone(), Bson::Int32(1))).collect();
        let find = doc! { "find": collection, "projection": shown, "batchSize": 10_000 };
        let mut reply = shard.ask(database, find).await?;
        loop {
            let (batch, cursor) = batch_of(&mut reply).ok_or_else(lacks)?;
            for document in batch {
                let at = key.of(&document)?;
                if chunk.min <= at && at < chunk.max {
                    if cursor != 0 {
                        let kill = doc! { "killCursors": collection, "cursors": [cursor] };
                        let _ = shard.ask(database, kill).await;
                    }
                    return Ok(true);
                }
            }
            if cursor == 0 {
                return Ok(false);
            }
            let more = doc! { "getMore": cursor, "collection": collection };
            reply = shard.ask(database, more).await?;
        }
    }
}
