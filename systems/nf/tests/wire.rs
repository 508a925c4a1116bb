//! Simulated hardware with TAP devices as its wires.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "common/live.rs"]
mod scene;

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_ir::graph::Graph;
use beeline_nf::diff::{Simulator, all_hardware};
use beeline_nf::functions::{Kept, templates};
use beeline_nf::hand_written::HandWritten;
use beeline_nf::packet_socket::Device;
use beeline_nf::wire::serve;
use beeline_passes::Options;
use scene::{AtEnd, graph};

/// A packet to a TCP port, of a length of its own.
fn packet(number: u8, port: u16) -> Vec<u8> {
    let mut bytes = vec![number; 64 + usize::from(number)];
    bytes[..12].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8]);
    bytes[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 50, 0, 0, 0, 0, 64, 6]);
    bytes[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    bytes[36..38].copy_from_slice(&port.to_be_bytes());
    bytes
}

/// Sends packets into a function's hardware by one TAP device; those that come out by another.
fn through(
    (graph, ports): (&Graph, [&str; 2]),
    simulator: Option<Simulator>,
    commands: &[String],
    (packets, wanted): (&[Vec<u8>], usize),
) -> Vec<Vec<u8>> {
    let id = std::process::id() % 100_000;
    let taps = ["p", "q"].map(|letter| format!("nf{letter}{id}"));
    let bound: Vec<(String, String)> = ports
        .iter()
        .zip(&taps)
        .map(|(port, tap)| ((*port).to_owned(), format!("tap:{tap}")))
        .collect();
    let hardware = all_hardware(graph, &Options::default()).unwrap();
    let signals = Kept::of(graph, commands).unwrap().0;
    let (stop, own) = (AtomicBool::new(false), HandWritten::default());
    std::thread::scope(|scope| {
        let both = (&hardware[..], &own);
        let (stop, bound) = (&stop, &bound);
        let runner = scope.spawn(move || {
            let hear = |text: &str| println!("{text}");
            serve(graph, both, simulator, (bound, &signals), (&hear, stop))
        });
        let _ends = AtEnd(|| stop.store(true, Ordering::Relaxed));
        let deadline = Instant::now() + Duration::from_secs(120);
        let wait = |what: &str| {
            assert!(Instant::now() < deadline && !runner.is_finished(), "{what}");
            std::thread::sleep(Duration::from_millis(2));
        };
        for tap in &taps {
            let up = || {
                let words = ["link", "set", tap, "up"];
                Command::new("ip").args(words).output().unwrap().status.success()
            };
            while !up() {
                wait("the TAP devices are made");
            }
        }
        let mut near = Device::interface(&taps[0]).unwrap();
        let mut far = Device::interface(&taps[1]).unwrap();
        for packet in packets {
            while !near.send(packet).unwrap() {}
        }
        let (mut got, mut buffer) = (Vec::new(), vec![0; 65_536]);
        while got.len() < wanted {
            match far.receive(&mut buffer).unwrap() {
                Some(count) if buffer[..6] == [2, 0, 0, 0, 0, 9] => {
                    got.push(buffer[..count].to_vec());
                }
                Some(_) => {}
                None => wait("the packets come out"),
            }
        }
        stop.store(true, Ordering::Relaxed);
        let passed = runner.join().unwrap().unwrap();
        assert!(passed.sent >= wanted as u64 && passed.malformed == 0, "{passed:?}");
        got
    })
}

#[test]
fn packets_pass_through_simulated_hardware_between_tap_devices() {
    if Device::tap(&format!("nfp{}", std::process::id() % 100_000)).is_err() {
        println!("skipped: this user has no tun devices");
        return;
    }
    let counter = graph(scene::COUNTER);
    let firewall = templates::text("firewall").unwrap();
    let firewall = graph(&firewall.replace("BITS = 10", "BITS = 4"));
    let rules = ["rules add tcp 10.0.0.0/8 -> any :443 drop".to_owned()];
    let all: Vec<Vec<u8>> =
        (1..=8).map(|number| packet(number, if number % 2 == 0 { 443 } else { 80 })).collect();
    let odd: Vec<Vec<u8>> = all.iter().step_by(2).cloned().collect();
    let mut simulators = vec![None];
    simulators.extend(Some(Some(Simulator::Icarus)).filter(|_| Simulator::Icarus.is_here()));
    for simulator in simulators {
        let shown = simulator.map_or("the cycle model", Simulator::program);
        let got = through((&counter, ["in", "out"]), simulator, &[], (&all, all.len()));
        assert_eq!(got, all, "{shown}");
        // Rules are entered as signals, before the first packet.
        let ports = ["from_tor", "to_tor"];
        let got = through((&firewall, ports), simulator, &rules, (&all, odd.len()));
        assert_eq!(got, odd, "{shown}");
    }
}
