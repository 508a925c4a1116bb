//! One connection's protocol, initiator's half and life cycle. The target's half is
//! [`crate::execute`], the outgoing byte stream [`crate::transmit`].
//!
//! The engine is single-threaded code behind a lock ([`crate::connection`]): whoever holds the
//! lock, the application's thread or the library's, moves it on. It never sleeps (except in the
//! one receive that [`Engine::drive`] is told may sleep) and never delivers completions itself: it
//! gathers them, and the connection hands them to the completion queues.
//!
//! ```text
//!  Idle ──connect(Active)──▶ Dialling ──▶ Greeting ──welcome──▶ Ready ──error──▶ Lingering ──▶ Closed
//!   └────connect(Passive) and a right hello──────────────────────▲   └──peer gone──────────────▲
//! ```
//!
//! *Requests* are numbered from 0. The initiator keeps each one until it is acknowledged. The
//! target executes them in order; when it cannot execute one now (no receive posted; an answer
//! that still reads the memory a write wants to change) it says `Wait`, drops that request and all
//! that follow, and says `Resume` when it can; the initiator then sends again from there. So no
//! end ever stops reading, answers are never stuck behind a send that nobody wants, and nothing is
//! buffered for the peer.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use beeline_fabric::{
    FlushKind, Opcode, QueuePairOptions, QueuePairState, RemoteAddress, RemoteKey, Status,
    WorkCompletion,
};

use crate::clock;
use crate::connection::Connection;
use crate::execute::Reader;
use crate::frame::{Frame, Message, WaitReason};
use crate::handshake::{GREETING_BYTES, Greeting, GreetingRole, Nonce, same_nonce};
use crate::persist::Persisting;
use crate::receive_queue::{PostedReceive, SharedReceiveState};
use crate::region::{Entry, Range, RegionTable};
use crate::stream::{Moved, Stream};
use crate::transmit::{Response, Transmitter};

/// Entries of one gather list.
pub(crate) const MAX_GATHER: usize = 4;
/// Bytes of one inline request.
pub(crate) const MAX_INLINE: usize = 256;
/// Regions of the peer that this end writes by itself, and of this end that the peer does.
pub(crate) const MAX_GRANTS: usize = 64;
/// Bytes of one request that a slow link moves within the transport time-out at least.
const SLOWEST_BYTES: u64 = 1 << 20;
/// How long a refused peer may take to read why.
const LINGER_NS: u64 = 1_000_000_000;

/// Where the connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Not connected yet.
    Idle,
    /// The kernel is connecting.
    Dialling,
    /// Hello sent; so many bytes of the welcome are here.
    Greeting,
    /// In use.
    Ready,
    /// Failed; what was being sent still leaves, what arrives is dropped.
    Lingering,
    /// Over.
    Closed,
}

