//! The hot path allocates nothing once buffers have grown, and how long it takes.
//!
//! Times are printed, never asserted on.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Instant;

use beeline_kv::{Keyspace, PutOptions};
use beeline_resp::{After, Limits, Output, Plan, RequestParser};
use common::Node;

struct Counting;

thread_local! {
    /// Of this thread: the test harness allocates in others. Needs no destructor, so that it may
    /// be used at any moment of a thread's life.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract;
// the counter touches no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        BYTES.set(BYTES.get() + layout.size() as u64);
        // SAFETY: the caller keeps `GlobalAlloc::alloc`'s contract, which is the system's too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above with this layout, that is from the system.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Parses, plans, routes and executes `batch` until `total` requests ran; returns allocations.
fn run(node: &mut Node, batch: &[u8], total: usize) -> u64 {
    let mut session = node.session();
    let mut parser = RequestParser::new(Limits::default());
    let mut out = Output::default();
    let shard = node.shards[0].clone();
    let mut shard = shard.lock().unwrap();
    let mut before = 0;
    let mut done = 0;
    while done < total {
        if done > total / 10 && before == 0 {
            before = ALLOCATIONS.get();
        }
        parser.feed(batch).unwrap();
        out.truncate(0);
        let mut keyspace = Keyspace::single(&mut shard);
        while let Some(args) = parser.next_request().unwrap() {
            let plan = Plan::new(&session, args);
            let _route = plan.route(&session, &*node.store);
            let after =
                node.executor.execute(&mut session, plan, &mut keyspace, &mut out, &node.server);
            assert_eq!(after, After::Continue);
            done += 1;
        }
        keyspace.commit().unwrap();
        assert!(!out.as_bytes().starts_with(b"-"), "{}", String::from_utf8_lossy(out.as_bytes()));
    }
    ALLOCATIONS.get() - before
}

fn encode(words: &[&[u8]]) -> Vec<u8> {
    common::redis::encode(&words.iter().map(|word| word.to_vec()).collect::<Vec<_>>())
}

#[test]
fn the_hot_path_allocates_nothing() {
    const REQUESTS: usize = 20_000;
    let value = [b'v'; 64];
    let mut node = Node::new(1);
    for (name, request, allowed) in [
        // A write allocates where the store takes a new segment, a few times in all.
        ("SET", encode(&[b"SET", b"key:000000000001", &value]), 400),
        ("GET", encode(&[b"GET", b"key:000000000001"]), 0),
        ("INCR", encode(&[b"INCR", b"counter:00000001"]), 400),
        ("MGET", encode(&[b"MGET", b"key:000000000001", b"nosuch", b"counter:00000001"]), 0),
        ("PING", b"PING\r\n".to_vec(), 0),
        ("EXISTS", encode(&[b"EXISTS", b"key:000000000001"]), 0),
    ] {
        let batch = request.repeat(16);
        let begun = Instant::now();
        let allocations = run(&mut node, &batch, REQUESTS);
        let each = begun.elapsed().as_nanos() / REQUESTS as u128;
        println!("{name}: {allocations} allocations in {REQUESTS} requests, {each} ns each");
        assert!(allocations <= allowed, "{name} allocated {allocations} times");
    }
    // What the store itself takes for the same work, to tell the door's share.
    let shard = node.shards[0].clone();
    let mut shard = shard.lock().unwrap();
    let mut keyspace = Keyspace::single(&mut shard);
    let mut out = Vec::with_capacity(1 << 20);
    let begun = Instant::now();
    for _ in 0..REQUESTS {
        let entry = keyspace.lookup(0, b"key:000000000001").unwrap().unwrap();
        out.clear();
        keyspace.with_value(&entry, |value| out.extend_from_slice(value)).unwrap();
    }
    println!("store alone, get: {} ns each", begun.elapsed().as_nanos() / REQUESTS as u128);
    let begun = Instant::now();
    for at in 0..REQUESTS {
        keyspace.put(0, b"key:000000000001", &[&value], PutOptions::default()).unwrap();
        if at % 16 == 15 {
            keyspace.commit().unwrap();
        }
    }
    println!("store alone, put: {} ns each", begun.elapsed().as_nanos() / REQUESTS as u128);
}

/// Bytes that one request takes from the allocator, and its reply.
fn bytes_of(node: &mut Node, words: &[&[u8]]) -> (u64, Vec<u8>) {
    let mut session = node.session();
    let mut parser = RequestParser::new(Limits::default());
    let mut out = Output::default();
    let shard = node.shards[0].clone();
    let mut shard = shard.lock().unwrap();
    parser.feed(&encode(words)).unwrap();
    let mut keyspace = Keyspace::single(&mut shard);
    let args = parser.next_request().unwrap().unwrap();
    let plan = Plan::new(&session, args);
    let before = BYTES.get();
    let after = node.executor.execute(&mut session, plan, &mut keyspace, &mut out, &node.server);
    assert_eq!(after, After::Continue);
    let taken = BYTES.get() - before;
    keyspace.commit().unwrap();
    (taken, out.as_bytes().to_vec())
}

#[test]
fn a_hash_that_cannot_be_copied_is_not_read_into_memory() {
    let mut node = Node::with_capacity(1, 32 << 20);
    let segment = u64::from(node.store.pool().segment_bytes());
    // By bytes, and by the number of its fields.
    let value = vec![7; segment as usize / 8];
    for n in 0..60_u32 {
        let field = n.to_be_bytes();
        bytes_of(&mut node, &[b"HSET", b"wide", &field, &value]);
    }
    let short = vec![b'x'; 2];
    for n in 0..(segment / 16) as u32 {
        let field = n.to_be_bytes();
        let (_, reply) = bytes_of(&mut node, &[b"HSET", b"long", &field, &short]);
        assert_eq!(reply, b":1\r\n");
    }
    for (key, most) in [("wide", 3 * segment), ("long", 4096)] {
        for words in [["COPY", key, "to"], ["RENAME", key, "to"], ["MOVE", key, "3"]] {
            let words = words.map(str::as_bytes);
            let (bytes, reply) = bytes_of(&mut node, &words);
            assert!(reply.starts_with(b"-"), "{}", String::from_utf8_lossy(&reply));
            println!("{} of {key}: {bytes} bytes", String::from_utf8_lossy(words[0]));
            assert!(bytes <= most, "{bytes} bytes for a refusal");
        }
    }
}

#[test]
fn a_field_chosen_at_random_copies_hardly_a_name() {
    let mut node = Node::new(1);
    for n in 0..600_u32 {
        let field = [&n.to_be_bytes()[..], &[b'f'; 500]].concat();
        bytes_of(&mut node, &[b"HSET", b"hash", &field, b"v"]);
    }
    let (bytes, reply) = bytes_of(&mut node, &[b"HRANDFIELD", b"hash"]);
    assert!(reply.starts_with(b"$504"));
    println!("HRANDFIELD: {bytes} bytes");
    assert!(bytes < 16 << 10, "{bytes} bytes for a name of 504");
}
