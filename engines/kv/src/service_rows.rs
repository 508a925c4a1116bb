//! What is known of services' rows beside their keys, in a namespace with records of its rows: how many keys a
//! row has, and when it ends.
//!
//! ```text
//! time   namespace 80, by row   row = the row; sub-key: number of its namespace u32 (big-endian);
//!                               value: when the row ends, u64 (little-endian), ms since 1970
//! ```
//!
//! The number of keys is counted in memory as keys come and go, and once over all of them at an opening: a put
//! stores nothing else, and no crash makes a length wrong. A key counts until it is deleted or its row ends;
//! one past its own time of expiry counts until it is met.
//!
//! The time of a row stands in one small entry, whatever the row holds. From that time on no reader meets a key
//! of the row, and upkeep, or the next put before it, ends the row by a mark as [`Keyspace::delete_row`] does.
//! So keys that are put later live, with a time of their own. A time with a version below the mark's of its row,
//! or from before its namespace was cleared or dropped, means nothing. It is deleted before the mark goes, once
//! the mark is persisted: a crash that takes the mark back finds the time there.
//!
//! A time stays with its row until the row ends, also while the row has no key.

use std::collections::{BTreeSet, HashMap};

use crate::entry::{HEADER_BYTES, Header, KEY_LIMIT, slot_bytes_for};
use crate::fault::{self, KnownBug};
use crate::feed::EventKind;
use crate::index::Slot;
use crate::row_ends::{has_marks, mark_key, namespace_of, row_at};
use crate::shard::upkeep::Swept;
use crate::shard::{PutOptions, Shard, Stored, read_header, read_key};
use crate::space::{IN_ROWS, Key, Space, row_of};
use crate::{Keyspace, KvError, Version};

/// The namespace of rows' times, as entries have it.
pub(crate) const ROW_TIMES: u32 = IN_ROWS | 80;
/// Bytes of a time.
pub(crate) const TIME_BYTES: usize = 8;
/// Rows ended in one slice of upkeep, and times that mean nothing any more deleted.
const SLICE: usize = 64;

/// What is known of a row of a service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RowState {
    /// Keys in it; those past a time of expiry of their own count until they are met.
    pub length: u64,
    /// Wall-clock time at which the row ends with all its keys, in milliseconds; 0: never.
    pub expires_at_ms: u64,
}

/// The rows of one namespace in one shard.
#[derive(Debug, Default)]
pub(crate) struct RowRecords {
    /// Keys of rows that have any.
    lengths: HashMap<Box<[u8]>, u64>,
    times: HashMap<Box<[u8]>, u64>,
    /// The same times, the next one first.
    due: BTreeSet<(u64, Box<[u8]>)>,
}

impl RowRecords {
    /// A key came into a row, or left it.
    pub fn count(&mut self, row: &[u8], came: bool) {
        match (self.lengths.get_mut(row), came) {
            (Some(length), true) => *length += 1,
            (Some(length), false) if *length > 1 => *length -= 1,
            (Some(_), false) => drop(self.lengths.remove(row)),
            (None, true) => drop(self.lengths.insert(row.into(), 1)),
            (None, false) => {}
        }
    }

    /// A row ended, with its time.
    pub fn end(&mut self, row: &[u8]) {
        self.lengths.remove(row);
        self.set_time(row, 0);
    }

    fn set_time(&mut self, row: &[u8], at_ms: u64) {
        if let Some((row, before)) = self.times.remove_entry(row) {
            self.due.remove(&(before, row));
        }
        if at_ms != 0 {
            self.times.insert(row.into(), at_ms);
            self.due.insert((at_ms, row.into()));
        }
    }

    fn time(&self, row: &[u8]) -> u64 {
        self.times.get(row).copied().unwrap_or_default()
    }

    /// Bytes of memory, as an estimate of the maps'; names of rows by their average.
    pub fn memory_bytes(&self) -> u64 {
        let rows = self.lengths.capacity() + 2 * self.times.capacity();
        let names: usize = self.lengths.keys().take(64).map(|row| row.len()).sum();
        let name = names / self.lengths.len().clamp(1, 64);
        (rows * (size_of::<(Box<[u8]>, u64)>() + 1 + name)) as u64
    }
}

