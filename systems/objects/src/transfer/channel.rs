//! A queue pair with its buffers: messages out and in.
//!
//! Buffers and registrations outlive a connection: they belong to the device's [`Context`], which
//! hands a set of buffers to the next connection when one ends (spec section 3.3).

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, FabricError, LocalData, MemoryRegion, Opcode,
    Operation, ProtectionDomain, QueuePair, QueuePairOptions, ReceiveRequest, RemoteAddress, Role,
    ScatterGatherEntry, WorkCompletion, WorkRequest,
};
use beeline_os::memory::{MemoryObject, copy_across, copy_in, copy_out};

use super::message::{HEADER_BYTES, Header};
use super::{Learner, TransferError};

/// Receives posted: more than a window of pieces, the rest for messages without one.
const RECEIVES: u32 = 16;
/// Sends under way.
const SENDS: u32 = 12;
/// Pieces that may be unacknowledged.
pub(crate) const WINDOW_PIECES: u64 = 8;
/// Bytes of one buffer.
const SLOT_BYTES: u64 = 64 << 10;
/// Sets of buffers kept for connections to come (1.75 MiB each); those of a burst go when it ends.
const MOST_SPARE: usize = 8;
/// One-sided reads under way, and the bytes of one.
const READS: u32 = 4;
const READ_BYTES: u64 = 32 << 20;
const READ_TAG: u64 = 1 << 32;

const _: () = assert!(WINDOW_PIECES < RECEIVES as u64, "a window of pieces finds its receives");

/// A device, and what is kept for its connections.
pub(crate) struct Context {
    pub device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
    /// Segments by number.
    regions: Mutex<HashMap<u32, MemoryRegion>>,
    /// Buffers of connections that ended.
    spare: Mutex<Vec<MemoryRegion>>,
    /// What transfers over it took.
    pub learner: Mutex<Learner>,
    pub registrations: AtomicU64,
    pub reused_buffers: AtomicU64,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("device", &self.device).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    pub(crate) fn new(device: Arc<dyn Device>) -> Result<Self, FabricError> {
        let domain = device.allocate_protection_domain()?;
        Ok(Self {
            device,
            domain,
            regions: Mutex::default(),
            spare: Mutex::default(),
            learner: Mutex::default(),
            registrations: AtomicU64::new(0),
            reused_buffers: AtomicU64::new(0),
        })
    }

    /// The region of a segment: peers read it, and reads of ours are placed in it.
    pub(crate) fn segment(
        &self,
        number: u32,
        memory: &Arc<dyn MemoryObject>,
    ) -> Result<MemoryRegion, FabricError> {
        let mut regions = lock(&self.regions);
        if let Some(region) = regions.get(&number) {
            return Ok(region.clone());
        }
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let region = self.domain.register(Arc::clone(memory), access)?;
        self.registrations.fetch_add(1, Ordering::Relaxed);
        regions.insert(number, region.clone());
        Ok(region)
    }

    /// Gives up the regions of segments that are gone.
    pub(crate) fn sweep(&self, lives: impl Fn(u32) -> bool) {
        lock(&self.regions).retain(|number, _| lives(*number));
    }

    /// Gives up buffers that no connection uses.
    pub(crate) fn forget_buffers(&self) {
        lock(&self.spare).clear();
    }

    /// Segments registered.
    pub(crate) fn registered(&self) -> usize {
        lock(&self.regions).len()
    }

    fn buffers(&self) -> Result<MemoryRegion, FabricError> {
        if let Some(region) = lock(&self.spare).pop() {
            self.reused_buffers.fetch_add(1, Ordering::Relaxed);
            return Ok(region);
        }
        let bytes = u64::from(RECEIVES + SENDS) * SLOT_BYTES;
        let memory = self.device.allocate_memory(bytes as usize)?;
        self.domain.register(memory, Access::LOCAL_WRITE)
    }
}

/// A message that arrived, in its receive buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrived {
    pub header: Header,
    slot: u32,
    length: u64,
}

/// What polling found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub messages: Vec<Arrived>,
    /// One-sided reads that are done.
    pub reads: u32,
}

/// A queue pair before it is connected.
pub(crate) struct Line {
    context: Arc<Context>,
    pair: Box<dyn QueuePair>,
    queue: Rc<dyn CompletionQueue>,
    buffers: MemoryRegion,
}

