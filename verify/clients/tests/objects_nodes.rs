//! Objects between running nodes: every way to move them, every way to find them, and what happens
//! when a node ends.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use beeline_objects::{Client, ClientOptions, ObjectId, ObjectsError};
use beeline_verify_clients::server::PATIENCE;
use beeline_verify_clients::{Server, beeline, bounded, eventually, free_port, need, need_valkey};

const SOON: Duration = Duration::from_secs(30);

struct Node {
    server: Server,
    client: Client,
    _folder: tempfile::TempDir,
}

fn node(more: &[&str]) -> Node {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let mut flags = vec!["--objects-memory", "256MiB"];
    flags.extend(more);
    let server = Server::start(&data, &flags);
    let client = Client::connect(&data.join("objects.sock")).unwrap();
    Node { server, client, _folder: folder }
}

fn id(number: u8) -> ObjectId {
    ObjectId([number; 20])
}

fn contents(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// A figure of a node's `/metrics`.
fn figure(server: &Server, name: &str) -> u64 {
    let text = get(server.http());
    let line = text.lines().find(|line| line.starts_with(&format!("beeline_{name} ")));
    let value = line.and_then(|line| line.split_whitespace().nth(1)).unwrap_or("0");
    value.parse::<f64>().unwrap_or(0.0) as u64
}

fn get(address: std::net::SocketAddr) -> String {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn an_object_of_another_node_comes_by_every_protocol_and_provider() {
    let source = node(&[]);
    let sizes = [0_usize, 1, 1000, 70_000, 5_000_000];
    for (number, size) in (1_u8..).zip(sizes) {
        source.client.put(id(number), &contents(size), b"about it", SOON).unwrap();
    }
    let port = source.server.fabric().port();
    let ways = [
        ("auto", "auto"),
        ("auto", "two-sided"),
        ("auto", "one-sided"),
        ("tcp", "two-sided"),
        ("tcp", "one-sided"),
        ("auto", "socket"),
        ("auto", "socket-4k"),
    ];
    for (provider, protocol) in ways {
        let peer = format!("{provider}://127.0.0.1:{port}");
        let target = node(&["--objects-peers", &peer, "--objects-protocol", protocol]);
        for (number, size) in (1_u8..).zip(sizes) {
            let object = target.client.get_anywhere(id(number), SOON).unwrap();
            assert!(object.to_vec() == contents(size), "{provider} {protocol} {size}");
            assert_eq!(object.metadata(), b"about it");
        }
        let missing = target.client.fetch(&[id(200)], SOON).unwrap().remove(0);
        assert!(matches!(missing, Err(ObjectsError::Unreachable { .. })), "{missing:?}");
        assert_eq!(figure(&target.server, "objects_fetched_objects_total"), 5);
        let by = match protocol {
            "two-sided" => Some("objects_sent_fetches_total"),
            "one-sided" => Some("objects_read_fetches_total"),
            "socket" | "socket-4k" => Some("objects_socket_fetches_total"),
            _ => None,
        };
        // An object without bytes is always sent.
        let least = by.map_or(4, |by| figure(&target.server, by));
        assert!(least >= 4, "{protocol}: {least}");
    }
    // Nothing is held at the source once all are gone.
    for number in 1..=5 {
        source.client.delete(id(number)).unwrap();
    }
    eventually("the source's memory is free", PATIENCE, || {
        (figure(&source.server, "objects_used_bytes") == 0).then_some(())
    });
}

#[test]
fn a_get_waits_for_an_object_that_another_node_is_yet_to_make() {
    let source = node(&[]);
    let peer = format!("127.0.0.1:{}", source.server.fabric().port());
    let target = node(&["--objects-peers", &peer]);
    let client = target.client.clone();
    let waiting = std::thread::spawn(move || client.get_anywhere(id(1), SOON).map(|o| o.to_vec()));
    std::thread::sleep(Duration::from_millis(100));
    source.client.put(id(1), b"at last", b"", SOON).unwrap();
    assert_eq!(waiting.join().unwrap().unwrap(), b"at last");
}

#[test]
fn a_get_without_a_time_out_asks_the_other_nodes_once() {
    let source = node(&[]);
    let peer = format!("127.0.0.1:{}", source.server.fabric().port());
    let target = node(&["--objects-peers", &peer]);
    source.client.put(id(1), &contents(100_000), b"", SOON).unwrap();
    let object = target.client.get_anywhere(id(1), Duration::ZERO).unwrap();
    assert_eq!(object.to_vec(), contents(100_000));
    for asking in [&target.client, &source.client] {
        let missing = asking.get_anywhere(id(2), Duration::ZERO);
        assert!(matches!(missing, Err(ObjectsError::NotFound { .. })), "{missing:?}");
    }
    assert!(!target.client.contains(id(2)).unwrap());
}

#[test]
fn many_fetches_of_one_object_are_one_transfer() {
    let source = node(&[]);
    source.client.put(id(1), &contents(20_000_000), b"", SOON).unwrap();
    let peer = format!("127.0.0.1:{}", source.server.fabric().port());
    let target = node(&["--objects-peers", &peer, "--objects-fetchers", "4"]);
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let client = target.client.clone();
            std::thread::spawn(move || client.get_anywhere(id(1), SOON).unwrap().len())
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), 20_000_000);
    }
    // A reader may have the object before its transfer is counted.
    eventually("the transfer is counted", PATIENCE, || {
        (figure(&target.server, "objects_fetched_objects_total") > 0).then_some(())
    });
    assert_eq!(figure(&target.server, "objects_fetched_objects_total"), 1);
}

