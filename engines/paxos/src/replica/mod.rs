//! One server's part of the protocol.
//!
//! ```text
//!             leader silent             majority would vote         majority voted
//!  Follower ───────────────▶ Asking ───────────────────▶ Candidate ──────────────▶ Leader
//!     ▲   ▲                    │                            │                        │
//!     │   └──── no majority ───┴──────── no majority ───────┘                        │
//!     └── fenced off, isolated, higher term seen, left the cluster ──────────────────┘
//! ```
//!
//! In reading order: [`promise`](self) (fence, persist, answer), election, recovery, leader,
//! reads, rest, apply. Every file adds methods to [`Replica`] for one step of the protocol.
//!
//! Invariants, each argued in `docs/log-protocol.md`:
//! 1. A promise is answered after the log region was fenced and the vote word persisted.
//! 2. A slot at or below a server's commit word holds the value chosen for its position.
//! 3. A leader proposes at a position only what the promises of a majority let it propose there.
//! 4. A slot is overwritten by another position's entry only under a snapshot that covers it.
//! 5. Nothing new is proposed at or below [`Start::reached`], and what stands there in the place of
//!    a lost entry is copied to no other server. A server with others that has a part of an entry which its
//!    slots lack leads only where the slots of its voters have that entry.

mod apply;
mod election;
mod leader;
mod promise;
mod reads;
mod recovery;
mod rest;

use beeline_env::Randomness;

use crate::configuration::Configuration;
use crate::event::{Command, Event};
use crate::ids::{AccessKey, ClusterId, NodeId, Position, Term};
use crate::layout::{Layout, LayoutError, Status, vote};
use crate::memory::LogMemory;
use crate::message::Message;
use crate::options::{Options, ns};
use crate::slot::{Kind, SLOT_HEADER_BYTES, claimed_length, claimed_position, decode, header};

use election::{Asking, Candidate, Follower};
use leader::Leader;
use promise::Promising;

/// What a server knows when it starts.
#[derive(Clone, Debug)]
pub struct Start {
    /// Its name.
    pub id: NodeId,
    /// Its cluster.
    pub cluster: ClusterId,
    /// The cluster's geometry.
    pub layout: Layout,
    /// The vote word, as persisted last; 0 for a new server.
    pub vote_word: u64,
    /// What the state machine's durable snapshot covers; [`Position::NONE`] without one.
    pub snapshot: Position,
    /// Everything up to here is known to be chosen, by a state machine that is durable by itself and
    /// applied it: it may be further on than the commit word, which is not persisted when it is
    /// written. [`Position::NONE`] where there is no such machine. `docs/log-protocol.md` argues why a leader
    /// may count these positions without a new majority ("A machine ahead of its log").
    pub chosen: Position,
    /// Everything up to here is known to be chosen, too: the machine began to apply it, and has a part of what
    /// lies behind [`Start::chosen`]. Where it ended between two units, the same position; a lower one counts as
    /// the same. Beside other members the server lets others campaign first until its own slots hold all of this, and
    /// does not lead where no voter's slots have the rest.
    pub reached: Position,
    /// The members at the snapshot's position. Empty for a server that waits to join.
    pub configuration: Configuration,
    /// For random delays.
    pub seed: u64,
}

/// Why an entry was not proposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProposeError {
    /// Another server leads, perhaps the one named.
    #[error("this server does not lead")]
    NotLeader {
        /// Whom this server follows.
        leader: Option<NodeId>,
    },
    /// It leads and is not ready: recovering, changing members, or handing over.
    #[error("the leader takes no proposals at this moment")]
    NotNow,
    /// The window or the ring is full: wait for commits or for a snapshot.
    #[error("too many entries are under way")]
    Full,
    /// Longer than a slot.
    #[error("{bytes} bytes do not fit into an entry of {limit}")]
    TooLarge {
        /// As proposed.
        bytes: usize,
        /// Most.
        limit: usize,
    },
}

impl ProposeError {
    /// Whether the same proposal may succeed later, at this server.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::NotNow | Self::Full)
    }
}

