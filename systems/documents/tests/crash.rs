//! Crash points of the documents' commits: commands over a simulated pool, and the store opened from every image
//! that a power loss may leave.
//!
//! Behind each image stand the collections, documents and indexes of the last acknowledged command or of the next
//! one, never a part of it; the next one, sent again as a driver does, takes effect once. A known bug of the store
//! below is put back to show that the enumeration sees it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use beeline_documents::node_store::PoolStore;
use beeline_documents::{Engine, EngineOptions};
use beeline_kv::fault::{KnownBug, with_known_bug};
use beeline_kv::{Embedded, Store, StoreOptions};
use beeline_pmem::{CrashImage, CrashLimits, Durability, Pool, PoolOptions, for_each_crash_image};
use bson::spec::BinarySubtype;
use bson::{Binary, Document, doc};

use common::Client;

/// Documents and names of indexes by collection.
type State = BTreeMap<String, (Vec<Document>, Vec<String>)>;

fn pool_options() -> PoolOptions {
    PoolOptions {
        durability: Durability::Power,
        segment_bytes: 64 << 10,
        capacity_bytes: 32 * (64 << 10),
        ..PoolOptions::default()
    }
}

fn open(pool: Pool) -> Client {
    let options = StoreOptions { shards: 1, recovery_threads: 1, ..StoreOptions::default() };
    let pool = Embedded::from(Store::open(pool, options).unwrap());
    let store = Arc::new(PoolStore::open(pool).unwrap());
    let engine = Engine::open(store, &EngineOptions::default()).unwrap();
    engine.finish_builds().unwrap();
    Client::of(&engine)
}

fn observe(client: &Client) -> Result<State, String> {
    let batch = |reply: Document| -> Vec<Document> {
        let first = reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap().clone();
        first.iter().map(|one| one.as_document().unwrap().clone()).collect()
    };
    let mut state = State::new();
    for listed in batch(client.run(doc! { "listCollections": 1, "nameOnly": true })) {
        let name = listed.get_str("name").unwrap().to_owned();
        let valid = client.run(doc! { "validate": &name, "full": true });
        if !valid.get_bool("valid").unwrap_or(false) {
            return Err(format!("{name} is not whole: {valid}"));
        }
        let documents = client.find(&name, &doc! {}, &doc! { "_id": 1 });
        let indexes = batch(client.run(doc! { "listIndexes": &name }));
        let indexes = indexes.iter().map(|one| one.get_str("name").unwrap().to_owned()).collect();
        state.insert(name, (documents, indexes));
    }
    Ok(state)
}

/// The commands, each one step.
fn history() -> Vec<Vec<Document>> {
    let session = Binary { subtype: BinarySubtype::Uuid, bytes: vec![7; 16] };
    let mut number = 0_i64;
    let mut retryable = |mut body: Document| {
        number += 1;
        body.extend(doc! { "lsid": { "id": session.clone() }, "txnNumber": number });
        vec![body]
    };
    let insert = |id: i32| {
        let text = "x".repeat(100 * (id as usize % 5));
        doc! { "insert": "c", "documents": [{ "_id": id, "n": id % 3, "l": [id, 1], "text": text }] }
    };
    let index = |name: &str, key: Document| {
        vec![doc! { "createIndexes": "c", "indexes": [{ "key": key, "name": name }] }]
    };
    let mut steps = vec![vec![doc! { "create": "c" }], index("n", doc! { "n": 1 })];
    steps.extend((0..6).map(|id| retryable(insert(id))));
    steps.push(index("l", doc! { "l": 1, "n": -1 }));
    let set = doc! { "$set": { "n": 9 }, "$push": { "l": 77 } };
    steps.push(retryable(doc! { "update": "c", "updates": [{ "q": { "n": 0 }, "u": set }] }));
    let deleted = doc! { "q": { "_id": 1 }, "limit": 1 };
    steps.push(retryable(doc! { "delete": "c", "deletes": [deleted] }));
    let modify =
        doc! { "findAndModify": "c", "query": { "_id": 2 }, "update": { "$inc": { "n": 5 } } };
    steps.push(retryable(modify));
    // Two documents change together.
    let within = |mut body: Document, first: bool| {
        let lsid = Binary { subtype: BinarySubtype::Uuid, bytes: vec![8; 16] };
        body.extend(doc! { "lsid": { "id": lsid }, "txnNumber": 1_i64, "autocommit": false });
        if first {
            body.insert("startTransaction", true);
        }
        body
    };
    let move_to = doc! { "q": { "_id": 4 }, "u": { "$inc": { "n": 1 } } };
    steps.push(vec![
        within(insert(20), true),
        within(doc! { "update": "c", "updates": [move_to] }, false),
        within(doc! { "commitTransaction": 1, "$db": "admin" }, false),
    ]);
    let out = doc! { "aggregate": "c", "pipeline": [{ "$out": "o" }], "cursor": {} };
    steps.push(vec![out.clone()]);
    steps.push(retryable(insert(21)));
    steps.push(vec![out]);
    let rename =
        doc! { "renameCollection": "d.o", "to": "d.p", "dropTarget": true, "$db": "admin" };
    steps.push(vec![rename]);
    steps.push(vec![doc! { "dropIndexes": "c", "index": "n" }]);
    steps.push(vec![doc! { "drop": "p" }]);
    steps.extend((30..36).map(|id| retryable(insert(id))));
    steps
}

