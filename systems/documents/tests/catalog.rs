//! What the catalog promises: to transactions, to those who drop, and to those who only ask.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use beeline_documents::layout::kind;
use beeline_documents::store::{Backing, Change, Memory, Store, Stretch, Visitor, with_row};
use beeline_documents::{EngineOptions, expiry, retry};
use beeline_documents_query::error::{Code, Result, fail};
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, DateTime, Document, doc};

use common::Client;

/// Changes that a batch of [`Narrow`] may have.
const MOST_CHANGES: usize = 1500;

type Hook = Box<dyn FnOnce() + Send>;

/// A store whose clock is set, whose batches are small, and that runs a hook behind a lock of the row `d`.
#[derive(Default)]
struct Narrow {
    inner: Memory,
    ahead_ms: AtomicU64,
    behind: Mutex<Option<(usize, Hook)>>,
}

impl std::fmt::Debug for Narrow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Narrow")
    }
}

struct Row<'r>(&'r mut dyn Backing);

impl Backing for Row<'_> {
    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool> {
        self.0.get(key, out)
    }

    fn range(&mut self, stretch: &Stretch, backward: bool, visit: &mut Visitor<'_>) -> Result<()> {
        self.0.range(stretch, backward, visit)
    }

    fn apply(&mut self, changes: &[Change]) -> Result<Option<usize>> {
        if changes.len() > MOST_CHANGES {
            return fail(Code::TransactionTooLarge, "the batch does not fit into a segment");
        }
        self.0.apply(changes)
    }
}

impl Store for Narrow {
    fn with(&self, row: &[u8], work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>) -> Result<()> {
        let done = self.inner.with(row, &mut |inner| work(&mut Row(inner)));
        let mut due = None;
        if row == b"d" {
            let mut behind = self.behind.lock().unwrap();
            match behind.as_mut() {
                Some((0, _)) => due = behind.take(),
                Some((left, _)) => *left -= 1,
                None => {}
            }
        }
        if let Some((_, hook)) = due {
            hook();
        }
        done
    }

    fn now_ms(&self) -> u64 {
        self.inner.now_ms() + self.ahead_ms.load(Ordering::Relaxed)
    }

    fn space(&self) -> (u64, u64) {
        self.inner.space()
    }
}

fn narrow() -> (Arc<Narrow>, Client) {
    let store = Arc::<Narrow>::default();
    let client = Client::over(store.clone(), &EngineOptions::default());
    (store, client)
}

/// Keys of a kind in the row of `d`.
fn keys(store: &dyn Store, kind: u8) -> usize {
    let mut count = 0;
    with_row(store, b"d", |row| {
        row.range(&Stretch::of_prefix(&[kind]), false, &mut |_, _| {
            count += 1;
            ControlFlow::Continue(())
        })
    })
    .unwrap();
    count
}

fn code(reply: &Document) -> i32 {
    let error = match reply.get_array("writeErrors") {
        Ok(errors) => errors[0].as_document().unwrap(),
        Err(_) => reply,
    };
    error.get_i32("code").unwrap_or(0)
}

fn is_transient(reply: &Document) -> bool {
    reply.get_array("errorLabels").is_ok_and(|labels| {
        labels.iter().any(|label| label.as_str() == Some("TransientTransactionError"))
    })
}

fn session(byte: u8) -> Bson {
    Bson::Document(doc! { "id": Binary { subtype: BinarySubtype::Uuid, bytes: vec![byte; 16] } })
}

/// A command of a session's transaction.
fn held(client: &Client, number: i64, first: bool, mut body: Document) -> Document {
    body.extend(doc! { "lsid": session(1), "txnNumber": number, "autocommit": false });
    if first {
        body.insert("startTransaction", true);
    }
    client.run(body)
}

fn insert(name: &str, ids: std::ops::Range<i32>) -> Document {
    let documents: Vec<Document> = ids.map(|id| doc! { "_id": id, "n": id }).collect();
    doc! { "insert": name, "documents": documents }
}

fn find(name: &str) -> Document {
    doc! { "find": name }
}

