//! Which namespaces there are: kept as entries of the system's namespace, one for each.
//!
//! ```text
//! key "namespace:" number u32 (big-endian) → format u8 | flags u8 (1 by row, 2 ordered, 4 streams,
//!                                            8 records of rows) |
//!                                            policy of eviction u8 | 5 zeros |
//!                                            time to live u64, ms; of streams bytes kept |
//!                                            since u64 | most bytes u64 | time to live of rows u64, ms
//! ```
//!
//! A record of format 1 ends before the most bytes, and has no policy: one without a limit is
//! written so, as builds before format 2 read it. One of format 2 ends before the time to live of rows, and
//! one of format 3 has records of rows.
//!
//! `since` is the version at which the namespace was created or cleared last: entries of it below
//! are dead, and so are all entries of a namespace that is not in the catalog. So a number can be
//! used again: what an earlier namespace left on media has smaller versions.
//!
//! The catalog may lie in any segment. Recovery holds the entries of services' namespaces back until
//! every segment was walked, 40 bytes each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::counted::Counted;
use crate::fault::{self, KnownBug};
use crate::options::Eviction;
use crate::ordered::Ordered;
use crate::row_ends::ROW_ENDS;
use crate::service_rows::ROW_TIMES;
use crate::shard::{Shard, read_header, read_key};
use crate::space::{FIRST_NAMESPACE, IN_ROWS, NamespaceOptions};
use crate::space_limit::{Account, NamespaceLimit};
use crate::store::{Store, code_of};
use crate::{INDEXES, Keyspace, KvError, SYSTEM_NAMESPACE, Version};

const PREFIX: &[u8] = b"namespace:";
const FORMAT: u8 = 1;
/// With a limit.
const LIMITED: u8 = 2;
/// With records of rows; with or without a limit.
const RECORDED: u8 = 3;
const BY_ROW: u8 = 1;
const ORDERED: u8 = 2;
const STREAM: u8 = 4;
const ROW_RECORDS: u8 = 8;
/// Of a record of the first format; a limit follows.
const RECORD_BYTES: usize = 24;
const LIMITED_BYTES: usize = 32;
const RECORDED_BYTES: usize = 40;

/// What the store knows of one namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    /// As entries have it: with [`IN_ROWS`].
    pub tagged: u32,
    pub options: NamespaceOptions,
    pub limit: NamespaceLimit,
    pub since: Version,
}

/// Namespaces of services, by the number that services know.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    known: RwLock<BTreeMap<u32, Known>>,
    accounts: RwLock<BTreeMap<u32, Arc<Account>>>,
    /// One of them holds streams.
    streams: AtomicBool,
    /// One of them has rows.
    rows: AtomicBool,
}

impl Catalog {
    pub fn get(&self, number: u32) -> Option<Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).get(&number).copied()
    }

    pub fn all(&self) -> Vec<(u32, Known)> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        known.iter().map(|(number, known)| (*number, *known)).collect()
    }

    /// Entries of a namespace, as entries name it, below this version are dead.
    pub fn since(&self, tagged: u32) -> Version {
        match self.get(tagged & !IN_ROWS) {
            Some(known) if known.tagged == tagged => known.since,
            _ => Version::MAX,
        }
    }

    pub fn clear(&self) {
        self.known.write().unwrap_or_else(PoisonError::into_inner).clear();
        self.streams.store(false, Ordering::Relaxed);
        self.rows.store(false, Ordering::Relaxed);
        self.accounts.write().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// What the shards hold of a namespace.
    pub fn account(&self, number: u32) -> Option<Arc<Account>> {
        self.accounts.read().unwrap_or_else(PoisonError::into_inner).get(&number).cloned()
    }

    fn set(&self, number: u32, known: Option<Known>, shards: usize) {
        {
            let mut accounts = self.accounts.write().unwrap_or_else(PoisonError::into_inner);
            match known {
                Some(known) => accounts
                    .entry(number)
                    .or_insert_with(|| Arc::new(Account::new(shards)))
                    .set_limit(known.limit),
                None => drop(accounts.remove(&number)),
            }
        }
        let mut all = self.known.write().unwrap_or_else(PoisonError::into_inner);
        match known {
            Some(known) => all.insert(number, known),
            None => all.remove(&number),
        };
        let streams = all.values().any(|known| known.options.stream);
        self.streams.store(streams, Ordering::Relaxed);
        let rows = all.values().any(|known| known.options.by_row && !known.options.stream);
        self.rows.store(rows, Ordering::Relaxed);
    }

    /// True where a namespace holds streams.
    pub fn has_streams(&self) -> bool {
        self.streams.load(Ordering::Relaxed)
    }

    /// True where rows of a service can end by marks.
    pub fn has_rows(&self) -> bool {
        self.rows.load(Ordering::Relaxed)
    }
}

