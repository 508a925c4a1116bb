//! A replica set of documents as real processes, and pymongo beside it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../cluster/members.rs"]
#[allow(dead_code, reason = "the cluster's tests use more of it")]
mod members;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use beeline_verify_clients::{beeline, bounded, deep, eventually, need_pymongo, note, root, said};
use rustix::process::Signal;
use serde_json::Value;

use members::{Cluster, PATIENCE};

/// How long a walk of a script may take.
const WALK: Duration = Duration::from_secs(240);

fn uri(cluster: &Cluster) -> String {
    let hosts: Vec<String> = cluster.documents.iter().map(ToString::to_string).collect();
    format!("mongodb://{}/?replicaSet=rs0", hosts.join(","))
}

/// What `beeline documents status` tells of a member.
fn status(cluster: &Cluster, member: usize) -> Option<Value> {
    let address = cluster.documents[member].to_string();
    let output =
        bounded(&mut beeline(&["documents", "status", "--json", "--address", &address]), PATIENCE);
    output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
}

fn state_of(status: &Value, address: &str) -> String {
    let mut members = status["members"].as_array().into_iter().flatten();
    let own = members.find(|one| one["address"] == address);
    own.map_or_else(String::new, |one| one["state"].as_str().unwrap_or_default().to_owned())
}

/// The member that says of itself that it is the primary.
fn primary(cluster: &Cluster) -> usize {
    eventually("a primary", PATIENCE, || {
        (0..3).find(|member| {
            let running = cluster.members[*member].is_some();
            let address = cluster.documents[*member].to_string();
            running
                && status(cluster, *member).is_some_and(|status| {
                    status["primary"] == *address && state_of(&status, &address) == "PRIMARY"
                })
        })
    })
}

fn await_state(cluster: &Cluster, member: usize, wanted: &str) {
    let address = cluster.documents[member].to_string();
    eventually(wanted, PATIENCE, || {
        let status = status(cluster, member)?;
        (state_of(&status, &address) == wanted).then_some(())
    });
}

fn order(cluster: &Cluster, member: usize, word: &str) {
    let address = cluster.documents[member].to_string();
    let output = bounded(&mut beeline(&["documents", word, "--address", &address]), PATIENCE);
    assert!(output.status.success(), "{word}: {}", said(&output));
}

/// The script that writes until it is told to end.
struct Program {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    told: u64,
}

impl Program {
    fn start(python: &Path, cluster: &Cluster) -> Self {
        let mut child = Command::new(python)
            .arg(root().join("verify/clients/python/documents_set.py"))
            .arg(uri(cluster))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut program = Self { child, lines, told: 0 };
        assert_eq!(program.line(), "writing");
        program
    }

    fn line(&mut self) -> String {
        self.lines.next().and_then(Result::ok).unwrap_or_default()
    }

    /// Waits until so many more writes were acknowledged.
    fn go_on(&mut self, steps: u64) {
        let goal = self.told + steps;
        while self.told < goal {
            let line = self.line();
            let told = line.strip_prefix("progress ").and_then(|told| told.parse().ok());
            self.told = told.unwrap_or_else(|| panic!("the program said {line:?}"));
        }
    }

    fn end(mut self) -> String {
        self.child.stdin.take().unwrap().write_all(b"enough\n").unwrap();
        let report = loop {
            let line = self.line();
            if !line.starts_with("progress ") {
                break line;
            }
        };
        let ended = self.child.wait().unwrap();
        assert!(ended.success() && report.starts_with("fine"), "{report}");
        report
    }
}

#[test]
fn a_pymongo_program_lives_through_the_end_of_primary_after_primary() {
    let test = "a_pymongo_program_lives_through_the_end_of_primary_after_primary";
    let Some(python) = need_pymongo(test) else { return };
    let mut cluster = Cluster::of_documents(&[]);
    primary(&cluster);
    let mut program = Program::start(&python, &cluster);
    let rounds = if deep() { 15 } else { 3 };
    for _ in 0..rounds {
        program.go_on(50);
        let victim = primary(&cluster);
        cluster.kill(victim);
        // Another leads before it comes back, and the program goes on without it.
        assert_ne!(primary(&cluster), victim);
        program.go_on(50);
        cluster.start(victim);
        await_state(&cluster, victim, "SECONDARY");
    }
    let report = program.end();
    note(&format!("{report}, through {rounds} kills of the primary"));
    let listed = std::fs::read_dir(cluster.home.path()).unwrap().flatten();
    let kept = listed.filter(|node| node.path().join("rollback").exists()).count();
    note(&format!("{kept} members took something back and kept it in a file"));
}

