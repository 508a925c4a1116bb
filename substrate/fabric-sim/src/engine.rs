//! How events change the state: packets, execution at the target, replies, breaking.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_fabric::{
    Access, FlushKind, Opcode, QueuePairState, RemoteAddress, Status, WorkCompletion,
};
use beeline_os::Persistence;
use beeline_os::memory::{MemoryObject, atomic_u64, copy_in, copy_out};

use crate::options::PlantedBug;
use crate::registry::{Demand, Incarnation};
use crate::state::{
    Body, Deferred, Event, LocalRange, Packet, Payload, PostedReceive, Request, State,
};
use crate::trace::TraceKind;

/// Writes up to this long are read from memory when they leave; longer ones piece by piece.
const CAPTURE_BYTES: u64 = 1 << 20;

/// Greetings kept for a queue pair that is not connected yet; further ones are dropped.
const MAX_KNOCKS: usize = 16;

/// How the execution of a request ended for now.
enum Outcome {
    /// Done: reply with this.
    Done(Status, Vec<u8>, u64),
    /// Goes on with an event; put it back.
    Later(Request),
    /// Waits for a receive; put it back.
    Starved(Request),
    /// Its initiator is gone.
    Abandoned,
}

fn index(value: u64) -> usize {
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
                immediate: None,
                qp_num: qp,
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
                WorkCompletion { wr_id, status, opcode, length: 0, immediate: None, qp_num: qp };
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
                length: 0,
                immediate: None,
                qp_num: qp,
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

    fn execute(&mut self, qp: u32, request: Request) -> Outcome {
        let orders = !matches!(request.body, Body::Write { immediate: None, .. });
        let flush_bug = self.has_bug(PlantedBug::FlushWithoutPlacing)
            && matches!(request.body, Body::Flush { .. });
        if orders && !flush_bug {
            self.place_all_deferred(qp);
        }
        let refused = |status| Outcome::Done(status, Vec::new(), 0);
        match request.body {
            Body::Write { .. } => self.execute_write(qp, request),
            Body::Send { .. } => self.execute_send(qp, request),
            Body::Read { remote, length } => {
                match self.check(qp, remote, length, Access::REMOTE_READ) {
                    Ok(memory) => {
                        let inside = (memory.length_bytes() as u64).saturating_sub(remote.offset);
                        let mut data = vec![0; index(length)];
                        let count = index(length.min(inside));
                        copy_out_from(memory.as_ref(), remote.offset, &mut data[..count]);
                        Outcome::Done(Status::Success, data, length)
                    }
                    Err(status) => refused(status),
                }
            }
            Body::CompareAndSwap { remote, expected, desired } => {
                self.execute_atomic(qp, remote, |word| {
                    word.compare_exchange(expected, desired, Ordering::AcqRel, Ordering::Acquire)
                        .unwrap_or_else(|seen| seen)
                })
            }
            Body::FetchAndAdd { remote, addend } => {
                let torn = self.has_bug(PlantedBug::TornAtomics) && self.random.chance(1, 7);
                let addend = if torn { 0 } else { addend };
                self.execute_atomic(qp, remote, |word| word.fetch_add(addend, Ordering::AcqRel))
            }
            Body::Flush { remote, length, kind } => {
                let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
                match self.check(qp, remote, length, rights) {
                    Ok(memory) => refused(self.flush(memory.as_ref(), remote, length, kind)),
                    Err(status) => refused(status),
                }
            }
        }
    }

    fn flush(
        &self,
        memory: &dyn MemoryObject,
        remote: RemoteAddress,
        length: u64,
        kind: FlushKind,
    ) -> Status {
        if kind == FlushKind::Visible {
            return Status::Success;
        }
        if memory.persistence() == Persistence::Volatile
            && !self.has_bug(PlantedBug::PersistVolatile)
        {
            return Status::PersistenceError;
        }
        match memory.persist(index(remote.offset), index(length)) {
            Ok(()) => Status::Success,
            Err(_) => Status::PersistenceError,
        }
    }

    fn execute_atomic(
        &mut self,
        qp: u32,
        remote: RemoteAddress,
        act: impl FnOnce(&std::sync::atomic::AtomicU64) -> u64,
    ) -> Outcome {
        let refused = |status| Outcome::Done(status, Vec::new(), 0);
        if !remote.offset.is_multiple_of(8) {
            return refused(Status::RemoteInvalidRequest);
        }
        let memory = match self.check(qp, remote, 8, Access::REMOTE_ATOMIC) {
            Ok(memory) => memory,
            Err(status) => return refused(status),
        };
        let end = remote.offset.checked_add(8);
        if end.is_none_or(|end| end > memory.length_bytes() as u64) {
            // Only a planted bug lets this through.
            return Outcome::Done(Status::Success, vec![0; 8], 8);
        }
        let old = act(atomic_u64(memory.as_ref(), index(remote.offset)));
        memory.stored(index(remote.offset), 8);
        self.record(TraceKind::Place, qp, 8);
        Outcome::Done(Status::Success, old.to_ne_bytes().to_vec(), 8)
    }

    fn execute_write(&mut self, qp: u32, request: Request) -> Outcome {
        let refused = |status| Outcome::Done(status, Vec::new(), 0);
        let Request { number, receiver_not_ready_ns, body } = request;
        let Body::Write { remote, payload, mut placed, immediate } = body else {
            return Outcome::Abandoned;
        };
        let length = payload.length();
        if let Err(status) = self.check(qp, remote, length, Access::REMOTE_WRITE) {
            return refused(status);
        }
        let again = |payload, placed| Request {
            number,
            receiver_not_ready_ns,
            body: Body::Write { remote, payload, placed, immediate },
        };
        if let (Payload::Bytes(bytes), None, Some(delays)) =
            (&payload, immediate, self.options.slow_placement_ns.clone())
        {
            let delay = self.random.between(*delays.start(), *delays.end());
            let deferred = Deferred { remote, bytes: bytes.clone() };
            if let Some(record) = self.queue_pairs.get_mut(&qp) {
                record.deferred.push_back(deferred);
            }
            self.schedule(delay, Event::PlaceDeferred { qp });
            return Outcome::Done(Status::Success, Vec::new(), length);
        }
        let late = self.has_bug(PlantedBug::ImmediateBeforeWrite) && immediate.is_some();
        if !late {
            self.place_all_deferred(qp);
            if placed < length {
                if matches!(payload, Payload::Ranges(_)) && !self.initiator_lives(qp) {
                    return Outcome::Abandoned;
                }
                let count = (length - placed).min(self.options.chunk_bytes.max(1));
                let bytes = payload.read(placed, count);
                if let Err(status) = self.place(qp, remote.advanced(placed), &bytes) {
                    return refused(status);
                }
                placed += count;
            }
            if placed < length {
                return Outcome::Later(again(payload, placed));
            }
        }
        if let Some(value) = immediate {
            let Some(receive) = self.take_receive(qp) else {
                return Outcome::Starved(again(payload, placed));
            };
            let opcode = Opcode::ReceiveWithImmediate;
            self.receive_completed(qp, receive.wr_id, opcode, length, Some(value));
            if late {
                let deferred = Deferred { remote, bytes: payload.read(0, length) };
                self.schedule(50_000, Event::PlaceLate { qp, deferred });
            }
        }
        Outcome::Done(Status::Success, Vec::new(), length)
    }

    fn execute_send(&mut self, qp: u32, request: Request) -> Outcome {
        let Some(receive) = self.take_receive(qp) else { return Outcome::Starved(request) };
        let Body::Send { payload, immediate } = request.body else { return Outcome::Abandoned };
        let length = payload.length();
        let room = receive.buffer.as_ref().map_or(0, |buffer| buffer.length);
        if length > room {
            let completion = WorkCompletion {
                wr_id: receive.wr_id,
                status: Status::LengthError,
                opcode: Opcode::Receive,
                length: 0,
                immediate: None,
                qp_num: qp,
            };
            if let Some(queue) = self.queue_pairs.get(&qp).map(|record| record.receive_queue) {
                self.complete(queue, completion);
            }
            return Outcome::Done(Status::LengthError, Vec::new(), 0);
        }
        if let Some(LocalRange { region, offset, .. }) = &receive.buffer {
            let bytes = payload.read(0, length);
            copy_in(region.memory().as_ref(), index(*offset), &bytes);
            region.memory().stored(index(*offset), bytes.len());
        }
        self.receive_completed(qp, receive.wr_id, Opcode::Receive, length, immediate);
        Outcome::Done(Status::Success, Vec::new(), length)
    }

    fn receive_completed(
        &mut self,
        qp: u32,
        wr_id: u64,
        opcode: Opcode,
        length: u64,
        immediate: Option<u32>,
    ) {
        let status = Status::Success;
        let completion = WorkCompletion { wr_id, status, opcode, length, immediate, qp_num: qp };
        if let Some(queue) = self.queue_pairs.get(&qp).map(|record| record.receive_queue) {
            self.complete(queue, completion);
        }
    }

    fn take_receive(&mut self, qp: u32) -> Option<PostedReceive> {
        let record = self.queue_pairs.get_mut(&qp)?;
        match record.shared {
            Some(shared) => self.shared_queues.get_mut(&shared)?.receives.pop_front(),
            None => record.receives.pop_front(),
        }
    }

    fn initiator_lives(&self, qp: u32) -> bool {
        let peer = self.queue_pairs.get(&qp).and_then(|record| record.peer);
        peer.and_then(|peer| self.queue_pairs.get(&peer.qp)).is_some_and(|peer| {
            peer.state == QueuePairState::ReadyToSend && self.is_alive(peer.owner)
        })
    }

    fn check(
        &self,
        qp: u32,
        remote: RemoteAddress,
        length: u64,
        rights: Access,
    ) -> Result<Arc<dyn MemoryObject>, Status> {
        let record = self.queue_pairs.get(&qp).ok_or(Status::RemoteAccessError)?;
        let demand = Demand { owner: record.owner, domain: record.domain, remote, length, rights };
        self.registry.check(&demand, self.options.planted_bug)
    }

    /// Places bytes in the target's memory; what a planted bug let through is cut to fit.
    fn place(&mut self, qp: u32, remote: RemoteAddress, bytes: &[u8]) -> Result<(), Status> {
        let memory = self.check(qp, remote, bytes.len() as u64, Access::REMOTE_WRITE)?;
        let inside = (memory.length_bytes() as u64).saturating_sub(remote.offset);
        let count = bytes.len().min(index(inside));
        if count > 0 {
            copy_in(memory.as_ref(), index(remote.offset), &bytes[..count]);
            memory.stored(index(remote.offset), count);
        }
        self.record(TraceKind::Place, qp, count as u64);
        Ok(())
    }

    fn place_oldest_deferred(&mut self, qp: u32) {
        let record = self.queue_pairs.get_mut(&qp);
        if let Some(deferred) = record.and_then(|record| record.deferred.pop_front()) {
            // A region revoked meanwhile stays as it is.
            let _ = self.place(qp, deferred.remote, &deferred.bytes);
        }
    }

    pub(crate) fn place_all_deferred(&mut self, qp: u32) {
        while self.queue_pairs.get(&qp).is_some_and(|record| !record.deferred.is_empty()) {
            self.place_oldest_deferred(qp);
        }
    }
}

/// Copies what lies inside the object; offsets outside (a planted bug) give nothing.
fn copy_out_from(memory: &dyn MemoryObject, offset: u64, target: &mut [u8]) {
    if !target.is_empty() {
        copy_out(memory, index(offset), target);
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