/// A message whose term is further above the highest one heard of is damaged: no elections were that
/// many, one a second for half a year. Who believed it would have no higher term left to ask for.
const LONGEST_LEAP: u32 = 1 << 24;

#[derive(Debug)]
enum Role {
    Follower(Follower),
    Asking(Asking),
    Candidate(Candidate),
    Leader(Box<Leader>),
    Stopped,
}

/// What a server is doing, for people and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoleName {
    /// Follows a leader, or looks for one.
    Follower,
    /// Wants to become the leader.
    Candidate,
    /// Won an election and completes what earlier leaders began.
    Recovering,
    /// Leads.
    Leader,
    /// Its log is damaged.
    Stopped,
}

/// The leader or candidate that holds this server's log region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    to: NodeId,
    term: Term,
    key: AccessKey,
}

/// A server: events in, commands out. No clock, thread or socket inside.
#[derive(Debug)]
pub struct Replica<M> {
    id: NodeId,
    cluster: ClusterId,
    layout: Layout,
    options: Options,
    memory: M,
    random: Randomness,
    now_ns: u64,
    /// Campaigns in a row that came to nothing: the next one takes longer.
    failed_campaigns: u32,
    /// A campaign that is due may begin ([`Replica::let_campaign`]).
    may_campaign: bool,
    /// Promised: persisted before any answer.
    term: Term,
    voted_for: Option<NodeId>,
    /// The highest term heard of.
    seen_term: Term,
    /// Slots up to here are chosen, and handed to the state machine.
    committed: Position,
    /// Slots up to here may be overwritten.
    snapshot: Position,
    snapshot_asked: bool,
    /// The state machine here is about to have no room.
    short: bool,
    /// Slots up to here may never have been in this ring, or hold [`Kind::Lost`]: they are copied
    /// to no other server.
    ring_from: Position,
    /// The state machine here has all of this.
    chosen: Position,
    /// And a part of this; what is proposed again up to here was chosen before.
    reached: Position,
    /// It let others campaign first, because it lacks some of that, since it saw a leader.
    gave_way: bool,
    /// As of `committed`.
    configuration: Configuration,
    promising: Option<Promising>,
    holder: Option<Holder>,
    role: Role,
    /// One slot's bytes.
    scratch: Vec<u8>,
}

impl<M: LogMemory> Replica<M> {
    /// A server over `memory`, whose log region was formatted with [`Layout::format`] or used
    /// before. Its memory is nobody's: the caller has revoked what peers of an earlier run may
    /// still have mapped.
    ///
    /// Errors: [`LayoutError`].
    pub fn open(start: Start, options: Options, memory: M) -> Result<Self, LayoutError> {
        start.layout.check(start.cluster, &memory)?;
        let (term, voted_for) = vote(start.vote_word).ok_or(LayoutError::Vote)?;
        let options = Options {
            window: options.window.clamp(1, start.layout.slots() / 2),
            pipeline_depth: options.pipeline_depth.clamp(1, 64),
            operation_slots: options.operation_slots.clamp(1, start.layout.slots()),
            ..options
        };
        let mut replica = Self {
            id: start.id,
            cluster: start.cluster,
            layout: start.layout,
            options,
            memory,
            random: Randomness::new(start.seed),
            now_ns: 0,
            failed_campaigns: 0,
            may_campaign: true,
            term,
            voted_for,
            seen_term: term,
            committed: start.snapshot,
            snapshot: start.snapshot,
            snapshot_asked: false,
            short: false,
            ring_from: start.snapshot,
            chosen: start.chosen,
            reached: start.reached.max(start.chosen),
            gave_way: false,
            configuration: start.configuration,
            promising: None,
            holder: None,
            role: Role::Follower(Follower::default()),
            scratch: vec![0; start.layout.slot_bytes() as usize],
        };
        replica.publish(Term(0), 0);
        Ok(replica)
    }

