//! How the rest of a program talks to the log's thread.
//!
//! A request travels to the thread; what became of it is told to a closure that runs *on* the
//! log's thread, so it posts to a mailbox of its own and returns. [`Handle::call`],
//! [`Handle::read`] and the like wait instead.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use beeline_fabric::ConnectInfo;
use beeline_os::poller::Waker;
use beeline_paxos::{Change, NodeId, Position};

use crate::contact::Contact;
use crate::follow::{Follower, Passage};
use crate::forward::Item;
use crate::node::Question;
use crate::status::Status;
use crate::transport::TransportError;

/// Names no session: the command runs each time it is committed. For callers to whom a repetition
/// does no harm.
pub const NO_SESSION: u64 = u64::MAX;

/// The log's thread looks for what is late every few milliseconds; a loaded machine adds to them.
const GRACE: Duration = Duration::from_secs(2);

/// A command's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Where the entry stands that carried it.
    pub position: Position,
    /// What the state machine answered.
    pub bytes: Vec<u8>,
    /// It had run before: this is what it answered then.
    pub repeated: bool,
}

/// Why a request was not done here and now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Another server leads, perhaps the one named.
    #[error("this server does not lead{}", leader.as_ref().map(|(id, _)| format!("; {id} does")).unwrap_or_default())]
    NotLeader {
        /// Whom this server follows, and how it is reached.
        leader: Option<(NodeId, Contact)>,
    },
    /// Too much is under way; soon there is room.
    #[error("too many commands are under way")]
    Full,
    /// The log has no room until a snapshot is written, and none can be. It was not proposed.
    #[error("the log is full, and no snapshot can be written: {reason}")]
    LogFull {
        /// Why the last one failed.
        reason: String,
    },
    /// Longer than fits an entry.
    #[error("a command of {bytes} bytes does not fit into an entry of {limit}")]
    TooLarge {
        /// With its header.
        bytes: usize,
        /// Most.
        limit: usize,
    },
    /// The leadership was lost meanwhile: the command may have run, or run later. Ask again with
    /// the same session and number, wherever the leader is.
    #[error("the leadership was lost: the command may have run or not")]
    Lost,
    /// The session is not known, or no longer. Whether the command ran is for the caller to find
    /// out.
    #[error("the session has expired")]
    SessionExpired,
    /// Neither the session's next command nor its last.
    #[error("the session expects command {expected}")]
    OutOfTurn {
        /// The number that would run.
        expected: u64,
    },
    /// The command ran before the state machine was last opened, and its reply is gone.
    #[error("the command has run; its reply is lost")]
    ReplyLost,
    /// A change of membership or a hand-over that cannot be.
    #[error("{reason}")]
    Membership {
        /// Why.
        reason: &'static str,
    },
    /// It did not come about in time; it may still.
    #[error("it did not come about in time")]
    TimedOut,
    /// What a follower of the log wants next is no longer kept by this member.
    #[error(
        "this member keeps no entry before {oldest}: begin anew from a state that covers what lies before"
    )]
    Gone {
        /// The first entry that it keeps.
        oldest: Position,
    },
    /// The state machine or the disk did not let a snapshot be taken.
    #[error("no snapshot could be taken: {reason}")]
    Snapshot {
        /// In its words.
        reason: String,
    },
    /// The member that was to be asked cannot be reached. It was not.
    #[error("{member} cannot be reached: it was not asked")]
    Unreachable {
        /// Which one.
        member: NodeId,
    },
    /// The member that was asked said no.
    #[error("{reason}")]
    Refused {
        /// In its words.
        reason: String,
    },
    /// The log's thread has ended.
    #[error("the log has stopped")]
    Stopped,
}

impl Refusal {
    /// Whether the same request may succeed later: here, or for [`Refusal::NotLeader`] and
    /// [`Refusal::Lost`] at the leader.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::NotLeader { .. }
                | Self::Full
                | Self::LogFull { .. }
                | Self::Lost
                | Self::TimedOut
                | Self::Unreachable { .. }
        )
    }
}

