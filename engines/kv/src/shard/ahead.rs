//! Lines asked for ahead of their use: a server that has a batch of requests in hand names all of
//! them first, so that their cache misses overlap.

use beeline_os::{MemoryObject as _, prefetch};

use crate::ClientLog;
use crate::field::FieldName;
use crate::foreseen::Foreseen;
use crate::rows::fields_of;
use crate::same::same;
use crate::shard::Shard;

/// Most keys asked for at once: about as many lines as a core can wait for.
pub const KEYS_AHEAD: usize = 16;
/// Bytes of an entry asked for: header and a key of usual length.
const ENTRY_BYTES: usize = 128;
const LINE: usize = 64;
/// Longest field worked out ahead: to hash a longer one takes longer than its lines do to come.
const FIELD_BYTES: usize = 1024;

/// What a request is about to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected<'k> {
    /// A key of a database.
    pub key: &'k [u8],
    /// A field, where the key may be that of a row.
    pub field: Option<&'k [u8]>,
}

impl<'k> From<&'k [u8]> for Expected<'k> {
    fn from(key: &'k [u8]) -> Self {
        Self { key, field: None }
    }
}

/// The shards that are at hand.
pub(crate) trait Owners {
    /// The one that has a place.
    fn owner_of(&mut self, place: u64) -> Option<&mut Shard>;
}

impl Owners for Shard {
    #[inline]
    fn owner_of(&mut self, place: u64) -> Option<&mut Shard> {
        (self.store.owner_of(place) == self.index).then_some(self)
    }
}

/// What is about to be used, and the places of its keys.
#[derive(Debug)]
pub(crate) struct Ahead<'k> {
    all: [Expected<'k>; KEYS_AHEAD],
    places: [u64; KEYS_AHEAD],
    used: usize,
    fields: bool,
}

impl<'k> Ahead<'k> {
    /// The first [`KEYS_AHEAD`] of `all`, with the places of their keys.
    #[inline]
    pub fn of(all: impl Iterator<Item = Expected<'k>>, place_of: impl Fn(&[u8]) -> u64) -> Self {
        let mut ahead = Self {
            all: [Expected { key: &[], field: None }; KEYS_AHEAD],
            places: [0; KEYS_AHEAD],
            used: 0,
            fields: false,
        };
        for expected in all.take(KEYS_AHEAD) {
            let at = ahead.used;
            // A pipeline often stays with one row.
            let before = at.checked_sub(1).filter(|_| expected.field.is_some());
            ahead.places[at] = match before {
                Some(before) if same(ahead.all[before].key, expected.key) => ahead.places[before],
                _ => place_of(expected.key),
            };
            ahead.all[at] = expected;
            ahead.fields |= expected.field.is_some();
            ahead.used += 1;
        }
        ahead
    }

    /// Asks for the lines of all of it, of the shard that has a place; how many there are.
    #[inline]
    pub fn ask(&self, database: u8, foreseen: &mut Foreseen, shards: &mut impl Owners) -> usize {
        let namespace = u32::from(database);
        foreseen.clear();
        for (at, &place) in self.places[..self.used].iter().enumerate() {
            if !self.fields || at == 0 || self.places[at - 1] != place {
                foreseen.push_key(namespace, self.all[at].key, place);
            }
        }
        for entries in [false, true] {
            for (at, &place) in self.places[..self.used].iter().enumerate() {
                if self.fields && at > 0 && self.places[at - 1] == place {
                    continue;
                }
                match shards.owner_of(place) {
                    Some(shard) if entries => shard.prefetch_entry(namespace, place),
                    Some(shard) => shard.prefetch(namespace, place),
                    None => {}
                }
            }
        }
        if self.fields {
            self.ask_fields(namespace, foreseen, shards);
        }
        self.used
    }

    fn ask_fields(&self, database: u32, foreseen: &mut Foreseen, shards: &mut impl Owners) {
        let namespace = fields_of(database);
        let mut places = [None; KEYS_AHEAD];
        let mut row = None;
        for (at, &place) in self.places[..self.used].iter().enumerate() {
            let Expected { key, field: Some(field) } = self.all[at] else { continue };
            if field.len() > FIELD_BYTES {
                continue;
            }
            let Some(shard) = shards.owner_of(place) else { continue };
            let known = row.filter(|(of, _)| *of == place).map(|(_, generation)| generation);
            let generation = known.unwrap_or_else(|| shard.generation_ahead(database, place, key));
            row = Some((place, generation));
            let Some(generation) = generation else { continue };
            let name = FieldName { database, key, generation, field };
            let of_field = foreseen.push_field(&shard.store, &name);
            shard.prefetch(namespace, of_field);
            places[at] = Some(of_field);
        }
        for (at, of_field) in places.iter().enumerate() {
            if let &Some(of_field) = of_field
                && let Some(shard) = shards.owner_of(self.places[at])
            {
                shard.prefetch_entry(namespace, of_field);
            }
        }
    }
}

impl Shard {
    /// Tells the shard what is about to be used, at most [`KEYS_AHEAD`] keys or fields, and returns
    /// how many it heard. A hint: changes nothing, and keys of other shards are passed over.
    #[inline]
    pub fn expect<'k>(&mut self, database: u8, all: impl Iterator<Item = Expected<'k>>) -> usize {
        let ahead = Ahead::of(all, |key| self.store.place_key(database, key));
        let mut foreseen = self.foreseen.take().unwrap_or_default();
        let heard = ahead.ask(database, &mut foreseen, self);
        self.foreseen = Some(foreseen);
        heard
    }

    /// As [`Shard::expect`], of keys without fields.
    #[inline]
    pub fn expect_keys<'k>(&mut self, database: u8, keys: impl Iterator<Item = &'k [u8]>) -> usize {
        self.expect(database, keys.map(Expected::from))
    }

    /// Asks for the first lines of the entry, once its index line is likely there.
    #[inline]
    pub(crate) fn prefetch_entry(&mut self, namespace: u32, hash: u64) {
        let Some(index) = self.spaces.get(namespace) else { return };
        if let Some(location) = index.guess(hash) {
            let state = self.cache.get(&self.store.table, location.segment());
            let entry = state.segment.base().as_ptr().wrapping_add(location.offset() as usize);
            prefetch::for_reading(entry, ENTRY_BYTES);
        }
    }

    /// Says that `key` will be looked up soon: its index line is asked for. Returns the hash for
    /// [`Shard::expect_entry`].
    #[inline]
    #[must_use]
    pub fn expect_key(&self, database: u8, key: &[u8]) -> u64 {
        let hash = self.store.place_key(database, key);
        self.prefetch(u32::from(database), hash);
        hash
    }

    /// Asks for the first line of the entry of a key named a moment ago with
    /// [`Shard::expect_key`].
    #[inline]
    pub fn expect_entry(&mut self, database: u8, hash: u64) {
        self.prefetch_entry(u32::from(database), hash);
    }

    /// Says that `length` bytes at `offset` of the log's open segment will be taken in soon: they
    /// lie in the cache of whoever wrote them.
    #[inline]
    pub fn expect_notice(&self, log: &ClientLog, offset: u32, length: usize) {
        let Some(segment) = log.segment() else { return };
        let start = segment.base().as_ptr().wrapping_add(offset as usize);
        // Version and seal go into the first line: it comes to be written at once.
        prefetch::for_writing(start, 1);
        let rest = LINE - start.addr() % LINE;
        prefetch::for_reading(start.wrapping_add(rest), length.saturating_sub(rest));
    }
}
