//! Starting and stopping: banner, signals, taken ports, bad directories, a quiet idle node.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{Read as _, Write as _};
use std::time::Duration;

use beeline_verify_clients::{Connection, Server, beeline, bounded, eventually, said, skip};
use rustix::process::Signal;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap_or_else(|error| panic!("a temporary directory: {error}"))
}

#[test]
fn the_banner_says_what_listens_and_how_durable_it_is() {
    let data = directory();
    let server = Server::start(data.path(), &["--shards", "2"]);
    let banner = server.banner();
    assert_eq!(banner["event"], "ready");
    assert_eq!(banner["shards"], 2);
    assert_eq!(banner["durability"], "process");
    assert!(["file", "dax"].contains(&banner["pool"].as_str().unwrap()), "{banner}");
    assert_eq!(server.connect().say("PING").text(), "PONG");
}

#[test]
fn sigterm_and_sigint_end_a_node_cleanly_and_keep_its_data() {
    let data = directory();
    for (signal, expected) in [(Signal::TERM, 0), (Signal::INT, 0)] {
        let mut server = Server::start(data.path(), &[]);
        assert!(server.connect().say("SET kept yes").is_ok());
        server.signal(signal);
        assert_eq!(server.wait().code(), Some(expected), "{}", server.complaints());
        let server = Server::start(data.path(), &[]);
        assert_eq!(server.connect().say("GET kept").text(), "yes");
    }
}

#[test]
fn a_node_started_while_the_killed_one_still_ends_waits_for_it() {
    let data = directory();
    let ports: Vec<String> = (0..3)
        .map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap())
        .map(|free| free.local_addr().unwrap().to_string())
        .collect();
    let doors = ["--resp-address", "--http-address", "--fabric-address"];
    let mut flags: Vec<&str> =
        doors.iter().zip(&ports).flat_map(|(flag, port)| [*flag, port.as_str()]).collect();
    flags.extend(["--capacity", "1GiB", "--segment-size", "8MiB"]);
    let mut server = Server::start(data.path(), &flags);
    // Memory to give back, which takes a while.
    let mut connection = server.connect();
    let value = vec![b'v'; 1 << 20];
    for key in 0..200 {
        let key = format!("large:{key}");
        assert!(connection.call(&[b"SET", key.as_bytes(), &value]).unwrap().is_ok());
    }
    for _ in 0..3 {
        server.signal(Signal::KILL);
        let next = Server::start(data.path(), &flags);
        assert_eq!(next.connect().say("DBSIZE").text(), "200");
        server = next;
    }
}

#[test]
fn a_second_signal_ends_a_node_that_still_waits_for_a_client() {
    for (first, second) in [(Signal::TERM, Signal::INT), (Signal::INT, Signal::TERM)] {
        let data = directory();
        let mut server = Server::start(data.path(), &["--shutdown-wait", "1h"]);
        let mut stuck = server.connect();
        assert!(stuck.call(&[b"SET", b"large", &vec![b'v'; 512 << 10]]).unwrap().is_ok());
        // Replies that are never read: the node owes them when it is asked to stop.
        stuck.send("GET large\r\n".repeat(64).as_bytes()).unwrap();
        // The first one has begun to come, so all were read: they fit one read.
        assert_eq!(stuck.socket().peek(&mut [0]).unwrap(), 1);
        server.signal(first);
        // New clients are turned away once the node stops.
        eventually("the stop to begin", Duration::from_secs(10), || {
            Connection::open(server.resp()).is_err().then_some(())
        });
        server.signal(second);
        assert_eq!(server.wait().code(), Some(130), "{}", server.complaints());
        let server = Server::start(data.path(), &[]);
        assert_eq!(server.connect().say("STRLEN large").text(), (512 << 10).to_string());
    }
}

#[test]
fn shutdown_from_a_client_ends_the_node() {
    let data = directory();
    let mut server = Server::start(data.path(), &[]);
    let mut connection = server.connect();
    assert!(connection.say("SET kept yes").is_ok());
    connection.send(b"SHUTDOWN\r\n").unwrap();
    assert_eq!(server.wait().code(), Some(0), "{}", server.complaints());
    let server = Server::start(data.path(), &[]);
    assert_eq!(server.connect().say("GET kept").text(), "yes");
}