fn record_key(number: u32) -> Vec<u8> {
    [PREFIX, &number.to_be_bytes()].concat()
}

fn encode(known: &Known) -> Vec<u8> {
    let recorded = known.options.row_records;
    let limited = recorded || known.limit != NamespaceLimit::default();
    let (format, length) = match (recorded, limited) {
        (true, _) => (RECORDED, RECORDED_BYTES),
        (_, true) => (LIMITED, LIMITED_BYTES),
        _ => (FORMAT, RECORD_BYTES),
    };
    let mut record = vec![0; length];
    record[0] = format;
    record[1] = if known.options.by_row { BY_ROW } else { 0 }
        | if known.options.ordered { ORDERED } else { 0 }
        | if known.options.stream { STREAM } else { 0 }
        | if recorded { ROW_RECORDS } else { 0 };
    record[2] = code_of(known.limit.eviction);
    let options = &known.options;
    let term = if options.stream { options.keep_bytes } else { options.time_to_live_ms };
    record[8..16].copy_from_slice(&term.to_le_bytes());
    record[16..24].copy_from_slice(&known.since.to_le_bytes());
    if limited {
        record[24..32].copy_from_slice(&known.limit.max_bytes.to_le_bytes());
    }
    if recorded {
        record[32..40].copy_from_slice(&options.row_time_to_live_ms.to_le_bytes());
    }
    record
}

/// Number and contents of a record; `None` where the key is that of something else.
pub(crate) fn decode(key: &[u8], record: &[u8]) -> Result<Option<(u32, Known)>, KvError> {
    let Some(number) = key.strip_prefix(PREFIX).and_then(|number| number.try_into().ok()) else {
        return Ok(None);
    };
    let number = u32::from_be_bytes(number);
    let what = "the record of a namespace";
    let format = record.first().copied().unwrap_or_default();
    let length = match format {
        RECORDED => RECORDED_BYTES,
        LIMITED => LIMITED_BYTES,
        _ => RECORD_BYTES,
    };
    if record.len() != length {
        let (found, supported) = (record.len() as u64, length as u64);
        return Err(KvError::Format { what, found, supported });
    }
    let policy = Eviction::ALL.get(usize::from(record[2])).copied();
    let recorded = format == RECORDED;
    let flags = BY_ROW | ORDERED | STREAM | if recorded { ROW_RECORDS } else { 0 };
    let (Some(eviction), FORMAT | LIMITED | RECORDED, 0) = (policy, format, record[1] & !flags)
    else {
        let (found, supported) = (u64::from(format), u64::from(RECORDED));
        return Err(KvError::Format { what, found, supported });
    };
    let u64_at = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&record[at..at + 8]);
        u64::from_le_bytes(word)
    };
    let stream = record[1] & STREAM != 0;
    let options = NamespaceOptions {
        by_row: record[1] & BY_ROW != 0,
        ordered: record[1] & ORDERED != 0,
        time_to_live_ms: if stream { 0 } else { u64_at(8) },
        stream,
        keep_bytes: if stream { u64_at(8) } else { 0 },
        row_records: recorded,
        row_time_to_live_ms: if recorded { u64_at(32) } else { 0 },
    };
    let max_bytes = if format == FORMAT { 0 } else { u64_at(24) };
    let limit = NamespaceLimit { max_bytes, eviction };
    let tagged = tagged(number, &options);
    Ok(Some((number, Known { tagged, options, limit, since: u64_at(16) })))
}