/// How fresh a query's answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consistency {
    /// As of the call, or later: answered by the leader, after a round of one-sided READs.
    Linearizable,
    /// What this server has applied; answered by any.
    Stale,
}

/// Told what became of a request, on the log's thread.
pub(crate) type Done<T> = Box<dyn FnOnce(Result<T, Refusal>) + Send>;
/// Told how a peer's hello was taken.
pub(crate) type Greeted = Box<dyn FnOnce(Result<(ConnectInfo, Vec<u8>), String>) + Send>;

pub(crate) enum Request {
    Propose {
        session: u64,
        sequence: u64,
        bytes: Vec<u8>,
        done: Done<Reply>,
    },
    OpenSession {
        done: Done<u64>,
    },
    Barrier {
        done: Done<Position>,
    },
    Query {
        bytes: Vec<u8>,
        consistency: Consistency,
        done: Done<Vec<u8>>,
    },
    State {
        bytes: Vec<u8>,
        done: Done<(Position, Vec<u8>)>,
    },
    Follow(Question),
    Change {
        change: Change,
        contact: Contact,
        done: Done<Position>,
    },
    Transfer {
        to: NodeId,
        done: Done<()>,
    },
    Snapshot {
        done: Done<Position>,
    },
    /// Without a command: a barrier.
    Forward {
        to: NodeId,
        command: Option<Vec<u8>>,
        limit: Duration,
        done: Done<Vec<u8>>,
    },
    /// What became of something that `to` asked for through one of its connections.
    Forwarded {
        to: NodeId,
        epoch: u64,
        item: Item,
    },
    Accept {
        info: ConnectInfo,
        hello: Vec<u8>,
        reply: Greeted,
    },
    Dialled {
        peer: NodeId,
        attempt: u64,
        outcome: Result<(ConnectInfo, Vec<u8>), TransportError>,
    },
    /// The machine is back from a snapshot that came.
    Installed {
        from: NodeId,
    },
    SnapshotWritten {
        position: Position,
        outcome: Result<u64, String>,
    },
    Stop,
}

impl Request {
    /// Whether a member that rests has something to do for it: what it answers from its own state is no
    /// work.
    pub(crate) fn is_work(&self) -> bool {
        let stale = Consistency::Stale;
        !matches!(self, Self::Query { consistency, .. } if *consistency == stale)
            && !matches!(self, Self::State { .. } | Self::Follow(_))
            // A connection that comes about counts by itself; one that does not is no reason to stay awake.
            && !matches!(self, Self::Accept { .. } | Self::Dialled { .. })
    }
}

/// The way to the log's thread.
#[derive(Clone)]
pub(crate) struct Mailbox {
    sender: Sender<Request>,
    pub(crate) waker: Arc<Waker>,
    /// The thread sleeps, or is about to.
    pub(crate) asleep: Arc<AtomicBool>,
    /// Where several members share the thread: this one's place in the line.
    place: Option<Arc<Place>>,
}

/// The members of one thread that have requests, each once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Line(Arc<Mutex<Vec<u64>>>);

impl Line {
    /// Takes those that stand in it.
    pub(crate) fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub(crate) fn push(&self, name: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(name);
    }
}

#[derive(Debug)]
struct Place {
    line: Line,
    name: u64,
    /// It stands in the line already.
    stands: AtomicBool,
}

/// How a thread that several members share is woken.
#[derive(Clone, Debug)]
pub(crate) struct Bell {
    pub(crate) waker: Arc<Waker>,
    pub(crate) asleep: Arc<AtomicBool>,
    pub(crate) line: Line,
}

impl Bell {
    pub(crate) fn new() -> std::io::Result<Self> {
        let (waker, asleep) = (Arc::new(Waker::new()?), Arc::default());
        Ok(Self { waker, asleep, line: Line::default() })
    }

    /// Has the thread look at its line.
    pub(crate) fn ring(&self) {
        // As in `Mailbox::send`.
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.waker.wake();
        }
    }
}

