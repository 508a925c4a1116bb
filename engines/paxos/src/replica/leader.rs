//! Leading: replication, commits, membership, hand-over.
//!
//! One round per commit: entries go to every follower by WRITE with a FLUSH behind them, posted at
//! once; the completion of the flush says that they are durable there. f + 1 such completions,
//! the leader's own copy among them, commit.

use std::collections::VecDeque;

use super::election::{Ballot, Follower};
use super::reads::Rounds;
use super::recovery::Recovery;
use super::{Replica, Role};
use crate::configuration::Change;
use crate::event::Command;
use crate::ids::{AccessKey, NodeId, Position, Term};
use crate::layout::Status;
use crate::memory::LogMemory;
use crate::message::{Grant, Message};
use crate::options::ns;
use crate::slot::Kind;

/// A member that does not answer is asked for access so often, once a heartbeat; then after twice as long each
/// time, and [`LONGEST_PAUSE`] heartbeats at most. One that stands still finds few requests when it goes on, and
/// its connection does not end for want of room.
const FREQUENT: u32 = 4;
const LONGEST_PAUSE: u64 = 16;

/// A follower, as its leader knows it.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) id: NodeId,
    /// Opens its log region; `None` while it is not reached.
    pub(super) key: Option<AccessKey>,
    /// Everything up to here is durable there.
    pub(super) confirmed: Position,
    /// To be written next.
    next: Position,
    /// It allows slots to be overwritten up to here.
    snapshot: Position,
    /// Its commit word says this.
    told: Position,
    /// The last round of confirmations that had begun when its commit word was written.
    told_round: u64,
    /// Operations outstanding: first and last slot.
    in_flight: VecDeque<(Position, Position)>,
    /// When it was last asked for access, and how often since it was heard of.
    asked_ns: Option<u64>,
    asked: u32,
    status_asked_ns: Option<u64>,
    snapshot_sent_ns: Option<u64>,
    disconnecting: bool,
    /// Its state machine is about to have no room.
    pub(super) short: bool,
    /// Its status was read since it is reached.
    heard: bool,
    /// Of this leader's beats it saw these last.
    saw: u32,
    /// The last confirmation asked for, and the last that came.
    pub(super) asked_round: u64,
    pub(super) round: u64,
}

impl Peer {
    fn new(id: NodeId) -> Self {
        Self {
            id,
            key: None,
            confirmed: Position::NONE,
            next: Position::NONE.next(),
            snapshot: Position::NONE,
            told: Position::NONE,
            told_round: 0,
            in_flight: VecDeque::new(),
            asked_ns: None,
            asked: 0,
            status_asked_ns: None,
            snapshot_sent_ns: None,
            disconnecting: false,
            short: false,
            heard: false,
            saw: 0,
            asked_round: 0,
            round: 0,
        }
    }

    fn gain_access(&mut self, grant: Grant, begun: u64) {
        self.told_round = begun;
        self.key = Some(grant.key);
        self.asked = 0;
        self.confirmed = grant.committed;
        self.next = grant.committed.next();
        self.snapshot = grant.snapshot;
        self.told = grant.committed;
        self.in_flight.clear();
        self.snapshot_sent_ns = None;
        self.disconnecting = false;
        (self.heard, self.saw) = (false, 0);
        self.asked_round = self.round;
    }

    /// It has everything up to `last`, and its commit word says so: a confirmation that was posted
    /// behind the write of that word came back. It saw the leader's beats since that woke: one that rests
    /// on words from before, because it was not told or read them late, is told until it looks.
    pub(super) fn is_quiet(&self, last: Position, woke: u32) -> bool {
        self.confirmed == last
            && self.told == last
            && self.round > self.told_round
            && self.saw.wrapping_sub(woke).cast_signed() >= 0
            && self.in_flight.is_empty()
            && self.snapshot_sent_ns.is_none()
            && self.heard
            && !self.disconnecting
    }

    fn lose_access(&mut self) {
        self.key = None;
        self.in_flight.clear();
        (self.asked_ns, self.asked) = (None, 0);
        self.disconnecting = false;
        // A member that is not there, or has stopped, holds up no other member.
        self.short = false;
    }
}

