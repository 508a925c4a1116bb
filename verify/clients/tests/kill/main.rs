//! kill -9 under load, again and again, with every acknowledged effect checked after the restart.
//!
//! Each client thread owns its keys and writes to each of them one request at a time (several keys
//! are in flight together), so it knows, per key, the last acknowledged state and the one request
//! whose fate is open. After the restart a key holds one of the two; anything else is a lost or an
//! invented write. Counters never lose or repeat an INCR, expired keys stay away, times to live
//! stay, and pairs written by MULTI/EXEC or MSET are equal always.
//!
//! `BEELINE_DEEP=1` runs 200 rounds of each, `BEELINE_ROUNDS=n` n of them; `BEELINE_SEED=n` takes
//! another course.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ledger;
mod one_sided;
mod redis;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use beeline_verify_clients::{Reply, Server, deep, note, skip};

use ledger::{Ledger, Random, stored};

const CLIENTS: u64 = 4;
const SHARDS: [&str; 2] = ["--shards", "2"];
const POWER: [&str; 4] = ["--shards", "2", "--durability", "power"];

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Waits for the moment and kills the node.
type Kill<'a> = Box<dyn FnOnce() + Send + 'a>;

/// What a run did.
#[derive(Debug, Default)]
struct Tally {
    rounds: u64,
    writes: u64,
    checked: u64,
}

impl Tally {
    /// Says how much was run; fails when it was about nothing.
    fn report(&self, what: &str) {
        let Self { rounds, writes, checked } = self;
        note(&format!(
            "{what}: {rounds} rounds of kill -9, {writes} acknowledged writes, \
             {checked} keys looked at, none missing"
        ));
        assert!(*writes > rounds * 20, "only {writes} writes were acknowledged");
    }
}

/// Starts a node, checks what the last one left, lets `load` write until the node is killed at
/// some moment; again and again.
fn rounds(
    flags: &[&str],
    few: u64,
    load: impl Fn(&Server, &mut Ledger, &mut Random, u64, Kill<'_>) -> u64,
) -> Tally {
    let rounds = number("BEELINE_ROUNDS").unwrap_or(if deep() { 200 } else { few });
    let mut random = Random(number("BEELINE_SEED").unwrap_or(0xBEE) | 1);
    let data = tempfile::tempdir().unwrap();
    let mut ledger = Ledger::default();
    let mut tally = Tally { rounds, ..Tally::default() };
    let mut next = 1;
    for round in 0..=rounds {
        let server = Server::start(data.path(), flags);
        // What was given 20 ms to live is over.
        std::thread::sleep(Duration::from_millis(25));
        let mut connection = server.connect();
        tally.checked += ledger.check(&mut connection, round);
        for client in 0..CLIENTS {
            let left = stored(&mut connection, &format!("c{client}:left"));
            let right = stored(&mut connection, &format!("c{client}:right"));
            assert_eq!(left, right, "round {round}: half of a pair of client {client}");
        }
        if round == rounds {
            break;
        }
        let life = Duration::from_millis(30 + random.below(250));
        let killer = &server;
        let kill = Box::new(move || {
            std::thread::sleep(life);
            killer.signal(rustix::process::Signal::KILL);
        });
        next = load(&server, &mut ledger, &mut random, next, kill);
        server.kill();
    }
    tally.writes = ledger.writes;
    tally
}

/// Redis clients, pipelined.
fn redis_load(
    server: &Server,
    ledger: &mut Ledger,
    random: &mut Random,
    next: u64,
    kill: Kill<'_>,
) -> u64 {
    let mut clients: Vec<redis::Client> = (0..CLIENTS)
        .map(|number| redis::Client::new(number, server, ledger, random.next(), next))
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for client in &mut clients {
            scope.spawn(|| client.run(&stop));
        }
        kill();
        stop.store(true, Ordering::Relaxed);
    });
    let last = clients.iter().map(|client| client.next).max().unwrap_or(next);
    for client in clients {
        ledger.join(client.ledger);
    }
    last
}

/// One-sided clients by `scheme`.
fn over(scheme: &'static str) -> impl Fn(&Server, &mut Ledger, &mut Random, u64, Kill<'_>) -> u64 {
    move |server, ledger, random, next, kill| {
        one_sided_load(scheme, server, ledger, random, next, kill)
    }
}

fn one_sided_load(
    scheme: &str,
    server: &Server,
    ledger: &mut Ledger,
    random: &mut Random,
    next: u64,
    kill: Kill<'_>,
) -> u64 {
    let url = format!("{scheme}://{}", server.fabric());
    let (stop, url) = (&AtomicBool::new(false), url.as_str());
    let (ready, connected) = mpsc::channel();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let prefix = format!("o{number}:");
                let (mut part, mut random) = (ledger.part(&prefix), Random(random.next() | 1));
                let ready = ready.clone();
                scope.spawn(move || {
                    let mut client = one_sided::connect(url).unwrap();
                    ready.send(()).unwrap();
                    let run = one_sided::run;
                    let last = run(&mut client, &prefix, &mut part, &mut random, next, stop);
                    (last, part)
                })
            })
            .collect();
        for _ in 0..CLIENTS {
            connected.recv_timeout(Duration::from_secs(30)).expect("every client connects");
        }
        kill();
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().fold(next, |last, thread| {
            let (own, part) = thread.join().unwrap();
            ledger.join(part);
            last.max(own)
        })
    })
}

