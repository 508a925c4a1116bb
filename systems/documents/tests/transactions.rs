//! Transactions: what they see, when they conflict, what is left of them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::{Arc, Barrier};

use beeline_documents::commands::Session;
use beeline_documents::store::{Change, Memory, Stretch, with_row};
use beeline_documents::transaction::State;
use beeline_documents::{EngineOptions, expiry, retry};
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, Document, doc};
use proptest::prelude::*;

use common::Client;

fn session(byte: u8) -> Bson {
    let id = Binary { subtype: BinarySubtype::Uuid, bytes: vec![byte; 16] };
    Bson::Document(doc! { "id": id })
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

/// A transaction of a session.
struct Open<'c> {
    client: &'c Client,
    session: u8,
    number: i64,
    begun: bool,
}

impl<'c> Open<'c> {
    fn new(client: &'c Client, session: u8, number: i64) -> Self {
        Self { client, session, number, begun: false }
    }

    fn run(&mut self, mut body: Document) -> Document {
        body.extend(
            doc! { "lsid": session(self.session), "txnNumber": self.number, "autocommit": false },
        );
        if !std::mem::replace(&mut self.begun, true) {
            body.insert("startTransaction", true);
        }
        self.client.run(body)
    }

    fn end(&mut self, word: &str) -> Document {
        self.run(doc! { word: 1, "$db": "admin" })
    }

    fn find(&mut self, filter: &Document, sort: &Document) -> Vec<Document> {
        let find =
            doc! { "find": "c", "filter": filter.clone(), "sort": sort.clone(), "batchSize": 2 };
        let reply = self.run(find);
        assert_eq!(code(&reply), 0, "{reply}");
        let mut cursor = reply.get_document("cursor").unwrap().clone();
        let (mut all, mut name) = (Vec::new(), "firstBatch");
        loop {
            let batch = cursor.get_array(name).unwrap();
            all.extend(batch.iter().map(|one| one.as_document().unwrap().clone()));
            let id = cursor.get_i64("id").unwrap();
            if id == 0 {
                return all;
            }
            let more = self.run(doc! { "getMore": id, "collection": "c", "batchSize": 3 });
            cursor = more.get_document("cursor").unwrap_or_else(|_| panic!("{more}")).clone();
            name = "nextBatch";
        }
    }
}

fn insert(id: i32, n: i32) -> Document {
    doc! { "insert": "c", "documents": [{ "_id": id, "n": n }] }
}

fn add(id: i32, n: i32) -> Document {
    doc! { "update": "c", "updates": [{ "q": { "_id": id }, "u": { "$inc": { "n": n } } }] }
}

fn remove(id: i32) -> Document {
    doc! { "delete": "c", "deletes": [{ "q": { "_id": id }, "limit": 1 }] }
}

#[derive(Clone, Copy, Debug)]
enum Write {
    Insert(i32, i32),
    Add(i32, i32),
    Remove(i32),
}

impl Write {
    fn command(self) -> Document {
        match self {
            Self::Insert(id, n) => insert(id, n),
            Self::Add(id, n) => add(id, n),
            Self::Remove(id) => remove(id),
        }
    }

    fn id(self) -> i32 {
        match self {
            Self::Insert(id, _) | Self::Add(id, _) | Self::Remove(id) => id,
        }
    }

