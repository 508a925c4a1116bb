//! Atomic batches: entries that survive a crash all or none.
//!
//! Every entry of a batch but the last carries BATCH_MORE, and they lie in a row in one segment;
//! recovery drops a row without an end. Ending a batch clears the flag of its last entry, which is
//! not flushed yet.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::KvError;
use crate::entry::{self, APPENDED, BATCH_MORE, FIRST_ENTRY, HEADER_BYTES, Header};
use crate::fault::{self, KnownBug};
use crate::index::Location;
use crate::shard::Shard;
use crate::shard::log::{Chain, Draft};
use crate::shard::recycle::Roster;
use crate::store::Need;

/// An entry of the open batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub shard: u32,
    pub namespace: u32,
    pub hash: u64,
    pub location: Location,
    /// It counts as one with an earlier entry of its key in the same segment.
    pub follows: bool,
    /// It is an entry of a stream.
    pub appended: bool,
}

/// An entry that moved to another segment while its batch was open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub shard: u32,
    pub namespace: u32,
    pub hash: u64,
    pub from: Location,
    pub to: Location,
    /// It counted as one with an earlier entry, and stands alone now.
    pub parted: bool,
    /// It is an entry of a stream.
    pub appended: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Batch {
    members: Vec<Member>,
    moves: Vec<Move>,
    /// Records in the head's roster before the first member.
    records: usize,
    /// Bytes of entries that are no deletions.
    bytes: u64,
    /// Where all of it lies.
    chain: Chain,
}

impl Batch {
    /// Where all of it lies.
    #[inline]
    pub fn chain(&self) -> Chain {
        self.chain
    }
}

impl Shard {
    /// Opens an atomic batch: what is stored until [`Shard::end_batch`] survives a crash as a
    /// whole or not at all. Batches do not nest.
    pub fn begin_batch(&mut self) {
        assert!(self.batch.is_none(), "batches do not nest");
        self.batch = Some(std::mem::take(&mut self.spare_batch));
    }

    /// Gives up the open batch, which cannot be finished: no opening of the store will find its
    /// entries. Until then they are in memory, so the shard takes and persists nothing any more:
    /// [`KvError::Poisoned`]. Its owner may still end it, which does nothing then.
    pub fn abandon_batch(&mut self) {
        if self.batch.is_some() {
            self.poison();
        }
    }

    /// Entries of the open batch.
    pub(crate) fn batch_entries(&self) -> usize {
        self.batch.as_ref().map_or(0, |batch| batch.members.len())
    }

    /// Bytes of the open batch that count for its limit.
    pub(crate) fn batch_bytes(&self) -> u64 {
        self.batch.as_ref().map_or(0, |batch| batch.bytes)
    }

    /// Notes that an entry of one of its keys was stored in another shard's log, or that all of these
    /// are persisted.
    pub(crate) fn lean(&mut self, leans: bool) {
        self.leans = leans;
    }

    /// Takes and persists nothing any more where something was stored that is not persisted, in its
    /// own log or for its keys in another's: readers of these keys must not see what a restart takes
    /// back.
    pub(crate) fn poison_uncommitted(&mut self) {
        if self.log.has_work() || self.leans {
            self.poison();
        }
    }

    /// From now on the shard takes and persists nothing.
    pub(crate) fn poison(&mut self) {
        self.poisoned = true;
        self.feed_given_up();
    }

    /// Closes the batch. [`Shard::commit`] persists it. One that was given up stays without an end.
    pub fn end_batch(&mut self) {
        if self.poisoned {
            self.batch = None;
            self.reserved = 0;
            return;
        }
        self.install_moves();
        self.feed_end_batch();
        let batch = self.batch.take();
        assert!(batch.is_some(), "a batch is begun before it is ended");
        assert!(
            batch.as_ref().is_some_and(|batch| batch.moves.is_empty()),
            "every owner of an index was told where its entries moved"
        );
        self.reserved = 0;
        let last = batch.as_ref().and_then(|batch| batch.members.last().copied());
        if let Some(mut batch) = batch {
            batch.members.clear();
            batch.bytes = 0;
            batch.chain = Chain::Data;
            self.spare_batch = batch;
        }
        let Some(last) = last else {
            self.feed_rest();
            return;
        };
        let state = self.cache.get(&self.store.table, last.location.segment());
        let offset = last.location.offset();
        let mut header = crate::shard::read_header(state, offset);
        header.flags &= !BATCH_MORE;
        let length = usize::from(header.key_length) + header.value_length as usize;
        let rest = state.bytes(offset + HEADER_BYTES, length);
        header.checksum = entry::checksum(&header.encode(), rest, &[]);
        header.seal = self.store.sealer.seal(state.id, state.generation, offset, &header);
        state.segment.store(offset as usize, &header.encode());
    }

