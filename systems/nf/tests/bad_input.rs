//! What is wrong is named, and what is right goes on: graphs, elements that do not end, channels too
//! short, packets that are none; the debugger that finds out.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use beeline_ir::run::{Interpreter, Machine, Run, RunError};
use beeline_nf::debug::{DebugError, Debugger};
use beeline_nf::diff::{DiffError, Stimulus, all_hardware, cycles};
use beeline_nf::functions::templates;
use beeline_nf::load::compile;
use beeline_passes::Options;
use common::{Dice, compiled, native, packet, play};

fn codes(text: &str) -> Vec<(u32, &'static str)> {
    let loaded = compile("bad.np", text.to_owned(), None);
    assert!(loaded.diagnostics.failed(), "{text} compiles");
    loaded.diagnostics.records(&loaded.sources).iter().map(|r| (r.line, r.code)).collect()
}

#[test]
fn graphs_that_are_wrong_are_refused_with_their_line() {
    for (text, wanted) in [
        ("Count :: a\na -> to_tor\n", (1, "unconnected")),
        (
            "Count :: a\nCount :: b\nfrom_tor -> a -> to_tor\nfrom_nic -> b\nb -> a\n",
            (5, "two-writers"),
        ),
        ("Count :: a\nCount :: b\nfrom_tor -> a -> to_tor\na -> b -> to_nic\n", (4, "two-readers")),
        ("Count :: a\nfrom_tor -> a [2] -> to_tor\n", (2, "bad-port")),
        ("Counter :: a\nfrom_tor -> a -> to_tor\n", (1, "unknown-element")),
        ("Count :: a\nfrom_tor -> a -> {1} to_tor\n", (2, "bad-depth")),
    ] {
        let found = codes(text);
        assert!(found.contains(&wanted), "{wanted:?} is not in {found:?}");
    }
}

#[test]
fn a_cycle_of_channels_works_while_it_has_room_and_its_deadlock_is_named() {
    let text = "
.element Twice (flit in -> flit out) {
    .state { flit held; bool again; }
    .handler {
        if (again) { set_output_port(out, held); again = false; return 0; }
        if (test_input_port(in)) { held = read_input_port(in); again = true; set_output_port(out, held); }
    }
}
Merge :: merge
Twice :: twice
Tee :: tee
Discard :: end
from_tor -> [2] merge -> twice -> tee -> [1] merge
tee [2] -> end
";
    let loaded = compiled(text);
    let graph = &loaded.compiled.graph;
    // Each item comes back as two: the cycle fills.
    let mut run = Run::new(graph, vec![Interpreter; graph.nodes.len()]).unwrap();
    let channel = graph.inputs[0].channel;
    assert!(run.channel_mut(channel).push(&[0, 0, 0, 0, 3, 0, 0, 0]));
    let error = run.settle(64, 100_000, |_| false).unwrap_err();
    let RunError::Deadlock(lines) = error else { panic!("{error}") };
    for part in ["merge waits for twice", "twice waits for tee", "tee waits for merge"] {
        assert!(lines.iter().any(|line| line.contains(part)), "{part}: {lines:?}");
    }
    assert!(lines[0].contains("of 16 entries"), "{lines:?}");
}

/// One branch holds eight items back before it gives the first; the other has room for two.
const UNDERSIZED: &str = "
.element Window (flit in -> flit out) {
    .state { flit kept[16]; uint count; uint given; }
    .handler {
        if (test_input_port(in)) {
            kept[count & 15] = read_input_port(in);
            count++;
        }
        if (count - given > 8) {
            set_output_port(out, kept[given & 15]);
            given++;
        }
    }
}
.element Join (flit a, flit b -> flit out) {
    .handler {
        if (test_input_port(a) && test_input_port(b)) {
            flit x = read_input_port(a);
            flit y = read_input_port(b);
            set_output_port(out, x);
        }
    }
}
Tee :: tee
Window :: window
Join :: join
from_tor -> tee
tee [1] -> window -> join
tee [2] -> {2} [2] join
join -> to_tor
";

