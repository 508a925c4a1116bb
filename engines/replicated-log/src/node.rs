//! A member with its state machine: requests in, the protocol driven, replies out.
//!
//! ```text
//!  Handle ─▶ inbox ─▶ batch ─▶ Member::propose        one turn:
//!                               │                       take requests, propose,
//!  closures ◀─ flush ◀─ apply ◀─┘ Apply                 poll the member, do what it says
//! ```
//!
//! Stays on its thread and never waits; [`crate::Server`] runs one on a thread of its own. A
//! program with a loop of its own may poll one there instead.
//!
//! Invariants: no reply leaves before its command is committed, applied and, by the machine's
//! word, durable; what was proposed under a leadership that ended is told as lost.

mod apply;
mod connect;
mod follow;
mod forwards;
mod install;
mod membership;
mod pace;
mod requests;
mod rest;
mod snapshots;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};

use beeline_fabric::{Device, FabricError};
use beeline_paxos::{
    Batch, Change, ClusterId, Command, Configuration, Event, NodeId, Options, Position, RoleName,
    Sessions, Start, Term,
};

use self::connect::DialledLine;
pub(crate) use self::follow::Question;
use self::forwards::Forwarded;
use self::pace::Pace;
use crate::contact::Contact;
use crate::error::LogError;
use crate::ground::{Jobs, Threads};
use crate::handle::{Bell, Done, Handle, Mailbox, Refusal, Reply, Request};
use crate::home::{Home, HomeError};
use crate::known::Known;
use crate::machine::StateMachine;
use crate::member::Member;
use crate::peers::Peers;
use crate::shared::Shared;
use crate::snapshot::{self, Head};
use crate::status::{Counters, MemberStatus, Status};
use crate::transport::Transport;

/// Between two ticks of a member that has nothing to do: it looks at its commit word, or lets its
/// beats go on.
pub(crate) const IDLE_NS: u64 = 10_000_000;
/// A ring that has had no room for so long, because snapshots fail, takes no commands.
const FULL_NS: u64 = 1_000_000_000;
/// An election takes less, nanoseconds.
const LEADERLESS_NS: u64 = 5_000_000_000;
/// Between two looks at peers, changes and snapshots, nanoseconds.
const UPKEEP_NS: u64 = 5_000_000;
/// A change of membership or a hand-over is given up after this.
const CHANGE_NS: u64 = 10_000_000_000;
/// Between two tries to take a snapshot that failed.
const SNAPSHOT_RETRY_NS: u64 = 1_000_000_000;
/// Position of a command in a session whose reply the state machine no longer has.
const REPLY_KEPT: u8 = 0;
const REPLY_LOST: u8 = 1;

/// How a member runs.
#[derive(Debug)]
pub struct Config {
    /// Of the protocol.
    pub options: Options,
    /// The fabric that all members share.
    pub device: Arc<dyn Device>,
    /// How connection data reaches peers.
    pub transport: Arc<dyn Transport>,
    /// Where it has done what may take long. Default: a thread for each.
    pub jobs: Arc<dyn Jobs>,
    /// How this member is reached, told to peers when they connect.
    pub contact: Contact,
    /// Requests that wait for room in the window at most; more are refused as
    /// [`Refusal::Full`]. Default 4096.
    pub queue: usize,
}

impl Config {
    /// The defaults.
    #[must_use]
    pub fn new(device: Arc<dyn Device>, transport: Arc<dyn Transport>, contact: Contact) -> Self {
        let (options, jobs) = (Options::default(), Arc::new(Threads));
        Self { options, device, transport, jobs, contact, queue: 4096 }
    }

    /// The same for a member that is reached otherwise.
    pub(crate) fn at(&self, contact: Contact) -> Self {
        let Self { options, queue, .. } = *self;
        let (device, transport) = (Arc::clone(&self.device), Arc::clone(&self.transport));
        Self { options, device, transport, jobs: Arc::clone(&self.jobs), contact, queue }
    }
}

/// Why a member ended, or did not begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// Its directory.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// Its log.
    #[error(transparent)]
    Log(#[from] LogError),
    /// Its fabric.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// Its state machine.
    #[error("the state machine failed: {0}")]
    Machine(#[source] std::io::Error),
    /// A slot with a chosen value is damaged. What this server would say from now on could
    /// contradict what it said: remove it, and let a new member join.
    #[error("the entry at {position} is damaged: this member must be replaced by a new one")]
    Damaged {
        /// Which.
        position: Position,
    },
    /// The host has a member of this cluster already.
    #[error("this host has a member of cluster {:016x} already: close that one first", cluster.0)]
    Twice {
        /// Which.
        cluster: ClusterId,
    },
    /// An event descriptor or a thread.
    #[error("{0}")]
    System(#[source] std::io::Error),
}

impl NodeError {
    /// Whether starting again may help.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Home(error) => error.is_retryable(),
            Self::Log(error) => error.is_retryable(),
            Self::Fabric(error) => error.is_retryable(),
            Self::Machine(_) | Self::System(_) => true,
            Self::Damaged { .. } | Self::Twice { .. } => false,
        }
    }
}

