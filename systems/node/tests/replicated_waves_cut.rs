//! A member ends in the middle of a wave: some shards have applied their part of it and others have not. Alone in its
//! program: the fault is armed for all of it.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::sync::Arc;

use beeline_env::fault::{FaultAction, arm};
use beeline_node::NodeConfig;
use beeline_replicated_log::StateMachine as _;
use beeline_replicated_service::unit;
use common::config;
use common::replicas::{Member, on_disk};
use common::units::{Chance, run, script};

#[test]
fn what_a_member_left_in_the_middle_of_a_wave_is_applied_once() {
    const UNITS: u64 = 250;
    const MOST_ENDS: u64 = 12;
    let (mut ends, mut in_part) = (0_u64, 0_u64);
    for seed in 1..=4 {
        let mut chance = Chance::new(100 + seed);
        let mut told = None;
        drop(Member::start_with(&Arc::default(), 1, config(1), |machine| {
            told = Some(script(&mut chance, UNITS, machine));
        }));
        let told = told.unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut left = MOST_ENDS;
        let mut done = false;
        while !done {
            // Now and then with another number of shards.
            let shards = chance.within(2..=4) as usize;
            let config = NodeConfig { shards, ..on_disk(directory.path()) };
            // Past some parts.
            let skip = chance.below(25);
            let fault = (left > 0).then(|| arm("node.wave.work", FaultAction::Fail, skip));
            left = left.saturating_sub(1);
            let (chance, told) = (&mut chance, &told);
            let (done, ends, in_part) = (&mut done, &mut ends, &mut in_part);
            drop(Member::start_with(&Arc::default(), 2, config, move |machine| {
                let mut from = machine.applied().0 as usize;
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
                        let (got, expected) =
                            (reply.escape_ascii(), told.replies[at].escape_ascii());
                        assert_eq!(
                            got.to_string(),
                            expected.to_string(),
                            "seed {seed}, {shards} shards, unit {at} of a run from {from} to {to}"
                        );
                    }
                    from = to;
                }
                *done = true;
            }));
            drop(fault);
        }
    }
    assert!(ends > 20 && in_part > 20, "{ends} ends, {in_part} units");
}
