//! The kernel loop and the built-in functions, each alone, through every back end; hand-written
//! Verilog; collision policies; `ivdep`; clocks of the model and of Verilog.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use beeline_ir::flits::split;
use beeline_ir::graph::{Channel, Graph, Node, Outside, Peer};
use beeline_ir::run::{Interpreter, Run, Signal};
use beeline_nf::diff::{
    Outcome, Simulator, Stimulus, all_hardware, compare_with, cycles, interpreted, native,
    simulated,
};
use beeline_nf::hand_written::{HandWritten, HandWrittenError};
use beeline_passes::{Collision, Options, hardware};
use common::compiled;

/// Every back end's outcome, by name.
fn everywhere(text: &str, stimulus: &Stimulus) -> Vec<(&'static str, Outcome)> {
    let loaded = compiled(text);
    let graph = &loaded.compiled.graph;
    let made = all_hardware(graph, &Options::default()).unwrap();
    let mut all = vec![
        ("interpreter", interpreted(graph, stimulus).unwrap()),
        ("machine code", native(graph, stimulus).unwrap()),
        ("cycle model", cycles(graph, &made, stimulus).unwrap()),
    ];
    if Simulator::Icarus.is_here() {
        let folder = tempfile::tempdir().unwrap();
        let play = (Simulator::Icarus, 0);
        all.push(("Icarus", simulated(graph, &made, stimulus, play, folder.path()).unwrap()));
    } else {
        println!("skipped: iverilog is not installed; cargo xtask setup installs it");
    }
    all
}

fn items(list: &[u64]) -> Stimulus {
    Stimulus { items: vec![list.to_vec()], signals: Vec::new() }
}

const TWO: &str = ".input uint64 a, uint64 b\n.output uint64 out\n";

#[test]
fn outputs_are_written_after_the_handler_the_last_one_counts_and_a_full_one_blocks() {
    // The output's item goes when the handler has returned: what is queued twice goes once.
    let text = ".element Twice (uint64 in -> uint64 out) {\n.state { uint64 turn; }\n.handler {\n\
                turn++;\nif (test_input_port(in)) {\nuint64 x = read_input_port(in);\n\
                set_output_port(out, x + 1000);\nset_output_port(out, x);\n}\n}\n}\n\
                .input uint64 in\n.output uint64 out\nTwice :: t\nin -> t -> {2} out\n";
    for (back_end, outcome) in everywhere(text, &items(&[1, 2, 3])) {
        assert_eq!(outcome.channels[1], [1, 2, 3], "{back_end}");
    }
    // Step by step: fetch, handler, write; a third item waits in the output buffer, the element
    // does not iterate, and its input stays in the channel.
    let loaded = compiled(text);
    let graph = &loaded.compiled.graph;
    let mut run = Run::new(graph, vec![Interpreter]).unwrap();
    for item in 1..=5 {
        assert!(run.channel_mut(0).push(&[item]));
    }
    let mut seen = Vec::new();
    for _ in 0..5 {
        let moved = run.iterate(0).unwrap();
        seen.push((moved.fetched, moved.wrote, moved.blocked, run.channel(0).len()));
    }
    let wanted = [
        (true, true, false, 4),
        (true, true, false, 3),
        (true, false, true, 2),
        (false, false, true, 2),
        (false, false, true, 2),
    ];
    assert_eq!(seen, wanted);
    assert_eq!(run.iterations(0), 3, "a blocked element does not iterate");
    // A signal is answered although the data path is blocked.
    assert_eq!(run.signal_now(0, [1, 7, 0, 0, 0, 0, 0, 0]).unwrap()[1], 7);
    let mut item = [0];
    assert!(run.channel_mut(1).pop(&mut item) && item == [1]);
    let moved = run.iterate(0).unwrap();
    assert!(moved.wrote && run.channel(1).is_full());
}

