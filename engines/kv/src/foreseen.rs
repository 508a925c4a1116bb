//! Places of keys and fields worked out once: by the look-ahead over a pipeline, or by the request itself.
//!
//! To find its place in the index a key or a field takes a hash. A look-ahead needs the places to ask for
//! lines, and leaves them here for the requests, which come soon after. They follow from key or field alone,
//! so nothing here can become wrong: what does not fit the request is only of no use to it.

use std::ops::Range;

use crate::Keyspace;
use crate::field::FieldName;
use crate::rows::fields_of;
use crate::same::same;
use crate::shard::Shard;
use crate::shard::ahead::KEYS_AHEAD;
use crate::store::Store;

/// Bytes of keys kept: more than the usual look-ahead has.
const KEPT_BYTES: usize = 64 << 10;
/// Longest key kept: to compare a longer one costs as much as to place it.
const KEY_BYTES: usize = 256;

/// Where a key belongs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    /// Its place in the index: see [`crate::placement`].
    pub place: u64,
    /// A look-ahead asked for its lines a moment ago.
    pub asked: bool,
}

impl From<u64> for Placed {
    fn from(place: u64) -> Self {
        Self { place, asked: false }
    }
}

#[derive(Clone, Debug)]
struct Worked {
    namespace: u32,
    /// The key, or the field's name, among the bytes kept.
    name: Range<u32>,
    /// The row's, of a field.
    generation: u64,
    place: u64,
}

/// What was worked out, in the order in which it is likely asked for.
#[derive(Debug, Default)]
struct InOrder {
    all: Vec<Worked>,
    /// What is likely asked for next.
    next: usize,
}

impl InOrder {
    fn clear(&mut self) {
        self.all.clear();
        self.next = 0;
    }

    /// The place of the next one, or of the one before, where it has this name: a command that reads and
    /// writes asks twice.
    #[inline]
    fn find(&mut self, bytes: &[u8], namespace: u32, generation: u64, name: &[u8]) -> Option<u64> {
        for at in [self.next, self.next.wrapping_sub(1)] {
            let Some(worked) = self.all.get(at) else { continue };
            let kept = bytes.get(worked.name.start as usize..worked.name.end as usize);
            if worked.generation == generation
                && worked.namespace == namespace
                && kept.is_some_and(|kept| same(kept, name))
            {
                self.next = at + 1;
                return Some(worked.place);
            }
        }
        None
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Foreseen {
    bytes: Vec<u8>,
    keys: InOrder,
    fields: InOrder,
}

impl Foreseen {
    /// Forgets all.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_BYTES);
        self.keys.clear();
        self.fields.clear();
    }

    #[inline]
    fn keep(&mut self, name: &[u8]) -> Range<u32> {
        let start = self.bytes.len() as u32;
        self.bytes.extend_from_slice(name);
        start..self.bytes.len() as u32
    }

    /// Keeps the place of a database's key.
    #[inline]
    pub fn push_key(&mut self, namespace: u32, key: &[u8], place: u64) {
        if key.len() > KEY_BYTES {
            return;
        }
        let name = self.keep(key);
        self.keys.all.push(Worked { namespace, name, generation: 0, place });
    }

    /// The place of a database's key, as foreseen.
    #[inline]
    pub fn find_key(&mut self, database: u32, key: &[u8]) -> Option<u64> {
        self.keys.find(&self.bytes, database, 0, key)
    }

    /// Works out the place of a field and keeps it.
    #[inline]
    pub fn push_field(&mut self, store: &Store, field: &FieldName<'_>) -> u64 {
        let place = store.place_field(field);
        if self.fields.all.len() < KEYS_AHEAD {
            let (namespace, generation) = (fields_of(field.database), field.generation);
            let name = self.keep(field.field);
            self.fields.all.push(Worked { namespace, name, generation, place });
        }
        place
    }

    /// The place of a field, as foreseen.
    #[inline]
    fn find_field(&mut self, field: &FieldName<'_>) -> Option<u64> {
        let namespace = fields_of(field.database);
        self.fields.find(&self.bytes, namespace, field.generation, field.field)
    }
}

impl Keyspace<'_> {
    /// Where a database's key belongs.
    #[inline]
    pub(crate) fn place_key(&mut self, database: u8, key: &[u8]) -> Placed {
        let home = self.home_mut();
        let foreseen = home.foreseen.as_mut();
        match foreseen.and_then(|all| all.find_key(u32::from(database), key)) {
            Some(place) => Placed { place, asked: true },
            None => home.store().place_key(database, key).into(),
        }
    }

    /// Where a field belongs.
    #[inline]
    pub(crate) fn place_field(&mut self, field: &FieldName<'_>) -> Placed {
        self.home_mut().place_field(field)
    }
}

impl Shard {
    /// Where a field belongs.
    #[inline]
    pub(crate) fn place_field(&mut self, field: &FieldName<'_>) -> Placed {
        match self.foreseen.as_mut().and_then(|all| all.find_field(field)) {
            Some(place) => Placed { place, asked: true },
            None => self.store.place_field(field).into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use beeline_pmem::{Pool, PoolOptions};

    use super::*;
    use crate::{Embedded, Expected, PutOptions, StoreOptions};

    #[test]
    fn requests_find_what_a_look_ahead_worked_out_for_them() {
        let pool = Pool::dram(&PoolOptions::volatile(64 << 10, 4 << 20)).unwrap();
        let options = StoreOptions { shards: 2, ..StoreOptions::default() };
        let store = Embedded::from(Store::open(pool, options).unwrap());
        store.with_all(|keys| {
            let mut row = keys.new_row(1, 0).unwrap();
            for field in [b"a", b"b"] {
                keys.put_field(0, b"row", &mut row, field, &[b"value"]).unwrap();
            }
            keys.put_head(0, b"row", &row).unwrap();
            keys.put(0, b"string", &[b"value"], PutOptions::default()).unwrap();
            let told = |key: &'static [u8], field| Expected { key, field: Some(field) };
            let all = [
                told(b"row", b"a"),
                told(b"string", b"a"),
                told(b"nothing", b"a"),
                told(b"row", b"b"),
                told(b"row", b"c"),
            ];
            assert_eq!(keys.expect(0, all.into_iter()), 5);
            assert_eq!(foreseen(keys).fields.all.len(), 3, "of the row alone");
            for (key, asked) in [
                (b"row".as_slice(), true),
                (b"row", true),
                (b"other", false),
                (b"string", true),
                (b"row", false),
                (b"nothing", true),
            ] {
                let placed = keys.place_key(0, key);
                assert_eq!((placed.place, placed.asked), (keys.store().place_key(0, key), asked));
                assert!(!keys.place_key(1, key).asked, "of another database");
            }
            // A read and a write of the same field, and so on; `next` moves where a look-up was foreseen.
            for (field, there, next) in [
                (b"a", true, 1),
                (b"a", true, 1),
                (b"b", true, 2),
                (b"c", false, 3),
                (b"a", true, 3),
            ] {
                let found = keys.field(0, b"row", &row, field).unwrap();
                assert_eq!((found.is_some(), foreseen(keys).fields.next), (there, next));
            }
            assert!(!keys.put_field(0, b"row", &mut row, b"b", &[b"new"]).unwrap());
            assert!(keys.delete_field(0, b"row", &mut row, b"a").unwrap());
            assert_eq!(row.length, 1);
        });
    }

    fn foreseen<'k>(keys: &'k mut Keyspace<'_>) -> &'k Foreseen {
        keys.home_mut().foreseen.as_deref().unwrap()
    }
}
