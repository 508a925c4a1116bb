//! The rows of members without threads: what a primary writes, read in pieces, makes the same rows elsewhere.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use beeline_documents::commands::Session;
use beeline_documents::replica::entry::{Entry, Spot};
use beeline_documents::replica::store::{Gate, ReplicaStore, is_own};
use beeline_documents::store::{Memory, Store, Stretch, with_row};
use beeline_documents::{Engine, EngineOptions};
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
