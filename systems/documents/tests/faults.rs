//! What happens between the slices of an operation, between its look and its write, and to those who
//! are not who they were.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::future::Future as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context as Poller, Waker};
use std::time::Duration;

use beeline_documents::commands::Session;
use beeline_documents::store::{Backing, Change, Memory, Store, Stretch, Visitor};
use beeline_documents::{Engine, EngineOptions, users};
use beeline_documents_query::error::Result;
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, DateTime, Document, doc};

use common::Client;

type Hook = Box<dyn FnOnce() + Send>;

/// A store that runs a hook before a lock of a row is taken, and counts batches of the catalog.
#[derive(Default)]
struct Hooked {
    inner: Memory,
    /// Locks of the database's row to let pass first, and what is done then.
    hook: Mutex<Option<(usize, Hook)>>,
    catalog: AtomicUsize,
}

impl std::fmt::Debug for Hooked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hooked")
    }
}

struct Row<'r>(&'r mut dyn Backing, &'r AtomicUsize);

impl Backing for Row<'_> {
    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool> {
        self.0.get(key, out)
    }

    fn range(&mut self, stretch: &Stretch, backward: bool, visit: &mut Visitor<'_>) -> Result<()> {
        self.0.range(stretch, backward, visit)
    }

    fn apply(&mut self, changes: &[Change]) -> Result<Option<usize>> {
        let catalog = changes.iter().any(|change| change.key.first() == Some(&1));
        self.1.fetch_add(usize::from(catalog), Ordering::Relaxed);
        self.0.apply(changes)
    }
}

impl Store for Hooked {
    fn with(&self, row: &[u8], work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>) -> Result<()> {
        let mut due = None;
        if row == b"d" {
            let mut hook = self.hook.lock().unwrap();
            match hook.as_mut() {
                Some((0, _)) => due = hook.take(),
                Some((left, _)) => *left -= 1,
                None => {}
            }
        }
        if let Some((_, hook)) = due {
            hook();
        }
        self.inner.with(row, &mut |inner| work(&mut Row(inner, &self.catalog)))
    }

    fn now_ms(&self) -> u64 {
        self.inner.now_ms()
    }

    fn space(&self) -> (u64, u64) {
        self.inner.space()
    }
}

fn hooked() -> (Arc<Hooked>, Client) {
    let store = Arc::<Hooked>::default();
    let client = Client::over(store.clone(), &EngineOptions::default());
    (store, client)
}

fn after(store: &Hooked, locks: usize, hook: impl FnOnce() + Send + 'static) {
    *store.hook.lock().unwrap() = Some((locks, Box::new(hook)));
}

fn fill(client: &Client, name: &str, count: i32) {
    let documents: Vec<Document> = (0..count).map(|n| doc! { "_id": n, "n": n }).collect();
    let reply = client.run(doc! { "insert": name, "documents": documents });
    assert_eq!(reply.get_i32("n").unwrap(), count, "{reply}");
}

fn code(reply: &Document) -> i32 {
    let error = match reply.get_array("writeErrors") {
        Ok(errors) => errors[0].as_document().unwrap(),
        Err(_) => reply,
    };
    error.get_i32("code").unwrap_or(0)
}

#[test]
fn a_write_of_several_touches_nothing_of_a_collection_that_took_the_name() {
    for command in [
        doc! { "delete": "c", "deletes": [{ "q": {}, "limit": 0 }] },
        doc! { "update": "c", "updates": [{ "q": {}, "u": { "$set": { "hit": 1 } }, "multi": true }] },
    ] {
        let (store, client) = hooked();
        fill(&client, "c", 1000);
        let other = Client::of(&client.engine);
        after(&store, 1, move || {
            other.run(doc! { "drop": "c" });
            fill(&other, "c", 1000);
        });
        let reply = client.run(command);
        assert_eq!(code(&reply), 175, "{reply}");
        let left = client.run(doc! { "count": "c", "query": { "hit": { "$exists": false } } });
        assert_eq!(left.get_i32("n").unwrap(), 1000, "{left}");
    }
}

