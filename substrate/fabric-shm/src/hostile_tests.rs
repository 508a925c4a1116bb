//! A peer that writes whatever it likes, wherever it can: over the whole connection object, and on
//! the control socket. The victim may lose that connection, and nothing else.

use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_env::Randomness;
use beeline_fabric::{
    Access, CompletionQueue, LocalData, MemoryRegion, Operation, ProtectionDomain, QueuePair,
    QueuePairOptions, QueuePairState, ReceiveRequest, Role, ScatterGatherEntry, SharedReceiveQueue,
    WorkCompletion, WorkRequest,
};
use beeline_os::SharedMemory;
use beeline_os::control_socket::ControlSocket;
use beeline_os::doorbell::Doorbell;
use beeline_os::mapping::create_memfd;
use beeline_os::memory::{copy_in, copy_out};

use crate::completion_queue::ShmCompletionQueue;
use crate::config::ShmConfig;
use crate::connect_info::{PeerInfo, socket_name};
use crate::control::message::Message;
use crate::device::{DeviceHandle, ShmProtectionDomain};
use crate::queue_pair::ShmQueuePair;
use crate::shared_receive_queue::ShmSharedReceiveQueue;

pub(crate) const BOUND: Duration = Duration::from_secs(10);
const SENTINEL: [u8; 64] = [0xA5; 64];

pub(crate) struct End {
    pub(crate) domain: ShmProtectionDomain,
    queue: Rc<dyn CompletionQueue>,
    pub(crate) pair: ShmQueuePair,
    shared: Option<Rc<dyn SharedReceiveQueue>>,
    pub(crate) region: MemoryRegion,
}

/// An end that gives a silent peer up soon: what it asks is answered late, or refused.
pub(crate) fn end(device: &Arc<DeviceHandle>, shares: bool) -> End {
    end_that_waits(device, shares, Duration::from_millis(50))
}

/// An end for what an honest peer must answer, however busy the machine is.
pub(crate) fn patient_end(device: &Arc<DeviceHandle>, shares: bool) -> End {
    end_that_waits(device, shares, Duration::from_secs(2))
}

fn end_that_waits(device: &Arc<DeviceHandle>, shares: bool, transport_timeout: Duration) -> End {
    let domain = ShmProtectionDomain::new(device);
    let queue = ShmCompletionQueue::create(1 << 14, &device.shared.config).unwrap();
    let shared = shares.then(|| domain.create_shared_receive_queue(64).unwrap());
    let inner = shared.as_ref().and_then(|queue| ShmSharedReceiveQueue::of(queue.as_ref()));
    let of = ShmCompletionQueue::of(queue.as_ref()).unwrap();
    let options = QueuePairOptions {
        receiver_not_ready_timeout: Duration::from_millis(20),
        transport_timeout,
        ..QueuePairOptions::default()
    };
    let pair = ShmQueuePair::new(&domain, &of, &of, inner, options).unwrap();
    let memory = Arc::new(SharedMemory::allocate("hostile-test", 4096).unwrap());
    let region = domain.register(memory, Access::all()).unwrap();
    for start in (0..4096).step_by(128) {
        copy_in(region.memory().as_ref(), start, &SENTINEL);
    }
    End { domain, queue, pair, shared, region }
}

pub(crate) fn connect(a: &mut End, b: &mut End) {
    let (left, right) = (a.pair.connect_info(), b.pair.connect_info());
    a.pair.connect(&right, Role::Active).unwrap();
    b.pair.connect(&left, Role::Passive).unwrap();
    a.pair.wait_connected(BOUND).unwrap();
    b.pair.wait_connected(BOUND).unwrap();
}

impl End {
    /// Every second 64 bytes of the region are receive buffers; the others must stay as they are.
    fn check_sentinels(&self) {
        for start in (0..4096).step_by(128) {
            let mut found = [0; 64];
            copy_out(self.region.memory().as_ref(), start, &mut found);
            assert_eq!(found, SENTINEL, "bytes at {start} of the victim were overwritten");
        }
    }

    fn post_receive(&mut self, index: u64) {
        let offset = 64 + 128 * (index % 32);
        let buffer = Some(ScatterGatherEntry { region: &self.region, offset, length: 64 });
        let request = [ReceiveRequest { wr_id: index, buffer }];
        let _ = match &self.shared {
            Some(shared) => shared.post_receive(&request),
            None => self.pair.post_receive(&request),
        };
    }

