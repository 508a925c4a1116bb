//! Commits that do not wait for the medium, and what rests on them.
//!
//! ```text
//! requests ── begin_commit: flush, number ─▶ fence under way ─▶ settle: persisted up to the number
//!    │ read or stored                                                 │
//!    └── take_rests: the commit that the reply waits for ◀────────────┘
//! ```
//!
//! Between the two the shard serves on, so what it shows may not be persisted. It keeps marks, by hash, of
//! what was stored lately: a look-up of a marked key rests on the commit of the mark. What does not go by
//! key (a scan, a count of keys, an order, a stream) rests on the latest commit. A mark may be that of
//! another key with the same bits, and stays a little longer than its commit needs; so a reply may wait
//! without need, and none leaves too early.
//!
//! Commits are numbered by the shard. A fence's ticket would not do: a fence between two commits (of a
//! segment's new life, of a closed head) persists what was flushed, and not what was only stored.
//!
//! Only pools whose fences wait for a disk have this; elsewhere a commit is done when it was begun.
//!
//! Invariant: after [`Shard::commit`] nothing is under way, and every commit so far counts as persisted.

use std::cell::Cell;

use beeline_pmem::{FenceProgress, Mechanism};

use crate::KvError;
use crate::fault::{self, KnownBug};
use crate::rows::{generation_of, is_fields};
use crate::shard::Shard;
use crate::shard::log::UnderWay;
use crate::stats;

/// Words of the marks: 65,536 bits, of which a usual commit sets some hundreds.
const WORDS: usize = 1024;

#[derive(Debug)]
struct Marks(Box<[u64; WORDS]>);

impl Default for Marks {
    fn default() -> Self {
        Self(Box::new([0; WORDS]))
    }
}

impl Marks {
    /// The upper bits of a hash; the lowest ones are the same in the whole shard.
    #[inline]
    fn place(hash: u64) -> (usize, u64) {
        let bit = hash >> 48;
        (bit as usize / 64, 1 << (bit % 64))
    }

    #[inline]
    fn set(&mut self, hash: u64) {
        let (word, bit) = Self::place(hash);
        self.0[word] |= bit;
    }

    #[inline]
    fn has(&self, hash: u64) -> bool {
        let (word, bit) = Self::place(hash);
        self.0[word] & bit != 0
    }
}

/// See the module's documentation. Two sets of marks take turns: one is emptied when all of it is persisted.
#[derive(Debug)]
pub(crate) struct Pending {
    /// Number of the commit that persists what is stored now.
    next: u64,
    recent: Marks,
    /// The commit of the latest mark there.
    recent_to: u64,
    earlier: Marks,
    earlier_to: u64,
    /// Every commit up to this one is persisted.
    settled_to: u64,
    /// What was looked at and stored since the last look rests on this commit.
    rests: Cell<u64>,
}

impl Default for Pending {
    fn default() -> Self {
        Self {
            next: 1,
            recent: Marks::default(),
            recent_to: 0,
            earlier: Marks::default(),
            earlier_to: 0,
            settled_to: 0,
            rests: Cell::new(0),
        }
    }
}

