//! The collector: copies what is needed out of a segment that is mostly garbage and frees it.
//!
//! ```text
//! choose victim → copy needed entries to the collector's own head, pointing the index at the
//! copies → persist copies and everything that made the rest stale → free, persisted →
//! tell the indexes which entries left the media
//! ```
//!
//! Invariants:
//! - A key has a slot in its index exactly as long as a valid entry of it is on media, and
//!   `stale` counts the older ones (or more, never fewer): in a segment written since the start
//!   the runs of entries, but for the one the newest goes on, and elsewhere every entry. So a
//!   tombstone may go when `stale` is 0: what it hides, if anything, goes with it.
//! - An entry leaves the count only after its segment is freed on media.
//! - A segment is freed only after the entries that supersede its contents are persisted,
//!   whichever log they are in, and while no batch is open here (a batch can still vanish).
//! - The copies go to a head of their own, and the last segments of the pool are kept for it, so
//!   that collection can always go on.
//!
//! Source: BOOM-KV §3.5, which leaves the collector open.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use crate::KvError;
use crate::entry::{ALIGNMENT, BATCH_MORE, FIRST_ENTRY, HEADER_BYTES, Header};
use crate::fault::{self, KnownBug};
use crate::index::{Location, Slot};
use crate::peers::{Away, Peer};
use crate::segments::{GRANTED, HEAD, QUARANTINED, SegmentState, VICTIM};
use crate::shard::Shard;
use crate::shard::log::{Appended, Chain, Draft};
use crate::shard::recycle::Leaving;
use crate::stats;
use crate::store::{Freed, Need};
use crate::walk;

/// How far ahead of the walk a victim is read, at least: some tens of microseconds' work where it is
/// cached already.
const READ_AHEAD_BYTES: u32 = 256 << 10;

/// Collection of one segment.
#[derive(Debug)]
struct Job {
    victim: Arc<SegmentState>,
    at: u32,
    end: u32,
    /// From here on nothing was asked to be read ahead.
    asked: u32,
    /// Valid entries that go with the segment.
    freed: Vec<Freed>,
    /// Shards whose logs hold entries that supersede some of the victim's.
    superseded_by: Vec<usize>,
    copied_bytes: u64,
    /// Valid entries met so far.
    met: u32,
    /// The index was searched for slots that the walk did not meet.
    swept: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Collector {
    job: Option<Job>,
    /// Walked through, waiting for readers, a snapshot or a batch.
    draining: Vec<Job>,
    /// Bytes of slots that stopped being needed: a deletion of 64 bytes can make megabytes.
    pub garbage_made: u64,
    /// Bytes stored, accepted and made garbage at the last look for victims.
    looked_at: u64,
    /// [`crate::Store::shortages`] at the last look.
    shortages: u64,
    /// Look again in any case.
    pub look: bool,
    /// Entries that left the media and still count as stale copies of their keys. Late is safe: a
    /// count that is too high keeps a tombstone longer than needed, never shorter.
    forgetting: Vec<Freed>,
}

/// Entries taken out of the counts in one slice: some 50 us, so that a freed segment with a million
/// small entries holds no request up.
const FORGET_SLICE: usize = 512;
/// How far ahead index lines are asked for.
const FORGET_AHEAD: usize = 8;
/// Stale bytes are left alone up to as much as is live, or up to this many segments of the length
/// that is kept warm.
const GARBAGE_SEGMENTS: u64 = 8;

/// How far a slice got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Done,
    /// The budget ran out.
    More,
    /// Another shard is busy.
    Blocked,
}

impl Shard {
    /// A slice of collection: whether it got on, and whether something waits for others.
    pub(crate) fn collect(&mut self, budget_bytes: u64) -> Result<(bool, bool), KvError> {
        self.drain_inbox();
        let mut waiting = self.free_drained()?;
        if self.store.shortages.load(Ordering::Relaxed) != self.collector.shortages {
            // Somebody has none: what is kept here for speed goes first.
            self.release_warm()?;
        }
        self.recycle_dead();
        let freed = self.collector.look && self.free_one_dead()?;
        if !freed && self.collector.job.is_none() && self.is_time_to_look() {
            self.choose_victim(false)?;
        }
        if self.collector.job.is_none() {
            self.fence_renewed()?;
            return Ok((freed || self.is_forgetting(), waiting));
        }
        let progress = self.run_job(budget_bytes)?;
        if progress == Progress::Done {
            waiting = self.free_drained()?;
            self.collector.look = true;
        }
        Ok((progress != Progress::Blocked, waiting || progress == Progress::Blocked))
    }

