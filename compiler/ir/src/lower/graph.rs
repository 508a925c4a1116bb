//! Checks and lowers the graph.

use std::collections::HashMap;

use beeline_syntax::ast::{self, Unit};
use beeline_syntax::{Diagnostic, Diagnostics, Span};

use super::element;
use super::evaluate::constant;
use super::types::World;
use super::world::resolve;
use crate::graph::{Channel, DEPTH, Graph, Node, Outside, Peer};
use crate::library;

/// Outside names that need no declaration: `(name, input)`.
const BUILT_IN: [(&str, bool); 4] =
    [("from_tor", true), ("to_tor", false), ("from_nic", true), ("to_nic", false)];
/// Deepest channel.
const DEEPEST: u64 = 65_536;

struct Names<'a> {
    unit: &'a Unit,
    nodes: HashMap<String, usize>,
    outside: HashMap<String, bool>,
}

pub(super) fn lower(world: &World, unit: &Unit, found: &mut Diagnostics) -> Graph {
    let mut graph = Graph::default();
    let mut names = Names { unit, nodes: HashMap::new(), outside: HashMap::new() };
    let mut spans: HashMap<String, Span> = HashMap::new();
    for outside in &unit.outside {
        let name = &outside.name;
        names.outside.insert(name.text.clone(), outside.input);
        if let Some(first) = spans.insert(name.text.clone(), name.span) {
            twice(found, name, first);
        }
    }
    let mut broken = false;
    for instance in &unit.instances {
        let name = &instance.name;
        if let Some(first) = spans.insert(name.text.clone(), name.span) {
            twice(found, name, first);
            continue;
        }
        match node(world, instance, graph.nodes.len(), found) {
            Some(node) => {
                names.nodes.insert(name.text.clone(), graph.nodes.len());
                graph.nodes.push(node);
            }
            None => broken = true,
        }
    }
    for edge in &unit.edges {
        let from = end(world, &names, &mut graph, &edge.from, false, broken, found);
        let to = end(world, &names, &mut graph, &edge.to, true, broken, found);
        let (Some((from, from_bits)), Some((to, to_bits))) = (from, to) else { continue };
        let show = |end: &ast::End| match end.port {
            Some((port, _)) => format!("{}[{port}]", end.name.text),
            None => end.name.text.clone(),
        };
        let name = format!("{}->{}", show(&edge.from), show(&edge.to));
        let bits = from_bits.or(to_bits).unwrap_or(crate::flits::BITS);
        if let (Some(a), Some(b)) = (from_bits, to_bits)
            && a != b
        {
            found.push(
                Diagnostic::error("type", edge.span, format!("{a} bits meet {b} bits"))
                    .label("the two ports carry different items"),
            );
        }
        if let Some(other) = graph.channels.iter().find(|c| c.from == from) {
            found.push(
                Diagnostic::error(
                    "two-readers",
                    edge.from.name.span,
                    format!("{} has a reader already", show(&edge.from)),
                )
                .other(other.span, "the first")
                .help("a channel has one reader; put a Tee between"),
            );
            continue;
        }
        if let Some(other) = graph.channels.iter().find(|c| c.to == to) {
            found.push(
                Diagnostic::error(
                    "two-writers",
                    edge.to.name.span,
                    format!("{} has a writer already", show(&edge.to)),
                )
                .other(other.span, "the first")
                .help("a channel has one writer; put a Merge between"),
            );
            continue;
        }
        let depth = edge.depth.unwrap_or(u64::from(DEPTH));
        if !(2..=DEEPEST).contains(&depth) {
            found.push(Diagnostic::error(
                "bad-depth",
                edge.span,
                format!("a channel of {depth} entries; 2 to {DEEPEST} are possible"),
            ));
        }
        let depth = u32::try_from(depth.clamp(2, DEEPEST)).unwrap_or(DEPTH);
        let index = graph.channels.len();
        if let Peer::Outside(at) = from {
            graph.inputs[at].channel = index;
        }
        if let Peer::Outside(at) = to {
            graph.outputs[at].channel = index;
        }
        graph.channels.push(Channel { name, bits, depth, from, to, span: edge.span });
    }
    unconnected(&graph, &names, broken, found);
    graph
}

fn twice(found: &mut Diagnostics, name: &ast::Name, first: Span) {
    found.push(
        Diagnostic::error("twice", name.span, format!("a second {:?} in the graph", name.text))
            .other(first, "the first"),
    );
}

