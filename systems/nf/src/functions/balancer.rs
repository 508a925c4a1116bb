//! The load balancer's manager: the list of backends.

use std::net::Ipv4Addr;

use beeline_ir::graph::Graph;

use super::tables::{Target, Write};

/// A command was refused; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BalancerError {
    /// A command.
    #[error(
        "'{0}' is no command: backends add ADDRESS [NETWORK], backends remove ADDRESS, backends list, flows"
    )]
    Command(String),
    /// An address.
    #[error("{0} is no address of a backend")]
    NoSuchBackend(String),
    /// Every place is taken.
    #[error("there is room for 256 backends")]
    Full,
}

/// Places for backends.
const PLACES: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Backend {
    address: Ipv4Addr,
    network: u32,
    /// Gets new flows.
    active: bool,
    /// The number of its removal, where it was removed.
    removal: u64,
}

/// Backends of a graph.
#[derive(Clone, Debug)]
pub struct Balancer {
    allocator: Target,
    encap: Target,
    steer: Option<Target>,
    backends: Vec<Backend>,
    /// Removals so far.
    removals: u64,
}

impl Balancer {
    /// The balancer of a graph with an allocator and an encapsulation.
    #[must_use]
    pub fn of(graph: &Graph) -> Option<Self> {
        let find = |element: &str| {
            let node = graph.nodes.iter().position(|node| node.element.name == element)?;
            Some(Target { node, id: graph.nodes[node].id })
        };
        let (allocator, encap) = (find("DipAlloc")?, find("BalancerEncap")?);
        Some(Self { allocator, encap, steer: find("FlowSteer"), backends: Vec::new(), removals: 0 })
    }

    /// Takes over the backends of another manager, each in its place.
    pub(super) fn enter(&mut self, old: &Self, writes: &mut Vec<Write>) {
        self.backends.clone_from(&old.backends);
        self.removals = old.removals;
        for (place, backend) in self.backends.iter().enumerate() {
            let fields =
                [place as u64, u64::from(u32::from(backend.address)), u64::from(backend.network)];
            writes.push(self.encap.write(1, &fields));
        }
        if !self.backends.is_empty() {
            self.list(writes);
        }
    }

    /// A signal that asks for the packets, cache hits, table lookups and drops.
    #[must_use]
    pub fn counters(&self) -> Option<Write> {
        self.steer.map(|steer| steer.write(0, &[]))
    }

    /// Carries out `backends ...`.
    ///
    /// Errors: what is wrong with it.
    pub fn command(
        &mut self,
        text: &str,
        writes: &mut Vec<Write>,
    ) -> Result<String, BalancerError> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let wrong = || BalancerError::Command(text.to_owned());
        let address = |word: &str| {
            word.parse::<Ipv4Addr>().map_err(|_| BalancerError::NoSuchBackend(word.to_owned()))
        };
        match words.as_slice() {
            ["backends", "add", to, rest @ ..] => {
                let network = match rest {
                    [] => 1,
                    [network] => network.parse().ok().filter(|n| *n < 1 << 24).ok_or_else(wrong)?,
                    _ => return Err(wrong()),
                };
                self.add(address(to)?, network, writes)?;
                Ok(format!("{} backends", self.active().count()))
            }
            ["backends", "remove", to] => {
                let gone = address(to)?;
                let found = self.backends.iter_mut().find(|b| b.active && b.address == gone);
                let Some(backend) = found else {
                    return Err(BalancerError::NoSuchBackend((*to).to_owned()));
                };
                self.removals += 1;
                (backend.active, backend.removal) = (false, self.removals);
                self.list(writes);
                Ok(format!("{} backends; flows of {gone} stay with it", self.active().count()))
            }
            ["backends", "list"] => {
                let line = |b: &Backend| {
                    let state = if b.active { "" } else { ", no new flows" };
                    format!("{} network {}{state}", b.address, b.network)
                };
                Ok(self.backends.iter().map(line).collect::<Vec<_>>().join("\n"))
            }
            _ => Err(wrong()),
        }
    }

    fn active(&self) -> impl Iterator<Item = usize> + '_ {
        self.backends.iter().enumerate().filter(|(_, b)| b.active).map(|(at, _)| at)
    }

    fn add(
        &mut self,
        address: Ipv4Addr,
        network: u32,
        writes: &mut Vec<Write>,
    ) -> Result<(), BalancerError> {
        // A backend that comes back takes its old place: its flows are still there.
        let known = self.backends.iter().position(|b| b.address == address);
        let place = match known {
            Some(place) => place,
            None if self.backends.len() < PLACES => self.backends.len(),
            // What is left of the flows of the one that was removed first goes to the new one.
            None => {
                let idle = self.backends.iter().enumerate().filter(|(_, backend)| !backend.active);
                let first = idle.min_by_key(|(_, backend)| backend.removal);
                first.map(|(place, _)| place).ok_or(BalancerError::Full)?
            }
        };
        let backend = Backend { address, network, active: true, removal: 0 };
        if place == self.backends.len() {
            self.backends.push(backend);
        } else {
            self.backends[place] = backend;
        }
        let fields = [place as u64, u64::from(u32::from(address)), u64::from(network)];
        // The address first: no flow may come to a place that leads nowhere.
        writes.push(self.encap.write(1, &fields));
        self.list(writes);
        Ok(())
    }

    fn list(&self, writes: &mut Vec<Write>) {
        let active: Vec<usize> = self.active().collect();
        for (at, backend) in active.iter().enumerate() {
            writes.push(self.allocator.write(1, &[at as u64, *backend as u64]));
        }
        writes.push(self.allocator.write(2, &[active.len() as u64]));
    }
}
