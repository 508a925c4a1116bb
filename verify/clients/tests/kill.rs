//! kill -9 under load, again and again, with every acknowledged effect checked after the restart.
//!
//! Each client thread owns its keys and writes to each of them one request at a time (several keys
//! are in flight together), so it knows, per key, the last acknowledged state and the one request
//! whose fate is open. After the restart a key holds one of the two; anything else is a lost or an
//! invented write. Pairs written by MULTI/EXEC are equal always.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use beeline_verify_clients::resp::encode;
use beeline_verify_clients::{Connection, Reply, Server, deep};

const CLIENTS: u64 = 4;
const KEYS: u64 = 16;

/// What one key must hold: the last acknowledged state, and perhaps the one in flight.
#[derive(Clone, Debug, Default)]
struct Fate {
    acknowledged: Option<u64>,
    in_flight: Option<Option<u64>>,
}

/// One client's requests of one round.
struct Client {
    number: u64,
    connection: Connection,
    fates: BTreeMap<String, Fate>,
    random: u64,
    next: u64,
}

impl Client {
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Writes until the connection breaks or `stop` is set; returns acknowledged writes.
    fn run(&mut self, stop: &AtomicBool, acknowledged: &AtomicU64) {
        while !stop.load(Ordering::Relaxed) {
            if self.batch(acknowledged).is_err() {
                return;
            }
        }
    }

    /// One pipeline: every key at most once.
    fn batch(&mut self, acknowledged: &AtomicU64) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        let mut wanted: Vec<(String, Option<u64>)> = Vec::new();
        for key in 0..KEYS {
            if self.random().is_multiple_of(3) {
                continue;
            }
            self.next += 1;
            let value = self.next;
            let name = format!("c{}:k{key}", self.number);
            let padding = "x".repeat(usize::try_from(self.random() % 300).unwrap_or(0));
            let state = if self.random().is_multiple_of(5) {
                bytes.extend(encode(&[b"DEL", name.as_bytes()]));
                None
            } else {
                let text = format!("{value}:{padding}");
                bytes.extend(encode(&[b"SET", name.as_bytes(), text.as_bytes()]));
                Some(value)
            };
            self.fates.entry(name.clone()).or_default().in_flight = Some(state);
            wanted.push((name, state));
        }
        // A pair that is equal always.
        self.next += 1;
        let value = self.next.to_string();
        let (left, right) = (format!("c{}:left", self.number), format!("c{}:right", self.number));
        bytes.extend(encode(&[b"MULTI"]));
        bytes.extend(encode(&[b"SET", left.as_bytes(), value.as_bytes()]));
        bytes.extend(encode(&[b"SET", right.as_bytes(), value.as_bytes()]));
        bytes.extend(encode(&[b"EXEC"]));
        self.fates.entry(left.clone()).or_default().in_flight = Some(Some(self.next));
        self.connection.send(&bytes)?;
        for (name, state) in wanted {
            let reply = self.connection.reply()?;
            let good = matches!(reply, Reply::Integer(_)) || reply.is_ok();
            assert!(good, "{name}: {reply:?}");
            self.settle(&name, state);
            acknowledged.fetch_add(1, Ordering::Relaxed);
        }
        for _ in 0..3 {
            self.connection.reply()?;
        }
        let executed = self.connection.reply()?;
        assert!(matches!(executed, Reply::Array(_)), "{executed:?}");
        self.settle(&left, Some(self.next));
        Ok(())
    }

    fn settle(&mut self, name: &str, state: Option<u64>) {
        let fate = self.fates.entry(name.to_owned()).or_default();
        *fate = Fate { acknowledged: state, in_flight: None };
    }
}

fn stored(connection: &mut Connection, name: &str) -> Option<u64> {
    match connection.call(&[b"GET", name.as_bytes()]) {
        Ok(Reply::Null) => None,
        Ok(Reply::Bulk(bytes)) => {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let number = text.split(':').next().and_then(|n| n.parse().ok());
            Some(number.unwrap_or_else(|| panic!("{name} holds {text:?}")))
        }
        other => panic!("GET {name}: {other:?}"),
    }
}

/// Checks every key and takes what is there as acknowledged for the next round.
fn check(server: &Server, fates: &mut BTreeMap<String, Fate>, round: u64) {
    let mut connection = server.connect();
    for (name, fate) in fates.iter_mut() {
        let found = stored(&mut connection, name);
        let possible = found == fate.acknowledged || fate.in_flight == Some(found);
        assert!(possible, "round {round}: {name} holds {found:?}; {fate:?}");
        *fate = Fate { acknowledged: found, in_flight: None };
    }
    for client in 0..CLIENTS {
        let left = stored(&mut connection, &format!("c{client}:left"));
        let right = stored(&mut connection, &format!("c{client}:right"));
        assert_eq!(left, right, "round {round}: half of a transaction of client {client}");
    }
}

fn rounds(data: &std::path::Path, flags: &[&str], rounds: u64, seed: u64) -> u64 {
    let mut fates: BTreeMap<String, Fate> = BTreeMap::new();
    let acknowledged = AtomicU64::new(0);
    let mut random = seed | 1;
    let mut next = 1;
    for round in 0..rounds {
        let server = Server::start(data, flags);
        check(&server, &mut fates, round);
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let life = Duration::from_millis(30 + (random >> 33) % 250);
        let stop = AtomicBool::new(false);
        let mut clients: Vec<Client> = (0..CLIENTS)
            .map(|number| {
                let prefix = format!("c{number}:");
                let own = fates.iter().filter(|(name, _)| name.starts_with(&prefix));
                Client {
                    number,
                    connection: server.connect(),
                    fates: own.map(|(name, fate)| (name.clone(), fate.clone())).collect(),
                    random: random ^ (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15),
                    next,
                }
            })
            .collect();
        std::thread::scope(|scope| {
            for client in &mut clients {
                scope.spawn(|| client.run(&stop, &acknowledged));
            }
            std::thread::sleep(life);
            server.kill();
            stop.store(true, Ordering::Relaxed);
        });
        for client in clients {
            next = next.max(client.next);
            fates.extend(client.fates);
        }
    }
    let server = Server::start(data, flags);
    check(&server, &mut fates, rounds);
    acknowledged.load(Ordering::Relaxed)
}

#[test]
fn every_acknowledged_write_survives_kill_9_under_load() {
    let count = if deep() { 200 } else { 6 };
    let data = tempfile::tempdir().unwrap();
    let checked = rounds(data.path(), &["--shards", "2"], count, 0xBEE);
    beeline_verify_clients::note(&format!("{count} rounds, {checked} acknowledged writes"));
    assert!(checked > count * 20, "only {checked} writes were acknowledged: nothing was tested");
}

#[test]
fn every_acknowledged_write_survives_kill_9_at_power_durability() {
    let count = if deep() { 50 } else { 3 };
    let data = tempfile::tempdir().unwrap();
    let flags = ["--shards", "2", "--durability", "power"];
    // A memory file system cannot promise power durability; then the node says so and ends.
    match Server::try_start(data.path(), &flags) {
        Ok(server) => drop(server),
        Err((_, said)) => {
            let test = "every_acknowledged_write_survives_kill_9_at_power_durability";
            return beeline_verify_clients::skip(test, said.trim());
        }
    }
    let checked = rounds(data.path(), &flags, count, 0xFEED);
    beeline_verify_clients::note(&format!("{count} rounds, {checked} acknowledged writes"));
    assert!(checked > count * 5, "only {checked} writes were acknowledged: nothing was tested");
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
