//! The firewall's manager: rules as they are listed, spread over the tables of a graph.
//!
//! A rule goes, piece by piece, where it costs least: a whole key to the exact table, a destination
//! prefix to the tree, a masked key to a hash table with its mask, and what is left to the TCAM.
//! A rule that finds no place changes nothing.

use std::collections::{BTreeMap, HashSet};

use beeline_ir::graph::Graph;

use super::rules::{Key, Masked, Rule, RuleError};
use super::tables::{Exact, Hashed, Prefixes, Target, Ternary, Verdict, Write};

/// A command was refused; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FirewallError {
    /// A rule's text.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// No table has room.
    #[error(
        "the rule tables are full: '{rule}' finds no place beside {rules} rules ({fill}); remove rules, or give the tables larger parameters"
    )]
    Full {
        /// The rule.
        rule: String,
        /// How many there are.
        rules: usize,
        /// What the tables hold.
        fill: String,
    },
    /// No such number.
    #[error("there is no rule {0}")]
    NoSuchRule(u32),
    /// Numbers or ranks.
    #[error("no more rules can be numbered: {0} rules at once, or 4 million since the start")]
    Numbers(usize),
    /// A command.
    #[error(
        "{0}: rules add|insert RULE, rules remove NUMBER, rules list [FROM], rules clear, rules default pass|drop, rules other pass|drop, rules counters"
    )]
    Command(String),
}

/// Where a piece of a rule lies.
#[derive(Clone, Copy, Debug)]
enum Home {
    Exact,
    Prefix,
    Hashed,
    Ternary,
}

#[derive(Clone, Debug)]
struct Listed {
    rule: Rule,
    verdict: Verdict,
    homes: Vec<(Masked, Home)>,
}

/// Rules of a graph.
#[derive(Clone, Debug)]
pub struct Firewall {
    exact: Option<Exact>,
    prefix: Option<Prefixes>,
    hashed: Option<Hashed>,
    ternary: Option<Ternary>,
    verdict: Target,
    rules: BTreeMap<u32, Listed>,
    /// Ranks of the next rule at the end and at the front.
    next: (u32, u32),
    free: u32,
    defaults: (bool, bool),
}

/// Numbers of rules.
const NUMBERS: u32 = 65_535;
const MIDDLE: u32 = 1 << 22;
const HIGHEST: u32 = (1 << 23) - 1;

impl Firewall {
    /// The firewall of a graph that has a verdict element and at least one table.
    #[must_use]
    pub fn of(graph: &Graph) -> Option<Self> {
        let find = |element: &str| {
            let node = graph.nodes.iter().position(|node| node.element.name == element)?;
            Some((Target { node, id: graph.nodes[node].id }, &graph.nodes[node].element))
        };
        let size = |element: &beeline_ir::tree::Element, memory: &str| {
            let id = element.mem_named(memory)?;
            Some(element.mem(id).dimensions.clone())
        };
        let (verdict, _) = find("FirewallVerdict")?;
        let exact = find("CuckooHash").and_then(|(target, element)| {
            Some(Exact::new(target, *size(element, "table")?.last()?))
        });
        let hashed = find("HashTCAM").and_then(|(target, element)| {
            let size = size(element, "entries")?;
            Some(Hashed::new(target, *size.first()?, *size.last()?))
        });
        let ternary = find("BramTCAM").and_then(|(target, element)| {
            let groups = size(element, "value")?.first()? / 64;
            Some(Ternary::new(target, groups))
        });
        let prefix = find("LPM_Tree").and_then(|(target, element)| {
            let levels = size(element, "result")?.first()?.trailing_zeros().checked_sub(1)?;
            Some(Prefixes::new(target, levels))
        });
        if exact.is_none() && hashed.is_none() && ternary.is_none() && prefix.is_none() {
            return None;
        }
        let (rules, next, defaults) = (BTreeMap::new(), (MIDDLE - 1, MIDDLE), (false, false));
        Some(Self { exact, prefix, hashed, ternary, verdict, rules, next, free: 0, defaults })
    }

    /// The elements that hold what this manager knows.
    #[must_use]
    pub fn nodes(&self) -> Vec<usize> {
        let tables = [
            self.exact.as_ref().map(Exact::target),
            self.prefix.as_ref().map(Prefixes::target),
            self.hashed.as_ref().map(Hashed::target),
            self.ternary.as_ref().map(Ternary::target),
        ];
        let tables = tables.into_iter().flatten().map(|target| target.node);
        tables.chain([self.verdict.node]).collect()
    }

