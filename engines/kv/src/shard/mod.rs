//! One shard: the indexes of its keys, its own log, and what keeps both in order.
//!
//! A shard is used by whoever holds its lock, one thread at a time. An [`EntryRef`] is good until
//! the next call that takes the shard mutably other than a lookup that finds a live key.

pub(crate) mod ahead;
mod batch;
pub(crate) mod client_log;
mod collect;
mod fields;
mod install;
pub(crate) mod log;
mod look;
mod peer;
mod pending;
pub(crate) mod reads;
pub(crate) mod recycle;
mod restore;
mod streams;
pub(crate) mod upkeep;
mod whole;

use std::sync::Arc;

use beeline_pmem::Persister;

use crate::ended::Ended;
use crate::entry::{self, EXPIRES, HEADER_BYTES, KEY_LIMIT, TOMBSTONE};
use crate::fault::{self, KnownBug};
use crate::feed::{EventKind, Waiting};
use crate::foreseen::{Foreseen, Placed};
use crate::index::{Location, SlotId};
use crate::known_row::KnownRow;
use crate::random::Xorshift;
use crate::segments::SegmentCache;
use crate::spaces::Spaces;
use crate::stats::{self, ShardCounters, ShardStats};
use crate::store::Store;
use crate::{DATABASES, KvError, SYSTEM_NAMESPACE, Version};

use batch::Batch;
use collect::Collector;
use log::{Appended, Chain, Draft, Log};
use look::holds_key;
pub(crate) use look::{copy_verified, read_header, read_key};
use pending::Pending;
use reads::ReadRegistry;
use recycle::Recycler;
use upkeep::Expiry;

/// A live key's newest entry.
#[derive(Clone, Copy, Debug)]
pub struct EntryRef {
    /// Version of the entry.
    pub version: Version,
    /// Version of the latest change: the entry's, or that of its expiry since.
    pub changed: Version,
    /// Encoding of the value.
    pub kind: u8,
    /// Wall-clock time of expiry in milliseconds, 0 = never.
    pub expires_at_ms: u64,
    /// Value length in bytes.
    pub value_length: u32,
    /// Key length in bytes.
    pub key_length: u16,
    /// Hash of the key.
    pub hash: u64,
    pub(crate) slot_bytes: u32,
    pub(crate) location: Location,
}

/// How to store a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// Encoding of the value; 0 = string.
    pub kind: u8,
    /// Wall-clock time of expiry in milliseconds, 0 = never.
    pub expires_at_ms: u64,
}

/// What became of a put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored {
    pub version: Version,
    /// The key was not there before: see [`Shard::install`].
    pub new: bool,
}

/// What a slice of maintenance did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Maintenance {
    /// There was something to do: call again soon.
    pub did_work: bool,
    /// Monotonic time in nanoseconds at which to call again, if at all.
    pub next_deadline_ns: Option<u64>,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Shard {
    pub(crate) index: usize,
    pub(crate) store: Arc<Store>,
    pub(crate) spaces: Spaces,
    pub(crate) cache: SegmentCache,
    pub(crate) log: Log,
    pub(crate) persister: Persister,
    batch: Option<Batch>,
    /// An emptied one, kept to allocate once.
    spare_batch: Batch,
    /// Bytes that the open batch may still store without a look at the memory limit.
    reserved: u64,
    collector: Collector,
    recycler: Recycler,
    /// The collector's copy of an entry, kept to allocate once.
    collected: Vec<u8>,
    expiry: Expiry,
    reads: ReadRegistry,
    pub(crate) ended: Ended,
    pub(crate) waiting: Waiting,
    pub(crate) random: Xorshift,
    pub(crate) scratch: Vec<u8>,
    /// In a place of its own: it is taken out while it is used.
    pub(crate) foreseen: Option<Box<Foreseen>>,
    pub(crate) known_row: KnownRow,
    /// The stored key of a field that is put, kept to allocate once.
    pub(crate) field_key: Vec<u8>,
    /// Where commits need not wait for the medium.
    pending: Option<Box<Pending>>,
    /// Coarse clock of use: seconds of the monotonic clock, modulo 65,536.
    use_second: u16,
    poisoned: bool,
    /// Its index points at entries in another shard's log that were not persisted yet.
    leans: bool,
    /// The shard whose log has the last change of a stream of this one, if it may not be persisted.
    pub(crate) appends_in: Option<usize>,
    /// See [`crate::Keyspace::agree_until`].
    pub(crate) agreed_ms: u64,
}

