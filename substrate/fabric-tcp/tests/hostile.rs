//! Peers that break the rules end their own connection, and nothing else.
//!
//! `BEELINE_DEEP=1` runs the random part for a minute instead of a moment.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, Device, LocalData, MemoryRegion, Operation, ProtectionDomain,
    QueuePair, QueuePairOptions, QueuePairState, ReceiveRequest, RemoteAddress, RemoteKey, Role,
    ScatterGatherEntry, Status, WorkCompletion, WorkRequest,
};
use beeline_fabric_tcp::frame::{Frame, HEADER_BYTES, MAX_SEND_BYTES, Message, WaitReason};
use beeline_fabric_tcp::handshake::{Endpoint, GREETING_BYTES, Greeting, GreetingRole};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_os::memory::copy_out;

const BOUND: Duration = Duration::from_secs(20);

/// A small generator: the failing seed is in the panic's message.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// The side under attack, with one region that may be reached and one that may not.
struct Victim {
    device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
    queue: Rc<dyn CompletionQueue>,
    open: MemoryRegion,
    closed: MemoryRegion,
}

impl Victim {
    fn new() -> Self {
        let device = TcpDevice::open(TcpConfig::default()).unwrap();
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(1 << 16).unwrap();
        let region =
            |access| domain.register(device.allocate_memory(1 << 16).unwrap(), access).unwrap();
        let (open, closed) = (region(Access::all()), region(Access::LOCAL_WRITE));
        Self { device, domain, queue, open, closed }
    }

    fn pair(&self) -> Box<dyn QueuePair> {
        self.pair_with(QueuePairOptions::default())
    }

    fn pair_with(&self, options: QueuePairOptions) -> Box<dyn QueuePair> {
        self.domain.create_queue_pair(&self.queue, &self.queue, None, options).unwrap()
    }

    /// A queue pair whose peer is a bare socket that has shaken hands properly.
    fn attacked(&self) -> (Box<dyn QueuePair>, TcpStream) {
        self.attacked_with(QueuePairOptions::default())
    }

    fn attacked_with(&self, options: QueuePairOptions) -> (Box<dyn QueuePair>, TcpStream) {
        let mut pair = self.pair_with(options);
        let endpoint = Endpoint::decode(&pair.connect_info()).unwrap();
        let me = (77, [9; 16]);
        let mine = Endpoint { qp_num: me.0, nonce: me.1, ..endpoint };
        pair.connect(&mine.encode(), Role::Passive).unwrap();
        let mut socket = TcpStream::connect(endpoint.address).unwrap();
        let target = (endpoint.qp_num, endpoint.nonce);
        let hello = Greeting { role: GreetingRole::Hello, target, source: me };
        socket.write_all(&hello.encode()).unwrap();
        socket.set_read_timeout(Some(BOUND)).unwrap();
        let mut welcome = [0; GREETING_BYTES];
        socket.read_exact(&mut welcome).unwrap();
        assert_eq!(Greeting::decode(&welcome).unwrap().source, target);
        pair.wait_connected(BOUND).unwrap();
        (pair, socket)
    }

    fn poll(&self) -> Vec<WorkCompletion> {
        let mut completions = [WorkCompletion::EMPTY; 64];
        let count = self.queue.poll(&mut completions).unwrap();
        completions[..count].to_vec()
    }

    /// Polls until the pair is broken.
    fn breaks(&self, pair: &dyn QueuePair) -> bool {
        let begun = Instant::now();
        while pair.state() != QueuePairState::Error && begun.elapsed() < BOUND {
            self.poll();
        }
        pair.state() == QueuePairState::Error
    }

    fn is_untouched(&self) -> bool {
        let mut bytes = vec![0; 1 << 16];
        copy_out(self.closed.memory().as_ref(), 0, &mut bytes);
        bytes.iter().all(|byte| *byte == 0)
    }

