//! Lines asked for ahead of their use: a server that has a batch of requests in hand names all of
//! them first, so that their cache misses overlap.

use beeline_os::{MemoryObject as _, prefetch};

use crate::ClientLog;
use crate::shard::Shard;

/// Most keys asked for at once: about as many lines as a core can wait for.
pub const KEYS_AHEAD: usize = 16;
/// Bytes of an entry asked for: header and a key of usual length.
const ENTRY_BYTES: usize = 128;
const LINE: usize = 64;

/// Hashes of keys that are about to be used.
#[derive(Debug)]
pub(crate) struct Ahead {
    hashes: [u64; KEYS_AHEAD],
    used: usize,
}

impl Ahead {
    /// The hashes of the first [`KEYS_AHEAD`] keys.
    #[inline]
    pub fn of<'k>(keys: impl Iterator<Item = &'k [u8]>, hash: impl Fn(&[u8]) -> u64) -> Self {
        let mut ahead = Self { hashes: [0; KEYS_AHEAD], used: 0 };
        for (place, key) in ahead.hashes.iter_mut().zip(keys) {
            *place = hash(key);
            ahead.used += 1;
        }
        ahead
    }

    pub fn as_slice(&self) -> &[u64] {
        &self.hashes[..self.used]
    }
}

impl Shard {
    /// Tells the shard which keys are about to be used, at most [`KEYS_AHEAD`] of them, and returns
    /// how many it heard. A hint: changes nothing, and keys of other shards are passed over.
    #[inline]
    pub fn expect_keys<'k>(&mut self, database: u8, keys: impl Iterator<Item = &'k [u8]>) -> usize {
        let ahead = Ahead::of(keys, |key| self.store.place_key(database, key));
        let namespace = u32::from(database);
        for entries in [false, true] {
            for &place in ahead.as_slice() {
                if self.store.owner_of(place) != self.index {
                    continue;
                }
                if entries {
                    self.prefetch_entry(namespace, place);
                } else {
                    self.prefetch(namespace, place);
                }
            }
        }
        ahead.used
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
