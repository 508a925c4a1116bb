//! Unmodified programs with user-space sockets, in each pairing: both ends accelerated, only the
//! server, only the client.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use beeline_verify_clients::preload::{Background, Monitor, library, listening};
use beeline_verify_clients::{bounded, eventually, free_port, need, root, said};

const PATIENCE: Duration = Duration::from_secs(60);

/// Server accelerated, client accelerated.
const PAIRINGS: [(bool, bool); 3] = [(true, true), (true, false), (false, true)];

fn script() -> String {
    root().join("verify/clients/python/sockets_echo.py").to_string_lossy().into_owned()
}

fn conversations(test: &str, server_mode: &str) {
    conversations_that_ask_after(test, server_mode, "0", &PAIRINGS);
}

/// `calls`: calls after which an end asks the monitor.
fn conversations_that_ask_after(
    test: &str,
    server_mode: &str,
    calls: &str,
    pairings: &[(bool, bool)],
) {
    if need(test, "python3").is_none() {
        return;
    }
    let script = script();
    for &(server, client) in pairings {
        let monitor = Monitor::start();
        let port = free_port();
        let text = port.to_string();
        let words = ["python3", &script, server_mode, &text];
        let mut command = monitor.command(server, &words);
        let _server = Background::start(command.env("BEELINE_SOCKETS_ASK_AFTER", calls));
        listening(port);
        for how in ["block", "timeout", "poll"] {
            let words = ["python3", &script, "ask", &text, how, "120"];
            let mut command = monitor.command(client, &words);
            let output = bounded(command.env("BEELINE_SOCKETS_ASK_AFTER", calls), PATIENCE);
            let said = said(&output);
            assert!(said.contains("echoed"), "{server} {client} {how}: {said}");
        }
        let expected = if server && client { 3 } else { 0 };
        assert_eq!(monitor.paired(), expected, "server {server}, client {client}");
    }
}

#[test]
fn python_talks_in_every_pairing_blocking_with_time_outs_and_by_epoll() {
    let test = "python_talks_in_every_pairing_blocking_with_time_outs_and_by_epoll";
    conversations(test, "serve");
}

#[test]
fn a_forked_child_serves_the_connection_its_parent_accepted() {
    conversations("a_forked_child_serves_the_connection_its_parent_accepted", "fork");
}

#[test]
fn a_connection_goes_on_in_the_program_that_exec_brings() {
    conversations("a_connection_goes_on_in_the_program_that_exec_brings", "exec");
}

#[test]
fn a_connection_changes_over_when_it_has_shown_that_it_lives() {
    let test = "a_connection_changes_over_when_it_has_shown_that_it_lives";
    for mode in ["serve", "fork", "exec", "pass"] {
        conversations_that_ask_after(test, mode, "7", &PAIRINGS[..1]);
    }
}

#[test]
fn a_connection_for_each_request_stays_the_kernels_and_nobody_is_asked() {
    if need("a_connection_for_each_request", "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let port = free_port().to_string();
    let words = ["python3", &script(), "serve", &port];
    let mut command = monitor.command(true, &words);
    let _server = Background::start(command.env_remove("BEELINE_SOCKETS_ASK_AFTER"));
    listening(port.parse().unwrap());
    for how in ["block", "timeout", "poll"] {
        let mut command = monitor.command(true, &["python3", &script(), "ask", &port, how, "3"]);
        let output = bounded(command.env_remove("BEELINE_SOCKETS_ASK_AFTER"), PATIENCE);
        let said = said(&output);
        assert!(said.contains("echoed"), "{how}: {said}");
    }
    let status = monitor.status().unwrap();
    assert_eq!((status["asked"].as_u64(), monitor.paired()), (Some(0), 0));
}

#[test]
fn a_connection_sent_in_a_message_goes_on_at_its_receiver() {
    conversations("a_connection_sent_in_a_message_goes_on_at_its_receiver", "pass");
}

#[test]
fn curl_fetches_from_python_in_every_pairing() {
    let test = "curl_fetches_from_python_in_every_pairing";
    if need(test, "python3").is_none() || need(test, "curl").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let body: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 253) as u8).collect();
    std::fs::write(folder.path().join("body"), &body).unwrap();
    for (server, client) in PAIRINGS {
        let monitor = Monitor::start();
        let port = free_port();
        let words = ["python3", "-m", "http.server", "--bind", "127.0.0.1", &port.to_string()]
            .map(str::to_owned);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut command = monitor.command(server, &words);
        let _server = Background::start(command.current_dir(folder.path()));
        listening(port);
        let fetched = folder.path().join("fetched");
        let url = format!("http://127.0.0.1:{port}/body");
        let words = ["curl", "-sS", "--max-time", "50", "-o", fetched.to_str().unwrap(), &url];
        let _ = monitor.run(client, &words);
        assert_eq!(std::fs::read(&fetched).unwrap(), body, "server {server}, client {client}");
    }
}

