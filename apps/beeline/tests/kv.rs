//! `beeline kv` against a running node, as scripts see it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

struct Node {
    child: Child,
    out: BufReader<ChildStdout>,
    fabric: String,
    http: String,
    banner: serde_json::Value,
    _data: tempfile::TempDir,
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn node(arguments: &[&str]) -> Node {
    let data = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_beeline"))
        .args(["serve", "--json", "--quiet", "--resp-address", "off", "--shards", "2"])
        .args(["--http-address", "127.0.0.1:0", "--fabric-address", "127.0.0.1:0"])
        .args(["--documents-address", "127.0.0.1:0"])
        .args(["--segment-size", "1MiB", "--capacity", "64MiB", "--data"])
        .arg(data.path())
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let banner: serde_json::Value = serde_json::from_str(&line).expect("the banner is JSON");
    let fabric = banner["fabric_address"].as_str().unwrap().to_owned();
    let http = banner["http_address"].as_str().unwrap().to_owned();
    Node { child, out, fabric, http, banner, _data: data }
}

fn kv(node: &Node, scheme: &str, arguments: &[&str]) -> Output {
    kv_with(node, scheme, arguments, b"")
}

fn kv_with(node: &Node, scheme: &str, arguments: &[&str], input: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_beeline"))
        .arg("kv")
        .args(arguments)
        .args(["--connect", &format!("{scheme}://{}", node.fabric)])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

#[test]
fn keys_are_put_read_listed_and_deleted_over_every_provider() {
    let node = node(&[]);
    assert_eq!(node.banner["fabric_providers"], serde_json::json!(["shm", "tcp"]));
    for scheme in ["auto", "shm", "tcp"] {
        let key = format!("key-{scheme}");
        let put = kv_with(&node, scheme, &["put", &key], b"raw \0 bytes\n");
        assert_eq!(code(&put), Some(0), "{put:?}");
        let get = kv(&node, scheme, &["get", &key, "--verbose"]);
        assert_eq!(code(&get), Some(0), "{get:?}");
        assert_eq!(get.stdout, b"raw \0 bytes\n");
        let said = String::from_utf8_lossy(&get.stderr).into_owned();
        let provider = if scheme == "tcp" { "over tcp" } else { "over shm" };
        assert!(said.contains(provider), "{said}");
        let other = kv(&node, scheme, &["get", &key, "--database", "1"]);
        assert_eq!((code(&other), other.stdout.len()), (Some(1), 0));
    }
    let listed = kv(&node, "auto", &["scan", "--match", "key-*"]);
    let mut keys: Vec<&[u8]> = listed.stdout.split(|byte| *byte == b'\n').collect();
    keys.sort_unstable();
    assert_eq!(keys, [&b""[..], b"key-auto", b"key-shm", b"key-tcp"]);
    assert_eq!(kv(&node, "auto", &["scan", "--match", "nothing*"]).stdout, b"");
    assert_eq!(
        kv(&node, "auto", &["scan", "--limit", "2"]).stdout.split(|b| *b == b'\n').count(),
        3
    );
    let deleted = kv(&node, "auto", &["delete", "key-shm", "absent", "--json"]);
    assert_eq!((code(&deleted), deleted.stdout), (Some(0), b"{\"deleted\":1}\n".to_vec()));
    assert_eq!(code(&kv(&node, "auto", &["delete", "key-shm"])), Some(1));
    assert_eq!(code(&kv(&node, "auto", &["get", "key-shm"])), Some(1));
    let stats = kv(&node, "auto", &["stats", "--json"]);
    let lines = String::from_utf8(stats.stdout).unwrap();
    assert_eq!(lines.lines().count(), 2, "one line per shard: {lines}");
    for line in lines.lines() {
        let figures: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(figures.as_object().unwrap().len() > 3, "{line}");
    }
}

#[test]
fn documents_are_put_read_and_found_over_every_provider() {
    let node = node(&[]);
    let documents = |scheme: &str, arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_beeline"))
            .arg("documents")
            .args(arguments)
            .args(["--fabric", &format!("{scheme}://{}", node.fabric)])
            .output()
            .unwrap()
    };
    for scheme in ["auto", "shm", "tcp"] {
        let name = format!("shop.{scheme}");
        let put = documents(scheme, &["put", &name, r#"{"_id": "tea", "price": 3}"#]);
        assert_eq!((code(&put), &put.stdout[..]), (Some(0), &b"\"tea\"\n"[..]), "{put:?}");
        let said = String::from_utf8_lossy(&put.stderr).into_owned();
        let provider = if scheme == "tcp" { "over tcp" } else { "over shm" };
        assert!(said.contains(provider), "{said}");
        assert_eq!(
            code(&documents(scheme, &["put", &name, r#"{"_id": "tea", "price": 4}"#])),
            Some(0)
        );
        assert_eq!(code(&documents(scheme, &["put", &name, r#"{"_id": 2, "price": 1}"#])), Some(0));
        let get = documents(scheme, &["get", &name, "tea"]);
        assert_eq!(get.stdout, b"{\"_id\":\"tea\",\"price\":4}\n", "{get:?}");
        let find = documents(scheme, &["find", &name, "{}", "--sort", r#"{"price": 1}"#]);
        let lines = String::from_utf8(find.stdout).unwrap();
        assert!(lines.starts_with(r#"{"_id":2,"#) && lines.lines().count() == 2, "{lines}");
        assert_eq!(code(&documents(scheme, &["get", &name, "coffee"])), Some(1));
        assert_eq!(code(&documents(scheme, &["find", &name, "{"])), Some(2));
    }
    let nobody = documents("shm", &["find", "shop", "{}"]);
    assert_eq!(code(&nobody), Some(2), "{nobody:?}");
}

#[test]
fn a_value_comes_from_argument_or_file_and_may_expire() {
    let node = node(&[]);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), vec![7; 100_000]).unwrap();
    let path = file.path().to_str().unwrap();
    assert_eq!(code(&kv(&node, "auto", &["put", "file", "--file", path])), Some(0));
    assert_eq!(kv(&node, "auto", &["get", "file"]).stdout, vec![7; 100_000]);
    assert_eq!(code(&kv(&node, "auto", &["put", "brief", "x", "--ttl", "1ms"])), Some(0));
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(code(&kv(&node, "auto", &["get", "brief"])), Some(1));
    let put = kv(&node, "auto", &["put", "long", "x", "--ttl", "1h", "--json"]);
    let version = serde_json::from_slice::<serde_json::Value>(&put.stdout).unwrap();
    let get = kv(&node, "auto", &["get", "long", "--json"]);
    let got: serde_json::Value = serde_json::from_slice(&get.stdout).unwrap();
    assert_eq!(got["version"], version["version"]);
    assert_eq!(got["value"]["text"], "x");
    assert!(got["expires_at_ms"].as_u64().unwrap() > 1_700_000_000_000);
    // Longer than a segment holds.
    std::fs::write(file.path(), vec![7; 2 << 20]).unwrap();
    let refused = kv(&node, "auto", &["put", "huge", "--file", path]);
    assert_eq!(code(&refused), Some(2), "{refused:?}");
}

#[test]
fn a_long_key_is_carried_whole() {
    let node = node(&[]);
    let key = "k".repeat(60_000);
    assert_eq!(code(&kv(&node, "auto", &["put", &key, "v"])), Some(0));
    assert_eq!(kv(&node, "auto", &["get", &key]).stdout, b"v");
}

#[test]
fn nobody_at_the_address_is_exit_code_3_with_advice() {
    let output = Command::new(env!("CARGO_BIN_EXE_beeline"))
        .args(["kv", "get", "x", "--connect", "auto://127.0.0.1:1"])
        .output()
        .unwrap();
    assert_eq!(code(&output), Some(3), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("is a node running"));
    assert!(output.stdout.is_empty());
}

#[test]
fn the_fabric_door_shows_in_the_metrics_and_closes_with_the_node() {
    let mut node = node(&[]);
    assert_eq!(code(&kv(&node, "shm", &["put", "a", "b"])), Some(0));
    let mut http = std::net::TcpStream::connect(&node.http).unwrap();
    write!(http, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut metrics = String::new();
    http.read_to_string(&mut metrics).unwrap();
    let requests = metrics
        .lines()
        .find_map(|line| line.strip_prefix("beeline_node_fabric_requests_total "))
        .and_then(|value| value.parse::<u64>().ok());
    assert!(requests.is_some_and(|requests| requests > 0), "{metrics}");
    let id = rustix::process::Pid::from_raw(node.child.id().try_into().unwrap()).unwrap();
    rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
    assert_eq!(node.child.wait().unwrap().code(), Some(0));
    let mut rest = String::new();
    node.out.read_to_string(&mut rest).unwrap();
    assert!(std::net::TcpStream::connect(&node.fabric).is_err());
}

#[test]
fn a_taken_fabric_port_names_the_flag() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let data = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_beeline"))
        .args(["serve", "--quiet", "--resp-address", "off", "--http-address", "off"])
        .args(["--documents-address", "off", "--data"])
        .arg(data.path().join("node"))
        .args(["--fabric-address", &taken.local_addr().unwrap().to_string()])
        .output()
        .unwrap();
    assert_eq!(code(&output), Some(1), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("--fabric-address"));
    assert!(!data.path().join("node").exists(), "nothing was made");
}
