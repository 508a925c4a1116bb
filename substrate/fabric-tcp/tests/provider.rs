//! The provider between two devices of one process: what conformance does not reach, and a first
//! net under it.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, Device, FlushKind, LocalData, MemoryRegion, Opcode, Operation,
    ProtectionDomain, QueuePair, QueuePairOptions, QueuePairState, ReceiveRequest, Role,
    ScatterGatherEntry, Status, WorkCompletion, WorkRequest,
};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_os::memory::{copy_in, copy_out, load_u64};

const BOUND: Duration = Duration::from_secs(20);

struct End {
    device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
    queue: Rc<dyn CompletionQueue>,
    pair: Box<dyn QueuePair>,
}

impl End {
    fn new(options: QueuePairOptions) -> Self {
        let device = TcpDevice::open(TcpConfig::default()).unwrap();
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(1024).unwrap();
        let pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
        Self { device, domain, queue, pair }
    }

    fn region(&self, length: usize, access: Access) -> MemoryRegion {
        self.domain.register(self.device.allocate_memory(length).unwrap(), access).unwrap()
    }

    fn one(&self) -> WorkCompletion {
        let mut completions = [WorkCompletion::EMPTY];
        assert_eq!(self.queue.wait(&mut completions, BOUND).unwrap(), 1, "a completion in time");
        completions[0]
    }

    fn drain(&self, other: &Self, count: usize) -> Vec<WorkCompletion> {
        let mut all = Vec::new();
        let begun = Instant::now();
        while all.len() < count && begun.elapsed() < BOUND {
            let mut completions = [WorkCompletion::EMPTY; 16];
            let got = self.queue.poll(&mut completions).unwrap();
            all.extend_from_slice(&completions[..got]);
            assert_eq!(other.queue.poll(&mut []).unwrap(), 0);
        }
        assert_eq!(all.len(), count);
        all
    }
}

fn all() -> Access {
    Access::all()
}

fn linked(options: QueuePairOptions) -> (End, End) {
    let (mut a, mut b) = (End::new(options), End::new(options));
    b.pair.connect(&a.pair.connect_info(), Role::Passive).unwrap();
    a.pair.connect(&b.pair.connect_info(), Role::Active).unwrap();
    a.pair.wait_connected(BOUND).unwrap();
    b.pair.wait_connected(BOUND).unwrap();
    (a, b)
}

fn entry(region: &MemoryRegion, offset: u64, length: u64) -> ScatterGatherEntry<'_> {
    ScatterGatherEntry { region, offset, length }
}

#[test]
fn a_write_is_placed_while_the_target_sleeps() {
    let (mut a, b) = linked(QueuePairOptions::default());
    let target = b.region(4096, all());
    let write = Operation::Write {
        local: LocalData::Inline(b"eight..."),
        remote: target.remote_address(8),
    };
    a.pair.post_send(&[WorkRequest::new(7, write)]).unwrap();
    let completion = a.one();
    assert_eq!((completion.wr_id, completion.status), (7, Status::Success));
    assert_eq!(load_u64(target.memory().as_ref(), 8), u64::from_ne_bytes(*b"eight..."));
}

