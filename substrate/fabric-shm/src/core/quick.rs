//! The short ways of the most frequent requests: a write, a write with immediate or a short send,
//! from one place, whose key is open, while nothing waits before it.
//!
//! It checks
//! what the long way ([`Request::check`], [`Inner::post`]) checks, of memory and rights nothing less; and
//! where any of it does not hold, nothing of this request has been told to the peer or the poller, so
//! that the long way can begin anew and decide. What it may have done by then is the copy, which the
//! long way does again or refuses, and what any look does: publishing messages held back, taking in the
//! peer's counts.
//!
//! [`Request::check`]: crate::request::Request::check

use beeline_fabric::{LocalData, Opcode, Operation, PostError, WorkRequest};

use super::outgoing::Done;
use super::{Core, Inner};
use crate::MAX_INLINE_BYTES;
use crate::connection::Connection;
use crate::remote::Remote;
use crate::request::local_range;

/// Where the bytes of a request are, and how many; `None` for what the long way has to look at.
#[inline(always)]
fn source(local: LocalData<'_>) -> Option<(*const u8, usize)> {
    match local {
        LocalData::Inline(bytes) if bytes.len() <= MAX_INLINE_BYTES as usize => {
            Some((bytes.as_ptr(), bytes.len()))
        }
        LocalData::Gather([entry]) if entry.region.contains(entry.offset, entry.length) => {
            Some(local_range(entry))
        }
        _ => None,
    }
}

/// Runs a write; returns its bytes, or `None` for what the long way has to look at.
#[inline(always)]
fn write(connection: &mut Connection, remote: &Remote, request: &WorkRequest<'_>) -> Option<u64> {
    let Operation::Write { local, remote: address } = request.operation else { return None };
    let (source, length) = source(local)?;
    connection.before_transfer(u64::MAX);
    let peer = (&connection.peer, connection.asymmetric);
    // SAFETY: `source` yields readable bytes: the caller's slice, or a range that lies inside its region.
    let placed = unsafe { remote.place(peer, address, source, length) };
    placed.then_some(length as u64)
}

/// Runs a write with immediate.
#[inline(always)]
fn immediate(
    connection: &mut Connection,
    remote: &Remote,
    request: &WorkRequest<'_>,
) -> Option<u64> {
    let Operation::WriteWithImmediate { local, remote: address, immediate } = request.operation
    else {
        return None;
    };
    let (source, length) = source(local)?;
    let sent = connection.send_written((length as u64, immediate), move |peer, asymmetric| {
        // SAFETY: as in `write`.
        unsafe { remote.place((peer, asymmetric), address, source, length) }
    });
    sent.then_some(length as u64)
}

/// Runs a send without an immediate.
#[inline(always)]
fn send(connection: &mut Connection, request: &WorkRequest<'_>) -> Option<u64> {
    let Operation::Send { local, immediate: None } = request.operation else { return None };
    let (source, length) = source(local)?;
    // SAFETY: as in `write`.
    let sent = unsafe { connection.send_short(source, length) };
    sent.then_some(length as u64)
}

impl Core {
    /// Errors: as `QueuePair::post_send`.
    #[inline(always)]
    pub(crate) fn post_send(&self, requests: &[WorkRequest<'_>]) -> Result<(), PostError> {
        if let [request] = requests
            && self.ran_at_once(request)
        {
            return Ok(());
        }
        self.post_send_long(requests)
    }

    /// Whether the request ran, and is over but for its completion.
    #[inline(always)]
    fn ran_at_once(&self, request: &WorkRequest<'_>) -> bool {
        let inner = &mut *self.inner.borrow_mut();
        // A connection is there while the queue pair is ready to send, and only then.
        let Some(connection) = &mut inner.connection else { return false };
        if inner.peer_closed
            || !inner.deferred.is_empty()
            || self.outstanding.get() >= self.options.send_depth
        {
            return false;
        }
        let remote = &inner.remote;
        let (opcode, length) = match request.operation {
            Operation::Write { .. } => (Opcode::Write, write(connection, remote, request)),
            Operation::WriteWithImmediate { .. } => {
                (Opcode::WriteWithImmediate, immediate(connection, remote, request))
            }
            Operation::Send { .. } => (Opcode::Send, send(connection, request)),
            _ => return false,
        };
        let Some(length) = length else { return false };
        if request.signalled || (opcode != Opcode::Write && connection.peer_shares_receives()) {
            inner.ran(self, opcode, request, length);
        }
        true
    }
}

impl Inner {
    /// What is left of a request that ran, where it is signalled or to be confirmed.
    #[inline(never)]
    fn ran(&mut self, core: &Core, opcode: Opcode, request: &WorkRequest<'_>, length: u64) {
        let WorkRequest { wr_id, signalled, .. } = *request;
        if signalled {
            core.outstanding.set(core.outstanding.get() + 1);
        }
        self.finish(core, Done { wr_id, opcode, length, signalled });
    }
}
