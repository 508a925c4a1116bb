//! `.async` blocks as elements of their own: the same items by every back end, and a faster pace.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use beeline_ir::graph::Graph;
use beeline_nf::diff::{
    Order, Outcome, Simulator, Stimulus, all_hardware, cycles, differences, interpreted, native,
    simulated,
};
use beeline_passes::Options;
use beeline_passes::outline::outline;
use common::{Dice, compiled};

/// A cache of sixteen entries before a table in board memory, as the specification's 3.9 has it. What
/// the table says decides whether an entry is kept, so that each look-up waits for the miss before it.
const CACHE: &str = "
struct Item { uint10 key; uint32 value; }
.element Cache (Item in -> Item out) {
    .state { uint keys[16]; uint values[16]; global uint table[1024]; uint misses; }
    .handler {
        if (test_input_port(in)) {
            Item x = read_input_port(in);
            uint at = x.key & 15;
            uint v = values[at];
            if (keys[at] != x.key + 1) {
                .async {
                    v = table[x.key] * 3 + x.key;
                    table[x.key] = v;
                }
                misses++;
                keys[at] = v > 4000000000 ? 0 : x.key + 1;
                values[at] = v;
            }
            x.value = v;
            set_output_port(out, x);
        }
    }
}
.input Item in
.output Item out
Cache :: cache
in -> cache -> out
";

/// The original's channels and those of the transformed graph.
fn same(plain: &Graph, wanted: &Outcome, found: &Outcome) -> bool {
    differences(plain, wanted, found, Order::Exact).is_empty()
}

#[test]
fn a_cache_whose_misses_are_outside_gives_the_same_items_at_a_faster_pace() {
    let loaded = compiled(CACHE);
    let plain = &loaded.compiled.graph;
    let (graph, list) = outline(plain);
    assert_eq!(list.len(), 1);
    assert_eq!(list[0].block.as_deref(), Some("cache_async"), "{list:?}");
    // The key goes there and the value comes back, and nothing else.
    assert_eq!(list[0].answered, 32, "{list:?}");
    let interval =
        |graph: &Graph| all_hardware(graph, &Options::default()).unwrap()[0].report.interval;
    let (before, after) = (interval(plain), interval(&graph));
    println!("II {before} with the block inside, {after} with it outside; {list:?}");
    assert!(after * 4 < before, "{before} and {after}");
    let mut dice = Dice(5);
    // Mostly hits, and every key in the end.
    let items: Vec<u64> = (0..600)
        .map(|at| if dice.below(4) == 0 { dice.below(1_024) } else { at % 7 + 40 })
        .collect();
    let stimulus = Stimulus { items: vec![items], signals: Vec::new() };
    let wanted = interpreted(plain, &stimulus).unwrap();
    let hardware = all_hardware(&graph, &Options::default()).unwrap();
    let inside = all_hardware(plain, &Options::default()).unwrap();
    assert!(same(plain, &wanted, &interpreted(&graph, &stimulus).unwrap()), "interpreter");
    assert!(same(plain, &wanted, &native(&graph, &stimulus).unwrap()), "machine code");
    let outcome = cycles(&graph, &hardware, &stimulus).unwrap();
    assert!(same(plain, &wanted, &outcome), "cycle model");
    let slow = cycles(plain, &inside, &stimulus).unwrap();
    assert!(same(plain, &wanted, &slow));
    println!("{:?} clocks, {:?} with the block inside", outcome.clocks, slow.clocks);
    assert!(outcome.clocks < slow.clocks);
    if Simulator::Icarus.is_here() {
        let folder = tempfile::tempdir().unwrap();
        let play = (Simulator::Icarus, 7);
        let outcome = simulated(&graph, &hardware, &stimulus, play, folder.path()).unwrap();
        assert!(same(plain, &wanted, &outcome), "Icarus");
    }
}

#[test]
fn blocks_that_have_to_stay_do_and_say_why() {
    let put = |from: &str, to: &str| {
        let text = CACHE.replace(from, to);
        assert_ne!(text, CACHE, "{from}");
        text
    };
    for (text, why) in [
        (put("x.value = v;", "x.value = v + table[3];"), "used elsewhere"),
        (put("uint v = values[at];", "uint v = values[at]; set_output_port(out, x);"), "is given before"),
        (put(".async {", "for (uint i = 0; i < 2; i++) { .async {")
            .replace("table[x.key] = v;\n", "table[x.key] = v; }\n"), "in a loop"),
        (put("table[x.key] = v;", "table[x.key] = v; if (test_input_port(in)) v = 1;"), "ports"),
        (put("table[x.key] = v;", "table[x.key] = v; if (v == 7) return 1;"), "left for elsewhere"),
        (put("misses++;", "misses++; .async { misses++; }"), "one block"),
        (
            put("x.value = v;", "Item y = read_input_port(in); x.value = v + y.value;"),
            "read again",
        ),
        (
            put("table[x.key] = v;", "table[x.key] = v; misses += 2;").replace(
                "    .handler {",
                "    .signal { ClSignal p = read_signal(); p.Sig.LParam[0] = misses; set_signal(p); }\n    .handler {",
            ),
            "a signal handler",
        ),
    ] {
        let loaded = compiled(&text);
        let (graph, list) = outline(&loaded.compiled.graph);
        assert!(list[0].why.is_some_and(|said| said.contains(why)), "{why}: {list:?}");
        assert_eq!(graph.nodes.len(), 1);
    }
}