#[test]
fn a_taken_port_is_named_with_the_flag_that_changes_it() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for flag in ["--resp-address", "--http-address", "--fabric-address"] {
        let data = directory();
        let (status, said) = Server::try_start(data.path(), &[flag, &address]).unwrap_err();
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains(&address) && said.contains(flag), "{said}");
        assert!(said.contains("; another program listens there"), "{said}");
        assert!(!said.contains("; ;"), "{said}");
    }
}

#[test]
fn a_service_that_cannot_start_names_itself_and_nothing_runs_half() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap();
    let (address, number) = (port.to_string(), port.port().to_string());
    let held = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let datagrams = held.local_addr().unwrap().to_string();
    let long = format!("/tmp/{}", "s".repeat(120));
    let cases = [
        ("documents", "--documents-address", address.as_str()),
        ("objects", "--objects-socket", long.as_str()),
        ("objects", "--objects-transfer-port", number.as_str()),
        ("direct", "--direct-udp-address", datagrams.as_str()),
    ];
    let data = directory();
    for (service, flag, value) in cases {
        let (status, said) = Server::try_start(data.path(), &[flag, value]).unwrap_err();
        assert_eq!(status.code(), Some(1), "{said}");
        for wanted in [
            format!("the service {service} cannot start"),
            flag.to_owned(),
            format!("--without {service}"),
        ] {
            assert!(said.contains(&wanted), "{wanted} is missing: {said}");
        }
        // What was started before it is gone: the directory is free, and the rest starts.
        let server = Server::start(data.path(), &[flag, value, "--without", service]);
        assert_eq!(server.connect().say("PING").text(), "PONG");
        let services = server.banner()["services"].as_array().unwrap().clone();
        let names: Vec<_> = services.iter().filter_map(|one| one["service"].as_str()).collect();
        assert!(names.len() == 2 && !names.contains(&service), "{names:?}");
        assert_eq!(server.stop().code(), Some(0));
    }
    let none = ["--without", "objects,direct,documents"];
    let server = Server::start(data.path(), &none);
    assert_eq!(server.banner()["services"].as_array().map(Vec::len), Some(0));
    let metrics = said(&bounded(
        &mut beeline(&["top", "--json", "--count", "1", "--address", &server.http().to_string()]),
        Duration::from_secs(20),
    ));
    assert!(!metrics.contains("beeline_objects_clients"), "{metrics}");
}

#[test]
fn a_directory_has_one_node_at_a_time() {
    let data = directory();
    let first = Server::start(data.path(), &[]);
    let (status, said) = Server::try_start(data.path(), &[]).unwrap_err();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains(&first.process().to_string()) && said.contains("--data"), "{said}");
    assert_eq!(first.connect().say("PING").text(), "PONG");
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let data = directory();
    // To root, permission bits mean nothing; a file in the way does.
    let in_the_way = data.path().join("file");
    std::fs::write(&in_the_way, b"").unwrap();
    let (status, said) = Server::try_start(&in_the_way, &[]).unwrap_err();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("file"), "{said}");
}

#[test]
fn a_read_only_directory_is_named_and_left_as_it_was() {
    let test = "a_read_only_directory_is_named_and_left_as_it_was";
    let data = directory();
    let Some(_mounted) = Mount::tmpfs(test, data.path(), "size=64m,ro") else { return };
    let (status, said) = Server::try_start(data.path(), &[]).unwrap_err();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains(&data.path().display().to_string()), "{said}");
    assert!(said.contains("writ") || said.contains("read-only"), "{said}");
}

/// A file system mounted for one test.
struct Mount(std::path::PathBuf);

