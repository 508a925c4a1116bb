//! CPython's own test suites with the library as without it: every test has the same outcome.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use beeline_verify_clients::preload::Monitor;
use beeline_verify_clients::windows::Hosts;
use beeline_verify_clients::{bounded, deep, note, root, said, skip};

/// A Python that has its test package, or `None` after saying that `test` is skipped.
fn python(test: &str) -> Option<PathBuf> {
    let found = ["python3", "/usr/bin/python3"].into_iter().map(PathBuf::from).find(|python| {
        let mut probe = Command::new(python);
        probe.args(["-c", "import test.test_socket"]).stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    });
    if found.is_none() {
        skip(test, "Python's own tests are not installed; `cargo xtask setup` fetches them");
    }
    found
}

/// Outcome by test, and what the run said.
type Outcomes = (BTreeMap<String, String>, String);

fn run(mut command: Command, seconds: u64) -> Outcomes {
    let folder = tempfile::tempdir().unwrap();
    command.current_dir(folder.path());
    let output = bounded(&mut command, Duration::from_secs(seconds + 30));
    let text = said(&output);
    let outcomes = text
        .lines()
        .filter_map(|line| line.strip_prefix("outcome ")?.split_once(' '))
        .map(|(test, outcome)| (test.to_owned(), outcome.to_owned()))
        .collect();
    (outcomes, text)
}

/// Tests that are about something else than what a program can rely on, and why.
const EXCEPTIONS: [(&str, &str); 1] = [(
    "test_sendfile_close_peer_in_the_middle_of_receiving",
    "counts on a send buffer smaller than what it sends; a ring holds it all",
)];

/// Tests whose outcome with the library is another than without.
fn differing(with: &Outcomes, without: &Outcomes) -> Vec<String> {
    let all = with.0.keys().chain(without.0.keys());
    let excepted = |test: &str| EXCEPTIONS.iter().any(|(name, _)| test.ends_with(name));
    let mut names: Vec<String> = all
        .filter(|test| with.0.get(*test) != without.0.get(*test) && !excepted(test))
        .cloned()
        .collect();
    names.sort();
    names.dedup();
    names
}

/// Runs `names` both ways, as [`same_outcomes_at`] does.
fn same_outcomes(test: &str, names: &[&str], seconds: u64) {
    let Some(python) = python(test) else { return };
    let script = root().join("verify/clients/python/suite.py").to_string_lossy().into_owned();
    let limit = seconds.to_string();
    let python = python.to_string_lossy().into_owned();
    same_outcomes_at(&Monitor::start(), &python, &script, &limit, names, seconds);
}

/// Runs `names` both ways, at once, at the host of this monitor; what differs gets a second chance, alone.
fn same_outcomes_at(
    monitor: &Monitor,
    python: &str,
    script: &str,
    limit: &str,
    names: &[&str],
    seconds: u64,
) {
    let both = |names: &[&str]| {
        let mut words = vec![python, script, limit];
        words.extend(names);
        let (with, without) = (monitor.command(true, &words), monitor.command(false, &words));
        let without = std::thread::spawn(move || run(without, seconds));
        let with = run(with, seconds);
        (with, without.join().unwrap())
    };
    let (with, without) = both(names);
    assert!(without.0.contains_key("all"), "the suites do not end here at all: {}", without.1);
    let mut differ = differing(&with, &without);
    let mut seen = with.1;
    if !differ.is_empty() && with.0.contains_key("all") {
        let again: Vec<&str> = differ.iter().map(String::as_str).collect();
        let (with, without) = both(&again);
        differ = differing(&with, &without);
        seen.push_str(&with.1);
    }
    assert!(differ.is_empty(), "with the library these end otherwise: {differ:#?}\n{seen}");
    let passed = with.0.values().filter(|outcome| *outcome == "passed").count();
    assert!(passed > 0, "{seen}");
    note(&format!("{passed} of Python's own tests pass with the library as without"));
}

#[test]
fn selectors_poll_select_and_epoll_behave_as_without_the_library() {
    let test = "selectors_poll_select_and_epoll_behave_as_without_the_library";
    let names = ["test.test_selectors", "test.test_select", "test.test_poll", "test.test_epoll"];
    same_outcomes(test, &names, 120);
}

