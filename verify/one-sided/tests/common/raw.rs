//! A client made by hand on fabric, that does whatever a test tells it to.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, Device, LocalData, MemoryRegion, Opcode, Operation, PostError,
    ProtectionDomain, QueuePair, QueuePairOptions, QueuePairState, ReceiveRequest, RemoteAddress,
    RemoteKey, Role, ScatterGatherEntry, WorkCompletion, WorkRequest,
};
use beeline_kv::entry::Draft;
use beeline_kv::wire::{
    Announcement, Hello, Place, Protocol, Reply, ReplyStatus, Request, RequestKind, Welcome,
};
use beeline_os::memory::{copy_in, copy_out};

use super::{BOUND, Rig};

const RECEIVE_BYTES: u64 = 64;
const MEMORY_BYTES: usize = 1 << 20;
/// Where results go in the memory.
pub const RESULT: u64 = 512 << 10;

pub struct Raw {
    pub qp: Box<dyn QueuePair>,
    pub queue: Rc<dyn CompletionQueue>,
    pub memory: MemoryRegion,
    pub receives: MemoryRegion,
    pub welcome: Welcome,
    pub replies: Vec<Reply>,
    /// Immediates of results placed.
    pub placed: Vec<(u32, u64)>,
    pub broken: bool,
    _domain: Arc<dyn ProtectionDomain>,
    _device: Arc<dyn Device>,
}

impl Raw {
    pub fn connect(rig: &Rig, window: u16, receives: u16) -> Self {
        Self::speaking(rig, Protocol::Boom, window, receives)
    }

    pub fn speaking(rig: &Rig, protocol: Protocol, window: u16, receives: u16) -> Self {
        let device = rig.device();
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(4096).unwrap();
        let options =
            QueuePairOptions { send_depth: 512, receive_depth: 256, ..QueuePairOptions::default() };
        let mut qp = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
        let everything = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let memory =
            domain.register(device.allocate_memory(MEMORY_BYTES).unwrap(), everything).unwrap();
        let inbox = device.allocate_memory(256 * RECEIVE_BYTES as usize).unwrap();
        let inbox = domain.register(inbox, Access::LOCAL_WRITE).unwrap();
        let hello = Hello { protocol, window, shard: 0, request_bytes: 256, slot_bytes: 4096 };
        let (info, welcome) = super::hello(rig, &qp.connect_info(), &hello.encode());
        qp.connect(&info.unwrap(), Role::Active).unwrap();
        let mut this = Self {
            qp,
            queue,
            memory,
            receives: inbox,
            welcome: welcome.unwrap(),
            replies: Vec::new(),
            placed: Vec::new(),
            broken: false,
            _domain: domain,
            _device: device,
        };
        for index in 0..receives {
            this.post_receive(u64::from(index));
        }
        this.qp.wait_connected(Duration::from_secs(5)).unwrap();
        this
    }

    pub fn post_receive(&mut self, index: u64) {
        let offset = index * RECEIVE_BYTES;
        let buffer = ScatterGatherEntry { region: &self.receives, offset, length: RECEIVE_BYTES };
        let _ = self.qp.post_receive(&[ReceiveRequest { wr_id: index, buffer: Some(buffer) }]);
    }

