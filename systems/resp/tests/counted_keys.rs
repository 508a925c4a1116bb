//! A command whose keys stand behind their number: MSETEX, over several shards.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use beeline_env::ManualClock;
use beeline_resp::{ArgsBuffer, Plan, Route};
use common::Node;

const KEYS: usize = 12;

/// `MSETEX` of keys 0 to 11, each with `value`, and `options`.
fn request(value: &str, options: &str) -> String {
    let pairs: String = (0..KEYS).map(|key| format!(" key{key} {value}")).collect();
    format!("MSETEX {KEYS}{pairs}{options}")
}

fn all(value: &str) -> String {
    let each = format!("${}\r\n{value}\r\n", value.len());
    format!("*{KEYS}\r\n{}", each.repeat(KEYS))
}

const MGET: &str = "MGET key0 key1 key2 key3 key4 key5 key6 key7 key8 key9 key10 key11";

#[test]
fn pairs_are_stored_together_with_one_time_of_expiry() {
    let clock = Arc::new(ManualClock::new(1_700_000_000_000));
    let mut node = Node::with_clock(3, clock.clone());
    let mut session = node.session();
    assert_eq!(node.text(&mut session, &request("a", " EX 100")), ":1\r\n");
    assert_eq!(node.text(&mut session, MGET), all("a"));
    assert_eq!(node.text(&mut session, "TTL key7"), ":100\r\n");
    // Conditions are about all keys together.
    assert_eq!(node.text(&mut session, &request("b", " NX")), ":0\r\n");
    assert_eq!(node.text(&mut session, &request("b", " XX KEEPTTL")), ":1\r\n");
    assert_eq!(node.text(&mut session, MGET), all("b"));
    assert_eq!(node.text(&mut session, "TTL key11"), ":100\r\n");
    assert_eq!(node.text(&mut session, "DEL key5"), ":1\r\n");
    assert_eq!(node.text(&mut session, &request("c", " XX")), ":0\r\n");
    assert_eq!(node.text(&mut session, &request("c", " NX")), ":0\r\n");
    assert_eq!(node.text(&mut session, "GET key4"), "$1\r\nb\r\n");
    assert_eq!(node.text(&mut session, &request("d", "")), ":1\r\n");
    assert_eq!(node.text(&mut session, "TTL key4"), ":-1\r\n");
    assert_eq!(node.text(&mut session, &request("e", " PX 2500 XX")), ":1\r\n");
    assert_eq!(node.text(&mut session, "PTTL key9"), ":2500\r\n");
    clock.advance(Duration::from_secs(3));
    assert_eq!(node.text(&mut session, "DBSIZE"), format!(":{KEYS}\r\n"));
    assert_eq!(node.text(&mut session, "GET key9"), "$-1\r\n");
    assert_eq!(node.text(&mut session, &request("f", " NX")), ":1\r\n", "expired keys are absent");
}

#[test]
fn a_wrong_number_of_keys_is_refused_before_any_is_looked_at() {
    let mut node = Node::new(3);
    let mut session = node.session();
    for (request, error) in [
        ("MSETEX 0 a 1", "ERR invalid numkeys value"),
        ("MSETEX -1 a 1", "ERR invalid numkeys value"),
        ("MSETEX x a 1", "ERR invalid numkeys value"),
        ("MSETEX 2 a 1", "ERR wrong number of key-value pairs"),
        ("MSETEX 2 a 1 b", "ERR wrong number of key-value pairs"),
        ("MSETEX 9223372036854775807 a 1", "ERR wrong number of key-value pairs"),
        ("MSETEX 1 a 1 b 2", "ERR syntax error"),
        ("MSETEX 1 a 1 NX XX", "ERR syntax error"),
        ("MSETEX 1 a 1 GET", "ERR syntax error"),
        ("MSETEX 1 a 1 EX 10 KEEPTTL", "ERR syntax error"),
        ("MSETEX 1 a 1 EX 0", "ERR invalid expire time in 'msetex' command"),
        ("MSETEX 1 a", "ERR wrong number of arguments for 'msetex' command"),
    ] {
        assert_eq!(node.text(&mut session, request), format!("-{error}\r\n"), "{request}");
    }
    assert_eq!(node.text(&mut session, "DBSIZE"), ":0\r\n");
}

#[test]
fn the_shards_of_counted_keys_are_locked_and_no_others() {
    let node = Node::new(8);
    let session = node.session();
    let route = |words: &str| {
        let mut requests = ArgsBuffer::new();
        let words: Vec<&[u8]> = words.split(' ').map(str::as_bytes).collect();
        assert!(requests.push_words(&words));
        Plan::new(&session, requests.get(0)).route(&session, &*node.store)
    };
    let shard = |key: &str| node.store.shard_of(0, key.as_bytes());
    for (first, second) in (0..40).map(|at| (format!("k{at}"), format!("k{}", at + 1))) {
        // A value that looks like a key is none.
        let found = route(&format!("MSETEX 2 {first} k7 {second} k8 EX 10"));
        if shard(&first) == shard(&second) {
            assert_eq!(found, Route::Shard(shard(&first)));
            continue;
        }
        let Route::Shards(set) = found else { panic!("{found:?}") };
        let mut wanted = vec![shard(&first), shard(&second)];
        wanted.sort_unstable();
        assert_eq!(set.iter().collect::<Vec<_>>(), wanted);
    }
    assert_eq!(route("MSETEX 3 a 1 b 2"), Route::Here);
}

#[test]
fn a_transaction_makes_room_for_counted_pairs() {
    let mut node = Node::with_capacity(2, 8 << 20);
    let mut session = node.session();
    let half = "x".repeat(20_000);
    let run = |node: &mut Node, session: &mut beeline_resp::Session, pairs: usize| {
        assert_eq!(node.text(session, "MULTI"), "+OK\r\n");
        let all: String = (0..pairs).map(|at| format!(" k{at} {half}")).collect();
        let request = format!("MSETEX {pairs}{all} EX 100");
        assert_eq!(node.text(session, &request), "+QUEUED\r\n");
        node.text(session, "EXEC")
    };
    // More than a segment: refused before anything is stored.
    let refused = run(&mut node, &mut session, 6);
    assert!(refused.starts_with("-EXECABORT"), "{refused}");
    assert_eq!(node.text(&mut session, "DBSIZE"), ":0\r\n");
    assert_eq!(run(&mut node, &mut session, 2), "*1\r\n:1\r\n");
    assert_eq!(node.text(&mut session, "DBSIZE"), ":2\r\n");
}

#[test]
fn command_tells_where_counted_keys_are() {
    let mut node = Node::new(1);
    let mut session = node.session();
    assert_eq!(
        node.text(&mut session, "COMMAND GETKEYS MSETEX 2 a 1 b 2 EX 10"),
        "*2\r\n$1\r\na\r\n$1\r\nb\r\n"
    );
    for wrong in ["3", "0", "x"] {
        assert_eq!(
            node.text(&mut session, &format!("COMMAND GETKEYS MSETEX {wrong} a 1 b 2")),
            "-ERR Invalid arguments specified for command\r\n"
        );
    }
    let info = node.text(&mut session, "COMMAND INFO msetex");
    assert!(info.contains("+movablekeys\r\n:0\r\n:0\r\n:0\r\n"), "{info}");
    let spec = "$4\r\ntype\r\n$6\r\nkeynum\r\n$4\r\nspec\r\n*6\r\n\
                $9\r\nkeynumidx\r\n:0\r\n$8\r\nfirstkey\r\n:1\r\n$7\r\nkeystep\r\n:2\r\n";
    assert!(info.contains(spec), "{info}");
}
