//! The inside of a queue pair, shared by its handle and its completion queues on one thread: its
//! life, and how a completion queue looks at it. Requests and messages have a module each.

mod incoming;
mod outgoing;
mod quick;

use std::cell::{Cell, RefCell};
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use beeline_fabric::{
    Held, Opcode, PostError, QueuePairOptions, QueuePairState, ReceiveRequest, RemoteAddress,
    Status, WorkCompletion, WorkRequest,
};
use beeline_os::doorbell::Rung;

use crate::completion_queue::Queue;
use crate::connection::Connection;
use crate::control::Command;
use crate::device::DeviceHandle;
use crate::link::{Link, LinkEvent};
use crate::receives::{Receives, check_writable};
use crate::remote::{Remote, Wait};
use crate::request::{DeferredQueue, Request};
use crate::shared_receive_queue::SharedReceives;
use crate::unconfirmed::Unconfirmed;

/// How a completion queue looks at a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heat {
    /// Not at all: not connected yet, or broken and flushed.
    Out,
    /// At every poll.
    Hot,
    /// When its doorbell rings.
    Cold,
}

/// What a look found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    pub completions: usize,
    /// Nothing moved and nothing waits.
    pub quiet: bool,
    /// Broken and flushed: never look again.
    pub finished: bool,
}

#[derive(Debug)]
pub(crate) struct Core {
    pub link: Arc<Link>,
    pub device: Arc<DeviceHandle>,
    pub options: QueuePairOptions,
    pub send_queue: Rc<Queue>,
    pub receive_queue: Rc<Queue>,
    pub send_member: u32,
    pub receive_member: u32,
    pub shared_receives: Option<Rc<SharedReceives>>,
    /// Send requests that wait, or whose completion was not polled.
    pub outstanding: Cell<u32>,
    pub quiet_polls: Cell<u32>,
    pub send_heat: Cell<Heat>,
    pub receive_heat: Cell<Heat>,
    pub inner: RefCell<Inner>,
}

#[derive(Debug)]
struct Waiting {
    reason: Wait,
    deadline: Option<Instant>,
    /// When it gives up whatever it waits for by then; none for never.
    last: Option<Instant>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub state: QueuePairState,
    /// Connect was called.
    pub connecting: bool,
    peer_closed: bool,
    connection: Option<Connection>,
    remote: Remote,
    deferred: DeferredQueue,
    waiting: Option<Waiting>,
    unconfirmed: Unconfirmed,
    /// What the first unconfirmed one waits for.
    confirming: Option<Waiting>,
    /// The peer's word on the message that did not fit, kept past the connection.
    too_long: u64,
    receives: Receives,
}

impl Inner {
    pub(crate) fn new(receive_depth: u32) -> Self {
        Self {
            state: QueuePairState::Init,
            connecting: false,
            peer_closed: false,
            connection: None,
            remote: Remote::default(),
            deferred: DeferredQueue::default(),
            waiting: None,
            unconfirmed: Unconfirmed::default(),
            confirming: None,
            too_long: 0,
            receives: Receives::with_capacity(receive_depth),
        }
    }
}

impl Core {
    fn is_send(&self, queue: &Queue) -> bool {
        std::ptr::eq(queue, Rc::as_ptr(&self.send_queue))
    }

    fn is_receive(&self, queue: &Queue) -> bool {
        std::ptr::eq(queue, Rc::as_ptr(&self.receive_queue))
    }

    /// How `queue` looks at this queue pair.
    pub(crate) fn heat_in(&self, queue: &Queue) -> &Cell<Heat> {
        if self.is_receive(queue) { &self.receive_heat } else { &self.send_heat }
    }

    fn shares_queue(&self) -> bool {
        Rc::ptr_eq(&self.send_queue, &self.receive_queue)
    }

    /// Has both queues look; the one that is not `asking` may be asleep on its own.
    pub(crate) fn heat_both(&self, asking: Option<&Queue>) {
        self.receive_queue.heat(self.receive_member);
        if !self.shares_queue() {
            self.send_queue.heat(self.send_member);
            for queue in [&self.send_queue, &self.receive_queue] {
                if asking.is_none_or(|asking| !std::ptr::eq(asking, Rc::as_ptr(queue))) {
                    queue.signal_if_armed();
                }
            }
        }
    }

    pub(crate) fn state(&self) -> QueuePairState {
        let inner = self.inner.borrow();
        if inner.peer_closed { QueuePairState::Error } else { inner.state }
    }

