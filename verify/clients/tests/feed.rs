//! The change feed of a running node, as a person follows it.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;
use std::process::Output;
use std::time::Duration;

use beeline_verify_clients::resp::{Connection, Reply};
use beeline_verify_clients::{Server, beeline, bounded, said};

const PATIENCE: Duration = Duration::from_secs(60);

/// A node whose only writers are this test's.
fn start(data: &Path, arguments: &[&str]) -> Server {
    let alone = ["--without", "documents,objects,direct"];
    Server::start(data, &[&alone[..], arguments].concat())
}

fn kv(server: &Server, words: &[&str]) -> Output {
    let mut command = beeline(&["kv"]);
    command.args(words).args(["--resp-address", &server.resp().to_string()]);
    bounded(&mut command, PATIENCE)
}

/// The position of a reader that has seen everything.
fn now(redis: &mut Connection) -> String {
    match redis.say("KV.CHANGES NOW") {
        Reply::Array(parts) => parts[0].text(),
        other => panic!("{other:?}"),
    }
}

/// What the node said of each change, without positions.
fn changes(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let rest = |line: &str| line.split_once(' ').map_or("", |(_, rest)| rest).to_owned();
    text.lines().map(rest).collect()
}

#[test]
fn changes_of_every_door_are_followed_in_their_order() {
    let data = tempfile::tempdir().unwrap();
    let server = start(data.path(), &["--shards", "2", "--change-feed", "4MiB"]);
    let mut redis = server.connect();
    let position = now(&mut redis);
    let large = format!("SET large {}", "v".repeat(1000));
    for line in [
        "SET greeting hello",
        "HSET hash one 1 two 2",
        "HSET hash one 3",
        "HDEL hash two",
        "GET greeting",
        "EXPIRE greeting 1000",
        &large,
        "EXPIRE large 1000",
        "DEL greeting",
        "SELECT 3",
        "SET other value",
        "FLUSHDB",
    ] {
        let reply = redis.say(line);
        assert!(!matches!(reply, Reply::Error(_)), "{line}: {}", reply.text());
    }
    let mut put = beeline(&["kv", "put", "by-fabric", "value"]);
    put.args(["--connect", &format!("auto://{}", server.fabric())]);
    assert!(bounded(&mut put, PATIENCE).status.success());
    let wanted = [
        "0 set greeting",
        "0 hset hash one",
        "0 hset hash two",
        "0 set hash",
        "0 hset hash one",
        "0 hdel hash two",
        "0 set greeting",
        "0 set large",
        "0 expire large",
        "0 del greeting",
        "3 set other",
        "3 flush",
        "0 set by-fabric",
    ];
    let output = kv(&server, &["watch", "--from", &position, "--count", "13"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(changes(&output), wanted);
    // From a position in the middle, as objects.
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let middle = text.lines().nth(5).unwrap().split(' ').next().unwrap().to_owned();
    let output = kv(&server, &["watch", "--from", &middle, "--count", "2", "--json"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text.lines().count(), 2, "{}", said(&output));
    assert!(text.contains("\"key\":\"greeting\"") && text.contains("\"key\":\"large\""), "{text}");
    assert!(!text.contains("hdel"), "{text}");
}

#[test]
fn a_watch_that_falls_behind_is_told_where_to_begin_and_one_without_a_feed_what_to_set() {
    let data = tempfile::tempdir().unwrap();
    let server = start(data.path(), &["--shards", "1", "--change-feed", "64KiB"]);
    let mut redis = server.connect();
    let position = now(&mut redis);
    for n in 0..3000 {
        assert!(redis.say(&format!("SET key:{n} value")).is_ok());
    }
    let output = kv(&server, &["watch", "--from", &position, "--count", "1"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("read everything"), "{}", said(&output));
    let refused = redis.say(&format!("KV.CHANGES {position}")).text();
    let newest = now(&mut redis);
    assert!(refused.contains(&format!("take position {newest}")), "{refused}");
    drop(server);
    let server = start(data.path(), &[]);
    let output = kv(&server, &["watch", "--count", "1"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("change-feed"), "{}", said(&output));
}
