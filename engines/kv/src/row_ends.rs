//! Ends of services' rows: a row of any length is deleted by one small entry, the *mark*.
//!
//! ```text
//! mark   namespace 64, by row   row = the row; sub-key: number of its namespace u32 (big-endian); no value
//! ```
//!
//! Keys of the row with a version below the mark's are dead: no reader meets them, and a key that is put
//! later has a larger version and lives. So versions are the generations of a row, and its keys need no
//! other. A mark is an entry as any other: batches, recovery, collection, snapshots and the replicated log
//! carry it, and where a snapshot makes all versions larger, its own and its keys' grow by the same.
//!
//! Upkeep deletes the dead keys ([`Shard::sweep_row_ends`]), once the mark is persisted, in whatever log it
//! is: a crash may take it back, and then all keys have to be there. The mark goes last, once the
//! deletions of the keys are persisted. Until then the keys count as live in the figures of their
//! namespace.
//!
//! The keys of rows are found in the order of an ordered namespace; of one without an order the whole index is
//! passed once, for all rows that ended. A pass takes up to 1,024 rows, with one commit for all of them.

use std::collections::BTreeMap;
use std::ops::Bound;

use crate::entry::{HEADER_BYTES, Header, KEY_LIMIT};
use crate::fault::{self, KnownBug};
use crate::feed::EventKind;
use crate::index::{Location, Slot};
use crate::ordered::Keys;
use crate::segments::SegmentState;
use crate::service_rows::ROW_TIMES;
use crate::shard::upkeep::Swept;
use crate::shard::{PutOptions, Shard, read_header, read_key};
use crate::space::{FIRST_NAMESPACE, IN_ROWS, Key, behind_prefix, row_of};
use crate::{Keyspace, KvError, Version};

/// The namespace of marks, as entries have it.
pub(crate) const ROW_ENDS: u32 = IN_ROWS | 64;
/// Bytes of a mark's sub-key.
const NUMBER_BYTES: usize = 4;
/// Keys looked at in one slice of upkeep.
const SLICE: usize = 256;
/// Rows whose keys are removed with one commit for all of them.
const ROWS_A_PASS: usize = 1024;

/// True for a namespace whose rows can end by a mark.
#[inline]
pub(crate) fn has_marks(namespace: u32) -> bool {
    namespace >= IN_ROWS | FIRST_NAMESPACE
}

/// True for the namespaces of what is stored about services' rows: marks and times.
#[inline]
pub(crate) fn is_about_rows(namespace: u32) -> bool {
    namespace == ROW_ENDS || namespace == ROW_TIMES
}

/// The key of a row's mark, and of its time.
pub(crate) fn mark_key(namespace: u32, row: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(2 + row.len() + NUMBER_BYTES);
    key.extend_from_slice(&(row.len() as u16).to_be_bytes());
    key.extend_from_slice(row);
    key.extend_from_slice(&(namespace & !IN_ROWS).to_be_bytes());
    key
}

/// The namespace of the row that a mark is about, as entries have it; `None` for a key that no mark has.
#[inline]
pub(crate) fn namespace_of(mark: &[u8]) -> Option<u32> {
    let (key, number) = mark.split_last_chunk::<NUMBER_BYTES>()?;
    let namespace = u32::from_be_bytes(*number) | IN_ROWS;
    (has_marks(namespace) && key.len() == 2 + row_of(mark).len()).then_some(namespace)
}

/// Versions of marks by row.
type Marks = BTreeMap<Box<[u8]>, Version>;

/// Rows that ended, and how far the removal of their keys is.
#[derive(Debug, Default)]
pub(crate) struct RowEnds {
    /// Versions of marks, by namespace and row.
    marks: BTreeMap<u32, Marks>,
    pass: Option<Pass>,
    /// The last row whose mark was looked at, and its namespace: those behind it are next, where others wait
    /// for another thread.
    last: Option<(u32, Box<[u8]>)>,
}

