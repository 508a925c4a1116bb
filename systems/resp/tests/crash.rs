//! Commands over several keys, cut short by a crash at every point: their writes are all there or
//! none, and what was acknowledged is there.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

mod common;

use std::sync::Arc;

use beeline_env::ManualClock;
use beeline_pmem::{
    CrashImage, CrashKind, CrashLimits, Durability, Pool, PoolOptions, for_each_crash_image,
};
use common::Node;

const ROUNDS: u64 = 12;
const SHARDS: usize = 2;

fn options() -> PoolOptions {
    PoolOptions { durability: Durability::Power, ..PoolOptions::volatile(64 << 10, 4 << 20) }
}

/// One round of commands; each keeps the invariants that [`check`] looks for.
fn round(number: u64) -> Vec<String> {
    let (from, to) = if number % 2 == 1 { ("here", "there") } else { ("there", "here") };
    let (database, target) = if number % 2 == 1 { (0, 1) } else { (1, 0) };
    vec![
        format!("MSET a {number} b {number} c {number}"),
        format!("MSETEX 4 d {number} e {number} f {number} g {number} EX 1000"),
        "MULTI".into(),
        format!("SET x {number}"),
        "INCR y".into(),
        format!("APPEND log {},", number % 10),
        format!("DEL old{}", number - 1),
        format!("SETEX old{number} 1000 1"),
        "EXEC".into(),
        format!("RENAME {from} {to}"),
        format!("SELECT {database}"),
        format!("MOVE token {target}"),
        "SELECT 0".into(),
        format!("SET last {number}"),
    ]
}

fn number(reply: &str) -> u64 {
    reply.split("\r\n").nth(1).and_then(|line| line.parse().ok()).unwrap_or(0)
}

fn check(image: &CrashImage) {
    let what = image.describe();
    let (pool, _) = Pool::open_image(image, &options()).unwrap();
    let mut node = Node::on_pool(pool, SHARDS, Arc::new(ManualClock::new(1_000_000)));
    let mut session = node.session();
    let mut ask = |request: &str| node.text(&mut session, request);
    let acknowledged = image.mark().unwrap_or(0);
    if acknowledged == 0 {
        return;
    }
    // Rounds are marked when their last reply is due: everything of that round is there.
    let [a, b, c] = ["GET a", "GET b", "GET c"].map(|request| number(&ask(request)));
    assert!(a == b && b == c, "MSET in part: {a} {b} {c}; {what}");
    assert!(a >= acknowledged && a <= acknowledged + 1, "MSET {a}, {acknowledged}; {what}");
    let [d, e, f, g] = ["GET d", "GET e", "GET f", "GET g"].map(|request| number(&ask(request)));
    assert!(d == e && e == f && f == g, "MSETEX in part: {d} {e} {f} {g}; {what}");
    assert!(d >= acknowledged && d <= acknowledged + 1, "MSETEX {d}, {acknowledged}; {what}");
    let [x, y] = ["GET x", "GET y"].map(|request| number(&ask(request)));
    let written = ask("STRLEN log");
    assert!(x == y && written == format!(":{}\r\n", 2 * x), "EXEC in part: {x} {y}; {what}");
    assert!(x >= acknowledged, "EXEC {x}, {acknowledged}; {what}");
    let old = format!("EXISTS old{} old{} old{}", x.wrapping_sub(1), x, x + 1);
    assert_eq!(ask(&old), ":1\r\n", "EXEC in part; {what}");
    assert_eq!(ask("EXISTS here there"), ":1\r\n", "RENAME in part; {what}");
    let mut tokens = 0;
    for database in ["SELECT 0", "SELECT 1"] {
        ask(database);
        tokens += usize::from(ask("EXISTS token") == ":1\r\n");
    }
    assert_eq!(tokens, 1, "MOVE in part; {what}");
    ask("SELECT 0");
    assert!(number(&ask("GET last")) >= acknowledged, "an acknowledged SET is gone; {what}");
}

#[test]
fn commands_over_several_keys_survive_as_a_whole() {
    let (pool, device) = Pool::simulated(&options()).unwrap();
    let mut node = Node::on_pool(pool, SHARDS, Arc::new(ManualClock::new(1_000_000)));
    let mut session = node.session();
    for request in ["SET here 1", "SET token 1", "SET old0 1"] {
        assert_eq!(node.text(&mut session, request), "+OK\r\n");
    }
    for round_number in 1..=ROUNDS {
        for request in round(round_number) {
            let reply = node.text(&mut session, &request);
            assert!(!reply.starts_with('-'), "{request}: {reply}");
        }
        device.mark(round_number);
    }
    for (kind, points) in [(CrashKind::Power, usize::MAX), (CrashKind::Process, 400)] {
        let limits = CrashLimits { kind, images_per_point: 12, points, ..CrashLimits::default() };
        let counts = for_each_crash_image(&device, &limits, check);
        println!("{kind:?}: {counts}");
        assert!(counts.images > 100, "{counts}");
    }
}
