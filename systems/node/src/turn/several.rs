//! Commands over several shards, and those whose answers may take a while.
//!
//! Invariants: they run without the own lock held, in order with their connection's other requests;
//! shards are locked in index order; commits under way in them end before anything runs, and what ran is
//! committed before the locks are let go, so that neither a reply nor what another shard stores rests
//! on a change that could still be lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_kv::Keyspace;

use super::sockets::{Reach, bound};
use super::{ShardThread, log};
use crate::connection::{Connection, Life};
use crate::replicated::Look;
use crate::shared::Shared;
use crate::stats::count;
use crate::wire::{Route, Scope};

/// Requests executed while several shards stay locked: those that follow a command over several
/// shards in its pipeline, and those of connections that wait for the same shards.
const REQUESTS_PER_LOCKING: usize = 64;

/// What a deferred request waits for.
#[derive(PartialEq, Eq)]
enum Need {
    /// These shards, ascending.
    Shards(Vec<usize>),
    /// The node, and no other request beside it.
    Node,
    /// To be looked at again: the log decides.
    Log,
    /// Nothing any more.
    Nothing,
}

impl ShardThread {
    /// Runs what was deferred: all that waits for the same shards as the first one does, with one
    /// locking and one commit; or one command of the node.
    pub(super) fn run_deferred(&mut self) {
        let Some(&first) = self.deferred.front() else { return };
        let shared = Arc::clone(&self.shared);
        match self.need_of(first) {
            Need::Nothing => {
                self.deferred.pop_front();
            }
            Need::Log => {
                self.deferred.pop_front();
                self.release(first);
            }
            Need::Node => {
                self.deferred.pop_front();
                self.with_connection(first, |thread, connection| {
                    connection.needs_several = false;
                    thread.run_for_node(&shared, connection);
                    thread.resume_later(connection);
                });
            }
            Need::Shards(shards) => self.run_together(&shared, shards),
        }
    }

    fn need_of(&mut self, slot: u32) -> Need {
        let own = self.index;
        let shared = Arc::clone(&self.shared);
        let taken = self.connections.get_mut(slot as usize).and_then(Option::as_deref_mut);
        let Some(connection) = taken else { return Need::Nothing };
        // One that awaits replies is in line for a client that left and whose place it took: its
        // own turn comes with the last reply.
        // Nothing more of a client is executed whose commit failed.
        let serves = matches!(connection.life, Life::Open | Life::HalfClosed);
        if !connection.needs_several || !serves || !connection.is_in_order() {
            return Need::Nothing;
        }
        let plan = connection.session.plan(shared.store.as_ref());
        if plan.scope != Scope::Keys {
            return Need::Node;
        }
        if self.lane.is_some() && log::asks(connection, &plan) {
            return Need::Log;
        }
        let mut shards: Vec<usize> = match plan.route {
            Route::Here => Vec::new(),
            Route::Shard(owner) => vec![owner],
            Route::Shards(shards) => shards.iter().collect(),
            Route::All => (0..shared.shards.len()).collect(),
        };
        // With the own shard at hand, most of what follows in a pipeline can run too.
        if let Err(at) = shards.binary_search(&own) {
            shards.insert(at, own);
        }
        Need::Shards(shards)
    }

    /// Runs the requests that wait for `shards`, and what follows them, with one commit.
    fn run_together(&mut self, shared: &Shared, shards: Vec<usize>) {
        let inside = shared.enter_cut(Look::Read);
        let mut guards = shared.lock_shards(&shards);
        guards.persist_begun();
        guards.iter_mut().for_each(|shard| shard.note_time(self.now_ns));
        let home = shards.iter().position(|&index| index == self.index).unwrap_or(0);
        let locked = guards.iter_mut().map(|guard| &mut **guard).collect();
        let mut keyspace = Keyspace::many(locked, home);
        let wanted = Need::Shards(shards.clone());
        let whole = shards.len() == shared.shards.len();
        // Whose replies rest on the commit, and where they begin.
        let mut served = Vec::new();
        let mut wrote = false;
        let mut left = REQUESTS_PER_LOCKING;
        for _ in 0..self.deferred.len() {
            let Some(slot) = self.deferred.pop_front() else { break };
            if left == 0 || self.need_of(slot) != wanted {
                self.deferred.push_back(slot);
                continue;
            }
            self.with_connection(slot, |thread, connection| {
                assert!(connection.is_in_order(), "requests over several shards run in order");
                served.push((slot, connection.output.len()));
                connection.needs_several = false;
                connection.again = true;
                let (keyspace, shards) = (&mut keyspace, shards.as_slice());
                let reach = &mut Reach::Several { keyspace, shards, whole, wrote: &mut wrote };
                left = thread.execute_ready(connection, reach, left);
                thread.resume_later(connection);
            });
        }
        let began_ns = self.commit_begins();
        let committed = if shared.has_lost_log() { Ok(()) } else { keyspace.commit() };
        self.commit_ended(began_ns);
        self.release_to(guards[home].settled_to());
        drop(guards);
        drop(inside);
        if wrote {
            for &index in shards.iter().filter(|&&index| index != self.index) {
                shared.doors[index].changed.store(true, Ordering::Relaxed);
                shared.doors[index].nudge();
            }
            self.upkeep_wanted = true;
        }
        if let Err(error) = committed {
            tracing::error!(%error, "cannot make commands over several shards durable");
            for (slot, before) in served {
                if let Some(connection) = self.connection(slot) {
                    connection.refuse_from(before);
                }
            }
            let refused = |life| matches!(life, Life::Dead | Life::Draining);
            self.recall(|connection| refused(connection.life));
        }
    }

    /// Runs a command of the node, whose answer may take a while: a snapshot, a figure of all
    /// shards, a setting.
    fn run_for_node(&mut self, shared: &Shared, connection: &mut Connection) {
        assert!(connection.is_in_order(), "requests of the node run in order");
        count(&self.counters().commands, 1);
        let before = connection.output.len();
        let Connection { session, output, .. } = &mut *connection;
        let saves = session.plan(shared.store.as_ref()).scope == Scope::Saving;
        let wanted: Vec<usize> =
            if saves { (0..shared.shards.len()).collect() } else { vec![self.index] };
        let inside = if saves { shared.enter_cut(Look::Save) } else { None };
        let mut guards = shared.lock_shards(&wanted);
        guards.persist_begun();
        guards.iter_mut().for_each(|shard| shard.note_time(self.now_ns));
        let home = wanted.iter().position(|&index| index == self.index).unwrap_or(0);
        let shards = guards.iter_mut().map(|guard| &mut **guard).collect();
        let mut keyspace = Keyspace::many(shards, home);
        if saves {
            shared.snapshots.prepare(&mut keyspace, shared);
        }
        output.set_limit(self.output_limit_bytes);
        let after = session.execute(&mut keyspace, output);
        bound(session.as_mut(), output, before);
        if saves {
            shared.snapshots.discard_prepared();
        }
        let committed = if shared.has_lost_log() { Ok(()) } else { keyspace.commit() };
        drop(guards);
        drop(inside);
        self.settle(connection, after, true);
        if let Err(error) = committed {
            tracing::error!(%error, "cannot make a command over several shards durable");
            connection.refuse_from(before);
        }
    }
}
