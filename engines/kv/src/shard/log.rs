//! The shard's own log: append, segment switch, commit.
//!
//! ```text
//! head segment: [64 bytes free][entry][entry] … [entry] | zeros, or what a former life left
//!                                     flushed ^     tail ^
//! ```
//!
//! `count` in the descriptor lags by one commit: it is stored for entries whose fence is past, so
//! "the first `count` entries verify" holds in every crash image and a failure there is damage.
//! Entries beyond `count` vouch for themselves by their seals.
//!
//! Source: BOOM-KV §3.1 and §3.6. Deviation: one fence per commit, not two; see `docs/kv-internals.md`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_env::FaultPoint;
use beeline_pmem::PmemError;

use crate::entry::{self, ALIGNMENT, APPENDED, EXPIRES, Header, TOMBSTONE};
use crate::fault::{self, KnownBug};
use crate::index::Location;
use crate::segments::{HEAD, SegmentState, word};
use crate::shard::Shard;
use crate::shard::batch::Batch;
use crate::shard::recycle::Roster;
use crate::stats;
use crate::store::Need;
use crate::{KvError, Version};

/// Fails as a medium does that does not take what was written.
static BEFORE_FENCE: FaultPoint = FaultPoint::new("kv.commit.before_fence");

/// Which head an entry goes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Chain {
    /// New entries.
    #[default]
    Data = 0,
    /// Copies made by the collector: apart, so that writers cannot eat the room it needs.
    Collected = 1,
    /// Entries of streams, which the collector leaves where they are, and all that is in a batch with
    /// them. What a crash leaves of this chain is a beginning of it.
    Appends = 2,
}

/// Chains of a shard's log.
const CHAINS: usize = 3;

/// An entry to append.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draft<'a> {
    pub version: Version,
    pub hash: u64,
    pub namespace: u32,
    pub kind: u8,
    pub flags: u8,
    pub expires_at_ms: u64,
    pub key: &'a [u8],
    pub value: &'a [&'a [u8]],
}

/// Where it went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Appended {
    pub version: Version,
    pub location: Location,
    pub slot_bytes: u32,
}

/// The segment a chain appends to.
#[derive(Debug)]
pub(crate) struct Head {
    pub state: Arc<SegmentState>,
    pub tail: u32,
    pub flushed_to: u32,
    pub count: u32,
    /// Up to here without a thought; beyond, a warm segment may be the better place.
    pub limit: u32,
    /// Runs that began here; none in a segment taken over from before a restart.
    pub roster: Option<Roster>,
}

impl Head {
    pub fn fresh(state: Arc<SegmentState>, limit: u32, roster: Roster) -> Self {
        let first = entry::FIRST_ENTRY;
        let limit = limit.min(state.length);
        Self { state, tail: first, flushed_to: first, count: 0, limit, roster: Some(roster) }
    }
}

/// A range to flush with the next commit.
#[derive(Debug)]
struct Dirty {
    /// Place of its segment in [`Log::dirty_segments`].
    segment: usize,
    offset: u32,
    length: u32,
}

/// Commits after which lazily written words are forced to media.
const WORDS_EVERY: u64 = 256;

/// A commit that was begun: see [`crate::shard::pending`].
#[derive(Debug)]
pub(crate) struct UnderWay {
    /// Of its fence.
    pub ticket: u64,
    /// Its number, that of the latest one if several share the fence.
    pub commit: u64,
    /// Segments with entries in it, and their counts.
    pub touched: Vec<(Arc<SegmentState>, u32)>,
}

#[derive(Debug, Default)]
pub(crate) struct Log {
    commits: u64,
    /// Askings for write-back work seen at the last commit.
    asked: u64,
    pub heads: [Option<Head>; CHAINS],
    /// The last segment that was linked.
    last: Option<Arc<SegmentState>>,
    dirty: Vec<Dirty>,
    /// Segments with dirty ranges, once each: a handle for every range would cost two atomic
    /// operations an entry.
    dirty_segments: Vec<Arc<SegmentState>>,
    /// Segments with entries in the group that is open.
    touched: Vec<(Arc<SegmentState>, u32)>,
    /// Commits that were begun and are not done, in order.
    pub under_way: VecDeque<UnderWay>,
    /// Segments whose `count` may be raised because their entries are persisted.
    persisted: Vec<(Arc<SegmentState>, u32)>,
}

