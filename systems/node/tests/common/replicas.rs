//! Replicated nodes over a log in memory, whose leader and whose faults the test decides.

use std::collections::HashMap;
use std::io::{Cursor, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_node::replicated::log::{Done, Log, LogMember, LogRole, LogState, Order, Refused};
use beeline_node::{Node, NodeConfig, ReplicationOptions};
use beeline_pmem::{Durability, PoolKind, PoolOptions};
use beeline_replicated_log::{Position, StateMachine as _};
use beeline_replicated_service::{Load, Machine};

use super::{Client, PATIENCE, config};

pub const CLUSTER: u64 = 0xBEE;
pub const LIMIT: usize = 64 << 10;

pub enum Awaited {
    Reply(Done<Vec<u8>>),
    Barrier(Done<u64>),
}

/// Of which member, a unit or none for a barrier, and how the asker is told.
pub type Forwarded = (u16, Option<Vec<u8>>, Done<Vec<u8>>);

#[derive(Default)]
pub struct State {
    pub leader: Option<u16>,
    pub entries: Vec<Vec<u8>>,
    pub members: Vec<LogMember>,
    /// Per member: what waits for a position to be applied there.
    pub awaited: HashMap<u16, Vec<(u64, Awaited)>>,
    pub applied: HashMap<u16, u64>,
    pub stopped: Vec<u16>,
    /// There is no room, and no snapshot can be written.
    pub full: bool,
    /// A member of it is about to have no room.
    pub short: bool,
    /// Snapshots to be installed: at which member, of which position.
    pub restores: Vec<(u16, u64, Vec<u8>)>,
    /// Members that shall write a snapshot to a slow disk, and what became of them.
    pub snapshots: Vec<u16>,
    pub written: Vec<Result<(), String>>,
    /// The leader cannot commit: what it is asked for waits.
    pub silent: bool,
    /// Of which member, a command or none for a barrier, and what waits for it.
    pub kept: Vec<(u16, Option<Vec<u8>>, Awaited)>,
    /// What members ask of one another.
    pub forwarded: Vec<Forwarded>,
    /// Each of so many next proposals is agreed on, and its proposer is told that it may not be.
    pub lost: u32,
    /// How long members that start from now on wait for the log; `None`: longer than any busy machine
    /// keeps a thread from its processor.
    pub request_timeout: Option<Duration>,
    /// Members that start from now on commit each batch by itself, as at durability `power`.
    pub ordered_commits: bool,
}

/// The log of all members.
#[derive(Default)]
pub struct Cluster {
    pub state: Mutex<State>,
    pub changed: Condvar,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Cluster")
    }
}

impl Cluster {
    pub fn lead(&self, leader: Option<u16>) {
        self.state.lock().unwrap().leader = leader;
    }

    /// The leader commits again, first of all what waits.
    pub fn speak(&self) {
        let mut state = self.state.lock().unwrap();
        state.silent = false;
        for (id, command, awaited) in std::mem::take(&mut state.kept) {
            state.entries.extend(command);
            let position = state.entries.len() as u64;
            state.awaited.entry(id).or_default().push((position, awaited));
        }
        self.changed.notify_all();
    }

    pub fn entries(&self) -> u64 {
        self.state.lock().unwrap().entries.len() as u64
    }
}

/// One member's end of it.
#[derive(Debug)]
pub struct End {
    pub id: u16,
    pub cluster: Arc<Cluster>,
}

impl Log for End {
    fn propose(&self, command: Vec<u8>, done: Done<Vec<u8>>) {
        let mut state = self.cluster.state.lock().unwrap();
        if state.leader != Some(self.id) {
            drop(state);
            return done(Err(Refused::NotLeader));
        }
        if command.len() > LIMIT {
            drop(state);
            return done(Err(Refused::TooLarge { bytes: command.len(), limit: LIMIT }));
        }
        if state.full {
            drop(state);
            let reason = "the log is full, and no snapshot can be written: no room".into();
            return done(Err(Refused::Invalid { reason }));
        }
        if state.silent {
            return state.kept.push((self.id, Some(command), Awaited::Reply(done)));
        }
        if state.lost > 0 {
            // As two proposals of one unit do that were both agreed on.
            state.entries.push(command.clone());
            state.entries.push(command);
            state.lost -= 1;
            drop(state);
            self.cluster.changed.notify_all();
            return done(Err(Refused::Lost));
        }
        state.entries.push(command);
        let position = state.entries.len() as u64;
        state.awaited.entry(self.id).or_default().push((position, Awaited::Reply(done)));
        self.cluster.changed.notify_all();
    }

