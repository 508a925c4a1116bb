//! Streams as services use them: entries appended, read by position, cut off in front.
//!
//! A stream is there from its first entry until it is deleted. Positions count from 0 and none is left
//! out; the first position that is there moves when the stream is cut off. `docs/kv-namespaces.md` says how
//! all of it lies on media.

use std::ops::ControlFlow;

use crate::entry::{KEY_LIMIT, STREAM_KEY_BYTES, slot_bytes_for};
use crate::fault::{self, KnownBug};
use crate::feed::EventKind;
use crate::shard::PutOptions;
use crate::shard::log::Appended;
use crate::space::{Key, Space};
use crate::store::Need;
use crate::streams::{HEAD_BYTES, Stream, head};
use crate::{Keyspace, KvError, Version};

/// An entry of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamEntry<'v> {
    /// Its place in the stream.
    pub position: u64,
    /// Its version; larger is later, across the store.
    pub version: Version,
    /// What was appended.
    pub value: &'v [u8],
}

/// Where a stream begins and ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamEnds {
    /// Least position that is there.
    pub first: u64,
    /// Position of the next entry.
    pub next: u64,
    /// Bytes kept for it: those of its entries, and of entries that were cut off and share a segment with others
    /// of it.
    pub bytes: u64,
    /// Version of its last change.
    pub changed: Version,
}

/// A stream to change, looked up once for a call.
pub(crate) struct Place {
    space: Space,
    key: Vec<u8>,
    hash: u64,
    owner: usize,
    /// Generation and ends; `None` where there is no such stream.
    here: Option<(u64, StreamEnds)>,
}

impl Place {
    pub fn ends(&self) -> Option<StreamEnds> {
        self.here.map(|here| here.1)
    }

    pub fn tagged(&self) -> u32 {
        self.space.tagged
    }

    pub fn key(&self) -> &[u8] {
        &self.key
    }

    pub fn owner(&self) -> usize {
        self.owner
    }

    /// Bytes of log that entries of these lengths take.
    pub fn entry_bytes(&self, lengths: impl Iterator<Item = usize>) -> u64 {
        let key_length = self.key.len() + STREAM_KEY_BYTES;
        lengths.map(|length| slot_bytes_for(key_length, length)).sum()
    }

    /// That of a new head, where there is none or the stream may be cut off with an append.
    fn new_head_bytes(&self) -> u64 {
        let head = self.here.is_none() || self.space.options.keep_bytes > 0;
        if head { self.head_bytes() } else { 0 }
    }

    fn head_bytes(&self) -> u64 {
        slot_bytes_for(self.key.len(), HEAD_BYTES)
    }
}

