//! Mixed update: whether a put appends or overwrites a stale entry in place (BOOM §3.3).
//!
//! For each key written to the current segment the table remembers two slots: `first`, the most
//! recent update, and `second`, the one before it. `second` may be overwritten when
//! - C1: it is not the newest version, and the newest has been acknowledged (with requests in
//!   flight "is newer" is not enough: a crash may forget an unacknowledged `first`);
//! - C2: the new entry fits the slot as it was appended;
//! - C3: the last reply for the key named no get in flight at or below `second`'s version.
//!
//! The table starts empty with each segment. It is bounded: once full, further keys are appended
//! and not tracked.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};

use beeline_kv::entry::{FIRST_ENTRY, slot_bytes_for};
use beeline_kv::wire::NOTHING_READING;

use crate::options::Conditions;

/// Stands for a key of a database: the routing hash and an independent, secretly keyed one. Two
/// keys that share both would let one overwrite the other's newest entry; nobody who does not know
/// this process' key can construct such a pair, and chance needs 2^64 keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest {
    /// As [`beeline_kv::hash_key`].
    pub routing: u64,
    check: u64,
}

impl std::hash::Hash for Digest {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.check);
    }
}

/// Passes an already random word through.
#[derive(Debug, Default)]
struct PassThrough(u64);

impl Hasher for PassThrough {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = word;
    }
}

/// A slot of the current segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Offset in the segment, bytes.
    pub offset: u32,
    /// Length when it was appended, bytes.
    pub slot_bytes: u32,
    /// Version written there; 0 until acknowledged.
    version: u64,
}

#[derive(Clone, Copy, Debug)]
struct Pair {
    first: Slot,
    second: Option<Slot>,
    minimum_reading: u64,
}

/// Where a key was found in the table, so that a put looks for it once. Good until the table is
/// cleared; keys never leave it before.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Found {
    life: u32,
    /// Place among the pairs; `None` when the key was not there.
    at: Option<u32>,
}

/// The table of one link.
#[derive(Debug)]
pub struct UpdateTable {
    places: HashMap<Digest, u32, BuildHasherDefault<PassThrough>>,
    pairs: Vec<Pair>,
    /// Counts clearings, from 1.
    life: u32,
    limit: usize,
    keyed: RandomState,
    conditions: Conditions,
}

impl UpdateTable {
    /// An empty table that tracks at most `limit` keys; 0 turns the mixed update off.
    #[must_use]
    pub fn new(limit: usize, conditions: Conditions) -> Self {
        Self {
            places: HashMap::default(),
            pairs: Vec::new(),
            life: 1,
            limit,
            keyed: RandomState::new(),
            conditions,
        }
    }

    /// The digest of a key whose routing hash is known.
    #[must_use]
    pub fn digest(&self, routing: u64, database: u8, key: &[u8]) -> Digest {
        if self.limit == 0 {
            return Digest { routing, check: 0 };
        }
        let mut hasher = self.keyed.build_hasher();
        // In one piece where it is short: each piece costs as much as its bytes. The length decides
        // the form, so one key has one digest.
        let mut whole = [0; 48];
        if let Some(whole) = whole.get_mut(..=key.len()) {
            whole[0] = database;
            whole[1..].copy_from_slice(key);
            hasher.write(whole);
        } else {
            hasher.write_u8(database);
            hasher.write(key);
        }
        Digest { routing, check: hasher.finish() }
    }

    /// Looks for the key.
    #[inline]
    pub(crate) fn find(&self, digest: Digest) -> Found {
        let at = if self.pairs.is_empty() { None } else { self.places.get(&digest).copied() };
        Found { life: self.life, at }
    }

    /// `found` as it is now: keys come in, and the table is cleared.
    #[inline]
    pub(crate) fn refresh(&self, found: Found, digest: Digest) -> Found {
        if found.life == self.life && found.at.is_some() { found } else { self.find(digest) }
    }

    /// The slot that an entry of `needed` bytes may overwrite, if any.
    #[must_use]
    pub fn overwritable(&self, digest: Digest, needed: u32) -> Option<Slot> {
        self.overwritable_at(self.find(digest), needed)
    }

