//! The direct store through the command, as a person uses it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod kill;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use beeline_kv_direct::{DirectClientError, LinkError};
use beeline_verify_clients::resp::encode;
use beeline_verify_clients::{Server, beeline, bounded, eventually, need, root, said};

const PATIENCE: Duration = Duration::from_secs(60);

/// Exit code and standard output of `beeline direct ...`.
fn direct(servers: &[&Server], words: &[&str]) -> (i32, String) {
    let urls: Vec<String> =
        servers.iter().map(|server| format!("auto://{}", server.fabric())).collect();
    let mut command = beeline(&["direct"]);
    command.args(words).args(["--connect", &urls.join(",")]);
    let output = bounded(&mut command, PATIENCE);
    let code = output.status.code().unwrap_or_else(|| panic!("{words:?}: {}", said(&output)));
    (code, String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn the_commands_of_the_guide_do_what_it_says() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--direct-memory", "32MiB"]);
    let banner = server.banner()["services"].to_string();
    assert!(banner.contains("VOLATILE"), "{banner}");
    let run = |words: &[&str]| direct(&[&server], words);
    let nothing = (0, String::new());
    assert_eq!(run(&["put", "counter", "--number", "41"]), nothing);
    assert_eq!(run(&["update", "counter", "add", "1"]), (0, "41\n".into()));
    assert_eq!(run(&["put", "weights", "--vector", "1,0,3", "--width", "4"]), nothing);
    let filtered = run(&["filter", "weights", "--width", "4"]);
    assert_eq!(filtered, (0, "1,3\n".into()));
    let before = run(&["update", "weights", "add", "10", "--width", "4"]);
    assert_eq!(before, (0, "1,0,3\n".into()));
    assert_eq!(run(&["reduce", "weights", "add", "--width", "4"]), (0, "34\n".into()));
    assert_eq!(run(&["cas", "counter", "42", "7"]), (0, "42\n".into()));
    assert_eq!(run(&["put", "greeting", "hello"]), nothing);
    assert_eq!(run(&["get", "greeting"]), (0, "hello".into()));
    assert_eq!(run(&["delete", "greeting"]), nothing);
    assert_eq!(run(&["get", "greeting"]), (1, String::new()));
    assert_eq!(run(&["update", "greeting", "add", "1"]).0, 1);
    assert_eq!(run(&["update", "weights", "add", "1,2", "--width", "4"]).0, 1, "lengths differ");
}

#[test]
fn two_nodes_are_one_map_and_a_node_without_the_service_says_so() {
    let data = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let small = ["--direct-memory", "32MiB", "--direct-processors", "2"];
    let servers: Vec<Server> = data.iter().map(|data| Server::start(data.path(), &small)).collect();
    let both = [&servers[0], &servers[1]];
    for key in 0..8 {
        let key = format!("key {key}");
        assert_eq!(direct(&both, &["put", &key, &key]).0, 0);
    }
    for key in 0..8 {
        let key = format!("key {key}");
        assert_eq!(direct(&both, &["get", &key]), (0, key));
    }
    let third = tempfile::tempdir().unwrap();
    let without = Server::start(third.path(), &["--without", "direct"]);
    assert_eq!(direct(&[&without], &["get", "key"]).0, 3);
}

#[test]
fn a_redis_client_tries_every_operation_and_keeps_its_order() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(
        data.path(),
        &["--direct-memory", "32MiB", "--direct-processors", "2", "--shards", "2"],
    );
    let mut redis = server.connect();
    for (line, reply) in [
        ("DIRECT.PUT counter NUMBERS 41", "OK"),
        ("DIRECT.ADD counter 1", "41"),
        ("DIRECT.CAS counter 42 7", "42"),
        ("DIRECT.REDUCE counter ADD", "7"),
        ("DIRECT.PUT greeting hello", "OK"),
        ("DIRECT.GET greeting", "hello"),
        ("DIRECT.DEL greeting", "1"),
        ("DIRECT.DEL greeting", "0"),
    ] {
        assert_eq!(redis.say(line).text(), reply, "{line}");
    }
    assert_eq!(direct(&[&server], &["update", "counter", "add", "1"]), (0, "7\n".into()));
    assert!(redis.say("EXISTS counter").text() == "0", "the keyspaces are apart");
    assert!(redis.say("DIRECT.ADD counter x").text().contains("not an integer"));
    assert!(redis.say("MULTI").is_ok());
    assert!(redis.say("DIRECT.GET counter").text().contains("not allowed inside a transaction"));
    assert!(redis.say("DISCARD").is_ok());
    // A pipeline of both stores' commands: replies come in the order of the requests.
    let mut pipeline = Vec::new();
    for i in 0..500 {
        let (key, value) = (format!("k{i}"), format!("{i}"));
        for words in [
            vec!["SET", key.as_str(), value.as_str()],
            vec!["DIRECT.PUT", key.as_str(), "NUMBERS", value.as_str()],
            vec!["DIRECT.ADD", key.as_str(), "1"],
            vec!["INCR", key.as_str()],
            vec!["DIRECT.ADD", key.as_str(), "0"],
        ] {
            let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
            pipeline.extend(encode(&words));
        }
    }
    redis.send(&pipeline).unwrap();
    for i in 0..500 {
        let mut next = || redis.reply().unwrap().text();
        assert_eq!((next(), next()), ("OK".into(), "OK".into()));
        assert_eq!(next(), i.to_string());
        assert_eq!(next(), (i + 1).to_string());
        assert_eq!(next(), (i + 1).to_string());
    }
    // A client that leaves with requests under way costs no other client a reply.
    let mut leaver = server.connect();
    leaver.send(&pipeline).unwrap();
    drop(leaver);
    assert_eq!(redis.say("DIRECT.ADD k7 0").text(), "8");
    let without = tempfile::tempdir().unwrap();
    let without = Server::start(without.path(), &["--without", "direct"]);
    let refused = without.connect().say("DIRECT.GET k").text();
    assert!(refused.contains("--without direct"), "{refused}");
}

