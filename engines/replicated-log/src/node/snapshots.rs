//! Snapshots: taken and sent; those that came are installed in [`super::install`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use beeline_paxos::{Event, Position};

use super::{Node, NodeError, SNAPSHOT_RETRY_NS};
use crate::handle::{Refusal, Request};
use crate::machine::{SnapshotWriter, StateMachine};
use crate::snapshot::{self, Head};

impl<S: StateMachine> Node<S> {
    pub(super) fn take_snapshot(&mut self, now_ns: u64) {
        let early = self
            .snapshot_failed_ns
            .is_some_and(|then_ns| now_ns.saturating_sub(then_ns) < SNAPSHOT_RETRY_NS);
        if self.writing.is_some() || !self.snapshot_due {
            return;
        }
        let Some(machine) = &mut self.machine else { return };
        // A machine that lasts by itself is captured only for those who want its state; where that
        // fails, the ring goes first: nobody's want may keep it from having room.
        let wanted = !self.wanting.is_empty() || !self.snapshot_waiters.is_empty();
        let fails = self.snapshot_problem.is_some() || self.applied < self.machine_has;
        let ring_first =
            fails && self.applied.since(self.snapshot) > self.home.layout().slots() / 2;
        let whole = !machine.is_durable() || (wanted && !ring_first);
        // What failed with the state may succeed without it at once.
        if early && (whole || !self.writing_state) {
            return;
        }
        if whole && self.applied < self.machine_has {
            // Its state is not that of this position.
            return;
        }
        let suffices = self.snapshot_has_state || !whole;
        if self.applied == self.snapshot && self.applied > Position::NONE && suffices {
            // There is none newer to be had.
            self.snapshot_due = false;
            for done in self.snapshot_waiters.drain(..) {
                done(Ok(self.snapshot));
            }
            return;
        }
        self.writing_state = whole;
        let state = if whole { machine.snapshot() } else { Ok(no_state()) };
        let state = match state {
            Ok(state) => state,
            Err(error) => return self.snapshot_failed(error.to_string(), now_ns),
        };
        // A job that still waits for a thread holds no folder: the member may have ended, and be opened again.
        let (home, mailbox) = (Arc::downgrade(&self.home), self.mailbox.clone());
        let head = Head {
            position: self.applied,
            // As of `applied`, behind which the protocol may be further on.
            configuration: self.membership.clone(),
            sessions: self.sessions.clone(),
            has_state: whole,
        };
        let position = head.position;
        let writing = move || {
            let Some(home) = home.upgrade() else { return };
            let path = home.new_snapshot_path();
            let write = || snapshot::write(&path, home.cluster(), &head, state);
            let written = catch_unwind(AssertUnwindSafe(write));
            let outcome = match written {
                Ok(written) => written.map_err(|error| error.to_string()),
                Err(_) => Err("its writer panicked".to_owned()),
            };
            drop(home);
            // The node may have ended meanwhile.
            mailbox.send(Request::SnapshotWritten { position, outcome });
        };
        match self.jobs.run("log-snapshot", Box::new(writing)) {
            Ok(()) => {
                self.writing = Some(position);
                self.snapshot_due = false;
                self.snapshot_failed_ns = None;
            }
            Err(error) => self.snapshot_failed(error.to_string(), now_ns),
        }
    }

    pub(super) fn snapshot_failed(&mut self, reason: String, now_ns: u64) {
        tracing::warn!(reason, "no snapshot could be taken; trying again");
        self.counters.snapshots_failed += 1;
        self.snapshot_problem = Some(reason.clone());
        self.snapshot_failed_ns = Some(now_ns);
        self.snapshot_due = true;
        for done in self.snapshot_waiters.drain(..) {
            done(Err(Refusal::Snapshot { reason: reason.clone() }));
        }
    }

