//! The data side of a queue pair: what is outstanding, and what a completion means for it.
//!
//! Stays on the thread that made the queue pair; its completion queues hold it too, because a
//! completion finds it by the number that the device gives back with each request:
//!
//! ```text
//!  63 62 61      40 39      24 23     0
//!  [kind][ place   ][generation][ entry ]
//! ```
//!
//! `place` and `generation` name the queue pair in its completion queue, so that a completion of
//! one that is gone is told from one of its successor; `entry` counts requests.
//!
//! The device completes requests in order. A success stands for all silent ones before it; the
//! first failure breaks the connection, and everything after it is flushed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_fabric::{MemoryRegion, Opcode, QueuePairState, Status, WorkCompletion};

use crate::abi;
use crate::receive_queue::SharedCore;
use crate::shared::{Cause, PairShared};
use crate::status;

const ENTRY_BITS: u32 = 24;
const ENTRY_MASK: u64 = (1 << ENTRY_BITS) - 1;

/// What kind of queue an entry is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Send,
    Receive,
    Shared,
}

/// The number that the device gives back, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) kind: Kind,
    /// 22 bits.
    pub(crate) place: u32,
    pub(crate) generation: u16,
    /// 24 bits.
    pub(crate) entry: u32,
}

impl Tag {
    pub(crate) fn encode(self) -> u64 {
        let kind = match self.kind {
            Kind::Send => 0_u64,
            Kind::Receive => 1,
            Kind::Shared => 2,
        };
        kind << 62
            | u64::from(self.place) << 40
            | u64::from(self.generation) << ENTRY_BITS
            | u64::from(self.entry) & ENTRY_MASK
    }

    pub(crate) fn decode(number: u64) -> Self {
        Self {
            kind: match number >> 62 {
                0 => Kind::Send,
                1 => Kind::Receive,
                _ => Kind::Shared,
            },
            place: (number >> 40) as u32 & ((1 << 22) - 1),
            generation: (number >> ENTRY_BITS) as u16,
            entry: (number & ENTRY_MASK) as u32,
        }
    }
}

/// How a request that the device completes well still ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// As the device says.
    Device,
    /// The device cannot make that memory persistent.
    NotPersistent,
    /// An atomic on a word that is not aligned: whatever the device calls it.
    Unaligned,
}

/// One outstanding send-queue request.
#[derive(Debug)]
pub(crate) struct SendSlot {
    pub(crate) wr_id: u64,
    pub(crate) opcode: Opcode,
    pub(crate) verdict: Verdict,
    pub(crate) signalled: bool,
    /// The device reports it, for the application or for the library.
    pub(crate) reported: bool,
    pub(crate) length: u64,
    /// Regions the device reads or writes for it.
    pub(crate) held: Vec<MemoryRegion>,
}

/// The send queue.
#[derive(Debug)]
pub(crate) struct SendSide {
    pub(crate) slots: Box<[SendSlot]>,
    /// Oldest outstanding request.
    pub(crate) head: u64,
    /// Next one.
    pub(crate) tail: u64,
    /// Requests since one that the device reports.
    pub(crate) silent_run: u32,
    /// One past the newest read or atomic.
    pub(crate) after_last_read: u64,
}

impl SendSide {
    pub(crate) fn new(depth: u32, gather: usize) -> Self {
        let slot = |_| SendSlot {
            wr_id: 0,
            opcode: Opcode::Write,
            verdict: Verdict::Device,
            signalled: false,
            reported: false,
            length: 0,
            held: Vec::with_capacity(gather),
        };
        Self {
            slots: (0..depth).map(slot).collect(),
            head: 0,
            tail: 0,
            silent_run: 0,
            after_last_read: 0,
        }
    }

    pub(crate) fn slot(&mut self, position: u64) -> &mut SendSlot {
        // Below the depth, which is a u32.
        let index = (position % self.slots.len() as u64) as usize;
        &mut self.slots[index]
    }

    pub(crate) fn outstanding(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Forgets the regions of `count` requests that were built at the tail and not posted.
    pub(crate) fn let_go(&mut self, count: usize) {
        for position in (self.tail..).take(count) {
            self.slot(position).held.clear();
        }
    }
}

/// One posted receive.
#[derive(Debug, Default)]
pub(crate) struct ReceiveSlot {
    pub(crate) wr_id: u64,
    pub(crate) held: Option<MemoryRegion>,
}

/// A queue pair's own receive queue.
#[derive(Debug, Default)]
pub(crate) struct ReceiveSide {
    pub(crate) slots: Box<[ReceiveSlot]>,
    pub(crate) head: u64,
    pub(crate) tail: u64,
}

impl ReceiveSide {
    pub(crate) fn new(depth: u32) -> Self {
        let slots = (0..depth).map(|_| ReceiveSlot::default()).collect();
        Self { slots, head: 0, tail: 0 }
    }

