//! Execution at the target: checking, placing, atomics, flushes, receives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use beeline_fabric::{
    Access, FlushKind, Opcode, QueuePairState, RemoteAddress, Status, WorkCompletion,
};
use beeline_os::Persistence;
use beeline_os::memory::{MemoryObject, atomic_u64, copy_in, copy_out};

use crate::engine::index;
use crate::options::PlantedBug;
use crate::registry::Demand;
use crate::state::{Body, Deferred, Event, LocalRange, Payload, PostedReceive, Request, State};
use crate::trace::TraceKind;

/// How the execution of a request ended for now.
pub(crate) enum Outcome {
    /// Done: reply with this.
    Done(Status, Vec<u8>, u64),
    /// Goes on with an event; put it back.
    Later(Request),
    /// Waits for a receive; put it back.
    Starved(Request),
    /// Its initiator is gone.
    Abandoned,
}

impl State {
    pub(crate) fn execute(&mut self, qp: u32, request: Request) -> Outcome {
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
        act: impl FnOnce(&AtomicU64) -> u64,
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
                qp_num: qp,
                ..WorkCompletion::EMPTY
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
        let (qp_num, context) = (qp, 0);
        let completion =
            WorkCompletion { wr_id, status, opcode, length, immediate, qp_num, context };
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
    pub(crate) fn place(
        &mut self,
        qp: u32,
        remote: RemoteAddress,
        bytes: &[u8],
    ) -> Result<(), Status> {
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

    pub(crate) fn place_oldest_deferred(&mut self, qp: u32) {
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
