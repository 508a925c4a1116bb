//! The databases of a node, and what commands do to them under the lock of a row.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use beeline_documents_query::error::{Code, QueryError, Result, fail};
use beeline_documents_query::memory::Memory;
use beeline_documents_query::value::integral;
use beeline_observe::CommandTimes;
use bson::{Bson, Document, doc};

use crate::catalog::{Collection, Database, Index, check_collection_name, check_database_name};
use crate::commands::fail_points::FailPoints;
use crate::cursor::Cursors;
use crate::layout::{SYSTEM_ROW, kind, numbered, word};
use crate::log;
use crate::operation::Operation;
use crate::replica::Replica;
use crate::retry::Retry;
use crate::scan::SLICE;
use crate::stats::DocumentsMetrics;
use crate::store::{Backing, Change, Store, Stretch, Visitor, with_row};
use crate::transaction::{self, Transactions};
use crate::versions::History;

mod indexes;
mod replica;

/// Bytes of keys deleted in one batch.
const DELETED_BYTES: usize = 1 << 20;
/// How long the log of a database without collections is kept for streams that are still behind.
const LOG_OF_DROPPED_MS: u64 = 60 * 60 * 1000;
/// Collections whose names begin so are results of `$out` on their way.
pub const ON_ITS_WAY: &str = "tmp.agg_out.";
/// Collections and databases at most, so that a hostile client cannot fill memory with names.
const MOST_COLLECTIONS: usize = 100_000;

/// Settings of the engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Cursors open at once.
    pub most_cursors: usize,
    /// A cursor unused for this long is closed, milliseconds.
    pub cursor_timeout_ms: u64,
    /// Bytes of log a database keeps; 0: no log, and no change streams.
    pub log_bytes: u64,
    /// Clients must show who they are.
    pub authentication: bool,
    /// Bytes that the operations of all clients may keep together.
    pub memory_bytes: usize,
    /// How long a transaction may last, milliseconds.
    pub transaction_lifetime_ms: u64,
    /// Fail points may be set.
    pub test_commands: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            most_cursors: 100_000,
            cursor_timeout_ms: 600_000,
            log_bytes: 64 << 20,
            authentication: false,
            memory_bytes: 1 << 30,
            transaction_lifetime_ms: 60_000,
            test_commands: false,
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Engine {
    store: Arc<dyn Store>,
    databases: RwLock<BTreeMap<String, Arc<Database>>>,
    /// Databases are made and dropped one at a time.
    changing: Mutex<()>,
    /// Retryable statements of one session run one at a time: a driver may send a statement again while
    /// the first is still running, and its outcome is looked for before and kept behind the change. A
    /// session has one of these locks, by its identity.
    retrying: [Mutex<()>; 64],
    /// The open cursors.
    pub cursors: Cursors,
    /// What is counted.
    pub metrics: Arc<DocumentsMetrics>,
    /// How long commands took.
    pub times: Arc<CommandTimes>,
    /// Index builds under way: namespace and index, documents looked at, documents there were.
    pub builds: Mutex<HashMap<(String, String), (u64, u64)>>,
    next_operation: AtomicU64,
    started_ms: u64,
    /// The time of the log.
    pub clock: Arc<log::Clock>,
    /// The replica set this node is a member of.
    pub replica: OnceLock<Arc<Replica>>,
    log_bytes: u64,
    /// Clients must show who they are.
    pub authentication: bool,
    /// Woken when something changed.
    pub changed: Arc<tokio::sync::Notify>,
    /// What the operations of all clients keep.
    pub memory: Arc<Memory>,
    /// The transactions of all sessions.
    pub transactions: Transactions,
    /// Users are made one at a time.
    pub users: Mutex<()>,
    /// Grows when a user is changed or dropped, so that connections look again.
    pub users_changed: AtomicU64,
    /// What only this node knows: the salts of users that there are not come from it.
    pub secret: [u8; 32],
    /// Streams that are behind this time missed something, because the node ran without a log.
    pub log_floor: AtomicU64,
    /// Commands that fail on order.
    pub fail_points: FailPoints,
    /// Collections that a running `$out` fills.
    pub(crate) filling: Mutex<BTreeSet<String>>,
}

/// Notes whether a batch was applied, and what it changes for the transactions that read what was before.
struct Noting<'n> {
    row: &'n mut dyn Backing,
    history: &'n Mutex<History>,
    applied: bool,
}