#[test]
fn redis_serves_its_own_tools_in_every_pairing() {
    let test = "redis_serves_its_own_tools_in_every_pairing";
    if ["redis-server", "redis-cli", "redis-benchmark"].iter().any(|p| need(test, p).is_none()) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (server, client) in PAIRINGS {
        let monitor = Monitor::start();
        let port = free_port();
        let text = port.to_string();
        let words = ["redis-server", "--port", &text, "--save", "", "--dir"];
        let mut command = monitor.command(server, &words);
        let _server = Background::start(command.arg(folder.path()));
        listening(port);
        let cli = |words: &[&str]| {
            let all: Vec<&str> =
                ["redis-cli", "-p", &text].into_iter().chain(words.iter().copied()).collect();
            monitor.run(client, &all).trim_end().to_owned()
        };
        assert_eq!(cli(&["SET", "key", "value"]), "OK");
        let load = ["redis-benchmark", "-p", &text, "-t", "set,get", "-n", "5000", "-q", "-c", "8"];
        for more in [&["-P", "1"][..], &["-P", "16", "-d", "3000"]] {
            let words: Vec<&str> = load.iter().chain(more).copied().collect();
            let said = monitor.run(client, &words);
            assert!(said.contains("GET"), "{said}");
        }
        // A child that snapshots beside live connections.
        assert!(cli(&["BGSAVE"]).contains("Background"), "server {server}, client {client}");
        assert_eq!(cli(&["GET", "key"]), "value");
        if server && client {
            assert!(monitor.paired() > 10, "{:?}", monitor.status());
        } else {
            assert_eq!(monitor.paired(), 0);
        }
    }
}

#[test]
fn a_killed_monitor_harms_no_connection_and_a_new_one_serves_new_ones() {
    let test = "a_killed_monitor_harms_no_connection_and_a_new_one_serves_new_ones";
    if need(test, "python3").is_none() {
        return;
    }
    let script = script();
    let mut monitor = Monitor::start();
    let port = free_port();
    let text = port.to_string();
    let words = ["python3", &script, "serve", &text];
    let _server = Background::start(&mut monitor.command(true, &words));
    listening(port);
    let words = ["python3", &script, "ask", &text, "block", "3000"];
    let mut talking = monitor.command(true, &words);
    let talk = std::thread::spawn(move || bounded(&mut talking, PATIENCE));
    eventually("the two are introduced", PATIENCE, || (monitor.paired() == 1).then_some(()));
    std::thread::sleep(Duration::from_millis(50));
    monitor = monitor.restart();
    let output = talk.join().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let words = ["python3", &script, "ask", &text, "block", "10"];
    let said = monitor.run(true, &words);
    assert!(said.contains("echoed"), "{said}");
    assert_eq!(monitor.paired(), 1);
}

