//! Servers on threads of their own, found through a transport inside the process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_fabric::Device;
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_replicated_log::{
    ClusterId, Config, Consistency, Contact, Durability, Founding, Handle, Home, InProcess, Layout,
    NO_SESSION, NodeId, Position, Refusal, RoleName, Server, SnapshotWriter, StateMachine,
    Transport,
};
use beeline_verify_log::lists::{Lists, items, padded_append};
use beeline_verify_log::machine::append;

const CLUSTER: ClusterId = ClusterId(0xabc);
const LIMIT: Duration = Duration::from_secs(20);

/// Lists whose restoring takes as long as the test wants.
#[derive(Default)]
struct Held {
    lists: Lists,
    /// What they say to have when they are opened, as a machine that is durable by itself does.
    has: Position,
    gate: Option<Arc<Gate>>,
    /// How long restoring takes.
    slow: Duration,
    /// Snapshots fail while it is set, as on a full disk.
    broken: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct Gate {
    reached: AtomicBool,
    open: AtomicBool,
}

impl StateMachine for Held {
    fn apply(&mut self, position: Position, command: &[u8], reply: &mut Vec<u8>) {
        self.lists.apply(position, command, reply);
    }

    fn applied(&self) -> Position {
        self.has
    }

    fn snapshot(&mut self) -> io::Result<SnapshotWriter> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(io::Error::other("no room, says the test"));
        }
        self.lists.snapshot()
    }

    fn restore(&mut self, position: Position, reader: &mut dyn Read) -> io::Result<()> {
        if let Some(gate) = &self.gate {
            gate.reached.store(true, Ordering::Relaxed);
            eventually("the test lets it go on", || {
                gate.open.load(Ordering::Relaxed).then_some(())
            });
        }
        std::thread::sleep(self.slow);
        self.lists.restore(position, reader)
    }

    fn query(&mut self, query: &[u8], reply: &mut Vec<u8>) {
        self.lists.query(query, reply);
    }
}

type Provider = fn() -> Arc<dyn Device>;

fn shm() -> Arc<dyn Device> {
    ShmDevice::open(ShmConfig::default()).unwrap()
}

fn tcp() -> Arc<dyn Device> {
    TcpDevice::open(TcpConfig::default()).unwrap()
}

struct Cluster {
    provider: Provider,
    home: tempfile::TempDir,
    layout: Layout,
    transport: Arc<InProcess>,
    /// The machine of the next member that is started.
    machine: Option<Held>,
    /// Of all machines.
    broken: Arc<AtomicBool>,
    servers: Vec<Option<(Server, Handle)>>,
}

fn contact(node: usize) -> Contact {
    Contact { address: format!("n{node}"), details: format!("resp {node}").into_bytes() }
}

fn id(node: usize) -> NodeId {
    NodeId(node as u16)
}

impl Cluster {
    fn new(provider: Provider, servers: usize, layout: Layout) -> Self {
        let home = tempfile::tempdir().unwrap();
        let transport = Arc::default();
        let (machine, none) = (None, Vec::new());
        let broken = Arc::default();
        let mut cluster =
            Self { provider, home, layout, transport, machine, broken, servers: none };
        let members: Vec<_> = (0..servers).map(|node| (id(node), contact(node))).collect();
        for node in 0..servers {
            cluster.create(node, &members);
            cluster.start(node);
        }
        cluster
    }

    fn path(&self, node: usize) -> std::path::PathBuf {
        self.home.path().join(node.to_string())
    }

    fn create(&mut self, node: usize, members: &[(NodeId, Contact)]) {
        let founding = Founding {
            cluster: CLUSTER,
            id: id(node),
            layout: self.layout,
            sessions: 64,
            members: members.to_vec(),
        };
        Home::create(&self.path(node), &founding, Durability::Process).unwrap();
    }

    fn start(&mut self, node: usize) {
        let home = Home::open(&self.path(node), Durability::Process).unwrap();
        let transport: Arc<dyn Transport> = self.transport.clone();
        let config = Config::new((self.provider)(), transport, contact(node));
        let mut machine = self.machine.take().unwrap_or_default();
        machine.broken = Arc::clone(&self.broken);
        let started = Server::start(home, config, machine).unwrap();
        self.transport.add(&format!("n{node}"), &started.1);
        if self.servers.len() <= node {
            self.servers.resize_with(node + 1, || None);
        }
        self.servers[node] = Some(started);
    }

