//! From the `[objects]` table to the running object store.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use beeline_fabric::{ConnectInfo, Device};
use beeline_fabric_open::{Dialled, Dialler, Incoming};
use beeline_objects::cluster::{
    Agreed, ClusterOptions, Dial, Door, Finding, Move, SERVICE, payload,
};
use beeline_objects::{NAME, ObjectService, StoreOptions};
use beeline_service::{OpenFailure, Opening, Service};

use crate::config::ServeConfig;
use crate::config::values::{Auto, MoveWord, Size};
use crate::exit::Failure;

/// Bound of each exchange with another node.
const DIAL: Duration = Duration::from_secs(5);
/// Silence of a peer after which a transfer is given up.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest path of a Unix socket.
const LONGEST_SOCKET: usize = 107;

/// Where the store of a node with this configuration listens.
pub fn socket(config: &ServeConfig) -> PathBuf {
    match &config.objects.socket {
        Auto::Set(path) => path.clone(),
        Auto::Detect => config.data.join("objects.sock"),
    }
}

/// The way other nodes reach this store: opened with the fabric door, before the store.
#[derive(Debug)]
pub struct Link {
    door: Arc<OnceLock<Door>>,
    listener: TcpListener,
    port: u16,
}

impl Link {
    /// Binds the socket for transfers without fabric; nothing where the store is left out or the
    /// node has no fabric door.
    pub fn prepare(config: &ServeConfig) -> Result<Option<Self>, Failure> {
        let Some(fabric) = config.fabric_address.0.filter(|_| !config.without.has(NAME)) else {
            return Ok(None);
        };
        let port = u16::try_from(config.objects.transfer_port.0).unwrap_or(0);
        let listener = super::listen((fabric.ip(), port).into(), "--objects-transfer-port")
            .map_err(|failure| {
                let Failure { exit, error } = failure;
                Failure::new(exit, OpenFailure { service: NAME, source: error.into() })
            })?;
        let port = listener.local_addr()?.port();
        Ok(Some(Self { door: Arc::default(), listener, port }))
    }

    /// What the fabric door offers.
    pub fn service(&self) -> beeline_fabric_open::Service {
        let door = Arc::clone(&self.door);
        beeline_fabric_open::Service {
            name: SERVICE.to_owned(),
            shards: 1,
            payload: payload(self.port),
            incoming: Box::new(move |incoming| greet(&door, incoming)),
        }
    }
}

/// Leads a peer to the store.
fn greet(door: &OnceLock<Door>, incoming: Incoming) {
    let Some(door) = door.get() else {
        incoming.reply.refuse("the node is still opening its object store; try again");
        return;
    };
    let Incoming { device, peer, reply, .. } = incoming;
    let answer = move |outcome: Result<ConnectInfo, String>| match outcome {
        Ok(info) => reply.accept(&info, Vec::new()),
        Err(reason) => reply.refuse(reason),
    };
    door.accept(device, peer, Box::new(answer));
}

/// Reaches other nodes through their fabric doors.
struct Dialling {
    /// One dialler an address, locked by itself: a node that does not answer holds up no other.
    known: Mutex<HashMap<String, Arc<Mutex<ToNode>>>>,
}

/// A dialler, which keeps its devices, and the provider it chose last.
struct ToNode {
    dialler: Dialler,
    last: String,
}

struct Chosen(Dialled);

impl Agreed for Chosen {
    fn device(&self) -> Arc<dyn Device> {
        Arc::clone(&self.0.device)
    }

    fn payload(&self) -> &[u8] {
        &self.0.payload
    }

    fn exchange(&self, info: &ConnectInfo) -> Result<ConnectInfo, String> {
        let (info, _) = self.0.exchange(0, info, &[]).map_err(|error| error.to_string())?;
        Ok(info)
    }
}

