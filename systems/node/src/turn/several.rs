//! Commands over several shards, and those whose answers may take a while.
//!
//! Invariants: they run without the own lock held, in order with their connection's other requests;
//! shards are locked in index order, and what ran is committed before the locks are let go, so that
//! a reply never tells of a change that could still be lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_kv::Keyspace;
use beeline_resp::{Plan, Route};

use super::ShardThread;
use super::sockets::bound;
use crate::connection::{Connection, Life};
use crate::shared::Shared;
use crate::stats::count;

/// Commands that write a snapshot while their client waits.
const SAVING: [&str; 2] = ["save", "shutdown"];

impl ShardThread {
    pub(super) fn run_deferred(&mut self) {
        let shared = Arc::clone(&self.shared);
        for _ in 0..self.deferred.len() {
            let Some(slot) = self.deferred.pop_front() else { return };
            self.with_connection(slot, |thread, connection| {
                if !connection.needs_several || connection.life == Life::Dead {
                    return;
                }
                connection.needs_several = false;
                count(&thread.counters().several_shard_commands, 1);
                thread.run_several(&shared, connection);
                thread.resume_later(connection);
            });
        }
    }

    pub(super) fn run_several(&mut self, shared: &Shared, connection: &mut Connection) {
        assert!(connection.is_in_order(), "requests over several shards run in order");
        let before = connection.output.len();
        let Connection { session, parser, output, .. } = &mut *connection;
        let plan = Plan::new(session, parser.current());
        let writes = plan.may_write(session);
        let saves = plan.command().is_some_and(|command| SAVING.contains(&command.name));
        let wanted: Vec<usize> = match plan.route(session, shared.store.as_ref()) {
            _ if saves => (0..shared.shards.len()).collect(),
            Route::Here => vec![self.index],
            Route::Shard(owner) => vec![owner],
            Route::Shards(shards) => shards.iter().collect(),
            Route::All => (0..shared.shards.len()).collect(),
        };
        let mut guards = shared.lock_shards(&wanted);
        let home = wanted.iter().position(|&index| index == self.index).unwrap_or(0);
        let shards = guards.iter_mut().map(|guard| &mut **guard).collect();
        let mut keyspace = Keyspace::many(shards, home);
        if saves {
            shared.snapshots.prepare(&mut keyspace);
        }
        output.set_limit(self.output_limit_bytes);
        let after = self.executor.execute(session, plan, &mut keyspace, output, shared);
        bound(output, before);
        if saves {
            shared.snapshots.discard_prepared();
        }
        let committed = keyspace.commit();
        drop(guards);
        if writes {
            for &index in wanted.iter().filter(|&&index| index != self.index) {
                shared.doors[index].changed.store(true, Ordering::Relaxed);
                shared.doors[index].nudge();
            }
            self.upkeep_wanted = true;
        }
        self.settle(connection, after, true);
        if let Err(error) = committed {
            tracing::error!(%error, "cannot make a command over several shards durable");
            connection.output.truncate(before);
            connection
                .output
                .error(b"MISCONF Errors writing to durable memory; see the node's log");
            connection.life = Life::Draining;
        }
    }
}
