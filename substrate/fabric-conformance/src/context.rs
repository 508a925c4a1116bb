//! Nodes, completion queues with an inbox, and connected endpoints: what the items are made of.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, Device, MemoryRegion, Operation, ProtectionDomain, QueuePair,
    QueuePairOptions, QueuePairState, ReceiveRequest, RemoteAddress, Role, ScatterGatherEntry,
    SharedReceiveQueue, Status, WorkCompletion, WorkRequest,
};
use beeline_os::memory::{MemoryObject, copy_in, copy_out};

use crate::harness::{Harness, Stop, Support, ensure_eq};

/// No correct provider on a loaded machine takes longer for anything an item waits for.
pub(crate) const BOUND: Duration = Duration::from_secs(30);

/// How long sends wait for receives where one end is in another host and an item says nothing of it;
/// as long as devices wait by themselves.
const FAR_RECEIVES: Duration = Duration::from_millis(3_500);

/// All rights a region can have.
pub(crate) const ALL: Access = Access::all();

/// The harness of one item, and where a peer process finds the same one.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    pub(crate) harness: &'a dyn Harness,
    /// The caller's module, which tells suites of one test binary apart.
    pub(crate) module: &'static str,
}

impl<'a> Context<'a> {
    /// The context of one run of an item.
    #[must_use]
    pub fn new(harness: &'a dyn Harness, module: &'static str) -> Self {
        Self { harness, module }
    }

    /// True when `BEELINE_DEEP=1` asks for the long form.
    pub(crate) fn deep() -> bool {
        std::env::var("BEELINE_DEEP").is_ok_and(|value| value == "1")
    }

    /// Skips the item when the support is missing.
    pub(crate) fn require(support: Support) -> Result<(), Stop> {
        support.map_err(Stop::skipped)
    }

    /// Skips the item unless threads may share a device.
    pub(crate) fn require_threads(&self) -> Result<(), Stop> {
        Self::require(self.harness.capabilities().threads)
    }

    /// A new node.
    pub(crate) fn node(&self) -> Result<Node, Stop> {
        let device = match crate::far::next_device() {
            Some(device) => device?,
            None => self.harness.open_device()?,
        };
        let domain = device.allocate_protection_domain()?;
        Ok(Node { device, domain })
    }

    /// Two nodes with one connection between them.
    pub(crate) fn pair(&self) -> Result<Pair, Stop> {
        self.pair_with(EndpointOptions::default())
    }

    /// As [`Context::pair`]; `options` shape both ends.
    pub(crate) fn pair_with(&self, options: EndpointOptions) -> Result<Pair, Stop> {
        let (near, far) = (self.node()?, self.node()?);
        let (a, b) = self.connected(&near, &far, options)?;
        Ok(Pair { near, far, a, b })
    }

    /// One more connection between two nodes.
    pub(crate) fn connected(
        &self,
        near: &Node,
        far: &Node,
        options: EndpointOptions,
    ) -> Result<(Endpoint, Endpoint), Stop> {
        let mut a = near.endpoint(options)?;
        let mut b = far.endpoint(options)?;
        self.connect(&mut a, &mut b)?;
        Ok((a, b))
    }

    /// Connects two endpoints of this thread.
    pub(crate) fn connect(&self, a: &mut Endpoint, b: &mut Endpoint) -> Result<(), Stop> {
        let (info_a, info_b) = (a.qp.connect_info(), b.qp.connect_info());
        b.qp.connect(&info_a, Role::Passive)?;
        a.qp.connect(&info_b, Role::Active)?;
        let ready = QueuePairState::ReadyToSend;
        self.pump(&[&a.queue, &b.queue], BOUND, "both ends to be connected", || {
            a.qp.state() == ready && b.qp.state() == ready
        })
    }

    /// Polls all `queues` into their inboxes until `done`, at most for `bound`.
    pub(crate) fn pump(
        &self,
        queues: &[&Queue],
        bound: Duration,
        what: &str,
        mut done: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        let start = self.harness.now();
        loop {
            let mut arrived = 0;
            for queue in queues {
                arrived += queue.drain()?;
            }
            if done() {
                return Ok(());
            }
            if self.harness.now().saturating_sub(start) > bound {
                return Err(Stop::failed(format!("waited {bound:?} in vain for {what}")));
            }
            if arrived == 0 {
                self.harness.idle();
            }
        }
    }

    /// Lets `duration` pass while polling `queues`.
    pub(crate) fn let_pass(&self, queues: &[&Queue], duration: Duration) -> Result<(), Stop> {
        let end = self.harness.now() + duration;
        self.pump(queues, duration + BOUND, "time to pass", || self.harness.now() >= end)
    }