impl Log {
    /// Notes bytes to flush with the next commit, and the count of entries to promise after it.
    pub fn note(&mut self, state: &Arc<SegmentState>, offset: u32, length: u32) {
        let known = self.dirty_segments.iter().rposition(|known| Arc::ptr_eq(known, state));
        let segment = known.unwrap_or_else(|| {
            self.dirty_segments.push(Arc::clone(state));
            self.dirty_segments.len() - 1
        });
        self.dirty.push(Dirty { segment, offset, length });
        self.touch(state);
    }

    fn touch(&mut self, state: &Arc<SegmentState>) {
        let count = state.count.load(Ordering::Relaxed);
        match self.touched.iter_mut().find(|(known, _)| Arc::ptr_eq(known, state)) {
            Some(entry) => entry.1 = count,
            None => self.touched.push((Arc::clone(state), count)),
        }
    }

    /// True when entries in it wait for the next commit, or for one that was begun.
    pub fn is_dirty(&self, state: &Arc<SegmentState>) -> bool {
        let mut under_way = self.under_way.iter().flat_map(|begun| &begun.touched);
        self.dirty_segments.iter().any(|known| Arc::ptr_eq(known, state))
            || under_way.any(|(known, _)| Arc::ptr_eq(known, state))
    }

    /// True when the entry there may still wait for a commit.
    pub fn is_pending(&self, state: &Arc<SegmentState>, offset: u32) -> bool {
        let in_head = |head: &Head| Arc::ptr_eq(&head.state, state) && offset >= head.flushed_to;
        self.is_dirty(state) || self.heads.iter().flatten().any(in_head)
    }

    /// Forgets a segment about to be freed: its descriptor may be another segment's soon.
    pub fn forget(&mut self, state: &Arc<SegmentState>) {
        debug_assert!(!self.is_dirty(state), "what is freed was persisted");
        self.touched.retain(|(known, _)| !Arc::ptr_eq(known, state));
        self.persisted.retain(|(known, _)| !Arc::ptr_eq(known, state));
        if self.last.as_ref().is_some_and(|last| Arc::ptr_eq(last, state)) {
            self.last = None;
        }
    }

    /// True when nothing that was stored waits to be persisted.
    pub fn is_persisted(&self) -> bool {
        !self.has_work() && self.under_way.is_empty()
    }

    /// True when what was stored since the last commit was begun, or with it while it is under way, lies in
    /// several segments: their files are synchronised apart. Copies of the collector do not count: they
    /// may be there or not.
    pub fn leaves_its_segments(&self) -> bool {
        let copies = self.heads[Chain::Collected as usize].as_ref();
        let is_copy =
            |state: &Arc<SegmentState>| copies.is_some_and(|head| Arc::ptr_eq(&head.state, state));
        let unflushed = |head: &&Head| head.flushed_to < head.tail;
        let heads = self.heads.iter().flatten().filter(unflushed).map(|head| &head.state);
        let begun = self.under_way.back().into_iter().flat_map(|begun| &begun.touched);
        let begun = begun.map(|(state, _)| state);
        let mut stored = begun.chain(heads).chain(&self.dirty_segments);
        let mut stored = stored.by_ref().filter(|state| !is_copy(state));
        let first = stored.next();
        first.is_some_and(|first| stored.any(|other| !Arc::ptr_eq(first, other)))
    }

