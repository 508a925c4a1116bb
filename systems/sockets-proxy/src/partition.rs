//! A partition: one ring of data and one of credits each way, and a set of connections, all with one
//! other host. One thread owns it and alternates between sending and receiving (SPSC of the source), or a second
//! one receives meanwhile (SP2C): [`Receiver`].
//!
//! What is decided stands in [`crate::flow`]; here it is done: packets are copied between the
//! programs' blocks and the window, rings and ends are told, commands of the monitor are carried out.
//!
//! Invariants:
//! - everything that a program or the other host wrote is checked before it is used; a program that
//!   writes nonsense loses its connection, another host the link;
//! - nothing is dropped: a packet goes only where a block is known to be free;
//! - payload before header, header before the next look: see [`crate::ring`].

mod ends;
mod moves;
mod orders;
mod receiving;
mod sleeping;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use beeline_ntb::{Outbound, Window};
use beeline_ring::packets::Corrupt;
use beeline_sockets::packets::channel::Channel;
use beeline_sockets::packets::header::{Header, PacketKind};
use rustix::net::Shutdown;

use crate::conduit::{Connection, Incoming, Moving};
use crate::flow::{Allowance, Ends, PRIORITIES, Receipts, Schedule, Violation};
use crate::geometry::{CONTROL_SLOT_BYTES, Geometry, at};
use crate::ring::{RingFault, RingReceiver, RingSender};

use ends::{Cause, libc_reset};
pub use orders::{Command, Departure, Notice};
pub use receiving::Receiver;
use receiving::{Half, Held};

/// Packets of one connection in a round, at most.
pub const BATCH: usize = 16;
/// Packets received in a round, at most.
pub(crate) const RECEIVE_BATCH: usize = 64;

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
    /// Packets with data to the other host.
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
}

impl Counters {
    /// Bytes copied between programs' blocks and the window, both ways.
    #[must_use]
    pub fn copied_bytes(&self) -> u64 {
        let sent = self.sent_bytes.load(Ordering::Relaxed);
        sent.wrapping_add(self.received_bytes.load(Ordering::Relaxed))
    }
}

pub(crate) fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Ordering::Relaxed);
}