    /// The next `count` completions of `queue`; `others` are polled meanwhile.
    pub(crate) fn completions(
        &self,
        queue: &Queue,
        count: usize,
        others: &[&Queue],
    ) -> Result<Vec<WorkCompletion>, Stop> {
        let mut all = vec![queue];
        all.extend_from_slice(others);
        let what = format!("{count} completions");
        self.pump(&all, BOUND, &what, || queue.inbox.borrow().len() >= count).map_err(|stop| {
            let inbox = queue.inbox.borrow();
            let last = inbox.back().map(|last| format!("; the last is {last:?}"));
            let last = last.unwrap_or_default();
            Stop::failed(format!("{stop}; {} of {count} arrived{last}", inbox.len()))
        })?;
        Ok(queue.inbox.borrow_mut().drain(..count).collect())
    }

    /// The next completion of `queue`; `others` are polled meanwhile.
    pub(crate) fn completion(
        &self,
        queue: &Queue,
        others: &[&Queue],
    ) -> Result<WorkCompletion, Stop> {
        let mut all = self.completions(queue, 1, others)?;
        all.pop().ok_or_else(|| Stop::failed("a completion was counted and is not there"))
    }

    /// As [`Context::completion`]; fails unless it succeeded for `wr_id`.
    pub(crate) fn success(
        &self,
        queue: &Queue,
        wr_id: u64,
        others: &[&Queue],
    ) -> Result<WorkCompletion, Stop> {
        let completion = self.completion(queue, others)?;
        ensure_eq!(completion.status, Status::Success, "status of {completion:?}");
        ensure_eq!(completion.wr_id, wr_id, "request of {completion:?}");
        Ok(completion)
    }

    /// Posts one signalled request and returns its completion.
    pub(crate) fn execute(
        &self,
        endpoint: &mut Endpoint,
        operation: Operation<'_>,
        others: &[&Queue],
    ) -> Result<WorkCompletion, Stop> {
        let wr_id = endpoint.next_id();
        endpoint.qp.post_send(&[WorkRequest::new(wr_id, operation)])?;
        let completion = self.completion(&endpoint.queue, others)?;
        ensure_eq!(completion.wr_id, wr_id, "request of {completion:?}");
        Ok(completion)
    }

    /// As [`Context::execute`]; fails unless it succeeded.
    pub(crate) fn perform(
        &self,
        endpoint: &mut Endpoint,
        operation: Operation<'_>,
        others: &[&Queue],
    ) -> Result<WorkCompletion, Stop> {
        let completion = self.execute(endpoint, operation, others)?;
        ensure_eq!(completion.status, Status::Success, "status of {completion:?}");
        Ok(completion)
    }

    /// Waits until both ends are in the error state.
    pub(crate) fn both_broken(&self, a: &Endpoint, b: &Endpoint) -> Result<(), Stop> {
        self.pump(&[&a.queue, &b.queue], BOUND, "both ends to be in the error state", || {
            a.qp.state() == QueuePairState::Error && b.qp.state() == QueuePairState::Error
        })
    }
}

/// A device with a protection domain.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) domain: Arc<dyn ProtectionDomain>,
}

impl Node {
    /// A region over fresh zeroed memory.
    pub(crate) fn region(&self, length_bytes: usize, access: Access) -> Result<MemoryRegion, Stop> {
        let memory = self.device.allocate_memory(length_bytes)?;
        Ok(self.domain.register(memory, access)?)
    }

    /// A region that holds `bytes`.
    pub(crate) fn region_of(&self, bytes: &[u8], access: Access) -> Result<MemoryRegion, Stop> {
        let region = self.region(bytes.len(), access)?;
        store(&region, 0, bytes);
        Ok(region)
    }

    /// A completion queue.
    pub(crate) fn queue(&self, depth_entries: u32) -> Result<Rc<Queue>, Stop> {
        Ok(Rc::new(Queue::new(self.device.create_completion_queue(depth_entries)?)))
    }

    /// A queue pair with a completion queue of its own.
    pub(crate) fn endpoint(&self, options: EndpointOptions) -> Result<Endpoint, Stop> {
        let queue = self.queue(options.completion_depth)?;
        self.endpoint_on(&queue, None, options)
    }

    /// A queue pair on an existing completion queue.
    pub(crate) fn endpoint_on(
        &self,
        queue: &Rc<Queue>,
        shared: Option<&Rc<dyn SharedReceiveQueue>>,
        options: EndpointOptions,
    ) -> Result<Endpoint, Stop> {
        let qp = self.domain.create_queue_pair(&queue.cq, &queue.cq, shared, options.queue_pair)?;
        Ok(Endpoint { qp, queue: Rc::clone(queue), last_id: Cell::new(0) })
    }
}

/// How the endpoints of an item are made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndpointOptions {
    pub(crate) queue_pair: QueuePairOptions,
    pub(crate) completion_depth: u32,
}

impl Default for EndpointOptions {
    fn default() -> Self {
        let mut queue_pair = QueuePairOptions::default();
        if crate::far::is_there() {
            // A receive at a far end is posted by a call across the wire, beside many others.
            queue_pair.receiver_not_ready_timeout = FAR_RECEIVES;
        }
        Self { queue_pair, completion_depth: 1024 }
    }
}