#[test]
fn socket_servers_behave_as_without_the_library() {
    let names = ["test.test_socketserver"];
    same_outcomes("socket_servers_behave_as_without_the_library", &names, 120);
}

#[test]
fn sockets_behave_as_without_the_library() {
    let some = [
        "BasicTCPTest",
        "BasicTCPTest2",
        "NonBlockingTCPTests",
        "FileObjectClassTestCase",
        "UnbufferedFileObjectClassTestCase",
        "LineBufferedFileObjectClassTestCase",
        "SmallBufferedFileObjectClassTestCase",
        "NetworkConnectionNoServer",
        "NetworkConnectionAttributesTest",
        "NetworkConnectionBehaviourTest",
        "TCPTimeoutTest",
        "TCPCloserTest",
        "BufferIOTest",
        "ContextManagersTest",
        "InheritanceTest",
        "NonblockConstantTest",
        "SendmsgTCPTest",
        "RecvmsgTCPTest",
        "RecvmsgIntoTCPTest",
        "SendfileUsingSendTest",
        "SendfileUsingSendfileTest",
    ];
    let some: Vec<String> = some.iter().map(|name| format!("test.test_socket.{name}")).collect();
    let some: Vec<&str> = some.iter().map(String::as_str).collect();
    let all = ["test.test_socket"];
    let names: &[&str] = if deep() { &all } else { &some };
    same_outcomes("sockets_behave_as_without_the_library", names, 300);
}

#[test]
fn asyncio_behaves_as_without_the_library() {
    let some = ["test.test_asyncio.test_streams", "test.test_asyncio.test_sock_lowlevel"];
    let more = [
        "test.test_asyncio.test_server",
        "test.test_asyncio.test_ssl",
        "test.test_asyncio.test_sslproto",
        "test.test_asyncio.test_sendfile",
        "test.test_asyncio.test_selector_events",
        "test.test_asyncio.test_events",
        "test.test_asyncio.test_subprocess",
    ];
    let all: Vec<&str> = some.iter().chain(&more).copied().collect();
    let names: &[&str] = if deep() { &all } else { &some };
    same_outcomes("asyncio_behaves_as_without_the_library", names, 300);
}

#[test]
fn http_behaves_as_without_the_library() {
    let some = ["test.test_httplib"];
    let all = ["test.test_httplib", "test.test_httpservers", "test.test_urllib2_localnet"];
    let names: &[&str] = if deep() { &all } else { &some };
    same_outcomes("http_behaves_as_without_the_library", names, 300);
}

#[test]
fn tls_behaves_as_without_the_library() {
    let some = [
        "test_echo",
        "test_starttls",
        "test_socketserver",
        "test_recv_send",
        "test_recv_zero",
        "test_nonblocking_send",
        "test_sendfile",
        "test_server_accept",
        "test_handshake_timeout",
        "test_read_write_after_close_raises_valuerror",
    ];
    let some: Vec<String> =
        some.iter().map(|name| format!("test.test_ssl.ThreadedTests.{name}")).collect();
    let some: Vec<&str> = some.iter().map(String::as_str).collect();
    let all = ["test.test_ssl"];
    let names: &[&str] = if deep() { &all } else { &some };
    same_outcomes("tls_behaves_as_without_the_library", names, 300);
}

/// Every test of Python's makes both ends in one process, so that none crosses a window: here they have a proxy of the
/// packet lane beside them, which is asked of each connection.
#[test]
fn sockets_behave_beside_a_proxy_as_without_the_library() {
    let test = "sockets_behave_beside_a_proxy_as_without_the_library";
    if !deep() {
        return skip(test, "a long one: `cargo xtask deep` runs it");
    }
    let Some(python) = python(test) else { return };
    let script = root().join("verify/clients/python/suite.py").to_string_lossy().into_owned();
    let python = python.to_string_lossy().into_owned();
    let hosts = Hosts::both_up();
    let names = [
        "test.test_socket",
        "test.test_selectors",
        "test.test_asyncio.test_streams",
        "test.test_asyncio.test_sock_lowlevel",
    ];
    same_outcomes_at(&hosts.monitors[0], &python, &script, "600", &names, 600);
    for side in 0..2 {
        assert_eq!((hosts.sum(side, "drops"), hosts.connections(side)), (0, 0));
    }
}
