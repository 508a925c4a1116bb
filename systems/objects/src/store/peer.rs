//! One client as the loop sees it: its socket, its rings, what waits to be sent to it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use beeline_os::control_socket::{ControlSocket, Received};

use crate::link::{Link, SLOTS, Sleeper};
use crate::segment::Segment;
use crate::wire::{RECORD_BYTES, Record, RecordKind, Request, VERSION};

/// Replies that wait before no more requests are taken from a client that does not read them.
const MOST_OUTBOUND: usize = 4 * SLOTS as usize;
/// Records that wait before a client that does not read them is expelled.
const MOST_RECORDS: usize = 1 << 16;
/// Listings a client may have that it did not say it took; one that keeps the protocol has one.
pub(super) const MOST_LISTINGS: u32 = 4;
/// Requests taken from one client before the next one's turn.
const TURN: usize = 32;
/// How long after its last request the ring of a client that copies is polled at most: about twice as
/// long as the longest copy that a client announces takes into memory that was used before. Waking the
/// store takes tens of microseconds, which is a good part of a copy of 1 MiB.
const COPYING_NS: u64 = 250_000;

/// What goes with a record.
#[derive(Debug)]
pub(super) enum Attached {
    Nothing,
    Segment(Arc<Segment>),
    Owned(OwnedFd),
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Peer {
    pub socket: ControlSocket,
    /// Its process, where the store watches that.
    pub process: Option<u32>,
    link: Option<(Link, Sleeper)>,
    outbound: VecDeque<(u32, [u64; 6])>,
    records: VecDeque<(Record, Attached)>,
    /// Listings sent that it did not say it took.
    pub listings: u32,
    /// Its ring is polled, because it asked for something a moment ago.
    pub active: bool,
    /// Its ring is not polled because it does not read its replies, and it does not ring.
    pub parked: bool,
    pub last_request_ns: u64,
    /// When it was last seen to copy into an object.
    copied_ns: u64,
}

impl Peer {
    pub(super) fn new(socket: ControlSocket, process: Option<u32>) -> Self {
        Self {
            socket,
            process,
            link: None,
            outbound: VecDeque::new(),
            records: VecDeque::new(),
            listings: 0,
            active: false,
            parked: false,
            last_request_ns: 0,
            copied_ns: 0,
        }
    }

    /// Greets a client; it has not been greeted before.
    ///
    /// Errors: what is wrong with it, or the kernel's.
    pub(super) fn greet(&mut self, hello: Record, generation: u64, number: u32) -> io::Result<()> {
        if hello.kind != RecordKind::Hello || self.link.is_some() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if hello.a != u64::from(VERSION) {
            let refusal = Record::new(RecordKind::Refused, VERSION.into(), 0, 0);
            let _ = self.socket.send(&refusal.encode(), &[]);
            return Err(io::ErrorKind::Unsupported.into());
        }
        let (link, descriptor) = Link::create()?;
        let welcome =
            Record::new(RecordKind::Welcome, VERSION.into(), generation, u64::from(number));
        self.socket.send(&welcome.encode(), &[descriptor.as_fd()])?;
        let sleeper = link.sleeper();
        self.link = Some((link, sleeper));
        Ok(())
    }

    pub(super) fn is_greeted(&self) -> bool {
        self.link.is_some()
    }

    /// The next record of the socket; `None` when nothing waits.
    ///
    /// Errors: the client is gone, or sends what no honest client sends.
    pub(super) fn record(&mut self) -> io::Result<Option<Record>> {
        let (mut bytes, mut descriptors) = ([0; RECORD_BYTES], Vec::new());
        match self.socket.receive(&mut bytes, &mut descriptors)? {
            Received::Empty => Ok(None),
            Received::Closed => Err(io::ErrorKind::UnexpectedEof.into()),
            Received::Record(length) => match Record::decode(&bytes[..length]) {
                Some(record) if descriptors.is_empty() => Ok(Some(record)),
                _ => Err(io::ErrorKind::InvalidData.into()),
            },
        }
    }

    /// Takes a turn's requests.
    ///
    /// Errors: a message that is none.
    pub(super) fn requests(&mut self, into: &mut Vec<(u32, Request)>) -> io::Result<()> {
        let stalled = self.is_stalled();
        let Some((link, _)) = self.link.as_mut().filter(|_| !stalled) else { return Ok(()) };
        for _ in 0..TURN {
            let Some(message) = link.take() else { break };
            let request = Request::decode(&message).ok_or(io::ErrorKind::InvalidData)?;
            into.push((message.tag, request));
        }
        link.publish_taken();
        Ok(())
    }

