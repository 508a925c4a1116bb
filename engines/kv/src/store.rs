//! What all shards share: versions, the segment table, flush barriers, limits and statistics.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use beeline_env::Clock;
use beeline_pmem::{Mechanism, PmemError, Pool, Segment};

use crate::catalog::Catalog;
use crate::entry::Sealer;
use crate::feed::Feed;
use crate::field::FieldName;
use crate::peers::Peers;
use crate::placement::Placement;
use crate::segments::{FORMAT, HEAD, SegmentState, SegmentTable, word};
use crate::stats::{DatabaseCounters, ShardCounters, StoreStats};
use crate::write_back::WriteBack;
use crate::{DATABASES, Eviction, INDEXES, KvError, SYSTEM_NAMESPACE, StoreOptions, Version};

/// Root words of the pool.
pub(crate) mod root {
    /// 0..16: flush barrier of each database; entries of lower version are dead.
    pub const BARRIER: usize = 0;
    /// Flush barrier of all databases.
    pub const BARRIER_ALL: usize = 16;
    /// No version at or above this was given out.
    pub const VERSION_CEILING: usize = 17;
    /// Format of everything the store keeps in the pool.
    pub const FORMAT: usize = 18;
    /// Flush barrier of what a replicated store keeps beside its keys.
    pub const BARRIER_SYSTEM: usize = 19;
    /// 1 while a snapshot replaces the contents: what is there then is worth nothing.
    pub const REPLACING: usize = 20;
    /// What the pool lost and somebody accepted: damaged pages of the table << 48, descriptors << 24,
    /// files without a descriptor.
    pub const ACCEPTED: usize = 21;
}

/// Format version of a store in which a service's row ended.
pub(crate) const STORE_FORMAT: u64 = 5;
/// Format version of one with streams.
const STREAM_FORMAT: u64 = 4;
/// Format version of one without: since 2 there are namespaces behind the databases, since 3 the head of
/// a row does not keep its length, and changed expiries stand beside values. Older ones are read, and become 3 when they are opened.
const PLAIN_FORMAT: u64 = 3;
/// Versions reserved by one persisted ceiling.
const VERSION_STEP: u64 = 1 << 20;

/// What recovery found.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RecoveryReport {
    /// Live keys.
    pub keys: u64,
    /// Valid entries on media, stale ones included.
    pub entries: u64,
    /// Entries that should be valid and are not.
    pub damaged: u64,
    /// Entries cut short by the crash, never acknowledged, dropped.
    pub torn: u64,
    /// Bytes of entries read.
    pub bytes: u64,
    /// Segments read.
    pub segments: u64,
    /// Time it took.
    pub seconds: f64,
    /// Memory of the indexes divided by the keys.
    pub index_bytes_per_key: f64,
}

/// How much of the pool an allocation may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    /// New data: leaves room for deletions and the collector.
    Data,
    /// The mark of a row that ended: leaves room for deletions, of which it makes more, and the collector.
    Mark,
    /// A deletion: leaves room for the collector.
    Tombstone,
    /// The collector: takes the last segment.
    Collector,
}