    /// Takes in the control thread's news.
    pub(crate) fn attend(&self) {
        let mut connected = false;
        for event in self.link.take() {
            let mut inner = self.inner.borrow_mut();
            match event {
                LinkEvent::Connected { object, bell, asymmetric } => {
                    if inner.state == QueuePairState::Init && inner.connecting {
                        let mut connection = Connection::new(object, bell, asymmetric);
                        for (index, receive) in (0..).zip(inner.receives.iter()) {
                            connection.own.publish_receive_length(index, receive.length);
                        }
                        connection.publish_posted(inner.receives.posted());
                        inner.connection = Some(connection);
                        inner.state = QueuePairState::ReadyToSend;
                        connected = true;
                    }
                }
                LinkEvent::Key { key, epoch, opened } => inner.remote.answered(key, epoch, opened),
                LinkEvent::Flushed { succeeded } => inner.remote.flushed(succeeded),
                LinkEvent::Closed => {
                    inner.peer_closed = true;
                    if inner.connection.is_none() {
                        inner.enter_error(self);
                    }
                }
            }
        }
        if connected {
            self.with_doorbell(|doorbell| {
                self.receive_queue.watch(self.receive_member, doorbell);
                if !self.shares_queue() {
                    self.send_queue.watch(self.send_member, doorbell);
                }
            });
            self.heat_both(None);
        }
    }

    pub(crate) fn with_doorbell(&self, act: impl FnMut(BorrowedFd<'_>)) {
        if let Some(connection) = &self.inner.borrow().connection {
            connection.bell.descriptor().into_iter().for_each(act);
        }
    }

    pub(crate) fn clear_doorbell(&self) -> Rung {
        let inner = self.inner.borrow();
        inner.connection.as_ref().map_or(Rung::No, |connection| connection.bell.clear())
    }

    /// Asks the peer to ring for what `queue` waits for.
    pub(crate) fn arm(&self, queue: &Queue, generation: u32) {
        let inner = self.inner.borrow();
        let Some(connection) = &inner.connection else { return };
        if self.is_receive(queue) {
            connection.own.set_message_arm(generation);
        }
        if self.is_send(queue) && (inner.waiting.is_some() || inner.unconfirmed.is_awaited()) {
            connection.own.set_credit_arm(generation);
        }
    }

    /// The peer need not ring any more. An optimisation: skipped in the middle of other work.
    pub(crate) fn disarm(&self, queue: &Queue) {
        let Ok(inner) = self.inner.try_borrow() else { return };
        let Some(connection) = &inner.connection else { return };
        if self.is_receive(queue) && connection.own.message_arm() != 0 {
            connection.own.set_message_arm(0);
        }
        if self.is_send(queue) && connection.own.credit_arm() != 0 {
            connection.own.set_credit_arm(0);
        }
    }

    /// When the first waiting request gives up.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let inner = self.inner.borrow();
        let deadlines = [&inner.waiting, &inner.confirming];
        deadlines.into_iter().flatten().filter_map(|waiting| waiting.deadline).min()
    }

    pub(crate) fn has_message(&self) -> bool {
        self.inner.borrow().connection.as_ref().is_some_and(Connection::has_message)
    }

    /// Nothing here needs looking at until the peer or the control thread does something.
    pub(crate) fn can_sleep(&self) -> bool {
        let inner = self.inner.borrow();
        inner.state == QueuePairState::ReadyToSend
            && !inner.peer_closed
            && inner.deferred.is_empty()
            && inner.unconfirmed.is_empty()
            && !inner.connection.as_ref().is_some_and(Connection::has_message)
    }

    pub(crate) fn is_finished(&self) -> bool {
        let inner = self.inner.borrow();
        inner.is_finished()
    }

    /// Breaks the queue pair unless it is in the middle of something that will notice by itself.
    pub(crate) fn break_if_idle(&self) {
        if let Ok(mut inner) = self.inner.try_borrow_mut() {
            inner.enter_error(self);
        }
    }

    /// One look: messages in, waiting requests out, flushes.
    #[inline(always)]
    pub(crate) fn progress(
        &self,
        queue: &Queue,
        out: &mut [WorkCompletion],
        check_clock: bool,
    ) -> Progress {
        let inner = &mut *self.inner.borrow_mut();
        // A connection is there while the queue pair is ready to send, and only then.
        if inner.peer_closed || inner.connection.is_none() {
            return inner.progress_at_end(self, queue, out, check_clock);
        }
        let mut completions = 0;
        if self.is_receive(queue)
            && let Some(head) = inner.connection.as_ref().and_then(Connection::head)
        {
            completions = inner.receive_messages(self, head, out);
        }
        if !inner.deferred.is_empty() || !inner.unconfirmed.is_empty() {
            return inner.progress_waiting(self, queue, completions, check_clock);
        }
        Progress { completions, quiet: completions == 0, finished: false }
    }

