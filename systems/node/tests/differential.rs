//! Seeded random pipelines against redis-server and against nodes of one and of three shards: the
//! bytes that come back must be the same, whatever hops are in between.
//!
//! `BEELINE_SEED=n cargo test -p beeline-node --test differential` replays one seed.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends at its first failure")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "how much was compared, or why not")]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use common::{PATIENCE, start};

struct Redis {
    child: Child,
    address: std::net::SocketAddr,
    _folder: tempfile::TempDir,
}

impl Redis {
    fn start() -> Result<Self, String> {
        let folder = tempfile::tempdir().unwrap();
        // Below the range for outgoing connections: who asks for a port of that range before the
        // server listens may be connected with itself.
        let start = u16::try_from(std::process::id() % 20_000).unwrap();
        let ports = 10_000 + start..32_000;
        let mut free =
            ports.filter(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok());
        let port = free.next().ok_or("no port is free")?;
        let child = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--port", &port.to_string()])
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("redis-server does not start here: {error}"))?;
        let redis = Self { child, address: ([127, 0, 0, 1], port).into(), _folder: folder };
        let begin = Instant::now();
        while TcpStream::connect(redis.address).is_err() {
            if begin.elapsed() > PATIENCE {
                return Err("redis-server did not open its port".into());
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Ok(redis)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % bound as u64) as usize
    }
    fn pick<'a>(&mut self, list: &[&'a str]) -> &'a str {
        list[self.below(list.len())]
    }
    fn key(&mut self) -> String {
        format!("k{}", self.below(12))
    }
    fn value(&mut self) -> String {
        match self.below(8) {
            0..4 => self.below(1000).to_string(),
            4..7 => format!("value{}", self.below(1000)),
            _ => "x".repeat(self.below(40_000)),
        }
    }
}

/// Where the generator knows its connection to be.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    in_transaction: bool,
}

/// A request that is the same to both. Replies are not switched inside transactions: Redis then
/// sends part of an array.
fn request(random: &mut Random, state: &mut State) -> Vec<String> {
    let request = any_request(random);
    match request[0].as_str() {
        "MULTI" => state.in_transaction = true,
        "EXEC" | "DISCARD" if state.in_transaction => *state = State::default(),
        "CLIENT" if state.in_transaction => return vec!["PING".into()],
        _ => {}
    }
    request
}

fn any_request(random: &mut Random) -> Vec<String> {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let (a, b, c) = (random.key(), random.key(), random.key());
    let value = random.value();
    let number = random.below(50);
    match random.below(34) {
        0..4 => vec!["SET".into(), a, value],
        4..8 => words(&format!("GET {a}")),
        8..11 => words(&format!("INCRBY {a} {number}")),
        11 => words(&format!("APPEND {a} {number}")),
        12 => words(&format!("DEL {a} {b} {c}")),
        13..15 => words(&format!("MGET {a} {b} {c} {a}")),
        15..17 => words(&format!("MSET {a} {number} {b} v{number}")),
        17 => words(&format!("MSETNX {a} 1 {b} 2")),
        18 => words(&format!("EXISTS {a} {b} {a}")),
        19 => words(&format!("RENAME {a} {b}")),
        20 => words(&format!("COPY {a} {b} REPLACE")),
        21 => words("DBSIZE"),
        22 => words(&format!("STRLEN {a}")),
        23 => words(&format!("SETRANGE {a} {number} zz")),
        24 => words(&format!("GETRANGE {a} -{number} -1")),
        25 => words(&format!("SELECT {}", random.pick(&["0", "1", "2", "77"]))),
        26 => words(random.pick(&["PING", "GET", "NONSENSE x y", "ECHO hello", "SET a"])),
        27 => words(random.pick(&["CLIENT REPLY SKIP", "CLIENT REPLY OFF", "CLIENT REPLY ON"])),
        28 => words("MULTI"),
        29..31 => words(random.pick(&["EXEC", "EXEC", "DISCARD", "UNWATCH"])),
        31 => words(&format!("WATCH {a} {b}")),
        32 => words(&format!("GETDEL {a}")),
        _ => words(random.pick(&["FLUSHDB", "RANDOMKEY absent", "TOUCH k1 k2 k3"])),
    }
}

