//! The application's completion queue: poll and wait drive the streams themselves.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{CompletionQueue, FabricError, QueuePairState, WorkCompletion};
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::time::Timespec;

use crate::clock;
use crate::connection::{Connection, Mover};
use crate::device::DeviceHandle;
use crate::queue::{QueueState, TOKEN_NUDGE, TOKEN_TIMER};
use crate::stream::BLOCKING_SLICE;

/// Bytes one connection may move in one call, so that others get their turn.
const BUDGET_BYTES: usize = 4 << 20;
/// Streams looked at in one call.
const EVENTS: usize = 64;

/// See the crate documentation for who drives what when.
pub(crate) struct EngineCompletionQueue {
    pub(crate) state: Arc<QueueState>,
    device: Arc<DeviceHandle>,
    members: RefCell<HashMap<u32, Arc<Connection>>>,
    /// The only member, when there is one: its stream is then asked directly.
    sole: RefCell<Option<Arc<Connection>>>,
    events: RefCell<[Event; EVENTS]>,
    debtors: RefCell<Vec<u32>>,
    armed: Cell<bool>,
}

impl fmt::Debug for EngineCompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineCompletionQueue")
            .field("depth", &self.state.depth())
            .field("members", &self.members.borrow().len())
            .finish_non_exhaustive()
    }
}

impl EngineCompletionQueue {
    pub(crate) fn new(state: Arc<QueueState>, device: Arc<DeviceHandle>) -> Self {
        let nothing = Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        Self {
            state,
            device,
            members: RefCell::default(),
            sole: RefCell::new(None),
            events: RefCell::new([nothing; EVENTS]),
            debtors: RefCell::new(Vec::with_capacity(64)),
            armed: Cell::new(false),
        }
    }

    pub(crate) fn device(&self) -> &Arc<DeviceHandle> {
        &self.device
    }

    pub(crate) fn add(&self, connection: &Arc<Connection>) {
        self.members.borrow_mut().insert(connection.qp_num, Arc::clone(connection));
        self.state.members().insert(connection.qp_num, Arc::clone(connection));
        self.find_sole();
    }

    pub(crate) fn remove(&self, qp_num: u32) {
        self.members.borrow_mut().remove(&qp_num);
        self.state.members().remove(&qp_num);
        self.find_sole();
    }

    fn find_sole(&self) {
        let members = self.members.borrow();
        let mut all = members.values();
        *self.sole.borrow_mut() = match (all.next(), all.next()) {
            (Some(only), None) => Some(Arc::clone(only)),
            _ => None,
        };
    }

    fn mover(&self) -> Mover {
        if self.armed.get() { Mover::ArmedPoll } else { Mover::Poll }
    }

    /// Sends acknowledgements that earlier calls put off and no request carried since.
    fn pay(&self) {
        if !self.state.has_deferred() {
            return;
        }
        let mut debtors = self.debtors.borrow_mut();
        self.state.take_deferred(&mut debtors);
        let members = self.members.borrow();
        for connection in debtors.drain(..).filter_map(|qp_num| members.get(&qp_num)) {
            connection.pay(Mover::Call);
        }
    }

    fn expire(&self, now_ns: u64) {
        if now_ns >= self.state.timer_ns() {
            let members = self.members.borrow();
            self.state.expire(clock::now_ns(), self.mover(), members.values());
        }
    }

    /// Moves what can be moved now.
    fn drive(&self) {
        let sole = self.sole.borrow();
        if let Some(connection) = sole.as_ref() {
            // When the library has the lock it is doing the work.
            connection.try_with(self.mover(), |engine| engine.drive(BUDGET_BYTES, false));
            return;
        }
        let members = self.members.borrow();
        if self.state.transport.is_polled() {
            for connection in members.values().filter(|connection| connection.has_news()) {
                connection.try_with(self.mover(), |engine| engine.drive(BUDGET_BYTES, false));
            }
        } else if !members.is_empty() {
            drop(members);
            self.drive_ready(Some(0));
        }
    }