fn flits(count: u64) -> Vec<u64> {
    (0..count).flat_map(|at| [at, 0, 0, 0, 3, 0, 0, 0]).collect()
}

#[test]
fn a_reconvergent_graph_that_is_too_short_is_named_and_not_hung() {
    let loaded = compiled(UNDERSIZED);
    let graph = &loaded.compiled.graph;
    let stimulus = Stimulus { items: vec![flits(40)], signals: Vec::new() };
    let lines = match beeline_nf::diff::interpreted(graph, &stimulus) {
        Err(DiffError::Run(RunError::Deadlock(lines))) => lines,
        other => panic!("{other:?}"),
    };
    let named = |part: &str| lines.iter().any(|line| line.contains(part));
    assert!(named("tee waits for join to read tee[2]->join[2] (2 of 2 entries)"), "{lines:?}");
    assert!(named("join waits for window to write"), "{lines:?}");
    let hardware = all_hardware(graph, &Options::default()).unwrap();
    let error = cycles(graph, &hardware, &stimulus).unwrap_err();
    assert!(error.to_string().contains("tee waits for join"), "{error}");
    // With room it flows.
    let loaded = compiled(&UNDERSIZED.replace("{2} [2] join", "{16} [2] join"));
    let graph = &loaded.compiled.graph;
    let out = beeline_nf::diff::interpreted(graph, &stimulus).unwrap();
    assert_eq!(out.channels[graph.outputs[0].channel].len() / 8, 32);
}

/// An element whose handler runs `body` for each item.
fn with_body(state: &str, functions: &str, body: &str) -> String {
    format!(
        "{functions}
.element Stuck (flit in -> flit out) {{
    .state {{ uint n; {state} }}
    .handler {{
        if (test_input_port(in)) {{
            flit x = read_input_port(in);
            {body}
            set_output_port(out, x);
        }}
    }}
}}
Stuck :: stuck
from_tor -> stuck -> to_tor
"
    )
}

#[test]
fn an_element_that_never_ends_is_named_by_both_back_ends() {
    let nest = "for (uint a = 0; a < 1000000; a++) for (uint b = 0; b < 1000000; b++) n++;";
    for (state, functions, body) in [
        ("", "", "while (x.sop) { n++; }"),
        // Iterators that wrap before they reach their limit.
        ("", "", "for (uchar i = 0; i < 300; i++) n++;"),
        ("", "", "for (uchar i = 0; i <= 255; i++) n++;"),
        ("", "", "for (uchar i = 0; i < 250; i += 8) n++;"),
        ("", "", "for (uint i = 10; i > 0; i -= 3) n++;"),
        // Every loop ends, but not in a lifetime.
        ("", "", nest),
        // A function sets the iterator back.
        ("uint i;", "void back() { i = 0; }", "for (i = 0; i < 10; i++) { n++; back(); }"),
        // So does one that a condition, a switch, an inner condition or a list calls.
        ("uint i;", "uchar limit() { i = 0; return 5; }", "for (i = 0; i < limit(); i++) n++;"),
        (
            "uint i;",
            "uchar back() { i = 0; return 1; }",
            "for (i = 0; i < 10; i++) { switch (back()) { case 1: n++; } }",
        ),
        (
            "uint i;",
            "bool back() { i = 0; return false; }",
            "for (i = 0; i < 10; i++) { while (back()) n++; }",
        ),
        (
            "uint i;",
            "uchar back() { i = 0; return 1; }",
            "for (i = 0; i < 10; i++) { uchar list[1] = { back() }; n += list[0]; }",
        ),
    ] {
        let loaded = compiled(&with_body(state, functions, body));
        let graph = &loaded.compiled.graph;
        let stimulus = Stimulus { items: vec![flits(1)], signals: Vec::new() };
        for outcome in [
            beeline_nf::diff::interpreted(graph, &stimulus),
            beeline_nf::diff::native(graph, &stimulus),
        ] {
            let Err(error) = outcome else { panic!("{body} ends") };
            assert!(error.to_string().contains("Stuck did not end"), "{body}: {error}");
        }
    }
}