/// The part of a store that every shard and thread shares.
#[derive(Debug)]
pub struct Store {
    pub(crate) pool: Pool,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) sealer: Sealer,
    pub(crate) table: SegmentTable,
    pub(crate) counters: Vec<ShardCounters>,
    pub(crate) database_counters: Vec<DatabaseCounters>,
    pub(crate) inboxes: Vec<Mutex<Vec<Freed>>>,
    pub(crate) peers: Peers,
    pub(crate) write_back: WriteBack,
    pub(crate) cooperative: AtomicBool,
    /// More than 0 while a snapshot is being written: segments stay and overwrites in place are refused
    /// meanwhile. See [`Store::give_up_snapshot`].
    pub(crate) snapshots: AtomicU32,
    /// A snapshot is replacing the contents: what is there is a part, and no key may be deleted on
    /// the strength of it.
    replacing: AtomicBool,
    /// How often an allocation was refused because the pool was full.
    pub(crate) shortages: AtomicU64,
    placement: Placement,
    next_version: AtomicU64,
    version_ceiling: AtomicU64,
    raising: Mutex<()>,
    barriers: [AtomicU64; INDEXES],
    pub(crate) flush_epochs: [AtomicU64; INDEXES],
    /// Namespaces that services created.
    pub(crate) catalog: Catalog,
    max_memory_bytes: AtomicU64,
    eviction: AtomicU8,
    allocating: Mutex<()>,
    shortage_hook: OnceLock<Hook>,
    /// When the hook was called last.
    hooked_ns: AtomicU64,
    /// Segments that were free when the store was opened.
    free_at_open: u64,
    /// From this many bytes on a head is left for a warm segment, where that pays.
    pub(crate) warm_bytes: u32,
    agreed_ms: Option<Arc<AtomicU64>>,
    pub(crate) feed: Option<Feed>,
    /// Most bytes of entries in a batch, deletions not counted.
    pub(crate) batch_limit_bytes: u64,
}

struct Hook(Box<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Hook")
    }
}

/// A valid entry left the media together with its segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub namespace: u32,
    pub hash: u64,
    pub version: Version,
    pub place: crate::index::Location,
}

impl Store {
    pub(crate) fn new(pool: Pool, options: &StoreOptions) -> Result<Arc<Self>, KvError> {
        let secret = pool.secret();
        let found = pool.root_word(root::FORMAT);
        if found > STORE_FORMAT {
            return Err(KvError::Format { what: "the store", found, supported: STORE_FORMAT });
        }
        let sealer = Sealer::new(&secret);
        let ceiling = pool.root_word(root::VERSION_CEILING).max(1);
        if pool.root_word(root::REPLACING) != 0 {
            // A snapshot was replacing the contents: what is there now is a part of it.
            for word in [root::BARRIER_ALL, root::BARRIER_SYSTEM] {
                pool.store_root_word(word, ceiling);
            }
            let mut persister = pool.persister();
            persister.flush_root();
            persister.fence()?;
            pool.store_root_word(root::REPLACING, 0);
        }
        let all = pool.root_word(root::BARRIER_ALL);
        let barriers = std::array::from_fn(|database| {
            AtomicU64::new(match u32::try_from(database) {
                Ok(SYSTEM_NAMESPACE) => pool.root_word(root::BARRIER_SYSTEM),
                _ => pool.root_word(root::BARRIER + database).max(all),
            })
        });
        let shards = options.shards.clamp(1, 1024);
        Ok(Arc::new(Self {
            clock: Arc::clone(&options.clock),
            table: SegmentTable::default(),
            counters: (0..shards).map(|_| ShardCounters::default()).collect(),
            database_counters: (0..shards).map(|_| DatabaseCounters::default()).collect(),
            inboxes: (0..shards).map(|_| Mutex::default()).collect(),
            peers: Peers::default(),
            snapshots: AtomicU32::new(0),
            replacing: AtomicBool::new(false),
            shortages: AtomicU64::new(0),
            write_back: WriteBack::new(shards, pool.report().mechanism),
            cooperative: AtomicBool::new(options.cooperative_write_back),
            placement: Placement::new(&sealer, shards),
            sealer,
            next_version: AtomicU64::new(ceiling),
            version_ceiling: AtomicU64::new(ceiling),
            raising: Mutex::new(()),
            barriers,
            flush_epochs: std::array::from_fn(|_| AtomicU64::new(0)),
            catalog: Catalog::default(),
            max_memory_bytes: AtomicU64::new(options.max_memory_bytes),
            eviction: AtomicU8::new(code_of(options.eviction)),
            allocating: Mutex::new(()),
            shortage_hook: OnceLock::new(),
            hooked_ns: AtomicU64::new(0),
            free_at_open: (pool.capacity_bytes().saturating_sub(pool.used_bytes()))
                / u64::from(pool.segment_bytes()),
            warm_bytes: options.warm_bytes.unwrap_or(match pool.report().mechanism {
                // Each change of segments costs a synchronisation of the pool's own file.
                Mechanism::FileSync => 8 << 20,
                Mechanism::CacheLine(_) | Mechanism::CacheLineEmulated(_) => 4 << 20,
                _ => 1 << 20,
            }),
            agreed_ms: options.agreed_ms.clone(),
            feed: Feed::new(shards, options.feed_bytes),
            batch_limit_bytes: options.batch_limit_bytes.unwrap_or(u64::MAX),
            pool,
        }))
    }

