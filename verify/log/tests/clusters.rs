//! Whole clusters under every fault, seed after seed.
//!
//! `BEELINE_DEEP=1` runs ten thousand seeds, `BEELINE_SEED=n` replays one.

#![allow(clippy::panic, clippy::print_stdout)]

use beeline_verify_log::{Report, Settings, run, seeds};

/// Runs seeds of one size; panics with the seed of the first violation.
fn clusters(nodes: usize, few: u64, many: u64) {
    let (mut total, mut count) = (Report::default(), 0);
    for seed in seeds(few, many) {
        let report = run(Settings::new(nodes, seed)).unwrap_or_else(|violation| {
            panic!(
                "{}: {}\nreplay: BEELINE_SEED={seed} cargo test -p beeline-verify-log --test \
                 clusters {nodes}_servers",
                violation.invariant, violation.what
            )
        });
        count += 1;
        total.positions += report.positions;
        total.leaderships += report.leaderships;
        total.step_downs += report.step_downs;
        total.answered += report.answered;
        total.faults += report.faults;
        total.refused += report.refused;
        total.snapshots_sent += report.snapshots_sent;
    }
    println!("{count} seeds of {nodes} servers: {total:?}");
    if count > 20 {
        assert!(total.positions > 20 * count, "too little was agreed on: {total:?}");
        assert!(total.leaderships > 2 * count as u64, "too few elections: {total:?}");
        assert!(total.refused > 0 && total.step_downs > 0 && total.snapshots_sent > 0);
    }
}

#[test]
fn clusters_of_3_servers_keep_every_invariant() {
    clusters(3, 100, 4_000);
}

#[test]
fn clusters_of_5_servers_keep_every_invariant() {
    clusters(5, 70, 4_000);
}

#[test]
fn clusters_of_7_servers_keep_every_invariant() {
    clusters(7, 50, 2_500);
}

/// One machine of three is started anew at level `process`, and its member comes back only after it
/// was removed and added.
#[test]
fn clusters_of_3_servers_survive_a_new_start_of_one_machine_at_level_process() {
    let mut faults = 0;
    for seed in seeds(60, 2_000) {
        let settings = Settings { reboots: true, witnesses: false, ..Settings::new(3, seed) };
        let report = run(settings).unwrap_or_else(|violation| {
            panic!(
                "{}: {}\nreplay: BEELINE_SEED={seed} cargo test -p beeline-verify-log --test \
                 clusters new_start",
                violation.invariant, violation.what
            )
        });
        faults += report.faults;
    }
    assert!(faults > 10, "{faults} faults");
}

/// Leaders rest whenever clients think for long enough, and every fault meets clusters that rest.
#[test]
fn clusters_of_3_and_5_servers_that_rest_keep_every_invariant_and_find_new_leaders() {
    let mut total = Report::default();
    for seed in seeds(120, 4_000) {
        let nodes = if seed.is_multiple_of(3) { 5 } else { 3 };
        let rests_ns = Some(200_000_000);
        let settings =
            Settings { rests_ns, clients: 2, operations: 40, ..Settings::new(nodes, seed) };
        let report = run(settings).unwrap_or_else(|violation| {
            panic!(
                "{}: {}\nreplay: BEELINE_SEED={seed} cargo test -p beeline-verify-log --test \
                 clusters that_rest",
                violation.invariant, violation.what
            )
        });
        total.rests += report.rests;
        total.silences += report.silences;
        total.leaderships += report.leaderships;
        total.answered += report.answered;
    }
    println!("{total:?}");
    let is_replay = std::env::var_os("BEELINE_SEED").is_some();
    assert!(is_replay || total.rests > 100 && total.silences > 20, "{total:?}");
}

#[test]
fn one_seed_is_one_run() {
    for seed in 0..3 {
        assert_eq!(run(Settings::new(3, seed)), run(Settings::new(3, seed)));
    }
    let traces: std::collections::BTreeSet<_> =
        (0..8).filter_map(|seed| run(Settings::new(3, seed)).ok()).map(|run| run.trace).collect();
    assert_eq!(traces.len(), 8, "seeds differ");
}
