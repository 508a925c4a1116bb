//! Seeded mutations against every decoder, for a time, in this process.
//!
//! `BEELINE_FUZZ_SECONDS=n` for each decoder (else one; 60 with `BEELINE_DEEP=1`),
//! `BEELINE_SEED=n` another course. A failure prints the input and how to get it again.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use beeline_verify_fuzz::mutate::Mutator;
use beeline_verify_fuzz::{TARGETS, Target, target};

/// One input must never take longer, on the slowest machine.
const LONGEST: Duration = Duration::from_secs(10);

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// What a run did, or the input that broke it.
fn fuzz(target: Target, seed: u64, time: Duration) -> Result<(u64, u64), String> {
    for good in (target.seeds)() {
        (target.run)(&good);
    }
    let mut mutator = Mutator::new(seed, (target.seeds)());
    let (begun, mut executions, mut taken) = (Instant::now(), 0_u64, 0);
    while begun.elapsed() < time {
        let input = mutator.next_input();
        executions += 1;
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| (target.run)(&input)));
        let late = start.elapsed() > LONGEST;
        match outcome {
            Ok(accepted) if !late => taken += u64::from(accepted),
            outcome => {
                let what = if outcome.is_err() { "panicked at" } else { "took too long with" };
                let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
                return Err(format!(
                    "{} {what} input {executions} of BEELINE_SEED={seed}: {hex}",
                    target.name
                ));
            }
        }
    }
    Ok((executions, taken))
}

fn run(name: &str) {
    let deep = std::env::var_os("BEELINE_DEEP").is_some();
    let seconds = number("BEELINE_FUZZ_SECONDS").unwrap_or(if deep { 60 } else { 1 });
    let seed = number("BEELINE_SEED").unwrap_or(1);
    let (executions, taken) =
        fuzz(target(name), seed, Duration::from_secs(seconds)).unwrap_or_else(|e| panic!("{e}"));
    let line = format!("ran: {name}: {executions} mutated inputs, {taken} of them taken\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    assert!(executions >= 10, "only {executions} inputs");
    assert!(taken > 0, "no input got past the first check: nothing was tested");
}

#[test]
fn window_records_survive_mutation() {
    run("window_records");
}

#[test]
fn a_partition_survives_any_words_of_programs_and_of_the_other_host() {
    run("window_memory");
}

#[test]
fn packets_of_the_direct_store_survive_mutation() {
    run("direct_packets");
}

#[test]
fn tcp_frames_survive_mutation() {
    run("tcp_frames");
}

#[test]
fn tcp_greetings_survive_mutation() {
    run("tcp_greeting");
}

#[test]
fn bootstrap_messages_survive_mutation() {
    run("bootstrap");
}

#[test]
fn one_sided_messages_survive_mutation() {
    run("kv_wire");
}

#[test]
fn redis_requests_survive_mutation() {
    run("resp");
}

#[test]
fn patterns_survive_mutation() {
    run("glob");
}

#[test]
fn snapshot_files_survive_mutation() {
    run("snapshot");
}

#[test]
fn pool_files_survive_mutation() {
    run("pool");
}

#[test]
fn records_to_the_monitor_and_from_it_survive_mutation() {
    run("socket_records");
}

#[test]
fn messages_between_relays_survive_mutation() {
    run("relay_messages");
}

#[test]
fn units_of_the_log_survive_mutation() {
    run("unit");
}

#[test]
fn a_segment_that_a_peer_writes_over_survives_mutation() {
    run("socket_segment");
}

#[test]
fn sources_of_network_functions_survive_mutation() {
    run("nf_source");
}

#[test]
fn a_planted_bug_is_found_and_its_input_printed() {
    /// Trusts a length it was told.
    fn trusting(bytes: &[u8]) -> bool {
        let Some((length, rest)) = bytes.split_first() else { return false };
        let _ = &rest[..usize::from(*length)];
        true
    }
    let planted =
        Target { name: "planted", run: trusting, seeds: || vec![vec![3, b'a', b'b', b'c']] };
    let found = fuzz(planted, 1, Duration::from_secs(20)).unwrap_err();
    assert!(found.starts_with("planted panicked at input"), "{found}");
}

#[test]
fn every_decoder_has_a_libfuzzer_target() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/fuzz_targets");
    for target in TARGETS {
        let text = std::fs::read_to_string(folder.join(format!("{}.rs", target.name))).unwrap();
        assert!(text.contains(&format!("{:?}", target.name)), "{}", target.name);
    }
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), TARGETS.len());
    // And a test of its own above.
    let tests = include_str!("mutations.rs");
    for target in TARGETS {
        assert!(tests.contains(&format!("run({:?})", target.name)), "{}", target.name);
    }
}