    pub(crate) fn slot(&mut self, position: u64) -> &mut ReceiveSlot {
        let index = (position % self.slots.len() as u64) as usize;
        &mut self.slots[index]
    }

    pub(crate) fn outstanding(&self) -> usize {
        (self.tail - self.head) as usize
    }
}

/// The position an entry number stands for, given the oldest outstanding one.
fn position(head: u64, entry: u32) -> u64 {
    head + (u64::from(entry).wrapping_sub(head) & ENTRY_MASK)
}

/// The data side of one queue pair.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) shared: Arc<PairShared>,
    /// The device's number.
    pub(crate) hardware_number: u32,
    /// The application's.
    pub(crate) context: u64,
    pub(crate) send: RefCell<SendSide>,
    pub(crate) receive: RefCell<ReceiveSide>,
    pub(crate) shared_receives: Option<Rc<SharedCore>>,
    /// A failure was reported: what follows is flushed.
    pub(crate) failed: Cell<bool>,
}

impl Core {
    fn completion(
        &self,
        wr_id: u64,
        status: Status,
        opcode: Opcode,
        length: u64,
    ) -> WorkCompletion {
        let length = if status == Status::Success { length } else { 0 };
        let (qp_num, context) = (self.shared.number, self.context);
        WorkCompletion { wr_id, status, opcode, length, immediate: None, qp_num, context }
    }

    fn fail(&self, cause: Cause) {
        self.failed.set(true);
        self.shared.fail(cause);
    }

    /// A send-queue request completed; hands `deliver` what the application gets to see.
    pub(crate) fn sent(&self, entry: u32, wc: &abi::Wc, deliver: &mut impl FnMut(WorkCompletion)) {
        let side = &mut *self.send.borrow_mut();
        let at = position(side.head, entry);
        if at >= side.tail {
            // Ended already, when the queue pair was taken away.
            return;
        }
        while side.head <= at {
            let head = side.head;
            let own = head == at;
            let failed = self.failed.get();
            let slot = side.slot(head);
            let mut status = match (failed, own) {
                (true, _) => Status::Flushed,
                (false, false) => Status::Success,
                (false, true) => status::of_send(wc.status, slot.opcode),
            };
            status = match (slot.verdict, status) {
                (Verdict::NotPersistent, Status::Success) => Status::PersistenceError,
                (Verdict::Unaligned, Status::RemoteAccessError | Status::TransportError) => {
                    Status::RemoteInvalidRequest
                }
                (_, status) => status,
            };
            if status == Status::Flushed && !failed {
                status = match self.shared.cause() {
                    Cause::NoReceive
                        if matches!(slot.opcode, Opcode::Send | Opcode::WriteWithImmediate) =>
                    {
                        Status::ReceiverNotReady
                    }
                    Cause::Port | Cause::Device | Cause::NoReceive => Status::TransportError,
                    _ => Status::Flushed,
                };
            }
            slot.held.clear();
            let wanted = slot.signalled || status != Status::Success;
            let done = self.completion(slot.wr_id, status, slot.opcode, slot.length);
            side.head += 1;
            if status != Status::Success && !failed {
                self.fail(Cause::Own);
            }
            if wanted {
                deliver(done);
            }
        }
        if self.shared.watched.is_some() {
            self.note_progress(side);
        }
    }

    /// Tells the library's thread how far this queue pair is.
    pub(crate) fn note_progress(&self, side: &mut SendSide) {
        let progress = &self.shared.progress;
        // Relaxed, all: see the reader.
        progress.completed.store(side.head, Ordering::Relaxed);
        progress.posted.store(side.tail, Ordering::Relaxed);
        // Silent ones are done or not with the next one that the device reports.
        let mut length = 0_u64;
        for position in side.head..side.tail {
            let slot = side.slot(position);
            length = length.saturating_add(slot.length);
            if slot.reported {
                let waits = matches!(slot.opcode, Opcode::Send | Opcode::WriteWithImmediate);
                progress.waits.store(waits, Ordering::Relaxed);
                progress.length.store(length, Ordering::Relaxed);
                return;
            }
        }
        progress.waits.store(false, Ordering::Relaxed);
    }

