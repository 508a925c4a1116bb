//! Namespaces as services use them: keys by number of namespace, rows, ranges in order.
//!
//! A key of a namespace by row is stored as `length of the row u16 (big-endian) | row | sub-key`, so
//! that no two pairs of row and sub-key look alike, and the sub-keys of a row lie side by side in
//! the order of their bytes. The top bit of the number in an entry says that keys are made so.

use std::borrow::Cow;
use std::ops::{Bound, ControlFlow};

use beeline_env::FaultPoint;

use crate::entry::KEY_LIMIT;
use crate::ordered::Keys;
use crate::shard::{EntryRef, PutOptions, Shard};
use crate::store::Store;
use crate::{Keyspace, KvError, Version};

/// Fails as a medium does in the middle of a batch.
static BEFORE_CHANGE: FaultPoint = FaultPoint::new("kv.apply.before_change");

/// Services' namespaces have this number or a larger one, below 2^31; smaller ones are the store's.
pub const FIRST_NAMESPACE: u32 = 256;
/// Bit of a namespace's number, as entries have it, where keys lie by row.
pub(crate) const IN_ROWS: u32 = 1 << 31;

/// What a namespace is; fixed when it is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NamespaceOptions {
    /// A key is (row, sub-key), and all of a row lies in one shard.
    pub by_row: bool,
    /// Keys can be visited in the order of their bytes: [`Keyspace::range`].
    pub ordered: bool,
    /// A key put without an expiry expires this long after its put, in milliseconds; 0: never.
    pub time_to_live_ms: u64,
    /// It holds streams instead of keys ([`Keyspace::append_in`]): by row one for each row, else one.
    pub stream: bool,
    /// Of streams: with its appends a stream is cut off in front so that this many bytes are kept, and less
    /// than a segment more; 0: it keeps all until a caller cuts it off.
    pub keep_bytes: u64,
    /// Of a namespace by row: it is known of each row how many keys it has and when it ends
    /// ([`Keyspace::row_state`], [`Keyspace::expire_row`]). Takes memory for each row.
    pub row_records: bool,
    /// A row ends this long after its first key was put into it, in milliseconds, with all its keys; 0: never.
    /// Needs `row_records`.
    pub row_time_to_live_ms: u64,
}

/// A key of a namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key<'k> {
    /// The row; empty in a namespace whose keys have none.
    pub row: &'k [u8],
    /// The key, or the sub-key within the row.
    pub name: &'k [u8],
}

impl<'k> From<&'k [u8]> for Key<'k> {
    fn from(name: &'k [u8]) -> Self {
        Self { row: &[], name }
    }
}

impl<'k, const N: usize> From<&'k [u8; N]> for Key<'k> {
    fn from(name: &'k [u8; N]) -> Self {
        Self { row: &[], name }
    }
}

impl<'k> From<&'k Vec<u8>> for Key<'k> {
    fn from(name: &'k Vec<u8>) -> Self {
        Self { row: &[], name }
    }
}

impl<'k> From<(&'k [u8], &'k [u8])> for Key<'k> {
    fn from((row, name): (&'k [u8], &'k [u8])) -> Self {
        Self { row, name }
    }
}

/// Which keys to visit, and from which end.
#[derive(Clone, Copy, Debug)]
pub struct Range<'r> {
    /// The row, in a namespace by row.
    pub row: &'r [u8],
    /// Least key.
    pub from: Bound<&'r [u8]>,
    /// Greatest key.
    pub to: Bound<&'r [u8]>,
    /// From the greatest key down.
    pub backward: bool,
}

impl Range<'_> {
    /// Every key (of the row without a name), from the least on.
    pub const ALL: Self =
        Self { row: &[], from: Bound::Unbounded, to: Bound::Unbounded, backward: false };
}

/// One write of [`Keyspace::apply`].
#[derive(Clone, Copy, Debug)]
pub struct Write<'w> {
    /// Number of the namespace.
    pub namespace: u32,
    /// Its key.
    pub key: Key<'w>,
    /// What has to be so, before any write of the batch.
    pub condition: Condition,
    /// What happens then.
    pub change: Change<'w>,
}