impl Keyspace<'_> {
    /// What is known of a row. A row without a key has the length 0, and may have a time.
    ///
    /// Errors: [`KvError::Namespace`], [`KvError::NamespaceKind`] for a namespace without records of its rows,
    /// [`KvError::WrongShard`].
    pub fn row_state(&mut self, number: u32, row: &[u8]) -> Result<RowState, KvError> {
        let space = self.recorded(number)?;
        let now = self.now_ms();
        let records = self.records(&space, row)?;
        let expires_at_ms = records.time(row);
        if expires_at_ms != 0 && expires_at_ms <= now {
            return Ok(RowState::default());
        }
        let length = records.lengths.get(row).copied().unwrap_or_default();
        Ok(RowState { length, expires_at_ms })
    }

    /// Sets when a row ends with all its keys, in milliseconds since 1970, by one small entry; 0: never. Keys
    /// that are put until then go with it. False where the row has no key: nothing changed. A time in the past
    /// ends the row. Within a batch, as a part of it. Persisted by [`Keyspace::commit`].
    ///
    /// Errors: as [`Keyspace::put_in`] and [`Keyspace::delete_row`]; [`KvError::NamespaceKind`] for a namespace
    /// without records of its rows.
    pub fn expire_row(
        &mut self,
        number: u32,
        row: &[u8],
        expires_at_ms: u64,
    ) -> Result<bool, KvError> {
        let space = self.recorded(number)?;
        let known = self.row_state(number, row)?;
        if known.length == 0 {
            return Ok(false);
        }
        if expires_at_ms == known.expires_at_ms {
            return Ok(true);
        }
        if expires_at_ms == 0 {
            let key = mark_key(space.tagged, row);
            self.muted(|keys| keys.delete_at(ROW_TIMES, &key))?;
            self.records(&space, row)?.set_time(row, 0);
        } else if expires_at_ms <= self.now_ms() {
            self.delete_row(number, row)?;
        } else {
            self.put_row_time(&space, row, expires_at_ms)?;
        }
        Ok(true)
    }

    fn recorded(&self, number: u32) -> Result<Space, KvError> {
        let space = self.keyed(number)?;
        if !space.options.row_records {
            let reason = "keeps no records of its rows (row_records)";
            return Err(KvError::NamespaceKind { number, reason });
        }
        Ok(space)
    }

    /// The records of the namespace in a row's shard.
    fn records(&mut self, space: &Space, row: &[u8]) -> Result<&mut RowRecords, KvError> {
        let stored = space.stored(Key { row, name: &[] })?;
        let owner = self.store().shard_for(space.tagged, &stored);
        let shard = self.shard(owner)?;
        shard.look_at_all();
        let extra = shard.spaces.open(space.tagged);
        Ok(extra.rows.get_or_insert_default())
    }

    fn muted<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let home = self.home().index();
        let muted = std::mem::replace(&mut self.home_mut().waiting.muted, true);
        let result = body(self);
        debug_assert_eq!(self.home().index(), home);
        self.home_mut().waiting.muted = muted;
        result
    }

    fn put_row_time(&mut self, space: &Space, row: &[u8], at_ms: u64) -> Result<(), KvError> {
        let key = mark_key(space.tagged, row);
        if key.len() > KEY_LIMIT {
            return Err(KvError::KeyTooLong { length: key.len(), limit: KEY_LIMIT });
        }
        let hash = self.store().place(ROW_TIMES, &key);
        let owner = self.store().owner_of(hash);
        self.shard(owner)?.spaces.open(ROW_TIMES);
        let value = at_ms.to_le_bytes();
        // Told as what it means.
        let stored = self.muted(|keys| {
            keys.put_at(ROW_TIMES, hash.into(), &key, &[&value], PutOptions::default())
        })?;
        let prefix = space.stored(Key { row, name: &[] })?;
        let kind = EventKind::Expiry { expires_at_ms: at_ms };
        self.home_mut().feed_note(stored.version, space.tagged, &prefix, kind);
        self.records(space, row)?.set_time(row, at_ms);
        Ok(())
    }

    /// Ends a row whose time is past, before something is put into it. Readers see no difference.
    pub(crate) fn end_past_row(
        &mut self,
        space: &Space,
        number: u32,
        row: &[u8],
    ) -> Result<(), KvError> {
        if !space.options.row_records {
            return Ok(());
        }
        let now = self.now_ms();
        let at = self.records(space, row)?.time(row);
        // Members of a log end it at different moments: it is no effect of a command.
        if at != 0 && at <= now { self.end_row(number, row, false) } else { Ok(()) }
    }

    /// Bytes of the entry with the time that a row gets with its next key; 0: none.
    pub(crate) fn time_bytes(&mut self, space: &Space, row: &[u8]) -> Result<u64, KvError> {
        if space.options.row_time_to_live_ms == 0 {
            return Ok(0);
        }
        let now = self.now_ms();
        let at = self.records(space, row)?.time(row);
        let lacks = at == 0 || at <= now;
        Ok(if lacks { slot_bytes_for(2 + row.len() + 4, TIME_BYTES) } else { 0 })
    }

    /// Gives a row that has no time the one of its namespace, where there is one.
    pub(crate) fn begin_row(&mut self, space: &Space, row: &[u8]) -> Result<(), KvError> {
        if self.time_bytes(space, row)? == 0 {
            return Ok(());
        }
        let at_ms = self.now_ms().saturating_add(space.options.row_time_to_live_ms);
        self.put_row_time(space, row, at_ms)
    }

    /// [`Keyspace::put_in`] in a namespace with records of its rows: a row's first key comes with its time, in
    /// one batch.
    pub(crate) fn put_in_row(
        &mut self,
        (space, number): (&Space, u32),
        row: &[u8],
        stored: &[u8],
        value: &[&[u8]],
        options: PutOptions,
    ) -> Result<Stored, KvError> {
        self.end_past_row(space, number, row)?;
        let hash = self.store().place(space.tagged, stored);
        let own = self.time_bytes(space, row)? != 0 && !self.home().in_batch();
        if own {
            self.begin_batch();
        }
        let begun = self.begin_row(space, row);
        let put =
            begun.and_then(|()| self.put_at(space.tagged, hash.into(), stored, value, options));
        if own {
            self.end_batch();
        }
        put
    }
}

