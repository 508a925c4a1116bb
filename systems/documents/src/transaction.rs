//! Transactions over several documents of one database.
//!
//! A transaction reads the row of its database as it was when the transaction began
//! ([`crate::versions`]), and its own changes on top, which it keeps in memory. Its commit is one batch of
//! the store: log entries and the outcome of the commit are in it. If a key that the transaction wrote
//! was changed by another since, the later of the two ends with a write conflict, and its client
//! begins again (snapshot isolation, the first to commit wins).
//!
//! Invariants: nothing of a transaction is in the store before its commit, all of it after; a commit
//! that is sent again does nothing again, also after a crash; locks are taken in the order
//! transaction, row, history.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::memory::{Lease, Memory};

use crate::catalog::{Collection, Database, Figures};
use crate::engine::{Engine, lock};
use crate::index::record_of;
use crate::layout::{NUMBERED, kind, numbered, word};
use crate::log;
use crate::retry::Retry;
use crate::store::{Backing, Change, Stretch, Visitor, with_row};
use crate::versions::History;

/// Sessions remembered at most whose transaction ended.
const MOST_SESSIONS: usize = 100_000;
/// How long a session's last transaction is remembered.
const REMEMBERED_MS: u64 = 30 * 60 * 1000;

/// A transaction that the commands of a session share.
pub type Shared = Arc<Mutex<Transaction>>;

/// How far a transaction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It takes commands.
    Open,
    /// What it did is there.
    Committed,
    /// What it did is nowhere.
    Aborted,
}

/// What a transaction saw of a collection: its number, its indexes and whether each was built.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    id: u32,
    indexes: Vec<(u32, bool)>,
}

impl Seen {
    fn of(collection: &Collection) -> Self {
        let indexes = collection.indexes.iter().map(|index| (index.id, index.ready)).collect();
        Self { id: collection.id, indexes }
    }

