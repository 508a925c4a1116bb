//! Linearizable reads without a log entry.
//!
//! A read notes that it arrived, and waits for a *round*: one-sided READs through the keys of the
//! present leadership at a majority, posted after the read arrived. A key works until its owner
//! promises itself to somebody else; so when a majority's READs succeeded, no later leader had
//! been elected when the read arrived, and whatever was acknowledged before that was committed
//! here. Then the read is answered from the state machine. No clock takes part, which is why this
//! was preferred to a lease; no follower's processor does either.
//!
//! Reads that arrive during a round share the next one. Rounds also run at every heartbeat: a
//! leader that no majority confirms for long steps down.

use std::collections::VecDeque;

use super::{Replica, Role};
use crate::event::Command;
use crate::ids::{AccessKey, NodeId};
use crate::memory::LogMemory;

#[derive(Debug)]
pub(super) struct Rounds {
    /// The last one begun.
    round: u64,
    open: bool,
    begun_ns: u64,
    /// When a majority last confirmed.
    confirmed_ns: u64,
    /// Reads, and the round each waits for.
    reads: VecDeque<(u64, u64)>,
}

impl Rounds {
    pub(super) fn new(now_ns: u64) -> Self {
        Self {
            round: 0,
            open: false,
            begun_ns: now_ns,
            confirmed_ns: now_ns,
            reads: VecDeque::new(),
        }
    }

    fn begin(&mut self, now_ns: u64) {
        self.round += 1;
        self.open = true;
        self.begun_ns = now_ns;
    }

    pub(super) fn tick(&mut self, now_ns: u64, heartbeat_ns: u64) {
        if !self.open && now_ns.saturating_sub(self.begun_ns) >= heartbeat_ns {
            self.begin(now_ns);
        }
    }

    /// The last one begun.
    pub(super) fn begun(&self) -> u64 {
        self.round
    }

    /// No round is under way, and no read waits for one.
    pub(super) fn are_quiet(&self) -> bool {
        !self.open && self.reads.is_empty()
    }

    pub(super) fn excuse(&mut self, pause_ns: u64) {
        self.confirmed_ns = self.confirmed_ns.saturating_add(pause_ns);
    }

    pub(super) fn is_isolated(&self, now_ns: u64, limit_ns: u64) -> bool {
        now_ns.saturating_sub(self.confirmed_ns) > limit_ns
    }

    /// The round a peer is to be asked to confirm, which was asked for `asked` last.
    pub(super) fn to_ask(&self, asked: u64) -> Option<u64> {
        (self.open && asked < self.round).then_some(self.round)
    }

    pub(super) fn waiting(&self) -> impl Iterator<Item = u64> {
        self.reads.iter().map(|(id, _)| *id)
    }
}

impl<M: LogMemory> Replica<M> {
    pub(super) fn on_read(&mut self, id: u64, commands: &mut Vec<Command>) {
        let now_ns = self.now_ns;
        match &mut self.role {
            Role::Leader(leader) if leader.ready => {
                let rounds = &mut leader.rounds;
                // A round that is open may have been confirmed before the read arrived.
                if rounds.open {
                    rounds.reads.push_back((id, rounds.round + 1));
                } else {
                    rounds.begin(now_ns);
                    rounds.reads.push_back((id, rounds.round));
                }
                self.close_round(commands);
            }
            _ => commands.push(Command::ReadRefused { id }),
        }
    }

    pub(super) fn on_confirmed(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        round: u64,
        commands: &mut Vec<Command>,
    ) {
        if let Role::Leader(leader) = &mut self.role {
            leader.confirm_round(peer, key, round);
            self.close_round(commands);
        }
    }

    /// Ends rounds that a majority confirmed, and answers their reads.
    pub(super) fn close_round(&mut self, commands: &mut Vec<Command>) {
        loop {
            let Role::Leader(leader) = &mut self.role else { return };
            let (own, peers, rounds) = (self.id, &leader.peers, &mut leader.rounds);
            let confirmed = self.configuration.has_majority(|id| {
                let round =
                    |peer: &super::leader::Peer| peer.id == id && peer.round >= rounds.round;
                id == own || peers.iter().any(round)
            });
            if !rounds.open || !confirmed {
                return;
            }
            rounds.open = false;
            rounds.confirmed_ns = self.now_ns;
            while let Some((id, round)) = rounds.reads.front().copied() {
                if round > rounds.round {
                    rounds.begin(self.now_ns);
                    break;
                }
                rounds.reads.pop_front();
                commands.push(Command::ReadReady { id });
            }
        }
    }
}
