//! What the host keeps of the firewall's tables, and the signals that change them.
//!
//! Invariants: after every single signal, a lookup answers what it answered before the change or
//! what it answers after it; a table's shadow here is what the element's memory holds once every
//! signal so far has been applied.

mod exact;
mod hashed;
mod prefix;
mod ternary;

use beeline_ir::run::Signal;

pub use exact::Exact;
pub use hashed::Hashed;
pub use prefix::Prefixes;
pub use ternary::Ternary;

/// A signal and the node it goes to.
pub type Write = (usize, Signal);

/// What a table answers for a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Verdict {
    /// The highest one wins.
    pub rank: u32,
    /// Number and action, as the verdict element reads them; never zero.
    pub value: u32,
}

/// The element of a table.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Node.
    pub node: usize,
    /// Its address.
    pub id: u16,
}

impl Target {
    /// A signal to this node.
    #[must_use]
    pub fn write(self, command: u64, parameters: &[u64]) -> Write {
        let mut signal: Signal = [0; 8];
        signal[0] = u64::from(self.id) | command << 16;
        for (to, from) in signal[1..].iter_mut().zip(parameters) {
            *to = *from;
        }
        (self.node, signal)
    }
}