    /// From now on builds that know older formats only refuse the store: before the first entry that they
    /// would take for damage, and not before the opening has succeeded. One that was refused leaves the
    /// store to the build that wrote it.
    pub(crate) fn raise_format(&self) -> Result<(), PmemError> {
        self.raise_format_to(PLAIN_FORMAT)
    }

    /// As [`Store::raise_format`], before the first entry of a stream.
    pub(crate) fn raise_format_for_streams(&self) -> Result<(), PmemError> {
        self.raise_format_to(STREAM_FORMAT)
    }

    /// As [`Store::raise_format`], before the first mark of a row that ended.
    pub(crate) fn raise_format_for_row_ends(&self) -> Result<(), PmemError> {
        self.raise_format_to(STORE_FORMAT)
    }

    fn raise_format_to(&self, format: u64) -> Result<(), PmemError> {
        if self.pool.root_word(root::FORMAT) < format {
            self.pool.store_root_word(root::FORMAT, format);
            self.persist_root()?;
        }
        Ok(())
    }

    /// Keys whose time came by then may be deleted; see [`StoreOptions::agreed_ms`]. A shard may be ahead of the
    /// others, `ahead_ms`: [`crate::Keyspace::agree_until`].
    pub(crate) fn deletes_until_ms(&self, ahead_ms: u64) -> u64 {
        let now_ms = self.clock.unix_ms();
        match &self.agreed_ms {
            Some(agreed_ms) => now_ms.min(agreed_ms.load(Ordering::Relaxed).max(ahead_ms)),
            None => now_ms,
        }
    }

    /// Number of shards.
    #[must_use]
    pub fn shards(&self) -> usize {
        self.placement.shards
    }

    /// Seed of [`crate::hash_key`]; not a secret, so that clients can find the shard of a key.
    #[must_use]
    pub fn hash_seed(&self) -> u64 {
        self.placement.seed
    }

    /// The hash of a key in its index, which no client can foresee.
    #[must_use]
    #[inline]
    pub fn place_key(&self, database: u8, key: &[u8]) -> u64 {
        self.placement.place(u32::from(database), key)
    }

    /// As [`Store::place_key`], in any namespace.
    #[inline]
    pub(crate) fn place(&self, namespace: u32, key: &[u8]) -> u64 {
        self.placement.place(namespace, key)
    }

    /// As [`Store::place_key`], of a row's field.
    #[inline]
    pub(crate) fn place_field(&self, field: &FieldName<'_>) -> u64 {
        self.placement.place_field(field)
    }

    /// As [`Store::shard_of`], in any namespace.
    #[inline]
    pub(crate) fn shard_for(&self, namespace: u32, key: &[u8]) -> usize {
        self.placement.shard(namespace, key)
    }

    /// Index of the shard whose index holds the key with this place, from [`Store::place_key`].
    #[must_use]
    #[inline]
    pub fn owner_of(&self, place: u64) -> usize {
        self.placement.owner(place)
    }

    /// Index of the shard whose index holds the key.
    #[must_use]
    #[inline]
    pub fn shard_of(&self, database: u8, key: &[u8]) -> usize {
        self.placement.shard(u32::from(database), key)
    }

    /// The pool below.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The injected clock.
    #[must_use]
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Most bytes of entries that lie in a row: of a batch.
    pub(crate) fn batch_room_bytes(&self) -> u64 {
        u64::from(self.pool.segment_bytes() - crate::entry::FIRST_ENTRY)
    }

