//! A partition: one ring of data and one of credits each way, and a set of connections, all with one
//! other host. One thread owns it and alternates between sending and receiving (SPSC of the source).
//!
//! What is decided stands in [`crate::flow`]; here it is done: packets are copied between the
//! programs' blocks and the window, rings and ends are told, commands of the monitor are carried out.
//!
//! Invariants:
//! - everything that a program or the other host wrote is checked before it is used; a program that
//!   writes nonsense loses its connection, another host the link;
//! - nothing is dropped: a packet goes only where a block is known to be free;
//! - payload before header, header before the next look: see [`crate::ring`].

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use beeline_ntb::{Outbound, Window};
use beeline_ring::packets::Corrupt;
use beeline_sockets::packets::channel::{Channel, Direction};
use beeline_sockets::packets::header::{HEADER_BYTES, Header, PacketKind};
use rustix::net::Shutdown;

use crate::conduit::{Connection, Refused};
use crate::flow::{Act, Allowance, Ends, Receipts, Schedule, Violation};
use crate::geometry::{CONTROL_SLOT_BYTES, Geometry, at};
use crate::ring::{RingFault, RingReceiver, RingSender};

/// Packets of one connection in a round, at most.
pub const BATCH: usize = 16;
/// Packets received in a round, at most.
const RECEIVE_BATCH: usize = 64;

/// A connection at this host: its own port and the other's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// This host's.
    pub own: u16,
    /// The other's.
    pub peer: u16,
}

/// What the monitor has a partition do.
#[derive(Debug)]
pub enum Command {
    /// A connection comes.
    Create {
        /// Its ports.
        key: Key,
        /// The monitor's number of it.
        id: u64,
        /// Its memory.
        channel: Arc<Channel>,
        /// The proxy's end of the placeholder.
        socket: OwnedFd,
        /// 0: the highest.
        priority: u8,
        /// Packets may go at once; else after [`Command::Open`].
        open: bool,
    },
    /// The other host has the connection, too.
    Open {
        /// Its ports.
        key: Key,
    },
    /// It is broken off.
    Break {
        /// Its ports.
        key: Key,
    },
    /// The link is up, or is not: without one every connection is broken off.
    Link {
        /// Which.
        up: bool,
    },
    /// The thread ends.
    Stop,
}

/// What a partition tells the monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A connection is known: packets for it are taken.
    Created {
        /// The monitor's number of it.
        id: u64,
    },
    /// A connection is not known any more.
    Gone {
        /// The monitor's number of it.
        id: u64,
    },
    /// Every connection was broken off after [`Command::Link`].
    Cleared,
    /// The other host broke the rules.
    Fault {
        /// Which.
        reason: String,
    },
}

/// Counters of a partition.
#[derive(Debug, Default)]
pub struct Counters {
    /// Connections now.
    pub connections: AtomicU64,
    /// Packets to the other host.
    pub sent_packets: AtomicU64,
    /// Bytes of these, without headers.
    pub sent_bytes: AtomicU64,
    /// Packets from the other host.
    pub received_packets: AtomicU64,
    /// Bytes of these.
    pub received_bytes: AtomicU64,
    /// Packets for connections that are not known.
    pub strays: AtomicU64,
    /// Packets that came and had no block: 0, or flow control is wrong.
    pub drops: AtomicU64,
    /// Packets that asked for the shadow.
    pub sync_requests: AtomicU64,
    /// Records of credits sent.
    pub credits: AtomicU64,
    /// Rings to programs.
    pub bells: AtomicU64,
    /// Times that the thread slept.
    pub sleeps: AtomicU64,
    /// Connections that were broken off.
    pub resets: AtomicU64,
    /// Bytes copied between programs' blocks and the window, both ways.
    pub copied_bytes: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Ordering::Relaxed);
}

/// Why a partition cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// Nonsense in a ring.
    #[error("in a ring: {0}")]
    Ring(#[from] RingFault),
    /// Against the rules of flow control.
    #[error("connection {} to {}: {violation}", key.own, key.peer)]
    Flow {
        /// Of which connection.
        key: Key,
        /// What.
        violation: Violation,
    },
}