/// Every way in which a command of a transaction reaches a collection.
fn reaching(name: &str) -> Vec<Document> {
    let lookup =
        doc! { "$lookup": { "from": name, "localField": "n", "foreignField": "n", "as": "all" } };
    vec![
        find(name),
        doc! { "find": name, "sort": { "n": 1 } },
        doc! { "distinct": name, "key": "n" },
        doc! { "aggregate": name, "pipeline": [{ "$match": { "n": 1 } }], "cursor": {} },
        doc! { "aggregate": "c", "pipeline": [lookup], "cursor": {} },
        doc! { "aggregate": "c", "pipeline": [{ "$unionWith": name }], "cursor": {} },
        doc! { "update": name, "updates": [{ "q": { "_id": 1 }, "u": { "$set": { "x": 1 } } }] },
        doc! { "update": name, "updates": [{ "q": { "_id": 9 }, "u": { "$set": { "x": 1 } }, "upsert": true }] },
        doc! { "delete": name, "deletes": [{ "q": {}, "limit": 0 }] },
        doc! { "findAndModify": name, "query": {}, "sort": { "n": -1 }, "remove": true },
        insert(name, 50..51),
    ]
}

#[test]
fn a_transaction_is_told_of_a_collection_that_is_gone_renamed_or_new_since() {
    let rename = doc! { "renameCollection": "d.e", "to": "d.f", "$db": "admin" };
    let changes = [
        ("e", doc! { "drop": "e" }),
        ("e", rename.clone()),
        ("f", rename),
        ("f", insert("f", 0..3)),
    ];
    for (number, (name, change)) in changes.into_iter().enumerate() {
        for (at, command) in reaching(name).into_iter().enumerate() {
            let client = Client::new();
            client.run(insert("c", 0..3));
            client.run(insert("e", 0..3));
            let number = (number * 100 + at) as i64;
            assert_eq!(code(&held(&client, number, true, find("c"))), 0);
            assert_eq!(code(&client.run(change.clone())), 0);
            let reply = held(&client, number, false, command.clone());
            assert_eq!(
                (code(&reply), is_transient(&reply)),
                (246, true),
                "{change} {command} {reply}"
            );
            // A refused write leaves no collection behind.
            let names = client.run(doc! { "listCollections": 1, "nameOnly": true });
            let names =
                names.get_document("cursor").unwrap().get_array("firstBatch").unwrap().len();
            let wanted = if change.contains_key("drop") { 1 } else { 2 };
            assert_eq!(names, wanted + usize::from(change.contains_key("insert")), "{command}");
        }
    }
}

#[test]
fn a_transaction_uses_what_it_made_and_finds_nothing_where_nothing_ever_was() {
    let client = Client::new();
    client.run(insert("c", 0..3));
    assert_eq!(code(&held(&client, 1, true, find("c"))), 0);
    assert_eq!(code(&held(&client, 1, false, find("none"))), 0);
    assert_eq!(code(&held(&client, 1, false, insert("own", 0..2))), 0);
    let own = held(&client, 1, false, find("own"));
    assert_eq!(own.get_document("cursor").unwrap().get_array("firstBatch").unwrap().len(), 2);
    assert_eq!(code(&held(&client, 1, false, doc! { "create": "made" })), 0);
    assert_eq!(code(&held(&client, 1, false, insert("made", 0..2))), 0);
    let commit = doc! { "commitTransaction": 1, "$db": "admin" };
    assert_eq!(code(&held(&client, 1, false, commit.clone())), 0);
    assert_eq!(client.run(doc! { "count": "own" }).get_i32("n").unwrap(), 2);
    // A database that comes to be after the transaction asked for it is not the one it asked for.
    let other = |mut body: Document| {
        body.insert("$db", "other");
        body
    };
    assert_eq!(code(&held(&client, 2, true, other(find("c")))), 0);
    assert_eq!(code(&client.run(other(insert("c", 0..3)))), 0);
    assert_eq!(code(&held(&client, 2, false, other(find("c")))), 246);
    // Where it makes the database itself, it goes on there.
    let third = |mut body: Document| {
        body.insert("$db", "third");
        body
    };
    assert_eq!(code(&held(&client, 3, true, third(find("c")))), 0);
    assert_eq!(code(&held(&client, 3, false, third(insert("c", 0..3)))), 0);
    assert_eq!(code(&held(&client, 3, false, commit)), 0);
    assert_eq!(client.run(third(doc! { "count": "c" })).get_i32("n").unwrap(), 3);
}

