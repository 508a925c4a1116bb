//! A graph between two veth pairs in this host, with a signal while packets flow.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_native::Program;
use beeline_nf::live::{ask, run};
use beeline_nf::load::load;
use beeline_nf::packet_socket::Device;

/// A veth pair that goes with its value.
struct Veth(String);

impl Veth {
    fn new(name: &str) -> Option<Self> {
        let peer = format!("{name}p");
        let add = ["link", "add", name, "type", "veth", "peer", "name", &peer];
        let ok = Command::new("ip").args(add).output().ok()?.status.success();
        let veth = ok.then(|| Self(name.to_owned()))?;
        for end in [name, &peer] {
            Command::new("ip").args(["link", "set", end, "up"]).output().ok()?;
        }
        Some(veth)
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).output();
    }
}

#[test]
fn packets_pass_between_interfaces_and_a_signal_reads_the_count() {
    let id = std::process::id() % 100_000;
    let (Some(a), Some(b)) = (Veth::new(&format!("nfa{id}")), Veth::new(&format!("nfb{id}")))
    else {
        println!("skipped: this user cannot make veth devices");
        return;
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/counter.np");
    let loaded = load(&path).unwrap();
    let graph = &loaded.compiled.graph;
    let program = Program::compile(graph).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let ports = [("in".to_owned(), a.0.clone()), ("out".to_owned(), b.0.clone())];
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let runner =
            scope.spawn(|| run(graph, program.machines(), &ports, Some(&control), &stop).unwrap());
        let deadline = Instant::now() + Duration::from_secs(30);
        while !control.exists() {
            assert!(Instant::now() < deadline, "the graph did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut near = Device::interface(&format!("{}p", a.0)).unwrap();
        let mut far = Device::interface(&format!("{}p", b.0)).unwrap();
        // An address of our own, so that what the host itself sends is told apart.
        let packet = |at: u8| {
            let mut bytes = vec![at; 60 + usize::from(at)];
            bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 0x88, 0xb5]);
            bytes
        };
        for at in 0..100 {
            while !near.send(&packet(at)).unwrap() {}
        }
        let mut got = Vec::new();
        let mut buffer = vec![0; 65_536];
        while got.len() < 100 {
            assert!(Instant::now() < deadline, "{} of 100 packets", got.len());
            match far.receive(&mut buffer).unwrap() {
                Some(count) if buffer[12..14] == [0x88, 0xb5] => got.push(buffer[..count].to_vec()),
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        assert_eq!(got, (0..100).map(packet).collect::<Vec<_>>());
        let answer = ask(&control, [1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert!(answer[1] >= 100, "{answer:?}");
        assert!(ask(&control, [9, 0, 0, 0, 0, 0, 0, 0]).is_err());
        stop.store(true, Ordering::Relaxed);
        let passed = runner.join().unwrap();
        assert!(passed.sent >= 100 && passed.signals == 1, "{passed:?}");
    });
}
