//! Requests on their way out: run at once, kept until they can run, completed.
//!
//! ```text
//! post ──▶ execute ─┬─ done ──▶ complete ─┬──────────────▶ the queue's completions
//!   │               │                     └─ unconfirmed ─▶ confirm ─▲
//!   └── deferred ◀──┴─ has to wait ◀── drive (at every poll)
//! ```
//!
//! Invariants: requests run, and complete, in the order they were posted in; each that is kept
//! waits for a bounded time, whatever it waits for one after the other.

use std::time::Instant;

use beeline_fabric::{Opcode, QueuePairOptions, QueuePairState, Status, WorkCompletion};

use super::{Core, Heat, Inner, Waiting};
use crate::connection::Connection;
use crate::remote::{Hold, Wait};
use crate::request::Request;

/// What remains of a request that ran.
#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub wr_id: u64,
    pub opcode: Opcode,
    pub length: u64,
    pub signalled: bool,
}

impl Done {
    #[inline(always)]
    fn of(request: &Request<'_>) -> Self {
        let Request { wr_id, length, signalled, .. } = *request;
        Self { wr_id, opcode: request.kind.opcode(), length, signalled }
    }

    #[inline(always)]
    fn uses_receive(&self) -> bool {
        matches!(self.opcode, Opcode::Send | Opcode::WriteWithImmediate)
    }
}

impl Inner {
    /// Runs a checked request, or keeps it.
    #[inline(always)]
    pub(super) fn post(&mut self, core: &Core, request: &Request<'_>) {
        if self.state == QueuePairState::ReadyToSend && self.deferred.is_empty() {
            match self.execute(core, request) {
                Ok(()) => {
                    if request.signalled {
                        core.outstanding.set(core.outstanding.get() + 1);
                    }
                    self.finish(core, Done::of(request));
                    return;
                }
                Err(Hold::Wait(reason)) => note(&mut self.waiting, core, reason),
                Err(Hold::Fail(status)) => {
                    core.outstanding.set(core.outstanding.get() + 1);
                    self.complete(core, Done::of(request), status);
                    self.enter_error(core);
                    return;
                }
            }
        }
        core.outstanding.set(core.outstanding.get() + 1);
        self.deferred.push(request);
        // The sleeper's timer and armed words do not know this request.
        core.send_queue.heat(core.send_member);
        core.send_queue.signal_if_armed();
    }

    /// A request ran. Its slot in the send queue is counted if it is signalled.
    #[inline(always)]
    pub(super) fn finish(&mut self, core: &Core, done: Done) {
        if done.signalled {
            self.complete(core, done, Status::Success);
        } else if done.uses_receive()
            && let Some(connection) = &self.connection
            && connection.peer_shares_receives()
        {
            // Counted until it is confirmed, signalled or not.
            core.outstanding.set(core.outstanding.get() + 1);
            let completion = core.completion(done.wr_id, Status::Success, done.opcode, done.length);
            self.unconfirmed.push(connection.sent(), completion, false);
            self.watch_confirmation(core);
        }
    }

    /// An unconfirmed request must be looked after even if the queue was asleep.
    #[inline(always)]
    fn watch_confirmation(&mut self, core: &Core) {
        if core.heat_in(&core.send_queue).get() != Heat::Hot {
            core.send_queue.heat(core.send_member);
        }
        if self.unconfirmed.is_awaited() {
            core.send_queue.signal_if_armed();
        }
    }

    #[inline(always)]
    fn complete(&mut self, core: &Core, done: Done, status: Status) {
        let completion = core.completion(done.wr_id, status, done.opcode, done.length);
        let waits = status == Status::Success
            && done.uses_receive()
            && self.connection.as_ref().is_some_and(Connection::peer_shares_receives);
        if waits || !self.unconfirmed.is_empty() {
            let sent = self.connection.as_ref().map_or(0, Connection::sent);
            let until = if waits { sent } else { 0 };
            self.unconfirmed.push(until, completion, true);
            self.watch_confirmation(core);
            return;
        }
        self.emit(core, completion);
    }

