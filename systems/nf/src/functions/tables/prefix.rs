//! Rules that name a destination prefix and nothing else: a search tree in two banks.

use std::collections::BTreeSet;

use super::{Target, Verdict, Write};
use crate::functions::rules::Prefix;

/// The host's side of `LPM_Tree`.
#[derive(Clone, Debug)]
pub struct Prefixes {
    target: Target,
    levels: u32,
    rules: Vec<(Prefix, Verdict)>,
    bank: usize,
    /// Borders by level and node, and results, of each bank.
    borders: [Vec<Vec<u32>>; 2],
    results: [Vec<u64>; 2],
}

/// A border no address reaches, but the last one.
const END: u32 = u32::MAX;

impl Prefixes {
    /// An empty tree of `levels` levels.
    #[must_use]
    pub fn new(target: Target, levels: u32) -> Self {
        let bank = || (0..levels).map(|level| vec![0; 1 << level]).collect::<Vec<Vec<u32>>>();
        let borders = [bank(), bank()];
        let results = [vec![0; 1 << levels], vec![0; 1 << levels]];
        Self { target, levels, rules: Vec::new(), bank: 0, borders, results }
    }

    /// Its element.
    #[must_use]
    pub fn target(&self) -> Target {
        self.target
    }

    /// The element is another one now, which knows the same.
    pub fn lead_to(&mut self, target: Target) {
        self.target = target;
    }

    /// What the element's parameters decided.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.levels
    }

    /// Rules inside.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// True without rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Adds a rule; false where its borders do not fit.
    pub fn add(&mut self, prefix: Prefix, verdict: Verdict, writes: &mut Vec<Write>) -> bool {
        self.rules.push((prefix, verdict));
        let fits = self.rebuild(writes);
        if !fits {
            self.rules.pop();
        }
        fits
    }

    /// Takes a rule back.
    pub fn remove(&mut self, prefix: Prefix, verdict: Verdict, writes: &mut Vec<Write>) {
        self.rules.retain(|rule| *rule != (prefix, verdict));
        // Fewer rules have fewer borders.
        self.rebuild(writes);
    }

    /// Where the answer changes, ascending, and the answer from there on.
    fn intervals(&self) -> Vec<(u32, Option<Verdict>)> {
        let mut turns: Vec<(u64, bool, Verdict)> = Vec::new();
        for (prefix, verdict) in &self.rules {
            let first = u64::from(prefix.address);
            turns.push((first, true, *verdict));
            turns.push((first + (1 << (32 - u32::from(prefix.length))), false, *verdict));
        }
        turns.sort_by_key(|(at, ..)| *at);
        let mut here = BTreeSet::new();
        let mut all: Vec<(u32, Option<Verdict>)> = vec![(0, None)];
        for group in turns.chunk_by(|a, b| a.0 == b.0) {
            for (_, begins, verdict) in group {
                if *begins {
                    here.insert(*verdict);
                } else {
                    here.remove(verdict);
                }
            }
            let Some(at) = group.first().and_then(|turn| u32::try_from(turn.0).ok()) else { break };
            let best = here.last().copied();
            match all.last_mut() {
                Some(last) if last.0 == at => last.1 = best,
                Some(last) if last.1 == best => {}
                _ => all.push((at, best)),
            }
        }
        all
    }

    /// Writes the bank that is not in use, then changes banks.
    fn rebuild(&mut self, writes: &mut Vec<Write>) -> bool {
        let intervals = self.intervals();
        let borders = (1_usize << self.levels) - 1;
        if intervals.len() > borders {
            return false;
        }
        let bank = 1 - self.bank;
        for level in 0..self.levels {
            let below = self.levels - level - 1;
            let base = (bank as u64) << (self.levels - 1);
            for node in 0..1_usize << level {
                // Borders in order are the tree's nodes from left to right.
                let order = (node << (below + 1)) + (1 << below) - 1;
                let wanted = intervals.get(order + 1).map_or(END, |interval| interval.0);
                let place = &mut self.borders[bank][level as usize][node];
                if *place != wanted {
                    *place = wanted;
                    let fields = [u64::from(level), base | node as u64, u64::from(wanted)];
                    writes.push(self.target.write(1, &fields));
                }
            }
        }
        let base = (bank as u64) << self.levels;
        let last = intervals.last().and_then(|interval| interval.1);
        for leaf in 0..1_usize << self.levels {
            let verdict = intervals.get(leaf).map_or(last, |interval| interval.1);
            let wanted = verdict.map_or(0, |v| u64::from(v.rank) << 32 | u64::from(v.value));
            let place = &mut self.results[bank][leaf];
            if *place != wanted {
                *place = wanted;
                writes.push(self.target.write(2, &[0, base | leaf as u64, wanted]));
            }
        }
        writes.push(self.target.write(3, &[bank as u64]));
        self.bank = bank;
        true
    }
}
