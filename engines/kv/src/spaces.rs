//! The indexes of one shard by namespace.
//!
//! The sixteen databases and the system's namespace have their places; what services create is
//! found by number. A namespace of a service has an index as a database has, and an ordered one has
//! its keys in order beside it.

use std::cell::Cell;
use std::sync::Arc;

use crate::INDEXES;
use crate::counted::Counted;
use crate::index::Index;
use crate::ordered::Ordered;
use crate::service_rows::RowRecords;
use crate::space_limit::Account;
use crate::streams::Streams;

/// A namespace that a service created, in one shard.
#[derive(Debug)]
pub(crate) struct Extra {
    /// With [`crate::space::IN_ROWS`] where keys lie by row.
    pub number: u32,
    pub index: Index,
    pub ordered: Option<Ordered>,
    /// Of a namespace of streams.
    pub streams: Option<Box<Streams>>,
    /// Of rows' fields: how many each row has.
    pub counted: Counted,
    /// Of a namespace with records of its rows.
    pub rows: Option<Box<RowRecords>>,
}

#[derive(Debug)]
pub(crate) struct Spaces {
    first: [Option<Box<Index>>; INDEXES],
    /// In order of number.
    extra: Vec<Extra>,
    /// Where the one lies that was asked for last: a request stays with few.
    last: Cell<usize>,
}

impl Default for Spaces {
    fn default() -> Self {
        Self { first: std::array::from_fn(|_| None), extra: Vec::new(), last: Cell::new(0) }
    }
}

impl Spaces {
    #[inline]
    pub fn get(&self, namespace: u32) -> Option<&Index> {
        match self.first.get(namespace as usize) {
            Some(place) => place.as_deref(),
            None => self.extra(namespace).map(|extra| &extra.index),
        }
    }

    #[inline]
    pub fn get_mut(&mut self, namespace: u32) -> Option<&mut Index> {
        if (namespace as usize) < INDEXES {
            return self.first[namespace as usize].as_deref_mut();
        }
        self.extra_mut(namespace).map(|extra| &mut extra.index)
    }

    /// The index of a namespace, made where there is none yet. What a namespace is, beyond its
    /// number, comes from the catalog.
    #[inline]
    pub fn get_or_insert(&mut self, namespace: u32) -> &mut Index {
        if (namespace as usize) < INDEXES {
            return self.first[namespace as usize].get_or_insert_default();
        }
        if let Ok(at) = self.place(namespace) {
            return &mut self.extra[at].index;
        }
        &mut self.open(namespace).index
    }

    #[inline]
    fn place(&self, namespace: u32) -> Result<usize, usize> {
        let last = self.last.get();
        if self.extra.get(last).is_some_and(|extra| extra.number == namespace) {
            return Ok(last);
        }
        let found = self.extra.binary_search_by_key(&namespace, |extra| extra.number);
        if let Ok(at) = found {
            self.last.set(at);
        }
        found
    }

    #[inline]
    pub fn extra(&self, namespace: u32) -> Option<&Extra> {
        self.place(namespace).ok().and_then(|at| self.extra.get(at))
    }

    #[inline]
    pub fn extra_mut(&mut self, namespace: u32) -> Option<&mut Extra> {
        self.place(namespace).ok().and_then(|at| self.extra.get_mut(at))
    }

    /// A service's namespace, made where there is none.
    pub fn open(&mut self, namespace: u32) -> &mut Extra {
        let at = match self.place(namespace) {
            Ok(at) => at,
            Err(at) => {
                let index = Index::default();
                let ordered = crate::rows::is_fields(namespace).then(Ordered::default);
                let counted = Counted::default();
                let (number, streams, rows) = (namespace, None, None);
                self.extra.insert(at, Extra { number, index, ordered, streams, counted, rows });
                at
            }
        };
        &mut self.extra[at]
    }

    /// The namespaces behind the databases.
    pub fn extras(&self) -> impl Iterator<Item = &Extra> {
        self.extra.iter()
    }

    /// Every namespace's streams.
    pub fn streams(&self) -> impl Iterator<Item = &Streams> {
        self.extra.iter().filter_map(|extra| extra.streams.as_deref())
    }

    /// What all shards hold of a service's namespace.
    pub fn account(&self, namespace: u32) -> Option<&Arc<Account>> {
        self.extra(namespace)?.index.account.as_ref()
    }

    /// Takes the index of a namespace away; a service's namespace stays, empty, with its account.
    pub fn take(&mut self, namespace: u32) -> Option<Box<Index>> {
        if let Some(place) = self.first.get_mut(namespace as usize) {
            return place.take();
        }
        let extra = self.extra_mut(namespace)?;
        if let Some(ordered) = &mut extra.ordered {
            *ordered = Ordered::default();
        }
        extra.counted = Counted::default();
        if let Some(rows) = &mut extra.rows {
            **rows = RowRecords::default();
        }
        let account = extra.index.account.clone();
        let taken = std::mem::take(&mut extra.index);
        extra.index.account = account;
        Some(Box::new(taken))
    }

    /// Removes a service's namespace, whose index was taken.
    pub fn remove(&mut self, namespace: u32) {
        self.extra.retain(|extra| extra.number != namespace);
    }

    /// True when there is any namespace behind the databases.
    #[inline]
    pub fn has_extra(&self) -> bool {
        !self.extra.is_empty()
    }

    /// Numbers of the services' namespaces.
    pub fn extra_numbers(&self) -> Vec<u32> {
        self.extra.iter().map(|extra| extra.number).collect()
    }

    /// Every index there is.
    pub fn all(&self) -> impl Iterator<Item = &Index> {
        let first = self.first.iter().filter_map(Option::as_deref);
        first.chain(self.extra.iter().map(|extra| &extra.index))
    }

    /// Numbers of all namespaces that may have an index.
    pub fn numbers(&self) -> Vec<u32> {
        (0..INDEXES as u32).chain(self.extra_numbers()).collect()
    }

    /// The namespace at a place of an order for sweeps: databases first. `None`: beyond the last.
    pub fn nth(&self, place: usize) -> Option<(u32, Option<&Index>)> {
        match self.first.get(place) {
            Some(index) => Some((place as u32, index.as_deref())),
            None => {
                let extra = self.extra.get(place - INDEXES)?;
                Some((extra.number, Some(&extra.index)))
            }
        }
    }

    /// Bytes of memory of all indexes.
    pub fn memory_bytes(&self) -> u64 {
        let ordered = self.extra.iter().filter_map(|extra| extra.ordered.as_ref());
        self.all().map(Index::memory_bytes).sum::<u64>()
            + ordered.map(Ordered::memory_bytes).sum::<u64>()
            + self.streams().map(Streams::memory_bytes).sum::<u64>()
            + self.extra.iter().map(|extra| extra.counted.memory_bytes()).sum::<u64>()
            + self
                .extra
                .iter()
                .filter_map(|extra| extra.rows.as_ref())
                .map(|rows| rows.memory_bytes())
                .sum::<u64>()
    }
}
