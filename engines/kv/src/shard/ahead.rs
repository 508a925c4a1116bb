//! Lines asked for ahead of their use: a server that has a batch of requests in hand names all of
//! them first, so that their cache misses overlap.

use beeline_os::MemoryObject as _;

use crate::ClientLog;
use crate::index::prefetch;
use crate::shard::Shard;

const LINE: usize = 64;
/// Most lines of one entry asked for; the processor goes on by itself from there.
const LINES: usize = 8;

impl Shard {
    /// Says that `key` will be looked up soon: its index line is asked for. Returns the hash for
    /// [`Shard::expect_entry`].
    #[inline]
    #[must_use]
    pub fn expect_key(&self, database: u8, key: &[u8]) -> u64 {
        let hash = self.store.hash_key(database, key);
        self.prefetch(database, hash);
        hash
    }

    /// Asks for the first line of the entry of a key named a moment ago with
    /// [`Shard::expect_key`].
    #[inline]
    pub fn expect_entry(&mut self, database: u8, hash: u64) {
        if usize::from(database) < self.databases.len() {
            self.prefetch_entry(database, hash);
        }
    }

    /// Says that `length` bytes at `offset` of the log's open segment will be taken in soon: they
    /// lie in the cache of whoever wrote them.
    #[inline]
    pub fn expect_notice(&self, log: &ClientLog, offset: u32, length: usize) {
        let Some(segment) = log.segment() else { return };
        let start = segment.base().as_ptr().wrapping_add(offset as usize);
        for line in 0..length.div_ceil(LINE).min(LINES) {
            prefetch(start.wrapping_add(line * LINE));
        }
    }
}
