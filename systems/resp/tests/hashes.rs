//! Hashes: what random commands leave behind, against a map; and what ended hashes leave behind.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use beeline_env::ManualClock;
use beeline_resp::Session;
use common::Node;
use common::redis::elements;

type Hashes = BTreeMap<String, BTreeMap<String, String>>;

fn maintain(node: &Node) {
    for shard in &node.shards {
        let mut shard = shard.lock().unwrap();
        while shard.maintain(1 << 20).unwrap().did_work {}
    }
}

/// Entries with a value in the store: heads and fields.
fn entries(node: &Node) -> u64 {
    node.store.stats().total.keys
}

fn flat(node: &mut Node, session: &mut Session, request: &str) -> Vec<String> {
    let words: Vec<&[u8]> = request.split(' ').map(str::as_bytes).collect();
    let reply = node.reply(session, &words);
    let list = elements(&reply).into_iter();
    // Of a bulk string, what stands behind its length.
    let text = |word: &[u8]| String::from_utf8_lossy(word).split("\r\n").nth(1).map(str::to_owned);
    list.filter_map(text).collect()
}

#[test]
fn random_commands_on_hashes_agree_with_a_map() {
    for shards in [1, 3] {
        let clock = Arc::new(ManualClock::new(1_000_000));
        let mut node = Node::with_clock(shards, clock);
        let mut session = node.session();
        let mut model = Hashes::new();
        let mut random = 88_172_645_463_325_252_u64;
        for turn in 0..6000_u32 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let key = format!("key{}", random % 5);
            let other = format!("key{}", (random >> 8) % 5);
            let field = format!("field{}", (random >> 16) % 40);
            let said = match (random >> 32) % 20 {
                0..10 => {
                    let new = model.entry(key.clone()).or_default();
                    let new = new.insert(field.clone(), turn.to_string()).is_none();
                    let said = node.text(&mut session, &format!("HSET {key} {field} {turn}"));
                    assert_eq!(said, format!(":{}\r\n", u8::from(new)));
                    continue;
                }
                10..14 => {
                    let known = model.get_mut(&key);
                    let gone = known.is_some_and(|known| known.remove(&field).is_some());
                    model.retain(|_, fields| !fields.is_empty());
                    (node.text(&mut session, &format!("HDEL {key} {field}")), u8::from(gone))
                }
                14 => {
                    let gone = model.remove(&key).is_some();
                    (node.text(&mut session, &format!("DEL {key}")), u8::from(gone))
                }
                15 if model.contains_key(&key) && key != other => {
                    let moved = model.remove(&key).unwrap();
                    model.insert(other.clone(), moved);
                    let said = node.text(&mut session, &format!("RENAME {key} {other}"));
                    assert_eq!(said, "+OK\r\n");
                    continue;
                }
                16 if model.contains_key(&key) && key != other => {
                    let copy = model[&key].clone();
                    model.insert(other.clone(), copy);
                    (node.text(&mut session, &format!("COPY {key} {other} REPLACE")), 1)
                }
                17 => {
                    maintain(&node);
                    continue;
                }
                _ => {
                    let length = model.get(&key).map_or(0, BTreeMap::len);
                    (node.text(&mut session, &format!("HLEN {key}")), length as u8)
                }
            };
            assert_eq!(said.0, format!(":{}\r\n", said.1), "turn {turn}");
        }
        for (key, fields) in &model {
            let listed = flat(&mut node, &mut session, &format!("HGETALL {key}"));
            let mut seen = BTreeMap::new();
            for pair in listed.chunks(2) {
                seen.insert(pair[0].clone(), pair[1].clone());
            }
            assert_eq!(&seen, fields);
        }
        maintain(&node);
        let expected: usize = model.values().map(|fields| 1 + fields.len()).sum();
        assert_eq!(entries(&node), expected as u64, "nothing of ended hashes is left");
        let findings = beeline_kv::audit(&node.store, &node.shards);
        assert!(findings.is_empty(), "{findings:#?}");
    }
}

