//! The rows of members without threads: what a primary writes, read in pieces, makes the same rows elsewhere.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use beeline_documents::commands::Session;
use beeline_documents::layout::kind;
use beeline_documents::log;
use beeline_documents::replica::entry::{Effect, Entry, Spot};
use beeline_documents::replica::register::Place;
use beeline_documents::replica::store::{Gate, Mark, ReplicaStore, is_own};
use beeline_documents::store::{Backing, Change, Memory, Store, Stretch, Visitor, with_row};
use beeline_documents::{Engine, EngineOptions};
use beeline_documents_query::error::{Code, Result, fail};
use bson::{Document, doc};
use common::Client;

type Rows = BTreeMap<(Vec<u8>, Vec<u8>), Vec<u8>>;

struct Node {
    memory: Arc<Memory>,
    store: Arc<ReplicaStore>,
}

impl Node {
    fn new() -> Self {
        let memory = Arc::<Memory>::default();
        Self::over(&memory)
    }

    fn over(memory: &Arc<Memory>) -> Self {
        let rows: Arc<dyn Store> = Arc::<Memory>::clone(memory);
        let store = Arc::new(ReplicaStore::open(rows, Arc::new(Gate::default())).unwrap());
        Self { memory: Arc::clone(memory), store }
    }

    fn lead(&self, term: u64) {
        self.store.gate.fence(term);
        self.store.lead(term, u64::MAX).unwrap();
    }

    fn client(&self) -> Client {
        let rows: Arc<dyn Store> = Arc::<ReplicaStore>::clone(&self.store);
        Client::of(&Engine::open(rows, &EngineOptions::default()).unwrap())
    }

    /// All that every member has.
    fn rows(&self) -> Rows {
        let mut rows = Rows::new();
        for name in self.store.rows() {
            with_row(&*self.memory, &name, |row| {
                row.range(&Stretch::of_prefix(&[]), false, &mut |key, value| {
                    if !is_own(&name, key) {
                        rows.insert((name.clone(), key.to_vec()), value.to_vec());
                    }
                    ControlFlow::Continue(())
                })
            })
            .unwrap();
        }
        rows
    }

    /// Takes everything behind its own end from another, so many bytes at a time; the number of fetches.
    fn fetch(&self, from: &Self, most: usize) -> usize {
        let (mut after, mut fetches) = (self.store.last().place.time, 0);
        loop {
            let fetched = from.store.read(after, most).unwrap().expect("nothing was deleted");
            fetches += 1;
            let entries: Vec<Entry> =
                fetched.entries.iter().map(|bytes| Entry::decode(bytes).unwrap()).collect();
            assert!(entries.windows(2).all(|two| two[0].spot.place < two[1].spot.place));
            self.store.follow(&entries, &mut |_| {}).unwrap();
            if entries.is_empty() && fetched.upto <= after {
                return fetches;
            }
            after = fetched.upto;
        }
    }
}

fn fine(reply: &Document) {
    assert_eq!(reply.get_f64("ok").unwrap(), 1.0, "{reply}");
    assert!(!reply.contains_key("writeErrors"), "{reply}");
}

/// Writes of all kinds, over two databases.
fn work(client: &Client, round: i32) {
    fine(
        &client
            .run(doc! { "createIndexes": "c", "indexes": [{ "key": { "n": 1 }, "name": "n_1" }] }),
    );
    for n in 0..40 {
        let id = round * 1000 + n;
        fine(
            &client
                .run(doc! { "insert": "c", "documents": [{ "_id": id, "n": n, "l": [n, n + 1] }] }),
        );
        fine(&client.run(doc! { "insert": "other", "$db": "e", "documents": [{ "_id": id, "text": "x".repeat(200) }] }));
    }
    fine(&client.run(doc! { "update": "c", "updates": [{ "q": { "n": { "$gt": 20 } }, "u": { "$inc": { "n": 100 } }, "multi": true }] }));
    fine(
        &client
            .run(doc! { "delete": "c", "deletes": [{ "q": { "n": { "$lt": 5 } }, "limit": 0 }] }),
    );
    fine(
        &client.run(
            doc! { "create": format!("capped{round}"), "capped": true, "size": 4096, "max": 3 },
        ),
    );
    for n in 0..5 {
        fine(&client.run(doc! { "insert": format!("capped{round}"), "documents": [{ "_id": n }] }));
    }
}