    /// Longest value in bytes that fits an entry with a key of `key_length` bytes.
    #[must_use]
    pub fn value_limit(&self, key_length: usize) -> usize {
        let segment = self.pool.segment_bytes() as usize;
        let overhead = crate::entry::FIRST_ENTRY as usize + 48 + key_length + 16;
        segment.saturating_sub(overhead).min(crate::entry::VALUE_LIMIT)
    }

    /// Sets the memory limit in bytes; 0 = none.
    pub fn set_max_memory_bytes(&self, bytes: u64) {
        self.max_memory_bytes.store(bytes, Ordering::Relaxed);
    }

    /// The memory limit in bytes; 0 = none.
    #[must_use]
    pub fn max_memory_bytes(&self) -> u64 {
        self.max_memory_bytes.load(Ordering::Relaxed)
    }

    /// Sets the eviction policy.
    pub fn set_eviction(&self, policy: Eviction) {
        self.eviction.store(code_of(policy), Ordering::Relaxed);
    }

    /// The eviction policy.
    #[must_use]
    pub fn eviction(&self) -> Eviction {
        let code = self.eviction.load(Ordering::Relaxed) as usize;
        Eviction::ALL.get(code).copied().unwrap_or_default()
    }

    /// Switches cooperative write-back on or off.
    pub fn set_cooperative_write_back(&self, on: bool) {
        self.cooperative.store(on, Ordering::Relaxed);
    }

