//! The document store, walked by MongoDB's own drivers as they come from their registries.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use beeline_verify_clients::{Server, bounded, need_pymongo, note, root, said};

const PATIENCE: Duration = Duration::from_secs(240);

fn walk(python: &Path, server: &Server, arguments: &[&str]) {
    let script = root().join("verify/clients/python/documents.py");
    let uri = format!("mongodb://{}", server.documents());
    let output = bounded(Command::new(python).arg(script).arg(uri).args(arguments), PATIENCE);
    assert!(output.status.success(), "{arguments:?}: {}\n{}", said(&output), server.complaints());
    note(String::from_utf8_lossy(&output.stdout).trim());
}

#[test]
fn pymongo_walks_every_command_and_finds_all_of_it_after_kill_9() {
    let test = "pymongo_walks_every_command_and_finds_all_of_it_after_kill_9";
    let Some(python) = need_pymongo(test) else { return };
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--shards", "2"]);
    walk(&python, &server, &["first"]);
    server.kill();
    let server = Server::start(data.path(), &["--shards", "3"]);
    walk(&python, &server, &["again"]);
    assert!(server.stop().success());
}

#[test]
fn pymongo_walks_it_compressed_at_power_durability() {
    let test = "pymongo_walks_it_compressed_at_power_durability";
    let Some(python) = need_pymongo(test) else { return };
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--durability", "power", "--shards", "1"]);
    walk(&python, &server, &["first", "zlib"]);
    server.kill();
    let server = Server::start(data.path(), &["--durability", "power", "--shards", "1"]);
    walk(&python, &server, &["again", "zlib"]);
}