enum Waiter {
    Command(Done<Reply>),
    Session(Done<u64>),
}

impl Waiter {
    fn refuse(self, refusal: Refusal) {
        match self {
            Self::Command(done) => done(Err(refusal)),
            Self::Session(done) => done(Err(refusal)),
        }
    }
}

/// A command that waits for its entry.
struct Queued {
    session: u64,
    sequence: u64,
    bytes: Vec<u8>,
    waiter: Waiter,
}

enum Read {
    Barrier(Done<Position>),
    Query(Vec<u8>, Done<Vec<u8>>),
}

impl Read {
    fn refuse(self, refusal: Refusal) {
        match self {
            Self::Barrier(done) => done(Err(refusal)),
            Self::Query(_, done) => done(Err(refusal)),
        }
    }
}

struct PendingChange {
    change: Change,
    contact: Vec<u8>,
    proposed: bool,
    until_ns: u64,
    done: Done<Position>,
}

struct PendingTransfer {
    to: NodeId,
    begun: bool,
    until_ns: u64,
    done: Done<()>,
}

/// Replies that leave once the machine has flushed.
enum Answered {
    Command(Done<Reply>, Result<Reply, Refusal>),
    /// The machine put it off: the reply is the next one of [`StateMachine::settle`].
    Later(Position, Option<Done<Reply>>),
    Session(Done<u64>, Result<u64, Refusal>),
}

/// A member with its state machine.
pub struct Node<S> {
    home: Arc<Home>,
    member: Member,
    /// `None` while a job has it.
    machine: Option<S>,
    /// The job's, which examines and restores a snapshot.
    errand: Option<Arc<install::Errand<S>>>,
    sessions: Sessions,
    transport: Arc<dyn Transport>,
    jobs: Arc<dyn Jobs>,
    contact: Vec<u8>,
    queue_limit: usize,
    inbox: Receiver<Request>,
    mailbox: Mailbox,
    status: Arc<Mutex<Status>>,
    peers: Peers,
    known: Known,
    /// As of `applied`.
    membership: Configuration,
    queue: VecDeque<Queued>,
    batch: Batch,
    batch_limit: usize,
    batched: Vec<Waiter>,
    /// Proposed under the present leadership, in order.
    pending: VecDeque<(Position, Vec<Waiter>)>,
    reads: HashMap<u64, Read>,
    next_read: u64,
    /// What other members were asked for, by its number.
    forwarded: BTreeMap<u64, Forwarded>,
    next_forward: u64,
    changes: VecDeque<PendingChange>,
    transfers: Vec<PendingTransfer>,
    applied: Position,
    /// Of readers that wait for what comes next, and how far they were answered.
    questions: Vec<Question>,
    answered_to: Position,
    /// Committed and not applied: the machine has no room for the first of them.
    held: Option<(Position, Position)>,
    /// The machine has these effects already.
    machine_has: Position,
    /// And some of those up to here.
    machine_reached: Position,
    /// Since when no member leads while some of that is not committed here, and whether that was said.
    leaderless: Option<(u64, bool)>,
    /// What the snapshot's file covers.
    snapshot: Position,
    /// It holds the machine's state, not only what the log needs.
    snapshot_has_state: bool,
    /// A snapshot is being written.
    writing: Option<Position>,
    /// With the state; or the last one was.
    writing_state: bool,
    snapshot_due: bool,
    snapshot_failed_ns: Option<u64>,
    /// Why the last one failed, until one is written.
    snapshot_problem: Option<String>,
    /// A fresh one was begun for the peers that want one.
    refreshed: bool,
    /// Proposals slow down for members that take in a snapshot.
    pace: Pace,
    /// The ring has had no room since then.
    full_ns: Option<u64>,
    snapshot_waiters: Vec<Done<Position>>,
    /// Peers that are to get a snapshot.
    wanting: Vec<NodeId>,
    counters: Counters,
    upkeep_ns: u64,
    told_role: Option<(RoleName, Option<NodeId>)>,
    stopping: bool,
    upward: Vec<Command>,
    payload: Vec<u8>,
    answered: Vec<Answered>,
    settled: Vec<Vec<u8>>,
    /// Its thread, where others share it.
    seat: Option<Seat>,
    /// When it was last asked for something, or woken.
    active_ns: u64,
    /// Peers that are connected while it rests.
    connected: Vec<NodeId>,
    /// The leadership in which it handed over, to rest, or tried to.
    handed_over: Option<Term>,
    /// The lines that its greetings named, by peer and attempt.
    dialling: HashMap<(NodeId, u64), DialledLine>,
}

