//! What a door inside the shard threads supplies, and what it gets from the node.
//!
//! ```text
//!  node, per connection                        wire
//!  ────────────────────                        ────
//!  socket ──bytes──► room, received ────────► advance      to the next whole request
//!  pause, log, order, shards, locks ◄───────── plan        which shards; reads or writes
//!    │ locked here                            execute      appends the reply
//!    │ one foreign shard, portable            carry ──hop──► execute_carried, at its owner
//!    │ refused by the node                    refuse       in the protocol's words
//!  replies in request order, commit, send
//! ```
//!
//! A [`Wire`] is one protocol; a [`WireWorker`] is its part of one shard thread; a [`WireSession`] is
//! one connection of it. The node owns sockets, turns, locks, commits, hops between shards, places in
//! the reply order, back-pressure, time-outs, limits and the lane to the replicated log, once for all
//! wires. The Redis door is the wire [`crate::RedisDoor`] opens; others are given to
//! [`crate::Node::start_with`].
//!
//! Replies are appended with [`Output::part`], which keeps the limit on unread replies.
//!
//! Rules for a wire: no method blocks, opens, spawns or reads a clock that may be set; nothing a
//! session appends is a promise, for the node sends it only after the commit; [`WireSession::execute`]
//! touches keys of the planned shards alone; what [`WireSession::carry`] names means the same at every
//! shard, whatever becomes of the connection.

use std::fmt;

pub use crate::answer::Answer;
pub use beeline_kv::{Keyspace, Store};
pub use beeline_resp::{After, Args, ArgsBuffer, Effect, Output, Route, ShardSet, Span};

/// A protocol served inside the shard threads.
pub trait Wire: fmt::Debug + Send + Sync {
    /// The service's name.
    fn name(&self) -> &'static str;

    /// What a client is told that cannot be served because there are too many.
    fn full(&self) -> Vec<u8>;

    /// Its part of one shard's thread; called on that thread.
    fn worker(&self, shard: usize) -> Box<dyn WireWorker>;
}

/// A connection as the node made it.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Its number, unique in the life of the node, over all wires.
    pub id: u64,
    /// Remote `address:port`.
    pub address: String,
    /// Local `address:port`.
    pub local_address: String,
    /// File descriptor.
    pub descriptor: i32,
    /// When it connected, in Unix microseconds.
    pub connected_us: u64,
}

/// A wire's part of one shard's thread: what its connections there share. Never leaves the thread.
pub trait WireWorker: fmt::Debug {
    /// A new connection.
    fn open(&mut self, opened: Opened) -> Box<dyn WireSession>;

    /// Tells the keyspace which keys the next carried requests ask for, so that their memory is on
    /// its way; returns nothing and may do nothing.
    fn expect_carried(
        &mut self,
        _ahead: &mut dyn Iterator<Item = (Head, Args<'_>)>,
        _keyspace: &mut Keyspace<'_>,
    ) {
    }

    /// Runs a request that another shard's session carried here and appends its reply.
    fn execute_carried(
        &mut self,
        head: Head,
        request: Args<'_>,
        keyspace: &mut Keyspace<'_>,
        out: &mut Output,
    );

    /// Error replies so far.
    fn errors(&self) -> u64;
}

/// What a carried request takes along of its session, in a format of the wire's own. The first byte
/// is the format's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head(pub [u8; 8]);

/// What [`WireSession::advance`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A whole request; it is the current one until the next call.
    Request,
    /// Part of one, or nothing.
    Incomplete,
    /// The stream is broken: what was appended is sent, then the connection is closed.
    Broken,
}

/// Where a request runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Under the locks of the shards of its route.
    Keys,
    /// By itself, in order with the connection's others: its answer may take a while.
    Node,
    /// As `Node`, with every shard locked: it writes a snapshot.
    Saving,
    /// In another service of the node, which answers later: [`WireSession::submit`].
    Elsewhere,
}

