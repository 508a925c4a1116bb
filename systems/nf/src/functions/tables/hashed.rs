//! Masked keys in hash tables, one mask a table.

use std::collections::HashMap;

use super::{Target, Verdict, Write};
use crate::functions::rules::{Key, Masked};

/// The host's side of `HashTCAM`.
#[derive(Clone, Debug)]
pub struct Hashed {
    target: Target,
    slots: u32,
    /// Mask and number of keys of each table; a table without keys takes another mask.
    tables: Vec<(Option<Key>, usize)>,
    places: HashMap<(usize, u32), Masked>,
    keys: HashMap<Masked, (usize, u32, Vec<Verdict>)>,
}

impl Hashed {
    /// Empty tables of `slots` entries each.
    #[must_use]
    pub fn new(target: Target, tables: u32, slots: u32) -> Self {
        let tables = vec![(None, 0); tables as usize];
        let (places, keys) = (HashMap::new(), HashMap::new());
        Self { target, slots: slots.max(1), tables, places, keys }
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
    pub fn size(&self) -> (usize, u32) {
        (self.tables.len(), self.slots)
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

    fn slot(&self, table: usize, key: Key) -> u32 {
        key.mix(u32::try_from(table).unwrap_or(0)) & (self.slots - 1)
    }

    fn write(&self, table: usize, slot: u32, key: Key, verdict: Option<Verdict>) -> Write {
        let rank = verdict.map_or(0, |v| u64::from(v.rank));
        let flags = rank & 0x7f_ffff | u64::from(verdict.is_some()) << 31;
        let addresses = u64::from(key.source) << 32 | u64::from(key.destination);
        let value = verdict.map_or(0, |v| u64::from(v.value));
        let fields = [
            table as u64,
            u64::from(slot),
            addresses,
            u64::from(key.ports),
            u64::from(key.protocol),
            flags,
            value,
        ];
        self.target.write(2, &fields)
    }

    /// Adds a verdict for a masked key; false where every table with its mask holds another key at
    /// its place and no table is free for the mask.
    pub fn add(&mut self, masked: Masked, verdict: Verdict, writes: &mut Vec<Write>) -> bool {
        if let Some((table, slot, verdicts)) = self.keys.get_mut(&masked) {
            let best = verdicts.iter().max().copied();
            verdicts.push(verdict);
            let (table, slot) = (*table, *slot);
            if best < Some(verdict) {
                writes.push(self.write(table, slot, masked.value, Some(verdict)));
            }
            return true;
        }
        let free = |this: &Self, table: usize| {
            !this.places.contains_key(&(table, this.slot(table, masked.value)))
        };
        let same = (0..self.tables.len())
            .find(|table| self.tables[*table].0 == Some(masked.mask) && free(self, *table));
        let table = match same {
            Some(table) => table,
            None => {
                let Some(table) = self.tables.iter().position(|(_, keys)| *keys == 0) else {
                    return false;
                };
                let mask = masked.mask;
                let addresses = u64::from(mask.source) << 32 | u64::from(mask.destination);
                let fields =
                    [table as u64, 0, addresses, u64::from(mask.ports), u64::from(mask.protocol)];
                writes.push(self.target.write(1, &fields));
                self.tables[table].0 = Some(mask);
                table
            }
        };
        let slot = self.slot(table, masked.value);
        self.tables[table].1 += 1;
        self.places.insert((table, slot), masked);
        self.keys.insert(masked, (table, slot, vec![verdict]));
        writes.push(self.write(table, slot, masked.value, Some(verdict)));
        true
    }

    /// Takes a verdict back.
    pub fn remove(&mut self, masked: Masked, verdict: Verdict, writes: &mut Vec<Write>) {
        let Some((table, slot, verdicts)) = self.keys.get_mut(&masked) else { return };
        verdicts.retain(|v| *v != verdict);
        let (table, slot, best) = (*table, *slot, verdicts.iter().max().copied());
        if best.is_none() {
            self.keys.remove(&masked);
            self.places.remove(&(table, slot));
            self.tables[table].1 -= 1;
        }
        writes.push(self.write(table, slot, masked.value, best));
    }
}