/// A place on a thread that members share.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    pub(crate) shared: Shared,
    pub(crate) bell: Bell,
    pub(crate) name: u64,
    /// A leader that was asked for nothing for so long rests, nanoseconds.
    pub(crate) rest_ns: u64,
    /// Threads of its host.
    pub(crate) threads: u16,
}

/// Whether the log is empty, and this member promised nothing in it.
fn is_fresh(home: &Home, head: &Head, known: &Known) -> bool {
    head.position == Position::NONE && !known.names_some() && home.never_voted()
}

/// Lets such a log begin behind what its machine has, durably. Without that it would be filled with an
/// entry for each position up to there, of which there may be billions.
fn begin_at(home: &Home, head: Head) -> Result<Head, HomeError> {
    let path = home.new_snapshot_path();
    snapshot::write(&path, home.cluster(), &head, |_| Ok(()))?;
    home.adopt_snapshot(&path)?;
    tracing::info!(position = %head.position, "the log begins behind what the state machine has");
    Ok(head)
}

impl<S> std::fmt::Debug for Node<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("home", &self.home).finish_non_exhaustive()
    }
}

impl<S: StateMachine> Node<S> {
    /// A member over its directory. The machine is brought to what the snapshot holds, unless it
    /// has that already; the log behind it is applied as the protocol finds it committed.
    ///
    /// Errors: [`NodeError`].
    pub fn open(home: Home, config: Config, machine: S) -> Result<(Self, Handle), NodeError> {
        Self::open_at(home, config, machine, None)
    }

    /// [`Node::open`], on a thread that others share.
    pub(crate) fn open_at(
        home: Home,
        config: Config,
        mut machine: S,
        seat: Option<Seat>,
    ) -> Result<(Self, Handle), NodeError> {
        let Config { options, device, transport, jobs, contact, queue } = config;
        let reason = "a contact has at most 239 bytes";
        let contact = contact.encode().ok_or(HomeError::Founding { reason })?;
        let machine_has = machine.applied();
        let mut restored = Ok(());
        let head = snapshot::read(&home.snapshot_path(), home.cluster(), |head, reader| {
            if head.position > machine_has {
                restored = machine.restore(head.position, reader);
            }
            Ok(())
        })
        .map_err(HomeError::from)?;
        restored.map_err(NodeError::Machine)?;
        let known = Known::load(home.known_path())?;
        let (fresh, alone) =
            (is_fresh(&home, &head, &known), head.configuration.members() == [home.id()]);
        if fresh {
            machine.founded_upon().map_err(NodeError::Machine)?;
        }
        // The first member of a cluster of one that is founded upon what its machine has, as one restored from a
        // backup.
        let head = if fresh && alone && machine_has > Position::NONE {
            begin_at(&home, Head { position: machine_has, ..head })?
        } else {
            head
        };
        let machine_reached = machine.reached();
        let snapshot = head.position;
        if snapshot > machine_has && !head.has_state {
            return Err(NodeError::Machine(std::io::Error::other(format!(
                "it has {machine_has} and the log begins behind {snapshot}: what it kept was lost; \
                 remove this member, and let a new one join"
            ))));
        }
        let snapshot_has_state = head.has_state;
        let membership = head.configuration.clone();
        let start = Start {
            id: home.id(),
            cluster: home.cluster(),
            layout: home.layout(),
            vote_word: 0,
            snapshot,
            chosen: machine_has,
            reached: machine_reached,
            configuration: head.configuration,
            seed: home.instance() ^ home.incarnation(),
        };
        let memory = home.memory(&device)?;
        let durability = home.durability();
        let mut member = match &seat {
            Some(Seat { shared, name, .. }) => {
                Member::open_on(start, options, durability, memory, (shared.clone(), *name))?
            }
            None => Member::open(start, options, durability, memory, device)?,
        };
        member.take_snapshots(home.incoming_path());
        let (sender, inbox) = channel();
        let mailbox = match &seat {
            Some(Seat { bell, name, .. }) => Mailbox::at(sender, bell, *name),
            None => Mailbox::new(sender).map_err(NodeError::System)?,
        };
        let batch_limit = home.layout().max_payload_bytes();
        let home_slots = home.layout().slots();
        let first = Status {
            id: home.id(),
            cluster: home.cluster(),
            role: RoleName::Follower,
            term: member.replica().term(),
            leader: None,
            leader_contact: None,
            last: snapshot,
            committed: snapshot,
            applied: snapshot,
            snapshot,
            short: false,
            sessions: head.sessions.open(),
            members: Vec::new(),
            counters: Counters::default(),
        };
        let status = Arc::new(Mutex::new(first));
        let handle = Handle { mailbox: mailbox.clone(), status: Arc::clone(&status) };
        let node = Self {
            peers: Peers::new(home.id(), known.instances()),
            known,
            membership,
            home: Arc::new(home),
            member,
            machine: Some(machine),
            errand: None,
            sessions: head.sessions,
            transport,
            jobs,
            contact,
            queue_limit: queue,
            inbox,
            mailbox,
            status,
            queue: VecDeque::new(),
            batch: Batch::new(batch_limit),
            batch_limit,
            batched: Vec::new(),
            pending: VecDeque::new(),
            reads: HashMap::new(),
            next_read: 0,
            forwarded: BTreeMap::new(),
            next_forward: 0,
            changes: VecDeque::new(),
            transfers: Vec::new(),
            applied: snapshot,
            questions: Vec::new(),
            answered_to: snapshot,
            held: None,
            machine_has,
            machine_reached,
            leaderless: None,
            snapshot,
            snapshot_has_state,
            writing: None,
            writing_state: false,
            snapshot_due: false,
            snapshot_failed_ns: None,
            snapshot_problem: None,
            refreshed: false,
            pace: Pace::new(home_slots),
            full_ns: None,
            snapshot_waiters: Vec::new(),
            wanting: Vec::new(),
            counters: Counters::default(),
            upkeep_ns: 0,
            told_role: None,
            stopping: false,
            upward: Vec::new(),
            payload: Vec::new(),
            answered: Vec::new(),
            settled: Vec::new(),
            seat,
            active_ns: 0,
            connected: Vec::new(),
            handed_over: None,
            dialling: HashMap::new(),
        };
        Ok((node, handle))
    }

