//! System calls that a message costs, counted: none.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Command;
use std::time::Duration;

use beeline_verify_clients::preload::{Monitor, PATIENCE_VARIABLE, library};
use beeline_verify_clients::{bounded, need, note, root, said, skip};

const PATIENCE: Duration = Duration::from_secs(300);
const ROUNDS: u32 = 2000;

/// What stands between the marks of each part of a trace.
fn phases(trace: &str) -> Vec<(String, Vec<&str>)> {
    let mark = |line: &str, word: &str| -> Option<String> {
        let rest = line.strip_prefix("write(")?.split_once(&format!("\"{word} "))?.1;
        Some(rest.split_once('"')?.0.to_owned())
    };
    let (mut all, mut open) = (Vec::new(), None::<(String, Vec<&str>)>);
    for line in trace.lines() {
        if let Some(name) = mark(line, "begin") {
            open = Some((name, Vec::new()));
        } else if let Some(name) = mark(line, "end") {
            let phase = open.take().unwrap();
            assert_eq!(phase.0, name);
            all.push(phase);
        } else if let Some((_, calls)) = &mut open {
            // A tick of the tracer's, or a signal, is no call.
            calls.extend(line.contains('(').then_some(line));
        }
    }
    all
}

#[test]
fn a_message_makes_no_system_call_also_beside_and_after_children() {
    let test = "a_message_makes_no_system_call_also_beside_and_after_children";
    if need(test, "python3").is_none() || need(test, "strace").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    let script = root().join("verify/clients/python/sockets_calls.py");
    // The tracer preloads the library itself, so that it is the program alone that has it.
    let preload = format!("LD_PRELOAD={}", library().display());
    let mut command = Command::new("strace");
    command.args(["-etrace=all", "-s100", "-E", &preload, "-o"]).arg(&trace);
    command.env("BEELINE_SOCKETS_MONITOR", monitor.name()).env("BEELINE_SOCKETS_ASK_AFTER", "0");
    command.env(PATIENCE_VARIABLE, "20000");
    command.arg("python3").arg(&script).arg(ROUNDS.to_string());
    let output = bounded(&mut command, PATIENCE);
    if !output.status.success() && said(&output).contains("ptrace") {
        return skip(test, "strace may not trace here");
    }
    assert!(said(&output).contains("done"), "{}", said(&output));
    assert_eq!(monitor.paired(), 1);
    let trace = std::fs::read_to_string(&trace).unwrap();
    let phases = phases(&trace);
    assert_eq!(phases.len(), 10);
    for (phase, calls) in &phases {
        note(&format!("{phase}: {} system calls in {ROUNDS} round trips", calls.len()));
    }
    for (phase, calls) in &phases {
        let few = calls.len() <= ROUNDS as usize / 100;
        assert!(few, "{phase}: {} calls, such as {:?}", calls.len(), calls.first());
    }
}