/// A completion queue and what was polled from it.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) cq: Rc<dyn CompletionQueue>,
    pub(crate) inbox: RefCell<VecDeque<WorkCompletion>>,
}

impl Queue {
    pub(crate) fn new(cq: Rc<dyn CompletionQueue>) -> Self {
        Self { cq, inbox: RefCell::new(VecDeque::new()) }
    }

    /// Polls once; returns how many arrived.
    pub(crate) fn drain(&self) -> Result<usize, Stop> {
        let mut buffer = [WorkCompletion::EMPTY; 32];
        let count = self.cq.poll(&mut buffer)?;
        self.inbox.borrow_mut().extend(&buffer[..count]);
        Ok(count)
    }

    /// Completions polled and not yet taken.
    pub(crate) fn len(&self) -> usize {
        self.inbox.borrow().len()
    }

    /// Takes everything polled so far.
    pub(crate) fn take_all(&self) -> Vec<WorkCompletion> {
        self.inbox.borrow_mut().drain(..).collect()
    }
}

/// A queue pair and its completion queue.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) qp: Box<dyn QueuePair>,
    pub(crate) queue: Rc<Queue>,
    last_id: Cell<u64>,
}

impl Endpoint {
    /// A request number not used before on this endpoint.
    pub(crate) fn next_id(&self) -> u64 {
        self.last_id.set(self.last_id.get() + 1);
        self.last_id.get()
    }

    /// Posts one signalled request; returns its number.
    pub(crate) fn post(&mut self, operation: Operation<'_>) -> Result<u64, Stop> {
        let wr_id = self.next_id();
        self.qp.post_send(&[WorkRequest::new(wr_id, operation)])?;
        Ok(wr_id)
    }

    /// Posts a receive without a buffer.
    pub(crate) fn post_empty_receive(&mut self, wr_id: u64) -> Result<(), Stop> {
        Ok(self.qp.post_receive(&[ReceiveRequest { wr_id, buffer: None }])?)
    }

    /// Posts a receive into `length` bytes of `region` at `offset`.
    pub(crate) fn post_receive(
        &mut self,
        wr_id: u64,
        region: &MemoryRegion,
        offset: u64,
        length: u64,
    ) -> Result<(), Stop> {
        let buffer = Some(ScatterGatherEntry { region, offset, length });
        Ok(self.qp.post_receive(&[ReceiveRequest { wr_id, buffer }])?)
    }
}

/// Two nodes and a connection: `a` on `near`, `b` on `far`.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) near: Node,
    pub(crate) far: Node,
    pub(crate) a: Endpoint,
    pub(crate) b: Endpoint,
}

/// The whole of a region as one entry.
pub(crate) fn whole(region: &MemoryRegion) -> ScatterGatherEntry<'_> {
    ScatterGatherEntry { region, offset: 0, length: region.length_bytes() }
}

/// Part of a region as one entry.
pub(crate) fn part(region: &MemoryRegion, offset: u64, length: u64) -> ScatterGatherEntry<'_> {
    ScatterGatherEntry { region, offset, length }
}

/// A write of inline bytes.
pub(crate) fn inline_write(bytes: &[u8], remote: RemoteAddress) -> Operation<'_> {
    Operation::Write { local: beeline_fabric::LocalData::Inline(bytes), remote }
}

/// A flush that makes earlier writes visible at `remote..+length`.
pub(crate) fn visible(remote: RemoteAddress, length: u64) -> Operation<'static> {
    Operation::Flush { remote, length, kind: beeline_fabric::FlushKind::Visible }
}

/// `length` bytes of a region at `offset`.
pub(crate) fn bytes_at(region: &MemoryRegion, offset: usize, length: usize) -> Vec<u8> {
    object_bytes(region.memory().as_ref(), offset, length)
}

/// `length` bytes of a memory object at `offset`.
pub(crate) fn object_bytes(memory: &dyn MemoryObject, offset: usize, length: usize) -> Vec<u8> {
    crate::far::refresh(memory, offset, length);
    let mut bytes = vec![0; length];
    copy_out(memory, offset, &mut bytes);
    bytes
}

/// All bytes of a region.
pub(crate) fn contents(region: &MemoryRegion) -> Vec<u8> {
    bytes_at(region, 0, region.memory().length_bytes())
}

/// Stores `bytes` locally.
pub(crate) fn store(region: &MemoryRegion, offset: usize, bytes: &[u8]) {
    copy_in(region.memory().as_ref(), offset, bytes);
    crate::far::pushed(region.memory().as_ref(), offset, bytes.len());
}

/// `length` bytes that depend on `seed` and on their place.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    beeline_env::Randomness::new(seed).fill(&mut bytes);
    bytes
}