/// Readiness a connection is woken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    /// Not in the epoll sets.
    None,
    /// Bytes to read.
    Read,
    /// Also room to write.
    ReadAndWrite,
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The peer broke the protocol.
    Hostile(&'static str),
    /// The peer's request is refused; it is told.
    Refused { request: u32, status: Status },
    /// The peer refused our request.
    PeerRefused { request: u32, status: Status },
    /// End of stream, reset, or no answer in time.
    Gone(&'static str),
    /// Our oldest request cannot be finished here.
    Local(Status),
    /// This end disconnects.
    Disconnected,
}

/// Source of an outgoing payload.
#[derive(Debug)]
pub(crate) enum Source {
    /// In one of the engine's inline slots.
    Inline { slot: usize, length: usize },
    /// Gathered from regions.
    Gather { ranges: [Option<Range>; MAX_GATHER], length: u64 },
}

impl Source {
    pub(crate) fn length(&self) -> u64 {
        match self {
            Self::Inline { length, .. } => *length as u64,
            Self::Gather { length, .. } => *length,
        }
    }
}

/// What an outstanding request does.
#[derive(Debug)]
pub(crate) enum Request {
    Write { source: Source, remote: RemoteAddress, immediate: Option<u32> },
    Send { source: Source, immediate: Option<u32> },
    Read { local: Range, remote: RemoteAddress },
    CompareAndSwap { local: Range, remote: RemoteAddress, expected: u64, desired: u64 },
    FetchAndAdd { local: Range, remote: RemoteAddress, addend: u64 },
    Flush { remote: RemoteAddress, length: u64, kind: FlushKind },
}

impl Request {
    fn opcode(&self) -> Opcode {
        match self {
            Self::Write { immediate: None, .. } => Opcode::Write,
            Self::Write { .. } => Opcode::WriteWithImmediate,
            Self::Send { .. } => Opcode::Send,
            Self::Read { .. } => Opcode::Read,
            Self::CompareAndSwap { .. } => Opcode::CompareAndSwap,
            Self::FetchAndAdd { .. } => Opcode::FetchAndAdd,
            Self::Flush { .. } => Opcode::Flush,
        }
    }

    fn length(&self) -> u64 {
        match self {
            Self::Write { source, .. } | Self::Send { source, .. } => source.length(),
            Self::Read { local, .. } => local.length as u64,
            Self::CompareAndSwap { .. } | Self::FetchAndAdd { .. } => 8,
            Self::Flush { .. } => 0,
        }
    }

    /// Completed by a response, not by an acknowledgement.
    fn awaits_response(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::CompareAndSwap { .. } | Self::FetchAndAdd { .. })
    }
}

/// A posted request that is not completed.
#[derive(Debug)]
pub(crate) struct Outstanding {
    pub(crate) wr_id: u64,
    pub(crate) signalled: bool,
    pub(crate) request: Request,
    /// Stream position at which its frame ends; valid once staged.
    pub(crate) end_position: u64,
    /// Its bytes were placed directly, when it was staged.
    pub(crate) placed: bool,
}

/// Memory of the peer that this end may write by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) key: RemoteKey,
    pub(crate) at: u64,
    pub(crate) length: u64,
}

/// The peer asked us to wait with this request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hold {
    pub(crate) request: u32,
    pub(crate) reason: WaitReason,
    /// First time it asked for this request.
    pub(crate) since_ns: u64,
    /// It has said `Resume`; kept to know how long the request has been waiting in all.
    pub(crate) resumed: bool,
}

/// Where receives come from.
#[derive(Debug)]
pub(crate) enum Receives {
    Own(VecDeque<PostedReceive>),
    Shared(Arc<SharedReceiveState>),
}

/// Completions gathered for the two queues.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    pub(crate) send: Vec<WorkCompletion>,
    pub(crate) receive: Vec<WorkCompletion>,
}

