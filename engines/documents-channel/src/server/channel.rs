//! One channel of a server: what came, what is executed, what has to be sent.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;

use beeline_fabric::{
    LocalData, MemoryRegion, Operation, PostError, QueuePair, QueuePairState, RemoteAddress,
    RemoteKey, ScatterGatherEntry, WorkRequest,
};
use beeline_os::memory::copy_in;

use crate::message::{Immediate, LONGEST_BODY, Message, MessageType, Part, SLOT_BYTES};
use crate::numbers::ByNumber;
use crate::planted::{Planted, planted};
use crate::pool::{Piece, Pool, ReplyBuffer};

/// Where a reply goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Destination {
    pub(super) address: u64,
    pub(super) capacity: usize,
}

/// What a channel has to send.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// Bytes `from` to `from + count` of a reply; `done` of its pieces are posted.
    Part {
        index: u32,
        to: Destination,
        reply: Rc<ReplyBuffer>,
        from: usize,
        count: usize,
        done: usize,
    },
    /// A control message.
    Message(Vec<u8>),
}

/// What a write that is under way holds.
#[derive(Debug)]
pub(super) enum Flying {
    Nothing,
    /// Kept for its buffers, until the write is done.
    Reply(#[allow(dead_code, reason = "keeps the buffers")] Rc<ReplyBuffer>),
    Loose(u32),
}

/// A reply whose destination was too small for all of it.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) reply: Rc<ReplyBuffer>,
    pub(super) sent: usize,
    /// It is let go then: so long behind the last part that the client asked for.
    pub(super) until_ns: u64,
}

/// A request that is answered later.
#[derive(Debug)]
pub(super) struct Executing {
    pub(super) to: Destination,
    /// Bytes of its body, which its executor keeps.
    pub(super) body: usize,
    /// Its reply, which waits for leave to go.
    pub(super) kept: Option<ReplyBuffer>,
}

/// A body that comes in parts.
#[derive(Debug)]
pub(super) struct Assembly {
    pub(super) index: u32,
    pub(super) bytes: Vec<u8>,
    /// When the last part came.
    pub(super) at_ns: u64,
}

#[derive(Debug)]
pub(super) struct Channel {
    pub(super) qp: Box<dyn QueuePair>,
    /// The ring, and the granted area behind it.
    pub(super) region: MemoryRegion,
    pub(super) slots: u16,
    pub(super) checksum: bool,
    pub(super) theirs: RemoteKey,
    pub(super) their_bytes: u64,
    pub(super) their_slots: u16,
    /// Messages that came, those that were taken out of their slots, and those whose slots were given back.
    pub(super) received: u64,
    pub(super) taken: u64,
    pub(super) released: u64,
    /// Bytes of the messages that came and were not taken, in their order.
    pub(super) parked: VecDeque<u64>,
    /// Messages sent, and those acknowledged.
    pub(super) sent: u64,
    pub(super) acknowledged: u64,
    pub(super) outgoing: VecDeque<Outgoing>,
    pub(super) flying: VecDeque<Flying>,
    pub(super) send_depth: usize,
    pub(super) assembly: Option<Assembly>,
    pub(super) executing: ByNumber<u32, Executing>,
    pub(super) held: ByNumber<u32, Held>,
    /// Bytes of those replies.
    pub(super) held_bytes: usize,
    /// Bytes of all replies of the channel that there are.
    pub(super) replies: Rc<Cell<usize>>,
    /// Writes that were done.
    pub(super) progress: u64,
    /// Since when no more of them were done while some were under way, as far as was looked.
    pub(super) stuck: Option<(u64, u64)>,
    /// When it must be connected; `None` once it is.
    pub(super) connected_by_ns: Option<u64>,
}

/// Why a client's channel ends.
pub(super) struct Broken;

impl Channel {
    /// The granted area: where it begins in the region, and its bytes.
    pub(super) fn area(&self) -> (u64, u64) {
        let ring = u64::from(self.slots) * SLOT_BYTES as u64;
        (ring, self.region.length_bytes() - ring)
    }

    pub(super) fn acknowledge(&mut self) -> Result<(), Broken> {
        self.acknowledged += 1;
        let sent = self.acknowledged <= self.sent || planted(Planted::BelieveAcknowledgement);
        if sent { Ok(()) } else { Err(Broken) }
    }

    /// Bytes of replies that wait to be written, or for leave to be.
    pub(super) fn unsent(&self) -> usize {
        self.replies.get().saturating_sub(self.held_bytes)
    }