    /// True where the tables are of the same kinds and sizes.
    pub(super) fn same_tables(&self, other: &Self) -> bool {
        self.exact.as_ref().map(Exact::size) == other.exact.as_ref().map(Exact::size)
            && self.prefix.as_ref().map(Prefixes::size) == other.prefix.as_ref().map(Prefixes::size)
            && self.hashed.as_ref().map(Hashed::size) == other.hashed.as_ref().map(Hashed::size)
            && self.ternary.as_ref().map(Ternary::size) == other.ternary.as_ref().map(Ternary::size)
    }

    /// Takes over what another manager of equal tables knows; the elements kept it.
    pub(super) fn adopt(&mut self, old: &Self) {
        let verdict = self.verdict;
        let targets = (
            self.exact.as_ref().map(Exact::target),
            self.prefix.as_ref().map(Prefixes::target),
            self.hashed.as_ref().map(Hashed::target),
            self.ternary.as_ref().map(Ternary::target),
        );
        *self = old.clone();
        self.verdict = verdict;
        if let (Some(table), Some(target)) = (&mut self.exact, targets.0) {
            table.lead_to(target);
        }
        if let (Some(table), Some(target)) = (&mut self.prefix, targets.1) {
            table.lead_to(target);
        }
        if let (Some(table), Some(target)) = (&mut self.hashed, targets.2) {
            table.lead_to(target);
        }
        if let (Some(table), Some(target)) = (&mut self.ternary, targets.3) {
            table.lead_to(target);
        }
    }

    /// Adds the rules of another manager to this one, which has none, in their order. Their numbers
    /// stay.
    ///
    /// Errors: a rule finds no place.
    pub(super) fn enter(
        &mut self,
        old: &Self,
        writes: &mut Vec<Write>,
    ) -> Result<(), FirewallError> {
        for (number, rule) in old.rules() {
            self.free = number;
            self.add(rule, false, writes)?;
        }
        self.free = old.free;
        self.defaults(Some(old.defaults.0), Some(old.defaults.1), writes);
        Ok(())
    }

    /// Rules in the order in which they are asked, with their numbers.
    #[must_use]
    pub fn rules(&self) -> Vec<(u32, Rule)> {
        let mut all: Vec<&Listed> = self.rules.values().collect();
        all.sort_by_key(|listed| std::cmp::Reverse(listed.verdict.rank));
        all.iter().map(|listed| ((listed.verdict.value & 0xffff) - 1, listed.rule)).collect()
    }

    /// What becomes of a packet: the first rule that matches, by looking at each; or the default.
    #[must_use]
    pub fn linear(&self, key: Key) -> Option<(u32, bool)> {
        let mut best: Option<&Listed> = None;
        for listed in self.rules.values().filter(|listed| listed.rule.matches(key)) {
            if best.is_none_or(|best| best.verdict.rank < listed.verdict.rank) {
                best = Some(listed);
            }
        }
        best.map(|listed| ((listed.verdict.value & 0xffff) - 1, listed.rule.drop))
    }

    /// Keys in each table, for people.
    #[must_use]
    pub fn fill(&self) -> String {
        let mut parts = Vec::new();
        if let Some(table) = &self.exact {
            parts.push(format!("exact {}", table.len()));
        }
        if let Some(table) = &self.prefix {
            parts.push(format!("prefix {}", table.len()));
        }
        if let Some(table) = &self.hashed {
            parts.push(format!("hash {}", table.len()));
        }
        if let Some(table) = &self.ternary {
            parts.push(format!("tcam {}", table.len()));
        }
        parts.join(", ")
    }

