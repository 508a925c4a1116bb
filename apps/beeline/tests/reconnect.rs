//! The one-sided client against a node that is not there any more, hangs, or cannot share memory:
//! what its user is told, and what is in the store afterwards.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use beeline_kv_client::{
    Answer, Client, ClientError, ClientOptions, Command as KvCommand, PutOptions, Token,
};
use rustix::process::{Pid, Signal, kill_process};

#[path = "../src/connector.rs"]
#[allow(dead_code)]
mod connector;

/// What the connector takes from the program.
mod output {
    pub fn complain(_: impl std::fmt::Display) {}
}
mod serve {
    pub mod fabric {
        pub const SERVICE: &str = "kv";
    }
}

/// Nothing here takes longer on a loaded machine.
const BOUND: Duration = Duration::from_secs(60);

struct Node {
    child: Child,
    address: String,
    data: tempfile::TempDir,
    window: String,
}

/// How clients reach a node: by scheme, `window` for a memory window in a file.
const WAYS: [&str; 5] = ["shm", "tcp", "auto", "ntb", "window"];

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(data: &std::path::Path, address: &str, window: &str) -> (Child, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_beeline"))
        .args(["serve", "--json", "--quiet", "--resp-address", "off", "--http-address", "off"])
        .args(["--shards", "2", "--segment-size", "1MiB", "--capacity", "64MiB"])
        .args(["--documents-address", "off"])
        .args(["--fabric-address", address, "--fabric-window", window])
        .args(["--durability", "process", "--data"])
        .arg(data)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let banner: serde_json::Value = serde_json::from_str(&line).expect("the banner is JSON");
    (child, banner["fabric_address"].as_str().unwrap().to_owned())
}

impl Node {
    fn start() -> Self {
        Self::start_for("auto")
    }

    /// A node that clients can reach in this way.
    fn start_for(way: &str) -> Self {
        let data = tempfile::tempdir().unwrap();
        let window = match way {
            "ntb" => "emulated".to_owned(),
            "window" => {
                let path = data.path().join("window");
                std::fs::File::create(&path).unwrap().set_len(10 << 20).unwrap();
                path.to_str().unwrap().to_owned()
            }
            _ => "off".to_owned(),
        };
        let (child, address) = spawn(data.path(), "127.0.0.1:0", &window);
        Self { child, address, data, window }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).unwrap();
        // A thread that runs is stopped a moment after the call.
        let start = Instant::now();
        while signal == Signal::STOP && !self.stands_still() {
            assert!(start.elapsed() < BOUND, "the node stops");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn stands_still(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        tasks.flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
        })
    }

    /// Ends the process without a word and starts another on the same data and address.
    fn kill_and_restart(&mut self) {
        self.signal(Signal::KILL);
        self.child.wait().unwrap();
        (self.child, _) = spawn(self.data.path(), &self.address, &self.window);
    }

    fn url(&self, way: &str) -> String {
        match way {
            "window" => format!("ntb://{}?window={}", self.address, self.window),
            scheme => format!("{scheme}://{}", self.address),
        }
    }

    fn connect(&self, way: &str, timeout: Duration) -> Client {
        let options = ClientOptions { timeout, window: 16, ..ClientOptions::default() };
        let client = connector::connect(&self.url(way), &options, false).unwrap();
        let provider = match way {
            "auto" => "shm",
            "window" => "ntb",
            scheme => scheme,
        };
        assert_eq!(client.provider(), provider);
        client
    }
}

/// What became of the puts of a run. Each key is put once, with its own name as value.
#[derive(Default)]
struct Ledger {
    pending: HashMap<Token, u64>,
    stored: Vec<u64>,
    unknown: Vec<(u64, ClientError)>,
    next: u64,
}

impl Ledger {
    fn put(&mut self, client: &mut Client) -> Result<(), ClientError> {
        let key = self.next.to_string();
        let (value, options) = (key.as_bytes(), PutOptions::default());
        let command = KvCommand::Put { database: 0, key: key.as_bytes(), value, options };
        let token = client.submit(command)?;
        self.pending.insert(token, self.next);
        self.next += 1;
        Ok(())
    }

