//! Random programs through every back end. A failing seed is printed with the program; two planted
//! faults show that the comparison sees them.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::fmt::Write as _;

use beeline_ir::graph::Graph;
use beeline_ir::run::{Interpreter, Machine, Run};
use beeline_native::Program;
use beeline_nf::diff::{
    Order, Simulator, Stimulus, all_hardware, cycles, differences, interpreted, native, simulated,
};
use beeline_nf::load::{Loaded, compile};
use beeline_nf::pcie::slot::Mode;
use beeline_nf::sides::{self, LinkOptions, Machines, Plan, Sides};
use beeline_passes::ssa::Op;
use beeline_passes::{Collision, Options};

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }
}

const NAMES: [&str; 8] = ["x.a", "x.b", "x.c", "l0", "l1", "s0", "s1", "x.d[x.a & 3]"];

fn expression(dice: &mut Dice, depth: u32) -> String {
    if depth == 0 || dice.roll(4) == 0 {
        return match dice.roll(3) {
            0 => format!("{}", dice.roll(300)),
            _ => NAMES[usize::try_from(dice.roll(8)).unwrap()].to_owned(),
        };
    }
    let operators =
        ["+", "-", "*", "&", "|", "^", "==", "!=", "<", "<=", ">", ">=", "<<", ">>", "%", "/"];
    let operator = operators[usize::try_from(dice.roll(16)).unwrap()];
    let a = expression(dice, depth - 1);
    match dice.roll(8) {
        0 => format!("(~{a})"),
        1 => format!("({a} ? {} : {})", expression(dice, depth - 1), expression(dice, depth - 1)),
        2 => format!("((uint13)({a}))"),
        _ => format!("({a} {operator} {})", expression(dice, depth - 1)),
    }
}

fn statements(dice: &mut Dice, depth: u32, text: &mut String) {
    for _ in 0..=dice.roll(3) {
        let value = expression(dice, 2);
        match dice.roll(if depth == 0 { 4 } else { 8 }) {
            0 => writeln!(
                text,
                "x.{} = {value};",
                ["a", "b", "c"][usize::try_from(dice.roll(3)).unwrap()]
            ),
            1 => writeln!(text, "s{} = {value};", dice.roll(2)),
            2 => writeln!(text, "l{} = {value};", dice.roll(2)),
            3 => writeln!(text, "x.d[{value} & 3] = {};", expression(dice, 1)),
            4 => writeln!(text, "t[({value}) & 15] = t[({value}) & 15] + {};", expression(dice, 1)),
            5 => {
                let mut inner = String::new();
                statements(dice, depth - 1, &mut inner);
                let mut other = String::new();
                statements(dice, depth - 1, &mut other);
                writeln!(text, "if ({value}) {{ {inner} }} else {{ {other} }}")
            }
            6 => {
                let mut inner = String::new();
                statements(dice, depth - 1, &mut inner);
                let name = format!("i{depth}");
                let turns = 1 + dice.roll(4);
                writeln!(
                    text,
                    "for (uint {name} = 0; {name} < {turns}; {name}++) {{ {inner} \
                     if (({value}) == {name}) break; }}"
                )
            }
            _ => {
                let mut inner = String::new();
                statements(dice, depth - 1, &mut inner);
                writeln!(text, "r[{}].k = ({value}); {inner} l0 = r[x.b & 7].v;", dice.roll(8))
            }
        }
        .unwrap();
    }
}

/// A graph of one to three elements in a row, and perhaps a fork that meets again.
fn program(seed: u64) -> (String, Stimulus) {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut text = String::from(
        "struct Item { uint16 a; uint8 b; uint32 c; uint12 d[4]; }\n\
         struct Row { uint9 k; uint20 v; }\n",
    );
    let count = 1 + dice.roll(3);
    for at in 0..count {
        let mut body = String::new();
        statements(&mut dice, 2, &mut body);
        let drop = dice.roll(4) == 0;
        let send = if drop { "if (x.a[0:0] == 0) " } else { "" };
        writeln!(
            text,
            ".element E{at} (Item in -> Item out) {{\n.state {{ uint s0; uint17 s1; uint t[16]; \
             Row r[8]; }}\n.handler {{ if (test_input_port(in)) {{ Item x = read_input_port(in); \
             uint l0 = 1; uint l1 = x.b;\n{body}\n{send}set_output_port(out, x); }} }} }}\n\
             E{at} :: e{at}"
        )
        .unwrap();
    }
    text.push_str(".input Item in\n.output Item out\nin");
    for at in 0..count {
        write!(text, " -> e{at}").unwrap();
    }
    text.push_str(" -> out\n");
    let items = (0..80).flat_map(|_| [dice.roll(1 << 50), dice.roll(1 << 40)]).collect();
    (text, Stimulus { items: vec![items], signals: Vec::new() })
}