    /// Takes an event; appends what is to be done, in order.
    pub fn step(&mut self, event: Event<'_>, commands: &mut Vec<Command>) {
        if matches!(self.role, Role::Stopped) {
            return;
        }
        if event.wakes() {
            self.awaken(commands);
        }
        match event {
            Event::Tick { now_ns } => self.on_tick(now_ns, commands),
            Event::Proposed => {}
            Event::Wake => self.hear_all(),
            Event::Silent { peer } => self.on_silent(peer),
            Event::Message { from, message } => self.on_message(from, message, commands),
            Event::Fenced { key } => self.on_fenced(key, commands),
            Event::VotePersisted => self.on_vote_persisted(commands),
            Event::LogPersisted { term, last } => self.on_log_persisted(term, last),
            Event::Flushed { peer, key, last } => self.on_flushed(peer, key, last),
            Event::SlotsRead { peer, key, first, bytes } => {
                self.on_slots_read(peer, key, first, bytes, commands);
            }
            Event::Confirmed { peer, key, round } => self.on_confirmed(peer, key, round, commands),
            Event::AccessLost { peer, key } => self.on_access_lost(peer, key, commands),
            Event::StatusRead { peer, status } => self.on_status_read(peer, status, commands),
            Event::Read { id } => self.on_read(id, commands),
            Event::ChangeMembers { change, contact } => self.on_change(change, contact, commands),
            Event::Room { short } => {
                self.short = short;
                self.republish();
            }
            Event::Transfer { to } => self.on_transfer(to),
            Event::SnapshotTaken { position } => self.on_snapshot_taken(position),
            Event::SnapshotInstalled { position, configuration } => {
                self.on_snapshot_installed(position, configuration, commands);
            }
        }
        self.drive_leader(commands);
    }

    fn on_tick(&mut self, now_ns: u64, commands: &mut Vec<Command>) {
        let heartbeat_ns = ns(self.options.heartbeat);
        let pause_ns = now_ns.saturating_sub(self.now_ns).saturating_sub(heartbeat_ns);
        if self.now_ns > 0 && pause_ns > 0 {
            self.excuse(pause_ns);
        }
        self.now_ns = self.now_ns.max(now_ns);
        if self.is_resting() {
            return;
        }
        match self.role {
            Role::Leader(_) => self.tick_leader(commands),
            Role::Stopped => {}
            _ => {
                self.look_at_commit_word(commands);
                self.tick_follower(commands);
            }
        }
        if self.committed.since(self.snapshot) > self.layout.slots() / 2 && !self.snapshot_asked {
            self.snapshot_asked = true;
            commands.push(Command::TakeSnapshot);
        }
    }

    /// This server did not run for a while. That is nobody else's silence: of a pause as much
    /// counts as of one heartbeat. Otherwise the members of a cluster whose machine is overloaded
    /// would take each other for hung whenever they get the processor.
    fn excuse(&mut self, pause_ns: u64) {
        match &mut self.role {
            Role::Follower(follower) => follower.excuse(pause_ns),
            Role::Asking(asking) => asking.excuse(pause_ns),
            Role::Candidate(candidate) => candidate.excuse(pause_ns),
            Role::Leader(leader) => leader.excuse(pause_ns),
            Role::Stopped => {}
        }
    }

    fn on_message(&mut self, from: NodeId, message: Message, commands: &mut Vec<Command>) {
        let known = self.term.max(self.seen_term);
        if message.term().0.saturating_sub(known.0) > LONGEST_LEAP {
            return;
        }
        self.hear(from);
        match message {
            Message::WouldYouVote { term, committed } => {
                self.on_would_you_vote(from, term, committed, commands);
            }
            Message::WouldVote { term } => self.on_would_vote(from, term, commands),
            Message::RequestVote { term, committed, transfer } => {
                self.on_request_vote(from, term, committed, transfer, commands);
            }
            Message::Vote { term, grant } => self.on_vote(from, term, grant, commands),
            Message::Follow { term } => self.on_follow(from, term, commands),
            Message::Following { term, grant } => self.on_following(from, term, grant, commands),
            Message::Refused { term } => self.on_refused(term, commands),
            Message::TakeOver { term } => self.on_take_over(from, term, commands),
            // It woke this server, if that rested.
            Message::Awake { .. } => {}
        }
    }

