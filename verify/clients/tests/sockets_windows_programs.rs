//! Unmodified servers and clients of two hosts in network namespaces of their own, through a memory window:
//! nginx and wrk, memcached, iperf3, HAProxy before redis, Node, PostgreSQL and pgbench; many connections,
//! many bytes, and three hosts. Short here, long in `cargo xtask deep`.
//!
//! Skipped, with the reason, where network namespaces cannot be made or a program is missing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use beeline_verify_clients::hosts::ADDRESSES;
use beeline_verify_clients::preload::Background;
use beeline_verify_clients::windows::{Hosts, listens};
use beeline_verify_clients::{bounded, deep, eventually, need, note, said, skip};

const PATIENCE: Duration = Duration::from_secs(120);
const PORT: u16 = 7000;

fn has_all(test: &str, programs: &[&str]) -> bool {
    programs.iter().all(|program| need(test, program).is_some())
}

/// Two hosts, if `test` can have them and all of `programs`.
fn hosts(test: &str, programs: &[&str]) -> Option<Hosts> {
    if !has_all(test, programs) {
        return None;
    }
    Hosts::in_namespaces(test, ["partitions = 2", ""])
}

/// A server at the second host, asked to end so that its children end with it.
struct Server(Background);

impl Server {
    fn start(hosts: &Hosts, port: u16, words: &[&str]) -> Self {
        Self::start_at(hosts, 1, port, words)
    }