    fn is_forgetting(&self) -> bool {
        !self.collector.forgetting.is_empty() || self.recycler.is_forgetting()
    }

    fn is_time_to_look(&mut self) -> bool {
        let counters = self.counters();
        let stored = counters.bytes_stored.load(Ordering::Relaxed)
            + counters.entries_accepted.load(Ordering::Relaxed) * u64::from(HEADER_BYTES)
            + self.collector.garbage_made;
        let length = u64::from(self.store.pool.segment_bytes());
        let step = length.min(4 * u64::from(self.store.warm_bytes)) / 8;
        // Somebody found the pool full: what little is to be had here may help.
        let shortages = self.store.shortages.load(Ordering::Relaxed);
        let due = self.collector.look
            || stored >= self.collector.looked_at + step
            || shortages != self.collector.shortages;
        if due {
            self.collector.shortages = shortages;
            self.collector.looked_at = stored;
            self.collector.look = false;
        }
        due
    }

    /// Collects in the foreground until new data may allocate; false when that cannot be.
    pub(crate) fn make_room(&mut self) -> Result<bool, KvError> {
        const JOBS: usize = 16;
        for _ in 0..JOBS {
            self.drain_inbox();
            self.free_drained()?;
            self.release_warm()?;
            while self.store.free_segments() <= self.store.reserve(Need::Data)
                && self.free_one_dead()?
            {
                self.release_warm()?;
            }
            if self.store.free_segments() > self.store.reserve(Need::Data) {
                return Ok(true);
            }
            if self.batch.is_some() {
                // Victims stay until the batch is persisted, so their copies would only take what
                // is left, and deletions in the batch would find nothing.
                return Ok(false);
            }
            if self.collector.job.is_none() {
                let length = self.store.pool.segment_bytes();
                if self.collectable_garbage() < u64::from(length) || !self.choose_victim(true)? {
                    return Ok(false);
                }
            }
            if self.run_job(u64::MAX)? != Progress::Done {
                return Ok(false);
            }
        }
        self.free_drained()?;
        Ok(self.store.free_segments() > self.store.reserve(Need::Data))
    }

    fn is_candidate(&self, state: &SegmentState) -> bool {
        state.owner as usize == self.index
            && !state.is(HEAD | GRANTED | QUARANTINED | VICTIM)
            && !state.holds_runs()
    }