/// False, after saying so, where the file system cannot promise durability `power`.
fn has_power(test: &str) -> bool {
    let data = tempfile::tempdir().unwrap();
    match Server::try_start(data.path(), &POWER) {
        Ok(_) => true,
        Err((_, said)) => {
            skip(test, said.trim());
            false
        }
    }
}

#[test]
fn every_acknowledged_write_survives_kill_9_under_load() {
    rounds(&SHARDS, 6, redis_load).report("Redis clients, durability process");
}

#[test]
fn every_acknowledged_write_survives_kill_9_at_power_durability() {
    if has_power("every_acknowledged_write_survives_kill_9_at_power_durability") {
        rounds(&POWER, 3, redis_load).report("Redis clients, durability power");
    }
}

#[test]
fn every_acknowledged_one_sided_write_survives_kill_9_over_shared_memory() {
    rounds(&SHARDS, 4, over("shm")).report("one-sided clients over shm, durability process");
}

#[test]
fn every_acknowledged_one_sided_write_survives_kill_9_over_tcp() {
    rounds(&SHARDS, 3, over("tcp")).report("one-sided clients over tcp, durability process");
}

#[test]
fn every_acknowledged_one_sided_write_survives_kill_9_at_power_durability() {
    if has_power("every_acknowledged_one_sided_write_survives_kill_9_at_power_durability") {
        rounds(&POWER, 2, over("shm")).report("one-sided clients over shm, durability power");
    }
}

/// Rounds of a pipeline that stores data and then its pointer, in keys of whatever shards; the node
/// is killed in the middle, and no pointer may be there without its data.
fn ordered_rounds(flags: &[&str], rounds: u64) {
    const PAIRS: u64 = 40;
    let rounds = number("BEELINE_ROUNDS").unwrap_or(if deep() { 200 } else { rounds });
    let mut random = Random(number("BEELINE_SEED").unwrap_or(0xBEE) | 1);
    let data = tempfile::tempdir().unwrap();
    let mut tally = Tally { rounds, ..Tally::default() };
    for round in 0..=rounds {
        let server = Server::start(data.path(), flags);
        let mut connection = server.connect();
        let mut held = |key: String| connection.say(&format!("GET {key}")).text();
        for pair in 0..PAIRS {
            let data = held(format!("data:{pair}")).parse().unwrap_or(0_u64);
            let pointer = held(format!("pointer:{pair}")).parse().unwrap_or(0_u64);
            assert!(pointer <= data, "round {round}: {pointer} points behind its data, {data}");
            tally.checked += 2;
        }
        if round == rounds {
            break;
        }
        let life = Duration::from_millis(20 + random.below(150));
        let stop = AtomicBool::new(false);
        let written = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            for client in 0..2 {
                let (stop, written) = (&stop, &written);
                let mut connection = server.connect();
                scope.spawn(move || {
                    // Grows from round to round.
                    for number in (round + 1) << 32.. {
                        let mut requests = Vec::new();
                        for pair in (0..PAIRS).filter(|pair| pair % 2 == client) {
                            let pair = format!(
                                "SET data:{pair} {number}\r\nSET pointer:{pair} {number}\r\n"
                            );
                            requests.extend_from_slice(pair.as_bytes());
                        }
                        let sent = connection.send(&requests);
                        let answered = sent.and_then(|()| {
                            (0..PAIRS).try_for_each(|_| connection.reply().map(drop))
                        });
                        if answered.is_err() || stop.load(Ordering::Relaxed) {
                            return;
                        }
                        written.fetch_add(PAIRS, Ordering::Relaxed);
                    }
                });
            }
            std::thread::sleep(life);
            server.signal(rustix::process::Signal::KILL);
            stop.store(true, Ordering::Relaxed);
        });
        tally.writes += written.into_inner();
        server.kill();
    }
    tally.report("pipelines of data and pointer");
}

#[test]
fn a_pipeline_survives_kill_9_in_its_order() {
    ordered_rounds(&SHARDS, 8);
}

#[test]
fn a_pipeline_survives_kill_9_in_its_order_at_power_durability() {
    if has_power("a_pipeline_survives_kill_9_in_its_order_at_power_durability") {
        ordered_rounds(&POWER, 3);
    }
}

#[test]
fn the_number_of_shards_may_change_between_runs() {
    let data = tempfile::tempdir().unwrap();
    for (run, shards) in ["1", "3", "2", "5"].into_iter().enumerate() {
        let server = Server::start(data.path(), &["--shards", shards]);
        let mut connection = server.connect();
        assert_eq!(connection.say("DBSIZE").text(), (run * 200).to_string());
        for i in 0..200 {
            assert!(connection.say(&format!("SET run{run}:{i} {shards}")).is_ok());
        }
        for old in 0..=run {
            assert_ne!(connection.say(&format!("GET run{old}:199")), Reply::Null);
        }
        server.kill();
    }
}