    /// Waits up to `timeout_ns` for streams and moves those that are ready.
    fn drive_ready(&self, timeout_ns: Option<u64>) {
        let mut events = self.events.borrow_mut();
        let timeout = timeout_ns.map(|ns| Timespec {
            tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (ns % 1_000_000_000) as _,
        });
        let count = epoll::wait(self.state.streams(), &mut events[..], timeout.as_ref());
        let members = self.members.borrow();
        for event in &events[..count.unwrap_or(0)] {
            match event.data.u64() {
                TOKEN_TIMER => {
                    self.state.expire(clock::now_ns(), self.mover(), members.values());
                }
                TOKEN_NUDGE => {}
                qp_num => {
                    let Ok(qp_num) = u32::try_from(qp_num) else { continue };
                    let Some(connection) = members.get(&qp_num) else { continue };
                    let drive = |engine: &mut crate::engine::Engine| {
                        engine.drive(BUDGET_BYTES, false);
                    };
                    if connection.try_with(self.mover(), drive).is_none() {
                        // The library is in the middle of it; let it finish.
                        std::thread::yield_now();
                    }
                }
            }
        }
    }

    /// Sleeps until a stream of this queue is ready, something else happens to it, or the timeout
    /// passed, and moves what is ready. Leaves completions where they are.
    pub(crate) fn step(&self, timeout_ns: u64, done: impl Fn() -> bool) {
        self.state.note_activity();
        self.pay();
        if self.state.begin_sleep(true) && !done() {
            self.drive_ready(Some(timeout_ns));
        }
        self.state.end_sleep();
    }

    fn take(&self, completions: &mut [WorkCompletion]) -> Result<usize, FabricError> {
        self.state.take(completions).inspect_err(|_| {
            for connection in self.members.borrow().values() {
                if connection.state() != QueuePairState::Error {
                    connection.with(Mover::Call, |engine| {
                        engine.end(crate::engine::End::Disconnected);
                    });
                }
            }
        })
    }

    /// With one connection and nothing else to wait for, sleeps in the receive itself: a blocking
    /// exchange then costs the calls of a bare one. False when it cannot.
    fn sleep_on_the_stream(&self, now_ns: u64, remaining_ns: u64) -> bool {
        let slice = BLOCKING_SLICE.as_nanos() as u64;
        let sole = self.sole.borrow();
        let Some(connection) = sole.as_ref() else { return false };
        if remaining_ns < slice || self.state.timer_ns() < now_ns.saturating_add(slice) {
            return false;
        }
        self.state.set_waits(true);
        let slept = connection.with(Mover::Poll, |engine| {
            let may_sleep = engine.may_sleep();
            if may_sleep {
                engine.drive(BUDGET_BYTES, true);
            }
            may_sleep
        });
        self.state.set_waits(self.armed.get());
        slept
    }
}

impl CompletionQueue for EngineCompletionQueue {
    fn poll(&self, completions: &mut [WorkCompletion]) -> Result<usize, FabricError> {
        self.state.note_activity();
        self.pay();
        let count = self.take(completions)?;
        if count > 0 {
            return Ok(count);
        }
        self.expire(clock::coarse_ns());
        self.drive();
        self.take(completions)
    }

    fn arm(&self) -> Result<(), FabricError> {
        self.state.note_activity();
        self.pay();
        self.state.arm()?;
        self.armed.set(true);
        Ok(())
    }

    fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.state.event_descriptor()
    }

    fn acknowledge(&self) -> Result<(), FabricError> {
        self.state.note_activity();
        self.armed.set(false);
        self.state.acknowledge()
    }

    fn wait(
        &self,
        completions: &mut [WorkCompletion],
        timeout: Duration,
    ) -> Result<usize, FabricError> {
        // A long timeout does not need the exact clock, and each message saves reading it.
        let clock = if timeout < BLOCKING_SLICE { clock::now_ns } else { clock::coarse_ns };
        let begun = clock();
        let bound = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let deadline = begun.saturating_add(bound);
        let mut now = begun;
        let mut slept = false;
        loop {
            self.state.note_activity();
            self.pay();
            let count = self.take(completions)?;
            if count > 0 {
                return Ok(count);
            }
            self.expire(now);
            if now >= deadline {
                self.drive();
                return self.take(completions);
            }
            let remaining = deadline - now;
            if slept || !self.sleep_on_the_stream(now, remaining) {
                if self.state.begin_sleep(false) {
                    self.drive_ready(Some(remaining));
                }
                self.state.end_sleep();
            } else {
                // A slice without a byte: an idle connection sleeps without a bound of its own.
                slept = true;
            }
            let count = self.take(completions)?;
            if count > 0 {
                return Ok(count);
            }
            now = clock();
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for EngineCompletionQueue {
    fn drop(&mut self) {
        self.device.forget_queue(&self.state);
    }
}