    /// Bytes of live data, index, and what is remembered of clients' open segments: what the memory limit is compared with.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.counters
            .iter()
            .map(|counters| {
                counters.live_bytes.load(Ordering::Relaxed)
                    + counters.index_bytes.load(Ordering::Relaxed)
                    + counters.client_slot_bytes.load(Ordering::Relaxed)
            })
            .sum()
    }

    /// Live keys of a database, and how many of them expire. Takes no lock.
    #[must_use]
    pub fn database_keys(&self, database: u8) -> (u64, u64) {
        let sum = |counter: fn(&DatabaseCounters, usize) -> u64| {
            self.database_counters.iter().map(|shard| counter(shard, usize::from(database))).sum()
        };
        (
            sum(|shard, database| shard.keys[database].load(Ordering::Relaxed)),
            sum(|shard, database| shard.expiring[database].load(Ordering::Relaxed)),
        )
    }

    /// Figures of the whole store, each read at its own moment.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        let mut stats = StoreStats {
            used_bytes: self.pool.used_bytes(),
            capacity_bytes: self.pool.capacity_bytes(),
            version: self.next_version.load(Ordering::Relaxed).saturating_sub(1),
            ..StoreStats::default()
        };
        for counters in &self.counters {
            stats.total.add(&counters.read());
        }
        for state in self.table.all() {
            stats.segments += 1;
            stats.garbage_bytes += state.garbage_bytes();
            stats.segments_granted += u64::from(state.is(crate::segments::GRANTED));
            stats.segments_quarantined += u64::from(state.is(crate::segments::QUARANTINED));
        }
        stats
    }

    /// The next version: larger than any given out before, across restarts.
    ///
    /// Errors: the pool's, when the ceiling had to be raised and could not be persisted.
    #[inline]
    pub(crate) fn next_version(&self) -> Result<Version, PmemError> {
        let version = if self.shards() == 1 {
            // Whoever asks holds the one shard's lock. A locked addition would wait until the
            // entry before has left the store buffer, which costs more than storing it.
            let version = self.next_version.load(Ordering::Relaxed);
            self.next_version.store(version + 1, Ordering::Relaxed);
            version
        } else {
            self.next_version.fetch_add(1, Ordering::Relaxed)
        };
        // Acquire pairs with the release in `raise_ceiling`: the ceiling is persisted.
        if version >= self.version_ceiling.load(Ordering::Acquire) {
            self.raise_ceiling(version)?;
        }
        Ok(version)
    }

    #[cold]
    fn raise_ceiling(&self, version: Version) -> Result<(), PmemError> {
        let _one_at_a_time = self.raising.lock().unwrap_or_else(PoisonError::into_inner);
        if version < self.version_ceiling.load(Ordering::Acquire) {
            return Ok(());
        }
        let ceiling = version + VERSION_STEP;
        self.pool.store_root_word(root::VERSION_CEILING, ceiling);
        self.persist_root()?;
        self.version_ceiling.store(ceiling, Ordering::Release);
        Ok(())
    }

    /// The newest version given out so far. What is written later to a shard whose lock the caller
    /// holds has a larger one.
    #[must_use]
    pub fn newest_version(&self) -> Version {
        self.next_version.load(Ordering::Relaxed).saturating_sub(1)
    }

    /// Makes sure that versions go on above `version`.
    pub(crate) fn version_seen(&self, version: Version) {
        self.next_version.fetch_max(version + 1, Ordering::Relaxed);
    }

    pub(crate) fn persist_root(&self) -> Result<(), PmemError> {
        let mut persister = self.pool.persister();
        persister.flush_root();
        persister.fence()
    }

    /// Entries of `namespace` below this version are dead: all of them in one that is not there.
    #[inline]
    pub(crate) fn barrier(&self, namespace: u32) -> Version {
        match self.barriers.get(namespace as usize) {
            Some(barrier) => barrier.load(Ordering::Relaxed),
            None if crate::expiries::is_beside(namespace) => {
                self.barrier(crate::rows::database_of(namespace))
            }
            None if crate::row_ends::is_about_rows(namespace) => self.barrier(SYSTEM_NAMESPACE),
            None => self.catalog.since(namespace),
        }
    }

    /// Persists a barrier for one database or all. The caller holds every shard.
    pub(crate) fn raise_barrier(&self, database: Option<u8>) -> Result<(), KvError> {
        if let Some(feed) = &self.feed {
            feed.before_clear(self);
        }
        let raised = self.raise_barrier_to(database);
        if let Some(feed) = &self.feed {
            let cleared = (0..u32::from(DATABASES))
                .filter(|number| database.is_none_or(|database| u32::from(database) == *number));
            feed.after_clear(raised.as_ref().ok().copied(), cleared);
        }
        raised.map(drop)
    }

    fn raise_barrier_to(&self, database: Option<u8>) -> Result<Version, KvError> {
        let barrier = self.next_version()?;
        let (word, range) = match database {
            Some(database) => {
                let database = database as usize;
                (root::BARRIER + database, database..database + 1)
            }
            None => (root::BARRIER_ALL, 0..DATABASES as usize),
        };
        let before = self.pool.root_word(word);
        self.pool.store_root_word(word, barrier);
        if let Err(error) = self.persist_root() {
            // Refused: a restart must not find it done.
            self.pool.store_root_word(word, before);
            return Err(error.into());
        }
        for database in range {
            self.barriers[database].store(barrier, Ordering::Relaxed);
            self.flush_epochs[database].fetch_add(1, Ordering::Relaxed);
        }
        Ok(barrier)
    }

    /// Makes everything dead that is there now, what no client can name included, until
    /// [`Store::end_replacing`] for good: a store opened meanwhile is empty. Versions up to
    /// `reach` above the barrier returned are reserved. The caller holds every shard.
    pub(crate) fn begin_replacing(&self, reach: Version) -> Result<Version, KvError> {
        let barrier = self.next_version()?;
        self.version_seen(barrier + reach);
        // Raises the ceiling above all of them.
        let _ = self.next_version()?;
        for word in [root::BARRIER_ALL, root::BARRIER_SYSTEM] {
            self.pool.store_root_word(word, barrier);
        }
        self.pool.store_root_word(root::REPLACING, 1);
        self.persist_root()?;
        for database in 0..INDEXES {
            self.barriers[database].store(barrier, Ordering::Relaxed);
            self.flush_epochs[database].fetch_add(1, Ordering::Relaxed);
        }
        self.catalog.clear();
        self.begin_feed_anew();
        self.replacing.store(true, Ordering::Release);
        Ok(barrier)
    }

    /// What is there now counts.
    pub(crate) fn end_replacing(&self) -> Result<(), KvError> {
        self.pool.store_root_word(root::REPLACING, 0);
        self.persist_root()?;
        self.begin_feed_anew();
        self.replacing.store(false, Ordering::Release);
        Ok(())
    }

    /// What is there now did not come by events: whoever follows them reads it.
    pub(crate) fn begin_feed_anew(&self) {
        if let Some(feed) = &self.feed {
            feed.begin_anew(self.newest_version());
        }
    }

    /// True while a snapshot replaces the contents, and for ever once that failed: nothing expires
    /// and nothing is evicted meanwhile. A deletion would get a version above that of a record that
    /// is still to come.
    #[must_use]
    pub fn is_replacing(&self) -> bool {
        // Acquire pairs with the releases above; both sides hold the shard's lock besides.
        self.replacing.load(Ordering::Acquire)
    }

    /// Whether new data is about to have room only where deletions and collection make some.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.free_segments() <= self.reserve(Need::Data) + 1
    }

    /// Whether each shard may take so many segments for new data before [`Store::is_short`] says so.
    #[must_use]
    pub fn has_segments(&self, each: u64) -> bool {
        self.free_segments() > self.reserve(Need::Data) + 1 + each * self.shards() as u64
    }

    /// As [`Store::is_short`], with `margin_bytes` to go; while it holds the collector is at work.
    #[must_use]
    pub fn is_short_with(&self, margin_bytes: u64) -> bool {
        let margin = (margin_bytes / u64::from(self.pool.segment_bytes())).max(1);
        self.free_segments() <= (self.reserve(Need::Data) + 1 + margin).min(self.low_segments())
    }

    /// The least capacity at which every shard finds a segment for new data beside those kept back
    /// for deletions and the collector, in bytes. A pool opened with less may refuse every write
    /// of one shard and take those of another.
    #[must_use]
    pub fn least_capacity_bytes(&self) -> u64 {
        (2 * self.shards() as u64 + 2) * u64::from(self.pool.segment_bytes())
    }

    /// Has `wake` called when an allocation finds the pool full: other shards may hold garbage, and
    /// sleep. Called at most every 10 ms, from any thread, with a shard locked: it only wakes.
    /// The first hook stays.
    pub fn on_shortage(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.shortage_hook.set(Hook(Box::new(wake)));
    }

    /// Has every shard look for garbage that is worth collecting, and woken for it as
    /// [`Store::on_shortage`] says: for an owner that is short of room and has nothing to write.
    pub fn ask_for_room(&self) {
        self.note_shortage();
    }

    fn note_shortage(&self) {
        const PAUSE_NS: u64 = 10_000_000;
        self.shortages.fetch_add(1, Ordering::Relaxed);
        let Some(hook) = self.shortage_hook.get() else { return };
        let now = self.clock.monotonic_ns();
        let last = self.hooked_ns.load(Ordering::Relaxed);
        let due = last == 0 || now.saturating_sub(last) >= PAUSE_NS;
        let mine = || {
            let (relaxed, now) = (Ordering::Relaxed, now.max(1));
            self.hooked_ns.compare_exchange(last, now, relaxed, relaxed).is_ok()
        };
        if due && mine() {
            (hook.0)();
        }
    }

    /// Segments that could still be allocated.
    pub(crate) fn free_segments(&self) -> u64 {
        let free = self.pool.capacity_bytes().saturating_sub(self.pool.used_bytes());
        free / u64::from(self.pool.segment_bytes())
    }

    /// As many free segments or fewer mean that garbage is dear.
    pub(crate) fn low_segments(&self) -> u64 {
        let total = self.pool.capacity_bytes() / u64::from(self.pool.segment_bytes());
        (self.reserve(Need::Data) + 2 + total / 16).max(total / 8)
    }

    /// Segments that `need` may not touch.
    ///
    /// New data leaves every shard a head for its deletions, the victim its collector is at, and
    /// the collector's own head: so the last shard that needs a head for a deletion finds one,
    /// however far the other shards' collectors are. A store with streams has two heads for deletions
    /// in every shard, as streams are cut off in a chain of their own. One with rows of services has one segment
    /// more, so that every shard finds a head for marks, which are live themselves until the deletions
    /// that they bring are stored, and may not take the room of these. Small pools keep back less, and
    /// there a deletion may have to wait for a collector.
    pub(crate) fn reserve(&self, need: Need) -> u64 {
        let shards = self.shards() as u64;
        let all = self.pool.capacity_bytes() / u64::from(self.pool.segment_bytes());
        let each = if self.catalog.has_streams() { 4 } else { 3 };
        let marks = u64::from(self.catalog.has_rows());
        let from_data = (each * shards - 1 + marks).min((shards + 1).max(all / 3));
        match need {
            Need::Data => from_data,
            Need::Mark => (self.reserve(Need::Tombstone) + shards).min(from_data),
            // A store that was full when it was opened with more shards than before has not got
            // that many: deletions, which make room, may use all but the last.
            Need::Tombstone => {
                shards.min(self.free_at_open.saturating_sub(from_data - shards)).max(1)
            }
            Need::Collector => 0,
        }
    }

    /// A fresh segment for the log of shard `owner`, as its head.
    ///
    /// Errors: [`KvError::PoolFull`] when only the reserve is left; the pool's.
    pub(crate) fn allocate(
        &self,
        owner: usize,
        need: Need,
        owner_flags: u64,
        flags: u32,
    ) -> Result<Arc<SegmentState>, KvError> {
        let segment = {
            let _one_at_a_time = self.allocating.lock().unwrap_or_else(PoisonError::into_inner);
            if self.free_segments() <= self.reserve(need) {
                self.note_shortage();
                return Err(KvError::PoolFull { capacity_bytes: self.pool.capacity_bytes() });
            }
            match self.pool.allocate() {
                Ok(segment) => segment,
                // The disk is full, of others' files maybe: deletions and the collector, which
                // make room, go on with what was kept aside for them.
                Err(PmemError::NoSpace { file }) if need > Need::Mark => {
                    let no_space = |_| PmemError::NoSpace { file };
                    self.pool.allocate_from_reserve().map_err(no_space)?
                }
                Err(PmemError::PoolFull { capacity_bytes }) => {
                    return Err(KvError::PoolFull { capacity_bytes });
                }
                Err(error) => return Err(error.into()),
            }
        };
        segment.store_word(word::OWNER, owner as u64 | owner_flags);
        segment.store_word(word::FORMAT, FORMAT);
        segment.store_word(word::ZEROED, segment.generation());
        Ok(self.install_segment(segment, owner, flags, owner_flags == 0))
    }

    /// A renewed segment of shard `owner`, its new life persisted, as a head again.
    pub(crate) fn take_over(&self, segment: Arc<Segment>, owner: usize) -> Arc<SegmentState> {
        segment.store_word(word::SINCE, self.newest_version());
        self.install_segment(segment, owner, 0, true)
    }

    fn install_segment(
        &self,
        segment: Arc<Segment>,
        owner: usize,
        flags: u32,
        by_run: bool,
    ) -> Arc<SegmentState> {
        let first = crate::entry::FIRST_ENTRY;
        let state = SegmentState::new(segment, owner as u32, flags | HEAD, first, by_run);
        let state = Arc::new(state);
        self.table.insert(Arc::clone(&state));
        state
    }
}

pub(crate) fn code_of(policy: Eviction) -> u8 {
    Eviction::ALL.iter().position(|known| *known == policy).unwrap_or(0) as u8
}
