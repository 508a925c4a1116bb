//! Replication: several copies of an element between a spreader and a gatherer.
//!
//! An element that takes packets and gives packets, one input and one output, is copied; `Spread`
//! sends each packet whole to the copy that its flow belongs to (source address and half of the
//! destination's, so that a flow's packets stay in order), and `Gather` takes packets whole, from the
//! copies in turn. Each copy has state of its own, so an element that the manager signals, or whose
//! state joins flows, is not one to copy: the first is refused, the second is for the user to know.
//!
//! The number of copies is given, or follows from a goal: flits a second at a clock, or an area.

use std::fmt::Write as _;

use beeline_ir::flits::BITS;
use beeline_ir::graph::{Channel, DEPTH, Graph, Node, Peer};
use beeline_syntax::{Diagnostics, Sources};
use serde::Serialize;

/// Copies of one instance at most.
pub const MOST: u32 = 16;

/// How many copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// So many.
    Copies(u32),
    /// As many as take so many million flits a second at the clock.
    Throughput {
        /// Wanted, in million flits a second.
        mflits: f64,
        /// The clock in megahertz.
        mhz: f64,
    },
    /// As many as fit so many tables.
    Area {
        /// Tables there are.
        luts: u64,
        /// Tables of one copy.
        each: u64,
    },
}

/// What became of an instance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Balance {
    /// Instance.
    pub instance: String,
    /// Copies.
    pub copies: u32,
    /// Cycles between the iterations of one.
    pub interval: u32,
    /// Iterations a cycle of all of them together.
    pub per_cycle: f64,
}

/// An instance cannot be copied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplicateError {
    /// No such instance.
    #[error("the graph has no instance {0} to replicate")]
    NoSuchInstance(String),
    /// Its ports.
    #[error(
        "{0} has other ports than one input and one output of packets: replicate an element before or behind it"
    )]
    Ports(String),
    /// Its signals.
    #[error("{0} is marked @: each copy would have state of its own, and a signal reaches one")]
    Signalled(String),
    /// Too many.
    #[error("{instance} would need {copies} copies, at most {MOST} are made: lower the goal")]
    TooMany {
        /// Which.
        instance: String,
        /// How many.
        copies: u64,
    },
}

fn ceiling(value: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the clamp keeps it between one and a thousand million"
    )]
    let whole = value.clamp(1.0, 1e9).ceil() as u64;
    whole
}

impl Goal {
    /// The copies of an element that begins an iteration every `interval` cycles.
    fn copies(self, interval: u32) -> u64 {
        match self {
            Self::Copies(copies) => u64::from(copies.max(1)),
            // An iteration reads a flit.
            Self::Throughput { mflits, mhz } => {
                ceiling(mflits * f64::from(interval) / mhz.max(1.0))
            }
            Self::Area { luts, each } => (luts / each.max(1)).clamp(1, u64::from(MOST)),
        }
    }
}

/// The spreader and the gatherer of `count` copies.
fn text(count: u32) -> String {
    let list =
        |what: &str| (0..count).map(|at| format!("flit {what}{at}")).collect::<Vec<_>>().join(", ");
    let mut text = String::from(".import \"headers.np\"\n");
    let _ = writeln!(text, ".element Spread (flit in -> {}) {{", list("out"));
    // The choice is made at a packet's first flit and holds until its last.
    text.push_str(
        "    .state { uint8 chosen; }\n    .handler {\n        if (test_input_port(in)) {\n",
    );
    text.push_str("            flit x = read_input_port(in);\n            uint8 to = chosen;\n");
    text.push_str("            if (x.sop) {\n                uint mixed = 0;\n");
    text.push_str("                if (ntohs(x.half[6]) == ETHERTYPE_IPV4)\n");
    text.push_str("                    mixed = (uint)x.half[13] ^ ((uint)x.half[14] << 3) ^ ((uint)x.half[15] << 7);\n");
    // The product's upper half depends on every bit of the addresses.
    text.push_str("                mixed = mixed * 2654435761;\n");
    let _ =
        writeln!(text, "                to = (uint8)(((mixed >> 16) & 0xffff) * {count} >> 16);");
    text.push_str("            }\n            chosen = to;\n");
    for at in 0..count {
        let _ = writeln!(text, "            if (to == {at}) set_output_port(out{at}, x);");
    }
    text.push_str("        }\n    }\n}\n");
    let _ = writeln!(text, ".element Gather ({} -> flit out) {{", list("in"));
    // `from` is the copy whose turn it is; inside a packet it stays.
    text.push_str(
        "    .state { uint8 from; bool inside; }\n    .handler {\n        bool done = false;\n",
    );
    text.push_str("        uint8 turn = from;\n");
    for step in 0..count {
        let _ = writeln!(text, "        if (!done && ({step} == 0 || !inside)) {{");
        for at in 0..count {
            let _ = writeln!(
                text,
                "            if (!done && turn == {at} && test_input_port(in{at})) {{ flit x = \
                 read_input_port(in{at}); set_output_port(out, x); inside = !x.eop; \
                 from = x.eop ? {} : {at}; done = true; }}",
                (at + 1) % count
            );
        }
        let _ = writeln!(text, "            turn = turn == {} ? 0 : turn + 1;", count - 1);
        text.push_str("        }\n");
    }
    text.push_str("    }\n}\n");
    text
}