/// A way through the keys of rows that ended, whose marks are persisted.
#[derive(Debug)]
struct Pass {
    namespace: u32,
    rows: Marks,
    /// Where it is in the order: behind this row, and behind this key of the next one.
    done: Option<Box<[u8]>>,
    from: Option<Vec<u8>>,
    /// Where it is in the index.
    position: Option<u64>,
    /// It met slots in the index that do not tell their keys.
    lost: bool,
}

impl RowEnds {
    /// True when no row waits for the removal of its keys.
    pub fn is_empty(&self) -> bool {
        self.marks.is_empty()
    }

    fn add(&mut self, namespace: u32, row: &[u8], version: Version) {
        let known = self.marks.entry(namespace).or_default();
        let newest = known.entry(row.into()).or_default();
        *newest = version.max(*newest);
    }

    /// Forgets the mark with this version; a newer one stays.
    fn remove(&mut self, namespace: u32, row: &[u8], version: Version) {
        let Some(known) = self.marks.get_mut(&namespace) else { return };
        if known.get(row) == Some(&version) {
            known.remove(row);
        }
        if known.is_empty() {
            self.marks.remove(&namespace);
        }
    }

    /// The next [`ROWS_A_PASS`] rows, or fewer, of one namespace: those behind the ones of the last call, and in the
    /// end the first again.
    fn next_rows(&mut self) -> Option<(u32, Marks)> {
        let last = self.last.take();
        let behind = last.as_ref().and_then(|(namespace, row)| {
            let rows = self.marks.get(namespace)?;
            let mut rest = rows.range::<[u8], _>((Bound::Excluded(&**row), Bound::Unbounded));
            rest.next().map(|(next, _)| (*namespace, next))
        });
        let begins = |(namespace, rows): (&u32, &Marks)| {
            rows.first_key_value().map(|(row, _)| (*namespace, row.clone()))
        };
        let after = || {
            let after = last.as_ref().map(|(namespace, _)| Bound::Excluded(*namespace))?;
            self.marks.range((after, Bound::Unbounded)).next().and_then(begins)
        };
        let first = behind.map(|(namespace, row)| (namespace, row.clone()));
        let first = first.or_else(after).or_else(|| self.marks.iter().next().and_then(begins));
        let (namespace, first) = first?;
        let rest = self
            .marks
            .get(&namespace)?
            .range::<[u8], _>((Bound::Included(&*first), Bound::Unbounded));
        let rows: Marks =
            rest.take(ROWS_A_PASS).map(|(row, version)| (row.clone(), *version)).collect();
        self.last = rows.last_key_value().map(|(row, _)| (namespace, row.clone()));
        Some((namespace, rows))
    }

    /// Version below which keys of a row are dead; 0: it did not end.
    pub(crate) fn end_of(&self, namespace: u32, row: &[u8]) -> Version {
        let known = self.marks.get(&namespace);
        known.and_then(|known| known.get(row)).copied().unwrap_or_default()
    }
}