fn loaded(text: &str) -> Loaded {
    let loaded = compile("random.np", text.to_owned(), None);
    let shown = loaded.diagnostics.render(&loaded.sources);
    assert!(!loaded.diagnostics.failed(), "{shown}\n{text}");
    loaded
}

fn check(seed: u64, simulate: bool) {
    let (text, stimulus) = program(seed);
    let loaded = loaded(&text);
    let graph = &loaded.compiled.graph;
    let wanted = interpreted(graph, &stimulus).unwrap();
    let shown = |back_end: &str, found: &dyn std::fmt::Debug| {
        format!("seed {seed}, {back_end}: {found:#?}\n{text}")
    };
    let found = differences(graph, &wanted, &native(graph, &stimulus).unwrap(), Order::Exact);
    assert!(found.is_empty(), "{}", shown("machine code", &found));
    for bits in [0x3f_u64, 0, seed % 64] {
        let options = Options {
            placement: bits & 1 != 0,
            scatter: bits & 2 != 0,
            unroll: bits & 4 != 0,
            clean: bits & 8 != 0,
            merge: bits & 16 != 0,
            delay: bits & 32 != 0,
            read_latency: 1 + u32::from(seed.is_multiple_of(3)),
            collision: if seed % 4 < 2 { Collision::Old } else { Collision::New },
            ..Options::default()
        };
        let hardware = all_hardware(graph, &options).unwrap();
        if std::env::var_os("BEELINE_NF_SHOW").is_some() {
            for element in &hardware {
                println!("seed {seed}: {:?}", element.report);
            }
        }
        let found = differences(
            graph,
            &wanted,
            &cycles(graph, &hardware, &stimulus).unwrap(),
            Order::Exact,
        );
        assert!(found.is_empty(), "{}", shown(&format!("cycle model, {options:?}"), &found));
        if simulate && Simulator::Icarus.is_here() {
            let folder = tempfile::tempdir().unwrap();
            let stalls = u32::try_from(seed & 0xffff).unwrap();
            let play = (Simulator::Icarus, stalls);
            let outcome = simulated(graph, &hardware, &stimulus, play, folder.path()).unwrap();
            let found = differences(graph, &wanted, &outcome, Order::Exact);
            assert!(found.is_empty(), "{}", shown(&format!("Icarus, {options:?}"), &found));
        }
    }
}

#[test]
fn random_programs_mean_the_same_everywhere() {
    let seeds = std::env::var("BEELINE_NF_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    for seed in 1..=seeds {
        check(seed, seed.is_multiple_of(12));
    }
    println!("{seeds} programs");
}

#[test]
fn a_planted_fault_of_the_compiler_is_seen() {
    // An addition that became a subtraction, in the hardware of some program that adds.
    let mut seen = 0;
    for seed in 1..=10 {
        let (text, stimulus) = program(seed);
        let loaded = loaded(&text);
        let graph = &loaded.compiled.graph;
        let wanted = interpreted(graph, &stimulus).unwrap();
        let mut hardware = all_hardware(graph, &Options::default()).unwrap();
        for element in &mut hardware {
            for node in &mut element.handler.body.nodes {
                if let Op::Binary(operator @ beeline_ir::tree::Binary::Add, ..) = &mut node.op {
                    *operator = beeline_ir::tree::Binary::Subtract;
                }
            }
        }
        let outcome = cycles(graph, &hardware, &stimulus).unwrap();
        seen += u32::from(!differences(graph, &wanted, &outcome, Order::Exact).is_empty());
    }
    assert!(seen > 0, "no program saw the fault");
}

