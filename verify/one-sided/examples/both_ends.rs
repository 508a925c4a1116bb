//! Processor time of one request at either end, without the other's: client and server take turns
//! on one thread, so that no cache line crosses and nobody waits.
//! `cargo run --release -p beeline-verify-one-sided --example both_ends [REQUESTS [boom | rdma-kv [DEPTH
//! [get | put]]]]`.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking; each uses a part of the shared harness"
)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use beeline_kv::wire::Protocol;
use beeline_kv_client::{Client, Command, PutOptions};
use common::{Provider, Rig, RigOptions};

const KEYS: u64 = 4096;

#[derive(Default)]
struct Times {
    submit: Duration,
    serve: Duration,
    poll: Duration,
}

/// `rounds` rounds of `depth` requests; `one` submits one of them.
fn rounds(
    rig: &Rig,
    client: &mut Client,
    (rounds, depth): (u64, u64),
    one: impl Fn(&mut Client, u64),
) -> Times {
    let mut times = Times::default();
    let mut number = 0_u64;
    for round in 0..rounds {
        let start = Instant::now();
        for _ in 0..depth {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(round | 1);
            one(client, (number >> 33) % KEYS);
        }
        client.flush();
        let submitted = Instant::now();
        let mut nodes = rig.nodes.borrow_mut();
        nodes.iter_mut().for_each(|node| assert!(node.step() < 1 << 20));
        let served = Instant::now();
        let mut delivered = 0;
        while delivered < depth {
            let count = client.poll(&mut |_, answer| assert!(answer.is_ok())).unwrap() as u64;
            if count == 0 {
                // A segment ran out: the grant takes a round of its own.
                nodes.iter_mut().for_each(|node| assert!(node.step() < 1 << 20));
            }
            delivered += count;
        }
        times.poll += served.elapsed();
        times.submit += submitted - start;
        times.serve += served - submitted;
    }
    times
}

fn main() {
    let total: u64 = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(400_000);
    let value = [7; 64];
    let put = PutOptions::default();
    println!("{:<24}{:>12}{:>12}{:>12}   ns per request", "", "submit", "server", "poll");
    let only = std::env::args().nth(2);
    let verb = std::env::args().nth(4);
    for protocol in [Protocol::Boom, Protocol::Oblivious] {
        if only.as_ref().is_some_and(|only| !protocol.name().eq_ignore_ascii_case(only)) {
            continue;
        }
        let options = RigOptions {
            segment_bytes: 64 << 20,
            capacity_bytes: 4 << 30,
            ..RigOptions::default()
        };
        let rig = Rig::new(Provider::Shm, &options);
        let mut client = rig.speaking(protocol);
        for number in 0..KEYS {
            rig.put(&mut client, &number.to_be_bytes(), &value);
        }
        let depth = std::env::args().nth(3).and_then(|text| text.parse().ok());
        for depth in depth.map_or(vec![1, 16], |depth: u64| vec![depth]) {
            let mut show = |name: &str, one: &dyn Fn(&mut Client, u64)| {
                if verb.as_ref().is_some_and(|verb| verb != name) {
                    return;
                }
                rounds(&rig, &mut client, (total / depth / 4, depth), one);
                let mut best = [f64::MAX; 3];
                for _ in 0..5 {
                    let count = total / depth / 5;
                    let times = rounds(&rig, &mut client, (count, depth), one);
                    let per = |time: Duration| time.as_nanos() as f64 / (count * depth) as f64;
                    for (best, time) in best.iter_mut().zip([times.submit, times.serve, times.poll])
                    {
                        *best = best.min(per(time));
                    }
                }
                let name = format!("{} {name}, {depth} at a time", protocol.name());
                println!("{name:<24}{:>12.0}{:>12.0}{:>12.0}", best[0], best[1], best[2]);
            };
            show("get", &|client, number| {
                let key = number.to_be_bytes();
                client.submit(Command::Get { database: 0, key: &key }).unwrap();
            });
            show("put", &|client, number| {
                let key = number.to_be_bytes();
                let command = Command::Put { database: 0, key: &key, value: &value, options: put };
                client.submit(command).unwrap();
            });
        }
    }
}
