//! What has passed through a running graph, for `beeline nf top`.

use beeline_ir::graph::Graph;
use beeline_ir::run::{Machine, Run};
use serde::{Deserialize, Serialize};

use crate::live::Passed;

/// The command that asks for them.
pub const COMMAND: &str = "statistics";

/// Everything counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// At the interfaces.
    pub ports: Passed,
    /// Channels in the graph's order.
    pub channels: Vec<Channel>,
    /// Elements in the graph's order.
    pub elements: Vec<Element>,
}

/// One channel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channel {
    /// `a[1]->b[1]`.
    pub channel: String,
    /// Items that went in.
    pub items: u64,
    /// Items inside.
    pub waiting: usize,
    /// Room.
    pub depth: u32,
}

/// One element.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Element {
    /// Instance.
    pub instance: String,
    /// Iterations, with those that found nothing to do.
    pub iterations: u64,
}

impl Statistics {
    /// Of a run.
    #[must_use]
    pub fn of<M: Machine>(graph: &Graph, run: &Run<'_, M>, ports: Passed) -> Self {
        let channel = |(at, channel): (usize, &beeline_ir::graph::Channel)| Channel {
            channel: channel.name.clone(),
            items: run.channel(at).passed,
            waiting: run.channel(at).len(),
            depth: channel.depth,
        };
        let element = |(at, node): (usize, &beeline_ir::graph::Node)| Element {
            instance: node.name.clone(),
            iterations: run.iterations(at),
        };
        Self {
            ports,
            channels: graph.channels.iter().enumerate().map(channel).collect(),
            elements: graph.nodes.iter().enumerate().map(element).collect(),
        }
    }
}
