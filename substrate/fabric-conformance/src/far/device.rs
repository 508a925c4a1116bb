//! Stand-ins for the objects of a node in the other host.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{
    Access, AtomicScope, CompletionQueue, ConnectInfo, Device, DeviceAttributes, FabricError,
    FlushKind, LocalData, LocalKey, MemoryRegion, Operation, PostError, ProtectionDomain,
    QueuePair, QueuePairOptions, QueuePairState, ReceiveRequest, RegionControl, RemoteAddress,
    RemoteKey, Role, ScatterGatherEntry, SharedReceiveQueue, WorkCompletion, WorkRequest,
};
use beeline_os::SharedMemory;
use beeline_os::memory::{MemoryObject, Persistence};

use super::wire::{
    Answer, Call, Kind, Local, Range, Receive, Request, Work, completion_of, lasting, shape,
    state_of,
};
use super::{ask, ask_with, forget, mirrored, unexpected, with_mirrors};

fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn number(call: &Call) -> Result<u64, FabricError> {
    match ask(call)? {
        Answer::Number(number) => Ok(number),
        other => Err(unexpected(&other)),
    }
}

fn done(call: &Call) -> Result<(), FabricError> {
    match ask(call)? {
        Answer::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

/// A device.
#[derive(Debug)]
pub(super) struct FarDevice {
    number: u64,
    attributes: DeviceAttributes,
}

impl FarDevice {
    pub(super) fn open() -> Result<Arc<dyn Device>, FabricError> {
        let (number, found) = match ask(&Call::OpenDevice)? {
            Answer::Device { number, attributes } => (number, attributes),
            other => return Err(unexpected(&other)),
        };
        let [message, sending] = found.sizes;
        let [inline, gather, queue, completion] = found.counts;
        let attributes = DeviceAttributes {
            provider: lasting(found.provider),
            max_message_bytes: message,
            max_send_bytes: sending,
            max_inline_bytes: inline,
            max_scatter_gather_entries: gather,
            max_queue_depth: queue,
            max_completion_queue_depth: completion,
            one_sided: found.one_sided,
            atomics: if found.with_processor {
                AtomicScope::Processor
            } else {
                AtomicScope::Device
            },
            persistent_flush: lasting(found.persistent_flush),
        };
        Ok(Arc::new(Self { number, attributes }))
    }
}

impl Drop for FarDevice {
    fn drop(&mut self) {
        forget(Kind::Device, self.number);
    }
}

impl Device for FarDevice {
    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn allocate_memory(&self, length: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        let mirror =
            SharedMemory::allocate("beeline-conformance-mirror", length).map_err(|error| {
                FabricError::System { action: "allocating a mirror", source: error.into() }
            })?;
        let number = number(&Call::AllocateMemory { device: self.number, length })?;
        let base = mirror.base().as_ptr() as usize;
        with_mirrors(|mirrors| mirrors.insert(base, number));
        Ok(Arc::new(FarMemory { number, mirror }))
    }

    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        let number = number(&Call::Domain { device: self.number })?;
        Ok(Arc::new(FarDomain { number, provider: self.attributes.provider }))
    }

    fn create_completion_queue(&self, depth: u32) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        let number = number(&Call::CompletionQueue { device: self.number, depth })?;
        // A descriptor that is never readable: a far event is waited for by `wait_event`.
        let nothing = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
        let nothing = nothing.map_err(|error| FabricError::System {
            action: "making a descriptor",
            source: error.into(),
        })?;
        Ok(Rc::new(FarQueue { number, nothing }))
    }
}

/// Memory there, and its mirror here.
#[derive(Debug)]
struct FarMemory {
    number: u64,
    mirror: SharedMemory,
}

impl Drop for FarMemory {
    fn drop(&mut self) {
        let base = self.mirror.base().as_ptr() as usize;
        with_mirrors(|mirrors| mirrors.remove(&base));
        forget(Kind::Memory, self.number);
    }
}

// SAFETY: every promise is kept by the mirror, which lives as long as this one.
unsafe impl MemoryObject for FarMemory {
    fn base(&self) -> NonNull<u8> {
        self.mirror.base()
    }

    fn length_bytes(&self) -> usize {
        self.mirror.length_bytes()
    }
}

/// A protection domain.
#[derive(Debug)]
struct FarDomain {
    number: u64,
    provider: &'static str,
}

impl FarDomain {
    fn foreign(&self) -> FabricError {
        FabricError::Unsupported { provider: self.provider, what: "objects of another host" }
    }
}

impl Drop for FarDomain {
    fn drop(&mut self) {
        forget(Kind::Domain, self.number);
    }
}