/// As [`add`], for a counter that one thread at a time writes. An atomic addition would wait until the caches of
/// other processors have given up every line that was stored to before: as long as a message takes.
pub(crate) fn tally(counter: &AtomicU64, count: usize) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(count as u64);
    counter.store(sum, Ordering::Relaxed);
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
    control_in: RingReceiver,
    half: Held,
    connections: Vec<Option<Connection>>,
    places: HashMap<Key, usize>,
    free: Vec<usize>,
    schedule: Schedule,
    /// Connections of each priority.
    present: [usize; PRIORITIES],
    /// No connection has a lower priority than this one.
    lowest: u8,
    /// Where the next round begins, for each priority.
    turns: [usize; PRIORITIES],
    last: Option<(Key, usize)>,
    /// Resets for connections of which nothing else is known here.
    orphans: Vec<Key>,
    is_up: bool,
    /// While it is not: connections stay.
    keeps: bool,
    /// A connection here may have something to say about a move.
    moves: bool,
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
    /// Placeholders' ends of connections that are not known any more: see [`Partition::unwatched`].
    unwatched: Vec<Arc<OwnedFd>>,
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
        Self::with(window, geometry, schedule, bell, |half| (Held::Own(Box::new(half)), ())).0
    }

    /// As [`Partition::new`], for two threads: the second one has the [`Receiver`].
    #[must_use]
    pub fn shared(
        window: Window,
        geometry: Geometry,
        schedule: Schedule,
        bell: usize,
    ) -> (Self, Receiver) {
        Self::with(window, geometry, schedule, bell, Held::shared)
    }

    fn with<T>(
        window: Window,
        geometry: Geometry,
        schedule: Schedule,
        bell: usize,
        hold: impl FnOnce(Half) -> (Held, T),
    ) -> (Self, T) {
        let [(data_out, data_in), (control_out, control_in)] = rings(&window, &geometry);
        let counters = Arc::<Counters>::default();
        let bells = (window.clone(), bell);
        let (half, held) = hold(Half::new(data_in, control_out, bells, Arc::clone(&counters)));
        let partition = Self {
            geometry,
            words: window.outbound.clone(),
            data_out,
            control_in,
            half,
            connections: Vec::new(),
            places: HashMap::new(),
            free: Vec::new(),
            schedule,
            present: [0; PRIORITIES],
            lowest: 0,
            turns: [0; PRIORITIES],
            last: None,
            orphans: Vec::new(),
            is_up: false,
            keeps: false,
            moves: false,
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
            counters,
            notices: Vec::new(),
            unwatched: Vec::new(),
            window,
        };
        (partition, held)
    }

    /// What is to be told to the monitor.
    pub fn notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    /// Placeholders' ends that are to be watched no more, before anything else is heard. Closing them is not
    /// enough: the keeper may have the same end for a while, and the kernel goes on to tell of it, under the number
    /// that the next connection has by then.
    pub fn unwatched(&mut self) -> Vec<Arc<OwnedFd>> {
        std::mem::take(&mut self.unwatched)
    }

    /// The placeholders' ends, with the numbers by which [`Partition::heard`] knows them.
    pub fn socket(&self, place: usize) -> Option<&OwnedFd> {
        Some(&*self.connections.get(place)?.as_ref()?.socket)
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
                    Ok(()) => self.note(place),
                    // A program that wrote nonsense, or another host that did: no other is touched.
                    Err(Corrupt) => self.break_off(place, Cause::Position),
                }
            }
            Command::Abandon { key } => {
                let place = self.find(key)?;
                let connection = self.connections[place].as_mut()?;
                if connection.ends.finish_came {
                    connection.open = true;
                    self.note(place);
                } else {
                    self.break_off(place, Cause::Abandoned);
                }
            }
            Command::Move { key, to } => {
                let place = self.find(key)?;
                let connection = self.connections[place].as_mut()?;
                if connection.moving == Moving::Not
                    && connection.open
                    && to < self.geometry.partitions
                {
                    connection.moving = Moving::Leaving(to);
                    self.moves = true;
                    self.note(place);
                }
            }
            Command::Arrive(departure) => return self.arrive(*departure.connection),
            Command::Suspend => self.suspend(),
            Command::Open { key } => {
                let place = self.find(key)?;
                self.connections[place].as_mut()?.open = true;
                self.note(place);
            }
            Command::Break { key } => {
                if let Some(place) = self.find(key) {
                    self.break_off(place, Cause::Order);
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
        let socket = Arc::new(socket);
        let connection = Connection {
            key,
            id,
            incoming: Some(Incoming::new(key, &channel, &socket, receipts)),
            channel,
            socket,
            priority: priority.min(self.schedule.priorities - 1),
            open,
            moving: Moving::Not,
            is_doomed: false,
            late_credit: None,
            allowance,
            ends: Ends::default(),
        };
        let place = self.settle(connection);
        self.notices.push(Notice::Created { id });
        Some(place)
    }

    fn find_lowest(&mut self) {
        let lowest = self.present.iter().rposition(|&count| count > 0).unwrap_or(0);
        self.lowest = u8::try_from(lowest).unwrap_or(u8::MAX);
    }

    fn settle(&mut self, mut connection: Connection) -> usize {
        let (key, incoming) = (connection.key, connection.incoming.take());
        self.moves |= connection.moving != Moving::Not;
        self.present[usize::from(connection.priority)] += 1;
        self.find_lowest();
        let place = self.free.pop().unwrap_or(self.connections.len());
        if place == self.connections.len() {
            self.connections.push(None);
        }
        self.connections[place] = Some(connection);
        self.places.insert(key, place);
        if let Some(incoming) = incoming {
            self.half.get().put(place, incoming);
        }
        self.note(place);
        self.counters.connections.store(self.places.len() as u64, Ordering::Relaxed);
        place
    }

    /// Has the receiving half know whether the other end is told of credits here.
    fn note(&mut self, place: usize) {
        let Some(connection) = self.connections[place].as_ref() else { return };
        if let Some(incoming) = self.half.get().at(place) {
            incoming.tells = connection.open && connection.moving == Moving::Not;
        }
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
            self.half.get().is_up = false;
            for place in 0..self.connections.len() {
                self.break_off(place, Cause::Link);
            }
            self.orphans.clear();
            self.answers.clear();
            self.due.clear();
            self.keeps = false;
            self.notices.push(Notice::Cleared);
        } else {
            let [(data_out, data_in), (control_out, control_in)] =
                rings(&self.window, &self.geometry);
            (self.data_out, self.control_in) = (data_out, control_in);
            let mut half = self.half.get();
            (half.data_in, half.control_out) = (data_in, control_out);
            (half.is_up, half.fault) = (true, None);
            half.broken.clear();
            drop(half);
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

    /// News of a placeholder: a byte, room wanted, or that its last holder is gone.
    pub fn heard(&mut self, place: usize, hung_up: bool) {
        let Some(connection) = self.connections.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        if hung_up {
            connection.ends.is_closed = true;
            if let Some(incoming) = self.half.get().at(place) {
                incoming.is_closed = true;
            }
        }
        if let Some(incoming) = self.half.get().at(place) {
            incoming.ring(&self.counters);
        }
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
        if !self.answers.is_empty() {
            self.due.append(&mut self.answers);
        }
        let received = self.receive()? + self.receive_credits()?;
        let sent = self.settle_moves()? + self.send()?;
        let ended = self.settle_ends()?;
        let credits = self.tell()?;
        self.echo();
        // A sender that found its ring full sleeps until it hears that there is room.
        if sent + ended + credits > 0 || std::mem::take(&mut self.made_room) {
            self.ring_if_resting();
        }
        let done = received + sent + ended + credits;
        if done > 0 {
            tally(&self.counters.turns, 1);
        }
        Ok(done)
    }

    // ---- receiving ----

    /// Takes what came, or what the second thread left. How much was done, by either.
    fn receive(&mut self) -> Result<usize, Fault> {
        let (looks, mut count) = self.half.left();
        if !looks {
            return Ok(count);
        }
        for _ in 0..RECEIVE_BATCH {
            let (received, special) = self.half.get().receive()?;
            count += received;
            if !special {
                break;
            }
            count += 1;
            if !self.receive_special()? {
                break;
            }
        }
        let mut half = self.half.get();
        if half.broken.is_empty() && half.fault.is_none() {
            return Ok(count);
        }
        let (broken, fault) = (std::mem::take(&mut half.broken), half.fault.take());
        drop(half);
        broken.into_iter().for_each(|(place, cause)| self.break_off(place, cause));
        fault.map_or(Ok(count), Err)
    }

    /// The packet at the head, which is no data for a connection that is known. False: it is to be looked at again.
    fn receive_special(&mut self) -> Result<bool, Fault> {
        let Some(header) = self.half.get().data_in.head()? else { return Ok(false) };
        let key = Key { own: header.destination, peer: header.source };
        let Some(place) = self.find(key) else {
            if !std::mem::replace(&mut self.doubted, true) {
                // Perhaps it arrives from another partition: looked at again behind the commands.
                return Ok(false);
            }
            self.doubted = false;
            add(&self.counters.strays, 1);
            self.pass(header);
            return Ok(true);
        };
        self.doubted = false;
        match header.kind {
            PacketKind::Data | PacketKind::Extent => return Ok(false),
            PacketKind::Finish => {
                let Some(connection) = self.connections[place].as_mut() else { return Ok(false) };
                connection.ends.finish_came = true;
                if let Some(incoming) = self.half.get().at(place) {
                    incoming.finish_came = true;
                }
                connection.channel.proxy().ended.store(1, Ordering::Release);
                let _ = rustix::net::shutdown(&*connection.socket, Shutdown::Write);
                self.pass(header);
            }
            PacketKind::Reset => {
                self.pass(header);
                if let Some(connection) = self.connections[place].as_mut() {
                    // The other end is gone, and answers no move any more.
                    connection.moving = Moving::Not;
                }
                self.break_off(place, Cause::Reset);
            }
            PacketKind::Migrate => {
                let to = self.half.get().data_in.word(0);
                self.pass(header);
                self.migrate(place, to)?;
            }
            PacketKind::Credit => {
                let (word, slot_bytes) = (header.encode(), self.geometry.slot_bytes);
                let bad = beeline_sockets::packets::header::BadHeader { word, slot_bytes };
                return Err(RingFault::Header(bad).into());
            }
        }
        Ok(true)
    }

    fn pass(&mut self, header: Header) {
        let mut half = self.half.get();
        half.data_in.pass(header);
        // With the half in hand: its other thread counts there, too.
        tally(&self.counters.received_packets, 1);
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
                        self.break_off(place, Cause::Queue);
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
            if priority > self.lowest {
                // Those below are tried in vain.
                self.schedule.begin_anew();
                return Ok(total);
            }
            let any = self.present[usize::from(priority)] > 0;
            let count = if any { self.send_round(priority)? } else { 0 };
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
        let behind = |place: usize| if place < length { place } else { place - length };
        if let Some(allowed) = self.allowed {
            let bytes = usize::try_from(allowed).unwrap_or(0);
            let packets = bytes.div_ceil(self.geometry.slot_bytes);
            add(&self.counters.limited, usize::from(packets == 0));
            room = room.min(packets);
        }
        let begin = self.turns[usize::from(priority)];
        assert!(begin < length.max(1), "a round begins at a connection");
        let mut broken = Vec::new();
        let mut bytes = 0;
        for step in 0..length {
            if room == 0 {
                // The next round begins where this one had to stop.
                self.turns[usize::from(priority)] = behind(begin + step);
                break;
            }
            let place = behind(begin + step);
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
            self.turns[usize::from(priority)] = behind(begin + 1);
        }
        let count = self.data_out.publish();
        if count > 0 {
            tally(&self.counters.sent_packets, count);
            tally(&self.counters.sent_bytes, bytes);
            let gone = i64::try_from(bytes).unwrap_or(i64::MAX);
            self.allowed = self.allowed.map(|allowed| allowed.saturating_sub(gone));
            self.counters.sync_requests.store(self.data_out.sync_requests, Ordering::Relaxed);
        }
        if !broken.is_empty() {
            broken.into_iter().for_each(|place| self.break_off(place, Cause::Queue));
        }
        Ok(count)
    }

    /// What the second thread does, where there is one.
    fn tell(&mut self) -> Result<usize, Fault> {
        let Held::Own(half) = &mut self.half else { return Ok(0) };
        let (count, made_room) = half.tell()?;
        self.made_room |= made_room;
        if half.broken.is_empty() {
            return Ok(count);
        }
        let broken = std::mem::take(&mut half.broken);
        let total = count + broken.len();
        broken.into_iter().for_each(|(place, cause)| self.break_off(place, cause));
        Ok(total)
    }

    /// Nothing is under way, and no connection is there.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.places.is_empty() && self.orphans.is_empty()
    }
}