    #[inline(always)]
    fn emit(&mut self, core: &Core, completion: WorkCompletion) {
        if !core.send_queue.push(core.send_member, completion) {
            self.enter_error(core);
        }
    }

    #[inline(always)]
    fn execute(&mut self, core: &Core, request: &Request<'_>) -> Result<(), Hold> {
        let Some(connection) = &mut self.connection else {
            return Err(Hold::Fail(Status::Flushed));
        };
        self.remote.execute(core, connection, request)
    }

    /// Completes what the receiver has taken.
    pub(super) fn confirm(&mut self, core: &Core, check_clock: bool) {
        let Some(connection) = &mut self.connection else { return };
        let Ok(consumed) = connection.hear_consumed() else {
            self.enter_error(core);
            return;
        };
        while let Some((completion, signalled)) = self.unconfirmed.confirmed(consumed) {
            self.confirming = None;
            if signalled {
                self.emit(core, completion);
            } else {
                core.outstanding.set(core.outstanding.get().saturating_sub(1));
            }
        }
        let Some(connection) = &self.connection else { return };
        if !self.unconfirmed.is_empty() && !self.peer_closed {
            let starved = connection.peer.is_starved();
            let reason = if starved { Wait::Receive } else { Wait::Room };
            note(&mut self.confirming, core, reason);
            if check_clock && is_late(&self.confirming) {
                if let Some((mut completion, _)) = self.unconfirmed.take() {
                    completion.status = reason.failure();
                    self.emit(core, completion);
                }
                self.enter_error(core);
            }
        }
    }

    /// Runs what can run of the deferred requests.
    pub(super) fn drive(&mut self, core: &Core, check_clock: bool) {
        while self.state == QueuePairState::ReadyToSend {
            let Some(entry) = self.deferred.take_front() else { break };
            let request = entry.request();
            match self.execute(core, &request) {
                Ok(()) => {
                    self.waiting = None;
                    if !request.signalled {
                        core.outstanding.set(core.outstanding.get().saturating_sub(1));
                    }
                    self.finish(core, Done::of(&request));
                }
                Err(Hold::Wait(reason)) => {
                    note(&mut self.waiting, core, reason);
                    if !(check_clock && is_late(&self.waiting)) {
                        self.deferred.put_back(entry);
                        break;
                    }
                    self.complete(core, Done::of(&request), reason.failure());
                    self.enter_error(core);
                }
                Err(Hold::Fail(status)) => {
                    self.complete(core, Done::of(&request), status);
                    self.enter_error(core);
                }
            }
            self.deferred.recycle(entry);
        }
        if let Some(connection) = &mut self.connection {
            connection.announce();
        }
    }
}

/// Starts, or goes on with, a wait.
#[cold]
fn note(waiting: &mut Option<Waiting>, core: &Core, reason: Wait) {
    if waiting.as_ref().is_some_and(|waiting| waiting.reason == reason) {
        return;
    }
    let QueuePairOptions { transport_timeout, receiver_not_ready_timeout, .. } = core.options;
    let bound = match reason {
        Wait::Key | Wait::Room | Wait::Flush => transport_timeout,
        Wait::Receive => receiver_not_ready_timeout,
    };
    let now = Instant::now();
    // A peer may make a request wait for several things in turn, but not for longer than each of
    // them once.
    let last = match waiting {
        Some(waiting) => waiting.last,
        None => now.checked_add(transport_timeout.saturating_add(receiver_not_ready_timeout)),
    };
    let deadline = now.checked_add(bound).into_iter().chain(last).min();
    *waiting = Some(Waiting { reason, deadline, last });
}

fn is_late(waiting: &Option<Waiting>) -> bool {
    let deadline = waiting.as_ref().and_then(|waiting| waiting.deadline);
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}