    /// As [`Core::progress`] where no request waits and receives are the queue pair's own: how many
    /// completions there are. `None`: nothing was done, and the long way is to look.
    #[inline(always)]
    pub(crate) fn progress_at_once(
        &self,
        queue: &Queue,
        out: &mut [WorkCompletion],
    ) -> Option<usize> {
        let inner = &mut *self.inner.borrow_mut();
        let connection = inner.connection.as_ref()?;
        if inner.peer_closed || !inner.deferred.is_empty() || !inner.unconfirmed.is_empty() {
            return None;
        }
        if !self.is_receive(queue) || self.shared_receives.is_some() {
            return None;
        }
        match connection.head() {
            None => Some(0),
            Some(head) => Some(inner.receive_usual(self, head, out)),
        }
    }

    fn completion(
        &self,
        wr_id: u64,
        status: Status,
        opcode: Opcode,
        length: u64,
    ) -> WorkCompletion {
        let (qp_num, context) = (self.link.qp_num, self.options.context);
        WorkCompletion { wr_id, status, opcode, length, immediate: None, qp_num, context }
    }

    /// Errors: as `QueuePair::post_send`.
    #[inline(never)]
    fn post_send_long(&self, requests: &[WorkRequest<'_>]) -> Result<(), PostError> {
        let inner = &mut *self.inner.borrow_mut();
        if inner.state != QueuePairState::ReadyToSend || inner.peer_closed {
            let state = if inner.peer_closed { QueuePairState::Error } else { inner.state };
            return Err(PostError::NotReady(state));
        }
        let free = self.options.send_depth.saturating_sub(self.outstanding.get());
        if requests.len() > free as usize {
            return Err(PostError::QueueFull);
        }
        if let [request] = requests {
            let request = Request::check(request)?;
            inner.post(self, &request);
        } else {
            for request in requests {
                Request::check(request)?;
            }
            for request in requests {
                inner.post(self, &Request::checked(request));
            }
        }
        if let Some(connection) = &mut inner.connection {
            connection.announce();
        }
        Ok(())
    }

    /// As `QueuePair::expect_write`: the target's lines are asked for.
    pub(crate) fn expect_write(&self, address: RemoteAddress, length: u64) {
        let inner = self.inner.borrow();
        if inner.state == QueuePairState::ReadyToSend {
            inner.remote.expect_write(address, length);
        }
    }

    /// As `QueuePair::hold`: messages are kept staged until as many releases.
    pub(crate) fn hold(&self) {
        if let Some(connection) = &mut self.inner.borrow_mut().connection {
            connection.hold();
        }
    }

    /// Errors: as `QueuePair::post_receive`.
    #[inline(always)]
    pub(crate) fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let mut inner = self.inner.borrow_mut();
        let Inner { connection, receives, peer_closed, .. } = &mut *inner;
        if let [request] = requests
            && let Some(connection) = connection
            && !*peer_closed
            && self.shared_receives.is_none()
            && receives.len() < self.options.receive_depth as usize
            && request.buffer.as_ref().is_none_or(|entry| check_writable(entry).is_ok())
        {
            let index = receives.posted();
            let length = receives.post(request);
            connection.own.publish_receive_length(index, length);
            connection.publish_posted(receives.posted());
            if self.receive_queue.is_armed() {
                self.signal_for(connection);
            }
            return Ok(());
        }
        drop(inner);
        self.post_receive_long(requests)
    }

    /// A receive was posted, and the queue armed: a message may have waited for it.
    #[cold]
    fn signal_for(&self, connection: &Connection) {
        if connection.has_message() {
            self.receive_queue.signal_if_armed();
        }
    }

    /// Errors: as `QueuePair::post_receive`.
    #[inline(never)]
    fn post_receive_long(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        if self.shared_receives.is_some() {
            return Err(PostError::TooLarge { what: "max_queue_depth (receive)", limit: 0 });
        }
        let inner = &mut *self.inner.borrow_mut();
        if inner.state == QueuePairState::Error || inner.peer_closed {
            return Err(PostError::NotReady(QueuePairState::Error));
        }
        if inner.receives.len() + requests.len() > self.options.receive_depth as usize {
            return Err(PostError::QueueFull);
        }
        Receives::check(requests)?;
        let Inner { connection, receives, .. } = inner;
        for request in requests {
            let index = receives.posted();
            let length = receives.post(request);
            if let Some(connection) = connection {
                connection.own.publish_receive_length(index, length);
            }
        }
        if let Some(connection) = connection {
            connection.publish_posted(receives.posted());
            if self.receive_queue.is_armed() {
                self.signal_for(connection);
            }
        }
        Ok(())
    }

