//! Messages on their way in: matched with receives, placed, reported.
//!
//! Invariants: a message meets the oldest receive, of the queue pair or of the shared queue; what
//! the peer wrote is used as the connection decoded and checked it, and placed inside the receive's
//! region only.

use beeline_fabric::{MemoryRegion, Opcode, Status, WorkCompletion};
use beeline_os::moving;

use super::{Core, Inner};
use crate::connection::{Blocked, Carried, Connection, Inbound};
use crate::receives::Receive;
use crate::request::copy;

impl Inner {
    /// Matches messages with receives while there is room for completions.
    pub(super) fn receive_messages(&mut self, core: &Core, out: &mut [WorkCompletion]) -> usize {
        let mut count = 0;
        let mut shared = core.shared_receives.as_ref().map(|shared| shared.queue.borrow_mut());
        let receives = shared.as_deref_mut().unwrap_or(&mut self.receives);
        let mut failed = false;
        // Messages of the group in hand that are still to come, once a group was met.
        let mut group: Option<u32> = None;
        while count < out.len() && !failed {
            // Behind a group there is nothing yet, mostly; looking there would cost its sender a
            // line and us a wait. The next look will. Who armed the queue relies on this one.
            if group == Some(0) && !core.receive_queue.is_armed() {
                break;
            }
            let Some(connection) = &mut self.connection else { break };
            let Some((message, behind)) = connection.peek() else { break };
            let Some(receive) = receives.front() else {
                if let Some(shared) = &core.shared_receives {
                    shared.starved.set(true);
                    if !connection.own.is_starved() {
                        connection.own.set_starved(true);
                    }
                }
                break;
            };
            if count == 0 || behind > 0 {
                connection.look_ahead(behind);
            }
            group = match group {
                Some(left) if left > 0 => Some(left - 1),
                _ => (behind > 0).then_some(behind),
            };
            let (completion, payload_bytes) =
                deliver(core, &receive, receives.place(&receive), message);
            receives.pop();
            if completion.status == Status::LengthError {
                connection.own.set_too_long(connection.taken());
            }
            connection.consume(payload_bytes);
            failed = completion.status != Status::Success;
            out[count] = completion;
            count += 1;
        }
        drop(shared);
        if count > 0
            && let Some(connection) = &mut self.connection
        {
            connection.found(count);
        }
        if failed {
            self.enter_error(core);
        }
        if core.shared_receives.is_some()
            && count > 0
            && let Some(connection) = &mut self.connection
        {
            // The sender's completions wait for this.
            if connection.own.is_starved() && !connection.has_message() {
                connection.own.set_starved(false);
            }
            connection.publish_consumed();
        }
        count
    }

    pub(super) fn can_deliver(&self, core: &Core) -> bool {
        let receive = match &core.shared_receives {
            Some(shared) => !shared.queue.borrow().is_empty(),
            None => !self.receives.is_empty(),
        };
        receive && self.connection.as_ref().is_some_and(Connection::has_message)
    }
}

/// Places a message; returns its completion and the bytes it took of the payload area.
#[inline(always)]
fn deliver(
    core: &Core,
    receive: &Receive,
    buffer: Option<(&MemoryRegion, u64)>,
    message: Result<Inbound, Blocked>,
) -> (WorkCompletion, u64) {
    let mut completion = core.completion(receive.wr_id, Status::Success, Opcode::Receive, 0);
    let payload_bytes = match message {
        Err(_) => {
            completion.status = Status::TransportError;
            0
        }
        Ok(Inbound::TooLong) => {
            completion.status = Status::LengthError;
            0
        }
        Ok(Inbound::Written { length, immediate }) => {
            completion.opcode = Opcode::ReceiveWithImmediate;
            (completion.length, completion.immediate) = (length, Some(immediate));
            0
        }
        Ok(Inbound::Send { length, immediate, bytes }) => {
            (completion.length, completion.immediate) = (length, immediate);
            if length > receive.length {
                completion.status = Status::LengthError;
            } else if length > 0
                && let Some((region, offset)) = buffer
            {
                place(region, offset, length, &bytes);
            }
            match bytes {
                Carried::Inline(_) => 0,
                Carried::Payload(_) => length,
            }
        }
    };
    (completion, payload_bytes)
}

#[inline(always)]
fn place(region: &MemoryRegion, offset: u64, length: u64, bytes: &Carried) {
    assert!(region.contains(offset, length), "a posted receive lies inside its region");
    #[expect(clippy::cast_possible_truncation, reason = "inside a mapped region")]
    let (offset, length) = (offset as usize, length as usize);
    let source = match bytes {
        Carried::Inline(words) => words.as_ptr().cast(),
        Carried::Payload(address) => *address,
    };
    let memory = region.memory();
    // SAFETY: the range was just checked to lie inside the region.
    let target = unsafe { memory.base().as_ptr().add(offset) };
    let storing = moving::storing(memory.anchor());
    // SAFETY: the source is a copied slot, or lies inside the payload area (`decode`), which the
    // connection keeps mapped; the target lies inside the region, which the receive keeps.
    unsafe { copy(source, target, length) };
    drop(storing);
    memory.stored(offset, length);
}
