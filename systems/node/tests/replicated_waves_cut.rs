//! A member ends in the middle of a wave: some shards have applied their part of it and others have not. Alone in its
//! program: the fault is armed for all of it.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::sync::Arc;

use beeline_env::fault::{FaultAction, arm};
use beeline_node::NodeConfig;
use beeline_replicated_log::StateMachine as _;
use beeline_replicated_service::{Machine, unit};
use common::config;
use common::replicas::{Member, on_disk, with_commits};
use common::units::{Chance, Script, assert_reply, run, script};

/// What a member left in the middle of a wave counts for nothing where a log begins upon its store, also later.
fn a_log_that_begins_upon_it_has_nothing_skipped(chance: &mut Chance, told: &Script) {
    let directory = tempfile::tempdir().unwrap();
    let start = |prepare: &mut dyn FnMut(&mut Machine)| {
        let config = NodeConfig { shards: 3, ..on_disk(directory.path()) };
        drop(Member::start_with(&Arc::default(), 2, config, prepare));
    };
    let mut from = None;
    while from.is_none() {
        let fault = arm("node.wave.work", FaultAction::Fail, chance.below(10));
        start(&mut |machine| {
            let mut at = machine.applied().0 as usize;
            if machine.reached() > machine.applied() {
                machine.founded_upon().unwrap();
                assert_eq!(machine.reached(), machine.applied());
                drop(machine.snapshot().unwrap());
                from = Some(at);
                return;
            }
            loop {
                assert!(at < told.units.len(), "no run ended in the middle");
                let to = (at + chance.within(1..=40) as usize).min(told.units.len());
                if run(machine, told, (at, to)).is_err() {
                    return;
                }
                at = to;
            }
        });
        drop(fault);
    }
    let from = from.unwrap();
    start(&mut |machine| {
        assert_eq!(machine.reached(), machine.applied());
        let to = (from + 40).min(told.units.len());
        let replies = run(machine, told, (from, to)).unwrap();
        for (at, reply) in (from..to).zip(replies) {
            let repeated = reply == unit::REPEATED;
            assert_eq!(repeated, told.replies[at] == unit::REPEATED, "unit {at} from {from}");
        }
    });
}

#[test]
fn what_a_member_left_in_the_middle_of_a_wave_is_applied_once() {
    const UNITS: u64 = 250;
    const MOST_ENDS: u64 = 12;
    // Parts that are given up, and parts that are whole in the store and were not committed.
    const POINTS: [&str; 2] = ["node.wave.work", "node.wave.ended"];
    let (mut ends, mut in_part, mut torn) = ([0_u64; POINTS.len()], 0_u64, 0_u64);
    for seed in 1..=4 {
        let mut chance = Chance::new(100 + seed);
        let mut told = None;
        drop(Member::start_with(&Arc::default(), 1, config(1), |machine| {
            told = Some(script(&mut chance, UNITS, machine));
        }));
        let told = told.unwrap();
        let directory = tempfile::tempdir().unwrap();
        let cluster = with_commits(seed % 2 == 0);
        let mut left = MOST_ENDS;
        let mut done = false;
        while !done {
            // Now and then with another number of shards.
            let shards = chance.within(2..=4) as usize;
            let config = NodeConfig { shards, ..on_disk(directory.path()) };
            // Past some parts.
            let skip = chance.below(25);
            let point = chance.below(POINTS.len() as u64) as usize;
            let fault = (left > 0).then(|| arm(POINTS[point], FaultAction::Fail, skip));
            left = left.saturating_sub(1);
            let (chance, told) = (&mut chance, &told);
            let (done, ends, in_part) = (&mut done, &mut ends[point], &mut in_part);
            let torn = &mut torn;
            drop(Member::start_with(&cluster, 2, config, move |machine| {
                let mut from = machine.applied().0 as usize;
                let reached = machine.reached().0 as usize;
                assert!(reached >= from && reached <= told.units.len(), "{from} to {reached}");
                *torn += u64::from(reached > from);
                while from < told.units.len() {
                    let to = (from + chance.within(1..=40) as usize).min(told.units.len());
                    let Ok(replies) = run(machine, told, (from, to)) else {
                        *ends += 1;
                        return;
                    };
                    for (at, reply) in (from..to).zip(replies) {
                        if reply == unit::REPEATED {
                            *in_part += u64::from(told.replies[at] != unit::REPEATED);
                            continue;
                        }
                        let run =
                            format!("seed {seed}, {shards} shards, a run from {from} to {to}");
                        assert_reply(told, at, &reply, &run);
                    }
                    from = to;
                    // Of one position, or not taken.
                    let taken = machine.snapshot().map(drop).map_err(|error| error.to_string());
                    assert_eq!(taken.is_ok(), from >= reached, "{from} of {reached}: {taken:?}");
                }
                *done = true;
            }));
            drop(fault);
        }
        a_log_that_begins_upon_it_has_nothing_skipped(&mut chance, &told);
    }
    let enough = ends.iter().all(|ends| *ends > 10) && in_part > 20 && torn > 10;
    assert!(enough, "{ends:?} ends, {torn} torn, {in_part} units");
}