    /// Segments that may be collected now.
    fn candidates<'a>(
        &'a self,
        all: &'a [Arc<SegmentState>],
    ) -> impl Iterator<Item = &'a Arc<SegmentState>> {
        all.iter()
            .filter(|state| self.is_candidate(state))
            .filter(|state| self.batch.is_none() || !self.log.is_dirty(state))
    }

    /// What collecting everything could win: garbage in the segments that could be collected, and
    /// the room that is left in the collector's head.
    fn collectable_garbage(&self) -> u64 {
        let all = self.store.table.all();
        let garbage: u64 = all
            .iter()
            .filter(|state| self.is_candidate(state))
            .map(|state| state.garbage_bytes())
            .sum();
        let head = self.log.heads[Chain::Collected as usize].as_ref();
        garbage + head.map_or(0, |head| u64::from(head.state.length - head.tail))
    }

    /// Starts on the segment with the most garbage, if it has enough to be worth it.
    fn choose_victim(&mut self, pressed: bool) -> Result<bool, KvError> {
        let free = self.store.free_segments();
        if !self.collector.draining.is_empty() && free <= self.store.reserve(Need::Tombstone) {
            return Ok(false);
        }
        let length = u64::from(self.store.pool.segment_bytes());
        let all = self.store.table.all();
        let victim = if pressed || free <= self.store.low_segments() {
            // Short of segments: what counts is what freeing one wins, unused room included.
            let worth = if pressed { length / 64 } else { length / 8 };
            self.candidates(&all)
                .max_by_key(|state| state.garbage_bytes())
                .filter(|state| state.garbage_bytes() >= worth)
        } else {
            // With room, what counts is the memory that entries nobody needs take up.
            let mine = || {
                let own = all.iter().filter(|state| state.owner as usize == self.index);
                // What lies beside streams is not to be had while they are there.
                own.filter(|state| !state.holds_runs())
            };
            let stale: u64 = mine().map(|state| state.stale_bytes()).sum();
            let live: u64 = mine().map(|state| state.live().max(0) as u64).sum();
            let floor = GARBAGE_SEGMENTS * u64::from(self.store.warm_bytes).min(length);
            let bounded = stale <= live.max(floor);
            // One in which nothing is needed costs no copy.
            let dead = self.candidates(&all).find(|state| state.live() <= 0);
            if bounded && dead.is_none() {
                return Ok(false);
            }
            dead.into_iter()
                .chain(self.candidates(&all).filter(|_| !bounded))
                .max_by_key(|state| {
                    state.stale_bytes() * 1024 / u64::from(state.tail.load(Ordering::Relaxed))
                })
                .filter(|state| state.stale_bytes() > 0 || state.live() <= 0)
        };
        let Some(victim) = victim.cloned() else { return Ok(false) };
        // A copy stands alone: of a batch that is not persisted yet, some copies could survive a
        // crash that cuts the batch itself.
        // Marked first: a commit renews what is dead and nobody's victim.
        victim.set(VICTIM);
        if self.log.is_dirty(&victim)
            && !fault::is_on(KnownBug::CollectUncommitted)
            && let Err(error) = self.commit()
        {
            victim.clear(VICTIM);
            return Err(error);
        }
        let end = victim.tail.load(Ordering::Acquire);
        self.collector.job = Some(Job {
            victim,
            at: FIRST_ENTRY,
            asked: FIRST_ENTRY,
            end,
            freed: Vec::new(),
            superseded_by: Vec::new(),
            copied_bytes: 0,
            met: 0,
            swept: false,
        });
        Ok(true)
    }

    fn run_job(&mut self, budget_bytes: u64) -> Result<Progress, KvError> {
        let Some(mut job) = self.collector.job.take() else { return Ok(Progress::Done) };
        let outcome = self.walk_victim(&mut job, budget_bytes);
        if matches!(outcome, Ok(Progress::Done)) {
            self.collector.draining.push(job);
        } else {
            self.collector.job = Some(job);
        }
        outcome
    }

    fn walk_victim(&mut self, job: &mut Job, budget_bytes: u64) -> Result<Progress, KvError> {
        let mut spent = 0;
        let mut entry = std::mem::take(&mut self.collected);
        let progress = loop {
            if job.at >= job.end {
                break Progress::Done;
            }
            if spent >= budget_bytes {
                break Progress::More;
            }
            let offset = job.at;
            if offset >= job.asked {
                job.victim.segment.read_ahead(offset as usize, 2 * READ_AHEAD_BYTES as usize);
                job.asked = offset + READ_AHEAD_BYTES;
            }
            let Some(header) = copy_entry(&self.store.sealer, &job.victim, offset, &mut entry)
            else {
                // Not an entry (overwritten by its client, or cut short): to the next that is.
                job.at += ALIGNMENT;
                spent += u64::from(ALIGNMENT);
                continue;
            };
            match self.visit(job, offset, &header, &entry)? {
                Some(copied) => {
                    job.copied_bytes += copied;
                    spent += u64::from(header.slot_bytes) / 4 + copied;
                    job.met += 1;
                    job.at = offset + header.slot_bytes;
                }
                None => break Progress::Blocked,
            }
        };
        self.collected = entry;
        if progress == Progress::Done
            && !job.swept
            && (job.victim.live() != 0 || job.met < job.victim.count.load(Ordering::Relaxed))
            && !self.sweep_unmet(job)?
        {
            return Ok(Progress::Blocked);
        }
        Ok(progress)
    }

    /// Deals with one valid entry of the victim: copies it where it is needed. `None` when the
    /// shard that knows is busy; else the bytes copied.
    fn visit(
        &mut self,
        job: &mut Job,
        offset: u32,
        header: &Header,
        entry: &[u8],
    ) -> Result<Option<u64>, KvError> {
        if fault::is_on(KnownBug::DropTombstoneEarly) && header.is_tombstone() {
            // The bug: gone from media and index, whatever it still hides.
            let hash = self.store.place(header.namespace, &entry[HEADER_BYTES as usize..]);
            let place = Location::new(job.victim.id, offset, 0);
            self.repoint(header.namespace, hash, place, None);
            let (namespace, version) = (header.namespace, header.version);
            job.freed.push(Freed { namespace, hash, version, place });
            return Ok(Some(0));
        }
        if header.is_appended() {
            // Cut off from its stream: what did that may lie in other shards' logs.
            let others = job.victim.superseded_by();
            for shard in (0..self.store.shards()).filter(|shard| others & 1 << (shard % 64) != 0) {
                if shard != self.index && !job.superseded_by.contains(&shard) {
                    job.superseded_by.push(shard);
                }
            }
            return Ok(Some(0));
        }
        if header.version < self.store.barrier(header.namespace) {
            return Ok(Some(0));
        }
        let (key, value) = entry[HEADER_BYTES as usize..].split_at(usize::from(header.key_length));
        let hash = self.store.place(header.namespace, key);
        let owner = self.store.owner_of(hash);
        let place = Location::new(job.victim.id, offset, 0);
        let copied = if owner == self.index {
            match self.slot_at(header.namespace, hash, place) {
                Some(slot) if slot.is_needed() => {
                    let to = self.copy_out(header, key, value)?;
                    self.repoint(header.namespace, hash, place, Some(to));
                    u64::from(header.slot_bytes)
                }
                Some(_) => {
                    self.repoint(header.namespace, hash, place, None);
                    0
                }
                None => {
                    let newest = self.newest_place_of(header.namespace, hash);
                    self.note_superseded(job, newest);
                    0
                }
            }
        } else {
            let store = Arc::clone(&self.store);
            let dealt_with = store.peers.ask(owner, |peer| -> Result<u64, KvError> {
                match peer.slot_at(header.namespace, hash, place) {
                    Some(slot) if slot.is_needed() => {
                        let to = self.copy_out(header, key, value)?;
                        peer.repoint(header.namespace, hash, place, Some(to));
                        Ok(u64::from(header.slot_bytes))
                    }
                    Some(_) => {
                        peer.repoint(header.namespace, hash, place, None);
                        Ok(0)
                    }
                    None => {
                        let newest = peer.newest_place_of(header.namespace, hash);
                        self.note_superseded(job, newest);
                        Ok(0)
                    }
                }
            });
            match dealt_with {
                Ok(copied) => copied?,
                Err(Away::Gone | Away::Busy) => return Ok(None),
            }
        };
        let (namespace, version) = (header.namespace, header.version);
        job.freed.push(Freed { namespace, hash, version, place });
        Ok(Some(copied))
    }

    /// Remembers whose log supersedes a stale entry, whose key has its newest one there.
    fn note_superseded(&mut self, job: &mut Job, newest: Option<Location>) {
        // No slot that could be asked (several keys with one hash): every log may hold it.
        let owner = newest
            .filter(|location| location.is_readable())
            .and_then(|location| self.store.table.get(location.segment()))
            .map(|state| state.owner as usize);
        let owners = match owner {
            Some(owner) => owner..owner + 1,
            None => 0..self.store.shards(),
        };
        for owner in owners {
            if owner != self.index && !job.superseded_by.contains(&owner) {
                job.superseded_by.push(owner);
            }
        }
    }

    /// Copies an entry to the collector's head under its own version.
    fn copy_out(&mut self, header: &Header, key: &[u8], value: &[u8]) -> Result<Appended, KvError> {
        let draft = Draft {
            version: header.version,
            hash: self.store.place(header.namespace, key),
            namespace: header.namespace,
            kind: header.kind,
            flags: header.flags & !BATCH_MORE,
            expires_at_ms: header.expires_at_ms,
            key,
            value: &[value],
        };
        let appended = self.append(Chain::Collected, &draft)?;
        let counters = self.counters();
        stats::add(&counters.collector_copied_entries, 1);
        stats::add(&counters.collector_copied_bytes, u64::from(appended.slot_bytes));
        Ok(appended)
    }

    /// Searches the indexes for slots in the victim that the walk did not meet, because their
    /// bytes were overwritten by the client that held the segment. True when all were dealt with.
    fn sweep_unmet(&mut self, job: &mut Job) -> Result<bool, KvError> {
        for owner in 0..self.store.shards() {
            if owner == self.index {
                self.lose_slots(&job.victim);
            } else {
                match self.store.peers.ask(owner, |peer| peer.lose_slots(&job.victim)) {
                    Ok(()) | Err(Away::Gone) => {}
                    Err(Away::Busy) => return Ok(false),
                }
            }
        }
        job.swept = true;
        Ok(true)
    }

    /// Frees victims that nothing holds any more; true when some are left.
    fn free_drained(&mut self) -> Result<bool, KvError> {
        if self.collector.draining.is_empty() {
            return Ok(false);
        }
        // A batch that is open can still vanish in a crash, and with it what superseded the
        // victims' entries. A snapshot still reads them.
        if self.batch.is_some() || self.store.snapshots.load(Ordering::Acquire) > 0 {
            return Ok(true);
        }
        let mut at = 0;
        while at < self.collector.draining.len() {
            let job = &self.collector.draining[at];
            // Acquire pairs with the release of the last reader.
            let free = job.victim.pins.load(Ordering::Acquire) == 0 && {
                let needed = job.superseded_by.clone();
                needed.into_iter().all(|shard| self.store.peers.commit(shard))
            };
            if free {
                let job = self.collector.draining.swap_remove(at);
                self.free_victim(job)?;
            } else {
                at += 1;
            }
        }
        Ok(!self.collector.draining.is_empty())
    }

    /// True when the newest entry of a database's key is persisted, in whatever log it is, so that no
    /// crash shows what it superseded. Where `commit`, that is seen to, if no other thread is in the way.
    ///
    /// Errors: as [`Shard::commit`].
    pub(crate) fn newest_is_persisted(
        &mut self,
        database: u32,
        key: &[u8],
        commit: bool,
    ) -> Result<bool, KvError> {
        if fault::is_on(KnownBug::SweepBeforePersist) {
            return Ok(true);
        }
        let hash = self.store.place(database, key);
        // Without a slot nothing of the key is on media.
        let Some(id) = self.find(database, hash, key) else { return Ok(true) };
        let Some(index) = self.spaces.get(database) else { return Ok(true) };
        let location = index.slot(id).location;
        let state = self.store.table.get(location.segment()).filter(|_| location.is_readable());
        let Some(state) = state else { return Ok(true) };
        let owner = state.owner as usize;
        if owner == self.index {
            let pending = self.log.is_pending(&state, location.offset());
            if pending && commit {
                self.commit()?;
            }
            return Ok(commit || !pending);
        }
        let offset = location.offset();
        let asked = self.store.peers.ask(owner, |peer| peer.is_persisted(&state, offset, commit));
        Ok(asked.unwrap_or(false))
    }

    fn free_victim(&mut self, job: Job) -> Result<(), KvError> {
        if !fault::is_on(KnownBug::FreeBeforePersist) {
            self.commit()?;
        }
        let counters = self.counters();
        stats::add(&counters.segments_collected, 1);
        let won = u64::from(job.victim.length).saturating_sub(job.copied_bytes);
        stats::add(&counters.collector_won_bytes, won);
        let roster = self.recycler.take_roster(&job.victim);
        let mut freed = job.freed;
        match &roster {
            Some(_) => freed.clear(),
            None if job.victim.by_run => once_for_each_key(&mut freed),
            None => {}
        }
        let roster = roster.unwrap_or_default();
        let whole = freed.is_empty();
        let renewed =
            if whole && self.wants_warm() { self.renew(&job.victim, roster) } else { Err(roster) };
        if let Err(roster) = renewed {
            self.log.forget(&job.victim);
            self.store.table.remove(job.victim.id);
            self.store.pool.free(Arc::clone(&job.victim.segment))?;
            self.recycler.leave(Leaving { roster, segment: job.victim.id });
        }
        for freed in freed {
            let shard = self.store.owner_of(freed.hash);
            if shard == self.index {
                self.collector.forgetting.push(freed);
            } else {
                let inbox = &self.store.inboxes[shard];
                inbox.lock().unwrap_or_else(PoisonError::into_inner).push(freed);
            }
        }
        Ok(())
    }

    /// Takes a slice of what collectors freed out of the counts.
    fn drain_inbox(&mut self) {
        {
            let inbox = &self.store.inboxes[self.index];
            let mut inbox = inbox.lock().unwrap_or_else(PoisonError::into_inner);
            self.collector.forgetting.append(&mut inbox);
        }
        let mut left = FORGET_SLICE;
        while left > 0 {
            let Some(freed) = self.collector.forgetting.pop() else { break };
            let ahead = self.collector.forgetting.len().checked_sub(FORGET_AHEAD);
            if let Some(next) = ahead.and_then(|at| self.collector.forgetting.get(at)) {
                self.prefetch(next.namespace, next.hash);
            }
            self.forget_freed(&freed);
            left -= 1;
        }
        self.forget_rosters(left);
        if self.collector.forgetting.is_empty() {
            self.collector.forgetting = Vec::new();
        }
    }

    fn forget_freed(&mut self, freed: &Freed) {
        let namespace = freed.namespace;
        // A flush since the visit: the entry stopped counting then.
        if freed.version < self.store.barrier(namespace) {
            return;
        }
        if freed.place.offset() == 0 {
            self.forget_run_here(namespace, freed.hash, freed.place.segment());
            return;
        }
        let Some(index) = self.spaces.get_mut(namespace) else { return };
        let dropped = |slot: &Slot| {
            slot.location.has(Location::DROPPED) && slot.location.same_place(freed.place)
        };
        if let Some(id) = index.find(freed.hash, dropped) {
            index.remove(id);
            return;
        }
        let Some(id) = index.find_only(freed.hash) else { return };
        self.change_slot(namespace, id, Slot::remove_stale);
        self.drop_if_hollow(namespace, id);
    }

    /// Removes a slot that stands for nothing: its newest entry was lost and no older one is left.
    pub(crate) fn drop_if_hollow(&mut self, namespace: u32, id: crate::index::SlotId) {
        let Some(index) = self.spaces.get_mut(namespace) else { return };
        let slot = index.slot(id);
        if slot.location.has(Location::LOST) && slot.stale == 0 {
            index.remove(id);
        }
    }
}

/// Leaves one entry of each key: where a segment's roster is gone, that is the number of runs, or
/// fewer. Tombstones that go with the segment are found by their place, so they stay.
fn once_for_each_key(freed: &mut Vec<Freed>) {
    freed.sort_by_key(|freed| (freed.namespace, freed.hash, std::cmp::Reverse(freed.version)));
    freed.dedup_by_key(|freed| (freed.namespace, freed.hash));
}

/// Copies the valid entry at `offset` into `out`.
fn copy_entry(
    sealer: &crate::entry::Sealer,
    state: &SegmentState,
    offset: u32,
    out: &mut Vec<u8>,
) -> Option<Header> {
    if offset > state.length - HEADER_BYTES {
        return None;
    }
    let header = crate::shard::read_header(state, offset);
    if header.slot_bytes < HEADER_BYTES
        || !header.is_plausible(u64::from(state.length - offset))
        || sealer.seal(state.id, state.generation, offset, &header) != header.seal
    {
        return None;
    }
    out.clear();
    out.resize(header.used_bytes() as usize, 0);
    state.segment.read(offset as usize, out);
    // The copy is what counts: check it as if it were the segment, from offset 0 of the copy.
    walk::copy_is_valid(&header, out).then_some(header)
}