#[test]
fn what_asks_for_a_database_makes_none() {
    let client = Client::new();
    client.run(insert("c", 0..3));
    let commands = [
        find("c"),
        doc! { "count": "c" },
        doc! { "update": "c", "updates": [{ "q": {}, "u": { "$set": { "x": 1 } } }] },
        doc! { "delete": "c", "deletes": [{ "q": {}, "limit": 0 }] },
        doc! { "findAndModify": "c", "query": {}, "update": { "$set": { "x": 1 } } },
        doc! { "findAndModify": "c", "query": {}, "remove": true },
        // What would make one and fails leaves a name, until the next look.
        doc! { "insert": "$bad", "documents": [{ "_id": 1 }] },
        doc! { "create": "x", "timeseries": {} },
    ];
    for (at, mut command) in commands.into_iter().enumerate() {
        let fails = command.contains_key("insert") || command.contains_key("create");
        command.insert("$db", format!("unknown{at}"));
        assert_eq!(code(&client.run(command.clone())) != 0, fails, "{command}");
    }
    client.engine.end_all_halves();
    assert_eq!(client.engine.databases().len(), 1);
    let mut upsert = doc! { "update": "c", "updates": [{ "q": { "_id": 1 }, "u": { "$set": { "x": 1 } }, "upsert": true }] };
    upsert.insert("$db", "made");
    assert_eq!(code(&client.run(upsert)), 0);
    client.engine.end_all_halves();
    assert_eq!(client.engine.databases().len(), 2);
}

#[test]
fn outcomes_of_more_statements_than_a_batch_holds_are_reaped() {
    let (store, client) = narrow();
    let many = MOST_CHANGES as i32 * 2;
    for (byte, number) in [(1, 1_i64), (2, 1)] {
        let from = i32::from(byte) * 10_000;
        let mut body = insert("c", from..from + many);
        body.extend(doc! { "lsid": session(byte), "txnNumber": number });
        assert_eq!(code(&client.run(body)), 0);
    }
    let all = keys(&*store, kind::OUTCOME);
    assert_eq!(all, 2 * (many as usize + 1));
    retry::reap(&client.engine).unwrap();
    assert_eq!(keys(&*store, kind::OUTCOME), all);
    store.ahead_ms.store(2 * 60 * 60 * 1000, Ordering::Relaxed);
    // One of the sessions goes on; what it did stays.
    let mut body = insert("c", 9..10);
    body.extend(doc! { "lsid": session(2), "txnNumber": 2_i64 });
    assert_eq!(code(&client.run(body)), 0);
    retry::reap(&client.engine).unwrap();
    assert_eq!(keys(&*store, kind::OUTCOME), many as usize + 1);
    store.ahead_ms.store(4 * 60 * 60 * 1000, Ordering::Relaxed);
    retry::reap(&client.engine).unwrap();
    assert_eq!(keys(&*store, kind::OUTCOME), 0);
}

#[test]
fn a_dropped_database_leaves_no_documents_no_entries_and_no_catalog() {
    let (store, client) = narrow();
    for name in ["a", "b"] {
        client.run(insert(name, 0..1200));
        client.run(doc! { "createIndexes": name, "indexes": [{ "key": { "n": 1 }, "name": "n" }] });
    }
    assert_eq!((keys(&*store, kind::RECORD), keys(&*store, kind::INDEX)), (2400, 2400));
    let reply = client.run(doc! { "dropDatabase": 1 });
    assert_eq!(reply.get_str("dropped").unwrap(), "d");
    for kind in [kind::CATALOG, kind::RECORD, kind::INDEX] {
        assert_eq!(keys(&*store, kind), 0, "of kind {kind}");
    }
    let marks = keys(&*store, kind::NUMBERS);
    // One that comes by the name is new, also after a restart; a drop of nothing says nothing.
    client.run(insert("a", 0..2));
    let client = Client::over(store.clone(), &EngineOptions::default());
    assert_eq!(client.find("a", &doc! {}, &doc! {}).len(), 2);
    let indexes = client.run(doc! { "listIndexes": "a" });
    let indexes = indexes.get_document("cursor").unwrap().get_array("firstBatch").unwrap().len();
    assert_eq!((indexes, keys(&*store, kind::NUMBERS)), (1, marks));
    assert!(!client.run(doc! { "dropDatabase": 1, "$db": "none" }).contains_key("dropped"));
}