    /// As [`UpdateTable::overwritable`], for a key just found.
    #[inline]
    pub(crate) fn overwritable_at(&self, found: Found, needed: u32) -> Option<Slot> {
        let pair = &self.pairs[found.at? as usize];
        let candidate = if self.conditions.superseded {
            pair.second.filter(|second| pair.first.version != 0 && second.version != 0)?
        } else {
            pair.first
        };
        let fits = !self.conditions.fits || needed <= candidate.slot_bytes;
        let unread = !self.conditions.unread || pair.minimum_reading > candidate.version;
        (fits && unread).then_some(candidate)
    }

    /// Notes that the key's next version was written at `offset`: it becomes `first`.
    pub fn wrote(&mut self, digest: Digest, offset: u32, slot_bytes: u32) {
        self.wrote_at(self.find(digest), digest, offset, slot_bytes);
    }

    /// As [`UpdateTable::wrote`], for a key just found; where it is found from now on.
    #[inline]
    pub(crate) fn wrote_at(
        &mut self,
        found: Found,
        digest: Digest,
        offset: u32,
        slot_bytes: u32,
    ) -> Found {
        let slot = Slot { offset, slot_bytes, version: 0 };
        if let Some(at) = found.at {
            let pair = &mut self.pairs[at as usize];
            pair.second = Some(pair.first);
            pair.first = slot;
            return found;
        }
        let Ok(at) = u32::try_from(self.pairs.len()) else { return found };
        if self.pairs.len() >= self.limit {
            return found;
        }
        self.pairs.push(Pair { first: slot, second: None, minimum_reading: NOTHING_READING });
        self.places.insert(digest, at);
        Found { at: Some(at), ..found }
    }

    /// Notes the reply for the entry at `offset`.
    pub fn acknowledged(
        &mut self,
        digest: Digest,
        offset: u32,
        version: u64,
        minimum_reading: u64,
    ) {
        self.acknowledged_at(self.find(digest), offset, version, minimum_reading);
    }

    /// As [`UpdateTable::acknowledged`], for a key found since the table was last cleared or not.
    #[inline]
    pub(crate) fn acknowledged_at(
        &mut self,
        found: Found,
        offset: u32,
        version: u64,
        minimum_reading: u64,
    ) {
        let Some(at) = found.at.filter(|_| found.life == self.life) else { return };
        let pair = &mut self.pairs[at as usize];
        pair.minimum_reading = minimum_reading;
        if pair.first.offset == offset {
            pair.first.version = version;
        } else if let Some(second) = pair.second.as_mut().filter(|slot| slot.offset == offset) {
            second.version = version;
        }
    }

    /// Forgets everything: a new segment begins.
    pub fn clear(&mut self) {
        self.places.clear();
        self.pairs.clear();
        self.life = self.life.wrapping_add(1).max(1);
    }

    /// Keys tracked.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// True when no key is tracked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }
}

/// What a stream of puts takes in log segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceUse {
    /// Puts.
    pub puts: u64,
    /// Bytes of segment taken when every put appends.
    pub append_only_bytes: u64,
    /// Bytes taken with the mixed update.
    pub mixed_bytes: u64,
    /// Puts that overwrote in place.
    pub overwrites: u64,
}

impl SpaceUse {
    /// Share of the bytes the mixed update saves, 0..1.
    #[must_use]
    pub fn saving(&self) -> f64 {
        if self.append_only_bytes == 0 {
            return 0.0;
        }
        1.0 - self.mixed_bytes as f64 / self.append_only_bytes as f64
    }
}