/// What identifies and configures an engine.
#[derive(Debug)]
pub(crate) struct EngineSetup {
    pub(crate) qp_num: u32,
    pub(crate) nonce: Nonce,
    pub(crate) domain: u64,
    pub(crate) options: QueuePairOptions,
    pub(crate) regions: Arc<RegionTable>,
    pub(crate) shared_receives: Option<Arc<SharedReceiveState>>,
    pub(crate) connection: Weak<Connection>,
}

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) stage: Stage,
    pub(crate) stream: Option<Box<dyn Stream>>,
    pub(crate) qp_num: u32,
    nonce: Nonce,
    pub(crate) domain: u64,
    pub(crate) options: QueuePairOptions,
    pub(crate) regions: Arc<RegionTable>,
    pub(crate) connection: Weak<Connection>,
    /// Number and nonce of the peer's queue pair, once `connect` named it.
    peer: Option<(u32, Nonce)>,
    /// An authenticated caller that came before `connect`.
    parked: Option<(Box<dyn Stream>, Greeting)>,
    greeting: [u8; GREETING_BYTES],
    greeting_bytes: usize,

    // The initiator's half.
    pub(crate) outstanding: VecDeque<Outstanding>,
    /// Number of the oldest outstanding request.
    pub(crate) first_request: u32,
    /// How many of `outstanding` have been staged.
    pub(crate) staged: usize,
    pub(crate) hold: Option<Hold>,
    /// Payloads of inline requests, one slot per outstanding request, used in turn. Allocated at
    /// first use.
    pub(crate) inline: Box<[u8]>,
    pub(crate) next_inline_slot: usize,
    /// What the peer granted, oldest first.
    pub(crate) grants: Vec<Grant>,
    /// Staged requests that the peer has yet to execute: while there are any, nothing is placed,
    /// since it would overtake them.
    pub(crate) unplaced: usize,

    // The target's half.
    pub(crate) receives: Receives,
    pub(crate) reader: Reader,
    /// Number of the next request to execute.
    pub(crate) expected_request: u32,
    /// Requests are dropped until `expected_request` comes again.
    pub(crate) dropping: Option<WaitReason>,
    /// While dropping: `Resume` has been said.
    pub(crate) resumed: bool,
    /// The peer waits for an acknowledgement that has not been staged.
    pub(crate) owed: bool,
    /// Regions whose place the peer was told.
    pub(crate) granted: Vec<Weak<Entry>>,
    /// A flush of a file that a peer asked for last.
    pub(crate) persisting: Option<Persisting>,
    /// The receive that the payload being read belongs to.
    pub(crate) receiving: Option<PostedReceive>,

    pub(crate) transmitter: Transmitter,
    pub(crate) gathered: Gathered,
    /// When the stream last moved a byte, coarse.
    pub(crate) progress_ns: u64,
    /// Since when the oldest request is the oldest, coarse.
    oldest_since_ns: u64,
    linger_until_ns: u64,
    pub(crate) ended: Option<End>,

    // Kept for the connection.
    /// What the epoll sets of the completion queues were last told.
    pub(crate) interest: Interest,
    /// What the stream was last told of bytes that wait for room.
    pub(crate) wants_room: bool,
    /// It then watches for room by itself.
    pub(crate) watches_room: bool,
}

impl Engine {
    pub(crate) fn new(setup: EngineSetup) -> Self {
        let depth = setup.options.send_depth as usize;
        let receives = match setup.shared_receives {
            Some(shared) => Receives::Shared(shared),
            None => Receives::Own(VecDeque::with_capacity(setup.options.receive_depth as usize)),
        };
        Self {
            stage: Stage::Idle,
            stream: None,
            qp_num: setup.qp_num,
            nonce: setup.nonce,
            domain: setup.domain,
            options: setup.options,
            regions: setup.regions,
            connection: setup.connection,
            peer: None,
            parked: None,
            greeting: [0; GREETING_BYTES],
            greeting_bytes: 0,
            outstanding: VecDeque::with_capacity(depth),
            first_request: 0,
            staged: 0,
            hold: None,
            inline: Box::default(),
            next_inline_slot: 0,
            grants: Vec::new(),
            unplaced: 0,
            granted: Vec::new(),
            receives,
            reader: Reader::default(),
            expected_request: 0,
            dropping: None,
            resumed: false,
            owed: false,
            persisting: None,
            receiving: None,
            transmitter: Transmitter::new(),
            gathered: Gathered { send: Vec::with_capacity(depth + 1), receive: Vec::new() },
            progress_ns: 0,
            oldest_since_ns: 0,
            linger_until_ns: 0,
            ended: None,
            interest: Interest::None,
            wants_room: false,
            watches_room: false,
        }
    }

    /// The state as verbs tell it.
    pub(crate) fn state(&self) -> QueuePairState {
        match self.stage {
            Stage::Idle | Stage::Dialling | Stage::Greeting => QueuePairState::Init,
            Stage::Ready => QueuePairState::ReadyToSend,
            Stage::Lingering | Stage::Closed => QueuePairState::Error,
        }
    }

    /// True when nothing is under way that a sleeping receive on this stream alone would miss.
    pub(crate) fn may_sleep(&self) -> bool {
        self.stage == Stage::Ready
            && self.stream.as_ref().is_some_and(|stream| stream.can_sleep())
            && self.reader.is_between_frames()
            && !self.wants_to_send()
            && !self.owed
    }