impl Backing for Noting<'_> {
    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool> {
        self.row.get(key, out)
    }

    fn range(&mut self, stretch: &Stretch, backward: bool, visit: &mut Visitor<'_>) -> Result<()> {
        self.row.range(stretch, backward, visit)
    }

    fn apply(&mut self, changes: &[Change]) -> Result<Option<usize>> {
        self.applied |= !changes.is_empty();
        lock(self.history).apply(self.row, changes)
    }
}

impl Engine {
    /// Keeps other statements of a session out until the guard is dropped. Take it before the outcome
    /// is looked for; a thread holds one at most.
    pub fn alone(&self, retry: Option<&Retry>) -> Option<MutexGuard<'_, ()>> {
        let sum = |sum: usize, byte: &u8| sum.wrapping_mul(31).wrapping_add(usize::from(*byte));
        let lock = retry?.session.iter().fold(0, sum) % self.retrying.len();
        Some(self.retrying[lock].lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the catalog, and ends what a crash left half done.
    ///
    /// Errors: the store's, descriptions that cannot be read.
    pub fn open(store: Arc<dyn Store>, options: &EngineOptions) -> Result<Arc<Self>> {
        let mut names = Vec::new();
        with_row(&*store, SYSTEM_ROW, |row| {
            row.range(&Stretch::of_prefix(&[kind::CATALOG]), false, &mut |key, _| {
                names.push(String::from_utf8_lossy(&key[1..]).into_owned());
                ControlFlow::Continue(())
            })
        })?;
        let secret = with_row(&*store, SYSTEM_ROW, secret)?;
        let memory = Memory::of_node(options.memory_bytes);
        let mut databases = BTreeMap::new();
        for name in names {
            let database = with_row(&*store, name.as_bytes(), |row| load(&name, row, &memory))?;
            databases.insert(name, Arc::new(database));
        }
        let engine = Arc::new(Self {
            databases: RwLock::new(databases),
            changing: Mutex::default(),
            retrying: std::array::from_fn(|_| Mutex::default()),
            cursors: Cursors::new(options),
            metrics: Arc::default(),
            times: Arc::new(CommandTimes::new("documents", crate::commands::NAMES)),
            builds: Mutex::default(),
            next_operation: AtomicU64::new(1),
            started_ms: store.now_ms(),
            clock: store.clock().unwrap_or_default(),
            replica: OnceLock::new(),
            log_bytes: options.log_bytes,
            authentication: options.authentication,
            fail_points: FailPoints::new(options.test_commands),
            changed: Arc::default(),
            memory,
            transactions: Transactions::new(options.transaction_lifetime_ms),
            users: Mutex::default(),
            users_changed: AtomicU64::new(0),
            secret,
            log_floor: AtomicU64::new(0),
            filling: Mutex::default(),
            store,
        });
        for database in engine.databases() {
            engine.clock.pass(engine.with(&database, |row| log::last(row))?);
        }
        // A member of a replica set changes nothing until it leads.
        if engine.store.clock().is_none() {
            engine.clock.next(engine.now_ms());
            engine.mark_log()?;
            for database in engine.databases() {
                engine.end_halves(&database);
            }
            if let Err(error) = engine.forget_dropped() {
                tracing::warn!(%error, "dropped databases cannot be forgotten yet");
            }
        }
        Ok(engine)
    }

    /// Ends what an earlier primary left half done: builds of indexes, deletions, results of `$out`.
    pub fn take_over(&self) {
        for database in self.databases() {
            self.end_halves(&database);
        }
        if let Err(error) = self.finish_builds() {
            tracing::warn!(%error, "an index build that was cut short cannot end yet");
        }
    }

    /// Ends what was left half done in a database: what cannot be ended now is tried again later,
    /// and keeps no client from working.
    fn end_halves(&self, database: &Database) {
        let ended = (|| {
            self.finish_leavings(database)?;
            for half in database.collections() {
                if half.name.starts_with(ON_ITS_WAY) && !lock(&self.filling).contains(&half.name) {
                    self.drop_collection(database, &half.name)?;
                }
            }
            Ok::<(), QueryError>(())
        })();
        if let Err(error) = ended {
            tracing::warn!(database = database.name, %error, "what dropped collections left cannot be deleted yet");
        }
    }

    /// Tries again what could not be ended before, and forgets databases in which nothing came to be.
    pub fn end_all_halves(&self) {
        let mut all = self.databases.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, known| is_used(known));
        drop(all);
        for database in self.databases() {
            self.end_halves(&database);
        }
    }