/// What the current request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WirePlan {
    /// The shards whose keys it touches.
    pub route: Route,
    /// Where it runs.
    pub scope: Scope,
    /// What it does to the keyspace, for the log.
    pub effect: Effect,
    /// It may change data now: it waits while writes are paused.
    pub writes: bool,
    /// With a route of one shard: it may be carried there.
    pub portable: bool,
}

/// What the log needs to know of the current request, in a replicated node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Logging {
    /// It is a request of another member, whose words are those of [`WireSession::carry`], and
    /// whether its sender may ask for that.
    pub member: Option<bool>,
    /// It cannot become part of what the log carries: the name to refuse it by.
    pub unlogged: Option<&'static str>,
    /// It may store something.
    pub needs_room: bool,
    /// It travels in an entry by itself.
    pub alone: bool,
}

/// Why the node refuses the current request, or takes back its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal<'a> {
    /// What it stored could not be made durable.
    NotDurable,
    /// Its reply passed the limit on unread replies; it ran.
    ReplyTooLarge,
    /// It is too large to be carried to its shard.
    TooLargeToCarry,
    /// A replicated node has no room.
    NoRoom,
    /// A member of a cluster replaces its keys by a snapshot: to be tried again.
    Loading,
    /// A member of a cluster has not opened its log yet: to be tried again.
    NotReady,
    /// The log cannot carry a request of this name here ([`Logging::unlogged`]).
    Unlogged(&'a str),
    /// In the node's words: a code in capitals, a blank, a sentence.
    Line(&'a str),
}

/// One connection.
pub trait WireSession: fmt::Debug {
    /// The current request is refused before it ran: one that ends something, such as a transaction,
    /// ends it all the same.
    fn abandon_current(&mut self) {}

    /// Room for bytes of the socket, not empty.
    fn room(&mut self) -> &mut [u8];

    /// The first `count` bytes of that room were filled.
    ///
    /// Errors: more than the limit on an incomplete request; the connection ends.
    fn received(&mut self, count: usize) -> Result<(), String>;

    /// Bytes received behind the current request.
    fn pending_bytes(&self) -> usize;

    /// Moves on to the next whole request.
    fn advance(&mut self, out: &mut Output) -> Step;

    /// What the current request needs. May be asked again, and is asked before each
    /// [`WireSession::execute`], which may use what was found here.
    fn plan(&mut self, store: &Store) -> WirePlan;

    /// Tells the keyspace which keys the current request and the next ones ask for; returns how many
    /// requests that covers.
    fn expect(&mut self, _keyspace: &mut Keyspace<'_>) -> usize {
        0
    }

    /// Runs the current request and appends its reply.
    fn execute(&mut self, keyspace: &mut Keyspace<'_>, out: &mut Output) -> After;

    /// Hands the current request, whose scope is [`Scope::Elsewhere`], to the service that answers
    /// it, and returns at once.
    fn submit(&mut self, _answer: Answer) {}

    /// The current request, to be run elsewhere.
    fn carry(&self) -> (Head, Args<'_>);

    /// Whether the client wants the reply to a request that does not run here. Asked once for each.
    fn takes_reply(&mut self) -> bool {
        true
    }

    /// Appends what a refused request is answered.
    fn refuse(&mut self, refusal: &Refusal<'_>, out: &mut Output);

    /// What the log needs to know of the current request; `None`: this wire's requests do not go
    /// through the log, and writes are refused in a replicated node.
    fn logging(&mut self) -> Option<Logging> {
        None
    }

    /// Reads of this session may be old: they ask for no barrier.
    fn reads_stale(&self) -> bool {
        false
    }

    /// Appends the current request as the log carries it, and ends what it ends for the session.
    fn log(&mut self, _out: &mut Vec<u8>) {}

    /// Shows other threads what changed: when it was last active, in Unix microseconds, and bytes of
    /// replies that wait.
    fn publish(&mut self, _active_us: u64, _output_bytes: usize) {}

    /// Gives memory back that is not in use.
    fn trim(&mut self) {}
}
