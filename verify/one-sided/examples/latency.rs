//! Latency and throughput of the three protocols over shared memory, one shard, one client, two
//! threads: `cargo run --release -p beeline-verify-one-sided --example latency [OPERATIONS
//! [boom | rdma-kv | rdmp-kv [BYTES [OUTSTANDING [get | put]]]]]`.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking; each uses a part of the shared harness"
)]

#[path = "../tests/common/threaded.rs"]
mod threaded;

use std::sync::Arc;
use std::time::Instant;

use beeline_fabric::Device;
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_kv::wire::Protocol;
use beeline_kv_client::{Client, ClientOptions, Command, PutOptions};
use beeline_pmem::PoolOptions;

fn shm() -> Arc<dyn Device> {
    ShmDevice::open(ShmConfig::default()).unwrap()
}

const KEYS: u64 = 10_000;

fn percentile(sorted: &[u64], percent: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * percent / 100.0) as usize] as f64 / 1000.0
}

fn one_by_one(name: &str, operations: u64, mut operation: impl FnMut(u64)) {
    for number in 0..operations / 10 {
        operation(number);
    }
    let mut times = Vec::with_capacity(operations as usize);
    for number in 0..operations {
        let start = Instant::now();
        operation(number);
        times.push(start.elapsed().as_nanos() as u64);
    }
    times.sort_unstable();
    println!(
        "{name:<16} p50 {:>7.2} us  p99 {:>7.2} us  p99.9 {:>8.2} us",
        percentile(&times, 50.0),
        percentile(&times, 99.0),
        percentile(&times, 99.9),
    );
}

fn pipelined(
    name: &str,
    client: &mut Client,
    operations: u64,
    depth: u64,
    submit: impl Fn(&mut Client, u64),
) {
    let start = Instant::now();
    let (mut submitted, mut finished) = (0, 0);
    while finished < operations {
        while submitted < operations && submitted - finished < depth {
            submit(client, submitted);
            submitted += 1;
        }
        client
            .poll(&mut |_, answer| {
                answer.unwrap();
                finished += 1;
            })
            .unwrap();
    }
    let rate = operations as f64 / start.elapsed().as_secs_f64() / 1e6;
    println!("{name:<16} {depth} outstanding: {rate:.3} million operations/s");
}

fn main() {
    let operations: u64 =
        std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(200_000);
    let only = std::env::args().nth(2);
    let only_bytes: Option<usize> = std::env::args().nth(3).and_then(|text| text.parse().ok());
    let only_depth: Option<u64> = std::env::args().nth(4).and_then(|text| text.parse().ok());
    let only_verb = std::env::args().nth(5);
    let wanted = |verb: &str| only_verb.as_ref().is_none_or(|only| only == verb);
    for value_bytes in [64_usize, 4096] {
        for protocol in Protocol::ALL {
            let named = only.as_ref().is_none_or(|only| protocol.name().eq_ignore_ascii_case(only));
            if !named || only_bytes.is_some_and(|bytes| bytes != value_bytes) {
                continue;
            }
            let pool = PoolOptions::volatile(64 << 20, 8 << 30);
            let server = threaded::Server::start(shm, 1, &pool);
            let options = ClientOptions { protocol, ..ClientOptions::default() };
            let mut client = threaded::connect(&server.doors, shm, options).unwrap();
            let value = vec![7; value_bytes];
            let (put, mut out) = (PutOptions::default(), Vec::new());
            let key = |number: u64| (number % KEYS).to_le_bytes();
            println!("{} {value_bytes} B", protocol.name());
            if only_depth.is_none() {
                one_by_one("put", operations, |number| {
                    client.put(0, &key(number), &value, put).unwrap();
                });
                one_by_one("get", operations, |number| {
                    client.get_into(0, &key(number), &mut out).unwrap();
                });
            }
            let depths = only_depth.map_or(vec![1, 4, 16, 32], |depth| vec![depth]);
            for depth in depths {
                // Gets need the keys, puts or not.
                let puts = if wanted("put") { operations * 2 } else { KEYS };
                pipelined("put", &mut client, puts, depth, |client, number| {
                    let (key, value) = (key(number), &value);
                    let command = Command::Put { database: 0, key: &key, value, options: put };
                    client.submit(command).unwrap();
                });
                if !wanted("get") {
                    continue;
                }
                pipelined("get", &mut client, operations * 2, depth, |client, number| {
                    let key = key(number);
                    client.submit(Command::Get { database: 0, key: &key }).unwrap();
                });
            }
        }
    }
}