#[test]
fn iterations_before_one_that_never_ends_count_in_both_back_ends() {
    fn count<M: Machine>(mut run: Run<'_, M>, input: usize) -> u64 {
        for item in flits(5).chunks(8) {
            assert!(run.channel_mut(input).push(item));
        }
        run.settle(4, 1_000, |_| false).unwrap_err();
        run.iterations(0)
    }
    // Short elements are one function of machine code, long ones one each.
    for statements in [0, 500] {
        let more = "x.word[1] = x.word[1] * 3 + n;".repeat(statements);
        let text = with_body("", "", &format!("n++; while (n == 4) x.word[0]++; {more}"));
        let loaded = compiled(&text.replace("-> to_tor", "-> next -> to_tor\nStuck :: next"));
        let graph = &loaded.compiled.graph;
        let input = graph.inputs[0].channel;
        let wanted = count(Run::new(graph, vec![Interpreter; 2]).unwrap(), input);
        assert_eq!((wanted, count(native(graph), input)), (3, 3), "{statements} statements");
    }
}

#[test]
fn loops_to_the_last_value_of_their_iterator_end_alike_in_every_back_end() {
    let body = "for (uchar i = 0; i < 255; i++) n++;
            for (uint4 i = 12; i > 0; i -= 3) n++;
            for (uchar i = 0; i <= 255; i++) table[i] = n;
            x.word[0] = n;";
    let loaded = compiled(&with_body("uint table[256];", "", body));
    let graph = &loaded.compiled.graph;
    let stimulus = Stimulus { items: vec![flits(2)], signals: Vec::new() };
    let wanted = beeline_nf::diff::interpreted(graph, &stimulus).unwrap();
    assert_eq!(wanted.channels[graph.outputs[0].channel][8], 2 * (255 + 4));
    let native = beeline_nf::diff::native(graph, &stimulus).unwrap();
    assert_eq!(native.channels, wanted.channels);
    let hardware = all_hardware(graph, &Options::default()).unwrap();
    let clocked = cycles(graph, &hardware, &stimulus).unwrap();
    assert_eq!(clocked.channels, wanted.channels);
}

#[test]
fn an_error_is_told_once_however_many_instances_there_are() {
    let text = with_body("", "", "missing = 1;") + "Stuck :: more\nfrom_nic -> more -> to_nic\n";
    assert_eq!(codes(&text), [(7, "unknown-name")]);
}

#[test]
fn memories_are_counted_whole_and_in_words() {
    let huge = |state: &str| codes(&with_body(state, "", "n = m[n][n][n];"));
    // Each dimension is possible; their product is 2 to the 78, which is zero in 64 bits.
    let state = "ulong m[67108864][67108864][67108864];";
    assert_eq!(huge(state), [(3, "bad-size"), (7, "unknown-name")]);
    // A bit an entry, but a word each in memory: 64 gigabytes.
    assert_eq!(huge("bool m[8192][1024][1024];")[0], (3, "bad-size"));
    let table = "const ulong t[67108864][67108864][67108864] = {1};\n";
    let text = table.to_owned() + &with_body("", "", "n = t[n][n][n];");
    assert_eq!(codes(&text)[0], (1, "bad-size"));
    // What is possible costs nothing before it is used.
    let loaded = compiled(&with_body("ulong m[67108864];", "", "n = m[n];"));
    let stimulus = Stimulus { items: vec![flits(1)], signals: Vec::new() };
    assert!(beeline_nf::diff::native(&loaded.compiled.graph, &stimulus).is_ok());
}