#[test]
fn whatever_ends_a_hash_ends_its_fields_too() {
    for end in ["DEL h", "SET h text", "EXPIRE h 1", "RENAME other h", "FLUSHDB", "UNLINK h"] {
        let clock = Arc::new(ManualClock::new(1_000_000));
        let mut node = Node::with_clock(2, Arc::clone(&clock) as _);
        let mut session = node.session();
        for n in 0..1000 {
            node.text(&mut session, &format!("HSET h field{n} {n}"));
        }
        node.text(&mut session, "SET other text");
        assert_eq!(node.text(&mut session, "TYPE h"), "+hash\r\n");
        assert_eq!(node.text(&mut session, "GET h"), common_wrong_type());
        node.text(&mut session, end);
        clock.advance(std::time::Duration::from_secs(5));
        assert_eq!(node.text(&mut session, "EXISTS h").len(), 4);
        // A new hash of the name begins empty, before and after the rest is collected.
        node.text(&mut session, "DEL h");
        node.text(&mut session, "HSET h new 1");
        for _ in 0..2 {
            assert_eq!(flat(&mut node, &mut session, "HGETALL h"), ["new", "1"]);
            maintain(&node);
        }
        node.text(&mut session, "DEL h other");
        maintain(&node);
        assert_eq!(entries(&node), 0, "{end}");
    }
}

fn common_wrong_type() -> String {
    "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n".to_owned()
}

#[test]
fn a_scan_meets_every_field_that_stays_once() {
    let mut node = Node::new(1);
    let mut session = node.session();
    for n in 0..2000 {
        node.text(&mut session, &format!("HSET h field{n} {n}"));
    }
    let (mut cursor, mut met, mut turn) = ("0".to_owned(), Vec::new(), 0);
    loop {
        let words = ["HSCAN", "h", &cursor, "COUNT", "17"].map(str::as_bytes);
        let reply = node.reply(&mut session, &words);
        let text = String::from_utf8(reply).unwrap();
        let mut lines = text.split("\r\n").filter(|line| !line.starts_with(['*', '$']));
        cursor = lines.next().unwrap().to_owned();
        met.extend(lines.step_by(2).filter(|line| !line.is_empty()).map(str::to_owned));
        turn += 1;
        node.text(&mut session, &format!("HSET h extra{turn} x"));
        node.text(&mut session, &format!("HDEL h extra{}", turn / 2));
        if cursor == "0" {
            break;
        }
    }
    let stayed: Vec<_> = met.iter().filter(|field| field.starts_with("field")).collect();
    assert_eq!(stayed.len(), 2000);
    assert_eq!(stayed.iter().collect::<BTreeSet<_>>().len(), 2000);
    for (request, count) in
        [("HRANDFIELD h 50", 50), ("HRANDFIELD h 99999", 2000), ("HRANDFIELD h -70", 70)]
    {
        let chosen = flat(&mut node, &mut session, request);
        assert!(chosen.len() >= count, "{request}: {}", chosen.len());
        if !request.contains('-') {
            assert_eq!(chosen.iter().collect::<BTreeSet<_>>().len(), chosen.len());
        }
    }
}

