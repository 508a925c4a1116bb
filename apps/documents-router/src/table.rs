//! The routing table: which shards there are, and where each collection's documents lie.
//!
//! It is kept in the database `config` of the configuration store, as documents ([`format`](self)), so that it
//! is as durable as that store and routers share it. Everything in it may change by one document at a time; what
//! changes it makes `epoch` larger in the end.
//!
//! | collection | document |
//! |---|---|
//! | `version` | `{ _id: 1, format: 1, cluster: ObjectId, epoch: long }` |
//! | `shards` | `{ _id: name, host: "mongodb://…" or "auto://…", state: 1 }` |
//! | `databases` | `{ _id: name, primary: shard }`: where collections lie that are not sharded |
//! | `collections` | `{ _id: namespace, key: { path: 1 or "hashed" }, unique: bool, state: "preparing" or "sharded", lastmod: Timestamp }` |
//! | `chunks` | `{ _id: ObjectId, ns: namespace, min: { path: value }, max: { path: value }, shard: name, lastmod: Timestamp, state: "placed" or "moving", to: name }` |
//!
//! Chunks of a collection follow each other from `MinKey` to `MaxKey`; of a hashed key the bounds are hashes.
//! `lastmod` of a chunk grows with its every change: its upper half when it goes to another shard, its lower half
//! when it is split. A chunk that is `moving` takes no writes.
//!
//! Invariant of a table that was read: the chunks of each collection cover all keys, and none twice.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bson::oid::ObjectId;
use bson::{Bson, Document, Timestamp, doc};

use crate::key::ShardKey;

/// The format of what is kept.
pub const FORMAT: i32 = 1;

/// Why what is kept is no table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the routing table in the database config cannot be read: {0}")]
pub struct TableError(pub String);

/// A part of a collection.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// Its document's identity.
    pub id: ObjectId,
    /// Its first key.
    pub min: Vec<u8>,
    /// The first key behind it.
    pub max: Vec<u8>,
    /// The same as documents.
    pub bounds: (Document, Document),
    /// Where it lies.
    pub shard: String,
    /// How often it went to another shard, and how often it was split.
    pub version: (u32, u32),
    /// It takes no writes.
    pub moving: bool,
}

impl Chunk {
    /// As it is kept.
    #[must_use]
    pub fn to_document(&self, namespace: &str) -> Document {
        let (min, max) = self.bounds.clone();
        let state = if self.moving { "moving" } else { "placed" };
        doc! {
            "_id": self.id, "ns": namespace, "min": min, "max": max, "shard": &self.shard,
            "lastmod": Timestamp { time: self.version.0, increment: self.version.1 }, "state": state,
        }
    }
}

/// A collection whose documents lie in several shards.
#[derive(Clone, Debug, PartialEq)]
pub struct Sharded {
    /// Its pattern.
    pub key: ShardKey,
    /// No two documents have the same key.
    pub unique: bool,
    /// It takes no writes yet.
    pub preparing: bool,
    /// In the order of keys.
    pub chunks: Vec<Chunk>,
}

impl Sharded {
    /// The chunk of a key.
    #[must_use]
    pub fn chunk(&self, key: &[u8]) -> &Chunk {
        // The first begins before every key.
        let behind = self.chunks.partition_point(|chunk| chunk.min.as_slice() <= key);
        &self.chunks[behind.saturating_sub(1)]
    }

    /// The chunks that hold what a filter can match; true: at one key.
    #[must_use]
    pub fn targets(&self, filter: &Document) -> (Vec<&Chunk>, bool) {
        let (stretches, exact) = self.key.stretches(filter);
        let meets = |chunk: &&Chunk| stretches.iter().any(|one| one.meets(&chunk.min, &chunk.max));
        (self.chunks.iter().filter(meets).collect(), exact)
    }

    /// The shards of some chunks, each once.
    #[must_use]
    pub fn shards_of(chunks: &[&Chunk]) -> Vec<String> {
        let names: BTreeSet<&String> = chunks.iter().map(|chunk| &chunk.shard).collect();
        names.into_iter().cloned().collect()
    }

    /// All shards it lies in.
    #[must_use]
    pub fn shards(&self) -> Vec<String> {
        Self::shards_of(&self.chunks.iter().collect::<Vec<_>>())
    }

