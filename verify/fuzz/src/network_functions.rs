//! The front end of network functions: any text compiles or is told what is wrong with it.

use beeline_ir::library;
use beeline_syntax::{Diagnostics, Sources};

/// A source file.
pub fn source(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(16_384)]).into_owned();
    let lines = text.lines().count().max(1);
    let mut sources = Sources::default();
    let mut diagnostics = Diagnostics::default();
    let file = sources.add("fuzz.np", text);
    let compiled = beeline_ir::compile(&mut sources, file, &mut |_| None, &mut diagnostics);
    let shown = diagnostics.render(&sources);
    if diagnostics.failed() {
        assert!(!shown.is_empty(), "what is wrong is said");
        for record in diagnostics.records(&sources) {
            let last = u32::try_from(lines + 1).expect("a short text");
            let own = record.file == "fuzz.np";
            assert!(!own || (1..=last).contains(&record.line), "line {}", record.line);
        }
        return false;
    }
    let graph = &compiled.graph;
    for node in 0..graph.nodes.len() {
        assert!(graph.inputs_of(node).iter().all(Option::is_some), "an input without a writer");
    }
    assert_eq!(graph.topological().len(), graph.nodes.len());
    true
}

pub fn seeds() -> Vec<Vec<u8>> {
    let graph = b"Count :: cnt @\nTee :: tee\nDiscard :: end\n\
        from_tor -> cnt -> tee [1] -> {32} to_tor\ntee [2] -> end\n";
    let element =
        b".element E<uint N = 4> (flit in -> flit out) {\n.state { uint a[N]; ulong n; }\n\
        .handler { if (test_input_port(in)) { flit x = read_input_port(in);\n\
        #pragma unroll 2\nfor (uint i = 0; i < N; i++) { a[i] = a[i] + x.word[i & 7]; }\n\
        switch (x.fdata[3]) { case 1: n++; break; default: n = n << 2; }\n\
        x.half[2] = n[15:0]; set_output_port(out, x); return 1; } }\n\
        .signal { ClSignal p = read_signal(); p.Sig.LParam[0] = n; set_signal(p); } }\n\
        E :: e @ (N = 8)\nfrom_tor -> e -> to_tor\n";
    let mut all = vec![graph.to_vec(), element.to_vec()];
    let short = library::files().filter(|(_, text)| text.len() < 8_000);
    all.extend(short.map(|(_, text)| text.as_bytes().to_vec()));
    all
}