/// A hand-over under way.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    to: NodeId,
    until_ns: u64,
    asked: bool,
}

/// A server that shall join: it is replicated to as a member is, and counts for nothing, until it has
/// the data. Otherwise a joiner that is slow, or not there at all, would take part in majorities
/// with an empty log.
#[derive(Debug)]
struct Learner {
    id: NodeId,
    contact: Vec<u8>,
    /// It has the data once it has this; `None` while it is not reached.
    target: Option<Position>,
}

#[derive(Debug)]
pub(super) struct Leader {
    pub(super) term: Term,
    pub(super) beats: u32,
    /// Its beats when it woke last.
    pub(super) woke: u32,
    /// Proposed up to here.
    pub(super) last: Position,
    /// An earlier leader wrote into this server's ring up to here: what stood one round of the
    /// ring before is gone.
    written: Position,
    /// Own slots are durable up to here.
    pub(super) persisted: Position,
    persisting: bool,
    pub(super) peers: Vec<Peer>,
    pub(super) votes: Vec<Ballot>,
    /// `None` once everything of earlier leaders is proposed again.
    pub(super) recovery: Option<Recovery>,
    /// Everything of earlier leaders is committed again.
    pub(super) ready: bool,
    /// A change of membership that is not committed: nothing is proposed behind it.
    pub(super) pending_change: Option<Position>,
    learner: Option<Learner>,
    transfer: Option<Transfer>,
    pub(super) rounds: Rounds,
    /// The committed configuration lacks this server.
    leaving: bool,
    /// Its beats stand still, and it asks no member for anything, until it has something to do.
    pub(super) rests: bool,
}

impl Leader {
    pub(super) fn elected(
        term: Term,
        own: NodeId,
        committed: Position,
        votes: Vec<Ballot>,
        now_ns: u64,
    ) -> Self {
        let ballot = votes.iter().find(|ballot| ballot.from == own);
        assert!(ballot.is_some(), "a candidate votes for itself");
        let written = ballot.map_or(committed, |ballot| ballot.grant.highest);
        let persisted = ballot.map_or(Position::NONE, |ballot| ballot.grant.committed);
        Self {
            term,
            beats: 0,
            woke: 0,
            last: committed,
            written,
            persisted,
            persisting: false,
            peers: Vec::new(),
            votes,
            recovery: Some(Recovery::new(now_ns)),
            ready: false,
            pending_change: None,
            learner: None,
            transfer: None,
            rounds: Rounds::new(now_ns),
            leaving: false,
            rests: false,
        }
    }

    pub(super) fn takes_proposals(&self) -> bool {
        self.ready && self.pending_change.is_none() && self.transfer.is_none() && !self.leaving
    }

    /// Whether an operation that reads the slot of `position` from our memory, for an earlier
    /// position, is outstanding.
    pub(super) fn is_in_flight(&self, position: Position, slots: u64) -> bool {
        self.peers.iter().any(|peer| blocks(peer, position, slots))
    }

    /// A peer whose log region is open to us.
    pub(super) fn reached(&self, id: NodeId) -> Option<&Peer> {
        self.peers.iter().find(|peer| peer.id == id && peer.key.is_some())
    }

    /// Whether a member that is written to is about to have no room for more. A server that learns
    /// is none yet.
    pub(super) fn has_short_peer(&self) -> bool {
        let learner = self.learner.as_ref().map(|learner| learner.id);
        let mut members = self.peers.iter().filter(|peer| Some(peer.id) != learner);
        members.any(|peer| peer.key.is_some() && peer.short)
    }

    pub(super) fn excuse(&mut self, pause_ns: u64) {
        self.rounds.excuse(pause_ns);
        if let Some(recovery) = &mut self.recovery {
            recovery.progress_ns = recovery.progress_ns.saturating_add(pause_ns);
        }
    }

    pub(super) fn hands_over(&self) -> bool {
        self.transfer.is_some()
    }

    pub(super) fn learns(&self) -> bool {
        self.learner.is_some()
    }

