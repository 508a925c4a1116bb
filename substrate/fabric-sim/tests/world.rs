//! What only simulation can do: time, faults, replay.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use beeline_env::Clock;
use beeline_fabric::{
    Access, CompletionQueue, Device, FlushKind, LocalData, MemoryRegion, Operation, PostError,
    ProtectionDomain, QueuePair, QueuePairOptions, QueuePairState, Role, ScatterGatherEntry,
    Status, WorkCompletion, WorkRequest,
};
use beeline_fabric_sim::{SimOptions, SimWorld, TraceKind};
use beeline_os::Persistence;
use beeline_os::memory::{MemoryObject, copy_in, copy_out};
use proptest::prelude::*;

struct Node {
    device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
}

struct End {
    qp: Box<dyn QueuePair>,
    cq: Rc<dyn CompletionQueue>,
}

fn node(world: &SimWorld, number: u32) -> Node {
    let device: Arc<dyn Device> = world.device(number);
    let domain = device.allocate_protection_domain().unwrap();
    Node { device, domain }
}

impl Node {
    fn end(&self) -> End {
        let cq = self.device.create_completion_queue(1024).unwrap();
        let options = QueuePairOptions {
            transport_timeout: Duration::from_millis(10),
            ..QueuePairOptions::default()
        };
        let qp = self.domain.create_queue_pair(&cq, &cq, None, options).unwrap();
        End { qp, cq }
    }

    fn region(&self, length: usize) -> MemoryRegion {
        let memory = self.device.allocate_memory(length).unwrap();
        self.domain.register(memory, Access::all()).unwrap()
    }
}

fn connect(world: &SimWorld, near: &Node, far: &Node) -> (End, End) {
    let (mut a, mut b) = (near.end(), far.end());
    a.qp.connect(&b.qp.connect_info(), Role::Active).unwrap();
    b.qp.connect(&a.qp.connect_info(), Role::Passive).unwrap();
    let ready = QueuePairState::ReadyToSend;
    let both = || a.qp.state() == ready && b.qp.state() == ready;
    assert!(world.run_until(Duration::from_secs(1), both));
    (a, b)
}

impl End {
    fn post(&mut self, wr_id: u64, operation: Operation<'_>) {
        self.qp.post_send(&[WorkRequest::new(wr_id, operation)]).unwrap();
    }

    fn wait(&self) -> WorkCompletion {
        let mut one = [WorkCompletion::EMPTY];
        assert_eq!(self.cq.wait(&mut one, Duration::from_secs(1)).unwrap(), 1);
        one[0]
    }

    fn poll(&self) -> Option<WorkCompletion> {
        let mut one = [WorkCompletion::EMPTY];
        (self.cq.poll(&mut one).unwrap() == 1).then_some(one[0])
    }
}

fn write(bytes: &[u8], region: &MemoryRegion, offset: u64) -> Operation<'static> {
    // Leaked: a handful of bytes in a test keeps every call short.
    let bytes: &'static [u8] = bytes.to_vec().leak();
    Operation::Write { local: LocalData::Inline(bytes), remote: region.remote_address(offset) }
}

fn flush(region: &MemoryRegion, kind: FlushKind) -> Operation<'static> {
    let length = region.length_bytes();
    Operation::Flush { remote: region.remote_address(0), length, kind }
}

fn bytes(region: &MemoryRegion, offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    copy_out(region.memory().as_ref(), offset, &mut bytes);
    bytes
}