fn tagged(number: u32, options: &NamespaceOptions) -> u32 {
    if options.by_row { number | IN_ROWS } else { number }
}

/// Reads the catalog from the system's entries, which are all in their indexes, and makes the
/// shards' namespaces so: what is in none goes, what is ordered is put in order.
pub(crate) fn load(store: &Store, shards: &[Arc<Mutex<Shard>>]) -> Result<(), KvError> {
    let mut guards: Vec<_> =
        shards.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner)).collect();
    store.catalog.clear();
    for shard in &mut guards {
        for (key, record) in shard.system_entries() {
            if let Some((number, mut known)) = decode(&key, &record)? {
                // What was there before a snapshot replaced all of it is dead, too.
                known.since = known.since.max(store.barrier(SYSTEM_NAMESPACE));
                if fault::is_on(KnownBug::ForgetSince) {
                    known.since = 0;
                }
                store.catalog.set(number, Some(known), store.shards());
            }
        }
    }
    let known = store.catalog.all();
    for shard in &mut guards {
        for namespace in shard.spaces.extra_numbers() {
            if store.barrier(namespace) == Version::MAX {
                shard.forget(namespace);
                shard.spaces.remove(namespace);
            }
        }
        for (_, known) in &known {
            shard.open_namespace(known);
        }
        shard.put_in_order();
    }
    Ok(())
}

impl Store {
    /// Barriers of all namespaces that are there.
    pub(crate) fn barriers(&self) -> BTreeMap<u32, Version> {
        let databases = 0..u32::from(crate::DATABASES);
        let fields = databases.clone().map(crate::rows::fields_of);
        let expiries = databases.map(crate::expiries::expiries_of);
        let own = (0..INDEXES as u32).chain(fields).chain(expiries).chain([ROW_ENDS, ROW_TIMES]);
        own.map(|namespace| (namespace, self.barrier(namespace)))
            .chain(self.catalog.all().into_iter().map(|(_, known)| (known.tagged, known.since)))
            .collect()
    }
}

impl Shard {
    /// Keys and values of the system's namespace in this shard.
    fn system_entries(&mut self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let Some(index) = self.spaces.get(SYSTEM_NAMESPACE) else { return Vec::new() };
        let slots = index.live_slots();
        let mut entries = Vec::with_capacity(slots.len());
        for slot in slots {
            let state = self.cache.get(&self.store.table, slot.location.segment());
            let mut key = Vec::new();
            let header = read_key(state, &slot, &mut key);
            let mut value = vec![0; header.value_length as usize];
            let start = slot.location.offset() + crate::entry::HEADER_BYTES;
            state.segment.read(start as usize + key.len(), &mut value);
            entries.push((key, value));
        }
        entries
    }

    fn open_namespace(&mut self, known: &Known) {
        let account = self.store.catalog.account(known.tagged & !IN_ROWS);
        let shard = self.index;
        let extra = self.spaces.open(known.tagged);
        if let Some(account) = &account {
            let streams = extra.streams.as_ref().map_or(0, |streams| streams.bytes());
            account.set(shard, extra.index.live_bytes + streams);
        }
        extra.index.account = account;
        if known.options.ordered && extra.ordered.is_none() {
            extra.ordered = Some(Ordered::default());
        }
        if known.options.row_records {
            extra.rows.get_or_insert_default();
        }
        if known.options.stream {
            extra.streams.get_or_insert_default();
        }
    }