#[test]
fn a_cursor_whose_index_is_dropped_says_so() {
    let client = Client::new();
    fill(&client, "c", 2000);
    client.run(doc! { "createIndexes": "c", "indexes": [{ "key": { "n": 1 }, "name": "n" }] });
    let reply = client.run(doc! { "find": "c", "filter": { "n": { "$gte": 0 } }, "batchSize": 2 });
    let id = reply.get_document("cursor").unwrap().get_i64("id").unwrap();
    client.run(doc! { "dropIndexes": "c", "index": "n" });
    let more = client.run(doc! { "getMore": id, "collection": "c" });
    assert_eq!(code(&more), 175, "{more}");
}

#[test]
fn a_rename_over_a_collection_is_one_batch() {
    let (store, client) = hooked();
    fill(&client, "from", 10);
    fill(&client, "to", 20);
    let before = store.catalog.load(Ordering::Relaxed);
    let rename = doc! { "renameCollection": "d.from", "to": "d.to", "$db": "admin" };
    assert_eq!(code(&client.run(rename.clone())), 48);
    let mut dropping = rename;
    dropping.insert("dropTarget", true);
    assert_eq!(code(&client.run(dropping)), 0);
    assert_eq!(store.catalog.load(Ordering::Relaxed), before + 1);
    assert_eq!(client.run(doc! { "count": "to" }).get_i32("n").unwrap(), 10);
    let reopened = Client::over(store, &EngineOptions::default());
    assert_eq!(reopened.run(doc! { "count": "to" }).get_i32("n").unwrap(), 10);
    assert_eq!(reopened.run(doc! { "count": "from" }).get_i32("n").unwrap(), 0);
}

#[test]
fn a_result_on_its_way_is_gone_after_a_crash() {
    let (store, client) = hooked();
    fill(&client, "c", 5);
    client.run(doc! { "create": "tmp.agg_out.cut" });
    let reopened = Client::over(store, &EngineOptions::default());
    let names = reopened.run(doc! { "listCollections": 1, "nameOnly": true });
    let names = names.get_document("cursor").unwrap().get_array("firstBatch").unwrap().len();
    assert_eq!(names, 1);
}

#[test]
fn a_result_on_its_way_is_dropped_at_the_next_primary_and_not_while_it_is_filled() {
    let (store, client) = hooked();
    fill(&client, "c", 5);
    let engine = Arc::clone(&client.engine);
    let listed = || {
        let names = client.run(doc! { "listCollections": 1, "nameOnly": true });
        names.get_document("cursor").unwrap().get_array("firstBatch").unwrap().len()
    };
    // In the middle of `$out`, behind the creation of what it fills.
    let again = Arc::clone(&engine);
    let seen = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&seen);
    let hook = move || {
        let half = |name: &str| name.starts_with("tmp.agg_out.");
        let halves = || {
            let all = again.database("d").unwrap().collections();
            all.iter().filter(|one| half(&one.name)).count()
        };
        count.store(halves(), Ordering::SeqCst);
        again.take_over();
        assert_eq!(halves(), count.load(Ordering::SeqCst), "what is filled was dropped");
    };
    after(&store, 4, hook);
    let out = doc! { "aggregate": "c", "pipeline": [{ "$out": "to" }], "cursor": {} };
    assert_eq!(code(&client.run(out)), 0);
    assert_eq!(seen.load(Ordering::SeqCst), 1, "the hook ran beside it");
    assert_eq!(client.run(doc! { "count": "to" }).get_i32("n").unwrap(), 5);
    client.run(doc! { "create": "tmp.agg_out.cut" });
    assert_eq!(listed(), 3);
    engine.take_over();
    assert_eq!(listed(), 2);
}

/// A store that ends with the process.
#[derive(Debug, Default)]
struct Fleeting(Memory);

impl Store for Fleeting {
    fn with(&self, row: &[u8], work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>) -> Result<()> {
        self.0.with(row, work)
    }

    fn now_ms(&self) -> u64 {
        self.0.now_ms()
    }

