//! Rows of a database: a key whose value is many small ones, such as a Redis hash.
//!
//! ```text
//! head   namespace 0..15, the key          kind of row; value: generation u64 | length u64
//! field  namespace 32 + database, by row   row = the key; sub-key: generation u64 | position u64 | field
//! ```
//!
//! A row's fields lie in its key's shard, and in order of position, a hash of the field's name. The
//! head says which generation of fields counts. So whatever ends a head (a deletion, another value,
//! its expiry, eviction) ends the row with that one small write; what it leaves behind is collected
//! later by [`Shard::sweep_rows`], and only once what ended it is persisted: a crash may bring the head
//! back, with all its fields.
//!
//! The first field of a row comes with the head in one batch, and the last one leaves with it. All
//! others are one entry each: how many there are, and when one changed last, is counted in memory
//! ([`crate::counted`]). The length in a head is that of the time when it was written; builds before
//! format 3 wrote it with every field and read it.
//!
//! A crash can take a field that was set last and keep the deletion of all others, where neither was
//! acknowledged: an opening deletes heads that count no field ([`Shard::end_hollow_rows`]).
//!
//! Expiry is the head's. A flush of the database is one of its fields, too.

use std::ops::Bound;

use crate::counted::Fields;
use crate::ended::ALL_ROWS;
use crate::fault::{self, KnownBug};
use crate::field::{FieldName, SUB_BYTES};
use crate::ordered::Keys;
use crate::peers::Peer;
use crate::recover::RecoveredHead;
use crate::segments::SegmentState;
use crate::shard::upkeep::Swept;
use crate::shard::{EntryRef, PutOptions, Shard, read_header, read_key};
use crate::space::IN_ROWS;
use crate::store::Store;
use crate::{Keyspace, KvError, Version};

/// Kinds of value that are heads of rows; smaller ones are single values.
const ROW_KINDS: std::ops::RangeInclusive<u8> = 1..=63;
/// True for kinds of entries that are heads of rows. Their values are the store's own: a client that
/// writes entries by itself may not use them.
#[must_use]
pub fn is_row_kind(kind: u8) -> bool {
    ROW_KINDS.contains(&kind)
}

/// Namespaces of the databases' fields, before [`IN_ROWS`].
const FIELDS: u32 = 32;
/// Bytes of a head's value.
pub(crate) const HEAD_BYTES: usize = 16;
/// Fields of ended rows removed in one slice of upkeep.
const SLICE: usize = 256;
/// Ended rows passed over in one slice because another thread holds the log that their ends are in.
pub(crate) const BLOCKED: usize = 16;
/// Rows looked at in one slice of the sweep after an opening.
const ROWS_A_SLICE: usize = 64;
/// Ended rows remembered, and expiries; beyond that all of them are swept.
pub(crate) const REMEMBERED: usize = 4096;

/// True for the namespace of a database's fields, as entries have it.
#[inline]
pub(crate) fn is_fields(namespace: u32) -> bool {
    namespace & !15 == IN_ROWS | FIELDS
}

/// The database of a namespace of fields.
#[inline]
pub(crate) fn database_of(namespace: u32) -> u32 {
    namespace & 15
}

/// The namespace of a database's fields.
#[inline]
pub(crate) fn fields_of(database: u32) -> u32 {
    IN_ROWS | FIELDS | database
}

/// A row as its head describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// What it is a row of: the kind of the head's entry, 1 to 63.
    pub kind: u8,
    /// Version of the row's last change, of the head or of a field. Two of one opening compare.
    pub version: Version,
    /// Fields in it.
    pub length: u64,
    /// Wall-clock time of expiry in milliseconds, 0 = never.
    pub expires_at_ms: u64,
    generation: u64,
    /// Its head is stored as it is here.
    headed: bool,
}

impl Row {
    /// A row whose head is stored.
    pub(crate) fn told(
        kind: u8,
        version: Version,
        length: u64,
        expires_at_ms: u64,
        generation: u64,
    ) -> Self {
        Self { kind, version, length, expires_at_ms, generation, headed: true }
    }

    fn field<'k>(&self, database: u8, key: &'k [u8], field: &'k [u8]) -> FieldName<'k> {
        FieldName { database: u32::from(database), key, generation: self.generation, field }
    }
}

