//! Connections that are called back to the kernel between two relays.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use beeline_fabric_sim::SimOptions;
use beeline_sockets::segment::{CLOSED_CLEANLY, STATE_RETURNED};
use beeline_sockets_relay::Settings;
use beeline_verify_relay::program::{Program, Received};
use beeline_verify_relay::{Over, World};

const HOLD: Duration = Duration::from_secs(60);

fn world(seed: u64) -> World {
    World::new(&Over::Sim(seed, SimOptions::default()), &Settings::default())
}

fn state(program: &Program) -> u32 {
    program.segment.state().load(Ordering::Acquire)
}

/// Sends from `side` and sees it come.
fn say(world: &mut World, ends: &mut [Program; 2], side: usize) {
    assert_eq!(ends[side].send(b"hello"), 5);
    world.deliver_bell(side, &mut ends[side]);
    let mut bytes = [0; 16];
    world.until("the word", |_| ends[1 - side].receive(&mut bytes) == Received::Bytes(5));
}

/// Two connections on one link, over which a word went each way.
fn two_connections(world: &mut World) -> [[Program; 2]; 2] {
    [(); 2].map(|()| {
        let mut ends = world.connect(4096);
        say(world, &mut ends, 0);
        say(world, &mut ends, 1);
        ends
    })
}

fn is_silent(world: &World, side: usize, program: &Program) -> bool {
    world.cores[side].find(program.cookie).is_some_and(|one| one.is_silent())
}

/// Calls it back, and stops where relay 0 has sent its last doorbell and has not heard of the other's.
fn recall_until_silent(world: &mut World, ends: &[Program; 2]) {
    world.cores[0].recall(ends[0].cookie, HOLD);
    for _ in 0..1_000_000 {
        world.turn_one(0);
        if is_silent(world, 0, &ends[0]) {
            return;
        }
        world.turn_one(1);
        world.pass(Duration::from_nanos(500));
    }
    panic!("it was not called back");
}

fn seconds(world: &mut World, count: u32) {
    for _ in 0..count {
        world.wait(Duration::from_secs(1));
        (0..100).for_each(|_| world.turn());
    }
}

#[test]
fn a_connection_called_back_is_the_kernels_at_both_ends() {
    for seed in 0..20 {
        let mut world = world(seed);
        let [mut back, mut stays] = two_connections(&mut world);
        let unread = back[0].send(b"unread");
        world.deliver_bell(0, &mut back[0]);
        let side = usize::from(seed % 2 == 1);
        world.cores[side].recall(back[side].cookie, HOLD);
        world.until("the way back", |_| back.iter().all(|end| state(end) == STATE_RETURNED));
        assert_eq!(back[1].receive(&mut [0; 16]), Received::Bytes(unread), "{seed}");
        assert!(world.cores.iter().all(|core| core.connections().count() == 1), "{seed}");
        say(&mut world, &mut stays, 0);
    }
}

/// Sends words of `length` until the connection is brought back, at most `most`: how many it took. Before each,
/// the other end `sleeps`, or does not.
fn talk(world: &mut World, length: usize, most: usize, sleeps: impl Fn(usize) -> bool) -> usize {
    let mut ends = world.connect(16 << 10);
    let (word, mut got) = (vec![7; length], vec![0; length]);
    for at in 0..most {
        // A program that has slept enough may be kept by its relay, as any that is called back.
        if world
            .cores
            .iter()
            .any(|core| core.find(ends[0].cookie + 1).is_some_and(|one| one.recalling.is_some()))
        {
            world.until("the way back", |_| ends.iter().all(|end| state(end) == STATE_RETURNED));
        }
        if ends.iter().any(|end| state(end) == STATE_RETURNED) {
            for end in &ends {
                let hold = end.segment.own().sharing.hold_ns.load(Ordering::Relaxed);
                assert_eq!(hold, 60_000_000_000 | 1 << 63);
            }
            return at;
        }
        assert!(!sleeps(at) || ends[1].falls_asleep(true));
        assert_eq!(ends[0].send(&word), length);
        world.deliver_bell(0, &mut ends[0]);
        let mut left = length;
        world.until("the word", |_| {
            if let Received::Bytes(some) = ends[1].receive(&mut got) {
                left -= some;
            }
            left == 0
        });
        (0..20).for_each(|_| world.turn());
    }
    most
}

#[test]
fn what_only_sleepers_use_is_brought_back_and_nothing_else_is() {
    let minute = Duration::from_secs(60);
    let settings = Settings { sleepers_hold: minute, ..Settings::default() };
    let mut world = World::new(&Over::Sim(3, SimOptions::default()), &settings);
    assert!((24..28).contains(&talk(&mut world, 60, 200, |_| true)));
    assert_eq!(world.cores[1].counters().sleepy, 1);
    assert_eq!(world.cores.each_ref().map(|core| core.counters().recalled), [1, 1]);
    assert_eq!(talk(&mut world, 60, 200, |at| at % 2 == 0), 200);
    assert_eq!(talk(&mut world, 60, 200, |_| false), 200);
    assert_eq!(talk(&mut world, 4000, 200, |_| true), 200);
    let mut world = self::world(4);
    assert_eq!(talk(&mut world, 60, 200, |_| true), 200);
}

