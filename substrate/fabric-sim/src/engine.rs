//! How events change the state: packets, replies, timers, breaking.

use beeline_fabric::{Opcode, QueuePairState, Status, WorkCompletion};
use beeline_os::memory::copy_in;

use crate::options::PlantedBug;
use crate::registry::Incarnation;
use crate::state::{Body, Event, LocalRange, Packet, Payload, Request, State};
use crate::target::Outcome;
use crate::trace::TraceKind;

/// Writes up to this long are read from memory when they leave; longer ones piece by piece.
const CAPTURE_BYTES: u64 = 1 << 20;

/// Greetings kept for a queue pair that is not connected yet; further ones are dropped.
const MAX_KNOCKS: usize = 16;

pub(crate) fn index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

impl State {
    /// Lets one event happen.
    pub(crate) fn handle(&mut self, event: Event) {
        match event {
            Event::Depart { qp, number } => self.depart(qp, number),
            Event::Arrive { from, from_qp, to, sequence, packet } => {
                self.arrive(from, from_qp, to, sequence, packet);
            }
            Event::Continue { qp } => self.go_on(qp),
            Event::ReceiverNotReady { qp, number } => self.receiver_not_ready(qp, number),
            Event::Timer { qp } => self.timer(qp),
            Event::PlaceDeferred { qp } => self.place_oldest_deferred(qp),
            Event::PeerDead { qp } => self.fail(qp, Status::TransportError),
            Event::PlaceLate { qp, deferred } => {
                let _ = self.place(qp, deferred.remote, &deferred.bytes);
            }
        }
    }

    /// Sends a packet to the peer of `qp`.
    pub(crate) fn send(&mut self, qp: u32, packet: Packet) {
        let Some(record) = self.queue_pairs.get_mut(&qp) else { return };
        let Some(peer) = record.peer else { return };
        let (from, sequence) = (record.owner, record.packets_sent);
        record.packets_sent += 1;
        let bytes = match &packet {
            Packet::Request(Request { body: Body::Write { payload, .. }, .. })
            | Packet::Request(Request { body: Body::Send { payload, .. }, .. }) => payload.length(),
            Packet::Reply { data, .. } => data.len() as u64,
            _ => 0,
        };
        let mut delay =
            self.random.between(*self.options.latency_ns.start(), *self.options.latency_ns.end());
        delay += bytes.saturating_mul(1000) / self.options.bytes_per_us.max(1);
        let mut losses = 0;
        while self.random.chance(self.options.lost_per_million, 1_000_000) && losses < 16 {
            losses += 1;
            let (low, high) =
                (self.options.retransmit_ns.start(), self.options.retransmit_ns.end());
            delay += self.random.between(*low, *high);
            self.record(TraceKind::Hold, qp, sequence);
        }
        self.record(TraceKind::Depart, qp, sequence);
        self.schedule(delay, Event::Arrive { from, from_qp: qp, to: peer.qp, sequence, packet });
    }

    fn depart(&mut self, qp: u32, number: u64) {
        let zero_inline = self.has_bug(PlantedBug::StaleInline);
        let Some(record) = self.queue_pairs.get_mut(&qp) else { return };
        let owner = record.owner;
        if self.nodes.get(&owner.node).is_some_and(|node| node.paused) {
            self.held.push(Event::Depart { qp, number });
            return;
        }
        let receiver_not_ready_ns =
            u64::try_from(record.options.receiver_not_ready_timeout.as_nanos()).unwrap_or(u64::MAX);
        // Delays differ, departures stay in order: whatever was posted before leaves as well.
        let mut leaving = Vec::new();
        for entry in &mut record.sends {
            if entry.number > number {
                break;
            }
            let Some(mut body) = entry.body.take() else { continue };
            if let Body::Write { payload, .. } | Body::Send { payload, .. } = &mut body {
                match payload {
                    Payload::Ranges(_) if payload.length() <= CAPTURE_BYTES => {
                        *payload = Payload::Bytes(payload.read(0, payload.length()));
                    }
                    Payload::Bytes(bytes) if zero_inline => bytes.fill(0),
                    _ => {}
                }
            }
            leaving.push(Request { number: entry.number, receiver_not_ready_ns, body });
        }
        for request in leaving {
            self.send(qp, Packet::Request(request));
        }
    }

