//! Many queue pairs share a window far smaller than what they move: each gets its part of the
//! service, and one whose receiver stands still holds up nobody else.
//!
//! What is counted is what polls of one thread did. A device's thread that stood in for them would
//! hold one queue pair for as long as the system takes the processor from it, so both are kept from
//! it: serving and standing in begin with the lock of the links, which the test has.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, Device as _, LocalData, MemoryRegion, Operation, ProtectionDomain,
    QueuePair, QueuePairOptions, ReceiveRequest, Role, ScatterGatherEntry, WorkCompletion,
    WorkRequest,
};
use beeline_fabric_engine::EngineDevice;
use beeline_ntb::Side;
use beeline_os::Mapping;

use crate::layout::Geometry;
use crate::transport::{NtbTransport, Setup};
use crate::window::Window;

const BOUND: Duration = Duration::from_secs(60);
const GREEDY: usize = 6;
/// Writes of each greedy pair, and their length.
const WRITES: u64 = 24;
const LENGTH: u64 = 256 << 10;
const RING: usize = 16 << 10;

struct End {
    transport: Arc<NtbTransport>,
    device: EngineDevice,
    domain: Arc<dyn ProtectionDomain>,
    queue: Rc<dyn CompletionQueue>,
}

impl End {
    fn open(memory: &Arc<Mapping>, side: Side) -> Self {
        let bytes = geometry().window_bytes();
        let window = beeline_ntb::handed::halves(memory, side, bytes);
        let setup = Setup {
            attributes: beeline_fabric_engine::attributes("ntb", "not asked for here"),
            node: [side.index() as u8; 16],
            geometry: geometry(),
            // A device's thread that is kept from its links does not beat.
            silence: 4 * BOUND,
            disorder: None,
            heap: None,
            socket: None,
            fixed: Some((Arc::new(Window::from(window)), side)),
        };
        let transport = Arc::new(NtbTransport::new(setup).unwrap());
        let device = EngineDevice::start(transport.clone()).unwrap();
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(1024).unwrap();
        Self { transport, device, domain, queue }
    }

    fn pair(&self) -> Box<dyn QueuePair> {
        // A receiver may be slow for as long as the test takes.
        let options = QueuePairOptions {
            receiver_not_ready_timeout: 2 * BOUND,
            transport_timeout: 2 * BOUND,
            ..QueuePairOptions::default()
        };
        self.domain.create_queue_pair(&self.queue, &self.queue, None, options).unwrap()
    }

    fn region(&self, bytes: u64) -> MemoryRegion {
        let memory = self.device.allocate_memory(bytes as usize).unwrap();
        self.domain.register(memory, Access::all()).unwrap()
    }

    fn poll(&self) -> Vec<WorkCompletion> {
        let mut some = [WorkCompletion::EMPTY; 64];
        let count = self.queue.poll(&mut some).unwrap();
        some[..count].to_vec()
    }
}

/// Rings for half as many queue pairs of each end.
fn geometry() -> Geometry {
    Geometry::fitting(RING, 32, usize::MAX).unwrap()
}

/// Request ids: the pair and a number.
fn id(pair: usize, number: u64) -> u64 {
    (pair as u64) << 32 | number
}

/// True when both devices' threads were found asleep. Neither sleeps in the middle of a queue pair, so
/// that with the links held each is kept from all of them from here on.
fn library_sleeps() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let states = tasks.filter_map(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
        (name == "beeline-ntb").then(|| rest.trim_start().starts_with('S'))
    });
    let states: Vec<bool> = states.collect();
    states == [true, true]
}

