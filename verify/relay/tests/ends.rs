//! How connections begin and end: given up, closed, killed, broken.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::time::Duration;

use beeline_fabric_sim::SimOptions;
use beeline_sockets::segment::{CLOSED_CLEANLY, CLOSED_UNREAD};
use beeline_sockets_relay::Settings;
use beeline_verify_relay::program::{Program, Received};
use beeline_verify_relay::{Over, World, process_of};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

fn sim(seed: u64) -> Over {
    Over::Sim(seed, SimOptions::slow_placement())
}

fn everywhere() -> [Over; 3] {
    [sim(3), Over::Shm, Over::Tcp]
}

fn quiet(world: &mut World) {
    world.until("both relays let go", |world| world.cores.iter().all(|core| core.is_idle()));
}

/// Reads to the end: how many bytes, and how it ended.
fn read_all(world: &mut World, side: usize, program: &mut Program) -> (usize, Received) {
    let (mut count, mut bytes) = (0, vec![0; 10_000]);
    let mut ended = Received::Nothing;
    world.until("the end", |world| {
        match program.receive(&mut bytes) {
            Received::Bytes(taken) => count += taken,
            Received::Nothing => {}
            end => ended = end,
        }
        world.deliver_bell(side, program);
        ended != Received::Nothing
    });
    (count, ended)
}

/// Waits for the kernel's own end.
fn kernel_end(world: &mut World, program: &mut Program) -> std::io::Result<()> {
    let mut end = None;
    world.until("the kernel's end", |_| {
        end = end.take().or_else(|| program.kernel_end());
        end.is_some()
    });
    end.unwrap()
}

#[test]
fn the_last_bytes_come_before_the_end() {
    for over in everywhere() {
        let mut world = World::new(&over, &Settings::default());
        let [mut one, mut other] = world.connect(256 << 10);
        assert_eq!(one.send(&vec![1; 200_000]), 200_000);
        one.close(CLOSED_CLEANLY);
        world.deliver_bell(0, &mut one);
        let (count, end) = read_all(&mut world, 1, &mut other);
        assert_eq!((count, end), (200_000, Received::End), "{over:?}");
        kernel_end(&mut world, &mut other).unwrap();
        quiet(&mut world);
    }
}

#[test]
fn a_close_with_bytes_unread_is_a_reset() {
    let mut world = World::new(&sim(4), &Settings::default());
    let [mut one, mut other] = world.connect(4096);
    one.close(CLOSED_UNREAD);
    world.deliver_bell(0, &mut one);
    assert_eq!(read_all(&mut world, 1, &mut other).1, Received::Reset);
    quiet(&mut world);
}

#[test]
fn both_may_close_at_once_with_bytes_under_way_both_ways() {
    for seed in 0..40 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut world = World::new(&sim(seed), &Settings::default());
        let mut ends = world.connect(64 << 10);
        for (side, end) in ends.iter_mut().enumerate() {
            end.send(&vec![1; rng.random_range(1..60_000)]);
            world.deliver_bell(side, end);
            for _ in 0..rng.random_range(0..30) {
                world.turn();
            }
        }
        for (side, end) in ends.iter_mut().enumerate() {
            end.close(CLOSED_CLEANLY);
            world.deliver_bell(side, end);
            for _ in 0..rng.random_range(0..5) {
                world.turn();
            }
        }
        quiet(&mut world);
        assert!(world.cores.iter().all(|core| core.links_up() == 1), "the link lives on");
    }
}

#[test]
fn what_a_killed_program_had_sent_is_delivered_then_comes_the_end() {
    for over in everywhere() {
        let mut world = World::new(&over, &Settings::default());
        let [mut one, mut other] = world.connect(64 << 10);
        assert_eq!(one.send(&vec![1; 50_000]), 50_000);
        one.die();
        world.cores[0].process_ended(process_of(one.cookie));
        let (count, end) = read_all(&mut world, 1, &mut other);
        assert_eq!((count, end), (50_000, Received::End), "{over:?}");
        kernel_end(&mut world, &mut other).unwrap();
        quiet(&mut world);
    }
}

