//! Elements beside modules of the same ports that a person wrote (`examples/by_hand`): the same items
//! out of both in Icarus, and what each takes of a chip by Yosys.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::path::Path;

use beeline_ir::flits::split;
use beeline_nf::area::{area, area_of, is_here};
use beeline_nf::diff::{Simulator, Stimulus, all_hardware, compare_with};
use beeline_nf::hand_written::HandWritten;
use beeline_nf::timing::{missing, timing};
use beeline_passes::Options;
use common::{Dice, compiled};

/// An element, and a graph of it.
const ELEMENTS: [(&str, &str); 5] = [
    ("Pass", "verilog Pass :: it\nfrom_tor -> it -> to_tor\n"),
    ("Count", "verilog Count :: it\nfrom_tor -> it -> to_tor\n"),
    ("EtherSwitch", "verilog EtherSwitch :: it\nfrom_tor -> it -> to_tor\nit [2] -> to_nic\n"),
    ("IPChecksum", "verilog IPChecksum :: it\nfrom_tor -> it -> to_tor\n"),
    (
        "L4_Parser",
        ".import \"headers.np\"\n.output Tuple tuple\nverilog L4_Parser :: it\n\
         from_tor -> it -> to_tor\nit [2] -> tuple\n",
    ),
];

/// Packets of every kind that a parser tells apart, whole and cut short.
fn packets() -> Vec<u64> {
    let mut dice = Dice(46);
    let mut items = Vec::new();
    for _ in 0..120 {
        let length = usize::try_from(14 + dice.below(90)).unwrap();
        let mut packet: Vec<u8> =
            (0..length).map(|_| u8::try_from(dice.below(256)).unwrap()).collect();
        if dice.below(4) > 0 {
            packet[12..14].copy_from_slice(&[8, 0]);
        }
        for (at, values) in
            [(14, &[0x45, 0x45, 0x46][..]), (20, &[0, 0x20]), (21, &[0, 1]), (23, &[6, 17, 1])]
        {
            if let Some(byte) = packet.get_mut(at) {
                *byte = dice.of(values);
            }
        }
        split(&packet, dice.below(1 << 40), |flit| items.extend(flit));
    }
    items
}

#[test]
fn modules_by_hand_give_the_items_of_the_elements_and_take_no_far_smaller_chip() {
    if !Simulator::Icarus.is_here() || !is_here() {
        println!("skipped: iverilog or yosys is not installed; cargo xtask setup installs them");
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/by_hand");
    let stimulus = Stimulus { items: vec![packets()], signals: Vec::new() };
    for (name, text) in ELEMENTS {
        let loaded = compiled(text);
        let graph = &loaded.compiled.graph;
        let own = HandWritten::of(graph, &folder).unwrap();
        let options = Options::default();
        let simulators = [Simulator::Icarus];
        let all = compare_with(graph, &options, &stimulus, &simulators, &own).unwrap();
        assert!(all["iverilog"].1.is_empty(), "{name}: {:?}", all["iverilog"].1);
        let made = area(graph, 0, &all_hardware(graph, &options).unwrap()[0]).unwrap();
        let by_hand = area_of(&own.text("it").unwrap(), "it").unwrap();
        println!(
            "{name}: {} LUT6 and {} flip-flops, by hand {} and {} (counted by Yosys)",
            made.luts, made.flip_flops, by_hand.luts, by_hand.flip_flops
        );
        assert!(by_hand.flip_flops >= 512 || name == "Pass", "{name}: {by_hand:?}");
        assert!(made.luts <= 6 * by_hand.luts.max(100), "{name}: {made:?} and {by_hand:?}");
        assert!(made.flip_flops <= 4 * by_hand.flip_flops, "{name}: {made:?} and {by_hand:?}");
    }
}

#[test]
fn a_memory_of_many_zeros_is_counted_without_a_cell_for_each() {
    let text = "
const uint squares[4] = {0, 1, 4, 9};
.element Keep (flit in -> flit out) {
    .state { ulong kept[65536]; }
    .handler {
        if (test_input_port(in)) {
            flit x = read_input_port(in);
            x.quad[1] = kept[x.half[0]];
            x.word[4] = squares[x.half[0] & 3];
            kept[x.half[0]] = x.quad[2];
            set_output_port(out, x);
        }
    }
}
Keep :: keep
from_tor -> keep -> to_tor
";
    let loaded = compiled(text);
    let graph = &loaded.compiled.graph;
    let hardware = all_hardware(graph, &Options::default()).unwrap();
    let verilog = beeline_verilog::module::module(&hardware[0], "keep");
    let zeros: Vec<&str> = verilog.split("`ifndef NO_ZEROS").skip(1).collect();
    let inside = |part: &&str| part.split("`endif").next().unwrap().contains("< 65536;");
    assert!(zeros.len() == 1 && zeros.iter().all(inside), "the table keeps its numbers: {verilog}");
    if !is_here() {
        println!("skipped: yosys is not installed; cargo xtask setup installs it");
        return;
    }
    let counted = area(graph, 0, &hardware[0]).unwrap();
    assert_eq!(counted.memory_bits, 65_536 * 64 + 4 * 32);
    if missing().is_some() {
        println!("skipped: nextpnr-ice40 is not installed; cargo xtask setup installs it");
        return;
    }
    // Its memory alone is too large for the chip of the estimate, which is said without a try.
    let timed = timing(graph, 0, &hardware[0], 1).unwrap();
    assert_eq!((timed.mhz, timed.cells, timed.memories), (None, None, 1_024));
}