#[test]
fn queue_pairs_that_share_a_small_window_are_served_alike_and_a_stalled_one_harms_none() {
    let memory = Arc::new(Mapping::memfd("sharing", 2 * geometry().window_bytes()).unwrap());
    let (near, far) = (End::open(&memory, Side::First), End::open(&memory, Side::Second));
    let (mut pairs, mut peers) = (Vec::new(), Vec::new());
    for _ in 0..GREEDY + 2 {
        let (mut pair, mut peer) = (near.pair(), far.pair());
        peer.connect(&pair.connect_info(), Role::Passive).unwrap();
        pair.connect(&peer.connect_info(), Role::Active).unwrap();
        pair.wait_connected(BOUND).unwrap();
        peer.wait_connected(BOUND).unwrap();
        pairs.push(pair);
        peers.push(peer);
    }
    // From here on nothing moves but in the calls below.
    let _unattended = [near.transport.hold_links(), far.transport.hold_links()];
    let begun = Instant::now();
    while !library_sleeps() {
        assert!(begun.elapsed() < BOUND, "the devices' threads come to rest");
        std::thread::yield_now();
    }
    let (polite, stalled) = (GREEDY, GREEDY + 1);
    let (local, target) = (near.region(LENGTH), far.region(LENGTH));
    let entry = ScatterGatherEntry { region: &local, offset: 0, length: LENGTH };
    let whole =
        Operation::Write { local: LocalData::Gather(&[entry]), remote: target.remote_address(0) };
    // A message nobody takes yet, and behind it more than its ring holds.
    let message = Operation::Send { local: LocalData::Inline(b"?"), immediate: None };
    let held: Vec<_> = (1..4).map(|number| WorkRequest::new(id(stalled, number), whole)).collect();
    pairs[stalled].post_send(&[WorkRequest::new(id(stalled, 0), message)]).unwrap();
    pairs[stalled].post_send(&held).unwrap();
    for (pair, posted) in pairs[..GREEDY].iter_mut().enumerate() {
        let list: Vec<_> =
            (0..WRITES).map(|number| WorkRequest::new(id(pair, number), whole)).collect();
        posted.post_send(&list).unwrap();
    }
    let word = ScatterGatherEntry { region: &local, offset: 0, length: 8 };
    let read = Operation::Read { local: word, remote: target.remote_address(0) };
    let (mut done, mut turns) = ([0_u64; GREEDY + 2], 0_u64);
    // Greedy completions since the polite pair asked, and the most there were.
    let (mut gap, mut longest) = (0, 0);
    pairs[polite].post_send(&[WorkRequest::new(id(polite, 0), read)]).unwrap();
    let begun = Instant::now();
    while done[..GREEDY].iter().any(|done| *done < WRITES) {
        assert!(begun.elapsed() < BOUND, "{done:?}");
        assert!(far.poll().is_empty());
        for completion in near.poll() {
            assert!(completion.is_success(), "{completion:?}");
            let pair = (completion.wr_id >> 32) as usize;
            done[pair] += 1;
            if pair == polite {
                (longest, gap) = (longest.max(gap), 0);
                turns += 1;
                pairs[polite].post_send(&[WorkRequest::new(id(polite, turns), read)]).unwrap();
            } else {
                gap += 1;
            }
            if pair < GREEDY && done[pair] == WRITES {
                let least = done[..GREEDY].iter().min().copied().unwrap();
                assert!(least >= WRITES / 2, "one is done, another far behind: {done:?}");
            }
        }
    }
    assert_eq!(done[stalled], 0, "nobody took its message");
    assert!(longest <= 2 * GREEDY as u64, "{longest} writes of 256 KiB while 8 bytes waited");
    assert!(turns > WRITES, "{turns} reads beside {WRITES} writes of each of the others");
    // Its receive comes: it goes on.
    let buffer = ScatterGatherEntry { region: &target, offset: 0, length: 8 };
    peers[stalled].post_receive(&[ReceiveRequest { wr_id: 7, buffer: Some(buffer) }]).unwrap();
    while done[stalled] < 4 {
        assert!(begun.elapsed() < BOUND, "{done:?}");
        let _ = far.poll();
        for completion in near.poll() {
            assert!(completion.is_success(), "{completion:?}");
            done[(completion.wr_id >> 32) as usize] += 1;
        }
    }
}