impl Store {
    /// Checks the lengths of a field of a row whose key has `key_length` bytes.
    ///
    /// Errors: [`KvError::KeyTooLong`], [`KvError::ValueTooLong`].
    pub fn check_field(
        &self,
        key_length: usize,
        field_length: usize,
        value_length: usize,
    ) -> Result<(), KvError> {
        let length = 2 + key_length + SUB_BYTES + field_length;
        if length > crate::entry::KEY_LIMIT {
            return Err(KvError::KeyTooLong { length, limit: crate::entry::KEY_LIMIT });
        }
        let limit = self.value_limit(length);
        if value_length > limit {
            return Err(KvError::ValueTooLong { length: value_length, limit });
        }
        Ok(())
    }

    /// Bytes of log that a field of this length of name and value takes, its head not counted.
    #[must_use]
    pub fn field_bytes(key_length: usize, field_length: usize, value_length: usize) -> u64 {
        crate::entry::slot_bytes_for(2 + key_length + SUB_BYTES + field_length, value_length)
    }

    /// Bytes of log that a row's head takes.
    #[must_use]
    pub fn head_bytes(key_length: usize) -> u64 {
        crate::entry::slot_bytes_for(key_length, HEAD_BYTES)
    }
}

/// What keys of a row's fields begin with.
fn prefix(key: &[u8], generation: u64) -> Vec<u8> {
    let mut prefix = Vec::with_capacity(2 + key.len() + SUB_BYTES + 32);
    prefix.extend_from_slice(&(key.len() as u16).to_be_bytes());
    prefix.extend_from_slice(key);
    prefix.extend_from_slice(&generation.to_be_bytes());
    prefix
}

fn end_of(prefix: &[u8]) -> Vec<u8> {
    // Positions are below 2^48.
    let mut end = prefix.to_vec();
    end.extend_from_slice(&u64::MAX.to_be_bytes());
    end
}

fn generation_in(head: &[u8]) -> Option<u64> {
    head.first_chunk::<8>().map(|generation| u64::from_le_bytes(*generation))
}

/// The generation in the key of a field.
#[inline]
pub(crate) fn generation_of(key: &[u8]) -> Option<u64> {
    let (length, rest) = key.split_first_chunk::<2>()?;
    let behind = rest.get(usize::from(u16::from_be_bytes(*length))..)?;
    behind.first_chunk::<8>().map(|generation| u64::from_be_bytes(*generation))
}

/// The parts of a key that every replica of a store has alike: a row's generation, and its fields'
/// positions, which follow from it, are a store's own.
pub(crate) fn agreed_key(namespace: u32, key: &[u8]) -> [&[u8]; 2] {
    if is_fields(namespace)
        && let Some((length, _)) = key.split_first_chunk::<2>()
        && let Some((row, rest)) =
            key.split_at_checked(2 + usize::from(u16::from_be_bytes(*length)))
        && let Some(field) = rest.get(SUB_BYTES..)
    {
        return [row, field];
    }
    [key, &[]]
}

/// Where the part of a value begins that every replica has alike: behind a row's generation.
pub(crate) fn agreed_from(namespace: u32, kind: u8) -> usize {
    let is_head = namespace < u32::from(crate::DATABASES) && ROW_KINDS.contains(&kind);
    if is_head { HEAD_BYTES / 2 } else { 0 }
}

