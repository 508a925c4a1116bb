//! Masked keys as bits of 13 tables: whatever the mask, few rules.
//!
//! A rule answers once all 13 tables have its bit, and no longer once one has lost it; so a rule
//! appears with its last table and goes with its first. The lowest rule wins: rules lie by falling
//! rank, and make room by moving to a free place beside them before they leave their own.

use super::{Target, Verdict, Write};
use crate::functions::rules::Masked;

/// Pieces of a key.
const PIECES: usize = 13;

/// The host's side of `BramTCAM`.
#[derive(Clone, Debug)]
pub struct Ternary {
    target: Target,
    rules: Vec<Option<(Masked, Verdict)>>,
    /// `(piece, word, byte)` as the element's memory has it.
    words: Vec<u64>,
    groups: usize,
}

impl Ternary {
    /// An empty table of `64 * groups` rules.
    #[must_use]
    pub fn new(target: Target, groups: u32) -> Self {
        let groups = groups.max(1) as usize;
        let words = vec![0; PIECES * groups * 256];
        Self { target, rules: vec![None; 64 * groups], words, groups }
    }

    /// The element's node.
    #[must_use]
    pub fn node(&self) -> usize {
        self.target.node
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
    pub fn size(&self) -> usize {
        self.groups
    }

    /// Rules inside.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rules.iter().flatten().count()
    }

    /// True without rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn set(&mut self, at: usize, masked: Masked, verdict: Verdict, writes: &mut Vec<Write>) {
        let place = at as u64;
        writes.push(
            self.target.write(2, &[place, u64::from(verdict.value), u64::from(verdict.rank)]),
        );
        self.rules[at] = Some((masked, verdict));
        for piece in 0..PIECES {
            let (mask, value) = (masked.mask.byte(piece), masked.value.byte(piece));
            for byte in 0..=u8::MAX {
                self.bit(at, piece, byte, byte & mask == value, writes);
            }
        }
    }

    fn clear(&mut self, at: usize, writes: &mut Vec<Write>) {
        self.rules[at] = None;
        for piece in 0..PIECES {
            for byte in 0..=u8::MAX {
                self.bit(at, piece, byte, false, writes);
            }
        }
    }

    fn bit(&mut self, at: usize, piece: usize, byte: u8, on: bool, writes: &mut Vec<Write>) {
        let group = at / 64;
        let word = &mut self.words[(piece * self.groups + group) * 256 + usize::from(byte)];
        let wanted = *word & !(1 << (at % 64)) | u64::from(on) << (at % 64);
        if wanted != *word {
            *word = wanted;
            let fields = [piece as u64, u64::from(byte), wanted, group as u64];
            writes.push(self.target.write(1, &fields));
        }
    }

    fn rank(&self, at: usize) -> Option<u32> {
        self.rules[at].map(|(_, verdict)| verdict.rank)
    }

    /// Adds a rule; false where there is no place left.
    pub fn add(&mut self, masked: Masked, verdict: Verdict, writes: &mut Vec<Write>) -> bool {
        let count = self.rules.len();
        // Between the last rule above and the first below.
        let above = (0..count).rev().find(|at| self.rank(*at).is_some_and(|r| r >= verdict.rank));
        let first = above.map_or(0, |at| at + 1);
        let below = (first..count).find(|at| self.rules[*at].is_some()).unwrap_or(count);
        let at = if first < below {
            // Room at the end is taken from its beginning, other room from its middle.
            if below == count { first } else { first.midpoint(below) }
        } else if let Some(free) = (first..count).find(|at| self.rules[*at].is_none()) {
            for from in (first..free).rev() {
                self.step(from, from + 1, writes);
            }
            first
        } else if let Some(free) = (0..first).rev().find(|at| self.rules[*at].is_none()) {
            for from in free + 1..first {
                self.step(from, from - 1, writes);
            }
            first - 1
        } else {
            return false;
        };
        self.set(at, masked, verdict, writes);
        true
    }

    fn step(&mut self, from: usize, to: usize, writes: &mut Vec<Write>) {
        if let Some((masked, verdict)) = self.rules[from] {
            self.set(to, masked, verdict, writes);
            self.clear(from, writes);
        }
    }

    /// Takes a rule back.
    pub fn remove(&mut self, masked: Masked, verdict: Verdict, writes: &mut Vec<Write>) {
        if let Some(at) = self.rules.iter().position(|rule| *rule == Some((masked, verdict))) {
            self.clear(at, writes);
        }
    }
}
