//! The direct store through the command, as a person uses it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use beeline_kv_direct::function::number;
use beeline_kv_direct::{DirectClient, Kind, Request, Status, Width};
use beeline_verify_clients::resp::encode;
use beeline_verify_clients::{
    Random, Server, beeline, bounded, deep, need, note, number as count, root, said,
};

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

/// Pairs of a batch of the client that is killed.
const BATCH: u64 = 48;
const CHILD: &str = "BEELINE_DIRECT_CHILD";

fn connected(url: &str) -> DirectClient {
    beeline_direct_client::connect([url.to_owned()], Duration::from_secs(20)).unwrap()
}

fn victim_key(victim: u64, number: u64) -> Vec<u8> {
    // Some pairs are in buckets, some in blocks.
    [&victim.to_le_bytes()[..], &number.to_le_bytes(), &vec![3; number as usize % 60]].concat()
}

/// The process that is killed: this test's program, started again by the test below. It says each batch
/// that was acknowledged.
#[test]
fn a_client_that_is_to_be_killed() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let (victim, url) = told.split_once(' ').unwrap();
    let victim: u64 = victim.parse().unwrap();
    let mut client = connected(url);
    let count = [&victim.to_le_bytes()[..], b"count"].concat();
    client.put(&count, &0_u64.to_le_bytes()).unwrap();
    let one = 1_u64.to_le_bytes();
    for batch in 0.. {
        let numbers: Vec<u64> = (batch * BATCH..(batch + 1) * BATCH).collect();
        let keys: Vec<Vec<u8>> = numbers.iter().map(|n| victim_key(victim, *n)).collect();
        let values: Vec<Vec<u8>> = numbers.iter().map(|n| n.to_le_bytes().repeat(2)).collect();
        let mut requests: Vec<Request<'_>> =
            keys.iter().zip(&values).map(|(key, value)| Request::put(key, value)).collect();
        let (kind, add) = (Kind::UpdateScalar, number::ADD);
        requests.push(Request::with_function(kind, &count, add, Width::Eight, &one));
        client.execute(&requests, &mut |_, status, _| assert_eq!(status, Status::Ok)).unwrap();
        let mut out = std::io::stdout().lock();
        writeln!(out, "acknowledged {batch}").unwrap();
        out.flush().unwrap();
    }
}

#[test]
fn clients_killed_in_the_middle_of_batches_lose_nothing_that_was_acknowledged() {
    let rounds = count("BEELINE_ROUNDS").unwrap_or(if deep() { 200 } else { 8 });
    let mut random = Random(0xD1);
    for scheme in ["shm", "tcp"] {
        let data = tempfile::tempdir().unwrap();
        // Fewer places than rounds: a killed client has to give its own back.
        let flags = ["--direct-memory", "256MiB", "--direct-max-clients", "4"];
        let server = Server::start(data.path(), &flags);
        let url = format!("{scheme}://{}", server.fabric());
        let mut acknowledged = 0;
        for victim in 0..rounds {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "a_client_that_is_to_be_killed", "--nocapture"])
                .env(CHILD, format!("{victim} {url}"))
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::inherit())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let number = |line: &str| line.rsplit_once("acknowledged ")?.1.parse::<u64>().ok();
            let first = lines.by_ref().find_map(|line| number(&line.unwrap()));
            assert_eq!(first, Some(0), "the client runs");
            std::thread::sleep(Duration::from_micros(random.below(30_000)));
            child.kill().unwrap();
            child.wait().unwrap();
            let last = lines.map_while(Result::ok).filter_map(|line| number(&line)).last();
            let batches = last.unwrap_or(0) + 1;
            let mut client = connected(&url);
            for number in 0..batches * BATCH {
                let held = client.get(&victim_key(victim, number)).unwrap();
                assert_eq!(held, Some(number.to_le_bytes().repeat(2)), "{scheme} {victim} {number}");
            }
            let count = [&victim.to_le_bytes()[..], b"count"].concat();
            let counted = client.fetch_and_add(&count, 0).unwrap().unwrap();
            // The batch under way, and the line about one more that was not read to its end.
            assert!((batches..=batches + 2).contains(&counted), "{counted} of {batches}");
            acknowledged += batches;
            // What this round stored makes room for the next.
            for number in 0..(batches + 2) * BATCH {
                client.delete(&victim_key(victim, number)).unwrap();
            }
        }
        let health = server.connect().say("DIRECT.PUT after x").text();
        assert_eq!(health, "OK");
        note(&format!("{scheme}: {rounds} clients killed, {acknowledged} batches acknowledged"));
    }
}

#[test]
fn a_server_joins_and_another_leaves_by_the_command_while_a_client_goes_on() {
    let data: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let small = ["--direct-memory", "32MiB"];
    let servers: Vec<Server> = data.iter().map(|data| Server::start(data.path(), &small)).collect();
    let urls: Vec<String> =
        servers.iter().map(|server| format!("auto://{}", server.fabric())).collect();
    let run = |words: &[&str]| {
        let output = bounded(beeline(&["direct"]).args(words), PATIENCE);
        (output.status.code().unwrap(), said(&output))
    };
    let two = format!("{},{}", urls[0], urls[1]);
    let mut client = beeline_direct_client::connect(urls[..2].to_vec(), PATIENCE).unwrap();
    for number in 0..500_u32 {
        client.put(&number.to_le_bytes(), b"value").unwrap();
    }
    let (code, told) = run(&["join", &urls[2], "--connect", &two]);
    assert!(code == 0 && told.contains("done;"), "{told}");
    for number in 0..500_u32 {
        assert_eq!(client.get(&number.to_le_bytes()).unwrap().unwrap(), b"value");
    }
    assert_eq!(client.ring().servers().len(), 3);
    let (code, told) = run(&["servers", "--connect", &urls[0]]);
    assert!(code == 0 && urls.iter().all(|url| told.contains(url.as_str())), "{told}");
    // A node's own Redis door knows which keys are another node's.
    let mut elsewhere = 0;
    for number in 0..40 {
        let reply = servers[0].connect().say(&format!("DIRECT.PUT name{number} x")).text();
        elsewhere += u32::from(reply.contains("another node"));
    }
    assert!((1..40).contains(&elsewhere), "{elsewhere} of 40");
    let (code, told) = run(&["leave", &urls[0], "--connect", &urls[1]]);
    assert_eq!(code, 0, "{told}");
    let mut servers = servers;
    servers.remove(0).kill();
    let until = Instant::now() + PATIENCE;
    for number in 0..500_u32 {
        // The link to the node that was stopped may be found broken once.
        let held = loop {
            match client.get(&number.to_le_bytes()) {
                Ok(held) => break held,
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
        };
        assert_eq!(held.unwrap(), b"value");
    }
    let (code, told) = run(&["leave", &urls[0], "--connect", &urls[1]]);
    assert!(code == 0 || told.contains("no server of the map"), "{told}");
    assert_eq!(direct(&[&servers[0]], &["put", "by one name", "found"]).0, 0);
    assert_eq!(direct(&[&servers[1]], &["get", "by one name"]), (0, "found".into()));
}