    fn space(&self) -> (u64, u64) {
        self.0.space()
    }

    fn outlives_process(&self) -> bool {
        false
    }
}

#[test]
fn a_journal_is_not_promised_where_documents_end_with_the_process() {
    let insert = |j: bool| doc! { "insert": "c", "documents": [{}], "writeConcern": { "j": j } };
    let fleeting = Client::over(Arc::<Fleeting>::default(), &EngineOptions::default());
    let refused = fleeting.run(insert(true));
    assert_eq!(code(&refused), 2, "{refused}");
    assert_eq!(fleeting.run(doc! { "count": "c" }).get_i32("n").unwrap(), 0);
    assert_eq!(fleeting.run(insert(false)).get_i32("n").unwrap(), 1);
    let engine = |client: &Client| {
        let status = client.run(doc! { "serverStatus": 1 });
        status.get_document("storageEngine").unwrap().get_bool("persistent").unwrap()
    };
    let lasting = Client::new();
    assert_eq!(lasting.run(insert(true)).get_i32("n").unwrap(), 1);
    assert_eq!((engine(&fleeting), engine(&lasting)), (false, true));
}

#[test]
fn a_bypass_of_the_validator_lasts_for_its_own_write() {
    let client = Client::new();
    client.run(doc! { "create": "c", "validator": { "n": { "$type": "int" } } });
    client.run(doc! { "createIndexes": "c", "indexes": [{ "key": { "l": 1 }, "name": "l" }] });
    // The array makes the index another, and with it the collection.
    let bypass = doc! { "insert": "c", "documents": [{ "_id": 1, "l": [1, 2] }], "bypassDocumentValidation": true };
    assert_eq!(code(&client.run(bypass)), 0);
    let refused = client.run(doc! { "insert": "c", "documents": [{ "_id": 2, "n": "x" }] });
    assert_eq!(code(&refused), 121, "{refused}");
}

fn token(reply: &Document) -> (Vec<Document>, Document) {
    let cursor = reply.get_document("cursor").unwrap_or_else(|_| panic!("{reply}"));
    let batch = cursor.get_array("firstBatch").or_else(|_| cursor.get_array("nextBatch")).unwrap();
    let batch = batch.iter().map(|one| one.as_document().unwrap().clone()).collect();
    (batch, cursor.get_document("postBatchResumeToken").unwrap().clone())
}

fn watch(options: Document, batch: i32) -> Document {
    doc! { "aggregate": "c", "pipeline": [{ "$changeStream": options }], "cursor": { "batchSize": batch } }
}

#[test]
fn a_stream_that_resumes_behind_a_cut_batch_misses_nothing() {
    let client = Client::new();
    client.run(doc! { "create": "c" });
    let (_, start) = token(&client.run(watch(doc! {}, 0)));
    fill(&client, "c", 5);
    let (first, next) = token(&client.run(watch(doc! { "resumeAfter": start }, 2)));
    assert_eq!(first.len(), 2);
    let (rest, _) = token(&client.run(watch(doc! { "resumeAfter": next }, 100)));
    let ids: Vec<i32> = rest
        .iter()
        .map(|event| event.get_document("documentKey").unwrap().get_i32("_id").unwrap())
        .collect();
    assert_eq!(ids, [2, 3, 4]);
}

#[test]
fn a_stream_from_before_a_time_without_a_log_is_told() {
    let store = Arc::<Memory>::default();
    let with_log = EngineOptions::default();
    let without = EngineOptions { log_bytes: 0, ..EngineOptions::default() };
    let client = Client::over(store.clone(), &with_log);
    client.run(doc! { "create": "c" });
    let (_, start) = token(&client.run(watch(doc! {}, 0)));
    let client = Client::over(store.clone(), &with_log);
    assert_eq!(code(&client.run(watch(doc! { "resumeAfter": start.clone() }, 5))), 0);
    fill(&Client::over(store.clone(), &without), "c", 3);
    let client = Client::over(store, &with_log);
    let lost = client.run(watch(doc! { "resumeAfter": start }, 5));
    assert_eq!(code(&lost), 286, "{lost}");
    assert_eq!(code(&client.run(watch(doc! {}, 5))), 0);
}