    /// Adds a rule behind the others, or before them; its number. The signals go to `writes` in the
    /// order in which they must be applied.
    ///
    /// Errors: no table has room; no number is left.
    pub fn add(
        &mut self,
        rule: Rule,
        front: bool,
        writes: &mut Vec<Write>,
    ) -> Result<u32, FirewallError> {
        let numbers = FirewallError::Numbers(self.rules.len());
        let rank = if front { self.next.1 } else { self.next.0 };
        if self.rules.len() >= NUMBERS as usize || rank == 0 || rank == HIGHEST {
            return Err(numbers);
        }
        let taken = |number: &u32| self.rules.contains_key(number);
        let around = (self.free..NUMBERS).chain(0..self.free);
        let Some(number) = around.into_iter().find(|number| !taken(number)) else {
            return Err(numbers);
        };
        let verdict = Verdict { rank, value: (number + 1) | u32::from(rule.drop) << 31 };
        let mut fresh = vec![self.verdict.write(2, &[u64::from(number)])];
        let mut homes = Vec::new();
        for masked in rule.masked() {
            match self.place(&rule, masked, verdict, &mut fresh) {
                Some(home) => homes.push((masked, home)),
                None => {
                    // What has been placed goes again; moves of other rules stay made.
                    self.take(&rule, &homes, verdict, &mut fresh);
                    let ternary = self.ternary.as_ref().map(Ternary::node);
                    writes.extend(last_of_each(fresh, ternary));
                    let (rule, rules) = (rule.to_string(), self.rules.len());
                    return Err(FirewallError::Full { rule, rules, fill: self.fill() });
                }
            }
        }
        if front {
            self.next.1 += 1;
        } else {
            self.next.0 -= 1;
        }
        self.free = number + 1;
        writes.append(&mut fresh);
        self.rules.insert(number, Listed { rule, verdict, homes });
        Ok(number)
    }

    fn place(
        &mut self,
        rule: &Rule,
        masked: Masked,
        verdict: Verdict,
        writes: &mut Vec<Write>,
    ) -> Option<Home> {
        if masked.mask == Key::ALL
            && let Some(exact) = &mut self.exact
            && exact.add(masked.value, verdict, writes)
        {
            return Some(Home::Exact);
        }
        let rest = Key { destination: 0, ..masked.mask };
        if rest == Key::default()
            && let Some(prefix) = &mut self.prefix
            && prefix.add(rule.destination, verdict, writes)
        {
            return Some(Home::Prefix);
        }
        if let Some(hashed) = &mut self.hashed
            && hashed.add(masked, verdict, writes)
        {
            return Some(Home::Hashed);
        }
        let ternary = self.ternary.as_mut()?;
        ternary.add(masked, verdict, writes).then_some(Home::Ternary)
    }

    fn take(
        &mut self,
        rule: &Rule,
        homes: &[(Masked, Home)],
        verdict: Verdict,
        writes: &mut Vec<Write>,
    ) {
        for (masked, home) in homes {
            match home {
                Home::Exact => {
                    if let Some(table) = &mut self.exact {
                        table.remove(masked.value, verdict, writes);
                    }
                }
                Home::Prefix => {
                    if let Some(table) = &mut self.prefix {
                        table.remove(rule.destination, verdict, writes);
                    }
                }
                Home::Hashed => {
                    if let Some(table) = &mut self.hashed {
                        table.remove(*masked, verdict, writes);
                    }
                }
                Home::Ternary => {
                    if let Some(table) = &mut self.ternary {
                        table.remove(*masked, verdict, writes);
                    }
                }
            }
        }
    }

    /// Takes a rule out.
    ///
    /// Errors: there is none of that number.
    pub fn remove(&mut self, number: u32, writes: &mut Vec<Write>) -> Result<Rule, FirewallError> {
        let listed = self.rules.remove(&number).ok_or(FirewallError::NoSuchRule(number))?;
        self.take(&listed.rule, &listed.homes, listed.verdict, writes);
        Ok(listed.rule)
    }

    /// Drops, or passes, IPv4 packets without a rule and packets of other kinds.
    pub fn defaults(
        &mut self,
        unmatched: Option<bool>,
        other: Option<bool>,
        writes: &mut Vec<Write>,
    ) {
        self.defaults = (unmatched.unwrap_or(self.defaults.0), other.unwrap_or(self.defaults.1));
        let (unmatched, other) = (u64::from(self.defaults.0), u64::from(self.defaults.1));
        writes.push(self.verdict.write(3, &[unmatched, other]));
    }

    /// A signal that asks for the packets of a rule: its answer's second parameter.
    #[must_use]
    pub fn hits(&self, number: u32) -> Write {
        self.verdict.write(1, &[u64::from(number)])
    }

    /// A signal that asks for the counters.
    #[must_use]
    pub fn counters(&self) -> Write {
        self.verdict.write(0, &[])
    }
}

/// Of several writes to one place, the last.
fn last_of_each(writes: Vec<Write>, ternary: Option<usize>) -> Vec<Write> {
    let mut seen = HashSet::new();
    let mut kept: Vec<Write> = writes
        .into_iter()
        .rev()
        .filter(|(node, signal)| {
            // The group of a TCAM's word is part of its place.
            let group = if ternary == Some(*node) { signal[4] } else { 0 };
            seen.insert((*node, signal[0], signal[1], signal[2], group))
        })
        .collect();
    kept.reverse();
    kept
}