    fn arrive(&mut self, from: Incarnation, from_qp: u32, to: u32, sequence: u64, packet: Packet) {
        let Some(record) = self.queue_pairs.get(&to) else { return };
        let owner = record.owner;
        if !self.is_alive(owner) {
            return;
        }
        if !self.reaches(from.node, owner.node) {
            self.record(TraceKind::Hold, to, sequence);
            self.held.push(Event::Arrive { from, from_qp, to, sequence, packet });
            return;
        }
        self.record(TraceKind::Arrive, to, sequence);
        let reorder = self.has_bug(PlantedBug::ReorderWithinQueuePair);
        let Some(record) = self.queue_pairs.get_mut(&to) else { return };
        match record.peer {
            Some(peer) if peer.qp == from_qp => {}
            None if matches!(packet, Packet::Hello { .. }) => {
                if record.knocks.len() < MAX_KNOCKS {
                    record.knocks.insert(from_qp, packet);
                }
                return;
            }
            _ => return,
        }
        let greeted = record.packet_expected > 0 && sequence > 0;
        if reorder && greeted {
            self.process(to, packet);
            return;
        }
        record.early.insert(sequence, packet);
        self.process_in_order(to);
    }

    /// Processes the packets that are next in order.
    pub(crate) fn process_in_order(&mut self, to: u32) {
        while let Some(record) = self.queue_pairs.get_mut(&to) {
            let Some(packet) = record.early.remove(&record.packet_expected) else { return };
            record.packet_expected += 1;
            self.process(to, packet);
        }
    }

    fn process(&mut self, to: u32, packet: Packet) {
        let now = self.now_ns();
        let Some(record) = self.queue_pairs.get_mut(&to) else { return };
        record.heard_ns = now;
        match packet {
            Packet::Hello { from_token, token, role } => {
                let Some(peer) = record.peer else { return };
                if record.state != QueuePairState::Init {
                    return;
                }
                if peer.token == from_token && record.token == token && peer.role != role {
                    record.state = QueuePairState::ReadyToSend;
                } else {
                    self.break_queue_pair(to);
                }
            }
            Packet::Request(request) => {
                if record.state == QueuePairState::ReadyToSend {
                    record.inbound.push_back(request);
                    self.serve(to);
                }
            }
            Packet::Reply { number, status, data, length } => {
                self.reply(to, number, status, &data, length);
            }
            Packet::Bye => self.break_queue_pair(to),
        }
    }

    /// The answer to a request of `qp` is back.
    fn reply(&mut self, qp: u32, number: u64, status: Status, data: &[u8], length: u64) {
        let Some(record) = self.queue_pairs.get_mut(&qp) else { return };
        let place = record.sends.iter().position(|entry| entry.number == number);
        let Some(entry) = place.and_then(|place| record.sends.remove(place)) else { return };
        let queue = record.send_queue;
        if let (Status::Success, Some(LocalRange { region, offset, .. })) = (status, &entry.result)
        {
            let memory = region.memory();
            copy_in(memory.as_ref(), index(*offset), data);
            memory.stored(index(*offset), data.len());
        }
        if entry.signalled || status != Status::Success {
            let completion = WorkCompletion {
                wr_id: entry.wr_id,
                status,
                opcode: entry.opcode,
                length: if status == Status::Success { length } else { 0 },
                qp_num: qp,
                ..WorkCompletion::EMPTY
            };
            self.complete(queue, completion);
        }
        if status != Status::Success {
            self.break_queue_pair(qp);
        }
    }

    /// Ends the oldest outstanding request of `qp` with `status` and breaks the queue pair.
    fn fail(&mut self, qp: u32, status: Status) {
        let Some(record) = self.queue_pairs.get_mut(&qp) else { return };
        if record.state == QueuePairState::Error {
            return;
        }
        let first = record.sends.pop_front();
        let queue = record.send_queue;
        if let Some(entry) = first {
            let (wr_id, opcode) = (entry.wr_id, entry.opcode);
            let completion =
                WorkCompletion { wr_id, status, opcode, qp_num: qp, ..WorkCompletion::EMPTY };
            self.complete(queue, completion);
        }
        self.break_queue_pair(qp);
    }

    /// Moves `qp` to the error state, flushes what is posted, and tells the peer.
    pub(crate) fn break_queue_pair(&mut self, qp: u32) {
        let Some(record) = self.queue_pairs.get_mut(&qp) else { return };
        if record.state == QueuePairState::Error {
            return;
        }
        let stays = self.options.planted_bug == Some(PlantedBug::StayAfterError);
        if !stays {
            record.state = QueuePairState::Error;
        }
        let sends = std::mem::take(&mut record.sends);
        let receives = std::mem::take(&mut record.receives);
        record.inbound.clear();
        (record.busy, record.starved) = (false, false);
        let (send_queue, receive_queue) = (record.send_queue, record.receive_queue);
        self.record(TraceKind::Break, qp, 0);
        // What was acknowledged is placed in the end.
        self.place_all_deferred(qp);
        if !self.has_bug(PlantedBug::DropFlushed) {
            let flushed = |wr_id, opcode| WorkCompletion {
                wr_id,
                status: Status::Flushed,
                opcode,
                qp_num: qp,
                ..WorkCompletion::EMPTY
            };
            for entry in sends {
                self.complete(send_queue, flushed(entry.wr_id, entry.opcode));
            }
            for receive in receives {
                self.complete(receive_queue, flushed(receive.wr_id, Opcode::Receive));
            }
        }
        if !stays {
            self.send(qp, Packet::Bye);
        }
    }

