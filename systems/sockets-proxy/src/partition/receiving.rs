//! The receiving half of a partition: the ring that the other host writes, and the credits that go back to it.
//!
//! It takes what is common, data for connections that are known, and leaves everything else at the head of the ring
//! for the [partition](super::Partition), which knows of ends and moves. Where one thread alternates (SPSC of the
//! source) the partition has it to itself; with two threads (SP2C) it is shared with a [`Receiver`], which receives
//! while the partition sends.
//!
//! Invariants: whoever changes what is known of a connection here has the half to itself; what is posted here is
//! behind a full fence before the half is let go, so that a rest that is echoed later is echoed behind it.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use beeline_ntb::Window;
use beeline_sockets::packets::channel::Direction;
use beeline_sockets::packets::header::{Header, PacketKind};

use super::ends::Cause;
use super::{Counters, Fault, Key, RECEIVE_BATCH, add, tally};
use crate::conduit::{Incoming, Refused};
use crate::flow::Violation;
use crate::geometry::{CONTROL_SLOT_BYTES, at};
use crate::ring::{RingReceiver, RingSender};

/// The half.
#[derive(Debug)]
pub(super) struct Half {
    pub(super) data_in: RingReceiver,
    pub(super) control_out: RingSender,
    /// By the partition's places.
    connections: Vec<Option<Incoming>>,
    places: HashMap<Key, usize>,
    last: Option<(Key, usize)>,
    touched: Vec<usize>,
    /// Connections that are to be broken off, and the other host told.
    pub(super) broken: Vec<(usize, Cause)>,
    /// What the other host did against the rules.
    pub(super) fault: Option<Fault>,
    pub(super) is_up: bool,
    /// For the other end's rest, and its bell.
    window: Window,
    bell: usize,
    counters: Arc<Counters>,
}

impl Half {
    pub(super) fn new(
        data_in: RingReceiver,
        control_out: RingSender,
        (window, bell): (Window, usize),
        counters: Arc<Counters>,
    ) -> Self {
        Self {
            data_in,
            control_out,
            connections: Vec::new(),
            places: HashMap::new(),
            last: None,
            touched: Vec::new(),
            broken: Vec::new(),
            fault: None,
            is_up: false,
            window,
            bell,
            counters,
        }
    }

    /// The connection at a place, which was put there.
    pub(super) fn at(&mut self, place: usize) -> Option<&mut Incoming> {
        self.connections.get_mut(place)?.as_mut()
    }

    pub(super) fn put(&mut self, place: usize, incoming: Incoming) {
        if self.connections.len() <= place {
            self.connections.resize_with(place + 1, || None);
        }
        self.places.insert(incoming.key, place);
        self.connections[place] = Some(incoming);
    }

    pub(super) fn take(&mut self, place: usize) -> Option<Incoming> {
        let incoming = self.connections.get_mut(place)?.take()?;
        self.places.remove(&incoming.key);
        self.last = None;
        // Found by the second thread, and not yet heard of by the first: not to be said of the next one at this place.
        self.broken.retain(|&(broken, _)| broken != place);
        Some(incoming)
    }

    fn find(&mut self, key: Key) -> Option<usize> {
        match self.last {
            Some((known, place)) if known == key => Some(place),
            _ => {
                let place = *self.places.get(&key)?;
                self.last = Some((key, place));
                Some(place)
            }
        }
    }

    /// Data at the head of the ring, up to a packet that is something else: how many packets, and whether such a one
    /// is there.
    pub(super) fn receive(&mut self) -> Result<(usize, bool), Fault> {
        let (mut count, mut special, mut bytes) = (0, false, 0);
        while count < RECEIVE_BATCH {
            let Some(header) = self.data_in.head()? else { break };
            let key = Key { own: header.destination, peer: header.source };
            let place = self.find(key);
            let data = matches!(header.kind, PacketKind::Data | PacketKind::Extent);
            let known = place.and_then(|place| self.connections[place].as_mut());
            let (Some(place), Some(incoming), true) = (place, known, data) else {
                special = true;
                break;
            };
            if incoming.finish_came {
                return Err(Fault::Flow { key, violation: Violation });
            }
            if self.touched.last() != Some(&place) && !self.touched.contains(&place) {
                self.touched.push(place);
            }
            match incoming.accept(&self.data_in, header) {
                Ok(()) if header.kind == PacketKind::Extent => {}
                Ok(()) => bytes += header.payload_bytes(),
                Err(Refused::NoCredit) => {
                    add(&self.counters.drops, 1);
                    return Err(Fault::Flow { key, violation: Violation });
                }
                Err(Refused::NoBlock) => self.broken.push((place, Cause::NoBlock)),
                Err(Refused::Queue) => self.broken.push((place, Cause::Queue)),
            }
            self.data_in.pass(header);
            count += 1;
        }
        while let Some(place) = self.touched.pop() {
            if let Some(incoming) = self.connections[place].as_mut()
                && incoming.publish(&self.counters).is_err()
            {
                self.broken.push((place, Cause::Queue));
            }
        }
        // Behind what the programs wait for.
        if count > 0 {
            tally(&self.counters.received_packets, count);
            tally(&self.counters.received_bytes, bytes);
        }
        Ok((count, special))
    }