impl Line {
    /// A queue pair with its receives posted.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, TransferError> {
        let queue = context.device.create_completion_queue(128)?;
        let options =
            QueuePairOptions { send_depth: 64, receive_depth: 64, ..QueuePairOptions::default() };
        let pair = context.domain.create_queue_pair(&queue, &queue, None, options)?;
        let buffers = context.buffers()?;
        Ok(Self { context: Arc::clone(context), pair, queue, buffers })
    }

    pub(crate) fn info(&self) -> ConnectInfo {
        self.pair.connect_info()
    }

    /// Connects to the peer; the channel may be used at once.
    pub(crate) fn connect(
        mut self,
        peer: &ConnectInfo,
        role: Role,
        patience: Option<Duration>,
    ) -> Result<Channel, TransferError> {
        let slot_bytes = SLOT_BYTES.min(self.context.device.attributes().max_send_bytes);
        for slot in 0..RECEIVES {
            post_receive(&mut *self.pair, &self.buffers, slot)?;
        }
        self.pair.connect(peer, role)?;
        if let Some(patience) = patience {
            self.pair.wait_connected(patience)?;
        }
        Ok(Channel {
            pair: Some(self.pair),
            queue: self.queue,
            buffers: self.buffers,
            context: self.context,
            slot_bytes,
            free: (RECEIVES..RECEIVES + SENDS).collect(),
            reads: 0,
            held: None,
            completions: [WorkCompletion::EMPTY; 32],
        })
    }
}

fn full() -> TransferError {
    TransferError::Protocol { what: "a queue is full that its bounds keep from filling" }
}

fn post_receive(
    pair: &mut dyn QueuePair,
    buffers: &MemoryRegion,
    slot: u32,
) -> Result<(), TransferError> {
    let buffer = ScatterGatherEntry {
        region: buffers,
        offset: u64::from(slot) * SLOT_BYTES,
        length: SLOT_BYTES,
    };
    let request = ReceiveRequest { wr_id: u64::from(slot), buffer: Some(buffer) };
    pair.post_receive(&[request]).map_err(|_| full())
}

/// A request that is posted together with the next one.
enum Held {
    Send { slot: u32, length: u64 },
    Read { target: MemoryRegion, offset: u64, length: u64, remote: RemoteAddress },
}

impl Held {
    fn entry<'a>(&'a self, buffers: &'a MemoryRegion) -> ScatterGatherEntry<'a> {
        match self {
            Self::Send { slot, length } => ScatterGatherEntry {
                region: buffers,
                offset: u64::from(*slot) * SLOT_BYTES,
                length: *length,
            },
            Self::Read { target, offset, length, .. } => {
                ScatterGatherEntry { region: target, offset: *offset, length: *length }
            }
        }
    }

    fn request<'a>(&self, entry: &'a [ScatterGatherEntry<'a>; 1]) -> WorkRequest<'a> {
        match self {
            Self::Send { slot, .. } => {
                let local = LocalData::Gather(entry);
                let operation = Operation::Send { local, immediate: None };
                WorkRequest::new(u64::from(*slot), operation)
            }
            Self::Read { remote, .. } => {
                let [local] = *entry;
                WorkRequest::new(READ_TAG, Operation::Read { local, remote: *remote })
            }
        }
    }
}

/// See the module's documentation. Stays on its thread.
pub(crate) struct Channel {
    /// Taken on drop, before the buffers go to the next connection.
    pair: Option<Box<dyn QueuePair>>,
    queue: Rc<dyn CompletionQueue>,
    buffers: MemoryRegion,
    context: Arc<Context>,
    slot_bytes: u64,
    free: Vec<u32>,
    reads: u32,
    /// Posted with the next request: one wake-up of the peer instead of two.
    held: Option<Held>,
    completions: [WorkCompletion; 32],
}

impl Drop for Channel {
    fn drop(&mut self) {
        // With its queue pair gone no peer reaches the buffers, which never had remote rights.
        drop(self.pair.take());
        let mut spare = lock(&self.context.spare);
        if spare.len() < MOST_SPARE {
            spare.push(self.buffers.clone());
        }
    }
}

impl Channel {
    /// Bytes of the longest piece.
    pub(crate) fn piece_bytes(&self) -> u64 {
        self.slot_bytes - HEADER_BYTES as u64
    }

    /// Whether a message that can wait may be sent: two buffers are left for those that cannot.
    pub(crate) fn can_send(&self) -> bool {
        self.free.len() > 2
    }

    /// Sends a message, with a piece of an object behind it.
    pub(crate) fn send(
        &mut self,
        header: &Header,
        piece: Option<(&MemoryRegion, u64, u64)>,
    ) -> Result<(), TransferError> {
        let send = self.prepare(header, piece)?;
        self.post(send)
    }

    /// Sends a message together with the next request, or by [`Channel::flush`].
    pub(crate) fn send_ahead(&mut self, header: &Header) -> Result<(), TransferError> {
        let send = self.prepare(header, None)?;
        self.hold(send)
    }