#[test]
fn garbage_on_every_port_of_every_template_leaves_the_others_packets_whole() {
    for (name, _) in templates::names().filter(|(name, _)| *name != "generator") {
        let text = templates::text(name).unwrap();
        let text = text.replace("(BITS = 16)", "(BITS = 6)").replace("(BITS = 12)", "(BITS = 5)");
        let loaded = compiled(&text);
        let graph = &loaded.compiled.graph;
        let mut run = native(graph);
        let mut dice = Dice(11);
        let mut garbage = Vec::new();
        for length in [1, 2, 13, 14, 31, 32, 33, 34, 35, 41, 59, 63, 64, 65, 1_514, 2_049, 9_018] {
            for _ in 0..4 {
                let mut bytes: Vec<u8> =
                    (0..length).map(|_| dice.below(256).try_into().unwrap()).collect();
                if length > 24 && dice.below(2) == 0 {
                    bytes[12..15].copy_from_slice(&[8, 0, 0x45]);
                    bytes[23] = dice.of(&[6, 17]);
                }
                garbage.push((0, bytes));
            }
        }
        play(graph, &mut run, &garbage);
        let key =
            beeline_nf::functions::rules::Key { source: 1, destination: 2, ports: 80, protocol: 6 };
        let good = packet(key, 0, 5);
        let out = play(graph, &mut run, &[(0, good.clone()), (0, good.clone())]);
        match name {
            "balancer" => assert!(out[0].is_empty()),
            "capture" => assert_eq!(out[0].len(), 2),
            _ => assert_eq!(out[0], [good.clone(), good], "{name}"),
        }
    }
}

#[test]
fn a_capture_is_neither_written_over_nor_named_twice() {
    let loaded = compiled("Count :: c\nfrom_tor -> c -> to_tor\n");
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut writer = beeline_nf::pcap::Writer::new(Vec::new()).unwrap();
    writer.write(0, &[1; 20]).unwrap();
    let bytes = writer.finish().unwrap();
    std::fs::write(path("in.pcap"), &bytes).unwrap();
    std::os::unix::fs::symlink(path("in.pcap"), path("same.pcap")).unwrap();
    let run = |ports: &[(&str, &str)]| {
        let ports: Vec<_> =
            ports.iter().map(|(port, name)| ((*port).to_owned(), path(name))).collect();
        let make = (&beeline_nf::sides::native as _, beeline_nf::sides::LinkOptions::default());
        beeline_nf::engine::run_captures(&loaded.compiled.graph, make, &ports, &[])
    };
    for output in ["in.pcap", "same.pcap"] {
        let error = run(&[("from_tor", "in.pcap"), ("to_tor", output)]).unwrap_err();
        assert!(error.to_string().contains("two ports have this file"), "{error}");
    }
    let twice = [("from_tor", "in.pcap"), ("to_tor", "a.pcap"), ("to_tor", "b.pcap")];
    assert!(run(&twice).unwrap_err().to_string().contains("to_tor is named twice"));
    assert_eq!(std::fs::read(path("in.pcap")).unwrap(), bytes);
    // A file that is there may be written anew.
    run(&twice[..2]).unwrap();
    assert_eq!(run(&twice[..2]).unwrap().0.packets_out, 1);
}