    fn holder_of(&mut self, id: NodeId, key: AccessKey) -> Option<&mut Peer> {
        self.peers.iter_mut().find(|peer| peer.id == id && peer.key == Some(key))
    }

    pub(super) fn gain_access(&mut self, id: NodeId, grant: Grant) {
        let begun = self.rounds.begun();
        if let Some(peer) = self.peers.iter_mut().find(|peer| peer.id == id) {
            peer.gain_access(grant, begun);
        }
    }

    pub(super) fn confirm_round(&mut self, id: NodeId, key: AccessKey, round: u64) {
        if let Some(peer) = self.holder_of(id, key) {
            peer.round = peer.round.max(round);
        }
    }
}

fn blocks(peer: &Peer, position: Position, slots: u64) -> bool {
    peer.in_flight.front().is_some_and(|(first, _)| first.plus(slots) <= position)
}

impl<M: LogMemory> Replica<M> {
    /// A member that says something is there: its leader asks it at once for what it did not answer before.
    pub(super) fn hear(&mut self, from: NodeId) {
        self.ask_anew(|peer| peer.id == from && peer.asked > FREQUENT);
    }

    /// A member is connected anew.
    pub(super) fn hear_all(&mut self) {
        self.ask_anew(|_| true);
    }

    fn ask_anew(&mut self, is_there: impl Fn(&Peer) -> bool) {
        let Role::Leader(leader) = &mut self.role else { return };
        for peer in leader.peers.iter_mut().filter(|peer| is_there(peer)) {
            (peer.asked_ns, peer.asked) = (None, 0);
        }
    }

    /// Everything a leader does without being asked, after each event.
    pub(super) fn drive_leader(&mut self, commands: &mut Vec<Command>) {
        if !matches!(self.role, Role::Leader(_)) {
            return;
        }
        // A commit may let recovery go on, which may commit (in a cluster of one).
        loop {
            self.drive_recovery(commands);
            if !self.commit(commands) {
                break;
            }
        }
        self.become_ready(commands);
        self.admit_learner();
        self.drive_transfer(commands);
        self.pump(commands);
        if matches!(&self.role, Role::Leader(leader) if leader.leaving) {
            self.step_down(commands);
        }
    }

    fn become_ready(&mut self, commands: &mut Vec<Command>) {
        let Role::Leader(leader) = &mut self.role else { return };
        if !leader.ready && leader.recovery.is_none() && self.committed == leader.last {
            leader.ready = true;
            self.failed_campaigns = 0;
            commands.push(Command::Leading { term: leader.term });
        }
    }

    /// Commits what f + 1 servers have; true if there was something.
    fn commit(&mut self, commands: &mut Vec<Command>) -> bool {
        let Role::Leader(leader) = &self.role else { return false };
        let reached = self.configuration.majority_position(|id| {
            if id == self.id {
                return leader.persisted;
            }
            let peer = leader.peers.iter().find(|peer| peer.id == id);
            peer.map_or(Position::NONE, |peer| peer.confirmed)
        });
        // What was chosen before needs no majority once more: where the commit words of all were lost,
        // there may be none until those that lag have a snapshot, which is taken of what is committed.
        let (to, persisted) = (reached.max(self.reached).min(leader.last), leader.persisted);
        let own_word = to.max(self.committed).min(persisted);
        let moved = to > self.committed;
        if moved {
            let before = self.configuration.position();
            self.advance(to, commands);
            if before != self.configuration.position() {
                self.follow_configuration(commands);
            }
        }
        if let Role::Leader(leader) = &mut self.role {
            if leader.pending_change.is_some_and(|position| position <= to) {
                leader.pending_change = None;
            }
            self.store_commit_word(own_word);
        }
        moved
    }