impl Keyspace<'_> {
    /// The row at a key; `None` where there is no key. One with a value that is no row has the kind
    /// of that value and nothing else that means anything.
    ///
    /// Errors: as [`Keyspace::lookup`]; [`KvError::Damaged`].
    #[inline]
    pub fn row(&mut self, database: u8, key: &[u8]) -> Result<Option<Row>, KvError> {
        // Only the shard of a key knows its row.
        for shard in self.shards_mut() {
            if let Some(row) = shard.known_row(database, key) {
                return Ok(Some(row));
            }
        }
        self.look_row_up(database, key)
    }

    fn look_row_up(&mut self, database: u8, key: &[u8]) -> Result<Option<Row>, KvError> {
        let Some(entry) = self.lookup(database, key)? else { return Ok(None) };
        let row = self.row_at(database, &entry)?;
        if is_row_kind(row.kind) {
            let owner = self.store().owner_of(entry.hash);
            self.shard(owner)?.keep_row(database, &entry, key, row.generation);
        }
        Ok(Some(row))
    }

    /// As [`Keyspace::row`], where the entry of the database's key is known.
    ///
    /// Errors: [`KvError::Damaged`].
    pub fn row_at(&mut self, database: u8, entry: &EntryRef) -> Result<Row, KvError> {
        let (mut generation, mut fields) = (0, Fields::default());
        if ROW_KINDS.contains(&entry.kind) {
            let (segment, offset) = (entry.location.segment(), entry.location.offset());
            let Some(told) = self.with_value(entry, generation_in)? else {
                return Err(KvError::Damaged { segment, offset });
            };
            generation = told;
            let owner = self.store().owner_of(entry.hash);
            fields = self.shard(owner)?.counted(fields_of(u32::from(database)), generation);
        }
        let version = entry.changed.max(fields.changed);
        Ok(Row::told(entry.kind, version, fields.count, entry.expires_at_ms, generation))
    }

    /// A row of `kind` without fields, to be put where there is none. It comes to be with its first
    /// [`Keyspace::put_head`].
    ///
    /// Errors: the pool's.
    pub fn new_row(&mut self, kind: u8, expires_at_ms: u64) -> Result<Row, KvError> {
        assert!(ROW_KINDS.contains(&kind), "rows have kinds of their own");
        let generation = self.store().next_version()?;
        Ok(Row { kind, version: 0, length: 0, expires_at_ms, generation, headed: false })
    }

    /// Writes the head of a new row after its first fields, in the same batch; of one that became
    /// empty, deletes it. That of any other row stays as it is.
    ///
    /// Errors: as [`Keyspace::put`] and [`Keyspace::delete`].
    #[inline]
    pub fn put_head(&mut self, database: u8, key: &[u8], row: &Row) -> Result<(), KvError> {
        if row.headed && row.length > 0 && !self.joins_several() {
            return Ok(());
        }
        self.change_head(database, key, row)
    }

    fn change_head(&mut self, database: u8, key: &[u8], row: &Row) -> Result<(), KvError> {
        if row.length == 0 {
            return self.delete(database, key).map(drop);
        }
        let options = PutOptions { kind: row.kind, expires_at_ms: row.expires_at_ms };
        let value = [row.generation.to_le_bytes(), row.length.to_le_bytes()];
        let value: [&[u8]; 2] = [&value[0], &value[1]];
        if row.headed {
            // Replicas compare lengths so, as they did when every change wrote the head.
            self.note_effect(u32::from(database), key, &value, options);
            return Ok(());
        }
        self.put(database, key, &value, options).map(drop)
    }

    /// The entry of a field.
    ///
    /// Errors: [`KvError::WrongShard`].
    pub fn field(
        &mut self,
        database: u8,
        key: &[u8],
        row: &Row,
        field: &[u8],
    ) -> Result<Option<EntryRef>, KvError> {
        let name = row.field(database, key, field);
        let place = self.place_field(&name).place;
        let shard = self.shard(self.store().owner_of(place))?;
        let found = shard.find_field(&name, place);
        Ok(found.and_then(|(id, _)| shard.live_entry(fields_of(u32::from(database)), id)))
    }

    /// Stores a field's value and counts it in `row`; true when it is new.
    ///
    /// Errors: as [`Keyspace::put`]; [`KvError::KeyTooLong`] for key and field together.
    pub fn put_field(
        &mut self,
        database: u8,
        key: &[u8],
        row: &mut Row,
        field: &[u8],
        value: &[&[u8]],
    ) -> Result<bool, KvError> {
        let name = row.field(database, key, field);
        let placed = self.place_field(&name);
        let namespace = fields_of(name.database);
        let several = self.joins_several();
        let shard = self.shard(self.store().owner_of(placed.place))?;
        let stored = if several {
            let (length, limit) = (name.stored_bytes(), crate::entry::KEY_LIMIT);
            if length > limit {
                return Err(KvError::KeyTooLong { length, limit });
            }
            if shard.spaces.extra(namespace).is_none() {
                shard.spaces.open(namespace);
            }
            self.with_stored(&name, |keys, stored| {
                keys.put_at(namespace, placed, stored, value, PutOptions::default())
            })?
        } else {
            shard.put_field(&name, placed, value)?
        };
        row.length += u64::from(stored.new);
        Ok(stored.new)
    }

    /// Runs `with` with the key under which a field is stored.
    fn with_stored<R>(
        &mut self,
        name: &FieldName<'_>,
        with: impl FnOnce(&mut Self, &[u8]) -> R,
    ) -> R {
        let mut stored = std::mem::take(&mut self.home_mut().field_key);
        stored.clear();
        name.push_to(&mut stored);
        let result = with(self, &stored);
        self.home_mut().field_key = stored;
        result
    }

    /// Removes a field and takes it out of `row`'s count; false when there was none.
    ///
    /// Errors: as [`Keyspace::delete`].
    pub fn delete_field(
        &mut self,
        database: u8,
        key: &[u8],
        row: &mut Row,
        field: &[u8],
    ) -> Result<bool, KvError> {
        let name = row.field(database, key, field);
        let namespace = fields_of(name.database);
        let removed = self.with_stored(&name, |keys, stored| keys.delete_at(namespace, stored))?;
        row.length -= u64::from(removed).min(row.length);
        Ok(removed)
    }

    /// Calls `visit` with name and value of at least `count` fields (fewer at the end) from
    /// `position` on, in the order of positions, which are below 2^48, and returns where to go on,
    /// `None` at the end. A field that is there throughout is met exactly once.
    ///
    /// Errors: [`KvError::WrongShard`], [`KvError::Damaged`].
    pub fn visit_row(
        &mut self,
        database: u8,
        key: &[u8],
        row: &Row,
        (position, count): (u64, usize),
        mut visit: impl FnMut(&[u8], &[u8]),
    ) -> Result<Option<u64>, KvError> {
        const CHUNK: usize = 256;
        // As many as are likely to be met, and the one that tells that there are more.
        let mut chunk = count.saturating_add(1).clamp(2, CHUNK);
        let namespace = fields_of(u32::from(database));
        let start = prefix(key, row.generation);
        let end = end_of(&start);
        let mut from = start.clone();
        from.extend_from_slice(&position.to_be_bytes());
        let shard = self.store().shard_for(namespace, &start);
        let shard = self.shard(shard)?;
        let (mut keys, mut met) = (Keys::default(), 0);
        let mut last = None;
        let mut from = Bound::Included(from);
        loop {
            let Some(ordered) = shard.spaces.extra(namespace).and_then(|all| all.ordered.as_ref())
            else {
                return Ok(None);
            };
            let bounds = (from.as_ref().map(Vec::as_slice), Bound::Excluded(end.as_slice()));
            ordered.collect(bounds, false, chunk, &mut keys);
            for at in 0..keys.len() {
                let stored = keys.get(at);
                let Some((place, field)) = stored[start.len()..].split_first_chunk::<8>() else {
                    continue;
                };
                let place = u64::from_be_bytes(*place);
                // Fields of one position come together.
                if met >= count && last != Some(place) {
                    return Ok(Some(place));
                }
                last = Some(place);
                let hash = shard.store().place(namespace, stored);
                let found = shard.find(namespace, hash, stored);
                let Some(entry) = found.and_then(|id| shard.live_entry(namespace, id)) else {
                    continue;
                };
                shard.with_value(&entry, |value| visit(field, value))?;
                met += 1;
            }
            if keys.len() < chunk {
                return Ok(None);
            }
            from = Bound::Excluded(keys.get(keys.len() - 1).to_vec());
            chunk = CHUNK;
        }
    }

    /// Copies all fields of a row to another key, whose head is put after them. What they need is
    /// to be had, or nothing is written; of a row that is too large no more than a segment is read.
    ///
    /// Errors: as [`Keyspace::put`]; [`KvError::BatchTooLarge`] for a row larger than a segment.
    pub fn copy_row(
        &mut self,
        (database, key): (u8, &[u8]),
        row: &Row,
        (to_database, to_key): (u8, &[u8]),
    ) -> Result<(), KvError> {
        // Fields looked at before their bytes are compared with the limit.
        const TOGETHER: usize = 255;
        let limit = self.store().batch_room_bytes();
        let mut bytes = Store::head_bytes(to_key.len());
        // Most are refused for their number alone.
        let least = row.length.saturating_mul(Store::field_bytes(to_key.len(), 0, 0));
        if bytes.saturating_add(least) > limit {
            bytes = bytes.saturating_add(least);
            self.reserve_bytes(bytes)?;
        }
        let (mut fields, mut position) = (Vec::new(), Some(0));
        while let Some(from) = position.filter(|_| bytes <= limit) {
            position = self.visit_row(database, key, row, (from, TOGETHER), |field, value| {
                bytes += Store::field_bytes(to_key.len(), field.len(), value.len());
                if bytes <= limit {
                    fields.push((field.to_vec(), value.to_vec()));
                }
            })?;
        }
        self.reserve_bytes(bytes)?;
        let mut copy = self.new_row(row.kind, row.expires_at_ms)?;
        for (field, value) in &fields {
            self.put_field(to_database, to_key, &mut copy, field, &[value])?;
        }
        self.put_head(to_database, to_key, &copy)
    }

    /// A number to choose with, not for secrets.
    pub fn random(&mut self) -> u64 {
        self.home_mut().random.next()
    }
}