/// A row, told by its generation, among the hashes of keys.
#[inline]
fn row_mark(generation: u64) -> u64 {
    generation.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

impl Pending {
    /// An entry of this key is stored, by the shard or by a client that the shard believed.
    #[inline]
    pub fn note(&mut self, hash: u64, namespace: u32, key: &[u8]) {
        if self.recent_to <= self.settled_to {
            self.recent.0.fill(0);
        }
        self.recent.set(hash);
        if is_fields(namespace)
            && let Some(generation) = generation_of(key)
        {
            self.recent.set(row_mark(generation));
        }
        self.recent_to = self.next;
        self.rests.set(self.next);
    }

    #[inline]
    fn rest_on(&self, commit: u64) {
        self.rests.set(self.rests.get().max(commit));
    }

    /// A key with this hash is looked up.
    #[inline]
    pub fn look(&self, hash: u64) {
        if self.recent_to > self.settled_to && self.recent.has(hash) {
            self.rest_on(self.recent_to);
        } else if self.earlier_to > self.settled_to && self.earlier.has(hash) {
            self.rest_on(self.earlier_to);
        }
    }

    /// Something is looked at that any entry may have changed.
    pub fn look_at_all(&self) {
        let latest = self.recent_to.max(self.earlier_to);
        if latest > self.settled_to {
            self.rest_on(latest);
        }
    }

    /// The commit of what was stored so far is begun; its number. Later marks may go to an empty set.
    fn begin(&mut self) -> u64 {
        self.next += 1;
        if self.earlier_to <= self.settled_to && self.recent_to > self.settled_to {
            std::mem::swap(&mut self.recent, &mut self.earlier);
            (self.earlier_to, self.recent_to) = (self.recent_to, 0);
        }
        self.next - 1
    }
}

impl Shard {
    /// What keeps track of replies, where a commit waits for a disk.
    pub(crate) fn pending_of(mechanism: Mechanism) -> Option<Box<Pending>> {
        matches!(mechanism, Mechanism::FileSync | Mechanism::Recorded).then(Box::default)
    }

    /// A key with this hash is looked up.
    #[inline]
    pub(crate) fn look(&self, hash: u64) {
        if let Some(pending) = &self.pending {
            pending.look(hash);
        }
    }

    /// A row is looked at as a whole.
    #[inline]
    pub(crate) fn look_at_row(&self, generation: u64) {
        self.look(row_mark(generation));
    }

    /// Something is looked at that any entry may have changed.
    #[inline]
    pub(crate) fn look_at_all(&self) {
        if let Some(pending) = &self.pending {
            pending.look_at_all();
        }
    }

    /// Begins to persist everything stored so far. It is persisted, at the store's durability, once
    /// [`Shard::settle`] has brought [`Shard::settled_to`] to the number that [`Shard::take_rests`] gave
    /// for it; until then nothing may be acknowledged that rests on it. Where no disk is waited for, and
    /// where a change feed, a dead segment or a stream asks for it, this is [`Shard::commit`]; so it is
    /// where the log goes on in another segment: what a loss of power leaves is whole commits, in their
    /// order, and perhaps a part of the next one.
    ///
    /// A commit for which the same synchronisation waits that an earlier one waits for is settled with it.
    ///
    /// Errors: as [`Shard::commit`].
    pub fn begin_commit(&mut self) -> Result<(), KvError> {
        let waits = self.store.feed.is_some()
            || self.recycler.look
            || self.recycler.is_renewing()
            || self.appends_in.is_some()
            || self.log.leaves_its_segments();
        if self.pending.is_none() || waits {
            return self.commit();
        }
        self.check_writable()?;
        if !self.log.has_work() {
            return Ok(());
        }
        assert!(!self.in_batch(), "a batch is ended before it is committed");
        self.flush_log();
        let begun = Self::check_medium().and_then(|()| Ok(self.persister.begin_fence()?));
        let ticket = begun.inspect_err(|_| self.poison())?;
        let touched = self.take_touched();
        if let Some(pending) = &mut self.pending {
            let commit = pending.begin();
            self.log.begin(UnderWay { ticket, commit, touched });
        }
        Ok(())
    }

    /// Notes which commits that were begun are done by now.
    ///
    /// Errors: as [`Shard::commit`]: what was begun and is not settled is not persisted then.
    pub fn settle(&mut self) -> Result<(), KvError> {
        let done = |shard: &Self, begun: &UnderWay| begun.ticket <= shard.persister.fenced_to();
        let early = fault::is_on(KnownBug::AcknowledgeBegun);
        if !self.log.under_way.front().is_some_and(|begun| early || done(self, begun)) {
            return Ok(());
        }
        self.check_writable()?;
        let fenced_to = if early { u64::MAX } else { self.persister.fenced_to() };
        // Only now: a failure that came before the fence counted as done is seen here.
        if let Err(error) = self.persister.check() {
            self.poison();
            return Err(error.into());
        }
        self.settle_to(fenced_to);
        Ok(())
    }

    /// A commit that waited is done: everything is persisted.
    pub(crate) fn settle_all(&mut self) {
        self.settle_to(u64::MAX);
        if let Some(pending) = &mut self.pending {
            pending.settled_to = pending.begin();
        }
    }

    fn settle_to(&mut self, fenced_to: u64) {
        let done = |begun: &mut UnderWay| begun.ticket <= fenced_to;
        while let Some(begun) = self.log.under_way.pop_front_if(done) {
            self.log.settle(begun.touched);
            stats::add(&self.store.counters[self.index].commits, 1);
            if let Some(pending) = &mut self.pending {
                pending.settled_to = begun.commit;
            }
        }
    }

    /// The number up to which every commit is known to be persisted: see [`Shard::settle`].
    #[must_use]
    pub fn settled_to(&self) -> u64 {
        self.pending.as_ref().map_or(0, |pending| pending.settled_to)
    }

    /// The number of the commit that was begun last; 0: none was.
    #[must_use]
    pub fn begun_to(&self) -> u64 {
        self.pending.as_ref().map_or(0, |pending| pending.next - 1)
    }

    /// Fences of commits that were begun and are not settled: [`Shard::commit`] waits for them. Few, however
    /// many turns a disk takes: commits that wait for the same synchronisation share one.
    #[must_use]
    pub fn commits_under_way(&self) -> usize {
        self.log.under_way.len()
    }

    /// The number of the commit that must be settled before anything may be shown that was read or stored
    /// in this shard since the last call; 0: none has to, or no disk is waited for and
    /// [`Shard::begin_commit`] is enough.
    #[inline]
    pub fn take_rests(&mut self) -> u64 {
        self.pending.as_ref().map_or(0, |pending| pending.rests.take())
    }

    /// How far commits that were begun have come, for the thread that settles them.
    #[must_use]
    pub fn commit_progress(&self) -> FenceProgress {
        self.persister.progress()
    }

    /// Has `waker` called whenever [`Shard::settle`] may find something done. It must not block. The
    /// first waker stays.
    pub fn set_commit_waker(&self, waker: impl Fn() + Send + Sync + 'static) {
        self.persister.set_waker(waker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rests(pending: &Pending, hash: u64) -> u64 {
        pending.look(hash);
        pending.rests.take()
    }

    #[test]
    fn a_key_rests_on_its_commit_until_that_is_settled_and_others_on_none() {
        let hash = |at: u64| at << 48;
        let mut pending = Pending::default();
        for commit in 1..=200 {
            pending.note(hash(commit), 0, b"key");
            assert_eq!(pending.rests.take(), commit, "what is stored");
            assert_eq!(pending.begin(), commit);
            // Three commits are under way at a time.
            pending.settled_to = commit.saturating_sub(3);
            for key in pending.settled_to + 1..=commit {
                let waits = rests(&pending, hash(key));
                assert!((key..=commit).contains(&waits), "{key} of {commit} waits for {waits}");
            }
            assert_eq!(rests(&pending, hash(300)), 0, "never stored");
            assert_eq!(rests(&pending, hash(commit.saturating_sub(9))), 0, "persisted long ago");
            pending.look_at_all();
            assert_eq!(pending.rests.take(), commit);
        }
        pending.settled_to = 200;
        pending.look_at_all();
        assert_eq!((pending.rests.take(), rests(&pending, hash(200))), (0, 0));
    }
}
