//! What has passed through a running graph, for `beeline nf top` and `/metrics`.

use std::fmt::Write as _;

use beeline_ir::run::Machine;
use serde::{Deserialize, Serialize};

use crate::live::Passed;
use crate::pcie::bus::Counts;
use crate::sides::Sides;

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
    /// The link to `host` elements, where there are any.
    #[serde(default)]
    pub link: Option<Counts>,
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
    pub fn of<M: Machine + Send + 'static>(run: &Sides<'_, M>, ports: Passed) -> Self {
        let graph = run.plan().whole();
        let channel = |(at, channel): (usize, &beeline_ir::graph::Channel)| Channel {
            channel: channel.name.clone(),
            items: run.passed(at),
            waiting: run.waiting(at),
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
            link: run.link(),
        }
    }

    /// As OpenMetrics text: what passed at the ports, in each channel and each element.
    #[must_use]
    pub fn exposition(&self) -> String {
        let mut text = String::new();
        let mut family = |name: &str, kind: &str, help: &str, samples: Vec<(String, u64)>| {
            let end = if kind == "counter" { "_total" } else { "" };
            let _ = writeln!(text, "# HELP beeline_nf_{name} {help}");
            let _ = writeln!(text, "# TYPE beeline_nf_{name} {kind}");
            for (labels, value) in samples {
                let _ = writeln!(text, "beeline_nf_{name}{end}{labels} {value}");
            }
        };
        let ports = &self.ports;
        let one = |value: u64| vec![(String::new(), value)];
        family("received_packets", "counter", "Packets in.", one(ports.received));
        family("sent_packets", "counter", "Packets out.", one(ports.sent));
        let help = "Packets that a device did not take.";
        family("refused_packets", "counter", help, one(ports.refused));
        let help = "Packets that came while a device's ring was full.";
        family("missed_packets", "counter", help, one(ports.missed));
        let help = "Flits that were no packet.";
        family("malformed_flits", "counter", help, one(ports.malformed));
        family("signals", "counter", "Signals answered.", one(ports.signals));
        family("commands", "counter", "Commands answered.", one(ports.commands));
        family("reloads", "counter", "Graphs that took over from another.", one(ports.reloads));
        if let Some(link) = &self.link {
            let help = "Doorbells and other registers that the host wrote.";
            family("link_doorbells", "counter", help, one(link.mmio_writes));
            let help = "Interrupts of the card.";
            family("link_interrupts", "counter", help, one(link.interrupts));
            let help = "Notices not sent, because the reader was awake.";
            family("link_suppressed_notices", "counter", help, one(link.suppressed));
        }
        let channels = |value: fn(&Channel) -> u64| {
            let sample = |c: &Channel| (format!("{{channel=\"{}\"}}", c.channel), value(c));
            self.channels.iter().map(sample).collect::<Vec<_>>()
        };
        let help = "Items that went into a channel.";
        family("channel_items", "counter", help, channels(|c| c.items));
        let help = "Items inside a channel.";
        family("channel_waiting", "gauge", help, channels(|c| c.waiting as u64));
        family("channel_depth", "gauge", "Room of a channel.", channels(|c| u64::from(c.depth)));
        let sample = |e: &Element| (format!("{{instance=\"{}\"}}", e.instance), e.iterations);
        let iterations = self.elements.iter().map(sample).collect();
        let help = "Iterations of an element, with those that found nothing to do.";
        family("iterations", "counter", help, iterations);
        text.push_str("# EOF\n");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exposition_names_each_channel_and_element() {
        let name = |name: &str| name.to_owned();
        let statistics = Statistics {
            ports: Passed { received: 7, ..Passed::default() },
            channels: vec![Channel {
                channel: name("a[1]->b[1]"),
                items: 5,
                waiting: 2,
                depth: 16,
            }],
            elements: vec![Element { instance: name("a"), iterations: 9 }],
            link: Some(Counts { mmio_writes: 3, ..Counts::default() }),
        };
        let text = statistics.exposition();
        for line in [
            "# TYPE beeline_nf_received_packets counter",
            "beeline_nf_received_packets_total 7",
            "beeline_nf_channel_items_total{channel=\"a[1]->b[1]\"} 5",
            "beeline_nf_channel_waiting{channel=\"a[1]->b[1]\"} 2",
            "beeline_nf_channel_depth{channel=\"a[1]->b[1]\"} 16",
            "beeline_nf_iterations_total{instance=\"a\"} 9",
            "beeline_nf_link_doorbells_total 3",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