#[test]
fn a_transaction_that_watches_a_hash_sees_its_fields_change() {
    let mut node = Node::new(2);
    let (mut one, mut other) = (node.session(), node.session());
    node.text(&mut one, "HSET h f 1");
    node.text(&mut one, "WATCH h");
    node.text(&mut other, "HSET h f 2");
    node.text(&mut one, "MULTI");
    node.text(&mut one, "HINCRBY h f 5");
    assert_eq!(node.text(&mut one, "EXEC"), "*-1\r\n");
    node.text(&mut one, "MULTI");
    node.text(&mut one, "HINCRBY h f 5");
    node.text(&mut one, "HSET h g x");
    assert_eq!(node.text(&mut one, "EXEC"), "*2\r\n:7\r\n:1\r\n");
    assert_eq!(node.text(&mut one, "HLEN h"), ":2\r\n");
    // Every kind of change is seen, also of a field that is one entry; another hash's is not.
    for (change, seen) in [
        ("HSET h new 1", true),
        ("HSET h new 1", true),
        ("HDEL h new", true),
        ("HINCRBY h f 1", true),
        ("HSETNX h f 1", false),
        ("HDEL h nothing", false),
        ("EXPIRE h 100", true),
        ("HSET other f 1", false),
    ] {
        node.text(&mut one, "WATCH h");
        node.text(&mut other, change);
        node.text(&mut one, "MULTI");
        node.text(&mut one, "HLEN h");
        let said = node.text(&mut one, "EXEC");
        assert_eq!(said, if seen { "*-1\r\n" } else { "*1\r\n:2\r\n" }, "{change}");
    }
}

#[test]
fn a_field_is_one_entry_whatever_the_length_of_its_hash() {
    let mut node = Node::new(2);
    let mut session = node.session();
    for n in 0..5000 {
        node.text(&mut session, &format!("HSET long field{n} {n}"));
    }
    node.text(&mut session, "HSET short field0 0");
    for hash in ["long", "short"] {
        for (request, entries) in [
            ("HSET @ field0 other", 1),
            ("HSET @ new value", 1),
            ("HINCRBY @ number 5", 1),
            ("HSETNX @ field0 value", 0),
            ("HSET @ field0 1 field1 2", 2),
            ("HDEL @ new", 1),
            ("HDEL @ new", 0),
        ] {
            let before = node.store.stats().total.entries_stored;
            node.text(&mut session, &request.replace('@', hash));
            let stored = node.store.stats().total.entries_stored - before;
            assert_eq!(stored, entries, "{request}, {hash}");
        }
    }
    assert_eq!(node.text(&mut session, "HLEN long"), ":5001\r\n");
    assert_eq!(node.text(&mut session, "HLEN short"), ":3\r\n");
}

#[test]
fn lengths_are_right_after_a_restart_with_other_shards() {
    let clock = || Arc::new(ManualClock::new(1_000_000));
    let pool = beeline_pmem::PoolOptions::volatile(1 << 20, 64 << 20);
    let pool = beeline_pmem::Pool::dram(&pool).unwrap();
    let mut lengths = [0_u32; 7];
    for shards in [1, 3, 2] {
        let mut node = Node::on_pool(pool.clone(), shards, clock());
        let mut session = node.session();
        for (hash, length) in lengths.iter_mut().enumerate() {
            assert_eq!(node.text(&mut session, &format!("HLEN h{hash}")), format!(":{length}\r\n"));
            for n in 0..20 * hash {
                node.text(&mut session, &format!("HSET h{hash} {shards}-{n} x"));
                *length += 1;
            }
            for n in 0..5 * hash {
                node.text(&mut session, &format!("HDEL h{hash} {shards}-{n}"));
                *length -= 1;
            }
            assert_eq!(node.text(&mut session, &format!("HLEN h{hash}")), format!(":{length}\r\n"));
        }
    }
}

#[test]
fn fields_of_a_hash_that_ended_before_a_restart_are_collected_after_it() {
    let clock = || Arc::new(ManualClock::new(1_000_000));
    let pool = beeline_pmem::PoolOptions::volatile(1 << 20, 64 << 20);
    let pool = beeline_pmem::Pool::dram(&pool).unwrap();
    let mut node = Node::on_pool(pool.clone(), 2, clock());
    let mut session = node.session();
    for n in 0..500 {
        node.text(&mut session, &format!("HSET gone field{n} {n}"));
        node.text(&mut session, &format!("HSET kept field{n} {n}"));
    }
    node.text(&mut session, "DEL gone");
    drop(node);
    let mut node = Node::on_pool(pool, 3, clock());
    assert_eq!(entries(&node), 1001, "not collected yet");
    maintain(&node);
    assert_eq!(entries(&node), 501);
    assert_eq!(node.text(&mut session, "HLEN kept"), ":500\r\n");
    assert_eq!(flat(&mut node, &mut session, "HGETALL kept").len(), 1000);
}