    /// True when bytes wait for the stream to take them.
    pub(crate) fn wants_to_send(&self) -> bool {
        match self.stage {
            Stage::Dialling => true,
            Stage::Ready | Stage::Lingering => !self.transmitter.is_empty(),
            _ => false,
        }
    }

    /// When, at the latest, `check_deadlines` has something to do.
    pub(crate) fn deadline_ns(&self) -> Option<u64> {
        let transport =
            u64::try_from(self.options.transport_timeout.as_nanos()).unwrap_or(u64::MAX);
        match self.stage {
            Stage::Lingering => Some(self.linger_until_ns),
            Stage::Dialling | Stage::Greeting => Some(self.progress_ns.saturating_add(transport)),
            Stage::Ready => {
                let waits = match self.not_ready_deadline_ns() {
                    Some(deadline) => Some(deadline),
                    None if self.outstanding.is_empty() && self.transmitter.is_empty() => None,
                    None => Some(self.progress_ns.saturating_add(transport)),
                };
                waits.into_iter().chain(self.last_deadline_ns(transport)).min()
            }
            Stage::Idle | Stage::Closed => None,
        }
    }

    /// When the oldest request ends, whatever its peer says meanwhile: one that answers something
    /// now and then, or finds a new reason to wait, does not hold it up for ever. Long payloads
    /// have as much time again for each [`SLOWEST_BYTES`].
    fn last_deadline_ns(&self, transport: u64) -> Option<u64> {
        let front = self.outstanding.front()?;
        let times = front.request.length() / SLOWEST_BYTES + 1;
        let receives = u64::try_from(self.options.receiver_not_ready_timeout.as_nanos());
        let bound = transport.saturating_mul(times).saturating_add(receives.unwrap_or(u64::MAX));
        Some(self.oldest_since_ns.saturating_add(bound))
    }

    /// A request became the oldest.
    pub(crate) fn note_oldest(&mut self) {
        self.oldest_since_ns = clock::coarse_ns();
    }

    fn not_ready_deadline_ns(&self) -> Option<u64> {
        let hold = self.hold.filter(|hold| hold.reason == WaitReason::NotReady && !hold.resumed)?;
        let bound = self.options.receiver_not_ready_timeout.as_nanos();
        Some(hold.since_ns.saturating_add(u64::try_from(bound).unwrap_or(u64::MAX)))
    }

    /// Ends what has waited too long.
    pub(crate) fn check_deadlines(&mut self, now_ns: u64) {
        if self.deadline_ns().is_none_or(|deadline| now_ns < deadline) {
            return;
        }
        match self.stage {
            Stage::Lingering => self.close(),
            Stage::Ready if self.not_ready_deadline_ns().is_some() => {
                self.end(End::Local(Status::ReceiverNotReady));
            }
            _ => self.end(End::Gone("no answer within the transport timeout")),
        }
    }

    /// Moves everything that can move. `sleep` lets the first receive wait for a byte. Returns
    /// true when a byte budget stopped it early.
    pub(crate) fn drive(&mut self, budget_bytes: usize, sleep: bool) -> bool {
        match self.stage {
            Stage::Dialling | Stage::Greeting => self.greet(),
            Stage::Ready => {
                let received = self.receive(budget_bytes, sleep);
                let sent = match &received {
                    Ok(_) => self.transmit(),
                    Err(_) => Ok(()),
                };
                // A peer that refused us may have closed before our send: its reason is still in
                // the receive buffer.
                let outcome = match (received, sent) {
                    (Ok(_), Err(broken)) => {
                        Err(self.receive(budget_bytes, false).err().unwrap_or(broken))
                    }
                    (received, _) => received,
                };
                match outcome {
                    Ok(more) => return more,
                    Err(end) => self.end(end),
                }
            }
            Stage::Lingering => self.linger(),
            Stage::Idle | Stage::Closed => {}
        }
        false
    }

