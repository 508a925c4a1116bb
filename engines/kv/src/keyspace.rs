//! What commands see: the keys of one shard, or of several locked together.
//!
//! One shard is the common case and costs nothing extra. With several, all writes go to the log
//! of the *home* shard, so that a batch lies in one segment, while each key's index stays with
//! its own shard.

use crate::foreseen::Placed;
use crate::index::POSITION_BITS;
use crate::replica::Effects;
use crate::shard::ahead::{Ahead, Expected, Owners};
use crate::shard::{EntryRef, PutOptions, Shard, Stored};
use crate::store::{Need, Store};
use crate::{KvError, Version};

enum Shards<'a> {
    One(&'a mut Shard),
    Many { shards: Vec<&'a mut Shard>, home: usize },
}

impl std::fmt::Debug for Keyspace<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Keyspace").field("home", &self.home().index()).finish()
    }
}

/// See the module's documentation.
pub struct Keyspace<'a> {
    shards: Shards<'a>,
    pub(crate) effects: Effects,
    /// A shard took nothing any more when it was locked, so no write of this turn joins several.
    failed: bool,
}

impl Owners for Keyspace<'_> {
    fn owner_of(&mut self, place: u64) -> Option<&mut Shard> {
        let owner = self.store().owner_of(place);
        self.shard(owner).ok()
    }
}

impl<'a> Keyspace<'a> {
    /// The keys of one shard.
    #[must_use]
    pub fn single(shard: &'a mut Shard) -> Self {
        Self { shards: Shards::One(shard), effects: Effects::default(), failed: false }
    }

    /// The keys of several shards, all locked by the caller in order of index; writes go to the
    /// log of `shards[home]`.
    #[must_use]
    pub fn many(shards: Vec<&'a mut Shard>, home: usize) -> Self {
        assert!(home < shards.len(), "the home shard is among the locked ones");
        let failed = shards.iter().any(|shard| shard.check_writable().is_err());
        Self { shards: Shards::Many { shards, home }, effects: Effects::default(), failed }
    }

    pub(crate) fn home(&self) -> &Shard {
        match &self.shards {
            Shards::One(shard) => shard,
            Shards::Many { shards, home } => shards[*home],
        }
    }

    /// The shard whose log takes the writes.
    pub fn home_mut(&mut self) -> &mut Shard {
        match &mut self.shards {
            Shards::One(shard) => shard,
            Shards::Many { shards, home } => shards[*home],
        }
    }

    /// Makes a locked shard the home, unless the open batch has entries where they are. So a stream
    /// goes on in one log, as long as nothing else decides.
    pub(crate) fn prefer_home(&mut self, wanted: usize) {
        if self.home().index() == wanted || self.home().batch_entries() > 0 {
            return;
        }
        let in_batch = self.home().in_batch();
        let Shards::Many { shards, home } = &mut self.shards else { return };
        let Some(at) = shards.iter().position(|shard| shard.index() == wanted) else { return };
        if shards[at].in_batch() {
            return;
        }
        let before = std::mem::replace(home, at);
        let reserved = shards[before].take_reserved();
        if in_batch {
            shards[before].end_batch();
            shards[at].begin_batch();
        }
        shards[at].put_back_reserved(reserved);
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &std::sync::Arc<Store> {
        self.home().store()
    }

    /// Wall-clock time in milliseconds, from the injected clock.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.store().clock().unix_ms()
    }

    /// Locked shards in order.
    pub fn shards_mut(&mut self) -> impl Iterator<Item = &mut Shard> {
        let shards = match &mut self.shards {
            Shards::One(shard) => std::slice::from_mut(shard),
            Shards::Many { shards, .. } => shards.as_mut_slice(),
        };
        shards.iter_mut().map(|shard| &mut **shard)
    }

