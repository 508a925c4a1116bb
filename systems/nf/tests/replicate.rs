//! Copies of an element: whole packets, flows in order, fewer clocks; goals; builds in stages.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

use beeline_ir::flits::{Joiner, WORDS, split};
use beeline_ir::graph::{Graph, Node};
use beeline_nf::build::{Mode, build};
use beeline_nf::diff::{Stimulus, all_hardware, compare, cycles, interpreted};
use beeline_nf::functions::rules::Key;
use beeline_nf::load::compile;
use beeline_passes::replicate::{Goal, ReplicateError, replicate};
use beeline_passes::{Options, hardware};
use common::{compiled, number, packet};

/// An element that works three cycles on each flit.
const SLOW: &str = ".element Slow (flit in -> flit out) {\n.handler {\n\
    if (test_input_port(in)) {\nflit x = read_input_port(in);\nuint sum = 0;\n#pragma flatten 1\n\
    for (uint i = 0; i < 6; i++) { sum += x.fdata[i]; }\nx.tag = sum;\nset_output_port(out, x);\n}\n}\n}\n\
    Slow :: slow\nCount :: cnt @\nfrom_tor -> slow -> cnt -> to_tor\n";

fn interval(node: &Node) -> u32 {
    hardware(&node.element, &Options::default()).unwrap().report.interval
}

fn stimulus() -> Stimulus {
    let mut items = Vec::new();
    for at in 0..300_u32 {
        // So many flows that four copies have about equal shares.
        let source = 0x0a00_0000 | (at * 7 % 149) << 8;
        let key = Key { source, destination: 0x0b00_0001, ports: 80, protocol: 6 };
        split(&packet(key, 0, at), 5, |flit| items.extend(flit));
    }
    Stimulus { items: vec![items], signals: Vec::new() }
}

/// Packets that left, by flow, in their order.
fn by_flow(graph: &Graph, channels: &[Vec<u64>]) -> HashMap<Vec<u8>, Vec<u32>> {
    let mut joiner = Joiner::default();
    let mut flows: HashMap<Vec<u8>, Vec<u32>> = HashMap::new();
    for flit in channels[graph.outputs[0].channel].as_chunks::<WORDS>().0 {
        if let Some((bytes, _)) = joiner.push(flit).unwrap() {
            flows.entry(bytes[26..34].to_vec()).or_default().push(number(bytes));
        }
    }
    flows
}

#[test]
fn copies_keep_packets_whole_and_flows_in_order_and_take_fewer_clocks() {
    let loaded = compiled(SLOW);
    let graph = &loaded.compiled.graph;
    let stimulus = stimulus();
    let wanted = by_flow(graph, &interpreted(graph, &stimulus).unwrap().channels);
    assert_eq!((wanted.len(), wanted.values().map(Vec::len).sum::<usize>()), (149, 300));
    let mut clocks = Vec::new();
    for copies in [1, 2, 4] {
        let goals = [("slow".to_owned(), Goal::Copies(copies))];
        let (copied, balance) = replicate(graph, &goals, &interval).unwrap();
        assert_eq!(balance[0].copies, copies);
        assert_eq!(
            copied.nodes.len(),
            graph.nodes.len() + if copies > 1 { copies as usize + 1 } else { 0 }
        );
        let made = all_hardware(&copied, &Options::default()).unwrap();
        let outcome = cycles(&copied, &made, &stimulus).unwrap();
        assert_eq!(by_flow(&copied, &outcome.channels), wanted, "{copies} copies");
        assert_eq!(by_flow(&copied, &interpreted(&copied, &stimulus).unwrap().channels), wanted);
        clocks.push(outcome.clocks.unwrap());
        // Every back end, the copies' channels included.
        for (back_end, (_, found)) in compare(&copied, &Options::default(), &stimulus, &[]).unwrap()
        {
            assert!(found.is_empty(), "{copies} copies by {back_end}: {found:#?}");
        }
    }
    println!("{clocks:?} clocks");
    // The spreader passes one flit a clock, a third of what one copy takes for it: no number of copies
    // takes fewer clocks than that.
    assert!(clocks[1] * 10 < clocks[0] * 6 && clocks[2] * 10 < clocks[1] * 9, "{clocks:?}");
}

