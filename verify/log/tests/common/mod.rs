//! Members on threads of their own, found through a transport inside the process.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_fabric::Device;
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_replicated_log::{
    Boot, ClusterId, Config, Consistency, Contact, Durability, Founding, Handle, Home, HomeError,
    InProcess, Layout, NO_SESSION, NodeId, Options, Position, Refusal, RoleName, Server,
    SnapshotWriter, StateMachine, Transport,
};
use beeline_verify_log::lists::{Lists, items};
use beeline_verify_log::machine;

pub const CLUSTER: ClusterId = ClusterId(0xabc);
pub const LIMIT: Duration = Duration::from_secs(20);

/// Items from here on are answered at length.
pub const LONG_ANSWER: u32 = 1 << 20;

/// Lists whose restoring takes as long as the test wants.
#[derive(Default)]
pub struct Held {
    pub lists: Lists,
    /// What they say to have when they are opened, as a machine that is durable by itself does.
    pub has: Position,
    /// And up to where they say to have a part.
    pub reached: Position,
    /// How often a log was founded upon them.
    pub founded: Arc<AtomicU64>,
    pub gate: Option<Arc<Gate>>,
    /// A thread that writes a snapshot panics while it is set.
    pub panics: Arc<AtomicBool>,
    /// They say to last by themselves.
    pub durable: bool,
    /// How long restoring takes.
    pub slow: Duration,
    /// And it fails.
    pub fails: bool,
    /// Snapshots fail while it is set, as on a full disk.
    pub broken: Arc<AtomicBool>,
    /// It says to have no room.
    pub short: Arc<AtomicBool>,
    /// It has no room for the state of a snapshot while it is set.
    pub narrow: Arc<AtomicBool>,
    /// It has room for so many commands more; `None`: for any number.
    pub room: Option<Arc<AtomicU64>>,
}

#[derive(Debug, Default)]
pub struct Gate {
    pub reached: AtomicBool,
    pub open: AtomicBool,
}

impl Held {
    fn has_none(&self) -> bool {
        self.room.as_ref().is_some_and(|room| room.load(Ordering::SeqCst) == 0)
    }
}

impl StateMachine for Held {
    fn apply(&mut self, position: Position, command: &[u8], reply: &mut Vec<u8>) {
        assert!(reply.is_empty(), "a machine is given an empty buffer for each reply");
        if let Some(room) = &self.room {
            let left = room.load(Ordering::SeqCst);
            assert!(left > 0, "a command was applied without room for it");
            room.store(left - 1, Ordering::SeqCst);
        }
        self.lists.apply(position, command, reply);
        let item = command.get(1..5).and_then(|item| item.first_chunk());
        if item.is_some_and(|item| u32::from_le_bytes(*item) >= LONG_ANSWER) {
            reply.extend_from_slice(&[7; 300_000]);
        }
    }

    fn stamp(&mut self, command: &mut [u8]) -> Result<(), String> {
        if command.len() < 5 { Err("an append is longer".to_owned()) } else { Ok(()) }
    }

    fn applied(&self) -> Position {
        self.has
    }

    fn reached(&self) -> Position {
        self.has.max(self.reached)
    }

    fn founded_upon(&mut self) -> io::Result<()> {
        self.founded.fetch_add(1, Ordering::SeqCst);
        self.reached = self.has;
        Ok(())
    }

    fn is_durable(&self) -> bool {
        self.durable
    }

    fn is_short(&self) -> bool {
        self.short.load(Ordering::Relaxed) || self.has_none()
    }

    fn has_room_for(&mut self, _position: Position, _index: usize, _command: &[u8]) -> bool {
        !self.has_none()
    }