    /// Whether entries for the same indexes would be written.
    fn writes_as(&self, other: &Self) -> bool {
        self.id == other.id
            && self.indexes.iter().map(|(id, _)| id).eq(other.indexes.iter().map(|(id, _)| id))
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Transaction {
    /// The session's number of it.
    pub number: i64,
    state: State,
    began_ms: u64,
    used_ms: u64,
    /// Its database, and the batch it began at, since its first command.
    place: Option<(Arc<Database>, u64)>,
    /// What it wrote.
    own: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    /// What the log will say of it, with times that are none yet.
    log: Vec<Vec<u8>>,
    figures: Vec<(Arc<Figures>, i64, i64)>,
    seen: BTreeMap<String, Seen>,
    /// Collections that it made itself.
    made: BTreeSet<u32>,
    /// A database that was not there when it was first asked for.
    missed: Option<String>,
    lease: Lease,
}

fn conflict<T>(what: &str) -> Result<T> {
    fail(
        Code::WriteConflict,
        format!(
            "Caused by :: Write conflict during plan execution and yielding is disabled. {what} :: Please retry your operation or multi-document transaction."
        ),
    )
}

impl Transaction {
    fn new(number: i64, now_ms: u64, memory: &Arc<Memory>) -> Self {
        Self {
            number,
            state: State::Open,
            began_ms: now_ms,
            used_ms: now_ms,
            place: None,
            own: BTreeMap::new(),
            log: Vec::new(),
            figures: Vec::new(),
            seen: BTreeMap::new(),
            made: BTreeSet::new(),
            missed: None,
            lease: Lease::of(&Memory::of_operation(memory)),
        }
    }

    /// How far it is.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Ends it; what it wrote is forgotten.
    fn end(&mut self, state: State) {
        self.state = state;
        if let Some((database, at)) = self.place.take() {
            lock(&database.history).end(at);
        }
        self.own = BTreeMap::new();
        (self.log, self.figures) = (Vec::new(), Vec::new());
        (self.seen, self.made, self.missed) = (BTreeMap::new(), BTreeSet::new(), None);
        self.lease.shrink_to(0);
    }

    /// Ends it without a trace, if it is open.
    pub fn abort(&mut self) {
        if self.state == State::Open {
            self.end(State::Aborted);
        }
    }

    fn check_open(&self) -> Result<()> {
        match self.state {
            State::Open => Ok(()),
            State::Committed => fail(
                Code::TransactionCommitted,
                format!("Transaction with {{ txnNumber: {} }} has been committed.", self.number),
            ),
            State::Aborted => no_such(self.number),
        }
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Refuses a transaction that is not there.
pub fn no_such<T>(number: i64) -> Result<T> {
    fail(
        Code::NoSuchTransaction,
        format!("Given transaction number {number} does not match any in-progress transactions."),
    )
}

/// The row of a database as a transaction sees it.
struct View<'v> {
    row: &'v mut dyn Backing,
    history: &'v mut History,
    at: u64,
    transaction: &'v mut Transaction,
}

impl View<'_> {
    fn known(&self, key: &[u8]) -> Option<Option<&[u8]>> {
        match self.transaction.own.get(key) {
            Some(own) => Some(own.as_deref()),
            None => self.history.at(key, self.at),
        }
    }
}

impl Backing for View<'_> {
    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool> {
        match self.known(key) {
            Some(known) => {
                out.clear();
                out.extend_from_slice(known.unwrap_or_default());
                Ok(known.is_some())
            }
            None => self.row.get(key, out),
        }
    }

    fn range(&mut self, stretch: &Stretch, backward: bool, visit: &mut Visitor<'_>) -> Result<()> {
        if stretch.is_empty() {
            return Ok(());
        }
        let mut patch: BTreeMap<&[u8], Option<&[u8]>> = self.history.of(stretch, self.at).collect();
        let bounds =
            (stretch.from.as_ref().map(Vec::as_slice), stretch.to.as_ref().map(Vec::as_slice));
        for (key, value) in self.transaction.own.range::<[u8], _>(bounds) {
            patch.insert(key, value.as_deref());
        }
        let mut patch: Vec<(&[u8], Option<&[u8]>)> = patch.into_iter().collect();
        if backward {
            patch.reverse();
        }
        let mut patch = patch.into_iter().peekable();
        let before = |a: &[u8], b: &[u8]| if backward { a > b } else { a < b };
        let mut stopped = false;
        self.row.range(stretch, backward, &mut |key, value| {
            while let Some((other, own)) = patch.next_if(|(other, _)| before(other, key)) {
                if let Some(own) = own
                    && visit(other, own).is_break()
                {
                    stopped = true;
                    return ControlFlow::Break(());
                }
            }
            let seen = match patch.next_if(|(other, _)| *other == key) {
                Some((_, own)) => own,
                None => Some(value),
            };
            match seen.map(|value| visit(key, value)) {
                Some(ControlFlow::Break(())) => {
                    stopped = true;
                    ControlFlow::Break(())
                }
                _ => ControlFlow::Continue(()),
            }
        })?;
        for (key, own) in patch {
            if stopped {
                break;
            }
            stopped = own.is_some_and(|own| visit(key, own).is_break());
        }
        Ok(())
    }

    fn apply(&mut self, changes: &[Change]) -> Result<Option<usize>> {
        for (at, change) in changes.iter().enumerate() {
            if self.history.changed_since(&change.key, self.at) {
                return conflict("Another write changed what this one is about");
            }
            if change.absent && self.get(&change.key, &mut Vec::new())? {
                return Ok(Some(at));
            }
        }
        let bytes = changes
            .iter()
            .map(|one| one.key.len() + one.value.as_ref().map_or(0, Vec::len) + 96)
            .sum();
        self.transaction.lease.grow(bytes, Memory::alone)?;
        for change in changes {
            match (&change.value, change.key.first()) {
                (Some(entry), Some(&kind::LOG)) => self.transaction.log.push(entry.clone()),
                _ => drop(self.transaction.own.insert(change.key.clone(), change.value.clone())),
            }
        }
        Ok(None)
    }

    fn apply_at_once(&mut self, changes: &[Change]) -> Result<()> {
        self.history.apply(self.row, changes).map(drop)
    }

    fn buffers(&self) -> bool {
        true
    }

    fn count(&mut self, figures: &Arc<Figures>, documents: i64, bytes: i64) {
        self.transaction.figures.push((Arc::clone(figures), documents, bytes));
    }

    fn enter(&mut self, collection: &Collection) -> Result<()> {
        if collection.capped.is_some() {
            return fail(
                Code::OperationNotSupportedInTransaction,
                "a transaction cannot use a capped collection",
            );
        }
        let now = Seen::of(collection);
        let same = match self.transaction.seen.get(&collection.name) {
            Some(seen) => *seen == now,
            // One that another made since was not there, and the one that has its name may be another.
            None => {
                self.transaction.made.contains(&now.id)
                    || self.history.at(&collection.catalog_key(), self.at).is_none()
            }
        };
        if !same {
            return catalog_changed();
        }
        self.transaction.seen.entry(collection.name.clone()).or_insert(now);
        Ok(())
    }

    fn miss(&mut self, name: &str) -> Result<()> {
        let was_there = matches!(
            self.history.at(&word(kind::CATALOG, name.as_bytes()), self.at),
            Some(Some(_))
        );
        if was_there || self.transaction.seen.contains_key(name) {
            return catalog_changed();
        }
        Ok(())
    }
}

fn catalog_changed<T>() -> Result<T> {
    fail(
        Code::SnapshotUnavailable,
        "Unable to read from a snapshot due to pending collection catalog changes; please retry the operation.",
    )
}

fn another_database<T>(own: &str, wanted: &str) -> Result<T> {
    fail(
        Code::OperationNotSupportedInTransaction,
        format!(
            "a transaction of this server stays within one database, which lies in one shard: this one uses '{own}' and cannot use '{wanted}'"
        ),
    )
}

/// Notes that a transaction asked for a database that is not there.
///
/// Errors: a transaction that ended; one of another database.
pub fn miss(engine: &Engine, shared: &Shared, name: &str) -> Result<()> {
    let mut transaction = lock(shared);
    transaction.check_open()?;
    transaction.used_ms = engine.now_ms();
    let own = transaction.place.as_ref().map(|(own, _)| &own.name);
    match own.or(transaction.missed.as_ref()) {
        Some(own) if own != name => another_database(own, name),
        Some(_) => Ok(()),
        None => {
            transaction.missed = Some(name.to_owned());
            Ok(())
        }
    }
}

/// Notes that a transaction made a collection.
pub fn made(shared: &Shared, id: u32) {
    lock(shared).made.insert(id);
}

/// Runs a part of a transaction under the lock of its row.
///
/// Errors: those of `work`; a transaction that ended; one of another database.
pub fn within<R>(
    engine: &Engine,
    shared: &Shared,
    database: &Database,
    work: impl FnOnce(&mut dyn Backing) -> Result<R>,
) -> Result<R> {
    let mut transaction = lock(shared);
    transaction.check_open()?;
    transaction.used_ms = engine.now_ms();
    if let Some((own, _)) = &transaction.place
        && own.name != database.name
    {
        return another_database(&own.name, &database.name);
    }
    match &transaction.missed {
        Some(own) if *own != database.name => return another_database(own, &database.name),
        // It was not there when the transaction began.
        Some(_) if !database.collections().is_empty() && transaction.made.is_empty() => {
            return catalog_changed();
        }
        _ => transaction.missed = None,
    }
    with_row(engine.store(), database.row(), |row| {
        let mut history = lock(&database.history);
        if transaction.place.is_none()
            && let Some(own) = engine.database(&database.name)
        {
            transaction.place = Some((own, history.begin()));
        }
        let Some((_, at)) = transaction.place else { return no_such(transaction.number) };
        if history.is_lost(at) {
            return fail(
                Code::SnapshotUnavailable,
                "the transaction is too old: what it would read is no longer kept",
            );
        }
        work(&mut View { row, history: &mut history, at, transaction: &mut transaction })
    })
}

/// Commits, once.
///
/// Errors: a write conflict, after which the transaction is no more; the store's.
pub fn commit(engine: &Engine, shared: &Shared, session: &[u8]) -> Result<()> {
    let mut transaction = lock(shared);
    if transaction.state == State::Committed {
        return Ok(());
    }
    transaction.check_open()?;
    let Some((database, at)) = transaction.place.clone() else {
        transaction.end(State::Committed);
        return Ok(());
    };
    let done = if transaction.own.is_empty() {
        Ok(())
    } else {
        with_row(engine.store(), database.row(), |row| {
            let mut history = lock(&database.history);
            check(&transaction, &database, at, row, &history)?;
            let mut changes: Vec<Change> = std::mem::take(&mut transaction.own)
                .into_iter()
                .map(|(key, value)| Change { key, value, absent: false })
                .collect();
            for entry in std::mem::take(&mut transaction.log) {
                changes.push(log::at_time(engine, &entry)?);
            }
            let retry =
                Retry { session: session.to_vec(), number: transaction.number, statement: 0 };
            changes.push(retry.committed(engine.now_ms())?);
            history.apply(row, &changes)?;
            for (figures, documents, bytes) in std::mem::take(&mut transaction.figures) {
                figures.add(documents, bytes);
            }
            Ok(())
        })
    };
    // What failed left nothing: a batch is applied whole or not at all.
    transaction.end(if done.is_ok() { State::Committed } else { State::Aborted });
    engine.changed.notify_waiters();
    done
}

/// Whether what a transaction wrote can go onto what is there now.
fn check(
    transaction: &Transaction,
    database: &Database,
    at: u64,
    row: &mut dyn Backing,
    history: &History,
) -> Result<()> {
    if history.is_lost(at) || transaction.own.keys().any(|key| history.changed_since(key, at)) {
        return conflict("Another write changed what this transaction wrote");
    }
    let mut unique = Vec::new();
    for (name, seen) in &transaction.seen {
        let known = database.collection(name);
        let Some(known) = known.filter(|known| seen.writes_as(&Seen::of(known))) else {
            return conflict("A collection or its indexes changed since the transaction began");
        };
        unique.extend(known.indexes.iter().filter(|index| index.unique).map(|index| index.id));
    }
    // Two transactions may give one value to documents of theirs: no key is written by both.
    for id in unique {
        let prefix = numbered(kind::INDEX, id, &[]);
        let own =
            transaction.own.range(prefix.clone()..).take_while(|(key, _)| key.starts_with(&prefix));
        for (key, value) in own {
            let Some(value) = value else { continue };
            let record = record_of(key, value);
            let values = &key[NUMBERED..key.len() - record.len()];
            let mut taken = false;
            row.range(
                &Stretch::of_prefix(&numbered(kind::INDEX, id, values)),
                false,
                &mut |other, value| {
                    let gone = matches!(transaction.own.get(other), Some(None));
                    taken = !gone && record_of(other, value) != record;
                    if taken { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                },
            )?;
            if taken {
                return conflict("Another write took a value of a unique index");
            }
        }
    }
    Ok(())
}

/// The transactions of a node's sessions.
#[derive(Debug)]
pub struct Transactions {
    /// By session, with the transaction's number.
    sessions: Mutex<HashMap<Vec<u8>, (i64, Shared)>>,
    lifetime_ms: u64,
}

impl Transactions {
    /// None; each may last so long.
    #[must_use]
    pub fn new(lifetime_ms: u64) -> Self {
        Self { sessions: Mutex::default(), lifetime_ms }
    }

    /// How long one may last, milliseconds.
    #[must_use]
    pub fn lifetime_ms(&self) -> u64 {
        self.lifetime_ms
    }

    /// Ends all that are open, and forgets how others ended: another node takes writes now, and what was committed
    /// here may be taken back. The store says what was committed.
    pub fn abort_all(&self) {
        let all = std::mem::take(&mut *lock(&self.sessions));
        all.into_values().for_each(|(_, known)| lock(&known).abort());
    }

    /// The newest transaction of a session.
    #[must_use]
    pub fn of(&self, session: &[u8]) -> Option<Shared> {
        lock(&self.sessions).get(session).map(|(_, known)| Arc::clone(known))
    }

    /// Begins one; an older one of the session ends.
    ///
    /// Errors: a number that is not newer, too many sessions.
    pub fn begin(&self, engine: &Engine, session: &[u8], number: i64) -> Result<Shared> {
        let made = Transaction::new(number, engine.now_ms(), &engine.memory);
        let made = Arc::new(Mutex::new(made));
        // Looked up and put in under one lock: two connections may begin one of the same session at once.
        let mut sessions = lock(&self.sessions);
        match sessions.get(session) {
            Some((newest, _)) if *newest > number => {
                return fail(
                    Code::TransactionTooOld,
                    format!(
                        "Cannot start transaction {number} on session because a newer transaction {newest} has already started on this session."
                    ),
                );
            }
            Some((newest, _)) if *newest == number => {
                return fail(
                    Code::ConflictingOperationInProgress,
                    format!(
                        "Cannot start a transaction at given transaction number {number}: a transaction with the same number was begun already"
                    ),
                );
            }
            _ => {}
        }
        if sessions.len() >= MOST_SESSIONS {
            // Those that ended are remembered only while there is room.
            sessions.retain(|_, (_, known)| {
                known.try_lock().map_or(true, |known| known.state == State::Open)
            });
        }
        if sessions.len() >= MOST_SESSIONS && !sessions.contains_key(session) {
            return fail(Code::ExceededMemoryLimit, "too many sessions have transactions");
        }
        let replaced = sessions.insert(session.to_vec(), (number, Arc::clone(&made)));
        drop(sessions);
        if let Some((_, replaced)) = replaced {
            lock(&replaced).abort();
        }
        Ok(made)
    }

    /// Ends those of a session that are older than a number.
    pub fn pass(&self, session: &[u8], number: i64) {
        if let Some(known) = self.of(session) {
            let mut known = lock(&known);
            if known.number < number {
                known.abort();
            }
        }
    }

    /// Ends those of a session.
    pub fn end(&self, session: &[u8]) {
        let known = lock(&self.sessions).remove(session);
        if let Some((_, known)) = known {
            lock(&known).abort();
        }
    }

    /// Whether one lasts too long; it is ended then.
    pub fn is_overdue(&self, shared: &Shared, now_ms: u64) -> bool {
        let mut transaction = lock(shared);
        let overdue = transaction.state == State::Open
            && now_ms.saturating_sub(transaction.began_ms) >= self.lifetime_ms;
        if overdue {
            transaction.abort();
        }
        overdue
    }

    /// Ends those that last too long, forgets those that ended long ago; returns how many it ended.
    pub fn expire(&self, now_ms: u64) -> usize {
        let all: Vec<(Vec<u8>, Shared)> = lock(&self.sessions)
            .iter()
            .map(|(session, (_, shared))| (session.clone(), Arc::clone(shared)))
            .collect();
        let mut ended = 0;
        for (session, shared) in all {
            ended += usize::from(self.is_overdue(&shared, now_ms));
            let old = {
                let transaction = lock(&shared);
                transaction.state != State::Open
                    && now_ms.saturating_sub(transaction.used_ms) >= REMEMBERED_MS
            };
            let mut sessions = lock(&self.sessions);
            if old && sessions.get(&session).is_some_and(|(_, known)| Arc::ptr_eq(known, &shared)) {
                sessions.remove(&session);
            }
        }
        ended
    }
}

/// Whether a transaction of a session was committed before the node started.
///
/// Errors: the store's.
pub fn was_committed(engine: &Engine, session: &[u8], number: i64) -> Result<bool> {
    let retry = Retry { session: session.to_vec(), number, statement: 0 };
    for database in engine.databases() {
        if engine.with(&database, |row| retry.was_committed(row))? {
            return Ok(true);
        }
    }
    Ok(false)
}