    /// Whether its writes do not get on, as two looks tell that are apart for long enough.
    pub(super) fn is_stuck(&mut self, now_ns: u64) -> bool {
        if self.flying.is_empty() {
            self.stuck = None;
            return false;
        }
        match self.stuck {
            Some((progress, since)) if progress == self.progress => {
                now_ns.saturating_sub(since) >= super::STUCK_NS
            }
            _ => {
                self.stuck = Some((self.progress, now_ns));
                false
            }
        }
    }

    /// Bytes of a body that is not there as a whole.
    pub(super) fn assembled(&self) -> usize {
        self.assembly.as_ref().map_or(0, |assembly| assembly.bytes.len())
    }

    /// Lets go of a reply whose rest nobody may ask for any more.
    pub(super) fn let_go(&mut self, index: u32) -> Option<Held> {
        let held = self.held.remove(&index)?;
        self.held_bytes -= held.reply.len();
        Some(held)
    }

    pub(super) fn send(&mut self, message: &Message<'_>) -> Result<(), Broken> {
        let mut out = [0; SLOT_BYTES];
        let bytes = message.write(&mut out).map_err(|_| Broken)?;
        self.outgoing.push_back(Outgoing::Message(bytes.to_vec()));
        Ok(())
    }

    pub(super) fn fail(&mut self, index: u32, code: u32, text: &str) -> Result<(), Broken> {
        let mut body = code.to_le_bytes().to_vec();
        let most = LONGEST_BODY - body.len();
        let end = (0..=text.len().min(most)).rev().find(|at| text.is_char_boundary(*at));
        body.extend_from_slice(&text.as_bytes()[..end.unwrap_or(0)]);
        self.send(&Message { body: &body, ..Message::new(MessageType::ErrorStatus, index) })
    }

    /// Queues the part of a reply from `from` on that its destination holds; keeps the rest.
    pub(super) fn part(
        &mut self,
        index: u32,
        to: Destination,
        reply: Rc<ReplyBuffer>,
        from: usize,
        until_ns: u64,
    ) {
        let count = (reply.len() - from).min(to.capacity);
        let rest = from + count < reply.len();
        let part = Outgoing::Part { index, to, reply: Rc::clone(&reply), from, count, done: 0 };
        self.outgoing.push_back(part);
        if rest {
            self.held_bytes += reply.len();
            self.held.insert(index, Held { reply, sent: from + count, until_ns });
        }
    }

    /// Posts what there is to send; false where the connection cannot go on.
    pub(super) fn pump(&mut self, pool: &Rc<Pool>) -> bool {
        let early = planted(Planted::GiveSlotBackEarly);
        let free = if early { self.received } else { self.taken };
        if self.outgoing.is_empty() && self.released >= free {
            return true;
        }
        // The client finds a reply and its slot's acknowledgement at one look, and is told once.
        let _together = self.qp.hold();
        while let Some(next) = self.outgoing.front_mut() {
            let posted = match next {
                Outgoing::Message(bytes) => {
                    if self.sent - self.acknowledged >= u64::from(self.their_slots) {
                        break;
                    }
                    let Some(buffer) = pool.take() else { break };
                    let place = pool.offset(buffer);
                    copy_in(pool.region.memory().as_ref(), place as usize, bytes);
                    let length = bytes.len() as u64;
                    let slot = self.sent % u64::from(self.their_slots) * SLOT_BYTES as u64;
                    let remote = RemoteAddress { key: self.theirs, offset: slot };
                    let entry =
                        [ScatterGatherEntry { region: &pool.region, offset: place, length }];
                    let immediate = Immediate::Message.code();
                    let local = LocalData::Gather(&entry);
                    let write = Operation::WriteWithImmediate { local, remote, immediate };
                    let posted = post(&mut *self.qp, &mut self.flying, self.send_depth, write);
                    match posted {
                        Posted::Done => {
                            self.sent += 1;
                            if let Some(last) = self.flying.back_mut() {
                                *last = Flying::Loose(buffer);
                            }
                        }
                        _ => pool.put_back(buffer),
                    }
                    posted
                }
                Outgoing::Part { index, to, reply, from, count, done } => {
                    let mut part = PartSender {
                        pool,
                        qp: &mut *self.qp,
                        flying: &mut self.flying,
                        depth: self.send_depth,
                        theirs: self.theirs,
                        checksum: self.checksum,
                    };
                    part.send(*index, *to, reply, (*from, *count), done)
                }
            };
            match posted {
                Posted::Done => drop(self.outgoing.pop_front()),
                Posted::Wait => break,
                Posted::Broken => return false,
            }
        }
        // The slots of messages that were taken are free.
        while self.released < free {
            let write = Operation::WriteWithImmediate {
                local: LocalData::Inline(&[]),
                remote: RemoteAddress { key: self.theirs, offset: 0 },
                immediate: Immediate::Acknowledge.code(),
            };
            match post(&mut *self.qp, &mut self.flying, self.send_depth, write) {
                Posted::Done => self.released += 1,
                Posted::Wait => break,
                Posted::Broken => return false,
            }
        }
        true
    }
}