/// Three nodes, some connections, traffic, a partition, a pause and a crash; the trace's hash and
/// how the memory of the nodes ended.
fn eventful_run(seed: u64) -> (u64, u64, Vec<Vec<u8>>) {
    let options = SimOptions { slow_placement_ns: Some(1_000..=90_000), ..SimOptions::lossy() };
    let world = SimWorld::new(seed, options);
    let nodes: Vec<Node> = (1..=3).map(|number| node(&world, number)).collect();
    let regions: Vec<MemoryRegion> = nodes.iter().map(|node| node.region(4096)).collect();
    let mut ends = Vec::new();
    for (from, to) in [(0, 1), (1, 2), (2, 0), (0, 1)] {
        ends.push((connect(&world, &nodes[from], &nodes[to]), to));
    }
    for round in 0..40_u64 {
        for (index, ((a, _), to)) in ends.iter_mut().enumerate() {
            let place = (round * 8 + index as u64 * 512) % 4096;
            let operation = write(&(round << 8 | index as u64).to_le_bytes(), &regions[*to], place);
            let posted = a.qp.post_send(&[WorkRequest::new(round, operation)]);
            assert!(matches!(posted, Ok(()) | Err(PostError::NotReady(QueuePairState::Error))));
        }
        match round {
            10 => world.partition(1, 2),
            15 => world.heal(1, 2),
            20 => world.pause(3),
            25 => world.resume(3),
            30 => world.crash(2),
            _ => {}
        }
        world.run_for(Duration::from_micros(100));
        for ((a, b), _) in &ends {
            while a.poll().is_some() {}
            while b.poll().is_some() {}
        }
    }
    world.run_until_idle(Duration::from_secs(1));
    let memory = regions.iter().map(|region| bytes(region, 0, 4096)).collect();
    (world.trace_hash(), world.trace_count(), memory)
}

#[test]
fn one_seed_gives_one_trace_and_another_seed_another() {
    let mut hashes = std::collections::HashSet::new();
    for seed in 0..20 {
        let first = eventful_run(seed);
        assert!(first.1 > 500, "an eventful run has events: {}", first.1);
        assert_eq!(first, eventful_run(seed), "seed {seed} twice");
        assert!(hashes.insert(first.0), "seed {seed} repeats another seed's trace");
    }
}

#[test]
fn equal_worlds_keep_equal_records() {
    let run = || {
        let world = SimWorld::new(5, SimOptions::default());
        let (near, far) = (node(&world, 1), node(&world, 2));
        let target = far.region(64);
        let (mut a, _b) = connect(&world, &near, &far);
        a.post(1, write(b"x", &target, 0));
        a.wait();
        world.trace()
    };
    let trace = run();
    assert_eq!(trace, run());
    for kind in [TraceKind::Post, TraceKind::Depart, TraceKind::Place, TraceKind::Complete] {
        assert!(trace.iter().any(|record| record.kind == kind), "{kind:?} in the trace");
    }
    assert!(trace.is_sorted_by_key(|record| record.at_ns));
}

#[test]
fn polling_never_moves_time_and_waiting_does() {
    let world = SimWorld::new(1, SimOptions::default());
    let (near, far) = (node(&world, 1), node(&world, 2));
    let target = far.region(64);
    let (mut a, _b) = connect(&world, &near, &far);
    let before = world.now_ns();
    a.post(1, write(b"x", &target, 0));
    for _ in 0..1000 {
        assert_eq!(a.poll(), None);
    }
    assert_eq!(world.now_ns(), before);
    assert_eq!(a.wait().wr_id, 1);
    let round_trip = world.now_ns() - before;
    assert!((2_000..=6_300).contains(&round_trip), "two latencies passed: {round_trip} ns");
    assert_eq!(world.clock().monotonic_ns(), world.now_ns());
    let mut none = [WorkCompletion::EMPTY];
    assert_eq!(a.cq.wait(&mut none, Duration::from_secs(3600)).unwrap(), 0);
    assert!(world.now_ns() >= 3_600_000_000_000, "an hour passed at once");
}

#[test]
fn connections_overtake_each_other() {
    let mut orders = std::collections::HashSet::new();
    for seed in 0..30 {
        let world = SimWorld::new(seed, SimOptions::default());
        let (near, far) = (node(&world, 1), node(&world, 2));
        let target = far.region(64);
        let (mut first, _b) = connect(&world, &near, &far);
        let (mut second, _d) = connect(&world, &near, &far);
        first.post(1, write(b"1", &target, 0));
        second.post(2, write(b"2", &target, 0));
        first.wait();
        second.wait();
        orders.insert(bytes(&target, 0, 1));
    }
    assert_eq!(orders.len(), 2, "either write may be the last");
}