    fn stop(&mut self, node: usize) {
        self.transport.remove(&format!("n{node}"));
        let (server, _) = self.servers[node].take().unwrap();
        server.stop().unwrap();
    }

    fn handle(&self, node: usize) -> &Handle {
        &self.servers[node].as_ref().unwrap().1
    }

    fn running(&self) -> Vec<usize> {
        (0..self.servers.len()).filter(|node| self.servers[*node].is_some()).collect()
    }

    fn leader(&self) -> usize {
        let leads = |node: &usize| self.handle(*node).status().role == RoleName::Leader;
        eventually("a leader", || self.running().into_iter().find(leads))
    }

    /// Asks whoever leads until it is done.
    fn append(&self, session: u64, sequence: u64, bytes: &[u8]) -> u64 {
        eventually("an append", || {
            let handle = self.handle(self.leader());
            match handle.call(session, sequence, bytes.to_vec(), LIMIT) {
                Ok(reply) => Some(u64::from_le_bytes(reply.bytes.try_into().unwrap())),
                Err(refusal) if refusal.is_retryable() => None,
                Err(refusal) => panic!("{refusal}"),
            }
        })
    }

    fn list(&self, node: usize, key: u8) -> Vec<u32> {
        let answer = self.handle(node).read(vec![key], Consistency::Stale, LIMIT).unwrap();
        items(&answer)
    }
}