#[test]
fn a_holder_that_was_killed_is_passed_over_and_one_that_comes_back_is_found() {
    let first = node(&[]);
    let second = node(&[]);
    second.client.put(id(1), &contents(100_000), b"", SOON).unwrap();
    first.client.put(id(2), &contents(1000), b"", SOON).unwrap();
    let peers = format!(
        "127.0.0.1:{},127.0.0.1:{}",
        first.server.fabric().port(),
        second.server.fabric().port()
    );
    let target = node(&["--objects-peers", &peers]);
    assert_eq!(target.client.get_anywhere(id(2), SOON).unwrap().len(), 1000);
    // The connection to it is kept; now its end is noticed, and the next holder tried.
    drop(first);
    assert_eq!(target.client.get_anywhere(id(1), SOON).unwrap().to_vec(), contents(100_000));
    drop(second);
    let gone = target.client.fetch(&[id(3)], SOON).unwrap().remove(0);
    assert!(matches!(gone, Err(ObjectsError::Unreachable { .. })), "{gone:?}");
    // What came is here, whoever had it first.
    assert_eq!(target.client.get(id(1), Duration::ZERO).unwrap().to_vec(), contents(100_000));
}

#[test]
fn a_node_killed_in_the_middle_of_a_transfer_leaves_nothing_half_made() {
    for protocol in ["two-sided", "one-sided"] {
        let source = node(&[]);
        for number in 1..=8 {
            source.client.put(id(number), &contents(16 << 20), b"", SOON).unwrap();
        }
        let peer = format!("tcp://127.0.0.1:{}", source.server.fabric().port());
        let target = node(&["--objects-peers", &peer, "--objects-protocol", protocol]);
        let client = target.client.clone();
        let ids: Vec<ObjectId> = (1..=8).map(id).collect();
        let fetching = std::thread::spawn(move || client.fetch(&ids, SOON).unwrap());
        eventually("the first object came", PATIENCE, || {
            target.client.contains(id(1)).unwrap().then_some(())
        });
        drop(source);
        let outcomes = fetching.join().unwrap();
        for (number, outcome) in (1_u8..).zip(&outcomes) {
            assert_eq!(target.client.contains(id(number)).unwrap(), outcome.is_ok());
            if outcome.is_ok() {
                let object = target.client.get(id(number), Duration::ZERO).unwrap();
                assert!(object.to_vec() == contents(16 << 20), "{protocol}: other bytes came");
            }
        }
        let here = outcomes.iter().filter(|outcome| outcome.is_ok()).count() as u64;
        eventually("what was half made is given up", PATIENCE, || {
            let used = figure(&target.server, "objects_used_bytes");
            (used == here * (16 << 20)).then_some(())
        });
    }
}