#[test]
fn a_short_partition_delays_and_a_long_one_breaks() {
    let world = SimWorld::new(3, SimOptions::default());
    let (near, far) = (node(&world, 1), node(&world, 2));
    let target = far.region(64);
    let (mut a, b) = connect(&world, &near, &far);
    world.partition(1, 2);
    a.post(1, write(b"late", &target, 0));
    world.run_for(Duration::from_millis(5));
    assert_eq!(a.poll(), None);
    assert_eq!(bytes(&target, 0, 4), [0; 4]);
    world.heal(2, 1);
    assert_eq!(a.wait().status, Status::Success);
    assert_eq!(bytes(&target, 0, 4), b"late");

    world.partition(1, 2);
    a.post(2, write(b"lost", &target, 0));
    a.post(3, write(b"lost", &target, 8));
    assert_eq!(a.wait().status, Status::TransportError);
    assert_eq!(a.wait().status, Status::Flushed);
    assert_eq!(b.qp.state(), QueuePairState::ReadyToSend, "the other end cannot know yet");
    world.heal_all();
    world.run_for(Duration::from_millis(1));
    assert_eq!(b.qp.state(), QueuePairState::Error);
    let (mut a, _b) = connect(&world, &near, &far);
    a.post(4, write(b"anew", &target, 0));
    assert_eq!(a.wait().status, Status::Success);
}

#[test]
fn a_crash_keeps_what_was_placed_and_peers_learn_of_it_in_time() {
    let world = SimWorld::new(4, SimOptions::default());
    let (near, far) = (node(&world, 1), node(&world, 2));
    let target = far.region(8 << 20);
    let source = near.region(8 << 20);
    copy_in(source.memory().as_ref(), 0, &vec![0xaa; 8 << 20]);
    let (mut a, mut b) = connect(&world, &near, &far);
    let entries = [ScatterGatherEntry { region: &source, offset: 0, length: 8 << 20 }];
    let local = LocalData::Gather(&entries);
    a.post(1, Operation::Write { local, remote: target.remote_address(0) });
    let begun = || bytes(&target, 1 << 20, 1) == [0xaa];
    assert!(world.run_until(Duration::from_secs(1), begun));
    world.crash(2);
    let crashed_ns = world.now_ns();
    let torn = bytes(&target, 0, 8 << 20);
    assert!(torn.contains(&0), "the write was cut in the middle");
    assert_eq!(a.wait().status, Status::TransportError);
    assert!(world.now_ns() - crashed_ns <= 10_000_000, "within the transport time-out");
    assert_eq!(bytes(&target, 0, 8 << 20), torn, "memory after the crash stays");
    assert_eq!(b.qp.state(), QueuePairState::Error);
    assert_eq!(b.poll(), None, "a dead node hears nothing");
    let refused = b.qp.post_send(&[WorkRequest::new(1, write(b"x", &source, 0))]);
    assert_eq!(refused, Err(PostError::NotReady(QueuePairState::Error)));
}

#[test]
fn a_restarted_node_is_new_and_its_former_life_stays_dead() {
    let world = SimWorld::new(5, SimOptions::default());
    let (near, far) = (node(&world, 1), node(&world, 2));
    let old_region = far.region(64);
    let (_a, _b) = connect(&world, &near, &far);
    world.crash(2);
    world.restart(2);
    let again = node(&world, 2);
    let region = again.region(64);
    let (mut a, _d) = connect(&world, &near, &again);
    a.post(1, write(b"new", &region, 0));
    assert_eq!(a.wait().status, Status::Success);
    assert_eq!(bytes(&region, 0, 3), b"new");
    a.post(2, write(b"old", &old_region, 0));
    assert_eq!(a.wait().status, Status::RemoteAccessError, "a key of the former life");
    assert_eq!(far.end().qp.state(), QueuePairState::Error, "a device of the former life");
}

