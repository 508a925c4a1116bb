//! A graph cut in two: what runs on the card, and its `host` elements.
//!
//! A channel between the two sides becomes two, with a work queue of the link between them. The
//! world's ports are the card's: a packet for a `host` element crosses the link too.

use beeline_ir::graph::{Channel, Graph, Outside, Peer};

use crate::pcie::DATA_SLOTS;
use crate::pcie::bus::Direction;

/// A channel that crosses.
#[derive(Clone, Copy, Debug)]
pub struct Crossing {
    /// From the card's point of view.
    pub direction: Direction,
    /// Its channel in the card's graph.
    pub card: usize,
    /// Its channel in the host's graph.
    pub host: usize,
}

/// Where a node or a channel of the whole graph is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the card, by its number there.
    Card(usize),
    /// On the host.
    Host(usize),
}

/// More channels cross than the link has slots.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0} channels lead between host elements and the others, the link has {DATA_SLOTS} data slots: take 'host' from an instance, or join channels"
)]
pub struct TooManyCrossings(pub usize);

/// The two graphs.
#[derive(Clone, Debug)]
pub struct Split {
    /// Every instance but the `host` ones; the world's ends in the whole graph's order come first.
    pub card: Graph,
    /// The `host` instances.
    pub host: Graph,
    /// In the order of the data slots.
    pub crossings: Vec<Crossing>,
    /// Where each node of the whole graph went.
    pub nodes: Vec<Place>,
    /// Where each channel's writer is, and for one that crosses that is its first half.
    pub channels: Vec<Place>,
}

/// Cuts a graph.
///
/// Errors: more channels cross than the link has slots.
pub fn split(graph: &Graph) -> Result<Split, TooManyCrossings> {
    let (mut card, mut host) = (Graph::default(), Graph::default());
    let mut nodes = Vec::new();
    for node in &graph.nodes {
        let side = if node.host { &mut host } else { &mut card };
        side.nodes.push(node.clone());
        let at = side.nodes.len() - 1;
        nodes.push(if node.host { Place::Host(at) } else { Place::Card(at) });
    }
    // The world's ends keep their places; their channels are known below.
    card.inputs.clone_from(&graph.inputs);
    card.outputs.clone_from(&graph.outputs);
    let mut crossings = Vec::new();
    let mut channels = Vec::new();
    for channel in &graph.channels {
        let place = |peer: Peer| match peer {
            Peer::Port { node, .. } => nodes[node],
            Peer::Outside(_) => Place::Card(0),
        };
        let moved = |peer: Peer| match (peer, place(peer)) {
            (Peer::Port { port, .. }, Place::Card(node) | Place::Host(node)) => {
                Peer::Port { node, port }
            }
            (outside, _) => outside,
        };
        let on_host = |peer| matches!(place(peer), Place::Host(_));
        let (from, to) = (moved(channel.from), moved(channel.to));
        let half = |from, to| Channel { from, to, ..channel.clone() };
        let outside = |at| Outside { name: channel.name.clone(), channel: at };
        let (on_card, on_the_host) = (card.channels.len(), host.channels.len());
        match (on_host(channel.from), on_host(channel.to)) {
            (false, false) => {
                card.channels.push(half(from, to));
                channels.push(Place::Card(on_card));
                world(&mut card, from, to, on_card);
            }
            (true, true) => {
                host.channels.push(half(from, to));
                channels.push(Place::Host(on_the_host));
            }
            (false, true) => {
                card.channels.push(half(from, Peer::Outside(card.outputs.len())));
                card.outputs.push(outside(on_card));
                host.channels.push(half(Peer::Outside(host.inputs.len()), to));
                host.inputs.push(outside(on_the_host));
                channels.push(Place::Card(on_card));
                // The writer may be the world.
                if let Peer::Outside(at) = from {
                    card.inputs[at].channel = on_card;
                }
                let direction = Direction::Up;
                crossings.push(Crossing { direction, card: on_card, host: on_the_host });
            }
            (true, false) => {
                host.channels.push(half(from, Peer::Outside(host.outputs.len())));
                host.outputs.push(outside(on_the_host));
                card.channels.push(half(Peer::Outside(card.inputs.len()), to));
                card.inputs.push(outside(on_card));
                channels.push(Place::Host(on_the_host));
                if let Peer::Outside(at) = to {
                    card.outputs[at].channel = on_card;
                }
                let direction = Direction::Down;
                crossings.push(Crossing { direction, card: on_card, host: on_the_host });
            }
        }
    }
    if crossings.len() > DATA_SLOTS {
        return Err(TooManyCrossings(crossings.len()));
    }
    Ok(Split { card, host, crossings, nodes, channels })
}

/// The world's ends of a channel that stays on the card.
fn world(card: &mut Graph, from: Peer, to: Peer, channel: usize) {
    if let Peer::Outside(at) = from {
        card.inputs[at].channel = channel;
    }
    if let Peer::Outside(at) = to {
        card.outputs[at].channel = channel;
    }
}