    /// An honest neighbour of the attacked connection still works.
    fn serves_others(&self) {
        let other = Self::new();
        let (mut near, mut far) = (other.pair(), self.pair());
        far.connect(&near.connect_info(), Role::Passive).unwrap();
        near.connect(&far.connect_info(), Role::Active).unwrap();
        near.wait_connected(BOUND).unwrap();
        let write = Operation::Write {
            local: LocalData::Inline(b"honest"),
            remote: self.open.remote_address(60_000),
        };
        near.post_send(&[WorkRequest::new(1, write)]).unwrap();
        let mut done = [WorkCompletion::EMPTY];
        assert_eq!(other.queue.wait(&mut done, BOUND).unwrap(), 1);
        assert!(done[0].is_success());
    }
}

fn frame(sequence: u32, request: u32, message: Message) -> Frame {
    Frame { sequence, request, acknowledged: 0, acknowledge: false, message }
}

fn write_to(region: &MemoryRegion, offset: u64, length: u64) -> Message {
    Message::Write { remote: region.remote_address(offset), length, immediate: None }
}

#[test]
fn each_kind_of_bad_frame_ends_its_connection_only() {
    let victim = Victim::new();
    let good = frame(0, 0, write_to(&victim.open, 0, 0)).encode();
    let mut damaged = good;
    damaged[30] ^= 1;
    let two = |second: Frame| [good, second.encode()].concat();
    let unknown = RemoteAddress { key: RemoteKey(1), offset: 0 };
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("noise", vec![0xA5; HEADER_BYTES]),
        ("damaged", damaged.to_vec()),
        ("replayed", [good, good].concat()),
        ("a frame skipped", two(frame(2, 1, write_to(&victim.open, 0, 0)))),
        ("a request skipped", two(frame(1, 5, write_to(&victim.open, 0, 0)))),
        ("a closed region", frame(0, 0, write_to(&victim.closed, 0, 8)).encode().to_vec()),
        ("past the end", frame(0, 0, write_to(&victim.open, 65_535, 2)).encode().to_vec()),
        ("a wrapping range", frame(0, 0, write_to(&victim.open, u64::MAX, 2)).encode().to_vec()),
        (
            "a guessed key",
            frame(0, 0, Message::Read { remote: unknown, length: 1 }).encode().to_vec(),
        ),
        ("an answer unasked", frame(0, 0, Message::ReadResponse { length: 8 }).encode().to_vec()),
        ("an atomic unasked", frame(0, 0, Message::AtomicResponse { old: 8 }).encode().to_vec()),
        (
            "a refusal unasked",
            frame(0, 0, Message::Refuse { status: Status::LengthError }).encode().to_vec(),
        ),
        ("a resume unasked", frame(0, 0, Message::Resume).encode().to_vec()),
        (
            "a wait unasked",
            frame(0, 0, Message::Wait { reason: WaitReason::Busy }).encode().to_vec(),
        ),
        (
            "a send nobody waits for, sent again unasked",
            [
                frame(0, 0, Message::Send { length: 0, immediate: None }).encode(),
                frame(1, 0, Message::Send { length: 0, immediate: None }).encode(),
            ]
            .concat(),
        ),
        (
            "over-long",
            frame(0, 0, Message::Send { length: MAX_SEND_BYTES + 1, immediate: None })
                .encode()
                .to_vec(),
        ),
        (
            "an acknowledgement of nothing",
            Frame { acknowledged: 1, ..frame(0, 0, Message::Acknowledge) }.encode().to_vec(),
        ),
    ];
    for (name, bytes) in cases {
        let (mut pair, mut socket) = victim.attacked();
        pair.post_receive(&[]).unwrap();
        socket.write_all(&bytes).unwrap();
        assert!(victim.breaks(pair.as_ref()), "{name} ends the connection");
        assert!(victim.is_untouched(), "{name}");
    }
    victim.serves_others();
}

