//! Whole functions: the host's side of graphs whose tables it fills.
//!
//! [`Manager`] recognises a function by its elements and understands commands for it, in words:
//! `rules add tcp any -> any :443 drop`. Its answer is text; what the graph must be told are signals,
//! which the runtime applies in order, a few between two rounds of packets.

pub mod balancer;
pub mod firewall;
pub mod rules;
pub mod tables;
pub mod templates;

use beeline_ir::graph::Graph;
use beeline_ir::run::{Machine, Run, RunError, Signal};

use balancer::{Balancer, BalancerError};
use firewall::{Firewall, FirewallError};
use tables::Write;

/// Something whose elements answer signals between two iterations.
pub trait Signalled {
    /// Sends a signal to a node and gives its answer.
    ///
    /// Errors: a handler that does not end.
    fn signal_now(&mut self, node: usize, signal: Signal) -> Result<Signal, RunError>;
}

/// Signals that are kept instead of sent, for a model that plays them later; each is its own answer.
#[derive(Debug, Default)]
pub struct Kept(pub Vec<(usize, Signal)>);

impl Signalled for Kept {
    fn signal_now(&mut self, node: usize, signal: Signal) -> Result<Signal, RunError> {
        self.0.push((node, signal));
        Ok(signal)
    }
}

impl Kept {
    /// The signals of commands of a graph's functions, in their order.
    ///
    /// Errors: the first command that is refused, and why.
    pub fn of(graph: &Graph, commands: &[String]) -> Result<Self, (String, CommandError)> {
        let (mut manager, mut kept) = (Manager::of(graph), Self::default());
        for command in commands {
            let refused = |error| (command.clone(), error);
            manager.command(command, &mut kept).map_err(refused)?;
            while manager.apply(&mut kept, 1_024).map_err(|error| refused(error.into()))? {}
        }
        Ok(kept)
    }
}

impl<M: Machine> Signalled for Run<'_, M> {
    fn signal_now(&mut self, node: usize, signal: Signal) -> Result<Signal, RunError> {
        Run::signal_now(self, node, signal)
    }
}

/// A command was refused.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// By the firewall.
    #[error(transparent)]
    Firewall(#[from] FirewallError),
    /// By the balancer.
    #[error(transparent)]
    Balancer(#[from] BalancerError),
    /// The graph has no such function.
    #[error(
        "the graph has no element that understands '{0}': rules need FirewallVerdict and a table, backends need DipAlloc and BalancerEncap"
    )]
    NoFunction(String),
    /// A handler.
    #[error(transparent)]
    Run(#[from] RunError),
}

/// Rules shown by one `rules list`.
const SHOWN: usize = 500;

/// What the host knows about a graph's functions.
#[derive(Clone, Debug, Default)]
pub struct Manager {
    firewall: Option<Firewall>,
    balancer: Option<Balancer>,
    /// Signals that wait to be applied.
    pending: std::collections::VecDeque<Write>,
}

impl Manager {
    /// Whatever functions the graph has.
    #[must_use]
    pub fn of(graph: &Graph) -> Self {
        let pending = std::collections::VecDeque::new();
        Self { firewall: Firewall::of(graph), balancer: Balancer::of(graph), pending }
    }

    /// The manager of `graph`, which takes over from this one: what the user told this one, told
    /// anew. The signals that bring it to the elements wait; those of functions whose elements `kept`
    /// what they know are left out.
    ///
    /// Errors: a rule or a backend that the new graph has no place for; nothing has changed then.
    pub fn handed_over(
        &self,
        graph: &Graph,
        kept: &dyn Fn(usize) -> bool,
    ) -> Result<Self, CommandError> {
        let mut fresh = Self::of(graph);
        fresh.pending.clear();
        if let (Some(old), Some(new)) = (&self.firewall, &mut fresh.firewall) {
            if new.nodes().iter().all(|node| kept(*node)) && new.same_tables(old) {
                new.adopt(old);
            } else {
                let mut writes = Vec::new();
                new.enter(old, &mut writes)?;
                fresh.pending.extend(writes);
            }
        }
        if let (Some(old), Some(new)) = (&self.balancer, &mut fresh.balancer) {
            let mut writes = Vec::new();
            new.enter(old, &mut writes);
            // Backends keep their places, so telling an element what it knows changes nothing.
            fresh.pending.extend(writes);
        }
        Ok(fresh)
    }

    /// Nodes of the function that `node` is part of, where the manager keeps what they know: they are
    /// set back together.
    #[must_use]
    pub fn together(&self, node: usize) -> Vec<usize> {
        let of_firewall = self.firewall.as_ref().map(Firewall::nodes).unwrap_or_default();
        if of_firewall.contains(&node) { of_firewall } else { vec![node] }
    }