fn session_of(byte: u8, length: usize) -> Document {
    doc! { "id": Binary { subtype: BinarySubtype::Uuid, bytes: vec![byte; length] } }
}

fn retryable(session: &Document, number: i64, id: i32) -> Document {
    doc! { "insert": "c", "documents": [{ "_id": id }], "lsid": session.clone(), "txnNumber": number }
}

#[test]
fn a_session_is_named_by_sixteen_bytes() {
    let client = Client::new();
    for length in [0, 1, 15, 17] {
        let reply = client.run(retryable(&session_of(7, length), 1, length as i32));
        assert_eq!(code(&reply), 207, "{reply}");
    }
    assert_eq!(code(&client.run(retryable(&session_of(7, 16), 1, 1))), 0);
}

/// Lets two threads meet between their look for an outcome and their write, or one go on alone
/// when the other does not come.
#[derive(Debug, Default)]
struct Meeting {
    inner: Memory,
    armed: Mutex<(bool, usize)>,
    came: Condvar,
}

impl Store for Meeting {
    fn with(&self, row: &[u8], work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>) -> Result<()> {
        self.inner.with(row, work)?;
        let mut armed = self.armed.lock().unwrap();
        if row == b"d" && armed.0 && armed.1 < 2 {
            armed.1 += 1;
            self.came.notify_all();
            let wait = Duration::from_millis(500);
            drop(self.came.wait_timeout_while(armed, wait, |armed| armed.1 < 2).unwrap());
        }
        Ok(())
    }

    fn now_ms(&self) -> u64 {
        self.inner.now_ms()
    }

    fn space(&self) -> (u64, u64) {
        self.inner.space()
    }
}

#[test]
fn a_statement_that_is_sent_again_while_the_first_still_runs_happens_once() {
    let store = Arc::<Meeting>::default();
    let client = Client::over(store.clone(), &EngineOptions::default());
    fill(&client, "c", 1);
    store.armed.lock().unwrap().0 = true;
    let send = || {
        let client = Client::of(&client.engine);
        let update = doc! { "update": "c", "updates": [{ "q": { "_id": 0 }, "u": { "$inc": { "times": 1 } } }],
        "lsid": session_of(1, 16), "txnNumber": 1_i64 };
        std::thread::spawn(move || client.run(update))
    };
    let threads = [send(), send()];
    for thread in threads {
        let reply = thread.join().unwrap();
        assert_eq!(reply.get_i32("n").unwrap(), 1, "{reply}");
    }
    assert_eq!(client.find("c", &doc! {}, &doc! {})[0].get_i32("times").unwrap(), 1);
}

#[test]
fn a_time_to_live_ends_only_what_its_partial_filter_selects() {
    let client = Client::new();
    let index = doc! { "key": { "at": 1 }, "name": "at", "expireAfterSeconds": 0, "partialFilterExpression": { "done": true } };
    client.run(doc! { "createIndexes": "c", "indexes": [index] });
    let past = DateTime::from_millis(1000);
    client.run(doc! { "insert": "c", "documents": [
        { "_id": 1, "at": past, "done": true }, { "_id": 2, "at": past, "done": false }, { "_id": 3, "at": past },
    ] });
    assert_eq!(beeline_documents::expiry::expire(&client.engine).unwrap(), 1);
    assert_eq!(client.run(doc! { "count": "c" }).get_i32("n").unwrap(), 2);
}

#[test]
fn a_reader_does_not_wake_those_that_wait_for_changes() {
    let client = Client::new();
    fill(&client, "c", 3);
    let mut poller = Poller::from_waker(Waker::noop());
    let mut woken = |what: &dyn Fn()| {
        let changed = client.engine.changed.notified();
        let mut changed = std::pin::pin!(changed);
        changed.as_mut().enable();
        what();
        changed.as_mut().poll(&mut poller).is_ready()
    };
    assert!(!woken(&|| drop(client.find("c", &doc! {}, &doc! {}))));
    assert!(!woken(&|| drop(client.run(watch(doc! {}, 5)))));
    assert!(woken(&|| drop(client.run(doc! { "insert": "c", "documents": [{ "_id": 9 }] }))));
}