impl Shard {
    /// True for an entry whose row's time is past.
    #[inline]
    pub(crate) fn is_of_past_row(&mut self, namespace: u32, slot: &Slot, header: &Header) -> bool {
        if !has_marks(namespace) {
            return false;
        }
        let records = self.spaces.extra(namespace).and_then(|extra| extra.rows.as_ref());
        let Some(records) = records.filter(|records| !records.times.is_empty()) else {
            return false;
        };
        let state = self.cache.get(&self.store.table, slot.location.segment());
        let at = records.time(row_at(state, slot, header));
        at != 0 && at <= self.store.clock.unix_ms()
    }

    /// Counts a key that came into its row or left it. `before` is its slot as it was.
    pub(crate) fn count_in_row(
        &mut self,
        namespace: u32,
        key: &[u8],
        before: Option<Slot>,
        is_there: bool,
    ) {
        let before = before.filter(|slot| !slot.location.is_absent());
        let was_there = before.is_some_and(|slot| {
            let state = self.cache.get(&self.store.table, slot.location.segment());
            let header = read_header(state, slot.location.offset());
            // What belonged to a row that ended went with it.
            !self.is_of_ended_row(namespace, &slot, &header)
        });
        if was_there != is_there
            && let Some(extra) = self.spaces.extra_mut(namespace)
            && let Some(records) = &mut extra.rows
        {
            records.count(row_of(key), is_there);
        }
    }

    /// A row ended by a mark.
    pub(crate) fn end_row_record(&mut self, namespace: u32, row: &[u8]) {
        let extra = self.spaces.extra_mut(namespace);
        if let Some(records) = extra.and_then(|extra| extra.rows.as_mut()) {
            records.end(row);
        }
    }

    /// True where a row has a time.
    pub(crate) fn has_row_time(&self, namespace: u32, row: &[u8]) -> bool {
        let records = self.spaces.extra(namespace).and_then(|extra| extra.rows.as_ref());
        records.is_some_and(|records| records.time(row) != 0)
    }

    /// Deletes the time of a row that ended with a mark of this version, which is persisted.
    ///
    /// Errors: [`KvError::PoolFull`] when not even the reserve has room, the pool's.
    pub(crate) fn end_row_time(
        &mut self,
        namespace: u32,
        row: &[u8],
        end: Version,
    ) -> Result<(), KvError> {
        if fault::is_on(KnownBug::KeepRowTimes) {
            return Ok(());
        }
        self.delete_row_time(&mark_key(namespace, row), end)
    }

    /// Deletes a time with a version below `end`.
    fn delete_row_time(&mut self, key: &[u8], end: Version) -> Result<(), KvError> {
        let hash = self.store.place(ROW_TIMES, key);
        let Some(id) = self.find(ROW_TIMES, hash, key) else { return Ok(()) };
        let Some(slot) = self.spaces.get(ROW_TIMES).map(|index| *index.slot(id)) else {
            return Ok(());
        };
        if slot.location.is_absent() {
            return Ok(());
        }
        let state = self.cache.get(&self.store.table, slot.location.segment());
        if read_header(state, slot.location.offset()).version >= end {
            return Ok(());
        }
        self.waiting.muted = true;
        let appended = self.append_tombstone(ROW_TIMES, key);
        self.waiting.muted = false;
        self.install(ROW_TIMES, hash, key, &appended?);
        Ok(())
    }

    /// The rows of a namespace go, all at once: their times are deleted by and by.
    pub(crate) fn forget_row_times(&mut self, namespace: u32) {
        let records = self.spaces.extra(namespace).and_then(|extra| extra.rows.as_ref());
        let Some(records) = records else { return };
        let keys = records.times.keys().map(|row| mark_key(namespace, row));
        self.ended.times.extend(keys);
    }