    /// Sees whether the peer of `qp` still answers.
    fn timer(&mut self, qp: u32) {
        let now = self.now_ns();
        let Some(record) = self.queue_pairs.get(&qp) else { return };
        if self.nodes.get(&record.owner.node).is_some_and(|node| node.paused) {
            self.held.push(Event::Timer { qp });
            return;
        }
        let timeout =
            u64::try_from(record.options.transport_timeout.as_nanos()).unwrap_or(u64::MAX);
        let Some(first) = record.sends.front() else {
            self.set_timer_flag(qp, false);
            return;
        };
        let deadline = first.posted_ns.max(record.heard_ns).saturating_add(timeout);
        if now < deadline {
            self.schedule(deadline - now, Event::Timer { qp });
        } else if self.peer_works_on_it(qp) {
            self.schedule(timeout, Event::Timer { qp });
        } else {
            self.set_timer_flag(qp, false);
            self.fail(qp, Status::TransportError);
        }
    }

    fn set_timer_flag(&mut self, qp: u32, set: bool) {
        if let Some(record) = self.queue_pairs.get_mut(&qp) {
            record.timer_set = set;
        }
    }

    /// True when the peer is there and answers "not yet".
    fn peer_works_on_it(&self, qp: u32) -> bool {
        let Some(record) = self.queue_pairs.get(&qp) else { return false };
        let Some(peer) = record.peer.and_then(|peer| self.queue_pairs.get(&peer.qp)) else {
            return false;
        };
        self.is_alive(peer.owner)
            && self.reaches(record.owner.node, peer.owner.node)
            && (peer.busy || peer.starved)
    }

    fn receiver_not_ready(&mut self, qp: u32, number: u64) {
        let Some(record) = self.queue_pairs.get_mut(&qp) else { return };
        let waits = record.starved && record.inbound.front().is_some_and(|r| r.number == number);
        if !waits {
            return;
        }
        record.starved = false;
        record.inbound.clear();
        let status = Status::ReceiverNotReady;
        self.send(qp, Packet::Reply { number, status, data: Vec::new(), length: 0 });
    }

    fn go_on(&mut self, qp: u32) {
        let Some(record) = self.queue_pairs.get(&qp) else { return };
        let from = record.peer.and_then(|peer| self.queue_pairs.get(&peer.qp));
        let from = from.map_or(record.owner.node, |from| from.owner.node);
        if !self.reaches(from, record.owner.node) {
            self.held.push(Event::Continue { qp });
            return;
        }
        let Some(record) = self.queue_pairs.get_mut(&qp) else { return };
        record.busy = false;
        self.serve(qp);
    }

    /// Executes the requests waiting at `qp` until one has to wait.
    pub(crate) fn serve(&mut self, qp: u32) {
        loop {
            let Some(record) = self.queue_pairs.get_mut(&qp) else { return };
            if record.busy || record.starved || record.state != QueuePairState::ReadyToSend {
                return;
            }
            let Some(request) = record.inbound.pop_front() else { return };
            let number = request.number;
            match self.execute(qp, request) {
                Outcome::Done(status, data, length) => {
                    self.send(qp, Packet::Reply { number, status, data, length });
                    if status != Status::Success {
                        self.break_queue_pair(qp);
                    }
                }
                Outcome::Later(request) => {
                    let Some(record) = self.queue_pairs.get_mut(&qp) else { return };
                    record.inbound.push_front(request);
                    record.busy = true;
                    let ns = self.options.chunk_bytes.saturating_mul(1000)
                        / self.options.bytes_per_us.max(1);
                    self.schedule(ns, Event::Continue { qp });
                }
                Outcome::Starved(request) => {
                    let wait_ns = request.receiver_not_ready_ns;
                    let Some(record) = self.queue_pairs.get_mut(&qp) else { return };
                    record.inbound.push_front(request);
                    record.starved = true;
                    self.schedule(wait_ns, Event::ReceiverNotReady { qp, number });
                }
                Outcome::Abandoned => {}
            }
        }
    }
}

impl State {
    /// Receives were posted for `qp`: a request that waited for one goes on.
    pub(crate) fn feed(&mut self, qp: u32) {
        let now = self.now_ns();
        let Some(record) = self.queue_pairs.get_mut(&qp) else { return };
        let (peer, waited) = (record.peer, record.starved);
        record.starved = false;
        // Until now the peer was told "not ready": it has heard from us all the time.
        if let Some(peer) =
            peer.filter(|_| waited).and_then(|peer| self.queue_pairs.get_mut(&peer.qp))
        {
            peer.heard_ns = now;
        }
        self.serve(qp);
    }
}
