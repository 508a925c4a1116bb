//! The application's handle on a connection.

use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use beeline_fabric::{
    CompletionQueue, ConnectInfo, FabricError, LocalData, Operation, PostError, QueuePair,
    QueuePairOptions, QueuePairState, ReceiveRequest, Role, ScatterGatherEntry, WorkRequest,
};

use crate::clock;
use crate::completion_queue::EngineCompletionQueue;
use crate::connection::{Connection, Mover};
use crate::device::DeviceHandle;
use crate::engine::{End, Engine, MAX_GATHER, MAX_INLINE, Outstanding, Receives, Request, Source};
use crate::frame::{MAX_MESSAGE_BYTES, MAX_SEND_BYTES};
use crate::receive_queue::check_receive;
use crate::region::{Range, RegionTable};

#[derive(Debug)]
pub(crate) struct EngineQueuePair {
    connection: Arc<Connection>,
    send_queue: Rc<dyn CompletionQueue>,
    receive_queue: Rc<dyn CompletionQueue>,
    device: Arc<DeviceHandle>,
    options: QueuePairOptions,
}

fn concrete(queue: &Rc<dyn CompletionQueue>) -> Option<&EngineCompletionQueue> {
    queue.as_any().downcast_ref()
}

impl EngineQueuePair {
    pub(crate) fn new(
        connection: Arc<Connection>,
        (send_queue, receive_queue): (Rc<dyn CompletionQueue>, Rc<dyn CompletionQueue>),
        device: Arc<DeviceHandle>,
        options: QueuePairOptions,
    ) -> Self {
        Self { connection, send_queue, receive_queue, device, options }
    }
}

/// Checks a local range.
fn local_range(
    entry: &ScatterGatherEntry<'_>,
    regions: &RegionTable,
    domain: u64,
) -> Result<Range, PostError> {
    let found = regions.local(entry.region, domain).ok_or(PostError::LocalProtection)?;
    if !found.contains(entry.offset, entry.length) {
        return Err(PostError::LocalProtection);
    }
    // Inside a mapping, so both fit in a usize.
    Ok(Range { entry: found, offset: entry.offset as usize, length: entry.length as usize })
}

/// As [`local_range`], for a range that results are placed in.
fn result_range(
    entry: &ScatterGatherEntry<'_>,
    regions: &RegionTable,
    domain: u64,
) -> Result<Range, PostError> {
    let range = local_range(entry, regions, domain)?;
    if !range.entry.is_locally_writable() {
        return Err(PostError::LocalProtection);
    }
    Ok(range)
}

/// The 8 bytes an atomic's old value goes to.
fn word_range(
    entry: &ScatterGatherEntry<'_>,
    regions: &RegionTable,
    domain: u64,
) -> Result<Range, PostError> {
    if entry.length != 8 {
        return Err(PostError::LocalProtection);
    }
    result_range(entry, regions, domain)
}

fn limited(what: &'static str, length: u64, limit: u64) -> Result<(), PostError> {
    if length > limit { Err(PostError::TooLarge { what, limit }) } else { Ok(()) }
}

impl Engine {
    fn source(&mut self, data: &LocalData<'_>, limit: u64) -> Result<Source, PostError> {
        match data {
            LocalData::Inline(bytes) => {
                limited("inline data", bytes.len() as u64, MAX_INLINE as u64)?;
                limited("message", bytes.len() as u64, limit)?;
                let depth = self.options.send_depth as usize;
                if self.inline.is_empty() {
                    self.inline = vec![0; depth * MAX_INLINE].into_boxed_slice();
                }
                let slot = self.next_inline_slot;
                self.next_inline_slot = (slot + 1) % depth;
                let start = slot * MAX_INLINE;
                self.inline[start..start + bytes.len()].copy_from_slice(bytes);
                Ok(Source::Inline { slot, length: bytes.len() })
            }
            LocalData::Gather(entries) => {
                limited("gather list", entries.len() as u64, MAX_GATHER as u64)?;
                let mut ranges = [const { None }; MAX_GATHER];
                let mut length = 0_u64;
                for (slot, entry) in ranges.iter_mut().zip(entries.iter()) {
                    let range = local_range(entry, &self.regions, self.domain)?;
                    length = length.saturating_add(entry.length);
                    *slot = Some(range);
                }
                limited("message", length, limit)?;
                Ok(Source::Gather { ranges, length })
            }
        }
    }