/// A condition on the key as it is before the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Condition {
    /// None.
    #[default]
    None,
    /// There is no such key.
    Absent,
    /// There is one.
    Present,
    /// Its newest entry has this version.
    Version(Version),
}

/// What a write does.
#[derive(Clone, Copy, Debug)]
pub enum Change<'w> {
    /// Stores a value, the parts in a row.
    Put {
        /// The value.
        value: &'w [&'w [u8]],
        /// How to store it.
        options: PutOptions,
    },
    /// Deletes the key.
    Delete,
    /// Appends a value, the parts in a row, to the stream of the key's row. The batch then answers its
    /// position instead of a version, and [`Condition::Version`] means the position.
    Append {
        /// The value.
        value: &'w [&'w [u8]],
    },
    /// Leaves the key as it is: only the condition matters.
    Keep,
}

/// What became of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applied {
    /// All writes took effect. The version that each key has now; 0 for an absent one. Of an append
    /// its position.
    Done(Vec<Version>),
    /// A condition did not hold, and nothing changed.
    Refused {
        /// The first write whose condition failed, counted from 0.
        write: usize,
        /// Version of the key, if there is one.
        found: Option<Version>,
    },
}

/// What a namespace that is not there is told by.
#[cold]
pub(crate) fn unknown(tagged: u32) -> KvError {
    KvError::Namespace { number: tagged & !IN_ROWS }
}

/// What a caller is told that takes streams for keys.
#[cold]
fn holds_streams(number: u32) -> KvError {
    KvError::NamespaceKind { number, reason: "holds streams, not keys" }
}

/// The row of a stored key; of one that is cut short, what there is.
#[inline]
pub(crate) fn row_of(key: &[u8]) -> &[u8] {
    let Some((length, rest)) = key.split_first_chunk::<2>() else { return key };
    &rest[..usize::from(u16::from_be_bytes(*length)).min(rest.len())]
}

/// A namespace, looked up once for a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    /// As entries have it.
    pub tagged: u32,
    pub options: NamespaceOptions,
}

impl Space {
    /// The key as entries have it.
    pub(crate) fn stored<'k>(&self, key: Key<'k>) -> Result<Cow<'k, [u8]>, KvError> {
        let number = self.tagged & !IN_ROWS;
        if !self.options.by_row {
            if !key.row.is_empty() {
                let reason = "has no rows";
                return Err(KvError::NamespaceKind { number, reason });
            }
            return Ok(Cow::Borrowed(key.name));
        }
        let length = 2 + key.row.len() + key.name.len();
        if length > KEY_LIMIT {
            return Err(KvError::KeyTooLong { length, limit: KEY_LIMIT });
        }
        let mut stored = Vec::with_capacity(length);
        stored.extend_from_slice(&(key.row.len() as u16).to_be_bytes());
        stored.extend_from_slice(key.row);
        stored.extend_from_slice(key.name);
        Ok(Cow::Owned(stored))
    }

    /// Bytes before the name in a stored key.
    fn name_start(&self, row: &[u8]) -> usize {
        if self.options.by_row { 2 + row.len() } else { 0 }
    }
}

impl Store {
    /// What a namespace is; `None`: nobody created it. The sixteen databases are namespaces 0 to
    /// 15, by key and without an order.
    #[must_use]
    pub fn namespace(&self, number: u32) -> Option<NamespaceOptions> {
        self.space(number).ok().map(|space| space.options)
    }

    /// Services' namespaces in order of number.
    #[must_use]
    pub fn namespaces(&self) -> Vec<(u32, NamespaceOptions)> {
        let all = self.catalog.all().into_iter();
        all.map(|(number, known)| (number, known.options)).collect()
    }

    /// Index of the shard that a key, or all of its row, belongs to: the one to lock.
    ///
    /// Errors: [`KvError::Namespace`], [`KvError::NamespaceKind`], [`KvError::KeyTooLong`].
    pub fn shard_in<'k>(&self, number: u32, key: impl Into<Key<'k>>) -> Result<usize, KvError> {
        let space = self.space(number)?;
        Ok(self.shard_for(space.tagged, &space.stored(key.into())?))
    }

    fn space(&self, number: u32) -> Result<Space, KvError> {
        if number < u32::from(crate::DATABASES) {
            return Ok(Space { tagged: number, options: NamespaceOptions::default() });
        }
        let known = self.catalog.get(number).ok_or(KvError::Namespace { number })?;
        Ok(Space { tagged: known.tagged, options: known.options })
    }
}