#[test]
fn what_a_primary_wrote_is_the_same_elsewhere_however_small_the_pieces() {
    let primary = Node::new();
    primary.lead(1);
    work(&primary.client(), 1);
    let mut fetches = Vec::new();
    for most in [1, 600, 64 << 10, 64 << 20] {
        let secondary = Node::new();
        fetches.push(secondary.fetch(&primary, most));
        assert_eq!(secondary.rows(), primary.rows(), "{most} bytes at a time");
        assert_eq!(secondary.store.last(), primary.store.last());
        // What it applied it has again after a restart, and it can be copied on.
        let again = Node::over(&secondary.memory);
        assert_eq!(again.store.last(), primary.store.last());
        let third = Node::new();
        third.fetch(&again, 4096);
        assert_eq!(third.rows(), primary.rows());
    }
    assert!(fetches[0] > 90 && fetches[3] <= 3, "{fetches:?}");
}

#[test]
fn entries_applied_twice_change_nothing() {
    let primary = Node::new();
    primary.lead(1);
    work(&primary.client(), 1);
    let secondary = Node::new();
    secondary.fetch(&primary, 1 << 20);
    let before = secondary.rows();
    let all = primary.store.entries_behind(0).unwrap();
    assert!(all.len() > 90);
    for suffix in [0, all.len() / 2, all.len() - 1] {
        secondary.store.follow(&all[suffix..], &mut |_| {}).unwrap();
        assert_eq!(secondary.rows(), before);
    }
}

#[test]
fn a_member_that_does_not_lead_changes_nothing_and_times_grow_over_terms() {
    let (first, second) = (Node::new(), Node::new());
    let client = first.client();
    let insert = |n: i32| doc! { "insert": "c", "documents": [{ "_id": n }] };
    assert_eq!(client.run(insert(1)).get_i32("code").unwrap(), 10107);
    assert!(first.rows().is_empty());
    first.lead(1);
    fine(&client.run(insert(1)));
    // A newer term shuts the gate at the moment it is known.
    first.store.gate.fence(2);
    assert_eq!(client.run(insert(2)).get_i32("code").unwrap(), 10107);
    second.fetch(&first, 1 << 20);
    let before = second.store.last().place;
    second.lead(2);
    let after = second.store.last().place;
    assert!(after > before && after.time > before.time && after.term == 2);
    // What an elected member wrote is its own after a restart as well.
    fine(&second.client().run(insert(3)));
    let again = Node::over(&second.memory);
    assert_eq!(again.store.last(), second.store.last());
}

#[test]
fn a_lease_that_ended_shuts_the_gate() {
    let node = Node::new();
    node.store.gate.fence(1);
    node.store.gate.lead(1);
    assert_eq!(node.store.gate.term(), None, "no lease was given");
    node.store.gate.extend(u64::MAX);
    assert_eq!(node.store.gate.term(), Some(1));
}

#[test]
fn members_find_where_their_logs_part() {
    let (old, new) = (Node::new(), Node::new());
    old.lead(1);
    let client = old.client();
    work(&client, 1);
    new.fetch(&old, 1 << 20);
    let shared = new.store.last();
    work(&client, 2);
    new.lead(2);
    work(&new.client(), 3);
    let spots = old.store.newest().unwrap();
    let found = new.store.find(&spots).unwrap().expect("they share a beginning");
    assert_eq!(spots[found], shared);
    let own = old.store.entries_behind(shared.place.time).unwrap();
    assert!(own.len() > 90 && own.iter().all(|entry| entry.spot.place.term == 1));
    assert_eq!(new.store.find(&[Spot::default()]).unwrap(), Some(0));
}

#[test]
fn a_log_that_was_shortened_says_so_and_keeps_what_may_be_taken_back() {
    let node = Node::new();
    node.lead(1);
    work(&node.client(), 1);
    let all = node.store.entries_behind(0).unwrap();
    let kept = all[all.len() / 2].spot.place.time;
    node.store.trim(0, kept).unwrap();
    assert!(node.store.read(0, 1 << 20).unwrap().is_none());
    let rest = node.store.read(kept, 64 << 20).unwrap().unwrap();
    assert_eq!(rest.entries.len(), all.len() - all.len() / 2 - 1);
}