    pub(crate) fn note_in_batch(&mut self, draft: &Draft<'_>, location: Location, records: usize) {
        let hash = draft.hash;
        let shard = self.store.owner_of(hash) as u32;
        if let Some(batch) = &mut self.batch {
            if batch.members.is_empty() {
                batch.records = records;
            }
            let namespace = draft.namespace;
            let appended = draft.flags & APPENDED != 0;
            let follows = false;
            batch.members.push(Member { shard, namespace, hash, location, follows, appended });
        }
    }

    /// The latest member counts as one with an earlier entry of its key.
    #[inline]
    pub(crate) fn note_follower(&mut self) {
        if let Some(batch) = &mut self.batch
            && let Some(member) = batch.members.last_mut()
        {
            member.follows = true;
        }
    }

    /// Counts an entry about to join the open batch, unless it is one too many for the limit that
    /// does not depend on how entries lie.
    pub(crate) fn admit_to_batch(&mut self, slot_bytes: u64) -> Result<(), KvError> {
        let limit = self.store.batch_limit_bytes;
        let Some(batch) = &mut self.batch else { return Ok(()) };
        let length = batch.bytes + slot_bytes;
        if length > limit {
            return Err(KvError::BatchTooLarge { length, limit });
        }
        batch.bytes = length;
        Ok(())
    }

    /// Refuses an entry with which the open batch no longer fits one segment.
    pub(crate) fn check_batch_fits(&mut self, next_slot_bytes: u32) -> Result<(), KvError> {
        let members = self.batch.as_ref().map_or(&[][..], |batch| &batch.members);
        let Some(first) = members.first().copied() else { return Ok(()) };
        let state = self.cache.get(&self.store.table, first.location.segment());
        let end = state.tail.load(Ordering::Relaxed);
        let length = u64::from(end - first.location.offset()) + u64::from(next_slot_bytes);
        let limit = u64::from(state.length - FIRST_ENTRY);
        if length > limit { Err(KvError::BatchTooLarge { length, limit }) } else { Ok(()) }
    }

    /// Copies the entries of the open batch, which fit ([`Shard::check_batch_fits`]), to the fresh
    /// head, so that they stay in a row.
    pub(crate) fn move_batch(&mut self) {
        let Some(mut batch) = self.batch.take() else { return };
        self.move_members(&mut batch);
        self.batch = Some(batch);
    }

    fn move_members(&mut self, batch: &mut Batch) {
        let Some(first) = batch.members.first().copied() else { return };
        let old = Arc::clone(self.cache.get(&self.store.table, first.location.segment()));
        let end = old.tail.load(Ordering::Relaxed);
        let length = end - first.location.offset();
        self.recycler.truncate(&old, batch.records);
        let Some(head) = &mut self.log.heads[batch.chain as usize] else { unreachable!() };
        batch.records = head.roster.as_ref().map_or(0, Roster::len);
        let mut bytes = vec![0; length as usize];
        old.segment.read(first.location.offset() as usize, &mut bytes);
        for member in &mut batch.members {
            let at = (member.location.offset() - first.location.offset()) as usize;
            let mut raw = [0; HEADER_BYTES as usize];
            raw.copy_from_slice(&bytes[at..at + HEADER_BYTES as usize]);
            let mut header = Header::decode(&raw);
            let offset = head.tail;
            header.seal =
                self.store.sealer.seal(head.state.id, head.state.generation, offset, &header);
            head.state.segment.store(offset as usize, &header.encode());
            let body = &bytes[at + HEADER_BYTES as usize..at + header.slot_bytes as usize];
            head.state.segment.store((offset + HEADER_BYTES) as usize, body);
            head.tail += header.slot_bytes;
            head.count += 1;
            // A flush within the batch took what came before it out of the counts.
            if header.version >= self.store.barrier(member.namespace)
                && !member.appended
                && let Some(roster) = &mut head.roster
            {
                roster.push(member.namespace, member.hash);
            }
            let flags = member.location.0 & (Location::TOMBSTONE | Location::EXPIRES);
            let to = Location::new(head.state.id, offset, flags);
            let (shard, namespace, hash) = (member.shard, member.namespace, member.hash);
            let parted = std::mem::take(&mut member.follows);
            let (from, appended) = (member.location, member.appended);
            batch.moves.push(Move { shard, namespace, hash, from, to, parted, appended });
            member.location = to;
        }
        head.state.tail.store(head.tail, Ordering::Release);
        head.state.count.store(head.count, Ordering::Relaxed);
        self.abandon(&old, first.location.offset(), batch.members.len() as u32);
    }