#[test]
fn an_acknowledged_write_may_be_lost_unless_it_was_flushed() {
    let options =
        SimOptions { slow_placement_ns: Some(1_000_000..=2_000_000), ..SimOptions::default() };
    let world = SimWorld::new(6, options);
    let (near, far) = (node(&world, 1), node(&world, 2));
    let target = far.region(64);
    let (mut a, _b) = connect(&world, &near, &far);
    a.post(1, write(b"firm", &target, 0));
    a.post(2, flush(&target, FlushKind::Visible));
    assert_eq!((a.wait().status, a.wait().status), (Status::Success, Status::Success));
    assert_eq!(bytes(&target, 0, 4), b"firm");
    a.post(3, write(b"slow", &target, 8));
    assert_eq!(a.wait().status, Status::Success);
    assert_eq!(bytes(&target, 8, 4), [0; 4], "acknowledged, not placed");
    world.run_for(Duration::from_millis(3));
    assert_eq!(bytes(&target, 8, 4), b"slow", "placed in the end");
    a.post(4, write(b"lost", &target, 16));
    assert_eq!(a.wait().status, Status::Success);
    world.crash(2);
    world.run_for(Duration::from_secs(1));
    assert_eq!(bytes(&target, 0, 4), b"firm");
    assert_eq!(bytes(&target, 16, 4), [0; 4], "acknowledged and lost");
}

/// Memory that notes what it is told.
#[derive(Debug)]
struct Noted {
    memory: Arc<dyn MemoryObject>,
    notes: Mutex<Vec<(&'static str, usize, usize)>>,
    fails: bool,
}

// SAFETY: every promise is kept by the object inside, which lives as long as this one.
unsafe impl MemoryObject for Noted {
    fn base(&self) -> NonNull<u8> {
        self.memory.base()
    }

    fn length_bytes(&self) -> usize {
        self.memory.length_bytes()
    }

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        self.memory.descriptor()
    }

    fn persistence(&self) -> Persistence {
        Persistence::CacheLine
    }

    fn stored(&self, offset: usize, length: usize) {
        self.notes.lock().unwrap().push(("stored", offset, length));
    }

    fn persist(&self, offset: usize, length: usize) -> std::io::Result<()> {
        if self.fails {
            return Err(std::io::Error::other("worn out"));
        }
        self.notes.lock().unwrap().push(("persisted", offset, length));
        Ok(())
    }
}

#[test]
fn memory_is_told_of_stores_and_persisted_after_them() {
    for fails in [false, true] {
        let world = SimWorld::new(8, SimOptions::slow_placement());
        let (near, far) = (node(&world, 1), node(&world, 2));
        let memory = far.device.allocate_memory(4096).unwrap();
        let noted = Arc::new(Noted { memory, notes: Mutex::default(), fails });
        let region = far.domain.register(noted.clone(), Access::all()).unwrap();
        let local = near.region(8);
        let (mut a, _b) = connect(&world, &near, &far);
        a.post(1, write(b"bytes", &region, 100));
        let word = ScatterGatherEntry { region: &local, offset: 0, length: 8 };
        let remote = region.remote_address(256);
        a.post(2, Operation::FetchAndAdd { local: word, remote, addend: 1 });
        a.post(3, flush(&region, FlushKind::Persistent));
        assert!(a.wait().is_success() && a.wait().is_success());
        let expected = if fails { Status::PersistenceError } else { Status::Success };
        assert_eq!(a.wait().status, expected);
        let mut notes = vec![("stored", 100, 5), ("stored", 256, 8)];
        notes.extend((!fails).then_some(("persisted", 0, 4096)));
        assert_eq!(*noted.notes.lock().unwrap(), notes);
    }
}

#[test]
fn a_lossy_network_delivers_everything_once() {
    let options = SimOptions { lost_per_million: 400_000, ..SimOptions::lossy() };
    let world = SimWorld::new(9, options);
    let (near, far) = (node(&world, 1), node(&world, 2));
    let target = far.region(64);
    let local = near.region(8);
    let (mut a, _b) = connect(&world, &near, &far);
    for wr_id in 0..100 {
        let word = ScatterGatherEntry { region: &local, offset: 0, length: 8 };
        let remote = target.remote_address(0);
        a.post(wr_id, Operation::FetchAndAdd { local: word, remote, addend: 1 });
    }
    for wr_id in 0..100 {
        let done = a.wait();
        assert_eq!((done.wr_id, done.status), (wr_id, Status::Success));
    }
    assert_eq!(bytes(&target, 0, 8), 100_u64.to_ne_bytes());
    let held = world.trace().iter().filter(|record| record.kind == TraceKind::Hold).count();
    assert!(held > 20, "packets were lost: {held}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]
    #[test]
    fn any_seed_replays(seed: u64) {
        prop_assert_eq!(eventful_run(seed), eventful_run(seed));
    }
}
