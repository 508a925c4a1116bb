//! A test bench whose world is another program: items come by standard input, and go by standard
//! output.
//!
//! Every so many clocks, once the design has taken all that it was given, and where nothing moves, the
//! bench writes `? IDLE FREE` and waits: `IDLE` is 1 where nothing moved for as long, `FREE` is 1 where
//! it takes items. The other program answers with `PORT HEX` for each item (signals are those of the
//! port behind the last input), and with [`GO`], or [`END`]. An item that leaves is a line `o PORT HEX`,
//! an answer to a signal `s HEX`. Whatever else a simulator says begins with other words.
//!
//! The bench changes its outputs at the falling edge, so that the design sees them whole at the rising
//! one.

use std::fmt::Write as _;

use beeline_ir::graph::Graph;

use crate::name;

/// The answer after which the bench goes on.
pub const GO: u32 = 65_535;
/// The answer that ends the simulation.
pub const END: u32 = 65_534;
/// Items that one answer has for a port, at most.
pub const MOST: usize = 1_024;

/// The text of module `np_bench`; `pace` is how many clocks pass between two questions.
#[must_use]
pub fn bench(graph: &Graph, pace: u32) -> String {
    let mut text =
        String::from("`timescale 1ns/1ns\nmodule np_bench;\n    reg clk = 0, rst = 1;\n");
    text.push_str("    always #5 clk = !clk;\n    integer quiet = 0, since = 0, got, port;\n");
    text.push_str("    reg moved = 0, more;\n");
    let mut ports = vec![".clk(clk)".to_owned(), ".rst(rst)".to_owned()];
    // Every input, and behind them the signals: their name, width, and gate.
    let mut ends: Vec<(String, u32, &str)> = Vec::new();
    for input in &graph.inputs {
        let bits = graph.channels[input.channel].bits;
        ends.push((name(&input.name), bits, " && answered"));
    }
    ends.push(("cmd".to_owned(), 512, " && n_sent == n_answers"));
    text.push_str("    integer n_sent = 0, n_answers = 0;\n");
    for (at, (port, bits, gate)) in ends.iter().enumerate() {
        let (top, last) = (bits - 1, MOST - 1);
        let _ = writeln!(text, "    reg [{top}:0] i{at} [0:{last}];\n    reg [{top}:0] item{at};");
        let _ = writeln!(text, "    integer n{at} = 0, m{at} = 0;\n    reg t{at} = 0;");
        let _ = writeln!(text, "    wire r{at}, w{at};");
        let _ = writeln!(text, "    assign w{at} = !rst && n{at} < m{at}{gate};");
        ports.push(format!(
            ".{port}_data(i{at}[n{at}]), .{port}_valid(w{at}), .{port}_ready(r{at})"
        ));
    }
    let signals = ends.len() - 1;
    let _ = writeln!(text, "    wire answered = n{signals} == m{signals} && n_sent == n_answers;");
    text.push_str("    reg ta = 0;\n    wire av;\n    wire [511:0] ad;\n");
    for output in &graph.outputs {
        let port = name(&output.name);
        ports.push(format!(".{port}_data(), .{port}_valid(), .{port}_ready(1'b1)"));
    }
    ports.push(".rsp_valid(av), .rsp_data(ad), .rsp_ready(1'b1)".to_owned());
    let _ = writeln!(text, "    np_top dut ({});", ports.join(",\n        "));

    text.push_str("    always @(posedge clk) if (!rst) begin\n");
    for at in 0..ends.len() {
        let _ = writeln!(text, "        t{at} <= w{at} && r{at};");
    }
    text.push_str("        ta <= av;\n        moved <= av");
    for at in 0..ends.len() {
        let _ = write!(text, " || (w{at} && r{at})");
    }
    for at in 0..graph.channels.len() {
        let _ = write!(
            text,
            "\n            || (dut.c{at}_wv && dut.c{at}_wr) || (dut.c{at}_rv && dut.c{at}_rr)"
        );
    }
    text.push_str(";\n");
    for (at, output) in graph.outputs.iter().enumerate() {
        let channel = output.channel;
        let _ = writeln!(
            text,
            "        if (dut.c{channel}_rv && dut.c{channel}_rr) \
             $write(\"o {at} %h\\n\", dut.c{channel}_rd);"
        );
    }
    text.push_str("        if (av) $write(\"s %h\\n\", ad);\n    end\n");

    text.push_str("    always @(negedge clk) if (!rst) begin\n");
    for at in 0..ends.len() {
        let _ = writeln!(text, "        if (t{at}) n{at} = n{at} + 1;");
    }
    let _ = writeln!(text, "        if (t{signals}) n_sent = n_sent + 1;");
    text.push_str("        if (ta) n_answers = n_answers + 1;\n");
    text.push_str("        quiet = moved ? 0 : quiet + 1;\n        since = since + 1;\n");
    let free: Vec<String> = (0..ends.len()).map(|at| format!("n{at} == m{at}")).collect();
    let free = format!("({} && n_sent == n_answers)", free.join(" && "));
    let _ = writeln!(text, "        if ((since >= {pace} && {free}) || quiet >= {pace}) begin");
    let _ = writeln!(
        text,
        "            $write(\"? %0d %0d\\n\", quiet >= {pace} ? 1 : 0, {free} ? 1 : 0);"
    );
    text.push_str("            $fflush(32'h8000_0001);\n");
    let _ = writeln!(text, "            if {free} begin");
    for at in 0..ends.len() {
        let _ = writeln!(text, "                n{at} = 0; m{at} = 0;");
    }
    text.push_str("            end\n            more = 1;\n            while (more) begin\n");
    let _ = writeln!(
        text,
        "                port = {END};\n                got = $fscanf(32'h8000_0000, \"%d\", port);\n                \
         if (got != 1 || port == {END}) begin more = 0; $finish; end\n                \
         else if (port == {GO}) more = 0;"
    );
    for at in 0..ends.len() {
        let _ = writeln!(
            text,
            "                else if (port == {at}) begin \
             got = $fscanf(32'h8000_0000, \"%h\", item{at}); i{at}[m{at}] = item{at}; \
             m{at} = m{at} + 1; end"
        );
    }
    text.push_str("            end\n            quiet = 0; since = 0;\n        end\n    end\n");
    text.push_str("    initial begin repeat (4) @(posedge clk); #1 rst = 0; end\nendmodule\n");
    text
}
