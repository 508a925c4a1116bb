//! Commands that stay with one hash: what is kept of the last one looked up never outlives a change.
#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::sync::Arc;

use beeline_env::ManualClock;
use common::Node;

#[test]
fn whatever_changes_a_hash_between_two_commands_is_seen_by_the_second() {
    let clock = Arc::new(ManualClock::new(1_000_000));
    for shards in [1, 3] {
        let mut node = Node::with_clock(shards, clock.clone());
        let mut session = node.session();
        let mut run = |request: &str| node.text(&mut session, request);
        assert_eq!(run("HSET h a 1 b 2"), ":2\r\n");
        for (change, reply, then) in [
            ("HSET h a 3", ":0\r\n", "$1\r\n3\r\n"),
            ("DEL h", ":1\r\n", "$-1\r\n"),
            ("HSET h a 4", ":1\r\n", "$1\r\n4\r\n"),
            ("SET h string", "+OK\r\n", "-WRONGTYPE"),
            ("DEL h", ":1\r\n", "$-1\r\n"),
            ("HSET h a 5", ":1\r\n", "$1\r\n5\r\n"),
            ("FLUSHDB", "+OK\r\n", "$-1\r\n"),
            ("HSET h a 6", ":1\r\n", "$1\r\n6\r\n"),
            ("RENAME h other", "+OK\r\n", "$-1\r\n"),
            ("RENAME other h", "+OK\r\n", "$1\r\n6\r\n"),
            ("SELECT 1", "+OK\r\n", "$-1\r\n"),
            ("SELECT 0", "+OK\r\n", "$1\r\n6\r\n"),
            ("HDEL h a", ":1\r\n", "$-1\r\n"),
            ("HSET h a 7", ":1\r\n", "$1\r\n7\r\n"),
            ("MOVE h 2", ":1\r\n", "$-1\r\n"),
            ("HSET h a 8", ":1\r\n", "$1\r\n8\r\n"),
            ("PEXPIREAT h 1000500", ":1\r\n", "$1\r\n8\r\n"),
        ] {
            assert_eq!(run(change), reply, "{change}");
            for _ in 0..2 {
                let found = run("HGET h a");
                assert!(found.starts_with(then), "after {change}: {found}");
            }
        }
        clock.advance(std::time::Duration::from_millis(600));
        assert_eq!(run("HGET h a"), "$-1\r\n", "its time has come");
        assert_eq!(run("HSET h a 9"), ":1\r\n");
        clock.advance(std::time::Duration::from_millis(u64::from(u32::MAX)));
        assert_eq!(run("HGET h a"), "$1\r\n9\r\n");
        let _ = run("FLUSHALL");
        clock.set_unix_ms(1_000_000);
    }
}
