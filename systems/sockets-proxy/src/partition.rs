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

mod moves;
mod orders;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use beeline_ntb::{Outbound, Window};
use beeline_ring::packets::Corrupt;
use beeline_sockets::packets::channel::{Channel, Direction};
use beeline_sockets::packets::header::{HEADER_BYTES, Header, PacketKind};
use rustix::net::Shutdown;

use crate::conduit::{Connection, Moving, Refused};
use crate::flow::{Act, Allowance, Ends, Receipts, Schedule, Violation};
use crate::geometry::{CONTROL_SLOT_BYTES, Geometry, at};
use crate::ring::{RingFault, RingReceiver, RingSender};

pub use orders::{Command, Departure, Notice};

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
    /// Turns in which something was done.
    pub turns: AtomicU64,
    /// Connections that came from another partition.
    pub moves: AtomicU64,
    /// Rounds of sending that the limit of bandwidth ended.
    pub limited: AtomicU64,
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
    /// While it is not: connections stay.
    keeps: bool,
    /// Connections for other partitions.
    departures: Vec<Departure>,
    /// Last packets of connections that departed: behind their hand-over, in the next turn.
    answers: Vec<(Key, usize)>,
    /// The same, of connections that were handed over.
    due: Vec<(Key, usize)>,
    /// A packet at the head whose connection is not known was looked at: it may be about to arrive.
    doubted: bool,
    /// Bytes that may go before [`Partition::allow`] is called again; below 0: what went too early.
    allowed: Option<i64>,
    /// Positions were posted that the other end may sleep for.
    made_room: bool,
    /// This thread's rest as posted; odd: asleep, or about to be.
    rest: u64,
    /// The rest for which the other end's thread was woken to answer.
    insisted: u64,
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
            keeps: false,
            departures: Vec::new(),
            answers: Vec::new(),
            due: Vec::new(),
            doubted: false,
            allowed: None,
            made_room: false,
            rest: 0,
            insisted: 0,
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
                let blocks = u32::try_from(self.geometry.blocks).unwrap_or(u32::MAX);
                let flow = (Allowance::new(blocks), Receipts::new(blocks));
                if !self.is_up {
                    self.notices.push(Notice::Gone { id });
                    return None;
                }
                return self.create(key, id, channel, socket, priority, open, flow);
            }
            Command::Adopt { key, id, channel, socket, priority } => {
                return self.adopt(key, id, channel, socket, priority);
            }
            Command::Report { key, life } => self.report(key, life),
            Command::Resume { key, delivered, consumed } => {
                let place = self.find(key)?;
                let connection = self.connections[place].as_mut()?;
                match connection.resume(delivered, consumed) {
                    Ok(()) => {}
                    // A program that wrote nonsense, or another host that did: no other is touched.
                    Err(Corrupt) => self.break_off(place, true),
                }
            }
            Command::Abandon { key } => {
                let place = self.find(key)?;
                let connection = self.connections[place].as_mut()?;
                if connection.ends.finish_came {
                    connection.open = true;
                } else {
                    self.break_off(place, false);
                }
            }
            Command::Move { key, to } => {
                let place = self.find(key);
                if let Some(connection) = place.and_then(|place| self.connections[place].as_mut())
                    && connection.moving == Moving::Not
                    && connection.open
                    && to < self.geometry.partitions
                {
                    connection.moving = Moving::Leaving(to);
                }
            }
            Command::Arrive(departure) => return self.arrive(*departure.connection),
            Command::Suspend => self.suspend(),
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
            Command::Stop | Command::Siblings(_) => {}
        }
        None
    }

    #[expect(clippy::too_many_arguments, reason = "one connection, fully described")]
    fn create(
        &mut self,
        key: Key,
        id: u64,
        channel: Arc<Channel>,
        socket: OwnedFd,
        priority: u8,
        open: bool,
        (allowance, receipts): (Allowance, Receipts),
    ) -> Option<usize> {
        if self.places.contains_key(&key) {
            self.notices.push(Notice::Gone { id });
            return None;
        }
        let connection = Connection {
            key,
            id,
            channel,
            socket: Some(socket),
            priority: priority.min(self.schedule.priorities - 1),
            open,
            moving: Moving::Not,
            retell: false,
            is_doomed: false,
            is_eager: false,
            late_credit: None,
            allowance,
            receipts,
            ends: Ends::default(),
            blocks: Vec::with_capacity(BATCH),
            filled: Vec::with_capacity(RECEIVE_BATCH),
        };
        let place = self.settle(connection);
        self.notices.push(Notice::Created { id });
        Some(place)
    }

    fn settle(&mut self, connection: Connection) -> usize {
        let key = connection.key;
        let place = self.free.pop().unwrap_or(self.connections.len());
        if place == self.connections.len() {
            self.connections.push(None);
        }
        self.connections[place] = Some(connection);
        self.places.insert(key, place);
        self.counters.connections.store(self.places.len() as u64, Ordering::Relaxed);
        place
    }

    /// So many more bytes may go, of at most `most`; `None`: as many as there are.
    pub fn allow(&mut self, more: Option<u64>, most: u64) {
        let whole = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        self.allowed = more.map(|more| {
            let now = self.allowed.unwrap_or_else(|| whole(most));
            now.saturating_add(whole(more)).min(whole(most))
        });
    }

    /// Nothing goes until [`Partition::allow`] is called.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.allowed.is_some_and(|allowed| allowed <= 0)
    }

    /// The link came up, or went: its rings begin anew, and nothing of before is left.
    fn link(&mut self, up: bool) {
        // First: what is on its way to another partition is broken off, too.
        self.is_up = up;
        if !up {
            for place in 0..self.connections.len() {
                self.break_off(place, false);
            }
            self.orphans.clear();
            self.answers.clear();
            self.due.clear();
            self.keeps = false;
            self.notices.push(Notice::Cleared);
        } else {
            let [(data_out, data_in), (control_out, control_in)] =
                rings(&self.window, &self.geometry);
            (self.data_out, self.data_in) = (data_out, data_in);
            (self.control_out, self.control_in) = (control_out, control_in);
            (self.rest, self.insisted, self.echoed) = (0, 0, 0);
        }
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
        if self.is_up && connection.moving != Moving::Not {
            // The other end is to hear of it where it is then.
            connection.is_doomed = true;
            return;
        }
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
        connection.hang_up();
        self.forget(place, connection.key);
        self.notices.push(Notice::Gone { id: connection.id });
    }

    fn forget(&mut self, place: usize, key: Key) {
        self.places.remove(&key);
        self.last = None;
        self.free.push(place);
        self.counters.connections.store(self.places.len() as u64, Ordering::Relaxed);
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
        // The caller has handed over what departed in the last turn.
        self.due.append(&mut self.answers);
        let received = self.receive()? + self.receive_credits()?;
        let sent = self.settle_moves()? + self.send()?;
        let ended = self.settle_ends()?;
        let credits = self.send_credits()?;
        self.echo();
        // A sender that found its ring full sleeps until it hears that there is room.
        if sent + ended + credits > 0 || std::mem::take(&mut self.made_room) {
            self.ring_if_resting();
        }
        let done = received + sent + ended + credits;
        add(&self.counters.turns, usize::from(done > 0));
        Ok(done)
    }

    // ---- receiving ----

    fn receive(&mut self) -> Result<usize, Fault> {
        let (mut count, mut doubts) = (0, 0);
        let mut touched = Vec::new();
        let mut broken = Vec::new();
        while count < RECEIVE_BATCH {
            let Some(header) = self.data_in.head()? else { break };
            let key = Key { own: header.destination, peer: header.source };
            count += 1;
            let Some(place) = self.find(key) else {
                if !std::mem::replace(&mut self.doubted, true) {
                    // Perhaps it arrives from another partition: looked at again behind the commands.
                    doubts = 1;
                    break;
                }
                self.doubted = false;
                add(&self.counters.strays, 1);
                self.data_in.pass(header);
                continue;
            };
            self.doubted = false;
            let Some(connection) = self.connections[place].as_mut() else { break };
            if !touched.contains(&place) {
                touched.push(place);
            }
            match header.kind {
                PacketKind::Data | PacketKind::Extent if connection.ends.finish_came => {
                    let violation = Violation;
                    return Err(Fault::Flow { key, violation });
                }
                PacketKind::Data | PacketKind::Extent => {
                    match connection.accept(&self.data_in, header) {
                        Ok(()) if header.kind == PacketKind::Extent => {}
                        Ok(()) => {
                            add(&self.counters.received_bytes, header.payload_bytes());
                            add(&self.counters.copied_bytes, header.payload_bytes());
                        }
                        Err(Refused::NoCredit) => {
                            add(&self.counters.drops, 1);
                            return Err(Fault::Flow { key, violation: Violation });
                        }
                        Err(Refused::Program) => broken.push(place),
                    }
                }
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
                PacketKind::Migrate => {
                    let to = self.data_in.word(0);
                    self.data_in.pass(header);
                    touched.retain(|&known| known != place);
                    self.migrate(place, to)?;
                    continue;
                }
                PacketKind::Credit => {
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
        Ok(count + doubts)
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
                if self.keeps && !connection.open {
                    // It knows where this end stands, and this one does not yet know where it does.
                    connection.late_credit = Some(consumed);
                } else {
                    let credit = connection.allowance.credit(consumed);
                    credit.map_err(|violation| Fault::Flow { key, violation })?;
                    if connection.give_back().is_err() {
                        self.break_off(place, true);
                    }
                }
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
        if let Some(allowed) = self.allowed {
            let bytes = usize::try_from(allowed).unwrap_or(0);
            let packets = bytes.div_ceil(self.geometry.slot_bytes);
            add(&self.counters.limited, usize::from(packets == 0));
            room = room.min(packets);
        }
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
            if connection.priority != priority
                || !connection.open
                || connection.moving != Moving::Not
            {
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
        let gone = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.allowed = self.allowed.map(|allowed| allowed.saturating_sub(gone));
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
            if !connection.open || connection.moving != Moving::Not {
                continue;
            }
            let packets = connection.channel.packets(Direction::ToProgram);
            let consumed = packets.filled().taken();
            match connection.receipts.is_due(consumed, connection.is_eager) {
                Ok(true) => {}
                Ok(false) if connection.retell => {}
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
            connection.retell = false;
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
    /// comes from now on rings; until then the caller goes on looking, or looks by the clock. With
    /// `insists` the other end's thread is woken once to answer; without, one that sleeps is let sleep.
    pub fn rests(&mut self, insists: bool) -> bool {
        if !self.is_up {
            return true;
        }
        if self.rest.is_multiple_of(2) {
            self.rest += 1;
            self.words.fence();
            self.words.post_word(at::REST, self.rest);
            self.words.fence();
        }
        // Once: two threads that both want to sleep would wake each other without end.
        if insists && std::mem::replace(&mut self.insisted, self.rest) != self.rest {
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
            || !self.answers.is_empty()
            || !blocked && !self.due.is_empty()
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
