//! Keys and fields worked out once: by the look-ahead over a pipeline, or by the request itself.
//!
//! A key takes a hash to find its place in the index, and the key under which a field is stored takes two
//! to make: the field's position, and the place of the whole. A look-ahead needs them to ask for lines, and
//! leaves them here for the request, which comes soon after. They follow from key and field alone, so nothing
//! here can become wrong: what does not fit the request is only of no use to it.

use std::ops::Range;

use crate::Keyspace;
use crate::rows::{field_position, fields_of};
use crate::shard::ahead::KEYS_AHEAD;
use crate::store::Store;

/// Bytes of keys kept: more than the usual look-ahead has.
const KEPT_BYTES: usize = 64 << 10;
/// Longest key kept: to compare a longer one costs as much as to place it.
const KEY_BYTES: usize = 256;

/// A row's field: database and key of the row, its generation, and the field's name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldName<'k> {
    pub database: u32,
    pub key: &'k [u8],
    pub generation: u64,
    pub field: &'k [u8],
}

impl FieldName<'_> {
    /// Appends the key under which the field is stored.
    pub fn push_to(&self, out: &mut Vec<u8>) {
        let position = field_position(self.generation, self.field);
        out.reserve(2 + self.key.len() + 16 + self.field.len());
        out.extend_from_slice(&(self.key.len() as u16).to_be_bytes());
        out.extend_from_slice(self.key);
        // One append of a small array is cheaper than two of its parts.
        let both = u128::from(self.generation) << 64 | u128::from(position);
        out.extend_from_slice(&both.to_be_bytes());
        out.extend_from_slice(self.field);
    }

    /// True for the stored key of this field.
    #[inline]
    fn is(&self, stored: &[u8]) -> bool {
        let length = self.key.len();
        stored.len() == 2 + length + 16 + self.field.len()
            && stored[..2] == (length as u16).to_be_bytes()
            && stored[2 + length..][..8] == self.generation.to_be_bytes()
            && &stored[2 + length + 16..] == self.field
            && &stored[2..2 + length] == self.key
    }
}

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
    stored: Range<u32>,
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

    /// The next one, or the one before, where it is of this namespace and `is` accepts its stored key: a
    /// command that reads and writes asks twice.
    #[inline]
    fn find(
        &mut self,
        namespace: u32,
        is: impl Fn(Range<usize>) -> bool,
    ) -> Option<(Range<usize>, u64)> {
        for at in [self.next, self.next.wrapping_sub(1)] {
            let Some(worked) = self.all.get(at) else { continue };
            let stored = worked.stored.start as usize..worked.stored.end as usize;
            if worked.namespace == namespace && is(stored.clone()) {
                self.next = at + 1;
                return Some((stored, worked.place));
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

    /// Keeps the place of a database's key.
    #[inline]
    pub fn push_key(&mut self, database: u32, key: &[u8], place: u64) {
        if key.len() > KEY_BYTES {
            return;
        }
        let start = self.bytes.len() as u32;
        self.bytes.extend_from_slice(key);
        let stored = start..self.bytes.len() as u32;
        self.keys.all.push(Worked { namespace: database, stored, place });
    }

    /// The place of a database's key, as foreseen.
    #[inline]
    pub fn find_key(&mut self, database: u32, key: &[u8]) -> Option<u64> {
        let Self { bytes, keys, .. } = self;
        keys.find(database, |stored| &bytes[stored] == key).map(|(_, place)| place)
    }

    /// Works a field out and keeps it; its place in the index.
    pub fn push(&mut self, store: &Store, name: &FieldName<'_>) -> u64 {
        let (stored, place) = self.work_out(store, name);
        let stored = stored.start as u32..stored.end as u32;
        if self.fields.all.len() < KEYS_AHEAD {
            self.fields.all.push(Worked { namespace: fields_of(name.database), stored, place });
        }
        place
    }

    fn work_out(&mut self, store: &Store, name: &FieldName<'_>) -> (Range<usize>, u64) {
        let start = self.bytes.len();
        name.push_to(&mut self.bytes);
        let place = store.place(fields_of(name.database), &self.bytes[start..]);
        (start..self.bytes.len(), place)
    }

    /// What was foreseen of a field: where its stored key lies, and its place.
    #[inline]
    fn find(&mut self, name: &FieldName<'_>) -> Option<(Range<usize>, u64)> {
        let Self { bytes, fields, .. } = self;
        fields.find(fields_of(name.database), |stored| name.is(&bytes[stored]))
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

    /// Runs `with` with the key under which a field is stored and its place in the index.
    #[inline]
    pub(crate) fn with_field<R>(
        &mut self,
        name: &FieldName<'_>,
        with: impl FnOnce(&mut Self, &[u8], Placed) -> R,
    ) -> R {
        let mut foreseen = self.home_mut().foreseen.take().unwrap_or_default();
        let kept = foreseen.bytes.len();
        let (stored, place) = match foreseen.find(name) {
            Some((stored, place)) => (stored, Placed { place, asked: true }),
            None => {
                let (stored, place) = foreseen.work_out(self.store(), name);
                (stored, place.into())
            }
        };
        let result = with(self, &foreseen.bytes[stored], place);
        foreseen.bytes.truncate(kept);
        self.home_mut().foreseen = Some(foreseen);
        result
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

    fn name<'k>(key: &'k [u8], generation: u64, field: &'k [u8]) -> FieldName<'k> {
        FieldName { database: 3, key, generation, field }
    }

    #[test]
    fn a_stored_key_is_that_of_its_own_field_alone() {
        let names = [
            name(b"key", 7, b"field"),
            name(b"key", 8, b"field"),
            name(b"kex", 7, b"field"),
            name(b"keyf", 7, b"ield"),
            name(b"key", 7, b"fiele"),
            name(b"key", 7, b""),
            name(b"", 7, b"field"),
            name(b"", 0, b""),
        ];
        for (at, mine) in names.iter().enumerate() {
            let mut stored = Vec::new();
            mine.push_to(&mut stored);
            for (other, theirs) in names.iter().enumerate() {
                assert_eq!(theirs.is(&stored), at == other, "{mine:?} {theirs:?}");
            }
        }
    }
}