impl Keyspace<'_> {
    pub(crate) fn stream_place(&mut self, number: u32, row: &[u8]) -> Result<Place, KvError> {
        let space = self.space(number)?;
        if !space.options.stream {
            return Err(KvError::NamespaceKind { number, reason: "holds keys, not streams" });
        }
        let key = space.stored(Key { row, name: &[] })?.into_owned();
        let (length, limit) = (key.len() + STREAM_KEY_BYTES, KEY_LIMIT);
        if length > limit {
            return Err(KvError::KeyTooLong { length, limit });
        }
        let hash = self.store().place(space.tagged, &key);
        let owner = self.store().owner_of(hash);
        let streams = self.shard(owner)?.streams(space.tagged);
        let here = streams.and_then(|streams| streams.get(&key)).map(|stream| {
            let Stream { first, next, bytes, changed, .. } = *stream;
            (stream.generation, StreamEnds { first, next, bytes, changed })
        });
        Ok(Place { space, key, hash, owner, here })
    }

    /// Where a stream begins and ends; `None`: there is none. A namespace that is not by row has one
    /// stream, under the empty row.
    ///
    /// Errors: [`KvError::Namespace`], [`KvError::NamespaceKind`], [`KvError::WrongShard`].
    pub fn stream(&mut self, number: u32, row: &[u8]) -> Result<Option<StreamEnds>, KvError> {
        Ok(self.stream_place(number, row)?.ends())
    }

    /// The streams of a namespace in the locked shards, by row.
    ///
    /// Errors: [`KvError::Namespace`], [`KvError::NamespaceKind`].
    pub fn streams(&mut self, number: u32) -> Result<Vec<(Vec<u8>, StreamEnds)>, KvError> {
        let space = self.space(number)?;
        if !space.options.stream {
            return Err(KvError::NamespaceKind { number, reason: "holds keys, not streams" });
        }
        let mut found = Vec::new();
        for shard in self.shards_mut() {
            let Some(streams) = shard.streams(space.tagged) else { continue };
            found.extend(streams.all().map(|(key, stream)| {
                let Stream { first, next, bytes, changed, .. } = *stream;
                (crate::space::row_of(key).to_vec(), StreamEnds { first, next, bytes, changed })
            }));
        }
        found.sort_by(|one, other| one.0.cmp(&other.0));
        Ok(found)
    }

    /// Appends `values` in order, all of them or none also in a crash; the position of the first. The
    /// stream begins with its first entry. Within a batch, as a part of it. Persisted by
    /// [`Keyspace::commit`].
    ///
    /// Errors: limits, [`KvError::NamespaceFull`], [`KvError::MemoryLimit`], [`KvError::PoolFull`],
    /// [`KvError::BatchTooLarge`], the pool's; as [`Keyspace::stream`]. Nothing changed then. Where the pool
    /// failed in between, the shards take nothing any more ([`KvError::Poisoned`]).
    /// [`KvError::WrongShard`] also where the last change of a stream of this shard waits in a log
    /// that another thread holds.
    pub fn append_in(&mut self, number: u32, row: &[u8], values: &[&[u8]]) -> Result<u64, KvError> {
        let place = self.stream_place(number, row)?;
        let next = place.ends().map_or(0, |ends| ends.next);
        if values.is_empty() {
            return Ok(next);
        }
        let bytes = self.check_appends(&place, values.iter().map(|value| value.len()))?;
        self.prefer_home(place.owner);
        self.shard(place.owner)?.fit_namespace(place.space.tagged, bytes, bytes)?;
        self.spread_moves();
        let added = place.entry_bytes(values.iter().map(|value| value.len()));
        let head = place.here.is_none() || self.cut_for(&place, added)?.is_some();
        if !head && values.len() == 1 && !self.home().in_batch() {
            self.settle_appends(place.owner)?;
            self.home_mut().check_writable()?;
            self.home_mut().fit_memory(bytes)?;
            return self.store_entry(&place, &[values[0]]);
        }
        let mut stored = Ok(next);
        self.in_appends_batch(bytes, false, |keys| {
            for (at, value) in values.iter().enumerate() {
                let added = if at == 0 { added } else { 0 };
                stored = keys.append_at(&place, &[value], added);
                if stored.is_err() {
                    return false;
                }
            }
            true
        })?;
        stored.map(|_| next)
    }

    /// Lengths and batch limit of entries to append; their bytes, a head included.
    pub(crate) fn check_appends(
        &self,
        place: &Place,
        lengths: impl Iterator<Item = usize> + Clone,
    ) -> Result<u64, KvError> {
        let limit = self.store().value_limit(place.key.len() + STREAM_KEY_BYTES);
        if let Some(length) = lengths.clone().find(|length| *length > limit) {
            return Err(KvError::ValueTooLong { length, limit });
        }
        let bytes = place.entry_bytes(lengths) + place.new_head_bytes();
        self.check_batch_limit(bytes).map(|()| bytes)
    }

    /// Refuses entries of `bytes` with which the batch, the open one where there is one, would pass the
    /// store's limit: before the first of them, as a batch cannot be taken back in memory.
    pub(crate) fn check_batch_limit(&self, bytes: u64) -> Result<(), KvError> {
        let (length, limit) = (self.home().batch_bytes() + bytes, self.store().batch_limit_bytes);
        if length > limit { Err(KvError::BatchTooLarge { length, limit }) } else { Ok(()) }
    }

    /// Runs `body` within a batch in the chain of streams, with room for `bytes`. Where it says that
    /// it failed after it stored something, the batch is given up.
    pub(crate) fn in_appends_batch(
        &mut self,
        bytes: u64,
        removes: bool,
        body: impl FnOnce(&mut Self) -> bool,
    ) -> Result<(), KvError> {
        let own = !self.home().in_batch();
        if own {
            self.begin_batch();
        }
        let need = if removes { Need::Tombstone } else { Need::Data };
        let limit = self.store().batch_room_bytes();
        let fits = u32::try_from(bytes).ok().filter(|bytes| u64::from(*bytes) <= limit);
        let fits = fits.ok_or(KvError::BatchTooLarge { length: bytes, limit });
        let entered = fits.and_then(|bytes| self.home_mut().enter_appends(bytes, need));
        self.spread_moves();
        // What the batch reserved before, for entries to come, is not for these.
        let held = self.home_mut().take_reserved();
        self.home_mut().put_back_reserved(held);
        let ready = entered.and_then(|()| self.reserve_batch(bytes, 0, removes));
        if ready.is_ok() {
            let before = self.home().batch_entries();
            let done = body(self);
            if !done && self.home().batch_entries() > before {
                self.abandon_batch();
            }
            // Puts took their part of what was reserved already; appends and heads take none of it.
            let left = self.home_mut().take_reserved();
            self.home_mut().put_back_reserved(left.min(held));
        }
        if own {
            self.end_batch();
        }
        ready
    }

    /// Appends one entry, within a batch in the chain of streams that has room for it; its position. With
    /// a head where the stream begins with it, or is cut off because `added` bytes come to it.
    pub(crate) fn append_at(
        &mut self,
        place: &Place,
        value: &[&[u8]],
        added: u64,
    ) -> Result<u64, KvError> {
        self.settle_appends(place.owner)?;
        let tagged = place.space.tagged;
        let known = self
            .shard(place.owner)?
            .streams(tagged)
            .is_some_and(|streams| streams.get(&place.key).is_some());
        if !known {
            let generation = self.store().next_version()?;
            let appended = self.put_stream_head(place, generation, 0)?;
            let stream = Stream::new(generation, 0, appended.version);
            self.shard(place.owner)?.begin_stream(tagged, &place.key, stream);
        } else if let Some((generation, first)) = self.cut_for(place, added)? {
            self.cut_at(place, generation, first)?;
        }
        self.store_entry(place, value)
    }

    /// Where the stream begins once `added` bytes come to it, if its namespace keeps a part only and that
    /// moves its beginning; and its generation.
    fn cut_for(&mut self, place: &Place, added: u64) -> Result<Option<(u64, u64)>, KvError> {
        let keep_bytes = place.space.options.keep_bytes;
        if keep_bytes == 0 || added == 0 {
            return Ok(None);
        }
        let streams = self.shard(place.owner)?.streams(place.space.tagged);
        let stream = streams.and_then(|streams| streams.get(&place.key));
        Ok(stream.and_then(|stream| {
            let first = stream.cut_to_keep(keep_bytes, added);
            (first > stream.first).then_some((stream.generation, first))
        }))
    }

    fn store_entry(&mut self, place: &Place, value: &[&[u8]]) -> Result<u64, KvError> {
        let tagged = place.space.tagged;
        let streams = self.shard(place.owner)?.streams(tagged);
        let stream = streams.and_then(|streams| streams.get(&place.key));
        let here = stream.map(|stream| (stream.generation, stream.next));
        let Some((generation, position)) = here else {
            return Err(crate::space::unknown(tagged));
        };
        let (key, hash) = (&place.key, place.hash);
        let stored = self.home_mut().append_entry(tagged, hash, (key, generation, position), value);
        // Also where it failed: room may have been made by moving the batch.
        self.spread_moves();
        let appended = stored?;
        self.shard(place.owner)?.push_entry(tagged, &place.key, &appended);
        self.note_log(place.owner)?;
        if self.joins_several() {
            self.effects.append(tagged, &place.key, position, value);
        }
        Ok(position)
    }

    /// Stores the head of a stream, within a batch in the chain of streams.
    fn put_stream_head(
        &mut self,
        place: &Place,
        generation: u64,
        first: u64,
    ) -> Result<Appended, KvError> {
        let (value, options) = (head(generation, first), PutOptions::default());
        let home = self.home_mut();
        // What it means is told by an event of its own.
        let muted = std::mem::replace(&mut home.waiting.muted, true);
        let (tagged, key) = (place.space.tagged, &place.key);
        let stored = home.append_put(tagged, place.hash, key, &[&value], options);
        home.waiting.muted = muted;
        self.spread_moves();
        let appended = stored?;
        self.shard(place.owner)?.install(tagged, place.hash, key, &appended);
        self.note_log(place.owner)?;
        Ok(appended)
    }

    fn cut_at(&mut self, place: &Place, generation: u64, first: u64) -> Result<(), KvError> {
        let appended = self.put_stream_head(place, generation, first)?;
        let (home, tagged) = (self.home().index(), place.space.tagged);
        self.shard(place.owner)?.cut_stream(tagged, &place.key, first, &appended, home);
        let event = EventKind::Truncate { first };
        self.home_mut().feed_note(appended.version, tagged, &place.key, event);
        if self.joins_several() {
            self.effects.truncate(tagged, &place.key, first);
        }
        Ok(())
    }

    /// The stream's last change lies in the home shard's log now.
    fn note_log(&mut self, owner: usize) -> Result<(), KvError> {
        let home = self.home().index();
        let owner = self.shard(owner)?;
        owner.appends_in = Some(home);
        if owner.index() != home {
            owner.lean(true);
        }
        Ok(())
    }

    /// Sees to it that no change of a stream follows one in another shard's log that a crash could
    /// take back.
    fn settle_appends(&mut self, owner: usize) -> Result<(), KvError> {
        let home = self.home().index();
        let log = self.shard(owner)?.appends_in.filter(|log| *log != home);
        let Some(needed) = log.filter(|_| !fault::is_on(KnownBug::AppendAway)) else {
            return Ok(());
        };
        let persisted = match self.shard(needed) {
            Ok(shard) if shard.in_batch() => false,
            Ok(shard) => shard.commit().map(|()| true)?,
            Err(_) => self.store().peers.commit(needed),
        };
        if !persisted {
            return Err(KvError::WrongShard { needed });
        }
        self.shard(owner)?.appends_in = None;
        Ok(())
    }

    /// Cuts a stream off in front, so that it begins at `first`, or at its end where that comes sooner; the
    /// position at which it begins now. One small entry, however much goes. Within a batch, as a part
    /// of it. Persisted by [`Keyspace::commit`].
    ///
    /// Errors: as [`Keyspace::append_in`]; it may use the room that is kept for deletions.
    pub fn truncate_stream(&mut self, number: u32, row: &[u8], first: u64) -> Result<u64, KvError> {
        let place = self.stream_place(number, row)?;
        let Some((generation, ends)) = place.here else { return Ok(0) };
        let first = first.min(ends.next);
        if first <= ends.first {
            return Ok(ends.first);
        }
        self.prefer_home(place.owner);
        let mut cut = Ok(());
        self.in_appends_batch(place.head_bytes(), true, |keys| {
            cut = keys.settle_appends(place.owner);
            if cut.is_ok() {
                cut = keys.cut_at(&place, generation, first);
            }
            cut.is_ok()
        })?;
        cut.map(|()| first)
    }

    /// Deletes a stream, by one small entry; false when there was none. Another one under its row
    /// begins at position 0. Within a batch, as a part of it. Persisted by [`Keyspace::commit`].
    ///
    /// Errors: as [`Keyspace::truncate_stream`].
    pub fn delete_stream(&mut self, number: u32, row: &[u8]) -> Result<bool, KvError> {
        let place = self.stream_place(number, row)?;
        if place.here.is_none() {
            return Ok(false);
        }
        self.prefer_home(place.owner);
        let mut deleted = Ok(());
        self.in_appends_batch(slot_bytes_for(place.key.len(), 0), true, |keys| {
            deleted = keys.settle_appends(place.owner).and_then(|()| keys.end_at(&place));
            deleted.is_ok()
        })?;
        deleted.map(|()| true)
    }

    fn end_at(&mut self, place: &Place) -> Result<(), KvError> {
        let (home, tagged) = (self.home().index(), place.space.tagged);
        let stored = self.home_mut().append_tombstone(tagged, &place.key);
        self.spread_moves();
        let appended = stored?;
        let owner = self.shard(place.owner)?;
        owner.install(tagged, place.hash, &place.key, &appended);
        owner.end_stream(tagged, &place.key, Some(home));
        self.note_log(place.owner)?;
        if self.joins_several() {
            self.effects.delete(tagged, &place.key);
        }
        Ok(())
    }

    /// Calls `visit` with the entries of a stream from position `from` on, in order, until it breaks; with
    /// none where there is no such stream, or none so late. An entry that was lost to damage is
    /// left out. What was not committed is among them, as for every reader.
    ///
    /// Errors: [`KvError::StreamCut`] where `from` lies before the first position; as
    /// [`Keyspace::stream`].
    pub fn read_stream(
        &mut self,
        number: u32,
        row: &[u8],
        from: u64,
        visit: impl FnMut(StreamEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), KvError> {
        let place = self.stream_place(number, row)?;
        let Some(ends) = place.ends() else { return Ok(()) };
        if from < ends.first {
            return Err(KvError::StreamCut { position: from, first: ends.first });
        }
        self.shard(place.owner)?.visit_stream(place.space.tagged, &place.key, from, visit);
        Ok(())
    }
}
