//! A node in this process and clients over real sockets.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends at its first failure")]

pub mod replicas;
pub mod units;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use beeline_env::{Clock, SystemClock};
use beeline_kv::Eviction;
use beeline_node::{Node, NodeConfig, RedisDoor};
use beeline_pmem::{Durability, PoolKind, PoolOptions};

/// Longest wait for anything; far beyond what a loaded machine needs.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn config(shards: usize) -> NodeConfig {
    NodeConfig {
        data_directory: std::env::temp_dir(),
        pool: PoolOptions {
            kind: Some(PoolKind::Dram),
            durability: Durability::None,
            segment_bytes: 4 << 20,
            capacity_bytes: 512 << 20,
            ..PoolOptions::default()
        },
        shards,
        pin_shards: false,
        spin: Duration::from_micros(20),
        max_memory_bytes: 0,
        feed_bytes: 0,
        eviction: Eviction::NoEviction,
        cooperative_write_back: true,
        accept_damage: false,
        fabric: Default::default(),
        shutdown_wait: Duration::from_secs(2),
        redis: Some(RedisDoor::at("127.0.0.1:0".parse().unwrap())),
        replication: None,
    }
}

pub fn start(shards: usize) -> Node {
    Node::start(&config(shards)).unwrap()
}

pub fn start_with(shards: usize, change: impl FnOnce(&mut RedisDoor)) -> Node {
    let mut config = config(shards);
    change(config.redis.as_mut().unwrap());
    Node::start(&config).unwrap()
}

/// The system's clocks, the wall clock moved.
#[derive(Debug, Default)]
pub struct Shifted(AtomicI64);

impl Shifted {
    pub fn jump(&self, by: Duration, forward: bool) {
        let milliseconds = i64::try_from(by.as_millis()).unwrap();
        self.0.fetch_add(if forward { milliseconds } else { -milliseconds }, Ordering::Relaxed);
    }
}

impl Clock for Shifted {
    fn monotonic_ns(&self) -> u64 {
        SystemClock.monotonic_ns()
    }

    fn unix_ms(&self) -> u64 {
        SystemClock.unix_ms().saturating_add_signed(self.0.load(Ordering::Relaxed))
    }
}

/// A node whose wall clock the test moves.
pub fn start_shifted(config: &NodeConfig) -> (Node, Arc<Shifted>) {
    let clock = Arc::new(Shifted::default());
    let node = Node::start_with_clock(config, Vec::new(), Arc::<Shifted>::clone(&clock)).unwrap();
    (node, clock)
}

pub struct Client {
    pub stream: TcpStream,
    received: Vec<u8>,
    at: usize,
}

impl Client {
    pub fn connect(node: &Node) -> Self {
        Self::to(node.redis_address().unwrap())
    }

    pub fn to(address: std::net::SocketAddr) -> Self {
        Self::from(TcpStream::connect(address).unwrap())
    }

    pub fn from(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, received: Vec::new(), at: 0 }
    }

    pub fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).unwrap();
    }

    pub fn expect(&mut self, reply: &str) {
        let mut got = Vec::new();
        while got.len() < reply.len() {
            got.push(self.byte());
        }
        assert_eq!(String::from_utf8_lossy(&got), reply);
    }

    pub fn ask(&mut self, request: &str) -> String {
        self.send(&format!("{request}\r\n"));
        self.reply()
    }

    fn byte(&mut self) -> u8 {
        if self.at == self.received.len() {
            self.received.resize(64 << 10, 0);
            let count = self.stream.read(&mut self.received).unwrap();
            assert!(count > 0, "the node closed the connection");
            self.received.truncate(count);
            self.at = 0;
        }
        self.at += 1;
        self.received[self.at - 1]
    }

    pub fn line(&mut self) -> String {
        let mut line = Vec::new();
        loop {
            match self.byte() {
                b'\n' => break,
                b'\r' => {}
                byte => line.push(byte),
            }
        }
        String::from_utf8_lossy(&line).into_owned()
    }

    /// One whole reply, nested ones in brackets.
    pub fn reply(&mut self) -> String {
        let line = self.line();
        let count = |line: &str| line[1..].parse::<i64>().unwrap();
        match line.as_bytes()[0] {
            b'$' if count(&line) >= 0 => {
                let bytes: Vec<u8> = (0..count(&line) + 2).map(|_| self.byte()).collect();
                String::from_utf8_lossy(&bytes[..bytes.len() - 2]).into_owned()
            }
            b'*' if count(&line) >= 0 => {
                let parts: Vec<String> = (0..count(&line)).map(|_| self.reply()).collect();
                format!("[{}]", parts.join(","))
            }
            _ => line,
        }
    }

    /// Whether the node answers `+PONG`; it may close or refuse instead.
    pub fn rest_or_pong(&mut self) -> bool {
        let mut bytes = [0; 7];
        self.stream.read_exact(&mut bytes).is_ok() && bytes == *b"+PONG\r\n"
    }

    /// Everything until the node closes.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut rest = self.received[self.at..].to_vec();
        let _ = self.stream.read_to_end(&mut rest);
        self.at = self.received.len();
        rest
    }
}

/// Turns of all loops in a quiet half second. A loop that spins makes tens of thousands.
pub fn turns_while_quiet(node: &Node) -> u64 {
    std::thread::sleep(Duration::from_millis(300));
    let before = node.handle().stats().loops.turns;
    std::thread::sleep(Duration::from_millis(500));
    node.handle().stats().loops.turns - before
}

/// Fails unless the node comes to rest within a few looks: threads that waited for a processor may
/// still have been at work when the first look began.
#[track_caller]
pub fn assert_quiet(node: &Node, state: &str) {
    let mut turns = u64::MAX;
    for _ in 0..6 {
        turns = turns_while_quiet(node);
        if turns < 100 {
            return;
        }
    }
    panic!("{turns} turns in half a second while {state}");
}

/// Waits until `done`, at most [`PATIENCE`].
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A key of each shard: the first of `prefix0`, `prefix1`, … that lives there.
pub fn keys_of_shards(node: &Node, prefix: &str) -> Vec<String> {
    let (shards, seed) = (node.shards(), node.hash_seed());
    (0..shards)
        .map(|shard| {
            (0..)
                .map(|number| format!("{prefix}{number}"))
                .find(|key| {
                    let hash = beeline_kv::hash_key(seed, 0, key.as_bytes());
                    beeline_kv::shard_of_hash(hash, shards) == shard
                })
                .unwrap()
        })
        .collect()
}