    /// Disconnects: outstanding work flushes at the next polls.
    pub(crate) fn disconnect(&self) {
        self.inner.borrow_mut().enter_error(self);
    }
}

impl Inner {
    /// [`Core::progress`] of a queue pair whose requests wait, or wait to be confirmed, behind what was
    /// received.
    #[inline(never)]
    fn progress_waiting(
        &mut self,
        core: &Core,
        queue: &Queue,
        completions: usize,
        check_clock: bool,
    ) -> Progress {
        if core.is_send(queue) && self.state == QueuePairState::ReadyToSend {
            if !self.unconfirmed.is_empty() {
                self.confirm(core, check_clock);
            }
            if !self.deferred.is_empty() && !self.peer_closed {
                self.drive(core, check_clock);
            }
        }
        let quiet = completions == 0 && self.deferred.is_empty() && self.unconfirmed.is_empty();
        Progress { completions, quiet, finished: self.is_finished() }
    }

    /// [`Core::progress`] where there is no connection, or none for long.
    #[cold]
    fn progress_at_end(
        &mut self,
        core: &Core,
        queue: &Queue,
        out: &mut [WorkCompletion],
        check_clock: bool,
    ) -> Progress {
        let mut completions = 0;
        if self.state == QueuePairState::ReadyToSend {
            if core.is_receive(queue)
                && let Some(head) = self.connection.as_ref().and_then(Connection::head)
            {
                completions = self.receive_messages(core, head, out);
            }
            self.progress_waiting(core, queue, completions, check_clock);
        }
        if self.peer_closed || self.state == QueuePairState::Error {
            completions += self.wind_down(core, queue, &mut out[completions..]);
        }
        let quiet = completions == 0 && self.deferred.is_empty() && self.unconfirmed.is_empty();
        Progress { completions, quiet, finished: self.is_finished() }
    }

    fn is_finished(&self) -> bool {
        self.state == QueuePairState::Error
            && self.deferred.is_empty()
            && self.unconfirmed.is_empty()
            && self.receives.is_empty()
    }

    /// After the peer left, or in the error state: what was placed is delivered, the rest flushed.
    #[cold]
    fn wind_down(&mut self, core: &Core, queue: &Queue, out: &mut [WorkCompletion]) -> usize {
        let mut count = 0;
        if core.is_send(queue) {
            // The completion that explains the error goes first.
            while count < out.len() && queue.is_empty() {
                let too_long = self.too_long();
                let Some(completion) = self.unconfirmed.flushed(too_long) else { break };
                out[count] = completion;
                core.outstanding.set(core.outstanding.get().saturating_sub(1));
                count += 1;
            }
            while count < out.len() && queue.is_empty() && self.unconfirmed.is_empty() {
                let Some(entry) = self.deferred.take_front() else { break };
                let request = entry.request();
                let opcode = request.kind.opcode();
                out[count] = core.completion(request.wr_id, Status::Flushed, opcode, 0);
                core.outstanding.set(core.outstanding.get().saturating_sub(1));
                self.deferred.recycle(entry);
                count += 1;
            }
        }
        if self.state == QueuePairState::ReadyToSend && !self.can_deliver(core) {
            self.enter_error(core);
        }
        if self.state == QueuePairState::Error && core.is_receive(queue) {
            while count < out.len() {
                let Some(receive) = self.receives.pop() else { break };
                out[count] = core.completion(receive.wr_id, Status::Flushed, Opcode::Receive, 0);
                count += 1;
            }
        }
        count
    }

    fn too_long(&self) -> u64 {
        self.connection.as_ref().map_or(self.too_long, |connection| connection.peer.too_long())
    }

    /// Breaks the connection for good.
    #[cold]
    pub(crate) fn enter_error(&mut self, core: &Core) {
        if self.state == QueuePairState::Error {
            return;
        }
        self.state = QueuePairState::Error;
        (self.waiting, self.confirming) = (None, None);
        self.too_long = self.too_long();
        if let Some(mut connection) = self.connection.take() {
            connection.let_go();
        }
        self.remote.forget();
        core.device.shared.ask(Command::Close { qp_num: core.link.qp_num });
        core.heat_both(None);
        core.send_queue.signal_if_armed();
        core.receive_queue.signal_if_armed();
    }
}

impl Held for Core {
    fn release(&self) {
        if let Some(connection) = &mut self.inner.borrow_mut().connection {
            connection.release();
        }
    }
}
