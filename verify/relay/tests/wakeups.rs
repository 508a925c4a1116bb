//! No wake-up is lost: programs that sleep hear of bytes, room and ends, whatever the pauses.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::time::Duration;

use beeline_fabric_sim::SimOptions;
use beeline_sockets_relay::Settings;
use beeline_verify_relay::program::{Program, Received};
use beeline_verify_relay::{Over, World};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Why a program does not run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Asleep {
    No,
    ForBytes,
    ForRoom,
}

/// A program that sends in bursts, answers what it got, and sleeps whenever it can do nothing.
struct Sleeper {
    program: Program,
    asleep: Asleep,
    to_send: usize,
    /// Before it reads on.
    burst: usize,
    received: usize,
    slept: u64,
}

impl Sleeper {
    fn new(program: Program, to_send: usize) -> Self {
        Self { program, asleep: Asleep::No, to_send, burst: 0, received: 0, slept: 0 }
    }

    /// One step; what it does is its business, but it runs only when it is awake.
    fn step(&mut self, rng: &mut SmallRng, expected: usize) {
        if self.asleep != Asleep::No {
            if self.program.hear_doorbells() == 0 {
                return;
            }
            self.asleep = Asleep::No;
        }
        if self.burst == 0 && self.to_send > 0 && rng.random_range(0..3) == 0 {
            self.burst = rng.random_range(1..12_000).min(self.to_send);
        }
        if self.burst > 0 {
            let sent = self.program.send(&vec![1; self.burst]);
            self.burst -= sent;
            self.to_send -= sent;
            if sent == 0 && rng.random_range(0..2) == 0 {
                // A reader may be waiting for us as well: read first, as programs with sets do.
                self.read(expected);
            }
            if sent == 0 && self.program.falls_asleep(false) {
                // It sleeps for bytes, too, as a set does.
                if self.program.falls_asleep(true) {
                    (self.asleep, self.slept) = (Asleep::ForRoom, self.slept + 1);
                }
            }
            return;
        }
        if !self.read(expected) && self.to_send == 0 && self.program.falls_asleep(true) {
            (self.asleep, self.slept) = (Asleep::ForBytes, self.slept + 1);
        }
    }

    fn read(&mut self, expected: usize) -> bool {
        let mut bytes = [0; 3000];
        match self.program.receive(&mut bytes) {
            Received::Bytes(count) => {
                self.received += count;
                assert!(self.received <= expected);
                true
            }
            Received::Nothing => false,
            other => panic!("{other:?}"),
        }
    }
}

fn conversation(over: &Over, seed: u64, total: usize) -> u64 {
    let mut rng = SmallRng::seed_from_u64(seed);
    let settings = Settings { cools_after: Duration::from_micros(20), ..Settings::default() };
    let mut world = World::new(over, &settings);
    let [one, other] = world.connect([4096, 16 << 10][seed as usize % 2]);
    let mut ends = [Sleeper::new(one, total), Sleeper::new(other, total)];
    let mut pause = 0;
    world.until("everything heard", |world| {
        // Long pauses for the relays or for a program.
        if pause == 0 && rng.random_range(0..200) == 0 {
            pause = rng.random_range(0..300);
        }
        if pause > 0 {
            pause -= 1;
            world.pass(Duration::from_micros(1));
        }
        for (side, end) in ends.iter_mut().enumerate() {
            if pause > 0 && side == seed as usize % 2 {
                continue;
            }
            end.step(&mut rng, total);
            if rng.random_range(0..4) > 0 {
                world.deliver_bell(side, &mut end.program);
            }
            if rng.random_range(0..3) == 0 {
                world.turn_one(side);
            }
        }
        ends.iter().all(|end| end.received == total)
    });
    ends.iter().map(|end| end.slept).sum()
}

#[test]
fn whoever_sleeps_is_woken_whatever_the_pauses() {
    let mut slept = 0;
    for seed in 0..60 {
        slept += conversation(&Over::Sim(seed, SimOptions::default()), seed, 60_000);
    }
    assert!(slept > 500, "programs slept only {slept} times: nothing was shown");
}

#[test]
fn whoever_sleeps_is_woken_over_shared_memory_and_tcp() {
    for seed in 0..4 {
        conversation(&Over::Shm, seed, 200_000);
        conversation(&Over::Tcp, seed, 200_000);
    }
}

#[test]
fn a_sleeper_hears_of_an_end_and_a_half_closed_way_goes_on() {
    let mut world = World::new(&Over::Sim(5, SimOptions::default()), &Settings::default());
    let [mut one, mut other] = world.connect(4096);
    other.send(b"x");
    world.deliver_bell(1, &mut other);
    let mut byte = [0];
    world.until("a byte", |world| {
        world.deliver_bell(1, &mut other);
        one.receive(&mut byte) == Received::Bytes(1)
    });
    assert!(other.falls_asleep(true));
    one.finish();
    world.deliver_bell(0, &mut one);
    world.until("the end", |_| other.hear_doorbells() > 0);
    assert_eq!(other.receive(&mut byte), Received::End);
    assert_eq!(other.send(b"y"), 1, "the other way goes on");
    world.deliver_bell(1, &mut other);
    world.until("the answer", |_| one.receive(&mut byte) == Received::Bytes(1));
}
