//! The top: instances, channels, the chain of signals.

use std::fmt::Write as _;

use beeline_ir::graph::{Graph, Peer};
use beeline_passes::hardware::Hardware;

use crate::module::{module, module_name};
use crate::{COMMON, name};

/// The whole design: common modules, elements, `np_top`. A node with hand-written Verilog has its
/// text in `own`.
#[must_use]
pub fn design(
    graph: &Graph,
    hardware: &[Hardware],
    own: &dyn Fn(&str) -> Option<String>,
) -> String {
    let mut text = String::from(COMMON);
    for (node, hardware) in graph.nodes.iter().zip(hardware) {
        text.push('\n');
        match own(&node.name) {
            Some(written) => text.push_str(&written),
            None => text.push_str(&module(hardware, &module_name(&node.name))),
        }
    }
    text.push('\n');
    text.push_str(&top(graph));
    text
}

fn range(bits: u32) -> String {
    if bits == 1 { String::new() } else { format!("[{}:0] ", bits - 1) }
}

/// The module `np_top`.
#[must_use]
pub fn top(graph: &Graph) -> String {
    let mut ports = vec!["    input clk".to_owned(), "    input rst".to_owned()];
    for input in &graph.inputs {
        let bits = graph.channels[input.channel].bits;
        let name = name(&input.name);
        ports.push(format!("    input {}{name}_data", range(bits)));
        ports.push(format!("    input {name}_valid"));
        ports.push(format!("    output {name}_ready"));
    }
    for output in &graph.outputs {
        let bits = graph.channels[output.channel].bits;
        let name = name(&output.name);
        ports.push(format!("    output {}{name}_data", range(bits)));
        ports.push(format!("    output {name}_valid"));
        ports.push(format!("    input {name}_ready"));
    }
    for port in ["input cmd_valid", "input [511:0] cmd_data", "output cmd_ready"] {
        ports.push(format!("    {port}"));
    }
    for port in ["output rsp_valid", "output [511:0] rsp_data", "input rsp_ready"] {
        ports.push(format!("    {port}"));
    }
    let mut text = format!("module np_top (\n{}\n);\n", ports.join(",\n"));
    for (at, channel) in graph.channels.iter().enumerate() {
        let wide = range(channel.bits);
        let _ = writeln!(text, "    // {}", channel.name);
        let _ = writeln!(text, "    wire {wide}c{at}_wd, c{at}_rd;");
        let _ = writeln!(text, "    wire c{at}_wv, c{at}_wr, c{at}_rv, c{at}_rr;");
        let bits = (32 - (channel.depth - 1).leading_zeros()).max(1);
        let _ = writeln!(
            text,
            "    np_fifo #(.W({}), .D({}), .A({bits})) c{at} (.clk(clk), .rst(rst), \
             .wdata(c{at}_wd), .wvalid(c{at}_wv), .wready(c{at}_wr), \
             .rdata(c{at}_rd), .rvalid(c{at}_rv), .rready(c{at}_rr));",
            channel.bits, channel.depth
        );
        if let Peer::Outside(outside) = channel.from {
            let name = name(&graph.inputs[outside].name);
            let _ = writeln!(text, "    assign c{at}_wd = {name}_data;");
            let _ = writeln!(text, "    assign c{at}_wv = {name}_valid;");
            let _ = writeln!(text, "    assign {name}_ready = c{at}_wr;");
        }
        if let Peer::Outside(outside) = channel.to {
            let name = name(&graph.outputs[outside].name);
            let _ = writeln!(text, "    assign {name}_data = c{at}_rd;");
            let _ = writeln!(text, "    assign {name}_valid = c{at}_rv;");
            let _ = writeln!(text, "    assign c{at}_rr = {name}_ready;");
        }
    }
    chain(graph, &mut text);
    text.push_str("endmodule\n");
    text
}

/// Instances, and the chain through them in topological order.
fn chain(graph: &Graph, text: &mut String) {
    let order = graph.topological();
    for link in 0..=order.len() {
        let _ = writeln!(text, "    wire k{link}_v, k{link}_r;\n    wire [511:0] k{link}_d;");
    }
    text.push_str("    assign k0_v = cmd_valid;\n    assign k0_d = cmd_data;\n");
    text.push_str("    assign cmd_ready = k0_r;\n");
    let end = order.len();
    let _ = writeln!(text, "    assign rsp_valid = k{end}_v;\n    assign rsp_data = k{end}_d;");
    let _ = writeln!(text, "    assign k{end}_r = rsp_ready;");
    for (link, node) in order.into_iter().enumerate() {
        let described = &graph.nodes[node];
        let next = link + 1;
        let _ = writeln!(
            text,
            "    wire x{node}_sv, x{node}_av;\n    wire [511:0] x{node}_sd, x{node}_ad;"
        );
        let _ = writeln!(
            text,
            "    np_cmd #(.ID({})) k{node}c (.clk(clk), .rst(rst), .u_valid(k{link}_v), \
             .u_data(k{link}_d), .u_ready(k{link}_r), .d_valid(k{next}_v), .d_data(k{next}_d), \
             .d_ready(k{next}_r), .s_valid(x{node}_sv), .s_data(x{node}_sd), \
             .a_valid(x{node}_av), .a_data(x{node}_ad));",
            described.id
        );
        let mut ports = vec![".clk(clk)".to_owned(), ".rst(rst)".to_owned()];
        for (port, channel) in graph.inputs_of(node).into_iter().enumerate() {
            match channel {
                Some(c) => ports.push(format!(
                    ".in{port}_data(c{c}_rd), .in{port}_valid(c{c}_rv), .in{port}_ready(c{c}_rr)"
                )),
                None => ports
                    .push(format!(".in{port}_data(0), .in{port}_valid(1'b0), .in{port}_ready()")),
            }
        }
        for (port, channel) in graph.outputs_of(node).into_iter().enumerate() {
            match channel {
                Some(c) => ports.push(format!(
                    ".out{port}_data(c{c}_wd), .out{port}_valid(c{c}_wv), .out{port}_ready(c{c}_wr)"
                )),
                None => ports
                    .push(format!(".out{port}_data(), .out{port}_valid(), .out{port}_ready(1'b1)")),
            }
        }
        ports.push(format!(
            ".sig_valid(x{node}_sv), .sig_data(x{node}_sd), .ans_valid(x{node}_av), \
             .ans_data(x{node}_ad)"
        ));
        let module = module_name(&described.name);
        let _ = writeln!(text, "    {module} u{node} (\n        {});", ports.join(",\n        "));
    }
}
