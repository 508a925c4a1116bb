//! A server of the cluster: the protocol's commands, carried out.

mod access;
mod forwards;
mod hosted;
mod operations;
mod snapshots;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, FabricError, MemoryRegion, ProtectionDomain,
    QueuePair, QueuePairOptions, RemoteKey, Role, WorkCompletion,
};
use beeline_os::memory::{MemoryObject, copy_out, load_u64, store_u64};
use beeline_paxos::{
    AccessKey, Command, Event, Message, NodeId, Options, Position, Replica, Start, Status, layout,
};

use crate::bulk::{Incoming, Received};
use crate::error::{LogError, advice};
use crate::forward::News;
use crate::frame::{Content, Frame};
use crate::line::LineNews;
use crate::link::{
    BEAT_READ, CONTROL_BYTES, Control, Link, Own, Posted, RECEIVES, SENT, STATUS_READ, Way,
};
use crate::region::Memory;
use crate::shared::Shared;
use operations::ranges;

/// Between two ticks of the protocol's clock, nanoseconds.
const TICK_NS: u64 = 5_000_000;
/// A revocation that the fabric refused is asked for again after this, nanoseconds.
const FENCE_RETRY_NS: u64 = 50_000_000;
const COMPLETIONS: usize = 64;
/// A silent peer holds up an operation for so long, where the provider has to wait for it.
const TRANSPORT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a snapshot's sender waits for the receiver's disk.
const BULK_PATIENCE: Duration = Duration::from_secs(30);
/// An offer of a snapshot without any progress is made again after this, nanoseconds.
const OFFER_NS: u64 = 4_000_000_000;

/// What an acknowledged command survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The death of processes, as far as the memory given does.
    Process,
    /// A loss of power, at f + 1 servers too: flushes are persistent.
    Power,
}

/// A server's memory: three objects, because they have three kinds of rights.
///
/// Memory used by an earlier run has to have a backing that no peer of that run still maps
/// ([`MemoryObject::replace_backing`]).
#[derive(Clone, Debug)]
pub struct MemberMemory {
    /// At least [`beeline_paxos::Layout::region_bytes`] long, formatted with
    /// [`beeline_paxos::Layout::format`].
    pub log: Arc<dyn MemoryObject>,
    /// At least [`Status::BYTES`].
    pub status: Arc<dyn MemoryObject>,
    /// At least 8 bytes: the vote word.
    pub vote: Arc<dyn MemoryObject>,
}

/// How a peer reaches a member's control queue pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Whose it is.
    pub id: NodeId,
    /// Of the control queue pair.
    pub info: ConnectInfo,
    /// Of the status words.
    pub status: RemoteKey,
}

/// Device, protection domain and completion queue of a member.
type Place = (Arc<dyn Device>, Arc<dyn ProtectionDomain>, Rc<dyn CompletionQueue>);

/// A server: a replica and its connections. Stays on its thread.
#[derive(Debug)]
pub struct Member {
    replica: Replica<Memory>,
    start: Start,
    durability: Durability,
    options: Options,
    memory: MemberMemory,
    device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
    queue: Rc<dyn CompletionQueue>,
    /// Own log region, under the key of the present promise.
    log_region: Option<MemoryRegion>,
    status_region: MemoryRegion,
    /// The queue pair through which the holder of the present promise writes.
    held: Option<Box<dyn QueuePair>>,
    links: Vec<Link>,
    attempt: u32,
    ticked_ns: Option<u64>,
    /// The fabric refused a revocation: when it is asked again.
    fence_due_ns: Option<u64>,
    fence_failures: u64,
    /// Where a snapshot that arrives is written; none is taken without.
    incoming_path: Option<PathBuf>,
    incoming: Option<Incoming>,
    received: Option<Received>,
    /// The file of the last one that was received is in use.
    uses_received: bool,
    /// Offers that came meanwhile, by peer and attempt: each peer's last one.
    put_off: Vec<(NodeId, u32)>,
    /// Snapshots are declined until then, and for how long the last time, nanoseconds.
    declining: (u64, u64),
    /// Counts connections that others forward through, and that this member does.
    epoch: u64,
    news: VecDeque<News>,
    commands: Vec<Command>,
    events: VecDeque<Event<'static>>,
    bytes: Vec<u8>,
    /// Its thread's, where it shares one, and its name there.
    shared: Option<(Shared, u64)>,
    /// Where a look puts completions: clearing room for so many takes longer than the look.
    completions: Box<[WorkCompletion]>,
    /// Completions that the thread gave to it.
    given: VecDeque<WorkCompletion>,
    beats: Vec<(NodeId, Option<u64>)>,
    /// What came over its thread's lines.
    line_news: VecDeque<LineNews>,
}

