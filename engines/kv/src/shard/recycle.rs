//! Dead segments of a shard's own logs come back warm.
//!
//! ```text
//! head ──full, or enough of it stale──▶ young ──nothing points at it──▶ renewing ──fence──▶ warm
//!   ▲                                     │ (superseding entries persisted)                  │
//!   └─────────────────────────────────────┼────────── last in, first out ────────────────────┘
//!                                         └─▶ collector, where something is still needed
//! ```
//!
//! A workload that overwrites a few keys leaves segments in which nothing is needed any more. Such
//! a segment is neither walked nor zeroed nor given back: its descriptor gets the next generation,
//! which takes every entry in it off the media in one step (no seal of the former life verifies in
//! the next), and the shard appends to the same pages again while they are in the cache.
//!
//! Order, each step persisted before the next: what superseded the entries; the new generation;
//! the first entry of the new life.
//!
//! What freeing needs to know is kept beside the segment while it is young, as a [`Roster`]: which
//! keys counted an older entry here. A key that is overwritten again and again in one head counts
//! once: a *run* of entries goes as a whole with its segment, so no tombstone has to outlive part
//! of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_pmem::Segment;

use crate::fault::{self, KnownBug};
use crate::index::{Location, Slot};
use crate::segments::{HEAD, SegmentState, VICTIM};
use crate::shard::Shard;
use crate::stats;
use crate::store::{Freed, Need};
use crate::{KvError, Version};

/// Renewed segments kept ready where the pool has room.
const WARM_SEGMENTS: usize = 3;
/// Records kept of young segments (8 bytes each): beyond that the oldest roster goes, and its
/// segment is walked when it is freed.
const RECORDS: usize = 1 << 20;

/// The runs that began in one segment: key hashes in order of offset.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    hashes: Vec<u64>,
    /// Database of the records from an index on.
    spans: Vec<(u32, u32)>,
}

impl Roster {
    #[inline]
    pub fn push(&mut self, namespace: u32, hash: u64) {
        if self.spans.last().is_none_or(|span| span.1 != namespace) {
            self.spans.push((self.hashes.len() as u32, namespace));
        }
        self.hashes.push(hash);
    }

    pub fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Takes the last record.
    #[inline]
    pub fn pop(&mut self) -> Option<(u32, u64)> {
        let hash = self.hashes.pop()?;
        let (start, namespace) = *self.spans.last()?;
        if self.hashes.len() as u32 <= start {
            self.spans.pop();
        }
        Some((namespace, hash))
    }

    /// The record `ahead` before the last one.
    fn peek(&self, ahead: usize) -> Option<(u32, u64)> {
        let at = self.hashes.len().checked_sub(ahead + 1)?;
        Some((self.spans.last()?.1, self.hashes[at]))
    }

    pub fn truncate(&mut self, length: usize) {
        while self.hashes.len() > length {
            self.pop();
        }
    }

    /// Forgets the records of one namespace: its index was emptied.
    pub fn forget(&mut self, namespace: u32) {
        if self.spans.iter().all(|span| span.1 != namespace) {
            return;
        }
        let mut kept = Self::default();
        let mut rest = std::mem::take(self);
        let mut records: Vec<_> = std::iter::from_fn(|| rest.pop()).collect();
        records.reverse();
        for (other, hash) in records.into_iter().filter(|record| record.0 != namespace) {
            kept.push(other, hash);
        }
        *self = kept;
    }
}

/// What left the media with a segment and still counts as stale.
#[derive(Debug)]
pub(crate) struct Leaving {
    pub roster: Roster,
    pub segment: u32,
}

#[derive(Debug)]
struct Young {
    state: Arc<SegmentState>,
    roster: Roster,
}

/// A new life is stored; the next fence persists it.
#[derive(Debug)]
struct Renewing {
    segment: Arc<Segment>,
    leaving: Leaving,
}

#[derive(Debug, Default)]
pub(crate) struct Recycler {
    /// Closed segments with a roster, oldest first.
    young: Vec<Young>,
    renewing: Vec<Renewing>,
    warm: Vec<Arc<Segment>>,
    /// A segment lost its last needed entry since the last look.
    pub look: bool,
    forgetting: Vec<Leaving>,
    /// Emptied rosters, kept so that a steady cycle allocates nothing.
    spare: Vec<Roster>,
}

impl Recycler {
    /// An empty roster for a fresh head.
    pub fn roster(&mut self) -> Roster {
        self.spare.pop().unwrap_or_default()
    }

    /// Keeps the roster of a head that was closed.
    pub fn retire(&mut self, state: &Arc<SegmentState>, roster: Roster) {
        self.young.push(Young { state: Arc::clone(state), roster });
        let mut records: usize = self.young.iter().map(|young| young.roster.len()).sum();
        while records > RECORDS && self.young.len() > 1 {
            records -= self.young.remove(0).roster.len();
        }
        self.look = true;
    }

    /// Forgets the last records of the segment that was closed last: their entries moved away.
    pub fn truncate(&mut self, state: &Arc<SegmentState>, records: usize) {
        let last = self.young.iter_mut().rev().find(|young| Arc::ptr_eq(&young.state, state));
        if let Some(young) = last {
            young.roster.truncate(records);
        }
    }

