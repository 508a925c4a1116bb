//! What a manager keeps while its figures are not scraped.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::Device;
use beeline_fabric_sim::{SimOptions, SimWorld};
use beeline_os::MemoryObject;

use super::{Agreed, ClusterOptions, Dial, Finding, Manager, Move};
use crate::client::Client;
use crate::id::ObjectId;
use crate::store::{Store, StoreOptions};

const SOON: Duration = Duration::from_secs(20);

/// Reaches no node.
struct Nobody;

impl Dial for Nobody {
    fn dial(&self, _address: &str, _avoid: bool) -> Result<Box<dyn Agreed>, String> {
        Err("nobody is there".to_owned())
    }
}

#[test]
fn memory_the_store_gives_back_is_let_go_of_though_nobody_reads_the_figures() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("objects.sock");
    let options = StoreOptions {
        socket: socket.clone(),
        socket_mode: 0o600,
        memory_bytes: 32 << 20,
        spill_directory: folder.path().join("spill"),
        spill_bytes: 0,
        spin: Duration::from_micros(20),
        max_clients: 100,
        processors: Vec::new(),
    };
    let cluster = ClusterOptions {
        store: socket.clone(),
        finding: Finding::Peers(Vec::new()),
        advertised: "127.0.0.1:1".to_owned(),
        moves: Move::Auto,
        patience: Duration::from_secs(1),
        fetchers: 1,
        processors: Vec::new(),
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut manager = None;
    let store = Store::start(options, |handle| {
        let (started, calls) = Manager::start(cluster, Box::new(Nobody), handle, listener).unwrap();
        manager = Some(started);
        calls
    })
    .unwrap();
    let manager = manager.unwrap();
    let device: Arc<dyn Device> = SimWorld::new(1, SimOptions::default()).device(0);
    let context = manager.shared.context(&device).unwrap();
    let first = Client::connect(&socket).unwrap();
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