    pub(crate) fn poll(&mut self) -> Vec<WorkCompletion> {
        let mut out = [WorkCompletion::EMPTY; 16];
        let count = self.queue.poll(&mut out).unwrap();
        out[..count].to_vec()
    }
}

/// Proves that the device still serves honest peers.
fn works(device: &Arc<DeviceHandle>, other: &Arc<DeviceHandle>) {
    let (mut a, mut b) = (patient_end(device, false), patient_end(other, false));
    connect(&mut a, &mut b);
    b.post_receive(7);
    let send = Operation::Send { local: LocalData::Inline(b"honest"), immediate: None };
    a.pair.post_send(&[WorkRequest::new(1, send)]).unwrap();
    let start = Instant::now();
    loop {
        a.poll();
        if let Some(completion) = b.poll().first() {
            assert!(completion.is_success());
            break;
        }
        assert!(start.elapsed() < BOUND, "an honest message got through");
    }
}

fn word(end: &End, index: usize) -> &AtomicU64 {
    let (words, count) = end.pair.0.link.object().unwrap().all_words();
    assert!(index < count);
    // SAFETY: inside the object.
    let word = unsafe { words.add(index) };
    // SAFETY: mapped while the link lives, which the end holds; reached through atomics only.
    unsafe { word.as_ref() }
}

fn scribble(attacker: &End, random: &mut Randomness) {
    let (_, count) = attacker.pair.0.link.object().unwrap().all_words();
    match random.between(0, 20) {
        // The words of both ends.
        0 => {
            let index = 64 + usize::try_from(random.between(0, 127)).unwrap();
            word(attacker, index).store(random.next_u64(), Ordering::Relaxed);
        }
        // The words, with small numbers.
        1 => {
            let index = 64 + usize::try_from(random.between(0, 127)).unwrap();
            word(attacker, index).store(random.between(0, 300), Ordering::Relaxed);
        }
        // Anything anywhere.
        2 => {
            for _ in 0..64 {
                let index = usize::try_from(random.between(0, count as u64 - 1)).unwrap();
                word(attacker, index).store(random.next_u64(), Ordering::Relaxed);
            }
        }
        // A message in the victim's inbound ring that is due soon, of any kind, with a length that
        // often fits and a place that seldom lies inside.
        _ => {
            let index = random.between(0, 60);
            let slot = 512 + 8 * usize::try_from(index).unwrap();
            let longest = *random.pick(&[40, 64, 70_000, u64::MAX]).unwrap();
            word(attacker, slot + 1).store(random.between(0, longest), Ordering::Relaxed);
            word(attacker, slot + 2).store(random.next_u64(), Ordering::Relaxed);
            let kind = *random.pick(&[1, 1, 2, 3, 4, 5]).unwrap();
            let header = kind << 32 | (index + 1);
            word(attacker, slot).store(header, Ordering::Release);
        }
    }
}

fn torment(seed: u64, shares: bool) {
    let mut random = Randomness::new(seed);
    let device = DeviceHandle::open(ShmConfig::default()).unwrap();
    let other = DeviceHandle::open(ShmConfig::default()).unwrap();
    let (mut victim, mut attacker) = (end(&device, shares), end(&other, !shares));
    connect(&mut victim, &mut attacker);
    let remote = attacker.region.remote_address(0);
    let start = Instant::now();
    let mut posted = 0_u64;
    let mut received = 0_u64;
    let mut completed = 0_u64;
    let mut record = |completions: Vec<WorkCompletion>, posted, received| {
        for completion in completions {
            completed += 1;
            assert!(completion.wr_id < posted, "a completion of nothing that was posted");
        }
        assert!(completed <= posted + received, "more completions than requests");
    };
    for _ in 0..400 {
        match random.between(0, 6) {
            0 => {
                victim.post_receive(received);
                received += 1;
                posted = posted.max(received);
            }
            1 => {
                let bytes = [3; 100];
                let length = usize::try_from(random.between(0, 100)).unwrap();
                let local = LocalData::Inline(&bytes[..length]);
                let operation = match random.between(0, 2) {
                    0 => Operation::Send { local, immediate: Some(1) },
                    1 => Operation::Write { local, remote },
                    _ => Operation::WriteWithImmediate { local, remote, immediate: 2 },
                };
                if victim.pair.post_send(&[WorkRequest::new(posted, operation)]).is_ok() {
                    posted += 1;
                }
            }
            2 => {
                attacker.post_receive(random.between(0, 31));
                attacker.poll();
            }
            3 => {
                victim.queue.arm().unwrap();
                record(victim.poll(), posted.max(received) + 1, received);
                victim.queue.acknowledge().unwrap();
            }
            _ => {
                scribble(&attacker, &mut random);
                record(victim.poll(), posted.max(received) + 1, received);
            }
        }
        assert!(start.elapsed() < BOUND, "seed {seed}: the victim hangs");
    }
    victim.check_sentinels();
    drop(attacker);
    let mut broken = false;
    while !broken {
        record(victim.poll(), posted.max(received) + 1, received);
        broken = victim.pair.state() == QueuePairState::Error;
        assert!(start.elapsed() < BOUND, "seed {seed}: the peer's end goes unnoticed");
    }
    victim.check_sentinels();
    works(&device, &other);
    drop(victim.domain);
}

