//! The fabric objects of a simulated node: thin handles on the world's state.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::error::{system, within};
use beeline_fabric::{
    Access, AtomicScope, CompletionQueue, Device, DeviceAttributes, FabricError, LocalKey,
    MemoryRegion, PostError, ProtectionDomain, QueuePair, QueuePairOptions, QueuePairState,
    ReceiveRequest, RegionControl, RemoteKey, ScatterGatherEntry, SharedReceiveQueue,
    WorkCompletion,
};
use beeline_os::SharedMemory;
use beeline_os::memory::MemoryObject;
use rustix::event::EventfdFlags;

use crate::queue_pair::SimQueuePair;
use crate::registry::Incarnation;
use crate::state::{CompletionRecord, LocalRange, PostedReceive, QueuePairRecord, SharedRecord};
use crate::world::SimWorld;

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
            atomics: AtomicScope::Processor,
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

impl Device for SimDevice {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        let memory = SharedMemory::allocate("beeline-sim", length_bytes)
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
        within("completion queue", depth_entries, self.attributes.max_completion_queue_depth)?;
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
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
        within("shared receive queue", depth, self.attributes.max_queue_depth)?;
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
        within("send queue", options.send_depth, most)?;
        within("receive queue", options.receive_depth, most)?;
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
            Err(error) => Err(system("reading an event")(error)),
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
pub(crate) fn writable(entry: &ScatterGatherEntry<'_>) -> Result<LocalRange, PostError> {
    if !entry.region.access().contains(Access::LOCAL_WRITE) {
        return Err(PostError::LocalProtection);
    }
    readable(entry)
}

pub(crate) fn readable(entry: &ScatterGatherEntry<'_>) -> Result<LocalRange, PostError> {
    if !entry.region.contains(entry.offset, entry.length) {
        return Err(PostError::LocalProtection);
    }
    Ok(LocalRange { region: entry.region.clone(), offset: entry.offset, length: entry.length })
}

pub(crate) fn receives(requests: &[ReceiveRequest<'_>]) -> Result<Vec<PostedReceive>, PostError> {
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