    /// Tells the other host how far this one has read, and what programs have consumed. How many credits went, and
    /// whether room was made that a sender may sleep for.
    pub(super) fn tell(&mut self) -> Result<(usize, bool), Fault> {
        let made_room = self.data_in.tell();
        for place in 0..self.connections.len() {
            let Some(incoming) = self.connections[place].as_mut() else { continue };
            if incoming.owes_ring {
                incoming.ring(&self.counters);
            }
            if !incoming.looks_for_credit() {
                continue;
            }
            let consumed = incoming.channel.returned(Direction::ToProgram);
            match incoming.receipts.is_due(consumed, incoming.is_eager) {
                Ok(true) => {}
                Ok(false) if incoming.retell => {}
                Ok(false) => continue,
                Err(Violation) => {
                    self.broken.push((place, Cause::Consumed));
                    continue;
                }
            }
            if self.control_out.room()? == 0 {
                break;
            }
            incoming.receipts.tell(consumed);
            incoming.retell = false;
            incoming.channel.proxy().credited.store(consumed, Ordering::Relaxed);
            let length = u16::try_from(CONTROL_SLOT_BYTES).unwrap_or(0);
            let Key { own: source, peer: destination } = incoming.key;
            let header =
                Header { source, destination, length, sync: false, kind: PacketKind::Credit };
            let word = u64::from(consumed);
            // SAFETY: the eight bytes of a word of ours.
            unsafe { self.control_out.stage(header, (&raw const word).cast()) };
        }
        let count = self.control_out.publish();
        if count > 0 {
            tally(&self.counters.credits, count);
        }
        Ok((count, made_room))
    }

    /// True when a turn would find something.
    pub(super) fn has_work(&self) -> bool {
        let due = |incoming: &Incoming| {
            if incoming.owes_ring || !incoming.looks_for_credit() {
                return incoming.owes_ring;
            }
            let consumed = incoming.channel.returned(Direction::ToProgram);
            let due = || incoming.receipts.is_due(consumed, incoming.is_eager) != Ok(false);
            incoming.retell || due()
        };
        !self.data_in.is_empty()
            || !self.broken.is_empty()
            || self.fault.is_some()
            || self.connections.iter().flatten().any(due)
    }
}

/// What two threads of a partition tell each other.
#[derive(Debug, Default)]
pub(super) struct Signs {
    /// The partition's thread sleeps, or is about to: so does the other one.
    asleep: AtomicBool,
    /// The thread ends.
    stop: AtomicBool,
    /// Something is left for the partition's thread.
    left: AtomicBool,
    /// Packets received and credits sent so far.
    done: AtomicU64,
}

/// A half in one thread's hands, or in two.
#[derive(Debug)]
pub(super) enum Held {
    Own(Box<Half>),
    Shared { half: Arc<Mutex<Half>>, signs: Arc<Signs>, seen: u64 },
}

