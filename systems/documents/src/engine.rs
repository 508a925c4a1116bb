//! The databases of a node, and what commands do to them under the lock of a row.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use beeline_documents_query::error::{Code, QueryError, Result, fail};
use beeline_documents_query::value::integral;
use bson::{Bson, Document, doc};

use crate::catalog::{
    Collection, Database, Index, MOST_INDEXES, check_collection_name, check_database_name,
};
use crate::cursor::Cursors;
use crate::index::{entries, entry_key, entry_value};
use crate::layout::{NUMBERED, SYSTEM_ROW, kind, numbered, word};
use crate::log;
use crate::retry::Retry;
use crate::scan::{SLICE, decode};
use crate::stats::DocumentsMetrics;
use crate::store::{Backing, Change, Store, Stretch, with_row};
use crate::write;

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
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            most_cursors: 100_000,
            cursor_timeout_ms: 600_000,
            log_bytes: 64 << 20,
            authentication: false,
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
    /// Index builds under way: namespace and index, documents looked at, documents there were.
    pub builds: Mutex<HashMap<(String, String), (u64, u64)>>,
    next_operation: AtomicU64,
    started_ms: u64,
    /// The time of the log.
    pub clock: log::Clock,
    log_bytes: u64,
    /// Clients must show who they are.
    pub authentication: bool,
    /// Woken when something was logged.
    pub changed: tokio::sync::Notify,
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
        let mut databases = BTreeMap::new();
        for name in names {
            let database = with_row(&*store, name.as_bytes(), |row| load(&name, row))?;
            databases.insert(name, Arc::new(database));
        }
        let engine = Arc::new(Self {
            databases: RwLock::new(databases),
            changing: Mutex::default(),
            retrying: std::array::from_fn(|_| Mutex::default()),
            cursors: Cursors::new(options),
            metrics: Arc::default(),
            builds: Mutex::default(),
            next_operation: AtomicU64::new(1),
            started_ms: store.now_ms(),
            clock: log::Clock::default(),
            log_bytes: options.log_bytes,
            authentication: options.authentication,
            changed: tokio::sync::Notify::new(),
            store,
        });
        for database in engine.databases() {
            engine.finish_leavings(&database)?;
            engine.clock.pass(engine.with(&database, |row| log::last(row))?);
        }
        engine.clock.next(engine.now_ms());
        Ok(engine)
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
            return fail(Code::OperationFailed, "too many databases");
        }
        let made = Arc::new(Database::new(name, Vec::new(), 1, false));
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
        let result = with_row(&*self.store, database.row(), work);
        if self.logs() {
            self.changed.notify_waiters();
        }
        result
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
        self.announce(database)?;
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
        let _guard = lock(&database.changing);
        let dropped = self.with(database, |row| {
            let Some(known) = database.collection(name) else { return Ok(None) };
            let mut changes =
                vec![Change::delete(known.catalog_key()), leaving(kind::RECORD, known.id)];
            changes.extend(known.indexes.iter().map(|index| leaving(kind::INDEX, index.id)));
            changes.extend(log::of_catalog(self, database, doc! { "drop": name })?);
            row.apply(&changes)?;
            Ok(database.remove(name))
        })?;
        if dropped.is_some() {
            self.finish_leavings(database)?;
        }
        Ok(dropped)
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
        if database.collection(to).is_some() {
            if !drop_target {
                return fail(Code::NamespaceExists, "target namespace exists");
            }
            existing(database, from)?;
            self.drop_collection(database, to)?;
        }
        let _guard = lock(&database.changing);
        self.with(database, |row| {
            let old = existing(database, from)?;
            let namespace = format!("{}.{to}", database.name);
            let new = Collection { namespace, name: to.to_owned(), ..(*old).clone() };
            let mut changes = vec![
                Change::delete(old.catalog_key()),
                Change::put(new.catalog_key(), new.stored()?),
            ];
            changes.extend(log::of_catalog(
                self,
                database,
                doc! { "renameCollection": from, "to": to },
            )?);
            row.apply(&changes)?;
            database.remove(from);
            database.put(new);
            Ok(())
        })
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
                let mut changes = Vec::new();
                row.range(
                    &Stretch::of_prefix(&mark[1 + b"leaving".len()..]),
                    false,
                    &mut |key, _| {
                        changes.push(Change::delete(key.to_vec()));
                        if changes.len() >= SLICE {
                            ControlFlow::Break(())
                        } else {
                            ControlFlow::Continue(())
                        }
                    },
                )?;
                if changes.len() < SLICE {
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

    /// Makes indexes: writers keep them up from the start, the planner sees each once all documents
    /// that were there are in it. Returns how many there were before and are now.
    ///
    /// Errors: specifications that cannot be, contradict an index that is there, or that documents
    /// do not fit; none of the new ones is left then.
    pub fn create_indexes(
        &self,
        database: &Database,
        name: &str,
        wanted: Vec<Index>,
    ) -> Result<(usize, usize)> {
        let (mut made, before) = (Vec::new(), existing(database, name)?.indexes.len());
        {
            let _guard = lock(&database.changing);
            self.with(database, |row| {
                let old = existing(database, name)?;
                let mut indexes = old.indexes.clone();
                for mut index in wanted {
                    if is_known(&indexes, &index)? {
                        continue;
                    }
                    if indexes.len() + 2 > MOST_INDEXES {
                        return fail(
                            Code::CannotCreateIndex,
                            format!(
                                "add index fails, too many indexes for {} key:{}",
                                old.namespace,
                                index.key()
                            ),
                        );
                    }
                    index.id = database.take_id();
                    made.push(index.id);
                    indexes.push(Arc::new(index));
                }
                if !made.is_empty() {
                    let new = old.with_indexes(indexes);
                    row.apply(&[Change::put(new.catalog_key(), new.stored()?), numbers(database)])?;
                    database.put(new);
                }
                Ok(())
            })?;
        }
        for id in &made {
            if let Err(error) = self.build(database, name, *id) {
                for id in &made {
                    self.remove_index(database, name, *id)?;
                }
                self.finish_leavings(database)?;
                return Err(error);
            }
        }
        let after = existing(database, name)?.indexes.len();
        Ok((before, after))
    }

    /// Puts what is there into a new index, a slice at a time.
    fn build(&self, database: &Database, name: &str, id: u32) -> Result<()> {
        let of = |collection: &Collection| {
            collection.indexes.iter().find(|index| index.id == id).cloned().ok_or_else(|| {
                QueryError::new(Code::IndexNotFound, "the index was dropped while it was built")
            })
        };
        let collection = existing(database, name)?;
        let label = (collection.namespace.clone(), of(&collection)?.name.clone());
        let whole = self.count(database, &collection)?.0.max(0) as u64;
        let mut behind: Option<Vec<u8>> = None;
        let mut looked = 0;
        let outcome = loop {
            lock(&self.builds).insert(label.clone(), (looked, whole));
            let step = self.with(database, |row| {
                let collection = existing(database, name)?;
                let index = of(&collection)?;
                let mut slice: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
                let mut rest = Stretch::of_prefix(&numbered(kind::RECORD, collection.id, &[]));
                if let Some(behind) = &behind {
                    rest.from = std::ops::Bound::Excluded(behind.clone());
                }
                row.range(&rest, false, &mut |key, value| {
                    slice.push((key.to_vec(), value.to_vec()));
                    if slice.len() >= SLICE / 2 {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                })?;
                let mut changes = Vec::new();
                let mut multikey = false;
                for (key, bytes) in &slice {
                    let record = &key[NUMBERED..];
                    let document = decode(bytes)?;
                    let found = entries(&index, &document)?;
                    multikey |= found.multikey;
                    for values in &found.keys {
                        if index.unique {
                            write::check_unique(
                                row,
                                &collection,
                                &index,
                                values,
                                record,
                                &document,
                            )?;
                            // The next document of the slice must see this one.
                            row.apply(&[Change::put(
                                entry_key(id, values, record),
                                entry_value(record),
                            )])?;
                        } else {
                            changes.push(Change::put(
                                entry_key(id, values, record),
                                entry_value(record),
                            ));
                        }
                    }
                }
                let done = slice.len() < SLICE / 2;
                if done || multikey && !index.multikey {
                    let new = write::with_index(&collection, id, |index| {
                        index.multikey |= multikey;
                        index.ready |= done;
                    });
                    changes.push(Change::put(new.catalog_key(), new.stored()?));
                    row.apply(&changes)?;
                    database.put(new);
                } else {
                    row.apply(&changes)?;
                }
                Ok((done, slice.len(), slice.pop().map(|(key, _)| key)))
            });
            match step {
                Ok((done, count, last)) => {
                    looked += count as u64;
                    behind = last.or(behind);
                    if done {
                        break Ok(());
                    }
                }
                Err(error) => break Err(error),
            }
        };
        lock(&self.builds).remove(&label);
        outcome
    }

    /// Drops an index by number.
    ///
    /// Errors: the store's.
    pub fn remove_index(&self, database: &Database, name: &str, id: u32) -> Result<()> {
        let _guard = lock(&database.changing);
        self.with(database, |row| {
            let old = existing(database, name)?;
            let indexes = old.indexes.iter().filter(|index| index.id != id).cloned().collect();
            let new = old.with_indexes(indexes);
            row.apply(&[Change::put(new.catalog_key(), new.stored()?), leaving(kind::INDEX, id)])?;
            database.put(new);
            Ok(())
        })
    }

    /// Changes an index in place.
    ///
    /// Errors: the store's.
    pub fn change_index(
        &self,
        database: &Database,
        name: &str,
        id: u32,
        change: impl FnOnce(&mut Index),
    ) -> Result<()> {
        let _guard = lock(&database.changing);
        self.with(database, |row| {
            let new = write::with_index(&*existing(database, name)?, id, change);
            row.apply(&[Change::put(new.catalog_key(), new.stored()?)])?;
            database.put(new);
            Ok(())
        })
    }

    /// Ends builds that a crash cut short.
    ///
    /// Errors: the store's.
    pub fn finish_builds(&self) -> Result<()> {
        for database in self.databases() {
            for collection in database.collections() {
                for index in collection.indexes.iter().filter(|index| !index.ready) {
                    if let Err(error) = self.build(&database, &collection.name, index.id) {
                        tracing::warn!(index = index.name, collection = collection.namespace, %error, "an index build that was cut short cannot end; the index is dropped");
                        self.remove_index(&database, &collection.name, index.id)?;
                    }
                }
            }
        }
        Ok(())
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

fn is_known(indexes: &[Arc<Index>], wanted: &Index) -> Result<bool> {
    for known in indexes {
        let same_key = known.key() == wanted.key();
        if known.name == wanted.name {
            if same_key && known.given == wanted.given {
                return Ok(true);
            }
            let code =
                if same_key { Code::IndexOptionsConflict } else { Code::IndexKeySpecsConflict };
            return fail(
                code,
                format!(
                    "An existing index has the same name as the requested index. When index names are not specified, they are auto generated and can cause conflicts. Please refer to our documentation. Requested index: {}, existing index: {}",
                    wanted.shown(),
                    known.shown()
                ),
            );
        }
        if same_key
            && known.partial.as_ref().map(|(filter, _)| filter)
                == wanted.partial.as_ref().map(|(filter, _)| filter)
            && known.sparse == wanted.sparse
            && known.unique == wanted.unique
        {
            return fail(
                Code::IndexOptionsConflict,
                format!("Index already exists with a different name: {}", known.name),
            );
        }
        if same_key && known.partial.is_none() && wanted.partial.is_none() {
            return fail(
                Code::IndexOptionsConflict,
                format!(
                    "An equivalent index already exists with different options: {}",
                    known.name
                ),
            );
        }
    }
    // The index on `_id` is always there.
    if wanted.fields.len() == 1
        && wanted.fields[0].0 == ["_id"]
        && wanted.fields[0].1 == crate::catalog::Direction::Up
    {
        return Ok(true);
    }
    Ok(false)
}

fn numbers(database: &Database) -> Change {
    let next = database.next_id.load(Ordering::Relaxed);
    Change::put(word(kind::NUMBERS, b"next"), next.to_be_bytes().to_vec())
}

/// A mark that everything below a number is to be deleted.
fn leaving(kind: u8, number: u32) -> Change {
    let mut mark = word(self::kind::NUMBERS, b"leaving");
    mark.extend(numbered(kind, number, &[]));
    Change::put(mark, Vec::new())
}

fn load(name: &str, row: &mut dyn Backing) -> Result<Database> {
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
    Ok(Database::new(name, collections, next, true))
}

/// A whole number of a command's field.
#[must_use]
pub fn whole_field(command: &Document, name: &str) -> Option<i64> {
    command.get(name).and_then(|value| match value {
        Bson::Double(value) if value.is_finite() => Some(value.trunc() as i64),
        other => integral(other),
    })
}