    /// A commit was begun. With the ticket of an earlier one it joins that: however long a synchronisation
    /// takes, few commits are under way.
    pub fn begin(&mut self, begun: UnderWay) {
        match self.under_way.back_mut().filter(|last| last.ticket == begun.ticket) {
            None => self.under_way.push_back(begun),
            Some(last) => {
                last.commit = begun.commit;
                for (state, count) in begun.touched {
                    match last.touched.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &state)) {
                        Some(entry) => entry.1 = count,
                        None => last.touched.push((state, count)),
                    }
                }
            }
        }
    }

    /// A commit is done: what it touched may be promised with the next one.
    pub fn settle(&mut self, touched: impl IntoIterator<Item = (Arc<SegmentState>, u32)>) {
        for (state, count) in touched {
            match self.persisted.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &state)) {
                Some(entry) => entry.1 = count,
                None => self.persisted.push((state, count)),
            }
        }
    }

    /// True when something that was stored is not flushed.
    pub fn has_work(&self) -> bool {
        !self.dirty.is_empty()
            || self.heads.iter().flatten().any(|head| head.flushed_to < head.tail)
    }
}

impl Shard {
    /// Appends one entry; it is stored, not yet flushed.
    pub(crate) fn append(&mut self, chain: Chain, draft: &Draft<'_>) -> Result<Appended, KvError> {
        let chain = self.chain_of(chain, draft);
        if chain != Chain::Collected {
            // An entry behind those of an abandoned batch would be its end.
            self.check_writable()?;
        }
        let value_length: usize = draft.value.iter().map(|part| part.len()).sum();
        let slot_bytes = entry::slot_bytes_for(draft.key.len(), value_length) as u32;
        let need = match chain {
            Chain::Collected => Need::Collector,
            _ if draft.flags & TOMBSTONE != 0 => Need::Tombstone,
            _ => Need::Data,
        };
        self.make_head(chain, slot_bytes, need)?;
        let batch = chain != Chain::Collected && self.batch.is_some();
        let more = if batch { entry::BATCH_MORE } else { 0 };
        let mut header = Header {
            version: draft.version,
            slot_bytes,
            key_length: draft.key.len() as u16,
            kind: draft.kind,
            flags: draft.flags | more,
            value_length: value_length as u32,
            expires_at_ms: draft.expires_at_ms,
            namespace: draft.namespace,
            ..Header::default()
        };
        let mut raw = header.encode();
        header.checksum = entry::checksum(&raw, draft.key, draft.value);
        let Some(head) = &mut self.log.heads[chain as usize] else { unreachable!() };
        let (state, offset) = (&head.state, head.tail);
        header.seal = self.store.sealer.seal(state.id, state.generation, offset, &header);
        header.encode_marks(&mut raw);
        // What a former life left behind the value would be no part of the entry, but the
        // padding is known to be zero.
        let padding = u64::from(slot_bytes) - header.used_bytes();
        let padding = &[0; entry::ALIGNMENT as usize][..padding as usize];
        let at = offset as usize;
        match *draft.value {
            [] => state.segment.store_parts(at, &[&raw, draft.key, padding]),
            [value] => state.segment.store_parts(at, &[&raw, draft.key, value, padding]),
            ref parts => {
                state.segment.store_parts(at, &[&raw, draft.key]);
                let mut at = at + raw.len() + draft.key.len();
                for part in parts.iter().chain([&padding]) {
                    state.segment.store(at, part);
                    at += part.len();
                }
            }
        }
        if let Some(pending) = &mut self.pending {
            pending.note(draft.hash, draft.namespace, draft.key);
        }
        let records = head.roster.as_ref().map_or(0, Roster::len);
        if let Some(roster) = &mut head.roster
            && draft.flags & APPENDED == 0
        {
            roster.push(draft.namespace, draft.hash);
        }
        head.tail += slot_bytes;
        head.count += 1;
        state.tail.store(head.tail, Ordering::Release);
        state.count.store(head.count, Ordering::Relaxed);
        let flags = if draft.flags & TOMBSTONE != 0 { Location::TOMBSTONE } else { 0 }
            | if draft.flags & EXPIRES != 0 { Location::EXPIRES } else { 0 };
        let location = Location::new(state.id, offset, flags);
        if batch {
            self.note_in_batch(draft, location, records);
        }
        let counters = &self.store.counters[self.index];
        stats::add(&counters.entries_stored, 1);
        stats::add(&counters.bytes_stored, u64::from(slot_bytes));
        Ok(Appended { version: draft.version, location, slot_bytes })
    }