    /// The roster of a segment that is freed.
    pub fn take_roster(&mut self, state: &Arc<SegmentState>) -> Option<Roster> {
        let at = self.young.iter().position(|young| Arc::ptr_eq(&young.state, state))?;
        Some(self.young.remove(at).roster)
    }

    /// Entries that left the media wait to be taken out of the counts.
    pub fn is_forgetting(&self) -> bool {
        !self.forgetting.is_empty()
    }

    /// A fence is wanted.
    pub fn is_renewing(&self) -> bool {
        !self.renewing.is_empty()
    }

    pub fn leave(&mut self, leaving: Leaving) {
        if leaving.roster.len() > 0 {
            self.forgetting.push(leaving);
        } else if self.spare.len() < WARM_SEGMENTS {
            self.spare.push(leaving.roster);
        }
    }

    /// The index of a namespace was emptied: what was recorded of it counts nowhere any more.
    pub fn forget_namespace(&mut self, namespace: u32) {
        let young = self.young.iter_mut().map(|young| &mut young.roster);
        let renewing = self.renewing.iter_mut().map(|renewing| &mut renewing.leaving);
        let leaving = renewing.chain(&mut self.forgetting).map(|leaving| &mut leaving.roster);
        young.chain(leaving).for_each(|roster| roster.forget(namespace));
    }
}

impl Shard {
    /// Renews what died, where everything stored so far is persisted. Leaves alone what other
    /// shards' logs have to be asked about.
    pub(crate) fn recycle_dead(&mut self) {
        let persisted = self.log.is_persisted() || fault::is_on(KnownBug::RecycleBeforePersist);
        if !self.recycler.look
            || !persisted
            || self.batch.is_some()
            || self.store.snapshots.load(Ordering::Acquire) > 0
        {
            return;
        }
        self.recycler.look = false;
        let mut at = self.recycler.young.len();
        while at > 0 {
            at -= 1;
            let state = &self.recycler.young[at].state;
            // Nothing is dirty now, but where a known bug is put back.
            if !self.is_free_to_go(state) || self.log.is_dirty(state) {
                continue;
            }
            if !self.wants_warm() || state.superseded_by() != 0 {
                // The collector's, which has time.
                self.collector.look = true;
                continue;
            }
            let young = self.recycler.young.remove(at);
            if let Err(roster) = self.renew(&young.state, young.roster) {
                self.recycler.young.push(Young { state: young.state, roster });
                self.collector.look = true;
                return;
            }
        }
    }

    /// True when no slot points at it and no reader holds it.
    fn is_free_to_go(&self, state: &SegmentState) -> bool {
        !state.is(HEAD | VICTIM)
            && state.is_dead()
            // Acquire pairs with the release of the last reader.
            && state.pins.load(Ordering::Acquire) == 0
    }

    fn warm_limit(&self) -> usize {
        let free = self.store.free_segments();
        match free {
            free if free > self.store.low_segments() => WARM_SEGMENTS,
            free if free > self.store.reserve(Need::Data) => 1,
            _ => 0,
        }
    }

    /// Stores the next life of a dead segment; the next fence persists it, and what it held leaves
    /// the counts. Gives the roster back where the segment cannot have another life in place.
    pub(crate) fn renew(
        &mut self,
        state: &Arc<SegmentState>,
        roster: Roster,
    ) -> Result<(), Roster> {
        if !state.is_renewable() || state.segment.renew().is_none() {
            return Err(roster);
        }
        self.log.forget(state);
        let leaving = Leaving { roster, segment: state.id };
        self.store.table.remove(state.id);
        stats::add(&self.store.counters[self.index].segments_recycled, 1);
        let segment = Arc::clone(&state.segment);
        if fault::is_on(KnownBug::ReuseBeforePersist) {
            self.recycler.warm.push(segment);
            self.recycler.leave(leaving);
            return Ok(());
        }
        self.persister.flush_descriptor(&segment);
        self.recycler.renewing.push(Renewing { segment, leaving });
        Ok(())
    }

    /// True when another warm segment is of use.
    pub(crate) fn wants_warm(&self) -> bool {
        self.recycler.warm.len() + self.recycler.renewing.len() < self.warm_limit()
    }

    /// After a fence: the new lives are persisted, and what was in the old ones is gone.
    pub(crate) fn settle_renewed(&mut self) {
        while let Some(renewed) = self.recycler.renewing.pop() {
            self.recycler.leave(renewed.leaving);
            self.recycler.warm.push(renewed.segment);
        }
    }

    /// A warm segment for a head, unless the pool is so short that all of them are wanted back.
    pub(crate) fn take_warm(&mut self) -> Result<Option<Arc<Segment>>, KvError> {
        if self.recycler.warm.is_empty() && self.recycler.is_renewing() {
            self.fence_renewed()?;
        }
        if self.store.free_segments() <= self.store.reserve(Need::Data) {
            self.release_warm()?;
            return Ok(None);
        }
        Ok(self.recycler.warm.pop())
    }

