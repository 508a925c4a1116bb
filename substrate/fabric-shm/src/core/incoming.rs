//! Messages on their way in: matched with receives, placed, reported.
//!
//! Invariants: a message meets the oldest receive, of the queue pair or of the shared queue; what
//! the peer wrote is used as the connection decoded and checked it, and placed inside the receive's
//! region only.

use beeline_fabric::{MemoryRegion, Opcode, Status, WorkCompletion};
use beeline_os::moving;
use beeline_ring::slots::SlotHead;

use super::{Core, Inner};
use crate::connection::{Blocked, Carried, Connection, Inbound};
use crate::receives::{Receive, Receives};
use crate::request::copy;
use crate::shared_receive_queue::SharedReceives;

/// No group of messages was met.
const NO_GROUP: u32 = u32::MAX;

impl Inner {
    /// Matches the message whose head is given, and those behind it, with receives while there is room
    /// for completions: for one at least.
    #[inline(always)]
    pub(super) fn receive_messages(
        &mut self,
        core: &Core,
        head: SlotHead,
        out: &mut [WorkCompletion],
    ) -> usize {
        match &core.shared_receives {
            None => self.receive_usual(core, head, out),
            Some(shared) => self.receive_shared(core, shared, head, out),
        }
    }

    /// A message that is likely alone, and of a kind that most are of, is taken at once.
    #[inline(always)]
    pub(super) fn receive_usual(
        &mut self,
        core: &Core,
        head: SlotHead,
        out: &mut [WorkCompletion],
    ) -> usize {
        let Self { connection, receives, .. } = self;
        if let Some(connection) = connection
            && connection.is_alone(head)
            && let Some(first) = out.first_mut()
            && let Some(receive) = receives.front()
        {
            let (wr_id, status) = (receive.wr_id, Status::Success);
            let (qp_num, context) = (core.link.qp_num, core.options.context);
            if let Some((length, with)) = connection.written(head) {
                let (opcode, immediate) = (Opcode::ReceiveWithImmediate, Some(with));
                *first =
                    WorkCompletion { wr_id, status, opcode, length, immediate, qp_num, context };
            } else if let Some(bytes) = Connection::short(head)
                && bytes as u64 <= receive.length
            {
                let (opcode, length, immediate) = (Opcode::Receive, bytes as u64, None);
                if bytes > 0
                    && let Some((region, offset)) = receives.place(&receive)
                {
                    place_short(connection, region, offset, length);
                }
                *first =
                    WorkCompletion { wr_id, status, opcode, length, immediate, qp_num, context };
            } else {
                return self.receive_own(core, head, out);
            }
            receives.take_front();
            connection.consume_slot();
            return self.receive_behind(core, out);
        }
        self.receive_own(core, head, out)
    }

    /// One message was taken in; those behind it, while there is room for completions. Returns how
    /// many with the first.
    #[inline(always)]
    fn receive_behind(&mut self, core: &Core, out: &mut [WorkCompletion]) -> usize {
        if out.len() > 1
            && let Some(head) = self.connection.as_ref().and_then(Connection::head)
        {
            return 1 + self.receive_own(core, head, &mut out[1..]);
        }
        1
    }

    #[inline(never)]
    fn receive_own(&mut self, core: &Core, head: SlotHead, out: &mut [WorkCompletion]) -> usize {
        let Some(connection) = &mut self.connection else { return 0 };
        let (count, end) = take_in(core, connection, &mut self.receives, head, out);
        if count > 0 {
            connection.found(count);
        }
        if end == End::Failed {
            self.enter_error(core);
        }
        count
    }

