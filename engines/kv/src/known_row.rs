//! The row that was looked up last: requests often stay with one.
//!
//! What is known of it holds as long as the key's slot points at the same head: a head is never changed in
//! place, so the slot says it all, and neither key nor head are read again. As long as no slot of the index
//! changed at all, the slot need not be looked for either. Kept are heads that do not expire and that no
//! client can write; whatever gives a key of this place another entry forgets it, so that a head that comes
//! to lie where this one lay is not taken for it.

use crate::field::FieldName;
use crate::index::{Location, SlotId};
use crate::rows::{Row, fields_of};
use crate::same::same;
use crate::shard::{EntryRef, Shard};
use crate::stats;
use crate::{Keyspace, KvError, Version};

/// Longest key kept.
const KEY_BYTES: usize = 256;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct KnownRow {
    database: u32,
    place: u64,
    key: Vec<u8>,
    /// Nowhere, where no row is known.
    location: Location,
    kind: u8,
    changed: Version,
    generation: u64,
    /// Its slot, and the index's count of changes when that was looked for; `None`: not yet.
    slot: Option<(SlotId, u64)>,
}

impl KnownRow {
    /// A key with this place has another entry now.
    #[inline]
    pub fn forget(&mut self, place: u64) {
        if self.place == place {
            self.forget_all();
        }
    }

    /// Any key may have another entry now, or another index.
    #[inline]
    pub fn forget_all(&mut self) {
        self.location = Location::default();
        self.slot = None;
    }
}

impl Shard {
    /// The row that was looked up last, if it is the one at this key and is as it was. Counts as a look-up.
    #[inline]
    pub(crate) fn known_row(&mut self, database: u8, key: &[u8]) -> Option<Row> {
        let namespace = u32::from(database);
        let generation = self.use_known_row(namespace, key)?;
        let KnownRow { kind, changed, .. } = self.known_row;
        let fields = self.counted(fields_of(namespace), generation);
        Some(Row::told(kind, changed.max(fields.changed), fields.count, 0, generation))
    }

    /// The generation of the row that [`Shard::known_row`] tells of. Counts as a look-up.
    #[inline]
    fn use_known_row(&mut self, database: u32, key: &[u8]) -> Option<u64> {
        let generation = self.known_generation(database, key)?;
        let id = self.known_slot()?;
        self.look(self.known_row.place);
        self.mark_used(database, id);
        stats::add(&self.counters().hits, 1);
        Some(generation)
    }

    /// The slot of the row that is known, which still points at its head.
    #[inline]
    fn known_slot(&mut self) -> Option<SlotId> {
        let known = &mut self.known_row;
        let index = self.spaces.get(known.database)?;
        match known.slot {
            Some((id, changes)) if changes == index.changes() => Some(id),
            _ => {
                let id = index.find(known.place, |slot| slot.location == known.location)?;
                known.slot = Some((id, index.changes()));
                Some(id)
            }
        }
    }

    /// The generation of the row at this key, if it is the one that was looked up last. Not a look-up.
    #[inline]
    pub(crate) fn known_generation(&self, database: u32, key: &[u8]) -> Option<u64> {
        let known = &self.known_row;
        let same = known.database == database
            && known.location != Location::default()
            && same(&known.key, key);
        same.then_some(known.generation)
    }

    /// Keeps what was found at a key.
    pub(crate) fn keep_row(&mut self, database: u8, entry: &EntryRef, key: &[u8], generation: u64) {
        let location = entry.location;
        let known = &mut self.known_row;
        known.forget_all();
        let changes = Location::UNTRUSTED | Location::TOUCHED;
        if !location.is_plain() || location.has(changes) || key.len() > KEY_BYTES {
            return;
        }
        known.database = u32::from(database);
        known.place = entry.hash;
        known.key.clear();
        known.key.extend_from_slice(key);
        (known.location, known.kind) = (location, entry.kind);
        (known.changed, known.generation) = (entry.changed, generation);
    }
}

