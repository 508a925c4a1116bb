//! Every back end gives the flits that the interpreter gives.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::path::Path;

use beeline_ir::flits::split;
use beeline_nf::diff::{Simulator, Stimulus, compare};
use beeline_nf::load::{Loaded, compile, load};
use beeline_passes::Options;

fn simulators() -> Vec<Simulator> {
    if Simulator::Icarus.is_here() {
        return vec![Simulator::Icarus];
    }
    println!("skipped: iverilog is not installed; cargo xtask setup installs it");
    Vec::new()
}

fn packets(count: u64) -> Vec<u64> {
    let mut items = Vec::new();
    for at in 0..count {
        let mut bytes: Vec<u8> = (0..60 + at * 7).map(|b| b.to_le_bytes()[0]).collect();
        bytes[12..14].copy_from_slice(&[8, 0]);
        bytes[14] = 0x45;
        bytes[23] = 6;
        let port: u16 = if at % 3 == 0 { 443 } else { 80 };
        bytes[36..38].copy_from_slice(&port.to_be_bytes());
        split(&bytes, at, |flit| items.extend(flit));
    }
    items
}

fn agree(loaded: &Loaded, stimulus: &Stimulus) {
    assert!(!loaded.diagnostics.failed(), "{}", loaded.diagnostics.render(&loaded.sources));
    for options in [Options::default(), Options::naive()] {
        let graph = &loaded.compiled.graph;
        let compared = compare(graph, &options, stimulus, &simulators()).unwrap();
        for (back_end, (_, found)) in compared {
            assert!(found.is_empty(), "{back_end} with {options:?}: {found:#?}");
        }
    }
}

#[test]
fn the_examples_agree() {
    for name in ["counter.np", "port.np"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name);
        let loaded = load(&path).unwrap();
        let stimulus = Stimulus { items: vec![packets(20)], signals: vec![(0, [0; 8])] };
        agree(&loaded, &stimulus);
    }
}

#[test]
fn a_table_with_back_to_back_hits_agrees_and_a_loop_too() {
    let text = "
struct Item { uint3 key; uint5 rest; uint32 value; }
.element Table (Item in -> Item out) {
    .state { uint table[16]; }
    .handler {
        if (test_input_port(in)) {
            Item x = read_input_port(in);
            uint y = table[x.key] + x.value;
            table[x.key] = y;
            x.value = y;
            set_output_port(out, x);
        }
    }
    .signal {
        ClSignal p = read_signal();
        table[p.Sig.LParam[0]] = p.Sig.LParam[1];
        p.Sig.LParam[2] = table[p.Sig.LParam[0]];
        set_signal(p);
    }
}
.element Sum (Item in -> Item out) {
    .handler {
        if (test_input_port(in)) {
            Item x = read_input_port(in);
            uint sum = 0;
            for (uint i = 0; i < x.key; i++) { sum += i * x.value; if (sum > 100000) break; }
            x.value = sum;
            set_output_port(out, x);
        }
    }
}
.input Item in
.output Item out
Table :: table @
Sum :: sum
in -> table -> sum -> out
";
    let loaded = compile("table.np", text.to_owned(), None);
    let items = (0..200_u64).map(|at| (at * at % 7) | (at % 5 + 1) << 8).collect();
    let mut signal = [0; 8];
    signal[1] = 3;
    signal[2] = 1_000;
    agree(&loaded, &Stimulus { items: vec![items], signals: vec![(0, signal)] });
}