/// Puts copies of instances in their place. `interval` is what a node's schedule says.
///
/// Errors: an instance that is not there or cannot be copied; too many copies.
///
/// # Panics
/// Where the spreader's own text does not compile.
pub fn replicate(
    graph: &Graph,
    goals: &[(String, Goal)],
    interval: &dyn Fn(&Node) -> u32,
) -> Result<(Graph, Vec<Balance>), ReplicateError> {
    let mut graph = graph.clone();
    let mut balances = Vec::new();
    for (name, goal) in goals {
        let Some(node) = graph.node_named(name) else {
            return Err(ReplicateError::NoSuchInstance(name.clone()));
        };
        let element = &graph.nodes[node].element;
        let one = |ports: &[beeline_ir::tree::Port]| ports.len() == 1 && ports[0].bits == BITS;
        if !one(&element.inputs) || !one(&element.outputs) {
            return Err(ReplicateError::Ports(name.clone()));
        }
        if graph.nodes[node].signalled {
            return Err(ReplicateError::Signalled(name.clone()));
        }
        let cycles = interval(&graph.nodes[node]).max(1);
        let copies = goal.copies(cycles);
        let Some(count) = u32::try_from(copies).ok().filter(|count| *count <= MOST) else {
            return Err(ReplicateError::TooMany { instance: name.clone(), copies });
        };
        if count > 1 {
            put(&mut graph, node, count);
        }
        balances.push(Balance {
            instance: name.clone(),
            copies: count,
            interval: cycles,
            per_cycle: f64::from(count) / f64::from(cycles),
        });
    }
    Ok((graph, balances))
}

fn put(graph: &mut Graph, node: usize, count: u32) {
    let mut sources = Sources::default();
    let file = sources.add("replicate.np", text(count));
    let mut found = Diagnostics::default();
    let compiled = beeline_ir::compile(&mut sources, file, &mut |_| None, &mut found);
    assert!(!found.failed(), "the spreader compiles: {}", found.render(&sources));
    let [spread, gather] = ["Spread", "Gather"]
        .map(|name| compiled.elements.iter().find(|element| element.name == name).cloned());
    let (Some(spread), Some(gather)) = (spread, gather) else { return };
    let original = graph.nodes[node].clone();
    let mut id = graph.nodes.iter().map(|node| node.id).max().unwrap_or(0);
    let mut add = |graph: &mut Graph, name: String, element| {
        id = id.saturating_add(1);
        let host = original.host;
        graph.nodes.push(Node { name, element, id, host, verilog: false, ..original.clone() });
        graph.nodes.len() - 1
    };
    let spreader = add(graph, format!("{}_spread", original.name), spread);
    let gatherer = add(graph, format!("{}_gather", original.name), gather);
    let mut members = vec![node];
    for at in 1..count {
        let name = format!("{}_{at}", original.name);
        let copy = add(graph, name, original.element.clone());
        // A copy of a hand-written element is hand-written too.
        graph.nodes[copy].verilog = original.verilog;
        members.push(copy);
    }
    for channel in &mut graph.channels {
        if channel.to == (Peer::Port { node, port: 0 }) {
            channel.to = Peer::Port { node: spreader, port: 0 };
        }
        if channel.from == (Peer::Port { node, port: 0 }) {
            channel.from = Peer::Port { node: gatherer, port: 0 };
        }
    }
    for (port, member) in members.into_iter().enumerate() {
        let name = graph.nodes[member].name.clone();
        let channel = |name: String, from, to| Channel {
            name,
            bits: BITS,
            depth: DEPTH,
            from,
            to,
            span: original.span,
        };
        let to = Peer::Port { node: member, port: 0 };
        let from = Peer::Port { node: spreader, port };
        graph.channels.push(channel(
            format!("{}_spread[{}]->{name}", original.name, port + 1),
            from,
            to,
        ));
        let to = Peer::Port { node: gatherer, port };
        let from = Peer::Port { node: member, port: 0 };
        graph.channels.push(channel(
            format!("{name}->[{}]{}_gather", port + 1, original.name),
            from,
            to,
        ));
    }
}
