//! The end that wants the object.

use std::time::Duration;

use beeline_fabric::{RemoteAddress, RemoteKey};
use beeline_os::memory::copy_in;
use beeline_wire::checksum::{crc32c, crc32c_append};

use super::channel::{Arrived, Channel, WINDOW_PIECES};
use super::message::{Header, Kind};
use super::{Made, NotMade, Plan, Shelf, TransferError};
use crate::id::ObjectId;

/// How a transfer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Sealed here; its bytes, and whether they were read.
    Came { bytes: u64, read: bool },
    /// Here already, or being made by another.
    Here,
    /// The peer does not have it.
    Gone,
    /// The peer has it, and it is to be asked for over a socket.
    OverSocket,
    /// It cannot be made here, or came damaged.
    Failed(String),
}

/// Where an object's bytes go.
enum Target {
    /// Its place in the store.
    Made(Made),
    /// A few bytes, put in one call once they are all here; of these, so many data bytes.
    Gathered { bytes: Vec<u8>, size: u64 },
}

struct Incoming {
    target: Target,
    total: u64,
    checksum: Option<u32>,
    /// Bytes in place; for a read, of those posted.
    received: u64,
    acknowledged: u64,
    read: Option<Reading>,
}

struct Reading {
    remote: RemoteAddress,
    posted: u64,
    under_way: u32,
}

/// The end of a long read, which is read by itself: meanwhile the store wakes up for the seal.
const LAST_PART: u64 = 128 << 10;

enum State {
    Idle,
    /// Asked; pieces that came before their sizes.
    Asked {
        early: Vec<(u64, Vec<u8>)>,
    },
    Coming(Incoming),
}

/// Takes objects from one peer, one at a time.
pub(crate) struct Pulling {
    channel: Channel,
    number: u32,
    id: ObjectId,
    plan: Plan,
    state: State,
}

impl Pulling {
    pub(crate) fn new(channel: Channel) -> Self {
        Self { channel, number: 0, id: ObjectId([0; 20]), plan: Plan::SENT, state: State::Idle }
    }

    /// Bytes of the object that is coming, as far as known.
    pub(crate) fn expected(&self) -> u64 {
        match &self.state {
            State::Coming(incoming) => incoming.total,
            State::Idle | State::Asked { .. } => 0,
        }
    }

    /// Asks for an object, which comes as planned for its size. None is under way.
    ///
    /// Errors: the connection is over.
    pub(crate) fn start(
        &mut self,
        id: ObjectId,
        plan: Plan,
        flags: u32,
    ) -> Result<(), TransferError> {
        self.plan = plan;
        self.number = self.number.wrapping_add(1);
        self.id = id;
        self.state = State::Asked { early: Vec::new() };
        let words = [plan.asks(), 0, 0, 0, 0, 0];
        let header = Header { flags, ..Header::new(Kind::Pull, self.number, id, words) };
        self.channel.send(&header, None)
    }

    /// Does what can be done; waits up to `patience` for something. The outcome, once there is one,
    /// and whether anything came. `in_time` says whether the server of so many bytes surely holds
    /// them still.
    ///
    /// Errors: the connection is over, and what had come of the object is given up.
    pub(crate) fn progress(
        &mut self,
        shelf: &mut dyn Shelf,
        patience: Duration,
        in_time: &dyn Fn(u64) -> bool,
    ) -> Result<(Option<Outcome>, bool), TransferError> {
        let found = self.channel.poll(patience)?;
        let came = found.reads > 0 || !found.messages.is_empty();
        let mut outcome = None;
        for arrived in &found.messages {
            // Only a piece is used in its receive buffer.
            let message = self.message(shelf, arrived);
            self.channel.done_with(arrived)?;
            outcome = outcome.or(message?);
        }
        if let State::Coming(Incoming { read: Some(reading), .. }) = &mut self.state {
            reading.under_way -= found.reads;
        }
        if outcome.is_none() {
            outcome = self.advance(shelf, in_time)?;
        }
        if let Some(outcome) = &outcome {
            let sealed = u64::from(matches!(outcome, Outcome::Came { .. }));
            self.state = State::Idle;
            if *outcome != Outcome::Gone {
                let words = [sealed, 0, 0, 0, 0, 0];
                self.channel.send(&Header::new(Kind::Fin, self.number, self.id, words), None)?;
            }
        }
        Ok((outcome, came))
    }

    fn message(
        &mut self,
        shelf: &mut dyn Shelf,
        arrived: &Arrived,
    ) -> Result<Option<Outcome>, TransferError> {
        let header = &arrived.header;
        if header.number != self.number {
            // A piece of a transfer that was given up.
            return Ok(None);
        }
        match (header.kind, &mut self.state) {
            (Kind::Gone, State::Asked { .. }) => Ok(Some(Outcome::Gone)),
            (Kind::Data | Kind::Read, State::Asked { early }) => {
                let early = std::mem::take(early);
                self.sizes(shelf, header, early)
            }
            (Kind::Piece, State::Asked { early }) => {
                if early.len() as u64 >= WINDOW_PIECES {
                    return Err(TransferError::Protocol { what: "more pieces than a window" });
                }
                early.push((header.words[0], self.channel.take(arrived)));
                Ok(None)
            }
            (Kind::Piece, State::Coming(incoming)) => {
                let (offset, length) = (header.words[0], Channel::piece_length(arrived));
                let fits = offset == incoming.received
                    && length <= incoming.total - incoming.received
                    && incoming.read.is_none();
                if !fits {
                    return Err(TransferError::Protocol { what: "a piece out of place" });
                }
                match &mut incoming.target {
                    Target::Made(made) => {
                        self.channel.place(arrived, &made.region, made.offset + offset);
                    }
                    Target::Gathered { bytes, .. } => {
                        bytes.extend_from_slice(&self.channel.take(arrived));
                    }
                }
                incoming.received += length;
                Ok(None)
            }
            (_, State::Idle) => Ok(None),
            _ => Err(TransferError::Protocol { what: "a message out of place" }),
        }
    }