/// What a node has open, by kind: how many of each.
fn descriptors(server: &Server) -> BTreeMap<String, usize> {
    let mut open = BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{}/fd", server.process())).unwrap().flatten() {
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        // "socket:[123]" is a socket, "/memfd:name (deleted)" that memory.
        let target = target.to_string_lossy().into_owned();
        let kind = target.split(":[").next().unwrap_or_default().to_owned();
        *open.entry(kind).or_insert(0) += 1;
    }
    open
}

#[test]
fn nodes_killed_while_they_fetch_leave_nothing_at_the_node_they_fetch_from() {
    let source = node(&[]);
    let creator = Client::connect(source.client.address()).unwrap();
    for number in 1..=12 {
        creator.put(id(number), &contents(8 << 20), b"", SOON).unwrap();
    }
    let held = || source.client.list().unwrap().iter().any(|entry| entry.references > 0);
    let settled = |what: &str| {
        eventually(what, PATIENCE, || {
            (figure(&source.server, "objects_serving_peers") == 0 && !held()).then_some(())
        });
    };
    let ids: Vec<ObjectId> = (1..=12).map(id).collect();
    // What a node keeps of its first connections over a provider is there after a node that came and
    // went in peace: buffers of each connection, of the two at once that a node makes.
    for scheme in ["auto", "tcp"] {
        let peer = format!("{scheme}://{}", source.server.fabric());
        let flags = ["--objects-peers", peer.as_str(), "--objects-protocol"];
        for protocol in ["two-sided", "one-sided"] {
            let target = node(&[&flags[..], &[protocol]].concat());
            assert!(target.client.fetch(&ids, SOON).unwrap().iter().all(Result::is_ok));
            drop(target);
            settled(&format!("{scheme}, {protocol}: a node that ended is let go"));
        }
        let kept = descriptors(&source.server);
        let most = kept.values().sum::<usize>() + 4;
        for (round, protocol) in (0_u64..).zip(["two-sided", "one-sided"].repeat(3)) {
            let target = node(&[&flags[..], &[protocol]].concat());
            let (client, wanted) = (target.client.clone(), ids.clone());
            let fetching = std::thread::spawn(move || client.fetch(&wanted, SOON));
            eventually("a transfer is under way", PATIENCE, || {
                (held() || fetching.is_finished()).then_some(())
            });
            // Another moment each time, in the middle of one of the objects.
            std::thread::sleep(Duration::from_millis(5 * round));
            target.server.kill();
            // Its own client is told at once.
            let told = fetching.join().unwrap();
            assert!(told.is_err() || told.unwrap().len() == 12);
            let what = format!("{scheme}, round {round}: references and connections end");
            settled(&what);
            let start = Instant::now();
            let mut open = descriptors(&source.server);
            while open.values().sum::<usize>() > most {
                let late = start.elapsed() > PATIENCE;
                assert!(!late, "{what}: more than {most} descriptors: {open:?}, {kept:?} before");
                std::thread::sleep(Duration::from_millis(20));
                open = descriptors(&source.server);
            }
        }
    }
    for number in 1..=12 {
        source.client.delete(id(number)).unwrap();
    }
    drop(creator);
    eventually("memory, segments and registrations are gone", PATIENCE, || {
        let left = ["used_bytes", "segments", "registered_segments"]
            .map(|name| figure(&source.server, &format!("objects_{name}")));
        (left == [0; 3]).then_some(())
    });
}