#[test]
fn a_planted_fault_of_the_schedule_is_seen() {
    // A write that lands a cycle late, past what forwarding covers.
    let text = "
struct Item { uint4 key; uint28 value; }
.element Table (Item in -> Item out) {
    .state { uint table[16]; }
    .handler {
        if (test_input_port(in)) {
            Item x = read_input_port(in);
            uint y = table[x.key] + 1;
            table[x.key] = y;
            x.value = y;
            set_output_port(out, x);
        }
    }
}
.input Item in
.output Item out
Table :: table
in -> table -> out
";
    let loaded = loaded(text);
    let graph = &loaded.compiled.graph;
    let items: Vec<u64> = (0..200).map(|at| at * at % 3).collect();
    let stimulus = Stimulus { items: vec![items], signals: Vec::new() };
    let wanted = interpreted(graph, &stimulus).unwrap();
    let mut hardware = all_hardware(graph, &Options::default()).unwrap();
    let outcome = cycles(graph, &hardware, &stimulus).unwrap();
    assert_eq!(differences(graph, &wanted, &outcome, Order::Exact), []);
    hardware[0].handler.schedule.depth += 2;
    for cycle in &mut hardware[0].handler.schedule.write_cycle {
        *cycle += 1;
    }
    let outcome = cycles(graph, &hardware, &stimulus).unwrap();
    assert!(!differences(graph, &wanted, &outcome, Order::Exact).is_empty());
}

/// What a run gave and left: items of each output, items of each channel, iterations and state of each
/// node.
type Left = (Vec<Vec<u64>>, Vec<u64>, Vec<(u64, Vec<u64>)>);

/// Plays a stimulus without logs, so that machine code runs many rounds by one call.
fn played<M: Machine>(graph: &Graph, machines: Vec<M>, stimulus: &Stimulus) -> Left {
    let mut run = Run::new(graph, machines).unwrap();
    let mut sent = vec![0; graph.inputs.len()];
    let mut outputs = vec![Vec::new(); graph.outputs.len()];
    run.settle(64, 1_000_000, |run| {
        let mut moved = false;
        for (at, input) in graph.inputs.iter().enumerate() {
            let queue = run.channel_mut(input.channel);
            let width = queue.width();
            let items = &stimulus.items[at];
            while sent[at] < items.len() && queue.push(&items[sent[at]..sent[at] + width]) {
                sent[at] += width;
                moved = true;
            }
        }
        for (at, output) in graph.outputs.iter().enumerate() {
            let queue = run.channel_mut(output.channel);
            let mut item = vec![0; queue.width()];
            while queue.pop(&mut item) {
                outputs[at].extend_from_slice(&item);
                moved = true;
            }
        }
        moved
    })
    .unwrap();
    let passed = (0..graph.channels.len()).map(|at| run.channel(at).passed).collect();
    let nodes = graph.nodes.iter().enumerate();
    let nodes = nodes.map(|(at, node)| (run.iterations(at), run.frame(at).state(&node.element)));
    (outputs, passed, nodes.collect())
}

#[test]
fn many_rounds_by_one_call_are_the_reference_s_rounds_one_by_one() {
    let mut most = 0;
    for seed in 1..=60 {
        let (text, stimulus) = program(seed);
        let loaded = loaded(&text);
        let graph = &loaded.compiled.graph;
        let wanted = played(graph, vec![Interpreter; graph.nodes.len()], &stimulus);
        let found = played(graph, Program::compile(graph).unwrap().machines(), &stimulus);
        assert_eq!(found, wanted, "seed {seed}\n{text}");
        let mut run = Run::new(graph, Program::compile(graph).unwrap().machines()).unwrap();
        for (input, items) in graph.inputs.iter().zip(&stimulus.items) {
            let queue = run.channel_mut(input.channel);
            let width = queue.width();
            items.chunks_exact(width).take_while(|item| queue.push(item)).for_each(drop);
        }
        most = most.max(run.rounds(1_000).unwrap().0);
    }
    assert!(most > 2, "no call ran more than {most} rounds");
}

/// Elements that leave an item where it is, ask for none, give more than they take, or give it late.
const CAPRICIOUS: [&str; 6] = [
    "n++; if (n % 3 == 0 && test_input_port(in)) set_output_port(out, read_input_port(in));",
    "if (again) { again = false; set_output_port(out, held); return 0; }
     if (test_input_port(in)) { held = read_input_port(in); again = true; set_output_port(out, held); }",
    "if (test_input_port(in)) { Item y = peek_input_port(in); n++;
         if ((n & 1) == y.a[0:0]) { y = read_input_port(in); set_output_port(out, y); } }",
    "if (test_input_port(in)) { if (again) set_output_port(out, held);
         held = read_input_port(in); again = true; }
     else if (again) { set_output_port(out, held); again = false; }",
    "if (test_input_port(in)) { Item y = read_input_port(in); y.b = n; set_output_port(out, y); }",
    "n++; if (test_input_port(in)) set_output_port(out, read_input_port(in)); return (n >> 1) & 1;",
];

