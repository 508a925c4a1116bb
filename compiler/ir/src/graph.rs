//! Instances and channels.

use beeline_syntax::Span;

use crate::tree::Element;

/// Entries of a channel whose edge does not say.
pub const DEPTH: u32 = 16;

/// One end of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// Port `port` (from 0) of a node.
    Port {
        /// Which node.
        node: usize,
        /// Which port.
        port: usize,
    },
    /// The world, by its place in [`Graph::inputs`] or [`Graph::outputs`].
    Outside(usize),
}

/// A bounded queue with one writer and one reader.
#[derive(Clone, Debug)]
pub struct Channel {
    /// `a[1]->b[1]`, as shown in reports and logs.
    pub name: String,
    /// Width of an item.
    pub bits: u32,
    /// Entries.
    pub depth: u32,
    /// Writer.
    pub from: Peer,
    /// Reader.
    pub to: Peer,
    /// The arrow.
    pub span: Span,
}

/// An instance.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Its element, lowered with its parameters.
    pub element: Element,
    /// Always on the processor.
    pub host: bool,
    /// Hand-written Verilog in hardware.
    pub verilog: bool,
    /// The manager may signal it.
    pub signalled: bool,
    /// Address of its signals, from 1, stable while the file's order of instances is.
    pub id: u16,
    /// Where it is declared.
    pub span: Span,
}

/// A name for the world.
#[derive(Clone, Debug)]
pub struct Outside {
    /// The name.
    pub name: String,
    /// Its channel.
    pub channel: usize,
}

/// A checked graph.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Instances in the order of the file.
    pub nodes: Vec<Node>,
    /// Channels in the order of the file.
    pub channels: Vec<Channel>,
    /// What the world writes.
    pub inputs: Vec<Outside>,
    /// What the world reads.
    pub outputs: Vec<Outside>,
}

impl Graph {
    /// For each input port of a node, its channel.
    #[must_use]
    pub fn inputs_of(&self, node: usize) -> Vec<Option<usize>> {
        let find =
            |port| self.channels.iter().position(|channel| channel.to == Peer::Port { node, port });
        (0..self.nodes[node].element.inputs.len()).map(find).collect()
    }

    /// For each output port of a node, its channel; none where nothing is connected.
    #[must_use]
    pub fn outputs_of(&self, node: usize) -> Vec<Option<usize>> {
        let find = |port| {
            self.channels.iter().position(|channel| channel.from == Peer::Port { node, port })
        };
        (0..self.nodes[node].element.outputs.len()).map(find).collect()
    }

    /// The node of that name.
    #[must_use]
    pub fn node_named(&self, name: &str) -> Option<usize> {
        self.nodes.iter().position(|node| node.name == name)
    }

    /// Nodes so that a writer stands before its readers; edges back are broken in the file's order.
    #[must_use]
    pub fn topological(&self) -> Vec<usize> {
        let count = self.nodes.len();
        let mut order = Vec::with_capacity(count);
        let mut state = vec![0_u8; count];
        // Readers first, reversed at the end; an explicit stack keeps long chains off ours.
        for root in (0..count).rev() {
            let mut stack = vec![(root, false)];
            while let Some((node, done)) = stack.pop() {
                if done {
                    if state[node] == 1 {
                        state[node] = 2;
                        order.push(node);
                    }
                    continue;
                }
                if state[node] != 0 {
                    continue;
                }
                state[node] = 1;
                stack.push((node, true));
                for channel in &self.channels {
                    if let (Peer::Port { node: from, .. }, Peer::Port { node: to, .. }) =
                        (channel.from, channel.to)
                        && from == node
                        && state[to] == 0
                    {
                        stack.push((to, false));
                    }
                }
            }
        }
        order.reverse();
        order
    }

    /// True where a channel leads back to an earlier node.
    #[must_use]
    pub fn cyclic(&self) -> bool {
        let order = self.topological();
        let mut rank = vec![0; self.nodes.len()];
        for (at, node) in order.iter().enumerate() {
            rank[*node] = at;
        }
        self.channels.iter().any(|channel| match (channel.from, channel.to) {
            (Peer::Port { node: from, .. }, Peer::Port { node: to, .. }) => rank[from] >= rank[to],
            _ => false,
        })
    }
}
