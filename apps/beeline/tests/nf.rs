//! `beeline nf` and `beeline bench nf`, as a user types them.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn beeline(folder: &Path, arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_beeline"))
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn done(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_firewall_is_begun_checked_run_and_debugged() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    done(&beeline(here, &["nf", "new", "firewall"], ""));
    let again = beeline(here, &["nf", "new", "firewall"], "");
    assert!(!again.status.success(), "a file is not written over");
    assert!(done(&beeline(here, &["nf", "check", "firewall.np"], "")).contains("8 instances"));
    // Two TCP packets, to ports 443 and 80.
    let mut pcap: Vec<u8> = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    pcap.extend([0xff, 0xff, 0, 0, 1, 0, 0, 0]);
    for port in [443_u16, 80] {
        let mut packet = [0_u8; 60];
        packet[12..15].copy_from_slice(&[8, 0, 0x45]);
        packet[23] = 6;
        packet[36..38].copy_from_slice(&port.to_be_bytes());
        pcap.extend([1, 0, 0, 0, 0, 0, 0, 0, 60, 0, 0, 0, 60, 0, 0, 0]);
        pcap.extend(packet);
    }
    std::fs::write(here.join("in.pcap"), pcap).unwrap();
    std::fs::write(here.join("rules"), "# one\nrules add tcp any -> any :443 drop\n").unwrap();
    let ports = ["--port", "from_tor=in.pcap", "--port", "to_tor=out.pcap", "--commands", "rules"];
    let run = [&["nf", "run", "firewall.np"], &ports[..]].concat();
    assert!(done(&beeline(here, &run, "")).contains("2 packets in, 1 packet out"));
    let debug = [&["nf", "debug", "firewall.np"], &ports[..]].concat();
    let said = done(&beeline(here, &debug, "break gate\ncontinue\nchannels\nquit\n"));
    assert!(said.contains("gate, iteration") && said.contains("passed"), "{said}");
    std::fs::write(here.join("rules"), "rules add tcp any any drop\n").unwrap();
    let refused = beeline(here, &run, "");
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && why.contains("no ->"), "{why}");
}

#[test]
fn check_names_line_column_and_code_for_editors() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("bad.np"), "Counter :: c\nfrom_tor -> c -> to_tor\n")
        .unwrap();
    let output = beeline(folder.path(), &["nf", "check", "bad.np", "--json"], "");
    assert_eq!(output.status.code(), Some(1));
    let line = String::from_utf8_lossy(&output.stdout).into_owned();
    let record: serde_json::Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
    assert_eq!((record["line"].as_u64(), record["column"].as_u64()), (Some(1), Some(1)));
    assert_eq!(record["code"], "unknown-element");
}

#[test]
fn every_template_checks_and_a_tiny_bench_runs_every_part() {
    let folder = tempfile::tempdir().unwrap();
    for like in ["counter", "port", "knock", "balancer", "generator", "capture", "pfabric"] {
        done(&beeline(folder.path(), &["nf", "new", "x", "--like", like], ""));
        done(&beeline(folder.path(), &["nf", "check", "x.np"], ""));
        std::fs::remove_file(folder.path().join("x.np")).unwrap();
    }
    let text = done(&beeline(folder.path(), &["bench", "nf", "--quick", "--json"], ""));
    let rows: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |kind: &str| rows.iter().filter(|row| row["kind"] == kind).count();
    assert!(of("measured") >= 12 && of("counted") >= 4, "{text}");
    for part in ["L4_Parser", "10000 rules", "a rule in", "balancer", "machine code"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
