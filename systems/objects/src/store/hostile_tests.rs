//! Clients that break the protocol, beside one that keeps it.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use beeline_env::random::Randomness;
use beeline_os::control_socket::{ControlSocket, Received};

use super::{Alone, Store, StoreOptions};
use crate::client::Client;
use crate::id::ObjectId;
use crate::link::{LENGTH_BYTES, Link};
use crate::wire::{Operation, RECORD_BYTES, Record, RecordKind, Reply, Request, Status, VERSION};

const SOON: Duration = Duration::from_secs(20);

fn store(folder: &Path) -> Store {
    let options = StoreOptions {
        socket: folder.join("objects.sock"),
        socket_mode: 0o600,
        memory_bytes: 32 << 20,
        spill_directory: folder.join("spill"),
        spill_bytes: 0,
        spin: Duration::from_micros(20),
        max_clients: 100,
        processors: Vec::new(),
    };
    Store::start(options, |handle| Box::new(Alone(handle))).unwrap()
}

struct Raw {
    socket: ControlSocket,
    link: Link,
}

impl Raw {
    fn ring(&self) {
        let _ = self.socket.send(&Record::new(RecordKind::Ring, 0, 0, 0).encode(), &[]);
    }

    /// Sends a reserve until the store has one to give, and maps what it offers.
    fn reserve(&mut self, reserve: &Request) {
        let start = Instant::now();
        for tag in 1_u32.. {
            if self.link.push(tag, &reserve.encode()) {
                self.ring();
            }
            let reply = loop {
                if let Some(message) = self.link.take() {
                    self.link.publish_taken();
                    break Reply::decode(&message).unwrap();
                }
                assert!(start.elapsed() < SOON, "no answer to a reserve");
            };
            if reply.status == Status::Done {
                return;
            }
            // The store offers one segment, and gives a reserve in it once it is mapped.
            if tag > 1 {
                continue;
            }
            let (segment, _descriptor) = receive(&self.socket).unwrap();
            let mapped = Record::new(RecordKind::Mapped, segment.a, 0, 0);
            self.socket.send(&mapped.encode(), &[]).unwrap();
        }
    }
}

fn receive(socket: &ControlSocket) -> Option<(Record, Vec<OwnedFd>)> {
    let (mut bytes, mut descriptors) = ([0; RECORD_BYTES], Vec::new());
    let start = Instant::now();
    loop {
        match socket.receive(&mut bytes, &mut descriptors) {
            Ok(Received::Record(length)) => {
                return Some((Record::decode(&bytes[..length])?, descriptors));
            }
            Ok(Received::Empty) => std::thread::yield_now(),
            _ => return None,
        }
        assert!(start.elapsed() < SOON, "the store neither answers nor closes");
    }
}

fn join(folder: &Path) -> Raw {
    let socket = ControlSocket::connect_path(&folder.join("objects.sock")).unwrap();
    let hello = Record::new(RecordKind::Hello, VERSION.into(), 0, 0);
    socket.send(&hello.encode(), &[]).unwrap();
    let (_, mut descriptors) = receive(&socket).unwrap();
    Raw { socket, link: Link::open(descriptors.pop().unwrap()).unwrap() }
}

fn is_expelled(raw: &Raw) -> bool {
    let (mut bytes, mut descriptors) = ([0; 64], Vec::new());
    let start = Instant::now();
    while start.elapsed() < SOON {
        match raw.socket.receive(&mut bytes, &mut descriptors) {
            Ok(Received::Closed) | Err(_) => return true,
            _ => raw.ring(),
        }
        std::thread::yield_now();
    }
    false
}

#[test]
fn scribbled_rings_end_their_own_connection_at_most() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let honest = Client::connect(&folder.path().join("objects.sock")).unwrap();
    let mut chance = Randomness::new(7);
    let metrics = store.handle().metrics();
    for round in 0..150_u64 {
        let raw = join(folder.path());
        for _ in 0..chance.below(600) {
            let words = LENGTH_BYTES as u64 / 8;
            let slot = chance.below(64);
            let (at, value) = match chance.below(4) {
                0 => (chance.below(words), chance.next_u64()),
                1 => (chance.below(words), chance.below(70)),
                // What the store takes for a message, in the order it looks for them.
                2 => (512 + slot * 8, chance.below(1 << 24) << 32 | (slot + 1)),
                // Its body: an operation, sizes, a handle, a time-out.
                _ => (512 + slot * 8 + 1 + chance.below(7), chance.below(16) << 32 | slot),
            };
            let at = usize::try_from(at).unwrap();
            raw.link.scribble(at, value);
        }
        raw.ring();
        let id = ObjectId([u8::try_from(round).unwrap(); 20]);
        honest.put(id, &round.to_le_bytes(), b"", SOON).unwrap();
        assert_eq!(honest.get(id, Duration::ZERO).unwrap().to_vec(), round.to_le_bytes());
    }
    store.handle().publish();
    honest.ping().unwrap();
    assert!(metrics.objects_expelled_clients.value() > 0, "no round was noticed");
    assert!(store.is_running());
}

type Act = Box<dyn Fn(&mut Raw)>;