/// Sends in pieces while it reads, until the marker comes back.
fn run(stream: &TcpStream, bytes: &[u8], pieces: usize, marker: &str) -> Vec<u8> {
    let mut writer = stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for piece in bytes.chunks(bytes.len() / pieces + 1) {
                writer.write_all(piece).unwrap();
            }
        });
        let mut replies = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        let mut reader = stream;
        let end = format!("{marker}\r\n").into_bytes();
        while !replies.ends_with(&end) {
            let count = reader.read(&mut buffer).unwrap_or_else(|error| {
                panic!("no more replies: {error}; {} bytes so far", replies.len())
            });
            assert!(count > 0, "the connection was closed");
            replies.extend_from_slice(&buffer[..count]);
        }
        replies
    })
}

fn compare(seed: u64, shards: usize, redis: &Redis) -> usize {
    let mut random = Random(seed | 1);
    let node = start(shards);
    let connect = |address| {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    };
    // Several clients, one at a time: with three shards they live on all of them.
    let address = node.redis_address().unwrap();
    let pairs: Vec<_> = (0..3).map(|_| (connect(redis.address), connect(address))).collect();
    let reset = b"*1\r\n$8\r\nFLUSHALL\r\n*2\r\n$4\r\nECHO\r\n$3\r\nend\r\n";
    assert_eq!(run(&pairs[0].0, reset, 1, "end"), run(&pairs[0].1, reset, 1, "end"));
    if seed.is_multiple_of(2) {
        for (theirs, ours) in &pairs {
            // The replies differ in the number of the connection.
            let hello = b"HELLO 3\r\nECHO hi\r\n";
            run(theirs, hello, 1, "hi");
            run(ours, hello, 1, "hi");
        }
    }
    let mut compared = 0;
    for round in 0..14 {
        let (theirs, ours) = &pairs[random.below(pairs.len())];
        let mut state = State::default();
        let count = 1 + random.below(if round % 4 == 0 { 900 } else { 60 });
        let mut requests: Vec<Vec<String>> =
            (0..count).map(|_| request(&mut random, &mut state)).collect();
        let marker = format!("marker{round}");
        requests.push(vec!["DISCARD".into()]);
        requests.push(vec!["CLIENT".into(), "REPLY".into(), "ON".into()]);
        requests.push(vec!["ECHO".into(), marker.clone()]);
        let mut bytes = Vec::new();
        for request in &requests {
            bytes.extend(format!("*{}\r\n", request.len()).into_bytes());
            for word in request {
                bytes.extend(format!("${}\r\n{word}\r\n", word.len()).into_bytes());
            }
        }
        let pieces = 1 + random.below(5);
        let expected = run(theirs, &bytes, 1, &marker);
        let got = run(ours, &bytes, pieces, &marker);
        if expected != got {
            let at = expected.iter().zip(&got).take_while(|(left, right)| left == right).count();
            let show = |bytes: &[u8]| {
                String::from_utf8_lossy(&bytes[at.saturating_sub(120)..(at + 80).min(bytes.len())])
                    .into_owned()
            };
            panic!(
                "seed {seed}, {shards} shards, round {round}: differ at byte {at}\nredis: {:?}\n\
                 ours:  {:?}",
                show(&expected),
                show(&got)
            );
        }
        compared += count;
    }
    node.stop();
    compared
}

#[test]
fn random_pipelines_are_answered_as_by_redis_with_one_and_three_shards() {
    let skipped = |reason| writeln!(std::io::stderr(), "skipped: {reason}");
    let Ok(redis) = Redis::start().map_err(skipped) else { return };
    let seeds: Vec<u64> = match std::env::var("BEELINE_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (1..=6).map(|seed| seed * 7919).collect(),
    };
    let mut compared = 0;
    for &seed in &seeds {
        for shards in [1, 3] {
            compared += compare(seed, shards, &redis);
        }
    }
    println!("{compared} requests compared over {} seeds", seeds.len());
}
