//! Where a key belongs: its shard, and its place in that shard's index.
//!
//! ```text
//! key ── hash under the seed, which clients know ──▶ shard
//!     └─ hash under a key that nobody is told    ──▶ place in the index, position in scans
//! ```
//!
//! Two hashes, because the first can be aimed: who knows the seed makes any number of keys that
//! share all 64 bits, and in an index placed by it each look-up of one of them would walk past
//! all the others. The second is SipHash, whose outputs (scans show most of their bits, as
//! cursors) tell nothing about its key. Both are derived from the pool's secret, so a restart
//! changes neither.

#[cfg(debug_assertions)]
use std::cell::Cell;

use crate::entry::{Header, Sealer};
use crate::expiries::is_beside;
use crate::field::FieldName;
use crate::row_ends::{self, ROW_ENDS};
use crate::rows::{database_of, fields_of, is_fields};
use crate::service_rows::ROW_TIMES;
use crate::siphash::SipHash;
use crate::space::{IN_ROWS, row_of};

/// The hash that finds a key's shard: database and key under the pool's seed. Anybody who may
/// reach the store may know the seed: nothing but the choice of a shard rests on this hash.
#[must_use]
#[inline]
pub fn hash_key(seed: u64, database: u8, key: &[u8]) -> u64 {
    hash_in(seed, u32::from(database), key)
}

/// As [`hash_key`], of a key in any namespace or of its row.
#[inline]
pub(crate) fn hash_in(seed: u64, namespace: u32, key: &[u8]) -> u64 {
    let seed = seed ^ u64::from(namespace).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    xxhash_rust::xxh3::xxh3_64_with_seed(key, seed)
}

/// The shard, among `shards`, of a key with this [`hash_key`].
#[must_use]
#[inline]
pub fn shard_of_hash(hash: u64, shards: usize) -> usize {
    (((hash & 0xFFFF_FFFF) * shards as u64) >> 32) as usize
}

#[cfg(debug_assertions)]
thread_local! {
    static PLACED: Cell<u64> = const { Cell::new(0) };
}

/// How many keys this thread hashed for their places, in builds with debug assertions: tests count the work
/// of a request so.
#[cfg(debug_assertions)]
#[doc(hidden)]
#[must_use]
pub fn keys_placed() -> u64 {
    PLACED.with(Cell::get)
}

/// The hashes of one store.
pub(crate) struct Placement {
    /// See [`hash_key`].
    pub seed: u64,
    pub shards: usize,
    secret: [u64; 2],
    /// The low bits of a place, which hold the shard.
    shard_bits: u64,
}

impl std::fmt::Debug for Placement {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Placement(secret, {} shards)", self.shards)
    }
}

impl Placement {
    /// Derives everything from the pool's secret, in ways that no entry's seal is made in: no
    /// segment lives so long.
    pub fn new(sealer: &Sealer, shards: usize) -> Self {
        let header = Header { version: u64::MAX, ..Header::default() };
        let derive = |purpose: u32| sealer.seal(u32::MAX, u64::MAX, purpose, &header);
        Self {
            seed: derive(u32::MAX),
            shards,
            secret: [derive(u32::MAX - 1), derive(u32::MAX - 2)],
            shard_bits: shards.next_power_of_two() as u64 - 1,
        }
    }

    /// The shard of a key.
    #[inline]
    pub fn shard(&self, namespace: u32, key: &[u8]) -> usize {
        if self.shards == 1 {
            return 0;
        }
        let decides = if namespace & IN_ROWS == 0 { key } else { row_of(key) };
        // Fields lie with the key whose row they are, expiries with their value, and mark and time of a row
        // with the row.
        let namespace = if is_beside(namespace) {
            database_of(namespace)
        } else if namespace == ROW_ENDS || namespace == ROW_TIMES {
            row_ends::namespace_of(key).unwrap_or(namespace)
        } else {
            namespace
        };
        shard_of_hash(hash_in(self.seed, namespace, decides), self.shards)
    }

    /// The hash a key has in its index; the lowest bits name its shard. That of a field is
    /// [`Placement::place_field`]'s.
    #[inline]
    pub fn place(&self, namespace: u32, key: &[u8]) -> u64 {
        if is_fields(namespace)
            && let Some((name, _)) = FieldName::of_stored(database_of(namespace), key)
        {
            return self.place_field(&name);
        }
        #[cfg(debug_assertions)]
        PLACED.with(|placed| placed.set(placed.get() + 1));
        let [low, high] = self.secret;
        let hash = SipHash::of([low, high ^ u64::from(namespace)], key);
        if self.shards == 1 {
            return hash;
        }
        hash & !self.shard_bits | self.shard(namespace, key) as u64
    }

