//! Resting: a cluster without work costs its servers nothing.
//!
//! A leader whose members all have everything, and know it, may stop its beats and its confirmations, and
//! says so in its status words ([`crate::Status`]). A follower that reads them has applied what its commit
//! word says, and looks at its leader no more. Neither needs a tick until an event wakes it; then the leader
//! tells its members ([`Message::Awake`]), and again to each whose own status words say that it rests.
//! It rests again once each shows that it saw the leader awake: whatever arrives late after that is of this
//! rest, and not of one before.
//!
//! What beats are for is the caller's business meanwhile: it watches over what runs the leader, once for all
//! the clusters that it has there, and says [`crate::Event::Silent`] when that shows no sign of life. Safety
//! rests on neither: a read of a leader that rested asks a majority as every read does, and a proposal
//! needs their flushes.

use super::leader::Leader;
use super::{Replica, Role};
use crate::event::Command;
use crate::ids::{NodeId, Position};
use crate::memory::LogMemory;
use crate::message::Message;

impl Leader {
    /// Whether there is nothing to do for any member, and each knows everything. A member that is not
    /// reached is waited for unless it is away.
    fn is_quiet(&self, committed: Position, is_away: impl Fn(NodeId) -> bool) -> bool {
        let all = self.last == committed && self.persisted == self.last;
        let peers = self.peers.iter().all(|peer| match peer.key {
            None => is_away(peer.id),
            Some(_) => peer.is_quiet(self.last, self.woke),
        });
        all && peers && self.takes_proposals() && !self.learns() && self.rounds.are_quiet()
    }
}

impl<M: LogMemory> Replica<M> {
    /// Rests, where this server leads and no member needs anything of it; true if it rests now.
    /// `is_away` tells of members that cannot be reached: they are not waited for, while a majority is
    /// reached. The caller wakes this server when such a one is back ([`crate::Event::Wake`]), and
    /// lets it rest only where the callers of all members watch over what runs it.
    pub fn rest(&mut self, is_away: impl Fn(NodeId) -> bool) -> bool {
        let Role::Leader(leader) = &mut self.role else { return false };
        let has_majority =
            self.configuration.has_majority(|id| id == self.id || leader.reached(id).is_some());
        let has_room = !self.short && !leader.has_short_peer();
        if !has_majority || !has_room || !leader.is_quiet(self.committed, is_away) {
            return false;
        }
        leader.rests = true;
        self.republish();
        true
    }

    /// Whether this server rests: it needs no ticks.
    #[must_use]
    pub fn is_resting(&self) -> bool {
        match &self.role {
            Role::Leader(leader) => leader.rests,
            Role::Follower(follower) => follower.rests() && !self.is_promising(),
            _ => false,
        }
    }

    pub(super) fn awaken(&mut self, commands: &mut Vec<Command>) {
        if !self.is_resting() {
            return;
        }
        match &mut self.role {
            Role::Leader(leader) => {
                leader.rests = false;
                leader.beats = leader.beats.wrapping_add(1);
                leader.woke = leader.beats;
                let message = Message::Awake { term: leader.term };
                let reached = leader.peers.iter().filter(|peer| peer.key.is_some());
                commands.extend(reached.map(|peer| Command::Send { to: peer.id, message }));
            }
            Role::Follower(follower) => follower.awaken(self.now_ns),
            _ => {}
        }
        self.republish();
    }
}