    /// Whether it changes something there.
    fn apply(self, to: &mut BTreeMap<i32, i32>) -> bool {
        match self {
            Self::Insert(id, n) => !to.contains_key(&id) && to.insert(id, n).is_none(),
            Self::Add(id, n) => to.get_mut(&id).map(|old| *old += n).is_some(),
            Self::Remove(id) => to.remove(&id).is_some(),
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Own(Write),
    Other(Write),
    Find(Document, Document),
}

fn step() -> impl Strategy<Value = Step> {
    let write = || {
        prop_oneof![
            (0..12_i32, 0..6_i32).prop_map(|(id, n)| Write::Insert(id, n)),
            (0..12_i32, 1..4_i32).prop_map(|(id, n)| Write::Add(id, n)),
            (0..12_i32).prop_map(Write::Remove),
        ]
    };
    let filter = prop_oneof![
        Just(doc! {}),
        (0..8_i32).prop_map(|n| doc! { "n": n }),
        (0..8_i32).prop_map(|n| doc! { "n": { "$gte": n } }),
        (0..12_i32).prop_map(|id| doc! { "_id": { "$lt": id } }),
        (0..12_i32).prop_map(|id| doc! { "_id": id }),
    ];
    let sort = prop::sample::select(vec![
        doc! { "_id": 1 },
        doc! { "_id": -1 },
        doc! { "n": 1, "_id": 1 },
        doc! { "n": -1, "_id": -1 },
    ]);
    prop_oneof![
        3 => write().prop_map(Step::Own),
        2 => write().prop_map(Step::Other),
        3 => (filter, sort).prop_map(|(filter, sort)| Step::Find(filter, sort)),
    ]
}

/// What a plain map says to a find.
fn wanted(all: &BTreeMap<i32, i32>, filter: &Document, sort: &Document) -> Vec<Document> {
    let filter = beeline_documents_query::Filter::parse(filter).unwrap();
    let mut found: Vec<Document> = all.iter().map(|(id, n)| doc! { "_id": *id, "n": *n }).collect();
    found.retain(|one| filter.matches(one));
    beeline_documents_query::sort::Order::parse(sort).unwrap().sort(&mut found);
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.max(300)))]
    /// A transaction sees what was there when it began and what it wrote; it ends with a conflict if, and
    /// only if, another changed a document that it wrote.
    #[test]
    fn a_transaction_is_a_snapshot_and_its_own_writes(start in prop::collection::btree_map(0..12_i32, 0..6_i32, 0..8), steps in prop::collection::vec(step(), 1..30), indexed: bool) {
        let client = Client::new();
        client.run(doc! { "create": "c" });
        if indexed {
            client.run(doc! { "createIndexes": "c", "indexes": [{ "key": { "n": 1, "_id": 1 } }] });
        }
        for (id, n) in &start {
            client.run(insert(*id, *n));
        }
        let (mut seen, mut there) = (start.clone(), start);
        let (mut own, mut others) = (BTreeSet::new(), BTreeSet::new());
        let mut open = Open::new(&client, 1, 1);
        // The first command is what the transaction begins with.
        prop_assert_eq!(open.find(&doc! {}, &doc! { "_id": 1 }), wanted(&seen, &doc! {}, &doc! { "_id": 1 }));
        let mut writes = Vec::new();
        for step in steps {
            match step {
                Step::Own(write) => {
                    // A write of what is there already is refused and would end the transaction.
                    if matches!(write, Write::Insert(id, _) if seen.contains_key(&id)) {
                        continue;
                    }
                    let changes = write.apply(&mut seen);
                    let reply = open.run(write.command());
                    if changes && others.contains(&write.id()) {
                        prop_assert_eq!(code(&reply), 112);
                        prop_assert!(is_transient(&reply));
                        prop_assert_eq!(code(&open.end("commitTransaction")), 251);
                        prop_assert_eq!(client.find("c", &doc! {}, &doc! { "_id": 1 }), wanted(&there, &doc! {}, &doc! { "_id": 1 }));
                        return Ok(());
                    }
                    prop_assert_eq!(code(&reply), 0, "{}", reply);
                    if changes {
                        own.insert(write.id());
                        writes.push(write);
                    }
                }
                Step::Other(write) => {
                    if write.apply(&mut there) {
                        others.insert(write.id());
                    }
                    client.run(write.command());
                }
                Step::Find(filter, sort) => {
                    prop_assert_eq!(open.find(&filter, &sort), wanted(&seen, &filter, &sort), "{} {}", &filter, &sort);
                    prop_assert_eq!(client.find("c", &filter, &sort), wanted(&there, &filter, &sort));
                }
            }
        }
        let reply = open.end("commitTransaction");
        if own.is_disjoint(&others) {
            prop_assert_eq!(code(&reply), 0, "{}", reply);
            for write in writes {
                write.apply(&mut there);
            }
            prop_assert_eq!(code(&open.end("commitTransaction")), 0);
        } else {
            prop_assert_eq!(code(&reply), 112);
        }
        let all = doc! { "_id": 1 };
        prop_assert_eq!(client.find("c", &doc! {}, &all), wanted(&there, &doc! {}, &all));
        prop_assert_eq!(client.run(doc! { "count": "c" }).get_i32("n").unwrap() as usize, there.len());
        let report = client.run(doc! { "validate": "c" });
        prop_assert!(report.get_bool("valid").unwrap(), "{}", report);
    }
}

