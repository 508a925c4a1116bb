//! Persistent flushes by kind of memory, and cold queue pairs.

#![allow(clippy::unwrap_used, reason = "helpers of tests may unwrap")]

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, Device, FlushKind, LocalData, Operation, QueuePair, QueuePairOptions,
    ReceiveRequest, Role, Status, WorkCompletion, WorkRequest,
};
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_os::mapping::{Mapping, Protection};
use beeline_os::{MemoryObject, Persistence};

const BOUND: Duration = Duration::from_secs(10);

/// A file that stands for each kind of durable memory.
#[derive(Debug)]
struct FileMemory {
    mapping: Mapping,
    persistence: Persistence,
}

// SAFETY: the mapping lives as long as the value, page-aligned; only raw copies reach it.
unsafe impl MemoryObject for FileMemory {
    fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    fn length_bytes(&self) -> usize {
        self.mapping.length_bytes()
    }

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        self.mapping.descriptor()
    }

    fn persistence(&self) -> Persistence {
        self.persistence
    }
}

type Ends = [(Rc<dyn CompletionQueue>, Box<dyn QueuePair>); 2];

fn connected(device: &Arc<dyn Device>, queues: [&Rc<dyn CompletionQueue>; 2]) -> Ends {
    let domain = device.allocate_protection_domain().unwrap();
    let mut ends = queues.map(|queue| {
        let options = QueuePairOptions::default();
        let pair = domain.create_queue_pair(queue, queue, None, options).unwrap();
        (Rc::clone(queue), pair)
    });
    let infos = [ends[0].1.connect_info(), ends[1].1.connect_info()];
    ends[0].1.connect(&infos[1], Role::Active).unwrap();
    ends[1].1.connect(&infos[0], Role::Passive).unwrap();
    for (_, pair) in &mut ends {
        pair.wait_connected(BOUND).unwrap();
    }
    ends
}

fn flush_on(persistence: Persistence) -> Status {
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    let mapping =
        Mapping::shared(file.try_clone().unwrap().into(), 8192, Protection::ReadWrite).unwrap();
    let device = ShmDevice::open(ShmConfig::default()).unwrap();
    let domain = device.allocate_protection_domain().unwrap();
    let queue = device.create_completion_queue(64).unwrap();
    let options = QueuePairOptions::default();
    let mut a = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
    let mut b = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
    a.connect(&b.connect_info(), Role::Active).unwrap();
    b.connect(&a.connect_info(), Role::Passive).unwrap();
    a.wait_connected(BOUND).unwrap();
    let memory = Arc::new(FileMemory { mapping, persistence });
    let region = domain.register(memory, Access::all()).unwrap();
    let remote = region.remote_address(100);
    let write = Operation::Write { local: LocalData::Inline(b"durable"), remote };
    let flush = Operation::Flush { remote, length: 7, kind: FlushKind::Persistent };
    a.post_send(&[WorkRequest::unsignalled(1, write), WorkRequest::new(2, flush)]).unwrap();
    let mut done = [WorkCompletion::EMPTY];
    assert_eq!(queue.wait(&mut done, BOUND).unwrap(), 1);
    assert_eq!(done[0].wr_id, 2);
    let mut found = [0; 7];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, 100).unwrap();
    assert_eq!(&found, b"durable");
    done[0].status
}

#[test]
fn a_persistent_flush_reaches_files_and_cache_lines_and_is_refused_by_volatile_memory() {
    assert_eq!(flush_on(Persistence::File), Status::Success);
    assert_eq!(flush_on(Persistence::CacheLine), Status::Success);
    assert_eq!(flush_on(Persistence::Volatile), Status::PersistenceError);
}

#[test]
fn a_queue_pair_that_went_cold_is_heard_by_a_poller_and_by_a_sleeper() {
    let config = ShmConfig { always_hot: 1, ..ShmConfig::default() };
    let device = ShmDevice::open(config).unwrap();
    let ours = device.create_completion_queue(256).unwrap();
    let theirs = device.create_completion_queue(256).unwrap();
    let mut pairs: Vec<Ends> = (0..8).map(|_| connected(&device, [&ours, &theirs])).collect();
    let mut out = [WorkCompletion::EMPTY; 8];
    for round in 0..20_u64 {
        for _ in 0..2_000 {
            assert_eq!(theirs.poll(&mut out).unwrap(), 0);
        }
        let [left, right] = &mut pairs[usize::try_from(round % 8).unwrap()];
        right.1.post_receive(&[ReceiveRequest { wr_id: round, buffer: None }]).unwrap();
        let send = Operation::Send { local: LocalData::Inline(&[]), immediate: Some(7) };
        left.1.post_send(&[WorkRequest::unsignalled(round, send)]).unwrap();
        let count = if round % 2 == 0 {
            let found = (0..100_000).map(|_| theirs.poll(&mut out).unwrap()).find(|&n| n > 0);
            found.unwrap()
        } else {
            theirs.wait(&mut out, BOUND).unwrap()
        };
        assert_eq!((count, out[0].wr_id), (1, round));
    }
}
