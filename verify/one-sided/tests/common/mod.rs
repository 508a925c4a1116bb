//! A store, its servers and their clients on one thread, over any provider: tests decide who runs
//! when.
#![allow(
    dead_code,
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking; each uses a part of the shared harness"
)]

pub mod apart;
pub mod raw;
pub mod threaded;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_fabric::{ConnectInfo, Device};
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_fabric_sim::{SimOptions, SimWorld};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_fabric_verbs::{VerbsConfig, VerbsDevice};
use beeline_kv::wire::{Protocol, Welcome};
use beeline_kv::{Shard, Store, StoreOptions};
use beeline_kv_client::{
    Answer, Client, ClientError, ClientOptions, Command, ConnectError, Connector, PutOptions, Token,
};
use beeline_kv_server::{ServerOptions, ShardServer};
use beeline_pmem::{Pool, PoolOptions};

use self::apart::Apart;

/// Nothing in these tests takes longer on a loaded machine.
pub const BOUND: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    Sim,
    Shm,
    Tcp,
    /// As `Tcp`, with a server whose device cannot reach the store's segments.
    Apart,
    Verbs,
}

impl Provider {
    /// Those of this machine: RDMA only where there is a device, or has to be one.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::Sim, Self::Shm, Self::Tcp, Self::Apart];
        let found = VerbsDevice::open(VerbsConfig::default());
        let needed = std::env::var_os("BEELINE_NEEDS_RDMA").is_some();
        assert!(found.is_ok() || !needed, "an RDMA device is needed: {found:?}");
        if found.is_ok() {
            all.push(Self::Verbs);
        }
        all
    }

    /// Protocols it carries: two-phase clients read segments, so that these have to be in reach.
    pub fn protocols(self) -> Vec<Protocol> {
        let fits = |protocol: &Protocol| self != Self::Apart || *protocol != Protocol::TwoPhase;
        Protocol::ALL.into_iter().filter(fits).collect()
    }
}

pub struct Node {
    pub shard: Arc<Mutex<Shard>>,
    pub server: ShardServer,
}

impl Node {
    /// One turn of a shard's loop.
    pub fn step(&mut self) -> usize {
        let mut shard = self.shard.lock().unwrap();
        let handled = self.server.poll(&mut shard).unwrap();
        shard.commit().unwrap();
        self.server.complete();
        handled
    }

    pub fn maintain(&mut self) {
        let mut shard = self.shard.lock().unwrap();
        shard.maintain(1 << 20).unwrap();
        self.server.maintain(&mut shard);
    }
}

pub type Nodes = Rc<RefCell<Vec<Node>>>;

#[derive(Clone)]
pub struct Rig {
    pub provider: Provider,
    pub world: Option<SimWorld>,
    pub store: Arc<Store>,
    pub nodes: Nodes,
    next_node: Rc<RefCell<u32>>,
}

#[derive(Clone)]
pub struct RigOptions {
    pub shards: usize,
    pub segment_bytes: u32,
    pub capacity_bytes: u64,
    pub server: ServerOptions,
    pub sim: SimOptions,
}

impl Default for RigOptions {
    fn default() -> Self {
        Self {
            shards: 1,
            segment_bytes: 256 << 10,
            capacity_bytes: 64 << 20,
            server: ServerOptions { baselines: true, ..ServerOptions::default() },
            sim: SimOptions::default(),
        }
    }
}

impl Rig {
    pub fn new(provider: Provider, options: &RigOptions) -> Self {
        let world = (provider == Provider::Sim).then(|| SimWorld::new(7, options.sim.clone()));
        let pool = PoolOptions::volatile(options.segment_bytes, options.capacity_bytes);
        let pool = Pool::dram(&pool).unwrap();
        let mut store_options = StoreOptions { shards: options.shards, ..StoreOptions::default() };
        if let Some(world) = &world {
            store_options.clock = world.clock();
        }
        let (store, shards, _) = Store::open(pool, store_options).unwrap();
        let device = match provider {
            Provider::Apart => Apart::over(device(provider, None, 0)),
            _ => device(provider, world.as_ref(), 0),
        };
        let nodes = shards
            .into_iter()
            .enumerate()
            .map(|(index, shard)| Node {
                shard,
                server: ShardServer::new(
                    Arc::clone(&device),
                    &store,
                    index as u16,
                    options.server.clone(),
                )
                .unwrap(),
            })
            .collect();
        Self {
            provider,
            world,
            store,
            nodes: Rc::new(RefCell::new(nodes)),
            next_node: Rc::new(RefCell::new(1)),
        }
    }

    /// A device for one more client.
    pub fn device(&self) -> Arc<dyn Device> {
        let mut next = self.next_node.borrow_mut();
        *next += 1;
        device(self.provider, self.world.as_ref(), *next)
    }

    /// The node of the device made last.
    pub fn last_node(&self) -> u32 {
        *self.next_node.borrow()
    }

    pub fn connector(&self) -> Box<dyn Connector> {
        Box::new(Inline { rig: self.clone(), device: None })
    }

    pub fn client_options(&self) -> ClientOptions {
        let mut options =
            ClientOptions { timeout: Duration::from_secs(10), ..ClientOptions::default() };
        if let Some(world) = &self.world {
            options.clock = world.clock();
        }
        options
    }

