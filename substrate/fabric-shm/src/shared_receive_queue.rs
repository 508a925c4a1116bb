//! Receives that several queue pairs take from.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use beeline_fabric::{PostError, ReceiveRequest, SharedReceiveQueue};

use crate::completion_queue::Queue;
use crate::receives::Receives;

/// Receives that several queue pairs take from.
#[derive(Debug)]
pub(crate) struct SharedReceives {
    depth: usize,
    pub queue: RefCell<Receives>,
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
        Self(Rc::new(SharedReceives {
            depth: depth as usize,
            queue: RefCell::new(Receives::with_capacity(depth)),
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
        Receives::check(requests)?;
        for request in requests {
            queue.post(request);
        }
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
