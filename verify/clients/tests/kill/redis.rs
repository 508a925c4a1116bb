//! A Redis client that writes pipelines of mixed commands and knows what it was told.

use std::sync::atomic::{AtomicBool, Ordering};

use beeline_verify_clients::resp::encode;
use beeline_verify_clients::{Connection, Reply, Server};

use crate::ledger::{Ledger, Random, State};

const KEYS: u64 = 16;
const COUNTERS: u64 = 4;
/// Long enough that nothing given it expires during a run.
const LONG: &str = "100000";
/// Milliseconds; over before the node is back.
const SHORT: &str = "20";

/// What a reply must be.
#[derive(Clone, Copy, Debug)]
enum Expected {
    Ok,
    AnyInteger,
    Integer(u64),
}

/// One client's requests of one round.
pub struct Client {
    prefix: String,
    connection: Connection,
    pub ledger: Ledger,
    random: Random,
    pub next: u64,
}

impl Client {
    pub fn new(number: u64, server: &Server, ledger: &Ledger, random: u64, next: u64) -> Self {
        let prefix = format!("c{number}:");
        Self {
            connection: server.connect(),
            ledger: ledger.part(&prefix),
            random: Random(random | 1),
            next,
            prefix,
        }
    }

    /// Writes until the connection breaks or `stop` is set.
    pub fn run(&mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            if self.batch().is_err() {
                return;
            }
        }
    }

    /// A command on `name` and the state it leads to.
    fn command(&mut self, name: &str) -> (Vec<u8>, State, Expected) {
        self.next += 1;
        let number = self.next;
        let value = self.random.value(number);
        let (key, value) = (name.as_bytes(), value.as_bytes());
        match (self.random.below(10), self.ledger.state(name)) {
            (0, _) => (encode(&[b"DEL", key]), State::Absent, Expected::AnyInteger),
            (1, _) => (
                encode(&[b"SET", key, value, b"EX", LONG.as_bytes()]),
                State::Kept { value: number, expires: true },
                Expected::Ok,
            ),
            (2, _) => (
                encode(&[b"SET", key, value, b"PX", SHORT.as_bytes()]),
                State::Brief { value: number },
                Expected::Ok,
            ),
            (3, State::Kept { value, .. }) => (
                encode(&[b"EXPIRE", key, LONG.as_bytes()]),
                State::Kept { value, expires: true },
                Expected::Integer(1),
            ),
            (4, State::Kept { value, expires }) => (
                encode(&[b"PERSIST", key]),
                State::of(value),
                Expected::Integer(u64::from(expires)),
            ),
            (5, State::Absent) => {
                (encode(&[b"EXPIRE", key, b"10"]), State::Absent, Expected::Integer(0))
            }
            _ => (encode(&[b"SET", key, value]), State::of(number), Expected::Ok),
        }
    }

    /// One pipeline: every key at most once, then a pair that is equal always.
    fn batch(&mut self) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        let mut sent: Vec<(String, Expected)> = Vec::new();
        for key in 0..KEYS {
            if self.random.below(3) == 0 {
                continue;
            }
            let name = format!("{}k{key}", self.prefix);
            let (request, state, expected) = self.command(&name);
            bytes.extend(request);
            self.ledger.sent(&name, state);
            sent.push((name, expected));
        }
        for counter in 0..COUNTERS {
            let name = format!("{}n{counter}", self.prefix);
            let next = match self.ledger.state(&name) {
                State::Kept { value, .. } => value + 1,
                _ => 1,
            };
            bytes.extend(encode(&[b"INCR", name.as_bytes()]));
            self.ledger.sent(&name, State::of(next));
            sent.push((name, Expected::Integer(next)));
        }
        self.next += 1;
        let value = self.next.to_string();
        let pair = [format!("{}left", self.prefix), format!("{}right", self.prefix)];
        let (left, right) = (pair[0].as_bytes(), pair[1].as_bytes());
        let transaction = self.random.below(2) == 0;
        if transaction {
            bytes.extend(encode(&[b"MULTI"]));
            bytes.extend(encode(&[b"SET", left, value.as_bytes()]));
            bytes.extend(encode(&[b"SET", right, value.as_bytes()]));
            bytes.extend(encode(&[b"EXEC"]));
        } else {
            bytes.extend(encode(&[b"MSET", left, value.as_bytes(), right, value.as_bytes()]));
        }
        for name in &pair {
            self.ledger.sent(name, State::of(self.next));
        }
        self.connection.send(&bytes)?;
        for (name, expected) in sent {
            let reply = self.connection.reply()?;
            let good = match expected {
                Expected::Ok => reply.is_ok(),
                Expected::AnyInteger => matches!(reply, Reply::Integer(_)),
                Expected::Integer(number) => reply == Reply::Integer(number as i64),
            };
            assert!(good, "{name}: {reply:?} where {expected:?} was due");
            self.ledger.settled(&name);
        }
        for _ in 0..if transaction { 3 } else { 0 } {
            self.connection.reply()?;
        }
        let last = self.connection.reply()?;
        assert!(matches!(last, Reply::Array(_)) || last.is_ok(), "{last:?}");
        for name in &pair {
            self.ledger.settled(name);
        }
        Ok(())
    }
}