    /// Persists lives that were stored.
    pub(crate) fn fence_renewed(&mut self) -> Result<(), KvError> {
        if self.recycler.is_renewing() {
            self.fence_or_poison()?;
            self.settle_renewed();
        }
        Ok(())
    }

    /// Gives warm segments back to the pool.
    pub(crate) fn release_warm(&mut self) -> Result<(), KvError> {
        self.fence_renewed()?;
        while let Some(segment) = self.recycler.warm.pop() {
            self.store.pool.free(segment)?;
        }
        Ok(())
    }

    /// Deals with one dead segment that [`Shard::recycle_dead`] left: asks the other shards, and
    /// frees it where enough are warm. True when there was one.
    pub(crate) fn free_one_dead(&mut self) -> Result<bool, KvError> {
        if self.batch.is_some() || self.store.snapshots.load(Ordering::Acquire) > 0 {
            return Ok(false);
        }
        let dead = |shard: &Self, young: &Young| shard.is_free_to_go(&young.state);
        let Some(at) = self.recycler.young.iter().rposition(|young| dead(self, young)) else {
            return Ok(false);
        };
        let state = Arc::clone(&self.recycler.young[at].state);
        // Read after it was seen dead: what died later does not matter.
        let superseded_by = state.superseded_by();
        self.commit()?;
        let others = (0..self.store.shards()).filter(|shard| *shard != self.index);
        let mut asked = others.filter(|shard| superseded_by & 1 << (shard % 64) != 0);
        if !asked.all(|shard| self.store.peers.commit(shard)) {
            return Ok(false);
        }
        // The commit may have dealt with it.
        let Some(roster) = self.recycler.take_roster(&state) else { return Ok(true) };
        let renewed = if self.wants_warm() { self.renew(&state, roster) } else { Err(roster) };
        let Err(roster) = renewed else { return Ok(true) };
        self.log.forget(&state);
        self.store.table.remove(state.id);
        self.store.pool.free(Arc::clone(&state.segment))?;
        stats::add(&self.store.counters[self.index].segments_collected, 1);
        let won = u64::from(state.length);
        stats::add(&self.store.counters[self.index].collector_won_bytes, won);
        self.recycler.leave(Leaving { roster, segment: state.id });
        Ok(true)
    }

    /// Takes up to `records` of what left with segments out of the counts.
    pub(crate) fn forget_rosters(&mut self, records: usize) {
        const AHEAD: usize = 8;
        let mut left = records;
        while left > 0 {
            let Some(mut leaving) = self.recycler.forgetting.pop() else { return };
            while left > 0 {
                if let Some((namespace, hash)) = leaving.roster.peek(AHEAD) {
                    self.prefetch(namespace, hash);
                }
                let Some((namespace, hash)) = leaving.roster.pop() else { break };
                self.forget_run(namespace, hash, leaving.segment);
                left -= 1;
            }
            self.recycler.leave(leaving);
        }
    }

    /// A run of entries of this key left the media with `segment`.
    fn forget_run(&mut self, namespace: u32, hash: u64, segment: u32) {
        let shard = self.store.owner_of(hash);
        if shard == self.index {
            self.forget_run_here(namespace, hash, segment);
            return;
        }
        // A flush from now on has a larger barrier, and makes it void.
        let version: Version = self.store.newest_version();
        let place = Location::new(segment, 0, 0);
        let inbox = &self.store.inboxes[shard];
        let freed = Freed { namespace, hash, version, place };
        inbox.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(freed);
    }

    /// As [`Shard::forget_run`], in the shard whose key it is.
    pub(crate) fn forget_run_here(&mut self, namespace: u32, hash: u64, segment: u32) {
        let Some(index) = self.spaces.get_mut(namespace) else { return };
        let Some(id) = index.find_only(hash) else {
            // Keys with one hash: the one whose tombstone went with the segment can be told.
            let dropped = |slot: &Slot| {
                slot.location.has(Location::DROPPED) && slot.location.segment() == segment
            };
            if let Some(id) = index.find(hash, dropped) {
                index.remove(id);
            }
            return;
        };
        let slot = *index.slot(id);
        if slot.location.has(Location::DROPPED) && slot.location.segment() == segment {
            index.remove(id);
            return;
        }
        self.change_slot(namespace, id, Slot::remove_stale);
        self.drop_if_hollow(namespace, id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_roster_gives_back_what_it_was_given_without_the_databases_that_were_emptied() {
        let mut roster = Roster::default();
        let records: Vec<_> = (0..300_u64).map(|at| ((at / 7 % 3) as u32, at)).collect();
        for (namespace, hash) in &records {
            roster.push(*namespace, *hash);
        }
        roster.push(9, 1);
        roster.truncate(records.len());
        roster.forget(1);
        let mut back: Vec<_> = std::iter::from_fn(|| roster.pop()).collect();
        back.reverse();
        let kept: Vec<_> = records.into_iter().filter(|record| record.0 != 1).collect();
        assert_eq!(back, kept);
        assert_eq!(roster.pop(), None);
    }
}
