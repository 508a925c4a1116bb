//! A tiny setting of `beeline bench sockets`, which needs the preload library: over rings, and over packets between two
//! network namespaces.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::time::Duration;

use beeline_verify_clients::hosts::Namespaces;
use beeline_verify_clients::preload::library;
use beeline_verify_clients::{beeline, bounded, said};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(180);

fn rows(lane: &str, parts: &str) -> Vec<Value> {
    let mut command = beeline(&["bench", "sockets", "--quick", "--json", "--quiet"]);
    command.args(["--lane", lane, "--parts", parts, "--library"]).arg(library());
    let name = format!("bench-{}-{lane}", std::process::id());
    command.env("BEELINE_SOCKETS_MONITOR", name);
    let output = bounded(&mut command, PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_part_over_rings_that_needs_no_other_program_comes_to_its_end() {
    let parts = "data,connections,core,pipeline,sizes,pairs,many,rpc,breakdown";
    let rows = rows("rings", parts);
    for case in ["8 B round trip", "64 B packets through 3 processes in a row"] {
        let row = rows.iter().find(|row| row["case"] == case);
        let row = row.unwrap_or_else(|| panic!("no row {case}"));
        assert!(row["figure"]["median"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["subject"], "user-space sockets");
    }
}

#[test]
fn each_mode_of_the_packet_lane_makes_the_copies_that_it_is_said_to() {
    let test = "each_mode_of_the_packet_lane";
    if Namespaces::make(test).is_none() {
        return;
    }
    let rows = rows("packets", "modes");
    let copies: BTreeMap<(String, String), f64> = rows
        .iter()
        .map(|row| {
            let text = |name: &str| row[name].as_str().unwrap().to_owned();
            assert!(row["figure"]["median"].as_f64().unwrap() > 0.0, "{row}");
            let copies = row["beside"]["copies"].as_str().unwrap().parse().unwrap();
            ((text("case"), text("subject")), copies)
        })
        .collect();
    for size in ["4 KiB", "64 KiB"] {
        for (mode, expected) in [("origin", 4.0), ("shm", 2.0), ("direct", 0.0)] {
            let case = format!("{size} there and back, each byte written and read");
            let found = copies.get(&(case, mode.to_owned()));
            // Of a range only offset and length are copied.
            let found = found.unwrap_or_else(|| panic!("{mode}, {size}: {copies:?}"));
            assert!((found - expected).abs() < 0.02, "{mode}, {size}: {copies:?}");
        }
    }
}
