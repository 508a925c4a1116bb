//! No wake-up is lost with everybody on a thread of its own: programs that sleep at every
//! occasion, and relays that let go of a connection at every look in vain.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_sockets_relay::Settings;
use beeline_verify_relay::program::{Program, Received};
use beeline_verify_relay::{Over, World};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const ROUNDS: usize = 20_000;
/// Nobody sleeps longer for what is there: a wake-up was lost.
const LOST: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

struct Shared {
    bells: [AtomicU64; 2],
    over: AtomicBool,
}

/// Sleeps on the kernel's connection until there is a doorbell.
fn sleep(program: &mut Program) {
    let stream = program.stream.as_ref().unwrap();
    let mut entries = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)];
    let count = poll(&mut entries, Some(&LOST)).unwrap();
    assert!(count > 0, "a sleeper, news and no doorbell");
    program.hear_doorbells();
}

fn ring(shared: &Shared, side: usize, program: &mut Program) {
    if program.take_bell() {
        shared.bells[side].fetch_add(1, Ordering::SeqCst);
    }
}

fn receive(shared: &Shared, side: usize, program: &mut Program, bytes: &mut [u8]) {
    let mut have = 0;
    while have < bytes.len() {
        match program.receive(&mut bytes[have..]) {
            Received::Bytes(count) => have += count,
            Received::Nothing => {
                if program.falls_asleep(true) {
                    sleep(program);
                }
            }
            other => panic!("{other:?}"),
        }
        ring(shared, side, program);
    }
}

fn send(shared: &Shared, side: usize, program: &mut Program, bytes: &[u8]) {
    let mut sent = 0;
    while sent < bytes.len() {
        let count = program.send(&bytes[sent..]);
        sent += count;
        ring(shared, side, program);
        if count == 0 && program.falls_asleep(false) {
            sleep(program);
        }
    }
}

fn everybody_on_a_thread(over: Over) {
    let shared =
        Shared { bells: [AtomicU64::new(0), AtomicU64::new(0)], over: AtomicBool::new(false) };
    let (sender, ends) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let relays = scope.spawn(|| {
            let settings = Settings { cools_after: Duration::ZERO, ..Settings::default() };
            let mut world = World::new(&over, &settings);
            let ends = world.connect(4096);
            let cookies = [ends[0].cookie, ends[1].cookie];
            sender.send(ends).unwrap();
            let mut heard = [0, 0];
            while !shared.over.load(Ordering::Relaxed) {
                for side in 0..2 {
                    // As from a datagram: what was stored before it is seen.
                    let now = shared.bells[side].load(Ordering::SeqCst);
                    if now != heard[side] {
                        heard[side] = now;
                        world.cores[side].bell(cookies[side]);
                    }
                    world.turn_one(side);
                }
            }
            world.cores[0].counters().cooled
        });
        let [mut one, mut other] = ends.recv().unwrap();
        let echo = scope.spawn(|| {
            let mut bytes = vec![0; 6_000];
            for round in 0..ROUNDS {
                let length = if round % 16 == 15 { bytes.len() } else { 8 };
                receive(&shared, 1, &mut other, &mut bytes[..length]);
                send(&shared, 1, &mut other, &bytes[..length]);
            }
            other
        });
        let mut bytes = vec![7; 6_000];
        let (began, mut rng) = (Instant::now(), SmallRng::seed_from_u64(7));
        for round in 0..ROUNDS {
            let length = if round % 16 == 15 { bytes.len() } else { 8 };
            // In two parts, the second at any moment after the first: while the relay lets go.
            send(&shared, 0, &mut one, &bytes[..4]);
            for _ in 0..rng.random_range(0..100) {
                std::hint::spin_loop();
            }
            send(&shared, 0, &mut one, &bytes[4..length]);
            receive(&shared, 0, &mut one, &mut bytes[..length]);
            assert!(began.elapsed() < Duration::from_secs(60), "round {round} after a minute");
        }
        drop(echo.join().unwrap());
        shared.over.store(true, Ordering::Relaxed);
        let cooled = relays.join().unwrap();
        assert!(cooled > 100, "cooled only {cooled} times: nothing was shown");
    });
}

#[test]
fn sleepers_on_threads_of_their_own_are_woken_by_relays_that_let_go_at_once() {
    everybody_on_a_thread(Over::Shm);
    everybody_on_a_thread(Over::Tcp);
}