fn fine(reply: &Document) {
    let failed = reply.contains_key("writeErrors") || reply.get_f64("ok").unwrap() != 1.0;
    assert!(!failed, "{reply}");
}

/// What is wrong with an image.
fn check(image: &CrashImage, steps: &[Vec<Document>], states: &[State]) -> Result<(), String> {
    let acknowledged = image.mark().map_or(0, |mark| mark as usize);
    let (pool, _device) =
        Pool::open_image(image, &pool_options()).map_err(|error| error.to_string())?;
    let client = open(pool);
    let seen = observe(&client)?;
    let next = states.get(acknowledged + 1);
    if seen != states[acknowledged] && Some(&seen) != next {
        return Err(format!(
            "after step {acknowledged} was acknowledged the store shows {seen:?}, neither {:?} nor {next:?}",
            states[acknowledged]
        ));
    }
    if let (Some(next), Some([again])) = (next, steps.get(acknowledged).map(Vec::as_slice))
        && again.contains_key("txnNumber")
    {
        fine(&client.run(again.clone()));
        if observe(&client)? != *next {
            return Err(format!("sent again, {again} did not take effect once"));
        }
    }
    Ok(())
}

/// Images that were looked at, and what is wrong with some.
fn violations(bug: Option<KnownBug>, limits: &CrashLimits) -> (usize, Vec<String>) {
    let (pool, device) = Pool::simulated(&pool_options()).unwrap();
    let client = open(pool);
    let (steps, mut states) = (history(), vec![observe(&client).unwrap()]);
    device.mark(0);
    for step in &steps {
        let run = || step.iter().for_each(|body| fine(&client.run(body.clone())));
        match bug {
            Some(bug) => with_known_bug(bug, run),
            None => run(),
        }
        device.mark(states.len() as u64);
        states.push(observe(&client).unwrap());
    }
    drop(client);
    let mut wrong = Vec::new();
    let counts = for_each_crash_image(&device, limits, |image| {
        if wrong.len() < 3
            && let Err(finding) = check(image, &steps, &states)
        {
            wrong.push(format!("{finding}\n  {}", image.describe()));
        }
    });
    println!("{} steps: {counts}", steps.len());
    (counts.images as usize, wrong)
}

fn limits(points: usize, images: usize) -> CrashLimits {
    let factor = if std::env::var_os("BEELINE_DEEP").is_some() { 20 } else { 1 };
    CrashLimits { points: points * factor, images_per_point: images, ..CrashLimits::default() }
}

#[test]
fn a_crash_at_any_point_leaves_whole_commands() {
    let (images, wrong) = violations(None, &limits(120, 3));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(images > 50, "nothing was enumerated");
}

#[test]
fn a_commit_that_does_not_wait_for_its_fence_is_found() {
    let (_, wrong) = violations(Some(KnownBug::AcknowledgeBeforeFence), &limits(60, 8));
    assert!(!wrong.is_empty(), "the bug was put back and not seen");
}