    /// Sends a reply or news, at once or when there is room.
    ///
    /// Errors: the client claims to have read what was not sent.
    pub(super) fn reply(&mut self, tag: u32, words: [u64; 6]) -> io::Result<()> {
        self.outbound.push_back((tag, words));
        self.push()
    }

    /// Sends what waits, as far as there is room.
    ///
    /// Errors: as [`Peer::reply`].
    pub(super) fn push(&mut self) -> io::Result<()> {
        let Some((link, sleeper)) = &mut self.link else { return Ok(()) };
        while let Some((tag, words)) = self.outbound.front() {
            if !link.has_room().map_err(io::Error::other)? {
                break;
            }
            let asleep = link.push(*tag, words);
            self.outbound.pop_front();
            if asleep {
                sleeper.wake();
            }
        }
        Ok(())
    }

    /// Replies that wait.
    pub(super) fn outbound(&self) -> usize {
        self.outbound.len()
    }

    /// Whether it has to be looked at now and then, because it says nothing when it reads replies.
    pub(super) fn is_looked_after(&self) -> bool {
        !self.outbound.is_empty() || self.parked
    }

    /// Whether so many replies wait that no request is taken.
    pub(super) fn is_stalled(&self) -> bool {
        self.outbound.len() >= MOST_OUTBOUND
    }

    /// Whether no request is expected soon: for `spin_ns` the client asked for nothing, and did not say
    /// that it copies into an object, which counts for [`COPYING_NS`]. With 0 nothing is polled for.
    pub(super) fn is_idle(&mut self, now_ns: u64, spin_ns: u64) -> bool {
        let idle_ns = now_ns.saturating_sub(self.last_request_ns);
        if idle_ns < spin_ns || spin_ns == 0 {
            return idle_ns >= spin_ns;
        }
        if idle_ns < COPYING_NS && self.link.as_ref().is_some_and(|(_, sleeper)| sleeper.copies()) {
            self.copied_ns = now_ns;
        }
        // The request comes a moment after the copy.
        now_ns.saturating_sub(self.copied_ns) >= spin_ns
    }

    /// Asks the client to ring from now on. `false`: a request waits.
    pub(super) fn sleep(&mut self) -> bool {
        self.link.as_mut().is_none_or(|(link, _)| link.sleep())
    }

    pub(super) fn wake(&mut self) {
        if let Some((link, _)) = &mut self.link {
            link.wake();
        }
    }

    /// Sends a record, at once or when the socket takes it.
    ///
    /// Errors: the client is gone, or reads nothing.
    pub(super) fn send(&mut self, record: Record, attached: Attached) -> io::Result<()> {
        if self.records.len() >= MOST_RECORDS {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.records.push_back((record, attached));
        self.send_waiting()
    }

    /// Sends records that wait.
    ///
    /// Errors: the client is gone.
    pub(super) fn send_waiting(&mut self) -> io::Result<()> {
        while let Some((record, attached)) = self.records.front() {
            let descriptor: Option<BorrowedFd<'_>> = match attached {
                Attached::Nothing => None,
                Attached::Segment(segment) => Some(segment.borrowed()),
                Attached::Owned(descriptor) => Some(descriptor.as_fd()),
            };
            match self.socket.send(&record.encode(), descriptor.as_slice()) {
                Ok(()) => drop(self.records.pop_front()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether records wait for the socket.
    pub(super) fn has_records(&self) -> bool {
        !self.records.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_copies_is_polled_longer_and_not_for_ever() {
        let (socket, _far) = ControlSocket::pair().unwrap();
        let mut peer = Peer::new(socket, None);
        let (link, descriptor) = Link::create().unwrap();
        let sleeper = link.sleeper();
        peer.link = Some((link, sleeper));
        let client = Link::open(descriptor).unwrap().sleeper();
        peer.last_request_ns = 1_000_000;
        let mut idle = |after: u64, spin: u64| peer.is_idle(1_000_000 + after, spin);
        assert!(!idle(19_999, 20_000) && idle(20_000, 20_000));
        let copy = client.copy();
        assert!(!idle(20_000, 20_000) && !idle(COPYING_NS - 1, 20_000));
        assert!(!idle(COPYING_NS + 19_998, 20_000), "its request comes behind the copy");
        assert!(idle(COPYING_NS + 19_999, 20_000), "it cannot keep the store awake");
        assert!(idle(0, 0), "a store that shall not poll does not");
        assert!(!idle(COPYING_NS, 1_000_000), "nor is it polled shorter");
        drop(copy);
        peer.last_request_ns = 2_000_000;
        assert!(peer.is_idle(2_020_000, 20_000), "no copy, no patience");
    }
}