#[test]
fn an_index_that_cannot_be_made_leaves_no_entries_and_one_of_another_number_stays() {
    let (store, client) = narrow();
    client.run(insert("c", 0..600));
    client.run(doc! { "insert": "c", "documents": [{ "_id": 900, "n": 599 }] });
    client.run(doc! { "createIndexes": "c", "indexes": [{ "key": { "n": -1 }, "name": "down" }] });
    let entries = keys(&*store, kind::INDEX);
    let unique = doc! { "key": { "n": 1 }, "name": "up", "unique": true };
    let reply = client.run(doc! { "createIndexes": "c", "indexes": [unique] });
    assert_eq!(code(&reply), 11000, "{reply}");
    assert_eq!(keys(&*store, kind::INDEX), entries);
    let database = client.engine.database("d").unwrap();
    let known = database.collection("c").unwrap();
    assert_eq!(known.indexes.len(), 1);
    client.engine.remove_index(&database, "c", known.indexes[0].id + 1000).unwrap();
    assert_eq!(database.collection("c").unwrap().indexes.len(), 1);
    client.engine.remove_index(&database, "c", known.indexes[0].id).unwrap();
    client.engine.end_leavings(&database);
    assert_eq!((keys(&*store, kind::INDEX), keys(&*store, kind::RECORD)), (0, 601));
    let client = Client::over(store, &EngineOptions::default());
    assert!(client.engine.database("d").unwrap().collection("c").unwrap().indexes.is_empty());
}

#[test]
fn a_time_to_live_ends_nothing_more_once_its_index_is_dropped() {
    let (store, client) = narrow();
    let index = doc! { "key": { "at": 1 }, "name": "at", "expireAfterSeconds": 0 };
    client.run(doc! { "createIndexes": "c", "indexes": [index] });
    let past = DateTime::from_millis(1000);
    let documents: Vec<Document> = (0..1000).map(|id| doc! { "_id": id, "at": past }).collect();
    client.run(doc! { "insert": "c", "documents": documents });
    let other = Client::of(&client.engine);
    let drop = move || {
        assert_eq!(code(&other.run(doc! { "dropIndexes": "c", "index": "at" })), 0);
    };
    *store.behind.lock().unwrap() = Some((0, Box::new(drop)));
    let ended = expiry::expire(&client.engine).unwrap();
    assert!(ended > 0 && ended < 1000, "{ended}");
    let left = client.run(doc! { "count": "c" }).get_i32("n").unwrap();
    assert_eq!(left as u64, 1000 - ended);
    assert_eq!(expiry::expire(&client.engine).unwrap(), 0);
}

#[test]
fn commands_are_timed_by_name_and_invented_names_are_one() {
    use beeline_observe::MetricSet as _;
    let client = Client::new();
    client.run(doc! {"insert": "c", "documents": [{"_id": 1}]});
    for _ in 0..3 {
        client.find("c", &doc! {}, &doc! {});
    }
    for name in ["nosuch", "neither"] {
        client.run(doc! {name: 1});
    }
    let told: Vec<(String, u64)> = client
        .engine
        .times
        .labelled()
        .into_iter()
        .map(|one| (one.labels[1].1.clone(), one.distribution.count()))
        .collect();
    let expected = [("find", 3), ("insert", 1), ("other", 2)];
    assert_eq!(told, expected.map(|(name, count)| (name.to_owned(), count)));
}