/// A partition's memory and connections.
#[derive(Debug)]
pub struct Partition {
    geometry: Geometry,
    window: Window,
    words: Outbound,
    data_out: RingSender,
    data_in: RingReceiver,
    control_out: RingSender,
    control_in: RingReceiver,
    connections: Vec<Option<Connection>>,
    places: HashMap<Key, usize>,
    free: Vec<usize>,
    schedule: Schedule,
    /// Where the next round begins, for each priority.
    turns: [usize; crate::flow::PRIORITIES],
    last: Option<(Key, usize)>,
    /// Resets for connections of which nothing else is known here.
    orphans: Vec<Key>,
    is_up: bool,
    /// Positions were posted that the other end may sleep for.
    made_room: bool,
    /// This thread's rest as posted; odd: asleep, or about to be.
    rest: u64,
    /// The other's rest as echoed.
    echoed: u64,
    bell: usize,
    /// Counted for the status.
    pub counters: Arc<Counters>,
    notices: Vec<Notice>,
}

fn rings(window: &Window, geometry: &Geometry) -> [(RingSender, RingReceiver); 2] {
    let (control, data) = (geometry.control_at(), geometry.ring_at());
    let make = |from: usize, length: usize, slot: usize, shadow: usize| {
        let ring = window.part(from, length);
        let words = window.part(shadow, 64);
        (
            RingSender::new(ring.outbound, words.inbound, slot),
            RingReceiver::new(ring.inbound, words.outbound, slot),
        )
    };
    [
        make(data, geometry.ring_bytes, geometry.slot_bytes, at::READ),
        make(control, geometry.control_bytes, CONTROL_SLOT_BYTES, at::CONTROL_READ),
    ]
}

impl Partition {
    /// Over its part of the window, with the doorbell `bell`.
    #[must_use]
    pub fn new(window: Window, geometry: Geometry, schedule: Schedule, bell: usize) -> Self {
        let [(data_out, data_in), (control_out, control_in)] = rings(&window, &geometry);
        Self {
            geometry,
            words: window.outbound.clone(),
            data_out,
            data_in,
            control_out,
            control_in,
            connections: Vec::new(),
            places: HashMap::new(),
            free: Vec::new(),
            schedule,
            turns: [0; crate::flow::PRIORITIES],
            last: None,
            orphans: Vec::new(),
            is_up: false,
            made_room: false,
            rest: 0,
            echoed: 0,
            bell,
            counters: Arc::default(),
            notices: Vec::new(),
            window,
        }
    }

    /// What is to be told to the monitor.
    pub fn notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    /// The placeholders' ends, with the numbers by which [`Partition::heard`] knows them.
    pub fn socket(&self, place: usize) -> Option<&OwnedFd> {
        self.connections.get(place)?.as_ref()?.socket.as_ref()
    }

    /// Carries out a command. The place of a connection that is new, whose socket is to be watched.
    pub fn obey(&mut self, command: Command) -> Option<usize> {
        match command {
            Command::Create { key, id, channel, socket, priority, open } => {
                return self.create(key, id, channel, socket, priority, open);
            }
            Command::Open { key } => {
                if let Some(connection) =
                    self.find(key).and_then(|place| self.connections[place].as_mut())
                {
                    connection.open = true;
                }
            }
            Command::Break { key } => {
                if let Some(place) = self.find(key) {
                    self.break_off(place, true);
                }
            }
            Command::Link { up } => self.link(up),
            Command::Stop => {}
        }
        None
    }

    fn create(
        &mut self,
        key: Key,
        id: u64,
        channel: Arc<Channel>,
        socket: OwnedFd,
        priority: u8,
        open: bool,
    ) -> Option<usize> {
        if !self.is_up || self.places.contains_key(&key) {
            self.notices.push(Notice::Gone { id });
            return None;
        }
        let blocks = u32::try_from(self.geometry.blocks).unwrap_or(u32::MAX);
        let connection = Connection {
            key,
            id,
            channel,
            socket: Some(socket),
            priority: priority.min(self.schedule.priorities - 1),
            open,
            allowance: Allowance::new(blocks),
            receipts: Receipts::new(blocks),
            ends: Ends::default(),
            blocks: Vec::with_capacity(BATCH),
            filled: Vec::with_capacity(RECEIVE_BATCH),
        };
        let place = self.free.pop().unwrap_or(self.connections.len());
        if place == self.connections.len() {
            self.connections.push(None);
        }
        self.connections[place] = Some(connection);
        self.places.insert(key, place);
        self.counters.connections.store(self.places.len() as u64, Ordering::Relaxed);
        self.notices.push(Notice::Created { id });
        Some(place)
    }

