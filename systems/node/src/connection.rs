//! One connection: socket, its wire's session, and replies in request order.
//!
//! Replies to commands that ran in this shard go straight to the output buffer; those behind a
//! command that was forwarded wait in [`Places`].
//!
//! Invariant: a connection in `Draining` reads and executes nothing more.

use std::io;
use std::net::TcpStream;

use beeline_os::poller::Interest;
use beeline_resp::{Output, Version};
use rustix::io::Errno;

use crate::parcel::Origin;
use crate::places::Places;
use crate::resting::Resting;
use crate::wire::{Refusal, WireSession};

/// Forwarded commands of one connection without a reply; more wait unparsed.
const MAX_PLACES: usize = 1024;
/// Where commands go that another service answers: no shard.
pub(crate) const ELSEWHERE: usize = usize::MAX;
/// Forwarded commands before anything is known of the size of their replies, and again after a
/// large one: each reply that is not large makes room for one more.
const FIRST_PLACES: usize = 16;
/// Bytes of replies that may wait for a commit before further requests do.
const RESTING_BYTES: usize = 64 << 10;

/// How a read of the socket ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadOutcome {
    /// Bytes were added to the parser.
    Bytes,
    /// Nothing there now.
    Empty,
    /// The peer sends no more, or the socket failed.
    End,
}

/// Where a connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// Serving.
    Open,
    /// The peer sends no more; what it asked is still answered.
    HalfClosed,
    /// Nothing more is executed; what is in the output buffer is still sent.
    Draining,
    /// To be removed now.
    Dead,
}

/// Why the current request does not run yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// It may.
    No,
    /// CLIENT PAUSE.
    Paused,
    /// A replicated node's log has not answered yet.
    Log,
    /// Earlier requests have not taken effect elsewhere yet, or what they stored is not persisted.
    Order,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub stream: TcpStream,
    pub slot: u32,
    pub generation: u32,
    /// Its number, over all wires.
    pub id: u64,
    /// The peer's.
    pub address: String,
    /// Its wire, by index.
    pub wire: usize,
    pub session: Box<dyn WireSession>,
    pub output: Output,
    pub life: Life,
    pub interest: Interest,
    /// A complete request may be waiting in the parser although the socket is quiet.
    pub resume: bool,
    /// The current request needs several shards and waits for its turn.
    pub needs_several: bool,
    /// Whether the current request is held back.
    pub hold: Hold,
    /// In a replicated node: a barrier passed when everything read so far had arrived.
    pub fresh: bool,
    /// In a replicated node: the places kept are all those of writes.
    pub only_writes: bool,
    /// The current request was held back and is to run now.
    pub again: bool,
    /// Requests wait in the parser because the peer reads too slowly.
    pub backed_up: bool,
    pub last_active_ns: u64,
    /// What CLIENT LIST shows may have changed since it was published.
    pub unpublished: bool,
    /// It is in its thread's list of connections with replies that wait for a commit.
    pub is_listed: bool,
    places: Places,
    resting: Resting,
    /// The shard that every forwarded command without a reply went to.
    forwarded_to: Option<usize>,
    /// What a reply of another shard may take, bytes: the largest recent one; `None` before the
    /// first.
    reply_bytes: Option<usize>,
    /// Forwarded commands that may await their replies together.
    window: usize,
    /// Bytes of replies from other shards that came when no more was asked for: the client is not
    /// to blame for them.
    late_bytes: usize,
}

impl Connection {
    pub(crate) fn new(
        stream: TcpStream,
        slot: u32,
        generation: u32,
        (id, address): (u64, String),
        (wire, session): (usize, Box<dyn WireSession>),
        now_ns: u64,
    ) -> Self {
        Self {
            stream,
            slot,
            generation,
            id,
            address,
            wire,
            session,
            output: Output::new(Version::Resp2),
            life: Life::Open,
            interest: Interest::READ,
            resume: false,
            needs_several: false,
            hold: Hold::No,
            fresh: false,
            only_writes: false,
            again: false,
            backed_up: false,
            last_active_ns: now_ns,
            unpublished: false,
            is_listed: false,
            places: Places::default(),
            resting: Resting::default(),
            forwarded_to: None,
            reply_bytes: None,
            window: FIRST_PLACES,
            late_bytes: 0,
        }
    }