#[test]
fn the_debugger_steps_breaks_shows_and_changes() {
    let text = "
.element Add (flit in -> flit out) {
    .state { ulong count; uint seen[4]; }
    .handler {
        if (test_input_port(in)) {
            flit x = read_input_port(in);
            count++;
            seen[count & 3] = count;
            if (count == 3) { printf(\"third %d\", count); breakpoint(7); }
            set_output_port(out, x);
        }
    }
}
Add :: add
from_tor -> add -> to_tor
";
    let loaded = compiled(text);
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("in.pcap"), folder.path().join("out.pcap"));
    let mut writer = beeline_nf::pcap::Writer::new(Vec::new()).unwrap();
    for at in 0..10_u8 {
        writer.write(0, &[at; 20]).unwrap();
    }
    std::fs::write(&from, writer.finish().unwrap()).unwrap();
    let ports = [("from_tor".to_owned(), from), ("to_tor".to_owned(), to.clone())];
    let mut debugger = Debugger::new(&loaded.compiled.graph, &ports, &[]).unwrap();
    let mut say =
        |text: &str| debugger.command(text).map_err(|error: DebugError| error.to_string());
    assert!(say("step").unwrap().starts_with("add"));
    say("break add").unwrap();
    let stopped = say("continue").unwrap();
    assert!(stopped.contains("add, iteration") && stopped.contains("took"), "{stopped}");
    say("break add off").unwrap();
    let stopped = say("continue").unwrap();
    assert!(stopped.contains("third 3") && stopped.contains("breakpoint 7 in add"), "{stopped}");
    assert!(say("vars add").unwrap().contains("count = 0x3"));
    assert_eq!(say("get add.seen[3]").unwrap(), "add.seen[3] = 0x3");
    say("set add.count 0x64").unwrap();
    assert!(say("log from_tor->add 2").unwrap().lines().count() == 2);
    assert!(say("channels").unwrap().contains("from_tor->add: "));
    assert!(say("continue").unwrap().contains("10 packets in, 10 out"));
    assert_eq!(say("get add.count").unwrap(), "add.count = 0x6b");
    assert_eq!(say("waits").unwrap(), "no element waits for another");
    for (wrong, part) in [
        ("vars nobody", "no instance nobody"),
        ("get add.nothing", "there is no add.nothing"),
        ("get add.seen[9]", "add.seen[9]"),
        ("log nowhere", "no channel"),
        ("jump", "no command"),
        ("step x", "no number"),
    ] {
        assert!(say(wrong).unwrap_err().contains(part), "{wrong}");
    }
    say("quit").unwrap();
    assert!(debugger.ended());
    debugger.finish().unwrap();
    let bytes = std::fs::read(to).unwrap();
    let mut reader = beeline_nf::pcap::Reader::new(&bytes[..]).unwrap();
    assert_eq!(reader.next_packet().unwrap().unwrap().bytes, [0; 20]);
}

#[test]
fn the_guide_s_code_compiles_and_does_what_the_guide_says() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/nf.md");
    let guide = std::fs::read_to_string(path).unwrap();
    let sources: Vec<&str> = guide
        .split("```")
        .skip(1)
        .step_by(2)
        .map(|block| block.trim_start_matches('\n'))
        .filter(|block| block.starts_with('.'))
        .collect();
    assert_eq!(sources.len(), 2, "the counter and the port-knocking filter");
    let counter = compiled(sources[0]);
    let graph = &counter.compiled.graph;
    let mut run = native(graph);
    let key = |port: u32| beeline_nf::functions::rules::Key {
        ports: port,
        protocol: 6,
        ..Default::default()
    };
    let out = play(graph, &mut run, &[(0, packet(key(22), 0, 1)), (0, packet(key(22), 0, 2))]);
    assert_eq!(out[0].len(), 2);
    assert_eq!(run.signal_now(0, [1, 0, 0, 0, 0, 0, 0, 0]).unwrap()[1], 2);
    let knock = compiled(sources[1]);
    let graph = &knock.compiled.graph;
    let mut run = native(graph);
    let packets = [22, 4_711, 22].map(|port| (0, packet(key(port), 0, port)));
    let out = play(graph, &mut run, &packets).remove(0);
    assert_eq!(out.iter().map(|p| common::number(p)).collect::<Vec<_>>(), [4_711, 22]);
}

#[test]
fn yosys_counts_an_element() {
    if !beeline_nf::area::is_here() {
        println!("skipped: yosys is not installed; cargo xtask setup installs it");
        return;
    }
    let loaded = compiled("Count :: cnt\nPass :: pass\nfrom_tor -> cnt -> pass -> to_tor\n");
    let graph = &loaded.compiled.graph;
    let hardware = all_hardware(graph, &Options::default()).unwrap();
    let counted = beeline_nf::area::area(graph, 0, &hardware[0]).unwrap();
    let plain = beeline_nf::area::area(graph, 1, &hardware[1]).unwrap();
    println!("{counted:?} {plain:?}");
    // A count of 64 bits is what the counter has over an element that passes items on.
    assert!(counted.flip_flops >= plain.flip_flops + 64, "{counted:?} {plain:?}");
    assert!(counted.luts > plain.luts);
}