/// The half for a moment.
pub(super) enum Guard<'a> {
    Own(&'a mut Half),
    Shared(MutexGuard<'a, Half>),
}

impl Deref for Guard<'_> {
    type Target = Half;

    fn deref(&self) -> &Half {
        match self {
            Guard::Own(half) => half,
            Guard::Shared(half) => half,
        }
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut Half {
        match self {
            Guard::Own(half) => half,
            Guard::Shared(half) => half,
        }
    }
}

impl Held {
    #[inline]
    pub(super) fn get(&mut self) -> Guard<'_> {
        match self {
            Held::Own(half) => Guard::Own(half),
            Held::Shared { half, .. } => {
                Guard::Shared(half.lock().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }

    /// As [`Half::has_work`].
    pub(super) fn has_work(&self) -> bool {
        match self {
            Held::Own(half) => half.has_work(),
            Held::Shared { half, .. } => {
                half.lock().unwrap_or_else(PoisonError::into_inner).has_work()
            }
        }
    }

    /// Whether the partition's thread has to look at the half itself, and what the other thread did since the last
    /// question.
    pub(super) fn left(&mut self) -> (bool, usize) {
        match self {
            Held::Own(_) => (true, 0),
            Held::Shared { signs, seen, .. } => {
                // Acquire with the Release of the other thread.
                let done = signs.done.load(Ordering::Acquire);
                let more = done.wrapping_sub(std::mem::replace(seen, done));
                (signs.left.swap(false, Ordering::AcqRel), usize::try_from(more).unwrap_or(0))
            }
        }
    }

    /// The half in two threads' hands.
    pub(super) fn shared(half: Half) -> (Self, Receiver) {
        let half = Arc::new(Mutex::new(half));
        let signs = Arc::new(Signs::default());
        let receiver = Receiver { half: Arc::clone(&half), signs: Arc::clone(&signs) };
        (Held::Shared { half, signs, seen: 0 }, receiver)
    }
}

/// The second thread of a partition (SP2C of the source): it receives and tells of credits for as long as the
/// partition's own thread is awake.
#[derive(Clone, Debug)]
pub struct Receiver {
    half: Arc<Mutex<Half>>,
    signs: Arc<Signs>,
}

impl Receiver {
    /// One turn: what was done. Whatever is not common is left to the partition's thread.
    pub fn turn(&self) -> usize {
        let mut half = self.half.lock().unwrap_or_else(PoisonError::into_inner);
        if !half.is_up || half.fault.is_some() {
            return 0;
        }
        let mut once = || -> Result<(usize, bool, bool), Fault> {
            let (received, special) = half.receive()?;
            let (credits, made_room) = half.tell()?;
            Ok((received + credits, special, credits > 0 || made_room))
        };
        let outcome = once();
        let (done, special) = match outcome {
            Ok((done, special, rings)) => {
                if rings {
                    // Before the other end's rest is looked at, and before it is echoed.
                    fence(Ordering::SeqCst);
                    if half.window.inbound.word(at::REST).load(Ordering::Acquire) % 2 == 1 {
                        half.window.bells.ring(half.bell);
                    }
                }
                (done, special)
            }
            Err(fault) => {
                half.fault = Some(fault);
                (0, true)
            }
        };
        let left = special || !half.broken.is_empty();
        drop(half);
        if left {
            self.signs.left.store(true, Ordering::Release);
        }
        if done > 0 {
            // Release with the Acquire of `Held::left`.
            self.signs.done.fetch_add(done as u64, Ordering::Release);
        }
        done
    }

    /// The partition's thread falls asleep, or wakes.
    pub fn asleep(&self, asleep: bool) {
        self.signs.asleep.store(asleep, Ordering::SeqCst);
    }

    /// The partition's thread sleeps.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.signs.asleep.load(Ordering::SeqCst)
    }

    /// Its thread is to end.
    pub fn stop(&self) {
        self.signs.stop.store(true, Ordering::SeqCst);
    }

    /// As told by [`Receiver::stop`].
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.signs.stop.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use beeline_ntb::bells::Silent;
    use beeline_ntb::window::Mapped;
    use beeline_ntb::{Inbound, Outbound};
    use beeline_os::Mapping;

    use super::super::{Command, Partition};
    use super::*;
    use crate::flow::Schedule;
    use crate::geometry::Geometry;

    const LENGTH: usize = 64 << 10;

    #[test]
    fn a_ring_that_is_owed_is_work_and_comes_with_the_next_turn() {
        let geometry = Geometry::dividing(LENGTH, 1, 128, 16).unwrap();
        let mapping = Arc::new(Mapping::anonymous(2 * LENGTH).unwrap());
        let inbound = Inbound::new(Arc::clone(&mapping), 0, LENGTH);
        let outbound = Outbound::new(Arc::new(Mapped::new(mapping, LENGTH, LENGTH)));
        let (at, bytes) = geometry.partition(0);
        let window = Window { inbound, outbound, bells: Arc::new(Silent) }.part(at, bytes);
        let mut partition = Partition::new(window, geometry, Schedule::new(8, 4), 1);
        partition.obey(Command::Link { up: true });
        let (mut incoming, mut program) = crate::conduit::tests::told();
        incoming.owes_ring = true;
        partition.half.get().put(0, incoming);
        assert!(partition.has_work(), "the thread would sleep");
        partition.turn().unwrap();
        assert_eq!(program.read(&mut [0; 8]).ok(), Some(1));
        assert!(!partition.has_work());
    }
}