    /// The link came up, or went: its rings begin anew, and nothing of before is left.
    fn link(&mut self, up: bool) {
        if !up {
            for place in 0..self.connections.len() {
                self.break_off(place, false);
            }
            self.orphans.clear();
            self.notices.push(Notice::Cleared);
        } else {
            let [(data_out, data_in), (control_out, control_in)] =
                rings(&self.window, &self.geometry);
            (self.data_out, self.data_in) = (data_out, data_in);
            (self.control_out, self.control_in) = (control_out, control_in);
            (self.rest, self.echoed) = (0, 0);
        }
        self.is_up = up;
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

    /// Breaks a connection off at this host; `tells`: the other host hears of it.
    fn break_off(&mut self, place: usize, tells: bool) {
        let Some(connection) = self.connections.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        connection.channel.proxy().reset.store(libc_reset(), Ordering::Release);
        self.counters.resets.fetch_add(1, Ordering::Relaxed);
        if tells {
            self.orphans.push(connection.key);
        }
        self.let_go(place);
    }

    /// The connection is not known here any more.
    fn let_go(&mut self, place: usize) {
        let Some(connection) = self.connections.get_mut(place).and_then(Option::take) else {
            return;
        };
        self.places.remove(&connection.key);
        self.last = None;
        self.free.push(place);
        self.counters.connections.store(self.places.len() as u64, Ordering::Relaxed);
        self.notices.push(Notice::Gone { id: connection.id });
    }

    /// News of a placeholder: a byte, room wanted, or that its last holder is gone.
    pub fn heard(&mut self, place: usize, hung_up: bool) {
        let Some(connection) = self.connections.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        if hung_up {
            connection.ends.is_closed = true;
        }
        connection.attend(&self.counters);
        connection.give_room();
    }

    /// One turn: receives, sends, tells of credits. How much was done.
    ///
    /// Errors: [`Fault`] of the other host.
    pub fn turn(&mut self) -> Result<usize, Fault> {
        if !self.is_up {
            return Ok(0);
        }
        let received = self.receive()? + self.receive_credits()?;
        let sent = self.send()?;
        let ended = self.settle_ends()?;
        let credits = self.send_credits()?;
        self.echo();
        // A sender that found its ring full sleeps until it hears that there is room.
        if sent + ended + credits > 0 || std::mem::take(&mut self.made_room) {
            self.ring_if_resting();
        }
        Ok(received + sent + ended + credits)
    }

    // ---- receiving ----

    fn receive(&mut self) -> Result<usize, Fault> {
        let mut count = 0;
        let mut touched = Vec::new();
        let mut broken = Vec::new();
        while count < RECEIVE_BATCH {
            let Some(header) = self.data_in.head()? else { break };
            let key = Key { own: header.destination, peer: header.source };
            count += 1;
            let Some(place) = self.find(key) else {
                add(&self.counters.strays, 1);
                self.data_in.pass(header);
                continue;
            };
            let Some(connection) = self.connections[place].as_mut() else { break };
            if !touched.contains(&place) {
                touched.push(place);
            }
            match header.kind {
                PacketKind::Data if connection.ends.finish_came => {
                    let violation = Violation;
                    return Err(Fault::Flow { key, violation });
                }
                PacketKind::Data => match connection.accept(&self.data_in, header) {
                    Ok(()) => {
                        add(&self.counters.received_bytes, header.payload_bytes());
                        add(&self.counters.copied_bytes, header.payload_bytes());
                    }
                    Err(Refused::NoCredit) => {
                        add(&self.counters.drops, 1);
                        return Err(Fault::Flow { key, violation: Violation });
                    }
                    Err(Refused::Program) => broken.push(place),
                },
                PacketKind::Finish => {
                    let _ = connection.publish(&self.counters);
                    connection.ends.finish_came = true;
                    connection.channel.proxy().ended.store(1, Ordering::Release);
                    if let Some(socket) = &connection.socket {
                        let _ = rustix::net::shutdown(socket, Shutdown::Write);
                    }
                }
                PacketKind::Reset => {
                    let _ = connection.publish(&self.counters);
                    self.data_in.pass(header);
                    touched.retain(|&known| known != place);
                    self.break_off(place, false);
                    continue;
                }
                PacketKind::Credit | PacketKind::Migrate | PacketKind::Extent => {
                    let word = header.encode();
                    let bad = beeline_sockets::packets::header::BadHeader {
                        word,
                        slot_bytes: self.geometry.slot_bytes,
                    };
                    return Err(RingFault::Header(bad).into());
                }
            }
            self.data_in.pass(header);
        }
        self.made_room |= self.data_in.tell();
        add(&self.counters.received_packets, count);
        for place in touched {
            if let Some(connection) = self.connections[place].as_mut()
                && connection.publish(&self.counters).is_err()
            {
                broken.push(place);
            }
        }
        broken.into_iter().for_each(|place| self.break_off(place, true));
        Ok(count)
    }

    fn receive_credits(&mut self) -> Result<usize, Fault> {
        let mut count = 0;
        while count < RECEIVE_BATCH {
            let Some(header) = self.control_in.head()? else { break };
            let consumed = self.control_in.word(0);
            let key = Key { own: header.destination, peer: header.source };
            if header.kind == PacketKind::Credit
                && let Some(place) = self.find(key)
                && let Some(connection) = self.connections[place].as_mut()
            {
                let consumed = u32::try_from(consumed).unwrap_or(u32::MAX);
                let credit = connection.allowance.credit(consumed);
                credit.map_err(|violation| Fault::Flow { key, violation })?;
            }
            self.control_in.pass(header);
            count += 1;
        }
        self.made_room |= self.control_in.tell();
        Ok(count)
    }

    // ---- sending ----

    fn send(&mut self) -> Result<usize, Fault> {
        let mut total = 0;
        loop {
            let priority = self.schedule.priority();
            let count = self.send_round(priority)?;
            total += count;
            let goes_on = self.schedule.served(count);
            if count > 0 || !goes_on {
                return Ok(total);
            }
        }
    }

    /// One round over the connections of a priority: a batch of each.
    fn send_round(&mut self, priority: u8) -> Result<usize, Fault> {
        let length = self.connections.len();
        let mut room = self.data_out.room()?;
        let begin = self.turns[usize::from(priority)];
        let mut broken = Vec::new();
        let mut bytes = 0;
        for step in 0..length {
            if room == 0 {
                // The next round begins where this one had to stop.
                self.turns[usize::from(priority)] = (begin + step) % length;
                break;
            }
            let place = (begin + step) % length;
            let Some(connection) = self.connections[place].as_mut() else { continue };
            if connection.priority != priority || !connection.open {
                continue;
            }
            match connection.stage(&mut self.data_out, room) {
                Ok((0, _)) => {}
                Ok((count, moved)) => {
                    room -= count;
                    bytes += moved;
                }
                Err(Corrupt) => broken.push(place),
            }
        }
        if room > 0 && length > 0 {
            self.turns[usize::from(priority)] = (begin + 1) % length;
        }
        let count = self.data_out.publish();
        add(&self.counters.sent_packets, count);
        add(&self.counters.sent_bytes, bytes);
        add(&self.counters.copied_bytes, bytes);
        self.counters.sync_requests.store(self.data_out.sync_requests, Ordering::Relaxed);
        broken.into_iter().for_each(|place| self.break_off(place, true));
        Ok(count)
    }

    /// Finishes, resets, and connections that are over.
    fn settle_ends(&mut self) -> Result<usize, Fault> {
        let mut count = 0;
        for place in 0..self.connections.len() {
            let Some(connection) = self.connections[place].as_mut() else { continue };
            let key = connection.key;
            match connection.look_at_ends() {
                Act::Wait => {}
                _ if self.data_out.room()? == 0 => break,
                Act::Finish => {
                    connection.ends.finish_sent = true;
                    self.data_out_control(key, PacketKind::Finish);
                    count += 1;
                }
                Act::Reset => self.break_off(place, true),
                Act::LetGo => self.let_go(place),
            }
        }
        while !self.orphans.is_empty() && self.data_out.room()? > 0 {
            if let Some(key) = self.orphans.pop() {
                self.data_out_control(key, PacketKind::Reset);
                count += 1;
            }
        }
        self.data_out.publish();
        Ok(count)
    }

    fn data_out_control(&mut self, key: Key, kind: PacketKind) {
        let length = u16::try_from(HEADER_BYTES).unwrap_or(0);
        let header = Header { source: key.own, destination: key.peer, length, sync: false, kind };
        // SAFETY: no payload.
        unsafe { self.data_out.stage(header, std::ptr::null()) };
    }

    fn send_credits(&mut self) -> Result<usize, Fault> {
        let mut broken = Vec::new();
        for place in 0..self.connections.len() {
            let Some(connection) = self.connections[place].as_mut() else { continue };
            let packets = connection.channel.packets(Direction::ToProgram);
            let consumed = packets.filled().taken();
            match connection.receipts.is_due(consumed) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(Violation) => {
                    broken.push(place);
                    continue;
                }
            }
            if self.control_out.room()? == 0 {
                break;
            }
            connection.receipts.tell(consumed);
            connection.channel.proxy().credited.store(consumed, Ordering::Relaxed);
            let length = u16::try_from(CONTROL_SLOT_BYTES).unwrap_or(0);
            let Key { own: source, peer: destination } = connection.key;
            let header =
                Header { source, destination, length, sync: false, kind: PacketKind::Credit };
            let word = u64::from(consumed);
            // SAFETY: the eight bytes of a word of ours.
            unsafe { self.control_out.stage(header, (&raw const word).cast()) };
        }
        let count = self.control_out.publish();
        add(&self.counters.credits, count);
        let total = count + broken.len();
        broken.into_iter().for_each(|place| self.break_off(place, true));
        Ok(total)
    }