#[test]
fn goals_decide_the_copies_and_what_cannot_be_copied_is_told() {
    let loaded = compiled(SLOW);
    let graph = &loaded.compiled.graph;
    let three = |_: &Node| 3;
    let copies = |goal: Goal| {
        replicate(graph, &[("slow".to_owned(), goal)], &three).map(|(_, balance)| balance[0].copies)
    };
    // 60 million flits a second a copy at 180 MHz and an interval of 3.
    let goal = |mflits: f64| Goal::Throughput { mflits, mhz: 180.0 };
    assert_eq!(copies(goal(60.0)), Ok(1));
    assert_eq!(copies(goal(61.0)), Ok(2));
    assert_eq!(copies(goal(180.0)), Ok(3));
    assert!(matches!(copies(goal(1e6)), Err(ReplicateError::TooMany { .. })));
    assert_eq!(copies(Goal::Area { luts: 1_000, each: 300 }), Ok(3));
    assert_eq!(copies(Goal::Area { luts: 10, each: 300 }), Ok(1));
    let fails = |name: &str, text: &str| {
        let loaded = compiled(text);
        let goals = [(name.to_owned(), Goal::Copies(2))];
        replicate(&loaded.compiled.graph, &goals, &three).unwrap_err()
    };
    assert!(matches!(fails("nothing", SLOW), ReplicateError::NoSuchInstance(_)));
    assert!(matches!(fails("cnt", SLOW), ReplicateError::Signalled(_)));
    let forked = "RoundRobinSwitch :: two\nMerge :: one\nfrom_tor -> two -> one -> to_tor\ntwo [2] -> [2] one\n";
    assert!(matches!(fails("two", forked), ReplicateError::Ports(_)));
}

#[test]
fn a_second_build_takes_unchanged_elements_from_the_first() {
    if !beeline_nf::area::is_here() {
        println!("skipped: yosys is not installed; cargo xtask setup installs it");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let made = |text: &str, mode: Mode| {
        let loaded = compile("test.np", text.to_owned(), None);
        assert!(!loaded.diagnostics.failed());
        let places = (Path::new("test.np"), folder.path());
        let built = build(&loaded, Instant::now(), places, mode).unwrap();
        let names: Vec<&str> = built.stages.iter().map(|stage| stage.stage).collect();
        assert_eq!(names, ["compile", "schedule", "generate", "synthesise"]);
        let last = built.stages[3].clone();
        (last.made, last.reused, built.areas)
    };
    let text = |more: &str| {
        format!(
            ".element Sum (uint32 in -> uint32 out) {{\n.state {{ uint32 total; uint32 table[64]; }}\n\
             .handler {{\nif (test_input_port(in)) {{\nuint32 x = read_input_port(in);\n\
             total += x{more};\ntable[x & 63] = total;\nset_output_port(out, total ^ table[0]);\n}}\n}}\n}}\n\
             .element Flip (uint32 in -> uint32 out) {{\n.handler {{\n\
             if (test_input_port(in)) set_output_port(out, ~read_input_port(in));\n}}\n}}\n\
             .input uint32 in\n.output uint32 out\nFlip :: a\nSum :: s\nFlip :: b\nin -> a -> s -> b -> out\n"
        )
    };
    let (first, shared, areas) = made(&text(""), Mode::Release);
    assert_eq!((first, shared), (2, 1), "two instances of one element are made once");
    assert_eq!(areas[1].memory_bits, 64 * 32, "Yosys counts the memory that the compiler made");
    let (again, reused, same) = made(&text(""), Mode::Release);
    assert_eq!((again, reused), (0, 3));
    assert_eq!(same, areas);
    // One element changes: it alone is made again. A damaged result is made again too.
    assert_eq!(made(&text(" + 1"), Mode::Release).0, 1);
    for kept in std::fs::read_dir(folder.path().join("cache")).unwrap() {
        std::fs::write(kept.unwrap().path(), "beeline-nf-area 1{\"length\":").unwrap();
    }
    assert_eq!(made(&text(""), Mode::Release).0, 2);
    assert!(folder.path().join("design.v").exists());
}