#[test]
fn what_no_honest_client_does_ends_the_connection() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let id = |number: u8| ObjectId([number; 20]);
    let push = |request: Request, tag: u32, times: u32| {
        move |raw: &mut Raw| {
            for _ in 0..times {
                let _ = raw.link.push(tag, &request.encode());
            }
        }
    };
    let waiting = Request { timeout_us: 60_000_000, ..Request::new(Operation::Get, id(3)) };
    let strange: Vec<(&str, Act)> = vec![
        (
            "a reference it does not hold",
            Box::new(push(Request::new(Operation::Release, id(3)), 1, 1)),
        ),
        ("a number twice", Box::new(push(waiting, 5, 2))),
        (
            "an object where it reserved nothing",
            Box::new(push(Request::new(Operation::Put, id(3)), 1, 1)),
        ),
        (
            "an object behind its reserve",
            Box::new(move |raw| {
                let reserve = Request { size: 4096, ..Request::new(Operation::Reserve, id(0)) };
                raw.reserve(&reserve);
                let put = Request { size: 1 << 40, ..Request::new(Operation::Put, id(4)) };
                let _ = raw.link.push(9, &put.encode());
            }),
        ),
        (
            "a reserve beyond measure",
            Box::new(push(
                Request { size: 1 << 40, ..Request::new(Operation::Reserve, id(0)) },
                1,
                1,
            )),
        ),
        ("no number", Box::new(push(Request::new(Operation::Ping, id(3)), 0, 1))),
        (
            "no operation",
            Box::new(|raw| {
                let _ = raw.link.push(1, &[0, 0, 0xff << 32]);
            }),
        ),
        (
            "a second hello",
            Box::new(|raw| {
                let hello = Record::new(RecordKind::Hello, VERSION.into(), 0, 0);
                raw.socket.send(&hello.encode(), &[]).unwrap();
            }),
        ),
        ("no record", Box::new(|raw| raw.socket.send(b"hello", &[]).unwrap())),
        ("a long record", Box::new(|raw| raw.socket.send(&[1; 200], &[]).unwrap())),
    ];
    for (name, act) in strange {
        let mut raw = join(folder.path());
        act(&mut raw);
        assert!(is_expelled(&raw), "{name}: the store put up with it");
    }
    let tolerated = join(folder.path());
    assert!(
        tolerated.socket.send(&Record::new(RecordKind::Unmapped, 99, 0, 0).encode(), &[]).is_ok()
    );
    assert!(store.is_running());
}

#[test]
fn a_client_that_reads_nothing_is_not_served_without_end() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let mut raw = join(folder.path());
    let mut sent = 0_u32;
    let start = Instant::now();
    while sent < 100_000 && start.elapsed() < Duration::from_secs(2) {
        if raw.link.has_room().unwrap() {
            sent += 1;
            let request = Request::new(Operation::Ping, ObjectId([0; 20]));
            if raw.link.push(1, &request.encode()) {
                raw.ring();
            }
        } else if sent > 500 {
            break;
        }
    }
    assert!(sent < 10_000, "{sent} requests were taken from a client that reads no reply");
    let honest = Client::connect(&folder.path().join("objects.sock")).unwrap();
    honest.put(ObjectId([1; 20]), b"served", b"", SOON).unwrap();
    assert!(store.is_running());
}

#[test]
fn another_version_is_refused_with_the_version_spoken() {
    let folder = tempfile::tempdir().unwrap();
    let _store = store(folder.path());
    let socket = ControlSocket::connect_path(&folder.path().join("objects.sock")).unwrap();
    socket.send(&Record::new(RecordKind::Hello, 99, 0, 0).encode(), &[]).unwrap();
    let (record, _) = receive(&socket).unwrap();
    assert_eq!((record.kind, record.a), (RecordKind::Refused, VERSION.into()));
}

#[test]
fn a_client_that_asks_for_listings_and_takes_none_is_sent_away() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let raw = join(folder.path());
    for question in 0..10 {
        // Refused once the connection is over.
        let _ = raw.socket.send(&Record::new(RecordKind::List, question, 0, 0).encode(), &[]);
    }
    assert!(is_expelled(&raw), "the store holds a listing for each question");
    let honest = Client::connect(&folder.path().join("objects.sock")).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..20).for_each(|_| drop(honest.list().unwrap())));
        }
    });
    assert!(store.is_running());
}

#[test]
fn a_client_that_floods_its_socket_keeps_nobody_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let honest = Client::connect(&folder.path().join("objects.sock")).unwrap();
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let raw = join(folder.path());
                let record = Record::new(RecordKind::Unmapped, 99, 0, 0).encode();
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = raw.socket.send(&record, &[]);
                }
            });
        }
        let start = Instant::now();
        for _ in 0..200 {
            honest.ping().unwrap();
            assert!(start.elapsed() < Duration::from_secs(60), "an honest client waits");
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(store.is_running());
}

#[test]
fn a_client_that_reads_its_replies_late_gets_them_all() {
    let folder = tempfile::tempdir().unwrap();
    let _store = store(folder.path());
    let mut raw = join(folder.path());
    let ping = Request::new(Operation::Ping, ObjectId([0; 20])).encode();
    let (mut sent, mut taken) = (0_u32, 0_u32);
    for _ in 0..20 {
        // Until both rings are full, and have been for so long that the store has stopped polling.
        let (begun, mut full_since) = (Instant::now(), None::<Instant>);
        while sent - taken < 2 * crate::link::SLOTS
            || full_since.is_none_or(|since| since.elapsed() < Duration::from_millis(20))
        {
            assert!(begun.elapsed() < SOON, "{sent} requests and {taken} replies fill no ring");
            if raw.link.has_room().unwrap() {
                sent += 1;
                full_since = None;
                if raw.link.push(sent, &ping) {
                    raw.ring();
                }
            } else {
                full_since.get_or_insert_with(Instant::now);
            }
        }
        let start = Instant::now();
        while taken < sent {
            match raw.link.take() {
                Some(message) => {
                    taken += 1;
                    assert_eq!(message.tag, taken);
                }
                None => raw.link.publish_taken(),
            }
            assert!(start.elapsed() < SOON, "{taken} of {sent} replies came");
        }
        raw.link.publish_taken();
    }
}