#[test]
fn the_returned_bitmap_says_which_inputs_are_fetched() {
    // One item of a, then two of b, and so on: the other channel is not touched.
    let text = format!(
        ".element Turns (uint64 a, uint64 b -> uint64 out) {{\n.state {{ uint8 turn; }}\n.handler {{\n\
         if (turn == 0) {{\nif (test_input_port(a)) {{ set_output_port(out, read_input_port(a)); turn = 1; }}\n\
         }} else if (test_input_port(b)) {{\nset_output_port(out, read_input_port(b));\n\
         turn = turn == 2 ? 0 : turn + 1;\n}}\nreturn (turn == 0 ? 1 : 2);\n}}\n}}\n{TWO}Turns :: t\n\
         a -> [1] t -> out\nb -> [2] t\n"
    );
    let a: Vec<u64> = (0..10).collect();
    let b: Vec<u64> = (100..120).collect();
    let wanted: Vec<u64> = (0..10).flat_map(|at| [a[at], b[2 * at], b[2 * at + 1]]).collect();
    let stimulus = Stimulus { items: vec![a, b], signals: Vec::new() };
    let loaded = compiled(&text);
    let out = loaded.compiled.graph.outputs[0].channel;
    for (back_end, outcome) in everywhere(&text, &stimulus) {
        // Before its first return an element asks for all inputs: b's first item waits in its buffer.
        assert_eq!(outcome.channels[out], wanted, "{back_end}");
    }
    let mut run = Run::new(&loaded.compiled.graph, vec![Interpreter]).unwrap();
    let b = loaded.compiled.graph.inputs[1].channel;
    for item in 0..8 {
        assert!(run.channel_mut(b).push(&[item]));
    }
    for _ in 0..5 {
        run.iterate(0).unwrap();
    }
    assert_eq!(run.channel(b).len(), 7, "one was fetched before the first return, no more");
}

#[test]
fn the_eight_built_in_functions_mean_the_same_everywhere() {
    // get, test, peek without consuming, read, set, read_signal, set_signal, return.
    let text = format!(
        ".element All (uint64 a, uint64 b -> uint64 out) {{\n.state {{ uint64 peeks; uint8 phase; uint64 key; }}\n\
         .handler {{\nuint64 ports = get_input_port();\n\
         if (test_input_port(a)) {{\n\
         uint64 first = peek_input_port(a);\nuint64 again = peek_input_port(a);\n\
         if (phase == 0) {{ peeks++; phase = 1; set_output_port(out, first + again + ports * 1000 + key); }}\n\
         else {{ phase = 0; set_output_port(out, read_input_port(a)); }}\n}}\nreturn (1);\n}}\n\
         .signal {{ ClSignal p = read_signal(); p.Sig.LParam[1] = peeks; key = p.Sig.LParam[0];\n\
         set_signal(p); }}\n}}\n{TWO}All :: all @\na -> [1] all -> out\nb -> [2] all\n"
    );
    let mut signal: Signal = [0; 8];
    signal[1] = 1_000_000;
    let stimulus = Stimulus { items: vec![vec![5, 6, 7], Vec::new()], signals: vec![(0, signal)] };
    let out = compiled(&text).compiled.graph.outputs[0].channel;
    let peeked = |x: u64| 2 * x + 1_000 + 1_000_000;
    for (back_end, outcome) in everywhere(&text, &stimulus) {
        assert_eq!(outcome.channels[out], [peeked(5), 5, peeked(6), 6, peeked(7), 7], "{back_end}");
        let [answer] = outcome.answers[..] else { panic!("{back_end}: {:?}", outcome.answers) };
        assert_eq!((answer[1], answer[2]), (1_000_000, 0), "{back_end}");
    }
}

