//! The row that was looked up last: requests often stay with one.
//!
//! What is known of it holds as long as the key's slot points at the same head: a head is never changed in
//! place, so the slot says it all, and neither key nor head are read again. Kept are heads that do not
//! expire and that no client can write; whatever gives a key of this place another entry forgets it, so that
//! a head that comes to lie where this one lay is not taken for it.

use crate::Version;
use crate::index::Location;
use crate::rows::{Row, fields_of};
use crate::shard::{EntryRef, Shard};
use crate::stats;

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
}

impl KnownRow {
    /// A key with this place has another entry now.
    #[inline]
    pub fn forget(&mut self, place: u64) {
        if self.place == place {
            self.location = Location::default();
        }
    }
}

impl Shard {
    /// The row that was looked up last, if it is the one at this key and is as it was. Counts as a look-up.
    #[inline]
    pub(crate) fn known_row(&mut self, database: u8, key: &[u8]) -> Option<Row> {
        let known = &self.known_row;
        let namespace = u32::from(database);
        if known.database != namespace || known.location == Location::default() || known.key != key
        {
            return None;
        }
        let (location, place) = (known.location, known.place);
        self.look(place);
        let (kind, generation, changed) = (known.kind, known.generation, known.changed);
        let id = self.spaces.get(namespace)?.find(place, |slot| slot.location == location)?;
        self.mark_used(namespace, id);
        stats::add(&self.counters().hits, 1);
        let fields = self.counted(fields_of(namespace), generation);
        Some(Row::told(kind, changed.max(fields.changed), fields.count, 0, generation))
    }

    /// Keeps what was found at a key.
    pub(crate) fn keep_row(&mut self, database: u8, entry: &EntryRef, key: &[u8], generation: u64) {
        let location = entry.location;
        let known = &mut self.known_row;
        known.location = Location::default();
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
