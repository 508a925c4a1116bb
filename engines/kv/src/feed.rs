//! The change feed: what was committed lately, in the order of versions.
//!
//! ```text
//! append ─▶ a shard's log: events that wait ── commit ─▶ ring of the shard ─┐
//! flush, clear, drop ───────────────────────── persisted ─▶ ring of the store ┴▶ merged by version
//! ```
//!
//! A reader names a position, the version up to which it knows everything, and gets what came after, as
//! far as nothing smaller can still be committed. It reads by polling; the feed knows no readers. The
//! rings hold the latest events in a bounded piece of memory and say what they dropped: a reader that
//! fell behind is told where to begin anew, and so is a reader that comes back after an opening.
//!
//! Invariants:
//! - Nothing is in a ring that is not persisted.
//! - A ring's `floor` is set before any version was given out for what waits in its log. A reader looks
//!   at the newest version first and at the floors then, behind the same locks; so a version below all
//!   floors it saw is in a ring or will never be.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use beeline_pmem::PmemError;

use crate::shard::Shard;
use crate::space::IN_ROWS;
use crate::store::Store;
use crate::{KvError, SYSTEM_NAMESPACE, Version};

/// Least bytes that a ring keeps.
const LEAST_BYTES: u64 = 64 << 10;

/// What happened to a key or a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// It has another value.
    Put {
        /// Encoding of the value; 1: the head of a Redis hash.
        kind: u8,
        /// Bytes of the value.
        value_length: u32,
        /// Wall-clock time of expiry in milliseconds, 0 = never.
        expires_at_ms: u64,
    },
    /// Its expiry changed, and its value did not.
    Expiry {
        /// Wall-clock time of expiry in milliseconds, 0 = never.
        expires_at_ms: u64,
    },
    /// It was deleted, or expired, or gave way to others.
    Delete,
    /// An entry was appended to the stream that the key names.
    Append {
        /// Its place in the stream.
        position: u64,
        /// Bytes of the value.
        value_length: u32,
    },
    /// The stream that the key names was cut off in front.
    Truncate {
        /// Least position that is there.
        first: u64,
    },
    /// Every key of a row was deleted; the event's key is the row, without a sub-key.
    DeleteRow,
    /// Every key of the namespace was deleted; the event has no key.
    Clear,
}

/// Something that was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its version; larger is later.
    pub version: Version,
    /// The namespace, by its number; 0 to 15 are the databases.
    pub namespace: u32,
    /// The key, by row its length, row and sub-key; of a field of a Redis hash the hash's key.
    pub key: Box<[u8]>,
    /// Bytes at the end of `key` that are the name of a field of a Redis hash.
    pub field_length: Option<u16>,
    /// What happened.
    pub kind: EventKind,
    /// The next event of this ring was committed with it, all or none.
    pub more: bool,
}

impl Event {
    fn bytes(&self) -> u64 {
        (size_of::<Self>() + self.key.len()) as u64
    }

    /// The key, and the name of a hash's field.
    #[must_use]
    pub fn key_and_field(&self) -> (&[u8], Option<&[u8]>) {
        match self.field_length {
            Some(length) => {
                let at = self.key.len().saturating_sub(usize::from(length));
                (&self.key[..at], Some(&self.key[at..]))
            }
            None => (&self.key, None),
        }
    }
}

/// What a reader gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// In the order of versions.
    pub events: Vec<Event>,
    /// The position to go on from: everything up to it was seen.
    pub next: Version,
}

/// What the feed holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeedStats {
    /// Bytes it may hold; 0: there is none.
    pub limit_bytes: u64,
    /// Bytes it holds.
    pub bytes: u64,
    /// Events it holds.
    pub events: u64,
    /// Events dropped to make room since the opening.
    pub dropped: u64,
    /// The least position that a reader may go on from.
    pub oldest: Version,
    /// The position of a reader that has seen everything; where a ring dropped something newer than what
    /// another still has to tell, that of a reader that reads what is there from now on. Everything up
    /// to it is stored.
    pub newest: Version,
}

#[derive(Debug, Default)]
struct Ring {
    events: VecDeque<Event>,
    bytes: u64,
    /// Newest version that was dropped, or was there before the feed.
    dropped_to: Version,
    dropped: u64,
    /// What waits to be persisted has this version or a larger one.
    floor: Option<Version>,
}

impl Ring {
    fn push(&mut self, event: Event) {
        self.bytes += event.bytes();
        self.events.push_back(event);
    }

    fn shrink(&mut self, limit_bytes: u64) {
        while self.bytes > limit_bytes
            && let Some(event) = self.events.pop_front()
        {
            self.bytes -= event.bytes();
            self.dropped_to = self.dropped_to.max(event.version);
            self.dropped += 1;
        }
    }
}