fn far_queue(queue: &Rc<dyn CompletionQueue>) -> Option<u64> {
    queue.as_any().downcast_ref::<FarQueue>().map(|queue| queue.number)
}

impl ProtectionDomain for FarDomain {
    fn register(
        &self,
        memory: Arc<dyn MemoryObject>,
        access: Access,
    ) -> Result<MemoryRegion, FabricError> {
        let there = mirrored(memory.as_ref()).ok_or_else(|| self.foreign())?;
        let register = Call::Register {
            domain: self.number,
            memory: there,
            access: access.bits(),
            survives: memory.persistence() == Persistence::CacheLine,
        };
        match ask(&register)? {
            Answer::Region { number, local, remote } => {
                let control = Arc::new(FarRegion { number });
                let (local, remote) = (LocalKey(local), RemoteKey(remote));
                Ok(MemoryRegion::new(memory, access, local, remote, control))
            }
            other => Err(unexpected(&other)),
        }
    }

    fn create_shared_receive_queue(
        &self,
        depth: u32,
    ) -> Result<Rc<dyn SharedReceiveQueue>, FabricError> {
        let number = number(&Call::SharedQueue { domain: self.number, depth })?;
        Ok(Rc::new(FarSharedQueue { number }))
    }

    fn create_queue_pair(
        &self,
        send: &Rc<dyn CompletionQueue>,
        receive: &Rc<dyn CompletionQueue>,
        shared: Option<&Rc<dyn SharedReceiveQueue>>,
        options: QueuePairOptions,
    ) -> Result<Box<dyn QueuePair>, FabricError> {
        let queue = |queue| far_queue(queue).ok_or_else(|| self.foreign());
        let shared = shared
            .map(|queue| {
                let queue = queue.as_any().downcast_ref::<FarSharedQueue>();
                queue.map(|queue| queue.number).ok_or_else(|| self.foreign())
            })
            .transpose()?;
        let pair = Call::Pair {
            domain: self.number,
            send: queue(send)?,
            receive: queue(receive)?,
            shared,
            shape: shape(options),
        };
        match ask(&pair)? {
            Answer::Pair { number, qp_num } => Ok(Box::new(FarPair {
                number,
                qp_num,
                _queues: [Rc::clone(send), Rc::clone(receive)],
            })),
            other => Err(unexpected(&other)),
        }
    }
}

/// What is kept of a region.
#[derive(Debug)]
struct FarRegion {
    number: u64,
}

impl RegionControl for FarRegion {
    fn revoke(&self, _region: &MemoryRegion) -> Result<(), FabricError> {
        done(&Call::RevokeRegion { region: self.number })
    }

    fn deregister(&self, _local: LocalKey, _remote: RemoteKey) {
        forget(Kind::Region, self.number);
    }
}

fn range(entry: &ScatterGatherEntry<'_>) -> Result<Range, PostError> {
    let region = entry.region.control().downcast_ref::<FarRegion>();
    let region = region.ok_or(PostError::LocalProtection)?.number;
    Ok(Range { region, offset: entry.offset, length: entry.length })
}

fn local(data: &LocalData<'_>) -> Result<Local, PostError> {
    match data {
        LocalData::Inline(bytes) => Ok(Local::Inline(bytes.to_vec())),
        LocalData::Gather(entries) => {
            Ok(Local::Gather(entries.iter().map(range).collect::<Result<_, _>>()?))
        }
    }
}

fn place(remote: RemoteAddress) -> (u64, u64) {
    (remote.key.0, remote.offset)
}

fn work(operation: &Operation<'_>) -> Result<Work, PostError> {
    Ok(match operation {
        Operation::Write { local: data, remote } => Work::Write(local(data)?, place(*remote), None),
        Operation::WriteWithImmediate { local: data, remote, immediate } => {
            Work::Write(local(data)?, place(*remote), Some(*immediate))
        }
        Operation::Read { local, remote } => Work::Read(range(local)?, place(*remote)),
        Operation::Send { local: data, immediate } => Work::Send(local(data)?, *immediate),
        Operation::CompareAndSwap { local, remote, expected, desired } => {
            Work::CompareAndSwap(range(local)?, place(*remote), (*expected, *desired))
        }
        Operation::FetchAndAdd { local, remote, addend } => {
            Work::FetchAndAdd(range(local)?, place(*remote), *addend)
        }
        Operation::Flush { remote, length, kind } => {
            Work::Flush(place(*remote), *length, *kind == FlushKind::Persistent)
        }
    })
}

fn receives(requests: &[ReceiveRequest<'_>]) -> Result<Vec<Receive>, PostError> {
    let one = |request: &ReceiveRequest<'_>| {
        let buffer = request.buffer.as_ref().map(range).transpose()?;
        Ok(Receive { wr_id: request.wr_id, buffer })
    };
    requests.iter().map(one).collect()
}