    pub(super) fn snapshot_written(
        &mut self,
        position: Position,
        outcome: Result<u64, String>,
        now_ns: u64,
    ) -> Result<(), NodeError> {
        self.writing = None;
        let path = self.home.new_snapshot_path();
        if let Err(reason) = outcome {
            self.snapshot_failed(reason, now_ns);
            return Ok(());
        }
        let adds_state = self.writing_state && !self.snapshot_has_state;
        if self.errand.is_some() {
            // It would take the place of a newer one.
            let _ = std::fs::remove_file(&path);
            self.snapshot_due = true;
            return Ok(());
        }
        if position > self.snapshot || (position == self.snapshot && adds_state) {
            if let Err(error) = self.home.adopt_snapshot(&path) {
                self.snapshot_failed(error.to_string(), now_ns);
                return Ok(());
            }
            self.snapshot = position;
            self.snapshot_has_state = self.writing_state;
            self.counters.snapshots_taken += 1;
            self.snapshot_problem = None;
            let mut upward = std::mem::take(&mut self.upward);
            self.member.event(Event::SnapshotTaken { position }, &mut upward)?;
            self.upward = upward;
        } else {
            // A leader's came first.
            let _ = std::fs::remove_file(&path);
        }
        // Who asked for a snapshot asked for one with the state.
        if self.snapshot_has_state {
            for done in self.snapshot_waiters.drain(..) {
                done(Ok(self.snapshot));
            }
        }
        self.snapshot_due |= !self.snapshot_waiters.is_empty();
        Ok(())
    }

    pub(super) fn send_snapshots(&mut self, now_ns: u64) {
        // The protocol asks again for one that comes back.
        let member = &self.member;
        self.wanting.retain(|peer| member.is_connected(*peer));
        // One that has not answered may be restoring what it got before. It answers when it is done: until then
        // neither is the state captured anew for it, nor do the others slow down.
        let asked = self.wanting.extract_if(.., |peer| member.is_sending(*peer));
        for peer in asked.collect::<Vec<_>>() {
            if let Err(error) = self.member.offer_again(peer, now_ns) {
                tracing::warn!(%peer, %error, "a snapshot could not be offered again");
            }
        }
        if self.wanting.is_empty() {
            return;
        }
        if self.snapshot == Position::NONE || !self.snapshot_has_state {
            self.snapshot_due = self.applied > Position::NONE;
            self.take_snapshot(now_ns);
            // This one is as fresh as can be when it is written.
            self.refreshed = self.writing.is_some();
            self.slow_down(now_ns);
            return;
        }
        // The ring goes on while a snapshot travels: one that is old already would come too late.
        // And one that begins before this ring does leads to no entry of it.
        let old = self.applied.since(self.snapshot) > self.home.layout().slots() / 4
            || self.snapshot < self.member.replica().ring_from();
        if old && !self.refreshed {
            self.refreshed = true;
            self.snapshot_due = true;
            self.take_snapshot(now_ns);
        }
        if self.refreshed && self.writing.is_some() {
            self.slow_down(now_ns);
            return;
        }
        self.refreshed = false;
        self.slow_down(now_ns);
        let path = self.home.snapshot_path();
        for peer in std::mem::take(&mut self.wanting) {
            if !self.member.is_connected(peer) {
                continue;
            }
            match self.member.offer_snapshot(peer, &path, self.snapshot, now_ns) {
                Ok(()) => self.counters.snapshots_sent += 1,
                Err(error) => tracing::warn!(%peer, %error, "a snapshot could not be offered"),
            }
        }
    }

    /// Those that want a snapshot get this one, or the one that is being written.
    fn slow_down(&mut self, now_ns: u64) {
        let position = self.writing.unwrap_or(self.snapshot);
        for peer in &self.wanting {
            self.pace.begin(*peer, position, now_ns);
        }
    }

    /// Looks how far the members are that a snapshot was sent to.
    pub(super) fn look_at_pace(&mut self, now_ns: u64) {
        let replica = self.member.replica();
        let leads = replica.leader() == Some(replica.id());
        let member = &self.member;
        self.pace.look(replica.last(), now_ns, |peer| {
            let goes_on = leads && member.is_connected(peer);
            goes_on.then(|| replica.confirmed_by(peer).unwrap_or(Position::NONE))
        });
    }
}

/// Of a machine that lasts by itself: nothing to write.
fn no_state() -> SnapshotWriter {
    Box::new(|_| Ok(()))
}