fn node(
    world: &World,
    instance: &ast::Instance,
    at: usize,
    found: &mut Diagnostics,
) -> Option<Node> {
    let Some(declared) = world.elements.get(&instance.element.text) else {
        let wanted = instance.element.text.to_ascii_lowercase();
        let near = library::elements()
            .map(|(name, _)| name.to_owned())
            .chain(world.elements.keys().cloned())
            .find(|name| {
                let name = name.to_ascii_lowercase();
                name.contains(&wanted) || wanted.contains(&name)
            });
        let help = match near {
            Some(near) => format!("did you mean {near}?"),
            None => {
                "declare it with .element, import its file, or see `beeline nf library`".to_owned()
            }
        };
        found.push(
            Diagnostic::error(
                "unknown-element",
                instance.element.span,
                format!("no element is named {:?}", instance.element.text),
            )
            .help(help),
        );
        return None;
    };
    let mut arguments = Vec::new();
    for (name, value) in &instance.arguments {
        arguments.push((name.clone(), constant(world, value, &|_| None, found)?));
    }
    let element = element::lower(world, declared, &arguments, found)?;
    Some(Node {
        name: instance.name.text.clone(),
        element,
        host: instance.host,
        verilog: instance.verilog,
        signalled: instance.signalled,
        id: u16::try_from(at + 1).unwrap_or(u16::MAX),
        span: instance.name.span,
    })
}

/// The peer and, where it is known, the width of its items.
fn end(
    world: &World,
    names: &Names<'_>,
    graph: &mut Graph,
    end: &ast::End,
    reader: bool,
    broken: bool,
    found: &mut Diagnostics,
) -> Option<(Peer, Option<u32>)> {
    let name = &end.name;
    if let Some(node) = names.nodes.get(&name.text) {
        let element = &graph.nodes[*node].element;
        let ports = if reader { &element.inputs } else { &element.outputs };
        let number = end.port.map_or(1, |(number, _)| number);
        let at = usize::try_from(number).unwrap_or(usize::MAX).wrapping_sub(1);
        let Some(port) = ports.get(at) else {
            let span = end.port.map_or(name.span, |(_, span)| span);
            let side = if reader { "input" } else { "output" };
            found.push(
                Diagnostic::error(
                    "bad-port",
                    span,
                    format!("{} has no {side} port {number}", name.text),
                )
                .help(format!("{} has {} {side} ports", element.name, ports.len())),
            );
            return None;
        };
        return Some((Peer::Port { node: *node, port: at }, Some(port.bits)));
    }
    let declared = names.outside.get(&name.text).copied().or_else(|| {
        BUILT_IN.iter().find(|(known, _)| *known == name.text).map(|(_, input)| *input)
    });
    let Some(input) = declared else {
        // An instance that failed to lower has been reported.
        if !broken || !names.unit.instances.iter().any(|i| i.name.text == name.text) {
            found.push(
                Diagnostic::error(
                    "unknown-instance",
                    name.span,
                    format!("nothing in the graph is named {:?}", name.text),
                )
                .help(format!("Element :: {0}, or .input {0}, or .output {0}", name.text)),
            );
        }
        return None;
    };
    if input == reader {
        let (is, cannot) =
            if input { ("an input", "be written to") } else { ("an output", "be read from") };
        found.push(Diagnostic::error(
            "bad-direction",
            name.span,
            format!("{} is {is} of the graph: it cannot {cannot}", name.text),
        ));
        return None;
    }
    let declared = names.unit.outside.iter().find(|o| o.name.text == name.text);
    let bits = match declared.and_then(|outside| outside.ty.as_ref()) {
        Some(ty) => resolve(world, ty, &|_| None, found).map(|ty| world.bits(&ty)),
        None => Some(world.bits(&world.flit())),
    };
    let list = if reader { &mut graph.outputs } else { &mut graph.inputs };
    let at = match list.iter().position(|outside| outside.name == name.text) {
        Some(at) => at,
        None => {
            list.push(Outside { name: name.text.clone(), channel: 0 });
            list.len() - 1
        }
    };
    Some((Peer::Outside(at), bits))
}

fn unconnected(graph: &Graph, names: &Names<'_>, broken: bool, found: &mut Diagnostics) {
    for (at, node) in graph.nodes.iter().enumerate() {
        for (port, channel) in graph.inputs_of(at).iter().enumerate() {
            if channel.is_none() && !broken {
                let name = &node.element.inputs[port].name;
                found.push(
                    Diagnostic::error(
                        "unconnected",
                        node.span,
                        format!("input port {} ({name}) of {} has no writer", port + 1, node.name),
                    )
                    .label("this instance"),
                );
            }
        }
        for (port, channel) in graph.outputs_of(at).iter().enumerate() {
            if channel.is_none() && !broken {
                let name = &node.element.outputs[port].name;
                found.push(
                    Diagnostic::warning(
                        "unconnected",
                        node.span,
                        format!("output port {} ({name}) of {} has no reader", port + 1, node.name),
                    )
                    .label("what it writes is dropped")
                    .help("connect it to a Discard to say so"),
                );
            }
        }
    }
    for outside in &names.unit.outside {
        let name = &outside.name;
        let used = graph.inputs.iter().chain(&graph.outputs).any(|o| o.name == name.text);
        if !used && !broken {
            let message = format!("{} is not used", name.text);
            found.push(Diagnostic::warning("unconnected", name.span, message));
        }
    }
}
