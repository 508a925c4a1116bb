//! What a new leader does before it leads (p. 3.3).
//!
//! It reads, from every server that voted for it, the slots behind its own commit word, and merges
//! them position by position: a slot below its owner's commit word is the chosen value; otherwise
//! the entry of the highest term wins; a hole that everybody has becomes a no-op. The merged
//! values are proposed again, under the new term, to everybody.
//!
//! An entry that changes the membership divides the work: positions behind it were agreed by
//! another majority. It is proposed and committed first, under the members before it; then the
//! votes must be a majority of the new members too, or more are asked for.
//!
//! Positions up to `reached` are known to be chosen by what the state machine here has applied or begun to, and
//! are committed as soon as they are proposed. That rests on recovery finding the chosen value,
//! and on nothing else: while no member forgot what it confirmed, a vote of every majority has it,
//! at the highest term. Where a majority forgot (durability `process`, machines started anew, and
//! the user went on with what was left) the value may be nowhere. Then neither of two easy answers is
//! right: *to propose something new there* would acknowledge a command that the machine here skips,
//! because it has that position already; and *to fill it with a no-op* would let a member that
//! joins later replay the log without the effects that the machine here has. So the position holds
//! [`Kind::Lost`], durably, and a server that lacks it gets a snapshot.
//!
//! Of positions between `chosen` and `reached` the machine here has a part. A server alone goes on with that part;
//! one with others gives the leadership up where it finds such a position lost, because another member may have
//! all of it ([`Replica::lacks_what_was_begun`]).

use super::{Replica, Role};
use crate::event::Command;
use crate::ids::{AccessKey, NodeId, Position, Term};
use crate::memory::LogMemory;
use crate::slot::{Kind, SLOT_HEADER_BYTES, claimed_length, decode};

/// The best entry seen for a position.
#[derive(Debug)]
struct Found {
    chosen: bool,
    term: Term,
    kind: Kind,
    payload: Vec<u8>,
}

/// Positions being merged.
#[derive(Debug)]
struct Chunk {
    first: Position,
    best: Vec<Option<Found>>,
    /// Voters that have not been read.
    waiting: Vec<NodeId>,
}

#[derive(Debug)]
pub(super) struct Recovery {
    chunk: Option<Chunk>,
    pub(super) progress_ns: u64,
}

impl Recovery {
    pub(super) fn new(now_ns: u64) -> Self {
        Self { chunk: None, progress_ns: now_ns }
    }
}

fn merge(best: &mut Option<Found>, chosen: bool, entry: crate::slot::Entry<'_>) {
    let better = match best {
        None => true,
        Some(found) => !found.chosen && (chosen || entry.term > found.term),
    };
    if better {
        let (term, kind, payload) = (entry.term, entry.kind, entry.payload.to_vec());
        *best = Some(Found { chosen, term, kind, payload });
    }
}

impl<M: LogMemory> Replica<M> {
    /// Begins again with the positions not proposed yet, with the votes there are.
    pub(super) fn restart_recovery(&mut self) {
        if let Role::Leader(leader) = &mut self.role
            && let Some(recovery) = &mut leader.recovery
        {
            recovery.chunk = None;
        }
    }

    pub(super) fn drive_recovery(&mut self, commands: &mut Vec<Command>) {
        loop {
            let Role::Leader(leader) = &mut self.role else { return };
            let Some(recovery) = &mut leader.recovery else { return };
            if let Some(chunk) = &recovery.chunk {
                if !chunk.waiting.is_empty() {
                    return;
                }
                self.propose_merged(commands);
                continue;
            }
            let votes = &leader.votes;
            let has_votes =
                self.configuration.has_majority(|id| votes.iter().any(|vote| vote.from == id));
            if leader.pending_change.is_some() || !has_votes {
                return;
            }
            let highest = votes.iter().map(|vote| vote.grant.highest).max();
            // Nothing new may stand where the state machine here has applied something already: it
            // would be skipped here, and taken for chosen.
            let end = highest.unwrap_or_default().max(self.reached);
            let first = leader.last.next();
            if first > end {
                leader.recovery = None;
                return;
            }
            let slots = self.layout.slots();
            let room = self.snapshot.plus(slots).since(leader.last);
            let count = end.since(leader.last).min(room).min(self.options.operation_slots);
            if count == 0 || leader.is_in_flight(leader.last.plus(count), slots) {
                // Until the state machine's snapshot makes room.
                if let Some(recovery) = &mut leader.recovery {
                    recovery.progress_ns = self.now_ns;
                }
                return;
            }
            self.read_chunk(first, count, commands);
        }
    }