impl Member {
    /// A server over `memory`, reached through `device`.
    ///
    /// Errors: [`LogError::TooShort`], [`LogError::Layout`], [`LogError::Fabric`].
    pub fn open(
        start: Start,
        options: Options,
        durability: Durability,
        memory: MemberMemory,
        device: Arc<dyn Device>,
    ) -> Result<Self, LogError> {
        let domain = device.allocate_protection_domain()?;
        let depth = device.attributes().max_completion_queue_depth.min(8192);
        let queue = device.create_completion_queue(depth)?;
        Self::open_with(start, options, durability, memory, (device, domain, queue))
    }

    fn open_with(
        mut start: Start,
        options: Options,
        durability: Durability,
        memory: MemberMemory,
        (device, domain, queue): Place,
    ) -> Result<Self, LogError> {
        let (needed, found) = (start.layout.region_bytes(), memory.log.length_bytes() as u64);
        if found < needed {
            return Err(LogError::TooShort { needed, found });
        }
        start.vote_word = load_u64(memory.vote.as_ref(), 0);
        let own = Memory { log: memory.log.clone(), status: memory.status.clone() };
        let replica = Replica::open(start.clone(), options, own)?;
        let status_region = domain.register(memory.status.clone(), Access::REMOTE_READ)?;
        Ok(Self {
            replica,
            start,
            durability,
            options,
            memory,
            device,
            domain,
            queue,
            log_region: None,
            status_region,
            held: None,
            links: Vec::new(),
            attempt: 0,
            ticked_ns: None,
            fence_due_ns: None,
            fence_failures: 0,
            incoming_path: None,
            incoming: None,
            received: None,
            uses_received: false,
            put_off: Vec::new(),
            declining: (0, 0),
            epoch: 0,
            news: VecDeque::new(),
            commands: Vec::new(),
            events: VecDeque::new(),
            bytes: Vec::new(),
            shared: None,
            completions: vec![WorkCompletion::EMPTY; COMPLETIONS].into(),
            given: VecDeque::new(),
            beats: Vec::new(),
            line_news: VecDeque::new(),
        })
    }

    /// The protocol's state.
    #[must_use]
    pub fn replica(&self) -> &Replica<impl beeline_paxos::LogMemory> {
        &self.replica
    }

    /// Prepares the control connection to `peer`, anew if there was one, and says how to reach
    /// it.
    ///
    /// Errors: [`LogError::Fabric`], [`LogError::Post`].
    pub fn listen(&mut self, peer: NodeId) -> Result<Endpoint, LogError> {
        let memory = self.own_memory(CONTROL_BYTES)?;
        let region = self.domain.register(memory, Access::LOCAL_WRITE)?;
        let own = Own::new(self.queue_pair(32)?, region)?;
        let info = own.qp.connect_info();
        self.replace_control(peer, Way::Own(own));
        Ok(Endpoint { id: self.start.id, info, status: self.status_region.remote_key() })
    }

    fn replace_control(&mut self, peer: NodeId, way: Way) {
        let link = self.link(peer);
        let before = link.control.replace(Control::new(peer, way));
        // What was asked for or answered through it is lost.
        (link.offered, link.asked, link.answered) = (None, None, None);
        link.request = None;
        self.end_forwards(peer);
        // What the connection before did not answer, it never will.
        for _ in 0..before.map_or(0, |control| control.reading) {
            self.events.push_back(Event::StatusRead { peer, status: None });
        }
    }