    /// Makes the peers those of the configuration.
    pub(super) fn follow_configuration(&mut self, commands: &mut Vec<Command>) {
        let Role::Leader(leader) = &mut self.role else { return };
        let (own, configuration) = (self.id, &self.configuration);
        leader.learner.take_if(|learner| configuration.contains(learner.id));
        let learner = leader.learner.as_ref().map(|learner| learner.id);
        leader.peers.retain(|peer| {
            let stays = configuration.contains(peer.id) || learner == Some(peer.id);
            if let (false, Some(key)) = (stays, peer.key) {
                commands.push(Command::Disconnect { peer: peer.id, key });
            }
            stays
        });
        for id in configuration.members().iter().copied().filter(|id| *id != own) {
            if leader.peers.iter().any(|peer| peer.id == id) {
                continue;
            }
            leader.peers.push(Peer::new(id));
            let ballot = leader.votes.iter().find(|ballot| ballot.from == id).copied();
            if let Some(Ballot { from, grant }) = ballot {
                leader.gain_access(from, grant);
            }
        }
        leader.leaving = !configuration.contains(own);
    }

    fn drive_transfer(&mut self, commands: &mut Vec<Command>) {
        let Role::Leader(leader) = &mut self.role else { return };
        let Some(transfer) = leader.transfer.filter(|transfer| !transfer.asked) else { return };
        let has_all = leader
            .reached(transfer.to)
            .is_some_and(|peer| peer.confirmed == leader.last && peer.told == leader.last);
        if has_all {
            let message = Message::TakeOver { term: leader.term };
            commands.push(Command::Send { to: transfer.to, message });
            leader.transfer = Some(Transfer { asked: true, ..transfer });
        }
    }

    /// Starts what can be started: own persistence, writes, commit words, confirmations.
    fn pump(&mut self, commands: &mut Vec<Command>) {
        let Role::Leader(leader) = &mut self.role else { return };
        let (slots, options) = (self.layout.slots(), &self.options);
        if !leader.persisting && leader.persisted < leader.last {
            leader.persisting = true;
            let first = leader.persisted.next();
            commands.push(Command::PersistLog { term: leader.term, first, last: leader.last });
        }
        for peer in &mut leader.peers {
            let Some(key) = peer.key else { continue };
            while peer.next <= leader.last
                && peer.in_flight.len() < options.pipeline_depth
                && peer.snapshot_sent_ns.is_none()
            {
                let in_ring = peer.next > self.ring_from
                    && peer.next.plus(slots) > leader.last.max(leader.written);
                if !in_ring {
                    peer.snapshot_sent_ns = Some(self.now_ns);
                    commands.push(Command::SendSnapshot { to: peer.id });
                    break;
                }
                let room = peer.snapshot.plus(slots);
                if leader.last.plus(slots / 4) > room && peer.status_asked_ns != Some(self.now_ns) {
                    peer.status_asked_ns = Some(self.now_ns);
                    commands.push(Command::ReadStatus { peer: peer.id });
                }
                let (first, most) = (peer.next, peer.next.plus(options.operation_slots - 1));
                let last = leader.last.min(most).min(room);
                if last < first {
                    break;
                }
                commands.push(Command::WriteFlush { peer: peer.id, key, first, last });
                peer.in_flight.push_back((first, last));
                peer.next = last.next();
            }
            let position = self.committed.min(peer.confirmed);
            if position > peer.told {
                peer.told = position;
                peer.told_round = leader.rounds.begun();
                commands.push(Command::WriteCommit { peer: peer.id, key, position });
            }
            if let Some(round) = leader.rounds.to_ask(peer.asked_round) {
                peer.asked_round = round;
                commands.push(Command::Confirm { peer: peer.id, key, round });
            }
        }
    }