impl Keyspace<'_> {
    /// As [`Keyspace::put_field`], for a row of `kind` that was looked up last and is as it was: a pipeline
    /// often stays with one, and then neither its entry nor its count is looked at. Whether the field is new;
    /// `None`, and nothing stored: the row has to be looked up. A look-up as [`Keyspace::row`] is.
    ///
    /// Errors: as [`Keyspace::put_field`].
    #[inline]
    pub fn put_known_field(
        &mut self,
        (database, key): (u8, &[u8]),
        kind: u8,
        field: &[u8],
        value: &[&[u8]],
    ) -> Result<Option<bool>, KvError> {
        if self.joins_several() {
            return Ok(None);
        }
        let (shard, database) = (self.home_mut(), u32::from(database));
        if shard.known_row.kind != kind {
            return Ok(None);
        }
        let Some(generation) = shard.use_known_row(database, key) else { return Ok(None) };
        let name = FieldName { database, key, generation, field };
        let placed = shard.place_field(&name);
        Ok(Some(shard.put_field(&name, placed, value)?.new))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use beeline_env::ManualClock;
    use beeline_pmem::{Pool, PoolOptions};

    use crate::{Embedded, Keyspace, PutOptions, Store, StoreOptions};

    const KIND: u8 = 1;

    fn put(keys: &mut Keyspace<'_>, database: u8, key: &[u8], field: &[u8]) -> Option<bool> {
        keys.put_known_field((database, key), KIND, field, &[b"value"]).unwrap()
    }

    #[test]
    fn a_row_is_known_while_its_key_has_the_same_head_and_its_slot_may_lie_elsewhere() {
        let clock = Arc::new(ManualClock::new(1_000_000));
        for shards in [1, 2] {
            let pool = Pool::dram(&PoolOptions::volatile(64 << 10, 8 << 20)).unwrap();
            let options = StoreOptions { shards, clock: clock.clone(), ..StoreOptions::default() };
            let store = Embedded::from(Store::open(pool, options).unwrap());
            let owner = store.store().shard_of(0, b"row");
            store
                .with_shard(owner, |keys| {
                    keys.begin_batch();
                    let mut row = keys.new_row(KIND, 0).unwrap();
                    keys.put_field(0, b"row", &mut row, b"a", &[b"value"]).unwrap();
                    keys.put_head(0, b"row", &row).unwrap();
                    keys.end_batch();
                    assert_eq!(put(keys, 0, b"row", b"a"), None, "never looked up");
                    assert!(keys.row(0, b"row").unwrap().is_some());
                    assert_eq!(put(keys, 0, b"row", b"a"), Some(false));
                    assert_eq!(put(keys, 0, b"row", b"b"), Some(true));
                    assert_eq!(keys.row(0, b"row").unwrap().unwrap().length, 2);
                    assert_eq!(put(keys, 1, b"row", b"a"), None, "another database");
                    assert_eq!(put(keys, 0, b"rov", b"a"), None, "another key");
                    let other = keys.put_known_field((0, b"row"), KIND + 1, b"a", &[b"value"]);
                    assert_eq!(other.unwrap(), None, "another kind");
                    // The index grows: its slot goes to other pages.
                    for n in 0..20_000_u32 {
                        let key = n.to_be_bytes();
                        if keys.store().shard_of(0, &key) == owner {
                            keys.put(0, &key, &[b"1"], PutOptions::default()).unwrap();
                        }
                        if n % 64 == 0 {
                            clock.advance(Duration::from_secs(1));
                            keys.home_mut().tick();
                            assert_eq!(put(keys, 0, b"row", b"a"), Some(false), "{n}");
                            assert_eq!(
                                keys.idle_seconds(0, b"row").unwrap(),
                                Some(0),
                                "its own slot"
                            );
                        }
                    }
                    keys.set_expiry(0, b"row", 1 << 60).unwrap();
                    assert_eq!(put(keys, 0, b"row", b"a"), None, "it has an expiry");
                    keys.set_expiry(0, b"row", 0).unwrap();
                    assert!(keys.row(0, b"row").unwrap().is_some());
                    let known = put(keys, 0, b"row", b"a");
                    assert!(keys.delete(0, b"row").unwrap());
                    assert_eq!(
                        (known, put(keys, 0, b"row", b"a")),
                        (Some(false), None),
                        "it ended"
                    );
                    keys.commit().unwrap();
                })
                .unwrap();
        }
    }
}