#[test]
fn a_program_that_closes_behind_the_last_doorbell_ends_alone_and_in_good_order() {
    for (seed, gap) in (0..4).flat_map(|seed| (0..40).step_by(3).map(move |gap| (seed, gap))) {
        let mut world = world(seed);
        let [mut back, mut stays] = two_connections(&mut world);
        recall_until_silent(&mut world, &back);
        for _ in 0..gap {
            world.pass(Duration::from_nanos(100));
            world.turn_one(1);
        }
        back[0].close(CLOSED_CLEANLY);
        world.deliver_bell(0, &mut back[0]);
        (0..2000).for_each(|_| world.turn());
        assert!(world.cores.iter().all(|core| core.connections().count() == 1), "{seed} {gap}");
        assert_eq!(state(&back[1]), STATE_RETURNED, "{seed} {gap}");
        let end = back[1].kernel_end();
        assert!(matches!(end, Some(Ok(()))), "{seed} {gap}: {end:?}");
        seconds(&mut world, 12);
        say(&mut world, &mut stays, 0);
        say(&mut world, &mut stays, 1);
    }
}

#[test]
fn a_relay_that_stood_still_with_everything_told_brings_it_back_all_the_same() {
    for seed in 0..4 {
        let mut world = world(seed);
        let [mut back, _stays] = two_connections(&mut world);
        recall_until_silent(&mut world, &back);
        for _ in 0..2000 {
            world.turn_one(1);
            world.pass(Duration::from_nanos(500));
        }
        assert_eq!(state(&back[1]), STATE_RETURNED, "{seed}");
        assert_ne!(state(&back[0]), STATE_RETURNED, "{seed}");
        world.wait(Duration::from_secs(11));
        world.until("the way back", |_| state(&back[0]) == STATE_RETURNED);
        assert!(back[1].kernel_end().is_none(), "{seed}");
    }
}

#[test]
fn who_was_on_the_way_finds_what_went_back() {
    let mut world = world(5);
    let [expected, alone] = two_connections(&mut world);
    expected[0].segment.holders().expect_one();
    for ends in [&expected, &alone] {
        world.cores[0].recall(ends[0].cookie, HOLD);
        world.until("the way back", |_| ends.iter().all(|end| state(end) == STATE_RETURNED));
    }
    let known = |world: &World, ends: &[Program; 2]| {
        [0, 1].map(|side| world.cores[side].memory(ends[side].cookie).is_some())
    };
    assert_eq!(known(&world, &expected), [true, false]);
    assert_eq!(known(&world, &alone), [false, false]);
    // Not for ever, and looked at when the next one comes.
    world.wait(Duration::from_secs(601));
    world.turn();
    let next = world.connect(4096);
    next[0].segment.holders().expect_one();
    world.cores[0].recall(next[0].cookie, HOLD);
    world.until("the way back", |_| next.iter().all(|end| state(end) == STATE_RETURNED));
    assert_eq!(known(&world, &expected), [false, false]);
    assert_eq!(known(&world, &next), [true, false]);
}

#[test]
fn nonsense_behind_the_last_doorbell_resets_its_connection_alone() {
    let mut world = world(1);
    let [mut back, mut stays] = two_connections(&mut world);
    // It claims to have taken more than the other end has sent.
    let sharing = &back[0].segment.own().sharing;
    sharing.origins[1].store(1 << 40, Ordering::Relaxed);
    sharing.is_anew.store(1, Ordering::Relaxed);
    recall_until_silent(&mut world, &back);
    world.until("the other end's way back", |_| state(&back[1]) == STATE_RETURNED);
    world.until("a reset", |_| back[0].receive(&mut [0; 16]) == Received::Reset);
    let end = back[1].kernel_end();
    assert!(matches!(end, Some(Err(_))), "{end:?}");
    assert!(world.cores.iter().all(|core| core.connections().count() == 1));
    seconds(&mut world, 45);
    say(&mut world, &mut stays, 0);
}

#[test]
fn a_connection_that_cooled_while_its_program_was_busy_comes_back() {
    let settings = Settings { cools_after: Duration::from_micros(50), ..Settings::default() };
    let mut world = World::new(&Over::Sim(2, SimOptions::default()), &settings);
    let mut ends = world.connect(4096);
    // The other end never sends: that it switches is news.
    say(&mut world, &mut ends, 0);
    let (told, number) = channel();
    let (lets_go, let_go) = channel::<()>();
    let holder = std::thread::spawn(move || {
        told.send(rustix::thread::gettid()).unwrap();
        let _ = let_go.recv();
    });
    let number = number.recv().unwrap().as_raw_nonzero().get().unsigned_abs();
    let held = &ends[1].segment.own().receiving.holder;
    held.store(beeline_sockets::holder::name_of(number), Ordering::Release);
    world.cores[1].recall(ends[1].cookie, HOLD);
    world.until("cooling", |world| {
        world.cores[1].find(ends[1].cookie).is_some_and(|one| !one.is_hot)
    });
    held.store(0, Ordering::Release);
    world.until("the way back", |_| ends.iter().all(|end| state(end) == STATE_RETURNED));
    drop(lets_go);
    holder.join().unwrap();
}