#[test]
fn a_commit_that_is_sent_again_does_nothing_again_also_after_a_restart() {
    let store = Arc::<Memory>::default();
    let client = Client::over(store.clone(), &EngineOptions::default());
    client.run(doc! { "create": "c" });
    let mut open = Open::new(&client, 1, 5);
    open.run(insert(1, 1));
    assert_eq!(code(&open.end("commitTransaction")), 0);
    let mut lost = Open::new(&client, 2, 1);
    lost.run(insert(2, 1));
    client.run(remove(1));
    let client = Client::over(store, &EngineOptions::default());
    for (session, number, wanted) in [(1, 5, 0), (1, 4, 251), (1, 6, 251), (2, 1, 251)] {
        let mut again = Open { begun: true, ..Open::new(&client, session, number) };
        let reply = again.end("commitTransaction");
        assert_eq!(code(&reply), wanted, "{session} {number} {reply}");
        assert_eq!(is_transient(&reply), wanted != 0);
    }
    assert!(client.find("c", &doc! {}, &doc! {}).is_empty());
    // The number is taken for retryable writes too.
    let older =
        doc! { "insert": "c", "documents": [{ "_id": 9 }], "lsid": session(1), "txnNumber": 4_i64 };
    assert_eq!(code(&client.run(older)), 225);
    retry::reap(&client.engine).unwrap();
    expiry::expire(&client.engine).unwrap();
}

#[test]
fn two_transactions_cannot_give_one_value_of_a_unique_index() {
    let client = Client::new();
    let unique = doc! { "key": { "u": 1 }, "unique": true, "sparse": true };
    client.run(doc! { "createIndexes": "c", "indexes": [unique] });
    let (mut one, mut two) = (Open::new(&client, 1, 1), Open::new(&client, 2, 1));
    let with = |id: i32| doc! { "insert": "c", "documents": [{ "_id": id, "u": "same" }] };
    assert_eq!(code(&one.run(with(1))), 0);
    assert_eq!(code(&two.run(with(2))), 0);
    assert_eq!(code(&two.end("commitTransaction")), 0);
    let reply = one.end("commitTransaction");
    assert_eq!((code(&reply), is_transient(&reply)), (112, true));
    assert_eq!(client.run(doc! { "count": "c" }).get_i32("n").unwrap(), 1);
    // What a transaction takes away it may give to another document.
    let mut three = Open::new(&client, 1, 2);
    assert_eq!(code(&three.run(remove(2))), 0);
    assert_eq!(code(&three.run(with(3))), 0);
    assert_eq!(code(&three.end("commitTransaction")), 0);
    assert!(client.run(doc! { "validate": "c" }).get_bool("valid").unwrap());
}

#[test]
fn an_array_in_a_transaction_that_ends_without_a_trace_marks_the_index_for_good() {
    let store = Arc::<Memory>::default();
    let client = Client::over(store.clone(), &EngineOptions::default());
    client.run(doc! { "createIndexes": "c", "indexes": [{ "key": { "l": 1 } }] });
    let lists = |id: i32| doc! { "insert": "c", "documents": [{ "_id": id, "l": [1, 9] }] };
    let mut open = Open::new(&client, 1, 1);
    assert_eq!(code(&open.run(lists(1))), 0);
    assert_eq!(code(&open.end("abortTransaction")), 0);
    assert_eq!(code(&client.run(lists(2))), 0);
    let client = Client::over(store, &EngineOptions::default());
    let found = client.find("c", &doc! { "l": { "$gt": 3, "$lt": 5 } }, &doc! {});
    assert_eq!(found.len(), 1);
}

#[test]
fn an_index_made_meanwhile_is_whole() {
    let client = Client::new();
    client.run(insert(1, 1));
    let (mut writer, mut reader) = (Open::new(&client, 1, 1), Open::new(&client, 2, 1));
    assert_eq!(code(&writer.run(insert(2, 2))), 0);
    assert_eq!(reader.find(&doc! {}, &doc! {}).len(), 1);
    client.run(doc! { "createIndexes": "c", "indexes": [{ "key": { "n": 1 } }] });
    assert_eq!(code(&writer.end("commitTransaction")), 112);
    let reply = reader.run(doc! { "find": "c", "filter": { "n": 1 } });
    assert_eq!((code(&reply), is_transient(&reply)), (246, true), "{reply}");
    assert!(client.run(doc! { "validate": "c" }).get_bool("valid").unwrap());
    let mut late = Open::new(&client, 3, 1);
    assert_eq!(late.find(&doc! { "n": 1 }, &doc! {}).len(), 1);
}

