//! Fields of rows by name: found and stored without the key under which they lie, as long as that lies there.
//!
//! A field's place in the index follows from its row's generation and its name. The position, which its stored
//! key has as well, is copied from the entry that is there, and worked out for a new field alone.

use crate::KvError;
use crate::entry;
use crate::field::{FieldName, field_at_its_place};
use crate::foreseen::Placed;
use crate::index::{Location, SlotId};
use crate::rows::fields_of;
use crate::shard::batch::Batch;
use crate::shard::log::Chain;
use crate::shard::look::holds_field;
use crate::shard::{PutOptions, Shard, Stored};
use crate::store::Need;

impl Shard {
    /// The slot of a field, tombstones included, and what it points at.
    #[inline]
    pub(crate) fn find_field(
        &mut self,
        field: &FieldName<'_>,
        place: u64,
    ) -> Option<(SlotId, Location)> {
        self.look(place);
        let index = self.spaces.get(fields_of(field.database))?;
        let (cache, table) = (&mut self.cache, &self.store.table);
        let mut location = Location::default();
        let found = index.find(place, |slot| {
            location = slot.location;
            // A slot without readable bytes answers for its hash.
            !location.is_readable()
                || holds_field(cache.get(table, location.segment()), slot, field)
        });
        found.map(|id| (id, location))
    }

    /// Stores the value of a field of this shard.
    ///
    /// Errors: as [`Shard::put`].
    pub(crate) fn put_field(
        &mut self,
        field: &FieldName<'_>,
        placed: Placed,
        value: &[&[u8]],
    ) -> Result<Stored, KvError> {
        let namespace = fields_of(field.database);
        if !placed.asked {
            self.prefetch(namespace, placed.place);
        }
        let length = value.iter().map(|part| part.len()).sum();
        let lengths = (field.stored_bytes(), length);
        let mut room = self.take_reserved();
        let admitted = self.admit_entry(namespace, lengths, &mut room);
        self.put_back_reserved(room);
        admitted?;
        let mut stored = std::mem::take(&mut self.field_key);
        stored.clear();
        let put = if placed.asked {
            let slot_bytes = entry::slot_bytes_for(lengths.0, length) as u32;
            self.put_field_found(field, placed.place, (value, slot_bytes), &mut stored)
        } else {
            self.put_field_sought(field, placed.place, value, &mut stored)
        };
        self.field_key = stored;
        put
    }

    /// The part of [`Shard::put_field`] where the lines of the old entry have come: it is found first.
    #[inline]
    fn put_field_found(
        &mut self,
        field: &FieldName<'_>,
        place: u64,
        (value, slot_bytes): (&[&[u8]], u32),
        stored: &mut Vec<u8>,
    ) -> Result<Stored, KvError> {
        let namespace = fields_of(field.database);
        // With room in the log nothing moves any more, and the slot that is found now stays.
        let chain = self.batch.as_ref().map_or(Chain::Data, Batch::chain);
        self.make_head(chain, slot_bytes, Need::Data)?;
        self.install_moves();
        let found = self.find_field(field, place);
        match found {
            Some((_, location)) if location.is_trusted() => {
                let state = self.cache.get(&self.store.table, location.segment());
                let start = location.offset() + entry::HEADER_BYTES;
                stored.extend_from_slice(state.bytes(start, field.stored_bytes()));
            }
            _ => field.push_to(stored),
        }
        debug_assert!(field_at_its_place(stored), "the key of this very field");
        let appended = self.append_put(namespace, place, stored, value, PutOptions::default())?;
        let new = self.install_field(field, place, (stored, found), &appended);
        Ok(Stored { version: appended.version, new })
    }

    /// The part of [`Shard::put_field`] where no look-ahead asked for the lines of the old entry: they arrive
    /// while the shard writes the new one.
    fn put_field_sought(
        &mut self,
        field: &FieldName<'_>,
        place: u64,
        value: &[&[u8]],
        stored: &mut Vec<u8>,
    ) -> Result<Stored, KvError> {
        let namespace = fields_of(field.database);
        field.push_to(stored);
        self.prefetch_entry(namespace, place);
        let appended = self.append_put(namespace, place, stored, value, PutOptions::default())?;
        self.install_moves();
        let found = self.find_field(field, place);
        let new = self.install_field(field, place, (stored, found), &appended);
        Ok(Stored { version: appended.version, new })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use beeline_pmem::{Pool, PoolOptions};

    use crate::{Embedded, Expected, Keyspace, Store, StoreOptions, audit};

    const KEY: &[u8] = b"row";

    fn name(n: u32) -> Vec<u8> {
        format!("field:{n:08}").into_bytes()
    }

    /// Puts these fields as a pipeline does, each behind a look-ahead.
    fn put(keys: &mut Keyspace<'_>, model: &mut BTreeMap<Vec<u8>, u32>, turn: u32, fields: &[u32]) {
        let names: Vec<_> = fields.iter().map(|n| name(*n)).collect();
        keys.expect(0, names.iter().map(|name| Expected { key: KEY, field: Some(name) }));
        let mut row = keys.row(0, KEY).unwrap().unwrap();
        for (at, field) in names.into_iter().enumerate() {
            let value = turn.to_le_bytes().repeat(40 + at);
            let new = keys.put_field(0, KEY, &mut row, &field, &[&value]).unwrap();
            assert_eq!(new, model.insert(field, turn).is_none());
        }
        assert_eq!(row.length as usize, model.len());
    }

    #[test]
    fn fields_that_were_foreseen_are_found_however_the_log_moves_meanwhile() {
        let pool = Pool::dram(&PoolOptions::volatile(64 << 10, 24 * (64 << 10))).unwrap();
        let store = Embedded::from(Store::open(pool, StoreOptions::default()).unwrap());
        let mut model = BTreeMap::from([(name(0), 0)]);
        store.with_all(|keys| {
            keys.begin_batch();
            let mut row = keys.new_row(1, 0).unwrap();
            keys.put_field(0, KEY, &mut row, &name(0), &[b"first"]).unwrap();
            keys.put_head(0, KEY, &row).unwrap();
            keys.end_batch();
            keys.commit().unwrap();
        });
        let mut random = 1_u32;
        for turn in 1..6000 {
            let fields = [0; 16].map(|_| {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // The same ones more than once in a batch, and many that stay long.
                (random >> 16) % if random & 1 << 15 == 0 { 4 } else { 2000 }
            });
            store.with_all(|keys| {
                if turn % 2 == 0 {
                    keys.begin_batch();
                    put(keys, &mut model, turn, &fields);
                    keys.end_batch();
                } else {
                    put(keys, &mut model, turn, &fields);
                }
                keys.commit().unwrap();
            });
            while store.maintain().unwrap() {}
        }
        assert!(store.store().stats().total.bytes_stored > 8 << 20, "many times the pool");
        store.with_all(|keys| {
            let row = keys.row(0, KEY).unwrap().unwrap();
            let mut met = BTreeMap::new();
            keys.visit_row(0, KEY, &row, (0, usize::MAX), |field, value| {
                let turn = value.first_chunk::<4>().map_or(0, |turn| u32::from_le_bytes(*turn));
                met.insert(field.to_vec(), if value == b"first" { 0 } else { turn });
            })
            .unwrap();
            assert_eq!(met, model);
        });
        let findings = audit(store.store(), store.shards());
        assert!(findings.is_empty(), "{findings:#?}");
    }
}
