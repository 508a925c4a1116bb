//! What the router knows: the table, the shards, the cursors.
//!
//! A router looks at the table anew once what it has is older than the *lease*, and sends no write by a table of
//! twice that age. A change that moves where documents belong first says so in the table, waits three leases, and
//! then goes on: by then no write that the old table sent is on its way from a router.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use beeline_documents_query::error::Code;
use bson::Document;

use crate::config::ConfigStore;
use crate::error::{Result, refuse};
use crate::merge::Merged;
use crate::shard::{Shard, ShardOptions};
use crate::table::{Sharded, Table};

/// How long a write waits for a change of its collection.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// How a router works.
#[derive(Clone, Debug)]
pub struct RouterOptions {
    /// Where the routing table is kept: addresses of the store, apart by commas.
    pub config: String,
    /// How old a table may be that is used.
    pub lease: Duration,
    /// Cursors open at once.
    pub most_cursors: usize,
    /// A cursor unused for so long is closed.
    pub cursor_timeout: Duration,
    /// How shards are reached.
    pub shard: ShardOptions,
}

/// What a router did so far.
#[derive(Debug, Default)]
pub struct RouterCounts {
    /// Commands.
    pub commands: AtomicU64,
    /// Commands that were refused, here or by a shard.
    pub failed: AtomicU64,
    /// Operations that one shard answered.
    pub targeted: AtomicU64,
    /// Operations that several were asked for.
    pub scattered: AtomicU64,
    /// Times the table was read.
    pub reads: AtomicU64,
}

#[derive(Debug)]
struct Known {
    table: Arc<Table>,
    read_at: Instant,
}

/// A table, and until when writes may be sent by it.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) table: Arc<Table>,
    pub(crate) before: Instant,
}