    // ---- sleeping ----

    fn peer_rest(&self) -> u64 {
        self.window.inbound.word(at::REST).load(Ordering::Acquire)
    }

    /// Says to the other end's thread that its rest was seen: from now on it is rung for. Behind
    /// everything that was posted before, so that who sees the echo has all of that.
    fn echo(&mut self) {
        let rest = self.peer_rest();
        if rest != self.echoed {
            self.echoed = rest;
            self.words.fence();
            self.words.post_word(at::REST_SEEN, rest);
            self.words.fence();
            if rest % 2 == 1 {
                self.window.bells.ring(self.bell);
            }
        }
    }

    fn ring_if_resting(&self) {
        if self.peer_rest() % 2 == 1 {
            self.window.bells.ring(self.bell);
        }
    }

    /// The thread wants to sleep: says so. True once the other end's thread knows, so that whatever
    /// comes from now on rings; until then the caller goes on looking, or looks by the clock.
    pub fn rests(&mut self) -> bool {
        if !self.is_up {
            return true;
        }
        if self.rest.is_multiple_of(2) {
            self.rest += 1;
            self.words.fence();
            self.words.post_word(at::REST, self.rest);
            self.words.fence();
            self.ring_if_resting();
        }
        self.echo();
        self.window.inbound.word(at::REST_SEEN).load(Ordering::Acquire) == self.rest
    }

    /// The thread has work again.
    pub fn wakes(&mut self) {
        if self.rest % 2 == 1 && self.is_up {
            self.rest += 1;
            self.words.post_word(at::REST, self.rest);
            self.words.fence();
        }
    }

    /// True when a turn would find something: looked at after programs can see that the thread sleeps.
    #[must_use]
    pub fn has_work(&self) -> bool {
        if !self.is_up {
            return false;
        }
        fence(Ordering::SeqCst);
        let blocked = !self.data_out.room().is_ok_and(|room| room > 0);
        !self.data_in.is_empty()
            || !self.control_in.is_empty()
            || self.peer_rest() != self.echoed
            || self.connections.iter().flatten().any(|connection| connection.has_work(blocked))
    }

    /// Nothing is under way, and no connection is there.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.places.is_empty() && self.orphans.is_empty()
    }
}

fn libc_reset() -> u32 {
    u32::try_from(rustix::io::Errno::CONNRESET.raw_os_error()).unwrap_or(104)
}
