//! What is not urgent: publishing what CLIENT LIST shows, giving memory back, closing idle clients,
//! maintaining the store between batches, and the end of the thread.
//!
//! Invariants: each step is bounded, so that no client waits long for it; a stopping node's thread
//! goes on until every reply owed anywhere was sent or its time is up, and from its first step of that
//! kind it takes no request in. So a shard that owed nothing owes nothing later: once all shards said so,
//! no client can need any of their threads.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_kv::{Maintenance, Shard};

use super::ShardThread;
use crate::connection::Hold;
use crate::shared::lock;
use crate::stats::count;

/// A connection quiet for so long gives memory back.
const TIDY_MS: u64 = 2000;
/// Pause after upkeep failed, doubled with each failure up to 64 times this.
const UPKEEP_PAUSE_NS: u64 = 1_000_000_000;
/// Bytes the collector may copy between two batches: some 100 us.
const MAINTENANCE_BYTES: u64 = 256 << 10;

impl ShardThread {
    /// Collects, expires and writes back a little, where something may be due.
    pub(super) fn maintain(&mut self, shard: &mut Shard, now_ns: u64) {
        let due = self.maintenance.next_deadline_ns.is_some_and(|deadline| deadline <= now_ns);
        self.end_pause(now_ns);
        if now_ns < self.upkeep_paused_until_ns {
            // The last attempt failed: the next one waits.
        } else if self.maintenance.did_work || due || now_ns >= self.housekeeping_ns {
            self.upkeep_wanted = false;
            match shard.maintain(MAINTENANCE_BYTES) {
                Ok(maintenance) => {
                    self.maintenance = maintenance;
                    if std::mem::take(&mut self.upkeep_failures) > 0 {
                        let door = &self.shared.doors[self.index];
                        door.upkeep_fails.store(false, Ordering::Relaxed);
                        tracing::info!(shard = self.index, "upkeep goes on");
                    }
                }
                Err(error) => {
                    let pause_ns = UPKEEP_PAUSE_NS << self.upkeep_failures.min(6);
                    let next = now_ns.saturating_add(pause_ns);
                    let again_s = pause_ns / 1_000_000_000;
                    tracing::error!(%error, shard = self.index, again_s, "upkeep failed");
                    self.upkeep_failures += 1;
                    let door = &self.shared.doors[self.index];
                    door.upkeep_fails.store(true, Ordering::Relaxed);
                    self.upkeep_paused_until_ns = next;
                    self.maintenance =
                        Maintenance { did_work: false, next_deadline_ns: Some(next) };
                }
            }
        }
        if now_ns >= self.housekeeping_ns {
            self.fabric.keep_house(shard);
        }
    }

    /// Lets keys expire again once CLIENT PAUSE has ended.
    fn end_pause(&mut self, now_ns: u64) {
        let shared = &self.shared;
        if shared.replication.is_none()
            && shared.expire_until_ms.load(Ordering::Relaxed) != u64::MAX
            && shared.pause.active(|| now_ns).is_none()
        {
            shared.expire_until_ms.store(u64::MAX, Ordering::Relaxed);
            self.upkeep_wanted = true;
        }
    }

    /// Publishes what CLIENT LIST shows, gives memory back, closes idle clients.
    pub(super) fn keep_house(&mut self) {
        let timeout_ms =
            self.shared.settings.idle_timeout_s.load(Ordering::Relaxed).saturating_mul(1000);
        // Quiet by the clock that nobody sets; shown by the one people read.
        let (now_ms, now_ns) = (self.now_ms, self.now_ns);
        let mut idle = Vec::new();
        {
            self.unpublished = false;
            self.untidy = false;
            for connection in self.connections.iter_mut().flatten() {
                // One whose request waits is not idle: it is the node's turn to say something.
                if connection.is_waiting() {
                    connection.last_active_ns = now_ns;
                }
                let quiet_ms = now_ns.saturating_sub(connection.last_active_ns) / 1_000_000;
                if timeout_ms != 0 && quiet_ms >= timeout_ms {
                    idle.push(connection.slot);
                }
                if connection.unpublished {
                    connection.unpublished = false;
                    let active_us = now_ms.saturating_sub(quiet_ms) * 1000;
                    connection.session.publish(active_us, connection.output.len());
                }
                if quiet_ms <= TIDY_MS {
                    self.untidy = true;
                } else if !connection.has_request() {
                    connection.trim();
                }
            }
        }
        for slot in idle {
            self.remove(slot);
        }
        // A node that stops takes up no request that CLIENT PAUSE holds back.
        let held_back =
            if self.is_winding_down() { Vec::new() } else { std::mem::take(&mut self.held_back) };
        for slot in held_back {
            self.with_connection(slot, |thread, connection| {
                if connection.hold != Hold::Paused {
                    // Another client's by now.
                    return;
                }
                let plan = connection.session.plan(thread.shared.store.as_ref());
                if thread.is_paused(&plan) {
                    thread.held_back.push(slot);
                } else {
                    connection.hold = Hold::No;
                    connection.again = true;
                    thread.resume_later(connection);
                }
            });
        }
        let errors = self.workers.iter().map(|worker| worker.errors()).sum::<u64>();
        // Fewer than before: CONFIG RESETSTAT ran here.
        let fresh = errors.checked_sub(self.errors_seen).unwrap_or(errors);
        self.errors_seen = errors;
        count(&self.counters().error_replies, fresh);
        let held = self.held_back.len() as u64;
        self.counters().held_clients.store(held, Ordering::Relaxed);
        let clients = self.fabric.clients();
        self.counters().fabric_clients.store(clients as u64, Ordering::Relaxed);
        let copied = self.fabric.copied_bytes();
        self.counters().fabric_copied_bytes.store(copied, Ordering::Relaxed);
    }

    /// Whether the node stops and this thread knows it: it takes no request in any more.
    pub(super) fn is_winding_down(&self) -> bool {
        self.draining_since_ns.is_some()
    }

    /// Called while the node stops; `true` once everything owed was sent or time is up.
    pub(super) fn wind_down(&mut self, now_ns: u64) -> bool {
        let since = *self.draining_since_ns.get_or_insert(now_ns);
        let owed = self
            .connections
            .iter()
            .flatten()
            .any(|connection| !connection.output.is_empty() || connection.has_taken_in());
        let doors = &self.shared.doors;
        if doors[self.index].owing.swap(owed, Ordering::Relaxed) && !owed {
            doors.iter().for_each(|door| door.waker.wake());
        }
        // Clients of other shards may await replies of this one.
        let nobody_owes = doors.iter().all(|door| !door.owing.load(Ordering::Relaxed));
        nobody_owes || now_ns.saturating_sub(since) > self.shutdown_wait_ns
    }

    pub(super) fn finish(mut self) {
        // Time is up, or was never lost: nobody waits for this thread any more.
        self.shared.doors[self.index].owing.store(false, Ordering::Relaxed);
        for slot in 0..self.connections.len() {
            self.remove(u32::try_from(slot).unwrap_or(u32::MAX));
        }
        let shared = Arc::clone(&self.shared);
        let mut shard = lock(&shared.shards[self.index]);
        self.fabric.close(&mut shard);
        if shared.has_lost_log() {
            return;
        }
        if let Err(error) = shard.commit() {
            tracing::error!(%error, shard = self.index, "the last commit failed");
            shared.note_failure(format!(
                "shard {} could not make its last writes durable, which were not acknowledged: \
                 {error}; mend the storage before the next start",
                self.index
            ));
        }
    }
}