    /// The state machine; `None` while a snapshot is being restored.
    #[must_use]
    pub fn machine(&self) -> Option<&S> {
        self.machine.as_ref()
    }

    /// What was counted.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters { fence_failures: self.member.fence_failures(), ..self.counters }
    }

    /// What the member does.
    #[must_use]
    pub fn role(&self) -> RoleName {
        self.member.replica().role()
    }

    /// Applied up to here.
    #[must_use]
    pub fn applied(&self) -> Position {
        self.applied
    }

    /// True once [`crate::Server::stop`] was asked for.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Asks for an event on [`Node::descriptors`]. Turn once more afterwards, then sleep.
    ///
    /// Errors: [`NodeError`].
    pub fn arm(&self) -> Result<(), NodeError> {
        self.mailbox.asleep.store(true, Ordering::SeqCst);
        Ok(self.member.arm()?)
    }

    /// Clears what [`Node::arm`] asked for.
    ///
    /// Errors: [`NodeError`].
    pub fn disarm(&self) -> Result<(), NodeError> {
        if !self.mailbox.asleep.swap(false, Ordering::SeqCst) {
            self.mailbox.waker.clear();
        }
        Ok(self.member.acknowledge()?)
    }

    /// Longest sleep, nanoseconds, when there is nothing to do.
    #[must_use]
    pub fn idle_ns(&self, now_ns: u64) -> u64 {
        self.paused_ns(now_ns).unwrap_or(IDLE_NS)
    }

    /// How long the next entry has to wait, where one does.
    fn paused_ns(&self, now_ns: u64) -> Option<u64> {
        let waits = !self.queue.is_empty() || !self.batched.is_empty();
        let due_ns = self.pace.due_ns().filter(|_| waits)?;
        Some(due_ns.saturating_sub(now_ns).clamp(50_000, IDLE_NS))
    }

    /// Become readable, once armed, when there is something to do: completions, requests.
    #[must_use]
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        use std::os::fd::AsFd as _;
        [self.member.event_descriptor(), self.mailbox.waker.as_fd()]
    }

    /// Does what there is to do. `now_ns` is monotonic, from any start. Returns whether there was
    /// anything.
    ///
    /// Errors: [`NodeError`]: the member is at its end.
    pub fn turn(&mut self, now_ns: u64) -> Result<bool, NodeError> {
        let rested = self.tell_the_time(now_ns)?;
        let mut busy = self.apply_held()?;
        self.mailbox.begin();
        while let Ok(request) = self.inbox.try_recv() {
            busy = true;
            self.take(request, now_ns)?;
        }
        busy |= self.propose_queued(now_ns)?;
        let mut upward = std::mem::take(&mut self.upward);
        busy |= self.member.poll(now_ns, &mut upward)? > 0;
        busy |= !upward.is_empty();
        self.carry_out(&mut upward, now_ns)?;
        self.upward = upward;
        busy |= self.look_at_forwards()?;
        busy |= self.answer_questions();
        if rested {
            busy |= self.look_at_connections(now_ns)?;
        }
        // At once: what the leader does not know of goes on coming.
        self.look_at_room()?;
        let replica = self.member.replica();
        let role = Some((replica.role(), replica.leader()));
        if role != self.told_role || now_ns.saturating_sub(self.upkeep_ns) >= UPKEEP_NS {
            self.upkeep_ns = now_ns;
            self.told_role = role;
            self.keep_up(now_ns)?;
            self.tell_status();
        }
        Ok(busy || !self.upward.is_empty())
    }

    // ---- now and then ----

    fn keep_up(&mut self, now_ns: u64) -> Result<(), NodeError> {
        self.dial(now_ns);
        if let Err(error) = self.acquaint() {
            tracing::warn!(%error, "which members were met cannot be written; trying again");
        }
        self.let_strangers_go(now_ns);
        self.look_at_pace(now_ns);
        self.look_for_a_leader(now_ns);
        self.end_late_forwards(now_ns);
        self.install();
        self.send_snapshots(now_ns);
        self.take_snapshot(now_ns);
        self.lead_no_more_without_room()?;
        self.drive_changes(now_ns)?;
        self.drive_transfers(now_ns)?;
        Ok(self.try_to_rest(now_ns)?)
    }

    /// Says so, once, where no member leads for long and this member has a part of what it does not know as committed.
    fn look_for_a_leader(&mut self, now_ns: u64) {
        let replica = self.member.replica();
        let is_led = replica.leader().is_some() && replica.role() != RoleName::Recovering;
        let (committed, reached) = (replica.committed(), self.machine_reached);
        if is_led || committed >= reached {
            self.leaderless = None;
            return;
        }
        let (since_ns, said) = self.leaderless.get_or_insert((now_ns, false));
        if !*said && now_ns.saturating_sub(*since_ns) >= LEADERLESS_NS {
            *said = true;
            tracing::warn!(
                %committed,
                %reached,
                "no member leads, and this member's state machine has a part of entries that its log may lack: \
                 start a member that has them"
            );
        }
    }

    /// Says so where the machine's room ends, or is back: the leader looks once a heartbeat.
    fn look_at_room(&mut self) -> Result<(), NodeError> {
        let Some(machine) = &self.machine else { return Ok(()) };
        let (short, replica) = (machine.is_short(), self.member.replica());
        if short == replica.is_short_of_room(replica.id()) {
            return Ok(());
        }
        if short {
            tracing::warn!(
                "this member is about to have no room: the cluster refuses what needs some"
            );
        }
        let mut upward = std::mem::take(&mut self.upward);
        self.member.event(Event::Room { short }, &mut upward)?;
        self.upward = upward;
        Ok(())
    }

    fn tell_status(&self) {
        let replica = self.member.replica();
        let (own, leader) = (replica.id(), replica.leader());
        let configuration = replica.configuration();
        let contact = |id| Contact::decode(configuration.contact(id));
        let committed = replica.committed();
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.role = replica.role();
        status.term = replica.term();
        status.leader = leader;
        status.leader_contact = leader.map(contact);
        status.last = replica.last();
        status.committed = committed;
        status.applied = self.applied;
        status.snapshot = self.snapshot;
        status.short = replica.is_short();
        status.sessions = self.sessions.open();
        status.counters = self.counters();
        status.members.clear();
        for id in configuration.members().iter().copied() {
            let confirmed = if id == own { Some(committed) } else { replica.confirmed_by(id) };
            let confirmed = confirmed.filter(|_| leader == Some(own));
            status.members.push(MemberStatus {
                id,
                contact: contact(id),
                connected: id == own || self.member.is_connected(id),
                confirmed,
                lag: confirmed.map(|confirmed| committed.since(confirmed)),
                short: replica.is_short_of_room(id),
                problem: self.peers.get(id).and_then(|peer| peer.problem.clone()),
            });
        }
    }
}