#[test]
fn a_program_killed_with_bytes_unread_is_told_as_a_reset() {
    let mut world = World::new(&Over::Tcp, &Settings::default());
    let [mut one, mut other] = world.connect(64 << 10);
    assert_eq!(other.send(b"never read"), 10);
    world.deliver_bell(1, &mut other);
    world.until("arrival", |_| !one.falls_asleep(true));
    one.die();
    world.cores[0].process_ended(process_of(one.cookie));
    assert_eq!(read_all(&mut world, 1, &mut other).1, Received::Reset);
    let end = kernel_end(&mut world, &mut other);
    assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn an_end_lives_as_long_as_one_of_its_holders() {
    let mut world = World::new(&sim(6), &Settings::default());
    let [mut one, mut other] = world.connect(4096);
    // A child was forked and says so.
    one.segment.holders().expect_one();
    world.cores[0].process_ended(process_of(one.cookie));
    let began = world.now();
    world.until("some time", |world| {
        world.pass(Duration::from_millis(1));
        world.now() > began + Duration::from_secs(5)
    });
    assert!(one.segment.holders().add(77));
    one.segment.holders().expected_one();
    world.cores[0].bell(one.cookie);
    assert_eq!(one.send(b"child"), 5);
    world.deliver_bell(0, &mut one);
    let mut bytes = [0; 8];
    world.until("the child's word", |_| other.receive(&mut bytes) == Received::Bytes(5));
    one.die();
    world.cores[0].process_ended(77);
    assert_eq!(read_all(&mut world, 1, &mut other), (0, Received::End));
    quiet(&mut world);
}

#[test]
fn an_end_whose_other_one_never_comes_is_left_to_the_kernel() {
    let mut world = World::new(&sim(7), &Settings::default());
    let [one, other] = World::kernel_pair();
    let one = world.adopt(0, one, 4096);
    let began = world.now();
    world.until("some time", |world| {
        world.pass(Duration::from_millis(10));
        world.now() > began + Duration::from_secs(29)
    });
    assert!(!one.is_given_up());
    world.until("patience to end", |world| {
        world.pass(Duration::from_millis(10));
        one.is_given_up()
    });
    quiet(&mut world);
    drop(other);
}

#[test]
fn an_offer_whose_end_never_comes_is_forgotten_by_who_heard_it() {
    let mut world = World::new(&sim(8), &Settings::default());
    // Over a link that is up, and beside nothing else that time changes.
    let _beside = world.connect(4096);
    let [one, other] = World::kernel_pair();
    let offers = one.local_addr().unwrap() < other.local_addr().unwrap();
    let (offered, _plain) = if offers { (one, other) } else { (other, one) };
    let offered = world.adopt(0, offered, 4096);
    world.until("the offer to be heard", |world| world.cores[1].longest_sleep().is_some());
    world.until("patience to end", |world| {
        world.pass(Duration::from_millis(10));
        offered.is_given_up()
    });
    world.until("nothing to wait for", |world| {
        world.pass(Duration::from_millis(10));
        world.cores.iter().all(|core| core.longest_sleep().is_none())
    });
}

#[test]
fn both_ends_are_paired_or_both_are_the_kernels() {
    let mut paired = 0;
    for seed in 0..300 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut world = World::new(&sim(seed), &Settings::default());
        if rng.random() {
            // With a link that is up already.
            drop(world.connect(4096));
        }
        let [one, other] = World::kernel_pair();
        let late = rng.random_range(0..40);
        let first = rng.random_range(0..2);
        let mut streams = [Some(one), Some(other)];
        let mut ends = [None, None];
        ends[first] = Some(world.adopt(first, streams[first].take().unwrap(), 4096));
        for _ in 0..late {
            world.turn();
        }
        let second = 1 - first;
        ends[second] = Some(world.adopt(second, streams[second].take().unwrap(), 4096));
        let [Some(one), Some(other)] = ends else { unreachable!() };
        for _ in 0..rng.random_range(0..60) {
            world.turn();
        }
        let quitter = if rng.random() { &one } else { &other };
        let _ = quitter.give_up();
        world.until("an outcome", |world| {
            world.pass(Duration::from_millis(20));
            let settled = |end: &Program| end.is_paired() || end.is_given_up();
            settled(&one) && settled(&other)
        });
        assert_eq!(one.is_paired(), other.is_paired(), "seed {seed}");
        paired += u32::from(one.is_paired());
    }
    assert!((20..280).contains(&paired), "{paired} of 300 paired: both outcomes are tried");
}

#[test]
fn a_broken_link_ends_its_connections_at_both_ends() {
    for over in [Over::Shm, Over::Tcp] {
        let mut world = World::new(&over, &Settings::default());
        let [mut one, mut other] = world.connect(4096);
        one.send(b"x");
        world.deliver_bell(0, &mut one);
        let mut byte = [0];
        world.until("a byte", |_| other.receive(&mut byte) == Received::Bytes(1));
        assert!(other.falls_asleep(true));
        world.kill_relay(1);
        world.until("the news", |_| one.receive(&mut byte) == Received::Reset);
        // Its own relay is dead: the kernel tells.
        kernel_end(&mut world, &mut other).unwrap();
        assert!(world.cores[0].is_idle());
        assert_eq!(world.cores[0].counters().broken, 1);
    }
}
