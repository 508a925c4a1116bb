//! `host` elements on their own thread, behind the link: the same packets, whatever is there.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::process::Command;

use beeline_ir::graph::Graph;
use beeline_nf::diff::{Simulator, all_hardware};
use beeline_nf::engine::{EngineError, run_captures};
use beeline_nf::functions::rules::Key;
use beeline_nf::functions::templates;
use beeline_nf::pcap::{Reader, Writer};
use beeline_nf::pcie::bus::Pace;
use beeline_nf::pcie::slot::Mode;
use beeline_nf::sides::split::Place;
use beeline_nf::sides::{self, LinkOptions, Plan, SidesError};
use beeline_passes::Options;
use beeline_verilog::graph::design;
use common::{compiled, packet};

/// Runs a graph from capture to capture; what came out of its outputs.
fn through(
    graph: &Graph,
    link: LinkOptions,
    commands: &[String],
) -> Result<Vec<Vec<u8>>, EngineError> {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(Vec::new()).unwrap();
    for at in 0..200_u32 {
        let source = 0x0b00_0000 + at % 23;
        let key = Key { source, destination: 0x0a00_000a, ports: 7 << 16 | 80, protocol: 6 };
        writer.write(u64::from(at) * 5_000, &packet(key, 0, at)).unwrap();
    }
    let from = folder.path().join("in.pcap");
    std::fs::write(&from, writer.finish().unwrap()).unwrap();
    let mut ports = Vec::new();
    for input in &graph.inputs {
        ports.push((input.name.clone(), from.clone()));
    }
    let to = |name: &str| folder.path().join(format!("{name}.out.pcap"));
    for output in &graph.outputs {
        ports.push((output.name.clone(), to(&output.name)));
    }
    run_captures(graph, (&sides::native, link), &ports, commands)?;
    let mut out = Vec::new();
    for output in &graph.outputs {
        let bytes = std::fs::read(to(&output.name)).unwrap();
        let mut reader = Reader::new(&bytes[..]).unwrap();
        while let Some(packet) = reader.next_packet().unwrap() {
            out.push(packet.bytes);
        }
    }
    Ok(out)
}

#[test]
fn each_element_of_a_chain_in_turn_is_a_host_element_and_the_packets_are_the_same() {
    let loaded = compiled(
        "L4_Parser :: parser\nIPChecksum :: sum\nCount :: cnt\n\
         from_tor -> parser -> sum -> cnt -> to_tor\n",
    );
    let mut graph = loaded.compiled.graph.clone();
    let wanted = through(&graph, LinkOptions::default(), &[]).unwrap();
    assert_eq!(wanted.len(), 200);
    let slow = Pace { delay_ns: 30_000, bytes_per_second: 50_000_000 };
    for mask in 1..1_u32 << graph.nodes.len() {
        for (at, node) in graph.nodes.iter_mut().enumerate() {
            node.host = mask >> at & 1 == 1;
        }
        let mode = if mask % 2 == 0 { Mode::Poll } else { Mode::Interrupt };
        let pace = if mask == 2 { slow } else { Pace::default() };
        let link = LinkOptions { mode, pace, ..LinkOptions::default() };
        let found = through(&graph, link, &[]).unwrap();
        assert!(found == wanted, "host elements {mask:b}: {} packets", found.len());
    }
}

#[test]
fn each_element_of_the_firewall_in_turn_is_a_host_element_and_the_verdicts_are_the_same() {
    let text = templates::text("firewall").unwrap();
    let mut graph = compiled(text).compiled.graph.clone();
    let commands = [
        "rules add tcp 11.0.0.3 :7 -> 10.0.0.10 :80 drop",
        "rules add tcp 11.0.0.8/31 -> any drop",
        "rules add tcp any :5-7 -> 10.0.0.10 pass",
    ]
    .map(str::to_owned);
    let wanted = through(&graph, LinkOptions::default(), &commands).unwrap();
    assert!(wanted.len() > 150 && wanted.len() < 200, "{}", wanted.len());
    for at in 0..graph.nodes.len() {
        graph.nodes[at].host = true;
        let found = through(&graph, LinkOptions::default(), &commands).unwrap();
        assert!(found == wanted, "{} on the host: {}", graph.nodes[at].name, found.len());
        graph.nodes[at].host = false;
    }
}