impl Dial for Dialling {
    fn dial(&self, address: &str, avoid: bool) -> Result<Box<dyn Agreed>, String> {
        let node = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            match known.get(address) {
                Some(node) => Arc::clone(node),
                None => {
                    let url = match address.contains("://") {
                        true => address.to_owned(),
                        false => format!("auto://{address}"),
                    };
                    let dialler =
                        Dialler::new(SERVICE, &url, DIAL).map_err(|error| error.to_string())?;
                    let node = Arc::new(Mutex::new(ToNode { dialler, last: String::new() }));
                    known.insert(address.to_owned(), Arc::clone(&node));
                    node
                }
            }
        };
        let mut node = node.lock().unwrap_or_else(PoisonError::into_inner);
        if avoid {
            let last = std::mem::take(&mut node.last);
            node.dialler.avoid(&last, "the last connection over it failed");
        } else {
            node.dialler.forgive();
        }
        let dialled = node.dialler.dial().map_err(|error| error.to_string())?;
        node.last.clone_from(&dialled.provider);
        Ok(Box::new(Chosen(dialled)))
    }
}

/// The service; `fabric`: where the fabric door listens.
pub fn opening(config: &ServeConfig, fabric: Option<SocketAddr>, link: Option<Link>) -> Opening {
    let mut options = options(config);
    let mut cluster = fabric.map(|fabric| cluster(config, fabric, &options));
    let numa = config.objects.numa;
    let open = move || {
        if let Some(node) = super::numa::choose(numa)? {
            if let Some(cluster) = &mut cluster {
                cluster.processors.clone_from(&node.processors);
            }
            options.processors = node.processors;
        }
        let length = options.socket.as_os_str().len();
        if length > LONGEST_SOCKET {
            let path = options.socket.display();
            return Err(format!(
                "the socket's path {path} has {length} bytes, of which the kernel takes \
                 {LONGEST_SOCKET}; choose a shorter one with --objects-socket"
            )
            .into());
        }
        if let Some(folder) = options.socket.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let (Some(cluster), Some(link)) = (cluster, link) else {
            return Ok(Box::new(ObjectService::open_alone(options)?) as Box<dyn Service>);
        };
        let dial = Box::new(Dialling { known: Mutex::default() });
        let (service, door) = ObjectService::open(options, cluster, dial, link.listener)?;
        let set = link.door.set(door);
        assert!(set.is_ok(), "a door leads to one store");
        Ok(Box::new(service) as Box<dyn Service>)
    };
    Opening { name: NAME, after: &[], open: Box::new(open) }
}

fn cluster(config: &ServeConfig, fabric: SocketAddr, store: &StoreOptions) -> ClusterOptions {
    let objects = &config.objects;
    let finding = match objects.directory.0.as_str() {
        "" => Finding::Peers(objects.peers.0.clone()),
        address => Finding::Directory {
            address: address.to_owned(),
            password: objects.directory_password.0.clone(),
        },
    };
    let advertised = match objects.advertise.0.as_str() {
        "" => fabric.to_string(),
        address => address.to_owned(),
    };
    ClusterOptions {
        store: store.socket.clone(),
        finding,
        advertised,
        moves: match objects.protocol {
            MoveWord::Auto => Move::Auto,
            MoveWord::TwoSided => Move::Sent,
            MoveWord::OneSided => Move::Read,
            MoveWord::Socket => Move::Socket { piece_bytes: 1 << 20 },
            MoveWord::Socket4k => Move::Socket { piece_bytes: 4096 },
        },
        patience: PATIENCE,
        fetchers: objects.fetchers.0 as usize,
        processors: Vec::new(),
    }
}

fn options(config: &ServeConfig) -> StoreOptions {
    let objects = &config.objects;
    let memory_bytes = match objects.memory {
        Auto::Set(Size(bytes)) => bytes,
        Auto::Detect => super::plan::memory_bytes() / 4,
    };
    let spill_bytes = match objects.disk {
        Auto::Set(Size(bytes)) => bytes,
        Auto::Detect => {
            let place = crate::doctor::existing(&config.data);
            let free = crate::doctor::free_bytes(&place).unwrap_or(0);
            (free / 2).min(memory_bytes.saturating_mul(4))
        }
    };
    StoreOptions {
        socket: socket(config),
        socket_mode: objects.socket_mode.0,
        memory_bytes,
        spill_directory: config.data.join("objects-spilled"),
        spill_bytes,
        spin: Duration::from_micros(objects.spin_us.0.into()),
        max_clients: objects.max_clients.0 as usize,
        processors: Vec::new(),
    }
}