#[test]
fn a_transaction_keeps_to_its_database_its_commands_and_its_time() {
    let options = EngineOptions { transaction_lifetime_ms: 0, ..EngineOptions::default() };
    let client = Client::over(Arc::new(Memory::default()), &options);
    client.run(insert(1, 1));
    let mut late = Open::new(&client, 1, 1);
    late.run(doc! { "find": "c" });
    let reply = late.run(insert(2, 2));
    assert_eq!((code(&reply), is_transient(&reply)), (251, true));
    let client = Client::new();
    client.run(insert(1, 1));
    client.run(doc! { "create": "capped", "capped": true, "size": 10_000 });
    let refused = [
        doc! { "insert": "c", "documents": [{ "_id": 1 }], "$db": "other" },
        doc! { "count": "c" },
        doc! { "aggregate": "c", "pipeline": [{ "$out": "x" }], "cursor": {} },
        doc! { "aggregate": "c", "pipeline": [{ "$changeStream": {} }], "cursor": {} },
        doc! { "insert": "capped", "documents": [{ "_id": 1 }] },
    ];
    for (number, command) in refused.into_iter().enumerate() {
        let mut open = Open::new(&client, 1, number as i64);
        open.run(insert(100, 1));
        let reply = open.run(command.clone());
        assert_eq!(code(&reply), 263, "{command} {reply}");
        assert_eq!(code(&open.end("abortTransaction")), if number == 1 { 0 } else { 251 });
    }
    assert_eq!(client.run(doc! { "count": "c" }).get_i32("n").unwrap(), 1);
    // Sessions that end take their transactions along, and a failed statement its own.
    let mut open = Open::new(&client, 7, 1);
    open.run(insert(2, 2));
    client.run(doc! { "endSessions": [session(7)], "$db": "admin" });
    assert_eq!(code(&open.end("commitTransaction")), 251);
    let mut open = Open::new(&client, 7, 2);
    open.run(insert(2, 2));
    assert_eq!(code(&open.run(insert(1, 1))), 11000);
    assert_eq!(code(&open.end("commitTransaction")), 251);
    assert_eq!(client.run(doc! { "count": "c" }).get_i32("n").unwrap(), 1);
    assert!(client.engine.store().now_ms() > 0);
}

#[test]
fn a_transaction_belongs_to_the_user_who_began_it() {
    let client = Client::new();
    client.run(insert(1, 1));
    let mut open = Open::new(&client, 1, 1);
    open.run(insert(2, 2));
    let commit = doc! { "commitTransaction": 1, "$db": "admin", "lsid": session(1), "txnNumber": 1_i64, "autocommit": false };
    let mut eve = Session { user: Some("eve".to_owned()), ..Session::default() };
    assert_eq!(code(&client.run_in(&mut eve, commit)), 251);
    assert_eq!(code(&open.end("commitTransaction")), 0);
}

#[test]
fn events_of_a_transaction_come_together_when_it_is_committed() {
    let client = Client::new();
    client.run(doc! { "create": "c" });
    let watch = |options: Document| doc! { "aggregate": "c", "pipeline": [{ "$changeStream": options }], "cursor": {} };
    let reply = client.run(watch(doc! {}));
    let start = reply.get_document("cursor").unwrap().get_document("postBatchResumeToken").unwrap();
    let mut open = Open::new(&client, 1, 1);
    open.run(insert(1, 1));
    client.run(insert(2, 2));
    open.run(add(1, 1));
    assert_eq!(code(&open.end("commitTransaction")), 0);
    let reply = client.run(watch(doc! { "resumeAfter": start.clone() }));
    let seen: Vec<(String, i32)> = reply
        .get_document("cursor")
        .unwrap()
        .get_array("firstBatch")
        .unwrap()
        .iter()
        .map(|event| {
            let event = event.as_document().unwrap();
            let id = event.get_document("documentKey").unwrap().get_i32("_id").unwrap();
            (event.get_str("operationType").unwrap().to_owned(), id)
        })
        .collect();
    let wanted = [("insert", 2), ("insert", 1), ("update", 1)];
    assert_eq!(seen, wanted.map(|(word, id)| (word.to_owned(), id)));
}