    /// Breaks the connection when what the library's thread found overdue still waits. Called when
    /// all completions of the device have been taken.
    pub(crate) fn judge(&self) {
        // Relaxed: the queue's flag, acquired by the caller, was stored after it.
        let overdue = self.shared.progress.overdue.swap(0, Ordering::Relaxed);
        let side = self.send.borrow();
        let waits = overdue == side.head + 1 && side.outstanding() > 0;
        drop(side);
        if waits {
            self.shared.fail(Cause::NoReceive);
        }
    }

    /// What an arrival looks like to the application.
    pub(crate) fn arrival(&self, wr_id: u64, wc: &abi::Wc) -> WorkCompletion {
        let mut status = status::of_receive(wc.status);
        if self.failed.get() {
            status = Status::Flushed;
        }
        let opcode = if wc.opcode == abi::WC_RECV_RDMA_WITH_IMM && status == Status::Success {
            Opcode::ReceiveWithImmediate
        } else {
            Opcode::Receive
        };
        let mut done = self.completion(wr_id, status, opcode, u64::from(wc.byte_len));
        if status == Status::Success && wc.wc_flags & abi::WC_WITH_IMM != 0 {
            done.immediate = Some(u32::from_be(wc.imm_data));
        }
        if status != Status::Success && !self.failed.get() {
            self.fail(Cause::Own);
        }
        done
    }

    /// A receive of its own queue completed.
    pub(crate) fn received(
        &self,
        entry: u32,
        wc: &abi::Wc,
        deliver: &mut impl FnMut(WorkCompletion),
    ) {
        let side = &mut *self.receive.borrow_mut();
        let at = position(side.head, entry);
        if at >= side.tail {
            return;
        }
        while side.head <= at {
            let (head, own) = (side.head, side.head == at);
            let slot = side.slot(head);
            slot.held = None;
            let wr_id = slot.wr_id;
            side.head += 1;
            if own {
                deliver(self.arrival(wr_id, wc));
            } else {
                // The device forgot one: it was flushed.
                deliver(self.completion(wr_id, Status::Flushed, Opcode::Receive, 0));
            }
        }
    }

    /// Ends everything outstanding without the device: it is gone, or has let go of this queue
    /// pair.
    pub(crate) fn abandon(&self, deliver: &mut impl FnMut(bool, WorkCompletion)) {
        self.abandon_sends(&mut |done| deliver(true, done));
        self.failed.set(true);
        self.abandon_receives(&mut |done| deliver(false, done));
    }

    /// The send queue's half of it.
    pub(crate) fn abandon_sends(&self, deliver: &mut impl FnMut(WorkCompletion)) {
        let cause = self.shared.cause();
        let side = &mut *self.send.borrow_mut();
        while side.head < side.tail {
            let head = side.head;
            let first = !self.failed.replace(true);
            let slot = side.slot(head);
            slot.held.clear();
            let lost = first && matches!(cause, Cause::Device | Cause::Port);
            let status = if lost { Status::TransportError } else { Status::Flushed };
            let done = self.completion(slot.wr_id, status, slot.opcode, 0);
            side.head += 1;
            deliver(done);
        }
    }

    /// The receive queue's half of it.
    pub(crate) fn abandon_receives(&self, deliver: &mut impl FnMut(WorkCompletion)) {
        let side = &mut *self.receive.borrow_mut();
        while side.head < side.tail {
            let head = side.head;
            let slot = side.slot(head);
            slot.held = None;
            let done = self.completion(slot.wr_id, Status::Flushed, Opcode::Receive, 0);
            side.head += 1;
            deliver(done);
        }
    }

    /// True when nothing is outstanding.
    pub(crate) fn is_idle(&self) -> bool {
        self.send.borrow().outstanding() == 0 && self.receive.borrow().outstanding() == 0
    }

    pub(crate) fn state(&self) -> QueuePairState {
        self.shared.state()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn tags_come_back_as_they_went(
            kind in 0..3_usize, place in 0..1_u32 << 22, generation in any::<u16>(),
            entry in 0..1_u32 << 24,
        ) {
            let kind = [Kind::Send, Kind::Receive, Kind::Shared][kind];
            let tag = Tag { kind, place, generation, entry };
            prop_assert_eq!(Tag::decode(tag.encode()), tag);
        }

        #[test]
        fn an_entry_finds_its_position_across_wraps(head in 0..1_u64 << 40, ahead in 0..1_u64 << 16) {
            let entry = ((head + ahead) & ENTRY_MASK) as u32;
            prop_assert_eq!(position(head, entry), head + ahead);
        }
    }
}