    fn start_at(hosts: &Hosts, side: usize, port: u16, words: &[&str]) -> Self {
        let server = Background::start(&mut hosts.monitors[side].command(true, words));
        listens(server.process(), port);
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

/// What `words` say at the first host.
fn ask(hosts: &Hosts, words: &[&str]) -> String {
    let output = bounded(&mut hosts.monitors[0].command(true, words), PATIENCE);
    assert!(output.status.success(), "{words:?}: {}", said(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Bytes that went through the window, in both directions, while `part` ran: at least so many, none dropped,
/// and nothing is left of it.
fn through_the_window(hosts: &Hosts, least: u64, part: impl FnOnce()) {
    let sent = || hosts.sum(0, "bytes sent") + hosts.sum(1, "bytes sent");
    let before = sent();
    part();
    let moved = sent() - before;
    assert!(moved >= least, "{moved} bytes through the window");
    for side in 0..2 {
        assert_eq!(hosts.sum(side, "drops"), 0);
    }
    note(&format!("{moved} bytes through the window"));
}

fn nothing_is_left(hosts: &Hosts) {
    for side in 0..2 {
        eventually("no connection is left", PATIENCE, || {
            (hosts.connections(side) == 0 && hosts.sum(side, "connections") == 0).then_some(())
        });
    }
}

#[test]
fn nginx_serves_wrk_and_curl_through_the_window() {
    let test = "nginx_serves_wrk_and_curl_through_the_window";
    let nginx =
        ["/usr/sbin/nginx", "/usr/bin/nginx"].into_iter().find(|path| Path::new(path).is_file());
    let Some(nginx) = nginx else {
        return skip(test, "nginx is not installed; `cargo xtask setup` fetches it");
    };
    let Some(hosts) = hosts(test, &["wrk", "curl"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let named = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    std::fs::create_dir(named("files")).unwrap();
    let body: Vec<u8> = (0..2_000_000_u32).map(|at| (at % 253) as u8).collect();
    std::fs::write(named("files/large"), &body).unwrap();
    std::fs::write(named("files/small"), "small\n").unwrap();
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {};", named(name)))
        .join(" ");
    let text = format!(
        "user root; worker_processes 2; daemon off; pid {0}/pid; error_log {0}/errors;
         events {{ worker_connections 256; }}
         http {{ access_log off; {paths} sendfile on; tcp_nopush on; keepalive_timeout 30;
             server {{ listen {1}:{PORT}; root {0}/files; }} }}",
        folder.path().display(),
        ADDRESSES[1],
    );
    std::fs::write(named("configuration"), text).unwrap();
    let server = Server::start(
        &hosts,
        PORT,
        &[nginx, "-e", &named("errors"), "-c", &named("configuration")],
    );
    let url = |path: &str| format!("http://{}:{PORT}/{path}", ADDRESSES[1]);
    through_the_window(&hosts, 5_000_000, || {
        let fetched = named("fetched");
        let _ = ask(&hosts, &["curl", "-sS", "--max-time", "100", "-o", &fetched, &url("large")]);
        assert_eq!(std::fs::read(&fetched).unwrap(), body);
        let seconds = if deep() { "-d20" } else { "-d1" };
        for (path, connections) in [("small", "20"), ("large", "4")] {
            let all = ["wrk", "-t1", "-c", connections, seconds, "--timeout", "60", &url(path)];
            let text = ask(&hosts, &all);
            let wrong = ["Socket errors", "Non-2xx"].iter().any(|word| text.contains(word));
            assert!(!wrong && text.contains("Requests/sec"), "{text}");
        }
    });
    drop(server);
    nothing_is_left(&hosts);
}

#[test]
fn memcached_keeps_what_clients_of_the_other_host_store() {
    let test = "memcached_keeps_what_clients_of_the_other_host_store";
    let Some(hosts) = hosts(test, &["memcached", "python3"]) else { return };
    let port = PORT.to_string();
    let mut line = vec!["memcached", "-l", ADDRESSES[1], "-p", &port, "-U", "0", "-t", "2"];
    if rustix::process::geteuid().is_root() {
        line.extend(["-u", "root"]);
    }
    let server = Server::start(&hosts, PORT, &line);
    let code = "import socket, sys, threading
def one(n):
    c = socket.create_connection((sys.argv[1], int(sys.argv[2]))).makefile('rwb')
    for i in range(int(sys.argv[3])):
        key, value = b'k%d-%d' % (n, i), bytes([n]) * (1 + i * 97 % 9000)
        c.write(b'set %s 0 0 %d\\r\\n%s\\r\\n' % (key, len(value), value)); c.flush()
        assert c.readline() == b'STORED\\r\\n'
        c.write(b'get %s\\r\\n' % key); c.flush()
        assert c.readline() == b'VALUE %s 0 %d\\r\\n' % (key, len(value))
        assert c.read(len(value) + 2)[:-2] == value and c.readline() == b'END\\r\\n'
    done.append(n)
done = []
threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
print(len(done))
";
    let rounds = if deep() { "5000" } else { "100" };
    through_the_window(&hosts, 1_000_000, || {
        assert_eq!(ask(&hosts, &["python3", "-c", code, ADDRESSES[1], &port, rounds]), "8\n");
    });
    drop(server);
    nothing_is_left(&hosts);
}

#[test]
fn iperf3_measures_both_ways_through_the_window() {
    let test = "iperf3_measures_both_ways_through_the_window";
    let Some(hosts) = hosts(test, &["iperf3"]) else { return };
    let port = PORT.to_string();
    let server = Server::start(&hosts, PORT, &["iperf3", "-s", "-B", ADDRESSES[1], "-p", &port]);
    // Item 7: as many bytes as there is time for, all of them there.
    let bytes = if deep() { "10G" } else { "40M" };
    let least = if deep() { 20_000_000_000 } else { 80_000_000 };
    through_the_window(&hosts, least, || {
        for more in [&["-P", "2"][..], &["-R"]] {
            let mut line = vec!["iperf3", "-c", ADDRESSES[1], "-J", "-p", &port, "-n", bytes];
            line.extend(more);
            // A server that has yet to end the last test says that it is busy.
            eventually("iperf3", PATIENCE * 10, || {
                let mut command = hosts.monitors[0].command(true, &line);
                let output = bounded(&mut command, PATIENCE * 10);
                said(&output).contains("sum_received").then_some(())
            });
        }
    });
    drop(server);
    nothing_is_left(&hosts);
}

#[test]
fn haproxy_of_one_host_stands_before_redis_of_the_other() {
    let test = "haproxy_of_one_host_stands_before_redis_of_the_other";
    let haproxy = ["/usr/sbin/haproxy", "/usr/bin/haproxy"]
        .into_iter()
        .find(|path| Path::new(path).is_file());
    let Some(haproxy) = haproxy else {
        return skip(test, "haproxy is not installed; `cargo xtask setup` fetches it");
    };
    let programs = ["redis-server", "redis-cli", "redis-benchmark"];
    let Some(hosts) = hosts(test, &programs) else { return };
    let folder = tempfile::tempdir().unwrap();
    let text = format!(
        "global\n    nbthread 2\ndefaults\n    mode tcp\n    timeout connect 10s\n    timeout client 60s\n    \
         timeout server 60s\nfrontend door\n    bind {}:{PORT}\n    default_backend store\nbackend store\n    \
         server one {}:6379\n",
        ADDRESSES[1], ADDRESSES[0],
    );
    let path = folder.path().join("haproxy").to_string_lossy().into_owned();
    std::fs::write(&path, text).unwrap();
    let folder_text = folder.path().to_string_lossy().into_owned();
    let words =
        ["redis-server", "--bind", ADDRESSES[0], "--protected-mode", "no", "--port", "6379"];
    let words: Vec<&str> = words.into_iter().chain(["--save", "", "--dir", &folder_text]).collect();
    let redis = Server::start_at(&hosts, 0, 6379, &words);
    let door = Server::start(&hosts, PORT, &[haproxy, "-db", "-f", &path]);
    let port = PORT.to_string();
    let count = if deep() { "200000" } else { "3000" };
    // There and back twice: from the client to the door, and from the door to the store.
    through_the_window(&hosts, 500_000, || {
        let cli = ["redis-cli", "-h", ADDRESSES[1], "-p", &port];
        assert_eq!(ask(&hosts, &[&cli[..], &["SET", "key", "value"]].concat()).trim(), "OK");
        let load = [
            "redis-benchmark",
            "-h",
            ADDRESSES[1],
            "-p",
            &port,
            "-t",
            "set,get",
            "-q",
            "-n",
            count,
        ];
        let text = ask(&hosts, &[&load[..], &["-c", "8", "-d", "100"]].concat());
        assert!(text.contains("GET"), "{text}");
        assert_eq!(ask(&hosts, &[&cli[..], &["GET", "key"]].concat()).trim(), "value");
    });
    drop((door, redis));
    nothing_is_left(&hosts);
}

#[test]
fn node_serves_and_asks_through_the_window() {
    let test = "node_serves_and_asks_through_the_window";
    let Some(hosts) = hosts(test, &["node"]) else { return };
    let code = "const http = require('http'), [mode, host, port, count] = process.argv.slice(1);
if (mode === 'serve') {
    http.createServer((req, res) => {
        const parts = [];
        req.on('data', part => parts.push(part)).on('end', () => res.end(Buffer.concat(parts)));
    }).listen(port, host);
} else {
    const agent = new http.Agent({ keepAlive: true, maxSockets: 6 });
    let left = +count, bytes = 0;
    for (let n = 0; n < +count; n++) {
        const body = Buffer.alloc(1 + n * 997 % 60000, n % 251);
        const req = http.request({ host, port, agent, method: 'POST' }, res => {
            const parts = [];
            res.on('data', part => parts.push(part)).on('end', () => {
                const all = Buffer.concat(parts);
                if (!all.equals(body)) { console.log('differs', n); process.exit(1); }
                bytes += all.length;
                if (--left === 0) { console.log('echoed', bytes); process.exit(0); }
            });
        });
        req.on('error', error => { console.log(error); process.exit(1); });
        req.end(body);
    }
}";
    let port = PORT.to_string();
    let count = if deep() { "20000" } else { "200" };
    let server = Server::start(&hosts, PORT, &["node", "-e", code, "serve", ADDRESSES[1], &port]);
    through_the_window(&hosts, 5_000_000, || {
        let text = ask(&hosts, &["node", "-e", code, "ask", ADDRESSES[1], &port, count]);
        assert!(text.starts_with("echoed"), "{text}");
    });
    drop(server);
    nothing_is_left(&hosts);
}

/// A process for each connection, and a server that will not run as root: both hosts are another user's.
#[test]
fn postgresql_serves_pgbench_through_the_window() {
    let test = "postgresql_serves_pgbench_through_the_window";
    if !deep() {
        return skip(test, "a long one: `cargo xtask deep` runs it");
    }
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok();
    let folders = versions.into_iter().flatten().flatten().map(|entry| entry.path().join("bin"));
    let Some(programs) = folders.filter(|folder| folder.join("pgbench").exists()).max() else {
        return skip(test, "PostgreSQL is not installed; `cargo xtask setup --deep` fetches it");
    };
    let user = "postgres";
    let mut probe = Command::new("setpriv");
    probe
        .args(["--reuid", user, "--clear-groups", "--", "test", "-x"])
        .arg(beeline_verify_clients::program());
    if !probe.status().is_ok_and(|status| status.success()) {
        return skip(test, "the user postgres may not run the program where it is");
    }
    let hosts = Hosts::in_namespaces_for(test, ["partitions = 2", ""], Some(user));
    let Some(hosts) = hosts else { return };
    let program = |name: &str| programs.join(name).to_string_lossy().into_owned();
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let mut give = Command::new("chown");
    assert!(give.arg(user).arg(folder.path()).status().unwrap().success());
    let mut make = hosts.place(1).command(program("initdb"));
    let output = bounded(make.args(["-D", &data, "-A", "trust", "--no-sync"]), PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    // By itself it lets in this host's own addresses alone.
    let rule = format!("host all all {}/32 trust\n", ADDRESSES[0]);
    std::fs::write(folder.path().join("data/pg_hba.conf"), rule).unwrap();
    let listen = format!("listen_addresses={}", ADDRESSES[1]);
    let port = PORT.to_string();
    let words =
        [&program("postgres"), "-D", &data, "-p", &port, "-c", "fsync=off", "-c", &listen, "-c"];
    let server = Server::start(&hosts, PORT, &[&words[..], &["unix_socket_directories="]].concat());
    let pgbench = program("pgbench");
    let ask = |more: &[&str]| {
        let line = [&[&pgbench, "-h", ADDRESSES[1], "-p", &port][..], more, &["postgres"]].concat();
        ask(&hosts, &line)
    };
    through_the_window(&hosts, 1_000_000, || {
        let _ = ask(&["-i", "-q", "-s", "1"]);
        for more in [&["-c", "4", "-j", "2", "-t", "500"][..], &["-C", "-S", "-c", "4", "-t", "50"]]
        {
            let text = ask(more);
            assert!(text.contains("failed transactions: 0 "), "{text}");
        }
    });
    drop(server);
    nothing_is_left(&hosts);
}

/// Item 9: connections made, used and closed, after which ports, contexts and descriptors are as before.
#[test]
fn thousands_of_connections_leave_nothing() {
    let test = "thousands_of_connections_leave_nothing";
    let Some(hosts) = hosts(test, &["python3"]) else { return };
    let server_code = "import socket, sys
l = socket.socket()
l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
l.bind((sys.argv[1], int(sys.argv[2])))
l.listen(128)
while True:
    c, _ = l.accept()
    c.sendall(c.recv(100))
    c.close()
";
    let client_code = "import os, socket, sys
before = len(os.listdir('/proc/self/fd'))
for n in range(int(sys.argv[3])):
    c = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    c.sendall(b'%d' % n)
    assert c.recv(100) == b'%d' % n
    assert c.recv(100) == b''
    c.close()
print(len(os.listdir('/proc/self/fd')) - before)
";
    let port = PORT.to_string();
    let server = Server::start(&hosts, PORT, &["python3", "-c", server_code, ADDRESSES[1], &port]);
    let descriptors = |side: usize| {
        let folder = format!("/proc/{}/fd", hosts.worker(side));
        std::fs::read_dir(folder).unwrap().count()
    };
    let run =
        |count: &str| ask(&hosts, &["python3", "-c", client_code, ADDRESSES[1], &port, count]);
    // The library keeps a page and a socket or two from the first on.
    let _ = run("20");
    nothing_is_left(&hosts);
    let before = [descriptors(0), descriptors(1)];
    let (count, number) = if deep() { ("100000", 100_000) } else { ("2000", 2_000) };
    let left = run(count);
    nothing_is_left(&hosts);
    for (side, before) in before.into_iter().enumerate() {
        // A monitor may hear somebody ask for the status.
        let now = descriptors(side);
        assert!(now <= before + 4, "{before} descriptors before, {now} now");
        assert_eq!(hosts.sum(side, "drops"), 0);
    }
    assert!(left.trim().parse::<i64>().unwrap() <= 4, "{left} descriptors left in the client");
    assert!(hosts.count(0, "connected") >= number);
    drop(server);
}

/// Item 33: two hosts call a third from equal ports at the same time.
#[test]
fn two_hosts_with_equal_ports_call_a_third() {
    let test = "two_hosts_with_equal_ports_call_a_third";
    if !has_all(test, &["python3"]) {
        return;
    }
    let Some(hosts) = Hosts::three(test) else { return };
    let server_code = "import socket, sys, threading
l = socket.socket()
l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
l.bind(('0.0.0.0', int(sys.argv[1])))
l.listen()
seen = []
def one(c, peer):
    while data := c.recv(10000):
        c.sendall(peer[0].encode() + b' ' + data)
    seen.append(peer)
threads = []
for _ in range(2):
    c, peer = l.accept()
    threads.append(threading.Thread(target=one, args=(c, peer)))
    threads[-1].start()
[t.join() for t in threads]
print(sorted(seen))
";
    let client_code = "import socket, sys
c = socket.socket()
c.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
c.bind((sys.argv[1], 40000))
c.connect((sys.argv[2], int(sys.argv[3])))
for n in range(300):
    word = b'%s-%d' % (sys.argv[1].encode(), n)
    c.sendall(word)
    want, got = sys.argv[1].encode() + b' ' + word, b''
    while len(got) < len(want):
        got += c.recv(10000)
    assert got == want, got
print('well')
";
    let port = PORT.to_string();
    let mut server = hosts.command(0, &["python3", "-c", server_code, &port]);
    let server = server.stdout(Stdio::piped()).spawn().unwrap();
    listens(server.id(), PORT);
    let clients: Vec<_> = [1, 2]
        .map(|host| {
            let words =
                ["python3", "-c", client_code, hosts.address(host), hosts.first_for(host), &port];
            hosts.command(host, &words).stdout(Stdio::piped()).spawn().unwrap()
        })
        .into();
    for client in clients {
        let output = client.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "well\n");
    }
    let output = server.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let peers = [1, 2].map(|host| format!("('{}', 40000)", hosts.address(host))).join(", ");
    assert_eq!(text, format!("[{peers}]\n"));
    for peer in ["b", "c"] {
        let sent: u64 = hosts.count(0, &format!("{peer}, partition 0: bytes sent"));
        assert!(sent > 3000, "{sent} bytes to {peer} through its window");
    }
}