    /// Builds the order of every ordered namespace from its index: one sort each; and what else follows
    /// from all entries.
    pub(crate) fn put_in_order(&mut self) {
        for namespace in self.spaces.extra_numbers() {
            self.settle_streams(namespace);
            let ordered = self.spaces.extra(namespace).is_some_and(|extra| extra.ordered.is_some());
            if ordered {
                let built = self.sorted(namespace);
                if let Some(extra) = self.spaces.extra_mut(namespace) {
                    if crate::rows::is_fields(namespace) && !fault::is_on(KnownBug::ForgetFields) {
                        extra.counted = Counted::of(&built);
                    }
                    extra.ordered = Some(built);
                }
            }
        }
        self.settle_expiries();
        self.settle_row_ends();
        self.settle_row_records();
    }

    /// What an ordered namespace's order says other than its index, a sentence each.
    pub(crate) fn disorder(&mut self) -> Vec<String> {
        let mut findings = Vec::new();
        for namespace in self.spaces.extra_numbers() {
            let built = self.sorted(namespace);
            let extra = self.spaces.extra(namespace);
            let Some(kept) = extra.and_then(|extra| extra.ordered.as_ref()) else { continue };
            let all = |ordered: &Ordered| {
                let mut keys = crate::ordered::Keys::default();
                let bounds = (std::ops::Bound::Unbounded, std::ops::Bound::Unbounded);
                ordered.collect(bounds, false, usize::MAX, &mut keys);
                (0..keys.len()).map(|at| keys.get(at).to_vec()).collect::<Vec<_>>()
            };
            if crate::rows::is_fields(namespace) {
                let counted = extra.map(|extra| extra.counted.differences(&Counted::of(&built)));
                for (row, kept, real) in counted.unwrap_or_default() {
                    findings.push(format!("row {row}: {kept} fields counted, {real} live"));
                }
            }
            let (kept, built) = (all(kept), all(&built));
            if kept != built {
                let (kept, live) = (kept.len(), built.len());
                findings.push(format!("namespace {namespace}: {kept} keys in order, {live} live"));
            }
        }
        findings
    }

    fn sorted(&mut self, namespace: u32) -> Ordered {
        /// A key in the arena, its first bytes beside it: most comparisons need no more.
        struct Place {
            first: u64,
            start: usize,
            length: u32,
        }
        let Some(index) = self.spaces.get(namespace) else { return Ordered::default() };
        let (mut arena, mut places) = (Vec::new(), Vec::with_capacity(index.live as usize));
        for page in 0..index.pages() {
            for slot in index.page(page).filter(|slot| !slot.location.is_absent()) {
                let state = self.cache.get(&self.store.table, slot.location.segment());
                let header = read_header(state, slot.location.offset());
                let key_at = slot.location.offset() + crate::entry::HEADER_BYTES;
                let start = arena.len();
                arena.resize(start + usize::from(header.key_length), 0);
                state.segment.read(key_at as usize, &mut arena[start..]);
                let mut first = [0; 8];
                let known = arena.len().min(start + 8) - start;
                first[..known].copy_from_slice(&arena[start..start + known]);
                let first = u64::from_be_bytes(first);
                places.push(Place { first, start, length: u32::from(header.key_length) });
            }
        }
        let key = |place: &Place| &arena[place.start..place.start + place.length as usize];
        places.sort_unstable_by(|one, other| {
            one.first.cmp(&other.first).then_with(|| key(one).cmp(key(other)))
        });
        Ordered::from_sorted(places.iter().map(key))
    }
}

