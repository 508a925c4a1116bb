//! Three members in virtual time: the register, the conduct and the standing that members run, over a model
//! of logs, messages, pauses, partitions and restarts. One seed is one run, always the same.
//!
//! In a second world an operator changes the members while they run: members are started with another setting
//! one after the other, join, leave and take each other's place.
//!
//! Safety: what a majority acknowledged is in the log of every primary of a later term, and no member takes
//! it back. Liveness: once faults end there is one primary and all logs are equal. Known bugs are put back to
//! show that the checker sees them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod members;
mod world;

use members::MEMBERS;
use world::{Bug, World};

/// Members there are where they change; three at a time or so are in the set.
const CHANGING: u16 = 5;

fn seeds(fast: u64) -> u64 {
    let deep = std::env::var_os("BEELINE_DEEP").is_some();
    if deep { fast * 20 } else { fast }
}

#[test]
fn three_members_lose_nothing_that_a_majority_acknowledged() {
    let one = std::env::var("BEELINE_SEED").ok().and_then(|seed| seed.parse().ok());
    let all = one.map_or(1..=seeds(60), |seed: u64| seed..=seed);
    let (mut terms, mut acknowledged, mut taken_back, mut runs) = (0, 0, 0, 0_u64);
    for seed in all {
        let world = World::new(seed, Bug::None).run();
        let world = world.unwrap_or_else(|problem| {
            panic!("{problem}\nBEELINE_SEED={seed} cargo test -p beeline-documents --test replica_simulation")
        });
        runs += 1;
        terms += world.leaders.len();
        acknowledged += world.acknowledged.len();
        taken_back += world.taken_back;
    }
    println!(
        "{runs} seeds, {terms} terms led, {acknowledged} entries acknowledged, {taken_back} taken back"
    );
    assert!(
        terms as u64 > 3 * runs && acknowledged as u64 > 100 * runs,
        "faults or writes are too few"
    );
    assert!(one.is_some() || taken_back > 0, "no run took anything back");
}

#[test]
fn members_that_change_lose_nothing_that_a_majority_acknowledged() {
    let one = std::env::var("BEELINE_SEED").ok().and_then(|seed| seed.parse().ok());
    let all = one.map_or(1..=seeds(60), |seed: u64| seed..=seed);
    let (mut changes, mut acknowledged, mut runs) = (0, 0, 0_u64);
    for seed in all {
        let world = World::of(seed, Bug::None, CHANGING).run();
        let world = world.unwrap_or_else(|problem| {
            panic!("{problem}\nBEELINE_SEED={seed} cargo test -p beeline-documents --test replica_simulation")
        });
        runs += 1;
        changes += world.changes;
        acknowledged += world.acknowledged.len();
    }
    println!("{runs} seeds, {changes} changes of members, {acknowledged} entries acknowledged");
    assert!(
        changes as u64 > runs && acknowledged as u64 > 100 * runs,
        "changes or writes are too few"
    );
}

#[test]
fn the_same_seed_is_the_same_run() {
    let run = || World::new(7, Bug::None).run().unwrap();
    let (first, second) = (run(), run());
    assert_eq!(first.acknowledged, second.acknowledged);
    assert_eq!(first.members[0].log, second.members[0].log);
}

/// The first seed from one on that shows a bug.
fn found(bug: Bug, members: u16, from: u64) -> String {
    let most = 1000;
    (from..from + most)
        .find_map(|seed| World::of(seed, bug, members).run().err())
        .unwrap_or_else(|| panic!("{bug:?} was not seen in {most} seeds"))
}

#[test]
fn bugs_that_are_put_back_are_seen() {
    for bug in [
        Bug::AcknowledgesBehindTheFence,
        Bug::TakesEntriesOfAnotherTerm,
        Bug::TakesBackTooMuch,
        Bug::VotesBlindly,
        Bug::FollowsWithoutLooking,
        Bug::LeadsAgain,
        Bug::CountsTimesOfAnotherTerm,
    ] {
        println!("{}", found(bug, MEMBERS, 1));
    }
    // Rarer: from a little before the first seed that shows it.
    for (bug, from) in [(Bug::CountsNewVotersAlone, 1), (Bug::SettlesAtOnce, 490)] {
        println!("{}", found(bug, CHANGING, from));
    }
}