    /// The chain of an entry: a batch lies in one, and entries of streams in theirs.
    #[inline]
    fn chain_of(&self, chain: Chain, draft: &Draft<'_>) -> Chain {
        match (chain, &self.batch) {
            (Chain::Data, Some(batch)) => batch.chain(),
            (Chain::Data, None) if draft.flags & APPENDED != 0 => Chain::Appends,
            _ => chain,
        }
    }

    /// Makes sure that entries of `puts` bytes and tombstones of `deletions` bytes can be stored in a
    /// row, at once: what is refused is refused before the first of them. Where `shrinks`, the memory
    /// limit does not concern them and they may use the room kept for deletions: the caller leaves
    /// fewer live bytes behind than there were.
    ///
    /// What an open batch has reserved already stays reserved beside it.
    ///
    /// Errors: [`KvError::BatchTooLarge`], [`KvError::MemoryLimit`], [`KvError::PoolFull`], the
    /// pool's. What was reserved before stays so.
    pub(crate) fn reserve(
        &mut self,
        puts: u64,
        deletions: u64,
        shrinks: bool,
    ) -> Result<(), KvError> {
        let shrinks = shrinks || puts == 0;
        self.reserve_for(puts, deletions, if shrinks { Need::Tombstone } else { Need::Data })
    }

    /// As [`Shard::reserve`], for what may take so much of the pool.
    pub(crate) fn reserve_for(
        &mut self,
        puts: u64,
        deletions: u64,
        need: Need,
    ) -> Result<(), KvError> {
        self.check_writable()?;
        let held = if self.in_batch() { self.reserved } else { 0 };
        let bytes = held + puts + deletions;
        let limit = self.store.batch_room_bytes();
        if bytes > limit {
            return Err(KvError::BatchTooLarge { length: bytes, limit });
        }
        if need == Need::Data {
            self.fit_memory(held + puts)?;
        }
        let chain = self.batch.as_ref().map_or(Chain::Data, Batch::chain);
        self.make_head(chain, bytes as u32, need)?;
        self.reserved = held + puts;
        Ok(())
    }

    /// Makes sure that the head of `chain` has room for `slot_bytes`.
    pub(crate) fn make_head(
        &mut self,
        chain: Chain,
        slot_bytes: u32,
        need: Need,
    ) -> Result<(), KvError> {
        if let Some(head) = &self.log.heads[chain as usize]
            && slot_bytes <= head.limit.saturating_sub(head.tail)
        {
            return Ok(());
        }
        self.switch_head(chain, slot_bytes, need)
    }

    /// Past its limit a head is left for a warm or ready segment where most of what it holds is
    /// stale already: the same few segments are then written again and again. True when it goes on
    /// instead.
    fn stays(&mut self, chain: Chain, slot_bytes: u32) -> bool {
        let roomy = self.store.free_segments() > self.store.low_segments();
        let (batch, warm_bytes) = (self.batch.is_some(), self.store.warm_bytes);
        let Some(head) = &mut self.log.heads[chain as usize] else { return false };
        if slot_bytes > head.state.length - head.tail {
            return false;
        }
        let used = u64::from(head.tail - entry::FIRST_ENTRY);
        let worn = head.state.stale_bytes() * 2 >= used && used >= u64::from(warm_bytes) / 2;
        if chain == Chain::Data && !batch && worn && roomy {
            return false;
        }
        head.limit = (head.tail + slot_bytes).saturating_add(warm_bytes).min(head.state.length);
        true
    }

    #[cold]
    fn switch_head(&mut self, chain: Chain, slot_bytes: u32, need: Need) -> Result<(), KvError> {
        if self.stays(chain, slot_bytes) {
            return Ok(());
        }
        if chain != Chain::Collected && !self.log.under_way.is_empty() {
            // The next segment may reach media before what waits for its synchronisation.
            self.fence_or_poison()?;
        }
        let moves_batch = self.batch.as_ref().is_some_and(|batch| batch.chain() == chain);
        if moves_batch {
            // Before anything changes: a batch refused halfway would lie in two segments.
            self.check_batch_fits(slot_bytes)?;
        }
        // A head with hardly any room left is closed first: the collector may then have it.
        let nearly_full = |head: &Head| head.state.length - head.tail < head.state.length / 8;
        if self.batch.is_none() && self.log.heads[chain as usize].as_ref().is_some_and(nearly_full)
        {
            self.close_head(chain)?;
        }
        let fresh = self.allocate_segment(need, 0, 0)?;
        self.close_head(chain)?;
        debug_assert!(entry::FIRST_ENTRY.is_multiple_of(ALIGNMENT));
        let limit = match chain {
            Chain::Data => self.store.warm_bytes,
            Chain::Collected | Chain::Appends => u32::MAX,
        };
        let roster = self.recycler.roster();
        self.log.heads[chain as usize] = Some(Head::fresh(fresh, limit, roster));
        if moves_batch {
            self.move_batch();
        }
        Ok(())
    }

