//! What the device for one process does without, and what it says to others. One test: it counts
//! what its process has.

#![allow(clippy::unwrap_used, reason = "a test ends where its harness breaks")]

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, Device, FabricError, LocalData, MemoryRegion, Operation, QueuePair,
    QueuePairOptions, Role, Status, WorkCompletion, WorkRequest,
};
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_os::memory::load_u64;

struct End {
    queue: Rc<dyn CompletionQueue>,
    pair: Box<dyn QueuePair>,
    region: MemoryRegion,
}

fn end(device: &Arc<dyn Device>) -> End {
    let domain = device.allocate_protection_domain().unwrap();
    let queue = device.create_completion_queue(16).unwrap();
    let pair = domain.create_queue_pair(&queue, &queue, None, QueuePairOptions::default()).unwrap();
    let region = domain.register(device.allocate_memory(4096).unwrap(), Access::all()).unwrap();
    End { queue, pair, region }
}

fn connect(a: &mut End, b: &mut End) {
    a.pair.connect(&b.pair.connect_info(), Role::Active).unwrap();
    b.pair.connect(&a.pair.connect_info(), Role::Passive).unwrap();
    a.pair.wait_connected(Duration::from_secs(10)).unwrap();
    b.pair.wait_connected(Duration::from_secs(10)).unwrap();
}

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

fn one(end: &End) -> WorkCompletion {
    let mut one = [WorkCompletion::EMPTY];
    assert_eq!(end.queue.wait(&mut one, Duration::from_secs(10)).unwrap(), 1);
    one[0]
}

#[test]
fn it_has_no_thread_and_no_descriptor_but_those_that_queues_sleep_on() {
    let threads = entries("/proc/self/task");
    let before = entries("/proc/self/fd");
    let open = || ShmDevice::in_process(ShmConfig::default()).unwrap();
    let (near, far) = (open(), open());
    let bare = near.create_completion_queue(16).unwrap();
    let of_a_queue = entries("/proc/self/fd") - before;
    drop(bare);
    assert_eq!(entries("/proc/self/fd"), before, "a device has none, and a queue gave its back");
    let (mut a, mut b) = (end(&near), end(&far));
    connect(&mut a, &mut b);
    let bytes = 0xBEE_u64.to_ne_bytes();
    let remote = b.region.remote_address(64);
    let write = Operation::Write { local: LocalData::Inline(&bytes), remote };
    a.pair.post_send(&[WorkRequest::new(1, write)]).unwrap();
    assert!(one(&a).is_success());
    assert_eq!(load_u64(b.region.memory().as_ref(), 64), 0xBEE);
    assert_eq!(entries("/proc/self/fd"), before + 2 * of_a_queue, "connected and used");
    assert_eq!(entries("/proc/self/task"), threads, "threads");
    assert_eq!(near.attributes().provider, "process");

    // It and a device for many processes are told that they cannot meet.
    let wide = ShmDevice::open(ShmConfig::default()).unwrap();
    let (mut c, mut d) = (end(&wide), end(&near));
    let (wide_info, plain_info) = (c.pair.connect_info(), d.pair.connect_info());
    for (pair, other) in [(&mut c.pair, plain_info), (&mut d.pair, wide_info)] {
        let refused = pair.connect(&other, Role::Active);
        assert!(matches!(refused, Err(FabricError::BadConnectInfo { .. })), "{refused:?}");
    }
    // Memory without a descriptor is nothing that another process could map.
    let domain = wide.allocate_protection_domain().unwrap();
    let plain = near.allocate_memory(4096).unwrap();
    let refused = domain.register(plain, Access::REMOTE_READ);
    assert!(matches!(refused, Err(FabricError::CannotRegister { .. })), "{refused:?}");

    // A device that goes away ends its connections.
    drop((b, far));
    a.pair.post_send(&[WorkRequest::new(2, write)]).unwrap_or(());
    while a.pair.state() != beeline_fabric::QueuePairState::Error {
        let mut some = [WorkCompletion::EMPTY; 4];
        let count = a.queue.wait(&mut some, Duration::from_millis(5)).unwrap();
        for completion in &some[..count] {
            assert!(
                matches!(
                    completion.status,
                    Status::Success | Status::Flushed | Status::TransportError
                ),
                "{completion:?}"
            );
        }
    }
}
