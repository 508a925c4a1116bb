//! When a shard's thread polls, steps back and sleeps.
//!
//! Invariants: it sleeps only after it announced so and looked once more (see
//! [`crate::shared::Door::sleeping`]), so that a thread that fills a mailbox, or ends a commit, either
//! is seen or sees the announcement; it wakes in time for the next expiry, the next housekeeping and
//! whatever else is due; a thread with nothing to do and nothing due sleeps for ever; one that polls
//! on after fabric work does so for a bounded time, and lets others have its core every few
//! microseconds.

use std::sync::atomic::Ordering;
use std::time::Duration;

use beeline_os::poller::Readiness;

use super::{HOUSEKEEPING_NS, Peer, ShardThread, WAKER};
use crate::stats::count;

/// Turns that only poll fabric between two looks at the sockets.
const TURNS_PER_LOOK: u32 = 32;
/// Of these, turns between two looks at the clocks.
const TURNS_PER_CLOCK: u32 = 8;

impl ShardThread {
    /// Looks at both clocks; returns the monotonic one, in nanoseconds.
    pub(super) fn read_clocks(&mut self) -> u64 {
        let clock = self.shared.store.clock();
        self.now_ms = clock.unix_ms();
        self.now_ns = clock.monotonic_ns();
        self.now_ns
    }

    /// Fills `news`; sleeps when there is nothing to do. Returns the time after that.
    pub(super) fn wait(&mut self, news: &mut Vec<Readiness>) -> u64 {
        news.clear();
        // Between two looks at the sockets a turn takes as long as reading both clocks does.
        let now_ns = if self.turns_since_look.is_multiple_of(TURNS_PER_CLOCK) {
            let now_ns = self.read_clocks();
            if let Some(began_ns) = self.turn_began_ns.take() {
                let took_ns = now_ns.saturating_sub(began_ns);
                self.shared.times[self.index].node_turn_seconds.record_ns(took_ns);
            }
            now_ns
        } else {
            self.now_ns
        };
        let busy = !self.resume.is_empty()
            || !self.deferred.is_empty()
            || self.maintenance.did_work
            || self.peers.iter().flatten().any(Peer::has_work);
        let spinning = now_ns.saturating_sub(self.fabric_active_ns) < self.spin_ns;
        let timeout = if busy || self.look_around() {
            Some(Duration::ZERO)
        } else if spinning {
            // An idle shard that is awake anyway helps others to write back (BOOM §3.4).
            self.shared.store.help_write_back(self.index);
            self.turns_since_look += 1;
            if self.turns_since_look < TURNS_PER_LOOK {
                return now_ns;
            }
            // Where more threads want to run than there are cores, one that only polls comes last.
            std::thread::yield_now();
            count(&self.counters().yields, 1);
            Some(Duration::ZERO)
        } else if !self.fabric.arm() {
            // Freshly armed: what came before produces no event, so one more turn looks.
            return now_ns;
        } else {
            self.sleep_bound(now_ns)
        };
        self.turns_since_look = 0;
        let sleeps = timeout != Some(Duration::ZERO);
        if sleeps && !self.announce_sleep() {
            return now_ns;
        }
        let waited = self.poller.wait(timeout);
        if sleeps {
            count(&self.counters().sleeps, 1);
            self.shared.doors[self.index].sleeping.store(false, Ordering::Relaxed);
        }
        match waited {
            Ok(events) => news.extend((0..events).map(|index| self.poller.readiness(index))),
            Err(error) => tracing::error!(%error, shard = self.index, "epoll_wait failed"),
        }
        if news.iter().any(|readiness| readiness.token == WAKER) {
            // Before the deliveries are taken: one that comes later wakes this thread again.
            self.shared.doors[self.index].waker.clear();
        }
        if sleeps { self.read_clocks() } else { now_ns }
    }

    /// Anything in the mailboxes, or a commit done?
    pub(super) fn look_around(&mut self) -> bool {
        self.progress.fenced_to() != self.fenced_seen
            || self.peers.iter_mut().flatten().any(|peer| !peer.receiver.is_empty())
    }

    /// Says that a wake-up is needed from now on, then looks once more. `false`: stay awake.
    pub(super) fn announce_sleep(&mut self) -> bool {
        // The fence pairs with those in `Door::nudge` and `Door::owe_upkeep`.
        let door = &self.shared.doors[self.index];
        door.wakes_for_upkeep.store(self.upkeep_wanted, Ordering::Relaxed);
        door.sleeping.store(true, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::SeqCst);
        let changed = door.changed.load(Ordering::Relaxed);
        let stay =
            changed || self.look_around() || self.is_offered_work() || !self.fabric.is_armed();
        if stay {
            self.shared.doors[self.index].sleeping.store(false, Ordering::Relaxed);
        }
        !stay
    }

    pub(super) fn sleep_bound(&self, now_ns: u64) -> Option<Duration> {
        let mut deadline = self.maintenance.next_deadline_ns;
        let mut sooner =
            |at: u64| deadline = Some(deadline.map_or(at, |deadline| deadline.min(at)));
        if self.shared.settings.idle_timeout_s.load(Ordering::Relaxed) != 0
            && self.connections.len() > self.free.len()
        {
            sooner(now_ns + 1_000_000_000);
        }
        if self.shared.is_stopping() || !self.held_back.is_empty() || self.fabric.has_pending() {
            sooner(now_ns + HOUSEKEEPING_NS);
        }
        // No request waits for a log that does not answer for longer than it may.
        if self.lane.as_ref().is_some_and(|lane| lane.is_awaited()) {
            sooner(now_ns + HOUSEKEEPING_NS);
        }
        if self.unpublished || self.upkeep_wanted {
            sooner(self.housekeeping_ns);
        }
        if self.untidy || self.fabric.clients() > 0 {
            sooner(now_ns + 1_000_000_000);
        }
        deadline.map(|at| Duration::from_nanos(at.saturating_sub(now_ns).max(1)))
    }

    /// Lets threads in that wait for this shard's lock.
    pub(super) fn step_back(&self) {
        for _ in 0..1000 {
            if self.shared.doors[self.index].waiting.load(Ordering::SeqCst) == 0 {
                return;
            }
            std::thread::yield_now();
        }
    }
}