/// What came of a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Posted {
    Done,
    /// Once something completed.
    Wait,
    Broken,
}

fn post(
    qp: &mut dyn QueuePair,
    flying: &mut VecDeque<Flying>,
    depth: usize,
    operation: Operation<'_>,
) -> Posted {
    if flying.len() >= depth {
        return Posted::Wait;
    }
    match qp.post_send(&[WorkRequest::new(0, operation)]) {
        Ok(()) => {
            flying.push_back(Flying::Nothing);
            Posted::Done
        }
        Err(PostError::QueueFull) => Posted::Wait,
        // Not connected yet, on this end: nothing to send before the peer wrote.
        Err(PostError::NotReady(QueuePairState::Init)) => Posted::Wait,
        Err(_) => Posted::Broken,
    }
}

/// Posts the writes of one part of a reply.
struct PartSender<'s> {
    pool: &'s Rc<Pool>,
    qp: &'s mut dyn QueuePair,
    flying: &'s mut VecDeque<Flying>,
    depth: usize,
    theirs: RemoteKey,
    checksum: bool,
}

impl PartSender<'_> {
    /// `done` counts the writes that are posted, the head of a later part first.
    fn send(
        &mut self,
        index: u32,
        to: Destination,
        reply: &Rc<ReplyBuffer>,
        (from, count): (usize, usize),
        done: &mut usize,
    ) -> Posted {
        let headed = from == 0;
        let pieces = reply.pieces(from, count, headed);
        let heads = usize::from(!headed);
        let mut remote = RemoteAddress { key: self.theirs, offset: to.address };
        if !headed {
            if *done == 0 {
                let checksum = self.checksum.then(|| reply.checksum(from, count));
                let part = Part { total: reply.len() as u32, offset: from as u32, checksum };
                let head = part.encode();
                let local = LocalData::Inline(&head);
                match post(self.qp, self.flying, self.depth, Operation::Write { local, remote }) {
                    Posted::Done => *done = 1,
                    other => return other,
                }
            }
            remote = remote.advanced(Part::BYTES as u64);
        }
        for (at, piece) in pieces.iter().enumerate() {
            let length = match piece {
                Piece::Pooled(_, length) => *length,
                Piece::Beside(bytes) => bytes.len() as u64,
            };
            if at + heads >= *done {
                let (offset, loose) = match piece {
                    Piece::Pooled(offset, _) => (*offset, None),
                    Piece::Beside(bytes) => {
                        let Some(buffer) = self.pool.take() else { return Posted::Wait };
                        let offset = self.pool.offset(buffer);
                        copy_in(self.pool.region.memory().as_ref(), offset as usize, bytes);
                        reply.count_staged(bytes.len());
                        (offset, Some(buffer))
                    }
                };
                let entry = [ScatterGatherEntry { region: &self.pool.region, offset, length }];
                let local = LocalData::Gather(&entry);
                let operation = if at + 1 == pieces.len() {
                    let immediate = Immediate::Data(index).code();
                    Operation::WriteWithImmediate { local, remote, immediate }
                } else {
                    Operation::Write { local, remote }
                };
                match post(self.qp, self.flying, self.depth, operation) {
                    Posted::Done => *done += 1,
                    other => {
                        if let Some(buffer) = loose {
                            self.pool.put_back(buffer);
                        }
                        return other;
                    }
                }
                if let Some(last) = self.flying.back_mut() {
                    *last = match loose {
                        Some(buffer) => Flying::Loose(buffer),
                        None if planted(Planted::ReuseBufferUnderWrite) => Flying::Nothing,
                        None => Flying::Reply(Rc::clone(reply)),
                    };
                }
            }
            remote = remote.advanced(length);
        }
        Posted::Done
    }
}