impl Keyspace<'_> {
    /// Deletes a row with all its keys, by one small entry however many there are; upkeep collects them
    /// later, and until then they count in [`Keyspace::len_in`] and under the limits of their namespace.
    /// What is put into the row from now on is there. Within a batch, as a part of it; may use room that is
    /// kept for such ends, and leaves the one for deletions. Persisted by [`Keyspace::commit`].
    ///
    /// Errors: [`KvError::Namespace`], [`KvError::NamespaceKind`] for one without rows,
    /// [`KvError::WrongShard`], [`KvError::KeyTooLong`] for a row of more than 65,529 bytes,
    /// [`KvError::BatchTooLarge`], [`KvError::PoolFull`] when not even that room is left, the pool's.
    pub fn delete_row(&mut self, number: u32, row: &[u8]) -> Result<(), KvError> {
        self.end_row(number, row, true)
    }

    /// As [`Keyspace::delete_row`]; an effect of a command where `tell`.
    pub(crate) fn end_row(&mut self, number: u32, row: &[u8], tell: bool) -> Result<(), KvError> {
        let space = self.keyed(number)?;
        let namespace = space.tagged;
        if !has_marks(namespace) {
            return Err(KvError::NamespaceKind { number, reason: "has no rows" });
        }
        let prefix = space.stored(Key { row, name: &[] })?;
        let key = mark_key(namespace, row);
        if key.len() > KEY_LIMIT {
            return Err(KvError::KeyTooLong { length: key.len(), limit: KEY_LIMIT });
        }
        let hash = self.store().place(ROW_ENDS, &key);
        let owner = self.store().owner_of(hash);
        let in_batch = self.home().in_batch();
        let shard = self.shard(owner)?;
        // A time goes with the mark.
        if !in_batch && !shard.has_row_time(namespace, row) && shard.has_no_key(namespace, &prefix)
        {
            // Another member may still have dead keys of it, and tells its end.
            self.tell_end(namespace, &prefix, tell);
            return Ok(());
        }
        self.store().raise_format_for_row_ends()?;
        self.shard(owner)?.spaces.open(ROW_ENDS);
        self.reserve_mark(crate::entry::slot_bytes_for(key.len(), 0))?;
        // What it means is told by an event of its own.
        let home = self.home_mut();
        let muted = std::mem::replace(&mut home.waiting.muted, true);
        let stored = self.put_at(ROW_ENDS, hash.into(), &key, &[], PutOptions::default());
        let home = self.home_mut();
        home.waiting.muted = muted;
        if !home.in_batch() {
            home.take_reserved();
        }
        let version = stored?.version;
        home.feed_note(version, namespace, &prefix, EventKind::DeleteRow);
        let shard = self.shard(owner)?;
        shard.ended.marks.add(namespace, row, version);
        shard.end_row_record(namespace, row);
        self.tell_end(namespace, &prefix, tell);
        Ok(())
    }

    fn tell_end(&mut self, namespace: u32, prefix: &[u8], tell: bool) {
        if tell && self.joins_several() {
            self.effects.delete_row(namespace, prefix);
        }
    }
}

impl Shard {
    /// True where the order of a namespace says that no key begins so.
    fn has_no_key(&self, namespace: u32, prefix: &[u8]) -> bool {
        let ordered = self.spaces.extra(namespace).and_then(|extra| extra.ordered.as_ref());
        let Some(ordered) = ordered else { return false };
        let mut keys = Keys::default();
        let behind = behind_prefix(prefix);
        let to = behind.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        ordered.collect((Bound::Included(prefix), to), false, 1, &mut keys);
        keys.len() == 0
    }

    /// True for an entry whose row ended after it was stored.
    #[inline]
    pub(crate) fn is_of_ended_row(&mut self, namespace: u32, slot: &Slot, header: &Header) -> bool {
        if self.ended.marks.is_empty() || !has_marks(namespace) {
            return false;
        }
        let state = self.cache.get(&self.store.table, slot.location.segment());
        header.version < self.ended.marks.end_of(namespace, row_at(state, slot, header))
    }

    /// Learns which rows ended, once every entry is in its index.
    pub(crate) fn settle_row_ends(&mut self) {
        self.ended.marks = RowEnds::default();
        if fault::is_on(KnownBug::ForgetRowEnds) {
            return;
        }
        let Some(index) = self.spaces.get(ROW_ENDS) else { return };
        let slots = index.live_slots();
        let mut key = Vec::new();
        for slot in slots {
            let state = self.cache.get(&self.store.table, slot.location.segment());
            let header = read_key(state, &slot, &mut key);
            if let Some(namespace) = namespace_of(&key) {
                self.ended.marks.add(namespace, row_of(&key), header.version);
            }
        }
    }

