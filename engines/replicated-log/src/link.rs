//! Connections to one peer.

use std::collections::VecDeque;

use beeline_fabric::{
    LocalData, MemoryRegion, Operation, PostError, QueuePair, QueuePairState, ReceiveRequest,
    RemoteAddress, RemoteKey, ScatterGatherEntry, WorkRequest,
};
use beeline_os::memory::copy_in;
use beeline_paxos::{AccessKey, Event, Message, NodeId, Position};

use crate::bulk::Outgoing;
use crate::forward::{Answering, Asking};
use crate::frame::MAX_FRAME_BYTES;
use crate::line::{Lines, Reader, Sought};
use crate::shared::Beat;

/// Messages that may be on their way to us, per peer.
pub(crate) const RECEIVES: u64 = 16;
const RECEIVE_BYTES: u64 = (MAX_FRAME_BYTES as u64).next_multiple_of(64);
/// Messages on their way to the peer at most; more are dropped, as messages may be.
const SENDS: u64 = 8;
const SEND_OFFSET: u64 = RECEIVES * RECEIVE_BYTES;
/// Where status words of the peer are read to: behind the buffers.
const STATUS_OFFSET: u64 = SEND_OFFSET + SENDS * RECEIVE_BYTES;
/// Memory of a control connection, bytes.
pub(crate) const CONTROL_BYTES: usize = STATUS_OFFSET as usize + 64;
/// Where the beat of the peer's thread is read to.
const BEAT_OFFSET: u64 = STATUS_OFFSET + 16;
/// Marks a completion of a status read.
pub(crate) const STATUS_READ: u64 = u64::MAX;
/// Marks a completion of a read of a beat.
pub(crate) const BEAT_READ: u64 = u64::MAX - 2;
/// Marks a completion of a message.
pub(crate) const SENT: u64 = u64::MAX - 1;

/// How a control connection reaches its peer.
#[derive(Debug)]
pub(crate) enum Way {
    /// Through a queue pair of its own.
    Own(Own),
    /// Through a line of the thread that `member` shares with others.
    Line { lines: Lines, id: u64, member: u64 },
}

/// A control connection's own queue pair.
#[derive(Debug)]
pub(crate) struct Own {
    pub(crate) qp: Box<dyn QueuePair>,
    /// Receive buffers, and the place for the peer's status words.
    pub(crate) region: MemoryRegion,
    /// Messages posted, and messages whose buffers are free again.
    pub(crate) posted: u64,
    pub(crate) sent: u64,
}

/// Messages and status reads.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) peer: NodeId,
    pub(crate) way: Way,
    pub(crate) status: Option<RemoteKey>,
    /// Status reads without an answer.
    pub(crate) reading: u64,
    /// Of the thread that the peer runs on, where that is a host's.
    pub(crate) beat: Option<Beat>,
}

impl Control {
    pub(crate) fn new(peer: NodeId, way: Way) -> Self {
        Self { peer, way, status: None, reading: 0, beat: None }
    }

    pub(crate) fn is_ready(&self) -> bool {
        match &self.way {
            Way::Own(own) => own.qp.state() == QueuePairState::ReadyToSend,
            Way::Line { lines, id, .. } => lines.is_ready(*id),
        }
    }

    /// Its own queue pair, where it has one.
    pub(crate) fn own(&mut self) -> Option<&mut Own> {
        match &mut self.way {
            Way::Own(own) => Some(own),
            Way::Line { .. } => None,
        }
    }

    /// Whether its own queue pair has this number.
    pub(crate) fn has_queue_pair(&self, qp_num: u32) -> bool {
        matches!(&self.way, Way::Own(own) if own.qp.qp_num() == qp_num)
    }

    /// Whether it goes through this line.
    pub(crate) fn is_of_line(&self, line: u64) -> bool {
        matches!(&self.way, Way::Line { id, .. } if *id == line)
    }

    /// False if the status cannot be read.
    pub(crate) fn read_status(&mut self) -> bool {
        let Some(key) = self.status else { return false };
        let posted = self.read((key, Sought::Status), (STATUS_READ, STATUS_OFFSET, 16));
        self.reading += u64::from(posted);
        posted
    }

    /// False if the beat cannot be read.
    pub(crate) fn read_beat(&mut self) -> bool {
        let Some(Beat { key, .. }) = self.beat else { return false };
        self.read((key, Sought::Beat), (BEAT_READ, BEAT_OFFSET, 8))
    }

    fn read(
        &mut self,
        (key, sought): (RemoteKey, Sought),
        (wr_id, offset, length): (u64, u64, u64),
    ) -> bool {
        match &mut self.way {
            Way::Own(own) => {
                let local = ScatterGatherEntry { region: &own.region, offset, length };
                let remote = RemoteAddress { key, offset: 0 };
                let operation = Operation::Read { local, remote };
                own.qp.post_send(&[WorkRequest::new(wr_id, operation)]).is_ok()
            }
            Way::Line { lines, id, member } => {
                lines.read(*id, Reader { member: *member, peer: self.peer, sought }, key)
            }
        }
    }

