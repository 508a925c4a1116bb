//! Nodes of this process that reach each other without a bootstrap exchange.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_fabric::{ConnectInfo, Device};
use beeline_fabric_open::open;
use beeline_objects::cluster::{
    Agreed, ClusterOptions, Dial, Door, Finding, Manager, Move, payload,
};
use beeline_objects::{Client, ObjectId, Store};

use super::local::options;

/// Patience with one call.
pub const WAIT: Duration = Duration::from_secs(60);

/// What a node is reached by: its door, its device and its socket's port.
type Far = (Door, Arc<dyn Device>, u16);

/// The nodes of a measurement, by address.
#[derive(Clone, Default)]
pub struct Rack(Arc<Mutex<HashMap<String, Far>>>);

struct Direct {
    device: Arc<dyn Device>,
    rack: Rack,
}

struct Link {
    device: Arc<dyn Device>,
    door: Door,
    far: Arc<dyn Device>,
    payload: Vec<u8>,
}

impl Dial for Direct {
    fn dial(&self, address: &str, _avoid: bool) -> Result<Box<dyn Agreed>, String> {
        let nodes = self.rack.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (door, far, port) = nodes.get(address).ok_or("no node has this address")?;
        let (door, far) = (door.clone(), Arc::clone(far));
        Ok(Box::new(Link { device: Arc::clone(&self.device), door, far, payload: payload(*port) }))
    }
}

impl Agreed for Link {
    fn device(&self) -> Arc<dyn Device> {
        Arc::clone(&self.device)
    }

    fn payload(&self) -> &[u8] {
        &self.payload
    }

    fn exchange(&self, info: &ConnectInfo) -> Result<ConnectInfo, String> {
        let (answer, answered) = mpsc::channel();
        let answer = move |outcome| drop(answer.send(outcome));
        self.door.accept(Arc::clone(&self.far), info.clone(), Box::new(answer));
        answered.recv_timeout(WAIT).map_err(|error| error.to_string())?
    }
}

/// One node.
pub struct Node {
    pub client: Client,
    pub manager: Manager,
    pub address: SocketAddr,
    _store: Store,
}

/// Where a provider opens devices.
pub fn url(provider: &str) -> String {
    match provider {
        "tcp" => "tcp://127.0.0.1".to_owned(),
        other => format!("{other}://"),
    }
}

impl Node {
    /// Starts a node over `provider` and lists it in the rack. Its address is a name there, and its
    /// socket's.
    pub fn start(
        rack: &Rack,
        provider: &str,
        folder: &Path,
        memory: u64,
        moves: Move,
    ) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let store = options(folder, memory);
        let socket = store.socket.clone();
        let cluster = ClusterOptions {
            store: socket.clone(),
            finding: Finding::Peers(Vec::new()),
            advertised: address.to_string(),
            moves,
            patience: WAIT,
            fetchers: 1,
            processors: Vec::new(),
        };
        let device = open(&url(provider))?;
        let dial = Direct { device: Arc::clone(&device), rack: rack.clone() };
        let mut manager = None;
        let store = Store::start(store, |handle| {
            match Manager::start(cluster, Box::new(dial), handle.clone(), listener) {
                Ok((started, calls)) => {
                    manager = Some(Ok(started));
                    calls
                }
                Err(error) => {
                    manager = Some(Err(error));
                    Box::new(beeline_objects::Alone(handle))
                }
            }
        })?;
        let manager = manager.context("the store starts its manager")??;
        let far = (manager.door(), device, address.port());
        let mut nodes = rack.0.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.insert(address.to_string(), far);
        drop(nodes);
        let client = Client::connect(&socket)?;
        Ok(Self { client, manager, address, _store: store })
    }

    /// Fetches the object from the node at `from`, and forgets it again.
    pub fn fetch(&self, id: ObjectId, from: SocketAddr) -> anyhow::Result<Duration> {
        let start = Instant::now();
        for outcome in self.client.fetch_from(&[id], from, WAIT)? {
            outcome?;
        }
        let took = start.elapsed();
        self.client.delete(id)?;
        Ok(took)
    }

    /// Stores an object of `size` bytes.
    pub fn put(&self, size: u64) -> anyhow::Result<ObjectId> {
        let id = ObjectId::random().context("drawing an identifier")?;
        self.client.put(id, &vec![5; usize::try_from(size)?], b"", WAIT)?;
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fetches of one object by a node that chooses, from a node that says its socket is at `port`.
    fn fetches(port: Option<u16>) -> (u64, u64) {
        let folder = tempfile::tempdir().unwrap();
        let rack = Rack::default();
        let start = |name: &str| {
            Node::start(&rack, "shm", &folder.path().join(name), 64 << 20, Move::Auto).unwrap()
        };
        let (far, near) = (start("far"), start("near"));
        if let Some(port) = port {
            let mut nodes = rack.0.lock().unwrap();
            nodes.get_mut(&far.address.to_string()).unwrap().2 = port;
        }
        let id = far.put(100_000).unwrap();
        for _ in 0..40 {
            near.fetch(id, far.address).unwrap();
        }
        // The last one is counted once its client was told.
        let begun = Instant::now();
        loop {
            near.manager.publish();
            let metrics = near.manager.metrics();
            let fetched = metrics.objects_fetched_objects.value();
            if fetched >= 40 || begun.elapsed() > WAIT {
                return (fetched, metrics.objects_socket_fetches.value());
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_socket_is_tried_and_one_that_is_closed_is_done_without() {
        let (fetched, over_socket) = fetches(None);
        assert!(fetched == 40 && over_socket >= 5, "{over_socket} of {fetched} over the socket");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let closed = listener.local_addr().unwrap().port();
        drop(listener);
        assert_eq!(fetches(Some(closed)), (40, 0));
    }

    #[test]
    fn a_node_fetches_by_the_protocol_it_was_told_last() {
        let folder = tempfile::tempdir().unwrap();
        let rack = Rack::default();
        let start = |name: &str| {
            Node::start(&rack, "shm", &folder.path().join(name), 64 << 20, Move::Auto).unwrap()
        };
        let (far, near) = (start("far"), start("near"));
        let id = far.put(100_000).unwrap();
        for (told, moves) in
            [Move::Sent, Move::Read, Move::Socket { piece_bytes: 4096 }].into_iter().enumerate()
        {
            near.manager.move_by(moves);
            for _ in 0..3 {
                near.fetch(id, far.address).unwrap();
            }
            // The last one is counted once its client was told.
            let begun = Instant::now();
            let expected = [0, 1, 2].map(|way| if way <= told { 3 } else { 0 });
            let figures = || {
                near.manager.publish();
                let metrics = near.manager.metrics();
                [
                    metrics.objects_sent_fetches.value(),
                    metrics.objects_read_fetches.value(),
                    metrics.objects_socket_fetches.value(),
                ]
            };
            while figures() != expected && begun.elapsed() < WAIT {
                std::thread::yield_now();
            }
            assert_eq!(figures(), expected, "sent, read, over a socket");
        }
    }
}