    /// Deletes a slice of the keys of rows that ended, once their marks are persisted, in whatever log they
    /// are; where `commit`, it persists what has to be first.
    ///
    /// Errors: [`KvError::PoolFull`] when not even the reserve has room, the pool's.
    pub(crate) fn sweep_row_ends(&mut self, commit: bool) -> Result<Swept, KvError> {
        if self.ended.marks.is_empty() || self.in_batch() || self.store.is_replacing() {
            return Ok(Swept::Nothing);
        }
        let mut pass = match self.ended.marks.pass.take() {
            Some(pass) => pass,
            None => match self.begin_pass(commit)? {
                Some(pass) => pass,
                None => return Ok(Swept::Waiting),
            },
        };
        let ordered = self.spaces.extra(pass.namespace).is_some_and(|all| all.ordered.is_some());
        // Where there is no room for the rest, it begins anew.
        let more = if ordered { self.pass_order(&mut pass) } else { self.pass_index(&mut pass) }?;
        let ends = !more && self.all_is_persisted(commit)?;
        if !ends {
            self.ended.marks.pass = Some(pass);
            return Ok(if more { Swept::Some } else { Swept::Waiting });
        }
        self.end_pass(pass)?;
        Ok(Swept::Some)
    }

    /// True when no crash takes back what was done to keys of this shard, in whatever log it is: a mark may
    /// go then. Where `commit`, that is seen to, if no other thread is in the way.
    fn all_is_persisted(&mut self, commit: bool) -> Result<bool, KvError> {
        if fault::is_on(KnownBug::UnmarkEarly) {
            return Ok(true);
        }
        if !commit {
            return Ok(self.store.shards() == 1 && self.log.is_persisted());
        }
        self.commit()?;
        let mut others = (0..self.store.shards()).filter(|shard| *shard != self.index);
        Ok(others.all(|shard| self.store.peers.commit(shard)))
    }

    /// The next way through keys, of up to [`ROWS_A_PASS`] rows of one namespace. `None` where their marks wait for
    /// another thread.
    fn begin_pass(&mut self, commit: bool) -> Result<Option<Pass>, KvError> {
        let Some((namespace, looked_at)) = self.ended.marks.next_rows() else { return Ok(None) };
        let mut rows = Marks::new();
        for (row, version) in looked_at {
            let key = mark_key(namespace, &row);
            if self.newest_is_persisted(ROW_ENDS, &key, commit)? {
                self.end_row_time(namespace, &row, version)?;
                rows.insert(row, version);
            }
        }
        let pass = Pass { namespace, rows, done: None, from: None, position: Some(0), lost: false };
        Ok((!pass.rows.is_empty()).then_some(pass))
    }

    /// A slice of a pass over rows' keys, in order; whether there is more.
    fn pass_order(&mut self, pass: &mut Pass) -> Result<bool, KvError> {
        let (mut keys, mut left) = (Keys::default(), SLICE);
        while left > 0 {
            let ordered =
                self.spaces.extra(pass.namespace).and_then(|extra| extra.ordered.as_ref());
            let Some(ordered) = ordered else { return Ok(false) };
            let behind = pass.done.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
            let next = pass.rows.range::<[u8], _>((behind, Bound::Unbounded)).next();
            let Some((row, _)) = next else { return Ok(false) };
            let row = row.clone();
            let mut prefix = mark_key(pass.namespace, &row);
            prefix.truncate(prefix.len() - NUMBER_BYTES);
            let behind = behind_prefix(&prefix);
            let to = behind.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
            let from = pass.from.as_deref().map_or(Bound::Included(&*prefix), Bound::Excluded);
            ordered.collect((from, to), false, left, &mut keys);
            self.end_keys(pass, &keys)?;
            if keys.len() == left {
                pass.from = Some(keys.get(left - 1).to_vec());
                break;
            }
            // A row without keys takes a look-up as well.
            left -= keys.len().max(1);
            (pass.done, pass.from) = (Some(row), None);
        }
        Ok(true)
    }

