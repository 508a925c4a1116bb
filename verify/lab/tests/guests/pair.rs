//! One queue pair between two guests, on any provider.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, FlushKind, LocalData, MemoryRegion, Operation,
    ProtectionDomain, QueuePair, QueuePairOptions, ReceiveRequest, RemoteAddress, RemoteKey, Role,
    ScatterGatherEntry, Status, WorkCompletion, WorkRequest,
};
use beeline_os::memory::{copy_in, copy_out, load_u64};

use crate::say;

/// The device's URL; the word WINDOW in it stands for the file of the guest's memory window.
const DEVICE: &str = "BEELINE_LAB_DEVICE";
/// The other guest, whose pair this one connects to; without it, this one waits to be called.
const CALL: &str = "BEELINE_LAB_CALL";
const PORT: u16 = 4791;
const BOUND: Duration = Duration::from_secs(30);
const BYTES: usize = 1 << 20;
const ECHOES: u64 = 50;

struct End {
    domain: Arc<dyn ProtectionDomain>,
    queue: Rc<dyn CompletionQueue>,
    pair: Box<dyn QueuePair>,
    device: Arc<dyn Device>,
}

impl End {
    fn open() -> Option<Self> {
        let url = std::env::var(DEVICE).ok()?;
        let window = std::env::var("LAB_WINDOW").unwrap_or_default();
        let device = beeline_fabric_open::open(&url.replace("WINDOW", &window)).unwrap();
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(256).unwrap();
        let options = QueuePairOptions::default();
        let pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
        Some(Self { domain, queue, pair, device })
    }

    fn region(&self) -> MemoryRegion {
        self.domain.register(self.device.allocate_memory(BYTES).unwrap(), Access::all()).unwrap()
    }

    fn one(&self, bound: Duration) -> Option<WorkCompletion> {
        let mut one = [WorkCompletion::EMPTY];
        (self.queue.wait(&mut one, bound).unwrap() == 1).then(|| one[0])
    }

    /// Posts one operation and waits for its success.
    fn succeed(&mut self, operation: Operation<'_>) {
        self.pair.post_send(&[WorkRequest::new(1, operation)]).unwrap();
        let done = self.one(BOUND).unwrap();
        assert_eq!(done.status, Status::Success, "{operation:?}");
    }

    /// Swaps connection data over `stream` and connects; returns the other end's key.
    fn connect(&mut self, stream: &mut TcpStream, role: Role, key: RemoteKey) -> RemoteKey {
        let mut mine = self.pair.connect_info().0;
        mine.extend_from_slice(&key.0.to_le_bytes());
        stream.write_all(&u32::try_from(mine.len()).unwrap().to_le_bytes()).unwrap();
        stream.write_all(&mine).unwrap();
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut theirs = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut theirs).unwrap();
        let key = u64::from_le_bytes(theirs.split_off(theirs.len() - 8).try_into().unwrap());
        // The one that waits is ready before the one that calls.
        let mut turn = [0];
        if role == Role::Active {
            stream.read_exact(&mut turn).unwrap();
        }
        self.pair.connect(&ConnectInfo(theirs), role).unwrap();
        if role == Role::Passive {
            stream.write_all(&turn).unwrap();
        }
        self.pair.wait_connected(BOUND).unwrap();
        RemoteKey(key)
    }
}

/// Both ends: the one with `BEELINE_LAB_CALL` does everything a queue pair can and checks it, says
/// `operations NUMBER`, and then writes until something breaks: `broken MS STATUS`.
#[test]
fn pair() {
    let Some(end) = End::open() else { return };
    match std::env::var(CALL) {
        Ok(address) => call(end, &address),
        Err(_) => answer(end),
    }
}

fn answer(mut end: End) {
    let listener = TcpListener::bind(("0.0.0.0", PORT)).unwrap();
    say("listening");
    let (mut stream, _) = listener.accept().unwrap();
    let (region, inbox) = (end.region(), end.region());
    for id in 0..ECHOES {
        receive(&mut end, &inbox, id);
    }
    end.connect(&mut stream, Role::Passive, region.remote_key());
    say("connected");
    // Echoes, until the other end goes.
    loop {
        let Some(done) = end.one(BOUND * 20) else { panic!("the other end says nothing") };
        if !done.is_success() {
            return say(&format!("broken 0 {:?}", done.status));
        }
        if done.immediate.is_none() && done.wr_id < ECHOES {
            let mut bytes = [0; 8];
            copy_out(inbox.memory().as_ref(), done.wr_id as usize * 8, &mut bytes);
            let echo = Operation::Send { local: LocalData::Inline(&bytes), immediate: Some(7) };
            end.pair.post_send(&[WorkRequest::new(1000, echo)]).unwrap();
        }
    }
}

