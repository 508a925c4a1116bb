//! What a shard does between requests: collection, active expiry, eviction.
//!
//! Nothing here runs by itself: the shard's thread calls [`Shard::maintain`] in small slices and
//! sleeps until the deadline it returns when there was nothing to do.

use std::sync::atomic::Ordering;

use crate::KvError;
use crate::fault::{self, KnownBug};
use crate::index::{Location, Slot};
use crate::options::Eviction;
use crate::shard::{Maintenance, Shard, read_header, read_key};
use crate::stats;

/// Index pages one slice of expiry looks at.
const PAGES: usize = 4;
/// Pause between slices of one sweep, so that sweeping takes a few percent of a core at most.
const SWEEP_PAUSE_NS: u64 = 10_000_000;
/// Longest sleep while keys wait for expiry: a wall clock may jump.
const LONGEST_SLEEP_MS: u64 = 1000;
/// Pause before looking again at something another thread holds.
const RETRY_NS: u64 = 1_000_000;
/// Pause before a removal is tried again for which the pool had no room.
const FULL_RETRY_NS: u64 = 100_000_000;
/// Slices of an evicted row that a write removes before it goes on above the memory limit.
pub(crate) const SLICES_PER_WRITE: u32 = 4;
/// Of the memory limit, the share by which writes may go beyond it before one of them commits so that
/// fields of evicted rows may go; and the most it may be, in bytes.
const BEYOND_SHARE: u64 = 64;
const BEYOND_BYTES: u64 = 1 << 20;
/// Keys compared for one eviction.
const SAMPLES: usize = 5;
/// Slots looked at for one sample.
const TRIES: usize = 4096;

/// State of the sweep for expired keys.
#[derive(Debug)]
pub(crate) struct Expiry {
    /// No key expires before this, as far as known.
    due_ms: u64,
    /// Namespace, by its place among them ([`crate::spaces::Spaces::nth`]), and page of a sweep
    /// under way.
    at: Option<(usize, usize)>,
    /// Earliest expiry the sweep met so far.
    met_ms: u64,
}

impl Default for Expiry {
    fn default() -> Self {
        // Due at once: recovery does not collect expiry times.
        Self { due_ms: 0, at: None, met_ms: u64::MAX }
    }
}

impl Expiry {
    /// A key will expire at this time.
    #[inline]
    pub fn note(&mut self, expires_at_ms: u64) {
        if expires_at_ms != 0 {
            self.due_ms = self.due_ms.min(expires_at_ms);
            self.met_ms = self.met_ms.min(expires_at_ms);
        }
    }
}

impl Shard {
    /// A key of this shard will expire at this time.
    pub(crate) fn note_expiry(&mut self, expires_at_ms: u64) {
        self.expiry.note(expires_at_ms);
    }

