//! What a manager keeps while its figures are not scraped.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use beeline_fabric::Device;
use beeline_fabric_sim::{SimOptions, SimWorld};
use beeline_os::MemoryObject;
use rustix::net::sockopt;

use super::socket::Wire;
use super::{Agreed, ClusterOptions, Dial, Finding, Manager, Move};
use crate::client::Client;
use crate::error::ObjectsError;
use crate::id::ObjectId;
use crate::store::{Store, StoreOptions};
use crate::transfer::{Header, Kind};

const SOON: Duration = Duration::from_secs(20);
/// Of nodes here with a peer that stands still: both are waited for.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reaches no node.
struct Nobody;

impl Dial for Nobody {
    fn dial(&self, _address: &str, _avoid: bool) -> Result<Box<dyn Agreed>, String> {
        Err("nobody is there".to_owned())
    }
}

/// Nodes of which the first takes longer to fail than a silence is borne; how often each was tried.
#[derive(Clone, Default)]
struct Slow([Arc<AtomicU32>; 2]);

impl Dial for Slow {
    fn dial(&self, address: &str, _avoid: bool) -> Result<Box<dyn Agreed>, String> {
        let slow = address == "slow:1";
        self.0[usize::from(!slow)].fetch_add(1, Ordering::Relaxed);
        if slow {
            std::thread::sleep(PATIENCE);
        }
        Err("not now".to_owned())
    }
}

/// A store with a manager, and the address of its socket for transfers. A peer that waits for a
/// processor is not given up.
fn node(folder: &Path) -> (Store, Manager, SocketAddr) {
    node_with(folder, Vec::new(), Box::new(Nobody), SOON)
}

fn node_with(
    folder: &Path,
    peers: Vec<String>,
    dial: Box<dyn Dial>,
    patience: Duration,
) -> (Store, Manager, SocketAddr) {
    let socket = folder.join("objects.sock");
    let options = StoreOptions {
        socket: socket.clone(),
        socket_mode: 0o600,
        memory_bytes: 32 << 20,
        spill_directory: folder.join("spill"),
        spill_bytes: 0,
        spin: Duration::from_micros(20),
        max_clients: 100,
        processors: Vec::new(),
    };
    let cluster = ClusterOptions {
        store: socket,
        finding: Finding::Peers(peers),
        advertised: "127.0.0.1:1".to_owned(),
        moves: Move::Auto,
        patience,
        fetchers: 1,
        processors: Vec::new(),
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut manager = None;
    let store = Store::start(options, |handle| {
        let (started, calls) = Manager::start(cluster, dial, handle, listener).unwrap();
        manager = Some(started);
        calls
    })
    .unwrap();
    (store, manager.unwrap(), address)
}

#[test]
fn memory_the_store_gives_back_is_let_go_of_though_nobody_reads_the_figures() {
    let folder = tempfile::tempdir().unwrap();
    let (store, manager, _) = node(folder.path());
    let device: Arc<dyn Device> = SimWorld::new(1, SimOptions::default()).device(0);
    let context = manager.shared.context(&device).unwrap();
    let first = Client::connect(&folder.path().join("objects.sock")).unwrap();
    let object = ObjectId([1; 20]);
    first.put(object, &[1; 5 << 20], b"", SOON).unwrap();
    let number = first.get(object, SOON).unwrap().location().segment;
    let memory: Arc<dyn MemoryObject> = store.handle().segment(number).unwrap();
    drop(context.segment(number, &memory).unwrap());
    let held = Arc::downgrade(&memory);
    drop(memory);
    assert_eq!(context.registered(), 1);
    first.delete(object).unwrap();
    drop(first);
    let start = Instant::now();
    while held.strong_count() > 0 {
        assert!(start.elapsed() < SOON, "the memory of a segment that is gone is kept");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(context.registered(), 0);
    drop((manager, store));
}

fn pull(stream: &mut TcpStream, number: u32, id: ObjectId) -> Header {
    let words = [1 << 20, 0, 0, 0, 0, 0];
    stream.write_all(&Header::new(Kind::Pull, number, id, words).encode()).unwrap();
    let mut answer = [0; 80];
    stream.read_exact(&mut answer).unwrap();
    Header::decode(&answer).unwrap()
}

#[test]
fn a_connection_over_the_socket_brings_one_object_after_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let (store, manager, address) = node(folder.path());
    let client = Client::connect(&folder.path().join("objects.sock")).unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    for number in 1..=5_u8 {
        let (id, data) = (ObjectId([number; 20]), vec![number; 100_000 * usize::from(number)]);
        assert_eq!(pull(&mut stream, number.into(), id).kind, Kind::Gone);
        client.put(id, &data, b"about it", SOON).unwrap();
        assert_eq!(pull(&mut stream, number.into(), id).kind, Kind::Data);
        let mut came = vec![0; data.len() + 8];
        stream.read_exact(&mut came).unwrap();
        assert!(came[..data.len()] == data && came[data.len()..] == *b"about it");
        let fin = Header::new(Kind::Fin, number.into(), id, [1, 0, 0, 0, 0, 0]);
        stream.write_all(&fin.encode()).unwrap();
    }
    drop((manager, store));
}

#[test]
fn a_holder_that_takes_its_time_to_fail_is_tried_over_its_socket_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let slow = Slow::default();
    let peers = ["slow:1", "quick:1"].map(str::to_owned).to_vec();
    let (store, manager, _) = node_with(folder.path(), peers, Box::new(slow.clone()), PATIENCE);
    let client = Client::connect(&folder.path().join("objects.sock")).unwrap();
    let outcome = client.fetch(&[ObjectId([1; 20])], SOON).unwrap().remove(0);
    assert!(matches!(outcome, Err(ObjectsError::Unreachable { .. })), "{outcome:?}");
    // For a connection, of which the quick one may have two, and to learn where its socket is.
    assert_eq!(slow.0.map(|tried| tried.load(Ordering::Relaxed)), [2, 3]);
    drop((manager, store));
}