    /// SENDs `bytes`, as they are.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), PostError> {
        copy_in(self.memory.memory().as_ref(), 0, bytes);
        let local =
            [ScatterGatherEntry { region: &self.memory, offset: 0, length: bytes.len() as u64 }];
        let local = LocalData::Gather(&local);
        let operation = Operation::Send { local, immediate: None };
        self.qp.post_send(&[WorkRequest::new(1 << 32, operation)])
    }

    /// Writes `bytes` at `place`, with `immediate` if there is one.
    pub fn write(&mut self, place: Place, bytes: &[u8], immediate: Option<u32>) {
        copy_in(self.memory.memory().as_ref(), 4096, bytes);
        let local =
            [ScatterGatherEntry { region: &self.memory, offset: 4096, length: bytes.len() as u64 }];
        let local = LocalData::Gather(&local);
        let remote = RemoteAddress { key: RemoteKey(place.key), offset: place.offset };
        let operation = match immediate {
            Some(immediate) => Operation::WriteWithImmediate { local, remote, immediate },
            None => Operation::Write { local, remote },
        };
        let _ = self.qp.post_send(&[WorkRequest::new(1 << 32, operation)]);
    }

    pub fn poll(&mut self) {
        let mut completions = [WorkCompletion::EMPTY; 64];
        let count = self.queue.poll(&mut completions).unwrap();
        for completion in &completions[..count] {
            if !completion.is_success() {
                self.broken = true;
                continue;
            }
            match completion.opcode {
                Opcode::Receive => {
                    let mut bytes = vec![0; completion.length as usize];
                    let offset = (completion.wr_id * RECEIVE_BYTES) as usize;
                    copy_out(self.receives.memory().as_ref(), offset, &mut bytes);
                    self.replies.push(Reply::decode(&bytes).unwrap());
                    self.post_receive(completion.wr_id);
                }
                Opcode::ReceiveWithImmediate => {
                    self.placed.push((completion.immediate.unwrap(), completion.length));
                    self.post_receive(completion.wr_id);
                }
                _ => {}
            }
        }
        if self.qp.state() == QueuePairState::Error {
            self.broken = true;
        }
    }

    /// Runs everybody until this client's next reply.
    pub fn reply(&mut self, rig: &Rig) -> Reply {
        let start = Instant::now();
        while self.replies.is_empty() {
            self.poll();
            rig.step();
            assert!(!self.broken, "the connection broke");
            assert!(start.elapsed() < BOUND, "no reply came");
        }
        self.replies.remove(0)
    }

    /// Runs everybody until this client's connection is over.
    pub fn until_broken(&mut self, rig: &Rig) {
        let start = Instant::now();
        while !self.broken {
            self.poll();
            rig.step();
            assert!(start.elapsed() < BOUND, "the connection did not end");
        }
    }

    /// Runs everybody for a while, without asking anything of anybody.
    pub fn idle(&mut self, rig: &Rig, turns: usize) {
        for _ in 0..turns {
            self.poll();
            rig.step();
        }
    }

    pub fn request(&mut self, kind: RequestKind, key: &[u8]) -> Request {
        let place = self.memory.remote_address(RESULT);
        Request {
            result: Place { key: place.key.0, offset: place.offset },
            result_bytes: (MEMORY_BYTES as u64 - RESULT) as u32,
            key_bytes: key.len() as u32,
            ..Request::new(kind, 77)
        }
    }

    pub fn ask(&mut self, rig: &Rig, request: Request, key: &[u8]) -> Reply {
        let mut bytes = request.encode().to_vec();
        bytes.extend_from_slice(key);
        self.send(&bytes).unwrap();
        self.reply(rig)
    }

    /// Asks for a segment.
    pub fn grant(&mut self, rig: &Rig) -> Reply {
        let request = Request::new(RequestKind::Grant, 5);
        let reply = self.ask(rig, request, &[]);
        assert_eq!(reply.status, ReplyStatus::Ok);
        reply
    }

    /// Writes `entry` into the granted segment, announces it, waits for the verdict.
    pub fn announce(&mut self, rig: &Rig, grant: &Reply, offset: u32, entry: &[u8]) -> Reply {
        self.announce_as(rig, grant, offset, entry, false)
    }

    pub fn announce_as(
        &mut self,
        rig: &Rig,
        grant: &Reply,
        offset: u32,
        entry: &[u8],
        in_place: bool,
    ) -> Reply {
        let place = at(grant, offset);
        let announcement = Announcement { in_place, grant: grant.grant, offset };
        self.write(place, entry, Some(announcement.encode()));
        self.reply(rig)
    }
}

/// A place in the granted segment.
pub fn at(grant: &Reply, offset: u32) -> Place {
    let place = grant.place.unwrap();
    Place { key: place.key, offset: place.offset + u64::from(offset) }
}

/// A well-formed entry.
pub fn entry(key: &[u8], value: &[u8], slot_bytes: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    Draft { key, value, slot_bytes, ..Draft::default() }.form(&mut bytes).unwrap();
    bytes
}
