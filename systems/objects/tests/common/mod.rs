//! A store of its own for each test.

use std::path::PathBuf;
use std::time::Duration;

use beeline_objects::{Alone, Client, ObjectId, Store, StoreOptions};

pub const SOON: Duration = Duration::from_secs(20);
pub const NOW: Duration = Duration::ZERO;

pub struct Home {
    pub folder: tempfile::TempDir,
    pub store: Option<Store>,
}

impl Home {
    pub fn new(memory_bytes: u64, spill_bytes: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut home = Self { folder, store: None };
        home.start(memory_bytes, spill_bytes);
        home
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("objects.sock")
    }

    pub fn start(&mut self, memory_bytes: u64, spill_bytes: u64) {
        let options = StoreOptions {
            socket: self.socket(),
            socket_mode: 0o600,
            memory_bytes,
            spill_directory: self.folder.path().join("spill"),
            spill_bytes,
            spin: Duration::from_micros(20),
            max_clients: 1000,
            processors: Vec::new(),
        };
        self.store = Some(Store::start(options, |handle| Box::new(Alone(handle))).unwrap());
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.socket()).unwrap()
    }

    /// A figure, once it is `wanted`.
    pub fn await_figure(
        &self,
        name: &str,
        read: impl Fn(&beeline_objects::ObjectMetrics) -> u64,
        wanted: u64,
    ) {
        let handle = self.store.as_ref().unwrap().handle();
        let metrics = handle.metrics();
        let start = std::time::Instant::now();
        loop {
            handle.publish();
            let value = read(&metrics);
            if value == wanted {
                return;
            }
            assert!(start.elapsed() < SOON, "{name} is {value}, not {wanted}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

pub fn id(number: u32) -> ObjectId {
    let mut bytes = [0; 20];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    ObjectId(bytes)
}

pub fn bytes(seed: u32, length: usize) -> Vec<u8> {
    let mut state = u64::from(seed) * 2 + 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}