#[derive(Debug)]
struct Slot {
    /// `None` while a command works on it.
    cursor: Option<Merged>,
    namespace: String,
    used: Instant,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Router {
    pub(crate) options: RouterOptions,
    pub(crate) config: ConfigStore,
    known: Mutex<Option<Known>>,
    reading: tokio::sync::Mutex<()>,
    shards: Mutex<HashMap<String, Arc<Shard>>>,
    cursors: Mutex<HashMap<i64, Slot>>,
    /// What it did.
    pub counts: RouterCounts,
    pub(crate) started: Instant,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Router {
    /// A router; it asks nobody before the first command.
    #[must_use]
    pub fn new(options: RouterOptions) -> Self {
        let store = Shard::new("config", &options.config, None, &options.shard);
        Self {
            options,
            config: ConfigStore::new(store),
            known: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
            shards: Mutex::default(),
            cursors: Mutex::default(),
            counts: RouterCounts::default(),
            started: Instant::now(),
        }
    }

    fn fresh(&self) -> Option<View> {
        let known = lock(&self.known);
        let known = known.as_ref().filter(|known| known.read_at.elapsed() < self.options.lease)?;
        let before = known.read_at + 2 * self.options.lease;
        Some(View { table: Arc::clone(&known.table), before })
    }

    /// The table.
    ///
    /// Errors: the configuration store's, where what is known is too old.
    pub(crate) async fn view(&self) -> Result<View> {
        if let Some(view) = self.fresh() {
            return Ok(view);
        }
        let _one = self.reading.lock().await;
        if let Some(view) = self.fresh() {
            return Ok(view);
        }
        let read_at = Instant::now();
        let table = Arc::new(self.config.read().await?);
        self.counts.reads.fetch_add(1, Ordering::Relaxed);
        *lock(&self.known) = Some(Known { table: Arc::clone(&table), read_at });
        Ok(View { table, before: read_at + 2 * self.options.lease })
    }

    /// The next command reads the table.
    pub(crate) fn forget_table(&self) {
        *lock(&self.known) = None;
    }

    /// Waits until no write is on its way that was sent by a table before now.
    pub(crate) async fn settle(&self) {
        tokio::time::sleep(3 * self.options.lease).await;
        self.forget_table();
    }

    /// A shard of the table.
    ///
    /// Errors: [`Code::ShardNotFound`].
    pub(crate) fn shard(&self, table: &Table, name: &str) -> Result<Arc<Shard>> {
        let Some(address) = table.shards.get(name) else {
            return refuse(Code::ShardNotFound, format!("Shard {name} not found"));
        };
        let mut shards = lock(&self.shards);
        if let Some(known) = shards.get(name).filter(|known| known.address() == address) {
            return Ok(Arc::clone(known));
        }
        let made = Shard::new(name, address, Some(table.cluster), &self.options.shard);
        if let Some(old) = shards.insert(name.to_owned(), Arc::clone(&made)) {
            old.close();
        }
        Ok(made)
    }

    /// The shard of a database's collections that are not sharded; `None`: there is no such database.
    ///
    /// Errors: [`Code::ShardNotFound`].
    pub(crate) fn primary(&self, table: &Table, database: &str) -> Result<Option<Arc<Shard>>> {
        match table.databases.get(database) {
            Some(name) => self.shard(table, name).map(Some),
            None => Ok(None),
        }
    }

    /// A table by which a collection may be written.
    ///
    /// Errors: the configuration store's; it is being changed for too long.
    pub(crate) async fn view_to_write(&self, namespace: &str) -> Result<View> {
        let began = Instant::now();
        loop {
            let view = self.view().await?;
            let busy = |sharded: &Sharded| {
                sharded.preparing || sharded.chunks.iter().any(|chunk| chunk.moving)
            };
            if !view.table.collections.get(namespace).is_some_and(busy) {
                return Ok(view);
            }
            if began.elapsed() > PATIENCE {
                return refuse(
                    Code::ConflictingOperationInProgress,
                    format!("{namespace} is being sharded, moved or dropped; try again"),
                );
            }
            tokio::time::sleep(LOOK).await;
            self.forget_table();
        }
    }

    /// Keeps a cursor; returns its number.
    ///
    /// Errors: too many are open.
    pub(crate) fn keep(&self, cursor: Merged) -> Result<i64> {
        let mut cursors = lock(&self.cursors);
        if cursors.len() >= self.options.most_cursors {
            let most = self.options.most_cursors;
            return refuse(
                Code::ExceededMemoryLimit,
                format!("{most} cursors are open, which is the limit; close some"),
            );
        }
        let id = loop {
            let id = rand::random::<i64>() & i64::MAX;
            if id != 0 && !cursors.contains_key(&id) {
                break id;
            }
        };
        let (namespace, used) = (cursor.namespace(), Instant::now());
        cursors.insert(id, Slot { cursor: Some(cursor), namespace, used });
        Ok(id)
    }

    /// Takes a cursor out to work on it.
    ///
    /// Errors: [`Code::CursorNotFound`], [`Code::CursorInUse`].
    pub(crate) fn take_cursor(&self, id: i64, namespace: &str) -> Result<Merged> {
        let mut cursors = lock(&self.cursors);
        let Some(slot) = cursors.get_mut(&id).filter(|slot| slot.namespace == namespace) else {
            return refuse(Code::CursorNotFound, format!("cursor id {id} not found"));
        };
        match slot.cursor.take() {
            Some(cursor) => Ok(cursor),
            None => refuse(Code::CursorInUse, format!("cursor id {id} is already in use")),
        }
    }

    /// Puts a cursor back that has more; it is closed where it was killed meanwhile.
    pub(crate) async fn put_back(&self, id: i64, cursor: Merged) -> bool {
        let killed = match lock(&self.cursors).get_mut(&id) {
            Some(slot) => {
                slot.used = Instant::now();
                slot.cursor = Some(cursor);
                None
            }
            None => Some(cursor),
        };
        let is_there = killed.is_none();
        if let Some(cursor) = killed {
            cursor.close().await;
        }
        is_there
    }

    /// Forgets a cursor; what it has open in the shards, unless a command works on it.
    pub(crate) fn forget_cursor(&self, id: i64, namespace: Option<&str>) -> (bool, Option<Merged>) {
        let mut cursors = lock(&self.cursors);
        let own = |slot: &Slot| namespace.is_none_or(|namespace| slot.namespace == namespace);
        if !cursors.get(&id).is_some_and(own) {
            return (false, None);
        }
        (true, cursors.remove(&id).and_then(|slot| slot.cursor))
    }

    /// Closes cursors whose time is up; returns how many.
    pub async fn expire(&self) -> usize {
        let timeout = self.options.cursor_timeout;
        let over: Vec<Merged> = {
            let mut cursors = lock(&self.cursors);
            let late = |slot: &Slot| slot.cursor.is_some() && slot.used.elapsed() >= timeout;
            let ids: Vec<i64> =
                cursors.iter().filter(|(_, slot)| late(slot)).map(|(id, _)| *id).collect();
            ids.iter().filter_map(|id| cursors.remove(id)?.cursor).collect()
        };
        let count = over.len();
        for cursor in over {
            cursor.close().await;
        }
        count
    }

    /// Cursors that are open.
    #[must_use]
    pub fn cursors(&self) -> usize {
        lock(&self.cursors).len()
    }

    /// Ends: commands under way are answered, threads end.
    pub fn close(&self) {
        for shard in lock(&self.shards).values() {
            shard.close();
        }
        self.config.store().close();
    }

    /// Asks several shards at once; the replies in their order, or the first refusal.
    ///
    /// Errors: a shard's.
    pub(crate) async fn scatter(
        &self,
        database: &str,
        asked: Vec<(Arc<Shard>, Document)>,
        before: Option<Instant>,
    ) -> Result<Vec<(Arc<Shard>, Document)>> {
        let count = if asked.len() > 1 { &self.counts.scattered } else { &self.counts.targeted };
        count.fetch_add(1, Ordering::Relaxed);
        let tasks: Vec<_> = asked
            .into_iter()
            .map(|(shard, command)| {
                let database = database.to_owned();
                tokio::spawn(async move {
                    let reply = shard.ask_before(&database, command, before).await;
                    (shard, reply)
                })
            })
            .collect();
        let (mut replies, mut refused) = (Vec::with_capacity(tasks.len()), None);
        for task in tasks {
            match task.await {
                Ok((shard, Ok(reply))) => replies.push((shard, reply)),
                Ok((_, Err(error))) => refused = refused.or(Some(error)),
                Err(_) => {
                    refused =
                        refused
                            .or(refuse::<()>(Code::InternalError, "a task of the router ended")
                                .err())
                }
            }
        }
        match refused {
            None => Ok(replies),
            Some(error) => Err(error),
        }
    }
}