    /// Allocates and links a segment, collecting garbage first where the pool is short.
    pub(crate) fn allocate_segment(
        &mut self,
        need: Need,
        owner_flags: u64,
        flags: u32,
    ) -> Result<Arc<SegmentState>, KvError> {
        let warm = if owner_flags == 0 { self.take_warm()? } else { None };
        let allocated = match warm {
            Some(segment) => Ok(self.store.take_over(segment, self.index)),
            None => self.store.allocate(self.index, Need::Data, owner_flags, flags),
        };
        let fresh = match allocated {
            Err(KvError::PoolFull { .. }) => {
                let roomy = need != Need::Collector && self.make_room()?;
                let need = if roomy { Need::Data } else { need };
                self.store.allocate(self.index, need, owner_flags, flags)?
            }
            Err(KvError::Pmem(PmemError::NoSpace { .. })) if need > Need::Mark => {
                self.store.allocate(self.index, need, owner_flags, flags)?
            }
            other => other?,
        };
        if let Some(last) = &self.log.last {
            last.segment.store_word(word::NEXT, u64::from(fresh.id) + 1);
            fresh.segment.store_word(word::PREVIOUS, u64::from(last.id) + 1);
            self.persister.flush_words(&last.segment);
        }
        self.persister.flush_words(&fresh.segment);
        self.log.last = Some(Arc::clone(&fresh));
        Ok(fresh)
    }

    /// Goes on appending to a segment that recovery left with a clean tail.
    pub(crate) fn resume_head(&mut self, chain: Chain, state: &Arc<SegmentState>) {
        let tail = state.tail.load(Ordering::Relaxed);
        let count = state.count.load(Ordering::Relaxed);
        state.set(HEAD);
        self.log.last = Some(Arc::clone(state));
        self.log.heads[chain as usize] = Some(Head {
            state: Arc::clone(state),
            tail,
            flushed_to: tail,
            count,
            limit: state.length,
            roster: None,
        });
    }

    /// Stops appending to the head of `chain`; what is in it is flushed with the next commit. That of a
    /// segment of streams is persisted at once: nothing of the next one may be on media without it.
    fn close_head(&mut self, chain: Chain) -> Result<(), KvError> {
        let Some(head) = self.log.heads[chain as usize].take() else { return Ok(()) };
        let unflushed = head.tail - head.flushed_to;
        if unflushed > 0 {
            self.log.note(&head.state, head.flushed_to, unflushed);
        }
        head.state.clear(HEAD);
        let gapless = chain == Chain::Appends && !fault::is_on(KnownBug::GapBetweenSegments);
        if gapless && self.log.is_dirty(&head.state) {
            let at = head.flushed_to as usize;
            self.persister.flush(&head.state.segment, at, unflushed as usize);
            self.fence_or_poison()?;
        }
        if let Some(roster) = head.roster {
            self.recycler.retire(&head.state, roster);
        }
        Ok(())
    }

    /// Flushes a range, with the help of idle shards where it is large.
    fn flush_range(&mut self, state: &Arc<SegmentState>, offset: u32, length: u32) {
        if self.store.is_worth_sharing(length, self.log.asked) {
            self.store.cooperate(self.index, state, offset, length);
            return;
        }
        self.persister.flush(&state.segment, offset as usize, length as usize);
    }