    fn barrier(&self, done: Done<u64>) {
        let mut state = self.cluster.state.lock().unwrap();
        if state.leader != Some(self.id) {
            drop(state);
            return done(Err(Refused::NotLeader));
        }
        if state.silent {
            return state.kept.push((self.id, None, Awaited::Barrier(done)));
        }
        let position = state.entries.len() as u64;
        state.awaited.entry(self.id).or_default().push((position, Awaited::Barrier(done)));
        self.cluster.changed.notify_all();
    }

    fn forward(&self, to: u16, load: Load<'_>, _limit: Duration, done: Done<Vec<u8>>) {
        let mut state = self.cluster.state.lock().unwrap();
        if state.stopped.contains(&to) {
            drop(state);
            return done(Err(Refused::Lost));
        }
        let unit = match load {
            Load::Unit(unit) => Some(unit.to_vec()),
            Load::Barrier => None,
        };
        state.forwarded.push((to, unit, done));
        self.cluster.changed.notify_all();
    }

    fn state(&self) -> LogState {
        let state = self.cluster.state.lock().unwrap();
        let leads = state.leader == Some(self.id);
        LogState {
            cluster: CLUSTER,
            id: self.id,
            role: if leads { LogRole::Leader } else { LogRole::Follower },
            term: 1,
            leader: state.leader,
            committed: state.entries.len() as u64,
            members: state.members.clone(),
            command_limit_bytes: LIMIT,
            ..LogState::default()
        }
    }

    fn is_short(&self) -> bool {
        self.cluster.state.lock().unwrap().short
    }

    fn administer(&self, _order: Order, done: Done<()>) {
        done(Err(Refused::Invalid { reason: "this log takes no orders".into() }));
    }
}

/// Takes 300 ms for each MiB.
pub struct SlowDisk;

impl Write for SlowDisk {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        std::thread::sleep(Duration::from_micros((bytes.len() as u64 * 300_000) >> 20));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Does what another member asks of this one, as its log's thread does.
fn serve(end: &End, machine: &mut Machine, unit: Option<Vec<u8>>, done: Done<Vec<u8>>) {
    match unit {
        None => end.barrier(Box::new(move |passed| {
            done(passed.map(|position| position.to_string().into_bytes()));
        })),
        Some(mut unit) => match machine.stamp(&mut unit) {
            Ok(()) => end.propose(unit, done),
            Err(reason) => done(Err(Refused::Invalid { reason })),
        },
    }
}

/// Applies the log to one machine until stopped.
pub fn apply(cluster: &Arc<Cluster>, id: u16, mut machine: Machine, restored: &AtomicBool) {
    let mut next = machine.applied().0 + 1;
    let mut replies: HashMap<u64, Vec<u8>> = HashMap::new();
    loop {
        let mut state = cluster.state.lock().unwrap();
        if state.stopped.contains(&id) {
            return;
        }
        if let Some(index) = state.forwarded.iter().position(|(to, ..)| *to == id) {
            let (_, unit, done) = state.forwarded.swap_remove(index);
            drop(state);
            serve(&End { id, cluster: Arc::clone(cluster) }, &mut machine, unit, done);
            continue;
        }
        if let Some(index) = state.restores.iter().position(|(to, ..)| *to == id) {
            let (_, position, bytes) = state.restores.swap_remove(index);
            drop(state);
            machine.restore(Position(position), &mut Cursor::new(bytes)).unwrap();
            continue;
        }
        if let Some(index) = state.snapshots.iter().position(|at| *at == id) {
            state.snapshots.swap_remove(index);
            drop(state);
            let (write, cluster) = (machine.snapshot().unwrap(), Arc::clone(cluster));
            std::thread::spawn(move || {
                let written = write(&mut SlowDisk).map_err(|error| error.to_string());
                cluster.state.lock().unwrap().written.push(written);
            });
            continue;
        }
        let end = state.entries.len() as u64;
        let (ready, waiting) = state
            .awaited
            .remove(&id)
            .unwrap_or_default()
            .into_iter()
            .partition(|(position, _)| *position < next);
        state.awaited.insert(id, waiting);
        state.applied.insert(id, next - 1);
        let ready: Vec<(u64, Awaited)> = ready;
        if ready.is_empty() && next > end {
            let patience = Duration::from_millis(100);
            drop(cluster.changed.wait_timeout(state, patience).unwrap());
            continue;
        }
        let commands: Vec<Vec<u8>> = state.entries[next as usize - 1..].to_vec();
        drop(state);
        for (position, awaited) in ready {
            match awaited {
                Awaited::Reply(done) => done(Ok(replies.remove(&position).unwrap())),
                Awaited::Barrier(done) => done(Ok(position)),
            }
        }
        let (mut later, mut settled) = (Vec::new(), Vec::new());
        for command in commands {
            let mut reply = Vec::new();
            if machine.take(Position(next), &command, &mut reply) {
                replies.insert(next, reply);
            } else {
                later.push(next);
            }
            next += 1;
        }
        machine.settle(&mut settled);
        replies.extend(later.into_iter().zip(settled));
        if machine.flush(Position(next - 1)).is_err() {
            // As the log does: the member ends.
            return;
        }
        restored.store(true, Ordering::Relaxed);
    }
}

/// Of a member that starts now.
pub fn options(cluster: &Cluster, id: u16) -> ReplicationOptions {
    let state = cluster.state.lock().unwrap();
    ReplicationOptions {
        cluster: CLUSTER,
        node: id,
        request_timeout: state.request_timeout.unwrap_or(PATIENCE / 2),
        ordered_commits: state.ordered_commits,
    }
}

/// A cluster whose members commit each batch by itself, or not.
pub fn with_commits(ordered_commits: bool) -> Arc<Cluster> {
    let cluster = Arc::new(Cluster::default());
    cluster.state.lock().unwrap().ordered_commits = ordered_commits;
    cluster
}

pub struct Member {
    pub id: u16,
    pub cluster: Arc<Cluster>,
    pub node: Option<Node>,
    pub applier: Option<JoinHandle<()>>,
}

impl Member {
    pub fn start(cluster: &Arc<Cluster>, id: u16, config: NodeConfig) -> Self {
        Self::start_with(cluster, id, config, |_| ())
    }