    fn sizes(
        &mut self,
        shelf: &mut dyn Shelf,
        header: &Header,
        early: Vec<(u64, Vec<u8>)>,
    ) -> Result<Option<Outcome>, TransferError> {
        let [size, metadata_size, _, offset, key, _] = header.words;
        let Some(total) = size.checked_add(metadata_size) else {
            return Err(TransferError::Protocol { what: "sizes beyond measure" });
        };
        if header.kind == Kind::Read && self.plan.over_socket(total) {
            return Ok(Some(Outcome::OverSocket));
        }
        let small = header.kind == Kind::Data && total <= self.channel.piece_bytes();
        let target = if small {
            Target::Gathered { bytes: Vec::with_capacity(total as usize), size }
        } else {
            match shelf.make(self.id, size, metadata_size) {
                Ok(made) => Target::Made(made),
                Err(NotMade::Exists) => return Ok(Some(Outcome::Here)),
                Err(NotMade::Failed(reason)) => return Ok(Some(Outcome::Failed(reason))),
            }
        };
        if let Target::Made(made) = &target {
            let fits = made.region.contains(made.offset, total);
            assert!(fits, "an object lies inside its segment");
        }
        let read = (header.kind == Kind::Read).then_some(Reading {
            remote: RemoteAddress { key: RemoteKey(key), offset },
            posted: 0,
            under_way: 0,
        });
        let checksum = header.checksum();
        let mut incoming = Incoming { target, total, checksum, received: 0, acknowledged: 0, read };
        for (offset, piece) in early {
            let length = piece.len() as u64;
            if offset != incoming.received
                || length > incoming.total - incoming.received
                || incoming.read.is_some()
            {
                return Err(TransferError::Protocol { what: "a piece out of place" });
            }
            match &mut incoming.target {
                Target::Made(made) => {
                    copy_in(&**made.region.memory(), (made.offset + offset) as usize, &piece);
                }
                Target::Gathered { bytes, .. } => bytes.extend_from_slice(&piece),
            }
            incoming.received += length;
        }
        self.state = State::Coming(incoming);
        Ok(None)
    }

    /// Posts reads, acknowledges, seals.
    fn advance(
        &mut self,
        shelf: &mut dyn Shelf,
        in_time: &dyn Fn(u64) -> bool,
    ) -> Result<Option<Outcome>, TransferError> {
        let State::Coming(incoming) = &mut self.state else { return Ok(None) };
        if let (Some(reading), Target::Made(made)) = (&mut incoming.read, &incoming.target) {
            while reading.posted < incoming.total {
                let left = incoming.total - reading.posted;
                let mut length = self.channel.read_bytes().min(left);
                if length == left && length > 2 * LAST_PART {
                    length -= LAST_PART;
                }
                let target = made.offset + reading.posted;
                let remote = reading.remote.advanced(reading.posted);
                if !self.channel.read(&made.region, target, length, remote)? {
                    break;
                }
                reading.posted += length;
                reading.under_way += 1;
                if incoming.total - reading.posted == LAST_PART {
                    shelf.rouse();
                }
            }
            self.channel.flush()?;
            if reading.posted < incoming.total || reading.under_way > 0 {
                return Ok(None);
            }
        } else if incoming.received < incoming.total {
            let unacknowledged = incoming.received - incoming.acknowledged;
            if unacknowledged >= WINDOW_PIECES / 2 * self.channel.piece_bytes()
                && self.channel.can_send()
            {
                incoming.acknowledged = incoming.received;
                let words = [incoming.received, 0, 0, 0, 0, 0];
                self.channel.send(&Header::new(Kind::Ack, self.number, self.id, words), None)?;
            }
            return Ok(None);
        }
        // All reads are done: what they found was the object if the server holds it even now.
        if incoming.read.is_some() && !in_time(incoming.total) {
            return Err(TransferError::Late);
        }
        let State::Coming(incoming) = std::mem::replace(&mut self.state, State::Idle) else {
            return Ok(None);
        };
        Ok(Some(seal(shelf, self.id, incoming)))
    }
}

fn seal(shelf: &mut dyn Shelf, id: ObjectId, incoming: Incoming) -> Outcome {
    let Incoming { target, total, checksum, read, .. } = incoming;
    if checksum.is_some_and(|expected| sum(&target, total) != expected) {
        return Outcome::Failed("its bytes differ from its checksum".to_owned());
    }
    let sealed = match target {
        Target::Made(made) => made.seal.seal(checksum).map_err(NotMade::Failed),
        Target::Gathered { bytes, size } => shelf.put(id, &bytes, size, checksum),
    };
    match sealed {
        Ok(()) => Outcome::Came { bytes: total, read: read.is_some() },
        Err(NotMade::Exists) => Outcome::Here,
        Err(NotMade::Failed(reason)) => Outcome::Failed(reason),
    }
}

fn sum(target: &Target, total: u64) -> u32 {
    let made = match target {
        Target::Made(made) => made,
        Target::Gathered { bytes, .. } => return crc32c(bytes),
    };
    let mut piece = [0; 4096];
    let (mut at, mut sum) = (0, crc32c(&[]));
    while at < total {
        let length = (total - at).min(4096) as usize;
        let memory = &**made.region.memory();
        beeline_os::memory::copy_out(memory, (made.offset + at) as usize, &mut piece[..length]);
        sum = crc32c_append(sum, &piece[..length]);
        at += length as u64;
    }
    sum
}