    fn poll(&mut self, client: &mut Client) {
        let mut deliver = |token, answer: Result<Answer<'_>, ClientError>| {
            let key = self.pending.remove(&token).expect("each request is answered once");
            match answer {
                Ok(Answer::Stored { .. }) => self.stored.push(key),
                Ok(other) => unreachable!("a put was answered with {other:?}"),
                Err(error) => self.unknown.push((key, error)),
            }
        };
        client.wait(Duration::from_millis(1), &mut deliver).unwrap();
    }

    /// Keeps the pipeline full until `count` more puts were acknowledged.
    fn run(&mut self, client: &mut Client, count: usize) {
        let (start, wanted) = (Instant::now(), self.stored.len() + count);
        while self.stored.len() < wanted {
            while self.put(client).is_ok() {}
            self.poll(client);
            assert!(start.elapsed() < BOUND, "puts are answered in time");
        }
    }

    /// Waits for the word on everything outstanding.
    fn settle(&mut self, client: &mut Client) {
        let start = Instant::now();
        while !self.pending.is_empty() {
            self.poll(client);
            assert!(start.elapsed() < BOUND, "every request has an outcome in time");
        }
    }

    /// Acknowledged puts are there; of the others nothing but what was put.
    fn check(&self, client: &mut Client) {
        for key in &self.stored {
            let found = found(client, *key);
            assert_eq!(found, Some(key.to_string().into_bytes()), "put {key} was acknowledged");
        }
        for (key, error) in &self.unknown {
            assert!(error.is_outcome_unknown(), "put {key}: {error}");
            let found = found(client, *key);
            assert!(found.is_none_or(|value| value == key.to_string().into_bytes()), "{key}");
        }
    }
}

/// What is there; a node that waits for a processor for longer than a client waits for it is asked again.
fn found(client: &mut Client, key: u64) -> Option<Vec<u8>> {
    let start = Instant::now();
    loop {
        match client.get(0, key.to_string().as_bytes()) {
            Ok(found) => return found,
            Err(error) => {
                assert!(error.is_retryable() && start.elapsed() < BOUND, "{key}: {error}")
            }
        }
    }
}

/// Tries until the node is back.
fn reach(client: &mut Client) {
    let start = Instant::now();
    while let Err(error) = client.ping(0).and_then(|()| client.ping(1)) {
        assert!(error.is_retryable(), "{error}");
        assert!(start.elapsed() < BOUND, "the node is not reached again: {error}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_pipeline_over_a_kill_and_a_restart_loses_nothing_acknowledged() {
    for scheme in WAYS {
        let mut node = Node::start_for(scheme);
        let mut client = node.connect(scheme, Duration::from_secs(5));
        let mut ledger = Ledger::default();
        for round in 0..3 {
            ledger.run(&mut client, 300);
            while ledger.put(&mut client).is_ok() {}
            let outstanding = ledger.pending.len();
            assert!(outstanding >= 16, "{outstanding} are outstanding when the node dies");
            let before = (ledger.stored.len(), ledger.unknown.len());
            node.kill_and_restart();
            ledger.settle(&mut client);
            let told = ledger.stored.len() + ledger.unknown.len() - before.0 - before.1;
            assert_eq!(told, outstanding, "{scheme}, round {round}: one outcome each");
            reach(&mut client);
            ledger.check(&mut client);
            assert!(client.counters().reconnects > round, "{scheme}, round {round}");
        }
        assert_eq!(client.counters().puts, ledger.next, "{scheme}: no put was sent twice");
        ledger.run(&mut client, 100);
        ledger.settle(&mut client);
        ledger.check(&mut client);
    }
}

#[test]
fn a_node_that_hangs_for_a_moment_is_waited_for() {
    for scheme in ["shm", "tcp", "ntb", "window"] {
        let node = Node::start_for(scheme);
        let mut client = node.connect(scheme, Duration::from_secs(30));
        let mut ledger = Ledger::default();
        ledger.run(&mut client, 50);
        node.signal(Signal::STOP);
        let pause = Instant::now();
        while pause.elapsed() < Duration::from_millis(300) {
            // Answers from before the stop still arrive and make room for more.
            while ledger.put(&mut client).is_ok() {}
            ledger.poll(&mut client);
        }
        assert!(!ledger.pending.is_empty(), "{scheme}: nobody answers while the node hangs");
        node.signal(Signal::CONT);
        ledger.settle(&mut client);
        assert!(ledger.unknown.is_empty(), "{scheme}: {:?}", ledger.unknown);
        assert_eq!(client.counters().reconnects, 0, "{scheme}");
        ledger.check(&mut client);
    }
}

#[test]
fn a_node_that_hangs_for_longer_times_out_and_is_found_again() {
    for scheme in ["shm", "tcp", "ntb", "window"] {
        let node = Node::start_for(scheme);
        let timeout = Duration::from_secs(1);
        let mut client = node.connect(scheme, timeout);
        let mut ledger = Ledger::default();
        ledger.run(&mut client, 50);
        ledger.settle(&mut client);
        node.signal(Signal::STOP);
        let start = Instant::now();
        while ledger.put(&mut client).is_ok() {}
        ledger.settle(&mut client);
        let waited = start.elapsed();
        // The provider's own bound may run out a moment earlier.
        assert!(waited >= timeout / 2, "{scheme}: after {waited:?}: {:?}", ledger.unknown);
        assert!(!ledger.unknown.is_empty(), "{scheme}: a hanging node acknowledges nothing");
        for (key, error) in &ledger.unknown {
            assert!(
                matches!(error, ClientError::TimedOut { .. } | ClientError::ConnectionLost { .. }),
                "{scheme}: {key}: {error}"
            );
        }
        // Reaching a hanging node is bounded too.
        let error = client.ping(0).unwrap_err();
        assert!(error.is_retryable(), "{scheme}: {error}");
        node.signal(Signal::CONT);
        reach(&mut client);
        ledger.check(&mut client);
        ledger.run(&mut client, 50);
        ledger.settle(&mut client);
        ledger.check(&mut client);
    }
}

fn with_a_pair() -> Node {
    let node = Node::start();
    let mut client = node.connect("auto", BOUND);
    assert_eq!(client.provider(), "shm");
    client.put(0, b"7", b"7", PutOptions::default()).unwrap();
    node
}

#[test]
fn a_client_that_cannot_make_shared_memory_falls_back_to_tcp_and_says_why() {
    let node = with_a_pair();
    // No file may get longer than 250 KiB, not even one in memory: the object that both ends of a
    // connection share does, what a client needs otherwise does not.
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 500; exec \"$0\" \"$@\""])
        .arg(env!("CARGO_BIN_EXE_beeline"))
        .args(["kv", "get", "7", "--verbose", "--connect", &format!("auto://{}", node.address)])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(output.stdout, b"7");
    assert!(said.contains("over tcp, because fell back") && said.contains("failed"), "{said}");
}