    fn read_chunk(&mut self, first: Position, count: u64, commands: &mut Vec<Command>) {
        let mut best = Vec::new();
        for offset in 0..count {
            let mut own = None;
            if let Some(entry) = self.load_entry(first.plus(offset)) {
                merge(&mut own, false, entry);
            }
            best.push(own);
        }
        let own = self.id;
        let Role::Leader(leader) = &mut self.role else { return };
        let mut waiting = Vec::new();
        for vote in leader.votes.iter().filter(|vote| vote.from != own) {
            if vote.grant.highest >= first {
                waiting.push(vote.from);
                let (peer, key) = (vote.from, vote.grant.key);
                commands.push(Command::ReadSlots { peer, key, first, count });
            }
        }
        if let Some(recovery) = &mut leader.recovery {
            recovery.chunk = Some(Chunk { first, best, waiting });
        }
    }

    pub(super) fn on_slots_read(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        first: Position,
        bytes: &[u8],
        commands: &mut Vec<Command>,
    ) {
        let (cluster, now_ns, has) = (self.cluster, self.now_ns, self.chosen);
        let Role::Leader(leader) = &mut self.role else { return };
        let vote = leader.votes.iter().find(|vote| vote.from == peer && vote.grant.key == key);
        let Some(grant) = vote.map(|vote| vote.grant) else { return };
        let Some(recovery) = &mut leader.recovery else { return };
        let Some(chunk) = recovery.chunk.as_mut().filter(|chunk| chunk.first == first) else {
            return;
        };
        if !chunk.waiting.contains(&peer) {
            return;
        }
        let mut sound = true;
        let mut position = first;
        let slots = bytes.chunks_exact(self.layout.slot_bytes() as usize);
        for (best, slot) in chunk.best.iter_mut().zip(slots) {
            let chosen = position <= grant.committed;
            match decode(cluster, position, slot) {
                // The effects are the voter's, and not to be had from its log.
                Some(entry) if entry.kind == Kind::Lost && position > has => {
                    self.step_down(commands);
                    return;
                }
                Some(entry) => merge(best, chosen, entry),
                // A chosen value that cannot be read must not be taken for a hole.
                None => sound &= !chosen,
            }
            position = position.next();
        }
        recovery.progress_ns = now_ns;
        chunk.waiting.retain(|id| *id != peer);
        if !sound {
            leader.votes.retain(|vote| vote.from != peer);
            self.restart_recovery();
        }
    }

    /// Proposes the merged chunk, up to a change of membership.
    fn propose_merged(&mut self, commands: &mut Vec<Command>) {
        let now_ns = self.now_ns;
        let Role::Leader(leader) = &mut self.role else { return };
        let Some(recovery) = &mut leader.recovery else { return };
        let Some(chunk) = recovery.chunk.take() else { return };
        recovery.progress_ns = now_ns;
        assert!(chunk.first == leader.last.next(), "positions are merged in order");
        for found in chunk.best {
            let Role::Leader(leader) = &self.role else { return };
            let is_lost = found.as_ref().is_none_or(|found| found.kind == Kind::Lost);
            let has_part = leader.last >= self.chosen && leader.last < self.reached;
            if is_lost && has_part && !self.is_alone() {
                self.gave_way = false;
                self.step_down(commands);
                return;
            }
            let Some(Found { kind, payload, .. }) = found else {
                // A majority had it, and it is gone from a majority: memory was lost. The state
                // machine here has its effects, and another one gets them by a snapshot alone.
                let lost = leader.last < self.reached;
                self.append(if lost { Kind::Lost } else { Kind::NoOp }, &[]);
                continue;
            };
            let position = self.append(kind, &payload);
            let changes = kind == Kind::Configuration
                && self.configuration.apply(position, &payload).is_some();
            if changes {
                if let Role::Leader(leader) = &mut self.role {
                    leader.pending_change = Some(position);
                }
                return;
            }
        }
    }

    /// Whether this is the only member.
    pub(super) fn is_alone(&self) -> bool {
        self.configuration.members() == [self.id]
    }

    /// Whether the state machine has a part of an entry that is in no own slot. Other members have all of the
    /// entry: one of them leads, and copies the entry here. A server alone has no other member to get it from.
    pub(super) fn lacks_what_was_begun(&mut self) -> bool {
        let mut position = self.chosen.max(self.committed).next();
        while position <= self.reached && !self.is_alone() {
            if self.load_entry(position).is_none_or(|entry| entry.kind == Kind::Lost) {
                return true;
            }
            position = position.next();
        }
        false
    }

    /// The entry of `position` in own memory, copied and checked.
    pub(super) fn load_entry(&mut self, position: Position) -> Option<crate::slot::Entry<'_>> {
        let offset = self.layout.slot_offset(position);
        let (head, rest) = self.scratch.split_at_mut(SLOT_HEADER_BYTES);
        self.memory.load(offset, head);
        let length = claimed_length(head).min(self.layout.slot_bytes() as usize);
        let payload = &mut rest[..length - SLOT_HEADER_BYTES];
        self.memory.load(offset + SLOT_HEADER_BYTES as u64, payload);
        decode(self.cluster, position, &self.scratch[..length])
    }
}