    fn receive_shared(
        &mut self,
        core: &Core,
        shared: &SharedReceives,
        head: SlotHead,
        out: &mut [WorkCompletion],
    ) -> usize {
        let Some(connection) = &mut self.connection else { return 0 };
        let (count, end) = take_in(core, connection, &mut shared.queue.borrow_mut(), head, out);
        if end == End::NoReceive {
            shared.starved.set(true);
            if !connection.own.is_starved() {
                connection.own.set_starved(true);
            }
        }
        if count > 0 {
            connection.found(count);
        }
        if end == End::Failed {
            self.enter_error(core);
        } else if count > 0 {
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

/// Why no more messages are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Enough,
    NoReceive,
    Failed,
}

/// Takes in the message whose head is given, and those behind it; `out` has room for one at least.
#[inline(always)]
fn take_in(
    core: &Core,
    connection: &mut Connection,
    receives: &mut Receives,
    mut head: SlotHead,
    out: &mut [WorkCompletion],
) -> (usize, End) {
    let mut count = 0;
    // Messages of the group in hand that are still to come, once a group was met.
    let mut group = NO_GROUP;
    loop {
        let Some(receive) = receives.front() else { return (count, End::NoReceive) };
        let behind = head.behind;
        if count == 0 || behind > 0 {
            connection.look_ahead(behind);
        }
        let completion = &mut out[count];
        if let Some((length, immediate)) = connection.written(head) {
            *completion = WorkCompletion {
                wr_id: receive.wr_id,
                status: Status::Success,
                opcode: Opcode::ReceiveWithImmediate,
                length,
                immediate: Some(immediate),
                qp_num: core.link.qp_num,
                context: core.options.context,
            };
            receives.take_front();
            connection.consume_slot();
        } else if let Some(length) = Connection::short(head)
            && length as u64 <= receive.length
        {
            if length > 0
                && let Some((region, offset)) = receives.place(&receive)
            {
                let bytes = Carried::Inline { first: 0 };
                place(connection, region, offset, length as u64, &bytes);
            }
            *completion = WorkCompletion {
                wr_id: receive.wr_id,
                status: Status::Success,
                opcode: Opcode::Receive,
                length: length as u64,
                immediate: None,
                qp_num: core.link.qp_num,
                context: core.options.context,
            };
            receives.take_front();
            connection.consume_slot();
        } else {
            let place = receives.place(&receive);
            let message = connection.message(head);
            let (delivered, payload_bytes) = deliver(core, connection, &receive, place, message);
            *completion = delivered;
            receives.take_front();
            if delivered.status == Status::LengthError {
                connection.own.set_too_long(connection.taken());
            }
            connection.consume(payload_bytes);
            if delivered.status != Status::Success {
                return (count + 1, End::Failed);
            }
        }
        count += 1;
        group = match group {
            NO_GROUP | 0 if behind == 0 => NO_GROUP,
            NO_GROUP | 0 => behind,
            left => left - 1,
        };
        // Behind a group there is nothing yet, mostly; looking there would cost its sender a
        // line and us a wait. The next look will. A caller that armed the queue relies on this one.
        if count == out.len() || (group == 0 && !core.receive_queue.is_armed()) {
            return (count, End::Enough);
        }
        match connection.head() {
            Some(next) => head = next,
            None => return (count, End::Enough),
        }
    }
}

/// Places a message; returns its completion and the bytes it took of the payload area.
#[inline(always)]
fn deliver(
    core: &Core,
    connection: &Connection,
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
                place(connection, region, offset, length, &bytes);
            }
            match bytes {
                Carried::Inline { .. } => 0,
                Carried::Payload(_) => length,
            }
        }
    };
    (completion, payload_bytes)
}

/// [`place`] of a message in its slot.
#[inline(never)]
fn place_short(connection: &Connection, region: &MemoryRegion, offset: u64, length: u64) {
    place(connection, region, offset, length, &Carried::Inline { first: 0 });
}

#[inline(always)]
fn place(
    connection: &Connection,
    region: &MemoryRegion,
    offset: u64,
    length: u64,
    bytes: &Carried,
) {
    assert!(region.contains(offset, length), "a posted receive lies inside its region");
    #[expect(clippy::cast_possible_truncation, reason = "inside a mapped region")]
    let (offset, length) = (offset as usize, length as usize);
    let memory = region.memory();
    // SAFETY: the range was just checked to lie inside the region.
    let target = unsafe { region.base().add(offset) };
    let storing = moving::storing(region.anchor());
    match *bytes {
        // SAFETY: the target lies inside the region, which the receive keeps.
        Carried::Inline { first } => unsafe { connection.copy_inline(first, target, length) },
        // SAFETY: as above; the source lies inside the payload area (`decode`), which the
        // connection keeps mapped.
        Carried::Payload(source) => unsafe { copy(source, target, length) },
    }
    drop(storing);
    memory.stored(offset, length);
}
