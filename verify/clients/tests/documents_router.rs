//! The router over three shards as real processes, and pymongo in front of it and of a single node.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use beeline_verify_clients::{
    Chance, Server, beeline, bounded, deep, need_pymongo, note, number, root, said,
};
use rustix::process::{Pid, Signal, kill_process};

const WALK: Duration = Duration::from_secs(300);

/// `beeline documents route`; dropping it kills it.
struct Route {
    child: Child,
    uri: String,
}

impl Route {
    fn start(arguments: &[String]) -> Self {
        let mut command = beeline(&["documents", "route", "--json", "--address", "127.0.0.1:0"]);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let told: serde_json::Value = serde_json::from_str(&line).unwrap();
        let uri = format!("mongodb://{}", told["router"].as_str().unwrap());
        Self { child, uri }
    }

    fn stop(mut self) -> bool {
        let process = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(process, Signal::TERM).unwrap();
        self.child.wait().unwrap().success()
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn door(server: &Server) -> String {
    format!("mongodb://{}", server.documents())
}

fn free_port() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

fn walk(python: &Path, phase: &str, seed: u64, uris: &[String]) {
    let mut command = Command::new(python);
    command.arg(root().join("verify/clients/python/documents_router.py"));
    command.args([phase, &seed.to_string()]).args(uris);
    let output = bounded(&mut command, WALK);
    let told = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(output.status.success() && told.starts_with("fine"), "{phase}: {}", said(&output));
    note(&format!("{phase}: {told}"));
}

#[test]
fn a_router_of_three_shards_says_what_a_single_node_says() {
    let test = "a_router_of_three_shards_says_what_a_single_node_says";
    let Some(python) = need_pymongo(test) else { return };
    let mut seed = number("BEELINE_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let rounds = if deep() { 10 } else { 1 };
    for _ in 0..rounds {
        seed = Chance(seed).below(1 << 31);
        note(&format!("replay with BEELINE_SEED={seed}"));
        one_round(&python, seed);
    }
}

fn one_round(python: &Path, seed: u64) {
    let home = tempfile::tempdir().unwrap();
    let doors: Vec<SocketAddr> = (0..3).map(|_| free_port()).collect();
    let start = |shard: usize, data: &str| {
        let address = doors[shard].to_string();
        Server::start(&home.path().join(data), &["--documents-address", &address, "--shards", "1"])
    };
    let mut shards: Vec<Option<Server>> =
        (0..3).map(|shard| Some(start(shard, &format!("s{shard}")))).collect();
    let single = Server::start(&home.path().join("single"), &["--shards", "1"]);
    // The first shard keeps the table, and the last is reached over shared memory.
    let fabric = shards[2].as_ref().unwrap().fabric();
    let config = format!("mongodb://{}", doors[0]);
    let arguments = [
        "--config".to_owned(),
        config,
        "--lease".to_owned(),
        "300ms".to_owned(),
        "--shard".to_owned(),
        format!("s0=mongodb://{}", doors[0]),
        "--shard".to_owned(),
        format!("s1=mongodb://{}", doors[1]),
        "--shard".to_owned(),
        format!("s2=shm://{fabric}"),
    ];
    let router = Route::start(&arguments);
    let uris = |router: &Route, single: &Server| {
        let mut uris = vec![router.uri.clone(), door(single)];
        uris.extend(doors.iter().map(|door| format!("mongodb://{door}")));
        uris
    };
    walk(python, "walk", seed, &uris(&router, &single));
    // Another router finds the table, and the first learns what that one changes.
    let other = Route::start(&arguments[..4]);
    walk(python, "again", seed + 1, &uris(&other, &single));
    walk(python, "again", seed + 2, &uris(&router, &single));
    assert!(other.stop());
    shards[1].take().unwrap().kill();
    walk(python, "dead", seed, &uris(&router, &single));
    // Where the dead one was, something else listens: it is not taken for the shard.
    shards[1] = Some(start(1, "stranger"));
    walk(python, "stale", seed, &uris(&router, &single));
    shards[1].take().unwrap().kill();
    shards[1] = Some(start(1, "s1"));
    walk(python, "again", seed + 3, &uris(&router, &single));
    assert!(router.stop());
}