    pub(super) fn tick_leader(&mut self, commands: &mut Vec<Command>) {
        // A leader that is alone in its cluster confirms itself: a tick after the round began, in which
        // a server that learns was asked as well. The answer tells whether its log is open still.
        self.close_round(commands);
        let Role::Leader(leader) = &mut self.role else { return };
        let (now_ns, options) = (self.now_ns, &self.options);
        let since = |then_ns: u64| now_ns.saturating_sub(then_ns);
        leader.beats = leader.beats.wrapping_add(1);
        let recovery = leader.recovery.as_ref();
        let stuck =
            recovery.is_some_and(|recovery| since(recovery.progress_ns) > ns(options.isolation));
        if stuck || leader.rounds.is_isolated(now_ns, ns(options.isolation)) {
            self.step_down(commands);
            return;
        }
        leader.rounds.tick(now_ns, ns(options.heartbeat));
        if leader.transfer.is_some_and(|transfer| now_ns >= transfer.until_ns) {
            leader.transfer = None;
        }
        let votes = &leader.votes;
        let has_votes =
            self.configuration.has_majority(|id| votes.iter().any(|ballot| ballot.from == id));
        let asks_votes = leader.recovery.is_some() && !has_votes;
        let (term, committed) = (leader.term, self.committed);
        let next = leader.last.next();
        for peer in &mut leader.peers {
            if peer.snapshot_sent_ns.is_some_and(|at| since(at) > ns(options.snapshot_retry)) {
                peer.snapshot_sent_ns = None;
            }
            // Whether it has room for more.
            let looks =
                peer.status_asked_ns.is_none_or(|at| since(at) >= ns(options.heartbeat) / 4);
            if looks && peer.key.is_some() {
                peer.status_asked_ns = Some(now_ns);
                commands.push(Command::ReadStatus { peer: peer.id });
            }
            let blocks = blocks(peer, next, self.layout.slots());
            if let (Some(key), true, false) = (peer.key, blocks, peer.disconnecting) {
                peer.disconnecting = true;
                commands.push(Command::Disconnect { peer: peer.id, key });
            }
            let pauses = (1 << peer.asked.saturating_sub(FREQUENT).min(16)).min(LONGEST_PAUSE);
            let pause_ns = ns(options.heartbeat).saturating_mul(pauses);
            let waited = peer.asked_ns.is_none_or(|at| since(at) >= pause_ns);
            let voted = votes.iter().any(|ballot| ballot.from == peer.id);
            if waited && (peer.key.is_none() || asks_votes && !voted) {
                peer.asked_ns = Some(now_ns);
                peer.asked += 1;
                let message = if asks_votes {
                    Message::RequestVote { term, committed, transfer: false }
                } else {
                    Message::Follow { term }
                };
                commands.push(Command::Send { to: peer.id, message });
            }
        }
        self.republish();
    }

    pub(super) fn on_following(
        &mut self,
        from: NodeId,
        term: Term,
        grant: Grant,
        commands: &mut Vec<Command>,
    ) {
        match &mut self.role {
            Role::Leader(leader) if leader.term == term => leader.gain_access(from, grant),
            _ => self.on_refused(term, commands),
        }
    }

    pub(super) fn on_flushed(&mut self, peer: NodeId, key: AccessKey, last: Position) {
        let Role::Leader(leader) = &mut self.role else { return };
        let Some(peer) = leader.holder_of(peer, key) else { return };
        if peer.in_flight.front().is_some_and(|(_, posted)| *posted == last) {
            peer.in_flight.pop_front();
            peer.confirmed = peer.confirmed.max(last);
        }
    }

    pub(super) fn on_log_persisted(&mut self, term: Term, last: Position) {
        let Role::Leader(leader) = &mut self.role else { return };
        // What an earlier leadership persisted may have been written again since.
        if leader.term == term {
            leader.persisting = false;
            leader.persisted = leader.persisted.max(last);
        }
    }

    pub(super) fn on_access_lost(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        _commands: &mut Vec<Command>,
    ) {
        let Role::Leader(leader) = &mut self.role else { return };
        if let Some(peer) = leader.holder_of(peer, key) {
            peer.lose_access();
        }
        let voted = leader.votes.len();
        leader.votes.retain(|ballot| ballot.grant.key != key || ballot.from != peer);
        if leader.votes.len() < voted {
            self.restart_recovery();
        }
    }

    pub(super) fn on_status_read(
        &mut self,
        peer: NodeId,
        status: Option<Status>,
        commands: &mut Vec<Command>,
    ) {
        if let Role::Leader(leader) = &mut self.role {
            let (term, awake) = (leader.term, !leader.rests);
            let peer = leader.peers.iter_mut().find(|known| known.id == peer);
            if let (Some(peer), Some(status)) = (peer, status) {
                peer.snapshot = peer.snapshot.max(status.snapshot);
                (peer.short, peer.heard, peer.saw) = (status.short, true, status.beats);
                if status.rests && awake {
                    // It was told, and the message was lost; or it read what the leader was before.
                    commands.push(Command::Send { to: peer.id, message: Message::Awake { term } });
                }
            }
        } else {
            self.on_watched_status(peer, status, commands);
        }
    }