    /// Connects the control connection to the peer's end. One end is [`Role::Active`], the other
    /// [`Role::Passive`]. Returns at once; polling drives it.
    ///
    /// Errors: [`LogError::NotListening`], [`LogError::WrongPeer`], [`LogError::Fabric`].
    pub fn connect(
        &mut self,
        peer: NodeId,
        endpoint: &Endpoint,
        role: Role,
    ) -> Result<(), LogError> {
        if endpoint.id != peer {
            return Err(LogError::WrongPeer { expected: peer });
        }
        let Some(control) = &mut self.link(peer).control else {
            return Err(LogError::NotListening { peer });
        };
        control.status = Some(endpoint.status);
        if let Some(own) = control.own() {
            own.qp.connect(&endpoint.info, role)?;
        }
        Ok(())
    }

    /// Whether the control connection to `peer` works.
    #[must_use]
    pub fn is_connected(&self, peer: NodeId) -> bool {
        let link = self.links.iter().find(|link| link.peer == peer);
        link.and_then(|link| link.control.as_ref()).is_some_and(Control::is_ready)
    }

    /// Who has connected, or tried to.
    pub(crate) fn peers(&self) -> impl Iterator<Item = NodeId> {
        self.links.iter().map(|link| link.peer)
    }

    /// Gives back what is kept for a peer that is not connected; unless its log is open to this server,
    /// or a snapshot is on its way there.
    pub(crate) fn let_go(&mut self, peer: NodeId) {
        self.end_forwards(peer);
        self.links
            .retain(|link| link.peer != peer || link.data.is_some() || link.outgoing.is_some());
    }

    /// How often the fabric refused to take the log region back: its holder may still write, and
    /// this server promises nothing until it succeeds.
    #[must_use]
    pub fn fence_failures(&self) -> u64 {
        self.fence_failures
    }

    /// Asks for an event on [`Member::event_descriptor`]. Poll once more afterwards, then sleep,
    /// no longer than until the next tick is due.
    ///
    /// Errors: [`LogError::Fabric`].
    pub fn arm(&self) -> Result<(), LogError> {
        Ok(self.queue.arm()?)
    }

    /// Clears the event after the descriptor became readable.
    ///
    /// Errors: [`LogError::Fabric`].
    pub fn acknowledge(&self) -> Result<(), LogError> {
        Ok(self.queue.acknowledge()?)
    }

