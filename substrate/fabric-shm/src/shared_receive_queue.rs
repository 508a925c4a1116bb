//! Posted receives: a queue pair's own, and those shared by several.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};

use beeline_fabric::{
    Access, MemoryRegion, PostError, ReceiveRequest, ScatterGatherEntry, SharedReceiveQueue,
};

use crate::completion_queue::Queue;

/// One posted receive; keeps its region alive.
#[derive(Debug)]
pub(crate) struct Receive {
    pub wr_id: u64,
    buffer: Option<(MemoryRegion, u64)>,
    pub length: u64,
}

impl Receive {
    /// Errors: [`PostError::LocalProtection`].
    pub(crate) fn check(request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        match &request.buffer {
            Some(entry) => check_writable(entry),
            None => Ok(()),
        }
    }

    pub(crate) fn new(request: &ReceiveRequest<'_>) -> Self {
        let buffer = request.buffer.map(|entry| (entry.region.clone(), entry.offset));
        let length = request.buffer.map_or(0, |entry| entry.length);
        Self { wr_id: request.wr_id, buffer, length }
    }

    /// Where the bytes go: checked when posted, and the region is still held.
    pub(crate) fn place(&self) -> Option<(&MemoryRegion, u64)> {
        self.buffer.as_ref().map(|(region, offset)| (region, *offset))
    }
}

/// Errors: [`PostError::LocalProtection`].
pub(crate) fn check_writable(entry: &ScatterGatherEntry<'_>) -> Result<(), PostError> {
    let writable = entry.region.access().contains(Access::LOCAL_WRITE);
    if writable && entry.region.contains(entry.offset, entry.length) {
        Ok(())
    } else {
        Err(PostError::LocalProtection)
    }
}

/// Receives that several queue pairs take from.
#[derive(Debug)]
pub(crate) struct SharedReceives {
    depth: usize,
    pub queue: RefCell<VecDeque<Receive>>,
    /// Completion queues to wake when a receive is posted for a message that waits.
    listeners: RefCell<Vec<Weak<Queue>>>,
    /// A message found the queue empty since the last post.
    pub starved: Cell<bool>,
}

impl SharedReceives {
    pub(crate) fn listen(&self, queue: &Rc<Queue>) {
        let mut listeners = self.listeners.borrow_mut();
        listeners.retain(|listener| listener.strong_count() > 0);
        if !listeners.iter().any(|listener| std::ptr::eq(listener.as_ptr(), Rc::as_ptr(queue))) {
            listeners.push(Rc::downgrade(queue));
        }
    }
}

/// The handle.
#[derive(Debug)]
pub(crate) struct ShmSharedReceiveQueue(Rc<SharedReceives>);

impl ShmSharedReceiveQueue {
    pub(crate) fn new(depth: u32) -> Self {
        let depth = depth as usize;
        Self(Rc::new(SharedReceives {
            depth,
            queue: RefCell::new(VecDeque::with_capacity(depth)),
            listeners: RefCell::new(Vec::new()),
            starved: Cell::new(false),
        }))
    }

    pub(crate) fn of(queue: &dyn SharedReceiveQueue) -> Option<Rc<SharedReceives>> {
        queue.as_any().downcast_ref::<Self>().map(|queue| Rc::clone(&queue.0))
    }
}

impl SharedReceiveQueue for ShmSharedReceiveQueue {
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let mut queue = self.0.queue.borrow_mut();
        if queue.len() + requests.len() > self.0.depth {
            return Err(PostError::QueueFull);
        }
        requests.iter().try_for_each(Receive::check)?;
        queue.extend(requests.iter().map(Receive::new));
        if self.0.starved.replace(false) {
            for listener in self.0.listeners.borrow().iter().filter_map(Weak::upgrade) {
                listener.signal_if_armed();
            }
        }
        Ok(())
    }

    fn posted(&self) -> u32 {
        u32::try_from(self.0.queue.borrow().len()).unwrap_or(u32::MAX)
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