    /// Sends a message, or drops it when the peer takes none. A broken connection shows elsewhere.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        match &mut self.way {
            Way::Own(own) => {
                let _ = own.send(bytes);
            }
            Way::Line { lines, id, .. } => lines.send(*id, bytes),
        }
    }

    pub(crate) fn status_offset() -> usize {
        STATUS_OFFSET as usize
    }

    pub(crate) fn beat_offset() -> usize {
        BEAT_OFFSET as usize
    }

    /// Where the message of receive `index` lies.
    pub(crate) fn receive_offset(index: u64) -> usize {
        (index * RECEIVE_BYTES) as usize
    }
}

impl Own {
    /// Errors: [`PostError`].
    pub(crate) fn new(qp: Box<dyn QueuePair>, region: MemoryRegion) -> Result<Self, PostError> {
        let mut own = Self { qp, region, posted: 0, sent: 0 };
        for index in 0..RECEIVES {
            own.post_receive(index)?;
        }
        Ok(own)
    }

    pub(crate) fn post_receive(&mut self, index: u64) -> Result<(), PostError> {
        let buffer = ScatterGatherEntry {
            region: &self.region,
            offset: index * RECEIVE_BYTES,
            length: RECEIVE_BYTES,
        };
        self.qp.post_receive(&[ReceiveRequest { wr_id: index, buffer: Some(buffer) }])
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), PostError> {
        if self.posted - self.sent >= SENDS {
            return Ok(());
        }
        // Completions come in order, so a buffer whose turn is here again is free.
        let offset = SEND_OFFSET + self.posted % SENDS * RECEIVE_BYTES;
        copy_in(self.region.memory().as_ref(), offset as usize, bytes);
        let length = bytes.len() as u64;
        let entries = [ScatterGatherEntry { region: &self.region, offset, length }];
        let operation = Operation::Send { local: LocalData::Gather(&entries), immediate: None };
        self.qp.post_send(&[WorkRequest::new(SENT, operation)])?;
        self.posted += 1;
        Ok(())
    }
}

/// A signalled operation, in post order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Posted {
    Flush { last: Position },
    Slots { first: Position, count: u64 },
    Confirm { round: u64 },
}

/// The log region of a peer that promised itself to us.
#[derive(Debug)]
pub(crate) struct Data {
    pub(crate) key: AccessKey,
    pub(crate) qp: Box<dyn QueuePair>,
    pub(crate) posted: VecDeque<Posted>,
    /// What is read from the peer.
    pub(crate) scratch: MemoryRegion,
}

impl Data {
    pub(crate) fn remote(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { key: RemoteKey(self.key.0), offset }
    }
}

/// A data queue pair that was offered with a request, or whose grant waits for its connection.
#[derive(Debug)]
pub(crate) struct Offered {
    pub(crate) attempt: u32,
    /// The request it went with. The same request again is this attempt again: an answer may take
    /// longer than the pause between requests.
    pub(crate) request: Message,
    /// Another one is offered then, if this one is not answered or connected.
    pub(crate) until_ns: u64,
    pub(crate) qp: Box<dyn QueuePair>,
    /// Told to the replica once connected.
    pub(crate) grant: Option<(AccessKey, Event<'static>)>,
}

/// The answer to a request for access, for when the request comes again.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) attempt: u32,
    /// What it told; while the region has this key the answer holds.
    pub(crate) key: AccessKey,
    pub(crate) frame: Vec<u8>,
}

/// Everything about one peer.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) peer: NodeId,
    pub(crate) control: Option<Control>,
    pub(crate) offered: Option<Offered>,
    pub(crate) data: Option<Data>,
    /// How long the next offer is waited for to be answered, nanoseconds.
    pub(crate) answer_ns: u64,
    /// The peer's newest request for access, which the protocol has not seen: attempt, connection data, words.
    pub(crate) request: Option<(u32, Vec<u8>, Message)>,
    /// Of the peer's last request for access, the attempt and connection data.
    pub(crate) asked: Option<(u32, Vec<u8>)>,
    pub(crate) answered: Option<Answered>,
    /// A snapshot on its way there.
    pub(crate) outgoing: Option<Outgoing>,
    /// What the peer is asked for, and what it asks for.
    pub(crate) asking: Option<Asking>,
    pub(crate) answering: Option<Answering>,
}

impl Link {
    pub(crate) fn new(peer: NodeId) -> Self {
        let (control, offered, data, answer_ns) = (None, None, None, 0);
        let (request, asked, answered) = (None, None, None);
        let (outgoing, asking, answering) = (None, None, None);
        Self {
            peer,
            control,
            offered,
            data,
            answer_ns,
            request,
            asked,
            answered,
            outgoing,
            asking,
            answering,
        }
    }
}
