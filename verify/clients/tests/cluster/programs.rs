//! redis-cli and redis-py at the members of a cluster, as their users would run them.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};

use beeline_verify_clients::{bounded, need, need_redis_py, root, said};

use super::members::{Cluster, PATIENCE};

#[test]
fn redis_cli_finds_every_member_of_a_cluster_as_any_redis() {
    let test = "redis_cli_finds_every_member_of_a_cluster_as_any_redis";
    let Some(cli) = need(test, "redis-cli") else { return };
    let mut cluster = Cluster::new(0, &[]);
    let first = cluster.leader();
    let ask = |cluster: &Cluster, member: usize, words: &[&str]| {
        let port = cluster.places[member].resp.port().to_string();
        let output = bounded(Command::new(&cli).args(["-p", &port]).args(words), PATIENCE);
        assert!(output.status.success(), "{words:?} at {member}: {}", said(&output));
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    };
    for member in 0..3 {
        let (key, value) = (format!("from:{member}"), format!("value {member}"));
        assert_eq!(ask(&cluster, member, &["SET", &key, &value]), "OK");
        for reader in 0..3 {
            assert_eq!(ask(&cluster, reader, &["GET", &key]), value);
        }
        assert_eq!(ask(&cluster, member, &["-r", "5", "INCR", "n"]).lines().count(), 5);
    }
    assert_eq!(ask(&cluster, first, &["GET", "n"]), "15");
    let scanned = ask(&cluster, (first + 1) % 3, &["--scan", "--pattern", "from:*"]);
    assert_eq!(scanned.lines().count(), 3, "{scanned}");
    let role = |cluster: &Cluster, member| ask(cluster, member, &["INFO", "replication"]);
    assert!(role(&cluster, first).contains("role:master"));
    assert!(role(&cluster, (first + 1) % 3).contains("role:slave"));
    // The next command after the leader's end waits for the next leader, and is answered.
    cluster.kill(first);
    let other = (first + 1) % 3;
    assert_eq!(ask(&cluster, other, &["INCR", "n"]), "16");
    assert_eq!(ask(&cluster, (first + 2) % 3, &["GET", "n"]), "16");
}

#[test]
fn a_redis_py_program_lives_through_the_end_of_the_leader_it_talks_to() {
    let test = "a_redis_py_program_lives_through_the_end_of_the_leader_it_talks_to";
    let Some(python) = need_redis_py(test) else { return };
    let mut cluster = Cluster::new(0, &[]);
    let first = cluster.leader();
    // It talks to the leader first, and knows the others.
    let order = [first, (first + 1) % 3, (first + 2) % 3];
    let mut program = Command::new(python)
        .arg(root().join("verify/clients/python/cluster.py"))
        .args(order.map(|member| cluster.places[member].resp.port().to_string()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
    let mut next = || lines.next().and_then(Result::ok).unwrap_or_default();
    assert_eq!(next(), "writing");
    cluster.kill(first);
    assert_eq!(next(), "moved");
    program.stdin.take().unwrap().write_all(b"enough\n").unwrap();
    let report = next();
    let ended = program.wait().unwrap();
    assert!(ended.success() && report.starts_with("fine"), "{report}");
    cluster.start(first);
    assert_eq!(cluster.ask(first, &["GET", "py:done"]).text(), "yes");
}