#[test]
fn an_early_acknowledgement_does_not_free_what_is_still_being_sent() {
    let victim = Victim::new();
    let (mut pair, mut socket) = victim.attacked();
    let memory = victim.device.allocate_memory(64 << 20).unwrap();
    let region = victim.domain.register(memory, Access::all()).unwrap();
    let entries = [ScatterGatherEntry { region: &region, offset: 0, length: 64 << 20 }];
    let remote = RemoteAddress { key: RemoteKey(1), offset: 0 };
    let write = Operation::Write { local: LocalData::Gather(&entries), remote };
    pair.post_send(&[WorkRequest::new(5, write)]).unwrap();
    let early = Frame { acknowledged: 1, ..frame(0, 0, Message::Acknowledge) };
    socket.write_all(&early.encode()).unwrap();
    let mut done = [WorkCompletion::EMPTY];
    assert_eq!(victim.queue.wait(&mut done, BOUND).unwrap(), 1);
    assert_eq!((done[0].wr_id, done[0].status), (5, Status::TransportError));
}

#[test]
fn a_peer_that_never_answers_is_given_up_whether_or_not_anybody_polls() {
    let victim = Victim::new();
    let options = QueuePairOptions {
        transport_timeout: Duration::from_millis(150),
        ..QueuePairOptions::default()
    };
    for sleeps in [false, true] {
        let (mut pair, _socket) = victim.attacked_with(options);
        let remote = RemoteAddress { key: RemoteKey(1), offset: 0 };
        let write = Operation::Write { local: LocalData::Inline(b"x"), remote };
        pair.post_send(&[WorkRequest::new(1, write), WorkRequest::unsignalled(2, write)]).unwrap();
        let begun = Instant::now();
        while sleeps && pair.state() != QueuePairState::Error && begun.elapsed() < BOUND {
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut statuses = Vec::new();
        while statuses.len() < 2 && begun.elapsed() < BOUND {
            let mut done = [WorkCompletion::EMPTY; 2];
            let count = victim.queue.wait(&mut done, BOUND).unwrap();
            statuses.extend(done[..count].iter().map(|done| done.status));
        }
        assert_eq!(statuses, [Status::TransportError, Status::Flushed]);
    }
}

#[test]
fn a_truncated_frame_changes_nothing_and_ends_with_the_stream() {
    let victim = Victim::new();
    let (mut pair, mut socket) = victim.attacked();
    let receive = ReceiveRequest {
        wr_id: 3,
        buffer: Some(ScatterGatherEntry { region: &victim.open, offset: 0, length: 4096 }),
    };
    pair.post_receive(&[receive]).unwrap();
    let send = frame(0, 0, Message::Send { length: 100, immediate: None });
    socket.write_all(&send.encode()).unwrap();
    socket.write_all(&[1; 99]).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(victim.poll().is_empty());
    drop(socket);
    let mut done = [WorkCompletion::EMPTY];
    assert_eq!(victim.queue.wait(&mut done, BOUND).unwrap(), 1);
    assert_eq!((done[0].wr_id, done[0].status), (3, Status::Flushed));
}

#[test]
fn strangers_and_wrong_nonces_are_turned_away() {
    let victim = Victim::new();
    let mut pair = victim.pair();
    let endpoint = Endpoint::decode(&pair.connect_info()).unwrap();
    let expected = Endpoint { qp_num: 5, nonce: [5; 16], ..endpoint };
    pair.connect(&expected.encode(), Role::Passive).unwrap();
    let greeting =
        |target, source| Greeting { role: GreetingRole::Hello, target, source }.encode().to_vec();
    let right = (endpoint.qp_num, endpoint.nonce);
    for bytes in [
        greeting((endpoint.qp_num, [0; 16]), (5, [5; 16])),
        greeting((endpoint.qp_num + 1, endpoint.nonce), (5, [5; 16])),
        greeting(right, (5, [6; 16])),
        greeting(right, (6, [5; 16])),
        vec![b'G'; GREETING_BYTES],
    ] {
        let mut socket = TcpStream::connect(endpoint.address).unwrap();
        socket.write_all(&bytes).unwrap();
        socket.set_read_timeout(Some(BOUND)).unwrap();
        let end = socket.read(&mut [0; 8]);
        let over = match &end {
            Ok(count) => *count == 0,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        };
        assert!(over, "{end:?}");
        assert_eq!(pair.state(), QueuePairState::Init);
    }
    let mut socket = TcpStream::connect(endpoint.address).unwrap();
    socket.write_all(&greeting(right, (5, [5; 16]))).unwrap();
    pair.wait_connected(BOUND).unwrap();
}

/// One random attack: plausible frames, some damaged, cut anywhere.
fn attack(victim: &Victim, seed: u64) {
    let mut random = Random(seed | 1);
    let (mut pair, mut socket) = victim.attacked();
    for number in 0..random.below(4) {
        let entry = ScatterGatherEntry {
            region: &victim.open,
            offset: 4096 * number,
            length: random.below(300),
        };
        pair.post_receive(&[ReceiveRequest { wr_id: number, buffer: Some(entry) }]).unwrap();
    }
    for number in 0..random.below(3) {
        let local = ScatterGatherEntry { region: &victim.open, offset: 32_768, length: 8 * number };
        let remote = RemoteAddress { key: RemoteKey(1), offset: 0 };
        let read = Operation::Read { local, remote };
        pair.post_send(&[WorkRequest::new(100 + number, read)]).unwrap();
    }
    let mut stream = Vec::new();
    for number in 0..1 + random.below(12) as u32 {
        let region = if random.below(8) == 0 { &victim.closed } else { &victim.open };
        let remote = region.remote_address(random.below(66_000));
        let length = random.below(400);
        let message = match random.below(13) {
            0 | 1 => Message::Write { remote, length, immediate: None },
            2 => Message::Write { remote, length, immediate: Some(random.next() as u32) },
            3 => Message::Read { remote, length },
            4 => Message::Send { length, immediate: None },
            5 => Message::FetchAndAdd { remote, addend: 1 },
            6 => Message::CompareAndSwap { remote, expected: 0, desired: 1 },
            7 => Message::ReadResponse { length: 8 * random.below(3) },
            8 => Message::AtomicResponse { old: 1 },
            9 => Message::Wait { reason: WaitReason::NotReady },
            10 => Message::Resume,
            11 => Message::Refuse { status: Status::RemoteAccessError },
            _ => Message::Acknowledge,
        };
        let honest = random.below(10) != 0;
        let request = match message {
            Message::Acknowledge => 0,
            _ if honest && message.is_request() => number,
            _ => random.below(4) as u32,
        };
        let frame = Frame {
            sequence: number,
            request,
            acknowledged: if random.below(6) == 0 { random.below(4) as u32 } else { 0 },
            acknowledge: message.is_request() && random.below(2) == 0,
            message,
        };
        stream.extend_from_slice(&frame.encode());
        stream.extend((0..message.payload_bytes()).map(|byte| byte as u8 | 1));
    }
    if random.below(3) == 0 {
        let at = random.below(stream.len() as u64) as usize;
        stream[at] ^= 1 << random.below(8);
    }
    stream.truncate(1 + random.below(2 * stream.len() as u64) as usize);
    for piece in stream.chunks(1 + random.below(500) as usize) {
        // The victim may have hung up already.
        if socket.write_all(piece).is_err() {
            break;
        }
        if random.below(3) == 0 {
            victim.poll();
        }
    }
    drop(socket);
    assert!(victim.breaks(pair.as_ref()), "seed {seed}: the connection ends");
    assert!(victim.is_untouched(), "seed {seed}: the closed region is untouched");
}

#[test]
fn random_streams_harm_nobody() {
    let deep = std::env::var("BEELINE_DEEP").is_ok_and(|value| value == "1");
    let time = if deep { Duration::from_secs(60) } else { Duration::from_millis(700) };
    let victim = Victim::new();
    let begun = Instant::now();
    let mut count = 0_u64;
    // Some of them on any machine: each is many turns of two threads.
    while begun.elapsed() < time || count <= 10 {
        count += 1;
        attack(&victim, count.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        victim.poll();
    }
    victim.serves_others();
    let line = format!("ran: {count} random streams, the victim served others after them\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}
