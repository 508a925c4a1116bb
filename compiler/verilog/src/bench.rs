//! A test bench: plays items from files into the inputs and writes every item of every channel.
//!
//! `NAME.hex` holds the items of input NAME, a line each; `log.txt` receives `channel hex` lines in
//! the order of clocks, and at the end `clocks N`. `signals.hex` holds signals, sent before the
//! items; answers are logged as channel `-`.

use std::fmt::Write as _;

use beeline_ir::graph::Graph;

use crate::name;

/// What is played.
#[derive(Clone, Copy, Debug, Default)]
pub struct Play<'a> {
    /// Items of each input, by the graph's order.
    pub items: &'a [usize],
    /// Signals.
    pub signals: usize,
    /// Clocks without movement after which the bench ends.
    pub quiet: u32,
    /// Most clocks.
    pub most: u64,
    /// Where not zero: inputs and outputs pause pseudo-randomly, from this seed.
    pub stalls: u32,
}

/// The text of module `np_bench`.
#[must_use]
pub fn bench(graph: &Graph, play: &Play<'_>) -> String {
    let mut text =
        String::from("`timescale 1ns/1ns\nmodule np_bench;\n    reg clk = 0, rst = 1;\n");
    text.push_str("    always #5 clk = !clk;\n    integer log, clocks = 0, quiet = 0;\n");
    text.push_str("    reg moved;\n");
    let _ = writeln!(text, "    reg [31:0] chance = {};", play.stalls.max(1));
    let mut ports = vec![".clk(clk)".to_owned(), ".rst(rst)".to_owned()];
    let stalls = play.stalls != 0;
    for (at, input) in graph.inputs.iter().enumerate() {
        let bits = graph.channels[input.channel].bits;
        let port = name(&input.name);
        let count = play.items.get(at).copied().unwrap_or(0);
        let top = bits - 1;
        let _ = writeln!(text, "    reg [{top}:0] i{at} [0:{}];", count.max(1) - 1);
        let _ = writeln!(text, "    integer n{at} = 0;\n    wire r{at};");
        let gate = if stalls { format!(" && chance[{}]", at % 16) } else { String::new() };
        let _ = writeln!(text, "    wire w{at} = !rst && signals_done && n{at} < {count}{gate};");
        if count > 0 {
            let _ = writeln!(text, "    initial $readmemh(\"{port}.hex\", i{at});");
        }
        ports.push(format!(
            ".{port}_data(i{at}[n{at}]), .{port}_valid(w{at}), .{port}_ready(r{at})"
        ));
    }
    for (at, output) in graph.outputs.iter().enumerate() {
        let port = name(&output.name);
        let gate = if stalls { format!("chance[{}]", 16 + at % 16) } else { "1'b1".to_owned() };
        ports.push(format!(".{port}_data(), .{port}_valid(), .{port}_ready({gate})"));
    }
    let signals = play.signals;
    let _ = writeln!(
        text,
        "    reg [511:0] sg [0:{}];\n    integer ns = 0, na = 0;",
        signals.max(1) - 1
    );
    if signals > 0 {
        text.push_str("    initial $readmemh(\"signals.hex\", sg);\n");
    }
    let _ = writeln!(text, "    wire signals_done = na == {signals};");
    let _ = writeln!(text, "    wire sv = !rst && ns < {signals} && ns == na;\n    wire sr, av;");
    text.push_str("    wire [511:0] ad;\n");
    ports.push(".cmd_valid(sv), .cmd_data(sg[ns]), .cmd_ready(sr)".to_owned());
    ports.push(".rsp_valid(av), .rsp_data(ad), .rsp_ready(1'b1)".to_owned());
    let _ = writeln!(text, "    np_top dut ({});", ports.join(",\n        "));
    text.push_str("    initial log = $fopen(\"log.txt\", \"w\");\n");
    text.push_str("    always @(posedge clk) begin\n        moved = 0;\n        if (!rst) begin\n");
    text.push_str(
        "            chance <= {chance[30:0], chance[31] ^ chance[21] ^ chance[1] ^ chance[0]};\n",
    );
    for at in 0..graph.inputs.len() {
        let _ = writeln!(
            text,
            "            if (w{at} && r{at}) begin n{at} <= n{at} + 1; moved = 1; end"
        );
    }
    for at in 0..graph.channels.len() {
        let _ = writeln!(
            text,
            "            if (dut.c{at}_wv && dut.c{at}_wr) begin $fwrite(log, \"{at} %h\\n\", \
             dut.c{at}_wd); moved = 1; end\n            if (dut.c{at}_rv && dut.c{at}_rr) moved = 1;"
        );
    }
    text.push_str("            if (sv && sr) begin ns <= ns + 1; moved = 1; end\n");
    text.push_str(
        "            if (av) begin na <= na + 1; $fwrite(log, \"- %h\\n\", ad); moved = 1; end\n",
    );
    let _ = writeln!(
        text,
        "            clocks <= clocks + 1;\n            quiet <= moved ? 0 : quiet + 1;\n            \
         if (quiet > {} || clocks > {}) begin\n                \
         $fwrite(log, \"clocks %0d\\n\", clocks - quiet);\n                $fclose(log);\n                \
         $finish;\n            end",
        play.quiet, play.most
    );
    text.push_str(
        "        end\n    end\n    initial begin repeat (4) @(posedge clk); #1 rst = 0; end\n",
    );
    text.push_str("endmodule\n");
    text
}