    pub fn client(&self) -> Client {
        self.client_with(|_| {})
    }

    pub fn client_with(&self, change: impl FnOnce(&mut ClientOptions)) -> Client {
        let mut options = self.client_options();
        change(&mut options);
        Client::connect(self.connector(), options).unwrap()
    }

    pub fn speaking(&self, protocol: Protocol) -> Client {
        self.client_with(|options| options.protocol = protocol)
    }

    /// Lets every server take a turn, and time pass.
    pub fn step(&self) -> usize {
        let handled = self.nodes.borrow_mut().iter_mut().map(Node::step).sum();
        match &self.world {
            Some(world) => {
                let _ = world.step();
            }
            None if handled == 0 => std::thread::yield_now(),
            None => {}
        }
        handled
    }

    /// Runs until `done`, or fails after the bound.
    pub fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            self.step();
            assert!(start.elapsed() < BOUND, "{what} did not happen in time");
        }
    }

    /// Runs servers and client until everything submitted is delivered.
    pub fn drain(&self, client: &mut Client) -> HashMap<Token, Outcome> {
        let mut outcomes = HashMap::new();
        let start = Instant::now();
        while client.outstanding() > 0 {
            client
                .poll(&mut |token, answer| {
                    outcomes.insert(token, Outcome::of(answer));
                })
                .unwrap();
            self.step();
            assert!(start.elapsed() < BOUND, "answers did not come in time");
        }
        outcomes
    }

    /// Runs one command to its end.
    pub fn run(&self, client: &mut Client, command: Command<'_>) -> Outcome {
        let token = client.submit(command).unwrap();
        self.drain(client).remove(&token).unwrap()
    }

    pub fn put(&self, client: &mut Client, key: &[u8], value: &[u8]) -> u64 {
        let options = PutOptions::default();
        match self.run(client, Command::Put { database: 0, key, value, options }) {
            Outcome::Stored(version) => version,
            other => panic!("a put ended in {other:?}"),
        }
    }

    pub fn get(&self, client: &mut Client, key: &[u8]) -> Option<Vec<u8>> {
        match self.run(client, Command::Get { database: 0, key }) {
            Outcome::Value(value) => Some(value),
            Outcome::Missing => None,
            other => panic!("a get ended in {other:?}"),
        }
    }

    pub fn server_counters(&self) -> beeline_kv_server::ServerCounters {
        let mut sum = beeline_kv_server::ServerCounters::default();
        for node in self.nodes.borrow().iter() {
            sum.add(&node.server.counters());
        }
        sum
    }
}

fn device(provider: Provider, world: Option<&SimWorld>, node: u32) -> Arc<dyn Device> {
    match (provider, world) {
        (Provider::Sim, Some(world)) => world.device(node),
        (Provider::Verbs, _) => VerbsDevice::open(VerbsConfig::default()).unwrap(),
        (Provider::Shm, _) => ShmDevice::open(ShmConfig::default()).unwrap(),
        _ => TcpDevice::open(TcpConfig::default()).unwrap(),
    }
}

#[derive(Debug)]
pub enum Outcome {
    Stored(u64),
    Value(Vec<u8>),
    Missing,
    Keys { next: u64, records: Vec<u8> },
    Text(String),
    Pong,
    Failed(ClientError),
}

impl Outcome {
    pub fn of(answer: Result<Answer<'_>, ClientError>) -> Self {
        match answer {
            Ok(Answer::Stored { version }) => Self::Stored(version),
            Ok(Answer::Value { bytes, .. }) => Self::Value(bytes.to_vec()),
            Ok(Answer::Missing) => Self::Missing,
            Ok(Answer::Keys { next, records, .. }) => {
                Self::Keys { next, records: records.to_vec() }
            }
            Ok(Answer::Text(text)) => Self::Text(String::from_utf8_lossy(text).into_owned()),
            Ok(Answer::Pong) => Self::Pong,
            Ok(other) => panic!("an answer these tests do not know: {other:?}"),
            Err(error) => Self::Failed(error),
        }
    }
}

/// Reaches the servers on the same thread.
struct Inline {
    rig: Rig,
    device: Option<Arc<dyn Device>>,
}

impl std::fmt::Debug for Inline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Inline")
    }
}

impl Connector for Inline {
    fn device(&mut self) -> Result<Arc<dyn Device>, ConnectError> {
        let device = self.device.get_or_insert_with(|| self.rig.device());
        Ok(Arc::clone(device))
    }

    fn exchange(
        &mut self,
        shard: u16,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), ConnectError> {
        let mut nodes = self.rig.nodes.borrow_mut();
        let admission = nodes[usize::from(shard)].server.accept(&self.rig.store, info, hello);
        let info = admission.info.unwrap_or(ConnectInfo(Vec::new()));
        Ok((info, admission.welcome.to_vec()))
    }
}

/// What the server of `shard` answers to a hello; for clients made by hand.
pub fn hello(
    rig: &Rig,
    info: &ConnectInfo,
    hello: &[u8],
) -> (Option<ConnectInfo>, Result<Welcome, beeline_kv::wire::Refusal>) {
    let mut nodes = rig.nodes.borrow_mut();
    let admission = nodes[0].server.accept(&rig.store, info, hello);
    (admission.info, Welcome::decode(&admission.welcome))
}