#[test]
fn a_client_killed_in_the_middle_is_an_end_for_the_server() {
    let test = "a_client_killed_in_the_middle_is_an_end_for_the_server";
    if need(test, "python3").is_none() {
        return;
    }
    let script = script();
    let monitor = Monitor::start();
    let port = free_port();
    let text = port.to_string();
    let words = ["python3", &script, "serve", &text];
    let _server = Background::start(&mut monitor.command(true, &words));
    listening(port);
    for round in 0..10 {
        let words = ["python3", &script, "ask", &text, "block", "100000"];
        let client = Background::start(&mut monitor.command(true, &words));
        std::thread::sleep(Duration::from_millis(150 + round * 7));
        drop(client);
    }
    let words = ["python3", &script, "ask", &text, "block", "20"];
    assert!(monitor.run(true, &words).contains("echoed"));
}

/// Echoes 8 bytes so many times, with `recv` and `send` only.
const PING_PONG: &str = "
import socket, sys, time
port, rounds = int(sys.argv[2]), int(sys.argv[3])
if sys.argv[1] == 'serve':
    l = socket.socket(); l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    l.bind(('127.0.0.1', port)); l.listen(4)
    while True:
        c, _ = l.accept()
        while d := c.recv(8): c.send(d)
        c.close()
c = socket.create_connection(('127.0.0.1', port))
t = time.perf_counter()
for _ in range(rounds):
    c.send(b'12345678')
    assert c.recv(8) == b'12345678'
print(1e6 * (time.perf_counter() - t) / rounds)
";

#[test]
fn a_program_that_waits_costs_no_processor_time() {
    let test = "a_program_that_waits_costs_no_processor_time";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let port = free_port();
    let text = port.to_string();
    let words = ["python3", "-c", PING_PONG, "serve", &text, "0"];
    let server = Background::start(&mut monitor.command(true, &words));
    listening(port);
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let idle = "import socket, sys
c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
for _ in range(200): c.send(b'12345678'); c.recv(8)
open(sys.argv[2], 'w').close(); c.recv(8)";
    let words = ["python3", "-c", idle, &text, ready.to_str().unwrap()];
    let client = Background::start(&mut monitor.command(true, &words));
    eventually("the client waits", PATIENCE, || ready.exists().then_some(()));
    // How often a process was given a processor, or taken from one: a sleeper that is not woken, never.
    let switches = |process: u32| -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        let statuses =
            tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("status")));
        let of = |status: &str| -> u64 {
            let counts = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
            counts.map(|(_, count)| count.trim().parse::<u64>().unwrap()).sum()
        };
        statuses.map(|status| of(&status.unwrap())).sum()
    };
    // Waits begin busily. One that looked by the clock would never come to a second without.
    eventually("a second in which neither ran", PATIENCE, || {
        let both = || (switches(server.0.id()), switches(client.0.id()));
        let before = both();
        std::thread::sleep(Duration::from_secs(1));
        (both() == before).then_some(())
    });
    assert_eq!(monitor.paired(), 1);
}

#[test]
fn the_benchmark_runs_in_its_tiny_setting() {
    let monitor = Monitor::start();
    let library = library().to_string_lossy().into_owned();
    let mut command = monitor.command(true, &["true"]);
    let name = command
        .get_envs()
        .find(|(name, _)| *name == "BEELINE_SOCKETS_MONITOR")
        .and_then(|(_, value)| value.map(std::ffi::OsStr::to_owned))
        .unwrap();
    command = beeline_verify_clients::beeline(&[
        "bench",
        "sockets",
        "--quick",
        "--json",
        "--parts",
        "data,connections,core,pipeline,redis,sizes,pairs,many,rpc,breakdown",
        "--library",
        &library,
    ]);
    let output = bounded(command.env("BEELINE_SOCKETS_MONITOR", name), PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).matches("kernel TCP").count() >= 3, "{}", said(&output));
    assert!(monitor.paired() >= 3);
}