    /// The first chunks of a collection: of a hashed key without documents, `each` for each shard, with equal
    /// parts of the hashes; otherwise one, where the documents are.
    #[must_use]
    pub fn first_chunks(
        key: &ShardKey,
        shards: &[String],
        primary: &str,
        each: usize,
    ) -> Vec<(Document, Document, String)> {
        let (least, most) = (key.all(&Bson::MinKey), key.all(&Bson::MaxKey));
        let count = shards.len() * each;
        if !key.is_hashed() || count < 2 {
            return vec![(least, most, primary.to_owned())];
        }
        let width = (u64::MAX / count as u64).max(1);
        let bound = |at: usize| match at {
            0 => least.clone(),
            at if at == count => most.clone(),
            at => {
                let hash = (i64::MIN as u64).wrapping_add(width.wrapping_mul(at as u64));
                key.all(&Bson::Int64(hash as i64))
            }
        };
        let shard = |at: usize| shards[at % shards.len()].clone();
        (0..count).map(|at| (bound(at), bound(at + 1), shard(at))).collect()
    }
}

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// The cluster of shards.
    pub cluster: ObjectId,
    /// Grows with every change.
    pub epoch: i64,
    /// Where each shard is.
    pub shards: BTreeMap<String, String>,
    /// Where the collections of each database lie that are not sharded.
    pub databases: HashMap<String, String>,
    /// Those that are, by `database.collection`.
    pub collections: HashMap<String, Sharded>,
}

/// What is kept, as it was read.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    /// Of `version`.
    pub version: Document,
    /// Of `shards`.
    pub shards: Vec<Document>,
    /// Of `databases`.
    pub databases: Vec<Document>,
    /// Of `collections`.
    pub collections: Vec<Document>,
    /// Of `chunks`.
    pub chunks: Vec<Document>,
}

fn text(document: &Document, field: &str) -> Result<String, TableError> {
    let found = document.get_str(field).map(str::to_owned);
    found.map_err(|_| TableError(format!("{document} has no string {field}")))
}

impl Table {
    /// Of what is kept.
    ///
    /// Errors: another format, something missing, chunks that do not cover all keys.
    pub fn of(kept: &Kept) -> Result<Self, TableError> {
        let format = kept.version.get_i32("format").unwrap_or(0);
        if format != FORMAT {
            return Err(TableError(format!(
                "it has format {format}, where this router knows {FORMAT}; use one build"
            )));
        }
        let lacks = |what: &str| TableError(format!("its version has no {what}"));
        let cluster = kept.version.get_object_id("cluster").map_err(|_| lacks("cluster"))?;
        let epoch = kept.version.get_i64("epoch").map_err(|_| lacks("epoch"))?;
        let mut shards = BTreeMap::new();
        for one in &kept.shards {
            shards.insert(text(one, "_id")?, text(one, "host")?);
        }
        let mut databases = HashMap::new();
        for one in &kept.databases {
            databases.insert(text(one, "_id")?, text(one, "primary")?);
        }
        let mut chunks: HashMap<String, Vec<&Document>> = HashMap::new();
        for one in &kept.chunks {
            chunks.entry(text(one, "ns")?).or_default().push(one);
        }
        let mut collections = HashMap::new();
        for one in &kept.collections {
            let namespace = text(one, "_id")?;
            let own = chunks.remove(&namespace).unwrap_or_default();
            let sharded = sharded(one, &own)
                .map_err(|TableError(reason)| TableError(format!("{namespace}: {reason}")))?;
            let known = |shard: &String| shards.contains_key(shard);
            if let Some(unknown) = sharded.shards().iter().find(|shard| !known(shard)) {
                return Err(TableError(format!(
                    "{namespace} lies in {unknown}, which is no shard"
                )));
            }
            collections.insert(namespace, sharded);
        }
        Ok(Self { cluster, epoch, shards, databases, collections })
    }
}