impl Mount {
    fn tmpfs(test: &str, place: &std::path::Path, options: &str) -> Option<Self> {
        let mounted = bounded(
            std::process::Command::new("mount")
                .args(["-t", "tmpfs", "-o", options, "tmpfs"])
                .arg(place),
            Duration::from_secs(10),
        );
        if !mounted.status.success() {
            skip(test, "a file system can be mounted by root only");
            return None;
        }
        Some(Self(place.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn an_idle_node_uses_about_no_processor_time() {
    let data = directory();
    let server = Server::start(data.path(), &[]);
    // Some work first: a node that never woke up proves nothing.
    let mut connection = server.connect();
    for i in 0..1000 {
        assert!(connection.say(&format!("SET key:{i} value")).is_ok());
    }
    // 200 ticks are one core; five are 2.5 % of one. Beside other tests what the work leaves to do may take
    // longer than the first pause.
    let mut used = Vec::new();
    while used.len() < 10 && used.last().is_none_or(|used| *used > 5) {
        std::thread::sleep(Duration::from_millis(500));
        let before = server.processor_ticks();
        std::thread::sleep(Duration::from_secs(2));
        used.push(server.processor_ticks() - before);
    }
    assert!(used.last().is_some_and(|used| *used <= 5), "{used:?} of 200 clock ticks while idle");
}

#[test]
fn the_status_page_counts_what_clients_do() {
    let data = directory();
    // Documents keep an entry of their own.
    let server = Server::start(data.path(), &["--without", "documents"]);
    let mut connection = server.connect();
    for _ in 0..10 {
        assert!(connection.say("SET key value").is_ok());
    }
    connection.say("DIRECT.GET absent");
    let ask = |path: &str| {
        let mut stream = std::net::TcpStream::connect(server.http()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let metrics = ask("/metrics");
    let value = |name: &str| {
        let line = metrics.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .unwrap_or_else(|| panic!("{name} is missing: {metrics}"))
    };
    assert!(value("beeline_node_commands_total") >= 10.0);
    assert!((value("beeline_kv_keys") - 1.0).abs() < 0.5);
    assert!(ask("/").contains("RESP"));
    assert!(ask("/healthz").contains("200"));
    let stats = ask("/stats.json");
    // Of the services, too.
    for figure in ["beeline_kv_keys", "beeline_objects_clients", "beeline_direct_pairs"] {
        assert!(stats.contains(figure), "{figure} is missing: {stats}");
    }
    // Why is it slow? The same in every place.
    let set = "beeline_command_seconds_count{service=\"resp\",command=\"set\"}";
    assert!(value(set) >= 1.0);
    assert!(value("beeline_node_turn_seconds_count{shard=\"0\"}") >= 1.0);
    let body = stats.split_once("\r\n\r\n").unwrap().1;
    let stats: serde_json::Value = serde_json::from_str(body).unwrap();
    let rows = stats["commands"].as_array().unwrap();
    let row = rows.iter().find(|row| row["command"] == "set").unwrap();
    assert_eq!((&row["service"], &row["calls"]), (&"resp".into(), &10.into()));
    assert!(row["p99_us"].as_f64() >= row["p50_us"].as_f64(), "{row}");
    assert!(rows.iter().any(|row| row["service"] == "direct"), "{rows:?}");
    let page = ask("/");
    assert!(page.contains("Commands, by time spent") && page.contains("<td>set</td>"), "{page}");
    let top = bounded(
        &mut beeline(&[
            "top",
            "--json",
            "--count",
            "1",
            "--interval",
            "50ms",
            "--address",
            &server.http().to_string(),
        ]),
        Duration::from_secs(20),
    );
    assert!(said(&top).contains("beeline_kv_keys"), "{}", said(&top));
    let address = server.http().to_string();
    let screen = ["top", "--count", "1", "--interval", "50ms", "--address", &address];
    let screen = said(&bounded(&mut beeline(&screen), Duration::from_secs(20)));
    assert!(screen.contains("SERVICE") && screen.contains("set"), "{screen}");
}

#[test]
fn a_second_node_of_another_directory_runs_beside_the_first() {
    let (one, two) = (directory(), directory());
    let (first, second) = (Server::start(one.path(), &[]), Server::start(two.path(), &[]));
    assert!(first.connect().say("SET who first").is_ok());
    assert_eq!(second.connect().say("EXISTS who").text(), "0");
}

#[test]
fn a_password_is_asked_for() {
    let data = directory();
    let server = Server::start(data.path(), &["--require-password", "secret"]);
    let mut connection = server.connect();
    assert!(connection.say("GET x").text().starts_with("NOAUTH"));
    assert!(connection.say("AUTH wrong").text().starts_with("WRONGPASS"));
    assert!(connection.say("AUTH secret").is_ok());
    assert!(connection.say("SET x y").is_ok());
}

#[test]
fn a_silent_connection_is_closed_when_a_timeout_is_set() {
    let data = directory();
    let server = Server::start(data.path(), &["--idle-timeout", "1s"]);
    let mut connection: Connection = server.connect();
    assert_eq!(connection.say("PING").text(), "PONG");
    eventually("the idle connection's end", Duration::from_secs(15), || {
        connection.is_closed().then_some(())
    });
}