    /// A slice of a pass over an index; whether there is more.
    fn pass_index(&mut self, pass: &mut Pass) -> Result<bool, KvError> {
        let Some(index) = self.spaces.get(pass.namespace) else { return Ok(false) };
        let Some(position) = pass.position else { return Ok(false) };
        let (mut slots, mut key) = (Vec::new(), Vec::new());
        let next = index.collect(position, SLICE, &mut slots);
        pass.lost |= slots.iter().any(|slot| slot.location.has(Location::LOST));
        // Their keys first: the deletion of one may move others, to make room.
        let mut keys = Keys::default();
        for slot in slots.iter().filter(|slot| !slot.location.is_absent()) {
            let state = self.cache.get(&self.store.table, slot.location.segment());
            let header = read_header(state, slot.location.offset());
            let row = row_at(state, slot, &header);
            if pass.rows.get(row).is_some_and(|end| header.version < *end) {
                read_key(state, slot, &mut key);
                keys.push(&key);
            }
        }
        self.end_keys(pass, &keys)?;
        pass.position = next;
        Ok(next.is_some())
    }

    fn end_keys(&mut self, pass: &Pass, keys: &Keys) -> Result<(), KvError> {
        (0..keys.len()).try_for_each(|at| {
            let key = keys.get(at);
            self.end_key(pass, self.store.place(pass.namespace, key), key)
        })
    }

    /// Deletes a key if it is one of the pass's rows and was put before the end of its row.
    fn end_key(&mut self, pass: &Pass, hash: u64, key: &[u8]) -> Result<(), KvError> {
        let namespace = pass.namespace;
        let Some(end) = pass.rows.get(row_of(key)) else { return Ok(()) };
        let found = self.find(namespace, hash, key);
        let slot = found.and_then(|id| Some(*self.spaces.get(namespace)?.slot(id)));
        let lost = slot.is_some_and(|slot| slot.location.has(Location::LOST));
        let Some(slot) = slot.filter(|slot| lost || !slot.location.is_absent()) else {
            // Lost to damage: it has no entry.
            self.forget_order(namespace, key);
            return Ok(());
        };
        if !lost {
            let state = self.cache.get(&self.store.table, slot.location.segment());
            if read_header(state, slot.location.offset()).version >= *end {
                return Ok(());
            }
        }
        // Of one whose newest entry was lost to damage, older ones may come back with an opening.
        // Its row ended before: that was told.
        self.waiting.muted = true;
        let appended = self.append_tombstone(namespace, key);
        self.waiting.muted = false;
        self.install(namespace, hash, key, &appended?);
        Ok(())
    }

    /// Deletes the marks of rows whose keys are gone for good.
    fn end_pass(&mut self, pass: Pass) -> Result<(), KvError> {
        for (row, version) in pass.rows {
            if self.ended.marks.end_of(pass.namespace, &row) != version {
                // It ended once more.
                continue;
            }
            if pass.lost {
                // Such a key may be one of this row's. Readers do not meet it before the next opening, which
                // learns of the mark and shows no older entry either.
                self.ended.marks.remove(pass.namespace, &row, version);
                continue;
            }
            let key = mark_key(pass.namespace, &row);
            let hash = self.store.place(ROW_ENDS, &key);
            self.waiting.muted = true;
            let appended = self.append_tombstone(ROW_ENDS, &key);
            self.waiting.muted = false;
            self.install(ROW_ENDS, hash, &key, &appended?);
            self.ended.marks.remove(pass.namespace, &row, version);
        }
        Ok(())
    }
}

/// The row in the key of a service's entry, which no client can write.
pub(crate) fn row_at<'s>(state: &'s SegmentState, slot: &Slot, header: &Header) -> &'s [u8] {
    row_of(state.bytes(slot.location.offset() + HEADER_BYTES, usize::from(header.key_length)))
}