    fn on_snapshot_taken(&mut self, position: Position) {
        assert!(position <= self.committed, "a snapshot covers applied entries only");
        self.snapshot = self.snapshot.max(position);
        self.snapshot_asked = false;
        self.republish();
    }

    fn on_snapshot_installed(
        &mut self,
        position: Position,
        configuration: Configuration,
        commands: &mut Vec<Command>,
    ) {
        assert!(position > self.committed, "a snapshot is installed by a server that lags behind");
        // Somebody else is further on than this server's leadership, if it has one.
        self.step_down(commands);
        self.committed = position;
        self.ring_from = position;
        self.configuration = configuration;
        self.on_snapshot_taken(position);
        // The leader learns of it as it learns of everything here: by a new grant.
        if let Some(holder) = self.holder {
            self.promise(holder.to, holder.term, false, commands);
        }
    }

    /// Stores a proposal behind all others, at a leader, and returns its position. Step with
    /// [`Event::Proposed`] afterwards; several proposals before one step travel together. The
    /// entry is committed when [`Command::Apply`] covers its position; after
    /// [`Command::SteppedDown`] that position may hold something else.
    ///
    /// Errors: [`ProposeError`]; nothing was stored.
    pub fn propose(&mut self, payload: &[u8]) -> Result<Position, ProposeError> {
        let limit = self.layout.max_payload_bytes();
        if payload.len() > limit {
            return Err(ProposeError::TooLarge { bytes: payload.len(), limit });
        }
        let leader = self.leader();
        let Role::Leader(state) = &self.role else {
            return Err(ProposeError::NotLeader { leader });
        };
        if !state.takes_proposals() {
            return Err(ProposeError::NotNow);
        }
        let position = state.last.next();
        let room = position.since(self.committed) <= self.options.window
            && position.since(self.snapshot) <= self.layout.slots()
            && !state.is_in_flight(position, self.layout.slots());
        if !room {
            return Err(ProposeError::Full);
        }
        Ok(self.append(Kind::Commands, payload))
    }

    /// Reads an entry that [`Command::Apply`] named, into `payload`.
    ///
    /// # Panics
    /// When the slot does not hold the entry: it was not named, or a snapshot covers it and it
    /// was overwritten.
    pub fn entry(&self, position: Position, payload: &mut Vec<u8>) -> Kind {
        let kind = self.slot(position, payload);
        assert!(kind.is_some(), "the entry at {position} was named by Apply and is in its slot");
        kind.unwrap_or(Kind::NoOp)
    }

    /// Reads a committed entry into `payload`, if the ring still has it; `None` for one that was
    /// overwritten, is not committed here, or may never have been in this ring.
    pub fn kept_entry(&self, position: Position, payload: &mut Vec<u8>) -> Option<Kind> {
        // Up to the commit word a slot holds what was chosen, until the ring comes round.
        let is_kept = position > self.ring_from && position <= self.committed;
        self.slot(position, payload).filter(|_| is_kept)
    }