#[test]
fn a_retried_statement_does_nothing_again_at_the_next_primary() {
    let (first, second) = (Node::new(), Node::new());
    first.lead(1);
    let session = bson::Binary { subtype: bson::spec::BinarySubtype::Uuid, bytes: vec![7; 16] };
    let step = doc! {
        "update": "c", "updates": [{ "q": { "_id": 1 }, "u": { "$inc": { "n": 1 } }, "upsert": true }],
        "lsid": { "id": session }, "txnNumber": 5_i64,
    };
    fine(&first.client().run_in(&mut Session::default(), step.clone()));
    second.fetch(&first, 1 << 20);
    second.lead(2);
    let client = second.client();
    let again = client.run_in(&mut Session::default(), step);
    assert_eq!(again.get_array("retriedStmtIds").unwrap().len(), 1, "{again}");
    assert_eq!(client.find("c", &doc! {}, &doc! {}), [doc! { "_id": 1, "n": 1 }]);
}

/// Writes of a transaction: several events in one batch.
fn transaction(client: &Client, first: i32) {
    let session = bson::Binary { subtype: bson::spec::BinarySubtype::Uuid, bytes: vec![3; 16] };
    let of = |mut body: Document| {
        body.extend(doc! { "lsid": { "id": session.clone() }, "txnNumber": i64::from(first), "autocommit": false });
        body
    };
    for n in first..first + 5 {
        let mut insert = of(doc! { "insert": "c", "documents": [{ "_id": n }] });
        if n == first {
            insert.insert("startTransaction", true);
        }
        fine(&client.run_in(&mut Session::default(), insert));
    }
    fine(
        &client
            .run_in(&mut Session::default(), of(doc! { "commitTransaction": 1, "$db": "admin" })),
    );
}

/// The times of an entry's events.
fn events(entry: &Entry) -> Vec<u64> {
    let told = |(key, effect): &(Vec<u8>, Effect)| {
        (key.first() == Some(&kind::LOG) && *effect != Effect::Delete).then(|| log::time_in(key))
    };
    entry.effects.iter().filter_map(told).collect()
}

#[test]
fn who_has_all_entries_up_to_a_time_has_all_events_up_to_it() {
    let (first, second) = (Node::new(), Node::new());
    first.lead(1);
    let client = first.client();
    work(&client, 1);
    transaction(&client, 50_000);
    let all = first.store.entries_behind(0).unwrap();
    let with_events: Vec<&Entry> = all.iter().filter(|entry| !events(entry).is_empty()).collect();
    assert!(with_events.len() > 90);
    for entry in with_events {
        let least = events(entry).into_iter().min();
        assert_eq!(least, Some(entry.spot.place.time), "{:?}", entry.spot);
    }
    let newest = all.iter().flat_map(events).max().unwrap();
    assert!(newest > all.last().unwrap().spot.place.time, "no batch had several events");
    assert!(first.store.reached() >= newest, "the primary's own streams lag");
    // The next primary does not give out the times of a batch's later events again.
    second.fetch(&first, 1 << 20);
    second.lead(2);
    assert!(second.store.last().place.time > newest);
}

/// A store whose process ends after some batches.
#[derive(Debug)]
struct Mortal {
    rows: Arc<Memory>,
    left: AtomicUsize,
}

struct MortalRow<'m>(&'m mut dyn Backing, &'m AtomicUsize);

impl Backing for MortalRow<'_> {
    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool> {
        self.0.get(key, out)
    }

    fn range(&mut self, stretch: &Stretch, backward: bool, visit: &mut Visitor<'_>) -> Result<()> {
        self.0.range(stretch, backward, visit)
    }

    fn apply(&mut self, changes: &[Change]) -> Result<Option<usize>> {
        if self
            .1
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
            .is_err()
        {
            return fail(Code::InternalError, "the process was killed");
        }
        self.0.apply(changes)
    }
}

impl Store for Mortal {
    fn with(&self, row: &[u8], work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>) -> Result<()> {
        self.rows.with(row, &mut |inner| work(&mut MortalRow(inner, &self.left)))
    }

    fn now_ms(&self) -> u64 {
        self.rows.now_ms()
    }

    fn space(&self) -> (u64, u64) {
        self.rows.space()
    }
}

