//! Direct stores in this process, and their clients.
#![allow(dead_code, unused_imports, reason = "each suite uses a part")]

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use beeline_direct::{Connector, DirectHandle, DirectOptions, DirectService, FabricClient};
use beeline_fabric::Device;
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_kv_direct::{Connect, DirectClient, Link, LinkError, LinkOptions};

pub type Open = fn() -> Arc<dyn Device>;

pub fn shm() -> Arc<dyn Device> {
    ShmDevice::open(ShmConfig::default()).unwrap()
}

pub fn tcp() -> Arc<dyn Device> {
    TcpDevice::open(TcpConfig::default()).unwrap()
}

pub const DEVICES: [Open; 2] = [shm, tcp];

/// A service with its device: what the bootstrap exchange would lead to.
#[derive(Clone)]
pub struct Target {
    pub handle: DirectHandle,
    pub device: Arc<dyn Device>,
}

/// Where the servers are, by their names, which are their numbers. `None`: that server is gone.
pub type Targets = Arc<Mutex<Vec<Option<Target>>>>;

/// Connects to the targets by their names.
pub struct Direct {
    pub targets: Targets,
    pub open: Open,
    pub options: LinkOptions,
}

impl Connect for Direct {
    fn connect(&mut self, server: &str, processor: u32) -> Result<(Link, u32), LinkError> {
        let target = self.targets.lock().unwrap()[server.parse::<usize>().unwrap()].clone();
        let target = target.ok_or_else(|| LinkError::Unreachable("it has ended".into()))?;
        let mut exchange = |peer: &beeline_fabric::ConnectInfo, hello: &[u8]| {
            let (sender, receiver) = mpsc::channel();
            target.handle.accept(FabricClient {
                processor,
                device: Arc::clone(&target.device),
                peer: peer.clone(),
                payload: hello.to_vec(),
                reply: Box::new(move |outcome| sender.send(outcome).unwrap()),
            });
            let welcome = receiver.recv()??;
            Ok((welcome.info.unwrap_or(beeline_fabric::ConnectInfo(vec![])), welcome.payload))
        };
        let device = (self.open)();
        let link = Link::connect(&device, &mut exchange, self.options)?;
        Ok((link, target.handle.processors()))
    }
}

pub struct World {
    pub services: Vec<Option<DirectService>>,
    pub targets: Targets,
    pub open: Open,
    processors: u32,
    memory_bytes: u64,
}

impl World {
    pub fn new(open: Open, servers: usize, processors: u32) -> Self {
        Self::with_memory(open, servers, processors, 32 << 20)
    }

    pub fn with_memory(open: Open, servers: usize, processors: u32, memory_bytes: u64) -> Self {
        let targets = Targets::default();
        let mut world = Self { services: Vec::new(), targets, open, processors, memory_bytes };
        (0..servers).for_each(|_| drop(world.start()));
        world
    }

    /// One more server, empty; its name.
    pub fn start(&mut self) -> String {
        self.start_with(self.memory_bytes)
    }

    /// One more server, whose processors have this memory; its name.
    pub fn start_with(&mut self, memory_bytes: u64) -> String {
        let (targets, open) = (Arc::clone(&self.targets), self.open);
        let options = LinkOptions { timeout: Duration::from_secs(2), ..LinkOptions::default() };
        let make = move || {
            let targets = Arc::clone(&targets);
            Box::new(Direct { targets, open, options }) as Box<dyn Connect>
        };
        let options = DirectOptions {
            memory_bytes: u64::from(self.processors) * memory_bytes,
            processors: self.processors,
            connector: Some(Connector(Arc::new(make))),
            ..DirectOptions::default()
        };
        let service = DirectService::start(&options).unwrap();
        let target = Target { handle: service.handle(), device: open() };
        let mut targets = self.targets.lock().unwrap();
        targets.push(Some(target));
        self.services.push(Some(service));
        (targets.len() - 1).to_string()
    }

    /// The server ends, as a process does.
    pub fn end(&mut self, server: usize) {
        self.targets.lock().unwrap()[server] = None;
        self.services[server] = None;
    }

    pub fn handle(&self, server: usize) -> DirectHandle {
        self.target(server).handle
    }

    pub fn target(&self, server: usize) -> Target {
        self.targets.lock().unwrap()[server].clone().unwrap()
    }

    pub fn connect(&self, options: LinkOptions) -> Direct {
        Direct { targets: Arc::clone(&self.targets), open: self.open, options }
    }

    pub fn names(&self) -> Vec<String> {
        (0..self.services.len()).map(|server| server.to_string()).collect()
    }

    pub fn client(&self) -> DirectClient {
        self.client_of(&self.names())
    }

    pub fn client_of(&self, names: &[String]) -> DirectClient {
        let connect = self.connect(LinkOptions::default());
        DirectClient::connect(names.iter().cloned(), Box::new(connect)).unwrap()
    }
}
