//! What a backup costs the clients that write meanwhile.
//!
//! A Redis client sets small values at a node that holds half a GiB, once with nothing beside it and
//! once while the node writes a snapshot (BGSAVE, as `beeline kv backup` asks for); rounds
//! alternate. The figure is the 99th percentile of a write's round trip.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use beeline_kv::Eviction;
use beeline_node::{Node, NodeConfig, RedisDoor, ServerOptions};
use beeline_pmem::{Durability, PoolKind, PoolOptions};

use super::Bench;
use crate::bench::report::{Better, Row};
use crate::bench::turns::{online, unpin};

const VALUE_BYTES: usize = 1024;
/// Requests sent together while the store is filled.
const BATCH: usize = 64;
/// Pause between two measured writes: clients that write, not a flood.
const PAUSE: Duration = Duration::from_micros(200);

struct Client(TcpStream);

impl Client {
    fn connect(node: &Node) -> anyhow::Result<Self> {
        let address = node.redis_address().context("the node has a Redis door")?;
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(Self(stream))
    }

    /// Sends requests and reads until `replies` lines came.
    fn ask(&mut self, requests: &[u8], replies: usize) -> anyhow::Result<Vec<u8>> {
        self.0.write_all(requests)?;
        let (mut all, mut part) = (Vec::new(), [0; 16 << 10]);
        while all.iter().filter(|byte| **byte == b'\n').count() < replies {
            let read = self.0.read(&mut part)?;
            ensure!(read > 0, "the node closed the connection");
            all.extend_from_slice(&part[..read]);
        }
        ensure!(all.first() != Some(&b'-'), "{}", String::from_utf8_lossy(&all));
        Ok(all)
    }
}

fn set(request: &mut Vec<u8>, key: &str, value: &[u8]) {
    let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n", key.len(), value.len());
    request.extend_from_slice(head.as_bytes());
    request.extend_from_slice(value);
    request.extend_from_slice(b"\r\n");
}

fn fill(bench: &Bench<'_>, node: &Node, pairs: usize) -> anyhow::Result<()> {
    let progress = bench.output.progress(pairs as u64, "storing pairs");
    let mut client = Client::connect(node)?;
    let value = [7; VALUE_BYTES];
    for first in (0..pairs).step_by(BATCH) {
        let mut requests = Vec::new();
        let last = pairs.min(first + BATCH);
        (first..last).for_each(|n| set(&mut requests, &format!("pair:{n}"), &value));
        client.ask(&requests, last - first)?;
        progress.inc((last - first) as u64);
    }
    progress.finish_and_clear();
    Ok(())
}

/// Writes until `enough`; round trips in microseconds, sorted.
fn write(client: &mut Client, mut enough: impl FnMut() -> bool) -> anyhow::Result<Vec<f64>> {
    let mut latencies = Vec::new();
    while !enough() || latencies.len() < 100 {
        let mut request = Vec::new();
        set(&mut request, &format!("written:{}", latencies.len() % 1000), &[1; 64]);
        let start = Instant::now();
        client.ask(&request, 1)?;
        latencies.push(start.elapsed().as_secs_f64() * 1e6);
        std::thread::sleep(PAUSE);
    }
    latencies.sort_by(f64::total_cmp);
    Ok(latencies)
}

fn percentile(sorted: &[f64], hundredths: usize) -> f64 {
    sorted.get(sorted.len() * hundredths / 100).copied().unwrap_or_default()
}

/// Asks for a snapshot and waits for it.
fn snapshot(node: &Node) -> anyhow::Result<f64> {
    let mut client = Client::connect(node)?;
    let start = Instant::now();
    client.ask(b"BGSAVE\r\n", 1)?;
    loop {
        let said = client.ask(b"INFO persistence\r\n", 8)?;
        let said = String::from_utf8_lossy(&said);
        if said.contains("rdb_bgsave_in_progress:0") {
            ensure!(said.contains("rdb_last_bgsave_status:ok"), "the snapshot failed: {said}");
            return Ok(start.elapsed().as_secs_f64());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// See the module's documentation.
pub fn rows(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    unpin()?;
    let bytes = bench.options.size(512 << 20, 4 << 20);
    let alone = bench.options.size(Duration::from_secs(3), Duration::from_millis(50));
    let folder = tempfile::tempdir()?;
    let config = NodeConfig {
        data_directory: folder.path().to_owned(),
        pool: PoolOptions {
            kind: Some(PoolKind::Dram),
            durability: Durability::None,
            segment_bytes: 16 << 20,
            capacity_bytes: bytes as u64 * 2 + (1 << 30),
            ..PoolOptions::default()
        },
        shards: online().clamp(1, 16),
        pin_shards: false,
        spin: Duration::from_micros(20),
        max_memory_bytes: 0,
        feed_bytes: 0,
        eviction: Eviction::NoEviction,
        cooperative_write_back: true,
        accept_damage: false,
        fabric: ServerOptions::default(),
        shutdown_wait: Duration::from_secs(2),
        replication: None,
        redis: Some(RedisDoor::at(([127, 0, 0, 1], 0).into())),
    };
    let node = Node::start(&config)?;
    fill(bench, &node, bytes / VALUE_BYTES)?;
    let mut client = Client::connect(&node)?;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    let (mut medians, mut seconds, mut longest) = ([0.0; 2], 0.0_f64, [0.0_f64; 2]);
    for _ in 0..bench.options.turns() {
        let end = Instant::now() + alone;
        let quiet = write(&mut client, || Instant::now() >= end)?;
        let done = AtomicBool::new(false);
        let beside = std::thread::scope(|scope| {
            let saving = scope.spawn(|| {
                let taken = snapshot(&node);
                done.store(true, Ordering::Release);
                taken
            });
            let beside = write(&mut client, || done.load(Ordering::Acquire));
            let taken = saving.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
            seconds = seconds.max(taken);
            beside
        })?;
        without.push(percentile(&quiet, 99));
        with.push(percentile(&beside, 99));
        medians = [percentile(&quiet, 50), percentile(&beside, 50)];
        longest[0] = longest[0].max(quiet.last().copied().unwrap_or_default());
        longest[1] = longest[1].max(beside.last().copied().unwrap_or_default());
    }
    drop(client);
    node.stop();
    let case =
        format!("SET beside a backup of {}, p99", crate::config::values::human_bytes(bytes as u64));
    Ok(vec![
        Row::new(case, "during", "us", Better::Lower, &with)
            .against("without", &with, &without)
            .beside("p50 during, without", format!("{:.0}, {:.0}", medians[1], medians[0]))
            .beside("longest during, without", format!("{:.0}, {:.0}", longest[1], longest[0]))
            .beside("backup takes at most", format!("{seconds:.1} s")),
    ])
}