#[test]
fn a_clear_that_is_cut_short_anywhere_begins_anew_and_leaves_nothing() {
    let primary = Node::new();
    primary.lead(1);
    work(&primary.client(), 1);
    let mut cut = 0;
    for left in 0.. {
        let node = Node::new();
        node.fetch(&primary, 1 << 20);
        let names = node.store.rows();
        assert_eq!(names.len(), 3, "{names:?}");
        let rows = Mortal { rows: Arc::clone(&node.memory), left: AtomicUsize::new(left) };
        let mortal = ReplicaStore::open(Arc::new(rows), Arc::new(Gate::default())).unwrap();
        let whole = mortal.clear().is_ok();
        cut += u32::from(!whole);
        let again = Node::over(&node.memory);
        assert_eq!(again.store.mark().copying, left > 0);
        again.store.clear().unwrap();
        for name in &names {
            let mut keys = Vec::new();
            with_row(&*node.memory, name, |row| {
                row.range(&Stretch::of_prefix(&[]), false, &mut |key, _| {
                    keys.push(key.to_vec());
                    ControlFlow::Continue(())
                })
            })
            .unwrap();
            keys.retain(|key| key.first() != Some(&kind::OWN) && !key.ends_with(b"secret"));
            assert!(keys.is_empty(), "killed after {left} batches: {name:?} still has {keys:?}");
        }
        if whole {
            break;
        }
    }
    assert!(cut > 3, "{cut} places");
}

#[test]
fn an_entry_that_no_member_could_apply_is_refused_at_the_primary() {
    let node = Node::new();
    node.lead(1);
    let client = node.client();
    let insert = |n: i32, length: usize| doc! { "insert": "c", "documents": [{ "_id": n, "text": "x".repeat(length) }] };
    fine(&client.run(insert(1, 100)));
    node.store.limit_batches(20_000);
    fine(&client.run(insert(2, 3_000)));
    let before = node.store.last();
    let refused = client.run(insert(3, 8_000));
    let error =
        refused.get_array("writeErrors").map_or(&refused, |all| all[0].as_document().unwrap());
    assert_eq!(error.get_i32("code").unwrap(), Code::TransactionTooLarge as i32, "{refused}");
    assert_eq!(node.store.last(), before);
    assert_eq!(client.find("c", &doc! {}, &doc! {}).len(), 2);
}

#[test]
fn the_newest_entry_stays_however_long_it_is() {
    let node = Node::new();
    node.lead(1);
    fine(
        &node
            .client()
            .run(doc! { "insert": "c", "documents": [{ "_id": 1, "text": "x".repeat(9000) }] }),
    );
    let last = node.store.last();
    node.store.trim(1000, last.place.time).unwrap();
    assert_eq!(Node::over(&node.memory).store.last(), last);
    assert_eq!(node.store.find(std::slice::from_ref(&last)).unwrap(), Some(0));
}

#[test]
fn a_member_on_its_way_to_a_floor_remembers_what_it_acknowledged() {
    let (primary, node) = (Node::new(), Node::new());
    primary.lead(1);
    work(&primary.client(), 1);
    let all = primary.store.entries_behind(0).unwrap();
    let (begin, rest) = all.split_at(all.len() / 2);
    node.store.follow(begin, &mut |_| {}).unwrap();
    let kept = Some(node.store.last().place);
    let floor = rest.last().map(|entry| entry.spot.clone());
    let mark = Mark { last: node.store.last(), floor, kept, ..Mark::default() };
    node.store.remember(mark).unwrap();
    node.store.follow(&rest[..3], &mut |_| {}).unwrap();
    let again = Node::over(&node.memory);
    assert_eq!(again.store.mark().kept, kept);
    assert!(Some(again.store.last().place) > kept);
    node.store.follow(&rest[3..], &mut |_| {}).unwrap();
    assert_eq!((node.store.mark().kept, node.store.mark().floor), (None::<Place>, None));
}

#[test]
fn a_fetch_over_many_rows_is_cut_where_all_of_them_are_whole() {
    let primary = Node::new();
    primary.lead(1);
    let client = primary.client();
    for n in 0..40 {
        let row = format!("d{}", n % 8);
        fine(&client.run(doc! { "insert": "c", "$db": row, "documents": [{ "_id": n, "text": "x".repeat(1000) }] }));
    }
    let secondary = Node::new();
    let fetches = secondary.fetch(&primary, 5_000);
    assert!(fetches > 10, "{fetches}");
    assert_eq!(secondary.rows(), primary.rows());
}
