//! What the protocol says, and committed commands.
//!
//! A committed command for which the machine has no room is *held*, with all behind it: the member
//! goes on voting, confirming and, where it must, leading until another one does, and applies on
//! once there is room. What it holds stands in its log, which overwrites no slot that is not
//! applied; if the others' logs go on beyond that, it gets a snapshot. Reads are refused meanwhile, to
//! be asked again: the client may have a time limit, and another member may lead by then. The same holds while the
//! machine is away to restore a snapshot ([`super::install`]).

use beeline_paxos::{Command, Event, Kind, Outcome as O, Position, RoleName, batch};

use super::{Answered, Node, NodeError, REPLY_KEPT, REPLY_LOST, Read, Waiter};
use crate::handle::{NO_SESSION, Refusal, Reply};
use crate::machine::StateMachine;

impl<S: StateMachine> Node<S> {
    pub(super) fn carry_out(
        &mut self,
        upward: &mut Vec<Command>,
        now_ns: u64,
    ) -> Result<(), NodeError> {
        for command in upward.drain(..) {
            match command {
                Command::Apply { first, last } => match &mut self.held {
                    Some((_, end)) => *end = last,
                    None => self.apply(first, last)?,
                },
                Command::ReadReady { id } if self.held.is_some() || self.machine.is_none() => {
                    if let Some(read) = self.reads.remove(&id) {
                        read.refuse(Refusal::Full);
                    }
                }
                Command::ReadReady { id } => self.answer_read(id),
                Command::ReadRefused { id } => {
                    if let Some(read) = self.reads.remove(&id) {
                        read.refuse(self.not_leader());
                    }
                }
                Command::TakeSnapshot => {
                    self.snapshot_due = true;
                    self.take_snapshot(now_ns);
                }
                Command::SendSnapshot { to } if !self.wanting.contains(&to) => {
                    self.wanting.push(to);
                }
                Command::Leading { term } => {
                    self.counters.leaderships += 1;
                    tracing::info!(%term, id = %self.home.id(), "leads the log");
                }
                Command::SteppedDown { term } => {
                    self.counters.step_downs += 1;
                    tracing::info!(%term, id = %self.home.id(), "no longer leads the log");
                    for waiter in self.pending.drain(..).flat_map(|(_, waiters)| waiters) {
                        waiter.refuse(Refusal::Lost);
                    }
                    self.refuse_queued();
                }
                Command::Stop { damaged } => {
                    return Err(NodeError::Damaged { position: damaged });
                }
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn apply(&mut self, first: Position, last: Position) -> Result<(), NodeError> {
        if self.machine.is_none() {
            // Until it is back.
            self.held = Some((first, last));
            return Ok(());
        }
        let mut payload = std::mem::take(&mut self.payload);
        let mut position = first;
        while position <= last {
            let kind = self.member.replica().entry(position, &mut payload);
            if kind == Kind::Lost && position > self.machine_has {
                self.look_at_lost(position)?;
            }
            if kind == Kind::Commands && !self.has_room(position, &payload) {
                self.held = Some((position, last));
                break;
            }
            let waiters = self.pending.pop_front_if(|(at, _)| *at == position);
            let waiters = waiters.map(|(_, waiters)| waiters).unwrap_or_default();
            if kind == Kind::Commands {
                self.apply_commands(position, &payload, waiters);
            } else {
                if let Some(membership) = self.membership.apply(position, &payload)
                    && kind == Kind::Configuration
                {
                    for removed in self.known.forget_removed(&membership) {
                        self.peers.forget(removed);
                    }
                    // The last member says so durably: what it promised to others binds it no more, and it may
                    // be opened after a new start of its machine.
                    self.snapshot_due |= membership.members() == [self.home.id()];
                    self.membership = membership;
                    if !self.known.names_some() {
                        self.acquaint()?;
                    }
                }
                // What was proposed here is not what was chosen.
                waiters.into_iter().for_each(|waiter| waiter.refuse(Refusal::Lost));
            }
            self.applied = position;
            position = position.next();
        }
        self.payload = payload;
        if let Some(machine) = &mut self.machine {
            machine.settle(&mut self.settled);
            // None of these where the first of them is held.
            if self.applied >= first && self.applied > self.machine_has {
                machine.flush(self.applied).map_err(NodeError::Machine)?;
            }
        }
        let mut settled = self.settled.drain(..);
        for answered in self.answered.drain(..) {
            match answered {
                Answered::Command(done, reply) => done(reply),
                Answered::Later(position, done) => {
                    let bytes = settled.next();
                    if let Some(done) = done {
                        let reply = bytes.map(|bytes| Reply { position, bytes, repeated: false });
                        done(reply.ok_or(Refusal::ReplyLost));
                    }
                }
                Answered::Session(done, name) => done(name),
            }
        }
        Ok(())
    }

    /// An entry is in no log any more, and not all of its effects are in this machine.
    ///
    /// A member alone has no other to get them from: it goes on with the part that is there, as with a log that lost
    /// its end. Beside others it would differ from them.
    fn look_at_lost(&self, position: Position) -> Result<(), NodeError> {
        if position > self.machine_reached || self.membership.members() != [self.home.id()] {
            return Err(NodeError::Damaged { position });
        }
        tracing::warn!(%position, "an entry is lost; the state has a part of what it did, or none");
        Ok(())
    }

    fn has_room(&mut self, position: Position, payload: &[u8]) -> bool {
        let Some(machine) = &mut self.machine else { return false };
        position <= self.machine_has
            || batch::commands(payload)
                .enumerate()
                .all(|(index, command)| machine.has_room_for(position, index, command.bytes))
    }

    /// Goes on with what was held, if there is room now. True if something was applied.
    pub(super) fn apply_held(&mut self) -> Result<bool, NodeError> {
        let Some((first, last)) = self.held.filter(|_| self.machine.is_some()) else {
            return Ok(false);
        };
        self.held = None;
        self.apply(first, last)?;
        if self.held.is_none() {
            tracing::info!("what the cluster agreed on, and was held, is applied");
            // What the protocol asked for meanwhile had nothing to cover.
            self.snapshot_due = true;
        }
        Ok(self.held.is_none_or(|(held, _)| held > first))
    }

    /// A leader that cannot apply answers nobody: a member that can leads instead, if there is one.
    pub(super) fn lead_no_more_without_room(&mut self) -> Result<(), NodeError> {
        if self.held.is_none() || self.role() != RoleName::Leader {
            return Ok(());
        }
        let (replica, own) = (self.member.replica(), self.home.id());
        let mut others = replica.configuration().members().iter().copied();
        let next = others.find(|id| {
            *id != own && replica.confirmed_by(*id).is_some() && !replica.is_short_of_room(*id)
        });
        if let Some(to) = next {
            let mut upward = std::mem::take(&mut self.upward);
            self.member.event(Event::Transfer { to }, &mut upward)?;
            self.upward = upward;
        }
        Ok(())
    }

    pub(super) fn apply_commands(
        &mut self,
        position: Position,
        payload: &[u8],
        waiters: Vec<Waiter>,
    ) {
        let mut waiters = waiters.into_iter();
        let runs = position > self.machine_has;
        let Some(machine) = &mut self.machine else { return };
        for (index, command) in (0..=u16::MAX).zip(batch::commands(payload)) {
            self.counters.applied += 1;
            let waiter = waiters.next();
            if command.session == NO_SESSION {
                let mut bytes = Vec::new();
                if runs && !machine.take(position, command.bytes, &mut bytes) {
                    let done = match waiter {
                        Some(Waiter::Command(done)) => Some(done),
                        _ => None,
                    };
                    self.answered.push(Answered::Later(position, done));
                    continue;
                }
                if let Some(Waiter::Command(done)) = waiter {
                    let reply = Reply { position, bytes, repeated: false };
                    let reply = if runs { Ok(reply) } else { Err(Refusal::ReplyLost) };
                    self.answered.push(Answered::Command(done, reply));
                }
                continue;
            }
            let run = |bytes: &[u8], kept: &mut Vec<u8>| {
                if runs {
                    machine.apply(position, bytes, kept);
                }
                // After the machine, which is promised an empty buffer and may keep what is in it.
                kept.insert(0, if runs { REPLY_KEPT } else { REPLY_LOST });
            };
            let outcome = self.sessions.apply(position, index, &command, run);
            self.counters.repeated += u64::from(matches!(outcome, O::Repeated(_)));
            self.answered.push(match (waiter, outcome) {
                (Some(Waiter::Session(done)), O::Opened(name)) => Answered::Session(done, Ok(name)),
                (Some(Waiter::Command(done)), O::Applied(reply)) => {
                    Answered::Command(done, reply_of(position, reply, false))
                }
                (Some(Waiter::Command(done)), O::Repeated(reply)) => {
                    Answered::Command(done, reply_of(position, reply, true))
                }
                (Some(Waiter::Command(done)), O::OutOfTurn { expected }) => {
                    Answered::Command(done, Err(Refusal::OutOfTurn { expected }))
                }
                (Some(Waiter::Command(done)), O::Expired) => {
                    Answered::Command(done, Err(Refusal::SessionExpired))
                }
                (Some(waiter), _) => {
                    waiter.refuse(Refusal::Lost);
                    continue;
                }
                (None, _) => continue,
            });
        }
    }

    pub(super) fn answer_read(&mut self, id: u64) {
        self.counters.reads += 1;
        match self.reads.remove(&id) {
            Some(Read::Barrier(done)) => done(Ok(self.applied)),
            Some(Read::Query(query, done)) => {
                done(self.query(&query));
            }
            None => {}
        }
    }

    /// Asks the machine, if it is here.
    pub(super) fn query(&mut self, query: &[u8]) -> Result<Vec<u8>, Refusal> {
        let machine = self.machine.as_mut().ok_or(Refusal::Full)?;
        let mut reply = Vec::new();
        machine.query(query, &mut reply);
        Ok(reply)
    }
}

fn reply_of(position: Position, kept: &[u8], repeated: bool) -> Result<Reply, Refusal> {
    match kept.split_first() {
        Some((&REPLY_KEPT, bytes)) => Ok(Reply { position, bytes: bytes.to_vec(), repeated }),
        _ => Err(Refusal::ReplyLost),
    }
}
