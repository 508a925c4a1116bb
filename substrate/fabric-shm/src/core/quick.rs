//! The short way of the most frequent requests: a write, a write with immediate or a short send,
//! from one place, whose key is open, while nothing waits before it.
//!
//! Invariants: it checks what the long way ([`Request::check`], [`Inner::post`]) checks, of memory
//! and rights nothing less; and where any of it does not hold, nothing of this request has been told
//! to the peer or the poller, so that the long way can begin anew and decide. What it may have done by then is
//! the copy, which the long way does again or refuses, and what any look does: publishing messages
//! held back, taking in the peer's counts.
//!
//! [`Request::check`]: crate::request::Request::check

use beeline_fabric::{LocalData, Opcode, Operation, WorkRequest};

use super::outgoing::Done;
use super::{Core, Inner};
use crate::MAX_INLINE_BYTES;
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

impl Inner {
    /// Whether the request ran, and is over but for its completion. The queue pair is ready to
    /// send, and has room for it.
    #[inline(always)]
    pub(super) fn ran_at_once(&mut self, core: &Core, request: &WorkRequest<'_>) -> bool {
        let Some(connection) = &mut self.connection else { return false };
        if !self.deferred.is_empty() {
            return false;
        }
        let (opcode, length) = match request.operation {
            Operation::Write { local, remote } => {
                let Some((source, length)) = source(local) else { return false };
                connection.before_transfer(u64::MAX);
                // SAFETY: `source` yields readable bytes: the caller's slice, or a range that lies
                // inside its region.
                if !unsafe { self.remote.place(connection, remote, source, length) } {
                    return false;
                }
                (Opcode::Write, length)
            }
            Operation::WriteWithImmediate { local, remote, immediate } => {
                let Some((source, length)) = source(local) else { return false };
                if connection.check_message().is_err() {
                    return false;
                }
                connection.before_transfer(length as u64);
                // SAFETY: as above.
                if !unsafe { self.remote.place(connection, remote, source, length) } {
                    return false;
                }
                connection.send_written(length as u64, immediate);
                (Opcode::WriteWithImmediate, length)
            }
            Operation::Send { local, immediate: None } => {
                let Some((source, length)) = source(local) else { return false };
                if connection.check_message().is_err() {
                    return false;
                }
                // SAFETY: as above.
                if !unsafe { connection.send_short(source, length) } {
                    return false;
                }
                (Opcode::Send, length)
            }
            _ => return false,
        };
        if request.signalled {
            core.outstanding.set(core.outstanding.get() + 1);
        }
        let (wr_id, length, signalled) = (request.wr_id, length as u64, request.signalled);
        self.finish(core, Done { wr_id, opcode, length, signalled });
        true
    }
}