/// Runs the mixed update over `puts`, pairs of key and value length, with segments of
/// `segment_bytes`, every put acknowledged before the next and no get in flight: the setting of
/// the paper's space experiment (BOOM §4). `tracked_keys` as in the client's options.
#[must_use]
pub fn measure_space(
    puts: impl IntoIterator<Item = (u64, u32)>,
    segment_bytes: u32,
    tracked_keys: usize,
) -> SpaceUse {
    let mut table = UpdateTable::new(tracked_keys, Conditions::ALL);
    let mut usage = SpaceUse::default();
    let mut tail = FIRST_ENTRY;
    for (version, (key, value_bytes)) in (1..).zip(puts) {
        let digest = table.digest(key, 0, &key.to_le_bytes());
        let needed = slot_bytes_for(8, value_bytes as usize) as u32;
        usage.puts += 1;
        usage.append_only_bytes += u64::from(needed);
        let offset = if let Some(slot) = table.overwritable(digest, needed) {
            usage.overwrites += 1;
            table.wrote(digest, slot.offset, slot.slot_bytes);
            slot.offset
        } else {
            if tail.saturating_add(needed) > segment_bytes {
                table.clear();
                tail = FIRST_ENTRY;
            }
            let offset = tail;
            table.wrote(digest, offset, needed);
            tail += needed;
            usage.mixed_bytes += u64::from(needed);
            offset
        };
        table.acknowledged(digest, offset, version, NOTHING_READING);
    }
    usage
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> (UpdateTable, Digest) {
        let table = UpdateTable::new(16, Conditions::ALL);
        let digest = table.digest(7, 0, b"key");
        (table, digest)
    }

    fn put(table: &mut UpdateTable, digest: Digest, offset: u32, version: u64) {
        table.wrote(digest, offset, 96);
        table.acknowledged(digest, offset, version, NOTHING_READING);
    }

    #[test]
    fn the_only_copy_of_a_key_is_never_overwritten() {
        let (mut table, digest) = table();
        assert_eq!(table.overwritable(digest, 96), None);
        put(&mut table, digest, 64, 1);
        assert_eq!(table.overwritable(digest, 96), None);
    }

    #[test]
    fn the_slots_of_a_key_alternate() {
        let (mut table, digest) = table();
        put(&mut table, digest, 64, 1);
        put(&mut table, digest, 160, 2);
        for (version, offset) in [(3, 64), (4, 160), (5, 64)] {
            assert_eq!(table.overwritable(digest, 96).map(|slot| slot.offset), Some(offset));
            put(&mut table, digest, offset, version);
        }
    }

    #[test]
    fn an_unacknowledged_newest_protects_the_one_before_it() {
        let (mut table, digest) = table();
        put(&mut table, digest, 64, 1);
        table.wrote(digest, 160, 96);
        assert_eq!(table.overwritable(digest, 96), None);
        table.acknowledged(digest, 160, 2, NOTHING_READING);
        assert!(table.overwritable(digest, 96).is_some());
    }

    #[test]
    fn a_longer_entry_does_not_take_a_shorter_slot() {
        let (mut table, digest) = table();
        put(&mut table, digest, 64, 1);
        put(&mut table, digest, 160, 2);
        assert_eq!(table.overwritable(digest, 112), None);
        assert!(table.overwritable(digest, 80).is_some());
    }

    #[test]
    fn an_entry_being_read_is_not_overwritten() {
        let (mut table, digest) = table();
        put(&mut table, digest, 64, 1);
        table.wrote(digest, 160, 96);
        table.acknowledged(digest, 160, 2, 1);
        assert_eq!(table.overwritable(digest, 96), None, "a get reads version 1");
        put(&mut table, digest, 256, 3);
        assert!(table.overwritable(digest, 96).is_some(), "version 2 is free");
    }

    #[test]
    fn a_full_table_appends() {
        let mut table = UpdateTable::new(1, Conditions::ALL);
        let (a, b) = (table.digest(1, 0, b"a"), table.digest(2, 0, b"b"));
        put(&mut table, a, 64, 1);
        put(&mut table, b, 160, 2);
        assert_eq!(table.len(), 1);
        put(&mut table, b, 256, 3);
        assert_eq!(table.overwritable(b, 96), None);
    }

    #[test]
    fn skewed_puts_save_space_and_uniform_ones_over_many_keys_do_not() {
        let hot = measure_space((0..10_000).map(|i| (i % 4, 100)), 1 << 20, 1 << 20);
        assert!(hot.saving() > 0.99, "{hot:?}");
        let spread = measure_space((0..10_000).map(|i| (i, 100)), 1 << 20, 1 << 20);
        assert_eq!(spread.overwrites, 0);
        assert!(spread.saving().abs() < f64::EPSILON);
    }
}
