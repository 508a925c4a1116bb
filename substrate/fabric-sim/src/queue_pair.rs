//! The queue pair of a simulated node, and the data by which two of them find each other.

use std::rc::Rc;
use std::time::Duration;

use beeline_fabric::{
    CompletionQueue, ConnectInfo, DeviceAttributes, FabricError, LocalData, Opcode, Operation,
    PostError, QueuePair, QueuePairState, ReceiveRequest, Role, ScatterGatherEntry,
    SharedReceiveQueue, WorkRequest,
};

use crate::objects::{readable, receives, writable};
use crate::options::PlantedBug;
use crate::state::{Body, Event, LocalRange, Packet, Payload, PeerName, SendEntry};
use crate::trace::TraceKind;
use crate::world::SimWorld;

const MAGIC: [u8; 4] = *b"BSIM";
const VERSION: u8 = 1;
const INFO_BYTES: usize = 4 + 1 + 8 + 4 + 8;

#[derive(Debug)]
pub(crate) struct SimQueuePair {
    pub(crate) world: SimWorld,
    pub(crate) id: u32,
    pub(crate) attributes: DeviceAttributes,
    pub(crate) shared: Option<Rc<dyn SharedReceiveQueue>>,
    /// Kept so that completions have somewhere to go.
    pub(crate) _queues: [Rc<dyn CompletionQueue>; 2],
}

impl SimQueuePair {
    fn too_large(&self, what: &'static str, length: u64, limit: u64) -> Result<(), PostError> {
        if length > limit { Err(PostError::TooLarge { what, limit }) } else { Ok(()) }
    }

    fn payload(&self, local: &LocalData<'_>, most: u64) -> Result<Payload, PostError> {
        let payload = match local {
            LocalData::Inline(bytes) => {
                let limit = u64::from(self.attributes.max_inline_bytes);
                self.too_large("inline data", bytes.len() as u64, limit)?;
                Payload::Bytes(bytes.to_vec())
            }
            LocalData::Gather(entries) => {
                let limit = u64::from(self.attributes.max_scatter_gather_entries);
                self.too_large("the gather list", entries.len() as u64, limit)?;
                Payload::Ranges(entries.iter().map(readable).collect::<Result<_, _>>()?)
            }
        };
        self.too_large("the message", local.length(), most)?;
        Ok(payload)
    }

    fn prepare(
        &self,
        operation: &Operation<'_>,
    ) -> Result<(Opcode, Body, Option<LocalRange>), PostError> {
        let most = self.attributes.max_message_bytes;
        Ok(match operation {
            Operation::Write { local, remote } => {
                let payload = self.payload(local, most)?;
                let body = Body::Write { remote: *remote, payload, placed: 0, immediate: None };
                (Opcode::Write, body, None)
            }
            Operation::WriteWithImmediate { local, remote, immediate } => {
                let payload = self.payload(local, most)?;
                let immediate = Some(*immediate);
                let body = Body::Write { remote: *remote, payload, placed: 0, immediate };
                (Opcode::WriteWithImmediate, body, None)
            }
            Operation::Read { local, remote } => {
                self.too_large("the read", local.length, most)?;
                let body = Body::Read { remote: *remote, length: local.length };
                (Opcode::Read, body, Some(writable(local)?))
            }
            Operation::Send { local, immediate } => {
                let payload = self.payload(local, self.attributes.max_send_bytes)?;
                (Opcode::Send, Body::Send { payload, immediate: *immediate }, None)
            }
            Operation::CompareAndSwap { local, remote, expected, desired } => {
                let body = Body::CompareAndSwap {
                    remote: *remote,
                    expected: *expected,
                    desired: *desired,
                };
                (Opcode::CompareAndSwap, body, Some(word(local)?))
            }
            Operation::FetchAndAdd { local, remote, addend } => {
                let body = Body::FetchAndAdd { remote: *remote, addend: *addend };
                (Opcode::FetchAndAdd, body, Some(word(local)?))
            }
            Operation::Flush { remote, length, kind } => {
                let body = Body::Flush { remote: *remote, length: *length, kind: *kind };
                (Opcode::Flush, body, None)
            }
        })
    }
}

/// A range that takes the old value of an atomic.
fn word(entry: &ScatterGatherEntry<'_>) -> Result<LocalRange, PostError> {
    if entry.length == 8 { writable(entry) } else { Err(PostError::LocalProtection) }
}

struct Info {
    qp: u32,
    token: u64,
}

fn parse(info: &ConnectInfo, world_token: u64) -> Result<Info, FabricError> {
    let bad = |reason| FabricError::BadConnectInfo { reason };
    let bytes: &[u8; INFO_BYTES] =
        info.0.as_slice().try_into().map_err(|_| bad("its length is wrong"))?;
    let (magic, rest) = bytes.split_at(4);
    if magic != MAGIC {
        return Err(bad("it is not from a simulated device"));
    }
    if rest[0] != VERSION {
        return Err(bad("its version is unknown"));
    }
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&rest[at..at + 8]);
        u64::from_le_bytes(word)
    };
    if word(1) != world_token {
        return Err(bad("it is from another world"));
    }
    let mut qp = [0; 4];
    qp.copy_from_slice(&rest[9..13]);
    Ok(Info { qp: u32::from_le_bytes(qp), token: word(13) })
}

impl QueuePair for SimQueuePair {
    fn qp_num(&self) -> u32 {
        self.id
    }

