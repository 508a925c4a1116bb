//! A server of the cluster: the protocol's commands, carried out.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, FlushKind, LocalData, MemoryRegion, Operation,
    PostError, ProtectionDomain, QueuePair, QueuePairOptions, QueuePairState, RemoteKey, Role,
    ScatterGatherEntry, WorkCompletion, WorkRequest,
};
use beeline_os::memory::{MemoryObject, copy_out, load_u64, store_u64};
use beeline_paxos::{
    AccessKey, Command, Event, Layout, Message, NodeId, Options, Position, Replica, Start, Status,
    layout, slot,
};

use crate::error::LogError;
use crate::frame::Frame;
use crate::link::{
    CONTROL_BYTES, Control, Data, Link, Offered, Posted, RECEIVES, SENT, STATUS_READ,
};
use crate::region::Memory;

/// Between two ticks of the protocol's clock, nanoseconds.
const TICK_NS: u64 = 5_000_000;
const COMPLETIONS: usize = 64;

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
    /// At least [`Layout::region_bytes`] long, formatted with [`Layout::format`].
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
    commands: Vec<Command>,
    events: VecDeque<Event<'static>>,
    bytes: Vec<u8>,
}

impl Member {
    /// A server over `memory`, reached through `device`.
    ///
    /// Errors: [`LogError::TooShort`], [`LogError::Layout`], [`LogError::Fabric`].
    pub fn open(
        mut start: Start,
        options: Options,
        durability: Durability,
        memory: MemberMemory,
        device: Arc<dyn Device>,
    ) -> Result<Self, LogError> {
        let (needed, found) = (start.layout.region_bytes(), memory.log.length_bytes() as u64);
        if found < needed {
            return Err(LogError::TooShort { needed, found });
        }
        start.vote_word = load_u64(memory.vote.as_ref(), 0);
        let own = Memory { log: memory.log.clone(), status: memory.status.clone() };
        let replica = Replica::open(start.clone(), options, own)?;
        let domain = device.allocate_protection_domain()?;
        let status_region = domain.register(memory.status.clone(), Access::REMOTE_READ)?;
        let depth = device.attributes().max_completion_queue_depth.min(8192);
        let queue = device.create_completion_queue(depth)?;
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
            commands: Vec::new(),
            events: VecDeque::new(),
            bytes: Vec::new(),
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
        let memory = self.device.allocate_memory(CONTROL_BYTES)?;
        let region = self.domain.register(memory, Access::LOCAL_WRITE)?;
        let qp = self.queue_pair(32)?;
        let mut control = Control { qp, region, status: None, posted: 0, sent: 0 };
        for index in 0..RECEIVES {
            control.post_receive(index)?;
        }
        let info = control.qp.connect_info();
        self.link(peer).control = Some(control);
        Ok(Endpoint { id: self.start.id, info, status: self.status_region.remote_key() })
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
        Ok(control.qp.connect(&endpoint.info, role)?)
    }

    /// Whether the control connection to `peer` works.
    #[must_use]
    pub fn is_connected(&self, peer: NodeId) -> bool {
        let link = self.links.iter().find(|link| link.peer == peer);
        link.and_then(|link| link.control.as_ref()).is_some_and(Control::is_ready)
    }