    fn request(&mut self, operation: &Operation<'_>) -> Result<Request, PostError> {
        let domain = self.domain;
        Ok(match operation {
            Operation::Write { local, remote } => {
                let source = self.source(local, MAX_MESSAGE_BYTES)?;
                Request::Write { source, remote: *remote, immediate: None }
            }
            Operation::WriteWithImmediate { local, remote, immediate } => {
                let source = self.source(local, MAX_MESSAGE_BYTES)?;
                Request::Write { source, remote: *remote, immediate: Some(*immediate) }
            }
            Operation::Send { local, immediate } => {
                let source = self.source(local, MAX_SEND_BYTES)?;
                Request::Send { source, immediate: *immediate }
            }
            Operation::Read { local, remote } => {
                limited("message", local.length, MAX_MESSAGE_BYTES)?;
                let local = result_range(local, &self.regions, domain)?;
                Request::Read { local, remote: *remote }
            }
            Operation::CompareAndSwap { local, remote, expected, desired } => {
                let local = word_range(local, &self.regions, domain)?;
                let (expected, desired) = (*expected, *desired);
                Request::CompareAndSwap { local, remote: *remote, expected, desired }
            }
            Operation::FetchAndAdd { local, remote, addend } => {
                let local = word_range(local, &self.regions, domain)?;
                Request::FetchAndAdd { local, remote: *remote, addend: *addend }
            }
            Operation::Flush { remote, length, kind } => {
                Request::Flush { remote: *remote, length: *length, kind: *kind }
            }
        })
    }

    fn post(&mut self, requests: &[WorkRequest<'_>]) -> Result<(), PostError> {
        if self.state() != QueuePairState::ReadyToSend {
            return Err(PostError::NotReady(self.state()));
        }
        let before = self.outstanding.len();
        if before + requests.len() > self.options.send_depth as usize {
            return Err(PostError::QueueFull);
        }
        if before == 0 {
            self.note_oldest();
        }
        let inline_before = self.next_inline_slot;
        for posted in requests {
            match self.request(&posted.operation) {
                Ok(request) => self.outstanding.push_back(Outstanding {
                    wr_id: posted.wr_id,
                    signalled: posted.signalled,
                    request,
                    end_position: 0,
                    placed: false,
                }),
                Err(error) => {
                    self.outstanding.truncate(before);
                    self.next_inline_slot = inline_before;
                    return Err(error);
                }
            }
        }
        if before == 0 {
            // The peer's time to answer begins now.
            self.progress_ns = clock::coarse_ns();
        }
        self.transmit_or_end();
        Ok(())
    }
}

impl QueuePair for EngineQueuePair {
    fn qp_num(&self) -> u32 {
        self.connection.qp_num
    }

    fn state(&self) -> QueuePairState {
        self.connection.state()
    }

    fn connect_info(&self) -> ConnectInfo {
        let identity = (self.connection.qp_num, self.connection.nonce);
        self.device.shared.transport.connect_info(&identity)
    }

    fn connect(&mut self, peer: &ConnectInfo, role: Role) -> Result<(), FabricError> {
        let transport = &self.device.shared.transport;
        let identity = transport.peer(peer)?;
        self.connection.with(Mover::Call, |engine| {
            if engine.state() != QueuePairState::Init || engine.knows_its_peer() {
                return Err(FabricError::WrongState {
                    state: engine.state(),
                    needed: "a queue pair connects once",
                });
            }
            match role {
                Role::Passive => engine.expect(identity),
                Role::Active => engine.dial(transport.dial(peer)?, identity),
            }
            Ok(())
        })
    }