#[test]
fn a_peer_that_scribbles_over_the_connection_object_harms_that_connection_only() {
    for seed in 0..40 {
        torment(seed, seed % 2 == 0);
    }
}

#[test]
fn random_records_on_the_control_socket_end_their_session_only() {
    let device = DeviceHandle::open(ShmConfig::default()).unwrap();
    let other = DeviceHandle::open(ShmConfig::default()).unwrap();
    let mut random = Randomness::new(11);
    let name = socket_name(&device.shared.socket);
    for round in 0..60 {
        let target = end(&device, false);
        let info = PeerInfo::decode(&target.pair.connect_info()).unwrap();
        let socket = ControlSocket::connect(&name).unwrap();
        let good = Message::Hello {
            target_qp: info.qp_num,
            target_nonce: info.nonce,
            sender_qp: 1,
            sender_nonce: [0; 16],
        };
        let (left, _right) = Doorbell::pair().unwrap();
        let object = create_memfd("hostile", 4096).unwrap();
        for _ in 0..random.between(1, 5) {
            let mut record = good.encode();
            match random.between(0, 4) {
                0 => {}
                1 => record.truncate(usize::try_from(random.between(1, 30)).unwrap()),
                2 => record.resize(usize::try_from(random.between(1, 400)).unwrap(), 7),
                3 => {
                    let at = usize::try_from(random.between(0, 30)).unwrap();
                    record[at] ^= 1 << (round % 8);
                }
                _ => record = Message::Open { key: random.next_u64(), epoch: 0 }.encode(),
            }
            let descriptors = [left.as_fd(), object.as_fd(), left.as_fd()];
            let count = usize::try_from(random.between(0, 3)).unwrap();
            let _ = socket.send(&record, &descriptors[..count]);
        }
    }
    works(&device, &other);
    works(&other, &device);
}

#[test]
fn a_hello_with_a_short_or_unsealed_object_is_refused() {
    for sealed in [false, true] {
        let device = DeviceHandle::open(ShmConfig::default()).unwrap();
        let other = DeviceHandle::open(ShmConfig::default()).unwrap();
        let (mut victim, liar) = (end(&device, false), end(&other, false));
        let (ours, theirs) = (victim.pair.connect_info(), liar.pair.connect_info());
        let (info, claimed) =
            (PeerInfo::decode(&ours).unwrap(), PeerInfo::decode(&theirs).unwrap());
        victim.pair.connect(&theirs, Role::Passive).unwrap();
        let socket = ControlSocket::connect(&socket_name(&info.socket)).unwrap();
        let hello = Message::Hello {
            target_qp: info.qp_num,
            target_nonce: info.nonce,
            sender_qp: claimed.qp_num,
            sender_nonce: claimed.nonce,
        };
        let object = if sealed {
            create_memfd("short", 4096).unwrap()
        } else {
            let fd = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, 64 << 20).unwrap();
            fd
        };
        let (left, _right) = Doorbell::pair().unwrap();
        socket.send(&hello.encode(), &[object.as_fd(), left.as_fd()]).unwrap();
        assert!(victim.pair.wait_connected(Duration::from_millis(50)).is_err());
        drop(liar);
        works(&device, &other);
    }
}
