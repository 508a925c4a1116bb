//! Unmodified servers and clients of two hosts, over the fabric, in every pairing; processes that
//! hand connections to each other.
//!
//! Skipped, with the reason, where network namespaces cannot be made.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use beeline_verify_clients::hosts::{ADDRESSES, Hosts};
use beeline_verify_clients::preload::Background;
use beeline_verify_clients::{bounded, eventually, need, note, root, said, skip};

const PATIENCE: Duration = Duration::from_secs(60);
const PORT: u16 = 6000;
/// Server accelerated, client accelerated.
const PAIRINGS: [(bool, bool); 4] = [(true, true), (true, false), (false, true), (false, false)];

fn has_all(test: &str, programs: &[&str]) -> bool {
    programs.iter().all(|program| need(test, program).is_some())
}

/// A server that is asked to end, so that its children end with it.
struct Server(Background);

impl Server {
    fn start(hosts: &Hosts, accelerated: bool, words: &[&str]) -> Self {
        let mut command = hosts.hosts[0].monitor().command(accelerated, words);
        let server = Background::start(command.env("SOCKETS_HOST", ADDRESSES[0]));
        hosts.hosts[0].listening(PORT);
        Self(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-TERM", &self.0.0.id().to_string()]).status();
        for _ in 0..250 {
            if self.0.0.try_wait().is_ok_and(|ended| ended.is_some()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn ask(hosts: &Hosts, accelerated: bool, words: &[&str]) -> String {
    let mut command = hosts.hosts[1].monitor().command(accelerated, words);
    let output = bounded(command.env("SOCKETS_HOST", ADDRESSES[0]), PATIENCE);
    assert!(output.status.success(), "{words:?}: {}", said(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What both relays sent while `part` ran.
fn moved(hosts: &Hosts, part: impl FnOnce()) -> [u64; 2] {
    let before = hosts.sent();
    part();
    let now = hosts.sent();
    [0, 1].map(|at| now[at] - before[at])
}

fn judge(pair: (bool, bool), moved: [u64; 2], least: u64) {
    if pair == (true, true) {
        assert!(moved.iter().any(|&bytes| bytes > least), "{moved:?} bytes over the fabric");
    } else {
        assert_eq!(moved, [0, 0], "server, client: {pair:?}");
    }
}

#[test]
fn connections_go_on_in_children_other_programs_and_receivers() {
    let test = "connections_go_on_in_children_other_programs_and_receivers";
    if !has_all(test, &["python3"]) {
        return;
    }
    let Some(mut hosts) = Hosts::start(test, "tcp") else { return };
    let script = root().join("verify/clients/python/sockets_echo.py");
    let (script, port) = (script.to_string_lossy().into_owned(), PORT.to_string());
    for mode in ["serve", "fork", "exec", "pass"] {
        let _server = Server::start(&hosts, true, &["python3", &script, mode, &port]);
        if mode == "serve" {
            // Relays that begin to know each other may come too late for a short conversation.
            eventually("a conversation by the relays", PATIENCE, || {
                let words = ["python3", &script, "ask", &port, "block", "400"];
                let moved = moved(&hosts, || _ = ask(&hosts, true, &words));
                moved.iter().all(|&bytes| bytes > 0).then_some(())
            });
        }
        for how in ["block", "timeout", "poll"] {
            let moved = moved(&hosts, || {
                let text = ask(&hosts, true, &["python3", &script, "ask", &port, how, "400"]);
                assert!(text.contains("echoed"), "{mode} {how}: {text}");
            });
            // One that is handed on early stays with the kernel: it may.
            let least = if mode == "pass" || mode == "exec" { 0 } else { 300_000 };
            assert!(moved.iter().all(|&bytes| bytes >= least), "{mode} {how}: {moved:?}");
        }
        hosts.all_let_go();
    }
    // The monitor that handed the connection to the relay is gone when the program changes.
    let host = &mut hosts.hosts[0];
    host.monitor = host.monitor.take().map(beeline_verify_clients::preload::Monitor::restart);
    let _server = Server::start(&hosts, true, &["python3", &script, "fork", &port]);
    let _ = ask(&hosts, true, &["python3", &script, "ask", &port, "block", "100"]);
    hosts.all_let_go();
}

#[test]
fn redis_serves_another_host_in_every_pairing() {
    let test = "redis_serves_another_host_in_every_pairing";
    if !has_all(test, &["redis-server", "redis-cli", "redis-benchmark"]) {
        return;
    }
    let Some(hosts) = Hosts::start(test, "tcp") else { return };
    for pair in PAIRINGS {
        let moved = redis_serves(&hosts, pair);
        judge(pair, moved, 10_000_000);
        if pair == (true, true) {
            note(&format!("redis-benchmark between hosts, {moved:?} bytes over the fabric"));
        }
    }
    hosts.all_let_go();
}

#[test]
fn redis_serves_another_host_whose_connections_go_to_and_fro() {
    let test = "redis_serves_another_host_whose_connections_go_to_and_fro";
    if !has_all(test, &["redis-server", "redis-cli", "redis-benchmark"]) {
        return;
    }
    // As soon as its programs sleep, the kernel has a connection, for a second.
    let Some(hosts) = Hosts::start_with(test, "tcp", [true, true], 1) else { return };
    let moved = redis_serves(&hosts, (true, true));
    let recalled = [0, 1].map(|at| hosts.hosts[at].count("recalled"));
    note(&format!("{moved:?} bytes over the fabric, {recalled:?} times back to the kernel"));
    hosts.all_let_go();
}

/// What both relays sent for redis with its own tools.
fn redis_serves(hosts: &Hosts, pair: (bool, bool)) -> [u64; 2] {
    let folder = tempfile::tempdir().unwrap();
    let (port, host) = (PORT.to_string(), ADDRESSES[0]);
    let folder = folder.path().to_string_lossy().into_owned();
    let words = ["redis-server", "--bind", host, "--protected-mode", "no", "--port", &port];
    let words: Vec<&str> = words.into_iter().chain(["--save", "", "--dir", &folder]).collect();
    let _server = Server::start(hosts, pair.0, &words);
    let cli = |words: &[&str]| {
        let all = ["redis-cli", "-h", host, "-p", &port];
        let all: Vec<&str> = all.into_iter().chain(words.iter().copied()).collect();
        ask(hosts, pair.1, &all).trim_end().to_owned()
    };
    moved(hosts, || {
        assert_eq!(cli(&["SET", "key", "value"]), "OK");
        for more in [&["-P", "1"][..], &["-P", "16", "-d", "3000"]] {
            let load = ["redis-benchmark", "-h", host, "-p", &port, "-t", "set,get", "-q"];
            let load = load.into_iter().chain(["-n", "5000", "-c", "8"]);
            let load: Vec<&str> = load.chain(more.iter().copied()).collect();
            let text = ask(hosts, pair.1, &load);
            assert!(text.contains("GET"), "{text}");
        }
        assert!(cli(&["BGSAVE"]).contains("Background"), "{pair:?}");
        assert_eq!(cli(&["GET", "key"]), "value");
    })
}

fn configuration(folder: &Path) -> String {
    let place = format!("{}:{PORT}", ADDRESSES[0]);
    let folder = folder.display();
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {folder}/{name};"))
        .join(" ");
    format!(
        "user root; worker_processes 2; daemon off; pid {folder}/pid; error_log {folder}/errors;
         events {{ worker_connections 256; }}
         http {{
             access_log off; {paths} sendfile on; tcp_nopush on; keepalive_timeout 30;
             server {{ listen {place}; root {folder}/files; }}
         }}"
    )
}

#[test]
fn nginx_serves_curl_and_wrk_of_another_host_in_every_pairing() {
    let test = "nginx_serves_curl_and_wrk_of_another_host_in_every_pairing";
    if !has_all(test, &["curl", "wrk"]) {
        return;
    }
    let nginx = ["/usr/sbin/nginx", "/usr/bin/nginx"].into_iter().find(|p| Path::new(p).is_file());
    let Some(nginx) = nginx else {
        skip(test, "nginx is not installed; `cargo xtask setup` fetches it");
        return;
    };
    let Some(hosts) = Hosts::start(test, "tcp") else { return };
    let folder = tempfile::tempdir().unwrap();
    let files = folder.path().join("files");
    std::fs::create_dir(&files).unwrap();
    let body: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 253) as u8).collect();
    std::fs::write(files.join("large"), &body).unwrap();
    std::fs::write(files.join("small"), "small\n").unwrap();
    let text = configuration(folder.path());
    std::fs::write(folder.path().join("configuration"), text).unwrap();
    let named = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    for pair in PAIRINGS {
        let words = [nginx, "-e", &named("errors"), "-c", &named("configuration")];
        let _server = Server::start(&hosts, pair.0, &words);
        let url = |path: &str| format!("http://{}:{PORT}/{path}", ADDRESSES[0]);
        let moved = moved(&hosts, || {
            let fetched = named("fetched");
            let all = ["curl", "-sS", "--max-time", "50", "-o", &fetched];
            let urls = [url("large"), url("large"), url("small")];
            let all = all.into_iter().chain(["-o", &fetched, "-o", "/dev/null"]);
            let all: Vec<&str> = all.chain(urls.iter().map(String::as_str)).collect();
            let _ = ask(&hosts, pair.1, &all);
            assert_eq!(std::fs::read(&fetched).unwrap(), body, "{pair:?}");
            for (path, connections) in [("small", "20"), ("large", "4")] {
                let url = url(path);
                let all = ["wrk", "-t1", "-c", connections, "-d1", "--timeout", "20", &url];
                let text = ask(&hosts, pair.1, &all);
                let wrong = ["Socket errors", "Non-2xx"].iter().any(|word| text.contains(word));
                assert!(!wrong && text.contains("Requests/sec"), "{pair:?}: {text}");
            }
        });
        judge(pair, moved, 20_000_000);
        if pair == (true, true) {
            note(&format!(
                "wrk and curl from nginx between hosts, {moved:?} bytes over the fabric"
            ));
        }
    }
    hosts.all_let_go();
}