    /// Sends what can be sent; a broken connection ends.
    pub(crate) fn transmit_or_end(&mut self) {
        if self.stage == Stage::Ready
            && let Err(broken) = self.transmit()
        {
            let end = self.receive(usize::MAX, false).err().unwrap_or(broken);
            self.end(end);
        }
    }

    // ---- connecting ----

    /// The active half of `connect`.
    pub(crate) fn dial(&mut self, stream: Box<dyn Stream>, peer: (u32, Nonce)) {
        self.stream = Some(stream);
        self.peer = Some(peer);
        self.stage = Stage::Dialling;
        self.progress_ns = clock::coarse_ns();
    }

    /// The passive half of `connect`: from now on, `peer` is welcome.
    pub(crate) fn expect(&mut self, peer: (u32, Nonce)) {
        self.peer = Some(peer);
        if let Some((stream, hello)) = self.parked.take() {
            self.accept(stream, &hello);
        }
    }

    /// True when `connect` was called.
    pub(crate) fn knows_its_peer(&self) -> bool {
        self.peer.is_some()
    }

    /// A caller showed this queue pair's number and nonce.
    pub(crate) fn accept(&mut self, mut stream: Box<dyn Stream>, hello: &Greeting) {
        if self.stage != Stage::Idle || !same_nonce(&hello.target.1, &self.nonce) {
            return;
        }
        let Some(peer) = self.peer else {
            if self.parked.is_none() {
                self.parked = Some((stream, *hello));
            }
            return;
        };
        if peer.0 != hello.source.0 || !same_nonce(&peer.1, &hello.source.1) {
            return;
        }
        let source = (self.qp_num, self.nonce);
        let welcome =
            Greeting { role: GreetingRole::Welcome, target: hello.source, source }.encode();
        // The first bytes on a fresh connection always fit its send buffer.
        let welcomed = stream.send_bytes(&welcome) == Moved::Bytes(GREETING_BYTES);
        if welcomed && stream.prepare(self.options.transport_timeout).is_ok() {
            self.stream = Some(stream);
            self.stage = Stage::Ready;
            self.progress_ns = clock::coarse_ns();
        } else {
            self.end(End::Gone("the caller left during the handshake"));
        }
    }

    fn greet(&mut self) {
        let Some(stream) = &mut self.stream else { return };
        let Some(peer) = self.peer else { return };
        if self.stage == Stage::Dialling {
            match stream.connected() {
                None => return,
                Some(Err(_)) => return self.end(End::Gone("the peer refused the connection")),
                Some(Ok(())) => {}
            }
            let source = (self.qp_num, self.nonce);
            let hello = Greeting { role: GreetingRole::Hello, target: peer, source }.encode();
            let sent = stream.send_bytes(&hello) == Moved::Bytes(GREETING_BYTES);
            if !sent || stream.prepare(self.options.transport_timeout).is_err() {
                return self.end(End::Gone("the connection broke during the handshake"));
            }
            self.stage = Stage::Greeting;
        }
        while self.greeting_bytes < GREETING_BYTES {
            match stream.receive_bytes(&mut self.greeting[self.greeting_bytes..]) {
                Moved::Bytes(bytes) => self.greeting_bytes += bytes,
                Moved::Later => return,
                Moved::Closed => return self.end(End::Gone("the peer refused the handshake")),
            }
        }
        let right = Greeting::decode(&self.greeting).is_some_and(|welcome| {
            welcome.role == GreetingRole::Welcome
                && welcome.target.0 == self.qp_num
                && same_nonce(&welcome.target.1, &self.nonce)
                && welcome.source.0 == peer.0
                && same_nonce(&welcome.source.1, &peer.1)
        });
        if right {
            self.stage = Stage::Ready;
            self.progress_ns = clock::coarse_ns();
        } else {
            self.end(End::Hostile("the welcome is not the peer's"));
        }
    }

    // ---- answers to our requests ----