fn statement(dice: &mut Dice, depth: u64) -> String {
    const NAMES: [&str; 8] = ["x.a", "x.b", "x.c", "l0", "l1", "s0", "s1", "x.d[x.a & 3]"];
    let value = |dice: &mut Dice| {
        let (a, b) = (dice.of(&NAMES), dice.of(&NAMES));
        let operator = dice.of(&["+", "-", "^", "&", "<", "=="]);
        format!("({a} {operator} ({b} + {}))", dice.below(9))
    };
    let kinds = if depth == 0 { 5 } else { 7 };
    let (first, second) = (value(dice), value(dice));
    match dice.below(kinds) {
        0 => format!("x.{} = {first};", dice.of(&["a", "b", "c"])),
        1 => format!("s{} = {first};", dice.below(2)),
        2 => format!("l{} = {first};", dice.below(2)),
        3 => format!("x.d[{first} & 3] = {second};"),
        4 => format!("T[{first} & 15] = T[{second} & 15] + l0;"),
        5 => {
            let (a, b) = (statement(dice, depth - 1), statement(dice, depth - 1));
            format!("if ({first}) {{ {a} }} else {{ {b} }}")
        }
        _ => {
            let inner = statement(dice, depth - 1);
            format!(
                "for (uint i{depth} = 0; i{depth} < 3; i{depth}++) {{ {inner} if ({first}) break; }}"
            )
        }
    }
}

#[test]
fn random_programs_with_blocks_mean_the_same_with_the_blocks_outside() {
    let mut dice = Dice(0xa5);
    let (mut gone, mut simulated_) = (0, 0);
    for seed in 0..60 {
        let mut several = |memory: &str| {
            let list: Vec<String> = (0..=dice.below(3)).map(|_| statement(&mut dice, 2)).collect();
            list.join("\n").replace("T[", &format!("{memory}["))
        };
        let (before, inside, after) = (several("t"), several("u"), several("t"));
        let (around, other) = (several("t"), several("t"));
        let block = match dice.below(3) {
            0 => format!(".async {{ {inside} }}"),
            1 => format!("if (l1 & 1) {{ {around}\n.async {{ {inside} }}\n{other} }}"),
            _ => format!("if (s0 == 3) {{ {around} }} else {{ .async {{ {inside} }}\n{other} }}"),
        };
        let send = if dice.below(3) == 0 { "if (x.a[0:0] == 0) " } else { "" };
        let text = format!(
            "struct Item {{ uint16 a; uint8 b; uint32 c; uint12 d[4]; }}\n\
             .element E (Item in -> Item out) {{\n.state {{ uint s0; uint17 s1; uint t[16]; uint u[16]; }}\n\
             .handler {{ if (test_input_port(in)) {{ Item x = read_input_port(in); uint l0 = 1; \
             uint l1 = x.b;\n{before}\n{block}\n{after}\n{send}set_output_port(out, x); }} }} }}\n\
             .input Item in\n.output Item out\nE :: e\nin -> e -> out\n"
        );
        let loaded = compiled(&text);
        let plain = &loaded.compiled.graph;
        let (graph, list) = outline(plain);
        assert!(list[0].block.is_some(), "{list:?}\n{text}");
        gone += 1;
        let items = (0..60).flat_map(|_| [dice.below(1 << 50), dice.below(1 << 40)]).collect();
        let stimulus = Stimulus { items: vec![items], signals: Vec::new() };
        let wanted = interpreted(plain, &stimulus).unwrap();
        let outside = interpreted(&graph, &stimulus).unwrap();
        assert!(same(plain, &wanted, &outside), "seed {seed}: {list:?}\n{text}");
        assert!(same(plain, &wanted, &native(&graph, &stimulus).unwrap()), "code, {seed}\n{text}");
        let hardware = all_hardware(&graph, &Options::default()).unwrap();
        let outcome = cycles(&graph, &hardware, &stimulus).unwrap();
        assert!(same(plain, &wanted, &outcome), "cycle model, seed {seed}\n{text}");
        if seed % 15 == 0 && Simulator::Icarus.is_here() {
            let folder = tempfile::tempdir().unwrap();
            let play = (Simulator::Icarus, seed + 1);
            let outcome = simulated(&graph, &hardware, &stimulus, play, folder.path()).unwrap();
            assert!(same(plain, &wanted, &outcome), "Icarus, seed {seed}\n{text}");
            simulated_ += 1;
        }
    }
    println!("{gone} programs, {simulated_} of them in Icarus");
}
