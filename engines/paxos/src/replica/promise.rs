//! Promises: fence, persist, answer, in this order.
//!
//! A vote and the acceptance of an elected leader are one thing: from now on the log region
//! belongs to one writer, and whoever wrote before cannot. The order is the safety of the
//! protocol. If the answer went out before the fence, the old leader could complete a write that
//! the new one, which has read this log, does not know of.

use super::{Holder, Replica, Role};
use crate::event::Command;
use crate::ids::{AccessKey, NodeId, Position, Term};
use crate::memory::LogMemory;
use crate::message::{Grant, Message};

use super::election::Follower;

/// A promise being made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Promising {
    to: NodeId,
    term: Term,
    vote: bool,
    /// The region is fenced, and this opens it.
    key: Option<AccessKey>,
}

impl<M: LogMemory> Replica<M> {
    /// Begins a promise. One at a time: whoever asks meanwhile asks again.
    pub(super) fn promise(
        &mut self,
        to: NodeId,
        term: Term,
        vote: bool,
        commands: &mut Vec<Command>,
    ) {
        if self.promising.is_some() {
            return;
        }
        if to != self.id {
            self.step_down(commands);
            self.role = Role::Follower(Follower::idle(self.now_ns, &self.options));
        }
        self.holder = None;
        self.promising = Some(Promising { to, term, vote, key: None });
        commands.push(Command::Fence);
    }

    /// Whether a promise is being made; its maker answers nobody else meanwhile.
    pub(super) fn is_promising(&self) -> bool {
        self.promising.is_some()
    }

    pub(super) fn on_fenced(&mut self, key: AccessKey, commands: &mut Vec<Command>) {
        let Some(promising) = &mut self.promising else { return };
        promising.key = Some(key);
        let Promising { to, term, .. } = *promising;
        assert!(term >= self.term, "a promise never goes back to an earlier term");
        if term > self.term {
            commands.push(Command::PersistVote { term, voted_for: Some(to) });
        } else {
            self.answer(commands);
        }
    }

    pub(super) fn on_vote_persisted(&mut self, commands: &mut Vec<Command>) {
        let Some(Promising { to, term, .. }) = self.promising else { return };
        self.term = term;
        self.seen_term = self.seen_term.max(term);
        self.voted_for = Some(to);
        self.answer(commands);
    }

    fn answer(&mut self, commands: &mut Vec<Command>) {
        let Some(Promising { to, term, vote, key: Some(key) }) = self.promising.take() else {
            return;
        };
        // Nobody writes any more: what is read now is what there is.
        self.look_at_commit_word(commands);
        if matches!(self.role, Role::Stopped) {
            return;
        }
        let grant = Grant {
            key,
            committed: self.durably_committed(),
            highest: self.highest(),
            snapshot: self.snapshot,
        };
        if to == self.id {
            self.on_own_vote(term, grant, commands);
            return;
        }
        self.holder = Some(Holder { to, term, key });
        let message = if vote {
            self.role = Role::Follower(Follower::of_candidate(to, self.now_ns));
            Message::Vote { term, grant }
        } else {
            self.role = Role::Follower(Follower::of_leader(to, self.now_ns));
            Message::Following { term, grant }
        };
        // The beats that it saw of another leader are none of this one's.
        self.republish();
        commands.push(Command::Send { to, message });
    }

    pub(super) fn on_request_vote(
        &mut self,
        from: NodeId,
        term: Term,
        committed: Position,
        transfer: bool,
        commands: &mut Vec<Command>,
    ) {
        self.seen_term = self.seen_term.max(term);
        if self.is_promising() {
            return;
        }
        let again = term == self.term && self.voted_for == Some(from);
        let free = term > self.term && (transfer || !self.has_living_leader());
        if (again || free) && self.can_be_led_by(committed) {
            self.promise(from, term, true, commands);
        } else {
            self.refuse(from, committed, commands);
        }
    }

    /// A leader must read from voters what it lacks, so it must not lack what they dropped or lost.
    pub(super) fn can_be_led_by(&self, committed: Position) -> bool {
        committed >= self.snapshot.max(self.ring_from)
    }

    /// Says no. A candidate that lags too far gets a snapshot with it: this server may know a
    /// membership in which it has no vote to ask for, and the candidate may know too little for
    /// anybody's.
    pub(super) fn refuse(&self, to: NodeId, committed: Position, commands: &mut Vec<Command>) {
        commands.push(Command::Send { to, message: Message::Refused { term: self.term } });
        if !self.can_be_led_by(committed) {
            commands.push(Command::SendSnapshot { to });
        }
    }

    pub(super) fn on_follow(&mut self, from: NodeId, term: Term, commands: &mut Vec<Command>) {
        self.seen_term = self.seen_term.max(term);
        if self.is_promising() {
            return;
        }
        // Two leaders of one term exist only where one of them cannot get through recovery.
        let leads = matches!(self.role, Role::Leader(_)) && term == self.term;
        if term >= self.term && !leads {
            self.promise(from, term, false, commands);
        } else {
            let message = Message::Refused { term: self.term };
            commands.push(Command::Send { to: from, message });
        }
    }
}