#[test]
fn a_sorted_find_and_modify_takes_each_document_once_and_lets_others_in() {
    let (store, client) = hooked();
    fill(&client, "c", 1000);
    let other = Client::of(&client.engine);
    // While the walk is between two slices, another takes what it would have found.
    after(&store, 1, move || {
        other.run(doc! { "delete": "c", "deletes": [{ "q": { "_id": 0 }, "limit": 1 }] });
    });
    let pop = doc! { "findAndModify": "c", "query": {}, "sort": { "n": 1 }, "remove": true };
    let reply = client.run(pop.clone());
    assert_eq!(reply.get_document("value").unwrap().get_i32("n").unwrap(), 1, "{reply}");
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let (client, pop) = (Client::of(&client.engine), pop.clone());
            std::thread::spawn(move || {
                let take = || client.run(pop.clone()).get_document("value").unwrap().get_i32("n");
                (0..20).map(|_| take().unwrap()).collect::<Vec<_>>()
            })
        })
        .collect();
    let mut taken: Vec<i32> = threads.into_iter().flat_map(|one| one.join().unwrap()).collect();
    taken.sort_unstable();
    assert_eq!(taken, (2..82).collect::<Vec<_>>());
}

fn locked() -> Client {
    let options = EngineOptions { authentication: true, ..EngineOptions::default() };
    let client = Client::over(Arc::new(Memory::default()), &options);
    let mut first = local();
    assert_eq!(code(&client.run_in(&mut first, user("ann"))), 0);
    client
}

fn local() -> Session {
    Session { peer: "127.0.0.1:5".to_owned(), ..Session::default() }
}

fn user(name: &str) -> Document {
    doc! { "createUser": name, "pwd": "secret", "roles": [], "$db": "admin" }
}

fn logged_in(engine: &Engine, name: &str) -> Session {
    let stored = users::find(engine, name).unwrap().unwrap();
    Session { user: Some(name.to_owned()), user_mark: stored.get("userId").cloned(), ..local() }
}

#[test]
fn a_user_that_was_dropped_is_no_user_on_open_connections() {
    let client = locked();
    let (mut ann, mut eve) = (logged_in(&client.engine, "ann"), local());
    assert_eq!(code(&client.run_in(&mut eve, user("eve"))), 13);
    assert_eq!(code(&client.run_in(&mut ann, user("eve"))), 0);
    let mut eve = logged_in(&client.engine, "eve");
    assert_eq!(code(&client.run_in(&mut eve, doc! { "count": "c" })), 0);
    client.run_in(&mut ann, doc! { "dropUser": "eve", "$db": "admin" });
    assert_eq!(code(&client.run_in(&mut eve, doc! { "count": "c" })), 13);
    // Another of the same name is another.
    let mut eve = Session { user: Some("eve".to_owned()), ..local() };
    client.run_in(&mut ann, user("eve"));
    client.run_in(&mut ann, user("tom"));
    client.run_in(&mut ann, doc! { "dropUser": "tom", "$db": "admin" });
    assert_eq!(code(&client.run_in(&mut eve, doc! { "count": "c" })), 13);
    assert_eq!(code(&client.run_in(&mut ann, doc! { "count": "c" })), 0);
}