    /// Makes the chain of streams the one that the open batch lies in, with `next_slot_bytes` to come.
    /// What it has stored elsewhere moves there.
    ///
    /// Errors: [`KvError::BatchTooLarge`], [`KvError::PoolFull`], the pool's. Nothing changed then,
    /// unless the shard is poisoned.
    pub(crate) fn enter_appends(
        &mut self,
        next_slot_bytes: u32,
        need: Need,
    ) -> Result<(), KvError> {
        let Some(batch) = &mut self.batch else { return Ok(()) };
        if batch.chain == Chain::Appends {
            return Ok(());
        }
        let first = batch.members.first().copied();
        let Some(first) = first.filter(|_| !fault::is_on(KnownBug::SplitBatch)) else {
            batch.chain = Chain::Appends;
            return Ok(());
        };
        let old = Arc::clone(self.cache.get(&self.store.table, first.location.segment()));
        let from = first.location.offset();
        let end = old.tail.load(Ordering::Relaxed);
        let length = u64::from(end - from) + u64::from(next_slot_bytes);
        let limit = self.store.batch_room_bytes();
        if length > limit {
            return Err(KvError::BatchTooLarge { length, limit });
        }
        self.make_head(Chain::Appends, length as u32, need)?;
        let Some(mut batch) = self.batch.take() else { return Ok(()) };
        let left = &mut self.log.heads[batch.chain as usize];
        if let Some(roster) = left.as_mut().and_then(|head| head.roster.as_mut()) {
            roster.truncate(batch.records);
        }
        batch.chain = Chain::Appends;
        self.move_members(&mut batch);
        let members = batch.members.len() as u32;
        self.batch = Some(batch);
        if let Some(head) = &mut self.log.heads[Chain::Data as usize] {
            head.tail = from;
            head.count -= members;
        }
        // What is stored there next must not connect to members that a crash may find there.
        self.persister.flush(&old.segment, from as usize, (end - from) as usize);
        self.fence_or_poison()
    }

    /// True when entries moved whose index owners were not told.
    pub(crate) fn has_moves(&self) -> bool {
        self.batch.as_ref().is_some_and(|batch| !batch.moves.is_empty())
    }

    /// Entries that moved since the last call; each index owner applies its own.
    pub(crate) fn take_moves(&mut self) -> Vec<Move> {
        self.batch.as_mut().map(|batch| std::mem::take(&mut batch.moves)).unwrap_or_default()
    }

    /// Applies the moves of this shard's keys. Those of other shards' keys stay for the
    /// [`crate::Keyspace`], which holds their owners: an entry can move on behalf of this shard
    /// alone (a deletion of an expired or evicted key) while the batch holds keys of others.
    pub(crate) fn install_moves(&mut self) {
        if !self.has_moves() {
            return;
        }
        let mine = self.index as u32;
        let (own, others) = self.take_moves().into_iter().partition(|moved| moved.shard == mine);
        if let Some(batch) = &mut self.batch {
            batch.moves = others;
        }
        let own: Vec<Move> = own;
        for moved in own {
            self.apply_move(&moved);
        }
    }

    /// Points the index at the new place of a moved entry, where it is still the newest.
    pub(crate) fn apply_move(&mut self, moved: &Move) {
        if moved.appended {
            self.move_appended(moved);
            return;
        }
        let Some(index) = self.spaces.get_mut(moved.namespace) else { return };
        let here = |slot: &crate::index::Slot| slot.location.same_place(moved.from);
        if let Some(id) = index.find(moved.hash, here) {
            let before = *index.slot(id);
            index.slot_mut(id).location = before.location.moved_to(moved.to);
            let after = *index.slot(id);
            self.count_place(&after);
            self.uncount_place(&before);
        }
        if moved.parted {
            // Of keys with one hash, too high a count does no harm.
            let mut slots = Vec::new();
            if let Some(index) = self.spaces.get(moved.namespace) {
                index.find_all(moved.hash, &mut slots);
            }
            for id in slots {
                self.change_slot(moved.namespace, id, crate::index::Slot::add_stale);
            }
        }
    }
}

impl Shard {
    /// Wipes the entries that moved away, so that nobody takes them for entries.
    fn abandon(&mut self, old: &Arc<crate::segments::SegmentState>, from: u32, entries: u32) {
        let end = old.tail.load(Ordering::Relaxed);
        let zeros = [0; 4096];
        let mut at = from as usize;
        while at < end as usize {
            let part = zeros.len().min(end as usize - at);
            old.segment.store(at, &zeros[..part]);
            at += part;
        }
        old.tail.store(from, Ordering::Release);
        old.count.fetch_sub(entries, Ordering::Relaxed);
        self.log.note(old, from, end - from);
    }
}