/// Keys taken from a shard's order at once, at first and at most.
const CHUNK: (usize, usize) = (16, 256);

/// The next keys of one shard.
struct Run {
    shard: usize,
    keys: Keys,
    at: usize,
    limit: usize,
    last: bool,
}

impl Keyspace<'_> {
    pub(crate) fn space(&self, number: u32) -> Result<Space, KvError> {
        self.store().space(number)
    }

    /// A namespace that holds keys.
    pub(crate) fn keyed(&self, number: u32) -> Result<Space, KvError> {
        let space = self.space(number)?;
        if space.options.stream {
            return Err(holds_streams(number));
        }
        Ok(space)
    }

    /// The newest live entry of a key; its value is read with [`Keyspace::read_value`] or
    /// [`Keyspace::with_value`]. A key found expired is deleted on the way.
    ///
    /// Errors: [`KvError::Namespace`], [`KvError::NamespaceKind`], [`KvError::WrongShard`].
    pub fn get_in<'k>(
        &mut self,
        number: u32,
        key: impl Into<Key<'k>>,
    ) -> Result<Option<EntryRef>, KvError> {
        let space = self.keyed(number)?;
        let key = space.stored(key.into())?;
        let hash = self.store().place(space.tagged, &key);
        let owner = self.store().owner_of(hash);
        let found = self.shard(owner)?.lookup_hashed(space.tagged, hash, &key);
        self.spread_moves();
        Ok(found)
    }

    /// Stores a value. Within a batch, as a part of it. Persisted by [`Keyspace::commit`].
    ///
    /// Errors: as [`Keyspace::put`]; [`KvError::Namespace`], [`KvError::NamespaceKind`].
    pub fn put_in<'k>(
        &mut self,
        number: u32,
        key: impl Into<Key<'k>>,
        value: &[&[u8]],
        options: PutOptions,
    ) -> Result<Version, KvError> {
        let space = self.keyed(number)?;
        let key = key.into();
        let row = key.row;
        let key = space.stored(key)?;
        let options = self.with_life(&space, options);
        if space.options.row_records {
            return Ok(self.put_in_row((&space, number), row, &key, value, options)?.version);
        }
        let hash = self.store().place(space.tagged, &key);
        Ok(self.put_at(space.tagged, hash.into(), &key, value, options)?.version)
    }

    fn with_life(&self, space: &Space, options: PutOptions) -> PutOptions {
        if options.expires_at_ms != 0 || space.options.time_to_live_ms == 0 {
            return options;
        }
        let expires_at_ms = self.now_ms().saturating_add(space.options.time_to_live_ms);
        PutOptions { expires_at_ms, ..options }
    }

    /// Deletes a key; false when there was none. Persisted by [`Keyspace::commit`].
    ///
    /// Errors: as [`Keyspace::delete`]; [`KvError::Namespace`], [`KvError::NamespaceKind`].
    pub fn delete_in<'k>(&mut self, number: u32, key: impl Into<Key<'k>>) -> Result<bool, KvError> {
        let space = self.keyed(number)?;
        let key = space.stored(key.into())?;
        self.delete_at(space.tagged, &key)
    }

    /// Live keys of a namespace in the locked shards; keys past their time count until they are
    /// met.
    ///
    /// Errors: [`KvError::Namespace`].
    pub fn len_in(&self, number: u32) -> Result<u64, KvError> {
        Ok(self.len_at(self.space(number)?.tagged))
    }

    /// Calls `visit` with key, entry and value of each key in the range, in order, until it breaks.
    /// In a namespace by row the key is the sub-key, and the row's shard has to be locked; else
    /// all shards have to be, or only the locked ones' keys are met.
    ///
    /// A visit does not count as use. To go on later, begin behind the last key met
    /// ([`Bound::Excluded`]): a key that is there throughout is met exactly once.
    ///
    /// Errors: [`KvError::Namespace`], [`KvError::NamespaceKind`] for one without an order,
    /// [`KvError::WrongShard`], [`KvError::Damaged`].
    pub fn range(
        &mut self,
        number: u32,
        range: &Range<'_>,
        mut visit: impl FnMut(&[u8], &EntryRef, &[u8]) -> ControlFlow<()>,
    ) -> Result<(), KvError> {
        let space = self.keyed(number)?;
        if !space.options.ordered {
            return Err(KvError::NamespaceKind { number, reason: "is not ordered" });
        }
        let (mut from, mut to) = stored_bounds(&space, range)?;
        let name_start = space.name_start(range.row);
        let one = if space.options.by_row {
            let prefix = space.stored(Key { row: range.row, name: &[] })?;
            Some(self.store().shard_for(space.tagged, &prefix))
        } else {
            None
        };
        let now = self.now_ms();
        let mut runs: Vec<Run> = Vec::new();
        for shard in self.shards_mut() {
            if one.is_none_or(|one| one == shard.index()) {
                let shard = shard.index();
                let (keys, limit) = (Keys::default(), CHUNK.0);
                runs.push(Run { shard, keys, at: 0, limit, last: false });
            }
        }
        if let Some(needed) = one
            && runs.is_empty()
        {
            return Err(KvError::WrongShard { needed });
        }
        loop {
            for run in &mut runs {
                let shard = self.shard(run.shard)?;
                run.fill(shard, space.tagged, (&mut from, &mut to), range.backward);
            }
            // What this shard has next comes next in all: every run shows its next key.
            let better =
                |one: &[u8], other: &[u8]| if range.backward { one > other } else { one < other };
            let mut best: Option<usize> = None;
            for (at, run) in runs.iter().enumerate() {
                let Some(key) = run.next() else { continue };
                if best.and_then(|best| runs[best].next()).is_none_or(|known| better(key, known)) {
                    best = Some(at);
                }
            }
            let Some(best) = best else { return Ok(()) };
            let run = &mut runs[best];
            let key = run.keys.get(run.at);
            run.at += 1;
            let shard = self.shard(run.shard)?;
            let hash = shard.store().place(space.tagged, key);
            // Not found: its bytes were lost to damage.
            let entry = shard.find(space.tagged, hash, key);
            let entry = entry.and_then(|id| shard.live_entry(space.tagged, id));
            let alive = |entry: &EntryRef| entry.expires_at_ms == 0 || entry.expires_at_ms > now;
            let Some(entry) = entry.filter(alive) else { continue };
            let name = &key[name_start..];
            if shard.with_value(&entry, |value| visit(name, &entry, value))?.is_break() {
                return Ok(());
            }
        }
    }

    /// Checks all conditions, and then either makes all changes or none, also in a crash. Within a
    /// batch that is open, the changes join it. Persisted by [`Keyspace::commit`].
    ///
    /// Conditions are about the keys as they are before the first change.
    ///
    /// Errors: as [`Keyspace::put`] and [`Keyspace::delete`]; [`KvError::Namespace`],
    /// [`KvError::NamespaceKind`]. Nothing changed then. Where the pool failed between two changes,
    /// the shards take nothing any more ([`KvError::Poisoned`]), and no opening finds a part.
    pub fn apply(&mut self, writes: &[Write<'_>]) -> Result<Applied, KvError> {
        let mut looked = match self.look(writes)? {
            Ok(looked) => looked,
            Err(refused) => return Ok(refused),
        };
        if self.fit_namespaces(&looked)? {
            // A key that a condition is about may be among those that were evicted.
            looked = match self.look(writes)? {
                Ok(looked) => looked,
                Err(refused) => return Ok(refused),
            };
        }
        for (this, (space, ..)) in writes.iter().zip(&looked.places) {
            if matches!(this.change, Change::Put { .. }) {
                self.end_past_row(space, this.namespace, this.key.row)?;
            }
        }
        let Looked { places, mut versions, puts, deletions, freed, appends, .. } = looked;
        // What is refused is refused before the first change.
        self.check_batch_limit(puts)?;
        // A deletion that is noted elsewhere, too, makes room as any deletion does.
        let shrinks = deletions > 0 && puts <= freed;
        let own = !self.home().in_batch();
        if let Some(owner) = appends {
            self.prefer_home(owner);
            return self.apply_appends(writes, places, versions, puts + deletions);
        }
        self.reserve_batch(puts, deletions, shrinks)?;
        if own {
            self.begin_batch();
        }
        let before = self.home().batch_entries();
        let mut outcome = Ok(());
        for ((this, place), version) in writes.iter().zip(&places).zip(&mut versions) {
            match self.change(this, place, *version) {
                Ok(changed) => *version = changed,
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        if outcome.is_err() && self.home().batch_entries() > before {
            // What was reserved was refused all the same: the pool failed. Half of the changes must
            // not become durable, and they cannot be taken back in memory.
            self.abandon_batch();
        }
        if own {
            self.end_batch();
        }
        outcome.map(|()| Applied::Done(versions))
    }

    /// [`Keyspace::apply`] where streams take part, in their chain. It has looked at everything.
    fn apply_appends(
        &mut self,
        writes: &[Write<'_>],
        places: Vec<(Space, Cow<'_, [u8]>, u64)>,
        mut versions: Vec<Version>,
        bytes: u64,
    ) -> Result<Applied, KvError> {
        let mut outcome = Ok(());
        self.in_appends_batch(bytes, false, |keys| {
            for ((this, place), version) in writes.iter().zip(&places).zip(&mut versions) {
                match keys.change(this, place, *version) {
                    Ok(changed) => *version = changed,
                    Err(error) => {
                        outcome = Err(error);
                        return false;
                    }
                }
            }
            true
        })?;
        outcome.map(|()| Applied::Done(versions))
    }

    /// Makes one change of a batch; the version or position that the key has then.
    fn change(
        &mut self,
        this: &Write<'_>,
        (space, key, hash): &(Space, Cow<'_, [u8]>, u64),
        before: Version,
    ) -> Result<Version, KvError> {
        BEFORE_CHANGE
            .check()
            .map_err(|fault| KvError::Io { path: "the pool".into(), source: fault.into() })?;
        match this.change {
            Change::Put { value, options } => {
                let options = self.with_life(space, options);
                self.begin_row(space, this.key.row)?;
                Ok(self.put_at(space.tagged, (*hash).into(), key, value, options)?.version)
            }
            Change::Delete => self.delete_at(space.tagged, key).map(|_| 0),
            Change::Append { value } => {
                let place = self.stream_place(this.namespace, this.key.row)?;
                let added =
                    place.entry_bytes(std::iter::once(value.iter().map(|part| part.len()).sum()));
                self.append_at(&place, value, added)
            }
            Change::Keep => Ok(before),
        }
    }

    /// Looks at the conditions and lengths of a batch: what a write was refused for, if one was.
    fn look<'w>(&mut self, writes: &[Write<'w>]) -> Result<Result<Looked<'w>, Applied>, KvError> {
        let mut looked = Looked::default();
        looked.places.reserve(writes.len());
        looked.versions.reserve(writes.len());
        // The lines of the index are asked for before the first of them is looked at: they arrive together.
        for this in writes {
            let space = self.space(this.namespace)?;
            let key = space.stored(this.key)?;
            let hash = match this.change {
                // An entry of a stream is found by the stream's place.
                Change::Append { .. } => 0,
                _ => self.store().place(space.tagged, &key),
            };
            if writes.len() > 1 && !matches!(this.change, Change::Append { .. }) {
                let owner = self.store().owner_of(hash);
                if let Ok(shard) = self.shard(owner) {
                    shard.prefetch(space.tagged, hash);
                }
            }
            looked.places.push((space, key, hash));
        }
        for (write, this) in writes.iter().enumerate() {
            if let Change::Append { value } = this.change {
                if let Some(refused) = self.look_at_append(write, this, value, &mut looked)? {
                    return Ok(Err(refused));
                }
                continue;
            }
            let (space, key, hash) = &looked.places[write];
            let (space, hash) = (*space, *hash);
            if space.options.stream {
                return Err(holds_streams(this.namespace));
            }
            let owner = self.store().owner_of(hash);
            let found = self.shard(owner)?.peek_placed(space.tagged, hash, key);
            self.spread_moves();
            let replaced = found.map_or(0, |(_, entry)| u64::from(entry.slot_bytes));
            let found = found.map(|(_, entry)| entry.version);
            let holds = match this.condition {
                Condition::None => true,
                Condition::Absent => found.is_none(),
                Condition::Present => found.is_some(),
                Condition::Version(version) => found == Some(version),
            };
            if !holds {
                return Ok(Err(Applied::Refused { write, found }));
            }
            match this.change {
                Change::Put { value, .. } => {
                    let length = value.iter().map(|part| part.len()).sum();
                    let bytes = self.check_put(key, length)?;
                    looked.puts += bytes;
                    looked.freed += replaced;
                    let begins = (this.namespace, this.key.row);
                    if space.options.row_time_to_live_ms != 0 && looked.begins != Some(begins) {
                        looked.puts += self.time_bytes(&space, this.key.row)?;
                        looked.begins = Some(begins);
                    }
                    looked.add(space.tagged, owner, bytes.cast_signed() - replaced.cast_signed());
                }
                Change::Delete => {
                    looked.deletions += crate::entry::slot_bytes_for(key.len(), 0);
                    looked.add(space.tagged, owner, -replaced.cast_signed());
                    looked.freed += replaced;
                }
                Change::Append { .. } | Change::Keep => {}
            }
            looked.versions.push(found.unwrap_or(0));
        }
        Ok(Ok(looked))
    }

    /// As [`Keyspace::look`], at one append; what it is refused for.
    fn look_at_append<'w>(
        &mut self,
        write: usize,
        this: &Write<'w>,
        value: &[&[u8]],
        looked: &mut Looked<'w>,
    ) -> Result<Option<Applied>, KvError> {
        if !this.key.name.is_empty() {
            let (number, reason) = (this.namespace, "holds streams: its entries have positions");
            return Err(KvError::NamespaceKind { number, reason });
        }
        let place = self.stream_place(this.namespace, this.key.row)?;
        let found = place.ends().map(|ends| ends.next);
        let holds = match this.condition {
            Condition::None => true,
            Condition::Absent => found.is_none(),
            Condition::Present => found.is_some(),
            Condition::Version(position) => found.unwrap_or(0) == position,
        };
        if !holds {
            return Ok(Some(Applied::Refused { write, found }));
        }
        let length = value.iter().map(|part| part.len()).sum();
        let bytes = self.check_appends(&place, std::iter::once(length))?;
        looked.puts += bytes;
        looked.add(place.tagged(), place.owner(), bytes.cast_signed());
        looked.appends.get_or_insert(place.owner());
        looked.versions.push(found.unwrap_or(0));
        looked.places[write].2 = self.store().place(place.tagged(), place.key());
        Ok(None)
    }

    /// Makes room under the limits of the namespaces that a batch puts into; true when a key was
    /// evicted for it.
    fn fit_namespaces(&mut self, looked: &Looked<'_>) -> Result<bool, KvError> {
        let mut evicted = false;
        for &(namespace, owner, bytes) in &looked.growth {
            let of_namespace = looked.growth.iter().filter(|growth| growth.0 == namespace);
            let together = of_namespace.map(|growth| growth.2).sum::<i64>();
            if together <= 0 {
                continue;
            }
            let shard = self.shard(owner)?;
            let before = shard.stats().evicted;
            let bytes = bytes.max(0).cast_unsigned();
            let fits = shard.fit_namespace(namespace, bytes, together.cast_unsigned());
            evicted |= shard.stats().evicted != before;
            // Evicting may have moved an open batch.
            self.spread_moves();
            fits?;
        }
        Ok(evicted)
    }

    /// Limits of one put; its slot's bytes.
    fn check_put(&self, key: &[u8], value_length: usize) -> Result<u64, KvError> {
        if key.len() > KEY_LIMIT {
            return Err(KvError::KeyTooLong { length: key.len(), limit: KEY_LIMIT });
        }
        let limit = self.store().value_limit(key.len());
        if value_length > limit {
            return Err(KvError::ValueTooLong { length: value_length, limit });
        }
        Ok(crate::entry::slot_bytes_for(key.len(), value_length))
    }
}

/// What [`Keyspace::apply`] found of its writes.
#[derive(Default)]
struct Looked<'w> {
    places: Vec<(Space, Cow<'w, [u8]>, u64)>,
    /// Of the keys as they are; 0: absent.
    versions: Vec<Version>,
    /// Bytes of puts and of tombstones, and of the entries that they supersede.
    puts: u64,
    deletions: u64,
    freed: u64,
    /// Shard of the first stream that is appended to.
    appends: Option<usize>,
    /// By how many bytes a service's namespace grows in a shard.
    growth: Vec<(u32, usize, i64)>,
    /// The row whose time was counted last.
    begins: Option<(u32, &'w [u8])>,
}

impl Looked<'_> {
    fn add(&mut self, namespace: u32, owner: usize, bytes: i64) {
        if namespace < FIRST_NAMESPACE {
            return;
        }
        let here = |known: &&mut (u32, usize, i64)| (known.0, known.1) == (namespace, owner);
        match self.growth.iter_mut().find(here) {
            Some(known) => known.2 += bytes,
            None => self.growth.push((namespace, owner, bytes)),
        }
    }
}

impl Run {
    fn next(&self) -> Option<&[u8]> {
        (self.at < self.keys.len()).then(|| self.keys.get(self.at))
    }

    /// Takes more keys where those taken are used up, from behind the last of them.
    fn fill(
        &mut self,
        shard: &Shard,
        namespace: u32,
        (from, to): (&mut Bound<Vec<u8>>, &mut Bound<Vec<u8>>),
        backward: bool,
    ) {
        if self.last || self.at < self.keys.len() {
            return;
        }
        let (mut first, mut end) = (as_slice(from), as_slice(to));
        let behind = self.keys.len().checked_sub(1).map(|last| self.keys.get(last).to_vec());
        if let Some(behind) = &behind {
            *(if backward { &mut end } else { &mut first }) = Bound::Excluded(behind);
            self.limit = (self.limit * 2).min(CHUNK.1);
        }
        shard.look_at_all();
        let ordered = shard.spaces.extra(namespace).and_then(|extra| extra.ordered.as_ref());
        self.at = 0;
        match ordered {
            Some(ordered) => ordered.collect((first, end), backward, self.limit, &mut self.keys),
            None => self.keys.clear(),
        }
        self.last = self.keys.len() < self.limit;
    }
}

fn as_slice(bound: &Bound<Vec<u8>>) -> Bound<&[u8]> {
    bound.as_ref().map(Vec::as_slice)
}

/// Least and greatest of stored keys.
type Bounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// The bounds of stored keys: within the row, where there are rows.
fn stored_bounds(space: &Space, range: &Range<'_>) -> Result<Bounds, KvError> {
    let stored = |name: &[u8]| space.stored(Key { row: range.row, name }).map(Cow::into_owned);
    let bound = |bound: Bound<&[u8]>| {
        Ok::<_, KvError>(match bound {
            Bound::Included(name) => Bound::Included(stored(name)?),
            Bound::Excluded(name) => Bound::Excluded(stored(name)?),
            Bound::Unbounded => Bound::Unbounded,
        })
    };
    let (mut from, mut to) = (bound(range.from)?, bound(range.to)?);
    if space.options.by_row {
        let prefix = stored(&[])?;
        if to == Bound::Unbounded {
            to = behind_prefix(&prefix).map_or(Bound::Unbounded, Bound::Excluded);
        }
        if from == Bound::Unbounded {
            from = Bound::Included(prefix);
        }
    }
    Ok((from, to))
}

/// The least key greater than all that begin with `prefix`; none where all of it is 255.
pub(crate) fn behind_prefix(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|byte| *byte != u8::MAX)?;
    let mut behind = prefix[..=last].to_vec();
    behind[last] += 1;
    Some(behind)
}
