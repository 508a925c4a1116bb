//! Links of the kernel's own TCP: nothing is carried over them unless that was asked for.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use beeline_sockets_relay::{Refusal, Settings};
use beeline_verify_relay::program::Program;
use beeline_verify_relay::{Over, World};

#[test]
fn what_a_link_of_tcp_would_carry_stays_the_kernels() {
    let mut world = World::as_told(&Over::Tcp, &Settings::default());
    let [one, other] = World::kernel_pair();
    let ends = [world.adopt(0, one, 4096), world.adopt(1, other, 4096)];
    world.until("both are given up", |_| ends.iter().all(Program::is_given_up));
    assert!(!ends.iter().any(Program::is_paired));
    world.until("both relays let go", |world| world.cores.iter().all(|core| core.is_idle()));
    for core in &world.cores {
        assert_eq!((core.counters().over_tcp, core.links_up()), (1, 0));
    }
    // The next ones are told at once.
    for (side, stream) in World::kernel_pair().into_iter().enumerate() {
        let [program, relay] = World::segment(4096, 100 + side as u64);
        let ends = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let refused = world.cores[side].adopt(ends, stream.try_clone().unwrap().into(), relay);
        assert_eq!(refused, Err(Refusal::OverTcp));
        assert!(Program::new(program, stream, 100 + side as u64).is_given_up());
        assert_eq!(world.cores[side].counters().over_tcp, 2);
    }
}

#[test]
fn what_memory_or_a_device_carries_is_carried_and_tcp_where_that_was_asked_for() {
    let mut world = World::as_told(&Over::Shm, &Settings::default());
    let _ = world.connect(4096);
    let mut world = World::new(&Over::Tcp, &Settings::default());
    let _ = world.connect(4096);
}