impl Shard {
    /// The generation of the row at a database's key, of a head that no client can write. For a
    /// look-ahead: neither a use of the key nor its expiry counts.
    pub(crate) fn generation_ahead(
        &mut self,
        database: u32,
        place: u64,
        key: &[u8],
    ) -> Option<u64> {
        if let Some(generation) = self.known_generation(database, key) {
            return Some(generation);
        }
        let id = self.find(database, place, key)?;
        let location = self.spaces.get(database)?.slot(id).location;
        if location.is_absent() || location.has(crate::index::Location::UNTRUSTED) {
            return None;
        }
        let entry = self.live_entry(database, id)?;
        if !is_row_kind(entry.kind) {
            return None;
        }
        self.with_value(&entry, generation_in).ok()?
    }

    /// What is counted of the fields of a generation.
    #[inline]
    pub(crate) fn counted(&self, namespace: u32, generation: u64) -> Fields {
        self.look_at_row(generation);
        let extra = self.spaces.extra(namespace);
        extra.map_or(Fields::default(), |extra| extra.counted.get(generation))
    }

    /// Called before `key` gets a new newest entry: where that ends a row, its fields are remembered; so is
    /// an expiry that stood beside the entry.
    pub(crate) fn note_row(
        &mut self,
        database: u32,
        before: crate::index::Slot,
        after: crate::index::Location,
        key: &[u8],
    ) {
        if before.location.has(crate::index::Location::TOUCHED) {
            self.ended.remember_expiry(database, key);
        }
        let namespace = fields_of(database);
        if self.spaces.extra(namespace).is_none() || before.location.is_absent() {
            return;
        }
        let state = self.cache.get(&self.store.table, before.location.segment());
        let Some(ended) = head_at(state, before.location.offset(), before.slot_bytes()) else {
            return;
        };
        if !after.is_absent() {
            let state = self.cache.get(&self.store.table, after.segment());
            if head_at(state, after.offset(), u64::MAX) == Some(ended) {
                return;
            }
        }
        if self.ended.rows.len() < REMEMBERED {
            self.ended.rows.push((namespace, prefix(key, ended)));
        } else if self.ended.sweep.is_some() {
            // Begun anew each time, it would never come to the last keys.
            self.ended.again = true;
        } else {
            self.ended.sweep = ALL_ROWS;
        }
    }