#[test]
fn hand_written_verilog_takes_an_element_s_place_and_gives_its_items() {
    let text = "verilog Count :: cnt @\nIPChecksum :: sum\nfrom_tor -> cnt -> sum -> to_tor\n";
    let loaded = compiled(text);
    let graph = &loaded.compiled.graph;
    let folder = tempfile::tempdir().unwrap();
    let missing = HandWritten::of(graph, folder.path()).unwrap_err();
    assert!(matches!(missing, HandWrittenError::Missing { .. }), "{missing}");
    let ports = "(\n    input clk, input rst,\n    input [511:0] in0_data, input in0_valid, output in0_ready,\n\
                     output [511:0] out0_data, output out0_valid, input out0_ready,\n\
                     input sig_valid, input [511:0] sig_data, output ans_valid, output [511:0] ans_data\n);\n";
    let body = "    reg [63:0] count;\n    reg full;\n    reg [511:0] held;\n\
                    assign in0_ready = !full || out0_ready;\n\
                    assign out0_valid = full;\n    assign out0_data = held;\n\
                    assign ans_valid = sig_valid;\n\
                    assign ans_data = {sig_data[511:128], count, sig_data[63:0]};\n\
                    always @(posedge clk) if (rst) begin count <= 0; full <= 0; end else begin\n\
                        if (in0_ready) full <= in0_valid;\n\
                        if (in0_valid && in0_ready) begin\n            held <= in0_data;\n\
                            if (in0_data[256]) count <= count + 1;\n        end\n    end\nendmodule\n";
    let path = folder.path().join("Count.v");
    std::fs::write(&path, format!("module Counter {ports}{body}")).unwrap();
    let error = HandWritten::of(graph, folder.path()).unwrap_err();
    assert!(matches!(error, HandWrittenError::NoModule { .. }), "{error}");
    std::fs::write(&path, format!("// By hand.\nmodule Count {ports}{body}")).unwrap();
    let own = HandWritten::of(graph, folder.path()).unwrap();
    assert!(own.text("cnt").unwrap().contains("module ") && own.text("sum").is_none());
    if !Simulator::Icarus.is_here() {
        println!("skipped: iverilog is not installed; cargo xtask setup installs it");
        return;
    }
    let mut packets = Vec::new();
    for at in 0..20_usize {
        split(&vec![7; 60 + at * 13], 5, |flit| packets.extend(flit));
    }
    let stimulus = Stimulus { items: vec![packets], signals: vec![(0, [0; 8])] };
    let differ = |own: &HandWritten| {
        let simulators = [Simulator::Icarus];
        let all = compare_with(graph, &Options::default(), &stimulus, &simulators, own).unwrap();
        all["iverilog"].1.len()
    };
    assert_eq!(differ(&own), 0);
    // A module that changes a bit is seen.
    std::fs::write(&path, format!("module Count {ports}{}", body.replace("= held", "= held ^ 1")))
        .unwrap();
    assert!(differ(&HandWritten::of(graph, folder.path()).unwrap()) > 0);
}

const TABLE: &str = "struct Item { uint4 key; uint28 value; }\n\
    .element Table (Item in -> Item out) {\n.state { uint32 table[16]; uint8 n; }\n.handler {\n\
    if (test_input_port(in)) {\nItem x = read_input_port(in);\n\
    uint32 y = table[x.key] + 1;\nn++;\nif (x.value != 3) table[x.key] = y;\nx.value = y;\n\
    set_output_port(out, x);\n}\n}\n}\n\
    .input Item in\n.output Item out\nTable :: table\nin -> table -> out\n";

#[test]
fn delayed_write_is_right_for_every_latency_and_collision_policy() {
    let loaded = compiled(TABLE);
    let graph = &loaded.compiled.graph;
    // The same address at distances 0 to 4, address 0 first, and writes that do not happen.
    let mut keys = vec![0_u64, 0, 0];
    for distance in 1..=5_u64 {
        keys.extend((0..40).map(|at| at % distance));
    }
    let list: Vec<u64> =
        keys.iter().enumerate().map(|(at, key)| key | (u64::from(at % 7 == 3) * 3) << 4).collect();
    let stimulus = items(&list);
    let wanted = interpreted(graph, &stimulus).unwrap();
    let mut slots = Vec::new();
    for latency in 1..=3 {
        for collision in [Collision::Old, Collision::New] {
            let options = Options { read_latency: latency, collision, ..Options::default() };
            let made = all_hardware(graph, &options).unwrap();
            assert_eq!(made[0].report.interval, 1, "latency {latency}, {collision:?}");
            slots.push(made[0].report.delayed[0].1.clone());
            let name = format!("latency {latency}, {collision:?}");
            let model = cycles(graph, &made, &stimulus).unwrap();
            assert_eq!(model.channels, wanted.channels, "{name}, cycle model");
            if Simulator::Icarus.is_here() {
                for stalls in [0, 77] {
                    let folder = tempfile::tempdir().unwrap();
                    let play = (Simulator::Icarus, stalls);
                    let found = simulated(graph, &made, &stimulus, play, folder.path()).unwrap();
                    assert_eq!(found.channels, wanted.channels, "{name}, Icarus");
                }
            }
        }
    }
    let counts: Vec<&str> = slots.iter().map(|text| &text[..1]).collect();
    assert_eq!(counts, ["1", "0", "2", "1", "3", "2"], "new data need a slot less: {slots:?}");
    // A write that comes a cycle later than the slots cover is seen.
    let options = Options { read_latency: 2, ..Options::default() };
    let mut made = all_hardware(graph, &options).unwrap();
    made[0].handler.schedule.depth += 2;
    for cycle in &mut made[0].handler.schedule.write_cycle {
        *cycle += 1;
    }
    assert_ne!(cycles(graph, &made, &stimulus).unwrap().channels, wanted.channels);
}