    /// As [`Placement::place`], of a row's field: by the row's generation, which tells the row and is short,
    /// and the field's name. Its stored key need not be made for it.
    #[inline]
    pub fn place_field(&self, name: &FieldName<'_>) -> u64 {
        #[cfg(debug_assertions)]
        PLACED.with(|placed| placed.set(placed.get() + 1));
        let [low, high] = self.secret;
        let key = [low, high ^ u64::from(fields_of(name.database))];
        let hash = SipHash::of_both(key, name.generation, name.field);
        if self.shards == 1 {
            return hash;
        }
        hash & !self.shard_bits | self.shard(name.database, name.key) as u64
    }

    /// The shard that a place names.
    #[inline]
    pub fn owner(&self, place: u64) -> usize {
        (place & self.shard_bits) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn placement(shards: usize) -> Placement {
        Placement::new(&Sealer::new(b"0123456789abcdef"), shards)
    }

    /// Keys of 16 bytes that share all bits of their hash under `seed`.
    fn aimed(seed: u64, count: u64) -> impl Iterator<Item = [u8; 16]> {
        // Bytes 24..56 of XXH3's default secret.
        const SECRET: [u64; 4] = [
            0x1F67_B3B7_A4A4_4072,
            0x78E5_C0CC_4EE6_79CB,
            0x2172_FFCC_7DD0_5A82,
            0x8E24_43F7_7446_08B8,
        ];
        let low = (SECRET[0] ^ SECRET[1]).wrapping_add(seed);
        let high = (SECRET[2] ^ SECRET[3]).wrapping_sub(seed);
        // With halves l and h after these masks, the hash depends on swap(l) + h + fold(l * h). For
        // l = 2^32 the fold is h with its halves swapped, so only the sum of h's halves counts.
        const SUM: u64 = 0x00FF_FFFF;
        (0..count).map(move |upper| {
            let mut key = [0; 16];
            key[..8].copy_from_slice(&(low ^ 1 << 32).to_le_bytes());
            key[8..].copy_from_slice(&(high ^ (upper << 32 | (SUM - upper))).to_le_bytes());
            key
        })
    }

    #[test]
    fn keys_aimed_at_one_hash_lie_apart_in_the_index() {
        const KEYS: u64 = 4096;
        for shards in [1, 3] {
            let placement = placement(shards);
            let mut public = HashSet::new();
            let (mut places, mut tops) = (HashSet::new(), HashSet::new());
            for key in aimed(placement.seed, KEYS) {
                public.insert(hash_key(placement.seed, 0, &key));
                let place = placement.place(0, &key);
                places.insert(place);
                tops.insert(place >> 48);
            }
            assert_eq!(public.len(), 1, "the keys were aimed well");
            assert_eq!(places.len() as u64, KEYS);
            // Of 65,536 tops, random keys hit 3,971 or so.
            assert!(tops.len() > 3800, "{} different beginnings", tops.len());
        }
    }

    proptest! {
        #[test]
        fn a_place_names_the_shard_that_clients_find(
            shards in 1_usize..1025, database in 0_u8..16, key in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let placement = placement(shards);
            let shard = shard_of_hash(hash_key(placement.seed, database, &key), shards);
            let database = u32::from(database);
            prop_assert_eq!(placement.shard(database, &key), shard);
            prop_assert_eq!(placement.owner(placement.place(database, &key)), shard);
        }
    }

    #[test]
    fn a_field_has_one_place_by_name_and_by_stored_key_and_others_have_others() {
        let placement = placement(3);
        let name = FieldName { database: 2, key: b"row", generation: 9, field: b"field" };
        let mut stored = Vec::new();
        name.push_to(&mut stored);
        let place = placement.place_field(&name);
        assert_eq!(placement.place(fields_of(2), &stored), place);
        assert_eq!(placement.owner(place), placement.shard(2, b"row"), "with its row");
        assert_ne!(placement.place_field(&FieldName { field: b"fielc", ..name }), place);
        assert_ne!(placement.place_field(&FieldName { generation: 8, ..name }), place);
        assert_ne!(placement.place_field(&FieldName { database: 1, ..name }), place);
        // What a damaged medium may hold has a place, too.
        assert_ne!(placement.place(fields_of(2), &stored[..9]), place);
    }

    #[test]
    fn another_secret_places_keys_elsewhere() {
        let (one, other) = (placement(1), Placement::new(&Sealer::new(b"another secret!!"), 1));
        assert_ne!(one.place(0, b"key"), other.place(0, b"key"));
        assert_ne!(one.place(0, b"key"), one.place(1, b"key"));
    }
}