#[test]
fn random_fields_are_different_ones_and_bounded() {
    let mut node = Node::new(1);
    let mut session = node.session();
    for n in 0..9000 {
        node.text(&mut session, &format!("HSET h field{n} {n}"));
    }
    // One by one, in one pass over a hash that has more, and all of it.
    for count in [1, 900, 1500, 4000, 8999, 9000, 100_000] {
        let request = format!("HRANDFIELD h {count} WITHVALUES");
        let chosen = flat(&mut node, &mut session, &request);
        assert_eq!(chosen.len(), 2 * count.min(9000));
        let mut names = BTreeSet::new();
        for pair in chosen.chunks(2) {
            assert_eq!(pair[0], format!("field{}", pair[1]));
            assert!(names.insert(pair[0].clone()), "{} twice", pair[0]);
        }
    }
    assert_eq!(flat(&mut node, &mut session, "HRANDFIELD h -20000").len(), 20_000);
    for count in ["-65537", "-4000000000", "-9223372036854775807"] {
        let said = node.text(&mut session, &format!("HRANDFIELD h {count}"));
        assert!(said.starts_with("-ERR value is out of range"), "{count}: {said}");
    }
    // A reply beyond its limit is not built to its end.
    let mut out = beeline_resp::Output::default();
    out.set_limit(10_000);
    let words = ["HRANDFIELD", "h", "-65000"].map(str::as_bytes);
    let _ = node.run(&mut session, &words, &mut out);
    assert!(out.is_over_limit() && out.len() < 200_000, "{} bytes", out.len());
}

#[test]
fn hashes_of_a_full_store_are_emptied_by_commands_and_by_transactions() {
    let mut node = Node::with_capacity(1, 1 << 20);
    let mut session = node.session();
    let value = "v".repeat(300);
    let mut stored = 0;
    while node.text(&mut session, &format!("HSET h field{stored} {value}")) == ":1\r\n" {
        stored += 1;
        assert!(stored < 10_000, "a MiB does not hold three");
    }
    assert!(stored > 500);
    for n in 0..stored {
        let request = format!("HDEL h field{n}");
        if n % 2 == 0 {
            assert_eq!(node.text(&mut session, &request), ":1\r\n", "{n} of {stored}");
        } else {
            node.text(&mut session, "MULTI");
            node.text(&mut session, &request);
            assert_eq!(node.text(&mut session, "EXEC"), "*1\r\n:1\r\n", "{n} of {stored}");
        }
        maintain(&node);
    }
    assert_eq!(entries(&node), 0);
}

#[test]
#[cfg(debug_assertions)] // other builds do not count
fn fields_of_a_hash_that_is_not_there_cost_nothing_however_long_its_key_is() {
    let mut node = Node::new(2);
    let mut session = node.session();
    let request = |command: &str, key: &str| format!("{command} {key}{}", " f".repeat(4000));
    for (command, key) in [("HMGET", "k".repeat(100_000)), ("HDEL", "k".repeat(100_000))] {
        let before = beeline_kv::keys_placed();
        let reply = node.text(&mut session, &request(command, &key));
        assert!(reply.starts_with("*4000\r\n$-1") || reply == ":0\r\n", "{}", &reply[..20]);
        let placed = beeline_kv::keys_placed() - before;
        assert!(placed <= 8, "{command}: the key was hashed {placed} times");
    }
    assert_eq!(node.text(&mut session, "HSET h f 1"), ":1\r\n");
    let before = beeline_kv::keys_placed();
    assert!(node.text(&mut session, &request("HMGET", "h")).starts_with("*4000\r\n$1\r\n1"));
    assert!(beeline_kv::keys_placed() - before > 4000, "what is counted");
}