fn receive(end: &mut End, inbox: &MemoryRegion, id: u64) {
    let buffer = ScatterGatherEntry { region: inbox, offset: id * 8, length: 8 };
    end.pair.post_receive(&[ReceiveRequest { wr_id: id, buffer: Some(buffer) }]).unwrap();
}

fn call(mut end: End, address: &str) {
    let deadline = Instant::now() + BOUND;
    let mut stream = loop {
        match TcpStream::connect((address, PORT)) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let (local, inbox) = (end.region(), end.region());
    for id in 0..ECHOES {
        receive(&mut end, &inbox, id);
    }
    let key = end.connect(&mut stream, Role::Active, local.remote_key());
    let mut operations = transfers(&mut end, &local, key);
    operations += echoes(&mut end);
    say(&format!("operations {operations}"));
    // Until something breaks: then it has to show within a bound.
    for round in 0_u64.. {
        let begun = Instant::now();
        let bytes = round.to_le_bytes();
        let remote = RemoteAddress { key, offset: 64 };
        let write = Operation::Write { local: LocalData::Inline(&bytes), remote };
        let posted = end.pair.post_send(&[WorkRequest::new(1, write)]);
        let status = match posted {
            Ok(()) => end.one(BOUND * 2).map(|done| done.status),
            Err(_) => Some(Status::Flushed),
        };
        match status {
            Some(Status::Success) => {}
            Some(status) => {
                return say(&format!("broken {} {status:?}", begun.elapsed().as_millis()));
            }
            None => return say("silent"),
        }
        if round % 100 == 0 {
            say(&format!("writing {round}"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A mebibyte there and back, atomics, a flush; how many operations.
fn transfers(end: &mut End, local: &MemoryRegion, key: RemoteKey) -> u64 {
    let remote = |offset| RemoteAddress { key, offset };
    for length in [1_usize, 64, 4096, 65_537, BYTES] {
        let pattern: Vec<u8> = (0..length).map(|at| (at * 7 % 251 + length % 5) as u8).collect();
        copy_in(local.memory().as_ref(), 0, &pattern);
        let entry = ScatterGatherEntry { region: local, offset: 0, length: length as u64 };
        end.succeed(Operation::Write { local: LocalData::Gather(&[entry]), remote: remote(0) });
        end.succeed(Operation::Flush {
            remote: remote(0),
            length: length as u64,
            kind: FlushKind::Visible,
        });
        copy_in(local.memory().as_ref(), 0, &vec![0; length]);
        end.succeed(Operation::Read { local: entry, remote: remote(0) });
        let mut seen = vec![0; length];
        copy_out(local.memory().as_ref(), 0, &mut seen);
        assert!(seen == pattern, "{length} bytes there and back");
    }
    let zero = 0_u64.to_le_bytes();
    end.succeed(Operation::Write { local: LocalData::Inline(&zero), remote: remote(0) });
    let word = ScatterGatherEntry { region: local, offset: 0, length: 8 };
    for expected in 0..100_u64 {
        end.succeed(Operation::FetchAndAdd { local: word, remote: remote(0), addend: 1 });
        assert_eq!(load_u64(local.memory().as_ref(), 0), expected);
    }
    let swap = |expected, desired| Operation::CompareAndSwap {
        local: word,
        remote: remote(0),
        expected,
        desired,
    };
    end.succeed(swap(100, 7));
    assert_eq!(load_u64(local.memory().as_ref(), 0), 100);
    end.succeed(swap(100, 8));
    assert_eq!(load_u64(local.memory().as_ref(), 0), 7, "the first swap happened");
    5 * 3 + 1 + 100 + 2
}

fn echoes(end: &mut End) -> u64 {
    for number in 0..ECHOES {
        let bytes = (number * 3).to_le_bytes();
        let send = Operation::Send { local: LocalData::Inline(&bytes), immediate: None };
        end.pair.post_send(&[WorkRequest::new(1000, send)]).unwrap();
        // Its own completion and the echo, in either order.
        for _ in 0..2 {
            let done = end.one(BOUND).unwrap();
            assert_eq!(done.status, Status::Success, "echo {number}");
            if done.wr_id < ECHOES {
                assert_eq!((done.wr_id, done.immediate), (number, Some(7)));
            }
        }
    }
    ECHOES
}