    /// True when every shard of the store is locked.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.locked() == self.store().shards()
    }

    /// True where writes to several shards go to the log of one.
    pub(crate) fn joins_several(&self) -> bool {
        matches!(self.shards, Shards::Many { .. })
    }

    fn locked(&self) -> usize {
        match &self.shards {
            Shards::One(_) => 1,
            Shards::Many { shards, .. } => shards.len(),
        }
    }

    /// The locked shard with this index.
    pub(crate) fn shard(&mut self, needed: usize) -> Result<&mut Shard, KvError> {
        // The error is not even made where it is not needed: this is on every request's way.
        let Some(shard) = self.shards_mut().find(|shard| shard.index() == needed) else {
            return Err(KvError::WrongShard { needed });
        };
        Ok(shard)
    }

    fn owner(&mut self, database: u8, key: &[u8]) -> Result<&mut Shard, KvError> {
        let needed = self.store().shard_of(database, key);
        self.shard(needed)
    }

    /// Tells what is about to be used; see [`Shard::expect`].
    #[inline]
    pub fn expect<'k>(&mut self, database: u8, all: impl Iterator<Item = Expected<'k>>) -> usize {
        if let Shards::One(shard) = &mut self.shards {
            return shard.expect(database, all);
        }
        let ahead = Ahead::of(all, |key| self.store().place_key(database, key));
        let mut foreseen = self.home_mut().foreseen.take().unwrap_or_default();
        let heard = ahead.ask(database, &mut foreseen, self);
        self.home_mut().foreseen = Some(foreseen);
        heard
    }

    /// As [`Keyspace::expect`], of keys without fields.
    #[inline]
    pub fn expect_keys<'k>(&mut self, database: u8, keys: impl Iterator<Item = &'k [u8]>) -> usize {
        self.expect(database, keys.map(Expected::from))
    }

    /// The newest live entry of a key; see [`Shard::lookup`].
    ///
    /// Errors: [`KvError::WrongShard`], [`KvError::Database`].
    pub fn lookup(&mut self, database: u8, key: &[u8]) -> Result<Option<EntryRef>, KvError> {
        let hash = self.place_key(database, key).place;
        let owner = self.shard(self.store().owner_of(hash))?;
        let found = owner.lookup_at(database, hash, key);
        // A key found expired is deleted on the way, and that may move the open batch.
        self.spread_moves();
        found
    }

    /// As [`Keyspace::lookup`], but the key does not count as used; see [`Shard::peek`].
    ///
    /// Errors: as [`Keyspace::lookup`].
    pub fn peek(&mut self, database: u8, key: &[u8]) -> Result<Option<EntryRef>, KvError> {
        let found = self.owner(database, key)?.peek(database, key);
        self.spread_moves();
        found
    }

    /// Seconds since a key was used; see [`Shard::idle_seconds`].
    ///
    /// Errors: as [`Keyspace::lookup`].
    pub fn idle_seconds(&mut self, database: u8, key: &[u8]) -> Result<Option<u16>, KvError> {
        let idle = self.owner(database, key)?.idle_seconds(database, key);
        self.spread_moves();
        idle
    }

    /// Version of an absent key's deletion; see [`Shard::deletion`].
    ///
    /// Errors: as [`Keyspace::lookup`].
    pub fn deletion(&mut self, database: u8, key: &[u8]) -> Result<Version, KvError> {
        self.owner(database, key)?.deletion(database, key)
    }

    /// Lends the value to `reader`; see [`Shard::with_value`].
    ///
    /// Errors: [`KvError::Damaged`].
    pub fn with_value<R>(
        &mut self,
        entry: &EntryRef,
        reader: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, KvError> {
        self.home_mut().with_value(entry, reader)
    }

    /// Puts the value into `out`; see [`Shard::read_value`].
    ///
    /// Errors: [`KvError::Damaged`].
    pub fn read_value(&mut self, entry: &EntryRef, out: &mut Vec<u8>) -> Result<(), KvError> {
        self.home_mut().read_value(entry, out)
    }

    /// Home and owner of a key, apart; `None` for the owner when they are one.
    pub(crate) fn home_and_owner(
        &mut self,
        hash: u64,
    ) -> Result<(&mut Shard, Option<&mut Shard>), KvError> {
        let needed = self.store().owner_of(hash);
        match &mut self.shards {
            Shards::One(shard) if shard.index() == needed => Ok((shard, None)),
            Shards::One(_) => Err(KvError::WrongShard { needed }),
            Shards::Many { shards, home } => {
                let owner = shards
                    .iter()
                    .position(|shard| shard.index() == needed)
                    .ok_or(KvError::WrongShard { needed })?;
                if owner == *home {
                    return Ok((shards[owner], None));
                }
                let Ok([home, owner]) = shards.get_disjoint_mut([*home, owner]) else {
                    return Err(KvError::WrongShard { needed });
                };
                Ok((home, Some(owner)))
            }
        }
    }

    /// Entries of an open batch that moved: each index owner is told.
    pub(crate) fn spread_moves(&mut self) {
        if !self.home().has_moves() {
            return;
        }
        for moved in self.home_mut().take_moves() {
            if let Ok(owner) = self.shard(moved.shard as usize) {
                owner.apply_move(&moved);
            }
        }
    }

    /// Stores a value; see [`Shard::put`].
    ///
    /// Errors: as [`Shard::put`], and [`KvError::WrongShard`].
    pub fn put(
        &mut self,
        database: u8,
        key: &[u8],
        value: &[&[u8]],
        options: PutOptions,
    ) -> Result<Version, KvError> {
        Shard::check_database(database)?;
        let place = self.place_key(database, key);
        let stored = self.put_at(u32::from(database), place, key, value, options)?;
        Ok(stored.version)
    }

    /// As [`Keyspace::put`], in any namespace and where the place is known.
    pub(crate) fn put_at(
        &mut self,
        namespace: u32,
        placed: Placed,
        key: &[u8],
        value: &[&[u8]],
        options: PutOptions,
    ) -> Result<Stored, KvError> {
        let hash = placed.place;
        if let Shards::One(shard) = &mut self.shards {
            let needed = shard.store().owner_of(hash);
            if needed != shard.index() {
                return Err(KvError::WrongShard { needed });
            }
            return shard.put_placed(namespace, placed, key, value, options);
        }
        self.check_all_writable()?;
        let (home, owner) = self.home_and_owner(hash)?;
        let Some(owner) = owner else {
            let put = self.put_at_home(namespace, hash, key, value, options)?;
            self.effects.put(namespace, key, value, options);
            return Ok(put);
        };
        let mut room = home.take_reserved();
        let admitted =
            owner.admit(namespace, key.len(), value.iter().map(|part| part.len()).sum(), &mut room);
        home.put_back_reserved(room);
        admitted?;
        let appended = home.append_put(namespace, hash, key, value, options)?;
        self.spread_moves();
        let owner = self.shard(self.store().owner_of(hash))?;
        owner.note_expiry(options.expires_at_ms);
        let new = owner.install(namespace, hash, key, &appended);
        owner.lean(true);
        self.effects.put(namespace, key, value, options);
        Ok(Stored { version: appended.version, new })
    }

    /// As [`Shard::put`], for a home whose batch may hold keys of other shards.
    fn put_at_home(
        &mut self,
        namespace: u32,
        hash: u64,
        key: &[u8],
        value: &[&[u8]],
        options: PutOptions,
    ) -> Result<Stored, KvError> {
        let home = self.home_mut();
        let length = value.iter().map(|part| part.len()).sum();
        let admitted = home.admit_own(namespace, key.len(), length);
        let appended =
            admitted.and_then(|()| home.append_put(namespace, hash, key, value, options));
        // Also where it failed: room may have been made by moving the batch.
        self.spread_moves();
        let appended = appended?;
        let new = self.home_mut().install(namespace, hash, key, &appended);
        Ok(Stored { version: appended.version, new })
    }

    /// Deletes a key; see [`Shard::delete`].
    ///
    /// Errors: as [`Shard::delete`], and [`KvError::WrongShard`].
    pub fn delete(&mut self, database: u8, key: &[u8]) -> Result<bool, KvError> {
        Shard::check_database(database)?;
        self.delete_at(u32::from(database), key)
    }

    /// As [`Keyspace::delete`], in any namespace.
    pub(crate) fn delete_at(&mut self, namespace: u32, key: &[u8]) -> Result<bool, KvError> {
        let hash = self.store().place(namespace, key);
        let owner = self.store().owner_of(hash);
        if matches!(self.shards, Shards::One(_)) {
            return self.shard(owner)?.delete_in(namespace, key);
        }
        self.check_all_writable()?;
        let in_batch = self.home().in_batch();
        let existed = self.shard(owner)?.exists(namespace, hash, key, in_batch);
        // A key found expired is deleted on the way, and that may move the open batch.
        self.spread_moves();
        if !existed && !self.shard(owner)?.may_come_back(namespace, hash, key, in_batch) {
            return Ok(false);
        }
        let appended = self.home_mut().append_tombstone(namespace, key)?;
        self.spread_moves();
        let home = self.home().index();
        let shard = self.shard(owner)?;
        shard.install(namespace, hash, key, &appended);
        if owner != home {
            shard.lean(true);
        }
        if existed {
            self.effects.delete(namespace, key);
        }
        Ok(existed)
    }

    /// Sets or removes the expiry of a key; see [`Shard::set_expiry`] and [`Keyspace::change_expiry`].
    ///
    /// Errors: as [`Keyspace::put`].
    pub fn set_expiry(
        &mut self,
        database: u8,
        key: &[u8],
        expires_at_ms: u64,
    ) -> Result<bool, KvError> {
        let Some(entry) = self.lookup(database, key)? else { return Ok(false) };
        if expires_at_ms != 0 && expires_at_ms <= self.now_ms() {
            return self.delete(database, key);
        }
        self.change_expiry(database, key, &entry, expires_at_ms)?;
        Ok(true)
    }

    /// Opens an atomic batch in the home shard's log; see [`Shard::begin_batch`].
    pub fn begin_batch(&mut self) {
        self.home_mut().begin_batch();
    }

    /// Makes room for entries with these lengths of key and value in the open batch, so that none
    /// of them is refused once another was stored.
    ///
    /// Errors: limits, [`KvError::BatchTooLarge`], [`KvError::MemoryLimit`],
    /// [`KvError::PoolFull`], the pool's. No entry was stored then.
    pub fn reserve(
        &mut self,
        entries: impl Iterator<Item = (usize, usize)>,
    ) -> Result<(), KvError> {
        let mut bytes = 0;
        for (key_length, value_length) in entries {
            if key_length > crate::entry::KEY_LIMIT {
                let (length, limit) = (key_length, crate::entry::KEY_LIMIT);
                return Err(KvError::KeyTooLong { length, limit });
            }
            let limit = self.store().value_limit(key_length);
            if value_length > limit {
                return Err(KvError::ValueTooLong { length: value_length, limit });
            }
            bytes += crate::entry::slot_bytes_for(key_length, value_length);
        }
        self.reserve_bytes(bytes)
    }

    /// As [`Keyspace::reserve`], for entries of `bytes` in all, lengths of slots
    /// ([`crate::entry::slot_bytes_for`]). May be called before the batch begins.
    ///
    /// Errors: as [`Keyspace::reserve`].
    pub fn reserve_bytes(&mut self, bytes: u64) -> Result<(), KvError> {
        self.reserve_batch(bytes, 0, false)
    }

    /// As [`Keyspace::reserve_bytes`], for a batch of deletions and of small entries that go with
    /// them: it may use the room kept for deletions, and the memory limit does not concern it. It
    /// has to leave fewer live bytes behind than there were, or deletions end up without room.
    ///
    /// Errors: [`KvError::BatchTooLarge`], [`KvError::PoolFull`] when not even that room is left,
    /// the pool's.
    pub fn reserve_removal(&mut self, bytes: u64) -> Result<(), KvError> {
        self.reserve_batch(bytes, 0, true)
    }

    /// As [`Keyspace::reserve_bytes`], with bytes of tombstones; see [`Shard::reserve`].
    pub(crate) fn reserve_batch(
        &mut self,
        puts: u64,
        deletions: u64,
        shrinks: bool,
    ) -> Result<(), KvError> {
        self.check_all_writable()?;
        let reserved = self.home_mut().reserve(puts, deletions, shrinks);
        self.reserved(reserved)
    }

    /// As [`Keyspace::reserve_bytes`], for the mark of a row that ended: the memory limit does not concern it,
    /// and it may use the room that is kept for marks.
    pub(crate) fn reserve_mark(&mut self, bytes: u64) -> Result<(), KvError> {
        self.check_all_writable()?;
        let reserved = self.home_mut().reserve_for(bytes, 0, Need::Mark);
        self.reserved(reserved)
    }

    fn reserved(&mut self, reserved: Result<(), KvError>) -> Result<(), KvError> {
        // A batch that had begun may have moved.
        if matches!(self.shards, Shards::One(_)) {
            self.home_mut().install_moves();
        } else {
            self.spread_moves();
        }
        reserved
    }

    /// Gives it up; see [`Shard::abandon_batch`]. So does every locked shard with something that was
    /// not persisted: its keys may lie in the batch.
    pub fn abandon_batch(&mut self) {
        self.home_mut().abandon_batch();
        self.shards_mut().for_each(Shard::poison_uncommitted);
    }

    /// A write that joins several shards is refused before its first entry where one of them takes
    /// nothing any more: it could not be committed.
    fn check_all_writable(&self) -> Result<(), KvError> {
        match &self.shards {
            Shards::One(shard) => shard.check_writable(),
            Shards::Many { shards, .. } => {
                shards.iter().try_for_each(|shard| shard.check_writable())
            }
        }
    }

    /// Closes it; see [`Shard::end_batch`].
    pub fn end_batch(&mut self) {
        self.spread_moves();
        self.home_mut().end_batch();
    }

    /// Persists what every locked shard stored; see [`Shard::commit`]. The home shard comes last:
    /// its batch may rest on what the others stored before, and must not survive it. Where one of
    /// them fails, none that has something to persist does so any more, nor one with keys whose newest
    /// entries lie in the home shard's log: a later commit of the home shard would make half of a
    /// refused command durable, and a reader would see what a restart takes back. A shard that had
    /// failed before it was locked here has no part in a command, and takes no other down.
    ///
    /// Errors: as [`Shard::commit`].
    pub fn commit(&mut self) -> Result<(), KvError> {
        let home = self.home().index();
        let mut committed =
            self.shards_mut().filter(|shard| shard.index() != home).try_for_each(Shard::commit);
        if committed.is_ok() {
            committed = self.home_mut().commit();
        }
        match &committed {
            Ok(()) => self.shards_mut().for_each(|shard| {
                shard.lean(false);
                shard.appends_in = shard.appends_in.filter(|log| *log != home);
            }),
            Err(_) if !self.failed => self.shards_mut().for_each(Shard::poison_uncommitted),
            Err(_) => {}
        }
        committed
    }

    /// Live keys of a database in the locked shards.
    #[must_use]
    pub fn len(&self, database: u8) -> u64 {
        match &self.shards {
            Shards::One(shard) => shard.len(database),
            Shards::Many { shards, .. } => shards.iter().map(|shard| shard.len(database)).sum(),
        }
    }

    /// As [`Keyspace::len`], of any namespace.
    pub(crate) fn len_at(&self, namespace: u32) -> u64 {
        match &self.shards {
            Shards::One(shard) => shard.len_in(namespace),
            Shards::Many { shards, .. } => shards.iter().map(|shard| shard.len_in(namespace)).sum(),
        }
    }

    /// True when the locked shards hold no key of the database.
    #[must_use]
    pub fn is_empty(&self, database: u8) -> bool {
        self.len(database) == 0
    }

    /// Index of the shard that a scan cursor continues in; lock it before [`Keyspace::scan`].
    #[must_use]
    pub fn shard_of_cursor(cursor: u64) -> usize {
        (cursor >> POSITION_BITS) as usize
    }

    /// Visits at least `count` keys (fewer near the end of a shard) from `cursor` on, 0 = the
    /// start, and returns the cursor to go on with, 0 = done. A cursor names one shard
    /// ([`Keyspace::shard_of_cursor`]); a key that is there throughout is met exactly once.
    ///
    /// Errors: [`KvError::WrongShard`] when the cursor's shard is not locked (a cursor that no
    /// scan returned ends the scan), [`KvError::Database`].
    pub fn scan(
        &mut self,
        database: u8,
        cursor: u64,
        count: usize,
        visit: impl FnMut(&[u8], u8),
    ) -> Result<u64, KvError> {
        let index = Self::shard_of_cursor(cursor);
        if index >= self.store().shards() {
            return Ok(0);
        }
        let position = cursor & ((1 << POSITION_BITS) - 1);
        let next = self.shard(index)?.scan(database, position, count, visit)?;
        Ok(match next {
            Some(position) => (index as u64) << POSITION_BITS | position,
            None if index + 1 < self.store().shards() => (index as u64 + 1) << POSITION_BITS,
            None => 0,
        })
    }

    /// Puts some key of the database into `out`; false when the locked shards hold none.
    ///
    /// Errors: [`KvError::Database`].
    pub fn random_key(&mut self, database: u8, out: &mut Vec<u8>) -> Result<bool, KvError> {
        let total = self.len(database);
        if total == 0 {
            return Ok(false);
        }
        let mut ticket = self.home_mut().random.next() % total;
        let mut found = Ok(false);
        for shard in self.shards_mut() {
            let length = shard.len(database);
            if ticket < length {
                found = shard.random_key(database, out);
                break;
            }
            ticket -= length;
        }
        // Keys found expired were deleted on the way.
        self.spread_moves();
        found
    }

    pub(crate) fn needs_all(&self) -> Result<(), KvError> {
        if self.is_whole() {
            return Ok(());
        }
        let (needed, given) = (self.store().shards(), self.locked());
        Err(KvError::NeedsAllShards { needed, given })
    }

    /// Removes every key of one database, or of all, at once and for good when it returns.
    ///
    /// Errors: [`KvError::NeedsAllShards`], the pool's.
    pub fn flush(&mut self, database: Option<u8>) -> Result<(), KvError> {
        if let Some(database) = database
            && u16::from(database) >= crate::DATABASES
        {
            let (database, limit) = (u16::from(database), crate::DATABASES);
            return Err(KvError::Database { database, limit });
        }
        self.needs_all()?;
        self.store().raise_barrier(database)?;
        for shard in self.shards_mut() {
            for candidate in 0..crate::DATABASES as u8 {
                if database.is_none_or(|database| database == candidate) {
                    shard.forget(u32::from(candidate));
                    shard.forget(crate::rows::fields_of(u32::from(candidate)));
                    shard.forget(crate::expiries::expiries_of(u32::from(candidate)));
                }
            }
        }
        Ok(())
    }
}
