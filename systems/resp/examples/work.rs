//! The door's own time for a request, from its bytes to its reply: parser, look-ahead, command, store
//! and commit, without a socket and on one thread, beside any other command.
//! `cargo run --release -p beeline-resp --example work [COMMAND [KEYS [REQUESTS [DEPTH [BYTES]]]]]`,
//! where COMMAND is one of set, get, hset, hget and append.
//!
//! Instructions of a request: `valgrind --tool=callgrind --toggle-collect='*measured*'`.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "an example ends where something is not as it should be"
)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::sync::Arc;
use std::time::Instant;

use beeline_env::ManualClock;
use beeline_kv::Keyspace;
use beeline_resp::{After, Limits, Output, Plan, RequestParser};
use common::Node;

fn encode(words: &[&[u8]]) -> Vec<u8> {
    common::redis::encode(&words.iter().map(|word| word.to_vec()).collect::<Vec<_>>())
}

/// A request of the command, for the key or field with this number.
fn request(command: &str, number: u64, value: &[u8]) -> Vec<u8> {
    let (key, field) = (format!("key:{number:012}"), format!("field:{number:012}"));
    match command {
        "set" => encode(&[b"SET", key.as_bytes(), value]),
        "get" => encode(&[b"GET", key.as_bytes()]),
        "hget" => encode(&[b"HGET", b"hash-of-1000000", field.as_bytes()]),
        "append" => encode(&[b"APPEND", key.as_bytes(), b"0123456789abcdef"]),
        _ => encode(&[b"HSET", b"hash-of-1000000", field.as_bytes(), value]),
    }
}

/// Runs every batch as a node runs what one read of a socket brought.
fn run(node: &mut Node, batches: &[Vec<u8>]) {
    let mut session = node.session();
    let mut parser = RequestParser::new(Limits::default());
    let mut out = Output::default();
    let shard = node.shards[0].clone();
    let mut shard = shard.lock().unwrap();
    for batch in batches {
        parser.feed(batch).unwrap();
        out.truncate(0);
        let mut keyspace = Keyspace::single(&mut shard);
        let mut expected = 0;
        while parser.advance().unwrap() {
            if expected == 0 && parser.pending_bytes() > 0 {
                expected = keyspace.expect(0, parser.expected());
            }
            expected = expected.saturating_sub(1);
            let plan = Plan::new(&session, parser.current());
            let _route = plan.route(&session, &*node.store);
            let after =
                node.executor.execute(&mut session, plan, &mut keyspace, &mut out, &node.server);
            assert_eq!(after, After::Continue);
        }
        keyspace.commit().unwrap();
        assert!(!out.as_bytes().starts_with(b"-"), "{}", String::from_utf8_lossy(out.as_bytes()));
        while shard.maintain(64 << 10).unwrap().did_work {}
    }
}

/// A name for the part that a count of instructions is about.
#[inline(never)]
fn measured(node: &mut Node, batches: &[Vec<u8>]) {
    run(node, batches);
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, otherwise: u64| {
        words.get(at).map_or(otherwise, |word| word.replace('_', "").parse().unwrap())
    };
    let command = words.first().map_or("hset", String::as_str);
    let (keys, requests) = (number(1, 1_000_000), number(2, 1_000_000));
    let (depth, bytes) = (number(3, 16), number(4, 64));
    let value = vec![b'v'; bytes as usize];
    // The system's clock lies in a page of the kernel's, which callgrind does not show a program.
    let mut node = Node::with_clock(1, Arc::new(ManualClock::new(1_000_000)));
    let fill = if command.starts_with('h') { "hset" } else { "set" };
    for first in (0..keys).step_by(64) {
        let last = keys.min(first + 64);
        let batch = (first..last).flat_map(|number| request(fill, number, &value)).collect();
        run(&mut node, &[batch]);
    }
    let mut random = 0x5EED_u64;
    let mut next = || {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % keys
    };
    let batches: Vec<Vec<u8>> = (0..requests / depth)
        .map(|_| (0..depth).flat_map(|_| request(command, next(), &value)).collect())
        .collect();
    let begun = Instant::now();
    measured(&mut node, &batches);
    let each = begun.elapsed().as_nanos() / u128::from(requests);
    println!("{command}, {keys} keys, {depth} pipelined, {bytes} B: {each} ns a request");
}