    pub(super) fn on_change(
        &mut self,
        change: Change,
        contact: &[u8],
        commands: &mut Vec<Command>,
    ) {
        let Role::Leader(leader) = &mut self.role else { return };
        let (Change::Join(id) | Change::Leave(id)) = change;
        let learns = leader.learner.as_ref().map(|learner| learner.id);
        if let (Change::Leave(_), true) = (change, learns == Some(id)) {
            leader.learner = None;
            self.follow_configuration(commands);
            return;
        }
        if matches!(change, Change::Leave(_)) || self.configuration.contains(id) {
            self.propose_change(change, contact);
            return;
        }
        let possible = self.configuration.propose(change, contact).is_some();
        if learns.is_none() && possible && leader.takes_proposals() {
            leader.learner = Some(Learner { id, contact: contact.to_vec(), target: None });
            leader.peers.push(Peer::new(id));
        }
    }

    /// Proposes that the learner be a member once it has what the leader had when it was reached,
    /// and is not far behind.
    fn admit_learner(&mut self) {
        let window = self.options.window;
        let Role::Leader(leader) = &mut self.role else { return };
        if !leader.takes_proposals() {
            return;
        }
        let last = leader.last;
        let Some(learner) = &mut leader.learner else { return };
        let peer = leader.peers.iter().find(|peer| peer.id == learner.id && peer.key.is_some());
        let known = peer.map(|peer| (peer.confirmed, peer.heard && !peer.short));
        let Some((confirmed, has_room)) = known else {
            learner.target = None;
            return;
        };
        if !has_room {
            // As a member it would make the others refuse what needs room.
            return;
        }
        if confirmed < *learner.target.get_or_insert(last) {
            return;
        }
        if last.since(confirmed) > window {
            learner.target = Some(last);
            return;
        }
        let (change, contact) = (Change::Join(learner.id), learner.contact.clone());
        self.propose_change(change, &contact);
    }

    fn propose_change(&mut self, change: Change, contact: &[u8]) {
        let Role::Leader(leader) = &self.role else { return };
        let position = leader.last.next();
        let room = position.since(self.snapshot) <= self.layout.slots()
            && !leader.is_in_flight(position, self.layout.slots());
        let Some(payload) = self.configuration.propose(change, contact) else { return };
        let fits = payload.len() <= self.layout.max_payload_bytes();
        if leader.takes_proposals() && room && fits {
            let position = self.append(Kind::Configuration, &payload);
            if let Role::Leader(leader) = &mut self.role {
                leader.pending_change = Some(position);
            }
        }
    }

    pub(super) fn on_transfer(&mut self, to: NodeId) {
        let until_ns = self.now_ns.saturating_add(ns(self.options.transfer));
        let Role::Leader(leader) = &mut self.role else { return };
        let known = leader.peers.iter().any(|peer| peer.id == to);
        if leader.takes_proposals() && known && self.configuration.contains(to) {
            leader.transfer = Some(Transfer { to, until_ns, asked: false });
        }
    }

    /// Stops leading, if it leads.
    pub(super) fn step_down(&mut self, commands: &mut Vec<Command>) {
        if !matches!(self.role, Role::Leader(_)) {
            return;
        }
        let follower = Role::Follower(Follower::idle(self.now_ns, &self.options));
        let Role::Leader(leader) = std::mem::replace(&mut self.role, follower) else { return };
        for peer in &leader.peers {
            if let Some(key) = peer.key {
                commands.push(Command::Disconnect { peer: peer.id, key });
            }
        }
        commands.extend(leader.rounds.waiting().map(|id| Command::ReadRefused { id }));
        commands.push(Command::SteppedDown { term: leader.term });
        self.publish(Term(0), 0);
    }
}