    fn snapshot(&mut self) -> io::Result<SnapshotWriter> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(io::Error::other("no room, says the test"));
        }
        if self.panics.load(Ordering::Relaxed) {
            return Ok(Box::new(|_| panic!("on purpose")));
        }
        self.lists.snapshot()
    }

    fn examine(&mut self, _position: Position, _state: &mut dyn Read) -> io::Result<()> {
        if self.narrow.load(Ordering::Relaxed) {
            return Err(io::Error::other("no room for this state, says the test"));
        }
        Ok(())
    }

    fn restore(&mut self, position: Position, reader: &mut dyn Read) -> io::Result<()> {
        assert!(!self.narrow.load(Ordering::Relaxed), "a state was taken without room for it");
        if let Some(gate) = &self.gate {
            gate.reached.store(true, Ordering::Relaxed);
            eventually("the test lets it go on", || {
                gate.open.load(Ordering::Relaxed).then_some(())
            });
        }
        std::thread::sleep(self.slow);
        if self.fails {
            return Err(io::Error::other("the medium is broken, says the test"));
        }
        self.lists.restore(position, reader)
    }

    fn query(&mut self, query: &[u8], reply: &mut Vec<u8>) {
        self.lists.query(query, reply);
    }
}

pub type Provider = fn() -> Arc<dyn Device>;

pub fn shm() -> Arc<dyn Device> {
    ShmDevice::open(ShmConfig::default()).unwrap()
}

/// Members that live in this process alone.
pub fn process() -> Arc<dyn Device> {
    ShmDevice::in_process(ShmConfig::default()).unwrap()
}

pub fn tcp() -> Arc<dyn Device> {
    TcpDevice::open(TcpConfig::default()).unwrap()
}

pub struct Cluster {
    pub provider: Provider,
    pub home: tempfile::TempDir,
    pub layout: Layout,
    pub durability: Durability,
    /// Of members that are started from now on.
    pub options: Options,
    /// The run of its machine under which a member is started.
    pub boot: Boot,
    pub transport: Arc<InProcess>,
    /// The machine of the next member that is started.
    pub machine: Option<Held>,
    /// Of all machines.
    pub broken: Arc<AtomicBool>,
    pub servers: Vec<Option<(Server, Handle)>>,
}

pub fn contact(node: usize) -> Contact {
    Contact { address: format!("n{node}"), details: format!("resp {node}").into_bytes() }
}

pub fn id(node: usize) -> NodeId {
    NodeId(node as u16)
}

impl Cluster {
    pub fn new(provider: Provider, servers: usize, layout: Layout) -> Self {
        Self::at(provider, servers, layout, Durability::Process)
    }

    pub fn at(provider: Provider, servers: usize, layout: Layout, durability: Durability) -> Self {
        let boot = Boot::named("first");
        let home = tempfile::tempdir().unwrap();
        let transport = Arc::default();
        let (machine, none) = (None, Vec::new());
        let broken = Arc::default();
        let mut cluster = Self {
            provider,
            home,
            layout,
            durability,
            options: Options::default(),
            boot,
            transport,
            machine,
            broken,
            servers: none,
        };
        let members: Vec<_> = (0..servers).map(|node| (id(node), contact(node))).collect();
        for node in 0..servers {
            cluster.create(node, &members);
            cluster.start(node);
        }
        cluster
    }

    pub fn path(&self, node: usize) -> std::path::PathBuf {
        self.home.path().join(node.to_string())
    }

    pub fn create(&mut self, node: usize, members: &[(NodeId, Contact)]) {
        let founding = Founding {
            cluster: CLUSTER,
            id: id(node),
            layout: self.layout,
            sessions: 64,
            members: members.to_vec(),
        };
        Home::create(&self.path(node), &founding, self.durability).unwrap();
    }

    pub fn start(&mut self, node: usize) {
        let home = self.open(node).unwrap();
        let transport: Arc<dyn Transport> = self.transport.clone();
        let config = Config::new((self.provider)(), transport, contact(node));
        let config = Config { options: self.options, ..config };
        let mut machine = self.machine.take().unwrap_or_default();
        machine.broken = Arc::clone(&self.broken);
        let started = Server::start(home, config, machine).unwrap();
        self.transport.add(&format!("n{node}"), &started.1);
        if self.servers.len() <= node {
            self.servers.resize_with(node + 1, || None);
        }
        self.servers[node] = Some(started);
    }

