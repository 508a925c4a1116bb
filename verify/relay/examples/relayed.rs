//! Round trips of 8 B and one-way sends of 1 MiB through two relays, beside the kernel's TCP on the
//! same host: `cargo run --release -p beeline-verify-relay --example relayed`.
//!
//! Four threads spin (two programs, two relays), where between hosts each host has two: on fewer
//! than four processors the figures are of programs and relays that take turns.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a program that prints what it measured"
)]

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_verify_relay::program::{Program, Received};
use beeline_verify_relay::{Over, World};

const ROUNDS: usize = 5_000;
const LARGE: usize = 1 << 20;
const LARGES: usize = 200;
/// Turns taken by threads of their own until then.
const IDLE_TURNS: u32 = 64;

fn spin(turn: &mut u32) {
    *turn += 1;
    if turn.is_multiple_of(IDLE_TURNS) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

fn receive(program: &mut Program, bytes: &mut [u8]) {
    let (mut have, mut turn) = (0, 0);
    while have < bytes.len() {
        match program.receive(&mut bytes[have..]) {
            Received::Bytes(count) => have += count,
            Received::Nothing => spin(&mut turn),
            other => panic!("{other:?}"),
        }
    }
}

fn send(program: &mut Program, bytes: &[u8]) {
    let (mut sent, mut turn) = (0, 0);
    while sent < bytes.len() {
        let count = program.send(&bytes[sent..]);
        sent += count;
        if count == 0 {
            spin(&mut turn);
        }
    }
}

/// Median and least of what is measured in `ROUNDS` round trips.
fn report(what: &str, mut times: Vec<Duration>, large: Duration) {
    times.sort();
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let rate = (LARGE * LARGES) as f64 / large.as_secs_f64() / 1e9;
    println!(
        "{what}: 8 B round trip {:.2} us (least {:.2}, 99 % {:.2}); 1 MiB sends {rate:.2} GB/s",
        micros(times[times.len() / 2]),
        micros(times[0]),
        micros(times[times.len() * 99 / 100]),
    );
}

fn relayed(over: Over, what: &str) {
    // Each relay is turned by a thread of its own; worlds are made there, joined by what they
    // share. Here one thread turns both relays, and two are the programs.
    let stop = Arc::new(AtomicBool::new(false));
    let bells = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let (sender, ends) = std::sync::mpsc::channel();
    let (stopped, rung) = (Arc::clone(&stop), Arc::clone(&bells));
    let relays = std::thread::spawn(move || {
        let mut world = World::new(&over, &beeline_sockets_relay::Settings::default());
        let ends = world.connect(256 << 10);
        let cookies = [ends[0].cookie, ends[1].cookie];
        sender.send(ends).unwrap();
        let mut heard = [0, 0];
        while !stopped.load(Ordering::Relaxed) {
            let busy = world.turn_one(0) | world.turn_one(1);
            for side in 0..2 {
                let now = rung[side].load(Ordering::Acquire);
                if now != heard[side] {
                    heard[side] = now;
                    world.cores[side].bell(cookies[side]);
                }
            }
            if !busy {
                std::thread::yield_now();
            }
        }
        let counters = world.cores[0].counters();
        println!(
            "  {} messages, {} writes, {} doorbells, bells {}",
            counters.messages, counters.written_batches, counters.doorbells, counters.bells
        );
    });
    let [mut one, mut other] = ends.recv().unwrap();
    let ring = |side: usize, program: &mut Program| {
        if program.take_bell() {
            bells[side].fetch_add(1, Ordering::Release);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = vec![0; LARGE];
            for _ in 0..ROUNDS {
                receive(&mut other, &mut bytes[..8]);
                send(&mut other, &bytes[..8]);
                ring(1, &mut other);
            }
            for _ in 0..LARGES {
                let (mut have, mut turn) = (0, 0);
                while have < LARGE {
                    match other.receive(&mut bytes[have..]) {
                        Received::Bytes(count) => have += count,
                        _ => spin(&mut turn),
                    }
                    ring(1, &mut other);
                }
            }
            send(&mut other, &[1]);
            ring(1, &mut other);
        });
        let bytes = vec![7; LARGE];
        let mut back = [0; 8];
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let began = Instant::now();
            send(&mut one, &bytes[..8]);
            ring(0, &mut one);
            receive(&mut one, &mut back);
            times.push(began.elapsed());
        }
        let began = Instant::now();
        for _ in 0..LARGES {
            let (mut sent, mut turn) = (0, 0);
            while sent < LARGE {
                let count = one.send(&bytes[sent..]);
                sent += count;
                ring(0, &mut one);
                if count == 0 {
                    spin(&mut turn);
                }
            }
        }
        receive(&mut one, &mut back[..1]);
        report(what, times, began.elapsed());
    });
    stop.store(true, Ordering::Relaxed);
    relays.join().unwrap();
}

fn kernel() {
    let [mut one, mut other] = World::kernel_pair();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut bytes = vec![0; LARGE];
            for _ in 0..ROUNDS {
                other.read_exact(&mut bytes[..8]).unwrap();
                other.write_all(&bytes[..8]).unwrap();
            }
            for _ in 0..LARGES {
                other.read_exact(&mut bytes).unwrap();
            }
            other.write_all(&[1]).unwrap();
        });
        let bytes = vec![7; LARGE];
        let mut back = [0; 8];
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let began = Instant::now();
            one.write_all(&bytes[..8]).unwrap();
            one.read_exact(&mut back).unwrap();
            times.push(began.elapsed());
        }
        let began = Instant::now();
        for _ in 0..LARGES {
            one.write_all(&bytes).unwrap();
        }
        one.read_exact(&mut back[..1]).unwrap();
        report("kernel TCP, loopback", times, began.elapsed());
    });
}

fn main() {
    for _ in 0..3 {
        relayed(Over::Shm, "two relays, shm");
        relayed(Over::Tcp, "two relays, tcp");
        kernel();
    }
}