    /// The firewall, if the graph has one.
    #[must_use]
    pub fn firewall(&self) -> Option<&Firewall> {
        self.firewall.as_ref()
    }

    /// The balancer, if the graph has one.
    #[must_use]
    pub fn balancer(&self) -> Option<&Balancer> {
        self.balancer.as_ref()
    }

    /// Signals that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.pending.len()
    }

    /// Carries out a command, but for the signals that then wait.
    ///
    /// Errors: what is wrong with the command; nothing has changed then.
    pub fn command(
        &mut self,
        text: &str,
        run: &mut impl Signalled,
    ) -> Result<String, CommandError> {
        let text = text.trim();
        let (first, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        match first {
            "rules" if self.firewall.is_some() => self.rules(rest.trim(), run),
            "backends" | "flows" if self.balancer.is_some() => {
                let Some(balancer) = &mut self.balancer else {
                    return Err(CommandError::NoFunction(first.to_owned()));
                };
                if text == "flows"
                    && let Some((node, signal)) = balancer.counters()
                {
                    let a = run.signal_now(node, signal)?;
                    return Ok(format!(
                        "{} packets, {} found in the cache, {} looked up, {} dropped",
                        a[1], a[2], a[3], a[4]
                    ));
                }
                let mut writes = Vec::new();
                let answer = balancer.command(text, &mut writes)?;
                self.pending.extend(writes);
                Ok(answer)
            }
            _ => Err(CommandError::NoFunction(first.to_owned())),
        }
    }

    fn rules(&mut self, text: &str, run: &mut impl Signalled) -> Result<String, CommandError> {
        let Some(firewall) = &mut self.firewall else {
            return Err(CommandError::NoFunction("rules".to_owned()));
        };
        let (verb, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim();
        let wrong = || FirewallError::Command(format!("'rules {text}' is no command"));
        let action = |word: &str| match word {
            "drop" => Ok(true),
            "pass" => Ok(false),
            _ => Err(wrong()),
        };
        let mut writes = Vec::new();
        let answer = match verb {
            "add" | "insert" => {
                let rule = rest.parse().map_err(FirewallError::from)?;
                let added = firewall.add(rule, verb == "insert", &mut writes);
                self.pending.extend(writes.drain(..));
                format!("rule {}: {rule}", added?)
            }
            "remove" => {
                let number = rest.parse().map_err(|_| wrong())?;
                let rule = firewall.remove(number, &mut writes)?;
                format!("removed rule {number}: {rule}")
            }
            "clear" => {
                let all = firewall.rules();
                for (number, _) in &all {
                    firewall.remove(*number, &mut writes)?;
                }
                format!("removed {} rules", all.len())
            }
            "default" => {
                firewall.defaults(Some(action(rest)?), None, &mut writes);
                format!("IPv4 without a rule: {rest}")
            }
            "other" => {
                firewall.defaults(None, Some(action(rest)?), &mut writes);
                format!("packets that are not IPv4: {rest}")
            }
            "counters" => {
                let (node, signal) = firewall.counters();
                let a = run.signal_now(node, signal)?;
                format!(
                    "{} passed, {} dropped, {} of them by rules; {} not IPv4, {} unreadable\n{}",
                    a[1],
                    a[2],
                    a[3],
                    a[4],
                    a[5],
                    firewall.fill()
                )
            }
            "list" => {
                let from = if rest.is_empty() { 0 } else { rest.parse().map_err(|_| wrong())? };
                let all = firewall.rules();
                let mut lines = Vec::new();
                for (number, rule) in all.iter().skip(from).take(SHOWN) {
                    let (node, signal) = firewall.hits(*number);
                    let hits = run.signal_now(node, signal)?[2];
                    lines.push(format!("{number}: {rule} ({hits} packets)"));
                }
                if all.len() > from + SHOWN {
                    lines.push(format!("rules list {} shows more", from + SHOWN));
                }
                lines.join("\n")
            }
            _ => return Err(wrong().into()),
        };
        self.pending.extend(writes);
        Ok(answer)
    }

    /// Applies at most `most` of the signals that wait; true while some are left.
    ///
    /// Errors: a handler that does not end.
    pub fn apply(&mut self, run: &mut impl Signalled, most: usize) -> Result<bool, RunError> {
        for _ in 0..most {
            let Some((node, signal)) = self.pending.pop_front() else { return Ok(false) };
            run.signal_now(node, signal)?;
        }
        Ok(!self.pending.is_empty())
    }
}
