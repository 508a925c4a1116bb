//! `beeline nf` and `beeline bench nf`, as a user types them.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

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

/// A capture of one packet of `bytes` bytes.
fn capture(bytes: u8) -> Vec<u8> {
    let mut pcap: Vec<u8> = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    pcap.extend([0xff, 0xff, 0, 0, 1, 0, 0, 0]);
    pcap.extend([1, 0, 0, 0, 0, 0, 0, 0, bytes, 0, 0, 0, bytes, 0, 0, 0]);
    pcap.extend(vec![7; usize::from(bytes)]);
    pcap
}

#[test]
fn a_counter_is_reported_written_simulated_compared_and_replicated() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    done(&beeline(here, &["nf", "new", "counter"], ""));
    std::fs::write(here.join("in.pcap"), capture(90)).unwrap();
    let report = done(&beeline(here, &["nf", "report", "counter.np"], ""));
    assert!(report.contains("naive II") && report.contains("registers"), "{report}");
    let json = done(&beeline(here, &["nf", "report", "counter.np", "--json"], ""));
    let record: serde_json::Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    assert_eq!(record["interval"].as_u64(), Some(1), "{json}");
    let written = done(&beeline(here, &["nf", "verilog", "counter.np", "-o", "out"], ""));
    assert!(written.contains("top np_top") && here.join("out/design.v").exists(), "{written}");
    let play = ["counter.np", "--pcap", "in.pcap", "--simulator", "model"];
    let played = done(&beeline(here, &[&["nf", "simulate"], &play[..]].concat(), ""));
    assert!(played.contains("1 packet, 0 not whole"), "{played}");
    for collision in ["old", "new"] {
        let compare = [&["nf", "diff"], &play[..], &["--collision", collision]].concat();
        assert!(done(&beeline(here, &compare, "")).contains("every channel"), "{collision}");
    }
    let copies = ["nf", "report", "counter.np", "--replicate", "cnt=2"];
    let refused = beeline(here, &copies, "");
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && why.contains("marked @"), "{why}");
    std::fs::write(here.join("sum.np"), "IPChecksum :: sum\nfrom_tor -> sum -> to_tor\n").unwrap();
    let said = done(&beeline(here, &["nf", "report", "sum.np", "--goal", "sum=300"], ""));
    assert!(said.contains("sum: 2 copies of II 1"), "{said}");
    // A host element is no part of the design; what leads to it is a port.
    done(&beeline(here, &["nf", "new", "balancer"], ""));
    let written = done(&beeline(here, &["nf", "verilog", "balancer.np", "-o", "lb"], ""));
    assert!(written.contains("1 host element left out, joined by 2 ports"), "{written}");
    let text = std::fs::read_to_string(here.join("lb/design.v")).unwrap();
    assert!(!text.contains("DipAlloc") && text.contains("alloc"), "the allocator is outside");
    // A hand-written module that is not there is named with its path.
    std::fs::write(here.join("own.np"), "verilog Count :: c\nfrom_tor -> c -> to_tor\n").unwrap();
    let refused = beeline(here, &["nf", "verilog", "own.np"], "");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("Count.v"), "{refused:?}");
}

/// A pair of interfaces that goes with its value; none where this user cannot make one.
struct Veth(String);

impl Veth {
    fn new(name: String) -> Option<Self> {
        let ip = |words: &[&str]| {
            Command::new("ip").args(words).output().is_ok_and(|output| output.status.success())
        };
        let peer = format!("{name}p");
        let made = ip(&["link", "add", &name, "type", "veth", "peer", "name", &peer]);
        let veth = made.then_some(Self(name))?;
        (ip(&["link", "set", &veth.0, "up"]) && ip(&["link", "set", &peer, "up"])).then_some(veth)
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).output();
    }
}

/// A run that ends with its value.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_run_between_interfaces_is_signalled_reloaded_reset_and_ended() {
    let id = std::process::id() % 100_000;
    let pairs = (Veth::new(format!("nfx{id}")), Veth::new(format!("nfy{id}")));
    let (Some(a), Some(b)) = pairs else {
        println!("skipped: this user cannot make veth devices");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    done(&beeline(here, &["nf", "new", "counter"], ""));
    let first = std::fs::read_to_string(here.join("counter.np")).unwrap();
    let (from, to) = (format!("in={}", a.0), format!("out={}", b.0));
    let ports = ["--port", &from, "--port", &to, "--control", "control"];
    let child = Command::new(env!("CARGO_BIN_EXE_beeline"))
        .args(["nf", "run", "counter.np"])
        .args(ports)
        .current_dir(here)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut running = Running(child);
    let say =
        |words: &[&str]| beeline(here, &[&["nf"], words, &["--control", "control"]].concat(), "");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    // The socket is there a moment before it takes callers.
    while !say(&["signal", "counter.np", "cnt"]).status.success() {
        assert!(std::time::Instant::now() < deadline, "the run did not begin");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let count = || -> u64 {
        let said = done(&say(&["signal", "counter.np", "cnt"]));
        said.split_whitespace().next().unwrap().parse().unwrap()
    };
    let before = count();
    let top = done(&say(&["top", "counter.np", "--count", "1", "--json"]));
    assert!(top.contains("in->cnt"), "{top}");
    // A changed file takes over; a broken one is told with its place, and the run goes on.
    let filtered = first.replace("in -> cnt -> out", "IPChecksum :: sum\nin -> sum -> cnt -> out");
    std::fs::write(here.join("counter.np"), &filtered).unwrap();
    let told = done(&say(&["reload", "counter.np"]));
    assert!(told.contains("kept cnt") && told.contains("begun sum"), "{told}");
    assert!(count() >= before);
    std::fs::write(here.join("counter.np"), filtered.replace("count++", "coun++")).unwrap();
    let refused = say(&["reload", "counter.np"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && why.contains("counter.np:"), "{why}");
    std::fs::write(here.join("counter.np"), filtered.replace("ulong count", "uint count")).unwrap();
    let why = String::from_utf8_lossy(&say(&["reload", "counter.np"]).stderr).into_owned();
    assert!(why.contains("64 bits, and 32") && why.contains("--restart"), "{why}");
    let told = done(&say(&["reload", "counter.np", "--restart", "cnt"]));
    assert!(told.contains("begun") && told.contains("cnt"), "{told}");
    assert!(done(&say(&["reset", "counter.np", "cnt"])).contains("set back: cnt"));
    let pid = rustix::process::Pid::from_child(&running.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let mut said = String::new();
    let mut out = running.0.stdout.take().unwrap();
    std::io::Read::read_to_string(&mut out, &mut said).unwrap();
    assert!(running.0.wait().unwrap().success());
    assert!(said.contains("packets out") || said.contains("out, "), "{said}");
    assert!(!here.join("control").exists(), "the socket is taken away");
    // Nothing runs there any more: exit code 3.
    assert_eq!(say(&["reset", "counter.np", "cnt"]).status.code(), Some(3));
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
    assert!(of("measured") >= 12 && of("counted") >= 5, "{text}");
    assert!(of("emulated") >= 8 && of("simulated") >= 2, "{text}");
    for part in ["L4_Parser", "10000 rules", "a rule in", "balancer", "machine code"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
