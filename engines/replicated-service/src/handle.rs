//! The replicated log of `engines/replicated-log` as a group's log.

use std::time::Duration;

use beeline_replicated_log::{Contact, Handle, NO_SESSION, NodeId, Position, Refusal, RoleName};

use crate::journey::Load;
use crate::log::{Done, Log, LogMember, LogRole, LogState, Order, Refused};
use crate::machine::Tag;
use crate::units::Units;

/// A command's head within an entry, bytes.
const COMMAND_HEAD_BYTES: usize = 24;

fn refused(refusal: Refusal) -> Refused {
    match refusal {
        Refusal::NotLeader { .. } => Refused::NotLeader,
        Refusal::Lost => Refused::Lost,
        Refusal::TooLarge { bytes, limit } => Refused::TooLarge { bytes, limit },
        Refusal::Stopped => Refused::Stopped,
        // To be told rather than tried for as long as a request may take.
        refusal @ Refusal::LogFull { .. } => Refused::Invalid { reason: refusal.to_string() },
        refusal if refusal.is_retryable() => Refused::Busy { reason: refusal.to_string() },
        refusal => Refused::Invalid { reason: refusal.to_string() },
    }
}

/// A member's handle, and what one of its entries holds.
#[derive(Clone, Debug)]
pub struct LogHandle {
    handle: Handle,
    command_limit_bytes: usize,
}

impl LogHandle {
    /// Of a log whose entries hold `payload_bytes`.
    #[must_use]
    pub fn new(handle: Handle, payload_bytes: usize) -> Self {
        Self { handle, command_limit_bytes: payload_bytes.saturating_sub(COMMAND_HEAD_BYTES) }
    }

    /// Follows one service's units from a position, as this member applies them.
    #[must_use]
    pub fn follow(&self, service: Tag, from: Position) -> Units {
        Units::new(self.handle.follow(from), service)
    }
}

impl Log for LogHandle {
    fn propose(&self, command: Vec<u8>, done: Done<Vec<u8>>) {
        self.handle.propose(NO_SESSION, 0, command, move |outcome| {
            done(outcome.map(|reply| reply.bytes).map_err(refused));
        });
    }

    fn barrier(&self, done: Done<u64>) {
        self.handle.barrier(move |outcome| {
            done(outcome.map(|position| position.0).map_err(refused));
        });
    }

    fn forward(&self, to: u16, load: Load<'_>, limit: Duration, done: Done<Vec<u8>>) {
        let told = move |outcome: Result<Vec<u8>, Refusal>| done(outcome.map_err(refused));
        match load {
            Load::Unit(unit) => self.handle.forward(NodeId(to), unit.to_vec(), limit, told),
            Load::Barrier => self.handle.forward_barrier(NodeId(to), limit, move |passed| {
                told(passed.map(|position| position.0.to_string().into_bytes()));
            }),
        }
    }

    fn state(&self) -> LogState {
        let status = self.handle.status();
        let members = status.members.into_iter().map(|member| LogMember {
            id: member.id.0,
            log_address: member.contact.address,
            resp_address: String::from_utf8_lossy(&member.contact.details).into_owned(),
            connected: member.connected,
            lag: member.lag,
            short: member.short,
        });
        LogState {
            cluster: status.cluster.0,
            id: status.id.0,
            role: match status.role {
                RoleName::Follower => LogRole::Follower,
                RoleName::Candidate => LogRole::Candidate,
                RoleName::Recovering => LogRole::Recovering,
                RoleName::Leader => LogRole::Leader,
                RoleName::Stopped => LogRole::Stopped,
            },
            term: status.term.0,
            leader: status.leader.map(|leader| leader.0),
            committed: status.committed.0,
            applied: status.applied.0,
            snapshot: status.snapshot.0,
            members: members.collect(),
            leaderships: status.counters.leaderships,
            snapshots_sent: status.counters.snapshots_sent,
            snapshots_installed: status.counters.snapshots_installed,
            forwards_unanswered: status.counters.forwards_unanswered,
            forwards_refused: status.counters.forwards_refused,
            forwards_served: status.counters.forwards_served,
            command_limit_bytes: self.command_limit_bytes,
        }
    }

    fn leads(&self) -> bool {
        self.handle.is_leading()
    }

    fn is_short(&self) -> bool {
        self.handle.is_short()
    }

    fn administer(&self, order: Order, done: Done<()>) {
        let told = move |outcome: Result<Position, Refusal>| {
            done(outcome.map(|_| ()).map_err(refused));
        };
        match order {
            Order::Join { id, log_address, resp_address } => {
                let contact = Contact { address: log_address, details: resp_address.into_bytes() };
                self.handle.join(NodeId(id), contact, told);
            }
            Order::Leave { id } => self.handle.leave(NodeId(id), told),
            Order::Transfer { id } => {
                self.handle.transfer(NodeId(id), move |outcome| {
                    told(outcome.map(|()| Position::NONE));
                });
            }
            Order::Snapshot => self.handle.snapshot(told),
        }
    }
}
