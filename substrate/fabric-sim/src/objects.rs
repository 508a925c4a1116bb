//! The fabric objects of a simulated node: thin handles on the world's state.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, DeviceAttributes, FabricError, LocalData,
    LocalKey, MemoryRegion, Opcode, Operation, PostError, ProtectionDomain, QueuePair,
    QueuePairOptions, QueuePairState, ReceiveRequest, RegionControl, RemoteKey, Role,
    ScatterGatherEntry, SharedReceiveQueue, WorkCompletion, WorkRequest,
};
use beeline_os::SharedMemory;
use beeline_os::memory::MemoryObject;
use rustix::event::EventfdFlags;

use crate::options::PlantedBug;
use crate::registry::Incarnation;
use crate::state::{
    Body, CompletionRecord, Event, LocalRange, Packet, Payload, PeerName, PostedReceive,
    QueuePairRecord, SendEntry, SharedRecord,
};
use crate::trace::TraceKind;
use crate::world::SimWorld;

const MAGIC: [u8; 4] = *b"BSIM";
const VERSION: u8 = 1;
const INFO_BYTES: usize = 4 + 1 + 8 + 4 + 8;

fn system(action: &'static str) -> impl Fn(io::Error) -> FabricError {
    move |source| FabricError::System { action, source }
}

/// One node's device.
#[derive(Debug)]
pub struct SimDevice {
    world: SimWorld,
    owner: Incarnation,
    attributes: DeviceAttributes,
}

impl SimDevice {
    pub(crate) fn new(world: SimWorld, owner: Incarnation) -> Self {
        let attributes = DeviceAttributes {
            provider: "sim",
            max_message_bytes: 2 << 30,
            max_send_bytes: 16 << 20,
            max_inline_bytes: 256,
            max_scatter_gather_entries: 16,
            max_queue_depth: 16 << 10,
            max_completion_queue_depth: 1 << 20,
            one_sided: true,
            persistent_flush: "the memory object's own persist, at one instant of virtual time",
        };
        Self { world, owner, attributes }
    }

    /// The number of the node this device belongs to.
    #[must_use]
    pub fn node(&self) -> u32 {
        self.owner.node
    }

    /// The world the node is in.
    #[must_use]
    pub fn world(&self) -> &SimWorld {
        &self.world
    }
}

fn limit(what: &'static str, requested: u32, limit: u32) -> Result<(), FabricError> {
    if requested == 0 || requested > limit {
        return Err(FabricError::Limit { what, requested: requested.into(), limit: limit.into() });
    }
    Ok(())
}

impl Device for SimDevice {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        let memory = SharedMemory::allocate("beeline-sim", length_bytes)
            .map_err(io::Error::from)
            .map_err(system("allocating memory"))?;
        Ok(Arc::new(memory))
    }

    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        let id = self.world.lock().fresh_id();
        Ok(Arc::new(SimProtectionDomain {
            world: self.world.clone(),
            owner: self.owner,
            id,
            attributes: self.attributes.clone(),
        }))
    }

    fn create_completion_queue(
        &self,
        depth_entries: u32,
    ) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        limit("completion queue", depth_entries, self.attributes.max_completion_queue_depth)?;
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(io::Error::from)
            .map_err(system("making an event descriptor"))?;
        let event = Arc::new(event);
        let mut state = self.world.lock();
        let id = state.fresh_id();
        let record = CompletionRecord {
            owner: self.owner,
            depth: depth_entries as usize,
            entries: VecDeque::new(),
            overrun: false,
            armed: false,
            event: Arc::clone(&event),
            events_signalled: 0,
        };
        state.completion_queues.insert(id, record);
        let world = self.world.clone();
        Ok(Rc::new(SimCompletionQueue { world, id, depth_entries, event }))
    }
}

#[derive(Debug)]
struct SimProtectionDomain {
    world: SimWorld,
    owner: Incarnation,
    id: u64,
    attributes: DeviceAttributes,
}

#[derive(Debug)]
struct SimRegionControl {
    world: SimWorld,
}

impl RegionControl for SimRegionControl {
    fn revoke(&self, region: &MemoryRegion) -> Result<(), FabricError> {
        // Under the state's lock, so that no placement is half way.
        let _still = self.world.lock();
        self.world.registry().revoke(region.remote_key());
        Ok(())
    }