impl Shard {
    pub(crate) fn new(store: Arc<Store>, index: usize) -> Self {
        let persister = store.pool.persister();
        Self {
            index,
            spaces: Spaces::default(),
            cache: SegmentCache::default(),
            log: Log::default(),
            persister,
            batch: None,
            spare_batch: Batch::default(),
            reserved: 0,
            collector: Collector::default(),
            recycler: Recycler::default(),
            collected: Vec::new(),
            expiry: Expiry::default(),
            reads: ReadRegistry::default(),
            ended: Ended::default(),
            waiting: Waiting::default(),
            random: Xorshift::new(0x5EED + index as u64),
            scratch: Vec::new(),
            foreseen: None,
            known_row: KnownRow::default(),
            field_key: Vec::new(),
            pending: Self::pending_of(store.pool.report().mechanism),
            use_second: second_of(store.clock.monotonic_ns()),
            poisoned: false,
            leans: false,
            appends_in: None,
            agreed_ms: 0,
            store,
        }
    }

    /// Index of this shard in its store.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// The store it belongs to.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    pub(crate) fn counters(&self) -> &ShardCounters {
        &self.store.counters[self.index]
    }

    /// Figures of this shard.
    #[must_use]
    pub fn stats(&self) -> ShardStats {
        self.counters().read()
    }

    pub(crate) fn check_database(database: u8) -> Result<(), KvError> {
        let (database, limit) = (u16::from(database), DATABASES);
        if database < limit { Ok(()) } else { Err(KvError::Database { database, limit }) }
    }

    /// Fails for a namespace that clients cannot use or nobody created.
    #[inline]
    pub(crate) fn check_namespace(&self, namespace: u32) -> Result<(), KvError> {
        if namespace < u32::from(DATABASES) || self.spaces.extra(namespace).is_some() {
            return Ok(());
        }
        Err(crate::space::unknown(namespace))
    }

    /// Whether the shard takes and persists nothing any more.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    pub(crate) fn check_writable(&self) -> Result<(), KvError> {
        if self.poisoned { Err(KvError::Poisoned { shard: self.index }) } else { Ok(()) }
    }

    /// The slot of a key, tombstones included.
    #[inline]
    pub(crate) fn find(&mut self, namespace: u32, hash: u64, key: &[u8]) -> Option<SlotId> {
        self.look(hash);
        let index = self.spaces.get(namespace)?;
        let (cache, table) = (&mut self.cache, &self.store.table);
        index.find(hash, |slot| {
            // A slot without readable bytes answers for its hash.
            !slot.location.is_readable()
                || holds_key(cache.get(table, slot.location.segment()), slot, key)
        })
    }

    /// Asks the processor for the index line of a key that is about to be used.
    #[inline]
    pub(crate) fn prefetch(&self, namespace: u32, hash: u64) {
        if let Some(index) = self.spaces.get(namespace) {
            index.prefetch(hash);
        }
    }

    /// The newest live entry of a key. A key found expired is deleted on the way.
    ///
    /// Errors: [`KvError::Database`]; failures to store the deletion are not reported: the key is
    /// absent all the same.
    pub fn lookup(&mut self, database: u8, key: &[u8]) -> Result<Option<EntryRef>, KvError> {
        let hash = self.store.place_key(database, key);
        self.lookup_at(database, hash, key)
    }

    /// As [`Shard::lookup`] where the hash is known, from [`Shard::expect_key`] or
    /// [`Store::place_key`]. With another one the key is not found.
    ///
    /// Errors: as [`Shard::lookup`].
    pub fn lookup_at(
        &mut self,
        database: u8,
        hash: u64,
        key: &[u8],
    ) -> Result<Option<EntryRef>, KvError> {
        Self::check_database(database)?;
        Ok(self.lookup_hashed(u32::from(database), hash, key))
    }

    /// Version of the latest deletion that may have hit an absent key, as far as it is still known:
    /// that of the key itself, or a flush of its database. 0: none.
    ///
    /// Errors: [`KvError::Database`].
    pub fn deletion(&mut self, database: u8, key: &[u8]) -> Result<Version, KvError> {
        Self::check_database(database)?;
        let namespace = u32::from(database);
        let flushed = self.store.barrier(namespace);
        let hash = self.store.place_key(database, key);
        let Some(id) = self.find(namespace, hash, key) else { return Ok(flushed) };
        let Some(index) = self.spaces.get(namespace) else { return Ok(flushed) };
        let location = index.slot(id).location;
        if !location.is_absent() || !location.is_readable() {
            return Ok(flushed);
        }
        let state = self.cache.get(&self.store.table, location.segment());
        Ok(read_header(state, location.offset()).version.max(flushed))
    }

    pub(crate) fn lookup_hashed(
        &mut self,
        namespace: u32,
        hash: u64,
        key: &[u8],
    ) -> Option<EntryRef> {
        let found = self.find(namespace, hash, key);
        let entry = found.and_then(|id| {
            self.mark_used(namespace, id);
            self.live_entry(namespace, id)
        });
        let counters = self.counters();
        stats::add(if entry.is_some() { &counters.hits } else { &counters.misses }, 1);
        let entry = entry?;
        if entry.expires_at_ms != 0 && entry.expires_at_ms <= self.store.clock.unix_ms() {
            self.expire(namespace, hash, key, entry.expires_at_ms);
            return None;
        }
        Some(entry)
    }

    /// As [`Shard::lookup`], but the key does not count as used or asked for.
    ///
    /// Errors: as [`Shard::lookup`].
    pub fn peek(&mut self, database: u8, key: &[u8]) -> Result<Option<EntryRef>, KvError> {
        Self::check_database(database)?;
        Ok(self.peek_slot(u32::from(database), key).map(|(_, entry)| entry))
    }

    pub(crate) fn peek_slot(&mut self, namespace: u32, key: &[u8]) -> Option<(SlotId, EntryRef)> {
        let hash = self.store.place(namespace, key);
        self.peek_placed(namespace, hash, key)
    }

    /// As [`Shard::peek_slot`], where the key's place is known.
    pub(crate) fn peek_placed(
        &mut self,
        namespace: u32,
        hash: u64,
        key: &[u8],
    ) -> Option<(SlotId, EntryRef)> {
        let id = self.find(namespace, hash, key)?;
        let entry = self.live_entry(namespace, id)?;
        let expired = entry.expires_at_ms != 0 && entry.expires_at_ms <= self.store.clock.unix_ms();
        if expired {
            self.expire(namespace, hash, key, entry.expires_at_ms);
            return None;
        }
        Some((id, entry))
    }

    /// Whole seconds since a key was last used, modulo 65,536 (18 hours and 12 minutes): the index
    /// keeps no more of it. `None` for an absent key. Does not count as use.
    ///
    /// Errors: as [`Shard::lookup`].
    pub fn idle_seconds(&mut self, database: u8, key: &[u8]) -> Result<Option<u16>, KvError> {
        Self::check_database(database)?;
        let namespace = u32::from(database);
        let Some((id, _)) = self.peek_slot(namespace, key) else { return Ok(None) };
        let Some(index) = self.spaces.get(namespace) else { return Ok(None) };
        let now = second_of(self.store.clock.monotonic_ns());
        Ok(Some(now.wrapping_sub(index.slot(id).last_use)))
    }

    #[inline]
    pub(crate) fn mark_used(&mut self, namespace: u32, id: SlotId) {
        let second = self.use_second;
        if let Some(index) = self.spaces.get_mut(namespace) {
            index.use_slot(id, second);
        }
    }

    /// The entry in a slot, unless it is absent; does not look at expiry.
    pub(crate) fn live_entry(&mut self, namespace: u32, id: SlotId) -> Option<EntryRef> {
        let index = self.spaces.get(namespace)?;
        let slot = *index.slot(id);
        if slot.location.is_absent() {
            return None;
        }
        let state = self.cache.get(&self.store.table, slot.location.segment());
        let header = read_header(state, slot.location.offset());
        // A client may have scribbled over the lengths: what is used never exceeds the slot.
        if header.used_bytes() > slot.slot_bytes() {
            stats::add(&self.counters().damaged, 1);
            return None;
        }
        if self.is_of_ended_row(namespace, &slot, &header)
            || self.is_of_past_row(namespace, &slot, &header)
        {
            return None;
        }
        let (expires_at_ms, changed) = self.expiry_of(namespace, &slot, &header);
        Some(EntryRef {
            version: header.version,
            changed,
            kind: header.kind,
            expires_at_ms,
            value_length: header.value_length,
            key_length: header.key_length,
            hash: slot.hash,
            slot_bytes: slot.slot_bytes() as u32,
            location: slot.location,
        })
    }

    /// Lends the value to `reader`: in place where no client can write, else a validated copy.
    ///
    /// Errors: [`KvError::Damaged`] when a copy fails its checksum or seal.
    pub fn with_value<R>(
        &mut self,
        entry: &EntryRef,
        reader: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, KvError> {
        let state = self.cache.get(&self.store.table, entry.location.segment());
        let start = HEADER_BYTES + u32::from(entry.key_length);
        if !entry.location.has(Location::UNTRUSTED) {
            let offset = entry.location.offset() + start;
            return Ok(reader(state.bytes(offset, entry.value_length as usize)));
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let copied = copy_verified(
            &self.store.sealer,
            state,
            entry.location.offset(),
            entry.slot_bytes,
            &mut scratch,
        );
        let result = match copied {
            Some(header)
                if header.version == entry.version
                    && header.key_length == entry.key_length
                    && header.value_length == entry.value_length =>
            {
                Ok(reader(&scratch[start as usize..start as usize + entry.value_length as usize]))
            }
            _ => {
                stats::add(&self.store.counters[self.index].damaged, 1);
                let (segment, offset) = (entry.location.segment(), entry.location.offset());
                Err(KvError::Damaged { segment, offset })
            }
        };
        self.scratch = scratch;
        result
    }

    /// Puts the value into `out`, replacing what was there.
    ///
    /// Errors: as [`Shard::with_value`].
    pub fn read_value(&mut self, entry: &EntryRef, out: &mut Vec<u8>) -> Result<(), KvError> {
        out.clear();
        self.with_value(entry, |value| out.extend_from_slice(value))
    }

    /// Stores `value` (the parts in a row) under `key`. Persisted by [`Shard::commit`].
    ///
    /// Errors: limits, [`KvError::MemoryLimit`], [`KvError::PoolFull`],
    /// [`KvError::BatchTooLarge`], the pool's. Nothing changed then.
    pub fn put(
        &mut self,
        database: u8,
        key: &[u8],
        value: &[&[u8]],
        options: PutOptions,
    ) -> Result<Version, KvError> {
        Self::check_database(database)?;
        let placed = self.store.place_key(database, key).into();
        Ok(self.put_placed(u32::from(database), placed, key, value, options)?.version)
    }

    /// As [`Shard::put`] where the place is known.
    pub(crate) fn put_placed(
        &mut self,
        namespace: u32,
        placed: Placed,
        key: &[u8],
        value: &[&[u8]],
        options: PutOptions,
    ) -> Result<Stored, KvError> {
        let Placed { place: hash, asked } = placed;
        // The old entry's lines arrive while the new one is being written.
        if !asked {
            self.prefetch(namespace, hash);
        }
        let length = value.iter().map(|part| part.len()).sum();
        self.admit_own(namespace, key.len(), length)?;
        if !asked {
            self.prefetch_entry(namespace, hash);
        }
        let appended = self.append_put(namespace, hash, key, value, options)?;
        self.install_moves();
        let new = self.install(namespace, hash, key, &appended);
        Ok(Stored { version: appended.version, new })
    }

    /// Checks limits, and makes room under the memory limit unless it was `reserved` in the log
    /// that takes the entry.
    pub(crate) fn admit(
        &mut self,
        namespace: u32,
        key_length: usize,
        value_length: usize,
        reserved: &mut u64,
    ) -> Result<(), KvError> {
        self.check_namespace(namespace)?;
        self.admit_entry(namespace, (key_length, value_length), reserved)
    }

    /// As [`Shard::admit`], for a namespace that is there.
    pub(crate) fn admit_entry(
        &mut self,
        namespace: u32,
        (key_length, value_length): (usize, usize),
        reserved: &mut u64,
    ) -> Result<(), KvError> {
        if key_length > KEY_LIMIT {
            return Err(KvError::KeyTooLong { length: key_length, limit: KEY_LIMIT });
        }
        let limit = self.store.value_limit(key_length);
        if value_length > limit {
            return Err(KvError::ValueTooLong { length: value_length, limit });
        }
        self.check_writable()?;
        let bytes = entry::slot_bytes_for(key_length, value_length);
        if let Some(left) = reserved.checked_sub(bytes) {
            *reserved = left;
            return Ok(());
        }
        self.fit_memory(bytes)?;
        self.fit_namespace(namespace, bytes, bytes)
    }

    /// As [`Shard::admit`], where the entry goes to this shard's log.
    pub(crate) fn admit_own(
        &mut self,
        namespace: u32,
        key_length: usize,
        value_length: usize,
    ) -> Result<(), KvError> {
        let mut room = self.take_reserved();
        let admitted = self.admit(namespace, key_length, value_length, &mut room);
        self.put_back_reserved(room);
        admitted
    }

    pub(crate) fn take_reserved(&mut self) -> u64 {
        std::mem::take(&mut self.reserved)
    }

    pub(crate) fn put_back_reserved(&mut self, bytes: u64) {
        self.reserved = bytes;
    }

    pub(crate) fn append_put(
        &mut self,
        namespace: u32,
        hash: u64,
        key: &[u8],
        value: &[&[u8]],
        options: PutOptions,
    ) -> Result<Appended, KvError> {
        let flags = if options.expires_at_ms == 0 { 0 } else { EXPIRES };
        if self.batch.is_some() && namespace != SYSTEM_NAMESPACE {
            let length = value.iter().map(|part| part.len()).sum();
            self.admit_to_batch(entry::slot_bytes_for(key.len(), length))?;
        }
        self.expiry.note(options.expires_at_ms);
        let version = self.version_for_feed()?;
        let draft = Draft {
            version,
            hash,
            namespace,
            kind: options.kind,
            flags,
            expires_at_ms: options.expires_at_ms,
            key,
            value,
        };
        let appended = self.append(Chain::Data, &draft).inspect_err(|_| self.feed_refused())?;
        if self.store.feed.is_some() {
            let length: usize = value.iter().map(|part| part.len()).sum();
            let (kind, expires_at_ms) = (options.kind, options.expires_at_ms);
            let beside = value.last().filter(|_| crate::expiries::is_expiries(namespace));
            let kind = match beside.and_then(|at| at.first_chunk::<8>()) {
                Some(at) => EventKind::Expiry { expires_at_ms: u64::from_le_bytes(*at) },
                None => EventKind::Put { kind, value_length: length as u32, expires_at_ms },
            };
            self.feed_note(version, namespace, key, kind);
        }
        Ok(appended)
    }

    pub(crate) fn append_tombstone(
        &mut self,
        namespace: u32,
        key: &[u8],
    ) -> Result<Appended, KvError> {
        self.check_writable()?;
        let version = self.version_for_feed()?;
        let draft = Draft {
            version,
            hash: self.store.place(namespace, key),
            namespace,
            kind: 0,
            flags: TOMBSTONE,
            expires_at_ms: 0,
            key,
            value: &[],
        };
        let appended = self.append(Chain::Data, &draft).inspect_err(|_| self.feed_refused())?;
        self.feed_note(version, namespace, key, EventKind::Delete);
        Ok(appended)
    }

    /// Deletes a key; false when there was none. Persisted by [`Shard::commit`].
    ///
    /// Errors: [`KvError::Database`], [`KvError::PoolFull`] when not even the reserve has room,
    /// the pool's.
    pub fn delete(&mut self, database: u8, key: &[u8]) -> Result<bool, KvError> {
        Self::check_database(database)?;
        self.delete_in(u32::from(database), key)
    }

    /// As [`Shard::delete`], in any namespace.
    pub(crate) fn delete_in(&mut self, namespace: u32, key: &[u8]) -> Result<bool, KvError> {
        let hash = self.store.place(namespace, key);
        let existed = self.exists(namespace, hash, key, self.in_batch());
        if !existed && !self.may_come_back(namespace, hash, key, self.in_batch()) {
            return Ok(false);
        }
        let appended = self.append_tombstone(namespace, key)?;
        self.install_moves();
        self.install(namespace, hash, key, &appended);
        Ok(existed)
    }

    /// True when a key that is to be deleted is there. In a batch, one found expired is left to the
    /// deletion: another tombstone would take the room that was reserved for the batch.
    pub(crate) fn exists(&mut self, namespace: u32, hash: u64, key: &[u8], in_batch: bool) -> bool {
        if !in_batch {
            return self.lookup_hashed(namespace, hash, key).is_some();
        }
        let now = self.store.clock.unix_ms();
        let found = self.find(namespace, hash, key);
        let entry = found.and_then(|id| self.live_entry(namespace, id));
        entry.is_some_and(|entry| entry.expires_at_ms == 0 || entry.expires_at_ms > now)
    }

    /// True when a key that a lookup did not find needs a tombstone all the same to stay away: its
    /// newest entry was lost to damage while older ones may be left; its time is past and its
    /// deletion found no room, so that a clock set back would show it; or the deletion is part of
    /// a batch, which must not rest on a tombstone that is not persisted yet.
    pub(crate) fn may_come_back(
        &mut self,
        namespace: u32,
        hash: u64,
        key: &[u8],
        in_batch: bool,
    ) -> bool {
        let Some(id) = self.find(namespace, hash, key) else { return false };
        let index = self.spaces.get(namespace);
        let location = index.map(|index| index.slot(id).location);
        location.is_some_and(|location| {
            in_batch || !location.is_absent() || location.has(Location::LOST)
        })
    }

    /// True while a batch is open.
    pub(crate) fn in_batch(&self) -> bool {
        self.batch.is_some()
    }

    /// Keys of this shard whose time came by then may be deleted.
    pub(crate) fn deletes_until_ms(&self) -> u64 {
        self.store.deletes_until_ms(self.agreed_ms)
    }

    /// Deletes a key whose time has come.
    fn expire(&mut self, namespace: u32, hash: u64, key: &[u8], expires_at_ms: u64) {
        let held_back = self.store.is_replacing() && !fault::is_on(KnownBug::ExpireWhileReplacing);
        if expires_at_ms > self.deletes_until_ms() || held_back {
            return;
        }
        // Where not even a tombstone fits, the key stays and is reported absent as long as its
        // time is past; the next lookup tries again.
        if let Ok(appended) = self.append_tombstone(namespace, key) {
            self.install_moves();
            self.install(namespace, hash, key, &appended);
            stats::add(&self.counters().expired, 1);
        }
    }

    /// Sets (or with 0 removes) the expiry of a key; false when there is no such key. A time in the
    /// past deletes the key.
    ///
    /// Errors: as [`Shard::put`].
    pub fn set_expiry(
        &mut self,
        database: u8,
        key: &[u8],
        expires_at_ms: u64,
    ) -> Result<bool, KvError> {
        crate::Keyspace::single(self).set_expiry(database, key, expires_at_ms)
    }

    /// The records of a database, other shards' keys among them, count nowhere any more.
    fn forget_records(&mut self, namespace: u32) {
        self.recycler.forget_namespace(namespace);
        let heads = self.log.heads.iter_mut().flatten().filter_map(|head| head.roster.as_mut());
        heads.for_each(|roster| roster.forget(namespace));
    }

    /// Forgets every key of a database; the store's barrier makes it last.
    pub(crate) fn forget(&mut self, namespace: u32) {
        self.known_row.forget_all();
        self.forget_records(namespace);
        self.forget_streams(namespace);
        self.forget_row_times(namespace);
        let Some(index) = self.spaces.take(namespace) else { return };
        self.collector.garbage_made += index.live_bytes;
        if let Some(account) = &index.account {
            account.set(self.index, 0);
        }
        for page in 0..index.pages() {
            for slot in index.page(page).filter(|slot| slot.location.is_readable()) {
                let state = self.cache.get(&self.store.table, slot.location.segment());
                if slot.is_needed() {
                    state.remove_live(slot.slot_bytes());
                } else {
                    state.change_hollow(-1);
                }
            }
        }
        self.recycler.look = true;
        let counters = self.counters();
        stats::add(&counters.keys, index.live.wrapping_neg());
        stats::add(&counters.live_bytes, index.live_bytes.wrapping_neg());
        stats::add(&counters.expiring_keys, index.expiring.wrapping_neg());
        let databases = &self.store.database_counters[self.index];
        if let Some(keys) = databases.keys.get(namespace as usize) {
            stats::set(keys, 0);
            stats::set(&databases.expiring[namespace as usize], 0);
        }
    }

    /// Sets the coarse clock of use, for those who have just looked at the monotonic one.
    #[inline]
    pub fn note_time(&mut self, monotonic_ns: u64) {
        self.use_second = second_of(monotonic_ns);
    }

    /// Refreshes the coarse clock and the gauges that are not kept up to date by every call.
    pub fn tick(&mut self) {
        self.note_time(self.store.clock.monotonic_ns());
        let slots = self.spaces.all().map(|index| index.slots()).sum();
        let bytes = self.spaces.memory_bytes();
        let counters = self.counters();
        stats::set(&counters.index_slots, slots);
        stats::set(&counters.index_bytes, bytes);
    }
}

/// The second of the coarse clock of use.
#[inline]
fn second_of(monotonic_ns: u64) -> u16 {
    (monotonic_ns / 1_000_000_000) as u16
}

impl Drop for Shard {
    fn drop(&mut self) {
        // Without this the next opening finds what a crash leaves, which is as good. A shard that
        // panicked or failed to persist has nothing to add.
        if !self.poisoned && !std::thread::panicking() {
            let _ = self.close();
        }
    }
}