#[test]
fn of_two_begins_of_one_session_the_newest_is_left_and_one_of_a_number() {
    for round in 0..50 {
        let client = Client::new();
        let barrier = Arc::new(Barrier::new(2));
        let (numbers, codes) = if round % 2 == 0 { ([7, 7], [0, 117]) } else { ([7, 8], [0, 0]) };
        let threads = numbers.map(|number: i64| {
            let (engine, barrier) = (Arc::clone(&client.engine), Arc::clone(&barrier));
            std::thread::spawn(move || {
                barrier.wait();
                let begun = engine.transactions.begin(&engine, b"s", number);
                begun.map(|_| ()).map_err(|error| error.code as i32)
            })
        });
        let mut seen = threads.map(|one| one.join().unwrap().err().unwrap_or(0));
        seen.sort_unstable();
        // The older number may also come too late.
        assert!(seen == codes || round % 2 == 1 && seen == [0, 225], "{seen:?}");
        let left = client.engine.transactions.of(b"s").unwrap();
        let left = left.lock().unwrap();
        assert_eq!((left.number, left.state()), (numbers[1], State::Open));
    }
}

#[test]
fn a_transaction_that_another_of_its_session_replaces_leaves_nothing() {
    let client = Client::new();
    client.run(insert(1, 1));
    let mut old = Open::new(&client, 1, 1);
    assert_eq!(code(&old.run(insert(2, 2))), 0);
    assert_eq!(code(&client.run(add(1, 1))), 0);
    assert!(client.engine.memory.used() > 0);
    let mut new = Open::new(&client, 1, 2);
    assert_eq!(new.find(&doc! {}, &doc! {}), [doc! { "_id": 1, "n": 2 }]);
    assert_eq!(code(&old.run(insert(3, 3))), 225);
    assert_eq!(code(&old.end("commitTransaction")), 225);
    assert_eq!(code(&new.end("commitTransaction")), 0);
    assert_eq!(client.run(doc! { "count": "c" }).get_i32("n").unwrap(), 1);
    assert_eq!(client.engine.memory.used(), 0);
}

#[test]
fn one_document_that_changes_often_ends_no_transaction() {
    let options = EngineOptions { memory_bytes: 1 << 20, ..EngineOptions::default() };
    let client = Client::over(Arc::new(Memory::default()), &options);
    client.run(doc! { "insert": "c", "documents": [{ "_id": 1, "t": "x".repeat(50_000) }] });
    let mut open = Open::new(&client, 1, 1);
    assert_eq!(open.find(&doc! {}, &doc! {}).len(), 1);
    for n in 0..100 {
        let change = doc! { "q": { "_id": 1 }, "u": { "$set": { "n": n } } };
        assert_eq!(code(&client.run(doc! { "update": "c", "updates": [change] })), 0);
    }
    assert!(!open.find(&doc! {}, &doc! {})[0].contains_key("n"));
    assert_eq!(code(&open.end("commitTransaction")), 0);
    assert_eq!(client.engine.memory.used(), 0);
}

#[test]
fn what_was_taken_back_is_not_committed_when_its_commit_is_sent_again() {
    let memory = Arc::<Memory>::default();
    let client = Client::over(memory.clone(), &EngineOptions::default());
    assert_eq!(code(&client.run(insert(1, 1))), 0);
    let mut open = Open::new(&client, 4, 1);
    assert_eq!(code(&open.run(insert(7, 7))), 0);
    assert_eq!(code(&open.end("commitTransaction")), 0);
    assert_eq!(code(&open.end("commitTransaction")), 0, "the store remembers");
    client.engine.transactions.abort_all();
    assert_eq!(code(&open.end("commitTransaction")), 0, "the store remembers by itself");
    // Another node leads, and what this one alone had is taken back.
    with_row(&*memory, b"d", |row| {
        let mut keys = Vec::new();
        row.range(&Stretch::of_prefix(&[]), false, &mut |key, _| {
            keys.push(Change::delete(key.to_vec()));
            ControlFlow::Continue(())
        })?;
        row.apply(&keys).map(drop)
    })
    .unwrap();
    client.engine.transactions.abort_all();
    assert_eq!(code(&open.end("commitTransaction")), 251);
}
