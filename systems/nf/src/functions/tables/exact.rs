//! Exact keys in two tables: cuckoo hashing.

use std::collections::{HashMap, HashSet, VecDeque};

use super::{Target, Verdict, Write};
use crate::functions::rules::Key;

/// The second table's hash.
const SEEDS: [u32; 2] = [0, 0x9e37_79b9];
/// Places looked at for a free one.
const SEARCH: usize = 2_000;

type Place = (usize, u32);

/// The host's side of `CuckooHash`.
#[derive(Clone, Debug)]
pub struct Exact {
    target: Target,
    mask: u32,
    places: HashMap<Place, Key>,
    keys: HashMap<Key, (Place, Vec<Verdict>)>,
}

impl Exact {
    /// An empty table of `2 * size` entries.
    #[must_use]
    pub fn new(target: Target, size: u32) -> Self {
        let mask = size.max(1) - 1;
        Self { target, mask, places: HashMap::new(), keys: HashMap::new() }
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
        self.mask
    }

    /// Keys inside.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// True without keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    fn place(&self, key: Key, table: usize) -> Place {
        (table, key.mix(SEEDS[table]) & self.mask)
    }

    fn write(&self, place: Place, key: Key, verdict: Option<Verdict>) -> Write {
        let verdict_word = verdict.map_or(0, |v| u64::from(v.value) | u64::from(v.rank) << 32);
        let addresses = u64::from(key.source) << 32 | u64::from(key.destination);
        let (table, at) = (place.0 as u64, u64::from(place.1));
        let used = u64::from(verdict.is_some());
        let fields = [
            table,
            at,
            addresses,
            u64::from(key.ports),
            u64::from(key.protocol),
            verdict_word,
            used,
        ];
        self.target.write(1, &fields)
    }

    /// Adds a verdict for a key; false where no chain of moves frees a place.
    pub fn add(&mut self, key: Key, verdict: Verdict, writes: &mut Vec<Write>) -> bool {
        if let Some((place, verdicts)) = self.keys.get_mut(&key) {
            let best = verdicts.iter().max().copied();
            verdicts.push(verdict);
            let place = *place;
            if best < Some(verdict) {
                writes.push(self.write(place, key, Some(verdict)));
            }
            return true;
        }
        let Some(chain) = self.chain(key) else { return false };
        // From the free end: each key stands at its new place before its old one is overwritten.
        for pair in chain.windows(2).rev() {
            let (from, to) = (pair[0], pair[1]);
            let Some(moved) = self.places.remove(&from) else { continue };
            self.places.insert(to, moved);
            if let Some((place, verdicts)) = self.keys.get_mut(&moved) {
                *place = to;
                let best = verdicts.iter().max().copied();
                writes.push(self.write(to, moved, best));
            }
        }
        let Some(home) = chain.first().copied() else { return false };
        self.places.insert(home, key);
        self.keys.insert(key, (home, vec![verdict]));
        writes.push(self.write(home, key, Some(verdict)));
        true
    }

    /// Places from one of the key's own to a free one, each the other place of the key before it.
    fn chain(&self, key: Key) -> Option<Vec<Place>> {
        let mut seen = HashSet::new();
        let mut queue = VecDeque::new();
        let mut steps: Vec<(Place, Option<usize>)> = Vec::new();
        for table in 0..2 {
            let place = self.place(key, table);
            if seen.insert(place) {
                queue.push_back(steps.len());
                steps.push((place, None));
            }
        }
        while let Some(step) = queue.pop_front() {
            let place = steps[step].0;
            let Some(other) = self.places.get(&place) else {
                let mut chain = Vec::new();
                let mut at = Some(step);
                while let Some(step) = at {
                    chain.push(steps[step].0);
                    at = steps[step].1;
                }
                chain.reverse();
                return Some(chain);
            };
            let next = self.place(*other, 1 - place.0);
            if steps.len() < SEARCH && seen.insert(next) {
                queue.push_back(steps.len());
                steps.push((next, Some(step)));
            }
        }
        None
    }

    /// Takes a verdict back.
    pub fn remove(&mut self, key: Key, verdict: Verdict, writes: &mut Vec<Write>) {
        let Some((place, verdicts)) = self.keys.get_mut(&key) else { return };
        verdicts.retain(|v| *v != verdict);
        let (place, best) = (*place, verdicts.iter().max().copied());
        if best.is_none() {
            self.keys.remove(&key);
            self.places.remove(&place);
        }
        writes.push(self.write(place, key, best));
    }
}
