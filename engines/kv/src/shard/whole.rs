//! A database as a whole, as far as it lies in one shard: how many keys it has, all of them, any of them.

use crate::KvError;
use crate::index::Slot;
use crate::shard::Shard;
use crate::shard::look::read_key;

impl Shard {
    /// Live keys of a database in this shard; keys past their time count until they are met.
    #[must_use]
    pub fn len(&self, database: u8) -> u64 {
        self.len_in(u32::from(database))
    }

    /// As [`Shard::len`], of any namespace.
    pub(crate) fn len_in(&self, namespace: u32) -> u64 {
        self.look_at_all();
        self.spaces.get(namespace).map_or(0, |index| index.live)
    }

    /// True when the database has no key in this shard.
    #[must_use]
    pub fn is_empty(&self, database: u8) -> bool {
        self.len(database) == 0
    }

    /// Calls `visit` with key and encoding of at least `count` keys (fewer at the end) from
    /// `position` on, in the order of positions, and returns where to go on, `None` at the end.
    /// Positions are below 2^48. A key that is there throughout a scan is met exactly once.
    ///
    /// Errors: [`KvError::Database`].
    pub fn scan(
        &mut self,
        database: u8,
        position: u64,
        count: usize,
        mut visit: impl FnMut(&[u8], u8),
    ) -> Result<Option<u64>, KvError> {
        Self::check_database(database)?;
        self.look_at_all();
        let Some(index) = self.spaces.get(u32::from(database)) else { return Ok(None) };
        let mut slots = Vec::with_capacity(count.min(4096) + 16);
        let next = index.collect(position, count.max(1), &mut slots);
        let now = self.store.clock.unix_ms();
        let mut key = Vec::new();
        for slot in slots.iter().filter(|slot| !slot.location.is_absent()) {
            let state = self.cache.get(&self.store.table, slot.location.segment());
            let header = read_key(state, slot, &mut key);
            let (expires_at_ms, _) = self.expiry_of(u32::from(database), slot, &header);
            if expires_at_ms == 0 || expires_at_ms > now {
                visit(&key, header.kind);
            }
        }
        Ok(next)
    }

    /// Puts some key of the database into `out`; false when there is none.
    ///
    /// Errors: [`KvError::Database`].
    pub fn random_key(&mut self, database: u8, out: &mut Vec<u8>) -> Result<bool, KvError> {
        Self::check_database(database)?;
        self.look_at_all();
        for _ in 0..8 {
            let random = self.random.next();
            let Some(index) = self.spaces.get(u32::from(database)) else { break };
            if index.live == 0 {
                break;
            }
            let live = |slot: &Slot| !slot.location.is_absent();
            let Some(slot) = index.sample(random, usize::MAX, live) else { break };
            let state = self.cache.get(&self.store.table, slot.location.segment());
            let header = read_key(state, &slot, out);
            let (expires_at_ms, _) = self.expiry_of(u32::from(database), &slot, &header);
            if expires_at_ms == 0 || expires_at_ms > self.store.clock.unix_ms() {
                return Ok(true);
            }
            let key = std::mem::take(out);
            self.expire(u32::from(database), slot.hash, &key, expires_at_ms);
        }
        Ok(false)
    }
}