    /// Becomes readable once [`Member::arm`] was called and something came.
    #[must_use]
    pub fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.queue.event_descriptor()
    }

    /// Does what there is to do at `now_ns`, without blocking. What concerns the caller is
    /// appended to `upward`, in order: `Apply`, `ReadReady`, `ReadRefused`, `TakeSnapshot`,
    /// `SendSnapshot`, `Leading`, `SteppedDown`, `Stop`.
    ///
    /// Returns how many completions there were.
    ///
    /// Errors: [`LogError`]: stop the server. (A revocation that the fabric refuses is none: what
    /// was to be promised is not, and the next ticks try again.)
    pub fn poll(&mut self, now_ns: u64, upward: &mut Vec<Command>) -> Result<usize, LogError> {
        let mut completions = std::mem::take(&mut self.completions);
        let taken = self.take_completions(&mut completions, now_ns, upward);
        self.completions = completions;
        let count = taken? + self.take_line_news(upward)?;
        self.take_requests(upward)?;
        self.look_at_offers(upward)?;
        self.pump_snapshots();
        self.pump_forwards();
        if self.ticked_ns.is_none_or(|then_ns| now_ns.saturating_sub(then_ns) >= TICK_NS) {
            self.ticked_ns = Some(now_ns);
            if self.fence_due_ns.is_some_and(|due_ns| now_ns >= due_ns) {
                self.fence();
            }
            self.event(Event::Tick { now_ns }, upward)?;
        }
        Ok(count)
    }

    /// Takes completions, with `completions` as the place to put them, and acts on them; returns how many.
    fn take_completions(
        &mut self,
        completions: &mut [WorkCompletion],
        now_ns: u64,
        upward: &mut Vec<Command>,
    ) -> Result<usize, LogError> {
        let count = if self.shared.is_some() {
            let count = completions.len().min(self.given.len());
            for (place, given) in completions.iter_mut().zip(self.given.drain(..count)) {
                *place = given;
            }
            count
        } else {
            self.queue.poll(completions)?
        };
        for completion in &completions[..count] {
            self.on_completion(completion, now_ns, upward)?;
        }
        Ok(count)
    }

    /// Tells the protocol something: `Read`, `ChangeMembers`, `Transfer`, `SnapshotTaken`,
    /// `SnapshotInstalled`.
    ///
    /// Errors: as [`Member::poll`].
    pub fn event(&mut self, event: Event<'_>, upward: &mut Vec<Command>) -> Result<(), LogError> {
        let mut commands = std::mem::take(&mut self.commands);
        self.replica.step(event, &mut commands);
        loop {
            for command in commands.drain(..) {
                self.execute(command, upward)?;
            }
            let Some(event) = self.events.pop_front() else { break };
            self.replica.step(event, &mut commands);
        }
        self.commands = commands;
        Ok(())
    }

    /// Proposes an entry, and sends it on its way.
    ///
    /// Errors: the protocol's refusal inside, the machine's outside.
    pub fn propose(
        &mut self,
        payload: &[u8],
        upward: &mut Vec<Command>,
    ) -> Result<Result<Position, beeline_paxos::ProposeError>, LogError> {
        let proposed = self.replica.propose(payload);
        if proposed.is_ok() {
            self.event(Event::Proposed, upward)?;
        }
        Ok(proposed)
    }

    fn link(&mut self, peer: NodeId) -> &mut Link {
        let index = self.links.iter().position(|link| link.peer == peer).unwrap_or_else(|| {
            self.links.push(Link::new(peer));
            self.links.len() - 1
        });
        &mut self.links[index]
    }

    fn queue_pair(&self, send_depth: u32) -> Result<Box<dyn QueuePair>, LogError> {
        let limit = self.device.attributes().max_queue_depth;
        let options = QueuePairOptions {
            send_depth: send_depth.min(limit),
            receive_depth: 2 * RECEIVES as u32,
            transport_timeout: TRANSPORT_TIMEOUT,
            ..QueuePairOptions::default()
        };
        self.create_queue_pair(options)
    }

    /// Deep enough for everything the protocol has outstanding on one follower.
    fn data_queue_pair(&self) -> Result<Box<dyn QueuePair>, LogError> {
        let slots = self.options.operation_slots.saturating_add(3);
        let depth = slots.saturating_mul(self.options.pipeline_depth as u64).saturating_add(64);
        self.queue_pair(u32::try_from(depth).unwrap_or(u32::MAX))
    }

    /// Without one the message is lost, as messages may be.
    fn data_queue_pair_or_none(&self) -> Option<Box<dyn QueuePair>> {
        let made = self.data_queue_pair();
        made.inspect_err(|error| {
            let advice = error.advice();
            tracing::warn!(%error, "no queue pair for a promise{advice}");
        })
        .ok()
    }

    fn execute(&mut self, command: Command, upward: &mut Vec<Command>) -> Result<(), LogError> {
        match command {
            Command::Send { to, message } => {
                self.send(to, message);
                Ok(())
            }
            Command::Fence => {
                self.fence();
                Ok(())
            }
            Command::PersistVote { term, voted_for } => {
                store_u64(self.memory.vote.as_ref(), 0, layout::vote_word(term, voted_for));
                self.memory.vote.stored(0, 8);
                self.persist(&self.memory.vote, 0, 8)?;
                self.events.push_back(Event::VotePersisted);
                Ok(())
            }
            Command::PersistLog { term, first, last } => {
                for (offset, length) in ranges(&self.start.layout, first, last) {
                    self.persist(&self.memory.log, offset, length)?;
                }
                self.events.push_back(Event::LogPersisted { term, last });
                Ok(())
            }
            Command::WriteFlush { peer, key, first, last } => {
                let posted = self.write_flush(peer, key, first, last);
                self.posted(peer, key, posted)
            }
            Command::WriteCommit { peer, key, position } => {
                let posted = self.write_commit(peer, key, position);
                self.posted(peer, key, posted)
            }
            Command::ReadSlots { peer, key, first, count } => {
                let posted = self.read_slots(peer, key, first, count);
                self.posted(peer, key, posted)
            }
            Command::Confirm { peer, key, round } => {
                let posted = self.confirm(peer, key, round);
                self.posted(peer, key, posted)
            }
            Command::Disconnect { peer, key } => {
                self.lose(peer, key);
                Ok(())
            }
            Command::ReadStatus { peer } => {
                let control = self.link(peer).control.as_mut();
                let posted = control.is_some_and(Control::read_status);
                if !posted {
                    self.events.push_back(Event::StatusRead { peer, status: None });
                }
                Ok(())
            }
            Command::Apply { .. }
            | Command::ReadReady { .. }
            | Command::ReadRefused { .. }
            | Command::TakeSnapshot
            | Command::SendSnapshot { .. }
            | Command::Leading { .. }
            | Command::SteppedDown { .. }
            | Command::Stop { .. } => {
                upward.push(command);
                Ok(())
            }
        }
    }

    fn persist(
        &self,
        memory: &Arc<dyn MemoryObject>,
        offset: u64,
        length: u64,
    ) -> Result<(), LogError> {
        match self.durability {
            Durability::Process => Ok(()),
            Durability::Power => {
                memory.persist(offset as usize, length as usize).map_err(LogError::Persist)
            }
        }
    }

    /// The fabric's revocation; then the region under a key that nobody knows. Until it succeeds
    /// nothing is promised, and the old holder may still write.
    fn fence(&mut self) {
        match self.revoke() {
            Ok(key) => {
                self.fence_due_ns = None;
                self.events.push_back(Event::Fenced { key });
            }
            Err(error) => {
                if self.fence_due_ns.is_none() {
                    let advice = advice(&error);
                    tracing::warn!(%error, "the log region cannot be taken back; trying again{advice}");
                }
                // A member that tried at each tick would take the time of those that can.
                let now_ns = self.ticked_ns.unwrap_or_default();
                self.fence_due_ns = Some(now_ns.saturating_add(FENCE_RETRY_NS));
                self.fence_failures += 1;
            }
        }
    }

    fn revoke(&mut self) -> Result<AccessKey, FabricError> {
        if let Some(region) = &self.log_region {
            region.revoke()?;
        }
        self.log_region = None;
        self.held = None;
        let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::LOCAL_WRITE;
        let region = self.domain.register(self.memory.log.clone(), rights)?;
        let key = AccessKey(region.remote_key().0);
        self.log_region = Some(region);
        Ok(key)
    }

    fn send_frame(&mut self, to: NodeId, attempt: u32, content: Content, info: Vec<u8>) {
        let (cluster, from) = (self.start.cluster, self.start.id);
        let frame = Frame { cluster, from, attempt, content, info };
        let mut bytes = std::mem::take(&mut self.bytes);
        frame.encode(&mut bytes);
        if let Some(control) = self.link(to).control.as_mut().filter(|control| control.is_ready()) {
            control.send(&bytes);
        }
        self.bytes = bytes;
    }

    fn on_completion(
        &mut self,
        completion: &WorkCompletion,
        now_ns: u64,
        upward: &mut Vec<Command>,
    ) -> Result<(), LogError> {
        let number = completion.qp_num;
        let of = |qp: &dyn QueuePair| qp.qp_num() == number;
        for index in 0..self.links.len() {
            let link = &self.links[index];
            if link.data.as_ref().is_some_and(|data| of(data.qp.as_ref())) {
                return self.on_data(index, completion.is_success(), upward);
            }
            if link.control.as_ref().is_some_and(|control| control.has_queue_pair(number)) {
                return self.on_control(index, completion, upward);
            }
            if self.on_forward_completion(index, completion, now_ns) {
                return Ok(());
            }
            let outgoing = &mut self.links[index].outgoing;
            if let Some(out) = outgoing.as_mut().filter(|out| of(out.qp.as_ref())) {
                out.completed += 1;
                out.progress_ns = now_ns;
                if !completion.is_success() {
                    *outgoing = None;
                }
                return Ok(());
            }
        }
        if self.incoming.as_ref().is_some_and(|incoming| of(incoming.qp.as_ref())) {
            self.on_chunk(completion);
        }
        // Else of a queue pair that is gone.
        Ok(())
    }

    fn on_data(
        &mut self,
        index: usize,
        success: bool,
        upward: &mut Vec<Command>,
    ) -> Result<(), LogError> {
        let retired = self.links[index].data.as_ref().is_some_and(|data| self.is_retired(data));
        let link = &mut self.links[index];
        let (peer, Some(data)) = (link.peer, &mut link.data) else { return Ok(()) };
        let key = data.key;
        if retired {
            tracing::info!(%peer, "a peer was started again: its memory of before counts no more");
        }
        let posted = data.posted.pop_front().filter(|_| success && !retired);
        let event = match posted {
            None => {
                link.data = None;
                Event::AccessLost { peer, key }
            }
            Some(Posted::Flush { last }) => Event::Flushed { peer, key, last },
            Some(Posted::Confirm { round }) => Event::Confirmed { peer, key, round },
            Some(Posted::Slots { first, count }) => {
                let length = count * self.start.layout.slot_bytes();
                let mut bytes = vec![0; length as usize];
                copy_out(data.scratch.memory().as_ref(), 0, &mut bytes);
                let event = Event::SlotsRead { peer, key, first, bytes: &bytes };
                return self.event(event, upward);
            }
        };
        self.event(event, upward)
    }

    fn on_control(
        &mut self,
        index: usize,
        completion: &WorkCompletion,
        upward: &mut Vec<Command>,
    ) -> Result<(), LogError> {
        let link = &mut self.links[index];
        let (peer, Some(control)) = (link.peer, &mut link.control) else { return Ok(()) };
        let reading = control.reading;
        let Some(own) = control.own() else { return Ok(()) };
        match completion.wr_id {
            SENT => own.sent += 1,
            BEAT_READ => {
                let succeeded = completion.is_success();
                self.on_beat(index, succeeded);
            }
            STATUS_READ => {
                let status = completion.is_success().then(|| {
                    let memory = own.region.memory().as_ref();
                    let word = |at: usize| load_u64(memory, Control::status_offset() + at);
                    Status::from_words([word(0), word(8)])
                });
                control.reading = reading.saturating_sub(1);
                return self.event(Event::StatusRead { peer, status }, upward);
            }
            buffer if completion.is_success() && buffer < RECEIVES => {
                let mut bytes = vec![0; (completion.length as usize).min(CONTROL_BYTES)];
                let offset = Control::receive_offset(buffer);
                copy_out(own.region.memory().as_ref(), offset, &mut bytes);
                let _ = own.post_receive(buffer);
                if let Some(frame) = Frame::decode(&bytes) {
                    return self.on_frame(index, frame, upward);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn on_frame(
        &mut self,
        index: usize,
        frame: Frame,
        upward: &mut Vec<Command>,
    ) -> Result<(), LogError> {
        let link = &mut self.links[index];
        let from = link.peer;
        if frame.cluster != self.start.cluster || frame.from != from {
            return Ok(());
        }
        let message = match frame.content {
            Content::Protocol(message) => message,
            Content::Offer { position, bytes } => {
                return self.on_offer(from, frame.attempt, position, bytes, frame.info);
            }
            Content::Forward => {
                self.on_forward(from, frame.attempt, frame.info);
                return Ok(());
            }
            Content::Forwarding => {
                self.on_forwarding(from, frame.attempt, frame.info);
                return Ok(());
            }
            Content::Accept | Content::Decline => {
                let asked = link.outgoing.take_if(|out| out.attempt == frame.attempt);
                if let (Content::Accept, Some(mut out)) = (frame.content, asked)
                    && out.qp.connect(&ConnectInfo(frame.info), Role::Active).is_ok()
                {
                    link.outgoing = Some(out);
                }
                return Ok(());
            }
        };
        match message {
            Message::RequestVote { .. } | Message::Follow { .. } => {
                link.request = Some((frame.attempt, frame.info, message));
                Ok(())
            }
            Message::Vote { grant, .. } | Message::Following { grant, .. } => {
                let now_ns = self.ticked_ns.unwrap_or_default();
                link.on_grant((frame.attempt, frame.info), (grant.key, message), now_ns);
                Ok(())
            }
            _ => self.event(Event::Message { from, message }, upward),
        }
    }
}