#[test]
fn a_primary_that_was_stopped_takes_back_what_it_alone_had_and_keeps_it() {
    let test = "a_primary_that_was_stopped_takes_back_what_it_alone_had_and_keeps_it";
    let Some(python) = need_pymongo(test) else { return };
    let mut cluster = Cluster::of_documents(&[]);
    let first = primary(&cluster);
    let others = [(first + 1) % 3, (first + 2) % 3];
    let (uri, address) = (uri(&cluster), cluster.documents[first].to_string());
    let walk = |phase: &str| {
        let mut command = Command::new(&python);
        command.arg(root().join("verify/clients/python/documents_roles.py"));
        command.args([&uri, phase, &address]);
        let output = bounded(&mut command, WALK);
        assert!(output.status.success(), "{phase}: {}", said(&output));
        note(String::from_utf8_lossy(&output.stdout).trim());
    };
    walk("roles");
    // What it writes while nobody fetches is its own alone.
    others.iter().for_each(|other| order(&cluster, *other, "pause"));
    walk("alone");
    cluster.members[first].as_ref().unwrap().signal(Signal::STOP);
    others.iter().for_each(|other| order(&cluster, *other, "resume"));
    walk("without");
    cluster.members[first].as_ref().unwrap().signal(Signal::CONT);
    await_state(&cluster, first, "SECONDARY");
    walk("taken-back");
    let told = status(&cluster, first).unwrap();
    assert!(told["taken_back"].as_i64().unwrap() > 0, "{told}");
    let folder = cluster.data(first).join("rollback");
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().flatten().collect();
    let kept: Vec<u8> = files.iter().flat_map(|file| std::fs::read(file.path()).unwrap()).collect();
    let holds = |text: &[u8]| kept.windows(text.len()).any(|part| part == text);
    assert!(holds(b"only here 7"), "{} files do not hold what was taken back", files.len());
    // A member that is told to copies everything anew, and one that lost its documents does so by itself.
    let copies = |cluster: &Cluster| status(cluster, first).map(|told| told["copies"].as_i64());
    let before = copies(&cluster).flatten().unwrap();
    order(&cluster, first, "resync");
    eventually("another copy", PATIENCE, || (copies(&cluster).flatten()? > before).then_some(()));
    await_state(&cluster, first, "SECONDARY");
    walk("taken-back");
    cluster.kill(first);
    std::fs::remove_dir_all(cluster.data(first).join("documents")).unwrap();
    cluster.start(first);
    await_state(&cluster, first, "SECONDARY");
    walk("taken-back");
}

#[test]
fn a_set_killed_as_a_whole_comes_back_with_what_a_majority_had() {
    let test = "a_set_killed_as_a_whole_comes_back_with_what_a_majority_had";
    let Some(python) = need_pymongo(test) else { return };
    let mut cluster = Cluster::of_documents(&[]);
    primary(&cluster);
    let mut program = Program::start(&python, &cluster);
    program.go_on(75);
    (0..3).for_each(|member| cluster.kill(member));
    (0..3).for_each(|member| cluster.start(member));
    program.go_on(75);
    note(&program.end());
}

/// Runs `beeline documents WORDS` over fabric, met at a member's fabric address.
fn over_fabric(cluster: &Cluster, member: usize, words: &[&str]) -> (String, String) {
    let address = format!("shm://{}", cluster.places[member].fabric);
    let mut command = beeline(&["documents"]);
    command.args(words).args(["--fabric", &address]);
    let output = bounded(&mut command, PATIENCE);
    assert!(output.status.success(), "{words:?}: {}", said(&output));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn fabric_clients_of_any_member_reach_the_one_that_leads() {
    let mut cluster = Cluster::of_documents(&[]);
    let first = primary(&cluster);
    // Fields in the order they were typed, through any member's fabric door.
    for member in 0..3 {
        let typed = format!(r#"{{"_id":{member},"z":1,"b":{{"y":1,"a":2}},"c":3}}"#);
        over_fabric(&cluster, member, &["put", "shop.items", &typed]);
        let (found, told) =
            over_fabric(&cluster, (member + 1) % 3, &["get", "shop.items", &member.to_string()]);
        assert_eq!(found, typed);
        assert!(told.contains("over shm"), "{told}");
    }
    // The others pull its log over shared memory; one that has fabric off pulls it by the wire.
    let carrier = |cluster: &Cluster, member: usize, wanted: &str| {
        eventually(wanted, PATIENCE, || {
            (status(cluster, member)?["sync_carrier"] == wanted).then_some(())
        });
    };
    let (second, third) = ((first + 1) % 3, (first + 2) % 3);
    carrier(&cluster, second, "shm");
    carrier(&cluster, third, "shm");
    cluster.kill(third);
    cluster.more = vec!["--documents-is-rdma".to_owned(), "off".to_owned()];
    cluster.start(third);
    cluster.more.clear();
    await_state(&cluster, third, "SECONDARY");
    over_fabric(&cluster, first, &["put", "shop.items", r#"{"_id":"mixed"}"#]);
    carrier(&cluster, third, "mongodb wire");
    carrier(&cluster, second, "shm");
    // The one that leads ends: its fabric clients go on at another member.
    cluster.kill(first);
    let (_, told) = over_fabric(&cluster, second, &["put", "shop.items", r#"{"_id":"after"}"#]);
    assert!(told.contains("over shm"), "{told}");
    assert_ne!(primary(&cluster), first);
    let (all, _) = over_fabric(&cluster, second, &["find", "shop.items"]);
    assert_eq!(all.lines().count(), 5, "{all}");
}