impl Mailbox {
    /// Of a member, `name`, of a thread that others share.
    pub(crate) fn at(sender: Sender<Request>, bell: &Bell, name: u64) -> Self {
        let Bell { waker, asleep, line } = bell.clone();
        let place = Some(Arc::new(Place { line, name, stands: AtomicBool::new(false) }));
        Self { sender, waker, asleep, place }
    }

    /// The thread is about to take the requests: one that comes from now on stands in line again.
    pub(crate) fn begin(&self) {
        if let Some(place) = &self.place {
            place.stands.store(false, Ordering::SeqCst);
        }
    }

    pub(crate) fn new(sender: Sender<Request>) -> std::io::Result<Self> {
        let (waker, asleep) = (Arc::new(Waker::new()?), Arc::default());
        Ok(Self { sender, waker, asleep, place: None })
    }

    /// False when the thread has ended; the request is dropped then, with its closure.
    pub(crate) fn send(&self, request: Request) -> bool {
        let sent = self.sender.send(request).is_ok();
        // Behind the request: the thread that finds the place takes the request too.
        if let Some(place) = &self.place
            && !place.stands.swap(true, Ordering::SeqCst)
        {
            place.line.push(place.name);
        }
        // SeqCst on both sides: either the thread sees the request before it sleeps, or this sees
        // that it sleeps.
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.waker.wake();
        }
        sent
    }
}

/// The log, for the rest of the program. Cheap to clone; works from any thread.
#[derive(Clone)]
pub struct Handle {
    pub(crate) mailbox: Mailbox,
    pub(crate) status: Arc<Mutex<Status>>,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

/// Tells `Stopped` if the log's thread ends without an answer.
struct Answer<T: Send + 'static>(Option<Done<T>>);

impl<T: Send + 'static> Answer<T> {
    fn give(mut self, outcome: Result<T, Refusal>) {
        if let Some(done) = self.0.take() {
            done(outcome);
        }
    }
}

impl<T: Send + 'static> Drop for Answer<T> {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done(Err(Refusal::Stopped));
        }
    }
}

fn always<T: Send + 'static>(done: impl FnOnce(Result<T, Refusal>) + Send + 'static) -> Done<T> {
    let answer = Answer(Some(Box::new(done)));
    Box::new(move |outcome| answer.give(outcome))
}

impl Handle {
    /// Proposes a command: number `sequence`, from 1, of `session`, or of no session with
    /// [`NO_SESSION`]. A session's commands may follow one another without waiting, in order.
    /// `done` is told the reply once the command is committed and applied here, or a [`Refusal`].
    pub fn propose(
        &self,
        session: u64,
        sequence: u64,
        bytes: Vec<u8>,
        done: impl FnOnce(Result<Reply, Refusal>) + Send + 'static,
    ) {
        let done = always(done);
        self.mailbox.send(Request::Propose { session, sequence, bytes, done });
    }

    /// Opens a session, and tells its name.
    pub fn open_session(&self, done: impl FnOnce(Result<u64, Refusal>) + Send + 'static) {
        self.mailbox.send(Request::OpenSession { done: always(done) });
    }

    /// Tells, at the leader, when the state here includes everything that was acknowledged
    /// anywhere before this call.
    pub fn barrier(&self, done: impl FnOnce(Result<Position, Refusal>) + Send + 'static) {
        self.mailbox.send(Request::Barrier { done: always(done) });
    }

    /// Has the member `to`, which should lead, propose a command outside a session, once it has stamped it
    /// ([`crate::StateMachine::stamp`]). `done` is told the reply, or a [`Refusal`], within `limit` and
    /// some milliseconds. After [`Refusal::Lost`] and [`Refusal::TimedOut`] it may take effect; after
    /// [`Refusal::Unreachable`] it does not.
    pub fn forward(
        &self,
        to: NodeId,
        command: Vec<u8>,
        limit: Duration,
        done: impl FnOnce(Result<Vec<u8>, Refusal>) + Send + 'static,
    ) {
        let (command, done) = (Some(command), always(done));
        self.mailbox.send(Request::Forward { to, command, limit, done });
    }