    /// One read into the parser.
    pub(crate) fn read(&mut self) -> ReadOutcome {
        let room = self.session.room();
        match rustix::io::read(&self.stream, room) {
            Ok(0) => ReadOutcome::End,
            Ok(count) => match self.session.received(count) {
                Ok(()) => ReadOutcome::Bytes,
                Err(error) => {
                    tracing::warn!(%error, client = self.id, "closing connection");
                    ReadOutcome::End
                }
            },
            Err(Errno::AGAIN | Errno::INTR) => ReadOutcome::Empty,
            Err(_) => ReadOutcome::End,
        }
    }

    /// Gives memory back that is not in use.
    pub(crate) fn trim(&mut self) {
        self.session.trim();
        self.places.trim();
        if self.output.is_empty() {
            self.output = Output::new(self.output.version());
        }
    }

    /// Sends what waits and rests on no commit under way; `Ok(true)` when nothing is left.
    ///
    /// Errors: the socket's; the connection is then dead.
    pub(crate) fn write(&mut self) -> io::Result<bool> {
        loop {
            let free_bytes = self.free_bytes();
            if free_bytes == 0 {
                return Ok(self.output.is_empty());
            }
            match rustix::net::send(
                &self.stream,
                &self.output.as_bytes()[..free_bytes],
                rustix::net::SendFlags::NOSIGNAL,
            ) {
                Ok(sent) => {
                    self.output.consume(sent);
                    self.resting.sent(sent);
                }
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Bytes of replies that may leave now.
    fn free_bytes(&self) -> usize {
        self.resting.free_bytes(self.output.len())
    }

    /// True while a reply waits for a commit.
    pub(crate) fn is_resting(&self) -> bool {
        !self.resting.is_empty()
    }

    /// The reply that is being made waits for `commit` (0: for none); it begins at `start` of the output,
    /// unless replies of other shards come before it.
    pub(crate) fn rest_on(&mut self, commit: u64, start: usize) {
        if commit == 0 {
            return;
        }
        if self.is_in_order() {
            self.resting.mark(commit, start);
        } else {
            self.resting.line_up(commit);
        }
    }

    /// Every commit up to this one is persisted.
    pub(crate) fn settle(&mut self, commit: u64) {
        self.resting.settle(commit);
    }

    /// What waits for a commit is not durable: an error takes its place, and the connection ends.
    pub(crate) fn refuse_resting(&mut self) {
        self.refuse_from(self.free_bytes());
    }

    /// What the client was answered beyond `before` bytes is not durable, nor what waits for a commit: an
    /// error takes its place, and the connection ends.
    pub(crate) fn refuse_from(&mut self, before: usize) {
        self.output.truncate(before.min(self.free_bytes()));
        self.resting.clear();
        if self.is_in_order() {
            let Self { session, output, .. } = &mut *self;
            session.refuse(&Refusal::NotDurable, output);
            self.life = Life::Draining;
        } else {
            // Later ones wait behind replies of other shards and would leave with them.
            self.life = Life::Dead;
        }
    }

    /// True when no reply of another shard is awaited.
    pub(crate) fn is_in_order(&self) -> bool {
        self.places.is_empty()
    }

    /// True when a request, complete already, is still to be executed.
    pub(crate) fn has_request(&self) -> bool {
        self.resume || self.needs_several || self.hold != Hold::No || self.again || self.backed_up
    }

    /// True when the client waits for the node: for a reply of another shard or service, a commit, a
    /// lock, the log, or the end of a pause.
    pub(crate) fn is_waiting(&self) -> bool {
        self.hold != Hold::No || self.needs_several || !self.is_in_order() || self.is_resting()
    }

    /// True when a request was taken in whose reply is still to be made. One that CLIENT PAUSE holds
    /// back does not count: it may be held for hours.
    pub(crate) fn has_taken_in(&self) -> bool {
        let is_held = matches!(self.hold, Hold::Log | Hold::Order);
        !self.is_in_order() || is_held || self.needs_several || self.again || self.resume
    }

    /// True when no more may be executed until replies leave. What other shards still owe counts
    /// as if it were here, so that a client that asks for much more than it reads is held back at
    /// the same point wherever its keys are.
    pub(crate) fn is_full(&self, pause_bytes: usize) -> bool {
        let reply_bytes = self.reply_bytes.unwrap_or(pause_bytes / FIRST_PLACES);
        let expected = self.places.unfilled().saturating_mul(reply_bytes);
        self.places.len() >= self.window
            || self.output.len() - self.free_bytes() >= RESTING_BYTES
            || self.owed_bytes().saturating_add(expected) >= pause_bytes
    }

    /// Bytes of replies that wait for the peer to read, or for earlier replies.
    pub(crate) fn owed_bytes(&self) -> usize {
        self.output.len() + self.places.bytes()
    }

    /// The shard that every request without a reply was forwarded to, one behind the other: one
    /// more for the same shard runs behind them.
    pub(crate) fn way(&self) -> Option<usize> {
        self.forwarded_to.filter(|_| !self.is_in_order())
    }

    /// Keeps a place for the reply of a command about to be forwarded to `shard`.
    pub(crate) fn keep_place_at(&mut self, shard: usize) -> Origin {
        let alone = self.is_in_order();
        let same = alone || self.forwarded_to == Some(shard);
        let origin = self.keep_place();
        self.forwarded_to = same.then_some(shard);
        origin
    }

    /// Keeps a place for a reply that does not come from a shard.
    pub(crate) fn keep_place(&mut self) -> Origin {
        self.forwarded_to = None;
        Origin {
            slot: self.slot,
            generation: self.generation,
            sequence: self.places.keep(),
            silent: !self.session.takes_reply(),
        }
    }

    /// Answers the current request with a refusal, if its client wants a reply.
    pub(crate) fn refuse(&mut self, refusal: &Refusal<'_>, scratch: &mut Output) {
        if self.session.takes_reply() {
            self.session.refuse(refusal, scratch);
            self.append(scratch.as_bytes());
            scratch.clear();
        }
    }

    /// Puts a reply made here behind those still awaited.
    pub(crate) fn append(&mut self, reply: &[u8]) {
        let start = self.output.len();
        self.places.append(reply, &mut self.output);
        self.note_moved(start);
    }

    /// What came into the output from `start` on may have waited in line.
    fn note_moved(&mut self, start: usize) {
        if self.output.len() > start {
            self.resting.come_out(start, self.places.is_empty());
        }
    }

    /// Fills the place kept as `origin` and moves on what is now in order.
    pub(crate) fn fill(&mut self, origin: Origin, reply: &[u8], pause_bytes: usize) {
        let reply = if origin.silent { &[] } else { reply };
        let recent = self.reply_bytes.unwrap_or(0);
        self.reply_bytes = Some(reply.len().max(recent - recent / 8));
        let large = reply.len() > pause_bytes / MAX_PLACES;
        self.window = if large { FIRST_PLACES } else { (self.window + 1).min(MAX_PLACES) };
        if self.owed_bytes() >= pause_bytes {
            self.late_bytes += reply.len();
        }
        let start = self.output.len();
        self.places.fill(origin.sequence, reply, &mut self.output);
        self.note_moved(start);
    }

    /// Whether the peer left more unread than `limit_bytes`. Replies that other shards had been
    /// asked for before the node stopped reading requests do not count: there are at most as many
    /// as places.
    pub(crate) fn passes(&mut self, limit_bytes: usize, pause_bytes: usize) -> bool {
        if self.owed_bytes() < pause_bytes {
            self.late_bytes = 0;
        }
        self.owed_bytes().saturating_sub(self.late_bytes) > limit_bytes
    }

    /// What the poller should watch for, given how much the peer has not read.
    pub(crate) fn wanted_interest(&self, output_pause_bytes: usize) -> Interest {
        let readable = self.life == Life::Open
            && !self.is_full(output_pause_bytes)
            && !self.needs_several
            && self.hold == Hold::No;
        Interest { readable, writable: self.free_bytes() > 0 }
    }
}