#[test]
fn ivdep_takes_a_dependence_away_and_the_report_shows_it() {
    let text = |pragma: &str| {
        format!(
            "struct Item {{ uint8 a; uint8 b; uint32 v; }}\n\
             .element Two (Item in -> Item out) {{\n.state {{ uint32 t[256]; }}\n.handler {{\n\
             if (test_input_port(in)) {{\nItem x = read_input_port(in);\n{pragma}\n\
             for (uint i = 0; i < 1; i++) {{\nuint32 y = t[x.a];\nt[x.b] = y * x.v;\n\
             t[x.a ^ 1] = x.v;\nx.v = y;\n}}\nset_output_port(out, x);\n}}\n}}\n}}\n\
             .input Item in\n.output Item out\nTwo :: two\nin -> two -> out\n"
        )
    };
    let report = |pragma: &str| {
        let loaded = compiled(&text(pragma));
        hardware(&loaded.compiled.graph.nodes[0].element, &Options::default()).unwrap().report
    };
    let (with, without) = (report("#pragma ivdep"), report(""));
    assert!(with.interval < without.interval, "{} and {}", with.interval, without.interval);
    let limit = without.limit.unwrap();
    assert!(limit.name.contains('t') && !limit.chain.is_empty(), "{limit:?}");
}

#[test]
fn the_model_and_verilog_take_the_same_clocks() {
    if !Simulator::Icarus.is_here() {
        println!("skipped: iverilog is not installed; cargo xtask setup installs it");
        return;
    }
    let graphs = [
        "Count :: c\nfrom_tor -> c -> to_tor\n".to_owned(),
        "L4_Parser :: p\nIPChecksum :: s\nCount :: c\nfrom_tor -> p -> s -> c -> to_tor\n"
            .to_owned(),
        "IPChecksum :: s\nCount :: c\nfrom_tor -> {2} s -> {2} c -> {2} to_tor\n".to_owned(),
        TABLE.to_owned(),
    ];
    for text in graphs {
        let loaded = compiled(&text);
        let graph = &loaded.compiled.graph;
        let mut list = Vec::new();
        for at in 0..30_usize {
            split(&vec![3; 60 + at * 31 % 200], 5, |flit| list.extend(flit));
        }
        if graph.channels[0].bits < 64 {
            list.iter_mut().for_each(|word| *word &= 0xffff_ffff);
        }
        let stimulus = items(&list);
        for options in [Options::default(), Options { read_latency: 2, ..Options::naive() }] {
            let made = all_hardware(graph, &options).unwrap();
            let model = cycles(graph, &made, &stimulus).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let play = (Simulator::Icarus, 0);
            let verilog = simulated(graph, &made, &stimulus, play, folder.path()).unwrap();
            assert_eq!(model.channels, verilog.channels);
            assert!(model.clocks.is_some());
            assert_eq!(model.clocks, verilog.clocks, "{text}{options:?}");
        }
    }
}

/// A graph of one element with a channel to the world at every port.
fn alone(element: &beeline_ir::tree::Element) -> Graph {
    let node = Node {
        name: "it".to_owned(),
        span: element.span,
        element: element.clone(),
        host: false,
        verilog: false,
        signalled: false,
        id: 1,
    };
    let mut graph = Graph { nodes: vec![node], ..Graph::default() };
    let channel = |name: &str, bits, from, to| Channel {
        name: name.to_owned(),
        bits,
        depth: 16,
        from,
        to,
        span: element.span,
    };
    for (port, described) in element.inputs.iter().enumerate() {
        let (name, to) = (format!("i{port}"), Peer::Port { node: 0, port });
        graph.channels.push(channel(&name, described.bits, Peer::Outside(port), to));
        graph.inputs.push(Outside { name, channel: graph.channels.len() - 1 });
    }
    for (port, described) in element.outputs.iter().enumerate() {
        let (name, from) = (format!("o{port}"), Peer::Port { node: 0, port });
        graph.channels.push(channel(&name, described.bits, from, Peer::Outside(port)));
        graph.outputs.push(Outside { name, channel: graph.channels.len() - 1 });
    }
    graph
}