/// Makes a call that posts.
fn post(call: &Call) -> Result<(), PostError> {
    match ask(call) {
        Ok(Answer::Done) => Ok(()),
        Ok(Answer::Post(refusal)) => Err(refusal.into()),
        // The other host is gone, and the connection with it.
        _ => Err(PostError::NotReady(QueuePairState::Error)),
    }
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct FarQueue {
    number: u64,
    nothing: OwnedFd,
}

impl FarQueue {
    /// Waits there until the queue's event is readable.
    pub(super) fn is_readable(&self, timeout: Duration) -> Result<bool, FabricError> {
        Ok(number(&Call::Readable { queue: self.number, us: us(timeout) })? == 1)
    }

    fn completions(&self, call: &Call, into: &mut [WorkCompletion]) -> Result<usize, FabricError> {
        match ask_with(call, &[])?.0 {
            Answer::Completions(found) if found.len() <= into.len() => {
                for (slot, found) in into.iter_mut().zip(&found) {
                    *slot = completion_of(*found);
                }
                Ok(found.len())
            }
            other => Err(unexpected(&other)),
        }
    }
}

impl Drop for FarQueue {
    fn drop(&mut self) {
        forget(Kind::CompletionQueue, self.number);
    }
}

impl CompletionQueue for FarQueue {
    fn poll(&self, completions: &mut [WorkCompletion]) -> Result<usize, FabricError> {
        let most = completions.len();
        self.completions(&Call::Poll { queue: self.number, most }, completions)
    }

    fn arm(&self) -> Result<(), FabricError> {
        done(&Call::Arm { queue: self.number })
    }

    fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.nothing.as_fd()
    }

    fn acknowledge(&self) -> Result<(), FabricError> {
        done(&Call::Acknowledge { queue: self.number })
    }

    fn wait(
        &self,
        completions: &mut [WorkCompletion],
        timeout: Duration,
    ) -> Result<usize, FabricError> {
        let wait = Call::Wait { queue: self.number, most: completions.len(), us: us(timeout) };
        self.completions(&wait, completions)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A shared receive queue.
#[derive(Debug)]
struct FarSharedQueue {
    number: u64,
}

impl Drop for FarSharedQueue {
    fn drop(&mut self) {
        forget(Kind::SharedQueue, self.number);
    }
}

impl SharedReceiveQueue for FarSharedQueue {
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        post(&Call::PostShared { queue: self.number, requests: receives(requests)? })
    }

    fn posted(&self) -> u32 {
        let posted = number(&Call::Posted { queue: self.number });
        posted.ok().and_then(|posted| u32::try_from(posted).ok()).unwrap_or(0)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A queue pair.
#[derive(Debug)]
struct FarPair {
    number: u64,
    qp_num: u32,
    /// They go after it.
    _queues: [Rc<dyn CompletionQueue>; 2],
}

impl Drop for FarPair {
    fn drop(&mut self) {
        forget(Kind::Pair, self.number);
    }
}

impl QueuePair for FarPair {
    fn qp_num(&self) -> u32 {
        self.qp_num
    }

    fn state(&self) -> QueuePairState {
        match ask(&Call::State { pair: self.number }) {
            Ok(Answer::State(code)) => state_of(code),
            _ => QueuePairState::Error,
        }
    }

    fn connect_info(&self) -> ConnectInfo {
        match ask(&Call::Info { pair: self.number }) {
            Ok(Answer::Bytes(bytes)) => ConnectInfo(bytes),
            _ => ConnectInfo(Vec::new()),
        }
    }

    fn connect(&mut self, peer: &ConnectInfo, role: Role) -> Result<(), FabricError> {
        let (info, active) = (peer.0.clone(), role == Role::Active);
        done(&Call::Connect { pair: self.number, info, active })
    }

    fn wait_connected(&mut self, timeout: Duration) -> Result<(), FabricError> {
        done(&Call::WaitConnected { pair: self.number, us: us(timeout) })
    }

    fn post_send(&mut self, requests: &[WorkRequest<'_>]) -> Result<(), PostError> {
        let one = |request: &WorkRequest<'_>| {
            let work = work(&request.operation)?;
            Ok(Request { wr_id: request.wr_id, signalled: request.signalled, work })
        };
        let requests = requests.iter().map(one).collect::<Result<_, PostError>>()?;
        post(&Call::PostSend { pair: self.number, requests })
    }

    fn post_receive(&mut self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        post(&Call::PostReceive { pair: self.number, requests: receives(requests)? })
    }

    fn revoke(&mut self) -> Result<(), FabricError> {
        done(&Call::RevokePair { pair: self.number })
    }
}