    fn state(&self) -> QueuePairState {
        let state = self.world.lock();
        state.queue_pairs.get(&self.id).map_or(QueuePairState::Error, |record| record.state)
    }

    fn connect_info(&self) -> ConnectInfo {
        let state = self.world.lock();
        let token = state.queue_pairs.get(&self.id).map_or(0, |record| record.token);
        let mut bytes = Vec::with_capacity(INFO_BYTES);
        bytes.extend_from_slice(&MAGIC);
        bytes.push(VERSION);
        bytes.extend_from_slice(&state.world_token.to_le_bytes());
        bytes.extend_from_slice(&self.id.to_le_bytes());
        bytes.extend_from_slice(&token.to_le_bytes());
        ConnectInfo(bytes)
    }

    fn connect(&mut self, peer: &ConnectInfo, role: Role) -> Result<(), FabricError> {
        let mut state = self.world.lock();
        let info = parse(peer, state.world_token)?;
        let needed = "connecting takes a fresh one";
        let gone = FabricError::WrongState { state: QueuePairState::Error, needed };
        let record = state.queue_pairs.get_mut(&self.id).ok_or(gone)?;
        if record.state != QueuePairState::Init || record.peer.is_some() {
            return Err(FabricError::WrongState { state: record.state, needed });
        }
        record.peer = Some(PeerName { qp: info.qp, token: info.token, role });
        let from_token = record.token;
        if let Some(greeting) = record.knocks.remove(&info.qp) {
            record.early.insert(0, greeting);
        }
        record.knocks.clear();
        state.send(self.id, Packet::Hello { from_token, token: info.token, role });
        state.process_in_order(self.id);
        Ok(())
    }

    fn wait_connected(&mut self, timeout: Duration) -> Result<(), FabricError> {
        let ended = self.world.run_until(timeout, || self.state() != QueuePairState::Init);
        match (ended, self.state()) {
            (true, QueuePairState::ReadyToSend) => Ok(()),
            (true, _) => Err(FabricError::PeerGone),
            (false, _) => Err(FabricError::ConnectTimeout {
                timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
            }),
        }
    }

    fn post_send(&mut self, requests: &[WorkRequest<'_>]) -> Result<(), PostError> {
        let mut state = self.world.lock();
        let Some(record) = state.queue_pairs.get_mut(&self.id) else {
            return Err(PostError::NotReady(QueuePairState::Error));
        };
        if record.state != QueuePairState::ReadyToSend {
            return Err(PostError::NotReady(record.state));
        }
        // Allocates, as simulation may: the data-path rule is for providers on real time.
        let prepared: Result<Vec<_>, _> =
            requests.iter().map(|request| self.prepare(&request.operation)).collect();
        let batch = prepared?;
        if record.sends.len() + requests.len() > record.options.send_depth as usize {
            return Err(PostError::QueueFull);
        }
        let posted_ns = self.world.now_ns();
        let first = record.next_number;
        for (request, (opcode, body, result)) in requests.iter().zip(batch) {
            let number = record.next_number;
            record.next_number += 1;
            record.sends.push_back(SendEntry {
                number,
                wr_id: request.wr_id,
                opcode,
                signalled: request.signalled,
                posted_ns,
                body: Some(body),
                result,
            });
        }
        let (end, timeout) = (record.next_number, record.options.transport_timeout);
        let set_timer = !record.timer_set;
        record.timer_set = true;
        for number in first..end {
            let (low, high) =
                (*state.options.departure_ns.start(), *state.options.departure_ns.end());
            let delay = state.random.between(low, high);
            state.record(TraceKind::Post, self.id, number);
            state.schedule(delay, Event::Depart { qp: self.id, number });
        }
        if set_timer {
            let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
            state.schedule(timeout, Event::Timer { qp: self.id });
        }
        Ok(())
    }

    fn post_receive(&mut self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        if self.shared.is_some() {
            return Err(PostError::TooLarge { what: "receives beside a shared queue", limit: 0 });
        }
        let posted = receives(requests)?;
        let mut state = self.world.lock();
        let Some(record) = state.queue_pairs.get_mut(&self.id) else {
            return Err(PostError::NotReady(QueuePairState::Error));
        };
        if record.state == QueuePairState::Error {
            return Err(PostError::NotReady(record.state));
        }
        if record.receives.len() + posted.len() > record.options.receive_depth as usize {
            return Err(PostError::QueueFull);
        }
        record.receives.extend(posted);
        state.feed(self.id);
        Ok(())
    }

    fn revoke(&mut self) -> Result<(), FabricError> {
        let mut state = self.world.lock();
        if state.has_bug(PlantedBug::ForgetRevocation) {
            return Ok(());
        }
        if let Some(record) = state.queue_pairs.get_mut(&self.id) {
            record.deferred.clear();
        }
        state.break_queue_pair(self.id);
        Ok(())
    }
}

impl Drop for SimQueuePair {
    fn drop(&mut self) {
        let mut state = self.world.lock();
        state.place_all_deferred(self.id);
        let live = state.queue_pairs.get(&self.id).map(|record| (record.owner, record.state));
        if let Some((owner, queue_state)) = live
            && queue_state != QueuePairState::Error
            && state.is_alive(owner)
        {
            state.send(self.id, Packet::Bye);
        }
        state.queue_pairs.remove(&self.id);
    }
}