#[test]
fn a_manager_that_lost_its_connection_to_the_store_makes_another() {
    let folder = tempfile::tempdir().unwrap();
    let (store, manager, address) = node(folder.path());
    let client = Client::connect(&folder.path().join("objects.sock")).unwrap();
    let id = ObjectId([1; 20]);
    client.put(id, &[7; 1000], b"", SOON).unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    assert_eq!(pull(&mut stream, 1, ObjectId([2; 20])).kind, Kind::Gone);
    let lost = manager.shared.client().unwrap();
    lost.be_expelled();
    let start = Instant::now();
    while lost.is_connected() {
        assert!(start.elapsed() < SOON, "the store keeps a client that breaks the protocol");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Over the connection that is open, and over a new one.
    assert_eq!(pull(&mut stream, 2, id).kind, Kind::Data);
    let mut stream = TcpStream::connect(address).unwrap();
    assert_eq!(pull(&mut stream, 1, id).kind, Kind::Data);
    drop((manager, store));
}

#[test]
fn a_puller_that_was_given_up_cannot_end_its_transfer_with_bytes_of_another_object() {
    let folder = tempfile::tempdir().unwrap();
    let (store, manager, address) =
        node_with(folder.path(), Vec::new(), Box::new(Nobody), PATIENCE);
    let client = Client::connect(&folder.path().join("objects.sock")).unwrap();
    let (first, second) = (ObjectId([1; 20]), ObjectId([2; 20]));
    client.put(first, &[7; 200_000], b"", SOON).unwrap();
    let place = client.get(first, SOON).unwrap().location();
    let mut stream = TcpStream::connect(address).unwrap();
    assert_eq!(pull(&mut stream, 1, first).kind, Kind::Data);
    // Its patience over, the sender lets the object go; its memory is another's now.
    let start = Instant::now();
    while client.list().unwrap()[0].references > 0
        || manager.shared.figures.sockets.load(Ordering::Acquire) > 0
    {
        assert!(start.elapsed() < SOON, "a peer that says nothing is held an object for");
        std::thread::sleep(Duration::from_millis(5));
    }
    client.delete(first).unwrap();
    client.put(second, &[9; 200_000], b"", SOON).unwrap();
    let again = client.get(second, SOON).unwrap().location();
    assert_eq!((again.segment, again.offset), (place.segment, place.offset));
    let mut came = vec![0; 200_000];
    let read = stream.read_exact(&mut came);
    let fin = Header::new(Kind::Fin, 1, first, [1, 0, 0, 0, 0, 0]);
    let ended = read.and_then(|()| stream.write_all(&fin.encode()));
    let right = came.iter().all(|byte| *byte == 7);
    assert!(ended.is_err() || right, "a transfer ends with bytes of another object");
    drop((manager, store));
}

#[test]
fn an_object_whose_sender_gave_the_transfer_up_behind_its_bytes_is_not_sealed() {
    let folder = tempfile::tempdir().unwrap();
    let (store, manager, _) = node(folder.path());
    let client = Client::connect(&folder.path().join("objects.sock")).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let sender = std::thread::spawn(move || {
        // Until one comes that asks for nothing.
        loop {
            let mut stream = listener.accept().unwrap().0;
            let mut asked = [0; 80];
            if stream.read_exact(&mut asked).is_err() {
                return;
            }
            let asked = Header::decode(&asked).unwrap();
            let words = [1000, 0, Header::checksum_word(None), 0, 0, 0];
            let data = Header::new(Kind::Data, asked.number, asked.id, words);
            let mut message = data.encode().to_vec();
            message.extend([7; 1000]);
            stream.write_all(&message).unwrap();
            // The puller finds its connection reset behind bytes that are all there.
            sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        }
    });
    let (mut given_up, mut round, start) = (0, 0_u32, Instant::now());
    // Which of the two is quicker is the system's to say.
    while round < 50 || given_up == 0 {
        assert!(start.elapsed() < SOON, "no puller in {round} rounds saw that its sender had gone");
        let mut id = ObjectId([0; 20]);
        id.0[..4].copy_from_slice(&round.to_le_bytes());
        round += 1;
        let mut wire = Wire::dial(&address, SOON, SOON).unwrap();
        let pulled = wire.pull(&client, id, 1 << 20, SOON);
        // A puller that was quick may have had all of it before the reset.
        assert_eq!(client.contains(id).unwrap(), pulled.is_ok(), "{pulled:?}");
        given_up += u32::from(pulled.is_err());
    }
    drop(TcpStream::connect(&address).unwrap());
    sender.join().unwrap();
    drop((manager, store));
}