    /// Forgets databases whose last collection was dropped long ago, with their logs. Only while
    /// no client is there.
    fn forget_dropped(&self) -> Result<()> {
        let long_ago = (self.now_ms().saturating_sub(LOG_OF_DROPPED_MS) / 1000) << 32;
        for database in self.databases() {
            if !database.collections().is_empty()
                || self.with(&database, |row| log::last(row))? >= long_ago
            {
                continue;
            }
            log::drop_all(self, &database)?;
            self.with(&database, |row| row.apply(&[leaving_all(kind::OUTCOME)]).map(drop))?;
            self.finish_leavings(&database)?;
            let key = word(kind::CATALOG, database.row());
            with_row(&*self.store, SYSTEM_ROW, |row| row.apply(&[Change::delete(key)]))?;
            let mut all = self.databases.write().unwrap_or_else(PoisonError::into_inner);
            all.remove(&database.name);
        }
        Ok(())
    }

    /// Notes that the node runs without a log, or that it did before: what changed then is in no
    /// stream.
    fn mark_log(&self) -> Result<()> {
        let (mark, place) = (word(kind::NUMBERS, b"unlogged"), word(kind::NUMBERS, b"floor"));
        let floor = with_row(&*self.store, SYSTEM_ROW, |row| {
            let mut bytes = Vec::new();
            let unlogged = row.get(&mark, &mut bytes)?;
            if self.logs() && unlogged {
                let floor = self.clock.next(self.now_ms());
                let value = floor.to_be_bytes().to_vec();
                row.apply(&[Change::put(place, value), Change::delete(mark)])?;
                return Ok(floor);
            }
            if !self.logs() && !unlogged {
                row.apply(&[Change::put(mark, Vec::new())])?;
            }
            row.get(&place, &mut bytes)?;
            Ok(bytes.first_chunk::<8>().map_or(0, |floor| u64::from_be_bytes(*floor)))
        })?;
        self.log_floor.store(floor, Ordering::Release);
        self.clock.pass(floor);
        Ok(())
    }