    /// Has the member `to`, which should lead, pass a barrier: what was acknowledged anywhere before
    /// this call lies at or before the position that is told, and may not be applied here yet.
    pub fn forward_barrier(
        &self,
        to: NodeId,
        limit: Duration,
        done: impl FnOnce(Result<Position, Refusal>) + Send + 'static,
    ) {
        let done = always(move |answer: Result<Vec<u8>, Refusal>| {
            done(answer.and_then(|bytes| match bytes.first_chunk() {
                Some(position) if bytes.len() == 8 => Ok(Position(u64::from_le_bytes(*position))),
                _ => Err(Refusal::Refused { reason: format!("{to} told no position") }),
            }));
        });
        self.mailbox.send(Request::Forward { to, command: None, limit, done });
    }

    /// Asks the state machine's `query`.
    pub fn query(
        &self,
        bytes: Vec<u8>,
        consistency: Consistency,
        done: impl FnOnce(Result<Vec<u8>, Refusal>) + Send + 'static,
    ) {
        self.mailbox.send(Request::Query { bytes, consistency, done: always(done) });
    }

    /// Asks the state machine's `query` of this member's state, and of which position that is: a reader
    /// that follows the log from behind there misses nothing.
    pub fn state(
        &self,
        bytes: Vec<u8>,
        done: impl FnOnce(Result<(Position, Vec<u8>), Refusal>) + Send + 'static,
    ) {
        self.mailbox.send(Request::State { bytes, done: always(done) });
    }

    /// Follows the log from a position, as this member applies it ([`crate::follow`]).
    #[must_use]
    pub fn follow(&self, from: Position) -> Follower {
        Follower::new(self.clone(), from)
    }

    /// Tells entries from `from` on, of `limit_bytes` or of one entry, once there is one; while `alive`
    /// is.
    pub(crate) fn entries(
        &self,
        from: Position,
        limit_bytes: usize,
        alive: &Arc<()>,
        done: impl FnOnce(Result<Passage, Refusal>) + Send + 'static,
    ) {
        let (alive, done) = (Arc::downgrade(alive), always(done));
        self.mailbox.send(Request::Follow(Question { from, limit_bytes, alive, done }));
    }

    /// Adds a member, or gives one another contact. Only the leader can. Told the position of the
    /// change once it is in force.
    pub fn join(
        &self,
        id: NodeId,
        contact: Contact,
        done: impl FnOnce(Result<Position, Refusal>) + Send + 'static,
    ) {
        let change = Change::Join(id);
        self.mailbox.send(Request::Change { change, contact, done: always(done) });
    }

    /// Removes a member, perhaps the leader itself. Only the leader can.
    pub fn leave(&self, id: NodeId, done: impl FnOnce(Result<Position, Refusal>) + Send + 'static) {
        let (change, contact) = (Change::Leave(id), Contact::default());
        self.mailbox.send(Request::Change { change, contact, done: always(done) });
    }

    /// Hands the leadership to a member. Only the leader can. Told once the member is seen to
    /// lead.
    pub fn transfer(&self, to: NodeId, done: impl FnOnce(Result<(), Refusal>) + Send + 'static) {
        self.mailbox.send(Request::Transfer { to, done: always(done) });
    }

    /// Takes a snapshot of this member; told what it covers once it is durable.
    pub fn snapshot(&self, done: impl FnOnce(Result<Position, Refusal>) + Send + 'static) {
        self.mailbox.send(Request::Snapshot { done: always(done) });
    }

    /// Takes what a peer's [`crate::Transport::exchange`] carried here. `reply` is told, on the
    /// log's thread, the answer or why there is none.
    pub fn accept(
        &self,
        info: ConnectInfo,
        hello: Vec<u8>,
        reply: impl FnOnce(Result<(ConnectInfo, Vec<u8>), String>) + Send + 'static,
    ) {
        self.mailbox.send(Request::Accept { info, hello, reply: Box::new(reply) });
    }

    /// Whether this member leads and takes proposals, as of its last tick or change. Cheap.
    #[must_use]
    pub fn is_leading(&self) -> bool {
        let status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.role == beeline_paxos::RoleName::Leader
    }

