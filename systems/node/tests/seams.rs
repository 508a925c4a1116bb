//! Where services meet the shards: work that panics under their locks, snapshots of a node that stops.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends at its first failure")]

mod common;

use std::io::{Read as _, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use beeline_kv::PutOptions;
use beeline_node::Node;
use common::{Client, config, keys_of_shards, start};

#[test]
fn work_that_panics_under_a_lock_leaves_nothing_half_done_to_be_seen() {
    let node = start(2);
    let handle = node.handle();
    let keys = keys_of_shards(&node, "k");
    // Dealt in turn: the first lives on shard 0, the second on shard 1.
    let mut first = Client::connect(&node);
    assert_eq!(first.ask("PING"), "+PONG");
    let mut second = Client::connect(&node);
    for key in &keys {
        assert_eq!(second.ask(&format!("SET {key} before")), "+OK");
    }
    assert_eq!(handle.health(), Ok(()));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        handle.with_shards(&[0], |keyspace| {
            keyspace.begin_batch();
            keyspace.put(0, keys[0].as_bytes(), &[b"half"], PutOptions::default()).unwrap();
            panic!("a fault of the service");
        });
    }));
    assert!(panicked.is_err());
    // The shard takes nothing more and shows nothing of it; the other one goes on, and so does the node.
    assert!(handle.health().unwrap_err().starts_with("shard 0"));
    for request in [format!("GET {}", keys[0]), format!("SET {} after", keys[0])] {
        let refused = second.ask(&request);
        assert!(refused.starts_with("-MISCONF"), "{refused}");
    }
    assert_eq!(second.ask(&format!("SET {} after", keys[1])), "+OK");
    assert_eq!(second.ask(&format!("GET {}", keys[1])), "after");
    assert_eq!(handle.failure(), None, "no thread of a shard panicked");
    drop(handle);
    node.stop();
}

/// A snapshot that a reader takes slowly must not keep a node from stopping.
#[test]
fn a_node_that_stops_gives_a_background_snapshot_up() {
    const VALUES: usize = 512;
    const LENGTH: usize = 64 << 10;
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(2);
    config.data_directory = directory.path().to_owned();
    config.pool.segment_bytes = 1 << 20;
    let partial = directory.path().join("snapshot.bee.partial");
    // Written into a pipe: it goes on as fast as it is read.
    let made = std::process::Command::new("mkfifo").arg(&partial).status().unwrap();
    assert!(made.success());
    let node = Node::start(&config).unwrap();
    let mut client = Client::connect(&node);
    let value = "v".repeat(LENGTH);
    for number in 0..VALUES {
        assert_eq!(client.ask(&format!("SET key{number} {value}")), "+OK");
    }
    assert_eq!(client.ask("BGSAVE"), "+Background saving started");
    // Another one behind it is given up, too.
    assert!(client.ask("BGSAVE SCHEDULE").starts_with("+Background saving scheduled"));
    let mut pipe = std::fs::File::open(&partial).unwrap();
    let mut piece = vec![0; LENGTH];
    pipe.read_exact(&mut piece).unwrap();
    let stopping = std::thread::spawn(move || node.stop());
    let mut read = LENGTH;
    while !stopping.is_finished() {
        match pipe.read(&mut piece).unwrap() {
            0 => std::thread::sleep(Duration::from_millis(5)),
            count => read += count,
        }
        // Ten seconds for all of it.
        std::thread::sleep(Duration::from_millis(20));
    }
    stopping.join().unwrap();
    assert!(read < VALUES * LENGTH, "the whole snapshot was written: {read} bytes");
    assert!(!directory.path().join("snapshot.bee").exists());
}

#[test]
fn a_time_out_beyond_all_measure_is_refused() {
    let node = start(1);
    let mut client = Client::connect(&node);
    for seconds in ["2147483648", "18446744073709552", "18446744073709551615"] {
        let refused = client.ask(&format!("CONFIG SET timeout {seconds}"));
        assert!(refused.starts_with("-ERR CONFIG SET failed"), "{refused}");
    }
    assert_eq!(client.ask("CONFIG SET timeout 2147483647"), "+OK");
    assert_eq!(client.ask("PING"), "+PONG");
    node.stop();
}

#[test]
fn a_part_of_a_second_is_a_time_out() {
    let node = common::start_with(1, |door| door.idle_timeout = Some(Duration::from_millis(300)));
    // A client that waits for a processor before it speaks may be closed as silent: the next one
    // asks. Once answered it is silent.
    common::eventually("an answer of one second, then the end", || {
        let mut client = Client::connect(&node);
        let _ = client.stream.write_all(b"CONFIG GET timeout\r\n");
        client.rest() == b"*2\r\n$7\r\ntimeout\r\n$1\r\n1\r\n"
    });
    node.stop();
}

#[test]
fn a_client_whose_request_waits_is_not_idle() {
    let node = start(2);
    let mut client = Client::connect(&node);
    let mut other = Client::connect(&node);
    assert_eq!(client.ask("PING"), "+PONG");
    // Long beside what a busy machine keeps either from a processor.
    assert_eq!(other.ask("CONFIG SET timeout 2"), "+OK");
    assert_eq!(other.ask("CLIENT PAUSE 3400 ALL"), "+OK");
    // Held back for longer than the time-out, answered, and still there.
    assert_eq!(client.ask("PING"), "+PONG");
    assert_eq!(client.ask("PING"), "+PONG");
    assert_eq!(client.rest(), b"", "silent by now: it is closed");
    node.stop();
}

#[test]
fn a_node_that_stops_answers_what_waits_for_locks() {
    let mut config = config(3);
    config.shutdown_wait = common::PATIENCE;
    let node = Node::start(&config).unwrap();
    let (handle, address) = (node.handle(), node.redis_address().unwrap());
    let keys = keys_of_shards(&node, "k");
    // On shard 0: the first request needs shard 1, which is locked, the second one shard 2.
    let mut client = Client::connect(&node);
    assert_eq!(client.ask("PING"), "+PONG");
    let before = handle.stats().loops.input_bytes;
    let stopping = handle.with_shards(&[1], |_| {
        let [zero, one, two] = [&keys[0], &keys[1], &keys[2]];
        client.send(&format!("MSET {zero} 1 {one} 1\r\nMSET {zero} 2 {two} 2\r\n"));
        common::eventually("the requests are taken in", || {
            handle.stats().loops.input_bytes > before
        });
        let stopping = std::thread::spawn(move || node.stop());
        common::eventually("the stop begins", || std::net::TcpStream::connect(address).is_err());
        std::thread::sleep(Duration::from_millis(50));
        stopping
    });
    assert_eq!(String::from_utf8_lossy(&client.rest()), "+OK\r\n+OK\r\n");
    drop(handle);
    stopping.join().unwrap();
}