    /// One slice of upkeep: collection, expiry, eviction, at most about `budget_bytes` of copying.
    /// Call it between requests, and again at once while `did_work`.
    ///
    /// Errors: the pool's, [`KvError::Poisoned`].
    pub fn maintain(&mut self, budget_bytes: u64) -> Result<Maintenance, KvError> {
        self.tick();
        let now_ns = self.store.clock.monotonic_ns();
        let (mut did_work, waiting) = match self.collect(budget_bytes) {
            Ok(state) => state,
            // Deletions made room for nothing yet: try again when something was freed.
            Err(KvError::PoolFull { .. }) => (false, true),
            Err(error) => return Err(error),
        };
        let mut deadline = waiting.then_some(now_ns + RETRY_NS);
        let sooner = |deadline: &mut Option<u64>, at: u64| {
            *deadline = Some(deadline.map_or(at, |known| known.min(at)));
        };
        match self.expire_slice() {
            Ok(expired) => did_work |= expired,
            // Not even a tombstone fits: they stay, absent to readers, until something was freed.
            Err(KvError::PoolFull { .. }) => {}
            Err(error) => return Err(error),
        }
        if self.expiry.at.is_some() {
            sooner(&mut deadline, now_ns + SWEEP_PAUSE_NS);
        } else if self.expires_anything() {
            let now_ms = self.deletes_until_ms();
            let wait = self.expiry.due_ms.saturating_sub(now_ms).clamp(10, LONGEST_SLEEP_MS);
            sooner(&mut deadline, now_ns + wait * 1_000_000);
        }
        if let Some(at_ms) = self.next_row_end() {
            let wait = at_ms.saturating_sub(self.deletes_until_ms()).clamp(10, LONGEST_SLEEP_MS);
            sooner(&mut deadline, now_ns + wait * 1_000_000);
        }
        let live = self.live_bytes();
        for swept in [
            self.sweep_hollow_rows(),
            self.sweep_expiries(),
            self.sweep_row_times(),
            self.sweep_rows(true),
            self.sweep_row_ends(true),
        ] {
            match swept {
                Ok(Swept::Nothing) => {}
                Ok(Swept::Some) => did_work = true,
                // The other thread may hold it for long, or have failed for good.
                Ok(Swept::Waiting) => sooner(&mut deadline, now_ns + SWEEP_PAUSE_NS),
                // What is left stays until something was freed.
                Err(KvError::PoolFull { .. }) => sooner(&mut deadline, now_ns + FULL_RETRY_NS),
                Err(error) => return Err(error),
            }
        }
        let limit = self.store.max_memory_bytes();
        // What ended goes first. Keys of services' rows may wait for long, and for a thread that failed for
        // ever: then the limit is kept without them.
        let frees =
            self.ended.holds_fields() || (!self.ended.is_empty() && self.live_bytes() < live);
        if limit != 0 && self.store.memory_bytes() > limit && !frees {
            for _ in 0..16 {
                match self.evict_one(self.store.eviction(), None) {
                    Ok(evicted) => did_work |= evicted,
                    // Not even a tombstone fits: until something was freed.
                    Err(KvError::PoolFull { .. }) => {
                        sooner(&mut deadline, now_ns + FULL_RETRY_NS);
                        break;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        match self.evict_by_namespace() {
            Ok(evicted) => did_work |= evicted,
            Err(KvError::PoolFull { .. }) => sooner(&mut deadline, now_ns + FULL_RETRY_NS),
            Err(error) => return Err(error),
        }
        if did_work && self.batch.is_none() {
            self.commit()?;
        }
        self.feed_rest();
        Ok(Maintenance { did_work, next_deadline_ns: deadline })
    }

    /// Bytes of the entries that hold this shard's keys.
    fn live_bytes(&self) -> u64 {
        self.counters().live_bytes.load(Ordering::Relaxed)
    }

    fn expires_anything(&self) -> bool {
        self.spaces.all().any(|index| index.expiring > 0)
    }

    /// Looks at a few pages for keys whose time is past; true when some were deleted.
    fn expire_slice(&mut self) -> Result<bool, KvError> {
        if self.store.is_replacing() && !fault::is_on(KnownBug::ExpireWhileReplacing) {
            return Ok(false);
        }
        if !self.expires_anything() {
            self.expiry = Expiry { due_ms: u64::MAX, ..Expiry::default() };
            return Ok(false);
        }
        let now = self.deletes_until_ms();
        let (mut space, mut page) = match self.expiry.at {
            Some(at) => at,
            None if self.expiry.due_ms <= now => {
                self.expiry.met_ms = u64::MAX;
                (0, 0)
            }
            None => return Ok(false),
        };
        let mut past: Vec<Slot> = Vec::new();
        for _ in 0..PAGES {
            match self.spaces.nth(space) {
                None => break,
                Some((namespace, Some(index))) if index.expiring > 0 && page < index.pages() => {
                    let expires = |slot: &&Slot| {
                        slot.location.has(Location::EXPIRES) && !slot.location.is_absent()
                    };
                    let slots: Vec<Slot> = index.page(page).filter(expires).copied().collect();
                    for slot in slots {
                        let state = self.cache.get(&self.store.table, slot.location.segment());
                        let header = read_header(state, slot.location.offset());
                        let (at, _) = self.expiry_of(namespace, &slot, &header);
                        if at <= now {
                            past.push(slot);
                        } else {
                            self.expiry.met_ms = self.expiry.met_ms.min(at);
                        }
                    }
                    page += 1;
                }
                _ => (space, page) = (space + 1, 0),
            }
        }
        if self.spaces.nth(space).is_none() {
            self.expiry.due_ms = self.expiry.met_ms;
            self.expiry.at = None;
        } else {
            self.expiry.at = Some((space, page));
        }
        let found = !past.is_empty();
        let mut key = Vec::new();
        for slot in past {
            let deleted = self.delete_slot(&slot, &mut key, Deletion::Expired);
            if !matches!(deleted, Ok(Deleted::Yes | Deleted::Never)) {
                // It was moved to make room for another's tombstone, or there was no room; those
                // behind it may share its fate. The next sweep meets them again.
                self.expiry.note(now);
            }
            deleted?;
        }
        Ok(found)
    }

    /// Deletes the key of a slot, which may have changed since it was copied.
    fn delete_slot(
        &mut self,
        slot: &Slot,
        key: &mut Vec<u8>,
        why: Deletion,
    ) -> Result<Deleted, KvError> {
        // The copy may be outdated: a tombstone written before this one can have moved things.
        let here = |known: &Slot| known.location == slot.location;
        let known = self.spaces.all().any(|index| index.find(slot.hash, here).is_some());
        if !known {
            return Ok(Deleted::NotHere);
        }
        let state = self.cache.get(&self.store.table, slot.location.segment());
        let header = read_key(state, slot, key);
        let namespace = header.namespace;
        if self.spaces.get(namespace).is_none() {
            return Ok(Deleted::Never);
        }
        let hash = self.store.place(namespace, key);
        if hash != slot.hash {
            // A client scribbled over its own entry.
            stats::add(&self.counters().damaged, 1);
            return Ok(Deleted::Never);
        }
        let appended = self.append_tombstone(namespace, key)?;
        self.install_moves();
        self.install(namespace, hash, key, &appended);
        let counters = self.counters();
        match why {
            Deletion::Expired => stats::add(&counters.expired, 1),
            Deletion::Evicted => stats::add(&counters.evicted, 1),
        }
        Ok(Deleted::Yes)
    }

    /// Makes room for `bytes` under the memory limit.
    ///
    /// Errors: [`KvError::MemoryLimit`].
    pub(crate) fn fit_memory(&mut self, bytes: u64) -> Result<(), KvError> {
        let limit = self.store.max_memory_bytes();
        if limit == 0 {
            return Ok(());
        }
        let policy = self.store.eviction();
        let (mut slices, mut swept_bytes) = (0, 0);
        loop {
            let used = self.store.memory_bytes();
            if used + bytes <= limit {
                return Ok(());
            }
            if !self.ended.is_empty() {
                // A row that ended takes its memory until its fields are removed, and they stay
                // until its end is persisted: by the commit of this turn, or by one of its own
                // where writes went too far beyond the limit or would be refused. It is done in
                // slices, as many as a write has time for; upkeep does the rest.
                slices += 1;
                let beyond = (limit / BEYOND_SHARE).min(BEYOND_BYTES);
                let commit = policy == Eviction::NoEviction || used + bytes > limit + beyond;
                if slices <= SLICES_PER_WRITE {
                    let live = self.live_bytes();
                    let got_on = self.sweep_rows(commit)? == Swept::Some
                        || self.sweep_row_ends(commit)? == Swept::Some;
                    swept_bytes += live.saturating_sub(self.live_bytes());
                    if got_on {
                        continue;
                    }
                }
                // Keys of services' rows may wait for long, and for a thread that failed for ever. Where
                // fewer of them went than come, others have to.
                let frees = self.ended.holds_fields() || swept_bytes >= bytes;
                if policy != Eviction::NoEviction && frees {
                    return Ok(());
                }
            }
            if policy == Eviction::NoEviction || !self.evict_one(policy, None)? {
                return Err(KvError::MemoryLimit { used_bytes: used, limit_bytes: limit });
            }
        }
    }

    /// Deletes one key by the policy, of any database or of one namespace; false when there was none
    /// to delete.
    pub(crate) fn evict_one(
        &mut self,
        policy: Eviction,
        only: Option<u32>,
    ) -> Result<bool, KvError> {
        if policy == Eviction::NoEviction || self.store.is_replacing() {
            return Ok(false);
        }
        let Some(slot) = self.sample_victim(policy, only) else { return Ok(false) };
        let mut key = Vec::new();
        Ok(self.delete_slot(&slot, &mut key, Deletion::Evicted)? == Deleted::Yes)
    }

    fn sample_victim(&mut self, policy: Eviction, only: Option<u32>) -> Option<Slot> {
        let wanted = |slot: &Slot| {
            !slot.location.is_absent()
                && (!policy.only_expiring() || slot.location.has(Location::EXPIRES))
        };
        let random_policy = matches!(policy, Eviction::AllKeysRandom | Eviction::VolatileRandom);
        let samples = if random_policy { 1 } else { SAMPLES };
        let clients = if only.is_some() { 1 } else { u32::from(crate::DATABASES) };
        let mut best: Option<(u64, Slot)> = None;
        for _ in 0..samples {
            let start = self.random.next() as u32 % clients;
            for turn in 0..clients {
                let namespace = only.unwrap_or((start + turn) % clients);
                let Some(index) = self.spaces.get(namespace) else { continue };
                let any = if policy.only_expiring() { index.expiring } else { index.live };
                if any == 0 {
                    continue;
                }
                let random = self.random.next();
                let found = index
                    .sample(random, TRIES, wanted)
                    .or_else(|| index.sample(random, usize::MAX >> 1, wanted));
                let Some(slot) = found else { continue };
                let rank = match policy {
                    Eviction::VolatileTtl => {
                        let state = self.cache.get(&self.store.table, slot.location.segment());
                        let header = read_header(state, slot.location.offset());
                        u64::MAX - self.expiry_of(namespace, &slot, &header).0
                    }
                    _ => u64::from(self.use_second.wrapping_sub(slot.last_use)),
                };
                if best.as_ref().is_none_or(|(known, _)| rank > *known) {
                    best = Some((rank, slot));
                }
                break;
            }
        }
        best.map(|(_, slot)| slot)
    }
}

/// How far a slice of removing what nothing shows any more came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Swept {
    /// There is nothing to remove, or now is not the time for it.
    Nothing,
    /// It got on: there may be more.
    Some,
    /// What ended it is not persisted yet, or another thread holds the log that it is in.
    Waiting,
}

/// What became of a slot that was to be deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deleted {
    /// Its key is gone.
    Yes,
    /// It is no longer where it was.
    NotHere,
    /// A client spoilt its own entry: the key cannot be told.
    Never,
}

#[derive(Clone, Copy, Debug)]
enum Deletion {
    Expired,
    Evicted,
}