    fn wait_connected(&mut self, timeout: Duration) -> Result<(), FabricError> {
        let bound = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let deadline = clock::now_ns().saturating_add(bound);
        loop {
            match self.connection.state() {
                QueuePairState::ReadyToSend => return Ok(()),
                QueuePairState::Error => return Err(FabricError::PeerGone),
                QueuePairState::Init => {}
            }
            let now = clock::now_ns();
            if now >= deadline {
                let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                return Err(FabricError::ConnectTimeout { timeout_ms });
            }
            if let Some(queue) = concrete(&self.receive_queue) {
                let decided = || self.connection.state() != QueuePairState::Init;
                queue.step(deadline - now, decided);
            }
        }
    }

    fn post_send(&mut self, requests: &[WorkRequest<'_>]) -> Result<(), PostError> {
        self.connection.with(Mover::Call, |engine| engine.post(requests))
    }

    fn post_receive(&mut self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let depth = self.options.receive_depth as usize;
        self.connection.with(Mover::Call, |engine| {
            if engine.state() == QueuePairState::Error {
                return Err(PostError::NotReady(QueuePairState::Error));
            }
            let (regions, domain) = (Arc::clone(&engine.regions), engine.domain);
            let Receives::Own(receives) = &mut engine.receives else {
                return Err(PostError::TooLarge {
                    what: "receives beside a shared queue",
                    limit: 0,
                });
            };
            let before = receives.len();
            if before + requests.len() > depth {
                return Err(PostError::QueueFull);
            }
            for request in requests {
                match check_receive(request, &regions, domain) {
                    Ok(posted) => receives.push_back(posted),
                    Err(error) => {
                        receives.truncate(before);
                        return Err(error);
                    }
                }
            }
            engine.resume_peer();
            engine.transmit_or_end();
            Ok(())
        })
    }

    fn revoke(&mut self) -> Result<(), FabricError> {
        // With the lock held no thread is inside a copy for this connection, and after `end` none
        // begins one.
        let (granted, regions) = self.connection.with(Mover::Call, |engine| {
            engine.end(End::Disconnected);
            (std::mem::take(&mut engine.granted), Arc::clone(&engine.regions))
        });
        // What the peer writes by itself it writes elsewhere from now on. What could not be moved stays
        // granted, so that another revocation tries again and does not answer that all is done.
        let (mut left, mut first) = (Vec::new(), None);
        for entry in granted.iter().filter_map(Weak::upgrade) {
            if let Err(source) = regions.withdraw(&entry) {
                left.push(Arc::downgrade(&entry));
                first.get_or_insert(source);
            }
        }
        let Some(source) = first else { return Ok(()) };
        self.connection.with(Mover::Call, |engine| engine.granted.append(&mut left));
        Err(FabricError::System { action: "moving a region away from its peer", source })
    }
}

impl Drop for EngineQueuePair {
    fn drop(&mut self) {
        self.device.forget_connection(self.connection.qp_num);
        let shared = self.connection.with(Mover::Call, |engine| {
            engine.give_back_receive();
            engine.end(End::Disconnected);
            engine.hang_up();
            engine.gathered.send.clear();
            engine.gathered.receive.clear();
            match &engine.receives {
                Receives::Shared(shared) => Some(Arc::clone(shared)),
                Receives::Own(_) => None,
            }
        });
        // Without a lock held: each of them takes its own.
        let waiting = shared.map(|shared| shared.take_waiting()).unwrap_or_default();
        waiting.iter().filter_map(Weak::upgrade).for_each(|connection| connection.receive_posted());
        let queues = [concrete(&self.send_queue), concrete(&self.receive_queue)];
        for queue in queues.into_iter().flatten() {
            queue.remove(self.connection.qp_num);
        }
    }
}