    /// Does what there is to do at `now_ns`, without blocking. What concerns the caller is
    /// appended to `upward`, in order: `Apply`, `ReadReady`, `ReadRefused`, `TakeSnapshot`,
    /// `SendSnapshot`, `Leading`, `SteppedDown`, `Stop`.
    ///
    /// Errors: [`LogError::Persist`]: stop the server. [`LogError::Fabric`]: what was to be
    /// promised is not.
    pub fn poll(&mut self, now_ns: u64, upward: &mut Vec<Command>) -> Result<(), LogError> {
        let mut completions = [WorkCompletion::EMPTY; COMPLETIONS];
        let count = self.queue.poll(&mut completions)?;
        for completion in &completions[..count] {
            self.on_completion(completion, upward)?;
        }
        self.look_at_offers(upward)?;
        if self.ticked_ns.is_none_or(|then_ns| now_ns.saturating_sub(then_ns) >= TICK_NS) {
            self.ticked_ns = Some(now_ns);
            self.event(Event::Tick { now_ns }, upward)?;
        }
        Ok(())
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
            ..QueuePairOptions::default()
        };
        Ok(self.domain.create_queue_pair(&self.queue, &self.queue, None, options)?)
    }

    /// Deep enough for everything the protocol has outstanding on one follower.
    fn data_queue_pair(&self) -> Result<Box<dyn QueuePair>, LogError> {
        let slots = self.options.operation_slots.saturating_add(2);
        let depth = slots.saturating_mul(self.options.pipeline_depth as u64).saturating_add(64);
        self.queue_pair(u32::try_from(depth).unwrap_or(u32::MAX))
    }

    fn execute(&mut self, command: Command, upward: &mut Vec<Command>) -> Result<(), LogError> {
        match command {
            Command::Send { to, message } => self.send(to, message),
            Command::Fence => self.fence(),
            Command::PersistVote { term, voted_for } => {
                store_u64(self.memory.vote.as_ref(), 0, layout::vote_word(term, voted_for));
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
                let posted = control.is_some_and(|control| control.read_status().is_ok());
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

    /// The fabric's revocation; then the region under a key that nobody knows.
    fn fence(&mut self) -> Result<(), LogError> {
        if let Some(region) = self.log_region.take() {
            region.revoke()?;
        }
        self.held = None;
        let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::LOCAL_WRITE;
        let region = self.domain.register(self.memory.log.clone(), rights)?;
        let key = AccessKey(region.remote_key().0);
        self.log_region = Some(region);
        self.events.push_back(Event::Fenced { key });
        Ok(())
    }

    /// Messages may be lost, so one that cannot be sent is.
    fn send(&mut self, to: NodeId, message: Message) -> Result<(), LogError> {
        let mut frame = Frame {
            cluster: self.start.cluster,
            from: self.start.id,
            attempt: 0,
            message,
            info: Vec::new(),
        };
        match message {
            Message::RequestVote { .. } | Message::Follow { .. } => {
                let qp = self.data_queue_pair()?;
                self.attempt = self.attempt.wrapping_add(1);
                frame.attempt = self.attempt;
                frame.info = qp.connect_info().0;
                let attempt = self.attempt;
                self.link(to).offered = Some(Offered { attempt, qp, grant: None });
            }
            Message::Vote { .. } | Message::Following { .. } => {
                let Some((attempt, info)) = self.link(to).asked.take() else { return Ok(()) };
                let mut qp = self.data_queue_pair()?;
                frame.attempt = attempt;
                frame.info = qp.connect_info().0;
                if qp.connect(&ConnectInfo(info), Role::Passive).is_err() {
                    return Ok(());
                }
                self.held = Some(qp);
            }
            _ => {}
        }
        let mut bytes = std::mem::take(&mut self.bytes);
        frame.encode(&mut bytes);
        if let Some(control) = self.link(to).control.as_mut().filter(|control| control.is_ready()) {
            // A broken connection shows in its completions.
            let _ = control.send(&bytes);
        }
        self.bytes = bytes;
        Ok(())
    }

    /// What a post came to: a broken connection is a lost access.
    fn posted(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        posted: Result<(), PostError>,
    ) -> Result<(), LogError> {
        match posted {
            Ok(()) => Ok(()),
            Err(PostError::NotReady(_) | PostError::QueueFull) => {
                self.lose(peer, key);
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Ends a data connection; its outstanding work ends with it.
    fn lose(&mut self, peer: NodeId, key: AccessKey) {
        self.link(peer).data.take_if(|data| data.key == key);
        self.events.push_back(Event::AccessLost { peer, key });
    }

    fn data(&mut self, peer: NodeId, key: AccessKey) -> Result<&mut Data, PostError> {
        let data = self.link(peer).data.as_mut().filter(|data| data.key == key);
        data.ok_or(PostError::NotReady(QueuePairState::Error))
    }

    fn write_flush(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        first: Position,
        last: Position,
    ) -> Result<(), PostError> {
        let (layout, memory) = (self.start.layout, self.memory.log.clone());
        let Some(region) = self.log_region.clone() else {
            return Err(PostError::NotReady(QueuePairState::Error));
        };
        let kind = match self.durability {
            Durability::Process => FlushKind::Visible,
            Durability::Power => FlushKind::Persistent,
        };
        let data = self.data(peer, key)?;
        let mut position = first;
        while position <= last {
            let offset = layout.slot_offset(position);
            let mut header = [0; slot::SLOT_HEADER_BYTES];
            copy_out(memory.as_ref(), offset as usize, &mut header);
            let length = slot::length(&header).min(layout.slot_bytes());
            let entries = [ScatterGatherEntry { region: &region, offset, length }];
            let (local, remote) = (LocalData::Gather(&entries), data.remote(offset));
            let write = WorkRequest::unsignalled(0, Operation::Write { local, remote });
            data.qp.post_send(&[write])?;
            position = position.next();
        }
        let [before, after] = ranges(&layout, first, last);
        if before.1 > 0 {
            let (remote, length) = (data.remote(before.0), before.1);
            let flush = Operation::Flush { remote, length, kind };
            data.qp.post_send(&[WorkRequest::unsignalled(0, flush)])?;
        }
        let flush = Operation::Flush { remote: data.remote(after.0), length: after.1, kind };
        data.qp.post_send(&[WorkRequest::new(0, flush)])?;
        data.posted.push_back(Posted::Flush { last });
        Ok(())
    }

    fn write_commit(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        position: Position,
    ) -> Result<(), PostError> {
        let offset = self.start.layout.commit_offset();
        let data = self.data(peer, key)?;
        let word = layout::commit_word(position).to_le_bytes();
        let (local, remote) = (LocalData::Inline(&word), data.remote(offset));
        data.qp.post_send(&[WorkRequest::unsignalled(0, Operation::Write { local, remote })])
    }

    fn read_slots(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        first: Position,
        count: u64,
    ) -> Result<(), PostError> {
        let layout = self.start.layout;
        let data = self.data(peer, key)?;
        let last = first.plus(count.saturating_sub(1));
        let mut offset = 0;
        let pieces = ranges(&layout, first, last);
        for (index, (start, length)) in pieces.into_iter().enumerate() {
            if length == 0 {
                continue;
            }
            let local = ScatterGatherEntry { region: &data.scratch, offset, length };
            let read = Operation::Read { local, remote: data.remote(start) };
            let request = WorkRequest { wr_id: 0, operation: read, signalled: index == 1 };
            data.qp.post_send(&[request])?;
            offset += length;
        }
        data.posted.push_back(Posted::Slots { first, count });
        Ok(())
    }

    fn confirm(&mut self, peer: NodeId, key: AccessKey, round: u64) -> Result<(), PostError> {
        let offset = self.start.layout.commit_offset();
        let room = self.options.operation_slots * self.start.layout.slot_bytes();
        let data = self.data(peer, key)?;
        let local = ScatterGatherEntry { region: &data.scratch, offset: room, length: 8 };
        let read = Operation::Read { local, remote: data.remote(offset) };
        data.qp.post_send(&[WorkRequest::new(0, read)])?;
        data.posted.push_back(Posted::Confirm { round });
        Ok(())
    }

    fn on_completion(
        &mut self,
        completion: &WorkCompletion,
        upward: &mut Vec<Command>,
    ) -> Result<(), LogError> {
        let number = completion.qp_num;
        let of = |qp: &dyn QueuePair| qp.qp_num() == number;
        for index in 0..self.links.len() {
            let link = &self.links[index];
            if link.data.as_ref().is_some_and(|data| of(data.qp.as_ref())) {
                return self.on_data(index, completion.is_success(), upward);
            }
            if link.control.as_ref().is_some_and(|control| of(control.qp.as_ref())) {
                return self.on_control(index, completion, upward);
            }
        }
        // Of a queue pair that is gone.
        Ok(())
    }

    fn on_data(
        &mut self,
        index: usize,
        success: bool,
        upward: &mut Vec<Command>,
    ) -> Result<(), LogError> {
        let link = &mut self.links[index];
        let (peer, Some(data)) = (link.peer, &mut link.data) else { return Ok(()) };
        let key = data.key;
        let posted = data.posted.pop_front().filter(|_| success);
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
        match completion.wr_id {
            SENT => control.sent += 1,
            STATUS_READ => {
                let status = completion.is_success().then(|| {
                    let memory = control.region.memory().as_ref();
                    let word = |at: usize| load_u64(memory, Control::status_offset() + at);
                    Status::from_words([word(0), word(8)])
                });
                return self.event(Event::StatusRead { peer, status }, upward);
            }
            buffer if completion.is_success() && buffer < RECEIVES => {
                let mut bytes = vec![0; (completion.length as usize).min(CONTROL_BYTES)];
                let offset = Control::receive_offset(buffer);
                copy_out(control.region.memory().as_ref(), offset, &mut bytes);
                let _ = control.post_receive(buffer);
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
        let (from, message) = (link.peer, frame.message);
        if frame.cluster != self.start.cluster || frame.from != from {
            return Ok(());
        }
        let event = Event::Message { from, message };
        match message {
            Message::RequestVote { .. } | Message::Follow { .. } => {
                link.asked = Some((frame.attempt, frame.info));
            }
            Message::Vote { grant, .. } | Message::Following { grant, .. } => {
                // Told to the protocol once the queue pair is connected.
                let offered = link.offered.as_mut();
                let Some(offered) = offered.filter(|offered| offered.attempt == frame.attempt)
                else {
                    return Ok(());
                };
                if offered.qp.connect(&ConnectInfo(frame.info), Role::Active).is_ok() {
                    offered.grant = Some((grant.key, event));
                }
                return Ok(());
            }
            _ => {}
        }
        self.event(event, upward)
    }

    fn look_at_offers(&mut self, upward: &mut Vec<Command>) -> Result<(), LogError> {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            let Some(offered) = &link.offered else { continue };
            let state = offered.qp.state();
            if offered.grant.is_none() || state == QueuePairState::Init {
                continue;
            }
            let Some(Offered { qp, grant: Some((key, event)), .. }) = link.offered.take() else {
                continue;
            };
            if state != QueuePairState::ReadyToSend {
                continue;
            }
            let slots = self.options.operation_slots * self.start.layout.slot_bytes();
            let memory = self.device.allocate_memory(slots as usize + 64)?;
            let scratch = self.domain.register(memory, Access::LOCAL_WRITE)?;
            let data = Data { key, qp, posted: VecDeque::new(), scratch };
            let link = &mut self.links[index];
            let (peer, old) = (link.peer, link.data.replace(data));
            if let Some(old) = old {
                self.event(Event::AccessLost { peer, key: old.key }, upward)?;
            }
            self.event(event, upward)?;
        }
        Ok(())
    }
}

/// The bytes of the slots `first` to `last`: where the ring ends in between, two ranges; else the
/// first is empty.
fn ranges(layout: &Layout, first: Position, last: Position) -> [(u64, u64); 2] {
    let (start, end) = (layout.slot_offset(first), layout.slot_offset(last));
    let past = end + layout.slot_bytes();
    if start <= end {
        [(start, 0), (start, past - start)]
    } else {
        let begin = layout.slot_offset(Position::NONE);
        [(start, layout.region_bytes() - start), (begin, past - begin)]
    }
}