    /// Deletes the rows among `heads` that a crash left without a field, where they are this shard's, and
    /// persists that: no reader meets a row that is empty. `heads` are all that lie on media, and every
    /// field is counted. Those for whose tombstones there is no room stay until upkeep finds some.
    ///
    /// Errors: the pool's.
    pub(crate) fn end_hollow_rows<'h>(
        &mut self,
        heads: impl Iterator<Item = &'h RecoveredHead>,
    ) -> Result<(), KvError> {
        if fault::is_on(KnownBug::KeepHollowRows) {
            return Ok(());
        }
        for head in heads {
            // Those of other shards' keys have no slot here.
            let Some(slot) = self.slot_at(head.database, head.hash, head.location) else {
                continue;
            };
            if self.is_hollow(head.database, &slot) {
                let state = self.cache.get(&self.store.table, slot.location.segment());
                let mut key = Vec::new();
                read_key(state, &slot, &mut key);
                self.ended.hollow.push((head.database, key));
            }
        }
        match self.sweep_hollow_rows() {
            Ok(Swept::Some) => self.commit(),
            Ok(_) | Err(KvError::PoolFull { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// True for the newest entry of a key that is the head of a row without a field.
    fn is_hollow(&mut self, database: u32, slot: &crate::index::Slot) -> bool {
        if slot.location.is_absent() || !slot.location.is_readable() {
            return false;
        }
        let state = self.cache.get(&self.store.table, slot.location.segment());
        let generation = head_at(state, slot.location.offset(), slot.slot_bytes());
        let fields = generation.map(|generation| self.counted(fields_of(database), generation));
        fields.is_some_and(|fields| fields.count == 0)
    }

    /// Deletes rows that are known to have no field, if they still have none.
    ///
    /// Errors: [`KvError::PoolFull`] when not even the reserve has room, the pool's.
    pub(crate) fn sweep_hollow_rows(&mut self) -> Result<Swept, KvError> {
        if self.ended.hollow.is_empty() || self.in_batch() || self.store.is_replacing() {
            return Ok(Swept::Nothing);
        }
        while let Some((database, key)) = self.ended.hollow.last().cloned() {
            let hash = self.store.place(database, &key);
            let found = self.find(database, hash, &key);
            let slot = found.and_then(|id| Some(*self.spaces.get(database)?.slot(id)));
            if slot.is_some_and(|slot| self.is_hollow(database, &slot)) {
                let appended = self.append_tombstone(database, &key)?;
                self.install(database, hash, &key, &appended);
            }
            self.ended.hollow.pop();
        }
        Ok(Swept::Some)
    }

    /// Removes a slice of the fields of rows that ended, once their ends are persisted, in whatever log
    /// that is; where `commit`, it persists them first.
    ///
    /// Errors: [`KvError::PoolFull`] when not even the reserve has room, the pool's.
    pub(crate) fn sweep_rows(&mut self, commit: bool) -> Result<Swept, KvError> {
        if self.in_batch() || self.store.is_replacing() {
            return Ok(Swept::Nothing);
        }
        let mut blocked = Vec::new();
        let swept = self.sweep_ended(commit, &mut blocked);
        let waits = !blocked.is_empty();
        // Below the others, so that the next slice begins with those.
        self.ended.rows.splice(0..0, blocked);
        match swept? {
            true => return Ok(Swept::Some),
            false if waits => return Ok(Swept::Waiting),
            false => {}
        }
        let Some((database, from)) = self.ended.sweep.take() else { return Ok(Swept::Nothing) };
        self.ended.sweep = self.sweep_from(database, from);
        if self.ended.sweep.is_none() && std::mem::take(&mut self.ended.again) {
            self.ended.sweep = ALL_ROWS;
        }
        let more = self.ended.sweep.is_some() || !self.ended.rows.is_empty();
        Ok(if more { Swept::Some } else { Swept::Nothing })
    }

    /// The part of [`Shard::sweep_rows`] about rows that are remembered; those whose ends wait for another
    /// thread go to `blocked`. True where it got on.
    fn sweep_ended(
        &mut self,
        commit: bool,
        blocked: &mut Vec<(u32, Vec<u8>)>,
    ) -> Result<bool, KvError> {
        let mut left = SLICE;
        while left > 0
            && blocked.len() < BLOCKED
            && let Some((namespace, prefix)) = self.ended.rows.pop()
        {
            let key = crate::space::row_of(&prefix).to_vec();
            match self.newest_is_persisted(database_of(namespace), &key, commit) {
                Ok(true) => {}
                Ok(false) => {
                    blocked.push((namespace, prefix));
                    continue;
                }
                Err(error) => {
                    self.ended.rows.push((namespace, prefix));
                    return Err(error);
                }
            }
            let removed = self.remove_fields(namespace, &prefix, &mut left);
            if !matches!(removed, Ok(true)) {
                // Also where there was no room: the next slice begins with what is left.
                self.ended.rows.push((namespace, prefix));
            }
            removed?;
        }
        Ok(left < SLICE)
    }

    /// Looks at some rows of a database, from a field's key on, and remembers those that ended.
    /// Returns where to go on.
    fn sweep_from(
        &mut self,
        database: u32,
        mut from: Bound<Vec<u8>>,
    ) -> Option<(u32, Bound<Vec<u8>>)> {
        let namespace = fields_of(database);
        let mut keys = Keys::default();
        for _ in 0..ROWS_A_SLICE {
            let ordered = self.spaces.extra(namespace).and_then(|all| all.ordered.as_ref());
            if let Some(ordered) = ordered {
                let bounds = (from.as_ref().map(Vec::as_slice), Bound::Unbounded);
                ordered.collect(bounds, false, 1, &mut keys);
            }
            if ordered.is_none() || keys.len() == 0 {
                let next = database + 1;
                let more = next < u32::from(crate::DATABASES);
                return more.then_some((next, Bound::Unbounded));
            }
            let row = crate::space::row_of(keys.get(0)).to_vec();
            let stored = keys.get(0)[..(2 + row.len() + 8).min(keys.get(0).len())].to_vec();
            let hash = self.store.place(database, &row);
            let alive = self.find(database, hash, &row).and_then(|id| {
                let slot = *self.spaces.get(database)?.slot(id);
                if slot.location.is_absent() {
                    return None;
                }
                let state = self.cache.get(&self.store.table, slot.location.segment());
                head_at(state, slot.location.offset(), slot.slot_bytes())
            });
            if alive.is_none_or(|generation| stored != prefix(&row, generation)) {
                self.ended.rows.push((namespace, stored.clone()));
            }
            from = Bound::Included(end_of(&stored));
        }
        Some((database, from))
    }

    /// Removes as many of the fields whose keys begin so as are `left` in a slice, and counts them, one at
    /// least; true when no such field is there any more.
    fn remove_fields(
        &mut self,
        namespace: u32,
        prefix: &[u8],
        left: &mut usize,
    ) -> Result<bool, KvError> {
        let most = *left;
        *left -= 1;
        let mut keys = Keys::default();
        let end = end_of(prefix);
        let ordered = self.spaces.extra(namespace).and_then(|extra| extra.ordered.as_ref());
        let Some(ordered) = ordered else { return Ok(true) };
        let bounds = (Bound::Included(prefix), Bound::Excluded(end.as_slice()));
        ordered.collect(bounds, false, most, &mut keys);
        *left = most.saturating_sub(keys.len().max(1));
        for at in 0..keys.len() {
            let key = keys.get(at);
            let hash = self.store.place(namespace, key);
            let found = self.find(namespace, hash, key);
            if found.and_then(|id| self.live_entry(namespace, id)).is_none() {
                // Lost to damage: it has no entry.
                self.forget_order(namespace, key);
                continue;
            }
            // Its row ended before: that was told.
            self.waiting.muted = true;
            let appended = self.append_tombstone(namespace, key);
            self.waiting.muted = false;
            self.install(namespace, hash, key, &appended?);
        }
        Ok(keys.len() < most)
    }
}

/// The generation in the head that lies there; `None` for any other entry. A client may have written
/// it: never more than `room` is looked at.
fn head_at(state: &SegmentState, offset: u32, room: u64) -> Option<u64> {
    let header = read_header(state, offset);
    if !ROW_KINDS.contains(&header.kind)
        || header.is_tombstone()
        || header.value_length as usize != HEAD_BYTES
        || header.used_bytes() > room.min(u64::from(state.length - offset))
    {
        return None;
    }
    let mut value = [0; HEAD_BYTES];
    let start = offset + crate::entry::HEADER_BYTES + u32::from(header.key_length);
    state.segment.read(start as usize, &mut value);
    generation_in(&value)
}