    /// Everything numbered below `acknowledged` is done at the peer.
    pub(crate) fn acknowledge_through(&mut self, acknowledged: u32) -> Result<(), End> {
        let count = acknowledged.wrapping_sub(self.first_request) as usize;
        if count == 0 {
            return Ok(());
        }
        if count > self.staged {
            return Err(End::Hostile("acknowledges a request that was not sent"));
        }
        for _ in 0..count {
            let front = self.outstanding.front();
            if front.is_none_or(|front| front.request.awaits_response()) {
                return Err(End::Hostile("acknowledges a request that needs an answer"));
            }
            self.complete_front(Status::Success)?;
        }
        Ok(())
    }

    /// The response to the oldest request, whose number must be `request`.
    pub(crate) fn front_for(&self, request: u32) -> Option<&Outstanding> {
        let front = self.outstanding.front()?;
        let sent = self.staged > 0 && front.end_position <= self.transmitter.sent_position;
        (request == self.first_request && sent).then_some(front)
    }

    /// Retires the oldest request.
    pub(crate) fn complete_front(&mut self, status: Status) -> Result<(), End> {
        let Some(front) = self.outstanding.front() else {
            return Err(End::Hostile("answers a request that does not exist"));
        };
        if self.staged == 0 || front.end_position > self.transmitter.sent_position {
            return Err(End::Hostile("answers a request before it was sent"));
        }
        if front.signalled || status != Status::Success {
            let completion = self.completion_of(front, status);
            self.gathered.send.push(completion);
        }
        self.unplaced -= usize::from(!front.placed);
        self.outstanding.pop_front();
        self.note_oldest();
        self.first_request = self.first_request.wrapping_add(1);
        self.staged -= 1;
        if self.hold.is_some_and(|hold| {
            // The held request itself is done.
            self.first_request.wrapping_sub(hold.request).wrapping_sub(1) < u32::MAX / 2
        }) {
            self.hold = None;
        }
        Ok(())
    }

    fn completion_of(&self, outstanding: &Outstanding, status: Status) -> WorkCompletion {
        let length = if status == Status::Success { outstanding.request.length() } else { 0 };
        WorkCompletion {
            wr_id: outstanding.wr_id,
            status,
            opcode: outstanding.request.opcode(),
            length,
            immediate: None,
            qp_num: self.qp_num,
            context: self.options.context,
        }
    }

    /// The peer wants `request` and what follows later.
    pub(crate) fn told_to_wait(&mut self, request: u32, reason: WaitReason) -> Result<(), End> {
        let index = request.wrapping_sub(self.first_request) as usize;
        if index >= self.staged {
            return Err(End::Hostile("waits for a request that was not sent"));
        }
        let since_ns = match self.hold {
            Some(hold) if hold.request == request && hold.reason == reason => hold.since_ns,
            // Exact: the bound is not to end early.
            _ => clock::now_ns(),
        };
        if reason == WaitReason::Moved {
            self.grants.clear();
        }
        self.hold = Some(Hold { request, reason, since_ns, resumed: false });
        Ok(())
    }

    /// The peer is ready for `request` again.
    pub(crate) fn told_to_resume(&mut self, request: u32) -> Result<(), End> {
        match &mut self.hold {
            Some(hold) if hold.request == request && !hold.resumed => {
                hold.resumed = true;
                self.staged = request.wrapping_sub(self.first_request) as usize;
                let staged = self.outstanding.iter().take(self.staged);
                self.unplaced = staged.filter(|outstanding| !outstanding.placed).count();
                Ok(())
            }
            _ => Err(End::Hostile("resumes what it did not hold")),
        }
    }

    /// True while requests must not be sent.
    pub(crate) fn is_held(&self) -> bool {
        self.hold.is_some_and(|hold| !hold.resumed)
    }

    // ---- ending ----

