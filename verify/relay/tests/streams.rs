//! Bytes of both directions, whole and in order, over every provider and with random placement.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use beeline_fabric_sim::{PlantedBug, SimOptions};
use beeline_sockets_relay::Settings;
use beeline_verify_relay::program::{Program, Received};
use beeline_verify_relay::{Over, World};
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};

/// One direction: bytes made from a seed at one end and again at the other.
struct Flow {
    made: SmallRng,
    wanted: SmallRng,
    left: usize,
    pending: Vec<u8>,
    expected: usize,
}

impl Flow {
    fn new(seed: u64, total: usize) -> Self {
        Self {
            made: SmallRng::seed_from_u64(seed),
            wanted: SmallRng::seed_from_u64(seed),
            left: total,
            pending: Vec::new(),
            expected: total,
        }
    }

    /// Sends a piece of random size.
    fn send(&mut self, program: &mut Program, size: usize) {
        if self.pending.is_empty() {
            let size = size.min(self.left);
            self.left -= size;
            // Byte by byte, so that both ends agree whatever the pieces.
            self.pending = (0..size).map(|_| self.made.random()).collect();
        }
        if !self.pending.is_empty() {
            let sent = program.send(&self.pending);
            self.pending.drain(..sent);
        }
    }

    fn receive(&mut self, program: &mut Program, size: usize) {
        let mut bytes = vec![0; size];
        match program.receive(&mut bytes) {
            Received::Bytes(count) => {
                for byte in &bytes[..count] {
                    let wanted: u8 = self.wanted.random();
                    assert_eq!(*byte, wanted, "{} bytes before the end", self.expected);
                    self.expected -= 1;
                }
            }
            Received::Nothing => {}
            other => panic!("{other:?} with {} bytes to come", self.expected),
        }
    }

    fn is_done(&self) -> bool {
        self.expected == 0
    }
}

fn size(rng: &mut SmallRng) -> usize {
    match rng.random_range(0..4) {
        0 => rng.random_range(1..16),
        1 => rng.random_range(1..600),
        2 => rng.random_range(1..5_000),
        _ => rng.random_range(1..70_000),
    }
}

fn both_ways(over: &Over, seed: u64, ring_bytes: usize, total: usize) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut world = World::new(over, &Settings::default());
    let mut ends = world.connect(ring_bytes);
    let mut flows = [Flow::new(rng.next_u64(), total), Flow::new(rng.next_u64(), total)];
    world.until("all bytes", |world| {
        for side in 0..2 {
            for _ in 0..rng.random_range(0..3) {
                let amount = size(&mut rng);
                flows[side].send(&mut ends[side], amount);
            }
            if rng.random_range(0..3) > 0 {
                let amount = size(&mut rng);
                flows[1 - side].receive(&mut ends[side], amount);
            }
            world.deliver_bell(side, &mut ends[side]);
        }
        flows.iter().all(Flow::is_done)
    });
    for core in &world.cores {
        assert!(core.counters().sent_bytes >= total as u64, "the bytes went through the relays");
        assert_eq!(core.counters().broken, 0);
    }
}

#[test]
fn bytes_are_whole_and_in_order_whatever_order_they_are_placed_in() {
    for seed in 0..12 {
        let ring = [4096, 16 << 10, 256 << 10][seed as usize % 3];
        both_ways(&Over::Sim(seed, SimOptions::slow_placement()), seed, ring, 400_000);
        let small = SimOptions { chunk_bytes: 64, ..SimOptions::lossy() };
        both_ways(&Over::Sim(seed, small), seed + 100, ring, 100_000);
    }
}

#[test]
fn bytes_are_whole_and_in_order_over_shared_memory() {
    for seed in 0..3 {
        both_ways(&Over::Shm, seed, [4096, 64 << 10, 256 << 10][seed as usize], 4_000_000);
    }
}

#[test]
fn bytes_are_whole_and_in_order_over_tcp() {
    for seed in 0..3 {
        both_ways(&Over::Tcp, seed, [4096, 64 << 10, 256 << 10][seed as usize], 4_000_000);
    }
}

#[test]
#[should_panic(expected = "bytes")]
fn a_planted_network_that_reorders_a_queue_pair_is_found() {
    for seed in 0..20 {
        let planted = SimOptions {
            planted_bug: Some(PlantedBug::ReorderWithinQueuePair),
            ..SimOptions::lossy()
        };
        both_ways(&Over::Sim(seed, planted), seed, 16 << 10, 100_000);
    }
}
