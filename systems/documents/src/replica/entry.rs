//! Entries of the operation log: one batch of one row each, as keys and values.
//!
//! An entry says which keys have which values behind it, so to apply it twice is to apply it once. What a
//! change stream reads (`layout::kind::LOG`) never changes once it is written, so an entry that lies in
//! the store names it and does not hold it again; on its way to another member it holds everything.
//!
//! ```text
//!  0  version u8, 1    1  term u64    9  time u64    17  row length u16, row
//!     changes u32, then each: kind u8 (0 deletes, 1 puts, 2 puts what the row has there)
//!                             key length u32, key; of kind 1: value length u32, value
//!     crc32c u32 of everything before
//! ```
//!
//! Little endian. Key in the store: 7, time u64 (big-endian).

use crate::layout::{kind, word};
use crate::replica::register::{Place, Taker};
use crate::store::Change;

const VERSION: u8 = 1;
/// Changes of one entry at most.
const MOST_CHANGES: u32 = 1 << 24;

/// A place with the row in which its entry lies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spot {
    /// Where in the log.
    pub place: Place,
    /// The row of the entry.
    pub row: Vec<u8>,
}

/// What an entry does to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing is there.
    Delete,
    /// This is there.
    Put(Vec<u8>),
    /// What the row has there now, and never changes.
    Kept,
}

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it is.
    pub spot: Spot,
    /// What it does, in order.
    pub effects: Vec<(Vec<u8>, Effect)>,
}

/// The key of an entry.
#[must_use]
pub fn key(time: u64) -> Vec<u8> {
    word(kind::OPLOG, &time.to_be_bytes())
}

impl Entry {
    /// Of a batch.
    #[must_use]
    pub fn of(spot: Spot, changes: &[Change]) -> Self {
        let effect = |change: &Change| match &change.value {
            Some(value) => Effect::Put(value.clone()),
            None => Effect::Delete,
        };
        let effects = changes.iter().map(|change| (change.key.clone(), effect(change))).collect();
        Self { spot, effects }
    }

    /// The same as it lies in the store: without what the row keeps anyway.
    #[must_use]
    pub fn encode_thin(&self) -> Vec<u8> {
        self.write(true)
    }

    /// The same as it travels.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.write(false)
    }

    fn write(&self, thin: bool) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend(self.spot.place.term.to_le_bytes());
        out.extend(self.spot.place.time.to_le_bytes());
        out.extend((self.spot.row.len() as u16).to_le_bytes());
        out.extend(&self.spot.row);
        out.extend((self.effects.len() as u32).to_le_bytes());
        for (key, effect) in &self.effects {
            let kept = thin && key.first() == Some(&kind::LOG);
            let kind = match effect {
                Effect::Delete => 0,
                Effect::Put(_) if !kept => 1,
                Effect::Put(_) | Effect::Kept => 2,
            };
            out.push(kind);
            out.extend((key.len() as u32).to_le_bytes());
            out.extend(key);
            if let (1, Effect::Put(value)) = (kind, effect) {
                out.extend((value.len() as u32).to_le_bytes());
                out.extend(value);
            }
        }
        out.extend(crc32c::crc32c(&out).to_le_bytes());
        out
    }

    /// Reads an entry; `None`: damaged, or of another version.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (content, sum) = bytes.split_last_chunk::<4>()?;
        if crc32c::crc32c(content) != u32::from_le_bytes(*sum) {
            return None;
        }
        let mut taker = Taker(content);
        if taker.u8()? != VERSION {
            return None;
        }
        let place = Place { term: taker.u64()?, time: taker.u64()? };
        let length = usize::from(taker.u16()?);
        let row = taker.bytes(length)?.to_vec();
        let count = taker.u32().filter(|count| *count <= MOST_CHANGES)?;
        let mut effects = Vec::new();
        for _ in 0..count {
            let kind = taker.u8()?;
            let length = taker.u32()? as usize;
            let key = taker.bytes(length)?.to_vec();
            let effect = match kind {
                0 => Effect::Delete,
                1 => {
                    let length = taker.u32()? as usize;
                    Effect::Put(taker.bytes(length)?.to_vec())
                }
                2 => Effect::Kept,
                _ => return None,
            };
            effects.push((key, effect));
        }
        taker.0.is_empty().then_some(Self { spot: Spot { place, row }, effects })
    }

    /// Its changes. What was kept and is gone by now was deleted by a later entry.
    pub fn changes(&self) -> impl Iterator<Item = Change> + '_ {
        self.effects.iter().map(|(key, effect)| match effect {
            Effect::Put(value) => Change::put(key.clone(), value.clone()),
            Effect::Delete | Effect::Kept => Change::delete(key.clone()),
        })
    }
}

/// The place of an entry, read from its first bytes.
#[must_use]
pub fn place_of(bytes: &[u8]) -> Option<Place> {
    let mut taker = Taker(bytes);
    (taker.u8()? == VERSION).then_some(())?;
    Some(Place { term: taker.u64()?, time: taker.u64()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Entry {
        let spot = Spot { place: Place { term: 3, time: 77 }, row: b"shop".to_vec() };
        Entry::of(
            spot,
            &[
                Change::put(vec![kind::RECORD, 1], vec![5; 300]),
                Change::delete(vec![kind::INDEX, 2]),
                Change::put(vec![kind::LOG, 9], b"told".to_vec()),
            ],
        )
    }

    #[test]
    fn an_entry_comes_back_whole_or_thin_and_no_part_of_one_is_taken_for_one() {
        let entry = sample();
        let (full, thin) = (entry.encode(), entry.encode_thin());
        assert_eq!(Entry::decode(&full), Some(entry.clone()));
        let read = Entry::decode(&thin).unwrap();
        assert_eq!(read.effects[2], (vec![kind::LOG, 9], Effect::Kept));
        assert_eq!(read.effects[..2], entry.effects[..2]);
        assert_eq!(place_of(&thin), Some(entry.spot.place));
        for bytes in [full, thin] {
            assert!((0..bytes.len()).all(|length| Entry::decode(&bytes[..length]).is_none()));
            for at in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[at] ^= 0x10;
                assert!(Entry::decode(&damaged).is_none(), "byte {at}");
            }
        }
    }
}
