//! How many messages bytes take, and what a turn costs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::time::Duration;

use beeline_fabric_sim::SimOptions;
use beeline_sockets_relay::Settings;
use beeline_verify_relay::program::{Program, Received};
use beeline_verify_relay::{Over, World};

fn world() -> World {
    World::new(&Over::Sim(1, SimOptions::default()), &Settings::default())
}

fn take(world: &mut World, side: usize, program: &mut Program, count: usize) {
    let mut left = count;
    let mut bytes = vec![0; count];
    world.until("bytes", |world| {
        while left > 0 {
            match program.receive(&mut bytes[..left]) {
                Received::Bytes(taken) => left -= taken,
                Received::Nothing => break,
                other => panic!("{other:?}"),
            }
        }
        world.deliver_bell(side, program);
        left == 0
    });
}

fn send(world: &mut World, side: usize, program: &mut Program, bytes: &[u8]) {
    assert_eq!(program.send(bytes), bytes.len(), "there is room");
    world.deliver_bell(side, program);
}

#[test]
fn on_an_idle_link_each_send_is_one_message_at_once() {
    let mut world = world();
    let [mut one, mut other] = world.connect(64 << 10);
    send(&mut world, 0, &mut one, b"warm");
    take(&mut world, 1, &mut other, 4);
    let before = world.cores[0].counters();
    for _ in 0..100 {
        send(&mut world, 0, &mut one, b"12345678");
        take(&mut world, 1, &mut other, 8);
    }
    let after = world.cores[0].counters();
    assert_eq!(after.messages - before.messages, 100);
    assert_eq!(after.inline_batches - before.inline_batches, 100);
    assert_eq!(after.written_batches, before.written_batches, "small ones go whole");
    assert_eq!(one.bells, 0, "a hot connection costs the program no system call");
}

#[test]
fn a_flood_takes_far_fewer_messages_than_sends() {
    let mut world = world();
    let [mut one, mut other] = world.connect(256 << 10);
    let (mut sends, mut received) = (0_u64, 0_u64);
    let mut bytes = vec![0; 64 << 10];
    let before = world.cores[0].counters();
    world.until("the flood", |world| {
        for _ in 0..32 {
            sends += u64::from(sends < 50_000 && one.send(b"12345678") > 0);
        }
        world.deliver_bell(0, &mut one);
        if let Received::Bytes(count) = other.receive(&mut bytes) {
            received += count as u64;
        }
        world.deliver_bell(1, &mut other);
        received == 50_000 * 8
    });
    let messages = world.cores[0].counters().messages - before.messages;
    assert!(messages * 20 < sends, "{messages} messages for {sends} sends");
    assert!(one.bells <= 2);
}

#[test]
fn large_sends_are_written_and_not_copied_into_messages() {
    let mut world = world();
    let [mut one, mut other] = world.connect(256 << 10);
    for _ in 0..20 {
        send(&mut world, 0, &mut one, &vec![7; 60_000]);
        take(&mut world, 1, &mut other, 60_000);
    }
    let counters = world.cores[0].counters();
    assert!(counters.written_batches >= 20, "{counters:?}");
    assert!(counters.messages < 200, "{counters:?}");
}

#[test]
fn records_of_many_connections_share_a_message() {
    let mut world = world();
    let mut all: Vec<_> = (0..40).map(|_| world.connect(4096)).collect();
    for [one, other] in &mut all {
        send(&mut world, 0, one, b"x");
        take(&mut world, 1, other, 1);
    }
    let before = world.cores[0].counters();
    for [one, _] in &mut all {
        send(&mut world, 0, one, b"12345678");
    }
    for [_, other] in &mut all {
        take(&mut world, 1, other, 8);
    }
    let messages = world.cores[0].counters().messages - before.messages;
    assert!(messages <= 3, "{messages} messages for 40 sends of one moment");
}

/// Looks at connections in a turn, while one of `count` connections moves.
fn looks_per_turn(count: usize) -> f64 {
    let mut world = world();
    let mut all: Vec<_> = (0..count).map(|_| world.connect(4096)).collect();
    // Everything was hot when it was paired.
    for _ in 0..20 {
        world.turn();
        world.pass(Duration::from_micros(50));
    }
    let began = world.now();
    world.until("cold", |world| world.now() > began + Duration::from_millis(2));
    let before = world.cores[0].counters();
    let [one, other] = &mut all[count / 2];
    for _ in 0..50 {
        send(&mut world, 0, one, b"ping");
        take(&mut world, 1, other, 4);
        send(&mut world, 1, other, b"pong");
        take(&mut world, 0, one, 4);
    }
    let after = world.cores[0].counters();
    (after.looks - before.looks) as f64 / (after.turns - before.turns) as f64
}

#[test]
fn what_a_turn_costs_does_not_depend_on_how_many_connections_there_are() {
    let limit = rustix::process::Rlimit { current: Some(40_000), maximum: Some(40_000) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
    let (few, many) = (looks_per_turn(2), looks_per_turn(1000));
    assert!(few <= 1.5 && many <= 1.5, "{few} looks a turn with 2, {many} with 1000");
}
