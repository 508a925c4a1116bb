//! Many queue pairs share a window far smaller than what they move: each gets its part of the
//! service, and one whose receiver stands still holds up nobody else.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, Device, LocalData, MemoryRegion, Operation, ProtectionDomain,
    QueuePair, QueuePairOptions, ReceiveRequest, Role, ScatterGatherEntry, WorkCompletion,
    WorkRequest,
};
use beeline_fabric_ntb::{FixedWindow, NtbConfig, NtbDevice, Port, Side};

const BOUND: Duration = Duration::from_secs(60);
const GREEDY: usize = 6;
/// Writes of each greedy pair, and their length.
const WRITES: u64 = 24;
const LENGTH: u64 = 256 << 10;
const RING: usize = 16 << 10;

struct End {
    device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
    queue: Rc<dyn CompletionQueue>,
}

impl End {
    fn open(path: &Path, side: Side) -> Self {
        let port = Port::Fixed(FixedWindow { inbound: path.to_owned(), outbound: None, side });
        let config = NtbConfig { port, ring_bytes: RING, ..NtbConfig::default() };
        let device: Arc<dyn Device> = NtbDevice::open(config).unwrap();
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(1024).unwrap();
        Self { device, domain, queue }
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

/// Request ids: the pair and a number.
fn id(pair: usize, number: u64) -> u64 {
    (pair as u64) << 32 | number
}

/// Times it is tried to be served alike: where the system takes the processor from a device's thread while that
/// moves one queue pair, the others go on without it for as long.
const TRIES: usize = 5;

#[test]
fn queue_pairs_that_share_a_small_window_are_served_alike_and_a_stalled_one_harms_none() {
    let unfair: Vec<_> = (0..TRIES).map_while(|_| share().err()).collect();
    assert!(unfair.len() < TRIES, "{unfair:?}");
}

/// Moves everything. Errors: how they were not served alike.
fn share() -> Result<(), String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("window");
    // Two halves of 16 rings of 16 KiB: 256 KiB each way for 36 MiB.
    std::fs::File::create(&path).unwrap().set_len(600 << 10).unwrap();
    let (near, far) = (End::open(&path, Side::First), End::open(&path, Side::Second));
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
    let mut unfair = None;
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
                if least < WRITES / 2 {
                    unfair = Some(format!("one is done, another far behind: {done:?}"));
                }
            }
        }
    }
    assert_eq!(done[stalled], 0, "nobody took its message");
    if longest > 2 * GREEDY as u64 {
        unfair = Some(format!("{longest} writes of 256 KiB while 8 bytes waited"));
    }
    if turns <= WRITES {
        unfair = Some(format!("{turns} reads beside {WRITES} writes of each of the others"));
    }
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
    unfair.map_or(Ok(()), Err)
}
