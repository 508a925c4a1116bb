//! Graphs to begin with.

/// Names, what they are, texts.
const ALL: &[(&str, &str, &str)] = &[
    ("counter", "counts packets", include_str!("../../examples/counter.np")),
    ("port", "drops TCP packets to one port", include_str!("../../examples/port.np")),
    ("knock", "a port-knocking filter", include_str!("../../examples/knock.np")),
    ("firewall", "a firewall with rules", include_str!("../../examples/firewall.np")),
    ("balancer", "an L4 load balancer", include_str!("../../examples/balancer.np")),
    ("generator", "a packet generator", include_str!("../../examples/generator.np")),
    ("capture", "a packet capture", include_str!("../../examples/capture.np")),
    ("pfabric", "a pFabric queue", include_str!("../../examples/pfabric.np")),
];

/// The text of a template.
#[must_use]
pub fn text(name: &str) -> Option<&'static str> {
    ALL.iter().find(|(known, ..)| *known == name).map(|(.., text)| *text)
}

/// Every template's name and what it is.
pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    ALL.iter().map(|(name, what, _)| (*name, *what))
}
