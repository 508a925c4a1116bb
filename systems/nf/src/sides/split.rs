//! A graph cut in parts: what runs on the card, and what workers run, each on a thread of its own: the
//! `host` elements, and what [`spread`](super::spread()) gives to more threads.
//!
//! A channel between the card and a worker becomes two, with a work queue of the worker's link between
//! them. One from worker to worker leads over the card, which so is the only other side of every link.
//! The world's ports are the card's: a packet for a worker's element crosses a link too.

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
    /// Its channel in the worker's graph.
    pub worker: usize,
}

/// Where a node or a channel of the whole graph is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the card, by its number there.
    Card(usize),
    /// At a worker, by the worker's number and its own number there.
    Worker(usize, usize),
}

/// More channels cross than a link has slots.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0} channels lead between host elements and the others, the link has {DATA_SLOTS} data slots: take 'host' from an instance, or join channels"
)]
pub struct TooManyCrossings(pub usize);

/// A worker's part.
#[derive(Clone, Debug, Default)]
pub struct Part {
    /// Its instances.
    pub graph: Graph,
    /// Channels between it and the card, in the order of the link's data slots.
    pub crossings: Vec<Crossing>,
    /// Its nodes' numbers in the whole graph.
    pub nodes: Vec<usize>,
}

impl Part {
    /// A channel between the worker and its link; its number.
    fn half(&mut self, channel: Channel, card: usize, direction: Direction) -> usize {
        let at = self.graph.channels.len();
        let outside = Outside { name: channel.name.clone(), channel: at };
        self.graph.channels.push(channel);
        match direction {
            Direction::Up => self.graph.inputs.push(outside),
            Direction::Down => self.graph.outputs.push(outside),
        }
        self.crossings.push(Crossing { direction, card, worker: at });
        at
    }
}

/// The parts.
#[derive(Clone, Debug)]
pub struct Split {
    /// What no worker runs; the world's ends in the whole graph's order come first.
    pub card: Graph,
    /// What each worker runs.
    pub workers: Vec<Part>,
    /// Where each node of the whole graph went.
    pub nodes: Vec<Place>,
    /// Where each channel's writer is, and for one that crosses that is its first half.
    pub channels: Vec<Place>,
}

/// Entries that each half of a channel between threads has at least: items cross in groups.
const GROUP: u32 = 128;

/// Cuts a graph: `away` says which worker runs a node, of `workers`.
///
/// Errors: more channels cross than a link has slots.
///
/// # Panics
/// A worker past the last one.
pub fn split(
    graph: &Graph,
    away: &[Option<usize>],
    workers: usize,
) -> Result<Split, TooManyCrossings> {
    let mut card = Graph::default();
    let mut parts = vec![Part::default(); workers];
    let mut nodes = Vec::new();
    for (at, node) in graph.nodes.iter().enumerate() {
        nodes.push(match away[at] {
            Some(worker) => {
                parts[worker].graph.nodes.push(node.clone());
                parts[worker].nodes.push(at);
                Place::Worker(worker, parts[worker].nodes.len() - 1)
            }
            None => {
                card.nodes.push(node.clone());
                Place::Card(card.nodes.len() - 1)
            }
        });
    }
    // The world's ends keep their places; their channels are known below.
    card.inputs.clone_from(&graph.inputs);
    card.outputs.clone_from(&graph.outputs);
    let mut channels = Vec::new();
    for channel in &graph.channels {
        let at = card.channels.len();
        let worker = |peer: Peer| match peer {
            Peer::Port { node, .. } => away[node],
            Peer::Outside(_) => None,
        };
        let moved = |peer: Peer| match peer {
            Peer::Port { node, port } => {
                let (Place::Card(node) | Place::Worker(_, node)) = nodes[node];
                Peer::Port { node, port }
            }
            outside @ Peer::Outside(_) => outside,
        };
        let (writer, reader) = (worker(channel.from), worker(channel.to));
        let whole = Channel { from: moved(channel.from), to: moved(channel.to), ..channel.clone() };
        if let (Some(one), true) = (writer, writer == reader) {
            let inside = &mut parts[one].graph.channels;
            channels.push(Place::Worker(one, inside.len()));
            inside.push(whole);
            continue;
        }
        let of_host =
            |peer: Peer| matches!(peer, Peer::Port { node, .. } if graph.nodes[node].host);
        let slow = of_host(channel.from) || of_host(channel.to) || (writer, reader) == (None, None);
        let depth = if slow { channel.depth } else { channel.depth.max(GROUP) };
        let mut of_card = Channel { depth, ..whole.clone() };
        let mut first = Place::Card(at);
        match writer {
            Some(worker) => {
                let to = Peer::Outside(parts[worker].graph.outputs.len());
                let half = Channel { to, depth, ..whole.clone() };
                first = Place::Worker(worker, parts[worker].half(half, at, Direction::Down));
                of_card.from = Peer::Outside(card.inputs.len());
                card.inputs.push(Outside { name: channel.name.clone(), channel: at });
            }
            None => {
                if let Peer::Outside(end) = channel.from {
                    card.inputs[end].channel = at;
                }
            }
        }
        match reader {
            Some(worker) => {
                let from = Peer::Outside(parts[worker].graph.inputs.len());
                let half = Channel { from, depth, ..whole };
                parts[worker].half(half, at, Direction::Up);
                of_card.to = Peer::Outside(card.outputs.len());
                card.outputs.push(Outside { name: channel.name.clone(), channel: at });
            }
            None => {
                if let Peer::Outside(end) = channel.to {
                    card.outputs[end].channel = at;
                }
            }
        }
        card.channels.push(of_card);
        channels.push(first);
    }
    match parts.iter().map(|part| part.crossings.len()).find(|count| *count > DATA_SLOTS) {
        Some(count) => Err(TooManyCrossings(count)),
        None => Ok(Split { card, workers: parts, nodes, channels }),
    }
}