    /// Whether the state machine of a member, this one or another, is about to have no room for more,
    /// as of some heartbeats ago. A service then refuses what needs room, and takes what makes some:
    /// a member that could not apply a command would have to stop. Cheap.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).short
    }

    /// What the log does, as of its last tick or change.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn wait<T: Send + 'static>(
        limit: Duration,
        ask: impl FnOnce(Box<dyn FnOnce(Result<T, Refusal>) + Send>),
    ) -> Result<T, Refusal> {
        let (sender, receiver) = channel();
        ask(Box::new(move |outcome| {
            // Nobody may be waiting any more.
            let _ = sender.send(outcome);
        }));
        receiver.recv_timeout(limit).unwrap_or(Err(Refusal::TimedOut))
    }

    /// [`Handle::propose`], waited for.
    ///
    /// Errors: [`Refusal`]; after [`Refusal::TimedOut`] the command may still run.
    pub fn call(
        &self,
        session: u64,
        sequence: u64,
        bytes: Vec<u8>,
        limit: Duration,
    ) -> Result<Reply, Refusal> {
        Self::wait(limit, |done| self.propose(session, sequence, bytes, done))
    }

    /// [`Handle::forward`], waited for.
    ///
    /// Errors: [`Refusal`].
    pub fn forward_wait(
        &self,
        to: NodeId,
        command: Vec<u8>,
        limit: Duration,
    ) -> Result<Vec<u8>, Refusal> {
        // The log's own word is more exact than that the time is over.
        Self::wait(limit + GRACE, |done| self.forward(to, command, limit, done))
    }

    /// [`Handle::forward_barrier`], waited for.
    ///
    /// Errors: [`Refusal`].
    pub fn forward_barrier_wait(&self, to: NodeId, limit: Duration) -> Result<Position, Refusal> {
        Self::wait(limit + GRACE, |done| self.forward_barrier(to, limit, done))
    }

    /// [`Handle::open_session`], waited for.
    ///
    /// Errors: [`Refusal`].
    pub fn session(&self, limit: Duration) -> Result<u64, Refusal> {
        Self::wait(limit, |done| self.open_session(done))
    }

    /// [`Handle::query`], waited for.
    ///
    /// Errors: [`Refusal`].
    pub fn read(
        &self,
        bytes: Vec<u8>,
        consistency: Consistency,
        limit: Duration,
    ) -> Result<Vec<u8>, Refusal> {
        Self::wait(limit, |done| self.query(bytes, consistency, done))
    }

    /// [`Handle::state`], waited for.
    ///
    /// Errors: [`Refusal`].
    pub fn state_wait(
        &self,
        bytes: Vec<u8>,
        limit: Duration,
    ) -> Result<(Position, Vec<u8>), Refusal> {
        Self::wait(limit, |done| self.state(bytes, done))
    }

    /// [`Handle::join`], waited for.
    ///
    /// Errors: [`Refusal`].
    pub fn join_wait(
        &self,
        id: NodeId,
        contact: Contact,
        limit: Duration,
    ) -> Result<Position, Refusal> {
        Self::wait(limit, |done| self.join(id, contact, done))
    }

    /// [`Handle::leave`], waited for.
    ///
    /// Errors: [`Refusal`].
    pub fn leave_wait(&self, id: NodeId, limit: Duration) -> Result<Position, Refusal> {
        Self::wait(limit, |done| self.leave(id, done))
    }

    /// [`Handle::transfer`], waited for.
    ///
    /// Errors: [`Refusal`].
    pub fn transfer_wait(&self, to: NodeId, limit: Duration) -> Result<(), Refusal> {
        Self::wait(limit, |done| self.transfer(to, done))
    }

    /// [`Handle::snapshot`], waited for.
    ///
    /// Errors: [`Refusal`].
    pub fn snapshot_wait(&self, limit: Duration) -> Result<Position, Refusal> {
        Self::wait(limit, |done| self.snapshot(done))
    }
}