#[test]
fn more_threads_give_the_same_packets_where_they_pay_and_are_not_taken_where_not() {
    let text = templates::text("firewall").unwrap();
    let commands = ["rules add tcp 11.0.0.3 :7 -> 10.0.0.10 :80 drop".to_owned()];
    let chain = ".element Digest (flit in -> flit out) {\n.handler {\nif (test_input_port(in)) {\n\
                 flit x = read_input_port(in);\nulong h = x.quad[0];\n\
                 for (uint i = 0; i < 64; i++) h = (h ^ x.quad[i & 3]) * 1099511628211;\n\
                 x.quad[3] = h;\nset_output_port(out, x);\n}\n}\n}\n\
                 Digest :: a\nDigest :: b\nCount :: cnt\nDigest :: c\n\
                 from_tor -> a -> b -> cnt -> c -> to_tor\n";
    for (text, commands) in [(text, &commands[..]), (chain, &[])] {
        let mut graph = compiled(text).compiled.graph.clone();
        let wanted = through(&graph, LinkOptions::default(), commands).unwrap();
        assert!(wanted.len() > 150, "{}", wanted.len());
        let mut most = 0;
        for (threads, mode) in [(2, Mode::Poll), (3, Mode::Interrupt), (4, Mode::Interrupt)] {
            let plan = Plan::threaded(&graph, threads).unwrap();
            assert!(plan.threads() <= threads);
            most = most.max(plan.threads());
            let link = LinkOptions { mode, threads, ..LinkOptions::default() };
            let found = through(&graph, link, commands).unwrap();
            assert!(found == wanted, "{threads} threads: {} packets", found.len());
        }
        assert!(most > 2, "never more than {most} threads");
        // Beside a host element, which keeps its own.
        graph.nodes[0].host = true;
        let link = LinkOptions { threads: 3, ..LinkOptions::default() };
        assert!(through(&graph, link, commands).unwrap() == wanted);
    }
    let light = compiled("Count :: c\nfrom_tor -> c -> to_tor\n");
    assert_eq!(Plan::threaded(&light.compiled.graph, 4).unwrap().threads(), 1);
}

#[test]
fn the_balancer_allocates_on_the_host_and_every_packet_comes_out() {
    let graph = compiled(templates::text("balancer").unwrap()).compiled.graph.clone();
    let plan = Plan::of(&graph).unwrap();
    let split = plan.split().unwrap();
    assert_eq!(split.workers[0].nodes.len(), 1, "the allocator is a host element");
    assert_eq!((split.workers.len(), split.workers[0].crossings.len()), (1, 2));
    assert!(split.nodes.iter().filter(|place| matches!(place, Place::Worker(..))).count() == 1);
    let commands = ["backends add 10.9.0.1", "backends add 10.9.0.2"].map(str::to_owned);
    let mut on_the_card = graph.clone();
    on_the_card.nodes.iter_mut().for_each(|node| node.host = false);
    let wanted = through(&on_the_card, LinkOptions::default(), &commands).unwrap();
    assert_eq!(wanted.len(), 200);
    assert_eq!(through(&graph, LinkOptions::default(), &commands).unwrap(), wanted);
}

#[test]
fn what_host_elements_leave_to_the_card_is_a_design_of_its_own() {
    let loaded = compiled(
        "L4_Parser :: parser\nhost Count :: cnt\nIPChecksum :: sum\n\
         from_tor -> parser -> cnt -> sum -> to_tor\n",
    );
    let plan = Plan::of(&loaded.compiled.graph).unwrap();
    let made = all_hardware(plan.card(), &Options::default()).unwrap();
    let text = design(plan.card(), &made, &|_| None);
    if Simulator::Icarus.is_here() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("design.v"), &text).unwrap();
        let words = ["-g2005", "-t", "null", "design.v"];
        let read = Command::new("iverilog").args(words).current_dir(folder.path()).output();
        let read = read.unwrap();
        assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    }
}

#[test]
fn an_endless_host_element_ends_the_run_with_its_name_and_too_many_channels_are_refused() {
    let loaded = compiled(
        ".element Stuck (flit in -> flit out) {\n.handler {\n\
         if (test_input_port(in)) { flit x = read_input_port(in); while (true) { x.tag = 1; } }\n}\n}\n\
         host Stuck :: stuck\nfrom_tor -> stuck -> to_tor\n",
    );
    let error = through(&loaded.compiled.graph, LinkOptions::default(), &[]).unwrap_err();
    assert!(error.to_string().contains("Stuck did not end"), "{error}");
    let mut text = String::new();
    let mut chain = String::from("from_tor");
    for at in 0..31 {
        let host = if at % 2 == 0 { "host " } else { "" };
        text.push_str(&format!("{host}Count :: c{at}\n"));
        chain.push_str(&format!(" -> c{at}"));
    }
    let loaded = compiled(&format!("{text}{chain} -> to_tor\n"));
    let error = through(&loaded.compiled.graph, LinkOptions::default(), &[]).unwrap_err();
    assert!(matches!(error, EngineError::Sides(SidesError::Crossings(_))), "{error}");
    assert!(error.to_string().contains("32 channels"), "{error}");
}
