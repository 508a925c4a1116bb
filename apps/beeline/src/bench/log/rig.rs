//! A cluster of threads: followers on threads of their own, the leader turned by the caller.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_fabric_open::open;
use beeline_replicated_log::{
    ClusterId, Config, Contact, Durability, Founding, Handle, Home, InProcess, Layout, Node,
    NodeId, RoleName, Server, Transport,
};

use super::machine::Counter;

const PATIENCE: Duration = Duration::from_secs(20);

/// Left alone for so long, a leader may have been replaced.
const ABSENCE: Duration = Duration::from_millis(50);

/// Turned for so long, a leader of before knows whether it still is one: some heartbeats.
const SETTLING: Duration = Duration::from_millis(300);

/// A cluster whose member 0 leads, on the calling thread.
pub struct Rig {
    /// The leader.
    pub node: Node<Counter>,
    /// The way to it.
    pub handle: Handle,
    start: Instant,
    /// When it was last turned, from `start`.
    turned_ns: u64,
    /// The ways to the others.
    others: Vec<Handle>,
    _followers: Vec<Server>,
    _data: Data,
}

/// A folder that goes with it.
pub struct Data(std::path::PathBuf);

impl Data {
    /// A new folder below `parent`.
    pub fn new(parent: &std::path::Path) -> anyhow::Result<Self> {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let next = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = parent.join(format!("beeline-bench-log-{}-{next}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self(path))
    }

    /// Where it is.
    pub fn path(&self) -> &std::path::Path {
        &self.0
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Rig {
    /// `members` over `fabric`, data below `data`; entries of up to `bytes`.
    pub fn new(
        fabric: &str,
        data: &std::path::Path,
        members: usize,
        bytes: usize,
    ) -> anyhow::Result<Self> {
        let data = Data::new(data)?;
        let directory = Arc::new(InProcess::default());
        let slot_bytes = (bytes as u64 + 128).next_multiple_of(64).max(2048);
        let layout = Layout::new(4096, slot_bytes)?;
        let contact = |node: usize| Contact { address: node.to_string(), details: Vec::new() };
        let all: Vec<_> = (0..members).map(|node| (NodeId(node as u16), contact(node))).collect();
        let configure = |node: usize| -> anyhow::Result<(Home, Config)> {
            let folder = data.path().join(node.to_string());
            let founding = Founding {
                cluster: ClusterId(1),
                id: NodeId(node as u16),
                layout,
                sessions: 64,
                members: all.clone(),
            };
            Home::create(&folder, &founding, Durability::Process)?;
            let home = Home::open(&folder, Durability::Process)?;
            let transport: Arc<dyn Transport> = directory.clone();
            let config = Config::new(open(fabric)?, transport, contact(node));
            Ok((home, config))
        };
        let register = |node: usize, handle: &Handle| directory.add(&node.to_string(), handle);
        let mut followers = Vec::new();
        let mut others = Vec::new();
        for node in 1..members {
            let (home, config) = configure(node)?;
            let (server, handle) = Server::start(home, config, Counter::default())?;
            register(node, &handle);
            followers.push(server);
            others.push(handle);
        }
        let (home, config) = configure(0)?;
        let (node, handle) = Node::open(home, config, Counter::default())?;
        register(0, &handle);
        let start = Instant::now();
        let mut rig =
            Self { node, handle, start, turned_ns: 0, others, _followers: followers, _data: data };
        rig.lead()?;
        Ok(rig)
    }

    /// Makes sure that member 0 leads and writes to all others. While nobody turned it, the others
    /// may have elected another: who that is hands over.
    pub fn lead(&mut self) -> anyhow::Result<()> {
        let start = Instant::now();
        let mut asked = start;
        // What happened meanwhile is heard of first.
        let absent = self.start.elapsed().saturating_sub(Duration::from_nanos(self.turned_ns));
        while absent > ABSENCE && start.elapsed() < SETTLING {
            self.turn()?;
        }
        while self.node.role() != RoleName::Leader {
            self.turn()?;
            anyhow::ensure!(start.elapsed() < PATIENCE, "no leader within {PATIENCE:?}");
            if asked.elapsed() > Duration::from_millis(200) {
                asked = Instant::now();
                let leader = self.others.iter().find(|at| at.status().role == RoleName::Leader);
                if let Some(leader) = leader {
                    leader.transfer(NodeId(0), |_| ());
                }
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        // Until all followers are written to.
        while self.handle.status().members.iter().any(|member| member.confirmed.is_none()) {
            self.turn()?;
            anyhow::ensure!(start.elapsed() < PATIENCE, "a follower is not reached");
        }
        Ok(())
    }

    /// One turn of the leader.
    pub fn turn(&mut self) -> anyhow::Result<bool> {
        let now_ns = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.turned_ns = now_ns;
        Ok(self.node.turn(now_ns)?)
    }
}