/// The client in a mount namespace in which the kernel seems to be another one: reads the key and
/// returns what it said. `None`, with a word, where there are no namespaces.
fn from_another_host(url: &str) -> Option<String> {
    let directory = tempfile::tempdir().unwrap();
    let boot_id = directory.path().join("boot_id");
    std::fs::write(&boot_id, "00000000-0000-4000-8000-000000000000\n").unwrap();
    let script = format!(
        "mount --bind {} /proc/sys/kernel/random/boot_id && exec \"$0\" \"$@\"",
        boot_id.display()
    );
    let apart = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script]);
        command
    };
    let possible = apart(&script).arg("true").output();
    if !possible.is_ok_and(|output| output.status.success()) {
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("skipped: no mount namespaces here\n"),
        );
        return None;
    }
    let output = apart(&script)
        .arg(env!("CARGO_BIN_EXE_beeline"))
        .args(["kv", "get", "7", "--verbose", "--connect", url])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(output.stdout, b"7");
    Some(said)
}

#[test]
fn a_client_on_another_host_falls_back_to_tcp_and_says_why() {
    let node = with_a_pair();
    let Some(said) = from_another_host(&node.url("auto")) else { return };
    assert!(said.contains("over tcp, because the ends run on different hosts"), "{said}");
}

#[test]
fn a_client_behind_a_memory_window_takes_it_and_one_that_has_not_says_why() {
    let node = Node::start_for("window");
    let mut client = node.connect("auto", BOUND);
    client.put(0, b"7", b"7", PutOptions::default()).unwrap();
    let url = format!("{}?window={}", node.url("auto"), node.window);
    let Some(said) = from_another_host(&url) else { return };
    assert!(said.contains("over ntb, because both ends have a memory window"), "{said}");
    // A window in which the node does not show itself is not touched.
    let other = node.data.path().join("other");
    std::fs::write(&other, vec![0xAA; 10 << 20]).unwrap();
    let url = format!("{}?window={}", node.url("auto"), other.display());
    let said = from_another_host(&url).unwrap();
    assert!(said.contains("over tcp, because fell back") && said.contains("not seen"), "{said}");
    assert!(std::fs::read(&other).unwrap().iter().all(|byte| *byte == 0xAA));
}

#[test]
fn a_node_whose_window_cannot_be_opened_says_so_and_does_not_start() {
    let data = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_beeline"))
        .args(["serve", "--fabric-address", "127.0.0.1:0", "--fabric-window", "/nowhere/resource2"])
        .args(["--resp-address", "off", "--http-address", "off"])
        .args(["--documents-address", "off", "--data"])
        .arg(data.path().join("store"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("/nowhere/resource2") && said.contains("No such file"), "{said}");
}