    pub fn start_with(
        cluster: &Arc<Cluster>,
        id: u16,
        config: NodeConfig,
        prepare: impl FnOnce(&mut Machine),
    ) -> Self {
        let options = options(cluster, id);
        let node = Node::start(&NodeConfig { replication: Some(options), ..config }).unwrap();
        let member = LogMember {
            id,
            resp_address: node.redis_address().unwrap().to_string(),
            connected: true,
            ..LogMember::default()
        };
        {
            let mut state = cluster.state.lock().unwrap();
            state.members.retain(|known| known.id != id);
            state.members.push(member);
            state.stopped.retain(|stopped| *stopped != id);
        }
        let mut machine = node.machine(Vec::new()).unwrap();
        prepare(&mut machine);
        let shared = Arc::clone(cluster);
        let applier = std::thread::spawn(move || {
            apply(&shared, id, machine, &AtomicBool::new(false));
        });
        node.attach(Arc::new(End { id, cluster: Arc::clone(cluster) }));
        Self { id, cluster: Arc::clone(cluster), node: Some(node), applier: Some(applier) }
    }

    pub fn client(&self) -> Client {
        Client::connect(self.node.as_ref().unwrap())
    }

    pub fn catch_up(&self) {
        let started = Instant::now();
        loop {
            let state = self.cluster.state.lock().unwrap();
            if state.applied.get(&self.id) == Some(&(state.entries.len() as u64)) {
                return;
            }
            drop(state);
            assert!(started.elapsed() < PATIENCE, "member {} does not catch up", self.id);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut state = self.cluster.state.lock().unwrap();
        state.stopped.push(self.id);
        let asked = state.forwarded.extract_if(.., |(to, ..)| *to == self.id);
        let asked: Vec<_> = asked.collect();
        drop(state);
        self.cluster.changed.notify_all();
        asked.into_iter().for_each(|(.., done)| done(Err(Refused::Lost)));
        let _ = self.applier.take().unwrap().join();
        let node = self.node.take().unwrap();
        if !std::thread::panicking() {
            let (_, stats) = node.handle().stats().replication.unwrap();
            assert_eq!(stats.divergences, 0, "member {} differs from a leader", self.id);
        }
    }
}

pub fn cluster(shards: usize) -> (Arc<Cluster>, Vec<Member>) {
    cluster_with(shards, None)
}

/// Three members that wait so long for the log.
pub fn cluster_with(shards: usize, timeout: Option<Duration>) -> (Arc<Cluster>, Vec<Member>) {
    let cluster = Arc::new(Cluster::default());
    cluster.state.lock().unwrap().request_timeout = timeout;
    let members = (1..=3).map(|id| Member::start(&cluster, id, config(shards))).collect();
    cluster.lead(Some(1));
    (cluster, members)
}

pub fn ask(client: &mut Client, request: &str, reply: &str) {
    client.send(&format!("{request}\r\n"));
    client.expect(reply);
}

pub fn on_disk(directory: &Path) -> NodeConfig {
    NodeConfig {
        data_directory: directory.to_owned(),
        pool: PoolOptions {
            kind: Some(PoolKind::File),
            durability: Durability::Process,
            segment_bytes: 4 << 20,
            capacity_bytes: 256 << 20,
            ..PoolOptions::default()
        },
        ..config(2)
    }
}