    /// What is in the slot of `position`, if that is an entry of this position. A leader may be
    /// overwriting it: what is half one entry and half another fails its checks.
    fn slot(&self, position: Position, payload: &mut Vec<u8>) -> Option<Kind> {
        let mut head = [0; SLOT_HEADER_BYTES];
        let offset = self.layout.slot_offset(position);
        self.memory.load(offset, &mut head);
        let length = claimed_length(&head).min(self.layout.slot_bytes() as usize);
        payload.resize(length, 0);
        self.memory.load(offset, payload);
        let kind = decode(self.cluster, position, payload).map(|entry| entry.kind)?;
        payload.drain(..SLOT_HEADER_BYTES);
        Some(kind)
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// The term it promised itself to.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// What it does.
    #[must_use]
    pub fn role(&self) -> RoleName {
        match &self.role {
            Role::Follower(_) => RoleName::Follower,
            Role::Asking(_) | Role::Candidate(_) => RoleName::Candidate,
            Role::Leader(leader) if leader.ready => RoleName::Leader,
            Role::Leader(_) => RoleName::Recovering,
            Role::Stopped => RoleName::Stopped,
        }
    }

    /// The leader it knows, perhaps itself.
    #[must_use]
    pub fn leader(&self) -> Option<NodeId> {
        match &self.role {
            Role::Follower(follower) => follower.elected_leader(),
            Role::Leader(_) => Some(self.id),
            _ => None,
        }
    }

    /// Entries up to here are committed and were handed out by [`Command::Apply`].
    #[must_use]
    pub fn committed(&self) -> Position {
        self.committed
    }

    /// The members, as of [`Replica::committed`].
    #[must_use]
    pub fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    /// Whether it leads and takes proposals and changes of membership at this moment.
    #[must_use]
    pub fn can_change(&self) -> bool {
        matches!(&self.role, Role::Leader(leader) if leader.takes_proposals())
    }

    /// How far a member has confirmed the log, as its leader knows it; `None` elsewhere, and for
    /// a member that is not reached.
    #[must_use]
    pub fn confirmed_by(&self, member: NodeId) -> Option<Position> {
        match &self.role {
            Role::Leader(leader) => leader.reached(member).map(|peer| peer.confirmed),
            _ => None,
        }
    }

    /// Whether this server, or another one as its leader knows and tells, is about to have no room
    /// for what more entries would bring.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.short
            || match &self.role {
                Role::Leader(leader) => leader.has_short_peer(),
                Role::Follower(follower) => follower.has_short_leader(),
                _ => false,
            }
    }

    /// Whether a member is about to have no room, as its leader knows it; of itself every server
    /// knows.
    #[must_use]
    pub fn is_short_of_room(&self, member: NodeId) -> bool {
        match &self.role {
            _ if member == self.id => self.short,
            Role::Leader(leader) => leader.reached(member).is_some_and(|peer| peer.short),
            _ => false,
        }
    }

    /// Slots up to here may be overwritten: a durable snapshot covers them.
    #[must_use]
    pub fn snapshot(&self) -> Position {
        self.snapshot
    }

    /// Who lacks a slot at or below this one gets it by a snapshot that covers it, and in no other way.
    #[must_use]
    pub fn ring_from(&self) -> Position {
        self.ring_from
    }

    /// Proposed up to here, at a leader; elsewhere what is committed.
    #[must_use]
    pub fn last(&self) -> Position {
        match &self.role {
            Role::Leader(leader) => leader.last,
            _ => self.committed,
        }
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    fn publish(&mut self, term: Term, beats: u32) {
        let short = match &self.role {
            Role::Leader(leader) => self.short || leader.has_short_peer(),
            _ => self.short,
        };
        let rests = self.is_resting();
        self.memory.publish(Status { term, beats, snapshot: self.snapshot, short, rests });
    }

    fn republish(&mut self) {
        match &self.role {
            Role::Leader(leader) => self.publish(leader.term, leader.beats),
            Role::Follower(follower) => self.publish(Term(0), follower.beats()),
            _ => self.publish(Term(0), 0),
        }
    }

    /// A random share of `limit_ns`.
    fn some_of(&mut self, limit_ns: u64) -> u64 {
        self.random.below(limit_ns.saturating_add(1))
    }

    /// Stores an entry of the present leadership behind all others.
    fn append(&mut self, kind: Kind, payload: &[u8]) -> Position {
        let Role::Leader(leader) = &mut self.role else {
            return Position::NONE;
        };
        let position = leader.last.next();
        let head = header(self.cluster, leader.term, position, kind, payload);
        let offset = self.layout.slot_offset(position);
        self.memory.store(offset, &head);
        self.memory.store(offset + SLOT_HEADER_BYTES as u64, payload);
        leader.last = position;
        if kind == Kind::Lost {
            self.ring_from = self.ring_from.max(position);
        }
        position
    }

    /// The highest position any slot claims, beyond the commit word; torn slots count.
    fn highest(&self) -> Position {
        let mut head = [0; SLOT_HEADER_BYTES];
        let mut highest = self.committed;
        let end = self.snapshot.plus(self.layout.slots());
        let mut position = self.committed.next();
        while position <= end {
            self.memory.load(self.layout.slot_offset(position), &mut head);
            if claimed_position(&head) == position {
                highest = position;
            }
            position = position.next();
        }
        highest
    }
}