    fn deregister(&self, _local_key: LocalKey, remote_key: RemoteKey) {
        // Possibly called with the state locked: the registry has its own lock.
        self.world.registry().remove(remote_key);
    }
}

impl ProtectionDomain for SimProtectionDomain {
    fn register(
        &self,
        memory: Arc<dyn MemoryObject>,
        access: Access,
    ) -> Result<MemoryRegion, FabricError> {
        let registry = self.world.registry();
        let (local, remote) = registry.add(self.owner, self.id, Arc::clone(&memory), access);
        let control = Arc::new(SimRegionControl { world: self.world.clone() });
        Ok(MemoryRegion::new(memory, access, LocalKey(local), remote, control))
    }

    fn create_shared_receive_queue(
        &self,
        depth: u32,
    ) -> Result<Rc<dyn SharedReceiveQueue>, FabricError> {
        limit("shared receive queue", depth, self.attributes.max_queue_depth)?;
        let mut state = self.world.lock();
        let id = state.fresh_id();
        let record = SharedRecord { depth: depth as usize, receives: VecDeque::new() };
        state.shared_queues.insert(id, record);
        Ok(Rc::new(SimSharedReceiveQueue { world: self.world.clone(), id }))
    }

    fn create_queue_pair(
        &self,
        send_queue: &Rc<dyn CompletionQueue>,
        receive_queue: &Rc<dyn CompletionQueue>,
        shared_receive_queue: Option<&Rc<dyn SharedReceiveQueue>>,
        options: QueuePairOptions,
    ) -> Result<Box<dyn QueuePair>, FabricError> {
        let most = self.attributes.max_queue_depth;
        limit("send queue", options.send_depth, most)?;
        limit("receive queue", options.receive_depth, most)?;
        let foreign =
            FabricError::Unsupported { provider: "sim", what: "objects of other devices" };
        let queue_id = |queue: &Rc<dyn CompletionQueue>| {
            queue.as_any().downcast_ref::<SimCompletionQueue>().map(|queue| queue.id)
        };
        let (Some(send_id), Some(receive_id)) = (queue_id(send_queue), queue_id(receive_queue))
        else {
            return Err(foreign);
        };
        let shared = match shared_receive_queue {
            None => None,
            Some(queue) => match queue.as_any().downcast_ref::<SimSharedReceiveQueue>() {
                Some(queue) => Some(queue.id),
                None => return Err(foreign),
            },
        };
        let mut state = self.world.lock();
        let owned = |id: &u64| {
            state.completion_queues.get(id).is_some_and(|queue| queue.owner == self.owner)
        };
        if ![send_id, receive_id].iter().all(owned) {
            return Err(foreign);
        }
        let alive = state.is_alive(self.owner);
        let token = state.random.next_u64();
        let id = u32::try_from(state.fresh_id()).map_err(|_| FabricError::Limit {
            what: "queue pairs",
            requested: u64::from(u32::MAX) + 1,
            limit: u32::MAX.into(),
        })?;
        let record = QueuePairRecord {
            owner: self.owner,
            domain: self.id,
            token,
            send_queue: send_id,
            receive_queue: receive_id,
            shared,
            options,
            state: if alive { QueuePairState::Init } else { QueuePairState::Error },
            peer: None,
            next_number: 0,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            packets_sent: 0,
            packet_expected: 0,
            early: BTreeMap::new(),
            knocks: BTreeMap::new(),
            inbound: VecDeque::new(),
            busy: false,
            starved: false,
            deferred: VecDeque::new(),
            heard_ns: 0,
            timer_set: false,
        };
        state.queue_pairs.insert(id, record);
        Ok(Box::new(SimQueuePair {
            world: self.world.clone(),
            id,
            attributes: self.attributes.clone(),
            shared: shared_receive_queue.cloned(),
            _queues: [Rc::clone(send_queue), Rc::clone(receive_queue)],
        }))
    }
}

#[derive(Debug)]
struct SimCompletionQueue {
    world: SimWorld,
    id: u64,
    depth_entries: u32,
    event: Arc<OwnedFd>,
}

impl CompletionQueue for SimCompletionQueue {
    fn poll(&self, completions: &mut [WorkCompletion]) -> Result<usize, FabricError> {
        self.world.deliver_due();
        let mut state = self.world.lock();
        let Some(record) = state.completion_queues.get_mut(&self.id) else { return Ok(0) };
        if record.overrun {
            let depth_entries = self.depth_entries;
            return Err(FabricError::CompletionQueueOverrun { depth_entries });
        }
        let count = completions.len().min(record.entries.len());
        for (slot, completion) in completions.iter_mut().zip(record.entries.drain(..count)) {
            *slot = completion;
        }
        Ok(count)
    }