    /// A member's home. One that has just ended may still be writing a snapshot there.
    pub fn open(&self, node: usize) -> Result<Home, HomeError> {
        eventually("the home is free", || {
            match Home::open_under(&self.path(node), self.durability, &self.boot) {
                Err(error) if error.is_retryable() => None,
                opened => Some(opened),
            }
        })
    }

    pub fn stop(&mut self, node: usize) {
        self.transport.remove(&format!("n{node}"));
        let (server, _) = self.servers[node].take().unwrap();
        server.stop().unwrap();
    }

    pub fn handle(&self, node: usize) -> &Handle {
        &self.servers[node].as_ref().unwrap().1
    }

    pub fn running(&self) -> Vec<usize> {
        (0..self.servers.len()).filter(|node| self.servers[*node].is_some()).collect()
    }

    pub fn leader(&self) -> usize {
        let leads = |node: &usize| self.handle(*node).status().role == RoleName::Leader;
        eventually("a leader", || self.running().into_iter().find(leads))
    }

    /// Asks the leader of the moment until it is done: on a loaded machine the member that led a moment
    /// ago may lead no more.
    pub fn at_leader<T>(&self, what: &str, ask: impl Fn(&Handle) -> Result<T, Refusal>) -> T {
        eventually(what, || match ask(self.handle(self.leader())) {
            Ok(answer) => Some(answer),
            Err(refusal) if refusal.is_retryable() => None,
            Err(refusal) => panic!("{what}: {refusal}"),
        })
    }

    /// Stops a member that does not lead once the first entry is there, appends without it up to
    /// entry `last`, and tells its number.
    pub fn leave_behind(&mut self, last: u32) -> usize {
        let leader = self.leader();
        let away = (0..3).find(|node| *node != leader).unwrap();
        self.append(NO_SESSION, 0, &machine::append(1, 1));
        self.stop(away);
        for item in 2..=last {
            self.append(NO_SESSION, 0, &machine::append(1, item));
        }
        away
    }

    /// Appends an item that its list does not have, at the leader of the moment, once: outside a session
    /// one whose answer was lost may be there, and is looked for before it is appended again.
    pub fn append(&self, session: u64, sequence: u64, bytes: &[u8]) -> u64 {
        eventually("an append", || {
            match self.handle(self.leader()).call(session, sequence, bytes.to_vec(), LIMIT) {
                Ok(reply) => Some(u64::from_le_bytes(reply.bytes.try_into().unwrap())),
                Err(Refusal::Lost | Refusal::TimedOut) if session == NO_SESSION => {
                    self.place_of(bytes)
                }
                Err(refusal) if refusal.is_retryable() => None,
                Err(refusal) => panic!("an append: {refusal}"),
            }
        })
    }

    /// How long the list was once the item of an append was in it, if it is.
    fn place_of(&self, bytes: &[u8]) -> Option<u64> {
        let (key, item) = (bytes[0], u32::from_le_bytes(bytes[1..5].try_into().unwrap()));
        let linearizable = Consistency::Linearizable;
        let answer = self.at_leader("a list", |leader| leader.read(vec![key], linearizable, LIMIT));
        let index = items(&answer).iter().position(|held| *held == item)?;
        Some(index as u64 + 1)
    }

    /// Of a member that restores a snapshot: once it has.
    pub fn list(&self, node: usize, key: u8) -> Vec<u32> {
        eventually("a list", || {
            match self.handle(node).read(vec![key], Consistency::Stale, LIMIT) {
                Ok(answer) => Some(items(&answer)),
                Err(Refusal::Full) => None,
                Err(refusal) => panic!("a list: {refusal}"),
            }
        })
    }
}

pub fn eventually<T>(what: &str, mut question: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(start.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn small() -> Layout {
    Layout::new(64, 2048).unwrap()
}
