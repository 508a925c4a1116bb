//! `beeline kv` against a node, beside a Redis client of the same store.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use beeline_verify_clients::{Server, beeline, bounded, said};

const PATIENCE: Duration = Duration::from_secs(60);

struct Node {
    _data: tempfile::TempDir,
    server: Server,
}

impl Node {
    fn start(more: &[&str]) -> Self {
        let data = tempfile::tempdir().unwrap();
        let server = Server::start(data.path(), more);
        Self { _data: data, server }
    }

    fn url(&self) -> String {
        format!("auto://{}", self.server.banner()["fabric_address"].as_str().unwrap())
    }

    /// Exit code and standard output of `beeline kv ...`.
    fn kv(&self, words: &[&str]) -> (i32, String) {
        self.kv_at(&self.url(), words)
    }

    fn kv_at(&self, url: &str, words: &[&str]) -> (i32, String) {
        let mut command = beeline(&["kv"]);
        command.args(words).args(["--connect", url]);
        let output = bounded(&mut command, PATIENCE);
        let code = output.status.code().unwrap_or_else(|| panic!("{words:?}: {}", said(&output)));
        (code, String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

#[test]
fn one_sided_and_redis_clients_see_the_same_keys() {
    let node = Node::start(&["--shards", "3"]);
    let mut redis = node.server.connect();
    assert_eq!(node.kv(&["put", "greeting", "hello"]), (0, String::new()));
    assert_eq!(redis.say("GET greeting").text(), "hello");
    assert!(redis.say("SET answer 42").is_ok());
    assert_eq!(node.kv(&["get", "answer"]), (0, "42".into()));
    assert_eq!(node.kv(&["get", "absent"]), (1, String::new()));
    for i in 0..100 {
        assert!(redis.say(&format!("SET user:{i} x")).is_ok());
    }
    let (code, keys) = node.kv(&["scan"]);
    assert_eq!((code, keys.lines().count()), (0, 102));
    let (code, keys) = node.kv(&["scan", "--match", "user:1?"]);
    assert_eq!((code, keys.lines().count()), (0, 10), "{keys}");
    let (code, keys) = node.kv(&["scan", "--limit", "5", "--json"]);
    assert!(code == 0 && keys.lines().all(|line| line.starts_with("{\"key\":")), "{keys}");
    assert_eq!(keys.lines().count(), 5);
    let (code, deleted) = node.kv(&["delete", "greeting", "answer", "absent", "--json"]);
    assert_eq!((code, deleted.as_str()), (0, "{\"deleted\":2}\n"));
    assert_eq!(redis.say("EXISTS greeting answer").text(), "0");
    let (code, stats) = node.kv(&["stats", "--json"]);
    assert_eq!((code, stats.lines().count()), (0, 3), "{stats}");
}

#[test]
fn databases_and_expiry_are_those_of_the_redis_door() {
    let node = Node::start(&[]);
    let mut redis = node.server.connect();
    assert_eq!(node.kv(&["put", "k", "nine", "--database", "9"]).0, 0);
    assert_eq!(redis.say("EXISTS k").text(), "0");
    assert!(redis.say("SELECT 9").is_ok());
    assert_eq!(redis.say("GET k").text(), "nine");
    assert_eq!(node.kv(&["put", "soon", "gone", "--ttl", "100s", "--database", "9"]).0, 0);
    let left: i64 = redis.say("TTL soon").text().parse().unwrap();
    assert!((90..=100).contains(&left), "{left}");
}

#[test]
fn a_value_travels_through_pipes_unchanged() {
    let node = Node::start(&[]);
    let value: Vec<u8> = (0..200_000_u32).map(|i| (i * 7 % 251) as u8).collect();
    let mut put = beeline(&["kv", "put", "blob", "--connect", &node.url()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    put.stdin.take().unwrap().write_all(&value).unwrap();
    assert!(put.wait().unwrap().success());
    let got = bounded(&mut beeline(&["kv", "get", "blob", "--connect", &node.url()]), PATIENCE);
    assert!(got.stdout == value, "{} bytes came back of {}", got.stdout.len(), value.len());
}

#[test]
fn either_provider_serves_when_asked_for() {
    let node = Node::start(&[]);
    for provider in ["tcp", "shm"] {
        let url = node.url().replace("auto://", &format!("{provider}://"));
        assert_eq!(node.kv_at(&url, &["put", provider, "yes"]).0, 0, "{provider}");
        assert_eq!(node.kv_at(&url, &["get", provider]).1, "yes", "{provider}");
    }
}

#[test]
fn what_a_one_sided_client_stored_survives_kill_9() {
    let data = tempfile::tempdir().unwrap();
    let node =
        Node { server: Server::start(data.path(), &[]), _data: tempfile::tempdir().unwrap() };
    for i in 0..20 {
        assert_eq!(node.kv(&["put", &format!("key{i}"), &format!("value{i}")]).0, 0);
    }
    node.server.kill();
    let server = Server::start(data.path(), &[]);
    let mut redis = server.connect();
    for i in 0..20 {
        assert_eq!(redis.say(&format!("GET key{i}")).text(), format!("value{i}"));
    }
}

#[test]
fn a_node_that_is_gone_is_exit_code_3() {
    let node = Node::start(&[]);
    let url = node.url();
    node.server.kill();
    let output = bounded(&mut beeline(&["kv", "get", "x", "--connect", &url]), PATIENCE);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(output.stdout.is_empty());
}