    fn arm(&self) -> Result<(), FabricError> {
        if let Some(record) = self.world.lock().completion_queues.get_mut(&self.id) {
            record.armed = true;
        }
        Ok(())
    }

    fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn acknowledge(&self) -> Result<(), FabricError> {
        let mut count = [0; 8];
        match rustix::io::read(&self.event, &mut count) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(system("reading an event")(error.into())),
        }
    }

    fn wait(
        &self,
        completions: &mut [WorkCompletion],
        timeout: Duration,
    ) -> Result<usize, FabricError> {
        let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let end = self.world.now_ns().saturating_add(timeout);
        loop {
            let count = self.poll(completions)?;
            if count > 0 {
                return Ok(count);
            }
            if !self.world.step_until(end) {
                self.world.clock().advance_to_ns(end);
                return self.poll(completions);
            }
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimCompletionQueue {
    fn drop(&mut self) {
        self.world.lock().completion_queues.remove(&self.id);
    }
}

#[derive(Debug)]
struct SimSharedReceiveQueue {
    world: SimWorld,
    id: u64,
}

/// A local range that lies in its region and may receive results.
fn writable(entry: &ScatterGatherEntry<'_>) -> Result<LocalRange, PostError> {
    if !entry.region.access().contains(Access::LOCAL_WRITE) {
        return Err(PostError::LocalProtection);
    }
    readable(entry)
}

fn readable(entry: &ScatterGatherEntry<'_>) -> Result<LocalRange, PostError> {
    if !entry.region.contains(entry.offset, entry.length) {
        return Err(PostError::LocalProtection);
    }
    Ok(LocalRange { region: entry.region.clone(), offset: entry.offset, length: entry.length })
}

fn receives(requests: &[ReceiveRequest<'_>]) -> Result<Vec<PostedReceive>, PostError> {
    requests
        .iter()
        .map(|request| {
            let buffer = request.buffer.as_ref().map(writable).transpose()?;
            Ok(PostedReceive { wr_id: request.wr_id, buffer })
        })
        .collect()
}

impl SharedReceiveQueue for SimSharedReceiveQueue {
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let posted = receives(requests)?;
        let mut state = self.world.lock();
        let Some(record) = state.shared_queues.get_mut(&self.id) else {
            return Err(PostError::NotReady(QueuePairState::Error));
        };
        if record.receives.len() + posted.len() > record.depth {
            return Err(PostError::QueueFull);
        }
        record.receives.extend(posted);
        let starved: Vec<u32> = state
            .queue_pairs
            .iter()
            .filter(|(_, qp)| qp.starved && qp.shared == Some(self.id))
            .map(|(id, _)| *id)
            .collect();
        for qp in starved {
            state.feed(qp);
        }
        Ok(())
    }

    fn posted(&self) -> u32 {
        let state = self.world.lock();
        let count = state.shared_queues.get(&self.id).map_or(0, |record| record.receives.len());
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimSharedReceiveQueue {
    fn drop(&mut self) {
        self.world.lock().shared_queues.remove(&self.id);
    }
}

#[derive(Debug)]
struct SimQueuePair {
    world: SimWorld,
    id: u32,
    attributes: DeviceAttributes,
    shared: Option<Rc<dyn SharedReceiveQueue>>,
    /// Kept so that completions have somewhere to go.
    _queues: [Rc<dyn CompletionQueue>; 2],
}

impl SimQueuePair {
    fn too_large(&self, what: &'static str, length: u64, limit: u64) -> Result<(), PostError> {
        if length > limit { Err(PostError::TooLarge { what, limit }) } else { Ok(()) }
    }

    fn payload(&self, local: &LocalData<'_>, most: u64) -> Result<Payload, PostError> {
        let payload = match local {
            LocalData::Inline(bytes) => {
                let limit = u64::from(self.attributes.max_inline_bytes);
                self.too_large("inline data", bytes.len() as u64, limit)?;
                Payload::Bytes(bytes.to_vec())
            }
            LocalData::Gather(entries) => {
                let limit = u64::from(self.attributes.max_scatter_gather_entries);
                self.too_large("the gather list", entries.len() as u64, limit)?;
                Payload::Ranges(entries.iter().map(readable).collect::<Result<_, _>>()?)
            }
        };
        self.too_large("the message", local.length(), most)?;
        Ok(payload)
    }

    fn prepare(
        &self,
        operation: &Operation<'_>,
    ) -> Result<(Opcode, Body, Option<LocalRange>), PostError> {
        let most = self.attributes.max_message_bytes;
        Ok(match operation {
            Operation::Write { local, remote } => {
                let payload = self.payload(local, most)?;
                let body = Body::Write { remote: *remote, payload, placed: 0, immediate: None };
                (Opcode::Write, body, None)
            }
            Operation::WriteWithImmediate { local, remote, immediate } => {
                let payload = self.payload(local, most)?;
                let immediate = Some(*immediate);
                let body = Body::Write { remote: *remote, payload, placed: 0, immediate };
                (Opcode::WriteWithImmediate, body, None)
            }
            Operation::Read { local, remote } => {
                self.too_large("the read", local.length, most)?;
                let body = Body::Read { remote: *remote, length: local.length };
                (Opcode::Read, body, Some(writable(local)?))
            }
            Operation::Send { local, immediate } => {
                let payload = self.payload(local, self.attributes.max_send_bytes)?;
                (Opcode::Send, Body::Send { payload, immediate: *immediate }, None)
            }
            Operation::CompareAndSwap { local, remote, expected, desired } => {
                let body = Body::CompareAndSwap {
                    remote: *remote,
                    expected: *expected,
                    desired: *desired,
                };
                (Opcode::CompareAndSwap, body, Some(word(local)?))
            }
            Operation::FetchAndAdd { local, remote, addend } => {
                let body = Body::FetchAndAdd { remote: *remote, addend: *addend };
                (Opcode::FetchAndAdd, body, Some(word(local)?))
            }
            Operation::Flush { remote, length, kind } => {
                let body = Body::Flush { remote: *remote, length: *length, kind: *kind };
                (Opcode::Flush, body, None)
            }
        })
    }
}

/// A range that takes the old value of an atomic.
fn word(entry: &ScatterGatherEntry<'_>) -> Result<LocalRange, PostError> {
    if entry.length == 8 { writable(entry) } else { Err(PostError::LocalProtection) }
}

struct Info {
    qp: u32,
    token: u64,
}

fn parse(info: &ConnectInfo, world_token: u64) -> Result<Info, FabricError> {
    let bad = |reason| FabricError::BadConnectInfo { reason };
    let bytes: &[u8; INFO_BYTES] =
        info.0.as_slice().try_into().map_err(|_| bad("its length is wrong"))?;
    let (magic, rest) = bytes.split_at(4);
    if magic != MAGIC {
        return Err(bad("it is not from a simulated device"));
    }
    if rest[0] != VERSION {
        return Err(bad("its version is unknown"));
    }
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&rest[at..at + 8]);
        u64::from_le_bytes(word)
    };
    if word(1) != world_token {
        return Err(bad("it is from another world"));
    }
    let mut qp = [0; 4];
    qp.copy_from_slice(&rest[9..13]);
    Ok(Info { qp: u32::from_le_bytes(qp), token: word(13) })
}

impl QueuePair for SimQueuePair {
    fn qp_num(&self) -> u32 {
        self.id
    }

    fn state(&self) -> QueuePairState {
        let state = self.world.lock();
        state.queue_pairs.get(&self.id).map_or(QueuePairState::Error, |record| record.state)
    }

    fn connect_info(&self) -> ConnectInfo {
        let state = self.world.lock();
        let token = state.queue_pairs.get(&self.id).map_or(0, |record| record.token);
        let mut bytes = Vec::with_capacity(INFO_BYTES);
        bytes.extend_from_slice(&MAGIC);
        bytes.push(VERSION);
        bytes.extend_from_slice(&state.world_token.to_le_bytes());
        bytes.extend_from_slice(&self.id.to_le_bytes());
        bytes.extend_from_slice(&token.to_le_bytes());
        ConnectInfo(bytes)
    }

    fn connect(&mut self, peer: &ConnectInfo, role: Role) -> Result<(), FabricError> {
        let mut state = self.world.lock();
        let info = parse(peer, state.world_token)?;
        let needed = "connecting takes a fresh one";
        let gone = FabricError::WrongState { state: QueuePairState::Error, needed };
        let record = state.queue_pairs.get_mut(&self.id).ok_or(gone)?;
        if record.state != QueuePairState::Init || record.peer.is_some() {
            return Err(FabricError::WrongState { state: record.state, needed });
        }
        record.peer = Some(PeerName { qp: info.qp, token: info.token, role });
        let from_token = record.token;
        if let Some(greeting) = record.knocks.remove(&info.qp) {
            record.early.insert(0, greeting);
        }
        record.knocks.clear();
        state.send(self.id, Packet::Hello { from_token, token: info.token, role });
        state.process_in_order(self.id);
        Ok(())
    }

    fn wait_connected(&mut self, timeout: Duration) -> Result<(), FabricError> {
        let ended = self.world.run_until(timeout, || self.state() != QueuePairState::Init);
        match (ended, self.state()) {
            (true, QueuePairState::ReadyToSend) => Ok(()),
            (true, _) => Err(FabricError::PeerGone),
            (false, _) => Err(FabricError::ConnectTimeout {
                timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
            }),
        }
    }

    fn post_send(&mut self, requests: &[WorkRequest<'_>]) -> Result<(), PostError> {
        let mut state = self.world.lock();
        let Some(record) = state.queue_pairs.get_mut(&self.id) else {
            return Err(PostError::NotReady(QueuePairState::Error));
        };
        if record.state != QueuePairState::ReadyToSend {
            return Err(PostError::NotReady(record.state));
        }
        // Allocates, as simulation may: the data-path rule is for providers on real time.
        let prepared: Result<Vec<_>, _> =
            requests.iter().map(|request| self.prepare(&request.operation)).collect();
        let batch = prepared?;
        if record.sends.len() + requests.len() > record.options.send_depth as usize {
            return Err(PostError::QueueFull);
        }
        let posted_ns = self.world.now_ns();
        let first = record.next_number;
        for (request, (opcode, body, result)) in requests.iter().zip(batch) {
            let number = record.next_number;
            record.next_number += 1;
            record.sends.push_back(SendEntry {
                number,
                wr_id: request.wr_id,
                opcode,
                signalled: request.signalled,
                posted_ns,
                body: Some(body),
                result,
            });
        }
        let (end, timeout) = (record.next_number, record.options.transport_timeout);
        let set_timer = !record.timer_set;
        record.timer_set = true;
        for number in first..end {
            let (low, high) =
                (*state.options.departure_ns.start(), *state.options.departure_ns.end());
            let delay = state.random.between(low, high);
            state.record(TraceKind::Post, self.id, number);
            state.schedule(delay, Event::Depart { qp: self.id, number });
        }
        if set_timer {
            let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
            state.schedule(timeout, Event::Timer { qp: self.id });
        }
        Ok(())
    }

    fn post_receive(&mut self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        if self.shared.is_some() {
            return Err(PostError::TooLarge { what: "receives beside a shared queue", limit: 0 });
        }
        let posted = receives(requests)?;
        let mut state = self.world.lock();
        let Some(record) = state.queue_pairs.get_mut(&self.id) else {
            return Err(PostError::NotReady(QueuePairState::Error));
        };
        if record.state == QueuePairState::Error {
            return Err(PostError::NotReady(record.state));
        }
        if record.receives.len() + posted.len() > record.options.receive_depth as usize {
            return Err(PostError::QueueFull);
        }
        record.receives.extend(posted);
        state.feed(self.id);
        Ok(())
    }

    fn revoke(&mut self) -> Result<(), FabricError> {
        let mut state = self.world.lock();
        if state.has_bug(PlantedBug::ForgetRevocation) {
            return Ok(());
        }
        if let Some(record) = state.queue_pairs.get_mut(&self.id) {
            record.deferred.clear();
        }
        state.break_queue_pair(self.id);
        Ok(())
    }
}

impl Drop for SimQueuePair {
    fn drop(&mut self) {
        let mut state = self.world.lock();
        state.place_all_deferred(self.id);
        let live = state.queue_pairs.get(&self.id).map(|record| (record.owner, record.state));
        if let Some((owner, queue_state)) = live
            && queue_state != QueuePairState::Error
            && state.is_alive(owner)
        {
            state.send(self.id, Packet::Bye);
        }
        state.queue_pairs.remove(&self.id);
    }
}