/// The rings of a store: one for each shard's log, the last one for what concerns all of them.
#[derive(Debug)]
pub(crate) struct Feed {
    rings: Vec<Mutex<Ring>>,
    limit_bytes: u64,
}

/// What a shard's log holds back until it is persisted.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    events: Vec<Event>,
    floor: bool,
    /// An entry that is not stored yet gets this version or a larger one: making room for it may
    /// commit what was stored before.
    under_way: Option<Version>,
    /// What is written now is no change: rest of what was deleted before.
    pub muted: bool,
}

impl Feed {
    /// `None` where nothing is to be kept.
    pub fn new(shards: usize, limit_bytes: u64) -> Option<Self> {
        let rings = (0..=shards).map(|_| Mutex::default()).collect();
        (limit_bytes > 0).then_some(Self { rings, limit_bytes })
    }

    fn ring(&self, at: usize) -> MutexGuard<'_, Ring> {
        self.rings[at].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring_limit(&self) -> u64 {
        (self.limit_bytes / (self.rings.len() as u64 - 1)).max(LEAST_BYTES)
    }

    fn all(&self) -> Vec<MutexGuard<'_, Ring>> {
        // In order of index, as every other holder of two would have to.
        (0..self.rings.len()).map(|at| self.ring(at)).collect()
    }

    /// Forgets everything: what is there now did not come by events.
    pub fn begin_anew(&self, at: Version) {
        for mut ring in self.all() {
            ring.dropped += ring.events.len() as u64;
            ring.events.clear();
            ring.bytes = 0;
            ring.dropped_to = ring.dropped_to.max(at);
        }
    }

    /// Something that concerns a whole namespace is about to get a version.
    pub fn before_clear(&self, store: &Store) {
        let mut ring = self.ring(self.rings.len() - 1);
        ring.floor.get_or_insert(store.newest_version() + 1);
    }

    /// It has it, and is persisted; or, without a version, was refused.
    pub fn after_clear(&self, version: Option<Version>, namespaces: impl Iterator<Item = u32>) {
        let mut ring = self.ring(self.rings.len() - 1);
        ring.floor = None;
        let Some(version) = version else { return };
        for namespace in namespaces {
            ring.push(Event {
                version,
                namespace,
                key: Box::default(),
                field_length: None,
                kind: EventKind::Clear,
                more: false,
            });
        }
        ring.shrink(LEAST_BYTES);
    }
}

/// Namespace, key and field as a reader knows them.
fn named(namespace: u32, key: &[u8]) -> (u32, Box<[u8]>, Option<u16>) {
    if crate::expiries::is_expiries(namespace) {
        let key = key.get(2..).unwrap_or_default();
        return (crate::rows::database_of(namespace), key.into(), None);
    }
    if !crate::rows::is_fields(namespace) {
        return (namespace & !IN_ROWS, key.into(), None);
    }
    let [row, field] = crate::rows::agreed_key(namespace, key);
    // The row's length stands before it.
    let key = [row.get(2..).unwrap_or_default(), field].concat();
    (crate::rows::database_of(namespace), key.into(), Some(field.len() as u16))
}

impl Shard {
    /// Called before an entry gets its version.
    #[inline]
    fn feed_before(&mut self) {
        let Some(feed) = &self.store.feed else { return };
        let least = self.store.newest_version() + 1;
        self.waiting.under_way = Some(least);
        if !self.waiting.floor {
            self.waiting.floor = true;
            feed.ring(self.index).floor.get_or_insert(least);
        }
    }

    /// The version of an entry about to be stored.
    #[inline]
    pub(crate) fn version_for_feed(&mut self) -> Result<Version, PmemError> {
        self.feed_before();
        self.store.next_version().inspect_err(|_| self.feed_refused())
    }

    /// Called where the entry that was about to be stored is not.
    pub(crate) fn feed_refused(&mut self) {
        self.waiting.under_way = None;
        self.feed_rest();
    }

    /// Where nothing waits to be persisted, no commit may follow: readers need not wait for one.
    #[inline]
    pub(crate) fn feed_rest(&mut self) {
        if self.waiting.floor && !self.in_batch() && self.log.is_persisted() {
            self.feed_committed();
        }
    }

    /// Called with what was stored; it is told once it is persisted.
    #[inline]
    pub(crate) fn feed_note(
        &mut self,
        version: Version,
        namespace: u32,
        key: &[u8],
        kind: EventKind,
    ) {
        if self.store.feed.is_none() {
            return;
        }
        self.waiting.under_way = None;
        if self.waiting.muted || namespace == SYSTEM_NAMESPACE {
            return;
        }
        let more = self.in_batch();
        let (namespace, key, field_length) = named(namespace, key);
        self.waiting.events.push(Event { version, namespace, key, field_length, kind, more });
    }