    /// Ends the connection: both halves go to the error state and outstanding work is flushed.
    pub(crate) fn end(&mut self, end: End) {
        if matches!(self.stage, Stage::Lingering | Stage::Closed) {
            return;
        }
        tracing::debug!(qp_num = self.qp_num, ?end, "connection ended");
        self.ended = Some(end);
        let linger = matches!(end, End::Refused { .. }) && self.stage == Stage::Ready;
        let mut first = match end {
            End::Gone(_) | End::Hostile(_) => Some((self.first_request, Status::TransportError)),
            End::PeerRefused { request, status } => Some((request, status)),
            End::Local(status) => Some((self.first_request, status)),
            End::Refused { .. } | End::Disconnected => None,
        };
        while let Some(outstanding) = self.outstanding.pop_front() {
            let named = first.take_if(|(request, _)| *request == self.first_request);
            let status = named.map_or(Status::Flushed, |(_, status)| status);
            let completion = self.completion_of(&outstanding, status);
            self.gathered.send.push(completion);
            self.first_request = self.first_request.wrapping_add(1);
        }
        self.staged = 0;
        self.unplaced = 0;
        self.grants.clear();
        self.hold = None;
        self.dropping = None;
        self.owed = false;
        let interrupted = self.receiving.take();
        if let Some(receive) = interrupted {
            self.flush_receive(receive.wr_id, Status::Flushed);
        }
        while let Receives::Own(receives) = &mut self.receives
            && let Some(receive) = receives.pop_front()
        {
            self.flush_receive(receive.wr_id, Status::Flushed);
        }
        match end {
            End::Refused { request, status } if linger => {
                self.stage = Stage::Lingering;
                self.linger_until_ns = clock::coarse_ns().saturating_add(LINGER_NS);
                self.transmitter.responses.push_back(Response::Refuse { request, status });
                self.linger();
            }
            _ => self.close(),
        }
    }

    /// The application lets go: a shared receive that a message had taken is there for the others.
    pub(crate) fn give_back_receive(&mut self) {
        if let Receives::Shared(shared) = &self.receives
            && let Some(receive) = self.receiving.take()
        {
            shared.give_back(receive);
        }
    }

    pub(crate) fn flush_receive(&mut self, wr_id: u64, status: Status) {
        self.gathered.receive.push(WorkCompletion {
            wr_id,
            status,
            opcode: Opcode::Receive,
            length: 0,
            immediate: None,
            qp_num: self.qp_num,
            context: self.options.context,
        });
    }

    fn linger(&mut self) {
        if self.transmit().is_err() {
            return self.close();
        }
        let Some(stream) = &mut self.stream else { return self.close() };
        if self.transmitter.is_empty() {
            stream.finish_sending();
        }
        // Bounded per call; the peer may be sending as fast as it can.
        for _ in 0..16 {
            match stream.receive_bytes(self.reader.scratch()) {
                Moved::Bytes(_) => {}
                Moved::Later => return,
                Moved::Closed => return self.close(),
            }
        }
    }

    /// Ends a lingering connection too.
    pub(crate) fn hang_up(&mut self) {
        if self.stage != Stage::Closed {
            self.close();
        }
    }

    fn close(&mut self) {
        self.stage = Stage::Closed;
        self.transmitter.clear();
        self.parked = None;
        if let Some(stream) = &mut self.stream {
            stream.shut_down();
        }
        // The descriptor itself is closed by the connection, after it left the epoll sets.
    }

    /// A frame that answers one of our requests, or only acknowledges.
    pub(crate) fn answered(&mut self, frame: &Frame) -> Result<(), End> {
        match frame.message {
            Message::Acknowledge => Ok(()),
            Message::Refuse { status } => {
                let index = frame.request.wrapping_sub(self.first_request) as usize;
                if index >= self.staged {
                    return Err(End::Hostile("refuses a request that was not sent"));
                }
                Err(End::PeerRefused { request: frame.request, status })
            }
            Message::Wait { reason } => self.told_to_wait(frame.request, reason),
            Message::Resume => self.told_to_resume(frame.request),
            Message::Grant { key, at, length } => {
                if self.grants.len() >= MAX_GRANTS {
                    self.grants.remove(0);
                }
                self.grants.push(Grant { key, at, length });
                Ok(())
            }
            _ => Err(End::Hostile("an answer that is a request")),
        }
    }
}