    /// Learns lengths and times of rows, once every entry is in its index and the marks are known.
    pub(crate) fn settle_row_records(&mut self) {
        self.ended.times.clear();
        for namespace in self.spaces.extra_numbers() {
            let lengths = self.row_lengths(namespace);
            if let (Some(lengths), Some(extra)) = (lengths, self.spaces.extra_mut(namespace)) {
                extra.rows = Some(Box::new(RowRecords { lengths, ..RowRecords::default() }));
            }
        }
        let Some(index) = self.spaces.get(ROW_TIMES) else { return };
        let slots = index.live_slots();
        let mut key = Vec::new();
        for slot in slots {
            let state = self.cache.get(&self.store.table, slot.location.segment());
            let header = read_key(state, &slot, &mut key);
            let mut time = [0; TIME_BYTES];
            let Some(namespace) = namespace_of(&key).filter(|_| header.value_length == 8) else {
                continue;
            };
            let at = slot.location.offset() + HEADER_BYTES + key.len() as u32;
            state.segment.read(at as usize, &mut time);
            let row = row_of(&key);
            if header.version < self.store.barrier(namespace) {
                self.ended.times.push(key.clone());
            } else if header.version >= self.ended.marks.end_of(namespace, row)
                && let Some(extra) = self.spaces.extra_mut(namespace)
                && let Some(records) = &mut extra.rows
            {
                records.set_time(row, u64::from_le_bytes(time));
            }
        }
    }

    /// Keys of each row, counted over the index; `None` for a namespace without records.
    fn row_lengths(&mut self, namespace: u32) -> Option<HashMap<Box<[u8]>, u64>> {
        let extra = self.spaces.extra(namespace)?;
        extra.rows.as_ref()?;
        let live = |slot: &&Slot| !slot.location.is_absent();
        let mut counted = RowRecords::default();
        for page in 0..extra.index.pages() {
            let slots: Vec<Slot> =
                self.spaces.get(namespace)?.page(page).filter(live).copied().collect();
            for slot in slots {
                let state = self.cache.get(&self.store.table, slot.location.segment());
                let header = read_header(state, slot.location.offset());
                if !self.is_of_ended_row(namespace, &slot, &header) {
                    let state = self.cache.get(&self.store.table, slot.location.segment());
                    counted.count(row_at(state, &slot, &header), true);
                }
            }
        }
        Some(counted.lengths)
    }

    /// Rows whose kept length is not that of their keys, a sentence each.
    pub(crate) fn row_differences(&mut self) -> Vec<String> {
        let mut findings = Vec::new();
        for namespace in self.spaces.extra_numbers() {
            let Some(real) = self.row_lengths(namespace) else { continue };
            let records = self.spaces.extra(namespace).and_then(|extra| extra.rows.as_ref());
            let Some(records) = records else { continue };
            let rows: BTreeSet<_> = real.keys().chain(records.lengths.keys()).collect();
            for row in rows {
                let (kept, real) = (records.lengths.get(row), real.get(row));
                if kept != real {
                    let row = String::from_utf8_lossy(row);
                    findings
                        .push(format!("row {row:?} of {namespace}: {kept:?} keys, {real:?} live"));
                }
            }
            if records.due.len() != records.times.len() {
                findings.push(format!("namespace {namespace}: times of rows differ"));
            }
        }
        findings
    }

    /// The next time at which a row ends.
    pub(crate) fn next_row_end(&self) -> Option<u64> {
        let records = self.spaces.extras().filter_map(|extra| extra.rows.as_ref());
        records.filter_map(|records| records.due.first()).map(|(at, _)| *at).min()
    }

    /// Ends a slice of the rows whose time is past, and deletes times that mean nothing any more.
    ///
    /// Errors: [`KvError::PoolFull`] when not even the reserve has room, the pool's.
    pub(crate) fn sweep_row_times(&mut self) -> Result<Swept, KvError> {
        if self.in_batch() || self.store.is_replacing() {
            return Ok(Swept::Nothing);
        }
        let mut left = SLICE;
        while left > 0
            && let Some(key) = self.ended.times.last().cloned()
        {
            if let Some(namespace) = namespace_of(&key) {
                self.delete_row_time(&key, self.store.barrier(namespace))?;
            }
            self.ended.times.pop();
            left -= 1;
        }
        let now = self.deletes_until_ms();
        while left > 0
            && let Some((number, row)) = self.past_row(now)
        {
            Keyspace::single(self).delete_row(number, &row)?;
            left -= 1;
        }
        Ok(if left < SLICE { Swept::Some } else { Swept::Nothing })
    }

    fn past_row(&self, now_ms: u64) -> Option<(u32, Box<[u8]>)> {
        self.spaces.extras().find_map(|extra| {
            let (at, row) = extra.rows.as_ref()?.due.first()?;
            (*at <= now_ms).then(|| (extra.number & !IN_ROWS, row.clone()))
        })
    }
}