    /// The batch that wrote the latest events is whole.
    pub(crate) fn feed_end_batch(&mut self) {
        if let Some(last) = self.waiting.events.last_mut() {
            last.more = false;
        }
    }

    /// Everything that was stored is persisted: now it is told.
    #[inline]
    pub(crate) fn feed_committed(&mut self) {
        if !self.waiting.floor {
            return;
        }
        self.waiting.floor = self.waiting.under_way.is_some();
        let Some(feed) = &self.store.feed else { return };
        let mut ring = feed.ring(self.index);
        ring.floor = self.waiting.under_way;
        // Those of this commit stay, whatever they take.
        let own: u64 = self.waiting.events.iter().map(Event::bytes).sum();
        ring.shrink(feed.ring_limit().saturating_sub(own));
        self.waiting.events.drain(..).for_each(|event| ring.push(event));
    }

    /// What was stored will never be persisted by this shard.
    pub(crate) fn feed_given_up(&mut self) {
        self.waiting = Waiting::default();
        if let Some(feed) = &self.store.feed {
            feed.ring(self.index).floor = None;
        }
    }
}

impl Store {
    /// Up to `limit` events behind `from`, in the order of versions; none where nothing happened.
    ///
    /// `from` is a position: 0 only right after the store was made, else what an earlier call
    /// returned as `next`, or [`FeedStats::newest`]. A reader that wants to know everything takes the
    /// newest position first, reads what is there, and follows from that position.
    ///
    /// Errors: [`KvError::FeedOff`]; [`KvError::FeedLost`] where `from` is older than what is kept, or
    /// no position of this store: it names the position to begin anew from.
    pub fn events(&self, from: Version, limit: usize) -> Result<Events, KvError> {
        let feed = self.feed.as_ref().ok_or(KvError::FeedOff)?;
        let newest = self.newest_version();
        let rings = feed.all();
        let settled = settled(newest, &rings);
        let kept_from = kept_from(&rings);
        if from < kept_from || from > newest {
            let newest = settled.max(kept_from);
            return Err(KvError::FeedLost { position: from, oldest: kept_from, newest });
        }
        let limit = limit.max(1);
        let mut found: Vec<&Event> = Vec::new();
        for ring in &rings {
            // A ring is in order of versions: the log's. One clearing of all databases is an event of
            // each of them, of one version: these stay together.
            let first = ring.events.partition_point(|event| event.version <= from);
            let wanted = ring.events.range(first..).take(limit + usize::from(crate::DATABASES));
            found.extend(wanted.take_while(|event| event.version <= settled));
        }
        found.sort_by_key(|event| event.version);
        let whole = found.len() <= limit;
        let last = found.get(limit - 1).map(|event| event.version);
        let reach = if whole { None } else { last };
        let events: Vec<Event> = found
            .into_iter()
            .filter(|event| reach.is_none_or(|reach| event.version <= reach))
            .cloned()
            .collect();
        Ok(Events { events, next: reach.unwrap_or(settled).max(from) })
    }

    /// No events, and the newest position ([`FeedStats::newest`]): where a reader begins.
    ///
    /// Errors: [`KvError::FeedOff`].
    pub fn events_from_now(&self) -> Result<Events, KvError> {
        if self.feed.is_none() {
            return Err(KvError::FeedOff);
        }
        Ok(Events { events: Vec::new(), next: self.feed_stats().newest })
    }

    /// What the change feed holds.
    #[must_use]
    pub fn feed_stats(&self) -> FeedStats {
        let Some(feed) = &self.feed else { return FeedStats::default() };
        let newest = self.newest_version();
        let rings = feed.all();
        FeedStats {
            limit_bytes: feed.limit_bytes,
            bytes: rings.iter().map(|ring| ring.bytes).sum(),
            events: rings.iter().map(|ring| ring.events.len() as u64).sum(),
            dropped: rings.iter().map(|ring| ring.dropped).sum(),
            oldest: kept_from(&rings),
            newest: settled(newest, &rings).max(kept_from(&rings)),
        }
    }
}

/// The least position that a reader may go on from.
fn kept_from(rings: &[MutexGuard<'_, Ring>]) -> Version {
    rings.iter().map(|ring| ring.dropped_to).max().unwrap_or(0)
}

/// The version up to which everything is persisted and told.
fn settled(newest: Version, rings: &[MutexGuard<'_, Ring>]) -> Version {
    let floors = rings.iter().filter_map(|ring| ring.floor);
    floors.map(|floor| floor - 1).fold(newest, Version::min)
}