    /// The store below.
    #[must_use]
    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Milliseconds since 1970.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.store.now_ms()
    }

    /// When it was opened.
    #[must_use]
    pub fn started_ms(&self) -> u64 {
        self.started_ms
    }

    /// Whether changes are logged.
    #[must_use]
    pub fn logs(&self) -> bool {
        self.log_bytes > 0
    }

    /// Deletes what the log keeps too much of.
    ///
    /// Errors: the store's.
    pub fn trim_log(&self) -> Result<()> {
        log::trim(self, self.log_bytes)
    }

    /// A number no other operation has.
    pub fn operation(&self) -> u64 {
        self.next_operation.fetch_add(1, Ordering::Relaxed)
    }

    /// All databases by name.
    #[must_use]
    pub fn databases(&self) -> Vec<Arc<Database>> {
        self.databases.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// A database, if it is there.
    #[must_use]
    pub fn database(&self, name: &str) -> Option<Arc<Database>> {
        self.databases.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// A database, made if it is not there.
    ///
    /// Errors: a name that cannot be one, the store's.
    pub fn database_or_new(&self, name: &str) -> Result<Arc<Database>> {
        if let Some(known) = self.database(name) {
            return Ok(known);
        }
        check_database_name(name)?;
        let _guard = lock(&self.changing);
        if let Some(known) = self.database(name) {
            return Ok(known);
        }
        let mut all = self.databases.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = all.keys().find(|other| other.eq_ignore_ascii_case(name)) {
            return fail(
                Code::DatabaseDiffersInCase,
                format!(
                    "db already exists with different case already have: [{other}] trying to create [{name}]"
                ),
            );
        }
        if all.len() >= MOST_COLLECTIONS {
            all.retain(|_, known| is_used(known));
        }
        if all.len() >= MOST_COLLECTIONS {
            return fail(Code::OperationFailed, "too many databases");
        }
        let made = Arc::new(Database::new(name, Vec::new(), 1, false, &self.memory));
        all.insert(name.to_owned(), Arc::clone(&made));
        Ok(made)
    }

    /// Locks the row of a database for `work`.
    ///
    /// Errors: those of `work`; failing to persist.
    pub fn with<R>(
        &self,
        database: &Database,
        work: impl FnOnce(&mut dyn Backing) -> Result<R>,
    ) -> Result<R> {
        let mut applied = false;
        let result = with_row(&*self.store, database.row(), |row| {
            let mut row = Noting { row, history: &database.history, applied: false };
            let result = work(&mut row);
            applied = row.applied;
            result
        });
        // What only reads wakes no reader: it would wake itself.
        if applied {
            self.changed.notify_waiters();
        }
        result
    }

    /// Locks the row of a database for a part of an operation, which may belong to a transaction.
    ///
    /// Errors: those of `work`; failing to persist; a transaction that ended.
    pub fn within<R>(
        &self,
        database: &Database,
        operation: &Operation,
        work: impl FnOnce(&mut dyn Backing) -> Result<R>,
    ) -> Result<R> {
        match &operation.transaction {
            Some(shared) => transaction::within(self, shared, database, work),
            None => self.with(database, work),
        }
    }

    /// Makes the entry of a database that tells of it after a restart.
    fn announce(&self, database: &Database) -> Result<()> {
        if !database.announced.load(Ordering::Acquire) {
            let key = word(kind::CATALOG, database.row());
            with_row(&*self.store, SYSTEM_ROW, |row| row.apply(&[Change::put(key, Vec::new())]))?;
            database.announced.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Makes a collection.
    ///
    /// Errors: [`Code::NamespaceExists`], names and options that cannot be, the store's.
    pub fn create(
        &self,
        database: &Database,
        name: &str,
        options: &Document,
    ) -> Result<Arc<Collection>> {
        check_collection_name(&database.name, name)?;
        let _guard = lock(&database.changing);
        if let Some(known) = database.collection(name) {
            return fail(
                Code::NamespaceExists,
                format!("Collection {} already exists.", known.namespace),
            );
        }
        if database.collections().len() >= MOST_COLLECTIONS {
            return fail(
                Code::OperationFailed,
                format!("a database holds at most {MOST_COLLECTIONS} collections"),
            );
        }
        let mut made = Collection::new(&database.name, name, database.take_id(), options)?;
        if made.capped.is_some() {
            let mut index =
                Index::parse(&doc! { "key": { "_id": 1 }, "name": "_id_", "unique": true })?;
            index.given.remove("unique");
            (index.id, index.ready, index.unique) = (database.take_id(), true, true);
            made.indexes.push(Arc::new(index));
        }
        made.figures.counted.store(true, Ordering::Relaxed);
        // Last: what is refused before leaves no name in the store.
        self.announce(database)?;
        self.with(database, |row| {
            let mut changes =
                vec![Change::put(made.catalog_key(), made.stored()?), numbers(database)];
            changes.extend(log::of_catalog(self, database, doc! { "create": name })?);
            row.apply(&changes)?;
            Ok(database.put(made))
        })
    }

    /// A collection, made if it is not there.
    ///
    /// Errors: as [`Engine::create`].
    pub fn collection_or_new(&self, database: &Database, name: &str) -> Result<Arc<Collection>> {
        match database.collection(name) {
            Some(known) => Ok(known),
            None => match self.create(database, name, &Document::new()) {
                Err(error) if error.code == Code::NamespaceExists => {
                    database.collection(name).ok_or_else(|| {
                        QueryError::new(
                            Code::NamespaceNotFound,
                            "the collection was dropped meanwhile",
                        )
                    })
                }
                other => other,
            },
        }
    }

    /// Puts other options in place of a collection's.
    ///
    /// Errors: options that cannot be, the store's.
    pub fn change_options(
        &self,
        database: &Database,
        name: &str,
        options: &Document,
    ) -> Result<()> {
        let _guard = lock(&database.changing);
        self.with(database, |row| {
            let old = existing(database, name)?;
            let new = Collection::new(&database.name, name, old.id, options)?;
            let new = Collection {
                uuid: old.uuid,
                indexes: old.indexes.clone(),
                figures: Arc::clone(&old.figures),
                ..new
            };
            row.apply(&[Change::put(new.catalog_key(), new.stored()?)])?;
            database.put(new);
            Ok(())
        })
    }

    /// Drops a collection; what is left of it is deleted after the catalog forgot it.
    ///
    /// Errors: the store's. `None` when there is none.
    pub fn drop_collection(
        &self,
        database: &Database,
        name: &str,
    ) -> Result<Option<Arc<Collection>>> {
        let guard = lock(&database.changing);
        let dropped = self.with(database, |row| {
            let Some(known) = database.collection(name) else { return Ok(None) };
            let mut changes = vec![Change::delete(known.catalog_key())];
            changes.extend(leavings(&known));
            changes.extend(log::of_catalog(self, database, doc! { "drop": name })?);
            row.apply(&changes)?;
            Ok(database.remove(name))
        })?;
        drop(guard);
        if dropped.is_some() {
            self.end_leavings(database);
        }
        Ok(dropped)
    }

    /// Deletes what was dropped; what cannot be deleted now is deleted later.
    pub fn end_leavings(&self, database: &Database) {
        if let Err(error) = self.finish_leavings(database) {
            tracing::warn!(database = database.name, %error, "what was dropped cannot be deleted yet");
        }
    }

    /// Drops a database; false when there was none.
    ///
    /// Errors: the store's.
    pub fn drop_database(&self, name: &str) -> Result<bool> {
        let Some(database) = self.database(name) else { return Ok(false) };
        let existed = !database.collections().is_empty();
        for collection in database.collections() {
            self.drop_collection(&database, &collection.name)?;
        }
        if existed {
            self.with(&database, |row| {
                row.apply(&log::of_catalog(self, &database, doc! { "dropDatabase": 1 })?).map(drop)
            })?;
        }
        Ok(existed)
    }

    /// Gives a collection another name, in place of one that has it where `drop_target` says so.
    ///
    /// Errors: no such collection, a name that is taken.
    pub fn rename(
        &self,
        database: &Database,
        from: &str,
        to: &str,
        drop_target: bool,
    ) -> Result<()> {
        check_collection_name(&database.name, to)?;
        let guard = lock(&database.changing);
        let dropped = self.with(database, |row| {
            let old = existing(database, from)?;
            let target = database.collection(to);
            if target.is_some() && !drop_target {
                return fail(Code::NamespaceExists, "target namespace exists");
            }
            let namespace = format!("{}.{to}", database.name);
            let new = Collection { namespace, name: to.to_owned(), ..(*old).clone() };
            let mut changes = vec![
                Change::delete(old.catalog_key()),
                Change::put(new.catalog_key(), new.stored()?),
            ];
            // In one batch with the name: a crash leaves the old target or the new one.
            changes.extend(target.iter().flat_map(|target| leavings(target)));
            changes.extend(log::of_catalog(
                self,
                database,
                doc! { "renameCollection": from, "to": to },
            )?);
            row.apply(&changes)?;
            database.remove(from);
            database.put(new);
            Ok(target.is_some())
        })?;
        drop(guard);
        if dropped {
            self.end_leavings(database);
        }
        Ok(())
    }

    /// Deletes what dropped collections and indexes left, a slice at a time.
    ///
    /// Errors: the store's.
    pub fn finish_leavings(&self, database: &Database) -> Result<()> {
        loop {
            let more = self.with(database, |row| {
                let mut next = None;
                row.range(
                    &Stretch::of_prefix(&word(kind::NUMBERS, b"leaving")),
                    false,
                    &mut |key, _| {
                        next = Some(key.to_vec());
                        ControlFlow::Break(())
                    },
                )?;
                let Some(mark) = next else { return Ok(false) };
                let (mut changes, mut bytes) = (Vec::new(), 0);
                row.range(
                    &Stretch::of_prefix(&mark[1 + b"leaving".len()..]),
                    false,
                    &mut |key, _| {
                        changes.push(Change::delete(key.to_vec()));
                        bytes += key.len();
                        if changes.len() >= SLICE || bytes >= DELETED_BYTES {
                            ControlFlow::Break(())
                        } else {
                            ControlFlow::Continue(())
                        }
                    },
                )?;
                if changes.len() < SLICE && bytes < DELETED_BYTES {
                    changes.push(Change::delete(mark));
                }
                row.apply(&changes)?;
                Ok(true)
            })?;
            if !more {
                return Ok(());
            }
        }
    }

    /// Documents of a collection and their bytes.
    ///
    /// Errors: the store's.
    pub fn count(&self, database: &Database, collection: &Collection) -> Result<(i64, i64)> {
        let figures = &collection.figures;
        if !figures.counted.load(Ordering::Acquire) {
            self.with(database, |row| {
                if figures.counted.load(Ordering::Acquire) {
                    return Ok(());
                }
                let (mut documents, mut bytes) = (0, 0);
                let all = Stretch::of_prefix(&numbered(kind::RECORD, collection.id, &[]));
                row.range(&all, false, &mut |_, value| {
                    documents += 1;
                    bytes += value.len() as i64;
                    ControlFlow::Continue(())
                })?;
                figures.documents.store(documents, Ordering::Relaxed);
                figures.bytes.store(bytes, Ordering::Relaxed);
                figures.counted.store(true, Ordering::Release);
                Ok(())
            })?;
        }
        Ok((figures.documents.load(Ordering::Relaxed), figures.bytes.load(Ordering::Relaxed)))
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a database is more than a name that a failed command left behind. The table's lock is held,
/// so a database that nothing else refers to stays so.
fn is_used(database: &Arc<Database>) -> bool {
    Arc::strong_count(database) > 1
        || database.announced.load(Ordering::Acquire)
        || !database.collections().is_empty()
}

/// A collection that has to be there.
///
/// Errors: [`Code::NamespaceNotFound`].
pub fn existing(database: &Database, name: &str) -> Result<Arc<Collection>> {
    database.collection(name).ok_or_else(|| {
        QueryError::new(
            Code::NamespaceNotFound,
            format!("ns does not exist: {}.{name}", database.name),
        )
    })
}

fn numbers(database: &Database) -> Change {
    let next = database.next_id.load(Ordering::Relaxed);
    Change::put(word(kind::NUMBERS, b"next"), next.to_be_bytes().to_vec())
}

/// Marks that a collection's documents and index entries are to be deleted.
fn leavings(collection: &Collection) -> Vec<Change> {
    let mut marks = vec![leaving(kind::RECORD, collection.id)];
    marks.extend(collection.indexes.iter().map(|index| leaving(kind::INDEX, index.id)));
    marks
}

/// What only this node knows, made when it is first asked for.
fn secret(row: &mut dyn Backing) -> Result<[u8; 32]> {
    let (place, mut bytes) = (word(kind::NUMBERS, b"secret"), Vec::new());
    if row.get(&place, &mut bytes)?
        && let Some(known) = bytes.first_chunk::<32>()
    {
        return Ok(*known);
    }
    let made: [u8; 32] = rand::random();
    row.apply(&[Change::put(place, made.to_vec())])?;
    Ok(made)
}

/// A mark that everything below a number is to be deleted.
fn leaving(kind: u8, number: u32) -> Change {
    let mut mark = word(self::kind::NUMBERS, b"leaving");
    mark.extend(numbered(kind, number, &[]));
    Change::put(mark, Vec::new())
}

/// A mark that everything of a kind is to be deleted.
fn leaving_all(kind: u8) -> Change {
    let mut mark = word(self::kind::NUMBERS, b"leaving");
    mark.push(kind);
    Change::put(mark, Vec::new())
}

fn load(name: &str, row: &mut dyn Backing, memory: &Arc<Memory>) -> Result<Database> {
    let mut stored = Vec::new();
    row.range(&Stretch::of_prefix(&[kind::CATALOG]), false, &mut |key, value| {
        stored.push((String::from_utf8_lossy(&key[1..]).into_owned(), value.to_vec()));
        ControlFlow::Continue(())
    })?;
    let mut collections = Vec::new();
    for (collection, bytes) in stored {
        collections.push(Collection::load(name, &collection, &bytes)?);
    }
    let mut bytes = Vec::new();
    let next = match row.get(&word(kind::NUMBERS, b"next"), &mut bytes)? {
        true => bytes.first_chunk::<4>().map_or(1, |next| u32::from_be_bytes(*next)),
        false => 1,
    };
    Ok(Database::new(name, collections, next, true, memory))
}

/// A whole number of a command's field.
#[must_use]
pub fn whole_field(command: &Document, name: &str) -> Option<i64> {
    command.get(name).and_then(|value| match value {
        Bson::Double(value) if value.is_finite() => Some(value.trunc() as i64),
        other => integral(other),
    })
}
