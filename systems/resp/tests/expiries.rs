//! EXPIRE, PERSIST and GETEX of large values: what they write, and what other commands make of it.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::sync::Arc;

use beeline_env::ManualClock;
use common::Node;

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(1_000_000))
}

#[test]
fn a_changed_expiry_writes_a_few_bytes_and_every_command_knows_it() {
    let mut node = Node::with_clock(2, clock());
    let mut session = node.session();
    let value = "v".repeat(10_000);
    node.text(&mut session, &format!("SET k {value}"));
    for (request, reply, most) in [
        ("EXPIRE k 100", ":1\r\n", 80),
        ("TTL k", ":100\r\n", 0),
        ("EXPIRE k 50 GT", ":0\r\n", 0),
        ("PEXPIRE k 200000 GT", ":1\r\n", 80),
        ("TTL k", ":200\r\n", 0),
        ("PERSIST k", ":1\r\n", 80),
        ("PERSIST k", ":0\r\n", 0),
        ("TTL k", ":-1\r\n", 0),
        ("EXPIREAT k 2000", ":1\r\n", 80),
        ("EXPIRETIME k", ":2000\r\n", 0),
        ("STRLEN k", ":10000\r\n", 0),
        // What stores the value anew takes the expiry along.
        ("APPEND k v", ":10001\r\n", 20_000),
        ("EXPIRETIME k", ":2000\r\n", 0),
        ("EXPIREAT k 3000", ":1\r\n", 80),
        ("RENAME k other", "+OK\r\n", 20_000),
        ("EXPIRETIME other", ":3000\r\n", 0),
        ("EXPIREAT other 4000", ":1\r\n", 80),
        ("COPY other k", ":1\r\n", 20_000),
        ("EXPIRETIME k", ":4000\r\n", 0),
        // A value stored without one has none.
        ("PERSIST k", ":1\r\n", 80),
        ("EXPIRE k 10", ":1\r\n", 80),
        ("SET k short", "+OK\r\n", 80),
        ("TTL k", ":-1\r\n", 0),
        ("EXPIRE other -1", ":1\r\n", 80),
        ("EXISTS other", ":0\r\n", 0),
    ] {
        let before = node.store.stats().total.bytes_stored;
        assert_eq!(node.text(&mut session, request), reply, "{request}");
        let stored = node.store.stats().total.bytes_stored - before;
        assert!(stored <= most, "{request}: {stored} bytes");
    }
    node.text(&mut session, &format!("SET k {value}"));
    let said = node.text(&mut session, "GETEX k EX 30");
    assert!(said.len() > 10_000);
    assert_eq!(node.text(&mut session, "TTL k"), ":30\r\n");
    let findings = beeline_kv::audit(&node.store, &node.shards);
    assert!(findings.is_empty(), "{findings:#?}");
}

#[test]
fn a_transaction_that_watches_a_large_value_sees_its_expiry_change() {
    let mut node = Node::with_clock(2, clock());
    let (mut one, mut other) = (node.session(), node.session());
    node.text(&mut one, &format!("SET k {}", "v".repeat(5000)));
    for (change, seen) in [("EXPIRE k 100", true), ("EXPIRE k 50 GT", false), ("PERSIST k", true)] {
        node.text(&mut one, "WATCH k");
        node.text(&mut other, change);
        node.text(&mut one, "MULTI");
        node.text(&mut one, "STRLEN k");
        let said = node.text(&mut one, "EXEC");
        assert_eq!(said, if seen { "*-1\r\n" } else { "*1\r\n:5000\r\n" }, "{change}");
    }
    // Also of a value that the same transaction stores.
    for request in ["MULTI", &format!("SET k {}", "w".repeat(6000)), "EXPIRE k 70", "TTL k"] {
        node.text(&mut one, request);
    }
    assert_eq!(node.text(&mut one, "EXEC"), "*3\r\n+OK\r\n:1\r\n:70\r\n");
}

#[test]
fn a_changed_expiry_is_there_after_a_restart_and_ends_the_key_in_time() {
    let clock = clock();
    let pool = beeline_pmem::PoolOptions::volatile(1 << 20, 64 << 20);
    let pool = beeline_pmem::Pool::dram(&pool).unwrap();
    for (turn, shards) in [1, 3, 2].into_iter().enumerate() {
        let mut node = Node::on_pool(pool.clone(), shards, Arc::clone(&clock) as _);
        let mut session = node.session();
        for key in 0..20 {
            let (kept, at) = (format!("kept{key}"), 5000 + 100 * turn + key);
            if turn > 0 {
                let said = node.text(&mut session, &format!("EXPIRETIME {kept}"));
                assert_eq!(said, format!(":{}\r\n", at - 100));
            } else {
                node.text(&mut session, &format!("SET {kept} {}", "v".repeat(3000)));
                node.text(&mut session, &format!("SET ends{key} {} EX 9000", "v".repeat(3000)));
                node.text(&mut session, &format!("PEXPIRE ends{key} 700"));
            }
            assert_eq!(node.text(&mut session, &format!("EXPIREAT {kept} {at}")), ":1\r\n");
            let there = if turn == 0 { ":1\r\n" } else { ":0\r\n" };
            assert_eq!(node.text(&mut session, &format!("EXISTS ends{key}")), there);
        }
        clock.advance(std::time::Duration::from_secs(1));
        for shard in &node.shards {
            let mut shard = shard.lock().unwrap();
            while shard.maintain(1 << 20).unwrap().did_work {}
        }
        assert_eq!(node.text(&mut session, "DBSIZE"), ":20\r\n");
    }
}
