//! The direct store through the command, as a person uses it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use beeline_verify_clients::{Server, beeline, bounded, said};

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