#[test]
fn every_operation_works_against_a_target_that_never_looks() {
    let (mut a, b) = linked(QueuePairOptions::default());
    let target = b.region(1 << 20, all());
    let local = a.region(1 << 20, all());
    let pattern: Vec<u8> =
        (0..1_u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    copy_in(local.memory().as_ref(), 0, &pattern);
    let gather =
        [entry(&local, 0, 300_000), entry(&local, 300_000, 17), entry(&local, 300_017, 700_000)];
    a.pair
        .post_send(&[
            WorkRequest::unsignalled(
                1,
                Operation::Write {
                    local: LocalData::Gather(&gather),
                    remote: target.remote_address(0),
                },
            ),
            WorkRequest::new(
                2,
                Operation::Flush {
                    remote: target.remote_address(0),
                    length: 1_000_017,
                    kind: FlushKind::Visible,
                },
            ),
        ])
        .unwrap();
    assert_eq!(a.one().wr_id, 2);
    let mut seen = vec![0; 1_000_017];
    copy_out(target.memory().as_ref(), 0, &mut seen);
    assert_eq!(seen, pattern[..1_000_017]);
    let back = a.region(1 << 20, all());
    a.pair
        .post_send(&[
            WorkRequest::new(
                3,
                Operation::Read {
                    local: entry(&back, 0, 1_000_000),
                    remote: target.remote_address(17),
                },
            ),
            // Overlaps what the read has yet to send: must not be seen by it.
            WorkRequest::unsignalled(
                4,
                Operation::Write {
                    local: LocalData::Inline(&[0xEE; 200]),
                    remote: target.remote_address(999_000),
                },
            ),
            WorkRequest::new(
                5,
                Operation::FetchAndAdd {
                    local: entry(&back, 1 << 19, 8),
                    remote: target.remote_address(1 << 18),
                    addend: 3,
                },
            ),
        ])
        .unwrap();
    let read = a.one();
    assert_eq!((read.wr_id, read.length, read.status), (3, 1_000_000, Status::Success));
    copy_out(back.memory().as_ref(), 0, &mut seen[..1_000_000]);
    assert_eq!(seen[..1 << 19], pattern[17..17 + (1 << 19)]);
    assert_eq!(seen[(1 << 19) + 8..1_000_000], pattern[17 + (1 << 19) + 8..1_000_017]);
    assert_eq!(a.one().wr_id, 5);
    let word = load_u64(target.memory().as_ref(), 1 << 18);
    let old = load_u64(back.memory().as_ref(), 1 << 19);
    assert_eq!(word, old.wrapping_add(3));
    a.pair
        .post_send(&[WorkRequest::new(
            6,
            Operation::CompareAndSwap {
                local: entry(&back, 0, 8),
                remote: target.remote_address(1 << 18),
                expected: word,
                desired: 42,
            },
        )])
        .unwrap();
    assert_eq!(a.one().wr_id, 6);
    assert_eq!(load_u64(target.memory().as_ref(), 1 << 18), 42);
    assert_eq!(load_u64(back.memory().as_ref(), 0), word);
}

#[test]
fn a_send_without_a_receive_waits_and_answers_overtake_it() {
    // The receives come when this thread does, whatever keeps it.
    let options =
        QueuePairOptions { receiver_not_ready_timeout: BOUND, ..QueuePairOptions::default() };
    let (mut a, mut b) = linked(options);
    let at_a = a.region(4096, all());
    let at_b = b.region(4096, all());
    // Both send first, nobody has a receive; both then write, signalled, and wait for that.
    for (end, target) in [(&mut a, &at_b), (&mut b, &at_a)] {
        end.pair
            .post_send(&[
                WorkRequest::new(
                    1,
                    Operation::Write {
                        local: LocalData::Inline(b"before"),
                        remote: target.remote_address(0),
                    },
                ),
                WorkRequest::new(
                    2,
                    Operation::Send { local: LocalData::Inline(b"hello"), immediate: Some(9) },
                ),
                WorkRequest::new(
                    3,
                    Operation::Write {
                        local: LocalData::Inline(b"after"),
                        remote: target.remote_address(0),
                    },
                ),
            ])
            .unwrap();
    }
    assert_eq!(a.one().wr_id, 1);
    assert_eq!(b.one().wr_id, 1);
    std::thread::sleep(Duration::from_millis(50));
    let mut none = [WorkCompletion::EMPTY; 4];
    assert_eq!(a.queue.poll(&mut none).unwrap(), 0);
    let mut text = [0; 6];
    copy_out(at_b.memory().as_ref(), 0, &mut text);
    assert_eq!(&text, b"before", "a write behind the waiting send is not placed before it");
    for (end, buffer) in [(&mut a, &at_a), (&mut b, &at_b)] {
        let receive = ReceiveRequest { wr_id: 100, buffer: Some(entry(buffer, 64, 64)) };
        end.pair.post_receive(&[receive]).unwrap();
    }
    let mut done = a.drain(&b, 3);
    done.sort_by_key(|completion| completion.wr_id);
    assert_eq!(done.iter().map(|c| c.wr_id).collect::<Vec<_>>(), [2, 3, 100]);
    assert!(done.iter().all(WorkCompletion::is_success));
    assert_eq!(done[2].opcode, Opcode::Receive);
    assert_eq!((done[2].length, done[2].immediate), (5, Some(9)));
    assert_eq!(b.drain(&a, 3).len(), 3);
}

#[test]
fn a_send_that_nobody_takes_fails_within_its_bound() {
    let options = QueuePairOptions {
        receiver_not_ready_timeout: Duration::from_millis(80),
        ..QueuePairOptions::default()
    };
    let (mut a, b) = linked(options);
    let send = Operation::Send { local: LocalData::Inline(b"x"), immediate: None };
    a.pair.post_send(&[WorkRequest::new(1, send), WorkRequest::unsignalled(2, send)]).unwrap();
    let done = a.drain(&b, 2);
    assert_eq!((done[0].wr_id, done[0].status), (1, Status::ReceiverNotReady));
    assert_eq!((done[1].wr_id, done[1].status), (2, Status::Flushed));
    assert_eq!(a.pair.state(), QueuePairState::Error);
    let begun = Instant::now();
    while b.pair.state() != QueuePairState::Error && begun.elapsed() < BOUND {
        b.queue.poll(&mut []).unwrap();
    }
    assert_eq!(b.pair.state(), QueuePairState::Error);
}

#[test]
fn a_bad_key_breaks_its_connection_and_says_why() {
    let (mut a, b) = linked(QueuePairOptions::default());
    let target = b.region(4096, Access::REMOTE_READ);
    let write = |offset| Operation::Write {
        local: LocalData::Inline(b"x"),
        remote: target.remote_address(offset),
    };
    a.pair
        .post_send(&[WorkRequest::unsignalled(1, write(0)), WorkRequest::unsignalled(2, write(1))])
        .unwrap();
    let done = a.drain(&b, 2);
    assert_eq!(done[0].status, Status::RemoteAccessError);
    assert_eq!(done[1].status, Status::Flushed);
    assert_eq!(load_u64(target.memory().as_ref(), 0), 0);
}

#[test]
fn revocation_cuts_a_large_write_between_two_pieces() {
    let (mut a, b) = linked(QueuePairOptions::default());
    let length = 256 << 20;
    let target = b.region(length, all());
    let source = a.region(length, all());
    for page in (0..length).step_by(4096) {
        copy_in(source.memory().as_ref(), page, &[1]);
    }
    let data = [entry(&source, 0, length as u64)];
    let write =
        Operation::Write { local: LocalData::Gather(&data), remote: target.remote_address(0) };
    let revoker = {
        let target = target.clone();
        std::thread::spawn(move || {
            while load_u64(target.memory().as_ref(), 4096) == 0 {
                std::thread::yield_now();
            }
            target.revoke().unwrap();
            let mut before = vec![0; length];
            copy_out(target.memory().as_ref(), 0, &mut before);
            std::thread::sleep(Duration::from_millis(30));
            let mut after = vec![0; length];
            copy_out(target.memory().as_ref(), 0, &mut after);
            assert!(before == after, "nothing lands after revoke returned");
        })
    };
    a.pair.post_send(&[WorkRequest::new(1, write)]).unwrap();
    let done = a.one();
    revoker.join().unwrap();
    if done.status != Status::Success {
        assert_eq!(done.status, Status::RemoteAccessError);
    }
}

#[test]
fn an_armed_queue_wakes_for_what_the_library_did() {
    let (mut a, mut b) = linked(QueuePairOptions::default());
    for round in 0..50_u64 {
        let receive = ReceiveRequest { wr_id: round, buffer: None };
        b.pair.post_receive(&[receive]).unwrap();
        b.queue.acknowledge().unwrap();
        b.queue.arm().unwrap();
        let mut one = [WorkCompletion::EMPTY];
        assert_eq!(b.queue.poll(&mut one).unwrap(), 0);
        let sender = std::thread::scope(|scope| {
            let fd = b.queue.event_descriptor();
            let waiter = scope.spawn(move || {
                let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
                let bound = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
                rustix::event::poll(&mut fds, Some(&bound)).unwrap()
            });
            if round % 3 == 0 {
                std::thread::sleep(Duration::from_millis(3));
            }
            let send = Operation::Send { local: LocalData::Inline(&[]), immediate: Some(1) };
            a.pair.post_send(&[WorkRequest::new(round, send)]).unwrap();
            waiter.join().unwrap()
        });
        assert_eq!(sender, 1, "the event comes");
        b.queue.acknowledge().unwrap();
        assert_eq!(b.one().wr_id, round);
        assert_eq!(a.one().wr_id, round);
    }
}