fn eventually<T>(what: &str, mut question: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(start.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn small() -> Layout {
    Layout::new(64, 2048).unwrap()
}

fn agrees_and_survives_a_restart_of_all(provider: Provider) {
    let mut cluster = Cluster::new(provider, 3, small());
    let leader = cluster.leader();
    let session = cluster.handle(leader).session(LIMIT).unwrap();
    for item in 1..=20 {
        assert_eq!(cluster.append(session, item, &append(1, item as u32)), item);
    }
    let wanted: Vec<u32> = (1..=20).collect();
    for node in 0..3 {
        eventually("every server has it", || (cluster.list(node, 1) == wanted).then_some(()));
    }
    let follower = (0..3).find(|node| *node != cluster.leader()).unwrap();
    let told = eventually("a follower has seen the leader lead", || {
        match cluster.handle(follower).call(session, 21, append(1, 21), LIMIT) {
            Err(Refusal::NotLeader { leader }) => leader.map(|(_, told)| told),
            other => panic!("{other:?}"),
        }
    });
    assert!(told.details.starts_with(b"resp"), "a follower tells how the leader is reached");
    for node in 0..3 {
        cluster.stop(node);
    }
    for node in 0..3 {
        cluster.start(node);
    }
    // The session, its reply and the list are there.
    let repeated = cluster.handle(cluster.leader()).call(session, 20, append(1, 20), LIMIT);
    assert!(repeated.is_ok_and(|reply| reply.repeated));
    assert_eq!(cluster.append(session, 21, &append(1, 21)), 21);
}

#[test]
fn three_servers_agree_and_survive_a_restart_over_shm() {
    agrees_and_survives_a_restart_of_all(shm);
}

#[test]
fn three_servers_agree_and_survive_a_restart_over_tcp() {
    agrees_and_survives_a_restart_of_all(tcp);
}

fn catches_up_by_snapshot(provider: Provider) {
    let mut cluster = Cluster::new(provider, 3, small());
    let leader = cluster.leader();
    let away = (0..3).find(|node| *node != leader).unwrap();
    cluster.append(NO_SESSION, 0, &append(1, 1));
    cluster.stop(away);
    for item in 2..=500 {
        cluster.append(NO_SESSION, 0, &padded_append(1, item, 1000));
    }
    cluster.start(away);
    let wanted: Vec<u32> = (1..=500).collect();
    eventually("the server is back", || (cluster.list(away, 1) == wanted).then_some(()));
    let counters = cluster.handle(away).status().counters;
    assert_eq!(counters.snapshots_installed, 1, "{counters:?}");
    // And takes part again.
    let other = (0..3).find(|node| *node != leader && *node != away).unwrap();
    cluster.stop(other);
    cluster.append(NO_SESSION, 0, &append(1, 501));
}

#[test]
fn who_missed_more_than_the_ring_gets_a_snapshot_over_shm() {
    catches_up_by_snapshot(shm);
}

#[test]
fn who_missed_more_than_the_ring_gets_a_snapshot_over_tcp() {
    catches_up_by_snapshot(tcp);
}

/// Restoring keeps the member's thread: it votes for nobody, answers nobody and confirms nothing,
/// as if it were down. The others go on under the same leader.
#[test]
fn a_member_that_restores_a_snapshot_for_long_holds_nobody_up() {
    let mut cluster = Cluster::new(shm, 3, small());
    let leader = cluster.leader();
    let away = (0..3).find(|node| *node != leader).unwrap();
    cluster.append(NO_SESSION, 0, &append(1, 1));
    cluster.stop(away);
    for item in 2..=300 {
        cluster.append(NO_SESSION, 0, &padded_append(1, item, 1000));
    }
    let gate = Arc::<Gate>::default();
    cluster.machine = Some(Held { gate: Some(Arc::clone(&gate)), ..Held::default() });
    cluster.start(away);
    eventually("it restores", || gate.reached.load(Ordering::Relaxed).then_some(()));
    let term = cluster.handle(leader).status().term;
    // Longer than any patience, and more than a ring.
    let started = Instant::now();
    let mut items = 300;
    while items < 450 || started.elapsed() < Duration::from_millis(800) {
        items += 1;
        cluster.append(NO_SESSION, 0, &append(1, items));
    }
    let status = cluster.handle(leader).status();
    assert_eq!((status.role, status.term), (RoleName::Leader, term));
    gate.open.store(true, Ordering::Relaxed);
    let wanted: Vec<u32> = (1..=items).collect();
    eventually("the server is back", || (cluster.list(away, 1) == wanted).then_some(()));
}

/// What a client that always writes sees of a ring that cannot be snapshotted: it waits a little,
/// then hears why, and nothing that was acknowledged is lost or repeated.
#[test]
fn a_full_log_says_why_and_goes_on_once_snapshots_can_be_written() {
    let cluster = Cluster::new(shm, 3, small());
    let leader = cluster.leader();
    cluster.append(NO_SESSION, 0, &append(1, 1));
    cluster.broken.store(true, Ordering::Relaxed);
    let mut items = 1;
    let refused = loop {
        match cluster.handle(leader).call(NO_SESSION, 0, append(1, items + 1), LIMIT) {
            Ok(_) => items += 1,
            Err(refusal) => break refusal,
        }
        assert!(items < 200, "the ring has 64 slots");
    };
    let said = refused.to_string();
    assert!(matches!(refused, Refusal::LogFull { .. }), "{said}");
    assert!(said.contains("the log is full") && said.contains("no room, says the test"), "{said}");
    assert!(items >= 32, "{items}: the ring was used before");
    // At once, now that it is known.
    let started = Instant::now();
    let again = cluster.handle(leader).call(NO_SESSION, 0, append(1, items + 1), LIMIT);
    assert!(matches!(again, Err(Refusal::LogFull { .. })), "{again:?}");
    assert!(started.elapsed() < LIMIT / 2);
    // Reads need no room.
    assert_eq!(cluster.list(leader, 1).len(), items as usize);
    cluster.broken.store(false, Ordering::Relaxed);
    eventually("it goes on", || {
        match cluster.handle(cluster.leader()).call(NO_SESSION, 0, append(1, items + 1), LIMIT) {
            Ok(_) => Some(()),
            Err(Refusal::LogFull { .. }) => None,
            Err(other) => panic!("{other}"),
        }
    });
    let wanted: Vec<u32> = (1..=items + 1).collect();
    for node in 0..3 {
        eventually("all of it is there", || (cluster.list(node, 1) == wanted).then_some(()));
    }
}

/// Restoring takes much longer than the ring takes to come round at the speed of the writers.
#[test]
fn who_takes_in_a_snapshot_while_others_write_on_catches_up() {
    const RESTORING: Duration = Duration::from_millis(1500);
    let mut cluster = Cluster::new(shm, 3, Layout::new(256, 2048).unwrap());
    let leader = cluster.leader();
    let away = (0..3).find(|node| *node != leader).unwrap();
    cluster.stop(away);
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..2)
        .map(|key| {
            let (handle, stop) = (cluster.handle(leader).clone(), Arc::clone(&stop));
            std::thread::spawn(move || {
                let (mut written, mut longest) = (0_u32, Duration::ZERO);
                while !stop.load(Ordering::Relaxed) {
                    let started = Instant::now();
                    let command = append(key, written + 1);
                    handle.call(NO_SESSION, 0, command, LIMIT).unwrap();
                    longest = longest.max(started.elapsed());
                    written += 1;
                }
                (written, longest)
            })
        })
        .collect();
    let status = |cluster: &Cluster| cluster.handle(leader).status();
    eventually("more than two rings", || (status(&cluster).committed.0 > 600).then_some(()));
    cluster.machine = Some(Held { slow: RESTORING, ..Held::default() });
    cluster.start(away);
    let before = status(&cluster);
    eventually("it is back", || {
        let status = status(&cluster);
        let member = status.members.iter().find(|member| member.id == id(away)).cloned();
        member.and_then(|member| member.lag).filter(|lag| *lag < 128)
    });
    let after = status(&cluster);
    stop.store(true, Ordering::Relaxed);
    let written: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
    let meanwhile = after.committed.since(before.committed);
    println!(
        "{meanwhile} entries were committed meanwhile, {} snapshots sent; written, and longest wait \
         of a writer: {written:?}",
        after.counters.snapshots_sent - before.counters.snapshots_sent
    );
    assert!(meanwhile > 50, "writers went on: {meanwhile}");
    for (key, (written, _)) in written.iter().enumerate() {
        let wanted: Vec<u32> = (1..=*written).collect();
        let is_there = || (cluster.list(away, key as u8) == wanted).then_some(());
        eventually("all of it is there", is_there);
    }
}

/// As after a loss of power that took the word of what is committed, which is written without being
/// persisted, and not what the machine had persisted.
#[test]
fn a_machine_that_is_further_on_than_its_log_takes_the_place_a_snapshot_gives_it() {
    let mut cluster = Cluster::new(shm, 3, small());
    let leader = cluster.leader();
    let away = (0..3).find(|node| *node != leader).unwrap();
    cluster.append(NO_SESSION, 0, &append(1, 1));
    cluster.stop(away);
    for item in 2..=300 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    // What a status says may be a moment old.
    let has = Position(300);
    eventually("the leader tells of all", || {
        (cluster.handle(leader).status().applied == has).then_some(())
    });
    let mut machine = Held { has, ..Held::default() };
    for item in 1..=300 {
        machine.lists.apply(has, &append(1, item), &mut Vec::new());
    }
    cluster.machine = Some(machine);
    cluster.start(away);
    eventually("its log knows as much", || {
        (cluster.handle(away).status().applied >= has).then_some(())
    });
    cluster.append(NO_SESSION, 0, &append(1, 301));
    let wanted: Vec<u32> = (1..=301).collect();
    eventually("nothing is applied twice", || (cluster.list(away, 1) == wanted).then_some(()));
}

#[test]
fn a_leader_that_is_about_to_stop_gives_the_leadership_to_who_lags_least() {
    let mut cluster = Cluster::new(shm, 3, small());
    for item in 1..=3 {
        let leader = cluster.leader();
        cluster.append(NO_SESSION, 0, &append(1, item));
        let (server, _) = cluster.servers[leader].as_ref().unwrap();
        assert!(server.hand_over(LIMIT));
        assert_ne!(cluster.leader(), leader);
        cluster.stop(leader);
        cluster.append(NO_SESSION, 0, &append(2, item));
        cluster.start(leader);
    }
    // Nobody is left to give it to.
    let leader = cluster.leader();
    (0..3).filter(|node| *node != leader).for_each(|node| cluster.stop(node));
    let (server, handle) = cluster.servers[leader].as_ref().unwrap();
    assert!(!server.hand_over(Duration::from_millis(300)));
    // A member that has ended leads nobody.
    let handle = handle.clone();
    cluster.stop(leader);
    assert_eq!((handle.status().role, handle.status().leader), (RoleName::Stopped, None));
}

#[test]
fn members_join_leave_and_hand_over_under_load() {
    let mut cluster = Cluster::new(shm, 3, small());
    cluster.leader();
    cluster.create(3, &[]);
    cluster.start(3);
    for item in 1..=100 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    let leader = cluster.handle(cluster.leader());
    leader.join_wait(id(3), contact(3), LIMIT).unwrap();
    assert_eq!(leader.status().members.len(), 4);
    let wanted: Vec<u32> = (1..=100).collect();
    eventually("the joiner has it", || (cluster.list(3, 1) == wanted).then_some(()));
    eventually("the leadership moves", || {
        let leader = cluster.handle(cluster.leader());
        leader.transfer_wait(id(3), LIMIT).ok()
    });
    eventually("the joiner leads", || (cluster.leader() == 3).then_some(()));
    cluster.append(NO_SESSION, 0, &append(1, 101));
    // The leader leaves by itself.
    let left = cluster.handle(3).leave_wait(id(3), LIMIT).unwrap();
    assert!(left > Position(100));
    cluster.append(NO_SESSION, 0, &append(1, 102));
    assert_ne!(cluster.leader(), 3);
    let again = cluster.handle(cluster.leader()).leave_wait(id(3), LIMIT);
    assert!(again.is_ok(), "there is nothing to do");
    let unknown = cluster.handle(cluster.leader()).transfer_wait(id(9), LIMIT);
    assert!(matches!(unknown, Err(Refusal::Membership { .. })), "{unknown:?}");
}

#[test]
fn a_server_of_another_cluster_and_one_with_a_taken_name_are_told() {
    let mut cluster = Cluster::new(shm, 3, small());
    cluster.leader();
    let problem = |cluster: &Cluster, node: usize, of: usize| {
        eventually("a problem is told", || {
            let members = cluster.handle(node).status().members;
            members.into_iter().find(|member| member.id == id(of))?.problem
        })
    };
    // Server 2 is set up anew, for another cluster, under the same name and address.
    cluster.stop(2);
    std::fs::remove_dir_all(cluster.path(2)).unwrap();
    let members: Vec<_> = (0..3).map(|node| (id(node), contact(node))).collect();
    let set_up = |cluster: ClusterId, path: &Path, layout| {
        let members = members.clone();
        let founding = Founding { cluster, id: id(2), layout, sessions: 64, members };
        Home::create(path, &founding, Durability::Process).unwrap();
    };
    set_up(ClusterId(9), &cluster.path(2), cluster.layout);
    cluster.start(2);
    assert!(problem(&cluster, 2, 0).contains("cluster"), "{}", problem(&cluster, 2, 0));
    // The same for the right cluster: it lost what it had promised.
    cluster.stop(2);
    std::fs::remove_dir_all(cluster.path(2)).unwrap();
    set_up(CLUSTER, &cluster.path(2), cluster.layout);
    cluster.start(2);
    let told = eventually("a taken name is told", || {
        Some(problem(&cluster, 2, 0)).filter(|problem| problem.contains("taken"))
    });
    assert!(told.contains("n2"), "{told}");
    cluster.append(NO_SESSION, 0, &append(1, 1));
}

#[path = "../examples/counter.rs"]
mod counter;

#[test]
fn the_example_runs() {
    counter::main().unwrap();
}

#[test]
fn a_command_that_does_not_fit_is_refused() {
    let cluster = Cluster::new(shm, 1, small());
    let handle = cluster.handle(cluster.leader());
    let refused = handle.call(NO_SESSION, 0, vec![0; 4000], LIMIT);
    assert!(matches!(refused, Err(Refusal::TooLarge { .. })), "{refused:?}");
    let longest = cluster.layout.max_payload_bytes() - 24;
    handle.call(NO_SESSION, 0, padded_append(1, 1, longest / 8 * 8 - 5), LIMIT).unwrap();
}