#[test]
fn items_that_pass_rings_by_are_those_that_go_through_them() {
    for seed in 1..=60_u64 {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut text = String::from("struct Item { uint16 a; uint b; uint64 c; }\n");
        for (at, body) in CAPRICIOUS.iter().enumerate() {
            writeln!(
                text,
                ".element E{at} (Item in -> Item out) {{ .state {{ uint n; bool again; Item held; }} \
                 .handler {{ {body} }} }}"
            )
            .unwrap();
        }
        let count = 2 + dice.roll(4);
        for at in 0..count {
            writeln!(text, "E{} :: e{at}", dice.roll(6)).unwrap();
        }
        text.push_str(".input Item in\n.output Item out\nin");
        for at in 0..count {
            write!(text, " -> {{{}}} e{at}", 2 + dice.roll(4)).unwrap();
        }
        text.push_str(" -> out\n");
        let items = (0..60).flat_map(|_| [dice.roll(1 << 48), dice.roll(1 << 60)]).collect();
        let stimulus = Stimulus { items: vec![items], signals: Vec::new() };
        let loaded = loaded(&text);
        let graph = &loaded.compiled.graph;
        let wanted = played(graph, vec![Interpreter; graph.nodes.len()], &stimulus);
        let found = played(graph, Program::compile(graph).unwrap().machines(), &stimulus);
        assert_eq!(found, wanted, "seed {seed}\n{text}");
        // With logs, every item goes through its ring.
        let wanted = interpreted(graph, &stimulus).unwrap();
        assert_eq!(native(graph, &stimulus).unwrap().channels, wanted.channels, "seed {seed}");
    }
}

/// Items of each output, items of each channel, state of each node, of a run whose nodes are cut among
/// the caller's thread and two workers.
fn apart(graph: &Graph, away: &[Option<usize>], stimulus: &Stimulus, mode: Mode) -> Left {
    let plan = Plan::away(graph, away, 2).unwrap();
    let machines = Machines::make(&plan, &sides::native).unwrap();
    let options = LinkOptions { mode, ..LinkOptions::default() };
    let mut sides = Sides::start(&plan, machines, options, None).unwrap();
    let mut sent = vec![0; graph.inputs.len()];
    let mut outputs = vec![Vec::new(); graph.outputs.len()];
    sides
        .settle(64, |run| {
            let mut moved = false;
            for (at, items) in stimulus.items.iter().enumerate() {
                let queue = run.channel_mut(plan.world(true, at));
                let width = queue.width();
                while sent[at] < items.len() && queue.push(&items[sent[at]..sent[at] + width]) {
                    sent[at] += width;
                    moved = true;
                }
            }
            for (at, output) in outputs.iter_mut().enumerate() {
                let queue = run.channel_mut(plan.world(false, at));
                let mut item = vec![0; queue.width()];
                while queue.pop(&mut item) {
                    output.extend_from_slice(&item);
                    moved = true;
                }
            }
            moved
        })
        .unwrap();
    let passed = (0..graph.channels.len()).map(|at| sides.passed(at)).collect();
    let waiting: usize = (0..graph.channels.len()).map(|at| sides.waiting(at)).sum();
    assert_eq!(waiting, 0, "nothing stays inside");
    let frames = sides.into_frames();
    let states =
        graph.nodes.iter().zip(&frames).map(|(node, frame)| (0, frame.state(&node.element)));
    (outputs, passed, states.collect())
}

#[test]
fn random_programs_cut_among_threads_give_the_reference_s_items_and_state() {
    let mut dice = Dice(0x51de5);
    for seed in 1..=24 {
        let (text, stimulus) = program(seed);
        let loaded = loaded(&text);
        let graph = &loaded.compiled.graph;
        let mut wanted = played(graph, vec![Interpreter; graph.nodes.len()], &stimulus);
        // How often an element found nothing depends on the threads.
        wanted.2.iter_mut().for_each(|(iterations, _)| *iterations = 0);
        for mode in [Mode::Interrupt, Mode::Poll] {
            let side = |at: u64| usize::try_from(at).ok().filter(|at| *at < 2);
            let away: Vec<_> = graph.nodes.iter().map(|_| side(dice.roll(3))).collect();
            let found = apart(graph, &away, &stimulus, mode);
            assert_eq!(found, wanted, "seed {seed}, {away:?}\n{text}");
        }
    }
}