    /// As [`Shard::fence`]; the shard takes no further writes when it fails.
    pub(crate) fn fence_or_poison(&mut self) -> Result<(), KvError> {
        let fenced = self.fence();
        if fenced.is_err() {
            self.poison();
        }
        fenced
    }

    fn fence(&mut self) -> Result<(), KvError> {
        Self::check_medium()?;
        Ok(self.persister.fence()?)
    }

    /// Fails where a test has the medium fail.
    pub(crate) fn check_medium() -> Result<(), KvError> {
        BEFORE_FENCE
            .check()
            .map_err(|fault| KvError::Io { path: "the pool".into(), source: fault.into() })
    }

    /// Persists everything stored so far, at the store's durability, when it returns. Nothing may
    /// be acknowledged before, and no reply may show what a later crash could take back.
    ///
    /// Errors: the pool's; the shard then refuses further writes.
    pub fn commit(&mut self) -> Result<(), KvError> {
        self.check_writable()?;
        if self.log.is_persisted() {
            self.feed_committed();
            return Ok(());
        }
        assert!(self.batch.is_none(), "a batch is ended before it is committed");
        if fault::is_on(KnownBug::RecycleBeforePersist) {
            self.recycle_dead();
            self.fence_renewed()?;
        }
        self.flush_log();
        if fault::is_on(KnownBug::AcknowledgeBeforeFence) {
            return Ok(());
        }
        self.fence_or_poison()?;
        self.feed_committed();
        self.appends_in = self.appends_in.filter(|log| *log != self.index);
        self.settle_all();
        let mut touched = std::mem::take(&mut self.log.touched);
        self.log.settle(touched.drain(..));
        self.log.touched = touched;
        if self.recycler.is_renewing() {
            self.settle_renewed();
        }
        if self.recycler.look {
            self.recycle_dead();
        }
        stats::add(&self.store.counters[self.index].commits, 1);
        Ok(())
    }

    /// Flushes all that was stored, and the counts that the commits before made sure of.
    pub(crate) fn flush_log(&mut self) {
        for chain in 0..CHAINS {
            if let Some(head) = &mut self.log.heads[chain]
                && head.flushed_to < head.tail
            {
                let (offset, length) = (head.flushed_to, head.tail - head.flushed_to);
                head.flushed_to = head.tail;
                let state = Arc::clone(&head.state);
                self.log.touch(&state);
                self.flush_range(&state, offset, length);
            }
        }
        let mut dirty = std::mem::take(&mut self.log.dirty);
        let mut segments = std::mem::take(&mut self.log.dirty_segments);
        for range in dirty.drain(..) {
            self.flush_range(&segments[range.segment], range.offset, range.length);
        }
        segments.clear();
        (self.log.dirty, self.log.dirty_segments) = (dirty, segments);
        self.log.asked = self.store.write_back.asked();
        self.log.commits = self.log.commits.wrapping_add(1);
        let all_now = self.log.commits.is_multiple_of(WORDS_EVERY);
        for (state, count) in self.log.persisted.drain(..) {
            state.promise(count);
            // Where words reach media lazily, they are brought up at every segment's end and now
            // and then: the walk can do without, but finds less damage.
            if all_now || !state.is(HEAD) {
                self.persister.flush_words_now(&state.segment);
            } else {
                self.persister.flush_words(&state.segment);
            }
        }
    }

    /// Takes what was touched since the last commit, for one that is begun now.
    pub(crate) fn take_touched(&mut self) -> Vec<(Arc<SegmentState>, u32)> {
        std::mem::take(&mut self.log.touched)
    }

    /// Persists what is left and the exact counts: the end of a shard in good order.
    ///
    /// Errors: as [`Shard::commit`].
    pub(crate) fn close(&mut self) -> Result<(), KvError> {
        if self.batch.is_some() {
            // Left open by a panic: it vanishes, as after a crash.
            return Ok(());
        }
        self.commit()?;
        self.release_warm()?;
        if self.log.persisted.is_empty() {
            return Ok(());
        }
        for (state, count) in self.log.persisted.drain(..) {
            state.promise(count);
            self.persister.flush_words_now(&state.segment);
        }
        Ok(self.persister.fence()?)
    }
}