    fn prepare(
        &mut self,
        header: &Header,
        piece: Option<(&MemoryRegion, u64, u64)>,
    ) -> Result<Held, TransferError> {
        let slot = self.free.pop().ok_or_else(full)?;
        let at = u64::from(slot) * SLOT_BYTES;
        let memory = &**self.buffers.memory();
        copy_in(memory, at as usize, &header.encode());
        let mut length = HEADER_BYTES as u64;
        if let Some((source, offset, bytes)) = piece {
            assert!(bytes <= self.piece_bytes(), "a piece fits its buffer");
            let target = (memory, at as usize + HEADER_BYTES);
            copy_across((&**source.memory(), offset as usize), target, bytes as usize);
            length += bytes;
        }
        Ok(Held::Send { slot, length })
    }

    fn hold(&mut self, held: Held) -> Result<(), TransferError> {
        self.flush()?;
        self.held = Some(held);
        Ok(())
    }

    /// Posts what waits for the next request.
    pub(crate) fn flush(&mut self) -> Result<(), TransferError> {
        match self.held.take() {
            Some(held) => self.post(held),
            None => Ok(()),
        }
    }

    /// Posts a request, behind what waits for it.
    fn post(&mut self, last: Held) -> Result<(), TransferError> {
        let Some(pair) = &mut self.pair else { return Err(full()) };
        let entry = [last.entry(&self.buffers)];
        let posted = match self.held.take() {
            None => pair.post_send(&[last.request(&entry)]),
            Some(first) => {
                let ahead = [first.entry(&self.buffers)];
                pair.post_send(&[first.request(&ahead), last.request(&entry)])
            }
        };
        posted.map_err(|_| full())
    }

    /// Reads from the peer's memory; posted with the next request, or by [`Channel::flush`]. False when
    /// as many reads as may be are under way.
    pub(crate) fn read(
        &mut self,
        target: &MemoryRegion,
        offset: u64,
        length: u64,
        remote: RemoteAddress,
    ) -> Result<bool, TransferError> {
        if self.reads >= READS {
            return Ok(false);
        }
        self.reads += 1;
        let read = Held::Read { target: target.clone(), offset, length, remote };
        if self.held.is_some() {
            self.post(read)?
        } else {
            self.hold(read)?
        }
        Ok(true)
    }

    /// Bytes of one read.
    pub(crate) fn read_bytes(&self) -> u64 {
        READ_BYTES.min(self.context.device.attributes().max_message_bytes)
    }

    /// Takes what arrived; waits for it up to `patience`.
    pub(crate) fn poll(&mut self, patience: Duration) -> Result<Found, TransferError> {
        let count = if patience.is_zero() {
            self.queue.poll(&mut self.completions)?
        } else {
            self.queue.wait(&mut self.completions, patience)?
        };
        let mut found = Found::default();
        for completion in &self.completions[..count] {
            if !completion.is_success() {
                return Err(TransferError::Peer { status: completion.status });
            }
            match completion.opcode {
                Opcode::Read => {
                    self.reads -= 1;
                    found.reads += 1;
                }
                Opcode::Receive => {
                    let slot = u32::try_from(completion.wr_id).unwrap_or(0);
                    let mut header = [0; HEADER_BYTES];
                    let start = (u64::from(slot) * SLOT_BYTES) as usize;
                    copy_out(&**self.buffers.memory(), start, &mut header);
                    let whole = completion.length >= HEADER_BYTES as u64;
                    let header = Header::decode(&header).filter(|_| whole);
                    let what = "a message that is none";
                    let header = header.ok_or(TransferError::Protocol { what })?;
                    let length = completion.length - HEADER_BYTES as u64;
                    found.messages.push(Arrived { header, slot, length });
                }
                _ => self.free.push(u32::try_from(completion.wr_id).unwrap_or(0)),
            }
        }
        Ok(found)
    }

    /// Bytes behind a message's header.
    pub(crate) fn piece_length(arrived: &Arrived) -> u64 {
        arrived.length
    }

    /// Copies a piece to its place.
    pub(crate) fn place(&self, arrived: &Arrived, target: &MemoryRegion, offset: u64) {
        let start = (u64::from(arrived.slot) * SLOT_BYTES) as usize + HEADER_BYTES;
        let source = (&**self.buffers.memory(), start);
        copy_across(source, (&**target.memory(), offset as usize), arrived.length as usize);
    }

    /// Copies a piece out.
    pub(crate) fn take(&self, arrived: &Arrived) -> Vec<u8> {
        let start = (u64::from(arrived.slot) * SLOT_BYTES) as usize + HEADER_BYTES;
        let mut bytes = vec![0; arrived.length as usize];
        copy_out(&**self.buffers.memory(), start, &mut bytes);
        bytes
    }

    /// Posts a message's receive again.
    pub(crate) fn done_with(&mut self, arrived: &Arrived) -> Result<(), TransferError> {
        let Some(pair) = &mut self.pair else { return Err(full()) };
        post_receive(&mut **pair, &self.buffers, arrived.slot)
    }
}
