//! Commits of a turn that do not wait for the medium, and what waits for them.
//!
//! ```text
//!   serve ─ requests ─ begin_commit ─┐ replies rest
//!   serve ─ requests ─ begin_commit ─┤     │
//!   serve ─ settle ◄── wake-up ◄── the pool's synchroniser
//!             └─ release: replies and parcels up to the settled commit leave
//! ```
//!
//! A turn with requests of one-sided clients waits for its commit, as do commands over several shards,
//! members of a cluster, upkeep, and what [`Shard::begin_commit`] names. Where no disk is waited for,
//! every commit is done when it was begun.
//!
//! Invariants: no reply leaves before the commit that it rests on is settled; where one fails, whatever
//! rests on it is refused; the thread wakes when a commit may be settled (see
//! [`ShardThread::look_around`]).

use std::sync::atomic::Ordering;

use beeline_kv::{KvError, Shard};

use super::{Peer, ShardThread};
use crate::connection::{Connection, Hold, Life};
use crate::stats::SHORTEST_COMMIT_NS;

impl ShardThread {
    /// The reply that a connection is being given waits for a commit of this shard.
    pub(super) fn rest(&mut self, connection: &mut Connection, commit: u64, start: usize) {
        connection.rest_on(commit, start);
        if !connection.is_listed {
            connection.is_listed = true;
            self.resting.push(connection.slot);
        }
    }

    /// Notes which commits are done.
    ///
    /// Errors: as [`Shard::settle`].
    pub(super) fn settle_commits(&mut self, shard: &mut Shard) -> Result<(), KvError> {
        // Before the shard looks: what is done later is news for the next turn.
        self.fenced_seen = self.progress.fenced_to();
        shard.settle()
    }

    /// Makes durable what the turn did, or begins to; `waits`: what it did is answered by itself.
    ///
    /// Errors: as [`Shard::commit`].
    pub(super) fn commit_turn(&mut self, shard: &mut Shard, waits: bool) -> Result<(), KvError> {
        let began_ns = self.commit_begins();
        let committed = if waits { shard.commit() } else { shard.begin_commit() };
        let (begun_to, settled_to) = (shard.begun_to(), shard.settled_to());
        if begun_to <= settled_to {
            self.commit_ended(began_ns);
        } else if self.under_way.back().is_none_or(|(commit, _)| *commit < begun_to) {
            let is_waited_for = |(commit, _): &&(u64, Option<u64>)| *commit > settled_to;
            let known = self.under_way.iter().filter(is_waited_for).count();
            match self.under_way.back_mut() {
                // One that joined the last one is timed with it.
                Some((commit, _)) if known >= shard.commits_under_way() => *commit = begun_to,
                _ => self.under_way.push_back((begun_to, began_ns)),
            }
        }
        committed
    }

    /// Lets go what waits for commits up to `settled_to`, all of which are persisted.
    pub(super) fn release_to(&mut self, settled_to: u64) {
        if self.settled_to == settled_to {
            return;
        }
        self.settled_to = settled_to;
        while let Some((_, began_ns)) =
            self.under_way.pop_front_if(|(commit, _)| *commit <= settled_to)
        {
            self.commit_ended(began_ns);
        }
        for slot in std::mem::take(&mut self.resting) {
            self.with_connection(slot, |thread, connection| {
                connection.settle(settled_to);
                if connection.is_resting() {
                    thread.resting.push(slot);
                    return;
                }
                connection.is_listed = false;
                if connection.hold == Hold::Order && connection.is_in_order() {
                    connection.hold = Hold::No;
                    connection.again = true;
                    thread.resume_later(connection);
                }
            });
        }
    }

    /// The time before a commit that may wait for the medium.
    pub(super) fn commit_begins(&self) -> Option<u64> {
        self.times_commits.then(|| self.shared.store.clock().monotonic_ns())
    }

    /// Counts how long it took, unless there was nothing to wait for.
    pub(super) fn commit_ended(&self, began_ns: Option<u64>) {
        let Some(began_ns) = began_ns else { return };
        let took_ns = self.shared.store.clock().monotonic_ns().saturating_sub(began_ns);
        if took_ns >= SHORTEST_COMMIT_NS {
            self.shared.times[self.index].node_commit_seconds.record_ns(took_ns);
        }
    }

    /// What this turn executed is not durable, nor what waited for a commit: nothing of it may look
    /// acknowledged.
    pub(super) fn refuse_turn(&mut self, error: &str, shard: &mut Shard) {
        self.shared.doors[self.index].broken.store(true, Ordering::Relaxed);
        tracing::error!(
            error,
            shard = self.index,
            "cannot make writes durable; closing their connections"
        );
        for slot in std::mem::take(&mut self.resting) {
            if let Some(connection) = self.connection(slot) {
                connection.is_listed = false;
                // The slot may be of a client that left, and another client's by now.
                if connection.is_resting() {
                    if connection.life != Life::Dead {
                        connection.refuse_resting();
                    }
                    self.refused.push(slot);
                }
            }
        }
        for slot in std::mem::take(&mut self.touched) {
            if !self.refused.contains(&slot)
                && let Some(connection) = self.connection(slot)
            {
                connection.output.clear();
                connection.life = Life::Dead;
            }
            self.touched.push(slot);
        }
        self.touched.append(&mut self.refused);
        let refused = |life| matches!(life, Life::Dead | Life::Draining);
        self.recall(|connection| refused(connection.life));
        self.fabric.abandon(shard);
        self.peers.iter_mut().flatten().for_each(Peer::refuse_executed);
    }
}