#[test]
fn a_node_that_does_not_answer_costs_a_client_its_time_out_and_no_more() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--direct-memory", "32MiB"]);
    // Long for a node that waits for a processor beside other tests.
    let limit = Duration::from_millis(1500);
    for scheme in ["auto", "tcp"] {
        let url = format!("{scheme}://{}", server.fabric());
        let mut client = beeline_direct_client::connect([url], limit).unwrap();
        client.put(b"key", b"before").unwrap();
        server.signal(rustix::process::Signal::STOP);
        let stopped = || {
            let threads = std::fs::read_dir(format!("/proc/{}/task", server.process())).unwrap();
            threads.flatten().all(|thread| {
                let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
                stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T"))
            })
        };
        eventually("the node's threads stop", PATIENCE, || stopped().then_some(()));
        let began = Instant::now();
        let error = client.put(b"key", b"after").unwrap_err();
        // Over TCP the connection's own limit may be first.
        let DirectClientError::Link { source, .. } = &error else { panic!("{error}") };
        assert!(matches!(source, LinkError::TimedOut { .. } | LinkError::Broken), "{error}");
        assert!(began.elapsed() < PATIENCE, "{error}");
        assert_eq!(direct(&[&server], &["get", "key", "--timeout", "300ms"]).0, 3);
        server.signal(rustix::process::Signal::CONT);
        // What was under way may have taken effect, and the client goes on.
        let held = eventually("the node answers again", PATIENCE, || client.get(b"key").ok());
        assert!([&b"before"[..], b"after"].contains(&held.unwrap().as_slice()));
        client.put(b"key", b"later").unwrap();
        assert_eq!(client.get(b"key").unwrap().unwrap(), b"later");
    }
}

#[test]
fn a_c_program_uses_the_store_through_the_header() {
    let Some(cc) = need("a_c_program_uses_the_store_through_the_header", "cc") else { return };
    let built = Command::new("cargo")
        .args(["build", "--quiet", "--package", "beeline-direct-c", "--message-format", "json"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let library = String::from_utf8_lossy(&built.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| message["filenames"].as_array().cloned())
        .flatten()
        .filter_map(|file| file.as_str().map(PathBuf::from))
        .find(|file| file.ends_with("libbeeline_direct.so"))
        .expect("cargo names the library");
    let folder = library.parent().unwrap();
    let data = tempfile::tempdir().unwrap();
    let program = data.path().join("counter");
    let mut compile = Command::new(cc);
    compile
        .args(["-Wall", "-Wextra", "-Werror", "-std=c11"])
        .arg(format!("-I{}", root().join("apps/direct-c/include").display()))
        .arg(root().join("apps/direct-c/examples/counter.c"))
        .arg(format!("-L{}", folder.display()))
        .args(["-lbeeline_direct", "-o"])
        .arg(&program);
    let compiled = bounded(&mut compile, PATIENCE);
    assert!(compiled.status.success(), "{}", said(&compiled));
    let server = Server::start(&data.path().join("node"), &["--direct-memory", "32MiB"]);
    let mut run = Command::new(&program);
    run.arg(format!("auto://{}", server.fabric())).env("LD_LIBRARY_PATH", folder);
    let ran = bounded(&mut run, PATIENCE);
    assert!(ran.status.success(), "{}", said(&ran));
    let lines = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert_eq!(lines, "it was 42\n2 are not zero, the sum is 34\ngone\n");
    let mut nowhere = Command::new(&program);
    nowhere.arg("auto://127.0.0.1:1").env("LD_LIBRARY_PATH", folder);
    assert_eq!(bounded(&mut nowhere, PATIENCE).status.code(), Some(3));
}
