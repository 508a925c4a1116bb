//! Known bugs, put back: the invariants see each of them.

#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;

use beeline_verify_log::{PlantedBug, Settings, run};

/// Runs seeds with a bug until it was seen twice; which invariants saw it, and how often.
fn seen(bug: PlantedBug, witnesses: bool, seeds: u64) -> BTreeMap<&'static str, u32> {
    let mut seen = BTreeMap::new();
    for seed in 0..seeds {
        let reboots = bug == PlantedBug::VoteAfterReboot;
        let settings = Settings { bug: Some(bug), witnesses, reboots, ..Settings::new(3, seed) };
        if let Err(violation) = run(settings) {
            *seen.entry(violation.invariant).or_default() += 1;
        }
        if seen.values().sum::<u32>() == 2 {
            break;
        }
    }
    println!("{bug:?}, with witnesses: {witnesses}: {seen:?}");
    seen
}

#[test]
fn counting_the_acknowledgement_is_seen_in_memory_and_by_clients() {
    let bug = PlantedBug::CountAcknowledgement;
    assert!(seen(bug, true, 40).contains_key("durable_commit"));
    assert!(!seen(bug, false, 400).is_empty());
}

#[test]
fn voting_before_revoking_is_seen_in_memory_and_by_clients() {
    let bug = PlantedBug::VoteBeforeRevocation;
    assert!(seen(bug, true, 60).contains_key("fenced"));
    assert!(!seen(bug, false, 800).is_empty());
}

#[test]
fn taking_a_hole_for_committed_is_seen() {
    assert!(!seen(PlantedBug::HoleTakenForCommitted, true, 2_000).is_empty());
}

#[test]
fn counting_in_memory_that_its_owner_left_is_seen_in_memory_and_by_clients() {
    let bug = PlantedBug::CountOrphans;
    assert!(seen(bug, true, 600).contains_key("durable_commit"));
    assert!(!seen(bug, false, 3_000).is_empty());
}

/// Without witnesses: memory that was counted may be gone with its machine, and no other member's was.
#[test]
fn voting_after_a_new_start_of_the_machine_loses_what_was_acknowledged() {
    assert!(!seen(PlantedBug::VoteAfterReboot, false, 3_000).is_empty());
}