fn sharded(entry: &Document, chunks: &[&Document]) -> Result<Sharded, TableError> {
    let wrong = |error: &dyn std::fmt::Display| TableError(error.to_string());
    let pattern = entry.get_document("key").map_err(|error| wrong(&error))?;
    let key = ShardKey::parse(pattern).map_err(|error| wrong(&error))?;
    let mut read = Vec::with_capacity(chunks.len());
    for one in chunks {
        let document = |field| one.get_document(field).map_err(|error| wrong(&error));
        let (min, max) = (document("min")?, document("max")?);
        let version = one.get_timestamp("lastmod").map_err(|error| wrong(&error))?;
        read.push(Chunk {
            id: one.get_object_id("_id").map_err(|error| wrong(&error))?,
            min: key.bound(min).map_err(|error| wrong(&error))?,
            max: key.bound(max).map_err(|error| wrong(&error))?,
            bounds: (min.clone(), max.clone()),
            shard: text(one, "shard")?,
            version: (version.time, version.increment),
            moving: one.get_str("state").is_ok_and(|state| state == "moving"),
        });
    }
    read.sort_by(|a, b| a.min.cmp(&b.min));
    let bound = |value| key.bound(&key.all(&value)).map_err(|error| wrong(&error));
    let (mut next, end) = (bound(Bson::MinKey)?, bound(Bson::MaxKey)?);
    for chunk in &read {
        if chunk.min != next || chunk.max <= chunk.min {
            return Err(TableError(format!(
                "its chunks leave keys out, or hold them twice, before {}",
                chunk.bounds.0
            )));
        }
        next.clone_from(&chunk.max);
    }
    if next != end {
        return Err(TableError("its chunks end before the last key".to_owned()));
    }
    let preparing = entry.get_str("state").is_ok_and(|state| state == "preparing");
    let unique = entry.get_bool("unique").unwrap_or(false);
    Ok(Sharded { key, unique, preparing, chunks: read })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(chunks: Vec<(Document, Document, String)>, pattern: Document) -> Kept {
        let key = ShardKey::parse(&pattern).unwrap();
        let chunk = |(min, max, shard): (Document, Document, String)| Chunk {
            id: ObjectId::new(),
            min: key.bound(&min).unwrap(),
            max: key.bound(&max).unwrap(),
            bounds: (min, max),
            shard,
            version: (1, 0),
            moving: false,
        };
        Kept {
            version: doc! { "_id": 1, "format": 1, "cluster": ObjectId::new(), "epoch": 3_i64 },
            shards: vec![doc! { "_id": "s0", "host": "a" }, doc! { "_id": "s1", "host": "b" }],
            databases: vec![doc! { "_id": "d", "primary": "s1" }],
            collections: vec![doc! { "_id": "d.c", "key": pattern, "state": "sharded" }],
            chunks: chunks.into_iter().map(|one| chunk(one).to_document("d.c")).collect(),
        }
    }

    fn shards() -> Vec<String> {
        vec!["s0".to_owned(), "s1".to_owned()]
    }

    #[test]
    fn hashed_chunks_cover_all_keys_and_spread_documents() {
        let key = ShardKey::parse(&doc! { "k": "hashed" }).unwrap();
        let chunks = Sharded::first_chunks(&key, &shards(), "s1", 2);
        assert_eq!(chunks.len(), 4);
        let table = Table::of(&kept(chunks, key.pattern())).unwrap();
        let sharded = &table.collections["d.c"];
        let mut counts = BTreeMap::new();
        for n in 0..4000 {
            let at = key.of(&doc! { "k": n }).unwrap();
            let chunk = sharded.chunk(&at);
            assert!(chunk.min <= at && at < chunk.max);
            *counts.entry(chunk.bounds.0.to_string()).or_insert(0) += 1;
            let (found, exact) = sharded.targets(&doc! { "k": n, "x": 1 });
            assert!(exact && found.len() == 1 && found[0] == chunk);
        }
        assert!(counts.len() == 4 && counts.values().all(|count| *count > 800), "{counts:?}");
        assert_eq!(sharded.shards(), shards());
        assert_eq!(sharded.targets(&doc! { "x": 1 }).0.len(), 4);
    }

    #[test]
    fn ranges_are_found_by_their_ends() {
        let pattern = doc! { "a": 1, "b": 1 };
        let at = |a: i32| doc! { "a": a, "b": Bson::MinKey };
        let key = ShardKey::parse(&pattern).unwrap();
        let (least, most) = (key.all(&Bson::MinKey), key.all(&Bson::MaxKey));
        let chunks = vec![
            (at(10), at(20), "s1".to_owned()),
            (least, at(10), "s0".to_owned()),
            (at(20), most, "s0".to_owned()),
        ];
        let table = Table::of(&kept(chunks, pattern)).unwrap();
        let sharded = &table.collections["d.c"];
        for (filter, chunks) in [
            (doc! { "a": 9 }, 1),
            (doc! { "a": 10, "b": -5 }, 1),
            (doc! { "a": { "$gte": 10, "$lt": 19 } }, 1),
            (doc! { "a": { "$gte": 10, "$lte": 20 } }, 2),
            (doc! { "a": { "$lt": 10 } }, 2),
            (doc! { "a": { "$in": [1, 30] } }, 2),
            (doc! { "b": 1 }, 3),
        ] {
            assert_eq!(sharded.targets(&filter).0.len(), chunks, "{filter}");
        }
    }

    #[test]
    fn what_is_no_table_is_refused_with_its_reason() {
        let pattern = doc! { "a": 1 };
        let key = ShardKey::parse(&pattern).unwrap();
        let one = Sharded::first_chunks(&key, &shards(), "s1", 2);
        assert_eq!(one.len(), 1);
        let fine = kept(one.clone(), pattern.clone());
        assert!(Table::of(&fine).is_ok());
        let (least, most) = (key.all(&Bson::MinKey), key.all(&Bson::MaxKey));
        let gap = vec![
            (least.clone(), doc! { "a": 1 }, "s0".to_owned()),
            (doc! { "a": 2 }, most, "s0".to_owned()),
        ];
        let short = vec![(least, doc! { "a": 1 }, "s0".to_owned())];
        let mut format = fine.clone();
        format.version.insert("format", 2);
        let mut unknown = fine;
        unknown.shards.pop();
        for (kept, reason) in [
            (kept(gap, pattern.clone()), "leave keys out"),
            (kept(short, pattern.clone()), "before the last key"),
            (kept(Vec::new(), pattern), "before the last key"),
            (format, "format 2"),
            (unknown, "no shard"),
        ] {
            let error = Table::of(&kept).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