#[test]
fn every_element_takes_the_clocks_in_verilog_that_the_schedule_says() {
    if !Simulator::Icarus.is_here() {
        println!("skipped: iverilog is not installed; cargo xtask setup installs it");
        return;
    }
    let (mut seen, mut eleven) = (0, 0);
    for (name, text) in beeline_ir::library::files() {
        let loaded = beeline_nf::load::compile(name, text.to_owned(), None);
        // One without inputs gives items for ever, and has no clock at which it is done; so does
        // the buffer, which asks its queue again and again.
        let ends = |e: &&beeline_ir::tree::Element| {
            let bits = |mem: &beeline_ir::tree::Mem| u64::from(mem.entries()) * u64::from(mem.bits);
            // A minute of Icarus each: not every time.
            let large = e.mems.iter().any(|mem| bits(mem) > 1 << 20);
            let deep = std::env::var_os("BEELINE_DEEP").is_some();
            !e.inputs.is_empty()
                && e.name != "PacketBuffer"
                && (deep || !large || ELEVEN.contains(&&*e.name))
        };
        for element in loaded.compiled.elements.iter().filter(ends) {
            seen += 1;
            let graph = alone(element);
            let mut dice = common::Dice(seen);
            let items = graph.inputs.iter().map(|input| {
                let bits = graph.channels[input.channel].bits;
                let mut item = || -> Vec<u64> {
                    let word = |word: usize| {
                        let left = bits - u32::try_from(word).unwrap() * 64;
                        dice.below(u64::MAX) & beeline_ir::tree::mask(left.min(64))
                    };
                    (0..beeline_ir::tree::words(bits)).map(word).collect()
                };
                (0..24).flat_map(|_| item()).collect()
            });
            let stimulus = Stimulus { items: items.collect(), signals: Vec::new() };
            let made = all_hardware(&graph, &Options::default()).unwrap();
            let report = &made[0].report;
            let model = match cycles(&graph, &made, &stimulus) {
                Ok(model) => model,
                Err(error) => panic!("{}: {error}", element.name),
            };
            let folder = tempfile::tempdir().unwrap();
            let play = (Simulator::Icarus, 0);
            let start = std::time::Instant::now(); // TEMPORARY
            let verilog = simulated(&graph, &made, &stimulus, play, folder.path()).unwrap();
            println!("{}: {} ms in Icarus", element.name, start.elapsed().as_millis());
            assert_eq!(model.channels, verilog.channels, "{}", element.name);
            assert_eq!(model.clocks, verilog.clocks, "{}", element.name);
            if !ELEVEN.contains(&&*element.name) {
                continue;
            }
            eleven += 1;
            // An iteration a cycle, each of which takes an item and gives at most one; the channel's
            // entry, the depth, and the exit.
            let most_items = graph
                .channels
                .iter()
                .zip(&model.channels)
                .map(|(channel, log)| log.len() / beeline_ir::tree::words(channel.bits));
            let turns = u64::from(report.interval) * most_items.max().unwrap_or(0) as u64;
            let (least, most) = (turns, 2 * turns + u64::from(report.depth) + 8);
            let clocks = model.clocks.unwrap();
            assert!((least..=most).contains(&clocks), "{}: {clocks} of {most}", element.name);
        }
    }
    assert!(eleven == 11 && seen >= 42, "{seen} elements");
}

const ELEVEN: [&str; 11] = [
    "L4_Parser",
    "IPChecksum",
    "NVGRE_Encap",
    "AES_CTR",
    "SHA1",
    "CuckooHash",
    "HashTCAM",
    "LPM_Tree",
    "FlowCache",
    "SRPrioQueue",
    "RateLimiter",
];
