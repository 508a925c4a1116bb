//! From source to packets: the examples, through the interpreter and through machine code.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use beeline_nf::engine::{EngineError, run_captures};
use beeline_nf::load::{Loaded, compile, load};
use beeline_nf::pcap::{Packet, Reader, Writer};
use beeline_nf::sides::{self, LinkOptions};

fn example(name: &str) -> Loaded {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name);
    let loaded = load(&path).unwrap();
    assert!(!loaded.diagnostics.failed(), "{}", loaded.diagnostics.render(&loaded.sources));
    loaded
}

/// TCP packets of every length, every third one to port 443.
fn packets() -> Vec<Packet> {
    (0..200_u64)
        .map(|at| {
            let mut bytes: Vec<u8> = (0..60 + at * 7).map(|b| b.to_le_bytes()[0]).collect();
            bytes[12..14].copy_from_slice(&[8, 0]);
            bytes[14] = 0x45;
            bytes[23] = 6;
            let port: u16 = if at % 3 == 0 { 443 } else { 80 };
            bytes[36..38].copy_from_slice(&port.to_be_bytes());
            Packet { time_ns: 1_000 * at, bytes }
        })
        .collect()
}

fn write(path: &Path, packets: &[Packet]) {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for packet in packets {
        writer.write(packet.time_ns, &packet.bytes).unwrap();
    }
    std::fs::write(path, writer.finish().unwrap()).unwrap();
}

fn read(path: &Path) -> Vec<Packet> {
    let bytes = std::fs::read(path).unwrap();
    let mut reader = Reader::new(&bytes[..]).unwrap();
    std::iter::from_fn(|| reader.next_packet().unwrap()).collect()
}

/// What the graph makes of the packets: interpreter and machine code, which must agree.
fn through(loaded: &Loaded, names: (&str, &str), packets: &[Packet]) -> Vec<Packet> {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("in.pcap");
    write(&from, packets);
    let graph = &loaded.compiled.graph;
    let ports =
        |to: &PathBuf| vec![(names.0.to_owned(), from.clone()), (names.1.to_owned(), to.clone())];
    let link = LinkOptions::default();
    let walked = folder.path().join("walked.pcap");
    run_captures(graph, (&sides::walked, link), &ports(&walked), &[]).unwrap();
    let native = folder.path().join("native.pcap");
    run_captures(graph, (&sides::native, link), &ports(&native), &[]).unwrap();
    assert_eq!(read(&walked), read(&native));
    read(&native)
}

#[test]
fn the_counter_passes_every_packet() {
    let packets = packets();
    assert_eq!(through(&example("counter.np"), ("in", "out"), &packets), packets);
}

#[test]
fn the_firewall_drops_one_port() {
    let packets = packets();
    let passed = through(&example("port.np"), ("from_tor", "to_tor"), &packets);
    // The second flit names the port, so the first flit of a dropped packet has gone; the joiner
    // throws it away.
    let kept: Vec<Packet> =
        packets.iter().filter(|p| p.bytes[36..38] != 443_u16.to_be_bytes()).cloned().collect();
    assert_eq!(passed, kept);
}

#[test]
fn an_unbound_port_and_an_unknown_one_are_named() {
    let loaded = example("counter.np");
    let graph = &loaded.compiled.graph;
    let link = LinkOptions::default();
    let error = run_captures(graph, (&sides::walked, link), &[], &[]).unwrap_err();
    assert!(matches!(error, EngineError::Unbound { direction: "input", .. }), "{error}");
    let ports = [("side".to_owned(), PathBuf::from("x.pcap"))];
    let error = run_captures(graph, (&sides::walked, link), &ports, &[]).unwrap_err();
    assert!(matches!(error, EngineError::NoSuchPort(name) if name == "side"));
}

#[test]
fn every_error_of_a_file_is_shown_at_its_place() {
    let text = "\
.element Bad (flit in -> flit out) {
    .state { ulong count; }
    .handler {
        flit x = read_input_port(out);
        if (x.sopp) coun++;
        int y = 3;
        set_output_port(out, x)
    }
}
Counter :: cnt
Bad :: bad
from_tor -> bad [2] -> to_tor
";
    let loaded = compile("bad.np", text.to_owned(), None);
    let records = loaded.diagnostics.records(&loaded.sources);
    let found: Vec<(u32, u32, &str)> =
        records.iter().map(|record| (record.line, record.column, record.code)).collect();
    let wanted = [(7, 32, "syntax"), (4, 34, "bad-port"), (6, 9, "unknown-type")];
    for place in wanted {
        assert!(found.contains(&place), "{place:?} is not in {found:?}");
    }
    let shown = loaded.diagnostics.render(&loaded.sources);
    assert!(shown.contains("bad.np:4:34") && shown.contains("read_input_port(out)"), "{shown}");
}