/// A Redis server of its own, ended with the value.
struct Redis(Child, u16);

impl Redis {
    fn start(program: &Path) -> Self {
        let port = free_port();
        let child = Command::new(program)
            .args(["--port", &port.to_string(), "--save", "", "--appendonly", "no"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        eventually("redis-server listens", PATIENCE, || {
            std::net::TcpStream::connect(("127.0.0.1", port)).ok()
        });
        Self(child, port)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn finds_through(directory: &str) {
    let flags = ["--objects-directory", directory];
    let (first, second, third) = (node(&flags), node(&flags), node(&flags));
    first.client.put(id(1), &contents(50_000), b"", SOON).unwrap();
    assert_eq!(second.client.get_anywhere(id(1), SOON).unwrap().to_vec(), contents(50_000));
    // Now two nodes have it; the first forgets it, the third finds the other.
    first.client.delete(id(1)).unwrap();
    drop(first);
    assert_eq!(third.client.get_anywhere(id(1), SOON).unwrap().len(), 50_000);
    second.client.delete(id(1)).unwrap();
    third.client.delete(id(1)).unwrap();
    eventually("the directory forgets the object", PATIENCE, || {
        let outcome = second.client.fetch(&[id(1)], SOON).unwrap().remove(0);
        outcome.is_err().then_some(())
    });
    // The entry of a node that was killed means nothing.
    third.client.put(id(2), b"lost with its node", b"", SOON).unwrap();
    drop(third);
    let outcome = second.client.fetch(&[id(2)], SOON).unwrap().remove(0);
    assert!(matches!(outcome, Err(ObjectsError::Unreachable { .. })), "{outcome:?}");
}

#[test]
fn nodes_find_objects_through_a_directory_in_beeline() {
    let directory = node(&[]);
    finds_through(&directory.server.resp().to_string());
}

#[test]
fn nodes_find_objects_through_a_directory_in_redis() {
    let test = "nodes_find_objects_through_a_directory_in_redis";
    let Some(program) = need(test, "redis-server") else { return };
    let redis = Redis::start(&program);
    finds_through(&format!("127.0.0.1:{}", redis.1));
}

#[test]
fn nodes_find_objects_through_a_directory_in_valkey() {
    let test = "nodes_find_objects_through_a_directory_in_valkey";
    let Some(program) = need_valkey(test) else { return };
    let valkey = Redis::start(&program);
    finds_through(&format!("127.0.0.1:{}", valkey.1));
}

#[test]
fn an_object_is_fetched_from_a_node_that_is_named_and_from_no_other() {
    let (source, other, target) = (node(&[]), node(&[]), node(&[]));
    source.client.put(id(1), &contents(300_000), b"", SOON).unwrap();
    let id_text = id(1).to_string();
    let fetch = |from: &str| {
        let socket = target.client.address().display().to_string();
        let words = ["objects", "fetch", &id_text, "--from", from, "--socket", &socket];
        bounded(beeline(&words).args(["--timeout", "20s"]), PATIENCE)
    };
    let missing = fetch(&other.server.fabric().to_string());
    assert_eq!(missing.status.code(), Some(3), "{missing:?}");
    assert!(!target.client.contains(id(1)).unwrap());
    let wrong = fetch("nowhere");
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("HOST:PORT"), "{wrong:?}");
    let came = fetch(&source.server.fabric().to_string());
    assert!(came.status.success(), "{came:?}");
    let object = target.client.get(id(1), Duration::ZERO).unwrap();
    assert_eq!(object.to_vec(), contents(300_000));
}

#[test]
fn a_checksum_goes_with_its_object_and_damage_is_found_at_the_other_node() {
    let source = node(&[]);
    let options = ClientOptions { checksums: true, ..ClientOptions::default() };
    let checked = Client::connect_with(source.client.address(), options.clone()).unwrap();
    for (number, size) in (1_u8..).zip([100, 70_000, 3_000_000]) {
        checked.put(id(number), &contents(size), b"about it", SOON).unwrap();
    }
    // The bytes of one are changed behind its seal, by its creator.
    let mut buffer = checked.create(id(9), 200_000, b"", SOON).unwrap();
    let byte = buffer.as_mut_ptr();
    checked.seal(buffer).unwrap();
    // The segment stays mapped for writing in its creator, this process.
    let memory = std::fs::OpenOptions::new().write(true).open("/proc/self/mem").unwrap();
    memory.write_all_at(&[1], byte.addr() as u64).unwrap();
    let peer = source.server.fabric().to_string();
    for protocol in ["two-sided", "one-sided", "socket"] {
        let target = node(&["--objects-peers", &peer, "--objects-protocol", protocol]);
        let far = Client::connect_with(target.client.address(), options.clone()).unwrap();
        for (number, size) in (1_u8..).zip([100, 70_000, 3_000_000]) {
            let object = far.get_anywhere(id(number), SOON).unwrap();
            assert!(object.to_vec() == contents(size), "{protocol}: {size}");
        }
        let damaged = far.fetch(&[id(9)], SOON).unwrap().remove(0);
        assert!(
            matches!(damaged, Err(ObjectsError::Unreachable { .. })),
            "{protocol}: {damaged:?}"
        );
        assert!(!far.contains(id(9)).unwrap(), "{protocol}: damaged bytes were sealed");
        assert!(figure(&target.server, "objects_failed_transfers_total") > 0);
    }
}

#[test]
fn without_its_directory_a_node_serves_what_is_here_and_finds_the_rest_when_it_is_back() {
    let test = "without_its_directory_a_node_serves_what_is_here";
    let Some(program) = need(test, "redis-server") else { return };
    let redis = Redis::start(&program);
    let address = format!("127.0.0.1:{}", redis.1);
    let flags = ["--objects-directory", address.as_str()];
    let (first, second) = (node(&flags), node(&flags));
    first.client.put(id(1), b"before", b"", SOON).unwrap();
    assert_eq!(second.client.get_anywhere(id(1), SOON).unwrap().to_vec(), b"before");
    let port = redis.1;
    drop(redis);
    first.client.put(id(2), b"meanwhile", b"", SOON).unwrap();
    assert_eq!(first.client.get(id(2), Duration::ZERO).unwrap().to_vec(), b"meanwhile");
    let outcome = second.client.fetch(&[id(2)], SOON).unwrap().remove(0);
    assert!(matches!(outcome, Err(ObjectsError::Unreachable { .. })), "{outcome:?}");
    // It comes back without what it knew: the nodes tell it again.
    let again = Command::new(&program)
        .args(["--port", &port.to_string(), "--save", "", "--appendonly", "no"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let _redis = Redis(again, port);
    assert_eq!(second.client.get_anywhere(id(2), SOON).unwrap().to_vec(), b"meanwhile");
}

#[test]
fn four_nodes_fetch_everything_from_each_other() {
    let directory = node(&[]);
    let address = directory.server.resp().to_string();
    let flags = ["--objects-directory", address.as_str()];
    let nodes: Vec<Node> = (0..4).map(|_| node(&flags)).collect();
    for (number, node) in (0_u8..).zip(&nodes) {
        for object in 0..10 {
            let data = contents(1000 * usize::from(object) + usize::from(number));
            node.client.put(id(number * 10 + object + 1), &data, b"", SOON).unwrap();
        }
    }
    let all: Vec<ObjectId> = (1..=40).map(id).collect();
    std::thread::scope(|scope| {
        for node in &nodes {
            let all = &all;
            scope.spawn(move || {
                for id in all {
                    drop(node.client.get_anywhere(*id, SOON).unwrap());
                }
            });
        }
    });
    for node in &nodes {
        assert_eq!(node.client.list().unwrap().len(), 40);
    }
}