#[test]
fn a_stranger_ends_no_sessions_and_a_user_only_its_own() {
    let client = locked();
    let mut ann = logged_in(&client.engine, "ann");
    let documents: Vec<Document> = (0..10).map(|n| doc! { "_id": n }).collect();
    client.run_in(&mut ann, doc! { "insert": "c", "documents": documents });
    client.run_in(&mut ann, user("eve"));
    let mut eve = logged_in(&client.engine, "eve");
    let find = doc! { "find": "c", "batchSize": 1, "lsid": session_of(3, 16) };
    let reply = client.run_in(&mut ann, find);
    let id = reply.get_document("cursor").unwrap().get_i64("id").unwrap();
    let end = doc! { "endSessions": [session_of(3, 16)], "$db": "admin" };
    assert_eq!(code(&client.run_in(&mut local(), end.clone())), 13);
    assert_eq!(code(&client.run_in(&mut eve, end.clone())), 0);
    let more = doc! { "getMore": id, "collection": "c", "batchSize": 1, "lsid": session_of(3, 16) };
    assert_eq!(code(&client.run_in(&mut ann, more.clone())), 0);
    client.run_in(&mut ann, end);
    assert_eq!(code(&client.run_in(&mut ann, more)), 43);
}

#[test]
fn a_query_that_would_keep_too_much_is_refused_and_keeps_nothing() {
    let options = EngineOptions { memory_bytes: 1 << 20, ..EngineOptions::default() };
    let client = Client::over(Arc::new(Memory::default()), &options);
    let text = "x".repeat(10_000);
    let documents: Vec<Document> =
        (0..300).map(|n| doc! { "_id": n, "t": text.clone(), "k": 1 }).collect();
    client.run(doc! { "insert": "c", "documents": documents });
    let stage = |stage: Document| doc! { "aggregate": "c", "pipeline": [stage], "cursor": {} };
    for command in [
        doc! { "find": "c", "sort": { "t": 1 } },
        stage(doc! { "$sort": { "t": 1 } }),
        stage(doc! { "$group": { "_id": 1, "all": { "$push": "$t" } } }),
        // Of one value in each document: what is kept is small, what is gathered of it is not.
        doc! { "aggregate": "c", "pipeline": [
            { "$project": { "_id": 1 } },
            { "$bucketAuto": { "groupBy": "$_id", "buckets": 1, "output": { "all": { "$push": { "$range": [0, 500] } } } } },
        ], "cursor": {} },
        stage(
            doc! { "$lookup": { "from": "c", "localField": "k", "foreignField": "k", "as": "all" } },
        ),
        doc! { "find": "c", "batchSize": 1, "filter": { "t": { "$gte": "" } } },
    ] {
        let reply = client.run(command.clone());
        let whole = command.get_i32("batchSize").is_err();
        assert_eq!(code(&reply), if whole { 146 } else { 0 }, "{command} {}", reply.len());
        assert!(client.engine.memory.used() < 1 << 20);
    }
    assert_eq!(code(&client.run(stage(doc! { "$sort": { "k": 1 } }))), 146);
    assert_eq!(code(&client.run(doc! { "find": "c", "sort": { "_id": -1 } })), 0);
    let none: Vec<Bson> = Vec::new();
    client.run(doc! { "killCursors": "c", "cursors": none });
}

#[test]
fn what_a_pipeline_read_and_did_not_take_yet_is_counted() {
    let (store, client) = hooked();
    let text = "x".repeat(10_000);
    let documents: Vec<Document> = (0..100).map(|n| doc! { "_id": n, "t": text.clone() }).collect();
    client.run(doc! { "insert": "c", "documents": documents });
    let (seen, memory) = (Arc::<AtomicUsize>::default(), Arc::clone(&client.engine.memory));
    let noted = Arc::clone(&seen);
    // The first lock reads, the second is the first document's lookup.
    after(&store, 1, move || noted.store(memory.used(), Ordering::Relaxed));
    let lookup = doc! { "$lookup": { "from": "c", "localField": "_id", "foreignField": "_id", "as": "all" } };
    let pipeline = vec![lookup, doc! { "$count": "n" }];
    let reply = client.run(doc! { "aggregate": "c", "pipeline": pipeline, "cursor": {} });
    assert_eq!(code(&reply), 0, "{reply}");
    let seen = seen.load(Ordering::Relaxed);
    assert!(seen > 99 * 10_000, "{seen} bytes are counted while a hundred documents wait");
    assert_eq!(client.engine.memory.used(), 0);
}
