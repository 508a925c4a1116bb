//! What a member of a replica set knows of the store, kept in step with what it applies.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use beeline_documents_query::error::Result;

use super::{Engine, load};
use crate::catalog::{Collection, Database};
use crate::layout::{SYSTEM_ROW, kind};
use crate::replica::store::Rows;
use crate::store::{Stretch, with_row};

impl Engine {
    fn known_or_new(&self, name: &str) -> Arc<Database> {
        let mut all = self.databases.write().unwrap_or_else(PoisonError::into_inner);
        let database = all
            .entry(name.to_owned())
            .or_insert_with(|| Arc::new(Database::new(name, Vec::new(), 1, true, &self.memory)));
        database.announced.store(true, Ordering::Release);
        Arc::clone(database)
    }

    /// Takes note of changes that another member made, while their rows are locked.
    pub(crate) fn take_in(&self, rows: &Rows) {
        for (row, changes) in rows {
            if row == SYSTEM_ROW {
                for key in changes.keys() {
                    match key.first() {
                        Some(&kind::CATALOG) => {
                            self.known_or_new(&String::from_utf8_lossy(&key[1..]));
                        }
                        Some(&kind::RECORD) => {
                            self.users_changed.fetch_add(1, Ordering::AcqRel);
                        }
                        _ => {}
                    }
                }
                continue;
            }
            let database = self.known_or_new(&String::from_utf8_lossy(row));
            for (key, value) in changes {
                match (key.first(), value) {
                    (Some(&kind::CATALOG), value) => {
                        take_collection(
                            &database,
                            &String::from_utf8_lossy(&key[1..]),
                            value.as_deref(),
                        );
                    }
                    (Some(&kind::NUMBERS), Some(value)) if &key[1..] == b"next" => {
                        if let Some(next) = value.first_chunk::<4>() {
                            database.next_id.store(u32::from_be_bytes(*next), Ordering::Relaxed);
                        }
                    }
                    _ => {}
                }
            }
            for collection in database.collections() {
                let mut head = vec![kind::RECORD];
                head.extend(collection.id.to_be_bytes());
                let touched = changes.range(head.clone()..).next();
                if touched.is_some_and(|(key, _)| key.starts_with(&head)) {
                    collection.figures.counted.store(false, Ordering::Release);
                    collection.figures.next_record.store(0, Ordering::Relaxed);
                }
            }
        }
        self.changed.notify_waiters();
    }

    /// Reads everything anew: the store holds other documents now.
    ///
    /// Errors: the store's, descriptions that cannot be read.
    pub(crate) fn reload(&self) -> Result<()> {
        let mut names = Vec::new();
        with_row(&*self.store, SYSTEM_ROW, |row| {
            row.range(&Stretch::of_prefix(&[kind::CATALOG]), false, &mut |key, _| {
                names.push(String::from_utf8_lossy(&key[1..]).into_owned());
                ControlFlow::Continue(())
            })
        })?;
        let mut databases = BTreeMap::new();
        for name in names {
            let database =
                with_row(&*self.store, name.as_bytes(), |row| load(&name, row, &self.memory))?;
            databases.insert(name, Arc::new(database));
        }
        *self.databases.write().unwrap_or_else(PoisonError::into_inner) = databases;
        self.cursors.forget_all();
        self.users_changed.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// The time up to which change streams may tell of changes: what a majority has, in a replica set.
    #[must_use]
    pub fn told_until(&self) -> u64 {
        match self.replica.get() {
            Some(replica) => replica.commit().min(replica.store.reached()),
            None => self.clock.last(),
        }
    }

    /// The time from which on a change stream tells that begins now.
    #[must_use]
    pub fn told_from(&self) -> u64 {
        self.replica.get().map_or_else(|| self.clock.last(), |replica| replica.store.reached())
    }
}

fn take_collection(database: &Database, name: &str, stored: Option<&[u8]>) {
    let Some(stored) = stored else {
        database.remove(name);
        return;
    };
    match Collection::load(&database.name, name, stored) {
        Ok(mut new) => {
            if let Some(old) = database.collection(name).filter(|old| old.id == new.id) {
                new.figures = Arc::clone(&old.figures);
            }
            database.put(new);
        }
        Err(error) => {
            tracing::error!(%error, collection = name, "a collection's description cannot be read");
        }
    }
}