impl Keyspace<'_> {
    /// Creates a namespace; persisted when it returns. One that is there already, with the same
    /// options, stays as it is.
    ///
    /// Errors: [`KvError::NeedsAllShards`], [`KvError::NamespaceTaken`], [`KvError::PoolFull`], the
    /// pool's.
    pub fn create_namespace(
        &mut self,
        number: u32,
        options: NamespaceOptions,
    ) -> Result<(), KvError> {
        self.needs_all()?;
        if !(FIRST_NAMESPACE..IN_ROWS).contains(&number) {
            let reason = "services have the numbers from 256 to 2,147,483,647";
            return Err(KvError::NamespaceTaken { number, reason });
        }
        if let Some(known) = self.store().catalog.get(number) {
            if known.options == options {
                return Ok(());
            }
            let reason = "it is there with other options";
            return Err(KvError::NamespaceTaken { number, reason });
        }
        if options.stream && (options.ordered || options.time_to_live_ms != 0) {
            let reason = "streams have no order of keys and no time to live";
            return Err(KvError::NamespaceTaken { number, reason });
        }
        if options.keep_bytes != 0 && !options.stream {
            let reason = "bytes to keep are for streams";
            return Err(KvError::NamespaceTaken { number, reason });
        }
        if options.row_records && (!options.by_row || options.stream) {
            let reason = "records of rows are for namespaces by row that hold keys";
            return Err(KvError::NamespaceTaken { number, reason });
        }
        if options.row_time_to_live_ms != 0 && !options.row_records {
            let reason = "a time to live of rows needs records of rows";
            return Err(KvError::NamespaceTaken { number, reason });
        }
        if options.stream {
            self.store().raise_format_for_streams()?;
        }
        self.enter(number, options, NamespaceLimit::default())
    }

    /// Enters a namespace as one that begins now.
    fn enter(
        &mut self,
        number: u32,
        options: NamespaceOptions,
        limit: NamespaceLimit,
    ) -> Result<(), KvError> {
        let store = Arc::clone(self.store());
        if let Some(feed) = &store.feed {
            feed.before_clear(&store);
        }
        let entered = self.enter_persisted(number, options, limit);
        if let Some(feed) = &store.feed {
            let since = entered.as_ref().ok().map(|known| known.since);
            feed.after_clear(since, std::iter::once(number));
        }
        let known = entered?;
        for shard in self.shards_mut() {
            shard.open_namespace(&known);
        }
        Ok(())
    }

    fn enter_persisted(
        &mut self,
        number: u32,
        options: NamespaceOptions,
        limit: NamespaceLimit,
    ) -> Result<Known, KvError> {
        let since = self.store().next_version()?;
        let known = Known { tagged: tagged(number, &options), options, limit, since };
        self.note_namespace(number, &known)?;
        Ok(known)
    }

    /// Persists what is known of a namespace.
    pub(crate) fn note_namespace(&mut self, number: u32, known: &Known) -> Result<(), KvError> {
        self.put_system(&record_key(number), &encode(known))?;
        self.commit()?;
        let shards = self.store().shards();
        self.store().catalog.set(number, Some(*known), shards);
        Ok(())
    }

    /// Removes a namespace and all its keys, at once and for good when it returns; false when there
    /// was none. Its number may be used again.
    ///
    /// Errors: [`KvError::NeedsAllShards`], [`KvError::PoolFull`] when not even the reserve has
    /// room, the pool's.
    pub fn drop_namespace(&mut self, number: u32) -> Result<bool, KvError> {
        self.needs_all()?;
        let Some(known) = self.store().catalog.get(number) else { return Ok(false) };
        let store = Arc::clone(self.store());
        if let Some(feed) = &store.feed {
            feed.before_clear(&store);
        }
        let dropped = store.next_version().map_err(KvError::from).and_then(|version| {
            self.delete_system(&record_key(number))?;
            self.commit()?;
            Ok(version)
        });
        if let Some(feed) = &store.feed {
            feed.after_clear(dropped.as_ref().ok().copied(), std::iter::once(number));
        }
        dropped?;
        store.catalog.set(number, None, store.shards());
        for shard in self.shards_mut() {
            shard.forget(known.tagged);
            shard.spaces.remove(known.tagged);
        }
        Ok(true)
    }

    /// Removes every key of a namespace, at once and for good when it returns.
    ///
    /// Errors: [`KvError::NeedsAllShards`], [`KvError::Namespace`], [`KvError::PoolFull`], the
    /// pool's.
    pub fn clear_namespace(&mut self, number: u32) -> Result<(), KvError> {
        self.needs_all()?;
        let Some(known) = self.store().catalog.get(number) else {
            return Err(KvError::Namespace { number });
        };
        self.enter(number, known.options, known.limit)?;
        for shard in self.shards_mut() {
            shard.forget(known.tagged);
        }
        Ok(())
    }
}
